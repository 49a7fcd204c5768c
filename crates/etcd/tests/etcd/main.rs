//! Against real members of etcd.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

mod basics;
mod campaign;
mod faults;
mod links;
mod local;
mod login;
mod support;
mod tls;

//! Replication to a folder and to a real S3 server, with a network between that fails.

#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

mod back;
mod ground;
mod network;
mod proxy;
mod retention;
mod server;

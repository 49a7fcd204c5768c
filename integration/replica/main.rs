//! Replication against a real S3 server, with a network between that fails.

#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

mod proxy;
mod server;

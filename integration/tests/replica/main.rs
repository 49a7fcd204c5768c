//! Replication to a folder and to a real S3 server, with a network between that fails.

#![allow(clippy::unwrap_used, reason = "tests: a panic is the report")]

#[path = "../support/supervisor.rs"]
mod supervisor;

mod back;
mod elsewhere;
mod forged;
mod ground;
mod network;
mod proxy;
mod retention;
mod rot;
mod server;
mod supervised;

//! Jobs over several machines: real supervisors in network namespaces, real CRIU, a real etcd, VXLAN between them.

#![allow(clippy::unwrap_used, clippy::cast_possible_wrap, clippy::cast_possible_truncation, reason = "tests")]

mod campaign;
mod gpu;
mod lab;
mod launchers;
#[path = "../../../crates/etcd/tests/etcd/links.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod links;
mod local;
mod mistakes;
mod observed;
mod recovery;
mod requests;
mod requeue;
#[path = "../support/standin.rs"]
#[allow(dead_code, reason = "each test binary uses a part")]
mod standin;
#[path = "../../../crates/etcd/tests/etcd/support.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod support;

//! Jobs over several machines: real supervisors in network namespaces, real CRIU, a real etcd, VXLAN between them.

#![allow(clippy::unwrap_used, clippy::cast_possible_wrap, clippy::cast_possible_truncation, reason = "tests")]

mod campaign;
mod lab;
#[path = "../../../crates/etcd/tests/etcd/links.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod links;
mod mistakes;
mod recovery;
mod requests;
#[path = "../../../crates/etcd/tests/etcd/support.rs"]
#[allow(dead_code, reason = "tests of etcd use the rest")]
mod support;

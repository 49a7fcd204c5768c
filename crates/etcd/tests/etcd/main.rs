//! Against real members of etcd.

mod basics;
mod support;

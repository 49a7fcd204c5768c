//! A job over several machines: this supervisor's connection to the coordinator, etcd.
//!
//! What each member does is decided in [`rekindle_group`]; the supervisor carries it out. This module connects them
//! with etcd: `keys` stores the documents as keys, and `session` is the thread that renews the membership, follows the
//! group and writes.

mod keys;
mod node;
mod session;

pub use node::Node;
pub use session::{Identity, Membership, Session, Told};

//! A job over several machines: this supervisor's connection to the coordinator, etcd.
//!
//! What each member does is decided in [`rekindle_group`]; the supervisor carries it out. Here is what is between them and
//! etcd: the documents as keys (`keys`), and the thread that keeps the membership, follows the group and writes
//! (`session`).

mod keys;
mod node;
mod session;

pub use node::Node;
pub use session::{Identity, Membership, Session, Told};

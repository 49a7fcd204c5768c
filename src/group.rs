//! A job over several machines: this supervisor's connection to the coordinator, etcd.
//!
//! What each member does is decided in [`rekindle_group`]; the supervisor carries it out. This module connects them
//! with etcd: `coordinator` is where it is, `keys` stores the documents as keys, and `session` is the thread that renews the membership, follows the
//! group and writes. `layout` is the job's network, `turn` this member's part in a group snapshot,
//! `board` what the machines tell each other about NCCL meanwhile, and `start_signal` what a restored job waits for.

mod board;
mod coordinator;
mod keys;
mod layout;
mod node;
mod session;
mod start_signal;
mod turn;

pub use board::Board;
pub use coordinator::{AddressFile, Coordinator, OwnEtcd};
pub(crate) use coordinator::{NoFirst, NoOwnAddress, own_address, wait_for_address};
pub(crate) use keys::{PREFIX, of_member, prefix};
pub use layout::{KnownNames, Layout, Underlay};
#[cfg(test)]
pub(crate) use node::any_node;
pub use node::{Disagreement, Node};
pub use session::{CoordinatorEvent, Identity, Loss, Membership, Session};
pub use start_signal::StartSignal;
pub use turn::{Exchange, GroupOrder, Orders, Turn};

//! etcd as the coordinator of a job over several machines, for callers that know nothing of futures.
//!
//! What the callers can rely on:
//!
//! - **Reads are linearizable.** [`Client::get`] has everything that was written before it was called, whichever member answers. A
//!   member without quorum gives no answer.
//! - **A write is done at most once.** If nobody knows whether it was done, the answer is [`Error::Unsure`]. It may even be done
//!   later, so each write needs a condition ([`Compare`]) that fails by then.
//! - **A lease has not expired before [`Lease::sure_until`].** That is counted from the moment a renewal was sent, on a clock that
//!   counts the time in which the machine sleeps.
//! - **A follower sees each revision once, in order** ([`Client::follow`]), through lost connections and dead members. When etcd has
//!   forgotten changes, the follower gets the whole state again.
//! - **One cluster.** A member of another cluster is refused, and so is an etcd that has gone back to an older state.
//!
//! Each client, lease and follower has a thread of its own with its own connections, so that none waits for another. tokio is
//! inside of these threads only.
//!
//! The library is tonic with messages of our own. The crate `etcd-client` needs `protoc` for its build, and brings a web server.

mod check;
mod client;
mod error;
mod follow;
mod handout;
mod lease;
mod local;
mod members;
mod messages;
mod options;
mod runtime;
mod txn;

pub use check::{Facts, MemberFacts, MemberState, SLOW, check};
pub use client::Client;
pub use error::{Error, Result};
pub use follow::{Change, Event, Follower};
pub use handout::Handout;
pub use lease::{Lease, Lost};
pub use local::{Local, LocalOptions};
pub use options::{Options, Secret};
pub use txn::{Compare, Entry, Op, State, Txn, TxnAnswer};

/// The number of a change of etcd's data. One transaction has one.
pub type Revision = u64;

/// The number of a lease.
pub type LeaseId = i64;

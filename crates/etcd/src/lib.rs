//! etcd as the coordinator of a job over several machines, with blocking calls.
//!
//! What the callers can rely on:
//!
//! - **Reads are linearizable.** [`Client::get`] has everything that was written before it was called, whichever member
//!   answers. A member without quorum gives no answer.
//! - **A write is done at most once.** If it is unknown whether it was done, the answer is [`Error::Unsure`]. It may
//!   even be done later, so each write needs a condition ([`Compare`]) that fails by then.
//! - **A lease has not expired before [`Lease::sure_until`].** That time is counted from the sending of a renewal, on a
//!   clock that also counts while the machine sleeps.
//! - **A follower sees each revision once, in order** ([`Client::follow`]), also after lost connections and dead
//!   members. If etcd has forgotten changes, the follower gets the whole state again.
//! - **One cluster.** A member of another cluster is refused. An etcd that has gone back to an older state is refused
//!   too.
//!
//! Each client, lease and follower has its own thread with its own connections, so that none waits for another. tokio
//! runs only in these threads.
//!
//! The library is tonic with our own messages. The crate `etcd-client` needs `protoc` for its build, and contains a web
//! server.

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
mod read;
mod runtime;
mod txn;

pub use check::{Facts, MemberFacts, MemberState, SLOW, check, may_end_leases_early};
pub use client::Client;
pub use error::{Error, Result};
pub use follow::{Change, Event, Follower};
pub use handout::Handout;
pub use lease::{Lease, Lost};
pub use local::{Local, LocalOptions};
pub use options::{Options, Secret};
pub use txn::{Compare, Entry, Op, State, Txn, TxnAnswer};

/// The number of a change of etcd's data: one for each transaction.
pub type Revision = u64;

/// The number of a lease.
pub type LeaseId = i64;

//! The job's requests to its supervisor (docs/job-api.md): the job asks for a snapshot, blocks snapshots, and learns
//! that it was restored.
//!
//! - [`protocol`]: requests and answers, one datagram with one JSON object each.
//! - [`server`]: one thread that reads them; what changes the job's state goes to its owner as a [`Call`].
//!
//! Datagrams, because CRIU refuses a job with a stream connection to the outside; one with a datagram socket, connected to
//! ours or not, with an answer unread in it or not, it dumps (sk-unix.c, `ext_unix_sk`). Answers go to abstract names only:
//! what root would send to a path is led elsewhere by whoever can put a link there.
//!
//! Invariants: nothing here waits for the job, and the work that it can cause in a second is bounded. After a restore
//! the job has its old environment, so the socket has the same path and exists before the job runs.

pub mod protocol;
pub mod server;

use crate::control::protocol::Fault;
use protocol::{Answer, Request};

/// Takes what a request came to.
pub type Reply = Box<dyn FnOnce(Result<Answer, Fault>) + Send>;

/// A request for the owner of the job's state.
pub struct Call {
    /// What is asked.
    pub request: Request,
    /// The life of the job that asks.
    pub life: String,
    /// The process that asks, as the host sees it.
    pub pid: i32,
    /// Where the answer goes.
    pub reply: Reply,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("request", &self.request).field("pid", &self.pid).finish_non_exhaustive()
    }
}

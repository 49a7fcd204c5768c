//! The job's requests to its supervisor (docs/job-api.md): the job asks for a snapshot, blocks snapshots, and learns
//! that it was restored.
//!
//! - [`protocol`]: requests and answers, one datagram with one JSON object each.
//! - [`server`]: one thread that reads them; requests that change the job's state go to its owner as a [`Call`].
//!
//! Datagrams are used because CRIU refuses a job with a stream connection to the outside. It can dump a datagram
//! socket, whether or not it is connected to ours or has an unread answer (sk-unix.c, `ext_unix_sk`). Answers are sent
//! only to abstract names: a path could be redirected by anybody who can create a link there.
//!
//! Invariants: nothing here waits for the job, and the work that it can cause in a second is bounded. After a restore
//! the job has its old environment, so the socket has the same path and exists before the job runs.

pub mod protocol;
pub(crate) mod server;

use crate::control::protocol::Fault;
use protocol::{Answer, Request};

/// Takes the result of a request.
pub(crate) type Reply = Box<dyn FnOnce(Result<Answer, Fault>) + Send>;

/// A request for the owner of the job's state.
pub(crate) struct Call {
    pub(crate) request: Request,
    /// The life of the job that sent it.
    pub(crate) life: String,
    /// The process that sent it, as the host sees it.
    pub(crate) pid: i32,
    /// The receiver of the answer.
    pub(crate) reply: Reply,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("request", &self.request).field("pid", &self.pid).finish_non_exhaustive()
    }
}

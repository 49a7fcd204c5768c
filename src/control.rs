//! A job's control socket: what others may ask its supervisor, and how (docs/control.md).
//!
//! - [`protocol`]: requests and answers, one line of JSON each.
//! - [`address`]: where the socket is, made and reached safely.
//! - [`server`]: one thread for all clients; it never waits for one of them, nor for the supervisor.
//! - [`client`]: the other end, for the commands.
//!
//! Invariant: the thread that owns the job's state is only ever sent a [`Call`]. What a client does, or does not, cannot
//! hold it up.

pub mod address;
pub mod client;
pub mod protocol;
pub mod server;
mod trust;

use protocol::{Answer, Fault, Request};

/// Takes what a request came to. Dropped, it says that the supervisor ended first.
pub type Reply = Box<dyn FnOnce(Result<Answer, Fault>) + Send>;

/// A request, and who waits for its answer.
pub struct Call {
    /// What is asked.
    pub request: Request,
    /// Where the answer goes.
    pub reply: Reply,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("request", &self.request).finish_non_exhaustive()
    }
}

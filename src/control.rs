//! A job's control socket, for requests to its supervisor (docs/control.md).
//!
//! - [`protocol`]: requests and answers, one line of JSON each.
//! - [`address`]: the path of the socket, created and connected to safely.
//! - [`server`]: one thread for all clients; it never waits for a client or for the supervisor.
//! - [`client`]: the client side, for the commands.
//!
//! Invariant: the thread that owns the job's state only receives a [`Call`]. No client can delay it.

pub(crate) mod address;
pub(crate) mod client;
pub mod protocol;
pub mod server;
pub(crate) mod trust;

use protocol::{Answer, Fault, Request};

/// Takes the result of a request. If it is dropped, the answer is that the supervisor ended first.
pub type Reply = Box<dyn FnOnce(Result<Answer, Fault>) + Send>;

/// A request, and the receiver of its answer.
pub struct Call {
    /// The request.
    pub request: Request,
    /// The receiver of the answer.
    pub reply: Reply,
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Call").field("request", &self.request).finish_non_exhaustive()
    }
}

//! Clients of the supervisor: commands on the control socket, and the job itself on its own socket.

use std::time::Instant;

use super::Setup;
use super::control::Control;
use super::job_api::JobApi;
use super::line::Line;
use super::state::Machine;
use crate::published::Published;

/// Both kinds of clients.
pub(super) struct Clients {
    /// Requests from commands.
    pub(super) control: Control,
    /// Requests from the job.
    pub(super) job_api: JobApi,
}

impl Clients {
    pub(super) fn new(setup: &Setup) -> Clients {
        Clients { control: Control::default(), job_api: JobApi::new(setup) }
    }

    /// Updates the answers to questions about the state.
    pub(super) fn show(&self, setup: &Setup, machine: &Machine<'_>, line: &Line, published: &Published) {
        self.control.show(published);
        self.job_api.show(setup, machine, line, published);
    }

    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        self.job_api.next_wake(now)
    }
}

//! The end of the run: who asked for it, and its result.

use super::state::Finish;
use super::stops::Stops;

/// The end of the run, if it has come.
#[derive(Debug, Default)]
pub(super) struct RunEnd {
    pub(super) stops: Stops,
    finish: Option<Finish>,
}

impl RunEnd {
    /// Sets the result of the run.
    pub(super) fn comes(&mut self, finish: Finish) {
        self.finish = Some(finish);
    }

    pub(super) fn is_there(&self) -> bool {
        self.finish.is_some()
    }

    /// Takes the result.
    pub(super) fn take(&mut self) -> Finish {
        let lost = || Finish::Failed { why: "all threads of the supervisor have ended".into(), last: None };
        self.finish.take().unwrap_or_else(lost)
    }
}

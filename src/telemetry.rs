//! Logs for people, events for programs, and metrics.

pub(crate) mod clean;
pub mod events;
pub(crate) mod log;
pub(crate) mod metrics;

//! Logs for people, events for programs, and metrics.

pub mod clean;
pub mod events;
pub mod log;
pub mod metrics;
pub mod tail;

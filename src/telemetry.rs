//! Logs for people, events for programs, and what is known of the machine.

pub mod clean;
pub mod events;
pub mod log;
pub mod metrics;
pub mod tail;

//! Logs for people, and what is known of the machine. Nothing here is kept when the power goes.

pub mod host;
pub mod log;

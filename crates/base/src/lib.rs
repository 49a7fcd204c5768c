//! Plain data and calculations that all other crates use. No input or output, and no dependency on another crate of the
//! workspace.

pub mod cause;
mod chain;
mod ended;
pub mod interval;
pub mod micros;
mod moved;
pub mod notice;
mod percentage;
pub mod units;
pub mod xid;

pub use chain::{chain, without_numbers};
pub use ended::Ended;
pub use moved::Moved;
pub use percentage::Percentage;

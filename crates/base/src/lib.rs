//! Plain data and calculations that all other modules speak of. No input or output, and no module of this crate above it.

pub mod cause;
mod chain;
mod ended;
pub mod interval;
pub mod micros;
mod moved;
mod percentage;
pub mod units;
pub mod xid;

pub use chain::chain;
pub use ended::Ended;
pub use moved::Moved;
pub use percentage::Percentage;

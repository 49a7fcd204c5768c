//! Plain data and calculations that all other modules speak of. No input or output, and no module of this crate above it.

mod chain;
pub mod interval;
pub(crate) mod micros;
mod percentage;

pub use chain::chain;
pub use percentage::Percentage;

//! A job that was restored on other GPUs.

use serde::{Deserialize, Serialize};

/// A GPU that the job used, and the one in its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Its UUID.
    pub old: String,
    /// That of the other.
    pub new: String,
    /// Why, in words.
    pub why: String,
}

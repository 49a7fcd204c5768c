//! A job that was restored on other GPUs.

use serde::{Deserialize, Serialize};

/// A GPU that the job used, and its replacement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    /// Its UUID.
    pub old: String,
    /// The UUID of the replacement.
    pub new: String,
    /// The reason in words.
    pub why: String,
}

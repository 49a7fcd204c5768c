//! `[gpu]`: how the job uses its GPUs.

use serde::{Deserialize, Serialize};

use rekindle_engine::launch::nccl::Nccl;

/// `[gpu]`: how the job uses its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Gpu {
    /// NCCL features that are disabled so that a snapshot is possible.
    pub nccl: Nccl,
}

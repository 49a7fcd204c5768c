//! `[gpu]`: how the job uses its GPUs.

use serde::{Deserialize, Serialize};

use rekindle_engine::launch::memory::GpuMemory;
use rekindle_engine::launch::nccl::Nccl;

/// `[gpu]`: how the job uses its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Gpu {
    /// NCCL features to disable so that a snapshot is possible.
    pub(crate) nccl: Nccl,
    /// Where large allocations of GPU memory are while the job is frozen.
    pub(crate) memory: GpuMemory,
    /// Of memory that stays there: one of so many snapshots copies all of it and compares nothing; at least 1.
    pub(crate) full_copy_every: u32,
}

impl Default for Gpu {
    fn default() -> Gpu {
        let (nccl, memory) = Default::default();
        Gpu { nccl, memory, full_copy_every: 1 }
    }
}

//! `[gpu]`: how the job uses its GPUs.

use serde::{Deserialize, Serialize};

use rekindle_engine::launch::hwloc::Hwloc;
use rekindle_engine::launch::memory::GpuMemory;
use rekindle_engine::launch::nccl::Nccl;

/// `[gpu]`: how the job uses its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Gpu {
    /// NCCL features to disable so that a snapshot is possible.
    pub(crate) nccl: Nccl,
    /// Whether hwloc is kept from opening the GPUs.
    pub(crate) hwloc: Hwloc,
    /// Where large allocations of GPU memory are while the job is frozen.
    pub(crate) memory: GpuMemory,
}

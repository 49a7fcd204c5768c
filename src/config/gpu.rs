//! `[gpu]`: how the job uses its GPUs.

use serde::{Deserialize, Serialize};

/// `[gpu]`: how the job uses its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Gpu {
    /// What NCCL is told to do without, so that a snapshot is possible.
    pub nccl: Nccl,
}

/// `gpu.nccl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Nccl {
    /// As little as possible.
    #[default]
    Auto,
    /// Without direct ways between the GPUs of different processes.
    NoPeer,
    /// Nothing.
    Off,
}

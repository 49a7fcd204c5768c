//! The CUDA state of a process.

use std::ffi::c_int;
use std::fmt;

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// The process uses CUDA freely.
    Running,
    /// Its CUDA calls block; device memory is untouched.
    Locked,
    /// Device memory is in its host memory, and it uses no GPU.
    Checkpointed,
    /// A restore failed; the process cannot continue.
    Failed,
    /// A checkpoint is in progress (driver 615 and newer).
    Checkpointing,
    /// A restore is in progress (driver 615 and newer).
    Restoring,
}

impl State {
    pub(crate) fn from_raw(value: c_int) -> Option<Self> {
        Some(match value {
            0 => State::Running,
            1 => State::Locked,
            2 => State::Checkpointed,
            3 => State::Failed,
            4 => State::Checkpointing,
            5 => State::Restoring,
            _ => return None,
        })
    }

    /// Its name, as in NVIDIA's cuda-checkpoint and Python library.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            State::Running => "running",
            State::Locked => "locked",
            State::Checkpointed => "checkpointed",
            State::Failed => "failed",
            State::Checkpointing => "checkpointing",
            State::Restoring => "restoring",
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

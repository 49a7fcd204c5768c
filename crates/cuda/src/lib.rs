//! The checkpoint functions of the CUDA driver, for any process of this machine.
//!
//! ```text
//!              lock                 checkpoint
//!   running ---------> locked -------------------> checkpointed      (device memory is in host memory,
//!      ^                | ^                             |             no /dev/nvidia* descriptor is open)
//!      +----------------+ +-----------------------------+
//!           unlock                   restore
//!
//!   failed: the restore failed; kill the process and restore its image again
//! ```
//!
//! - [`Driver`]: libcuda.so.1, loaded at the first use and never unloaded. Each function is looked up when it is
//!   called: an old driver fails only the calls that need a newer one.
//! - [`Process`]: one CUDA process and the calls on it, like `cuda.core.checkpoint.Process` of NVIDIA's Python library.
//! - [`is_candidate`]: whether a process may use CUDA at all. Cheap, and needs no driver.
//! - [`is_initializing`]: whether a process is in the middle of cuInit, which the driver does not tell.
//! - [`copier`]: copies memory that stays on the GPU while its process is checkpointed.
//! - [`GpuUuid`], [`GpuMapping`]: the GPU on which a process is restored.
//!
//! All of it may be called from several threads at once. Locking the ranks of one job needs that: locking two NCCL
//! ranks one after the other times out on the second.
//!
//! Source of the functions and structures: CUDA driver API, group `CUDA_CHECKPOINT`, and cuda.h of CUDA 13.

mod candidate;
pub mod copier;
mod driver;
mod error;
mod ffi;
mod function;
mod job_table;
pub mod nccl;
pub mod nvml;
mod packet;
mod process;
mod reasons;
pub mod sharing;
mod state;
mod uuid;
mod version;

pub use candidate::{INIT_CLOSED, is_candidate, is_init_mark, is_initializing};
pub use driver::Driver;
pub use error::{Error, Result};
pub use function::Function;
pub use process::Process;
pub use state::State;
pub use uuid::{GpuMapping, GpuUuid, ParseMappingError, ParseUuidError};
pub use version::{DriverVersion, installed};

/// `CUresult` values that callers react to; cuda.h names them `CUDA_ERROR_*`.
pub mod code {
    /// Success.
    pub const SUCCESS: i32 = 0;
    /// A wrong argument; for a restore: the GPU pairs do not name every GPU of the process.
    pub const INVALID_VALUE: i32 = 1;
    /// Not enough memory, on the GPU for a restore or on the host for a checkpoint.
    pub const OUT_OF_MEMORY: i32 = 2;
    /// The process has no CUDA state.
    pub const NOT_INITIALIZED: i32 = 3;
    /// libcuda.so.1 is the toolkit's stub for linking, not a driver.
    pub const STUB_LIBRARY: i32 = 34;
    /// Another process has the GPU for itself, or its mode does not allow any.
    pub const DEVICE_UNAVAILABLE: i32 = 46;
    /// There is no GPU, or the named one does not exist.
    pub const NO_DEVICE: i32 = 100;
    /// The named GPU is invalid, or cannot be used.
    pub const INVALID_DEVICE: i32 = 101;
    /// The GPU's memory has an error that cannot be corrected.
    pub const ECC_UNCORRECTABLE: i32 = 214;
    /// No right to trace the process, or it has ended.
    pub const OPERATING_SYSTEM: i32 = 304;
    /// The process is in the wrong state for this call.
    pub const ILLEGAL_STATE: i32 = 401;
    /// The lock timed out; the process continues.
    pub const NOT_READY: i32 = 600;
    /// The user has no right to do this.
    pub const NOT_PERMITTED: i32 = 800;
    /// The process uses something that cannot be checkpointed.
    pub const NOT_SUPPORTED: i32 = 801;
    /// A service that the GPUs need is not ready, such as the Fabric Manager.
    pub const SYSTEM_NOT_READY: i32 = 802;
    /// The kernel module and libcuda.so.1 are of different versions.
    pub const SYSTEM_DRIVER_MISMATCH: i32 = 803;
}

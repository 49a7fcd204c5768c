//! Names of the environment variables with which the supervisor configures its helpers.

/// For the interposer, in the job: the folder of landing files.
pub const LANDING: &str = "REKINDLE_LANDING";
/// For the interposer, in the job: number of threads that copy device memory.
pub const COPY_THREADS: &str = "REKINDLE_COPY_THREADS";
/// For the interposer, in the job: allocations of device memory of at least so many bytes can stay on the GPU.
pub const KEEP: &str = "REKINDLE_KEEP_MEMORY";
/// For the plugin, in CRIU: the devices that the plugin accepts.
pub const DEVICES: &core::ffi::CStr = c"REKINDLE_DEVICES";
/// For the plugin, in CRIU: the user with whose rights files are opened.
pub const FILES_AS: &core::ffi::CStr = c"REKINDLE_FILES_AS";

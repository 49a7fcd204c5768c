//! Names of the environment variables with which the supervisor configures its helpers.

use core::ffi::CStr;

/// For the interposer, in the job: the folder of landing files, an absolute path of at most 1024 bytes. It is read when
/// the process begins.
pub const LANDING: &str = "REKINDLE_LANDING";
/// For the interposer, in the job: number of threads that copy device memory, the driver's own included, at most 8. If
/// it is not set: half of the CPUs that the driver's thread may use, divided by the number of processes that copy on
/// them (`crates/engine/src/parts/landing/shares.rs`).
pub const COPY_THREADS: &str = "REKINDLE_COPY_THREADS";
/// For the interposer, in the job: allocations of device memory of at least so many bytes can stay on the GPU.
pub const KEEP_MEMORY: &str = "REKINDLE_KEEP_MEMORY";
/// For the plugin, in CRIU: the devices that the plugin accepts.
pub const DEVICES: &CStr = c"REKINDLE_DEVICES";
/// For the plugin, in CRIU, in a restore: the descriptor to which it writes what the stopped threads answer.
pub const ANSWERS: &CStr = c"REKINDLE_ANSWERS";
/// For the plugin, in CRIU: the user with whose rights files are opened, as `UID:GID:GROUP,GROUP...`.
pub const FILES_AS: &CStr = c"REKINDLE_FILES_AS";

/// The same name as text.
///
/// # Panics
/// If it is not ASCII.
#[must_use]
pub const fn text(name: &'static CStr) -> &'static str {
    match name.to_str() {
        Ok(text) => text,
        Err(_) => panic!("a variable has another name than ASCII"),
    }
}

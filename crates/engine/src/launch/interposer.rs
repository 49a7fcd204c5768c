//! The interposer: the shared object that jobs load so that the driver writes device memory to a file at full speed.
//!
//! `native/preload/src/lib.rs` documents what it does and what a job can rely on. This module has its file and the
//! environment variables that the job needs. The supervisor does this for each CUDA process, in this order:
//!
//! 1. Lock the process; no CUDA call of the job runs any more.
//! 2. Create the landing file at `$REKINDLE_LANDING/<pid as the process sees itself>`: a regular file on a tmpfs that
//!    the job's user may read and write. Its pages should exist, and its size should be about that of the device
//!    memory; the interposer sets it to exactly the length of the driver's mapping.
//! 3. Stop the threads, checkpoint ([`rekindle_os::ptrace::Alone`] lets the interposer's helpers run), dump. The file
//!    is in use if /proc/PID/maps names it. If not, its size is 0 if the interposer tried and failed (no space), else
//!    unchanged.
//! 4. Restore; the driver unmaps the file. Then rename or remove it: as long as it has this name, the next checkpoint
//!    of the process uses it. A restart creates it again under this name before CRIU runs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use super::embedded::{Embedded, Error};
use rekindle_os::maps;

/// Built by build.rs from `native/preload/`. Any user's job may have to load it.
pub(super) const INTERPOSER: Embedded = Embedded {
    name: "interposer",
    suffix: ".so",
    content: include_bytes!(concat!(env!("OUT_DIR"), "/rekindle-preload.so")),
    mode: 0o755,
};

/// A path that LD_PRELOAD cannot name.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "LD_PRELOAD cannot name {path}: it has a space, a colon or a dollar sign; set snapshot.staging-directory to another folder"
)]
pub struct UnusablePath {
    path: PathBuf,
}

/// Makes sure that `dir` contains this version's interposer, complete, and returns its path. `dir` must be accessible
/// to the user that the job runs as.
///
/// # Errors
/// When the file cannot be read or written.
pub fn unpack(dir: &Path) -> Result<PathBuf, Error> {
    INTERPOSER.unpack(dir)
}

/// Whether the process has loaded an interposer of any version.
#[must_use]
pub(crate) fn is_in(pid: i32) -> bool {
    let Ok(maps) = maps::read(pid) else { return false };
    maps::mappings(&maps).any(|mapping| mapping.file_name().starts_with(b"interposer-"))
}

/// The job's LD_PRELOAD: the interposer at `path`, then the existing value. The interposer must be first, because it
/// recognises the driver by the address that a call comes from. Another object's hook is called after ours, and sees
/// the same calls as without the interposer.
///
/// # Errors
/// When LD_PRELOAD cannot name the path: spaces and colons separate its entries, a dollar sign begins a token
/// (ld.so(8)).
pub fn preload_value(path: &Path, existing: Option<&OsStr>) -> Result<OsString, UnusablePath> {
    if path.as_os_str().as_bytes().iter().any(|byte| b" :$\t\n".contains(byte)) {
        return Err(UnusablePath { path: path.to_path_buf() });
    }
    let mut value = path.as_os_str().to_os_string();
    if let Some(existing) = existing.filter(|existing| !existing.is_empty()) {
        value.push(":");
        value.push(existing);
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::embedded::tests::symbols;

    #[test]
    fn it_comes_before_what_the_job_preloads() {
        let value = |existing: Option<&str>| preload_value(Path::new("/s/i.so"), existing.map(OsStr::new)).unwrap();
        assert_eq!(value(None), "/s/i.so");
        assert_eq!(value(Some("")), "/s/i.so");
        assert_eq!(value(Some("liba.so libb.so:/c.so")), "/s/i.so:liba.so libb.so:/c.so");
        for path in ["/a b/i.so", "/a:b/i.so", "/$LIB/i.so"] {
            assert!(preload_value(Path::new(path), None).is_err(), "{path}");
        }
    }

    #[test]
    fn it_exports_the_hooks_and_nothing_else_and_can_not_panic() {
        let [defined, needed] = symbols(INTERPOSER.content);
        let (driver, own): (Vec<String>, Vec<String>) = defined.into_iter().partition(|name| name.starts_with("cu"));
        let (nccl, own): (Vec<String>, Vec<String>) =
            own.into_iter().partition(|name| name.trim_start_matches('p').starts_with("nccl"));
        assert_eq!(own, ["dlsym", "ioctl", "mmap", "mmap64", "munmap"]);
        assert_eq!(nccl.len(), 46, "{nccl:?}");
        // Symbols of the driver: those that return its functions, the one that initialises it, those that allocate or
        // share memory (two of them say who may access it), arrays too, and the one that shows that a graph captures NCCL.
        let of_memory = ["cuMem", "cuMulticast", "cuArray", "cuMipmappedArray"];
        let is_of_memory = |name: &String| of_memory.iter().any(|beginning| name.starts_with(beginning));
        let others: Vec<&String> = driver.iter().filter(|name| !is_of_memory(name)).collect();
        let access = ["cuCtxEnablePeerAccess", "cuIpcGetMemHandle"];
        let (memory, others): (Vec<&String>, Vec<&String>) =
            others.into_iter().partition(|name| access.contains(&name.as_str()));
        assert_eq!(memory, access);
        assert_eq!(others, ["cuGetProcAddress", "cuGetProcAddress_v2", "cuInit", "cuUserObjectCreate"]);
        // Weak symbols. If the compiler replaced a loop by a call of memcpy, the call would be bound to the job's
        // memcpy.
        assert_eq!(needed, ["__errno_location", "dlvsym", "memmove"]);
        let mark = b"rekindle preload can panic";
        assert!(!INTERPOSER.content.windows(mark.len()).any(|window| window == mark));
    }
}

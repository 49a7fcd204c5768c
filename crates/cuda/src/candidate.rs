//! A cheap check, without a driver, whether a process may use CUDA.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;

use rekindle_os::maps::{self, Mapping};

/// The name, in the folder of landing files, of the symbolic link at which processes with the interposer wait before they
/// begin with cuInit.
pub const INIT_CLOSED: &str = rekindle_abi::init::CLOSED;

/// Whether process `pid` maps libcuda, or has an NVIDIA device open or mapped.
///
/// False means that it does not use CUDA now. True means that [`super::Process::state`] must decide: a library that is
/// mapped need not be in use, and a forked child inherits descriptors of CUDA without being a CUDA process.
///
/// # Errors
/// If `/proc/PID` cannot be read: the process has ended ([`io::ErrorKind::NotFound`]), or belongs to another user.
pub fn is_candidate(pid: i32) -> io::Result<bool> {
    let maps = maps::read(pid)?;
    if maps::mappings(&maps).any(|mapping| is_libcuda(&mapping) || is_device(mapping.name)) {
        return Ok(true);
    }
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // A descriptor may be closed meanwhile.
        if let Ok(target) = fs::read_link(entry?.path())
            && is_device(target.as_os_str().as_bytes())
        {
            return Ok(true);
        }
    }
    Ok(false)
}

fn is_libcuda(mapping: &Mapping<'_>) -> bool {
    // libcudart does not count, because it is linked into every CUDA program; a replaced driver is shown as
    // "(deleted)".
    mapping.file_name().starts_with(b"libcuda.so")
}

/// Whether a thread of process `pid` is in the middle of cuInit: the driver's checkpoint takes it, and the call fails
/// once it is restored (driver 580, error 304). Known of processes that have the interposer
/// (`native/preload/src/init.rs`).
///
/// # Errors
/// As [`is_candidate`].
pub fn is_initializing(pid: i32) -> io::Result<bool> {
    let maps = maps::read(pid)?;
    let is_mark = |name: &[u8]| name.strip_prefix(b"/memfd:").is_some_and(is_init_mark);
    Ok(maps::mappings(&maps).any(|mapping| is_mark(mapping.name)))
}

/// Whether a memfd of this name is the mark of cuInit, as /proc/PID/maps or CRIU's image names it.
#[must_use]
pub fn is_init_mark(name: &[u8]) -> bool {
    name.strip_suffix(b" (deleted)").unwrap_or(name) == rekindle_abi::init::NAME.to_bytes()
}

fn is_device(path: &[u8]) -> bool {
    path.starts_with(b"/dev/nvidia")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_mean_cuda() {
        let is_libcuda =
            |name| is_libcuda(&Mapping { start: 0, end: 1, access: "r--p", inode: 1, name: str::as_bytes(name) });
        assert!(is_libcuda("/usr/lib/x86_64-linux-gnu/libcuda.so.580.159.04"));
        assert!(is_libcuda("/tmp/with space/libcuda.so.1 (deleted)"));
        assert!(!is_libcuda("/usr/lib/libcudart.so.13"));
        assert!(is_device(b"/dev/nvidia-uvm"));
        assert!(is_device(b"/dev/nvidia0"));
        assert!(!is_device(b"/dev/null"));
    }

    #[test]
    fn the_mark_of_cuinit_is_told_by_its_whole_name() {
        assert!(is_init_mark(b"rekindle-cuinit (deleted)") && is_init_mark(b"rekindle-cuinit"));
        assert!(!is_init_mark(b"rekindle-cuinit-2 (deleted)") && !is_init_mark(b"rekindle-sharing-3"));
    }

    #[test]
    fn this_process_is_none() {
        let me = i32::try_from(std::process::id()).unwrap();
        assert!(!is_candidate(me).unwrap() && !is_initializing(me).unwrap());
    }

    #[test]
    fn a_process_that_is_gone_is_an_error() {
        assert_eq!(is_candidate(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

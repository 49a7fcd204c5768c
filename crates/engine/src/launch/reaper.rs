//! The reaper's executable. It is the root of every job's process tree, and so part of every image.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::embedded::{Embedded, Error};
use rekindle_os::process;

/// Upper limit for the size of a reaper's file; they have about 10 KiB.
const MAX_BYTES: u64 = 1 << 20;

/// Permission bits of a reaper, of any version.
pub(crate) const MODE: u32 = 0o755;

/// Built by build.rs from `native/reaper/`.
pub(super) const REAPER: Embedded = Embedded {
    name: "reaper",
    suffix: "",
    content: include_bytes!(concat!(env!("OUT_DIR"), "/rekindle-reaper")),
    // CRIU restores a job of another user with that user's rights over files, and the kernel lets a process have only a
    // file as its executable that it may execute (`prctl_set_mm_exe_file`). The folder keeps others out.
    mode: MODE,
};

/// Makes sure that `dir` contains this version's reaper, complete, and returns its path.
///
/// # Errors
/// When the file cannot be read or written.
pub fn unpack(dir: &Path) -> Result<PathBuf, Error> {
    REAPER.unpack(dir)
}

/// Whether this is the path of a reaper, of any version.
#[must_use]
pub(crate) fn is_named(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(|name| name.starts_with("reaper-"))
}

/// Whether the process executes a reaper, of any version: a file of ours, with the hash of its content in its name.
///
/// # Errors
/// When its executable cannot be read.
pub(crate) fn is_genuine(pid: i32) -> io::Result<bool> {
    let Some(path) = process::executable(pid).filter(|path| is_named(path)) else { return Ok(false) };
    let file = File::open(format!("/proc/{pid}/exe"))?;
    let metadata = file.metadata()?;
    if !metadata.is_file() || metadata.uid() != nix::unistd::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Ok(false);
    }
    let mut content = Vec::new();
    file.take(MAX_BYTES).read_to_end(&mut content)?;
    Ok(path.file_name().is_some_and(|name| name == REAPER.name_of(&content).as_str()))
}

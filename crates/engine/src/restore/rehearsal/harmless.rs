//! What would disturb the running job, or the machine, if its image was rehearsed.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use bytesize::ByteSize;

use super::failure::Failure;
use crate::snapshot::CRIU_DIR;
use rekindle_criu as criu;
use rekindle_os::cgroup;
use rekindle_os::leases::{self, Lease};
use rekindle_store::{Image, Manifest};

/// Checks that a second copy of the job takes only memory and time from the first.
pub(super) fn harmless(image: &Image, manifest: &Manifest) -> Result<(), Failure> {
    let not_tried = |why: String| Err(Failure::NotTried(why));
    match criu::image::scarce(&image.dir.join(CRIU_DIR)) {
        Ok(None) => {}
        Ok(Some(what)) => {
            return not_tried(format!("it has {what}, and a second copy of the job would take some of them away"));
        }
        Err(error) => return Err(Failure::of_restore(&criu::RunError::Image(error).into())),
    }
    let tasks = tasks(manifest);
    if let Some(left) = cgroup::tasks_headroom(std::process::id().cast_signed()).filter(|left| left / 4 < tasks) {
        return not_tried(format!("it has up to {tasks} tasks, and its control group allows only {left} more"));
    }
    // Copying a file to the view opens it, which breaks a write lease of the job.
    let mut leases = Lease::all();
    leases.retain(|lease| lease.kind == leases::Kind::Write);
    let leased = manifest.open_files.iter().map(|file| &file.path).find(|path| {
        let inode = fs::metadata(path.as_path()).map(|metadata| metadata.ino());
        inode.is_ok_and(|inode| leases.iter().any(|lease| lease.is_on(inode)))
    });
    match leased {
        Some(path) => not_tried(format!("there is a write lease on {}", path.display())),
        None => Ok(()),
    }
}

/// Maximum size of one of CRIU's tables of files: some millions of files.
const MAX_TABLE: u64 = 256 << 20;

/// Checks that the job has no files in the places that the view shows unchanged.
pub(super) fn out_of_reach(image: &Image, as_they_are: &[PathBuf]) -> Result<(), Failure> {
    let tables = ["files.img", "ghost-file.img", "remap-fpath.img"].map(|name| image.dir.join(CRIU_DIR).join(name));
    let mut found = Vec::new();
    for table in tables {
        match table.content(MAX_TABLE) {
            Ok(bytes) => found.push(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failure::NotTried(format!("{} cannot be read: {error}", table.display()))),
        }
    }
    let names = |path: &&PathBuf| {
        // CRIU writes paths with and without the leading slash.
        let bytes = path.as_os_str().as_bytes();
        let bytes = bytes.strip_prefix(b"/").unwrap_or(bytes);
        found.iter().any(|table| table.windows(bytes.len().max(1)).any(|window| window == bytes))
    };
    match as_they_are.iter().find(names) {
        Some(path) => {
            Err(Failure::NotTried(format!("it has files at {}, where no overlay can be mounted", path.display())))
        }
        None => Ok(()),
    }
}

/// Processes, threads, groups and sessions: an upper bound for its tasks.
fn tasks(manifest: &Manifest) -> u64 {
    u64::try_from(manifest.tree.ids.len()).unwrap_or(u64::MAX)
}

/// Bytes that may be written in the view, which are in memory: small image files, and files of the job that cannot be
/// replaced by sparse ones.
pub(super) const VIEW: u64 = 48 << 20;

/// Checks that there is memory for it. `reserve` bytes must stay free.
pub(super) fn room(image: &Image, manifest: &Manifest, reserve: u64) -> Result<(), Failure> {
    let locked = criu::image::locked(&image.dir.join(CRIU_DIR)).map_err(Failure::of_image)?;
    let machine = cgroup::memory_available().unwrap_or(u64::MAX);
    let group = cgroup::memory_headroom(std::process::id().cast_signed()).unwrap_or(u64::MAX);
    let processes = u64::try_from(manifest.tree.processes.len()).unwrap_or(u64::MAX);
    match missing(locked, processes, tasks(manifest), machine.min(group).saturating_sub(reserve)) {
        None => Ok(()),
        Some(why) => Err(Failure::NotTried(why)),
    }
}

/// Why a job with this much locked memory, and with this many processes and tasks, cannot be rehearsed with `free` bytes.
fn missing(locked: u64, processes: u64, tasks: u64, free: u64) -> Option<String> {
    /// CRIU and we.
    const PROGRAMS: u64 = 16 << 20;
    /// Of a process without memory of its own: what CRIU has for it, page tables, descriptors (0.69 MiB, measured with 200).
    const PROCESS: u64 = 768 << 10;
    /// Of a further thread (80 KiB, measured with 500).
    const TASK: u64 = 96 << 10;
    let need = processes.saturating_mul(PROCESS).saturating_add(tasks.saturating_mul(TASK));
    let need = need.saturating_add(VIEW + PROGRAMS).saturating_add(locked);
    let (shown, free_shown) = (ByteSize::b(need), ByteSize::b(free));
    let because = if locked > VIEW { ": it has locked memory (mlock), which a rehearsal needs again" } else { "" };
    (need > free).then(|| format!("it needs {shown} of memory, and {free_shown} is available{because}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_it_needs_is_that_of_tasks_and_not_of_their_content() {
        assert_eq!(missing(0, 2, 3, 66 << 20), None);
        let why = missing(0, 2, 3, 60 << 20).unwrap();
        assert!(why.contains("65.8 MiB of memory, and 60") && !why.contains("locked"), "{why}");
        assert!(missing(0, 2_000, 2_000, 1 << 30).is_some());
        let why = missing(8 << 30, 2, 2, 4 << 30).unwrap();
        assert!(why.contains("locked memory"), "{why}");
        assert!(missing(u64::MAX, u64::MAX, u64::MAX, u64::MAX - 1).is_some());
    }
}

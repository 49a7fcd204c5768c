//! The table in which a process records the memory that it shares, mapped here.
#![allow(unsafe_code, reason = "memory that is shared with the job; each block says why it is sound")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

pub(super) use rekindle_abi::sharing::{
    BEGIN, EXPORT, HELD, IMPORT, Import, MAP, MULTICAST, PROBE, RELEASE, Reply, Request, Table, Tag, UNTRACKED,
};
#[cfg(test)]
pub(super) use rekindle_abi::sharing::{MOST, NAME};

/// What one process shares.
#[derive(Debug)]
pub struct Sharing {
    pid: i32,
    table: NonNull<Table>,
}

// SAFETY: the mapping is this value's alone, and all of it atomics.
unsafe impl Send for Sharing {}
// SAFETY: as above.
unsafe impl Sync for Sharing {}

impl Drop for Sharing {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and borrowed by nobody any more.
        unsafe { libc::munmap(self.table.as_ptr().cast(), size_of::<Table>()) };
    }
}

impl Sharing {
    /// The table of process `pid`, as we see it; None if it has none.
    ///
    /// # Errors
    /// When it has one that cannot be read, or of another version of the interposer.
    pub fn of(pid: i32) -> io::Result<Option<Sharing>> {
        let Ok(maps) = std::fs::read_to_string(format!("/proc/{pid}/maps")) else { return Ok(None) };
        let prefix = "/memfd:rekindle-sharing-";
        let Some(line) = maps.lines().find(|line| line.contains(prefix)) else { return Ok(None) };
        let name = format!("/memfd:{} (deleted)", rekindle_abi::sharing::NAME.to_string_lossy());
        if !line.ends_with(&name) {
            return Err(io::Error::other(format!("process {pid} has the interposer of another version of rekindle")));
        }
        let range = line.split(' ').next().unwrap_or_default();
        // A lease of the job's on it would have us wait (fcntl(2), F_SETLEASE).
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = options.open(format!("/proc/{pid}/map_files/{range}"))?;
        let sharing = Sharing::mapped(pid, &file)?;
        // Made, and not filled in yet: then nothing was shared before this moment.
        Ok((sharing.table().pid.load(Acquire) != 0).then_some(sharing))
    }

    /// The table of `pid` that is in this file.
    pub(super) fn mapped(pid: i32, file: &File) -> io::Result<Sharing> {
        Ok(Sharing { pid, table: map(file)? })
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn table(&self) -> &Table {
        // SAFETY: mapped for as long as this value lives.
        unsafe { self.table.as_ref() }
    }

    /// The process as it sees itself.
    #[must_use]
    pub fn inner(&self) -> i32 {
        self.table().pid.load(Relaxed)
    }

    /// What it has of others.
    pub(super) fn imports(&self) -> impl Iterator<Item = (u32, &Import)> {
        let used = usize::try_from(self.table().imports_used.load(Relaxed)).unwrap_or(usize::MAX);
        let live = |(_, import): &(u32, &Import)| import.is_live.load(Acquire) != 0;
        (0..).zip(&self.table().imports).take(used).filter(live)
    }

    /// What others can have of it.
    pub(super) fn exports(&self) -> impl Iterator<Item = (u32, Tag)> {
        let table = self.table();
        let used = usize::try_from(table.exports_used.load(Relaxed)).unwrap_or(usize::MAX);
        let nonce = table.nonce.load(Relaxed);
        (0..).zip(&table.exports).take(used).filter(|(_, export)| export.handle.load(Acquire) != 0).map(
            move |(index, export)| {
                (index, Tag { pid: self.inner().cast_unsigned(), id: export.id.load(Relaxed), nonce })
            },
        )
    }
}

/// Where an import comes from.
pub(super) fn origin(import: &Import) -> Tag {
    Tag { pid: import.pid.load(Relaxed), id: import.id.load(Relaxed), nonce: import.nonce.load(Relaxed) }
}

fn map(file: &File) -> io::Result<NonNull<Table>> {
    // The seals first: a job could cut its table and then seal it, and it would be found sealed and long enough. An
    // access beyond its end would kill us.
    // SAFETY: a system call on numbers.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(io::Error::other("its table of shared memory is not sealed"));
    }
    // A page of hugetlbfs may be missing however long the file is: that is a SIGBUS too.
    if fstatfs(file)?.filesystem_type() != TMPFS_MAGIC {
        return Err(io::Error::other("its table of shared memory is no ordinary memory"));
    }
    let size = size_of::<Table>();
    if usize::try_from(file.metadata()?.len()).unwrap_or(0) != size {
        return Err(io::Error::other("its table of shared memory has another size"));
    }
    // SAFETY: a new mapping, of a file that is as long and stays so.
    let address = unsafe {
        libc::mmap(ptr::null_mut(), size, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0)
    };
    match NonNull::new(address.cast()) {
        Some(table) if address != libc::MAP_FAILED => Ok(table),
        _ => Err(io::Error::last_os_error()),
    }
}

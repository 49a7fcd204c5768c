//! A table that the interposer keeps in a process of the job, mapped here. The job can write to it, cut it and seal it.
#![allow(unsafe_code, reason = "memory that is shared with the job; each block says why it is sound")]

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr::{self, NonNull};

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use rekindle_os::maps;

/// A type whose every value is valid, also all zeroes, because it has only atomics.
///
/// # Safety
/// The type must consist of atomics only.
pub(crate) unsafe trait Shared {}

// SAFETY: all of it atomics.
unsafe impl Shared for rekindle_abi::sharing::Table {}
// SAFETY: all of it atomics.
unsafe impl Shared for rekindle_abi::nccl::Table {}

/// The mapping. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct JobTable<T: Shared>(NonNull<T>);

// SAFETY: the mapping is this value's alone, and all of it atomics.
unsafe impl<T: Shared> Send for JobTable<T> {}
// SAFETY: as above.
unsafe impl<T: Shared> Sync for JobTable<T> {}

impl<T: Shared> Drop for JobTable<T> {
    fn drop(&mut self) {
        // SAFETY: mapped by `map`, and borrowed by nobody any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<T>()) };
    }
}

impl<T: Shared> JobTable<T> {
    /// Opens the table of process `pid`, as we see it, in the memfd `name`; None if it has no table, or has ended. The
    /// names of all versions begin with `family`.
    ///
    /// # Errors
    /// When the table cannot be read, or is of another version of the interposer.
    pub(crate) fn of(pid: i32, family: &str, name: &CStr) -> io::Result<Option<JobTable<T>>> {
        let maps = match maps::read(pid) {
            Ok(maps) => maps,
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => return Ok(None),
            // Whoever took this for a process without a table would let it run without its memory.
            Err(error) => return Err(error),
        };
        let prefix = format!("/memfd:{family}");
        let is_it = |mapping: &maps::Mapping<'_>| mapping.name.starts_with(prefix.as_bytes());
        let Some(mapping) = maps::mappings(&maps).find(is_it) else { return Ok(None) };
        if mapping.name != format!("/memfd:{} (deleted)", name.to_string_lossy()).as_bytes() {
            return Err(io::Error::other(format!("process {pid} has the interposer of another version of rekindle")));
        }
        let range = mapping.range();
        // A lease of the job's on it would have us wait (fcntl(2), F_SETLEASE).
        let mut options = OpenOptions::new();
        let options = options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        JobTable::mapped(&options.open(format!("/proc/{pid}/map_files/{range}"))?).map(Some)
    }

    /// The one in this file.
    pub(crate) fn mapped(file: &File) -> io::Result<JobTable<T>> {
        map(file).map(JobTable)
    }

    pub(crate) fn get(&self) -> &T {
        // SAFETY: mapped for as long as this value lives.
        unsafe { self.0.as_ref() }
    }
}

fn map<T>(file: &File) -> io::Result<NonNull<T>> {
    // The seals first: a job could cut its table and then seal it, and it would be found sealed and long enough. An
    // access beyond its end would kill us.
    // SAFETY: a system call on numbers.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return Err(io::Error::other("its table is not sealed"));
    }
    // A page of hugetlbfs may be missing however long the file is: that is a SIGBUS too.
    if fstatfs(file)?.filesystem_type() != TMPFS_MAGIC {
        return Err(io::Error::other("its table is not in ordinary memory"));
    }
    let size = size_of::<T>();
    if usize::try_from(file.metadata()?.len()).unwrap_or(0) != size {
        return Err(io::Error::other("its table has another size"));
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

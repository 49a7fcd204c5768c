//! The control file: one page, mapped shared by the job and by whoever asks it something.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// `CUresult` values.
pub(crate) mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const OUT_OF_MEMORY: i32 = 2;
    pub(crate) const NOT_INITIALIZED: i32 = 3;
    pub(crate) const NO_DEVICE: i32 = 100;
    pub(crate) const OPERATING_SYSTEM: i32 = 304;
    pub(crate) const ILLEGAL_STATE: i32 = 401;
    pub(crate) const NOT_FOUND: i32 = 500;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const NOT_SUPPORTED: i32 = 801;
    pub(crate) const UNKNOWN: i32 = 999;
}

/// What is asked of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    State = 1,
    Tid,
    Lock,
    Checkpoint,
    Restore,
    Unlock,
}

impl Op {
    pub(crate) fn from_raw(raw: i32) -> Option<Self> {
        [Op::State, Op::Tid, Op::Lock, Op::Checkpoint, Op::Restore, Op::Unlock].into_iter().find(|op| *op as i32 == raw)
    }

    /// As the fault files name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::State => "state",
            Op::Tid => "tid",
            Op::Lock => "lock",
            Op::Checkpoint => "checkpoint",
            Op::Restore => "restore",
            Op::Unlock => "unlock",
        }
    }
}

/// An old and a new GPU, as `CUcheckpointGpuPair`.
pub(crate) type Pair = [[u8; 16]; 2];

/// As many pairs as a request can carry.
pub(crate) const MAX_PAIRS: usize = 8;

pub(crate) const MAGIC: u64 = 0x7374_616e_6469_6e31;
pub(crate) const SIZE: usize = 4096;

/// The page. All fields but the first four belong to the request under way, whose caller holds the file's lock.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) magic: AtomicU64,
    /// The job's own number of itself.
    pub(crate) pid: AtomicI32,
    /// The first byte of the UUID of its GPU, which are all alike.
    pub(crate) gpu: AtomicU32,
    /// Bytes of device memory that it has there.
    pub(crate) used: AtomicU64,
    pub(crate) op: AtomicI32,
    pub(crate) timeout_ms: AtomicU32,
    pub(crate) pair_count: AtomicU32,
    /// Each pair as four words.
    pub(crate) pairs: [AtomicU64; MAX_PAIRS * 4],
    /// A number that is never used twice; 0 when there is no request. Written last.
    pub(crate) request: AtomicU64,
    pub(crate) code: AtomicI32,
    pub(crate) value: AtomicI32,
    /// The request that was answered. Written last.
    pub(crate) reply: AtomicU64,
}

const _: () = assert!(size_of::<Control>() <= SIZE);

/// A mapping of a control file.
#[derive(Debug)]
pub(crate) struct Mapping(*mut Control);

// SAFETY: the page holds atomics only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first page of `file`, which must be there. The descriptor is not needed afterwards.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
        // SAFETY: a new shared mapping at an address of the kernel's choice.
        let page = unsafe { libc::mmap(ptr::null_mut(), SIZE, prot, flags, file.as_raw_fd(), 0) };
        if page == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Self(page.cast())) }
    }

    /// Keeps the page out of forked children, which are no CUDA processes.
    pub(crate) fn not_in_children(&self) {
        // SAFETY: the page is ours.
        unsafe { libc::madvise(self.0.cast(), SIZE, libc::MADV_DONTFORK) };
    }
}

impl std::ops::Deref for Mapping {
    type Target = Control;

    fn deref(&self) -> &Control {
        // SAFETY: mapped until drop, aligned to a page, any bytes are valid atomics.
        unsafe { &*self.0 }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing borrows from it any more.
        unsafe { libc::munmap(self.0.cast(), SIZE) };
    }
}

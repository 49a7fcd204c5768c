//! The landing region: the driver's mapping for device memory, backed by a file of the supervisor's.
//!
//! A SIGBUS in the driver would end the job, so the mapping is returned only if all of it has memory. A failure leaves
//! a file of length 0, which frees its memory for the driver's own mapping and tells the supervisor.

use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

use crate::lock::Lock;
use crate::sys::{self, File};
use crate::{armed, got, libc, maps};

/// Minimum size of a mapping that is redirected. Less device memory does not slow CRIU down (4 MiB take 10 ms).
pub(crate) const LARGE: usize = 4 << 20;

/// Huge pages need an address that is a multiple of their size. With them the copy runs 1.2 times as fast, and the
/// mapping is made 10 times as fast.
const HUGE_PAGE: usize = 2 << 20;
pub(crate) const PAGE: usize = 4096;

/// Start of the region; 0 if there is none. Read by the hooks.
pub(crate) static START: AtomicUsize = AtomicUsize::new(0);
static END: AtomicUsize = AtomicUsize::new(0);
/// The process that it belongs to: a forked child inherits these variables.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// Inode of the mapped file.
static INODE: AtomicUsize = AtomicUsize::new(0);
/// Held while a region is created.
static MAKING: Lock = Lock::new();

/// The region of process `pid`.
pub(crate) fn region(pid: i32) -> Option<core::ops::Range<usize>> {
    let start = START.load(Ordering::Acquire);
    let found = start != 0 && OWNER.load(Ordering::Relaxed) == pid;
    found.then(|| start..END.load(Ordering::Relaxed))
}

/// An mmap of [`LARGE`] and more, called from `caller`.
pub(crate) unsafe extern "C" fn large(
    address: usize,
    length: usize,
    prot: i32,
    flags: i32,
    fd: i32,
    offset: isize,
    caller: usize,
) -> usize {
    // Exactly the driver's arguments: other large mappings of libcuda belong to the job, and must not be redirected.
    let wanted = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_POPULATE;
    if address == 0
        && flags & !sys::MAP_NORESERVE == wanted
        && prot & sys::PROT_WRITE != 0
        && let Some(landed) = land(length, prot, caller)
    {
        return landed;
    }
    libc::map(address, length, prot, flags, fd, offset)
}

fn land(length: usize, prot: i32, caller: usize) -> Option<usize> {
    let file = armed::open()?;
    let pid = sys::pid();
    let code = maps::find(caller).filter(|mapping| mapping.is_libcuda)?;
    let _making = MAKING.take(pid)?;
    if is_in_use(pid) {
        return None;
    }
    let status = file.status().ok().filter(|status| status.is_regular)?;
    let Some(start) = map_file(&file, status.size, length, prot) else {
        let _ = file.truncate(0);
        return None;
    };
    END.store(start.wrapping_add(length), Ordering::Relaxed);
    OWNER.store(pid, Ordering::Relaxed);
    INODE.store(status.inode, Ordering::Relaxed);
    START.store(start, Ordering::Release);
    got::redirect(&code, caller);
    Some(start)
}

/// Whether the last region still exists. Its end is noticed by the hook of munmap; if that was missed, the region must
/// not prevent later ones.
fn is_in_use(pid: i32) -> bool {
    let Some(region) = region(pid) else { return false };
    let inode = INODE.load(Ordering::Relaxed);
    maps::find(region.start).is_some_and(|mapping| mapping.start == region.start && mapping.inode == inode)
}

/// Makes the file as long as the mapping, and maps it with all its pages.
fn map_file(file: &File, size: usize, length: usize, prot: i32) -> Option<usize> {
    let length = length.checked_next_multiple_of(PAGE)?;
    let reserved = length.checked_add(HUGE_PAGE)?;
    // If the file were not in memory, the freeze would wait for a disk, and a page could fail after the mapping was
    // returned.
    if !file.is_in_tmpfs() || (length > size && length > sys::file_size_limit()) {
        return None;
    }
    if length != size {
        file.truncate(length).ok()?;
    }
    let around = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS | sys::MAP_NORESERVE;
    let reserve = sys::map(0, reserved, sys::PROT_NONE, around, -1, 0).ok()?;
    let start = reserve.next_multiple_of(HUGE_PAGE);
    let (before, after) = (start - reserve, reserved - length - (start - reserve));
    if before > 0 {
        let _ = sys::unmap(reserve, before);
    }
    if after > 0 {
        let _ = sys::unmap(start + length, after);
    }
    let mapped = file.map(start, length, prot, sys::MAP_SHARED | sys::MAP_FIXED).and_then(|_| {
        // For reading: this maps existing pages 16 at a time, and allocates missing ones. MAP_POPULATE would not report
        // a lack of space.
        match sys::populate(start, length) {
            Err(sys::EINVAL) => populate_before_5_14(file, start, length, prot),
            result => result,
        }
    });
    if mapped.is_err() {
        let _ = sys::unmap(start, length);
        return None;
    }
    Some(start)
}

/// The same in two steps. The first is skipped for a file with all its pages, because it takes 1.7 s for each GiB of
/// them.
fn populate_before_5_14(file: &File, start: usize, length: usize, prot: i32) -> Result<(), sys::Errno> {
    // A huge page may extend beyond the end and so hide a missing page.
    if file.status()?.allocated < length.next_multiple_of(HUGE_PAGE) {
        file.allocate(length)?;
    }
    file.map(start, length, prot, sys::MAP_SHARED | sys::MAP_FIXED | sys::MAP_POPULATE).map(drop)
}

/// A munmap that begins at the start of the region, or at 0.
pub(crate) unsafe extern "C" fn unmap(address: usize, length: usize) -> i32 {
    if address != 0 {
        got::put_back();
        // Before the memory can be reused.
        let _ = START.compare_exchange(address, 0, Ordering::AcqRel, Ordering::Relaxed);
    }
    libc::unmap(address, length)
}

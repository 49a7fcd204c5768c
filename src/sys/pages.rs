//! What moves pages in bulk: splice between pipes, and shared mappings of files that only the kernel writes into; and
//! pages of files in RAM, made ready before they are needed.
//!
//! A first write to a tmpfs page makes the kernel allocate and clear it: 4 KiB at a time that is four times slower than
//! the copy itself, and it would happen while the job stands still. So the pages are made before, several threads at
//! once, by `MADV_POPULATE_WRITE` (Linux 5.14). It tells of a full tmpfs by an error, and pages that are there cost it
//! little; fallocate(2) takes 1.7 s for each GiB of those.
//!
//! A mapping here is never read or written by our own instructions, but by read(2) and madvise(2) on its range. Where a
//! page can not be had (the file was cut, its file system is full) those fail with EFAULT or a short count; a load or a
//! store would be a SIGBUS. For the same reason nothing here hands out a slice.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::parallel::{cores, in_parallel};

/// Mapped and populated at once. A multiple of every huge page size in use.
const STRETCH: u64 = 1 << 30;

/// More threads clear pages no faster on the machines measured, and the job runs meanwhile.
const MAX_THREADS: usize = 4;

/// Threads that may work on pages while the job runs: fewer than there are cores.
#[must_use]
pub fn spare_threads() -> usize {
    (cores() / 2).clamp(1, MAX_THREADS)
}

/// Makes the file at least `len` bytes long, and all its pages present. What is in it stays.
///
/// # Errors
/// `StorageFull` or `OutOfMemory` where the tmpfs or the memory of the machine is not enough; the file may have grown then.
pub fn make_present(file: &File, len: u64) -> io::Result<()> {
    if file.metadata()?.size() < len {
        // Before the pages: a tmpfs with huge=within_size gives huge pages only below the size.
        file.set_len(len)?;
    }
    let file = Arc::new(file.try_clone()?);
    let stretches: Vec<u64> = (0..len.div_ceil(STRETCH)).map(|n| n * STRETCH).collect();
    let populate = |start: u64| {
        let length = usize::try_from(STRETCH.min(len - start)).map_err(io::Error::other)?;
        Mapping::new(&file, start, length)?.populate(0, length)
    };
    in_parallel(stretches, spare_threads(), populate).map(drop)
}

/// Moves up to `length` bytes from one pipe to another pipe or device, without waiting. Between pipes whole pages change
/// hands and nothing is copied.
///
/// Returns how many bytes were moved: 0 at the end of the stream, which a FIFO that nobody has opened for writing is at
/// too.
///
/// # Errors
/// EAGAIN when there is nothing to move now but somebody can still write, or no room.
pub fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, length: usize) -> io::Result<usize> {
    let (from, to) = (from.as_raw_fd(), to.as_raw_fd());
    let flags = libc::SPLICE_F_NONBLOCK | libc::SPLICE_F_MOVE;
    // SAFETY: no memory of ours is involved; without offsets the kernel uses the positions of the files.
    let moved = unsafe { libc::splice(from, ptr::null_mut(), to, ptr::null_mut(), length, flags) };
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// A range of a file, mapped shared and for writing.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<libc::c_void>,
    length: usize,
    file: Arc<File>,
    /// In the file.
    offset: i64,
}

// SAFETY: the address is owned by this value alone and valid on every thread until it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only the kernel writes, to memory that no reference points to.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from `offset`, a multiple of the page size. The file may be shorter. On a tmpfs with huge pages
    /// the kernel chooses a fitting address.
    ///
    /// # Errors
    /// When the kernel does not map it.
    pub fn new(file: &Arc<File>, offset: u64, length: usize) -> io::Result<Mapping> {
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses touches nothing of ours.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, libc::MAP_SHARED, fd, offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start).ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Mapping { start, length, file: Arc::clone(file), offset })
    }

    /// The bytes that are mapped.
    #[must_use]
    pub fn length(&self) -> usize {
        self.length
    }

    /// The address of `at`, from which on there are `length` bytes.
    fn range(&self, at: usize, length: usize) -> io::Result<*mut libc::c_void> {
        if at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(io::Error::other(format!("{length} bytes at {at} of a mapping of {}", self.length)));
        }
        Ok(self.start.as_ptr().wrapping_byte_add(at))
    }

    /// Makes sure that the pages of a range are there and mapped, so that writing needs no page fault. New ones are
    /// zeroed.
    ///
    /// # Errors
    /// `StorageFull` or `OutOfMemory` where there is no page to be had, or the file is shorter.
    pub fn populate(&self, at: usize, length: usize) -> io::Result<()> {
        let start = self.range(at, length)?;
        loop {
            // SAFETY: the range lies in our mapping; only pages are added.
            let answer = unsafe { libc::madvise(start, length, libc::MADV_POPULATE_WRITE) };
            match Errno::result(answer) {
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Ok(_) => return Ok(()),
                // What tmpfs has no page for (madvise(2)).
                Err(Errno::EFAULT) => return Err(io::ErrorKind::StorageFull.into()),
                // A kernel before 5.14.
                Err(Errno::EINVAL) => return self.reserve(at, length),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn reserve(&self, at: usize, length: usize) -> io::Result<()> {
        let signed = |n: usize| i64::try_from(n).map_err(io::Error::other);
        let (start, length) = (self.offset.saturating_add(signed(at)?), signed(length)?);
        loop {
            match fallocate(&*self.file, FallocateFlags::empty(), start, length) {
                Err(Errno::EINTR) => {}
                other => return Ok(other?),
            }
        }
    }

    /// Reads up to `length` bytes to `at`.
    ///
    /// # Errors
    /// Those of read(2); EFAULT where the file has no page and gets none.
    pub fn read_from(&self, from: impl AsFd, at: usize, length: usize) -> io::Result<usize> {
        let to = self.range(at, length)?;
        let fd = from.as_fd().as_raw_fd();
        // SAFETY: the range lies in our mapping, to which there are no references.
        let got = unsafe { libc::read(fd, to, length) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: ours, and nobody uses it any more. It can only fail for a range that is none.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn what_is_read_is_in_the_file_and_no_further() {
        let file = Arc::new(tempfile::tempfile().unwrap());
        file.set_len(8192).unwrap();
        let mapping = Mapping::new(&file, 4096, 8192).unwrap();
        mapping.populate(0, 4096).unwrap();
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(&[7; 200]).unwrap();
        assert_eq!(mapping.read_from(&read, 96, 100).unwrap(), 100);
        let mut found = [0; 100];
        std::os::unix::fs::FileExt::read_exact_at(&*file, &mut found, 4096 + 96).unwrap();
        assert_eq!(found, [7; 100]);
        // Past the end of the file: an error, no signal.
        assert_eq!(mapping.read_from(&read, 4096, 100).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        assert!(mapping.populate(4096, 4096).is_err());
        assert!(mapping.read_from(&read, 8192, 1).is_err() && mapping.populate(usize::MAX, 2).is_err());
    }

    #[test]
    fn an_old_kernel_has_the_pages_reserved() {
        let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
        let file = File::options().create_new(true).read(true).write(true).open(dir.path().join("f")).unwrap();
        file.set_len(3 << 20).unwrap();
        let file = Arc::new(file);
        let mapping = Mapping::new(&file, 1 << 20, 2 << 20).unwrap();
        mapping.reserve(1 << 20, 1 << 20).unwrap();
        let blocks = file.metadata().unwrap().blocks() * 512;
        assert!((1 << 20..3 << 20).contains(&blocks), "{blocks}");
    }

    #[test]
    fn pages_are_there_and_content_stays() {
        let dir = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("f");
        let mut file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        file.write_all(b"before").unwrap();
        make_present(&file, (5 << 20) + 17).unwrap();
        assert_eq!(file.metadata().unwrap().size(), (5 << 20) + 17);
        assert!(file.metadata().unwrap().blocks() * 512 >= 5 << 20);
        assert_eq!(&std::fs::read(&path).unwrap()[..8], b"before\0\0");
        make_present(&file, 0).unwrap();
        assert_eq!(file.metadata().unwrap().size(), (5 << 20) + 17, "it never shrinks");
    }

    #[test]
    fn a_splice_does_not_wait() {
        let (from, mut write) = io::pipe().unwrap();
        let (to_read, to) = io::pipe().unwrap();
        let again = splice(from.as_fd(), to.as_fd(), 10).unwrap_err();
        assert_eq!(again.kind(), io::ErrorKind::WouldBlock);
        write.write_all(b"pages").unwrap();
        assert_eq!(splice(from.as_fd(), to.as_fd(), 10).unwrap(), 5);
        drop(write);
        assert_eq!(splice(from.as_fd(), to.as_fd(), 10).unwrap(), 0);
        drop(to);
        assert_eq!(io::read_to_string(to_read).unwrap(), "pages");
    }
}

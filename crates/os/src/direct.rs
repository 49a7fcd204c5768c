//! Large files that bypass the page cache. A store reads and writes gigabytes. Through the cache, this would evict the
//! job's own files. It would also be slower, because each page is copied once more and written back at an uncontrolled
//! time.
//!
//! `O_DIRECT` needs memory, offsets and lengths that are multiples of [`ALIGN`]. It is set on an open file with
//! fcntl(2), because open(2) creates the file before it refuses the flag. If the file system does not support it
//! (EINVAL, then or at the first read or write), the file is used normally, and what was read or written is dropped
//! from the cache afterwards.
//!
//! After a power cut, a file has what was written before the last [`DirectFile::sync`].
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::{File, Permissions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, PosixFadviseAdvice, fcntl, posix_fadvise};

use super::durable::Place;
use super::point::{Step, point};

/// Alignment of memory, offsets and lengths. No device in use has larger blocks, and a page has this size.
pub const ALIGN: usize = 4096;
const ALIGN_U64: u64 = 4096;

/// The next multiple of [`ALIGN`] that is not smaller.
#[must_use]
pub const fn padded(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// Zeroed memory that begins at a multiple of [`ALIGN`].
#[derive(Debug)]
pub struct Aligned {
    /// Never extended, so it does not move in memory.
    bytes: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// Allocates at least `len` bytes; the length is a multiple of [`ALIGN`].
    #[must_use]
    pub fn new(len: usize) -> Aligned {
        let len = padded(len);
        let bytes = vec![0; len + ALIGN];
        let start = bytes.as_ptr().align_offset(ALIGN);
        Aligned { bytes, start, len }
    }
}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[self.start..self.start + self.len]
    }
}

/// How a file is read and written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Bypasses the page cache if the file system can.
    Direct,
    /// Uses the page cache, and drops the data from it afterwards.
    Plain,
}

/// A file that is read or written in large pieces, each once.
#[derive(Debug)]
pub struct DirectFile {
    file: File,
    direct: AtomicBool,
    /// Start of the last written piece; the data before it need not be in the cache any more.
    behind: AtomicU64,
}

impl DirectFile {
    /// Creates a file with mode 0600 for writing.
    ///
    /// # Errors
    /// Those of open(2); `AlreadyExists` if there is one.
    pub fn create(path: &(impl Place + ?Sized), way: Way) -> io::Result<DirectFile> {
        point(Step::Write)?;
        let file = path.place()?.create_new(0o600)?;
        file.set_permissions(Permissions::from_mode(0o600))?;
        Ok(DirectFile::from(file, way))
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// Those of [`super::beneath::Beneath::read`].
    pub fn open(path: &(impl Place + ?Sized), way: Way) -> io::Result<DirectFile> {
        Ok(DirectFile::from(path.place()?.read()?, way))
    }

    fn from(file: File, way: Way) -> DirectFile {
        let direct = way == Way::Direct && set_direct(&file, true).is_ok();
        DirectFile { file, direct: AtomicBool::new(direct), behind: AtomicU64::new(0) }
    }

    /// How the file is read and written at present.
    #[must_use]
    pub fn way(&self) -> Way {
        if self.direct.load(Ordering::Relaxed) { Way::Direct } else { Way::Plain }
    }

    /// Its size in bytes.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn len(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.len())
    }

    /// Whether it has no bytes.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn is_empty(&self) -> io::Result<bool> {
        Ok(self.len()? == 0)
    }

    /// Writes `bytes`. Their address, their length and `offset` must be multiples of [`ALIGN`].
    ///
    /// # Errors
    /// Those of pwrite(2); `WriteZero` if the kernel takes nothing.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        point(Step::Write)?;
        match self.file.write_all_at(bytes, offset) {
            Err(error) if self.refused(&error) => self.file.write_all_at(bytes, offset)?,
            done => done?,
        }
        if self.way() == Way::Plain {
            let end = offset.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            self.leave_behind(offset, end);
        }
        Ok(())
    }

    /// Makes the file `len` bytes long: this removes the padding of the last block.
    ///
    /// # Errors
    /// Those of ftruncate(2).
    pub fn cut(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    /// Waits until content and size are on the disk.
    ///
    /// # Errors
    /// That of fdatasync(2); ENOSPC shows up here on file systems that allocate late.
    pub fn sync(&self) -> io::Result<()> {
        point(Step::Other)?;
        self.file.sync_data()?;
        if self.way() == Way::Plain {
            self.forget(0, 0);
        }
        Ok(())
    }

    /// Reads `len` bytes from `offset`. The result is a part of `into`, which must have room for the [`span`] of them.
    /// It is shorter only at the end of the file.
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn read_at<'a>(&self, into: &'a mut Aligned, offset: u64, len: usize) -> io::Result<&'a mut [u8]> {
        let (from, skip, whole) = span(offset, len);
        let target = into.get_mut(..whole).ok_or_else(|| io::Error::other("the span is larger than the buffer"))?;
        let got = match self.fill(target, from) {
            Err(error) if self.refused(&error) => self.fill(target, from)?,
            got => got?,
        };
        if self.way() == Way::Plain {
            self.forget(from, u64::try_from(got).unwrap_or(0));
        }
        Ok(into.get_mut(skip..got.min(skip + len)).unwrap_or_default())
    }

    fn fill(&self, target: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut got = 0;
        while let Some(rest) = target.get_mut(got..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, offset.saturating_add(u64::try_from(got).unwrap_or(u64::MAX))) {
                Ok(0) => break,
                Ok(n) => got += n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            // A direct read ends within a block only at the end of the file, and the next read could not begin there.
            if got % ALIGN != 0 && self.way() == Way::Direct {
                break;
            }
        }
        Ok(got)
    }

    /// Whether the kernel refused `O_DIRECT`. If so, it is switched off for this file.
    fn refused(&self, error: &io::Error) -> bool {
        let refused = error.raw_os_error() == Some(libc::EINVAL) && self.way() == Way::Direct;
        if refused {
            // If the flag cannot be cleared, the second try fails in the same way.
            let _ = set_direct(&self.file, false);
            self.direct.store(false, Ordering::Relaxed);
        }
        refused
    }

    /// Starts writing the last piece to the disk, and drops the earlier pieces from the cache.
    fn leave_behind(&self, offset: u64, end: u64) {
        sync_range(&self.file, offset, end - offset, libc::SYNC_FILE_RANGE_WRITE);
        let before = self.behind.swap(offset, Ordering::Relaxed);
        if before < offset {
            let wait =
                libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
            sync_range(&self.file, before, offset - before, wait);
            self.forget(before, offset - before);
        }
    }

    /// Drops a range from the cache. If the kernel ignores this, it only uses memory that can be reclaimed.
    fn forget(&self, offset: u64, len: u64) {
        if let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) {
            let _ = posix_fadvise(&self.file, offset, len, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
    }
}

/// The aligned range to read for `len` bytes from `offset`: its start, how many bytes precede the wanted ones, and its
/// length.
#[must_use]
pub fn span(offset: u64, len: usize) -> (u64, usize, usize) {
    let over = offset % ALIGN_U64;
    let skip = usize::try_from(over).unwrap_or(0);
    (offset - over, skip, padded(skip + len))
}

fn set_direct(file: &File, on: bool) -> nix::Result<()> {
    let mut flags = OFlag::from_bits_retain(fcntl(file, FcntlArg::F_GETFL)?);
    flags.set(OFlag::O_DIRECT, on);
    Errno::result(fcntl(file, FcntlArg::F_SETFL(flags))?).map(drop)
}

fn sync_range(file: &File, offset: u64, len: u64, flags: libc::c_uint) {
    let (Ok(offset), Ok(len)) = (i64::try_from(offset), i64::try_from(len)) else { return };
    // SAFETY: no memory is involved. Errors are reported by fdatasync.
    unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) };
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|n| u8::try_from(n % 251).unwrap()).collect()
    }

    #[test]
    fn memory_is_aligned_and_zeroed() {
        for len in [1, ALIGN, ALIGN + 1, 5 << 20] {
            let memory = Aligned::new(len);
            assert_eq!(memory.as_ptr().align_offset(ALIGN), 0);
            assert_eq!(memory.len(), padded(len));
            assert!(memory.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn what_is_written_is_read_back_both_ways() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        for way in [Way::Direct, Way::Plain] {
            let path = dir.path().join(format!("{way:?}"));
            let bytes = pattern(3 * ALIGN + 17);
            let mut memory = Aligned::new(bytes.len());
            memory[..bytes.len()].copy_from_slice(&bytes);
            let file = DirectFile::create(&path, way).unwrap();
            file.write_at(&memory[..2 * ALIGN], 0).unwrap();
            file.write_at(&memory[2 * ALIGN..], 2 * ALIGN_U64).unwrap();
            file.cut(bytes.len() as u64).unwrap();
            file.sync().unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), bytes);
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);

            let file = DirectFile::open(&path, way).unwrap();
            let mut into = Aligned::new(4 * ALIGN);
            for (offset, len) in [(0, 10), (5, ALIGN), (ALIGN, ALIGN), (3 * ALIGN, 17), (0, bytes.len())] {
                let read = file.read_at(&mut into, offset as u64, len).unwrap();
                assert_eq!(read, &bytes[offset..offset + len], "{way:?} {offset} {len}");
            }
            // Beyond the end.
            assert_eq!(file.read_at(&mut into, 3 * ALIGN_U64 + 10, 100).unwrap(), &bytes[3 * ALIGN + 10..]);
            assert_eq!(file.read_at(&mut into, 3 * ALIGN_U64 + 17, 100).unwrap(), b"");
            assert_eq!(file.read_at(&mut into, 9 * ALIGN_U64, 100).unwrap(), b"");
            assert!(file.read_at(&mut into, 1, 4 * ALIGN).is_err());
        }
    }

    #[test]
    fn where_the_kernel_refuses_at_the_first_write_it_goes_the_plain_way() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("f");
        let file = DirectFile::create(&path, Way::Direct).unwrap();
        if !rekindle_testing::require("root", file.way() == Way::Direct, "/var/tmp takes no O_DIRECT") {
            return;
        }
        // Unaligned memory is refused, as `O_DIRECT` is on a file system without it.
        let memory = Aligned::new(2 * ALIGN);
        file.write_at(&memory[1..=ALIGN], 0).unwrap();
        assert_eq!((file.way(), file.len().unwrap()), (Way::Plain, ALIGN_U64));
        file.write_at(&memory[1..=ALIGN], ALIGN_U64).unwrap();
        assert_eq!(file.len().unwrap(), 2 * ALIGN_U64);
    }

    #[test]
    fn nothing_is_left_in_the_page_cache() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        for way in [Way::Direct, Way::Plain] {
            let path = dir.path().join(format!("{way:?}"));
            let memory = Aligned::new(1 << 20);
            let file = DirectFile::create(&path, way).unwrap();
            for n in 0..8 {
                file.write_at(&memory, n << 20).unwrap();
            }
            file.sync().unwrap();
            assert_eq!(cached(&path), 0, "{way:?}, written");
            let file = DirectFile::open(&path, way).unwrap();
            let mut into = Aligned::new(1 << 20);
            for n in 0..8 {
                file.read_at(&mut into, n << 20, 1 << 20).unwrap();
            }
            // Read-ahead may still be loading a last page.
            assert!(cached(&path) <= 64, "{way:?}, read");
        }
    }

    /// Pages of the file in the cache.
    fn cached(path: &Path) -> usize {
        let file = std::sync::Arc::new(File::open(path).unwrap());
        let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let mut pages = vec![0_u8; len.div_ceil(4096)];
        // SAFETY: a new mapping at an address that the kernel chooses.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the range is mapped, and there is a byte for each page of it.
        assert_eq!(unsafe { libc::mincore(start, len, pages.as_mut_ptr()) }, 0);
        // SAFETY: ours, and not used any more.
        unsafe { libc::munmap(start, len) };
        pages.iter().filter(|page| *page & 1 == 1).count()
    }
}

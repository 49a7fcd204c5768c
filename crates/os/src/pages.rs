//! Moves pages in bulk: splice between pipes, shared mappings of files that only the kernel writes, and pages of files
//! in RAM that are allocated before they are needed.
//!
//! The first write to a tmpfs page makes the kernel allocate and clear it. At 4 KiB a time this is four times slower
//! than the copy itself, and it would happen while the job is frozen. So the pages are allocated before, by several
//! threads, with `MADV_POPULATE_WRITE` (Linux 5.14). It reports a full tmpfs as an error, and existing pages cost it
//! little; fallocate(2) takes 1.7 s for each GiB of those.
//!
//! A mapping here is never read or written by our own instructions, but by read(2), process_vm_writev(2) and madvise(2)
//! on its range. If a page is not available (the file was cut, its file system is full), those fail with EFAULT or a
//! short count; a load or a store would be a SIGBUS. For the same reason nothing here returns a slice.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};
use nix::sys::uio::{RemoteIoVec, process_vm_writev};
use nix::unistd::Pid;
use rustix::pipe::SpliceFlags;

use super::parallel::{cores, in_parallel};

/// Bytes mapped and populated in one step. A multiple of every huge page size in use.
const STRETCH: u64 = 1 << 30;

/// More threads did not clear pages faster on the machines measured, and the job runs at the same time.
const MAX_THREADS: usize = 4;

/// Number of threads that may work on pages while the job runs: fewer than the cores.
#[must_use]
pub fn spare_threads() -> usize {
    (cores() / 2).clamp(1, MAX_THREADS)
}

/// Makes the file at least `len` bytes long, and all its pages present. Existing content is kept.
///
/// # Errors
/// `StorageFull` or `OutOfMemory` if the tmpfs or the memory of the machine is not enough; the file may have grown
/// then.
pub fn make_present(file: &File, len: u64) -> io::Result<()> {
    make_all_present(vec![(file.try_clone()?, len)]).map_err(|(_, source)| source)
}

/// Whether the file is in a tmpfs.
///
/// # Errors
/// Those of fstatfs(2).
pub fn is_in_memory(file: &File) -> io::Result<bool> {
    Ok(fstatfs(file)?.filesystem_type() == TMPFS_MAGIC)
}

/// Makes the file at least `len` bytes long, with room for all of it: [`make_present`] in memory. On a disk blocks are
/// reserved, and nothing is written.
///
/// # Errors
/// As [`make_present`]; `StorageFull` also if the disk is full.
pub fn make_room(file: &File, len: u64) -> io::Result<()> {
    if is_in_memory(file)? || len == 0 {
        return make_present(file, len);
    }
    let length = i64::try_from(len).map_err(io::Error::other)?;
    loop {
        match fallocate(file, FallocateFlags::empty(), 0, length) {
            Err(Errno::EINTR) => {}
            // A file system that cannot reserve blocks.
            Err(Errno::EOPNOTSUPP) => return make_present(file, len),
            other => return Ok(other?),
        }
    }
}

/// [`make_present`] for several files: the threads are shared among all of them.
///
/// # Errors
/// As [`make_present`], with the number of the file.
pub fn make_all_present(files: Vec<(File, u64)>) -> Result<(), (usize, io::Error)> {
    let mut stretches = Vec::new();
    for (at, (file, len)) in files.into_iter().enumerate() {
        let failed = |source| (at, source);
        if file.metadata().map_err(failed)?.size() < len {
            // First, because a tmpfs with huge=within_size uses huge pages only below the size.
            file.set_len(len).map_err(failed)?;
        }
        let file = Arc::new(file);
        stretches.extend((0..len.div_ceil(STRETCH)).map(|n| (at, Arc::clone(&file), n * STRETCH, len)));
    }
    let populate = |(at, file, start, len): (usize, Arc<File>, u64, u64)| {
        let populate = || {
            let length = usize::try_from(STRETCH.min(len - start)).map_err(io::Error::other)?;
            Mapping::new(&file, start, length)?.populate(0, length)
        };
        populate().map_err(|source| (at, source))
    };
    in_parallel(stretches, spare_threads(), populate).map(drop)
}

/// Bytes mapped at a time by a [`Writer`]. Its pages add at most this much to our memory, because mapped pages are
/// counted.
const WINDOW: u64 = 16 << 20;

/// One of several threads that write to the same file.
///
/// write(2) on a tmpfs holds the file's lock while it looks for pages and copies (Linux 6.18: `shmem_file_write_iter`).
/// Threads that write to one file take turns, and the waiting ones spin. It is worse in a virtual machine whose host
/// reclaims free memory (free page reporting of the balloon): the first touch of a page waits for the host, measured at
/// 11 us for each 4 KiB, and no other thread makes progress in that time. Through a mapping the pages are found and
/// filled without that lock. On other file systems pwrite(2) is used, because there each page would be read first.
#[derive(Debug)]
pub struct Writer {
    file: Arc<File>,
    /// The end of what can be written through a mapping: the file's length, which a mapping cannot extend.
    mappable: u64,
    /// The mapped part of the file, and its offset.
    window: Option<(u64, Mapping)>,
}

impl Writer {
    /// Writes to a file that is open for reading and writing, and already has its final size.
    ///
    /// # Errors
    /// That of fstat(2).
    pub fn of(file: File) -> io::Result<Writer> {
        let mappable = if is_in_memory(&file).unwrap_or(false) { file.metadata()?.size() } else { 0 };
        Ok(Writer { file: Arc::new(file), mappable, window: None })
    }

    /// Writes all of `bytes`.
    ///
    /// # Errors
    /// Those of pwrite(2).
    pub fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let end = u64::try_from(bytes.len()).ok().and_then(|len| offset.checked_add(len));
        if end.is_some_and(|end| end <= self.mappable) && self.write_mapped(bytes, offset).is_ok() {
            return Ok(());
        }
        // The error of a mapping does not say why no page is available, so write normally.
        self.file.write_all_at(bytes, offset)
    }

    fn write_mapped(&mut self, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
        let size = |n: u64| usize::try_from(n).map_err(io::Error::other);
        while !bytes.is_empty() {
            let start = offset - offset % WINDOW;
            let mapping = match self.window.take().filter(|(of, _)| *of == start) {
                Some((_, mapping)) => mapping,
                None => Mapping::new(&self.file, start, size(WINDOW)?)?,
            };
            let at = size(offset - start)?;
            let (now, later) = bytes.split_at(bytes.len().min(mapping.length() - at));
            mapping.write(at, now)?;
            self.window = Some((start, mapping));
            offset += u64::try_from(now.len()).map_err(io::Error::other)?;
            bytes = later;
        }
        Ok(())
    }
}

/// Moves up to `length` bytes from one pipe to another pipe or device, without waiting. Between pipes whole pages
/// change their owner and nothing is copied.
///
/// Returns how many bytes were moved: 0 at the end of the stream, and also for a FIFO that nobody has opened for
/// writing.
///
/// # Errors
/// EAGAIN if there is nothing to move now but a writer still exists, or if there is no room.
pub fn splice(from: BorrowedFd<'_>, to: BorrowedFd<'_>, length: usize) -> io::Result<usize> {
    Ok(rustix::pipe::splice(from, None, to, None, length, SpliceFlags::NONBLOCK | SpliceFlags::MOVE)?)
}

/// A range of a file, mapped shared and for writing.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<libc::c_void>,
    length: usize,
    file: Arc<File>,
    /// Offset in the file.
    offset: i64,
}

// SAFETY: the address is owned by this value alone and valid on every thread until it is dropped.
unsafe impl Send for Mapping {}
// SAFETY: through a shared reference only the kernel writes, to memory that no reference points to.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from `offset`, a multiple of the page size. The file may be shorter. On a tmpfs with huge
    /// pages the kernel chooses a fitting address.
    ///
    /// # Errors
    /// When the kernel does not map it.
    pub fn new(file: &Arc<File>, offset: u64, length: usize) -> io::Result<Mapping> {
        let offset = i64::try_from(offset).map_err(io::Error::other)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let fd = file.as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing of ours.
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

    /// The address of `at`; fails unless `length` bytes follow it in the mapping.
    fn range(&self, at: usize, length: usize) -> io::Result<*mut libc::c_void> {
        if at.checked_add(length).is_none_or(|end| end > self.length) {
            return Err(io::Error::other(format!("{length} bytes at {at} of a mapping of {}", self.length)));
        }
        Ok(self.start.as_ptr().wrapping_byte_add(at))
    }

    /// Makes sure that the pages of a range exist and are mapped, so that writing needs no page fault. New pages are
    /// zeroed.
    ///
    /// # Errors
    /// `StorageFull` or `OutOfMemory` if no page is available, or the file is shorter.
    pub fn populate(&self, at: usize, length: usize) -> io::Result<()> {
        let start = self.range(at, length)?;
        loop {
            // SAFETY: the range is in our mapping; only pages are added.
            let answer = unsafe { libc::madvise(start, length, libc::MADV_POPULATE_WRITE) };
            match Errno::result(answer) {
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Ok(_) => return Ok(()),
                // tmpfs has no page for it (madvise(2)).
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

    /// Writes all of `bytes` to `at`.
    ///
    /// # Errors
    /// EFAULT if a page is missing and cannot be allocated; a part may have been written. EPERM or ENOSYS if a seccomp
    /// filter does not allow process_vm_writev(2).
    pub fn write(&self, at: usize, mut bytes: &[u8]) -> io::Result<()> {
        let mut base = self.range(at, bytes.len())?.addr();
        while !bytes.is_empty() {
            let to = RemoteIoVec { base, len: bytes.len() };
            let written = process_vm_writev(Pid::this(), &[IoSlice::new(bytes)], &[to])?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            base += written;
            bytes = bytes.get(written..).unwrap_or_default();
        }
        Ok(())
    }

    /// Reads up to `length` bytes to `at`.
    ///
    /// # Errors
    /// Those of read(2); EFAULT if a page is missing and cannot be allocated.
    pub fn read_from(&self, from: impl AsFd, at: usize, length: usize) -> io::Result<usize> {
        let to = self.range(at, length)?;
        let fd = from.as_fd().as_raw_fd();
        // SAFETY: the range is in our mapping, to which there are no references.
        let got = unsafe { libc::read(fd, to, length) };
        usize::try_from(got).map_err(|_| io::Error::last_os_error())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours and not used any more. The call fails only for an invalid range.
        unsafe { libc::munmap(self.start.as_ptr(), self.length) };
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::thread;
    use std::time::{Duration, Instant};

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
        // Beyond the end of the file: an error, no signal.
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
    fn room_on_a_disk_is_reserved_and_in_memory_there() {
        for place in ["/dev/shm", "/var/tmp"] {
            let mut file = tempfile::tempfile_in(place).unwrap();
            file.write_all(b"before").unwrap();
            make_room(&file, 5 << 20).unwrap();
            let metadata = file.metadata().unwrap();
            assert!(metadata.size() == 5 << 20 && metadata.blocks() * 512 >= 5 << 20, "{place}: {metadata:?}");
            let mut found = [7; 8];
            file.read_exact_at(&mut found, 0).unwrap();
            assert_eq!(&found, b"before\0\0");
            make_room(&file, 0).unwrap();
            assert_eq!(file.metadata().unwrap().size(), 5 << 20, "it never shrinks");
            assert!(make_room(&file, u64::MAX).is_err(), "{place}");
        }
    }

    #[test]
    fn several_threads_write_one_file() {
        const PIECE: usize = 300_001;
        // Two windows and a part of a third. The rest of the file is not changed.
        let content: Vec<u8> = (0..9_000_000_u32).flat_map(u32::to_le_bytes).collect();
        for place in ["/dev/shm", "/var/tmp"] {
            let dir = tempfile::tempdir_in(place).unwrap();
            let path = dir.path().join("f");
            File::create(&path).unwrap().set_len(u64::try_from(content.len()).unwrap() + (4 << 20)).unwrap();
            let pieces: Vec<(usize, &[u8])> = content.chunks(PIECE).enumerate().collect();
            let write = |(n, piece): (usize, &[u8])| {
                let mut writer = Writer::of(File::options().read(true).write(true).open(&path).unwrap()).unwrap();
                assert_eq!(writer.mappable > 0, place == "/dev/shm");
                writer.write_at(piece, u64::try_from(n * PIECE).unwrap()).unwrap();
                assert_eq!(writer.window.is_some(), place == "/dev/shm");
                Ok::<_, ()>(())
            };
            in_parallel(pieces, 4, write).unwrap();
            let found = std::fs::read(&path).unwrap();
            assert!(found.starts_with(&content) && found[content.len()..].iter().all(|byte| *byte == 0));
            let blocks = std::fs::metadata(&path).unwrap().blocks() * 512;
            assert!(blocks < u64::try_from(content.len()).unwrap() + (2 << 20), "what is not written stays a hole");
        }
    }

    #[test]
    fn what_is_beyond_the_end_is_written_too() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"begin").unwrap();
        let mut writer = Writer::of(File::options().read(true).write(true).open(&path).unwrap()).unwrap();
        writer.write_at(b"n and end", 4).unwrap();
        // The file was cut by somebody else: the mapping has no page there.
        File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        writer.write_at(b"anew", 0).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"anew");
        writer.write_at(b"w and long", 3).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"anew and long");
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
        // A process that another test starts has the end that writes for a moment too: until it executes its program.
        let deadline = Instant::now() + Duration::from_secs(10);
        let end = loop {
            match splice(from.as_fd(), to.as_fd(), 10) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => thread::yield_now(),
                end => break end,
            }
        };
        assert_eq!(end.unwrap(), 0);
        drop(to);
        assert_eq!(io::read_to_string(to_read).unwrap(), "pages");
    }
}

//! A file that memory is copied to or from, mapped and registered with the driver.
#![allow(unsafe_code, reason = "mappings that the GPU reads and writes; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::gpus::Gpus;
use super::known::Known;
use rekindle_os::pages;

/// What the driver maps at once, and the size of a huge page.
pub(super) const GRANULE: u64 = 2 << 20;
/// Addresses for a file, as many as one may ever need.
const ADDRESSES: usize = 1 << 41;
/// Bytes of a file that can be mapped: it begins at a multiple of [`GRANULE`].
pub(super) const MOST: u64 = ADDRESSES as u64 - GRANULE;

/// A file, mapped. Its pages are registered with the driver, so that the GPU reads and writes them itself: they do not move,
/// and they are the file's only as long as it is not cut. So a copy leaves marks in the pages before it begins, through the
/// mapping, and looks for them afterwards: one that is still there is a page that the GPU did not write.
pub(super) struct Mapped {
    pub(super) file: File,
    /// Device and inode.
    pub(super) key: [u64; 2],
    /// The addresses that were reserved. The file is mapped from `base` on.
    reserved: usize,
    base: usize,
    pub(super) length: u64,
    /// Whether its pages may be registered: what a device writes to those of a disk's file is not known to be changed, and can
    /// be lost. Linux 6.5 and later refuses that for all files but those in memory.
    pub(super) is_in_memory: bool,
    /// Begin and end of each part, and whether it is registered.
    pub(super) ranges: Vec<(u64, u64, bool)>,
    /// What was copied into it.
    pub(super) known: Option<Known>,
    /// The number of GPUs in use when the driver refused to register a part. That takes long, so it is asked again only for
    /// more GPUs, or for the next copy.
    refused_with: usize,
}

impl Mapped {
    pub(super) fn new(file: File, key: [u64; 2]) -> Result<Mapped, String> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping without access.
        let base = unsafe { libc::mmap(ptr::null_mut(), ADDRESSES, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(format!("no addresses for the file: {}", std::io::Error::last_os_error()));
        }
        // Huge pages are mapped whole only where address and offset agree.
        let reserved = base.expose_provenance();
        let base = reserved.next_multiple_of(usize::try_from(GRANULE).unwrap_or(1));
        let is_in_memory = pages::is_in_memory(&file).unwrap_or(false);
        Ok(Mapped {
            file,
            key,
            reserved,
            base,
            length: 0,
            is_in_memory,
            ranges: Vec::new(),
            known: None,
            refused_with: 0,
        })
    }

    pub(super) fn address(&self, at: u64) -> usize {
        self.base + usize::try_from(at).unwrap_or(0)
    }

    /// Adds a part at the end, or gives up parts there. What is given up is not registered any more.
    pub(super) fn set_length(&mut self, gpus: &mut Gpus, bytes: u64) {
        self.refused_with = 0;
        if bytes > self.length {
            self.ranges.push((self.length, bytes, false));
        }
        while let Some((begin, end, is_registered)) = self.ranges.last().copied().filter(|(_, end, _)| *end > bytes) {
            if is_registered {
                gpus.unregister(self.address(begin));
            }
            self.ranges.pop();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            let (at, length) = (self.address(begin), usize::try_from(end - begin).unwrap_or(0));
            // SAFETY: in place of a part of our own mapping, which nobody borrows.
            unsafe { libc::mmap(ptr::with_exposed_provenance_mut(at), length, libc::PROT_NONE, flags, -1, 0) };
            if begin < bytes {
                self.ranges.push((begin, bytes, false));
            }
        }
        self.length = bytes;
        if let Some(known) = &mut self.known {
            known.cut(bytes);
        }
    }

    /// Maps what is not mapped yet.
    pub(super) fn map_all(&self) -> Result<(), String> {
        for (begin, end, _) in self.ranges.iter().filter(|(.., is_registered)| !is_registered) {
            self.map(*begin, *end)?;
        }
        Ok(())
    }

    fn map(&self, begin: u64, end: u64) -> Result<(), String> {
        let (at, length) = (self.address(begin), usize::try_from(end - begin).unwrap_or(0));
        let offset = libc::off_t::try_from(begin).map_err(|error| error.to_string())?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: in place of a part of our own addresses, which nobody borrows.
        let mapped = unsafe {
            libc::mmap(ptr::with_exposed_provenance_mut(at), length, prot, flags, self.file.as_raw_fd(), offset)
        };
        if mapped == libc::MAP_FAILED {
            return Err(format!("cannot map it: {}", std::io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Registers what is not registered, if there is a context. If that fails, the copy is slower.
    pub(super) fn register(&mut self, gpus: &mut Gpus) {
        let here = gpus.devices.len();
        if here == self.refused_with || !self.is_in_memory {
            return;
        }
        for at in 0..self.ranges.len() {
            let Some((begin, end, false)) = self.ranges.get(at).copied() else { continue };
            let length = usize::try_from(end - begin).unwrap_or(0);
            let is_registered = self.map(begin, end).is_ok() && gpus.register(self.address(begin), length).is_ok();
            if let Some(range) = self.ranges.get_mut(at) {
                range.2 = is_registered;
            }
            if !is_registered {
                self.refused_with = here;
            }
        }
    }

    pub(super) fn registered(&self) -> u64 {
        self.ranges.iter().filter(|(.., is_registered)| *is_registered).map(|(begin, end, _)| end - begin).sum()
    }

    /// The parts of a range, each within one registered part: the driver copies none across two.
    pub(super) fn stretches(&self, offset: u64, bytes: u64) -> Vec<(u64, u64)> {
        let common = |&(begin, end, _): &(u64, u64, bool)| {
            let (begin, end) = (begin.max(offset), end.min(offset + bytes));
            (begin < end).then(|| (begin, end - begin))
        };
        self.ranges.iter().filter_map(common).collect()
    }

    /// The last word of each huge page of a range.
    fn words(&self, offset: u64, bytes: u64) -> impl Iterator<Item = *mut u64> {
        let ends = (1..=bytes.div_ceil(GRANULE)).map(move |page| offset + (page * GRANULE).min(bytes));
        ends.map(|end| ptr::with_exposed_provenance_mut::<u64>(self.address(end) - 8))
    }

    /// The word before this offset.
    pub(super) fn word_before(&self, offset: u64) -> u64 {
        let word = ptr::with_exposed_provenance::<u64>(self.address(offset) - 8);
        // SAFETY: the caller names a part that is mapped; whoever cuts the file ends this process, which is noticed.
        unsafe { word.read_volatile() }
    }

    pub(super) fn mark(&self, offset: u64, bytes: u64, mark: u64) {
        for word in self.words(offset, bytes) {
            // SAFETY: mapped, and writable; whoever cuts the file ends this process, which is noticed.
            unsafe { word.write_volatile(mark) };
        }
    }

    pub(super) fn check_marks(&self, offset: u64, bytes: u64, mark: u64) -> Result<(), String> {
        for word in self.words(offset, bytes) {
            // SAFETY: as above.
            if unsafe { word.read_volatile() } == mark {
                return Err("the GPU did not write to the file: its pages were replaced".into());
            }
        }
        Ok(())
    }
}

/// A part of a file that is copied to another one: its address in the first, in the second, and its bytes.
pub(super) type Between = (usize, usize, u64);

/// Bytes that a thread takes at once.
const TAKEN: u64 = 32 << 20;
/// One thread copies some 10 GB/s. The job runs, and needs the processors.
const THREADS: usize = 4;

/// Begins to copy from files to another one.
pub(super) fn begin_between(parts: &[Between]) -> io::Result<JoinHandle<()>> {
    let pieces = parts.iter().flat_map(|&(from, to, bytes)| {
        (0..bytes.div_ceil(TAKEN)).map(move |number| {
            let at = usize::try_from(number * TAKEN).unwrap_or(0);
            (from + at, to + at, usize::try_from(TAKEN.min(bytes - number * TAKEN)).unwrap_or(0))
        })
    });
    let pieces = Mutex::new(pieces.collect::<Vec<_>>());
    let next = move || pieces.lock().unwrap_or_else(PoisonError::into_inner).pop();
    let threads = thread::available_parallelism().map_or(1, |all| all.get() / 4).clamp(1, THREADS);
    thread::Builder::new().spawn(move || {
        let copy = || {
            while let Some((from, to, bytes)) = next() {
                let from = ptr::with_exposed_provenance::<u8>(from);
                // SAFETY: both are mapped until the end of this is awaited, and nobody else writes to either; whoever cuts
                // one of the files ends this process, which is noticed. They are different files.
                unsafe { ptr::copy_nonoverlapping(from, ptr::with_exposed_provenance_mut(to), bytes) };
            }
        };
        thread::scope(|scope| {
            for _ in 1..threads {
                // Where none can be started there are fewer.
                let _ = thread::Builder::new().spawn_scoped(scope, copy);
            }
            copy();
        });
    })
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own addresses, which nobody borrows. They are not registered: a file is forgotten after `set_length`
        // of 0.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.reserved), ADDRESSES) };
    }
}

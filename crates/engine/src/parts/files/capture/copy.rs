//! Copies of files, on several threads.
//!
//! The work goes by the data of a file and not by its length: a job creates a file of exabytes with one ftruncate(2).
//! It is found only when a thread takes it, because a file can have millions of extents.

use std::fs::File;
use std::io;
use std::ops::Range;

use rekindle_os::parallel::{cores, in_parallel_from};
use rekindle_os::sparse;

/// Bytes that one thread copies at a time.
const STRETCH: u64 = 16 << 20;

/// A file to be copied.
pub(super) struct Job {
    from: File,
    into: File,
    size: u64,
}

impl Job {
    /// Makes `into` equal to the first `size` bytes of `from`, once its data is copied.
    pub(super) fn new(from: File, size: u64, into: File) -> io::Result<Job> {
        // The earlier copy may have data where the file has a hole now. Without holes, the pages of the copy are reused.
        // The number of blocks does not tell: those of posix_fallocate(3) count, and are holes for lseek(2).
        let first = sparse::next_data(&from, 0, size)?;
        if first != Some(0..size) {
            into.set_len(0)?;
        }
        into.set_len(size)?;
        Ok(Job { from, into, size })
    }

    /// The data, in pieces for one thread each. Each extent is looked for once: its end is far away in a large file.
    fn stretches(&self) -> impl Iterator<Item = io::Result<(&Job, Range<u64>)>> {
        sparse::data(&self.from, 0..self.size).flat_map(move |extent| {
            let (extent, failed) = match extent {
                Ok(extent) => (extent, None),
                Err(error) => (0..0, Some(Err(error))),
            };
            let mut at = extent.start;
            let pieces = std::iter::from_fn(move || {
                let piece = at..at.saturating_add(STRETCH).min(extent.end);
                at = piece.end;
                (!piece.is_empty()).then_some(Ok((self, piece)))
            });
            failed.into_iter().chain(pieces)
        })
    }
}

/// Copies all of them. Returns `Interrupted` if cancelled.
pub(super) fn all(jobs: &[Job], cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
    let one = |stretch: io::Result<(&Job, Range<u64>)>| match stretch? {
        _ if cancelled() => Err(io::ErrorKind::Interrupted.into()),
        (job, range) => sparse::copy_data(&job.from, range, &job.into).map(drop),
    };
    in_parallel_from(jobs.iter().flat_map(Job::stretches), cores(), one).map(drop)
}

/// Copies the first `size` bytes of a file.
pub(super) fn whole(from: &File, size: u64, into: &File, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
    all(&[Job::new(from.try_clone()?, size, into.try_clone()?)?], cancelled)
}

//! Copies of files, on several threads.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use rekindle_os::parallel::{cores, in_parallel};
use rekindle_os::sparse;

/// Bytes that one thread copies at a time.
const STRETCH: u64 = 16 << 20;

/// A range of a file to be copied to the same place of another file.
pub(super) struct Job {
    from: Arc<File>,
    into: Arc<File>,
    range: Range<u64>,
}

/// The work that makes `into` equal to the first `size` bytes of `from`.
pub(super) fn jobs(from: File, size: u64, has_holes: bool, into: File) -> io::Result<Vec<Job>> {
    // The earlier copy may have data where the file has a hole now. Without holes, the pages of the copy are reused.
    if has_holes {
        into.set_len(0)?;
    }
    into.set_len(size)?;
    let (from, into) = (Arc::new(from), Arc::new(into));
    let stretch = |n: u64| n * STRETCH..((n + 1) * STRETCH).min(size);
    let job = |range| Job { from: Arc::clone(&from), into: Arc::clone(&into), range };
    Ok((0..size.div_ceil(STRETCH)).map(stretch).map(job).collect())
}

/// Copies all of them. Returns `Interrupted` if cancelled.
pub(super) fn all(jobs: Vec<Job>, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
    let one = |job: Job| match cancelled() {
        true => Err(io::ErrorKind::Interrupted.into()),
        false => sparse::copy(&job.from, job.range.clone(), &job.into, job.range.start),
    };
    in_parallel(jobs, cores(), one).map(drop)
}

/// Copies the first `size` bytes of a file.
pub(super) fn whole(from: &File, size: u64, into: &File, cancelled: &(dyn Fn() -> bool + Sync)) -> io::Result<()> {
    all(jobs(from.try_clone()?, size, true, into.try_clone()?)?, cancelled)
}

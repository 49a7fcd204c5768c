//! Walking and hashing the files of an image.

use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Large enough that the system call costs nothing, small enough for the cache of a core.
const BUFFER: usize = 1 << 20;
/// More threads than this read a disk no faster, and the job runs on the other cores.
const MAX_THREADS: usize = 8;

/// What was found in a folder.
#[derive(Debug)]
pub(super) struct Entry {
    /// Relative to where the walk began.
    pub(super) relative: PathBuf,
    pub(super) kind: Kind,
}

/// What an entry is, without following symbolic links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File { size: u64 },
    Folder,
    Other,
}

/// Lists all below `root`, at any depth; or the path that can not be read.
pub(super) fn walk(root: &Path) -> Result<Vec<Entry>, (PathBuf, io::Error)> {
    let mut found = Vec::new();
    let mut open = vec![PathBuf::new()];
    while let Some(folder) = open.pop() {
        let path = root.join(&folder);
        let failed = |source| (path.clone(), source);
        for entry in fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let relative = folder.join(entry.file_name());
            let meta = entry.metadata().map_err(|source| (entry.path(), source))?;
            let kind = match meta {
                meta if meta.is_dir() => Kind::Folder,
                meta if meta.is_file() => Kind::File { size: meta.len() },
                _ => Kind::Other,
            };
            if kind == Kind::Folder {
                open.push(relative.clone());
            }
            found.push(Entry { relative, kind });
        }
    }
    Ok(found)
}

/// Size and BLAKE3 of what is in the file from where it stands.
pub(super) fn hash(mut file: &File) -> io::Result<(u64, blake3::Hash)> {
    let mut buffer = vec![0; BUFFER];
    let mut hasher = blake3::Hasher::new();
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok((hasher.count(), hasher.finalize())),
            Ok(n) => hasher.update(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => &mut hasher,
            Err(error) => return Err(error),
        };
    }
}

/// Does `work` for each item, the largest first, on several threads, until one fails. The answers are in no order.
pub(super) fn in_parallel<T, R, E>(
    mut items: Vec<(T, u64)>,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E>
where
    T: Send,
    R: Send,
    E: Send,
{
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS).min(items.len());
    // Taken from the end.
    items.sort_by_key(|(_, size)| *size);
    let queue = Mutex::new(items);
    let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || queue().pop();
    let run = || {
        let done = std::iter::from_fn(next).map(|(item, _)| work(item)).collect::<Result<Vec<R>, E>>();
        done.inspect_err(|_| queue().clear())
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for other in others {
            let more = other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done = done.and_then(|mut done| {
                done.extend(more?);
                Ok(done)
            });
        }
        done
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_done_once() {
        for n in [0_u64, 1, 2, 1000] {
            let mut done = in_parallel((0..n).map(|i| (i, i)).collect(), Ok::<_, ()>).unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_failure_is_the_answer_and_ends_the_work() {
        let looked_at = std::sync::atomic::AtomicUsize::new(0);
        let work = |i: u32| {
            looked_at.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // Largest first: this one comes at once. The others wait, so that the queue is cleared before it is empty.
            thread::sleep(std::time::Duration::from_millis(u64::from(i != 0)));
            if i == 0 { Err("no") } else { Ok(()) }
        };
        let items = (0..10_000).map(|i| (i, if i == 0 { 9 } else { 0 })).collect();
        assert_eq!(in_parallel(items, work).map(|all| all.len()), Err("no"));
        assert!(looked_at.into_inner() < 10_000);
    }

    #[test]
    fn a_hash_over_several_buffers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let bytes: Vec<u8> = (0..=255).cycle().take(2 * BUFFER + 17).collect();
        fs::write(&path, &bytes).unwrap();
        let (size, found) = hash(&File::open(&path).unwrap()).unwrap();
        assert_eq!((size, found), (2 * 1024 * 1024 + 17, blake3::hash(&bytes)));
    }
}

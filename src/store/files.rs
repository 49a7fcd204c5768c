//! Walking and hashing the files of an image.

use std::fs::{self, File};
use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
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

/// Does `work` for each item that has a size, the largest first, on several threads. The answers are in no order.
pub(super) fn in_parallel<T, R>(mut items: Vec<(T, u64)>, work: impl Fn(&(T, u64)) -> R + Sync) -> Vec<R>
where
    T: Send,
    R: Send,
{
    let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(MAX_THREADS).min(items.len());
    // Taken from the end.
    items.sort_by_key(|(_, size)| *size);
    let queue = Mutex::new(items);
    let next = || queue.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
    let run = || std::iter::from_fn(next).map(|item| work(&item)).collect::<Vec<R>>();
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    })
}

//! Lists and hashes the files of an image.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::path::PathBuf;

use rekindle_os::beneath::Beneath;
use rekindle_os::parallel;

/// Large enough to make the cost of system calls negligible, small enough for the cache of a core.
const BUFFER: usize = 1 << 20;
/// More threads do not read a disk faster, and the job runs on the other cores.
pub(super) const MAX_THREADS: usize = 8;

/// What was found in a folder.
#[derive(Debug)]
pub(super) struct Entry {
    /// Relative to the root of the walk.
    pub(super) relative: PathBuf,
    pub(super) kind: Kind,
    pub(super) meta: Metadata,
}

/// The kind of an entry; symbolic links are not followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    File { size: u64 },
    Folder,
    Other,
}

/// Lists everything below `root`, at any depth; or returns the path that cannot be read.
pub(super) fn walk(root: &Beneath) -> Result<Vec<Entry>, (PathBuf, io::Error)> {
    let mut found = Vec::new();
    let mut open = vec![(root.clone(), PathBuf::new())];
    while let Some((folder, above)) = open.pop() {
        for (place, meta) in folder.entries().map_err(|source| (folder.path().to_owned(), source))? {
            let relative = above.join(place.file_name().unwrap_or_default());
            let kind = match &meta {
                meta if meta.is_dir() => Kind::Folder,
                meta if meta.is_file() => Kind::File { size: meta.len() },
                _ => Kind::Other,
            };
            if kind == Kind::Folder {
                open.push((place, relative.clone()));
            }
            found.push(Entry { relative, kind, meta });
        }
    }
    Ok(found)
}

/// Size and BLAKE3 hash of the file from its present position.
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

/// Runs `work` for each item, the largest first, on at most `threads` threads, until one fails. The results are in no
/// order.
pub(super) fn in_parallel<T, R, E>(
    mut items: Vec<(T, u64)>,
    threads: usize,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E>
where
    T: Send,
    R: Send,
    E: Send,
{
    // Items are taken from the end.
    items.sort_by_key(|(_, size)| *size);
    parallel::in_parallel(items, threads, |(item, _)| work(item))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_is_first() {
        let begun = std::sync::Mutex::new(Vec::new());
        let note = |n: u64| {
            begun.lock().unwrap().push(n);
            Ok::<_, ()>(())
        };
        in_parallel(vec![(1, 1), (3, 3), (2, 2)], 1, note).unwrap();
        assert_eq!(begun.into_inner().unwrap(), [3, 2, 1]);
    }

    #[test]
    fn a_hash_over_several_buffers() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        let bytes: Vec<u8> = (0..=255).cycle().take(2 * BUFFER + 17).collect();
        std::fs::write(&path, &bytes).unwrap();
        let (size, found) = hash(&File::open(&path).unwrap()).unwrap();
        assert_eq!((size, found), (2 * 1024 * 1024 + 17, blake3::hash(&bytes)));
    }
}

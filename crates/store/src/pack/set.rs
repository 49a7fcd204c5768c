//! The packs of a job: access to `packs/`, and the index of all of them in memory.
//!
//! Reading needs no lock. A pack whose index is missing or unusable is read itself, header by header; if that fails, it
//! is a [`Problem`]. Nothing here writes or removes. Code that does (removal, repack) must not while there are
//! problems: an unreadable pack is never taken for an empty one.

mod name;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;

pub use name::PackName;
pub(crate) use table::PackInfo;
pub use table::{Index, Location};

use super::index::{self, MAX_BYTES, PackIndex, Scan, ScanError};
use super::record::{HEADER_BYTES, PackHeader};
use crate::error::{Error, Result};
use crate::format::{FormatError, ReadError, What};
use rekindle_os::beneath::Beneath;
use rekindle_os::parallel;

/// Suffix of the name of a pack.
pub(crate) const PACK_SUFFIX: &str = ".pack";
/// Suffix of the name of an index.
pub(crate) const INDEX_SUFFIX: &str = ".idx";
/// Suffix of the mark of a pack that is to be removed.
pub(crate) const GONE_SUFFIX: &str = ".gone";

/// Indexes that are read at the same time.
const READ_AT_ONCE: usize = 256;

/// The folder with the packs of a job.
#[derive(Debug, Clone)]
pub struct Packs {
    dir: Beneath,
}

/// A problem with a pack.
#[derive(Debug)]
pub struct Problem {
    pub(crate) pack: PackName,
    /// Why its index was not used; None if that is not the problem.
    pub(crate) index: Option<ReadError>,
    /// Which part of the pack is unreadable.
    pub(crate) lost: Lost,
}

/// Which part of a pack is unreadable.
#[derive(Debug)]
pub(crate) enum Lost {
    /// Nothing: its records were read instead of the index.
    Nothing,
    /// Everything from that byte on.
    From {
        /// The first byte that is not part of a complete record.
        offset: u64,
        /// The size of the pack in bytes.
        pack_len: u64,
        /// The damage there.
        why: FormatError,
    },
    /// All of it.
    All(ReadError),
}

/// The existing files of one pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Files {
    pack: bool,
    index: bool,
    gone: bool,
}

impl Packs {
    /// The packs in this folder, which may not exist.
    #[must_use]
    pub(crate) fn new(dir: Beneath) -> Packs {
        Packs { dir }
    }

    /// The folder.
    #[must_use]
    pub fn dir(&self) -> &Beneath {
        &self.dir
    }

    /// The file of the pack.
    #[must_use]
    pub fn pack_path(&self, name: PackName) -> Beneath {
        self.dir.join(format!("{name}{PACK_SUFFIX}"))
    }

    /// The file of its index.
    #[must_use]
    pub fn index_path(&self, name: PackName) -> Beneath {
        self.dir.join(format!("{name}{INDEX_SUFFIX}"))
    }

    /// The file of its mark for removal.
    #[must_use]
    pub fn gone_path(&self, name: PackName) -> Beneath {
        self.dir.join(format!("{name}{GONE_SUFFIX}"))
    }

    /// The packs, sorted by name, including those with nothing left but an index or a mark.
    ///
    /// # Errors
    /// [`Error::Read`]: a folder that cannot be listed is never treated as empty.
    pub fn names(&self) -> Result<Vec<PackName>> {
        Ok(self.list()?.into_keys().collect())
    }

    /// The ids of the keys that packs here are encrypted with. Unreadable packs are skipped.
    ///
    /// # Errors
    /// [`Error::Read`] if the folder cannot be listed.
    pub fn keys(&self) -> Result<BTreeSet<[u8; 16]>> {
        let key = |name: PackName| {
            let file = self.pack_path(name).read().ok()?;
            let header = read_header(&file, file.metadata().ok()?.len()).ok()?;
            PackHeader::parse(&header).ok()?.key
        };
        Ok(self.names()?.into_iter().filter_map(key).collect())
    }

    /// Reads the indexes of all packs.
    ///
    /// # Errors
    /// [`Error::Read`] if the folder cannot be listed. Problems of packs are in [`Index::problems`].
    pub fn index(&self) -> Result<Index> {
        let mut index = Index::default();
        // A mark without pack and index: an interrupted removal. There is nothing to read, and nothing that could be
        // lost.
        let present: Vec<(PackName, Files)> =
            self.list()?.into_iter().filter(|(_, files)| files.pack || files.index).collect();
        // As read they take twice the memory that they take in the index, so not all are read at once.
        for some in present.chunks(READ_AT_ONCE) {
            let read =
                |(name, files): (PackName, Files)| Ok::<_, Infallible>((name, files.gone, self.load(name, files)));
            let Ok(mut loaded) = parallel::in_parallel(some.to_vec(), usize::MAX, read);
            loaded.sort_unstable_by_key(|(name, ..)| *name);
            for (name, gone, loaded) in loaded {
                match loaded {
                    Ok(Loaded { header, pack, problem }) => {
                        index.add(PackInfo { name, pack_len: pack.pack_len(), key: header.key, gone }, &pack);
                        index.problems.extend(problem);
                    }
                    Err(problem) => index.problems.push(*problem),
                }
            }
        }
        index.sort();
        Ok(index)
    }

    /// The content of one pack, from its index or else from its records.
    ///
    /// # Errors
    /// When neither can be read.
    pub fn pack_index(&self, name: PackName) -> std::result::Result<PackIndex, Box<Problem>> {
        self.load(name, Files { pack: true, index: true, gone: false }).map(|loaded| loaded.pack)
    }

    /// Reads the records of a pack instead of its index.
    ///
    /// # Errors
    /// When it cannot be read, or is not a pack of ours.
    pub(crate) fn scan(&self, name: PackName) -> std::result::Result<Scan, ReadError> {
        let path = self.pack_path(name);
        let failed = |source| ReadError::Read { path: path.path().to_owned(), source };
        let file = path.read().map_err(failed)?;
        let pack_len = file.metadata().map_err(failed)?.len();
        index::scan(pack_len, |at, bytes| file.read_exact_at(bytes, at)).map_err(|error| match error {
            ScanError::Read(source) => failed(source),
            ScanError::Format(source) => ReadError::Format { path: path.path().to_owned(), source },
        })
    }

    fn list(&self) -> Result<BTreeMap<PackName, Files>> {
        let names = match self.dir.list() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeMap::new()),
            names => names.map_err(|source| Error::Read { path: self.dir.path().to_owned(), source })?,
        };
        let mut packs: BTreeMap<PackName, Files> = BTreeMap::new();
        for name in names {
            let Some((stem, suffix)) = name.to_str().and_then(|name| Some(name.split_at(name.find('.')?))) else {
                continue;
            };
            let Ok(name) = stem.parse::<PackName>() else { continue };
            match suffix {
                PACK_SUFFIX => packs.entry(name).or_default().pack = true,
                INDEX_SUFFIX => packs.entry(name).or_default().index = true,
                GONE_SUFFIX => packs.entry(name).or_default().gone = true,
                _ => {}
            }
        }
        Ok(packs)
    }

    fn load(&self, name: PackName, files: Files) -> std::result::Result<Loaded, Box<Problem>> {
        let read = match files.index {
            true => self.read_index(name).and_then(|pack| self.fits(name, pack)),
            false => {
                let path = self.index_path(name);
                Err(ReadError::Read { path: path.path().to_owned(), source: io::ErrorKind::NotFound.into() })
            }
        };
        let why = match read {
            Ok((header, pack)) => return Ok(Loaded { header, pack, problem: None }),
            Err(why) => why,
        };
        match self.scan(name) {
            Ok(Scan { header, index: pack, lost }) => {
                let (offset, pack_len) = (pack.pack_len(), self.pack_len(name).unwrap_or(0));
                let lost = lost.map_or(Lost::Nothing, |why| Lost::From { offset, pack_len, why });
                Ok(Loaded { header, pack, problem: Some(Problem { pack: name, index: Some(why), lost }) })
            }
            Err(error) => Err(Box::new(Problem { pack: name, index: Some(why), lost: Lost::All(error) })),
        }
    }

    /// The index of a pack as stored in its file.
    ///
    /// # Errors
    /// If it cannot be read, or differs from what was written.
    pub(crate) fn read_index(&self, name: PackName) -> std::result::Result<PackIndex, ReadError> {
        let path = self.index_path(name);
        let failed = |source| ReadError::Read { path: path.path().to_owned(), source };
        let wrong = |source| ReadError::Format { path: path.path().to_owned(), source };
        let file = path.read().map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        if found > MAX_BYTES {
            return Err(wrong(FormatError::OutOfBounds { what: What::Index, field: "size", found, bound: MAX_BYTES }));
        }
        let mut bytes = Vec::with_capacity(usize::try_from(found).unwrap_or(0));
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        PackIndex::parse(&bytes).map_err(wrong)
    }

    /// Checks that an index belongs to this pack, which has the length in the index then.
    fn fits(&self, name: PackName, pack: PackIndex) -> std::result::Result<(PackHeader, PackIndex), ReadError> {
        let path = self.pack_path(name);
        let failed = |source| ReadError::Read { path: path.path().to_owned(), source };
        let wrong = |source| ReadError::Format { path: path.path().to_owned(), source };
        let file = path.read().map_err(failed)?;
        let found = file.metadata().map_err(failed)?.len();
        crate::format::check_size(What::Pack, found, pack.pack_len()).map_err(wrong)?;
        let header = read_header(&file, found).map_err(failed)?;
        Ok((PackHeader::parse(&header).map_err(wrong)?, pack))
    }

    fn pack_len(&self, name: PackName) -> io::Result<u64> {
        Ok(self.pack_path(name).metadata()?.len())
    }
}

struct Loaded {
    header: PackHeader,
    pack: PackIndex,
    problem: Option<Problem>,
}

/// As much of the header of a pack as exists.
fn read_header(file: &File, pack_len: u64) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(pack_len.min(HEADER_BYTES)).unwrap_or(0)];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;

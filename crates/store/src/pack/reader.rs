//! Reads many records in the order of their offsets, several MiB at a time, on several threads.
//!
//! Every record proves itself: its header names the chunk, and the raw bytes hash to that name. If a record is damaged
//! and the chunk is in another pack too, that one is read. If a pack was removed in the meantime (its chunks were
//! copied to another one), its chunks are looked up once more.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;

use super::record::{self, PackHeader};
use super::{Index, Location, PackName, Packs};
use crate::chunk::{ChunkId, Key};
use crate::error::Error;
use crate::file_error::{Failing, is_failing};
use crate::format::{FormatError, What, size};
use rekindle_os::direct::{Aligned, DirectFile, Way, span};

/// Bytes read in one request, unless one record is larger.
const SPAN: u64 = 4 << 20;
/// Gaps up to this size are read and discarded: a new request costs the disk more.
const GAP: u64 = 128 << 10;
/// Minimum number of concurrent reads: one is decoded while others are in progress.
const READERS: usize = 4;

/// Why a chunk cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadChunkError {
    /// The kernel cannot read it.
    #[error("cannot read {} at byte {offset}{}", path.display(), Failing(source))]
    Read {
        /// The pack.
        path: PathBuf,
        /// The offset in bytes.
        offset: u64,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It is damaged, or we cannot decode it.
    #[error("cannot use chunk {id} at byte {offset} of {}", path.display())]
    Format {
        /// The chunk.
        id: ChunkId,
        /// The pack.
        path: PathBuf,
        /// The offset in bytes.
        offset: u64,
        /// What differs.
        source: FormatError,
    },
    /// No pack has it.
    #[error("chunk {0} is in no pack")]
    Missing(ChunkId),
    /// No readable pack has it, and one pack cannot be read.
    #[error("chunk {id} may be in {}, which cannot be read{}", path.display(), Failing(source))]
    Unread {
        /// The chunk.
        id: ChunkId,
        /// The pack, or its index.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The packs cannot be listed again.
    #[error(transparent)]
    Store(#[from] Error),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

impl ReadChunkError {
    /// The error for a chunk without a known place. It is damage only if all packs could be read.
    #[must_use]
    pub(crate) fn missing(id: ChunkId, index: &Index) -> ReadChunkError {
        match index.unreadable() {
            Some((path, source)) => ReadChunkError::Unread { id, path: path.to_owned(), source },
            None => ReadChunkError::Missing(id),
        }
    }

    /// Whether the disk has failed. The chunk may be intact.
    #[must_use]
    pub(crate) fn is_failing_disk(&self) -> bool {
        match self {
            ReadChunkError::Read { source, .. } | ReadChunkError::Unread { source, .. } => is_failing(source),
            _ => false,
        }
    }

    /// Whether another place may have the chunk: it is damaged, or cannot be read.
    #[must_use]
    pub(crate) fn may_be_healed(&self) -> bool {
        self.is_damage() || matches!(self, ReadChunkError::Read { .. } | ReadChunkError::Unread { .. })
    }

    /// Whether the chunk is lost: not a wrong key, a newer format or a disk that does not answer.
    #[must_use]
    pub(crate) fn is_damage(&self) -> bool {
        match self {
            ReadChunkError::Format { source, .. } => !source.is_not_for_us(),
            ReadChunkError::Missing(_) => true,
            _ => false,
        }
    }
}

/// A requested chunk, and its purpose.
#[derive(Debug, Clone, Copy)]
pub struct Want<T> {
    pub(crate) id: ChunkId,
    pub(crate) location: Location,
    pub(crate) target: T,
}

/// How packs are read.
#[derive(Clone, Copy)]
pub struct Reading<'a> {
    pub(crate) packs: &'a Packs,
    /// The key of encrypted packs.
    pub(crate) key: Option<&'a Key>,
    /// Threads that decode.
    pub(crate) threads: usize,
    /// How files are read.
    pub(crate) way: Way,
    /// Tells whether the work is cancelled.
    pub(crate) cancelled: &'a (dyn Fn() -> bool + Sync),
}

impl std::fmt::Debug for Reading<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading").field("packs", &self.packs).field("threads", &self.threads).finish_non_exhaustive()
    }
}

/// Receives each chunk once, with all requests for it.
pub trait Visit<T>: Sync {
    /// State of each thread.
    type Own: Default;
    /// The error that ends the reading.
    type Error: Send + From<ReadChunkError>;

    /// Handles a chunk, with all requests for it (at least one), or the reason why it cannot be read.
    ///
    /// # Errors
    /// To end the reading.
    fn chunk(
        &self,
        own: &mut Self::Own,
        wants: &[Want<T>],
        raw: Result<&[u8], ReadChunkError>,
    ) -> Result<(), Self::Error>;

    /// Called if a chunk could not be read from its first place, but from another pack.
    fn elsewhere(&self, _: &Want<T>, _: ReadChunkError) {}
}

impl Reading<'_> {
    /// Reads all requested chunks from the given places only, even if other packs have them.
    ///
    /// # Errors
    /// As [`Reading::read`].
    pub(crate) fn read_as_told<T: Copy + Send + Sync, V: Visit<T>>(
        &self,
        index: &Index,
        wants: Vec<Want<T>>,
        visit: &V,
    ) -> Result<(), V::Error> {
        self.pass(index, wants, visit, Fallback::None).map(drop)
    }

    /// Reads all requested chunks, in any order.
    ///
    /// # Errors
    /// An error of `visit`; [`ReadChunkError::Cancelled`]; [`ReadChunkError::Store`].
    pub(crate) fn read<T: Copy + Send + Sync, V: Visit<T>>(
        &self,
        index: &Index,
        wants: Vec<Want<T>>,
        visit: &V,
    ) -> Result<(), V::Error> {
        let vanished = self.pass(index, wants, visit, Fallback::Later)?;
        if vanished.is_empty() {
            return Ok(());
        }
        let index = self.packs.index().map_err(ReadChunkError::from)?;
        let (mut found, mut own) = (Vec::with_capacity(vanished.len()), V::Own::default());
        for want in vanished {
            match index.get(&want.id) {
                Some(location) => found.push(Want { location, ..want }),
                None => visit.chunk(&mut own, &[want], Err(ReadChunkError::missing(want.id, &index)))?,
            }
        }
        self.pass(&index, found, visit, Fallback::Now).map(drop)
    }

    fn pass<T: Copy + Send + Sync, V: Visit<T>>(
        &self,
        index: &Index,
        mut wants: Vec<Want<T>>,
        visit: &V,
        fallback: Fallback,
    ) -> Result<Vec<Want<T>>, V::Error> {
        wants.sort_unstable_by_key(|want| (want.location.pack, want.location.offset));
        let queue = Mutex::new(spans(&wants));
        let pass = Pass { reading: self, index, wants: &wants, queue: &queue, visit, fallback };
        let readers = self.threads.max(READERS).min(pass.queue().len());
        thread::scope(|scope| {
            // A helper that cannot be started is not necessary: the running threads share the work.
            let start = |_| thread::Builder::new().name("reader".into()).spawn_scoped(scope, || pass.run()).ok();
            let helpers: Vec<_> = (1..readers).filter_map(start).collect();
            let mut all = pass.run();
            for helper in helpers {
                let more = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
                all = all.and_then(|mut all| {
                    all.extend(more?);
                    Ok(all)
                });
            }
            all
        })
    }

    /// The key of a pack. Packs from before there was a key stay readable.
    fn key_of(&self, index: &Index, pack: PackName) -> Result<Option<&Key>, FormatError> {
        let header = PackHeader { key: index.pack(pack).and_then(|info| info.key) };
        header.key_for(self.key)
    }

    fn open(&self, at: &Location) -> Result<DirectFile, ReadChunkError> {
        let pack = self.packs.pack_path(at.pack);
        let failed = |source| ReadChunkError::Read { path: pack.path().to_owned(), offset: at.offset, source };
        DirectFile::open(&pack, self.way).map_err(failed)
    }

    /// Reads one record separately.
    fn one(&self, index: &Index, id: &ChunkId, at: &Location, into: &mut Vec<u8>) -> Result<(), ReadChunkError> {
        let len = usize::try_from(at.record_len()).unwrap_or(usize::MAX);
        let mut memory = Aligned::new(span(at.offset, len).2);
        let record = self.open(at)?.read_at(&mut memory, at.offset, len).map_err(|source| ReadChunkError::Read {
            path: self.packs.pack_path(at.pack).path().to_owned(),
            offset: at.offset,
            source,
        })?;
        let mut scratch = Vec::new();
        let raw = self.decode(index, id, at, record, &mut scratch)?;
        into.clear();
        into.extend_from_slice(raw);
        Ok(())
    }

    /// Decodes a record; the raw bytes are in `record` or in `scratch`.
    fn decode<'b>(
        &self,
        index: &Index,
        id: &ChunkId,
        at: &Location,
        record: &'b mut [u8],
        scratch: &'b mut Vec<u8>,
    ) -> Result<&'b [u8], ReadChunkError> {
        let done = self.key_of(index, at.pack).and_then(|key| {
            let (found, expected) = (size(record), at.record_len());
            match found < expected {
                true => Err(FormatError::Truncated { what: What::Record, found, expected }),
                false => record::raw(record, id, key, scratch),
            }
        });
        let path = || self.packs.pack_path(at.pack).path().to_owned();
        done.map_err(|source| ReadChunkError::Format { id: *id, path: path(), offset: at.offset, source })
    }
}

/// What to do about a chunk that cannot be read from its place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fallback {
    /// Another pack is tried; chunks of a missing pack are read in a second pass.
    Later,
    /// Another pack is tried.
    Now,
    /// Nothing.
    None,
}

/// Groups requests that are read together.
fn spans<T>(wants: &[Want<T>]) -> VecDeque<Range<usize>> {
    let mut spans: VecDeque<Range<usize>> = VecDeque::new();
    let (mut start, mut end) = (None, 0);
    for (n, want) in wants.iter().enumerate() {
        let at = &want.location;
        let joins = |(pack, from): (PackName, u64)| {
            pack == at.pack && at.offset <= end + GAP && at.offset + at.record_len() <= from + SPAN
        };
        match spans.back_mut() {
            Some(last) if start.is_some_and(joins) => last.end = n + 1,
            _ => {
                spans.push_back(n..n + 1);
                start = Some((at.pack, at.offset));
            }
        }
        end = at.offset + at.record_len();
    }
    spans
}

struct Pass<'a, T, V> {
    reading: &'a Reading<'a>,
    index: &'a Index,
    wants: &'a [Want<T>],
    queue: &'a Mutex<VecDeque<Range<usize>>>,
    visit: &'a V,
    fallback: Fallback,
}

/// Buffers of a thread.
struct Tools<O> {
    memory: Aligned,
    /// Buffer for records that are not stored raw.
    scratch: Vec<u8>,
    /// A chunk that was read separately.
    raw: Vec<u8>,
    open: Option<(PackName, DirectFile)>,
    own: O,
}

impl<T: Copy, V: Visit<T>> Pass<'_, T, V> {
    fn queue(&self) -> std::sync::MutexGuard<'_, VecDeque<Range<usize>>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads groups until there are no more, or one failed. Returns the chunks of missing packs.
    fn run(&self) -> Result<Vec<Want<T>>, V::Error> {
        let mut tools =
            Tools { memory: Aligned::new(0), scratch: Vec::new(), raw: Vec::new(), open: None, own: V::Own::default() };
        let mut vanished = Vec::new();
        loop {
            let next = self.queue().pop_front();
            let Some(wants) = next.and_then(|range| self.wants.get(range)) else { return Ok(vanished) };
            if (self.reading.cancelled)() {
                self.queue().clear();
                return Err(ReadChunkError::Cancelled.into());
            }
            match self.span(&mut tools, wants) {
                Ok(Found::Yes) => {}
                Ok(Found::No) => vanished.extend_from_slice(wants),
                Err(error) => {
                    self.queue().clear();
                    return Err(error);
                }
            }
        }
    }

    fn span(&self, tools: &mut Tools<V::Own>, wants: &[Want<T>]) -> Result<Found, V::Error> {
        let (Some(first), Some(last)) = (wants.first(), wants.last()) else { return Ok(Found::Yes) };
        let (start, pack) = (first.location.offset, first.location.pack);
        let end = last.location.offset + last.location.record_len();
        let len = usize::try_from(end.saturating_sub(start)).unwrap_or(usize::MAX);
        let whole = span(start, len).2;
        if tools.memory.len() < whole {
            tools.memory = Aligned::new(whole.max(span(0, usize::try_from(SPAN).unwrap_or(0)).2));
        }
        let file = match tools.open.take().filter(|(name, _)| *name == pack) {
            Some((_, file)) => Ok(file),
            None => self.reading.open(&first.location),
        };
        let read = match file {
            Ok(file) => {
                let (_, file) = tools.open.insert((pack, file));
                file.read_at(&mut tools.memory, start, len).ok()
            }
            Err(ReadChunkError::Read { source, .. })
                if source.kind() == io::ErrorKind::NotFound && self.fallback == Fallback::Later =>
            {
                return Ok(Found::No);
            }
            Err(_) => None,
        };
        let (bytes, is_read) = match read {
            Some(bytes) => (bytes, true),
            None => (Default::default(), false),
        };
        for group in wants.chunk_by(|a, b| a.location.offset == b.location.offset) {
            let Some(first @ Want { id, location, .. }) = group.first() else { continue };
            let raw = match is_read {
                true => {
                    let from = usize::try_from(location.offset - start).unwrap_or(usize::MAX);
                    let len = usize::try_from(location.record_len()).unwrap_or(usize::MAX);
                    let to = from.saturating_add(len).min(bytes.len());
                    let record = bytes.get_mut(from..to).unwrap_or_default();
                    self.reading.decode(self.index, id, location, record, &mut tools.scratch)
                }
                // Only one record of the group may be unreadable; the others are tried separately.
                false => self.reading.one(self.index, id, location, &mut tools.raw).map(|()| tools.raw.as_slice()),
            };
            let raw = match raw {
                Ok(raw) => Ok(raw),
                Err(error) => match self.elsewhere(id, location, &mut tools.raw) {
                    Some(()) => {
                        self.visit.elsewhere(first, error);
                        Ok(tools.raw.as_slice())
                    }
                    None => Err(error),
                },
            };
            self.visit.chunk(&mut tools.own, group, raw)?;
        }
        Ok(Found::Yes)
    }

    /// Reads the same chunk from another pack.
    fn elsewhere(&self, id: &ChunkId, not: &Location, into: &mut Vec<u8>) -> Option<()> {
        if self.fallback == Fallback::None {
            return None;
        }
        let mut others = self.index.all(id).filter(|at| at != not);
        others.find_map(|at| self.reading.one(self.index, id, &at, into).ok())
    }
}

enum Found {
    Yes,
    No,
}

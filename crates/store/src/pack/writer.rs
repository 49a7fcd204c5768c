//! Collects records in memory and writes them to the disk a few MiB at a time, in packs of about [`PACK`] bytes.
//!
//! The raw bytes of a chunk are read directly to the place of its record ([`PackWriter::room`]), so that uncompressed
//! content is copied only once. A record that is dropped costs nothing: its space is used for the next one.
//!
//! The steps by which a pack is written are in `disk.rs`. A writer that is dropped leaves the packs that it closed,
//! complete and with their index, and removes the open one.

use super::disk::{Disk, Job};
use super::record::{self, PackHeader, RecordHeader};
use super::{Entry, PACK, PACK_RECORDS, PackName, Packs};
use crate::FileError;
use crate::chunk::codec::{self, Codec, Compression};
use crate::chunk::{CHUNK, ChunkId, Key};
use crate::format::{HEADER, size_of};
use rekindle_os::direct::{ALIGN, Aligned, Way, padded};

/// Bytes written at a time, approximately. Larger pieces are no faster.
const PIECE: usize = 4 << 20;
/// One buffer is being filled, one is being written, one waits: neither side waits for the other.
const PIECES: usize = 3;

/// How packs are made.
#[derive(Debug, Clone, Copy)]
pub struct Making<'k> {
    /// How chunks are compressed.
    pub compression: Compression,
    /// The key to encrypt with.
    pub key: Option<&'k Key>,
    /// A pack is closed at this size: [`PACK`].
    pub pack: u64,
    /// How they are written.
    pub way: Way,
}

impl<'k> Making<'k> {
    /// The settings that the store uses.
    #[must_use]
    pub(crate) fn new(compression: Compression, key: Option<&'k Key>) -> Making<'k> {
        Making { compression, key, pack: PACK, way: Way::Direct }
    }
}

/// Writes packs, one after the other.
pub struct PackWriter<'k> {
    making: Making<'k>,
    disk: Disk,
    memory: Aligned,
    /// Bytes of `memory` to be written.
    filled: usize,
    /// Offset of `memory` in the pack.
    offset: u64,
    /// Entries of the open pack. Without any, the pack has not been begun.
    entries: Vec<Entry>,
    begun: bool,
    names: Vec<PackName>,
    scratch: Vec<u8>,
    stored: Vec<u8>,
}

impl std::fmt::Debug for PackWriter<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackWriter").field("making", &self.making).finish_non_exhaustive()
    }
}

impl<'k> PackWriter<'k> {
    /// A writer that creates packs in the folder `packs`.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn new(packs: &Packs, making: Making<'k>) -> Result<PackWriter<'k>, FileError> {
        // Room for a piece, and for the record that exceeds it.
        let mut disk = Disk::start(packs, PIECES, PIECE + HEADER + CHUNK + ALIGN, making.way)?;
        let memory = disk.memory()?;
        let mut writer = PackWriter {
            making,
            disk,
            memory,
            filled: 0,
            offset: 0,
            entries: Vec::new(),
            begun: false,
            names: Vec::new(),
            scratch: Vec::new(),
            stored: Vec::new(),
        };
        writer.begin();
        Ok(writer)
    }

    /// The place for the raw bytes of the next chunk, at most [`CHUNK`].
    pub fn room(&mut self, raw_len: usize) -> &mut [u8] {
        let start = self.filled + HEADER;
        // There is always room for one chunk, because a full piece is written.
        self.memory.get_mut(start..start + raw_len.min(CHUNK)).unwrap_or_default()
    }

    /// Appends a record with the `raw_len` bytes in [`PackWriter::room`]. Returns its size in the pack.
    ///
    /// # Errors
    /// When this or an earlier one cannot be written.
    pub fn keep(&mut self, id: ChunkId, raw_len: usize) -> Result<u64, FileError> {
        let start = self.filled + HEADER;
        let mut scratch = std::mem::take(&mut self.scratch);
        let raw = self.memory.get(start..start + raw_len).unwrap_or_default();
        let (codec, bytes) = codec::encode(self.making.compression, raw, &mut scratch);
        if codec == Codec::Raw && self.making.key.is_none() {
            self.scratch = scratch;
            let header = RecordHeader { codec, raw_len: small(raw_len), stored_len: small(raw_len), id };
            self.note(&header);
            self.memory.get_mut(self.filled..start).unwrap_or_default().copy_from_slice(&header.to_bytes());
            self.filled = start + raw_len;
            self.go_on()?;
            return Ok(header.record_len());
        }
        let mut whole = std::mem::take(&mut self.stored);
        whole.clear();
        let written = record::write(&mut whole, id, codec, raw_len, bytes, self.making.key);
        self.scratch = scratch;
        let header = written.map_err(|source| self.disk.failed("make a record for", source))?;
        self.note(&header);
        self.put(&whole)?;
        self.stored = whole;
        self.go_on()?;
        Ok(header.record_len())
    }

    /// Appends a record that is already encoded. Returns its size in the pack.
    ///
    /// # Errors
    /// When this or an earlier one cannot be written.
    pub fn append(&mut self, header: &RecordHeader, stored: &[u8]) -> Result<u64, FileError> {
        self.note(header);
        self.put(&header.to_bytes())?;
        self.put(stored)?;
        self.go_on()?;
        Ok(header.record_len())
    }

    /// Closes the last pack and waits until all packs are on the disk. Returns their names.
    ///
    /// # Errors
    /// When one cannot be written.
    pub fn finish(mut self) -> Result<Vec<PackName>, FileError> {
        self.close()?;
        let PackWriter { disk, names, .. } = self;
        disk.finish()?;
        Ok(names)
    }

    /// Begins a new pack, which is created with its first record.
    fn begin(&mut self) {
        let header = PackHeader::of(self.making.key).to_bytes();
        self.memory.get_mut(..HEADER).unwrap_or_default().copy_from_slice(&header);
        (self.filled, self.offset, self.begun) = (HEADER, 0, false);
    }

    fn note(&mut self, header: &RecordHeader) {
        self.entries.push(Entry::of(header, self.offset + size_of(self.filled)));
    }

    fn put(&mut self, mut bytes: &[u8]) -> Result<(), FileError> {
        while !bytes.is_empty() {
            let free = self.memory.get_mut(self.filled..).unwrap_or_default();
            let (now, later) = bytes.split_at(bytes.len().min(free.len()));
            free.get_mut(..now.len()).unwrap_or_default().copy_from_slice(now);
            self.filled += now.len();
            bytes = later;
            if !bytes.is_empty() {
                self.send()?;
            }
        }
        Ok(())
    }

    /// Called after a record: writes a full piece, and closes a full pack.
    fn go_on(&mut self) -> Result<(), FileError> {
        let is_full = self.offset + size_of(self.filled) >= self.making.pack;
        if is_full || size_of(self.entries.len()) >= PACK_RECORDS {
            self.close()
        } else if self.filled >= PIECE {
            self.send()
        } else {
            Ok(())
        }
    }

    /// Writes the complete blocks of the buffered bytes.
    fn send(&mut self) -> Result<(), FileError> {
        let len = self.filled - self.filled % ALIGN;
        self.start_pack()?;
        let mut next = self.disk.memory()?;
        let rest = self.memory.get(len..self.filled).unwrap_or_default();
        next.get_mut(..rest.len()).unwrap_or_default().copy_from_slice(rest);
        let full = std::mem::replace(&mut self.memory, next);
        self.disk.send(Job::Write { memory: full, len, offset: self.offset })?;
        self.offset += size_of(len);
        self.filled -= len;
        Ok(())
    }

    fn start_pack(&mut self) -> Result<(), FileError> {
        if self.begun {
            return Ok(());
        }
        self.begun = true;
        let name = PackName::random().map_err(|source| self.disk.failed("name a pack in", source))?;
        self.names.push(name);
        self.disk.send(Job::Begin(name))
    }

    fn close(&mut self) -> Result<(), FileError> {
        if self.entries.is_empty() {
            return Ok(());
        }
        self.start_pack()?;
        let pack_len = self.offset + size_of(self.filled);
        let len = padded(self.filled);
        self.memory.get_mut(self.filled..len).unwrap_or_default().fill(0);
        let next = self.disk.memory()?;
        let full = std::mem::replace(&mut self.memory, next);
        self.disk.send(Job::Write { memory: full, len, offset: self.offset })?;
        self.disk.send(Job::Close { len: pack_len, entries: std::mem::take(&mut self.entries) })?;
        self.begin();
        Ok(())
    }
}

/// Converts a length of at most [`CHUNK`].
fn small(len: usize) -> u32 {
    u32::try_from(len).unwrap_or(u32::MAX)
}

//! One record as it is stored, read and checked separately, for code that copies records between packs.

use std::io;

use super::record::{self, RecordHeader};
use super::{Location, Packs};
use crate::chunk::{ChunkId, Key};
use crate::format::FormatError;
use rekindle_os::direct::{Aligned, DirectFile, Way, span};

/// Why a record cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// It cannot be read.
    #[error("cannot read it{}", crate::file_error::Failing(.0))]
    Read(#[from] io::Error),
    /// It differs from what was written.
    #[error("the record at byte {offset} is damaged; `rekindle repair --dry-run` says which images it affects")]
    Damaged {
        offset: u64,
        /// The damage.
        #[source]
        source: FormatError,
    },
}

/// A record, and the buffers to read it.
#[derive(Debug, Default)]
pub(crate) struct Stored {
    bytes: Vec<u8>,
    opened: Vec<u8>,
    raw: Vec<u8>,
}

impl Stored {
    /// Reads a record with `read`, which fills the buffer, and checks it.
    pub(crate) fn read(
        &mut self,
        read: impl FnOnce(&mut [u8]) -> io::Result<()>,
        id: &ChunkId,
        at: &Location,
        key: Option<&Key>,
    ) -> Result<RecordHeader, CopyError> {
        self.bytes.resize(usize::try_from(at.record_len()).unwrap_or(usize::MAX), 0);
        read(&mut self.bytes)?;
        // Opening decrypts in place, so an encrypted record is opened as a copy.
        self.opened.clear();
        self.opened.extend_from_slice(&self.bytes);
        let damaged = |source| CopyError::Damaged { offset: at.offset, source };
        record::read(&mut self.opened, id, key, &mut self.raw).map_err(damaged)
    }

    /// The same, read from the disk and not from the page cache.
    pub(crate) fn read_from_disk(
        &mut self,
        packs: &Packs,
        id: &ChunkId,
        at: &Location,
        key: Option<&Key>,
    ) -> Result<RecordHeader, CopyError> {
        let fill = |bytes: &mut [u8]| {
            let mut memory = Aligned::new(span(at.offset, bytes.len()).2);
            let file = DirectFile::open(&packs.pack_path(at.pack), Way::Direct)?;
            let read = file.read_at(&mut memory, at.offset, bytes.len())?;
            // If the pack was cut, the missing bytes are no record.
            bytes.fill(0);
            bytes.iter_mut().zip(read.iter()).for_each(|(to, from)| *to = *from);
            Ok(())
        };
        self.read(fill, id, at, key)
    }

    /// The stored bytes after its header.
    pub(crate) fn body(&self, header: &RecordHeader) -> &[u8] {
        let len = usize::try_from(header.stored_len).unwrap_or(0);
        self.bytes.get(self.bytes.len().saturating_sub(len)..).unwrap_or_default()
    }
}

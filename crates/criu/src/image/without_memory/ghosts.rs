//! Deleted files whose content is in the image (`ghost-file-N.img`): a description, then the content as it is, or in
//! chunks that each begin with their place and length.

use std::io::Write;

use prost::Message;

use super::replace;
use crate::image::{Error, Records, damaged};
use rekindle_os::beneath::Beneath;

const GHOST: u32 = 0x5258_3605;
/// Smaller ones stay as they are.
const SMALL: u64 = 64 << 10;
/// CRIU looks for the build id of a program or library in this much of the file (`BUILD_ID_MAP_SIZE`).
const BUILD_ID_WITHIN: usize = 1 << 20;
/// How a program or library begins.
const ELF: [u8; 4] = *b"\x7fELF";

/// `ghost_file_entry`, what is read of it.
#[derive(Clone, Copy, PartialEq, Message)]
struct Ghost {
    /// Whether the content is in chunks.
    #[prost(bool, optional, tag = "9")]
    chunks: Option<bool>,
    #[prost(uint64, optional, tag = "10")]
    size: Option<u64>,
}

/// `ghost_chunk_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Chunk {
    #[prost(uint64, required, tag = "1")]
    length: u64,
    #[prost(uint64, required, tag = "2")]
    offset: u64,
}

/// Takes the content out, so that CRIU makes a sparse file of the same size.
pub(super) fn empty(path: &Beneath) -> Result<(), Error> {
    let metadata = path.metadata().map_err(|source| Error::Read { path: path.path().into(), source })?;
    if metadata.len() <= SMALL {
        return Ok(());
    }
    let mut records = Records::begin(path.clone(), 2 * BUILD_ID_WITHIN as u64, GHOST)?;
    let ghost: Ghost = records.next()?.ok_or_else(|| damaged(path, "no description"))?;
    let (start, end) = (8, records.at);
    let (size, from) = match (ghost.chunks, ghost.size) {
        (Some(true), None) => return Err(damaged(path, "no size")),
        (Some(true), Some(size)) => {
            let first: Option<Chunk> = records.next()?;
            (size, first.filter(|chunk| chunk.offset == 0).map(|chunk| (records.at, chunk.length)))
        }
        _ => {
            let size = metadata.len().saturating_sub(end as u64);
            (size, Some((end, size)))
        }
    };
    let head = from.and_then(|(at, length)| {
        let length = usize::try_from(length).unwrap_or(usize::MAX).min(BUILD_ID_WITHIN);
        let content = records.bytes.get(at..)?;
        let content = content.get(..length.min(content.len()))?;
        content.starts_with(&ELF).then_some(content)
    });
    let mut bytes = records.bytes.get(..start).unwrap_or_default().to_vec();
    let mut description = records.bytes.get(start + 4..end).unwrap_or_default().to_vec();
    // Of a field that is there twice the last one counts.
    description.extend(Ghost { chunks: Some(true), size: Some(size) }.encode_to_vec());
    let mut put = |record: &[u8]| -> Result<(), Error> {
        let length = u32::try_from(record.len()).map_err(|error| damaged(path, error.to_string()))?;
        bytes.extend(length.to_le_bytes());
        bytes.extend(record);
        Ok(())
    };
    put(&description)?;
    if let Some(head) = head {
        put(&Chunk { length: head.len() as u64, offset: 0 }.encode_to_vec())?;
        bytes.extend(head);
    }
    replace(path, |file| file.write_all(&bytes))
}

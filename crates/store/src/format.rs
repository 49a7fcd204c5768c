//! Shared by the readers of packs, indexes and chunk maps: one error, the first checks, and careful reading of fields.
//!
//! All of these files are little endian and begin with a header of 64 bytes. A reader checks, in this order: the magic,
//! the version, the sizes (before anything is allocated), the checksum, the fields. Nothing here writes.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::file_error::Failing;

/// The kind of data that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// The beginning of a pack.
    Pack,
    /// A record in a pack.
    Record,
    /// The index of a pack.
    Index,
    /// The chunk map of an image.
    Map,
    /// The content of a chunk.
    Chunk,
}

impl std::fmt::Display for What {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            What::Pack => "pack",
            What::Record => "record",
            What::Index => "index of a pack",
            What::Map => "chunk map",
            What::Chunk => "chunk",
        })
    }
}

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum FormatError {
    /// The beginning is wrong.
    #[error("not a rekindle {0}: wrong magic number")]
    NotOurs(What),
    /// Written by a newer rekindle.
    #[error(
        "this {what} has version {version}, and this rekindle reads version {known}; use the rekindle that wrote it, or a newer one"
    )]
    Newer {
        /// The kind of file or part.
        what: What,
        /// Its version.
        version: u32,
        /// The newest that can be read.
        known: u32,
    },
    /// A size that no writer produces.
    #[error("this {what} is damaged: its {field} is {found}, and the maximum is {bound}")]
    OutOfBounds {
        /// The kind of file or part.
        what: What,
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
        /// The maximum.
        bound: u64,
    },
    /// The end is missing.
    #[error("this {what} is truncated: it has {found} of {expected} bytes")]
    Truncated {
        /// The kind of file or part.
        what: What,
        /// The existing bytes.
        found: u64,
        /// The expected bytes.
        expected: u64,
    },
    /// There are superfluous bytes.
    #[error("this {what} is damaged: {extra} bytes follow its end")]
    TooLong {
        /// The kind of file or part.
        what: What,
        /// Number of superfluous bytes.
        extra: u64,
    },
    /// The content differs from what was written.
    #[error("this {0} is damaged: the checksum does not match")]
    Checksum(What),
    /// The checksum is right, but a field is impossible.
    #[error("this {what} is damaged: its {field} is invalid")]
    Field {
        /// The kind of file or part.
        what: What,
        /// The field.
        field: &'static str,
    },
    /// It is another chunk than the requested one.
    #[error("this record contains another chunk than its index says")]
    OtherChunk,
    /// Compressed bytes that cannot be decompressed correctly.
    #[error("this chunk is damaged: it cannot be decompressed: {0}")]
    Undecodable(String),
    /// Encrypted bytes that the key does not open.
    #[error("this chunk is damaged: it is not what was encrypted with this key")]
    Unsealed,
    /// It is encrypted, and there is no key.
    #[error("this pack is encrypted; set store.encryption-key to the key file")]
    NoKey,
    /// It is not encrypted, although there is a key.
    #[error(
        "this pack is not encrypted, but store.encryption-key is set: anyone who can write the store or the replica could have made it; if it is older than the key, use --accept-unsigned of `rekindle run` or `restore`"
    )]
    Plain,
    /// It is encrypted with another key.
    #[error("this pack is encrypted with another key (its id is {}); set store.encryption-key to the right key file", blake3_hex(.0))]
    OtherKey([u8; 16]),
}

impl FormatError {
    /// Whether the file is intact, but cannot be used here (newer version, wrong key).
    #[must_use]
    pub(crate) fn is_not_for_us(&self) -> bool {
        matches!(self, FormatError::Newer { .. } | FormatError::NoKey | FormatError::OtherKey(_) | FormatError::Plain)
    }
}

/// Why a file cannot be used.
#[derive(Debug, Error)]
pub enum ReadError {
    /// It cannot be opened or read, so its content is unknown.
    #[error("cannot read {}{}", .path.display(), Failing(.source))]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// It was read, and its content is wrong.
    #[error("cannot use {}", .path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        source: FormatError,
    },
}

pub(super) fn blake3_hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::with_capacity(2 * bytes.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Bytes of the check at the end of a header.
pub(super) const CHECK: usize = 8;
/// The size of the header of every file and record.
pub(super) const HEADER: usize = 64;
/// The size of the hash that ends an index and a map.
pub(super) const FOOTER: usize = 32;

/// Ends a header with the check over the bytes before.
pub(super) fn put_check(header: &mut [u8; HEADER]) {
    let (body, check) = header.split_at_mut(HEADER - CHECK);
    let hash = blake3::hash(body);
    check.copy_from_slice(hash.as_bytes().first_chunk::<CHECK>().unwrap_or(&[0; CHECK]));
}

/// Whether the check at the end of a header is right.
pub(super) fn is_check_right(header: &[u8; HEADER]) -> bool {
    let (body, check) = header.split_at(HEADER - CHECK);
    blake3::hash(body).as_bytes().get(..CHECK) == Some(check)
}

/// Parses the header at the beginning of `bytes`.
pub(super) fn header(what: What, bytes: &[u8]) -> Result<&[u8; HEADER], FormatError> {
    bytes.first_chunk().ok_or_else(|| FormatError::Truncated { what, found: size(bytes), expected: size_of(HEADER) })
}

/// For a file that ends with the hash of everything before: returns the bytes between header and hash, if the hash is
/// right.
pub(super) fn hashed(what: What, bytes: &[u8]) -> Result<&[u8], FormatError> {
    let (body, footer) = bytes
        .split_last_chunk::<FOOTER>()
        .filter(|(body, _)| body.len() >= HEADER)
        .ok_or_else(|| FormatError::Truncated { what, found: size(bytes), expected: size_of(HEADER + FOOTER) })?;
    match blake3::hash(body) == blake3::Hash::from_bytes(*footer) {
        true => Ok(body.get(HEADER..).unwrap_or_default()),
        false => Err(FormatError::Checksum(what)),
    }
}

/// Compares the size of a file with the size in its header.
pub(super) fn check_size(what: What, found: u64, expected: u64) -> Result<(), FormatError> {
    match found.cmp(&expected) {
        std::cmp::Ordering::Less => Err(FormatError::Truncated { what, found, expected }),
        std::cmp::Ordering::Equal => Ok(()),
        std::cmp::Ordering::Greater => Err(FormatError::TooLong { what, extra: found - expected }),
    }
}

pub(super) fn size(bytes: &[u8]) -> u64 {
    size_of(bytes.len())
}

/// A length as a number in a file. Address spaces have at most 64 bits.
pub(super) fn size_of(length: usize) -> u64 {
    u64::try_from(length).unwrap_or(u64::MAX)
}

/// Reads fields one after the other.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    what: What,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(what: What, bytes: &'a [u8]) -> Fields<'a> {
        Fields { what, rest: bytes }
    }

    /// The next `N` bytes.
    pub(super) fn bytes<const N: usize>(&mut self) -> Result<[u8; N], FormatError> {
        let cut = FormatError::Truncated { what: self.what, found: size(self.rest), expected: size_of(N) };
        let (field, rest) = self.rest.split_first_chunk::<N>().ok_or(cut)?;
        self.rest = rest;
        Ok(*field)
    }

    pub(super) fn byte(&mut self) -> Result<u8, FormatError> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    pub(super) fn word(&mut self) -> Result<u32, FormatError> {
        self.bytes().map(u32::from_le_bytes)
    }

    pub(super) fn long(&mut self) -> Result<u64, FormatError> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Skips bytes that must be zero.
    pub(super) fn reserved<const N: usize>(&mut self) -> Result<(), FormatError> {
        match self.bytes::<N>()? == [0; N] {
            true => Ok(()),
            false => Err(FormatError::Field { what: self.what, field: "reserved field" }),
        }
    }

    /// Reads the magic and the version, which are in the same place in every version.
    pub(super) fn begin<const N: usize>(&mut self, magic: &[u8; N], known: u32) -> Result<(), FormatError> {
        let what = self.what;
        if self.bytes::<N>()? != *magic {
            return Err(FormatError::NotOurs(what));
        }
        match self.word()? {
            0 => Err(FormatError::Field { what, field: "version" }),
            version if version > known => Err(FormatError::Newer { what, version, known }),
            _ => Ok(()),
        }
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

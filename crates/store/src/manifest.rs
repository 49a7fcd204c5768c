//! The description of an image: `manifest.json`.
//!
//! The file is one JSON object: `format`, `version`, `blake3` and `manifest`. The hash covers the exact bytes of the
//! value of `manifest`, so a flipped bit in a number is found as well. Reading checks, in this order: the size (before
//! anything is parsed), the format, the version, the hash, the fields, and the consistency of the fields. A reader
//! ignores unknown fields: they are additions of a later rekindle that changed nothing else.

mod contents;
mod fields;
mod groups;
pub mod words;

use std::collections::HashSet;
use std::io;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use thiserror::Error;

pub use contents::{Attributes, Bytes, Owner, Stamp, TrackedEntry, TrackedFolder, TrackedKind};
pub use fields::{
    Binding, Chunks, CpuTime, Fifo, Folder, GivenFile, Gpu, GroupPart, Host, JobRights, JobTree, Kept, KeptCopy,
    KeptPiece, Landing, Manifest, MappedFile, OpenFile, Part, Phase, Reason, Recreate, SavedLink, Scheduling, Timer,
    TreeProcess,
};

pub use groups::ControlGroup;

use super::chunk::{ChunkMap, Extent};
use super::file_error::Failing;
use super::format::{FormatError, What};
use super::id::{ImageId, JobName};
use super::trust::{Signature, Trust, Untrusted};
use super::{hex, names};
pub use rekindle_criu::Tcp;
use rekindle_os::beneath::Beneath;

/// The value of `format`: the magic of the file.
pub(crate) const FORMAT: &str = "rekindle-image";
/// The newest version that this code reads. It writes the lowest possible one: 4 for an image with GPU memory that stayed
/// on the GPU, 3 for one with files that are put back together, 2 for a packed image, else 1.
pub(crate) const VERSION: u32 = 4;
/// The first version with [`Manifest::chunks`].
const PACKED: u32 = 2;
/// The first version whose readers put back files together: an earlier one would put back only some of them.
const TOGETHER: u32 = 3;
/// The first version with [`Manifest::kept`]: an earlier reader would restore the job without that memory.
const KEPT: u32 = 4;
/// A larger manifest is not parsed. 64 MiB are some 300,000 parts or open files.
pub const MAX_BYTES: u64 = 64 << 20;
/// Its name in the folder of the image.
pub const FILE_NAME: &str = names::MANIFEST;

/// Why a manifest cannot be used.
#[derive(Debug, Error)]
pub enum ManifestError {
    /// It does not exist: the image was not published completely.
    #[error("it has no {FILE_NAME}")]
    Missing,
    /// It cannot be opened or read, so nothing is known about the image.
    #[error("its {FILE_NAME} cannot be read{why}: {0}", why = Failing(.0))]
    Read(#[source] io::Error),
    /// Larger than [`MAX_BYTES`].
    #[error("its {FILE_NAME} is larger than {MAX_BYTES} bytes")]
    TooLarge,
    /// Not JSON, or fields that are missing or of the wrong type.
    #[error("its {FILE_NAME} is damaged: {0}")]
    Parse(#[source] serde_json::Error),
    /// It is the file of another program.
    #[error("its {FILE_NAME} has the format \"{0}\", not \"{FORMAT}\"")]
    Format(String),
    /// Written by a newer rekindle.
    #[error(
        "its manifest has version {0}, this rekindle reads versions up to {VERSION}; use the rekindle that wrote it, or a newer one"
    )]
    Newer(u32),
    /// Version 0 was never written.
    #[error("its manifest has version 0, which is invalid")]
    VersionZero,
    /// The version differs from the one that the hash covers.
    #[error("its {FILE_NAME} is damaged: version {0} does not match its content")]
    WrongVersion(u32),
    /// The content differs from what was written.
    #[error("its {FILE_NAME} is damaged: the checksum does not match")]
    Checksum,
    /// It is the manifest of another image: the folder was renamed or copied over.
    #[error("its manifest belongs to image {0}")]
    OtherImage(ImageId),
    /// A part has no hash, although the image is in the store.
    #[error("its manifest has no checksum for the part \"{0}\"")]
    NoChecksum(String),
    /// There is a key, but the manifest has no valid signature of it.
    #[error("its manifest {0}")]
    Untrusted(#[source] Untrusted),
    /// The image belongs to another job, and was copied here.
    #[error("its manifest belongs to job \"{0}\"")]
    OtherJob(JobName),
    /// Two parts have the same path.
    #[error("its manifest names the part \"{0}\" twice")]
    PartTwice(String),
    /// Device memory whose pieces cannot be as they are described.
    #[error("its manifest is damaged: GPU memory {index} of process {pid} {why}")]
    Piece {
        /// The process, as it sees itself.
        pid: i32,
        /// The number of the piece.
        index: u32,
        /// The rule that it breaks.
        why: &'static str,
    },
    /// A file has a number of attributes that are not there.
    #[error("its manifest is damaged: it has no extended attributes with the number {0}")]
    NoSuchAttributes(u32),
    /// A file that a restore must create has no part.
    #[error("its manifest restores a file from the part \"{0}\", which it does not list")]
    NoSuchPart(String),
}

/// The outer object; the inner one stays text until its hash is checked.
#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: String,
    version: u32,
    #[serde(with = "hex")]
    blake3: blake3::Hash,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signature: Option<Signature>,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

/// The fields of the outer object that every version has.
#[derive(Deserialize)]
struct Header {
    format: String,
    version: u32,
}

impl Manifest {
    /// The bytes of `manifest.json`, signed if there is a key.
    ///
    /// # Errors
    /// When [`Manifest::parse`] would refuse the result.
    pub fn to_bytes(&self, trust: &Trust) -> Result<Vec<u8>, ManifestError> {
        self.validate()?;
        let body = serde_json::to_string_pretty(self).map_err(ManifestError::Parse)?;
        let envelope = Envelope {
            format: FORMAT.to_owned(),
            version: self.version(),
            blake3: blake3::hash(body.as_bytes()),
            signature: trust.sign(&signed(&self.version().to_le_bytes(), &body)),
            manifest: &RawValue::from_string(body).map_err(ManifestError::Parse)?,
        };
        // No line end after the last brace, so that a file without its last byte is incomplete.
        let bytes = serde_json::to_vec_pretty(&envelope).map_err(ManifestError::Parse)?;
        if u64::try_from(bytes.len()).is_ok_and(|len| len <= MAX_BYTES) {
            Ok(bytes)
        } else {
            Err(ManifestError::TooLarge)
        }
    }

    /// Reads what [`Manifest::to_bytes`] wrote. Hash and signature are checked before the content is parsed.
    ///
    /// # Errors
    /// Each kind of damage has its own error; so has a newer version.
    pub fn parse(bytes: &[u8], trust: &Trust) -> Result<Manifest, ManifestError> {
        if u64::try_from(bytes.len()).is_ok_and(|len| len > MAX_BYTES) {
            return Err(ManifestError::TooLarge);
        }
        let header: Header = serde_json::from_slice(bytes).map_err(ManifestError::Parse)?;
        match header {
            Header { format, .. } if format != FORMAT => return Err(ManifestError::Format(format)),
            Header { version: 0, .. } => return Err(ManifestError::VersionZero),
            Header { version, .. } if version > VERSION => return Err(ManifestError::Newer(version)),
            Header { .. } => {}
        }
        let envelope: Envelope<'_> = serde_json::from_slice(bytes).map_err(ManifestError::Parse)?;
        if blake3::hash(envelope.manifest.get().as_bytes()) != envelope.blake3 {
            return Err(ManifestError::Checksum);
        }
        let (version, body) = (envelope.version.to_le_bytes(), envelope.manifest.get());
        let trusted = trust.check(envelope.signature.as_ref(), &signed(&version, body));
        trusted.map_err(ManifestError::Untrusted)?;
        let manifest: Manifest = serde_json::from_str(envelope.manifest.get()).map_err(ManifestError::Parse)?;
        if manifest.version() != envelope.version {
            return Err(ManifestError::WrongVersion(envelope.version));
        }
        if trust.job().is_some_and(|job| *job != manifest.job) {
            return Err(ManifestError::OtherJob(manifest.job));
        }
        manifest.validate()?;
        Ok(manifest)
    }

    /// Reads the manifest of the image in `dir`.
    ///
    /// # Errors
    /// As [`Manifest::parse`], and [`ManifestError::Missing`], [`ManifestError::Read`].
    pub(crate) fn read(dir: &Beneath, trust: &Trust) -> Result<Manifest, ManifestError> {
        let bytes = dir.join(FILE_NAME).content(MAX_BYTES).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => ManifestError::Missing,
            io::ErrorKind::FileTooLarge => ManifestError::TooLarge,
            _ => ManifestError::Read(error),
        })?;
        Manifest::parse(&bytes, trust)
    }

    /// Compares the chunk map with this manifest and the description of the map in it: the parts, their sizes, the
    /// number of extents.
    ///
    /// # Errors
    /// [`FormatError::Field`] names what differs.
    pub fn check_map(&self, chunks: &Chunks, map: &ChunkMap) -> Result<(), FormatError> {
        let wrong = |field| Err(FormatError::Field { what: What::Map, field });
        if map.parts.len() != self.parts.len() {
            return wrong("number of parts");
        }
        if map.extents() != chunks.extents {
            return wrong("number of extents");
        }
        let sum = |part: &[Extent]| part.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.len()));
        match map.parts.iter().zip(&self.parts).all(|(extents, part)| sum(extents) == Some(part.size)) {
            true => Ok(()),
            false => wrong("size of a part"),
        }
    }

    fn version(&self) -> u32 {
        match self {
            _ if self.kept.is_some() => KEPT,
            _ if !self.absent_files.is_empty() || !self.tracked_folders.is_empty() => TOGETHER,
            _ if self.chunks.is_some() => PACKED,
            _ => 1,
        }
    }

    fn validate(&self) -> Result<(), ManifestError> {
        let mut seen = HashSet::new();
        for Part { path, .. } in &self.parts {
            if !seen.insert(path.as_str()) {
                return Err(ManifestError::PartTwice(path.to_string()));
            }
        }
        let named = self.recreate.iter().map(|file| &file.part);
        let named = named.chain(self.landing.iter().map(|landing| &landing.part));
        let named = named.chain(self.kept.iter().map(|kept| &kept.part));
        let copies = self.mapped_files.iter().filter_map(|file| file.copy.as_ref());
        let named = named.chain(copies.map(|copy| &copy.part));
        let named = named.chain(self.open_files.iter().filter_map(|file| file.part.as_ref()));
        match named.into_iter().find(|part| !seen.contains(part.as_str())) {
            Some(part) => Err(ManifestError::NoSuchPart(part.to_string())),
            None => {
                self.validate_attributes()?;
                self.kept.iter().try_for_each(|kept| self.validate_pieces(kept))
            }
        }
    }

    /// Each number of attributes is that of some.
    fn validate_attributes(&self) -> Result<(), ManifestError> {
        let known = self.attributes.as_ref().map_or(0, Vec::len);
        let copies = self.mapped_files.iter().filter_map(|file| file.copy.as_ref());
        let entries = self.tracked_folders.iter().flat_map(|folder| &folder.entries);
        let tracked = entries.filter_map(|entry| match entry.kind {
            TrackedKind::Folder { attributes, .. } => attributes,
            _ => None,
        });
        let files = self.open_files.iter().filter_map(|file| file.attributes);
        let folders = self.folders.iter().filter_map(|folder| folder.attributes);
        let fifos = self.fifos.iter().filter_map(|fifo| fifo.attributes);
        let mut all = files.chain(copies.filter_map(|copy| copy.attributes)).chain(folders).chain(fifos).chain(tracked);
        let unknown = all.find(|number| usize::try_from(*number).is_ok_and(|number| number >= known));
        unknown.map_or(Ok(()), |number| Err(ManifestError::NoSuchAttributes(number)))
    }

    /// Each piece is in the part, is there once, and has its own place.
    fn validate_pieces(&self, kept: &Kept) -> Result<(), ManifestError> {
        let size = self.parts.iter().find(|part| part.path == kept.part).map_or(0, |part| part.size);
        let mut pieces: Vec<&KeptPiece> = kept.pieces.iter().collect();
        pieces.sort_unstable_by_key(|piece| piece.offset);
        let (mut end, mut known) = (0, HashSet::new());
        for piece in pieces {
            let KeptPiece { pid, index, offset, bytes, .. } = *piece;
            let wrong = |why| Err(ManifestError::Piece { pid, index, why });
            if !known.insert((pid, index)) {
                return wrong("is there twice");
            }
            if bytes == 0 {
                return wrong("is empty");
            }
            if offset < end {
                return wrong("overlaps another one");
            }
            end = match offset.checked_add(bytes).filter(|end| *end <= size) {
                Some(end) => end,
                None => return wrong("is beyond the end of its part"),
            };
        }
        Ok(())
    }
}

/// The bytes that a signature covers: a constant for manifests, the version, and the exact text, which contains the
/// job, the id, the parts and the hash of the chunk map.
fn signed<'a>(version: &'a [u8; 4], body: &'a str) -> [&'a [u8]; 3] {
    [b"manifest", version, body.as_bytes()]
}

#[cfg(test)]
mod tests;

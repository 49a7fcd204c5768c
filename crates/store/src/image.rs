//! An image as it is found: its name, its folder, and whether it can be used.

use std::io;
use std::os::unix::fs::MetadataExt;

use serde::Serialize;

use super::chunk::CHUNK;
use super::chunk::map::{self, ChunkMap};
use super::error::{Error, Result};
use super::file_error::Failing;
use super::format::{ReadError, size_of};
use super::id::ImageId;
use super::manifest::{Manifest, ManifestError, Part};
use super::mark::{self, BadMark, BadWhy};
use super::trust::{Trust, Untrusted};
use rekindle_os::beneath::{Beneath, Unexpected};
use rekindle_os::durable;

/// An image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its name.
    pub id: ImageId,
    /// Its folder. Nothing may be written there: give CRIU another work directory.
    pub dir: Beneath,
    /// Whether it can be used.
    pub state: State,
    /// The place of the image.
    pub place: Place,
    /// The rules by which its manifest was trusted.
    pub trust: Trust,
}

/// The place of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Place {
    /// In memory: exists as long as the machine runs.
    #[serde(rename = "memory")]
    Staged,
    /// In a slot on the disk, not in the store yet: exists as long as the machine runs.
    #[serde(rename = "slot")]
    Slot,
    /// On the disk.
    #[serde(rename = "store")]
    Stored,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Place::Staged => "memory",
            Place::Slot => "slot",
            Place::Stored => "store",
        })
    }
}

/// How the content of an image is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// Every part is a file in the folder of the image.
    Loose,
    /// The parts are cut into chunks in packs; the folder has the chunk map.
    Packed,
}

/// Whether an image can be used, as far as its manifest tells; [`Image::verify`] reads the rest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum State {
    /// It was published completely, and no problem is known.
    Good(Box<Manifest>),
    /// It is marked as bad.
    Bad {
        /// Its manifest.
        manifest: Box<Manifest>,
        /// The mark.
        mark: BadMark,
    },
    /// Its manifest cannot be used.
    Damaged {
        /// The reason.
        why: Damage,
    },
}

/// Why a manifest cannot be used. The cause is a text, so that the value can be kept and compared.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Damage {
    /// What this means for the image.
    pub kind: DamageKind,
    /// In words.
    pub detail: String,
}

/// What is known about an image whose manifest cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum DamageKind {
    /// The manifest was read, and differs from what was written.
    Broken,
    /// A newer rekindle wrote it: intact, but not readable here.
    Newer,
    /// The manifest could not be read, so its content is unknown.
    Unreadable,
    /// Something else is in place of its folder or one of its files, put there by others. It may be intact.
    Unexpected,
    /// Its origin is unknown: it has no signature, or one of another key. The configuration may be wrong.
    Untrusted,
}

impl DamageKind {
    /// Its name in messages.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            DamageKind::Unreadable | DamageKind::Unexpected => "unreadable",
            DamageKind::Broken | DamageKind::Newer | DamageKind::Untrusted => "damaged",
        }
    }
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(&self.detail)
    }
}

impl From<ManifestError> for Damage {
    fn from(error: ManifestError) -> Damage {
        let kind = match &error {
            ManifestError::Newer(_) => DamageKind::Newer,
            ManifestError::Read(source) if Unexpected::in_error(source).is_some() => DamageKind::Unexpected,
            ManifestError::Read(_) => DamageKind::Unreadable,
            ManifestError::Untrusted(Untrusted::Unsigned { .. } | Untrusted::OtherKey { .. }) => DamageKind::Untrusted,
            _ => DamageKind::Broken,
        };
        Damage { kind, detail: error.to_string() }
    }
}

impl From<Unexpected> for Damage {
    fn from(unexpected: Unexpected) -> Damage {
        let detail = format!("{unexpected}{}", Failing(&unexpected.clone().into()));
        Damage { kind: DamageKind::Unexpected, detail }
    }
}

/// Why an image is not trusted, if that is the reason why it cannot be used.
#[must_use]
pub fn is_untrusted(state: &State) -> Option<&Damage> {
    match state {
        State::Damaged { why } if why.kind == DamageKind::Untrusted => Some(why),
        _ => None,
    }
}

impl Image {
    /// Loads the image in `dir`. Damage is part of the result, never an error.
    #[must_use]
    pub fn load(dir: &Beneath, id: ImageId, trust: &Trust) -> Image {
        let found = Manifest::read(dir, trust).and_then(|manifest| {
            if manifest.id != id {
                return Err(ManifestError::OtherImage(manifest.id));
            }
            hashed(manifest).map(Box::new)
        });
        Image::judge(dir, id, found, Place::Stored, trust)
    }

    /// An image that was unpacked to `dir`. Like an image in memory it has no hashes: they were checked while unpacking.
    /// So its manifest must not be written there: with a signature it would vouch for any content.
    pub fn unpacked(dir: &Beneath, manifest: Manifest, trust: &Trust) -> Image {
        let (state, trust) = (State::Good(Box::new(manifest.clone())), trust.clone());
        Image { id: manifest.id, dir: dir.clone(), state, place: Place::Staged, trust }
    }

    /// Loads the image in the slot `dir`; `None` if there is no complete image.
    pub(super) fn load_staged(dir: &Beneath, place: Place, trust: &Trust) -> Option<Image> {
        let found = read_staged(dir, place, trust);
        // It is not used, but reported: it may be from before there was a key.
        let id = match &found {
            Ok(manifest) => manifest.id,
            Err(ManifestError::Untrusted(_) | ManifestError::NoChecksum(_)) => {
                Manifest::read(dir, &Trust::default()).ok()?.id
            }
            Err(_) => return None,
        };
        Some(Image::judge(dir, id, found.map(Box::new), place, trust))
    }

    fn judge(
        dir: &Beneath,
        id: ImageId,
        found: Result<Box<Manifest>, ManifestError>,
        place: Place,
        trust: &Trust,
    ) -> Image {
        let state = match found {
            Ok(manifest) => match mark::read(dir, manifest.taken) {
                Ok(None) => State::Good(manifest),
                Ok(Some(mark)) => State::Bad { manifest, mark },
                Err(unexpected) => State::Damaged { why: unexpected.into() },
            },
            Err(error) => State::Damaged { why: error.into() },
        };
        Image { id, dir: dir.clone(), state, place, trust: trust.clone() }
    }

    /// The same image in its present state. An image in a slot that was replaced meanwhile is damaged.
    #[must_use]
    pub fn look_again(&self) -> Image {
        match self.place {
            Place::Stored => Image::load(&self.dir, self.id, &self.trust),
            Place::Staged | Place::Slot => {
                // What is open here lasts when memory is unmounted, and a new one may be at its path.
                let now = if self.place == Place::Staged { self.dir.again() } else { Ok(self.dir.clone()) };
                let found = now.map_err(|_| ManifestError::Missing);
                let found = found.and_then(|dir| read_staged(&dir, self.place, &self.trust));
                let found = found.and_then(|manifest| match manifest.id == self.id {
                    true => Ok(Box::new(manifest)),
                    false => Err(ManifestError::OtherImage(manifest.id)),
                });
                Image::judge(&self.dir, self.id, found, self.place, &self.trust)
            }
        }
    }

    /// The same image as another mount namespace shows it, after that was entered.
    ///
    /// # Errors
    /// As [`Beneath::root`].
    pub fn seen_from_here(&self) -> io::Result<Image> {
        Ok(Image { dir: self.dir.again()?, ..self.clone() })
    }

    /// Whether it is in memory or in a slot on the disk, and not in the store.
    #[must_use]
    pub fn is_staged(&self) -> bool {
        self.place != Place::Stored
    }

    /// How its content is stored, according to its manifest; loose if there is none.
    #[must_use]
    pub fn form(&self) -> Form {
        match self.manifest().and_then(|manifest| manifest.chunks.as_ref()) {
            Some(_) => Form::Packed,
            None => Form::Loose,
        }
    }

    /// Reads its chunk map, and checks it against the manifest; `None` if the image is loose or its manifest cannot be
    /// used.
    ///
    /// # Errors
    /// When the map cannot be read, or does not match the manifest.
    pub fn chunk_map(&self) -> Result<Option<ChunkMap>, ReadError> {
        let Some((manifest, chunks)) = self.manifest().and_then(|it| Some((it, it.chunks.as_ref()?))) else {
            return Ok(None);
        };
        let file = self.dir.join(map::FILE_NAME);
        let map = ChunkMap::read(&file, &chunks.blake3)?;
        let wrong = |source| ReadError::Format { path: file.path().to_owned(), source };
        manifest.check_map(chunks, &map).map_err(wrong)?;
        Ok(Some(map))
    }

    /// Bytes of its content without the holes.
    ///
    /// # Errors
    /// Those of [`Image::chunk_map`]. A file of a loose image that cannot be examined counts with its length.
    pub fn data(&self) -> Result<u64, ReadError> {
        let Some(manifest) = self.manifest() else { return Ok(0) };
        let Some(chunks) = &manifest.chunks else {
            let of = |part: &Part| match self.dir.join(&part.path).metadata() {
                // In units of 512 bytes (stat(2)). Small files can be stored without a block.
                Ok(meta) => part.size.min(meta.blocks().saturating_mul(512).max(4096)),
                Err(_) => part.size,
            };
            return Ok(manifest.parts.iter().map(of).sum());
        };
        // Without large holes nothing is read: the map of a large image has hundreds of megabytes.
        if chunks.extents.saturating_mul(size_of(CHUNK)) >= manifest.bytes {
            return Ok(manifest.bytes);
        }
        let map = self.chunk_map()?;
        Ok(map.map_or(manifest.bytes, |map| map.chunks().map(|(_, len)| u64::from(len)).sum()))
    }

    /// Whether a restart may use it.
    #[must_use]
    pub fn is_good(&self) -> bool {
        matches!(self.state, State::Good(_))
    }

    /// Whether this copy is damaged, as far as is known, or cannot be read. Another copy may be intact.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        match &self.state {
            State::Good(_) => false,
            State::Bad { mark, .. } => mark.why == BadWhy::Damaged,
            State::Damaged { why } => matches!(why.kind, DamageKind::Broken | DamageKind::Unreadable),
        }
    }

    /// Whether another copy of it must be kept: this one is damaged, or others put something in its place.
    #[must_use]
    pub(crate) fn is_in_doubt(&self) -> bool {
        let is_unexpected = matches!(&self.state, State::Damaged { why } if why.kind == DamageKind::Unexpected);
        self.is_damaged() || is_unexpected
    }

    /// Its manifest, if it can be used.
    #[must_use]
    pub fn manifest(&self) -> Option<&Manifest> {
        match &self.state {
            State::Good(manifest) | State::Bad { manifest, .. } => Some(manifest),
            State::Damaged { .. } => None,
        }
    }

    /// Marks it as bad, durably, so that restarts skip it. An earlier mark is replaced.
    ///
    /// # Errors
    /// [`Error::Write`].
    pub fn mark_bad(&mut self, mark: BadMark) -> Result<()> {
        let path = self.dir.join(mark::FILE_NAME);
        let failed = |source| Error::Write { path: path.path().to_owned(), source };
        let bytes = serde_json::to_vec_pretty(&mark).map_err(io::Error::from).map_err(failed)?;
        durable::write_file(&path, &bytes, 0o600).map_err(failed)?;
        *self = self.look_again();
        Ok(())
    }

    /// Removes the mark, durably. Does nothing if there is none.
    ///
    /// # Errors
    /// [`Error::Remove`], [`Error::Write`].
    pub fn clear_bad(&mut self) -> Result<()> {
        let mark = self.dir.join(mark::FILE_NAME);
        match mark.remove_file() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(Error::Remove { path: mark.path().to_owned(), source }),
            Ok(()) => durable::sync_dir(&self.dir)
                .map_err(|source| Error::Write { path: self.dir.path().to_owned(), source })?,
        }
        *self = self.look_again();
        Ok(())
    }
}

/// Reads the manifest of an image that is not in the store yet. Only what is in memory may lack hashes: others may be
/// able to write the disk, and the signature of a manifest without hashes says nothing about the content.
fn read_staged(dir: &Beneath, place: Place, trust: &Trust) -> Result<Manifest, ManifestError> {
    let manifest = Manifest::read(dir, trust)?;
    if place == Place::Staged { Ok(manifest) } else { hashed(manifest) }
}

/// Refuses a manifest that does not cover the content. The parts of a packed image are hashed chunk by chunk.
fn hashed(manifest: Manifest) -> Result<Manifest, ManifestError> {
    match manifest.parts.iter().find(|part| part.blake3.is_none() && manifest.chunks.is_none()) {
        Some(part) => Err(ManifestError::NoChecksum(part.path.to_string())),
        None => Ok(manifest),
    }
}

//! Keys, the names of chunks, and sealing.
//!
//! Four independent keys are derived from a key file of 32 random bytes: one names chunks, one seals them, one signs
//! manifests and job records, one is the key's public id. Chunks are named with a key, because a bare hash would tell
//! anybody who sees the store whether it contains a content that he knows. Sealing uses XChaCha20-Poly1305 with a
//! random nonce of 24 bytes. There is no counter to save, so no nonce repeats after a power cut.
//!
//! A key is never shown, logged or written, and its memory is wiped when it is dropped.

use std::fmt;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use chacha20poly1305::aead::inout::InOutBuf;
use chacha20poly1305::aead::{AeadInOut, Generate, KeyInit};
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};
use thiserror::Error;
use zeroize::{Zeroize, Zeroizing};

use super::id::ChunkId;
use crate::format::FormatError;
use rekindle_os::durable;

const NONCE: usize = 24;
const TAG: usize = 16;
/// Bytes that sealing adds.
pub(crate) const SEAL: usize = NONCE + TAG;
/// Bytes of a key.
const KEY: usize = 32;
/// Maximum size of a key file: 64 digits and a line end, with some room to detect a longer file.
const MAX_FILE: u64 = 128;

/// Contexts of `blake3::derive_key`. They are part of the format and never change.
const NAMES: &str = "rekindle 2026 store: names of chunks";
const SEALS: &str = "rekindle 2026 store: sealing of chunks";
const ID: &str = "rekindle 2026 store: id of the key";
const SIGNS: &str = "rekindle 2026 store: signatures of manifests and records";

/// Why a key file cannot be used.
#[derive(Debug, Error)]
pub enum KeyError {
    /// The file cannot be opened or read.
    #[error("cannot read the key file {}: {source}; make one with `head -c 32 /dev/urandom > KEY && chmod 600 KEY`", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Other users can read or write the file.
    #[error("the key file {} has mode {mode:04o}: others can use it; run `chmod 600 '{}'`", .path.display(), .path.display())]
    OthersCanRead {
        /// The file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// The file belongs to another user.
    #[error("the key file {} belongs to user {owner}; run `chown {we} '{}'`", .path.display(), .path.display())]
    OtherOwner {
        /// The file.
        path: PathBuf,
        /// Its owner.
        owner: u32,
        /// The present user.
        we: u32,
    },
    /// The content is neither 32 bytes nor 64 digits. It is not shown.
    #[error("{} is not a key file: it needs 32 raw bytes or 64 hex digits", .path.display())]
    NoKey {
        /// The file.
        path: PathBuf,
    },
}

/// The key that a store is encrypted with.
#[derive(Clone)]
pub struct Key {
    names: Zeroizing<[u8; KEY]>,
    seals: Zeroizing<[u8; KEY]>,
    signs: Zeroizing<[u8; KEY]>,
    id: [u8; 16],
    plain: PlainPacks,
}

/// How a reader with a key treats packs that are not encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PlainPacks {
    /// It refuses them: anybody who can write the store could have made them.
    #[default]
    Refused,
    /// It reads them: they are from before there was a key.
    Accepted,
}

/// Compares the ids, which are derived from the same secret.
impl PartialEq for Key {
    fn eq(&self, other: &Key) -> bool {
        (self.id, self.plain) == (other.id, other.plain)
    }
}

impl Eq for Key {}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").finish_non_exhaustive()
    }
}

impl Key {
    /// Reads a key file: 32 raw bytes, or 64 hexadecimal digits. It must belong to this user and be private (0600,
    /// 0400).
    ///
    /// # Errors
    /// Each says what to do.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let failed = |source| KeyError::Read { path: path.to_owned(), source };
        let file = durable::open_for_reading(path).map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        let (mode, owner, we) = (meta.mode() & 0o7777, meta.uid(), nix::unistd::geteuid().as_raw());
        if mode & 0o077 != 0 {
            return Err(KeyError::OthersCanRead { path: path.to_owned(), mode });
        }
        if owner != we {
            return Err(KeyError::OtherOwner { path: path.to_owned(), owner, we });
        }
        let mut bytes = Zeroizing::new(Vec::with_capacity(256));
        file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed)?;
        let secret = secret(&bytes).ok_or_else(|| KeyError::NoKey { path: path.to_owned() })?;
        Ok(Key::new(&secret))
    }

    /// A key with this secret.
    #[must_use]
    pub fn new(secret: &[u8; 32]) -> Key {
        let mut whole = blake3::derive_key(ID, secret);
        let id = whole.first_chunk().copied().unwrap_or_default();
        whole.zeroize();
        let derive = |context| Zeroizing::new(blake3::derive_key(context, secret));
        let plain = PlainPacks::Refused;
        Key { names: derive(NAMES), seals: derive(SEALS), signs: derive(SIGNS), id, plain }
    }

    /// The same key, with this treatment of packs that are not encrypted.
    #[must_use]
    pub fn with_plain_packs(self, plain: PlainPacks) -> Key {
        Key { plain, ..self }
    }

    /// How a reader treats packs that are not encrypted.
    #[must_use]
    pub(crate) fn plain_packs(&self) -> PlainPacks {
        self.plain
    }

    /// The keyed hash of all parts, each preceded by its length, so that no byte can move from one part to the next.
    pub(crate) fn sign(&self, parts: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.signs);
        for part in parts {
            hasher.update(&u64::try_from(part.len()).unwrap_or(u64::MAX).to_le_bytes()).update(part);
        }
        hasher.finalize()
    }

    /// The id by which a pack names its key. It reveals nothing about the key.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// The name of a chunk in an encrypted store.
    #[must_use]
    pub fn chunk_id(&self, raw: &[u8]) -> ChunkId {
        blake3::keyed_hash(&self.names, raw).into()
    }

    /// Replaces the content of `bytes` from `start` on by nonce, sealed bytes and tag. `bound` is not encrypted, but
    /// must be the same to open the result.
    ///
    /// # Errors
    /// When the kernel gives no random bytes.
    pub(crate) fn seal(&self, bound: &[u8], bytes: &mut Vec<u8>, start: usize) -> io::Result<()> {
        let nonce = XNonce::try_generate().map_err(io::Error::other)?;
        let end = bytes.len();
        bytes.extend_from_slice(&nonce);
        bytes.get_mut(start..).unwrap_or_default().rotate_right(NONCE);
        let plain = bytes.get_mut(start + NONCE..end + NONCE).unwrap_or_default();
        let sealed = self.cipher().encrypt_inout_detached(&nonce, bound, InOutBuf::from(plain));
        let tag = sealed.map_err(|error| io::Error::other(error.to_string()))?;
        bytes.extend_from_slice(&tag);
        Ok(())
    }

    /// Opens what [`Key::seal`] made, in place.
    ///
    /// # Errors
    /// [`FormatError::Unsealed`] if any bit of it, or of `bound`, differs. Then nothing of it may be used.
    pub(crate) fn open<'a>(&self, bound: &[u8], sealed: &'a mut [u8]) -> Result<&'a mut [u8], FormatError> {
        let (nonce, rest) = sealed.split_first_chunk_mut::<NONCE>().ok_or(FormatError::Unsealed)?;
        let (bytes, tag) = rest.split_last_chunk_mut::<TAG>().ok_or(FormatError::Unsealed)?;
        let (nonce, tag) = (XNonce::from(*nonce), Tag::from(*tag));
        let opened = self.cipher().decrypt_inout_detached(&nonce, bound, InOutBuf::from(&mut *bytes), &tag);
        opened.map_err(|_| FormatError::Unsealed)?;
        Ok(bytes)
    }

    fn cipher(&self) -> XChaCha20Poly1305 {
        XChaCha20Poly1305::new((&*self.seals).into())
    }
}

/// The name of a chunk.
#[must_use]
pub fn chunk_id(key: Option<&Key>, raw: &[u8]) -> ChunkId {
    match key {
        Some(key) => key.chunk_id(raw),
        None => blake3::hash(raw).into(),
    }
}

fn secret(bytes: &[u8]) -> Option<Zeroizing<[u8; KEY]>> {
    if let Ok(raw) = bytes.try_into() {
        return Some(Zeroizing::new(raw));
    }
    let digits = bytes.trim_ascii_end();
    let mut secret = Zeroizing::new([0; KEY]);
    if digits.len() != 2 * KEY {
        return None;
    }
    for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
        let text = std::str::from_utf8(pair).ok().filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()))?;
        *byte = u8::from_str_radix(text, 16).ok()?;
    }
    Some(secret)
}

#[cfg(test)]
mod tests;

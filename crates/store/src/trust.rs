//! Who may have written what is read from a store or a replica.
//!
//! Without a key: anybody who can write there. A hash without a key finds damage, not intent. With a key
//! (`store.encryption-key`), manifests and job records have a signature, a keyed hash that only the owner of the key
//! can make. A file without one is refused, unless a run was told to accept it ([`Unsigned`]). docs/internals/format.md says what
//! each signature covers.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use super::chunk::Key;
use super::chunk::cipher::PlainPacks;
use super::format::blake3_hex;
use super::hex;
use super::id::JobName;

/// Why something is not trusted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Untrusted {
    /// It has no signature: it may be from before there was a key, or made by somebody without the key.
    #[error(
        "has no signature, but store.encryption-key is {}: anyone who can write the store or the replica could have made it. If it is older than this key, continue from it once with `rekindle run --accept-unsigned`; otherwise remove it",
        key.display()
    )]
    Unsigned {
        /// The key file.
        key: PathBuf,
    },
    /// It was signed with another key.
    #[error(
        "was signed with another key (its id is {id}) than the one in {}: set store.encryption-key to that key, or remove the image",
        key.display()
    )]
    OtherKey {
        /// The key file.
        key: PathBuf,
        /// The id of that key.
        id: String,
    },
    /// It claims a signature with our key, and the signature is wrong.
    #[error("has a signature that does not match the key in {}: it is damaged, or was changed by someone without the key", key.display())]
    Forged {
        /// The key file.
        key: PathBuf,
    },
}

/// A signature, as in a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Signature {
    /// The id of the key, hexadecimal. It reveals nothing about the key.
    key: String,
    #[serde(with = "hex")]
    mac: blake3::Hash,
}

/// How files without a signature are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Unsigned {
    /// It is refused.
    #[default]
    Refused,
    /// They are trusted (`--accept-unsigned`).
    Accepted,
}

/// The rules for trusting files, and the key that signs the files that we write.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Trust {
    secret: Option<Arc<Secret>>,
    job: Option<JobName>,
}

#[derive(PartialEq, Eq)]
struct Secret {
    key: Key,
    path: PathBuf,
    unsigned: Unsigned,
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.secret.as_ref().map(|secret| &secret.path);
        f.debug_struct("Trust").field("key", &key).field("job", &self.job).finish()
    }
}

impl Trust {
    /// Rules with this key from that file.
    #[must_use]
    pub fn new(key: Key, path: &Path, unsigned: Unsigned) -> Trust {
        let plain = match unsigned {
            Unsigned::Refused => PlainPacks::Refused,
            Unsigned::Accepted => PlainPacks::Accepted,
        };
        let secret = Secret { key: key.with_plain_packs(plain), path: path.to_owned(), unsigned };
        Trust { secret: Some(Arc::new(secret)), job: None }
    }

    /// The same for files of one job: files of other jobs are refused.
    #[must_use]
    pub fn for_job(&self, job: &JobName) -> Trust {
        Trust { secret: self.secret.clone(), job: Some(job.clone()) }
    }

    /// The key, which encrypts too.
    #[must_use]
    pub fn key(&self) -> Option<&Key> {
        self.secret.as_ref().map(|secret| &secret.key)
    }

    /// The path of the key file.
    #[must_use]
    pub fn key_path(&self) -> Option<&Path> {
        self.secret.as_ref().map(|secret| secret.path.as_path())
    }

    /// The job whose files are read, if those of other jobs are refused.
    pub(super) fn job(&self) -> Option<&JobName> {
        self.secret.as_ref().and(self.job.as_ref())
    }

    /// Signs these bytes; None without a key.
    pub(super) fn sign(&self, parts: &[&[u8]]) -> Option<Signature> {
        let key = self.key()?;
        Some(Signature { key: blake3_hex(&key.id()), mac: key.sign(parts) })
    }

    /// Checks that somebody with the key has signed these bytes. Without a key nothing is checked.
    pub(super) fn check(&self, signature: Option<&Signature>, parts: &[&[u8]]) -> Result<(), Untrusted> {
        let Some(secret) = &self.secret else { return Ok(()) };
        let path = || secret.path.clone();
        match signature {
            None if secret.unsigned == Unsigned::Accepted => Ok(()),
            None => Err(Untrusted::Unsigned { key: path() }),
            Some(Signature { key, .. }) if *key != blake3_hex(&secret.key.id()) => {
                // It is shown in a message, so it is limited to the length of an id.
                let id = key.chars().filter(char::is_ascii_hexdigit).take(32).collect();
                Err(Untrusted::OtherKey { key: path(), id })
            }
            // Compared in constant time.
            Some(Signature { mac, .. }) if *mac != secret.key.sign(parts) => Err(Untrusted::Forged { key: path() }),
            Some(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trust(byte: u8, unsigned: Unsigned) -> Trust {
        Trust::new(Key::new(&[byte; 32]), Path::new("/etc/key"), unsigned)
    }

    #[test]
    fn only_who_has_the_key_signs() {
        let ours = trust(7, Unsigned::Refused);
        let signed = ours.sign(&[b"a", b"bc"]).unwrap();
        assert_eq!(ours.check(Some(&signed), &[b"a", b"bc"]), Ok(()));
        let forged = Err(Untrusted::Forged { key: "/etc/key".into() });
        for other in [&[&b"ab"[..], b"c"][..], &[b"a", b"bd"], &[b"a", b"bc", b""], &[b"abc"]] {
            assert_eq!(ours.check(Some(&signed), other), forged, "{other:?}");
        }
        let theirs = trust(8, Unsigned::Accepted).sign(&[b"a", b"bc"]).unwrap();
        for unsigned in [Unsigned::Refused, Unsigned::Accepted] {
            let ours = trust(7, unsigned);
            assert!(matches!(ours.check(Some(&theirs), &[b"a", b"bc"]), Err(Untrusted::OtherKey { .. })));
            let named = Signature { key: signed.key.clone(), mac: theirs.mac };
            assert_eq!(ours.check(Some(&named), &[b"a", b"bc"]), forged, "the flag is for what has no signature");
        }
    }

    #[test]
    fn what_has_no_signature_is_believed_where_that_was_said_or_there_is_no_key() {
        let error = trust(7, Unsigned::Refused).check(None, &[b"a"]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("/etc/key") && text.contains("--accept-unsigned"), "{text}");
        assert_eq!(trust(7, Unsigned::Accepted).check(None, &[b"a"]), Ok(()));
        assert_eq!(Trust::default().check(None, &[b"a"]), Ok(()));
        let signed = trust(7, Unsigned::Refused).sign(&[b"b"]).unwrap();
        assert_eq!(Trust::default().check(Some(&signed), &[b"a"]), Ok(()), "nobody without the key can tell");
        assert!(Trust::default().sign(&[b"a"]).is_none());
    }
}

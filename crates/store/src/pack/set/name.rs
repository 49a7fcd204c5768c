//! The name of a pack: 16 random bytes, so that two writers never create the same one.

use std::fmt;
use std::io;
use std::str::FromStr;

use chacha20poly1305::aead::Generate;

use crate::format::blake3_hex;

/// The name of a pack: 32 hexadecimal digits in lower case.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PackName([u8; 16]);

impl PackName {
    /// A new unique name.
    ///
    /// # Errors
    /// When the kernel gives no random bytes.
    pub fn random() -> io::Result<PackName> {
        <[u8; 16]>::try_generate().map(PackName).map_err(io::Error::other)
    }
}

impl From<[u8; 16]> for PackName {
    fn from(bytes: [u8; 16]) -> PackName {
        PackName(bytes)
    }
}

/// A text that is not the name of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the name of a pack has 32 lower-case hexadecimal digits")]
pub struct PackNameError;

impl FromStr for PackName {
    type Err = PackNameError;

    fn from_str(text: &str) -> Result<PackName, PackNameError> {
        let lower = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if text.len() != 32 || !text.bytes().all(lower) {
            return Err(PackNameError);
        }
        let number = u128::from_str_radix(text, 16).map_err(|_| PackNameError)?;
        Ok(PackName(number.to_be_bytes()))
    }
}

impl fmt::Display for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&blake3_hex(&self.0))
    }
}

impl fmt::Debug for PackName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

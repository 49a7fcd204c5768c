//! UUIDs of GPUs as nvidia-smi prints them, and old=new pairs of them.

use std::fmt;
use std::str::FromStr;

/// The UUID of a GPU. In text, the prefix `GPU-` and hyphens are optional, in any case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid([u8; 16]);

/// Text that is not a GPU UUID.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not the UUID of a GPU: it must be GPU- and 32 hexadecimal digits, as `nvidia-smi -L` prints it")]
pub struct ParseUuidError {
    text: String,
}

impl GpuUuid {
    /// The UUID made of these bytes, in the order in which the text shows them.
    #[must_use]
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes, in the order in which the text shows them (that of `CUuuid`).
    #[must_use]
    pub fn bytes(self) -> [u8; 16] {
        self.0
    }
}

impl FromStr for GpuUuid {
    type Err = ParseUuidError;

    fn from_str(text: &str) -> Result<Self, ParseUuidError> {
        parse(text.trim()).map(Self).ok_or_else(|| ParseUuidError { text: text.to_owned() })
    }
}

fn parse(text: &str) -> Option<[u8; 16]> {
    let digits = match text.get(..4) {
        Some(prefix) if prefix.eq_ignore_ascii_case("gpu-") => text.get(4..)?,
        // All hyphens were removed, including the one after the prefix.
        Some(prefix) if prefix.to_ascii_lowercase().starts_with("gpu") => text.get(3..)?,
        _ => text,
    };
    let digits = digits.as_bytes();
    let digits: Vec<u8> = match digits.len() {
        32 => digits.to_vec(),
        // Hyphens are accepted only at their positions: a shifted one probably means a missing digit.
        36 if [8, 13, 18, 23].iter().all(|&at| digits[at] == b'-') => {
            digits.iter().copied().filter(|&b| b != b'-').collect()
        }
        _ => return None,
    };
    if digits.len() != 32 {
        return None;
    }
    let mut bytes = [0; 16];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
    }
    Some(bytes)
}

fn nibble(digit: u8) -> Option<u8> {
    match digit {
        b'0'..=b'9' => Some(digit - b'0'),
        b'a'..=b'f' => Some(digit - b'a' + 10),
        b'A'..=b'F' => Some(digit - b'A' + 10),
        _ => None,
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A GPU of a checkpointed process and its replacement. Both must be of the same kind, and a restore with pairs must
/// name every GPU that the process uses (including unchanged ones: `A=A`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct GpuMapping {
    /// The GPU at the checkpoint.
    pub old: GpuUuid,
    /// The GPU to restore to.
    pub new: GpuUuid,
}

/// Text that is not an `OLD=NEW` pair.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseMappingError {
    /// There is not exactly one `=`.
    #[error("{0:?} is not a pair of GPUs: it must be OLD=NEW")]
    NotAPair(String),
    /// One side is not a UUID.
    #[error(transparent)]
    Uuid(#[from] ParseUuidError),
}

impl FromStr for GpuMapping {
    type Err = ParseMappingError;

    fn from_str(text: &str) -> Result<Self, ParseMappingError> {
        let (old, new) = text.split_once('=').ok_or_else(|| ParseMappingError::NotAPair(text.to_owned()))?;
        Ok(Self { old: old.parse()?, new: new.parse()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

    #[test]
    fn every_spelling_gives_the_same_uuid() {
        let uuid: GpuUuid = TEXT.parse().unwrap();
        assert_eq!(uuid.bytes()[15], 0xff);
        assert_eq!(uuid.to_string(), TEXT);
        for other in [
            "00112233-4455-6677-8899-aabbccddeeff",
            "00112233445566778899aabbccddeeff",
            "GPU-00112233445566778899AABBCCDDEEFF",
            "GPU00112233445566778899aabbccddeeff",
            "gpu-00112233-4455-6677-8899-AABBCCDDEEFF",
            " GPU-00112233-4455-6677-8899-aabbccddeeff\n",
        ] {
            assert_eq!(other.parse::<GpuUuid>().unwrap(), uuid, "{other}");
        }
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        for bad in [
            "",
            "GPU-",
            "0",
            "MIG-00112233-4455-6677-8899-aabbccddeeff",
            "GPU-00112233-4455-6677-8899-aabbccddeef",
            "GPU-00112233-4455-6677-8899-aabbccddeefff",
            "GPU-0011223-34455-6677-8899-aabbccddeeff",
            "GPU-0011223g-4455-6677-8899-aabbccddeeff",
            "00112233-4455-6677-8899-aabbccdd-eef",
            "ääääääääääääääää",
        ] {
            let error = bad.parse::<GpuUuid>().unwrap_err();
            assert!(error.to_string().contains("32 hexadecimal digits"), "{bad}: {error}");
        }
    }

    #[test]
    fn a_pair_needs_both_sides() {
        let pair: GpuMapping = format!("{TEXT}=11112233445566778899aabbccddeeff").parse().unwrap();
        assert_eq!(pair.old.to_string(), TEXT);
        assert_eq!(pair.new.bytes()[0], 0x11);
        for bad in [TEXT, "", "=", &format!("{TEXT}="), &format!("{TEXT}={TEXT}={TEXT}")] {
            assert!(bad.parse::<GpuMapping>().is_err(), "{bad}");
        }
    }
}

//! Values of the store and its replica: compression, size limits, and the address of an object store.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use rekindle_store::persist;

use super::value::{ByteSize, Malformed, NumberOrText};

/// Number of threads that store an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub(crate) enum Threads {
    /// Depends on the number of processors.
    #[default]
    Auto,
    /// This number, 1 to [`Threads::MOST`].
    Count(u8),
}

impl Threads {
    /// More threads are not faster on any disk.
    pub(crate) const MOST: u8 = 64;

    /// The number of threads for this number of processors.
    #[must_use]
    pub(crate) fn among(self, processors: usize) -> usize {
        match self {
            Threads::Auto => persist::threads_beside(processors),
            Threads::Count(n) => n.into(),
        }
    }
}

impl TryFrom<NumberOrText> for Threads {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Threads, Malformed> {
        let count = match from {
            NumberOrText::Text(text) if text == "auto" => return Ok(Threads::Auto),
            NumberOrText::Text(text) => text.parse().map_err(|_| Malformed)?,
            NumberOrText::Number(n) => u8::try_from(n).map_err(|_| Malformed)?,
        };
        if (1..=Threads::MOST).contains(&count) { Ok(Threads::Count(count)) } else { Err(Malformed) }
    }
}

impl From<Threads> for NumberOrText {
    fn from(threads: Threads) -> NumberOrText {
        match threads {
            Threads::Auto => NumberOrText::Text("auto".to_owned()),
            Threads::Count(n) => NumberOrText::Number(n.into()),
        }
    }
}

/// A limit of a size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub(crate) enum SizeLimit {
    /// No limit.
    #[default]
    Unlimited,
    /// This many bytes.
    AtMost(ByteSize),
}

impl SizeLimit {
    /// The limit in bytes, if there is one.
    #[must_use]
    pub(crate) fn bytes(self) -> Option<u64> {
        match self {
            SizeLimit::Unlimited => None,
            SizeLimit::AtMost(size) => Some(size.bytes()),
        }
    }
}

impl FromStr for SizeLimit {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<SizeLimit, Malformed> {
        if text == "unlimited" { Ok(SizeLimit::Unlimited) } else { text.parse().map(SizeLimit::AtMost) }
    }
}

impl TryFrom<NumberOrText> for SizeLimit {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<SizeLimit, Malformed> {
        match from {
            NumberOrText::Text(text) => text.parse(),
            number @ NumberOrText::Number(_) => ByteSize::try_from(number).map(SizeLimit::AtMost),
        }
    }
}

impl From<SizeLimit> for String {
    fn from(limit: SizeLimit) -> String {
        match limit {
            SizeLimit::Unlimited => "unlimited".to_owned(),
            SizeLimit::AtMost(size) => size.to_string(),
        }
    }
}

/// Maximum bytes that one repack writes to free the space of unneeded content.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub(crate) enum Repack {
    /// No repacking.
    Off,
    /// This many bytes.
    UpTo(ByteSize),
}

impl TryFrom<NumberOrText> for Repack {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Repack, Malformed> {
        match from {
            NumberOrText::Text(text) if text == "off" => Ok(Repack::Off),
            other => ByteSize::try_from(other).map(Repack::UpTo),
        }
    }
}

impl From<Repack> for String {
    fn from(repack: Repack) -> String {
        match repack {
            Repack::Off => "off".to_owned(),
            Repack::UpTo(size) => size.to_string(),
        }
    }
}

/// Bytes of the store read per second to find damage, while there is nothing else to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub(crate) enum VerifyRate {
    /// Off.
    Off,
    /// This many bytes.
    PerSecond(ByteSize),
}

impl TryFrom<NumberOrText> for VerifyRate {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<VerifyRate, Malformed> {
        let size = match from {
            NumberOrText::Text(text) if text == "off" => return Ok(VerifyRate::Off),
            other => ByteSize::try_from(other)?,
        };
        Ok(if size.bytes() == 0 { VerifyRate::Off } else { VerifyRate::PerSecond(size) })
    }
}

impl From<VerifyRate> for String {
    fn from(rate: VerifyRate) -> String {
        match rate {
            VerifyRate::Off => "off".to_owned(),
            VerifyRate::PerSecond(size) => size.to_string(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_leave_the_job_most_processors() {
        for (processors, threads) in [(1, 1), (2, 2), (4, 2), (8, 2), (12, 3), (16, 4), (32, 8), (256, 8)] {
            assert_eq!(Threads::Auto.among(processors), threads, "{processors}");
        }
        assert_eq!(Threads::Count(64).among(16), 64, "who sets it means it");
    }
}

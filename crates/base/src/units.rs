//! Sizes and times as users read and write them, and values that may be a number or text.

use std::fmt;
use std::str::FromStr;

use chrono::{DateTime, Local, Utc};
use serde::{Deserialize, Serialize};

/// Bytes for people: "98.7 GiB".
#[must_use]
pub fn size(bytes: u64) -> String {
    bytesize::ByteSize::b(bytes).to_string()
}

/// A time for people, in local time with its zone: "2026-11-25 03:55:07+00:00".
#[must_use]
pub fn moment(time: DateTime<Utc>) -> String {
    time.with_timezone(&Local).format("%Y-%m-%d %H:%M:%S%:z").to_string()
}

/// A number and what it counts: "1 restart", "2 restarts".
#[must_use]
pub fn counted(n: u64, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// A number of bytes. Read from an integer or from text such as "64MiB" or "200GB"; written in the shortest exact unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub struct ByteSize(u64);

impl ByteSize {
    /// That many bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> ByteSize {
        ByteSize(bytes)
    }

    /// That many times 1024² bytes.
    #[must_use]
    pub const fn mib(n: u64) -> ByteSize {
        ByteSize(n << 20)
    }

    /// That many times 1024³ bytes.
    #[must_use]
    pub const fn gib(n: u64) -> ByteSize {
        ByteSize(n << 30)
    }

    /// The size in bytes.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.0
    }
}

/// Text that the type does not accept. It has no details: the message names the key and the expected value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not one of the accepted forms")]
pub struct Malformed;

impl FromStr for ByteSize {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<ByteSize, Malformed> {
        let size = text.trim().parse::<bytesize::ByteSize>().map_err(|_| Malformed)?.as_u64();
        // bytesize returns the largest number for values that do not fit.
        if size == u64::MAX { Err(Malformed) } else { Ok(ByteSize(size)) }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(&str, u64); 9] = [
            ("TiB", bytesize::TIB),
            ("TB", bytesize::TB),
            ("GiB", bytesize::GIB),
            ("GB", bytesize::GB),
            ("MiB", bytesize::MIB),
            ("MB", bytesize::MB),
            ("KiB", bytesize::KIB),
            ("kB", bytesize::KB),
            ("B", 1),
        ];
        let exact = UNITS.iter().filter(|(_, unit)| self.0 >= *unit && self.0.is_multiple_of(*unit));
        match exact.min_by_key(|(_, unit)| self.0 / unit) {
            Some((name, unit)) => write!(f, "{}{name}", self.0 / unit),
            None => f.write_str("0B"),
        }
    }
}

impl From<ByteSize> for String {
    fn from(size: ByteSize) -> String {
        size.to_string()
    }
}

/// Integers and text, for the values that may be either.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NumberOrText {
    /// An integer.
    Number(u64),
    /// Text.
    Text(String),
}

impl TryFrom<NumberOrText> for ByteSize {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<ByteSize, Malformed> {
        match from {
            NumberOrText::Number(bytes) => Ok(ByteSize(bytes)),
            NumberOrText::Text(text) => text.parse(),
        }
    }
}

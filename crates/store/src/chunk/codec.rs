//! Compression of chunks.
//!
//! Each chunk is compressed separately, so that it can be read separately. If compression does not pay, the raw bytes
//! are stored. [`Compression::Auto`] compresses a sample of the chunk first: half of an image's content is weights,
//! which do not compress, and trying all of them would cost more than everything else.
//!
//! LZ4 uses the block format, not the frame format. The record has both sizes, and the name of the chunk is the hash of
//! the raw bytes, so a frame would repeat them. And reading a block fills a buffer of known size, while a frame states
//! its own size.

use std::cell::RefCell;
use std::fmt;
use std::str::FromStr;

use lz4_flex::block as lz4;
use serde::{Deserialize, Serialize};

use super::CHUNK_MAX;
use crate::format::{FormatError, What, size_of};
use rekindle_base::units::Malformed;

/// How a chunk is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Codec {
    /// Uncompressed.
    Raw,
    /// An LZ4 block.
    Lz4,
    /// A Zstandard frame.
    Zstd,
}

impl Codec {
    /// Its number in files.
    #[must_use]
    pub(crate) const fn number(self) -> u8 {
        match self {
            Codec::Raw => 0,
            Codec::Lz4 => 1,
            Codec::Zstd => 2,
        }
    }

    /// The codec with this number in files.
    #[must_use]
    pub(crate) const fn from_number(number: u8) -> Option<Codec> {
        match number {
            0 => Some(Codec::Raw),
            1 => Some(Codec::Lz4),
            2 => Some(Codec::Zstd),
            _ => None,
        }
    }
}

/// How the content of images is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// A sample of each chunk decides between raw and [`AUTO_LEVEL`].
    #[default]
    Auto,
    /// Store everything uncompressed.
    None,
    /// LZ4: half of the savings, several times as fast.
    Lz4,
    /// Zstandard with this level, one of [`Compression::LEVELS`].
    Zstd(i32),
}

impl Compression {
    /// The allowed levels of Zstandard. Lower ones are no faster than LZ4; higher ones need hundreds of MiB per thread.
    pub(crate) const LEVELS: std::ops::RangeInclusive<i32> = -7..=19;
    /// The level of "zstd" without a number, as in the command `zstd`.
    const LEVEL: i32 = 3;
}

impl FromStr for Compression {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Compression, Malformed> {
        match text.split_once(':') {
            None => match text {
                "auto" => Ok(Compression::Auto),
                "none" => Ok(Compression::None),
                "lz4" => Ok(Compression::Lz4),
                "zstd" => Ok(Compression::Zstd(Compression::LEVEL)),
                _ => Err(Malformed),
            },
            // parse accepts a plus sign.
            Some(("zstd", level)) if !level.starts_with('+') => {
                let level = level.parse().ok().filter(|level| Compression::LEVELS.contains(level));
                level.map(Compression::Zstd).ok_or(Malformed)
            }
            Some(_) => Err(Malformed),
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Compression::Auto => f.write_str("auto"),
            Compression::None => f.write_str("none"),
            Compression::Lz4 => f.write_str("lz4"),
            Compression::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

impl TryFrom<String> for Compression {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Compression, Malformed> {
        text.parse()
    }
}

impl From<Compression> for String {
    fn from(compression: Compression) -> String {
        compression.to_string()
    }
}

/// The level of "auto".
pub(crate) const AUTO_LEVEL: i32 = 1;

/// Bytes of the sample that `auto` takes from each third of a chunk.
const SAMPLE: usize = 4 << 10;
/// `auto` compresses a chunk if LZ4 saves this share of the samples, in per cent.
const SAMPLE_SAVES: usize = 8;
/// It also compresses a chunk if each byte of the sample has at most this many bits of information. Weights contain no
/// repetitions, which is all that LZ4 finds, but the exponent byte has few values: 7.36 bits for float32, less for
/// bfloat16. Noise has 7.95 in a sample.
const SAMPLE_BITS: f64 = 7.5;
/// Compression must save this share, in per cent; otherwise the raw bytes are stored, which are faster to read.
const SAVES: usize = 6;

/// Data that a thread reuses for all chunks: the context of Zstandard takes megabytes to set up.
#[derive(Default)]
struct Tools {
    zstd: Option<(i32, zstd::bulk::Compressor<'static>)>,
    unzstd: Option<zstd::bulk::Decompressor<'static>>,
    table: lz4::CompressTable,
    sample: Vec<u8>,
}

thread_local! {
    static TOOLS: RefCell<Tools> = RefCell::default();
}

/// Compresses a chunk with the wanted method; returns the raw bytes if that does not pay. The content of `scratch` does
/// not matter.
pub(crate) fn encode<'a>(wanted: Compression, raw: &'a [u8], scratch: &'a mut Vec<u8>) -> (Codec, &'a [u8]) {
    let room = raw.len() - raw.len() * SAVES / 100;
    // Zstandard stops at the end of the buffer; LZ4 needs room for the worst case.
    scratch.resize(lz4::get_maximum_output_size(raw.len()), 0);
    let done = TOOLS.with_borrow_mut(|tools| match wanted {
        Compression::None => None,
        Compression::Lz4 => tools.lz4(raw, scratch).map(|n| (Codec::Lz4, n)),
        Compression::Zstd(level) => tools.zstd(level, raw, scratch.get_mut(..room)?).map(|n| (Codec::Zstd, n)),
        Compression::Auto if !tools.sample_saves(raw) => None,
        Compression::Auto => tools.zstd(AUTO_LEVEL, raw, scratch.get_mut(..room)?).map(|n| (Codec::Zstd, n)),
    });
    match done.filter(|(_, n)| *n <= room).and_then(|(codec, n)| Some((codec, scratch.get(..n)?))) {
        Some((codec, stored)) => (codec, stored),
        None => (Codec::Raw, raw),
    }
}

impl Tools {
    fn lz4(&mut self, raw: &[u8], into: &mut [u8]) -> Option<usize> {
        lz4::compress_into_with_table(raw, into, &mut self.table).ok()
    }

    fn zstd(&mut self, level: i32, raw: &[u8], into: &mut [u8]) -> Option<usize> {
        let (_, compressor) = match self.zstd.take().filter(|(of, _)| *of == level) {
            Some(kept) => self.zstd.insert(kept),
            None => self.zstd.insert((level, zstd::bulk::Compressor::new(level).ok()?)),
        };
        compressor.compress_to_buffer(raw, into).ok()
    }

    fn sample_saves(&mut self, raw: &[u8]) -> bool {
        if raw.len() <= 3 * SAMPLE {
            return true;
        }
        let starts = [0, (raw.len() - SAMPLE) / 2, raw.len() - SAMPLE];
        let mut sample = std::mem::take(&mut self.sample);
        sample.resize(lz4::get_maximum_output_size(SAMPLE), 0);
        let samples = || starts.iter().filter_map(|start| raw.get(*start..start + SAMPLE));
        let stored: usize = samples().map(|piece| self.lz4(piece, &mut sample).unwrap_or(SAMPLE)).sum();
        self.sample = sample;
        stored * 100 <= 3 * SAMPLE * (100 - SAMPLE_SAVES) || samples().all(|piece| entropy(piece) <= SAMPLE_BITS)
    }
}

/// Bits of information in each byte, looked at without its neighbours.
fn entropy(bytes: &[u8]) -> f64 {
    let mut counts = [0_u32; 256];
    bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
    let total: f64 = counts.iter().copied().map(f64::from).sum();
    let seen = counts.iter().filter(|count| **count > 0).map(|count| f64::from(*count));
    seen.map(|count| count / total * (total / count).log2()).sum()
}

/// Decodes stored bytes to raw bytes, which replace the content of `into`. Never allocates more than `raw_len`, which
/// is at most [`CHUNK_MAX`].
///
/// # Errors
/// When the bytes are not the result of [`encode`] for a chunk of that size.
pub(crate) fn decode(codec: Codec, stored: &[u8], raw_len: usize, into: &mut Vec<u8>) -> Result<(), FormatError> {
    let (found, bound) = (size_of(raw_len), u64::from(CHUNK_MAX));
    if found > bound || raw_len == 0 {
        return Err(FormatError::OutOfBounds { what: What::Chunk, field: "raw length", found, bound });
    }
    into.resize(raw_len, 0);
    let written = match codec {
        Codec::Raw if stored.len() == raw_len => {
            into.copy_from_slice(stored);
            Ok(raw_len)
        }
        Codec::Raw => Ok(stored.len()),
        Codec::Lz4 => lz4::decompress_into(stored, into).map_err(|error| error.to_string()),
        Codec::Zstd => unzstd(stored, into).map_err(|error| error.to_string()),
    };
    match written {
        Ok(n) if n == raw_len => Ok(()),
        Ok(n) => Err(FormatError::Undecodable(format!("it has {n} bytes instead of {raw_len}"))),
        Err(why) => Err(FormatError::Undecodable(why)),
    }
}

fn unzstd(stored: &[u8], into: &mut [u8]) -> std::io::Result<usize> {
    TOOLS.with_borrow_mut(|tools| {
        let decompressor = match tools.unzstd.take() {
            Some(kept) => tools.unzstd.insert(kept),
            None => tools.unzstd.insert(zstd::bulk::Decompressor::new()?),
        };
        decompressor.decompress_to_buffer(stored, into)
    })
}

#[cfg(test)]
mod tests;

//! The leaf values of the store and its replica: compression, bounds of size, and the address of an object store.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::value::{ByteSize, Malformed, NumberOrText};

/// How the content of images is made smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Compression {
    /// What pays for the content at hand.
    #[default]
    Auto,
    /// Not at all.
    None,
    /// LZ4: fast, and little smaller.
    Lz4,
    /// Zstandard with this level, one of [`Compression::LEVELS`].
    Zstd(i32),
}

impl Compression {
    /// The levels of Zstandard that can be set. Below, it is no faster than LZ4; above, it needs hundreds of MiB a thread.
    pub const LEVELS: std::ops::RangeInclusive<i32> = -7..=19;
    /// The level of "zstd" alone, as that of the command `zstd`.
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
            // parse takes a plus sign.
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

/// How many threads bring an image to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub enum Threads {
    /// By how many processors there are.
    #[default]
    Auto,
    /// So many, 1 to [`Threads::MOST`].
    Count(u8),
}

impl Threads {
    /// More do not make any disk faster.
    pub const MOST: u8 = 64;

    /// How many they are among so many processors. The job needs most of those: it is one in four, from two, of which one
    /// hashes while the other waits for the disk, to eight, as one hashes some 2.5 GB/s and no disk takes more.
    #[must_use]
    pub fn among(self, processors: usize) -> usize {
        match self {
            Threads::Auto => (processors / 4).clamp(2, 8).min(processors),
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

/// How large something may become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub enum SizeLimit {
    /// As large as it likes.
    #[default]
    Unlimited,
    /// So many bytes.
    AtMost(ByteSize),
}

impl SizeLimit {
    /// The limit in bytes, where there is one.
    #[must_use]
    pub fn bytes(self) -> Option<u64> {
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

/// How much of the store may be written anew in one go, to get the space back of what is no longer needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub enum Repack {
    /// Nothing.
    Off,
    /// So many bytes.
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

/// In how many packs content is kept that several images of a job refer to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub enum Copies {
    /// In one.
    #[default]
    One,
    /// In two, so that damage to one of them costs nothing.
    Two,
}

impl Copies {
    /// How many packs that are.
    #[must_use]
    pub fn count(self) -> usize {
        match self {
            Copies::One => 1,
            Copies::Two => 2,
        }
    }
}

impl TryFrom<NumberOrText> for Copies {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Copies, Malformed> {
        let count = match from {
            NumberOrText::Number(count) => count,
            NumberOrText::Text(text) => text.parse().map_err(|_| Malformed)?,
        };
        match count {
            1 => Ok(Copies::One),
            2 => Ok(Copies::Two),
            _ => Err(Malformed),
        }
    }
}

impl From<Copies> for NumberOrText {
    fn from(copies: Copies) -> NumberOrText {
        NumberOrText::Number(if copies == Copies::One { 1 } else { 2 })
    }
}

/// How much of the store is read each second to find damage, while there is nothing else to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "String")]
pub enum VerifyRate {
    /// Nothing.
    Off,
    /// So many bytes.
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

/// What speaks at the address of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// `s3://BUCKET/PATH`: what speaks S3.
    S3,
    /// `gs://BUCKET/PATH`: Google Cloud Storage.
    Gs,
    /// `az://CONTAINER/PATH`: Azure Blob Storage.
    Az,
    /// `file:///PATH`: a folder, such as one that is mounted from elsewhere.
    File,
}

/// The address of a replica. It never holds credentials: those come from the environment, as the tools of each provider
/// read them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ReplicaUrl {
    text: String,
    scheme: Scheme,
    /// Bytes of the text before the place, and before the path.
    place: usize,
    path: usize,
}

impl ReplicaUrl {
    /// The whole address.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// What speaks there.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The bucket or container; empty for a folder.
    #[must_use]
    pub fn bucket(&self) -> &str {
        self.text.get(self.place..self.path).unwrap_or_default()
    }

    /// What comes behind the bucket, without slashes around; the absolute path of a folder.
    #[must_use]
    pub fn path(&self) -> &str {
        let path = self.text.get(self.path..).unwrap_or_default().trim_end_matches('/');
        if self.scheme == Scheme::File { path } else { path.trim_start_matches('/') }
    }

    /// Whether the text may hold what must not be shown: a password before an @, a token behind a question mark.
    pub(super) fn may_be_secret(text: &str) -> bool {
        text.contains(['@', '?', '#'])
    }
}

impl fmt::Display for ReplicaUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.text)
    }
}

impl FromStr for ReplicaUrl {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<ReplicaUrl, Malformed> {
        let (scheme, rest) = text.split_once("://").ok_or(Malformed)?;
        let scheme = match scheme {
            "s3" => Scheme::S3,
            "gs" => Scheme::Gs,
            "az" => Scheme::Az,
            "file" => Scheme::File,
            _ => return Err(Malformed),
        };
        let place = text.len() - rest.len();
        let bucket = rest.split('/').next().unwrap_or_default();
        let path = rest.get(bucket.len()..).unwrap_or_default();
        let in_bucket = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let fits = match scheme {
            Scheme::File => bucket.is_empty() && path.trim_end_matches('/').len() > 1,
            _ => bucket.starts_with(|c: char| c.is_ascii_alphanumeric()) && bucket.chars().all(in_bucket),
        };
        let segments = path.trim_matches('/').split('/');
        // A path of several readings (two slashes, dots) would be two places for two programs.
        let is_plain = |segment: &str| !matches!(segment, "" | "." | "..");
        let plain = path.trim_matches('/').is_empty() || segments.clone().all(is_plain);
        let strange = |c: char| c.is_whitespace() || c.is_control() || matches!(c, '@' | '?' | '#' | '\\' | '\u{fffd}');
        if !fits || !plain || rest.contains(strange) {
            return Err(Malformed);
        }
        Ok(ReplicaUrl { text: text.to_owned(), scheme, place, path: place + bucket.len() })
    }
}

impl TryFrom<String> for ReplicaUrl {
    type Error = Malformed;

    fn try_from(text: String) -> Result<ReplicaUrl, Malformed> {
        text.parse()
    }
}

impl From<ReplicaUrl> for String {
    fn from(url: ReplicaUrl) -> String {
        url.text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compressions_have_one_text_each_and_levels_a_range() {
        for (text, compression, written) in [
            ("auto", Compression::Auto, "auto"),
            ("none", Compression::None, "none"),
            ("lz4", Compression::Lz4, "lz4"),
            ("zstd", Compression::Zstd(3), "zstd:3"),
            ("zstd:-7", Compression::Zstd(-7), "zstd:-7"),
            ("zstd:0", Compression::Zstd(0), "zstd:0"),
            ("zstd:19", Compression::Zstd(19), "zstd:19"),
        ] {
            assert_eq!((text.parse(), compression.to_string().as_str()), (Ok(compression), written));
            assert_eq!(written.parse(), Ok(compression));
        }
        for text in ["", "ZSTD", "zstd:", "zstd:20", "zstd:-8", "zstd:+3", "zstd:3.0", "zstd: 3", "lz4:1", "gzip", ":3"]
        {
            assert_eq!(text.parse::<Compression>(), Err(Malformed), "{text}");
        }
    }

    #[test]
    fn threads_leave_the_job_most_processors() {
        for (processors, threads) in [(1, 1), (2, 2), (4, 2), (8, 2), (12, 3), (16, 4), (32, 8), (256, 8)] {
            assert_eq!(Threads::Auto.among(processors), threads, "{processors}");
        }
        assert_eq!(Threads::Count(64).among(16), 64, "who sets it means it");
    }

    #[test]
    fn addresses_come_apart() {
        for (text, scheme, bucket, path) in [
            ("s3://b", Scheme::S3, "b", ""),
            ("s3://my-bucket.eu/a/b/", Scheme::S3, "my-bucket.eu", "a/b"),
            ("gs://b/x", Scheme::Gs, "b", "x"),
            ("az://c/", Scheme::Az, "c", ""),
            ("file:///mnt/backup/", Scheme::File, "", "/mnt/backup"),
        ] {
            let url: ReplicaUrl = text.parse().unwrap();
            assert_eq!((url.scheme(), url.bucket(), url.path()), (scheme, bucket, path), "{text}");
            assert_eq!((url.as_str(), String::from(url.clone()).as_str()), (text, text));
        }
    }

    #[test]
    fn an_address_is_plain_and_holds_no_credentials() {
        for text in [
            "",
            "s3",
            "s3:bucket",
            "s3://",
            "s3:///x",
            "S3://b",
            "http://b/x",
            "s3://user:word@b/x",
            "s3://user@b",
            "s3://b:9000/x",
            "s3://b/x?token=1",
            "s3://b/x#y",
            "s3://b/a//b",
            "s3://b/../c",
            "s3://b/a b",
            "s3://-b",
            "file://host/x",
            "file://",
            "file:///",
            "file:///a/../b",
            "file://a",
        ] {
            assert_eq!(text.parse::<ReplicaUrl>(), Err(Malformed), "{text}");
        }
    }
}

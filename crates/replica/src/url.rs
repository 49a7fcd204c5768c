//! The address of a replica.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use rekindle_base::units::Malformed;

/// The protocol of a replica.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scheme {
    /// `s3://BUCKET/PATH`: any S3-compatible service.
    S3,
    /// `gs://BUCKET/PATH`: Google Cloud Storage.
    Gs,
    /// `az://CONTAINER/PATH`: Azure Blob Storage.
    Az,
    /// `file:///PATH`: a folder, for example a mounted one.
    File,
}

/// The address of a replica. It never contains credentials: those come from the environment, as with the tools of each
/// provider.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ReplicaUrl {
    text: String,
    scheme: Scheme,
    /// Length of the text before the bucket, and before the path.
    place: usize,
    path: usize,
}

impl ReplicaUrl {
    /// The complete address.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The protocol.
    #[must_use]
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The bucket or container; empty for a folder.
    #[must_use]
    pub fn bucket(&self) -> &str {
        self.text.get(self.place..self.path).unwrap_or_default()
    }

    /// The part after the bucket, without surrounding slashes; the absolute path of a folder.
    #[must_use]
    pub fn path(&self) -> &str {
        let path = self.text.get(self.path..).unwrap_or_default().trim_end_matches('/');
        if self.scheme == Scheme::File { path } else { path.trim_start_matches('/') }
    }

    /// The folder, if it is one (`file://`).
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        (self.scheme == Scheme::File).then(|| Path::new(self.path()))
    }

    /// Whether the text may contain something secret: a password before an @, a token after a question mark.
    #[must_use]
    pub fn may_be_secret(text: &str) -> bool {
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
        // A path with several interpretations (two slashes, dots) could be two places for two programs.
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

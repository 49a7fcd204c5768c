//! Fields of a manifest: the content of files.

use std::collections::BTreeMap;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::paths::JobPath;

/// Identifies the state of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// `st_ino`.
    pub inode: u64,
    /// Size in bytes.
    pub size: u64,
    /// `st_mtim`, in nanoseconds since 1970.
    pub modified_ns: i64,
    /// `st_ctim`, in nanoseconds since 1970.
    pub changed_ns: i64,
}

impl Stamp {
    /// The stamp of a file with this metadata.
    #[must_use]
    pub fn of(metadata: &Metadata) -> Stamp {
        let nanoseconds = |seconds: i64, rest: i64| seconds.saturating_mul(1_000_000_000).saturating_add(rest);
        Stamp {
            inode: metadata.ino(),
            size: metadata.size(),
            modified_ns: nanoseconds(metadata.mtime(), metadata.mtime_nsec()),
            changed_ns: nanoseconds(metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Whether the content may have changed. A new name, mode or owner changes `changed_ns` too, so that alone does not
    /// count; programs that set the modification time are rare where files are written in place.
    #[must_use]
    pub fn differs(&self, other: &Stamp) -> bool {
        (self.inode, self.size, self.modified_ns) != (other.inode, other.size, other.modified_ns)
    }
}

/// The owner of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// `st_uid`.
    pub uid: u32,
    /// `st_gid`.
    pub gid: u32,
}

/// Extended attributes of a file or folder. A restore gives them to a new one in its place. Others, such as
/// `security.capability`, cannot be expressed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Attributes {
    /// Its access control list: the value of `system.posix_acl_access`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acl: Option<Bytes>,
    /// The list that new files in a folder get: the value of `system.posix_acl_default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_acl: Option<Bytes>,
    /// Those of programs, by their names without `user.`. One whose name is not UTF-8 is not saved.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub user: BTreeMap<String, Bytes>,
}

impl Attributes {
    /// Those of a file that has none.
    pub const NONE: Attributes = Attributes { acl: None, default_acl: None, user: BTreeMap::new() };
}

/// Bytes; in JSON hexadecimal text, in lower case.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Bytes(pub Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut text = String::with_capacity(self.0.len() * 2);
        for byte in &self.0 {
            for digit in [byte >> 4, byte & 15] {
                text.extend(char::from_digit(digit.into(), 16));
            }
        }
        serializer.serialize_str(&text)
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bytes, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digit = |digit: u8| match digit {
            b'0'..=b'9' => Some(digit - b'0'),
            b'a'..=b'f' => Some(digit - b'a' + 10),
            _ => None,
        };
        let byte = |pair: &[u8]| match pair {
            [high, low] => Some(digit(*high)? << 4 | digit(*low)?),
            _ => None,
        };
        let bytes: Option<Vec<u8>> = text.as_bytes().chunks(2).map(byte).collect();
        bytes.map(Bytes).ok_or_else(|| de::Error::custom("it is no hexadecimal text in lower case"))
    }
}

/// A folder whose files are all in the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackedFolder {
    /// Its path as the job sees it.
    pub path: JobPath,
    /// Everything below it, each folder before its content. Its files are in `open_files` too.
    pub entries: Vec<TrackedEntry>,
}

/// An entry below a tracked folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrackedEntry {
    /// Its path as the job sees it.
    pub path: JobPath,
    /// The kind of entry.
    #[serde(flatten)]
    pub kind: TrackedKind,
}

/// The kind of an entry in a tracked folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum TrackedKind {
    /// A regular file.
    File,
    /// A folder.
    Folder {
        /// `st_mode`.
        mode: u32,
        /// Its owner.
        owner: Owner,
        /// The number of its extended attributes in [`Manifest::attributes`](super::Manifest::attributes), if it has any.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        attributes: Option<u32>,
    },
    /// A symbolic link.
    Link {
        /// Its target; a target that is not UTF-8 is not saved, and such a link is not changed.
        target: String,
        /// Its owner. `None` in an image of an earlier version.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<Owner>,
    },
    /// A FIFO, a socket or a device, or with `job.user` a link of somebody else: it is not changed.
    Other,
}

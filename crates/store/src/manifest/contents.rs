//! Fields of a manifest: the content of files.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

use crate::paths::JobPath;

/// Identifies the state of a file without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stamp {
    /// `st_ino`.
    pub(crate) inode: u64,
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
    },
    /// A symbolic link.
    Link {
        /// Its target; a target that is not UTF-8 is not saved, and such a link is not changed.
        target: String,
    },
    /// A FIFO, a socket or a device: it is not changed.
    Other,
}

//! `tags.json` in the folder of an image, in the store: the user's names for it, and a pin that no retention removes.
//!
//! - A pin keeps an image; a tag is a name and keeps nothing.
//! - A file that exists and cannot be read counts as a pin: somebody may have set one. A change is then refused.
//! - It is written by whoever may write the folder, without the lock of the one writer, which a supervisor has for
//!   weeks. This is safe because the file is small, is replaced as a whole, and is read again when it matters: the
//!   removal of an image first renames it, after which nobody can set a pin, then reads this file, and renames the
//!   image back if there is a pin (remove.rs). So a pin that was set is either seen or refused.
//! - After a power cut there is the old or the new file, and perhaps a `.tmp-` file, which the next start removes.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::error::{Error, Result};
use super::id::ImageId;
use super::image::{Image, Place};
use super::select;
use rekindle_os::durable;

pub(super) const FILE_NAME: &str = "tags.json";
const VERSION: u32 = 1;
/// Maximum size; [`Tags::MOST`] tags have some 5 KiB.
const MAX_BYTES: u64 = 64 << 10;

/// A name for an image: 1 to 64 of A-Z a-z 0-9 . _ -, and nothing that selects an image in another way.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tag(String);

/// A text that is not a valid tag.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{0}\" is not a tag: a tag has 1 to 64 characters of A-Z a-z 0-9 . _ -, does not start with -, and is not a number, an image id or \"latest\""
)]
pub struct NoTag(String);

impl Tag {
    /// Maximum length in bytes.
    pub const MAX: usize = 64;

    /// The tag as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tag {
    type Err = NoTag;

    fn from_str(text: &str) -> Result<Tag, NoTag> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        let fits = (1..=Tag::MAX).contains(&text.len()) && text.bytes().all(allowed) && !text.starts_with('-');
        let taken =
            text == select::LATEST || text.bytes().all(|b| b.is_ascii_digit()) || text.parse::<ImageId>().is_ok();
        if fits && !taken { Ok(Tag(text.to_owned())) } else { Err(NoTag(text.to_owned())) }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for Tag {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for Tag {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Tag, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

/// The user's tags of an image, and its pin.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Tags {
    pinned: bool,
    tags: BTreeSet<Tag>,
    unreadable: Option<String>,
}

/// A change of [`Tags`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Pin: retention does not remove the image.
    Pin,
    /// Unpin: retention may remove the image.
    Unpin,
    /// Add these tags.
    Tag(Vec<Tag>),
    /// Remove these tags.
    Untag(Vec<Tag>),
}

impl Tags {
    /// Maximum number of tags of an image.
    pub const MOST: usize = 64;

    /// Whether retention must keep the image, which is also so if the file cannot be read.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned || self.unreadable.is_some()
    }

    /// Why the file cannot be read, if it cannot.
    #[must_use]
    pub fn unreadable(&self) -> Option<&str> {
        self.unreadable.as_deref()
    }

    /// The tags, sorted.
    pub fn iter(&self) -> impl Iterator<Item = &Tag> {
        self.tags.iter()
    }

    /// Whether the image has this tag.
    #[must_use]
    pub fn has(&self, tag: &Tag) -> bool {
        self.tags.contains(tag)
    }

    fn with(mut self, change: Change) -> Tags {
        match change {
            Change::Pin => self.pinned = true,
            Change::Unpin => self.pinned = false,
            Change::Tag(tags) => self.tags.extend(tags),
            Change::Untag(tags) => self.tags.retain(|tag| !tags.contains(tag)),
        }
        self
    }
}

/// "pinned, best, epoch-3"; empty without any.
impl fmt::Display for Tags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pin = match &self.unreadable {
            Some(why) => Some(format!("pinned ({FILE_NAME} cannot be read: {why})")),
            None => self.pinned.then(|| "pinned".to_owned()),
        };
        let words: Vec<String> = pin.into_iter().chain(self.tags.iter().map(Tag::to_string)).collect();
        f.pad(&words.join(", "))
    }
}

#[derive(Serialize, Deserialize)]
struct OnDisk {
    version: u32,
    pinned: bool,
    tags: BTreeSet<Tag>,
}

/// The tags of the image in `dir`.
pub(super) fn read(dir: &Path) -> Tags {
    let illegible = |why: String| Tags { unreadable: Some(why), ..Tags::default() };
    let file = match durable::open_for_reading(&dir.join(FILE_NAME)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Tags::default(),
        Err(error) => return illegible(error.to_string()),
    };
    let mut bytes = Vec::new();
    if let Err(error) = file.take(MAX_BYTES).read_to_end(&mut bytes) {
        return illegible(error.to_string());
    }
    match serde_json::from_slice::<OnDisk>(&bytes) {
        Ok(OnDisk { version: VERSION, pinned, tags }) => Tags { pinned, tags, unreadable: None },
        Ok(OnDisk { version, .. }) => illegible(format!("it has version {version}")),
        Err(error) => illegible(error.to_string()),
    }
}

impl Image {
    /// Its tags and pin, read from the disk. An image in memory has none, because its folder is reused.
    #[must_use]
    pub fn tags(&self) -> Tags {
        match self.place {
            Place::Stored => read(&self.dir),
            Place::Staged | Place::Slot => Tags::default(),
        }
    }

    /// Changes its tags or pin, durably, and returns the result. Needs no lock, see above.
    ///
    /// # Errors
    /// [`Error::NotStored`] for an image in memory, [`Error::UnreadableTags`], [`Error::TooManyTags`], [`Error::Write`],
    /// [`Error::RemovedMeanwhile`].
    pub fn change_tags(&self, change: Change) -> Result<Tags> {
        if self.is_staged() {
            return Err(Error::NotStored(self.id));
        }
        let path = self.dir.join(FILE_NAME);
        // Of two concurrent changes, the second one reads the result of the first. Best effort: NFS cannot lock a
        // folder.
        let folder = File::open(&self.dir).and_then(|folder| folder.lock().map(|()| folder));
        let found = read(&self.dir);
        if let Some(why) = found.unreadable {
            return Err(Error::UnreadableTags { path, why });
        }
        let tags = found.with(change);
        if tags.tags.len() > Tags::MOST {
            return Err(Error::TooManyTags(self.id));
        }
        let on_disk = OnDisk { version: VERSION, pinned: tags.pinned, tags: tags.tags.clone() };
        let failed = |source: io::Error| match fs::symlink_metadata(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Error::RemovedMeanwhile(self.id),
            _ => Error::Write { path: path.clone(), source },
        };
        let bytes = serde_json::to_vec_pretty(&on_disk).map_err(io::Error::from).map_err(failed)?;
        durable::write_file(&path, &bytes, 0o600).map_err(failed)?;
        drop(folder);
        match fs::symlink_metadata(&path) {
            Ok(_) => Ok(tags),
            // A concurrent removal will check again for a pin.
            Err(_) => Err(Error::RemovedMeanwhile(self.id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(text: &str) -> Tag {
        text.parse().unwrap()
    }

    #[test]
    fn what_is_a_tag() {
        for good in ["a", "best", "epoch-3", "v1.2_x", ".a", "000042-x", "1e9", &"t".repeat(64)] {
            assert_eq!(good.parse::<Tag>().unwrap().as_str(), good);
        }
        for bad in
            ["", "-a", "latest", "42", "000042", "000042-20261120T132105Z", "a b", "a/b", "ä", "a\0", &"t".repeat(65)]
        {
            assert_eq!(bad.parse::<Tag>(), Err(NoTag(bad.to_owned())));
        }
    }

    #[test]
    fn changes_add_up() {
        let tags = Tags::default().with(Change::Tag(vec![tag("b"), tag("a")])).with(Change::Pin);
        assert_eq!((tags.is_pinned(), tags.to_string().as_str()), (true, "pinned, a, b"));
        let tags = tags.with(Change::Untag(vec![tag("b"), tag("x")])).with(Change::Unpin);
        assert_eq!((tags.is_pinned(), tags.to_string().as_str()), (false, "a"));
        assert!(tags.has(&tag("a")) && !tags.has(&tag("b")));
    }
}

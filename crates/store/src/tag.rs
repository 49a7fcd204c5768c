//! The user's names for an image, and its pin, as data. [`super::tags`] reads and writes them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::id::ImageId;
use super::names::TAGS;

/// The text that selects the newest good image; no tag.
pub const LATEST: &str = "latest";

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
    pub(crate) const MAX: usize = 64;

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
        let taken = text == LATEST || text.bytes().all(|b| b.is_ascii_digit()) || text.parse::<ImageId>().is_ok();
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
    pub(super) pinned: bool,
    pub(super) tags: BTreeSet<Tag>,
    pub(super) unreadable: Option<String>,
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
    pub(crate) const MOST: usize = 64;

    /// Whether retention must keep the image, which is also so if the file cannot be read.
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.pinned || self.unreadable.is_some()
    }

    /// Why the file cannot be read, if it cannot.
    #[must_use]
    pub(crate) fn unreadable(&self) -> Option<&str> {
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

    pub(super) fn with(mut self, change: Change) -> Tags {
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
            Some(why) => Some(format!("pinned ({TAGS} cannot be read: {why})")),
            None => self.pinned.then(|| "pinned".to_owned()),
        };
        let words: Vec<String> = pin.into_iter().chain(self.tags.iter().map(Tag::to_string)).collect();
        f.pad(&words.join(", "))
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

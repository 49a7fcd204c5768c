//! The layout of a replica, and the meaning of its listing.
//!
//! ```text
//! PATH/JOB/
//!   job.json                          how the last run ended
//!   newest.json                       which image was sent last: a listing may not show it yet
//!   packs/NAME.pack  packs/NAME.idx   as in the store
//!   packs/NAME.gone                   no image needed the pack when this was written
//!   images/ID/manifest.json           written last, removed first: without it there is no image
//!   images/ID/chunks                  which chunks it is made of
//!   images/ID/bad.json                if restarts must skip it
//! ```
//!
//! Other names are left alone.
//!
//! A listing may lag behind what was written and removed, in object stores that promise no more, and behind caches. So
//! it only says where to look: before something is removed, or counted as good, the objects are looked up by their
//! names.

use std::collections::BTreeMap;

use chrono::{DateTime, Utc};

use crate::client::Object;
use rekindle_store::ImageId;
use rekindle_store::pack::PackName;

pub(super) const RECORD: &str = "job.json";
pub(super) const NEWEST: &str = "newest.json";

/// The kind of file of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Of {
    Manifest,
    Chunks,
    Mark,
}

impl Of {
    fn file(self) -> &'static str {
        match self {
            Of::Manifest => rekindle_store::manifest::FILE_NAME,
            Of::Chunks => rekindle_store::chunk::map::FILE_NAME,
            Of::Mark => rekindle_store::mark::FILE_NAME,
        }
    }
}

/// The name of a file of an image.
pub(super) fn of_image(id: ImageId, file: Of) -> String {
    format!("images/{id}/{}", file.file())
}

/// The kind of file of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PackFile {
    Pack,
    Index,
    Gone,
}

/// The name of a file of a pack.
pub(super) fn of_pack(name: PackName, file: PackFile) -> String {
    match file {
        PackFile::Pack => format!("packs/{name}.pack"),
        PackFile::Index => format!("packs/{name}.idx"),
        PackFile::Gone => format!("packs/{name}.gone"),
    }
}

/// An object, without its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) size: u64,
    pub(super) modified: DateTime<Utc>,
}

impl From<Object> for Found {
    fn from(object: Object) -> Found {
        Found { size: object.size, modified: object.modified }
    }
}

/// The objects of a pack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RemotePack {
    pub(super) pack: Option<Found>,
    pub(super) index: Option<Found>,
    /// The mark of a pack that no image needs.
    pub(super) gone: Option<Found>,
}

impl RemotePack {
    /// Whether pack and index exist.
    pub(super) fn is_whole(&self) -> bool {
        self.pack.is_some() && self.index.is_some()
    }

    /// When the newer of the two was written.
    pub(super) fn modified(&self) -> Option<DateTime<Utc>> {
        self.pack.iter().chain(&self.index).map(|found| found.modified).max()
    }
}

/// The objects of an image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct RemoteFiles {
    pub(super) manifest: Option<Found>,
    pub(super) chunks: Option<Found>,
    pub(super) mark: Option<Found>,
}

/// All objects of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Inventory {
    pub(super) packs: BTreeMap<PackName, RemotePack>,
    pub(super) images: BTreeMap<ImageId, RemoteFiles>,
    /// When the newest object was written, by the clock of the replica.
    pub(super) newest: Option<DateTime<Utc>>,
}

impl Inventory {
    pub(super) fn of(objects: Vec<Object>) -> Inventory {
        let mut all = Inventory::default();
        for Object { name, size, modified } in objects {
            let found = Some(Found { size, modified });
            all.newest = all.newest.max(Some(modified));
            let mut parts = name.split('/');
            match (parts.next(), parts.next(), parts.next(), parts.next()) {
                (Some("packs"), Some(file), None, _) => {
                    let Some((Ok(name), suffix)) = file.split_once('.').map(|(name, suffix)| (name.parse(), suffix))
                    else {
                        continue;
                    };
                    match suffix {
                        "pack" => all.packs.entry(name).or_default().pack = found,
                        "idx" => all.packs.entry(name).or_default().index = found,
                        "gone" => all.packs.entry(name).or_default().gone = found,
                        _ => {}
                    }
                }
                (Some("images"), Some(id), Some(file), None) => {
                    let Ok(id) = id.parse::<ImageId>() else { continue };
                    let files = all.images.entry(id).or_default();
                    match file {
                        _ if file == Of::Manifest.file() => files.manifest = found,
                        _ if file == Of::Chunks.file() => files.chunks = found,
                        _ if file == Of::Mark.file() => files.mark = found,
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        all
    }

    /// The images with a manifest, newest first.
    pub(super) fn published(&self) -> impl Iterator<Item = ImageId> {
        self.images.iter().rev().filter(|(_, files)| files.manifest.is_some()).map(|(id, _)| *id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_sorted_into_packs_and_images_and_strange_names_are_left_alone() {
        let pack = "0123456789abcdef0123456789abcdef";
        let id: ImageId = "000042-20261120T132105Z".parse().unwrap();
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        let names = [
            format!("packs/{pack}.pack"),
            format!("packs/{pack}.idx"),
            format!("packs/{pack}.gone"),
            "packs/..pack".into(),
            format!("packs/{}.pack", pack.to_uppercase()),
            format!("packs/{pack}.pack/x"),
            of_image(id, Of::Manifest),
            of_image(id, Of::Chunks),
            format!("images/{id}/other"),
            format!("images/{id}/manifest.json/x"),
            "images/x/manifest.json".into(),
            "job.json".into(),
        ];
        let objects = names.into_iter().zip(1_u32..);
        let objects = objects.map(|(name, n)| Object { name, size: n.into(), modified: at(n.into()) }).collect();
        let all = Inventory::of(objects);
        assert_eq!(all.packs.len(), 1);
        let found = |n: u32| Some(Found { size: n.into(), modified: at(n.into()) });
        assert_eq!(all.packs[&pack.parse().unwrap()], RemotePack { pack: found(1), index: found(2), gone: found(3) });
        assert_eq!(all.images.len(), 1);
        assert_eq!(all.images[&id], RemoteFiles { manifest: found(7), chunks: found(8), mark: None });
        assert_eq!(all.newest, Some(at(12)));
        assert_eq!(all.published().count(), 1);
    }
}

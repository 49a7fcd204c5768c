//! Which images have lost content.

use std::collections::BTreeSet;
use std::io;

use chrono::Utc;

use super::{AffectedImage, Error, Hold, Loss};
use crate::chunk::ChunkId;
use crate::chunk::map::Extent;
use crate::format::ReadError;
use crate::image::{DamageKind, Form, Image, State};
use crate::mark::{BadMark, BadWhy};
use crate::pack::set::{Index, PackInfo};
use crate::pack::{PackIndex, PackName};
use crate::verify::Finding;
use rekindle_base::chain;

/// The known content of the packs.
#[derive(Debug, Default)]
pub(super) struct Known {
    /// Intact content.
    pub(super) index: Index,
    /// Content that packs should have, but that could not be checked.
    perhaps: Index,
    /// Number of such packs without even an index.
    dark: usize,
    /// Chunks with a damaged or unreadable record.
    pub(super) harmed: BTreeSet<ChunkId>,
    /// Chunks that are not intact here, and that the replica could not be asked for.
    pub(super) not_asked: Option<NotAsked>,
}

/// Content that may be in the replica.
#[derive(Debug)]
pub(super) struct NotAsked {
    pub(super) chunks: BTreeSet<ChunkId>,
    /// Why the replica could not be asked.
    pub(super) why: String,
}

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Here,
    /// Perhaps in a pack that could not be checked.
    PerhapsHere,
    /// Perhaps in the replica.
    PerhapsThere,
    Nowhere,
}

impl Known {
    /// Records a pack that could not be checked, with its index.
    pub(super) fn not_known(&mut self, name: PackName, index: Option<PackIndex>) {
        match index {
            Some(index) => {
                self.perhaps.add(PackInfo { name, pack_len: index.pack_len(), key: None, gone: false }, &index);
            }
            None => self.dark += 1,
        }
    }

    pub(super) fn sorted(mut self) -> Known {
        self.index.sort();
        self.perhaps.sort();
        self
    }

    fn find(&self, id: &ChunkId) -> Where {
        if self.index.get(id).is_some() {
            Where::Here
        } else if self.dark > 0 || self.perhaps.get(id).is_some() {
            Where::PerhapsHere
        } else if self.not_asked.as_ref().is_some_and(|it| it.chunks.contains(id)) {
            Where::PerhapsThere
        } else {
            Where::Nowhere
        }
    }
}

/// Checks the images, and marks those that have lost content.
pub(super) fn look(images: &[Image], known: &Known, hold: &Hold<'_>) -> Result<Vec<AffectedImage>, Error> {
    let mut all = Vec::new();
    for image in images {
        hold.keep()?;
        let Some((loss, what)) = lost_of(image, known) else { continue };
        // The supervisor has removed it meanwhile, and perhaps its packs.
        if !image.dir.is_there() {
            continue;
        }
        if loss == Loss::Certain && image.is_good() && hold.may_write()? {
            let mark = BadMark { why: BadWhy::Damaged, detail: what.clone(), when: Utc::now() };
            image.clone().mark_bad(mark)?;
        }
        all.push(AffectedImage { image: image.id, loss, what });
    }
    Ok(all)
}

/// The lost content of an image; `None` if it is complete.
fn lost_of(image: &Image, known: &Known) -> Option<(Loss, String)> {
    match &image.state {
        State::Damaged { why } if why.kind == DamageKind::Broken => Some((Loss::Certain, why.to_string())),
        State::Damaged { why } => Some((Loss::NotKnown, why.to_string())),
        State::Good(_) | State::Bad { .. } if image.form() == Form::Loose => of_files(image),
        State::Good(_) | State::Bad { .. } => of_chunks(image, known),
    }
}

fn of_files(image: &Image) -> Option<(Loss, String)> {
    let report = image.verify();
    let problems = || report.problems().filter(|part| part.finding != Finding::Extra);
    let is_certain = |finding: &Finding| !matches!(finding, Finding::Unreadable { .. });
    let certain = report.manifest.is_some() || problems().any(|part| is_certain(&part.finding));
    let what: Vec<String> = problems().take(SHOWN).map(ToString::to_string).collect();
    let what = report.manifest.map(|damage| damage.to_string()).into_iter().chain(what).collect::<Vec<_>>().join(", ");
    (!what.is_empty()).then_some((if certain { Loss::Certain } else { Loss::NotKnown }, what))
}

/// Number of parts in a message.
const SHOWN: usize = 5;

fn of_chunks(image: &Image, known: &Known) -> Option<(Loss, String)> {
    let map = match image.chunk_map() {
        Ok(map) => map?,
        Err(error) => {
            let loss = match &error {
                ReadError::Format { source, .. } if !source.is_not_for_us() => Loss::Certain,
                ReadError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => Loss::Certain,
                _ => Loss::NotKnown,
            };
            return Some((loss, chain(&error)));
        }
    };
    let manifest = image.manifest()?;
    let (mut missing, mut parts) = (Missing::default(), Vec::new());
    for (part, extents) in manifest.parts.iter().zip(&map.parts) {
        let before = missing;
        for extent in extents {
            let Extent::Chunk { id, len } = extent else { continue };
            missing.add(known.find(id), u64::from(*len));
        }
        if before != missing && parts.len() < SHOWN {
            parts.push(part.path.as_str());
        }
    }
    let why = known.not_asked.as_ref().map_or("", |it| it.why.as_str());
    missing.in_words(&parts.join(", "), why)
}

/// Bytes of an image that no checked pack has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Missing {
    lost: u64,
    perhaps_here: u64,
    perhaps_there: u64,
}

impl Missing {
    fn add(&mut self, at: Where, bytes: u64) {
        match at {
            Where::Here => {}
            Where::PerhapsHere => self.perhaps_here += bytes,
            Where::PerhapsThere => self.perhaps_there += bytes,
            Where::Nowhere => self.lost += bytes,
        }
    }

    /// `why` the replica could not be asked.
    fn in_words(self, parts: &str, why: &str) -> Option<(Loss, String)> {
        let size = bytesize::ByteSize::b;
        let here = |bytes| format!("{} are in packs that cannot be read, in {parts}", size(bytes));
        let there = |bytes| {
            format!("{} are not intact here, in {parts}, and the replica could not be asked: {why}", size(bytes))
        };
        match (self.lost, self.perhaps_here, self.perhaps_there) {
            (0, 0, 0) => None,
            (0, bytes, 0) => Some((Loss::NotKnown, here(bytes))),
            (0, _, bytes) => Some((Loss::NotKnown, there(bytes))),
            (lost, _, _) => Some((Loss::Certain, format!("{} are lost, in {parts}", size(lost)))),
        }
    }
}

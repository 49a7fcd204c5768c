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

    fn may_have(&self, id: &ChunkId) -> bool {
        self.dark > 0 || self.perhaps.get(id).is_some()
    }
}

/// Checks the images, and marks those that have lost content.
pub(super) fn look(images: &[Image], known: &Known, hold: &Hold<'_>) -> Result<Vec<AffectedImage>, Error> {
    let mut all = Vec::new();
    for image in images {
        hold.keep()?;
        let Some((loss, what)) = lost_of(image, known) else { continue };
        // The supervisor has removed it meanwhile, and perhaps its packs.
        if !image.dir.exists() {
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
    let (mut lost, mut perhaps, mut parts) = (0_u64, 0_u64, Vec::new());
    for (part, extents) in manifest.parts.iter().zip(&map.parts) {
        let before = (lost, perhaps);
        for extent in extents {
            let Extent::Chunk { id, len } = extent else { continue };
            match (known.index.get(id), known.may_have(id)) {
                (Some(_), _) => {}
                (None, false) => lost += u64::from(*len),
                (None, true) => perhaps += u64::from(*len),
            }
        }
        if before != (lost, perhaps) && parts.len() < SHOWN {
            parts.push(part.path.as_str());
        }
    }
    let size = bytesize::ByteSize::b;
    let parts = parts.join(", ");
    match (lost, perhaps) {
        (0, 0) => None,
        (0, perhaps) => {
            Some((Loss::NotKnown, format!("{} are in packs that cannot be read, in {parts}", size(perhaps))))
        }
        (lost, _) => Some((Loss::Certain, format!("{} are lost, in {parts}", size(lost)))),
    }
}

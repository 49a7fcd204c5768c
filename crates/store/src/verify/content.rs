//! Reads the content of packs: everything that an image needs, or all records of some packs.

use std::collections::BTreeSet;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

use super::packed::{self, Wrong};
use super::{PartReport, Report};
use crate::chunk::{ChunkId, Key};
use crate::folder::JobFolder;
use crate::image::{Form, Image};
use crate::pack::set::Lost;
use crate::pack::{Entry, Location, PackName, Packs, Problem, ReadChunkError, Reading, Visit, Want};
use crate::persist::Progress;
use crate::unpack::Place;
use rekindle_base::chain;
use rekindle_os::direct::Way;

/// The percentage of packs whose content is read. They are chosen at random, so that reading a few every day covers
/// all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share(u8);

impl Share {
    /// All packs.
    pub const ALL: Share = Share(100);
    /// No packs: only the structure is checked.
    pub const NONE: Share = Share(0);

    /// A percentage from 0 to 100; `None` for more.
    #[must_use]
    pub fn percent(percent: u8) -> Option<Share> {
        (percent <= 100).then_some(Share(percent))
    }

    /// This share of `count`, rounded up.
    fn of(self, count: usize) -> usize {
        (count * usize::from(self.0)).div_ceil(100)
    }
}

/// What [`check_packs`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PacksReport {
    /// The packs of the job.
    pub packs: usize,
    /// Packs whose content was read.
    pub read: usize,
    /// Chunks that were read.
    pub chunks: u64,
    /// Raw bytes of those.
    pub bytes: u64,
    /// Packs with problems, by name.
    pub problems: Vec<PackReport>,
}

impl PacksReport {
    /// Whether no problem was found.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }
}

/// The problems of a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackReport {
    /// Its file.
    pub path: std::path::PathBuf,
    /// Number of damaged chunks, as far as it was read.
    pub chunks: u64,
    /// Number of chunks that the disk cannot read.
    pub unreadable: u64,
    /// Number of these chunks with an intact copy in another pack that was read.
    pub elsewhere: u64,
    /// The problem of the pack, or of the first such chunk.
    pub why: String,
}

/// Checks the packs of a job, whichever image needs them: that each exists, has the length in its index, and has a
/// valid header; and reads every record of a share of them.
///
/// # Errors
/// If the packs cannot be listed, or it is cancelled. Damage is part of the result.
pub fn check_packs(
    folder: &JobFolder,
    key: Option<&Key>,
    share: Share,
    threads: usize,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<PacksReport, ReadChunkError> {
    let packs = folder.packs();
    let index = packs.index()?;
    let mut chosen: Vec<PackName> = index.packs().iter().map(|info| info.name).collect();
    let unusable = index.problems().iter().filter(|problem| matches!(problem.lost, Lost::All(_))).count();
    let all = chosen.len();
    let chance = RandomState::new();
    chosen.sort_by_cached_key(|name| chance.hash_one(name));
    chosen.truncate(share.of(all));
    let found: Vec<PackReport> = index
        .problems()
        .iter()
        .map(|Problem { pack, index, lost }| {
            let index = index.as_ref().map(|error| chain(error));
            let lost = match lost {
                Lost::Nothing => None,
                Lost::From { offset, why, .. } => Some(format!("nothing can be read from byte {offset} on: {why}")),
                Lost::All(error) => Some(chain(error)),
            };
            // If the problem is the pack itself, its index could not be used for the same reason.
            let index = index.filter(|index| lost.as_ref() != Some(index));
            let index = index.map(|index| format!("its index cannot be used: {index}"));
            let why = index.into_iter().chain(lost).collect::<Vec<_>>().join("; ");
            PackReport { path: packs.pack_path(*pack).path().to_owned(), chunks: 0, unreadable: 0, elsewhere: 0, why }
        })
        .collect();
    let mut wants = Vec::new();
    for name in &chosen {
        // Problems of a pack are reported above.
        let Ok(pack) = packs.pack_index(*name) else { continue };
        let want = |entry: &Entry| Want { id: entry.id, location: Location::of(*name, entry), target: () };
        wants.extend(pack.entries().iter().map(want));
    }
    progress.begin(wants.iter().map(|want| u64::from(want.location.raw_len)).sum());
    let (found, bad) = (Mutex::new(found), Mutex::default());
    let looking = Looking { progress, chunks: AtomicU64::new(0), found, bad, packs: &packs };
    let reading = Reading { packs: &packs, key, threads, way: Way::Direct, cancelled };
    reading.read_as_told(&index, wants, &looking)?;
    let mut problems = looking.found.into_inner().unwrap_or_else(PoisonError::into_inner);
    let bad = looking.bad.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (pack, id) in &bad {
        let is_whole = |at: Location| chosen.contains(&at.pack) && !bad.contains(&(at.pack, *id));
        let path = packs.pack_path(*pack).path().to_owned();
        if index.all(id).any(is_whole)
            && let Some(report) = problems.iter_mut().find(|report| report.path == path)
        {
            report.elsewhere += 1;
        }
    }
    // A pack that was removed in the meantime, with its index first, is no problem.
    let is_there = |path: &Path| path.file_name().is_some_and(|name| packs.dir().join(name).is_there());
    problems.retain(|problem| is_there(&problem.path) || is_there(&problem.path.with_extension("idx")));
    problems.sort_by(|a, b| a.path.cmp(&b.path));
    let chunks = looking.chunks.into_inner();
    Ok(PacksReport { packs: all + unusable, read: chosen.len(), chunks, bytes: progress.bytes().0, problems })
}

struct Looking<'a> {
    progress: &'a Progress,
    chunks: AtomicU64,
    found: Mutex<Vec<PackReport>>,
    /// Records that are damaged or unreadable.
    bad: Mutex<BTreeSet<(PackName, ChunkId)>>,
    packs: &'a Packs,
}

impl Visit<()> for Looking<'_> {
    type Own = ();
    type Error = ReadChunkError;

    fn chunk(&self, (): &mut (), wants: &[Want<()>], raw: Result<&[u8], ReadChunkError>) -> Result<(), ReadChunkError> {
        let Some(want) = wants.first() else { return Ok(()) };
        self.progress.add(usize::try_from(want.location.raw_len).unwrap_or(0));
        match raw {
            Ok(_) => {
                self.chunks.fetch_add(1, Ordering::Relaxed);
            }
            Err(error @ (ReadChunkError::Cancelled | ReadChunkError::Store(_))) => return Err(error),
            Err(error) => {
                let path = self.packs.pack_path(want.location.pack).path().to_owned();
                self.bad.lock().unwrap_or_else(PoisonError::into_inner).insert((want.location.pack, want.id));
                let unreadable = u64::from(matches!(error, ReadChunkError::Read { .. }));
                let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
                match found.iter_mut().find(|report| report.path == path) {
                    Some(report) => {
                        report.chunks += 1 - unreadable;
                        report.unreadable += unreadable;
                    }
                    None => {
                        let why = chain(&error);
                        found.push(PackReport { path, chunks: 1 - unreadable, unreadable, elsewhere: 0, why });
                    }
                }
            }
        }
        Ok(())
    }
}

impl Image {
    /// As [`Image::verify`], and reads all content that a packed image needs. Nothing is written.
    ///
    /// # Errors
    /// [`ReadChunkError::Cancelled`], [`ReadChunkError::Store`]. Damage is part of the result.
    pub fn verify_content(
        &self,
        key: Option<&Key>,
        threads: usize,
        progress: &Progress,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> Result<Report, ReadChunkError> {
        let mut report = self.verify();
        let now = self.look_again();
        let (Some(manifest), Form::Packed) = (now.manifest(), now.form()) else { return Ok(report) };
        let Ok((map, index)) = packed::look(&now) else { return Ok(report) };
        let (wrong, wants) = packed::wants(manifest, &map, &index);
        progress.begin(wants.iter().map(|want| u64::from(want.location.raw_len)).sum());
        let packs = packed::packs_of(&now);
        let content = Content { progress, wrong: Mutex::new(wrong) };
        let reading = Reading { packs: &packs, key, threads, way: Way::Direct, cancelled };
        reading.read(&index, wants, &content)?;
        let found = content.wrong.into_inner().unwrap_or_else(PoisonError::into_inner).report(manifest);
        // Unexpected files are reported as before.
        let is_part = |part: &PartReport| found.iter().any(|found| found.path == part.path);
        report.parts.retain(|part| !is_part(part));
        report.parts.extend(found);
        report.parts.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(report)
    }
}

struct Content<'a> {
    progress: &'a Progress,
    wrong: Mutex<Wrong>,
}

impl Visit<Place> for Content<'_> {
    type Own = ();
    type Error = ReadChunkError;

    fn chunk(
        &self,
        (): &mut (),
        wants: &[Want<Place>],
        raw: Result<&[u8], ReadChunkError>,
    ) -> Result<(), ReadChunkError> {
        match raw {
            // The lengths were compared when the requests were made.
            Ok(_) => {}
            Err(error @ (ReadChunkError::Cancelled | ReadChunkError::Store(_))) => return Err(error),
            Err(error) => {
                let mut wrong = self.wrong.lock().unwrap_or_else(PoisonError::into_inner);
                wants.iter().for_each(|want| wrong.note(want.target, &error));
            }
        }
        wants.iter().for_each(|want| self.progress.add(usize::try_from(want.target.len).unwrap_or(0)));
        Ok(())
    }
}

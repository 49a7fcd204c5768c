//! Looks for damage while nothing else happens: reads the packs of a job record by record, each pack once a day.
//!
//! Its position is in memory only. After a restart of the supervisor it starts again in another order, so that frequent
//! restarts do not read the same packs each time. It has the index of one pack and one record in memory, and bypasses
//! the page cache. It only reads; [`super::heal`] replaces damaged content.

use std::collections::hash_map::RandomState;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::BuildHasher;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::chunk::{ChunkId, Key};
use super::error::Result;
use super::format::FormatError;
use super::pack::set::Lost;
use super::pack::{Entry, Location, PackHeader, PackName, Packs, record};
use crate::pack::record::HEADER_BYTES;
use rekindle_base::chain;
use rekindle_os::direct::{Aligned, DirectFile, Way, span};

/// A pack is read again after this time. Disks lose sectors in months, not in hours.
pub const AGAIN: Duration = Duration::from_secs(24 * 3600);
/// How often to look for new packs while none is due.
const LOOK: Duration = Duration::from_secs(60);
/// If more chunks of a pack than this are damaged, they are replaced before the rest is read.
const MANY: usize = 256;

/// What one step did.
#[derive(Debug, PartialEq, Eq)]
pub enum Step {
    /// This many bytes were read, without a problem.
    Read(u64),
    /// These chunks of a pack are damaged, or the disk cannot read them.
    Found(BTreeSet<ChunkId>),
    /// Nothing of this pack can be used. Reported once a day.
    Unusable {
        /// The pack.
        pack: PackName,
        /// The reason.
        why: String,
    },
    /// All packs were read; time to check whether chunks are in no pack. Reported once a day.
    Round,
    /// Nothing is due for this time.
    Nothing(Duration),
}

/// The state of the search.
pub struct Scrub {
    packs: Packs,
    key: Option<Arc<Key>>,
    again: Duration,
    /// When packs were read.
    read: BTreeMap<PackName, Instant>,
    round: Option<Instant>,
    order: RandomState,
    open: Option<Open>,
}

impl std::fmt::Debug for Scrub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scrub").field("packs", &self.packs).field("read", &self.read.len()).finish_non_exhaustive()
    }
}

/// The pack that is being read.
struct Open {
    pack: PackName,
    file: DirectFile,
    header: PackHeader,
    /// The remaining records, in reverse order.
    left: Vec<Entry>,
    bad: BTreeSet<ChunkId>,
    memory: Aligned,
    scratch: Vec<u8>,
}

impl Scrub {
    /// A search of these packs; each is read again after `again`.
    #[must_use]
    pub fn new(packs: Packs, key: Option<Arc<Key>>, again: Duration) -> Scrub {
        Scrub { packs, key, again, read: BTreeMap::new(), round: None, order: RandomState::new(), open: None }
    }

    /// Reads one record, or opens the next pack.
    ///
    /// # Errors
    /// When the packs cannot be listed.
    pub fn step(&mut self, now: Instant) -> Result<Step> {
        let Some(open) = &mut self.open else { return self.next(now) };
        let Some(entry) = open.left.pop() else {
            let bad = self.open.take().map(|open| open.bad).unwrap_or_default();
            return Ok(if bad.is_empty() { Step::Read(0) } else { Step::Found(bad) });
        };
        let bytes = entry.end().saturating_sub(entry.offset);
        if open.is_bad(&entry, self.key.as_deref()) {
            open.bad.insert(entry.id);
            if open.bad.len() >= MANY {
                return Ok(Step::Found(std::mem::take(&mut open.bad)));
            }
        }
        Ok(Step::Read(bytes))
    }

    /// Opens the pack that was not read for the longest time.
    fn next(&mut self, now: Instant) -> Result<Step> {
        let mut names = self.packs.names()?;
        self.read.retain(|name, _| names.binary_search(name).is_ok());
        names.retain(|name| !self.packs.gone_path(*name).is_there());
        let due = |read: &Instant| now.saturating_duration_since(*read) >= self.again;
        let is_due = |name: &PackName| self.read.get(name).is_none_or(due);
        let next = names.iter().copied().filter(is_due);
        // Packs that were never read come first.
        let next = next.min_by_key(|name| (self.read.get(name).copied(), self.order.hash_one(name)));
        let Some(pack) = next else {
            if !names.is_empty() && self.round.as_ref().is_none_or(due) {
                self.round = Some(now);
                return Ok(Step::Round);
            }
            let oldest =
                self.read.values().min().map(|read| self.again.saturating_sub(now.saturating_duration_since(*read)));
            return Ok(Step::Nothing(oldest.unwrap_or(LOOK).min(LOOK)));
        };
        self.read.insert(pack, now);
        match self.look(pack) {
            Ok(open) => {
                self.open = open;
                Ok(Step::Read(0))
            }
            Err(why) => Ok(Step::Unusable { pack, why }),
        }
    }

    /// `None` if we cannot read its format or key, or if it was just removed.
    fn look(&self, pack: PackName) -> std::result::Result<Option<Open>, String> {
        let path = self.packs.pack_path(pack);
        let contents = match self.packs.pack_index(pack) {
            Ok(contents) => contents,
            Err(_) if !path.is_there() && !self.packs.index_path(pack).is_there() => return Ok(None),
            Err(problem) => {
                return match &problem.lost {
                    Lost::All(error) => Err(chain(error)),
                    _ => Ok(None),
                };
            }
        };
        let mut memory = Aligned::new(span(0, usize::try_from(HEADER_BYTES).unwrap_or(0)).2);
        let opened = DirectFile::open(&path, Way::Direct).map_err(|error| error.to_string())?;
        let header = opened.read_at(&mut memory, 0, usize::try_from(HEADER_BYTES).unwrap_or(0));
        let header = header.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
        let header = PackHeader::parse(header).map_err(|error| error.to_string())?;
        if header.key_for(self.key.as_deref()).is_err() {
            return Ok(None);
        }
        let mut left = contents.entries().to_vec();
        left.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.offset));
        let (bad, scratch) = (BTreeSet::new(), Vec::new());
        Ok(Some(Open { pack, file: opened, header, left, bad, memory, scratch }))
    }
}

impl Open {
    fn is_bad(&mut self, entry: &Entry, key: Option<&Key>) -> bool {
        let at = Location::of(self.pack, entry);
        let len = usize::try_from(at.record_len()).unwrap_or(usize::MAX);
        let whole = span(at.offset, len).2;
        if self.memory.len() < whole {
            self.memory = Aligned::new(whole);
        }
        let Ok(bytes) = self.file.read_at(&mut self.memory, at.offset, len) else { return true };
        let key = match self.header.key_for(key) {
            Ok(key) => key,
            Err(_) => return false,
        };
        let raw = record::raw(bytes, &entry.id, key, &mut self.scratch);
        raw.is_err_and(|error: FormatError| !error.is_not_for_us())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::CHUNK;
    use crate::persist::tests::{Ground, noise};

    /// Does all steps until nothing is due: returns the bytes read, and the findings.
    fn all(scrub: &mut Scrub, now: Instant) -> (u64, BTreeSet<ChunkId>, usize, Duration) {
        let (mut bytes, mut found, mut told) = (0, BTreeSet::new(), 0);
        loop {
            match scrub.step(now).unwrap() {
                Step::Read(more) => bytes += more,
                Step::Found(more) => found.extend(more),
                Step::Unusable { .. } => told += 1,
                Step::Round => {}
                Step::Nothing(wait) => return (bytes, found, told, wait),
            }
        }
    }

    #[test]
    fn every_record_is_read_once_a_day_and_damage_is_found() {
        let ground = Ground::new();
        let image = ground.persist(&ground.stage(1, &[("a", noise(1, 8 * CHUNK))])).unwrap();
        let mut scrub = Scrub::new(ground.folder.packs(), None, AGAIN);
        let now = Instant::now();
        let record = CHUNK as u64 + 64;
        assert_eq!(all(&mut scrub, now), (8 * record, BTreeSet::new(), 0, LOOK));
        assert_eq!(all(&mut scrub, now), (0, BTreeSet::new(), 0, LOOK), "it was read");
        // New packs are read at once.
        ground.persist(&ground.stage(2, &[("a", noise(2, CHUNK))])).unwrap();
        assert_eq!(all(&mut scrub, now).0, record);
        let (id, places) = ground.first(&image);
        ground.harm(&places[0]);
        assert!(all(&mut scrub, now + AGAIN / 2).1.is_empty());
        assert_eq!(all(&mut scrub, now + AGAIN), (9 * record, BTreeSet::from([id]), 0, LOOK));
        std::fs::write(ground.folder.packs().pack_path(places[0].pack), "x").unwrap();
        assert_eq!(all(&mut scrub, now + 2 * AGAIN).2, 1);
    }
}

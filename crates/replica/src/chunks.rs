//! Fetches single chunks that are damaged here, from any pack in the replica that has them. The store heals with them.
//!
//! Each is checked as in the fetch of an image: by its name, and with a key by the key. A wrong answer is requested
//! once more, and then another pack is tried.

use std::collections::HashSet;
use std::fmt;

use crate::client::Cancelled;
use crate::error::{Error, Result};
use crate::layout::{self, PackFile};
use crate::read::{Indexes, checked};
use crate::replica::Replica;
use crate::spans::spans;
use rekindle_base::chain;
use rekindle_store::chunk::{ChunkId, Key};
use rekindle_store::heal::{ChunkSource, FetchError, Put};
use rekindle_store::pack::record::HEADER_BYTES;
use rekindle_store::pack::{Entry, PackHeader, PackName, Packs, RecordHeader};

/// The replica as the source of chunks for healing, opened only when it is needed.
#[derive(Clone, Copy)]
pub struct OnDemand<F>(
    /// Opens the replica.
    pub F,
);

impl<F> fmt::Debug for OnDemand<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("OnDemand")
    }
}

impl<F: Fn() -> Result<Replica> + Sync> ChunkSource for OnDemand<F> {
    fn fetch(
        &self,
        wanted: HashSet<ChunkId>,
        here: &Packs,
        key: Option<&Key>,
        cancelled: Cancelled<'_>,
        put: Put<'_>,
    ) -> std::result::Result<(), FetchError> {
        match (self.0)().and_then(|replica| replica.chunks(wanted, here, key, cancelled, put)) {
            Ok(_) => Ok(()),
            Err(Error::Put(error)) => Err(FetchError::Put(error)),
            Err(Error::Cancelled) => Err(FetchError::Cancelled),
            Err(error) => Err(FetchError::Unavailable(chain(&error))),
        }
    }
}

impl Replica {
    /// Fetches these chunks, if they exist, are intact, and match our key. Returns those that do not.
    ///
    /// # Errors
    /// [`Error::Remote`], [`Error::Cancelled`]; an error of `put`.
    fn chunks(
        &self,
        mut wanted: HashSet<ChunkId>,
        here: &Packs,
        key: Option<&Key>,
        cancelled: Cancelled<'_>,
        put: Put<'_>,
    ) -> Result<HashSet<ChunkId>> {
        let there = self.inventory(cancelled)?;
        let packs = self.whole_packs(&there, cancelled)?;
        for indexes in [Indexes::Here, Indexes::There] {
            for (name, found) in &packs {
                if wanted.is_empty() {
                    return Ok(wanted);
                }
                let index = match self.index_by(indexes, *name, *found, here, cancelled) {
                    Ok(index) => index,
                    Err(Error::Damaged { .. }) => continue,
                    Err(error) => return Err(error),
                };
                let entries = index.entries().iter().filter(|entry| wanted.contains(&entry.id));
                let entries: Vec<Entry> = entries.copied().collect();
                if entries.is_empty() {
                    continue;
                }
                let Some(key) = self.key_of(*name, key, cancelled)? else { continue };
                self.records(*name, &entries, key, cancelled, &mut |header, stored| {
                    put(key, header, stored)?;
                    wanted.remove(&header.id);
                    Ok(())
                })?;
            }
        }
        Ok(wanted)
    }

    /// The key of the pack; `None` if we cannot open it.
    fn key_of<'k>(
        &self,
        pack: PackName,
        key: Option<&'k Key>,
        cancelled: Cancelled<'_>,
    ) -> Result<Option<Option<&'k Key>>> {
        let bytes = match self.client.get_range(&layout::of_pack(pack, PackFile::Pack), 0..HEADER_BYTES, cancelled) {
            Err(Error::Damaged { .. }) => return Ok(None),
            bytes => bytes?,
        };
        Ok(PackHeader::parse(&bytes).and_then(|header| header.key_for(key)).ok())
    }

    /// The records of a pack that are intact, among these.
    fn records(
        &self,
        pack: PackName,
        entries: &[Entry],
        key: Option<&Key>,
        cancelled: Cancelled<'_>,
        put: &mut dyn FnMut(&RecordHeader, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let object = layout::of_pack(pack, PackFile::Pack);
        let get = |range| match self.client.get_range(&object, range, cancelled) {
            Err(Error::Damaged { .. }) => Ok(Vec::new()),
            bytes => bytes,
        };
        for span in spans(entries) {
            let bytes = get(span.range())?;
            for entry in &span.entries {
                let of = span.record(entry).and_then(|range| bytes.get(range)).unwrap_or_default();
                let record = match checked(of, entry, key) {
                    Ok(record) => Some(record),
                    Err(_) => checked(&get(entry.offset..entry.end())?, entry, key).ok(),
                };
                if let Some((header, stored)) = record {
                    put(&header, &stored)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

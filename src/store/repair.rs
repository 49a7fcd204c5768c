//! What damage has left of a job's packs: every record is read, indexes are written anew from those that are whole, and
//! the images that have lost something are named.
//!
//! Nothing is removed. A record that can not be read or is not what was written is left out of the index, so that the next
//! image that has the same content stores it again; a read that fails for another reason than the content ends the repair of
//! that pack without a change. Images that suffer are marked as bad, so that a restart passes them over; one that was marked
//! and is whole after all keeps its mark, because what else speaks against it is not known here.
//!
//! A crash in the middle leaves some indexes written anew; the next repair begins again.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use chrono::Utc;
use serde::Serialize;

use super::chunk::Key;
use super::chunk::map::Extent;
use super::folder::JobFolder;
use super::format;
use super::gc;
use super::id::ImageId;
use super::image::{Image, State};
use super::lock::WriterLock;
use super::mark::{BadMark, BadWhy};
use super::pack::record::{self, HEADER_BYTES};
use super::pack::set::{Index, PackInfo, Packs};
use super::pack::{Entry, PackHeader, PackIndex, PackName, RecordHeader};
use crate::sys::durable;
use crate::telemetry::log::chain;

/// What was found, and done about it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Repaired {
    /// Packs whose index was missing, damaged, or named what can not be read.
    pub packs: Vec<PackRepair>,
    /// Images that have lost something.
    pub images: Vec<Suffering>,
}

/// What became of a pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PackRepair {
    /// Which.
    #[serde(serialize_with = "as_text")]
    pub pack: PackName,
    /// Records that are whole.
    pub whole: usize,
    /// Records that the index named and that are not; None where there was no index to tell.
    pub lost: Option<usize>,
    /// In words.
    pub what: String,
}

/// An image that can not be put together any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Suffering {
    /// Which.
    pub image: ImageId,
    /// What it has lost, in words.
    pub what: String,
}

fn as_text<S: serde::Serializer>(name: &PackName, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(name)
}

/// Whether anything is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It is only said what would be done.
    DryRun,
    /// It is done.
    Repair,
}

/// Reads everything, and repairs what can be.
///
/// # Errors
/// When the store can not be listed, or an index not be written.
pub fn repair(
    folder: &JobFolder,
    lock: &WriterLock,
    key: Option<&Key>,
    mode: Mode,
    progress: &dyn Fn(PackName),
) -> Result<Repaired, gc::Error> {
    folder.check_lock(lock)?;
    let packs = folder.packs();
    let mut done = Repaired::default();
    let mut index = Index::default();
    for name in packs.names()? {
        progress(name);
        match repair_pack(&packs, name, key, mode)? {
            Found::NoPack => continue,
            Found::Unreadable(what) => done.packs.push(PackRepair { pack: name, whole: 0, lost: None, what }),
            Found::Records { contents, repair } => {
                index.add(PackInfo { name, pack_len: contents.pack_len(), key: None, gone: false }, &contents);
                done.packs.extend(repair);
            }
        }
    }
    index.sort();
    for image in folder.images()? {
        let Some(what) = lost_of(&image, &index) else { continue };
        if mode == Mode::Repair && image.is_good() {
            let mark = BadMark { why: BadWhy::Damaged, detail: what.clone(), when: Utc::now() };
            image.clone().mark_bad(mark)?;
        }
        done.images.push(Suffering { image: image.id, what });
    }
    Ok(done)
}

/// What an image has lost; None where it is whole, or loose: then its parts are files, which `verify` looks at.
fn lost_of(image: &Image, index: &Index) -> Option<String> {
    if let State::Damaged { why } = &image.state {
        return Some(why.to_string());
    }
    let map = match image.chunk_map() {
        Ok(map) => map?,
        Err(error) => return Some(chain(&error)),
    };
    let manifest = image.manifest()?;
    let is_lost = |extent: &Extent| matches!(extent, Extent::Chunk { id, .. } if index.get(id).is_none());
    let lost = |extents: &Vec<Extent>| extents.iter().filter(|extent| is_lost(extent)).map(Extent::len).sum::<u64>();
    let parts: Vec<(&str, u64)> =
        manifest.parts.iter().map(|part| part.path.as_str()).zip(map.parts.iter().map(lost)).collect();
    let bytes: u64 = parts.iter().map(|(_, lost)| lost).sum();
    let names: Vec<&str> = parts.iter().filter(|(_, lost)| *lost > 0).map(|(path, _)| *path).take(5).collect();
    (bytes > 0).then(|| format!("{} of it are lost, in {}", bytesize::ByteSize::b(bytes), names.join(", ")))
}

/// What was found of a pack.
enum Found {
    /// Only an index or a mark.
    NoPack,
    /// It can not be read at all; its index stays as it is.
    Unreadable(String),
    /// Its records, and what had to be done.
    Records { contents: PackIndex, repair: Option<PackRepair> },
}

fn repair_pack(packs: &Packs, name: PackName, key: Option<&Key>, mode: Mode) -> Result<Found, gc::Error> {
    let path = packs.pack_path(name);
    let salvaged = match durable::open_for_reading(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Found::NoPack),
        Err(error) => Err(error),
        Ok(file) => salvage(&file, key),
    };
    let Salvage { entries, pack_len, checked } = match salvaged {
        Ok(salvage) => salvage,
        Err(error) => return Ok(Found::Unreadable(format!("can not be read, and is left alone: {error}"))),
    };
    let contents = PackIndex::new(pack_len, entries);
    let index_path = packs.index_path(name);
    let indexed = std::fs::read(&index_path).ok().and_then(|bytes| PackIndex::parse(&bytes).ok());
    if indexed.as_ref() == Some(&contents) {
        return Ok(Found::Records { contents, repair: None });
    }
    let whole = contents.entries().len();
    let has = |entry: &&Entry| contents.entries().binary_search_by_key(&entry.id, |known| known.id).is_ok();
    let lost = indexed.as_ref().map(|index| index.entries().iter().filter(|entry| !has(entry)).count());
    let what = match (lost, checked) {
        (None, _) => "its index was missing or damaged, and is made anew from its records".to_owned(),
        (Some(lost), true) => format!("{lost} records are damaged and left out of its index"),
        (Some(lost), false) => {
            format!("{lost} records have no whole header; their content needs the key to be checked")
        }
    };
    if mode == Mode::Repair {
        durable::write_file(&index_path, &contents.to_bytes(), 0o600).map_err(|source| gc::Error::Io {
            what: "write",
            path: index_path,
            source,
        })?;
    }
    Ok(Found::Records { contents, repair: Some(PackRepair { pack: name, whole, lost, what }) })
}

/// What is whole of a pack.
struct Salvage {
    entries: Vec<Entry>,
    pack_len: u64,
    /// Whether content was compared with its name: an encrypted pack without its key can only be looked at.
    checked: bool,
}

/// Searched at once for the begin of the next record.
const WINDOW: usize = 1 << 20;

/// Reads every record. Behind damage it looks for the next header that proves itself by its check.
fn salvage(file: &File, key: Option<&Key>) -> io::Result<Salvage> {
    let pack_len = file.metadata()?.len();
    let mut begin = [0; format::HEADER];
    let header = read_at(file, 0, pack_len, &mut begin)?.then(|| PackHeader::parse(&begin).ok()).flatten();
    // A pack whose begin is lost does not say whether it is encrypted: what proves itself with this key is whole.
    let checked = header.is_none_or(|header| header.check_key(key).is_ok());
    let mut found = Salvage { entries: Vec::new(), pack_len, checked };
    let (mut record, mut raw) = (Vec::new(), Vec::new());
    let mut at = HEADER_BYTES;
    while at < pack_len {
        let mut bytes = [0; format::HEADER];
        let parsed = read_at(file, at, pack_len, &mut bytes)?.then(|| RecordHeader::parse(&bytes).ok()).flatten();
        let Some(header) = parsed.filter(|header| at + header.record_len() <= pack_len) else {
            match next_record(file, at + 1, pack_len)? {
                Some(next) => at = next,
                None => break,
            }
            continue;
        };
        if !checked || is_whole(file, at, &header, key, &mut record, &mut raw)? {
            found.entries.push(Entry::of(&header, at));
        }
        at += header.record_len();
    }
    Ok(found)
}

fn is_whole(
    file: &File,
    at: u64,
    header: &RecordHeader,
    key: Option<&Key>,
    record: &mut Vec<u8>,
    raw: &mut Vec<u8>,
) -> io::Result<bool> {
    record.resize(usize::try_from(header.record_len()).unwrap_or(usize::MAX), 0);
    match file.read_exact_at(record, at) {
        Ok(()) => Ok(record::read(record, &header.id, key, raw).is_ok()),
        // A bad sector is damage of this record; the others may be whole.
        Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether there is a header's worth of bytes, which are then in `bytes`.
fn read_at(file: &File, at: u64, pack_len: u64, bytes: &mut [u8; format::HEADER]) -> io::Result<bool> {
    if pack_len.saturating_sub(at) < HEADER_BYTES {
        return Ok(false);
    }
    match file.read_exact_at(bytes, at) {
        Ok(()) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EIO) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Where the next header begins whose check is right, at `from` or behind.
fn next_record(file: &File, mut from: u64, pack_len: u64) -> io::Result<Option<u64>> {
    let mut window = vec![0; WINDOW];
    while pack_len.saturating_sub(from) >= HEADER_BYTES {
        let len = usize::try_from(pack_len - from).unwrap_or(usize::MAX).min(WINDOW);
        let bytes = window.get_mut(..len).unwrap_or_default();
        match file.read_exact_at(bytes, from) {
            Ok(()) => {}
            // What can not be read holds no header. The next page may.
            Err(error) if error.raw_os_error() == Some(libc::EIO) => {
                from = (from / PAGE + 1) * PAGE;
                continue;
            }
            Err(error) => return Err(error),
        }
        let is_header = |at: usize| bytes.get(at..).is_some_and(|rest| RecordHeader::parse(rest).is_ok());
        let last = len.saturating_sub(format::HEADER);
        if let Some(at) = (0..=last).find(|at| bytes.get(*at) == Some(&FIRST) && is_header(*at)) {
            return Ok(Some(from + format::size_of(at)));
        }
        from += format::size_of(last + 1);
    }
    Ok(None)
}

const PAGE: u64 = 4096;
/// Of the magic of a record.
const FIRST: u8 = b'R';

#[cfg(test)]
mod tests;

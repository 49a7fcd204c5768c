//! Where the files of an image are cut into chunks.
//!
//! Two images share a chunk if they have the same bytes between the same cuts. Most files are cut at multiples of
//! [`CHUNK`]. A pages file of CRIU contains only the present pages, one after the other: one more page in the middle
//! would move all that follow. So it is cut by the addresses of its pages, where the next page belongs to another piece
//! of [`CHUNK`] bytes of the address space.
//!
//! The cuts affect only how much is shared. If a page map cannot be read, or does not match the size of the file, the
//! file is cut at fixed offsets.

use std::collections::HashMap;
use std::fs::File;
use std::io;

use super::CHUNK;
use crate::format::size_of;
use rekindle_criu::image::{self, PAGE, PageRun};
use rekindle_os::beneath::Beneath;
use rekindle_os::sparse;

/// The folder of CRIU's files in an image.
const CRIU: &str = "criu/";

/// The page maps of an image, so that they are read once.
#[derive(Debug)]
pub(crate) struct Cutter {
    /// By the id of the pages file.
    maps: HashMap<u32, Beneath>,
}

impl Cutter {
    /// Reads the page maps of the image in `dir`.
    #[must_use]
    pub(crate) fn new(dir: &Beneath) -> Cutter {
        let criu = dir.join("criu");
        let names = criu.list().unwrap_or_default().into_iter().filter_map(|name| name.into_string().ok());
        let maps = names.filter(|name| name.starts_with("pagemap-") && name.ends_with(".img"));
        let maps = maps.map(|name| criu.join(name));
        Cutter { maps: maps.filter_map(|map| Some((image::pages_id(&map).ok()?, map))).collect() }
    }

    /// The cuts of a part of that size.
    #[must_use]
    pub(crate) fn cuts(&self, part: &str, size: u64) -> Cuts {
        match self.runs(part, size) {
            Some(runs) => Cuts { at: 0, how: How::Addresses { runs: runs.into_iter(), current: None } },
            None => Cuts { at: 0, how: How::Offsets { size } },
        }
    }

    fn runs(&self, part: &str, size: u64) -> Option<Vec<PageRun>> {
        let id = part.strip_prefix(CRIU)?.strip_prefix("pages-")?.strip_suffix(".img")?.parse().ok()?;
        let path = self.maps.get(&id)?;
        let map = image::page_runs(path).ok()?;
        (map.pages_id == id && map.bytes(path).ok()? == size).then_some(map.runs)
    }
}

/// The pieces of a file as (offset, length), in order and without gaps; no length is 0 or above [`CHUNK`].
#[derive(Debug)]
pub(crate) struct Cuts {
    at: u64,
    how: How,
}

#[derive(Debug)]
enum How {
    Offsets {
        size: u64,
    },
    Addresses {
        runs: std::vec::IntoIter<PageRun>,
        /// The rest of the run in which the next piece begins: address and bytes.
        current: Option<(u64, u64)>,
    },
}

#[cfg(test)]
impl Cuts {
    /// The cuts of the part `part` of the image in `dir`, if only this part is needed: [`Cutter`] reads the names of
    /// the page maps once for all parts.
    #[must_use]
    pub(crate) fn of(dir: &Beneath, part: &str, size: u64) -> Cuts {
        Cutter::new(dir).cuts(part, size)
    }
}

impl Cuts {
    /// Whether there are no more.
    pub(crate) fn are_over(&self) -> bool {
        match &self.how {
            How::Offsets { size } => self.at >= *size,
            How::Addresses { runs, current } => runs.len() == 0 && current.is_none(),
        }
    }

    /// Leaves out the pieces that are completely in a hole which begins here. Returns their bytes. Nothing is left out
    /// of a file that is cut by addresses: pages have no holes.
    pub(crate) fn skip_hole(&mut self, file: &File) -> io::Result<u64> {
        let How::Offsets { size } = &self.how else { return Ok(0) };
        // A file that became shorter has no hole there: it is an error for whoever reads it.
        if self.at >= *size || file.metadata()?.len() < *size {
            return Ok(0);
        }
        let begun = self.at;
        self.at = match sparse::first_data(file, begun, *size)? {
            Some(data) => (data - data % size_of(CHUNK)).max(begun),
            None => *size,
        };
        Ok(self.at - begun)
    }
}

impl Iterator for Cuts {
    type Item = (u64, usize);

    fn next(&mut self) -> Option<(u64, usize)> {
        let length = match &mut self.how {
            How::Offsets { size } => size.saturating_sub(self.at).min(size_of(CHUNK)),
            How::Addresses { runs, current } => by_address(runs, current),
        };
        let at = self.at;
        self.at += length;
        let length = usize::try_from(length).unwrap_or(CHUNK);
        (length > 0).then_some((at, length))
    }
}

fn by_address(runs: &mut std::vec::IntoIter<PageRun>, current: &mut Option<(u64, u64)>) -> u64 {
    let chunk = size_of(CHUNK);
    let mut window = None;
    let mut length = 0;
    while length < chunk {
        let Some((address, left)) = current.take().or_else(|| runs.next().map(|run| (run.address, run.pages * PAGE)))
        else {
            break;
        };
        if left == 0 {
            continue;
        }
        if *window.get_or_insert(address / chunk) != address / chunk {
            *current = Some((address, left));
            break;
        }
        let taken = left.min(chunk - address % chunk).min(chunk - length);
        length += taken;
        if taken < left {
            *current = Some((address.wrapping_add(taken), left - taken));
        }
    }
    length
}

#[cfg(test)]
mod tests;

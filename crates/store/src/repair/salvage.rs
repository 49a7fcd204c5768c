//! Finds what is intact in one pack. Reads only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Error;
use crate::chunk::Key;
use crate::file_error::is_failing;
use crate::format::{self, FormatError, HEADER, What};
use crate::pack::record::{self, HEADER_BYTES};
use crate::pack::{Entry, PACK_MAX, PackHeader, RecordHeader};

/// The intact content of a pack.
pub(super) struct Salvage {
    /// Its intact records by offset; if they cannot be checked, all records with a valid header.
    pub(super) entries: Vec<Entry>,
    /// Records with a valid header whose body the disk cannot read.
    pub(super) unread: Vec<Entry>,
    /// Number of damaged places.
    pub(super) damaged: usize,
    /// Size of the pack.
    pub(super) pack_len: u64,
    /// The header that it has or should have.
    pub(super) begin: Begin,
    /// Why content was not compared with its name: it is encrypted, and we do not have the key.
    pub(super) unchecked: Option<FormatError>,
}

/// The header of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// It is intact.
    Whole(PackHeader),
    /// It is damaged, and this is the correct one.
    Mend(PackHeader),
    /// It is damaged, and its records cannot be judged.
    Lost,
}

/// Why a pack cannot be judged.
#[derive(Debug)]
pub(super) enum Stop {
    /// It cannot be read.
    Read(io::Error),
    /// It is intact but not readable here, or nothing that we would have written.
    NotForUs(FormatError),
    /// Another process has the store now.
    Lock(Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Read(error)
    }
}

/// Reads every record. After damage it searches for the next header with a valid check. `on` is called with the number
/// of bytes processed.
pub(super) fn salvage(file: &File, key: Option<&Key>, on: &dyn Fn(u64) -> Result<(), Error>) -> Result<Salvage, Stop> {
    let pack_len = file.metadata()?.len();
    if pack_len > PACK_MAX {
        let (what, field, bound) = (What::Pack, "pack size", PACK_MAX);
        return Err(Stop::NotForUs(FormatError::OutOfBounds { what, field, found: pack_len, bound }));
    }
    let begin = begin(file, pack_len)?;
    // Whether it is trusted is decided at a restore; here it is only read.
    let key_of = |header: PackHeader| if header.key.is_none() { Ok(None) } else { header.key_for(key) };
    let (candidates, unchecked) = match begin.map(|begin| key_of(begin.header())) {
        Some(Ok(key)) => (vec![key], None),
        Some(Err(why)) => (Vec::new(), Some(why)),
        // The header does not tell whether the pack is encrypted. The first intact record does.
        None if key.is_some() => (vec![key, None], None),
        None => (vec![None], None),
    };
    let mut walk = Walk { file, candidates, record: Vec::new(), raw: Vec::new() };
    let (mut entries, mut unread, mut damaged, mut headers) = (Vec::new(), Vec::new(), 0, 0_usize);
    let (mut at, mut on_track) = (HEADER_BYTES, true);
    while at < pack_len {
        let header = header_at(file, at, pack_len)?;
        let next = match header {
            Some(header) => {
                headers += 1;
                let end = at + header.record_len();
                let state = walk.state(at, &header)?;
                let whole = state == Body::Whole;
                match state {
                    Body::Whole => entries.push(Entry::of(&header, at)),
                    Body::Unread if on_track => unread.push(Entry::of(&header, at)),
                    Body::Unread => {}
                    Body::Damaged => damaged += usize::from(on_track),
                }
                // A header that was found by search may be part of content that looks like a pack: its length counts
                // only if its content is intact.
                if whole || on_track { Some(end) } else { search(file, at + 1, pack_len)? }
            }
            None => {
                damaged += usize::from(on_track);
                on_track = false;
                search(file, at + 1, pack_len)?
            }
        };
        on_track = on_track || entries.last().is_some_and(|last| Some(last.end()) == next);
        let end = next.unwrap_or(pack_len);
        on(end - at).map_err(Stop::Lock)?;
        at = end;
    }
    let begin = match (begin, walk.candidates.as_slice()) {
        (Some(begin), _) => begin,
        (None, [key]) if !entries.is_empty() => Begin::Mend(PackHeader::of(*key)),
        // The pack contains nothing, so any header will do.
        (None, _) if headers == 0 => Begin::Mend(PackHeader::of(key)),
        (None, _) => Begin::Lost,
    };
    // A rewritten header may be longer than the damaged file.
    Ok(Salvage { entries, unread, damaged, pack_len: pack_len.max(HEADER_BYTES), begin, unchecked })
}

impl Begin {
    fn header(self) -> PackHeader {
        match self {
            Begin::Whole(header) | Begin::Mend(header) => header,
            Begin::Lost => PackHeader::of(None),
        }
    }
}

/// `None` if it cannot be reconstructed.
fn begin(file: &File, pack_len: u64) -> Result<Option<Begin>, Stop> {
    let mut bytes = [0; HEADER];
    if !read_at(file, 0, pack_len, &mut bytes)? {
        return Ok(None);
    }
    match PackHeader::parse(&bytes) {
        Ok(header) => Ok(Some(Begin::Whole(header))),
        Err(error) => match PackHeader::with_one_bit_wrong(&bytes) {
            Some(header) => Ok(Some(Begin::Mend(header))),
            None if error.is_not_for_us() => Err(Stop::NotForUs(error)),
            None => Ok(None),
        },
    }
}

/// The header of the record at that place, if there is one whose record fits into the pack.
fn header_at(file: &File, at: u64, pack_len: u64) -> io::Result<Option<RecordHeader>> {
    let mut bytes = [0; HEADER];
    let parsed = read_at(file, at, pack_len, &mut bytes)?.then(|| RecordHeader::parse(&bytes).ok()).flatten();
    Ok(parsed.filter(|header| at + header.record_len() <= pack_len))
}

struct Walk<'a> {
    file: &'a File,
    /// The keys that the pack may be encrypted with, including none; empty if it cannot be checked.
    candidates: Vec<Option<&'a Key>>,
    record: Vec<u8>,
    raw: Vec<u8>,
}

impl Walk<'_> {
    /// Whether the record is intact, as far as that can be checked.
    fn state(&mut self, at: u64, header: &RecordHeader) -> io::Result<Body> {
        for n in 0..self.candidates.len() {
            let Some(key) = self.candidates.get(n).copied() else { break };
            self.record.resize(usize::try_from(header.record_len()).unwrap_or(usize::MAX), 0);
            match self.file.read_exact_at(&mut self.record, at) {
                Ok(()) => {}
                // A bad sector affects only this record; the others may be intact.
                Err(error) if is_failing(&error) => return Ok(Body::Unread),
                Err(error) => return Err(error),
            }
            if record::read(&mut self.record, &header.id, key, &mut self.raw).is_ok() {
                self.candidates = vec![key];
                return Ok(Body::Whole);
            }
        }
        Ok(if self.candidates.is_empty() { Body::Whole } else { Body::Damaged })
    }
}

/// The state of a record's body.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Body {
    Whole,
    Damaged,
    Unread,
}

/// Reads the bytes of a header; returns false if there are too few.
fn read_at(file: &File, at: u64, pack_len: u64, bytes: &mut [u8; HEADER]) -> io::Result<bool> {
    if pack_len.saturating_sub(at) < HEADER_BYTES {
        return Ok(false);
    }
    match file.read_exact_at(bytes, at) {
        Ok(()) => Ok(true),
        Err(error) if is_failing(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Bytes searched at a time.
const WINDOW: usize = 1 << 20;
const PAGE: u64 = 4096;
/// First byte of a record's magic.
const FIRST: u8 = b'R';

/// The position of the next header with a valid check, at or after `from`.
fn search(file: &File, mut from: u64, pack_len: u64) -> io::Result<Option<u64>> {
    let mut window = vec![0; WINDOW];
    // If a window cannot be read, it is read page by page.
    let mut step = WINDOW;
    while pack_len.saturating_sub(from) >= HEADER_BYTES {
        let len = usize::try_from(pack_len - from).unwrap_or(usize::MAX).min(step);
        let bytes = window.get_mut(..len).unwrap_or_default();
        match file.read_exact_at(bytes, from) {
            Ok(()) => {}
            Err(error) if is_failing(&error) && step > HEADER => {
                step = if step == WINDOW { usize::try_from(PAGE).unwrap_or(WINDOW) } else { HEADER };
                continue;
            }
            // An unreadable page is skipped; the next one may have a header.
            Err(error) if is_failing(&error) => {
                (from, step) = ((from / PAGE + 1) * PAGE, WINDOW);
                continue;
            }
            Err(error) => return Err(error),
        }
        let is_header = |at: usize| bytes.get(at..).is_some_and(|rest| RecordHeader::parse(rest).is_ok());
        let last = len.saturating_sub(HEADER);
        if let Some(at) = (0..=last).find(|at| bytes.get(*at) == Some(&FIRST) && is_header(*at)) {
            return Ok(Some(from + format::size_of(at)));
        }
        from += format::size_of(last + 1);
    }
    Ok(None)
}

//! Finds what is intact in one pack. Reads only.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::Error;
use crate::chunk::Key;
use crate::error::is_failing;
use crate::format::{self, FormatError, HEADER, What};
use crate::pack::record::{self, HEADER_BYTES};
use crate::pack::{Entry, PACK_MAX, PackHeader, RecordHeader};

/// What is intact of a pack.
pub(super) struct Salvage {
    /// Its intact records, or those with a header if they cannot be checked, in the order of their offsets.
    pub(super) entries: Vec<Entry>,
    /// Records whose header is, and whose body the disk does not give.
    pub(super) unread: Vec<Entry>,
    /// Places at which something is not what was written.
    pub(super) damaged: usize,
    /// The bytes of the pack.
    pub(super) pack_len: u64,
    /// The begin that it has or should have.
    pub(super) begin: Begin,
    /// Why content was not compared with its name: it is encrypted, and we have not the key.
    pub(super) unchecked: Option<FormatError>,
}

/// How a pack begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Begin {
    /// As it should.
    Whole(PackHeader),
    /// It is damaged, and this is what it was.
    Mend(PackHeader),
    /// It is damaged, and its records cannot be judged.
    Lost,
}

/// Why nothing can be said of a pack.
#[derive(Debug)]
pub(super) enum Stop {
    /// It cannot be read.
    Read(io::Error),
    /// It is fine, but not for us; or nothing that we would have written.
    NotForUs(FormatError),
    /// Somebody else has the store now.
    Lock(Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Read(error)
    }
}

/// Reads every record. Behind damage it looks for the next header that proves itself by its check. `on` is told how many
/// bytes were dealt with.
pub(super) fn salvage(file: &File, key: Option<&Key>, on: &dyn Fn(u64) -> Result<(), Error>) -> Result<Salvage, Stop> {
    let pack_len = file.metadata()?.len();
    if pack_len > PACK_MAX {
        let (what, field, bound) = (What::Pack, "pack size", PACK_MAX);
        return Err(Stop::NotForUs(FormatError::OutOfBounds { what, field, found: pack_len, bound }));
    }
    let begin = begin(file, pack_len)?;
    // Whether it is believed is asked by who restores from it; here it is only looked at.
    let key_of = |header: PackHeader| if header.key.is_none() { Ok(None) } else { header.key_for(key) };
    let (candidates, unchecked) = match begin.map(|begin| key_of(begin.header())) {
        Some(Ok(key)) => (vec![key], None),
        Some(Err(why)) => (Vec::new(), Some(why)),
        // It does not say whether it is encrypted. The first intact record does.
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
                // A header that was searched for may be of content that looks like a pack: its length counts only when
                // its content does.
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
        // There is nothing in it: any begin will do.
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

/// None if it is lost.
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

/// The header of the record at that place, where one is whose record fits into the pack.
fn header_at(file: &File, at: u64, pack_len: u64) -> io::Result<Option<RecordHeader>> {
    let mut bytes = [0; HEADER];
    let parsed = read_at(file, at, pack_len, &mut bytes)?.then(|| RecordHeader::parse(&bytes).ok()).flatten();
    Ok(parsed.filter(|header| at + header.record_len() <= pack_len))
}

struct Walk<'a> {
    file: &'a File,
    /// The keys that the pack may be encrypted with, none among them; empty if it cannot be checked.
    candidates: Vec<Option<&'a Key>>,
    record: Vec<u8>,
    raw: Vec<u8>,
}

impl Walk<'_> {
    /// Whether the record is what was written, as far as that can be told.
    fn state(&mut self, at: u64, header: &RecordHeader) -> io::Result<Body> {
        for n in 0..self.candidates.len() {
            let Some(key) = self.candidates.get(n).copied() else { break };
            self.record.resize(usize::try_from(header.record_len()).unwrap_or(usize::MAX), 0);
            match self.file.read_exact_at(&mut self.record, at) {
                Ok(()) => {}
                // A bad sector affects this record; the others may be intact.
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

/// What is known of the body of a record.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Body {
    Whole,
    Damaged,
    Unread,
}

/// Whether there is a header's worth of bytes, which are then in `bytes`.
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

/// Searched at once.
const WINDOW: usize = 1 << 20;
const PAGE: u64 = 4096;
/// Of the magic of a record.
const FIRST: u8 = b'R';

/// Where the next header begins whose check is right, at `from` or behind.
fn search(file: &File, mut from: u64, pack_len: u64) -> io::Result<Option<u64>> {
    let mut window = vec![0; WINDOW];
    // What cannot be read in one go is read page by page.
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
            // What cannot be read holds no header. The next page may.
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

//! Takes the memory out of an image, for a restore that is cancelled before a process runs.
//!
//! CRIU restores processes whose page maps have few pages: the mappings are made, and are empty. It needs the pages that it
//! reads itself (4.2.1): the vdso, in which it looks up functions, rings of asynchronous I/O, and shadow stacks. A page map
//! without any entry makes it crash (`premap_priv_vmas` uses the first one), so one page is kept in any case.
//!
//! The files of the image are replaced and never written to: they may be shared with the real image, which is the lower
//! layer of the overlay that this works in.

mod ghosts;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;

use prost::Message;

use super::devices::{MM, images};
use super::{Error, PAGE, PAGEMAP, PRESENT, Records, damaged};
use crate::proto::{MmEntry, PagemapEntry, PagemapHead};
use rekindle_os::beneath::Beneath;

/// `PE_PARENT`: the page is in an earlier image.
const PARENT: u32 = 1;
/// Status of a mapping (`include/image.h`).
const VDSO: u32 = 1 << 3;
const VVAR: u32 = 1 << 12;
const AIO_RING: u32 = 1 << 13;
const SHADOW_STACK: u32 = 1 << 15;
/// The mappings whose pages CRIU reads.
const READ_BY_CRIU: u32 = VDSO | VVAR | AIO_RING | SHADOW_STACK;

/// Takes the content of all memory and of deleted files out of the image in `dir`, and makes its processes such that only
/// root can look into them (PR_SET_DUMPABLE). They never run, and what they have is not for the job's user.
///
/// # Errors
/// When the image is damaged: CRIU could not restore it either. When a file cannot be read or written.
pub fn without_memory(dir: &Beneath) -> Result<(), Error> {
    let mut pages = BTreeSet::new();
    for (owner, path) in images(dir, "pagemap-")? {
        // The others are of shared memory.
        let needed = match owner.parse::<u32>() {
            Ok(_) => Some(needed(&dir.join(format!("mm-{owner}.img")))?),
            Err(_) => None,
        };
        let id = reduce(dir, &path, needed.as_deref())?;
        if !pages.insert(id) {
            return Err(damaged(&path, format!("another page map has pages-{id}.img, too")));
        }
    }
    for (owner, path) in images(dir, "mm-")? {
        let map = dir.join(format!("pagemap-{owner}.img"));
        map.metadata().map_err(|source| Error::Read { path: map.path().into(), source })?;
        make_undumpable(&path)?;
    }
    images(dir, "ghost-file-")?.into_iter().try_for_each(|(_, path)| ghosts::empty(&path))
}

/// The addresses of a process whose pages CRIU reads.
fn needed(mm: &Beneath) -> Result<Vec<Range<u64>>, Error> {
    if !mm.is_there() {
        return Ok(Vec::new());
    }
    let entries: Vec<MmEntry> = Records::open(mm.clone(), MM)?.all()?;
    let needed = entries.iter().flat_map(|entry| &entry.vmas).filter(|vma| vma.status & READ_BY_CRIU != 0);
    Ok(needed.map(|vma| vma.start / PAGE * PAGE..vma.end.div_ceil(PAGE).saturating_mul(PAGE)).collect())
}

/// A part of a page map that is kept: an entry, and where its pages were.
struct Kept {
    entry: PagemapEntry,
    at: u64,
    bytes: u64,
}

/// Leaves a page map, and its pages file, with the pages at the `needed` addresses; `None`: with none, which is no error for
/// shared memory. Returns the number of the pages file.
fn reduce(dir: &Beneath, path: &Beneath, needed: Option<&[Range<u64>]>) -> Result<u32, Error> {
    let mut records = Records::open(path.clone(), PAGEMAP)?;
    let head: PagemapHead = records.next()?.ok_or_else(|| damaged(path, "no head"))?;
    let mut map = records.bytes.get(..records.at).unwrap_or_default().to_vec();
    let (mut kept, mut first, mut offset) = (Vec::new(), None, 0_u64);
    while let Some(entry) = records.next::<PagemapEntry>()? {
        let flags = entry.flags.unwrap_or_else(|| if entry.in_parent == Some(true) { PARENT } else { PRESENT });
        let pages = entry.nr_pages.unwrap_or_else(|| u64::from(entry.compat_nr_pages.unwrap_or(0)));
        let whole = Kept { entry, at: offset, bytes: 0 };
        if flags & PRESENT == 0 {
            if flags & PARENT == 0 {
                return Err(damaged(path, format!("the pages at {:#x} are nowhere", entry.vaddr)));
            }
            // CRIU refuses it, and is to.
            kept.push(whole);
            continue;
        }
        let overflows = || damaged(path, "page counts overflow");
        let bytes = pages.checked_mul(PAGE).ok_or_else(overflows)?;
        let end = entry.vaddr.checked_add(bytes).ok_or_else(overflows)?;
        if !entry.vaddr.is_multiple_of(PAGE) {
            return Err(damaged(path, format!("{:#x} is not the address of a page", entry.vaddr)));
        }
        for range in needed.unwrap_or_default() {
            kept.extend(part(&whole, range.start.max(entry.vaddr)..range.end.min(end)));
        }
        if first.is_none() {
            first = part(&whole, entry.vaddr..end.min(entry.vaddr.saturating_add(PAGE)));
        }
        offset = offset.checked_add(bytes).ok_or_else(overflows)?;
    }
    let pages = dir.join(format!("pages-{}.img", head.pages_id));
    let failed = |source| Error::Read { path: pages.path().into(), source };
    let mut old = match pages.read() {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(source) => return Err(failed(source)),
    };
    let have = old.as_ref().map_or(Ok(0), |file| file.metadata().map(|metadata| metadata.len())).map_err(failed)?;
    if have != offset {
        return Err(damaged(&pages, format!("{have} bytes, its page map says {offset}")));
    }
    if needed.is_some() && kept.is_empty() {
        kept.extend(first);
    }
    for Kept { entry, .. } in &kept {
        append(&mut map, entry);
    }
    replace(path, |file| file.write_all(&map))?;
    if let Some(old) = &mut old {
        replace(&pages, |new| kept.iter().try_for_each(|kept| copy(old, kept, new)))?;
    }
    Ok(head.pages_id)
}

/// The part of an entry that is at these addresses, if there is any.
fn part(Kept { entry, at, .. }: &Kept, addresses: Range<u64>) -> Option<Kept> {
    let bytes = addresses.end.checked_sub(addresses.start).filter(|bytes| *bytes > 0)?;
    let pages = bytes / PAGE;
    let at = at + addresses.start.checked_sub(entry.vaddr)?;
    let entry = PagemapEntry {
        vaddr: addresses.start,
        // CRIU 4.2 requires both, and reads the second.
        compat_nr_pages: entry.compat_nr_pages.map(|_| u32::try_from(pages).unwrap_or(u32::MAX)),
        nr_pages: entry.nr_pages.map(|_| pages),
        ..*entry
    };
    Some(Kept { entry, at, bytes })
}

fn copy(from: &mut File, Kept { at, bytes, .. }: &Kept, to: &mut File) -> io::Result<()> {
    from.seek(SeekFrom::Start(*at))?;
    match io::copy(&mut from.take(*bytes), to)? {
        copied if copied == *bytes => Ok(()),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Adds a record to the content of an image file.
fn append(bytes: &mut Vec<u8>, record: &impl Message) {
    let record = record.encode_to_vec();
    bytes.extend(u32::try_from(record.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend(record);
}

/// `dumpable` = 0 in the description of a process's memory. CRIU sets it last of all, after the rights.
fn make_undumpable(mm: &Beneath) -> Result<(), Error> {
    /// Field 15 of `mm_entry`, a varint. Of a field that is there twice the last one counts.
    const DUMPABLE_0: [u8; 2] = [15 << 3, 0];
    let mut records = Records::open(mm.clone(), MM)?;
    let mut bytes = records.bytes.get(..records.at).unwrap_or_default().to_vec();
    loop {
        let at = records.at + 4;
        if records.next::<()>()?.is_none() {
            break;
        }
        let record = records.bytes.get(at..records.at).unwrap_or_default();
        let length = u32::try_from(record.len() + DUMPABLE_0.len());
        bytes.extend(length.map_err(|error| damaged(mm, error.to_string()))?.to_le_bytes());
        bytes.extend(record);
        bytes.extend(DUMPABLE_0);
    }
    replace(mm, |file| file.write_all(&bytes))
}

/// Puts a new file in the place of an image file.
fn replace(path: &Beneath, write: impl FnOnce(&mut File) -> io::Result<()>) -> Result<(), Error> {
    let new = path.with_file_name("new.tmp");
    let put = || {
        let mut file = new.create_new(0o600)?;
        write(&mut file)?;
        new.rename(path)
    };
    put().map_err(|source| {
        let _ = new.remove_file();
        Error::Write { path: path.path().into(), source }
    })
}

#[cfg(test)]
mod tests;

//! The build-id of an ELF file. It is found as CRIU finds it (`get_build_id` in criu/files-reg.c), so that both agree.

use std::fs::File;
use std::os::unix::fs::FileExt;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// `PT_NOTE`.
const NOTE_SEGMENT: u32 = 4;
/// `NT_GNU_BUILD_ID`.
const BUILD_ID: u32 = 3;
/// CRIU reads no more of a file than this.
const LIMIT: u64 = 1 << 20;
/// A build-id usually has 20 bytes; CRIU ignores longer ones than this.
const LONGEST: usize = 512;

/// The build-id, padded with zeros to a multiple of four bytes. None if the file is no 64-bit little-endian ELF file,
/// has none, or is damaged.
#[must_use]
pub fn build_id(file: &File) -> Option<Vec<u8>> {
    let header = read(file, 0, HEADER)?;
    // ELFMAG, ELFCLASS64, ELFDATA2LSB.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, count) = (u64::from_le_bytes(header.get(32..40)?.try_into().ok()?), half(&header, 56)?);
    (0..u64::from(count)).find_map(|at| {
        let entry = read(file, table.checked_add(at * u64::try_from(PROGRAM_HEADER).ok()?)?, PROGRAM_HEADER)?;
        if word(&entry, 0)? != NOTE_SEGMENT {
            return None;
        }
        let long = |at: usize| Some(u64::from_le_bytes(entry.get(at..at + 8)?.try_into().ok()?));
        let (offset, size) = (long(8)?, long(32)?);
        let within = size.min(LIMIT.checked_sub(offset)?);
        in_notes(&read(file, offset, usize::try_from(within).ok()?)?)
    })
}

fn in_notes(notes: &[u8]) -> Option<Vec<u8>> {
    let mut at: usize = 0;
    loop {
        let (name, size) = (usize::try_from(word(notes, at)?).ok()?, usize::try_from(word(notes, at + 4)?).ok()?);
        let begin = at.checked_add(12)?.checked_add(name.checked_next_multiple_of(4)?)?;
        let end = begin.checked_add(size)?;
        if word(notes, at + 8)? == BUILD_ID {
            let mut id = notes.get(begin..end).filter(|id| !id.is_empty() && id.len() <= LONGEST)?.to_vec();
            id.resize(id.len().next_multiple_of(4), 0);
            return Some(id);
        }
        at = begin.checked_add(size.checked_next_multiple_of(4)?)?;
    }
}

fn read(file: &File, at: u64, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, at).ok()?;
    Some(bytes)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(bytes.get(at..at.checked_add(2)?)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn file(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        file
    }

    /// One program header, and two notes: another kind, then a build-id of six bytes.
    fn sample() -> Vec<u8> {
        let mut bytes = b"\x7fELF\x02\x01".to_vec();
        bytes.resize(120, 0);
        bytes[32] = 64;
        bytes[56] = 1;
        bytes[64] = 4;
        bytes[72] = 120;
        bytes[96] = 44;
        for note in [(5u32, &b"GNU\0AAAA"[..], 4u32), (3, b"GNU\0abcdef\0\0", 6)] {
            bytes.extend(4u32.to_le_bytes());
            bytes.extend(note.2.to_le_bytes());
            bytes.extend(note.0.to_le_bytes());
            bytes.extend(note.1);
        }
        bytes
    }

    #[test]
    fn the_build_id_is_found_behind_other_notes_and_padded() {
        assert_eq!(build_id(&file(&sample())).unwrap(), b"abcdef\0\0");
    }

    #[test]
    fn what_is_cut_or_no_elf_file_has_none() {
        let whole = sample();
        for length in 0..whole.len() {
            assert_eq!(build_id(&file(&whole[..length])), None, "cut to {length}");
        }
        let mut wild = whole.clone();
        wild[120..124].fill(0xff);
        assert_eq!(build_id(&file(&wild)), None);
        let mut far = whole;
        far[72..80].fill(0xff);
        assert_eq!(build_id(&file(&far)), None);
        assert_eq!(build_id(&file(b"#!/bin/sh\nexit 0\n")), None);
    }
}

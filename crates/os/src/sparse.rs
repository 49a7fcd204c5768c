//! Sparse files: where the data is, and copies that preserve the holes.
//!
//! A program creates a hole with one ftruncate(2), but reading it as bytes costs the time and the disk space of as many
//! zeros. So files of a job are read extent by extent (lseek(2), SEEK_DATA and SEEK_HOLE). A file system without holes
//! answers with one extent up to the end. Data is reported in whole blocks, so it may begin or end with zeros of a
//! hole.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::unistd::{Whence, lseek};

/// Bytes copied at a time.
const CHUNK: usize = 256 << 10;

/// Where the first data at or behind `at` begins; `None` if there is none before `end`.
///
/// # Errors
/// Those of lseek(2).
pub fn first_data(file: &File, at: u64, end: u64) -> io::Result<Option<u64>> {
    if at >= end {
        return Ok(None);
    }
    Ok(seek(file, at, Whence::SeekData)?.filter(|start| *start < end))
}

/// The first data at or behind `at`, up to the next hole or `end`; `None` if there is none before `end`.
///
/// The kernel looks for the next hole also beyond `end`, and in a tmpfs it looks at each page on the way. Whoever asks
/// again and again within a large extent needs [`first_data`].
///
/// # Errors
/// Those of lseek(2).
pub fn next_data(file: &File, at: u64, end: u64) -> io::Result<Option<Range<u64>>> {
    let Some(start) = first_data(file, at, end)? else { return Ok(None) };
    // The file was cut meanwhile: nothing more can be read.
    let hole = seek(file, start, Whence::SeekHole)?.unwrap_or(start);
    Ok((hole > start).then(|| start..hole.min(end)))
}

fn seek(file: &File, at: u64, whence: Whence) -> io::Result<Option<u64>> {
    match lseek(file, i64::try_from(at).map_err(io::Error::other)?, whence) {
        Ok(found) => Ok(u64::try_from(found).ok()),
        // Beyond the last data, or the end.
        Err(Errno::ENXIO) => Ok(None),
        Err(error) => Err(io::Error::from(error)),
    }
}

/// The data in `range`, in order.
pub fn data(file: &File, range: Range<u64>) -> impl Iterator<Item = io::Result<Range<u64>>> {
    let mut at = Some(range.start);
    std::iter::from_fn(move || {
        let found = next_data(file, at?, range.end).transpose();
        at = match &found {
            Some(Ok(extent)) => Some(extent.end),
            _ => None,
        };
        found
    })
}

/// The offset where the last `most` bytes of data in `range` begin, and the amount of data in the whole range.
///
/// # Errors
/// Those of lseek(2).
pub fn last_data(file: &File, range: Range<u64>, most: u64) -> io::Result<(u64, u64)> {
    let (mut extents, mut held, mut total) = (VecDeque::<Range<u64>>::new(), 0_u64, 0_u64);
    for extent in data(file, range.clone()) {
        let extent = extent?;
        let length = extent.end - extent.start;
        (held, total) = (held + length, total + length);
        extents.push_back(extent);
        // Only as many as are needed: a job may create millions of extents.
        while let Some(first) = extents.front().filter(|first| held - (first.end - first.start) >= most) {
            held -= first.end - first.start;
            extents.pop_front();
        }
    }
    let start = extents.front().map_or(range.end, |first| first.start + held.saturating_sub(most));
    Ok((if total <= most { range.start } else { start.min(range.end) }, total))
}

/// Copies the data in `range` of one file to offset `to` of another one, without filling holes. Returns how much data
/// was copied.
///
/// # Errors
/// Those of lseek(2), pread(2) and pwrite(2).
pub fn copy(from: &File, range: Range<u64>, into: &File, to: u64) -> io::Result<u64> {
    let mut copied = 0;
    for extent in data(from, range.clone()) {
        let extent = extent?;
        copied += copy_extent(from, extent.clone(), into, to + (extent.start - range.start))?;
    }
    Ok(copied)
}

/// Copies the data without the holes, at most `most` bytes. Returns how much was copied, and where in `range` it ended.
///
/// # Errors
/// Those of lseek(2), pread(2) and pwrite(2).
pub fn gather(from: &File, range: Range<u64>, most: u64, into: &File, to: u64) -> io::Result<(u64, u64)> {
    let (mut copied, mut at) = (0, range.start);
    for extent in data(from, range.clone()) {
        let extent = extent?;
        let end = extent.end.min(extent.start.saturating_add(most - copied));
        copied += copy_extent(from, extent.start..end, into, to + copied)?;
        at = end;
        if copied >= most {
            return Ok((copied, at));
        }
    }
    // The rest is a hole.
    Ok((copied, at.max(range.end)))
}

/// Copies `extent`, which has data, to the same place of another file. Returns how much was copied: less than the
/// extent if the file has become shorter.
///
/// # Errors
/// Those of pread(2) and pwrite(2).
pub fn copy_data(from: &File, extent: Range<u64>, into: &File) -> io::Result<u64> {
    let to = extent.start;
    copy_extent(from, extent, into, to)
}

fn copy_extent(from: &File, extent: Range<u64>, into: &File, to: u64) -> io::Result<u64> {
    let mut buffer = vec![0; CHUNK];
    let mut at = extent.start;
    while at < extent.end {
        let most = usize::try_from(extent.end - at).unwrap_or(CHUNK).min(CHUNK);
        let count = match from.read_at(buffer.get_mut(..most).unwrap_or_default(), at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            other => other?,
        };
        if count == 0 {
            break;
        }
        into.write_all_at(buffer.get(..count).unwrap_or_default(), to + (at - extent.start))?;
        at += count as u64;
    }
    Ok(at - extent.start)
}

/// Frees the blocks of `range`, which reads as zeros from then on. The length of the file does not change.
///
/// # Errors
/// Those of fallocate(2): `Unsupported` if the file system has no holes.
pub fn punch(file: &File, range: Range<u64>) -> io::Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    let signed = |n: u64| i64::try_from(n).map_err(io::Error::other);
    let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    loop {
        match fallocate(file, flags, signed(range.start)?, signed(range.end.saturating_sub(range.start))?) {
            Err(Errno::EINTR) => {}
            other => return Ok(other?),
        }
    }
}

/// Where the data of a file begins that was punched from its beginning: behind the hole, and behind the zeros at the
/// start of the first block. 0 for a file that was not punched.
///
/// # Errors
/// Those of lseek(2) and pread(2).
pub fn begin(file: &File) -> io::Result<u64> {
    let length = file.metadata()?.len();
    let Some(extent) = next_data(file, 0, length)? else { return Ok(length) };
    if extent.start == 0 {
        // The file system does not report a hole that is smaller than a block.
        let mut first = [1];
        let _ = file.read_at(&mut first, 0)?;
        if first != [0] {
            return Ok(0);
        }
    }
    let (mut block, mut looked) = (vec![0; CHUNK], 0);
    for extent in data(file, extent.start..length) {
        let mut extent = extent?;
        while extent.start < extent.end {
            let room = usize::try_from(extent.end - extent.start).unwrap_or(CHUNK).min(CHUNK);
            let count = file.read_at(block.get_mut(..room).unwrap_or_default(), extent.start)?;
            let zeros = block.iter().take(count).take_while(|byte| **byte == 0).count();
            extent.start += zeros as u64;
            looked += zeros as u64;
            if zeros < count || count == 0 || looked > LARGEST_BLOCK {
                return Ok(extent.start.min(length));
            }
        }
    }
    Ok(length)
}

/// The block size of a tmpfs with huge pages.
const LARGEST_BLOCK: u64 = 2 << 20;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::time::Instant;

    use super::*;

    const MIB: u64 = 1 << 20;

    /// 1 MiB of a, a hole up to 1 TiB, a MiB of b, and another hole.
    fn holey() -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![b'a'; 1 << 20], 0).unwrap();
        file.write_all_at(&vec![b'b'; 1 << 20], MIB << 20).unwrap();
        file.set_len((MIB << 20) + 100 * MIB).unwrap();
        file
    }

    #[test]
    fn a_copy_has_the_same_holes_and_takes_no_more_room() {
        let (file, copied) = (holey(), tempfile::tempfile().unwrap());
        let length = file.metadata().unwrap().len();
        assert_eq!(copy(&file, 5..length, &copied, 0).unwrap(), 2 * MIB - 5);
        let meta = copied.metadata().unwrap();
        assert!(meta.blocks() * 512 < 4 * MIB, "{}", meta.blocks() * 512);
        let mut found = [0; 3];
        copied.read_exact_at(&mut found, MIB - 7).unwrap();
        assert_eq!(&found, b"aa\0");
        copied.read_exact_at(&mut found, (MIB << 20) - 6).unwrap();
        assert_eq!(&found, b"\0bb");
    }

    /// Storing an image asks for each piece of it. Where each answer looked for the next hole, 256 MiB in pages of 4 KiB
    /// took 6 s, and four times that for twice as much.
    #[test]
    fn asking_for_each_piece_of_a_file_takes_less_than_reading_it() {
        let file =
            File::from(nix::sys::memfd::memfd_create(c"pieces", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap());
        let mut piece = vec![b'x'; CHUNK];
        let pieces = || (0..256 * MIB).step_by(CHUNK);
        for at in pieces() {
            file.write_all_at(&piece, at).unwrap();
        }
        let mut round = || {
            let begun = Instant::now();
            for at in pieces() {
                file.read_exact_at(&mut piece, at).unwrap();
            }
            let (reading, begun) = (begun.elapsed(), Instant::now());
            for at in pieces() {
                assert_eq!(first_data(&file, at, at + CHUNK as u64).unwrap(), Some(at));
            }
            (begun.elapsed(), reading)
        };
        // The least of each: a machine with much else to do may interrupt either.
        let rounds: Vec<_> = (0..5).map(|_| round()).collect();
        let asking = rounds.iter().map(|(asking, _)| asking).min().unwrap();
        let reading = rounds.iter().map(|(_, reading)| reading).min().unwrap();
        assert!(asking < reading, "{asking:?}, and {reading:?} to read it");
    }

    #[test]
    fn data_is_gathered_without_holes_up_to_a_bound() {
        let file = holey();
        let end = file.metadata().unwrap().len();
        let into = tempfile::tempfile().unwrap();
        assert_eq!(gather(&file, 0..end, MIB + 3, &into, 2).unwrap(), (MIB + 3, (MIB << 20) + 3));
        assert_eq!(into.metadata().unwrap().len(), MIB + 5);
        let mut found = [0; 4];
        into.read_exact_at(&mut found, MIB + 1).unwrap();
        assert_eq!(&found, b"abbb");
        assert_eq!(gather(&file, (MIB << 20) + MIB..end, MIB, &into, 0).unwrap(), (0, end));
    }

    #[test]
    fn the_last_data_is_found_before_a_hole() {
        let file = holey();
        let end = file.metadata().unwrap().len();
        assert_eq!(last_data(&file, 0..end, 4 * MIB).unwrap(), (0, 2 * MIB));
        assert_eq!(last_data(&file, 0..end, MIB).unwrap(), (MIB << 20, 2 * MIB));
        assert_eq!(last_data(&file, 0..end, MIB + 1).unwrap(), (MIB - 1, 2 * MIB));
        assert_eq!(last_data(&file, 0..end, 1).unwrap(), ((MIB << 20) + MIB - 1, 2 * MIB));
        assert_eq!(last_data(&file, 2 * MIB..3 * MIB, 1).unwrap(), (2 * MIB, 0));
    }

    #[test]
    fn what_was_punched_is_behind_the_begin_also_within_a_block() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(begin(&file).unwrap(), 0);
        file.write_all_at(&vec![b'x'; 3 << 20], 0).unwrap();
        assert_eq!(begin(&file).unwrap(), 0);
        // A block that was not punched completely stays, and the punched part of it is zero.
        punch(&file, 0..100).unwrap();
        punch(&file, 100..MIB + 50).unwrap();
        punch(&file, MIB + 50..2 * MIB + 50).unwrap();
        assert_eq!(begin(&file).unwrap(), 2 * MIB + 50);
        file.write_all_at(&vec![b'x'; 3 << 20], 0).unwrap();
        for at in [100, 4096, MIB + 1, 2 * MIB - 7] {
            punch(&file, 0..at).unwrap();
            assert_eq!((begin(&file).unwrap(), file.metadata().unwrap().len()), (at, 3 * MIB));
        }
        punch(&file, 0..3 * MIB).unwrap();
        assert_eq!(begin(&file).unwrap(), 3 * MIB);
        assert!(file.metadata().unwrap().blocks() < 16);
    }
}

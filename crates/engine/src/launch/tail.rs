//! Reads a job's output file from another process: from its beginning, or continuously.
//!
//! The supervisor's own follower is told when a file is rotated or cut ([`super::output`]). A reader from outside
//! recognises this by the bytes that it showed last. If these are no longer at their place, the file was rotated (then
//! the next bytes are in NAME.1) or cut (then what differs from the bytes already shown is new). Output that a job
//! repeats after a restart is not shown twice: nothing is shown until the output differs or is longer. The exception is
//! a job that repeats so much at once that it is rotated before this reader looks.
//!
//! Between snapshots a file is rotated without becoming shorter: its first part becomes a hole. Holes are never shown,
//! and nothing here reads by the file's length: the job can make the file longer than any disk.

use std::fs::{File, Metadata};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rekindle_os::sparse;

/// The bytes shown last, which are remembered. After a cut to before them, everything from the cut on is shown.
const REMEMBERED: usize = 1 << 20;
/// So much of it tells whether a file is still the one that it was.
const COMPARED: usize = 4096;
/// How much is read at a time.
const CHUNK: usize = 64 << 10;

/// A file that grows, and is rotated, and cut.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    at: u64,
    /// What is before `at`, the end of it.
    shown: Vec<u8>,
    /// The rotated files whose content is before `at`, the newest first.
    older: Vec<Signature>,
    /// Where the data of the file began then.
    begin: u64,
}

/// What tells a rotated file from others: inode, time of change in seconds and nanoseconds. It keeps that when it is renamed,
/// and also when a restart cuts it.
type Signature = (u64, i64, i64);

impl Tail {
    /// From the beginning of what is kept: older files first.
    #[must_use]
    pub fn new(path: &Path) -> Tail {
        Tail { path: path.into(), at: 0, shown: Vec::new(), older: rotated(path), begin: 0 }
    }

    /// Writes what rotations have kept of the time before the file itself.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn copy_older(&mut self, to: &mut dyn Write) -> io::Result<()> {
        for _ in 0..TRIES {
            self.older = rotated(&self.path);
            let Some(all) = open_rotated(&self.path, &self.older)? else { continue };
            for (file, _) in all {
                copy(&file, 0, &mut |bytes| to.write_all(bytes))?;
            }
            return Ok(());
        }
        Err(io::Error::other("it is rotated faster than it can be read"))
    }

    /// Leaves out all but the last lines.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub fn skip_to_last(&mut self, lines: usize) -> io::Result<()> {
        let Some(file) = open(&self.path)? else { return Ok(()) };
        let length = file.metadata()?.len();
        let start = length.saturating_sub(REMEMBERED as u64).max(sparse::begin(&file)?);
        let mut bytes = Vec::new();
        copy_some(&file, start, length - start, &mut |more| {
            bytes.extend_from_slice(more);
            Ok(())
        })?;
        let ends = bytes.iter().enumerate().rev().skip(1).filter(|(_, byte)| **byte == b'\n').map(|(n, _)| n + 1);
        let from = match lines {
            0 => bytes.len(),
            lines => ends.take(lines).nth(lines - 1).unwrap_or(0),
        };
        self.at = start + from as u64;
        self.shown = bytes.get(..from).unwrap_or_default().to_vec();
        Ok(())
    }

    /// Writes what is new.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn copy(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let Some(file) = open(&self.path)? else { return Ok(()) };
        let older = rotated(&self.path);
        let begin = sparse::begin(&file)?;
        if older != rotated(&self.path) {
            // It is being rotated.
            return Ok(());
        }
        let begun_anew = self.shown.is_empty() && older.first() != self.older.first();
        let is_elsewhere =
            begun_anew || !self.shown.is_empty() && (self.at < begin || !self.is_in(&file, begin..self.at)?);
        if is_elsewhere && !self.find_again(&file, &older, begin, to)? {
            return Ok(());
        }
        self.at = self.at.max(begin);
        if self.copy_from(&file, to)? {
            (self.older, self.begin) = (older, begin);
        }
        to.flush()
    }

    /// Returns whether all of it was there: it may become a hole meanwhile.
    fn copy_from(&mut self, file: &File, to: &mut dyn Write) -> io::Result<bool> {
        let mut buffer = vec![0; CHUNK];
        let length = file.metadata()?.len();
        while let Some(data) = sparse::next_data(file, self.at, length)? {
            let room = usize::try_from(data.end - data.start).unwrap_or(CHUNK).min(CHUNK);
            let count = file.read_at(buffer.get_mut(..room).unwrap_or_default(), data.start)?;
            let still = sparse::next_data(file, data.start, data.end)?;
            if count == 0 || still.is_none_or(|still| still.start > data.start) {
                return Ok(false);
            }
            let bytes = buffer.get(..count).unwrap_or_default();
            to.write_all(bytes)?;
            self.at = data.start + count as u64;
            self.shown.extend_from_slice(bytes);
            if self.shown.len() > 2 * REMEMBERED {
                self.shown.drain(..self.shown.len() - REMEMBERED);
            }
        }
        Ok(true)
    }

    /// Whether what was shown last is at the end of this range, as much of it as fits.
    fn is_in(&self, file: &File, range: Range<u64>) -> io::Result<bool> {
        let most = usize::try_from(range.end - range.start).unwrap_or(COMPARED).min(COMPARED);
        let last = self.shown.get(self.shown.len().saturating_sub(most)..).unwrap_or_default();
        let mut there = vec![0; last.len()];
        match file.read_exact_at(&mut there, range.end - last.len() as u64) {
            Ok(()) => Ok(there == last),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What follows `at` was rotated, or cut. The data of the file begins at `begin` now. Returns false if it is just
    /// being done.
    fn find_again(&mut self, file: &File, older: &[Signature], begin: u64, to: &mut dyn Write) -> io::Result<bool> {
        let new = older.iter().position(|one| self.older.contains(one)).unwrap_or(older.len());
        let Some(pieces) = open_rotated(&self.path, older.get(..new).unwrap_or_default())? else { return Ok(false) };
        let Some((oldest, _)) = pieces.first() else { return self.go_back(file, begin, to).map(|()| true) };
        // Where each was in the file: the first where its data began, or the last before where that begins now.
        let all: u64 = pieces.iter().map(|(_, length)| length).sum();
        if begin == self.begin && begins_with(file, begin, oldest)? {
            // It is copied already, and not taken away.
            return Ok(false);
        }
        let (mut found, mut goes_on) = (None, false);
        for first in [Some(self.begin), begin.checked_sub(all)].into_iter().flatten() {
            let mut start = first;
            for (n, (file, length)) in pieces.iter().enumerate() {
                let inside = self.at.checked_sub(start).filter(|inside| inside <= length);
                if let Some(inside) = inside.filter(|_| found.is_none())
                    && self.is_in(file, 0..inside)?
                {
                    (found, goes_on) = (Some((n, inside)), first + all == begin);
                }
                start = start.saturating_add(*length);
            }
        }
        let (first, inside) = found.unwrap_or_default();
        for (n, (file, _)) in pieces.iter().enumerate().skip(first) {
            self.at = if n == first { inside } else { 0 };
            self.copy_from(file, to)?;
        }
        (self.at, self.begin, self.older) = (begin, begin, older.to_vec());
        if !goes_on {
            // The file was emptied: what was shown does not precede its content.
            self.shown.clear();
        }
        Ok(true)
    }

    /// The file was cut, and perhaps written on: goes to the line that differs from what was shown, once there is one.
    fn go_back(&mut self, file: &File, data: u64, to: &mut dyn Write) -> io::Result<()> {
        let begin = self.at.saturating_sub(self.shown.len() as u64);
        let length = file.metadata()?.len();
        if length < begin {
            // Further back than is remembered.
            (self.at, self.shown) = (length, Vec::new());
            return Ok(());
        }
        // What is before the data was rotated away, and is what it was.
        let kept = usize::try_from(data.saturating_sub(begin)).unwrap_or(usize::MAX).min(self.shown.len());
        let shown = self.shown.get(kept..).unwrap_or_default();
        let mut there = Vec::new();
        copy_some(file, begin + kept as u64, shown.len() as u64 + 1, &mut |bytes| {
            there.extend_from_slice(bytes);
            Ok(())
        })?;
        let same = shown.iter().zip(&there).take_while(|(a, b)| a == b).count();
        if same == there.len() {
            return Ok(());
        }
        let same = kept + same;
        let line = self.shown.iter().take(same).rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if self.shown.last().is_some_and(|last| *last != b'\n') {
            to.write_all(b"\n")?;
        }
        self.shown.truncate(line.max(kept));
        self.at = begin + self.shown.len() as u64;
        Ok(())
    }
}

/// What rotations have left, the newest first. Empty, or a part, in the middle of one: the next look differs then.
fn rotated(path: &Path) -> Vec<Signature> {
    let look = || -> Vec<Signature> {
        (1..)
            .map_while(|n| Some(signature(&std::fs::metadata(numbered(path, n)).ok().filter(|meta| meta.is_file())?)))
            .collect()
    };
    for _ in 0..TRIES {
        let found = look();
        // Files are renamed one after the other, the oldest first: one name is missing meanwhile.
        let is_whole = !numbered(path, found.len() + 2).exists();
        if is_whole && found == look() {
            return found;
        }
        std::thread::sleep(MOMENT);
    }
    look()
}

/// How often, and with what pause, it is looked again in the middle of a rotation.
const TRIES: usize = 100;
const MOMENT: Duration = Duration::from_millis(1);

fn signature(meta: &Metadata) -> Signature {
    (meta.ino(), meta.mtime(), meta.mtime_nsec())
}

/// These, with their lengths, the oldest first; None if they have other names by now.
fn open_rotated(path: &Path, these: &[Signature]) -> io::Result<Option<Vec<(File, u64)>>> {
    let mut opened = Vec::new();
    for (n, wanted) in these.iter().enumerate().rev() {
        let Some(file) = open(&numbered(path, n + 1))? else { return Ok(None) };
        let meta = file.metadata()?;
        if signature(&meta) != *wanted {
            return Ok(None);
        }
        opened.push((file, meta.len()));
    }
    Ok(Some(opened))
}

/// Whether what is at `at` of one is at the beginning of the other.
fn begins_with(file: &File, at: u64, other: &File) -> io::Result<bool> {
    let (mut one, mut two) = (vec![0; COMPARED], vec![0; COMPARED]);
    let (there, wanted) = (file.read_at(&mut one, at)?, other.read_at(&mut two, 0)?);
    Ok(wanted > 0 && there >= wanted && one.get(..wanted) == two.get(..wanted))
}

fn open(path: &Path) -> io::Result<Option<File>> {
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn numbered(path: &Path, n: usize) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{n}"));
    name.into()
}

/// All data from there on.
fn copy(file: &File, at: u64, to: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut buffer = vec![0; CHUNK];
    for data in sparse::data(file, at..length) {
        let mut data = data?;
        while data.start < data.end {
            let room = usize::try_from(data.end - data.start).unwrap_or(CHUNK).min(CHUNK);
            match file.read_at(buffer.get_mut(..room).unwrap_or_default(), data.start)? {
                0 => return Ok(()),
                count => {
                    to(buffer.get(..count).unwrap_or_default())?;
                    data.start += count as u64;
                }
            }
        }
    }
    Ok(())
}

/// At most so many bytes from there on, holes with them.
fn copy_some(file: &File, at: u64, most: u64, to: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut bytes = vec![0; usize::try_from(most).map_err(io::Error::other)?];
    let mut count = 0;
    while let Some(room) = bytes.get_mut(count..).filter(|room| !room.is_empty()) {
        match file.read_at(room, at + count as u64)? {
            0 => break,
            more => count += more,
        }
    }
    to(bytes.get(..count).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use super::*;

    struct Log {
        dir: tempfile::TempDir,
        tail: Tail,
        seen: Vec<u8>,
    }

    impl Log {
        fn new() -> Log {
            let dir = tempfile::tempdir().unwrap();
            let tail = Tail::new(&dir.path().join("log"));
            Log { dir, tail, seen: Vec::new() }
        }

        fn file(&self) -> PathBuf {
            self.dir.path().join("log")
        }

        fn write(&self, text: &str) {
            OpenOptions::new().append(true).create(true).open(self.file()).unwrap().write_all(text.as_bytes()).unwrap();
        }

        fn cut(&self, to: u64) {
            OpenOptions::new().write(true).open(self.file()).unwrap().set_len(to).unwrap();
        }

        fn rotate(&self) {
            let _ = std::fs::rename(self.dir.path().join("log.1"), self.dir.path().join("log.2"));
            std::fs::copy(self.file(), self.dir.path().join("log.1")).unwrap();
            self.cut(0);
        }

        fn sees(&mut self, text: &str) {
            self.tail.copy(&mut self.seen).unwrap();
            assert_eq!(String::from_utf8(std::mem::take(&mut self.seen)).unwrap(), text);
        }
    }

    #[test]
    fn rotations_lose_nothing_even_where_the_file_has_grown_past_it() {
        let mut log = Log::new();
        log.sees("");
        log.write("one\n");
        log.sees("one\n");
        log.write("two\n");
        log.rotate();
        log.sees("two\n");
        log.write("three\n");
        log.rotate();
        log.write("four, which is longer\n");
        log.rotate();
        log.write("five\n");
        log.sees("three\nfour, which is longer\nfive\n");
    }

    #[test]
    fn what_a_cut_repeats_is_not_shown_again() {
        let mut log = Log::new();
        log.write("n 1\nn 2\nn 3\nn 4");
        log.sees("n 1\nn 2\nn 3\nn 4");
        log.cut(8);
        log.write("n 3\nm 40\nn 5\n");
        log.sees("\nm 40\nn 5\n");
        log.cut(4);
        log.sees("");
        log.write("n 2\nn");
        log.sees("");
        log.cut(4);
        log.write("n 2\nother\nn 4\n");
        log.sees("other\nn 4\n");
        // Exactly the same again.
        log.cut(0);
        log.write("n 1\nn 2\nother\nn 4\n");
        log.sees("");
    }

    #[test]
    fn the_last_lines_and_older_files() {
        let mut log = Log::new();
        log.write("a\n");
        log.rotate();
        log.write("b\n");
        log.rotate();
        log.write("c\nd\ne\n");
        log.tail.copy_older(&mut log.seen).unwrap();
        log.sees("a\nb\nc\nd\ne\n");
        for (lines, text) in [(0, ""), (1, "e\n"), (2, "d\ne\n"), (3, "c\nd\ne\n"), (9, "c\nd\ne\n")] {
            log.tail = Tail::new(&log.file());
            log.tail.skip_to_last(lines).unwrap();
            log.sees(text);
        }
        log.write("f\n");
        log.sees("f\n");
    }
}

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
use std::time::Duration;

use super::output::is_being_rotated;
use rekindle_os::beneath::Beneath;
use rekindle_os::sparse;

/// The bytes shown last, which are remembered. After a cut to before them, everything from the cut on is shown.
const REMEMBERED: usize = 1 << 20;
/// Bytes that are compared to recognise a file.
const COMPARED: usize = 4096;
/// How much is read at a time.
const CHUNK: usize = 64 << 10;

/// A file that grows, is rotated and is cut.
#[derive(Debug)]
pub struct Tail {
    path: Beneath,
    at: u64,
    /// The last bytes before `at`.
    shown: Vec<u8>,
    /// The rotated files whose content is before `at`, the newest first.
    older: Vec<Signature>,
    /// Where the data of the file began at the last check.
    begin: u64,
}

/// Identifies a rotated file: inode, and modification time in seconds and nanoseconds. A rename does not change it, and
/// neither does the cut of a restart.
type Signature = (u64, i64, i64);

impl Tail {
    /// Starts at the beginning of what is kept: older files first.
    #[must_use]
    pub fn new(path: &Beneath) -> Tail {
        Tail { path: path.clone(), at: 0, shown: Vec::new(), older: rotated(path), begin: 0 }
    }

    /// Writes the content of the rotated files, which is older than the file itself.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn copy_older(&mut self, to: &mut dyn Write) -> io::Result<()> {
        for _ in 0..LONGEST_ROTATION {
            let Some(older) = settled(&self.path)? else {
                std::thread::sleep(MOMENT);
                continue;
            };
            self.older = older;
            let Some(all) = open_rotated(&self.path, &self.older)? else { continue };
            for (file, _) in all {
                copy(&file, 0, &mut |bytes| to.write_all(bytes))?;
            }
            return Ok(());
        }
        Err(io::Error::other("it is rotated faster than it can be read"))
    }

    /// Skips all but the last `lines` lines. Those of them that are in rotated files are written.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn skip_to_last(&mut self, lines: usize, to: &mut dyn Write) -> io::Result<()> {
        for _ in 0..LONGEST_ROTATION {
            let Some(file) = open(&self.path)? else { return Ok(()) };
            let Some(older) = settled(&self.path)? else {
                std::thread::sleep(MOMENT);
                continue;
            };
            let (length, begin) = (file.metadata()?.len(), sparse::begin(&file)?);
            let start = length.saturating_sub(REMEMBERED as u64).max(begin);
            let mut bytes = Vec::new();
            copy_some(&file, start, length.saturating_sub(start), &mut |more| {
                bytes.extend_from_slice(more);
                Ok(())
            })?;
            let (from, missing) = last_lines(&bytes, lines, bytes.len().saturating_sub(1));
            let mut before = Vec::new();
            if missing > 0 && start == begin {
                let Some(rotated) = open_rotated(&self.path, &older)? else { continue };
                // A rotation in a snapshot may split a line.
                before = last_of(rotated, missing, bytes.is_empty())?;
            }
            if settled(&self.path)?.as_ref() != Some(&older) || sparse::begin(&file)? != begin {
                continue;
            }
            to.write_all(&before)?;
            self.at = start + from as u64;
            self.shown = bytes.get(..from).unwrap_or_default().to_vec();
            (self.older, self.begin) = (older, begin);
            return Ok(());
        }
        Err(io::Error::other("it is rotated faster than it can be read"))
    }

    /// Writes what is new, after a rotation that is in progress.
    ///
    /// # Errors
    /// When it cannot be read or written.
    pub fn copy(&mut self, to: &mut dyn Write) -> io::Result<()> {
        for _ in 0..LONGEST_ROTATION {
            if self.copy_settled(to)? {
                return to.flush();
            }
            std::thread::sleep(MOMENT);
        }
        to.flush()
    }

    /// Returns whether all was written. Otherwise the file is being rotated.
    fn copy_settled(&mut self, to: &mut dyn Write) -> io::Result<bool> {
        let Some(file) = open(&self.path)? else { return Ok(true) };
        let Some(older) = settled(&self.path)? else { return Ok(false) };
        let begin = sparse::begin(&file)?;
        if older != rotated(&self.path) {
            return Ok(false);
        }
        let begun_anew = self.shown.is_empty() && older.first() != self.older.first();
        let is_elsewhere =
            begun_anew || !self.shown.is_empty() && (self.at < begin || !self.is_in(&file, begin..self.at)?);
        if is_elsewhere && !self.find_again(&file, &older, begin, to)? {
            return Ok(false);
        }
        self.at = self.at.max(begin);
        let is_all = self.copy_from(&file, to)?;
        if is_all {
            (self.older, self.begin) = (older, begin);
        }
        Ok(is_all)
    }

    /// Returns whether all of it was still there: data can become a hole meanwhile.
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

    /// Whether the bytes shown last are at the end of this range, as many of them as fit.
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

    /// The content at `at` was rotated or cut: finds the position to continue at. `older` and `begin` (where the data of the
    /// file begins) were read just before. Returns false if a rotation is in progress.
    fn find_again(&mut self, file: &File, older: &[Signature], begin: u64, to: &mut dyn Write) -> io::Result<bool> {
        let new = older.iter().position(|one| self.older.contains(one)).unwrap_or(older.len());
        let Some(pieces) = open_rotated(&self.path, older.get(..new).unwrap_or_default())? else { return Ok(false) };
        if pieces.is_empty() {
            return self.go_back(file, older, begin, to);
        }
        // Two candidates for where the pieces were in the file: the first began where the data began, or the last ended
        // where the data begins now.
        let all: u64 = pieces.iter().map(|(_, length)| length).sum();
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

    /// The file was cut, and perhaps written again: once a line or a frame of a progress bar differs from what was shown,
    /// continues there. Returns false if the file was rotated meanwhile: then a hole was compared.
    fn go_back(&mut self, file: &File, older: &[Signature], data: u64, to: &mut dyn Write) -> io::Result<bool> {
        let begin = self.at.saturating_sub(self.shown.len() as u64);
        let length = file.metadata()?.len();
        if length < begin {
            // Cut to before what is remembered.
            (self.at, self.shown) = (length, Vec::new());
            return Ok(true);
        }
        // The part before the data was rotated away, so it is unchanged.
        let kept = usize::try_from(data.saturating_sub(begin)).unwrap_or(usize::MAX).min(self.shown.len());
        let shown = self.shown.get(kept..).unwrap_or_default();
        let mut there = Vec::new();
        copy_some(file, begin + kept as u64, shown.len() as u64 + 1, &mut |bytes| {
            there.extend_from_slice(bytes);
            Ok(())
        })?;
        if settled(&self.path)?.is_none_or(|now| now != older) || sparse::begin(file)? != data {
            return Ok(false);
        }
        let same = shown.iter().zip(&there).take_while(|(a, b)| a == b).count();
        if same == there.len() {
            return Ok(true);
        }
        let before = self.shown.get(..kept + same).unwrap_or_default();
        let line = match before.iter().rposition(|byte| matches!(byte, b'\n' | b'\r')) {
            // A frame begins with the carriage return: it is shown again, over the one that differs.
            Some(at) if before.get(at) == Some(&b'\r') => at,
            Some(at) => at + 1,
            None => 0,
        };
        let line = line.max(kept);
        let continues = there.get(line - kept) == Some(&b'\r');
        if !continues && self.shown.last().is_some_and(|last| *last != b'\n') {
            to.write_all(b"\n")?;
        }
        self.shown.truncate(line);
        self.at = begin + line as u64;
        Ok(true)
    }
}

/// The rotated files, newest first. During a rotation the list can be empty or incomplete; the next call then differs.
fn rotated(path: &Beneath) -> Vec<Signature> {
    let look = || -> Vec<Signature> {
        (1..)
            .map_while(|n| Some(signature(&numbered(path, n).metadata().ok().filter(|meta| meta.is_file())?)))
            .collect()
    };
    for _ in 0..TRIES {
        let found = look();
        // Files are renamed one by one, oldest first: one name is missing meanwhile.
        let is_whole = !numbered(path, found.len() + 2).is_there();
        if is_whole && found == look() {
            return found;
        }
        std::thread::sleep(MOMENT);
    }
    look()
}

/// Number of tries while names change, and the pause between them.
const TRIES: usize = 100;
const MOMENT: Duration = Duration::from_millis(1);
/// Number of pauses after which a rotation is not waited for any longer.
const LONGEST_ROTATION: usize = if cfg!(test) { 60_000 } else { 1000 };

fn signature(meta: &Metadata) -> Signature {
    (meta.ino(), meta.mtime(), meta.mtime_nsec())
}

/// Opens these files, oldest first, with their lengths; `None` if they were renamed meanwhile.
fn open_rotated(path: &Beneath, these: &[Signature]) -> io::Result<Option<Vec<(File, u64)>>> {
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

/// The rotated files, newest first; `None` while a rotation is in progress. Between the two steps of a rotation the
/// newest content is in two places, and a reader that wakes up at the first step would show it twice, or take the
/// second step for a cut.
fn settled(path: &Beneath) -> io::Result<Option<Vec<Signature>>> {
    let older = rotated(path);
    let Some(newest) = older.first() else { return Ok(Some(older)) };
    let Some(opened) = open_rotated(path, std::slice::from_ref(newest))? else { return Ok(None) };
    let is_in_progress = opened.iter().any(|(file, _)| is_being_rotated(file));
    Ok((!is_in_progress).then_some(older))
}

/// Where the last `lines` lines begin, if lines end at line feeds before `end`; and how many of them begin before.
fn last_lines(bytes: &[u8], lines: usize, end: usize) -> (usize, usize) {
    if lines == 0 {
        return (bytes.len(), 0);
    }
    let mut left = lines;
    for (n, _) in bytes.iter().enumerate().take(end).rev().filter(|(_, byte)| **byte == b'\n') {
        left -= 1;
        if left == 0 {
            return (n + 1, 0);
        }
    }
    (0, left)
}

/// The last lines of rotated files, which are given oldest first, at most [`REMEMBERED`] bytes. Nothing follows them if they
/// are the `end`: then a line feed at their end begins no line.
fn last_of(rotated: Vec<(File, u64)>, lines: usize, end: bool) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    for (file, length) in rotated.into_iter().rev() {
        let most = length.min(REMEMBERED.saturating_sub(text.len()) as u64);
        let mut more = Vec::new();
        copy_some(&file, length - most, most, &mut |bytes| {
            more.extend_from_slice(bytes);
            Ok(())
        })?;
        more.append(&mut text);
        text = more;
        let (from, missing) = last_lines(&text, lines, text.len().saturating_sub(usize::from(end)));
        if missing == 0 {
            return Ok(text.split_off(from));
        }
    }
    Ok(text)
}

fn open(path: &Beneath) -> io::Result<Option<File>> {
    match path.read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

fn numbered(path: &Beneath, n: usize) -> Beneath {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{n}"));
    path.with_file_name(name)
}

/// Copies all data from `at` on, without holes.
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

/// Copies at most `most` bytes from `at` on, including holes.
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

    use nix::fcntl::{FallocateFlags, fallocate};

    use super::*;

    struct Log {
        dir: tempfile::TempDir,
        tail: Tail,
        seen: Vec<u8>,
    }

    impl Log {
        fn new() -> Log {
            let dir = tempfile::tempdir().unwrap();
            let tail = Tail::new(&Beneath::at(&dir.path().join("log")).unwrap());
            Log { dir, tail, seen: Vec::new() }
        }

        fn file(&self) -> Beneath {
            Beneath::at(&self.dir.path().join("log")).unwrap()
        }

        fn write(&self, text: &str) {
            OpenOptions::new().append(true).create(true).open(self.file()).unwrap().write_all(text.as_bytes()).unwrap();
        }

        /// The first step of a rotation.
        fn move_away(&self) -> File {
            let _ = std::fs::rename(self.dir.path().join("log.1"), self.dir.path().join("log.2"));
            let piece = File::create_new(self.dir.path().join("new")).unwrap();
            piece.lock().unwrap();
            std::fs::copy(self.file(), self.dir.path().join("new")).unwrap();
            std::fs::rename(self.dir.path().join("new"), self.dir.path().join("log.1")).unwrap();
            piece
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
        // The same output again.
        log.cut(0);
        log.write("n 1\nn 2\nother\nn 4\n");
        log.sees("");
    }

    #[test]
    fn a_progress_bar_goes_back_to_the_frame_that_differs() {
        let mut log = Log::new();
        log.write("begin\n\rn 1 =\rn 2 =\rn 3 =");
        log.sees("begin\n\rn 1 =\rn 2 =\rn 3 =");
        log.cut(12);
        log.write("\rn 2 =\rm 3 =\rm 4 =");
        log.sees("\rm 3 =\rm 4 =");
        log.cut(6);
        log.write("end\n");
        log.sees("\nend\n");
    }

    #[test]
    fn a_rotation_that_begins_while_the_reader_compares_is_not_taken_for_a_cut() {
        let mut log = Log::new();
        let frames = |numbers: Range<u32>| -> String {
            numbers.map(|number| format!("\rn {number:4} {}", "=".repeat(1000))).collect()
        };
        log.write(&frames(0..20));
        log.sees(&frames(0..20));
        let (older, begin) = (settled(&log.file()).unwrap().unwrap(), 0);
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        std::fs::write(log.dir.path().join("log.1"), &frames(0..20).as_bytes()[..8192]).unwrap();
        fallocate(OpenOptions::new().write(true).open(log.file()).unwrap(), hole, 0, 8192).unwrap();
        let file = File::open(log.file()).unwrap();
        assert!(!log.tail.find_again(&file, &older, begin, &mut log.seen).unwrap(), "it looks again");
        assert_eq!(log.seen, b"");
        log.write(&frames(20..21));
        log.sees(&frames(20..21));
    }

    /// inotify wakes a reader between the two steps of a rotation.
    #[test]
    fn between_the_steps_of_a_rotation_nothing_is_shown_twice_or_left_out() {
        let mut log = Log::new();
        log.write("one\ntwo\n");
        log.sees("one\ntwo\n");
        log.write("three\n");
        for (written, seen) in [("four, which is longer\n", "three\n"), ("five\n", "four, which is longer\n")] {
            let (piece, file) = (log.move_away(), log.file());
            let second = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(50));
                OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
                drop(piece);
            });
            log.sees(seen);
            second.join().unwrap();
            log.write(written);
        }
        log.sees("five\n");
        let (piece, file) = (log.move_away(), log.file());
        let second = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            OpenOptions::new().write(true).open(&file).unwrap().set_len(0).unwrap();
            drop(piece);
        });
        let mut new = Tail::new(&log.file());
        new.copy_older(&mut log.seen).unwrap();
        new.copy(&mut log.seen).unwrap();
        second.join().unwrap();
        assert_eq!(String::from_utf8(std::mem::take(&mut log.seen)).unwrap(), "four, which is longer\nfive\n");
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
        let all = "a\nb\nc\nd\ne\n";
        for (lines, from) in [(0, 10), (1, 8), (2, 6), (3, 4), (4, 2), (5, 0), (9, 0), (usize::MAX, 0)] {
            log.tail = Tail::new(&log.file());
            log.tail.skip_to_last(lines, &mut log.seen).unwrap();
            log.sees(&all[from..]);
        }
        log.write("f\n");
        log.sees("f\n");
        // In the middle of a line, and with an empty file.
        log.write("g");
        log.rotate();
        for (written, all) in [("", "d\ne\nf\ng"), ("h\n", "d\ne\nf\ngh\n"), ("i", "e\nf\ngh\ni")] {
            log.write(written);
            for (lines, from) in [(3, all.find('\n').unwrap() + 1), (4, 0)] {
                log.tail = Tail::new(&log.file());
                log.tail.skip_to_last(lines, &mut log.seen).unwrap();
                log.sees(&all[from..]);
            }
        }
        log.write("k\n");
        log.sees("k\n");
    }
}

//! A job's output file as another process reads it: from its beginning, or on and on.
//!
//! The supervisor's own follower is told when a file is rotated or put back to an image ([`super::output`]). One from
//! outside finds out by what it has shown last: when that is no longer where it was, the file was rotated, and what comes
//! next is in NAME.1, or it was cut, and what differs from what was shown is new. What a job says again after a restart is
//! not shown twice: nothing comes until it says something else, or more.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

/// What was shown last and is remembered. A cut to before that shows what is there from then on.
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
    /// What was NAME.1 when the file began: the only sign of a rotation while nothing of the file was shown.
    older: Option<Signature>,
}

/// What tells a rotated file from others: inode, size, time of change in seconds and nanoseconds. It keeps that when it is
/// renamed.
type Signature = (u64, u64, i64, i64);

impl Tail {
    /// From the beginning of what is kept: older files first.
    #[must_use]
    pub fn new(path: &Path) -> Tail {
        Tail { path: path.into(), at: 0, shown: Vec::new(), older: signature(&numbered(path, 1)) }
    }

    /// Writes what rotations have kept of the time before the file itself.
    ///
    /// # Errors
    /// When it can not be read or written.
    pub fn copy_older(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let newest = self.rotated().next();
        self.older = newest;
        for n in (1..=self.rotated().count()).rev() {
            copy(&File::open(numbered(&self.path, n))?, 0, &mut |bytes| to.write_all(bytes))?;
        }
        Ok(())
    }

    /// Leaves out all but the last lines.
    ///
    /// # Errors
    /// When the file can not be read.
    pub fn skip_to_last(&mut self, lines: usize) -> io::Result<()> {
        let Some(file) = open(&self.path)? else { return Ok(()) };
        let length = file.metadata()?.len();
        let start = length.saturating_sub(REMEMBERED as u64);
        let mut bytes = Vec::new();
        copy(&file, start, &mut |more| {
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
    /// When it can not be read or written.
    pub fn copy(&mut self, to: &mut dyn Write) -> io::Result<()> {
        let Some(file) = open(&self.path)? else { return Ok(()) };
        let begun_anew = self.shown.is_empty() && self.rotated().next() != self.older;
        if begun_anew || !self.is_in(&file)? {
            self.find_again(&file, to)?;
        }
        self.copy_from(&file, to)?;
        to.flush()
    }

    fn copy_from(&mut self, file: &File, to: &mut dyn Write) -> io::Result<()> {
        let mut at = self.at;
        let shown = &mut self.shown;
        copy(file, at, &mut |bytes| {
            to.write_all(bytes)?;
            at += bytes.len() as u64;
            shown.extend_from_slice(bytes);
            if shown.len() > 2 * REMEMBERED {
                shown.drain(..shown.len() - REMEMBERED);
            }
            Ok(())
        })?;
        self.at = at;
        Ok(())
    }

    /// Whether what was shown last is still before `at`.
    fn is_in(&self, file: &File) -> io::Result<bool> {
        let last = self.shown.get(self.shown.len().saturating_sub(COMPARED)..).unwrap_or_default();
        let mut there = vec![0; last.len()];
        match file.read_exact_at(&mut there, self.at - last.len() as u64) {
            Ok(()) => Ok(there == last),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn find_again(&mut self, file: &File, to: &mut dyn Write) -> io::Result<()> {
        let all: Vec<Signature> = self.rotated().collect();
        let mut rotations = 0;
        if self.shown.is_empty() {
            rotations = all.iter().position(|one| Some(*one) == self.older).unwrap_or(all.len());
        } else {
            for n in 1..=all.len() {
                if self.is_in(&File::open(numbered(&self.path, n))?)? {
                    rotations = n;
                    break;
                }
            }
        }
        for n in (1..=rotations).rev() {
            self.copy_from(&File::open(numbered(&self.path, n))?, to)?;
            (self.at, self.shown) = (0, Vec::new());
        }
        self.older = all.first().copied();
        if rotations == 0 {
            self.go_back(file, to)?;
        }
        Ok(())
    }

    /// What rotations have left, the newest first.
    fn rotated(&self) -> impl Iterator<Item = Signature> {
        (1..).map_while(|n| signature(&numbered(&self.path, n)))
    }

    /// The file was cut, and perhaps written on: goes to the line that differs from what was shown, once there is one.
    fn go_back(&mut self, file: &File, to: &mut dyn Write) -> io::Result<()> {
        let begin = self.at - self.shown.len() as u64;
        let length = file.metadata()?.len();
        if length < begin {
            // Further back than is remembered.
            (self.at, self.shown) = (length, Vec::new());
            return Ok(());
        }
        let mut there = Vec::new();
        copy(file, begin, &mut |bytes| {
            there.extend_from_slice(bytes);
            Ok(())
        })?;
        let same = self.shown.iter().zip(&there).take_while(|(a, b)| a == b).count();
        if same == there.len() {
            return Ok(());
        }
        let line = self.shown.iter().take(same).rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
        if self.shown.last().is_some_and(|last| *last != b'\n') {
            to.write_all(b"\n")?;
        }
        self.shown.truncate(line);
        self.at = begin + line as u64;
        Ok(())
    }
}

fn signature(path: &Path) -> Option<Signature> {
    let meta = std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    Some((meta.ino(), meta.len(), meta.mtime(), meta.mtime_nsec()))
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

/// All from there on.
fn copy(file: &File, mut at: u64, to: &mut dyn FnMut(&[u8]) -> io::Result<()>) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK];
    loop {
        match file.read_at(&mut buffer, at)? {
            0 => return Ok(()),
            count => {
                to(buffer.get(..count).unwrap_or_default())?;
                at += count as u64;
            }
        }
    }
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

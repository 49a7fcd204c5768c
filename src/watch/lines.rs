//! Compares each new line of the job's output with the rules.
//!
//! A separate thread reads the output files, like the follower but without a terminal. Its cost is limited: it reads at
//! most every `REST`, at most `AT_ONCE` of each file, and skips the rest. Only the first `LINE` bytes of a line are
//! compared. Each rule is reported once per life.

use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use crate::config::{Match, Rule};
use rekindle_os::beneath;

/// Pause between two reads.
const REST: Duration = Duration::from_millis(50);
/// How soon a new life is noticed, which may have written output before, in milliseconds.
const TURN: u16 = 1000;
/// Maximum bytes of each file per read: 5 MB per second.
const AT_ONCE: u64 = 256 << 10;
/// Maximum bytes of a line.
const LINE: usize = 16 << 10;
/// Number of last lines that are compared at an end.
pub(crate) const LAST: usize = 200;
/// Bytes of each file that are read for those lines.
const LAST_BYTES: u64 = 256 << 10;

/// The present life, and the offsets where its output begins.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turn(Arc<Mutex<(u32, [u64; 2])>>);

impl Turn {
    /// A life begins, with these lengths of the files; 0 means none.
    pub(crate) fn set(&self, life: u32, from: [u64; 2]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = (life, from);
    }

    fn get(&self) -> (u32, [u64; 2]) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A line that matches a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hit {
    /// The life that wrote it.
    pub(crate) life: u32,
    /// The rule, counted from 0.
    pub(crate) rule: usize,
    /// The line, shortened.
    pub(crate) line: String,
}

/// Compares output with the rules; ends when `report` returns false. Returns at once without such a rule.
///
/// # Errors
/// When the files cannot be watched.
pub(crate) fn watch(
    files: [Arc<File>; 2],
    rules: &[Rule],
    turn: &Turn,
    report: impl Fn(Hit) -> bool,
) -> io::Result<()> {
    let rules: Vec<(usize, Match)> = rules
        .iter()
        .enumerate()
        .filter(|(_, rule)| rule.matches.is_of_output())
        .map(|(n, rule)| (n, rule.matches.clone()))
        .collect();
    if rules.is_empty() {
        return Ok(());
    }
    let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    for file in &files {
        watch.add_watch(beneath::own(&**file).as_str(), AddWatchFlags::IN_MODIFY)?;
    }
    let mut tails = files.map(Tail::of);
    let (mut life, mut told) = (0, BTreeSet::new());
    loop {
        let (now, from) = turn.get();
        if now != life {
            life = now;
            told.clear();
            for (tail, from) in tails.iter_mut().zip(from) {
                tail.begin(from);
            }
        }
        for tail in tails.iter_mut().filter(|_| life != 0) {
            for line in tail.lines() {
                for (n, _) in rules.iter().filter(|(_, rule)| rule.line(&line)) {
                    if told.insert(*n) && !report(Hit { life, rule: *n, line: shown(&line) }) {
                        return Ok(());
                    }
                }
            }
        }
        std::thread::sleep(REST);
        let _ = poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], PollTimeout::from(TURN));
        let _ = watch.read_events();
    }
}

/// A line shortened for people.
#[must_use]
pub(crate) fn shown(line: &[u8]) -> String {
    const SHOWN: usize = 300;
    String::from_utf8_lossy(line).chars().map(|c| if c.is_control() { ' ' } else { c }).take(SHOWN).collect()
}

/// The last lines that a life wrote to both files; it began at these lengths.
#[must_use]
pub(crate) fn last(files: [Arc<File>; 2], from: [u64; 2]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for (file, from) in files.into_iter().zip(from) {
        let mut tail = Tail::of(file);
        // A shorter file was rotated in this life.
        let length = tail.length();
        let from = if from <= length { from } else { 0 };
        tail.begin(from.max(length.saturating_sub(LAST_BYTES)));
        let mut lines = tail.lines();
        // Text without a line end counts, too.
        lines.extend(Some(std::mem::take(&mut tail.rest)).filter(|rest| !rest.is_empty()));
        let beyond = lines.len().saturating_sub(LAST);
        all.extend(lines.into_iter().skip(beyond));
    }
    all
}

#[derive(Debug)]
struct Tail {
    file: Arc<File>,
    at: u64,
    /// The beginning of an incomplete line.
    rest: Vec<u8>,
    /// The last line ended with a carriage return.
    returned: bool,
}

impl Tail {
    fn of(file: Arc<File>) -> Tail {
        Tail { file, at: 0, rest: Vec::new(), returned: false }
    }

    fn length(&self) -> u64 {
        self.file.metadata().map_or(0, |meta| meta.len())
    }

    fn begin(&mut self, from: u64) {
        self.at = from;
        self.rest.clear();
        self.returned = false;
    }

    /// The lines completed since the last call, within the limits.
    fn lines(&mut self) -> Vec<Vec<u8>> {
        let length = self.length();
        if length < self.at {
            // The file was rotated or cut.
            self.begin(0);
        }
        if length - self.at > AT_ONCE {
            self.begin(length - AT_ONCE);
        }
        let mut bytes = vec![0; usize::try_from(length - self.at).unwrap_or(0)];
        let Ok(count) = self.file.read_at(&mut bytes, self.at) else { return Vec::new() };
        bytes.truncate(count);
        self.at += count as u64;
        let mut lines: Vec<Vec<u8>> = Vec::new();
        // A progress bar writes its line anew after each carriage return.
        for part in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            // The two together end one line.
            if std::mem::take(&mut self.returned) && part == b"\n" {
                continue;
            }
            self.rest.extend(part);
            let Some(end) = self.rest.pop_if(|byte| matches!(byte, b'\n' | b'\r')) else { continue };
            self.returned = end == b'\r';
            lines.push(std::mem::take(&mut self.rest));
        }
        lines.iter_mut().for_each(|line| line.truncate(LINE));
        self.rest.truncate(LINE);
        lines
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;
    use std::path::Path;
    use std::sync::mpsc;

    use super::*;
    use crate::config::RuleAction;

    fn open(path: &Path) -> Arc<File> {
        Arc::new(File::open(path).unwrap())
    }

    fn texts(lines: Vec<Vec<u8>>) -> Vec<String> {
        lines.into_iter().map(|line| String::from_utf8(line).unwrap()).collect()
    }

    fn rule(text: &str) -> Rule {
        Rule { matches: toml::from_str(text).unwrap(), action: RuleAction::Rewind, images: None, max_rewinds: None }
    }

    #[test]
    fn lines_come_whole_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, "old\n").unwrap();
        let mut tail = Tail::of(open(&path));
        tail.begin(4);
        let mut writer = OpenOptions::new().append(true).open(&path).unwrap();
        write!(writer, "one\ntw").unwrap();
        assert_eq!(texts(tail.lines()), ["one"]);
        write!(writer, "o\n\nthree").unwrap();
        assert_eq!(texts(tail.lines()), ["two", ""]);
        assert_eq!(texts(tail.lines()), [""; 0]);
        // A progress bar, and lines as Windows has them.
        write!(writer, "\rloss=1\rloss=nan\rcrlf\r\n\r").unwrap();
        assert_eq!(texts(tail.lines()), ["three", "loss=1", "loss=nan", "crlf", ""]);
        write!(writer, "\nthree").unwrap();
        assert_eq!(texts(tail.lines()), [""; 0]);
        write!(writer, "{}\nend\n", "x".repeat(2 * LINE)).unwrap();
        let long = texts(tail.lines());
        assert_eq!((long[0].len(), long[1].as_str()), (LINE, "end"));
        // Rotated.
        writer.set_len(0).unwrap();
        writeln!(writer, "anew").unwrap();
        assert_eq!(texts(tail.lines()), ["anew"]);
        // After a flood, only the end is read.
        for _ in 0..100 {
            writeln!(writer, "{}", "y".repeat(9999)).unwrap();
        }
        writeln!(writer, "last").unwrap();
        let flood = texts(tail.lines());
        assert!(flood.len() < 30, "{}", flood.len());
        assert_eq!(flood.last().unwrap(), "last");
    }

    #[test]
    fn the_last_lines_are_those_of_the_life() {
        let dir = tempfile::tempdir().unwrap();
        let (out, err) = (dir.path().join("out"), dir.path().join("err"));
        std::fs::write(&out, "before\nduring\nno end").unwrap();
        std::fs::write(&err, "short\n").unwrap();
        assert_eq!(texts(last([open(&out), open(&err)], [7, 99])), ["during", "no end", "short"]);
        std::fs::write(&out, (0..999).map(|n| format!("{n}\n")).collect::<String>()).unwrap();
        let lines = texts(last([open(&out), open(&err)], [0, 6]));
        assert_eq!((lines.len(), lines[0].as_str(), lines[199].as_str()), (LAST, "799", "998"));
    }

    #[test]
    fn a_rule_is_reported_once_for_each_life_and_not_for_lines_before_it() {
        let dir = tempfile::tempdir().unwrap();
        let files = [dir.path().join("out"), dir.path().join("err")];
        std::fs::write(&files[0], "loss nan\n").unwrap();
        std::fs::write(&files[1], "").unwrap();
        let rules = [rule("exit-code = 3\nlog = 'nan'"), rule("log = 'loss nan'"), rule("log = 'fire'")];
        let turn = Turn::default();
        turn.set(1, [9, 0]);
        let (sender, hits) = mpsc::channel();
        let (opened, thread_turn) = ([open(&files[0]), open(&files[1])], turn.clone());
        std::thread::spawn(move || watch(opened, &rules, &thread_turn, |hit| sender.send(hit).is_ok()).unwrap());
        let mut writer = OpenOptions::new().append(true).open(&files[0]).unwrap();
        // Wait until the thread watches.
        let first = loop {
            writeln!(writer, "loss nan").unwrap();
            if let Ok(hit) = hits.recv_timeout(Duration::from_millis(20)) {
                break hit;
            }
        };
        assert_eq!(first, Hit { life: 1, rule: 1, line: "loss nan".into() });
        std::fs::write(&files[1], "the disk is on fire\n").unwrap();
        let second = hits.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!((second.rule, second.line.as_str()), (2, "the disk is on fire"));
        let length = writer.metadata().unwrap().len();
        turn.set(2, [length, 20]);
        writeln!(writer, "loss nan").unwrap();
        let again = hits.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!((again.life, again.rule), (2, 1));
        assert!(hits.recv_timeout(Duration::from_millis(200)).is_err(), "once");
    }
}

//! Reads a journal of events while it grows.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use super::events::{Event, FILE_NAME, Lines};
use rekindle_os::beneath::Beneath;

/// The position in a job's journal.
#[derive(Debug)]
pub(crate) struct Tail {
    logs: Beneath,
    file: Option<File>,
    lines: Lines,
    began: bool,
}

impl Tail {
    /// Starts at the beginning of the journal in a job's log folder.
    #[must_use]
    pub(crate) fn of(logs: &Beneath) -> Tail {
        Tail { logs: logs.clone(), file: None, lines: Lines::default(), began: false }
    }

    /// The events since the last call, oldest first. Lines that cannot be parsed are skipped.
    ///
    /// # Errors
    /// When the journal cannot be read.
    pub(crate) fn more(&mut self) -> io::Result<Vec<Event>> {
        let mut events = Vec::new();
        if !std::mem::replace(&mut self.began, true) {
            self.file = open(&self.logs.join(format!("{FILE_NAME}.1")))?;
        }
        self.read(&mut events)?;
        let newest = open(&self.logs.join(FILE_NAME))?;
        let same = |a: &File, b: &File| Ok::<_, io::Error>(a.metadata()?.ino() == b.metadata()?.ino());
        if let Some(newest) = newest
            && !self.file.as_ref().map(|file| same(file, &newest)).transpose()?.unwrap_or(false)
        {
            // The journal was moved, and may have grown before: the rest of the old one is read first.
            self.read(&mut events)?;
            self.lines = Lines::default();
            self.file = Some(newest);
            self.read(&mut events)?;
        }
        Ok(events)
    }

    fn read(&mut self, events: &mut Vec<Event>) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), |file| self.lines.read(file, events))
    }
}

fn open(path: &Beneath) -> io::Result<Option<File>> {
    match path.read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    use super::*;
    use crate::telemetry::events::What;
    use rekindle_store::manifest::Reason;

    fn line(run: &str) -> String {
        let event = Event::now(run, What::SnapshotBegan { reason: Reason::Signal });
        serde_json::to_string(&event).unwrap() + "\n"
    }

    fn runs(tail: &mut Tail) -> Vec<String> {
        tail.more().unwrap().into_iter().map(|event| event.run).collect()
    }

    #[test]
    fn each_event_comes_once_also_when_the_journal_is_moved() {
        let dir = tempfile::tempdir().unwrap();
        let (path, older) = (dir.path().join(FILE_NAME), dir.path().join("events.jsonl.1"));
        let append = |text: &str| {
            let mut file = OpenOptions::new().append(true).create(true).open(&path).unwrap();
            file.write_all(text.as_bytes()).unwrap();
        };
        let mut tail = Tail::of(&Beneath::at(dir.path()).unwrap());
        assert!(runs(&mut tail).is_empty());
        fs::write(&older, line("0")).unwrap();
        let mut tail = Tail::of(&Beneath::at(dir.path()).unwrap());
        append(&line("1"));
        assert_eq!(runs(&mut tail), ["0", "1"]);
        let (begin, end) = (line("2")[..20].to_owned(), line("2")[20..].to_owned());
        append(&begin);
        assert!(runs(&mut tail).is_empty());
        append(&end);
        append("rubbish\n");
        append(&line("3"));
        assert_eq!(runs(&mut tail), ["2", "3"]);
        append(&line("4"));
        fs::rename(&path, &older).unwrap();
        append(&line("5"));
        assert_eq!(runs(&mut tail), ["4", "5"]);
        assert!(runs(&mut tail).is_empty());
        // Others have put a link there: what it leads to is not shown.
        fs::rename(&path, dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("moved", &path).unwrap();
        append(&line("6"));
        let error = tail.more().unwrap_err();
        assert!(
            error.to_string().ends_with("events.jsonl is a symbolic link, and should be a regular file"),
            "{error}"
        );
    }

    #[test]
    fn a_line_or_a_file_that_is_too_long_is_skipped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        fs::write(&path, line("1") + &line("2")[..20]).unwrap();
        let mut tail = Tail::of(&Beneath::at(dir.path()).unwrap());
        assert_eq!(runs(&mut tail), ["1"]);
        for _ in 0..2 {
            let mut file = OpenOptions::new().append(true).open(&path).unwrap();
            file.set_len(file.metadata().unwrap().len() + (1 << 40)).unwrap();
            assert!(tail.more().unwrap().is_empty());
            file.write_all(("\n".to_owned() + &line("3")).as_bytes()).unwrap();
            assert_eq!(runs(&mut tail), ["3"]);
        }
    }
}

//! The job's output: files it writes itself, followed to our terminal, rotated while it stands still.
//!
//! The job holds the files open with O_APPEND. So it survives our death, a restored job writes on in the same file (CRIU
//! checks neither size nor offset of such a descriptor), and a file that is cut is written on from its new end.
//! Rotation copies the file away and empties it. Lines written between the two would be lost; that is why it happens in a
//! snapshot, while the job is frozen ([`Files::rotate`]). A restart puts the files back to their length at the snapshot
//! ([`Files::hold`]). Both tell the follower, which may be far behind: from the length of a file alone it could not see that
//! one was cut and has grown past where it had read to.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

/// The two files of a job.
#[derive(Debug, Clone)]
pub struct Files {
    /// Standard output.
    pub stdout: PathBuf,
    /// Standard error.
    pub stderr: PathBuf,
    /// What the follower has yet to see of each. Held over a change and over each read of the follower, never while it
    /// writes: a terminal that is slow must not lengthen a freeze.
    changes: Arc<Mutex<Changes>>,
}

/// Of standard output and standard error, the oldest first.
type Changes = [VecDeque<Change>; 2];

/// What happened to a file, other than that it grew.
#[derive(Debug)]
enum Change {
    /// It was moved to NAME.1, and began anew.
    Rotated,
    /// It was put back to this length; what was cut is in the other file.
    Cut { to: u64, kept: PathBuf },
}

/// An output file can not be used.
#[derive(Debug, thiserror::Error)]
#[error("can not {verb} the output file {path}")]
pub struct Error {
    verb: &'static str,
    path: PathBuf,
    #[source]
    source: io::Error,
}

fn error(verb: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error { verb, path, source }
}

impl Files {
    /// The files in a job's log folder, created when they are not there.
    ///
    /// # Errors
    /// When they can not be created.
    pub fn create(dir: &Path) -> Result<Files, Error> {
        let (stdout, stderr) = (dir.join("stdout.log"), dir.join("stderr.log"));
        let files = Files { stdout, stderr, changes: Arc::default() };
        for path in [&files.stdout, &files.stderr] {
            OpenOptions::new().append(true).create(true).mode(0o600).open(path).map_err(error("create", path))?;
        }
        Ok(files)
    }

    /// Moves what is longer than `limit` bytes to NAME.1, and NAME.1 to NAME.2, up to `keep` of them. Only for a job that
    /// stands still: nothing may be written between the copy and the cut.
    ///
    /// # Errors
    /// When a file can not be copied; it is not cut then.
    pub fn rotate(&self, limit: u64, keep: u32) -> Result<(), Error> {
        let mut changes = lock(&self.changes);
        for (path, changes) in [&self.stdout, &self.stderr].into_iter().zip(changes.iter_mut()) {
            let length = std::fs::metadata(path).map_err(error("look at", path))?.len();
            if length > limit {
                rotate(path, keep).map_err(error("rotate", path))?;
                changes.push_back(Change::Rotated);
            }
        }
        Ok(())
    }

    /// Keeps the follower from reading while files are put back to what they were.
    #[must_use]
    pub fn hold(&self) -> Held<'_> {
        Held { files: self, changes: lock(&self.changes) }
    }
}

/// Output files that nobody reads.
#[derive(Debug)]
pub struct Held<'a> {
    files: &'a Files,
    changes: MutexGuard<'a, Changes>,
}

impl Held<'_> {
    /// Tells the follower that this file was cut to `to` bytes, and that what was behind that is in `kept` now. Nothing
    /// happens where it is none of ours.
    pub fn was_cut(&mut self, path: &Path, to: u64, kept: &Path) {
        for (ours, changes) in [&self.files.stdout, &self.files.stderr].into_iter().zip(self.changes.iter_mut()) {
            if ours == path {
                changes.push_back(Change::Cut { to, kept: kept.to_owned() });
            }
        }
    }
}

fn lock(changes: &Mutex<Changes>) -> MutexGuard<'_, Changes> {
    changes.lock().unwrap_or_else(PoisonError::into_inner)
}

fn numbered(path: &Path, n: u32) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{n}"));
    name.into()
}

fn rotate(path: &Path, keep: u32) -> io::Result<()> {
    if keep > 0 {
        for n in (1..keep).rev() {
            match std::fs::rename(numbered(path, n), numbered(path, n + 1)) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
                _ => {}
            }
        }
        // A log is not worth an fsync within a freeze: the image does not need it.
        std::fs::copy(path, numbered(path, 1))?;
    }
    OpenOptions::new().write(true).open(path)?.set_len(0)
}

/// Copies what the job writes to our own standard output and error.
#[derive(Debug)]
pub struct Follower {
    thread: Option<JoinHandle<()>>,
    stop: Arc<EventFd>,
}

impl Follower {
    /// Follows from the files' present end.
    ///
    /// # Errors
    /// When they can not be watched.
    pub fn start(files: &Files) -> io::Result<Follower> {
        Follower::copy_to(files, Box::new(io::stdout()), Box::new(io::stderr()))
    }

    fn copy_to(files: &Files, out: Box<dyn Write + Send>, err: Box<dyn Write + Send>) -> io::Result<Follower> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        let mut tails = [Tail::new(files, 0, out, &watch)?, Tail::new(files, 1, err, &watch)?];
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let stopped = Arc::clone(&stop);
        let run = move || {
            loop {
                tails.iter_mut().for_each(Tail::copy);
                let mut fds =
                    [PollFd::new(watch.as_fd(), PollFlags::POLLIN), PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
                // No time limit: an idle job costs nothing.
                let _ = poll(&mut fds, PollTimeout::NONE);
                let ending = fds[1].any().unwrap_or(false);
                let _ = watch.read_events();
                if ending {
                    return tails.iter_mut().for_each(Tail::copy);
                }
            }
        };
        let thread = std::thread::Builder::new().name("follow".into()).spawn(run)?;
        Ok(Follower { thread: Some(thread), stop })
    }
}

impl Drop for Follower {
    /// Copies what is left, then ends.
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Tail {
    path: PathBuf,
    file: File,
    at: u64,
    to: Box<dyn Write + Send>,
    changes: Arc<Mutex<Changes>>,
    /// Which of the two it is.
    which: usize,
}

impl Tail {
    fn new(files: &Files, which: usize, to: Box<dyn Write + Send>, watch: &Inotify) -> io::Result<Tail> {
        let path = if which == 0 { &files.stdout } else { &files.stderr };
        let file = File::open(path)?;
        watch.add_watch(path, AddWatchFlags::IN_MODIFY)?;
        let mut changes = lock(&files.changes);
        // Nobody else follows: what happened before is of no interest.
        changes[which].clear();
        let at = file.metadata()?.len();
        drop(changes);
        Ok(Tail { path: path.clone(), at, file, to, changes: Arc::clone(&files.changes), which })
    }

    fn copy(&mut self) {
        let mut buffer = [0u8; 16 << 10];
        while let Ok(count @ 1..) = self.read(&mut buffer) {
            // A terminal that went away must not end the job: what can not be shown is still in the file.
            let _ = self.to.write_all(buffer.get(..count).unwrap_or_default());
        }
        let _ = self.to.flush();
    }

    /// What comes next: from the file itself, or from where it went meanwhile.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut changes = lock(&self.changes);
        let changes = &mut changes[self.which];
        while let Some(change) = changes.front() {
            let next = match change {
                Change::Rotated => 0,
                Change::Cut { to, .. } => *to,
            };
            if let Ok(count @ 1..) = read_before(&self.path, &self.file, changes, self.at, buffer) {
                self.at += count as u64;
                return Ok(count);
            }
            // All of it was shown, or it is not kept any more and can not be.
            self.at = next;
            changes.pop_front();
        }
        // Emptied by somebody else.
        self.at = self.at.min(self.file.metadata()?.len());
        let count = self.file.read_at(buffer, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

/// Reads what was at `at` before these changes, from the file that has it now.
fn read_before(path: &Path, file: &File, changes: &VecDeque<Change>, at: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut room = buffer.len();
    for (n, change) in changes.iter().enumerate() {
        match change {
            Change::Rotated => {
                let later = changes.iter().skip(n).filter(|change| matches!(change, Change::Rotated)).count();
                let rotated = File::open(numbered(path, u32::try_from(later).unwrap_or(u32::MAX)))?;
                return rotated.read_at(buffer.get_mut(..room).unwrap_or_default(), at);
            }
            Change::Cut { to, kept } if at >= *to => {
                return File::open(kept)?.read_at(buffer.get_mut(..room).unwrap_or_default(), at - to);
            }
            // It stayed where it was, up to there.
            Change::Cut { to, .. } => room = room.min(usize::try_from(to - at).unwrap_or(usize::MAX)),
        }
    }
    file.read_at(buffer.get_mut(..room).unwrap_or_default(), at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_keeps_every_byte_up_to_the_number_kept() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::create(dir.path()).unwrap();
        let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
        for round in 1..=4 {
            write!(writer, "round {round}").unwrap();
            files.rotate(3, 2).unwrap();
        }
        write!(writer, "on").unwrap();
        files.rotate(3, 2).unwrap();
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!(read("stdout.log"), "on");
        assert_eq!((read("stdout.log.1"), read("stdout.log.2")), ("round 4".into(), "round 3".into()));
        assert!(!dir.path().join("stdout.log.3").exists());
    }

    /// Where a follower writes in a test.
    #[derive(Clone, Default)]
    struct Screen(Arc<std::sync::Mutex<Vec<u8>>>);

    impl Write for Screen {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Screen {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }

        fn shows(&self, text: &str) {
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
            while self.text() != text {
                assert!(std::time::Instant::now() < deadline, "{:?} is not {text:?}", self.text());
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }

    #[test]
    fn a_follower_shows_what_is_new_through_cuts_and_to_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::create(dir.path()).unwrap();
        std::fs::write(&files.stdout, "old\n").unwrap();
        let (out, err) = (Screen::default(), Screen::default());
        let follower = Follower::copy_to(&files, Box::new(out.clone()), Box::new(err.clone())).unwrap();
        let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
        writeln!(writer, "one").unwrap();
        out.shows("one\n");
        // Rotated: the follower sees the cut before the job, which stands still in a rotation, writes on.
        rotate(&files.stdout, 1).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        writeln!(writer, "two").unwrap();
        out.shows("one\ntwo\n");
        // Put back to what an image says, in the middle of what was shown.
        writer.set_len(2).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        std::fs::write(&files.stderr, "last words").unwrap();
        writeln!(writer, "X").unwrap();
        drop(follower);
        assert_eq!((out.text().as_str(), err.text().as_str()), ("one\ntwo\nX\n", "last words"));
    }

    /// One that is far behind sees all of it: the last words of a life, and all lines of the next, though the file has
    /// grown past where it had read to.
    #[test]
    fn nothing_is_lost_on_a_slow_terminal() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::create(dir.path()).unwrap();
        let screen = Screen::default();
        let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
        let mut tail = Tail::new(&files, 0, Box::new(screen.clone()), &watch).unwrap();
        let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
        let cut = |to: u64, n: u32| {
            let mut held = files.hold();
            let kept = numbered(&files.stdout, n);
            let bytes = std::fs::read(&files.stdout).unwrap();
            std::fs::write(&kept, &bytes[usize::try_from(to).unwrap()..]).unwrap();
            OpenOptions::new().write(true).open(&files.stdout).unwrap().set_len(to).unwrap();
            held.was_cut(&files.stdout, to, &kept);
            held.was_cut(&dir.path().join("another"), 0, &kept);
        };
        write!(writer, "1 2 3 4 ").unwrap();
        tail.copy();
        // Seen in part, then cut to before that, and grown past it.
        write!(writer, "last ").unwrap();
        cut(4, 91);
        write!(writer, "3 4 5 6 7 8 9 ").unwrap();
        tail.copy();
        assert_eq!(screen.text(), "1 2 3 4 last 3 4 5 6 7 8 9 ");
        // Behind what was seen; twice, the second time to before that; rotated in between.
        let length = || std::fs::metadata(&files.stdout).unwrap().len();
        let seen = length();
        write!(writer, "a b c ").unwrap();
        cut(seen + 4, 92);
        write!(writer, "C ").unwrap();
        cut(seen - 2, 93);
        write!(writer, "X ").unwrap();
        files.rotate(1, 3).unwrap();
        write!(writer, "D E ").unwrap();
        cut(2, 94);
        files.rotate(1, 3).unwrap();
        write!(writer, "F ").unwrap();
        tail.copy();
        let all = "1 2 3 4 last 3 4 5 6 7 8 9 a b c C X D E F ";
        assert_eq!(screen.text(), all);
        // What is not kept any more can not be shown: the next is.
        write!(writer, "gone ").unwrap();
        cut(2, 95);
        std::fs::remove_file(numbered(&files.stdout, 95)).unwrap();
        write!(writer, "G ").unwrap();
        tail.copy();
        assert_eq!(screen.text(), format!("{all}G "));
    }

    #[test]
    fn a_file_that_can_not_be_copied_is_not_cut() {
        let dir = tempfile::tempdir().unwrap();
        let files = Files::create(dir.path()).unwrap();
        std::fs::write(&files.stdout, "precious").unwrap();
        std::fs::create_dir(dir.path().join("stdout.log.1")).unwrap();
        assert!(files.rotate(3, 1).is_err());
        assert_eq!(std::fs::read_to_string(&files.stdout).unwrap(), "precious");
    }
}

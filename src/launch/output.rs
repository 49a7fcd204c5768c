//! The job's output: files it writes itself, followed to our terminal, rotated while it stands still.
//!
//! The job holds the files open with O_APPEND. So it survives our death, a restored job writes on in the same file (CRIU
//! checks neither size nor offset of such a descriptor), and a file that is cut is written on from its new end.
//! Rotation copies the file away and empties it. Lines written between the two would be lost; that is why it happens in a
//! snapshot, while the job is frozen ([`Files::rotate`]).

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
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
    /// How often each was rotated. Held over a rotation and over each read of a follower, never while it writes: a
    /// terminal that is slow must not lengthen a freeze.
    rotations: Arc<Mutex<[u32; 2]>>,
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
        let files = Files { stdout, stderr, rotations: Arc::default() };
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
        let mut rotations = lock(&self.rotations);
        for (path, count) in [&self.stdout, &self.stderr].into_iter().zip(rotations.iter_mut()) {
            let length = std::fs::metadata(path).map_err(error("look at", path))?.len();
            if length > limit {
                rotate(path, keep).map_err(error("rotate", path))?;
                *count += 1;
            }
        }
        Ok(())
    }
}

fn lock(rotations: &Mutex<[u32; 2]>) -> MutexGuard<'_, [u32; 2]> {
    rotations.lock().unwrap_or_else(PoisonError::into_inner)
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
    rotations: Arc<Mutex<[u32; 2]>>,
    /// Which of the two it is.
    which: usize,
    /// Rotations that were seen.
    seen: u32,
}

impl Tail {
    fn new(files: &Files, which: usize, to: Box<dyn Write + Send>, watch: &Inotify) -> io::Result<Tail> {
        let path = if which == 0 { &files.stdout } else { &files.stderr };
        let file = File::open(path)?;
        watch.add_watch(path, AddWatchFlags::IN_MODIFY)?;
        let rotations = Arc::clone(&files.rotations);
        let seen = lock(&rotations)[which];
        Ok(Tail { path: path.clone(), at: file.metadata()?.len(), file, to, rotations, which, seen })
    }

    fn copy(&mut self) {
        let mut buffer = [0u8; 16 << 10];
        while let Ok(count @ 1..) = self.read(&mut buffer) {
            // A terminal that went away must not end the job: what can not be shown is still in the file.
            let _ = self.to.write_all(buffer.get(..count).unwrap_or_default());
        }
        let _ = self.to.flush();
    }

    /// What comes next, from the file itself or from the one it was rotated to meanwhile.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let rotations = lock(&self.rotations);
        while self.seen < rotations[self.which] {
            // Older ones that are not kept any more can not be shown.
            if let Ok(mut rotated) = File::open(numbered(&self.path, rotations[self.which] - self.seen)) {
                rotated.seek(SeekFrom::Start(self.at))?;
                let count = rotated.read(buffer)?;
                self.at += count as u64;
                if count > 0 {
                    return Ok(count);
                }
            }
            self.seen += 1;
            self.at = 0;
        }
        // Put back to the length it had at a snapshot.
        self.at = self.at.min(self.file.metadata()?.len());
        self.file.seek(SeekFrom::Start(self.at))?;
        let count = self.file.read(buffer)?;
        self.at += count as u64;
        Ok(count)
    }
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

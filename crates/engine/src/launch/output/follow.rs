//! The follower: copies the output to our own terminal, through rotations and cuts.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::{Change, Files, States, lock, numbered};
use rekindle_os::beneath::{self, Beneath};
use rekindle_os::sparse;

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
    /// When they cannot be watched.
    pub fn start(files: &Files) -> io::Result<Follower> {
        // Descriptors of its own: a write blocks if nobody reads, and the standard library holds its lock meanwhile, in
        // which everybody else who writes there would wait.
        let own = |ours: BorrowedFd<'_>| ours.try_clone_to_owned().map(File::from);
        let (out, err) = (own(io::stdout().as_fd())?, own(io::stderr().as_fd())?);
        Follower::copy_to(files, Box::new(out), Box::new(err))
    }

    /// The same where nobody looks: what happens to the files is noted for a follower, who must keep up with it.
    ///
    /// # Errors
    /// When they cannot be watched.
    pub fn silent(files: &Files) -> io::Result<Follower> {
        Follower::copy_to(files, Box::new(io::sink()), Box::new(io::sink()))
    }

    pub(super) fn copy_to(
        files: &Files,
        out: Box<dyn Write + Send>,
        err: Box<dyn Write + Send>,
    ) -> io::Result<Follower> {
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
    /// Copies the remaining output, then ends.
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub(super) struct Tail {
    path: Beneath,
    file: Arc<File>,
    at: u64,
    to: Box<dyn Write + Send>,
    states: Arc<Mutex<States>>,
    /// Index of the file: standard output or standard error.
    which: usize,
}

impl Tail {
    pub(super) fn new(files: &Files, which: usize, to: Box<dyn Write + Send>, watch: &Inotify) -> io::Result<Tail> {
        let path = if which == 0 { &files.stdout } else { &files.stderr };
        let file = files.file(which)?;
        watch.add_watch(beneath::own(&*file).as_str(), AddWatchFlags::IN_MODIFY)?;
        let mut states = lock(&files.states);
        // There is no other follower, so earlier changes do not matter.
        states[which].changes.clear();
        let at = file.metadata()?.len();
        drop(states);
        Ok(Tail { path: path.clone(), at, file, to, states: Arc::clone(&files.states), which })
    }

    pub(super) fn copy(&mut self) {
        let mut buffer = [0u8; 16 << 10];
        while let Ok(count @ 1..) = self.read(&mut buffer) {
            // A terminal that is gone must not end the job: the output is still in the file.
            let _ = self.to.write_all(buffer.get(..count).unwrap_or_default());
        }
        let _ = self.to.flush();
    }

    /// Reads the next output: from the file itself, or from where it was moved meanwhile.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut states = lock(&self.states);
        let changes = &mut states[self.which].changes;
        while let Some(change) = changes.front() {
            let next = match change {
                Change::Moved { to, .. } | Change::Lost { to } => self.at.max(*to),
                Change::Emptied => 0,
                Change::Cut { to, .. } => *to,
            };
            let is_over = matches!(change, Change::Moved { to, .. } | Change::Lost { to } if self.at >= *to);
            if !is_over && let Ok(count @ 1..) = read_before(&self.path, &self.file, changes, &mut self.at, buffer) {
                return Ok(count);
            }
            // All of it was shown, or it is lost.
            self.at = next;
            changes.pop_front();
        }
        let length = self.file.metadata()?.len();
        // Somebody else emptied the file.
        self.at = self.at.min(length);
        let mut end = self.at;
        let count = read_data(&self.file, &mut end, length, buffer)?;
        self.at = end;
        Ok(count)
    }
}

/// Reads the next data at or behind `at`, skipping holes, and moves `at` to its end.
fn read_data(file: &File, at: &mut u64, end: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let Some(data) = sparse::next_data(file, *at, end)? else {
        *at = end.max(*at);
        return Ok(0);
    };
    let room = usize::try_from(data.end - data.start).unwrap_or(usize::MAX).min(buffer.len());
    let count = file.read_at(buffer.get_mut(..room).unwrap_or_default(), data.start)?;
    *at = data.start + count as u64;
    Ok(count)
}

/// Reads what was at `at` before these changes, from the file that has it now, and moves `at` to its end.
fn read_before(
    path: &Beneath,
    file: &File,
    changes: &VecDeque<Change>,
    at: &mut u64,
    buffer: &mut [u8],
) -> io::Result<usize> {
    let mut end = u64::MAX;
    for (n, change) in changes.iter().enumerate() {
        match change {
            Change::Moved { from, to } if *at < *to => {
                *at = (*at).max(*from);
                let later = changes.iter().skip(n).filter(|change| matches!(change, Change::Moved { .. })).count();
                let rotated = numbered(path, u32::try_from(later).unwrap_or(u32::MAX)).read()?;
                return read_from(&rotated, *from, at, end.min(*to), buffer);
            }
            Change::Lost { to } if *at < *to => return Ok(0),
            Change::Moved { .. } | Change::Lost { .. } => {}
            Change::Emptied => return Ok(0),
            Change::Cut { to, from, kept } if *at >= *to => {
                *at = (*at).max(*from);
                let Some(kept) = kept else { return Ok(0) };
                return read_from(&kept.read()?, *from, at, end, buffer);
            }
            // Content before `to` was not cut.
            Change::Cut { to, .. } => end = end.min(*to),
        }
    }
    read_from(file, 0, at, end, buffer)
}

/// Reads from a file whose beginning was at offset `base`.
fn read_from(file: &File, base: u64, at: &mut u64, end: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let end = file.metadata()?.len().min(end.saturating_sub(base));
    let mut inside = *at - base;
    let count = read_data(file, &mut inside, end, buffer)?;
    if count > 0 {
        *at = base + inside;
    }
    Ok(count)
}

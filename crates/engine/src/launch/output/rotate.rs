//! Rotation: in a snapshot the file is emptied; between snapshots the copied part becomes a hole.

use std::fs::{File, Metadata, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::{Bounds, Change, Files, State, States, lock, numbered};
use rekindle_base::chain;
use rekindle_os::beneath::{self, Beneath};
use rekindle_os::durable::Unfinished;
use rekindle_os::sparse;

/// Makes room for a new NAME.1.
fn shift(path: &Beneath, keep: u32) -> io::Result<()> {
    for n in (1..keep).rev() {
        match numbered(path, n).rename(&numbered(path, n + 1)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
    }
    Ok(())
}

/// Makes a piece NAME.1. While the returned file is open, readers from outside know that the content of the piece may
/// still be in the file too ([`is_being_rotated`]).
fn publish(path: &Beneath, piece: Unfinished, keep: u32) -> io::Result<File> {
    let locked = piece.file().try_clone()?;
    // Nobody else knows the file yet. A file system without locks only lacks the protection of readers.
    let _ = locked.try_lock();
    shift(path, keep)?;
    piece.replace(&numbered(path, 1))?;
    Ok(locked)
}

/// Whether the content of the newest rotated file may still be in the file that it was moved from.
pub(in crate::launch) fn is_being_rotated(newest: &File) -> bool {
    matches!(newest.try_lock_shared(), Err(TryLockError::WouldBlock))
}

/// Without fsync, which would lengthen the freeze: the image does not need these files.
pub(super) fn empty(path: &Beneath, state: &mut State, bounds: Bounds) -> io::Result<()> {
    let file = state.file(path)?;
    let length = file.metadata()?.len();
    let mut published = Vec::new();
    // More than one piece is rare, because the file is rotated between snapshots too.
    while bounds.keep > 0 && state.gone < length {
        let piece = Unfinished::beside(&numbered(path, 1))?;
        let (bytes, end) = sparse::gather(&file, state.gone..length, bounds.size * SLACK, piece.file(), 0)?;
        if bytes > 0 {
            published.push(publish(path, piece, bounds.keep)?);
            state.changes.push_back(Change::Moved { from: state.gone, to: end });
        }
        state.gone = end;
        state.epoch += 1;
    }
    file.set_len(0)?;
    drop(published);
    state.gone = 0;
    state.epoch += 1;
    state.changes.push_back(Change::Emptied);
    Ok(())
}

/// How far back to search for the end of a line, so that no line is split between two files.
const LINE: u64 = 64 << 10;

/// Moves one piece. Returns whether there may be another.
pub(super) fn relieve(path: &Beneath, states: &Mutex<States>, which: usize, bounds: Bounds) -> io::Result<bool> {
    let file = match lock(states).get(which) {
        Some(state) => state.file(path)?,
        None => return Ok(false),
    };
    let meta = file.metadata()?;
    let (length, on_disk) = (meta.len(), meta.blocks().saturating_mul(512));
    let is_full = on_disk > most_on_disk(bounds);
    let gone = lock(states).get_mut(which).map_or(0, |state| {
        state.reserved_at = state.reserved_at.filter(|_| is_full);
        state.gone
    });
    if length.saturating_sub(gone) <= bounds.size && !is_full {
        return Ok(false);
    }
    let (gone, epoch, length) = {
        let mut states = lock(states);
        let Some(state) = states.get_mut(which) else { return Ok(false) };
        state.look_again(&file)?;
        if is_full {
            // Holes can have been filled with blocks since (fallocate(2)).
            sparse::punch(&file, 0..state.gone)?;
            let meta = file.metadata()?;
            let data = meta.len().saturating_sub(state.gone);
            let reserved = meta.blocks().saturating_mul(512).saturating_sub(data);
            // What the job writes at this moment would be lost. So not while the file grows now and then, unless it is more
            // than a file system reserves by itself.
            let before = state.reserved_at.take().filter(|(length, _)| *length == meta.len());
            let is_idle = before.is_some_and(|(_, since)| since.elapsed() >= IDLE);
            if reserved > most_on_disk(bounds) {
                if is_idle || reserved > MOST_BY_ITSELF {
                    free_behind_the_end(&file, &meta)?;
                } else {
                    state.reserved_at = before.or_else(|| Some((meta.len(), Instant::now())));
                }
            }
        }
        // The length must be of this epoch. With a length from before the file was emptied, new output would be taken
        // for a hole.
        (state.gone, state.epoch, file.metadata()?.len())
    };
    if length.saturating_sub(gone) <= bounds.size {
        return Ok(false);
    }
    // The copy is made without the lock, because a snapshot must not wait for it.
    let piece = Unfinished::beside(&numbered(path, 1))?;
    let (mut bytes, mut end) = (0, length);
    if bounds.keep > 0 {
        (bytes, end) = sparse::gather(&file, gone..end, bounds.size, piece.file(), 0)?;
        let rest = end_of_line(piece.file(), bytes)?;
        // The bytes of a line are contiguous, unless the job made a hole in it.
        (bytes, end) = (bytes - rest, end - rest.min(end - gone));
        piece.file().set_len(bytes)?;
    }
    let mut states = lock(states);
    let Some(state) = states.get_mut(which).filter(|state| (state.gone, state.epoch) == (gone, epoch)) else {
        return Ok(true);
    };
    let mut published = None;
    if bytes > 0 {
        published = Some(publish(path, piece, bounds.keep)?);
        state.changes.push_back(Change::Moved { from: gone, to: end });
    } else {
        state.changes.push_back(Change::Lost { to: end });
    }
    state.gone = end;
    state.epoch += 1;
    // From the beginning, because a block that is shared by two pieces was not freed with the first.
    sparse::punch(&file, 0..end)?;
    drop(published);
    Ok(length.saturating_sub(end) > bounds.size)
}

/// Frees blocks that are reserved behind the end (FALLOC_FL_KEEP_SIZE). Not by a hole, which ext4 does not make there.
fn free_behind_the_end(file: &File, meta: &Metadata) -> io::Result<()> {
    file.set_len(meta.len())
}

/// Frees what a job that has ended reserved behind the end of its output.
pub(super) fn settle(file: &File) -> io::Result<()> {
    let meta = file.metadata()?;
    // What was rotated away is a hole.
    let data = meta.len().saturating_sub(sparse::begin(file)?);
    if meta.blocks().saturating_mul(512).saturating_sub(UNNOTICED) > data {
        free_behind_the_end(file, &meta)?;
    }
    Ok(())
}

/// A file that did not grow for so long is freed of what is reserved.
const IDLE: Duration = Duration::from_secs(10);

/// XFS reserves up to 8 GiB behind the end of a file that grows.
const MOST_BY_ITSELF: u64 = 16 << 30;

/// A file system rounds up, and may count some blocks of its own.
const UNNOTICED: u64 = 1 << 20;

/// Most bytes that a file may occupy on the disk, including reserved blocks; its length says nothing.
pub(super) fn most_on_disk(bounds: Bounds) -> u64 {
    bounds.size.max(1 << 20).saturating_mul(SLACK)
}

/// Multiple of the bound.
const SLACK: u64 = 4;

/// Bytes at the end of `bytes` that belong to an incomplete line; 0 if no line ends near.
fn end_of_line(file: &File, bytes: u64) -> io::Result<u64> {
    let near = LINE.min(bytes / 2);
    let mut last = vec![0; usize::try_from(near).unwrap_or(0)];
    file.read_exact_at(&mut last, bytes - near)?;
    Ok(last.iter().rev().position(|byte| *byte == b'\n').unwrap_or(0) as u64)
}

/// Rotates what grows too long while the job runs.
#[derive(Debug)]
pub struct Rotation {
    thread: Option<JoinHandle<()>>,
    stop: Arc<EventFd>,
}

/// Time between two checks of files that grow. A job that writes 2 GB/s writes 40 MB meanwhile.
const PAUSE: Duration = Duration::from_millis(20);

impl Rotation {
    /// Rotates until this is dropped.
    ///
    /// # Errors
    /// When the files cannot be watched.
    pub fn start(files: &Files) -> io::Result<Rotation> {
        let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
        for which in 0..2 {
            watch.add_watch(beneath::own(&*files.file(which)?).as_str(), AddWatchFlags::IN_MODIFY)?;
        }
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let (stopped, files) = (Arc::clone(&stop), files.clone());
        let run = move || {
            let mut complained = false;
            loop {
                for which in 0..2 {
                    if let Err(error) = files.relieve(which)
                        && !std::mem::replace(&mut complained, true)
                    {
                        let cause = chain(&error);
                        tracing::warn!("the job's output can exceed log.max-size between snapshots: {cause}");
                    }
                }
                let mut stopped = [PollFd::new(stopped.as_fd(), PollFlags::POLLIN)];
                // Each check sees everything written until then, however often the job writes.
                if poll(&mut stopped, PollTimeout::try_from(PAUSE).unwrap_or(PollTimeout::MAX)) != Ok(0) {
                    return;
                }
                let [stopped] = stopped;
                // Space that is reserved is freed at a later look, for which nothing needs to be written.
                let until = if files.looks_again() { PollTimeout::from(1000_u16) } else { PollTimeout::NONE };
                let _ = poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN), stopped], until);
                let _ = watch.read_events();
            }
        };
        let thread = std::thread::Builder::new().name("rotate".into()).spawn(run)?;
        Ok(Rotation { thread: Some(thread), stop })
    }
}

impl Drop for Rotation {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

//! The job's output: files that the job writes itself, copied to our terminal, and rotated.
//!
//! The job has the files open with O_APPEND. So the output survives the supervisor's death, a restored job appends to
//! the same file (CRIU checks neither size nor offset of such a descriptor), and after a cut the job appends at the new
//! end.
//!
//! Rotation copies the file and empties it. Lines written in between would be lost, so the file is only emptied in a
//! snapshot, while the job is frozen ([`Files::rotate`]). Between snapshots ([`Rotation`]) the copied part is punched
//! out: the file has the same length and the job appends at its end, but its first part is a hole that needs no space.
//! The remaining content begins at [`begin`](sparse::begin).
//!
//! A restart cuts the files to their length at the snapshot ([`Held::cut`]) and reverts rotations since then. The
//! follower is told about each cut and rotation, because it can be far behind: from the length of a file alone it could
//! not see that the file was cut and has grown again beyond the follower's position.
//!
//! The job can do anything with its descriptor, for example make the file longer than any disk. So holes are never
//! copied and never shown, and rotated files are bounded in size and number ([`Bounds`]).

mod cut;
mod follow;
mod rotate;

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(crate) use cut::Kept;
pub use follow::Follower;
use rekindle_os::durable;
use rekindle_os::sparse;
pub use rotate::Rotation;
pub(super) use rotate::is_being_rotated;

/// The two files of a job.
#[derive(Debug, Clone)]
pub struct Files {
    /// Standard output.
    pub stdout: PathBuf,
    /// Standard error.
    pub stderr: PathBuf,
    bounds: Bounds,
    /// State of standard output and standard error. Locked during a change and during each read of the follower, never
    /// while the follower writes: a slow terminal must not lengthen a freeze.
    states: Arc<Mutex<States>>,
}

/// How much output is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes at which a file is rotated, and the most bytes that are saved of a file that a restart cuts.
    pub size: u64,
    /// Rotated files to keep of each output, and saved files of cut content to keep (at least one).
    pub keep: u32,
}

impl Default for Bounds {
    fn default() -> Bounds {
        Bounds { size: 64 << 20, keep: 5 }
    }
}

type States = [State; 2];

#[derive(Debug, Default)]
struct State {
    /// Everything before this offset was rotated away.
    gone: u64,
    /// Incremented with each change of the file, for readers that looked at it without the lock.
    epoch: u64,
    /// What the follower has not shown yet, the oldest first.
    changes: VecDeque<Change>,
    /// The length when space was found to be reserved behind the end, and since when it has been that.
    reserved_at: Option<(u64, Instant)>,
}

/// What happened to a file, other than that it grew. Offsets are those of the file until it is emptied.
#[derive(Debug)]
enum Change {
    /// This range was moved to NAME.1.
    Moved { from: u64, to: u64 },
    /// Content before this offset is not kept.
    Lost { to: u64 },
    /// All of it was moved, and the file started empty again.
    Emptied,
    /// The file was cut to `to` bytes. The cut content, from offset `from` on, is in the file `kept`.
    Cut { to: u64, from: u64, kept: Option<PathBuf> },
}

/// An output file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {verb} the output file {path}")]
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

impl State {
    /// Notices that somebody else has cut the file, or has written where its content was rotated away.
    fn look_again(&mut self, file: &File) -> io::Result<()> {
        let begin = sparse::begin(file)?;
        if begin < self.gone {
            self.gone = begin;
            self.epoch += 1;
        }
        Ok(())
    }
}

impl Files {
    /// The files in a job's log folder, created if they do not exist. Leftovers of a rotation that a crash interrupted
    /// are removed.
    ///
    /// # Errors
    /// When they cannot be created.
    pub fn create(dir: &Path, bounds: Bounds) -> Result<Files, Error> {
        let (stdout, stderr) = (dir.join("stdout.log"), dir.join("stderr.log"));
        let files = Files { stdout, stderr, bounds, states: Arc::default() };
        for (path, state) in files.paths().into_iter().zip(lock(&files.states).iter_mut()) {
            let mut options = OpenOptions::new();
            let options = options.read(true).append(true).create(true).mode(0o600);
            let file = options.open(path).map_err(error("create", path))?;
            state.gone = sparse::begin(&file).map_err(error("look at", path))?;
            remove_leftovers(path).map_err(error("remove leftovers of", path))?;
        }
        Ok(files)
    }

    fn paths(&self) -> [&PathBuf; 2] {
        [&self.stdout, &self.stderr]
    }

    /// Moves a file that exceeds the bound to NAME.1, and NAME.1 to NAME.2, up to the configured number, and empties
    /// it. Only for a frozen job: nothing may be written between the copy and the cut.
    ///
    /// # Errors
    /// When a file cannot be copied; it is not cut then.
    pub(crate) fn rotate(&self) -> Result<(), Error> {
        for (path, state) in self.paths().into_iter().zip(lock(&self.states).iter_mut()) {
            let meta = std::fs::metadata(path).map_err(error("look at", path))?;
            // Blocks that are reserved behind the end count too.
            let on_disk = meta.blocks().saturating_mul(512);
            if meta.len() > self.bounds.size || on_disk > rotate::most_on_disk(self.bounds) {
                rotate::empty(path, state, self.bounds).map_err(error("rotate", path))?;
            }
        }
        Ok(())
    }

    /// Rotates a file that is longer than the bound, as [`Files::rotate`] does, while the job continues to write. Other
    /// files are not changed.
    fn relieve(&self, which: usize) -> Result<(), Error> {
        let path = if which == 0 { &self.stdout } else { &self.stderr };
        while rotate::relieve(path, &self.states, which, self.bounds).map_err(error("rotate", path))? {}
        Ok(())
    }

    /// Whether space is reserved that is freed later, if the file does not grow until then.
    fn looks_again(&self) -> bool {
        lock(&self.states).iter().any(|state| state.reserved_at.is_some())
    }

    /// Frees the space that the job reserved behind the ends of the files. Only when it has ended: nothing may be written
    /// meanwhile.
    ///
    /// # Errors
    /// When a file cannot be opened or cut.
    pub fn settle(&self) -> Result<(), Error> {
        let settle = |path: &PathBuf| rotate::settle(path).map_err(error("free the reserved space of", path));
        // Both, whatever the first one says.
        self.paths().map(settle).into_iter().collect()
    }

    /// Prevents the follower from reading while files are put back.
    #[must_use]
    pub(crate) fn hold(&self) -> Held<'_> {
        Held { files: self, states: lock(&self.states) }
    }
}

/// Output files that the follower cannot read meanwhile.
#[derive(Debug)]
pub(crate) struct Held<'a> {
    files: &'a Files,
    states: MutexGuard<'a, States>,
}

impl Held<'_> {
    /// Cuts an output file to `to` bytes, and reverts what was rotated since it had that length. The newest part of
    /// what is cut is saved in a separate file beside it, NAME.rolled-back.N, as far as the bounds and the free space
    /// allow. None if the file is not longer.
    ///
    /// # Errors
    /// When it cannot be read or cut.
    pub(crate) fn cut(&mut self, path: &Path, to: u64) -> io::Result<Option<Kept>> {
        let bounds = self.files.bounds;
        let ours = self.files.paths().into_iter().position(|ours| ours == path);
        let mut other = State::default();
        let state = ours.and_then(|ours| self.states.get_mut(ours)).unwrap_or(&mut other);
        let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        state.look_again(&file)?;
        cut::cut(&file, path, to, state, bounds)
    }
}

fn lock(states: &Mutex<States>) -> MutexGuard<'_, States> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

fn numbered(path: &Path, n: u32) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(format!(".{n}"));
    name.into()
}

/// Removes unfinished files beside `path`: their names begin with a prefix that no other file has
/// ([`durable::Unfinished::beside`]).
fn remove_leftovers(path: &Path) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let prefix = format!("{}{}", durable::TEMP_PREFIX, name.to_string_lossy());
    for entry in std::fs::read_dir(dir)?.flatten() {
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

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
//! Others may put anything in the store, at any time. So the files are opened once, below it ([`Beneath`]), and all work is
//! done with that descriptor; a job gets a file by its path only if it is still this one ([`Files::identities`]).
//!
//! The job can do anything with its descriptor, for example make the file longer than any disk. So holes are never
//! copied and never shown, and rotated files are bounded in size and number ([`Bounds`]).

mod cut;
mod follow;
mod rotate;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

pub(crate) use cut::Kept;
pub use follow::Follower;
use rekindle_os::beneath::{Beneath, OWN_PREFIX};
use rekindle_os::durable::{self, Place};
use rekindle_os::sparse;
pub use rotate::Rotation;
pub(super) use rotate::is_being_rotated;

/// The two files of a job.
#[derive(Debug, Clone)]
pub struct Files {
    /// Standard output.
    pub stdout: Beneath,
    /// Standard error.
    pub stderr: Beneath,
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
    /// The open file; none for a file that is not the job's output.
    file: Option<Arc<File>>,
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
    Cut { to: u64, from: u64, kept: Option<Beneath> },
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

fn error(verb: &'static str, path: &Beneath) -> impl FnOnce(io::Error) -> Error {
    let path = path.path().into();
    move |source| Error { verb, path, source }
}

impl State {
    /// The file.
    fn file(&self, path: &Beneath) -> io::Result<Arc<File>> {
        self.file.clone().map_or_else(|| path.change().map(Arc::new), Ok)
    }

    /// The file with this name. That is the open one, unless another one or none has its name now: then it is opened, or
    /// created. Another name that the open file has got since does no harm: it was ours before.
    fn renew(&mut self, path: &Beneath) -> io::Result<Arc<File>> {
        if let Some(file) = &self.file {
            let is_same = match path.metadata() {
                Ok(now) => now.is_file() && identity(&now) == identity(&file.metadata()?),
                Err(error) if error.kind() == io::ErrorKind::NotFound => false,
                Err(error) => return Err(error),
            };
            if is_same {
                return Ok(Arc::clone(file));
            }
        }
        let file = Arc::new(path.append(0o600)?);
        (self.gone, self.epoch) = (sparse::begin(&file)?, self.epoch + 1);
        self.file = Some(Arc::clone(&file));
        Ok(file)
    }

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
    pub fn create(dir: &(impl Place + ?Sized), bounds: Bounds) -> Result<Files, Error> {
        let unknown = |source| Error { verb: "find the folder of", path: "stdout.log".into(), source };
        let dir = dir.place().map_err(unknown)?;
        let (stdout, stderr) = (dir.join("stdout.log"), dir.join("stderr.log"));
        let files = Files { stdout, stderr, bounds, states: Arc::default() };
        for (path, state) in files.paths().into_iter().zip(lock(&files.states).iter_mut()) {
            state.renew(path).map_err(error("create", path))?;
            remove_leftovers(path).map_err(error("remove leftovers of", path))?;
        }
        Ok(files)
    }

    fn paths(&self) -> [&Beneath; 2] {
        [&self.stdout, &self.stderr]
    }

    /// The open file.
    fn file(&self, which: usize) -> io::Result<Arc<File>> {
        let path = if which == 0 { &self.stdout } else { &self.stderr };
        lock(&self.states).get(which).map_or_else(|| path.change().map(Arc::new), |state| state.file(path))
    }

    /// Device and inode of both files. A file that has disappeared is created.
    ///
    /// # Errors
    /// When something else is in its place, or it cannot be created.
    pub(crate) fn identities(&self) -> Result<[(u64, u64); 2], Error> {
        let mut states = lock(&self.states);
        let [out, err] = &mut *states;
        let identity = |state: &mut State, path: &Beneath| {
            let file = state.renew(path).map_err(error("open", path))?;
            file.metadata().map(|metadata| identity(&metadata)).map_err(error("look at", path))
        };
        Ok([identity(out, &self.stdout)?, identity(err, &self.stderr)?])
    }

    /// Both files, open.
    ///
    /// # Errors
    /// When one cannot be opened.
    pub fn open(&self) -> io::Result<[Arc<File>; 2]> {
        Ok([self.file(0)?, self.file(1)?])
    }

    /// The lengths of both files.
    #[must_use]
    pub fn lengths(&self) -> [u64; 2] {
        [0, 1].map(|which| self.file(which).and_then(|file| file.metadata()).map_or(0, |metadata| metadata.len()))
    }

    /// Moves a file that exceeds the bound to NAME.1, and NAME.1 to NAME.2, up to the configured number, and empties
    /// it. Only for a frozen job: nothing may be written between the copy and the cut.
    ///
    /// # Errors
    /// When a file cannot be copied; it is not cut then.
    pub(crate) fn rotate(&self) -> Result<(), Error> {
        for (path, state) in self.paths().into_iter().zip(lock(&self.states).iter_mut()) {
            let meta = state.file(path).and_then(|file| file.metadata()).map_err(error("look at", path))?;
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
        let settle = |which: usize, path: &Beneath| {
            self.file(which).and_then(|file| rotate::settle(&file)).map_err(error("free the reserved space of", path))
        };
        // Both, whatever the first one says.
        [settle(0, &self.stdout), settle(1, &self.stderr)].into_iter().collect()
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
    /// Opens an output file, or creates it.
    ///
    /// # Errors
    /// When something else is in its place, or it cannot be opened.
    pub(crate) fn open(&mut self, path: &Beneath) -> io::Result<Arc<File>> {
        let ours = self.files.paths().into_iter().position(|ours| ours == path);
        match ours.and_then(|ours| self.states.get_mut(ours)) {
            Some(state) => state.renew(path),
            None => path.append(0o600).map(Arc::new),
        }
    }

    /// Cuts an output file to `to` bytes, and reverts what was rotated since it had that length. The newest part of
    /// what is cut is saved in a separate file beside it, NAME.rolled-back.N, as far as the bounds and the free space
    /// allow. None if the file is not longer.
    ///
    /// # Errors
    /// When it cannot be read or cut.
    pub(crate) fn cut(&mut self, path: &Beneath, to: u64) -> io::Result<Option<Kept>> {
        let bounds = self.files.bounds;
        let ours = self.files.paths().into_iter().position(|ours| ours == path);
        let mut other = State::default();
        let state = ours.and_then(|ours| self.states.get_mut(ours)).unwrap_or(&mut other);
        let file = state.file(path)?;
        state.look_again(&file)?;
        cut::cut(&file, path, to, state, bounds)
    }
}

fn lock(states: &Mutex<States>) -> MutexGuard<'_, States> {
    states.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Device and inode.
fn identity(metadata: &std::fs::Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn numbered(path: &Beneath, n: u32) -> Beneath {
    with_suffix(path, &format!(".{n}"))
}

fn with_suffix(path: &Beneath, suffix: &str) -> Beneath {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(suffix);
    path.with_file_name(name)
}

/// Removes unfinished files beside `path`: their names begin with a prefix that no other file has
/// ([`durable::Unfinished::beside`]).
fn remove_leftovers(path: &Beneath) -> io::Result<()> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    let prefix = format!("{}{}", durable::TEMP_PREFIX, name.to_string_lossy());
    for name in dir.list()? {
        // Copies of a file with a name elsewhere have a prefix of their own; a folder stays.
        if [&prefix, OWN_PREFIX].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
            let _ = dir.join(name).remove_file();
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;

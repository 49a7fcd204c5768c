//! The images of jobs that this machine has seen, recorded outside the store.
//!
//! A signature says that an image is ours, not that it is the newest: whoever can write a store or a replica can put an
//! older, signed state there. So with a key, the newest image of each run is recorded in a folder of this machine, and a
//! warning is logged if a job continues from an older one. A machine that has seen nothing cannot warn. After a power
//! cut there is the old record or the new one.

use std::fs::DirBuilder;
use std::io::{self, Read};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

use super::file_error::{FileError, failed};
use super::format::blake3_hex;
use super::id::{ImageId, JobName};
use super::trust::Trust;
use rekindle_os::durable;

const VERSION: u32 = 1;
/// Number of runs of a job that are remembered.
const RUNS: usize = 32;
/// Maximum size; a note has some hundred bytes.
const MAX_BYTES: u64 = 64 << 10;

/// The newest image of a run that this machine has seen.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Newest {
    /// See [`super::Manifest::lineage`].
    pub lineage: String,
    pub image: ImageId,
    /// When it was recorded.
    pub when: DateTime<Utc>,
}

#[derive(Serialize, Deserialize)]
struct OnDisk {
    version: u32,
    /// The last recorded run comes first.
    runs: Vec<Newest>,
}

/// The records of one job.
#[derive(Debug, Clone)]
pub struct Seen {
    path: PathBuf,
}

impl Seen {
    /// This machine's records of the job; `None` without a key, because anybody could make a newer image then.
    #[must_use]
    pub fn of(job: &JobName, trust: &Trust) -> Option<Seen> {
        Seen::below(&folder(), job, trust)
    }

    fn below(dir: &Path, job: &JobName, trust: &Trust) -> Option<Seen> {
        let id = blake3_hex(trust.key()?.id().get(..4).unwrap_or_default());
        Some(Seen { path: dir.join(format!("{job}-{id}.json")) })
    }

    /// The recorded runs, the last one first.
    ///
    /// # Errors
    /// When the file exists and cannot be read or parsed.
    pub fn runs(&self) -> Result<Vec<Newest>, FileError> {
        let failed = |source| failed("read", &self.path)(source);
        let file = match durable::open_for_reading(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            file => file.map_err(failed)?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_BYTES).read_to_end(&mut bytes).map_err(failed)?;
        match serde_json::from_slice(&bytes).map_err(|error| failed(error.into()))? {
            OnDisk { version: VERSION, runs } => Ok(runs),
            OnDisk { version, .. } => Err(failed(io::Error::other(format!("it has version {version}")))),
        }
    }

    /// The newest image of the run that was seen here.
    ///
    /// # Errors
    /// As [`Seen::runs`].
    pub fn newest(&self, lineage: &str) -> Result<Option<Newest>, FileError> {
        Ok(self.runs()?.into_iter().find(|run| run.lineage == lineage))
    }

    /// Records an image, durably, unless a newer one of that run is recorded.
    ///
    /// # Errors
    /// When the record cannot be read or written.
    pub fn note(&self, lineage: &str, image: ImageId) -> Result<(), FileError> {
        let mut runs = self.runs()?;
        let image = runs.iter().filter(|run| run.lineage == lineage).map(|run| run.image).fold(image, ImageId::max);
        runs.retain(|run| run.lineage != lineage);
        runs.insert(0, Newest { lineage: lineage.to_owned(), image, when: Utc::now() });
        runs.truncate(RUNS);
        self.write(runs)
    }

    /// Forgets a run: it is over, and nobody continues from its images.
    ///
    /// # Errors
    /// As [`Seen::note`].
    pub fn forget(&self, lineage: &str) -> Result<(), FileError> {
        let mut runs = self.runs()?;
        let before = runs.len();
        runs.retain(|run| run.lineage != lineage);
        if runs.len() == before { Ok(()) } else { self.write(runs) }
    }

    fn write(&self, runs: Vec<Newest>) -> Result<(), FileError> {
        let dir = self.path.parent().unwrap_or(&self.path);
        DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed("create", dir))?;
        let bytes = serde_json::to_vec_pretty(&OnDisk { version: VERSION, runs });
        let bytes = bytes.map_err(|error| failed("encode", &self.path)(error.into()))?;
        durable::write_file(&self.path, &bytes, 0o600).map_err(failed("write", &self.path))
    }
}

/// Where this machine's records are: on a local disk and outside the store, whose attackers they are about. Tests that
/// stand for several machines name one for each.
fn folder() -> PathBuf {
    let named = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(dir) = cfg!(debug_assertions).then(|| named("REKINDLE_TEST_SEEN_DIRECTORY")).flatten() {
        return dir;
    }
    // Only root may write below /var/lib. Others have a folder for state (XDG Base Directory Specification).
    let state = || named("XDG_STATE_HOME").or_else(|| named("HOME").map(|home| home.join(".local/state")));
    let root = "/var/lib/rekindle-seen";
    match Uid::effective().is_root() {
        true => root.into(),
        false => state().map_or_else(|| root.into(), |state| state.join("rekindle/seen")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Unsigned;
    use crate::chunk::Key;

    #[test]
    fn the_newest_of_each_run_is_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let job: JobName = "train".parse().unwrap();
        let trust = Trust::new(Key::new(&[7; 32]), Path::new("/etc/key"), Unsigned::Refused);
        let seen = Seen::below(&dir.path().join("a/seen"), &job, &trust).unwrap();
        let id = |n| ImageId::new(n, DateTime::UNIX_EPOCH);
        assert_eq!(seen.newest("first").unwrap(), None);
        seen.note("first", id(7)).unwrap();
        seen.note("second", id(3)).unwrap();
        seen.note("first", id(5)).unwrap();
        let newest = |lineage| seen.newest(lineage).unwrap().map(|newest| newest.image.sequence());
        assert_eq!((newest("first"), newest("second"), newest("third")), (Some(7), Some(3), None));
        assert_eq!(seen.runs().unwrap()[0].lineage, "first");
        seen.forget("first").unwrap();
        assert_eq!((newest("first"), newest("second")), (None, Some(3)));
        (0..100).for_each(|n| seen.note(&n.to_string(), id(1)).unwrap());
        assert_eq!(seen.runs().unwrap().len(), RUNS);
        std::fs::write(&seen.path, "{").unwrap();
        assert!(seen.newest("first").is_err() && seen.note("first", id(9)).is_err(), "nothing is thrown away");
        assert!(Seen::below(dir.path(), &job, &Trust::default()).is_none());
    }
}

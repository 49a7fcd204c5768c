//! The published state of a running job: `state.json` in its folder, and the same on the control socket.
//!
//! It is for `rekindle status` and scripts, and is not used by the supervisor. It may be outdated if the supervisor was
//! killed, which the job's lock shows. Only the supervisor writes it.

mod group;
mod shown;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use rekindle_base::cause::Cause;
use rekindle_base::interval::Choice;
use rekindle_base::{Ended, micros};
use rekindle_os::durable::Place;
use rekindle_store::persist::Progress;
use rekindle_store::{self as store, ImageId, JobFolder, JobName, Writer};

/// The most bytes of `state.json` that are read: the names of a group of many thousand machines are less.
const LARGEST: u64 = 16 << 20;

/// The content of `state.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Version of this format.
    pub version: u32,
    /// The job.
    #[serde(default)]
    pub job: Option<JobName>,
    /// The store with the job's folder.
    #[serde(default)]
    pub store: Option<PathBuf>,
    /// What the supervisor does with the job.
    pub state: JobState,
    /// When this state began.
    pub since: DateTime<Utc>,
    /// When this supervisor started.
    pub begun: DateTime<Utc>,
    /// The supervisor's pid.
    pub supervisor: u32,
    /// The id of the run that started from the beginning.
    pub lineage: String,
    /// The id of the user that the job runs as; `None` from an earlier version.
    #[serde(default)]
    pub uid: Option<u32>,
    /// The pid of the command's process, as the host sees it.
    pub pid: Option<i32>,
    /// Restarts since this supervisor started.
    pub restarts: u32,
    /// The newest image.
    pub last_image: Option<ImageId>,
    /// How long the job was frozen for it, in microseconds.
    pub last_freeze_us: Option<u64>,
    /// Its size, in bytes.
    #[serde(default)]
    pub last_bytes: Option<u64>,
    /// When the next snapshot is due, if snapshots are taken at an interval.
    #[serde(default)]
    pub next: Option<DateTime<Utc>>,
    /// The GPUs that the job used at its last snapshot, by name.
    #[serde(default)]
    pub gpus: Vec<String>,
    /// The supervisor's control socket.
    #[serde(default)]
    pub control: Option<PathBuf>,
    /// The current interval, if it is chosen automatically (`snapshot.interval = "auto"`) and something was measured.
    #[serde(default)]
    pub interval: Option<Choice>,
    /// Until when at most the job blocks a waiting snapshot.
    #[serde(default)]
    pub held: Option<DateTime<Utc>>,
    /// Why the last snapshot failed, if it did.
    pub last_failure: Option<String>,
    /// The image that is being stored.
    #[serde(default)]
    pub persisting: Option<Persisting>,
    /// The image that is being restored, if it is in packs.
    #[serde(default)]
    pub restoring: Option<Persisting>,
    /// Why the last image could not be stored, if it could not.
    #[serde(default)]
    pub persist_failure: Option<String>,
    /// The image that is being replicated.
    #[serde(default)]
    pub replicating: Option<Persisting>,
    /// The newest image that this supervisor replicated.
    #[serde(default)]
    pub last_replicated: Option<ImageId>,
    /// Why the last image could not be replicated, if it could not.
    #[serde(default)]
    pub replica_failure: Option<String>,
    /// Why an image could not be restored in a rehearsal, until a rehearsal succeeds.
    #[serde(default)]
    pub rehearsal_failure: Option<String>,
    /// Why images are not rehearsed, if they are not.
    #[serde(default)]
    pub not_rehearsed: Option<String>,
    /// When the job must have ended.
    #[serde(default)]
    pub deadline: Option<DateTime<Utc>>,
    /// How long the final snapshot would take.
    #[serde(default)]
    pub predicted: Option<Forecast>,
    /// How the last life of the job ended.
    #[serde(default)]
    pub last_end: Option<LastEnd>,
    /// The address where its metrics are served.
    #[serde(default)]
    pub metrics: Option<SocketAddr>,
    /// How the job hangs, if it does.
    #[serde(default)]
    pub hang: Option<String>,
    /// The last fault of a GPU that this life of the job uses.
    #[serde(default)]
    pub gpu_fault: Option<String>,
    /// What a cloud announces about this machine, while the job is stopped or has a deadline for it.
    #[serde(default)]
    pub notice: Option<String>,
    /// The group that the job is a part of, once the coordinator has told of it.
    #[serde(default)]
    pub group: Option<Group>,
    /// The id of the boot in which the supervisor runs.
    #[serde(default)]
    pub boot_id: String,
}

pub(crate) use group::in_words;
pub use group::{Group, GroupFreeze, GroupImage, GroupMember};
pub(crate) use shown::Condition;
pub use shown::ShownState;

/// What the supervisor does with the job, in one word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum JobState {
    /// It is being started from the beginning.
    Starting,
    /// It is being restored from an image.
    Restoring,
    /// It runs.
    Running,
    /// A snapshot is being taken.
    Snapshotting,
    /// It is being ended after a snapshot, until it is resumed.
    Suspending,
    /// It is being ended, and will be restored from an older image.
    Rewinding,
    /// It is being ended.
    Stopping,
    /// It waits for the next start or restore.
    Waiting,
    /// It was ended, and waits to be resumed.
    Suspended,
    /// The run is over.
    Done,
    /// A state of a newer version.
    #[serde(other)]
    Unknown,
}

impl JobState {
    /// All states that a supervisor of this version publishes.
    pub const ALL: [JobState; 10] = [
        JobState::Starting,
        JobState::Restoring,
        JobState::Running,
        JobState::Snapshotting,
        JobState::Suspending,
        JobState::Rewinding,
        JobState::Stopping,
        JobState::Waiting,
        JobState::Suspended,
        JobState::Done,
    ];

    /// The name in `state.json`, in metrics and on the screen.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            JobState::Starting => "starting",
            JobState::Restoring => "restoring",
            JobState::Running => "running",
            JobState::Snapshotting => "snapshotting",
            JobState::Suspending => "suspending",
            JobState::Rewinding => "rewinding",
            JobState::Stopping => "stopping",
            JobState::Waiting => "waiting",
            JobState::Suspended => "suspended",
            JobState::Done => "done",
            JobState::Unknown => "unknown",
        }
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// Progress of storing or replicating an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Persisting {
    /// The image.
    pub image: ImageId,
    /// Bytes that were copied.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
    /// New bytes written to the disk or sent to the replica.
    #[serde(default)]
    pub written: u64,
    /// Bytes copied per second, so far.
    #[serde(default)]
    pub rate: u64,
}

impl Persisting {
    /// The present progress.
    #[must_use]
    pub fn of(image: ImageId, progress: &Progress) -> Persisting {
        let (done, total) = progress.bytes();
        Persisting { image, done, total, written: progress.written(), rate: progress.rate() }
    }

    /// The completed percentage. It is never 100, because copied data must still be synced.
    #[must_use]
    pub fn percent(&self) -> u64 {
        (self.done.saturating_mul(100) / self.total.max(1)).min(99)
    }
}

impl Published {
    /// The state that the job's supervisor published; `None` without a supervisor.
    ///
    /// # Errors
    /// When it is unknown whether there is one.
    pub fn live(folder: &JobFolder) -> Result<Option<Published>, store::Error> {
        Ok(match folder.writer()? {
            Writer::Nobody => None,
            Writer::Known(_) | Writer::Unnamed => Published::read(&folder.state_file()).ok(),
        })
    }

    /// Progress of storing this image, if it is being stored.
    #[must_use]
    pub fn persisting_image(&self, id: ImageId) -> Option<&Persisting> {
        self.persisting.as_ref().filter(|persisting| persisting.image == id)
    }

    /// Reads what a supervisor published.
    ///
    /// # Errors
    /// When the file does not exist, is something else than a file, or cannot be parsed.
    pub fn read(path: &(impl Place + ?Sized)) -> io::Result<Published> {
        Ok(serde_json::from_slice(&path.place()?.content(LARGEST)?)?)
    }
}

/// How the last life of a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastEnd {
    /// When the end was noticed.
    pub time: DateTime<Utc>,
    /// Its exit code.
    pub exit_code: Option<i32>,
    /// The signal that ended it, if any.
    pub signal: Option<i32>,
    /// The cause.
    pub cause: Cause,
    /// The cause as text, for people.
    pub words: String,
}

impl LastEnd {
    pub(crate) fn now(ended: Option<Ended>, cause: Cause) -> LastEnd {
        let (exit_code, signal) = match ended {
            Some(Ended::Exit(code)) => (Some(code), None),
            Some(Ended::Signal(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        LastEnd { time: Utc::now(), exit_code, signal, words: cause.to_string(), cause }
    }
}

/// Additional time for the end of the job, and of the supervisor.
const END: Duration = Duration::from_secs(2);

/// The expected time for the final snapshot, without the safety margin ([`Forecast::lead`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Forecast {
    /// From its start until the image is complete, including the freeze.
    #[serde(rename = "snapshot_us", with = "micros")]
    pub snapshot: Duration,
    /// Time to store it; zero if it is written directly to the store.
    #[serde(rename = "store_us", with = "micros")]
    pub store: Duration,
    /// Time to replicate it; zero without a replica.
    #[serde(rename = "replica_us", with = "micros")]
    pub replica: Duration,
}

impl Forecast {
    /// The total time.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.snapshot.saturating_add(self.store).saturating_add(self.replica)
    }

    /// How long before a deadline it must start.
    #[must_use]
    pub fn lead(&self) -> Duration {
        with_margin(self.total())
    }
}

/// Adds the safety margin: a quarter, and some seconds.
pub(crate) fn with_margin(time: Duration) -> Duration {
    time.saturating_add(time / 4).saturating_add(END)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_is_the_same_word_in_json_and_on_the_screen() {
        for state in JobState::ALL {
            assert_eq!(serde_json::to_string(&state).unwrap(), format!("\"{state}\""));
            assert_eq!(serde_json::from_str::<JobState>(&format!("\"{state}\"")).unwrap(), state);
        }
        assert_eq!(serde_json::from_str::<JobState>("\"hibernating\"").unwrap(), JobState::Unknown);
    }

    #[test]
    fn what_others_put_in_the_place_of_the_state_is_not_read() {
        use rekindle_os::beneath::Unexpected;
        let dir = tempfile::tempdir().unwrap();
        let (path, good) = (dir.path().join("state.json"), dir.path().join("good.json"));
        std::fs::write(&good, serde_json::to_vec(&Published::new("l")).unwrap()).unwrap();
        assert_eq!(Published::read(&good).unwrap().lineage, "l");
        std::os::unix::fs::symlink(&good, &path).unwrap();
        assert!(Unexpected::in_error(&Published::read(&path).unwrap_err()).is_some());
        std::fs::remove_file(&path).unwrap();
        // Nobody opens the other end, ever.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(Unexpected::in_error(&Published::read(&path).unwrap_err()).is_some());
        std::fs::remove_file(&path).unwrap();
        // It is not read into memory, whatever its length.
        std::fs::File::create(&path).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(Published::read(&path).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        // What is published replaces a link, and leaves its target.
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&good, &path).unwrap();
        Published::new("new").write(&rekindle_os::beneath::Beneath::at(&path).unwrap()).unwrap();
        assert_eq!(Published::read(&path).unwrap().lineage, "new");
        assert_eq!(Published::read(&good).unwrap().lineage, "l");
    }
}

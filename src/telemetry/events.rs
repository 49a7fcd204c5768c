//! What happens to a job, in the order it happens: one line of JSON each, in `STORE/JOB/log/events.jsonl`.
//!
//! For reports, hooks and later analysis. Only the supervisor writes it, and continues it after a restart. A line is
//! written at once and not synced: when the power goes, the last lines may be missing, or half of one, which [`read`]
//! leaves out. If it cannot be written, the job is still supervised, and the log says so once.
//!
//! Fields may be added to an event, and events to the list: readers ignore what they do not know ([`What::Unknown`]).

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::clean;
use rekindle_base::Moved;
use rekindle_base::cause::{Cause, Missing};
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};

/// The name of the file in a job's log folder.
pub const FILE_NAME: &str = "events.jsonl";
/// Beyond this it is moved to `events.jsonl.1`, and what was there is gone: some 100,000 snapshots.
const MAX_SIZE: u64 = 64 << 20;
/// Of the lines, not of the events in them, which only ever gain fields.
const VERSION: u32 = 1;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// 1.
    pub version: u32,
    /// When, by the clock on the wall.
    pub time: DateTime<Utc>,
    /// The run that began from nothing: an image has the same.
    pub run: String,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

impl Event {
    /// Of now.
    #[must_use]
    pub fn now(run: &str, what: What) -> Event {
        Event { version: VERSION, time: Utc::now(), run: run.into(), what }
    }
}

/// What can happen. Times are in microseconds, sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// A supervisor begins.
    Supervised {
        /// Its pid.
        supervisor: u32,
        /// The command line.
        command: Vec<String>,
        /// The interval, as configured.
        interval: String,
        /// The last sign of life of the previous supervisor, if it was killed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last_seen: Option<DateTime<Utc>>,
        /// Why the previous run was interrupted, if it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<Cause>,
    },
    /// An image is about to be restored.
    RestoreBegan {
        /// Which.
        image: ImageId,
    },
    /// The job runs.
    Started {
        /// The pid of the command's process, as the host sees it.
        pid: Option<i32>,
        /// The image that it was restored from; without one it started from the beginning.
        image: Option<ImageId>,
        /// From the decision until it ran.
        took_us: u64,
        /// The GPUs that it is not on any more, and those in their place.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        moved: Vec<Moved>,
    },
    /// The job is about to be frozen.
    SnapshotBegan {
        /// Why.
        reason: Reason,
    },
    /// There is a new image, and the job runs on.
    SnapshotTaken {
        /// Which.
        image: ImageId,
        /// Why.
        reason: Reason,
        /// The length of the freeze.
        freeze_us: u64,
        /// How long each phase of that took.
        phases: Vec<Phase>,
        /// Of the image.
        bytes: u64,
    },
    /// A snapshot waits, because the job holds it off.
    SnapshotHeld {
        /// Why there is to be one.
        reason: Reason,
        /// The processes that hold it off, as the host sees them.
        pids: Vec<i32>,
        /// For so long at most.
        bound_us: u64,
    },
    /// It waits no longer.
    HoldOver {
        /// Why there is to be one.
        reason: Reason,
        /// released, expired, holder-died or job-ended.
        how: String,
        /// For so long it did.
        waited_us: u64,
    },
    /// There is none.
    SnapshotFailed {
        /// The reason, as text.
        why: String,
        /// Whether the job cannot continue.
        job_lost: bool,
    },
    /// An image is in the store.
    Stored {
        /// Which.
        image: ImageId,
        /// How long it took.
        took_us: u64,
        /// Bytes that no older image had, as they lie on the disk.
        written: u64,
    },
    /// An image is not in the store.
    NotStored {
        /// Which.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// An image is in the replica.
    Replicated {
        /// Which.
        image: ImageId,
        /// How long it took.
        took_us: u64,
        /// Bytes that were sent.
        sent: u64,
    },
    /// An image is not in the replica, and will not be.
    NotReplicated {
        /// Which.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// The job ended.
    Ended {
        /// Its exit code.
        exit_code: Option<i32>,
        /// Or the signal that ended it.
        signal: Option<i32>,
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Cause>,
    },
    /// The job makes no progress.
    Hung {
        /// What is missing.
        what: Missing,
        /// For so long.
        idle_us: u64,
        /// The file with the stacks of its processes, in the job's log folder.
        stacks: Option<String>,
        /// What is done: notify, restart, snapshot-and-stop, give-up or rewind.
        action: String,
    },
    /// A job that was told of as hung makes progress again.
    GoesOn {
        /// What is there again.
        what: Missing,
    },
    /// A GPU that the job uses has a fault.
    GpuFault {
        /// Which: its UUID or PCI address.
        gpu: String,
        /// The driver's number for the fault.
        xid: u32,
        /// What that is, and what NVIDIA advises.
        words: String,
    },
    /// A rule is carried out.
    RuleMatched {
        /// Which, counted from 1.
        rule: usize,
        /// What it does.
        action: String,
        /// Why: the cause of an end, or the line of output.
        why: String,
    },
    /// An image cannot be used any more.
    ImageBad {
        /// Which.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// Content of the store is not what was written, or the disk does not give it.
    StoreDamaged {
        /// What is wrong, and what was done, as text.
        why: String,
        /// How many chunks; 0 where it is a whole pack.
        chunks: u64,
        /// How many of them another pack or the replica had.
        replaced: u64,
        /// The images that cannot be restored for it.
        images: Vec<ImageId>,
    },
    /// An image was restored beside the job, up to the point where it would have run.
    Rehearsed {
        /// Which.
        image: ImageId,
        /// How long that took.
        took_us: u64,
    },
    /// It could not be restored beside the job.
    RehearsalFailed {
        /// Which.
        image: ImageId,
        /// CRIU's reason.
        why: String,
    },
    /// The job will be restarted.
    Restarting {
        /// From this image; without one from the beginning.
        image: Option<ImageId>,
        /// After this pause.
        after_us: u64,
    },
    /// The job is rewound to an image, on request.
    Rewinding {
        /// Which.
        image: ImageId,
    },
    /// The job has given back what it used, until it is called back.
    Suspended {
        /// It will continue from this image; without one from its beginning.
        image: Option<ImageId>,
    },
    /// The job's deadline is near: a final snapshot, then it is stopped.
    LastCall {
        /// When it is over.
        deadline: DateTime<Utc>,
        /// How long the final snapshot is expected to take, with a safety margin.
        predicted_us: u64,
    },
    /// The supervisor is done.
    Finished {
        /// completed, stopped, failed.
        outcome: String,
        /// The exit code of the job, where it had one.
        exit_code: Option<i32>,
        /// Why, in words, where it failed.
        why: Option<String>,
    },
    /// A hook, or the webhook, did not do what it should.
    HookFailed {
        /// Which: before-snapshot, on-failure and so on, or webhook.
        hook: String,
        /// The reason, as text.
        why: String,
    },
    /// One that a newer version wrote.
    #[serde(other)]
    Unknown,
}

/// The file that events are written to.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: Option<File>,
    complained: bool,
}

impl Journal {
    /// The journal in a job's log folder. It is opened with the first event.
    #[must_use]
    pub fn in_folder(logs: &Path) -> Journal {
        Journal { path: logs.join(FILE_NAME), file: None, complained: false }
    }

    /// Writes an event.
    pub fn append(&mut self, event: &Event) {
        if let Err(error) = self.write(event) {
            // What is wrong with this descriptor need not be with the next.
            self.file = None;
            if !std::mem::replace(&mut self.complained, true) {
                tracing::warn!("cannot write events to {}: {error}", self.path.display());
            }
        }
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        let mut line = clean::json(&serde_json::to_string(event)?).into_owned().into_bytes();
        line.push(b'\n');
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        // With one call: a concurrent reader sees all of it, or nothing.
        file.write_all(&line)
    }
}

fn open(path: &Path) -> io::Result<File> {
    let options = || OpenOptions::new().append(true).create(true).read(true).mode(0o600).open(path);
    let file = options()?;
    let length = file.metadata()?.size();
    if length > MAX_SIZE {
        let mut older = path.as_os_str().to_owned();
        older.push(".1");
        std::fs::rename(path, older)?;
        return options();
    }
    if length > 0 {
        // Half a line, left by a power cut: the next one must not be lost with it.
        let mut last = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut last, length - 1)?;
        if last != *b"\n" {
            (&file).write_all(b"\n")?;
        }
    }
    Ok(file)
}

/// The events of a job, the oldest first; none where there is no file. Lines that cannot be understood are left out.
///
/// # Errors
/// When the file cannot be read.
pub fn read(logs: &Path) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    for name in [format!("{FILE_NAME}.1"), FILE_NAME.into()] {
        let file = match File::open(logs.join(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        for line in BufReader::new(file).split(b'\n') {
            events.extend(serde_json::from_slice::<Event>(&line?));
        }
    }
    Ok(events)
}

/// The newest events, so many bytes of them; none where there is no file.
///
/// # Errors
/// When the file cannot be read.
pub fn newest(logs: &Path, bytes: u64) -> io::Result<Vec<Event>> {
    let mut file = match File::open(logs.join(FILE_NAME)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let begin = file.metadata()?.size().saturating_sub(bytes);
    file.seek(SeekFrom::Start(begin))?;
    // The first may be the rest of a line, which is no event.
    let lines = BufReader::new(file).split(b'\n');
    lines.map(|line| Ok(serde_json::from_slice(&line?).ok())).filter_map(Result::transpose).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn began(reason: Reason) -> Event {
        Event::now("run", What::SnapshotBegan { reason })
    }

    #[test]
    fn what_was_written_is_read_across_restarts_and_damage() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), []);
        let (first, second) = (began(Reason::Interval), began(Reason::Final));
        Journal::in_folder(dir.path()).append(&first);
        let path = dir.path().join(FILE_NAME);
        // A supervisor, or the machine, that ended in the middle of a line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"version\":1,\"ti").unwrap();
        Journal::in_folder(dir.path()).append(&second);
        assert_eq!(read(dir.path()).unwrap(), [first, second]);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn events_of_a_newer_version_are_no_error() {
        let dir = tempfile::tempdir().unwrap();
        let line =
            br#"{"version":1,"time":"2026-11-21T10:00:00Z","run":"r","event":"teleported","to":"elsewhere","x":1}"#;
        std::fs::write(dir.path().join(FILE_NAME), line).unwrap();
        let events = read(dir.path()).unwrap();
        assert_eq!(events.iter().map(|e| &e.what).collect::<Vec<_>>(), [&What::Unknown]);
    }

    #[test]
    fn a_journal_that_grew_too_long_is_moved_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        Journal::in_folder(dir.path()).append(&began(Reason::Interval));
        OpenOptions::new().append(true).open(&path).unwrap().set_len(MAX_SIZE + 1).unwrap();
        Journal::in_folder(dir.path()).append(&began(Reason::Final));
        assert_eq!(read(dir.path()).unwrap().len(), 2);
        assert!(std::fs::metadata(&path).unwrap().size() < 1000);
    }

    #[test]
    fn a_folder_that_can_not_be_written_harms_nobody() {
        let mut journal = Journal::in_folder(Path::new("/proc/nowhere"));
        journal.append(&began(Reason::Interval));
        assert!(journal.complained);
    }
}

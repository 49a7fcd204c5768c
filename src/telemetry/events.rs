//! The events of a job in their order: one line of JSON each, in `STORE/JOB/log/events.jsonl`.
//!
//! For reports, hooks and later analysis. Only the supervisor writes it, and continues it after a restart. A line is
//! written at once and not synced: after a power cut the last lines may be missing, or one may be incomplete, which
//! [`read`] skips. If it cannot be written, the job is still supervised, and the log says so once.
//!
//! Others may put anything in its place: nothing but a regular file below the store is opened, and nobody waits for one.
//! Of a file that is too long, only the newest part is read, and a line that is too long is skipped ([`Lines`]).
//!
//! Fields may be added to an event, and events to the list: readers ignore unknown ones ([`What::Unknown`]).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::clean;
use crate::published::GroupMember;
use rekindle_base::Moved;
use rekindle_base::cause::{Cause, Missing};
use rekindle_base::notice::{Cloud, Kind};
use rekindle_os::beneath::{Beneath, Unexpected};
use rekindle_os::durable::Place;
use rekindle_store::ImageId;
use rekindle_store::manifest::{Phase, Reason};

/// The name of the file in a job's log folder.
pub const FILE_NAME: &str = "events.jsonl";
/// At this size the file is moved to `events.jsonl.1`, replacing the old one: some 100,000 snapshots.
const MAX_SIZE: u64 = 64 << 20;
/// A longer line is none of ours.
const MAX_LINE: usize = 1 << 20;
/// What is read of a file at once at most: one of ours has at most one line more than [`MAX_SIZE`].
const MOST: u64 = MAX_SIZE + (1 << 20);
/// Version of the lines. Events only gain fields, which does not change it.
const VERSION: u32 = 1;

/// An event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// Version of the format: 1.
    pub version: u32,
    /// Its time by the wall clock.
    pub time: DateTime<Utc>,
    /// The id of the run that started from the beginning, as in its images.
    pub run: String,
    /// What happened.
    #[serde(flatten)]
    pub what: What,
}

impl Event {
    /// Its line in the journal, without the line end.
    ///
    /// # Errors
    /// Never for the events of this version.
    pub fn to_line(&self) -> serde_json::Result<String> {
        Ok(clean::json(&serde_json::to_string(self)?).into_owned())
    }

    /// An event with the present time.
    #[must_use]
    pub fn now(run: &str, what: What) -> Event {
        Event { version: VERSION, time: Utc::now(), run: run.into(), what }
    }
}

/// The kinds of events. Times are in microseconds, sizes in bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum What {
    /// A supervisor starts.
    Supervised {
        /// Its pid.
        supervisor: u32,
        /// The command line.
        command: Vec<String>,
        /// The interval, as configured.
        interval: String,
        /// The last heartbeat of the previous supervisor, if it was killed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        last_seen: Option<DateTime<Utc>>,
        /// Why the previous run was interrupted, if it was.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        before: Option<Cause>,
    },
    /// An image is about to be restored.
    RestoreBegan {
        /// The image.
        image: ImageId,
    },
    /// The job runs.
    Started {
        /// The pid of the command's process, as the host sees it.
        pid: Option<i32>,
        /// The image that it was restored from; `None` if it started from the beginning.
        image: Option<ImageId>,
        /// From the decision until it ran.
        took_us: u64,
        /// GPUs that were replaced, each with its replacement.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        moved: Vec<Moved>,
        /// What a restored job has not as it was, a line for each item.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        differences: Vec<String>,
    },
    /// The job is about to be frozen.
    SnapshotBegan {
        /// The reason.
        reason: Reason,
    },
    /// There is a new image, and the job continues.
    SnapshotTaken {
        /// The image.
        image: ImageId,
        /// The reason.
        reason: Reason,
        /// The length of the freeze.
        freeze_us: u64,
        /// How long each phase took.
        phases: Vec<Phase>,
        /// Size of the image.
        bytes: u64,
    },
    /// A snapshot waits because the job blocks it.
    SnapshotHeld {
        /// Why the snapshot is wanted.
        reason: Reason,
        /// The processes that block it, as the host sees them.
        pids: Vec<i32>,
        /// Time limit of the wait.
        bound_us: u64,
    },
    /// It no longer waits.
    HoldOver {
        /// Why the snapshot is wanted.
        reason: Reason,
        /// released, expired, holder-died or job-ended.
        how: String,
        /// How long it waited.
        waited_us: u64,
    },
    /// A snapshot failed.
    SnapshotFailed {
        /// The reason, as text.
        why: String,
        /// Whether the job cannot continue.
        job_lost: bool,
    },
    /// An image is stored.
    Stored {
        /// The image.
        image: ImageId,
        /// How long it took.
        took_us: u64,
        /// New bytes that were written to the disk.
        written: u64,
    },
    /// An image could not be stored.
    NotStored {
        /// The image.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// An image is replicated.
    Replicated {
        /// The image.
        image: ImageId,
        /// How long it took.
        took_us: u64,
        /// Bytes that were sent.
        sent: u64,
    },
    /// An image could not be replicated, and will not be.
    NotReplicated {
        /// The image.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// The job ended.
    Ended {
        /// Its exit code.
        exit_code: Option<i32>,
        /// The signal that ended it, if any.
        signal: Option<i32>,
        /// The cause.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cause: Option<Cause>,
    },
    /// A signal killed a process of the job, and the job runs on.
    ProcessDied {
        /// The process, as the job sees it.
        pid: i32,
        /// Its name, at most 15 bytes.
        name: String,
        /// The signal.
        signal: i32,
        /// What is done: restart or none, or what a rule says.
        action: String,
        /// Why nothing is done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// The job makes no progress.
    Hung {
        /// The missing activity.
        what: Missing,
        /// How long it has been missing.
        idle_us: u64,
        /// The file with the stacks of its processes, in the job's log folder.
        stacks: Option<String>,
        /// The action: notify, restart, snapshot-and-stop, give-up or rewind.
        action: String,
    },
    /// A job that was reported as hung makes progress again.
    GoesOn {
        /// The activity that has returned.
        what: Missing,
    },
    /// A GPU that the job uses has a fault.
    GpuFault {
        /// The GPU's UUID or PCI address.
        gpu: String,
        /// The driver's number for the fault.
        xid: u32,
        /// Its meaning, and what NVIDIA advises.
        words: String,
        /// The death that it follows from, or what occupied the GPU; then the GPU is not to blame.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        follows: Option<String>,
    },
    /// A cloud announces that it interrupts this machine.
    Interruption {
        /// The cloud.
        cloud: Cloud,
        /// What it announces.
        notice: Kind,
        /// When that happens, if the cloud says so.
        at: Option<DateTime<Utc>>,
        /// What is done: stop, deadline, snapshot or none.
        action: String,
        /// Why nothing is done.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        why: Option<String>,
    },
    /// A cloud no longer announces it: it was withdrawn, or is over.
    InterruptionOver {
        /// The cloud.
        cloud: Cloud,
        /// What it announced.
        notice: Kind,
    },
    /// A rule is carried out.
    RuleMatched {
        /// The rule, counted from 1.
        rule: usize,
        /// Its action.
        action: String,
        /// The cause of an end, or the line of output.
        why: String,
    },
    /// An image cannot be used any more.
    ImageBad {
        /// The image.
        image: ImageId,
        /// The reason, as text.
        why: String,
    },
    /// A restore found content of the store that is damaged, or that the disk cannot read, and replaced it.
    StoreDamaged {
        /// The problem, and what was done, as text.
        why: String,
        /// Number of chunks.
        chunks: u64,
        /// How many of them were replaced from another pack or the replica.
        replaced: u64,
    },
    /// A rehearsal restored an image up to the point where it would have run.
    Rehearsed {
        /// The image.
        image: ImageId,
        /// How long it took.
        took_us: u64,
    },
    /// A rehearsal could not restore an image.
    RehearsalFailed {
        /// The image.
        image: ImageId,
        /// CRIU's reason.
        why: String,
    },
    /// The job will be restarted.
    Restarting {
        /// From this image; `None` means from the beginning.
        image: Option<ImageId>,
        /// After this pause.
        after_us: u64,
    },
    /// The job is rewound to an image, on request.
    Rewinding {
        /// The image.
        image: ImageId,
    },
    /// The job has released its resources, until it is resumed.
    Suspended {
        /// It will continue from this image; `None` means from the beginning.
        image: Option<ImageId>,
    },
    /// The job's deadline is near: a final snapshot, then it is stopped.
    LastCall {
        /// The deadline.
        deadline: DateTime<Utc>,
        /// How long the final snapshot is expected to take, with a safety margin.
        predicted_us: u64,
    },
    /// A group image is committed: all machines have stored their parts.
    GroupCommitted {
        /// Its number.
        number: u64,
        /// The epoch in which it was taken.
        epoch: u64,
        /// The part of this machine.
        image: Option<ImageId>,
    },
    /// A group snapshot was aborted on all machines.
    GroupAborted {
        /// Its number.
        number: u64,
        /// The reason, as text.
        why: String,
        /// The machines that the reason names.
        machines: Vec<GroupMember>,
    },
    /// A machine of the group, its supervisor or its network is lost.
    GroupMemberLost {
        /// The machine.
        machine: GroupMember,
    },
    /// All machines of the group restart the job, because something was lost.
    GroupRestarting {
        /// From this group image; `None` means from the beginning.
        number: Option<u64>,
        /// The part of this machine.
        image: Option<ImageId>,
        /// The new epoch.
        epoch: u64,
        /// The cause, as text.
        why: String,
        /// The machines that the cause names.
        machines: Vec<GroupMember>,
        /// The machines that were lost before. A job may end because another machine is lost, and be seen first.
        lost: Vec<GroupMember>,
    },
    /// The run is over.
    Finished {
        /// completed, stopped, failed.
        outcome: String,
        /// The exit code of the job, if it exited.
        exit_code: Option<i32>,
        /// Why it failed, if it did, in words.
        why: Option<String>,
    },
    /// A hook failed.
    HookFailed {
        /// Its name: before-snapshot, on-failure and so on.
        hook: String,
        /// The reason, as text.
        why: String,
    },
    /// An event of a newer version.
    #[serde(other)]
    Unknown,
}

/// The file that events are written to.
#[derive(Debug)]
pub struct Journal {
    path: Beneath,
    file: Option<File>,
    complained: bool,
}

impl Journal {
    /// The journal in a job's log folder. It is opened with the first event.
    #[must_use]
    pub fn in_folder(logs: &Beneath) -> Journal {
        Journal { path: logs.join(FILE_NAME), file: None, complained: false }
    }

    /// Checks what is in the place of the journal, before a run begins.
    ///
    /// # Errors
    /// When something else than a file of ours is there. A journal that cannot be opened for another reason is no error.
    pub fn check(&self) -> Result<(), Unexpected> {
        let found = self.path.read().err();
        found.as_ref().and_then(Unexpected::in_error).map_or(Ok(()), |unexpected| Err(unexpected.clone()))
    }

    /// Writes an event.
    pub fn append(&mut self, event: &Event) {
        if let Err(error) = self.write(event) {
            // A problem of this descriptor need not affect the next one.
            self.file = None;
            if !std::mem::replace(&mut self.complained, true) {
                tracing::warn!("cannot write events to {}: {error}", self.path.display());
            }
        }
    }

    fn write(&mut self, event: &Event) -> io::Result<()> {
        let mut line = event.to_line()?.into_bytes();
        line.push(b'\n');
        if self.file.as_ref().map(File::metadata).transpose()?.is_some_and(|file| file.size() > MAX_SIZE) {
            // To be moved.
            self.file = None;
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open(&self.path)?),
        };
        // With one call, so that a concurrent reader sees all of it or nothing.
        file.write_all(&line)
    }
}

fn open(path: &Beneath) -> io::Result<File> {
    let mut file = path.append(0o600)?;
    let length = file.metadata()?.size();
    if length > MAX_SIZE {
        path.rename(&path.with_file_name(format!("{FILE_NAME}.1")))?;
        return path.append(0o600);
    }
    if length > 0 {
        // An incomplete line, left by a power cut: the next line must not be lost with it.
        let mut last = [0];
        file.read_exact_at(&mut last, length - 1)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

/// Splits what is read of a journal into lines, with little memory whatever is in it.
#[derive(Debug, Default)]
pub(super) struct Lines {
    /// The beginning of an incomplete line.
    partial: Vec<u8>,
    /// The present line is too long, or its beginning was not read: it is skipped.
    is_skipped: bool,
}

impl Lines {
    /// Reads the rest of a file: the newest `most` bytes if it has more. Adds the events of complete lines; lines that
    /// cannot be parsed are skipped.
    fn read_newest(&mut self, file: &mut File, most: u64, events: &mut Vec<Event>) -> io::Result<()> {
        let begin = file.metadata()?.size().saturating_sub(most);
        if begin > file.stream_position()? {
            file.seek(SeekFrom::Start(begin))?;
            (self.partial, self.is_skipped) = (Vec::new(), true);
        }
        // It may grow meanwhile.
        let mut reader = BufReader::new(file.take(most));
        loop {
            let bytes = reader.fill_buf()?;
            if bytes.is_empty() {
                return Ok(());
            }
            let end = bytes.iter().position(|byte| *byte == b'\n');
            let count = end.map_or(bytes.len(), |end| end + 1);
            self.add(bytes.get(..end.unwrap_or(count)).unwrap_or_default());
            reader.consume(count);
            if end.is_some() {
                events.extend(self.end());
            }
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        if self.is_skipped || self.partial.len() + bytes.len() > MAX_LINE {
            (self.partial, self.is_skipped) = (Vec::new(), true);
        } else {
            self.partial.extend(bytes);
        }
    }

    /// The event of the line that ends here.
    pub(super) fn end(&mut self) -> Option<Event> {
        let event = serde_json::from_slice(&self.partial).ok().filter(|_| !self.is_skipped);
        self.partial.clear();
        self.is_skipped = false;
        event
    }
}

/// The events of a job, oldest first; empty if there is no file. Lines that cannot be parsed are skipped.
///
/// # Errors
/// When the file cannot be read.
pub fn read(logs: &(impl Place + ?Sized)) -> io::Result<Vec<Event>> {
    let logs = logs.place()?;
    let mut events = Vec::new();
    for name in [format!("{FILE_NAME}.1"), FILE_NAME.into()] {
        read_file(&logs.join(name), MOST, &mut events)?;
    }
    Ok(events)
}

/// The newest events, from the last `bytes` bytes; empty if there is no file.
///
/// # Errors
/// When the file cannot be read.
pub fn newest(logs: &Beneath, bytes: u64) -> io::Result<Vec<Event>> {
    let mut events = Vec::new();
    read_file(&logs.join(FILE_NAME), bytes, &mut events)?;
    Ok(events)
}

/// Adds the newest events of a file, if there is one.
fn read_file(path: &Beneath, most: u64, events: &mut Vec<Event>) -> io::Result<()> {
    let mut file = match path.read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    let mut lines = Lines::default();
    lines.read_newest(&mut file, most, events)?;
    // The last line may have no end yet.
    events.extend(lines.end());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;

    fn journal(logs: &Path) -> Journal {
        Journal::in_folder(&Beneath::at(logs).unwrap())
    }

    fn began(reason: Reason) -> Event {
        Event::now("run", What::SnapshotBegan { reason })
    }

    #[test]
    fn what_was_written_is_read_across_restarts_and_damage() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), []);
        let (first, second) = (began(Reason::Interval), began(Reason::Final));
        journal(dir.path()).append(&first);
        let path = dir.path().join(FILE_NAME);
        // A supervisor, or the machine, ended in the middle of a line.
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"version\":1,\"ti").unwrap();
        journal(dir.path()).append(&second);
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
        journal(dir.path()).append(&began(Reason::Interval));
        OpenOptions::new().append(true).open(&path).unwrap().set_len(MAX_SIZE + 1).unwrap();
        journal(dir.path()).append(&began(Reason::Final));
        assert_eq!(read(dir.path()).unwrap().len(), 2);
        assert!(std::fs::metadata(&path).unwrap().size() < 1000);
    }

    #[test]
    fn a_journal_that_grows_too_long_in_one_run_is_moved_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(FILE_NAME);
        let mut journal = journal(dir.path());
        journal.append(&began(Reason::Interval));
        OpenOptions::new().append(true).open(&path).unwrap().set_len(MAX_SIZE + 1).unwrap();
        journal.append(&began(Reason::Final));
        journal.append(&began(Reason::Request));
        assert!(std::fs::metadata(&path).unwrap().size() < 1000);
        assert_eq!(read(dir.path()).unwrap().len(), 3);
    }

    #[test]
    fn a_folder_that_can_not_be_written_harms_nobody() {
        let mut journal = journal(Path::new("/proc/nowhere"));
        journal.append(&began(Reason::Interval));
        assert!(journal.complained);
    }

    #[test]
    fn only_the_newest_part_of_a_file_that_is_too_long_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second, third] = [Reason::Interval, Reason::Final, Reason::Signal].map(began);
        journal(dir.path()).append(&first);
        let path = dir.path().join(FILE_NAME);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(2 << 40).unwrap();
        File::create(dir.path().join("events.jsonl.1")).unwrap().set_len(2 << 40).unwrap();
        let add = |event: &Event| {
            let line = format!("\n{}", event.to_line().unwrap());
            OpenOptions::new().append(true).open(&path).unwrap().write_all(line.as_bytes()).unwrap();
        };
        add(&second);
        // A line that is too long, and would be an event.
        let pad = " ".repeat(MAX_LINE) + &third.to_line().unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(format!("\n{pad}\n").as_bytes()).unwrap();
        add(&third);
        assert_eq!(read(dir.path()).unwrap(), [second, third.clone()]);
        assert_eq!(newest(&Beneath::at(dir.path()).unwrap(), 1000).unwrap(), [third]);
    }

    #[test]
    fn what_others_put_in_the_place_of_the_journal_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (logs, secret) = (dir.path().join("log"), dir.path().join("secret"));
        std::fs::create_dir(&logs).unwrap();
        std::fs::write(&secret, "root's").unwrap();
        let path = logs.join(FILE_NAME);
        let event = began(Reason::Interval);
        let refused = |what: &str| {
            let mut journal = journal(&logs);
            journal.append(&event);
            assert!(journal.complained && journal.file.is_none(), "{what}");
            let (check, read) = (journal.check().unwrap_err(), read(&logs).unwrap_err());
            assert_eq!(Some(&check), Unexpected::in_error(&read));
            assert!(check.to_string().ends_with(&format!("log/{FILE_NAME} is {what}, and should be a regular file")));
            assert!(newest(&Beneath::at(&logs).unwrap(), 100).is_err());
        };
        assert_eq!(journal(&logs).check(), Ok(()), "there is none yet");
        symlink(&secret, &path).unwrap();
        refused("a symbolic link");
        std::fs::remove_file(&path).unwrap();
        // Nobody opens the other end, ever.
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused("a FIFO");
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&secret, &path).unwrap();
        assert_eq!(journal(&logs).check(), Ok(()));
        journal(&logs).append(&event);
        assert_eq!(read(&logs).unwrap(), [event]);
        assert_eq!(std::fs::read(&secret).unwrap(), b"root's");
        std::fs::rename(&logs, dir.path().join("moved")).unwrap();
        symlink("moved", &logs).unwrap();
        assert!(
            journal(&logs).check().unwrap_err().to_string().ends_with("log is a symbolic link, and should be a folder")
        );
    }

    #[test]
    fn a_journal_that_is_exchanged_meanwhile_harms_nobody() {
        let dir = tempfile::tempdir().unwrap();
        let (path, secret) = (dir.path().join(FILE_NAME), dir.path().join("secret"));
        std::fs::write(&secret, "root's").unwrap();
        let mut journal = journal(dir.path());
        journal.append(&began(Reason::Interval));
        let moved = dir.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        symlink(&secret, &path).unwrap();
        journal.append(&began(Reason::Final));
        assert_eq!(std::fs::read_to_string(&moved).unwrap().lines().count(), 2, "the open one is used");
        assert!(!journal.complained);
        OpenOptions::new().append(true).open(&moved).unwrap().set_len(MAX_SIZE + 1).unwrap();
        for _ in 0..2 {
            journal.append(&began(Reason::Request));
        }
        assert!(journal.complained);
        assert_eq!(std::fs::read(&secret).unwrap(), b"root's");
        std::fs::remove_file(&path).unwrap();
        journal.append(&began(Reason::Signal));
        assert_eq!(read(dir.path()).unwrap(), [began_like(&read(dir.path()).unwrap(), Reason::Signal)]);
    }

    /// The only event, which has this reason.
    fn began_like(events: &[Event], reason: Reason) -> Event {
        Event { time: events[0].time, ..began(reason) }
    }
}

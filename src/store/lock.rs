//! One writer a job: an flock on `JOB/lock`.
//!
//! The lock is the kernel's, so it ends with its holder however that dies; what the file says is only for the error
//! message. The file is never removed: two processes could then hold locks on two files of that name. The lock
//! belongs to the open file description: a child that is forked and does not exec keeps it.

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::id::JobName;

pub(super) const FILE_NAME: &str = "lock";
/// [`writer`] takes the lock for some microseconds; a writer that comes just then must not be turned away.
const TRIES: u32 = 5;
const PAUSE: Duration = Duration::from_millis(20);
/// A holder is some hundred bytes.
const MAX_BYTES: u64 = 4 << 10;

/// The right to change a job's folder. Dropping it gives the right back.
#[derive(Debug)]
pub struct WriterLock {
    folder: PathBuf,
    _file: File,
}

impl WriterLock {
    /// Whether this is the lock of the job whose folder that is.
    pub(super) fn guards(&self, folder: &Path) -> bool {
        self.folder == folder
    }
}

/// Who supervises a job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// As the supervisor's own PID namespace counts.
    pub pid: u32,
    /// The name of its machine.
    pub host: String,
    /// The boot of that machine.
    pub boot_id: String,
    /// When it took the lock.
    pub since: DateTime<Utc>,
}

/// Who may change a job's folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writer {
    /// The job has no supervisor.
    Nobody,
    /// It has one.
    Known(Holder),
    /// It has one that has not written its name yet, or could not.
    Unnamed,
}

impl Holder {
    fn this_process() -> Holder {
        let host = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned());
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        Holder {
            pid: std::process::id(),
            host: host.unwrap_or_else(|_| "unknown".to_owned()),
            boot_id: boot_id.map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned()),
            since: Utc::now(),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let since = self.since.to_rfc3339_opts(SecondsFormat::Secs, true);
        write!(f, "pid {} on host {} since {since}", self.pid, self.host)
    }
}

pub(super) fn acquire(folder: &Path, job: &JobName) -> Result<WriterLock> {
    let path = folder.join(FILE_NAME);
    let failed = |source| Error::Lock { path: path.clone(), source };
    let mut file = open(&path, Create::Yes).map_err(failed)?;
    for attempt in 1.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if attempt < TRIES => thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Supervised { job: job.clone(), holder: read_holder(&mut file) });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
    }
    write_holder(&mut file).map_err(|source| Error::Write { path: path.clone(), source })?;
    Ok(WriterLock { folder: folder.to_owned(), _file: file })
}

/// Who holds the lock just now. Takes it shared for a moment, so it can be asked by anyone who may read the file.
pub(super) fn writer(folder: &Path) -> Result<Writer> {
    let path = folder.join(FILE_NAME);
    let mut file = match open(&path, Create::No) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Writer::Nobody),
        Err(source) => return Err(Error::Read { path, source }),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(Writer::Nobody),
        Err(TryLockError::WouldBlock) => Ok(read_holder(&mut file).map_or(Writer::Unnamed, Writer::Known)),
        Err(TryLockError::Error(source)) => Err(Error::Lock { path, source }),
    }
}

enum Create {
    Yes,
    No,
}

fn open(path: &Path, create: Create) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    match create {
        Create::Yes => options.write(true).create(true).truncate(false),
        Create::No => &mut options,
    };
    let file = options.open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("not a regular file")) }
}

fn write_holder(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(&serde_json::to_vec(&Holder::this_process())?)
}

/// None where the holder has not written yet.
fn read_holder(file: &mut File) -> Option<Holder> {
    let mut bytes = Vec::new();
    file.rewind().ok()?;
    file.take(MAX_BYTES).read_to_end(&mut bytes).ok()?;
    serde_json::from_slice(&bytes).ok()
}

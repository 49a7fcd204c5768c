//! One writer for each job: an flock on `JOB/lock`, and the identity of its holder in that file.
//!
//! The kernel releases the lock when the holder ends, for whatever reason. The file is never removed, otherwise two
//! processes could lock two files of that name. The lock belongs to the open file description: a child that is forked
//! and does not exec has it, too.
//!
//! Some shared file systems lock within one machine only, without an error (NFS version 3 mounted with `nolock`, Lustre
//! with `localflock`, several FUSE ones). There the kernel gives the lock to two machines. So the identity in the file
//! counts as well. A holder renews the file's time stamp every [`crate::HEARTBEAT`]. A process that gets the lock is refused
//! if the file names another holder that may be alive ([`judge`]). A holder that ends empties the file. A holder that
//! was taken over, because it stalled for longer than [`STALE`], finds another name in the file at its next heartbeat
//! and has to stop ([`Error::TakenOver`]).
//!
//! So everything that publishes, replaces or removes first confirms that the lock is still held
//! ([`WriterLock::confirm`]), by the name in the file and by the file itself: a replaced file is another lock. Long
//! writes check again and again ([`WriterLock::still_held`]). A process that is stopped between the check and its write
//! still does that write when it continues; no file system can prevent this.
//!
//! After a power cut, and after a holder was killed, the name remains. The other boot, the dead pid or the age of the time
//! stamp then show that the holder is gone. If that holder was on another machine, [`acquire_or_wait`] waits for a sign
//! of life ([`watch`]), and takes over if there is none.

mod held;
mod judge;
mod wait;
mod watch;

use std::fs::{File, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;

pub use held::Hold;
use judge::{Facts, Verdict};
pub use wait::{Until, Waiting};
use watch::{Proof, Sign, Terms};

use super::error::{Error, Result};
use super::holder::{Holder, STALE};
use super::id::{ImageId, JobName};
use rekindle_os::beneath::{Beneath, Unexpected};
use rekindle_os::clock;
use rekindle_os::durable::unforeseen;

pub(super) const FILE_NAME: &str = "lock";
/// How long the result of a check is reused by frequent checks.
const CERTAIN: Duration = Duration::from_secs(1);
/// How often to try to take the lock: [`writer`] holds it for some microseconds, which must not turn a writer away. In tests
/// children of others may have it, until they execute their programs.
const TRIES: u32 = if cfg!(test) { 50 } else { 5 };
const PAUSE: Duration = Duration::from_millis(20);
/// How long to wait for a holder to die: a killed process loses its locks some moments before it counts as dead.
const DYING: Duration = Duration::from_secs(2);
/// If locks do not work and two processes take over from the same dead holder, both write their name; after this time
/// the last name counts.
const SETTLE: Duration = Duration::from_secs(1);
/// A file for a moment, by which the clock of a file system is read. The next start removes one that a crash left.
const CLOCK: &str = ".tmp-clock";
/// Maximum size of the file; a holder has some hundred bytes.
const MAX_BYTES: u64 = 4 << 10;

/// The right to change a job's folder. Dropping it releases the lock.
#[derive(Debug)]
pub struct WriterLock {
    folder: Beneath,
    job: JobName,
    file: Arc<File>,
    me: Holder,
    /// The previous holder on another machine, and the time since its last heartbeat.
    silent: Option<(Holder, Duration)>,
    /// The last heartbeat of a previous holder that did not empty the file.
    last_seen: Option<SystemTime>,
    held: held::Held,
    /// Images that the present life may prove, oldest first.
    waiting: Mutex<Vec<ImageId>>,
    /// Held by the one thread that changes the packs.
    packs: Mutex<()>,
    /// When the lock was last confirmed, in milliseconds since the boot.
    confirmed: AtomicU64,
}

/// The supervisor of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writer {
    /// The job has no supervisor.
    Nobody,
    /// It has this one.
    Known(Holder),
    /// It has one that has not written its name yet, or could not.
    Unnamed,
}

impl WriterLock {
    /// Prevents retention from removing the image while the returned value exists: the image is being read.
    #[must_use]
    pub fn hold(&self, id: ImageId) -> Hold {
        self.held.hold(id)
    }

    /// The images that are protected in this way.
    pub(super) fn held(&self) -> Vec<ImageId> {
        self.held.ids()
    }

    /// Tells retention which images the present life may prove, the oldest first: the first existing one is kept until
    /// it is proven.
    pub fn wait_for_proof(&self, images: Vec<ImageId>) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = images;
    }

    /// The images that the present life may prove.
    pub(super) fn waiting(&self) -> Vec<ImageId> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Waits until no other thread of this process changes the job's packs: a thread must not remove what another one
    /// has found in a pack and relies on.
    pub fn packs(&self) -> MutexGuard<'_, ()> {
        // It protects files, whose state does not depend on a panic.
        self.packs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a thread of this process changes the job's packs now.
    pub(super) fn changes_packs(&self) -> bool {
        matches!(self.packs.try_lock(), Err(std::sync::TryLockError::WouldBlock))
    }

    /// Checks with the file whether the lock is still ours. Call it before something is published, replaced or removed.
    ///
    /// # Errors
    /// [`Error::TakenOver`], [`Error::LockReplaced`]: another process may have the folder now, and nothing may be
    /// written any more. [`Error::Read`]: this is unknown, and nothing may be written until it is known.
    pub fn confirm(&self) -> Result<()> {
        self.look().map(drop)
    }

    /// The same for frequent checks: a check of the file is valid for a second. That second includes sleep of the
    /// machine.
    ///
    /// # Errors
    /// As [`WriterLock::confirm`].
    pub fn still_held(&self) -> Result<()> {
        if self.unconfirmed() < CERTAIN { Ok(()) } else { self.confirm() }
    }

    /// The time since the lock was last confirmed, including sleep of the machine.
    #[must_use]
    pub fn unconfirmed(&self) -> Duration {
        clock::since_boot().saturating_sub(Duration::from_millis(self.confirmed.load(Ordering::Relaxed)))
    }

    /// The holder in the file, if that is us, or `None` if the file was emptied by hand; an error if it is another one.
    fn look(&self) -> Result<Option<Holder>> {
        let asked = clock::since_boot();
        let holder = named_in(&self.folder, &self.job, &self.file, &self.me)?;
        self.confirmed.store(u64::try_from(asked.as_millis()).unwrap_or(0), Ordering::Relaxed);
        Ok(holder)
    }

    /// Whether this is the lock of the job with this folder.
    pub(super) fn guards(&self, folder: &Beneath) -> bool {
        self.folder == *folder
    }

    /// The holder on another machine from which this lock was taken over, and the time since its last heartbeat.
    #[must_use]
    pub fn silent_holder(&self) -> Option<(&Holder, Duration)> {
        self.silent.as_ref().map(|(holder, silent)| (holder, *silent))
    }

    /// The last heartbeat of a previous holder that ended without emptying the file.
    #[must_use]
    pub fn last_seen(&self) -> Option<SystemTime> {
        self.last_seen
    }

    /// The heartbeat: call it every [`crate::HEARTBEAT`] while the lock is held.
    ///
    /// # Errors
    /// Those of [`WriterLock::confirm`]; [`Error::Write`]: this heartbeat failed.
    pub fn refresh(&self) -> Result<()> {
        let failed = |source| Error::Write { path: self.folder.join(FILE_NAME).path().to_owned(), source };
        if self.look()?.is_none() {
            // Somebody emptied the file by hand, because we seemed to be dead.
            write_holder(&self.file, &self.me).map_err(failed)?;
        }
        beat(&self.file).map_err(failed)
    }

    /// Gives the lock back if the process ends without dropping it.
    #[must_use]
    pub fn release_at_exit(&self) -> ReleaseAtExit {
        let (folder, job, file) = (self.folder.clone(), self.job.clone(), Arc::downgrade(&self.file));
        ReleaseAtExit { folder, job, file, me: self.me.clone() }
    }
}

impl Drop for WriterLock {
    fn drop(&mut self) {
        forget_us(&self.folder, &self.job, &self.file, &self.me);
    }
}

/// Gives a lock back at the end of the process: a supervisor on another machine then need not wait until this one counts
/// as dead.
#[derive(Debug)]
pub struct ReleaseAtExit {
    folder: Beneath,
    job: JobName,
    file: Weak<File>,
    me: Holder,
}

impl ReleaseAtExit {
    /// Empties the file, if the lock is still there and ours. The process must end at once: where the locks of the file
    /// system do not work, another one may take the lock from now on.
    pub fn release(&self) {
        if let Some(file) = self.file.upgrade() {
            forget_us(&self.folder, &self.job, &file, &self.me);
        }
    }
}

/// Empties the file if the lock is still ours.
fn forget_us(folder: &Beneath, job: &JobName, ours: &File, me: &Holder) {
    if named_in(folder, job, ours, me).is_ok() {
        // If the name stays, it is recognised as that of a dead process.
        let _ = ours.set_len(0);
    }
}

/// The holder in the file, if that is us, or `None` if the file was emptied by hand; an error if it is another one, or
/// another file than ours.
fn named_in(folder: &Beneath, job: &JobName, ours: &File, me: &Holder) -> Result<Option<Holder>> {
    let named = folder.join(FILE_NAME);
    let failed = |source| Error::Read { path: named.path().to_owned(), source };
    // The file is opened by name again, so that a network file system asks its server.
    let file = named.read().map_err(failed)?;
    let holder = read_holder(&file).map_err(failed)?;
    if let Some(holder) = holder.as_ref().filter(|holder| *holder != me) {
        return Err(Error::TakenOver { job: job.clone(), holder: holder.clone().into() });
    }
    let [there, ours] = [&file, ours].map(File::metadata);
    let (there, ours) = (there.map_err(failed)?, ours.map_err(failed)?);
    if (there.dev(), there.ino()) != (ours.dev(), ours.ino()) {
        return Err(Error::LockReplaced { job: job.clone(), file: named.path().to_owned() });
    }
    Ok(holder)
}

pub(super) fn acquire(folder: &Beneath, job: &JobName) -> Result<WriterLock> {
    take(folder, job, Proof::Stamp)
}

/// The same for a caller that can wait: waits while the file names a holder on another machine that shows no sign of
/// life, and takes over at the end. `tell` is called again and again in the meantime.
pub(super) fn acquire_or_wait(
    folder: &Beneath,
    job: &JobName,
    tell: &mut dyn FnMut(&Waiting<'_>),
) -> Result<WriterLock> {
    wait::wait(folder, job, &Terms::USUAL, tell)
}

fn take(folder: &Beneath, job: &JobName, proof: Proof<'_>) -> Result<WriterLock> {
    let named = folder.join(FILE_NAME);
    let path = || named.path().to_owned();
    let failed = |source| Error::Lock { path: path(), source };
    make_own(&named, job)?;
    let file = named.change_or_create(0o600).map_err(|source| match Unexpected::in_error(&source) {
        Some(_) => Error::Write { path: path(), source },
        None => failed(source),
    })?;
    for attempt in 1.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if attempt < TRIES => thread::sleep(PAUSE),
            Err(TryLockError::WouldBlock) => {
                let holder = read_holder(&file).ok().flatten().map(Box::new);
                return Err(Error::Supervised { job: job.clone(), holder });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
    }
    let me = Holder::this_process();
    let (silent, last_seen) = earlier_holder(&file, folder, &me, job, proof)?;
    let written = |source| Error::Write { path: path(), source };
    write_holder(&file, &me).map_err(written)?;
    let lock = WriterLock {
        folder: folder.clone(),
        job: job.clone(),
        file: Arc::new(file),
        me,
        silent,
        last_seen,
        held: held::Held::default(),
        waiting: Mutex::default(),
        packs: Mutex::new(()),
        confirmed: AtomicU64::new(0),
    };
    lock.confirm()?;
    if lock.silent.is_some() {
        thread::sleep(SETTLE);
        lock.refresh()?;
    }
    Ok(lock)
}

/// A backup made with `cp -al` names the same file, which must not change there: then the lock gets a file of its own,
/// unless somebody has it.
fn make_own(named: &Beneath, job: &JobName) -> Result<()> {
    // What cannot be read is told by who opens it next.
    let Ok(file) = named.read() else { return Ok(()) };
    if file.metadata().is_ok_and(|metadata| metadata.nlink() <= 1) {
        return Ok(());
    }
    match file.try_lock() {
        Ok(()) => named.make_own().map_err(|source| Error::Write { path: named.path().to_owned(), source }),
        Err(TryLockError::WouldBlock) => {
            let holder = read_holder(&file).ok().flatten().map(Box::new);
            Err(Error::Supervised { job: job.clone(), holder })
        }
        Err(TryLockError::Error(source)) => Err(Error::Lock { path: named.path().to_owned(), source }),
    }
}

/// A holder that counts as dead only because of missing heartbeats, and the last heartbeat of one that ended without
/// emptying the file.
type Earlier = (Option<(Holder, Duration)>, Option<SystemTime>);

/// Judges whether the holder named in the file is alive.
fn earlier_holder(file: &File, folder: &Beneath, me: &Holder, job: &JobName, proof: Proof<'_>) -> Result<Earlier> {
    let named = folder.join(FILE_NAME);
    let begun = Instant::now();
    loop {
        let read = |source| Error::Read { path: named.path().to_owned(), source };
        if read_holder(file).map_err(read)?.is_none() {
            return Ok((None, None));
        }
        // First the clock, because the file system may take its time for it: what the file says must be new. NFS asks the
        // server when a file is opened; of an open file it may know the attributes of a minute ago.
        let now = clock_of(folder).unwrap_or_else(SystemTime::now);
        let file = named.read().map_err(read)?;
        let Some(holder) = read_holder(&file).map_err(read)? else { return Ok((None, None)) };
        let heartbeat = file.metadata().and_then(|metadata| metadata.modified()).map_err(read)?;
        let verdict = judge::judge(&holder, &Facts::now(me, heartbeat, now));
        let sign = Sign { holder, stamp: heartbeat };
        let verdict = proof.weighs(verdict, &sign, me, Instant::now());
        let holder = sign.holder;
        match verdict {
            Verdict::Dead => return Ok((None, Some(heartbeat))),
            Verdict::Silent(silent) => return Ok((Some((holder, silent)), Some(heartbeat))),
            Verdict::Alive { .. } if holder.boot_id == me.boot_id && begun.elapsed() < DYING => thread::sleep(PAUSE),
            Verdict::Alive { silent } => {
                let (job, file) = (job.clone(), named.path().to_owned());
                return Err(Error::PerhapsSupervised { job, holder: holder.into(), silent, file });
            }
        }
    }
}

/// The time of the clock that stamps files in this folder; on a shared file system this is the server's.
fn clock_of(folder: &Beneath) -> Option<SystemTime> {
    let named = folder.join(unforeseen(CLOCK.as_ref()));
    let mut file = named.create_new(0o600).ok()?;
    named.remove_file().ok()?;
    file.write_all(b"now").ok()?;
    file.sync_all().ok()?;
    file.metadata().ok()?.modified().ok()
}

/// The present holder of the lock. Takes it shared for a moment, so anyone who may read the file can ask.
pub(super) fn writer(folder: &Beneath) -> Result<Writer> {
    let named = folder.join(FILE_NAME);
    let path = || named.path().to_owned();
    let file = match named.read() {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Writer::Nobody),
        Err(source) => return Err(Error::Read { path: path(), source }),
    };
    let holder = read_holder(&file).ok().flatten();
    match file.try_lock_shared() {
        Err(TryLockError::WouldBlock) => Ok(holder.map_or(Writer::Unnamed, Writer::Known)),
        Err(TryLockError::Error(source)) => Err(Error::Lock { path: path(), source }),
        Ok(()) => {
            // Another machine may hold it nevertheless, if locks are local to a machine.
            let (Some(holder), Ok(heartbeat)) = (holder, file.metadata().and_then(|metadata| metadata.modified()))
            else {
                return Ok(Writer::Nobody);
            };
            let me = Holder::this_process();
            match judge::judge(&holder, &Facts::now(&me, heartbeat, SystemTime::now())) {
                // For a holder on this machine the kernel's answer is correct.
                Verdict::Alive { .. } if holder.boot_id != me.boot_id => Ok(Writer::Known(holder)),
                _ => Ok(Writer::Nobody),
            }
        }
    }
}

fn write_holder(mut file: &File, holder: &Holder) -> io::Result<()> {
    file.set_len(0)?;
    io::Seek::rewind(&mut file)?;
    file.write_all(&serde_json::to_vec(holder)?)?;
    // Makes it visible to others. Durability is not needed: after a power cut the name would be that of a dead process.
    file.sync_data()
}

/// `None` if there is no name yet, or it cannot be parsed.
fn read_holder(mut file: &File) -> io::Result<Option<Holder>> {
    let mut bytes = Vec::new();
    io::Seek::rewind(&mut file)?;
    file.take(MAX_BYTES).read_to_end(&mut bytes)?;
    Ok(serde_json::from_slice(&bytes).ok())
}

/// Sets the time stamp, by the clock of the file system if it has its own.
fn beat(file: &File) -> io::Result<()> {
    Ok(futimens(file, &TimeSpec::UTIME_OMIT, &TimeSpec::UTIME_NOW)?)
}

#[cfg(test)]
mod tests;

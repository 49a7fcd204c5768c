//! The wait for a lock that a holder on another machine may have.

use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use super::watch::{Proof, Sign, Terms, Watch};
use super::{FILE_NAME, WriterLock, read_holder, take};
use crate::error::{Error, Result};
use crate::holder::Holder;
use crate::id::JobName;
use rekindle_os::beneath::Beneath;

/// Why the lock is not there yet: a holder on another machine, which may be dead.
#[derive(Debug)]
pub struct Waiting<'a> {
    /// The lock file.
    pub file: &'a Path,
    /// The holder that it names.
    pub holder: &'a Holder,
    /// How the wait ends without a sign of life.
    pub until: Until,
    /// For how long it lasts then.
    pub left: Duration,
}

/// How a wait for the lock ends if the holder shows no sign of life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// The kernel's lock is free: the holder's lock is taken over.
    TakenOver,
    /// The holder has the kernel's lock, so it is not taken over, however long it is silent.
    Refused,
}

pub(super) fn wait(
    folder: &Beneath,
    job: &JobName,
    terms: &Terms,
    tell: &mut dyn FnMut(&Waiting<'_>),
) -> Result<WriterLock> {
    let (named, here) = (folder.join(FILE_NAME), Holder::this_process().boot_id);
    let mut watch: Option<Watch> = None;
    loop {
        let mut is_silent = true;
        if let Some(sign) = sign(&named).map_err(|source| Error::Read { path: named.path().to_owned(), source })? {
            let now = Instant::now();
            match &mut watch {
                Some(watch) => is_silent = watch.sees(&sign, terms.gap, now),
                None => watch = Some(Watch::begin(sign, now)),
            }
        }
        // After a sign of life nothing is proven any more: whoever the file names now is refused, unless that is a dead
        // process of this machine.
        let watched = watch.as_ref().filter(|_| is_silent);
        let error = match take(folder, job, Proof::Watched(watched, terms)) {
            Ok(lock) => return Ok(lock),
            Err(error) => error,
        };
        let (holder, until, needed) = match &error {
            Error::PerhapsSupervised { holder, silent, .. } => (holder, Until::TakenOver, terms.needed(*silent)),
            Error::Supervised { holder: Some(holder), .. } => (holder, Until::Refused, terms.stale),
            _ => return Err(error),
        };
        let left = needed.saturating_sub(watched.map_or(Duration::ZERO, Watch::length));
        if !is_silent || holder.boot_id == here || (until == Until::Refused && left.is_zero()) {
            return Err(error);
        }
        tell(&Waiting { file: named.path(), holder, until, left });
        thread::sleep(terms.look);
    }
}

/// The holder that the file names, and its time stamp. The file is opened by name, so that a network file system asks its
/// server.
fn sign(named: &Beneath) -> io::Result<Option<Sign>> {
    let file = match named.read() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let Some(holder) = read_holder(&file)? else { return Ok(None) };
    Ok(Some(Sign { holder, stamp: file.metadata()?.modified()? }))
}

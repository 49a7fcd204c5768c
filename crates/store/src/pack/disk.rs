//! The thread that writes packs to the disk while hashing continues.
//!
//! A pack is created in these steps, in this order:
//!
//! 1. it is written as `.tmp-NAME.pack`
//! 2. that file is synced
//! 3. it gets the name `NAME.pack`, and `packs/` is synced
//! 4. `NAME.idx` is written durably
//!
//! After a power cut before 3 there is a temporary file, which the next start removes; between 3 and 4 a pack without
//! an index, whose records are found by reading them; after 4 everything. A pack that no image refers to is unneeded,
//! and is removed as such.

use std::io;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use super::{Entry, PackIndex, PackName, Packs};
use crate::{FileError, failed};
use rekindle_os::beneath::Beneath;
use rekindle_os::direct::{Aligned, DirectFile, Way};
use rekindle_os::durable::{self, TEMP_PREFIX};
use rekindle_os::point::{Step, point};

/// Messages to the thread.
pub(super) enum Job {
    /// Begin a pack.
    Begin(PackName),
    /// Write the first `len` bytes of `memory` at this offset.
    Write { memory: Aligned, len: usize, offset: u64 },
    /// Close the pack, which has this length and these entries.
    Close { len: u64, entries: Vec<Entry> },
}

/// The thread, and the buffers that circulate.
pub(super) struct Disk {
    packs: Packs,
    jobs: Option<SyncSender<Job>>,
    free: Receiver<Aligned>,
    thread: Option<JoinHandle<Result<(), FileError>>>,
}

impl Disk {
    /// Starts the thread, with this number of buffers of this size.
    pub(super) fn start(packs: &Packs, pieces: usize, size: usize, way: Way) -> Result<Disk, FileError> {
        let (jobs, inbox) = sync_channel(pieces + 2);
        let (give_back, free) = sync_channel(pieces);
        for _ in 0..pieces {
            // The channel has room for all of them.
            let _ = give_back.try_send(Aligned::new(size));
        }
        let mine = packs.clone();
        let work = move || run(&mine, way, &inbox, &give_back);
        let thread = thread::Builder::new().name("packs".into()).spawn(work);
        let thread = thread.map_err(failed("start a thread that writes to", packs.dir()))?;
        Ok(Disk { packs: packs.clone(), jobs: Some(jobs), free, thread: Some(thread) })
    }

    /// A buffer that is not being written; waits for one.
    pub(super) fn memory(&mut self) -> Result<Aligned, FileError> {
        match self.free.recv() {
            Ok(memory) => Ok(memory),
            Err(_) => Err(self.why()),
        }
    }

    pub(super) fn send(&mut self, job: Job) -> Result<(), FileError> {
        match self.jobs.as_ref().map(|jobs| jobs.send(job)) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.why()),
        }
    }

    /// Waits until everything is written.
    pub(super) fn finish(mut self) -> Result<(), FileError> {
        self.jobs = None;
        self.join().unwrap_or(Ok(()))
    }

    /// Why the thread ended although there was work.
    fn why(&mut self) -> FileError {
        self.jobs = None;
        match self.join() {
            Some(Err(error)) => error,
            _ => self.failed("write to", io::Error::other("the writing thread has ended")),
        }
    }

    /// An error that concerns all packs.
    pub(super) fn failed(&self, what: &'static str, source: io::Error) -> FileError {
        failed(what, self.packs.dir())(source)
    }

    fn join(&mut self) -> Option<Result<(), FileError>> {
        Some(self.thread.take()?.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread removes the pack that is not closed; nobody must find it after this.
            let _ = thread.join();
        }
    }
}

/// A pack before step 3. It is removed if this is dropped.
struct Temporary {
    name: PackName,
    path: Beneath,
    file: DirectFile,
    kept: bool,
}

impl Temporary {
    fn create(packs: &Packs, name: PackName, way: Way) -> Result<Temporary, FileError> {
        let path = packs.dir().join(format!("{TEMP_PREFIX}{name}.pack"));
        let file = point(Step::Write).and_then(|()| DirectFile::create(&path, way)).map_err(failed("create", &path))?;
        Ok(Temporary { name, path, file, kept: false })
    }

    /// Steps 2 to 4.
    fn close(mut self, packs: &Packs, len: u64, entries: Vec<Entry>) -> Result<(), FileError> {
        let lasting = packs.pack_path(self.name);
        let synced = self.file.cut(len).and_then(|()| point(Step::Other)).and_then(|()| self.file.sync());
        synced.map_err(failed("sync", &self.path))?;
        durable::publish_file(&self.path, &lasting).map_err(failed("rename", &lasting))?;
        self.kept = true;
        let path = packs.index_path(self.name);
        let bytes = PackIndex::new(len, entries).to_bytes();
        durable::write_file(&path, &bytes, 0o600).map_err(failed("write", &path))
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.kept {
            // If it cannot be removed now, the next start removes it.
            let _ = self.path.remove_file();
        }
    }
}

fn run(packs: &Packs, way: Way, jobs: &Receiver<Job>, free: &SyncSender<Aligned>) -> Result<(), FileError> {
    let mut open: Option<Temporary> = None;
    for job in jobs {
        match (job, &mut open) {
            (Job::Begin(name), _) => open = Some(Temporary::create(packs, name, way)?),
            (Job::Write { memory, len, offset }, Some(pack)) => {
                let bytes = memory.get(..len).unwrap_or_default();
                point(Step::Write)
                    .and_then(|()| pack.file.write_at(bytes, offset))
                    .map_err(failed("write", &pack.path))?;
                // If this fails, nobody waits for a buffer any more.
                let _ = free.send(memory);
            }
            (Job::Close { len, entries }, _) => {
                if let Some(pack) = open.take() {
                    pack.close(packs, len, entries)?;
                }
            }
            (Job::Write { .. }, None) => {}
        }
    }
    Ok(())
}

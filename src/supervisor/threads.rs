//! The threads that do what takes long: they report with a message.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::Builder;
use std::time::{Duration, Instant};

use super::{Message, Owner};

/// How often it is tried again to start threads.
const AGAIN: Duration = Duration::from_secs(1);

/// For how long a snapshot may last until the log says so. It copies all GPU memory, at several GB/s.
const LONG_SNAPSHOT: Duration = Duration::from_secs(300);

/// For how long storing an image may last until the log says so: as long as the longest interval that is chosen.
const LONG_STORE: Duration = Duration::from_secs(3600);

type Work = Box<dyn FnOnce() + Send>;

/// Threads that are to be started. The job and the supervisor often have one limit of threads together (of a pod, a unit or a
/// Slurm job). If the job uses it up, the work waits: that is no reason to end the job.
pub(super) struct Threads {
    /// They send their reports here.
    pub(super) sender: mpsc::Sender<Message>,
    waiting: Vec<(String, Work)>,
    tried: Option<Instant>,
}

impl Threads {
    pub(super) fn new(sender: mpsc::Sender<Message>) -> Threads {
        Threads { sender, waiting: Vec::new(), tried: None }
    }

    /// Starts a thread, or lets the work wait, and says why it has to.
    fn start(&mut self, name: &str, work: Work, now: Instant) -> io::Result<()> {
        let Err((error, work)) = start(name, work) else { return Ok(()) };
        self.waiting.push((name.to_owned(), work));
        self.tried = Some(now);
        Err(error)
    }

    /// Starts what waits, if its time has come.
    fn start_waiting(&mut self, now: Instant) {
        if self.next_wake().is_none_or(|at| now < at) {
            return;
        }
        self.tried = Some(now);
        for (name, work) in std::mem::take(&mut self.waiting) {
            if let Err((_, work)) = start(&name, work) {
                self.waiting.push((name, work));
            }
        }
    }

    /// When to try again to start what waits.
    pub(super) fn next_wake(&self) -> Option<Instant> {
        self.tried.filter(|_| !self.waiting.is_empty()).map(|at| at + AGAIN)
    }
}

/// Starts a thread, or returns the work.
fn start(name: &str, work: Work) -> Result<(), (io::Error, Work)> {
    // A builder that fails drops what it was given.
    let held = Arc::new(Mutex::new(Some(work)));
    let take = |held: &Mutex<Option<Work>>| held.lock().unwrap_or_else(PoisonError::into_inner).take();
    let theirs = Arc::clone(&held);
    let run = move || {
        if let Some(work) = take(&theirs) {
            work();
        }
    };
    match Builder::new().name(name.into()).spawn(run) {
        Ok(_) => Ok(()),
        Err(error) => match take(&held) {
            Some(work) => Err((error, work)),
            None => Ok(()),
        },
    }
}

impl Owner<'_> {
    /// Starts a thread, now or as soon as one can be started.
    pub(super) fn spawn(&mut self, name: &str, work: impl FnOnce() + Send + 'static) {
        if let Err(error) = self.threads.start(name, Box::new(work), Instant::now()) {
            let text = format!(
                "cannot start a thread ({name}): {error}. It is tried again every second; the limit of threads \
                 (pids.max, ulimit -u) may be too low for the job and rekindle together"
            );
            self.reporting.remarks.repeats.warn("threads", &text);
        }
    }

    pub(super) fn start_waiting_threads(&mut self) {
        self.threads.start_waiting(Instant::now());
    }

    /// Says so if a snapshot, or storing an image, does not end.
    pub(super) fn report_slow_work(&self) {
        let repeats = &self.reporting.remarks.repeats;
        let now = Instant::now();
        let lasts = |begun: Option<Instant>| begun.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        let shown = |time: Duration| humantime::format_duration(Duration::from_secs(time.as_secs())).to_string();
        let snapshot = lasts(self.life.snapshot_begun());
        if snapshot > LONG_SNAPSHOT {
            let text = format!(
                "the snapshot has lasted for {} and the job may be frozen: a GPU's driver, CRIU or a file system may not \
                 answer. The last lines of `dmesg` may say more. `rekindle stop --now` ends the job without this snapshot",
                shown(snapshot)
            );
            repeats.warn("slow snapshot", &text);
        }
        let store = lasts(self.transfers.storing_since());
        if store > LONG_STORE {
            let text = format!(
                "storing an image has lasted for {}; the next snapshot waits for it. Check the store's file system",
                shown(store)
            );
            repeats.warn("slow store", &text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_without_a_thread_waits_and_is_done_once() {
        let (sender, done) = mpsc::channel();
        let mut threads = Threads::new(mpsc::channel().0);
        let begun = Instant::now();
        let send = |word: &'static str| {
            let sender = sender.clone();
            Box::new(move || sender.send(word).unwrap())
        };
        threads.start("now", send("now"), begun).unwrap();
        assert_eq!((done.recv().unwrap(), threads.next_wake()), ("now", None));

        threads.waiting.push(("later".into(), send("later")));
        threads.tried = Some(begun);
        assert_eq!(threads.next_wake(), Some(begun + AGAIN));
        threads.start_waiting(begun + AGAIN / 2);
        assert_eq!((done.try_recv().ok(), threads.waiting.len()), (None, 1));
        threads.start_waiting(begun + AGAIN);
        assert_eq!((done.recv().unwrap(), threads.next_wake()), ("later", None));
        threads.start_waiting(begun + 2 * AGAIN);
        drop((sender, threads));
        assert!(done.recv().is_err());
    }
}

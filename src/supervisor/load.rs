//! A job that runs before its memory is back: what becomes of the daemon that brings it.
//!
//! Invariant: the daemon's userfaultfds are held until all is delivered, or until the job is gone. The kernel answers the
//! job with zeroes once nobody holds them.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::keep::{rotate, shown};
use super::start::Loader;
use super::state::{Event, Harm};
use super::{Message, Owner};
use crate::launch::Job;
use crate::sys::criu::Log;
use crate::sys::spawn::Ended;

/// After so many failures restores are done as ever.
pub(super) const FAILURES: u32 = 2;
/// How long the end of the job may take to show, where it is why the daemon ended: both are killed at once.
const SHOWS: Duration = Duration::from_millis(100);

/// How the delivery ended.
pub(super) struct Outcome {
    life: u32,
    result: Result<Duration, Failure>,
}

/// Why memory did not come.
enum Failure {
    /// The job is over.
    JobEnded,
    /// The daemon ended too early.
    Daemon { why: String, log: Option<Log> },
}

impl Owner<'_> {
    /// Looks after the daemon until it has delivered all.
    pub(super) fn load(&mut self, job: Arc<Job>, loader: Loader) {
        let Loader { mut daemon, image, unpacked } = loader;
        let (life, sender) = (self.life, self.sender.clone());
        self.loading = Some((life, image));
        self.read.store(true, Ordering::SeqCst);
        self.step(Event::LoadBegan);
        self.spawn("load", move || {
            let began = Instant::now();
            let result = match daemon.wait() {
                Ok(delivered) if delivered.ended == Ended::Exit(0) => Ok(began.elapsed()),
                _ if ends_soon(&job) => Err(Failure::JobEnded),
                Ok(delivered) => {
                    let reasons = [vec![delivered.ended.to_string()], delivered.log.errors()].concat();
                    Err(Failure::Daemon { why: reasons.join("; "), log: Some(delivered.log) })
                }
                Err(error) => Err(Failure::Daemon { why: error.to_string(), log: None }),
            };
            let whole = result.is_ok();
            // Before the kill, so that the job's end is not taken for its own.
            let _ = sender.send(Message::Loaded(Box::new(Outcome { life, result })));
            if !whole {
                job.kill();
                // An error says that it was reaped: it is gone.
                let _ = job.world.init().map_or_else(|| job.root.wait_for_end(), |init| init.wait_for_end());
            }
            drop(daemon);
            drop(unpacked);
        });
    }

    pub(super) fn loaded(&mut self, outcome: Outcome) {
        if self.loading.is_none_or(|(life, _)| life != outcome.life) {
            return;
        }
        self.no_longer_loading();
        let alive = self.ended.is_none();
        match outcome.result {
            Ok(took) => {
                tracing::info!("all of the job's memory is back after {}", shown(took));
                if alive {
                    self.step(Event::LoadEnded(Harm::None));
                }
            }
            Err(Failure::Daemon { why, log }) if alive => {
                self.lazy_failures += 1;
                tracing::error!(
                    "the rest of the job's memory did not come, the job is started again: CRIU ended ({why})"
                );
                self.keep_criu_log("lazy", log.as_ref());
                if self.lazy_failures == FAILURES {
                    tracing::warn!("from now on the job's memory is brought back before it runs");
                }
                self.step(Event::LoadEnded(Harm::Lost));
            }
            Err(_) => {}
        }
        // What was not removed meanwhile.
        let setup = Arc::clone(self.shared);
        self.spawn("rotate", move || rotate(&setup));
        if alive {
            self.pack_newest();
        }
    }

    pub(super) fn no_longer_loading(&mut self) {
        self.loading = None;
        self.read.store(false, Ordering::SeqCst);
    }

    /// Says once that a restore was not lazy though it was to be.
    pub(super) fn not_lazy(&mut self, why: &str) {
        if self.lazy_failures < FAILURES {
            tracing::warn!("restart.lazy has no effect, the job's memory was brought back before it ran: {why}");
            self.lazy_failures = FAILURES;
        }
    }
}

fn ends_soon(job: &Job) -> bool {
    let deadline = Instant::now() + SHOWS;
    while Instant::now() < deadline {
        if job.root.has_ended().unwrap_or(true) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

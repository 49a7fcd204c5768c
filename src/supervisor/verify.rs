//! Verifies the store while there is nothing else to do, and repairs damage if possible.
//!
//! A separate thread reads the packs of the job (`store.verify-rate`), with the lowest priority for the disk and pauses
//! that keep it below the rate. It pauses as soon as an image is taken, stored, replicated or restored. Damage is
//! healed at once ([`mod@heal`]) and reported once. The job and its images are not touched.

use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::state::State;
use super::{Message, Setup, replicate};
use crate::config::VerifyRate;
use crate::telemetry::events::What;
use rekindle_base::chain;
use rekindle_os::process;
use rekindle_replica::OnDemand;
use rekindle_store::heal::{self, Healed};
use rekindle_store::scrub::{AGAIN, Scrub, Step};
use rekindle_store::{ImageId, JobName};

/// Pauses for the rate are made when they add up to this time: fewer pauses wake the processor less often.
const PAUSE: Duration = Duration::from_millis(100);
/// Pause after a failure that is not caused by the packs.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

/// Whether the thread may read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// There is nothing else to do.
    Idle,
    Busy,
    Over,
}

struct Gate {
    phase: Mutex<Phase>,
    changed: Condvar,
}

impl Gate {
    fn now(&self) -> Phase {
        *self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, phase: Phase) {
        let mut now = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        if *now != phase && *now != Phase::Over {
            *now = phase;
            self.changed.notify_all();
        }
    }

    /// Waits for this time, or until the run ends. Returns whether to continue.
    fn pause(&self, time: Duration) -> bool {
        let now = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_timeout_while(now, time, |phase| *phase != Phase::Over);
        *waited.unwrap_or_else(PoisonError::into_inner).0 != Phase::Over
    }

    /// Waits until there is nothing else to do. Returns whether to continue.
    fn enter(&self) -> bool {
        let now = self.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.changed.wait_while(now, |phase| *phase == Phase::Busy);
        *waited.unwrap_or_else(PoisonError::into_inner) == Phase::Idle
    }
}

/// The thread, as the owner of the state sees it.
pub(super) struct Verifier {
    gate: Arc<Gate>,
    thread: JoinHandle<()>,
}

/// A report of the thread.
pub(super) enum Report {
    /// Chunks that were damaged or unreadable.
    Chunks {
        healed: Healed,
        /// Images with content that is intact nowhere.
        images: Vec<ImageId>,
    },
    /// A pack that cannot be used, and why.
    Pack(String),
    /// Reading or healing failed.
    Failed(String),
}

impl Verifier {
    /// Starts the thread, if configured. It reads only while it is allowed to.
    pub(super) fn start(setup: &Arc<Setup>, sender: &mpsc::Sender<Message>) -> Option<Verifier> {
        let VerifyRate::PerSecond(rate) = setup.config.store.verify_rate else { return None };
        let gate = Arc::new(Gate { phase: Mutex::new(Phase::Busy), changed: Condvar::new() });
        let (setup, sender, mine) = (Arc::clone(setup), sender.clone(), Arc::clone(&gate));
        let work = move || {
            process::be_nice();
            process::be_last_at_the_disk();
            let tell = |report| drop(sender.send(Message::Verified(Box::new(report))));
            look(&setup, rate.bytes(), &mine, &tell);
        };
        match std::thread::Builder::new().name("verify".into()).spawn(work) {
            Ok(thread) => Some(Verifier { gate, thread }),
            Err(error) => {
                tracing::warn!("the store is not verified: cannot start a thread: {error}");
                None
            }
        }
    }

    /// Allows it to read, if nothing is being transferred, or not.
    pub(super) fn allow(&self, state: &State, is_idle: bool) {
        let rests = matches!(state, State::Running(_) | State::Suspended { .. });
        self.gate.set(if rests && is_idle { Phase::Idle } else { Phase::Busy });
    }

    /// Cancels the work in progress, and waits for the thread to end.
    pub(super) fn close(self) {
        self.gate.set(Phase::Over);
        let _ = self.thread.join();
    }
}

impl Report {
    /// Logs the report. Returns the event for the journal.
    pub(super) fn judged(self, job: &JobName) -> Option<What> {
        let (healed, images) = match self {
            Report::Chunks { healed, images } => (healed, images),
            Report::Pack(why) => {
                tracing::error!(
                    "a pack of the store cannot be used: {why}. Stop the job and run `rekindle repair {job}`"
                );
                return Some(What::StoreDamaged { why, chunks: 0, replaced: 0, images: Vec::new() });
            }
            Report::Failed(why) => {
                tracing::warn!("the store was not verified: {why}");
                return None;
            }
        };
        let chunks = healed.damaged + healed.unreadable + healed.missing;
        let mut why = format!("found while verifying: {healed}");
        match images.as_slice() {
            [] => tracing::warn!("{why}. All images are intact"),
            images => {
                let names = images.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                why =
                    format!("{why}; the images {names} cannot be restored until a later image has this content again");
                tracing::error!("{why}. The next image stores it again");
            }
        }
        Some(What::StoreDamaged { why, chunks, replaced: healed.from_copies + healed.from_replica, images })
    }
}

fn look(setup: &Setup, rate: u64, gate: &Gate, tell: &dyn Fn(Report)) {
    let mut scrub = Scrub::new(setup.folder.packs(), setup.images.packing.key.clone(), AGAIN);
    let mut owed = Duration::ZERO;
    let mut told = None;
    while gate.enter() {
        let ids = match scrub.step(Instant::now()) {
            Ok(Step::Read(bytes)) => {
                let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
                owed += Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
                if owed >= PAUSE && !gate.pause(std::mem::take(&mut owed)) {
                    return;
                }
                continue;
            }
            Ok(Step::Found(ids)) => Ok(ids),
            Ok(Step::Round) => heal::missing(&setup.folder),
            Ok(Step::Unusable { pack, why }) => {
                tell(Report::Pack(format!("{}: {why}", setup.folder.packs().pack_path(pack).display())));
                continue;
            }
            Ok(Step::Nothing(wait)) => {
                if !gate.pause(wait) {
                    return;
                }
                continue;
            }
            Err(error) => Err(error),
        };
        let done = ids.map_err(heal::Error::from).and_then(|ids| heal(setup, &ids, gate, tell));
        if let Err(error) = done {
            // Logged once, until it changes.
            let why = chain(&error);
            if told.as_ref() != Some(&why) {
                tell(Report::Failed(why.clone()));
                told = Some(why);
            }
            if !gate.pause(AFTER_FAILURE) {
                return;
            }
        }
    }
}

/// Heals the chunks, until it is done or cancelled.
fn heal(
    setup: &Setup,
    ids: &std::collections::BTreeSet<rekindle_store::chunk::ChunkId>,
    gate: &Gate,
    tell: &dyn Fn(Report),
) -> Result<(), heal::Error> {
    if ids.is_empty() {
        return Ok(());
    }
    let replica = OnDemand(|| replicate::needed(setup));
    let healing = setup.healing(&replica);
    while gate.enter() {
        match healing.heal(ids, &|| gate.now() != Phase::Idle) {
            // Something else had priority.
            Err(heal::Error::Cancelled) => {}
            Err(error) => return Err(error),
            Ok(healed) => {
                if healed.found_any() {
                    let images = heal::affected(&setup.folder, &healed.lost)?;
                    tell(Report::Chunks { healed, images });
                }
                return Ok(());
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_stands_still_while_there_is_something_else_and_ends_at_once() {
        let gate = Arc::new(Gate { phase: Mutex::new(Phase::Busy), changed: Condvar::new() });
        let mine = Arc::clone(&gate);
        let (tell, told) = std::sync::mpsc::channel();
        let entered = std::thread::spawn(move || {
            let first = mine.enter();
            tell.send(()).unwrap();
            (first, mine.pause(Duration::from_secs(600)), mine.enter())
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(told.try_recv().is_err() && !entered.is_finished(), "something else is under way");
        gate.set(Phase::Idle);
        told.recv_timeout(Duration::from_secs(60)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        gate.set(Phase::Busy);
        gate.set(Phase::Over);
        assert_eq!(entered.join().unwrap(), (true, false, false));
        gate.set(Phase::Idle);
        assert_eq!(gate.now(), Phase::Over, "over is over");
    }
}

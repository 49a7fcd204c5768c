//! From the store to the replica, while the job runs.
//!
//! One image at a time, on a thread of its own; whatever becomes the newest meanwhile is next, and what is between is
//! skipped. An outage is waited out, in longer and longer pauses, unless there is a newer image to send. Nothing of this
//! touches the job or the store: a replica that fails is a warning.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::events::micros;
use super::keep::shown;
use super::state::Finish;
use super::{Message, Owner, PROGRESS, Setup};
use crate::config::Rate;
use crate::published::Persisting;
use crate::telemetry::events::What as Told;
use rekindle_base::chain;
use rekindle_os::process;
use rekindle_store::persist::Progress;
use rekindle_store::replica::{self, Patience, Replica, Uploaded};
use rekindle_store::{Form, Image, ImageId, State};

/// The first pause after an outage.
const PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// How often a pause looks whether it is over.
const NAP: Duration = Duration::from_millis(100);

/// What is on its way to the replica, and what comes after that.
#[derive(Default)]
pub(super) struct Replication {
    running: Option<Running>,
    next: Option<Image>,
}

struct Running {
    image: ImageId,
    progress: Arc<Progress>,
    flags: Arc<Flags>,
}

/// What the thread is told while it works.
#[derive(Default)]
struct Flags {
    /// It is not wanted any more.
    cancel: AtomicBool,
    /// It is not worth a pause: there is a newer image, or the job is over.
    hurry: AtomicBool,
}

impl Replication {
    /// What others see of it.
    pub(super) fn seen(&self) -> Option<Persisting> {
        let running = self.running.as_ref()?;
        Some(Persisting::of(running.image, &running.progress))
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    fn tell(&self, flag: impl Fn(&Flags) -> &AtomicBool) {
        self.running.iter().for_each(|running| flag(&running.flags).store(true, Ordering::Relaxed));
    }
}

/// What the thread reports.
pub(super) struct Report {
    image: ImageId,
    what: What,
}

enum What {
    /// It is there.
    Done { uploaded: Uploaded, took: Duration },
    /// It did not work, and is tried again.
    Trouble { why: String, pause: Duration },
    /// It did not work.
    GivenUp(String),
    /// It was called off.
    Cancelled,
}

impl Owner<'_> {
    /// Sends an image that is in the store, where there is a replica.
    pub(super) fn replicate(&mut self, image: Image) {
        if self.shared.config.replica.url.is_none() || !self.is_usable(&image) {
            return;
        }
        if self.replication.running.is_some() {
            self.replication.tell(|flags| &flags.hurry);
            self.replication.next = Some(image);
            return;
        }
        let (progress, flags) = (Arc::new(Progress::default()), Arc::new(Flags::default()));
        flags.hurry.store(self.finish.is_some(), Ordering::Relaxed);
        let (setup, sender) = (Arc::clone(self.shared), self.sender.clone());
        self.replication.running =
            Some(Running { image: image.id, progress: Arc::clone(&progress), flags: Arc::clone(&flags) });
        // However long it takes, and whatever is rotated away meanwhile.
        let hold = self.shared.lock.hold(image.id);
        self.spawn("replicate", move || {
            process::be_nice();
            let send = |what| drop(sender.send(Message::Replicated(Box::new(Report { image: image.id, what }))));
            let what = bring(&setup, &image, &progress, &flags, &send);
            drop(hold);
            send(what);
        });
    }

    /// Sends the newest image of the store, unless that was done.
    pub(super) fn replicate_newest(&mut self) {
        let images = self.shared.folder.images().unwrap_or_default();
        // A loose one comes by itself, once it is packed.
        let newest = images.into_iter().find(|image| self.is_usable(image) && image.form() == Form::Packed);
        if let Some(image) = newest.filter(|image| self.published.last_replicated != Some(image.id)) {
            self.replicate(image);
        }
    }

    pub(super) fn replicated(&mut self, report: Report) {
        let Report { image, what } = report;
        match what {
            What::Trouble { why, pause } => {
                let pause = humantime::format_duration(pause);
                tracing::warn!("image {image} is not in the replica yet: {why}; tried again in {pause}");
                self.published.replica_failure = Some(why);
                return;
            }
            What::Done { uploaded, took } => {
                let size = bytesize::ByteSize::b(uploaded.bytes);
                tracing::info!("image {image} is in the replica after {}, {size} were sent", shown(took));
                self.tell(Told::Replicated { image, took_us: micros(took), sent: uploaded.bytes });
                self.published.last_replicated = Some(image);
                self.published.replica_failure = None;
            }
            What::GivenUp(why) => {
                tracing::error!("image {image} is not in the replica: {why}");
                self.tell(Told::NotReplicated { image, why: why.clone() });
                self.published.replica_failure = Some(why);
            }
            What::Cancelled => tracing::info!("image {image} was not brought to the replica"),
        }
        self.replication.running = None;
        if let Some(next) = self.replication.next.take() {
            self.replicate(next);
        }
        self.publish();
    }

    /// The job is over: the last image goes to the replica, unless nobody goes on from it. A second signal to stop ends the
    /// wait.
    pub(super) fn leave_replica(&mut self, finish: &Finish, messages: &mpsc::Receiver<Message>) {
        if self.shared.config.replica.url.is_none() {
            return;
        }
        if *finish == Finish::Completed {
            self.replication.next = None;
            self.replication.tell(|flags| &flags.cancel);
        } else if !self.stops.is_at_once() {
            self.replication.tell(|flags| &flags.hurry);
            self.replicate_newest();
            self.replication.tell(|flags| &flags.hurry);
        }
        while self.replication.is_running() {
            if self.stops.is_at_once() || !self.holds_the_lock() {
                self.replication.next = None;
                self.replication.tell(|flags| &flags.cancel);
            }
            match messages.recv_timeout(PROGRESS) {
                Ok(Message::Replicated(report)) => self.replicated(*report),
                Ok(Message::Signal(signal)) if super::STOPS.contains(&signal) => {
                    let _ = self.stops.signal(Instant::now());
                }
                Ok(Message::Control(incoming)) => self.heard_late(*incoming),
                Ok(Message::Hook(report)) => self.hook_failed(report),
                Ok(_) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => self.publish(),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
            }
        }
    }

    /// Says in the replica how the job ended, so that nobody goes on elsewhere with one that is completed.
    pub(super) fn record_in_replica(&self, finish: &Finish) {
        let setup = self.shared;
        let said = open(setup, Patience::Little).transpose().map(|replica| {
            let record = setup.folder.record().map_err(replica::Error::from)?;
            record.map_or(Ok(()), |record| replica?.put_record(&record, &|| false))
        });
        if let Some(Err(error)) = said
            && !self.stops.is_at_once()
        {
            let warning = match finish {
                Finish::Completed => {
                    "; on another machine the same command would go on from its last image: start nothing there, or use --fresh"
                }
                _ => "",
            };
            tracing::warn!("the replica does not know how the job ended: {}{warning}", chain(&error));
        }
    }
}

/// The replica, for who needs something from there.
pub(super) fn needed(setup: &Setup) -> replica::Result<Replica> {
    open(setup, Patience::Little)?.ok_or(replica::Error::Cancelled)
}

fn open(setup: &Setup, patience: Patience) -> replica::Result<Option<Replica>> {
    let Some(url) = &setup.config.replica.url else { return Ok(None) };
    let rate = match setup.config.replica.rate {
        Rate::Unlimited => None,
        Rate::PerSecond(size) => Some(size.bytes()),
    };
    Ok(Some(Replica::open(url, setup.folder.name(), patience)?.with_trust(setup.folder.trust()).with_rate(rate)))
}

/// Until it is there, or not worth it any more.
fn bring(setup: &Setup, image: &Image, progress: &Progress, flags: &Flags, send: &dyn Fn(What)) -> What {
    let began = Instant::now();
    let cancelled = || flags.cancel.load(Ordering::Relaxed);
    let mut pause = PAUSE;
    loop {
        let sent = open(setup, Patience::Much).and_then(|replica| match replica {
            Some(replica) => once(&replica, setup, image, progress, &cancelled),
            None => Err(replica::Error::Cancelled),
        });
        let error = match sent {
            Ok(uploaded) => return What::Done { uploaded, took: began.elapsed() },
            Err(replica::Error::Cancelled) => return What::Cancelled,
            Err(error) => error,
        };
        let why = chain(&error);
        if !error.is_unreachable() || flags.hurry.load(Ordering::Relaxed) {
            return What::GivenUp(why);
        }
        send(What::Trouble { why: why.clone(), pause });
        let until = Instant::now() + pause;
        while Instant::now() < until {
            if cancelled() {
                return What::Cancelled;
            }
            if flags.hurry.load(Ordering::Relaxed) {
                break;
            }
            std::thread::sleep(NAP);
        }
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn once(
    replica: &Replica,
    setup: &Setup,
    image: &Image,
    progress: &Progress,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> replica::Result<Uploaded> {
    let folder = &setup.folder;
    let uploaded = replica.upload(image, folder, progress, cancelled)?;
    if let Some(record) = folder.record()? {
        replica.put_record(&record, cancelled)?;
    }
    // It is there; what follows is housekeeping, and comes again with the next one.
    let bad: Vec<Image> =
        folder.images()?.into_iter().filter(|image| matches!(image.state, State::Bad { .. })).collect();
    let kept = replica.upload_marks(&bad, cancelled);
    match kept.and_then(|()| replica.retain(setup.config.replica.keep_last, folder, cancelled)) {
        Ok(removed) => {
            removed.images.iter().for_each(|id| tracing::debug!("removed image {id} from the replica"));
            removed.blocked.iter().for_each(|why| tracing::warn!("no packs are removed from the replica: {why}"));
        }
        Err(replica::Error::Cancelled) => {}
        Err(error) => tracing::warn!("old images were not removed from the replica: {}", chain(&error)),
    }
    Ok(uploaded)
}

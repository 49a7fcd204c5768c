//! From the store to the replica, while the job runs.
//!
//! One image at a time, on a separate thread; the newest image is always next, and images between are skipped. After a
//! failure it tries again, with longer and longer pauses, unless there is a newer image to send. This never affects the
//! job or the store: a replica that fails is a warning.
//!
//! In a group, the group says which image is sent, so that the replica has whole group images (group/replica.rs).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::destination::Destination;
use super::remarks::Repeats;
use super::state::Finish;
use super::times::{micros, shown};
use super::{Message, Owner, Setup};
use crate::config::Rate;
use crate::published::Persisting;
use crate::telemetry::events;
use rekindle_base::chain;
use rekindle_os::process;
use rekindle_replica::{self as replica, Keep, Patience, Removed, Replica, Uploaded};
use rekindle_store::persist::Progress;
use rekindle_store::{Form, Image, ImageId};

/// The first pause after an outage.
const PAUSE: Duration = Duration::from_secs(30);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);
/// How often a pause checks whether it is over.
const NAP: Duration = Duration::from_millis(100);

/// The image that is being replicated, and the next one. `I` is another type in tests only.
#[derive(Debug)]
pub(super) struct Replication<I = Image> {
    running: Option<Running>,
    next: Option<I>,
}

impl<I> Default for Replication<I> {
    fn default() -> Replication<I> {
        Replication { running: None, next: None }
    }
}

#[derive(Debug)]
struct Running {
    image: ImageId,
    progress: Arc<Progress>,
    flags: Arc<Flags>,
}

/// Flags for the thread while it works.
#[derive(Debug, Default)]
pub(super) struct Flags {
    /// It is cancelled.
    cancel: AtomicBool,
    /// No more pauses: there is a newer image, or the job is over.
    hurry: AtomicBool,
}

/// An upload to start.
#[derive(Debug)]
pub(super) struct Upload<I = Image> {
    image: I,
    progress: Arc<Progress>,
    flags: Arc<Flags>,
}

impl<I> Replication<I> {
    /// This image is the newest. It is sent now, unless another is being sent; then it is next, and the previous next
    /// one is skipped. `is_last` if the run is over.
    pub(super) fn begin(&mut self, id: ImageId, image: I, is_last: bool) -> Option<Upload<I>> {
        if self.running.is_some() {
            self.hurry();
            self.next = Some(image);
            return None;
        }
        let (progress, flags) = (Arc::<Progress>::default(), Arc::<Flags>::default());
        flags.hurry.store(is_last, Ordering::Relaxed);
        self.running = Some(Running { image: id, progress: Arc::clone(&progress), flags: Arc::clone(&flags) });
        Some(Upload { image, progress, flags })
    }

    /// An upload is over. Returns the next image.
    pub(super) fn ends(&mut self) -> Option<I> {
        self.running = None;
        self.next.take()
    }

    /// Its progress, as published.
    pub(super) fn seen(&self) -> Option<Persisting> {
        let running = self.running.as_ref()?;
        Some(Persisting::of(running.image, &running.progress))
    }

    pub(super) fn is_running(&self) -> bool {
        self.running.is_some()
    }

    /// Pauses are not worthwhile any more.
    fn hurry(&self) {
        self.tell(|flags| &flags.hurry);
    }

    /// Cancels everything.
    pub(super) fn call_off(&mut self) {
        self.next = None;
        self.tell(|flags| &flags.cancel);
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
    /// The image is in the replica.
    Done { uploaded: Uploaded, took: Duration },
    /// A try failed; there will be another one.
    Trouble { why: String, pause: Duration },
    /// It failed.
    GivenUp(String),
    /// It was cancelled.
    Cancelled,
}

impl Owner<'_> {
    /// Sends an image that is stored, if there is a replica.
    pub(super) fn replicate(&mut self, image: Image) {
        if self.setup.config.replica.url.is_none() || !self.is_usable(&image) {
            return;
        }
        let upload = self.transfers.replication.begin(image.id, image, self.end.is_there());
        let Some(Upload { image, progress, flags }) = upload else { return };
        let (setup, sender) = (Arc::clone(self.setup), self.threads.sender.clone());
        let repeats = self.reporting.remarks.repeats.clone();
        // The image is kept until then, even if retention would remove it.
        let hold = self.setup.lock.hold(image.id);
        let keep = self.kept_in_replica();
        self.spawn("replicate", move || {
            process::be_nice();
            let send = |what| drop(sender.send(Message::Replicated(Box::new(Report { image: image.id, what }))));
            let what = send_image(&setup, (&image, keep), &progress, &flags, &repeats, &send);
            drop(hold);
            send(what);
        });
    }

    /// Sends the newest image of the store, unless it was sent already.
    pub(super) fn replicate_newest(&mut self) {
        let images = self.setup.folder.images().unwrap_or_default();
        // A loose image is sent once it is packed.
        let is_packed = |image: &Image| self.is_usable(image) && image.form() == Form::Packed;
        let newest = match self.is_in_group() {
            // A part that no group image needs is not worth it.
            true => {
                let last = self.last_part_to_replicate();
                images.into_iter().find(|image| Some(image.id) == last && is_packed(image))
            }
            false => images.into_iter().find(is_packed),
        };
        if let Some(image) = newest.filter(|image| self.reporting.published.last_replicated != Some(image.id)) {
            self.replicate(image);
        }
    }

    pub(super) fn replicated(&mut self, report: Report) {
        let Report { image, what } = report;
        let is_there = matches!(what, What::Done { .. });
        match what {
            What::Trouble { why, pause } => {
                let pause = humantime::format_duration(pause);
                let text = format!("image {image} is not in the replica yet: {why}. Trying again in {pause}");
                self.reporting.remarks.repeats.warn("replica", &text);
                self.reporting.published.replica_failure = Some(why);
                return;
            }
            What::Done { uploaded, took } => {
                let size = bytesize::ByteSize::b(uploaded.bytes);
                let repeats = &self.reporting.remarks.repeats;
                let again =
                    [repeats.succeeded("replica given up"), repeats.succeeded("replica")].into_iter().flatten().next();
                let again = again.map(|again| format!("; {again}")).unwrap_or_default();
                crate::routine!("image {image} was replicated in {}, {size} sent{again}", shown(took));
                self.tell(events::What::Replicated { image, took_us: micros(took), sent: uploaded.bytes });
                self.reporting.published.last_replicated = Some(image);
                self.reporting.published.replica_failure = None;
            }
            What::GivenUp(why) => {
                let text = format!("image {image} is not in the replica: {why}");
                match self.reporting.remarks.repeats.failed("replica given up", &text, Instant::now()) {
                    Some(line) => tracing::error!("{line}"),
                    None => tracing::debug!("{text}"),
                }
                self.tell(events::What::NotReplicated { image, why: why.clone() });
                self.reporting.published.replica_failure = Some(why);
            }
            What::Cancelled => tracing::info!("image {image} was not replicated"),
        }
        if let Some(next) = self.transfers.replication.ends() {
            self.replicate(next);
        }
        self.group_replicated(image, is_there);
        self.publish();
    }

    /// The job is over: the last image is replicated, unless nothing continues from it. A second signal to stop ends
    /// the wait.
    pub(super) fn leave_replica(&mut self, finish: &Finish, messages: &mpsc::Receiver<Message>) {
        if self.setup.config.replica.url.is_none() {
            return;
        }
        if *finish == Finish::Completed {
            self.transfers.replication.call_off();
        } else if !self.end.stops.is_at_once() {
            self.transfers.replication.hurry();
            self.replicate_newest();
            self.transfers.replication.hurry();
        }
        self.wait_for(Destination::Replica, messages);
    }

    /// Records in the replica that the job went back to an older image: another machine must not continue from a newer
    /// one. With the next image it is recorded again.
    pub(super) fn record_rewind_in_replica(&mut self) {
        if self.setup.config.replica.url.is_none() {
            return;
        }
        let setup = Arc::clone(self.setup);
        self.spawn("record", move || {
            let record = || setup.folder.record().map_err(replica::Error::from);
            let said = needed(&setup).and_then(|replica| {
                record()?.map_or(Ok(()), |record| replica.put_record(&record, &|| false))
            });
            if let Err(error) = said {
                tracing::warn!(
                    "cannot record in the replica that the job went back to an older image: {}. Until the next image is \
                    replicated, another machine would continue from a newer one",
                    chain(&error)
                );
            }
        });
    }

    /// Records in the replica how the job ended, so that a completed job is not continued elsewhere.
    /// `hurries` ends the attempt.
    pub(super) fn record_in_replica(&self, finish: &Finish, hurries: &(dyn Fn() -> bool + Sync)) {
        let setup = self.setup;
        let said = open(setup, Patience::Little).transpose().map(|replica| {
            let record = setup.folder.record().map_err(replica::Error::from)?;
            record.map_or(Ok(()), |record| replica?.put_record(&record, hurries))
        });
        if let Some(Err(error)) = said
            && !self.end.stops.is_at_once()
        {
            let warning = match finish {
                Finish::Completed => {
                    ". On another machine the same command would continue from its last image: do not start it there, \
                    or use --fresh"
                }
                _ => "",
            };
            tracing::warn!("cannot record in the replica how the job ended: {}{warning}", chain(&error));
        }
    }
}

/// The replica, for callers that cannot do without.
pub(super) fn needed(setup: &Setup) -> replica::Result<Replica> {
    open(setup, Patience::Little)?.ok_or(replica::Error::Cancelled)
}

pub(super) fn open(setup: &Setup, patience: Patience) -> replica::Result<Option<Replica>> {
    let Some(url) = &setup.config.replica.url else { return Ok(None) };
    let rate = match setup.config.replica.rate {
        Rate::Unlimited => None,
        Rate::PerSecond(size) => Some(size.bytes()),
    };
    Ok(Some(Replica::open(url, setup.folder.name(), patience)?.with_trust(setup.folder.trust()).with_rate(rate)))
}

/// Sends the image, until that succeeds or is not worthwhile any more.
fn send_image(
    setup: &Setup,
    (image, keep): (&Image, Option<Keep>),
    progress: &Progress,
    flags: &Flags,
    repeats: &Repeats,
    send: &dyn Fn(What),
) -> What {
    let began = Instant::now();
    let cancelled = || flags.cancel.load(Ordering::Relaxed);
    let mut pause = PAUSE;
    loop {
        let sent = open(setup, Patience::Much).and_then(|replica| match replica {
            Some(replica) => once(&replica, setup, (image, keep), progress, repeats, &cancelled),
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
    (image, keep): (&Image, Option<Keep>),
    progress: &Progress,
    repeats: &Repeats,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> replica::Result<Uploaded> {
    let folder = &setup.folder;
    let uploaded = replica.upload(image, folder, progress, cancelled)?;
    if let Some(record) = folder.record()? {
        replica.put_record(&record, cancelled)?;
    }
    // The image is in the replica; the rest is housekeeping, which is repeated with the next one.
    let here = folder.images()?;
    let retain = || keep.map_or_else(|| Ok(Removed::default()), |keep| replica.retain(keep, folder, cancelled));
    match replica.upload_marks(&here, cancelled).and_then(|()| retain()) {
        Ok(removed) => {
            removed.highest.into_iter().for_each(|id| folder.note_elsewhere(id));
            removed.images.iter().for_each(|id| tracing::debug!("removed image {id} from the replica"));
            let blocked = removed.blocked.iter().map(|why| format!("no packs were removed from the replica: {why}"));
            (0..).zip(blocked).for_each(|(n, text)| repeats.warn(&format!("replica packs {n}"), &text));
        }
        Err(replica::Error::Cancelled) => {}
        Err(error) => {
            repeats.warn("replica rotate", &format!("old images were not removed from the replica: {}", chain(&error)));
        }
    }
    Ok(uploaded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_image_is_next_and_what_is_between_is_skipped() {
        let id = |n| ImageId::new(n, chrono::DateTime::UNIX_EPOCH);
        let is_set = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        let mut replication = Replication::default();
        let first = replication.begin(id(1), 1, false).unwrap();
        assert!(!is_set(&first.flags.hurry));
        assert!(replication.begin(id(2), 2, false).is_none() && replication.begin(id(3), 3, false).is_none());
        assert!(is_set(&first.flags.hurry) && !is_set(&first.flags.cancel), "a pause is not worth it any more");
        assert_eq!((replication.ends(), replication.is_running()), (Some(3), false));
        let last = replication.begin(id(3), 3, true).unwrap();
        assert!(is_set(&last.flags.hurry), "the run is over");
        replication.begin(id(4), 4, true);
        replication.call_off();
        assert!(is_set(&last.flags.cancel));
        assert_eq!(replication.ends(), None);
    }
}

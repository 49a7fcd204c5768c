//! Restores are tried beside the running job, so that an image that cannot be restored is known of before it is needed.
//!
//! The first soon after the job's first image, then every `snapshot.rehearse`. Only images in memory are tried: what is in
//! the store is the same with hashes. It is a process of its own ([`rekindle_engine::restore::rehearsal`]), which is ended as soon as
//! the job does anything but run. It changes nothing and marks nothing: a rehearsal is not the machine's real restore, and
//! a good image is not given up for it. What it finds is said in the log, as an event and to hooks.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::keep::shown;
use super::state::State;
use super::{Message, Owner, Setup};
use crate::telemetry::events::What;
use rekindle_engine::launch::Privileges;
use rekindle_engine::restore::rehearsal::{Outcome, Script};
use rekindle_os::spawn::Spawn;
use rekindle_store::{Form, ImageId};

/// The first one comes so long after the first image: by then what a start takes is over.
const FIRST: Duration = Duration::from_secs(60);
/// One that could not be tried is tried again so soon.
const AGAIN: Duration = Duration::from_secs(600);
/// A second look at an image that was refused comes so long after the first: what it was may be over by then.
const SECOND_LOOK: Duration = Duration::from_secs(60);
/// Beside what CRIU may take.
const BESIDES: Duration = Duration::from_secs(60);
/// How often it is looked whether it is over.
const LOOK: Duration = Duration::from_millis(20);

/// What is known of rehearsals.
#[derive(Debug, Default)]
pub(super) struct Rehearsals {
    /// When the next is due; none before the first image.
    due: Option<Instant>,
    /// Set to call the present one off.
    under_way: Option<Arc<AtomicBool>>,
    /// The last one was refused, and it is tried again.
    refused: bool,
}

impl Rehearsals {
    pub(super) fn patience(&self) -> Option<Duration> {
        let due = self.due.filter(|_| self.under_way.is_none())?;
        Some(due.saturating_duration_since(Instant::now()))
    }
}

/// One that is over.
pub(super) struct Rehearsed {
    image: ImageId,
    outcome: Outcome,
}

impl Owner<'_> {
    /// Every how often, where it is wanted.
    fn rehearses_every(&self) -> Option<Duration> {
        self.shared.config.snapshot.rehearse.limit()
    }

    /// An image was taken.
    pub(super) fn image_to_rehearse(&mut self) {
        if let (Some(every), None) = (self.rehearses_every(), self.rehearsals.due) {
            self.rehearsals.due = Some(Instant::now() + every.min(FIRST));
        }
    }

    /// Begins one that is due, and calls one off that is in the way.
    pub(super) fn mind_the_rehearsals(&mut self) {
        let quiet = matches!(self.machine.state(), State::Running(_)) && self.restoring.is_none();
        if let Some(cancel) = &self.rehearsals.under_way {
            // A snapshot under way does not mind it.
            if !quiet && !matches!(self.machine.state(), State::Snapshotting { .. }) {
                cancel.store(true, Ordering::Relaxed);
            }
            return;
        }
        if self.rehearsals.due.is_none_or(|due| due > Instant::now()) {
            return;
        }
        if !quiet {
            // One that is past would have the owner look again and again.
            let later = self.rehearses_every().unwrap_or(FIRST).min(FIRST);
            self.rehearsals.due = Some(Instant::now() + later);
            return;
        }
        self.rehearsals.due = Some(Instant::now() + AGAIN);
        let newest =
            self.shared.folder.staged().into_iter().find(|image| image.is_good() && image.form() == Form::Loose);
        let Some(image) = newest.map(|image| image.id) else { return };
        let cancel = Arc::new(AtomicBool::new(false));
        self.rehearsals.under_way = Some(Arc::clone(&cancel));
        let (setup, sender) = (Arc::clone(self.shared), self.sender.clone());
        self.spawn("rehearse", move || {
            let outcome = rehearse(&setup, image, &cancel)
                .unwrap_or_else(|error| Outcome::NotTried { why: format!("its process failed: {error}") });
            let _ = sender.send(Message::Rehearsed(Box::new(Rehearsed { image, outcome })));
        });
    }

    pub(super) fn rehearsed(&mut self, Rehearsed { image, outcome }: Rehearsed) {
        let called_off = self.rehearsals.under_way.take().is_some_and(|cancel| cancel.load(Ordering::Relaxed));
        let every = self.rehearses_every().unwrap_or(AGAIN);
        let next = |wait: Duration| Some(Instant::now() + wait);
        match outcome {
            _ if called_off => self.rehearsals.due = next(AGAIN.min(every)),
            Outcome::Restored { took } => {
                self.rehearsals.due = next(every);
                self.rehearsals.refused = false;
                self.published.rehearsal_failure = None;
                tracing::info!(
                    "image {image} was restored in a rehearsal, in {}; nothing of it ran",
                    shown(Duration::from_millis(took))
                );
                self.tell(What::Rehearsed { image, took_us: took.saturating_mul(1000) });
            }
            // Once may be chance.
            Outcome::Refused { .. } if !self.shared.folder.staged().iter().any(|staged| staged.id == image) => {
                // A later image has its place, and was there in part.
                self.rehearsals.due = next(AGAIN.min(every));
            }
            Outcome::Refused { why } if !self.rehearsals.refused => {
                tracing::debug!("image {image} was refused in a rehearsal: {why}");
                self.rehearsals.refused = true;
                self.rehearsals.due = next(SECOND_LOOK.min(every));
            }
            Outcome::Refused { why } => {
                self.rehearsals.due = next(every);
                self.rehearsals.refused = false;
                tracing::error!(
                    "image {image} could not be restored in a rehearsal, twice: {why}. The job runs on and its images are kept, but do not count on them: a restart would probably fail in the same way"
                );
                self.published.rehearsal_failure = Some(format!("image {image}: {why}"));
                self.tell(What::RehearsalFailed { image, why });
            }
            Outcome::NotTried { why } => {
                self.rehearsals.due = next(AGAIN.min(every));
                if self.told.lock().is_ok_and(|mut told| told.insert(format!("rehearsal: {why}"))) {
                    tracing::info!("image {image} was not rehearsed: {why}");
                }
            }
        }
    }

    /// Memory is short: what is under way has as much of it as the job.
    pub(super) fn stop_rehearsal(&self) -> bool {
        if let Some(cancel) = &self.rehearsals.under_way {
            cancel.store(true, Ordering::Relaxed);
        }
        self.rehearsals.under_way.is_some()
    }

    /// The run ends: what is under way goes.
    pub(super) fn close_rehearsals(&mut self) {
        self.rehearsals.due = None;
        self.stop_rehearsal();
    }
}

/// Has a process of its own try it.
fn rehearse(setup: &Setup, image: ImageId, cancel: &AtomicBool) -> io::Result<Outcome> {
    let version = setup.criu.version;
    let script = Script {
        store: setup.folder.path().parent().map(Path::to_path_buf).unwrap_or_default(),
        job: setup.folder.name().clone(),
        image,
        criu: (setup.criu.path.clone(), (version.0, version.1, version.2)),
        reaper: setup.reaper.clone(),
        names: setup.uplink.as_ref().and_then(|plan| plan.names().ok()),
        user: setup.spec.identity.clone(),
        no_new_privileges: setup.spec.privileges == Privileges::Fixed,
        timeout: setup.config.restart.restore_timeout.as_secs().max(1),
        reserve: setup.config.snapshot.memory_reserve.bytes(),
    };
    let (mut input, mut output) = (tempfile::tempfile()?, tempfile::tempfile()?);
    input.write_all(&serde_json::to_vec(&script)?)?;
    input.rewind()?;
    let quiet = File::options().write(true).open("/dev/null")?;
    let fds = (OwnedFd::from(input), OwnedFd::from(output.try_clone()?), OwnedFd::from(quiet));
    // This program, whatever lies at its path by now.
    let child = Spawn::new(Path::new("/proc/self/exe"), ["rehearse"])
        .and_then(|spawn| spawn.directory(Path::new("/")))
        .map_err(io::Error::other)?
        .fd(fds.0, 0)
        .fd(fds.1, 1)
        .fd(fds.2, 2)
        .session()
        .dies_with_us()
        .start()
        .map_err(io::Error::other)?;
    let limit = setup.config.restart.restore_timeout.saturating_add(BESIDES);
    let began = Instant::now();
    while !child.has_ended()? {
        if cancel.load(Ordering::Relaxed) || began.elapsed() > limit {
            // Its namespaces end with it.
            child.signal(libc::SIGKILL)?;
        }
        std::thread::sleep(LOOK);
    }
    let ended = child.wait()?;
    if began.elapsed() > limit {
        return Err(io::Error::other(format!("it was not over after {}", humantime::format_duration(limit))));
    }
    let mut text = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut text)?;
    serde_json::from_slice(&text).map_err(|_| io::Error::other(format!("it ended with {ended} and said nothing")))
}

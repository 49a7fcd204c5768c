//! The images that a job continues from, and the rewind to one of them. [`super::line`] decides.

use super::control::Incoming;
use super::line::{Candidate, Line, Target};
use super::state::{self, Event};
use super::{Message, Owner, Setup};
use crate::control::Reply;
use crate::control::protocol::{Code, Fault};
use crate::policy::{Images, StartPoint};
use rekindle_base::chain;
use rekindle_engine::restore;
use rekindle_engine::restore::compat::{self, Difference, Here};
use rekindle_store::record::new_lineage;
use rekindle_store::{Image, ImageId, LATEST, State, nth_newest};

impl Owner<'_> {
    /// The good images of this line, newest first.
    pub(super) fn good_images(&self) -> Result<Vec<ImageId>, rekindle_store::Error> {
        Ok(self.line.good(self.setup.folder.copies()?.iter().map(Candidate::of)))
    }

    /// The images that the job can continue from, and whether there are others that it cannot use.
    pub(super) fn images_to_go_on_from(&self) -> Result<Images, rekindle_store::Error> {
        let copies = self.setup.folder.copies()?;
        Ok(self.line.images(copies.iter().map(Candidate::of), self.setup.folder.proven()?))
    }

    /// Whether it is good, and of this line.
    pub(super) fn is_usable(&self, image: &Image) -> bool {
        self.line.has(&Candidate::of(image))
    }

    /// Finds the image and checks, on a separate thread, whether it can be restored; then rewinds. An image that does
    /// not fit must not cost the job its life.
    pub(super) fn look_at_target(&mut self, to: String, reply: Reply) {
        let to = match self.group.as_ref().map(|member| member.named(&to)) {
            None => to,
            Some(Ok(to)) => to,
            Some(Err(why)) => return reply(Err(Fault::new(Code::Refused, why))),
        };
        let (setup, sender, line) = (self.setup.clone(), self.threads.sender.clone(), self.line.clone());
        self.spawn("rewind", move || match target(&setup, &line, &to) {
            Ok(target) => drop(sender.send(Message::Control(Box::new(Incoming::Rewind(target, reply))))),
            Err(why) => reply(Err(Fault::new(Code::Refused, why))),
        });
    }

    /// A start succeeded: if it was a rewind, the job is on the image's line now.
    pub(super) fn arrived(&mut self, from: StartPoint) {
        let next = self.machine.state().rewinds_next();
        let mut line = self.line.clone();
        let newest = || self.good_images().ok()?.first().copied();
        let begun = line.arrived(from, next, newest, new_lineage);
        self.line = line;
        let Some(image) = begun else { return };
        self.reporting.published.lineage.clone_from(&self.line.lineage);
        // A later run must not continue from the newer images.
        if let Err(error) = self.record(rekindle_store::Outcome::Running, None) {
            tracing::warn!("cannot record the rewind to image {image}: {}", chain(&error));
        }
        self.record_rewind_in_replica();
    }

    /// A start failed. If it was the start of a rewind, the job continues from where it was.
    pub(super) fn did_not_arrive(&mut self, event: Event) -> Event {
        let state::State::Starting { from, .. } = *self.machine.state() else { return event };
        let (mut line, next) = (self.line.clone(), self.machine.state().rewinds_next());
        let images = || self.images_to_go_on_from().map_err(|error| chain(&error));
        let (missed, event) = line.did_not_arrive(from, next, event, images);
        self.line = line;
        if let Some(image) = missed {
            tracing::error!("cannot rewind to image {image}; the job continues from where it was");
        }
        event
    }
}

/// The image that `to` names, if it can be restored here.
fn target(setup: &Setup, line: &Line, to: &str) -> Result<Target, String> {
    let copies = setup.folder.copies().map_err(|error| chain(&error))?;
    let image = match nth_newest(to) {
        Some(nth) => {
            let mut good: Vec<&Image> = copies.iter().filter(|image| line.has(&Candidate::of(image))).collect();
            good.dedup_by_key(|image| image.id);
            let found = nth.checked_sub(1).and_then(|n| good.get(n));
            let (job, wanted, count) = (setup.folder.name().clone(), to.to_owned(), good.len());
            let none = || rekindle_store::Error::NoNthImage { job, wanted, count }.to_string();
            (*found.ok_or_else(none)?).clone()
        }
        None if to == LATEST => copies
            .iter()
            .find(|image| line.has(&Candidate::of(image)))
            .cloned()
            .ok_or("there is no image to rewind to")?,
        None => setup.folder.find(to).map_err(|error| chain(&error))?,
    };
    let id = image.id;
    let manifest = image.manifest().ok_or_else(|| format!("image {id} has no readable manifest"))?;
    if (&manifest.command, &manifest.user) != (&setup.program.launch.command, &setup.program.launch.user) {
        return Err(format!("image {id} is of another command or user: use `rekindle restore` to continue from it"));
    }
    // Only permanent obstacles are checked; resources that are in use now do not count.
    let here = Here::look(manifest, Some(setup.criu.again().version), &setup.origin.wishes);
    let fatal: Vec<String> = compat::compare(manifest, &here)
        .iter()
        .filter(|difference| Difference::is_fatal(difference))
        .map(ToString::to_string)
        .collect();
    if !fatal.is_empty() {
        return Err(format!("image {id} does not fit this machine: {}", fatal.join("; ")));
    }
    if !restore::has_its_files(
        manifest,
        &setup.folder,
        setup.program.spec.identity.as_ref(),
        setup.config.restart.changed_files,
    ) {
        return Err(format!("files that image {id} needs are missing here"));
    }
    let newest = copies.iter().find(|image| line.has(&Candidate::of(image))).map(|image| image.id);
    for mut copy in copies.into_iter().filter(|copy| copy.id == id) {
        // A user who names an image wants it tried.
        if matches!(copy.state, State::Bad { .. }) {
            tracing::warn!("image {id} was marked as bad; the mark is removed");
            copy.clear_bad().map_err(|error| chain(&error))?;
        }
    }
    Ok(Target::new(id, newest != Some(id)))
}

//! The line of images that a job goes on from, and its way back to one of them.
//!
//! After a rewind to an older image the newer ones stay, and are not what a later crash goes back to: the job is of another
//! lineage then, as after `rekindle restore` of an older image. That holds from the moment that it runs; until then, and
//! where the image does not restore after all, the old line is the one to go on with.

use chrono::Utc;

use super::control::Incoming;
use super::state::Event;
use super::{Message, Owner, Setup};
use crate::control::Reply;
use crate::control::protocol::{Code, Fault};
use crate::restart;
use crate::restart::compat::{self, Difference, Here};
use crate::restart::policy::{Failure, From, Images};
use crate::store::{Image, ImageId, LATEST, State};
use crate::telemetry::log::chain;

/// A name for a run that begins from nothing, or from an image that is not the newest.
pub(crate) fn new_lineage() -> String {
    format!("{}-{}", Utc::now().format("%Y%m%dT%H%M%S%3fZ"), std::process::id())
}

/// Which images are the job's to go back to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// Those of this lineage,
    pub(super) lineage: String,
    /// and the one that it began from.
    pub(super) base: Option<ImageId>,
    /// What a rewind is under way to.
    target: Option<Target>,
}

/// An image to go back to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    image: ImageId,
    /// Whether it is not the one that a crash would go back to anyway.
    older: bool,
}

impl Target {
    /// `older` where it is not the one that a crash would go back to anyway.
    pub(super) fn new(image: ImageId, older: bool) -> Target {
        Target { image, older }
    }

    pub(super) fn image(self) -> ImageId {
        self.image
    }
}

impl Line {
    pub(super) fn new(setup: &Setup) -> Line {
        Line { lineage: setup.launch.lineage.clone(), base: setup.base, target: None }
    }

    pub(super) fn aim(&mut self, target: Target) {
        self.target = Some(target);
    }

    /// Whether an image is good, and one to go back to.
    pub(super) fn has(&self, image: &Image) -> bool {
        image.is_good() && image.manifest().is_some_and(|manifest| self.is_ours(manifest))
    }

    /// Whether an image is of this line, as far as can be told: one whose manifest cannot be read may be.
    pub(super) fn may_have(&self, image: &Image) -> bool {
        image.manifest().is_none_or(|manifest| self.is_ours(manifest))
    }

    fn is_ours(&self, manifest: &crate::store::Manifest) -> bool {
        manifest.lineage == self.lineage || Some(manifest.id) == self.base
    }
}

impl Owner<'_> {
    /// The good images of this line, newest first.
    pub(super) fn good_images(&self) -> Result<Vec<ImageId>, crate::store::Error> {
        let images = self.shared.folder.copies()?;
        let mut ids: Vec<ImageId> = images.iter().filter(|image| self.is_usable(image)).map(|image| image.id).collect();
        ids.dedup();
        Ok(ids)
    }

    /// What the job can go on from, and whether there is more that it cannot.
    pub(super) fn images_to_go_on_from(&self) -> Result<Images, crate::store::Error> {
        let others = self.shared.folder.copies()?.iter().any(|image| !image.is_good() && self.line.may_have(image));
        let proven = self.shared.folder.proven()?;
        Ok(Images { good: self.good_images()?, proven, others })
    }

    /// Whether it is good, and of this lineage or what that began from.
    pub(super) fn is_usable(&self, image: &Image) -> bool {
        self.line.has(image)
    }

    /// Finds the image and looks whether it can be restored, on a thread of its own, and then rewinds: what does not fit
    /// must not cost the job its life.
    pub(super) fn look_at_target(&mut self, to: String, reply: Reply) {
        let (setup, sender, line) = (self.shared.clone(), self.sender.clone(), self.line.clone());
        self.spawn("rewind", move || match target(&setup, &line, &to) {
            Ok(target) => drop(sender.send(Message::Control(Box::new(Incoming::Rewind(target, reply))))),
            Err(why) => reply(Err(Fault::new(Code::Refused, why))),
        });
    }

    /// A start has worked: if it was the one of a rewind, its line is the job's now.
    pub(super) fn arrived(&mut self, from: From) {
        let Some(target) = self.line.target.take() else { return };
        if from != From::Image(target.image) || !target.older {
            return;
        }
        self.line.lineage = new_lineage();
        self.line.base = Some(target.image);
        self.published.lineage.clone_from(&self.line.lineage);
        // Whoever goes on after us must not go on from the newer images.
        if let Err(error) = self.record(crate::store::Outcome::Running, None) {
            tracing::warn!("the way back to image {} can not be recorded: {}", target.image, chain(&error));
        }
    }

    /// A start has not worked. Where it was the one of a rewind, the job goes on from where it was.
    pub(super) fn did_not_arrive(&mut self, event: Event) -> Event {
        let Some(target) = self.line.target else { return event };
        let why = match &event {
            Event::StartFailed { .. } => return event,
            Event::Impossible { why, .. } => why.clone(),
            Event::ImageFailed { failure, .. } => failure.why().unwrap_or("it is damaged").to_owned(),
            _ => String::new(),
        };
        self.line.target = None;
        tracing::error!("the job cannot go back to image {}, and goes on from where it was", target.image);
        match (event, self.images_to_go_on_from()) {
            (event @ Event::ImageFailed { failure: Failure::Damaged, .. }, _) => event,
            // A second try would be one too many for a job that ran well.
            (_, Ok(images)) => Event::ImageFailed { image: target.image, failure: Failure::NotNow(why), images },
            (_, Err(error)) => Event::StartFailed { why: chain(&error) },
        }
    }
}

/// What `to` means, if it can be restored here.
fn target(setup: &Setup, line: &Line, to: &str) -> Result<Target, String> {
    let copies = setup.folder.copies().map_err(|error| chain(&error))?;
    let image = match to.strip_prefix('-').map(str::parse::<usize>) {
        Some(Ok(back)) => {
            let mut good: Vec<&Image> = copies.iter().filter(|image| line.has(image)).collect();
            good.dedup_by_key(|image| image.id);
            let found = back.checked_sub(1).and_then(|n| good.get(n));
            let image = found.ok_or_else(|| format!("there are {} images to go back to, from -1 on", good.len()))?;
            (*image).clone()
        }
        Some(Err(_)) => return Err(format!("{to:?} is not -N, and no image")),
        None if to == LATEST => {
            copies.iter().find(|image| line.has(image)).cloned().ok_or("there is no image to go back to")?
        }
        None => setup.folder.find(to).map_err(|error| chain(&error))?,
    };
    let id = image.id;
    let manifest = image.manifest().ok_or_else(|| format!("image {id} has no readable manifest"))?;
    if (&manifest.command, &manifest.user) != (&setup.launch.command, &setup.launch.user) {
        return Err(format!("image {id} is of another command or user: `rekindle restore` goes on from it"));
    }
    // Only what can never work is looked at, which what is in use now is no part of.
    let here = Here::look(manifest, Some(setup.criu.version), &setup.wishes);
    let fatal: Vec<String> = compat::compare(manifest, &here)
        .iter()
        .filter(|difference| Difference::is_fatal(difference))
        .map(ToString::to_string)
        .collect();
    if !fatal.is_empty() {
        return Err(format!("image {id} does not fit this machine: {}", fatal.join("; ")));
    }
    if !restart::has_its_files(
        manifest,
        &setup.folder,
        setup.spec.identity.as_ref(),
        setup.config.restart.changed_files,
    ) {
        return Err(format!("files that image {id} needs are not here"));
    }
    let newest = copies.iter().find(|image| line.has(image)).map(|image| image.id);
    for mut copy in copies.into_iter().filter(|copy| copy.id == id) {
        // Whoever names an image wants it tried.
        if matches!(copy.state, State::Bad { .. }) {
            tracing::warn!("image {id} was marked as bad; the mark is taken back");
            copy.clear_bad().map_err(|error| chain(&error))?;
        }
    }
    Ok(Target { image: id, older: newest != Some(id) })
}

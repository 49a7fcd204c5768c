//! The line of images that a job continues from: pure functions from facts about images to decisions.
//!
//! After a rewind to an older image the newer ones are kept, but a later restart does not use them: the job then has
//! another lineage, as after `rekindle restore` of an older image. That applies from the moment that it runs. Before
//! that, and if the image cannot be restored, the job continues with the old line.

use std::collections::BTreeSet;

use super::state::Event;
use crate::config::ColdStart;
use crate::policy::{Failure, Images, StartPoint};
use rekindle_store::{BadWhy, Image, ImageId, State};

/// Facts about a copy of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate<'a> {
    pub(crate) id: ImageId,
    /// `None` if its manifest cannot be read.
    pub(crate) lineage: Option<&'a str>,
    /// Whether a restart may use it.
    pub(crate) good: bool,
    /// Why it is marked, if it is.
    pub(crate) mark: Option<BadWhy>,
}

impl<'a> Candidate<'a> {
    pub(crate) fn of(image: &'a Image) -> Candidate<'a> {
        let mark = if let State::Bad { mark, .. } = &image.state { Some(mark.why) } else { None };
        let lineage = image.manifest().map(|manifest| manifest.lineage.as_str());
        Candidate { id: image.id, lineage, good: image.is_good(), mark }
    }
}

/// Which images the job can go back to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    /// Images of this lineage,
    pub(super) lineage: String,
    /// and the image that it started from.
    pub(super) base: Option<ImageId>,
    /// The target of the rewind under way.
    target: Option<Target>,
}

/// An image to rewind to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Target {
    image: ImageId,
    /// Whether it differs from the image that a restart would use anyway.
    older: bool,
}

impl Target {
    /// `older` if it is not the image that a restart would use anyway.
    pub(super) fn new(image: ImageId, older: bool) -> Target {
        Target { image, older }
    }

    pub(super) fn image(self) -> ImageId {
        self.image
    }
}

/// What a run starts with if it continues another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Begin {
    /// From this.
    With(StartPoint),
    /// From the beginning, although there are images, because none can be used.
    OverImages,
    /// It does not start: there are images, none can be used, and the configuration does not allow a start from the
    /// beginning.
    NoUsableImage,
}

impl Line {
    pub(crate) fn new(lineage: String, base: Option<ImageId>) -> Line {
        Line { lineage, base, target: None }
    }

    /// Whether a copy is good, and of this line.
    pub(crate) fn has(&self, copy: &Candidate<'_>) -> bool {
        copy.good && self.is_ours(copy)
    }

    /// Whether a copy may be of this line: one whose manifest cannot be read may be.
    pub(super) fn may_have(&self, copy: &Candidate<'_>) -> bool {
        copy.lineage.is_none() || self.is_ours(copy)
    }

    fn is_ours(&self, copy: &Candidate<'_>) -> bool {
        copy.lineage.is_some_and(|lineage| lineage == self.lineage || Some(copy.id) == self.base)
    }

    /// The good images among these copies, which are sorted newest first.
    pub(super) fn good<'a>(&self, copies: impl IntoIterator<Item = Candidate<'a>>) -> Vec<ImageId> {
        let mut ids: Vec<ImageId> = copies.into_iter().filter(|copy| self.has(copy)).map(|copy| copy.id).collect();
        ids.dedup();
        ids
    }

    /// The images that the job can continue from, and whether there are others that it cannot use.
    pub(super) fn images<'a>(
        &self,
        copies: impl IntoIterator<Item = Candidate<'a>> + Clone,
        proven: BTreeSet<ImageId>,
    ) -> Images {
        let others = copies.clone().into_iter().any(|copy| !copy.good && self.may_have(&copy));
        Images { good: self.good(copies), proven, others, ..Images::default() }
    }

    /// Whether a new run removes the mark of this copy. The cause may be gone: another CRIU, another driver, a port
    /// that is free again. An image with wrong bytes, or from which the job dies, stays marked.
    pub(crate) fn gives_another_chance(&self, copy: &Candidate<'_>) -> bool {
        self.is_ours(copy) && copy.mark == Some(BadWhy::DoesNotRestore)
    }

    /// What a run starts with if it continues this line. The copies are sorted newest first.
    pub(crate) fn begin<'a>(&self, copies: impl IntoIterator<Item = Candidate<'a>> + Clone, cold: ColdStart) -> Begin {
        if let Some(newest) = copies.clone().into_iter().find(|copy| self.has(copy)) {
            return Begin::With(StartPoint::Image(newest.id));
        }
        match (copies.into_iter().any(|copy| self.may_have(&copy)), cold) {
            (false, _) => Begin::With(StartPoint::Cold),
            (true, ColdStart::Allow) => Begin::OverImages,
            (true, ColdStart::NoImages | ColdStart::Never) => Begin::NoUsableImage,
        }
    }

    pub(super) fn aim(&mut self, target: Target) {
        self.target = Some(target);
    }

    /// A start succeeded. If it was a rewind to an older image, a new line starts there; returns that image.
    pub(super) fn arrived(&mut self, from: StartPoint, lineage: impl FnOnce() -> String) -> Option<ImageId> {
        let target = self.target.take()?;
        if from != StartPoint::Image(target.image) || !target.older {
            return None;
        }
        self.lineage = lineage();
        self.base = Some(target.image);
        self.base
    }

    /// A start failed. If it was the start of a rewind, the job continues from where it was: returns that image, and
    /// the event that replaces this one.
    pub(super) fn did_not_arrive(
        &mut self,
        event: Event,
        images: impl FnOnce() -> Result<Images, String>,
    ) -> (Option<ImageId>, Event) {
        let Some(target) = self.target else { return (None, event) };
        let why = match &event {
            Event::StartFailed { .. } | Event::StoreAway { .. } => return (None, event),
            Event::Impossible { why, .. } => why.clone(),
            Event::ImageFailed { failure, .. } => failure.why().unwrap_or("it is damaged").to_owned(),
            _ => String::new(),
        };
        self.target = None;
        let event = match (event, images()) {
            (event @ Event::ImageFailed { failure: Failure::Damaged, .. }, _) => event,
            // The image is not tried again: the job ran well without it.
            (_, Ok(images)) => Event::ImageFailed { image: target.image, failure: Failure::NotNow(why), images },
            (_, Err(why)) => Event::StoreAway { why },
        };
        (Some(target.image), event)
    }
}

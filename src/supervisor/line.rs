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

    /// A start from there succeeded. If it was a rewind to an older image, a new line starts there; returns that image.
    /// `next` is the image that the job goes to now, because a rewind was requested during the start. `newest` is the
    /// image that a restart would use now: a snapshot may have been completed since the rewind was requested.
    pub(super) fn arrived(
        &mut self,
        from: StartPoint,
        next: Option<ImageId>,
        newest: impl FnOnce() -> Option<ImageId>,
        lineage: impl FnOnce() -> String,
    ) -> Option<ImageId> {
        let target = self.target.take()?;
        if from != StartPoint::Image(target.image) {
            self.target = Some(target).filter(|target| next == Some(target.image));
            return None;
        }
        if !target.older && newest() <= Some(target.image) {
            return None;
        }
        self.lineage = lineage();
        self.base = Some(target.image);
        self.base
    }

    /// A start from there failed. If it was the start of a rewind, the job continues from where it was: returns that
    /// image, and the event that replaces this one. `next` is the same as in [`arrived`](Line::arrived).
    pub(super) fn did_not_arrive(
        &mut self,
        from: StartPoint,
        next: Option<ImageId>,
        event: Event,
        images: impl FnOnce() -> Result<Images, String>,
    ) -> (Option<ImageId>, Event) {
        let ours = |target: &Target| from == StartPoint::Image(target.image) && next != Some(target.image);
        let Some(target) = self.target.filter(ours) else { return (None, event) };
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

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u32) -> ImageId {
        ImageId::new(n, chrono::DateTime::UNIX_EPOCH)
    }

    /// Aims at image 1, while image 3 is being started.
    fn aimed() -> Line {
        let mut line = Line::new("old".into(), None);
        line.aim(Target::new(id(1), true));
        line
    }

    fn newest() -> Option<ImageId> {
        Some(id(3))
    }

    fn damaged(n: u32) -> Event {
        Event::ImageFailed { image: id(n), failure: Failure::Damaged, images: Images::default() }
    }

    #[test]
    fn a_rewind_during_the_start_of_another_image_begins_a_line_when_it_arrives() {
        let (old, new) = (StartPoint::Image(id(3)), StartPoint::Image(id(1)));
        let lineage = || "new".to_owned();
        // The start was too far to be called off.
        let mut line = aimed();
        assert_eq!((line.arrived(old, Some(id(1)), newest, lineage), line.lineage.as_str()), (None, "old"));
        assert_eq!((line.arrived(new, None, newest, lineage), line.lineage.as_str()), (Some(id(1)), "new"));
        // It failed: that says nothing about the image of the rewind.
        let mut line = aimed();
        let event = line.did_not_arrive(old, Some(id(1)), damaged(3), || Ok(Images::default()));
        assert_eq!(event, (None, damaged(3)));
        assert_eq!(line.arrived(new, None, newest, lineage), Some(id(1)));
        // The same rewind was requested twice: the first was called off.
        let mut line = aimed();
        let impossible =
            || Event::Impossible { why: "no GPU".into(), obstacle: super::super::state::Obstacle::Machine };
        let event = line.did_not_arrive(new, Some(id(1)), impossible(), || Ok(Images::default()));
        assert_eq!(event, (None, impossible()));
        assert_eq!(line.arrived(new, None, newest, lineage), Some(id(1)));
    }

    #[test]
    fn a_rewind_leaves_an_image_behind_that_was_completed_after_the_request() {
        let lineage = || "new".to_owned();
        for (newest, begins) in [(1, None), (2, Some(id(1)))] {
            let mut line = Line::new("old".into(), None);
            line.aim(Target::new(id(1), false));
            assert_eq!(line.arrived(StartPoint::Image(id(1)), None, || Some(id(newest)), lineage), begins);
        }
    }

    #[test]
    fn a_rewind_that_came_to_nothing_is_forgotten() {
        let (old, new) = (StartPoint::Image(id(3)), StartPoint::Image(id(1)));
        let lineage = || "new".to_owned();
        let mut line = aimed();
        let (missed, event) = line.did_not_arrive(new, None, damaged(1), || Ok(Images::default()));
        assert_eq!((missed, event), (Some(id(1)), damaged(1)));
        assert_eq!(line.arrived(new, None, newest, lineage), None, "an older image because of failures is no rewind");
        // Something else came between.
        let mut line = aimed();
        assert_eq!((line.arrived(old, None, newest, lineage), line.arrived(new, None, newest, lineage)), (None, None));
    }
}

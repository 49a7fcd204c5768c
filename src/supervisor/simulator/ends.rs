//! Conditions at the end of a run, and after a power cut.

use super::model::candidate;
use super::oracle::Stopping;
use super::world::World;
use crate::supervisor::line::{Candidate, Line};
use crate::supervisor::state::Finish;

impl World {
    pub(super) fn check_finish(&mut self, finish: &Finish) {
        match finish {
            Finish::NoUsableImage { .. } => {
                let named = self.oracle.asked.is_some();
                if let (Some(line), false) = (self.line(), named) {
                    self.check_none_usable(&line);
                }
            }
            Finish::Failed { why, .. } if why.is_empty() => self.oracle.violate("given up without a reason".into()),
            Finish::Failed { why, .. }
                if why.contains("none because of the image") && !self.oracle.failures.machine_failed =>
            {
                self.oracle.violate(format!("given up for the machine, which has no fault: {why}"));
            }
            Finish::Failed { why, .. } if why.contains("EIO") => {
                self.oracle.violate(format!("given up because the store was away for a while: {why}"));
            }
            Finish::Stopped(_) => {
                let Some(Stopping { again: false, work: Some(work), .. }) = self.oracle.stopping else { return };
                let Some(line) = self.line() else { return };
                let copies = self.ground.copies();
                let newest = copies.iter().find(|copy| line.has(&candidate(copy))).map(|(image, _)| image.work);
                if newest.is_none_or(|newest| newest < work) {
                    let what =
                        format!("the stop has no last image: there is one of {newest:?}, and it was at {work:?}");
                    self.oracle.violate(what);
                }
            }
            _ => {}
        }
    }

    /// Checks the result that the user is told at the end.
    pub(super) fn check_told(&mut self, told: &Finish, at_once: bool) {
        let copies = self.ground.copies();
        let line = self.line();
        let ours = |copy: &Candidate<'_>| line.as_ref().is_some_and(|line| line.has(copy));
        let newest = copies.iter().map(candidate).find(ours).map(|copy| copy.id);
        let only_in_memory = newest.filter(|id| !self.ground.is_stored(*id));
        match (told, only_in_memory) {
            (Finish::Stopped(_), Some(id)) if !at_once => {
                self.oracle.violate(format!("the last image {id} is in memory only, and that is not told"));
            }
            (Finish::StoppedInMemory { image, .. }, None) if self.ground.is_stored(*image) => {
                self.oracle.violate(format!("image {image} is told to be in memory only, and is not"));
            }
            _ => {}
        }
    }

    pub(super) fn check_none_usable(&mut self, line: &Line) {
        let usable = self.ground.copies().into_iter().find(|copy| {
            let gone = self.oracle.is_passed(copy.0.id);
            line.has(&candidate(copy)) && !gone && !copy.0.no_files
        });
        if let Some(id) = usable.map(|(image, _)| image.id) {
            self.oracle.violate(format!("no image can be used, it says, and image {id} can"));
        }
    }

    /// After a power cut: images that were reported as stored are in the store.
    pub(super) fn check_stored(&mut self) {
        if let Some(id) = self.oracle.stored.iter().find(|id| !self.ground.is_stored(**id)).copied() {
            self.oracle.violate(format!("image {id} was told to be in the store, and is lost"));
        }
    }

    /// Everything that was stored is gone with the machine.
    pub(super) fn oracle_sees_machine_lost(&mut self) {
        self.oracle.stored.clear();
        self.oracle.excuse();
    }
}

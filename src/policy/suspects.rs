//! Failures of images in this run, and the evidence against them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};

/// A failure that only the image explains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Evidence {
    /// The job died soon after a restore.
    Died {
        /// How it ended; `None` if it was killed for a hang or a rule.
        ended: Option<Ended>,
        /// After this time.
        uptime: Duration,
    },
    /// The job hung after a restore without any progress.
    Hung,
    /// It was not restored, for this reason.
    Refused(String),
}

/// A fault in an image causes a death at the same moment after each restore. An external cause, such as a child of the
/// job that is killed, has the same result at different times.
const AT_ONE_MOMENT: Duration = Duration::from_millis(250);

impl Evidence {
    /// Whether it is the same failure.
    fn is_like(&self, other: &Evidence) -> bool {
        match (self, other) {
            (Evidence::Died { ended, uptime }, Evidence::Died { ended: other, uptime: before }) => {
                ended == other && uptime.abs_diff(*before) <= AT_ONE_MOMENT.max(*uptime.min(before) / 4)
            }
            (Evidence::Refused(why), Evidence::Refused(other)) => form(why) == form(other),
            (Evidence::Hung, Evidence::Hung) => true,
            (Evidence::Died { .. } | Evidence::Refused(_) | Evidence::Hung, _) => false,
        }
    }

    fn mark(&self) -> Finding {
        match self {
            Evidence::Died { ended, .. } => {
                let how = ended.map(|ended| format!(" ({ended})")).unwrap_or_default();
                let detail = format!("the job died twice within restart.min-uptime after a restore from it{how}");
                Finding::Mark { why: BadWhy::DiesAgain, detail }
            }
            Evidence::Hung => {
                let detail = "the job hung twice after a restore from it, without any progress".to_string();
                Finding::Mark { why: BadWhy::DiesAgain, detail }
            }
            Evidence::Refused(why) => Finding::Mark { why: BadWhy::DoesNotRestore, detail: why.clone() },
        }
    }
}

/// The text of a failure without what differs each time: addresses, pids, and the numbers of images and slots. Two texts of
/// one form are about the same failure.
pub(crate) fn form(why: &str) -> String {
    let words = why.split(|c: char| !c.is_alphanumeric()).filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
    words.filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The reaction to a failure of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Finding {
    /// Try it again.
    TryAgain,
    /// Use another image.
    PassOver,
    /// Use another image, and mark this one.
    Mark {
        /// The kind of problem.
        why: BadWhy,
        /// The problem as text.
        detail: String,
    },
}

/// Number of failures in a row that an image may have without the same failure twice: external causes mostly pass soon,
/// and an older image costs work.
const TRIES: u32 = 4;

#[derive(Debug, Clone, Default)]
struct Suspect {
    failures: u32,
    /// Evidence of the last failure.
    evidence: Option<Evidence>,
    passed: Passed,
    /// It was taken while the job hung, or the job hung since it was restored from it.
    of_hang: bool,
    /// The last end of a long life from it that took no newer image, and the number of similar ones in a row.
    late: Option<(Evidence, u32)>,
}

impl Suspect {
    /// Skips it for now, unless it is skipped for longer.
    fn skip(&mut self) {
        if self.passed == Passed::No {
            self.passed = Passed::ForNow;
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Passed {
    #[default]
    No,
    /// Until all others were tried.
    ForNow,
    /// It probably contains a hang: until all others were tried, also those passed over for now.
    Hang,
    /// For this run.
    ForGood,
}

/// Number of similar deaths in a row, from any images, after which the newest proven image is used.
const ROW: u32 = 4;

/// Failures of images.
#[derive(Debug, Clone, Default)]
pub(super) struct Suspects {
    images: BTreeMap<ImageId, Suspect>,
    /// The last death soon after a restore, and the number of similar ones before it.
    row: Option<(Evidence, u32)>,
}

impl Suspects {
    /// Adds a failure.
    pub(super) fn add(&mut self, id: ImageId, evidence: Option<Evidence>) -> Finding {
        let suspect = self.images.entry(id).or_default();
        suspect.failures += 1;
        let before = std::mem::replace(&mut suspect.evidence, evidence);
        let now = suspect.evidence.as_ref();
        // In the words that were told when it came first.
        let mark = before.filter(|before| now.is_some_and(|now| now.is_like(before))).map(|before| before.mark());
        match mark {
            Some(mark) => {
                suspect.skip();
                mark
            }
            None if suspect.failures < TRIES => Finding::TryAgain,
            None => {
                suspect.skip();
                Finding::PassOver
            }
        }
    }

    /// The job made no progress since this image. If `skipped`, it is skipped until nothing else is left.
    pub(super) fn contains_hang(&mut self, id: ImageId, skipped: bool) {
        let suspect = self.images.entry(id).or_default();
        suspect.of_hang = true;
        if skipped && suspect.passed != Passed::ForGood {
            suspect.passed = Passed::Hang;
        }
    }

    /// Skips the image for now.
    pub(super) fn pass_over(&mut self, id: ImageId) -> Finding {
        self.images.entry(id).or_default().skip();
        Finding::PassOver
    }

    /// Records a death soon after a restore, from any image. Returns whether there were enough in a row; then the count
    /// starts again.
    pub(super) fn is_row(&mut self, evidence: Option<&Evidence>) -> bool {
        let Some(now) = evidence else {
            self.row = None;
            return false;
        };
        let before = self.row.take().filter(|(before, _)| now.is_like(before)).map_or(0, |(_, count)| count);
        if before + 1 >= ROW {
            return true;
        }
        self.row = Some((now.clone(), before + 1));
        false
    }

    /// A life was long enough, which ends the row.
    pub(super) fn end_row(&mut self) {
        self.row = None;
    }

    /// Skips all images newer than the newest proven one, if there is one.
    pub(super) fn pass_over_newer_than(&mut self, good: impl Iterator<Item = ImageId>, proven: &BTreeSet<ImageId>) {
        let good: Vec<ImageId> = good.collect();
        let Some(newest_proven) = good.iter().copied().filter(|id| proven.contains(id)).max() else { return };
        for id in good.into_iter().filter(|id| *id > newest_proven) {
            self.pass_over(id);
        }
    }

    /// Skips the image for this run.
    pub(super) fn leave(&mut self, id: ImageId) -> Finding {
        self.images.entry(id).or_default().passed = Passed::ForGood;
        Finding::PassOver
    }

    /// It was restored on request although it was skipped: earlier failures to restore it no longer count.
    pub(super) fn was_restored(&mut self, id: ImageId) {
        if let Some(suspect) = self.images.get_mut(&id).filter(|suspect| suspect.passed != Passed::Hang) {
            suspect.passed = Passed::No;
        }
    }

    /// Only what is known about hangs in images: that does not pass with time.
    pub(super) fn of_hangs(&self) -> Suspects {
        let hangs = self.images.iter().filter(|(_, suspect)| suspect.of_hang);
        let suspect = |(id, known): (&ImageId, &Suspect)| {
            let passed = if known.passed == Passed::Hang { Passed::Hang } else { Passed::No };
            (*id, Suspect { of_hang: true, passed, ..Suspect::default() })
        };
        Suspects { images: hangs.map(suspect).collect(), row: None }
    }

    /// A long life from it ended, and had taken no newer image. If such lives end in the same way again and again, the
    /// job cannot get further from here, whatever the reason: then an older image is used.
    pub(super) fn lived_without_progress(&mut self, id: ImageId, end: Option<Evidence>) -> Finding {
        let before = self.images.remove(&id).and_then(|suspect| suspect.late);
        // An end with a cause from outside.
        let Some(end) = end else { return Finding::TryAgain };
        let count = before.filter(|(before, _)| end.is_like(before)).map_or(0, |(_, count)| count) + 1;
        let suspect = self.images.entry(id).or_default();
        if count >= TRIES {
            suspect.skip();
            return Finding::PassOver;
        }
        suspect.late = Some((end, count));
        Finding::TryAgain
    }

    /// The job has lived on from it, and has taken a newer image.
    pub(super) fn clear(&mut self, id: ImageId) {
        self.images.remove(&id);
    }

    pub(super) fn is_of_hang(&self, id: ImageId) -> bool {
        self.images.get(&id).is_some_and(|suspect| suspect.of_hang)
    }

    /// Whether there are images of hangs among these, and no others that can be used in this run.
    pub(super) fn only_hangs_are_left(&self, good: &[ImageId]) -> bool {
        let is_out = |id: &ImageId| self.images.get(id).is_some_and(|suspect| suspect.passed == Passed::ForGood);
        let mut left = good.iter().filter(|id| !is_out(id)).peekable();
        left.peek().is_some() && left.all(|id| self.is_of_hang(*id))
    }

    pub(super) fn is_passed_over(&self, id: ImageId) -> bool {
        self.images.get(&id).is_some_and(|suspect| suspect.passed != Passed::No)
    }

    /// All of these are skipped: starts again with those that are not skipped for the whole run. Those that probably
    /// contain a hang are left out if there is another one.
    pub(super) fn forget_passed_over(&mut self, good: &[ImageId]) {
        let of_hangs = self.of_hangs();
        self.images.retain(|_, suspect| suspect.passed == Passed::ForGood);
        for (id, suspect) in of_hangs.images {
            self.images.entry(id).or_insert(suspect);
        }
        if good.iter().all(|id| self.is_passed_over(*id)) {
            let hangs = self.images.values_mut().filter(|suspect| suspect.passed == Passed::Hang);
            hangs.for_each(|suspect| suspect.passed = Passed::No);
        }
    }
}

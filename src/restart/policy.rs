//! What to do after a job ended: a pure function from facts to a decision.
//!
//! The ladder: the newest good image of this lineage; one that the job dies from twice at once, or that does not
//! restore, is marked and the next older one is taken; then the job is started anew, where that is allowed, which by itself
//! it is only where there is no image at all; then it is given up, with the reason.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use crate::config::{ColdStart, Restart};
use crate::store::ImageId;
use crate::sys::spawn::Ended;

/// What a life of the job began with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The command, anew.
    Cold,
    /// An image.
    Image(ImageId),
}

impl std::fmt::Display for From {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            From::Cold => f.write_str("the beginning"),
            From::Image(id) => write!(f, "image {id}"),
        }
    }
}

/// Why a life of the job is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Death {
    /// It ended by itself.
    Ended(Ended),
    /// A snapshot could not set it going again, so it was killed.
    Lost,
    /// The rest of its memory did not come, so it was killed. That says nothing about the image.
    Unloaded,
    /// It is to be brought back, however it ended: it hung, or a rule says so.
    Judged,
}

/// The images that a job could go on from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Images {
    /// The good ones of its line, newest first.
    pub good: Vec<ImageId>,
    /// Whether there are others: marked as bad, or with a manifest that cannot be read.
    pub others: bool,
}

impl Images {
    /// None but these good ones.
    #[must_use]
    pub fn good(ids: impl IntoIterator<Item = ImageId>) -> Images {
        Images { good: ids.into_iter().collect(), others: false }
    }
}

/// What the supervisor remembers of earlier lives.
#[derive(Debug, Clone, Default)]
pub struct History {
    /// Restarts that count against the limit.
    restarts: VecDeque<Instant>,
    /// In a row, without healthy uptime between: the exponent of the back-off.
    in_a_row: u32,
    /// Deaths soon after a restore, by image.
    early: BTreeMap<ImageId, u32>,
    /// Deaths soon after a start from nothing, in a row.
    early_cold: u32,
    /// Failures in a row that are no image's fault.
    machine: u32,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The job is complete.
    Complete,
    /// Try again.
    Again {
        /// From where.
        from: From,
        /// After this long.
        after: Duration,
        /// An image to be marked first: the job died from it too often.
        mark: Option<ImageId>,
    },
    /// No more.
    GiveUp {
        /// Why, in words.
        why: String,
        /// An image to be marked first.
        mark: Option<ImageId>,
    },
    /// There are images and none can be used, and the job must not be started from nothing over them.
    NoUsableImage {
        /// An image to be marked first.
        mark: Option<ImageId>,
    },
}

/// So often may a job die soon after a restore of one image, or soon after a start from nothing.
const EARLY_DEATHS: u32 = 2;
/// So often is a restore tried again when the machine, not the image, was the reason.
const MACHINE_FAILURES: u32 = 5;

impl History {
    /// A life ended.
    #[must_use]
    pub fn after_death(
        &mut self,
        death: Death,
        from: From,
        uptime: Duration,
        images: &Images,
        policy: &Restart,
        now: Instant,
    ) -> Decision {
        self.machine = 0;
        if let Death::Ended(ended) = death {
            match judge(ended, policy) {
                Verdict::Complete => return Decision::Complete,
                Verdict::Never(why) => return Decision::GiveUp { why, mark: None },
                Verdict::Retry => {}
            }
        }
        if uptime >= policy.healthy_uptime {
            *self = History::default();
        }
        let early = uptime < policy.min_uptime && death != Death::Unloaded;
        let mut mark = None;
        match from {
            From::Image(id) if early => {
                let deaths = self.early.entry(id).or_default();
                *deaths += 1;
                mark = (*deaths >= EARLY_DEATHS).then_some(id);
            }
            From::Image(_) => {}
            From::Cold if early => self.early_cold += 1,
            From::Cold => self.early_cold = 0,
        }
        let good = images.good.iter().copied().filter(|id| Some(*id) != mark).collect();
        self.choose(&Images { good, others: images.others || mark.is_some() }, policy, now, mark)
    }

    /// An image could not be restored, and was marked. `images` are those that are left.
    #[must_use]
    pub fn after_bad_image(&mut self, images: &Images, policy: &Restart, now: Instant) -> Decision {
        self.choose(images, policy, now, None)
    }

    /// A start failed for a reason that another image would not change.
    #[must_use]
    pub fn after_machine_failure(&mut self, from: From, why: &str, policy: &Restart) -> Decision {
        self.machine += 1;
        if self.machine > MACHINE_FAILURES {
            let why = format!("{MACHINE_FAILURES} attempts failed, none by a fault of the image; the last: {why}");
            return Decision::GiveUp { why, mark: None };
        }
        Decision::Again { from, after: back_off(self.machine, policy), mark: None }
    }

    fn choose(&mut self, images: &Images, policy: &Restart, now: Instant, mark: Option<ImageId>) -> Decision {
        while self.restarts.front().is_some_and(|at| now.saturating_duration_since(*at) > policy.window) {
            self.restarts.pop_front();
        }
        if self.restarts.len() >= usize::try_from(policy.max_restarts).unwrap_or(usize::MAX) {
            let window = humantime::format_duration(policy.window);
            let why = format!("{} restarts within {window} (restart.max-restarts)", self.restarts.len());
            return Decision::GiveUp { why, mark };
        }
        let from = match (images.good.first(), policy.cold_start) {
            (Some(id), _) => From::Image(*id),
            (None, ColdStart::Never) => {
                let why = "there is no good image, and restart.cold-start is \"never\"".to_string();
                return Decision::GiveUp { why, mark };
            }
            (None, ColdStart::NoImages) if images.others => return Decision::NoUsableImage { mark },
            (None, ColdStart::NoImages | ColdStart::Allow) if self.early_cold >= EARLY_DEATHS => {
                let min = humantime::format_duration(policy.min_uptime);
                let why = format!(
                    "there is no good image, and started from nothing the job died twice within {min} (restart.min-uptime)"
                );
                return Decision::GiveUp { why, mark };
            }
            (None, ColdStart::NoImages | ColdStart::Allow) => From::Cold,
        };
        self.restarts.push_back(now);
        self.in_a_row += 1;
        Decision::Again { from, after: back_off(self.in_a_row, policy), mark }
    }
}

enum Verdict {
    Complete,
    Never(String),
    Retry,
}

fn judge(ended: Ended, policy: &Restart) -> Verdict {
    let Ended::Exit(code) = ended else { return Verdict::Retry };
    if code == 0 {
        return Verdict::Complete;
    }
    let listed = |list: &[u8]| u8::try_from(code).is_ok_and(|code| list.contains(&code));
    if listed(&policy.never_retry_exit_codes) {
        return Verdict::Never(format!("exit code {code} is in restart.never-retry-exit-codes"));
    }
    if !policy.retry_exit_codes.is_empty() && !listed(&policy.retry_exit_codes) {
        return Verdict::Never(format!("exit code {code} is not in restart.retry-exit-codes"));
    }
    Verdict::Retry
}

fn back_off(times: u32, policy: &Restart) -> Duration {
    let factor = 1u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX);
    policy.backoff.saturating_mul(factor).min(policy.backoff_max)
}

#[cfg(test)]
mod tests;

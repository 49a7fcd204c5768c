//! What to do after a job ended: a pure function from facts to a decision.
//!
//! The order: the newest good image of this lineage; then the next older one, at once; then the newest again, after a
//! pause; then the job is started from the beginning, if that is allowed (by default only if there is no image at all);
//! then it is given up, with the reason.
//!
//! The first restart of a job that ran well comes at once; the pauses begin with the second. They start again once the
//! job has had a new image in a life of `restart.min-uptime`: then it makes progress between its failures.
//!
//! An image is skipped for this run if the job died soon after a restore from it, or if it could not be restored
//! several times. It is marked, so that later runs skip it, too, only on evidence: the same failure twice, and nothing
//! but the image explains it. The death of the job is no evidence against a proven image: the job has lived on from it
//! before, so something else is wrong.
//!
//! A job that hangs does not continue from an image of the hang: those since which it made no progress are passed over,
//! however long it lived. If it makes no progress after a restore either, twice, that image is marked.
//!
//! If four long lives in a row from one image end in the same way, and none took a newer image, that image is passed over
//! too, without a mark: from an older one the job may get further.
//!
//! If a life ends soon because a GPU was occupied, that says nothing about its image. If it was by dead processes, and the
//! next life ends so too, the one after it waits until the GPU is quiet. If it was by another program, the pauses grow.
//!
//! If several lives in a row end soon and in the same way, and each one takes an image before it ends, the state was
//! damaged earlier: then the newest proven image is used.

pub(crate) mod deaths;
pub(crate) mod notices;
pub(crate) mod rules;
mod suspects;

pub(crate) use suspects::form;

use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use crate::config::{ColdStart, Restart};
use rekindle_os::spawn::Ended;
use rekindle_store::{BadWhy, ImageId};
use suspects::{Evidence, Finding, Suspects};

/// What a life of the job starts from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StartPoint {
    /// The command, from the beginning.
    Cold,
    /// An image.
    Image(ImageId),
}

impl std::fmt::Display for StartPoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            StartPoint::Cold => f.write_str("the beginning"),
            StartPoint::Image(id) => write!(f, "image {id}"),
        }
    }
}

/// How a life of the job ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Death {
    /// It ended by itself.
    Ended(Ended),
    /// It ended by itself, for a reason that is not the image's fault: lack of memory, a GPU that failed.
    Excused(Ended),
    /// It ended by itself, because a GPU was occupied: neither the image nor the machine is to blame.
    Outside(Ended, Occupied),
    /// It could not be resumed after a snapshot, and was killed.
    Lost,
    /// It must be restarted, however it ended: a rule matched.
    Judged,
    /// It was ended because it hung.
    Hung,
}

/// What a GPU is occupied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Occupied {
    /// Processes that have died. They will be gone soon.
    ByTheDead,
    /// Another program that goes on. Nobody knows when it ends.
    ByOthers,
}

/// Why an image was not restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Its bytes differ from what was written. It is marked already.
    Damaged,
    /// It was refused with this message, and only the image explains it.
    Refused(String),
    /// It was not restored, with this message; the reason is unknown, or is not the image.
    Unexplained(String),
    /// Another image is needed now: a further try would take too long, or there is one to go back to.
    NotNow(String),
    /// It needs files that do not exist any more. Another image may not need them.
    FilesGone(String),
}

/// The images that a job could continue from.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Images {
    /// The good images of its line, newest first.
    pub(crate) good: Vec<ImageId>,
    /// The images that the job has lived on from.
    pub(crate) proven: BTreeSet<ImageId>,
    /// Whether there are others: marked as bad, or with a manifest that cannot be read.
    pub(crate) others: bool,
    /// They could not be read, so that nothing is known of them.
    pub(crate) unread: bool,
    /// Those since which the job had made no progress when it was ended for a hang. They probably contain the hang.
    pub(crate) stuck: BTreeSet<ImageId>,
}

impl Failure {
    /// The reason, if it has not been logged yet.
    #[must_use]
    pub(crate) fn why(&self) -> Option<&str> {
        match self {
            Failure::Damaged => None,
            Failure::Refused(why) | Failure::Unexplained(why) | Failure::NotNow(why) | Failure::FilesGone(why) => {
                Some(why)
            }
        }
    }
}

#[cfg(test)]
impl Images {
    /// Only these good images, none of them proven.
    pub(crate) fn good(ids: impl IntoIterator<Item = ImageId>) -> Images {
        Images { good: ids.into_iter().collect(), ..Images::default() }
    }
}

/// What the supervisor remembers of earlier lives.
#[derive(Debug, Clone, Default)]
pub(crate) struct History {
    /// Restarts that count against the limit.
    restarts: VecDeque<Instant>,
    /// Restarts in a row, without progress in between: 0 for no pause, then the exponent of the back-off.
    in_a_row: u32,
    /// The newest image at the last death.
    newest: Option<ImageId>,
    /// Failures of images.
    suspects: Suspects,
    /// Deaths soon after a start from the beginning, in a row.
    early_cold: u32,
    /// Lives in a row that hung without any progress since their restore.
    hangs: u32,
    /// Lives in a row that ended soon because of what occupied a GPU.
    outside: u32,
    /// See [`History::waits_until_quiet`].
    until_quiet: bool,
    /// Failures in a row that are not the fault of an image.
    machine: u32,
    /// Since when the store cannot be read, and how often a start failed because of that.
    away: Option<(Instant, u32)>,
}

/// An image that no run should use, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mark {
    pub(crate) image: ImageId,
    /// The kind of problem.
    pub(crate) why: BadWhy,
    /// The problem as text.
    pub(crate) detail: String,
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Decision {
    /// The job is complete.
    Complete,
    /// Try again.
    Again {
        /// From where.
        from: StartPoint,
        /// After this long.
        after: Duration,
        /// An image to be marked first.
        mark: Option<Mark>,
    },
    /// Give up.
    GiveUp {
        /// The reason, as text.
        why: String,
        /// An image to be marked first.
        mark: Option<Mark>,
    },
    /// There are images, but none can be used, and the job must not be started from the beginning.
    NoUsableImage {
        /// An image to be marked first.
        mark: Option<Mark>,
    },
    /// Whether there are images is not known: the store could not be read for too long.
    Unread,
}

impl Decision {
    /// The image to be marked first.
    #[must_use]
    pub(crate) fn mark(&self) -> Option<&Mark> {
        match self {
            Decision::Complete | Decision::Unread => None,
            Decision::Again { mark, .. } | Decision::GiveUp { mark, .. } | Decision::NoUsableImage { mark } => {
                mark.as_ref()
            }
        }
    }
}

/// A life of this length begins the count of restarts and their pauses anew: what ends the job then is hardly
/// what ended it before.
pub(crate) const HEALTHY_UPTIME: Duration = Duration::from_secs(600);

/// The time in which restarts are counted.
pub(crate) const WINDOW: Duration = Duration::from_secs(3600);

/// Exit codes of a shell and of most programs after which no try is worth it.
const NEVER_AGAIN: [(i32, &str); 3] =
    [(2, "wrong usage"), (126, "that the command cannot be executed"), (127, "that the command was not found")];

/// How often a job may die soon after a start from the beginning.
pub(crate) const EARLY_DEATHS: u32 = 2;
/// How often in a row a job may hang after a restore without any progress, if all images that are left are of a hang.
const HANGS: u32 = 4;
/// How often a restore is tried again if the machine, not the image, was the cause.
const MACHINE_FAILURES: u32 = 5;
/// For so long a job waits for a store that cannot be read: a file server may be restarted meanwhile.
pub(crate) const STORE_PATIENCE: Duration = Duration::from_secs(300);
/// How many lives in a row may end soon because of what occupied a GPU before they count as those that end for an unknown
/// reason.
const OUTSIDE: u32 = 5;
/// How long a start waits at most until the GPUs are quiet. A kernel that cannot be interrupted is ended by the driver after
/// 4.4 s (580, measured); more contexts than one take longer.
pub(crate) const QUIET: Duration = Duration::from_secs(30);
/// The longest pause between two tries to read the store.
const STORE_AGAIN: Duration = Duration::from_secs(30);

impl History {
    /// The job was started or restored: the machine can do it.
    pub(crate) fn has_started(&mut self) {
        (self.machine, self.away) = (0, None);
    }

    /// Decides after a life has ended.
    #[must_use]
    pub(crate) fn after_death(
        &mut self,
        death: Death,
        from: StartPoint,
        uptime: Duration,
        images: &Images,
        policy: &Restart,
        now: Instant,
    ) -> Decision {
        if let Death::Ended(ended) | Death::Excused(ended) | Death::Outside(ended, _) = death {
            match judge(ended) {
                Verdict::Complete => return Decision::Complete,
                Verdict::Never(why) => return Decision::GiveUp { why, mark: None },
                Verdict::Retry => {}
            }
        }
        for id in &images.stuck {
            // One that was restored may hang for a reason from outside: it is tried again.
            self.suspects.contains_hang(*id, from != StartPoint::Image(*id));
        }
        let newest = images.good.iter().copied().find(|id| !self.suspects.is_of_hang(*id));
        let before = self.newest;
        if uptime >= HEALTHY_UPTIME {
            // Without a newer image it came no further than the lives before.
            let suspects = if newest > before { self.suspects.of_hangs() } else { std::mem::take(&mut self.suspects) };
            *self = History { suspects, hangs: self.hangs, ..History::default() };
        }
        self.newest = before.max(newest);
        self.until_quiet = false;
        match death {
            Death::Outside(_, by) if uptime < policy.min_uptime && self.outside < OUTSIDE => {
                self.outside += 1;
                return self.after_outside(by, images, policy, now);
            }
            Death::Outside(..) if uptime < policy.min_uptime => {}
            _ => self.outside = 0,
        }
        // The job has not lived on from an image after which it made no progress.
        let since_stuck = matches!(from, StartPoint::Image(id) if images.stuck.contains(&id));
        let early = uptime < policy.min_uptime || since_stuck;
        self.hangs = if since_stuck { self.hangs + 1 } else { 0 };
        // A life that took an image came further. If it was short, there is a pause, but the pauses do not grow.
        let came_further = newest > before && !since_stuck;
        self.in_a_row = match (early, came_further) {
            (true, true) => 1,
            (true, false) => self.in_a_row.max(1),
            (false, true) => 0,
            (false, false) => self.in_a_row,
        };
        match from {
            StartPoint::Image(id) if early => {
                self.suspects.was_restored(id);
                let evidence = match death {
                    _ if images.proven.contains(&id) => None,
                    // Without another one, a hang from outside would end the run.
                    Death::Hung if since_stuck => {
                        (!self.suspects.only_hangs_are_left(&images.good)).then_some(Evidence::Hung)
                    }
                    death => evidence(death, uptime),
                };
                if self.suspects.is_row(evidence.as_ref()) {
                    self.suspects.pass_over_newer_than(images.good.iter().copied(), &images.proven);
                }
                // A life that took an image has lived on from this one: the cause of its end may have come after this
                // image.
                let newest = images.good.iter().find(|id| !self.suspects.is_passed_over(**id));
                if newest.is_some_and(|newest| *newest > id) {
                    return self.choose(images, policy, now, None);
                }
                let finding = self.suspects.add(id, evidence);
                self.go_on(id, finding, images, policy, now)
            }
            StartPoint::Image(id) => {
                self.suspects.end_row();
                if newest > before {
                    self.suspects.clear(id);
                    return self.choose(images, policy, now, None);
                }
                let finding = self.suspects.lived_without_progress(id, evidence(death, uptime));
                self.go_on(id, finding, images, policy, now)
            }
            StartPoint::Cold => {
                self.early_cold = if early { self.early_cold + 1 } else { 0 };
                self.choose(images, policy, now, None)
            }
        }
    }

    /// Decides after a life that ended soon because of what occupied a GPU.
    fn after_outside(&mut self, by: Occupied, images: &Images, policy: &Restart, now: Instant) -> Decision {
        if by == Occupied::ByOthers {
            self.in_a_row = self.in_a_row.max(1);
            return self.choose(images, policy, now, None);
        }
        let in_a_row = self.in_a_row;
        let mut decision = self.choose(images, policy, now, None);
        // Longer pauses are for what lasts.
        self.in_a_row = in_a_row;
        self.until_quiet = self.outside > 1;
        if let Decision::Again { after, .. } = &mut decision {
            *after = if self.until_quiet { QUIET } else { policy.backoff };
        }
        decision
    }

    /// Whether the pause that was decided last ends early, as soon as the GPUs are quiet.
    #[must_use]
    pub(crate) fn waits_until_quiet(&self) -> bool {
        self.until_quiet
    }

    /// Decides after an image was not restored. `images` are the remaining ones.
    #[must_use]
    pub(crate) fn after_image_failure(
        &mut self,
        id: ImageId,
        failure: &Failure,
        images: &Images,
        policy: &Restart,
        now: Instant,
    ) -> Decision {
        self.in_a_row = self.in_a_row.max(1);
        self.away = None;
        let finding = match failure {
            // Another copy may be intact.
            Failure::Damaged => Finding::PassOver,
            Failure::Refused(why) => self.suspects.add(id, Some(Evidence::Refused(why.clone()))),
            Failure::Unexplained(_) => self.suspects.add(id, None),
            Failure::NotNow(_) => self.suspects.pass_over(id),
            Failure::FilesGone(_) => self.suspects.leave(id),
        };
        self.go_on(id, finding, images, policy, now)
    }

    /// Decides after a start failed for a reason that another image would not change.
    #[must_use]
    pub(crate) fn after_machine_failure(&mut self, from: StartPoint, why: &str, policy: &Restart) -> Decision {
        self.machine += 1;
        if self.machine > MACHINE_FAILURES {
            let why = format!("{MACHINE_FAILURES} attempts failed, none because of the image. The last one: {why}");
            return Decision::GiveUp { why, mark: None };
        }
        Decision::Again { from, after: back_off(self.machine, policy), mark: None }
    }

    /// Decides after a start failed because the store could not be read.
    #[must_use]
    pub(crate) fn after_store_failure(
        &mut self,
        from: StartPoint,
        why: &str,
        policy: &Restart,
        now: Instant,
    ) -> Decision {
        let (since, tries) = self.away.map_or((now, 1), |(since, tries)| (since, tries + 1));
        self.away = Some((since, tries));
        if tries > MACHINE_FAILURES && now.saturating_duration_since(since) >= STORE_PATIENCE {
            let patience = humantime::format_duration(STORE_PATIENCE);
            let why = format!("the store could not be read for {patience}, at {tries} attempts. The last one: {why}");
            return Decision::GiveUp { why, mark: None };
        }
        Decision::Again { from, after: back_off(tries, policy).min(STORE_AGAIN), mark: None }
    }

    /// Continues after a failure of this image.
    fn go_on(&mut self, id: ImageId, finding: Finding, images: &Images, policy: &Restart, now: Instant) -> Decision {
        match finding {
            // One of a hang, which was restored on request.
            Finding::TryAgain if self.suspects.is_passed_over(id) => self.next(images, policy, now, None),
            Finding::TryAgain => self.choose(images, policy, now, None),
            Finding::PassOver => self.next(images, policy, now, None),
            Finding::Mark { why, detail } => {
                let good = images.good.iter().copied().filter(|other| *other != id).collect();
                let left = Images { good, others: true, ..images.clone() };
                self.next(&left, policy, now, Some(Mark { image: id, why, detail }))
            }
        }
    }

    /// Uses the next older image, at once, because waiting would not help. If there is none, starts again with the
    /// newest.
    fn next(&mut self, images: &Images, policy: &Restart, now: Instant, mark: Option<Mark>) -> Decision {
        match images.good.iter().find(|id| !self.suspects.is_passed_over(**id)) {
            Some(id) => Decision::Again { from: StartPoint::Image(*id), after: Duration::ZERO, mark },
            None => self.choose(images, policy, now, mark),
        }
    }

    fn choose(&mut self, images: &Images, policy: &Restart, now: Instant, mark: Option<Mark>) -> Decision {
        if images.unread {
            // From the beginning, also if that is allowed, would lose what the images have.
            return Decision::Unread;
        }
        while self.restarts.front().is_some_and(|at| now.saturating_duration_since(*at) > WINDOW) {
            self.restarts.pop_front();
        }
        if self.restarts.len() >= usize::try_from(policy.max_restarts).unwrap_or(usize::MAX) {
            let window = humantime::format_duration(WINDOW);
            let why = format!("{} restarts within {window} (restart.max-restarts)", self.restarts.len());
            return Decision::GiveUp { why, mark };
        }
        if self.hangs >= HANGS && self.suspects.only_hangs_are_left(&images.good) {
            let why = format!(
                "the job hung after each of {} restores without any progress, and no image from before the hang can be used. \
                 Find out why it hangs from the stacks in its log folder, or start it from the beginning with --fresh",
                self.hangs
            );
            return Decision::GiveUp { why, mark };
        }
        if images.good.iter().all(|id| self.suspects.is_passed_over(*id)) {
            // The end of the ladder: images that were skipped without evidence are tried again.
            self.suspects.forget_passed_over(&images.good);
        }
        let image = images.good.iter().find(|id| !self.suspects.is_passed_over(**id));
        let others = images.others || !images.good.is_empty();
        let from = match (image, policy.cold_start) {
            (Some(id), _) => StartPoint::Image(*id),
            (None, ColdStart::Never) => {
                let why = "there is no good image, and restart.cold-start is \"never\". `rekindle list JOB` shows the \
                           images; `rekindle run --fresh` with the same command starts from the beginning"
                    .to_string();
                return Decision::GiveUp { why, mark };
            }
            (None, ColdStart::NoImages) if others => return Decision::NoUsableImage { mark },
            (None, ColdStart::NoImages | ColdStart::Allow) if self.early_cold >= EARLY_DEATHS => {
                let min = humantime::format_duration(policy.min_uptime);
                let why = format!(
                    "there is no good image, and the job died twice within {min} (restart.min-uptime) after a start \
                    from the beginning"
                );
                return Decision::GiveUp { why, mark };
            }
            (None, ColdStart::NoImages | ColdStart::Allow) => StartPoint::Cold,
        };
        self.restarts.push_back(now);
        let after = back_off(self.in_a_row, policy);
        self.in_a_row += 1;
        Decision::Again { from, after, mark }
    }
}

/// The evidence against the image from a death after a restore.
fn evidence(death: Death, uptime: Duration) -> Option<Evidence> {
    // Signals that are usually sent from outside; faults inside a program cause others.
    const FROM_OUTSIDE: [i32; 4] = [libc::SIGKILL, libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
    match death {
        Death::Ended(Ended::Signal(signal)) if FROM_OUTSIDE.contains(&signal) => None,
        Death::Ended(ended) => Some(Evidence::Died { ended: Some(ended), uptime }),
        Death::Judged | Death::Hung => Some(Evidence::Died { ended: None, uptime }),
        Death::Excused(_) | Death::Outside(..) | Death::Lost => None,
    }
}

/// Whether a death says nothing about the image that the job was restored from.
#[must_use]
pub(crate) fn is_from_outside(death: Death) -> bool {
    evidence(death, Duration::ZERO).is_none()
}

/// Why a job that ended so is not started again, if no try is worth it.
#[must_use]
pub(crate) fn never_again(ended: Ended) -> Option<String> {
    match judge(ended) {
        Verdict::Never(why) => Some(why),
        Verdict::Complete | Verdict::Retry => None,
    }
}

enum Verdict {
    Complete,
    Never(String),
    Retry,
}

fn judge(ended: Ended) -> Verdict {
    let Ended::Exit(code) = ended else { return Verdict::Retry };
    if code == 0 {
        return Verdict::Complete;
    }
    match NEVER_AGAIN.iter().find(|(never, _)| *never == code) {
        Some((_, meaning)) => Verdict::Never(format!(
            "exit code {code} means {meaning}, so another try would end in the same way. If it does not mean that, add a \
            rule with exit-code = {code} and action = \"restart\" ([[rules]])"
        )),
        None => Verdict::Retry,
    }
}

/// The pause before the try that follows so many.
fn back_off(times: u32, policy: &Restart) -> Duration {
    if times == 0 {
        return Duration::ZERO;
    }
    let factor = 1u32.checked_shl(times.saturating_sub(1)).unwrap_or(u32::MAX);
    policy.backoff.saturating_mul(factor).min(policy.longest_backoff())
}

#[cfg(test)]
mod tests;

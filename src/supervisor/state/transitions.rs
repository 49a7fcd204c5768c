//! How each state handles an event.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::events::{Action, Event, Finish, Harm, NO_USABLE_IMAGE, Stop, Verdict};
use super::states::{Ending, Life, State, Then};
use super::{Asked, Machine, Postponed};
use crate::policy::{Death, Decision, Failure, Images, Mark, STORE_PATIENCE, StartPoint};
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;
use rekindle_store::manifest::Reason;

/// How often a snapshot that failed temporarily is tried again: at once, then after [`MISSED`].
const SOON: u32 = 2;
const MISSED: Duration = Duration::from_secs(1);

impl Machine<'_> {
    pub(super) fn starting(
        &mut self,
        from: StartPoint,
        then: Option<Then>,
        event: Event,
        now: Instant,
    ) -> (State, Vec<Action>) {
        match (event, then) {
            (Event::Started, None | Some(Then::Suspend)) => {
                let life = Life { from, since: now, next: self.due(now, now), failures: 0, missed: 0 };
                match self.postponed {
                    Some(Postponed { reason, then }) if !self.is_busy() => {
                        self.postponed = None;
                        (State::Snapshotting { life, then, ended: None }, vec![Action::Snapshot(reason)])
                    }
                    _ => (State::Running(life), vec![]),
                }
            }
            // The job may run already. Commands are refused with a reason; a signal has no answer.
            (Event::SnapshotNow(reason), None) => {
                self.postponed = Some(Postponed { reason, then: None });
                (State::Starting { from, then }, vec![])
            }
            // A stop was requested during the start: nothing was done since the image, so there is nothing to save.
            (Event::Started, Some(Then::Stop(stop, _))) => {
                let life = Life { from, since: now, next: None, failures: 0, missed: 0 };
                kill(Ending::Stop(stop), life)
            }
            (Event::Started, Some(Then::Rewind(image))) => {
                let life = Life { from, since: now, next: None, failures: 0, missed: 0 };
                kill(Ending::Rewind(image), life)
            }
            (
                Event::ImageFailed { .. }
                | Event::StartFailed { .. }
                | Event::StoreAway { .. }
                | Event::Impossible { .. }
                | Event::Ended { .. },
                Some(Then::Stop(stop, _)),
            ) => finish(Finish::Stopped(stop)),
            (
                Event::ImageFailed { .. }
                | Event::StartFailed { .. }
                | Event::StoreAway { .. }
                | Event::Impossible { .. }
                | Event::Ended { .. },
                Some(Then::Rewind(image)),
            ) => start(StartPoint::Image(image)),
            (Event::ImageFailed { image, failure, images }, _) => self.not_restored(image, &failure, &images, now),
            (Event::StartFailed { why }, _) => {
                let decision = self.history.after_machine_failure(from, &why, &self.config.restart);
                decided(decision, None, now)
            }
            (Event::StoreAway { why }, _) => {
                let decision = self.history.after_store_failure(from, &why, &self.config.restart, now);
                decided(decision, None, now)
            }
            (Event::Impossible { why, obstacle }, _) => finish(Finish::Impossible { why, obstacle }),
            // There is nothing to save, so both are the same.
            (Event::StopBy(stop, _) | Event::StopNow(stop), _) => {
                (State::Starting { from, then: Some(Then::Stop(stop, now)) }, vec![Action::Cancel])
            }
            (Event::Rewind { image }, None | Some(Then::Rewind(_))) => {
                (State::Starting { from, then: Some(Then::Rewind(image)) }, vec![Action::Cancel])
            }
            (_, then) => (State::Starting { from, then }, vec![]),
        }
    }

    fn not_restored(
        &mut self,
        image: ImageId,
        failure: &Failure,
        images: &Images,
        now: Instant,
    ) -> (State, Vec<Action>) {
        let decision = self.history.after_image_failure(image, failure, images, &self.config.restart, now);
        let said = match (failure.why(), decision.mark()) {
            (Some(why), None) => vec![Action::NotRestored { image, why: why.into() }],
            _ => vec![],
        };
        let other = |wanted: fn(&StartPoint, ImageId) -> bool| matches!(&decision, Decision::Again { from, .. } if wanted(from, image));
        let stops = match self.asked {
            // An image that a user named is not replaced by another one.
            Some(Asked::Restore) => other(|from, image| *from != StartPoint::Image(image)),
            Some(Asked::Rewind) => other(|from, _| *from == StartPoint::Cold),
            None => false,
        };
        let (state, actions) = if stops {
            let mark = decision.mark().cloned();
            let why = failure.why().unwrap_or("its content is damaged");
            let why = format!("the requested image {image} cannot be used: {why}");
            let finish = Action::Finish(Finish::NoUsableImage { why });
            (State::Done, mark.map(Action::Mark).into_iter().chain([finish]).collect())
        } else {
            decided(decision, None, now)
        };
        (state, [said, actions].concat())
    }

    pub(super) fn running(&mut self, life: Life, event: Event, now: Instant) -> (State, Vec<Action>) {
        let snapshot =
            |life, reason, then| (State::Snapshotting { life, then, ended: None }, vec![Action::Snapshot(reason)]);
        match event {
            Event::Tick | Event::SnapshotNow(_) | Event::StopBy(..) | Event::Suspend if self.is_busy() => {
                self.postpone(life, event, now)
            }
            Event::PersistEnded(_) | Event::Release if !self.is_busy() => match self.postponed.take() {
                Some(Postponed { reason, then }) => snapshot(life, reason, then),
                None => (State::Running(life), vec![]),
            },
            Event::Tick if self.next(&life).is_some_and(|at| at <= now) => snapshot(life, Reason::Interval, None),
            Event::SnapshotNow(reason) => snapshot(life, reason, None),
            Event::Suspend => snapshot(life, Reason::Request, Some(Then::Suspend)),
            Event::StopBy(stop, until) => snapshot(life, Reason::Final, Some(Then::Stop(stop, until))),
            Event::StopNow(stop) => kill(Ending::Stop(stop), life),
            Event::Rewind { image } if self.postponed.and_then(Postponed::stop).is_none() => {
                kill(Ending::Rewind(image), life)
            }
            Event::Condemn(verdict) if self.postponed.and_then(Postponed::stop).is_none() => {
                self.verdict = Some(verdict);
                kill(Ending::Condemned, life)
            }
            Event::Ended { ended, images } => match self.postponed.and_then(Postponed::stop) {
                Some((stop, _)) if ended == Ended::Exit(0) && !stop.may_reach_the_job() => finish(Finish::Completed),
                Some((stop, _)) => finish(Finish::Stopped(stop)),
                None => self.died(Death::Ended(ended), &life, &images, now),
            },
            _ => (State::Running(life), vec![]),
        }
    }

    /// A snapshot waits: memory that is not restored yet cannot be dumped; there is only one slot beside the image
    /// being stored, and using it would leave none for the next; or the job blocks snapshots.
    fn postpone(&mut self, life: Life, event: Event, now: Instant) -> (State, Vec<Action>) {
        let then = self.postponed.and_then(|postponed| postponed.then);
        match (event, then) {
            // There is no time left for a snapshot; the image that is being stored is the last.
            (_, Some(Then::Stop(stop, until))) if until <= now => return kill(Ending::Stop(stop), life),
            (_, Some(Then::Stop(..))) => {}
            (Event::StopBy(stop, until), _) => {
                self.postponed = Some(Postponed { reason: Reason::Final, then: Some(Then::Stop(stop, until)) });
                self.held = self.held.map(|held| held.min(self.last_moment(until, now)));
            }
            (_, Some(_)) => {}
            (Event::Suspend, None) => {
                self.postponed = Some(Postponed { reason: Reason::Request, then: Some(Then::Suspend) });
            }
            (Event::SnapshotNow(reason), None) => self.postponed = Some(Postponed { reason, then: None }),
            (_, None) if self.postponed.is_none() && self.next(&life).is_some_and(|at| at <= now) => {
                self.postponed = Some(Postponed { reason: Reason::Interval, then: None });
            }
            _ => {}
        }
        (State::Running(life), vec![])
    }

    pub(super) fn snapshotting(
        &mut self,
        mut life: Life,
        then: Option<Then>,
        ended: Option<Ended>,
        event: Event,
        now: Instant,
    ) -> (State, Vec<Action>) {
        match event {
            // It is tried again, so the snapshot counts as still in progress.
            Event::SnapshotMissed
                if ended.is_none()
                    && life.missed < SOON
                    && match then {
                        Some(Then::Stop(_, until)) => now < until,
                        Some(Then::Suspend) => true,
                        Some(Then::Rewind(_) | Then::End) | None => false,
                    } =>
            {
                life.missed += 1;
                let reason = if matches!(then, Some(Then::Stop(..))) { Reason::Final } else { Reason::Request };
                if self.is_busy() {
                    self.postponed = Some(Postponed { reason, then });
                    return (State::Running(life), vec![]);
                }
                (State::Snapshotting { life, then, ended }, vec![Action::Snapshot(reason)])
            }
            Event::SnapshotTaken { .. } | Event::SnapshotFailed(_) | Event::SnapshotMissed => {
                let taken = matches!(event, Event::SnapshotTaken { .. });
                if let Event::SnapshotTaken { freeze } = event {
                    self.pace.frozen(freeze);
                }
                let lost = event == Event::SnapshotFailed(Harm::Lost);
                // One that had ended by itself could not be resumed in any case.
                if lost && ended.is_none() {
                    self.pace.was_fatal();
                }
                life.next = match event {
                    Event::SnapshotTaken { .. } => {
                        (life.failures, life.missed) = (0, 0);
                        self.due(life.since, now)
                    }
                    Event::SnapshotMissed if life.missed < SOON => {
                        life.missed += 1;
                        Some(now + MISSED * (life.missed - 1))
                    }
                    _ => {
                        life.failures += 1;
                        Some(now + self.retry(life.failures))
                    }
                };
                match (then, ended) {
                    (Some(Then::Rewind(image)), _) => kill(Ending::Rewind(image), life),
                    (Some(Then::End), _) => kill(Ending::Ordered, life),
                    (Some(Then::Suspend), _) if taken => kill(Ending::Suspend, life),
                    // The end will be reported, with the images at that time.
                    (None | Some(Then::Suspend), Some(_)) if !lost => {
                        (State::Running(Life { next: None, ..life }), vec![])
                    }
                    (None | Some(Then::Suspend), None) if !lost => match self.postponed {
                        // Requested after this snapshot had started.
                        Some(Postponed { reason, then }) if !self.is_busy() => {
                            self.postponed = None;
                            (State::Snapshotting { life, then, ended: None }, vec![Action::Snapshot(reason)])
                        }
                        _ => (State::Running(life), vec![]),
                    },
                    (None | Some(Then::Suspend), _) => kill(Ending::Lost, life),
                    // Everything is saved: further work of the job would be done twice.
                    (Some(Then::Stop(stop, _)), _) if taken || lost => kill(Ending::Stop(stop), life),
                    (Some(Then::Stop(stop, _)), Some(Ended::Exit(0))) if !stop.may_reach_the_job() => {
                        finish(Finish::Completed)
                    }
                    (Some(Then::Stop(stop, _)), Some(Ended::Exit(0))) => finish(Finish::Stopped(stop)),
                    (Some(Then::Stop(stop, until)), _) => {
                        let ending = State::Ending { stop: Ending::Stop(stop), deadline: Some(until), life };
                        (ending, vec![Action::Terminate])
                    }
                }
            }
            // The snapshot in progress does not contain what the client has done since it started. A signal only asks
            // for a snapshot soon.
            Event::SnapshotNow(Reason::Request) if then.is_none() => {
                self.postponed = Some(Postponed { reason: Reason::Request, then: None });
                (State::Snapshotting { life, then, ended }, vec![])
            }
            Event::StopBy(wanted, until) => {
                let then = match then {
                    Some(Then::Stop(..)) => then,
                    _ => Some(Then::Stop(wanted, until)),
                };
                (State::Snapshotting { life, then, ended }, vec![])
            }
            Event::StopNow(wanted) => {
                let (ending, kill) = kill(Ending::Stop(wanted), life);
                (ending, [vec![Action::Cancel], kill].concat())
            }
            Event::Suspend if then.is_none() => {
                (State::Snapshotting { life, then: Some(Then::Suspend), ended }, vec![])
            }
            // After the snapshot has released the job: two operations must not work on it at the same time.
            Event::Rewind { image } if !matches!(then, Some(Then::Stop(..))) => {
                (State::Snapshotting { life, then: Some(Then::Rewind(image)), ended }, vec![Action::Cancel])
            }
            // The time is over: frozen processes are released or killed with the others.
            Event::Tick => match then {
                Some(Then::Stop(stop, until)) if until <= now => {
                    let (ending, kill) = kill(Ending::Stop(stop), life);
                    (ending, [vec![Action::Cancel], kill].concat())
                }
                then => (State::Snapshotting { life, then, ended }, vec![]),
            },
            Event::Ended { ended, .. } => {
                (State::Snapshotting { life, then, ended: Some(ended) }, vec![Action::Cancel])
            }
            _ => (State::Snapshotting { life, then, ended }, vec![]),
        }
    }

    pub(super) fn ending(
        &mut self,
        stop: Ending,
        deadline: Option<Instant>,
        life: Life,
        event: Event,
        now: Instant,
    ) -> (State, Vec<Action>) {
        match (event, stop) {
            (Event::Ended { .. }, Ending::Rewind(image)) => start(StartPoint::Image(image)),
            // It ended by itself just before it would have been killed, and nobody had told it to.
            (Event::Ended { ended: Ended::Exit(0), .. }, Ending::Stop(stop)) if deadline.is_none() => {
                finish(if stop.may_reach_the_job() { Finish::Stopped(stop) } else { Finish::Completed })
            }
            (Event::Ended { ended: Ended::Exit(0), .. }, _) if deadline.is_none() => finish(Finish::Completed),
            (Event::Ended { .. }, Ending::Stop(stop)) => finish(Finish::Stopped(stop)),
            (Event::Ended { images, .. }, Ending::Lost) => self.died(Death::Lost, &life, &images, now),
            (Event::Ended { images, .. }, Ending::Condemned) => self.died(Death::Judged, &life, &images, now),
            (Event::Ended { images, .. }, Ending::Suspend) => {
                let from = images.good.first().map_or(life.from, |image| StartPoint::Image(*image));
                (State::Suspended { from }, vec![])
            }
            (
                Event::StopBy(wanted, _) | Event::StopNow(wanted),
                Ending::Lost | Ending::Suspend | Ending::Rewind(_) | Ending::Condemned,
            ) => kill(Ending::Stop(wanted), life),
            (Event::Rewind { image }, Ending::Lost | Ending::Suspend | Ending::Rewind(_) | Ending::Condemned) => {
                kill(Ending::Rewind(image), life)
            }
            (Event::StopNow(_), _) => kill(stop, life),
            (Event::Tick, _) if deadline.is_some_and(|at| at <= now) => kill(stop, life),
            _ => (State::Ending { stop, deadline, life }, vec![]),
        }
    }

    fn died(&mut self, mut death: Death, life: &Life, images: &Images, now: Instant) -> (State, Vec<Action>) {
        let died = match self.verdict {
            Some(Verdict::Died(signal)) => Some(Ended::Signal(signal)),
            _ => None,
        };
        let last = match death {
            _ if died.is_some() => died,
            Death::Ended(ended) | Death::Excused(ended) | Death::Outside(ended, _) => Some(ended),
            // It was killed for the verdict.
            Death::Judged | Death::Hung => Some(Ended::Signal(libc::SIGKILL)),
            Death::Lost => None,
        };
        let mut stuck = BTreeSet::new();
        if last != Some(Ended::Exit(0)) {
            match self.verdict.take() {
                Some(Verdict::GiveUp { why }) => return decided(Decision::GiveUp { why, mark: None }, last, now),
                Some(Verdict::Stop) => return finish(Finish::Stopped(Stop::Requeue)),
                Some(Verdict::Rewind(image)) => return start(StartPoint::Image(image)),
                Some(Verdict::Restart) => death = Death::Judged,
                Some(Verdict::Hung(images)) => (death, stuck) = (Death::Hung, images),
                // As if the whole job had died of it.
                Some(Verdict::Died(signal)) => death = Death::Ended(Ended::Signal(signal)),
                None => {}
            }
        }
        if let Death::Ended(ended) = death {
            death = self.ended_so(ended);
        }
        let uptime = now.saturating_duration_since(life.since);
        let policy = &self.config.restart;
        let images = Images { stuck, ..images.clone() };
        let decision = self.history.after_death(death, life.from, uptime, &images, policy, now);
        // A job that dies sooner has a bad image or a wrong command, against which more snapshots do not help.
        if decision != Decision::Complete && uptime >= policy.min_uptime {
            self.pace.failed();
        }
        let (state, mut actions) = decided(decision, last, now);
        self.until_quiet = self.history.waits_until_quiet() && matches!(state, State::Waiting { .. });
        if self.until_quiet {
            actions.insert(0, Action::AwaitQuiet);
        }
        (state, actions)
    }

    /// The pause after this many failures in a row.
    fn retry(&self, failures: u32) -> Duration {
        self.config.snapshot.retry_wait(failures)
    }
}

pub(super) fn waiting(from: StartPoint, until: Instant, event: Event, now: Instant) -> (State, Vec<Action>) {
    match event {
        Event::Tick if until <= now => start(from),
        Event::Rewind { image } => start(StartPoint::Image(image)),
        Event::Suspend => (State::Suspended { from }, vec![]),
        Event::StopBy(stop, _) | Event::StopNow(stop) => finish(Finish::Stopped(stop)),
        _ => (State::Waiting { from, until }, vec![]),
    }
}

pub(super) fn suspended(from: StartPoint, event: Event) -> (State, Vec<Action>) {
    match event {
        Event::Resume => start(from),
        Event::Rewind { image } => start(StartPoint::Image(image)),
        Event::StopBy(stop, _) | Event::StopNow(stop) => finish(Finish::Stopped(stop)),
        _ => (State::Suspended { from }, vec![]),
    }
}

pub(super) fn start(from: StartPoint) -> (State, Vec<Action>) {
    (State::Starting { from, then: None }, vec![Action::Start(from)])
}

pub(super) fn kill(stop: Ending, life: Life) -> (State, Vec<Action>) {
    (State::Ending { stop, deadline: None, life }, vec![Action::Kill])
}

fn decided(decision: Decision, last: Option<Ended>, now: Instant) -> (State, Vec<Action>) {
    let marked = |mark: Option<Mark>| mark.map(Action::Mark);
    match decision {
        Decision::Complete => finish(Finish::Completed),
        Decision::Again { from, after, mark } => {
            let actions = marked(mark).into_iter().chain([Action::Announce { from, after }]).collect();
            (State::Waiting { from, until: now + after }, actions)
        }
        Decision::GiveUp { why, mark } => {
            let end = Action::Finish(Finish::Failed { why, last });
            (State::Done, marked(mark).into_iter().chain([end]).collect())
        }
        Decision::Unread => finish(Finish::Failed { why: unread(), last: None }),
        Decision::NoUsableImage { mark } => {
            let end = Action::Finish(Finish::NoUsableImage { why: NO_USABLE_IMAGE.into() });
            (State::Done, marked(mark).into_iter().chain([end]).collect())
        }
    }
}

fn unread() -> String {
    let patience = humantime::format_duration(STORE_PATIENCE);
    format!(
        "the job ended, and its images could not be read for {patience}. Once the store can be read, run the same \
        command again: the job continues from its newest image"
    )
}

pub(super) fn finish(how: Finish) -> (State, Vec<Action>) {
    (State::Done, vec![Action::Finish(how)])
}

//! What the clouds announce about this machine, and what follows for the job.
//!
//! [`decide`] decides. A final snapshot because of a notice is the same as one before a deadline ([`super::deadline`]):
//! the image is stored, then replicated, and rekindle exits with the code that queues the job again. The one
//! difference: at the announced time nothing more is waited for, because the exit code must still reach the queue.
//!
//! A notice that is withdrawn while its final snapshot has not begun changes nothing for the job. One that is withdrawn
//! later does no harm either: the job is in an image and is queued again.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use super::finding::Finding;
use super::state::{Event, Finish, State, Stop};
use super::times::{in_full, in_seconds};
use super::{Message, Owner};
use crate::config::Interruption;
use crate::control::address;
use crate::policy::notices::{Decision, Facts, Idle, Job, Needs, Room, UNKNOWN, decide};
use crate::telemetry::events::What;
use crate::watch::interruption::client::Client;
use crate::watch::interruption::{self, Change, Silent, azure, detect};
use rekindle_base::cause::Cause;
use rekindle_base::chain;
use rekindle_base::notice::{Cloud, Notice};
use rekindle_store::manifest::Reason;

/// The notices that something was done about.
#[derive(Debug, Default)]
pub(super) struct Notices {
    /// When a snapshot was last taken because of a notice.
    last_snapshot: Option<Instant>,
    /// The notices that are a deadline for the job, each with its time.
    deadlines: Vec<(DateTime<Utc>, Notice)>,
    /// The notice for which the job is stopped.
    stop: Option<Notice>,
    /// When the machine ends, if that is known.
    end: Option<Instant>,
}

impl Notices {
    /// Adds a deadline, or changes its time. Returns whether it is new.
    fn add(&mut self, at: DateTime<Utc>, notice: Notice) -> bool {
        let is_new = !self.remove(&notice);
        self.deadlines.push((at, notice));
        is_new
    }

    /// Removes a deadline. Returns whether there was one.
    fn remove(&mut self, notice: &Notice) -> bool {
        let before = self.deadlines.len();
        self.deadlines.retain(|(_, known)| !is_same(known, notice));
        self.deadlines.len() < before
    }

    /// The earliest deadline.
    fn first(&self) -> Option<&(DateTime<Utc>, Notice)> {
        self.deadlines.iter().min_by_key(|(at, _)| *at)
    }
}

fn is_same(one: &Notice, other: &Notice) -> bool {
    (one.cloud, &one.id) == (other.cloud, &other.id)
}

impl Owner<'_> {
    /// Starts the threads that ask the clouds.
    pub(super) fn watch_notices(&mut self) {
        let clouds = match &self.setup.config.watch.interruption {
            Interruption::Off => Vec::new(),
            Interruption::Auto => detect::cloud(detect::DMI.as_ref()).into_iter().collect(),
            Interruption::Clouds(clouds) => clouds.clone(),
        };
        for cloud in clouds {
            tracing::debug!("asking {cloud} whether it interrupts this machine");
            let silent = Silent::default();
            for source in interruption::sources(cloud) {
                let (sender, silent) = (self.threads.sender.clone(), silent.clone());
                let report = move |change| sender.send(Message::Watched(Finding::Notice(change))).is_ok();
                self.spawn("notices", move || match Client::new() {
                    Ok(client) => interruption::watch(source, &silent, &client, report),
                    Err(error) => {
                        tracing::warn!("cannot ask whether this machine is interrupted: {}", chain(&error));
                    }
                });
            }
        }
    }

    pub(super) fn announced(&mut self, change: Change) {
        match change {
            Change::Came(notice) => self.interrupted(notice),
            Change::Changed(notice) if notice.kind.ends_the_machine() && self.watch.notices.stop.is_none() => {
                self.interrupted(notice);
            }
            Change::Changed(_) => {}
            Change::Gone(notice) => self.not_interrupted(&notice),
        }
    }

    /// A cloud announces an interruption.
    fn interrupted(&mut self, notice: Notice) {
        let now = Instant::now();
        let facts = Facts {
            job: match self.machine.state() {
                _ if self.machine.is_stopping() || self.end.is_there() => Job::Stops,
                State::Running(_) | State::Snapshotting { .. } => Job::Runs,
                _ => Job::Rests,
            },
            needs: self.needs_of_all(),
            last_snapshot: self.watch.notices.last_snapshot.map(|at| now.saturating_duration_since(at)),
        };
        let decision = decide(&notice, &facts, Utc::now());
        let said = said(&notice, Utc::now());
        let (action, why) = in_journal(decision);
        let (cloud, kind) = (notice.cloud, notice.kind);
        self.tell(What::Interruption { cloud, notice: kind, at: notice.at, action: action.into(), why });
        match decision {
            Decision::Stop { left, room } => {
                tracing::warn!("{said}: {}", stopping(facts.job));
                if let Some(text) = too_short(room, left, facts.needs).filter(|_| facts.job == Job::Runs) {
                    tracing::warn!("{text}");
                }
                self.stop_for(notice, left.map(|left| now + left));
                let until = now + left.unwrap_or_else(|| UNKNOWN.max(self.setup.config.snapshot.grace));
                self.step(Event::StopBy(Stop::Requeue, until));
            }
            Decision::Deadline(at) => {
                tracing::warn!(
                    "{said}: taking a snapshot now; before that time a final one follows, and the job is stopped to \
                    be queued again"
                );
                let is_new = self.watch.notices.add(at, notice);
                self.deadlines_change();
                if is_new {
                    self.snapshot_for_notice(now);
                }
            }
            Decision::Snapshot => {
                tracing::warn!("{said}: taking a snapshot; the job continues");
                self.snapshot_for_notice(now);
            }
            Decision::Nothing(idle) => tracing::info!("{said}: nothing is done, because {}", idle.in_words()),
        }
    }

    fn snapshot_for_notice(&mut self, now: Instant) {
        if matches!(self.machine.state(), State::Running(_) | State::Snapshotting { .. }) {
            self.watch.notices.last_snapshot = Some(now);
            self.step(Event::SnapshotNow(Reason::Request));
        }
    }

    /// The earliest deadline counts.
    fn deadlines_change(&mut self) {
        let first = self.watch.notices.first();
        self.reporting.published.notice = first.map(|(_, notice)| with_time(notice));
        self.deadline.is_noticed(first.map(|(at, _)| *at));
        self.publish();
    }

    /// The job is stopped for this notice.
    fn stop_for(&mut self, notice: Notice, end: Option<Instant>) {
        self.reporting.published.notice = Some(format!("{}: the job is stopped because of it", with_time(&notice)));
        self.watch.is_to_end(Cause::Interruption { cloud: notice.cloud, notice: notice.kind });
        self.watch.notices.stop = Some(notice);
        self.watch.notices.end = end;
    }

    /// The final snapshot before the deadline begins. If the deadline is that of a notice, that is the cause.
    pub(super) fn deadline_comes(&mut self, until: Instant) {
        if self.deadline.is_by_notice()
            && let Some((_, notice)) = self.watch.notices.first().cloned()
        {
            self.stop_for(notice, Some(until));
        }
    }

    /// A notice is no longer there.
    fn not_interrupted(&mut self, notice: &Notice) {
        let (cloud, kind) = (notice.cloud, notice.kind);
        self.tell(What::InterruptionOver { cloud, notice: kind });
        let was_deadline = self.watch.notices.remove(notice);
        if self.watch.notices.stop.as_ref().is_some_and(|known| is_same(known, notice)) {
            tracing::warn!(
                "{cloud} has withdrawn its notice that it {kind}. The job is being stopped already: it is queued again"
            );
            (self.watch.notices.stop, self.watch.notices.end) = (None, None);
            self.deadlines_change();
        } else if was_deadline {
            tracing::warn!("{cloud} has withdrawn its notice that it {kind}: the job continues");
            self.deadlines_change();
        } else {
            tracing::info!("{cloud} no longer says that it {kind}");
        }
    }

    /// Whether the time has come at which the machine ends; once.
    pub(super) fn machine_ends(&mut self) -> bool {
        self.watch.notices.end.take_if(|end| *end <= Instant::now()).is_some()
    }

    /// Tells Azure that the machine may end: the run is over, and its last image is stored. Other jobs of this machine
    /// may not be ready: the last one of them says it.
    pub(super) fn acknowledge(&self, finish: &Finish) {
        let Some(notice) = self.watch.notices.stop.as_ref().filter(|notice| notice.cloud == Cloud::Azure) else {
            return;
        };
        let is_saved = *finish == Finish::Stopped(Stop::Requeue)
            && self.reporting.published.last_failure.is_none()
            && self.only_in_memory().is_none();
        if !is_saved {
            return tracing::info!("Azure is not told that this machine is ready: the final image is not in the store");
        }
        match address::living(&self.setup.config.control.directory) {
            Ok(0) => {}
            Ok(others) => {
                let others = if others == 1 { "1 other job runs".into() } else { format!("{others} other jobs run") };
                return tracing::info!("Azure is not told that this machine is ready: {others} on it");
            }
            Err(error) => {
                return tracing::info!("Azure is not told that this machine is ready: cannot see other jobs: {error}");
            }
        }
        match Client::new().and_then(|client| azure::acknowledge(&client, &notice.id)) {
            Ok(()) => tracing::info!("told Azure that this machine is ready"),
            Err(error) => tracing::warn!("cannot tell Azure that this machine is ready: {}", chain(&error)),
        }
    }
}

/// The notice, with its time.
fn with_time(notice: &Notice) -> String {
    notice.at.map_or_else(|| notice.to_string(), |at| format!("{notice} at {}", in_full(at)))
}

/// The same, with the time that is left.
fn said(notice: &Notice, now: DateTime<Utc>) -> String {
    match notice.at.and_then(|at| (at - now).to_std().ok()) {
        Some(left) => format!("{}, in {}", with_time(notice), in_seconds(left)),
        None => with_time(notice),
    }
}

/// The action in the journal, and the reason why it is nothing.
fn in_journal(decision: Decision) -> (&'static str, Option<String>) {
    match decision {
        Decision::Stop { .. } => ("stop", None),
        Decision::Deadline(_) => ("deadline", None),
        Decision::Snapshot => ("snapshot", None),
        Decision::Nothing(idle) => ("none", Some(Idle::in_words(idle).into())),
    }
}

fn stopping(job: Job) -> &'static str {
    match job {
        Job::Runs => "taking a final snapshot, then stopping the job to be queued again",
        Job::Rests | Job::Stops => "the job does not run, so it is only queued again",
    }
}

/// The message if the time is too short: the figures, and what is done first.
fn too_short(room: Room, left: Option<Duration>, needs: Option<Needs>) -> Option<String> {
    let Needs { snapshot, store, replica } = needs?;
    let outcome = match room {
        Room::Unknown | Room::Enough => return None,
        Room::NotReplicated => "The image is stored first; the replica may not get it",
        Room::NotStored => "The image may not be stored in time; the newest image in the store counts then",
        Room::NotTaken => "The snapshot may not be complete in time; the newest image in the store counts then",
    };
    let left = match left {
        Some(left) => format!("the machine ends in {}", in_seconds(left)),
        None => format!("the time until the machine ends is unknown, at least {}", in_seconds(UNKNOWN)),
    };
    let replica =
        if replica.is_zero() { String::new() } else { format!(", then {} to replicate", in_seconds(replica)) };
    Some(format!(
        "{left}, and the final snapshot is expected to take {}, then {} to store{replica}. {outcome}. Shorten \
        snapshot.interval, so that less is new in each image",
        in_seconds(snapshot),
        in_seconds(store),
    ))
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;
    use rekindle_base::notice::Kind;

    use super::*;

    #[test]
    fn a_notice_is_told_with_its_time() {
        let now = DateTime::from_timestamp(1_795_327_200, 0).unwrap();
        let mut notice = Notice { cloud: Cloud::Aws, kind: Kind::Terminate, id: "spot".into(), at: None };
        assert_eq!(said(&notice, now), "AWS terminates this machine");
        notice.at = Some(now + TimeDelta::seconds(119));
        let at = |seconds| rekindle_base::units::moment(now + TimeDelta::seconds(seconds));
        assert_eq!(said(&notice, now), format!("AWS terminates this machine at {}, in 1m 59s", at(119)));
        notice.at = Some(now - TimeDelta::seconds(1));
        assert_eq!(said(&notice, now), format!("AWS terminates this machine at {}", at(-1)), "the past");
    }

    #[test]
    fn the_earliest_deadline_counts_and_each_is_withdrawn_by_itself() {
        let notice = |id: &str| Notice { cloud: Cloud::Azure, kind: Kind::Reboot, id: id.into(), at: None };
        let at = |seconds| DateTime::from_timestamp(seconds, 0).unwrap();
        let first = |notices: &Notices| notices.first().map(|(at, notice)| (at.timestamp(), notice.id.clone()));
        let mut notices = Notices::default();
        assert!(notices.add(at(900), notice("a")) && notices.add(at(3600), notice("b")));
        assert_eq!(first(&notices), Some((900, "a".into())), "a later one does not replace it");
        assert!(!notices.add(at(7200), notice("a")), "its time has changed");
        assert_eq!(first(&notices), Some((3600, "b".into())));
        assert!(!notices.remove(&Notice { cloud: Cloud::Aws, ..notice("b") }) && notices.remove(&notice("b")));
        assert_eq!(first(&notices), Some((7200, "a".into())));
        assert!(notices.remove(&notice("a")) && notices.first().is_none());
    }

    #[test]
    fn a_time_that_is_too_short_is_told_with_its_figures() {
        let seconds = Duration::from_secs;
        let needs = Needs { snapshot: seconds(5), store: seconds(40), replica: seconds(60) };
        let told = |room| too_short(room, Some(seconds(50)), Some(needs));
        assert_eq!((told(Room::Enough), told(Room::Unknown)), (None, None));
        assert_eq!(
            told(Room::NotReplicated).unwrap(),
            "the machine ends in 50s, and the final snapshot is expected to take 5s, then 40s to store, then 1m to \
            replicate. The image is stored first; the replica may not get it. Shorten snapshot.interval, so that less \
            is new in each image"
        );
        let alone = Needs { replica: Duration::ZERO, ..needs };
        let text = too_short(Room::NotStored, None, Some(alone)).unwrap();
        assert!(text.contains("unknown, at least 30s") && !text.contains("replicate"), "{text}");
    }
}

//! The final snapshot before a deadline: started early enough that the image is stored in time; then the job is
//! stopped, to be queued again.
//!
//! The deadline is the configured one, otherwise the scheduler's. A separate thread asks the scheduler: at the start,
//! every ten minutes, after this process was stopped, and again before the final snapshot, because a time limit can be
//! changed. As long as it fails and no deadline is known, it asks every two minutes. Until the scheduler has answered, its
//! deadline may be out of date, also in the past: in a shell of `salloc` whose limit was extended, or after `scontrol
//! suspend`. Then the final snapshot waits for the answer, for a short time.
//!
//! A [`forecast`] says how early the snapshot must start. It is computed each time the owner
//! wakes, from the events of this and earlier runs.
//!
//! A power cut loses nothing: all of this is determined again.

mod forecast;

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::policy::notices::Needs;
use crate::published::{Forecast, Persisting, with_margin};
use forecast::{Attended, Measured, Plan, Room, Route, left_of, plan, too_short};

use super::state::{Event, Stop};
use super::times::{in_full, in_seconds, micros};
use super::{Message, Owner, Setup};
use crate::scheduler;
use crate::telemetry::events::{self, What};
use rekindle_base::chain;

/// How long before the final snapshot the scheduler is asked again: longer than the timeout of its commands.
const ASK_AGAIN: Duration = Duration::from_secs(40);
/// How long after an attempt that failed the scheduler is asked again, if the deadline is not known.
const ASK_AGAIN_AFTER: Duration = Duration::from_secs(120);
/// How often the scheduler is asked whether it has changed the deadline.
const REFRESHED_AFTER: Duration = Duration::from_secs(600);
/// How long the final snapshot waits for the scheduler's answer: longer than the timeout of its commands.
const ANSWERED_WITHIN: Duration = Duration::from_secs(35);
/// How many bytes of the journal are read: some hundred events.
const LOOK_BACK: u64 = 128 << 10;

/// The scheduler's answer about the end of the job.
pub(super) type Answer = Result<Option<DateTime<Utc>>, scheduler::Error>;

/// How often the scheduler was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// Not again for the present end: that is done shortly before the final snapshot.
    Once,
    Again,
    /// It did not answer, and no end is known. It is asked at this time.
    InVain(Instant),
}

/// Whether the deadline that the scheduler gave is still its deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Confirmed {
    /// It has answered, or it is not asked.
    Yes,
    /// It must be asked: it has not answered since the start, or since this process was stopped.
    No,
    /// It was asked, and is waited for until this time.
    Awaited(Instant),
}

/// The deadline of the run, and the final snapshot before it.
#[derive(Debug)]
pub(super) struct Deadline {
    measured: Measured,
    route: Route,
    attended: Attended,
    begun: DateTime<Utc>,
    /// The deadline by configuration or by the scheduler, if known.
    end: Option<DateTime<Utc>>,
    /// When a cloud ends the machine, if it announces that.
    notice: Option<DateTime<Utc>>,
    asked: Asked,
    confirmed: Confirmed,
    /// When it is asked whether the deadline has changed, if it can be asked.
    refresh: Option<Instant>,
    /// When the final snapshot starts.
    begin: Option<DateTime<Utc>>,
    /// It was started.
    done: bool,
    /// The forecast that the user was last warned about.
    warned: Option<Duration>,
    told_short: bool,
}

impl Deadline {
    pub(super) fn new(setup: &Setup) -> Deadline {
        let mut measured = Measured::default();
        match events::newest(&setup.folder.log_dir(), LOOK_BACK) {
            Ok(known) => {
                known
                    .iter()
                    .filter(|event| event.run == setup.program.launch.lineage)
                    .for_each(|event| measured.observe(event));
            }
            Err(error) => tracing::debug!("measurements of earlier runs are not used: {error}"),
        }
        // systemd does not count here, because it is asked for more time ([`super::notify`]).
        let attended = if setup.time.scheduler.is_there() || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            Attended::Yes
        } else {
            Attended::No
        };
        let route = Route { replica: setup.config.replica.url.is_some() };
        Deadline {
            measured,
            route,
            attended,
            begun: Utc::now(),
            end: setup.time.deadline.or_else(|| setup.time.scheduler.end()),
            notice: None,
            asked: Asked::Once,
            confirmed: if setup.time.deadline.is_none() && setup.time.scheduler.can_be_asked() {
                Confirmed::No
            } else {
                Confirmed::Yes
            },
            refresh: setup.time.scheduler.can_be_asked().then(|| Instant::now() + REFRESHED_AFTER),
            begin: None,
            done: false,
            warned: None,
            told_short: false,
        }
    }

    /// Updates the measurements with an event.
    pub(super) fn observe(&mut self, event: &events::Event) {
        self.measured.observe(event);
    }

    /// This process was stopped for a while.
    pub(super) fn was_stopped(&mut self) {
        self.measured.was_stopped();
        // The scheduler may have stopped us, and add that time.
        if self.refresh.is_some() {
            self.confirmed = Confirmed::No;
        }
    }

    /// The scheduler is being asked.
    fn is_asked(&mut self, now: Instant) {
        if self.confirmed == Confirmed::No {
            self.confirmed = Confirmed::Awaited(now + ANSWERED_WITHIN);
        }
    }

    /// Until when the final snapshot waits for the scheduler. A cloud's notice and a configured deadline need no answer.
    fn awaited(&self) -> Option<Instant> {
        match self.confirmed {
            Confirmed::Awaited(until) if !self.is_by_notice() => Some(until),
            _ => None,
        }
    }

    /// How long the final snapshot will take; none before the first snapshot.
    fn forecast(&self) -> Option<Forecast> {
        self.measured.forecast(self.route)
    }

    /// A cloud ends the machine at this time; `None` if it does not any more.
    pub(super) fn is_noticed(&mut self, end: Option<DateTime<Utc>>) {
        self.notice = end;
    }

    /// Whether the deadline is that of a notice.
    pub(super) fn is_by_notice(&self) -> bool {
        self.notice.is_some_and(|notice| self.end.is_none_or(|end| notice <= end))
    }

    /// The deadline: the earlier of both.
    fn end(&self) -> Option<DateTime<Utc>> {
        self.end.into_iter().chain(self.notice).min()
    }

    /// Records the scheduler's answer at `now`.
    fn is_known(&mut self, answer: Answer, now: Instant) {
        self.confirmed = Confirmed::Yes;
        match answer {
            Ok(Some(end)) => {
                // The scheduler reports the time left in whole seconds.
                let same = self.end.is_some_and(|known| (known - end).num_seconds().abs() <= 2);
                if !same {
                    tracing::info!("the scheduler will end the job at {}", in_full(end));
                    self.end = Some(end);
                    // An end that was changed may be changed again.
                    self.asked = Asked::Once;
                }
            }
            Ok(None) => (self.end, self.asked) = (None, Asked::Once),
            Err(error) if self.end.is_none() => {
                let before = std::mem::replace(&mut self.asked, Asked::InVain(now + ASK_AGAIN_AFTER));
                if !matches!(before, Asked::InVain(_)) {
                    tracing::warn!(
                        "the deadline is unknown, so no final snapshot is taken before it: {}. The scheduler is asked \
                        again every {}",
                        chain(&error),
                        humantime::format_duration(ASK_AGAIN_AFTER)
                    );
                }
            }
            Err(error) => tracing::debug!("the deadline is unchanged: {}", chain(&error)),
        }
    }

    /// Plans the final snapshot at `now`, which is `time` on the wall clock.
    fn plan(&mut self, facts: &Facts, now: Instant, time: DateTime<Utc>) -> Planned {
        let mut asks_again = matches!(self.asked, Asked::InVain(at) if at <= now);
        if asks_again {
            // Until it answers.
            self.asked = Asked::InVain(now + ASK_AGAIN_AFTER);
        }
        if self.confirmed == Confirmed::No {
            asks_again = true;
            self.is_asked(now);
        }
        // An administrator can shorten the limit, or set one.
        if self.refresh.is_some_and(|at| at <= now) {
            asks_again = true;
            self.refresh = now.checked_add(REFRESHED_AFTER);
        }
        let Some(end) = self.end().filter(|_| !self.done) else {
            self.begin = None;
            return Planned { asks: asks_again, ..Planned::default() };
        };
        let forecast = facts.forecast;
        // A stop waits for the image that is being stored.
        let waits = match (&facts.storing, &forecast) {
            (Some(storing), Some(forecast)) => left_of(storing, forecast.store),
            _ => Duration::ZERO,
        };
        let waits = waits.max(facts.others);
        let lead = forecast.map_or(facts.grace, |forecast| with_margin(forecast.total().saturating_add(waits)));
        // A snapshot that the job blocks may have to wait for this long.
        let held = facts.held.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
        let lead = lead.saturating_add(held);
        let plan = match self.is_by_notice() {
            // The machine ends, however short the run was.
            true => Plan::until(end, lead),
            false => plan(self.begun, end, lead),
        };
        // Not at the cost of the final snapshot, if the end is right after all.
        if let (Confirmed::Awaited(until), Ok(left)) = (self.confirmed, (end - time).to_std())
            && !left.is_zero()
        {
            let total = |forecast: Forecast| forecast.total().saturating_add(waits).saturating_add(held);
            let needed = forecast.map_or(lead, total);
            self.confirmed = Confirmed::Awaited(until.min(now + left.saturating_sub(needed)));
        }
        let awaited = self.awaited().is_some_and(|until| now < until);
        if let Some(forecast) = forecast.filter(|forecast| !awaited && self.is_short_for(forecast, end)) {
            tracing::warn!(
                "the deadline is in {}, and the final snapshot is expected to take {}: it may not be complete in \
                time. Give the job more time (Slurm's --time)",
                in_seconds((end - self.begun).to_std().unwrap_or_default()),
                in_seconds(forecast.lead())
            );
        }
        self.begin = Some(plan.at);
        let left = (plan.at - time).to_std().unwrap_or_default();
        // A snapshot that starts later would not be stored before the final one.
        let busy = forecast.map_or(Duration::ZERO, |forecast| forecast.snapshot.saturating_add(forecast.store));
        let asks = left <= ASK_AGAIN && self.asked == Asked::Once;
        if asks {
            self.asked = Asked::Again;
        }
        self.done = left.is_zero() && !awaited;
        Planned {
            no_interval_from: now.checked_add(left.saturating_sub(busy)),
            asks: asks || asks_again,
            last_call: self.done.then(|| {
                // One that has passed did not end us: there is time for a final snapshot.
                let until = now + (end - time).to_std().ok().filter(|left| !left.is_zero()).unwrap_or(facts.grace);
                LastCall { end, until, lead }
            }),
        }
    }

    /// Whether there is no time for a final snapshot and the user must be told.
    fn is_short_for(&mut self, forecast: &Forecast, end: DateTime<Utc>) -> bool {
        let short = plan(self.begun, end, forecast.lead()).room == Room::Short;
        short && !self.is_by_notice() && !std::mem::replace(&mut self.told_short, true)
    }

    /// The warning if a stop would not get a final snapshot; repeated if that gets worse.
    fn warning(&mut self, forecast: &Forecast, grace: Duration) -> Option<String> {
        let Some(text) = too_short(forecast, grace, self.attended) else {
            self.warned = None;
            return None;
        };
        let total = forecast.total();
        let is_news = self.warned.is_none_or(|before| total > before.saturating_add(before / 4));
        is_news.then(|| {
            self.warned = Some(total);
            text
        })
    }

    /// When the final snapshot starts, or the scheduler is asked again.
    pub(super) fn next_wake(&self, now: Instant, time: DateTime<Utc>) -> Option<Instant> {
        let begin = self.begin.filter(|_| !self.done);
        let begin = begin.and_then(|begin| now.checked_add((begin - time).to_std().unwrap_or_default()));
        let begin = begin.map(|begin| begin.max(self.awaited().unwrap_or(begin)));
        let again = if let Asked::InVain(at) = self.asked { Some(at) } else { None };
        begin.into_iter().chain(again).chain(self.refresh).min()
    }
}

/// Facts for a plan that the deadline itself does not have.
#[derive(Debug)]
struct Facts {
    forecast: Option<Forecast>,
    /// Progress of the image that is being stored.
    storing: Option<Persisting>,
    /// How long other machines of the group may still need to store their parts.
    others: Duration,
    grace: Duration,
    /// When the job's holds on snapshots end.
    held: Option<Instant>,
}

/// What to do for the final snapshot.
#[derive(Debug, Default, PartialEq, Eq)]
struct Planned {
    /// From this time on the interval starts no snapshot.
    no_interval_from: Option<Instant>,
    /// Whether to ask the scheduler once more.
    asks: bool,
    /// The final snapshot starts now.
    last_call: Option<LastCall>,
}

#[derive(Debug, PartialEq, Eq)]
struct LastCall {
    /// When the job must have ended, by either clock.
    end: DateTime<Utc>,
    until: Instant,
    /// The expected time for the snapshot and for what it may have to wait for.
    lead: Duration,
}

impl Owner<'_> {
    /// Asks the scheduler for the end, if none is configured.
    pub(super) fn ask_for_the_end(&mut self) {
        let time = &self.setup.time;
        if time.deadline.is_some() || !time.scheduler.can_be_asked() {
            self.deadline.confirmed = Confirmed::Yes;
            return;
        }
        self.deadline.is_asked(Instant::now());
        let (scheduler, sender) = (time.scheduler.clone(), self.threads.sender.clone());
        self.spawn("scheduler", move || drop(sender.send(Message::End(scheduler.ask_end()))));
    }

    pub(super) fn end_is_known(&mut self, answer: Answer) {
        self.deadline.is_known(answer, Instant::now());
    }

    /// The expected times of a final snapshot that starts now; none before the first snapshot.
    pub(super) fn needs_of_all(&self) -> Option<Needs> {
        let Forecast { snapshot, store, replica } = self.last_of_all(self.deadline.forecast())?;
        let storing = self.transfers.stored_so_far();
        let waits = storing.map_or(Duration::ZERO, |storing| left_of(&storing, store)).max(self.others_store());
        Some(Needs { snapshot, store: store.saturating_add(waits), replica })
    }

    /// Plans the final snapshot, and starts it in time.
    pub(super) fn check_deadline(&mut self) {
        let own = self.deadline.forecast();
        // In a group, the slowest machine counts.
        let (forecast, grace) = (self.last_of_all(own), self.setup.config.snapshot.grace);
        let published = &mut self.reporting.published;
        if (published.deadline, published.predicted) != (self.deadline.end(), forecast) {
            (published.deadline, published.predicted) = (self.deadline.end(), forecast);
            self.publish();
        }
        if let Some(text) = forecast.and_then(|forecast| self.deadline.warning(&forecast, grace)) {
            tracing::warn!("{text}");
        }
        self.machine.last_takes(forecast.as_ref().map(Forecast::lead));
        let (storing, others) = (self.transfers.stored_so_far(), self.others_store());
        let facts = Facts { forecast, storing, others, grace, held: self.machine.held() };
        let planned = self.deadline.plan(&facts, Instant::now(), Utc::now());
        self.machine.no_interval_from(planned.no_interval_from);
        self.report_costs(own);
        if planned.asks {
            self.ask_for_the_end();
        }
        if let Some(LastCall { end, until, lead }) = planned.last_call {
            self.tell(What::LastCall { deadline: end, predicted_us: micros(lead) });
            tracing::info!(
                "deadline {}: taking a final snapshot, then stopping the job to be queued again",
                in_full(end)
            );
            self.deadline_comes(until);
            self.step(Event::StopBy(Stop::Requeue, until));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    /// A run that begins at `now` and must end within an hour.
    fn deadline(now: DateTime<Utc>) -> Deadline {
        Deadline {
            measured: Measured::default(),
            route: Route { replica: false },
            attended: Attended::No,
            begun: now,
            end: Some(now + 60 * MINUTE),
            notice: None,
            asked: Asked::Once,
            confirmed: Confirmed::Yes,
            refresh: None,
            begin: None,
            done: false,
            warned: None,
            told_short: false,
        }
    }

    /// After `scontrol suspend`, or in a shell of `salloc` whose limit was extended.
    #[test]
    fn an_end_that_may_be_out_of_date_ends_nothing_before_the_scheduler_has_answered() {
        let (now, time) = (Instant::now(), Utc::now());
        let later = |secs| (now + Duration::from_secs(secs), time + Duration::from_secs(secs));
        let past =
            || Deadline { end: Some(time - MINUTE), refresh: Some(now + 60 * MINUTE), ..deadline(time - 2 * MINUTE) };
        // At the start: the owner has asked.
        let mut fresh = Deadline { confirmed: Confirmed::No, ..past() };
        fresh.is_asked(now);
        let planned = fresh.plan(&facts(), now, time);
        assert_eq!((planned.last_call, fresh.next_wake(now, time)), (None, Some(now + ANSWERED_WITHIN)));
        fresh.is_known(Ok(Some(time + 60 * MINUTE)), now);
        assert_eq!(fresh.plan(&facts(), now, time).last_call, None);
        // This process was stopped: it is asked, and once.
        let mut stopped = past();
        stopped.was_stopped();
        let planned = stopped.plan(&facts(), now, time);
        assert!(planned.asks && planned.last_call.is_none());
        assert!(!stopped.plan(&facts(), now, time).asks && stopped.awaited().is_some());
        // The end has passed all the same, and the scheduler has not ended us.
        let (at, on_the_wall) = later(5);
        stopped.is_known(Ok(Some(time - MINUTE)), at);
        let call = stopped.plan(&facts(), at, on_the_wall).last_call.unwrap();
        assert_eq!((call.end, call.until), (time - MINUTE, at + facts().grace));
        // It does not answer.
        let mut silent = past();
        silent.was_stopped();
        assert!(silent.plan(&facts(), now, time).last_call.is_none());
        let (at, on_the_wall) = later(34);
        assert!(silent.plan(&facts(), at, on_the_wall).last_call.is_none());
        let (at, on_the_wall) = later(35);
        assert!(silent.plan(&facts(), at, on_the_wall).last_call.is_some());
        // The end is right, and soon.
        let mut soon = Deadline { end: Some(time + Duration::from_secs(30)), ..past() };
        soon.was_stopped();
        let quick = Facts { forecast: None, grace: Duration::from_secs(20), ..facts() };
        let planned = soon.plan(&quick, now, time);
        assert!(planned.last_call.is_none() && soon.next_wake(now, time).unwrap() <= later(30).0);
        let (at, on_the_wall) = later(29);
        assert!(soon.plan(&quick, at, on_the_wall).last_call.is_some(), "before the wait is over");
        // What a cloud announces needs no answer.
        let mut noticed = Deadline { confirmed: Confirmed::No, notice: Some(time - 2 * MINUTE), ..past() };
        noticed.is_asked(now);
        assert!(noticed.plan(&facts(), now, time).last_call.is_some());
        // Nobody can be asked.
        let mut alone = Deadline { refresh: None, ..past() };
        alone.was_stopped();
        assert!(alone.plan(&facts(), now, time).last_call.is_some());
    }

    /// An administrator can shorten a limit, or set one.
    #[test]
    fn the_scheduler_is_asked_now_and_then_whether_the_deadline_has_changed() {
        let (now, time) = (Instant::now(), Utc::now());
        for end in [Some(time + 24 * 60 * MINUTE), None] {
            let next = now + REFRESHED_AFTER;
            let mut deadline = Deadline { end, refresh: Some(next), ..deadline(time) };
            assert!(!deadline.plan(&facts(), now, time).asks, "it was asked at the start");
            assert!(deadline.next_wake(now, time).is_some_and(|at| at <= next));
            assert!(!deadline.plan(&facts(), next - MINUTE, time).asks);
            assert!(deadline.plan(&facts(), next, time).asks);
            assert!(!deadline.plan(&facts(), next + MINUTE, time).asks);
            assert!(deadline.plan(&facts(), next + REFRESHED_AFTER, time).asks);
        }
    }

    fn facts() -> Facts {
        let forecast = Forecast { snapshot: MINUTE, store: 3 * MINUTE, replica: Duration::ZERO };
        Facts { forecast: Some(forecast), storing: None, others: Duration::ZERO, grace: MINUTE, held: None }
    }

    #[test]
    fn the_last_snapshot_is_begun_once_and_the_scheduler_asked_before() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut deadline = deadline(time);
        let at = |left: Duration| (now + 60 * MINUTE - left, time + 60 * MINUTE - left);
        let lead = with_margin(4 * MINUTE);
        let first = deadline.plan(&facts(), now, time);
        assert_eq!(first.no_interval_from, Some(at(lead + 4 * MINUTE).0));
        assert!(!first.asks && first.last_call.is_none());
        assert_eq!(deadline.next_wake(now, time), Some(at(lead).0));
        let (near, on_the_wall) = at(lead + ASK_AGAIN);
        assert!(deadline.plan(&facts(), near, on_the_wall).asks && !deadline.plan(&facts(), near, on_the_wall).asks);
        let (begin, on_the_wall) = at(lead);
        let call = deadline.plan(&facts(), begin, on_the_wall).last_call;
        assert_eq!(call, Some(LastCall { end: time + 60 * MINUTE, until: at(Duration::ZERO).0, lead }));
        assert_eq!(deadline.plan(&facts(), begin, on_the_wall), Planned::default());
        assert_eq!(deadline.next_wake(begin, on_the_wall), None);
    }

    #[test]
    fn the_last_snapshot_leaves_time_for_what_it_may_have_to_wait_for() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut deadline = deadline(time);
        deadline.plan(&facts(), now, time);
        let alone = deadline.next_wake(now, time).unwrap();
        deadline.plan(&Facts { held: Some(now + 5 * MINUTE), ..facts() }, now, time);
        assert_eq!(deadline.next_wake(now, time), Some(alone - 5 * MINUTE));
        let image = rekindle_store::ImageId::new(1, DateTime::UNIX_EPOCH);
        let storing = Persisting { image, done: 0, total: 100, written: 0, rate: 0 };
        deadline.plan(&Facts { storing: Some(storing), ..facts() }, now, time);
        assert_eq!(deadline.next_wake(now, time), Some(now + 60 * MINUTE - with_margin(7 * MINUTE)));
        // Another machine of the group stores its part for longer.
        deadline.plan(&Facts { others: 9 * MINUTE, ..facts() }, now, time);
        assert_eq!(deadline.next_wake(now, time), Some(now + 60 * MINUTE - with_margin(13 * MINUTE)));
    }

    #[test]
    fn a_notice_is_an_earlier_deadline_until_it_is_withdrawn() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut deadline = deadline(time);
        let lead = with_margin(4 * MINUTE);
        deadline.is_noticed(Some(time + 7 * MINUTE));
        deadline.plan(&facts(), now, time);
        assert!(deadline.is_by_notice() && !deadline.told_short);
        // More than half of the time, which a scheduler's deadline would leave to the job.
        assert_eq!(deadline.next_wake(now, time), Some(now + 7 * MINUTE - lead));
        deadline.is_noticed(None);
        deadline.plan(&facts(), now, time);
        assert_eq!(deadline.next_wake(now, time), Some(now + 60 * MINUTE - lead));
        deadline.is_noticed(Some(time + 61 * MINUTE));
        assert!(!deadline.is_by_notice());
        deadline.is_known(Ok(None), now);
        deadline.plan(&facts(), now, time);
        assert_eq!(deadline.next_wake(now, time), Some(now + 61 * MINUTE - lead));
    }

    #[test]
    fn a_deadline_that_changes_is_asked_for_again() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut deadline = deadline(time);
        deadline.asked = Asked::Again;
        deadline.is_known(Ok(Some(time + 60 * MINUTE + Duration::from_secs(2))), now);
        assert_eq!((deadline.asked, deadline.end), (Asked::Again, Some(time + 60 * MINUTE)), "the same");
        deadline.is_known(Ok(Some(time + 90 * MINUTE)), now);
        assert_eq!((deadline.asked, deadline.end), (Asked::Once, Some(time + 90 * MINUTE)));
        deadline.is_known(Ok(None), now);
        assert_eq!((deadline.plan(&facts(), now, time), deadline.next_wake(now, time)), (Planned::default(), None));
    }

    #[test]
    fn a_scheduler_that_did_not_answer_is_asked_until_it_does() {
        let (now, time) = (Instant::now(), Utc::now());
        let mut deadline = Deadline { end: None, ..deadline(time) };
        let silent = || Err(scheduler::Error::Silent { command: "squeue".into() });
        assert_eq!((deadline.plan(&facts(), now, time), deadline.next_wake(now, time)), (Planned::default(), None));
        for asked in 0..3 {
            let at = now + ASK_AGAIN_AFTER * asked;
            deadline.is_known(silent(), at);
            let next = at + ASK_AGAIN_AFTER;
            assert_eq!(deadline.next_wake(at, time), Some(next));
            assert!(!deadline.plan(&facts(), next - Duration::from_secs(1), time).asks);
            assert!(deadline.plan(&facts(), next, time).asks);
            assert!(!deadline.plan(&facts(), next, time).asks, "it has not answered yet");
        }
        deadline.is_known(Ok(Some(time + 60 * MINUTE)), now);
        assert!(!deadline.plan(&facts(), now, time).asks);
        assert_eq!(deadline.next_wake(now, time), Some(now + 60 * MINUTE - with_margin(4 * MINUTE)));
        // What is known stays.
        deadline.is_known(silent(), now);
        assert_eq!((deadline.asked, deadline.end), (Asked::Once, Some(time + 60 * MINUTE)));
        // A cloud's notice is no answer.
        deadline.is_known(Ok(None), now);
        deadline.is_known(silent(), now);
        deadline.is_noticed(Some(time + 60 * MINUTE));
        assert!(deadline.plan(&facts(), now + ASK_AGAIN_AFTER, time).asks);
    }

    #[test]
    fn a_grace_that_is_too_short_is_warned_of_again_only_when_it_gets_worse() {
        let mut deadline = deadline(Utc::now());
        let forecast = |snapshot| Forecast { snapshot, store: Duration::ZERO, replica: Duration::ZERO };
        let mut warns = |snapshot| deadline.warning(&forecast(snapshot), MINUTE).is_some();
        assert!(warns(2 * MINUTE) && !warns(2 * MINUTE) && !warns(MINUTE * 5 / 2));
        assert!(warns(3 * MINUTE) && !warns(MINUTE / 2) && warns(2 * MINUTE), "it was long enough between");
    }
}

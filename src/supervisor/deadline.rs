//! The last snapshot before a deadline: begun early enough that it is safe when the time is over, then the job is stopped,
//! to be queued again.
//!
//! The deadline is the one that was given, else the scheduler's, which is asked for it on a thread of its own: at the begin,
//! and once more before the last snapshot is begun, because a time limit can be changed. How early is enough is a
//! [`forecast`]; it is made anew each time the owner wakes, and what it rests on comes from the events that the owner tells,
//! those of earlier runs included.
//!
//! Where the power goes nothing is lost: all of it is learnt again.

mod forecast;

use std::time::{Duration, Instant};

use chrono::{DateTime, SecondsFormat, Utc};

use crate::published::{Forecast, with_margin};
use forecast::{Attended, Measured, Room, Route, in_seconds, left_of, plan, too_short};

use super::events::micros;
use super::state::{Event, Stop};
use super::{Message, Owner, Setup};
use crate::scheduler;
use crate::telemetry::events::{self, What};
use rekindle_base::chain;

/// How long before the last snapshot the scheduler is asked again: longer than its commands try to reach it.
const ASK_AGAIN: Duration = Duration::from_secs(40);
/// How much of the journal is read: some hundred events.
const LOOK_BACK: u64 = 128 << 10;

/// What a scheduler said of the job's end.
pub(super) type Answer = Result<Option<DateTime<Utc>>, scheduler::Error>;

/// How often the scheduler was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Asked {
    /// Not since the last snapshot was planned for a time that is far away.
    Once,
    Again,
}

/// What is known of the end.
#[derive(Debug)]
pub(super) struct Deadline {
    measured: Measured,
    route: Route,
    attended: Attended,
    begun: DateTime<Utc>,
    /// When the time is over.
    end: Option<DateTime<Utc>>,
    asked: Asked,
    /// When the last snapshot is begun.
    begin: Option<DateTime<Utc>>,
    /// It was.
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
                    .filter(|event| event.run == setup.launch.lineage)
                    .for_each(|event| measured.observe(event));
            }
            Err(error) => tracing::debug!("what earlier runs measured is not used: {error}"),
        }
        // Not systemd, which is asked for more time ([`super::notify`]).
        let attended = if setup.scheduler.is_there() || std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            Attended::Yes
        } else {
            Attended::No
        };
        let route = Route { store: setup.staging.is_some(), replica: setup.config.replica.url.is_some() };
        Deadline {
            measured,
            route,
            attended,
            begun: Utc::now(),
            end: setup.deadline.or_else(|| setup.scheduler.end()),
            asked: Asked::Once,
            begin: None,
            done: false,
            warned: None,
            told_short: false,
        }
    }

    /// Learns from what happened.
    pub(super) fn observe(&mut self, event: &events::Event) {
        self.measured.observe(event);
    }

    /// Whether there is no room for a last snapshot, and the user is to be told.
    fn is_short_for(&mut self, forecast: &Forecast, end: DateTime<Utc>) -> bool {
        let short = plan(self.begun, end, forecast.lead()).room == Room::Short;
        short && !std::mem::replace(&mut self.told_short, true)
    }

    /// How long the owner may sleep.
    pub(super) fn patience(&self) -> Duration {
        let left = |at: DateTime<Utc>| (at - Utc::now()).to_std().unwrap_or_default();
        self.begin.filter(|_| !self.done).map_or(Duration::MAX, left)
    }
}

impl Owner<'_> {
    /// Asks the scheduler for the end, where nobody gave one.
    pub(super) fn ask_for_the_end(&mut self) {
        let setup = self.shared;
        if setup.deadline.is_some() || !setup.scheduler.can_be_asked() {
            return;
        }
        let (scheduler, sender) = (setup.scheduler.clone(), self.sender.clone());
        self.spawn("scheduler", move || drop(sender.send(Message::End(scheduler.ask_end()))));
    }

    pub(super) fn end_is_known(&mut self, answer: Answer) {
        match answer {
            Ok(Some(end)) => {
                // What it says is in whole seconds of time left.
                let same = self.deadline.end.is_some_and(|known| (known - end).num_seconds().abs() <= 2);
                if !same {
                    tracing::info!("the scheduler ends the job at {}", end.to_rfc3339_opts(SecondsFormat::Secs, true));
                    self.deadline.end = Some(end);
                    // One that is later now may be changed again.
                    self.deadline.asked = Asked::Once;
                }
            }
            Ok(None) => self.deadline.end = None,
            Err(error) if self.deadline.end.is_none() => {
                tracing::warn!("no deadline is known, and no last snapshot is taken before one: {}", chain(&error));
            }
            Err(error) => tracing::debug!("the deadline stays as it was: {}", chain(&error)),
        }
    }

    /// Plans the last snapshot, and begins it when its time has come.
    pub(super) fn mind_the_deadline(&mut self) {
        let forecast = self.deadline.measured.forecast(self.deadline.route);
        if (self.published.deadline, self.published.predicted) != (self.deadline.end, forecast) {
            self.published.deadline = self.deadline.end;
            self.published.predicted = forecast;
            self.publish();
        }
        if let Some(forecast) = &forecast {
            self.mind_the_grace(forecast);
        }
        self.machine.last_takes(forecast.as_ref().map(Forecast::lead));
        let Some(end) = self.deadline.end.filter(|_| !self.deadline.done) else {
            self.deadline.begin = None;
            return self.machine.no_interval_from(None);
        };
        let now = Utc::now();
        // A stop waits for the image that is on its way to the store.
        let waits = match (&self.persist, &forecast) {
            (Some(persist), Some(forecast)) => left_of(&persist.seen(), forecast.store),
            _ => Duration::ZERO,
        };
        let grace = self.shared.config.snapshot.grace;
        let lead = forecast.map_or(grace, |forecast| with_margin(forecast.total().saturating_add(waits)));
        // What the job holds off may have to wait for so long.
        let held = self.machine.held().map_or(Duration::ZERO, |until| until.saturating_duration_since(Instant::now()));
        let lead = lead.saturating_add(held);
        let plan = plan(self.deadline.begun, end, lead);
        if let Some(forecast) = forecast.filter(|forecast| self.deadline.is_short_for(forecast, end)) {
            tracing::warn!(
                "there are {} until the deadline, and a last snapshot is expected to take {}: it may not be whole in time. Give the job more time (Slurm's --time)",
                in_seconds((end - self.deadline.begun).to_std().unwrap_or_default()),
                in_seconds(forecast.lead())
            );
        }
        self.deadline.begin = Some(plan.at);
        let left = (plan.at - now).to_std().unwrap_or_default();
        // What would not be in the store before.
        let busy = forecast.map_or(Duration::ZERO, |forecast| forecast.snapshot.saturating_add(forecast.store));
        self.machine.no_interval_from(Instant::now().checked_add(left.saturating_sub(busy)));
        if left <= ASK_AGAIN && self.deadline.asked == Asked::Once {
            self.deadline.asked = Asked::Again;
            self.ask_for_the_end();
        }
        if left.is_zero() {
            self.deadline.done = true;
            let until = Instant::now() + (end - now).to_std().unwrap_or_default();
            self.tell(What::LastCall { deadline: end, predicted_us: micros(lead) });
            tracing::info!(
                "the time is over at {}: a last snapshot, then the job is stopped, to be queued again",
                end.to_rfc3339_opts(SecondsFormat::Secs, true)
            );
            self.step(Event::StopBy(Stop::Requeue, until));
        }
    }

    /// Says when a stop would not get a last snapshot, and again when that gets worse.
    fn mind_the_grace(&mut self, forecast: &Forecast) {
        let Some(text) = too_short(forecast, self.shared.config.snapshot.grace, self.deadline.attended) else {
            self.deadline.warned = None;
            return;
        };
        let total = forecast.total();
        if self.deadline.warned.is_none_or(|before| total > before.saturating_add(before / 4)) {
            self.deadline.warned = Some(total);
            tracing::warn!("{text}");
        }
    }
}

//! One supervisor's side of the protocol: its state, the events that it gets, and its answers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::documents::{Ask, Asked, Fresh, Report, Rewound, View};
use crate::events::{Action, Answer, Event, Write};
use crate::ids::{Epoch, Incarnation, Number};
use crate::leader::Leading;
use crate::member::Member;
use crate::options::Options;

/// The state of one supervisor.
#[derive(Debug)]
pub struct Machine {
    options: Options,
    view: Arc<View>,
    member: Member,
    /// Of a member that leads.
    leading: Option<Leading>,
    /// A write has no answer yet.
    is_writing: bool,
    /// Decides nothing from a view before this revision: it lacks our own writes.
    since: u64,
    /// Writes nothing before this time, unless the view has another revision by then.
    pause: Option<(Instant, u64)>,
}

/// The pause after a write that was refused or not answered.
const PAUSE: Duration = Duration::from_secs(1);

impl Machine {
    /// A supervisor that has not joined. `epoch` is the last one that ran here.
    #[must_use]
    pub fn new(options: Options, epoch: Epoch) -> Machine {
        Machine {
            member: Member::new(options.rank, epoch),
            options,
            view: Arc::default(),
            leading: None,
            is_writing: false,
            since: 0,
            pause: None,
        }
    }

    /// Group images before `floor` are not used, as [`Machine::floor`] said in an earlier process. If `is_fresh`, the user
    /// wants to start from the beginning.
    #[must_use]
    pub fn starting(mut self, is_fresh: bool, floor: Number) -> Machine {
        self.member.starts(if is_fresh { Fresh::Wanted } else { Fresh::No }, floor);
        self
    }

    /// This member for a coordinator that does not know it: it keeps what it knows of itself and a stop that was not
    /// served, and nothing of the group.
    #[must_use]
    pub fn afresh(&self) -> Machine {
        let mut machine = Machine::new(self.options.clone(), self.member.epoch());
        machine.member.follows(&self.member, &self.view);
        machine
    }

    /// What rewinds have abandoned, as [`Machine::rewound`] said in an earlier process.
    #[must_use]
    pub fn remembering(mut self, rewound: Option<Rewound>) -> Machine {
        self.member.remembers(rewound);
        self
    }

    /// What rewinds have abandoned.
    #[must_use]
    pub fn rewound(&self) -> Option<&Rewound> {
        self.member.rewound()
    }

    /// Group images before this one are not used.
    #[must_use]
    pub fn floor(&self) -> Number {
        self.member.floor()
    }

    /// Changes the time between group snapshots, for the case that this member leads.
    pub fn set_interval(&mut self, interval: Option<Duration>) {
        self.options.interval = interval;
    }

    /// The latest request of this member.
    #[must_use]
    pub fn asked(&self) -> Option<&Asked> {
        self.member.asked()
    }

    /// When [`Event::Tick`] is needed.
    #[must_use]
    pub fn deadline(&self) -> Option<Instant> {
        // While a write has no answer, nothing is decided: its answer wakes us.
        let decides = self.leads() && !self.is_writing && self.pause.is_none() && self.view.revision >= self.since;
        let leading = self.leading.as_ref().filter(|_| decides).and_then(Leading::deadline);
        let pause = self.pause.map(|(until, _)| until);
        [self.member.deadline(&self.options), leading, pause].into_iter().flatten().min()
    }

    /// The newest state of the coordinator.
    #[must_use]
    pub fn view(&self) -> &View {
        &self.view
    }

    /// The report of this member, as it is or will be written.
    #[must_use]
    pub fn report(&self) -> Option<Report> {
        self.member.report(&self.view)
    }

    /// The present membership.
    #[must_use]
    pub fn incarnation(&self) -> Option<Incarnation> {
        self.member.incarnation()
    }

    /// Whether this process is a member of the present run, or was one before it lost its lease.
    #[must_use]
    pub fn is_of_run(&self) -> bool {
        self.view.plan.as_ref().is_some_and(|plan| self.member.was_there(&plan.value))
    }

    /// Whether this member leads.
    #[must_use]
    pub fn leads(&self) -> bool {
        self.view.leader.is_some() && self.view.leader == self.member.incarnation()
    }

    /// Handles an event and returns what to do, in order. Events that have no meaning in a state change nothing.
    pub fn step(&mut self, event: Event, now: Instant) -> Vec<Action> {
        let mut orders = Vec::new();
        match event {
            Event::View(view) if view.revision >= self.view.revision => self.view = view,
            Event::View(_) | Event::Tick => {}
            Event::Session(incarnation) => orders.extend(self.member.joins(incarnation, &self.view)),
            Event::Sure(until) => self.member.sure(until),
            Event::SessionLost => orders.extend(self.member.loses_session(&self.view)),
            Event::Wrote(answer) => {
                self.is_writing = false;
                match answer {
                    Answer::Done(revision) => self.since = self.since.max(revision),
                    Answer::Conflict | Answer::Unknown => self.pause = Some((now + PAUSE, self.view.revision)),
                }
            }
            Event::Local(local) => self.member.happened(local),
            Event::Asked(ask) => self.member.asks(ask, &self.view),
        }
        self.member.follow(&self.view, &self.options, now, &mut orders);
        let mut actions = Vec::new();
        actions.extend(orders.into_iter().map(Action::Do));
        self.pause = self.pause.filter(|(until, revision)| now < *until && self.view.revision == *revision);
        if !self.leads() {
            // It may have led before: what it saw then is out of date.
            self.leading = None;
        }
        if !self.is_writing && self.pause.is_none() && self.view.revision >= self.since {
            let write = self.next_write(now);
            self.is_writing = write.is_some();
            actions.extend(write.map(Action::Write));
        }
        actions
    }

    /// The own report first: the leader decides from the reports.
    fn next_write(&mut self, now: Instant) -> Option<Write> {
        let write = self.member.write(&self.view);
        if write.is_some() || !self.member.has_joined(&self.view) {
            return write;
        }
        if self.view.leader.is_none() {
            return self.member.incarnation().map(Write::Lead);
        }
        if !self.leads() {
            return None;
        }
        self.leading.get_or_insert_default().decide(&self.view, &self.options, now)
    }
}

impl Asked {
    pub(crate) fn after(last: Option<&Asked>, ask: Ask) -> Asked {
        Asked { number: last.map_or(0, |last| last.number) + 1, ask }
    }
}

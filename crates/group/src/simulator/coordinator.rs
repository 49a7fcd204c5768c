//! A model of etcd: keys with revisions, leases, transactions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::plants::Plant;
use crate::documents::{Versioned, View};
use crate::events::{Answer, Write};
use crate::ids::{Incarnation, Number, Rank};

/// How long a lease lives without a renewal.
pub(crate) const TTL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Coordinator {
    pub(crate) view: Arc<View>,
    leases: Leases,
    next: u64,
    /// It does not answer.
    pub(crate) away: bool,
    /// It refuses to write, and to grant leases.
    pub(crate) full: bool,
    /// It may end a lease that is being renewed.
    pub(crate) leases_end_early: bool,
    plant: Option<Plant>,
}

/// When each lease expires.
#[derive(Debug, Default)]
struct Leases {
    until: BTreeMap<Incarnation, Instant>,
    /// The first of these times.
    first: Option<Instant>,
}

impl Leases {
    /// Begins a lease, or renews it.
    fn set(&mut self, incarnation: Incarnation, until: Instant) {
        let before = self.until.insert(incarnation, until);
        self.first = match self.first {
            // It may have been the first.
            Some(first) if before.is_some_and(|before| before == first) => self.until.values().min().copied(),
            first => Some(first.map_or(until, |first| first.min(until))),
        };
    }

    fn renew_all(&mut self, until: Instant) {
        self.until.values_mut().for_each(|lease| *lease = until);
        self.first = self.until.values().min().copied();
    }

    fn remove(&mut self, incarnation: Incarnation) {
        self.until.remove(&incarnation);
        self.first = self.until.values().min().copied();
    }
}

impl Coordinator {
    pub(crate) fn new(leases_end_early: bool, plant: Option<Plant>) -> Coordinator {
        let (view, leases, away, full) = (Arc::default(), Leases::default(), false, false);
        Coordinator { view, leases, next: 1, away, full, leases_end_early, plant }
    }

    pub(crate) fn grant(&mut self, now: Instant) -> Incarnation {
        let incarnation = Incarnation(self.next);
        self.next += 1;
        self.leases.set(incarnation, now + TTL);
        incarnation
    }

    /// Returns whether the lease still exists.
    pub(crate) fn renew(&mut self, incarnation: Incarnation, now: Instant) -> bool {
        let lives = self.leases.until.contains_key(&incarnation);
        if lives {
            self.leases.set(incarnation, now + TTL);
        }
        lives
    }

    /// When the coordinator answers again, the leases get their whole time, as in etcd after the election of a leader.
    pub(crate) fn is_back(&mut self, now: Instant) {
        self.away = false;
        self.leases.renew_all(now + TTL);
    }

    /// Loses all data.
    pub(crate) fn forget(&mut self) {
        let revision = self.view.revision + 1;
        self.view = Arc::new(View { revision, ..View::default() });
        self.leases = Leases::default();
    }

    /// Somebody removes these records.
    pub(crate) fn remove_records(&mut self, numbers: &[Number]) {
        let view = Arc::make_mut(&mut self.view);
        view.revision += 1;
        view.images.retain(|number, _| !numbers.contains(number));
    }

    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.leases.first.filter(|_| !self.away)
    }

    /// Removes the keys of expired leases. Returns whether something changed.
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        if self.away || self.leases.first.is_none_or(|first| first > now) {
            return false;
        }
        let over: Vec<Incarnation> =
            self.leases.until.iter().filter(|(_, until)| **until <= now).map(|(it, _)| *it).collect();
        for incarnation in &over {
            self.leases.remove(*incarnation);
            self.remove(*incarnation);
        }
        !over.is_empty()
    }

    /// Ends a lease too early. etcd before 3.4.31 and 3.5.13 does so when a leader that hung continues.
    pub(crate) fn ends_early(&mut self, which: usize) {
        let leases = &self.leases.until;
        let lives = leases.keys().nth(which % leases.len().max(1)).copied();
        lives.into_iter().for_each(|incarnation| self.revoke(incarnation));
    }

    /// A supervisor that leaves gives its lease back.
    pub(crate) fn revoke(&mut self, incarnation: Incarnation) {
        self.leases.remove(incarnation);
        self.remove(incarnation);
    }

    fn remove(&mut self, incarnation: Incarnation) {
        let view = Arc::make_mut(&mut self.view);
        view.revision += 1;
        view.members.retain(|_, report| report.incarnation != incarnation);
        view.leader = view.leader.filter(|leader| *leader != incarnation);
    }

    pub(crate) fn write(&mut self, rank: Rank, who: Incarnation, write: Write) -> Answer {
        if self.full || !self.leases.until.contains_key(&who) {
            return Answer::Conflict;
        }
        let unguarded = self.plant == Some(Plant::UnguardedPlan);
        let view = &self.view;
        let leads = view.leader == Some(who);
        let of_plan = view.plan.as_ref().map(|plan| plan.revision);
        let of_image = |number: &Number| view.images.get(number).map(|image| image.revision);
        let is_allowed = match &write {
            Write::Join(_) => !view.members.contains_key(&rank),
            Write::Report(_) => view.members.get(&rank).is_some_and(|old| old.incarnation == who),
            Write::Lead(_) => view.leader.is_none(),
            Write::Plan { was, .. } => (leads && of_plan == *was) || unguarded,
            Write::Record { number, was, .. } => leads && of_image(number) == *was,
            Write::Remove { number, was, plan } => {
                leads && of_plan == Some(plan.revision) && of_image(number) == Some(*was)
            }
        };
        if !is_allowed {
            return Answer::Conflict;
        }
        let view = Arc::make_mut(&mut self.view);
        view.revision += 1;
        let revision = view.revision;
        match write {
            Write::Join(report) | Write::Report(report) => drop(view.members.insert(rank, Arc::new(report))),
            Write::Lead(_) => view.leader = Some(who),
            Write::Plan { plan, image, .. } => {
                view.plan = Some(Arc::new(Versioned { value: *plan, revision }));
                if let Some((number, value)) = image {
                    view.images.insert(number, Arc::new(Versioned { value, revision }));
                }
            }
            Write::Record { number, image: value, .. } => {
                view.images.insert(number, Arc::new(Versioned { value, revision }));
            }
            Write::Remove { number, plan, .. } => {
                view.images.remove(&number);
                view.plan = Some(Arc::new(Versioned { value: plan.value, revision }));
            }
        }
        Answer::Done(revision)
    }
}

//! A model of etcd: keys with revisions, leases, transactions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::plants::Plant;
use crate::documents::{Incarnation, Rank, Versioned, View};
use crate::machine::{Answer, Write};

/// How long a lease lives without a renewal.
pub(crate) const TTL: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct Coordinator {
    pub(crate) view: Arc<View>,
    /// When each lease expires.
    leases: BTreeMap<Incarnation, Instant>,
    next: u64,
    /// It does not answer.
    pub(crate) away: bool,
    /// It may end a lease that is being renewed.
    pub(crate) leases_end_early: bool,
    plant: Option<Plant>,
}

impl Coordinator {
    pub(crate) fn new(leases_end_early: bool, plant: Option<Plant>) -> Coordinator {
        Coordinator { view: Arc::default(), leases: BTreeMap::new(), next: 1, away: false, leases_end_early, plant }
    }

    pub(crate) fn grant(&mut self, now: Instant) -> Incarnation {
        let incarnation = Incarnation(self.next);
        self.next += 1;
        self.leases.insert(incarnation, now + TTL);
        incarnation
    }

    /// Returns whether the lease still exists.
    pub(crate) fn renew(&mut self, incarnation: Incarnation, now: Instant) -> bool {
        self.leases.get_mut(&incarnation).map(|until| *until = now + TTL).is_some()
    }

    /// When the coordinator answers again, the leases get their whole time, as in etcd after the election of a leader.
    pub(crate) fn is_back(&mut self, now: Instant) {
        self.away = false;
        self.leases.values_mut().for_each(|until| *until = now + TTL);
    }

    /// Loses all data.
    pub(crate) fn forget(&mut self) {
        let revision = self.view.revision + 1;
        self.view = Arc::new(View { revision, ..View::default() });
        self.leases.clear();
    }

    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.leases.values().min().copied().filter(|_| !self.away)
    }

    /// Removes the keys of expired leases. Returns whether something changed.
    pub(crate) fn expire(&mut self, now: Instant) -> bool {
        if self.away {
            return false;
        }
        let over: Vec<Incarnation> =
            self.leases.iter().filter(|(_, until)| **until <= now).map(|(it, _)| *it).collect();
        for incarnation in &over {
            self.leases.remove(incarnation);
            self.remove(*incarnation);
        }
        !over.is_empty()
    }

    /// Ends a lease too early. etcd before 3.4.31 and 3.5.13 does so when a leader that hung continues.
    pub(crate) fn ends_early(&mut self, which: usize) {
        let lives = self.leases.keys().nth(which % self.leases.len().max(1)).copied();
        lives.into_iter().for_each(|incarnation| self.revoke(incarnation));
    }

    /// A supervisor that leaves gives its lease back.
    pub(crate) fn revoke(&mut self, incarnation: Incarnation) {
        self.leases.remove(&incarnation);
        self.remove(incarnation);
    }

    fn remove(&mut self, incarnation: Incarnation) {
        let view = Arc::make_mut(&mut self.view);
        view.revision += 1;
        view.members.retain(|_, report| report.incarnation != incarnation);
        view.leader = view.leader.filter(|leader| *leader != incarnation);
    }

    pub(crate) fn write(&mut self, rank: Rank, who: Incarnation, write: Write) -> Answer {
        if !self.leases.contains_key(&who) {
            return Answer::Conflict;
        }
        let unguarded = self.plant == Some(Plant::UnguardedPlan);
        let view = Arc::make_mut(&mut self.view);
        let revision = view.revision + 1;
        let leads = view.leader == Some(who);
        let done = match write {
            Write::Join(report) => {
                let free = !view.members.contains_key(&rank);
                if free {
                    view.members.insert(rank, report);
                }
                free
            }
            Write::Report(report) => match view.members.get_mut(&rank) {
                Some(old) if old.incarnation == who => {
                    *old = report;
                    true
                }
                _ => false,
            },
            Write::Lead => {
                let free = view.leader.is_none();
                view.leader = view.leader.or(Some(who));
                free
            }
            Write::Plan { plan, was, image } => {
                let same = view.plan.as_ref().map(|plan| plan.revision) == was;
                if (leads && same) || unguarded {
                    view.plan = Some(Versioned { value: *plan, revision });
                    if let Some((number, value)) = image {
                        view.images.insert(number, Versioned { value, revision });
                    }
                    true
                } else {
                    false
                }
            }
            Write::Record { number, image, was } => {
                let same = view.images.get(&number).map(|image| image.revision) == was;
                if leads && same {
                    view.images.insert(number, Versioned { value: image, revision });
                }
                leads && same
            }
            Write::Remove { number, was, plan } => {
                let same_plan = view.plan.as_ref().is_some_and(|present| present.revision == plan.revision);
                let same = same_plan && view.images.get(&number).is_some_and(|image| image.revision == was);
                if leads && same {
                    view.images.remove(&number);
                    view.plan = Some(Versioned { value: plan.value, revision });
                }
                leads && same
            }
        };
        if !done {
            return Answer::Conflict;
        }
        view.revision = revision;
        Answer::Done(revision)
    }
}

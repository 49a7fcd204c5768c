//! Faults and requests as they happen, and how faults end.

use std::collections::BTreeMap;
use std::time::Duration;

use super::super::faults::Fault;
use super::super::node::{Cable, Kept, Node};
use super::super::queue::{Happening, Step};
use super::{SETTLED, World};
use crate::documents::{Ask, Ending};
use crate::events::{Event, Local};
use crate::ids::{Epoch, Number};

/// A job that was stuck takes up to a second to end, afterwards.
const LETS_GO: Duration = Duration::from_secs(2);

impl World {
    pub(super) fn some(&mut self) -> usize {
        usize::try_from(self.random.below(self.nodes.len() as u64)).unwrap_or_default()
    }

    pub(super) fn supervisor_dies(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        (node.machine, node.job, node.session) = (None, None, None);
        node.finished = None;
        self.after(1500, 15_000, Happening::Boot(at));
    }

    pub(super) fn fault(&mut self, fault: Fault) {
        let at = self.some();
        let long = self.random.millis(500, 25_000);
        let (until, requeue) = (self.now + long, long.as_millis().is_multiple_of(2));
        if fault.delays() {
            self.oracle.disturbed(until);
        }
        let is_there = self.nodes[at].machine.is_some();
        let process = self.nodes[at].process;
        let ask = |world: &mut World, ask: Ask| world.at(world.now, Happening::Hears(at, process, Event::Asked(ask)));
        match fault {
            Fault::JobDies if !self.nodes[at].is_paused(self.now) => self.job_dies(at, "killed by signal 9"),
            Fault::Completed => {
                let runs = |node: &Node| node.job.as_ref().is_some_and(|job| job.cable == Cable::In && !job.killed);
                let members: Vec<usize> =
                    (0..self.nodes.len()).filter(|at| !self.nodes[*at].trouble.replaced).collect();
                if members.iter().all(|at| runs(&self.nodes[*at]) && !self.nodes[*at].is_paused(self.now)) {
                    self.oracle.completes(&self.nodes);
                    for at in members {
                        self.nodes[at].job = None;
                        self.hears(at, Event::Local(Local::Ended(Ending::Completed)));
                    }
                }
            }
            Fault::SupervisorDies if is_there => self.supervisor_dies(at),
            Fault::MachineDies if is_there => {
                self.nodes[at].images.memory.clear();
                self.oracle.loses_memory();
                self.supervisor_dies(at);
            }
            Fault::MachineReplaced if is_there => {
                self.nodes[at].images.memory.clear();
                self.oracle.loses_memory();
                self.nodes[at].images.disk.clear();
                self.nodes[at].kept.epoch = Epoch::default();
                if self.outside.shared.is_none() {
                    (self.nodes[at].kept.floor, self.nodes[at].kept.rewound) = (Number::default(), None);
                    self.oracle.loses_disk();
                }
                self.supervisor_dies(at);
            }
            Fault::AllReplaced => {
                for at in 0..self.nodes.len() {
                    self.nodes[at].images.memory.clear();
                    self.nodes[at].images.disk.clear();
                    self.outside.shared.iter_mut().for_each(BTreeMap::clear);
                    self.nodes[at].kept = Kept::default();
                    if self.nodes[at].machine.is_some() {
                        self.supervisor_dies(at);
                    }
                }
                self.oracle.loses_memory();
                self.oracle.loses_disk();
            }
            Fault::Pause => {
                self.nodes[at].trouble.paused_until = Some(until);
                self.at(until, Happening::Over(fault, at));
            }
            Fault::CutOff => {
                self.nodes[at].trouble.cut_off = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::CutOffAndReplaced
                if is_there && !self.nodes[at].trouble.cut_off && !self.nodes[at].trouble.replaced =>
            {
                self.nodes[at].trouble.cut_off = true;
                self.nodes[at].trouble.replaced = true;
                self.at(until, Happening::Over(fault, at));
                let rate = 0.98 + 0.0004 * f64::from(u32::try_from(self.random.below(101)).unwrap_or(0));
                self.nodes.push(Node::new(self.nodes[at].rank, rate, self.began));
                self.oracle.loses_memory();
                if self.outside.shared.is_none() {
                    self.oracle.loses_disk();
                }
                self.after(1000, 10_000, Happening::Boot(self.nodes.len() - 1));
            }
            Fault::Away => {
                self.coordinator.away = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::Full => {
                self.coordinator.full = true;
                let until = self.now + long * 5;
                self.oracle.disturbed(until);
                self.at(until, Happening::Over(fault, at));
            }
            Fault::LeaseEndsEarly => {
                self.coordinator.ends_early(at);
                self.changed();
            }
            Fault::CoordinatorForgets => {
                self.coordinator.forget();
                self.oracle.loses_records();
                self.changed();
            }
            Fault::SlowNetwork => {
                self.trouble.slow = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::DiskFull => {
                self.nodes[at].images.disk_full = true;
                self.at(until, Happening::Over(fault, at));
            }
            Fault::Refuses => {
                self.trouble.refusing.insert(at);
                self.at(until, Happening::Over(fault, at));
            }
            // Sometimes for good: the job goes on without new images.
            Fault::Fatal => {
                self.trouble.fatal.insert(at);
                if requeue {
                    self.at(until, Happening::Over(fault, at));
                }
            }
            Fault::Hindered => {
                self.nodes[at].trouble.hindered = true;
                self.at(until, Happening::Over(fault, at));
            }
            // Also for longer than the others wait.
            Fault::Stuck | Fault::Mute => {
                let until = self.now + long * 8;
                self.oracle.disturbed(until);
                match fault {
                    Fault::Stuck => {
                        let longer = self.nodes[at].trouble.stuck_until.map_or(until, |before| before.max(until));
                        self.nodes[at].trouble.stuck_until = Some(longer);
                    }
                    _ => self.nodes[at].trouble.mute = true,
                }
                self.at(until + LETS_GO, Happening::Over(fault, at));
            }
            Fault::RecordsRemoved => {
                let all: Vec<Number> = self.coordinator.view.images.keys().copied().collect();
                let gone = if requeue { all.as_slice() } else { &all[all.len().saturating_sub(1)..] };
                self.oracle.removes_records(gone);
                self.coordinator.remove_records(gone);
                self.changed();
            }
            Fault::Rotten => {
                let newest = self.coordinator.view.images.keys().next_back().copied();
                let rank = self.nodes[at].rank;
                self.trouble.rotten.extend(newest.map(|number| (rank, number)));
            }
            Fault::Doomed => {
                self.trouble.dooms = true;
                self.job_dies_soon(at);
            }
            Fault::Snapshot => ask(self, Ask::Snapshot),
            Fault::Stop => ask(self, Ask::Stop { requeue, within: long }),
            Fault::StopNow => ask(self, Ask::StopNow { requeue }),
            Fault::Suspend => ask(self, Ask::Suspend),
            Fault::Resume => ask(self, Ask::Resume),
            Fault::FreshRun => {
                self.users.fresh = self.nodes.iter().map(|node| node.rank).collect();
                ask(self, Ask::StopNow { requeue: true });
            }
            Fault::Rewind => {
                if let Some(number) = self.coordinator.view.images.keys().next().copied() {
                    self.oracle.rewinds();
                    ask(self, if requeue { Ask::Rewind(number) } else { Ask::LeaveHang(number) });
                }
            }
            _ => {}
        }
    }

    pub(super) fn job_dies_soon(&mut self, at: usize) {
        if self.nodes[at].job.is_some() {
            self.job_step(at, 4000, 20_000, Step::Dies);
        }
    }

    pub(super) fn over(&mut self, fault: Fault, at: usize) {
        self.oracle.disturbed(self.now);
        match fault {
            Fault::Pause => {
                self.nodes[at].trouble.paused_until = None;
                // After a pause a supervisor first looks at the time. Its job was paused too, and is killed before it
                // does anything.
                self.step(at, Event::Tick);
                if self.nodes[at].job.as_ref().is_some_and(|job| job.killed) {
                    self.nodes[at].job = None;
                    self.hears(at, Event::Local(Local::Ended(Ending::failed("killed", None))));
                }
            }
            Fault::CutOff | Fault::CutOffAndReplaced => {
                self.nodes[at].trouble.cut_off = false;
                self.show(at);
            }
            Fault::Away => {
                self.coordinator.is_back(self.now);
                self.watch_leases();
            }
            Fault::Full => self.coordinator.full = false,
            Fault::SlowNetwork => self.trouble.slow = false,
            Fault::DiskFull => self.nodes[at].images.disk_full = false,
            Fault::Refuses => drop(self.trouble.refusing.remove(&at)),
            Fault::Fatal => drop(self.trouble.fatal.remove(&at)),
            Fault::Hindered => self.nodes[at].trouble.hindered = false,
            Fault::Mute => self.nodes[at].trouble.mute = false,
            Fault::Stuck => {
                // Another such fault may end within the same two seconds.
                self.nodes[at].trouble.stuck_until =
                    self.nodes[at].trouble.stuck_until.filter(|it| *it + LETS_GO > self.now);
            }
            _ => {}
        }
    }

    /// No more faults: a suspended job is resumed, through a supervisor that is there.
    pub(super) fn everything_is_well_again(&mut self) {
        let there: Vec<_> = (0..self.nodes.len()).filter(|at| self.nodes[*at].machine.is_some()).collect();
        let one = self.some();
        if let Some(&at) = there.get(one % there.len().max(1)) {
            let process = self.nodes[at].process;
            self.at(self.now, Happening::Hears(at, process, Event::Asked(Ask::Resume)));
        }
        if self.now < self.faults_until + SETTLED {
            self.at(self.now + Duration::from_secs(20), Happening::Resume);
        }
    }
}

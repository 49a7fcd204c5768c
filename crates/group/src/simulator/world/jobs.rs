//! What a machine does when its supervisor orders it, and when a step of its job is over.

use super::super::node::{Cable, Job, Piece, is_started_again};
use super::super::oracle::newest_whole;
use super::super::plants::Plant;
use super::super::queue::{Happening, Request, Step};
use super::World;
use crate::documents::{Blame, End, Ending, Fault, Part, StartFrom};
use crate::events::{Event, Local, Order};
use crate::ids::Number;
use crate::images;
use crate::reasons::StartFailure;

impl World {
    pub(super) fn obey(&mut self, at: usize, order: Order) {
        let now = self.now;
        match order {
            Order::List => {
                // The store is shared: it has what the previous machine stored.
                if let Some(shared) = &self.outside.shared {
                    let rank = self.nodes[at].rank;
                    let ours = shared.iter().filter(|((of, _), _)| *of == rank);
                    self.nodes[at].images.disk = ours.map(|((_, number), piece)| (*number, piece.clone())).collect();
                }
                let (process, parts) = (self.nodes[at].process, self.nodes[at].parts(self.outside.replica.as_ref()));
                self.after(1, 100, Happening::Hears(at, process, Event::Local(Local::Parts(parts))));
            }
            Order::Start { epoch, origin, from, part } => {
                self.jobs += 1;
                let id = self.jobs;
                let newest = self.nodes[at]
                    .images
                    .disk
                    .iter()
                    .chain(&self.nodes[at].images.memory)
                    .max_by_key(|(number, _)| **number);
                let from = match (from, part) {
                    (StartFrom::Image(_), _) if self.plant == Some(Plant::MixedParts) => {
                        newest.map(|(number, piece)| (*number, piece.part.clone()))
                    }
                    (StartFrom::Image(number), Some(part)) => Some((number, part)),
                    _ => None,
                };
                let cable = Cable::Out(now);
                let job = Job { id, epoch, origin, from, cable, snapshot: None, killed: false };
                self.nodes[at].job = Some(job);
                self.nodes[at].kept.epoch = epoch;
                // Longer than a start may take.
                let is_slow = self.nodes[at].trouble.hindered && self.random.chance(30);
                let (least, most) = if is_slow { (21_000, 26_000) } else { (100, 3000) };
                self.job_step(at, least, most, Step::Start);
            }
            Order::Plug => {
                self.oracle.begins(at, self.nodes[at].process);
                self.plug(at, None);
            }
            Order::Prepare(number) => {
                self.nodes[at].job.iter_mut().for_each(|job| job.snapshot = Some(number));
                self.job_step(at, 5, 2000, Step::Lock(number));
            }
            Order::Pull(number) => {
                self.job_step(at, 1, 50, Step::Pull(number));
                if self.plant == Some(Plant::CableOutTooLate) {
                    self.job_step(at, 200, 1500, Step::CableOut);
                }
            }
            Order::Dump(number) => self.job_step(at, 100, 2500, Step::Dump(number)),
            Order::Resume(number) => {
                self.plug(at, Some(number));
                self.store(at, number);
            }
            Order::Store(number) => self.store(at, number),
            Order::Abort(number) => {
                if self.plant != Some(Plant::LostAbort) {
                    self.nodes[at].job.iter_mut().for_each(|job| job.snapshot = None);
                    self.job_step(at, 0, 500, Step::Abort(number));
                }
            }
            Order::Kill => {
                self.nodes[at].job.iter_mut().for_each(|job| job.killed = true);
                let stuck = self.nodes[at].trouble.stuck_until.map_or(0, |until| {
                    u64::try_from(until.saturating_duration_since(now).as_millis()).unwrap_or(u64::MAX)
                });
                self.job_step(at, stuck, stuck + 1000, Step::Killed);
            }
            Order::Forget(number) => {
                self.oracle.forgets(self.nodes[at].rank, number);
                self.remove(at, number);
            }
            Order::Finish(end) => self.finish(at, end),
            Order::Fetch(number) => {
                let process = self.nodes[at].process;
                self.after(200, 6000, Happening::Fetched(at, process, number));
            }
            Order::Replicate(number) => {
                let process = self.nodes[at].process;
                self.after(200, 25_000, Happening::Sent(at, process, number));
            }
        }
    }

    pub(super) fn fetched(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        let piece = self.outside.replica.as_ref().and_then(|replica| replica.get(&(rank, number))).cloned();
        let local = match piece {
            Some(piece) => {
                if let Some(shared) = &mut self.outside.shared {
                    shared.insert((rank, number), piece.clone());
                }
                self.nodes[at].images.disk.insert(number, piece);
                Local::Fetched(number)
            }
            None => Local::Gone(number),
        };
        self.hears(at, Event::Local(local));
    }

    pub(super) fn sent(&mut self, at: usize, number: Number) {
        let local = match self.send_part(at, number) {
            true => Local::Replicated(number),
            false => Local::NotReplicated(number),
        };
        self.hears(at, Event::Local(local));
    }

    /// Puts a part into the replica. What the replica has then of older ones is limited, as in the product: the newest
    /// whole one stays, and all that are newer.
    pub(super) fn send_part(&mut self, at: usize, number: Number) -> bool {
        let (node, rank) = (&self.nodes[at], self.nodes[at].rank);
        let mine = node.images.disk.get(&number);
        let mine = if self.plant == Some(Plant::SendsItsNewest) { node.images.disk.values().next_back() } else { mine };
        let Some(piece) = mine.cloned() else { return false };
        let size = self.nodes.ranks();
        let whole = node.machine.as_ref().and_then(|machine| images::whole_in_replica(machine.view()));
        let Some(replica) = &mut self.outside.replica else { return false };
        replica.insert((rank, number), piece);
        let newest = newest_whole(replica, size);
        let oldest = if self.plant == Some(Plant::ReplicaForgetsWhole) { Some(number) } else { whole };
        replica.retain(|(of, other), _| *of != rank || oldest.is_none_or(|oldest| *other >= oldest));
        if newest > newest_whole(replica, size) {
            self.oracle.breaks(format!("{rank} removed its part of {newest:?}, the newest whole one in the replica"));
        }
        true
    }

    pub(super) fn remove(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        self.nodes[at].images.memory.remove(&number);
        self.nodes[at].images.disk.remove(&number);
        self.outside.shared.iter_mut().for_each(|shared| drop(shared.remove(&(rank, number))));
    }

    pub(super) fn finish(&mut self, at: usize, end: End) {
        self.oracle.finishes(&end);
        if let Some(session) = self.nodes[at].session.take() {
            self.send(at, Request::Revoke(session));
        }
        // The last image is sent after the end, in whatever order.
        let last = self.nodes[at].machine.as_ref().and_then(|machine| images::newest_committed(machine.view()));
        if let Some(last) =
            last.filter(|_| end != End::Completed && self.outside.replica.is_some() && self.random.chance(70))
        {
            self.send_part(at, last);
        }
        self.nodes[at].machine = None;
        if matches!(end, End::Refused { .. }) {
            let rank = self.nodes[at].rank;
            self.users.fresh.remove(&rank);
        }
        if is_started_again(&end) {
            self.after(3000, 20_000, Happening::Boot(at));
        }
        self.nodes[at].finished = Some(end);
    }

    pub(super) fn job_step(&mut self, at: usize, from: u64, to: u64, step: Step) {
        let (process, job) = (self.nodes[at].process, self.nodes[at].job.as_ref().map_or(0, |job| job.id));
        self.after(from, to, Happening::Done(at, process, job, step));
    }

    pub(super) fn plug(&mut self, at: usize, number: Option<Number>) {
        let rank = self.nodes[at].rank;
        if let Some(job) = &mut self.nodes[at].job {
            job.cable = Cable::In;
            self.oracle.plugs(rank, self.now);
        }
        if let Some(number) = number
            && self.plant == Some(Plant::EagerRemoval)
        {
            let older: Vec<Number> = self.nodes[at].images.disk.keys().copied().filter(|it| *it < number).collect();
            for number in older {
                self.oracle.forgets(rank, number);
                self.remove(at, number);
            }
        }
    }

    pub(super) fn store(&mut self, at: usize, number: Number) {
        if let Some(piece) = self.nodes[at].images.memory.get_mut(&number) {
            piece.recorded = true;
        }
        let process = self.nodes[at].process;
        if self.plant == Some(Plant::CommitBeforeStored) {
            self.after(1, 10, Happening::Hears(at, process, Event::Local(Local::Stored(number))));
        } else {
            self.after(500, 8000, Happening::Stored(at, process, number));
        }
    }

    pub(super) fn stored(&mut self, at: usize, number: Number) {
        let rank = self.nodes[at].rank;
        let piece = self.nodes[at].images.memory.get(&number).cloned();
        let local = match piece {
            Some(piece) if !self.nodes[at].images.disk_full => {
                self.oracle.stored(rank, number, &piece.part);
                if let Some(shared) = &mut self.outside.shared {
                    shared.insert((rank, number), piece.clone());
                }
                self.nodes[at].images.disk.insert(number, piece);
                self.nodes[at].images.memory.remove(&number);
                Local::Stored(number)
            }
            _ => Local::NotStored(number),
        };
        self.hears(at, Event::Local(local));
    }

    pub(super) fn done(&mut self, at: usize, id: u64, step: Step) {
        let rank = self.nodes[at].rank;
        if step == Step::Killed {
            // It may have ended by itself.
            if self.nodes[at].job.as_ref().is_none_or(|job| job.id == id) {
                self.nodes[at].job = None;
                self.hears(at, Event::Local(Local::Ended(Ending::failed("killed", None))));
            }
            return;
        }
        let Some(job) = self.nodes[at].job.as_mut().filter(|job| job.id == id && !job.killed) else { return };
        let (epoch, origin) = (job.epoch, job.origin);
        match step {
            Step::Start => self.started(at),
            Step::Lock(number) if job.snapshot == Some(number) => {
                let local = if self.trouble.refusing.contains(&at) && self.random.chance(60) {
                    Local::refused(number, "it does not come to rest")
                } else {
                    self.oracle.locks(number, &self.nodes[at]);
                    if self.plant == Some(Plant::CableOutBeforeLocked) {
                        self.unplug(at);
                    }
                    Local::Locked(number)
                };
                self.hears(at, Event::Local(local));
            }
            Step::Pull(number) if job.snapshot == Some(number) => {
                let local = if self.trouble.refusing.contains(&at) && self.random.chance(30) {
                    self.plug(at, None);
                    Local::refused(number, "its cable is stuck")
                } else {
                    if self.plant != Some(Plant::CableOutTooLate) {
                        self.unplug(at);
                    }
                    Local::Quiet(number)
                };
                self.hears(at, Event::Local(local));
            }
            Step::CableOut if job.snapshot.is_some() => self.unplug(at),
            Step::Dump(number) if job.snapshot == Some(number) => {
                if self.trouble.fatal.contains(&at) {
                    // It is told that the snapshot failed, and the end of the job only once nothing of it is left. Or it
                    // ends by itself.
                    let fault = if self.random.chance(50) { Fault::Snapshot } else { Fault::Job };
                    if fault == Fault::Snapshot {
                        self.hears(at, Event::Local(Local::refused(number, "it cannot continue")));
                    }
                    return self.job_fails(at, "it did not survive the snapshot", fault);
                }
                let full = self.nodes[at].images.memory.values().filter(|piece| piece.recorded).count() > 1;
                if full || (self.trouble.refusing.contains(&at) && self.random.chance(50)) {
                    self.plug(at, None);
                    self.hears(at, Event::Local(Local::refused(number, "no memory")));
                    return;
                }
                let digest = format!("{} {} {id}", number.0, epoch.0);
                let part = Part { image: format!("{rank}-{}", number.0), digest };
                let piece = Piece { part: part.clone(), epoch, origin, recorded: false };
                self.nodes[at].images.memory.insert(number, piece);
                self.oracle.dumps(number, &part, &self.nodes[at], self.now);
                if self.trouble.dooms {
                    self.trouble.doomed.insert(number);
                }
                if self.plant == Some(Plant::CableInTooEarly) {
                    self.plug(at, None);
                }
                self.hears(at, Event::Local(Local::Dumped(number, part)));
            }
            Step::Abort(number) => {
                self.nodes[at].images.memory.remove(&number);
                self.plug(at, None);
                self.hears(at, Event::Local(Local::Aborted(number)));
            }
            Step::Dies => self.job_dies(at, "it dies of its state"),
            _ => {}
        }
    }

    pub(super) fn unplug(&mut self, at: usize) {
        if let Some(job) = &mut self.nodes[at].job {
            job.cable = Cable::Out(self.now);
        }
        self.oracle.unplugs(self.nodes.ranks(), &self.nodes[at]);
    }

    pub(super) fn started(&mut self, at: usize) {
        let rank = self.nodes[at].rank;
        let from = self.nodes[at].job.as_ref().and_then(|job| job.from.clone());
        let broken = match &from {
            Some((number, part)) if self.nodes[at].piece(*number).is_none_or(|piece| piece.part != *part) => {
                Some("its part is not there")
            }
            Some((number, _)) if self.trouble.rotten.contains(&(rank, *number)) => Some("its part cannot be restored"),
            _ => None,
        };
        let broken = match broken {
            Some(why) => Some((why, Blame::Image)),
            None if self.nodes[at].trouble.hindered => Some(("its GPU is full", Blame::Machine)),
            None => None,
        };
        if let Some((why, blame)) = broken {
            let why = StartFailure::Other(why.into());
            self.nodes[at].job = None;
            self.oracle.job_fails(from.map(|(number, _)| number).filter(|_| blame == Blame::Image));
            self.hears(at, Event::Local(Local::Ended(Ending::not_started(why, blame))));
            return;
        }
        match from {
            Some((number, _)) if self.trouble.doomed.contains(&number) => self.job_step(at, 4000, 8000, Step::Dies),
            _ => self.trouble.dooms = false,
        }
        self.hears(at, Event::Local(Local::Started));
    }

    pub(super) fn job_dies(&mut self, at: usize, why: &str) {
        self.job_fails(at, why, Fault::Job);
    }

    fn job_fails(&mut self, at: usize, why: &str, fault: Fault) {
        if let Some(job) = self.nodes[at].job.take_if(|job| !job.killed) {
            self.oracle.begins(at, self.nodes[at].process);
            self.oracle.job_fails(job.from.map(|(number, _)| number));
            self.hears(at, Event::Local(Local::Ended(Ending::Failed { why: why.into(), last: None, fault })));
        }
    }
}

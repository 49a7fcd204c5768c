//! Faults of a job and its supervisor, and requests of users. All of them can come at any time.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::model::{DeadChild, Doom, End, GIB, IMAGE, candidate};
use super::plants::Plant;
use super::restores::Trouble;
use super::world::{Calm, Happening, World, tell};
use crate::supervisor::state::{Event, State, Stop, Verdict, Wish};
use crate::supervisor::stops::Request;
use rekindle_base::cause::Missing;
use rekindle_os::spawn::Ended;
use rekindle_store::manifest::Reason;

/// Something that happens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    // The job.
    RootKilled,
    RootCrashes,
    RootExits,
    WantOfMemory,
    GpuFails,
    ChildKilled,
    RankKilled,
    RankAskedToEnd,
    /// The state of the job becomes bad, and the job dies of that later, again after each restore.
    GoesWrong,
    Hangs,
    RemovesFiles,
    // CRIU and the driver.
    Troubled(Trouble),
    DriverSilent,
    PortTaken,
    // The disk, memory, the replica.
    DiskFull,
    ReadsFail,
    WritesFail,
    MemoryShort,
    MemoryLost,
    CopyDamaged,
    ReplicaAway,
    // The supervisor, the machine, its clock.
    SupervisorKilled,
    PowerCut,
    MachineLost,
    /// A cloud announces the end of the machine, and ends it then.
    MachineTaken,
    ClockBack,
    // Requests.
    StopSignal,
    StopSignals,
    RequeueSignal,
    StopCommand,
    StopCommandNow,
    SnapshotSignal,
    SnapshotRequest,
    Suspend,
    Resume,
    Rewind,
    RestoreNamed,
    Hold,
    Release,
}

/// All faults. Those that are listed several times are more frequent.
pub(super) const ALL: [Fault; 55] = [
    Fault::RootKilled,
    Fault::RootKilled,
    Fault::RootCrashes,
    Fault::RootCrashes,
    Fault::RootExits,
    Fault::WantOfMemory,
    Fault::GpuFails,
    Fault::ChildKilled,
    Fault::ChildKilled,
    Fault::RankKilled,
    Fault::RankKilled,
    Fault::RankKilled,
    Fault::RankAskedToEnd,
    Fault::GoesWrong,
    Fault::GoesWrong,
    Fault::Hangs,
    Fault::RemovesFiles,
    Fault::Troubled(Trouble::CriuKilled),
    Fault::Troubled(Trouble::TaskKilled),
    Fault::Troubled(Trouble::NoReason),
    Fault::Troubled(Trouble::Slow),
    Fault::Troubled(Trouble::OurStep),
    Fault::Troubled(Trouble::Lost),
    Fault::Troubled(Trouble::Moment),
    Fault::DriverSilent,
    Fault::PortTaken,
    Fault::DiskFull,
    Fault::DiskFull,
    Fault::ReadsFail,
    Fault::WritesFail,
    Fault::WritesFail,
    Fault::MemoryShort,
    Fault::MemoryLost,
    Fault::CopyDamaged,
    Fault::ReplicaAway,
    Fault::SupervisorKilled,
    Fault::SupervisorKilled,
    Fault::PowerCut,
    Fault::PowerCut,
    Fault::MachineLost,
    Fault::MachineTaken,
    Fault::ClockBack,
    Fault::StopSignal,
    Fault::StopSignals,
    Fault::RequeueSignal,
    Fault::StopCommand,
    Fault::StopCommandNow,
    Fault::SnapshotSignal,
    Fault::SnapshotRequest,
    Fault::Suspend,
    Fault::Resume,
    Fault::Rewind,
    Fault::RestoreNamed,
    Fault::Hold,
    Fault::Release,
];

impl World {
    /// Applies a fault, if it is possible now.
    pub(super) fn fault(&mut self, fault: Fault) {
        tell!(self, "{fault:?}");
        match fault {
            Fault::RootKilled => self.end_job(End::signal(libc::SIGKILL)),
            Fault::RootCrashes => self.end_job(End::signal(libc::SIGSEGV)),
            Fault::RootExits => self.end_job(End::by_itself(Ended::Exit(1))),
            Fault::WantOfMemory => self.end_job(End { want_of_memory: true, ..End::signal(libc::SIGKILL) }),
            Fault::GpuFails => self.end_job(End { xid: Some(79), ..End::by_itself(Ended::Exit(1)) }),
            Fault::ChildKilled => self.kill_child(),
            Fault::RankKilled => self.kill_rank(libc::SIGKILL),
            Fault::RankAskedToEnd => self.kill_rank(libc::SIGTERM),
            Fault::GoesWrong => self.go_wrong(),
            Fault::Hangs => self.hang(),
            Fault::RemovesFiles => self.remove_files(),
            Fault::Troubled(trouble) => self.trouble(trouble),
            Fault::DriverSilent => self.while_it_lasts(fault, |world| world.ground.driver_silent = true),
            Fault::PortTaken => self.while_it_lasts(fault, |world| world.ground.port_taken = true),
            Fault::DiskFull => self.while_it_lasts(fault, |world| {
                world.ground.disk.foreign = 0;
                world.ground.disk.foreign = world.ground.free().saturating_sub(IMAGE / 2);
            }),
            Fault::ReadsFail => self.while_it_lasts(fault, |world| world.ground.disk.reads_fail = true),
            Fault::WritesFail => self.while_it_lasts(fault, |world| world.ground.disk.writes_fail = true),
            Fault::MemoryShort => {
                self.while_it_lasts(fault, |world| world.ground.memory_short = true);
                self.after(Duration::from_secs(2), Happening::Look);
            }
            Fault::ReplicaAway => self.while_it_lasts(fault, |world| world.ground.replica_away = true),
            Fault::MemoryLost => {
                self.oracle.excuse();
                self.oracle.disturb();
                self.ground.lose_memory();
            }
            Fault::CopyDamaged => self.damage(),
            Fault::SupervisorKilled => self.supervisor_killed(),
            Fault::PowerCut => self.cut_power(),
            Fault::MachineLost => self.lose_machine(),
            Fault::MachineTaken => self.take_machine(),
            Fault::ClockBack => self.skew -= i64::try_from(self.random.below(7200)).unwrap_or(0),
            Fault::StopSignal => self.stop_signal(libc::SIGTERM),
            Fault::StopSignals => {
                self.stop_signal(libc::SIGTERM);
                let wait = if self.random.chance(70) { 20 } else { 1500 + self.random.below(1500) };
                self.after(Duration::from_millis(wait), Happening::Fault(Fault::StopSignal));
            }
            Fault::RequeueSignal => self.stop_signal(libc::SIGUSR2),
            Fault::StopCommand => self.stop_command(false),
            Fault::StopCommandNow => self.stop_command(true),
            Fault::SnapshotSignal => self.step_where_it_runs(Event::SnapshotNow(Reason::Signal)),
            Fault::SnapshotRequest => self.wish(Wish::Snapshot, Event::SnapshotNow(Reason::Request)),
            Fault::Suspend => self.wish(Wish::Suspend, Event::Suspend),
            Fault::Resume => self.wish(Wish::Resume, Event::Resume),
            Fault::Rewind => self.rewind(),
            Fault::RestoreNamed => self.restore_named(),
            Fault::Hold => {
                let until = self.now + self.random.millis(500, 20_000);
                self.wish(Wish::Hold, Event::Hold(until));
            }
            Fault::Release => self.step_where_it_runs(Event::Release),
        }
    }

    // ---- the job ----

    fn lives(&self) -> Option<u32> {
        self.job.as_ref().filter(|job| job.ended.is_none()).map(|job| job.life)
    }

    fn end_job(&mut self, end: End) {
        if let Some(life) = self.lives() {
            self.life_ends(life, end, false);
        }
    }

    fn kill_child(&mut self) {
        let Some(life) = self.lives() else { return };
        let pid = i32::try_from(self.number()).unwrap_or_default();
        let waits = self.random.chance(75);
        let at = self.now + self.random.millis(20, 4000);
        let fatal = self.random.chance(60).then_some(Ended::Exit(1));
        self.job.iter_mut().for_each(|job| job.dead.push(DeadChild { pid, noticed: waits.then_some((at, fatal)) }));
        if waits {
            self.at(at, Happening::Noticed { life, pid });
        }
    }

    pub(super) fn death_noticed(&mut self, life: u32, pid: i32) {
        let Some(job) = self.job.as_mut().filter(|job| job.life == life && job.ended.is_none()) else { return };
        let Some(at) = job.dead.iter().position(|child| child.pid == pid) else { return };
        let child = job.dead.remove(at);
        if let Some((_, Some(ended))) = child.noticed {
            tell!(self, "a parent hears of the death of its child, and gives up");
            self.life_ends(life, End::by_itself(ended), false);
        }
    }

    fn go_wrong(&mut self) {
        let wait = self.random.millis(100, 40_000);
        let now = self.now;
        let ended = self.random.pick(&[Ended::Exit(1), Ended::Exit(3), Ended::Signal(libc::SIGSEGV)]);
        let Some(job) = self.job.as_mut().filter(|job| job.ended.is_none() && job.doom.is_none()) else { return };
        job.doom = Some(Doom { at: job.work(now) + wait, ended });
        let life = job.life;
        self.after(wait, Happening::Ends { life, end: End::by_itself(ended), own: true });
    }

    fn hang(&mut self) {
        let now = self.now;
        let Some(job) = self.job.as_mut().filter(|job| job.ended.is_none() && job.hung.is_none()) else { return };
        job.hung = Some(now);
        let life = job.life;
        if let Some(watch) = self.fate.watch {
            self.after(watch, Happening::Hangs { life });
        }
    }

    /// The watch counts only while the job runs without a snapshot, and notices the hang then.
    pub(super) fn hang_seen(&mut self, life: u32) {
        if self.job.as_ref().is_none_or(|job| job.life != life || job.ended.is_some()) {
            return;
        }
        let Some(run) = self.run.as_ref().filter(|run| run.finish.is_none()) else { return };
        if run.is_running() {
            let stuck = match self.plant {
                Some(Plant::HangIsForgotten) => BTreeSet::new(),
                _ => run.proofs.since_last(Missing::Output),
            };
            self.oracle.disturb();
            self.oracle_sees_hang();
            self.step(Event::Condemn(Verdict::Hung(stuck)));
        } else {
            self.after(Duration::from_secs(3), Happening::Hangs { life });
        }
    }

    /// As `Owner::watch_follows`: the clocks run while the job does.
    pub(super) fn watch_follows(&mut self) {
        let Some(run) = &mut self.run else { return };
        let goes = run.is_running() && run.ended.is_none() && run.finish.is_none();
        match (goes, run.work.clocks.since) {
            (true, None) => {
                run.work.clocks.since = Some(self.now);
                run.work.clocks.starts += 1;
                let start = run.work.clocks.starts;
                if let (Some(job), true) = (&self.job, self.fate.watch.is_some()) {
                    let life = job.life;
                    let wait = self.random.millis(20, 5000);
                    self.after(wait, Happening::Moves { life, start });
                }
            }
            (false, Some(since)) => {
                self.has_moved(since);
                if let Some(run) = &mut self.run {
                    run.work.clocks.since = None;
                }
            }
            _ => {}
        }
    }

    pub(super) fn watch_looks(&mut self, life: u32, start: u64) {
        let is_present = self.job.as_ref().is_some_and(|job| job.life == life);
        let since =
            self.run.as_ref().filter(|run| run.work.clocks.starts == start).and_then(|run| run.work.clocks.since);
        if let Some(since) = since.filter(|_| is_present) {
            self.has_moved(since);
        }
    }

    /// The watch looks whether the job has worked since then.
    fn has_moved(&mut self, since: Instant) {
        let hangs = self.job.as_ref().is_none_or(|job| job.hung.is_some_and(|hung| hung <= since));
        if let (Some(run), false) = (&mut self.run, hangs) {
            run.proofs.moves(run.work.clocks.starts, Missing::Output);
            self.oracle.sees_progress(since);
        }
    }

    fn remove_files(&mut self) {
        let all = self.ground.images.len() as u64;
        if all > 0 {
            let at = usize::try_from(self.random.below(all)).unwrap_or_default();
            self.ground.images[at].no_files = true;
        }
    }

    /// Affects the operation in progress, or the next one.
    fn trouble(&mut self, trouble: Trouble) {
        let dump_only = matches!(trouble, Trouble::Lost | Trouble::Moment);
        let Some(run) = &mut self.run else { return };
        if let Some(shot) = &mut run.work.shot {
            shot.trouble = Some(trouble);
        } else if let Some(start) = run.work.start.as_mut().filter(|_| !dump_only) {
            start.trouble = Some(trouble);
        } else if !dump_only || run.is_running() {
            self.oracle.armed = Some(trouble);
        }
    }

    // ---- what is around ----

    fn while_it_lasts(&mut self, fault: Fault, begin: impl FnOnce(&mut World)) {
        self.oracle.disturb();
        begin(self);
        let wait = self.random.millis(500, 90_000);
        self.after(wait, Happening::Heal(fault));
    }

    pub(super) fn heal(&mut self, fault: Fault) {
        tell!(self, "{fault:?} is over");
        match fault {
            Fault::DriverSilent => self.ground.driver_silent = false,
            Fault::PortTaken => self.ground.port_taken = false,
            Fault::DiskFull => self.ground.disk.foreign = 0,
            Fault::ReadsFail => self.ground.disk.reads_fail = false,
            Fault::WritesFail => self.ground.disk.writes_fail = false,
            Fault::MemoryShort => self.ground.memory_short = false,
            Fault::ReplicaAway => self.ground.replica_away = false,
            _ => {}
        }
        if matches!(fault, Fault::ReadsFail | Fault::WritesFail) {
            self.oracle.writable_since = Some(self.now);
        }
    }

    pub(super) fn is_in_trouble(&self) -> bool {
        let ground = &self.ground;
        ground.driver_silent || ground.port_taken || ground.memory_short || ground.disk.reads_fail
    }

    fn damage(&mut self) {
        let copies: Vec<_> = self.ground.copies().iter().map(|(image, _)| image.id).collect();
        if copies.is_empty() {
            return;
        }
        let id = self.random.pick(&copies);
        self.oracle.excuse();
        let in_memory = self.random.chance(50);
        for slot in self.ground.slots.iter_mut().filter(|_| in_memory) {
            slot.image.iter_mut().filter(|(other, _)| *other == id).for_each(|(_, copy)| copy.damaged = true);
        }
        if !in_memory && let Some(copy) = self.ground.image_mut(id).and_then(|image| image.stored.as_mut()) {
            copy.damaged = true;
        }
    }

    fn supervisor_killed(&mut self) {
        if self.run.is_some() {
            self.supervisor_dies();
            let wait = self.random.millis(300, 30_000);
            self.after(wait, Happening::Begin);
        }
    }

    fn cut_power(&mut self) {
        self.supervisor_dies();
        self.ground.lose_memory();
        for image in &mut self.ground.images {
            image.stored = image.stored.filter(|copy| !copy.unsynced);
        }
        self.oracle.excuse();
        self.check_stored();
        self.begin_later();
    }

    fn lose_machine(&mut self) {
        if !self.ground.has_replica {
            return;
        }
        self.supervisor_dies();
        self.ground.lose_memory();
        self.ground.images.iter_mut().for_each(|image| image.stored = None);
        self.ground.record = None;
        self.ground.proven.clear();
        self.oracle.short_of_room = true;
        self.oracle_sees_machine_lost();
        self.begin_later();
    }

    fn take_machine(&mut self) {
        let left = self.random.millis(10_000, 150_000);
        let until = self.now + left;
        self.oracle_sees_stop_by(until);
        self.step_where_it_runs(Event::StopBy(Stop::Requeue, until));
        // Without a replica it comes back with its disk.
        let end = if self.ground.has_replica { Fault::MachineLost } else { Fault::PowerCut };
        self.at(until, Happening::Fault(end));
    }

    fn begin_later(&mut self) {
        let wait = self.random.millis(5000, 60_000);
        self.after(wait, Happening::Begin);
    }

    // ---- what is asked for ----

    pub(super) fn stop_signal(&mut self, signal: i32) {
        self.oracle_sees_stop();
        let now = self.now;
        let Some(run) = &mut self.run else { return };
        if run.finish.is_some() {
            // The job is over, and its image is being stored.
            let _ = run.stops.signal(signal, now);
            if run.stops.is_at_once() {
                run.work.persist.iter_mut().for_each(|persist| persist.cancelled = true);
            }
            return;
        }
        let event = match run.stops.event(signal, now) {
            Event::Stop(stop) if self.plant == Some(super::plants::Plant::TwoStops) && run.machine.is_stopping() => {
                Event::StopNow(stop)
            }
            event => event,
        };
        self.step(event);
    }

    fn stop_command(&mut self, at_once: bool) {
        if at_once {
            self.oracle_sees_stop_at_once();
        } else {
            self.oracle_sees_stop();
        }
        let Some(run) = &mut self.run else { return };
        let request = run.stops.command(at_once);
        if run.finish.is_some() {
            return;
        }
        let how = Stop::Signal(libc::SIGTERM);
        match request {
            Request::AtOnce => self.step(Event::StopNow(how)),
            Request::First => self.step(Event::Stop(how)),
            Request::Repeated => {}
        }
    }

    fn step_where_it_runs(&mut self, event: Event) {
        if self.run.as_ref().is_some_and(|run| run.finish.is_none()) {
            self.step(event);
        }
    }

    fn wish(&mut self, wish: Wish, event: Event) {
        if self.run.as_ref().is_some_and(|run| run.finish.is_none() && run.machine.admits(wish).is_ok()) {
            self.step(event);
        }
    }

    /// The supervisor is killed, and a user continues from an image by name.
    fn restore_named(&mut self) {
        self.supervisor_dies();
        let good: Vec<_> =
            self.ground.copies().iter().map(candidate).filter(|copy| copy.good).map(|copy| copy.id).collect();
        if good.is_empty() || self.ground.disk.reads_fail || self.fate.over {
            return self.begin_later();
        }
        let image = self.random.pick(&good);
        self.begin_from(image);
    }

    // ---- the end of all faults ----

    /// From now on there are no new faults.
    pub(super) fn calm_down(&mut self) {
        tell!(self, "faults are over");
        for fault in [
            Fault::DriverSilent,
            Fault::PortTaken,
            Fault::DiskFull,
            Fault::ReadsFail,
            Fault::WritesFail,
            Fault::MemoryShort,
            Fault::ReplicaAway,
        ] {
            self.heal(fault);
        }
        self.oracle.armed = None;
        let stop = self.random.chance(40);
        self.fate.calm = Some(Calm { since: self.now, begun: false, stop });
        if self.run.is_none() && !self.is_due(|what| matches!(what, Happening::Begin)) {
            self.after(Duration::from_secs(1), Happening::Begin);
        }
        self.wish(Wish::Resume, Event::Resume);
    }

    /// When the job has run for a while.
    pub(super) fn next_goal(&self) -> Option<Instant> {
        let since = self.job.as_ref().filter(|_| self.fate.calm.is_some())?.since + self.config.restart.min_uptime;
        (since > self.now).then_some(since)
    }

    /// Whether the history has reached its goal: the job has run for a while, or a stop has ended it.
    pub(super) fn has_arrived(&mut self) -> bool {
        let Some(calm) = self.fate.calm else { return false };
        let Some(run) = &self.run else { return false };
        let hangs = self.fate.watch.is_some() && self.job.as_ref().is_some_and(|job| job.hung.is_some());
        if matches!(run.machine.state(), State::Suspended { .. }) && run.finish.is_none() {
            self.wish(Wish::Resume, Event::Resume);
            return false;
        }
        let lived = self
            .job
            .as_ref()
            .filter(|job| job.ended.is_none())
            .map(|job| self.now.saturating_duration_since(job.since));
        let lives = run.is_running() && !run.machine.is_stopping();
        if !lives || hangs || lived.is_none_or(|lived| lived < self.config.restart.min_uptime) {
            return false;
        }
        if !calm.stop {
            return true;
        }
        self.fate.calm = Some(Calm { stop: false, begun: true, ..calm });
        self.stop_signal(libc::SIGTERM);
        false
    }
}

/// Memory of a machine: enough for two images beside the job, or for one.
pub(super) const MEMORY: [u64; 3] = [100 * GIB, 100 * GIB, 16 * GIB];

/// When the next fault comes.
pub(super) fn begin_of_faults(now: Instant) -> Instant {
    now + Duration::from_millis(100)
}

//! Faults, and requests of users.

use std::time::Duration;

use super::queue::Happening;
use super::world::World;
use rekindle_testing::random::Random;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// A process of the job dies.
    JobDies,
    /// All jobs end with exit code 0.
    Completed,
    /// The supervisor is killed, and started again.
    SupervisorDies,
    /// The machine restarts: memory is lost.
    MachineDies,
    /// Another machine, with an empty disk, takes its place.
    MachineReplaced,
    /// All machines are replaced by others with empty disks at once.
    AllReplaced,
    /// The machine is paused.
    Pause,
    /// The machine cannot reach the coordinator.
    CutOff,
    /// The machine cannot reach the coordinator, and another machine takes its place.
    CutOffAndReplaced,
    /// The coordinator does not answer.
    Away,
    /// The coordinator refuses all writes, and renews leases.
    Full,
    /// The coordinator ends a lease that is being renewed.
    LeaseEndsEarly,
    /// The coordinator has lost all its data.
    CoordinatorForgets,
    /// Requests and answers take seconds.
    SlowNetwork,
    /// Nothing can be stored.
    DiskFull,
    /// The next snapshots cannot be taken on this machine.
    Refuses,
    /// The job does not survive the next snapshots on this machine.
    Fatal,
    /// The machine cannot start the job, or takes too long. The image is good.
    Hindered,
    /// The machine cannot end its job: a process is in an uninterruptible sleep.
    Stuck,
    /// The coordinator refuses what one machine writes, and renews its lease.
    Mute,
    /// Somebody removes records of group images.
    RecordsRemoved,
    /// One part cannot be restored, from now on.
    Rotten,
    /// The job dies of its state after each restore of an image that was taken from now on.
    Doomed,
    Snapshot,
    Stop,
    StopNow,
    Suspend,
    Resume,
    Rewind,
    /// The run is stopped, and started again from the beginning on all machines.
    FreshRun,
}

/// Requests in addition to the faults, in some histories.
const REQUESTS: [Fault; 5] = [Fault::Suspend, Fault::Resume, Fault::Rewind, Fault::Snapshot, Fault::FreshRun];

/// Obstacles in addition to the faults, in some histories, with what makes them matter.
const OBSTACLES: [Fault; 7] = [
    Fault::Hindered,
    Fault::Stuck,
    Fault::Mute,
    Fault::RecordsRemoved,
    Fault::JobDies,
    Fault::StopNow,
    Fault::SupervisorDies,
];

/// The faults of all histories, without a coordinator that ends leases early: that has its own histories.
const ALL: [Fault; 20] = [
    Fault::JobDies,
    Fault::Completed,
    Fault::SupervisorDies,
    Fault::MachineDies,
    Fault::MachineReplaced,
    Fault::Pause,
    Fault::CutOff,
    Fault::CutOffAndReplaced,
    Fault::Away,
    Fault::CoordinatorForgets,
    Fault::SlowNetwork,
    Fault::DiskFull,
    Fault::Refuses,
    Fault::Rotten,
    Fault::Doomed,
    Fault::Snapshot,
    Fault::Stop,
    Fault::StopNow,
    Fault::Suspend,
    Fault::Rewind,
];

impl Fault {
    /// Whether the fault may let steps take longer than their limits.
    pub(super) fn delays(self) -> bool {
        !matches!(self, Fault::JobDies | Fault::Completed | Fault::Snapshot | Fault::Refuses | Fault::DiskFull)
    }
}

/// Adds requests to some histories. `other` is another random number than that of the history, so that the other histories
/// stay the same.
pub(super) fn plan_requests(world: &mut World, mut other: Random, length: Duration) {
    if !other.chance(15) {
        return;
    }
    for _ in 0..1 + other.below(5) {
        let fault = other.pick(&REQUESTS);
        let at = world.began + other.time(Duration::from_secs(5), length);
        world.at(at, Happening::Fault(fault));
    }
}

/// Gives some histories a replica, and then often takes all disks. `other` is as above.
pub(super) fn plan_replica(world: &mut World, mut other: Random, length: Duration) {
    if !other.chance(20) {
        return;
    }
    world.outside.replica = Some(std::collections::BTreeMap::new());
    for _ in 0..other.below(3) {
        let at = world.began + other.time(Duration::from_secs(20), length);
        world.at(at, Happening::Fault(Fault::AllReplaced));
    }
}

/// Lets the coordinator refuse writes in some histories, also for longer than any step may take. `other` is as above.
pub(super) fn plan_refusals(world: &mut World, mut other: Random, length: Duration) {
    if other.chance(5) {
        let at = world.began + other.time(Duration::from_secs(5), length);
        world.at(at, Happening::Fault(Fault::Full));
    }
}

/// Lets the job not survive snapshots in some histories. `other` is as above.
pub(super) fn plan_fatal(world: &mut World, mut other: Random, length: Duration) {
    if other.chance(10) {
        let at = world.began + other.time(Duration::from_secs(5), length);
        world.at(at, Happening::Fault(Fault::Fatal));
    }
}

/// Adds obstacles to some histories. `other` is as above.
pub(super) fn plan_obstacles(world: &mut World, mut other: Random, length: Duration) {
    if !other.chance(10) {
        return;
    }
    for _ in 0..1 + other.below(5) {
        let fault = other.pick(&OBSTACLES);
        let at = world.began + other.time(Duration::from_secs(20), length);
        world.at(at, Happening::Fault(fault));
    }
}

/// Chooses the faults of a history. Few kinds, because some faults hide others.
pub(super) fn plan(world: &mut World, length: Duration) {
    let random = &mut world.random;
    let kinds: Vec<Fault> = (0..1 + random.below(5)).map(|_| random.pick(&ALL)).collect();
    let count = 1 + random.below(6);
    let mut at = Duration::from_secs(5);
    for _ in 0..count {
        let fault = world.random.pick(&kinds);
        let random = &mut world.random;
        // Some faults happen together.
        at = if random.chance(35) { at + random.millis(0, 3000) } else { random.time(Duration::from_secs(1), length) };
        let at = world.began + at.min(length);
        world.at(at, Happening::Fault(fault));
    }
    world.faults_until = world.began + length;
    if world.coordinator.leases_end_early {
        for _ in 0..3 {
            let at = world.began + world.random.time(Duration::from_secs(1), length);
            world.at(at, Happening::Fault(Fault::LeaseEndsEarly));
        }
    }
}

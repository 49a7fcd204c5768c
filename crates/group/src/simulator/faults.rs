//! What goes wrong, and what people ask for.

use std::time::Duration;

use super::world::{Happening, World};

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
    /// The machine stands still.
    Pause,
    /// The machine cannot reach the coordinator.
    CutOff,
    /// So it is, and another machine takes its place.
    CutOffAndReplaced,
    /// The coordinator answers nobody.
    Away,
    /// The coordinator ends a lease that is being renewed.
    LeaseEndsEarly,
    /// The coordinator lost all it had.
    CoordinatorForgets,
    /// Requests and answers take seconds.
    SlowNetwork,
    /// Nothing can be stored.
    DiskFull,
    /// The next snapshots cannot be taken on this machine.
    Refuses,
    /// One part cannot be restored, from now on.
    Rotten,
    /// The job dies of its state after each restore of an image taken since.
    Doomed,
    Snapshot,
    Stop,
    StopNow,
    Suspend,
    Rewind,
}

/// Those of all histories: a coordinator that ends leases early is another one.
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
    /// Whether steps may take longer than their limits because of it.
    pub(super) fn delays(self) -> bool {
        !matches!(self, Fault::JobDies | Fault::Completed | Fault::Snapshot | Fault::Refuses | Fault::DiskFull)
    }
}

/// Chooses the faults of a history. Few kinds, so that faults that hide others are not always among them.
pub(super) fn plan(world: &mut World, length: Duration) {
    let random = &mut world.random;
    let kinds: Vec<Fault> = (0..1 + random.below(5)).map(|_| random.pick(&ALL)).collect();
    let count = 1 + random.below(6);
    let mut at = Duration::from_secs(5);
    for _ in 0..count {
        let fault = world.random.pick(&kinds);
        let random = &mut world.random;
        // Some come together.
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

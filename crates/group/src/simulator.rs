//! Whole groups in histories made from a seed: machines that die, or pause and continue, messages that are late or
//! lost, a coordinator that does not answer, clocks that are wrong, snapshots and restores that fail.
//!
//! ```text
//!  machines (node)  --writes-->  coordinator  --views, answers, leases-->  machines
//!        |                            |
//!        +---------> oracle <---------+        checks the rules after every event
//! ```
//!
//! [`super::Machine`] is the product. The rest is a model: the coordinator, the machines, the job and its cable.

pub(super) mod coordinator;
mod faults;
pub(super) mod node;
mod nodes;
mod oracle;
mod plants;
mod queue;
mod tests;
mod world;

use crate::options::ColdStart;
use plants::Plant;
use rekindle_testing::random::Random;
use world::World;

/// A history that broke a rule.
#[derive(Debug)]
struct Broken {
    seed: u64,
    what: String,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        write!(f, "for all events: REKINDLE_SIMULATE_SEED={} cargo test -p rekindle-group what_has", self.seed)
    }
}

/// What happened in a history.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Facts {
    events: u64,
    epochs: u64,
    images: u64,
    /// The group images that were committed.
    committed: u64,
    /// Group images that were whole in the replica.
    replicated: u64,
    /// Snapshots that were aborted.
    aborted: u64,
    /// Starts from the beginning on request.
    fresh: u64,
    /// Requests that were answered: the job does it.
    answered: u64,
}

/// Makes the random numbers of requests other ones than those of the history.
const REQUESTS: u64 = 0x0072_6571;
/// And those of the replica.
const REPLICA: u64 = 0x7265_706c;

/// And those of a coordinator that refuses writes.
const REFUSALS: u64 = 0x6675_6c6c;
/// And those of machines that cannot do what they are told, and of people who change keys.
const OBSTACLES: u64 = 0x6f62_7374;
/// And those of snapshots that the job does not survive.
const FATAL: u64 = 0x6661_7461;

/// And that of `restart.cold-start`. With this number the seeds in [`tests`] that found a bug have the default.
const COLD_START: u64 = 0x7a65_726f;

/// Plays one history.
fn history(seed: u64, plant: Option<Plant>) -> Result<Facts, Broken> {
    play(seed, plant, false).map_err(|(what, _)| Broken { seed, what })
}

fn play(seed: u64, plant: Option<Plant>, traced: bool) -> Result<Facts, (String, Vec<String>)> {
    let mut random = Random::new(seed ^ 0x6e0d);
    // Mostly small groups: they go through more events of each kind in the same time.
    let size = match random.below(100) {
        0..60 => 2,
        60..85 => 3,
        85..97 => 4,
        97..99 => 8,
        _ => 16 + u32::try_from(random.below(49)).unwrap_or(0),
    };
    // From a separate random number, so that the other histories stay the same.
    let leases_end_early = Random::new(seed ^ 0x0001_5247).chance(10);
    // The planted bugs are found in histories that have the default, except for the one that is about this.
    let cold_start = match Random::new(seed ^ COLD_START).below(100) {
        0..8 if plant.is_none_or(|plant| plant == Plant::ColdStartIgnored) => ColdStart::Never,
        8..16 if plant.is_none() => ColdStart::Allow,
        _ => ColdStart::NoImages,
    };
    let mut world = World::new(random, size, (leases_end_early, cold_start), plant, traced);
    let length = world.random.millis(30_000, 120_000);
    faults::plan(&mut world, length);
    faults::plan_requests(&mut world, Random::new(seed ^ REQUESTS), length);
    faults::plan_replica(&mut world, Random::new(seed ^ REPLICA), length);
    faults::plan_refusals(&mut world, Random::new(seed ^ REFUSALS), length);
    faults::plan_fatal(&mut world, Random::new(seed ^ FATAL), length);
    faults::plan_obstacles(&mut world, Random::new(seed ^ OBSTACLES), length);
    world.run().map_err(|what| (what, world.take_trace()))
}

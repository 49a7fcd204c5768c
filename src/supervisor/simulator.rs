//! The supervisor in a simulator: whole histories of a job, made up from a seed, with faults at any point.
//!
//! The state machine, the restart policy, the retention of images, the choice of what to restore, to remove and to
//! overwrite in memory, and the rules for stops, proofs and marks are the product's own. The job, CRIU, the driver,
//! disk, memory, replica and clock are models. After every event the invariants are checked ([`oracle`]);
//! docs/internals/simulator.md describes them, what is not modelled, and how to repeat a history.
//!
//! ```text
//!   random -> faults -> world (the queue, the clock)
//!                         |
//!             run, restores, snapshots  -> product: Machine::step, policy, retention, line, proof, stops, memory
//!                         |
//!                       model (what is true)  <- oracle (what has to hold)
//! ```
//!
//! A seed gives the same history on every machine. Once the faults of a history are over, the job must run within a
//! time limit.

mod ends;
mod faults;
mod model;
mod oracle;
mod plants;
mod ranks;
mod replica;
mod restores;
mod run;
mod snapshots;
mod space;
mod tests;
mod world;

use std::sync::LazyLock;
use std::time::Duration;

use faults::Fault;
use model::IMAGE;
use plants::Plant;
use rekindle_testing::random::Random;
use world::{Happening, World};

use crate::config::{ColdStart, Config, Interval, SizeLimit, Staging};

/// A history that broke an invariant.
#[derive(Debug)]
struct Broken {
    seed: u64,
    what: String,
    trace: Vec<String>,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.trace.iter().try_for_each(|line| writeln!(f, "{line}"))?;
        writeln!(f, "seed {}: {}", self.seed, self.what)?;
        write!(f, "to repeat it: REKINDLE_SIMULATE_SEED={} cargo test --lib simulator", self.seed)
    }
}

/// One configuration of each kind.
static CONFIGS: LazyLock<Vec<Config>> = LazyLock::new(|| {
    let with = |change: &dyn Fn(&mut Config)| {
        let mut config = Config::default();
        change(&mut config);
        config
    };
    let every = |seconds| Interval::Every(Duration::from_secs(seconds));
    vec![
        // The defaults, for a long job.
        Config::default(),
        with(&|it| it.snapshot.interval = every(60)),
        // More snapshots than proofs.
        with(&|it| it.snapshot.interval = every(10)),
        with(&|it| {
            it.snapshot.interval = every(4);
            it.store.keep_last = 2;
            it.restart.min_uptime = Duration::from_secs(12);
        }),
        with(&|it| {
            it.snapshot.interval = every(20);
            it.store.keep_last = 1;
            it.store.max_total_size = SizeLimit::AtMost(rekindle_base::units::ByteSize::new(IMAGE * 3));
        }),
        with(&|it| {
            it.snapshot.interval = every(15);
            it.snapshot.staging = Staging::Store;
        }),
        with(&|it| it.snapshot.interval = every(30)),
        with(&|it| {
            it.snapshot.interval = Interval::Auto;
        }),
        with(&|it| {
            it.snapshot.interval = Interval::Off;
            it.restart.cold_start = ColdStart::Allow;
        }),
    ]
});

/// Plays one history; returns how many events it had.
fn history(seed: u64, plant: Option<Plant>) -> Result<u64, Broken> {
    let broken = |what, trace| Broken { seed, what, trace };
    play(seed, plant, false).map_err(|(what, _)| {
        // Played again with a trace.
        let again = play(seed, plant, true);
        let (again, trace) = again.err().unwrap_or_else(|| ("nothing: it does not repeat".into(), Vec::new()));
        if again == what { broken(what, trace) } else { broken(format!("{what}; when repeated: {again}"), trace) }
    })
}

fn play(seed: u64, plant: Option<Plant>, traced: bool) -> Result<u64, (String, Vec<String>)> {
    let mut random = Random::new(seed ^ 0x5eed);
    let at = usize::try_from(random.below(CONFIGS.len() as u64)).unwrap_or_default();
    let config: &'static Config = &CONFIGS[at];
    let mut world = World::new(seed, config, plant, traced);
    let interval = match config.snapshot.interval {
        Interval::Every(interval) => interval,
        Interval::Auto | Interval::Off => Duration::from_secs(60),
    };
    let faults_until = prepare(&mut world, interval);
    world.run(faults_until).map_err(|what| (what, world.trace.take().unwrap_or_default()))
}

/// Creates the machine, and chooses the faults and their times. Returns when the faults end.
fn prepare(world: &mut World, interval: Duration) -> std::time::Instant {
    let random = &mut world.random;
    world.ground.memory = random.pick(&faults::MEMORY);
    world.ground.disk.total = IMAGE * (4 + random.below(12));
    world.ground.has_replica = random.chance(30);
    world.fate.watch = match random.below(10) {
        0..3 => Some(random.millis(5_000, 60_000)),
        // Longer than a life must be to count as healthy.
        3..5 => Some(random.millis(300_000, 720_000)),
        _ => None,
    };
    world.oracle.unrestorable = if random.chance(25) { 30 } else { 0 };
    let length = interval * u32::try_from(2 + random.below(10)).unwrap_or(2);
    world.fate.total = random.chance(10).then(|| random.time(interval, length * 2));
    // Few kinds in one history, so that faults that prevent others are not always among them.
    let kinds: Vec<Fault> = (0..1 + random.below(7)).map(|_| random.pick(&faults::ALL)).collect();
    let count = random.below(10) + 1;
    let begin = faults::begin_of_faults(world.now);
    let end = begin + length;
    let mut at = begin;
    for _ in 0..count {
        let fault = world.random.pick(&kinds);
        // Some faults come together.
        at = match world.random.chance(35) {
            true => at + world.random.millis(0, 3000),
            false => begin + world.random.time(Duration::ZERO, length),
        };
        world.at(at.min(end), Happening::Fault(fault));
    }
    world.at(world.began, Happening::Begin);
    end
}

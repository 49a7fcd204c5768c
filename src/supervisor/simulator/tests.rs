//! Histories from fresh seeds, and the bugs that they must find.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::plants::{self, Plant};
use super::{Broken, history};
use rekindle_testing::random::Random;

/// Number of histories in every run of the tests; REKINDLE_SIMULATE_HISTORIES overrides it.
const HISTORIES: u64 = 100_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

/// A new seed in each run; it is printed if a history fails.
fn fresh_seed() -> u64 {
    u64::try_from(chrono::Utc::now().timestamp_micros()).unwrap_or_default()
}

/// Plays this many histories, on two threads; returns the number of events, or a failed history.
fn live(first: u64, count: u64) -> Result<u64, Box<Broken>> {
    let enough = AtomicBool::new(false);
    let half = |part: u64| -> Result<u64, Box<Broken>> {
        let mut seeds = Random::new(first.wrapping_add(part << 32));
        let mut events = 0;
        for _ in 0..(count + part) / 2 {
            if enough.load(Ordering::Relaxed) {
                break;
            }
            events += history(seeds.below(u64::MAX), None).map_err(|broken| {
                enough.store(true, Ordering::Relaxed);
                Box::new(broken)
            })?;
        }
        Ok(events)
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(|| half(1));
        let events = half(0)?;
        Ok(events + other.join().unwrap()?)
    })
}

#[test]
fn what_has_to_hold_does_so_in_every_history() {
    if let Some(seed) = number("REKINDLE_SIMULATE_SEED") {
        return match history(seed, None) {
            Ok(events) => println!("seed {seed}: {events} events, all holds"),
            Err(broken) => panic!("{broken}"),
        };
    }
    let (count, began) = (number("REKINDLE_SIMULATE_HISTORIES").unwrap_or(HISTORIES), Instant::now());
    match live(fresh_seed(), count) {
        Ok(events) => println!("{count} histories, {events} events, {:?}", began.elapsed()),
        Err(broken) => panic!("{broken}"),
    }
}

#[test]
fn a_seed_gives_the_same_history_again() {
    for seed in 0..200 {
        let traced = |plant| super::play(seed, plant, true);
        let plant = Some(Plant::RotationIgnoresProof);
        assert_eq!(traced(None), traced(None));
        assert_eq!(traced(plant), traced(plant));
    }
}

/// This many histories are enough to find each planted bug. The seeds are the same each time.
const ENOUGH: u64 = 200_000;

#[test]
fn each_planted_bug_is_found() {
    for plant in plants::ALL {
        let mut seeds = Random::new(14);
        let found = (1..=ENOUGH).find_map(|n| Some((n, history(seeds.below(u64::MAX), Some(plant)).err()?)));
        let Some((count, broken)) = found else { panic!("{plant:?} is not found in {ENOUGH} histories") };
        println!("{plant:?}: in history {count}: {}", broken.what);
        // The planted bug was found, and no other one.
        assert!(history(broken.seed, None).is_ok(), "{plant:?}: {broken}");
    }
}

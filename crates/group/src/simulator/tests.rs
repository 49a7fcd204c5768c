//! Histories from fresh seeds, and the bugs that they must find.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use super::plants::{self, Plant};
use super::{Broken, Facts, history};
use rekindle_testing::random::Random;

/// Number of histories in every run of the tests; REKINDLE_SIMULATE_HISTORIES overrides it. With
/// REKINDLE_SIMULATE_FIRST, they are the same in each run.
const HISTORIES: u64 = 100_000;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text} is not a number")))
}

fn fresh_seed() -> u64 {
    u64::try_from(chrono::Utc::now().timestamp_micros()).unwrap_or_default()
}

fn sum(all: Facts, one: Facts) -> Facts {
    Facts {
        events: all.events + one.events,
        epochs: all.epochs + one.epochs,
        images: all.images + one.images,
        committed: all.committed + one.committed,
        replicated: all.replicated + one.replicated,
        aborted: all.aborted + one.aborted,
        fresh: all.fresh + one.fresh,
        answered: all.answered + one.answered,
    }
}

/// Runs this many histories, on a thread for each processor.
fn live(first: u64, count: u64) -> Result<Facts, Box<Broken>> {
    let threads = std::thread::available_parallelism().map_or(2, |all| all.get() as u64);
    let enough = AtomicBool::new(false);
    let part = |part: u64| -> Result<Facts, Box<Broken>> {
        let mut seeds = Random::new(first.wrapping_add(part << 32));
        let mut facts = Facts::default();
        for _ in 0..(count + part) / threads {
            if enough.load(Ordering::Relaxed) {
                break;
            }
            let one = history(seeds.below(u64::MAX), None).map_err(|broken| {
                enough.store(true, Ordering::Relaxed);
                Box::new(broken)
            })?;
            facts = sum(facts, one);
        }
        Ok(facts)
    };
    std::thread::scope(|scope| {
        let part = &part;
        let parts: Vec<_> = (0..threads).map(|number| scope.spawn(move || part(number))).collect();
        parts.into_iter().try_fold(Facts::default(), |facts, part| Ok(sum(facts, part.join().unwrap()?)))
    })
}

#[test]
fn what_has_to_hold_does_so_in_every_history() {
    if let Some(seed) = number("REKINDLE_SIMULATE_SEED") {
        return match super::play(seed, None, true) {
            Ok(facts) => println!("seed {seed}: {facts:?}, all holds"),
            Err((what, trace)) => {
                trace.iter().for_each(|line| println!("{line}"));
                panic!("seed {seed}: {what}");
            }
        };
    }
    let (count, began) = (number("REKINDLE_SIMULATE_HISTORIES").unwrap_or(HISTORIES), Instant::now());
    match live(number("REKINDLE_SIMULATE_FIRST").unwrap_or_else(fresh_seed), count) {
        Ok(facts) => {
            println!("{count} histories in {:?}: {facts:?}", began.elapsed());
            // The histories test something: most have snapshots, and many have restores.
            assert!(facts.committed > count && facts.epochs > count && facts.aborted > count / 50, "{facts:?}");
            assert!(facts.replicated > count / 20, "{facts:?}");
            assert!(facts.fresh > count / 500 && facts.answered > count / 20, "{facts:?}");
        }
        Err(broken) => panic!("{broken}"),
    }
}

#[test]
fn a_seed_gives_the_same_history_again() {
    for seed in 0..50 {
        for plant in [None, Some(Plant::LostFence)] {
            let traced = || super::play(seed, plant, true);
            assert_eq!(traced(), traced());
        }
    }
}

/// Seeds of histories that found a bug, each once: docs/internals/simulator.md says which.
const KEPT: [u64; 25] = [
    9_650_324_718_012_789_893,
    6_771_225_392_452_221_716,
    1_519_156_796_706_109_399,
    14_754_079_629_986_087_460,
    5_993_604_335_468_152_210,
    8_599_447_112_469_884_852,
    13_165_560_828_574_571_744,
    8_803_677_733_522_323_525,
    9_789_775_321_302_241_997,
    1_893_713_217_342_522_918,
    363_882_543_833_619_147,
    9_295_118_731_539_820_757,
    17_162_909_506_610_650_667,
    13_453_839_253_505_699_604,
    2_748_944_641_867_005_621,
    7_696_998_064_546_979_128,
    16_583_356_105_170_492_817,
    5_781_417_836_344_224_999,
    13_057_985_767_355_745_014,
    18_146_815_473_582_978_166,
    12_969_298_116_110_818_279,
    11_124_681_096_456_974_945,
    4_423_947_620_304_410_292,
    2_357_396_548_184_877_595,
    614_611_797_178_571_202,
];

#[test]
fn bugs_that_were_found_stay_away() {
    for seed in KEPT {
        if let Err(broken) = history(seed, None) {
            panic!("{broken}");
        }
    }
}

/// This many histories are enough to find each planted bug. The seeds are the same each time.
const ENOUGH: u64 = 100_000;

#[test]
fn each_planted_bug_is_found() {
    for plant in plants::ALL {
        let mut seeds = Random::new(18);
        let found = (1..=ENOUGH).find_map(|n| Some((n, history(seeds.below(u64::MAX), Some(plant)).err()?)));
        let Some((count, broken)) = found else { panic!("{plant:?} is not found in {ENOUGH} histories") };
        println!("{plant:?}: in history {count}: {}", broken.what);
        // The simulator found the planted bug, and no other.
        assert!(history(broken.seed, None).is_ok(), "{plant:?}: {broken}");
    }
}

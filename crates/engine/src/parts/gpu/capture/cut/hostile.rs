//! Counts that no interposer would write. The table is in the job's memory: any content must cost the supervisor little
//! time and memory, and the plan must be as right as for correct counts.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "numbers of a test are small")]

use std::time::{Duration, Instant};

use proptest::prelude::*;
use rekindle_cuda::nccl::{Communicator, Counter, Counts, Kind};

use super::plan::{Channel, Step, Targets};

/// Time limit of one step, in a build without optimisation: the cut can be cancelled only between two steps.
const LIMIT: Duration = Duration::from_secs(10);

/// The size of a table (`rekindle_abi::nccl`).
const COMMUNICATORS: usize = 1024;
const COUNTERS: usize = 16384;

fn communicator(id: u64, rank: u32, ranks: u32) -> Communicator {
    Communicator { id: [id, 0], rank, ranks, has_ended: false }
}

fn counter(place: usize, communicator: usize, started: u64) -> Counter {
    Counter { place, communicator, kind: Kind::Collective, peer: 0, started, wanted: None }
}

fn process(communicators: Vec<Communicator>, counters: Vec<Counter>) -> Counts {
    Counts { communicators, counters, ..Counts::default() }
}

/// The valid results of a step for these counts.
fn check(step: &Step, all: &[Counts]) {
    let counters: usize = all.iter().map(|counts| counts.counters.len()).sum();
    let communicators: usize = all.iter().map(|counts| counts.communicators.len()).sum();
    assert!(step.limits.len() <= counters, "{} limits for {counters} counters", step.limits.len());
    let most = 2 * counters + communicators;
    assert!(step.behind.len() <= most, "{} ranks are behind, of {counters} counters", step.behind.len());
    for (process, place, _) in &step.limits {
        assert!(all[*process].counters.iter().any(|counter| counter.place == *place));
    }
}

#[test]
fn a_number_of_ranks_that_is_none_costs_nothing() {
    for ranks in [1 << 20, u32::MAX] {
        let communicators = (0..COMMUNICATORS as u64).map(|id| communicator(id, 0, ranks)).collect();
        let counters = (0..COMMUNICATORS).map(|at| counter(at, at, 1)).collect();
        let all = [process(communicators, counters)];
        let began = Instant::now();
        let step = Targets::default().step(&all, all.len(), false);
        assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
        check(&step, &all);
        assert!(!step.is_reached && step.behind[0].process.is_none() && step.behind[0].rank == 1, "{:?}", step.behind);
    }
}

#[test]
fn a_full_table_costs_little() {
    let communicators: Vec<Communicator> =
        (0..COMMUNICATORS as u32).map(|rank| communicator(1, rank, u32::MAX)).collect();
    // All on one channel, then each on its own channel.
    let one = |at: usize| counter(at, at % COMMUNICATORS, at as u64);
    let own = |at: usize| Counter { kind: Kind::Send, peer: at as u32, wanted: Some(u64::MAX), ..one(at) };
    for make in [&one as &dyn Fn(usize) -> Counter, &own] {
        let counts = process(communicators.clone(), (0..COUNTERS).map(make).collect());
        let all = [counts.clone(), counts];
        let began = Instant::now();
        let step = Targets::default().step(&all, all.len(), false);
        assert!(began.elapsed() < LIMIT, "{:?}", began.elapsed());
        check(&step, &all);
    }
}

#[test]
fn a_table_that_changes_all_the_time_is_not_remembered() {
    let mut targets = Targets::default();
    for id in 0..1000 {
        let all = [process(vec![communicator(id, 0, 1)], vec![counter(0, 0, 1)])];
        targets.step(&all, all.len(), false);
    }
    assert!(targets.len() <= 1, "{} channels", targets.len());
}

#[test]
fn a_rank_that_no_process_has_is_named() {
    // Ranks 0 and 2 of four are known, and 2 is behind: the step names them, and the first missing rank.
    let all = [
        process(vec![communicator(1, 0, 4)], vec![counter(0, 0, 5)]),
        process(vec![communicator(1, 2, 4)], vec![counter(0, 0, 4)]),
    ];
    let step = Targets::default().step(&all, all.len(), false);
    let mut behind: Vec<_> = step.behind.iter().map(|behind| (behind.process, behind.rank, behind.started)).collect();
    behind.sort_unstable();
    assert_eq!(behind, [(None, 1, 0), (Some(1), 2, 4)]);
    assert!(step.behind.iter().all(|behind| behind.target == 5 && behind.channel == Channel::Collective([1, 0])));
}

#[test]
fn a_rank_that_has_used_nothing_yet_is_behind_until_its_communicator_ends() {
    let mut second = communicator(1, 1, 2);
    let first = process(vec![communicator(1, 0, 2)], vec![counter(0, 0, 1)]);
    let step = Targets::default().step(&[first.clone(), process(vec![second.clone()], vec![])], 2, false);
    assert!(!step.is_reached && step.behind[0].process == Some(1) && step.behind[0].rank == 1, "{:?}", step.behind);
    second.has_ended = true;
    let step = Targets::default().step(&[first, process(vec![second], vec![])], 2, false);
    assert!(step.is_reached, "{:?}", step.behind);
}

#[test]
fn a_rank_that_has_left_is_behind_only_while_a_communicator_with_it_is_used() {
    let mut first = communicator(1, 0, 3);
    let second = communicator(1, 1, 3);
    // Rank 2 has left.
    let all = |first: &Communicator, second: &Communicator| {
        [
            process(vec![first.clone()], vec![counter(0, 0, 512)]),
            process(vec![second.clone()], vec![counter(0, 0, 512)]),
        ]
    };
    first.has_ended = true;
    let step = Targets::default().step(&all(&first, &second), 2, false);
    assert!(!step.is_reached && step.behind[0].process.is_none(), "{:?}", step.behind);
    let second = Communicator { has_ended: true, ..second };
    let step = Targets::default().step(&all(&first, &second), 2, false);
    assert!(step.is_reached, "{:?}", step.behind);
}

fn number() -> impl Strategy<Value = u64> {
    prop_oneof![0..4_u64, Just(u64::MAX), Just(u64::MAX - 1), Just(1 << 63)]
}

fn rank() -> impl Strategy<Value = u32> {
    prop_oneof![0..4_u32, Just(u32::MAX), Just(1 << 31), Just((1 << 31) + 1), Just(1 << 20)]
}

fn communicators() -> impl Strategy<Value = Vec<Communicator>> {
    let one = (0..3_u64, rank(), rank(), any::<bool>());
    let one = one.prop_map(|(id, rank, ranks, has_ended)| Communicator { has_ended, ..communicator(id, rank, ranks) });
    prop::collection::vec(one, 0..5)
}

fn counts() -> impl Strategy<Value = Counts> {
    let kind = prop_oneof![Just(Kind::Collective), Just(Kind::Send), Just(Kind::Receive)];
    let one = (0..6_usize, kind, rank(), number(), prop::option::of(number()));
    let inside = || prop_oneof![Just(0), Just(1), Just(u32::MAX)];
    let inside = (inside(), inside(), inside());
    (communicators(), prop::collection::vec(one, 0..8), inside).prop_map(|(communicators, counters, inside)| {
        let (inside, making, pending) = inside;
        let counters = counters.into_iter().enumerate().map(|(place, (communicator, kind, peer, started, wanted))| {
            Counter { place, communicator, kind, peer, started, wanted }
        });
        Counts { communicators, counters: counters.collect(), inside, making, pending }
    })
}

proptest! {
    /// Any counts, which change to any others: a reached cut is really reached, and limits only rise.
    #[test]
    fn any_counts_have_a_plan(
        steps in prop::collection::vec((prop::collection::vec(counts(), 0..4), any::<bool>()), 1..4),
    ) {
        let mut targets = Targets::default();
        for (all, raise_all) in steps {
            let first = targets.step(&all, all.len(), raise_all);
            check(&first, &all);
            prop_assert_eq!(first.is_reached, first.behind.is_empty() && all.iter().all(|counts| counts.inside == 0));
            for behind in &first.behind {
                prop_assert!(behind.started < behind.target);
            }
            for (process, place, limit) in &first.limits {
                let counter = all[*process].counters.iter().find(|counter| counter.place == *place).unwrap();
                prop_assert!(*limit >= counter.started, "what was started is within the limit");
                if raise_all {
                    prop_assert!(counter.wanted.is_none_or(|wanted| wanted <= *limit), "all that wait may go on");
                }
            }
            // The same counts again: no limit falls.
            let second = targets.step(&all, all.len(), raise_all);
            for ((_, _, before), (_, _, after)) in first.limits.iter().zip(&second.limits) {
                prop_assert!(after >= before);
            }
        }
    }
}

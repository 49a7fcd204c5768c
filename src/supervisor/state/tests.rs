use chrono::Utc;
use proptest::prelude::*;

use super::*;

fn id(n: u32) -> ImageId {
    ImageId::new(n, chrono::DateTime::<Utc>::UNIX_EPOCH)
}

/// Carries events into a machine and keeps the time.
struct Bench {
    config: Config,
}

impl Bench {
    fn new() -> Bench {
        Bench { config: Config::default() }
    }

    fn run(&self, events: &[(u64, Event)]) -> (State, Vec<Action>) {
        let (mut machine, mut actions) = Machine::new(&self.config, From::Cold);
        let mut now = Instant::now();
        for (seconds, event) in events {
            now += Duration::from_secs(*seconds);
            actions.extend(machine.step(event.clone(), now));
        }
        (machine.state().clone(), actions)
    }
}

fn killed(images: &[u32]) -> Event {
    Event::Ended { ended: Ended::Signal(9), images: images.iter().map(|n| id(*n)).collect() }
}

const TERM: Stop = Stop::Signal(15);

#[test]
fn the_happy_path() {
    let exit = Event::Ended { ended: Ended::Exit(0), images: vec![] };
    let events = [(0, Event::Started), (600, Event::Tick), (1, Event::SnapshotTaken), (10, exit)];
    let (state, actions) = Bench::new().run(&events);
    assert_eq!(state, State::Done);
    let expected = [Action::Start(From::Cold), Action::Snapshot(Reason::Interval), Action::Finish(Finish::Completed)];
    assert_eq!(actions, expected);
}

#[test]
fn the_next_snapshot_is_an_interval_after_the_last() {
    let bench = Bench::new();
    let (state, _) = bench.run(&[(0, Event::Started), (599, Event::Tick)]);
    assert_eq!(state.name(), "running", "too early");
    let (mut machine, _) = Machine::new(&bench.config, From::Cold);
    let now = Instant::now();
    machine.step(Event::Started, now);
    let due = machine.state().deadline().unwrap();
    assert_eq!(due, now + Duration::from_secs(600));
    machine.step(Event::Tick, due);
    let done = due + Duration::from_secs(20);
    machine.step(Event::SnapshotTaken, done);
    assert_eq!(machine.state().deadline(), Some(done + Duration::from_secs(600)));
}

#[test]
fn failed_snapshots_back_off_and_recover() {
    let bench = Bench::new();
    let (mut machine, _) = Machine::new(&bench.config, From::Cold);
    let now = Instant::now();
    machine.step(Event::Started, now);
    let mut waits = Vec::new();
    for _ in 0..8 {
        machine.step(Event::SnapshotNow, now);
        machine.step(Event::SnapshotFailed(Harm::None), now);
        waits.push(machine.state().deadline().unwrap() - now);
    }
    let snapshot = &bench.config.snapshot;
    assert_eq!(waits[..3], [snapshot.retry_after, snapshot.retry_after * 2, snapshot.retry_after * 4]);
    assert_eq!(waits[7], snapshot.retry_max);
    machine.step(Event::SnapshotNow, now);
    machine.step(Event::SnapshotTaken, now);
    assert_eq!(machine.state().deadline(), Some(now + Duration::from_secs(600)));
}

#[test]
fn a_stop_takes_a_last_snapshot_and_kills() {
    let events = [(0, Event::Started), (5, Event::Stop(TERM)), (1, Event::SnapshotTaken), (0, killed(&[1]))];
    let (state, actions) = Bench::new().run(&events);
    assert_eq!(state, State::Done);
    assert_eq!(actions[1..], [Action::Snapshot(Reason::Final), Action::Kill, Action::Finish(Finish::Stopped(TERM)),]);
}

#[test]
fn a_stop_whose_snapshot_fails_asks_the_job_then_kills_it() {
    let failed = Event::SnapshotFailed(Harm::None);
    let events = [(0, Event::Started), (5, Event::Stop(TERM)), (1, failed), (29, Event::Tick), (0, killed(&[]))];
    let (_, actions) = Bench::new().run(&events);
    assert_eq!(actions[2..], [Action::Terminate, Action::Kill, Action::Finish(Finish::Stopped(TERM))]);
}

#[test]
fn an_exit_with_0_completes_a_job_unless_it_was_told_to_end() {
    let (failed, exit) = (Event::SnapshotFailed(Harm::None), Event::Ended { ended: Ended::Exit(0), images: vec![] });
    let last = |events: &[(u64, Event)]| Bench::new().run(events).1.pop();
    let told = [(0, Event::Started), (5, Event::Stop(TERM)), (1, failed.clone()), (1, exit.clone())];
    assert_eq!(last(&told), Some(Action::Finish(Finish::Stopped(TERM))));
    let before = [(0, Event::Started), (5, Event::Stop(TERM)), (1, exit), (0, failed)];
    assert_eq!(last(&before), Some(Action::Finish(Finish::Completed)));
}

#[test]
fn grace_bounds_the_last_snapshot() {
    let events = [(0, Event::Started), (5, Event::Stop(TERM)), (30, Event::Tick), (0, killed(&[1]))];
    let (_, actions) = Bench::new().run(&events);
    assert_eq!(actions[2..], [Action::Cancel, Action::Kill, Action::Finish(Finish::Stopped(TERM))]);
}

#[test]
fn an_end_during_a_snapshot_counts_once_it_is_over() {
    let events = [(0, Event::Started), (600, Event::Tick), (0, killed(&[])), (0, Event::SnapshotFailed(Harm::None))];
    let bench = Bench::new();
    let (state, actions) = bench.run(&events);
    assert!(actions.contains(&Action::Cancel));
    assert_eq!(state.name(), "running", "its end is reported anew");
    let (state, actions) = bench.run(&[events.as_slice(), &[(0, killed(&[3]))]].concat());
    assert!(matches!(state, State::Waiting { from: From::Image(i), .. } if i == id(3)), "{actions:?}");
}

#[test]
fn a_job_that_was_lost_in_a_snapshot_comes_back() {
    let events = [(0, Event::Started), (600, Event::Tick), (0, Event::SnapshotFailed(Harm::Lost)), (0, killed(&[2]))];
    let (state, actions) = Bench::new().run(&events);
    assert_eq!(actions[2], Action::Kill);
    assert!(matches!(state, State::Waiting { from: From::Image(i), .. } if i == id(2)));
}

fn event() -> impl Strategy<Value = Event> {
    let images = proptest::collection::vec(1u32..4, 0..3).prop_map(|mut n| {
        n.sort_unstable();
        n.dedup();
        n.into_iter().rev().map(id).collect::<Vec<_>>()
    });
    let ended = prop_oneof![Just(Ended::Exit(0)), Just(Ended::Exit(1)), Just(Ended::Signal(9))];
    let stop = prop_oneof![Just(TERM), Just(Stop::Requeue)];
    prop_oneof![
        3 => Just(Event::Started),
        3 => Just(Event::Tick),
        2 => Just(Event::SnapshotTaken),
        1 => Just(Event::SnapshotFailed(Harm::None)),
        1 => Just(Event::SnapshotFailed(Harm::Lost)),
        2 => Just(Event::SnapshotNow),
        1 => Just(Event::StartFailed { why: "why".into() }),
        1 => Just(Event::Impossible { why: "why".into() }),
        1 => images.clone().prop_map(|images| Event::ImageFailed { images }),
        2 => (ended, images).prop_map(|(ended, images)| Event::Ended { ended, images }),
        1 => stop.clone().prop_map(Event::Stop),
        1 => stop.prop_map(Event::StopNow),
    ]
}

proptest! {
    /// Events arrive only where the loop could send them: a result only for what is under way.
    #[test]
    fn invariants_hold_over_any_sequence(events in proptest::collection::vec((0u64..700, event()), 0..60)) {
        let config = Config::default();
        let (mut machine, first) = Machine::new(&config, From::Cold);
        let mut now = Instant::now();
        let (mut alive, mut starting, mut snapshot, mut finished) = (false, false, false, 0);
        let mut check = |actions: Vec<Action>, alive: &mut bool, starting: &mut bool, snapshot: &mut bool| {
            for action in actions {
                prop_assert_eq!(finished, 0, "nothing comes after Finish");
                match action {
                    Action::Start(_) => {
                        prop_assert!(!*alive && !*starting, "two lives at once");
                        *starting = true;
                    }
                    Action::Snapshot(_) => {
                        prop_assert!(*alive && !*snapshot, "a snapshot of nothing, or two at once");
                        *snapshot = true;
                    }
                    Action::Finish(_) => finished += 1,
                    _ => {}
                }
            }
            Ok(())
        };
        check(first, &mut alive, &mut starting, &mut snapshot)?;
        for (seconds, event) in events {
            now += Duration::from_secs(seconds);
            let possible = match &event {
                Event::Started | Event::StartFailed { .. } | Event::Impossible { .. } | Event::ImageFailed { .. } => starting,
                Event::SnapshotTaken | Event::SnapshotFailed(_) => snapshot,
                Event::Ended { .. } => alive,
                _ => true,
            };
            if !possible {
                continue;
            }
            match &event {
                Event::Started => (starting, alive) = (false, true),
                Event::StartFailed { .. } | Event::Impossible { .. } | Event::ImageFailed { .. } => starting = false,
                Event::SnapshotTaken | Event::SnapshotFailed(_) => snapshot = false,
                // The loop reports an end during a snapshot again afterwards.
                Event::Ended { .. } if !snapshot => alive = false,
                _ => {}
            }
            let actions = machine.step(event, now);
            check(actions, &mut alive, &mut starting, &mut snapshot)?;
        }
        // Whatever came before: a stop ends it.
        for event in [Event::StopNow(TERM), Event::SnapshotFailed(Harm::None), Event::StartFailed { why: String::new() }] {
            now += Duration::from_secs(1);
            machine.step(event, now);
        }
        machine.step(killed(&[]), now);
        prop_assert_eq!(machine.state(), &State::Done);
    }
}

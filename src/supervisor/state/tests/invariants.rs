//! Invariants over any sequence of events.

use proptest::prelude::*;

use super::*;

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        Just(Verdict::Restart),
        Just(Verdict::Stop),
        Just(Verdict::GiveUp { why: "rule 1".into() }),
        (1u32..4).prop_map(|n| Verdict::Rewind(id(n))),
        (1u32..4).prop_map(|n| Verdict::Hung([id(n)].into())),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let images = proptest::collection::vec(1u32..4, 0..3).prop_map(|mut n| {
        n.sort_unstable();
        n.dedup();
        n.into_iter().rev().map(id).collect::<Vec<_>>()
    });
    let images = (images, any::<bool>()).prop_map(|(good, others)| Images { others, ..Images::good(good) });
    let failure = prop_oneof![
        Just(Failure::Damaged),
        Just(Failure::Refused("why".into())),
        Just(Failure::Unexplained("why".into())),
        Just(Failure::NotNow("why".into())),
        Just(Failure::FilesGone("why".into())),
    ];
    let ended = prop_oneof![Just(Ended::Exit(0)), Just(Ended::Exit(1)), Just(Ended::Signal(9))];
    let stop = prop_oneof![Just(TERM), Just(Stop::Requeue)];
    prop_oneof![
        3 => Just(Event::Started),
        3 => Just(Event::Tick),
        2 => Just(TAKEN),
        1 => Just(Event::SnapshotFailed(Harm::None)),
        1 => Just(Event::SnapshotFailed(Harm::Lost)),
        1 => Just(Event::SnapshotMissed),
        2 => prop_oneof![Just(NOW), Just(ASKED)],
        2 => Just(Event::Suspend),
        2 => Just(Event::Resume),
        2 => (1u32..4).prop_map(rewind),
        2 => Just(Event::PersistBegan),
        3 => Just(Event::PersistEnded(Some(Duration::from_secs(3)))),
        1 => Just(Event::StartFailed { why: "why".into() }),
        1 => Just(Event::StoreAway { why: "why".into() }),
        1 => Just(Event::Impossible { why: "why".into(), obstacle: Obstacle::Machine }),
        1 => (1u32..4, failure, images.clone())
            .prop_map(|(n, failure, images)| Event::ImageFailed { image: id(n), failure, images }),
        1 => Just(Event::Excused),
        2 => (ended, images).prop_map(|(ended, images)| Event::Ended { ended, images }),
        1 => verdict().prop_map(Event::Condemn),
        1 => verdict().prop_map(Event::Judged),
        // The time is set when it is sent.
        3 => Just(Event::Hold(Instant::now())),
        2 => Just(Event::Release),
        1 => stop.clone().prop_map(Event::Stop),
        1 => stop.clone().prop_map(|stop| Event::StopBy(stop, Instant::now() + Duration::from_secs(60))),
        1 => stop.prop_map(Event::StopNow),
    ]
}

proptest! {
    /// Events are only sent when the loop could send them: a result only for an operation in progress.
    #[test]
    fn invariants_hold_over_any_sequence(
        events in proptest::collection::vec((0u64..700, event()), 0..60),
        config in prop_oneof![Just(Config::default()), Just(auto())],
        quiet in proptest::option::of(0u64..9000),
    ) {
        let (mut machine, first) = Machine::new(&config, StartPoint::Cold);
        let mut now = Instant::now();
        machine.no_interval_from(quiet.map(|after| now + Duration::from_secs(after)));
        let (mut alive, mut starting, mut snapshot, mut finished) = (false, false, false, 0);
        let mut persisting = false;
        // The latest end of any hold.
        let mut held: Option<Instant> = None;
        let mut check = |actions: Vec<Action>,
                         alive: &mut bool,
                         starting: &mut bool,
                         snapshot: &mut bool,
                         busy: bool,
                         held: bool| {
            for action in actions {
                prop_assert_eq!(finished, 0, "nothing comes after Finish");
                match action {
                    Action::Start(_) => {
                        prop_assert!(!*alive && !*starting, "two lives at once");
                        prop_assert!(!*snapshot, "the life before is still being dumped");
                        *starting = true;
                    }
                    Action::Snapshot(reason) => {
                        prop_assert!(!held || reason == Reason::Final, "the job holds it off");
                        prop_assert!(*alive && !*snapshot, "a snapshot of nothing, or two at once");
                        prop_assert!(!busy, "one is on its way to the store");
                        *snapshot = true;
                    }
                    Action::Finish(_) => finished += 1,
                    _ => {}
                }
            }
            Ok(())
        };
        check(first, &mut alive, &mut starting, &mut snapshot, persisting, false)?;
        for (seconds, event) in events {
            now += Duration::from_secs(seconds);
            let possible = match &event {
                Event::Started | Event::StartFailed { .. } | Event::StoreAway { .. } | Event::Impossible { .. } | Event::ImageFailed { .. } => starting,
                Event::SnapshotTaken { .. } | Event::SnapshotFailed(_) | Event::SnapshotMissed => snapshot,
                Event::Ended { .. } => alive,
                Event::PersistBegan => !persisting,
                Event::PersistEnded(_) => persisting,
                _ => true,
            };
            if !possible {
                continue;
            }
            match &event {
                Event::Started => (starting, alive) = (false, true),
                Event::StartFailed { .. } | Event::StoreAway { .. } | Event::Impossible { .. } | Event::ImageFailed { .. } => starting = false,
                Event::SnapshotTaken { .. } | Event::SnapshotFailed(_) | Event::SnapshotMissed => snapshot = false,
                // The loop reports an end again that came during a snapshot.
                Event::Ended { .. } if !snapshot => alive = false,
                Event::PersistBegan => persisting = true,
                Event::PersistEnded(_) => persisting = false,
                _ => {}
            }
            let wish = match &event {
                Event::SnapshotNow(Reason::Request) => Some(Wish::Snapshot),
                Event::Suspend => Some(Wish::Suspend),
                Event::Resume => Some(Wish::Resume),
                Event::Hold(_) => Some(Wish::Hold),
                Event::Rewind { .. } => Some(Wish::Rewind),
                _ => None,
            };
            let admitted = wish.map(|wish| machine.admits(wish));
            let mut event = event;
            if let Event::Hold(until) = &mut event {
                if admitted != Some(Ok(())) {
                    continue;
                }
                *until = now + Duration::from_secs(seconds);
            }
            if event == Event::Release || held.is_some_and(|until| until <= now) {
                held = None;
            }
            let (holds, hold) = (held.is_some(), if let Event::Hold(until) = &event { Some(*until) } else { None });
            let before = machine.state().clone();
            let due = machine.deadline().is_some_and(|at| at <= now);
            let actions = machine.step(event, now);
            held = hold.or(held);
            if !matches!(machine.state(), State::Running(_)) {
                held = None;
            }
            prop_assert!(machine.held().is_none_or(|until| held.is_some_and(|bound| until <= bound)), "held for too long");
            if let Some((_, until)) = machine.held_off() {
                prop_assert!(machine.deadline().is_some_and(|at| at <= until), "what is held off is forgotten");
            }
            match (wish, admitted) {
                (Some(Wish::Snapshot), Some(Ok(()))) => {
                    let comes = machine.is_postponed() || machine.state().name() == "snapshotting";
                    prop_assert!(comes, "{before:?} admits a snapshot and takes none");
                }
                (Some(Wish::Suspend), Some(Ok(()))) => {
                    let comes = machine.is_suspending() || machine.state().name() == "suspended";
                    prop_assert!(comes, "{before:?} admits a suspension and forgets it");
                }
                (Some(Wish::Hold), Some(Ok(()))) => prop_assert_eq!(machine.held(), held, "{:?} admits a hold", before),
                (Some(Wish::Resume | Wish::Rewind), Some(Ok(()))) => {
                    prop_assert!(!actions.is_empty(), "{before:?} admits it and does nothing");
                }
                // If the time is over, every event shows that.
                (Some(_), Some(Err(why))) if !due => {
                    prop_assert!(actions.is_empty() && *machine.state() == before, "{before:?} refuses and acts: {why}");
                }
                _ => {}
            }
            check(actions, &mut alive, &mut starting, &mut snapshot, persisting, holds)?;
        }
        // Whatever came before, a stop ends it.
        for event in [Event::StopNow(TERM), Event::SnapshotFailed(Harm::None), Event::StartFailed { why: String::new() }] {
            now += Duration::from_secs(1);
            machine.step(event, now);
        }
        machine.step(killed(&[]), now);
        prop_assert_eq!(machine.state(), &State::Done);
    }
}

//! The effect of a hold on snapshots.

use super::*;

/// A running job that blocks snapshots for a minute from now on.
fn holding(config: &Config, now: Instant) -> Machine<'_> {
    let (mut machine, _) = Machine::new(config, StartPoint::Cold);
    machine.step(Event::Started, now);
    machine.step(Event::Hold(now + Duration::from_secs(60)), now);
    machine
}

#[test]
fn a_snapshot_waits_for_the_release_or_the_bound() {
    let (config, now) = (Config::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    for (event, reason) in [(NOW, Reason::Signal), (ASKED, Reason::Request), (Event::Suspend, Reason::Request)] {
        let mut machine = holding(&config, now);
        assert_eq!(machine.step(event.clone(), after(1)), []);
        assert_eq!((machine.held_off(), machine.deadline()), (Some((reason, after(60))), Some(after(60))));
        assert_eq!(machine.step(Event::Release, after(2)), [Action::Snapshot(reason)]);
        assert_eq!(machine.held(), None);
        let mut machine = holding(&config, now);
        machine.step(event, after(1));
        assert_eq!(machine.step(Event::Tick, after(59)), []);
        assert_eq!(machine.step(Event::Tick, after(60)), [Action::Snapshot(reason)]);
    }
    // The same for the interval; without a waiting snapshot, none is due afterwards.
    let mut machine = holding(&config, now);
    machine.step(Event::Hold(after(700)), now);
    assert_eq!(machine.step(Event::Tick, after(600)), []);
    assert_eq!(machine.step(Event::Release, after(601)), [Action::Snapshot(Reason::Interval)]);
    let mut machine = holding(&config, now);
    assert_eq!(machine.step(Event::Release, after(1)), []);
    assert_eq!(machine.step(NOW, after(1)), [Action::Snapshot(Reason::Signal)]);
}

#[test]
fn what_happened_by_the_bound_comes_before_a_snapshot() {
    let (config, now) = (Config::default(), Instant::now());
    let mut machine = holding(&config, now);
    machine.step(NOW, now);
    let actions = machine.step(killed(&[1]), now + Duration::from_secs(61));
    assert!(!actions.iter().any(|action| matches!(action, Action::Snapshot(_))), "{actions:?}");
    assert_eq!((machine.state().name(), machine.held()), ("waiting", None));
    let mut machine = holding(&config, now);
    machine.step(NOW, now);
    assert_eq!(machine.step(Event::PersistBegan, now + Duration::from_secs(61)), []);
    assert_eq!((machine.held(), machine.is_postponed()), (None, true));
    assert_eq!(machine.step(PERSISTED, now + Duration::from_secs(62)), [Action::Snapshot(Reason::Signal)]);
}

#[test]
fn what_waits_is_not_put_off_further() {
    let (config, now) = (Config::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    let mut machine = holding(&config, now);
    machine.step(NOW, now);
    assert!(machine.admits(Wish::Hold).is_err());
    machine.step(Event::Hold(after(90)), now);
    assert_eq!(machine.held(), Some(after(60)));
    machine.step(Event::Hold(after(30)), now);
    assert_eq!(machine.held(), Some(after(30)), "one of two let go");
    // While the snapshot waits for the store, a hold is accepted; it limits the wait once the image is stored.
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    machine.step(Event::Started, now);
    machine.step(Event::PersistBegan, now);
    machine.step(NOW, now);
    assert!(machine.admits(Wish::Hold).is_ok());
    machine.step(Event::Hold(after(60)), now);
    assert_eq!(machine.step(PERSISTED, after(1)), []);
    assert_eq!(machine.step(Event::Tick, after(60)), [Action::Snapshot(Reason::Signal)]);
    assert!(machine.admits(Wish::Hold).is_err(), "it may be frozen at any moment");
}

#[test]
fn a_last_snapshot_waits_while_there_is_time_for_it() {
    let (config, now) = (Config::default(), Instant::now());
    let after = |seconds| now + Duration::from_secs(seconds);
    let begins = |takes: Option<u64>, until| {
        let mut machine = holding(&config, now);
        machine.last_takes(takes.map(Duration::from_secs));
        assert_eq!(machine.step(Event::StopBy(TERM, after(until)), now), []);
        let at = machine.deadline().unwrap();
        assert_eq!(machine.step(Event::Tick, at), [Action::Snapshot(Reason::Final)]);
        at
    };
    assert_eq!(begins(Some(5), 30), after(25));
    assert_eq!(begins(Some(50), 30), now, "there is none to wait");
    assert_eq!(begins(None, 30), after(15), "nothing was measured");
    assert_eq!(begins(Some(5), 300), after(60));
    // A release before the time limit.
    let mut machine = holding(&config, now);
    machine.step(Event::Stop(TERM), now);
    assert!(machine.admits(Wish::Hold).is_err());
    assert_eq!(machine.step(Event::Release, after(1)), [Action::Snapshot(Reason::Final)]);
    // A second signal waits for nobody.
    let mut machine = holding(&config, now);
    machine.step(Event::Stop(TERM), now);
    assert_eq!(machine.step(Event::StopNow(TERM), after(1)), [Action::Kill]);
}

#[test]
fn nobody_holds_after_a_restart() {
    let (config, now) = (Config::default(), Instant::now());
    let mut machine = holding(&config, now);
    machine.step(killed(&[1]), now);
    assert_eq!(machine.held(), None);
    machine.step(Event::Hold(now + Duration::from_secs(60)), now);
    machine.step(rewind(1), now);
    machine.step(Event::Started, now);
    assert_eq!(machine.step(NOW, now), [Action::Snapshot(Reason::Signal)]);
}

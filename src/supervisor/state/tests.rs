use chrono::Utc;

use super::*;
use crate::policy::{Failure, Images, Occupied};
use rekindle_os::spawn::Ended;
use rekindle_store::ImageId;

mod holds;
mod invariants;

fn id(n: u32) -> ImageId {
    ImageId::new(n, chrono::DateTime::<Utc>::UNIX_EPOCH)
}

/// Passes events to a machine and keeps the time.
struct Bench {
    config: Config,
}

impl Bench {
    fn new() -> Bench {
        Bench { config: Config::default() }
    }

    fn run(&self, events: &[(u64, Event)]) -> (State, Vec<Action>) {
        let (mut machine, mut actions) = Machine::new(&self.config, StartPoint::Cold);
        let mut now = Instant::now();
        for (seconds, event) in events {
            now += Duration::from_secs(*seconds);
            actions.extend(machine.step(event.clone(), now));
        }
        (machine.state().clone(), actions)
    }
}

fn killed(images: &[u32]) -> Event {
    Event::Ended { ended: Ended::Signal(9), images: Images::good(images.iter().map(|n| id(*n))) }
}

#[test]
fn a_run_whose_images_cannot_be_read_may_be_started_again() {
    let mut config = Config::default();
    config.restart.cold_start = crate::config::ColdStart::Allow;
    let (mut machine, _) = Machine::new(&config, StartPoint::Image(id(1)));
    machine.step(Event::Started, Instant::now());
    let images = Images { unread: true, ..Images::default() };
    let actions = machine.step(Event::Ended { ended: Ended::Signal(9), images }, Instant::now());
    let [Action::Finish(Finish::Failed { why, last: None })] = &actions[..] else { panic!("{actions:?}") };
    assert!(why.contains("could not be read"), "{why}");
}

#[test]
fn a_job_that_dies_again_of_an_occupied_gpu_waits_until_it_is_quiet() {
    let config = Config::default();
    let (mut machine, _) = Machine::new(&config, StartPoint::Image(id(1)));
    let (now, soon) = (Instant::now(), Duration::from_secs(3));
    let dies = |machine: &mut Machine<'_>, at| {
        machine.step(Event::Started, at);
        machine.step(Event::Outside(Occupied::ByTheDead), at + soon);
        machine.step(killed(&[1]), at + soon)
    };
    let first = dies(&mut machine, now);
    assert!(matches!(first[..], [Action::Announce { .. }]), "{first:?}");
    assert_eq!(machine.step(Event::Quiet, now + soon), [], "nobody asked");
    machine.step(Event::Tick, now + soon + config.restart.backoff);
    let second = dies(&mut machine, now + soon * 2);
    assert!(matches!(second[..], [Action::AwaitQuiet, Action::Announce { .. }]), "{second:?}");
    assert_eq!(machine.step(Event::Tick, now + soon * 4), []);
    assert_eq!(machine.step(Event::Quiet, now + soon * 4), [Action::Start(StartPoint::Image(id(1)))]);
    // If they never are, the pause ends by itself.
    dies(&mut machine, now + soon * 5);
    let end = machine.state().deadline().unwrap();
    assert_eq!(machine.step(Event::Tick, end), [Action::Start(StartPoint::Image(id(1)))]);
}

const TAKEN: Event = Event::SnapshotTaken { freeze: Duration::from_secs(2) };
const NOW: Event = Event::SnapshotNow(Reason::Signal);
const TERM: Stop = Stop::Signal(15);

#[test]
fn the_happy_path() {
    let exit = Event::Ended { ended: Ended::Exit(0), images: Images::good([]) };
    let events = [(0, Event::Started), (600, Event::Tick), (1, TAKEN), (10, exit)];
    let (state, actions) = Bench::new().run(&events);
    assert_eq!(state, State::Done);
    let expected =
        [Action::Start(StartPoint::Cold), Action::Snapshot(Reason::Interval), Action::Finish(Finish::Completed)];
    assert_eq!(actions, expected);
}

#[test]
fn the_next_snapshot_is_an_interval_after_the_last() {
    let bench = Bench::new();
    let (state, _) = bench.run(&[(0, Event::Started), (599, Event::Tick)]);
    assert_eq!(state.name(), "running", "too early");
    let (mut machine, _) = Machine::new(&bench.config, StartPoint::Cold);
    let now = Instant::now();
    machine.step(Event::Started, now);
    let due = machine.state().deadline().unwrap();
    assert_eq!(due, now + Duration::from_secs(600));
    machine.step(Event::Tick, due);
    let done = due + Duration::from_secs(20);
    machine.step(TAKEN, done);
    assert_eq!(machine.state().deadline(), Some(done + Duration::from_secs(600)));
}

/// A machine that chooses its interval, with a running job.
fn choosing(config: &Config, failures: Failures, now: Instant) -> Machine<'_> {
    let (machine, _) = Machine::new(config, StartPoint::Cold);
    let mut machine = machine.recalling(Pace::recalled(failures, []));
    machine.step(Event::Started, now);
    machine
}

fn auto() -> Config {
    let mut config = Config::default();
    config.snapshot.interval = crate::config::Interval::Auto;
    config
}

#[test]
fn a_chosen_interval_follows_what_was_measured() {
    let (config, now) = (auto(), Instant::now());
    let mut machine = choosing(&config, Failures::default(), now);
    let first = machine.state().deadline().unwrap();
    assert_eq!((first, machine.choice()), (now + Duration::from_secs(60), None));
    machine.step(Event::Tick, first);
    let done = first + Duration::from_secs(7);
    machine.step(Event::PersistEnded(Some(Duration::from_secs(5))), done);
    machine.step(TAKEN, done);
    // sqrt(2 * 2s * 24h) is 588 s. The job ran for 67 s more than the assumed day.
    let choice = machine.choice().unwrap().clone();
    assert_eq!((choice.freeze, choice.persist), (Duration::from_secs(2), Some(Duration::from_secs(5))));
    assert_eq!(choice.mtbf, Duration::from_secs(24 * 3600 + 67));
    assert_eq!(choice.interval.as_secs(), 586);
    assert_eq!(machine.state().deadline(), Some(done + choice.interval));
}

#[test]
fn what_counts_as_a_failure() {
    let (config, now) = (auto(), Instant::now());
    let hours = |n: u64| Duration::from_secs(3600 * n);
    let after = |events: &[(u64, Event)]| {
        let mut machine = choosing(&config, Failures { uptime: hours(10), failures: 1 }, now);
        let mut now = now;
        for (seconds, event) in events {
            now += Duration::from_secs(*seconds);
            machine.step(event.clone(), now);
        }
        // Time without a running job is not counted.
        let later = if machine.state().life().is_some() { now } else { now + hours(5) };
        machine.failures(later)
    };
    let exit = |code| Event::Ended { ended: Ended::Exit(code), images: Images::good([]) };
    let expect = |uptime: Duration, failures| Failures { uptime: hours(10) + uptime, failures };
    assert_eq!(after(&[]), expect(Duration::ZERO, 1));
    assert_eq!(after(&[(3600, Event::Tick)]), expect(hours(1), 1), "it is still running");
    assert_eq!(after(&[(3600, killed(&[]))]), expect(hours(1), 2));
    assert_eq!(after(&[(3600, exit(2))]), expect(hours(1), 2), "it is given up, and its work is lost");
    assert_eq!(after(&[(3600, exit(0))]), expect(hours(1), 1), "it completed");
    assert_eq!(after(&[(29, killed(&[]))]), expect(Duration::from_secs(29), 1), "within restart.min-uptime");
    assert_eq!(after(&[(3600, Event::StopNow(TERM)), (0, killed(&[]))]), expect(hours(1), 1), "it was stopped");
    let lost = [(3600, NOW), (0, Event::SnapshotFailed(Harm::Lost)), (0, killed(&[]))];
    assert_eq!(after(&lost), expect(hours(1), 2), "it did not survive a snapshot");
    let lives = [(3600, killed(&[1])), (3600, Event::Tick), (0, Event::Started), (7200, killed(&[1]))];
    assert_eq!(after(&lives), expect(hours(3), 3));
}

#[test]
fn failed_snapshots_back_off_and_recover() {
    let bench = Bench::new();
    let (mut machine, _) = Machine::new(&bench.config, StartPoint::Cold);
    let now = Instant::now();
    machine.step(Event::Started, now);
    let mut waits = Vec::new();
    for _ in 0..8 {
        machine.step(NOW, now);
        machine.step(Event::SnapshotFailed(Harm::None), now);
        waits.push(machine.state().deadline().unwrap() - now);
    }
    let snapshot = &bench.config.snapshot;
    assert_eq!(waits[..3], [snapshot.retry_after, snapshot.retry_after * 2, snapshot.retry_after * 4]);
    assert_eq!(waits[7], snapshot.longest_retry());
    machine.step(NOW, now);
    machine.step(TAKEN, now);
    assert_eq!(machine.state().deadline(), Some(now + Duration::from_secs(600)));
}

#[test]
fn a_snapshot_that_failed_for_a_moment_is_tried_again_soon() {
    let config = Config::default();
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    let now = Instant::now();
    machine.step(Event::Started, now);
    let mut waits = Vec::new();
    for _ in 0..4 {
        machine.step(NOW, now);
        machine.step(Event::SnapshotMissed, now);
        waits.push(machine.state().deadline().unwrap() - now);
    }
    let again = config.snapshot.retry_after;
    assert_eq!(waits, [Duration::ZERO, Duration::from_secs(1), again, again * 2]);
    // A successful snapshot ends that.
    machine.step(NOW, now);
    machine.step(TAKEN, now);
    machine.step(NOW, now);
    machine.step(Event::SnapshotMissed, now);
    assert_eq!(machine.step(Event::Tick, now), [Action::Snapshot(Reason::Interval)]);
}

#[test]
fn the_last_snapshot_of_a_stop_that_failed_for_a_moment_is_tried_again() {
    let last = Action::Snapshot(Reason::Final);
    let missed =
        |n: usize| [vec![(0, Event::Started), (5, Event::Stop(TERM))], vec![(1, Event::SnapshotMissed); n]].concat();
    let then = |n, more: &[(u64, Event)]| Bench::new().run(&[&missed(n), more].concat()).1[1..].to_vec();
    let stopped = Action::Finish(Finish::Stopped(TERM));
    let ends = [Action::Kill, stopped.clone()];
    assert_eq!(then(2, &[(1, TAKEN), (0, killed(&[1]))]), [vec![last.clone(); 3], ends.to_vec()].concat());
    assert_eq!(then(3, &[]), [vec![last.clone(); 3], vec![Action::Terminate]].concat(), "not for ever");
    assert_eq!(then(0, &[(31, Event::SnapshotMissed)]), [last.clone(), Action::Terminate], "nor after its time");
    // The image that is being stored comes first.
    let busy = [(0, Event::PersistBegan), (0, Event::SnapshotMissed)];
    assert_eq!(then(0, &busy), std::slice::from_ref(&last));
    let stored = (1, Event::PersistEnded(None));
    assert_eq!(then(0, &[busy[0].clone(), busy[1].clone(), stored]), [last.clone(), last]);
}

#[test]
fn a_stop_takes_a_last_snapshot_and_kills() {
    let events = [(0, Event::Started), (5, Event::Stop(TERM)), (1, TAKEN), (0, killed(&[1]))];
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
    let (failed, exit) =
        (Event::SnapshotFailed(Harm::None), Event::Ended { ended: Ended::Exit(0), images: Images::good([]) });
    let last = |events: &[(u64, Event)]| Bench::new().run(events).1.pop();
    let told = [(0, Event::Started), (5, Event::Stop(TERM)), (1, failed.clone()), (1, exit.clone())];
    assert_eq!(last(&told), Some(Action::Finish(Finish::Stopped(TERM))));
    let before = [(0, Event::Started), (5, Event::Stop(TERM)), (1, exit), (0, failed)];
    // A scheduler sends SIGTERM to the job as well.
    assert_eq!(last(&before), Some(Action::Finish(Finish::Stopped(TERM))));
    let before =
        before.map(|(at, event)| (at, if event == Event::Stop(TERM) { Event::Stop(Stop::Requeue) } else { event }));
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
    assert!(matches!(state, State::Waiting { from: StartPoint::Image(i), .. } if i == id(3)), "{actions:?}");
}

#[test]
fn a_job_that_was_lost_in_a_snapshot_comes_back() {
    let events = [(0, Event::Started), (600, Event::Tick), (0, Event::SnapshotFailed(Harm::Lost)), (0, killed(&[2]))];
    let (state, actions) = Bench::new().run(&events);
    assert_eq!(actions[2], Action::Kill);
    assert!(matches!(state, State::Waiting { from: StartPoint::Image(i), .. } if i == id(2)));
}

#[test]
fn a_job_that_every_snapshot_ends_is_left_alone() {
    let bench = Bench::new();
    let (mut machine, _) = Machine::new(&bench.config, StartPoint::Cold);
    let mut now = Instant::now();
    let mut lives = |machine: &mut Machine<'_>, event: Event| {
        machine.step(Event::Started, now);
        now += Duration::from_secs(3600);
        let taken = machine.step(event, now);
        let last = machine.is_last_try();
        machine.step(Event::SnapshotFailed(Harm::Lost), now);
        machine.step(killed(&[]), now);
        now += Duration::from_secs(3600);
        assert_eq!(machine.step(Event::Tick, now), [Action::Start(StartPoint::Cold)]);
        (taken.contains(&Action::Snapshot(Reason::Interval)), last)
    };
    assert_eq!([(); 3].map(|()| lives(&mut machine, Event::Tick)), [(true, false), (true, false), (true, true)]);
    machine.step(Event::Started, now);
    assert_eq!((machine.deadline(), machine.next_snapshot()), (None, None));
    assert_eq!(machine.step(Event::Tick, now + Duration::from_secs(36_000)), []);
    // Somebody tries one: it fails, and does no harm.
    assert_eq!(machine.step(NOW, now), [Action::Snapshot(Reason::Signal)]);
    machine.step(Event::SnapshotFailed(Harm::None), now);
    assert_eq!(machine.deadline(), None, "it is not tried again by itself");
    machine.step(NOW, now);
    machine.step(TAKEN, now);
    assert_eq!(machine.deadline(), Some(now + Duration::from_secs(600)), "the interval goes on");
}

const PERSISTED: Event = Event::PersistEnded(Some(Duration::from_secs(40)));

#[test]
fn a_snapshot_waits_until_the_image_before_it_is_in_the_store() {
    let bench = Bench::new();
    let busy = [(0, Event::Started), (600, Event::Tick), (1, Event::PersistBegan), (0, TAKEN), (600, Event::Tick)];
    let (state, actions) = bench.run(&busy);
    assert_eq!((state.name(), actions.len()), ("running", 2), "the interval stretches");
    let (state, actions) = bench.run(&[busy.as_slice(), &[(40, PERSISTED)]].concat());
    assert_eq!((state.name(), actions.last()), ("snapshotting", Some(&Action::Snapshot(Reason::Interval))));
    // A requested snapshot waits as well.
    let asked = [busy[..4].to_vec(), vec![(1, NOW), (1, Event::PersistEnded(None))]].concat();
    assert_eq!(bench.run(&asked).1.last(), Some(&Action::Snapshot(Reason::Signal)));
}

#[test]
fn a_snapshot_that_a_signal_asks_for_while_the_job_starts_is_taken_then() {
    let bench = Bench::new();
    let (state, actions) = bench.run(&[(0, NOW), (1, Event::Started)]);
    assert_eq!((state.name(), actions.last()), ("snapshotting", Some(&Action::Snapshot(Reason::Signal))));
    // It waits for the image that is being stored.
    let busy = [(0, Event::PersistBegan), (0, NOW), (1, Event::Started)];
    assert_eq!(bench.run(&busy).0.name(), "running");
    let (state, actions) = bench.run(&[busy.as_slice(), &[(1, PERSISTED)]].concat());
    assert_eq!((state.name(), actions.last()), ("snapshotting", Some(&Action::Snapshot(Reason::Signal))));
    // One that waits when the job dies is not for the next life.
    let (state, actions) = bench
        .run(&[busy.as_slice(), &[(60, killed(&[1])), (1, PERSISTED), (0, Event::Tick), (1, Event::Started)]].concat());
    assert_eq!(state.name(), "running", "{actions:?}");
}

#[test]
fn a_stop_waits_for_its_last_snapshot_as_long_as_the_grace_lasts() {
    let bench = Bench::new();
    let busy = [(0, Event::Started), (600, Event::Tick), (1, Event::PersistBegan), (0, TAKEN), (5, Event::Stop(TERM))];
    let then = |more: &[(u64, Event)]| bench.run(&[&busy, more].concat()).1[2..].to_vec();
    let stopped = Action::Finish(Finish::Stopped(TERM));
    let all = then(&[(20, PERSISTED), (1, TAKEN), (0, killed(&[2]))]);
    assert_eq!(all, [Action::Snapshot(Reason::Final), Action::Kill, stopped.clone()]);
    assert_eq!(then(&[(30, Event::Tick), (0, killed(&[1]))]), [Action::Kill, stopped.clone()]);
    assert_eq!(then(&[(1, killed(&[1]))]), std::slice::from_ref(&stopped), "it is not started again");
    assert_eq!(then(&[(1, Event::StopNow(TERM)), (0, killed(&[1]))]), [Action::Kill, stopped.clone()]);
    let exit = Event::Ended { ended: Ended::Exit(0), images: Images::good([]) };
    assert_eq!(then(&[(1, exit)]), [stopped], "it may have been told to end");
}

#[test]
fn a_verdict_takes_the_place_of_the_decision_for_one_end() {
    let exit = |code| Event::Ended { ended: Ended::Exit(code), images: Images::good([id(3), id(2)]) };
    let last = |events: &[Event]| {
        let events: Vec<_> = [Event::Started].iter().chain(events).map(|event| (60, event.clone())).collect();
        Bench::new().run(&events)
    };
    let judged = |verdict| Event::Judged(verdict);
    // Exit code 2 alone is not worth another try.
    let (state, _) = last(&[judged(Verdict::Restart), exit(2)]);
    assert!(matches!(state, State::Waiting { from: StartPoint::Image(i), .. } if i == id(3)), "{state:?}");
    let (_, actions) = last(&[judged(Verdict::Rewind(id(2))), exit(1)]);
    assert_eq!(actions.last(), Some(&Action::Start(StartPoint::Image(id(2)))));
    let (_, actions) = last(&[judged(Verdict::Stop), exit(1)]);
    assert_eq!(actions.last(), Some(&Action::Finish(Finish::Stopped(Stop::Requeue))));
    let why = || "rule 1".to_string();
    let (_, actions) = last(&[judged(Verdict::GiveUp { why: why() }), exit(1)]);
    let failed = |ended| Some(Action::Finish(Finish::Failed { why: why(), last: Some(ended) }));
    assert_eq!(actions.last(), failed(Ended::Exit(1)).as_ref());
    // A job that completes does not need it.
    let (_, actions) = last(&[judged(Verdict::GiveUp { why: why() }), exit(0)]);
    assert_eq!(actions.last(), Some(&Action::Finish(Finish::Completed)));

    // A running job is killed first.
    let (state, actions) = last(&[Event::Condemn(Verdict::Restart), killed(&[3])]);
    assert_eq!(actions[1], Action::Kill);
    assert!(matches!(state, State::Waiting { from: StartPoint::Image(i), .. } if i == id(3)), "{state:?}");
    let (_, actions) = last(&[Event::Condemn(Verdict::GiveUp { why: why() }), killed(&[3])]);
    assert_eq!(actions.last(), failed(Ended::Signal(9)).as_ref());
    let (_, actions) = last(&[Event::Condemn(Verdict::Restart), Event::Stop(TERM), killed(&[3])]);
    assert_eq!(actions.last(), Some(&Action::Finish(Finish::Stopped(TERM))), "who asks for a stop gets one");
    // It applies to one life only.
    let again = [judged(Verdict::Stop), exit(0)];
    assert_eq!(last(&again).1.last(), Some(&Action::Finish(Finish::Completed)));
}

#[test]
fn an_image_that_went_while_its_restart_waited_is_not_waited_for() {
    // The image was only in memory, and the memory is gone.
    let gone = || Event::gone(id(2), Images::good([id(1)]));
    let died = [(0, Event::Started), (60, killed(&[2, 1])), (60, Event::Tick), (0, gone())];
    let (state, actions) = Bench::new().run(&died);
    assert!(matches!(state, State::Waiting { from: StartPoint::Image(i), .. } if i == id(1)), "{state:?}");
    let next = Action::Announce { from: StartPoint::Image(id(1)), after: Duration::ZERO };
    assert_eq!(actions.last(), Some(&next), "no attempt is counted");
}

const ASKED: Event = Event::SnapshotNow(Reason::Request);

fn rewind(n: u32) -> Event {
    Event::Rewind { image: id(n) }
}

#[test]
fn a_rewind_ends_the_life_that_there_is_and_starts_the_next_at_once() {
    let bench = Bench::new();
    let start = |n| Action::Start(StartPoint::Image(id(n)));
    let then = |events: &[(u64, Event)]| bench.run(events).1[1..].to_vec();
    let running = [(0, Event::Started), (5, rewind(1)), (0, killed(&[3, 2, 1]))];
    assert_eq!(then(&running), [Action::Kill, start(1)]);
    // A job that ends just then is rewound too, as requested.
    let exit = Event::Ended { ended: Ended::Exit(0), images: Images::good([id(3)]) };
    assert_eq!(then(&[(0, Event::Started), (5, rewind(1)), (0, exit)]), [Action::Kill, start(1)]);
    let starting = [(0, rewind(1)), (1, rewind(2)), (0, Event::StartFailed { why: "cancelled".into() })];
    assert_eq!(then(&starting), [Action::Cancel, Action::Cancel, start(2)]);
    let started = [(0, rewind(1)), (1, Event::Started), (0, killed(&[]))];
    assert_eq!(then(&started), [Action::Cancel, Action::Kill, start(1)]);
    let waiting = [(0, Event::Started), (5, killed(&[3])), (0, rewind(1))];
    assert_eq!(then(&waiting).last(), Some(&start(1)));
    // The snapshot releases the job first.
    let failed = Event::SnapshotFailed(Harm::None);
    let snapshotting = [(0, Event::Started), (5, NOW), (0, rewind(1)), (1, failed), (0, killed(&[3]))];
    let interval = Action::Snapshot(Reason::Signal);
    assert_eq!(then(&snapshotting), [interval, Action::Cancel, Action::Kill, start(1)]);
    // A stop has priority, before it and after.
    let stopped = Action::Finish(Finish::Stopped(TERM));
    let stop = [(0, Event::Started), (5, rewind(1)), (0, Event::Stop(TERM)), (0, killed(&[3]))];
    assert_eq!(then(&stop), [Action::Kill, Action::Kill, stopped.clone()]);
    let stop = [(0, Event::Started), (5, Event::StopNow(TERM)), (0, rewind(1)), (0, killed(&[3]))];
    assert_eq!(then(&stop), [Action::Kill, stopped]);
}

#[test]
fn what_is_asked_for_by_name_is_not_replaced_by_something_else() {
    let config = Config {
        restart: crate::config::Restart { cold_start: crate::config::ColdStart::Allow, ..Config::default().restart },
        ..Config::default()
    };
    let now = Instant::now();
    let failed = |n, failure: Failure, good: &[u32]| Event::ImageFailed {
        image: id(n),
        failure,
        images: Images::good(good.iter().map(|n| id(*n))),
    };
    let refused = || Failure::Refused("bad size".into());
    let (machine, _) = Machine::new(&config, StartPoint::Image(id(1)));
    let mut machine = machine.asked_for();
    // A second try is different.
    let first = machine.step(failed(1, refused(), &[1]), now);
    assert!(
        matches!(first[..], [Action::NotRestored { .. }, Action::Announce { from: StartPoint::Image(i), .. }] if i == id(1)),
        "{first:?}"
    );
    machine.step(Event::Tick, now + Duration::from_secs(60));
    let second = machine.step(failed(1, refused(), &[1]), now);
    let [Action::Mark(mark), Action::Finish(Finish::NoUsableImage { why })] = &second[..] else { panic!("{second:?}") };
    assert!(mark.image == id(1) && why.contains("the requested image") && why.contains("bad size"), "{why}");
    assert_eq!(machine.state(), &State::Done);
    // Once the job ran, its end is treated as any other.
    let (machine, _) = Machine::new(&config, StartPoint::Image(id(1)));
    let mut machine = machine.asked_for();
    machine.step(Event::Started, now);
    machine.step(killed(&[1]), now + Duration::from_secs(60));
    machine.step(Event::Tick, now + Duration::from_secs(120));
    let actions = machine.step(failed(1, Failure::Damaged, &[]), now);
    assert!(matches!(actions[..], [Action::Announce { from: StartPoint::Cold, .. }]), "{actions:?}");
    // A rewind returns to where the job was, and never to its beginning.
    for (good, ends) in [(&[2][..], false), (&[], true)] {
        let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
        machine.step(Event::Started, now);
        machine.step(rewind(1), now);
        assert_eq!(machine.step(killed(&[2, 1]), now), [Action::Start(StartPoint::Image(id(1)))]);
        let actions = machine.step(failed(1, Failure::NotNow("no".into()), good), now);
        assert_eq!(machine.state() == &State::Done, ends, "{actions:?}");
    }
}

#[test]
fn a_rewind_is_no_failure() {
    let config = auto();
    let now = Instant::now();
    let mut machine = choosing(&config, Failures::default(), now);
    for n in 1..50 {
        let later = now + Duration::from_secs(60 * n);
        machine.step(rewind(1), later);
        assert_eq!(machine.step(killed(&[1]), later), [Action::Start(StartPoint::Image(id(1)))]);
        machine.step(Event::Started, later);
    }
    assert_eq!(machine.failures(now + Duration::from_secs(3000)).failures, 0);
    // None of them counts for restart.max-restarts, and the image stays good.
    let actions = machine.step(killed(&[1]), now + Duration::from_secs(3000));
    assert!(matches!(actions[..], [Action::Announce { from: StartPoint::Image(i), .. }] if i == id(1)), "{actions:?}");
}

#[test]
fn a_suspended_job_rests_until_it_is_called_back() {
    let bench = Bench::new();
    let suspended = [(0, Event::Started), (5, Event::Suspend), (1, TAKEN), (0, killed(&[4, 3]))];
    let (state, actions) = bench.run(&suspended);
    assert_eq!(state, State::Suspended { from: StartPoint::Image(id(4)) });
    assert_eq!(actions[1..], [Action::Snapshot(Reason::Request), Action::Kill]);
    let then = |more: &[(u64, Event)]| bench.run(&[&suspended, more].concat()).1[3..].to_vec();
    let quiet = [(9000, Event::Tick), (0, NOW), (0, ASKED), (0, Event::Suspend), (0, PERSISTED)];
    assert_eq!(then(&quiet), []);
    assert_eq!(then(&[(9, Event::Resume)]), [Action::Start(StartPoint::Image(id(4)))]);
    assert_eq!(then(&[(9, rewind(3))]), [Action::Start(StartPoint::Image(id(3)))]);
    assert_eq!(then(&[(9, Event::Stop(TERM))]), [Action::Finish(Finish::Stopped(TERM))]);
}

/// A job that is suspended and resumed many times has no deaths between its starts.
#[test]
fn tries_before_a_start_that_succeeded_do_not_count_at_the_next() {
    let busy = || Event::StartFailed { why: "the GPU is busy".into() };
    let tries = [(0, busy()), (60, Event::Tick), (0, busy()), (60, Event::Tick), (0, Event::Started)];
    let rests = [(5, Event::Suspend), (1, TAKEN), (0, killed(&[4])), (0, Event::Resume)];
    let (state, actions) = Bench::new().run(&[&tries[..], &rests, &tries, &rests, &tries].concat());
    assert_eq!(state.name(), "running", "{actions:?}");
}

#[test]
fn a_suspension_whose_snapshot_fails_leaves_the_job_alone() {
    let bench = Bench::new();
    let asked = [(0, Event::Started), (5, Event::Suspend)];
    let failed = bench.run(&[&asked[..], &[(1, Event::SnapshotFailed(Harm::None))]].concat());
    assert_eq!((failed.0.name(), failed.1.len()), ("running", 2));
    let lost = bench.run(&[&asked[..], &[(1, Event::SnapshotFailed(Harm::Lost)), (0, killed(&[1]))]].concat());
    assert_eq!(lost.0.name(), "waiting");
    // It waits for the previous image; a completed job is not resumed.
    let busy = [(0, Event::Started), (0, Event::PersistBegan), (5, Event::Suspend), (1, ASKED)];
    assert_eq!(bench.run(&busy).1.len(), 1);
    let exit = Event::Ended { ended: Ended::Exit(0), images: Images::good([id(1)]) };
    let done = bench.run(&[&busy[..], &[(1, PERSISTED), (1, TAKEN), (0, exit)]].concat());
    assert_eq!(done.1[1..], [Action::Snapshot(Reason::Request), Action::Kill, Action::Finish(Finish::Completed)]);
}

#[test]
fn a_snapshot_that_is_asked_for_during_another_comes_after_it() {
    let bench = Bench::new();
    let during = [(0, Event::Started), (600, Event::Tick), (0, ASKED)];
    let then = |more: &[(u64, Event)]| bench.run(&[&during, more].concat()).1[2..].to_vec();
    let again = Action::Snapshot(Reason::Request);
    assert_eq!(then(&[(1, TAKEN)]), std::slice::from_ref(&again));
    assert_eq!(then(&[(1, Event::SnapshotFailed(Harm::None))]), std::slice::from_ref(&again));
    assert_eq!(then(&[(1, Event::PersistBegan), (0, TAKEN)]), []);
    assert_eq!(then(&[(1, Event::PersistBegan), (0, TAKEN), (1, PERSISTED)]), [again]);
    // A signal only says that a snapshot is wanted soon.
    let (_, actions) = bench.run(&[(0, Event::Started), (600, Event::Tick), (0, NOW), (1, TAKEN)]);
    assert_eq!(actions.len(), 2);
}

#[test]
fn what_can_not_be_had_is_refused() {
    let config = Config::default();
    let now = Instant::now();
    let after = |events: &[Event]| {
        let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
        events.iter().for_each(|event| drop(machine.step(event.clone(), now)));
        [Wish::Snapshot, Wish::Suspend, Wish::Resume, Wish::Rewind].map(|wish| machine.admits(wish).is_ok())
    };
    let suspended = [Event::Started, Event::Suspend, TAKEN, killed(&[1])];
    assert_eq!(after(&[]), [false, false, false, true], "starting");
    assert_eq!(after(&[Event::Started]), [true, true, false, true], "running");
    assert_eq!(after(&[Event::Started, NOW]), [true, true, false, true], "snapshotting");
    assert_eq!(after(&suspended[..3]), [false, true, false, true], "suspending");
    assert_eq!(after(&suspended), [false, true, true, true], "suspended");
    assert_eq!(after(&[Event::Started, killed(&[1])]), [false, true, false, true], "waiting");
    assert_eq!(after(&[Event::Started, Event::Stop(TERM)]), [false; 4], "stopping");
    assert_eq!(after(&[Event::Stop(TERM)]), [false; 4], "stopping");
    assert_eq!(after(&[Event::Started, Event::PersistBegan, Event::Stop(TERM)]), [false; 4], "a stop waits");
}

#[test]
fn a_stop_with_a_time_of_its_own_is_bound_by_that() {
    let config = Config::default();
    let now = Instant::now();
    let until = now + Duration::from_secs(300);
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    machine.step(Event::Started, now);
    assert_eq!(machine.step(Event::StopBy(Stop::Requeue, until), now), [Action::Snapshot(Reason::Final)]);
    assert_eq!(machine.deadline(), Some(until));
    // A first signal changes nothing: the stop is in progress.
    assert_eq!(machine.step(Event::Stop(TERM), now), []);
    assert_eq!(machine.step(Event::Tick, until - Duration::from_secs(1)), []);
    assert_eq!(machine.step(Event::Tick, until), [Action::Cancel, Action::Kill]);
    assert_eq!(machine.step(killed(&[]), until), [Action::Finish(Finish::Stopped(Stop::Requeue))]);
    // It waits for the previous image.
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    machine.step(Event::Started, now);
    machine.step(Event::PersistBegan, now);
    assert_eq!(machine.step(Event::StopBy(Stop::Requeue, until), now), []);
    assert_eq!(machine.deadline(), Some(until));
    assert_eq!(machine.step(PERSISTED, now), [Action::Snapshot(Reason::Final)]);
}

#[test]
fn near_the_last_snapshot_none_is_begun_by_the_interval() {
    let config = Config::default();
    let now = Instant::now();
    let due = now + Duration::from_secs(600);
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    machine.step(Event::Started, now);
    machine.no_interval_from(Some(due));
    assert_eq!((machine.deadline(), machine.step(Event::Tick, due)), (None, vec![]));
    machine.step(Event::PersistBegan, due);
    machine.step(Event::Tick, due);
    assert!(!machine.is_postponed());
    machine.step(PERSISTED, due);
    assert_eq!(machine.step(NOW, due), [Action::Snapshot(Reason::Signal)], "who asks gets one");
    machine.step(TAKEN, due);
    // The deadline was postponed: there is time again.
    let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
    machine.step(Event::Started, now);
    machine.no_interval_from(Some(due));
    machine.no_interval_from(Some(due + Duration::from_millis(1)));
    assert_eq!(machine.deadline(), Some(due));
    assert_eq!(machine.step(Event::Tick, due), [Action::Snapshot(Reason::Interval)]);
}

#[test]
fn every_stop_ends_every_state() {
    let config = Config::default();
    let now = Instant::now();
    let until = now + Duration::from_secs(60);
    let started = vec![Event::Started];
    let with = |more: &[Event]| [&started, more].concat();
    let states = [
        ("starting", vec![]),
        ("running", started.clone()),
        ("running", with(&[Event::PersistBegan])),
        ("snapshotting", with(&[NOW])),
        ("snapshotting", with(&[Event::Stop(TERM)])),
        ("stopping", with(&[Event::StopNow(TERM)])),
        ("waiting", with(&[killed(&[1])])),
        ("suspended", with(&[Event::Suspend, TAKEN, killed(&[1])])),
    ];
    for (name, before) in states {
        for stop in [Event::Stop(TERM), Event::StopNow(TERM), Event::StopBy(Stop::Requeue, until)] {
            for twice in [None, Some(Event::StopNow(TERM))] {
                let (mut machine, _) = Machine::new(&config, StartPoint::Cold);
                let mut actions: Vec<Action> =
                    before.iter().flat_map(|event| machine.step(event.clone(), now)).collect();
                assert_eq!(machine.state().name(), name, "{before:?}");
                actions.extend(machine.step(stop.clone(), now));
                twice.iter().for_each(|event| actions.extend(machine.step(event.clone(), now)));
                // Everything that can still be reported, and then the time limit.
                for event in [PERSISTED, TAKEN, killed(&[1])] {
                    actions.extend(machine.step(event, now));
                }
                actions.extend(machine.step(Event::StartFailed { why: String::new() }, now));
                let context = format!("{name} {before:?} {stop:?} {twice:?}: {actions:?}");
                assert_eq!(machine.state(), &State::Done, "{context}");
                assert!(matches!(actions.last(), Some(Action::Finish(Finish::Stopped(_)))), "{context}");
            }
        }
    }
}

use chrono::DateTime;

use super::*;

fn policy() -> Restart {
    crate::config::Config::default().restart
}

fn id(n: u32) -> ImageId {
    ImageId::new(n, DateTime::UNIX_EPOCH)
}

const CRASH: Death = Death::Ended(Ended::Signal(libc::SIGSEGV));
const KILLED: Death = Death::Ended(Ended::Signal(libc::SIGKILL));
const SOON: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(100);

fn from(decision: &Decision) -> StartPoint {
    match decision {
        Decision::Again { from, .. } => *from,
        other => panic!("not again: {other:?}"),
    }
}

#[test]
fn exit_codes_decide() {
    let end = |code| {
        let death = Death::Ended(Ended::Exit(code));
        History::default().after_death(
            death,
            StartPoint::Cold,
            LATER,
            &Images::good([id(1)]),
            &policy(),
            Instant::now(),
        )
    };
    assert_eq!(end(0), Decision::Complete);
    assert_eq!(from(&end(1)), StartPoint::Image(id(1)));
    assert_eq!(from(&end(75)), StartPoint::Image(id(1)));
    for code in [2, 126, 127] {
        assert!(matches!(end(code), Decision::GiveUp { why, .. } if why.contains("[[rules]]")));
    }
}

#[test]
fn down_the_ladder() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.cold_start = ColdStart::Allow;
    let (new, old) = (id(2), id(1));
    // The newest image is tried twice.
    assert_eq!(
        from(&history.after_death(CRASH, StartPoint::Cold, LATER, &Images::good([new, old]), &p, now)),
        StartPoint::Image(new)
    );
    let second = history.after_death(CRASH, StartPoint::Image(new), SOON, &Images::good([new, old]), &p, now);
    assert_eq!(from(&second), StartPoint::Image(new));
    let third = history.after_death(CRASH, StartPoint::Image(new), SOON, &Images::good([new, old]), &p, now);
    let Decision::Again { from: then, after, mark: Some(mark) } = third else { panic!("{third:?}") };
    assert_eq!((then, after, mark.image, mark.why), (StartPoint::Image(old), Duration::ZERO, new, BadWhy::DiesAgain));
    assert!(mark.detail.contains("signal SIGSEGV"), "{}", mark.detail);
    // The older image is damaged; then two starts from the beginning; then it is given up.
    let damaged = history.after_image_failure(old, &Failure::Damaged, &Images::good([]), &p, now);
    assert_eq!(from(&damaged), StartPoint::Cold);
    assert_eq!(from(&history.after_death(CRASH, StartPoint::Cold, SOON, &Images::good([]), &p, now)), StartPoint::Cold);
    let last = history.after_death(CRASH, StartPoint::Cold, SOON, &Images::good([]), &p, now);
    assert!(matches!(last, Decision::GiveUp { ref why, .. } if why.contains("no good image")), "{last:?}");
}

/// A GPU was occupied by what had died before: the image is not to blame, and no pause grows.
#[test]
fn deaths_from_what_occupied_a_gpu_say_nothing_about_the_image() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let images = Images::good([id(2), id(1)]);
    let crash = Death::Outside(Ended::Signal(libc::SIGSEGV), Occupied::ByTheDead);
    let mut again = |death, uptime| {
        let decision = history.after_death(death, StartPoint::Image(id(2)), uptime, &images, &p, now);
        let Decision::Again { from, after, mark: None } = decision else { panic!("{decision:?}") };
        assert_eq!(from, StartPoint::Image(id(2)), "not an older one");
        (after, history.waits_until_quiet())
    };
    assert_eq!(again(crash, SOON), (p.backoff, false), "once");
    for _ in 2..=OUTSIDE {
        assert_eq!(again(crash, SOON), (QUIET, true), "in a row");
    }
    // As for any other reason that is not the image.
    assert_eq!(again(crash, SOON), (p.backoff, false), "too often");
    assert_eq!(again(KILLED, SOON), (p.backoff * 2, false), "another reason");
    assert_eq!(again(crash, SOON).0, p.backoff, "the row begins again");
    assert!(!again(crash, LATER).1, "it lived for long");
    assert!(!again(crash, SOON).1, "so the row begins again");
}

/// Another program goes on: the pauses grow, or the restarts that are allowed would soon be used up.
#[test]
fn beside_another_program_the_pauses_grow_and_the_image_stays() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let images = Images::good([id(2), id(1)]);
    let crash = Death::Outside(Ended::Signal(libc::SIGSEGV), Occupied::ByOthers);
    for n in 0..OUTSIDE {
        let decision = history.after_death(crash, StartPoint::Image(id(2)), SOON, &images, &p, now);
        let Decision::Again { from, after, mark: None } = decision else { panic!("{decision:?}") };
        assert_eq!((from, after), (StartPoint::Image(id(2)), p.backoff * 2u32.pow(n)));
        assert!(!history.waits_until_quiet());
    }
}

#[test]
fn a_job_whose_images_cannot_be_read_is_not_decided_about() {
    let unread = Images { unread: true, ..Images::default() };
    for cold_start in [ColdStart::Never, ColdStart::NoImages, ColdStart::Allow] {
        let p = Restart { cold_start, ..policy() };
        for start in [StartPoint::Cold, StartPoint::Image(id(1))] {
            for uptime in [SOON, LATER] {
                let after = History::default().after_death(CRASH, start, uptime, &unread, &p, Instant::now());
                assert_eq!(after, Decision::Unread, "{cold_start:?} {start:?}");
            }
        }
        let ended = Death::Ended(Ended::Exit(0));
        let after = History::default().after_death(ended, StartPoint::Cold, SOON, &unread, &p, Instant::now());
        assert_eq!(after, Decision::Complete);
    }
}

#[test]
fn a_job_is_not_started_from_nothing_over_its_images() {
    let (p, now) = (policy(), Instant::now());
    let others = Images { others: true, ..Images::default() };
    let damaged =
        |images: &Images, p: &Restart| History::default().after_image_failure(id(9), &Failure::Damaged, images, p, now);
    let stranded = |decision: &Decision| matches!(decision, Decision::NoUsableImage { .. });
    assert!(stranded(&damaged(&others, &p)));
    assert!(stranded(&History::default().after_death(CRASH, StartPoint::Cold, LATER, &others, &p, now)));
    // The last good image is marked now.
    let mut history = History::default();
    let (last, images) = (StartPoint::Image(id(1)), Images::good([id(1)]));
    assert_eq!(from(&history.after_death(CRASH, last, SOON, &images, &p, now)), last);
    let second = history.after_death(CRASH, last, SOON, &images, &p, now);
    assert!(stranded(&second) && second.mark().is_some_and(|mark| mark.image == id(1)), "{second:?}");
    // Without any image there is nothing to lose, and with a usable one there is nothing to decide.
    let cold = History::default().after_death(CRASH, StartPoint::Cold, LATER, &Images::default(), &p, now);
    assert_eq!(from(&cold), StartPoint::Cold);
    let some = Images { others: true, ..Images::good([id(1)]) };
    assert_eq!(
        from(&History::default().after_death(CRASH, StartPoint::Cold, LATER, &some, &p, now)),
        StartPoint::Image(id(1))
    );
    let allowed = Restart { cold_start: ColdStart::Allow, ..p };
    assert_eq!(from(&damaged(&others, &allowed)), StartPoint::Cold);
}

#[test]
fn no_cold_start_where_it_is_forbidden() {
    let mut p = policy();
    p.cold_start = ColdStart::Never;
    let decision =
        History::default().after_death(CRASH, StartPoint::Cold, LATER, &Images::good([]), &p, Instant::now());
    assert!(matches!(decision, Decision::GiveUp { ref why, .. } if why.contains("`rekindle run --fresh`")));
}

#[test]
fn the_limit_holds_within_its_window_and_backs_off() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.max_restarts = 3;
    let mut waits = Vec::new();
    for _ in 0..3 {
        match history.after_death(CRASH, StartPoint::Cold, LATER, &Images::good([id(1)]), &p, now) {
            Decision::Again { after, .. } => waits.push(after),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(waits, [Duration::ZERO, p.backoff, p.backoff * 2]);
    let fourth = history.after_death(CRASH, StartPoint::Cold, LATER, &Images::good([id(1)]), &p, now);
    assert!(matches!(fourth, Decision::GiveUp { ref why, .. } if why.contains("max-restarts")));
    let after_window = now + WINDOW + SOON;
    assert!(matches!(
        history.after_death(CRASH, StartPoint::Cold, LATER, &Images::good([id(1)]), &p, after_window),
        Decision::Again { .. }
    ));
}

#[test]
fn healthy_uptime_forgives() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.max_restarts = 1;
    let healthy = HEALTHY_UPTIME;
    for _ in 0..5 {
        let decision = history.after_death(CRASH, StartPoint::Image(id(1)), healthy, &Images::good([id(1)]), &p, now);
        assert!(matches!(decision, Decision::Again { after, mark: None, .. } if after.is_zero()));
    }
}

#[test]
fn a_hang_is_not_restored_from_an_image_of_it() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let hangs = |history: &mut History, from, uptime, good: &[u32], stuck: &[u32]| {
        let stuck = stuck.iter().map(|n| id(*n)).collect();
        let images = Images { stuck, ..Images::good(good.iter().map(|n| id(*n))) };
        let decision = history.after_death(Death::Hung, from, uptime, &images, &p, now);
        (self::from(&decision), decision.mark().map(|mark| mark.image))
    };
    let image = |n| StartPoint::Image(id(n));
    // However long it lived.
    let healthy = HEALTHY_UPTIME * 3;
    assert_eq!(hangs(&mut history, StartPoint::Cold, healthy, &[3, 2, 1], &[3, 2]), (image(1), None));
    assert_eq!(hangs(&mut history, image(1), healthy, &[3, 2, 1], &[]), (image(1), None), "it made progress");
    // It takes a new image, and hangs again: then that is the newest, and older ones of the first hang stay out.
    assert_eq!(hangs(&mut history, image(1), healthy, &[5, 4, 3, 2, 1], &[5]), (image(4), None));
    let gone = Failure::FilesGone("/data".into());
    let images = Images::good([5, 3, 2, 1].map(id));
    assert_eq!(from(&history.after_image_failure(id(4), &gone, &images, &p, now)), image(1));
    // Without any progress after its restore, it is marked the second time, while there is one from before the hang.
    let mut other = history.clone();
    assert_eq!(hangs(&mut other, image(2), healthy, &[3, 2, 1], &[2]), (image(1), None), "it is passed over already");
    assert_eq!(hangs(&mut other, image(6), healthy, &[6, 1], &[6]), (image(6), None));
    assert_eq!(hangs(&mut other, image(6), healthy, &[6, 1], &[6]), (image(1), Some(id(6))));
    // If only images of a hang are left, it may come from outside, and a mark would end the run.
    assert_eq!(hangs(&mut history, image(1), healthy, &[3, 2, 1], &[1]), (image(1), None));
    assert_eq!(hangs(&mut history, image(1), healthy, &[3, 2, 1], &[1]), (image(1), None));
}

#[test]
fn after_a_rewind_to_an_image_of_a_hang_the_way_back_has_no_pause() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let images = |stuck: &[u32]| Images {
        stuck: stuck.iter().map(|n| id(*n)).collect(),
        proven: BTreeSet::from([id(1)]),
        ..Images::good([id(2), id(1)])
    };
    let image = |n| StartPoint::Image(id(n));
    assert_eq!(from(&history.after_death(Death::Hung, image(1), LATER, &images(&[2]), &p, now)), image(1));
    assert_eq!(from(&history.after_death(KILLED, image(1), LATER, &images(&[]), &p, now)), image(1));
    // The user has it restored, and it hangs.
    let back = history.after_death(Death::Hung, image(2), LATER, &images(&[2]), &p, now);
    assert_eq!(back, Decision::Again { from: image(1), after: Duration::ZERO, mark: None });
}

#[test]
fn a_job_that_has_only_images_of_its_hang_is_given_up() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    // It hung before its first image, and each life takes more of them.
    let (mut from, mut good, mut lives) = (StartPoint::Cold, vec![id(1)], 0);
    loop {
        let images = Images { stuck: good.iter().copied().collect(), ..Images::good(good.iter().rev().copied()) };
        let decision = history.after_death(Death::Hung, from, HEALTHY_UPTIME, &images, &p, now);
        good.retain(|image| decision.mark().is_none_or(|mark| mark.image != *image));
        good.push(id(lives + 2));
        match decision {
            Decision::Again { from: next, .. } => (from, lives) = (next, lives + 1),
            Decision::GiveUp { why, .. } => {
                assert!(why.contains("4 restores") && why.contains("--fresh"), "{why}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(lives, 4);
}

#[test]
fn a_proven_image_is_not_marked_for_hangs_but_passed_over() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let (stuck, proven) = (BTreeSet::from([id(2)]), BTreeSet::from([id(1), id(2)]));
    let images = Images { stuck, proven, ..Images::good([id(2), id(1)]) };
    let mut hangs = || history.after_death(Death::Hung, StartPoint::Image(id(2)), HEALTHY_UPTIME, &images, &p, now);
    let seen: Vec<(StartPoint, bool)> = (0..4).map(|_| hangs()).map(|it| (from(&it), it.mark().is_some())).collect();
    let (again, older) = ((StartPoint::Image(id(2)), false), (StartPoint::Image(id(1)), false));
    assert_eq!(seen, [again, again, again, older]);
}

#[test]
fn a_job_that_comes_no_further_from_an_image_goes_back_to_an_older_one() {
    let (p, now) = (Restart { max_restarts: 100, ..policy() }, Instant::now());
    for uptime in [LATER, HEALTHY_UPTIME * 2] {
        let mut history = History::default();
        let mut dies = |image, death, uptime, images: &[u32]| {
            let images = Images::good(images.iter().map(|n| id(*n)));
            let decision = history.after_death(death, StartPoint::Image(id(image)), uptime, &images, &p, now);
            assert_eq!(decision.mark(), None, "it may be something else");
            from(&decision)
        };
        let image = |n| StartPoint::Image(id(n));
        // It takes an image in each life.
        for n in 1..6 {
            assert_eq!(dies(n, CRASH, uptime, &[n + 1, n]), image(n + 1));
        }
        // Then it takes none any more, and dies at the same moment each time.
        for _ in 0..3 {
            assert_eq!(dies(6, CRASH, uptime, &[6, 5]), image(6));
        }
        assert_eq!(dies(6, CRASH, uptime + SOON, &[6, 5]), image(5));
        // From there it comes further.
        assert_eq!(dies(5, CRASH, uptime, &[7, 6, 5]), image(7));
        // Ends from outside, and ends at other moments, say nothing about the image.
        for n in 0..8 {
            assert_eq!(dies(7, KILLED, uptime, &[7, 6, 5]), image(7));
            assert_eq!(dies(7, CRASH, uptime * (1 + n % 2), &[7, 6, 5]), image(7));
        }
    }
}

fn wait(decision: &Decision) -> Duration {
    match decision {
        Decision::Again { after, .. } => *after,
        other => panic!("not again: {other:?}"),
    }
}

#[test]
fn a_job_that_makes_progress_is_restarted_at_once() {
    let (p, now) = (policy(), Instant::now());
    let mut history = History::default();
    let mut dies = |from, uptime, images: &[u32]| {
        let images = Images::good(images.iter().map(|n| id(*n)));
        wait(&history.after_death(KILLED, from, uptime, &images, &p, now))
    };
    let image = |n| StartPoint::Image(id(n));
    assert_eq!(dies(StartPoint::Cold, LATER, &[1]), Duration::ZERO);
    assert_eq!(dies(image(1), LATER, &[1]), p.backoff, "it took no image");
    assert_eq!(dies(StartPoint::Cold, LATER, &[1]), p.backoff * 2, "that one is of an earlier life");
    assert_eq!(dies(image(1), LATER, &[2, 1]), Duration::ZERO, "it took one");
    assert_eq!(dies(image(2), SOON, &[3, 2, 1]), p.backoff, "it took one, and died soon");
    assert_eq!(dies(image(3), LATER, &[3, 2, 1]), p.backoff * 2);
    assert_eq!(dies(image(3), HEALTHY_UPTIME, &[3, 2, 1]), Duration::ZERO);
}

#[test]
fn short_lives_that_each_take_an_image_do_not_wait_longer_each_time() {
    let (p, now) = (Restart { max_restarts: 100, ..policy() }, Instant::now());
    let mut history = History::default();
    for n in 1..10 {
        let images = Images::good([id(n + 1), id(n)]);
        let decision = history.after_death(KILLED, StartPoint::Image(id(n)), SOON, &images, &p, now);
        assert_eq!((from(&decision), wait(&decision)), (StartPoint::Image(id(n + 1)), p.backoff), "life {n}");
    }
    let none = history.after_death(KILLED, StartPoint::Image(id(10)), SOON, &Images::good([id(10)]), &p, now);
    assert_eq!(wait(&none), p.backoff * 2, "a life without one");
}

#[test]
fn a_job_that_never_ran_well_waits_from_the_beginning() {
    let (mut history, p, now) = (History::default(), policy(), Instant::now());
    let early = history.after_death(CRASH, StartPoint::Cold, SOON, &Images::default(), &p, now);
    assert_eq!(wait(&early), p.backoff);
    let mut history = History::default();
    let failure = Failure::Unexplained("CRIU gave no reason".into());
    let failed = history.after_image_failure(id(1), &failure, &Images::good([id(1)]), &p, now);
    assert_eq!(wait(&failed), p.backoff);
}

#[test]
fn the_machine_is_not_the_images_fault() {
    let (mut history, p) = (History::default(), policy());
    for _ in 0..5 {
        let decision = history.after_machine_failure(StartPoint::Image(id(1)), "no driver", &p);
        assert!(matches!(decision, Decision::Again { from: StartPoint::Image(_), mark: None, .. }));
    }
    // A start that succeeds shows that the machine is well.
    history.has_started();
    for _ in 0..5 {
        let decision = history.after_machine_failure(StartPoint::Image(id(1)), "no driver", &p);
        assert!(matches!(decision, Decision::Again { .. }), "{decision:?}");
    }
    let last = history.after_machine_failure(StartPoint::Image(id(1)), "no driver", &p);
    assert!(matches!(last, Decision::GiveUp { ref why, mark: None } if why.contains("no driver")));
}

#[test]
fn a_store_that_is_away_for_some_minutes_does_not_end_the_run() {
    let (mut history, p, start) = (History::default(), policy(), Instant::now());
    let image = StartPoint::Image(id(1));
    // Twice: a start that succeeds begins the count again.
    for _ in 0..2 {
        let mut waited = Duration::ZERO;
        loop {
            match history.after_store_failure(image, "EIO", &p, start + waited) {
                Decision::Again { from, after, mark: None } => {
                    assert!(from == image && after <= STORE_AGAIN, "soon after the store is back");
                    waited += after;
                }
                Decision::GiveUp { why, mark: None } => {
                    assert!(why.contains("the store could not be read for 5m") && why.contains("EIO"), "{why}");
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert!(waited >= STORE_PATIENCE && waited <= STORE_PATIENCE + STORE_AGAIN, "{waited:?}");
        history.has_started();
    }
}

/// Plays one history; returns the image used each time, the wait, and the mark.
struct Walk {
    history: History,
    images: Images,
    policy: Restart,
}

impl Walk {
    fn new(good: &[u32]) -> Walk {
        Walk { history: History::default(), images: Images::good(good.iter().map(|n| id(*n))), policy: policy() }
    }

    fn step(&mut self, decision: Decision) -> (u32, bool, Option<u32>) {
        let mark = decision.mark().map(|mark| mark.image);
        self.images.good.retain(|id| Some(*id) != mark);
        match decision {
            Decision::Again { from: StartPoint::Image(id), after, .. } => {
                (id.sequence(), after.is_zero(), mark.map(|id| id.sequence()))
            }
            other => panic!("{other:?}"),
        }
    }

    fn dies(&mut self, image: u32, death: Death) -> (u32, bool, Option<u32>) {
        let now = Instant::now();
        let decision =
            self.history.after_death(death, StartPoint::Image(id(image)), SOON, &self.images, &self.policy, now);
        self.step(decision)
    }

    fn fails(&mut self, image: u32, failure: Failure) -> (u32, bool, Option<u32>) {
        let now = Instant::now();
        let decision = self.history.after_image_failure(id(image), &failure, &self.images, &self.policy, now);
        self.step(decision)
    }
}

const WAITS: bool = false;
const AT_ONCE: bool = true;

#[test]
fn a_mark_needs_the_same_failure_twice() {
    let refused = |why: &str| Failure::Refused(why.into());
    let mut walk = Walk::new(&[3, 2, 1]);
    assert_eq!(walk.fails(3, refused("bad size")), (3, WAITS, None));
    assert_eq!(walk.fails(3, refused("bad size")), (2, AT_ONCE, Some(3)));
    assert_eq!(walk.fails(2, refused("bad size")), (2, WAITS, None));
    assert_eq!(walk.fails(2, refused("bad mode")), (2, WAITS, None), "another reason each time");
    assert_eq!(walk.fails(2, refused("bad size")), (2, WAITS, None));
    assert_eq!(walk.dies(2, CRASH), (1, AT_ONCE, None), "nor is a refusal a death");
    // CRIU names addresses, pids and slots, which differ from one try to the next.
    let object = |at: &str| format!("cannot unpack object {at} of slots/{}/pagemap.img", at.len() % 2);
    let mut walk = Walk::new(&[3, 2, 1]);
    assert_eq!(walk.fails(3, refused(&object("0x5555b1c0"))), (3, WAITS, None));
    assert_eq!(walk.fails(3, refused(&object("0x7f00ea0"))), (2, AT_ONCE, Some(3)), "the same failure in other words");
    let mut walk = Walk::new(&[2, 1]);
    let exit = |code| Death::Ended(Ended::Exit(code));
    assert_eq!(walk.dies(2, exit(3)), (2, WAITS, None));
    assert_eq!(walk.dies(2, exit(4)), (2, WAITS, None));
    assert_eq!(walk.dies(2, exit(4)), (1, AT_ONCE, Some(2)));
}

#[test]
fn deaths_at_different_times_are_not_the_same_failure() {
    let seconds = Duration::from_secs_f64;
    let marks = |first: f64, second: f64| {
        let (mut history, images, now) = (History::default(), Images::good([id(1)]), Instant::now());
        let mut dies =
            |uptime| history.after_death(CRASH, StartPoint::Image(id(1)), seconds(uptime), &images, &policy(), now);
        assert!(dies(first).mark().is_none());
        dies(second).mark().is_some()
    };
    assert!(marks(0.1, 0.2) && marks(0.0, 0.25) && marks(8.0, 9.9));
    assert!(!marks(0.1, 0.9) && !marks(8.0, 11.0) && !marks(11.0, 8.0));
}

#[test]
fn nothing_from_outside_is_evidence() {
    for death in [KILLED, Death::Excused(Ended::Exit(1)), Death::Lost, Death::Ended(Ended::Signal(libc::SIGTERM))] {
        let mut walk = Walk::new(&[2, 1]);
        for _ in 0..3 {
            assert_eq!(walk.dies(2, death), (2, WAITS, None), "{death:?}");
        }
        assert_eq!(walk.dies(2, death), (1, AT_ONCE, None), "{death:?}");
        // Each image is tried again and again, and none is marked.
        for _ in 0..3 {
            assert_eq!(walk.dies(1, death), (1, WAITS, None));
        }
        assert_eq!(walk.dies(1, death), (2, WAITS, None));
    }
    let mut walk = Walk::new(&[2, 1]);
    let unexplained = || Failure::Unexplained("CRIU refused: it gave no reason in its log".into());
    for _ in 0..3 {
        assert_eq!(walk.fails(2, unexplained()), (2, WAITS, None));
    }
    assert_eq!(walk.fails(2, unexplained()), (1, AT_ONCE, None));
    assert_eq!(walk.fails(1, Failure::NotNow("CRIU did not finish".into())), (2, WAITS, None));
}

#[test]
fn one_that_is_proven_is_not_marked_for_a_death() {
    let mut walk = Walk::new(&[2, 1]);
    walk.images.proven = [id(2)].into();
    for _ in 0..3 {
        assert_eq!(walk.dies(2, CRASH), (2, WAITS, None));
    }
    assert_eq!(walk.dies(2, CRASH), (1, AT_ONCE, None));
    walk.images = Images { others: true, ..walk.images };
    walk.images.good.retain(|other| *other != id(1));
    assert_eq!(walk.fails(1, Failure::Damaged), (2, WAITS, None));
    // Being refused for one reason is a different failure.
    assert_eq!(walk.fails(2, Failure::Refused("bad size".into())), (2, WAITS, None));
    let last = Failure::Refused("bad size".into());
    let last = walk.history.after_image_failure(id(2), &last, &walk.images, &walk.policy, Instant::now());
    assert!(matches!(last, Decision::NoUsableImage { mark: Some(_) }), "{last:?}");
}

/// A user has rewound the job to it.
#[test]
fn one_that_was_passed_over_and_is_restored_all_the_same_has_its_turn_again() {
    let mut walk = Walk::new(&[2, 1]);
    assert_eq!(walk.fails(2, Failure::NotNow("CRIU did not finish".into())), (1, AT_ONCE, None));
    assert_eq!(walk.dies(2, KILLED), (2, WAITS, None));
}

#[test]
fn a_life_that_is_long_enough_clears_an_image() {
    let mut walk = Walk::new(&[2, 1]);
    assert_eq!(walk.dies(2, CRASH), (2, WAITS, None));
    let lived =
        walk.history.after_death(CRASH, StartPoint::Image(id(2)), LATER, &walk.images, &walk.policy, Instant::now());
    assert_eq!(from(&lived), StartPoint::Image(id(2)));
    assert_eq!(walk.dies(2, CRASH), (2, WAITS, None));
}

#[test]
fn the_walk_down_is_not_counted_and_files_that_are_gone_stay_gone() {
    let mut walk = Walk::new(&[9, 8, 7, 6, 5, 4, 3, 2, 1]);
    walk.policy.max_restarts = 1;
    let gone = || Failure::FilesGone("/tmp/x is not here".into());
    for n in (2..=9).rev() {
        assert_eq!(walk.fails(n, gone()), (n - 1, AT_ONCE, None));
    }
    let last = walk.history.after_image_failure(id(1), &gone(), &walk.images, &walk.policy, Instant::now());
    assert_eq!(last, Decision::NoUsableImage { mark: None }, "no second walk");
    // Images skipped for other reasons are tried again; each of their failures counts.
    let mut walk = Walk::new(&[2, 1]);
    walk.policy.max_restarts = 1;
    let slow = || Failure::NotNow("slow".into());
    assert_eq!(walk.fails(2, slow()), (1, AT_ONCE, None));
    assert_eq!(walk.fails(1, slow()), (2, WAITS, None));
    assert_eq!(walk.fails(2, slow()), (1, AT_ONCE, None));
    let last = walk.history.after_image_failure(id(1), &slow(), &walk.images, &walk.policy, Instant::now());
    assert!(matches!(last, Decision::GiveUp { ref why, mark: None } if why.contains("max-restarts")), "{last:?}");
}

#[test]
fn a_life_that_took_an_image_says_nothing_about_the_one_before() {
    let mut walk = Walk::new(&[1]);
    for newest in 2..9 {
        // Restored from the previous image, it takes another one and dies, at a different time each time.
        walk.images.good.insert(0, id(newest));
        let (now, uptime) = (Instant::now(), Duration::from_secs(u64::from(newest % 2) * 9 + 1));
        let death =
            walk.history.after_death(CRASH, StartPoint::Image(id(newest - 1)), uptime, &walk.images, &walk.policy, now);
        assert_eq!((from(&death), death.mark()), (StartPoint::Image(id(newest)), None));
    }
}

#[test]
fn lives_that_end_alike_after_an_image_each_go_back_to_the_proven_one() {
    let mut walk = Walk::new(&[2, 1]);
    walk.images.proven = [id(1)].into();
    walk.policy.max_restarts = 100;
    for newest in 3..6 {
        walk.images.good.insert(0, id(newest));
        assert_eq!(walk.dies(newest - 1, CRASH), (newest, WAITS, None));
    }
    walk.images.good.insert(0, id(6));
    assert_eq!(walk.dies(5, CRASH).0, 1, "none of those since is taken, and none is marked");
    // From there it lives; the image that it takes then is the newest.
    walk.images.good.insert(0, id(7));
    let lived =
        walk.history.after_death(CRASH, StartPoint::Image(id(1)), LATER, &walk.images, &walk.policy, Instant::now());
    assert_eq!(from(&lived), StartPoint::Image(id(7)));
}

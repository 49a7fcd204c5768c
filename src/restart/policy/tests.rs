use chrono::Utc;

use super::*;

fn policy() -> Restart {
    crate::config::Config::default().restart
}

fn id(n: u32) -> ImageId {
    ImageId::new(n, Utc::now())
}

const CRASH: Death = Death::Ended(Ended::Signal(9));
const SOON: Duration = Duration::from_secs(1);
const LATER: Duration = Duration::from_secs(100);

fn from(decision: &Decision) -> From {
    match decision {
        Decision::Again { from, .. } => *from,
        other => panic!("not again: {other:?}"),
    }
}

#[test]
fn exit_codes_decide() {
    let mut p = policy();
    let end = |code, p: &Restart| {
        let death = Death::Ended(Ended::Exit(code));
        History::default().after_death(death, From::Cold, LATER, &Images::good([id(1)]), p, Instant::now())
    };
    assert_eq!(end(0, &p), Decision::Complete);
    assert_eq!(from(&end(1, &p)), From::Image(id(1)));
    assert!(matches!(end(127, &p), Decision::GiveUp { .. }));
    p.retry_exit_codes = vec![75];
    assert!(matches!(end(1, &p), Decision::GiveUp { .. }));
    assert_eq!(from(&end(75, &p)), From::Image(id(1)));
}

#[test]
fn down_the_ladder() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.cold_start = ColdStart::Allow;
    let (new, old) = (id(2), id(1));
    // The newest image gets two chances.
    assert_eq!(
        from(&history.after_death(CRASH, From::Cold, LATER, &Images::good([new, old]), &p, now)),
        From::Image(new)
    );
    let second = history.after_death(CRASH, From::Image(new), SOON, &Images::good([new, old]), &p, now);
    assert_eq!(from(&second), From::Image(new));
    let third = history.after_death(CRASH, From::Image(new), SOON, &Images::good([new, old]), &p, now);
    assert!(matches!(third, Decision::Again { from: From::Image(i), mark: Some(m), .. } if i == old && m == new));
    // The older one does not restore at all; then from nothing, twice; then no more.
    assert_eq!(from(&history.after_bad_image(&Images::good([]), &p, now)), From::Cold);
    assert_eq!(from(&history.after_death(CRASH, From::Cold, SOON, &Images::good([]), &p, now)), From::Cold);
    let last = history.after_death(CRASH, From::Cold, SOON, &Images::good([]), &p, now);
    assert!(matches!(last, Decision::GiveUp { ref why, .. } if why.contains("no good image")), "{last:?}");
}

#[test]
fn a_job_is_not_started_from_nothing_over_its_images() {
    let (p, now) = (policy(), Instant::now());
    let others = Images { good: Vec::new(), others: true };
    let stranded = |decision: &Decision| matches!(decision, Decision::NoUsableImage { .. });
    assert!(stranded(&History::default().after_bad_image(&others, &p, now)));
    assert!(stranded(&History::default().after_death(CRASH, From::Cold, LATER, &others, &p, now)));
    // The last good one is marked just now.
    let mut history = History::default();
    let (last, images) = (From::Image(id(1)), Images::good([id(1)]));
    assert_eq!(from(&history.after_death(CRASH, last, SOON, &images, &p, now)), last);
    let second = history.after_death(CRASH, last, SOON, &images, &p, now);
    assert_eq!(second, Decision::NoUsableImage { mark: Some(id(1)) });
    // Without any image there is nothing to lose, and with a usable one nothing to decide.
    let cold = History::default().after_death(CRASH, From::Cold, LATER, &Images::default(), &p, now);
    assert_eq!(from(&cold), From::Cold);
    let some = Images { good: vec![id(1)], others: true };
    assert_eq!(from(&History::default().after_death(CRASH, From::Cold, LATER, &some, &p, now)), From::Image(id(1)));
    let allowed = Restart { cold_start: ColdStart::Allow, ..p };
    assert_eq!(from(&History::default().after_bad_image(&others, &allowed, now)), From::Cold);
}

#[test]
fn no_cold_start_where_it_is_forbidden() {
    let mut p = policy();
    p.cold_start = ColdStart::Never;
    let decision = History::default().after_death(CRASH, From::Cold, LATER, &Images::good([]), &p, Instant::now());
    assert!(matches!(decision, Decision::GiveUp { ref why, .. } if why.contains("cold-start")));
}

#[test]
fn the_limit_holds_within_its_window_and_backs_off() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.max_restarts = 3;
    let mut waits = Vec::new();
    for _ in 0..3 {
        match history.after_death(CRASH, From::Cold, LATER, &Images::good([id(1)]), &p, now) {
            Decision::Again { after, .. } => waits.push(after),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(waits, [p.backoff, p.backoff * 2, p.backoff * 4]);
    let fourth = history.after_death(CRASH, From::Cold, LATER, &Images::good([id(1)]), &p, now);
    assert!(matches!(fourth, Decision::GiveUp { ref why, .. } if why.contains("max-restarts")));
    let after_window = now + p.window + SOON;
    assert!(matches!(
        history.after_death(CRASH, From::Cold, LATER, &Images::good([id(1)]), &p, after_window),
        Decision::Again { .. }
    ));
}

#[test]
fn healthy_uptime_forgives() {
    let (mut history, mut p, now) = (History::default(), policy(), Instant::now());
    p.max_restarts = 1;
    let healthy = p.healthy_uptime;
    for _ in 0..5 {
        let decision = history.after_death(CRASH, From::Image(id(1)), healthy, &Images::good([id(1)]), &p, now);
        assert!(matches!(decision, Decision::Again { after, mark: None, .. } if after == p.backoff));
    }
}

#[test]
fn a_lost_job_comes_back_whatever_the_exit_codes_say() {
    let mut p = policy();
    p.retry_exit_codes = vec![75];
    let decision =
        History::default().after_death(Death::Lost, From::Cold, LATER, &Images::good([id(4)]), &p, Instant::now());
    assert_eq!(from(&decision), From::Image(id(4)));
}

#[test]
fn the_machine_is_not_the_images_fault() {
    let (mut history, p) = (History::default(), policy());
    for _ in 0..5 {
        let decision = history.after_machine_failure(From::Image(id(1)), "no driver", &p);
        assert!(matches!(decision, Decision::Again { from: From::Image(_), mark: None, .. }));
    }
    let last = history.after_machine_failure(From::Image(id(1)), "no driver", &p);
    assert!(matches!(last, Decision::GiveUp { ref why, mark: None } if why.contains("no driver")));
}

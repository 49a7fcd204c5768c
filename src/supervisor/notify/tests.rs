use super::*;
use crate::published::Persisting;
use rekindle_store::ImageId;

fn state(word: &str) -> JobState {
    *JobState::ALL.iter().find(|state| state.as_str() == word).unwrap()
}

fn published(word: &str) -> Published {
    Published { state: state(word), ..Published::new("lineage") }
}

fn words(news: &[NotifyState<'_>]) -> Vec<String> {
    news.iter().map(ToString::to_string).collect()
}

/// The messages at `now`; they count as sent.
fn say(said: &mut Said, phase: Phase, status: &str, done: u64, now: Instant) -> Vec<String> {
    let next = said.after(phase, status.into(), (state(status), done), now);
    let news = words(&said.news(&next, now));
    *said = next;
    news
}

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn a_service_gets_up_once_and_stops_once() {
    let start = Instant::now();
    let mut said = Said::new(None, Duration::ZERO, start);
    let extend = "EXTEND_TIMEOUT_USEC=60000000";
    assert_eq!(say(&mut said, Phase::Starting, "starting", 0, start), ["STATUS=starting", extend]);
    assert_eq!(say(&mut said, Phase::Starting, "starting", 0, start + SECOND), [""; 0]);
    assert_eq!(say(&mut said, Phase::Starting, "starting", 0, start + EXTEND_EVERY), [extend]);
    assert_eq!(say(&mut said, Phase::Up, "running", 0, start + 20 * SECOND), ["READY=1", "STATUS=running"]);
    // A restart is not announced to the manager.
    assert_eq!(say(&mut said, Phase::Starting, "restoring", 0, start + 100 * SECOND), ["STATUS=restoring"]);
    assert_eq!(said.patience(start + 100 * SECOND), None);
    let stop = start + 101 * SECOND;
    assert_eq!(say(&mut said, Phase::Stopping, "stopping", 0, stop), ["STOPPING=1", "STATUS=stopping", extend]);
    assert_eq!(said.patience(stop), Some(EXTEND_EVERY));
    assert_eq!(say(&mut said, Phase::Up, "stopping", 0, stop + SECOND), [""; 0]);
}

#[test]
fn what_was_not_heard_is_said_again() {
    let now = Instant::now();
    let said = Said::new(None, Duration::ZERO, now);
    let next = said.after(Phase::Up, "running".into(), (JobState::Running, 0), now);
    let again = said.after(Phase::Up, "running".into(), (JobState::Running, 0), now + SECOND);
    assert_eq!(words(&said.news(&next, now)), words(&said.news(&again, now + SECOND)));
}

#[test]
fn more_time_is_asked_for_only_while_something_moves() {
    let start = Instant::now();
    let mut said = Said::new(None, Duration::ZERO, start);
    let mut asked = |from: Instant, done: &dyn Fn(u64) -> u64, seconds: u64| -> Vec<u64> {
        let ask =
            |n: &u64| !say(&mut said, Phase::Stopping, "done", done(*n), from + Duration::from_secs(*n)).is_empty();
        (0..seconds).filter(ask).collect()
    };
    assert_eq!(asked(start, &|n| n / 200, 1000).len(), 67);
    let hung = start + Duration::from_secs(1000);
    let last = *asked(hung, &|_| 77, 1000).last().unwrap();
    assert!((STALLED.as_secs() - 15..STALLED.as_secs()).contains(&last), "{last}");
}

#[test]
fn the_watchdog_is_fed_at_half_its_time_in_every_phase() {
    let start = Instant::now();
    let mut said = Said::new(Some(30 * SECOND), Duration::ZERO, start);
    assert_eq!(said.patience(start), Some(Duration::ZERO));
    let mut fed = Vec::new();
    for n in 0..90 {
        let phase = if n < 45 { Phase::Up } else { Phase::Stopping };
        if say(&mut said, phase, "running", 0, start + n * SECOND).contains(&"WATCHDOG=1".to_string()) {
            fed.push(n);
        }
    }
    assert_eq!(fed, [0, 15, 30, 45, 60, 75]);
    assert_eq!(said.patience(start + 89 * SECOND), Some(SECOND));
}

#[test]
fn the_line_says_what_people_want_to_know() {
    let taken = DateTime::from_timestamp(1_700_000_000, 0).unwrap();
    let image = ImageId::new(12, taken);
    let at = |seconds| taken + TimeDelta::seconds(seconds);
    assert_eq!(status(&published("starting"), at(0)), "starting");
    let running = Published { last_image: Some(image), last_freeze_us: Some(612_000), ..published("running") };
    assert_eq!(status(&running, at(0)), "running; image 12 taken just now, the job was frozen for 0.6 s");
    assert!(status(&running, at(60)).contains("taken 1 minute ago,"));
    assert!(status(&running, at(7300)).contains("taken 2 hours ago,"));
    assert!(status(&running, at(90_000)).contains("taken 1 day ago,"));
    // The clock was set back.
    assert!(status(&running, at(-500)).contains("taken just now,"));
    let moving = Persisting { image, done: 45, total: 100, written: 0, rate: 0 };
    let storing = Published { persisting: Some(moving.clone()), restarts: 2, ..published("running") };
    assert_eq!(status(&storing, at(0)), "running; copying image 12 to the store, 45 %; 2 restarts");
    let reading = Published { restoring: Some(moving), ..published("restoring") };
    assert_eq!(status(&reading, at(0)), "restoring; reading image 12, 45 %");
}

#[test]
fn a_reason_can_not_speak_for_us() {
    let why = format!("a\nSTOPPING=1\n{}", "x".repeat(1000));
    let line = status(&Published { last_failure: Some(why), ..published("running") }, Utc::now());
    assert!(!line.contains('\n') && line.len() < 300, "{line}");
}

#[test]
fn a_manager_that_is_gone_costs_no_processor() {
    let gone = open(OsStr::new("/nonexistent/notify")).unwrap();
    let said = Said::new(Some(SECOND), Duration::ZERO, Instant::now());
    let mut notify = Notify { socket: Some(gone), said, heard: true };
    let now = Instant::now();
    assert_eq!(notify.next_wake(now), Some(now));
    notify.beat(Phase::Up, &published("running"), Instant::now());
    assert_eq!(notify.next_wake(now), Some(now + RETRY));
}

#[test]
fn both_kinds_of_sockets_are_understood() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("notify");
    let abstract_name = format!("rekindle-test-{}", std::process::id());
    let named = SocketAddr::from_abstract_name(abstract_name.as_bytes()).unwrap();
    let managers = [UnixDatagram::bind(&path).unwrap(), UnixDatagram::bind_addr(&named).unwrap()];
    for (manager, name) in managers.iter().zip([path.to_str().unwrap(), &format!("@{abstract_name}")]) {
        let said = Said::new(None, Duration::ZERO, Instant::now());
        let notify = Notify { socket: Some(open(OsStr::new(name)).unwrap()), said, heard: true };
        assert!(notify.send(&[NotifyState::Ready, NotifyState::Status("x")]));
        let mut buffer = [0; 100];
        let count = manager.recv(&mut buffer).unwrap();
        assert_eq!(&buffer[..count], b"READY=1\nSTATUS=x\n");
        // The manager does not read: its queue fills up, and we do not wait.
        assert!((0..10_000).any(|_| !notify.send(&[NotifyState::Watchdog])));
    }
    assert!(open(OsStr::new("vsock:2:1234")).is_err());
}

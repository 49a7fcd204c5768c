//! Each cloud against a fake of its service, with good answers and bad ones.

use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use chrono::{DateTime, Utc};
use rekindle_base::notice::Kind;
use rekindle_testing::metadata::{Answer, Metadata};

use super::*;

const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
const TOKEN: &str = "/latest/api/token";
const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
const MAINTENANCE: &str = "/computeMetadata/v1/instance/maintenance-event";
const EVENTS: &str = "/metadata/scheduledevents";
const NAME: &str = "/metadata/instance/compute/name";

const LIMIT: Duration = Duration::from_secs(20);

fn service() -> (Metadata, Client) {
    let service = Metadata::start();
    let client = Client::of(service.address()).unwrap();
    (service, client)
}

fn at(text: &str) -> DateTime<Utc> {
    text.parse().unwrap()
}

fn kinds(notices: &[Notice]) -> Vec<Kind> {
    notices.iter().map(|notice| notice.kind).collect()
}

/// Answers that every source must reject.
fn garbage() -> Vec<Answer> {
    let raw = |text: &str| Answer::Raw(text.as_bytes().to_vec());
    let body = |text: &str| Answer::Body(text.to_owned());
    vec![
        body(""),
        body("<html><body>please log in</body></html>"),
        body("{\"action\":\"terminate\"}"),
        body("{\"action\":\"dance\",\"time\":\"2026-11-23T08:00:00Z\"}"),
        body("{\"action\":\"rebalance\",\"time\":\"2026-11-23T08:00:00Z\"}"),
        body("{\"action\":\"terminate\",\"time\":\"soon\"}"),
        body("{\"action\":\"terminate\",\"time\":\"2026-11-23T08:00:00Z\"} and more"),
        body(&"[".repeat(60_000)),
        body(&"x".repeat(100_000)),
        raw("HTTP/1.1 200 OK\r\ncontent-length: 4\r\nmetadata-flavor: Google\r\n\r\n\u{fffd}\r"),
        raw("HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n"),
        raw("HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n"),
        raw("HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"),
        raw("220 smtp ready\r\n"),
        raw(""),
    ]
}

#[test]
fn aws_announces_an_end_and_that_one_is_likely() {
    let (service, client) = service();
    let mut aws = aws::Aws::default();
    assert_eq!(aws.ask(&client).unwrap(), [], "404 means nothing");
    service.says(REBALANCE, "{\"noticeTime\":\"2026-11-23T07:55:00Z\"}");
    let likely = aws.ask(&client).unwrap();
    assert_eq!((kinds(&likely), likely[0].at), (vec![Kind::Rebalance], None));
    for (action, kind, time) in [
        ("terminate", Kind::Terminate, Some(at("2026-11-23T08:00:00Z"))),
        ("stop", Kind::Stop, Some(at("2026-11-23T08:00:00Z"))),
        ("hibernate", Kind::Hibernate, None),
    ] {
        service.says(ACTION, &format!("{{\"action\":\"{action}\",\"time\":\"2026-11-23T08:00:00Z\",\"more\":1}}"));
        let notices = aws.ask(&client).unwrap();
        assert_eq!((kinds(&notices), notices[0].at), (vec![kind, Kind::Rebalance], time));
    }
    assert_eq!(service.count("PUT"), 1, "one token for all: {:?}", service.requests());
    service.expire_tokens();
    assert_eq!(aws.ask(&client).unwrap().len(), 2);
    assert_eq!(service.count("PUT"), 2);
}

/// The end is two minutes away: it does not wait for the other answer.
#[test]
fn aws_announces_an_end_though_the_recommendation_cannot_be_read() {
    let (service, client) = service();
    let mut aws = aws::Aws::default();
    service.says(REBALANCE, "{\"noticeTime\":\"2026-11-23T07:55:00Z\"}");
    assert_eq!(kinds(&aws.ask(&client).unwrap()), [Kind::Rebalance]);
    service.says(ACTION, "{\"action\":\"terminate\",\"time\":\"2026-11-23T08:00:00Z\"}");
    for bad in garbage() {
        service.set(REBALANCE, Some(bad));
        assert_eq!(kinds(&aws.ask(&client).unwrap()), [Kind::Terminate, Kind::Rebalance], "it is not withdrawn either");
    }
}

#[test]
fn aws_with_tokens_that_are_none_is_an_error() {
    let (service, client) = service();
    for token in ["", "two\nlines", "a b", &"x".repeat(2000)] {
        service.says(TOKEN, token);
        assert!(matches!(aws::Aws::default().ask(&client), Err(Error::Malformed(_))), "{token:?}");
    }
    // A token that is never accepted is not asked for again and again.
    service.says(TOKEN, "other");
    let before = service.requests().len();
    assert!(matches!(aws::Aws::default().ask(&client), Err(Error::Status(status)) if status == 401));
    assert_eq!(service.requests().len() - before, 4, "two tokens, two requests");
}

#[test]
fn google_announces_by_two_values_and_waits_for_changes() {
    let (service, client) = service();
    service.says(PREEMPTED, "FALSE\n");
    let mut preempted = google::Google::new(google::Value::Preempted);
    assert_eq!(preempted.ask(&client).unwrap(), []);
    let began = Instant::now();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        service.says(PREEMPTED, "TRUE");
        service
    });
    assert_eq!(kinds(&preempted.ask(&client).unwrap()), [Kind::Preempt]);
    let (service, waited) = (late.join().unwrap(), began.elapsed());
    assert!(waited >= Duration::from_millis(300) && waited < LIMIT, "{waited:?}");
    assert!(service.requests().last().unwrap().contains("wait_for_change=true&timeout_sec=60&last_etag=1"));
    for (text, found) in [
        ("NONE", vec![]),
        ("MIGRATE_ON_HOST_MAINTENANCE", vec![Kind::Migrate]),
        ("TERMINATE_ON_HOST_MAINTENANCE", vec![Kind::Terminate]),
    ] {
        service.says(MAINTENANCE, text);
        let notices = google::Google::new(google::Value::Maintenance).ask(&client).unwrap();
        assert_eq!(kinds(&notices), found);
    }
}

#[test]
fn an_answer_that_is_not_googles_does_not_count() {
    let (service, client) = service();
    service.set(PREEMPTED, Some(Answer::Raw(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nTRUE".to_vec())));
    let asked = google::Google::new(google::Value::Preempted).ask(&client);
    assert!(matches!(asked, Err(Error::Malformed(_))), "{asked:?}");
    // A tag that would change the next request is not used.
    let tagged = b"HTTP/1.1 200 OK\r\nmetadata-flavor: Google\r\netag: 1&x=/../\r\ncontent-length: 5\r\n\r\nFALSE";
    service.set(PREEMPTED, Some(Answer::Raw(tagged.to_vec())));
    let mut preempted = google::Google::new(google::Value::Preempted);
    preempted.ask(&client).unwrap();
    preempted.ask(&client).unwrap();
    assert_eq!(service.requests().last().unwrap(), &format!("GET {PREEMPTED}"));
    assert!(preempted.pause() >= EVERY, "it does not wait for a change");
}

fn events(name: &str, kind: &str) -> String {
    format!(
        "{{\"DocumentIncarnation\":1,\"Events\":[{{\"EventId\":\"E-1\",\"EventType\":\"{kind}\",\"Resources\":\
        [\"{name}\"],\"EventStatus\":\"Scheduled\",\"NotBefore\":\"Mon, 23 Nov 2026 08:00:00 GMT\"}}]}}"
    )
}

#[test]
fn azure_announces_events_and_takes_an_acknowledgement() {
    let (service, client) = service();
    let mut azure = azure::Azure::default();
    assert!(matches!(azure.ask(&client), Err(Error::Status(_))), "it does not know which machine this is");
    service.says(NAME, "gpu_0");
    service.says(EVENTS, "{\"DocumentIncarnation\":0,\"Events\":[]}");
    assert_eq!(azure.ask(&client).unwrap(), []);
    service.says(EVENTS, &events("gpu_1", "Preempt"));
    assert_eq!(azure.ask(&client).unwrap(), [], "the event of another machine");
    service.says(EVENTS, &events("gpu_0", "Preempt"));
    let notices = azure.ask(&client).unwrap();
    assert_eq!((kinds(&notices), notices[0].at), (vec![Kind::Preempt], Some(at("2026-11-23T08:00:00Z"))));
    azure::acknowledge(&client, &notices[0].id).unwrap();
    let last = service.requests().pop().unwrap();
    assert_eq!(last, format!("POST {EVENTS}?api-version=2020-07-01 {{\"StartRequests\":[{{\"EventId\":\"E-1\"}}]}}"));
    assert_eq!(service.count(&format!("GET {NAME}")), 2, "asked until it was known, then never again");
}

#[test]
fn garbage_is_an_error_and_never_a_notice() {
    let (service, client) = service();
    service.says(NAME, "gpu_0");
    for answer in garbage() {
        for path in [ACTION, REBALANCE, PREEMPTED, MAINTENANCE, EVENTS] {
            service.set(path, Some(answer.clone()));
        }
        for source in [Cloud::Aws, Cloud::Google, Cloud::Azure].into_iter().flat_map(sources) {
            let mut source = source;
            let asked = source.ask(&client);
            assert!(asked.is_err(), "{asked:?} for {:.80?}", answer);
            let told = chain(&asked.unwrap_err());
            assert!(told.len() < 300 && !told.contains("log in") && !told.contains("127.0.0.1"), "{told}");
        }
    }
}

#[test]
fn a_redirection_is_not_followed() {
    let (service, client) = service();
    service.says(MAINTENANCE, "NONE");
    let elsewhere = format!("HTTP/1.1 307 Go\r\nlocation: http://{}{MAINTENANCE}\r\n\r\n", service.address());
    service.set(PREEMPTED, Some(Answer::Raw(elsewhere.into_bytes())));
    let asked = google::Google::new(google::Value::Preempted).ask(&client);
    assert!(matches!(asked, Err(Error::Status(status)) if status == 307), "{asked:?}");
    assert_eq!(service.requests(), [format!("GET {PREEMPTED}")]);
}

#[test]
fn an_answer_that_does_not_come_or_does_not_end_has_a_time_limit() {
    let (service, client) = service();
    for answer in [Answer::Silence, Answer::Trickle(Duration::from_millis(50))] {
        service.set(PREEMPTED, Some(answer));
        let began = Instant::now();
        assert!(matches!(google::Google::new(google::Value::Preempted).ask(&client), Err(Error::Request(_))));
        assert!(began.elapsed() < client::PATIENCE * 2, "{:?}", began.elapsed());
    }
    // The service has ended.
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    assert!(aws::Aws::default().ask(&Client::of(gone).unwrap()).is_err());
}

fn notice(id: &str, kind: Kind, at: Option<DateTime<Utc>>) -> Notice {
    Notice { cloud: Cloud::Azure, kind, id: id.into(), at }
}

#[test]
fn a_notice_is_reported_once_and_when_it_changes_or_goes() {
    let mut ledger = Ledger::default();
    let time = Some(at("2026-11-23T08:00:00Z"));
    let first = notice("1", Kind::Reboot, time);
    assert_eq!(ledger.update(vec![first.clone(), first.clone()]), [Change::Came(first.clone())]);
    assert_eq!(ledger.update(vec![first.clone()]), []);
    // It has begun, so it has no time.
    assert_eq!(ledger.update(vec![Notice { at: None, ..first.clone() }]), []);
    let later = notice("1", Kind::Reboot, Some(at("2026-11-23T09:00:00Z")));
    assert_eq!(ledger.update(vec![later.clone()]), [Change::Changed(later.clone())]);
    let other = notice("2", Kind::Freeze, None);
    assert_eq!(ledger.update(vec![other.clone()]), [Change::Came(other.clone()), Change::Gone(later)]);
    assert_eq!(ledger.update(Vec::new()), [Change::Gone(other)]);
}

#[test]
fn failures_are_logged_once_and_asked_again_ever_more_slowly() {
    let mut failures = Failures::default();
    let told: Vec<(u64, bool)> = (0..6).map(|_| failures.more()).map(|(pause, told)| (pause.as_secs(), told)).collect();
    assert_eq!(told, [(5, false), (10, false), (20, true), (40, false), (60, false), (60, false)]);
    assert!(failures.end() && !failures.end());
    failures.more();
    assert!(!failures.end(), "one failure is nobody's concern");
    for _ in 0..200 {
        assert!(failures.more().0 <= LONGEST);
    }
}

#[test]
fn sources_of_one_cloud_are_silent_together() {
    let silent = Silent::default();
    let other = silent.clone();
    assert_eq!((silent.more(), other.more(), silent.fewer(), other.fewer()), (true, false, false, true));
}

fn watched(service: &Metadata, source: Box<dyn Source>) -> Receiver<Change> {
    let client = Client::of(service.address()).unwrap();
    let (sender, changes) = mpsc::channel();
    std::thread::spawn(move || watch(source, &Silent::default(), &client, |change| sender.send(change).is_ok()));
    changes
}

#[test]
fn a_service_that_fails_withdraws_nothing() {
    let service = Metadata::start();
    service.says(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE");
    let changes = watched(&service, Box::new(google::Google::new(google::Value::Maintenance)));
    assert!(matches!(changes.recv_timeout(LIMIT).unwrap(), Change::Came(notice) if notice.kind == Kind::Migrate));
    service.set(MAINTENANCE, Some(Answer::Raw(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\n\r\n".to_vec())));
    assert!(changes.recv_timeout(Duration::from_secs(3)).is_err());
    service.says(MAINTENANCE, "NONE");
    assert!(matches!(changes.recv_timeout(LIMIT).unwrap(), Change::Gone(notice) if notice.kind == Kind::Migrate));
}

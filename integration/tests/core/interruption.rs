//! A cloud announces that it interrupts the machine. The cloud is a fake on loopback.

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use chrono::{SecondsFormat, TimeDelta, Utc};
use nix::sys::signal::Signal;
use rekindle::supervisor::RunResult;
use rekindle::telemetry::events::{What, read};
use rekindle_base::cause::Cause;
use rekindle_base::notice::{Cloud, Kind};
use rekindle_testing::metadata::{Answer, Metadata};

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
const PREEMPTED: &str = "/computeMetadata/v1/instance/preempted";
const MAINTENANCE: &str = "/computeMetadata/v1/instance/maintenance-event";
const EVENTS: &str = "/metadata/scheduledevents";
const NO_EVENTS: &str = "{\"DocumentIncarnation\":1,\"Events\":[]}";

/// A machine of these clouds. None of them announces anything.
fn machine(clouds: &str) -> Option<(Lab, Metadata)> {
    let mut lab = Lab::new()?.set("watch.interruption", clouds);
    let service = Metadata::start();
    service.says(PREEMPTED, "FALSE");
    service.says(MAINTENANCE, "NONE");
    service.says("/metadata/instance/compute/name", "gpu_0");
    service.says(EVENTS, NO_EVENTS);
    lab.set_variable("REKINDLE_TEST_METADATA", &service.address().to_string());
    // A request by way of a proxy would not arrive.
    ["http_proxy", "HTTP_PROXY", "ALL_PROXY"].iter().for_each(|name| lab.set_variable(name, "http://127.0.0.1:1"));
    Some((lab, service))
}

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("kinds.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 3);
    run
}

/// The notice of AWS for an end in so many seconds.
fn terminate(service: &Metadata, left: i64) {
    let at = (Utc::now() + TimeDelta::seconds(left)).to_rfc3339_opts(SecondsFormat::Secs, true);
    service.says(ACTION, &format!("{{\"action\":\"terminate\",\"time\":\"{at}\"}}"));
}

fn event(service: &Metadata, kind: &str, left: i64) {
    let at = (Utc::now() + TimeDelta::seconds(left)).format("%a, %d %b %Y %H:%M:%S GMT");
    let text = format!(
        "{{\"DocumentIncarnation\":2,\"Events\":[{{\"EventId\":\"E-1\",\"EventType\":\"{kind}\",\"Resources\":\
        [\"gpu_0\"],\"EventStatus\":\"Scheduled\",\"NotBefore\":\"{at}\"}}]}}"
    );
    service.says(EVENTS, &text);
}

/// What the journal says of notices: the kind, and what was done.
fn told(lab: &Lab) -> Vec<(Kind, String)> {
    let said = |what: What| match what {
        What::Interruption { notice, action, .. } => Some((notice, action)),
        What::InterruptionOver { notice, .. } => Some((notice, "over".into())),
        _ => None,
    };
    read(&lab.job().log_dir()).unwrap().into_iter().filter_map(|event| said(event.what)).collect()
}

#[test]
fn a_spot_machine_that_ends_is_left_with_an_image_and_the_job_continues_elsewhere() {
    let Some((lab, service)) = machine("[\"aws\"]") else { return };
    let mut run = start(&lab, "plain");
    terminate(&service, 115);
    run.wait_said("AWS terminates this machine at");
    run.wait_said("taking a final snapshot, then stopping the job to be queued again");
    run.ends_with(75);
    assert_eq!((lab.good(), told(&lab)), (vec![1], vec![(Kind::Terminate, "stop".into())]));
    let cause = Cause::Interruption { cloud: Cloud::Aws, notice: Kind::Terminate };
    assert_eq!(RunResult::read(&lab.job()).unwrap().last_end.unwrap().cause, cause);

    // Elsewhere nothing is announced.
    service.set(ACTION, None);
    let mut run = start(&lab, "plain");
    run.wait_said("continues from image 000001");
    finish(&lab, run);
}

#[test]
fn a_machine_that_may_end_gets_a_snapshot_and_the_job_runs_on() {
    let Some((lab, service)) = machine("[\"aws\"]") else { return };
    let mut run = start(&lab, "plain");
    service.says(REBALANCE, "{\"noticeTime\":\"2026-11-23T07:55:00Z\"}");
    run.wait_said("AWS may take this machine back soon: taking a snapshot; the job continues");
    run.wait_said("image 000001-");
    // The token expires meanwhile, and the same notice is read again.
    service.expire_tokens();
    let before = service.count("PUT");
    run.wait_for("it is asked again", || service.count("PUT") > before);
    service.says(REBALANCE, "{\"noticeTime\":\"2026-11-23T07:56:00Z\"}");
    run.wait_said("nothing is done, because a snapshot was taken for a notice less than 5 minutes ago");
    count_on(&lab, &mut run, 3);
    let rebalance = |action: &str| (Kind::Rebalance, action.to_owned());
    assert_eq!(told(&lab)[..2], [rebalance("snapshot"), rebalance("none")]);
    finish(&lab, run);
    assert_eq!(lab.good(), [1]);
}

#[test]
fn a_preempted_machine_is_left_within_its_30_seconds() {
    let Some((lab, service)) = machine("[\"google\"]") else { return };
    let mut run = start(&lab, "plain");
    service.says(MAINTENANCE, "MIGRATE_ON_HOST_MAINTENANCE");
    run.wait_said("Google Cloud moves this machine to another host while it runs: taking a snapshot");
    run.wait_for("the image is stored", || lab.good() == [1]);
    service.says(MAINTENANCE, "NONE");
    run.wait_said("no longer says that it moves this machine");
    let begun = Instant::now();
    service.says(PREEMPTED, "TRUE");
    run.wait_said("Google Cloud takes this machine back: taking a final snapshot");
    // The machine is shut down at the same time.
    run.signal(Signal::SIGTERM);
    run.ends_with(75);
    assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
    assert_eq!(lab.good(), [2, 1]);
}

#[test]
fn azure_is_told_only_when_the_image_is_stored() {
    let Some((lab, service)) = machine("[\"azure\"]") else { return };
    // So storing takes some seconds.
    let lab = lab.set("store.persist-rate", "\"2MiB\"").set("store.compression", "\"none\"");
    let mut run = start(&lab, "fresh-8");
    event(&service, "Preempt", 28);
    let mut stored = false;
    run.wait_for("the job is frozen no more", || lab.published().is_some_and(|it| it.last_image.is_some()));
    assert_eq!(service.count("POST"), 0);
    run.wait_for("Azure is told", || {
        // In this order: an image that is stored later does not excuse an answer before.
        let told = service.count("POST") > 0;
        stored = lab.good() == [1];
        assert!(stored || !told, "{:?}", service.requests().last());
        told
    });
    let (_, said) = run.ends_with(75);
    assert!(said.contains("told Azure that this machine is ready"), "{said}");
    let posts: Vec<String> = service.requests().into_iter().filter(|request| request.starts_with("POST")).collect();
    assert_eq!(
        posts,
        [format!("POST {EVENTS}?api-version=2020-07-01 {{\"StartRequests\":[{{\"EventId\":\"E-1\"}}]}}")]
    );
}

#[test]
fn azure_is_not_told_while_another_job_runs_on_the_machine() {
    let Some((lab, service)) = machine("[\"azure\"]") else { return };
    let run = start(&lab, "plain");
    let _other = UnixListener::bind(lab.file("control/other-01234567.sock")).unwrap();
    event(&service, "Preempt", 28);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("is not told that this machine is ready: 1 other job runs on it"), "{said}");
    assert_eq!((service.count("POST"), lab.good()), (0, vec![1]));
}

#[test]
fn a_later_end_is_a_deadline_and_a_withdrawn_one_is_none() {
    let Some((lab, service)) = machine("[\"azure\"]") else { return };
    let mut run = start(&lab, "plain");
    event(&service, "Reboot", 900);
    run.wait_said("Azure restarts this machine at");
    run.wait_said("taking a snapshot now; before that time");
    run.wait_for("the image is stored", || lab.good() == [1]);
    run.wait_for("there is a deadline", || lab.published().is_some_and(|now| now.deadline.is_some()));
    let out = lab.rekindle(&["status", "j"]);
    let shown = String::from_utf8_lossy(&out.stdout).into_owned();
    let is_near = |minutes: u32| shown.contains(&format!("the deadline is in {minutes}m"));
    assert!(shown.contains("Azure restarts this machine at") && (11..=14).any(is_near), "{shown}");
    service.says(EVENTS, NO_EVENTS);
    run.wait_said("Azure has withdrawn its notice that it restarts this machine: the job continues");
    run.wait_for("there is none", || lab.published().is_some_and(|now| now.deadline.is_none() && now.notice.is_none()));
    finish(&lab, run);
    assert_eq!(told(&lab), [(Kind::Reboot, "deadline".into()), (Kind::Reboot, "over".into())]);
    assert_eq!((lab.good(), service.count("POST")), (vec![1], 0));
}

#[test]
fn a_time_that_is_too_short_to_store_is_told_and_used() {
    let Some((lab, service)) = machine("[\"aws\"]") else { return };
    // Storing takes more than 20 s, and a notice is read after some seconds.
    let lab = lab.set("store.persist-rate", "\"1536KiB\"").set("store.compression", "\"none\"");
    let mut run = start(&lab, "fresh-32");
    run.snapshot(&lab);
    terminate(&service, 24);
    run.wait_said("The image may not be stored in time; the newest image in the store counts then");
    // This machine does not end after all.
    run.ends_with(75);
    assert_eq!(lab.good(), [2, 1]);
}

#[test]
fn what_is_stored_is_replicated_until_the_machine_ends() {
    let Some((lab, service)) = machine("[\"aws\"]") else { return };
    let replica = tempfile::tempdir().unwrap();
    let url = format!("\"file://{}\"", replica.path().display());
    // So the replica takes half a minute.
    let lab = lab.set("replica.url", &url).set("replica.rate", "\"1MiB\"");
    let run = start(&lab, "fresh-32");
    // Enough to store it on a busy machine, and less than the replica takes.
    terminate(&service, 24);
    let (_, said) = run.ends_with(75);
    assert!(said.contains("the machine ends now: the last image is not in the replica"), "{said}");
    assert_eq!(lab.good(), [1]);
}

#[test]
fn a_service_that_answers_nonsense_changes_nothing() {
    let Some((lab, service)) = machine("[\"aws\", \"google\", \"azure\"]") else { return };
    let raw = |text: &str| Some(Answer::Raw(text.as_bytes().to_vec()));
    service.set(ACTION, raw("HTTP/1.1 200 OK\r\ncontent-length: 7\r\n\r\n\x1b[31mno\n"));
    service.says(EVENTS, &"[".repeat(200_000));
    service.says(PREEMPTED, "YES");
    service.set(MAINTENANCE, raw("HTTP/1.1 302 Found\r\nlocation: /computeMetadata/v1/elsewhere\r\n\r\n"));
    service.says("/computeMetadata/v1/elsewhere", "TERMINATE_ON_HOST_MAINTENANCE");
    let mut run = start(&lab, "plain");
    for cloud in ["AWS", "Google Cloud", "Azure"] {
        run.wait_said(&format!("cannot ask {cloud} for interruption notices: "));
    }
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
    assert_eq!((lab.good(), told(&lab)), (vec![], vec![]));
    assert_eq!(service.count("GET /computeMetadata/v1/elsewhere"), 0);
    assert!(!lab.log().contains('\x1b'), "{}", lab.log());
    assert_eq!(lab.log().matches("cannot ask Google Cloud").count(), 1, "{}", lab.log());
}

#[test]
fn nothing_is_asked_on_a_machine_of_no_cloud() {
    let dmi = |name: &str| std::fs::read_to_string(format!("/sys/class/dmi/id/{name}")).unwrap_or_default();
    let vendors = ["Amazon EC2", "Xen", "Google", "Microsoft Corporation"];
    for (value, asks) in [("\"auto\"", false), ("\"off\"", false), ("[\"google\"]", true)] {
        let in_a_cloud = value == "\"auto\"" && vendors.contains(&dmi("sys_vendor").trim());
        if !rekindle_testing::require("no-cloud", !in_a_cloud, "this machine may be in a cloud") {
            continue;
        }
        let Some((lab, service)) = machine(value) else { return };
        let mut run = start(&lab, "plain");
        if asks {
            run.wait_for("it is asked", || service.count("GET") >= 2);
        }
        finish(&lab, run);
        assert_eq!(!service.requests().is_empty(), asks, "{value}: {:?}", service.requests());
    }
}

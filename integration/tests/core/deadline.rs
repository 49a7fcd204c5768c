//! A deadline: a last snapshot early enough before it, then the end that the queue understands.

use std::time::{Duration, Instant};

use chrono::Utc;
use nix::sys::signal::Signal;
use rekindle::telemetry::events::{What, read};

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

fn until(lab: &Lab, deadline: &str) -> Running {
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    lab.run_with(&["run", "--name", "j", "--deadline", deadline, "--"], command)
}

/// What the last snapshots before a deadline were expected to take.
fn last_calls(lab: &Lab) -> Vec<Duration> {
    let events = read(&lab.job().log_dir()).unwrap();
    let expected = |what: &What| match what {
        What::LastCall { predicted_us, .. } => Some(Duration::from_micros(*predicted_us)),
        _ => None,
    };
    events.iter().filter_map(|event| expected(&event.what)).collect()
}

#[test]
fn a_deadline_is_kept_and_the_next_run_knows_what_a_snapshot_takes() {
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.grace", "\"15s\"")) else { return };
    // Nothing was measured: it is begun snapshot.grace before, and after half of the time at the earliest.
    let begun = Instant::now();
    let mut run = until(&lab, "20s");
    run.wait_for("the deadline is known", || lab.published().is_some_and(|now| now.deadline.is_some()));
    count_on(&lab, &mut run, 5);
    run.wait_said("taking a final snapshot, then stopping the job");
    assert!(begun.elapsed() >= Duration::from_secs(10));
    run.ends_with(75);
    assert_eq!(lab.good(), [1]);
    assert_eq!(last_calls(&lab), [Duration::from_secs(15)]);

    // Now something is. A machine that is much slower now may not be done in time.
    let mut attempts = 0;
    while lab.good().len() < 2 {
        attempts += 1;
        assert!(attempts <= 3, "{:?}", lab.good());
        let deadline = Utc::now() + chrono::TimeDelta::seconds(20);
        let mut run = until(&lab, &deadline.to_rfc3339());
        run.wait_for("it is predicted", || run_is_predicted(&lab));
        run.wait_said("continues from image 000001");
        run.wait_said("taking a final snapshot, then stopping the job");
        let expected = last_calls(&lab)[attempts];
        assert_ne!(expected, Duration::from_secs(15));
        let early = (deadline - Utc::now()).to_std().unwrap_or_default();
        assert!(early <= expected.max(Duration::from_secs(6)), "{early:?}, where {expected:?} were expected");
        assert!(!run.err().contains("may not be complete") || expected > Duration::from_secs(5), "{}", run.err());
        run.ends_with(75);
    }

    let mut run = until(&lab, "1h");
    run.wait_said(&format!("continues from image {:06}", lab.good()[0]));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

fn run_is_predicted(lab: &Lab) -> bool {
    lab.published().is_some_and(|now| now.predicted.is_some_and(|forecast| !forecast.snapshot.is_zero()))
}

#[test]
fn a_deadline_that_has_passed_is_a_mistake() {
    let Some(lab) = Lab::new() else { return };
    let (_, said) = until(&lab, "2020-01-01T00:00:00Z").ends_with(2);
    assert!(said.contains("the deadline 2020-01-01T00:00:00Z") && said.contains("has passed"), "{said}");
    let (_, said) = until(&lab, "20s").ends_with(2);
    assert!(said.contains("--deadline \"20s\"") && said.contains("(snapshot.grace)"), "{said}");
    assert!(!lab.store().exists(), "nothing was touched");
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let lab = lab.set("scheduler.deadline", "\"2020-01-01T00:00:00Z\"");
    let (_, said) = lab.run(command).ends_with(78);
    assert!(said.contains("scheduler.deadline = \"2020-01-01T00:00:00Z\""), "{said}");
}

/// While the next try waits there is nothing to save.
#[test]
fn a_stop_to_be_queued_again_while_the_next_try_waits() {
    let Some(lab) = Lab::new() else { return };
    // A job that dies soon is not restarted at once.
    let lab = lab.set("restart.backoff", "\"10m\"").set("restart.min-uptime", "\"60s\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    let pid = run.job_pid(&lab);
    crate::supervisor::kill(pid, Signal::SIGKILL);
    run.wait_for("the next try waits", || lab.published().is_some_and(|now| now.state.as_str() == "waiting"));
    run.signal(Signal::SIGUSR2);
    run.ends_with(75);
}

#[test]
fn a_grace_that_can_not_hold_a_last_snapshot_is_told() {
    let Some(lab) = Lab::new() else { return };
    // The way to the store takes seconds then, and a scheduler would not wait for it.
    let lab = lab
        .set("scheduler.profile", "\"slurm\"")
        .set("store.persist-rate", "\"1MiB\"")
        .set("snapshot.staging", "\"ram\"")
        .set("snapshot.grace", "\"1s\"");
    let mut run = lab.python("kinds.py", &["memory", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGUSR1);
    run.wait_said("snapshot.grace is 1s");
    lab.kill_9(run);
}

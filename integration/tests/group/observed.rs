//! What commands, metrics, hooks and the report tell about a group, before and after a loss.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::lab::{ENDLESS, Lab, gate, wait_for};

/// What a command prints about the job of a rank, on its own machine.
fn json(lab: &Lab, rank: usize, command: &str) -> Value {
    let output = lab.command(rank, rank).args(["--json", command, &format!("ring.{rank}")]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

fn group(lab: &Lab, rank: usize) -> Value {
    // At first there is no such job.
    let output = lab.command(rank, rank).args(["--json", "status", &format!("ring.{rank}")]).output().unwrap();
    serde_json::from_slice::<Value>(&output.stdout).map_or(Value::Null, |status| status["group"].clone())
}

fn text(lab: &Lab, rank: usize, command: &str) -> String {
    let output = lab.command(rank, rank).args([command, &format!("ring.{rank}")]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn ranks(members: &Value) -> Vec<u64> {
    members.as_array().into_iter().flatten().map(|member| member["rank"].as_u64().unwrap()).collect()
}

fn committed(group: &Value) -> bool {
    group["images"].as_array().is_some_and(|images| images.iter().any(|image| image["committed"] == true))
}

/// The value of a metric in the file of a rank.
fn metric(lab: &Lab, rank: usize, name: &str) -> Option<f64> {
    let text = std::fs::read_to_string(lab.path(&format!("{rank}.prom"))).ok()?;
    let line = text.lines().find(|line| line.starts_with(&format!("rekindle_group_{name}{{")))?;
    line.rsplit(' ').next()?.parse().ok()
}

#[test]
fn a_group_is_seen_from_each_machine_before_and_after_a_loss() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(3, ENDLESS);
    let told = lab.path("told");
    for hook in ["hooks.after-snapshot", "hooks.on-failure"] {
        lab.set(hook, &format!("{:?}", ["/bin/sh", "-c", &format!("cat >>{}", told.display())]));
    }
    lab.set("group.lease", "\"20s\"");
    lab.run_all();
    wait_for("a committed group image", || (0..3).all(|rank| committed(&group(&lab, rank))));

    let status = json(&lab, 1, "status");
    let seen = &status["group"];
    assert_eq!((&seen["name"], &seen["size"], &seen["rank"]), (&"ring".into(), &3.into(), &1.into()), "{seen}");
    assert_eq!((&seen["epoch"], ranks(&seen["members"])), (&1.into(), vec![0, 1, 2]), "{seen}");
    assert!(seen["missing"].as_array().unwrap().is_empty() && seen["leader"].is_u64(), "{seen}");
    assert!(seen["members"][0]["host"].is_string(), "{seen}");
    assert!(status["group_image_age_s"].as_u64().is_some_and(|age| age < 60), "{status}");
    let said = text(&lab, 1, "status");
    assert!(said.contains("group ring: rank 1 of 3 machines, epoch 1; newest committed group image: "), "{said}");
    wait_for("metrics", || metric(&lab, 0, "images_committed_total").is_some_and(|count| count >= 1.0));
    assert_eq!((metric(&lab, 0, "size"), metric(&lab, 0, "members")), (Some(3.0), Some(3.0)));
    assert_eq!((metric(&lab, 0, "epoch"), metric(&lab, 0, "restarts_total")), (Some(1.0), Some(0.0)));
    assert!(metric(&lab, 0, "last_image_timestamp_seconds").is_some_and(|at| at > 1e9));

    // A machine is lost: the others name it, once its lease has expired.
    lab.machines[2].kill();
    wait_for("the loss", || ranks(&group(&lab, 0)["missing"]) == [2]);
    let seen = group(&lab, 0);
    assert_eq!(ranks(&seen["members"]), [0, 1], "{seen}");
    assert!(seen["missing"][0]["host"].is_string(), "the host that was there last: {seen}");
    wait_for("what is waited for", || {
        group(&lab, 0)["waits_for"].as_str().is_some_and(|text| text.contains("rank 2 (") && text.contains("to join"))
    });
    assert!(text(&lab, 0, "status").contains("2 of 3 machines are there"));
    // What its own state says counts no more, but for what it knew of its images.
    let left = json(&lab, 2, "status");
    assert!(left["group"]["members"].as_array().unwrap().is_empty() && committed(&left["group"]), "{left}");

    for rank in [0, 2] {
        let images = json(&lab, rank, "list");
        let images = images.as_array().unwrap();
        assert!(images.iter().any(|image| image["group"]["committed"] == true), "{images:?}");
        assert!(images.iter().all(|image| image["group"]["number"].is_u64()), "{images:?}");
        assert!(text(&lab, rank, "list").contains(", committed"));
    }

    lab.run(2, 2, &[]);
    wait_for("all run again", || {
        let seen = group(&lab, 0);
        seen["epoch"] == 2 && ranks(&seen["members"]) == [0, 1, 2]
    });
    // A process dies: its machine is named as the cause.
    wait_for("all run", || (0..3).all(|rank| json(&lab, rank, "status")["state"] == "running"));
    kill(Pid::from_raw(lab.machines[1].process_of_job().unwrap()), Signal::SIGKILL).unwrap();
    wait_for("the next epoch", || group(&lab, 0)["epoch"] == 3);
    wait_for("metrics after both", || metric(&lab, 0, "restarts_total") == Some(2.0));
    assert_eq!((metric(&lab, 0, "members_lost_total"), metric(&lab, 0, "epoch")), (Some(1.0), Some(3.0)));

    let report = json(&lab, 0, "report");
    let [first, second] = report["group"]["restarts"].as_array().unwrap().as_slice() else { panic!("{report}") };
    // The job of another machine may have ended first, because the connection was closed.
    assert_eq!((ranks(&first["lost"]), first["number"].is_u64()), (vec![2], true), "{first}");
    assert!(first["why"] == "rank 2 is lost" || first["why"].as_str().unwrap().contains("the job ended"), "{first}");
    assert_eq!((ranks(&second["machines"]).len(), ranks(&second["lost"])), (1, vec![]), "{second}");
    assert!(!report["group"]["committed"].as_array().unwrap().is_empty());
    assert_eq!(report["group"]["lost"][0]["machine"]["rank"], 2);
    let hooks = std::fs::read_to_string(&told).unwrap();
    for event in ["group-committed", "group-member-lost"] {
        assert!(hooks.contains(&format!("\"event\":\"{event}\"")), "{event} in {hooks}");
    }
    assert!(lab.log(0).contains("the group has lost rank 2 (") && lab.log(0).contains("all machines restart from"));
    wait_for("all run after both", || (0..3).all(|rank| json(&lab, rank, "status")["state"] == "running"));
    lab.machines[0].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1), lab.ends(2)), (143, 143, 143));
}

#[test]
fn an_automatic_interval_is_one_for_all_and_shown() {
    if !gate() {
        return;
    }
    let mut lab = Lab::new(2, ENDLESS);
    lab.set("snapshot.interval", "\"auto\"");
    // The first after a tenth of it, then some seconds.
    lab.set("snapshot.mean-time-between-failures", "\"30s\"");
    lab.set("snapshot.max-overhead", "\"50%\"");
    lab.run_all();
    (0..2).for_each(|rank| lab.said(rank, "is committed", 2));
    for rank in 0..2 {
        let status = || {
            let output = lab.command(rank, rank).args(["status", &format!("ring.{rank}")]).output().unwrap();
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
        };
        let shown = |text: &str| text.contains(": interval ") && text.contains("a failure every 30s (configured)");
        wait_for("the interval is shown", || shown(&status()));
    }
    lab.machines[0].signal(Signal::SIGTERM);
    assert_eq!((lab.ends(0), lab.ends(1)), (143, 143));
}

//! `snapshot.interval = "auto"`: chosen from the freezes that were measured, shown, and learnt over runs.

use std::time::Duration;

use rekindle_base::interval::{Bound, Choice, MtbfSource};

use crate::kinds::count_on;
use crate::supervisor::Lab;

/// Seconds between two failures, so few that several snapshots come within seconds.
const MEAN: u64 = 30;

/// What the arithmetic says, written a second time: seconds, from seconds.
fn expected(freeze: f64, mean: f64, max_overhead: f64, persist: f64) -> f64 {
    let x = freeze / (2.0 * mean);
    let daly = (2.0 * freeze * mean).sqrt() * (1.0 + x.sqrt() / 3.0 + x / 9.0) - freeze;
    daly.max(1.0).max(freeze / max_overhead - freeze).max(persist)
}

fn assert_is_expected(choice: &Choice, max_overhead: f64) {
    let [freeze, mean, interval] = [choice.freeze, choice.mtbf, choice.interval].map(|time| time.as_secs_f64());
    let expected = expected(freeze, mean, max_overhead, choice.persist.map_or(0.0, |took| took.as_secs_f64()));
    assert!((interval - expected).abs() < 1e-4, "{expected} s expected: {choice}");
}

#[test]
fn it_is_what_the_arithmetic_says_from_the_measured_freezes() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab
        .set("snapshot.interval", "\"auto\"")
        .set("snapshot.max-overhead", "\"10%\"")
        .set("snapshot.mean-time-between-failures", &format!("\"{MEAN}s\""))
        .set("store.keep-last", "9");
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.wait_for("the fourth image is there", || lab.images().first().is_some_and(|i| i.id.sequence() >= 4));
    let images = lab.images();
    let manifests: Vec<_> = images.iter().rev().map(|image| image.manifest().unwrap()).collect();
    assert_eq!(manifests[0].interval, None, "nothing was known");
    let mut freezes = vec![manifests[0].freeze_us];
    for pair in manifests.windows(2) {
        let (before, image) = (pair[0], pair[1]);
        let choice = image.interval.as_ref().unwrap();
        freezes.sort_unstable();
        // Of an even number the larger one of the middle.
        assert_eq!(choice.freeze, Duration::from_micros(freezes[freezes.len() / 2]), "median of {freezes:?}");
        assert_eq!((choice.mtbf, choice.mtbf_source), (Duration::from_secs(MEAN), MtbfSource::Configured));
        // Whether the first image was in the store yet when the next one's time was chosen depends on the disk.
        assert!(choice.persist.is_some_and(|took| !took.is_zero()) || before.id.sequence() == 1, "{choice}");
        assert_is_expected(choice, 0.1);
        let waited = (image.taken - before.taken).to_std().unwrap();
        let slack = Duration::from_secs(30);
        assert!(waited >= choice.interval && waited < choice.interval + slack, "{waited:?} {choice}");
        freezes.push(image.freeze_us);
    }
    // The same for people, for programs, and in the state that is published.
    let said = |lab: &Lab, args: &[&str]| String::from_utf8(lab.rekindle(args).stdout).unwrap();
    let in_force = manifests[2].interval.as_ref().unwrap();
    let shown = said(&lab, &["show", "j/3"]);
    assert!(shown.contains(&format!("interval   {in_force}\n")) && shown.contains("sqrt(2 * "), "{shown}");
    let json: serde_json::Value = serde_json::from_str(&said(&lab, &["show", "j/3", "--json"])).unwrap();
    assert_eq!(json["interval"], serde_json::to_value(in_force).unwrap());
    let json: serde_json::Value = serde_json::from_str(&said(&lab, &["list", "j", "--json"])).unwrap();
    let row = json.as_array().unwrap().iter().find(|row| row["id"] == images[images.len() - 3].id.to_string());
    assert_eq!(row.unwrap()["interval"], serde_json::to_value(in_force).unwrap());
    assert!(run.err().contains("interval ") && run.err().contains("in lost work"), "{}", run.err());

    // A crash is counted, and the end of the supervisor by force; a run that goes on knows of both, and the freezes.
    run.crash(&lab);
    count_on(&lab, &mut run, 2);
    let record = lab.job().record().unwrap().unwrap();
    assert!(record.failures == 1 && record.uptime > Duration::from_secs(3), "{record:?}");
    run.kill_9();
    let lab = lab.set("snapshot.mean-time-between-failures", "\"observed\"").set("snapshot.max-overhead", "\"0.01%\"");
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.job_pid(&lab);
    // An image that was on its way is stored first, and what that took counts.
    run.wait_for("no image is on its way", || lab.published().is_some_and(|now| now.persisting.is_none()));
    let choice = run.published(&lab).unwrap().interval.unwrap();
    let MtbfSource::Observed { uptime, failures: 2 } = choice.mtbf_source else { panic!("{choice}") };
    assert!(uptime >= record.uptime, "{choice}");
    let mean = (Duration::from_secs(24 * 3600) + uptime) / 3;
    assert!(choice.mtbf.abs_diff(mean) <= Duration::from_micros(1), "{mean:?} {choice}");
    assert_eq!(choice.bound, Bound::MaxOverhead);
    assert_is_expected(&choice, 0.0001);
    let json: serde_json::Value = serde_json::from_str(&said(&lab, &["list", "--json"])).unwrap();
    assert_eq!(json[0]["interval"], serde_json::to_value(&choice).unwrap());
    run.wait_said("by max-overhead; costs 0.01% in freezes");
}

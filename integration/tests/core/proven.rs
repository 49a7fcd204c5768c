//! Images that the job has lived on from, and what they are kept for.

use crate::kinds::{finish, until_after_snapshot};
use crate::supervisor::Lab;

/// The numbers of the images that `list` calls proven, newest first.
fn proven(lab: &Lab) -> Vec<u64> {
    let listed = lab.rekindle(&["list", "j", "--json"]);
    let rows: serde_json::Value = serde_json::from_slice(&listed.stdout).unwrap();
    let rows = rows.as_array().unwrap().iter().filter(|row| row["proven"] == true);
    rows.map(|row| row["id"].as_str().unwrap()[..6].parse().unwrap()).collect()
}

#[test]
fn the_newest_proven_image_stays_until_a_newer_one_is_proven() {
    let Some(lab) = Lab::new() else { return };
    // Longer than three snapshots take on a busy machine.
    let lab = lab.set("store.keep-last", "2").set("restart.min-uptime", "\"30s\"");
    let mut run = until_after_snapshot(&lab, "plain");
    assert_eq!(proven(&lab), [0_u64; 0], "the job has not lived on from it yet");
    let shown = lab.rekindle(&["show", "j/1"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("proven     not yet"), "{shown:?}");
    run.wait_for("image 1 is proven", || proven(&lab) == [1]);
    for _ in 0..3 {
        run.snapshot(&lab);
    }
    // The last two, the next that can be proven, and the one that is.
    assert_eq!(lab.good(), [4, 3, 2, 1]);
    let plan = lab.rekindle(&["prune", "j", "--dry-run", "--keep-last", "1"]);
    let plan = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(plan.contains("newest proven"), "{plan}");
    // It is known after the supervisor, and after the life, that proved it.
    run.crash(&lab);
    run.wait_said("the job was restored from image 000004");
    lab.kill_9(run);
    assert_eq!(proven(&lab), [1]);
    let pruned = lab.rekindle(&["prune", "j", "--keep-last", "1"]);
    assert!(pruned.status.success(), "{pruned:?}");
    assert_eq!(lab.good(), [4, 1]);
    // An image is proven by the life that is restored from it, too; then the older one may go.
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image 000004");
    run.wait_for("image 4 is proven", || proven(&lab) == [4, 1]);
    let table = lab.rekindle(&["list", "j"]);
    assert!(String::from_utf8_lossy(&table.stdout).contains("good, restored, proven"), "{table:?}");
    run.snapshot(&lab);
    run.wait_for("image 1 went", || lab.good() == [5, 4]);
    finish(&lab, run);
}

/// What `list`, `show` and `status` say about an image: taken, rehearsed or restored.
fn evidence(lab: &Lab, number: usize) -> [String; 3] {
    let json = |args: &[&str]| serde_json::from_slice::<serde_json::Value>(&lab.rekindle(args).stdout).unwrap();
    let listed = json(&["list", "j", "--json"]);
    let mut rows = listed.as_array().unwrap().iter();
    let row = rows.find(|row| row["id"].as_str().unwrap().starts_with(&format!("{number:06}"))).unwrap();
    let shown = json(&["show", &format!("j/{number}"), "--json"]);
    let status = json(&["status", "j", "--json"]);
    [&row["evidence"], &shown["evidence"], &status["last_evidence"]].map(|word| word.as_str().unwrap_or("-").to_owned())
}

#[test]
fn taken_rehearsed_and_restored_are_told_apart() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.rehearse", "\"off\"");
    let run = until_after_snapshot(&lab, "plain");
    assert_eq!(evidence(&lab, 1), ["taken"; 3]);
    lab.kill_9(run);
    assert_eq!(evidence(&lab, 1), ["taken"; 3]);
    let lab = lab.set("snapshot.rehearse", "\"1day\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image 000001");
    run.wait_for("it counts as restored", || evidence(&lab, 1)[..2] == ["restored", "restored"]);
    run.snapshot(&lab);
    run.wait_for("the second is rehearsed", || evidence(&lab, 2) == ["rehearsed"; 3]);
    let text = |args: &[&str]| String::from_utf8_lossy(&lab.rekindle(args).stdout).into_owned();
    assert!(text(&["status", "j"]).contains("ago, rehearsed"));
    run.snapshot(&lab);
    assert_eq!(evidence(&lab, 3), ["taken"; 3], "one of the same kinds was rehearsed, and not this one");
    // It survives the supervisor.
    lab.kill_9(run);
    let listed = text(&["list", "j"]);
    assert_eq!(["good, taken", "good, rehearsed", "good, restored"].map(|words| listed.contains(words)), [true; 3]);
    let shown = text(&["show", "j/2"]);
    assert!(shown.contains("rehearsed: all its processes were restored beside the job"), "{shown}");
}

/// As it is by default: the trial before the job begins, and the rehearsal of the first image.
fn rehearsing() -> Option<Lab> {
    Some(Lab::new()?.set("snapshot.rehearse", "\"1day\""))
}

/// A CRIU that does the rest as the real one does.
fn with_criu(lab: Lab, text: &str) -> Lab {
    let text = format!("{text}\nexec {} \"$@\"", crate::supervisor::criu().display());
    let path = format!("{:?}", lab.script("criu", &text));
    lab.set("criu.path", &path)
}

#[test]
fn a_run_is_refused_where_not_even_a_small_job_can_be_restored() {
    let Some(lab) = rehearsing() else { return };
    let lab = with_criu(lab, "case \"$*\" in *swrk*) exit 1 ;; esac");
    let (_, said) = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]).ends_with(69);
    assert!(said.contains("CRIU cannot dump and restore even a small job here"), "{said}");
    assert!(!said.contains("job j starts") && lab.images().is_empty(), "{said}");
    lab.assert_all_gone();
}

/// They are rehearsed in their slots, which are emptied once the images are stored.
#[test]
fn images_on_the_disk_are_rehearsed() {
    let Some(lab) = rehearsing().map(|lab| lab.set("snapshot.staging", "\"store\"")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.wait_for("it is rehearsed", || evidence(&lab, 1) == ["rehearsed"; 3]);
    run.wait_for("the slots are emptied", || lab.job().staged().is_empty() && lab.images().len() == 1);
    finish(&lab, run);
}

#[test]
fn where_no_image_is_rehearsed_it_is_said() {
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.rehearse", "\"off\"")) else { return };
    let run = until_after_snapshot(&lab, "plain");
    let text = |args: &[&str]| String::from_utf8_lossy(&lab.rekindle(args).stdout).into_owned();
    for words in [text(&["list", "j"]), text(&["status", "j"])] {
        assert!(words.contains(", not rehearsed") && words.contains("snapshot.rehearse"), "{words}");
    }
    assert_eq!(evidence(&lab, 1), ["taken"; 3]);
    finish(&lab, run);
}

#[test]
fn a_criu_that_is_newer_than_what_was_tried_is_named_and_a_rehearsal_counts() {
    let Some(lab) = rehearsing() else { return };
    let lab = with_criu(lab, "case \"$*\" in *--version*) echo 'Version: 9.1.0'; exit ;; esac");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("this version of rekindle was not tried with CRIU 9.1.0");
    run.wait_for("it is recorded", || lab.job().evidence().unwrap().awaits().is_some_and(|it| it.contains("9.1.0")));
    run.job_pid(&lab);
    run.snapshot(&lab);
    run.wait_for("it is rehearsed", || evidence(&lab, 1) == ["rehearsed"; 3]);
    assert_eq!(lab.job().evidence().unwrap().awaits(), None);
    assert_eq!(run.err().matches("was not tried with").count(), 1, "once");
    finish(&lab, run);
}

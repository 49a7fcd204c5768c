//! The commands around `run`, and what they say to wrong input.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::{Output, Stdio};

use nix::sys::signal::Signal;
use rekindle_store::retention::survey::Survey;
use serde_json::Value;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::Lab;

fn text(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

fn json(lab: &Lab, args: &[&str]) -> Value {
    let (code, out, err) = text(&lab.rekindle(&[args, &["--json"]].concat()));
    let told: Vec<&str> = err.lines().filter(|line| !line.contains("the disk space is free in")).collect();
    assert!(code == 0 && told.is_empty(), "{args:?}: {code} {err}");
    serde_json::from_str(&out).unwrap_or_else(|error| panic!("{args:?}: {error}\n{out}"))
}

#[test]
fn what_is_there_can_be_looked_at() {
    let Some(lab) = Lab::new() else { return };
    let store = lab.file("none");
    let (code, _, said) = text(&lab.rekindle(&["list", "--store", store.to_str().unwrap()]));
    assert!(code == 2 && said.contains("there is no store"), "a typing error: {code} {said}");
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    let jobs = json(&lab, &["list"]);
    assert_eq!((&jobs[0]["job"], &jobs[0]["state"], &jobs[0]["images"]), (&"j".into(), &"running".into(), &2.into()));
    assert_eq!(jobs[0]["pid"], run.job_pid(&lab));
    let images = json(&lab, &["list", "j"]);
    assert_eq!((&images[0]["state"], &images[0]["reason"]), (&"good".into(), &"signal".into()));
    let newest = images[0]["id"].as_str().unwrap().to_string();
    for name in ["j", "j/latest", "j/2", "j/-1", &format!("j/{newest}"), &newest] {
        assert_eq!(json(&lab, &["show", name])["id"], newest.as_str(), "{name}");
    }
    assert_eq!((&images[0]["nth_newest"], &images[1]["nth_newest"]), (&1.into(), &2.into()));
    assert_eq!(json(&lab, &["show", "j/-2"])["id"], images[1]["id"]);
    // What the images share is in none of these sums.
    let (frees, bytes) = (images[1]["frees"].as_u64().unwrap(), images[1]["bytes"].as_u64().unwrap());
    assert!(frees > 0 && frees < bytes && jobs[0]["frees"].as_u64() > Some(frees), "{images:#} {jobs:#}");
    let shown = json(&lab, &["show", "j"]);
    assert_eq!(shown["tree"]["job"], 1001);
    assert!(shown["freeze_us"].as_u64().unwrap() > 0 && !shown["phases"].as_array().unwrap().is_empty());
    assert!(!shown.to_string().contains("REKINDLE_LAB"), "no environment");
    let reports = json(&lab, &["verify"]);
    assert_eq!(reports["images"].as_array().unwrap().len(), 2);
    assert!(text(&lab.rekindle(&["show", "j/1"])).1.contains("made by"));
    // A supervisor at work is not disturbed.
    let (code, _, said) = text(&lab.rekindle(&["prune", "j"]));
    assert!(code == 2 && said.contains("is supervised by"), "{said}");
    assert_eq!(json(&lab, &["prune", "--dry-run"])[0]["action"], "keep");
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    assert_eq!(json(&lab, &["list"])[0]["state"], "completed");
    // With more packs than a list is worth. Marks without a pack are enough: they have no index that would be read.
    assert!(json(&lab, &["list", "j"])[0]["frees"].is_u64());
    for number in 0..513 {
        fs::write(lab.job().packs().dir().join(format!("{number:032x}.gone")), "").unwrap();
    }
    assert!(json(&lab, &["list", "j"])[0]["frees"].is_null());
}

/// The keys of all objects in a document.
fn keys(value: &Value, into: &mut Vec<String>) {
    match value {
        Value::Object(all) => all.iter().for_each(|(key, value)| {
            into.push(key.clone());
            keys(value, into);
        }),
        Value::Array(all) => all.iter().for_each(|value| keys(value, into)),
        _ => {}
    }
}

#[test]
fn keys_in_json_have_one_style() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    let mut found = Vec::new();
    let commands: [&[&str]; 11] = [
        &["list"],
        &["list", "j"],
        &["show", "j"],
        &["status"],
        &["status", "j"],
        &["verify"],
        &["prune", "--dry-run"],
        &["repair", "--dry-run"],
        &["config", "show"],
        &["report", "j", "--out", "-"],
        &["snapshot", "j"],
    ];
    for args in commands {
        keys(&json(&lab, args), &mut found);
    }
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
    // Names of devices, pids and words of the kernel are keys, too.
    let is_ours = |key: &&String| key.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "-_".contains(c));
    let odd: Vec<&String> = found.iter().filter(is_ours).filter(|key| key.contains('-')).collect();
    assert!(found.len() > 100 && odd.is_empty(), "{odd:?}");
}

#[test]
fn a_watch_whose_reader_is_gone_ends() {
    let Some(lab) = Lab::new() else { return };
    assert!(lab.rekindle(&["list"]).status.success());
    let mut command = lab.command(["status", "--watch", "--every", "100ms"]);
    let mut watch = command.stdout(std::process::Stdio::piped()).spawn().unwrap();
    // As head does.
    drop(watch.stdout.take());
    let until = std::time::Instant::now() + std::time::Duration::from_secs(20);
    let ended = loop {
        match watch.try_wait().unwrap() {
            Some(ended) => break Some(ended),
            None if std::time::Instant::now() >= until => break None,
            None => std::thread::sleep(std::time::Duration::from_millis(20)),
        }
    };
    let _ = watch.kill();
    assert_eq!(ended.and_then(|ended| ended.code()), Some(0), "{ended:?}");
}

/// The text without what clap sends to a terminal, and without progress that was overwritten.
fn without_styles(text: &str) -> String {
    let line = |line: &str| {
        let line = line.rsplit('\r').next().unwrap_or_default();
        let mut parts = line.split('\x1b');
        let first = parts.next().unwrap_or_default().to_owned();
        parts.fold(first, |all, part| all + part.split_once(|c: char| c.is_ascii_alphabetic()).map_or("", |it| it.1))
    };
    text.replace("\r\n", "\n").lines().map(line).collect::<Vec<_>>().join("\n")
}

/// A terminal of this width is standard output.
#[test]
fn tables_fit_a_terminal_and_a_pipe_gets_all() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    let command = lab.command(["list"]).get_program().to_owned();
    for args in [
        &["list"][..],
        &["list", "j"],
        &["status"],
        &["show", "j"],
        &["prune", "--dry-run"],
        &["verify"],
        &["verify", "--read-data"],
        &["repair", "--dry-run"],
        &["doctor"],
        &["config", "show"],
        &["--help"],
        &["run", "--help"],
    ] {
        let piped = text(&lab.rekindle(args)).1;
        let script = "import fcntl, os, pty, struct, sys, termios
def spawn():
    pid, fd = pty.fork()
    if pid == 0:
        fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 80, 0, 0))
        os.execvp(sys.argv[1], sys.argv[1:])
    out = b''
    try:
        while part := os.read(fd, 4096):
            out += part
    except OSError:
        pass
    os.waitpid(pid, 0)
    return out
sys.stdout.buffer.write(spawn())";
        let mut python = std::process::Command::new(crate::supervisor::python().unwrap());
        python.args(["-c", script]).arg(&command).args(args).envs(lab.variables());
        let shown = String::from_utf8(python.output().unwrap().stdout).unwrap();
        let shown = without_styles(&shown);
        // A name cannot be broken.
        let is_path = |line: &&str| line.split_whitespace().any(|word| word.starts_with('/') && word.len() > 40);
        let shown = shown.lines().filter(|line| !is_path(line)).collect::<Vec<_>>().join("\n");
        let widest = shown.lines().map(|line| line.trim_end().chars().count()).max();
        assert!(
            widest > Some(20) && widest <= Some(80),
            "{args:?}: {widest:?}
{shown}"
        );
        if args == ["list", "j"] {
            assert!(shown.contains("000002-") && shown.contains("s ago"), "{shown}");
            assert!(!shown.contains("REASON") && piped.contains("REASON"), "{shown}");
        }
    }
    finish(&lab, run);
}

#[test]
fn a_job_that_its_file_knows_needs_no_command() {
    let Some(lab) = Lab::new() else { return };
    let (code, _, said) = text(&lab.rekindle(&["run", "--name", "j"]));
    assert!(code == 2 && said.contains("set job.command"), "{code} {said}");
    let lab = lab.set("job.command", "[\"/bin/echo\", \"two words\", \"\", \"x\"]");
    assert_eq!(text(&lab.rekindle(&["run", "--name", "j"])).0, 0);
    assert_eq!(lab.output(), "two words  x\n");
    // A command on the command line overrides the configuration.
    lab.run_with(&["run", "--fresh", "--name", "j", "--"], ["/bin/echo", "typed"]).ends_with(0);
    assert!(lab.output().ends_with("typed\n"), "{}", lab.output());
}

#[test]
fn an_image_in_memory_is_one_like_the_others() {
    // It is on its way for far longer than all commands here take.
    let Some(lab) =
        Lab::new().map(|lab| lab.set("store.persist-rate", "\"1MiB\"").set("store.compression", "\"none\""))
    else {
        return;
    };
    let mut run = lab.python("memory_job.py", &[lab.path().to_str().unwrap(), "48"]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_for("a part of it is there", || {
        lab.published().and_then(|p| p.persisting).is_some_and(|p| p.done > 1 << 20)
    });
    let row = &json(&lab, &["list", "j"])[0];
    assert_eq!((&row["places"], &row["state"]), (&serde_json::json!(["memory"]), &"good".into()), "{row:#}");
    let (done, total) = (row["persisting"]["done"].as_u64().unwrap(), row["persisting"]["total"].as_u64().unwrap());
    assert!(done > 1 << 20 && done < total && row["bytes"] == total, "{row:#}");
    let job = &json(&lab, &["list"])[0];
    assert_eq!((&job["images"], &job["newest"]), (&1.into(), &row["id"]));
    assert_eq!((&job["bytes"], &job["memory_bytes"]), (&0.into(), &total.into()));
    let table = text(&lab.rekindle(&["list", "j"])).1;
    assert!(table.contains("memory, ") && table.contains(" % stored"), "{table}");
    assert!(text(&lab.rekindle(&["list"])).1.contains("running, storing "));
    let shown = json(&lab, &["show", "j"]);
    assert_eq!((&shown["id"], &shown["copies"][0]["place"]), (&row["id"], &"memory".into()));
    assert!(shown["persisting"]["done"].as_u64() >= Some(done));
    let shown = text(&lab.rekindle(&["show", row["id"].as_str().unwrap()])).1;
    let folder = lab.mounted()[0].join("slots");
    assert!(shown.contains(folder.to_str().unwrap()) && shown.contains("storing "), "{shown}");
    let (code, said, _) = text(&lab.rekindle(&["verify", "j"]));
    assert!(code == 0 && said.contains("checksums exist only after it is stored"), "{code} {said}");
    let plan = json(&lab, &["prune", "j", "--dry-run"]);
    assert_eq!((plan.as_array().unwrap().len(), &plan[0]["action"]), (1, &"keep".into()));
    assert!(plan[0]["reason"].as_str().unwrap().starts_with("only in memory"), "{plan:#}");

    lab.kill_9(run);
    let row = &json(&lab, &["list", "j"])[0];
    assert_eq!((&row["places"], &row["persisting"]), (&serde_json::json!(["memory"]), &Value::Null), "{row:#}");
    let lab = lab.set("store.persist-rate", "\"unlimited\"");
    let mut run = lab.run_with(&["restore", "j"], [""; 0]);
    run.wait_said("continues from image 000001");
    count_on(&lab, &mut run, 5);
    run.wait_for("it is stored", || lab.images().len() == 1 && lab.published().is_some_and(|p| p.persisting.is_none()));
    let row = &json(&lab, &["list", "j"])[0];
    assert_eq!(row["places"], serde_json::json!(["memory", "store"]));
    assert!(text(&lab.rekindle(&["verify", "j"])).1.contains("ok, "));
    // The store's copy is the one that lasts; where it is damaged the other counts.
    std::fs::write(lab.images()[0].dir.join("manifest.json"), "{").unwrap();
    assert_eq!(json(&lab, &["list", "j"])[0]["state"], "good");
    assert_eq!(text(&lab.rekindle(&["verify", "j"])).0, 1);
    finish(&lab, run);
}

#[test]
fn what_does_not_fit_into_the_store_stays_in_memory() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.min-free", "\"1000TB\"")) else { return };
    // While it is tried again, the commands show that.
    let lab = lab.variable("REKINDLE_RETRY_AFTER", "10m");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR1);
    run.wait_for("the store refuses it", || lab.published().is_some_and(|p| p.persist_failure.is_some()));
    let job = &json(&lab, &["list"])[0];
    assert!(job["persist_failure"].as_str().unwrap().contains("store.min-free"), "{job:#}");
    assert_eq!(json(&lab, &["list", "j"])[0]["places"], serde_json::json!(["memory"]));
    let shown = text(&lab.rekindle(&["show", "j"])).1;
    assert!(
        shown.contains("not stored image 000001-") && shown.contains("is only in memory: the image needs"),
        "{shown}"
    );
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(74);
    assert!(said.contains("is only in memory, at"), "{said}");
    let lab = lab.set("store.min-free", "\"1MiB\"");
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("continues from image 000002");
    run.wait_for("it is stored", || lab.good() == [2]);
    finish(&lab, run);
}

/// Where no image is kept because it was rehearsed.
fn unrehearsed() -> Option<Lab> {
    Some(Lab::new()?.set("snapshot.rehearse", "\"off\""))
}

#[test]
fn pruning_follows_the_plan() {
    let Some(lab) = unrehearsed().map(|lab| lab.set("store.keep-last", "4")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    for _ in 0..3 {
        run.snapshot(&lab);
    }
    finish(&lab, run);
    let lab = lab.set("store.keep-last", "2");
    let plan = json(&lab, &["prune", "j", "--dry-run"]);
    let actions: Vec<&str> = plan.as_array().unwrap().iter().map(|row| row["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["keep", "keep", "would remove", "would remove"]);
    assert_eq!(lab.good(), [4, 3, 2, 1]);
    let rows = json(&lab, &["prune", "j"]);
    assert_eq!(lab.good(), [4, 3]);
    let words = |at: usize| (rows[at]["action"].as_str().unwrap(), rows[at]["reason"].as_str().unwrap());
    assert_eq!((words(1), words(2)), (("keep", "one of the last 2"), ("removed", "older than the last 2")));
}

/// Minimum of data that each image of the job `fresh-8` shares with no other image, if the job counts on between two
/// snapshots.
const FRESH: u64 = 8 << 20;

/// Total size of the images of the job; shared data is counted once.
fn total(lab: &Lab) -> u64 {
    Survey::of(&lab.job(), 0).unwrap().sizes().total()
}

#[test]
fn a_job_that_cannot_be_pruned_does_not_hinder_the_others() {
    let Some(lab) = unrehearsed().map(|lab| lab.set("store.keep-last", "4")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    for _ in 0..3 {
        run.snapshot(&lab);
    }
    finish(&lab, run);
    // One before it in the list, and one after it.
    for name in ["a", "z"] {
        let folder = lab.store().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("images"), "").unwrap();
    }
    let (code, out, said) = text(&lab.rekindle(&["prune", "--keep-last", "2"]));
    assert_eq!((code, lab.good()), (1, vec![4, 3]), "{out} {said}");
    assert!(
        said.contains("job a: cannot") && said.contains("job z: cannot") && !said.contains("job j: cannot"),
        "{said}"
    );
    assert!(out.contains("removed") && out.contains("2 removals free"), "{out}");
}

#[test]
fn pins_and_tags_are_kept_by_prune_and_found_again() {
    let Some(lab) = unrehearsed().map(|lab| lab.set("store.keep-last", "9")) else { return };
    let mut run = until_after_snapshot(&lab, "fresh-8");
    for _ in 0..4 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 2);
    }
    // A supervisor at work is not disturbed, and does not disturb.
    let (code, out, err) = text(&lab.rekindle(&["tag", "j/1", "best", "epoch-3"]));
    assert!(code == 0 && out.starts_with("j/000001-") && out.trim_end().ends_with(": best, epoch-3"), "{out} {err}");
    let pinned = json(&lab, &["pin", "j/best"]);
    assert_eq!((&pinned["pinned"], &pinned["tags"]), (&true.into(), &serde_json::json!(["best", "epoch-3"])));
    run.snapshot(&lab);
    finish(&lab, run);
    assert_eq!(json(&lab, &["pin", "j/2"])["pinned"], true);
    assert_eq!(json(&lab, &["pin", "--remove", "j/2"])["pinned"], false);
    assert_eq!(json(&lab, &["tag", "--remove", "j/best", "epoch-3"])["tags"], serde_json::json!(["best"]));

    let shown = json(&lab, &["show", "j/best"]);
    assert!(shown["id"].as_str().unwrap().starts_with("000001-") && shown["pinned"] == true, "{shown:#}");
    assert!(text(&lab.rekindle(&["show", "j/best"])).1.contains("tags       pinned, best"));
    let listed = json(&lab, &["list", "j"]);
    let oldest = &listed[5];
    assert_eq!((&oldest["pinned"], &oldest["tags"]), (&true.into(), &serde_json::json!(["best"])), "{listed:#}");
    assert!(text(&lab.rekindle(&["list", "j"])).1.contains("pinned, best"));
    assert_eq!(text(&lab.rekindle(&["verify", "j"])).0, 0, "tags are no damage");

    let without_a_tag = ["tag", "--remove", "j/1", "a b"];
    for args in [&["tag", "j/1", "latest"][..], &["tag", "j/1", "7"], &without_a_tag, &["pin", "j/none", "--json"]] {
        let (code, _, said) = text(&lab.rekindle(args));
        assert!(code == 2, "{args:?}: {code} {said}");
    }
    let (code, _, said) = text(&lab.rekindle(&["tag", "j/1", "7"]));
    assert!(code == 2 && said.contains("is not a tag"), "{said}");

    // Flags stand above the configuration; the table says what each gives back.
    let plan = json(&lab, &["prune", "j", "--dry-run"]);
    assert!(plan.as_array().unwrap().iter().all(|row| row["action"] == "keep"), "{plan:#}");
    let plan = json(&lab, &["prune", "j", "--dry-run", "--keep-last", "2"]);
    let actions: Vec<&str> = plan.as_array().unwrap().iter().map(|row| row["action"].as_str().unwrap()).collect();
    assert_eq!(actions, ["keep", "keep", "would remove", "would remove", "would remove", "keep"], "{plan:#}");
    assert_eq!(plan[5]["reason"], "pinned");
    // What it shares with the others stays, and that is not all of it.
    let (frees, bytes) = (plan[2]["frees"].as_u64().unwrap(), plan[2]["bytes"].as_u64().unwrap());
    assert!(frees >= FRESH && frees < bytes, "{plan:#}");
    let young = json(&lab, &["prune", "j", "--dry-run", "--keep-last", "1", "--keep-within", "1h"]);
    assert_eq!(young[1]["reason"], "younger than 1h", "{young:#}");
    let hourly =
        json(&lab, &["prune", "j", "--dry-run", "--keep-last", "1", "--keep-hourly", "1", "--keep-daily", "1"]);
    assert_eq!(hourly[0]["reason"], "newest good, newest of its hour, newest of its day");

    let table = text(&lab.rekindle(&["prune", "j", "--keep-last", "3"])).1;
    assert!(table.contains("FREES") && table.contains("older than the last 3"), "{table}");
    assert_eq!(lab.good(), [6, 5, 4, 1]);
    // A bound that can be met takes the oldest that is not pinned, one that cannot says so.
    json(&lab, &["prune", "j", "--max-total-size", &total(&lab).to_string()]);
    assert_eq!(lab.good(), [6, 5, 4, 1]);
    json(&lab, &["prune", "j", "--max-total-size", &(total(&lab) - 1).to_string()]);
    assert_eq!(lab.good(), [6, 5, 1]);
    let (code, out, said) = text(&lab.rekindle(&["prune", "j", "--max-total-size", "1", "--json"]));
    assert!(code == 0 && out.contains("beyond store.max-total-size"), "{code} {out}");
    assert!(said.contains("rekindle pin --remove"), "{said}");
    assert_eq!(lab.good(), [6, 1]);
    assert_eq!(text(&lab.rekindle(&["pin", "--remove", "j/best"])).0, 0);
    json(&lab, &["prune", "j", "--max-total-size", &(total(&lab) - 1).to_string()]);
    assert_eq!(lab.good(), [6]);
}

#[test]
fn a_bound_of_all_images_holds_while_the_job_runs() {
    for staging in ["ram", "store"] {
        let lab = || Lab::new().map(|lab| lab.set("snapshot.staging", &format!("{staging:?}")));
        let Some(first) = lab() else { return };
        let mut run = until_after_snapshot(&first, "fresh-8");
        run.snapshot(&first);
        finish(&first, run);
        let own = json(&first, &["prune", "j", "--dry-run"])[0]["frees"].as_u64().unwrap();
        assert!((FRESH..2 * FRESH).contains(&own), "{own}");

        // Room for three and a half: before the fourth is written the oldest goes that is not pinned.
        let Some(lab) = lab().map(|lab| lab.set("store.keep-last", "9")) else { return };
        let lab = lab.set("store.max-total-size", &(total(&first) + own * 3 / 2).to_string());
        let mut run = until_after_snapshot(&lab, "fresh-8");
        assert_eq!(text(&lab.rekindle(&["pin", "j/1"])).0, 0);
        for _ in 0..4 {
            run.snapshot(&lab);
            count_on(&lab, &mut run, 2);
        }
        assert_eq!(lab.good(), [5, 4, 1], "{staging}");
        run.wait_said("to free space for the next image (store.max-total-size)");
        // If no image may be removed, the next one is not stored, and the message names a remedy.
        assert_eq!(text(&lab.rekindle(&["pin", "j/4"])).0, 0);
        run.signal(Signal::SIGUSR1);
        run.wait_said("rekindle pin --remove");
        run.wait_said("store.max-total-size");
        assert_eq!(lab.good(), [5, 4, 1], "{staging}");
        count_on(&lab, &mut run, 2);
        finish(&lab, run);
    }
}

#[test]
fn unknown_names_name_the_known() {
    let Some(lab) = Lab::new() else { return };
    finish(&lab, until_after_snapshot(&lab, "plain"));
    for args in [["list", "x"], ["show", "x"], ["show", "x/1"], ["verify", "x"], ["prune", "x"], ["restore", "x"]] {
        let (code, out, said) = text(&lab.rekindle(&args));
        assert!(code == 2 && out.is_empty() && said.contains("jobs are j"), "{args:?}: {code} {said}");
    }
    for args in [["show", "j/7"], ["restore", "j/7"], ["verify", "j/7"]] {
        let (code, _, said) = text(&lab.rekindle(&args));
        assert!(code == 2 && said.contains("images are 000001-"), "{args:?}: {code} {said}");
    }
    for name in ["../j", ".", "", "a b"] {
        assert_eq!(text(&lab.rekindle(&["list", name])).0, 2, "{name:?}");
        let (code, _, said) = lab.run_with(&["run", "--name", name, "--"], ["true"]).finish(crate::supervisor::LIMIT);
        assert!(matches!(code, 2 | 78), "{name:?}: {code} {said}");
    }
    assert_eq!(text(&lab.rekindle(&["run"])).0, 2);
    assert_eq!(text(&lab.rekindle(&["frobnicate"])).0, 2);
}

#[test]
fn a_wrong_configuration_names_key_value_and_rule() {
    let Some(lab) = Lab::new() else { return };
    for (key, value, words) in [
        ("snapshot.interval", "\"soon\"", vec!["snapshot.interval", "\"soon\"", "must be"]),
        ("snapshot.interval", "\"1ms\"", vec!["snapshot.interval", "1ms", "100ms"]),
        ("store.keep-last", "0", vec!["store.keep-last = 0", "must be"]),
        ("store.keep-lost", "1", vec!["store.keep-lost", "did you mean store.keep-last?"]),
        ("restart.retry-exit-codes", "[3]", vec!["restart.retry-exit-codes was removed", "[[rules]]"]),
        ("job.umask", "\"022\"", vec!["job.umask was removed", "UMask="]),
    ] {
        let lab = Lab::new().unwrap().set(key, value);
        let (_, said) = lab.run(["true"]).ends_with(78);
        assert!(words.iter().all(|word| said.contains(word)), "{key}: {said}");
        assert!(said.contains("rekindle.toml"), "{said}");
        let file = lab.file("rekindle.toml");
        assert_eq!(lab.command(["config", "check"]).arg(file).output().unwrap().status.code(), Some(78));
        assert!(!lab.store().exists(), "nothing was touched");
    }
    assert!(!json(&lab, &["config", "show"]).as_array().unwrap().is_empty());
    let (code, out, _) = text(&lab.command(["completions", "bash"]).output().unwrap());
    assert!(code == 0 && out.contains("_rekindle"));
}

#[test]
fn what_is_missing_is_said() {
    let Some(lab) = Lab::new() else { return };
    let mut command = lab.command(["run", "--name", "j", "--", "true"]);
    let (code, _, said) = text(&command.env("REKINDLE_CRIU", "/nowhere/criu").output().unwrap());
    assert!(code == 69 && said.contains("/nowhere/criu") && said.contains("install CRIU"), "{code} {said}");
    let script = lab.script("criu", "echo Version: 3.17.1");
    let (code, _, said) = text(&command.env("REKINDLE_CRIU", script).output().unwrap());
    assert!(code == 69 && said.contains("3.17.1") && said.contains("or newer"), "{code} {said}");
    let script = lab.script("criu", "echo hello");
    let (code, _, said) = text(&command.env("REKINDLE_CRIU", script).output().unwrap());
    assert!(code == 69 && said.contains("hello"), "{code} {said}");
    assert!(!lab.store().exists(), "nothing was touched");
    // As another user. The original program is in a folder that user nobody cannot read.
    lab.install(env!("CARGO_BIN_EXE_rekindle").as_ref(), &lab.file("rekindle"));
    let mut command = std::process::Command::new(lab.file("rekindle"));
    command.args(["run", "--name", "j", "--store"]).arg(lab.store()).args(["--", "true"]).current_dir("/");
    let (code, _, said) = text(&std::os::unix::process::CommandExt::uid(&mut command, 65534).output().unwrap());
    assert!(code == 69 && said.contains("root") && said.contains("sudo"), "{code} {said}");
}

/// A terminal that is closed, as by a lost connection: its end of file comes again and again.
#[test]
fn status_that_watches_ends_with_its_terminal() {
    let Some(lab) = Lab::new() else { return };
    lab.run(["true"]).ends_with(0);
    let script = "import os, pty, sys
pid, fd = pty.fork()
if pid == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
seen = b''
while b'Ctrl-C' not in seen:
    seen += os.read(fd, 4096)
os.close(fd)
os.waitpid(pid, 0)";
    let command = lab.command(["status"]).get_program().to_owned();
    let mut python = std::process::Command::new(crate::supervisor::python().unwrap());
    python.args(["-c", script]).arg(&command).args(["status", "--watch", "--every", "100ms"]).envs(lab.variables());
    let (code, _, said) = text(&python.output().unwrap());
    assert!(code == 0, "{code} {said}");
}

/// It is left open for days.
#[test]
fn status_that_watches_outlives_a_store_that_is_away() {
    use std::io::BufRead;
    let Some(lab) = Lab::new() else { return };
    lab.run(["true"]).ends_with(0);
    let mut command = lab.command(["status", "j", "--watch", "--every", "100ms"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = std::io::BufReader::new(child.stderr.take().unwrap()).lines();
    let mut shown = std::io::BufReader::new(child.stdout.take().unwrap()).lines();
    let mut sees = || assert!(shown.by_ref().any(|line| line.unwrap().contains("completed")));
    sees();
    let away = lab.file("away");
    fs::rename(lab.store(), &away).unwrap();
    assert!(said.any(|line| line.unwrap().contains("store")));
    fs::rename(&away, lab.store()).unwrap();
    // What is in the pipe may be of before.
    for _ in 0..3 {
        sees();
    }
    drop(shown);
    assert!(child.wait().unwrap().success());
}

/// A folder of somebody else's, and one in which no job has ever run, hide no job of the store.
#[test]
fn a_folder_that_is_no_job_hides_no_other() {
    let Some(lab) = Lab::new() else { return };
    lab.run(["true"]).ends_with(0);
    let (empty, notes) = (lab.store().join("empty"), lab.store().join("notes"));
    fs::create_dir(&empty).unwrap();
    fs::set_permissions(&empty, fs::Permissions::from_mode(0o700)).unwrap();
    let rows = |args: &[&str], code: i32| {
        let done = lab.rekindle(args);
        let said = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(code), "{args:?}: {said}");
        assert_eq!(said.contains("notes belongs to user 1000"), code == 78, "{args:?}: {said}");
        serde_json::from_slice::<serde_json::Value>(&done.stdout).unwrap()
    };
    let states = |rows: serde_json::Value| {
        let pair = |row: &serde_json::Value| format!("{} {}", row["job"], row["state"]).replace('"', "");
        rows.as_array().unwrap().iter().map(pair).collect::<Vec<_>>()
    };
    for command in ["list", "status"] {
        assert_eq!(states(rows(&[command, "--json"], 0)), ["empty new", "j completed"]);
    }
    rows(&["verify", "--json"], 0);
    fs::create_dir(&notes).unwrap();
    std::os::unix::fs::chown(&notes, Some(1000), None).unwrap();
    for command in ["list", "status"] {
        assert_eq!(states(rows(&[command, "--json"], 78)), ["empty new", "j completed", "notes ?"]);
    }
    rows(&["verify", "--json"], 78);
    // What a job should have is missed.
    fs::remove_dir(&notes).unwrap();
    fs::remove_dir_all(lab.job().images_dir()).unwrap();
    let done = lab.rekindle(&["list", "--json"]);
    assert_eq!(done.status.code(), Some(125));
    assert_eq!(states(serde_json::from_slice(&done.stdout).unwrap()), ["empty new", "j ?"]);
}

//! Restarts: which deaths are worth one, from which image, how often, and what comes after the last image.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, assert_counts_up, numbers};

#[test]
fn exit_codes_that_are_worth_a_restart_and_those_that_are_not() {
    let Some(lab) = Lab::new() else { return };
    // No life is too short: on a busy machine a supervisor sees some of these for less than a millisecond.
    let lab = lab.set("restart.min-uptime", "\"0s\"").set("restart.max-restarts", "2");
    let run = |lab: &Lab, code: i32| {
        lab.run_with(&["run", "--fresh", "--name", "j", "--"], ["sh", "-c", &format!("echo n; exit {code}")])
    };
    let (out, said) = run(&lab, 2).ends_with(2);
    assert!(out == "n\n" && said.contains("exit code 2 means wrong usage"), "{said}");
    let (out, said) = run(&lab, 9).ends_with(9);
    assert_eq!(out, "n\n".repeat(3));
    assert!(said.contains("given up: 2 restarts within 1h (restart.max-restarts)"), "{said}");
    let only = "[{ match = { exit-code = [2, 9] }, action = \"restart\" }, { match = { cause = \"exit\" }, action = \"give-up\" }]";
    let lab = lab.set("rules", only);
    let (out, said) = run(&lab, 8).ends_with(8);
    assert!(out == "n\n" && said.contains("rule 2"), "{said}");
    assert_eq!(run(&lab, 2).ends_with(2).0, "n\n".repeat(3));
    let lab = lab.set("restart.min-uptime", "\"5s\"").set("restart.max-restarts", "9");
    let (out, said) = run(&lab, 9).ends_with(9);
    assert_eq!(out, "n\n".repeat(2));
    assert!(
        said.contains("the job died twice within 5s (restart.min-uptime) after a start from the beginning"),
        "{said}"
    );
    let lab = lab.set("restart.cold-start", "\"never\"");
    let (out, said) = run(&lab, 9).ends_with(9);
    assert!(out == "n\n" && said.contains("restart.cold-start"), "{said}");
}

#[test]
fn the_first_restart_comes_at_once_and_the_wait_before_further_ones_doubles() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab
        .set("restart.max-restarts", "4")
        // No life is too short.
        .set("restart.min-uptime", "\"0s\"")
        .set("restart.backoff", "\"200ms\"");
    let begun = Instant::now();
    let (_, said) = lab.run(["sh", "-c", "exit 1"]).ends_with(1);
    let waits: Vec<&str> = said
        .lines()
        .filter_map(|line| line.split_once("starting again from the beginning in ").map(|parts| parts.1))
        .collect();
    assert_eq!(waits, ["0s", "200ms", "400ms", "800ms"], "{said}");
    assert!(begun.elapsed() >= Duration::from_millis(200 + 400 + 800));
}

#[test]
fn an_image_the_job_dies_from_is_passed_over_then_the_beginning_then_the_end() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("restart.min-uptime", "\"60s\"").set("restart.max-restarts", "20");
    let lab = lab.set("restart.cold-start", "\"allow\"");
    let doom = lab.file("doom");
    // A job that ends while CRIU still restores it is another failure, and CRIU may be late on a busy machine. Two deaths are
    // the same only if the lives were of about the same length.
    let text = format!(
        "echo begin; i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); echo n $i; [ ! -e {} ] || {{ sleep 6; exit 3; }}; sleep 0.02; done",
        doom.display()
    );
    let mut run = lab.run(["sh", "-c", &text]);
    run.wait_printed("n 5\n");
    run.snapshot(&lab);
    run.snapshot(&lab);
    std::fs::write(doom, "").unwrap();
    let (out, said) = run.ends_with(3);
    let from = |line: &'_ str| {
        let (_, rest) = line.split_once("continuing from ").or_else(|| line.split_once("starting again from "))?;
        rest.split_once(" in ").map(|parts| parts.0.to_owned())
    };
    let went: Vec<String> = said.lines().filter_map(from).collect();
    let short: Vec<&str> = went.iter().map(|from| from.split('-').next().unwrap()).collect();
    let expected = ["image 000002", "image 000002", "image 000001", "image 000001", "the beginning"];
    // The first life came from nothing as well, and ended early: one more from there, or none.
    assert!(short.starts_with(&expected[..4]), "{short:?}\n{said}");
    assert!(short[4..].iter().all(|from| *from == "the beginning") && short.len() > 4, "{short:?}\n{said}");
    assert!(said.contains("given up: there is no good image, and the job died twice"), "{said}");
    assert!(out.matches("begin").count() >= 2, "{out}");
    assert!(lab.good().is_empty() && lab.images().len() == 2, "both are marked, both are kept");
    let status = String::from_utf8(lab.rekindle(&["status", "j"]).stdout).unwrap();
    assert!(status.contains("`rekindle list j` shows what is wrong with its images"), "{status}");
    let unmarked = lab.rekindle(&["mark", "--good", "j/1", "j/2"]);
    let said = String::from_utf8_lossy(&unmarked.stdout).into_owned();
    assert!(unmarked.status.success() && said.matches("good again").count() == 2, "{unmarked:?}");
    assert!(said.contains("dies again"), "{said}");
    assert_eq!(lab.good(), [2, 1]);
    assert_eq!(lab.rekindle(&["mark", "--good", "j/9"]).status.code(), Some(2));
}

#[test]
fn after_a_crash_an_image_is_taken_whose_files_are_still_there() {
    let Some(lab) = Lab::new() else { return };
    let text = format!(
        "import mmap, os, time\n\
         n, data, folder = 0, None, {:?}\n\
         while not os.path.exists(folder + '/finish'):\n\
         \x20   n += 1\n\
         \x20   os.write(1, b'n %d\\n' % n)\n\
         \x20   if data is None and os.path.exists(folder + '/data'):\n\
         \x20       file = open(folder + '/data', 'rb')\n\
         \x20       data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)\n\
         \x20       os.write(1, b'mapped\\n')\n\
         \x20   time.sleep(0.02)\n\
         os.write(1, b'done\\n')\n",
        lab.path().to_str().unwrap()
    );
    let mut run = lab.run(["python3", "-c", &text]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    // Too large for a copy in the image.
    std::fs::write(lab.file("data"), vec![b'x'; 20 << 20]).unwrap();
    run.wait_printed("mapped\n");
    run.snapshot(&lab);
    run.snapshot(&lab);
    // As a survivor that cleans up does.
    std::fs::remove_file(lab.file("data")).unwrap();
    run.crash(&lab);
    run.wait_said("the job was restored from image 000001");
    assert_eq!(run.err().matches("and is not marked as bad").count(), 2, "{}", run.err());
    assert_eq!(lab.good(), [3, 2, 1]);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

#[test]
fn commands_and_their_images() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    // A second supervisor for the same job.
    let (_, said) = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]).ends_with(69);
    assert!(said.contains("is supervised by"), "{said}");
    run.signal(Signal::SIGKILL);
    run.wait_for("it is dead", || true);
    drop(run);
    let (_, said) = lab.run(["true"]).ends_with(2);
    assert!(said.contains("another command") && said.contains("--fresh") && said.contains("--name"), "{said}");
    assert_eq!(lab.good(), [1]);
    // Anew, although there is something to go on from.
    std::fs::write(lab.file("finish"), "").unwrap();
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let (out, _) = lab.run_with(&["run", "--fresh", "--name", "j", "--"], &command).ends_with(0);
    assert_eq!(out, "n 1\ndone\n");
    // A job that completed does not begin anew in silence.
    let before = lab.output();
    let (out, said) = lab.run(&command).ends_with(2);
    assert!(out.is_empty() && said.contains("job j completed at 20") && said.contains("use --fresh"), "{out} {said}");
    assert_eq!(lab.output(), before, "its output is untouched");
}

#[test]
fn images_of_a_completed_job_can_be_removed() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.on-success", "\"remove\"")) else { return };
    finish(&lab, until_after_snapshot(&lab, "plain"));
    assert!(lab.images().is_empty());
}

#[test]
fn back_to_an_older_image_and_on_from_there() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.keep-last", "5")) else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    let mark = numbers(&lab.output()).len();
    run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    run.kill_9();
    let mut run = lab.run_with(&["restore", "j/1"], [] as [&str; 0]);
    run.wait_said("continues from image 000001");
    run.wait_said("the job was restored from image 000001");
    let later = std::fs::read_to_string(lab.store().join("j/log/stdout.log.rolled-back.1")).unwrap();
    let first = usize::try_from(numbers(&later)[0]).unwrap();
    assert!(first <= mark, "it is back where image 1 was taken: {first}, {mark}");
    count_on(&lab, &mut run, 3);
    // Nothing newer of its own: the same image, not the future that was given up.
    run.crash(&lab);
    run.wait_said_times("the job was restored from image 000001", 2);
    run.kill_9();
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image 000001");
    count_on(&lab, &mut run, 3);
    assert_eq!(run.snapshot(&lab), 4);
    count_on(&lab, &mut run, 3);
    run.crash(&lab);
    run.wait_said("the job was restored from image 000004");
    run.kill_9();
    let mut run = lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    run.wait_said("the job was restored from image 000004");
    finish(&lab, run);
    assert_counts_up(&lab.output());
}

//! A machine is lost with its store and its memory, and its job goes on elsewhere from what the replica has.

use std::fs;

use crate::supervisor::{Lab, Running, assert_counts_up, numbers};

/// The location of the replica, as a value of the configuration.
fn url(dir: &tempfile::TempDir) -> String {
    format!("\"file://{}\"", dir.path().display())
}

/// Waits until the newest image is in the replica, and answers its name.
pub(crate) fn replicated(run: &mut Running, lab: &Lab) -> String {
    let number = run.snapshot(lab);
    let last = || lab.published().and_then(|published| published.last_replicated);
    run.wait_for("it is in the replica", || last().is_some_and(|image| image.sequence() == number));
    last().unwrap().to_string()
}

/// The machine is gone, at once and with all it had; what it had printed by then.
fn lose(lab: &Lab, run: Running) -> String {
    lab.kill_9(run);
    let printed = lab.output();
    lab.forget_memory();
    fs::rename(lab.store(), lab.file("lost")).unwrap();
    printed
}

/// Lets the job come to its end, which it does only where nothing is missing of its state, and compares its whole
/// output.
fn completes(lab: &Lab, mut run: Running, finish: &Lab, before: &str) {
    let known = numbers(&lab.output()).len();
    let printed = run.said_so_far();
    run.wait_for("the job counts on", || numbers(&lab.output()).len() > known + 5 || printed().contains("WRONG"));
    fs::write(finish.file("finish"), "").unwrap();
    let (out, said) = run.ends_with(0);
    assert!(out.ends_with("done\n"), "{out}\n{said}");
    let first = *numbers(&out).first().unwrap();
    assert!(first > 1, "it was begun anew: {said}");
    let upto = numbers(before).into_iter().filter(|n| *n < first).map(|n| format!("n {n}\n")).collect::<String>();
    assert_counts_up(&(upto + &lab.output()));
}

#[test]
fn a_job_goes_on_elsewhere_with_the_same_configuration() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &url(&dir));
    let folder = lab.path().to_str().unwrap().to_owned();
    let command = ["plain", folder.as_str()];
    let mut run = lab.python("kinds.py", &command);
    run.wait_printed("n 20\n");
    replicated(&mut run, &lab);
    let image = replicated(&mut run, &lab);
    let before = lose(&lab, run);

    let lab = lab.set("store.min-free", "\"8000TB\"");
    let (out, said) = lab.python("kinds.py", &command).ends_with(69);
    assert!(said.contains("(store.min-free): free space there") && out.is_empty(), "{said}");
    let lab = lab.set("store.min-free", "\"1MiB\"");
    let mut run = lab.python("kinds.py", &command);
    run.wait_said(&format!("image {image} was fetched from the replica"));
    run.wait_said(&format!("the job was restored from image {image}"));
    let said = run.err();
    assert!(said.contains("stdout.log starts empty") && said.contains("are not here"), "{said}");
    completes(&lab, run, &lab, &before);
}

#[test]
fn a_job_goes_on_in_a_store_of_another_path() {
    let (Some(lab), Some(other)) = (Lab::new(), Lab::new()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let (lab, other) = (lab.set("replica.url", &url(&dir)), other.set("replica.url", &url(&dir)));
    let folder = lab.path().to_str().unwrap().to_owned();
    let command = ["plain", folder.as_str()];
    let mut run = lab.python("kinds.py", &command);
    run.wait_printed("n 20\n");
    let image = replicated(&mut run, &lab);
    let before = lose(&lab, run);
    let listed = |args: &[&str]| {
        let ran = other.rekindle(args);
        assert!(ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    let line = |text: &str| text.lines().find(|line| line.contains(&image)).unwrap_or_default().to_owned();
    assert!(line(&listed(&["list", "j", "--replica"])).contains(" replica "), "there is no store yet");
    // Whatever is at the old path is another's.
    let theirs = lab.store().join("j/log/stdout.log");
    fs::create_dir_all(theirs.parent().unwrap()).unwrap();
    fs::write(&theirs, "theirs\n").unwrap();

    let mut run = other.python("kinds.py", &command);
    run.wait_said(&format!("the job was restored from image {image}"));
    assert!(line(&listed(&["list", "j", "--replica"])).contains("store, replica "));
    assert!(!listed(&["list", "j"]).contains("replica"));
    // It is as good as any: its images, taken here, bring it back, also in a later run.
    replicated(&mut run, &other);
    run.crash(&other);
    let image = replicated(&mut run, &other);
    other.kill_9(run);
    let mut run = other.python("kinds.py", &command);
    run.wait_said(&format!("the job was restored from image {image}"));
    let first = *numbers(&other.output()).first().unwrap();
    let upto = numbers(&before).into_iter().filter(|n| *n < first).map(|n| format!("n {n}\n")).collect::<String>();
    completes(&other, run, &lab, &upto);
    assert_eq!(fs::read_to_string(theirs).unwrap(), "theirs\n");
}

#[test]
fn files_that_are_not_here_are_asked_for_and_nothing_is_begun() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &url(&dir));
    let folder = lab.path().to_str().unwrap().to_owned();
    let command = ["files", folder.as_str()];
    let mut run = lab.python("kinds.py", &command);
    run.wait_printed("n 20\n");
    let image = replicated(&mut run, &lab);
    let before = lose(&lab, run);
    // One that is small and written in place is in the image; one that is appended to is not.
    fs::remove_file(lab.file("w.txt")).unwrap();
    fs::rename(lab.file("a.txt"), lab.file("kept")).unwrap();

    for _ in 0..2 {
        let (out, said) = lab.python("kinds.py", &command).ends_with(69);
        assert_eq!(out, "", "{said}");
        assert!(said.contains("a.txt was open for writing") && said.contains("Copy the file here"), "{said}");
        assert!(!lab.file("w.txt").exists(), "nothing is put back where not all can be");
        assert_eq!(lab.good().len(), 1, "{said}");
    }
    fs::rename(lab.file("kept"), lab.file("a.txt")).unwrap();
    let mut run = lab.python("kinds.py", &command);
    run.wait_said(&format!("the job was restored from image {image}"));
    let said = run.err();
    assert!(said.contains("w.txt did not exist and was created from the image"), "{said}");
    assert!(said.contains("a.txt was put back"), "{said}");
    completes(&lab, run, &lab, &before);
}

//! The job's output: to the terminal while it runs, in files that are rotated, and not a line lost.

use std::fs;

use nix::sys::signal::Signal;

use crate::supervisor::{Lab, assert_counts_up, numbers};

#[test]
fn both_streams_are_followed_apart_and_to_the_end() {
    let Some(lab) = Lab::new() else { return };
    let text = "i=0; while [ $i -lt 5000 ]; do i=$((i + 1)); echo n $i; echo n $i >&2; done";
    let (out, err) = lab.run(["sh", "-c", text]).ends_with(0);
    assert_counts_up(&out);
    assert_counts_up(&err);
    assert_eq!((numbers(&out).len(), numbers(&err).len()), (5000, 5000));
    let mut run = lab.run(["sh", "-c", "echo first; sleep 1000"]);
    run.wait_printed("first\n");
    assert!(run.runs() && !run.out().contains("n 1"), "earlier runs are not repeated: {}", run.out());
}

#[test]
fn rotation_loses_no_line() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("log.max-size", "\"4KiB\"").set("log.keep", "400").set("snapshot.interval", "\"200ms\"");
    // Two that write to the same file, from two processes.
    let text = "count() { i=0; while [ $i -lt 30000 ]; do i=$((i + 1)); echo $1 $i; \
                [ $((i % 300)) -ne 0 ] || sleep 0.01; done; }; count m & count n; wait; exit 0";
    let (out, said) = lab.run(["sh", "-c", text]).ends_with(0);
    assert!(said.contains("image "), "{said}");
    let folder = lab.store().join("j/log");
    let mut parts: Vec<(u32, String)> = fs::read_dir(folder)
        .unwrap()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().to_str()?.strip_prefix("stdout.log")?.to_string();
            let number = if name.is_empty() { 0 } else { name.strip_prefix('.')?.parse().ok()? };
            Some((number, fs::read_to_string(entry.path()).unwrap()))
        })
        .collect();
    parts.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    assert!(parts.len() > 2, "it was never rotated");
    let whole: String = parts.into_iter().map(|(_, text)| text).collect();
    assert_counts_up(&whole);
    assert_eq!(whole.lines().count(), 60000);
    assert_counts_up(&whole.replace("n ", "x ").replace("m ", "n "));
    assert_eq!(out, whole, "the terminal saw the same");
}

#[test]
fn a_restored_job_writes_on_in_the_same_file() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"4KiB\"")) else { return };
    let text = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); echo n $i; sleep 0.05; done";
    let mut run = lab.run(["sh", "-c", text]);
    run.wait_printed("n 20\n");
    run.snapshot(&lab);
    // What is printed may lag behind the file.
    let at = numbers(&lab.output()).len();
    run.wait_printed(&format!("n {}\n", at + 20));
    run.crash(&lab);
    run.wait_printed(&format!("n {}\n", at + 40));
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert_counts_up(&lab.output());
    let kept = fs::read_to_string(lab.store().join("j/log/stdout.log.rolled-back.1")).unwrap();
    assert!(numbers(&kept).len() >= 15, "{kept}");
}

#[test]
fn nobody_reads_the_output() {
    let Some(lab) = Lab::new() else { return };
    let mut command = lab.command(["run", "--name", "j", "--", "sh", "-c", "seq 100000; echo end >&2; exit 0"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut child = command.stdout(writer).stderr(std::process::Stdio::null()).spawn().unwrap();
    let ended = crate::supervisor::comes(crate::supervisor::LIMIT, || child.try_wait().unwrap().is_some());
    let _ = child.kill();
    assert!(ended, "it hangs on a closed pipe");
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(lab.output().lines().count(), 100_000);
}

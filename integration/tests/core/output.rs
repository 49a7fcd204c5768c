//! The job's output: to the terminal while it runs, in files that are rotated, and not a line lost.

use std::fs;
use std::os::unix::fs::MetadataExt;

use nix::sys::signal::Signal;

use crate::supervisor::{Lab, assert_counts_up, numbers, python, wait_for};

#[test]
fn both_streams_are_followed_apart_and_to_the_end() {
    let Some(lab) = Lab::new() else { return };
    let text = "i=0; while [ $i -lt 5000 ]; do i=$((i + 1)); echo n $i; echo n $i >&2; done";
    let (out, err) = lab.run(["sh", "-c", text]).ends_with(0);
    assert_counts_up(&out);
    assert_counts_up(&err);
    assert_eq!((numbers(&out).len(), numbers(&err).len()), (5000, 5000));
    let mut run = lab.run_with(&["run", "--fresh", "--name", "j", "--"], ["sh", "-c", "echo first; sleep 1000"]);
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
            let text = fs::read_to_string(entry.path()).unwrap();
            // The part that was rotated away while the job ran is a hole.
            Some((number, text.trim_start_matches('\0').to_owned()))
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
    // The printed output may lag behind the file.
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

/// A program that wants a descriptor without O_NONBLOCK or with it often forgets the other flags.
#[test]
fn a_job_that_clears_o_append_is_restored_and_its_output_goes_on() {
    for user in [None, Some("nobody")] {
        let Some(lab) = Lab::new() else { return };
        let lab = lab.set("log.max-size", "\"4KiB\"").set("restart.cold-start", "\"never\"");
        let lab = match user {
            Some(user) => lab.set("job.user", &format!("{user:?}")),
            None => lab,
        };
        let text = "import fcntl, os, time\n\
                    fcntl.fcntl(1, fcntl.F_SETFL, os.O_NONBLOCK)\n\
                    for n in range(1, 100000):\n    os.write(1, b'n %d\\n' % n)\n    time.sleep(0.01)";
        let Some(python) = python() else { return };
        let mut run = lab.run([python.as_os_str(), "-c".as_ref(), text.as_ref()]);
        for more in [900, 20] {
            let at = numbers(&run.out()).len();
            run.wait_printed(&format!("n {}\n", at + more));
            // The first one rotates the file.
            run.snapshot(&lab);
            let at = *numbers(&run.out()).last().unwrap();
            run.wait_printed(&format!("n {}\n", at + 20));
            run.crash(&lab);
            run.wait_printed(&format!("n {}\n", at + 60));
        }
        let flags = fs::read_to_string(format!("/proc/{}/fdinfo/1", run.job_pid(&lab))).unwrap();
        let flags = flags.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
        assert_ne!(flags & libc::O_APPEND, 0, "{flags:o}");
        run.signal(Signal::SIGTERM);
        run.ends_with(143);
        let all = String::from_utf8(lab.rekindle(&["logs", "j"]).stdout).unwrap();
        assert_counts_up(&all);
    }
}

/// The numbers in the frames of a progress bar. The last frame may not be whole yet.
fn frames(text: &str) -> Vec<u64> {
    let mut parts: Vec<&str> = text.split('\r').collect();
    parts.pop();
    assert_eq!(parts.first(), Some(&""), "it begins with a frame: {text}");
    let number = |frame: &str| {
        let (number, rest) = frame.strip_prefix("n ")?.split_once(' ')?;
        ["=", "#"].map(|of| of.repeat(70)).contains(&rest.to_owned()).then(|| number.parse().ok())?
    };
    parts
        .iter()
        .skip(1)
        .map(|frame| number(frame).unwrap_or_else(|| panic!("this frame is broken: {frame:?}")))
        .collect()
}

/// A terminal shows what follows the newest carriage return: nothing may stand between the frames, and none is missing.
#[test]
fn a_progress_bar_goes_back_with_its_job() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"4KiB\"")) else { return };
    // Otherwise who reads late would find after the restart what it has shown already.
    let (bar, other, again) = ("=".repeat(70), "#".repeat(70), lab.file("again"));
    let text = format!(
        "i=0; bar='{bar}'; while [ $i -lt 100000 ]; do i=$((i + 1)); [ ! -e {} ] || bar='{other}'; \
         printf '\\rn %d %s' $i $bar >&2; sleep 0.02; done",
        again.display()
    );
    let mut run = lab.run(["sh", "-c", &text]);
    // The file is rotated after some 50 frames.
    wait_for("it is rotated", || lab.store().join("j/log/stderr.log.1").exists());
    let following = lab.run_with(&["logs", "-f", "--stderr", "j"], [""; 0]);
    wait_for("it shows the bar", || following.out().contains('\r'));
    run.snapshot(&lab);
    let all = || frames(&String::from_utf8(lab.rekindle(&["logs", "--stderr", "j"]).stdout).unwrap());
    let last = || all().last().copied().unwrap_or_default();
    let at = last();
    wait_for("it goes on, over a rotation", || last() > at + 60);
    // Who reads may be late, and does not see what is cut off before.
    wait_for("it shows that", || frames(&following.out()).last().is_some_and(|number| *number > at + 55));
    run.crash(&lab);
    fs::write(again, "").unwrap();
    let died = last();
    wait_for("it is beyond the crash", || last() > died + 60);
    let beyond = last();
    wait_for("it shows that", || frames(&following.out()).last().is_some_and(|number| *number > beyond));
    let shown = frames(&following.out());
    let steps: Vec<(u64, u64)> = shown.iter().copied().zip(shown.iter().skip(1).copied()).collect();
    let back: Vec<_> = steps.iter().filter(|(before, after)| *after != before + 1).collect();
    assert!(matches!(back[..], [(before, after)] if after < before && *before > at + 50), "{back:?}");
    drop(following);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    let numbers = all();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1), "{numbers:?}");
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

/// Ctrl-S, a pager, a connection that stalls: the reader is there and does not read.
#[test]
fn a_reader_of_standard_error_that_does_not_read_stops_neither_restarts_nor_the_end() {
    let Some(lab) = Lab::new() else { return };
    let text = "seq 40000 >&2; echo all; while :; do sleep 0.1; done";
    let mut command = lab.command(["run", "-v", "--name", "j", "--", "sh", "-c", text]);
    let (reader, writer) = std::io::pipe().unwrap();
    let mut child = command.stdout(std::process::Stdio::null()).stderr(writer).spawn().unwrap();
    // The command has the writer's end, too.
    drop(command);
    wait_for("the job has written more than a pipe takes", || lab.output().contains("all\n"));
    // The job can be quicker than what is published of it.
    let mut job = None;
    wait_for("the job runs", || {
        job = lab.published().and_then(|now| now.pid);
        job.is_some()
    });
    let job = job.unwrap();
    crate::supervisor::kill(job, Signal::SIGKILL);
    wait_for("it is started again", || {
        lab.published().is_some_and(|now| now.restarts == 1 && now.pid.is_some_and(|pid| pid != job))
    });
    wait_for("it has written again", || lab.output().matches("all\n").count() == 2);
    let supervisor = i32::try_from(child.id()).unwrap();
    crate::supervisor::kill(supervisor, Signal::SIGUSR2);
    wait_for("it has stopped", || lab.store().join("j/result.json").exists());
    assert_eq!(lab.good().len(), 1, "the final image");
    // The rest of the job's output waits for the reader until a signal says that nobody waits for it.
    let ended = crate::supervisor::comes(crate::supervisor::LIMIT, || {
        crate::supervisor::kill(supervisor, Signal::SIGTERM);
        child.try_wait().unwrap().is_some()
    });
    let _ = child.kill();
    assert_eq!((ended, child.wait().unwrap().code()), (true, Some(75)));
    drop(reader);
}

/// Bytes on the disk of the job's log folder.
fn log_blocks(lab: &Lab) -> u64 {
    let files = fs::read_dir(lab.store().join("j/log")).into_iter().flatten().flatten();
    // One may be renamed just now.
    files.filter_map(|file| file.metadata().ok()).map(|meta| meta.blocks() * 512).sum()
}

/// A job that makes its output long without writing it costs neither disk nor time, nor a terminal full of zeros.
#[test]
fn a_hole_in_the_output_costs_nothing() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"256KiB\"").set("log.keep", "2")) else { return };
    let script = "import os, sys, time
def n(number): os.write(1, b'n %d\\n' % number)
n(1)
go = sys.argv[1]
for life in range(4):
    while not os.path.exists(go + str(life)): time.sleep(0.01)
    if not os.path.exists(go + 'died' + str(life)):
        open(go + 'died' + str(life), 'w').close()
        os.write(1, b'x' * 700000)
        os.ftruncate(1, os.fstat(1).st_size + (1 << 28))
        os.write(1, b'last words %d\\n' % life)
        time.sleep(2)
        os._exit(9)
n(2)
time.sleep(1000)";
    let go = lab.file("go");
    let mut run = lab.run([python().unwrap().to_str().unwrap(), "-Sc", script, go.to_str().unwrap()]);
    run.wait_printed("n 1\n");
    run.snapshot(&lab);
    for life in 0..4 {
        fs::write(lab.file(&format!("go{life}")), "").unwrap();
        run.wait_printed(&format!("last words {life}\n"));
    }
    run.wait_printed("n 2\n");
    let printed = run.out();
    assert!(printed.len() < 4 << 20, "{} bytes were printed", printed.len());
    assert!(log_blocks(&lab) < 2 << 20, "{} bytes are in the log folder", log_blocks(&lab));
    let names = fs::read_dir(lab.store().join("j/log")).unwrap().flatten().map(|entry| entry.file_name());
    let names: Vec<String> = names.map(|name| name.into_string().unwrap()).collect();
    assert_eq!(names.iter().filter(|name| name.contains(".rolled-back.")).count(), 2, "{names:?}");
    // The newest rotation may be under way.
    let names = || fs::read_dir(lab.store().join("j/log")).unwrap().flatten().map(|entry| entry.file_name());
    wait_for("no half file is left", || !names().any(|name| name.to_string_lossy().starts_with(".tmp-")));
    let kept = fs::read(lab.store().join("j/log/stdout.log.rolled-back.4")).unwrap();
    assert!(kept.ends_with(b"last words 3\n"), "{:?}", String::from_utf8_lossy(&kept[kept.len().saturating_sub(99)..]));
    assert!(run.err().contains("not kept"), "{}", run.err());
    lab.kill_9(run);
    assert!(lab.output().ends_with("n 2\n"));
}

/// Rotation does not wait for a snapshot, and loses nothing though the job writes on.
#[test]
fn output_is_bounded_between_snapshots() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"64KiB\"")) else { return };
    // 5 MB.
    let text = "i=0; while [ $i -lt 400000 ]; do i=$((i + 1)); echo n $i; done; sleep 1000";
    let bounded = lab.set("log.keep", "3");
    let mut run = bounded.run(["sh", "-c", text]);
    run.wait_printed("n 400000\n");
    wait_for("little is left on the disk", || log_blocks(&bounded) < 512 << 10);
    bounded.kill_9(run);

    // 200 MiB at some 30 MB/s, with nobody who reads them: it is moved away while they are written, not only at the
    // end. A supervisor that gets no processor for a second is still far from the bound.
    let Some(lab) = Lab::new() else { return };
    let fast = lab.set("log.max-size", "\"4MiB\"").set("log.keep", "2");
    let text = "import os, time\nfor n in range(200):\n os.write(1, b'x' * 99 * 10592 + b'\\n')\n time.sleep(0.03)\nos.write(2, b'all\\n')\ntime.sleep(1000)";
    let mut run = fast.run([python().unwrap().to_str().unwrap(), "-Sc", text]);
    let mut most = 0;
    run.wait_closely("all is written", || {
        most = most.max(log_blocks(&fast));
        fs::metadata(fast.store().join("j/log/stderr.log")).is_ok_and(|meta| meta.len() > 3)
    });
    assert!(most < 128 << 20, "{most}");
    wait_for("it is within the bound", || log_blocks(&fast) < 16 << 20);
    fast.kill_9(run);

    let Some(lab) = Lab::new().map(|lab| lab.set("log.max-size", "\"64KiB\"").set("log.keep", "1000")) else { return };
    let text = "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); echo n $i; [ $((i % 1000)) -ne 0 ] || sleep 0.02; done
        while [ ! -e go ]; do sleep 0.01; done; [ -e died ] || { touch died; kill -9 $$; }
        echo n 100001; sleep 1000";
    let mut run = lab.run(["sh", "-c", text]);
    run.wait_printed("n 20000\n");
    let mut following = lab.run_with(&["logs", "-f", "j"], [""; 0]);
    following.wait_printed("n 20000\n");
    run.wait_printed("n 60000\n");
    run.snapshot(&lab);
    run.wait_printed("n 100000\n");
    wait_for("it is rotated", || log_blocks(&lab) < 1200 << 10);
    following.wait_printed("n 100000\n");
    assert_counts_up(&following.out());
    drop(following);
    let all = || String::from_utf8(lab.rekindle(&["logs", "j"]).stdout).unwrap();
    assert_counts_up(&all());
    assert_eq!(numbers(&all()).len(), 100_000);
    // Back to the snapshot: also what was rotated since is output that did not happen.
    fs::write(lab.file("go"), "").unwrap();
    run.wait_printed("n 100001\n");
    assert_counts_up(&all());
    assert_eq!(numbers(&all()).len(), 100_001);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
}

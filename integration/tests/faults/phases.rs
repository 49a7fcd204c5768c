//! Each phase fails: the job runs on, the log says why, a later attempt succeeds.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use chrono::{DateTime, Local, NaiveDateTime};
use nix::sys::statvfs::statvfs;
use rekindle_store::Form;

use crate::rig::{Rig, Supervisor};

/// The next attempt is so late that all was looked at before.
fn retry_late(rig: &mut Rig) {
    rig.retry_after("3s");
}

/// A snapshot that fails with these words, then one by itself once the fault is gone ([`retry_late`]).
fn fails(rig: &Rig, supervisor: &mut Supervisor<'_>, ranks: usize, words: &[&str], clear: impl FnOnce()) {
    let newest = |rig: &Rig| rig.images().first().map(|image| image.id);
    let before = newest(rig);
    let why = supervisor.failing_snapshot();
    for word in words {
        assert!(why.contains(word), "not {word:?} in {why}");
    }
    assert!(why.contains("the job continues"), "{why}");
    assert_eq!(newest(rig), before, "{why}");
    // A failure that may be temporary is retried at once, so the next attempt may already be running.
    let soon = why.contains("signal SIGKILL");
    if !soon {
        supervisor.assert_unharmed(ranks);
    }
    // The state file is in the store too; a failure to write it does not stop the job.
    if !why.contains("No space left") {
        // It is written after the line of the log.
        supervisor.until("the state says so", |rig| {
            let failure = rig.state().and_then(|now| now.last_failure);
            failure.is_some_and(|said| why.contains(&said))
        });
        assert_eq!(rig.state().unwrap().restarts, 0);
    }
    clear();
    let image = supervisor.image();
    let manifest = image.manifest().unwrap();
    let waited = manifest.taken.signed_duration_since(said_at(&why));
    assert!(soon || waited.num_milliseconds() >= 2990, "REKINDLE_RETRY_AFTER is 3s: {waited}");
    assert_eq!(manifest.tree.cuda.len(), ranks);
    supervisor.until("the image is in the store, and no draft of another", |rig| {
        rig.drafts().is_empty() && rig.folder().images().unwrap().iter().any(|stored| stored.id == image.id)
    });
    supervisor.assert_unharmed(ranks);
}

/// When a line of the log was written.
fn said_at(line: &str) -> DateTime<Local> {
    let time = line.get(..23).and_then(|time| NaiveDateTime::parse_from_str(time, "%Y-%m-%d %H:%M:%S%.3f").ok());
    time.and_then(|time| time.and_local_timezone(Local).earliest()).unwrap_or_else(|| panic!("no time in {line}"))
}

#[test]
fn the_driver_refuses_in_each_phase() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    retry_late(&mut rig);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    let second = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).max().unwrap();
    let cases: [(&str, String, &[&str]); 8] = [
        ("fail-state", "304 times=1".into(), &["find: ", "CUDA_ERROR_OPERATING_SYSTEM (304)"]),
        ("fail-lock", "304".into(), &["lock: ", "cuCheckpointProcessLock"]),
        ("fail-lock", format!("600 pid={second}"), &["lock: ", "CUDA_ERROR_NOT_READY (600)", "try again"]),
        ("fail-checkpoint", "801".into(), &["checkpoint: ", "managed memory"]),
        ("fail-checkpoint", format!("2 pid={second}"), &["checkpoint: ", "as much free memory"]),
        ("fail-checkpoint", "304 pid=1001".into(), &["checkpoint: "]),
        ("fail-unlock", "304 times=1".into(), &["unlock: "]),
        ("fail-unlock", format!("304 times=1 pid={second}"), &["unlock: "]),
    ];
    for (fault, text, words) in cases {
        rig.standin.fault(fault, &text);
        fails(&rig, &mut supervisor, 2, words, || rig.clear(fault));
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn the_driver_can_not_be_asked_after_the_unlock() {
    let Some(rig) = Rig::new() else { return };
    let mut supervisor = rig.start();
    rig.standin.fault("fail-unlock", "hold");
    supervisor.ask();
    supervisor.until("the unlock is held up", |rig| rig.standin.path().join("fail-unlock.held").exists());
    rig.standin.fault("fail-state", "304 times=1");
    rig.clear("fail-unlock");
    let why = supervisor.said("the snapshot failed");
    assert!(why.contains("check: ") && why.contains("the job continues"), "{why}");
    supervisor.assert_unharmed(1);
    supervisor.image();
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn criu_fails_in_every_way() {
    for (staging, slots) in [("ram", "\"$memory\"/j-*/slots"), ("store", "\"$store\"/j/slots")] {
        // A shell expression for the folder where the image is made: the slot without a complete image.
        let none = "[ -e \"$s\"/manifest.json ] || [ ! -d \"$s\"/criu ] || echo \"$s\"";
        criu_fails_with(staging, &format!("$(for s in {slots}/*; do {none}; done)"));
    }
}

fn criu_fails_with(staging: &str, image: &str) {
    let Some(mut rig) = Rig::new() else { return };
    // Longer than a dump takes on a busy machine.
    rig.set("SNAPSHOT_FREEZE_LIMIT", "15s");
    retry_late(&mut rig);
    rig.set("SNAPSHOT_STAGING", staging);
    let mut supervisor = rig.start();
    let after = |what: &str| format!("\"$real\" \"$@\"; {what}; exit 0");
    // What was received from a FIFO is out of reach.
    let pages = if staging == "ram" { "pagemap-*" } else { "pages-*" };
    // A kill at any other moment is no case: while its code is in a process, that ends with SIGTRAP, and the job is
    // restored.
    let cases: [(String, &[&str]); 7] = [
        ("exit 1".into(), &["dump: ", "without an answer (exit code 1)"]),
        ("kill -9 $$".into(), &["dump: ", "CRIU was killed (signal SIGKILL)"]),
        ("exec sleep 600".into(), &["dump: ", "did not finish within 15s"]),
        (after(&format!("truncate -s 8 {image}/criu/{pages}.img")), &["dump: the image is incomplete or damaged"]),
        (after(&format!("rm {image}/criu/pagemap-*.img")), &["dump: the image is incomplete or damaged"]),
        (after(&format!("mkfifo \"$(echo {image})/pipe\"")), &["an image can contain only files and folders"]),
        (after(&format!("rm -r {image}")), &["dump: "]),
    ];
    for (shell, words) in cases {
        rig.criu_fault(&shell);
        fails(&rig, &mut supervisor, 1, words, || rig.criu_fault(""));
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// Unmounted when dropped.
struct Tmpfs(std::path::PathBuf);

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Leaves `left` bytes of the file system at `store`. What was removed a moment ago may come back while this is done.
fn fill_up(store: &Path, left: u64) {
    let mut fill = File::create(store.join("fill")).unwrap();
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(500) {
        let at = statvfs(store).unwrap();
        let more = (at.blocks_available() * at.fragment_size()).saturating_sub(left);
        if more > 0 {
            fill.write_all(&vec![0; usize::try_from(more).unwrap()]).unwrap();
            since = Instant::now();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_full_store_fails_the_snapshot_only() {
    let Some(mut rig) = Rig::new() else { return };
    rig.set("SNAPSHOT_STAGING", "store");
    retry_late(&mut rig);
    let store = rig.path().join("store");
    std::fs::create_dir(&store).unwrap();
    nix::mount::mount(Some("none"), &store, Some("tmpfs"), nix::mount::MsFlags::empty(), Some("size=96m,mode=700"))
        .unwrap();
    let _tmpfs = Tmpfs(store.clone());
    let mut supervisor = rig.start();
    let fill = "dd if=/dev/zero of=\"$store\"/fill bs=64k 2>/dev/null";
    let clear = || {
        rig.criu_fault("");
        let _ = std::fs::remove_file(store.join("fill"));
    };
    rig.criu_fault(fill);
    fails(&rig, &mut supervisor, 1, &["dump: CRIU refused", "the file system is full"], clear);
    rig.criu_fault(&format!("\"$real\" \"$@\"; {fill}; exit 0"));
    fails(&rig, &mut supervisor, 1, &["No space left on device"], clear);
    // The free space is too small for another image, although that image would add little once it is packed.
    let packed = |rig: &Rig| rig.folder().images().unwrap().iter().all(|image| image.form() == Form::Packed);
    supervisor.until("all images are packed, and their files gone", |rig| packed(rig) && rig.drafts().is_empty());
    fill_up(&store, 4 << 20);
    fails(&rig, &mut supervisor, 1, &["not tried: the image needs about", "would free only", "store.directory"], clear);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// Refused before anything is stopped.
fn refused(key: &str, value: &str, staging: &str, words: &str) {
    let Some(mut rig) = Rig::new() else { return };
    rig.set(key, value);
    rig.set("SNAPSHOT_STAGING", staging);
    let mut supervisor = rig.start();
    let why = supervisor.failing_snapshot();
    assert!(why.contains("not tried: ") && why.contains(words), "{why}");
    assert!(!rig.log().contains("phase=\"lock\""));
    supervisor.assert_unharmed(1);
    supervisor.stop();
    assert!(rig.images().is_empty());
}

#[test]
fn too_little_host_memory_refuses() {
    refused("SNAPSHOT_MEMORY_RESERVE", "1000TB", "ram", "snapshot.memory-reserve");
}

#[test]
fn too_little_space_refuses() {
    refused("STORE_MIN_FREE", "1000TB", "store", "store.min-free");
}

#[test]
fn one_lock_that_is_not_ready_is_tried_again_with_all() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    let second = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).max().unwrap();
    for pid in [1001, second] {
        rig.standin.fault("fail-lock", &format!("600 times=1 pid={pid}"));
        assert_eq!(supervisor.snapshot().manifest().unwrap().tree.cuda.len(), 2);
        supervisor.assert_unharmed(2);
    }
    assert!(!rig.log().contains("the snapshot failed"));
    supervisor.stop();
    rig.assert_sequence();
}

/// It used CUDA when it was found, and does not any more when it is locked.
#[test]
fn a_process_that_executes_another_program_meanwhile_does_no_harm() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    let second = rig.cuda_pids().into_iter().filter_map(crate::rig::inner).max().unwrap();
    // The state is asked before the thread.
    rig.standin.fault("fail-tid", &format!("hold pid={second}"));
    supervisor.ask();
    supervisor.said("phase=\"preflight\"");
    let held = rig.standin.path().join("fail-tid.held");
    supervisor.until("its thread is asked for", |_| held.exists());
    for fault in ["fail-lock", "fail-state"] {
        rig.standin.fault(fault, &format!("3 pid={second}"));
    }
    rig.clear("fail-tid");
    let why = supervisor.said("the snapshot failed");
    assert!(why.contains("lock: ") && !why.contains("cannot continue"), "{why}");
    ["fail-lock", "fail-state"].iter().for_each(|fault| rig.clear(fault));
    supervisor.image();
    supervisor.assert_unharmed(2);
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.stop();
}

/// The others are in a collective nearly all the time, and wait there for the one that is late.
#[test]
fn ranks_that_wait_for_a_late_one_in_collectives_are_locked_soon() {
    for (ranks, late) in [(2, "60"), (3, "150"), (2, "0")] {
        let Some(mut rig) = Rig::new() else { return };
        rig.ranks(ranks, &["--collective", late]);
        locked_soon(&rig, ranks);
    }
}

/// A rank that is unlocked for a moment makes memory that can stay on the GPU before it starts its part of a collective.
#[test]
fn ranks_that_make_memory_before_each_collective_are_locked_soon() {
    for (ranks, late) in [(2, "60"), (3, "150")] {
        let Some(mut rig) = Rig::new() else { return };
        rig.kept(&["--ranks", &ranks.to_string(), "--mib", "16,16", "--churn", "--collective", late]);
        locked_soon(&rig, ranks);
    }
}

/// Six snapshots, and a death.
pub(crate) fn locked_soon(rig: &Rig, ranks: usize) {
    let mut supervisor = rig.start();
    supervisor.ranks_count(ranks);
    for _ in 0..6 {
        let image = supervisor.snapshot();
        let manifest = image.manifest().unwrap();
        let lock = manifest.phases.iter().find(|phase| phase.phase == "lock").unwrap();
        // An attempt may take 10 s.
        assert!(lock.took_us < 9_000_000, "{lock:?}\n{}", rig.log());
        supervisor.assert_unharmed(ranks);
    }
    assert!(!rig.log().contains("the snapshot failed"), "{}", rig.log());
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(ranks);
    supervisor.stop();
    rig.assert_sequence();
}

/// What the driver does for each process takes no longer for four of them than for one.
#[test]
fn four_processes_are_frozen_and_restored_at_once() {
    const RANKS: usize = 4;
    const DELAY: Duration = Duration::from_millis(1500);
    // One after the other they take longer each time; on a busy machine they may do so once.
    const ATTEMPTS: usize = 4;
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(RANKS, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(RANKS);
    for (operation, phase) in
        [("checkpoint", "checkpoint"), ("restore", "restore"), ("unlock", "unlock"), ("state", "check")]
    {
        let fault = format!("fail-{operation}");
        let at_once = (0..ATTEMPTS).any(|_| {
            rig.standin.fault(&fault, &format!("0 delay={}", DELAY.as_millis()));
            let image = supervisor.snapshot();
            rig.clear(&fault);
            let phases = &image.manifest().unwrap().phases;
            let took = Duration::from_micros(phases.iter().find(|it| it.phase == phase).unwrap().took_us);
            assert!(took >= DELAY, "{operation} of {RANKS} processes took {took:?}");
            supervisor.assert_unharmed(RANKS);
            took < DELAY * 4
        });
        assert!(at_once, "{operation} of {RANKS} processes");
    }
    let delay = DELAY * 3;
    let at_once = (0..ATTEMPTS).any(|_| {
        rig.standin.fault("fail-unlock", &format!("0 delay={}", delay.as_millis()));
        let began = Instant::now();
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        let took = began.elapsed();
        rig.clear("fail-unlock");
        assert!(took >= delay, "the restart took {took:?}");
        supervisor.assert_unharmed(RANKS);
        took < delay * 4
    });
    assert!(at_once, "the restart");
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_process_that_somebody_else_has_locked_is_left_alone() {
    let Some(mut rig) = Rig::new() else { return };
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let outer = supervisor.main_pid().to_string();
    let cuda = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        let output = rig.standin.install(command.arg("cuda").args(args).args(["--pid", &outer])).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for (action, state) in [("lock", "locked"), ("checkpoint", "checkpointed")] {
        cuda(&[action]);
        let why = supervisor.failing_snapshot();
        assert!(why.contains(&format!("process {outer} is {state}, not running")), "{why}");
        assert!(why.contains(&format!("`rekindle cuda unlock --pid {outer}`")), "{why}");
        assert_eq!(cuda(&["state"]), format!("{state}\n"), "it is not ours to undo");
    }
    cuda(&["restore"]);
    cuda(&["unlock"]);
    // The snapshot is tried again meanwhile.
    supervisor.image();
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_process_that_somebody_else_locks_between_the_look_and_the_lock_is_left_alone() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    rig.retry_after("5s");
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    supervisor.snapshot();
    let ranks: Vec<i32> = rig.cuda_pids();
    let (first, last) = (ranks.iter().min().unwrap().to_string(), *ranks.iter().max().unwrap());
    let cuda = |action: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        let output = rig.standin.install(command.args(["cuda", action, "--pid", &first])).output().unwrap();
        assert!(output.status.success(), "{action}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    for (actions, state) in [(&["lock"][..], "locked"), (&["lock", "checkpoint"], "checkpointed")] {
        // The look at the other one waits meanwhile.
        rig.standin.fault("fail-tid", &format!("hold times=1 pid={}", crate::rig::inner(last).unwrap()));
        let held = rig.standin.path().join("fail-tid.held");
        supervisor.ask();
        supervisor.until("the look is held up", |_| held.exists());
        std::thread::sleep(Duration::from_millis(200));
        for action in actions {
            cuda(action);
        }
        rig.clear("fail-tid");
        std::fs::remove_file(held).unwrap();
        let why = supervisor.said("the snapshot failed");
        assert!(why.contains(&format!("is {state}, not running")) && why.contains("the job continues"), "{why}");
        assert_eq!(cuda("state"), format!("{state}\n"), "it is not ours to undo");
        for action in actions.iter().rev() {
            cuda(if *action == "lock" { "unlock" } else { "restore" });
        }
        supervisor.image();
        supervisor.assert_unharmed(2);
    }
    assert_eq!(rig.state().unwrap().restarts, 0);
    supervisor.stop();
    rig.assert_sequence();
}

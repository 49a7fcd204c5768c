//! Ranks that use NCCL are brought to one point before they are locked: with the stand-in NCCL, real CRIU and real kill
//! -9. `REKINDLE_CUT_SNAPSHOTS` sets how many snapshots of each job are taken.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use rekindle_cuda::nccl::Ranks;

use crate::rig::{Calls, Rig, Supervisor};
use crate::supervisor::kill;

const RANKS: usize = 4;

/// How long a snapshot may wait for a rank, in tests in which none comes.
const LOCK_TIMEOUT: &str = "5s";

/// Of the log: what the cut says when it is reached.
const REACHED: &str = "all ranks wait at one point";

fn rig(mode: &str, calls: Calls) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.nccl(RANKS, mode, calls, &[]);
    Some(rig)
}

fn start(rig: &Rig) -> Supervisor<'_> {
    let mut supervisor = rig.start();
    supervisor.ranks_count(RANKS);
    supervisor
}

/// Snapshots at the first attempt, and nothing was done without the counts.
fn snapshots(rig: &Rig, supervisor: &mut Supervisor<'_>, count: usize) {
    for _ in 0..count {
        let before = rig.log().len();
        supervisor.snapshot();
        let log = &rig.log()[before..];
        assert_eq!(log.matches(REACHED).count(), 1, "one attempt\n{log}");
        for words in ["the snapshot failed", "locked without a common point"] {
            assert!(!log.contains(words), "{words}\n{log}");
        }
        supervisor.assert_unharmed(RANKS);
    }
}

/// Snapshots and restores of a job. Each is right about every number.
fn goes_round(mode: &str, calls: Calls) {
    let Some(rig) = rig(mode, calls) else { return };
    let mut supervisor = start(&rig);
    let count = std::env::var("REKINDLE_CUT_SNAPSHOTS").ok().and_then(|count| count.parse().ok());
    snapshots(&rig, &mut supervisor, count.unwrap_or(4));
    for _ in 0..2 {
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(RANKS);
        snapshots(&rig, &mut supervisor, 1);
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
    assert!(!rig.log().contains(" instead of "), "{}", rig.log());
}

macro_rules! modes {
    ($($name:ident: $mode:literal $calls:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            goes_round($mode, Calls::$calls);
        })*
    };
}

modes! {
    a_rank_that_is_always_late: "late" ByName,
    ranks_far_ahead_of_their_gpus: "ahead" BySymbol,
    sends_and_receives_in_turn: "ring" ByName,
    groups_of_all_kinds: "groups" BySymbol,
    groups_of_all_kinds_by_name: "groups" ByName,
    two_communicators_in_another_order: "crossing" ByName,
    communicators_that_were_split: "split" BySymbol,
    a_barrier_without_nccl: "barrier" ByName,
    every_operation: "kinds" BySymbol,
    communicators_that_are_made_all_the_time: "joins" ByName,
    communicators_that_do_not_block: "background" ByName,
    communicators_that_do_not_block_by_symbol: "background" BySymbol,
}

/// More communicators than the table has places for, one after the other.
#[test]
fn a_thousand_communicators_that_have_ended() {
    let Some(mut rig) = rig("churn", Calls::BySymbol) else { return };
    rig.may_take(Duration::from_secs(1200));
    let mut supervisor = start(&rig);
    supervisor.until("a thousand have ended", |rig| {
        let output = rig.standin.output();
        fs::read_to_string(output).is_ok_and(|text| text.lines().count() > 1100)
    });
    snapshots(&rig, &mut supervisor, 2);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

/// An NCCL without symbols is not seen.
#[test]
fn with_a_static_nccl_the_ranks_are_locked_by_turns() {
    for mode in ["groups", "split"] {
        let Some(mut rig) = Rig::new() else { return };
        rig.standin.add_nccl();
        let library = rig.standin.path().join("libmodel.so");
        fs::copy(rig.standin.path().join("libnccl.so.2"), &library).unwrap();
        rig.nccl(RANKS, mode, Calls::ByName, &["--static", library.to_str().unwrap()]);
        let mut supervisor = start(&rig);
        supervisor.snapshot();
        supervisor.assert_unharmed(RANKS);
        let tables = rig.cuda_pids().into_iter().filter_map(|pid| Ranks::of(pid).unwrap());
        assert_eq!(tables.count(), 0, "nothing was counted");
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(RANKS);
        supervisor.snapshot();
        assert!(!rig.log().contains(REACHED), "{}", rig.log());
        supervisor.stop();
        rig.assert_sequence();
        assert!(!rig.log().contains(" instead of "), "{}", rig.log());
    }
}

#[test]
fn with_two_libraries_of_nccl_the_ranks_are_locked_without_the_counts() {
    for calls in [Calls::ByName, Calls::BySymbol] {
        let Some(mut rig) = Rig::new() else { return };
        let second = rig.standin.add_nccl().with_file_name("second");
        fs::create_dir(&second).unwrap();
        fs::copy(rig.standin.path().join("libnccl.so.2"), second.join("libnccl.so.2")).unwrap();
        let second = second.join("libnccl.so.2");
        rig.nccl(RANKS, "late", calls, &["--second", second.to_str().unwrap()]);
        let mut supervisor = start(&rig);
        supervisor.snapshot();
        let log = rig.log();
        assert!(log.contains("locked without a common point: it uses NCCL in a way that is not counted"), "{log}");
        assert!(!log.contains(REACHED), "{log}");
        supervisor.assert_unharmed(RANKS);
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(RANKS);
        supervisor.stop();
        rig.assert_sequence();
    }
}

/// The table is the job's to write: it may lose its snapshots by it, and nothing else.
#[test]
fn what_a_job_writes_to_its_table_does_not_harm_the_supervisor() {
    let Some(mut rig) = Rig::new() else { return };
    rig.nccl(RANKS, "split", Calls::BySymbol, &["--scribble"]);
    rig.set("LOCK_TIMEOUT", "700ms");
    rig.set("SNAPSHOT_GRACE", "3s");
    let mut supervisor = rig.run();
    supervisor.said("to=\"running\"");
    supervisor.until("a rank has a number that it cannot have", |rig| {
        let tables = rig.cuda_pids().into_iter().filter_map(|pid| Ranks::of(pid).ok()?);
        tables.flat_map(|table| table.counts().communicators).any(|it| it.rank as usize > RANKS)
    });
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(700));
        let before = rig.log().len();
        supervisor.ask();
        // What it writes may harm the job itself, in the snapshot too.
        let ended = "the job ended:";
        supervisor.until("the snapshot is over", |rig| {
            let log = &rig.log()[before..];
            ["the job was frozen for", "the snapshot failed", ended].iter().any(|words| log.contains(words))
        });
        if rig.log()[before..].contains(ended) {
            supervisor.said(ended);
            supervisor.said("to=\"running\"");
        }
    }
    assert!(!supervisor.has_ended());
    supervisor.signal(Signal::SIGTERM);
    supervisor.wait();
    assert!(!rig.log().contains("panicked"), "{}", rig.log());
    rig.assert_nothing_left();
}

/// The processes by rank.
fn ranks(rig: &Rig) -> Vec<i32> {
    let mut pids: Vec<(Option<i32>, i32)> =
        rig.cuda_pids().into_iter().map(|pid| (crate::rig::inner(pid), pid)).collect();
    pids.sort_unstable();
    pids.into_iter().map(|(_, pid)| pid).collect()
}

fn is_closed(pid: i32) -> bool {
    Ranks::of(pid).unwrap().unwrap().is_closed()
}

fn hold_last(rig: &Rig) {
    let stands = PathBuf::from(format!("{}.stands", rig.never().display()));
    let _ = fs::remove_file(&stands);
    fs::write(rig.never(), "").unwrap();
    crate::supervisor::wait_for("the last rank stands", || stands.exists());
}

fn let_last_go(rig: &Rig) {
    fs::remove_file(rig.never()).unwrap();
}

/// Asks for a snapshot of a job whose last rank starts nothing, and waits until the others are held.
fn ask_in_vain(rig: &Rig, supervisor: &mut Supervisor<'_>) -> Vec<i32> {
    let pids = ranks(rig);
    hold_last(rig);
    supervisor.ask();
    supervisor.until("the gates are closed", |_| pids.iter().all(|pid| is_closed(*pid)));
    pids
}

#[test]
fn a_rank_that_never_comes_is_named_and_the_others_run_on() {
    for calls in [Calls::ByName, Calls::BySymbol] {
        let Some(mut rig) = rig("ahead", calls) else { return };
        rig.set("LOCK_TIMEOUT", LOCK_TIMEOUT);
        rig.retry_after("5s");
        let mut supervisor = start(&rig);
        let pids = ask_in_vain(&rig, &mut supervisor);
        let why = supervisor.said("the snapshot failed");
        let last = crate::rig::inner(pids[RANKS - 1]).unwrap();
        for words in [
            "the ranks did not reach a common point of their NCCL communicators within ".to_owned(),
            format!("rank {} (process {last}) has not started collective", RANKS - 1),
        ] {
            assert!(why.contains(&words), "not {words:?} in {why}");
        }
        assert!(pids.iter().all(|pid| !is_closed(*pid)), "a gate stayed closed");
        let_last_go(&rig);
        supervisor.image();
        supervisor.assert_unharmed(RANKS);
        snapshots(&rig, &mut supervisor, 1);
        supervisor.stop();
        rig.assert_sequence();
    }
}

#[test]
fn a_stopped_rank_is_waited_for_and_named() {
    let Some(mut rig) = rig("split", Calls::ByName) else { return };
    rig.retry_after("5s");
    rig.set("LOCK_TIMEOUT", LOCK_TIMEOUT);
    let mut supervisor = start(&rig);
    let pids = ranks(&rig);
    snapshots(&rig, &mut supervisor, 1);
    hold_last(&rig);
    supervisor.ask();
    supervisor.until("the gates are closed", |_| pids.iter().all(|pid| is_closed(*pid)));
    kill(pids[1], Signal::SIGSTOP);
    supervisor.said("the snapshot failed");
    assert!(pids.iter().all(|pid| !is_closed(*pid)), "a gate stayed closed");
    kill(pids[1], Signal::SIGCONT);
    let_last_go(&rig);
    supervisor.image();
    supervisor.assert_unharmed(RANKS);
    supervisor.stop();
    rig.assert_sequence();
}

/// When a rank is killed.
#[derive(Debug, Clone, Copy)]
enum When {
    Asked,
    Closed,
    Reached,
    Locked,
}

/// A rank that dies takes the job with it, which is restored whole, and stopped at nothing.
fn dies(when: When, victim: usize) {
    let Some(rig) = rig("split", Calls::ByName) else { return };
    let mut supervisor = start(&rig);
    snapshots(&rig, &mut supervisor, 1);
    let pids = ranks(&rig);
    match when {
        When::Asked => supervisor.ask(),
        When::Closed => {
            ask_in_vain(&rig, &mut supervisor);
        }
        When::Reached => {
            rig.standin.fault("fail-lock", "0 delay=500 times=1");
            supervisor.ask();
            supervisor.said(REACHED);
        }
        When::Locked => {
            rig.standin.fault("fail-checkpoint", "0 delay=500 times=1");
            supervisor.ask();
            supervisor.until("the checkpoint is held up", |rig| !rig.standin.path().join("fail-checkpoint").exists());
        }
    }
    kill(pids[victim], Signal::SIGKILL);
    if matches!(when, When::Closed) {
        let_last_go(&rig);
    }
    ["fail-lock", "fail-checkpoint"].into_iter().for_each(|fault| rig.clear(fault));
    supervisor.said("the job was restored from image");
    assert!(ranks(&rig).into_iter().all(|pid| !is_closed(pid)), "a gate stayed closed");
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn a_rank_dies_before_the_gates_are_closed() {
    dies(When::Asked, 2);
}

#[test]
fn a_rank_dies_while_the_gates_are_closed() {
    dies(When::Closed, 1);
    dies(When::Closed, RANKS - 1);
}

#[test]
fn a_rank_dies_when_all_have_come() {
    dies(When::Reached, 2);
}

#[test]
fn a_rank_dies_when_all_are_locked() {
    dies(When::Locked, 1);
}

/// A rank that stands still for a while at a step of the cut delays the snapshot, and no more.
fn stands_still(when: When, stopped: usize) {
    let Some(rig) = rig("split", Calls::BySymbol) else { return };
    let mut supervisor = start(&rig);
    let pids = ranks(&rig);
    let stop = || kill(pids[stopped], Signal::SIGSTOP);
    match when {
        When::Asked => {
            stop();
            supervisor.ask();
        }
        When::Closed => {
            ask_in_vain(&rig, &mut supervisor);
            stop();
            let_last_go(&rig);
        }
        When::Reached => {
            rig.standin.fault("fail-lock", "0 delay=300 times=1");
            supervisor.ask();
            supervisor.said(REACHED);
            stop();
        }
        When::Locked => {
            rig.standin.fault("fail-checkpoint", "0 delay=300 times=1");
            supervisor.ask();
            supervisor.until("the checkpoint is held up", |rig| !rig.standin.path().join("fail-checkpoint").exists());
            stop();
        }
    }
    std::thread::sleep(Duration::from_millis(800));
    kill(pids[stopped], Signal::SIGCONT);
    supervisor.image();
    assert!(pids.iter().all(|pid| !is_closed(*pid)), "a gate stayed closed");
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn a_rank_stands_still_before_the_gates_are_closed() {
    stands_still(When::Asked, 1);
}

#[test]
fn a_rank_stands_still_while_the_gates_are_closed() {
    stands_still(When::Closed, 2);
}

#[test]
fn a_rank_stands_still_when_all_have_come() {
    stands_still(When::Reached, 1);
}

#[test]
fn a_rank_stands_still_when_all_are_locked() {
    stands_still(When::Locked, 3);
}

#[test]
fn the_others_are_not_held_for_a_rank_that_has_died() {
    let Some(mut rig) = Rig::new() else { return };
    rig.nccl(RANKS, "ahead", Calls::ByName, &["--survive"]);
    // Longer than this test waits.
    rig.set("LOCK_TIMEOUT", "10m");
    rig.set("SNAPSHOT_GRACE", "2s");
    let mut supervisor = start(&rig);
    let pids = ask_in_vain(&rig, &mut supervisor);
    kill(pids[RANKS - 1], Signal::SIGKILL);
    supervisor.until("the gates are open", |_| pids[..RANKS - 1].iter().all(|pid| !is_closed(*pid)));
    supervisor.signal(Signal::SIGTERM);
    supervisor.wait();
    rig.assert_nothing_left();
}

#[test]
fn a_communicator_that_is_being_made_is_waited_for() {
    let Some(mut rig) = rig("joins", Calls::BySymbol) else { return };
    rig.set("LOCK_TIMEOUT", "2m");
    let mut supervisor = start(&rig);
    let pids = ranks(&rig);
    hold_last(&rig);
    let is_inside = |pid: &i32| Ranks::of(*pid).unwrap().unwrap().counts().inside > 0;
    supervisor.until("the others make one", |_| pids[..RANKS - 1].iter().all(is_inside));
    supervisor.ask();
    supervisor.said("snapshot phase phase=\"prepare\"");
    let_last_go(&rig);
    let line = supervisor.said_one_of(&["the job was frozen for", "the snapshot failed"]);
    assert!(line.contains("the job was frozen for"), "{line}");
    assert!(!rig.log().contains("without a common point"), "{}", rig.log());
    assert!(pids.iter().all(|pid| !is_closed(*pid)), "a gate stayed closed");
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_stop_while_the_gates_are_closed_ends_the_job() {
    let Some(mut rig) = rig("ahead", Calls::ByName) else { return };
    rig.set("SNAPSHOT_GRACE", "3s");
    let mut supervisor = start(&rig);
    snapshots(&rig, &mut supervisor, 1);
    ask_in_vain(&rig, &mut supervisor);
    supervisor.stop();
    rig.assert_sequence();
    // Nobody opened the gates of what is in the image.
    fs::remove_file(rig.never()).unwrap();
    let mut supervisor = start(&rig);
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn the_supervisor_dies_while_the_gates_are_closed() {
    let Some(rig) = rig("ahead", Calls::BySymbol) else { return };
    let mut supervisor = start(&rig);
    snapshots(&rig, &mut supervisor, 1);
    ask_in_vain(&rig, &mut supervisor);
    supervisor.kill();
    rig.assert_nothing_left();
    drop(supervisor);
    let_last_go(&rig);
    let mut supervisor = start(&rig);
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_lock_that_fails_opens_the_gates() {
    let Some(rig) = rig("groups", Calls::BySymbol) else { return };
    let mut supervisor = start(&rig);
    rig.standin.fault("fail-lock", "304 times=1");
    let why = supervisor.failing_snapshot();
    assert!(why.contains("lock: "), "{why}");
    supervisor.image();
    assert!(ranks(&rig).into_iter().all(|pid| !is_closed(pid)), "a gate stayed closed");
    supervisor.assert_unharmed(RANKS);
    supervisor.stop();
    rig.assert_sequence();
}

/// Ranks wait in ncclCommInitRank for one that does something else first, such as loading its data.
#[test]
fn ranks_that_wait_for_one_to_join_are_locked_without_a_common_point() {
    let Some(mut rig) = rig("joins", Calls::BySymbol) else { return };
    rig.set("LOCK_TIMEOUT", "2s");
    let mut supervisor = start(&rig);
    hold_last(&rig);
    let is_making = |pid: &i32| Ranks::of(*pid).unwrap().unwrap().counts().making > 0;
    supervisor.until("the others wait", |rig| ranks(rig).iter().filter(|pid| is_making(pid)).count() == RANKS - 1);
    supervisor.ask();
    let line = supervisor.said_one_of(&["the job was frozen for", "the snapshot failed"]);
    assert!(line.contains("the job was frozen for"), "{line}");
    assert!(rig.log().contains("locked without a common point: a communicator is being made"), "{}", rig.log());
    assert!(ranks(&rig).iter().filter(|pid| is_making(pid)).count() == RANKS - 1);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    let_last_go(&rig);
    supervisor.assert_unharmed(RANKS);
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

/// At one point of all communicators a GPU may still not finish: a kernel waits for another rank in a way that is no NCCL.
#[test]
fn ranks_whose_gpus_do_not_finish_at_one_point_are_locked_without_it() {
    let Some(rig) = rig("groups", Calls::ByName) else { return };
    let mut supervisor = start(&rig);
    // NOT_READY
    rig.standin.fault("fail-lock", "600 times=1");
    supervisor.snapshot();
    rig.clear("fail-lock");
    let log = rig.log();
    let stuck = "locked without a common point: at that point a GPU did not finish";
    assert!(log.contains(REACHED) && log.contains(stuck), "{log}");
    supervisor.assert_unharmed(RANKS);
    // For all that, the next one begins with the counts.
    snapshots(&rig, &mut supervisor, 1);
    supervisor.stop();
    rig.assert_sequence();
}

//! Tests of the counts and of the gate, with a fake NCCL in the table of real functions.

use core::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::*;
use rekindle_abi::nccl::{CAPTURED, COLLECTIVE, ENDED, FULL, LIVE, MAKING, RECEIVE, SEND, STARTING, UNKNOWN};

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// The handle of the next communicator, the results of the next calls, and the number of calls.
static NEXT: AtomicU64 = AtomicU64::new(0);
static STATE: AtomicU32 = AtomicU32::new(0);
static CODE: AtomicU32 = AtomicU32::new(0);
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Whether a CUDA graph captures the calls.
static CAPTURES: AtomicBool = AtomicBool::new(false);
/// Whether the last call about a group counted as one that makes communicators.
static IS_MAKING: AtomicBool = AtomicBool::new(false);

fn called() -> i32 {
    CALLS.fetch_add(1, Ordering::SeqCst);
    if CAPTURES.load(Ordering::SeqCst) {
        note_user_object();
    }
    CODE.load(Ordering::SeqCst) as i32
}

unsafe extern "C" fn fake_init(new: *mut u64, _: i32, _: UniqueId, _: i32) -> i32 {
    // SAFETY: the tests pass a live local.
    unsafe { *new = NEXT.fetch_add(16, Ordering::SeqCst) };
    called()
}

unsafe extern "C" fn fake_init_all(new: *mut u64, count: i32, _: *const i32) -> i32 {
    for rank in 0..count as usize {
        // SAFETY: the tests pass enough room.
        unsafe { *new.add(rank) = NEXT.fetch_add(16, Ordering::SeqCst) };
    }
    called()
}

unsafe extern "C" fn fake_split(_: u64, _: i32, _: i32, new: *mut u64, _: usize) -> i32 {
    // SAFETY: the tests pass a live local.
    unsafe { *new = NEXT.fetch_add(16, Ordering::SeqCst) };
    called()
}

unsafe extern "C" fn fake_end(_: u64) -> i32 {
    called()
}

unsafe extern "C" fn fake_async_error(_: u64, state: *mut i32) -> i32 {
    // SAFETY: the tests pass a live local.
    unsafe { *state = STATE.load(Ordering::SeqCst) as i32 };
    called()
}

unsafe extern "C" fn fake_group() -> i32 {
    let making = current().map_or(0, |table| table.making.load(Ordering::SeqCst));
    IS_MAKING.store(making > 0, Ordering::SeqCst);
    called()
}

unsafe extern "C" fn fake_all_reduce(_: usize, _: usize, _: usize, _: i32, _: i32, _: u64, _: Stream) -> i32 {
    called()
}

unsafe extern "C" fn fake_pair(_: usize, _: usize, _: i32, _: i32, _: u64, _: Stream) -> i32 {
    called()
}

/// Installs the fake NCCL and an empty table.
fn begin() -> (MutexGuard<'static, ()>, &'static Table) {
    let guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let functions = [
        (c"ncclCommInitRank", fake_init as *const ()),
        (c"ncclCommInitAll", fake_init_all as *const ()),
        (c"ncclCommSplit", fake_split as *const ()),
        (c"ncclCommDestroy", fake_end as *const ()),
        (c"ncclCommAbort", fake_end as *const ()),
        (c"ncclGroupStart", fake_group as *const ()),
        (c"ncclGroupEnd", fake_group as *const ()),
        (c"ncclAllReduce", fake_all_reduce as *const ()),
        (c"ncclBroadcast", fake_all_reduce as *const ()),
        (c"ncclSend", fake_pair as *const ()),
        (c"ncclRecv", fake_pair as *const ()),
        (c"ncclCommGetAsyncError", fake_async_error as *const ()),
    ];
    for (name, function) in functions {
        let ours = instead(name.as_ptr(), function.cast_mut().cast());
        assert_ne!(ours.cast_const().cast(), function);
    }
    symbols::has_one_again();
    let table = current_or_new().unwrap();
    let bytes = (&raw const *table).cast_mut();
    // SAFETY: all of it is atomics, for which zero is valid. The tests use it one after the other.
    unsafe { bytes.write_bytes(0, 1) };
    table.pid.store(sys::pid(), Ordering::Release);
    NEXT.store(0x1000, Ordering::SeqCst);
    CODE.store(0, Ordering::SeqCst);
    CALLS.store(0, Ordering::SeqCst);
    CAPTURES.store(false, Ordering::SeqCst);
    (guard, table)
}

/// Rank 0 of two.
fn communicator_of(id: u8) -> u64 {
    let mut handle = 0;
    // SAFETY: a live local, for the fake.
    assert_eq!(unsafe { init_rank(&raw mut handle, 2, UniqueId([id; 128]), 0) }, CODE.load(Ordering::SeqCst) as i32);
    handle
}

fn reduces(handle: u64) -> i32 {
    // SAFETY: numbers, for the fake.
    unsafe { all_reduce(0, 0, 1, 0, 0, handle, null_mut()) }
}

fn sends(handle: u64, peer: i32) -> i32 {
    // SAFETY: as above.
    unsafe { send(0, 1, 0, peer, handle, null_mut()) }
}

fn receives(handle: u64, peer: i32) -> i32 {
    // SAFETY: as above.
    unsafe { receive(0, 1, 0, peer, handle, null_mut()) }
}

fn groups(work: impl FnOnce()) {
    // SAFETY: no arguments.
    assert_eq!(unsafe { group_start() }, SUCCESS);
    work();
    // SAFETY: as above.
    assert_eq!(unsafe { group_end() }, SUCCESS);
}

/// Index of the communicator, kind, peer and count of each counter.
fn counts(table: &Table) -> Vec<(u32, u32, u32, u64)> {
    let used = table.counters_used.load(Ordering::SeqCst) as usize;
    let read = |c: &Counter| {
        let [owner, kind, peer] = [&c.communicator, &c.kind, &c.peer].map(|number| number.load(Ordering::SeqCst));
        (owner, kind, peer, load(&c.started))
    };
    table.counters[..used].iter().map(read).collect()
}

fn index(table: &Table, handle: u64) -> u32 {
    communicator(table, handle).unwrap().0 as u32
}

fn untracked_of(table: &Table) -> u32 {
    table.untracked.load(Ordering::SeqCst)
}

/// Why the counts of this communicator are not complete.
fn lost(table: &Table, handle: u64) -> u32 {
    communicator(table, handle).unwrap().1.untracked.load(Ordering::SeqCst)
}

fn ends(handle: u64) {
    // SAFETY: a number, for the fake.
    unsafe { destroy(handle) };
}

fn close(table: &Table, time: Duration) {
    table.until.store(sys::now() + time.as_nanos() as u64, Ordering::SeqCst);
    table.closed.store(1, Ordering::SeqCst);
}

fn limit(table: &Table, counter: usize, limit: u64) {
    table.counters[counter].limit.store(limit, Ordering::SeqCst);
}

fn comes(done: impl Fn() -> bool) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        if Instant::now() > deadline {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Whether a call that would set the counter to this number waits at the gate.
fn waits_for(table: &Table, counter: usize, wanted: u64) -> bool {
    comes(|| load(&table.counters[counter].wanted) == wanted && table.inside.load(Ordering::SeqCst) == 0)
}

#[test]
fn each_communicator_kind_and_peer_has_a_count() {
    let (_guard, table) = begin();
    let [first, second] = [1, 2].map(communicator_of);
    for _ in 0..3 {
        assert_eq!(reduces(first), SUCCESS);
    }
    reduces(second);
    sends(first, 1);
    sends(first, 1);
    receives(first, 1);
    sends(first, 0);
    let [a, b] = [first, second].map(|handle| index(table, handle));
    let expected = [(a, COLLECTIVE, 0, 3), (b, COLLECTIVE, 0, 1), (a, SEND, 1, 2), (a, RECEIVE, 1, 1), (a, SEND, 0, 1)];
    assert_eq!(counts(table), expected);
    assert_eq!((untracked_of(table), table.inside.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(CALLS.load(Ordering::SeqCst), 10, "each was passed on");
    let entry = communicator(table, first).unwrap().1;
    let [rank, ranks, state] = [&entry.rank, &entry.ranks, &entry.state].map(|number| number.load(Ordering::SeqCst));
    assert_eq!((rank, ranks, state), (0, 2, LIVE));
}

#[test]
fn threads_at_once_lose_no_count() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    thread::scope(|scope| {
        for peer in 0..4 {
            scope.spawn(move || (0..1000).for_each(|_| assert_eq!(reduces(handle) + sends(handle, peer), SUCCESS)));
        }
    });
    let mut started: Vec<u64> = counts(table).into_iter().map(|(_, _, _, started)| started).collect();
    started.sort_unstable();
    assert_eq!(started, [1000, 1000, 1000, 1000, 4000]);
    assert_eq!((untracked_of(table), table.inside.load(Ordering::SeqCst)), (0, 0));
}

#[test]
fn a_group_counts_at_its_outermost_end() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    let started = || counts(table).into_iter().map(|(_, _, _, started)| started).collect::<Vec<_>>();
    groups(|| {
        reduces(handle);
        groups(|| {
            sends(handle, 1);
            groups(|| assert_eq!(reduces(handle), SUCCESS));
            receives(handle, 1);
        });
        assert_eq!(started(), [0, 0, 0]);
        reduces(handle);
    });
    assert_eq!(started(), [3, 1, 1]);
    // Nothing is left for the next group, and a group without operations counts nothing.
    groups(|| {});
    groups(|| assert_eq!(sends(handle, 1), SUCCESS));
    reduces(handle);
    assert_eq!(started(), [4, 2, 1]);
    assert_eq!((untracked_of(table), table.inside.load(Ordering::SeqCst)), (0, 0));
}

#[test]
fn a_group_that_makes_communicators_says_so_also_the_first() {
    let (_guard, table) = begin();
    let is_making = || IS_MAKING.load(Ordering::SeqCst);
    let mut handle = 0;
    groups(|| handle = communicator_of(1));
    assert!(is_making());
    groups(|| assert_eq!(reduces(handle), SUCCESS));
    assert!(!is_making());
    // There was no table when it began.
    // SAFETY: no arguments.
    assert_eq!(unsafe { group_end() }, SUCCESS);
    assert!(is_making());
    assert_eq!([&table.making, &table.inside].map(|number| number.load(Ordering::SeqCst)), [0, 0]);
}

#[test]
fn a_group_is_of_one_thread() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    groups(|| {
        reduces(handle);
        thread::scope(|scope| scope.spawn(|| reduces(handle)).join().unwrap());
        assert_eq!(counts(table)[0].3, 1, "that of the other thread");
    });
    assert_eq!(counts(table)[0].3, 2);
}

#[test]
fn a_group_that_does_not_fit_is_reported() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    groups(|| (0..4096).for_each(|_| assert_eq!(reduces(handle), SUCCESS)));
    assert_eq!((counts(table)[0].3, untracked_of(table)), (4096, 0));
    groups(|| (0..4097).for_each(|_| assert_eq!(reduces(handle), SUCCESS)));
    assert_eq!((counts(table)[0].3, lost(table, handle), untracked_of(table)), (2 * 4096, FULL, 0));
    assert_eq!(CALLS.load(Ordering::SeqCst), 1 + 4 + 4096 + 4097, "all were passed on");
}

#[test]
fn a_closed_gate_lets_pass_what_is_within_the_limit() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    (0..5).for_each(|_| assert_eq!(reduces(handle), SUCCESS));
    close(table, Duration::from_secs(60));
    limit(table, 0, 7);
    thread::scope(|scope| {
        let job = scope.spawn(|| (0..6).map(|_| reduces(handle)).sum::<i32>());
        assert!(waits_for(table, 0, 8));
        assert_eq!(counts(table)[0].3, 7);
        thread::sleep(Duration::from_millis(20));
        assert_eq!((counts(table)[0].3, CALLS.load(Ordering::SeqCst)), (7, 8));
        limit(table, 0, 8);
        assert!(waits_for(table, 0, 9));
        assert_eq!(counts(table)[0].3, 8);
        table.closed.store(0, Ordering::SeqCst);
        assert_eq!(job.join().unwrap(), SUCCESS);
    });
    assert_eq!((counts(table)[0].3, load(&table.counters[0].wanted)), (11, 0));
}

#[test]
fn a_group_passes_the_gate_as_a_whole() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    groups(|| assert_eq!(reduces(handle) + sends(handle, 1), SUCCESS));
    close(table, Duration::from_secs(60));
    limit(table, 0, 10);
    limit(table, 1, 2);
    thread::scope(|scope| {
        let job = scope.spawn(|| {
            groups(|| assert_eq!(reduces(handle) + sends(handle, 1) + sends(handle, 1) + reduces(handle), SUCCESS));
        });
        // There is room for the collectives, but not for both sends.
        assert!(waits_for(table, 1, 3) && waits_for(table, 0, 3));
        assert_eq!(counts(table).iter().map(|counter| counter.3).collect::<Vec<_>>(), [1, 1]);
        limit(table, 1, 3);
        job.join().unwrap();
    });
    assert_eq!(counts(table).iter().map(|counter| counter.3).collect::<Vec<_>>(), [3, 3]);
    assert_eq!(load(&table.counters[0].wanted) + load(&table.counters[1].wanted), 0);
}

#[test]
fn several_threads_at_the_gate_pass_one_after_the_other() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    reduces(handle);
    close(table, Duration::from_secs(60));
    limit(table, 0, 1);
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| assert_eq!(reduces(handle), SUCCESS));
        }
        for next in 2..=4 {
            thread::sleep(Duration::from_millis(5));
            assert_eq!(CALLS.load(Ordering::SeqCst), next, "handed on");
            limit(table, 0, next.into());
            assert!(comes(|| CALLS.load(Ordering::SeqCst) == next + 1));
        }
    });
    assert_eq!(counts(table)[0].3, 4);
}

#[test]
fn a_gate_that_nobody_opens_is_open_when_its_time_is_over() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    reduces(handle);
    let began = Instant::now();
    close(table, Duration::from_millis(60));
    limit(table, 0, 1);
    assert_eq!(reduces(handle), SUCCESS);
    assert!(began.elapsed() >= Duration::from_millis(55), "{:?}", began.elapsed());
    assert_eq!((counts(table)[0].3, table.closed.load(Ordering::SeqCst)), (2, 1));
    // The gate stays open.
    assert_eq!(reduces(handle), SUCCESS);
}

#[test]
fn a_new_counter_waits_at_a_closed_gate() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    close(table, Duration::from_secs(60));
    thread::scope(|scope| {
        let job = scope.spawn(|| sends(handle, 1));
        assert!(waits_for(table, 0, 1));
        limit(table, 0, 1);
        assert_eq!(job.join().unwrap(), SUCCESS);
    });
}

#[test]
fn a_forked_child_has_no_table_and_is_not_held() {
    unsafe extern "C" {
        fn fork() -> i32;
        fn madvise(address: *mut c_void, length: usize, advice: i32) -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn _exit(code: i32) -> !;
    }
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    reduces(handle);
    close(table, Duration::from_secs(60));
    limit(table, 0, 1);
    // MADV_WIPEONFORK, and MADV_KEEPONFORK: CRIU restores pages so.
    for advice in [19, 18] {
        // SAFETY: the page of the table's address.
        assert_eq!(unsafe { madvise(PLACE.load(Ordering::Relaxed).cast(), PAGE, advice) }, 0);
        // SAFETY: the child makes system calls only, and ends.
        let child = unsafe { fork() };
        if child == 0 {
            let is_free = current().is_none() && reduces(handle) == SUCCESS && sends(handle, 1) == SUCCESS;
            // SAFETY: no destructors are needed.
            unsafe { _exit(if is_free { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: our own child, and a live local.
        assert_eq!(unsafe { waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "{advice}");
    }
    assert_eq!((counts(table).len(), counts(table)[0].3), (1, 1), "it is the parent's");
}

#[test]
fn what_is_not_known_is_reported_and_passed_on() {
    let (_guard, table) = begin();
    communicator_of(1);
    assert_eq!(untracked_of(table), 0);
    assert_eq!(reduces(0xdead_0000), SUCCESS);
    assert_eq!((untracked_of(table), counts(table).len(), CALLS.load(Ordering::SeqCst)), (UNKNOWN, 0, 2));
}

/// As from a thread that does not know yet that another one has aborted it.
#[test]
fn a_call_on_a_communicator_that_has_ended_counts_as_nothing_if_nccl_refuses_it() {
    const INVALID_ARGUMENT: u32 = 4;
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    reduces(handle);
    // SAFETY: a number, for the fake.
    assert_eq!(unsafe { abort(handle) }, SUCCESS);
    CODE.store(INVALID_ARGUMENT, Ordering::SeqCst);
    let calls = CALLS.load(Ordering::SeqCst);
    assert_eq!([reduces(handle), sends(handle, 1)], [INVALID_ARGUMENT as i32; 2]);
    assert_eq!(CALLS.load(Ordering::SeqCst), calls + 2);
    assert_eq!((untracked_of(table), counts(table).len()), (0, 1));
    CODE.store(0, Ordering::SeqCst);
    assert_eq!(reduces(handle), SUCCESS);
    assert_eq!(untracked_of(table), UNKNOWN, "it was started, and is not counted");
}

#[test]
fn an_operation_in_progress_has_started() {
    let (_guard, table) = begin();
    CODE.store(IN_PROGRESS as u32, Ordering::SeqCst);
    let handle = communicator_of(1);
    let pending = || communicator(table, handle).unwrap().1.pending.load(Ordering::SeqCst);
    let asks = || {
        let mut state = 0;
        let code = CODE.swap(0, Ordering::SeqCst);
        STATE.store(code, Ordering::SeqCst);
        // SAFETY: a number and a live local, for the fake.
        assert_eq!(unsafe { async_error(handle, &raw mut state) }, SUCCESS);
        CODE.store(code, Ordering::SeqCst);
    };
    assert_eq!(pending(), MAKING);
    asks();
    assert_eq!(pending(), MAKING, "it is not done yet");
    CODE.store(0, Ordering::SeqCst);
    asks();
    assert_eq!(pending(), 0);
    CODE.store(IN_PROGRESS as u32, Ordering::SeqCst);
    assert_eq!(reduces(handle), IN_PROGRESS);
    assert_eq!((pending(), counts(table)[0].3), (STARTING, 1));
    CODE.store(0, Ordering::SeqCst);
    asks();
    // SAFETY: no arguments.
    unsafe { group_start() };
    sends(handle, 1);
    CODE.store(IN_PROGRESS as u32, Ordering::SeqCst);
    assert_eq!(pending(), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { group_end() }, IN_PROGRESS);
    assert_eq!((pending(), counts(table)[1].3, untracked_of(table)), (STARTING, 1, 0));
}

#[test]
fn a_rank_is_learnt_once_a_split_is_done() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    let mut new = 0;
    CODE.store(IN_PROGRESS as u32, Ordering::SeqCst);
    // SAFETY: a live local, for the fake.
    assert_eq!(unsafe { split(handle, 0, 0, &raw mut new, 0) }, IN_PROGRESS);
    let entry = communicator(table, new).unwrap().1;
    assert_eq!((entry.ranks.load(Ordering::SeqCst), entry.pending.load(Ordering::SeqCst)), (0, MAKING));
    // The fake has no ncclCommUserRank.
    CODE.store(0, Ordering::SeqCst);
    reduces(new);
    assert_eq!((untracked_of(table), lost(table, new)), (0, UNKNOWN));
}

#[test]
fn a_communicator_that_was_not_made_is_none() {
    let (_guard, table) = begin();
    CODE.store(5, Ordering::SeqCst);
    let handle = communicator_of(1);
    assert!(communicator(table, handle).is_none());
    assert_eq!(untracked_of(table), 0);
}

#[test]
fn an_ended_communicator_is_another_one_than_that_which_gets_its_handle() {
    let (_guard, table) = begin();
    let first = communicator_of(1);
    reduces(first);
    let old = index(table, first);
    // SAFETY: a number, for the fake.
    assert_eq!(unsafe { destroy(first) }, SUCCESS);
    assert_eq!(table.communicators[old as usize].state.load(Ordering::SeqCst), ENDED);
    assert!(communicator(table, first).is_none());
    NEXT.store(first, Ordering::SeqCst);
    let second = communicator_of(2);
    assert_eq!(second, first);
    reduces(second);
    let new = index(table, second);
    assert_ne!(new, old);
    assert_eq!(counts(table), [(old, COLLECTIVE, 0, 1), (new, COLLECTIVE, 0, 1)]);
    // SAFETY: a number, for the fake.
    assert_eq!(unsafe { abort(second) }, SUCCESS);
    assert!(communicator(table, second).is_none());
    assert_eq!(untracked_of(table), 0);
}

#[test]
fn more_communicators_than_fit_are_reported() {
    let (_guard, table) = begin();
    let handles: Vec<u64> = (0..table::MOST_COMMUNICATORS).map(|_| communicator_of(1)).collect();
    assert_eq!(untracked_of(table), 0);
    assert!(handles.iter().all(|handle| communicator(table, *handle).is_some()));
    let unregistered = || table.unregistered.load(Ordering::SeqCst);
    let others = [1, 2].map(communicator_of);
    assert_eq!((unregistered(), reduces(others[0])), (2, SUCCESS));
    let mut child = 0;
    // SAFETY: a live local, for the fake.
    assert_eq!(unsafe { split(others[0], 0, 0, &raw mut child, 0) }, SUCCESS);
    assert_eq!(unregistered(), 3);
    // Once they have ended, all counts are complete.
    others.into_iter().chain([child]).for_each(ends);
    assert_eq!((unregistered(), untracked_of(table)), (0, 0));
    ends(handles[7]);
    assert_eq!(reduces(communicator_of(3)), SUCCESS);
    assert_eq!((unregistered(), untracked_of(table)), (0, 0));
}

#[test]
fn places_of_ended_communicators_are_used_again() {
    let (_guard, table) = begin();
    let lasting = communicator_of(1);
    for step in 1..=5000_u64 {
        let handle = communicator_of(2);
        (0..step % 3 + 1).for_each(|_| assert_eq!(reduces(handle) + sends(handle, 7) + reduces(lasting), SUCCESS));
        let own = index(table, handle);
        let expected = [(own, COLLECTIVE, 0, step % 3 + 1), (own, SEND, 7, step % 3 + 1)];
        let found: Vec<_> = counts(table).into_iter().filter(|it| it.0 == own && it.1 != table::NONE).collect();
        assert_eq!(found, expected, "step {step}");
        ends(handle);
    }
    let own = index(table, lasting);
    let started: u64 = (1..=5000).map(|step| step % 3 + 1).sum();
    assert!(counts(table).contains(&(own, COLLECTIVE, 0, started)));
    assert_eq!((untracked_of(table), table.unregistered.load(Ordering::SeqCst)), (0, 0));
    let changes = table.changes.load(Ordering::SeqCst);
    assert!(changes > 0 && changes < 100 && changes.is_multiple_of(2), "{changes}");
    // Those that have just ended are still there.
    let ended = table.communicators.iter().filter(|it| it.state.load(Ordering::SeqCst) == ENDED).count();
    assert!(ended >= 255, "{ended}");
}

#[test]
fn counters_of_ended_communicators_are_used_again() {
    let (_guard, table) = begin();
    for _ in 0..40 {
        let handle = communicator_of(1);
        (0..1000).for_each(|peer| assert_eq!(sends(handle, peer), SUCCESS));
        assert_eq!((lost(table, handle), index(table, handle)), (0, index(table, handle)));
        ends(handle);
    }
    assert_eq!(untracked_of(table), 0);
}

#[test]
fn threads_that_use_new_communicators_lose_no_count() {
    let (_guard, table) = begin();
    let lasting = communicator_of(1);
    thread::scope(|scope| {
        for peer in 0..4 {
            scope.spawn(move || {
                for _ in 0..1000 {
                    let handle = communicator_of(2);
                    assert_eq!(reduces(handle) + sends(lasting, peer) + reduces(lasting), SUCCESS);
                    ends(handle);
                }
            });
        }
    });
    let own = index(table, lasting);
    let started: Vec<u64> = counts(table).into_iter().filter(|it| it.0 == own).map(|it| it.3).collect();
    assert_eq!(started.len(), 5);
    assert!(started.iter().all(|count| matches!(count, 1000 | 4000)), "{started:?}");
    assert_eq!((untracked_of(table), table.inside.load(Ordering::SeqCst)), (0, 0));
    assert_eq!(table.making.load(Ordering::SeqCst), 0);
}

#[test]
fn more_counters_than_fit_are_reported() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    (0..table::MOST_COUNTERS as i32).for_each(|peer| assert_eq!(sends(handle, peer), SUCCESS));
    assert_eq!((untracked_of(table), counts(table).len()), (0, table::MOST_COUNTERS));
    assert_eq!(receives(handle, 0), SUCCESS);
    assert_eq!((lost(table, handle), counts(table).len()), (FULL, table::MOST_COUNTERS));
    // The existing ones continue to work.
    sends(handle, 77);
    assert!(counts(table).contains(&(index(table, handle), SEND, 77, 2)));
}

#[test]
fn what_a_graph_captures_is_reported() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    note_user_object();
    assert_eq!(untracked_of(table), 0, "not NCCL's: no call is in progress");
    CAPTURES.store(true, Ordering::SeqCst);
    reduces(handle);
    assert_eq!(untracked_of(table), CAPTURED);
}

#[test]
fn a_second_nccl_is_left_alone_and_reported() {
    unsafe extern "C" fn other() -> i32 {
        called()
    }
    let (_guard, table) = begin();
    communicator_of(1);
    let found = other as *const () as *mut c_void;
    assert_eq!(instead(c"ncclAllReduce".as_ptr(), found), found);
    assert_eq!(untracked_of(table), UNKNOWN);
    // The first one has not changed.
    let first = fake_all_reduce as *const () as *mut c_void;
    assert_ne!(instead(c"ncclAllReduce".as_ptr(), first), first);
    assert_eq!(instead(c"ncclMemAlloc".as_ptr(), found), found, "none of ours");
}

#[test]
fn all_ranks_of_one_process_have_one_identity() {
    let (_guard, table) = begin();
    let mut handles = [0; 3];
    // SAFETY: room for three, for the fake.
    assert_eq!(unsafe { init_all(handles.as_mut_ptr(), 3, core::ptr::null()) }, SUCCESS);
    let read = |handle: u64| {
        let entry = communicator(table, handle).unwrap().1;
        let id = entry.id.each_ref().map(load);
        (id, entry.rank.load(Ordering::SeqCst), entry.ranks.load(Ordering::SeqCst))
    };
    let [first, second, third] = handles.map(read);
    assert_eq!([first, second, third].map(|it| (it.1, it.2)), [(0, 3), (1, 3), (2, 3)]);
    assert!(first.0 == second.0 && second.0 == third.0 && first.0 != [0, 0]);
}

#[test]
fn an_identity_is_that_of_all_ranks_of_one_colour() {
    let (_guard, table) = begin();
    let ids: Vec<[u64; 2]> = (0..2)
        .map(|_| {
            let handle = communicator_of(9);
            communicator(table, handle).unwrap().1.id.each_ref().map(load)
        })
        .collect();
    assert_eq!(ids[0], ids[1], "of the same unique id");
    let mut all = vec![ids[0], UniqueId([8; 128]).identity()];
    for number in 0..3 {
        for color in [0, 1, 2, 70_000] {
            let new = split_identity(ids[0], number, color);
            assert_eq!(new, split_identity(ids[1], number, color));
            all.extend([new, split_identity(new, number, color)]);
        }
    }
    let many = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), many);
}

#[test]
fn a_split_without_a_colour_makes_none() {
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    let mut new = 0;
    // SAFETY: a live local, for the fake.
    assert_eq!(unsafe { split(handle, NO_COLOR, 0, &raw mut new, 0) }, SUCCESS);
    assert_eq!((untracked_of(table), communicator(table, handle).unwrap().1.splits.load(Ordering::SeqCst)), (0, 1));
    assert!(communicator(table, new).is_none());
}

/// The handles that were aborted, inside of a group.
static ABORTED: Mutex<Vec<u64>> = Mutex::new(Vec::new());

unsafe extern "C" fn fake_abort(handle: u64) -> i32 {
    ABORTED.lock().unwrap().push(handle);
    0
}

#[test]
fn communicators_that_live_are_called_off() {
    let (_guard, table) = begin();
    let [first, second, third] = [1, 2, 3].map(communicator_of);
    // SAFETY: a number, for the fake.
    unsafe { destroy(second) };
    let calls = CALLS.load(Ordering::SeqCst);
    let functions = abort::Functions { group_start: fake_group, abort: fake_abort };
    abort::call_off(table, &functions);
    let mut aborted = core::mem::take(&mut *ABORTED.lock().unwrap());
    let mut lived = [first, third];
    aborted.sort_unstable();
    lived.sort_unstable();
    assert_eq!(aborted, lived);
    assert_eq!(CALLS.load(Ordering::SeqCst), calls + 1, "in a group, which begins once and does not end");
    // If there is no group, each call would do all of its work, and may wait.
    CODE.store(3, Ordering::SeqCst);
    abort::call_off(table, &functions);
    assert!(ABORTED.lock().unwrap().is_empty());
}

#[test]
fn a_call_that_fails_makes_the_counts_unusable() {
    const INVALID_ARGUMENT: u32 = 4;
    let (_guard, table) = begin();
    let handle = communicator_of(1);
    CODE.store(INVALID_ARGUMENT, Ordering::SeqCst);
    assert_eq!(reduces(handle), INVALID_ARGUMENT as i32);
    assert_eq!((lost(table, handle), untracked_of(table)), (UNKNOWN, 0));
    // In a group, too: NCCL checks the arguments at once.
    CODE.store(0, Ordering::SeqCst);
    let handle = communicator_of(2);
    assert_eq!(lost(table, handle), 0);
    groups(|| {
        CODE.store(INVALID_ARGUMENT, Ordering::SeqCst);
        sends(handle, 1);
        CODE.store(0, Ordering::SeqCst);
    });
    assert_eq!(lost(table, handle), UNKNOWN);
}

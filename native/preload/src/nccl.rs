//! Counts calls of NCCL, and holds them back while a snapshot brings all ranks to one point.
//!
//! A collective ends when all its ranks have started it. If a rank is stopped before it has started one that others
//! have started, their kernels wait on the GPU and CUDA cannot be locked. So this counts the started operations: the
//! collectives of each communicator, and sends and receives by peer. For a snapshot the supervisor closes the gate,
//! reads the counts of all ranks, and sets a limit for each counter. A call beyond its limit waits here, before NCCL
//! sees it ([`rekindle_abi::nccl`]). The kernels on the GPUs then end by themselves.
//!
//! The calls of one group count together when the group ends: NCCL starts nothing before.
//!
//! Between snapshots a call costs a look-up of its communicator and its counter, and two additions: 20 ns more than
//! without us, and 14 ns for each operation of a group of eight (2026-11-23, a virtual machine on AMD EPYC, an NCCL
//! that does nothing). Threads that call it at the same time share a number of the table: 20 to 70 ns. Nothing is
//! allocated; the table is made with the first communicator. A communicator or an operation that cannot be counted is
//! reported to the supervisor, which then does not use the counts, for as long as that communicator lives.
//!
//! Places of communicators that have ended are used again ([`places`]). Calls on a communicator that does not block
//! return ncclInProgress, and NCCL starts the operation on a thread of its own. It counts as started. Until the program
//! has asked NCCL whether it is done (ncclCommGetAsyncError), the supervisor waits for a moment.

mod abort;
mod groups;
mod places;
mod symbols;

use core::ffi::c_void;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::landing::PAGE;
use crate::lock::{Held, Lock};
use crate::{libc, sys};
use groups::Group;
use rekindle_abi::nccl::{self as table, Communicator, Counter, Table};
use symbols::real;
pub(crate) use symbols::{instead, is_absent};

/// ncclResult_t: success, and the result of a communicator that does not block.
const SUCCESS: i32 = 0;
const IN_PROGRESS: i32 = 7;

/// NCCL_SPLIT_NOCOLOR.
const NO_COLOR: i32 = -1;

/// The pause between two checks of a closed gate.
const PAUSE_NS: u64 = 100_000;

/// The page with the address of the table. It is empty in a forked child, which has no table. To compare pids instead
/// would need a system call for each call of NCCL.
static PLACE: AtomicPtr<AtomicUsize> = AtomicPtr::new(null_mut());
/// The lock for making entries.
static CHANGING: Lock = Lock::new();

/// The table of this process, if it has one.
fn current() -> Option<&'static Table> {
    let place = PLACE.load(Ordering::Acquire);
    // SAFETY: never unmapped.
    let place = unsafe { place.as_ref() }?;
    let table = with_exposed_provenance_mut::<Table>(place.load(Ordering::Relaxed));
    // SAFETY: never unmapped in this process, and all of it is atomics.
    unsafe { table.as_ref() }
}

/// The table; makes one if there is none. Without memory for it nothing is counted.
fn current_or_new() -> Option<&'static Table> {
    if let Some(table) = current() {
        return Some(table);
    }
    let _changing = wait()?;
    if let Some(table) = current() {
        return Some(table);
    }
    if PLACE.load(Ordering::Relaxed).is_null() {
        PLACE.store(with_exposed_provenance_mut(sys::unforked_page(PAGE).ok()?), Ordering::Release);
        // CRIU before 4.2 does not restore that a child gets an empty page.
        libc::at_fork_in_child(forget_in_child);
    }
    let address = sys::shared_memory(table::NAME, size_of::<Table>()).ok()?;
    // SAFETY: it has the table's size, is zero, and is never unmapped.
    let table = unsafe { &*with_exposed_provenance_mut::<Table>(address) };
    table.pid.store(sys::pid(), Ordering::Release);
    // SAFETY: never unmapped.
    unsafe { PLACE.load(Ordering::Relaxed).as_ref() }?.store(address, Ordering::Release);
    Some(table)
}

/// The parent's table is not mapped in a child of fork(3).
extern "C" fn forget_in_child() {
    PLACE.store(null_mut(), Ordering::Relaxed);
}

/// The right to make entries, which a thread has only for a moment. None if a signal handler has interrupted that
/// thread.
fn wait() -> Option<Held<'static>> {
    CHANGING.wait()
}

/// Reports that the counts are not complete.
fn untracked(why: u32) {
    if let Some(table) = current_or_new() {
        table.untracked.fetch_or(why, Ordering::Relaxed);
    }
}

/// Spreads numbers over a table whose size is a power of two.
fn spread(number: u64, size: usize) -> usize {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as usize & (size - 1)
}

/// All places of a table of this size, beginning with the first place for this number.
fn probe(number: u64, size: usize) -> impl Iterator<Item = usize> {
    let first = spread(number, size);
    (0..size).map(move |step| (first + step) & (size - 1))
}

/// The communicator with this handle, and its index.
fn communicator(table: &Table, handle: u64) -> Option<(usize, &Communicator)> {
    for at in probe(handle >> 4, table::MOST_COMMUNICATORS) {
        let entry = table.communicators.get(at)?;
        match entry.state.load(Ordering::Acquire) {
            table::FREE => return None,
            table::LIVE if entry.handle.load(Ordering::Relaxed) == handle => return Some((at, entry)),
            _ => {}
        }
    }
    None
}

/// The counter of this communicator; makes one if there is none.
fn counter(table: &'static Table, communicator: usize, kind: u32, peer: u32) -> Option<u32> {
    let owner = communicator as u32;
    // The kind is written last, and is NONE while the rest changes.
    let is_it = |entry: &Counter| {
        entry.kind.load(Ordering::Acquire) == kind
            && entry.communicator.load(Ordering::Acquire) == owner
            && entry.peer.load(Ordering::Acquire) == peer
            && entry.kind.load(Ordering::Acquire) == kind
    };
    let number = places::number(owner, kind, peer);
    // The place of the counter, or a free one.
    let look = || {
        for at in probe(number, table::PLACES) {
            let place = table.places.get(at)?;
            match place.load(Ordering::Acquire) {
                0 => return Some(Err(place)),
                found if started(table, found - 1).is_some_and(is_it) => return Some(Ok(found - 1)),
                _ => {}
            }
        }
        None
    };
    if let Ok(found) = look()? {
        return Some(found);
    }
    let _changing = wait()?;
    if let Ok(found) = look()? {
        return Some(found);
    }
    let new = places::free_counter(table)?;
    // Only now: to free a counter changes the places.
    let Err(place) = look()? else { return None };
    let entry = started(table, new)?;
    entry.peer.store(peer, Ordering::Relaxed);
    entry.communicator.store(owner, Ordering::Relaxed);
    entry.kind.store(kind, Ordering::Release);
    place.store(new + 1, Ordering::Release);
    Some(new)
}

/// A call in NCCL. It ends with a drop.
struct Inside(&'static Table);

impl Inside {
    fn begin(table: &'static Table) -> Inside {
        table.inside.fetch_add(1, Ordering::SeqCst);
        Inside(table)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::SeqCst);
    }
}

fn started(table: &Table, at: u32) -> Option<&Counter> {
    table.counters.get(at as usize)
}

/// Adds one to each of these counters. First waits while the gate is closed for them.
fn enter(table: &'static Table, operations: &[AtomicU32]) -> Inside {
    let all = || operations.iter().filter_map(|at| started(table, at.load(Ordering::Relaxed)));
    loop {
        let inside = Inside::begin(table);
        // Counts before it looks at the gate. The supervisor closes the gate before it reads the counts. So either the
        // supervisor sees this count, or this call sees the closed gate.
        all().for_each(|counter| {
            counter.started.fetch_add(1, Ordering::SeqCst);
        });
        if is_open(table) || all().all(has_room) {
            return inside;
        }
        all().for_each(|counter| {
            // If a counter occurs several times, the last store has the sum.
            counter.wanted.store(counter.started.load(Ordering::Relaxed), Ordering::Relaxed);
        });
        all().for_each(|counter| {
            counter.started.fetch_sub(1, Ordering::SeqCst);
        });
        drop(inside);
        // Tries to count again only once there is room. Other threads may have counted too when this one did, and
        // passed or stepped back since.
        loop {
            let mut has_room = true;
            all().for_each(|counter| {
                let mine = all().filter(|other| core::ptr::eq(*other, counter)).count() as u64;
                let wanted = load(&counter.started) + mine;
                counter.wanted.store(wanted, Ordering::Relaxed);
                has_room &= wanted <= load(&counter.limit);
            });
            if has_room || is_open(table) {
                break;
            }
            sys::sleep(PAUSE_NS);
        }
        all().for_each(|counter| counter.wanted.store(0, Ordering::Relaxed));
    }
}

fn load(number: &AtomicU64) -> u64 {
    number.load(Ordering::SeqCst)
}

fn has_room(counter: &Counter) -> bool {
    load(&counter.started) <= load(&counter.limit)
}

fn is_open(table: &Table) -> bool {
    table.closed.load(Ordering::SeqCst) == 0 || sys::now() > load(&table.until)
}

/// One operation on a communicator.
fn operation(handle: u64, kind: u32, peer: i32, call: impl FnOnce() -> i32) -> i32 {
    let Some(table) = current() else { return call() };
    let Some((at, entry)) = communicator(table, handle) else {
        // Reported as long as it lives if there was no place for it.
        if table.unregistered.load(Ordering::Relaxed) > 0 {
            return call();
        }
        let unknown = || table.untracked.fetch_or(table::UNKNOWN, Ordering::Relaxed);
        if !places::has_ended(table, handle) {
            unknown();
            return call();
        }
        // NCCL refuses it, and so nothing was started: another thread may just have aborted it.
        let code = call();
        if matches!(code, SUCCESS | IN_PROGRESS) {
            unknown();
        }
        return code;
    };
    if entry.ranks.load(Ordering::Relaxed) == 0 {
        learn_rank(entry, handle);
    }
    let Some(counter) = counter(table, at, kind, peer as u32) else {
        entry.untracked.fetch_or(table::FULL, Ordering::Relaxed);
        return call();
    };
    if let Some(group) = Group::of_this_thread() {
        if !group.add(counter) {
            entry.untracked.fetch_or(table::FULL, Ordering::Relaxed);
        }
        return note_started(entry, call());
    }
    let _inside = enter(table, &[AtomicU32::new(counter)]);
    note_started(entry, call())
}

/// An operation that NCCL did not start stays counted, so equal counts of all ranks are not one point any more. On a
/// communicator that does not block, it starts on a thread of NCCL's own.
fn note_started(entry: &Communicator, code: i32) -> i32 {
    match code {
        SUCCESS => {}
        IN_PROGRESS => entry.pending.store(table::STARTING, Ordering::Relaxed),
        _ => {
            entry.untracked.fetch_or(table::UNKNOWN, Ordering::Relaxed);
        }
    }
    code
}

/// The number of ranks, and which of them this is. NCCL does not tell before a communicator that does not block is
/// made.
fn learn_rank(entry: &Communicator, handle: u64) {
    match (symbols::rank_of(handle), symbols::ranks_of(handle)) {
        (Some(rank), Some(ranks)) => {
            entry.rank.store(rank, Ordering::Relaxed);
            entry.ranks.store(ranks, Ordering::Release);
        }
        _ => {
            entry.untracked.fetch_or(table::UNKNOWN, Ordering::Relaxed);
        }
    }
}

/// Makes an entry for a communicator that was just made, with 0 ranks if their number is not known yet.
fn register(handle: u64, id: [u64; 2], rank: u32, ranks: u32, pending: u32) {
    let Some(table) = current_or_new() else { return };
    let Some(_changing) = wait() else { return untracked(table::UNKNOWN) };
    let Some(entry) = places::free_communicator(table, handle) else {
        table.unregistered.fetch_add(1, Ordering::Relaxed);
        return;
    };
    entry.handle.store(handle, Ordering::Relaxed);
    entry.rank.store(rank, Ordering::Relaxed);
    entry.ranks.store(ranks, Ordering::Relaxed);
    for (slot, half) in entry.id.iter().zip(id) {
        slot.store(half, Ordering::Relaxed);
    }
    for number in [&entry.splits, &entry.untracked] {
        number.store(0, Ordering::Relaxed);
    }
    entry.pending.store(pending, Ordering::Relaxed);
    entry.state.store(table::LIVE, Ordering::Release);
}

/// Two FNV-1a hashes of the same bytes: an id that is equal in all ranks.
fn identity(bytes: impl Iterator<Item = u8>) -> [u64; 2] {
    let start = [0xcbf2_9ce4_8422_2325_u64, 0x8422_2325_cbf2_9ce4];
    bytes.fold(start, |id, byte| id.map(|half| (half ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)))
}

/// The id for the ranks of one colour, in the split with this number of the communicator `old`.
fn split_identity(old: [u64; 2], number: u32, color: i32) -> [u64; 2] {
    let numbers = [old[0], old[1], u64::from(number), color as u64];
    identity(numbers.into_iter().flat_map(u64::to_ne_bytes))
}

/// ncclUniqueId.
#[derive(Clone, Copy)]
#[repr(C)]
struct UniqueId([u8; 128]);

impl UniqueId {
    fn identity(&self) -> [u64; 2] {
        identity(self.0.into_iter())
    }
}

/// A call that makes or ends a communicator, together with all other ranks. It is not an operation, and the gate does
/// not hold it. The cut is not complete until it returns, and until then no rank is held: it may be one that this call
/// waits for.
struct Making(Option<Inside>);

impl Making {
    fn begin() -> Making {
        let table = current_or_new();
        if let Some(table) = table {
            table.making.fetch_add(1, Ordering::SeqCst);
        }
        Making(table.map(Inside::begin))
    }
}

impl Drop for Making {
    fn drop(&mut self) {
        if let Some(inside) = &self.0 {
            inside.0.making.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// The handle that NCCL has written.
fn made(code: i32, new: *const u64) -> Option<u64> {
    if !matches!(code, SUCCESS | IN_PROGRESS) || new.is_null() {
        return None;
    }
    // SAFETY: NCCL has written it. In a group it also writes at once, or leaves the old value.
    let handle = unsafe { *new };
    (handle != 0).then_some(handle)
}

fn note_made(code: i32, new: *const u64, id: [u64; 2], rank: i32, ranks: i32) -> i32 {
    symbols::look_for_others();
    match made(code, new) {
        Some(handle) => {
            let pending = if code == IN_PROGRESS { table::MAKING } else { 0 };
            register(handle, id, rank as u32, ranks as u32, pending);
            if let Some(table) = current() {
                abort::start(table);
            }
        }
        None if code == SUCCESS => untracked(table::UNKNOWN),
        None => {}
    }
    code
}

type Stream = *mut c_void;

unsafe extern "C" fn init_rank(new: *mut u64, ranks: i32, id: UniqueId, rank: i32) -> i32 {
    let real = real!(InitRank, fn(*mut u64, i32, UniqueId, i32));
    let _making = Making::begin();
    // SAFETY: the caller's arguments.
    note_made(unsafe { real(new, ranks, id, rank) }, new, id.identity(), rank, ranks)
}

unsafe extern "C" fn init_rank_config(new: *mut u64, ranks: i32, id: UniqueId, rank: i32, config: usize) -> i32 {
    let real = real!(InitRankConfig, fn(*mut u64, i32, UniqueId, i32, usize));
    let _making = Making::begin();
    // SAFETY: the caller's arguments.
    note_made(unsafe { real(new, ranks, id, rank, config) }, new, id.identity(), rank, ranks)
}

unsafe extern "C" fn init_rank_scalable(
    new: *mut u64,
    ranks: i32,
    rank: i32,
    count: i32,
    ids: *const UniqueId,
    config: usize,
) -> i32 {
    let real = real!(InitRankScalable, fn(*mut u64, i32, i32, i32, *const UniqueId, usize));
    // SAFETY: NCCL reads as many entries.
    let bytes = (0..count.max(0) as usize).flat_map(|at| unsafe { *ids.wrapping_add(at) }.0);
    let id = identity(bytes);
    let _making = Making::begin();
    // SAFETY: the caller's arguments.
    note_made(unsafe { real(new, ranks, rank, count, ids, config) }, new, id, rank, ranks)
}

/// ncclCommInitAll: all ranks in this process.
unsafe extern "C" fn init_all(new: *mut u64, count: i32, devices: *const i32) -> i32 {
    let real = real!(InitAll, fn(*mut u64, i32, *const i32));
    let _making = Making::begin();
    // SAFETY: the caller's arguments.
    let code = unsafe { real(new, count, devices) };
    let id = [sys::now(), (u64::from(sys::pid() as u32) << 32) | 1];
    for rank in 0..count.max(0) {
        note_made(code, new.wrapping_add(rank as usize), id, rank, count);
    }
    code
}

/// ncclCommSplit: all ranks of the old one call it, in the same order.
unsafe extern "C" fn split(old: u64, color: i32, key: i32, new: *mut u64, config: usize) -> i32 {
    let real = real!(Split, fn(u64, i32, i32, *mut u64, usize));
    let parent = current().and_then(|table| communicator(table, old));
    let parent = parent.map(|(_, entry)| {
        let halves = [0, 1].map(|half: usize| entry.id.get(half).map_or(0, |half| half.load(Ordering::Relaxed)));
        (halves, entry.splits.fetch_add(1, Ordering::Relaxed))
    });
    let _making = Making::begin();
    // SAFETY: the caller's arguments.
    let code = unsafe { real(old, color, key, new, config) };
    if color == NO_COLOR || !matches!(code, SUCCESS | IN_PROGRESS) {
        return code;
    }
    let (Some((old, number)), Some(handle)) = (parent, made(code, new)) else {
        match current() {
            // Of one that has no place: this one has none either.
            Some(table) if parent.is_none() && table.unregistered.load(Ordering::Relaxed) > 0 => {
                table.unregistered.fetch_add(1, Ordering::Relaxed);
            }
            _ => untracked(table::UNKNOWN),
        }
        return code;
    };
    let id = split_identity(old, number, color);
    let pending = if code == IN_PROGRESS { table::MAKING } else { 0 };
    match (symbols::rank_of(handle), symbols::ranks_of(handle)) {
        (Some(rank), Some(ranks)) => register(handle, id, rank, ranks, pending),
        _ if code == IN_PROGRESS => register(handle, id, 0, 0, pending),
        // In a group, NCCL makes it when the group ends.
        _ => untracked(table::UNKNOWN),
    }
    code
}

fn ending(handle: u64, call: impl FnOnce() -> i32) -> i32 {
    if let Some(table) = current() {
        match communicator(table, handle) {
            Some((_, entry)) => {
                entry.ended.store(table.endings.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
                entry.state.store(table::ENDED, Ordering::Release);
            }
            None => {
                let less = |count: u32| count.checked_sub(1);
                let _ = table.unregistered.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
            }
        }
    }
    let _making = Making::begin();
    call()
}

/// ncclCommGetAsyncError: whether NCCL has done what an earlier call did not wait for.
unsafe extern "C" fn async_error(handle: u64, state: *mut i32) -> i32 {
    let real = real!(AsyncError, fn(u64, *mut i32));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(handle, state) };
    if code == SUCCESS
        && let Some((_, entry)) = current().and_then(|table| communicator(table, handle))
        && entry.pending.load(Ordering::Relaxed) != 0
        // SAFETY: NCCL has written it.
        && unsafe { *state } != IN_PROGRESS
    {
        if entry.ranks.load(Ordering::Relaxed) == 0 {
            learn_rank(entry, handle);
        }
        entry.pending.store(0, Ordering::Relaxed);
    }
    code
}

unsafe extern "C" fn destroy(handle: u64) -> i32 {
    let real = real!(Destroy, fn(u64));
    // SAFETY: the caller's argument.
    ending(handle, || unsafe { real(handle) })
}

unsafe extern "C" fn abort(handle: u64) -> i32 {
    let real = real!(Abort, fn(u64));
    // SAFETY: the caller's argument.
    ending(handle, || unsafe { real(handle) })
}

unsafe extern "C" fn group_start() -> i32 {
    let real = real!(GroupStart, fn());
    // SAFETY: no arguments.
    let code = unsafe { real() };
    if code == SUCCESS && current().is_some() && !Group::begin() {
        untracked(table::FULL);
    }
    code
}

unsafe extern "C" fn group_end() -> i32 {
    let real = real!(GroupEnd, fn());
    // SAFETY: no arguments.
    let call = || unsafe { real() };
    let Some(table) = current() else { return call() };
    let Some(group) = Group::of_this_thread() else {
        // There was no table when it began: it makes the first communicators.
        let _making = Making::begin();
        return call();
    };
    if !group.is_outermost() {
        group.end();
        return call();
    }
    let operations = group.operations();
    // One without operations can make communicators.
    let _making = operations.is_empty().then(Making::begin);
    let inside = enter(table, operations);
    let code = call();
    if code != SUCCESS {
        let counters = operations.iter().filter_map(|at| started(table, at.load(Ordering::Relaxed)));
        for counter in counters {
            if let Some(entry) = table.communicators.get(counter.communicator.load(Ordering::Relaxed) as usize) {
                note_started(entry, code);
            }
        }
    }
    drop(inside);
    group.end();
    code
}

macro_rules! collective {
    ($name:ident, $function:ident, fn($($argument:ident: $type:ty),*)) => {
        unsafe extern "C" fn $name($($argument: $type,)* communicator: u64, stream: Stream) -> i32 {
            let real = real!($function, fn($($type,)* u64, Stream));
            // SAFETY: the caller's arguments.
            let call = || unsafe { real($($argument,)* communicator, stream) };
            operation(communicator, table::COLLECTIVE, 0, call)
        }
    };
}

collective!(reduce, Reduce, fn(from: usize, to: usize, count: usize, kind: i32, reduction: i32, root: i32));
collective!(broadcast, Broadcast, fn(from: usize, to: usize, count: usize, kind: i32, root: i32));
collective!(all_reduce, AllReduce, fn(from: usize, to: usize, count: usize, kind: i32, reduction: i32));
collective!(reduce_scatter, ReduceScatter, fn(from: usize, to: usize, count: usize, kind: i32, reduction: i32));
collective!(all_gather, AllGather, fn(from: usize, to: usize, count: usize, kind: i32));
collective!(all_to_all, AllToAll, fn(from: usize, to: usize, count: usize, kind: i32));
collective!(gather, Gather, fn(from: usize, to: usize, count: usize, kind: i32, root: i32));
collective!(scatter, Scatter, fn(from: usize, to: usize, count: usize, kind: i32, root: i32));

unsafe extern "C" fn send(from: usize, count: usize, kind: i32, peer: i32, communicator: u64, stream: Stream) -> i32 {
    let real = real!(Send, fn(usize, usize, i32, i32, u64, Stream));
    // SAFETY: the caller's arguments.
    operation(communicator, table::SEND, peer, || unsafe { real(from, count, kind, peer, communicator, stream) })
}

unsafe extern "C" fn receive(to: usize, count: usize, kind: i32, peer: i32, communicator: u64, stream: Stream) -> i32 {
    let real = real!(Receive, fn(usize, usize, i32, i32, u64, Stream));
    // SAFETY: the caller's arguments.
    operation(communicator, table::RECEIVE, peer, || unsafe { real(to, count, kind, peer, communicator, stream) })
}

/// A CUDA graph is given an object to destroy. NCCL does so with each graph that captures its operations.
pub(crate) fn note_user_object() {
    if let Some(table) = current()
        && table.inside.load(Ordering::Relaxed) > 0
    {
        table.untracked.fetch_or(table::CAPTURED, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;

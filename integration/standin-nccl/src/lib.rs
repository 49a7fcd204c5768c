//! A stand-in for libnccl.so.2, beside the stand-in for libcuda: ranks of processes that meet in shared memory, and
//! operations that are pending "kernels" of the stand-in driver until all sides have started theirs. A test installs it
//! as `libnccl.so.2`; it is no part of the product.
//!
//! - The unique id names a memfd of the process that asked for it; a communicator is a `room::Room` in there.
//! - A buffer is one 64-bit number of the stand-in's device memory for each rank that has a part in it: `count` is 1
//!   and the type ncclUint64. Reductions add.
//! - Sends wait for their receives and the other way round, as with NCCL where nothing is buffered.
//! - What is called between `ncclGroupStart` and `ncclGroupEnd` starts at the outermost end, as one kernel for each
//!   stream.
//! - A communicator whose configuration says that it does not block returns ncclInProgress, and a thread starts what was
//!   called 2 ms later. Until then `ncclCommGetAsyncError` says ncclInProgress, and other calls fail.
//! - `ncclBcast` calls `ncclBroadcast` by its symbol, as NCCL's does.
#![allow(unsafe_code, reason = "a C interface: every block says why it is sound")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is that of nccl.h")]
#![allow(non_snake_case, reason = "the names are those of nccl.h")]

mod driver;
mod kernel;
mod room;

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use kernel::{Kernel, Operation, What};
use room::{Building, MOST, Room};

/// ncclResult_t.
mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const CUDA: i32 = 1;
    pub(crate) const SYSTEM: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 4;
    pub(crate) const INVALID_USAGE: i32 = 5;
    pub(crate) const IN_PROGRESS: i32 = 7;
}

/// NCCL_SPLIT_NOCOLOR.
const NO_COLOR: c_int = -1;

/// ncclUint64.
const U64: c_int = 5;

/// ncclUniqueId: who has the memory, the descriptor there, and what no other has.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u64; 16]);

/// Each library that is loaded has one of its own.
static OWN: AtomicBool = AtomicBool::new(true);

/// What ncclComm_t points to. Never freed.
#[derive(Debug)]
pub struct Communicator {
    /// The library that made it: no other one can use it.
    owner: &'static AtomicBool,
    building: &'static Building,
    room: &'static Room,
    rank: usize,
    ranks: usize,
    has_ended: AtomicBool,
    blocks: bool,
    /// What `ncclCommGetAsyncError` says.
    state: AtomicI32,
    /// What this rank has begun. In private memory, as the rest of its state is.
    begun: Mutex<kernel::Begun>,
    splits: Mutex<u64>,
}

impl Communicator {
    fn make(
        building: &'static Building,
        room: usize,
        rank: usize,
        ranks: usize,
        blocks: bool,
    ) -> Option<*mut Communicator> {
        let room = building.rooms.get(room)?;
        Some(Box::into_raw(Box::new(Communicator {
            owner: &OWN,
            building,
            room,
            rank,
            ranks,
            has_ended: AtomicBool::new(false),
            blocks,
            state: AtomicI32::new(code::SUCCESS),
            begun: Mutex::default(),
            splits: Mutex::new(0),
        })))
    }
}

/// Whether communicators of this ncclConfig_t block: its fourth number, behind a size_t and two others.
unsafe fn blocks(config: *const c_void) -> bool {
    let number = config.cast::<c_int>().wrapping_add(4);
    // SAFETY: null, or what nccl.h says.
    config.is_null() || unsafe { number.read() } != 0
}

/// Sets their state to ncclInProgress until `work` is done, on a thread.
fn later(all: Vec<&'static Communicator>, work: impl FnOnce() + Send + 'static) -> c_int {
    all.iter().for_each(|it| it.state.store(code::IN_PROGRESS, Ordering::SeqCst));
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(2));
        work();
        all.iter().for_each(|it| it.state.store(code::SUCCESS, Ordering::SeqCst));
    });
    code::IN_PROGRESS
}

/// ncclComm_t as an argument.
unsafe fn communicator(handle: *const Communicator) -> Option<&'static Communicator> {
    // SAFETY: the caller passes null or what was made here, or in another such library; it is never freed.
    unsafe { handle.as_ref() }.filter(|it| std::ptr::eq(it.owner, &raw const OWN))
}

/// One for which nothing is in progress.
unsafe fn ready(handle: *const Communicator) -> Option<&'static Communicator> {
    // SAFETY: the same contract.
    unsafe { communicator(handle) }.filter(|it| it.state.load(Ordering::SeqCst) == code::SUCCESS)
}

fn answer(result: Option<()>) -> c_int {
    if result.is_some() { code::SUCCESS } else { code::INVALID_ARGUMENT }
}

/// Makes the memory in which ranks meet, and names it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    // SAFETY: the caller passes null or room for an id.
    let Some(id) = (unsafe { id.as_mut() }) else { return code::INVALID_ARGUMENT };
    match room::make() {
        Ok(name) => {
            id.0 = [0; 16];
            id.0[..3].copy_from_slice(&name);
            code::SUCCESS
        }
        Err(_) => code::SYSTEM,
    }
}

/// Waits until all ranks are there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRank(
    new: *mut *mut Communicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
) -> c_int {
    // SAFETY: the same contract.
    unsafe { init_rank(new, ranks, id, rank, true) }
}

/// Of the configuration only `blocking` matters.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    new: *mut *mut Communicator,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *const c_void,
) -> c_int {
    // SAFETY: the contract of the call.
    let blocks = unsafe { blocks(config) };
    // SAFETY: the same contract.
    unsafe { init_rank(new, ranks, id, rank, blocks) }
}

/// Not by a symbol, which the loader may bind to another object.
unsafe fn init_rank(new: *mut *mut Communicator, ranks: c_int, id: UniqueId, rank: c_int, blocks: bool) -> c_int {
    // SAFETY: the caller passes null or room for a handle.
    let Some(new) = (unsafe { new.as_mut() }) else { return code::INVALID_ARGUMENT };
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return code::INVALID_ARGUMENT;
    };
    if ranks > MOST || rank >= ranks {
        return code::INVALID_ARGUMENT;
    }
    let Ok(building) = room::open([id.0[0], id.0[1], id.0[2]]) else { return code::SYSTEM };
    building.rooms[0].joined.fetch_add(1, Ordering::SeqCst);
    let wait = move || room::wait(|| building.rooms[0].joined.load(Ordering::SeqCst) >= ranks as u64);
    let Some(made) = Communicator::make(building, 0, rank, ranks, blocks) else { return code::INVALID_ARGUMENT };
    *new = made;
    if blocks {
        wait();
        return code::SUCCESS;
    }
    // SAFETY: just made, and never freed.
    later(vec![unsafe { &*made }], wait)
}

/// All ranks in this process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitAll(new: *mut *mut Communicator, count: c_int, _devices: *const c_int) -> c_int {
    let Some(count) = usize::try_from(count).ok().filter(|count| *count <= MOST && !new.is_null()) else {
        return code::INVALID_ARGUMENT;
    };
    let Ok(building) = room::make().and_then(room::open) else { return code::SYSTEM };
    // SAFETY: the caller has room for as many.
    let new = unsafe { std::slice::from_raw_parts_mut(new, count) };
    for (rank, new) in new.iter_mut().enumerate() {
        let Some(made) = Communicator::make(building, 0, rank, count, true) else { return code::INVALID_ARGUMENT };
        *new = made;
    }
    code::SUCCESS
}

/// All ranks of the old one call it. Ranks of one colour are a new one, in the order of their keys.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommSplit(
    old: *mut Communicator,
    color: c_int,
    key: c_int,
    new: *mut *mut Communicator,
    config: *const c_void,
) -> c_int {
    // SAFETY: the contract of the call.
    let (Some(old), Some(new)) = (unsafe { communicator(old) }, unsafe { new.as_mut() }) else {
        return code::INVALID_ARGUMENT;
    };
    let mut splits = old.splits.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    *splits += 1;
    let members = old.room.split(*splits, old.rank, old.ranks, [color, key]);
    if color == NO_COLOR {
        return code::SUCCESS;
    }
    let room = old.room.split_room(*splits, &members, old.rank, || old.building.new_room());
    let rank = members.iter().position(|member| *member == old.rank);
    // SAFETY: the contract of the call.
    let blocks = unsafe { blocks(config) };
    let Some(made) = rank.and_then(|rank| Communicator::make(old.building, room, rank, members.len(), blocks)) else {
        return code::INVALID_ARGUMENT;
    };
    *new = made;
    // SAFETY: just made, and never freed.
    if blocks { code::SUCCESS } else { later(vec![unsafe { &*made }], || ()) }
}

/// What a call has left to a thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *const Communicator, state: *mut c_int) -> c_int {
    // SAFETY: the contract of the call.
    let Some(it) = (unsafe { communicator(handle) }) else { return code::INVALID_ARGUMENT };
    // SAFETY: the caller passes null or room for a number.
    let Some(state) = (unsafe { state.as_mut() }) else { return code::INVALID_ARGUMENT };
    *state = it.state.load(Ordering::SeqCst);
    code::SUCCESS
}

/// What it has started goes on.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(handle: *mut Communicator) -> c_int {
    // SAFETY: the contract of the call.
    answer(unsafe { communicator(handle) }.map(|_| ()))
}

/// What it has started ends at once. Adds the process's own pid to the file that STANDIN_NCCL_ABORTS names, if it does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut Communicator) -> c_int {
    if let Some(file) = std::env::var_os("STANDIN_NCCL_ABORTS")
        && let Ok(mut file) = std::fs::OpenOptions::new().create(true).append(true).open(file)
    {
        // In one write: several processes append.
        let _ = file.write_all(format!("{}\n", std::process::id()).as_bytes());
    }
    // SAFETY: the contract of the call.
    answer(unsafe { communicator(handle) }.map(|it| it.has_ended.store(true, Ordering::SeqCst)))
}

fn tell(number: usize, to: *mut c_int) -> c_int {
    // SAFETY: the caller passes null or room for a number.
    match (unsafe { to.as_mut() }, c_int::try_from(number)) {
        (Some(to), Ok(number)) => *to = number,
        _ => return code::INVALID_ARGUMENT,
    }
    code::SUCCESS
}

/// How many ranks there are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommCount(handle: *const Communicator, count: *mut c_int) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { ready(handle) }.map_or(code::INVALID_ARGUMENT, |it| tell(it.ranks, count))
}

/// Which of them this is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommUserRank(handle: *const Communicator, rank: *mut c_int) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { ready(handle) }.map_or(code::INVALID_ARGUMENT, |it| tell(it.rank, rank))
}

/// The group calls of one thread.
#[derive(Debug, Default)]
struct Group {
    depth: u32,
    /// With the stream of each.
    operations: Vec<(usize, Operation)>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// One level deeper.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    code::SUCCESS
}

/// One level less; at the outermost, all of it starts.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGroupEnd() -> c_int {
    let operations = GROUP.with_borrow_mut(|group| {
        group.depth = group.depth.checked_sub(1)?;
        Some(if group.depth == 0 { std::mem::take(&mut group.operations) } else { Vec::new() })
    });
    operations.map_or(code::INVALID_USAGE, start)
}

fn start(operations: Vec<(usize, Operation)>) -> c_int {
    let communicators: Vec<_> = operations.iter().map(|(_, operation)| operation.communicator()).collect();
    if communicators.iter().all(|it| it.blocks) {
        return launch(operations);
    }
    later(communicators, move || assert_eq!(launch(operations), code::SUCCESS))
}

fn launch(mut operations: Vec<(usize, Operation)>) -> c_int {
    while let Some(&(stream, _)) = operations.first() {
        let (now, later): (Vec<_>, Vec<_>) = operations.into_iter().partition(|(other, _)| *other == stream);
        operations = later;
        if driver::launch(stream, Kernel::new(now.into_iter().map(|(_, operation)| operation).collect())) != 0 {
            return code::CUDA;
        }
    }
    code::SUCCESS
}

/// Starts an operation, or adds it to the group of this thread.
unsafe fn operation(handle: *mut Communicator, stream: usize, count: usize, kind: c_int, what: What) -> c_int {
    // SAFETY: the contract of the callers.
    let Some(communicator) = (unsafe { ready(handle) }) else { return code::INVALID_ARGUMENT };
    let in_range = match what {
        What::Send { peer, .. } | What::Receive { peer, .. } | What::Broadcast { root: peer, .. } => {
            peer < communicator.ranks
        }
        _ => true,
    };
    if count != 1 || kind != U64 || !in_range {
        return code::INVALID_ARGUMENT;
    }
    let operation = Operation::new(communicator, what);
    let alone = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(operation),
        _ => {
            group.operations.push((stream, operation));
            None
        }
    });
    alone.map_or(code::SUCCESS, |operation| start(vec![(stream, operation)]))
}

fn rank(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// The sum of all, in all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    _reduction: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::AllReduce { from, to }) }
}

/// The root's number, in all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    root: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::Broadcast { from, to, root: rank(root) }) }
}

/// The same in place.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBcast(
    buffer: usize,
    count: usize,
    kind: c_int,
    root: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    type Broadcast = unsafe extern "C" fn(usize, usize, usize, c_int, c_int, *mut Communicator, usize) -> c_int;
    let address: usize;
    // SAFETY: the loader has put the address of the symbol there, which may be that of an object before this one.
    unsafe {
        std::arch::asm!("mov {}, [rip + ncclBroadcast@GOTPCREL]", out(reg) address,
            options(nostack, pure, readonly, preserves_flags));
    };
    let broadcast: *const () = std::ptr::with_exposed_provenance(address);
    // SAFETY: a function of this name has this type.
    let broadcast = unsafe { std::mem::transmute::<*const (), Broadcast>(broadcast) };
    // SAFETY: the same contract.
    unsafe { broadcast(buffer, buffer, count, kind, root, handle, stream) }
}

/// The numbers of all, side by side, in all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::AllGather { from, to }) }
}

/// The sum of all, of one number of each for each rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    from: usize,
    to: usize,
    count: usize,
    kind: c_int,
    _reduction: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::ReduceScatter { from, to }) }
}

/// To one other rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    from: usize,
    count: usize,
    kind: c_int,
    peer: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::Send { from, peer: rank(peer) }) }
}

/// From one other rank.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    to: usize,
    count: usize,
    kind: c_int,
    peer: c_int,
    handle: *mut Communicator,
    stream: usize,
) -> c_int {
    // SAFETY: the contract of the call.
    unsafe { operation(handle, stream, count, kind, What::Receive { to, peer: rank(peer) }) }
}

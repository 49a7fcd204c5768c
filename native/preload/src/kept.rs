//! Device memory that can stay on the GPU while the process is checkpointed.
//!
//! The driver copies all memory of `cuMemAlloc` to the host and back. Memory of `cuMemCreate` lives as long as anybody has
//! a descriptor for it. So large allocations are made of it, at addresses of their own, and recorded in the table of
//! [`crate::sharing`]. For a snapshot the keeper hands their descriptors to the supervisor, unmaps and releases them, as it
//! does with memory of other processes, and takes them again at the same addresses. The driver then has nothing of them to
//! copy.
//!
//! ```text
//!  cuMemAlloc     reserve addresses, create, map, give access; anything that fails: the driver's own cuMemAlloc
//!  snapshot       export (the first time), hand over, unmap, release | the driver's checkpoint and restore | import, map
//!  cuMemFree      wait for the GPU, unmap, release, close the descriptor, free the addresses
//!  cuMemFreeAsync wait for the stream, then the same
//! ```
//!
//! An imported piece cannot be exported again (driver 580), so from its first snapshot on the process itself has its
//! descriptor, except while it is checkpointed. So the memory is free as soon as the process frees it or ends, however it
//! ends. A child of fork(2) does not have these descriptors: it would keep the memory from being freed.
//!
//! Descriptors are the program's good: it may have few of them, and it may close those that it does not know. So ours are
//! at most a quarter of what it may have, with the highest numbers; allocations beyond that are the driver's. One that was
//! closed, or whose number is another file now, is never used and never closed ([`own_number`]).
//!
//! What a program can notice: CUDA IPC of such memory is refused (counted in the table, so that the supervisor can say
//! why), and so is SYNC_MEMOPS; its context attribute is null; destroying a context does not free it. Access from other
//! GPUs is given where the program enables peer access.

use core::ffi::{CStr, c_void};
use core::mem::transmute;
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};

use crate::lookup::{Function, Plain};
use crate::real;
use crate::sharing::{self, INVALID_VALUE, NOT_INITIALIZED, SUCCESS, UnderWay, driver};
use crate::{keeper, libc, sys};
use rekindle_abi::sharing::{self as table, Import, MOST, Mapping, Table};

/// What the driver maps at once: allocations are rounded up to it. cuMemAlloc (580) does the same from 1 MiB on.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Descriptors of ours have at least this number, or are the last quarter of the limit if that is less: the program gets
/// low ones, and select(2) and old programs can use no others.
const LEAST_DESCRIPTOR: usize = 4096;

/// Allocations of at least this size can stay on the GPU; 0: none.
static LEAST: AtomicUsize = AtomicUsize::new(0);

/// The descriptor of each entry, plus one; 0 if it has none. Not in the table, which a forked child does not have.
static FILES: [AtomicI32; MOST] = [const { AtomicI32::new(0) }; MOST];
/// What file that descriptor is of.
static STAMPS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// The context in which each entry was allocated.
static CONTEXTS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// Entries of both that were ever used.
static USED: AtomicU32 = AtomicU32::new(0);

/// Number of GPUs whose peers are recorded.
const GPUS: usize = 64;
/// For each GPU those that may access its memory, a bit each.
static PEERS: [AtomicU64; GPUS] = [const { AtomicU64::new(0) }; GPUS];
/// For each GPU whether network cards can access such memory: 0 unknown, 1 no, 2 yes.
static RDMA: [AtomicU32; GPUS] = [const { AtomicU32::new(0) }; GPUS];

static CURRENT_DEVICE: Plain = Plain::new(c"cuCtxGetDevice");
static CURRENT_CONTEXT: Plain = Plain::new(c"cuCtxGetCurrent");
static PUSH: Plain = Plain::new(c"cuCtxPushCurrent_v2");
static POP: Plain = Plain::new(c"cuCtxPopCurrent_v2");
static SYNCHRONIZE: Plain = Plain::new(c"cuCtxSynchronize");
static STREAM_SYNCHRONIZE: ForStreams = ForStreams::new(c"cuStreamSynchronize", c"cuStreamSynchronize_ptsz");
static CAPTURING: ForStreams = ForStreams::new(c"cuStreamIsCapturing", c"cuStreamIsCapturing_ptsz");
static ATTRIBUTE: Plain = Plain::new(c"cuDeviceGetAttribute");
static RESERVE: Plain = Plain::new(c"cuMemAddressReserve");
static UNRESERVE: Plain = Plain::new(c"cuMemAddressFree");

/// CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
const RDMA_SUPPORTED: i32 = 110;

/// The driver has two functions for streams: for the second one the stream 0 is that of the calling thread
/// (CUDA_API_PER_THREAD_DEFAULT_STREAM).
struct ForStreams {
    legacy: Plain,
    per_thread: Plain,
}

/// What stream 0 is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Default {
    Legacy,
    OfThread,
}

impl ForStreams {
    const fn new(legacy: &'static CStr, per_thread: &'static CStr) -> ForStreams {
        ForStreams { legacy: Plain::new(legacy), per_thread: Plain::new(per_thread) }
    }

    fn of(&self, default: Default) -> &Plain {
        match default {
            Default::Legacy => &self.legacy,
            Default::OfThread => &self.per_thread,
        }
    }
}

macro_rules! plain {
    ($function:expr, fn($($argument:ty),*)) => {{
        let found = $function.real();
        if found.is_null() {
            return NOT_INITIALIZED;
        }
        // SAFETY: libcuda's function of this name, which has this type (cuda.h of CUDA 13).
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(found) }
    }};
}

/// From now on allocations of at least `least` bytes can stay on the GPU; 0: none.
pub(crate) fn begin(least: usize) {
    LEAST.store(least, Ordering::Relaxed);
}

/// Looks up what the keeper needs, as long as the program runs.
pub(crate) fn find_addresses() {
    RESERVE.real();
    UNRESERVE.real();
}

fn current_device(device: &mut i32) -> i32 {
    let real = plain!(CURRENT_DEVICE, fn(*mut i32));
    // SAFETY: a live local.
    unsafe { real(device) }
}

fn current_context(context: &mut u64) -> i32 {
    let real = plain!(CURRENT_CONTEXT, fn(*mut u64));
    // SAFETY: a live local.
    unsafe { real(context) }
}

fn push(context: u64) -> i32 {
    let real = plain!(PUSH, fn(u64));
    // SAFETY: the driver checks it.
    unsafe { real(context) }
}

fn pop() -> i32 {
    let real = plain!(POP, fn(*mut u64));
    // SAFETY: a live local.
    unsafe { real(&mut 0) }
}

fn synchronize() -> i32 {
    let real = plain!(SYNCHRONIZE, fn());
    // SAFETY: no argument.
    unsafe { real() }
}

/// Whether work of this stream goes to a graph. If that cannot be told, it does.
fn is_capturing(stream: u64, default: Default) -> bool {
    let mut status = 0;
    let mut ask = || {
        let real = plain!(CAPTURING.of(default), fn(u64, *mut i32));
        // SAFETY: the caller's stream, and a live local.
        unsafe { real(stream, &raw mut status) }
    };
    ask() != SUCCESS || status != 0
}

fn synchronize_stream(stream: u64, default: Default) -> i32 {
    let real = plain!(STREAM_SYNCHRONIZE.of(default), fn(u64));
    // SAFETY: the caller's stream.
    unsafe { real(stream) }
}

fn attribute(value: &mut i32, which: i32, device: i32) -> i32 {
    let real = plain!(ATTRIBUTE, fn(*mut i32, i32, i32));
    // SAFETY: a live local, and numbers.
    unsafe { real(value, which, device) }
}

pub(crate) fn reserve(address: &mut u64, size: u64) -> i32 {
    let real = plain!(RESERVE, fn(*mut u64, u64, u64, u64, u64));
    // SAFETY: a live local, and numbers.
    unsafe { real(address, size, 0, 0, 0) }
}

pub(crate) fn unreserve(address: u64, size: u64) -> i32 {
    let real = plain!(UNRESERVE, fn(u64, u64));
    // SAFETY: addresses that were reserved, and that nothing is mapped at.
    unsafe { real(address, size) }
}

/// Makes memory on this GPU that can be exported. It is undefined what it contains.
pub(crate) fn create(handle: &mut u64, size: u64, device: i32) -> i32 {
    // CUmemAllocationProp: pinned, as a descriptor, on a device; then a pointer, and flags: the second byte says that
    // network cards can use it, as they can use memory of cuMemAlloc.
    let properties = [1, sharing::DESCRIPTOR, 1, device as u32, 0, 0, u32::from(has_rdma(device)) << 8, 0];
    driver::create(handle, size, &properties)
}

fn has_rdma(device: i32) -> bool {
    let Some(known) = RDMA.get(device as usize) else { return false };
    if known.load(Ordering::Relaxed) == 0 {
        let mut value = 0;
        let has_it = attribute(&mut value, RDMA_SUPPORTED, device) == SUCCESS && value != 0;
        known.store(1 + u32::from(has_it), Ordering::Relaxed);
    }
    known.load(Ordering::Relaxed) == 2
}

/// Read and write from this GPU: a CUmemAccessDesc.
fn access(device: i32) -> [i32; 3] {
    [1, device, 3]
}

/// While CUDA is locked a call that has begun would keep its memory from being released.
fn wait_for_unlock() {
    while sharing::is_locked() {
        sys::sleep(100_000);
    }
}

/// cuMemAlloc_v2.
pub(crate) unsafe extern "C" fn allocate(pointer: *mut u64, size: usize) -> i32 {
    let real = real!(Allocate, fn(*mut u64, usize));
    let least = LEAST.load(Ordering::Relaxed);
    if least != 0
        && size >= least
        && !pointer.is_null()
        && let Some(address) = make(size)
    {
        // SAFETY: not null, and the caller's.
        unsafe { *pointer = address };
        return SUCCESS;
    }
    // SAFETY: the caller's arguments.
    unsafe { real(pointer, size) }
}

/// An allocation under way; what it has is given back unless it is complete.
struct Making {
    address: u64,
    size: u64,
    handle: u64,
    is_mapped: bool,
    is_complete: bool,
}

impl Drop for Making {
    fn drop(&mut self) {
        if self.is_complete {
            return;
        }
        if self.is_mapped {
            driver::unmap(self.address, self.size);
        }
        if self.handle != 0 {
            driver::release(self.handle);
        }
        if self.address != 0 {
            unreserve(self.address, self.size);
        }
    }
}

/// The address of new memory that can stay on the GPU; `None` where that is not possible.
fn make(size: usize) -> Option<u64> {
    let succeeded = |code: i32| (code == SUCCESS).then_some(());
    let size = (size as u64).checked_next_multiple_of(GRANULE)?;
    let table = sharing::table_or_new()?;
    // Each piece needs a descriptor from its first snapshot on.
    let is_ours = |import: &&Import| sharing::is_live(import) && sharing::is_kept(import);
    if sharing::imports(table).filter(is_ours).count() >= sys::descriptor_limit() / 4 {
        return None;
    }
    close_in_children();
    wait_for_unlock();
    let (mut device, mut context) = (0, 0);
    succeeded(current_device(&mut device))?;
    succeeded(current_context(&mut context))?;
    // Without it nothing could let go of this memory, and the driver can copy it.
    if !keeper::start(table) {
        return None;
    }
    let _under_way = UnderWay::begin();
    let mut making = Making { address: 0, size, handle: 0, is_mapped: false, is_complete: false };
    succeeded(reserve(&mut making.address, size))?;
    succeeded(create(&mut making.handle, size, device))?;
    succeeded(driver::map(making.address, size, 0, making.handle, 0))?;
    making.is_mapped = true;
    succeeded(driver::set_access(making.address, size, &access(device)))?;
    note(table, &making, device, context)?;
    making.is_complete = true;
    let mapping = sharing::mappings(table).find(|mapping| mapping.address.load(Ordering::Relaxed) == making.address)?;
    for peer in peers(device) {
        // Without it an access from there fails, as it would without peer access.
        give_access(mapping, peer);
    }
    Some(making.address)
}

fn note(table: &Table, making: &Making, device: i32, context: u64) -> Option<()> {
    let _changing = sharing::wait()?;
    let (at, entry) = table.imports.iter().enumerate().find(|(_, import)| !sharing::is_live(import))?;
    let mapping = sharing::add_mapping(table, at, entry, [making.address, making.size, 0, 0])?;
    sharing::note_access(mapping, access(device));
    entry.name.store(0, Ordering::Relaxed);
    entry.handle.store(making.handle, Ordering::Relaxed);
    entry.kind.store(sharing::DESCRIPTOR, Ordering::Relaxed);
    entry.references.store(1, Ordering::Relaxed);
    entry.mappings.store(1, Ordering::Relaxed);
    entry.is_gone.store(0, Ordering::Relaxed);
    entry.id.store(0, Ordering::Relaxed);
    entry.device.store(device, Ordering::Relaxed);
    entry.kept.store(table::OWN, Ordering::Relaxed);
    if let (Some(file), Some(own)) = (FILES.get(at), CONTEXTS.get(at)) {
        file.store(0, Ordering::Relaxed);
        own.store(context, Ordering::Relaxed);
    }
    USED.fetch_max(at as u32 + 1, Ordering::Relaxed);
    entry.is_live.store(1, Ordering::Release);
    table.imports_used.fetch_max(at as u32 + 1, Ordering::Relaxed);
    Some(())
}

/// The mapping of memory that can stay, and its entry, at an address for which `is_it` is true.
fn find(table: &Table, is_it: impl Fn(u64, u64) -> bool) -> Option<(&Mapping, &Import)> {
    let known = |mapping: &&Mapping| {
        is_it(mapping.address.load(Ordering::Relaxed), mapping.size.load(Ordering::Relaxed))
            && sharing::import_of(table, mapping).is_some_and(sharing::is_kept)
    };
    let mapping = sharing::mappings(table).find(known)?;
    Some((mapping, sharing::import_of(table, mapping)?))
}

/// Whether there is memory that can stay at this address.
pub(crate) fn is_in(address: u64) -> bool {
    sharing::table().is_some_and(|table| find(table, |start, size| address.wrapping_sub(start) < size).is_some())
}

/// cuMemFree_v2.
pub(crate) unsafe extern "C" fn free(address: u64) -> i32 {
    let real = real!(Free, fn(u64));
    if let Some(table) = sharing::table()
        && let Some((mapping, import)) = find(table, |start, _| start == address)
    {
        // cuMemFree waits for what uses the memory, cuMemUnmap does not.
        let at = mapping.import.load(Ordering::Relaxed) as usize;
        let context = CONTEXTS.get(at).map_or(0, |context| context.load(Ordering::Relaxed));
        return forget(address, mapping, import, || synchronize_in(context));
    }
    // SAFETY: the caller's argument.
    unsafe { real(address) }
}

/// cuMemFreeAsync, which also takes memory of cuMemAlloc. The driver itself does not know ours.
pub(crate) unsafe extern "C" fn free_async(address: u64, stream: u64) -> i32 {
    let real = real!(FreeAsync, fn(u64, u64));
    // SAFETY: the caller's arguments.
    free_in_order(address, stream, Default::Legacy, || unsafe { real(address, stream) })
}

/// cuMemFreeAsync_ptsz.
pub(crate) unsafe extern "C" fn free_async_per_thread(address: u64, stream: u64) -> i32 {
    let real = real!(FreeAsyncPerThread, fn(u64, u64));
    // SAFETY: the caller's arguments.
    free_in_order(address, stream, Default::OfThread, || unsafe { real(address, stream) })
}

/// The program has seen to it that all use of the memory comes before the free in the order of the stream. In a graph there
/// can be no such free: the driver's error says so.
fn free_in_order(address: u64, stream: u64, default: Default, real: impl FnOnce() -> i32) -> i32 {
    if let Some(table) = sharing::table()
        && let Some((mapping, import)) = find(table, |start, _| start == address)
        && !is_capturing(stream, default)
    {
        return forget(address, mapping, import, || synchronize_stream(stream, default));
    }
    real()
}

fn forget(address: u64, mapping: &Mapping, import: &Import, wait: impl FnOnce() -> i32) -> i32 {
    let at = mapping.import.load(Ordering::Relaxed) as usize;
    let code = wait();
    if code != SUCCESS {
        return code;
    }
    wait_for_unlock();
    let _under_way = UnderWay::begin();
    // Two threads may free it at once, and both entries may be another allocation's by now.
    let is_it = |import: &Import| {
        mapping.address.load(Ordering::Relaxed) == address
            && mapping.import.load(Ordering::Relaxed) as usize == at
            && sharing::is_live(import)
    };
    let freed = match sharing::wait() {
        Some(_changing) if is_it(import) => {
            import.is_live.store(0, Ordering::Relaxed);
            mapping.address.store(0, Ordering::Relaxed);
            // Before another thread gets the entry: its memory has no descriptor yet, and this one would be lost.
            close(at);
            Some((mapping.size.load(Ordering::Relaxed), import.handle.load(Ordering::Relaxed)))
        }
        _ => None,
    };
    let Some((size, handle)) = freed else { return INVALID_VALUE };
    let unmapped = driver::unmap(address, size);
    let released = driver::release(handle);
    let freed = unreserve(address, size);
    [unmapped, released, freed].into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

/// Waits for the work of a context; of the current one if that does not exist any more.
fn synchronize_in(context: u64) -> i32 {
    if context == 0 || push(context) != SUCCESS {
        return synchronize();
    }
    let code = synchronize();
    pop();
    code
}

fn peers(device: i32) -> impl Iterator<Item = i32> {
    let peers = PEERS.get(device as usize).map_or(0, |peers| peers.load(Ordering::Relaxed));
    (0..GPUS as i32).filter(move |peer| peers >> peer & 1 != 0)
}

fn give_access(mapping: &Mapping, device: i32) -> i32 {
    let (address, size) = (mapping.address.load(Ordering::Relaxed), mapping.size.load(Ordering::Relaxed));
    let code = driver::set_access(address, size, &access(device));
    if code == SUCCESS
        && let Some(_changing) = sharing::wait()
    {
        sharing::note_access(mapping, access(device));
    }
    code
}

/// cuCtxEnablePeerAccess: the current context may access the memory of another one. The driver does not extend that to
/// memory of cuMemCreate.
pub(crate) unsafe extern "C" fn enable_peer(context: u64, flags: u32) -> i32 {
    let real = real!(EnablePeer, fn(u64, u32));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(context, flags) };
    if code != SUCCESS || LEAST.load(Ordering::Relaxed) == 0 {
        return code;
    }
    let (mut own, mut other) = (0, 0);
    if current_device(&mut own) != SUCCESS || push(context) != SUCCESS {
        return code;
    }
    let has_other = current_device(&mut other) == SUCCESS;
    pop();
    if !has_other || !(0..GPUS as i32).contains(&own) {
        return code;
    }
    if let Some(peers) = PEERS.get(other as usize) {
        peers.fetch_or(1 << own, Ordering::Relaxed);
    }
    wait_for_unlock();
    let _under_way = UnderWay::begin();
    if let Some(table) = sharing::table() {
        let is_there = |mapping: &&Mapping| {
            let is_on = |import: &Import| import.device.load(Ordering::Relaxed) == other;
            sharing::import_of(table, mapping).is_some_and(|import| sharing::is_kept(import) && is_on(import))
        };
        for mapping in sharing::mappings(table).filter(is_there) {
            give_access(mapping, own);
        }
    }
    code
}

/// cuIpcGetMemHandle. The driver has none for memory of cuMemCreate; the supervisor says why.
pub(crate) unsafe extern "C" fn ipc_handle(handle: *mut c_void, address: u64) -> i32 {
    let real = real!(IpcHandle, fn(*mut c_void, u64));
    if is_in(address)
        && let Some(table) = sharing::table()
    {
        table.ipc_refused.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: the caller's arguments.
    unsafe { real(handle, address) }
}

/// The number of the descriptor of an entry. None if it has none, or if the program has closed it: the number may be another
/// file's then.
fn own_number(at: usize) -> Option<i32> {
    let number = FILES.get(at).map(|file| file.load(Ordering::Relaxed)).filter(|number| *number > 0)? - 1;
    let file = sys::File::from_number(number);
    let stamp = stamp(&file);
    file.into_number();
    let known = STAMPS.get(at)?.load(Ordering::Relaxed);
    (stamp == Some(known)).then_some(number)
}

/// Differs for files that a program may have opened instead. Descriptors of device memory are of one device.
fn stamp(file: &sys::File) -> Option<u64> {
    let status = file.status().ok()?;
    Some(status.inode as u64 ^ (status.device as u64).rotate_left(32))
}

/// The descriptor of an entry. It stays the entry's. Otherwise a [`rekindle_abi::sharing::Reply::code`].
pub(crate) fn file(at: usize, import: &Import) -> Result<sys::File, i32> {
    if own_number(at).is_none() {
        if import.kept.load(Ordering::Relaxed) != table::OWN {
            // The driver exports it no more.
            return Err(table::LOST);
        }
        let mut number = -1;
        match driver::export_untagged(&mut number, import.handle.load(Ordering::Relaxed)) {
            SUCCESS => keep_file(at, import, &sys::File::from_number(number))?,
            code => return Err(code),
        }
    }
    let number = own_number(at).ok_or(table::LOST)?;
    // After the snapshot it needs a number again that the limit allows, which may be lower than it was.
    if number as usize >= sys::descriptor_limit() {
        return Err(table::NO_DESCRIPTOR);
    }
    let own = sys::File::from_number(number);
    let copy = own.duplicate(0);
    own.into_number();
    copy.map_err(|_| table::NO_DESCRIPTOR)
}

/// Gives an entry its descriptor: another one of the same file.
pub(crate) fn keep_file(at: usize, import: &Import, file: &sys::File) -> Result<(), i32> {
    let (Some(slot), Some(known)) = (FILES.get(at), STAMPS.get(at)) else { return Err(INVALID_VALUE) };
    let limit = sys::descriptor_limit();
    let own = file.duplicate(LEAST_DESCRIPTOR.min(limit - limit / 4));
    // Rather a low number than none.
    let own = own.or_else(|_| file.duplicate(0)).map_err(|_| table::NO_DESCRIPTOR)?;
    let stamp = stamp(&own).ok_or(table::NO_DESCRIPTOR)?;
    // The kernel has just given it: whoever else has noted this number has lost its own, because the program closed it. All
    // descriptors of device memory can have one stamp, which does not show that.
    lose(own.number());
    close(at);
    known.store(stamp, Ordering::Relaxed);
    slot.store(own.into_number() + 1, Ordering::Relaxed);
    import.id.store(1, Ordering::Relaxed);
    Ok(())
}

/// No entry has a descriptor with this number.
fn lose(number: i32) {
    let used = FILES.iter().take(USED.load(Ordering::Relaxed) as usize);
    for slot in used.filter(|slot| slot.load(Ordering::Relaxed) == number + 1) {
        slot.store(0, Ordering::Relaxed);
    }
}

/// Closes the descriptor of an entry, if it has one.
pub(crate) fn close(at: usize) {
    // In this order: a child that is forked in between has the number, finds it closed or another file's, and leaves it.
    if let Some(number) = own_number(at) {
        drop(sys::File::from_number(number));
    }
    if let Some(slot) = FILES.get(at) {
        slot.store(0, Ordering::Relaxed);
    }
}

/// Runs in a child of fork(3).
extern "C" fn close_all() {
    (0..USED.load(Ordering::Relaxed) as usize).for_each(close);
}

/// Sees to it, once, that children do not have our descriptors.
fn close_in_children() {
    static IS_SET: AtomicBool = AtomicBool::new(false);
    if !IS_SET.swap(true, Ordering::Relaxed) {
        libc::at_fork_in_child(close_all);
    }
}

#[cfg(test)]
mod tests;

//! Objects that the driver checkpoints and cannot restore, and of which we can make no copy: they are counted for as long as they
//! exist, and the supervisor refuses a snapshot.
//!
//! Seen with driver 580 on one H200: with a sparse array the restore fails (304), with an array whose memory is mapped later
//! (CUDA_ARRAY3D_DEFERRED_MAPPING) the checkpoint does not return, and of a pool of host memory the restore fails (999, NUMA) or
//! the program finds nothing at its addresses (HOST). A pool from which nothing was allocated does no harm.

use core::ffi::c_void;
use core::mem::transmute;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::lookup::{Function, Plain};
use crate::sharing::{self, NOT_INITIALIZED, SUCCESS};
use crate::{host, real};
use rekindle_abi::sharing as table;

/// Objects that are told apart. What is beyond is counted and never forgotten.
const MOST: usize = 1024;

/// The driver's handles; 0 if the entry is free.
static OBJECTS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// What each is: an index of the counts, plus one; 0 for a pool of host memory from which nothing was allocated.
static KINDS: [AtomicU32; MOST] = [const { AtomicU32::new(0) }; MOST];
/// Pools of host memory.
static POOLS: AtomicU32 = AtomicU32::new(0);

static POOL_ATTRIBUTE: Plain = Plain::new(c"cuMemPoolGetAttribute");
/// CU_MEMPOOL_ATTR_USED_MEM_CURRENT.
const USED_NOW: i32 = 7;

/// CUDA_ARRAY3D_SPARSE and _DEFERRED_MAPPING.
const SPARSE: u32 = 0x40;
const DEFERRED: u32 = 0x80;

fn count(kind: usize, change: i32) {
    let count = |now: u32| Some(now.saturating_add_signed(change));
    let slot = sharing::table_or_new().and_then(|table| table.unrestorable.get(kind));
    if let Some(slot) = slot {
        let _ = slot.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    }
}

/// Returns whether there is room for it.
fn add(object: u64, kind: u32) -> bool {
    let is_taken =
        |(slot, _): &(&AtomicU64, _)| slot.compare_exchange(0, object, Ordering::Relaxed, Ordering::Relaxed).is_ok();
    let found = OBJECTS.iter().zip(&KINDS).find(is_taken);
    found.is_some_and(|(_, known)| {
        known.store(kind, Ordering::Relaxed);
        true
    })
}

fn find(object: u64) -> Option<(&'static AtomicU64, &'static AtomicU32)> {
    OBJECTS.iter().zip(&KINDS).find(|(slot, _)| object != 0 && slot.load(Ordering::Relaxed) == object)
}

fn remove(object: u64) {
    let Some((slot, kind)) = find(object) else { return };
    if let Some(kind) = kind.load(Ordering::Relaxed).checked_sub(1) {
        count(kind as usize, -1);
    }
    slot.store(0, Ordering::Relaxed);
}

/// CUDA_ARRAY3D_DESCRIPTOR: width, height, depth, then format, channels and flags.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct ArrayDescriptor {
    size: [u64; 3],
    format: u32,
    channels: u32,
    flags: u32,
}

fn note_array(new: *const u64, descriptor: *const ArrayDescriptor) {
    // SAFETY: the driver has just read one, and written the other.
    let (new, descriptor) = unsafe { (new.as_ref(), descriptor.as_ref()) };
    let (Some(new), Some(descriptor)) = (new, descriptor) else { return };
    let kind = match descriptor.flags {
        flags if flags & SPARSE != 0 => table::SPARSE,
        flags if flags & DEFERRED != 0 => table::DEFERRED,
        _ => return,
    };
    add(*new, kind as u32 + 1);
    count(kind, 1);
}

/// cuArray3DCreate_v2.
pub(crate) unsafe extern "C" fn array(new: *mut u64, descriptor: *const ArrayDescriptor) -> i32 {
    let real = real!(CreateArray, fn(*mut u64, *const ArrayDescriptor));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(new, descriptor) };
    if code == SUCCESS {
        note_array(new, descriptor);
    }
    code
}

/// cuMipmappedArrayCreate.
pub(crate) unsafe extern "C" fn mipmapped(new: *mut u64, descriptor: *const ArrayDescriptor, levels: u32) -> i32 {
    let real = real!(CreateMipmapped, fn(*mut u64, *const ArrayDescriptor, u32));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(new, descriptor, levels) };
    if code == SUCCESS {
        note_array(new, descriptor);
    }
    code
}

/// cuArrayDestroy. Recorded before it is done: afterwards another thread may get the same handle.
pub(crate) unsafe extern "C" fn destroy_array(array: u64) -> i32 {
    let real = real!(DestroyArray, fn(u64));
    remove(array);
    // SAFETY: the caller's argument.
    unsafe { real(array) }
}

/// cuMipmappedArrayDestroy.
pub(crate) unsafe extern "C" fn destroy_mipmapped(array: u64) -> i32 {
    let real = real!(DestroyMipmapped, fn(u64));
    remove(array);
    // SAFETY: the caller's argument.
    unsafe { real(array) }
}

fn note_pool(new: *const u64) {
    // SAFETY: the driver has just written it.
    let Some(new) = (unsafe { new.as_ref() }) else { return };
    if find(*new).is_some() {
        return;
    }
    if add(*new, 0) {
        POOLS.fetch_add(1, Ordering::Relaxed);
    } else {
        count(table::HOST_POOL, 1);
    }
}

/// cuMemPoolCreate.
pub(crate) unsafe extern "C" fn pool(new: *mut u64, properties: *const [u32; 8]) -> i32 {
    let real = real!(CreatePool, fn(*mut u64, *const [u32; 8]));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(new, properties) };
    // SAFETY: null, or the beginning of a CUmemPoolProps, which the driver has just read.
    if code == SUCCESS && unsafe { properties.as_ref() }.is_some_and(host::is_host) {
        note_pool(new);
    }
    code
}

/// cuMemGetDefaultMemPool: the pool of a location (CUmemLocation).
pub(crate) unsafe extern "C" fn default_pool(pool: *mut u64, location: *const [u32; 2], kind: i32) -> i32 {
    let real = real!(DefaultPool, fn(*mut u64, *const [u32; 2], i32));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(pool, location, kind) };
    note_pool_of(code, pool, location);
    code
}

/// cuMemGetMemPool: the same.
pub(crate) unsafe extern "C" fn pool_now(pool: *mut u64, location: *const [u32; 2], kind: i32) -> i32 {
    let real = real!(PoolNow, fn(*mut u64, *const [u32; 2], i32));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(pool, location, kind) };
    note_pool_of(code, pool, location);
    code
}

fn note_pool_of(code: i32, pool: *const u64, location: *const [u32; 2]) {
    // SAFETY: null, or what the driver has just read.
    let location = unsafe { location.as_ref() };
    if code == SUCCESS && location.is_some_and(|[kind, _]| host::is_host_location(*kind)) {
        note_pool(pool);
    }
}

/// cuMemPoolDestroy. What was allocated lives on.
pub(crate) unsafe extern "C" fn destroy_pool(pool: u64) -> i32 {
    let real = real!(DestroyPool, fn(u64));
    if find(pool).is_some() {
        POOLS.fetch_sub(1, Ordering::Relaxed);
        if has_nothing(pool) {
            remove(pool);
        } else if let Some((slot, _)) = find(pool) {
            slot.store(0, Ordering::Relaxed);
        }
    }
    // SAFETY: the caller's argument.
    unsafe { real(pool) }
}

fn has_nothing(pool: u64) -> bool {
    let found = POOL_ATTRIBUTE.real();
    if found.is_null() {
        return false;
    }
    // SAFETY: libcuda's function of this name, which has this type (cuda.h of CUDA 13).
    let attribute = unsafe { transmute::<*mut c_void, unsafe extern "C" fn(u64, i32, *mut u64) -> i32>(found) };
    let mut used = 0;
    // SAFETY: the caller's pool, and a live local.
    let code = unsafe { attribute(pool, USED_NOW, &raw mut used) };
    code == SUCCESS && used == 0
}

fn note_allocation(code: i32, pool: u64) {
    if code == SUCCESS
        && POOLS.load(Ordering::Relaxed) != 0
        && let Some((_, kind)) = find(pool)
    {
        let used = table::HOST_POOL as u32 + 1;
        if kind.compare_exchange(0, used, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            count(table::HOST_POOL, 1);
        }
    }
}

/// cuMemAllocFromPoolAsync.
pub(crate) unsafe extern "C" fn allocate(pointer: *mut u64, size: usize, pool: u64, stream: u64) -> i32 {
    let real = real!(AllocateFromPool, fn(*mut u64, usize, u64, u64));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(pointer, size, pool, stream) };
    note_allocation(code, pool);
    code
}

/// cuMemAllocFromPoolAsync_ptsz.
pub(crate) unsafe extern "C" fn allocate_per_thread(pointer: *mut u64, size: usize, pool: u64, stream: u64) -> i32 {
    let real = real!(AllocateFromPoolPerThread, fn(*mut u64, usize, u64, u64));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(pointer, size, pool, stream) };
    note_allocation(code, pool);
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn make(new: *mut u64, _: *const ArrayDescriptor) -> i32 {
        // SAFETY: the tests pass a live local.
        unsafe { *new = 77 };
        SUCCESS
    }

    unsafe extern "C" fn make_pool(new: *mut u64, _: *const [u32; 8]) -> i32 {
        // SAFETY: as above.
        unsafe { *new = 88 };
        SUCCESS
    }

    unsafe extern "C" fn give(_: *mut u64, _: usize, _: u64, _: u64) -> i32 {
        SUCCESS
    }

    unsafe extern "C" fn end(_: u64) -> i32 {
        SUCCESS
    }

    unsafe extern "C" fn used(_: u64, _: i32, bytes: *mut u64) -> i32 {
        // SAFETY: a live local.
        unsafe { *bytes = 0 };
        SUCCESS
    }

    fn counts(table: &table::Table) -> [u32; table::UNRESTORABLE] {
        [0, 1, 2, 3].map(|at: usize| table.unrestorable[at].load(Ordering::Relaxed))
    }

    #[test]
    fn arrays_and_used_pools_of_host_memory_count_until_they_end() {
        let (_guard, table) = sharing::tests::begin();
        for (name, function) in [
            (c"cuArray3DCreate_v2", make as *const ()),
            (c"cuArrayDestroy", end as *const ()),
            (c"cuMemPoolCreate", make_pool as *const ()),
            (c"cuMemPoolDestroy", end as *const ()),
            (c"cuMemAllocFromPoolAsync", give as *const ()),
        ] {
            crate::lookup::instead(name.as_ptr(), function.cast_mut().cast());
        }
        POOL_ATTRIBUTE.set((used as *const ()).cast_mut().cast());
        let before = counts(table);
        let added = |table| {
            let now = counts(table);
            [0, 1, 2, 3].map(|at: usize| now[at] - before[at])
        };
        let mut new = 0;
        for (flags, expected) in [(0, [0; 4]), (SPARSE, [0, 0, 1, 0]), (DEFERRED, [0, 0, 0, 1]), (2, [0; 4])] {
            let descriptor = ArrayDescriptor { size: [8, 8, 0], format: 1, channels: 1, flags };
            // SAFETY: live locals.
            assert_eq!(unsafe { array(&raw mut new, &raw const descriptor) }, SUCCESS);
            assert_eq!((new, added(table)), (77, expected), "{flags}");
            // SAFETY: a number.
            unsafe { destroy_array(new) };
            assert_eq!(added(table), [0; 4]);
        }
        for (properties, is_host) in [([1, 0, 3, 0, 0, 0, 0, 0], true), ([1, 0, 1, 0, 0, 0, 0, 0], false)] {
            // SAFETY: live locals, here and below.
            assert_eq!(unsafe { pool(&raw mut new, &raw const properties) }, SUCCESS);
            assert_eq!(added(table), [0; 4], "nothing is in it");
            for _ in 0..2 {
                // SAFETY: as above.
                unsafe { allocate(&raw mut new, 1, 88, 0) };
                assert_eq!(added(table), [0, u32::from(is_host), 0, 0]);
            }
            // SAFETY: a number.
            unsafe { destroy_pool(88) };
            assert_eq!(added(table), [0; 4]);
        }
    }
}

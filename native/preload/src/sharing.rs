//! Device memory that processes share (`cuMem*` with shareable handles: NCCL over NVLink, PyTorch's symmetric memory),
//! tracked so that it can be released before a checkpoint and mapped again after it, at the same addresses.
//!
//! The driver (580) checkpoints a process that has mapped another process's memory, but cannot restore it. If the
//! imports were unmapped and released first, the restore works, and the address ranges stay reserved. Once exporter and
//! importer are restored, the exporter exports its memory again, and the importer maps it where it was: neither program
//! sees a difference (measured with NCCL 2.28 on two GPUs: 7 ms to release 112 imports, 40 ms to map them again, and
//! the same bandwidth as before). What has to be released is recorded in a table that the supervisor reads
//! ([`crate::table`]); the keeper does the work ([`crate::keeper`]) when the supervisor asks for it.
//!
//! Programs find these functions by `cuGetProcAddress`, by dlsym(3) or by their name; [`crate::lookup`] makes them find
//! ours. Each calls the driver's function and records the result.
//!
//! A program has a number for an import, at first the driver's handle. After it is mapped again the driver has another
//! handle for it. The program's number is then a name, which is translated to the handle. A new handle of the driver
//! may equal such a name; then another handle is requested.
//!
//! Sharing that is not visible here, because a program reached the driver differently or the record failed, is counted
//! by [`crate::rm`]: then the snapshot is refused.

use core::ffi::c_void;
use core::mem::transmute;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

use crate::lock::{Held, Lock};
use crate::lookup::Function;
use crate::rm::Noted;
use crate::{host, keeper, kept, sys};
use rekindle_abi::sharing::{self as table, Export, Import, Mapping, Table, Tag};

/// CUresult: success; a wrong argument; not initialised.
pub(crate) const SUCCESS: i32 = 0;
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NOT_INITIALIZED: i32 = 3;

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: the kind that can be exported again. Fabric handles are for other
/// machines.
pub(crate) const DESCRIPTOR: u32 = 1;

/// How many new handles are requested until one is not in use as a name.
const TRIES: usize = 8;

/// The pause between two checks whether memory is mapped again.
const PAUSE_NS: u64 = 100_000;

static TABLE: AtomicPtr<Table> = AtomicPtr::new(null_mut());
/// The process that it belongs to: a forked child has the pointer, but not the memory.
static OWNER: AtomicI32 = AtomicI32::new(0);
/// Held while the table is being changed.
static CHANGING: Lock = Lock::new();
static NEXT_ID: AtomicU32 = AtomicU32::new(1);
/// Whether an import's handle differs from its name.
pub(crate) static RENAMED: AtomicBool = AtomicBool::new(false);

/// The table of this process, if it has one.
pub(crate) fn table() -> Option<&'static Table> {
    // In this order: whoever sees that it is this process's has its address, and not that of the parent's.
    let is_ours = OWNER.load(Ordering::Acquire) == sys::pid();
    let table = TABLE.load(Ordering::Relaxed);
    // SAFETY: mapped in this process for good, and all of it atomics.
    (is_ours && !table.is_null()).then(|| unsafe { &*table })
}

/// Whether the supervisor has locked CUDA, or is about to.
pub(crate) fn is_locked() -> bool {
    table().is_some_and(|table| table.is_locked.load(Ordering::Relaxed) != 0)
}

/// The table, created if it does not exist. Without memory for it, this process behaves as without the interposer.
pub(crate) fn table_or_new() -> Option<&'static Table> {
    if let Some(table) = table() {
        return Some(table);
    }
    let _changing = wait()?;
    if let Some(table) = table() {
        return Some(table);
    }
    let pid = sys::pid();
    let address = sys::shared_memory(table::NAME, size_of::<Table>()).ok()?;
    let made = with_exposed_provenance_mut::<Table>(address);
    // SAFETY: as large as that, zero, and never unmapped.
    let table = unsafe { &*made };
    table.nonce.store(sys::now() as u32 | 1, Ordering::Relaxed);
    table.socket.store(-1, Ordering::Relaxed);
    table.pid.store(pid, Ordering::Release);
    TABLE.store(made, Ordering::Relaxed);
    OWNER.store(pid, Ordering::Release);
    Some(table)
}

/// The right to change the table, which is only needed for a moment; `None` if a signal handler has interrupted its
/// holder.
pub(crate) fn wait() -> Option<Held<'static>> {
    CHANGING.wait()
}

/// Records an obstacle to a release.
pub(crate) fn obstacle(what: u32) {
    if let Some(table) = table_or_new() {
        table.obstacles.fetch_or(what, Ordering::Relaxed);
    }
}

/// Counts an object of another process.
pub(crate) fn count_foreign(change: i32) {
    if let Some(table) = table_or_new() {
        let count = |foreign: u32| Some(foreign.saturating_add_signed(change));
        let _ = table.foreign.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
    }
}

/// The entries that are or were in use.
pub(crate) fn imports(table: &Table) -> impl Iterator<Item = &Import> {
    table.imports.iter().take(table.imports_used.load(Ordering::Relaxed) as usize)
}

pub(crate) fn mappings(table: &Table) -> impl Iterator<Item = &Mapping> {
    let used = table.mappings_used.load(Ordering::Relaxed) as usize;
    table.mappings.iter().take(used).filter(|mapping| mapping.address.load(Ordering::Relaxed) != 0)
}

pub(crate) fn exports(table: &Table) -> impl Iterator<Item = &Export> {
    table.exports.iter().take(table.exports_used.load(Ordering::Relaxed) as usize)
}

pub(crate) fn import_of<'a>(table: &'a Table, mapping: &Mapping) -> Option<&'a Import> {
    table.imports.get(mapping.import.load(Ordering::Relaxed) as usize)
}

pub(crate) fn is_live(import: &Import) -> bool {
    import.is_live.load(Ordering::Relaxed) != 0
}

/// Whether it is memory that can stay on the GPU.
pub(crate) fn is_kept(import: &Import) -> bool {
    matches!(import.kept.load(Ordering::Relaxed), table::OWN | table::HANDED)
}

/// Whether it is host memory of this process.
pub(crate) fn is_host(import: &Import) -> bool {
    import.kept.load(Ordering::Relaxed) == table::HOST
}

fn has_name(import: &Import, name: u64) -> bool {
    is_live(import) && !is_kept(import) && import.name.load(Ordering::Relaxed) == name
}

/// The import that the program calls by this name. One that is only mapped has no name, until it is retained.
pub(crate) fn named(table: &Table, name: u64) -> Option<(usize, &Import)> {
    let is_it = |import: &Import| has_name(import, name) && import.references.load(Ordering::Relaxed) > 0;
    imports(table).enumerate().find(|(_, import)| is_it(import))
}

/// The driver's handle for a name of the program.
fn handle(name: u64) -> u64 {
    let found = table().and_then(|table| named(table, name)).map(|(_, import)| import.handle.load(Ordering::Relaxed));
    found.unwrap_or(name)
}

/// Whether a new handle equals a name in use.
fn is_taken(handle: u64) -> bool {
    RENAMED.load(Ordering::Relaxed)
        && table().is_some_and(|table| imports(table).any(|import| has_name(import, handle)))
}

fn forget_if_over(import: &Import) {
    if import.references.load(Ordering::Relaxed) == 0 && import.mappings.load(Ordering::Relaxed) == 0 {
        import.is_live.store(0, Ordering::Relaxed);
        host::forget(import);
    }
}

/// A call of the program with memory that can be released, until this is dropped. CUDA's lock blocks such a call inside
/// the driver, with a handle that would be invalid when it continues. So nothing is released while there is one.
pub(crate) struct UnderWay(Option<&'static Table>);

impl UnderWay {
    pub(crate) fn begin() -> UnderWay {
        let table = table();
        if let Some(table) = table {
            table.under_way.fetch_add(1, Ordering::SeqCst);
            // A stopped thread may be lent a moment while memory is released: its handles are invalid until it is mapped again.
            while table.state.load(Ordering::SeqCst) == table::LET_GO {
                table.under_way.fetch_sub(1, Ordering::SeqCst);
                sys::sleep(PAUSE_NS);
                table.under_way.fetch_add(1, Ordering::SeqCst);
            }
        }
        UnderWay(table)
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(table) = self.0 {
            table.under_way.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[macro_export]
macro_rules! real {
    ($function:ident, fn($($argument:ty),*)) => {{
        let real = Function::$function.real();
        if real.is_null() {
            return NOT_INITIALIZED;
        }
        // SAFETY: libcuda's function of this name, which has this type (cuda.h of CUDA 13).
        unsafe { transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> i32>(real) }
    }};
}

/// The driver's functions, for the keeper and for memory that can stay on the GPU.
pub(crate) mod driver {
    use super::*;

    /// Looks all of them up, as long as the program runs: later a thread that is stopped may have the loader's lock.
    pub(crate) fn find() {
        use Function::{Create, Export, Import, Map, Release, Retain, SetAccess, Unmap};
        for function in [Create, Export, Import, Map, Release, Retain, SetAccess, Unmap] {
            function.real();
        }
    }

    /// `properties` is a CUmemAllocationProp.
    pub(crate) fn create(new: &mut u64, size: u64, properties: &[u32; 8]) -> i32 {
        let real = real!(Create, fn(*mut u64, u64, *const u32, u64));
        // SAFETY: live locals.
        unsafe { real(new, size, properties.as_ptr(), 0) }
    }

    /// An export of memory that stays this job's.
    pub(crate) fn export_untagged(descriptor: &mut i32, handle: u64) -> i32 {
        let real = real!(Export, fn(*mut i32, u64, u32, u64));
        // SAFETY: a live local takes the descriptor.
        unsafe { real(descriptor, handle, DESCRIPTOR, 0) }
    }

    pub(crate) fn import(new: &mut u64, descriptor: i32, kind: u32) -> i32 {
        let real = real!(Import, fn(*mut u64, usize, u32));
        let _noted = Noted::begin(None);
        // SAFETY: a descriptor is passed as a pointer with its number.
        unsafe { real(new, descriptor as usize, kind) }
    }

    pub(crate) fn export(descriptor: &mut i32, handle: u64, kind: u32, tag: Tag) -> i32 {
        let real = real!(Export, fn(*mut i32, u64, u32, u64));
        let _noted = Noted::begin(Some(tag));
        // SAFETY: a live local takes the descriptor.
        unsafe { real(descriptor, handle, kind, 0) }
    }

    pub(crate) fn map(address: u64, size: u64, offset: u64, handle: u64, flags: u64) -> i32 {
        let real = real!(Map, fn(u64, u64, u64, u64, u64));
        // SAFETY: numbers.
        unsafe { real(address, size, offset, handle, flags) }
    }

    pub(crate) fn unmap(address: u64, size: u64) -> i32 {
        let real = real!(Unmap, fn(u64, u64));
        // SAFETY: no thread of the program runs that could use it.
        unsafe { real(address, size) }
    }

    pub(crate) fn release(handle: u64) -> i32 {
        let real = real!(Release, fn(u64));
        // SAFETY: a number.
        unsafe { real(handle) }
    }

    pub(crate) fn set_access(address: u64, size: u64, access: &[i32; 3]) -> i32 {
        let real = real!(SetAccess, fn(u64, u64, *const i32, usize));
        // SAFETY: one CUmemAccessDesc.
        unsafe { real(address, size, access.as_ptr(), 1) }
    }

    pub(crate) fn retain(handle: &mut u64, address: u64) -> i32 {
        let real = real!(Retain, fn(*mut u64, u64));
        // SAFETY: a live local takes the handle.
        unsafe { real(handle, address) }
    }
}

/// cuMemImportFromShareableHandle.
pub(crate) unsafe extern "C" fn import(new: *mut u64, shared: usize, kind: u32) -> i32 {
    let real = real!(Import, fn(*mut u64, usize, u32));
    // The call that makes the table is under way, too.
    table_or_new();
    let _under_way = UnderWay::begin();
    // SAFETY: the caller's arguments.
    create_unnamed(new, || unsafe { real(new, shared, kind) }, |handle, tag| note_import(handle, kind, tag))
}

/// Makes the driver create handles until one is not in use as a name, releases the others, and records it.
fn create_unnamed(new: *mut u64, make: impl Fn() -> i32, note: impl Fn(u64, Option<Tag>)) -> i32 {
    let mut refused = [0; TRIES];
    let mut tries = refused.iter_mut();
    let code = loop {
        let noted = Noted::begin(None);
        let code = make();
        if code != SUCCESS || new.is_null() {
            break code;
        }
        // SAFETY: the driver has just written it.
        let handle = unsafe { *new };
        match tries.next() {
            Some(refused) if is_taken(handle) => *refused = handle,
            _ => {
                note(handle, noted.as_ref().and_then(Noted::tag));
                break code;
            }
        }
    };
    for handle in refused.iter().filter(|handle| **handle != 0) {
        driver::release(*handle);
    }
    code
}

fn note_import(name: u64, kind: u32, tag: Option<Tag>) {
    let Some(table) = table_or_new() else { return };
    let Some(_changing) = wait() else { return };
    let Some((at, entry)) = table.imports.iter().enumerate().find(|(_, import)| !is_live(import)) else { return };
    let Tag { pid, id, nonce } = tag.filter(|_| kind == DESCRIPTOR).unwrap_or(Tag { pid: 0, id: 0, nonce: 0 });
    entry.name.store(name, Ordering::Relaxed);
    entry.handle.store(name, Ordering::Relaxed);
    entry.kind.store(kind, Ordering::Relaxed);
    entry.references.store(1, Ordering::Relaxed);
    entry.mappings.store(0, Ordering::Relaxed);
    entry.is_gone.store(0, Ordering::Relaxed);
    entry.pid.store(pid, Ordering::Relaxed);
    entry.id.store(id, Ordering::Relaxed);
    entry.nonce.store(nonce, Ordering::Relaxed);
    entry.kept.store(table::FOREIGN, Ordering::Relaxed);
    entry.is_live.store(1, Ordering::Release);
    table.imports_used.fetch_max(at as u32 + 1, Ordering::Relaxed);
    keeper::start(table);
}

/// cuMemCreate: hooked for host memory, and so that a new handle is not confused with an import.
pub(crate) unsafe extern "C" fn create(new: *mut u64, size: usize, properties: *const [u32; 8], flags: u64) -> i32 {
    let real = real!(Create, fn(*mut u64, usize, *const [u32; 8], u64));
    // SAFETY: null, or a CUmemAllocationProp of the caller.
    let host = unsafe { properties.as_ref() }.copied().filter(host::is_host);
    if host.is_some() {
        table_or_new();
    }
    let _under_way = host.is_some().then(UnderWay::begin);
    let note = |handle, _: Option<Tag>| {
        if let Some(properties) = &host {
            host::note(handle, size as u64, properties);
        }
    };
    // SAFETY: the caller's arguments.
    create_unnamed(new, || unsafe { real(new, size, properties, flags) }, note)
}

/// cuMemExportToShareableHandle.
pub(crate) unsafe extern "C" fn export(shared: usize, name: u64, kind: u32, flags: u64) -> i32 {
    let real = real!(Export, fn(usize, u64, u32, u64));
    table_or_new();
    let _under_way = UnderWay::begin();
    let noted = (kind == DESCRIPTOR).then(|| note_export(name, kind)).flatten();
    let _noted = Noted::begin(noted.map(|(tag, _)| tag));
    // SAFETY: the caller's arguments.
    let code = unsafe { real(shared, handle(name), kind, flags) };
    if code != SUCCESS
        && let Some((_, Some(new))) = noted
        && let Some(_changing) = wait()
    {
        // The driver would refuse it to the keeper, too.
        new.handle.store(0, Ordering::Relaxed);
    }
    if code == SUCCESS
        && let Some(table) = table()
    {
        host::note_export(table, name);
    }
    code
}

/// The tag of this export, and its entry if that is new.
fn note_export(handle: u64, kind: u32) -> Option<(Tag, Option<&'static Export>)> {
    let table = table_or_new()?;
    // Memory of another process cannot be exported again as ours.
    if named(table, handle).is_some() {
        return None;
    }
    let _changing = wait()?;
    let tag = |export: &Export| Tag {
        pid: table.pid.load(Ordering::Relaxed) as u32,
        id: export.id.load(Ordering::Relaxed),
        nonce: table.nonce.load(Ordering::Relaxed),
    };
    if let Some(known) = exports(table).find(|export| export.handle.load(Ordering::Relaxed) == handle) {
        return Some((tag(known), None));
    }
    let free = |(_, export): &(usize, &Export)| export.handle.load(Ordering::Relaxed) == 0;
    let (at, entry) = table.exports.iter().enumerate().find(free)?;
    entry.id.store(NEXT_ID.fetch_add(1, Ordering::Relaxed), Ordering::Relaxed);
    entry.kind.store(kind, Ordering::Relaxed);
    entry.references.store(1, Ordering::Relaxed);
    entry.handle.store(handle, Ordering::Release);
    table.exports_used.fetch_max(at as u32 + 1, Ordering::Relaxed);
    keeper::start(table);
    Some((tag(entry), Some(entry)))
}

/// cuMemMap.
pub(crate) unsafe extern "C" fn map(address: u64, size: u64, offset: u64, name: u64, flags: u64) -> i32 {
    let real = real!(Map, fn(u64, u64, u64, u64, u64));
    let _under_way = UnderWay::begin();
    // SAFETY: the caller's arguments.
    let code = unsafe { real(address, size, offset, handle(name), flags) };
    if code == SUCCESS
        && let Some(table) = table()
        && let Some((at, import)) = named(table, name)
        && note_mapping(table, at, import, [address, size, offset, flags]).is_none()
    {
        // Otherwise it could not be unmapped later.
        obstacle(table::UNTRACKED);
    }
    code
}

fn note_mapping(table: &Table, at: usize, import: &Import, numbers: [u64; 4]) -> Option<()> {
    let _changing = wait()?;
    add_mapping(table, at, import, numbers).map(drop)
}

/// Records a mapping; the caller has the right to change the table.
pub(crate) fn add_mapping<'a>(table: &'a Table, at: usize, import: &Import, numbers: [u64; 4]) -> Option<&'a Mapping> {
    let free = |(_, mapping): &(usize, &Mapping)| mapping.address.load(Ordering::Relaxed) == 0;
    let (place, entry) = table.mappings.iter().enumerate().find(free)?;
    let [address, size, offset, flags] = numbers;
    entry.size.store(size, Ordering::Relaxed);
    entry.offset.store(offset, Ordering::Relaxed);
    entry.flags.store(flags, Ordering::Relaxed);
    entry.import.store(at as u32, Ordering::Relaxed);
    entry.is_gone.store(0, Ordering::Relaxed);
    entry.accesses.store(0, Ordering::Relaxed);
    entry.address.store(address, Ordering::Release);
    import.mappings.fetch_add(1, Ordering::Relaxed);
    table.mappings_used.fetch_max(place as u32 + 1, Ordering::Relaxed);
    Some(entry)
}

/// cuMemUnmap. Recorded before it is done: afterwards the addresses may be reused.
pub(crate) unsafe extern "C" fn unmap(address: u64, size: u64) -> i32 {
    let real = real!(Unmap, fn(u64, u64));
    let _under_way = UnderWay::begin();
    if let Some(table) = table()
        && table.mappings_used.load(Ordering::Relaxed) > 0
    {
        match wait() {
            Some(_changing) => forget_mappings(table, address, size),
            None => obstacle(table::UNTRACKED),
        }
    }
    // SAFETY: the caller's arguments.
    unsafe { real(address, size) }
}

fn forget_mappings(table: &Table, address: u64, size: u64) {
    for mapping in mappings(table).filter(|mapping| is_within(mapping, address, size)) {
        mapping.address.store(0, Ordering::Relaxed);
        if let Some(import) = import_of(table, mapping) {
            import.mappings.fetch_sub(1, Ordering::Relaxed);
            forget_if_over(import);
        }
    }
}

fn is_within(mapping: &Mapping, address: u64, size: u64) -> bool {
    mapping.address.load(Ordering::Relaxed).wrapping_sub(address) < size
}

/// cuMemRelease. Recorded before it is done: afterwards another thread may get the same handle.
pub(crate) unsafe extern "C" fn release(name: u64) -> i32 {
    let real = real!(Release, fn(u64));
    let _under_way = UnderWay::begin();
    let handle = handle(name);
    let is_recorded = table().is_none_or(|table| note_release(table, name).is_some());
    // SAFETY: the caller's argument.
    let code = unsafe { real(handle) };
    if !is_recorded {
        obstacle(table::UNTRACKED);
    }
    code
}

/// None if it could not be recorded. The driver refuses only handles that it does not know, and neither does the table.
fn note_release(table: &Table, name: u64) -> Option<()> {
    let _changing = wait()?;
    if let Some((_, import)) = named(table, name) {
        lower(&import.references);
        forget_if_over(import);
    } else if let Some(export) = exports(table).find(|export| export.handle.load(Ordering::Relaxed) == name)
        && lower(&export.references) == 0
    {
        export.handle.store(0, Ordering::Relaxed);
    }
    Some(())
}

/// Decrements the count, and returns the rest.
fn lower(count: &AtomicU32) -> u32 {
    let left = count.load(Ordering::Relaxed).saturating_sub(1);
    count.store(left, Ordering::Relaxed);
    left
}

/// cuMemRetainAllocationHandle.
pub(crate) unsafe extern "C" fn retain(new: *mut u64, address: u64) -> i32 {
    let real = real!(Retain, fn(*mut u64, u64));
    let _under_way = UnderWay::begin();
    // As for any memory of cuMemAlloc.
    if kept::is_in(address) {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's arguments.
    let code = unsafe { real(new, address) };
    if code == SUCCESS
        && !new.is_null()
        && let Some(table) = table()
        && let Some(_changing) = wait()
    {
        // SAFETY: the driver has just written it.
        let handle = unsafe { *new };
        let is_it = |import: &&Import| is_live(import) && import.handle.load(Ordering::Relaxed) == handle;
        if let Some(import) = imports(table).find(is_it) {
            import.references.fetch_add(1, Ordering::Relaxed);
            // SAFETY: as above.
            unsafe { *new = import.name.load(Ordering::Relaxed) };
        } else if let Some(export) = exports(table).find(|export| export.handle.load(Ordering::Relaxed) == handle) {
            export.references.fetch_add(1, Ordering::Relaxed);
        }
    }
    code
}

/// cuMemSetAccess.
pub(crate) unsafe extern "C" fn set_access(address: u64, size: u64, access: *const [i32; 3], count: usize) -> i32 {
    let real = real!(SetAccess, fn(u64, u64, *const [i32; 3], usize));
    let _under_way = UnderWay::begin();
    // SAFETY: the caller's arguments.
    let code = unsafe { real(address, size, access, count) };
    if code == SUCCESS
        && let Some(table) = table()
        && table.mappings_used.load(Ordering::Relaxed) > 0
        && let Some(_changing) = wait()
    {
        for mapping in mappings(table).filter(|mapping| is_within(mapping, address, size)) {
            for at in 0..count {
                // SAFETY: the driver has just read as many.
                note_access(mapping, unsafe { *access.wrapping_add(at) });
            }
        }
    }
    code
}

pub(crate) fn note_access(mapping: &Mapping, [location_kind, location, flags]: [i32; 3]) {
    let used = mapping.accesses.load(Ordering::Relaxed) as usize;
    let is_it = |entry: &&table::Access| {
        entry.location_kind.load(Ordering::Relaxed) == location_kind as u32
            && entry.location.load(Ordering::Relaxed) == location
    };
    let known = mapping.access.iter().take(used).find(is_it);
    let Some(entry) = known.or_else(|| mapping.access.get(used)) else {
        obstacle(table::UNTRACKED);
        return;
    };
    entry.location_kind.store(location_kind as u32, Ordering::Relaxed);
    entry.location.store(location, Ordering::Relaxed);
    entry.flags.store(flags as u32, Ordering::Relaxed);
    if known.is_none() {
        mapping.accesses.store(used as u32 + 1, Ordering::Relaxed);
    }
}

/// cuMemGetAllocationPropertiesFromHandle.
pub(crate) unsafe extern "C" fn properties(properties: usize, name: u64) -> i32 {
    let real = real!(Properties, fn(usize, u64));
    let _under_way = UnderWay::begin();
    // SAFETY: the caller's arguments.
    unsafe { real(properties, handle(name)) }
}

/// cuMulticastAddDevice, which every user of multicast calls. Memory bound to it cannot be mapped again.
pub(crate) unsafe extern "C" fn multicast(name: u64, device: i32) -> i32 {
    let real = real!(Multicast, fn(u64, i32));
    let _under_way = UnderWay::begin();
    obstacle(table::MULTICAST);
    // SAFETY: the caller's arguments.
    unsafe { real(handle(name), device) }
}

#[cfg(test)]
pub(crate) mod tests;

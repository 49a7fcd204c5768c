//! Makes programs find our functions instead of some of the driver's.
//!
//! The CUDA runtime, NCCL and others open libcuda themselves and ask dlsym(3) for `cuGetProcAddress`, and that for
//! everything else; dlsym with a library ignores preloaded objects. So dlsym is one of our hooks. It acts only on names
//! that begin with `cu`: any other costs one compare and a jump. The jump also leaves the caller's address where libc
//! expects it: RTLD_NEXT counts from there, and RTLD_DEFAULT uses the libraries of the caller.
//!
//! A process can have a second library with these functions: the stubs of the toolkit, or an object that the job preloads
//! and that calls the driver itself. Ours are those of the library that was found first, for as long as it is loaded. The
//! other one's are found as without us: its calls must not end in the first one, nor the first one's in it.

use core::ffi::{CStr, c_char, c_void};
use core::mem::transmute;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::{elf, init, kept, libc, nccl, sharing, unrestorable};

/// The functions of the driver that we replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Function {
    Import,
    Export,
    Create,
    Map,
    Unmap,
    Release,
    Retain,
    SetAccess,
    Properties,
    Multicast,
    Allocate,
    Free,
    FreeAsync,
    FreeAsyncPerThread,
    EnablePeer,
    IpcHandle,
    CreateArray,
    CreateMipmapped,
    DestroyArray,
    DestroyMipmapped,
    CreatePool,
    DefaultPool,
    PoolNow,
    DestroyPool,
    AllocateFromPool,
    AllocateFromPoolPerThread,
    CreateUserObject,
    Init,
    /// Since CUDA 12.0, with a status.
    GetProcAddress,
    /// Before that.
    OldGetProcAddress,
}

struct Entry {
    function: Function,
    /// Its name for dlsym and `cuGetProcAddress`.
    symbol: &'static CStr,
    ours: *const (),
    /// The same as a symbol of this object, which a libcuda finds that does not bind its own symbols.
    exported: *const (),
    real: AtomicPtr<c_void>,
}

// SAFETY: `ours` and `exported` are addresses of functions.
unsafe impl Sync for Entry {}

macro_rules! entry {
    ($function:path, $symbol:ident, $ours:path) => {{
        #[cfg(not(test))]
        let exported = {
            unsafe extern "C" {
                #[link_name = concat!("rekindle_", stringify!($symbol))]
                fn exported();
            }
            exported as *const ()
        };
        #[cfg(test)]
        let exported = core::ptr::null();
        let symbol = match CStr::from_bytes_with_nul(concat!(stringify!($symbol), "\0").as_bytes()) {
            Ok(symbol) => symbol,
            Err(_) => c"",
        };
        Entry { function: $function, symbol, ours: $ours as *const (), exported, real: AtomicPtr::new(null_mut()) }
    }};
}

static FUNCTIONS: [Entry; 30] = [
    entry!(Function::Import, cuMemImportFromShareableHandle, sharing::import),
    entry!(Function::Export, cuMemExportToShareableHandle, sharing::export),
    entry!(Function::Create, cuMemCreate, sharing::create),
    entry!(Function::Map, cuMemMap, sharing::map),
    entry!(Function::Unmap, cuMemUnmap, sharing::unmap),
    entry!(Function::Release, cuMemRelease, sharing::release),
    entry!(Function::Retain, cuMemRetainAllocationHandle, sharing::retain),
    entry!(Function::SetAccess, cuMemSetAccess, sharing::set_access),
    entry!(Function::Properties, cuMemGetAllocationPropertiesFromHandle, sharing::properties),
    entry!(Function::Multicast, cuMulticastAddDevice, sharing::multicast),
    entry!(Function::Allocate, cuMemAlloc_v2, kept::allocate),
    entry!(Function::Free, cuMemFree_v2, kept::free),
    entry!(Function::FreeAsync, cuMemFreeAsync, kept::free_async),
    entry!(Function::FreeAsyncPerThread, cuMemFreeAsync_ptsz, kept::free_async_per_thread),
    entry!(Function::EnablePeer, cuCtxEnablePeerAccess, kept::enable_peer),
    entry!(Function::IpcHandle, cuIpcGetMemHandle, kept::ipc_handle),
    entry!(Function::CreateArray, cuArray3DCreate_v2, unrestorable::array),
    entry!(Function::CreateMipmapped, cuMipmappedArrayCreate, unrestorable::mipmapped),
    entry!(Function::DestroyArray, cuArrayDestroy, unrestorable::destroy_array),
    entry!(Function::DestroyMipmapped, cuMipmappedArrayDestroy, unrestorable::destroy_mipmapped),
    entry!(Function::CreatePool, cuMemPoolCreate, unrestorable::pool),
    entry!(Function::DefaultPool, cuMemGetDefaultMemPool, unrestorable::default_pool),
    entry!(Function::PoolNow, cuMemGetMemPool, unrestorable::pool_now),
    entry!(Function::DestroyPool, cuMemPoolDestroy, unrestorable::destroy_pool),
    entry!(Function::AllocateFromPool, cuMemAllocFromPoolAsync, unrestorable::allocate),
    entry!(Function::AllocateFromPoolPerThread, cuMemAllocFromPoolAsync_ptsz, unrestorable::allocate_per_thread),
    entry!(Function::CreateUserObject, cuUserObjectCreate, create_user_object),
    entry!(Function::Init, cuInit, init::init),
    entry!(Function::GetProcAddress, cuGetProcAddress_v2, get_proc_address),
    entry!(Function::OldGetProcAddress, cuGetProcAddress, old_get_proc_address),
];

impl Function {
    fn entry(self) -> Option<&'static Entry> {
        FUNCTIONS.iter().find(|entry| entry.function == self)
    }

    /// The driver's function; null if there is none.
    pub(crate) fn real(self) -> *mut c_void {
        let Some(entry) = self.entry() else { return null_mut() };
        let known = entry.real.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // Called by its name, by a program that is linked to libcuda; or by such a library that was opened with
        // RTLD_LOCAL, and then RTLD_NEXT does not find libcuda.
        let mut next = libc::next(entry.symbol);
        if next.is_null() || entry.is_ours(next) {
            next = beside_the_others(entry.symbol);
        }
        entry.real.store(next, Ordering::Relaxed);
        next
    }
}

impl Entry {
    fn is_ours(&self, found: *mut c_void) -> bool {
        let found = found.cast_const().cast();
        found == self.ours || found == self.exported
    }
}

/// Whether the string at `name` is this one. Without the libc's strcmp.
pub(crate) fn is_named(name: *const c_char, symbol: &CStr) -> bool {
    let mut at = name.cast::<u8>();
    for byte in symbol.to_bytes_with_nul() {
        // SAFETY: up to here the string has not ended.
        if unsafe { at.read_volatile() } != *byte {
            return false;
        }
        at = at.wrapping_add(1);
    }
    true
}

fn of(symbol: *const c_char) -> Option<&'static Entry> {
    FUNCTIONS.iter().find(|entry| is_named(symbol, entry.symbol))
}

/// Our function for `symbol` if there is one, else `found`, the driver's.
pub(crate) fn instead(symbol: *const c_char, found: *mut c_void) -> *mut c_void {
    let Some(entry) = of(symbol) else { return found };
    if !entry.is_ours(found) {
        let first = entry.real.compare_exchange(null_mut(), found, Ordering::Relaxed, Ordering::Relaxed);
        match first {
            Err(known) if known != found => match compare(entry.symbol, known, found) {
                // cuGetProcAddress may return another address than dlsym.
                Origin::Same => entry.real.store(found, Ordering::Relaxed),
                Origin::Other => return found,
                Origin::Gone => {
                    forget();
                    entry.real.store(found, Ordering::Relaxed);
                }
            },
            _ => {}
        }
    } else if entry.function.real().is_null() {
        // Only this object defines it: without us, nothing would be found.
        return null_mut();
    }
    entry.ours.cast_mut().cast()
}

/// Where a function is, in comparison with the known one of its name.
enum Origin {
    /// In the same library; also if that cannot be told.
    Same,
    /// In another one, while the known one is loaded.
    Other,
    /// The library of the known one is not loaded any more.
    Gone,
}

fn compare(symbol: &CStr, known: *mut c_void, found: *mut c_void) -> Origin {
    let Some(new) = elf::at(found.addr(), |object| Some(object.base())) else { return Origin::Same };
    let defines_it =
        |object: &elf::Object| object.is_libcuda() || object.defined(symbol.to_bytes_with_nul()) == Some(known.addr());
    let old = elf::at(known.addr(), |old| Some((old.base() == new, defines_it(old))));
    match old {
        Some((true, _)) => Origin::Same,
        Some((false, true)) => Origin::Other,
        _ => Origin::Gone,
    }
}

/// Forgets the functions of a library that is not loaded any more.
fn forget() {
    FUNCTIONS.iter().for_each(|entry| entry.real.store(null_mut(), Ordering::Relaxed));
    FORGOTTEN.fetch_add(1, Ordering::Relaxed);
}

/// How often that happened.
static FORGOTTEN: AtomicUsize = AtomicUsize::new(0);

/// The function of this name in the library whose functions are known, or in any libcuda; null if there is none.
fn beside_the_others(symbol: &CStr) -> *mut c_void {
    let name = symbol.to_bytes_with_nul();
    let known = FUNCTIONS.iter().map(|entry| entry.real.load(Ordering::Relaxed)).find(|real| !real.is_null());
    let found = known.and_then(|known| elf::at(known.addr(), |object| object.defined(name)));
    let found = found.or_else(|| elf::function(name, |mapping| mapping.is_libcuda));
    found.map_or(null_mut(), with_exposed_provenance_mut)
}

/// dlsym(3) of a name that begins with `cu` or `nc`, in one library.
pub(crate) unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    let found = libc::dlsym(library, name);
    if found.is_null() {
        return found;
    }
    nccl::instead(name, instead(name, found))
}

/// A function of the driver that we do not replace, looked up at its first use.
pub(crate) struct Plain {
    symbol: &'static CStr,
    found: AtomicPtr<c_void>,
    /// [`FORGOTTEN`] at that time.
    forgotten: AtomicUsize,
}

impl Plain {
    pub(crate) const fn new(symbol: &'static CStr) -> Plain {
        Plain { symbol, found: AtomicPtr::new(null_mut()), forgotten: AtomicUsize::new(0) }
    }

    /// Null if there is none.
    pub(crate) fn real(&self) -> *mut c_void {
        let (known, forgotten) = (self.found.load(Ordering::Acquire), FORGOTTEN.load(Ordering::Relaxed));
        if !known.is_null() && self.forgotten.load(Ordering::Relaxed) == forgotten {
            return known;
        }
        let found = beside_the_others(self.symbol);
        self.forgotten.store(forgotten, Ordering::Relaxed);
        self.found.store(found, Ordering::Release);
        found
    }

    #[cfg(test)]
    pub(crate) fn set(&self, found: *mut c_void) {
        self.forgotten.store(FORGOTTEN.load(Ordering::Relaxed), Ordering::Relaxed);
        self.found.store(found, Ordering::Relaxed);
    }
}

/// Whether a look in all libraries would find our function of this name, and no driver or NCCL.
pub(crate) extern "C" fn is_absent(name: *const c_char) -> bool {
    of(name).is_some_and(|entry| entry.function.real().is_null()) || nccl::is_absent(name)
}

/// cuUserObjectCreate.
unsafe extern "C" fn create_user_object(new: usize, pointer: usize, destroy: usize, count: u32, flags: u32) -> i32 {
    type Real = unsafe extern "C" fn(usize, usize, usize, u32, u32) -> i32;
    let real = Function::CreateUserObject.real();
    if real.is_null() {
        return 3; // CUDA_ERROR_NOT_INITIALIZED
    }
    nccl::note_user_object();
    // SAFETY: libcuda's function of this name.
    let real: Real = unsafe { transmute(real) };
    // SAFETY: the caller's arguments.
    unsafe { real(new, pointer, destroy, count, flags) }
}

/// cuGetProcAddress_v2.
unsafe extern "C" fn get_proc_address(
    name: *const c_char,
    found: *mut *mut c_void,
    version: i32,
    flags: u64,
    status: *mut i32,
) -> i32 {
    type Real = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut i32) -> i32;
    let real = Function::GetProcAddress.real();
    if real.is_null() {
        return 3; // CUDA_ERROR_NOT_INITIALIZED
    }
    // SAFETY: libcuda's function of this name.
    let real: Real = unsafe { transmute(real) };
    // SAFETY: the caller's arguments.
    let code = unsafe { real(name, found, version, flags, status) };
    lead(code, name, found, version, flags);
    code
}

/// cuGetProcAddress of CUDA 11.3.
unsafe extern "C" fn old_get_proc_address(
    name: *const c_char,
    found: *mut *mut c_void,
    version: i32,
    flags: u64,
) -> i32 {
    type Real = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> i32;
    let real = Function::OldGetProcAddress.real();
    if real.is_null() {
        return 3; // CUDA_ERROR_NOT_INITIALIZED
    }
    // SAFETY: libcuda's function of this name.
    let real: Real = unsafe { transmute(real) };
    // SAFETY: the caller's arguments.
    let code = unsafe { real(name, found, version, flags) };
    lead(code, name, found, version, flags);
    code
}

/// CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
const PER_THREAD: u64 = 2;

fn lead(code: i32, name: *const c_char, found: *mut *mut c_void, version: i32, flags: u64) {
    if code != sharing::SUCCESS || name.is_null() || found.is_null() {
        return;
    }
    // SAFETY: on success the driver has written it.
    let found = unsafe { &mut *found };
    if found.is_null() {
        return;
    }
    // The driver has two functions of these names; the requested version selects one.
    let newer = [
        (12_000, c"cuGetProcAddress", c"cuGetProcAddress_v2"),
        (3_020, c"cuMemAlloc", c"cuMemAlloc_v2"),
        (3_020, c"cuMemFree", c"cuMemFree_v2"),
        (3_020, c"cuArray3DCreate", c"cuArray3DCreate_v2"),
    ];
    let symbol = newer.iter().find(|(since, asked, _)| version >= *since && is_named(name, asked));
    let symbol = symbol.map_or(name, |(_, _, symbol)| symbol.as_ptr());
    // The flag selects one of another two.
    let per_thread =
        [(c"cuMemFreeAsync", c"cuMemFreeAsync_ptsz"), (c"cuMemAllocFromPoolAsync", c"cuMemAllocFromPoolAsync_ptsz")];
    let of_thread = per_thread.iter().find(|(asked, _)| flags & PER_THREAD != 0 && is_named(name, asked));
    *found = instead(of_thread.map_or(symbol, |(_, symbol)| symbol.as_ptr()), *found);
}

/// These names as symbols of this object, for programs that are linked to libcuda.
#[cfg(not(test))]
mod symbols {
    use core::arch::naked_asm;

    macro_rules! symbol {
        ($($name:ident = $ours:path;)*) => {
            $(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $name() {
                    naked_asm!(
                        concat!(".globl rekindle_", stringify!($name)),
                        concat!(".hidden rekindle_", stringify!($name)),
                        concat!("rekindle_", stringify!($name), ":"),
                        "jmp {ours}",
                        ours = sym $ours,
                    )
                }
            )*
        };
    }

    use crate::{sharing as s, unrestorable as u};

    symbol! {
        cuMemImportFromShareableHandle = s::import;
        cuMemExportToShareableHandle = s::export;
        cuMemCreate = s::create;
        cuMemMap = s::map;
        cuMemUnmap = s::unmap;
        cuMemRelease = s::release;
        cuMemRetainAllocationHandle = s::retain;
        cuMemSetAccess = s::set_access;
        cuMemGetAllocationPropertiesFromHandle = s::properties;
        cuMulticastAddDevice = s::multicast;
        cuMemAlloc_v2 = crate::kept::allocate;
        cuMemFree_v2 = crate::kept::free;
        cuMemFreeAsync = crate::kept::free_async;
        cuMemFreeAsync_ptsz = crate::kept::free_async_per_thread;
        cuCtxEnablePeerAccess = crate::kept::enable_peer;
        cuIpcGetMemHandle = crate::kept::ipc_handle;
        cuArray3DCreate_v2 = u::array;
        cuMipmappedArrayCreate = u::mipmapped;
        cuArrayDestroy = u::destroy_array;
        cuMipmappedArrayDestroy = u::destroy_mipmapped;
        cuMemPoolCreate = u::pool;
        cuMemGetDefaultMemPool = u::default_pool;
        cuMemGetMemPool = u::pool_now;
        cuMemPoolDestroy = u::destroy_pool;
        cuMemAllocFromPoolAsync = u::allocate;
        cuMemAllocFromPoolAsync_ptsz = u::allocate_per_thread;
        cuUserObjectCreate = super::create_user_object;
        cuInit = crate::init::init;
        cuGetProcAddress_v2 = super::get_proc_address;
        cuGetProcAddress = super::old_get_proc_address;
    }
}

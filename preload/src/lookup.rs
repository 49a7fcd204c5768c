//! How programs find the driver's functions, and how they find ours in the place of some.
//!
//! The CUDA runtime, NCCL and others open libcuda by themselves and ask dlsym(3) for `cuGetProcAddress`, and that for all
//! else; dlsym with a library looks past what is preloaded. So dlsym is one of our hooks. It acts on names that begin with
//! `cu` only: any other costs one compare and a jump, which also leaves the address of the caller where libc looks for
//! it (RTLD_NEXT counts from there).

use core::ffi::{CStr, c_char, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::{libc, sharing};

/// The functions of the driver that have one of ours before them.
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
    /// Since CUDA 12.0, with a status.
    GetProcAddress,
    /// Before that.
    OldGetProcAddress,
}

struct Entry {
    function: Function,
    /// What dlsym knows it by, and `cuGetProcAddress`.
    symbol: &'static CStr,
    ours: *const (),
    real: AtomicPtr<c_void>,
}

// SAFETY: `ours` is the address of a function.
unsafe impl Sync for Entry {}

const fn entry(function: Function, symbol: &'static CStr, ours: *const ()) -> Entry {
    Entry { function, symbol, ours, real: AtomicPtr::new(null_mut()) }
}

static FUNCTIONS: [Entry; 12] = [
    entry(Function::Import, c"cuMemImportFromShareableHandle", sharing::import as *const ()),
    entry(Function::Export, c"cuMemExportToShareableHandle", sharing::export as *const ()),
    entry(Function::Create, c"cuMemCreate", sharing::create as *const ()),
    entry(Function::Map, c"cuMemMap", sharing::map as *const ()),
    entry(Function::Unmap, c"cuMemUnmap", sharing::unmap as *const ()),
    entry(Function::Release, c"cuMemRelease", sharing::release as *const ()),
    entry(Function::Retain, c"cuMemRetainAllocationHandle", sharing::retain as *const ()),
    entry(Function::SetAccess, c"cuMemSetAccess", sharing::set_access as *const ()),
    entry(Function::Properties, c"cuMemGetAllocationPropertiesFromHandle", sharing::properties as *const ()),
    entry(Function::Multicast, c"cuMulticastAddDevice", sharing::multicast as *const ()),
    entry(Function::GetProcAddress, c"cuGetProcAddress_v2", get_proc_address as *const ()),
    entry(Function::OldGetProcAddress, c"cuGetProcAddress", old_get_proc_address as *const ()),
];

impl Function {
    fn entry(self) -> Option<&'static Entry> {
        FUNCTIONS.iter().find(|entry| entry.function == self)
    }

    /// The driver's own; null where there is none.
    pub(crate) fn real(self) -> *mut c_void {
        let Some(entry) = self.entry() else { return null_mut() };
        let known = entry.real.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // Called by its name, by a program that is linked to libcuda.
        let next = libc::next(entry.symbol);
        if next != entry.ours.cast_mut().cast() {
            entry.real.store(next, Ordering::Relaxed);
        }
        entry.real.load(Ordering::Relaxed)
    }
}

/// Whether the string at `name` is this one. Without the libc's strcmp.
fn is_named(name: *const c_char, symbol: &CStr) -> bool {
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

/// In the place of `found`, which the driver has for `symbol`: ours, where there is one.
fn instead(symbol: *const c_char, found: *mut c_void) -> *mut c_void {
    match FUNCTIONS.iter().find(|entry| is_named(symbol, entry.symbol)) {
        Some(entry) if found != entry.ours.cast_mut().cast() => {
            entry.real.store(found, Ordering::Relaxed);
            entry.ours.cast_mut().cast()
        }
        _ => found,
    }
}

/// dlsym(3) of a name that begins with `cu`.
pub(crate) unsafe extern "C" fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    let found = libc::dlsym(library, name);
    if found.is_null() {
        return found;
    }
    instead(name, found)
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
    lead(code, name, found, version);
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
    lead(code, name, found, version);
    code
}

fn lead(code: i32, name: *const c_char, found: *mut *mut c_void, version: i32) {
    if code != sharing::SUCCESS || name.is_null() || found.is_null() {
        return;
    }
    // SAFETY: on success the driver has written it.
    let found = unsafe { &mut *found };
    if found.is_null() {
        return;
    }
    // By this name the driver has two functions, and the version that is asked for decides.
    let is_newer = version >= 12_000 && is_named(name, c"cuGetProcAddress");
    *found = instead(if is_newer { c"cuGetProcAddress_v2".as_ptr() } else { name }, *found);
}

/// Those names as symbols of this object, for programs that are linked to libcuda.
#[cfg(not(test))]
mod symbols {
    use core::arch::naked_asm;

    macro_rules! symbol {
        ($($name:ident = $ours:path;)*) => {
            $(
                #[unsafe(naked)]
                #[unsafe(no_mangle)]
                unsafe extern "C" fn $name() {
                    naked_asm!("jmp {ours}", ours = sym $ours)
                }
            )*
        };
    }

    use crate::sharing as s;

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
        cuGetProcAddress_v2 = super::get_proc_address;
        cuGetProcAddress = super::old_get_proc_address;
    }
}

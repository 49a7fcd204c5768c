//! What CRIU looks for in the object, as its criu-plugin.h has it.

use core::arch::global_asm;
use core::ffi::{c_char, c_void};
use core::mem::transmute;
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::{accept, sys};

/// `cr_plugin_desc_t`, of version 0.2.0. CRIU takes every version up to its own, and as many hooks as it says there are:
/// 4.0 to 4.2 are of this one.
#[repr(C)]
pub struct Descriptor {
    name: *const c_char,
    /// `init` and `exit`, which need not be there.
    life: [*const c_void; 2],
    version: u32,
    max_hooks: u32,
    hooks: [*const c_void; HOOKS],
}

// SAFETY: it points to constants and functions only.
unsafe impl Sync for Descriptor {}

/// A hook of two that get the descriptor of what CRIU does not know as their first argument.
type Hook = extern "C" fn(i32) -> i32;

const NONE: *const c_void = core::ptr::null();
const ACCEPT: *const c_void = accept as Hook as *const c_void;
/// Up to `CR_PLUGIN_HOOK__HANDLE_DEVICE_VMA`, which is 7.
const HOOKS: usize = 8;

/// `DUMP_EXT_FILE` is 2.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Descriptor = Descriptor {
    name: c"rekindle".as_ptr(),
    life: [NONE; 2],
    version: 0x00_02_00,
    max_hooks: 8,
    hooks: [NONE, NONE, ACCEPT, NONE, NONE, NONE, NONE, ACCEPT],
};

/// 0: it is ours. CRIU then asks no other plugin.
extern "C" fn accept(fd: i32) -> i32 {
    /// The answer of a plugin that something is not for.
    const ENOTSUP: i32 = 95;
    let is_named = sys::device(fd).is_some_and(|device| list().is_some_and(|list| accept::names(list, device)));
    if is_named { 0 } else { -ENOTSUP }
}

global_asm!(
    ".weak getenv",
    ".pushsection .data.rekindle_libc, \"aw\", @progbits",
    ".balign 8",
    ".hidden rekindle_getenv",
    ".globl rekindle_getenv",
    "rekindle_getenv: .quad getenv",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "rekindle_getenv"]
    static GETENV: AtomicPtr<c_void>;
}

/// What CRIU's environment names.
fn list() -> Option<&'static [u8]> {
    // SAFETY: a static of this object, at all times.
    let getenv = unsafe { GETENV.load(Ordering::Relaxed) };
    if getenv.is_null() {
        return None;
    }
    // SAFETY: the loader put the address of getenv(3) there.
    let getenv: unsafe extern "C" fn(*const c_char) -> *const c_char = unsafe { transmute(getenv) };
    // SAFETY: a string that ends with NUL. CRIU has one thread, and does not change this variable.
    let value = unsafe { getenv(c"REKINDLE_DEVICES".as_ptr()) };
    if value.is_null() {
        return None;
    }
    let mut length = 0;
    // SAFETY: getenv answers with a string that ends with NUL, and up to there this is within it.
    while unsafe { value.add(length).read() } != 0 {
        length += 1;
    }
    // SAFETY: these bytes stay in the environment.
    Some(unsafe { from_raw_parts(value.cast(), length) })
}

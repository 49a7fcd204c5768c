//! The symbols that CRIU looks for in a plugin, as in its criu-plugin.h.

use core::ffi::{c_char, c_void};

use rekindle_abi::variables;

use crate::{accept, ask, files, sys};

/// `cr_plugin_desc_t` of version 0.2.0. CRIU accepts every version up to its own, and reads as many hooks as the
/// descriptor says: 4.0 to 4.2 use this version.
#[repr(C)]
pub struct Descriptor {
    name: *const c_char,
    /// `init` and `exit`, both optional.
    life: [*const c_void; 2],
    version: u32,
    max_hooks: u32,
    hooks: [*const c_void; HOOKS],
}

// SAFETY: it points to constants and functions only.
unsafe impl Sync for Descriptor {}

/// Hooks whose first argument is a number: a descriptor of something unknown to CRIU, or a pid.
type Hook = extern "C" fn(i32) -> i32;

/// `init` gets the stage that CRIU is in, and returns 0 to continue.
type Begin = extern "C" fn(i32) -> i32;

const BEGIN: *const c_void = begin as Begin as *const c_void;
const NONE: *const c_void = core::ptr::null();
const ACCEPT: *const c_void = accept as Hook as *const c_void;
const ASK: *const c_void = ask as Hook as *const c_void;
/// All hooks up to `CR_PLUGIN_HOOK__RESUME_DEVICES_LATE`, which is 9.
const HOOKS: usize = 10;

/// `DUMP_EXT_FILE` is 2, `HANDLE_DEVICE_VMA` 7, `RESUME_DEVICES_LATE` 9.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Descriptor = Descriptor {
    name: c"rekindle".as_ptr(),
    life: [BEGIN, NONE],
    version: 0x00_02_00,
    max_hooks: 10,
    hooks: [NONE, NONE, ACCEPT, NONE, NONE, NONE, NONE, ACCEPT, NONE, ASK],
};

/// The result if a plugin does not handle something, negated.
const ENOTSUP: i32 = 95;

/// Returns 0 to accept it. Then CRIU asks no other plugin.
extern "C" fn accept(fd: i32) -> i32 {
    let is_named = sys::device(fd)
        .is_some_and(|device| sys::variable(variables::DEVICES).is_some_and(|list| accept::names(list, device)));
    if is_named { 0 } else { -ENOTSUP }
}

/// For each process, by its pid.
extern "C" fn ask(pid: i32) -> i32 {
    ask::process(pid);
    -ENOTSUP
}

extern "C" fn begin(stage: i32) -> i32 {
    if files::begin(stage) { 0 } else { -1 }
}

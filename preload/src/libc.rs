//! What is used of the libc, and what stands in where it has not been found.
//!
//! The symbols are weak and have no version: an object that asks for a version which the job's libc lacks would end the
//! process, and a program without a libc at all (Go makes such) could not start. What copies is libc's `memmove`: it has
//! one version, where `memcpy` has two, the older of which is slow code in new glibcs (2.36: a half of the speed at
//! 16 KiB). The loader puts its address here before anything can call us.

use core::arch::global_asm;
use core::ffi::{CStr, c_char, c_void};
use core::mem::transmute;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::sys::{self, Errno};

global_asm!(
    ".weak memmove",
    ".weak dlvsym",
    ".weak __errno_location",
    ".pushsection .data.rekindle_libc, \"aw\", @progbits",
    ".balign 8",
    ".hidden rekindle_memmove",
    ".hidden rekindle_dlvsym",
    ".hidden rekindle_errno",
    ".globl rekindle_memmove",
    ".globl rekindle_dlvsym",
    ".globl rekindle_errno",
    "rekindle_memmove: .quad memmove",
    "rekindle_dlvsym: .quad dlvsym",
    "rekindle_errno: .quad __errno_location",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "rekindle_memmove"]
    static MEMMOVE: AtomicPtr<c_void>;
    #[link_name = "rekindle_dlvsym"]
    static DLVSYM: AtomicPtr<c_void>;
    #[link_name = "rekindle_errno"]
    static ERRNO: AtomicPtr<c_void>;
}

type Copy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
type Map = unsafe extern "C" fn(usize, usize, i32, i32, i32, isize) -> usize;
type Unmap = unsafe extern "C" fn(usize, usize) -> i32;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
type ErrnoLocation = unsafe extern "C" fn() -> *mut i32;

/// The mmap after ours: the system call, until the constructor has run.
pub(crate) static NEXT_MMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_mmap as Map as *mut c_void);
/// The munmap after ours.
pub(crate) static NEXT_MUNMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_munmap as Unmap as *mut c_void);

/// Finds what other objects, and then libc, have for our hooks. Where it has versions, the oldest is asked for, which every
/// glibc for x86-64 has. An object without versions, such as another preloaded one, fits any.
pub(crate) fn find_next() {
    // SAFETY: a static of this object, at all times.
    let dlvsym = unsafe { DLVSYM.load(Ordering::Relaxed) };
    if dlvsym.is_null() {
        return;
    }
    // SAFETY: what the loader put there is the dlvsym of the libc.
    let dlvsym: Dlvsym = unsafe { transmute(dlvsym) };
    for (slot, name) in [(&NEXT_MMAP, c"mmap"), (&NEXT_MUNMAP, c"munmap")] {
        let next = next_symbol(dlvsym, name, c"GLIBC_2.2.5");
        if !next.is_null() {
            slot.store(next, Ordering::Relaxed);
        }
    }
}

fn next_symbol(dlvsym: Dlvsym, name: &CStr, version: &CStr) -> *mut c_void {
    let rtld_next = null_mut::<c_void>().wrapping_byte_sub(1);
    // SAFETY: two strings that end with NUL. The call is made from this object, which is what RTLD_NEXT counts from.
    unsafe { dlvsym(rtld_next, name.as_ptr(), version.as_ptr()) }
}

/// # Safety
/// As for memcpy(3).
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: a static of this object.
    let memmove = unsafe { MEMMOVE.load(Ordering::Relaxed) };
    if memmove.is_null() {
        // SAFETY: the caller's promise.
        unsafe { sys::copy_bytes(to, from, length) };
        return;
    }
    // SAFETY: what the loader put there is the function of the libc.
    let memmove: Copy = unsafe { transmute(memmove) };
    // SAFETY: the caller's promise.
    unsafe { memmove(to, from, length) };
}

/// mmap(2), with the address or all ones, and errno.
pub(crate) fn map(address: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> usize {
    // SAFETY: it holds the address of an mmap at all times.
    let next: Map = unsafe { transmute(NEXT_MMAP.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(address, length, prot, flags, fd, offset) }
}

/// munmap(2), with errno.
pub(crate) fn unmap(address: usize, length: usize) -> i32 {
    // SAFETY: it holds the address of a munmap at all times.
    let next: Unmap = unsafe { transmute(NEXT_MUNMAP.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(address, length) }
}

unsafe extern "C" fn raw_mmap(a: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> usize {
    match sys::map(a, length, prot, flags, fd, offset) {
        Ok(address) => address,
        Err(errno) => {
            set_errno(errno);
            usize::MAX
        }
    }
}

unsafe extern "C" fn raw_munmap(address: usize, length: usize) -> i32 {
    match sys::unmap(address, length) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

fn set_errno(errno: Errno) {
    // SAFETY: a static of this object.
    let location = unsafe { ERRNO.load(Ordering::Relaxed) };
    if location.is_null() {
        return;
    }
    // SAFETY: what the loader put there is the function of the libc.
    let location: ErrnoLocation = unsafe { transmute(location) };
    // SAFETY: the errno of the calling thread.
    unsafe { *location() = errno.0 };
}

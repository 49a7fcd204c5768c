//! The driver's calls in an object that binds functions when they are first called, with a table that stays writable.
//! Linked by integration/tests/preload.rs; the stand-in libcuda is bound when it is loaded, and its table is read-only
//! then.
#![no_std]

use core::ffi::c_void;
use core::hint::black_box;

unsafe extern "C" {
    fn memcpy(to: *mut c_void, from: *const c_void, length: usize) -> *mut c_void;
    fn mmap(address: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> usize;
    fn munmap(address: usize, length: usize) -> i32;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_map(bytes: usize) -> usize {
    // PRIVATE, ANONYMOUS and POPULATE, for reading and writing. A call and not a jump: the interposer knows the driver
    // by the address that is returned to.
    black_box(unsafe { mmap(0, bytes, 3, 0x8022, -1, 0) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_copy(to: *mut c_void, from: *const c_void, bytes: usize) {
    unsafe { memcpy(to, from, bytes) };
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_unmap(address: usize, bytes: usize) {
    unsafe { munmap(address, bytes) };
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

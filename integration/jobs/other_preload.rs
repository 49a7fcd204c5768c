//! A preloaded object of a job: counts the calls of mmap that it sees, and those of memcpy from 1 MiB on.
#![no_std]

use core::arch::asm;
use core::sync::atomic::{AtomicUsize, Ordering};

#[unsafe(no_mangle)]
pub static other_calls: AtomicUsize = AtomicUsize::new(0);

#[unsafe(no_mangle)]
pub static other_copies: AtomicUsize = AtomicUsize::new(0);

#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // Python makes many small ones of its own.
    if length >= 1 << 20 {
        other_copies.fetch_add(1, Ordering::Relaxed);
    }
    unsafe { asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _) };
    to
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(a: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> isize {
    other_calls.fetch_add(1, Ordering::Relaxed);
    let result: isize;
    unsafe {
        asm!("syscall", inlateout("rax") 9_usize => result, in("rdi") a, in("rsi") length, in("edx") prot,
            in("r10") flags, in("r8") fd, in("r9") offset, lateout("rcx") _, lateout("r11") _);
    }
    if result < 0 && result > -4096 { -1 } else { result }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

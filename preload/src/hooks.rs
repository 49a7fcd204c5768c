//! The exported symbols, and no others: `mmap`, `mmap64` and `munmap`.
//!
//! Naked, for two reasons: what is not for us must cost one compare, and what may be for us needs the address that the
//! call comes from, which is on top of the stack at entry. The slow way of mmap is an ordinary function that gets it as
//! its seventh argument, on the stack.
//!
//! `memcpy` is not among them: programs call it too often for even one compare (0.7 ns of 2 for 64 bytes).
//!
//! Python reaches `mmap64` only, libcuda both. `munmap` is hooked because nothing else tells when the region has ended:
//! its address range can be anybody's memory next, and helpers must not be started for that.

use core::arch::naked_asm;

use crate::{landing, libc};

/// mmap(2) and mmap64(3), which are the same on x86-64.
macro_rules! mmap {
    ($name:ident) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name() {
            naked_asm!(
                "cmp rsi, {large}",
                "jae 2f",
                "jmp qword ptr [rip + {next}]",
                "2:",
                // The caller's address becomes the seventh argument, and the stack is aligned for a call by it.
                "push qword ptr [rsp]",
                "call {slow}",
                "add rsp, 8",
                "ret",
                large = const landing::LARGE,
                next = sym libc::NEXT_MMAP,
                slow = sym landing::large,
            )
        }
    };
}

mmap!(mmap);
mmap!(mmap64);

/// munmap(2).
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn munmap() {
    naked_asm!(
        "cmp rdi, [rip + {region}]",
        "je {slow}",
        "jmp qword ptr [rip + {next}]",
        region = sym landing::START,
        next = sym libc::NEXT_MUNMAP,
        slow = sym landing::unmap,
    )
}

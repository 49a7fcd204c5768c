//! The hooked symbols of the libc: `mmap`, `mmap64`, `munmap`, `ioctl` and `dlsym`. Those of the driver are in
//! [`crate::lookup`].
//!
//! They are naked functions, for two reasons: a call that is not for us must cost only one compare, and a call that may
//! be for us needs its caller's address, which is on top of the stack at entry. The slow path of mmap is an ordinary
//! function that gets this address as its seventh argument, on the stack.
//!
//! `memcpy` is not among them: programs call it too often for even one compare (0.7 ns of 2 for 64 bytes).
//!
//! Python reaches only `mmap64`, libcuda both. `munmap` is hooked because nothing else shows when the region has ended:
//! its address range can then become anybody's memory, and helpers must not be started for that.

use core::arch::naked_asm;

use crate::{landing, libc, lookup, rm};

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

/// ioctl(2). Only requests of type `F` are the driver's.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn ioctl() {
    naked_asm!(
        "mov eax, esi",
        "and eax, 0xff00",
        "cmp eax, {kind}",
        "je {slow}",
        "jmp qword ptr [rip + {next}]",
        kind = const (b'F' as u32) << 8,
        next = sym libc::NEXT_IOCTL,
        slow = sym rm::call,
    )
}

/// dlsym(3). The loader may call it before preparation, when the next one is not known yet.
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn dlsym() {
    naked_asm!(
        "test rsi, rsi",
        "jz 3f",
        // Names that begin with `cu` or `nc`.
        "cmp byte ptr [rsi], {c}",
        "je 5f",
        "cmp byte ptr [rsi], {n}",
        "jne 3f",
        "cmp byte ptr [rsi + 1], {c}",
        "je 6f",
        "jmp 3f",
        "5:",
        "cmp byte ptr [rsi + 1], {u}",
        "jne 3f",
        "6:",
        // With RTLD_NEXT (-1) and RTLD_DEFAULT (0) the address of the caller must stay.
        "cmp rdi, -1",
        "je 3f",
        "test rdi, rdi",
        "jnz {slow}",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "mov rdi, rsi",
        "call {is_absent}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 3f",
        "xor eax, eax",
        "ret",
        "3:",
        "cmp qword ptr [rip + {next}], 0",
        "je 4f",
        "jmp qword ptr [rip + {next}]",
        "4:",
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp qword ptr [rip + {next}]",
        c = const b'c',
        u = const b'u',
        n = const b'n',
        next = sym libc::NEXT_DLSYM,
        slow = sym lookup::dlsym,
        is_absent = sym lookup::is_absent,
        find = sym libc::find_dlsym,
    )
}

//! What the programs of `native/` have in place of a C library: the system call, and the functions that the compiler
//! calls by name. Each program has wrappers of its own for the calls that it makes.
#![allow(unsafe_code, reason = "there is no libc to make the call")]

use core::arch::asm;

/// A positive error number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

/// A system call of x86-64. A negative result is a negated error number.
///
/// # Safety
/// The arguments must fit the system call, and memory that they point to must live until it returns.
#[inline(always)]
pub unsafe fn call(number: usize, arguments: [usize; 6]) -> isize {
    let result: isize;
    let [a, b, c, d, e, f] = arguments;
    // SAFETY: as the caller promises. rcx and r11 are what the instruction itself overwrites.
    unsafe {
        asm!("syscall", inlateout("rax") number => result, in("rdi") a, in("rsi") b, in("rdx") c, in("r10") d,
            in("r8") e, in("r9") f, lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result
}

/// The result of a system call: a number or an address, or an error number.
///
/// # Errors
/// Results from -4095 to -1: addresses of user space are positive.
#[inline(always)]
pub const fn checked(result: isize) -> Result<usize, Errno> {
    #[expect(clippy::cast_possible_truncation, reason = "the range is checked")]
    if result < 0 && result >= -4095 { Err(Errno(-(result as i32))) } else { Ok(result.cast_unsigned()) }
}

/// Sign-extends a number as the kernel's ABI requires.
#[inline(always)]
#[must_use]
pub const fn argument(value: i32) -> usize {
    (value as isize).cast_unsigned()
}

/// The panic handler of a library that cannot panic: a test of the product searches the library for this text, which is
/// only there if something can.
#[macro_export]
macro_rules! never_panics {
    ($mark:literal) => {
        #[cfg(not(test))]
        #[panic_handler]
        fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
            static MARK: &[u8] = $mark;
            loop {
                core::hint::black_box(MARK);
            }
        }
    };
}

/// Functions that the compiler calls by name. They are hidden from other objects, and replace those of libc. Nothing in
/// these programs unwinds; only tables of the core library refer to the personality function.
#[macro_export]
macro_rules! compiler_functions {
    () => {
        #[cfg(not(test))]
        core::arch::global_asm!(
            ".pushsection .text.rekindle_memory, \"ax\", @progbits",
            ".hidden memcpy",
            ".globl memcpy",
            "memcpy: mov rax, rdi",
            "mov rcx, rdx",
            "rep movsb",
            "ret",
            ".hidden memset",
            ".globl memset",
            "memset: mov r8, rdi",
            "mov eax, esi",
            "mov rcx, rdx",
            "rep stosb",
            "mov rax, r8",
            "ret",
            ".hidden rust_eh_personality",
            ".globl rust_eh_personality",
            "rust_eh_personality: ud2",
            ".popsection",
        );
    };
}

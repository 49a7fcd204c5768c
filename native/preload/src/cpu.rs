//! The features of the CPU. Read again for each burst of copies, because a process can be restored on another machine.

use core::arch::asm;
use core::arch::x86_64::__cpuid_count;

/// The widest non-temporal stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum Level {
    /// Supported by every x86-64 CPU.
    Sse2,
    Avx2,
    Avx512,
}

/// The widest that the CPU supports and whose registers the kernel saves.
pub(crate) fn level() -> Level {
    const OSXSAVE: u32 = 1 << 27;
    const AVX2: u32 = 1 << 5;
    const AVX512F: u32 = 1 << 16;
    const YMM: u32 = 0b110;
    const ZMM: u32 = 0b1110_0110;
    if __cpuid_count(0, 0).eax < 7 || __cpuid_count(1, 0).ecx & OSXSAVE == 0 {
        return Level::Sse2;
    }
    let (features, saved) = (__cpuid_count(7, 0).ebx, xcr0());
    if features & AVX512F != 0 && saved & ZMM == ZMM {
        Level::Avx512
    } else if features & AVX2 != 0 && saved & YMM == YMM {
        Level::Avx2
    } else {
        Level::Sse2
    }
}

/// Whether the CPU has CLFLUSHOPT.
pub(crate) fn has_flush() -> bool {
    const CLFLUSHOPT: u32 = 1 << 23;
    __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).ebx & CLFLUSHOPT != 0
}

fn xcr0() -> u32 {
    let low: u32;
    // SAFETY: the caller saw OSXSAVE, without which the instruction is not there.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") _, options(nomem, nostack, preserves_flags)) };
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_agrees_with_the_standard_library() {
        let expected = if std::is_x86_feature_detected!("avx512f") {
            Level::Avx512
        } else if std::is_x86_feature_detected!("avx2") {
            Level::Avx2
        } else {
            Level::Sse2
        };
        assert_eq!(level(), expected);
    }
}

//! A copy with non-temporal stores: the target is not read, and does not evict other data from the caches.
//!
//! Measured on one H200 (driver 580, 16 cores, 16 GiB): eight threads that copy out of the driver's staging buffers
//! take 20 us for 2 MiB, and then the GPU's next write into that buffer takes 66 us, because its lines are in the
//! cores' caches. With CLFLUSHOPT of the source directly after the reads, the copy takes 46 us and the GPU does not
//! wait: 41 to 45 GB/s instead of 23. For copies to the GPU a flush, a prefetch, or plain stores gain nothing.

use core::arch::asm;
use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128, _mm256_loadu_si256, _mm256_stream_si256,
    _mm512_loadu_si512, _mm512_stream_si512,
};

use crate::cpu::Level;
use crate::sys::copy_bytes;

/// How to copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    pub(crate) level: Level,
    /// Flushes the lines of the source from the caches.
    pub(crate) flush_source: bool,
}

impl Way {
    pub(crate) fn to_word(self) -> usize {
        self.level as usize | usize::from(self.flush_source) << 8
    }

    pub(crate) fn from_word(word: usize) -> Way {
        let level = match word & 0xff {
            2 => Level::Avx512,
            1 => Level::Avx2,
            _ => Level::Sse2,
        };
        Way { level, flush_source: word >> 8 != 0 }
    }
}

/// Bytes that are read, written and flushed at a time: four lines, which keeps enough loads in flight.
const STEP: usize = 256;
const LINE: usize = 64;

/// Copies; [`settle`] makes it visible to others.
///
/// # Safety
/// As for memcpy(3); the CPU must have the features of `way`.
pub(crate) unsafe fn copy(way: Way, to: *mut u8, from: *const u8, length: usize) {
    // Wide non-temporal stores need an aligned target. The driver's targets are aligned; others are aligned here.
    let head = to.align_offset(LINE).min(length);
    let body = (length - head) / STEP * STEP;
    let tail = length - head - body;
    // SAFETY: the parts of the caller's buffers, one after the other; the target of `steps` is aligned to a line.
    unsafe {
        copy_bytes(to, from, head);
        steps(way, to.add(head), from.add(head), body);
        copy_bytes(to.add(head + body), from.add(head + body), tail);
    }
}

/// # Safety
/// As for [`copy`]; `to` is aligned to 64 and `length` a multiple of 256.
unsafe fn steps(way: Way, to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match (way.level, way.flush_source) {
            (Level::Avx512, true) => avx512::<true>(to, from, length),
            (Level::Avx512, false) => avx512::<false>(to, from, length),
            (Level::Avx2, true) => avx2::<true>(to, from, length),
            (Level::Avx2, false) => avx2::<false>(to, from, length),
            (Level::Sse2, true) => sse2::<true>(to, from, length),
            (Level::Sse2, false) => sse2::<false>(to, from, length),
        }
    }
}

/// Non-temporal stores are weakly ordered, and flushes are ordered by the same fence: after it both have happened.
pub(crate) fn settle() {
    // SAFETY: every x86-64 has it.
    unsafe { _mm_sfence() };
}

/// Flushes the lines that a step has read. An unaligned source has one more, which the next step flushes.
///
/// # Safety
/// The CPU has CLFLUSHOPT; `from` is readable for [`STEP`] bytes.
#[inline(always)]
unsafe fn flush(from: *const u8) {
    for line in 0..STEP / LINE {
        // SAFETY: changes no memory; the address is in the caller's buffer.
        unsafe { asm!("clflushopt [{}]", in(reg) from.add(line * LINE), options(nostack, preserves_flags)) };
    }
}

macro_rules! streamed {
    ($name:ident, $feature:literal, $vector:ty, $load:ident, $store:ident) => {
        /// # Safety
        /// As for [`steps`]; the CPU has the feature, and CLFLUSHOPT for `FLUSH`.
        #[target_feature(enable = $feature)]
        unsafe fn $name<const FLUSH: bool>(to: *mut u8, from: *const u8, length: usize) {
            const WIDTH: usize = size_of::<$vector>();
            let mut at = 0;
            while at < length {
                // SAFETY: `at` is less than the length, of which STEP is a divisor.
                let (to, from) = unsafe { (to.add(at).cast::<$vector>(), from.add(at)) };
                let mut part = 0;
                while part < STEP / WIDTH {
                    // SAFETY: four loads within this step, from an address of any alignment.
                    let values = unsafe {
                        let from = from.cast::<$vector>().add(part);
                        [$load(from), $load(from.add(1)), $load(from.add(2)), $load(from.add(3))]
                    };
                    // SAFETY: where they go; aligned, as the caller's target is and WIDTH divides a line.
                    unsafe {
                        let to = to.add(part);
                        $store(to, values[0]);
                        $store(to.add(1), values[1]);
                        $store(to.add(2), values[2]);
                        $store(to.add(3), values[3]);
                    }
                    part += 4;
                }
                if FLUSH {
                    // SAFETY: a step of the source.
                    unsafe { flush(from) };
                }
                at += STEP;
            }
        }
    };
}

streamed!(avx512, "avx512f", __m512i, _mm512_loadu_si512, _mm512_stream_si512);
streamed!(avx2, "avx2", __m256i, _mm256_loadu_si256, _mm256_stream_si256);
streamed!(sse2, "sse2", __m128i, _mm_loadu_si128, _mm_stream_si128);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu;

    #[test]
    fn every_way_copies_every_length_at_every_alignment_and_nothing_more() {
        let source: Vec<u8> = (0..3000).map(|at| (at * 7 % 253) as u8).collect();
        let levels = [Level::Sse2, Level::Avx2, Level::Avx512].into_iter().filter(|level| *level <= cpu::level());
        for level in levels {
            for flush_source in [false, true].into_iter().filter(|flush| !flush || cpu::has_flush()) {
                let way = Way { level, flush_source };
                assert_eq!(Way::from_word(way.to_word()), way);
                for length in (0..700).step_by(13).chain([0, 63, 64, 255, 256, 257, 2048]) {
                    for (to_at, from_at) in [(0, 0), (1, 0), (0, 1), (63, 7), (64, 64), (17, 130)] {
                        let mut target = vec![0xee; 3000];
                        let range = to_at..to_at + length;
                        // SAFETY: both are within their vectors.
                        unsafe { copy(way, target.as_mut_ptr().add(to_at), source.as_ptr().add(from_at), length) };
                        settle();
                        assert!(target[range.clone()] == source[from_at..from_at + length], "{way:?} {length} {to_at}");
                        let around = target[..range.start].iter().chain(&target[range.end..]);
                        assert!(around.copied().all(|byte| byte == 0xee), "{way:?} {length} {to_at}");
                    }
                }
            }
        }
    }
}

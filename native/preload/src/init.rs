//! cuInit, with a mark for as long as it takes.
//!
//! The driver's checkpoint accepts a process that is in the middle of cuInit: it answers RUNNING some 2 ms after
//! libcuda was loaded, and cuInit takes 100 to 190 ms more. Restored, that call of the program fails with error 304
//! (CUDA_ERROR_OPERATING_SYSTEM; H200, driver 580). The driver does not tell that it is under way, so this does: a
//! mapping whose name says it ([`rekindle_abi::init`]). It needs no layout and no memory of ours that outlives the
//! call, a process that ends takes it along, and a forked child does not have it. The supervisor finds it in
//! /proc/PID/maps, and CRIU in what it writes.
//!
//! To lock a process that is in cuInit was followed by the same error in the program itself (once, 580). So the supervisor closes
//! a gate before it looks for marks ([`rekindle_abi::init::CLOSED`]), and opens it when CUDA is unlocked: until then a process that
//! has not begun waits before the call. It is in no state of the driver's, and can be dumped like any other.
//!
//! Calls that make a context need no mark: from cuInit on a call holds the driver's lock, and a lock of the process
//! waits for it.

use core::mem::transmute;

use crate::lookup::Function;
use crate::sharing::NOT_INITIALIZED;
use crate::{armed, sys};
use rekindle_abi::init::NAME;

/// A page: the least that can be mapped.
const LENGTH: usize = 4096;

/// A supervisor that died leaves the gate closed only if the job has died with it; this is for what nobody has thought of.
const LONGEST_WAIT_NS: u64 = 120 * 1_000_000_000;
const PAUSE_NS: u64 = 1_000_000;

/// The mark, made while the gate is open: who closes it sees the mark.
fn begin() -> Option<usize> {
    let mut waited = 0;
    loop {
        while armed::is_closed() && waited < LONGEST_WAIT_NS {
            sys::sleep(PAUSE_NS);
            waited += PAUSE_NS;
        }
        let mark = sys::shared_memory(NAME, LENGTH).ok()?;
        if !armed::is_closed() || waited >= LONGEST_WAIT_NS {
            return Some(mark);
        }
        let _ = sys::unmap(mark, LENGTH);
    }
}

/// cuInit. Where the mark cannot be made (no more descriptors, a filter of system calls) the call is as without us.
pub(crate) unsafe extern "C" fn init(flags: u32) -> i32 {
    let real = Function::Init.real();
    if real.is_null() {
        return NOT_INITIALIZED;
    }
    let mark = begin();
    // SAFETY: libcuda's function of this name, which has this type (cuda.h of CUDA 13).
    let real = unsafe { transmute::<*mut core::ffi::c_void, unsafe extern "C" fn(u32) -> i32>(real) };
    // SAFETY: the caller's argument.
    let code = unsafe { real(flags) };
    if let Some(mark) = mark {
        let _ = sys::unmap(mark, LENGTH);
    }
    code
}

//! Calls off what NCCL's kernels wait for, in a process that the supervisor is about to kill.
//!
//! If a rank has died, the kernels of the others wait for it on their GPUs. A process with a running kernel is gone 0.15 s
//! after SIGKILL, but after a checkpoint and restore by the driver it takes 4.2 s, because the driver then waits for the
//! kernel until it gives up (driver 580.159.04, H100, 2026-11-24; also with a kernel of three lines and no NCCL). Until
//! then no restore can begin. The kernels of NCCL end within milliseconds once the abort flag of their communicator is
//! set, and ncclCommAbort sets it first of all. The rest of its work, to tear the communicator down, is put off to the end
//! of a group call (NCCL 2.14 to 2.30): here a group begins and never ends.
//!
//! This is a thread of libc, as the keeper is, and gets no signals. It sleeps from the first communicator on. The
//! supervisor stops all other threads before it wakes this one, and kills the process afterwards: the program never sees
//! the result of an operation that was called off.

use core::ffi::c_void;
use core::mem::transmute;
use core::sync::atomic::{AtomicI32, Ordering};

use super::symbols::{self, Function};
use crate::{libc, sys};
use rekindle_abi::nccl::{self as table, Table};

/// The process with this thread.
static STARTED: AtomicI32 = AtomicI32::new(0);

/// Starts the thread if there is none. A process without it is killed all the same, only more slowly.
pub(super) fn start(table: &'static Table) {
    let pid = sys::pid();
    if STARTED.swap(pid, Ordering::Relaxed) == pid {
        return;
    }
    if !libc::start_thread(main, core::ptr::from_ref(table).cast_mut().cast()) {
        STARTED.store(0, Ordering::Relaxed);
    }
}

unsafe extern "C" fn main(table: *mut c_void) -> *mut c_void {
    sys::name_thread(c"rekindle-abort");
    // SAFETY: what `start` gave: mapped for good.
    let table = unsafe { &*table.cast::<Table>() };
    // Now: later, a thread that is stopped may have the loader's lock.
    let functions = Functions::find();
    table.aborter.store(sys::thread(), Ordering::Release);
    while table.abort.load(Ordering::Acquire) == 0 {
        sys::futex_wait(&table.abort, 0);
    }
    if let Some(functions) = functions {
        call_off(table, &functions);
        table.aborted.store(1, Ordering::Release);
    }
    loop {
        // The group must not end. The program can have written anything there.
        sys::futex_wait(&table.abort, table.abort.load(Ordering::Relaxed));
    }
}

/// NCCL's, of the types that nccl.h gives them.
pub(super) struct Functions {
    pub(super) group_start: unsafe extern "C" fn() -> i32,
    pub(super) abort: unsafe extern "C" fn(u64) -> i32,
}

impl Functions {
    /// Those of the NCCL that is counted.
    pub(super) fn find() -> Option<Functions> {
        let find = |function: Function, symbol| {
            let known = function.real();
            let found = if known.is_null() { symbols::beside_the_others(symbol) } else { known };
            (!found.is_null()).then_some(found)
        };
        let group_start = find(Function::GroupStart, c"ncclGroupStart")?;
        let abort = find(Function::Abort, c"ncclCommAbort")?;
        Some(Functions {
            // SAFETY: libnccl's function of this name.
            group_start: unsafe { transmute::<*mut c_void, unsafe extern "C" fn() -> i32>(group_start) },
            // SAFETY: as above.
            abort: unsafe { transmute::<*mut c_void, unsafe extern "C" fn(u64) -> i32>(abort) },
        })
    }
}

/// Sets the abort flags of all communicators.
pub(super) fn call_off(table: &Table, functions: &Functions) {
    // SAFETY: no arguments.
    if unsafe { (functions.group_start)() } != super::SUCCESS {
        return;
    }
    for entry in &table.communicators {
        if entry.state.load(Ordering::Acquire) == table::LIVE {
            // SAFETY: NCCL made this handle, and the program has not given it back.
            let _ = unsafe { (functions.abort)(entry.handle.load(Ordering::Relaxed)) };
        }
    }
}

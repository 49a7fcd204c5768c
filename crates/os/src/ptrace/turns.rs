//! Lets stopped threads run in turns, if the running thread of their process waits for a lock that one of them has.
//!
//! A thread can be stopped while it has a lock that is unrelated to CUDA, most often glibc's heap lock. The driver's
//! thread, which then runs alone, waits for it for ever (seen on driver 580 with processes that were freeing memory at
//! their exit: 2 of 261 checkpoints; the same futex of libc causes a JAX restore that does not end).
//!
//! So if the running thread waits for a futex and nothing in the process computes, the stopped threads run for a
//! moment, one after the other: first those that were stopped outside a waiting call, because only they can be about to
//! release a lock; later all. They run one at a time and for a millisecond, because a thread that reads memory which
//! the driver has unmapped would die: a fault during its turn is held back, and delivered once the memory is restored.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use procfs_core::FromRead;
use procfs_core::process::Schedstat;

use super::{Alone, go_on, process};

/// How often the running thread is checked. It must be found twice in the same wait.
const LOOK: Duration = Duration::from_millis(10);

/// Duration of the first turns; it doubles with each round.
const TURN: Duration = Duration::from_millis(1);
const LONGEST_TURN: Duration = Duration::from_millis(64);

/// Number of rounds for threads that are not in a waiting call, before all get turns.
const ROUNDS_OF_THE_BUSY: u32 = 4;

/// Watches the running thread `tid` of a stopped process until `over` is closed. After `patience` all threads are
/// resumed.
pub fn lend(pid: i32, tid: i32, patience: Duration, over: &Receiver<()>) {
    let (began, mut round, mut before) = (Instant::now(), 0, None);
    while over.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
        if began.elapsed() > patience {
            tracing::warn!(pid, "the driver's thread has waited for {patience:?}: resuming all threads of the process");
            let _ = go_on(pid);
            return;
        }
        let now = Wait::of(pid, tid);
        if now.is_some() && now == before {
            if round == 0 {
                tracing::debug!(pid, tid, "the driver's thread waits for a stopped one");
            }
            let turn = TURN.saturating_mul(1 << round.min(16)).min(LONGEST_TURN);
            let all = round >= ROUNDS_OF_THE_BUSY;
            round += 1;
            let waiting = now.map(|wait| wait.call);
            before = None;
            for other in process::threads(pid) {
                if other == tid || !(all || is_busy(pid, other)) || process::state(other) != Some('T') {
                    continue;
                }
                let Ok(alone) = Alone::turn(other) else { continue };
                let done = over.recv_timeout(turn) != Err(RecvTimeoutError::Timeout);
                drop(alone);
                if done {
                    return;
                }
                // The running thread got what it waited for.
                if call_of(pid, tid) != waiting {
                    break;
                }
            }
        } else {
            before = now;
        }
    }
}

/// A futex wait, with the processor time of all threads of the process at its start.
#[derive(Debug, PartialEq, Eq)]
struct Wait {
    call: String,
    computed: u64,
}

impl Wait {
    /// `None` if the thread does not wait for a futex.
    fn of(pid: i32, tid: i32) -> Option<Wait> {
        let call = call_of(pid, tid).filter(|call| number(call) == Some(libc::SYS_futex))?;
        let computed = process::threads(pid).into_iter().filter_map(|tid| computed(pid, tid)).sum();
        Some(Wait { call, computed })
    }
}

/// `/proc/PID/task/TID/syscall`: the number and arguments of the system call that the thread waits in, "running", or -1
/// outside of a call (proc(5)).
fn call_of(pid: i32, tid: i32) -> Option<String> {
    process::text(pid, &format!("task/{tid}/syscall")).ok()
}

fn number(call: &str) -> Option<i64> {
    call.split_whitespace().next()?.parse().ok()
}

/// Processor time in nanoseconds. If `schedstat` cannot be read, nothing counts as computing.
fn computed(pid: i32, tid: i32) -> Option<u64> {
    Some(Schedstat::from_file(format!("/proc/{pid}/task/{tid}/schedstat")).ok()?.sum_exec_runtime)
}

/// Whether the thread was not found in a call that waits for somebody else.
fn is_busy(pid: i32, tid: i32) -> bool {
    const WAITING: [i64; 16] = [
        libc::SYS_futex,
        libc::SYS_ppoll,
        libc::SYS_epoll_pwait,
        libc::SYS_pselect6,
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_restart_syscall,
        libc::SYS_read,
        libc::SYS_recvfrom,
        libc::SYS_recvmsg,
        libc::SYS_accept,
        libc::SYS_accept4,
        libc::SYS_wait4,
        libc::SYS_waitid,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_rt_sigsuspend,
    ];
    #[cfg(target_arch = "x86_64")]
    const OLD: [i64; 4] = [libc::SYS_poll, libc::SYS_epoll_wait, libc::SYS_select, libc::SYS_pause];
    #[cfg(not(target_arch = "x86_64"))]
    const OLD: [i64; 0] = [];
    let call = call_of(pid, tid).as_deref().and_then(number);
    call.is_none_or(|call| !WAITING.contains(&call) && !OLD.contains(&call))
}

//! What the image has of what only a thread itself can tell: its signal actions, its timers, its alternate stack.
//!
//! In a restore our plugin asks the threads (`native/plugin/src/ask.rs`). In a dump it must not: a thread that is asked has other
//! registers meanwhile, and if CRIU were killed then, the running job would go on with them. CRIU's own code in a thread does not
//! depend on CRIU's life, so what it has found is taken from the image, in the plugin's words.

use std::fmt::Write;

use prost::Message;

use super::devices::{MM, images};
use super::{Error, Records, damaged};
use crate::proto::PosixTimerEntry;
use rekindle_os::beneath::Beneath;

const CORE: u32 = 0x5505_3847;

/// The used fields of `core_entry`.
#[derive(Clone, PartialEq, Message)]
struct Core {
    #[prost(message, optional, tag = "2")]
    info: Option<Info>,
    /// Of the first thread of a process only.
    #[prost(message, optional, tag = "3")]
    task: Option<Task>,
    #[prost(message, optional, tag = "5")]
    thread: Option<Thread>,
}

/// `thread_info_x86`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Info {
    #[prost(uint64, required, tag = "1")]
    clear_at_end: u64,
}

/// `task_core_entry`.
#[derive(Clone, PartialEq, Message)]
struct Task {
    #[prost(message, optional, tag = "7")]
    timers: Option<Timers>,
    /// Of all signals in order, without SIGKILL and SIGSTOP.
    #[prost(message, repeated, tag = "15")]
    actions: Vec<Action>,
    #[prost(bool, optional, tag = "18")]
    subreaper: Option<bool>,
    #[prost(uint32, optional, tag = "22")]
    barriers: Option<u32>,
}

/// `task_timers_entry`.
#[derive(Clone, PartialEq, Message)]
struct Timers {
    #[prost(message, required, tag = "1")]
    real: Interval,
    #[prost(message, required, tag = "2")]
    of_user_time: Interval,
    #[prost(message, required, tag = "3")]
    of_cpu_time: Interval,
    #[prost(message, repeated, tag = "4")]
    posix: Vec<PosixTimerEntry>,
}

/// `itimer_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Interval {
    #[prost(uint64, required, tag = "1")]
    interval_s: u64,
    #[prost(uint64, required, tag = "2")]
    interval_us: u64,
    #[prost(uint64, required, tag = "3")]
    left_s: u64,
    #[prost(uint64, required, tag = "4")]
    left_us: u64,
}

/// `sa_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Action {
    #[prost(uint64, required, tag = "1")]
    handler: u64,
    #[prost(uint64, required, tag = "2")]
    flags: u64,
    #[prost(uint64, required, tag = "3")]
    restorer: u64,
    #[prost(uint64, required, tag = "4")]
    mask: u64,
}

/// `thread_core_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Thread {
    #[prost(message, optional, tag = "7")]
    stack: Option<Stack>,
    #[prost(uint32, optional, tag = "8")]
    parent_death: Option<u32>,
    #[prost(message, optional, tag = "10")]
    credentials: Option<crate::proto::CredsEntry>,
    #[prost(message, optional, tag = "15")]
    rseq: Option<Rseq>,
}

/// `thread_sas_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Stack {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    #[prost(uint64, required, tag = "2")]
    size: u64,
    #[prost(uint32, required, tag = "3")]
    flags: u32,
}

/// `rseq_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Rseq {
    #[prost(uint64, required, tag = "1")]
    address: u64,
    #[prost(uint32, required, tag = "2")]
    size: u32,
    #[prost(uint32, required, tag = "3")]
    signature: u32,
}

/// `mm_entry`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Mm {
    #[prost(int32, optional, tag = "15")]
    dumpable: Option<i32>,
}

/// What the threads would answer, in the format of `native/plugin/src/ask.rs`.
///
/// # Errors
/// When an image file is damaged.
pub fn told(dir: &Beneath) -> Result<String, Error> {
    let mut text = String::new();
    for (name, path) in images(dir, "core-")? {
        let id: i32 = name.parse().map_err(|_| damaged(&path, "its name is not core-ID.img"))?;
        let Some(core) = Records::open(path, CORE)?.next()? else { continue };
        let core: Core = core;
        let Some(thread) = core.thread else { continue };
        of_thread(&mut text, id, core.info, &thread);
        if let Some(task) = core.task.filter(|task| !task.actions.is_empty()) {
            of_process(&mut text, &task);
            let mm = dir.join(format!("mm-{id}.img"));
            let mm: Option<Mm> = if mm.is_there() { Records::open(mm, MM)?.next()? } else { None };
            line(&mut text, "dumpable", mm.and_then(|mm| mm.dumpable));
            line(&mut text, "secure-bits", thread.credentials.map(|credentials| credentials.securebits));
        }
    }
    Ok(text)
}

fn line(text: &mut String, name: &str, value: Option<impl std::fmt::Display>) {
    if let Some(value) = value {
        let _ = writeln!(text, "{name} {value}");
    }
}

fn of_thread(text: &mut String, id: i32, info: Option<Info>, thread: &Thread) {
    line(text, "thread", Some(id));
    let stack = thread.stack.map(|Stack { address, size, flags }| format!("{address:x} {flags:x} {size:x}"));
    line(text, "alternate-stack", stack);
    line(text, "parent-death-signal", Some(thread.parent_death.unwrap_or_default()));
    line(text, "clear-at-end", info.map(|info| format!("{:x}", info.clear_at_end)));
    let rseq = thread.rseq.filter(|rseq| rseq.address != 0);
    line(text, "rseq", rseq.map(|Rseq { address, size, signature }| format!("{address:x} {size:x} {signature:x}")));
}

fn of_process(text: &mut String, task: &Task) {
    /// SIG_DFL and SIG_IGN.
    const NO_HANDLER: u64 = 1;
    const CHILD: i32 = 17;
    let signals = (1..).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP].contains(signal));
    for (signal, Action { handler, flags, restorer, mask }) in signals.zip(&task.actions) {
        if *handler > NO_HANDLER || signal == CHILD {
            let _ = writeln!(text, "signal {signal:x} {handler:x} {flags:x} {restorer:x} {mask:x}");
        }
    }
    if let Some(timers) = &task.timers {
        for (which, timer) in [timers.real, timers.of_user_time, timers.of_cpu_time].into_iter().enumerate() {
            let sum = |seconds: u64, us: u64| seconds.saturating_mul(1_000_000).saturating_add(us);
            if timer != Interval::default() {
                let interval = sum(timer.interval_s, timer.interval_us);
                let _ = writeln!(text, "interval-timer {which} {interval} {}", sum(timer.left_s, timer.left_us));
            }
        }
        for timer in &timers.posix {
            let sum = |seconds: u64, ns: u64| seconds.saturating_mul(1_000_000_000).saturating_add(ns);
            let interval = sum(timer.interval_s, timer.interval_ns);
            let _ = writeln!(text, "timer {} {interval} {}", timer.id, sum(timer.value_s, timer.value_ns));
        }
    }
    line(text, "child-subreaper", Some(u8::from(task.subreaper.unwrap_or_default())));
    let barriers = task.barriers.filter(|barriers| *barriers != 0);
    line(text, "memory-barriers", barriers.map(|barriers| format!("{barriers:x}")));
}

#[cfg(test)]
mod tests {
    use super::super::tests::{beneath, write};
    use super::*;

    #[test]
    fn an_image_says_what_the_threads_would() {
        let dir = tempfile::tempdir().unwrap();
        let action = |handler| Action { handler, flags: 0x1400_0004, restorer: 0x7f, mask: 1 };
        let of_main = Core {
            info: Some(Info { clear_at_end: 0x70 }),
            task: Some(Task {
                timers: Some(Timers {
                    real: Interval { left_s: 5, ..Interval::default() },
                    posix: vec![PosixTimerEntry { id: 3, value_s: 7, ..PosixTimerEntry::default() }],
                    ..Timers::default()
                }),
                actions: (0..62).map(|index| action(if index == 8 || index == 17 { 0x55 } else { 1 })).collect(),
                subreaper: Some(true),
                barriers: Some(0x18),
            }),
            thread: Some(Thread {
                stack: Some(Stack { address: 0x7f00, size: 0x2000, flags: 2 }),
                parent_death: Some(9),
                ..Thread::default()
            }),
        };
        let other = Core { thread: Some(Thread::default()), ..Core::default() };
        write(&dir.path().join("core-12.img"), CORE, &[of_main.encode_to_vec()]);
        write(&dir.path().join("core-13.img"), CORE, &[other.encode_to_vec()]);
        write(&dir.path().join("mm-12.img"), MM, &[Mm { dumpable: Some(1) }.encode_to_vec()]);
        let text = told(&beneath(dir.path())).unwrap();
        // The ninth action is that of SIGUSR1, the eighteenth that of SIGTSTP: SIGKILL and SIGSTOP have none.
        let wanted = "thread 12\nalternate-stack 7f00 2 2000\nparent-death-signal 9\nclear-at-end 70\nsignal a 55 14000004 7f 1\n\
            signal 11 1 14000004 7f 1\nsignal 14 55 14000004 7f 1\ninterval-timer 0 0 5000000\ntimer 3 0 7000000000\n\
            child-subreaper 1\nmemory-barriers 18\ndumpable 1\n";
        assert!(text.contains(wanted), "{text}");
        assert!(text.contains("thread 13\nparent-death-signal 0\n"), "{text}");
    }
}

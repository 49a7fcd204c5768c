//! A thread: what it has of its own.

use std::io::Read;

use rekindle_os::attributes;
use rekindle_os::scheduling::Attributes;

use super::{field, innermost, pending, text};
use crate::policy;
use crate::record::{self, Items};

/// What was read.
#[derive(Debug)]
pub(super) struct Raw {
    /// As we see it.
    pub(super) tid: i32,
    pub(super) status: String,
    call: Option<String>,
    slack: Option<String>,
    personality: Option<String>,
    memory_policy: Option<String>,
    scheduling: Option<Attributes>,
    io_priority: Option<u16>,
    robust_list: Option<usize>,
}

impl Raw {
    pub(super) fn read(pid: i32, tid: i32) -> Raw {
        // Any thread has a folder there, although they are not listed (proc(5)).
        let file = |name: &str| text(&format!("/proc/{tid}/{name}"));
        Raw {
            tid,
            status: text(&format!("/proc/{pid}/task/{tid}/status")).unwrap_or_default(),
            call: file("syscall"),
            slack: file("timerslack_ns"),
            personality: file("personality"),
            memory_policy: memory_policy(tid),
            scheduling: Attributes::of(tid).ok(),
            io_priority: attributes::io_priority(tid).ok(),
            robust_list: attributes::robust_list(tid).ok(),
        }
    }

    pub(super) fn inner(&self) -> Option<i32> {
        innermost(&self.status, "NSpid")
    }

    pub(super) fn name(&self) -> String {
        field(&self.status, "Name").unwrap_or_default().to_owned()
    }

    pub(super) fn record(self) -> Option<record::Thread> {
        let tid = self.inner()?;
        let status = &self.status;
        if field(status, "State").is_some_and(|state| state.starts_with(['Z', 'X'])) {
            return None;
        }
        let mut items = Items::new();
        let mut put = |item: &str, value: Option<String>| {
            if let Some(value) = value {
                items.insert(item.to_owned(), value);
            }
        };
        let all = |names: &[&str]| {
            let values: Vec<String> = names.iter().filter_map(|name| field(status, name)).map(words).collect();
            (!values.is_empty()).then(|| values.join(" "))
        };
        put("name", Some(self.name()));
        put("users", all(&["Uid"]));
        put("groups", all(&["Gid"]));
        put("more-groups", all(&["Groups"]));
        put("capabilities", all(&["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"]));
        put("no-new-privileges", all(&["NoNewPrivs"]));
        put("seccomp", all(&["Seccomp", "Seccomp_filters"]));
        put("huge-pages", all(&["THP_enabled"]));
        if !self.call.as_deref().is_some_and(has_another_mask) {
            put("blocked-signals", all(&["SigBlk"]));
        }
        put("pending-signals", field(status, "SigPnd").map(pending));
        put("timer-slack", self.slack.map(|text| text.trim().to_owned()));
        put("personality", self.personality.map(|text| text.trim().to_owned()));
        put("memory-policy", self.memory_policy);
        put("io-priority", self.io_priority.map(io_priority));
        put("scheduling", self.scheduling.map(scheduling));
        put("robust-list", self.robust_list.map(|head| format!("{head:#x}")));
        Some(record::Thread { tid, items })
    }
}

/// A thread's memory policy. The kernel shows it at each range of memory that has none of its own (mbind(2)), as the first,
/// which is of the program, hardly ever has. More is not read: for each range the kernel looks at all of its pages.
fn memory_policy(tid: i32) -> Option<String> {
    /// Not longer than a line: the kernel goes on as long as there is room.
    const READ: usize = 64;
    let mut bytes = [0; READ];
    let length = std::fs::File::open(format!("/proc/{tid}/numa_maps")).ok()?.read(&mut bytes).ok()?;
    let text = std::str::from_utf8(bytes.get(..length)?).ok()?;
    policy::policy_of(text).map(ToOwned::to_owned)
}

/// Whether a thread is in a system call that changes which signals it blocks until it returns. The kernel shows the mask of the
/// call, and CRIU saves that of the thread. The call begins again in a restored job.
fn has_another_mask(call: &str) -> bool {
    let calls =
        [libc::SYS_rt_sigsuspend, libc::SYS_ppoll, libc::SYS_pselect6, libc::SYS_epoll_pwait, libc::SYS_epoll_pwait2];
    call.split_whitespace().next().and_then(|number| number.parse().ok()).is_some_and(|number| calls.contains(&number))
}

fn words(value: &str) -> String {
    value.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Class and level (linux/ioprio.h): `best-effort 4`. The level has 13 bits.
fn io_priority(value: u16) -> String {
    let class = match value >> 13 {
        0 => "none",
        1 => "real-time",
        2 => "best-effort",
        3 => "idle",
        _ => "unknown",
    };
    format!("{class} {}", value & 0x1fff)
}

fn scheduling(Attributes { policy, flags, nice, priority, .. }: Attributes) -> String {
    let policy = match i32::try_from(policy) {
        Ok(libc::SCHED_OTHER) => "other".to_owned(),
        Ok(libc::SCHED_FIFO) => "fifo".to_owned(),
        Ok(libc::SCHED_RR) => "rr".to_owned(),
        Ok(libc::SCHED_BATCH) => "batch".to_owned(),
        Ok(libc::SCHED_IDLE) => "idle".to_owned(),
        Ok(libc::SCHED_DEADLINE) => "deadline".to_owned(),
        _ => policy.to_string(),
    };
    format!("{policy} priority {priority} nice {nice} flags {flags:#x}")
}

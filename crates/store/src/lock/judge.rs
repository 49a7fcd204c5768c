//! A pure function: is the holder named in a lock file alive, although the kernel gave us the lock?

use std::time::{Duration, SystemTime};

use super::{Holder, STALE};

/// What is known beside the name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    /// Who asks.
    pub(super) me: &'a Holder,
    /// Whether a process of our PID namespace lives.
    pub(super) lives: fn(&Holder) -> bool,
    /// When this machine was booted, by its own clock.
    pub(super) booted: Option<SystemTime>,
    /// The last heartbeat.
    pub(super) heartbeat: SystemTime,
    /// Now, by the same clock.
    pub(super) now: SystemTime,
}

impl<'a> Facts<'a> {
    pub(super) fn now(me: &'a Holder, heartbeat: SystemTime, now: SystemTime) -> Facts<'a> {
        Facts { me, lives: Holder::lives, booted: booted(), heartbeat, now }
    }
}

/// What became of a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// For certain.
    Dead,
    /// It has said nothing for so long that it counts as dead.
    Silent(Duration),
    /// It may be at work.
    Alive {
        /// How long it has said nothing.
        silent: Duration,
    },
}

pub(super) fn judge(holder: &Holder, facts: &Facts<'_>) -> Verdict {
    let me = facts.me;
    // An earlier version has no heartbeat to judge by; the kernel's word is all there is.
    if holder.started.is_none() {
        return Verdict::Dead;
    }
    // A clock that was set back makes a heartbeat in the future: nothing says that it is old.
    let silent = facts.now.duration_since(facts.heartbeat).unwrap_or_default();
    if holder.boot_id == me.boot_id {
        // A lock that this process had before was released. For a process in another PID namespace (a container that was
        // started again) only the kernel knows; it is the same kernel, and says that the process is gone.
        let is_me = (holder.pid, holder.started) == (me.pid, me.started);
        let lives = holder.pid_namespace == me.pid_namespace && !is_me && (facts.lives)(holder);
        return if lives { Verdict::Alive { silent } } else { Verdict::Dead };
    }
    // A machine of our name: ours before its last boot, unless the heartbeat came after that (containers of one name on two
    // machines).
    let before_boot = facts.booted.is_some_and(|booted| facts.heartbeat < booted);
    if holder.host == me.host && before_boot {
        return Verdict::Dead;
    }
    if silent >= STALE { Verdict::Silent(silent) } else { Verdict::Alive { silent } }
}

fn booted() -> Option<SystemTime> {
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = uptime.split_whitespace().next()?.parse().ok()?;
    SystemTime::now().checked_sub(Duration::try_from_secs_f64(seconds).ok()?)
}

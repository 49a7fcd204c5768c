//! A pure function: is the holder named in a lock file alive, although the kernel gave us the lock?

use std::time::{Duration, SystemTime};

use super::{Holder, STALE};

/// Facts besides the name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts<'a> {
    /// The present process.
    pub(super) me: &'a Holder,
    /// Tells whether a process of our PID namespace is alive.
    pub(super) lives: fn(&Holder) -> bool,
    /// When this machine was booted, by the same clock.
    pub(super) booted: Option<SystemTime>,
    /// The last heartbeat.
    pub(super) heartbeat: SystemTime,
    /// Now, by the clock of the heartbeat.
    pub(super) now: SystemTime,
}

impl<'a> Facts<'a> {
    pub(super) fn now(me: &'a Holder, heartbeat: SystemTime, now: SystemTime) -> Facts<'a> {
        // By that clock, too: the clock of this machine may be wrong.
        let booted = rekindle_os::clock::uptime().and_then(|uptime| now.checked_sub(uptime));
        Facts { me, lives: Holder::lives, booted, heartbeat, now }
    }
}

/// The judgement on a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Certainly dead.
    Dead,
    /// It counts as dead, because the last heartbeat is this old.
    Silent(Duration),
    /// It may be alive.
    Alive {
        /// The time since its last heartbeat.
        silent: Duration,
    },
}

pub(super) fn judge(holder: &Holder, facts: &Facts<'_>) -> Verdict {
    let me = facts.me;
    // An earlier version has no heartbeat, so the kernel's answer must do.
    if holder.started.is_none() {
        return Verdict::Dead;
    }
    // If the clock was set back, the heartbeat is in the future, and counts as new.
    let silent = facts.now.duration_since(facts.heartbeat).unwrap_or_default();
    if holder.boot_id == me.boot_id {
        // If this process held the lock before, it has released it. For a process in another PID namespace (a restarted
        // container) only the kernel knows; it is the same kernel, and says that the process is gone.
        let is_me = (holder.pid, holder.started) == (me.pid, me.started);
        let lives = holder.pid_namespace == me.pid_namespace && !is_me && (facts.lives)(holder);
        return if lives { Verdict::Alive { silent } } else { Verdict::Dead };
    }
    // A machine with our name: it is ours before its last boot, unless the heartbeat came after that (containers with
    // the same name on two machines).
    let before_boot = facts.booted.is_some_and(|booted| facts.heartbeat < booted);
    if holder.host == me.host && before_boot {
        return Verdict::Dead;
    }
    if silent >= STALE { Verdict::Silent(silent) } else { Verdict::Alive { silent } }
}

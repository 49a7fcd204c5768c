//! Timers that are descriptors (timerfd_create(2)) and run.
//!
//! CRIU (4.2) saves the time that they have left. At a restore it adds the seconds of the present time to that of a timer with an
//! absolute time, which so fires up to a second early; a time of day is due later by all the time since the image; and what a
//! periodic timer has missed is not counted. So we note when each is due, and set it to that before the job runs.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;

use rekindle_os::process;
use rekindle_os::timerfd::{ABSOLUTE, Counts, Running, has_own_clocks};
use rekindle_store::Manifest;
use rekindle_store::manifest::Timer;

/// The running timers among these, which are given as a process (as it sees itself) and its descriptor. The processes are
/// stopped. One that cannot be read is restored as CRIU does it.
pub(crate) fn capture(places: &[(i32, i32)], tree: &[i32]) -> Vec<Timer> {
    if places.is_empty() {
        return Vec::new();
    }
    let outer: BTreeMap<i32, i32> = tree.iter().filter_map(|pid| Some((process::inner_pid(*pid)?, *pid))).collect();
    let mut found = Vec::new();
    // Those of a process follow each other.
    for of_one in places.chunk_by(|(one, _), (other, _)| one == other) {
        let Some((pid, outer)) = of_one.first().and_then(|(pid, _)| Some((*pid, *outer.get(pid)?))) else { continue };
        let owner = match Owner::open(outer) {
            Ok(owner) => owner,
            Err(error) => {
                tracing::debug!(pid, "cannot read the timers of a process: {error}");
                continue;
            }
        };
        for (pid, fd) in of_one {
            match owner.timer(*pid, *fd) {
                Ok(timer) => found.extend(timer),
                Err(error) => tracing::debug!(pid, fd, "cannot read a timer: {error}"),
            }
        }
    }
    found
}

/// A process with timers.
struct Owner {
    outer: i32,
    pidfd: OwnedFd,
    /// How much more its CLOCK_MONOTONIC and CLOCK_BOOTTIME show than ours, in nanoseconds.
    awake: i64,
    boot: i64,
    has_own_clocks: bool,
}

impl Owner {
    fn open(outer: i32) -> io::Result<Owner> {
        let pidfd = process::open_pidfd(outer)?;
        let (awake, boot) = (Counts::Awake.ahead(outer)?, Counts::Boot.ahead(outer)?);
        Ok(Owner { outer, pidfd, awake, boot, has_own_clocks: has_own_clocks(outer) })
    }

    fn ahead(&self, counts: Counts) -> i64 {
        match counts {
            Counts::Day => 0,
            Counts::Awake => self.awake,
            Counts::Boot => self.boot,
        }
    }

    fn timer(&self, pid: i32, fd: i32) -> io::Result<Option<Timer>> {
        let timer = process::fetch_descriptor(&self.pidfd, fd)?;
        let Some(Running { clock, flags, due, left, interval, ticks }) = Running::of(self.outer, fd, &timer)? else {
            return Ok(None);
        };
        let Some(counts) = Counts::of(clock, flags) else { return Ok(None) };
        let due_ns = due.saturating_add(self.ahead(counts));
        Ok(Some(Timer { pid, fd, clock, flags, due_ns, left_ns: left, interval_ns: interval, ticks }))
    }

    fn set(&self, timer: &Timer) -> io::Result<()> {
        let Some(counts) = Counts::of(timer.clock, timer.flags) else { return Ok(()) };
        let fd = process::fetch_descriptor(&self.pidfd, timer.fd)?;
        let clock = Clock { counts, now: counts.now(), ahead: self.ahead(counts), goes_on: self.has_own_clocks };
        clock.running(timer).set(&fd)
    }
}

/// Sets them again, before the job runs. A failure does not prevent the job from running, and is reported.
pub(crate) fn put_back(root: i32, manifest: &Manifest) {
    if manifest.timers.is_empty() {
        return;
    }
    let tree: BTreeMap<i32, i32> =
        process::tree(root).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
    for of_one in manifest.timers.chunk_by(|one, other| one.pid == other.pid) {
        let pid = of_one.first().map_or(0, |timer| timer.pid);
        let none = || io::Error::other("the process is not there");
        let owner = tree.get(&pid).ok_or_else(none).and_then(|outer| Owner::open(*outer));
        let set = |timer| owner.as_ref().map_err(|error| io::Error::other(error.to_string()))?.set(timer);
        let failed: Vec<(i32, io::Error)> =
            of_one.iter().filter_map(|timer| Some((timer.fd, set(timer).err()?))).collect();
        if let Some((_, error)) = failed.first() {
            let numbers: Vec<i32> = failed.iter().map(|(fd, _)| *fd).collect();
            tracing::warn!("timers {numbers:?} of process {pid} may fire too early or too late: {error}");
        }
    }
}

/// A clock of a restored process.
struct Clock {
    counts: Counts,
    /// Ours, in nanoseconds.
    now: i64,
    /// How much more the process sees.
    ahead: i64,
    /// It continues where it was at the snapshot.
    goes_on: bool,
}

impl Clock {
    fn running(&self, timer: &Timer) -> Running {
        let Timer { clock, flags, left_ns: left, interval_ns: interval, ticks, .. } = *timer;
        // Another machine, or a restart of this one: the time since the boot is not the one of the image, and a timer must not
        // wait for longer than it would have.
        let latest = self.now.saturating_add(left.max(0));
        let due = timer.due_ns.saturating_sub(self.ahead);
        let due = match self.counts {
            Counts::Day => due,
            _ if flags & ABSOLUTE == 0 && !self.goes_on => latest,
            _ => due.min(latest),
        };
        Running { clock, flags, due, left, interval: interval.max(0), ticks }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
    use rustix::time::{timerfd_create, timerfd_settime};

    use super::*;

    fn timer(flags: u32, due_ns: i64) -> Timer {
        Timer { pid: 1, fd: 3, clock: 1, flags, due_ns, left_ns: 50, interval_ns: 7, ticks: 2 }
    }

    #[test]
    fn a_timer_is_due_when_it_was_to_be_by_the_clock_of_the_process() {
        let due =
            |counts, ahead, goes_on, timer: Timer| Clock { counts, now: 1000, ahead, goes_on }.running(&timer).due;
        // The process has a clock of its own, which shows 300 at our 1000.
        assert_eq!(due(Counts::Awake, -700, true, timer(1, 340)), 1040);
        assert_eq!(due(Counts::Awake, -700, true, timer(0, 340)), 1040);
        assert_eq!(due(Counts::Boot, -700, true, timer(0, 290)), 990, "overdue");
        // It has ours. That of the image had shown less, or more: the machine was restarted.
        assert_eq!(due(Counts::Awake, 0, false, timer(1, 340)), 340);
        assert_eq!(due(Counts::Awake, 0, false, timer(0, 340)), 1050, "the time that it had left");
        assert_eq!(due(Counts::Awake, 0, false, timer(1, 5000)), 1050);
        // A time of day is due then, also after hours.
        assert_eq!(due(Counts::Day, 0, true, timer(1, 5000)), 5000);
        assert_eq!(due(Counts::Day, 0, true, timer(1, -1)), -1);
        let all = Clock { counts: Counts::Day, now: 0, ahead: 0, goes_on: false }.running(&timer(3, 9));
        assert_eq!(all, Running { clock: 1, flags: 3, due: 9, left: 50, interval: 7, ticks: 2 });
    }

    #[test]
    fn running_timers_are_captured_and_others_are_not() {
        let make = || timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).unwrap();
        let (running, idle) = (make(), make());
        let hour = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec { tv_sec: 3600, tv_nsec: 0 },
        };
        timerfd_settime(&running, TimerfdTimerFlags::empty(), &hour).unwrap();
        let pid = std::process::id().cast_signed();
        let inner = process::inner_pid(pid).unwrap();
        let places = [running.as_raw_fd(), idle.as_raw_fd(), i32::MAX].map(|fd| (inner, fd));
        let found = capture(&places, &[pid]);
        let [Timer { pid: of, fd, clock: 1, flags: 0, interval_ns: 0, ticks: 0, .. }] = found[..] else {
            panic!("{found:?}")
        };
        assert_eq!((of, fd), (inner, running.as_raw_fd()));
        assert_eq!(capture(&places, &[]), []);
        let owner = Owner::open(pid).unwrap();
        let manifest_timer = Timer { left_ns: 5_000_000_000, ..found[0] };
        owner.set(&manifest_timer).unwrap();
        let again = capture(&places, &[pid]);
        assert!(again[0].left_ns <= 5_000_000_000, "{again:?}");
        assert!(owner.set(&Timer { fd: i32::MAX, ..found[0] }).is_err());
    }
}

//! Timers that are descriptors (timerfd_create(2)), seen and set from outside, and the clocks of a process.
//!
//! A process can have a time namespace (time_namespaces(7)): its CLOCK_MONOTONIC and CLOCK_BOOTTIME then differ from ours by a
//! constant. timerfd_settime(2) reads an absolute time as one of the namespace of its caller.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::time::{ClockId, Itimerspec, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_gettime, timerfd_settime};

const SECOND: i64 = 1_000_000_000;
/// More readings of a timer than this make its time hardly more exact.
const READINGS: usize = 3;

/// What a clock counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// The time of day (CLOCK_REALTIME).
    Day,
    /// Time while the machine is awake (CLOCK_MONOTONIC).
    Awake,
    /// Time since the boot (CLOCK_BOOTTIME).
    Boot,
}

impl Counts {
    /// What decides when a timer of this clock fires. Without `TFD_TIMER_ABSTIME` a change of the time of day does not move
    /// it. `None` for other clocks: CRIU (4.2) dumps no timer of an alarm clock.
    #[must_use]
    pub fn of(clock: i32, flags: u32) -> Option<Counts> {
        match clock {
            libc::CLOCK_REALTIME if flags & ABSOLUTE != 0 => Some(Counts::Day),
            libc::CLOCK_REALTIME | libc::CLOCK_MONOTONIC => Some(Counts::Awake),
            libc::CLOCK_BOOTTIME => Some(Counts::Boot),
            _ => None,
        }
    }

    /// Our own clock, in nanoseconds.
    #[must_use]
    pub fn now(self) -> i64 {
        nanoseconds(clock_gettime(match self {
            Counts::Day => ClockId::Realtime,
            Counts::Awake => ClockId::Monotonic,
            Counts::Boot => ClockId::Boottime,
        }))
    }

    /// How much more the clock of a process shows than ours, in nanoseconds.
    ///
    /// # Errors
    /// When there is no such process, or it shows something unknown.
    pub fn ahead(self, pid: i32) -> io::Result<i64> {
        let line = match self {
            Counts::Day => return Ok(0),
            Counts::Awake => "monotonic",
            Counts::Boot => "boottime",
        };
        let of = |pid: &str| match std::fs::read_to_string(format!("/proc/{pid}/timens_offsets")) {
            Ok(text) => {
                offset(&text, line).ok_or_else(|| io::Error::other(format!("/proc/{pid}/timens_offsets: {text:?}")))
            }
            // A kernel without CONFIG_TIME_NS.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error),
        };
        Ok(of(&pid.to_string())?.saturating_sub(of("self")?))
    }
}

/// An offset in the text of `/proc/PID/timens_offsets`.
fn offset(text: &str, line: &str) -> Option<i64> {
    let mut words =
        text.lines().map(str::split_whitespace).find_map(|mut words| (words.next()? == line).then_some(words))?;
    let (seconds, rest): (i64, i64) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
    Some(seconds.saturating_mul(SECOND).saturating_add(rest))
}

/// Whether a process has another time namespace than we.
#[must_use]
pub fn has_own_clocks(pid: i32) -> bool {
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/time")).ok();
    namespace(&pid.to_string()) != namespace("self")
}

/// `TFD_TIMER_ABSTIME`
pub const ABSOLUTE: u32 = 1;

/// A timer that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Running {
    /// As in timerfd_create(2).
    pub clock: i32,
    /// As in timerfd_settime(2).
    pub flags: u32,
    /// When it fires next, by our clock, in nanoseconds. Never too early, and some microseconds too late.
    pub due: i64,
    /// The time until then, in nanoseconds.
    pub left: i64,
    /// Nanoseconds between two ticks; 0 if it fires once.
    pub interval: i64,
    /// Ticks that nobody has read.
    pub ticks: u64,
}

impl Running {
    /// Reads a timer of the process `pid`, which has it as `number`, from `timer`, the same one as a descriptor of ours. `None`
    /// if it does not run.
    ///
    /// # Errors
    /// When it is no timer, or the process has ended.
    pub fn of(pid: i32, number: i32, timer: &OwnedFd) -> io::Result<Option<Running>> {
        // Starts a periodic timer again that has fired, and counts its ticks, as reading it does: so this comes before the
        // ticks are read.
        timerfd_gettime(timer)?;
        let text = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))?;
        let shown = Shown::parse(&text).ok_or_else(|| io::Error::other(format!("no timer: {text:?}")))?;
        let Some(counts) = Counts::of(shown.clock, shown.flags) else { return Ok(None) };
        let mut best: Option<Running> = None;
        for _ in 0..READINGS {
            let time = timerfd_gettime(timer)?;
            let now = counts.now();
            let (left, interval) = (nanoseconds(time.it_value), nanoseconds(time.it_interval));
            if left == 0 {
                return Ok(None);
            }
            let due = now.saturating_add(left);
            if best.is_none_or(|best| due < best.due) {
                let Shown { clock, flags, ticks } = shown;
                best = Some(Running { clock, flags, due, left, interval, ticks });
            }
        }
        Ok(best)
    }

    /// Makes `timer` this one. One that is overdue fires at once, and a periodic one counts all ticks since.
    ///
    /// # Errors
    /// When it is no timer.
    pub fn set(&self, timer: &OwnedFd) -> io::Result<()> {
        let Some(counts) = Counts::of(self.clock, self.flags) else { return Ok(()) };
        let now = counts.now();
        let (due, missed) = next(self.due, self.interval, now);
        let value = if self.flags & ABSOLUTE != 0 { due } else { due.saturating_sub(now) };
        // 0 would stop it.
        let it_value = timespec(value.max(1));
        let new = Itimerspec { it_interval: timespec(self.interval), it_value };
        match timerfd_settime(timer, TimerfdTimerFlags::from_bits_retain(self.flags), &new) {
            // The clock was set since. It runs nevertheless.
            Ok(_) | Err(rustix::io::Errno::CANCELED) => {}
            Err(error) => return Err(error.into()),
        }
        set_ticks(timer, self.ticks.saturating_add(missed))
    }
}

/// Whether a descriptor of a process, whose link in /proc is `target`, is a timer of a clock that can wake the machine
/// (CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM).
#[must_use]
pub fn is_alarm(pid: i32, number: i32, target: &Path) -> bool {
    target.as_os_str() == "anon_inode:[timerfd]"
        && std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}"))
            .ok()
            .and_then(|text| Shown::parse(&text))
            .is_some_and(|shown| [libc::CLOCK_REALTIME_ALARM, libc::CLOCK_BOOTTIME_ALARM].contains(&shown.clock))
}

/// When a timer fires next, and how many ticks it has missed.
fn next(due: i64, interval: i64, now: i64) -> (i64, u64) {
    if interval <= 0 || due > now {
        return (due, 0);
    }
    let missed = (now.saturating_sub(due) / interval).saturating_add(1);
    (due.saturating_add(missed.saturating_mul(interval)), missed.unsigned_abs())
}

fn set_ticks(timer: &OwnedFd, ticks: u64) -> io::Result<()> {
    /// `TFD_IOC_SET_TICKS` of linux/timerfd.h; the kernel refuses 0. Needs CONFIG_CHECKPOINT_RESTORE, as CRIU does.
    const SET_TICKS: libc::Ioctl = 0x4008_5400;
    if ticks == 0 {
        return Ok(());
    }
    // SAFETY: the kernel reads eight bytes at this address, which outlive the call.
    let result = unsafe { libc::ioctl(timer.as_raw_fd(), SET_TICKS, &raw const ticks) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What `/proc/PID/fdinfo/N` shows of a timer, besides its times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shown {
    clock: i32,
    flags: u32,
    ticks: u64,
}

impl Shown {
    fn parse(text: &str) -> Option<Shown> {
        let field = |name: &str| text.lines().find_map(|line| Some(line.strip_prefix(name)?.strip_prefix(':')?.trim()));
        Some(Shown {
            clock: field("clockid")?.parse().ok()?,
            flags: u32::from_str_radix(field("settime flags")?, 8).ok()?,
            ticks: field("ticks")?.parse().ok()?,
        })
    }
}

fn nanoseconds(time: Timespec) -> i64 {
    time.tv_sec.saturating_mul(SECOND).saturating_add(time.tv_nsec)
}

fn timespec(nanoseconds: i64) -> Timespec {
    Timespec { tv_sec: nanoseconds.div_euclid(SECOND), tv_nsec: nanoseconds.rem_euclid(SECOND) }
}

#[cfg(test)]
mod tests {
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

    use super::*;

    #[test]
    fn what_the_kernel_shows_is_read() {
        let text = "pos:\t0\nclockid: 0\nticks: 2\nsettime flags: 03\nit_value: (0, 5)\nit_interval: (1, 0)\n";
        assert_eq!(Shown::parse(text), Some(Shown { clock: 0, flags: 3, ticks: 2 }));
        assert_eq!(Shown::parse("pos:\t0\n"), None);
        let text = "monotonic        -5 999999999\nboottime          7         1\n";
        assert_eq!(offset(text, "monotonic"), Some(-4 * SECOND - 1));
        assert_eq!(offset(text, "boottime"), Some(7 * SECOND + 1));
        assert_eq!(offset("", "boottime"), None);
    }

    #[test]
    fn an_overdue_timer_counts_what_it_missed() {
        assert_eq!(next(100, 0, 250), (100, 0));
        assert_eq!(next(100, 10, 99), (100, 0));
        assert_eq!(next(100, 10, 100), (110, 1));
        assert_eq!(next(100, 10, 125), (130, 3));
        assert_eq!(next(i64::MIN, 1, i64::MAX).1, i64::MAX as u64);
    }

    fn timer(clock: TimerfdClockId) -> OwnedFd {
        timerfd_create(clock, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC).unwrap()
    }

    fn of(timer: &OwnedFd) -> Option<Running> {
        Running::of(std::process::id().cast_signed(), timer.as_raw_fd(), timer).unwrap()
    }

    fn ticks(timer: &OwnedFd) -> Option<u64> {
        let mut bytes = [0; 8];
        (rustix::io::read(timer, &mut bytes) == Ok(8)).then(|| u64::from_ne_bytes(bytes))
    }

    #[test]
    fn a_timer_is_made_again_to_the_microsecond() {
        const HOUR: i64 = 3600 * SECOND;
        for clock in [TimerfdClockId::Realtime, TimerfdClockId::Monotonic, TimerfdClockId::Boottime] {
            let (first, second) = (timer(clock), timer(clock));
            assert_eq!(of(&first), None, "it does not run");
            let counts = Counts::of(clock as i32, ABSOLUTE).unwrap();
            for flags in [0, 1, 3] {
                let due = counts.now() + HOUR;
                let value = if flags & ABSOLUTE == 0 { HOUR } else { due };
                let time = Itimerspec { it_interval: timespec(7), it_value: timespec(value) };
                let flags = if clock == TimerfdClockId::Realtime { flags } else { flags & 1 };
                timerfd_settime(&first, TimerfdTimerFlags::from_bits_retain(flags), &time).unwrap();
                let seen = of(&first).unwrap();
                assert_eq!((seen.clock, seen.flags, seen.interval, seen.ticks), (clock as i32, flags, 7, 0));
                if flags != 0 {
                    assert!(seen.due >= due, "too early: {seen:?}, not {due}");
                }
                seen.set(&second).unwrap();
                let again = of(&second).unwrap();
                assert_eq!(again.flags, flags);
                assert!((again.due - seen.due).abs() < SECOND / 10, "{again:?} {seen:?}");
            }
        }
    }

    #[test]
    fn ticks_that_nobody_read_and_missed_ones_are_all_counted() {
        let (first, second) = (timer(TimerfdClockId::Monotonic), timer(TimerfdClockId::Monotonic));
        let hourly = timespec(3600 * SECOND);
        // An hour's interval, and the last two times have passed.
        let past = Counts::Awake.now() - 3601 * SECOND;
        let running = Running { clock: 1, flags: ABSOLUTE, due: past, left: 1, interval: 3600 * SECOND, ticks: 5 };
        running.set(&first).unwrap();
        let seen = of(&first).unwrap();
        assert_eq!((seen.ticks, seen.interval), (7, 3600 * SECOND));
        assert!(seen.left < 3600 * SECOND);
        seen.set(&second).unwrap();
        assert_eq!((ticks(&first), ticks(&second), ticks(&second)), (Some(7), Some(7), None));
        // One that fires once, and is overdue.
        Running { interval: 0, ticks: 0, ..running }.set(&first).unwrap();
        assert_eq!((ticks(&first), ticks(&first)), (Some(1), None));
        // One that has fired, and that nobody has read: the kernel has not started it again.
        let soon = Itimerspec { it_interval: hourly, it_value: timespec(1) };
        timerfd_settime(&first, TimerfdTimerFlags::empty(), &soon).unwrap();
        let seen = of(&first).unwrap();
        assert_eq!(seen.ticks, 1);
        assert!(seen.left > 3500 * SECOND, "{seen:?}");
    }
}

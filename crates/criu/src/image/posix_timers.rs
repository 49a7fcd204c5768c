//! POSIX timers (timer_create(2)) that CRIU (4.2) dumps, and would create otherwise or not at all.
//!
//! CRIU creates all timers of a process from its first thread, with what /proc/PID/timers shows:
//!
//! - A timer that signals a thread which has ended (SIGEV_THREAD_ID) cannot be created: EINVAL, and no process is restored. It
//!   signals nobody, as one with SIGEV_NONE does, so it becomes that.
//! - A timer of the CPU time of "this thread" (CLOCK_THREAD_CPUTIME_ID) would be one of the first thread. The kernel does not
//!   show whose it is. One that signals a thread is taken for that thread's, because programs (profilers) make them so.
//! - A timer of the CPU time of a thread or process that has ended cannot be created. It never fires, so it becomes one that
//!   is stopped.

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use super::rewrite::{rewrite, with_fields};
use super::{Error, PSTREE, Records, damaged};
use crate::proto::{PosixTimerEntry, PstreeEntry, RawMessage};
use rekindle_os::beneath::Beneath;

const CORE: u32 = 0x5505_3847;

/// `SIGEV_NONE` and `SIGEV_THREAD_ID` of sigevent(3).
const NONE: u32 = 1;
const THREAD: u32 = 4;

/// What a timer's clock counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Clock {
    Time,
    /// CPU time of the process with this pid, or of the timer's own with 0.
    Process(i32),
    /// CPU time of the thread with this id, or of the one that made the timer with 0.
    Thread(i32),
}

/// The clocks of CPU time are negative (`CPUCLOCK_*` of linux/posix-timers.h): the inverted id, one bit for a thread, two for
/// what is counted.
const OF_A_THREAD: i32 = 4;
const OF_THIS_PROCESS: i32 = -6;

impl Clock {
    fn of(id: i32) -> Clock {
        match (id < 0, id & OF_A_THREAD != 0) {
            (false, _) => Clock::Time,
            (true, false) => Clock::Process(!(id >> 3)),
            (true, true) => Clock::Thread(!(id >> 3)),
        }
    }
}

/// What must become of a timer.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Right,
    Changed(PosixTimerEntry),
    /// Nobody can say whose CPU time it counts.
    Unknown,
}

fn fate(timer: &PosixTimerEntry, threads: &BTreeSet<i32>, first: i32, pids: &BTreeSet<i32>) -> Fate {
    let mut new = *timer;
    let signals = (timer.notify == THREAD).then(|| timer.thread.unwrap_or_default());
    if signals.is_some_and(|thread| !threads.contains(&thread)) {
        (new.notify, new.thread) = (NONE, None);
    }
    let clock = timer.clock.cast_signed();
    let is_dead = match Clock::of(clock) {
        Clock::Time | Clock::Process(0) => false,
        Clock::Process(pid) => !pids.contains(&pid),
        Clock::Thread(0) => match signals {
            Some(thread) if threads.contains(&thread) => {
                if thread != first {
                    // What is counted stays.
                    new.clock = (!thread << 3 | (clock & 7)).cast_unsigned();
                }
                false
            }
            Some(_) => true,
            None if threads.len() > 1 => return Fate::Unknown,
            None => false,
        },
        Clock::Thread(thread) => !threads.contains(&thread),
    };
    if is_dead {
        new.clock = OF_THIS_PROCESS.cast_unsigned();
        (new.notify, new.thread) = (NONE, None);
        (new.value_s, new.value_ns, new.interval_s, new.interval_ns) = (0, 0, 0, 0);
    }
    if new == *timer { Fate::Right } else { Fate::Changed(new) }
}

/// A timer that a restore cannot give back as it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnknownTimer {
    /// The process, as it sees itself.
    pub pid: i32,
    /// The timer's id there, as in /proc/PID/timers.
    pub id: u32,
}

/// Makes the timers such that CRIU creates them as they were. Returns how many it has changed, and the first one that cannot be
/// known: a timer of the CPU time of the thread that made it, in a process of several threads, which signals no thread.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn correct_posix_timers(dir: &Beneath) -> Result<(usize, Option<UnknownTimer>), Error> {
    let entries: Vec<PstreeEntry> = Records::open(dir.join("pstree.img"), PSTREE)?.all()?;
    let all: BTreeMap<i32, BTreeSet<i32>> = entries
        .iter()
        .map(|entry| (entry.pid.cast_signed(), entry.threads.iter().map(|id| id.cast_signed()).collect()))
        .collect();
    let pids: BTreeSet<i32> = all.keys().copied().collect();
    let (mut changed, mut unknown) = (0, None);
    for (pid, threads) in &all {
        let path = dir.join(format!("core-{pid}.img"));
        if !path.is_there() {
            continue;
        }
        let mut of_one = |timer: &[u8]| {
            let timer = PosixTimerEntry::decode(timer).ok()?;
            match fate(&timer, threads, *pid, &pids) {
                Fate::Right => Some(None),
                Fate::Changed(new) => {
                    changed += 1;
                    Some(Some(new.encode_to_vec()))
                }
                Fate::Unknown => {
                    unknown = unknown.or(Some(UnknownTimer { pid: *pid, id: timer.id }));
                    Some(None)
                }
            }
        };
        rewrite(&path, CORE, |_: RawMessage, record| {
            let new = with_timers(record, &mut of_one).ok_or_else(|| damaged(&path, "a record cannot be read"))?;
            Ok((new != record).then_some(new))
        })?;
    }
    Ok((changed, unknown))
}

/// A `core_entry` with each POSIX timer replaced by what `change` returns.
fn with_timers(record: &[u8], change: &mut impl FnMut(&[u8]) -> Option<Option<Vec<u8>>>) -> Option<Vec<u8>> {
    /// `tc` of `core_entry`, `timers` of `task_core_entry`, `posix` of `task_timers_entry`, length-delimited.
    const TASK: u64 = 3 << 3 | 2;
    const TIMERS: u64 = 7 << 3 | 2;
    const POSIX: u64 = 4 << 3 | 2;
    with_fields(record, |key, task| match key {
        TASK => Some(Some(with_fields(task, |key, timers| match key {
            TIMERS => Some(Some(with_fields(timers, |key, timer| match key {
                POSIX => change(timer),
                _ => Some(None),
            })?)),
            _ => Some(None),
        })?)),
        _ => Some(None),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::super::tests::write;
    use super::*;

    fn timer(id: u32, clock: i32, notify: u32, thread: Option<i32>) -> PosixTimerEntry {
        PosixTimerEntry {
            id,
            clock: clock.cast_unsigned(),
            signal: 35,
            notify,
            value: u64::MAX,
            overrun: 1,
            interval_s: 1,
            interval_ns: 2,
            value_s: 3,
            value_ns: 4,
            thread,
        }
    }

    fn stopped(id: u32) -> PosixTimerEntry {
        PosixTimerEntry { interval_s: 0, interval_ns: 0, value_s: 0, value_ns: 0, ..timer(id, -6, 1, None) }
    }

    #[test]
    fn a_timer_is_kept_changed_or_unknown() {
        let (threads, pids) = (BTreeSet::from([10, 11]), BTreeSet::from([1, 10]));
        let fate = |timer: &PosixTimerEntry| fate(timer, &threads, 10, &pids);
        let of = |thread: i32| !thread << 3 | 6;
        let of_process = |pid: i32| !pid << 3 | 2;
        for right in [
            timer(0, 1, 0, Some(10)),
            timer(0, 0, 4, Some(11)),
            timer(0, 11, 1, Some(10)),
            timer(0, -6, 0, Some(10)),
            timer(0, -6, 4, Some(11)),
            timer(0, -2, 4, Some(10)),
            timer(0, of(11), 0, Some(10)),
            timer(0, of_process(1), 0, Some(10)),
        ] {
            assert_eq!(fate(&right), Fate::Right, "{right:?}");
        }
        assert_eq!(fate(&timer(7, 1, 4, Some(12))), Fate::Changed(timer(7, 1, 1, None)), "its thread has ended");
        assert_eq!(fate(&timer(7, -6, 4, Some(12))), Fate::Changed(timer(7, -6, 1, None)));
        assert_eq!(fate(&timer(7, -2, 4, Some(11))), Fate::Changed(timer(7, of(11), 4, Some(11))), "that thread's");
        assert_eq!(fate(&timer(7, -2, 4, Some(12))), Fate::Changed(stopped(7)));
        assert_eq!(fate(&timer(7, of(12), 0, Some(10))), Fate::Changed(stopped(7)));
        assert_eq!(fate(&timer(7, of_process(2), 4, Some(11))), Fate::Changed(stopped(7)));
        assert_eq!(fate(&timer(7, -2, 0, Some(10))), Fate::Unknown);
        let alone = super::fate(&timer(7, -2, 0, Some(10)), &BTreeSet::from([10]), 10, &pids);
        assert_eq!(alone, Fate::Right, "there is no other thread");
    }

    #[test]
    fn timers_in_the_image_are_corrected() {
        let dir = tempfile::tempdir().unwrap();
        let message = |field: u8, content: &[u8]| {
            let mut bytes = vec![field << 3 | 2];
            prost::encoding::encode_varint(content.len() as u64, &mut bytes);
            bytes.extend(content);
            bytes
        };
        // The real timer of setitimer(2) before the POSIX ones; a state before the timers, and flags after them.
        let core = |timers: &[PosixTimerEntry]| {
            let posix = timers.iter().flat_map(|timer| message(4, &timer.encode_to_vec()));
            let timers: Vec<u8> = message(1, &[8, 0, 16, 0]).into_iter().chain(posix).collect();
            let task: Vec<u8> = [8, 1].into_iter().chain(message(7, &timers)).chain([4 << 3, 5]).collect();
            [8, 1].into_iter().chain(message(3, &task)).collect::<Vec<u8>>()
        };
        let process =
            |pid: u32, threads: Vec<u32>| PstreeEntry { pid, ppid: 1, pgid: 1, sid: 1, threads }.encode_to_vec();
        write(&dir.path().join("pstree.img"), PSTREE, &[process(10, vec![10, 11]), process(20, vec![20])]);
        let right = [timer(0, 1, 4, Some(11)), timer(1, 0, 0, Some(10))];
        let first = dir.path().join("core-10.img");
        write(&first, CORE, &[core(&[right[0], timer(2, 1, 4, Some(12)), right[1]])]);
        // A dead process has no timers.
        write(&dir.path().join("core-20.img"), CORE, &[vec![8, 1]]);
        assert_eq!(correct_posix_timers(&beneath(dir.path())).unwrap(), (1, None));
        let expected = dir.path().join("expected");
        write(&expected, CORE, &[core(&[right[0], timer(2, 1, 1, None), right[1]])]);
        assert_eq!(std::fs::read(&first).unwrap(), std::fs::read(&expected).unwrap());
        assert_eq!(correct_posix_timers(&beneath(dir.path())).unwrap(), (0, None));
        write(&first, CORE, &[core(&[right[0], timer(9, -2, 0, Some(10))])]);
        let unknown = Some(UnknownTimer { pid: 10, id: 9 });
        assert_eq!(correct_posix_timers(&beneath(dir.path())).unwrap(), (0, unknown));
    }
}

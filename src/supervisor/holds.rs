//! Holds with which the job blocks snapshots, and the snapshot that waits for them.
//!
//! Each hold has a name and a time limit. The state machine knows only when the last of them ends. It is reported when
//! a snapshot begins to wait and when it no longer waits.

use std::time::{Duration, Instant};

use super::state::{Machine, State};
use rekindle_os::process;
use rekindle_store::manifest::Reason;

/// Maximum number of holders in a job; a job that wants more has a bug.
pub(super) const HOLDERS: usize = 64;
/// How often to check whether the processes that block a snapshot are still alive.
const LOOK: Duration = Duration::from_secs(1);

/// A process of the job that blocks snapshots.
#[derive(Debug)]
pub(super) struct Holder {
    pid: i32,
    /// Start time of the process, to recognise a pid that was reused.
    begun: Option<u64>,
    name: String,
    until: Instant,
}

impl Holder {
    /// `until` is the time limit of the hold.
    pub(super) fn new(pid: i32, name: String, until: Instant) -> Holder {
        Holder { pid, begun: process::start_time(pid), name, until }
    }

    /// Whether the holder is alive. A holder in a PID namespace that we do not see has no pid, and counts as alive
    /// until its time limit.
    pub(super) fn lives(&self) -> bool {
        self.pid == 0
            || self.begun.is_some()
                && process::start_time(self.pid) == self.begun
                && !matches!(process::state(self.pid), Some('Z' | 'X'))
    }
}

/// A snapshot that is blocked.
#[derive(Debug, Clone, Copy)]
struct Wait {
    since: Instant,
    reason: Reason,
    until: Instant,
}

/// How the wait of a snapshot ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    HolderDied,
    Expired,
    Released,
    JobEnded,
}

impl How {
    /// Its name in the log and in events.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            How::HolderDied => "holder-died",
            How::Expired => "expired",
            How::Released => "released",
            How::JobEnded => "job-ended",
        }
    }
}

/// A change of the holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Change {
    /// A holder has died: the machine must be told the time limit of the others.
    Died,
    /// A snapshot starts to wait, for at most `bound`.
    Waits { reason: Reason, pids: Vec<i32>, bound: Duration },
    /// It no longer waits.
    Over { reason: Reason, how: How, waited: Duration },
}

/// What the machine knows about holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Facts {
    /// The blocked snapshot, and its time limit.
    waits: Option<(Reason, Instant)>,
    /// Whether snapshots are blocked at all.
    held: bool,
    /// Whether the job runs, or its snapshot is being taken.
    runs: bool,
}

impl Facts {
    pub(super) fn of(machine: &Machine<'_>) -> Facts {
        Facts {
            waits: machine.held_off(),
            held: machine.held().is_some(),
            runs: matches!(machine.state(), State::Running(_) | State::Snapshotting { .. }),
        }
    }
}

/// All holds of the present life.
#[derive(Debug, Default)]
pub(super) struct Holds {
    holders: Vec<Holder>,
    wait: Option<Wait>,
    /// Whether a holder has died since the last check.
    died: bool,
    /// When the holders were last checked.
    looked: Option<Instant>,
}

impl Holds {
    /// Adds a holder, or replaces the same one. Returns false if there are too many.
    pub(super) fn add(&mut self, new: Holder, now: Instant) -> bool {
        self.holders.retain(|other| other.until > now && (other.pid, &other.name) != (new.pid, &new.name));
        let has_room = self.holders.len() < HOLDERS;
        if has_room {
            self.holders.push(new);
        }
        has_room
    }

    /// Removes a holder. Returns whether it existed.
    pub(super) fn remove(&mut self, pid: i32, name: &str) -> bool {
        let before = self.holders.len();
        self.holders.retain(|other| (other.pid, other.name.as_str()) != (pid, name));
        self.holders.len() < before
    }

    /// A life begins: the holds of the previous one end.
    pub(super) fn clear(&mut self) {
        self.holders.clear();
    }

    /// When the last hold ends.
    pub(super) fn bound(&self) -> Option<Instant> {
        self.holders.iter().map(|holder| holder.until).max()
    }

    /// Forgets holders that have died or whose time is over. Returns the changes.
    pub(super) fn check(&mut self, facts: Facts, lives: impl Fn(&Holder) -> bool, now: Instant) -> Option<Change> {
        // At most once per interval, however many requests the job sends.
        if facts.waits.is_some() && self.looked.is_none_or(|at| now.saturating_duration_since(at) >= LOOK) {
            self.looked = Some(now);
            let before = self.holders.len();
            self.holders.retain(lives);
            if self.holders.len() < before {
                self.died = true;
                return Some(Change::Died);
            }
        }
        if !facts.held {
            self.holders.clear();
        }
        match (facts.waits, self.wait) {
            (Some((reason, until)), None) => {
                self.died = false;
                self.wait = Some(Wait { since: now, reason, until });
                let mut pids: Vec<i32> = self.holders.iter().map(|holder| holder.pid).collect();
                pids.sort_unstable();
                pids.dedup();
                Some(Change::Waits { reason, pids, bound: until.saturating_duration_since(now) })
            }
            // A stop may have replaced reason and time limit.
            (Some((reason, until)), Some(wait)) => {
                self.wait = Some(Wait { reason, until, ..wait });
                None
            }
            (None, Some(wait)) => {
                self.wait = None;
                let how = match facts.runs {
                    true if self.died => How::HolderDied,
                    true if wait.until <= now => How::Expired,
                    true => How::Released,
                    false => How::JobEnded,
                };
                Some(Change::Over { reason: wait.reason, how, waited: now.saturating_duration_since(wait.since) })
            }
            (None, None) => None,
        }
    }

    /// When to check the holders again that a snapshot waits for.
    pub(super) fn next_wake(&self, now: Instant) -> Option<Instant> {
        self.wait.map(|_| now + LOOK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(pid: i32, until: Instant) -> Holder {
        Holder { pid, begun: None, name: "h".into(), until }
    }

    fn facts(waits: Option<Instant>, runs: bool) -> Facts {
        Facts { waits: waits.map(|until| (Reason::Interval, until)), held: waits.is_some(), runs }
    }

    const BOUND: Duration = Duration::from_secs(10);

    /// Holds of the pids 7 and 8, and a snapshot that waits for them.
    fn waiting(now: Instant) -> Holds {
        let mut holds = Holds::default();
        assert!(holds.add(holder(8, now + BOUND), now) && holds.add(holder(7, now + BOUND), now));
        let waits = Change::Waits { reason: Reason::Interval, pids: vec![7, 8], bound: BOUND };
        assert_eq!(holds.check(facts(Some(now + BOUND), true), |_| true, now), Some(waits));
        assert_eq!(holds.check(facts(Some(now + BOUND), true), |_| true, now), None, "it is said once");
        assert_eq!(holds.next_wake(now), Some(now + LOOK));
        holds
    }

    fn over(holds: &mut Holds, runs: bool, now: Instant) -> Option<How> {
        match holds.check(facts(None, runs), |_| true, now) {
            Some(Change::Over { how, .. }) => Some(how),
            _ => None,
        }
    }

    #[test]
    fn the_end_of_a_wait_has_a_reason() {
        let now = Instant::now();
        assert_eq!(over(&mut waiting(now), true, now), Some(How::Released));
        assert_eq!(over(&mut waiting(now), true, now + BOUND), Some(How::Expired));
        let mut ended = waiting(now);
        assert_eq!((over(&mut ended, false, now), over(&mut ended, false, now)), (Some(How::JobEnded), None));
        assert_eq!((ended.bound(), ended.next_wake(now)), (None, None));
    }

    #[test]
    fn a_holder_that_died_holds_nothing() {
        let now = Instant::now();
        let mut holds = waiting(now);
        let waits = facts(Some(now + BOUND), true);
        assert_eq!(holds.check(waits, |holder| holder.pid == 8, now + LOOK / 2), None, "it is not looked all the time");
        assert_eq!(holds.check(waits, |holder| holder.pid == 8, now + LOOK), Some(Change::Died));
        assert_eq!(holds.bound(), Some(now + BOUND), "of the other");
        assert_eq!(holds.check(waits, |_| false, now + LOOK * 2), Some(Change::Died));
        assert_eq!(holds.bound(), None);
        assert_eq!(over(&mut holds, true, now + LOOK * 2), Some(How::HolderDied));
    }

    #[test]
    fn a_hold_takes_the_place_of_the_same_one_and_there_is_a_bound_to_their_number() {
        let now = Instant::now();
        let mut holds = Holds::default();
        holds.add(holder(1, now + BOUND), now);
        holds.add(holder(1, now + BOUND / 2), now);
        assert_eq!(holds.bound(), Some(now + BOUND / 2));
        assert!(holds.remove(1, "h") && !holds.remove(1, "h"));
        assert!((0..64).all(|pid| holds.add(holder(pid, now + BOUND), now)));
        assert!(!holds.add(holder(64, now + BOUND), now));
        assert!(holds.add(holder(64, now + BOUND * 2), now + BOUND), "those that are over make room");
    }
}

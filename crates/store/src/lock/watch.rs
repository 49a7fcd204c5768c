//! Watches a lock file that names a holder on another machine: for how long has it shown no sign of life?
//!
//! Clocks of machines and of file servers may be wrong, so the age of a time stamp alone never says that a holder is
//! dead. Only time counts during which this process looked again and again, and found the same name with the same stamp.
//! Time in which it did not look does not count: the machine slept, or the file server answered nobody, the holder
//! included. Pure: no clock, no files.

use std::time::{Duration, Instant, SystemTime};

use super::judge::Verdict;
use super::{Holder, STALE};
use crate::holder::HEARTBEAT;

/// How long a holder is watched, and how often it is looked at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Terms {
    /// A holder that shows no sign of life for this long is dead.
    pub(super) stale: Duration,
    /// The same for a holder whose time stamp is already as old as [`STALE`] by the clock of the file system. A holder
    /// that lives renews it within this time, whatever that clock says.
    pub(super) silent: Duration,
    /// The time between two looks.
    pub(super) look: Duration,
    /// After a longer time between two looks the count begins again.
    pub(super) gap: Duration,
}

impl Terms {
    pub(super) const USUAL: Terms = Terms {
        stale: STALE,
        // A heartbeat and a half: one that is late is still seen.
        silent: Duration::from_secs(45),
        look: Duration::from_secs(2),
        gap: HEARTBEAT,
    };

    /// How long a holder must be watched whose time stamp has this age by the clock of the file system.
    pub(super) fn needed(&self, age: Duration) -> Duration {
        if age >= STALE { self.silent.min(self.stale) } else { self.stale }
    }
}

/// What changes with each sign of life.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Sign {
    pub(super) holder: Holder,
    pub(super) stamp: SystemTime,
}

/// The sign that was seen first, and for how long it has been the same.
#[derive(Debug)]
pub(super) struct Watch {
    sign: Sign,
    since: Instant,
    seen: Instant,
}

impl Watch {
    pub(super) fn begin(sign: Sign, now: Instant) -> Watch {
        Watch { sign, since: now, seen: now }
    }

    /// Counts another look. Returns whether the sign is still the same.
    pub(super) fn sees(&mut self, sign: &Sign, gap: Duration, now: Instant) -> bool {
        if *sign != self.sign {
            return false;
        }
        if now.saturating_duration_since(self.seen) > gap {
            self.since = now;
        }
        self.seen = now;
        true
    }

    /// For how long the sign has been the same.
    pub(super) fn length(&self) -> Duration {
        self.seen.saturating_duration_since(self.since)
    }

    /// The same, if the sign is still this one, and the last look was a moment ago.
    pub(super) fn proves(&self, sign: &Sign, gap: Duration, now: Instant) -> Duration {
        let is_new = now.saturating_duration_since(self.seen) <= gap;
        if *sign == self.sign && is_new { self.length() } else { Duration::ZERO }
    }
}

/// What shows that a holder on another machine is dead.
#[derive(Debug, Clone, Copy)]
pub(super) enum Proof<'a> {
    /// The age of its time stamp, by the clock of the file system.
    Stamp,
    /// That it was watched for long enough.
    Watched(Option<&'a Watch>, &'a Terms),
}

impl Proof<'_> {
    /// The verdict, which goes by the time stamp, by this proof.
    pub(super) fn weighs(self, verdict: Verdict, sign: &Sign, me: &Holder, now: Instant) -> Verdict {
        let Proof::Watched(watch, terms) = self else { return verdict };
        let age = match verdict {
            Verdict::Silent(age) => age,
            Verdict::Alive { silent } if sign.holder.boot_id != me.boot_id => silent,
            Verdict::Dead | Verdict::Alive { .. } => return verdict,
        };
        let watched = watch.map_or(Duration::ZERO, |watch| watch.proves(sign, terms.gap, now));
        if watched >= terms.needed(age) { Verdict::Silent(age.max(watched)) } else { Verdict::Alive { silent: age } }
    }
}

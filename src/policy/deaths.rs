//! Whether the death of a process takes the job back to its newest image: a pure function of the earlier deaths.
//!
//! A job may end its own processes, and a rollback for that would repeat for ever. So:
//!
//! - Only SIGKILL and the signals of a crash count: the others ask a process to end.
//! - If a process dies again after the job was restored for its death, that is left to the job until there is a newer
//!   image. After [`MOST`] such restores from one image, every death is left to the job.
//! - If the job then continues, an image is taken, and the job is alive `restart.min-uptime` later, it ends such
//!   processes itself: for the rest of the run, the same signal to a process of the same name is left to the job.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A process that a signal killed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Victim {
    /// As the job sees it.
    pub(crate) pid: i32,
    /// At most 15 bytes.
    pub(crate) name: String,
    pub(crate) signal: i32,
}

impl std::fmt::Display for Victim {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let signal = rekindle_os::spawn::Ended::Signal(self.signal);
        write!(f, "process {} ({}) was killed by {signal}", self.pid, self.name)
    }
}

/// The decision about a death.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The job goes back to its newest image.
    Back,
    /// It is left to the job.
    Left(Why),
}

/// Why a death is left to the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Why {
    /// The signal asks for an end.
    Asked,
    /// The process died again after a restore for its death.
    Again,
    /// There were [`MOST`] restores from the same image.
    TooOften,
    /// The job has lived on after such a death.
    Usual,
}

impl Why {
    /// Whether to warn the user.
    #[must_use]
    pub(crate) fn is_news(self) -> bool {
        matches!(self, Why::Again | Why::TooOften)
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Why::Asked => f.write_str("the signal asks for an end"),
            Why::Again => f.write_str("it died again after the job was restored for its death"),
            Why::TooOften => write!(f, "the job was restored {MOST} times for such deaths without a new image"),
            Why::Usual => f.write_str("the job has survived such a death before"),
        }
    }
}

/// How often the job is restored from one image because of deaths of its processes.
const MOST: u32 = 3;

/// Signals that do not ask for an end: a kill, and crashes.
const COUNT: [i32; 10] = [
    libc::SIGKILL,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGABRT,
    libc::SIGFPE,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGSYS,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// The deaths that were left to the job in this life.
#[derive(Debug, Clone)]
struct Left {
    victim: Victim,
    at: Instant,
    /// There is a newer image.
    saved: bool,
}

/// Deaths of the job's processes in this run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ledger {
    /// How often the job went back since the newest image.
    times: u32,
    /// Deaths that took it back, or were left to a life that ended.
    back: Vec<Victim>,
    left: Vec<Left>,
    /// By name and signal.
    usual: BTreeSet<(String, i32)>,
}

impl Ledger {
    /// The decision about the death of this process.
    #[must_use]
    pub(crate) fn judge(&self, victim: &Victim) -> Answer {
        if !COUNT.contains(&victim.signal) {
            return Answer::Left(Why::Asked);
        }
        if self.usual.contains(&(victim.name.clone(), victim.signal)) {
            return Answer::Left(Why::Usual);
        }
        let is_same = |other: &Victim| other.pid == victim.pid && other.name == victim.name;
        if self.back.iter().chain(self.left.iter().map(|left| &left.victim)).any(is_same) {
            return Answer::Left(Why::Again);
        }
        if self.times >= MOST {
            return Answer::Left(Why::TooOften);
        }
        Answer::Back
    }

    /// A process died, in a job that can go back to an image.
    pub(crate) fn died(&mut self, victim: Victim, now: Instant) -> Answer {
        let answer = self.judge(&victim);
        match answer {
            Answer::Back => {
                self.times += 1;
                self.back.push(victim);
            }
            Answer::Left(Why::Again | Why::TooOften) => self.left.push(Left { victim, at: now, saved: false }),
            Answer::Left(Why::Asked | Why::Usual) => {}
        }
        answer
    }

    /// There is a new image.
    pub(crate) fn image_taken(&mut self) {
        self.times = 0;
        self.back.clear();
        self.left.iter_mut().for_each(|left| left.saved = true);
    }

    /// The job is alive.
    pub(crate) fn is_alive(&mut self, min_uptime: Duration, now: Instant) {
        let outlived = |left: &mut Left| left.saved && now.saturating_duration_since(left.at) >= min_uptime;
        for Left { victim, .. } in self.left.extract_if(.., outlived) {
            self.usual.insert((victim.name, victim.signal));
        }
    }

    /// The life is over, perhaps because of a death that was left to the job.
    pub(crate) fn life_ends(&mut self) {
        self.back.extend(self.left.drain(..).filter(|left| !left.saved).map(|left| left.victim));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIN: Duration = Duration::from_secs(30);

    fn killed(pid: i32) -> Victim {
        Victim { pid, name: "python3".into(), signal: libc::SIGKILL }
    }

    #[test]
    fn a_kill_and_a_crash_count_and_a_request_does_not() {
        let with = |signal| Ledger::default().judge(&Victim { signal, ..killed(7) });
        for signal in [libc::SIGKILL, libc::SIGSEGV, libc::SIGABRT] {
            assert_eq!(with(signal), Answer::Back);
        }
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE, libc::SIGUSR1] {
            assert_eq!(with(signal), Answer::Left(Why::Asked));
        }
    }

    #[test]
    fn who_dies_again_from_the_same_image_is_left_to_the_job() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        assert_eq!(ledger.died(killed(7), now), Answer::Back);
        ledger.life_ends();
        assert_eq!(ledger.died(killed(7), now), Answer::Left(Why::Again));
        assert_eq!(ledger.died(killed(8), now), Answer::Back, "another one");
        ledger.life_ends();
        assert_eq!(ledger.died(killed(9), now), Answer::Back);
        ledger.image_taken();
        assert_eq!(ledger.died(killed(7), now), Answer::Back, "there is a newer image");
    }

    #[test]
    fn one_image_is_gone_back_to_so_often() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        for pid in 1..=3 {
            assert_eq!(ledger.died(killed(pid), now), Answer::Back);
            ledger.life_ends();
        }
        assert_eq!(ledger.died(killed(4), now), Answer::Left(Why::TooOften));
    }

    #[test]
    fn what_the_job_outlives_is_its_own_doing() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        assert_eq!(ledger.died(killed(7), now), Answer::Back);
        ledger.life_ends();
        assert_eq!(ledger.died(killed(7), now), Answer::Left(Why::Again));
        ledger.is_alive(MIN, now + MIN * 2);
        assert_eq!(ledger.judge(&killed(8)), Answer::Back, "it took no image since");
        ledger.image_taken();
        ledger.is_alive(MIN, now + MIN / 2);
        assert_eq!(ledger.judge(&killed(8)), Answer::Back, "too early to say");
        ledger.is_alive(MIN, now + MIN);
        assert_eq!(ledger.judge(&killed(8)), Answer::Left(Why::Usual));
        assert_eq!(ledger.judge(&Victim { signal: libc::SIGSEGV, ..killed(8) }), Answer::Back);
        assert_eq!(ledger.judge(&Victim { name: "trainer".into(), ..killed(8) }), Answer::Back);
    }

    #[test]
    fn what_the_job_dies_of_is_not() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        for _ in 0..2 {
            ledger.died(killed(7), now);
        }
        ledger.image_taken();
        ledger.life_ends();
        ledger.is_alive(MIN, now + MIN * 2);
        assert_eq!(ledger.judge(&killed(7)), Answer::Back);
    }

    proptest! {
        /// Without a new image the job goes back only a few times, and never twice for the same process.
        #[test]
        fn no_job_goes_back_for_ever(deaths in proptest::collection::vec((1i32..9, any::<bool>()), 0..60)) {
            let (mut ledger, mut now) = (Ledger::default(), Instant::now());
            let mut back = Vec::new();
            for (pid, lives) in deaths {
                now += MIN;
                if lives {
                    ledger.is_alive(MIN, now);
                }
                if ledger.died(killed(pid), now) == Answer::Back {
                    prop_assert!(!back.contains(&pid));
                    back.push(pid);
                    ledger.life_ends();
                }
                prop_assert!(back.len() <= 3);
            }
        }
    }
}

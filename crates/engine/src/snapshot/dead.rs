//! Processes of the job that a signal killed, and whose parent has not waited for them.
//!
//! ```text
//!  preflight   a process was killed just now? no snapshot                           job runs
//!  dump        a process was killed before the freeze, and its parent does not
//!              know yet: this attempt fails                                         job is frozen
//!  afterwards  wait until the parent has waited for it, and a moment more for its
//!              reaction; take the snapshot again, if the job still runs             job runs
//! ```
//!
//! Such a death often ends the whole job, because the parent gives up. An image taken between the death and the
//! parent's wait(2) would end the same after each restore. If the parent learns of the death while the job runs, it
//! either continues, and the next image is clean; or it ends the job, and the image before the death is restored.
//!
//! A parent may also never wait for its children. So a process that has been dead for `PATIENCE` does not delay a
//! snapshot, and neither does any once all of this has taken [`LIMIT`].
//!
//! A process whose first thread has ended, and whose others have not, ends soon. CRIU refuses it, so a snapshot waits
//! before it stops anything. A process that uses CUDA is in this state for about a tenth of a second whenever it ends.
//!
//! A process that is gone is not affected: the kernel has a dead process only until its parent has waited for it, or
//! ignores it.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rekindle_os::process;
use rekindle_os::spawn::Ended;

/// After this time without a wait, the parent counts as one that never waits.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long dead processes may delay one snapshot: a job that kills its children all the time always has one.
pub const LIMIT: Duration = Duration::from_secs(15);
/// Time for a parent that has just learned of a death to end the job.
pub const AFTERMATH: Duration = Duration::from_secs(1);
/// How long a snapshot waits for processes that are ending.
const ENDING: Duration = Duration::from_secs(3);
const PAUSE: Duration = Duration::from_millis(5);

/// Identifies a process: its pid as we see it, and its start time, because pids are reused.
pub(crate) type Key = (i32, u64);

/// Deaths seen by earlier attempts, so that a process that stays dead delays only one snapshot.
#[derive(Debug, Default)]
pub struct Deaths(Mutex<BTreeMap<Key, Instant>>);

/// Processes that a signal killed and that nobody has waited for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unnoticed(Vec<Dead>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct Dead {
    /// Its pid as it sees itself.
    pid: i32,
    name: String,
    signal: i32,
}

impl std::fmt::Display for Unnoticed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let each = self.0.iter().map(|Dead { pid, name, signal }| {
            format!("process {pid} ({name}) was killed by {}", Ended::Signal(*signal))
        });
        write!(f, "{}, and its parent has not collected its exit status", each.collect::<Vec<_>>().join(", "))
    }
}

/// The dead processes of a tree.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Dead processes that delay a snapshot.
    pub(super) fresh: Option<Unnoticed>,
    /// Dead processes that no longer delay a snapshot.
    pub(super) old: Option<Unnoticed>,
    /// All processes of the tree, so that a frozen tree need not be listed again.
    pub(super) tree: Vec<i32>,
}

impl Deaths {
    /// Examines the tree below `root`.
    pub(super) fn look(&self, root: i32) -> Look {
        let tree = process::tree(root);
        let dead: Vec<(Key, Dead)> = tree.iter().copied().filter_map(dead).collect();
        let old = self.long_dead(dead.iter().map(|(key, _)| *key), Instant::now());
        let (old, fresh): (Vec<_>, Vec<_>) = dead.into_iter().zip(old).partition(|(_, old)| *old);
        let some = |all: Vec<((Key, Dead), bool)>| {
            let all: Vec<Dead> = all.into_iter().map(|((_, dead), _)| dead).collect();
            (!all.is_empty()).then_some(Unnoticed(all))
        };
        Look { fresh: some(fresh), old: some(old), tree }
    }

    /// Whether each of these has been dead for so long that it does not delay a snapshot. Forgets all others.
    pub fn long_dead(&self, keys: impl Iterator<Item = Key>, now: Instant) -> Vec<bool> {
        let since = self.since(keys, now);
        since.into_iter().map(|since| now.saturating_duration_since(since) >= PATIENCE).collect()
    }

    /// The time at which each was first seen dead. Forgets all others.
    fn since(&self, keys: impl Iterator<Item = Key>, now: Instant) -> Vec<Instant> {
        let mut seen = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let keys: Vec<Key> = keys.collect();
        seen.retain(|key, _| keys.contains(key));
        keys.into_iter().map(|key| *seen.entry(key).or_insert(now)).collect()
    }

    /// Waits until no dead process delays a snapshot any more. Returns false if it was cancelled, the job has ended, or
    /// `until` has passed.
    pub(super) fn wait(&self, root: i32, until: Instant, over: &dyn Fn() -> bool) -> bool {
        while !over() && Instant::now() < until {
            let look = self.look(root);
            if look.fresh.is_some() {
                std::thread::sleep(PAUSE);
                continue;
            }
            // The parent of a process that was not waited for in all this time will not react to it.
            let aftermath = if look.old.is_some() { Instant::now() } else { Instant::now() + AFTERMATH };
            while !over() && Instant::now() < aftermath {
                std::thread::sleep(PAUSE);
            }
            return !over();
        }
        false
    }
}

/// Latest time to which deaths may delay a snapshot that begins now.
pub(super) fn limit() -> Instant {
    Instant::now() + LIMIT
}

/// Waits until no process below `root` is ending, for a short time. Returns false if one still is: its other threads
/// may run for as long as the job does.
pub(super) fn let_end(root: i32, over: &dyn Fn() -> bool) -> bool {
    let is_ending = |pid: i32| process::state(pid) == Some('Z') && process::threads(pid).len() > 1;
    let until = Instant::now() + ENDING;
    while process::tree(root).into_iter().any(is_ending) {
        if over() || Instant::now() >= until {
            return false;
        }
        std::thread::sleep(PAUSE);
    }
    true
}

fn dead(pid: i32) -> Option<(Key, Dead)> {
    let Some(Ended::Signal(signal)) = process::ended(pid) else { return None };
    let dead = Dead { pid: process::inner_pid(pid)?, name: process::name(pid).unwrap_or_default(), signal };
    Some(((pid, process::start_time(pid)?), dead))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_os::spawn::{Child, Spawn};

    /// A known child: others are reaped where another test ends a world, perhaps before they are looked at here.
    fn child(program: &str, args: &[&str]) -> Child {
        Spawn::new(std::path::Path::new(program), args).unwrap().dies_with_us().start().unwrap()
    }

    #[test]
    fn a_death_by_a_signal_is_seen_until_it_is_waited_for() {
        if !rekindle_testing::root() {
            return;
        }
        let deaths = Deaths::default();
        let me = std::process::id().cast_signed();
        let sleep = child("/bin/sleep", &["60"]);
        let pid = sleep.pid();
        let sees = |look: &Option<Unnoticed>| look.as_ref().is_some_and(|all| all.0.iter().any(|dead| dead.pid == pid));
        assert!(!sees(&deaths.look(me).fresh));
        sleep.signal(libc::SIGKILL).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        while !sees(&deaths.look(me).fresh) {
            assert!(Instant::now() < deadline);
            std::thread::sleep(Duration::from_millis(1));
        }
        let words = deaths.look(me).fresh.unwrap().to_string();
        assert!(words.contains(&format!("process {pid} (sleep) was killed by signal SIGKILL")), "{words}");
        sleep.wait().unwrap();
        let look = deaths.look(me);
        assert!(!sees(&look.fresh) && !sees(&look.old));
        // A process that exited by itself does not count.
        let sh = child("/bin/sh", &["-c", "exit 3"]);
        let pid = sh.pid();
        while process::ended(pid).is_none() {
            assert!(Instant::now() < deadline, "{:?}", std::fs::read_to_string(format!("/proc/{pid}/stat")));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(dead(pid).is_none());
        sh.wait().unwrap();
    }

    #[test]
    fn one_that_stays_dead_holds_up_nothing_after_a_while() {
        let (deaths, now) = (Deaths::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        assert_eq!(deaths.since([(1, 10)].into_iter(), at(0)), [at(0)]);
        assert_eq!(deaths.since([(1, 10), (2, 11)].into_iter(), at(3)), [at(0), at(3)]);
        assert_eq!(deaths.since([(1, 12)].into_iter(), at(9)), [at(9)], "the pid is another's now");
        assert_eq!(deaths.since([(2, 11)].into_iter(), at(9)), [at(9)], "it was forgotten meanwhile");
    }
}

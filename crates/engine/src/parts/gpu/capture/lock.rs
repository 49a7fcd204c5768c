//! Locks processes that wait for each other.
//!
//! A locked process starts no more GPU work, and the driver's lock call returns when its work has left the GPU. A
//! collective's kernel stays on the GPU until all ranks have started theirs. If a rank is locked before it has started
//! its kernel, the others' kernels wait for ever. A rank that is always late (slower data, for example) is nearly
//! always locked too early.
//!
//! So ranks that lock early are unlocked again while the other lock requests stay pending. This is done in two forms,
//! in turn. Short: the rank starts its next work, and is asked again before it starts more. Long: the ranks run until
//! the others are locked. Late ranks catch up, which can take a while, and are then asked again. Ranks that got ahead
//! are treated in the same way, until all are locked or the time limit is reached.

use std::hash::{BuildHasher, RandomState};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// In a short turn: time without any change before locked ranks are unlocked for a moment.
const BRIEF: Duration = Duration::from_millis(25);

/// The sequence of turns: short ones, then a long one, which waits as long as the short ones together. Their number
/// doubles each time. A long turn waits at least a third of the time that has passed. A late process may simply have
/// much work, and unlocking the others only gives them more. If each has work for a second and none waits for another,
/// only a long turn locks all.
#[derive(Debug)]
struct Turns {
    brief_ones: u32,
    left: u32,
}

impl Turns {
    const FIRST: Turns = Turns { brief_ones: 2, left: 2 };

    fn is_brief(&self) -> bool {
        self.left > 0
    }

    /// Time without any change before locked ranks are unlocked.
    fn patience(&self, so_far: Duration) -> Duration {
        if self.is_brief() { BRIEF } else { (BRIEF * self.brief_ones).max(so_far / 3) }
    }

    fn next(&mut self) {
        if self.is_brief() {
            self.left -= 1;
        } else {
            self.brief_ones *= 2;
            self.left = self.brief_ones;
        }
    }
}

/// How far the lock of a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LockState {
    Free,
    Asked,
    Locked,
}

/// What happens to locked ranks while others are not locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Resting {
    /// They are unlocked again.
    LetGo,
    /// They stay locked. For processes that do not wait for each other and have work for seconds: unlocking would only
    /// give them more work.
    Held,
}

impl Resting {
    pub(super) fn other(self) -> Resting {
        match self {
            Resting::LetGo => Resting::Held,
            Resting::Held => Resting::LetGo,
        }
    }
}

/// Locks `count` processes within `timeout`; returns which are locked, and the first failure. `lock` gets its time
/// limit.
pub(super) fn together<E: Send>(
    count: usize,
    timeout: Duration,
    resting: Resting,
    lock: impl Fn(usize, Duration) -> Result<(), E> + Sync,
    unlock: impl Fn(usize) -> Result<(), E>,
) -> (Vec<bool>, Result<(), E>) {
    let began = Instant::now();
    let deadline = began + timeout;
    let mut locks = vec![LockState::Free; count];
    let mut result = Ok(());
    let (told, answers) = mpsc::channel();
    let ask_one = &|at| {
        // The driver takes 0 as no limit.
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let _ = told.send((at, lock(at, left)));
    };
    thread::scope(|scope| {
        let ask = |locks: &mut [LockState]| {
            for (at, state) in locks.iter_mut().enumerate().filter(|(_, state)| **state == LockState::Free) {
                *state = LockState::Asked;
                let work = move || ask_one(at);
                // If no thread can be started, lock on this one: the other results wait meanwhile.
                if thread::Builder::new().spawn_scoped(scope, work).is_err() {
                    work();
                }
            }
        };
        let mut turns = Turns::FIRST;
        while result.is_ok() && locks.contains(&LockState::Free) {
            ask(&mut locks);
            while locks.contains(&LockState::Asked) {
                match answers.recv_timeout(turns.patience(began.elapsed())) {
                    Ok((at, outcome)) => {
                        if let Some(state) = locks.get_mut(at) {
                            *state = if outcome.is_ok() { LockState::Locked } else { LockState::Free };
                        }
                        result = std::mem::replace(&mut result, Ok(())).and(outcome);
                    }
                    Err(RecvTimeoutError::Timeout)
                        if resting == Resting::LetGo && result.is_ok() && locks.contains(&LockState::Locked) =>
                    {
                        tracing::debug!(?turns, ?locks, "some processes wait for locked ones");
                        result = let_go(&mut locks, &unlock);
                        if result.is_ok() && turns.is_brief() {
                            thread::sleep(moment());
                            ask(&mut locks);
                        }
                        turns.next();
                    }
                    Err(_) => {}
                }
            }
        }
    });
    (locks.iter().map(|state| *state == LockState::Locked).collect(), result)
}

/// Unlocks the locked ranks.
fn let_go<E>(locks: &mut [LockState], unlock: impl Fn(usize) -> Result<(), E>) -> Result<(), E> {
    for (at, state) in locks.iter_mut().enumerate().filter(|(_, state)| **state == LockState::Locked) {
        unlock(at)?;
        *state = LockState::Free;
    }
    Ok(())
}

/// A random time from 10 us to 2.5 ms: the time between two collectives of a rank is not known, and differs from job to
/// job.
fn moment() -> Duration {
    // Each hasher has another random seed.
    Duration::from_micros(10 << (RandomState::new().hash_one(0) % 9))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Condvar, Mutex};

    use super::*;

    /// A rank. While locked it starts nothing; a collective that it started ends once all have started it.
    #[derive(Debug, Default, Clone, Copy)]
    struct Rank {
        closed: bool,
        begun: u64,
        locks: u32,
    }

    #[derive(Debug)]
    struct World {
        ranks: Mutex<Vec<Rank>>,
        changed: Condvar,
        over: AtomicBool,
    }

    impl World {
        fn new(count: usize) -> World {
            World {
                ranks: Mutex::new(vec![Rank::default(); count]),
                changed: Condvar::new(),
                over: AtomicBool::new(false),
            }
        }

        /// One collective after the other. `late` is the delay before each, besides the time for a launch.
        fn work(&self, at: usize, late: Duration) {
            let done = |ranks: &Vec<Rank>| ranks.iter().map(|rank| rank.begun).min().unwrap();
            while !self.over.load(Ordering::Relaxed) {
                thread::sleep(late + Duration::from_micros(200));
                let mut ranks = self.ranks.lock().unwrap();
                while !self.over.load(Ordering::Relaxed) && (ranks[at].closed || ranks[at].begun > done(&ranks)) {
                    ranks = self.changed.wait_timeout(ranks, Duration::from_millis(5)).unwrap().0;
                }
                ranks[at].begun += 1;
                self.changed.notify_all();
            }
        }

        fn lock(&self, at: usize, timeout: Duration) -> Result<(), &'static str> {
            let mut ranks = self.ranks.lock().unwrap();
            ranks[at].closed = true;
            ranks[at].locks += 1;
            let busy = |ranks: &mut Vec<Rank>| ranks[at].begun > ranks.iter().map(|rank| rank.begun).min().unwrap();
            let (mut ranks, timed) = self.changed.wait_timeout_while(ranks, timeout, busy).unwrap();
            if timed.timed_out() {
                ranks[at].closed = false;
                return Err("not ready");
            }
            Ok(())
        }

        fn unlock(&self, at: usize) -> Result<(), &'static str> {
            self.ranks.lock().unwrap()[at].closed = false;
            self.changed.notify_all();
            Ok(())
        }

        fn locks(&self) -> Vec<u32> {
            self.ranks.lock().unwrap().iter().map(|rank| rank.locks).collect()
        }
    }

    #[test]
    fn ranks_that_are_always_late_are_waited_for() {
        for late in [&[0, 30][..], &[20, 0], &[0, 20, 40, 0], &[0, 0, 0]] {
            let world = World::new(late.len());
            thread::scope(|scope| {
                for (at, late) in late.iter().enumerate() {
                    let world = &world;
                    scope.spawn(move || world.work(at, Duration::from_millis(*late)));
                }
                for _ in 0..5 {
                    thread::sleep(Duration::from_millis(70));
                    let limit = Duration::from_secs(20);
                    let (locked, result) = together(
                        late.len(),
                        limit,
                        Resting::LetGo,
                        |at, left| world.lock(at, left),
                        |at| world.unlock(at),
                    );
                    let rest = world.ranks.lock().unwrap().clone();
                    (0..late.len()).for_each(|at| world.unlock(at).unwrap());
                    if result.is_err() || locked.contains(&false) || rest.iter().any(|r| r.begun != rest[0].begun) {
                        world.over.store(true, Ordering::Relaxed);
                        panic!("{late:?}: {result:?} {locked:?} {rest:?}");
                    }
                }
                world.over.store(true, Ordering::Relaxed);
            });
        }
    }

    #[test]
    fn one_that_is_just_busy_does_not_have_the_others_asked_for_ever() {
        let world = World::new(2);
        // Rank 0 has started a kernel that does not end for 400 ms.
        world.ranks.lock().unwrap()[0].begun = 1;
        let began = Instant::now();
        let asked = thread::scope(|scope| {
            let busy = scope.spawn(|| {
                thread::sleep(Duration::from_millis(400));
                let mut ranks = world.ranks.lock().unwrap();
                let asked = ranks[0].locks;
                ranks[1].begun = 1;
                world.changed.notify_all();
                asked
            });
            let limit = Duration::from_secs(20);
            let (locked, result) =
                together(2, limit, Resting::LetGo, |at, left| world.lock(at, left), |at| world.unlock(at));
            assert_eq!((locked, result), (vec![true, true], Ok(())));
            busy.join().unwrap()
        });
        // Once it has answered, it may have to wait for the other one.
        assert_eq!(asked, 1, "what is asked for stays asked for");
        // 16, unless the thread above came late.
        let most = began.elapsed().as_millis() / BRIEF.as_millis();
        assert!(u128::from(world.locks()[1]) <= most, "{:?} of {most}", world.locks());
    }

    /// Each has 400 ms of work after 400 ms of work, out of step, and starts the next as soon as it can.
    #[test]
    fn those_that_wait_for_nobody_are_held_until_all_rest() {
        const WORK: Duration = Duration::from_millis(400);
        for phases in [[50, 150], [100, 200]] {
            let began = Instant::now();
            let ends: Vec<_> = phases.iter().map(|phase| began + Duration::from_millis(*phase)).collect();
            let ends = Mutex::new(ends);
            let lock = |at: usize, left| {
                let mut all = ends.lock().unwrap();
                while all[at] < Instant::now() {
                    all[at] += WORK;
                }
                let rest = all[at] - Instant::now();
                drop(all);
                thread::sleep(rest.min(left));
                if rest <= left { Ok(()) } else { Err("not ready") }
            };
            let unlock = |at: usize| {
                ends.lock().unwrap()[at] = Instant::now() + WORK;
                Ok(())
            };
            let (locked, result) = together(phases.len(), 100 * WORK, Resting::LetGo, lock, unlock);
            assert_eq!((locked, result), (vec![true; phases.len()], Ok(())), "{phases:?}");
        }
    }

    #[test]
    fn those_that_are_held_are_asked_once() {
        let work = |at: usize, _| {
            thread::sleep(Duration::from_millis(if at == 0 { 200 } else { 0 }));
            Ok::<_, &str>(())
        };
        let never = |at: usize| panic!("{at} was let go");
        let (locked, result) = together(2, Duration::from_secs(20), Resting::Held, work, never);
        assert_eq!((locked, result), (vec![true, true], Ok(())));
    }

    #[test]
    fn a_failure_is_told_with_those_that_are_locked() {
        let lock = |at: usize, _| if at == 1 { Err("gone") } else { Ok(()) };
        let (locked, result) = together(3, Duration::from_secs(1), Resting::Held, lock, |_| Ok(()));
        assert_eq!((locked, result), (vec![true, false, true], Err("gone")));
    }

    #[test]
    fn the_time_is_bounded_where_one_never_rests() {
        let world = World::new(2);
        world.ranks.lock().unwrap()[0].begun = 1;
        let began = Instant::now();
        let limit = Duration::from_millis(300);
        let (locked, result) =
            together(2, limit, Resting::LetGo, |at, left| world.lock(at, left), |at| world.unlock(at));
        assert_eq!((locked[0], result), (false, Err("not ready")));
        assert!(began.elapsed() >= limit && began.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn a_lock_that_can_not_be_taken_back_is_a_failure() {
        let world = World::new(2);
        world.ranks.lock().unwrap()[0].begun = 1;
        // So long that none is told that the time is over before the other one is asked for back.
        let limit = Duration::from_secs(10);
        let (locked, result) = together(2, limit, Resting::LetGo, |at, left| world.lock(at, left), |_| Err("stuck"));
        assert_eq!((locked, result), (vec![false, true], Err("stuck")));
    }
}

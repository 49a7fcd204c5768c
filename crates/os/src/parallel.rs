//! The same work for many items, on a few threads.

use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Runs `work` for all items at once, each on its own thread, and returns the results in their order. For work that
/// mostly waits.
pub fn at_once<T: Send, R: Send>(items: impl IntoIterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut items: Vec<T> = items.into_iter().collect();
    if items.len() == 1 {
        return items.pop().map(work).into_iter().collect();
    }
    thread::scope(|scope| {
        let threads: Vec<_> = items.into_iter().map(|item| scope.spawn(|| work(item))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

/// Runs `work` for each item, the last first, until one fails. Uses at most `threads` threads, and no more than there
/// are cores. The results are unordered.
///
/// # Errors
/// A failure of `work`; other threads finish the items that they have begun.
pub fn in_parallel<T, R, E>(items: Vec<T>, threads: usize, work: impl Fn(T) -> Result<R, E> + Sync) -> Result<Vec<R>, E>
where
    T: Send,
    R: Send,
    E: Send,
{
    let threads = cores().min(threads).min(items.len());
    let queue = Mutex::new(items);
    let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || queue().pop();
    let run = || {
        let done = std::iter::from_fn(next).map(&work).collect::<Result<Vec<R>, E>>();
        done.inspect_err(|_| queue().clear())
    };
    thread::scope(|scope| {
        // A helper that cannot be started is not necessary: the running threads share the work.
        let helpers = (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, run).ok());
        let helpers: Vec<_> = helpers.collect();
        let mut done = run();
        for helper in helpers {
            let more = helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            done = done.and_then(|mut done| {
                done.extend(more?);
                Ok(done)
            });
        }
        done
    })
}

/// Cores that this process may use.
#[must_use]
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_work_is_done_once() {
        for n in [0_u64, 1, 2, 1000] {
            let mut done = in_parallel((0..n).collect(), 8, Ok::<_, ()>).unwrap();
            done.sort_unstable();
            assert_eq!(done, (0..n).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_failure_is_the_answer_and_ends_the_work() {
        let looked_at = std::sync::atomic::AtomicUsize::new(0);
        let work = |i: u32| {
            looked_at.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // The last item fails at once. The others wait, so that the failure comes before the queue is empty.
            thread::sleep(std::time::Duration::from_millis(u64::from(i != 0)));
            if i == 0 { Err("no") } else { Ok(()) }
        };
        let items = (1..10_000).chain([0]).collect();
        assert_eq!(in_parallel(items, 8, work).map(|all| all.len()), Err("no"));
        assert!(looked_at.into_inner() < 10_000);
    }
}

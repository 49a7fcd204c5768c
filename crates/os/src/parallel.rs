//! The same work for many items, on a few threads.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread;

/// Runs `work` for all items at once, each on its own thread, and returns the results in their order. For work that
/// mostly waits. Items for which no thread can be started are done on this one, while the others run.
pub fn at_once<T: Send, R: Send>(items: impl IntoIterator<Item = T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut items: Vec<T> = items.into_iter().collect();
    if items.len() == 1 {
        return items.pop().map(work).into_iter().collect();
    }
    // A thread that cannot be started loses what it was given.
    let items: Vec<_> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    let run = &|item: &Mutex<Option<T>>| {
        let item = item.lock().unwrap_or_else(PoisonError::into_inner).take();
        item.map(&work)
    };
    thread::scope(|scope| {
        let start = |item| (item, thread::Builder::new().spawn_scoped(scope, move || run(item)));
        let started: Vec<_> = items.iter().map(start).collect();
        let here = started.into_iter().map(|(item, thread)| thread.map_err(|_| run(item)));
        let done: Vec<_> = here.collect();
        let join = |thread: thread::ScopedJoinHandle<'_, _>| thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        done.into_iter().filter_map(|done| done.map_or_else(|here| here, join)).collect()
    })
}

/// Runs `work`, and `helper` on another thread until then: its channel is closed when the work ends. Without a thread
/// only the work is done.
pub fn with_helper<T>(helper: impl FnOnce(&mpsc::Receiver<()>) + Send, work: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        let (done, over) = mpsc::channel();
        let _helper = thread::Builder::new().spawn_scoped(scope, move || helper(&over));
        let result = work();
        drop(done);
        result
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
    in_parallel_from(items.into_iter().rev(), threads, work)
}

/// The same for items that are made only when a thread takes them, the first one first.
///
/// # Errors
/// As [`in_parallel`].
pub fn in_parallel_from<T, R, E>(
    mut items: impl Iterator<Item = T> + Send,
    threads: usize,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E>
where
    T: Send,
    R: Send,
    E: Send,
{
    // No thread is started that would find nothing to do.
    let first: Vec<T> = items.by_ref().take(cores().min(threads).max(1)).collect();
    let threads = first.len();
    let queue = Mutex::new(Some(first.into_iter().chain(items)));
    let queue = || queue.lock().unwrap_or_else(PoisonError::into_inner);
    let next = || queue().as_mut().and_then(Iterator::next);
    let run = || {
        let done = std::iter::from_fn(next).map(&work).collect::<Result<Vec<R>, E>>();
        done.inspect_err(|_| *queue() = None)
    };
    thread::scope(|scope| {
        // A helper that cannot be started is not necessary: the running threads share the work.
        let helpers = (1..threads).filter_map(|_| thread::Builder::new().spawn_scoped(scope, run).ok());
        let helpers: Vec<_> = helpers.collect();
        let mut done = run();
        for helper in helpers {
            let more = helper.join().unwrap_or_else(|panic| resume_unwind(panic));
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
    use rekindle_testing::threads::without_threads;

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
    fn without_threads_the_work_is_done_here() {
        let done = without_threads(|| at_once(1..=5, |n| (n, thread::current().id())));
        assert_eq!(done.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert!(done.iter().all(|(_, thread)| *thread == done[0].1));
    }

    #[test]
    fn a_helper_ends_with_the_work_and_is_not_necessary() {
        let helped = std::sync::atomic::AtomicBool::new(false);
        let helper =
            |over: &mpsc::Receiver<()>| helped.store(over.recv().is_err(), std::sync::atomic::Ordering::Relaxed);
        assert_eq!(with_helper(helper, || 1), 1);
        assert!(helped.into_inner());
        assert_eq!(without_threads(|| with_helper(|_| unreachable!(), || 2)), 2);
    }

    #[test]
    fn items_are_made_when_they_are_taken() {
        let stops_at = |at: u64| move |n: u64| if n < at { Ok(()) } else { Err(n) };
        // Nobody could make all of these first.
        assert!(in_parallel_from(0..u64::MAX, 8, stops_at(1000)).is_err());
        assert_eq!(in_parallel_from(0..0, 8, stops_at(0)), Ok(vec![]));
    }

    #[test]
    fn a_failure_is_the_answer_and_ends_the_work() {
        let looked_at = std::sync::atomic::AtomicUsize::new(0);
        let work = |i: u32| {
            looked_at.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            // The last item fails at once. The others wait, so that the failure comes before the queue is empty, also
            // if the thread that has it gets no processor for a while.
            thread::sleep(std::time::Duration::from_millis(10 * u64::from(i != 0)));
            if i == 0 { Err("no") } else { Ok(()) }
        };
        let items = (1..10_000).chain([0]).collect();
        assert_eq!(in_parallel(items, 8, work).map(|all| all.len()), Err("no"));
        assert!(looked_at.into_inner() < 10_000);
    }
}

//! Fetches one image while somebody waits for the job to start: logs the progress, and tries again if the replica fails.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use crate::supervisor::notify::Notify;
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_replica::{Error, Replica};
use rekindle_store::persist::Progress;
use rekindle_store::{Image, ImageId, JobFolder, WriterLock};

/// How often a fetch logs its progress.
const SAY: Duration = Duration::from_secs(3);
/// How long a fetch is tried again if no attempt fetches anything that stays here.
const LIMIT: Duration = Duration::from_secs(300);
/// Time between two attempts. The replica itself waits within one, too.
const PAUSE: Duration = Duration::from_secs(5);

/// Fetches an image, and tries again while the replica fails. What was fetched stays, so the next attempt needs less.
pub(super) fn patiently(replica: &Replica, folder: &JobFolder, lock: &WriterLock, id: ImageId) -> Result<Image, Error> {
    let attempt = || {
        let progress = Progress::default();
        let fetched = with_progress(replica, folder, lock, id, &progress);
        (fetched, progress.bytes().1)
    };
    again(attempt, LIMIT, |error| {
        tracing::warn!("cannot fetch image {id} from the replica: {}. Trying again", chain(error));
        Notify::from_environment().waiting("the replica cannot be reached: trying again");
        thread::sleep(PAUSE);
    })
}

/// Fetches an image, and does not try again.
pub(super) fn once(replica: &Replica, folder: &JobFolder, lock: &WriterLock, id: ImageId) -> Result<Image, Error> {
    with_progress(replica, folder, lock, id, &Progress::default())
}

/// Tries until there is a result that time does not change, or nothing new was fetched for `limit`. An attempt answers
/// also how many bytes were missing when it began; 0 if it did not get that far.
fn again<T>(
    mut attempt: impl FnMut() -> (Result<T, Error>, u64),
    limit: Duration,
    mut wait: impl FnMut(&Error),
) -> Result<T, Error> {
    let (mut since, mut least) = (Instant::now(), u64::MAX);
    loop {
        let (result, missing) = attempt();
        match result {
            Err(error) if error.may_pass() => {
                if (1..least).contains(&missing) {
                    (since, least) = (Instant::now(), missing);
                }
                if since.elapsed() >= limit {
                    return Err(error);
                }
                wait(&error);
            }
            result => return result,
        }
    }
}

/// Fetches, and logs the progress every few seconds.
fn with_progress(
    replica: &Replica,
    folder: &JobFolder,
    lock: &WriterLock,
    id: ImageId,
    progress: &Progress,
) -> Result<Image, Error> {
    let began = Instant::now();
    let (done, waiting) = mpsc::channel::<()>();
    let manager = Notify::from_environment();
    manager.fetching(id.sequence(), progress);
    thread::scope(|scope| {
        let say = move || {
            while waiting.recv_timeout(SAY) == Err(RecvTimeoutError::Timeout) {
                manager.fetching(id.sequence(), progress);
                let (bytes, total) = progress.bytes();
                let rate = bytes / began.elapsed().as_secs().max(1);
                tracing::info!("image {id}: {} of {} fetched, {}/s", size(bytes), size(total), size(rate));
            }
        };
        // If the thread cannot be started, only the progress is missing.
        let _ = thread::Builder::new().name("progress".into()).spawn_scoped(scope, say);
        let fetched = replica.fetch(id, folder, lock, folder.trust().key(), progress, &|| false);
        drop(done);
        fetched
    })
}

#[cfg(test)]
mod tests {
    use rekindle_replica::Failure;

    use super::*;

    fn remote(failure: Failure) -> Error {
        Error::Remote { url: "s3://b/p".into(), action: "read packs/1.pack from".into(), failure }
    }

    fn busy() -> Error {
        remote(Failure::Status { status: 503, code: Some("SlowDown".into()) })
    }

    /// What these attempts come to, and how many were made.
    fn play(attempts: Vec<(Result<u8, Error>, u64)>, limit: Duration) -> (Result<u8, Error>, usize) {
        let (mut attempts, mut waits) = (attempts.into_iter(), 0);
        let result = again(|| attempts.next().expect("no further attempt"), limit, |_| waits += 1);
        (result, waits + 1)
    }

    #[test]
    fn what_may_pass_is_tried_again_and_nothing_else() {
        let long = Duration::from_secs(3600);
        let gone = || remote(Failure::NotThere { code: None });
        let (result, attempts) = play(vec![(Err(busy()), 0), (Err(gone()), 0), (Err(busy()), 9), (Ok(1), 9)], long);
        assert_eq!((result.unwrap(), attempts), (1, 4));
        let full = Error::Write { path: "/p".into(), source: std::io::ErrorKind::StorageFull.into() };
        let refused = remote(Failure::Refused { code: None, help: "" });
        for error in [full, refused] {
            let (result, attempts) = play(vec![(Err(error), 9)], long);
            assert!(result.is_err() && attempts == 1);
        }
        // Time is over.
        let (result, attempts) = play(vec![(Err(busy()), 0)], Duration::ZERO);
        assert!(matches!(result, Err(Error::Remote { .. })) && attempts == 1);
    }
}

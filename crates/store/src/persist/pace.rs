//! The progress of packing, its rate limit, and its cancellation.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The progress, which other threads read meanwhile.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    written: AtomicU64,
    begun: OnceLock<Instant>,
}

impl Progress {
    /// Bytes of the image that are processed, and the total.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Bytes written to the disk.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Relaxed)
    }

    /// Bytes of the image processed per second, so far.
    #[must_use]
    pub fn rate(&self) -> u64 {
        let elapsed = self.begun.get().map_or(0, |begun| begun.elapsed().as_millis());
        let rate = u128::from(self.bytes().0) * 1000 / elapsed.max(1);
        u64::try_from(rate).unwrap_or(u64::MAX)
    }

    pub(crate) fn begin(&self, total: u64) {
        let _ = self.begun.set(Instant::now());
        // It may be another attempt.
        self.done.store(0, Ordering::Relaxed);
        self.written.store(0, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// Increases the total.
    pub fn expect(&self, more: u64) {
        self.total.fetch_add(more, Ordering::Relaxed);
    }

    /// Counts bytes of the image as processed.
    pub fn add(&self, done: usize) {
        self.done.fetch_add(u64::try_from(done).unwrap_or(u64::MAX), Ordering::Relaxed);
    }
}

/// Keeps all threads together below the rate; only written bytes count.
pub(super) struct Pace<'a> {
    pub(super) began: Instant,
    pub(super) rate: Option<u64>,
    pub(super) progress: &'a Progress,
    pub(super) cancelled: &'a (dyn Fn() -> bool + Sync),
}

/// Maximum sleep between two checks for cancellation.
const NAP: Duration = Duration::from_millis(50);

impl Pace<'_> {
    /// Waits if more was written than the rate allows.
    pub(super) fn wrote(&self, bytes: u64) -> io::Result<()> {
        let written = self.progress.written.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        let due = self.rate.map_or(Duration::ZERO, |rate| time_for(written, rate));
        loop {
            self.check()?;
            match due.checked_sub(self.began.elapsed()) {
                Some(rest) if !rest.is_zero() => std::thread::sleep(rest.min(NAP)),
                _ => return Ok(()),
            }
        }
    }

    /// Fails if it was cancelled.
    pub(super) fn check(&self) -> io::Result<()> {
        if (self.cancelled)() { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
    }
}

fn time_for(bytes: u64, rate: u64) -> Duration {
    let micros = u128::from(bytes) * 1_000_000 / u128::from(rate.max(1));
    Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
}

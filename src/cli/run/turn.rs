//! What `run` says while it waits for the store's lock, which a supervisor on another machine may hold.

use std::path::Path;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};

use crate::supervisor::notify::{EXTEND_EVERY, Notify};
use rekindle_base::units::moment;
use rekindle_store::{Holder, JobName, Until, Waiting};

/// A time that has moved by this much is told again.
const MOVED: Duration = Duration::from_secs(10);

/// What was said so far.
#[derive(Debug)]
pub(super) struct Report<'a> {
    job: &'a JobName,
    manager: Notify,
    told: Option<(Until, DateTime<Utc>)>,
    extended: Option<Instant>,
}

impl Report<'_> {
    pub(super) fn new(job: &JobName) -> Report<'_> {
        Report { job, manager: Notify::from_environment(), told: None, extended: None }
    }

    /// Logs what is waited for, when that has changed, and tells the service manager.
    pub(super) fn tell(&mut self, waiting: &Waiting<'_>) {
        let end = Utc::now() + waiting.left;
        let is_news = self.told.is_none_or(|(until, told)| {
            until != waiting.until || (end - told).abs().to_std().unwrap_or_default() > MOVED
        });
        if is_news {
            self.told = Some((waiting.until, end));
            tracing::warn!("{}", text(self.job, waiting.holder, waiting.until, end, waiting.file));
        }
        let now = Instant::now();
        if is_news || self.extended.is_none_or(|at| now.saturating_duration_since(at) >= EXTEND_EVERY) {
            self.extended = Some(now);
            let host = &waiting.holder.host;
            self.manager.waiting(&format!("waiting until {} for the supervisor on host {host}", moment(end)));
        }
    }
}

fn text(job: &JobName, holder: &Holder, until: Until, end: DateTime<Utc>, file: &Path) -> String {
    let end = moment(end);
    match until {
        Until::TakenOver => format!(
            "job \"{job}\" may be supervised by {holder}: waiting until {end} for its next heartbeat. Without one this run \
            continues the job; with one it ends. If that supervisor is dead, empty {} to continue at once",
            file.display()
        ),
        Until::Refused => format!(
            "job \"{job}\" is locked by {holder}, on another machine: waiting until {end} for the lock. If that supervisor \
            renews its heartbeat before, this run ends"
        ),
    }
}

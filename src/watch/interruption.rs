//! Asks the clouds whether they interrupt this machine: spot and pre-emptible machines, and maintenance.
//!
//! Each cloud answers at the same link-local address, which does not leave the machine's host. On a machine
//! outside the clouds that address may belong to anybody, or lead to a router: nothing is asked there ([`detect`]).
//!
//! Answers are not trusted: they have a size and a time limit, redirections are not followed, no proxy is used, and
//! their text never reaches the log. An answer that cannot be parsed changes nothing. A missing answer changes nothing
//! either: earlier notices remain in force.
//!
//! This module only reads; the owner decides what to do. The owner also sends the acknowledgement for Azure
//! ([`azure::acknowledge`]), once the final image is stored.

pub(crate) mod aws;
pub(crate) mod azure;
pub(crate) mod client;
pub(crate) mod detect;
pub(crate) mod google;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rekindle_base::chain;
use rekindle_base::notice::{Cloud, Notice};

use client::{Client, Error};

/// The time between two requests, as AWS recommends.
const EVERY: Duration = Duration::from_secs(5);
/// The longest pause after failures.
const LONGEST: Duration = Duration::from_secs(60);
/// After this many failures in a row they are logged: clouds' services sometimes do not answer one request.
const TOLERATED: u32 = 3;
/// The most notices that one answer may contain. Azure announces the events of a group of machines together.
pub(crate) const MOST: usize = 64;

/// A place where notices are read.
pub(crate) trait Source: Send {
    /// The cloud.
    fn cloud(&self) -> Cloud;

    /// The notices that are in force. It may wait for a change.
    ///
    /// # Errors
    /// When there is no answer, or one that is not understood.
    fn ask(&mut self, client: &Client) -> Result<Vec<Notice>, Error>;

    /// The pause until the next request.
    fn pause(&self) -> Duration {
        EVERY
    }
}

/// The places where notices of a cloud are read, each on its own thread.
#[must_use]
pub(crate) fn sources(cloud: Cloud) -> Vec<Box<dyn Source>> {
    match cloud {
        Cloud::Aws => vec![Box::<aws::Aws>::default()],
        Cloud::Google => google::VALUES.map(|value| Box::new(google::Google::new(value)) as Box<dyn Source>).into(),
        Cloud::Azure => vec![Box::<azure::Azure>::default()],
    }
}

/// A change of the notices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// A new notice.
    Came(Notice),
    /// The kind or the time of a notice has changed.
    Changed(Notice),
    /// A notice has disappeared: it was withdrawn, or the interruption is over.
    Gone(Notice),
}

/// The notices that are in force.
#[derive(Debug, Default)]
struct Ledger(Vec<Notice>);

impl Ledger {
    /// Sets the notices that are now in force. Returns what has changed.
    fn update(&mut self, now: Vec<Notice>) -> Vec<Change> {
        let before = std::mem::take(&mut self.0);
        let was = |notice: &Notice| before.iter().find(|old| old.id == notice.id);
        let mut changes: Vec<Change> = Vec::new();
        for notice in now {
            match was(&notice) {
                _ if self.0.iter().any(|other| other.id == notice.id) => continue,
                None => changes.push(Change::Came(notice.clone())),
                // An interruption that has begun has no time: that is not a change.
                Some(old) if old.kind != notice.kind || (notice.at.is_some() && old.at != notice.at) => {
                    changes.push(Change::Changed(notice.clone()));
                }
                Some(_) => {}
            }
            self.0.push(notice);
        }
        let gone = before.iter().filter(|old| !self.0.iter().any(|notice| notice.id == old.id));
        changes.extend(gone.cloned().map(Change::Gone));
        changes
    }
}

/// Failures of a source since its last answer.
#[derive(Debug, Default)]
struct Failures(u32);

impl Failures {
    /// Counts another failure. Returns the pause, and whether to log it.
    fn more(&mut self) -> (Duration, bool) {
        self.0 = self.0.saturating_add(1);
        let factor = 1u32.checked_shl(self.0 - 1).unwrap_or(u32::MAX);
        (EVERY.saturating_mul(factor).min(LONGEST), self.0 == TOLERATED)
    }

    /// The source answered. Returns whether its failures were logged.
    fn end(&mut self) -> bool {
        std::mem::take(&mut self.0) >= TOLERATED
    }
}

/// How many sources of a cloud do not answer: they share a service, so this is logged once for all of them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Silent(Arc<AtomicUsize>);

impl Silent {
    /// Another one does not answer. Returns whether it is the first.
    fn more(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// One of them answers again. Returns whether it is the last.
    fn fewer(&self) -> bool {
        self.0.fetch_sub(1, Ordering::Relaxed) == 1
    }
}

/// The thread of a source: reports changes until `report` returns false.
pub(crate) fn watch(mut source: Box<dyn Source>, silent: &Silent, client: &Client, report: impl Fn(Change) -> bool) {
    let (mut ledger, mut failures, cloud) = (Ledger::default(), Failures::default(), source.cloud());
    loop {
        let pause = match source.ask(client) {
            Ok(notices) => {
                if failures.end() && silent.fewer() {
                    tracing::info!("the metadata service of {cloud} answers again");
                }
                if !ledger.update(notices).into_iter().all(&report) {
                    return;
                }
                source.pause()
            }
            Err(error) => {
                let (pause, is_news) = failures.more();
                let why = chain(&error);
                if is_news && silent.more() {
                    tracing::warn!(
                        "cannot ask {cloud} for interruption notices: {why}. Until it answers, the job runs without \
                        them. {}",
                        advice(cloud)
                    );
                } else {
                    tracing::debug!("cannot ask {cloud} for interruption notices: {why}");
                }
                pause
            }
        };
        std::thread::sleep(pause);
    }
}

/// What to do if a cloud does not answer.
fn advice(cloud: Cloud) -> &'static str {
    match cloud {
        Cloud::Aws => {
            "Allow the instance metadata service; in a container it needs a hop limit of 2 \
            (HttpPutResponseHopLimit). If you do not need notices, set watch.interruption = \"off\""
        }
        Cloud::Google | Cloud::Azure => {
            "Allow requests to the metadata server. If you do not need notices, set watch.interruption = \"off\""
        }
    }
}

#[cfg(test)]
mod tests;

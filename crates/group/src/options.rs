//! The settings of the protocol.

use std::time::Duration;

use crate::ids::Rank;

/// The settings of a group. All members must have the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// This member.
    pub rank: Rank,
    /// Number of members.
    pub size: u32,
    /// Time limits of the steps.
    pub limits: Limits,
    /// Time between group snapshots.
    pub interval: Option<Duration>,
    /// The pause after a group snapshot that was aborted; it doubles with each in a row.
    pub retry_after: Duration,
    /// The longest of these pauses, if the interval is not shorter.
    pub retry_max: Duration,
    /// What is done after the job fails.
    pub restart: Restart,
    /// Number of committed group images that are kept.
    pub keep: usize,
    /// Whether the member has a replica.
    pub replicates: bool,
    /// How long a lease lives without a renewal.
    pub lease: Duration,
    /// A member ends its job this long before its lease can expire. Covers the time to end the job, and the error of
    /// its clock.
    pub fence: Duration,
    /// Whether the coordinator may end a lease too early. Then a lost member may run its job for as long as a lease
    /// lives.
    pub leases_end_early: bool,
}

impl Options {
    /// A step of a snapshot never takes longer, nor does its abort, if the leader can write the plan.
    pub(crate) fn longest_step(&self) -> Duration {
        self.limits.prepare + self.limits.dump + self.limits.start
    }
}

/// Time limits of the steps of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// How long to wait for members that are missing.
    pub wait: Duration,
    /// Until all jobs are ready.
    pub start: Duration,
    /// From the order to reach the cut until all are locked, and as long again until all cables are out.
    pub prepare: Duration,
    /// Until all are dumped.
    pub dump: Duration,
    /// Until the last group image of a stop is stored.
    pub store: Duration,
}

/// What is done after the job of a group fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restart {
    /// After this time an epoch counts as healthy.
    pub min_uptime: Duration,
    /// The pause before the second restart in a row; it doubles with each.
    pub backoff: Duration,
    /// The longest pause.
    pub max_backoff: Duration,
    /// After this many restarts, the next failure ends the run: restarts within `window`, and epochs in a row that
    /// failed before they were healthy.
    pub max_restarts: u32,
    /// The time in which restarts count.
    pub window: Duration,
    /// After an epoch of this time, no earlier restart counts.
    pub healthy_uptime: Duration,
    /// After this many epochs in a row that started from the beginning and failed before they were healthy, the run
    /// ends.
    pub early_deaths: u32,
    /// Whether a restart may be from the beginning.
    pub cold_start: ColdStart,
}

/// Whether the job may start from its beginning once it has begun in a run. If no supervisor of that run is left and there is
/// no group image, the next run starts it from its beginning in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ColdStart {
    /// If there is no group image.
    #[default]
    NoImages,
    /// Also if no group image can be used.
    Allow,
    /// Never: the job is given up.
    Never,
}

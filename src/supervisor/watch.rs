//! Why a life ended, and what is left to say of a job when all is over.

use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::publish::Published;
use super::state::{Ending, State};
use super::{Owner, Setup};
use crate::launch::Job;
use crate::restart::cause::{Cause, Facts, judge};
use crate::sys::process;
use crate::sys::spawn::Ended;
use crate::watch::witness::Witness;

/// How the last life of a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastEnd {
    /// When it was seen.
    pub time: DateTime<Utc>,
    /// Its exit code.
    pub exit_code: Option<i32>,
    /// Or the signal that ended it.
    pub signal: Option<i32>,
    /// Why.
    pub cause: Cause,
    /// The same for people.
    pub words: String,
}

impl LastEnd {
    fn now(ended: Option<Ended>, cause: Cause) -> LastEnd {
        let (exit_code, signal) = match ended {
            Some(Ended::Exit(code)) => (Some(code), None),
            Some(Ended::Signal(signal)) => (None, Some(signal)),
            None => (None, None),
        };
        LastEnd { time: Utc::now(), exit_code, signal, words: cause.to_string(), cause }
    }
}

/// What the owner knows of the job's health.
#[derive(Debug, Default)]
pub(super) struct Watch {
    /// Of this life.
    witness: Option<Witness>,
    /// Why it is ended by us, where a rule or a hang is why.
    pub(super) blame: Option<Cause>,
    /// From when on work would be lost: the begin of the life, or the newest image.
    unsaved_since: Option<Instant>,
    /// Work that was lost with lives that ended, since the supervisor began.
    pub(super) lost: Duration,
    /// How often the job was started or brought back.
    pub(super) lives: u32,
}

impl Owner<'_> {
    pub(super) fn watch_life(&mut self, job: &Job) {
        self.watch.witness = Some(Witness::begin(job.root.pid()));
        self.watch.blame = None;
        self.watch.unsaved_since = Some(Instant::now());
        self.watch.lives += 1;
    }

    /// There is an image of now.
    pub(super) fn watch_saved(&mut self) {
        self.watch.unsaved_since = Some(Instant::now());
        if let Some(witness) = &mut self.watch.witness {
            witness.look();
        }
    }

    /// Judges the end of a life; once for each.
    pub(super) fn why_ended(&mut self, ended: Ended) -> Cause {
        let by_us = match self.machine.state() {
            // Killed when it was at its end already.
            State::Ending { deadline: None, stop: Ending::Stop(_) | Ending::Lost | Ending::Unloaded, .. }
                if ended == Ended::Exit(0) =>
            {
                None
            }
            State::Ending { stop: Ending::Lost, .. } => Some(Cause::SnapshotLost),
            State::Ending { stop: Ending::Unloaded, .. } => Some(Cause::MemoryLost),
            State::Ending { stop: Ending::Suspend, .. } => Some(Cause::Suspended),
            State::Ending { stop: Ending::Rewind(_), .. } => self.watch.blame.clone().or(Some(Cause::Rewound)),
            State::Ending { .. } => self.watch.blame.clone().or(Some(Cause::Requested)),
            _ => None,
        };
        let mut facts = Facts { by_us, ..Facts::default() };
        if facts.by_us.is_none()
            && ended != Ended::Exit(0)
            && let Some(mut witness) = self.watch.witness.take()
        {
            let testimony = witness.testify();
            facts.memory = testimony.memory;
            facts.xids = testimony.faults.into_iter().map(|(_, xid)| xid).collect();
        }
        let cause = judge(ended, &facts);
        if let (Some(since), false) = (self.watch.unsaved_since.take(), cause == Cause::Completed) {
            self.watch.lost += since.elapsed();
        }
        if !matches!(cause, Cause::Completed | Cause::Exit { .. } | Cause::Signal { .. })
            && !matches!(cause, Cause::Requested | Cause::Suspended | Cause::Rewound)
        {
            tracing::warn!("why it ended: {cause}");
        }
        self.published.last_end = Some(LastEnd::now(Some(ended), cause.clone()));
        cause
    }
}

/// Why the supervisor before this one left a job that was not at its end; nothing where it said goodbye.
pub(super) fn interrupted(setup: &Setup) -> Option<LastEnd> {
    let before = Published::read(&setup.folder.state_file()).ok()?;
    if before.state == "done" || before.state == "waiting" || before.state == "suspended" || before.boot_id.is_empty() {
        return None;
    }
    let same_boot = process::boot_id().is_ok_and(|now| now == before.boot_id);
    Some(LastEnd::now(None, if same_boot { Cause::SupervisorKilled } else { Cause::MachineRestart }))
}

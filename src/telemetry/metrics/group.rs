//! The metrics of a job over several machines, as one of them sees the group.

use std::fmt;

use super::render::{Number, Sink, bit, real, stamp};
use crate::published::Group;
use crate::telemetry::events::What;

/// What happened to the group since this supervisor started.
#[derive(Debug, Clone, Default)]
pub(super) struct Counts {
    committed: u64,
    aborted: u64,
    lost: u64,
    restarts: u64,
}

impl Counts {
    pub(super) fn hear(&mut self, what: &What) {
        match what {
            What::GroupCommitted { .. } => self.committed += 1,
            What::GroupAborted { .. } => self.aborted += 1,
            What::GroupMemberLost { .. } => self.lost += 1,
            What::GroupRestarting { .. } => self.restarts += 1,
            _ => {}
        }
    }

    pub(super) fn write(&self, group: &Group, sink: &mut Sink<'_>) -> fmt::Result {
        let there = real(group.members.len().try_into().unwrap_or(u64::MAX));
        let taken = group.newest_committed().and_then(|image| Some(stamp(image.taken()?)));
        sink.one("rekindle_group_size", "Number of machines that the group needs", Number::Gauge(group.size.into()))?;
        sink.one("rekindle_group_members", "Number of machines that are there", Number::Gauge(there))?;
        let leads = Number::Gauge(bit(group.leader == Some(group.rank)));
        sink.one("rekindle_group_leader", "1 if this machine leads", leads)?;
        sink.one("rekindle_group_epoch", "The last start of the whole job", Number::Gauge(real(group.epoch)))?;
        sink.gauge(
            "rekindle_group_last_image_timestamp_seconds",
            "When this machine's part of the newest committed group image was taken",
            taken,
        )?;
        sink.one("rekindle_group_images_committed", "Committed group images", Number::Count(self.committed))?;
        sink.one("rekindle_group_snapshots_aborted", "Aborted group snapshots", Number::Count(self.aborted))?;
        sink.one("rekindle_group_members_lost", "Losses of machines", Number::Count(self.lost))?;
        sink.one("rekindle_group_restarts", "Restarts of all machines after a loss", Number::Count(self.restarts))
    }
}

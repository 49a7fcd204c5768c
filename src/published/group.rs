//! What a member of a group publishes about the group.

use std::fmt;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use rekindle_store::manifest::GroupPart;
use rekindle_store::{ImageId, JobName};

/// A group, as one of its members sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Group {
    /// Its name.
    pub name: JobName,
    /// The number of machines that it needs.
    pub size: u32,
    /// The number of this machine.
    pub rank: u32,
    /// The last start of the whole job, counted from 1.
    pub epoch: u64,
    /// The machines that are there.
    pub members: Vec<GroupMember>,
    /// The machines that are missing. The host is that of the member that was there last.
    pub missing: Vec<GroupMember>,
    /// The machine that leads.
    pub leader: Option<u32>,
    /// The group images, newest first.
    pub images: Vec<GroupImage>,
    /// What the group waits for, in words.
    pub waits_for: Option<String>,
    /// How long a snapshot freezes the job on each machine: the median of its last ones, as far as they are known.
    #[serde(default)]
    pub freezes: Vec<GroupFreeze>,
}

/// How long a snapshot freezes the job on a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupFreeze {
    /// The machine.
    pub rank: u32,
    /// The time.
    pub freeze_us: u64,
}

/// A machine of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupMember {
    /// Its number.
    pub rank: u32,
    /// Its host name, if it is known.
    pub host: Option<String>,
}

impl fmt::Display for GroupMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.rank)?;
        self.host.iter().try_for_each(|host| write!(f, " ({host})"))
    }
}

/// A group image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupImage {
    /// Its number.
    pub number: u64,
    /// The epoch in which it was taken.
    pub epoch: u64,
    /// The part of this machine.
    pub image: Option<ImageId>,
    /// Whether all parts are stored.
    pub committed: bool,
}

impl GroupImage {
    /// When the part of this machine was taken, by the clock of the machine that took it.
    #[must_use]
    pub fn taken(&self) -> Option<DateTime<Utc>> {
        Some(self.image?.taken())
    }
}

impl Group {
    /// The newest group image that is committed.
    #[must_use]
    pub fn newest_committed(&self) -> Option<&GroupImage> {
        self.images.iter().find(|image| image.committed)
    }

    /// Whether the group image that this image is a part of is committed. `None` if that is unknown here.
    #[must_use]
    pub fn is_committed(&self, id: ImageId, part: &GroupPart) -> Option<bool> {
        let is_it = |it: &&GroupImage| it.number == part.number && it.epoch == part.epoch && it.image == Some(id);
        self.images.iter().find(is_it).map(|image| image.committed)
    }

    /// The machine on which a snapshot freezes the job for longest, and for how long.
    #[must_use]
    pub fn slowest(&self) -> Option<(&GroupMember, u64)> {
        let slowest = self.freezes.iter().max_by_key(|freeze| freeze.freeze_us)?;
        let member = self.members.iter().find(|member| member.rank == slowest.rank)?;
        Some((member, slowest.freeze_us))
    }

    /// Whether nothing else has changed.
    #[must_use]
    pub(crate) fn differs_only_in_the_wait(&self, other: &Group) -> bool {
        Group { waits_for: None, ..self.clone() } == Group { waits_for: None, ..other.clone() }
    }

    /// Without the facts that say nothing once the supervisor has ended.
    #[must_use]
    pub(crate) fn of_the_past(self) -> Group {
        Group { members: Vec::new(), missing: Vec::new(), leader: None, waits_for: None, freezes: Vec::new(), ..self }
    }
}

/// Machines in a list, for people.
#[must_use]
pub(crate) fn in_words<'a>(members: impl IntoIterator<Item = &'a GroupMember>) -> String {
    members.into_iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_of_the_same_number_is_not_the_part() {
        let id = |n: u32| ImageId::new(n, DateTime::UNIX_EPOCH);
        let image = |number, committed| GroupImage { number, epoch: 2, image: Some(id(40)), committed };
        let group = Group {
            name: "bert".parse().unwrap(),
            size: 2,
            rank: 0,
            epoch: 2,
            members: Vec::new(),
            missing: Vec::new(),
            leader: None,
            images: vec![image(8, false), image(7, true)],
            waits_for: None,
            freezes: Vec::new(),
        };
        let part = |number, epoch| GroupPart { number, epoch, origin: 1, size: 2, mark: String::new() };
        assert_eq!(group.is_committed(id(40), &part(7, 2)), Some(true));
        assert_eq!(group.is_committed(id(40), &part(8, 2)), Some(false));
        assert_eq!(group.is_committed(id(41), &part(7, 2)), None, "another image");
        assert_eq!(group.is_committed(id(40), &part(7, 1)), None, "another epoch");
        let waits_for = Some("rank 1 to join".into());
        assert!(group.differs_only_in_the_wait(&Group { waits_for: waits_for.clone(), ..group.clone() }));
        assert!(!group.differs_only_in_the_wait(&Group { waits_for, epoch: 3, ..group.clone() }));
        assert_eq!(group.newest_committed().map(|image| image.number), Some(7));
    }
}

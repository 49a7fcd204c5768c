//! What commands say about the group of a job.

use chrono::{DateTime, Utc};
use serde::Serialize;

use super::output::time;
use crate::published::{Group, GroupMember, Published, in_words};
use rekindle_base::interval::Choice;
use rekindle_store::manifest::GroupPart;
use rekindle_store::{ImageId, JobFolder};

/// The group of a running job, for `status`.
pub(super) fn notes(group: &Group, interval: Option<&Choice>, now: DateTime<Utc>) -> Vec<String> {
    let Group { name, size, rank, epoch, members, missing, leader, waits_for, .. } = group;
    let leader = |member: &GroupMember| if *leader == Some(member.rank) { " leads" } else { "" };
    let there: Vec<String> = members.iter().map(|member| format!("{member}{}", leader(member))).collect();
    let lost = if missing.is_empty() { String::new() } else { format!("; missing: {}", in_words(missing)) };
    let image = match group.newest_committed() {
        None => "no group image is committed".to_owned(),
        Some(image) => {
            let age = image.taken().map(|taken| time((now - taken).num_seconds().max(0)));
            let age = age.map(|age| format!(", {age} ago")).unwrap_or_default();
            format!("newest committed group image: {}{age}", image.number)
        }
    };
    let mut notes = vec![
        format!("group {name}: rank {rank} of {size} machines, epoch {epoch}; {image}"),
        format!("{} of {size} machines are there: {}{lost}", members.len(), there.join(", ")),
    ];
    notes.extend(interval.map(|choice| format!("interval {choice}")));
    notes.extend(waits_for.iter().map(|what| format!("the group waits for {what}")));
    notes
}

/// What the job's supervisor, or the last one, has published about its group.
pub(super) fn published(folder: &JobFolder) -> Option<Group> {
    Published::read(&folder.state_file()).ok()?.group
}

/// The group image that an image is a part of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PartOf {
    number: u64,
    epoch: u64,
    /// Whether all parts are stored, as far as the job's supervisor has seen. Null if that is unknown.
    pub(super) committed: Option<bool>,
}

impl PartOf {
    /// `group` is what the supervisor of the job has published last.
    pub(super) fn new(id: ImageId, part: &GroupPart, group: Option<&Group>) -> PartOf {
        let committed = group.and_then(|group| group.is_committed(id, part));
        PartOf { number: part.number, epoch: part.epoch, committed }
    }

    fn committed(&self) -> &'static str {
        match self.committed {
            Some(true) => ", committed",
            Some(false) => ", not committed",
            None => "",
        }
    }

    /// For a table.
    pub(super) fn short(&self) -> String {
        format!("{}{}", self.number, self.committed())
    }

    /// For one image.
    pub(super) fn in_words(&self) -> String {
        format!("group image {}, epoch {}{}", self.number, self.epoch, self.committed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::{GroupFreeze, GroupImage};
    use chrono::TimeDelta;

    fn group() -> Group {
        let member = |rank: u32, host: &str| GroupMember { rank, host: Some(host.into()) };
        let image = |number, committed| {
            let image = Some(ImageId::new(u32::try_from(number).unwrap(), DateTime::UNIX_EPOCH));
            GroupImage { number, epoch: 2, image, committed }
        };
        Group {
            name: "bert".parse().unwrap(),
            size: 3,
            rank: 2,
            epoch: 2,
            members: vec![member(0, "a"), member(2, "c")],
            missing: vec![member(1, "b")],
            leader: Some(0),
            images: vec![image(8, false), image(7, true)],
            waits_for: Some("rank 1 (b) to join: rank 1 is lost".into()),
            freezes: vec![GroupFreeze { rank: 0, freeze_us: 700_000 }, GroupFreeze { rank: 2, freeze_us: 1_500_000 }],
        }
    }

    #[test]
    fn a_group_is_told_in_three_notes() {
        let now = DateTime::UNIX_EPOCH + TimeDelta::seconds(75);
        assert_eq!(
            notes(&group(), None, now),
            [
                "group bert: rank 2 of 3 machines, epoch 2; newest committed group image: 7, 1m 15s ago",
                "2 of 3 machines are there: rank 0 (a) leads, rank 2 (c); missing: rank 1 (b)",
                "the group waits for rank 1 (b) to join: rank 1 is lost",
            ]
        );
        let (images, missing, waits_for) = (Vec::new(), Vec::new(), None);
        let said = notes(&Group { images, missing, waits_for, ..group() }, None, now);
        assert_eq!(said[0], "group bert: rank 2 of 3 machines, epoch 2; no group image is committed");
        assert!(said.len() == 2 && !said[1].contains("missing"), "{said:?}");
    }

    #[test]
    fn a_part_says_whether_its_group_image_is_committed() {
        let id = |number: u32| ImageId::new(number, DateTime::UNIX_EPOCH);
        let part = |number| GroupPart { number, epoch: 2, origin: 1, size: 2, mark: String::new() };
        let of = |number: u32, group: Option<&Group>| PartOf::new(id(number), &part(number.into()), group);
        let group = group();
        assert_eq!(of(7, Some(&group)).short(), "7, committed");
        assert_eq!(of(8, Some(&group)).in_words(), "group image 8, epoch 2, not committed");
        assert_eq!((of(6, Some(&group)).short(), of(7, None).committed), ("6".into(), None), "unknown");
    }
}

//! Which descriptors are the same open file, and which lead to the same pipe or socket.
//!
//! A group is named after its first descriptor, in the order of the job's pids: so the names of two records can be
//! compared.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::os::linux::fs::MetadataExt as _;

use rekindle_os::same;

use super::Pids;
use super::kind::Kind;

/// A descriptor: the process as we see it, and the number.
pub(super) type Place = (i32, i32);

/// An open descriptor.
#[derive(Debug, Clone, Copy)]
pub(super) struct Open<'a> {
    pub(super) place: Place,
    /// Where /proc/PID/fd leads.
    pub(super) target: &'a str,
    /// /proc/PID/fdinfo
    pub(super) info: &'a str,
}

/// Groups of descriptors, as we see them.
#[derive(Debug, Default)]
pub(super) struct Identity {
    same: Vec<Vec<Place>>,
}

impl Identity {
    /// Compares those that may be the same: with the same target and the same state.
    pub(super) fn find(all: &[Open<'_>]) -> Identity {
        let mut candidates: HashMap<(&str, &str), Vec<Place>> = HashMap::new();
        for Open { place, target, info } in all {
            candidates.entry((target, state(info))).or_default().push(*place);
        }
        let alike = candidates.into_values().filter(|places| places.len() > 1);
        Identity { same: alike.flat_map(groups).collect() }
    }

    /// With the names.
    pub(super) fn named(&self, all: &[Open<'_>], pids: &Pids) -> Named {
        let inner = |pid: i32| pids.0.get(&pid).copied().unwrap_or(pid);
        let name = |places: &[Place]| {
            let first = places.iter().map(|(pid, number)| (inner(*pid), *number)).min();
            first.map(|(pid, number)| format!("descriptor {number} of {pid}")).unwrap_or_default()
        };
        let mut named = Named::default();
        for group in &self.same {
            let name = name(group);
            named.same.extend(group.iter().map(|place| (*place, name.clone())));
        }
        let mut objects: HashMap<&str, Vec<Place>> = HashMap::new();
        for Open { place, target, .. } in all {
            if matches!(Kind::of(target), Kind::Socket | Kind::Pipe) {
                objects.entry(target).or_default().push(*place);
            }
        }
        let gone =
            all.iter().filter(|open| matches!(Kind::of(open.target), Kind::Path(path) if path.ends_with(" (deleted)")));
        for Open { place, info, .. } in gone {
            let inode = info.lines().find_map(|line| line.strip_prefix("ino:")?.trim().parse().ok());
            named.nameless.extend(inode.map(|inode: u64| (inode, (*place, name(&[*place])))));
        }
        for places in objects.into_values() {
            let name = name(&places);
            named.objects.extend(places.into_iter().map(|place| (place, name.clone())));
        }
        named
    }
}

/// What two descriptors of one open file have in common: the position, and the number that each eventfd has. Flags do
/// not belong to it: close-on-exec is the descriptor's own.
fn state(info: &str) -> &str {
    match info.split_once("eventfd-id:") {
        Some((_, id)) => id.lines().next().unwrap_or_default(),
        None => info.split_once("flags:").map_or("", |(position, _)| position),
    }
}

/// Splits those that are alike into those that are the same. The kernel's order finds the group of each without comparing
/// it with all.
fn groups(places: Vec<Place>) -> Vec<Vec<Place>> {
    let mut groups: Vec<Vec<Place>> = Vec::new();
    for place in places {
        let order = |group: &Vec<Place>| {
            let first = group.first().copied().unwrap_or(place);
            same::compare(first, place).unwrap_or(Ordering::Less)
        };
        match groups.binary_search_by(order) {
            Ok(at) => groups.get_mut(at).into_iter().for_each(|group| group.push(place)),
            Err(at) => groups.insert(at, vec![place]),
        }
    }
    groups.retain(|group| group.len() > 1);
    groups
}

/// The names of the groups of each descriptor.
#[derive(Debug, Default)]
pub(super) struct Named {
    same: HashMap<Place, String>,
    objects: HashMap<Place, String>,
    /// By the inode, files whose names are gone.
    nameless: BTreeMap<u64, (Place, String)>,
}

impl Named {
    /// The first one that is the same open file as this; `None` if there is no other.
    pub(super) fn same(&self, pid: i32, number: i32) -> Option<String> {
        self.same.get(&(pid, number)).cloned()
    }

    /// A descriptor of a file without a name that has this inode, on the device that the kernel numbers so.
    pub(super) fn nameless(&self, inode: u64, device: u64) -> Option<String> {
        let ((pid, number), name) = self.nameless.get(&inode)?;
        let metadata = std::fs::metadata(format!("/proc/{pid}/fd/{number}")).ok()?;
        let (major, minor) = (nix::sys::stat::major(metadata.st_dev()), nix::sys::stat::minor(metadata.st_dev()));
        // `MKDEV` of linux/kdev_t.h.
        (metadata.st_ino() == inode && major << 20 | minor == device).then(|| name.clone())
    }

    /// The first one that leads to the same pipe or socket.
    pub(super) fn object(&self, pid: i32, number: i32) -> Option<String> {
        self.objects.get(&(pid, number)).cloned()
    }
}

//! Finds a GPU for each GPU that the job used, by a matching (Kuhn's augmenting paths). It starts with all that can
//! stay and moves those only if necessary. The GPUs that the job did not use come last.

use super::{Device, Health, Need, Old};
use rekindle_cuda::GpuUuid;

/// Requirements for a place.
#[derive(Debug, Clone, Copy)]
pub(super) struct Ask {
    pub(super) faults: Faults,
    pub(super) room: Room,
}

/// How to treat GPUs that had a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Faults {
    Avoid,
    Take,
}

/// Whether the GPU must have enough free memory now, or only enough in total.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Room {
    Now,
    Ever,
}

impl Ask {
    fn has_room(self, old: &Old, device: &Device) -> bool {
        let has = match self.room {
            Room::Now => device.free,
            Room::Ever => device.total,
        };
        has.is_some_and(|has| has >= old.need.bytes())
    }

    fn fits(self, old: &Old, device: &Device) -> bool {
        let healthy = match device.health {
            Health::Fine => true,
            Health::Faulted(_) => self.faults == Faults::Take,
            Health::Silent | Health::Part => false,
        };
        let stays = old.uuid == device.uuid;
        // The job had room on its own GPU, even if the amount is unknown.
        let room = (stays && matches!(old.need, Need::Unknown(_))) || self.has_room(old, device);
        healthy && room && (stays || (old.name == device.name && !old.name.is_empty()))
    }
}

/// The device for each GPU that the job used, by number; `fixed` are decided already (old, new). `None` if not all can
/// be placed.
pub(super) fn place(
    olds: &[Old],
    devices: &[Device],
    fixed: &[(usize, usize)],
    ask: Ask,
) -> Option<Vec<Option<usize>>> {
    let mut holders = vec![None; devices.len()];
    for (old, new) in fixed {
        // A GPU that the user names is taken even if it had a fault.
        let ask = Ask { faults: Faults::Take, ..ask };
        if olds[*old].need != Need::Unused && !ask.has_room(&olds[*old], &devices[*new]) {
            return None;
        }
        holders[*new] = Some(*old);
    }
    let is_fixed = |old: usize| fixed.iter().any(|(fixed, _)| *fixed == old);
    let mut rest: Vec<usize> =
        (0..olds.len()).filter(|old| olds[*old].need != Need::Unused && !is_fixed(*old)).collect();
    rest.retain(|old| {
        let own = devices.iter().position(|device| device.uuid == olds[*old].uuid);
        match own.filter(|own| holders[*own].is_none() && ask.fits(&olds[*old], &devices[*own])) {
            Some(own) => {
                holders[own] = Some(*old);
                false
            }
            None => true,
        }
    });
    // First try with all that can stay where they are.
    let search = |held: Vec<usize>| {
        let mut search = Search { olds, devices, holders: holders.clone(), ask, held, seen: Vec::new() };
        let all = rest.iter().all(|old| {
            search.seen = vec![false; devices.len()];
            search.find(*old)
        });
        all.then_some(search.holders)
    };
    let staying = (0..devices.len()).filter(|at| holders[*at].is_some()).collect();
    let holders = search(staying).or_else(|| search(fixed.iter().map(|(_, new)| *new).collect()))?;
    Some((0..olds.len()).map(|old| holders.iter().position(|holder| *holder == Some(old))).collect())
}

struct Search<'a> {
    olds: &'a [Old],
    devices: &'a [Device],
    /// For each device, the old GPU placed on it.
    holders: Vec<Option<usize>>,
    ask: Ask,
    /// Devices whose old GPU must not be moved away.
    held: Vec<usize>,
    seen: Vec<bool>,
}

impl Search<'_> {
    /// Finds a device for `old`: an empty one, else one whose present holder can move to another.
    fn find(&mut self, old: usize) -> bool {
        let mut fitting: Vec<usize> =
            (0..self.devices.len()).filter(|at| self.ask.fits(&self.olds[old], &self.devices[*at])).collect();
        // A stable sort: with equal free memory the first comes first. Beside another program a job is slower, and both may need
        // more memory later.
        fitting.sort_by_key(|at| (self.devices[*at].is_shared, std::cmp::Reverse(self.devices[*at].free)));
        if let Some(at) = fitting.iter().copied().find(|at| self.holders[*at].is_none()) {
            self.holders[at] = Some(old);
            return true;
        }
        for at in fitting {
            if self.held.contains(&at) || std::mem::replace(&mut self.seen[at], true) {
                continue;
            }
            if self.holders[at].is_none_or(|holder| self.find(holder)) {
                self.holders[at] = Some(old);
                return true;
            }
        }
        false
    }
}

/// The new GPU of each old one, including the unused ones, and whether an unusable one (divided or silent) had to be
/// named. None if there are too few.
pub(super) fn fill(olds: &[Old], devices: &[Device], places: &[Option<usize>]) -> Option<(Vec<GpuUuid>, bool)> {
    let mut news: Vec<Option<GpuUuid>> = places.iter().map(|place| place.map(|at| devices[at].uuid)).collect();
    let is_here = |uuid: GpuUuid| devices.iter().any(|device| device.uuid == uuid);
    for at in 0..olds.len() {
        let own = olds[at].uuid;
        if news[at].is_none() && is_here(own) && !news.contains(&Some(own)) {
            news[at] = Some(own);
        }
    }
    let mut unproven = false;
    for at in 0..olds.len() {
        if news[at].is_some() {
            continue;
        }
        let is_taken = |uuid: &GpuUuid| news.contains(&Some(*uuid));
        let alike = || devices.iter().filter(|device| device.name == olds[at].name && !is_taken(&device.uuid));
        let well = |device: &&Device| matches!(device.health, Health::Fine | Health::Faulted(_));
        let new = alike().find(well).map(|device| device.uuid).or_else(|| {
            unproven = true;
            alike().next().map(|device| device.uuid)
        });
        news[at] = Some(new?);
    }
    Some((news.into_iter().collect::<Option<Vec<_>>>()?, unproven))
}

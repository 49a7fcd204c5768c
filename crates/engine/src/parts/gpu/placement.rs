//! Decides on which GPUs a job is restored.
//!
//! [`plan`] is a pure function from the image, the GPUs of this machine and the user's wishes ([`Wishes`]) to a
//! [`Plan`]. A GPU that the job used stays if it is present, healthy and has enough free memory. If it is missing, does
//! not answer, had a fault or is too full, another GPU of the same type with enough free memory replaces it. If nothing
//! changes, no pairs are given to the driver.
//!
//! What the driver needs of pairs (580.159.04, measured on two H200): each GPU that the process could see when it was
//! checkpointed is named exactly once, whatever CUDA_VISIBLE_DEVICES says; no other GPU is named; and no two map to the
//! same one. Otherwise the restore fails with `INVALID_VALUE`, and there is no second try with the same process. So
//! GPUs that the job did not use are named too, and get the GPUs that remain. If one of them is missing, the restore
//! fails with `NOT_SUPPORTED` without pairs, and also with pairs that name it as a new one.
//!
//! Invariants: pairs name every GPU of the image, and no new GPU twice. A GPU that the job used is never mapped to one
//! whose free memory is smaller or unknown, unless it stays where it is and this cannot be asked. It stays if it can.

mod matching;
mod wish;

use std::collections::BTreeSet;

use bytesize::ByteSize;

use matching::{Ask, Faults, Room, place};
use rekindle_base::{Moved, xid};
use rekindle_cuda::nvml::{GpuInventory, Mig};
use rekindle_cuda::{DriverVersion, GpuMapping, GpuUuid};
use rekindle_store::Manifest;
use rekindle_store::manifest::KeptPiece;
pub use wish::{Pair, Wishes};

/// A GPU of this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its UUID.
    pub(crate) uuid: GpuUuid,
    /// The product.
    pub(crate) name: String,
    /// Its number, as nvidia-smi counts.
    pub(crate) index: Option<u32>,
    /// Available bytes of its memory.
    pub(crate) free: Option<u64>,
    /// Bytes of its memory.
    pub(crate) total: Option<u64>,
    /// Whether it can be used.
    pub(crate) health: Health,
    /// Whether a program uses it that will not have ended.
    pub(crate) is_shared: bool,
}

/// Whether a GPU can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    /// No fault is known.
    Fine,
    /// It had a fault after which NVIDIA advises against new jobs on it: used only if there is no other GPU.
    Faulted(u32),
    /// NVML cannot query it.
    Silent,
    /// It is divided or virtual, and the driver cannot checkpoint there.
    Part,
}

/// The GPUs of this machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Devices {
    /// The GPUs that were found.
    pub(crate) all: Vec<Device>,
    /// Whether NVML was asked: without it a GPU may be missing from the list, and neither memory nor health is known.
    pub(crate) asked: bool,
    /// Whether the driver is too old to move a job to other GPUs.
    pub(crate) too_old: bool,
}

/// The first driver that accepts pairs of GPUs.
const FIRST_DRIVER: u32 = 580;

impl Devices {
    /// The GPUs of the inventory, with known faults. Memory of processes that will have ended counts as free.
    #[must_use]
    pub(crate) fn of(inventory: &GpuInventory, wishes: &Wishes) -> Devices {
        let (asked, faults) = (inventory.used_by_pid.is_some(), &wishes.faults);
        let coming = |uuid: GpuUuid| -> u64 {
            let used = wishes.leaving.iter().filter_map(|pid| inventory.used_on(*pid)?.get(&uuid));
            used.sum()
        };
        let stays = |pid: &u32| !wishes.leaving.iter().any(|leaving| u32::try_from(*leaving) == Ok(*pid));
        let others = inventory.used_by_pid.iter().flatten().filter(|(pid, _)| stays(pid));
        let shared: BTreeSet<GpuUuid> = others.flat_map(|(_, gpus)| gpus.keys().copied()).collect();
        let all = inventory.gpus.iter().map(|gpu| {
            let uuid = gpu.uuid.to_string();
            let is_it =
                |named: &str| named == uuid || gpu.pci.as_deref().is_some_and(|own| is_same_address(own, named));
            let health = match faults.iter().find(|(named, _)| is_it(named)) {
                _ if gpu.mig == Mig::On || gpu.is_virtual => Health::Part,
                _ if asked && gpu.memory_free.is_none() => Health::Silent,
                Some((_, xid)) => Health::Faulted(*xid),
                None => Health::Fine,
            };
            let name = gpu.name.clone().unwrap_or_default();
            let free = gpu.memory_free.map(|free| free.saturating_add(coming(gpu.uuid)));
            let is_shared = shared.contains(&gpu.uuid);
            Device { uuid: gpu.uuid, name, index: gpu.index, free, total: gpu.memory_total, health, is_shared }
        });
        let version = inventory.driver.as_deref().and_then(DriverVersion::parse);
        Devices { all: all.collect(), asked, too_old: version.is_some_and(|version| version.major() < FIRST_DRIVER) }
    }
}

/// NVML writes `00000000:3B:00.0`, the kernel's log `0000:3b:00`.
fn is_same_address(one: &str, other: &str) -> bool {
    let plain = |text: &str| {
        let text = text.to_ascii_lowercase();
        let (domain, rest) = text.split_once(':')?;
        let domain = u32::from_str_radix(domain, 16).ok()?;
        Some((domain, rest.split('.').next().unwrap_or_default().to_owned()))
    };
    plain(one).is_some_and(|address| plain(other) == Some(address))
}

/// What to do about the GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Plan {
    /// Nothing changes: the job is restored where it was.
    Stay {
        /// GPUs that the job would not stay on if there were others: each with the reason.
        in_spite_of: Vec<String>,
    },
    /// The driver is given pairs with other GPUs.
    Move(Relocation),
    /// The needed GPUs exist, but are busy. They may become free.
    Wait(NoPlace),
    /// The job cannot be placed here.
    Refuse(NoPlace),
}

/// A move to other GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocation {
    /// For the driver: all GPUs of the image.
    pub(crate) pairs: Vec<GpuMapping>,
    /// The GPUs that the job used and that change.
    pub moved: Vec<Moved>,
    /// Whether the only reason is that a GPU has too little free memory.
    pub(crate) for_room: bool,
    /// Whether a divided or silent GPU replaces one that the job did not use, because there are too few. It is not
    /// known whether the driver accepts that.
    pub(crate) unproven: bool,
}

/// Why the GPUs of this machine cannot take a job.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the job needs {image}; this machine has {here}; {advice}")]
pub struct NoPlace {
    /// What the image needs, in words.
    pub(crate) image: String,
    /// What this machine has, in words.
    pub(crate) here: String,
    /// What to do.
    pub(crate) advice: String,
}

/// A GPU of the image.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Old {
    uuid: GpuUuid,
    name: String,
    need: Need,
}

/// Memory that a job needs on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    /// Nothing.
    Unused,
    /// This many bytes.
    Bytes(u64),
    /// The job may use the GPU, with at most this many bytes.
    Unknown(u64),
}

impl Need {
    fn bytes(self) -> u64 {
        match self {
            Need::Unused => 0,
            Need::Bytes(bytes) | Need::Unknown(bytes) => bytes,
        }
    }
}

/// The GPUs that the job could see, with what it used of each.
fn olds(manifest: &Manifest) -> Vec<Old> {
    let used = &manifest.tree.cuda_memory;
    let kept = manifest.kept.iter().flat_map(|kept| &kept.pieces).map(|piece| piece.bytes);
    let landed = manifest.landing.iter().map(|landing| landing.bytes).chain(kept).sum();
    // NVML may have been asked while what stays on the GPU was released.
    let stayed = |uuid: &str| {
        let pieces = manifest.kept.iter().flat_map(|kept| &kept.pieces);
        let is_here =
            |piece: &&KeptPiece| piece.gpu.and_then(|at| manifest.gpus.get(at)).is_some_and(|gpu| gpu.uuid == uuid);
        pieces.filter(is_here).map(|piece| piece.bytes).sum::<u64>()
    };
    let seen = |uuid: &str| used.values().filter_map(|gpus| gpus.get(uuid)).sum::<u64>();
    let need = |uuid: &str| match seen(uuid).max(stayed(uuid)) {
        // An image of an earlier version, or NVML did not know the pids when it was taken.
        _ if used.is_empty() => Need::Unknown(landed),
        0 => Need::Unused,
        bytes => Need::Bytes(bytes),
    };
    let gpus = manifest.gpus.iter();
    gpus.filter_map(|gpu| Some(Old { uuid: gpu.uuid.parse().ok()?, name: gpu.name.clone(), need: need(&gpu.uuid) }))
        .collect()
}

/// Decides on which GPUs the job is restored.
#[must_use]
pub fn plan(manifest: &Manifest, here: &Devices, wishes: &Wishes) -> Plan {
    let olds = olds(manifest);
    let asked = wishes.for_image(manifest.id);
    if manifest.tree.cuda.is_empty() || (olds.is_empty() && asked.is_empty()) {
        return Plan::Stay { in_spite_of: Vec::new() };
    }
    let no_place = |advice: String| NoPlace { image: needed(&olds), here: described(here), advice };
    let fixed = match wish::resolve(asked, &olds, here) {
        Ok(fixed) => fixed,
        Err(why) => return Plan::Refuse(no_place(format!("--device-map: {why}"))),
    };
    // Without NVML, existing GPUs may not be listed, and their state is unknown.
    if !here.asked && asked.is_empty() {
        return Plan::Stay { in_spite_of: Vec::new() };
    }
    let ask = |faults, room| place(&olds, &here.all, &fixed, Ask { faults, room });
    let found = ask(Faults::Avoid, Room::Now).or_else(|| ask(Faults::Take, Room::Now));
    if let Some(places) = found {
        return relocate(&olds, here, &fixed, &places, no_place);
    }
    let home = &manifest.host.name;
    if let Some(places) = ask(Faults::Take, Room::Ever) {
        return match relocate(&olds, here, &fixed, &places, no_place) {
            Plan::Refuse(why) => Plan::Refuse(why),
            _ => Plan::Wait(no_place(
                "a GPU that fits is busy: end the programs that use it, or wait until it is free".into(),
            )),
        };
    }
    let may_be_unused = olds.iter().any(|old| matches!(old.need, Need::Unknown(_)));
    if may_be_unused && asked.is_empty() && olds.iter().any(|old| here.all.iter().any(|device| device.uuid == old.uuid))
    {
        // The GPU that it used may be one of those that are here.
        return Plan::Stay { in_spite_of: Vec::new() };
    }
    Plan::Refuse(no_place(format!(
        "each one needs a whole GPU of the same type with that much free memory: restore the image on {home}, or on a machine that has such GPUs"
    )))
}

/// Makes the plan from the places that were found for the GPUs that the job used.
fn relocate(
    olds: &[Old],
    here: &Devices,
    fixed: &[(usize, usize)],
    places: &[Option<usize>],
    no_place: impl Fn(String) -> NoPlace,
) -> Plan {
    let is_here = |old: &Old| here.all.iter().any(|device| device.uuid == old.uuid);
    let stays = |(old, place): (&Old, &Option<usize>)| match place {
        Some(at) => here.all[*at].uuid == old.uuid,
        None => is_here(old),
    };
    if olds.iter().zip(places).all(stays) {
        let faulted =
            |place: &Option<usize>| Some(&here.all[(*place)?]).filter(|d| matches!(d.health, Health::Faulted(_)));
        return Plan::Stay { in_spite_of: places.iter().filter_map(faulted).map(words).collect() };
    }
    let Some((news, unproven)) = matching::fill(olds, &here.all, places) else {
        let advice = format!(
            "the driver needs a GPU of the same type for each of the {} GPUs that the job could see at the snapshot",
            olds.len()
        );
        return Plan::Refuse(no_place(advice));
    };
    let pairs: Vec<GpuMapping> =
        olds.iter().zip(&news).map(|(old, new)| GpuMapping { old: old.uuid, new: *new }).collect();
    let (mut moved, mut for_room) = (Vec::new(), true);
    for (at, (old, pair)) in olds.iter().zip(&pairs).enumerate() {
        if pair.old == pair.new || old.need == Need::Unused {
            continue;
        }
        let own = here.all.iter().find(|device| device.uuid == old.uuid);
        let why = match own {
            _ if fixed.iter().any(|(o, _)| *o == at) => "asked for".into(),
            None => "it is not on this machine".into(),
            Some(device) => match (device.health, device.free) {
                (Health::Fine, Some(free)) if free >= old.need.bytes() => {
                    "another GPU of the job needs its place".into()
                }
                _ => format!("it {}", state(device)),
            },
        };
        let short = own.is_some_and(|d| d.health == Health::Fine && d.free.is_some_and(|free| free < old.need.bytes()));
        for_room &= short;
        moved.push(Moved { old: old.uuid.to_string(), new: pair.new.to_string(), why });
    }
    let for_room = for_room && !moved.is_empty();
    if here.too_old {
        let why = no_place(format!("only driver {FIRST_DRIVER} or newer can restore a job on other GPUs: install it"));
        return if for_room { Plan::Wait(why) } else { Plan::Refuse(why) };
    }
    Plan::Move(Relocation { pairs, for_room, moved, unproven })
}

/// What is wrong with a GPU, or how much memory it has free.
fn state(device: &Device) -> String {
    match (device.health, device.free) {
        (Health::Faulted(number), _) => format!("had Xid {number} ({})", xid::meaning(number).0),
        (Health::Silent, _) => "does not answer (NVML)".into(),
        (Health::Part, _) => "is divided or virtual (MIG, vGPU)".into(),
        (Health::Fine, Some(free)) => format!("has {} free", ByteSize::b(free)),
        (Health::Fine, None) => "has an unknown amount of free memory (NVML is not available)".into(),
    }
}

fn words(device: &Device) -> String {
    format!("{} {} that {}", device.name, device.uuid, state(device))
}

fn described(here: &Devices) -> String {
    let each: Vec<String> = here.all.iter().map(words).collect();
    if each.is_empty() { "none".into() } else { each.join(", ") }
}

/// What the image needs, in words.
fn needed(olds: &[Old]) -> String {
    let used = olds.iter().filter(|old| old.need != Need::Unused);
    let each = used.map(|old| match old.need {
        Need::Bytes(bytes) => format!("{} for what was on {} {}", ByteSize::b(bytes), old.name, old.uuid),
        _ => format!("{} {}, if it used that", old.name, old.uuid),
    });
    let each: Vec<String> = each.collect();
    if each.is_empty() { "no GPU".into() } else { each.join(", ") }
}

#[cfg(test)]
mod tests;

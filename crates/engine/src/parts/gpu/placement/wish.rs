//! What a user asked for: `--device-map OLD=NEW,...`, by UUID or by the numbers of nvidia-smi.

use std::fmt;
use std::str::FromStr;

use super::{Devices, Health, Old};
use rekindle_cuda::{GpuUuid, ParseUuidError};
use rekindle_store::ImageId;

/// What is known or wanted beyond the image and the machine.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    /// Which GPU replaces which.
    pub map: Vec<Pair>,
    /// The newest image that the map applies to; later images have the new GPUs. `None`: all images.
    pub until: Option<ImageId>,
    /// GPUs, by UUID or PCI address, that had a fault after which nothing should be started there.
    pub faults: Vec<(String, u32)>,
    /// Processes that will have ended by then: those of the job as it runs now.
    pub leaving: Vec<i32>,
}

impl Wishes {
    /// The part of the map that applies to this image.
    pub(super) fn for_image(&self, id: ImageId) -> &[Pair] {
        match self.until {
            Some(until) if id > until => &[],
            _ => &self.map,
        }
    }
}

/// A GPU as a user names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GpuRef {
    /// By UUID.
    Uuid(GpuUuid),
    /// By number: an old GPU among those of the image, a new one as nvidia-smi counts on this machine.
    Index(u32),
}

impl fmt::Display for GpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GpuRef::Uuid(uuid) => uuid.fmt(f),
            GpuRef::Index(index) => index.fmt(f),
        }
    }
}

impl FromStr for GpuRef {
    type Err = ParsePairError;

    fn from_str(text: &str) -> Result<GpuRef, ParsePairError> {
        if text.to_ascii_uppercase().starts_with("MIG-") {
            return Err(ParsePairError::Instance(text.to_owned()));
        }
        match text.parse() {
            Ok(index) => Ok(GpuRef::Index(index)),
            Err(_) => Ok(GpuRef::Uuid(text.parse()?)),
        }
    }
}

/// Which GPU replaces which.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pair {
    /// The GPU in the image.
    pub(crate) old: GpuRef,
    /// The GPU of this machine.
    pub(crate) new: GpuRef,
}

/// Text that is not a pair of GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParsePairError {
    /// There is not exactly one `=`.
    #[error("{0:?} is not a pair of GPUs: it must be OLD=NEW")]
    NotAPair(String),
    /// It names an instance of a divided GPU.
    #[error("{0:?} is an instance of a divided GPU (MIG), which the CUDA driver cannot checkpoint")]
    Instance(String),
    /// A GPU is neither a number nor a UUID.
    #[error("{0}, or a GPU number of nvidia-smi")]
    Uuid(#[from] ParseUuidError),
}

impl FromStr for Pair {
    type Err = ParsePairError;

    fn from_str(text: &str) -> Result<Pair, ParsePairError> {
        let (old, new) = text.split_once('=').ok_or_else(|| ParsePairError::NotAPair(text.to_owned()))?;
        Ok(Pair { old: old.trim().parse()?, new: new.trim().parse()? })
    }
}

/// The pairs as indices of `olds` and of the devices, or what is wrong with them. Free memory is checked later, because
/// more can become free.
pub(super) fn resolve(pairs: &[Pair], olds: &[Old], here: &Devices) -> Result<Vec<(usize, usize)>, String> {
    let mut all: Vec<(usize, usize)> = Vec::new();
    for Pair { old, new } in pairs {
        let from = match old {
            GpuRef::Uuid(uuid) => olds.iter().position(|known| known.uuid == *uuid),
            GpuRef::Index(index) => usize::try_from(*index).ok().filter(|at| *at < olds.len()),
        };
        let from = from.ok_or_else(|| format!("the job had no GPU {old} at the snapshot"))?;
        let to = here.all.iter().position(|device| match new {
            GpuRef::Uuid(uuid) => device.uuid == *uuid,
            GpuRef::Index(index) => device.index == Some(*index),
        });
        let to = to.ok_or_else(|| format!("this machine has no GPU {new}"))?;
        let device = &here.all[to];
        if all.iter().any(|(known, _)| *known == from) {
            return Err(format!("GPU {old} is named twice"));
        }
        if all.iter().any(|(_, known)| *known == to) {
            return Err(format!("GPU {new} can replace only one GPU"));
        }
        if device.name != olds[from].name {
            return Err(format!("GPU {old} is of type {:?} and {new} of type {:?}", olds[from].name, device.name));
        }
        match device.health {
            Health::Part => return Err(format!("GPU {new} {}", super::state(device))),
            Health::Silent => return Err(format!("GPU {new} {}", super::state(device))),
            Health::Fine | Health::Faulted(_) => {}
        }
        if device.free.is_none() {
            return Err("NVML (libnvidia-ml.so.1) is needed to know how much memory is free on another GPU".into());
        }
        all.push((from, to));
    }
    Ok(all)
}

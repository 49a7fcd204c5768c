//! The NVIDIA driver and the GPUs, for a job that had a CUDA context.

use std::collections::BTreeMap;

use super::{Difference, Here, Severity};
use crate::store::Manifest;
use crate::store::manifest::Gpu;
use crate::sys::cuda::DriverVersion;

/// The first driver with the functions that bring a process back (CUDA driver API, `cuCheckpointProcess*`).
const FIRST_DRIVER: u32 = 570;

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    if manifest.tree.cuda.is_empty() {
        return Vec::new();
    }
    driver(manifest, here).into_iter().chain(gpus(manifest, here)).collect()
}

/// The image holds the user's half of its driver (libcuda, loaded), which talks to the kernel's half of here. As a rule
/// both must be of one version; packages for compatibility are the exception, so another version is no more than a warning.
/// Where libcuda itself is another file, that is a difference of its own.
fn driver(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let then = manifest.driver.as_ref()?;
    let what = "NVIDIA driver";
    let Some(now) = &here.driver else {
        return Some(Difference::new(Severity::Fatal, what, then, "none").advise(format!("install driver {then}")));
    };
    let difference = |severity| Difference::new(severity, what, then, now);
    match DriverVersion::parse(now).map(|version| version.major()) {
        Some(major) if major < FIRST_DRIVER => Some(difference(Severity::Fatal).advise(format!(
            "install driver {then}: older ones than {FIRST_DRIVER} can not bring a process back"
        ))),
        _ if then == now => None,
        _ => Some(difference(Severity::Warning).advise(format!(
            "the job has loaded the libraries of {then}, which as a rule work with that driver only: where it fails, install {then}"
        ))),
    }
}

/// A process comes back on the GPUs that it was on (by UUID) unless the driver is told others in their place, which is not
/// done yet. The manifest names all that the job could see, not those that it used.
fn gpus(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let missing: Vec<&Gpu> = manifest.gpus.iter().filter(|gpu| !here.gpus.iter().any(|g| g.uuid == gpu.uuid)).collect();
    if missing.is_empty() || here.driver.is_none() {
        // Without a driver that is what is said.
        return None;
    }
    let difference =
        |severity, image: &[&Gpu]| Difference::new(severity, "GPUs", listed(image), listed(&all(&here.gpus)));
    if missing.len() < manifest.gpus.len() || here.gpus.is_empty() {
        let advice = "if the job used one that is not here it does not come back: make those GPUs visible again";
        return Some(difference(Severity::Warning, &missing).advise(advice));
    }
    let (wanted, present) = (by_name(&manifest.gpus), by_name(&here.gpus));
    let enough = wanted.iter().all(|(name, count)| present.get(name).is_some_and(|here| here >= count));
    let home = &manifest.host.name;
    let advice = match enough {
        true => format!(
            "they are of the same kind, but a job comes back on the very GPUs that it used: restore it on {home}, or make those GPUs visible"
        ),
        false => format!("restore it on {home}, or on a machine with these GPUs"),
    };
    Some(difference(Severity::Fatal, &all(&manifest.gpus)).advise(advice))
}

fn all(gpus: &[Gpu]) -> Vec<&Gpu> {
    gpus.iter().collect()
}

fn by_name(gpus: &[Gpu]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    gpus.iter().for_each(|gpu| *counts.entry(gpu.name.as_str()).or_insert(0) += 1);
    counts
}

fn listed(gpus: &[&Gpu]) -> String {
    if gpus.is_empty() {
        return "none".into();
    }
    gpus.iter().map(|gpu| format!("{} {}", gpu.name, gpu.uuid)).collect::<Vec<_>>().join(", ")
}

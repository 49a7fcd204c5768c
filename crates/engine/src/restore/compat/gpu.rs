//! The NVIDIA driver and the GPUs, for a job that had a CUDA context.

use super::{Difference, Here, Severity};
use crate::parts::gpu::placement::{self, NoPlace, Plan};
use rekindle_cuda::DriverVersion;
use rekindle_store::Manifest;
use rekindle_store::manifest::Gpu;

/// The first driver with the functions that restore a process (CUDA driver API, `cuCheckpointProcess*`).
const FIRST_DRIVER: u32 = 570;

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    if manifest.tree.cuda.is_empty() {
        return Vec::new();
    }
    driver(manifest, here).into_iter().chain(gpus(manifest, here)).collect()
}

/// The image contains the user-space half of its driver (libcuda, loaded), which talks to the kernel half of this
/// machine. Usually both must have the same version; packages for compatibility are the exception, so another version
/// is only a warning. If libcuda itself is another file, that is a separate difference.
fn driver(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let then = manifest.driver.as_ref()?;
    let what = "NVIDIA driver";
    let Some(now) = &here.driver else {
        return Some(Difference::new(Severity::Fatal, what, then, "none").advise(format!("install driver {then}")));
    };
    let difference = |severity| Difference::new(severity, what, then, now);
    match DriverVersion::parse(now).map(|version| version.major()) {
        Some(major) if major < FIRST_DRIVER => Some(difference(Severity::Fatal).advise(format!(
            "install driver {then}: drivers older than {FIRST_DRIVER} cannot restore a process"
        ))),
        _ if then == now => None,
        _ => Some(difference(Severity::Warning).advise(format!(
            "the job has loaded the libraries of {then}, which usually work only with that driver: if it fails, install {then}"
        ))),
    }
}

/// A process is restored on the GPUs that it was on (by UUID), or on others of their type (`parts::gpu::placement`).
fn gpus(manifest: &Manifest, here: &Here) -> Option<Difference> {
    // A missing driver is reported as a difference of its own.
    here.driver.as_ref()?;
    let what = "GPUs";
    match placement::plan(manifest, &here.devices, &here.wishes) {
        Plan::Refuse(NoPlace { image, here, advice }) => {
            return Some(Difference::new(Severity::Fatal, what, image, here).advise(advice));
        }
        Plan::Stay { in_spite_of } if !in_spite_of.is_empty() => {
            let advice = "it is used because there is no other GPU: have it checked";
            return Some(
                Difference::new(Severity::Warning, what, "GPUs without a fault", in_spite_of.join(", ")).advise(advice),
            );
        }
        Plan::Stay { .. } => {}
        Plan::Move(_) | Plan::Wait(_) => return None,
    }
    // If the image records which GPUs the job used, only those count.
    let is_here = |gpu: &&Gpu| here.devices.all.iter().any(|device| device.uuid.to_string() == gpu.uuid);
    let missing: Vec<&Gpu> = manifest.gpus.iter().filter(|gpu| !is_here(gpu)).collect();
    if missing.is_empty() || (here.devices.asked && !manifest.tree.cuda_memory.is_empty()) {
        return None;
    }
    let listed = |all: Vec<String>| if all.is_empty() { "none".into() } else { all.join(", ") };
    let image = listed(missing.iter().map(|gpu| format!("{} {}", gpu.name, gpu.uuid)).collect());
    let here = listed(here.devices.all.iter().map(|device| format!("{} {}", device.name, device.uuid)).collect());
    let advice = "if the job used a missing GPU, it cannot be restored: make those GPUs visible again";
    Some(Difference::new(Severity::Warning, what, image, here).advise(advice))
}

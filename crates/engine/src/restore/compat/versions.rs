//! The software below the job: CRIU and the kernel, and the pids that the kernel gives.

use super::{Difference, Here, Severity};
use rekindle_criu::Version;
use rekindle_store::Manifest;

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    criu(manifest, here).into_iter().chain(kernel(manifest, here)).chain(pids(manifest, here)).collect()
}

fn release(text: &str) -> Option<(u32, u32)> {
    Version::parse(text).map(|version| (version.0, version.1))
}

/// The kernel refuses a process with a pid that is not below its limit. Since Linux 6.14 a new PID namespace has the highest limit
/// there is; before, that of the machine applies to all.
fn pids(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let (highest, limit) = (manifest.tree.ids.iter().copied().max()?, here.pid_max?);
    let has_its_own = release(&here.host.kernel)? >= (6, 14);
    (highest >= limit && !has_its_own).then(|| {
        Difference::new(Severity::Fatal, "pids", format!("the pid {highest}"), format!("kernel.pid_max = {limit}"))
            .advise("run `sysctl kernel.pid_max=4194304`")
    })
}

/// A newer CRIU can write images that an older one cannot read, and the older one does not always report it.
fn criu(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let (made, here) = (Version::parse(&manifest.criu)?, here.criu?);
    let difference = || Difference::new(Severity::Fatal, "CRIU", made.to_string(), here.to_string());
    (made > here).then(|| difference().advise(format!("install CRIU {made} or newer")))
}

/// The job may use system calls that an older kernel does not have, and may have checked for them only once. Kernels
/// add no system calls within a release.
fn kernel(manifest: &Manifest, here: &Here) -> Option<Difference> {
    let (then, now) = (&manifest.host.kernel, &here.host.kernel);
    let difference = || Difference::new(Severity::Warning, "kernel", then, now);
    (release(now)? < release(then)?).then(|| {
        difference().advise("an older kernel can lack features that the job uses: if it fails, boot one that is as new")
    })
}

//! The software below the job: CRIU and the kernel.

use super::{Difference, Here, Severity};
use rekindle_criu::Version;
use rekindle_store::Manifest;

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    criu(manifest, here).into_iter().chain(kernel(manifest, here)).collect()
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
    let release = |text: &str| Version::parse(text).map(|version| (version.0, version.1));
    let (then, now) = (&manifest.host.kernel, &here.host.kernel);
    let difference = || Difference::new(Severity::Warning, "kernel", then, now);
    (release(now)? < release(then)?).then(|| {
        difference().advise("an older kernel can lack features that the job uses: if it fails, boot one that is as new")
    })
}

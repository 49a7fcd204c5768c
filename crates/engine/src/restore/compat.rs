//! Can an image be restored on this machine? Checked before anything is started or put back.
//!
//! [`compare`] is a pure function from the manifest and the facts of this machine ([`Here`]) to the differences.
//! Invariants: a difference is [`Severity::Fatal`] only if a restore, or the job after it, cannot work. A refused image
//! is unusable until something is fixed, so anything uncertain is a warning. Unknown facts, of the image or of this
//! machine, are not differences. Another boot, another host name, or more of anything are not either.

mod cpu;
mod files;
mod gpu;
mod here;
mod versions;

use std::fmt;

use serde::Serialize;

pub(crate) use here::FileHere;
pub use here::Here;

use rekindle_store::Manifest;

/// What a difference means for a restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Severity {
    /// It cannot work.
    Fatal,
    /// It may not work.
    Warning,
}

/// Something in which this machine differs from the image.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Difference {
    /// What it means.
    pub(crate) severity: Severity,
    /// What differs.
    pub(crate) what: String,
    /// What the image has.
    pub(crate) image: String,
    /// What is here.
    pub(crate) here: String,
    /// What to do.
    pub(crate) advice: String,
}

impl Difference {
    fn new(severity: Severity, what: impl Into<String>, image: impl Into<String>, here: impl Into<String>) -> Self {
        Difference { severity, what: what.into(), image: image.into(), here: here.into(), advice: String::new() }
    }

    fn advise(self, advice: impl Into<String>) -> Self {
        Difference { advice: advice.into(), ..self }
    }

    /// Whether it is about a file that the job had mapped or open.
    #[must_use]
    pub(crate) fn is_a_file(&self) -> bool {
        self.what.starts_with(files::WHAT)
    }

    /// Whether it makes a restore impossible.
    #[must_use]
    pub fn is_fatal(&self) -> bool {
        self.severity == Severity::Fatal
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Difference { what, image, here, advice, .. } = self;
        write!(f, "{what}: the image has {image}, this machine has {here}; {advice}")
    }
}

/// What differs between the image and this machine, the worst first.
#[must_use]
pub fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    let mut all = cpu::compare(manifest, here);
    all.extend(versions::compare(manifest, here));
    all.extend(gpu::compare(manifest, here));
    all.extend(files::compare(manifest, here));
    // A stable sort: within a severity the order above is kept.
    all.sort_by_key(|difference| difference.severity);
    all
}

/// The difference reported when the driver refused pairs that name a GPU that cannot be used.
pub(super) fn too_few_gpus(manifest: &Manifest, here: &Here) -> Difference {
    let (image, here) =
        (format!("{} GPUs that the job could see", manifest.gpus.len()), here.devices.all.len().to_string());
    Difference::new(Severity::Fatal, "GPUs", image, here)
        .advise("the driver needs as many GPUs to restore on others: make more visible, or use another machine")
}

/// How many differences one message names: after an upgrade of the system hundreds of files differ.
const NAMED: usize = 10;

/// The fatal differences in words, for one message.
pub(super) fn summary(differences: &[Difference]) -> String {
    let fatal: Vec<String> = differences.iter().filter(|d| d.is_fatal()).map(ToString::to_string).collect();
    let named = fatal.iter().take(NAMED).cloned().collect::<Vec<_>>().join(" | ");
    match fatal.len().checked_sub(NAMED) {
        Some(more) if more > 0 => format!("{named} | and {more} more (`rekindle show` lists all)"),
        _ => named,
    }
}

#[cfg(test)]
mod tests;

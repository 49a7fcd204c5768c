//! What the threads that watch the job report.

use crate::watch::deaths::Noticed;
use crate::watch::gpu::Fault;
use crate::watch::hang_detector;
use crate::watch::interruption::Change;
use crate::watch::lines::Hit;

/// Reports of the threads that watch the job.
pub(super) enum Finding {
    /// The number of the life, and the finding.
    HangDetector(u32, hang_detector::Finding),
    Line(Hit),
    Fault(Box<Fault>),
    Process(Noticed),
    Notice(Change),
    /// The GPUs are quiet.
    Quiet,
}

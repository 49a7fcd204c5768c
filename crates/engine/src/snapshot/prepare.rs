//! A place for the image, found and made ready while the job runs.

use chrono::Utc;

use super::landing::Lander;
use super::pages::{Expected, Source};
use super::phases::Work;
use super::target::Target;
use super::{Error, preflight};
use crate::launch::interposer;
use rekindle_store::retention::survey::{self, Written};
use rekindle_store::staging::{Area, Need};

/// Chooses between memory and store, checks that there is room, and begins.
pub(super) fn target(work: &mut Work<'_>) -> Result<Target, Error> {
    let subject = work.subject;
    let pids = work.gpu.outer_pids();
    let device: u64 = work.device_memory.iter().sum();
    let host: u64 = work.expected.iter().map(|e| e.bytes).chain([work.nameless]).sum();
    match subject.staging {
        Some(area) if area.is_there() => {
            let besides = if pids.iter().all(|pid| interposer::is_in(*pid)) { 0 } else { device };
            let own = host.saturating_add(device);
            match slot(work, area, own.saturating_add(work.rewritten), besides) {
                // An image without them is better than none: a restore is refused if one of them was changed.
                Err(Error::NoRoom(_)) if work.keep_no_files() => slot(work, area, own, besides),
                slot => slot,
            }
        }
        area => {
            if let Some(area) = area {
                tracing::warn!(
                    "{} is not there any more, this image goes to the store at once; the next start makes it anew",
                    area.path().display()
                );
            }
            preflight::check_memory(device, subject)?;
            // No snapshot is begun while memory is brought back from an image.
            let whole = device.saturating_add(host).saturating_add(work.rewritten);
            survey::make_room(subject.folder, subject.lock, &subject.options.limits, whole, Written::Loose)?;
            Ok(Target::Draft(subject.folder.begin_image(subject.lock, Utc::now())?))
        }
    }
}

fn slot(work: &Work<'_>, area: &Area, image: u64, besides: u64) -> Result<Target, Error> {
    let subject = work.subject;
    let need = Need { image, besides, keep: subject.options.memory_reserve };
    let id = subject.folder.next_id(Utc::now())?;
    let filling = area.take(subject.folder, id, need, subject.job.root.pid(), |newest| {
        tracing::warn!(
            "memory has room for one image only: while the next one is made, image {newest} is in the store alone"
        );
    })?;
    Ok(Target::Slot(filling))
}

/// The CUDA processes that can take a landing file, with what is expected to land.
pub(super) fn landers(work: &Work<'_>) -> Vec<Lander> {
    let Some(area) = work.subject.staging else { return Vec::new() };
    let all = work.gpu.inner_pids().into_iter().zip(work.gpu.outer_pids()).zip(work.device_memory.iter().copied());
    all.filter(|((_, outer), _)| interposer::is_in(*outer))
        .map(|((inner, outer), used)| Lander { inner, outer, bytes: last_time(area, inner).unwrap_or(used) })
        .collect()
}

/// What CRIU's page files will hold: the host memory, and the device memory of those that do not land.
pub(super) fn pages(work: &Work<'_>, landers: &[Lander]) -> Vec<Expected> {
    let mut all = work.expected.clone();
    let inner = work.gpu.inner_pids();
    for (pid, bytes) in
        inner.iter().zip(&work.device_memory).filter(|(pid, _)| !landers.iter().any(|l| l.inner == **pid))
    {
        all.iter_mut().filter(|e| e.source == Source::Process(*pid)).for_each(|e| e.bytes += bytes);
    }
    all
}

/// The driver asks for somewhat less than NVML says is in use. What it asked for last time is the better guess: a job that
/// has grown since has the rest added while it stands still.
fn last_time(area: &Area, inner: i32) -> Option<u64> {
    let images = area.images();
    let landings = images.iter().filter_map(|image| image.manifest()).flat_map(|manifest| &manifest.landing);
    landings.into_iter().find(|landing| landing.pid == inner).map(|landing| landing.bytes)
}

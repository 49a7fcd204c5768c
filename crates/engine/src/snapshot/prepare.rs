//! A place for the image, found and made ready while the job runs: the phase `prepare`.

use std::collections::BTreeMap;

use chrono::Utc;

use super::CRIU_DIR;
use super::pages::{Expected, Receivers, Source};
use super::seen::{Gpus, Seen, copied};
use super::{Env, Error, preflight};
use crate::launch::interposer;
use crate::launch::memory::GpuMemory;
use crate::parts::devices::Devices;
use crate::parts::kept::capture::Room;
use crate::parts::landing::capture::{self as landing, Armed, Lander};
use rekindle_base::chain;
use rekindle_cuda::copier::Reuse;
use rekindle_os::process;
use rekindle_store::Manifest;
use rekindle_store::staging::admission::Refusal;
use rekindle_store::staging::{Area, Filling};
use rekindle_store::take::Need;

/// A place that is ready. If dropped, it leaves nothing.
pub(super) struct Ready<'a> {
    pub(super) target: Filling,
    /// NVIDIA's devices, if this machine has any.
    pub(super) devices: Option<Devices>,
    /// Receives CRIU's page files, if the image is made in memory.
    pub(super) receivers: Option<Receivers>,
    /// Landing files under the names that processes look for.
    pub(super) armed: Armed,
    /// Where memory that stays on the GPU is copied to, if there is such memory and it can be copied.
    pub(super) kept: Option<Room<'a>>,
}

impl<'a> Ready<'a> {
    pub(super) fn make(env: &Env<'a>, seen: &mut Seen, gpus: &Gpus) -> Result<Ready<'a>, Error> {
        let devices = Devices::find();
        let staying = match env.subject.options.memory {
            GpuMemory::Copied => BTreeMap::new(),
            GpuMemory::Kept => gpus.group.kept_bytes()?,
        };
        let device = Device::of(gpus, &staying);
        let (target, memory) = target(env, memory(env), seen, gpus, device)?;
        // Room in memory may be that of a file which it still has registered.
        env.subject.copier.forget();
        let (mut receivers, mut armed) = (None, Armed::default());
        if let Some(area) = memory {
            let landers = landers(area, gpus, &staying);
            target.free_landing_files(&landing::sizes(&landers), device.stays > 0)?;
            let dir = target.dir().join(CRIU_DIR);
            receivers = Some(Receivers::start(&dir, target.spool().path(), &pages(seen, gpus, &landers))?);
            armed = landing::arm(area, &target, &landers)?;
        }
        let tree = process::tree(env.root());
        seen.contents.copy_ahead(&tree, env.view(), target.dir(), env.cancelled).map_err(copied)?;
        let kept = room(env, &target, gpus, device.stays);
        if kept.is_none() && memory.is_none() {
            // The driver copies all of it, and to memory.
            preflight::check_memory(device.all, env.subject)?;
        }
        Ok(Ready { target, devices, receivers, armed, kept })
    }
}

/// Where memory that stays on the GPU is copied to. Without such memory, and where it cannot be copied, the driver copies
/// all; what had stayed on the GPU before cannot be left to it, and then the lock fails.
fn room<'a>(env: &Env<'a>, target: &Filling, gpus: &Gpus, bytes: u64) -> Option<Room<'a>> {
    if bytes == 0 {
        return None;
    }
    // In a group the job is frozen until all of it is in the file, and a GPU copies faster than processors.
    let from_others = env.subject.group.is_none();
    let reuse = Reuse { full_every: env.subject.options.full_copy_every, from_others };
    let reserve = env.subject.options.memory_reserve;
    match Room::make(env.subject.copier, target, bytes, &gpus.in_use(), reserve, reuse) {
        Ok(room) => Some(room),
        Err(error) => {
            tracing::warn!("GPU memory cannot stay on the GPU in this snapshot: {}", chain(&error));
            None
        }
    }
}

/// The job's place in memory, if it still exists.
fn memory<'a>(env: &Env<'a>) -> Option<&'a Area> {
    let area = env.subject.staging?;
    if !area.is_there() {
        tracing::warn!(
            "{} is gone: this image goes to a slot on the disk; the next start creates the place in memory again",
            area.path().display()
        );
        return None;
    }
    Some(area)
}

/// Checks that memory or disk has room, and begins the image. Returns the place in memory if it is there.
fn target<'a>(
    env: &Env<'a>,
    memory: Option<&'a Area>,
    seen: &mut Seen,
    gpus: &Gpus,
    device: Device,
) -> Result<(Filling, Option<&'a Area>), Error> {
    let host: u64 = seen.expected.iter().map(|e| e.bytes).chain([seen.nameless]).sum();
    let made_anew = gpus.group.host_bytes()?;
    let own = host.saturating_add(device.all).saturating_add(made_anew);
    let whole = own.saturating_add(seen.rewritten);
    let Some(area) = memory else { return Ok((on_disk(env, whole, device)?, None)) };
    let besides = if gpus.group.outer_pids().iter().all(|pid| interposer::is_in(*pid)) { 0 } else { device.all };
    let besides = besides.saturating_add(made_anew);
    let mut taken = slot(env, area, whole, besides);
    if seen.rewritten > 0 && matches!(taken, Err(Error::NoRoom(_))) {
        // An image without these files is better than none: a restore is refused if one of them was changed.
        taken = slot(env, area, own, besides).inspect(|_| seen.keep_no_files());
    }
    match taken {
        // What stays on the GPU need not be in memory at any time.
        Err(Error::NoRoom(why @ Refusal::NoRoom { .. })) if device.stays > 0 => {
            tracing::warn!("this image goes to a slot on the disk, and the job is frozen longer: {why}");
            Ok((on_disk(env, whole, device)?, None))
        }
        taken => Ok((taken?, Some(area))),
    }
}

fn on_disk(env: &Env<'_>, bytes: u64, device: Device) -> Result<Filling, Error> {
    let subject = env.subject;
    preflight::check_memory(device.all.saturating_sub(device.stays), subject)?;
    // No snapshot is begun while an image is being unpacked into memory.
    let area = Area::on_disk(subject.folder, subject.lock)?;
    let id = subject.folder.next_id(Utc::now())?;
    Ok(area.take_on_disk(subject.folder, subject.lock, &subject.options.limits, id, bytes)?)
}

/// Bytes of device memory of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    all: u64,
    /// What can stay on the GPU.
    stays: u64,
}

impl Device {
    fn of(gpus: &Gpus, staying: &BTreeMap<i32, u64>) -> Device {
        Device::sum(gpus.group.outer_pids().into_iter().zip(gpus.memory.iter().copied()), staying)
    }

    /// Of processes, each with what NVML knows of. That may be less than what stays: NVML is not there, or does not know our
    /// pids. What stays is the job's word; a wrong one costs it the snapshot, and the machine no memory.
    fn sum(known: impl Iterator<Item = (i32, u64)>, staying: &BTreeMap<i32, u64>) -> Device {
        let each = known.map(|(pid, known)| staying.get(&pid).map_or(known, |stays| known.max(*stays)));
        let stays = staying.values().copied().fold(0, u64::saturating_add);
        Device { all: each.fold(0, u64::saturating_add), stays }
    }
}

fn slot(env: &Env<'_>, area: &Area, image: u64, besides: u64) -> Result<Filling, Error> {
    let subject = env.subject;
    let need = Need { image, besides, keep: subject.options.memory_reserve };
    let id = subject.folder.next_id(Utc::now())?;
    Ok(area.take(subject.folder, id, need, subject.job.root.pid(), |newest| {
        tracing::warn!(
            "memory has room for one image only: while the next one is made, image {newest} is in the store alone"
        );
    })?)
}

/// The CUDA processes that can use a landing file, with the expected bytes of device memory: without what stays on the GPU,
/// which has a file of its own.
fn landers(area: &Area, gpus: &Gpus, staying: &BTreeMap<i32, u64>) -> Vec<Lander> {
    let pids = gpus.group.inner_pids().into_iter().zip(gpus.group.outer_pids());
    let all = pids.zip(gpus.memory.iter().copied());
    all.filter(|((_, outer), _)| interposer::is_in(*outer))
        .map(|((inner, outer), used)| {
            let all = last_time(area, inner).unwrap_or(used);
            Lander { inner, outer, bytes: all.saturating_sub(staying.get(&outer).copied().unwrap_or(0)) }
        })
        .collect()
}

/// The expected content of CRIU's page files: the host memory, and the device memory of processes without a landing
/// file.
fn pages(seen: &Seen, gpus: &Gpus, landers: &[Lander]) -> Vec<Expected> {
    let mut all = seen.expected.clone();
    let inner = gpus.group.inner_pids();
    for (pid, bytes) in inner.iter().zip(&gpus.memory).filter(|(pid, _)| !landers.iter().any(|l| l.inner == **pid)) {
        all.iter_mut().filter(|e| e.source == Source::Process(*pid)).for_each(|e| e.bytes += bytes);
    }
    all
}

/// The driver asks for somewhat less than NVML reports as in use. The size of its last request is the better estimate;
/// if the job has grown since, the rest is added during the freeze.
fn last_time(area: &Area, inner: i32) -> Option<u64> {
    area.images().iter().filter_map(|image| image.manifest()).find_map(|manifest| all_of(manifest, inner))
}

/// Bytes of device memory of a process in an image, whoever copied them: what the driver had then may stay now.
fn all_of(manifest: &Manifest, inner: i32) -> Option<u64> {
    let landed = manifest.landing.iter().filter(|landing| landing.pid == inner).map(|landing| landing.bytes);
    let kept = manifest.kept.iter().flat_map(|kept| &kept.pieces).filter(|piece| piece.pid == inner);
    landed.chain(kept.map(|piece| piece.bytes)).reduce(u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use rekindle_store::manifest::{Kept, KeptPiece, Landing};

    use super::*;
    use crate::samples::{job_path, manifest, part_path};

    #[test]
    fn memory_that_stays_has_room_once_whatever_nvml_knows() {
        let staying = BTreeMap::from([(7, 30), (8, 5)]);
        let device = |known: &[(i32, u64)]| Device::sum(known.iter().copied(), &staying).all;
        assert_eq!(device(&[(7, 40), (8, 10), (9, 1)]), 51, "NVML counts it");
        assert_eq!(device(&[(7, 0), (8, 0), (9, 0)]), 35, "NVML knows nothing");
        let nonsense = BTreeMap::from([(7, u64::MAX), (8, 2)]);
        assert_eq!(Device::sum([(7, 1), (8, 1)].into_iter(), &nonsense), Device { all: u64::MAX, stays: u64::MAX });
    }

    #[test]
    fn what_the_driver_copied_last_time_and_stays_now_has_no_second_room() {
        let landing = |pid, bytes| Landing { pid, path: job_path("/l"), part: part_path("gpu/1"), bytes };
        let piece = |pid, bytes| KeptPiece { pid, index: 0, offset: 0, bytes, gpu: None };
        let pieces = vec![piece(7, 30), piece(8, 5), piece(7, 10)];
        let kept = Some(Kept { part: part_path("gpu/kept"), pieces });
        let image = Manifest { landing: vec![landing(7, 2), landing(9, 3)], kept, ..manifest() };
        assert_eq!([7, 8, 9, 10].map(|pid| all_of(&image, pid)), [Some(42), Some(5), Some(3), None]);
    }
}

//! What the supervisor gives the job: room for its images, sockets, the interposer and limits for NCCL.
//!
//! Only the watchdog's socket is required where it is configured. Without the others the job still runs.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;

use crate::config::{Config, Interposer, Staging};
use crate::control::trust;
use crate::job_api::server::Socket;
use crate::variables;
use crate::watch::beats::Beats;
use rekindle_abi::variables as helpers;
use rekindle_base::chain;
use rekindle_cuda as cuda;
use rekindle_engine::launch::work::{self, WorkFolder};
use rekindle_engine::launch::{JobSpec, hwloc, interposer, memory, nccl};
use rekindle_os::cgroup;
use rekindle_store::staging::{self, Area};
use rekindle_store::{JobFolder, WriterLock};

/// The folder of rekindle's own files for this run. What dead supervisors of other jobs have left goes first.
pub(super) fn work_folder(
    config: &Config,
    folder: &JobFolder,
    lock: &WriterLock,
) -> Result<Arc<WorkFolder>, work::Error> {
    for path in work::remove_left() {
        crate::routine!("removed {}, which a dead supervisor left", path.display());
    }
    WorkFolder::make(&config.snapshot.staging_directory, folder, lock).map(Arc::new)
}

/// The job's tmpfs for images. Without one, images are made in slots on the disk, which takes longer.
pub(super) fn staging_area(config: &Config, folder: &JobFolder, lock: &WriterLock) -> Option<Area> {
    match staging::disk::sweep(folder, lock) {
        Ok(true) => tracing::warn!("removed slots on the disk that were written before the machine was restarted"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!("cannot remove slots on the disk from before the machine was restarted: {}", chain(&error))
        }
    }
    if config.snapshot.staging == Staging::Store {
        return None;
    }
    // What is really used is decided for each snapshot; the bound only keeps a mistake from taking all there is.
    let size = cgroup::memory_total()?;
    match Area::open(&config.snapshot.staging_directory, folder, lock, size) {
        Ok(area) => Some(area),
        Err(error) => {
            tracing::warn!("images are made on the disk, and the job is frozen longer: {}", chain(&error));
            None
        }
    }
}

/// Gives the job a socket for its watchdog messages, if that is configured.
pub(super) fn beats(config: &Config, spec: &mut JobSpec, folder: &JobFolder) -> anyhow::Result<Option<Beats>> {
    let Some(limit) = config.watch.no_notify_for.limit() else { return Ok(None) };
    let path = config.snapshot.staging_directory.join(format!("{}.notify", folder.place_name()));
    let beats = listen(&path, spec.identity.as_ref().map(|identity| identity.uid)).with_context(|| {
        format!("watch.no-notify-for needs a socket for the job, and {} cannot be created", path.display())
    })?;
    spec.environment.extend(beats.variables(limit));
    Ok(Some(beats))
}

fn listen(path: &Path, user: Option<u32>) -> io::Result<Beats> {
    let base = path.parent().unwrap_or(path);
    if !base.exists() {
        std::fs::create_dir_all(base)?;
        // The job's user must get to it, whatever the umask.
        std::fs::set_permissions(base, std::fs::Permissions::from_mode(0o755))?;
    }
    // Somebody who can replace the socket by a link would get the file that it leads to.
    trust::check_setting("snapshot.staging-directory", base)?;
    Beats::listen(path, user)
}

/// Gives the job a socket for its requests. It also runs without one.
pub(super) fn job_api(config: &Config, spec: &mut JobSpec, folder: &JobFolder) -> Option<Socket> {
    let name = OsStr::new(variables::SOCKET);
    // One of a rekindle that we run in ourselves.
    spec.environment.remove(name);
    let directory = &config.control.directory;
    match Socket::bind(directory, &folder.place_name(), spec.identity.as_ref().map(|identity| identity.uid)) {
        Ok(socket) => {
            spec.environment.insert(name.into(), socket.path().into());
            Some(socket)
        }
        Err(error) => {
            tracing::warn!("cannot create the job's REKINDLE_SOCKET in {}: {error}", directory.display());
            None
        }
    }
}

fn has_driver() -> bool {
    Path::new("/dev/nvidiactl").exists() || cuda::Driver::load().is_ok()
}

/// Limits NCCL to features that can be checkpointed, and logs what that costs.
pub(super) fn nccl_limits(config: &Config, spec: &mut JobSpec, has_interposer: bool) {
    if !has_driver() {
        return;
    }
    let (added, contrary) = nccl::prepare(config.gpu.nccl, has_interposer, &mut spec.environment);
    // With one GPU there is nothing between GPUs that could cost anything.
    if Path::new("/dev/nvidia1").exists() {
        nccl::tell(&added, &contrary);
    }
}

/// Keeps hwloc from opening GPUs by OpenCL, because snapshots of processes with open GPUs can be refused.
pub(super) fn hwloc_limits(spec: &mut JobSpec) {
    if has_driver() {
        hwloc::tell(hwloc::prepare(&mut spec.environment).as_deref());
    }
}

/// Loads the interposer into the job, if there is a driver that calls it. Without it snapshots take longer, and fail
/// for processes that share GPU memory.
pub(super) fn interposer(
    config: &Config,
    spec: &mut JobSpec,
    work: &WorkFolder,
    area: Option<&Area>,
) -> Option<PathBuf> {
    if config.snapshot.interposer == Interposer::Off || !has_driver() {
        return None;
    }
    let name = OsStr::new("LD_PRELOAD");
    let set = || -> anyhow::Result<(PathBuf, OsString)> {
        let path = interposer::unpack(&work.bin())?;
        let value = interposer::preload_value(&path, spec.environment.get(name).map(OsString::as_os_str))?;
        Ok((path, value))
    };
    match set() {
        Ok((path, value)) => {
            spec.environment.insert(name.into(), value);
            memory::prepare(config.gpu.memory, &mut spec.environment);
            if let Some(area) = area {
                spec.environment.insert(helpers::LANDING.into(), area.landing_dir().path().into());
            }
            Some(path)
        }
        Err(error) => {
            tracing::warn!(
                "the job runs without the interposer, so its snapshots take longer: {}",
                chain(error.as_ref())
            );
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watchdog_socket_is_only_where_nobody_else_can_replace_it() {
        let dir = tempfile::tempdir().unwrap();
        let base = dir.path().join("base");
        let path = base.join("a.notify");
        drop(listen(&path, None).unwrap());
        for mode in [0o777, 0o775] {
            std::fs::set_permissions(&base, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = listen(&path, None).unwrap_err().to_string();
            assert!(error.contains("others can write") && error.contains("snapshot.staging-directory"), "{error}");
            assert!(!path.exists());
        }
        // As /dev/shm.
        std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o1777)).unwrap();
        drop(listen(&path, None).unwrap());
    }
}

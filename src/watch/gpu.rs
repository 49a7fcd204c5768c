//! The GPUs that a job uses: whether they work for it, and what the driver reports of them (Xid).
//!
//! Asked of NVML, and only once the job has a GPU's device open. Without NVML faults come from the kernel's log, and work of a
//! GPU is taken for granted: a job must not be ended because nobody could tell.

use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::kmsg::{KernelLog, Notice};
use rekindle_os::process;

/// A fault of a GPU that the job uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Its UUID, or its PCI address if it is from the kernel's log.
    pub gpu: String,
    /// The driver's number.
    pub xid: u32,
}

/// How often to check whether a job has started to use a GPU.
const LOOK: Duration = Duration::from_secs(5);
/// How long NVML waits for an event at a time, milliseconds; the end of the job shows in between.
const WAIT_MS: u32 = 2000;

/// Whether one of the processes has a device of the driver open.
fn uses_gpu(pids: &[i32]) -> bool {
    pids.iter().any(|pid| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        fds.into_iter().any(|fd| {
            std::fs::read_link(fd.path()).is_ok_and(|to| to.as_os_str().as_encoded_bytes().starts_with(b"/dev/nvidia"))
        })
    })
}

fn load() -> Option<Nvml> {
    Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok()
}

fn devices(nvml: &Nvml) -> Vec<Device<'_>> {
    (0..nvml.device_count().unwrap_or(0)).filter_map(|index| nvml.device_by_index(index).ok()).collect()
}

/// Whether it runs one of the processes; None if unknown. In a container the driver's pids may be different.
fn runs(device: &Device<'_>, pids: &[i32]) -> Option<bool> {
    let on_it = device.running_compute_processes().ok()?;
    let ours = |pid: u32| i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid));
    if on_it.iter().any(|process| ours(process.pid)) {
        return Some(true);
    }
    // Those that are not there for us may be ours under another number.
    let strangers = on_it.iter().any(|process| !std::path::Path::new(&format!("/proc/{}", process.pid)).exists());
    if strangers { None } else { Some(false) }
}

/// Whether GPUs work for a job.
#[derive(Default)]
pub(crate) struct GpuWork {
    nvml: Option<Nvml>,
    /// The driver's time of the newest sample that was looked at, microseconds.
    until: u64,
}

impl fmt::Debug for GpuWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuWork").field("until", &self.until).finish_non_exhaustive()
    }
}

impl GpuWork {
    /// Another life.
    pub(crate) fn forget(&mut self) {
        // The driver's samples go back for some seconds: those of the life before are not this one's.
        self.until = 0;
    }

    /// Whether a GPU has worked for the tree with this root since the last call.
    pub(crate) fn is_working(&mut self, root: i32) -> bool {
        let pids = process::tree(root);
        if !uses_gpu(&pids) {
            return false;
        }
        let nvml = match self.nvml.take().or_else(load) {
            Some(nvml) => self.nvml.insert(nvml),
            None => return true,
        };
        let (mut newest, mut working) = (self.until, false);
        for device in devices(nvml) {
            let on_it = runs(&device, &pids);
            let ours = |pid: u32| on_it.is_none() || i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid));
            match device.process_utilization_stats(self.until) {
                Ok(samples) => {
                    let fresh = samples.iter().filter(|sample| sample.timestamp > self.until);
                    newest = fresh.clone().map(|sample| sample.timestamp).fold(newest, u64::max);
                    working |= fresh.clone().any(|sample| sample.sm_util > 0 && ours(sample.pid));
                }
                // No samples since; or a driver, a mode (MIG) or a GPU that has none.
                Err(NvmlError::NotFound) => {}
                Err(_) => {
                    let busy = device.utilization_rates().map_or(true, |rates| rates.gpu > 0);
                    working |= busy && on_it != Some(false);
                }
            }
        }
        self.until = newest;
        working
    }
}

/// Reports faults of the GPUs that the job uses, for as long as `report` answers that somebody listens. `root` is the pid of
/// the job's root, 0 while there is none.
pub(crate) fn watch_faults(root: &AtomicI32, report: impl Fn(Fault) -> bool) {
    let pids = || match root.load(Ordering::Relaxed) {
        0 => Vec::new(),
        root => process::tree(root),
    };
    while !uses_gpu(&pids()) {
        std::thread::sleep(LOOK);
    }
    match load() {
        Some(nvml) if events_of(&nvml, &pids, &report).is_ok() => {}
        _ => log_of(&pids, &report),
    }
}

fn events_of(nvml: &Nvml, pids: &impl Fn() -> Vec<i32>, report: &impl Fn(Fault) -> bool) -> Result<(), NvmlError> {
    let mut set = nvml.create_event_set()?;
    let mut registered = false;
    for device in devices(nvml) {
        if device.supported_event_types()?.contains(EventTypes::CRITICAL_XID_ERROR) {
            set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set).map_err(|failed| failed.error)?;
            registered = true;
        }
    }
    if !registered {
        return Err(NvmlError::NotSupported);
    }
    loop {
        match set.wait(WAIT_MS) {
            Ok(event) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => u32::try_from(xid).unwrap_or(u32::MAX),
                    _ => continue,
                };
                // One that is lost cannot be asked who uses it.
                if runs(&event.device, &pids()) == Some(false) {
                    continue;
                }
                let gpu = event.device.uuid().unwrap_or_else(|_| "a GPU".into());
                if !report(Fault { gpu, xid }) {
                    return Ok(());
                }
            }
            Err(NvmlError::Timeout) => {}
            Err(error) => return Err(error),
        }
    }
}

fn log_of(pids: &impl Fn() -> Vec<i32>, report: &impl Fn(Fault) -> bool) {
    let Ok(mut log) = KernelLog::from_now() else { return };
    loop {
        std::thread::sleep(Duration::from_millis(u64::from(WAIT_MS)));
        for (_, notice) in log.read() {
            if let Notice::Xid { gpu, xid, pid } = notice
                && pid.is_none_or(|pid| pids().contains(&pid))
                && !report(Fault { gpu, xid })
            {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_the_driver_uses_no_gpu() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!uses_gpu(&[own]));
        assert!(!GpuWork::default().is_working(own));
    }
}

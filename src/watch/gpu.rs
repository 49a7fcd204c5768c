//! The GPUs that a job uses: whether they work for it, and faults that the driver reports (Xid).
//!
//! NVML is asked only once the job has a GPU's device open. Without NVML, faults are read from the kernel's log, and
//! GPUs count as working: a job must not be ended because their state is unknown.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, Nvml};

use super::kin::{Kin, Named, Whose, in_first_namespace};
use super::kmsg::{KernelLog, Notice};
use rekindle_base::xid::SWITCH_TIMEOUT;
use rekindle_os::{clock, process};

/// A fault of a GPU that the job uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    /// Its UUID, or its PCI address if it is from the kernel's log.
    pub(crate) gpu: String,
    /// Its PCI address as the kernel's log has it, if it is known.
    pub(crate) place: Option<String>,
    /// The number of the fault (Xid).
    pub(crate) xid: u32,
    /// Whose process it struck.
    pub(crate) whose: Whose,
    /// Another program that used the GPU then. Only asked for a context switch that timed out.
    pub(crate) beside: Option<Named>,
    /// When, since the boot.
    pub(crate) at: Duration,
}

/// How often to check whether a job has started to use a GPU.
const LOOK: Duration = Duration::from_secs(5);
/// How often to check which GPUs it has open.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
/// How long NVML waits for an event at a time, in milliseconds; in between, the end of the job is noticed.
const WAIT_MS: u32 = 2000;

/// Whether one of the processes has a device of the driver open.
fn uses_gpu(pids: &[i32]) -> bool {
    let mut targets = pids.iter().flat_map(|pid| process::descriptors(*pid));
    targets.any(|(_, target)| target.as_os_str().as_encoded_bytes().starts_with(b"/dev/nvidia"))
}

fn load() -> Option<Nvml> {
    Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init().ok()
}

fn devices(nvml: &Nvml) -> Vec<Device<'_>> {
    (0..nvml.device_count().unwrap_or(0)).filter_map(|index| nvml.device_by_index(index).ok()).collect()
}

/// Whether one of the processes runs on the device; `None` if unknown. In a container the driver's pids may be
/// different.
fn runs(device: &Device<'_>, pids: &[i32]) -> Option<bool> {
    let on_it = device.running_compute_processes().ok()?;
    let ours = |pid: u32| i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid));
    if on_it.iter().any(|process| ours(process.pid)) {
        return Some(true);
    }
    // Pids that do not exist here may be ours under another number.
    let strangers = on_it.iter().any(|process| !std::path::Path::new(&format!("/proc/{}", process.pid)).exists());
    if strangers { None } else { Some(false) }
}

/// A program on the device that is neither the job's nor ours. Unknown in a container, where the driver's pids are
/// different.
fn other_on(device: &Device<'_>) -> Option<Named> {
    if !in_first_namespace() {
        return None;
    }
    // The job, and the process that copies its memory.
    let ours = process::tree(std::process::id().cast_signed());
    let on_it = device.running_compute_processes().ok()?;
    let pids = on_it.iter().filter_map(|process| i32::try_from(process.pid).ok());
    // One that is dead has no name.
    pids.filter(|pid| !ours.contains(pid)).find_map(|pid| Some(Named { pid, name: Some(process::name(pid)?) }))
}

/// The same, of the GPU with this PCI address in the kernel's log.
pub(crate) fn other_at(place: &str) -> Option<Named> {
    let nvml = load()?;
    let is_it = |device: &Device<'_>| device.pci_info().is_ok_and(|pci| is_same_gpu(&pci.bus_id, place));
    devices(&nvml).iter().find(|device| is_it(device)).and_then(other_on)
}

/// Looks for processes on GPUs. Sees none without NVML, and in a container, where the driver's pids are different.
pub(crate) struct OnGpus(Option<Nvml>);

impl OnGpus {
    /// Loads NVML.
    pub(crate) fn look() -> OnGpus {
        OnGpus(load().filter(|_| in_first_namespace()))
    }

    /// Whether a GPU has one of these.
    pub(crate) fn have_any(&self, pids: &BTreeSet<i32>) -> bool {
        let is_one = |pid: u32| i32::try_from(pid).is_ok_and(|pid| pids.contains(&pid));
        let devices = self.0.iter().flat_map(devices);
        devices
            .flat_map(|device| device.running_compute_processes().unwrap_or_default())
            .any(|process| is_one(process.pid))
    }
}

/// Whether GPUs work for a job.
#[derive(Default)]
pub(crate) struct GpuWork {
    nvml: Option<Nvml>,
    /// The driver's time stamp of the newest sample seen, microseconds.
    until: u64,
}

impl fmt::Debug for GpuWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuWork").field("until", &self.until).finish_non_exhaustive()
    }
}

impl GpuWork {
    /// A new life begins.
    pub(crate) fn forget(&mut self) {
        // The driver keeps samples for some seconds: those of the previous life do not count.
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
                // No new samples; or a driver, a mode (MIG) or a GPU without samples.
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

/// Reports faults of the GPUs that the job uses, as long as `report` returns true. `root` is the pid of the job's root,
/// 0 while there is none.
pub(crate) fn watch_faults(root: &AtomicI32, kin: &Kin, report: impl Fn(Fault) -> bool) {
    let pids = || match root.load(Ordering::Relaxed) {
        0 => Vec::new(),
        root => process::tree(root),
    };
    while !uses_gpu(&pids()) {
        std::thread::sleep(LOOK);
    }
    kin.look();
    let mut looks = Looks { root, kin, last: Instant::now() };
    match load() {
        Some(nvml) if events_of(&nvml, &pids, &mut looks, &report).is_ok() => {}
        _ => log_of(&mut looks, &report),
    }
}

/// Looks which GPUs the job has open: from time to time, as a fault may end it before its first image.
struct Looks<'a> {
    root: &'a AtomicI32,
    kin: &'a Kin,
    last: Instant,
}

impl Looks<'_> {
    fn again(&mut self) {
        if self.last.elapsed() >= LOOK_AGAIN {
            self.now();
        }
    }

    /// A fault that names nobody is the job's if it uses that GPU.
    fn before(&mut self, named: Option<&Named>) {
        if named.is_none() {
            self.now();
        }
    }

    fn now(&mut self) {
        self.last = Instant::now();
        // Between two lives the root's pid may be another program's.
        if self.root.load(Ordering::Relaxed) != 0 {
            self.kin.look();
        }
    }
}

/// The lines of the log that no event has come for yet.
#[derive(Debug, Default)]
struct Lines {
    log: Option<KernelLog>,
    waiting: Vec<(String, u32, Option<Named>)>,
}

/// How much later than the event its line may be there.
const LATE: Duration = Duration::from_millis(50);

impl Lines {
    /// The process that the log names for this fault. NVML does not say.
    fn take(&mut self, gpu: Option<&str>, xid: u32) -> Option<Named> {
        for attempt in 0..2 {
            if attempt > 0 {
                std::thread::sleep(LATE);
            }
            let read = self.log.as_mut().map(KernelLog::read).unwrap_or_default();
            self.waiting.extend(read.into_iter().filter_map(|(_, notice)| match notice {
                Notice::Xid { gpu, xid, process } => Some((gpu, xid, process)),
                Notice::OutOfMemory { .. } => None,
            }));
            let is_it = |(at, number, _): &(String, u32, Option<Named>)| {
                *number == xid && gpu.is_none_or(|gpu| is_same_gpu(gpu, at))
            };
            if let Some(at) = self.waiting.iter().position(is_it) {
                return self.waiting.drain(..=at).next_back()?.2;
            }
        }
        None
    }
}

/// The PCI address as the log has it: NVML writes `00000000:3B:00.0`, the log `0000:3b:00`.
fn in_log(nvml: &str) -> Option<String> {
    let device = nvml.to_lowercase();
    let (domain, place) = device.split('.').next()?.split_once(':')?;
    Some(format!("{:04x}:{place}", u32::from_str_radix(domain, 16).ok()?))
}

fn is_same_gpu(nvml: &str, log: &str) -> bool {
    in_log(nvml).is_some_and(|gpu| gpu == log)
}

fn events_of(
    nvml: &Nvml,
    pids: &impl Fn() -> Vec<i32>,
    looks: &mut Looks<'_>,
    report: &impl Fn(Fault) -> bool,
) -> Result<(), NvmlError> {
    let mut lines = Lines { log: KernelLog::from_now().ok(), waiting: Vec::new() };
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
        looks.again();
        match set.wait(WAIT_MS) {
            Ok(event) => {
                let xid = match event.event_data {
                    Some(XidError::Value(xid)) => u32::try_from(xid).unwrap_or(u32::MAX),
                    _ => continue,
                };
                let at = clock::since_boot();
                let place = event.device.pci_info().ok().map(|pci| pci.bus_id);
                let named = lines.take(place.as_deref(), xid);
                looks.before(named.as_ref());
                let place = place.and_then(|place| in_log(&place));
                let whose = match &place {
                    Some(gpu) => looks.kin.struck(gpu, named),
                    None => Some(looks.kin.whose(named)),
                };
                let Some(whose) = whose else { continue };
                // A lost GPU cannot be asked for its processes.
                if whose != Whose::Job && runs(&event.device, &pids()) == Some(false) {
                    continue;
                }
                let beside = (xid == SWITCH_TIMEOUT).then(|| other_on(&event.device)).flatten();
                let gpu = event.device.uuid().unwrap_or_else(|_| "a GPU".into());
                if !report(Fault { gpu, place, xid, whose, beside, at }) {
                    return Ok(());
                }
            }
            Err(NvmlError::Timeout) => {}
            Err(error) => return Err(error),
        }
    }
}

fn log_of(looks: &mut Looks<'_>, report: &impl Fn(Fault) -> bool) {
    let Ok(mut log) = KernelLog::from_now() else { return };
    loop {
        looks.again();
        log.wait(Duration::from_millis(u64::from(WAIT_MS)));
        // The log has a clock of its own.
        let at = clock::since_boot();
        for (_, notice) in log.read() {
            let Notice::Xid { gpu, xid, process } = notice else { continue };
            looks.before(process.as_ref());
            if let Some(whose) = looks.kin.struck(&gpu, process)
                && !report(Fault { place: Some(gpu.clone()), gpu, xid, whose, beside: None, at })
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
    fn an_event_and_its_line_are_of_the_same_gpu() {
        assert!(is_same_gpu("00000000:3B:00.0", "0000:3b:00"));
        assert!(is_same_gpu("00000001:EA:00.0", "0001:ea:00"));
        assert!(!is_same_gpu("00000000:3B:00.0", "0000:3c:00") && !is_same_gpu("00000000:3B:00.0", "0001:3b:00"));
        let named = |pid| Some(Named { pid, name: None });
        let line = |gpu: &str, xid, pid| (gpu.to_owned(), xid, named(pid));
        let waiting = vec![line("0000:3b:00", 45, 7), line("0000:3c:00", 109, 8), line("0000:3b:00", 109, 9)];
        let mut lines = Lines { log: None, waiting };
        assert_eq!(lines.take(Some("00000000:3B:00.0"), 109), named(9));
        assert_eq!(lines.take(Some("00000000:3B:00.0"), 109), None);
    }

    #[test]
    fn a_process_without_the_driver_uses_no_gpu() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!uses_gpu(&[own]));
        assert!(!GpuWork::default().is_working(own));
    }
}

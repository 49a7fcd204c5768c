//! What NVML and the kernel module report about the GPUs of this machine. All of it is optional: it is used in
//! manifests, preflight and `doctor`, and nothing may fail because it is missing.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use nvml_wrapper::enum_wrappers::device::GpuVirtualizationMode;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::{Device, Nvml};

use crate::GpuUuid;

/// Whether a GPU is divided into instances, which cannot be checkpointed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mig {
    /// It is divided: MIG mode is on.
    On,
    /// It is whole, or of a kind that cannot be divided.
    Off,
    /// Not known without NVML.
    Unknown,
}

/// One GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its UUID.
    pub uuid: GpuUuid,
    /// The product, for example `NVIDIA H200`.
    pub name: Option<String>,
    /// Its number, as nvidia-smi counts. `None` without NVML.
    pub index: Option<u32>,
    /// Its PCI address, for example `0000:3b:00.0`.
    pub pci: Option<String>,
    /// Total memory in bytes.
    pub memory_total: Option<u64>,
    /// Memory in use by all processes, in bytes.
    pub memory_used: Option<u64>,
    /// Available memory in bytes: neither in use nor reserved by the driver.
    pub memory_free: Option<u64>,
    /// Whether it is divided.
    pub mig: Mig,
    /// Whether it is a virtual GPU, a part that the host gives to a virtual machine (vGPU), which cannot be
    /// checkpointed.
    pub is_virtual: bool,
}

/// The GPUs of this machine and who uses them, at the time of the call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuInventory {
    /// The version of the driver.
    pub driver: Option<String>,
    /// The visible GPUs.
    pub gpus: Vec<Gpu>,
    /// Device memory of each compute process on each GPU, bytes. None without NVML. The pids are those of the host as
    /// the kernel module sees it; in a container they may be missing.
    pub used_by_pid: Option<BTreeMap<u32, BTreeMap<GpuUuid, u64>>>,
}

impl GpuInventory {
    /// Reads from NVML, or without it from the kernel module, which has only names and UUIDs. Empty without a driver.
    #[must_use]
    pub fn read() -> Self {
        // Not kept open: an initialised NVML has /dev/nvidiactl open. The crate's default is libnvidia-ml.so, which
        // only development packages install.
        match Nvml::builder().lib_path("libnvidia-ml.so.1".as_ref()).init() {
            Ok(nvml) => from_nvml(&nvml),
            Err(_) => GpuInventory::of_kernel_module(),
        }
    }

    /// Names and UUIDs from the kernel module. A GPU that nothing has used yet may be missing.
    #[must_use]
    pub fn of_kernel_module() -> Self {
        from_proc(Path::new("/proc/driver/nvidia/gpus"))
    }

    /// Device memory of process `pid` on each GPU, bytes.
    #[must_use]
    pub fn used_on(&self, pid: i32) -> Option<&BTreeMap<GpuUuid, u64>> {
        self.used_by_pid.as_ref()?.get(&u32::try_from(pid).ok()?)
    }

    /// Device memory of process `pid`, bytes.
    #[must_use]
    pub fn used_by(&self, pid: i32) -> Option<u64> {
        Some(self.used_on(pid)?.values().sum())
    }
}

/// Whether a value of CUDA_VISIBLE_DEVICES names an instance of a divided GPU.
#[must_use]
pub fn names_instance(visible: &str) -> bool {
    visible.split(',').any(|one| one.trim().starts_with("MIG-"))
}

fn from_nvml(nvml: &Nvml) -> GpuInventory {
    let devices: Vec<Device<'_>> =
        (0..nvml.device_count().unwrap_or(0)).filter_map(|index| nvml.device_by_index(index).ok()).collect();
    let mut used: BTreeMap<u32, BTreeMap<GpuUuid, u64>> = BTreeMap::new();
    for device in &devices {
        let (Some(uuid), Ok(processes)) = (uuid(device), device.running_compute_processes()) else { continue };
        for process in processes {
            if let UsedGpuMemory::Used(bytes) = process.used_gpu_memory {
                *used.entry(process.pid).or_default().entry(uuid).or_insert(0) += bytes;
            }
        }
    }
    GpuInventory {
        driver: nvml.sys_driver_version().ok().or_else(installed),
        gpus: devices.iter().filter_map(gpu).collect(),
        used_by_pid: Some(used),
    }
}

fn uuid(device: &Device<'_>) -> Option<GpuUuid> {
    device.uuid().ok()?.parse().ok()
}

fn gpu(device: &Device<'_>) -> Option<Gpu> {
    let memory = device.memory_info().ok();
    Some(Gpu {
        uuid: uuid(device)?,
        name: device.name().ok(),
        index: device.index().ok(),
        pci: device.pci_info().ok().map(|pci| pci.bus_id),
        memory_total: memory.as_ref().map(|memory| memory.total),
        memory_used: memory.as_ref().map(|memory| memory.used),
        memory_free: memory.as_ref().map(|memory| memory.free),
        // A GPU that cannot be divided returns NotSupported.
        mig: if device.mig_mode().is_ok_and(|mode| mode.current == 1) { Mig::On } else { Mig::Off },
        // A GPU that is passed through completely is not a virtual one.
        is_virtual: matches!(device.virtualization_mode(), Ok(GpuVirtualizationMode::Vgpu)),
    })
}

fn installed() -> Option<String> {
    crate::installed().map(|version| version.to_string())
}

/// One folder per GPU, named after its PCI address, with a file `information`.
fn from_proc(gpus: &Path) -> GpuInventory {
    let mut folders: Vec<_> = fs::read_dir(gpus).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    folders.sort();
    let gpus = folders.iter().filter_map(|folder| {
        let gpu = parse_information(&fs::read_to_string(folder.join("information")).ok()?)?;
        Some(Gpu { pci: folder.file_name().map(|name| name.to_string_lossy().into_owned()), ..gpu })
    });
    GpuInventory { driver: installed(), gpus: gpus.collect(), used_by_pid: None }
}

fn parse_information(text: &str) -> Option<Gpu> {
    let field = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.trim_start().strip_prefix(':'));
        line.map(str::trim).filter(|value| !value.is_empty())
    };
    Some(Gpu {
        uuid: field("GPU UUID")?.parse().ok()?,
        name: field("Model").map(str::to_owned),
        index: None,
        pci: None,
        memory_total: None,
        memory_used: None,
        memory_free: None,
        mig: Mig::Unknown,
        is_virtual: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFORMATION: &str = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 261\n\
        GPU UUID: \t GPU-00112233-4455-6677-8899-aabbccddeeff\nVideo BIOS: \t 96.00\n";

    #[test]
    fn the_kernel_module_tells_names_and_uuids() {
        let gpus = tempfile::tempdir().unwrap();
        for (address, text) in [("0000:01:00.0", INFORMATION), ("0000:02:00.0", "Model: broken\n")] {
            let folder = gpus.path().join(address);
            fs::create_dir(&folder).unwrap();
            fs::write(folder.join("information"), text).unwrap();
        }
        let inventory = from_proc(gpus.path());
        assert_eq!(inventory.gpus.len(), 1);
        assert_eq!(inventory.gpus[0].name.as_deref(), Some("NVIDIA H200"));
        assert_eq!(inventory.gpus[0].uuid.to_string(), "GPU-00112233-4455-6677-8899-aabbccddeeff");
        assert_eq!(inventory.gpus[0].mig, Mig::Unknown);
        assert_eq!(inventory.gpus[0].pci.as_deref(), Some("0000:01:00.0"));
        assert_eq!(inventory.used_by(1), None);
    }

    #[test]
    fn no_driver_is_an_empty_inventory() {
        assert_eq!(from_proc(Path::new("/nowhere")).gpus, []);
    }
}

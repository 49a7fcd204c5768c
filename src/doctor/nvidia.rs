//! NVIDIA: the driver, its checkpoint functions, the GPUs, and what prevents checkpoints of them. On a machine without
//! a GPU nothing is missing: `run` supervises CPU jobs there.

use std::path::Path;

use super::Check;
use rekindle_base::chain;
use rekindle_cuda::nvml::{GpuInventory, Mig, names_instance};
use rekindle_cuda::{self as cuda, Driver, DriverVersion, Function};
use rekindle_engine::launch::gpus;
use rekindle_os::process;

#[derive(Debug)]
pub(super) struct Facts {
    /// Number of NVIDIA's display controllers on the PCI bus, with or without a driver.
    pub(super) on_bus: usize,
    pub(super) installed: Option<DriverVersion>,
    /// The functions of libcuda.so.1, or why it cannot be loaded.
    pub(super) library: Result<Vec<Function>, String>,
    pub(super) gpus: GpuInventory,
    /// Pids of NVIDIA's multi-process service.
    pub(super) mps: Vec<i32>,
    /// CUDA_VISIBLE_DEVICES, which a job inherits.
    pub(super) visible: Option<String>,
    pub(super) arch: &'static str,
}

pub(super) fn gather() -> Facts {
    let library = Driver::load().map_err(|error| chain(&error));
    let has = |driver: Driver| Function::ALL.into_iter().filter(|function| driver.supports(*function)).collect();
    Facts {
        on_bus: on_bus(Path::new("/sys/bus/pci/devices")),
        installed: cuda::installed(),
        library: library.map(has),
        gpus: GpuInventory::read(),
        mps: mps(),
        visible: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        arch: std::env::consts::ARCH,
    }
}

/// Vendor 10de is NVIDIA, class 03 a display controller (with or without a monitor).
fn on_bus(devices: &Path) -> usize {
    let read = |path: &Path, name: &str| std::fs::read_to_string(path.join(name)).unwrap_or_default();
    let is_gpu = |path: &Path| read(path, "vendor").trim() == "0x10de" && read(path, "class").starts_with("0x03");
    std::fs::read_dir(devices).into_iter().flatten().flatten().filter(|entry| is_gpu(&entry.path())).count()
}

/// nvidia-cuda-mps-control and nvidia-cuda-mps-server, as far as the kernel stores a name (TASK_COMM_LEN, 15 bytes).
const MPS: &str = "nvidia-cuda-mps";

fn mps() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| process::name(*pid).is_some_and(|name| name == MPS)).collect()
}

pub(super) fn judge(facts: &Facts) -> Vec<Check> {
    let Some(driver) = driver(facts) else {
        let none = ["nvidia.driver", "nvidia.functions", "nvidia.gpus", "nvidia.mps"];
        return none.into_iter().map(|name| Check::not_here(name, "no NVIDIA GPU and no driver")).collect();
    };
    vec![driver, functions(facts), inventory(facts), mps_runs(facts)]
}

/// `None` if there is nothing of NVIDIA.
fn driver(facts: &Facts) -> Option<Check> {
    let name = "nvidia.driver";
    let install = "install NVIDIA driver 580 or newer (in a container: the NVIDIA container toolkit, --gpus all)";
    Some(match (&facts.installed, &facts.library) {
        (None, Err(_)) if facts.on_bus == 0 => return None,
        (None, Err(_)) => {
            Check::warn(name, format!("{} NVIDIA GPU(s) and no driver: CPU jobs only", facts.on_bus), install)
        }
        // WSL has a library, and no kernel module of its own.
        (None, Ok(_)) => Check::warn(
            name,
            "libcuda.so.1 is installed, but the kernel module is not loaded: snapshots of CUDA jobs fail",
            "load it with `sudo modprobe nvidia`; WSL has none: use Linux itself",
        ),
        (Some(version), _) if facts.arch != "x86_64" => Check::warn(
            name,
            format!("driver {version} on {}: it can checkpoint only on x86-64", facts.arch),
            "run CUDA jobs on an x86-64 machine; CPU jobs work here",
        ),
        (Some(version), _) if version.major() < 570 => {
            Check::warn(name, format!("driver {version}: snapshots of CUDA jobs need 570 or newer"), install)
        }
        (Some(version), _) if gpus::hangs_the_host(version) => Check::warn(
            name,
            format!(
                "driver {version}: the whole machine hangs when a restored CUDA process dies while it uses a GPU \
                (NVIDIA/cuda-checkpoint#53). rekindle checkpoints such a process before killing it; this does not \
                help if the process crashes, or if something else kills it or rekindle"
            ),
            "install an NVIDIA driver other than 595, such as 580",
        ),
        (Some(version), _) if version.major() < 580 => {
            Check::ok(name, format!("driver {version}; a restore to another GPU needs 580"))
        }
        (Some(version), _) => Check::ok(name, format!("driver {version}")),
    })
}

fn functions(facts: &Facts) -> Check {
    let name = "nvidia.functions";
    let has = match &facts.library {
        Ok(has) => has,
        Err(why) => {
            let fix =
                "install the driver's compute libraries (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)";
            return Check::warn(name, why.clone(), fix);
        }
    };
    let absent: Vec<Function> = Function::ALL.into_iter().filter(|function| !has.contains(function)).collect();
    let words = |function: &Function| format!("{} (driver {})", function.symbol(), function.since());
    let list = absent.iter().map(words).collect::<Vec<_>>().join(", ");
    // Functions since driver 615 are for custom storage, which `run` does not use.
    match absent.iter().filter(|function| function.since() <= 570).count() {
        0 if absent.is_empty() => Check::ok(name, format!("all {}", has.len())),
        0 => Check::ok(name, format!("{} of {}; not needed: {list}", has.len(), Function::ALL.len())),
        _ => Check::warn(
            name,
            format!("snapshots of CUDA jobs fail without {list}"),
            "install NVIDIA driver 580 or newer",
        ),
    }
}

fn inventory(facts: &Facts) -> Check {
    let name = "nvidia.gpus";
    let gpus = &facts.gpus.gpus;
    if gpus.is_empty() {
        return Check::warn(
            name,
            "the driver finds no GPU",
            "check `nvidia-smi` (in a container: --gpus all; in a Slurm job: --gpus)",
        );
    }
    let mut kinds: Vec<(String, usize)> = Vec::new();
    for gpu in gpus {
        let kind = gpu.name.clone().unwrap_or_else(|| "GPU".into());
        match kinds.iter_mut().find(|(known, _)| *known == kind) {
            Some((_, count)) => *count += 1,
            None => kinds.push((kind, 1)),
        }
    }
    let list = kinds.iter().map(|(kind, count)| format!("{count} x {kind}")).collect::<Vec<_>>().join(", ");
    let divided: Vec<String> = gpus.iter().filter(|gpu| gpu.mig == Mig::On).map(|gpu| gpu.uuid.to_string()).collect();
    if !divided.is_empty() {
        let commands: Vec<String> = divided.iter().map(|uuid| format!("sudo nvidia-smi -i {uuid} -mig 0")).collect();
        let found = format!("{list}; {} divided into MIG instances, which cannot be checkpointed", divided.len());
        return Check::warn(name, found, commands.join(" && "));
    }
    if let Some(visible) = facts.visible.as_deref().filter(|visible| names_instance(visible)) {
        let found = format!("{list}; CUDA_VISIBLE_DEVICES={visible} is a MIG instance, which cannot be checkpointed");
        return Check::warn(name, found, "unset CUDA_VISIBLE_DEVICES, or set it to whole GPUs");
    }
    let parts = gpus.iter().filter(|gpu| gpu.is_virtual).count();
    if parts > 0 {
        let found = format!("{list}; {parts} virtual (vGPU), which cannot be checkpointed");
        return Check::warn(name, found, "give this virtual machine whole GPUs (PCI pass-through)");
    }
    if gpus.iter().any(|gpu| gpu.mig == Mig::Unknown) {
        return Check::warn(
            name,
            format!("{list}; their memory and MIG are unknown without NVML (libnvidia-ml.so.1)"),
            "install NVIDIA's management library (in a container: NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
        );
    }
    Check::ok(name, list)
}

fn mps_runs(facts: &Facts) -> Check {
    let name = "nvidia.mps";
    if facts.mps.is_empty() {
        return Check::ok(name, "the multi-process service is not running");
    }
    let pids = facts.mps.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    Check::warn(
        name,
        format!("the multi-process service is running (pid {pids}): its clients cannot be checkpointed"),
        "stop it with `echo quit | sudo nvidia-cuda-mps-control`",
    )
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::doctor::State;
    use rekindle_cuda::GpuUuid;
    use rekindle_cuda::nvml::Gpu;

    /// A GPU with this many bytes.
    pub(in crate::doctor) fn gpu(bytes: u64) -> Gpu {
        Gpu {
            uuid: GpuUuid::from_bytes([7; 16]),
            name: Some("NVIDIA H200".into()),
            index: Some(0),
            pci: None,
            memory_total: Some(bytes),
            memory_used: Some(0),
            memory_free: Some(bytes),
            mig: Mig::Off,
            is_virtual: false,
        }
    }

    pub(in crate::doctor) fn facts(version: &str) -> Facts {
        let old = Function::ALL.into_iter().filter(|function| function.since() <= 570).collect();
        Facts {
            on_bus: 1,
            installed: DriverVersion::parse(version),
            library: Ok(old),
            gpus: GpuInventory { gpus: vec![gpu(1), gpu(1)], ..GpuInventory::default() },
            mps: Vec::new(),
            visible: None,
            arch: "x86_64",
        }
    }

    fn find(facts: &Facts, name: &str) -> Check {
        judge(facts).into_iter().find(|c| c.check == name).unwrap()
    }

    #[test]
    fn nothing_of_nvidias_is_no_fault() {
        let none = Facts {
            on_bus: 0,
            installed: None,
            library: Err("no such file".into()),
            gpus: GpuInventory::default(),
            ..facts("580.1")
        };
        assert_eq!(judge(&none).len(), 4);
        assert!(judge(&none).iter().all(|c| c.state == State::NotHere));
        let no_driver = Facts { on_bus: 2, ..none };
        assert_eq!(find(&no_driver, "nvidia.driver").state, State::Warn);
    }

    #[test]
    fn a_new_driver_is_ok_and_an_old_one_keeps_cpu_jobs() {
        assert!(judge(&facts("580.159.04")).iter().all(|c| c.state == State::Ok));
        let hangs = find(&facts("595.71.05"), "nvidia.driver");
        assert!(hangs.state == State::Warn && hangs.found.contains("the whole machine hangs"), "{hangs:?}");
        assert!(find(&facts("570.10"), "nvidia.driver").found.contains("580"));
        assert_eq!(find(&facts("535.104"), "nvidia.driver").state, State::Warn);
        assert_eq!(find(&Facts { installed: None, ..facts("1.1") }, "nvidia.driver").state, State::Warn);
        assert_eq!(find(&Facts { arch: "aarch64", ..facts("580.1") }, "nvidia.driver").state, State::Warn);
    }

    #[test]
    fn functions_that_are_needed_and_those_that_are_not() {
        let check = find(&facts("580.1"), "nvidia.functions");
        assert_eq!(check.state, State::Ok);
        assert!(check.found.contains("cuCheckpointOperationComplete (driver 615)"), "{}", check.found);
        let all = Facts { library: Ok(Function::ALL.to_vec()), ..facts("615.1") };
        assert_eq!(find(&all, "nvidia.functions").found, "all 7");
        let few = Facts { library: Ok(vec![Function::GetState]), ..facts("550.1") };
        assert_eq!(find(&few, "nvidia.functions").state, State::Warn);
        let none = Facts { library: Err("needs it".into()), ..facts("580.1") };
        assert_eq!(find(&none, "nvidia.functions").found, "needs it");
    }

    #[test]
    fn what_can_not_be_checkpointed_is_told_with_the_command_that_helps() {
        let with = |gpus| Facts { gpus: GpuInventory { gpus, ..GpuInventory::default() }, ..facts("580.1") };
        assert_eq!(find(&facts("580.1"), "nvidia.gpus").found, "2 x NVIDIA H200");
        let divided = find(&with(vec![Gpu { mig: Mig::On, ..gpu(1) }]), "nvidia.gpus");
        assert_eq!(divided.state, State::Warn);
        assert!(divided.fix.unwrap().contains("nvidia-smi -i GPU-07070707-0707"));
        let instance = find(&Facts { visible: Some("0,MIG-1".into()), ..facts("580.1") }, "nvidia.gpus");
        assert!(instance.state == State::Warn && instance.found.contains("is a MIG instance"), "{instance:?}");
        let part = find(&with(vec![Gpu { is_virtual: true, ..gpu(1) }]), "nvidia.gpus");
        assert!(part.state == State::Warn && part.found.contains("1 virtual (vGPU)"), "{part:?}");
        assert_eq!(find(&with(vec![Gpu { mig: Mig::Unknown, ..gpu(1) }]), "nvidia.gpus").state, State::Warn);
        assert_eq!(find(&with(vec![]), "nvidia.gpus").state, State::Warn);
        let mps = find(&Facts { mps: vec![7], ..facts("580.1") }, "nvidia.mps");
        assert_eq!(mps.state, State::Warn);
        assert!(mps.found.contains("pid 7"));
    }

    #[test]
    fn gpus_on_the_bus_are_told_from_other_devices() {
        let bus = tempfile::tempdir().unwrap();
        for (name, vendor, class) in
            [("0", "0x10de\n", "0x030200\n"), ("1", "0x10de\n", "0x040300\n"), ("2", "0x8086\n", "0x030000\n")]
        {
            let folder = bus.path().join(name);
            std::fs::create_dir(&folder).unwrap();
            std::fs::write(folder.join("vendor"), vendor).unwrap();
            std::fs::write(folder.join("class"), class).unwrap();
        }
        assert_eq!(on_bus(bus.path()), 1);
        assert_eq!(on_bus(Path::new("/nowhere")), 0);
    }
}

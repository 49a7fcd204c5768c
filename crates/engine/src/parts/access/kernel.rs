//! Files that the kernel generates: /proc, /sys and similar.
//!
//! The content of such a file can depend on who opened it (the kernel's `file_ns_capable`, `ptrace_may_access`), and
//! CRIU opens files with more rights than the job has. For example /proc/kallsyms then shows addresses,
//! /proc/PID/pagemap shows frames, and /proc/1/maps shows a process of another user. So a mode that lets everybody read
//! is not enough. A job may have open only files from a list: those that show the same to everybody, or that the kernel
//! checks at each read and write.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use super::files::WRITE;
use rekindle_os::mounts::{self, Mount};
use rekindle_os::process;

/// Types of file systems, in /proc/PID/mountinfo, from which a job may have nothing open.
const CLOSED: [&str; 14] = [
    "debugfs",
    "tracefs",
    "securityfs",
    "bpf",
    "efivarfs",
    "pstore",
    "configfs",
    "selinuxfs",
    "smackfs",
    "binfmt_misc",
    "resctrl",
    "xenfs",
    "fusectl",
    "rpc_pipefs",
];

/// Entries directly below /proc that show the same to everybody; some are folders.
const OF_THE_MACHINE: [&str; 42] = [
    "acpi",
    "buddyinfo",
    "bus",
    "cgroups",
    "cmdline",
    "config.gz",
    "consoles",
    "cpuinfo",
    "crypto",
    "devices",
    "diskstats",
    "dma",
    "driver",
    "execdomains",
    "fb",
    "filesystems",
    "fs",
    "interrupts",
    "irq",
    "loadavg",
    "locks",
    "mdstat",
    "meminfo",
    "misc",
    "mtrr",
    "partitions",
    "pressure",
    "scsi",
    "schedstat",
    "softirqs",
    "stat",
    "swaps",
    "sysvipc",
    "thread-self",
    "tty",
    "uptime",
    "version",
    "version_signature",
    "vmstat",
    "zoneinfo",
    "self",
    "asound",
];

/// Allowed entries of a process of the job: what they show is the job's own, or is checked at each use. Not pagemap and
/// stack, which show kernel addresses if root opened them.
const OF_A_PROCESS: [&str; 44] = [
    "arch_status",
    "attr",
    "autogroup",
    "auxv",
    "cgroup",
    "children",
    "clear_refs",
    "cmdline",
    "comm",
    "coredump_filter",
    "cpuset",
    "environ",
    "fd",
    "fdinfo",
    "io",
    "ksm_merging_pages",
    "ksm_stat",
    "limits",
    "map_files",
    "maps",
    "mem",
    "mountinfo",
    "mounts",
    "mountstats",
    "net",
    "ns",
    "numa_maps",
    "oom_adj",
    "oom_score",
    "oom_score_adj",
    "personality",
    "sched",
    "schedstat",
    "sessionid",
    "smaps",
    "smaps_rollup",
    "stat",
    "statm",
    "status",
    "syscall",
    "task",
    "timers",
    "timerslack_ns",
    "wchan",
];

/// The kernel's file systems in a mount namespace, by `st_dev`.
#[derive(Debug, Default)]
pub(crate) struct Kernels(BTreeMap<u64, Mounted>);

#[derive(Debug, PartialEq, Eq)]
struct Mounted {
    kind: String,
    /// Mount points, and which folder of the file system is mounted there.
    at: Vec<(PathBuf, PathBuf)>,
}

/// The result of the check of a kernel file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Every job may have it.
    Fine,
    /// A job may have it if its user may open it.
    IfItOpens,
    /// No job may have it.
    Refused,
}

impl Kernels {
    /// The kernel's file systems in the mount namespace of a process.
    pub(crate) fn of(pid: i32) -> std::io::Result<Kernels> {
        Ok(Kernels::among(mounts::of(pid)?))
    }

    fn among(mounts: Vec<Mount>) -> Kernels {
        let is_kernels = |kind: &str| CLOSED.contains(&kind) || ["proc", "sysfs", "cgroup", "cgroup2"].contains(&kind);
        let mut all = Kernels::default();
        for Mount { device, root, point, kind, .. } in mounts {
            if is_kernels(&kind) {
                let known = all.0.entry(device).or_insert_with(|| Mounted { kind, at: Vec::new() });
                known.at.push((point, root));
            }
        }
        all
    }

    /// None for a file that is on a file system of another kind. `tree` are the processes of the job.
    pub(crate) fn judge(
        &self,
        device: u64,
        path: &Path,
        access: u32,
        is_folder: bool,
        tree: &[i32],
    ) -> Option<Verdict> {
        let mounted = self.0.get(&device)?;
        // The path can be below several mounts; the deepest counts.
        let places = mounted.at.iter().filter(|(point, _)| path.starts_with(point));
        let place = places.max_by_key(|(point, _)| point.components().count());
        let inside = place.and_then(|(point, root)| Some(root.join(path.strip_prefix(point).ok()?)));
        let Some(inside) = inside else { return Some(Verdict::Refused) };
        let parts: Vec<&str> = inside
            .components()
            .filter_map(|part| if let Component::Normal(name) = part { name.to_str() } else { None })
            .collect();
        let writes = access & WRITE != 0;
        Some(match mounted.kind.as_str() {
            "proc" => in_proc(&parts, writes, is_folder, tree),
            // The registers of a PCI device; root can read more of them.
            "sysfs" if parts.last() == Some(&"config") || parts.contains(&"sections") => Verdict::Refused,
            "sysfs" => Verdict::IfItOpens,
            // The kernel checks the rights of the opener when a process is moved (Linux 5.16).
            "cgroup" | "cgroup2" if writes => Verdict::Refused,
            "cgroup" | "cgroup2" => Verdict::IfItOpens,
            _ => Verdict::Refused,
        })
    }
}

fn in_proc(parts: &[&str], writes: bool, is_folder: bool, tree: &[i32]) -> Verdict {
    let Some(first) = parts.first() else { return Verdict::IfItOpens };
    if let Ok(number) = first.parse::<i32>() {
        // Belongs to a process that has ended: nothing can be read any more.
        if parts.last().is_some_and(|name| name.ends_with(" (deleted)")) {
            return Verdict::Fine;
        }
        // The kernel gives entries of a process to root until it has executed a program again (proc(5), `dumpable`), so
        // the mode says nothing.
        let process = tree.iter().find(|pid| process::inner_pid(**pid) == Some(number));
        let Some(process) = process else {
            return if is_folder && parts.len() == 1 { Verdict::IfItOpens } else { Verdict::Refused };
        };
        let names = match parts {
            [_, "task", thread, rest @ ..] => match thread.parse().ok() {
                Some(thread) if process::thread_by_inner(*process, thread).is_some() => rest,
                _ => return Verdict::Refused,
            },
            [_, rest @ ..] => rest,
            [] => &[],
        };
        return match names.first() {
            None => Verdict::Fine,
            // Files with modes and owners of their own, of the network and not of the process.
            Some(&"net") if names.len() > 1 => Verdict::IfItOpens,
            Some(name) if OF_A_PROCESS.contains(name) => Verdict::Fine,
            Some(_) => Verdict::Refused,
        };
    }
    match *first {
        // Checked at each read and write (`proc_sys_call_handler`).
        "sys" => Verdict::IfItOpens,
        // PCI registers, as in /sys.
        "bus" if parts.get(1) == Some(&"pci") && parts.len() > 2 => Verdict::Refused,
        name if OF_THE_MACHINE.contains(&name) && !writes => Verdict::IfItOpens,
        _ => Verdict::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::super::files::READ;
    use super::*;

    const MOUNTS: &[u8] = b"\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
22 21 0:20 / /proc rw,nosuid - proc proc rw
23 21 0:21 / /sys rw,nosuid - sysfs sysfs rw
24 23 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
25 23 0:7 / /sys/kernel/debug rw - debugfs debugfs rw
26 21 0:20 /sys /odd\\040place rw - proc proc rw
";

    #[test]
    fn only_what_shows_everybody_the_same_is_left_open() {
        let kernels = Kernels::among(mounts::parse(MOUNTS));
        let judge = |minor: u32, path: &str, access: u32| {
            kernels.judge(libc::makedev(0, minor), Path::new(path), access, false, &[])
        };
        for path in ["/proc/stat", "/proc/meminfo", "/proc/driver/nvidia/version", "/proc/sys/kernel/hostname"] {
            assert_eq!(judge(20, path, READ), Some(Verdict::IfItOpens), "{path}");
        }
        for path in ["/proc/kallsyms", "/proc/modules", "/proc/1/maps", "/proc/keys", "/proc/kcore", "/proc/iomem"] {
            assert_eq!(judge(20, path, READ), Some(Verdict::Refused), "{path}");
        }
        assert_eq!(judge(20, "/proc/pressure/memory", READ | WRITE), Some(Verdict::Refused));
        assert_eq!(judge(20, "/odd place/kernel/hostname", READ), Some(Verdict::IfItOpens));
        assert_eq!(judge(20, "/elsewhere/stat", READ), Some(Verdict::Refused));
        assert_eq!(judge(21, "/sys/devices/system/cpu/online", READ), Some(Verdict::IfItOpens));
        assert_eq!(judge(21, "/sys/devices/pci0000:00/0000:00:01.0/config", READ), Some(Verdict::Refused));
        assert_eq!(judge(22, "/sys/fs/cgroup/memory.max", READ), Some(Verdict::IfItOpens));
        assert_eq!(judge(22, "/sys/fs/cgroup/cgroup.procs", WRITE), Some(Verdict::Refused));
        assert_eq!(judge(7, "/sys/kernel/debug/x", READ), Some(Verdict::Refused));
        assert_eq!(kernels.judge(libc::makedev(254, 0), Path::new("/etc/passwd"), READ, false, &[]), None);
    }

    #[test]
    fn entries_of_its_own_processes_are_the_jobs() {
        let kernels = Kernels::of(std::process::id().cast_signed()).unwrap();
        let own = std::process::id().cast_signed();
        let device = std::os::unix::fs::MetadataExt::dev(&std::fs::metadata("/proc/self/stat").unwrap());
        let judge = |name: &str, tree: &[i32]| {
            kernels.judge(device, Path::new(&format!("/proc/{own}/{name}")), READ, false, tree)
        };
        for name in ["maps", "mem", "net", &format!("task/{own}/stat")] {
            assert_eq!(judge(name, &[own]), Some(Verdict::Fine), "{name}");
            assert_eq!(judge(name, &[]), Some(Verdict::Refused), "{name}");
        }
        assert_eq!(judge("net/nf_conntrack", &[own]), Some(Verdict::IfItOpens), "it is of root only");
        assert_eq!(judge("maps (deleted)", &[]), Some(Verdict::Fine), "it has ended");
        for name in ["pagemap", "stack", "uid_map", "task/1/maps"] {
            assert_eq!(judge(name, &[own]), Some(Verdict::Refused), "{name}");
        }
    }
}

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

/// Entries of a process of the job: what they show is the job's own, or checked at each use. Not pagemap and stack, which
/// show the kernel's addresses to those whom root opened them for.
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

/// The file systems of the kernel in a mount namespace, by `st_dev`.
#[derive(Debug, Default)]
pub(crate) struct Kernels(BTreeMap<u64, Mounted>);

#[derive(Debug, PartialEq, Eq)]
struct Mounted {
    kind: String,
    /// Where, and which folder of it is there.
    at: Vec<(PathBuf, PathBuf)>,
}

/// What is to be said of a file of the kernel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Everybody may have it.
    Fine,
    /// Whoever may open it may have it.
    IfItOpens,
    /// A job has no business with it.
    Refused,
}

impl Kernels {
    /// Those in the mount namespace of a process.
    pub(crate) fn of(pid: i32) -> std::io::Result<Kernels> {
        Ok(Kernels::parse(&std::fs::read_to_string(format!("/proc/{pid}/mountinfo"))?))
    }

    fn parse(mountinfo: &str) -> Kernels {
        let mut all = Kernels::default();
        for line in mountinfo.lines() {
            let Some((head, tail)) = line.split_once(" - ") else { continue };
            let fields: Vec<&str> = head.split(' ').collect();
            let (Some(device), Some(root), Some(point)) = (fields.get(2), fields.get(3), fields.get(4)) else {
                continue;
            };
            let kind = tail.split(' ').next().unwrap_or_default();
            if !(CLOSED.contains(&kind) || ["proc", "sysfs", "cgroup", "cgroup2"].contains(&kind)) {
                continue;
            }
            let numbers = device.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
            let Some((major, minor)) = numbers else { continue };
            let known = all.0.entry(libc::makedev(major, minor));
            let known = known.or_insert_with(|| Mounted { kind: kind.into(), at: Vec::new() });
            known.at.push((unescaped(point), unescaped(root)));
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
        // Of the mounts that it can be below, the deepest is the one.
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
            // The registers of a PCI device; root sees more of them.
            "sysfs" if parts.last() == Some(&"config") || parts.contains(&"sections") => Verdict::Refused,
            "sysfs" => Verdict::IfItOpens,
            // Processes are moved with the rights of who opened the file (Linux 5.16).
            "cgroup" | "cgroup2" if writes => Verdict::Refused,
            "cgroup" | "cgroup2" => Verdict::IfItOpens,
            _ => Verdict::Refused,
        })
    }
}

fn in_proc(parts: &[&str], writes: bool, is_folder: bool, tree: &[i32]) -> Verdict {
    let Some(first) = parts.first() else { return Verdict::IfItOpens };
    if let Ok(number) = first.parse::<i32>() {
        // Of a process that has ended: nothing is to be read there any more.
        if parts.last().is_some_and(|name| name.ends_with(" (deleted)")) {
            return Verdict::Fine;
        }
        // The kernel gives entries of a process to root until it has executed a program again (proc(5), `dumpable`), so the
        // mode says nothing.
        let process = tree.iter().find(|pid| process::inner_pid(**pid) == Some(number));
        let Some(process) = process else {
            return if is_folder && parts.len() == 1 { Verdict::IfItOpens } else { Verdict::Refused };
        };
        let names = match parts {
            [_, "task", thread, rest @ ..] => match thread.parse().ok() {
                Some(thread) if process::find_thread(*process, thread).is_some() => rest,
                _ => return Verdict::Refused,
            },
            [_, rest @ ..] => rest,
            [] => &[],
        };
        return match names.first() {
            None => Verdict::Fine,
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

/// A name in mountinfo: blanks, tabs, line ends and backslashes are there in octal.
fn unescaped(name: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(name.len());
    let mut rest = name.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let octal = || u8::from_str_radix(std::str::from_utf8(after.get(..3)?).ok()?, 8).ok();
        match (first, octal()) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = after.get(3..).unwrap_or_default();
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    PathBuf::from(<std::ffi::OsString as std::os::unix::ffi::OsStringExt>::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::super::files::READ;
    use super::*;

    const MOUNTS: &str = "\
21 1 254:0 / / rw,relatime - ext4 /dev/root rw
22 21 0:20 / /proc rw,nosuid - proc proc rw
23 21 0:21 / /sys rw,nosuid - sysfs sysfs rw
24 23 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw
25 23 0:7 / /sys/kernel/debug rw - debugfs debugfs rw
26 21 0:20 /sys /odd\\040place rw - proc proc rw
";

    #[test]
    fn only_what_shows_everybody_the_same_is_left_open() {
        let kernels = Kernels::parse(MOUNTS);
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
        for name in ["maps", "mem", "net/dev", &format!("task/{own}/stat")] {
            assert_eq!(judge(name, &[own]), Some(Verdict::Fine), "{name}");
            assert_eq!(judge(name, &[]), Some(Verdict::Refused), "{name}");
        }
        assert_eq!(judge("maps (deleted)", &[]), Some(Verdict::Fine), "it has ended");
        for name in ["pagemap", "stack", "uid_map", "task/1/maps"] {
            assert_eq!(judge(name, &[own]), Some(Verdict::Refused), "{name}");
        }
    }
}

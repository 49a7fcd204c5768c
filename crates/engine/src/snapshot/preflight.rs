//! Checks whether a snapshot is possible. It runs while the job runs, so a refusal costs the job nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use super::Subject;
use crate::launch::interposer;
use crate::launch::mounted::Mounted;
use crate::parts::unrestorable::Unrestorable;
use crate::parts::{events, posix_timers, sessions, tasks, terminals};
use rekindle_cuda::nvml::{Gpu, GpuInventory, Mig, names_instance};
use rekindle_os::cgroup;
use rekindle_os::leases::{self, Lease};
use rekindle_os::process;
use rekindle_os::timerfd;

/// Why a snapshot was not tried.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Device memory does not fit into host memory.
    #[error("the GPU memory of the job ({need}) does not fit into the free host memory ({free} is free, and {keep} must stay free: snapshot.memory-reserve). With gpu.memory = \"kept\" large allocations need no host memory", need = ByteSize::b(*need), free = ByteSize::b(*free), keep = ByteSize::b(*keep))]
    Memory {
        /// Bytes of device memory.
        need: u64,
        /// Bytes of host memory available.
        free: u64,
        /// Bytes that must stay free.
        keep: u64,
    },
    /// It does not fit below the memory limit of the job's control group.
    #[error("the GPU memory of the job ({need}) does not fit into what the memory limit of its control group leaves ({free}): raise the limit (Slurm: --mem)", need = ByteSize::b(*need), free = ByteSize::b(*free))]
    Cgroup {
        /// Bytes of device memory.
        need: u64,
        /// Bytes below the limit.
        free: u64,
    },
    /// A debugger is attached to a process.
    #[error("process {pid} ({name}) is traced by process {tracer} (a debugger, strace): detach it")]
    Traced {
        pid: i32,
        name: String,
        /// The tracing process.
        tracer: i32,
    },
    /// CRIU would wait for it while the rest of the job is stopped.
    #[error(
        "process {pid} ({name}) is in the control group {group}, which is frozen, so CRIU cannot stop it: thaw the group \
         (echo 0 > {group}/cgroup.freeze, or docker unpause, systemctl thaw)"
    )]
    Frozen { pid: i32, name: String, group: String },
    /// CRIU cannot dump something a process has.
    #[error("process {pid} ({name}) has {what} open, which CRIU cannot dump{hint}")]
    Unsupported {
        pid: i32,
        name: String,
        /// What to do about it.
        what: &'static str,
        /// What helps.
        hint: &'static str,
    },
    /// CRIU dumps it, and looks for a file at the restore.
    #[error(
        "process {pid} ({name}) runs a program that is in memory and in no file ({program}: memfd_create and fexecve), which CRIU dumps \
         and cannot restore: run it from a file, which may be deleted once it runs. Snapshots continue when it has ended"
    )]
    Program {
        pid: i32,
        name: String,
        /// What the kernel calls the program.
        program: String,
    },
    /// CRIU has a table of a fixed size.
    #[error(
        "the job has {have} pipes open for reading, and CRIU dumps at most {most} (process {pid}, {name}, has {own}): close pipes that are \
         not needed, or use socket pairs (socketpair) or eventfds in their place"
    )]
    Pipes {
        have: usize,
        /// The size of the table.
        most: usize,
        /// The process that has the most of them.
        pid: i32,
        name: String,
        own: usize,
    },
    /// A restore would have it count the CPU time of another thread.
    #[error(
        "process {pid} ({name}) has a POSIX timer (ID {id} in its /proc/PID/timers) that counts the CPU time of one of its threads \
         (CLOCK_THREAD_CPUTIME_ID). The kernel does not tell which one, and a restore would have it count another: make it with the \
         clock of pthread_getcpuclockid(3), or with SIGEV_THREAD_ID, or delete it while snapshots are taken"
    )]
    UnknownTimer {
        pid: i32,
        name: String,
        /// The timer's id.
        id: u32,
    },
    /// The holder of a write lease must react to every open of the file.
    #[error(
        "process {pid} ({name}) has a write lease on {path} (fcntl F_SETLEASE): a snapshot would break the lease, which kills \
         most programs. Snapshots continue when the lease is released"
    )]
    Lease { pid: i32, name: String, path: String },
    /// CRIU breaks it again at the restore, and the holder gets a signal for it that it has had.
    #[error(
        "process {pid} ({name}) has a lease on {path} (fcntl F_SETLEASE) that another process is breaking: after a restore it would \
         get the lease's signal a second time. Snapshots continue when it has released the lease; the kernel ends it after \
         /proc/sys/fs/lease-break-time seconds"
    )]
    BreakingLease { pid: i32, name: String, path: String },
    /// Memory that a process shares with others cannot be seen.
    #[error(
        "process {pid} ({name}) uses NCCL without the interposer, so rekindle cannot see which GPU memory it shares with other processes, and its restore would fail: set gpu.nccl = \"auto\" and leave snapshot.interposer at \"auto\", or put NCCL_P2P_DISABLE=1 and NCCL_CUMEM_HOST_ENABLE=0 in the job's environment"
    )]
    Nccl { pid: i32, name: String },
    /// A process of the job has a namespace of its own.
    #[error(
        "process {pid} ({name}) is in a {kind} namespace of its own (a sandbox, a container), which CRIU cannot restore"
    )]
    Namespace {
        pid: i32,
        name: String,
        /// The kind of namespace.
        kind: &'static str,
    },
    /// The kernel has added a page to the process, for breakpoints of a monitor.
    #[error(
        "process {pid} ({name}) was watched with uprobes (by a monitor with eBPF, bpftrace, perf), and CRIU cannot save what the \
         kernel has added to it for that ([uprobes] in /proc/PID/maps). It stays until the process ends: keep the monitor away \
         from the programs and libraries of the job, and start the job again"
    )]
    Probed { pid: i32, name: String },
    /// A restored job would not have a mount that the job has made.
    #[error("{0}")]
    Mounted(Mounted),
    /// CRIU would restore it as something else, or not at all.
    #[error(transparent)]
    Unrestorable(#[from] Unrestorable),
    /// A process is on a part of a GPU.
    #[error(
        "process {pid} ({name}) is on {part}, which the CUDA driver cannot checkpoint: give the job whole GPUs{hint}"
    )]
    PartOfGpu {
        pid: i32,
        name: String,
        /// What it is on.
        part: String,
        /// What to do about it.
        hint: String,
    },
}

/// Checks made before every snapshot: whether CRIU can dump what the processes have.
pub(super) fn check(tree: &[i32], subject: &Subject<'_>) -> Result<(), Refusal> {
    let root = subject.job.root.pid();
    tree.iter().try_for_each(|pid| check_process(*pid, root))?;
    tasks::check_exit_signals(tree)?;
    sessions::check(tree)?;
    subject.job.world.mounted(tree).map_or(Ok(()), |mounted| Err(Refusal::Mounted(mounted)))?;
    check_pipes(tree, MOST_PIPES)?;
    check_stop(tree)
}

/// `NR_PIPES_WITH_DATA` of CRIU (4.2): pipes of which a process has the end for reading, with data or without. CRIU ends a dump with more
/// of them with "OOM storing pipe". It counts those of a name (FIFOs) apart.
const MOST_PIPES: usize = 1024;

fn check_pipes(tree: &[i32], most: usize) -> Result<(), Refusal> {
    let pipes =
        |pid: i32| process::descriptors(pid).filter(|(_, target)| target.as_os_str().as_bytes().starts_with(b"pipe:["));
    let mut all: BTreeSet<PathBuf> = tree.iter().flat_map(|pid| pipes(*pid)).map(|(_, pipe)| pipe).collect();
    if all.len() <= most {
        return Ok(());
    }
    // Only now, because it takes longer.
    let read = |pid: i32| -> BTreeSet<PathBuf> {
        let is_read =
            |number| process::open_flags(pid, number).is_ok_and(|flags| flags & libc::O_ACCMODE != libc::O_WRONLY);
        pipes(pid).filter(|(number, _)| is_read(*number)).map(|(_, pipe)| pipe).collect()
    };
    let each: Vec<(i32, BTreeSet<PathBuf>)> = tree.iter().map(|pid| (*pid, read(*pid))).collect();
    all = each.iter().flat_map(|(_, own)| own).cloned().collect();
    match each.iter().max_by_key(|(_, own)| own.len()) {
        Some((pid, own)) if all.len() > most => {
            let (pid, name) = shown(*pid);
            Err(Refusal::Pipes { have: all.len(), most, pid, name, own: own.len() })
        }
        _ => Ok(()),
    }
}

/// Checks that CRIU can stop these processes without harm, and will not wait for one of them. Cheap enough for the moment
/// before it begins.
pub(super) fn check_stop(tree: &[i32]) -> Result<(), Refusal> {
    if let Some((pid, group)) = cgroup::frozen(tree) {
        let (pid, name) = shown(pid);
        return Err(Refusal::Frozen { pid, name, group: group.display().to_string() });
    }
    check_leases(tree)
}

/// Checks that none of these processes has a lease that CRIU would break, or restore wrong.
fn check_leases(tree: &[i32]) -> Result<(), Refusal> {
    let refused = |lease: &Lease| lease.kind != leases::Kind::Read && tree.contains(&lease.pid);
    let Some(lease) = Lease::all().into_iter().find(refused) else { return Ok(()) };
    let (pid, name) = shown(lease.pid);
    let path = lease.path().map_or_else(|| "a file".into(), |path| path.display().to_string());
    Err(match lease.kind {
        leases::Kind::Breaking => Refusal::BreakingLease { pid, name, path },
        // CRIU opens files to read a build-id; the lease holder is stopped and does not answer.
        _ => Refusal::Lease { pid, name, path },
    })
}

/// Checks that the CUDA processes use whole GPUs: the driver (580) can checkpoint neither instances of a divided GPU
/// (MIG) nor virtual GPUs (vGPU).
pub(super) fn check_gpus(inventory: &GpuInventory, pids: &[i32]) -> Result<(), Refusal> {
    for pid in pids {
        let refusal = |part: String, hint: String| {
            let (pid, name) = shown(*pid);
            Refusal::PartOfGpu { pid, name, part, hint }
        };
        let visible = process::environment(*pid, "CUDA_VISIBLE_DEVICES").unwrap_or_default();
        if names_instance(&visible) {
            return Err(refusal(
                format!("an instance of a divided GPU (CUDA_VISIBLE_DEVICES={visible})"),
                String::new(),
            ));
        }
        let on = |gpu: &&Gpu| match inventory.used_on(*pid) {
            Some(used) => used.contains_key(&gpu.uuid),
            // If the GPU is unknown, refuse only if there is no other GPU that it could use.
            None => inventory.gpus.iter().all(|other| other.mig == Mig::On || other.is_virtual),
        };
        if let Some(gpu) = inventory.gpus.iter().filter(|gpu| gpu.mig == Mig::On || gpu.is_virtual).find(on) {
            let uuid = gpu.uuid;
            return Err(match gpu.mig {
                Mig::On => refusal(
                    format!("an instance of the divided GPU {uuid} (MIG)"),
                    format!(", or turn MIG off with `nvidia-smi -i {uuid} -mig 0`"),
                ),
                _ => refusal(format!("the virtual GPU {uuid} (vGPU)"), String::new()),
            });
        }
    }
    Ok(())
}

/// The GPUs on which each process has memory, and how much; pids as the processes see themselves. Empty if NVML knows
/// none of the pids, as in a container with a PID namespace.
pub(super) fn memory_by_gpu(
    inventory: &GpuInventory,
    inner: &[i32],
    outer: &[i32],
) -> BTreeMap<i32, BTreeMap<String, u64>> {
    let used = |(inner, outer): (&i32, &i32)| {
        let gpus = inventory.used_on(*outer)?.iter().filter(|(_, bytes)| **bytes > 0);
        Some((*inner, gpus.map(|(uuid, bytes)| (uuid.to_string(), *bytes)).collect()))
    };
    inner.iter().zip(outer).filter_map(used).collect()
}

/// Bytes of device memory of each process.
pub(super) fn device_memory(inventory: &GpuInventory, pids: &[i32]) -> Vec<u64> {
    let each: Option<Vec<u64>> = pids.iter().map(|pid| inventory.used_by(*pid)).collect();
    each.unwrap_or_else(|| {
        // In a container NVML may not know our pids; then all memory in use is the upper bound, if NVML knows that.
        let all: u64 = inventory.gpus.iter().filter_map(|gpu| gpu.memory_used).sum();
        let one = all.div_ceil(u64::try_from(pids.len()).unwrap_or(1));
        vec![one; pids.len()]
    })
}

/// Checks that processes share no memory that rekindle cannot see: several with NCCL, sharing enabled, and no
/// interposer.
pub(super) fn check_nccl(pids: &[i32]) -> Result<(), Refusal> {
    let unseen = |pid: &&i32| {
        let maps = process::text(**pid, "maps").unwrap_or_default();
        let is_told = || process::environment(**pid, "NCCL_P2P_DISABLE").is_some_and(|value| value == "1");
        maps.contains("/libnccl") && !interposer::is_in(**pid) && !is_told()
    };
    match pids.iter().find(unseen) {
        Some(pid) if pids.len() > 1 => {
            let name = process::name(*pid).unwrap_or_default();
            Err(Refusal::Nccl { pid: process::inner_pid(*pid).unwrap_or(*pid), name })
        }
        _ => Ok(()),
    }
}

/// Checks that host memory has room for this much device memory during the snapshot.
pub(super) fn check_memory(device: u64, subject: &Subject<'_>) -> Result<(), Refusal> {
    let left = cgroup::memory_headroom(subject.job.root.pid());
    admit_memory(device, cgroup::memory_available(), left, subject.options.memory_reserve)
}

fn admit_memory(need: u64, available: Option<u64>, left: Option<u64>, keep: u64) -> Result<(), Refusal> {
    if need == 0 {
        return Ok(());
    }
    if let Some(free) = available.filter(|free| need.saturating_add(keep) > *free) {
        return Err(Refusal::Memory { need, free, keep });
    }
    match left.filter(|left| need > *left) {
        Some(free) => Err(Refusal::Cgroup { need, free }),
        None => Ok(()),
    }
}

/// Kinds of namespaces that a tree must share; nested mount and network namespaces can be dumped, and fail only at the
/// restore.
const NAMESPACES: [(&str, &str); 6] =
    [("mnt", "mount"), ("net", "network"), ("pid", "PID"), ("user", "user"), ("ipc", "IPC"), ("uts", "host name")];

/// The pid as the job sees it, which a user can find in the job's own logs, and the name.
fn shown(pid: i32) -> (i32, String) {
    (process::inner_pid(pid).unwrap_or(pid), process::name(pid).unwrap_or_default())
}

fn check_process(pid: i32, root: i32) -> Result<(), Refusal> {
    // A debugger can be attached to a single thread.
    if let Some(tracer) = process::tracer_of_any_thread(pid) {
        let (pid, name) = shown(pid);
        return Err(Refusal::Traced { pid, name, tracer });
    }
    check_namespaces(pid, root)?;
    tasks::check(pid)?;
    check_program(pid)?;
    let maps = process::text(pid, "maps").unwrap_or_default();
    if is_probed(&maps) {
        let (pid, name) = shown(pid);
        return Err(Refusal::Probed { pid, name });
    }
    check_vdso(pid, &maps)?;
    check_signals(pid, &process::text(pid, "status").unwrap_or_default())?;
    if let Some(id) = posix_timers::unknown(pid) {
        let (pid, name) = shown(pid);
        return Err(Refusal::UnknownTimer { pid, name, id });
    }
    process::descriptors(pid).try_for_each(|(number, target)| check_descriptor(pid, number, &target))
}

fn check_descriptor(pid: i32, number: i32, target: &Path) -> Result<(), Refusal> {
    let refuse = |what, hint| {
        let (pid, name) = shown(pid);
        Err(Refusal::Unsupported { pid, name, what, hint })
    };
    if target.as_os_str() == "anon_inode:[io_uring]" {
        let hint = ": leave \"io-uring\" out of job.allow, so that programs do not use it (for PyTorch's TCPStore, USE_LIBUV=0 is enough)";
        return refuse("an io_uring", hint);
    }
    if timerfd::is_alarm(pid, number, target) {
        let hint = ": use CLOCK_REALTIME or CLOCK_BOOTTIME, unless it must wake a machine that sleeps";
        return refuse("a timer of an alarm clock (CLOCK_REALTIME_ALARM or CLOCK_BOOTTIME_ALARM)", hint);
    }
    events::check(pid, number, target)?;
    if terminals::is_hung_up(pid, number, target) {
        let hint = " as it is: its terminal was hung up (vhangup(2), as login and getty do). Close it, and open the terminal again";
        return refuse("a terminal that gives only end of file and errors", hint);
    }
    Ok(())
}

/// Checks that the program of a process is, or was, a file. What is dead has none.
pub(super) fn check_program(pid: i32) -> Result<(), Refusal> {
    match std::fs::read_link(format!("/proc/{pid}/exe")) {
        // A file of this name in the root folder would not be deleted.
        Ok(link)
            if link.as_os_str().as_bytes().starts_with(b"/memfd:")
                && link.to_string_lossy().ends_with(" (deleted)") =>
        {
            let (pid, name) = shown(pid);
            let program = link.to_string_lossy().trim_start_matches('/').trim_end_matches(" (deleted)").to_owned();
            Err(Refusal::Program { pid, name, program })
        }
        _ => Ok(()),
    }
}

/// Checks that a process has what CRIU moves at a restore: the code of the kernel for fast system calls, unless no process has it.
fn check_vdso(pid: i32, maps: &str) -> Result<(), Unrestorable> {
    // CRIU can do without the vDSO and its data, but not with the data alone. What is dead has no mappings.
    if maps.contains("[vdso]") || !maps.contains("[vvar]") {
        return Ok(());
    }
    Err(Unrestorable::of(
        pid,
        "has unmapped the vDSO, which the kernel gives each process, and CRIU could not restore it without",
        "have the program keep it ([vdso] in /proc/PID/maps)",
    ))
}

/// Checks that the signals that a process has not handled yet could be sent to it again.
fn check_signals(pid: i32, status: &str) -> Result<(), Unrestorable> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    let has_some = ["SigPnd", "ShdPnd"].into_iter().filter_map(field).any(|set| set.bytes().any(|digit| digit != b'0'));
    let queue = field("SigQ").and_then(|queue| queue.split_once('/'));
    let numbers = queue.and_then(|(have, limit)| Some((have.parse::<u64>().ok()?, limit.parse::<u64>().ok()?)));
    match numbers {
        Some((have, limit)) if has_some && have > limit => Err(Unrestorable::of(
            pid,
            format!(
                "has signals that it has not handled, and its user has {have} of them in all, where its limit is {limit} \
                 (ulimit -i, RLIMIT_SIGPENDING), so a restore could not send them again"
            ),
            "raise the limit (prlimit --sigpending while it runs), or let it handle the signals",
        )),
        _ => Ok(()),
    }
}

/// Whether a process with these mappings has ever met a uprobe. Newer kernels have a second one, `[uprobes-trampoline]`.
fn is_probed(maps: &str) -> bool {
    maps.lines().any(|line| line.split_whitespace().nth(5).is_some_and(|name| name.starts_with("[uprobes")))
}

/// Checks that a process has the namespaces of the root. What is dead has none.
pub(super) fn check_namespaces(pid: i32, root: i32) -> Result<(), Refusal> {
    let link = |pid: i32, kind: &str| std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    for (file, kind) in NAMESPACES {
        if let (Some(own), Some(ours)) = (link(pid, file), link(root, file))
            && own != ours
        {
            let (pid, name) = shown(pid);
            return Err(Refusal::Namespace { pid, name, kind });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_cuda::GpuUuid;

    const GIB: u64 = 1 << 30;

    #[test]
    fn device_memory_must_fit_with_the_reserve_and_below_the_limit() {
        assert_eq!(admit_memory(10 * GIB, Some(12 * GIB), None, GIB), Ok(()));
        let tight = admit_memory(10 * GIB, Some(10 * GIB), None, GIB).unwrap_err();
        assert!(tight.to_string().contains("10.0 GiB"), "{tight}");
        assert!(matches!(admit_memory(10 * GIB, Some(64 * GIB), Some(9 * GIB), GIB), Err(Refusal::Cgroup { .. })));
        assert_eq!(admit_memory(u64::MAX, None, None, GIB), Ok(()));
        assert_eq!(admit_memory(0, Some(0), Some(0), GIB), Ok(()), "nothing fits everywhere");
    }

    fn gpu(byte: u8) -> Gpu {
        let uuid = GpuUuid::from_bytes([byte; 16]);
        let (mig, is_virtual) = (Mig::Off, false);
        Gpu {
            uuid,
            name: None,
            index: None,
            pci: None,
            memory_total: None,
            memory_used: None,
            memory_free: None,
            mig,
            is_virtual,
        }
    }

    #[test]
    fn a_part_of_a_gpu_is_refused_where_the_job_is_on_it() {
        let me = std::process::id();
        let pid = me.cast_signed();
        let on = |gpus: [Gpu; 2], used: Option<u8>| {
            let used = used.map(|byte| [(me, [(GpuUuid::from_bytes([byte; 16]), GIB)].into())].into());
            GpuInventory { driver: None, gpus: gpus.into(), used_by_pid: used }
        };
        let divided = || Gpu { mig: Mig::On, ..gpu(1) };
        assert_eq!(check_gpus(&on([gpu(1), gpu(2)], Some(1)), &[pid]), Ok(()));
        assert_eq!(check_gpus(&on([divided(), gpu(2)], Some(2)), &[pid]), Ok(()));
        assert_eq!(check_gpus(&on([divided(), gpu(2)], None), &[pid]), Ok(()), "it may be on the other");
        let text = check_gpus(&on([divided(), gpu(2)], Some(1)), &[pid]).unwrap_err().to_string();
        assert!(text.contains("divided GPU GPU-01010101") && text.contains("-mig 0"), "{text}");
        let part = || Gpu { is_virtual: true, ..gpu(2) };
        let text = check_gpus(&on([divided(), part()], None), &[pid]).unwrap_err().to_string();
        assert!(text.contains("(MIG)"), "{text}");
        let text = check_gpus(&on([gpu(1), part()], Some(2)), &[pid]).unwrap_err().to_string();
        assert!(text.contains("the virtual GPU GPU-02020202"), "{text}");
    }

    #[test]
    fn memory_is_told_by_gpu_where_nvml_knows_the_processes() {
        let used = [(7, [(GpuUuid::from_bytes([1; 16]), GIB)].into()), (9, BTreeMap::new())].into();
        let inventory = GpuInventory { used_by_pid: Some(used), ..GpuInventory::default() };
        let all = memory_by_gpu(&inventory, &[1001, 1002, 1003], &[7, 8, 9]);
        let first = BTreeMap::from([("GPU-01010101-0101-0101-0101-010101010101".to_string(), GIB)]);
        assert_eq!(all, BTreeMap::from([(1001, first), (1003, BTreeMap::new())]));
        assert_eq!(memory_by_gpu(&GpuInventory::default(), &[1], &[7]), BTreeMap::new());
        assert_eq!(device_memory(&inventory, &[7, 9]), [GIB, 0]);
    }

    #[test]
    fn a_lease_and_a_namespace_are_found() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        if !rekindle_testing::root() {
            return;
        }
        const SCRIPT: &str = "import fcntl, sys\n\
            file = open(sys.argv[1], 'w')\n\
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
            print(flush=True)\n\
            sys.stdin.read()";
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("unshare");
        command.args(["--net", "python3", "-c", SCRIPT]).arg(dir.path().join("leased"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        let (own, pid) = (std::process::id().cast_signed(), child.id().cast_signed());
        assert_eq!((check_leases(&[own]), check_namespaces(own, own)), (Ok(()), Ok(())));
        let leased = check_leases(&[own, pid]).unwrap_err().to_string();
        assert!(leased.contains("/leased (fcntl F_SETLEASE)"), "{leased}");
        let apart = check_namespaces(pid, own).unwrap_err().to_string();
        assert!(apart.contains("in a network namespace of its own"), "{apart}");
        drop(child.stdin.take());
        let _ = child.wait();
    }

    #[test]
    fn a_tracer_of_any_thread_is_found() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        if !rekindle_testing::root() {
            return;
        }
        // A child with two threads, and its parent that attaches to the second one (PTRACE_SEIZE).
        const SCRIPT: &str = "import ctypes, os, sys, threading\n\
            ready, over = os.pipe(), os.pipe()\n\
            child = os.fork()\n\
            if child == 0:\n\
            \x20   os.close(over[1])\n\
            \x20   threading.Thread(target=os.read, args=(over[0], 1)).start()\n\
            \x20   os.write(ready[1], b'x')\n\
            \x20   os.read(over[0], 1)\n\
            \x20   os._exit(0)\n\
            os.read(ready[0], 1)\n\
            second = max(int(tid) for tid in os.listdir(f'/proc/{child}/task'))\n\
            failed = ctypes.CDLL(None).ptrace(0x4206, second, None, None)\n\
            print(child, second, failed, flush=True)\n\
            sys.stdin.read()";
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT]);
        let mut tracer = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(tracer.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let numbers: Vec<i32> = line.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let [pid, second, failed] = numbers[..] else { panic!("{line:?}") };
        let (first, checked) = (process::tracer(pid), check_process(pid, pid));
        drop(tracer.stdin.take());
        let _ = tracer.wait();
        assert!(second != pid && failed == 0 && first == Some(0), "{line:?} {first:?}");
        let expected = tracer.id().cast_signed();
        assert!(matches!(checked, Err(Refusal::Traced { tracer, .. }) if tracer == expected), "{checked:?}");
    }

    /// What is asked again when CRIU is about to stop the job.
    #[test]
    fn a_process_in_a_frozen_group_is_refused() {
        use std::time::{Duration, Instant};
        let two = cgroup::hierarchies().unwrap_or_default().into_iter().find(cgroup::Hierarchy::is_two);
        let group = two.and_then(|two| two.folder).map(|two| two.join(format!("rekindle-stop-{}", std::process::id())));
        let made = group.as_ref().is_some_and(|group| std::fs::create_dir(group).is_ok());
        if !rekindle_testing::require("groups", made, "no group of cgroup v2 can be made") {
            return;
        }
        let group = group.unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id().cast_signed();
        let moved = std::fs::write(group.join(cgroup::PROCS), pid.to_string());
        let before = check_stop(&[pid]);
        let frozen = std::fs::write(group.join("cgroup.freeze"), "1");
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut after = check_stop(&[pid]);
        while after.is_ok() && Instant::now() < deadline {
            std::thread::yield_now();
            after = check_stop(&[pid]);
        }
        let _ = std::fs::write(group.join("cgroup.freeze"), "0");
        let _ = child.kill();
        let _ = child.wait();
        let removed = std::fs::remove_dir(&group);
        assert!(moved.is_ok() && frozen.is_ok() && removed.is_ok(), "{moved:?} {frozen:?} {removed:?}");
        assert_eq!(before, Ok(()));
        let text = after.unwrap_err().to_string();
        assert!(text.contains(&format!("{}/cgroup.freeze", group.display())), "{text}");
    }

    #[test]
    fn more_pipes_than_criu_dumps_are_refused() {
        let pid = std::process::id().cast_signed();
        assert_eq!(check_pipes(&[pid], MOST_PIPES), Ok(()));
        let pipes: Vec<_> = (0..3).map(|_| std::io::pipe().unwrap()).collect();
        let refusal = check_pipes(&[pid], 2).unwrap_err();
        assert!(matches!(refusal, Refusal::Pipes { have: 3.., most: 2, own: 3.., .. }), "{refusal:?}");
        let text = refusal.to_string();
        assert!(text.contains("CRIU dumps at most 2") && text.contains("socketpair"), "{text}");
        drop(pipes);
    }

    #[test]
    fn a_program_from_memory_is_refused() {
        use std::os::fd::AsRawFd;
        let memory = nix::sys::memfd::memfd_create("a program", nix::sys::memfd::MFdFlags::empty()).unwrap();
        let program = format!("/proc/{}/fd/{}", std::process::id(), memory.as_raw_fd());
        let mut to = std::fs::File::from(memory.try_clone().unwrap());
        std::io::copy(&mut std::fs::File::open("/bin/sleep").unwrap(), &mut to).unwrap();
        let mut child = std::process::Command::new(program).arg("60").spawn().unwrap();
        let checked = check_program(child.id().cast_signed());
        let _ = child.kill();
        let _ = child.wait();
        let text = checked.unwrap_err().to_string();
        assert!(text.contains("(memfd:a program: memfd_create and fexecve)"), "{text}");
        assert_eq!(check_program(std::process::id().cast_signed()), Ok(()));
        assert_eq!(check_program(i32::MAX), Ok(()));
    }

    #[test]
    fn a_timer_of_an_alarm_clock_is_refused() {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        use std::os::fd::AsRawFd;
        let pid = std::process::id().cast_signed();
        let check = |clock| {
            let timer = timerfd_create(clock, TimerfdFlags::CLOEXEC)?;
            let link = std::fs::read_link(format!("/proc/{pid}/fd/{}", timer.as_raw_fd())).unwrap();
            Ok(check_descriptor(pid, timer.as_raw_fd(), &link))
        };
        let refused: rustix::io::Result<_> = check(TimerfdClockId::BoottimeAlarm);
        if !rekindle_testing::require(
            "root",
            refused.is_ok(),
            "no timer of an alarm clock can be made (CAP_WAKE_ALARM)",
        ) {
            return;
        }
        let text = refused.unwrap().unwrap_err().to_string();
        assert!(text.contains("CLOCK_BOOTTIME_ALARM") && text.contains("use CLOCK_REALTIME"), "{text}");
        assert_eq!(check(TimerfdClockId::Boottime), Ok(Ok(())));
    }

    #[test]
    fn a_process_without_the_kernels_code_is_refused() {
        let pid = std::process::id().cast_signed();
        let maps = process::text("self", "maps").unwrap();
        if maps.contains("[vdso]") {
            let without: String =
                maps.lines().filter(|line| !line.contains("[vdso]")).map(|line| format!("{line}\n")).collect();
            assert!(check_vdso(pid, &without).unwrap_err().to_string().contains("has unmapped the vDSO"));
        }
        assert_eq!((check_vdso(pid, &maps), check_vdso(pid, "")), (Ok(()), Ok(())));
    }

    #[test]
    fn signals_beyond_the_limit_are_refused_if_any_wait() {
        let status = |queue: &str, waiting: &str| {
            format!("Name:\tx\nSigQ:\t{queue}\nSigPnd:\t0000000000000000\nShdPnd:\t{waiting}\n")
        };
        let (none, some) = ("0000000000000000", "0000008000000000");
        assert!(check_signals(1, &status("2/0", some)).unwrap_err().to_string().contains("has 2 of them in all"));
        for (queue, waiting) in [("2/0", none), ("2/2", some), ("x", some)] {
            assert_eq!(check_signals(1, &status(queue, waiting)), Ok(()), "{queue} {waiting}");
        }
        assert_eq!(check_signals(1, ""), Ok(()));
    }

    #[test]
    fn a_process_that_was_watched_with_uprobes_is_known() {
        let maps = "7f00-7f01 r--p 00000000 00:00 0                          /tmp/[uprobes]\n\
                    7ffff000-7ffff001 --xp 00000000 00:00 0                          [vdso]\n";
        assert!(!is_probed(maps));
        assert!(is_probed(&format!("{maps}7fffffffe000-7ffffffff000 --xp 00000000 00:00 0   [uprobes]\n")));
    }

    #[test]
    fn this_process_may_be_dumped_as_far_as_preflight_sees() {
        let pid = std::process::id().cast_signed();
        assert_eq!(check_process(pid, pid), Ok(()));
    }
}

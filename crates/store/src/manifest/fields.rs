//! The fields of a manifest.

use std::collections::BTreeMap;
use std::path::PathBuf;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::contents::{Attributes, Owner, Stamp, TrackedFolder};
use super::groups::ControlGroup;
use crate::hex;
use crate::id::{ImageId, JobName};
use crate::paths::{JobPath, PartPath, of_job};
use rekindle_base::interval::Choice;
use rekindle_criu::Tcp;
use rekindle_cuda::nvml;

/// The description of an image. It contains no environment variable, neither name nor value. The command may be
/// private, like the memory in the image; therefore the store has mode 0700.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// The id of the image. Set by [`crate::staging::Filling::seal`].
    pub id: ImageId,
    /// The job. Set by [`crate::staging::Filling::seal`].
    pub job: JobName,
    /// The id of the run that started from the beginning. `run --fresh` begins a new lineage and restarts only from its
    /// own images.
    pub lineage: String,
    /// When the job was frozen.
    pub taken: DateTime<Utc>,
    /// Why the snapshot was taken.
    pub reason: Reason,
    /// The command line that launched the job, as [`super::words::text_of`] writes it.
    pub command: Vec<String>,
    /// The working directory that the job was launched in.
    pub directory: JobPath,
    /// The user that the job was launched as, if it is not the supervisor's.
    pub user: Option<String>,
    /// The rights that all of the job's processes had. `None` in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rights: Option<JobRights>,
    /// The machine that the image was taken on.
    pub host: Host,
    /// The version of rekindle that took it.
    pub rekindle: String,
    /// The version of CRIU that dumped it, as `criu --version` prints it: an older CRIU may not be able to read it.
    pub criu: String,
    /// The version of the NVIDIA driver, if the job uses a GPU.
    pub driver: Option<String>,
    /// The GPUs that the job could see.
    pub gpus: Vec<Gpu>,
    /// The processes.
    pub tree: JobTree,
    /// Regular files that were open for writing or mapped so, or that belong to such a file or to a tracked folder.
    pub open_files: Vec<OpenFile>,
    /// Files that did not exist, and that would be taken for a part of a file that is put back: `DATABASE-journal`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent_files: Vec<JobPath>,
    /// Extended attributes of files and folders, each once. `None` in an image of an earlier version, where those of no
    /// file are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<Vec<Attributes>>,
    /// Folders that are put back completely.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tracked_folders: Vec<TrackedFolder>,
    /// Files that root gave to a job of another user. A restored job may have no other such files.
    #[serde(default)]
    pub given_files: Vec<GivenFile>,
    /// Folders that must exist at a restore, each after its parent. Empty in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<Folder>,
    /// FIFOs that the job has open, and that must exist at a restore. Empty in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub fifos: Vec<Fifo>,
    /// Control groups below the supervisor's that processes of the job were in, and those between. An image of an
    /// earlier version has none, and its job is restored in the supervisor's group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub control_groups: Vec<ControlGroup>,
    /// Threads that were bound to other processors than the supervisor. Empty in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub bindings: Vec<Binding>,
    /// Threads that were not scheduled as an ordinary program. Empty in an image of an earlier version, whose threads are as
    /// CRIU restores them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub scheduling: Vec<Scheduling>,
    /// The processor time of the process that had used most; none if that was little, or in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_time: Option<CpuTime>,
    /// Timers that are descriptors and ran. Those of an image of an earlier version are as CRIU restores them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub timers: Vec<Timer>,
    /// Hard links made for deleted files, so that a restore can open them.
    pub saved_links: Vec<SavedLink>,
    /// Files of ours that the job has mapped, and that must exist before a restore.
    pub recreate: Vec<Recreate>,
    /// The job's log folder. A restore below another store has the job write to the one there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<JobPath>,
    /// Files that a restore needs unchanged and that nothing puts back. Empty in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mapped_files: Vec<MappedFile>,
    /// Device memory of CUDA processes in files of the image, which the processes have mapped.
    #[serde(default)]
    pub landing: Vec<Landing>,
    /// Device memory that stayed on the GPU while its processes were checkpointed. Since version 4.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
    /// How established TCP connections are restored.
    pub tcp: Tcp,
    /// The phases of the snapshot, in order.
    pub phases: Vec<Phase>,
    /// How long the job was frozen, in microseconds.
    pub freeze_us: u64,
    /// The interval at that time, if it was chosen automatically (`snapshot.interval = "auto"`) and this is not the
    /// first snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Choice>,
    /// The group image that this image is a part of. It is only restored together with all other parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupPart>,
    /// Sum of the sizes of the parts, in bytes. Set by [`crate::staging::Filling::seal`].
    pub bytes: u64,
    /// Every file of the image except the manifest, by path. Set by [`crate::staging::Filling::seal`].
    pub parts: Vec<Part>,
    /// The chunk map, if the content of the parts is in packs; then `parts` need no hash. Since version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<Chunks>,
}

/// Facts about the chunk map of a packed image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunks {
    /// BLAKE3 hash of the file `chunks`.
    #[serde(with = "hex")]
    pub blake3: blake3::Hash,
    /// Number of extents in it.
    pub extents: u64,
    /// Bytes that this image added to packs: its cost, not the bytes that it needs.
    pub stored: u64,
}

/// Why a snapshot was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// The interval was over.
    Interval,
    /// SIGUSR1 or SIGUSR2.
    Signal,
    /// The last one before the supervisor stops the job.
    Final,
    /// A command of the user.
    Request,
    /// The group of which the job is a part takes one.
    Group,
}

/// A part of a group image: the image of a job over several machines.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPart {
    /// The number of the group image in its group.
    pub number: u64,
    /// The start of the whole job since which it ran when the part was taken, counted from 1.
    pub epoch: u64,
    /// The member that began the group. It tells group image 3 of a group from that of another one with its name.
    pub origin: u64,
    /// Number of machines of the group, each of which has a part. 0 in images of versions that did not record it.
    #[serde(default)]
    pub size: u32,
    /// A random 128-bit number, in hexadecimal digits: another image of the same name is not this part.
    pub mark: String,
}

/// The machine that an image was taken on, for comparison at a restore elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its host name, as in uname(2).
    pub name: String,
    /// `/proc/sys/kernel/random/boot_id`: another value means another boot.
    pub boot_id: String,
    /// The release of the kernel, as in uname(2).
    pub kernel: String,
    /// The architecture, as in uname(2).
    pub arch: String,
    /// `model name` of `/proc/cpuinfo`.
    pub cpu_model: String,
    /// `flags` of `/proc/cpuinfo`: code in the image may use any of them.
    pub cpu_flags: Vec<String>,
}

/// A GPU that the job could see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gpu {
    /// `GPU-...`, as nvidia-smi prints it.
    pub uuid: String,
    /// The product's name.
    pub name: String,
}

impl From<&nvml::Gpu> for Gpu {
    fn from(gpu: &nvml::Gpu) -> Gpu {
        Gpu { uuid: gpu.uuid.to_string(), name: gpu.name.clone().unwrap_or_default() }
    }
}

/// The processes in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobTree {
    /// The root of the dumped tree: the reaper.
    pub root: i32,
    /// The process that runs the command.
    pub job: i32,
    /// Every process.
    pub processes: Vec<TreeProcess>,
    /// All pids, thread ids, process groups and sessions in use, from CRIU's `pstree.img`: all must be free for a
    /// restore.
    pub ids: Vec<i32>,
    /// The processes that had a CUDA context and were checkpointed by the driver.
    pub cuda: Vec<i32>,
    /// The thread of each that the driver works with (`cuCheckpointProcessGetRestoreThreadId`): the other threads are
    /// stopped in the image. So are the programs above these processes.
    #[serde(default)]
    pub cuda_threads: BTreeMap<i32, i32>,
    /// The processes that somebody had stopped (SIGSTOP, SIGTSTP), and not rekindle: they stay stopped after a restore.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stopped: Vec<i32>,
    /// For each process, the GPUs on which it had memory before the freeze, and how many bytes, by UUID, as NVML
    /// reports it. Empty if NVML could not tell, and in an image of an earlier version. A process that is not in it had
    /// none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cuda_memory: BTreeMap<i32, BTreeMap<String, u64>>,
}

/// A process in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeProcess {
    /// Its pid as the job sees it.
    pub pid: i32,
    /// `/proc/PID/comm`.
    pub name: String,
}

/// A regular file that was open for writing. A restore cuts it to this size, and puts its content back if the image has
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// Its path as the job sees it.
    pub path: JobPath,
    /// Its size while the tasks were frozen, in bytes.
    pub size: u64,
    /// Whether it was opened with O_APPEND.
    pub append: bool,
    /// The file offset, in bytes.
    pub position: u64,
    /// `st_mode`, which a restore compares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The part with its content, if the file may be rewritten in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<PartPath>,
    /// Its state, if it may be rewritten in place. Without a part, a restore is refused if the state has changed.
    /// `None` in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<Stamp>,
    /// Its owner. An image of an earlier version has it only with the content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// The folder or file with which it is put back together; `None` if it is independent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<JobPath>,
    /// The number of its extended attributes in [`Manifest::attributes`], if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<u32>,
}

impl OpenFile {
    /// A file whose content is not known.
    #[must_use]
    pub fn new(path: JobPath, size: u64) -> OpenFile {
        OpenFile {
            path,
            size,
            append: false,
            position: 0,
            mode: None,
            part: None,
            stamp: None,
            owner: None,
            group: None,
            attributes: None,
        }
    }
}

/// A file that root gave to a job of another user, which could not have opened it itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenFile {
    /// Its path as the job sees it.
    #[serde(with = "of_job")]
    pub path: PathBuf,
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// The access it was given for: bits of a permission triple. `None` in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<u32>,
}

/// Rights that all processes of a job had at the snapshot, as the kernel reported them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRights {
    /// The user id that the job was launched with.
    pub uid: u32,
    /// Supplementary groups that every process was in.
    pub groups: Vec<u32>,
    /// Whether every process had the no-new-privileges flag.
    pub no_new_privileges: bool,
    /// Whether every process was under a seccomp filter.
    pub filtered: bool,
}

/// A folder in which the job has a file, a socket or its working directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Folder {
    /// Its path.
    pub path: JobPath,
    /// `st_mode`.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The number of its extended attributes in [`Manifest::attributes`], if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<u32>,
}

/// A FIFO that the job has open.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Fifo {
    /// Its path.
    pub path: JobPath,
    /// `st_mode`.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
    /// The number of its extended attributes in [`Manifest::attributes`], if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<u32>,
}

/// A hard link beside a file of the user that keeps a deleted file alive for the restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedLink {
    /// The name that CRIU expects. No other image has it, except of an earlier version (`link_remap.N`).
    pub link: JobPath,
    /// The name that we use; its last part starts with [`SavedLink::PREFIX`]. It is removed with the image.
    pub saved: JobPath,
    /// The owner of the file. `None` in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// Other names of the file in the same folder, which the job gave it: those of POSIX semaphores.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub names: Vec<JobPath>,
}

impl SavedLink {
    /// Prefix of the name of a saved link. Other files are never removed.
    pub const PREFIX: &str = ".rekindle-link-";
}

/// A file of ours that the job has mapped. CRIU compares mapped files at a restore, so the content must be exactly
/// this.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recreate {
    /// Its path.
    pub path: JobPath,
    /// Its permission bits.
    pub mode: u32,
    /// The part of this image with its content.
    pub part: PartPath,
}

/// A file that the job has mapped, executes, or has open for reading only. CRIU compares it at a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// Its path, as both the job and the supervisor see it.
    pub path: JobPath,
    /// Its size, in bytes.
    pub size: u64,
    /// `st_mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The build-id of an ELF file as CRIU stores it: hexadecimal, padded to a multiple of four bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// Its owner. `None` in an image of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// A copy, if the file is small and may be deleted with the job that made it: a restore creates it again if it is
    /// missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<KeptCopy>,
}

/// A copy of a file for the case that it is missing at a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCopy {
    /// The part with its content.
    pub part: PartPath,
    /// The owner of the file.
    pub owner: Owner,
    /// Its state.
    pub stamp: Stamp,
    /// The number of its extended attributes in [`Manifest::attributes`], if it has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attributes: Option<u32>,
}

/// The landing file of a CUDA process: CRIU's image names it, and the driver reads it back at the restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landing {
    /// The pid of the process, as it sees itself.
    pub pid: i32,
    /// Its path as the job sees it.
    pub path: JobPath,
    /// The part of this image with its content.
    pub part: PartPath,
    /// Its size, in bytes.
    pub bytes: u64,
}

/// Device memory that was copied by rekindle and not by the driver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The part of this image with its content.
    pub part: PartPath,
    /// The allocations, by process and number.
    pub pieces: Vec<KeptPiece>,
}

/// An allocation of device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct KeptPiece {
    /// The pid of the process, as it sees itself.
    pub pid: i32,
    /// Its number in the table of the process's interposer, which has its address.
    pub index: u32,
    /// Where its content begins in the part.
    pub offset: u64,
    /// Its size, in bytes.
    pub bytes: u64,
    /// Its GPU, as a number in [`super::Manifest::gpus`]. `None` in images of earlier versions, and where the GPU is not known there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<usize>,
}

/// How long a phase of the snapshot took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub phase: String,
    /// When it began, in microseconds since the beginning of the snapshot.
    pub started_us: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
}

/// A file of the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Path relative to the folder of the image.
    pub path: PartPath,
    /// Size in bytes.
    pub size: u64,
    /// BLAKE3 hash of its content, in the file as hexadecimal text. `None` in an image that is only in memory, and in a
    /// packed one, which has a hash for each chunk.
    #[serde(default, with = "hex::optional", skip_serializing_if = "Option::is_none")]
    pub blake3: Option<blake3::Hash>,
}

/// Threads that were bound to the same processors.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binding {
    /// The processors, in the form of `taskset -c`.
    pub processors: String,
    /// The ids of the threads, as they see themselves.
    pub threads: Vec<i32>,
}

/// A timer that is a descriptor (timerfd_create(2)) and ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timer {
    /// A process that has it, as it sees itself.
    pub pid: i32,
    /// Its descriptor there.
    pub fd: i32,
    /// The clock, by its number in clock_gettime(2).
    pub clock: i32,
    /// The flags of timerfd_settime(2).
    pub flags: u32,
    /// When it fires next, in nanoseconds of that clock as the process sees it. A time of day that was set relative to the
    /// present is one of CLOCK_MONOTONIC.
    pub due_ns: i64,
    /// How long that was from the moment of the image, in nanoseconds.
    pub left_ns: i64,
    /// The time between two ticks, in nanoseconds; 0 if it fires once.
    pub interval_ns: i64,
    /// Ticks that nobody had read.
    pub ticks: u64,
}

/// Threads that were scheduled in the same way (sched_setattr(2)).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scheduling {
    /// The ids of the threads, as they see themselves.
    pub threads: Vec<i32>,
    /// `SCHED_*`
    pub policy: u32,
    /// `SCHED_FLAG_*`
    pub flags: u64,
    /// The nice value.
    pub nice: i32,
    /// Of SCHED_FIFO and SCHED_RR, else 0.
    pub priority: u32,
    /// Of SCHED_DEADLINE, in nanoseconds, else a time slice; 0 if the kernel chose it.
    pub runtime_ns: u64,
    /// Of SCHED_DEADLINE, in nanoseconds, else 0.
    pub deadline_ns: u64,
    /// Of SCHED_DEADLINE, in nanoseconds, else 0.
    pub period_ns: u64,
    /// The least and the greatest utilization, if they were clamped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clamps: Option<(u32, u32)>,
}

/// Processor time that a process has used since it began or was restored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CpuTime {
    /// The process, as it sees itself.
    pub pid: i32,
    /// In milliseconds.
    pub ms: u64,
}

//! The fields of a manifest.

use std::collections::BTreeMap;
use std::path::PathBuf;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};

use super::contents::{Owner, Stamp, TrackedFolder};
use super::groups::ControlGroup;
use crate::id::{ImageId, JobName};
use crate::paths::{JobPath, PartPath, of_job};
use rekindle_base::interval::Choice;
use rekindle_criu::Tcp;
use rekindle_cuda::nvml;

/// All that is known of an image. It holds no environment variable, neither name nor value; like the memory in the
/// image, the command may be private, which is why the store is 0700.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Which image. Set by [`crate::staging::Filling::seal`].
    pub id: ImageId,
    /// Whose image. Set by [`crate::staging::Filling::seal`].
    pub job: JobName,
    /// The id of the run that began from nothing. `run --fresh` begins a new lineage and restarts only from its own.
    pub lineage: String,
    /// When the job was frozen.
    pub taken: DateTime<Utc>,
    /// What asked for the snapshot.
    pub reason: Reason,
    /// The command line that launched the job; bytes that are not UTF-8 are replaced.
    pub command: Vec<String>,
    /// The working directory that the job was launched in.
    pub directory: JobPath,
    /// The user that the job was launched as, where that is not the supervisor's.
    pub user: Option<String>,
    /// What the job's processes were allowed, all of them. An image of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rights: Option<JobRights>,
    /// The machine that the image was taken on.
    pub host: Host,
    /// The version of rekindle that took it.
    pub rekindle: String,
    /// The version of CRIU that dumped it, as `criu --version` says it: an older CRIU may not read it.
    pub criu: String,
    /// The version of the NVIDIA driver, where the job uses a GPU.
    pub driver: Option<String>,
    /// The GPUs that the job could see.
    pub gpus: Vec<Gpu>,
    /// The processes.
    pub tree: JobTree,
    /// Regular files that were open for writing, mapped so, or belong to such a file or to a tracked folder.
    pub open_files: Vec<OpenFile>,
    /// Files that did not exist, and would be taken for a part of one that is put back: `DATABASE-journal`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub absent_files: Vec<JobPath>,
    /// Folders that are put back completely.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tracked_folders: Vec<TrackedFolder>,
    /// Files that root gave to a job of another user; a restored one may have no other files of that kind.
    #[serde(default)]
    pub given_files: Vec<GivenFile>,
    /// Folders that must be there at a restore, each after the one that it is in. An image of an earlier version names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub folders: Vec<Folder>,
    /// Control groups below the supervisor's that processes of the job were in, and those between. An image of an
    /// earlier version names none, and its job is restored in the supervisor's group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub control_groups: Vec<ControlGroup>,
    /// Hard links made so that files that had lost their name have one at restore.
    pub saved_links: Vec<SavedLink>,
    /// Files of ours that the job has mapped, and that must be put back before a restore.
    pub recreate: Vec<Recreate>,
    /// Files that nothing puts back and that a restore needs unchanged. An image of an earlier version names none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mapped_files: Vec<MappedFile>,
    /// Device memory of CUDA processes that is in a file of its own, which the process has mapped in the image.
    #[serde(default)]
    pub landing: Vec<Landing>,
    /// What happens to established TCP connections at a restore.
    pub tcp: Tcp,
    /// The phases of the snapshot, in order.
    pub phases: Vec<Phase>,
    /// How long the job was frozen, in microseconds.
    pub freeze_us: u64,
    /// The interval that was in force, where it was chosen (`snapshot.interval = "auto"`) and not the first snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Choice>,
    /// Sum of the sizes of the parts, in bytes. Set by [`crate::staging::Filling::seal`].
    pub bytes: u64,
    /// Every file of the image but this one, by path. Set by [`crate::staging::Filling::seal`].
    pub parts: Vec<Part>,
    /// Where the content of the parts is, if it is in packs: `parts` then need no hash. Version 2 has it, version 1 not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunks: Option<Chunks>,
}

/// What the manifest knows of the chunk map of a packed image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Chunks {
    /// BLAKE3 of the file `chunks`.
    #[serde(with = "hex")]
    pub blake3: blake3::Hash,
    /// The extents in it.
    pub extents: u64,
    /// Bytes that this image added to packs: what it cost, not what it needs.
    pub stored: u64,
}

/// What asked for a snapshot.
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
}

/// The machine that an image was taken on: what a restore elsewhere is compared with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Host {
    /// Its name, as uname(2) says it.
    pub name: String,
    /// `/proc/sys/kernel/random/boot_id`: another value means another boot.
    pub boot_id: String,
    /// The release of the kernel, as uname(2) says it.
    pub kernel: String,
    /// The architecture, as uname(2) says it.
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
    /// Where the pids below are counted.
    pub pid_namespace: PidNamespace,
    /// The root of the dumped tree: the reaper.
    pub root: i32,
    /// The process that runs the command.
    pub job: i32,
    /// Every process.
    pub processes: Vec<TreeProcess>,
    /// All pids, thread ids, process groups and sessions in use, from CRIU's `pstree.img`: a restore needs each free.
    pub ids: Vec<i32>,
    /// The processes that had a CUDA context and were taken through the driver's checkpoint.
    pub cuda: Vec<i32>,
    /// The thread of each that the driver works with (`cuCheckpointProcessGetRestoreThreadId`): the others are stopped
    /// in the image.
    #[serde(default)]
    pub cuda_threads: BTreeMap<i32, i32>,
    /// The GPUs that each of them had memory on before the freeze, and how many bytes, by UUID, as NVML says it. Empty
    /// where it could not tell, and in an image of an earlier version; a process that is not in it had none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub cuda_memory: BTreeMap<i32, BTreeMap<String, u64>>,
}

/// In which PID namespace a job lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PidNamespace {
    /// One of its own: the pids of the image are always free.
    Private,
    /// The supervisor's: a restore fails while another process has one of the pids.
    Host,
}

/// A process in an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeProcess {
    /// As the job sees it.
    pub pid: i32,
    /// `/proc/PID/comm`.
    pub name: String,
}

/// A regular file that was open for writing: at restore it is put back to this size, and to its content where the image has
/// that.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenFile {
    /// As the job sees it.
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
    /// The part with its content, where it may be rewritten in place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part: Option<PartPath>,
    /// Its state, where it may be rewritten in place. Without a part, a restore is refused where that has changed. An image
    /// of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stamp: Option<Stamp>,
    /// Who owns it, where its content is in the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<Owner>,
    /// The folder or file together with which it is put back, or not at all; unset if it is independent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<JobPath>,
}

impl OpenFile {
    /// A file with nothing known of its content.
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
        }
    }
}

/// A file that a job of another user has open and could not have opened itself: root gave it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GivenFile {
    /// As the job sees it.
    #[serde(with = "of_job")]
    pub path: PathBuf,
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
    /// What it was given for: bits of a permission triple. An image of an earlier version does not say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub access: Option<u32>,
}

/// What all processes of a job were allowed at the snapshot, as the kernel said.
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
    /// Where it is.
    pub path: JobPath,
    /// `st_mode`.
    pub mode: u32,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// A hard link beside a file of the user that keeps a deleted file alive for the restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedLink {
    /// The name that CRIU expects.
    pub link: JobPath,
    /// The name that we keep; its last part starts with [`SavedLink::PREFIX`]. It goes when the image goes.
    pub saved: JobPath,
}

impl SavedLink {
    /// How the name of a saved link starts. A file with another name is never removed.
    pub const PREFIX: &str = ".rekindle-link-";
}

/// A file of ours that the job has mapped. CRIU compares mapped files at restore, so it must be this very content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recreate {
    /// Where it has to be.
    pub path: JobPath,
    /// Its permission bits.
    pub mode: u32,
    /// The part of this image with its content.
    pub part: PartPath,
}

/// A file that the job has mapped, executes, or has open for reading only. CRIU compares it at a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappedFile {
    /// As the job sees it, and as the supervisor did too.
    pub path: JobPath,
    /// Its size, in bytes.
    pub size: u64,
    /// `st_mode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<u32>,
    /// The build-id of an ELF file as CRIU keeps it: hexadecimal, padded to a multiple of four bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build_id: Option<String>,
    /// A copy, where the file is small and may go with the job that made it: a restore makes it again if it is gone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<KeptCopy>,
}

/// A file that is in the image in case that it is gone at a restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptCopy {
    /// The part with its content.
    pub part: PartPath,
    /// Who owned it.
    pub owner: Owner,
    /// Its state.
    pub stamp: Stamp,
}

/// The landing file of a CUDA process: CRIU's image names it, and the driver reads it back at the restore.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Landing {
    /// The process, as it sees itself.
    pub pid: i32,
    /// Where it has to be, as the job sees it.
    pub path: JobPath,
    /// The part of this image with its content.
    pub part: PartPath,
    /// Its size, in bytes.
    pub bytes: u64,
}

/// How long a phase of the snapshot took.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub phase: String,
    /// When it began, in microseconds from the beginning of the snapshot.
    pub started_us: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
}

/// A file of the image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Relative to the folder of the image.
    pub path: PartPath,
    /// In bytes.
    pub size: u64,
    /// BLAKE3 of its content; hexadecimal in the file. None in an image that is in memory only, and in a packed one, which
    /// has a hash for each chunk.
    #[serde(default, with = "hex::optional", skip_serializing_if = "Option::is_none")]
    pub blake3: Option<blake3::Hash>,
}

pub(crate) mod hex {
    //! A hash as hexadecimal text.
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub(crate) fn serialize<S: Serializer>(hash: &blake3::Hash, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&hash.to_hex())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<blake3::Hash, D::Error> {
        let text = String::deserialize(d)?;
        let hash = blake3::Hash::from_hex(&text).map_err(de::Error::custom)?;
        // from_hex takes upper case as well; a flipped bit makes one of the other.
        if hash.to_hex().as_str() == text { Ok(hash) } else { Err(de::Error::custom("it is not in lower case")) }
    }

    pub(crate) mod optional {
        use super::*;

        pub(crate) fn serialize<S: Serializer>(hash: &Option<blake3::Hash>, s: S) -> Result<S::Ok, S::Error> {
            match hash {
                Some(hash) => super::serialize(hash, s),
                None => s.serialize_none(),
            }
        }

        pub(crate) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Option<blake3::Hash>, D::Error> {
            super::deserialize(d).map(Some)
        }
    }
}

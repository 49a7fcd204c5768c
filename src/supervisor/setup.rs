//! The input of a run: checked before it starts, and never changed.

use std::path::PathBuf;
use std::sync::Arc;

use chrono::{DateTime, Utc};

use crate::config::Config;
use crate::job_api::server::Socket;
use crate::policy::StartPoint;
use crate::scheduler::Scheduler;
use crate::watch::beats::Beats;
use rekindle_criu::Criu;
use rekindle_cuda::copier::Copier;
use rekindle_engine::launch::work::WorkFolder;
use rekindle_engine::launch::{JobSpec, output, uplink};
use rekindle_engine::parts::gpu::placement::Wishes;
use rekindle_engine::snapshot::Launch;
use rekindle_store::heal::{ChunkSource, Healing};
use rekindle_store::persist::Packing;
use rekindle_store::staging::Area;
use rekindle_store::{ImageId, JobFolder, WriterLock};

/// Everything a run needs.
#[derive(Debug)]
pub(crate) struct Setup {
    /// The configuration.
    pub(crate) config: Config,
    /// The job's folder in the store.
    pub(crate) folder: JobFolder,
    /// Proof that nobody else writes there.
    pub(crate) lock: WriterLock,
    /// The installed CRIU.
    pub(crate) criu: Criu,
    /// The program of the job.
    pub(crate) program: Program,
    /// The sockets for the job.
    pub(crate) sockets: Sockets,
    /// Where images are made and how they are stored.
    pub(crate) images: Places,
    /// What the run starts from.
    pub(crate) origin: Origin,
    /// How long the job may run.
    pub(crate) time: TimeLimit,
    /// The files of the job's output.
    pub(crate) output: output::Files,
    /// What goes to standard output.
    pub(crate) shown: Shown,
    /// Copies memory that stays on the GPU.
    pub(crate) copier: Copier,
    /// The group, if the job runs on several machines.
    pub(crate) group: Option<super::GroupMember>,
}

/// What a run writes to standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    /// What the job prints there; its standard error goes to ours.
    Output,
    /// The events of the run, one JSON object a line. The job's output is only in its files.
    Events,
    /// Nothing: the supervisor is in the background. The job's output is only in its files.
    Nothing,
}

impl Setup {
    /// How damaged content is replaced: from other packs, images in memory, or the replica.
    pub(super) fn healing<'a>(&'a self, replica: &'a dyn ChunkSource) -> Healing<'a> {
        Healing {
            folder: &self.folder,
            lock: &self.lock,
            key: self.images.packing.key.as_deref(),
            copies: self.images.packing.copies,
            unread: &self.images.packing.unread,
            replica: self.config.replica.url.is_some().then_some(replica),
        }
    }
}

/// The program of the job, and the files that rekindle provides for it.
#[derive(Debug)]
pub(crate) struct Program {
    /// How to run it.
    pub(crate) spec: JobSpec,
    /// The same for manifests.
    pub(crate) launch: Launch,
    /// The folder of rekindle's own files for this run.
    pub(crate) work: Arc<WorkFolder>,
    /// This version's reaper, unpacked.
    pub(crate) reaper: PathBuf,
    /// This version's interposer, unpacked, if the job gets it.
    pub(crate) interposer: Option<PathBuf>,
    /// The uplink of the job's network, if it has a private network with one.
    pub uplink: Option<uplink::Plan>,
}

impl Program {
    /// Files of ours that a job has mapped.
    pub(super) fn ours(&self) -> Vec<PathBuf> {
        [Some(&self.reaper), self.interposer.as_ref()].into_iter().flatten().cloned().collect()
    }
}

/// The job's sockets, if they are configured.
#[derive(Debug)]
pub(crate) struct Sockets {
    /// Where the job sends `WATCHDOG=1`.
    pub(crate) beats: Option<Beats>,
    /// Where the job asks for snapshots and holds.
    pub(crate) job_api: Option<Socket>,
}

/// Where images are made and how they are stored.
#[derive(Debug)]
pub(crate) struct Places {
    /// Where images are stored in memory.
    pub(crate) staging: Option<Area>,
    /// How they are packed.
    pub(crate) packing: Packing,
}

/// What a run starts from.
#[derive(Debug)]
pub(crate) struct Origin {
    /// The image or the beginning.
    pub(crate) from: StartPoint,
    /// Whether the user named that image: then no other is used instead.
    pub(crate) named: bool,
    /// The image of another lineage that this one started from, and may go back to.
    pub(crate) base: Option<ImageId>,
    /// The GPUs that the user wants the job to be restored on.
    pub(crate) wishes: Wishes,
}

/// How long the job may run.
#[derive(Debug)]
pub(crate) struct TimeLimit {
    /// The scheduler that started us.
    pub(crate) scheduler: Scheduler,
    /// The deadline, if the user gave one.
    pub(crate) deadline: Option<DateTime<Utc>>,
    /// Kills for lack of memory before the run, after which Slurm ignores our exit code.
    pub(crate) oom_kills: super::OomKills,
}

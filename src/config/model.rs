//! The typed configuration and its built-in defaults. Names follow the TOML file with `_` for `-`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::auto::MeanTime;
use super::control::Control;
use super::files::Files;
use super::gpu::Gpu;
use super::job_api::JobApi;
use super::network::Network;
use super::notifications::{Hooks, LogFormat, Metrics};
use super::scheduler::Scheduler;
use super::storage::{Repack, SizeLimit, Threads, VerifyRate};
use super::value::{ByteSize, Environment, Interval, Limit, Rate, Stdin, Umask, duration};
use super::watch::{Patience, Rule, Watch};
use rekindle_base::Percentage;
use rekindle_engine::restore::ChangedFiles;
use rekindle_engine::snapshot::TcpChoice;
use rekindle_os::parallel;
use rekindle_store::chunk::Compression;
use rekindle_store::options::Copies;
use rekindle_store::replica::ReplicaUrl;

/// The only configuration format there is so far.
pub(crate) const VERSION: u32 = 1;

/// Everything that can be configured. Deserialized on its own it is typed, not validated: use [`super::load`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Config {
    /// Format of the file, [`VERSION`].
    pub version: u32,
    /// What is done about which end of the job, or line of its output; the first that fits.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<Rule>,
    /// The job's world.
    pub job: Job,
    /// What the job sees of the network.
    pub network: Network,
    /// Which files are a part of its state.
    pub files: Files,
    /// How the job uses its GPUs.
    pub gpu: Gpu,
    /// When and how to snapshot.
    pub snapshot: Snapshot,
    /// Where the images are kept and for how long.
    pub store: Store,
    /// Where copies of the images go, off this machine.
    pub replica: Replica,
    /// What to do when the job dies.
    pub restart: Restart,
    /// When a job that has not ended is taken for hung.
    pub watch: Watch,
    /// What is around: a scheduler, and the time it leaves.
    pub scheduler: Scheduler,
    /// Commands and an address that are notified of events.
    pub hooks: Hooks,
    /// Numbers for Prometheus.
    pub metrics: Metrics,
    /// The job's output and our own messages.
    pub log: Log,
    /// Where others reach the supervisor.
    pub control: Control,
    /// What the job may ask of its supervisor.
    pub job_api: JobApi,
    /// Which CRIU to use.
    pub criu: Criu,
}

/// `[job]`: the job's world.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Job {
    /// Name of the job and of its folder in the store; unset means that `run` derives one.
    pub name: Option<String>,
    /// What to run, where `run` is given no command.
    pub command: Vec<String>,
    /// Absolute working directory; unset means the caller's.
    pub directory: Option<PathBuf>,
    /// User name or number the job runs as; unset means the caller's.
    pub user: Option<String>,
    /// File mode creation mask; unset means the caller's.
    pub umask: Option<Umask>,
    /// What the job reads as standard input.
    pub stdin: Stdin,
    /// Added to the environment that [`Job::environment_mode`] starts from. Values are never shown.
    pub environment: Environment,
    /// Where the job's environment starts from; unset means [`Job::starts_from`].
    pub environment_mode: Option<EnvironmentMode>,
    /// Variables of the caller that the job gets in any case: names, or the beginning of names and a `*`.
    pub pass_environment: Vec<String>,
    /// Resource limits by their name in [`LIMITS`], soft and hard at once; limits not named stay the caller's.
    pub limits: BTreeMap<String, Limit>,
    /// Whether the job gets a PID namespace of its own.
    pub pid_namespace: PidNamespace,
    /// Whether the job and all it starts lose setuid programs and file capabilities (prctl PR_SET_NO_NEW_PRIVS); unset means
    /// [`Job::keeps_its_rights`].
    pub no_new_privileges: Option<bool>,
    /// Whether io_uring_setup(2) works in the job.
    pub allow_io_uring: bool,
}

impl Job {
    /// The environment of whoever calls is not the business of another user.
    #[must_use]
    pub fn starts_from(&self) -> EnvironmentMode {
        let default = if self.user.is_some() { EnvironmentMode::Clean } else { EnvironmentMode::Inherit };
        self.environment_mode.unwrap_or(default)
    }

    /// Whether the job's rights cannot grow. A job of another user has no reason to become more than that user.
    #[must_use]
    pub fn keeps_its_rights(&self) -> bool {
        self.no_new_privileges.unwrap_or_else(|| self.user.is_some())
    }

    /// Whether [`Job::pass_environment`] names the variable.
    #[must_use]
    pub fn passes(&self, variable: &str) -> bool {
        self.pass_environment.iter().any(|named| match named.strip_suffix('*') {
            Some(beginning) => variable.starts_with(beginning),
            None => variable == named,
        })
    }
}

/// Names accepted in `job.limits`: those of setrlimit(2) in lower case, without `RLIMIT_`.
pub(crate) const LIMITS: &[&str] = &[
    "as",
    "core",
    "cpu",
    "data",
    "fsize",
    "locks",
    "memlock",
    "msgqueue",
    "nice",
    "nofile",
    "nproc",
    "rss",
    "rtprio",
    "rttime",
    "sigpending",
    "stack",
];

/// `job.environment-mode`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EnvironmentMode {
    /// The caller's environment.
    #[default]
    Inherit,
    /// Nothing of the caller's.
    Clean,
}

/// `job.pid-namespace`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PidNamespace {
    /// One of its own: the pids that a restore needs are free.
    #[default]
    Private,
    /// The host's: a restore fails if another process has one of the job's pids.
    Host,
}

/// `[snapshot]`: when and how to snapshot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Snapshot {
    /// Time between the end of one snapshot and the start of the next.
    pub interval: Interval,
    /// The largest share of the time that snapshots may freeze the job, with [`Interval::Auto`].
    pub max_overhead: Percentage,
    /// Mean time between failures, with [`Interval::Auto`].
    pub mean_time_between_failures: MeanTime,
    /// Time limit for the final snapshot when the job is stopped. Storing its image comes after and is not limited by
    /// it.
    #[serde(with = "duration")]
    pub grace: Duration,
    /// How long the CUDA driver may wait for running kernels; at least 1 ms, because the driver takes 0 for ever.
    #[serde(with = "duration")]
    pub lock_timeout: Duration,
    /// How long CRIU may try to stop all tasks; whole seconds (CRIU's RPC option `timeout`).
    #[serde(with = "duration")]
    pub freeze_timeout: Duration,
    /// How long a whole CRIU dump may take.
    #[serde(with = "duration")]
    pub dump_timeout: Duration,
    /// First wait after a failed snapshot; doubles with each further failure.
    #[serde(with = "duration")]
    pub retry_after: Duration,
    /// Longest wait after a failed snapshot.
    #[serde(with = "duration")]
    pub retry_max: Duration,
    /// Largest deleted but open file that is copied into the image; fits in 32 bits (CRIU's `ghost_limit`).
    pub ghost_limit: ByteSize,
    /// Most that an image takes of files on disk that the job changes in place. Files in memory do not count.
    pub file_limit: ByteSize,
    /// What happens to established TCP connections.
    pub tcp: TcpChoice,
    /// Host memory that must stay free while an image is written to memory, or GPU memory is copied into it.
    pub memory_reserve: ByteSize,
    /// How often a restore is tried beside the job.
    pub rehearse: Patience,
    /// Where an image is complete first, which ends the freeze.
    pub staging: Staging,
    /// Absolute folder with one folder for each job that is staged in memory.
    pub staging_directory: PathBuf,
    /// Whether the job is run with the library that shortens the CUDA driver's copies.
    pub interposer: Interposer,
}

/// `snapshot.staging`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Staging {
    /// In memory; it is packed into the store while the job runs again.
    #[default]
    Ram,
    /// In a slot on the store's disk; it is packed while the job runs again.
    Store,
}

/// `snapshot.interposer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Interposer {
    /// Where the machine has an NVIDIA driver.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// `[store]`: where the images are kept and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Store {
    /// Absolute folder with one folder for each job.
    pub directory: PathBuf,
    /// Good images kept for a job, at least 1.
    pub keep_last: u32,
    /// For how many hours with images to keep the newest good image.
    pub keep_hourly: u32,
    /// For how many days with images to keep the newest good image.
    pub keep_daily: u32,
    /// Good images are kept that were taken within this time before now.
    #[serde(with = "duration")]
    pub keep_within: Duration,
    /// Most that the images of a job may take.
    pub max_total_size: SizeLimit,
    /// Space of the file system that an image must leave free.
    pub min_free: ByteSize,
    /// How the content of images is made smaller.
    pub compression: Compression,
    /// Absolute path of the file with the key that the content of images is encrypted with; unset means that it is not.
    pub encryption_key: Option<PathBuf>,
    /// Whether unsigned images are accepted although there is a key: for images from before there was one.
    pub accept_unsigned: bool,
    /// Where this machine keeps what it has seen of the images of jobs, to notice when an older state is put in their place.
    pub seen_directory: PathBuf,
    /// Most that is written each second of an image that was staged in memory.
    pub persist_rate: Rate,
    /// Threads that copy and hash it.
    pub persist_threads: Threads,
    /// How long content is kept that no image needs any more.
    #[serde(with = "duration")]
    pub sweep_after: Duration,
    /// The most bytes that one repack writes.
    pub repack: Repack,
    /// In how many packs content is kept that several images refer to.
    pub copies: Copies,
    /// How much is read each second, while there is nothing else to do, to find damage.
    pub verify_rate: VerifyRate,
    /// What happens to the images when the job ends with exit code 0.
    pub on_success: OnSuccess,
}

impl Store {
    /// How many [`Store::persist_threads`] are on this machine.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.persist_threads.among(parallel::cores())
    }
}

/// `[replica]`: where copies of the images go, off this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Replica {
    /// The object store or folder; unset means that there is none.
    pub url: Option<ReplicaUrl>,
    /// Good images kept there for a job, at least 1.
    pub keep_last: u32,
    /// Most that is sent each second.
    pub rate: Rate,
}

/// `store.on-success`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnSuccess {
    /// Remove them.
    Remove,
    /// Keep them.
    #[default]
    Keep,
}

/// `[restart]`: what to do when the job dies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Restart {
    /// Restarts allowed within [`Restart::window`]; 0 means never to restart.
    pub max_restarts: u32,
    /// The window that restarts are counted in.
    #[serde(with = "duration")]
    pub window: Duration,
    /// First wait before a restart; doubles with each further one.
    #[serde(with = "duration")]
    pub backoff: Duration,
    /// Longest wait before a restart.
    #[serde(with = "duration")]
    pub backoff_max: Duration,
    /// A job that dies sooner than this after a restore speaks against the image.
    #[serde(with = "duration")]
    pub min_uptime: Duration,
    /// A job that lives this long resets the counters.
    #[serde(with = "duration")]
    pub healthy_uptime: Duration,
    /// Exit codes that are worth a restart; empty means every code but 0.
    pub retry_exit_codes: Vec<u8>,
    /// Exit codes that never are.
    pub never_retry_exit_codes: Vec<u8>,
    /// Whether the job may be started from its beginning when no image can be used.
    pub cold_start: ColdStart,
    /// What happens over a file that changed since the snapshot and whose content the image does not have.
    pub changed_files: ChangedFiles,
    /// How long a restore may take; CRIU hangs for ever on some broken images.
    #[serde(with = "duration")]
    pub restore_timeout: Duration,
}

/// `restart.cold-start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ColdStart {
    /// Only if there is no image at all, good or bad.
    #[default]
    NoImages,
    /// Also if no image can be used.
    Allow,
    /// Rekindle gives up.
    Never,
}

/// `[log]`: the job's output and our own messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Log {
    /// How much rekindle says.
    pub level: Level,
    /// In which form.
    pub format: LogFormat,
    /// Size at which a file of the job's output is rotated.
    pub max_size: ByteSize,
    /// Rotated files kept beside the current one.
    pub keep: u32,
}

/// `log.level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// What failed.
    Error,
    /// And what may fail soon.
    Warn,
    /// And what was done.
    #[default]
    Info,
    /// And how.
    Debug,
    /// And every step of it.
    Trace,
}

/// `[criu]`: which CRIU to use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct Criu {
    /// Absolute path of the `criu` program; if unset, it is searched for.
    pub path: Option<PathBuf>,
}

const fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

impl Default for Config {
    fn default() -> Config {
        Config {
            version: VERSION,
            rules: Vec::new(),
            job: Job::default(),
            network: Network::default(),
            files: Files::default(),
            gpu: Gpu::default(),
            snapshot: Snapshot::default(),
            store: Store::default(),
            replica: Replica::default(),
            restart: Restart::default(),
            watch: Watch::default(),
            scheduler: Scheduler::default(),
            hooks: Hooks::default(),
            metrics: Metrics::default(),
            log: Log::default(),
            control: Control::default(),
            job_api: JobApi::default(),
            criu: Criu::default(),
        }
    }
}

impl Default for Snapshot {
    fn default() -> Snapshot {
        Snapshot {
            interval: Interval::Every(seconds(600)),
            max_overhead: Percentage::millionths(10_000),
            mean_time_between_failures: MeanTime::default(),
            grace: seconds(30),
            lock_timeout: seconds(10),
            freeze_timeout: seconds(10),
            dump_timeout: seconds(1800),
            retry_after: seconds(30),
            retry_max: seconds(1800),
            // Shared memory is deleted files, of tens of MB each with NCCL, of a batch with DataLoader: a job is better off
            // with a longer freeze than without images. It is the most that CRIU can be told.
            ghost_limit: ByteSize::mib(4095),
            // A database beside the training; what is larger is mostly written once, and would cost every freeze.
            file_limit: ByteSize::gib(16),
            tcp: TcpChoice::default(),
            memory_reserve: ByteSize::mib(512),
            rehearse: Patience::For(seconds(24 * 3600)),
            staging: Staging::default(),
            staging_directory: PathBuf::from("/run/rekindle"),
            interposer: Interposer::default(),
        }
    }
}

impl Default for Store {
    fn default() -> Store {
        Store {
            directory: PathBuf::from("/var/lib/rekindle"),
            keep_last: 3,
            keep_hourly: 0,
            keep_daily: 0,
            keep_within: Duration::ZERO,
            max_total_size: SizeLimit::default(),
            min_free: ByteSize::gib(1),
            compression: Compression::default(),
            encryption_key: None,
            accept_unsigned: false,
            seen_directory: PathBuf::from("/var/lib/rekindle-seen"),
            persist_rate: Rate::default(),
            persist_threads: Threads::default(),
            // A reader that began before an image went has its content for so long.
            sweep_after: seconds(600),
            repack: Repack::UpTo(ByteSize::new(10_000_000_000)),
            copies: Copies::default(),
            // 1.7 TB a day, for 0.5 to 4 % of a processor.
            verify_rate: VerifyRate::PerSecond(ByteSize::new(20_000_000)),
            on_success: OnSuccess::default(),
        }
    }
}

impl Default for Replica {
    fn default() -> Replica {
        Replica { url: None, keep_last: 3, rate: Rate::default() }
    }
}

impl Default for Restart {
    fn default() -> Restart {
        Restart {
            max_restarts: 10,
            window: seconds(3600),
            backoff: seconds(1),
            backoff_max: seconds(300),
            min_uptime: seconds(30),
            healthy_uptime: seconds(600),
            retry_exit_codes: Vec::new(),
            // Wrong usage, not executable, not found: another try ends the same way.
            never_retry_exit_codes: vec![2, 126, 127],
            cold_start: ColdStart::default(),
            changed_files: ChangedFiles::default(),
            restore_timeout: seconds(600),
        }
    }
}

impl Default for Log {
    fn default() -> Log {
        Log { level: Level::default(), format: LogFormat::default(), max_size: ByteSize::mib(64), keep: 5 }
    }
}

//! The typed configuration and its built-in defaults. Names follow the TOML file with `_` for `-`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::auto::MeanTime;
use super::control::Control;
use super::files::Files;
use super::gpu::Gpu;
use super::group::Group;
use super::network::Network;
use super::notifications::{Hooks, LogFormat, Metrics};
use super::scheduler::Scheduler;
use super::storage::SizeLimit;
use super::value::{ByteSize, Environment, Interval, Limit, Rate, Stdin, duration};
use super::watch::{Patience, Rule, Watch};
use rekindle_base::Percentage;
use rekindle_engine::restore::{ChangedFiles, Compare};
use rekindle_engine::snapshot::TcpChoice;
use rekindle_replica::ReplicaUrl;
use rekindle_store::Unsigned;
use rekindle_store::chunk::Compression;
use rekindle_store::options::Copies;

/// The only version of the configuration format so far.
pub(crate) const VERSION: u32 = 1;

/// The complete configuration. A deserialized value has the right types, but is not validated: use [`super::effective`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Format of the file, [`VERSION`].
    pub(crate) version: u32,
    /// What to do about an end of the job, or a line of its output; the first matching rule applies.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) rules: Vec<Rule>,
    pub(crate) job: Job,
    /// The network of the job.
    pub(crate) network: Network,
    /// The machines of a job over several machines.
    pub(crate) group: Group,
    /// Which files are part of the job's state.
    pub(crate) files: Files,
    /// How the job uses its GPUs.
    pub(crate) gpu: Gpu,
    /// When and how to take snapshots.
    pub(crate) snapshot: Snapshot,
    /// Where the images are stored, and for how long.
    pub(crate) store: Store,
    /// Copies of the images on another machine.
    pub(crate) replica: Replica,
    /// What to do when the job dies.
    pub(crate) restart: Restart,
    /// When a job that has not ended counts as hung.
    pub(crate) watch: Watch,
    /// The scheduler, and its time limit.
    pub(crate) scheduler: Scheduler,
    /// Commands and an address that are notified of events.
    pub(crate) hooks: Hooks,
    /// Metrics for Prometheus.
    pub(crate) metrics: Metrics,
    /// The job's output and our own messages.
    pub(crate) log: Log,
    /// The socket of the supervisor.
    pub(crate) control: Control,
    /// Which CRIU to use.
    pub(crate) criu: Criu,
}

/// `[job]`: the job.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Job {
    /// Name of the job and of its folder in the store; unset means that `run` derives one.
    pub(crate) name: Option<String>,
    /// The command to run if `run` is given none.
    pub(crate) command: Vec<String>,
    /// Absolute working directory; unset means the caller's.
    pub(crate) directory: Option<PathBuf>,
    /// User name or number the job runs as; unset means the caller's.
    pub(crate) user: Option<String>,
    /// What the job reads as standard input.
    pub(crate) stdin: Stdin,
    /// Variables added to the environment that [`Job::environment_mode`] starts from. Values are never shown.
    pub(crate) environment: Environment,
    /// What the job's environment starts from; unset means [`Job::starts_from`].
    pub(crate) environment_mode: Option<EnvironmentMode>,
    /// Variables of the caller that the job always gets: names, or prefixes followed by `*`.
    pub(crate) pass_environment: Vec<String>,
    /// Resource limits by their name in [`LIMITS`], soft and hard at once; limits not named stay the caller's.
    pub(crate) limits: BTreeMap<String, Limit>,
    /// Whether the job and its children cannot use setuid programs and file capabilities (prctl PR_SET_NO_NEW_PRIVS);
    /// unset means [`Job::keeps_its_rights`].
    pub(crate) no_new_privileges: Option<bool>,
    /// What the job may use although CRIU cannot dump it.
    pub(crate) allow: BTreeSet<Allowed>,
}

impl Job {
    /// The default of [`Job::environment_mode`]: another user does not get the caller's environment.
    #[must_use]
    pub(crate) fn starts_from(&self) -> EnvironmentMode {
        let default = if self.user.is_some() { EnvironmentMode::Clean } else { EnvironmentMode::Inherit };
        self.environment_mode.unwrap_or(default)
    }

    /// The default of [`Job::no_new_privileges`]: a job of another user has no reason to get more rights.
    #[must_use]
    pub(crate) fn keeps_its_rights(&self) -> bool {
        self.no_new_privileges.unwrap_or_else(|| self.user.is_some())
    }

    /// Whether [`Job::pass_environment`] names the variable.
    #[must_use]
    pub(crate) fn passes(&self, variable: &str) -> bool {
        self.pass_environment.iter().any(|named| match named.strip_suffix('*') {
            Some(beginning) => variable.starts_with(beginning),
            None => variable == named,
        })
    }
}

/// An entry of `job.allow`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Allowed {
    /// io_uring_setup(2).
    IoUring,
    /// The matrix instructions of Intel CPUs.
    Amx,
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
pub(crate) enum EnvironmentMode {
    /// The caller's environment.
    #[default]
    Inherit,
    /// An empty environment.
    Clean,
}

/// `[snapshot]`: when and how to take snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Snapshot {
    /// Time between the end of one snapshot and the start of the next.
    pub(crate) interval: Interval,
    /// The maximum share of the time for which snapshots may freeze the job, with [`Interval::Auto`].
    pub(crate) max_overhead: Percentage,
    /// Mean time between failures, with [`Interval::Auto`].
    pub(crate) mean_time_between_failures: MeanTime,
    /// Time limit for the final snapshot when the job is stopped. Storing its image comes afterwards and is not limited
    /// by this.
    #[serde(with = "duration")]
    pub(crate) grace: Duration,
    /// Time limit for the freeze of one snapshot.
    #[serde(with = "duration")]
    pub(crate) freeze_limit: Duration,
    /// See [`Snapshot::lock_timeout`]; for emergencies.
    #[serde(skip)]
    pub(crate) lock_timeout: Option<Duration>,
    /// First wait after a failed snapshot; doubles with each further failure.
    #[serde(skip)]
    pub(crate) retry_after: Duration,
    /// How long the job may block snapshots at a time.
    #[serde(skip)]
    pub(crate) max_hold: Duration,
    /// Maximum bytes of files on disk in an image, for files that the job changes in place. Files in memory do not
    /// count.
    pub(crate) file_limit: ByteSize,
    /// What happens to established TCP connections.
    pub(crate) tcp: TcpChoice,
    /// Host memory that must stay free while an image is written to memory, or GPU memory is copied into it.
    pub(crate) memory_reserve: ByteSize,
    /// Interval of rehearsals beside the job.
    pub(crate) rehearse: Patience,
    /// Where an image is first written; the freeze ends when it is complete there.
    pub(crate) staging: Staging,
    /// Absolute folder with one folder for each job that is staged in memory.
    pub(crate) staging_directory: PathBuf,
    /// Whether the job loads the library that makes the CUDA driver's copies faster.
    pub(crate) interposer: Interposer,
}

/// The longest wait after failed snapshots, unless REKINDLE_RETRY_AFTER is longer. What does not pass by itself costs the job
/// little then, and what passes in the night is noticed the same night.
const LONGEST_RETRY: Duration = Duration::from_secs(1800);

/// How long the parts of a freeze that only wait may take: for GPU work to finish, and for tasks to stop. Most take
/// milliseconds. What takes longer than this hangs, or is tried again when the job pauses.
const LONGEST_WAIT: Duration = Duration::from_secs(10);

impl Snapshot {
    /// Time limit of CRIU for stopping all tasks. CRIU counts whole seconds.
    #[must_use]
    pub(crate) fn stop_limit(&self) -> Duration {
        self.freeze_limit.min(LONGEST_WAIT)
    }

    /// Time limit for running kernels in one attempt to lock CUDA.
    #[must_use]
    pub(crate) fn lock_timeout(&self) -> Duration {
        self.lock_timeout.unwrap_or_else(|| self.stop_limit())
    }

    /// Time limit for all attempts of one snapshot to lock CUDA: several hold the job up no longer than one may.
    #[must_use]
    pub(crate) fn lock_limit(&self) -> Duration {
        self.stop_limit().max(self.lock_timeout())
    }

    /// The wait after this many failures in a row: the first is 1.
    #[must_use]
    pub(crate) fn retry_wait(&self, failures: u32) -> Duration {
        let factor = 1u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.retry_after.saturating_mul(factor).min(self.longest_retry())
    }

    /// The longest wait after failures.
    #[must_use]
    pub(crate) fn longest_retry(&self) -> Duration {
        self.retry_after.max(LONGEST_RETRY)
    }
}

/// `snapshot.staging`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Staging {
    /// In memory; it is packed into the store while the job runs again.
    #[default]
    Ram,
    /// In a slot on the store's disk; it is packed while the job runs again.
    Store,
}

/// `snapshot.interposer`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Interposer {
    /// If the machine has an NVIDIA driver.
    #[default]
    Auto,
    /// Never.
    Off,
}

/// `[store]`: where the images are stored, and for how long.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Store {
    /// Absolute folder with one folder for each job.
    pub(crate) directory: PathBuf,
    /// Number of good images kept of a job, at least 1.
    pub(crate) keep_last: u32,
    /// Number of hours with images for which the newest good image is kept.
    pub(crate) keep_hourly: u32,
    /// Number of days with images for which the newest good image is kept.
    pub(crate) keep_daily: u32,
    /// Good images younger than this are kept.
    #[serde(with = "duration")]
    pub(crate) keep_within: Duration,
    /// Maximum total size of a job's images.
    pub(crate) max_total_size: SizeLimit,
    /// Space of the file system that an image must leave free.
    pub(crate) min_free: ByteSize,
    /// How the content of images is compressed.
    pub(crate) compression: Compression,
    /// Absolute path of the key file for encrypting the content of images; unset means no encryption.
    pub(crate) encryption_key: Option<PathBuf>,
    /// How files without a signature are treated if there is a key: `--accept-unsigned` of `run` and `restore`.
    #[serde(skip)]
    pub(crate) unsigned: Unsigned,
    /// Maximum bytes per second written when an image is stored.
    pub(crate) persist_rate: Rate,
    /// In how many packs content is kept that several images use.
    pub(crate) copies: Copies,
    /// What happens to the images when the job ends with exit code 0.
    pub(crate) on_success: OnSuccess,
}

/// `[replica]`: copies of the images on another machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Replica {
    /// The object store or folder; unset means no replica.
    pub(crate) url: Option<ReplicaUrl>,
    /// Number of good images kept there of a job, at least 1.
    pub(crate) keep_last: u32,
    /// Maximum bytes sent per second.
    pub(crate) rate: Rate,
}

/// `store.on-success`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnSuccess {
    /// Remove them.
    Remove,
    /// Keep them.
    #[default]
    Keep,
}

/// `[restart]`: what to do when the job dies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Restart {
    /// Maximum number of restarts within an hour; 0 means no restarts.
    pub(crate) max_restarts: u32,
    /// First wait before a restart; doubles with each further one.
    #[serde(with = "duration")]
    pub(crate) backoff: Duration,
    /// A death sooner than this after a restore counts against the image.
    #[serde(with = "duration")]
    pub(crate) min_uptime: Duration,
    /// Whether the job may be started from the beginning if no image can be used.
    pub(crate) cold_start: ColdStart,
    /// What to do if a file changed since the snapshot and its content is not in the image.
    pub(crate) changed_files: ChangedFiles,
    /// What a difference between a restored job and its image means.
    pub(crate) compare: Compare,
    /// Which processes take the job back when they die.
    pub(crate) on_process_death: OnProcessDeath,
    /// Time limit for a restore; CRIU hangs for ever on some broken images.
    #[serde(with = "duration")]
    pub(crate) restore_timeout: Duration,
}

/// The longest wait before a restart, unless `backoff` is longer. It is short beside the time that most faults of a machine
/// take to be repaired.
const LONGEST_BACKOFF: Duration = Duration::from_secs(300);

impl Restart {
    /// The longest wait before a restart.
    #[must_use]
    pub(crate) fn longest_backoff(&self) -> Duration {
        self.backoff.max(LONGEST_BACKOFF)
    }
}

/// `restart.on-process-death`: which processes of a job take it back to its newest image when a signal kills them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum OnProcessDeath {
    /// Those that used CUDA when the image was taken.
    #[default]
    Cuda,
    /// Every one.
    Any,
    /// The one of the command, with which the job ends.
    Root,
}

/// `restart.cold-start`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ColdStart {
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
pub(crate) struct Log {
    /// How much rekindle logs.
    pub(crate) level: Level,
    /// The format of the log.
    pub(crate) format: LogFormat,
    /// Size at which a file of the job's output is rotated.
    pub(crate) max_size: ByteSize,
    /// Rotated files kept beside the current one.
    pub(crate) keep: u32,
}

/// `log.level`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Level {
    /// Errors only.
    Error,
    /// Also warnings.
    Warn,
    /// Also the start, restores and the end of the job.
    #[default]
    Notice,
    /// Also each snapshot, and what is done with its image.
    Info,
    /// Also details.
    Debug,
    /// Everything.
    Trace,
}

/// `[criu]`: which CRIU to use.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Criu {
    /// Absolute path of the `criu` program; if unset, it is searched for.
    pub(crate) path: Option<PathBuf>,
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
            group: Group::default(),
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
            freeze_limit: seconds(1800),
            lock_timeout: None,
            retry_after: seconds(30),
            // A final snapshot must not wait longer, and a job that hangs must not block others for long.
            max_hold: seconds(60),
            // Enough for a database beside the training. Larger files are mostly written once, and would lengthen every
            // freeze.
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
            unsigned: Unsigned::default(),
            persist_rate: Rate::default(),
            copies: Copies::default(),
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
            backoff: seconds(1),
            min_uptime: seconds(30),
            cold_start: ColdStart::default(),
            changed_files: ChangedFiles::default(),
            compare: Compare::default(),
            on_process_death: OnProcessDeath::default(),
            restore_timeout: seconds(600),
        }
    }
}

impl Default for Log {
    fn default() -> Log {
        Log { level: Level::default(), format: LogFormat::default(), max_size: ByteSize::mib(64), keep: 5 }
    }
}

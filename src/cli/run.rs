//! `rekindle run` and `rekindle restore`: check what is needed, choose what to begin with, supervise.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use chrono::{DateTime, Utc};

use super::{Exit, Global, Misuse, environment, job_args, named_criu, replica, start_log, trust};
use crate::config::{ColdStart, Config, Deadline, Interposer, Limit, Overrides, Requeue, Staging, Stdin, UplinkMode};
use crate::job_api::server::Socket;
use crate::policy::StartPoint;
use crate::scheduler::Scheduler;
use crate::supervisor::line::{Begin, Candidate, Line};
use crate::supervisor::state::{Finish, NO_USABLE_IMAGE, Obstacle, Stop};
use crate::supervisor::{self, Origin, Places, Program, Setup, Sockets, TimeLimit};
use crate::telemetry;
use crate::watch::beats::Beats;
use rekindle_base::chain;
use rekindle_criu::Criu;
use rekindle_cuda as cuda;
use rekindle_cuda::nvml::names_instance;
use rekindle_engine::launch::identity;
use rekindle_engine::launch::{self, IoUring, JobSpec, Privileges, interposer, nccl, reaper, uplink};
use rekindle_engine::parts::gpu::placement::{Pair, Wishes};
use rekindle_engine::restore;
use rekindle_engine::snapshot::Launch;
use rekindle_os::cgroup;
use rekindle_os::inherited;
use rekindle_os::spawn::Ended;
use rekindle_store::persist::Packing;
use rekindle_store::staging::{self, Area, leftovers};
use rekindle_store::{
    Access, Image, ImageId, JobFolder, JobName, JobPath, JobRecord, Outcome, State, Store, WriterLock,
};

/// What to run.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// The job's name; by default made from the command and its directory
    #[arg(long)]
    name: Option<String>,
    /// Time between two snapshots: "10m", "auto" or "off" (snapshot.interval)
    #[arg(long, value_name = "TIME")]
    interval: Option<String>,
    /// Time limit for the final snapshot when the job is stopped; storing it comes after (snapshot.grace)
    #[arg(long, value_name = "TIME")]
    grace: Option<String>,
    /// Stop the job before this time, after a final snapshot, to be queued again: "8h" or "2026-11-22T06:00:00"
    /// (scheduler.deadline; under Slurm its time limit)
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Start from the beginning, even if there is an image to continue from
    #[arg(long)]
    fresh: bool,
    #[command(flatten)]
    accepted: Accepted,
    #[command(flatten)]
    devices: DeviceMap,
    /// The command and its arguments; by default that of the configuration (job.command)
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "COMMAND")]
    pub(super) command: Vec<OsString>,
}

/// What to restore.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// JOB (its newest good image), JOB/ID, JOB/TAG or ID
    image: String,
    #[command(flatten)]
    accepted: Accepted,
    #[command(flatten)]
    devices: DeviceMap,
}

/// What is accepted about the image that the run continues from.
#[derive(Debug, clap::Args)]
struct Accepted {
    /// Continue from an image of USER, as USER, even if job.user is another user. Applies to this run only; does not
    /// start the job from the beginning
    #[arg(long = "accept-user", value_name = "USER")]
    user: Option<String>,
}

impl Accepted {
    /// The job then belongs to this user until the run is over. Only an image is started as that user.
    fn apply(&self, config: &mut Config) {
        if let Some(user) = &self.user {
            config.job.user = Some(user.clone());
            config.restart.cold_start = ColdStart::Never;
            // Who names the user of an image by hand takes it as it was taken.
            config.job.no_new_privileges.get_or_insert(false);
        }
    }
}

/// The GPUs for the images that exist when the run begins.
#[derive(Debug, clap::Args)]
struct DeviceMap {
    /// Restore the job on other GPUs: UUIDs or numbers of nvidia-smi for the new ones, UUIDs or the image's numbers
    /// (`rekindle show`) for the old ones. GPUs that are not named stay if possible. By default a GPU is replaced only
    /// if it is missing, faulty or full
    #[arg(long = "device-map", value_name = "OLD=NEW,...", value_delimiter = ',')]
    pairs: Vec<Pair>,
}

/// The supervisor lacks rights.
#[derive(Debug, thiserror::Error)]
#[error(
    "this needs root, for namespaces, CRIU and the CUDA checkpoint. Run it with sudo, and set job.user to run the job \
    as a user"
)]
pub(crate) struct NoRights;

/// There are images to continue from, and none can be used.
#[derive(Debug, thiserror::Error)]
#[error(
    "{why}. `rekindle list {job}` shows what is wrong with each; `rekindle unmark {job}/ID` removes a mark; `rekindle \
    restore {job}/ID` continues from one image; `rekindle run --fresh` with the same command starts the job from the \
    beginning"
)]
pub(crate) struct NoUsableImage {
    job: JobName,
    why: String,
}

pub(super) fn run(global: &Global, args: &RunArgs) -> anyhow::Result<Exit> {
    let overrides = Overrides {
        name: args.name.clone(),
        interval: args.interval.clone(),
        grace: args.grace.clone(),
        deadline: args.deadline.clone(),
        ..global.overrides()
    };
    let mut config = global.settings(overrides)?;
    args.accepted.apply(&mut config);
    let configured: Vec<OsString> = config.job.command.iter().map(OsString::from).collect();
    let command = if args.command.is_empty() { &configured } else { &args.command };
    if command.is_empty() {
        return Err(Misuse("there is no command to run: give one after --, or set job.command".into()).into());
    }
    let directory = working_directory(config.job.directory.as_deref())?;
    let name: JobName = match &config.job.name {
        Some(name) => name.parse()?,
        None => match find_scheduler(&config).job_name() {
            Some(name) => name.parse()?,
            None => default_name(command, &directory)?,
        },
    };
    if !args.fresh {
        start_log(&config);
        trust::check(&config, &name)?;
    }
    let prepared = Prepared::prepare(config, directory, command)?;
    let (folder, lock) = prepared.open(&name)?;
    if !args.fresh {
        replica::bring_newest(&prepared.config, &folder, &lock)?;
        trust::check_here(&folder)?;
    }
    let start = choose(&folder, command, args.fresh, prepared.config.restart.cold_start)?;
    match (start.from, &args.accepted.user) {
        (StartPoint::Image(id), _) => {
            let image = folder.copies()?.into_iter().find(|image| image.id == id && image.is_good());
            if let Some(manifest) = image.as_ref().and_then(Image::manifest) {
                restore::check_user(manifest, prepared.spec.identity.as_ref())?;
            }
        }
        (StartPoint::Cold, Some(user)) => {
            return Err(Misuse(format!(
                "--accept-user {user} needs an image to continue from, and there is none: remove it to start the job \
                as job.user"
            ))
            .into());
        }
        (StartPoint::Cold, None) => {}
    }
    if let Some(seen) = trust::seen(&prepared.config, &folder) {
        let record = folder.record()?.filter(|record| !args.fresh && record.outcome != Outcome::Completed);
        match &record {
            // What is left behind on purpose is not missed.
            None if args.fresh => {
                seen.runs().unwrap_or_default().iter().for_each(|run| trust::forget(&seen, &run.lineage))
            }
            record => trust::look_for_rollback(&seen, &folder, record.as_ref().map(|record| record.lineage.as_str())),
        }
    }
    supervise(prepared, folder, lock, start, &args.devices.pairs)
}

pub(super) fn restore(global: &Global, args: &RestoreArgs) -> anyhow::Result<Exit> {
    let config = global.settings(global.overrides())?;
    start_log(&config);
    replica::bring_named(&config, &args.image)?;
    let store = Store::open(&config.store.directory, Access::Read)?.with_trust(config.store.trust()?);
    let (folder, image) = job_args::image(&store, &args.image)?;
    trust::refuse(&folder, &image)?;
    if job_args::means_newest(&folder, &args.image) {
        trust::check_newest(&folder)?;
    }
    let known = || Misuse(format!("image {} has no readable manifest: run `rekindle verify`", image.id));
    let manifest = image.manifest().ok_or_else(known)?.clone();
    let command: Vec<OsString> = manifest.command.iter().map(OsString::from).collect();
    let named = !job_args::means_newest(&folder, &args.image);
    let mut config = config;
    args.accepted.apply(&mut config);
    if config.restart.cold_start == ColdStart::Allow {
        // Who asks for an image does not ask for the job's beginning.
        config.restart.cold_start = ColdStart::NoImages;
    }
    let user = config.job.user.as_deref().map(identity::lookup).transpose()?;
    restore::check_user(&manifest, user.as_ref())?;
    let prepared = Prepared::prepare(config, manifest.directory.to_path_buf(), &command)?;
    let (folder, lock) = prepared.open(folder.name())?;
    let mut image = image;
    if matches!(image.state, State::Bad { .. }) {
        // Whoever names an image wants it tried.
        tracing::warn!("image {} was marked as bad; the mark is removed", image.id);
        image.clear_bad()?;
    }
    // What came after this image is left alone, and is not what a later crash goes back to.
    let newest = folder.copies()?.iter().find(|i| i.is_good()).map(|i| i.id);
    let (lineage, base) = match newest == Some(image.id) {
        true => (manifest.lineage, None),
        false => (supervisor::new_lineage(), Some(image.id)),
    };
    supervise(
        prepared,
        folder,
        lock,
        Start { from: StartPoint::Image(image.id), lineage, base, named },
        &args.devices.pairs,
    )
}

/// What is known before the job's folder is touched.
struct Prepared {
    config: Config,
    criu: Criu,
    spec: JobSpec,
    /// The program that connects a private network to the outside.
    uplink: Option<PathBuf>,
    packing: Packing,
    store: Store,
}

impl Prepared {
    fn prepare(config: Config, directory: PathBuf, command: &[OsString]) -> anyhow::Result<Prepared> {
        start_log(&config);
        let user = config.job.user.as_deref().map(identity::lookup).transpose()?;
        let environment = environment::of(&config, user.as_ref(), std::env::vars_os());
        environment.tell(&config);
        let environment = environment.variables;
        let path = environment.get(OsStr::new("PATH")).map(OsString::as_os_str);
        let program = command.first().map_or_else(
            || Err(Misuse("there is no command to run".into()).into()),
            |name| Ok::<_, anyhow::Error>(launch::find_program(name, &directory, path)?),
        )?;
        if !nix::unistd::geteuid().is_root() {
            return Err(NoRights.into());
        }
        let umask = inherited::own_files_only();
        let uplink = match config.network.uplink {
            UplinkMode::Off => None,
            UplinkMode::User => Some(uplink::find()?),
        };
        let criu = Criu::find(named_criu(&config).as_deref())?;
        let spec = JobSpec {
            command: command.to_vec(),
            program,
            directory,
            environment,
            identity: user,
            umask: Some(config.job.umask.map_or(umask, |mask| mask.bits())),
            limits: config.job.limits.iter().map(|(name, limit)| resource(name, limit)).collect::<Result<_, _>>()?,
            stdin: standard_input(&config.job.stdin)?,
            privileges: if config.job.keeps_its_rights() { Privileges::Fixed } else { Privileges::MayGrow },
            io_uring: match config.job.allow_io_uring {
                true => IoUring::AsItIs,
                false => IoUring::refused_where_possible(),
            },
        };
        let trust = config.store.trust()?;
        let packing = config.store.packing(&trust);
        let store = Store::open(&config.store.directory, Access::Write)?.with_trust(trust);
        Ok(Prepared { config, criu, spec, uplink, packing, store })
    }

    /// Becomes the only writer of the job's folder, and removes remnants of crashes from it.
    fn open(&self, name: &JobName) -> anyhow::Result<(JobFolder, WriterLock)> {
        let folder = self.store.create_job(name)?;
        let lock = folder.lock()?;
        if let Some((holder, silent)) = lock.silent_holder() {
            let silent = humantime::format_duration(Duration::from_secs(silent.as_secs()));
            tracing::warn!(
                "the job was supervised by {holder}, which has sent no heartbeat for {silent}: taking the job over"
            );
        }
        let (gone, left) = leftovers::give_back(&self.store, name);
        gone.iter().for_each(|gone| tracing::info!("job {}: {gone}: freed", gone.job));
        left.iter().for_each(|left| tracing::info!("job {}: {left}: {}", left.job, left.advice()));
        for path in folder.sweep_leftovers(&lock)? {
            tracing::info!("removed {}, a remnant of an interrupted run", path.display());
        }
        Ok((folder, lock))
    }
}

/// What a run begins with.
struct Start {
    from: StartPoint,
    lineage: String,
    base: Option<ImageId>,
    /// Whether the user named the image.
    named: bool,
}

fn supervise(
    prepared: Prepared,
    folder: JobFolder,
    lock: WriterLock,
    start: Start,
    map: &[Pair],
) -> anyhow::Result<Exit> {
    let Prepared { config, criu, mut spec, uplink, packing, .. } = prepared;
    let add = |spec: &mut JobSpec, name: &str, value: &str| spec.environment.insert(name.into(), value.into());
    add(&mut spec, "REKINDLE_JOB", folder.name().as_str());
    add(&mut spec, "REKINDLE_RUN_ID", &start.lineage);
    let launch = Launch {
        command: spec.command.iter().map(|part| part.to_string_lossy().into_owned()).collect(),
        directory: JobPath::new(spec.directory.as_path())?,
        user: config.job.user.clone(),
        identity: spec.identity.clone(),
        lineage: start.lineage.clone(),
    };
    telemetry::log::is_about(folder.name().as_str());
    let reaper = reaper::unpack(&folder.bin_dir())?;
    let uplink = uplink.map(|program| {
        uplink::Plan::new(program, folder.bin_dir(), spec.identity.as_ref().map(|identity| identity.uid))
    });
    match start.from {
        StartPoint::Cold => tracing::info!("job {} starts", folder.name()),
        StartPoint::Image(id) => tracing::info!("job {} continues from image {id}", folder.name()),
    }
    let staging = staging_area(&config, &folder, &lock);
    let interposer = interposer(&config, &mut spec, &folder, staging.as_ref());
    prepare_nccl(&config, &mut spec, interposer.is_some());
    let Start { from, base, lineage, named } = start;
    let seen = trust::seen(&config, &folder);
    let visible = spec.environment.get(OsStr::new("CUDA_VISIBLE_DEVICES")).map(|value| value.to_string_lossy());
    if let Some(visible) = visible.filter(|visible| names_instance(visible)) {
        tracing::warn!(
            "CUDA_VISIBLE_DEVICES={visible} names a MIG instance, which the CUDA driver cannot checkpoint: a job that \
            uses it will have no snapshots"
        );
    }
    let map = match from {
        StartPoint::Cold if !map.is_empty() => {
            tracing::warn!(
                "--device-map is ignored: the job starts from the beginning, on the GPUs that it chooses \
                itself"
            );
            &[]
        }
        _ => map,
    };
    let newest = folder.copies()?.iter().map(|image| image.id).max();
    let wishes = Wishes { map: map.to_vec(), until: newest, ..Wishes::default() };
    let beats = beats(&config, &mut spec, &folder)?;
    let job_api = job_api(&config, &mut spec, &folder);
    let scheduler = find_scheduler(&config);
    let deadline = deadline(&config)?;
    let requeue = config.scheduler.requeue;
    let setup = Setup {
        config,
        folder,
        lock,
        criu,
        program: Program { spec, launch, reaper, interposer, uplink },
        sockets: Sockets { beats, job_api },
        images: Places { staging, packing },
        origin: Origin { from, named, base, wishes },
        time: TimeLimit { scheduler: scheduler.clone(), deadline },
    };
    let job = setup.folder.name().clone();
    let finish = supervisor::run(setup)?;
    if let (Finish::Completed, Some(seen)) = (&finish, seen) {
        trust::forget(&seen, &lineage);
    }
    Ok(exit(finish, &scheduler, requeue, &job))
}

/// The job's tmpfs for images. Without one, images are made in slots on the disk, which takes longer.
fn staging_area(config: &Config, folder: &JobFolder, lock: &WriterLock) -> Option<Area> {
    match staging::disk::sweep(folder, lock) {
        Ok(true) => tracing::warn!("removed slots on the disk that were written before the machine was restarted"),
        Ok(false) => {}
        Err(error) => {
            tracing::warn!("cannot remove slots on the disk from before the machine was restarted: {}", chain(&error))
        }
    }
    if config.snapshot.staging == Staging::Store {
        return None;
    }
    // What is really used is decided for each snapshot; the bound only keeps a mistake from taking all there is.
    let size = cgroup::memory_total()?;
    match Area::open(&config.snapshot.staging_directory, folder, lock, size) {
        Ok(area) => Some(area),
        Err(error) => {
            tracing::warn!("images are made on the disk, and the job is frozen longer: {}", chain(&error));
            None
        }
    }
}

/// Gives the job a socket for its watchdog messages, if that is configured.
fn beats(config: &Config, spec: &mut JobSpec, folder: &JobFolder) -> anyhow::Result<Option<Beats>> {
    let Some(limit) = config.watch.no_notify_for.limit() else { return Ok(None) };
    let base = &config.snapshot.staging_directory;
    let path = base.join(format!("{}.notify", folder.place_name()));
    let listen = || {
        if !base.exists() {
            std::fs::create_dir_all(base)?;
            // The job's user must get to it, whatever the umask.
            std::fs::set_permissions(base, std::fs::Permissions::from_mode(0o755))?;
        }
        Beats::listen(&path, spec.identity.as_ref().map(|identity| identity.uid))
    };
    let beats = listen().with_context(|| {
        format!("watch.no-notify-for needs a socket for the job, and {} cannot be created", path.display())
    })?;
    spec.environment.extend(beats.variables(limit));
    Ok(Some(beats))
}

/// Gives the job a socket for its requests. It also runs without one.
fn job_api(config: &Config, spec: &mut JobSpec, folder: &JobFolder) -> Option<Socket> {
    let name = OsStr::new("REKINDLE_SOCKET");
    // One of a rekindle that we run in ourselves.
    spec.environment.remove(name);
    let directory = &config.control.directory;
    match Socket::bind(directory, &folder.place_name(), spec.identity.as_ref().map(|identity| identity.uid)) {
        Ok(socket) => {
            spec.environment.insert(name.into(), socket.path().into());
            Some(socket)
        }
        Err(error) => {
            tracing::warn!("cannot create the job's REKINDLE_SOCKET in {}: {error}", directory.display());
            None
        }
    }
}

fn has_driver() -> bool {
    Path::new("/dev/nvidiactl").exists() || cuda::Driver::load().is_ok()
}

/// Limits NCCL to features that can be checkpointed, and logs what that costs.
fn prepare_nccl(config: &Config, spec: &mut JobSpec, has_interposer: bool) {
    if !has_driver() {
        return;
    }
    let (added, contrary) = nccl::prepare(config.gpu.nccl, has_interposer, &mut spec.environment);
    // With one GPU there is nothing between GPUs that could cost anything.
    if Path::new("/dev/nvidia1").exists() {
        nccl::tell(&added, &contrary);
    }
}

/// Loads the interposer into the job, if there is a driver that calls it. Without it snapshots take longer, and fail
/// for processes that share GPU memory.
fn interposer(config: &Config, spec: &mut JobSpec, folder: &JobFolder, area: Option<&Area>) -> Option<PathBuf> {
    if config.snapshot.interposer == Interposer::Off || !has_driver() {
        return None;
    }
    // The store is closed to other users, and a tmpfs of the job can be unmounted. So each file is where it has to be.
    let dir = match (&spec.identity, area) {
        (None, _) => folder.bin_dir(),
        (Some(_), Some(area)) => area.path().to_path_buf(),
        (Some(_), None) => return None,
    };
    let name = OsStr::new("LD_PRELOAD");
    let set = || -> anyhow::Result<(PathBuf, OsString)> {
        let path = interposer::unpack(&dir)?;
        let value = interposer::preload_value(&path, spec.environment.get(name).map(OsString::as_os_str))?;
        Ok((path, value))
    };
    match set() {
        Ok((path, value)) => {
            spec.environment.insert(name.into(), value);
            if let Some(area) = area {
                spec.environment.insert(interposer::LANDING_VARIABLE.into(), area.landing_dir().into());
            }
            Some(path)
        }
        Err(error) => {
            tracing::warn!("the job runs without the interposer, so its snapshots take longer: {error:#}");
            None
        }
    }
}

/// The scheduler that started us.
fn find_scheduler(config: &Config) -> Scheduler {
    Scheduler::find(config.scheduler.profile, |name| std::env::var(name).ok())
}

/// The deadline that was given.
fn deadline(config: &Config) -> Result<Option<DateTime<Utc>>, Misuse> {
    let now = Utc::now();
    match config.scheduler.deadline {
        None => Ok(None),
        Some(Deadline::After(time)) => Ok(Some(now + time)),
        Some(Deadline::At(time)) if time <= now => {
            Err(Misuse(format!("the deadline {} (scheduler.deadline) has passed", Deadline::At(time))))
        }
        Some(Deadline::At(time)) => Ok(Some(time)),
    }
}

fn exit(finish: Finish, scheduler: &Scheduler, requeue: Requeue, job: &JobName) -> Exit {
    let signalled = |n: i32| u8::try_from(n).ok().and_then(|n| n.checked_add(128)).map_or(Exit::Internal, Exit::Job);
    match finish {
        Finish::Completed => Exit::Success,
        // Where it is queued again, the image before is better than nothing.
        Finish::Stopped(Stop::Requeue) | Finish::StoppedInMemory { stop: Stop::Requeue, .. } => {
            if requeue == Requeue::Scontrol
                && let Err(error) = scheduler.requeue()
            {
                tracing::error!("the job is not queued again: {}", chain(&error));
            }
            Exit::Requeue(scheduler.requeue_code())
        }
        Finish::Stopped(Stop::Signal(n)) => signalled(n),
        Finish::StoppedInMemory { stop: Stop::Signal(_), .. } => Exit::OnlyInMemory,
        Finish::Impossible { why, obstacle } => {
            tracing::error!("the job cannot be started: {why}");
            match obstacle {
                Obstacle::Machine => Exit::Missing,
                Obstacle::Configuration => Exit::Config,
            }
        }
        Finish::NoUsableImage { why } => {
            tracing::error!("given up: {}", NoUsableImage { job: job.clone(), why });
            Exit::NoUsableImage
        }
        Finish::Failed { why, last } => {
            tracing::error!("given up: {why}");
            match last {
                Some(Ended::Exit(code)) => u8::try_from(code).map_or(Exit::Internal, Exit::Job),
                Some(Ended::Signal(n)) => signalled(n),
                None => Exit::Internal,
            }
        }
    }
}

/// Continues from the newest good image if the last run did not complete.
fn choose(folder: &JobFolder, command: &[OsString], fresh: bool, cold: ColdStart) -> anyhow::Result<Start> {
    let anew = || Start { from: StartPoint::Cold, lineage: supervisor::new_lineage(), base: None, named: false };
    let Some(record) = folder.record()? else { return Ok(anew()) };
    if fresh || record.outcome == Outcome::Completed {
        return Ok(anew());
    }
    same_command(&record, command, folder.name())?;
    let line = Line::new(record.lineage.clone(), record.base);
    let mut images = folder.copies()?;
    for image in &mut images {
        if line.gives_another_chance(&Candidate::of(&*image)) {
            tracing::info!("image {} could not be restored in an earlier run; trying it again", image.id);
            image.clear_bad()?;
        }
    }
    let from = match line.begin(images.iter().map(Candidate::of), cold) {
        Begin::With(from) => from,
        Begin::OverImages => {
            tracing::warn!(
                "no image of the interrupted run can be used; `rekindle list {}` shows why. The job starts from the \
                beginning (restart.cold-start)",
                folder.name()
            );
            StartPoint::Cold
        }
        Begin::NoUsableImage => {
            return Err(NoUsableImage { job: folder.name().clone(), why: NO_USABLE_IMAGE.into() }.into());
        }
    };
    Ok(Start { from, lineage: record.lineage, base: record.base, named: false })
}

/// A restored image runs the command that was started then, whatever is typed now.
fn same_command(record: &JobRecord, command: &[OsString], name: &JobName) -> Result<(), Misuse> {
    let typed: Vec<String> = command.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    if typed == record.command {
        return Ok(());
    }
    Err(Misuse(format!(
        "job {name} was interrupted while it ran {:?}, and this is another command: use --fresh to start from the \
        beginning, or another --name",
        record.command.join(" ")
    )))
}

/// The command's name and a hash of all of it with its directory: the same line typed again means the same job.
fn default_name(command: &[OsString], directory: &Path) -> anyhow::Result<JobName> {
    let base = Path::new(command.first().map_or_else(|| OsStr::new("job"), OsString::as_os_str));
    let base = base.file_name().unwrap_or_default().to_string_lossy();
    let plain: String = base.chars().filter(|c| c.is_ascii_alphanumeric() || "_-".contains(*c)).take(40).collect();
    let mut hash = blake3::Hasher::new();
    for part in command.iter().map(OsString::as_os_str).chain([directory.as_os_str()]) {
        hash.update(part.as_encoded_bytes()).update(&[0]);
    }
    let plain = if plain.is_empty() || plain.starts_with('-') { "job" } else { &plain };
    Ok(format!("{plain}-{}", hash.finalize().to_hex().get(..8).unwrap_or_default()).parse()?)
}

fn working_directory(configured: Option<&Path>) -> anyhow::Result<PathBuf> {
    match configured {
        Some(directory) => match std::fs::metadata(directory) {
            // An image knows a folder by one name only.
            Ok(metadata) if metadata.is_dir() && directory.components().any(|it| it == Component::ParentDir) => {
                Ok(std::fs::canonicalize(directory)?)
            }
            Ok(metadata) if metadata.is_dir() => Ok(directory.to_path_buf()),
            Ok(_) => Err(Misuse(format!("job.directory = {directory:?}: not a folder")).into()),
            Err(e) => Err(Misuse(format!("job.directory = {directory:?}: {e}")).into()),
        },
        None => std::env::current_dir().map_err(|e| {
            Misuse(format!("cannot find the working directory: {e}. Change to an existing one, or set job.directory"))
                .into()
        }),
    }
}

/// The file for the job's standard input. A terminal or a pipe cannot be restored.
fn standard_input(wanted: &Stdin) -> anyhow::Result<PathBuf> {
    match wanted {
        Stdin::Null => Ok("/dev/null".into()),
        Stdin::File(path) => {
            let metadata = std::fs::metadata(path).map_err(|e| Misuse(format!("job.stdin = {path:?}: {e}")))?;
            // To open a FIFO waits for a writer, perhaps for ever.
            if !metadata.is_file() && path != Path::new("/dev/null") {
                return Err(
                    Misuse(format!("job.stdin = {path:?}: not a regular file, so it cannot be restored")).into()
                );
            }
            Ok(path.clone())
        }
        Stdin::Inherit => {
            let path = std::fs::read_link("/proc/self/fd/0")?;
            let kind = std::fs::metadata(&path).map(|m| m.is_file()).unwrap_or(false);
            if kind || path == Path::new("/dev/null") {
                return Ok(path);
            }
            let shown = path.display();
            Err(Misuse(format!(
                "job.stdin = \"inherit\": standard input is {shown}, which cannot be restored. \
                Redirect it from a file, or use \"null\""
            ))
            .into())
        }
    }
}

fn resource(name: &str, limit: &Limit) -> Result<(u32, u64), Misuse> {
    let number = match name {
        "as" => libc::RLIMIT_AS,
        "core" => libc::RLIMIT_CORE,
        "cpu" => libc::RLIMIT_CPU,
        "data" => libc::RLIMIT_DATA,
        "fsize" => libc::RLIMIT_FSIZE,
        "locks" => libc::RLIMIT_LOCKS,
        "memlock" => libc::RLIMIT_MEMLOCK,
        "msgqueue" => libc::RLIMIT_MSGQUEUE,
        "nice" => libc::RLIMIT_NICE,
        "nofile" => libc::RLIMIT_NOFILE,
        "nproc" => libc::RLIMIT_NPROC,
        "rss" => libc::RLIMIT_RSS,
        "rtprio" => libc::RLIMIT_RTPRIO,
        "rttime" => libc::RLIMIT_RTTIME,
        "sigpending" => libc::RLIMIT_SIGPENDING,
        "stack" => libc::RLIMIT_STACK,
        other => return Err(Misuse(format!("job.limits.{other} is not a limit of this system"))),
    };
    let value = match limit {
        Limit::Unlimited => libc::RLIM_INFINITY,
        Limit::Value(value) => *value,
    };
    Ok((number, value))
}

//! `rekindle run` and `rekindle restore`: check the requirements, choose what to start from, supervise.

mod detach;
mod group;
mod prepare;
mod provide;
mod start;
mod tried;
mod turn;

use std::ffi::{OsStr, OsString};
use std::sync::Arc;

use anyhow::Context;
use chrono::{DateTime, Utc};

use super::find::Finder;
use super::{Exit, Global, Misuse, complete, ended, replica, trust};
use crate::config::{self as settings, ColdStart, Config, Deadline, Overrides, Profile, Requeue};
use crate::group::NoFirst;
use crate::policy::StartPoint;
use crate::scheduler::Scheduler;
use crate::supervisor::notify::Notify;
use crate::supervisor::state::{Finish, Obstacle, Stop};
use crate::supervisor::{self, Early, OomKills, Origin, Places, Program, Setup, Shown, Sockets, TimeLimit};
use crate::telemetry::{self, events::Journal};
use crate::variables;
use detach::Caller;
use group::Place;
pub(crate) use prepare::NoRights;
use prepare::{Other, Prepared, working_directory};
use rekindle_base::chain;
use rekindle_cuda::copier::Copier;
use rekindle_cuda::nvml::names_instance;
use rekindle_engine::launch::work::WorkFolder;
use rekindle_engine::launch::{identity, output, reaper, uplink};
use rekindle_engine::parts::gpu::placement::{Pair, Wishes};
use rekindle_engine::restore;
use rekindle_engine::snapshot::Launch;
use rekindle_os::detach::Side;
use rekindle_os::spawn::Ended;
use rekindle_store::manifest::words;
use rekindle_store::{Image, JobFolder, JobName, JobPath, Outcome, State, Unsigned, WriterLock};
pub(crate) use start::{NoUsableImage, Obstructed};
use start::{Start, choose, default_name, nothing_to_do};
pub(crate) use tried::CannotRestore;

/// What to run.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// The job's name (job.name); by default the scheduler's name for it, else one made from the command and its
    /// directory
    #[arg(long, add = complete::jobs_at_rest())]
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
    /// Start from the beginning, even if there is an image to continue from, or the job has completed
    #[arg(long)]
    fresh: bool,
    /// Do nothing and exit with 0 if the job has completed: for service managers, which start it again at every boot
    #[arg(long, conflicts_with = "fresh")]
    unless_completed: bool,
    /// Run in the background: return when the job runs, and continue after this terminal is closed
    #[arg(long, short)]
    detach: bool,
    #[command(flatten)]
    machines: Machines,
    #[command(flatten)]
    accepted: Accepted,
    #[command(flatten)]
    devices: DeviceMap,
    /// The command and its arguments; by default that of the configuration (job.command)
    // Without allow_hyphen_values: an option before the command is ours, and a misspelt one is not a command.
    #[arg(trailing_var_arg = true, value_name = "COMMAND", add = complete::command())]
    pub(super) command: Vec<OsString>,
}

/// A job over several machines.
#[derive(Debug, clap::Args)]
struct Machines {
    /// The job runs on several machines, one rekindle on each; Slurm says how many, and which this one is
    #[arg(long)]
    group: bool,
    /// The number of machines of the group (group.nodes)
    #[arg(long, value_name = "N")]
    nodes: Option<u32>,
    /// The number of this machine in the group, from 0 (group.node-rank)
    #[arg(long, value_name = "N")]
    node_rank: Option<u32>,
    /// The addresses of etcd. "local": rank 0 starts an etcd, and the others find it through the shared store;
    /// "local:FILE": the same, but through this file (group.coordinator)
    #[arg(long, value_name = "WHERE", value_delimiter = ',')]
    coordinator: Option<Vec<String>>,
}

/// What to restore.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// JOB (the image that the same `run` would continue from), JOB/ID, JOB/TAG, JOB/-N or ID
    #[arg(add = complete::images())]
    image: String,
    /// Run in the background: return when the job runs, and continue after this terminal is closed
    #[arg(long, short)]
    detach: bool,
    #[command(flatten)]
    accepted: Accepted,
    #[command(flatten)]
    devices: DeviceMap,
}

/// What is accepted about the image that the run continues from.
#[derive(Debug, clap::Args)]
struct Accepted {
    /// Continue from an image that belongs to USER, and run the job as USER, even if job.user names another user. For
    /// this run only. If no image can be used, the job is not started from the beginning
    #[arg(long = "accept-user", value_name = "USER")]
    user: Option<String>,
    /// Continue from an image without a signature although store.encryption-key is set, because it is older than the key.
    /// For this run only: its new images are signed. Whoever can write the store or the replica can forge such an image
    #[arg(long = "accept-unsigned")]
    unsigned: bool,
}

impl Accepted {
    /// Sets how files without a signature are treated in the run.
    fn apply_to_signatures(&self, config: &mut Config) -> Result<(), Misuse> {
        if !self.unsigned {
            return Ok(());
        }
        if config.store.encryption_key.is_none() {
            return Err(Misuse(
                "--accept-unsigned needs store.encryption-key: without a key nothing is signed, and nothing is refused"
                    .into(),
            ));
        }
        config.store.unsigned = Unsigned::Accepted;
        Ok(())
    }

    /// Sets this user for the run. Only an image is started as that user.
    fn apply(&self, config: &mut Config) -> Result<(), Misuse> {
        if let Some(user) = &self.user {
            if matches!(identity::lookup(user), Err(identity::Error::Unknown(_))) {
                return Err(Misuse(format!("--accept-user {user:?}: there is no such user on this machine")));
            }
            config.job.user = Some(user.clone());
            config.restart.cold_start = ColdStart::Never;
            // A user who names the image's user accepts the image as it was taken.
            config.job.no_new_privileges.get_or_insert(false);
        }
        Ok(())
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

pub(super) fn run(global: &Global, args: &RunArgs) -> anyhow::Result<Exit> {
    here_or_detached(global, args.detach, |caller| in_foreground(global, args, caller))
}

pub(super) fn restore(global: &Global, args: &RestoreArgs) -> anyhow::Result<Exit> {
    here_or_detached(global, args.detach, |caller| restore_in_foreground(global, args, caller))
}

/// Supervises in this process, or in a copy of it in the background, which has a caller that waits until the job runs.
fn here_or_detached(
    global: &Global,
    detach: bool,
    supervise: impl FnOnce(Option<Caller>) -> anyhow::Result<Exit>,
) -> anyhow::Result<Exit> {
    if !detach {
        return supervise(None);
    }
    match rekindle_os::detach::split().context("cannot run in the background")? {
        Side::Here { copy, from } => detach::wait(global, copy, from),
        Side::Copy { to } => {
            telemetry::log::without_colours();
            supervise(Some(Caller(to)))
        }
    }
}

/// From now on a signal ends this run with the right exit code.
fn take_signals() -> anyhow::Result<Early> {
    Early::before_the_loop(Scheduler::find(Profile::Auto, variable)).context("cannot set up the supervisor's signals")
}

/// Runs the job; with a caller, as its supervisor in the background.
fn in_foreground(global: &Global, args: &RunArgs, caller: Option<Caller>) -> anyhow::Result<Exit> {
    let early = take_signals()?;
    let overrides = Overrides {
        name: args.name.clone(),
        interval: args.interval.clone(),
        grace: args.grace.clone(),
        deadline: args.deadline.clone(),
        nodes: args.machines.nodes.or_else(|| args.machines.group.then(|| Scheduler::nodes(&variable)).flatten()),
        node_rank: args.machines.node_rank,
        coordinator: args.machines.coordinator.clone(),
        ..global.overrides()
    };
    let mut config = global.settings_and_log(overrides)?;
    if args.machines.group && !config.group.is_on() {
        return Err(Misuse("--group: the number of machines is not known: use --nodes (group.nodes)".into()).into());
    }
    args.accepted.apply_to_signatures(&mut config)?;
    args.accepted.apply(&mut config)?;
    let configured: Vec<OsString> = config.job.command.iter().map(OsString::from).collect();
    let command = if args.command.is_empty() { &configured } else { &args.command };
    if command.is_empty() {
        return Err(Misuse("there is no command to run: give one after --, or set job.command".into()).into());
    }
    let deadline = deadline(&config, args.deadline.as_deref(), Utc::now())?;
    let directory = working_directory(&config.job)?;
    let scheduler = find_scheduler(&config);
    let group = match &config.job.name {
        Some(name) => Some(name.parse()?),
        None => scheduler.group_name().map(|name| name.parse()).transpose()?,
    };
    let place = Place::of(&config, group, &scheduler)?;
    match &place {
        Some(_) => early.group_queues_again(scheduler.clone(), config.scheduler.requeue),
        None => early.queues_again(scheduler.clone(), config.scheduler.requeue),
    }
    let name: JobName = match (&place, &config.job.name) {
        (Some(place), _) => place.job()?,
        (None, Some(name)) => name.parse()?,
        (None, None) => match scheduler.job_name() {
            Some(name) => name.parse()?,
            None => default_name(command, &directory)?,
        },
    };
    let keep = place.is_some().then(|| Place::keep_all(&mut config));
    if !args.fresh {
        trust::check(&config, &name)?;
    }
    let prepared = Prepared::prepare(config, directory, command)?;
    let (folder, lock) = prepared.open(&name, Other::IsAwaited).map_err(|error| match error.downcast() {
        Ok(error @ rekindle_store::Error::Supervised { .. }) => Taken(error).into(),
        Ok(error) => error.into(),
        Err(error) => error,
    })?;
    early.gives_back(lock.release_at_exit());
    let shown = leave(global, caller, &folder, &prepared.config)?;
    let mut uses_replica = true;
    if !args.fresh {
        match place.is_some() {
            // Which image is fetched depends on what the other machines have.
            true => uses_replica = replica::may_have_parts(&prepared.config, &folder, &lock)?,
            false => replica::bring_newest(&prepared.config, &folder, &lock)?,
        }
        trust::check_here(&folder)?;
    }
    if args.unless_completed
        && let Some(done) = nothing_to_do(&folder)?
    {
        tracing::info!("{done}");
        Notify::from_environment().nothing_to_do(&done);
        return Ok(Exit::Success);
    }
    let start = match &place {
        Some(place) => start::of_group(&folder, command, place.lineage(), args.fresh)?,
        None => {
            refuse_member(&folder)?;
            choose(&folder, command, args.fresh, prepared.config.restart.cold_start)?
        }
    };
    match (start.from, &args.accepted.user) {
        (StartPoint::Image(id), _) => {
            let image = folder.copies()?.into_iter().find(|image| image.id == id && image.is_good());
            if let Some(manifest) = image.as_ref().and_then(Image::manifest) {
                restore::check_user(manifest, prepared.spec.identity.as_ref())?;
            }
        }
        (StartPoint::Cold, Some(user)) if place.is_some() => {
            return Err(Misuse(format!(
                "--accept-user {user} is not for a group, whose images all machines restore together: set job.user to \
                {user} on all machines instead"
            ))
            .into());
        }
        (StartPoint::Cold, Some(user)) => {
            return Err(Misuse(format!(
                "--accept-user {user} needs an image to continue from, and there is none: leave it out to start the \
                job as job.user"
            ))
            .into());
        }
        (StartPoint::Cold, None) => {}
    }
    if let Some(seen) = trust::seen(&folder) {
        let record = folder.record()?.filter(|record| !args.fresh && record.outcome != Outcome::Completed);
        match &record {
            // A newer image that is abandoned on purpose is not missed.
            None if args.fresh => {
                seen.runs().unwrap_or_default().iter().for_each(|run| trust::forget(&seen, &run.lineage))
            }
            record => trust::look_for_rollback(&seen, &folder, record.as_ref().map(|record| record.lineage.as_str())),
        }
    }
    let place = place.zip(keep).map(|(place, keep)| Joining { place, keep, is_fresh: args.fresh, uses_replica });
    let terms = Terms { map: &args.devices.pairs, deadline, shown, place, early };
    supervise(global, prepared, folder, lock, start, terms)
}

/// Restores the job; with a caller, as its supervisor in the background.
fn restore_in_foreground(global: &Global, args: &RestoreArgs, caller: Option<Caller>) -> anyhow::Result<Exit> {
    let early = take_signals()?;
    let mut config = global.settings_and_log(global.overrides())?;
    args.accepted.apply_to_signatures(&mut config)?;
    early.queues_again(find_scheduler(&config), config.scheduler.requeue);
    let deadline = deadline(&config, None, Utc::now())?;
    let finder = Finder::trusting(global, config.store.trust()?)?;
    // One that runs with another store is not fetched into this one.
    if let Ok(folder) = finder.only_job(args.image.split('/').next().unwrap_or_default()) {
        config.store.directory = folder.store().to_owned();
    }
    let elsewhere = replica::bring_named(&config, &args.image)?;
    let (folder, newest) = finder.image(&args.image).map_err(|error| match error.downcast_ref() {
        Some(rekindle_store::Error::NoGoodImage { job, known }) if known.is_empty() => {
            ended::no_image(global, job.as_str()).map_or(error, |text| Misuse(text).into())
        }
        _ => error,
    })?;
    config.store.directory = folder.store().to_owned();
    let image = match means_newest(&folder, &args.image) {
        true => {
            refuse_part(&newest)?;
            trust::check_newest(&folder)?;
            start::newest_of_line(&folder, newest)?
        }
        false => newest,
    };
    trust::refuse(&folder, &image)?;
    refuse_part(&image)?;
    let known = || Misuse(format!("image {} has no readable manifest: run `rekindle verify`", image.id));
    let manifest = image.manifest().ok_or_else(known)?.clone();
    let command = words::command_of(&manifest.command);
    let named = !means_newest(&folder, &args.image);
    args.accepted.apply(&mut config)?;
    if config.restart.cold_start == ColdStart::Allow {
        // A user who requests an image does not want a start from the beginning.
        config.restart.cold_start = ColdStart::NoImages;
    }
    let user = config.job.user.as_deref().map(identity::lookup).transpose()?;
    restore::check_user(&manifest, user.as_ref())?;
    let prepared = Prepared::prepare(config, manifest.directory.to_path_buf(), &command)?;
    // The image was chosen from what the store had before a wait.
    let (folder, lock) = prepared.open(folder.name(), Other::IsRefused)?;
    early.gives_back(lock.release_at_exit());
    let shown = leave(global, caller, &folder, &prepared.config)?;
    let mut image = image;
    if matches!(image.state, State::Bad { .. }) {
        // A user who names an image wants it tried.
        tracing::warn!("image {} was marked as bad; the mark is removed", image.id);
        image.clear_bad()?;
    }
    // Its numbers must be higher than those in the replica.
    elsewhere.into_iter().for_each(|id| folder.note_elsewhere(id));
    let (lineage, base) = start::line_of(&folder, &image)?;
    supervise(
        global,
        prepared,
        folder,
        lock,
        Start { from: StartPoint::Image(image.id), lineage, base, named },
        Terms { map: &args.devices.pairs, deadline, shown, place: None, early },
    )
}

/// A part of a group image alone is half of a job: its connections lead to processes that are somewhere else in time.
fn refuse_part(image: &Image) -> Result<(), Misuse> {
    let Some(part) = image.manifest().and_then(|manifest| manifest.group.as_ref()) else { return Ok(()) };
    Err(Misuse(format!(
        "image {} is a part of group image {}, which is only restored as a whole: run the same command with --group on \
        all machines",
        image.id, part.number
    )))
}

/// The parts of group images in a folder are neither restored nor removed by a job of this machine alone.
fn refuse_member(folder: &JobFolder) -> anyhow::Result<()> {
    let copies = folder.copies()?;
    let Some(part) = copies.iter().find(|image| image.manifest().is_some_and(|manifest| manifest.group.is_some()))
    else {
        return Ok(());
    };
    Err(Misuse(format!(
        "job {} is one machine's part of a job over several machines (image {}): run the same command with --nodes and \
        --node-rank on all of them, or use another --name",
        folder.name(),
        part.id
    ))
    .into())
}

/// Whether the text means the newest good image of that job.
fn means_newest(folder: &JobFolder, text: &str) -> bool {
    text == folder.name().as_str() || text.strip_prefix(folder.name().as_str()) == Some("/latest")
}

/// What was typed for this run only.
struct Terms<'a> {
    map: &'a [Pair],
    deadline: Option<DateTime<Utc>>,
    shown: Shown,
    /// The member of a group that this run is.
    place: Option<Joining>,
    /// Has the signals until the supervisor's loop has them.
    early: Early,
}

/// The member of a group that a run is.
struct Joining {
    place: Place,
    /// How many group images are kept.
    keep: usize,
    /// Whether it starts from the beginning.
    is_fresh: bool,
    /// Whether parts that are only in the replica are used.
    uses_replica: bool,
}

/// A run in the background lets its caller return. Returns what this run shows on its standard output.
fn leave(global: &Global, caller: Option<Caller>, folder: &JobFolder, config: &Config) -> anyhow::Result<Shown> {
    match caller {
        Some(caller) => caller.leave(folder, config.log.bounds().size).map(|()| Shown::Nothing),
        // A program that wants JSON gets the events: the job's output would be among them.
        None if global.json => Ok(Shown::Events),
        None => Ok(Shown::Output),
    }
}

fn supervise(
    global: &Global,
    prepared: Prepared,
    folder: JobFolder,
    lock: WriterLock,
    start: Start,
    terms: Terms<'_>,
) -> anyhow::Result<Exit> {
    let Prepared { config, criu, mut spec, uplink, packing, .. } = prepared;
    if let Some(Joining { place, .. }) = &terms.place {
        place.tell_job(&config, &mut spec);
    }
    for (name, value) in [(variables::JOB, folder.name().as_str()), (variables::RUN_ID, start.lineage.as_str())] {
        spec.environment.insert(name.into(), value.into());
    }
    let launch = Launch {
        command: words::text_of(&spec.command),
        directory: JobPath::new(spec.directory.as_path())?,
        user: config.job.user.clone(),
        identity: spec.identity.clone(),
        lineage: start.lineage.clone(),
    };
    telemetry::log::is_about(folder.name().as_str());
    let work = provide::work_folder(&config, &folder, &lock)?;
    let _removed_at_the_end = RemovedAtEnd(Arc::clone(&work));
    terms.early.removes(Arc::clone(&work));
    // Before there is any child of ours.
    tried::try_criu(&config, &criu, &work)?;
    tried::name_untried(&criu, &folder, &lock);
    let reaper = reaper::unpack(&work.bin())?;
    let uplink = uplink
        .map(|program| uplink::Plan::new(program, work.bin(), spec.identity.as_ref().map(|identity| identity.uid)));
    match start.from {
        StartPoint::Cold => tracing::info!("job {} starts", folder.name()),
        StartPoint::Image(id) => tracing::info!("job {} continues from image {id}", folder.name()),
    }
    let (name, flag) = (folder.name(), store_flag(global));
    tracing::info!(
        "its store is {}; see `rekindle status {name}{flag}` and `rekindle logs -f {name}{flag}`",
        folder.store().display()
    );
    let staging = provide::staging_area(&config, &folder, &lock);
    let interposer = provide::interposer(&config, &mut spec, &work, staging.as_ref());
    provide::nccl_limits(&config, &mut spec, interposer.is_some());
    provide::hwloc_limits(&mut spec);
    let Start { from, base, lineage, named } = start;
    let seen = trust::seen(&folder);
    let visible = spec.environment.get(OsStr::new("CUDA_VISIBLE_DEVICES")).map(|value| value.to_string_lossy());
    if let Some(visible) = visible.filter(|visible| names_instance(visible)) {
        tracing::warn!(
            "CUDA_VISIBLE_DEVICES={visible} names a MIG instance, which the CUDA driver cannot checkpoint: a job that \
            uses it will have no snapshots"
        );
    }
    let map = terms.map;
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
    let beats = provide::beats(&config, &mut spec, &folder)?;
    let job_api = provide::job_api(&config, &mut spec, &folder);
    let scheduler = find_scheduler(&config);
    let requeue = config.scheduler.requeue;
    if let (Requeue::Scontrol, Err(error)) = (requeue, scheduler.slurm_job()) {
        tracing::warn!("a job that is stopped to be queued again will not be queued again: {error}");
    }
    let member =
        terms.place.map(|it| it.place.member(&config, &folder, &work, &criu, it.keep, (it.is_fresh, it.uses_replica)));
    let member = member.transpose();
    let member = match member {
        Err(error) if error.is::<NoFirst>() => {
            // As for every other machine that is missing.
            tracing::error!("the group's run ends, to be queued again: {}", chain(&*error));
            if requeue == Requeue::Scontrol
                && let Err(error) = scheduler.requeue_in_turn(
                    config.group.node_rank.or_else(|| scheduler.node_rank()).unwrap_or(1).saturating_sub(1),
                    // No coordinator is known.
                    || false,
                )
            {
                tracing::error!("the job is not queued again by this machine: {}", chain(&error));
            }
            return Ok(exit(Finish::Stopped(Stop::Requeue), &scheduler, Requeue::ExitCode, folder.name()));
        }
        member => member?,
    };
    let output = output::Files::create(&folder.log_dir(), config.log.bounds())?;
    Journal::in_folder(&folder.log_dir())
        .check()
        .map_err(std::io::Error::from)
        .context("cannot write the job's events")?;
    let oom_kills = OomKills::until_now();
    let setup = Setup {
        copier: Copier::default(),
        config,
        folder,
        lock,
        criu,
        program: Program { spec, launch, work, reaper, interposer, uplink },
        sockets: Sockets { beats, job_api },
        images: Places { staging, packing },
        origin: Origin { from, named, base, wishes },
        time: TimeLimit { scheduler: scheduler.clone(), deadline: terms.deadline, oom_kills: oom_kills.clone() },
        output,
        shown: terms.shown,
        group: member,
    };
    let job = setup.folder.name().clone();
    // The machines of a group agree about who asks Slurm.
    let is_group = setup.group.is_some();
    let requeue = if is_group && scheduler.is_asked_to_requeue() { Requeue::ExitCode } else { requeue };
    let finish = supervisor::run(setup, terms.early)?;
    let requeue = match requeue {
        Requeue::ExitCode if finish.is_queued_again() && !is_group && ignores_us(&scheduler, &oom_kills) => {
            Requeue::Scontrol
        }
        requeue => requeue,
    };
    if let (Finish::Completed, Some(seen)) = (&finish, seen) {
        trust::forget(&seen, &lineage);
    }
    if let Finish::Failed { why, .. } = &finish {
        tracing::error!("given up: {why}. `rekindle logs --stderr {job}{flag}` shows the job's error messages");
    }
    Ok(exit(finish, &scheduler, requeue, &job))
}

/// Removes the work folder of a run, whoever still has it.
struct RemovedAtEnd(Arc<WorkFolder>);

impl Drop for RemovedAtEnd {
    fn drop(&mut self) {
        self.0.remove();
    }
}

/// Whether Slurm does not queue the job again by our exit code.
fn ignores_us(scheduler: &Scheduler, oom_kills: &OomKills) -> bool {
    let ignores = scheduler.is_asked_to_requeue() && oom_kills.went_up();
    if ignores {
        tracing::warn!(
            "the OOM killer killed a process in this job's control group, so Slurm will report OUT_OF_MEMORY instead of \
            our exit code: asking it to queue the job again"
        );
    }
    ignores
}

/// The flag that commands for this job need, with a blank before it: none where they find the supervisor by itself.
fn store_flag(global: &Global) -> String {
    let Some(store) = &global.store else { return String::new() };
    let plain = settings::effective(None, settings::environment(), &Overrides::default());
    match plain.is_ok_and(|plain| *plain.origin("store.directory") != settings::Origin::Default) {
        true => format!(" --store {}", std::path::absolute(store).unwrap_or_else(|_| store.clone()).display()),
        false => String::new(),
    }
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The scheduler that started us.
fn find_scheduler(config: &Config) -> Scheduler {
    Scheduler::find(config.scheduler.profile, variable)
}

/// The job that has this name runs.
#[derive(Debug, thiserror::Error)]
#[error("{0}; another job needs another --name")]
struct Taken(#[source] rekindle_store::Error);

/// The deadline of the configuration has passed, or leaves no time for the job.
#[derive(Debug, thiserror::Error)]
#[error("the configuration is wrong: scheduler.deadline = {0}")]
pub(crate) struct DeadlineTooEarly(String);

/// The deadline, checked before anything is started; `typed` is the flag's value. A final snapshot takes at most
/// `snapshot.grace`, so with less time the job would be stopped as soon as it runs.
fn deadline(config: &Config, typed: Option<&str>, now: DateTime<Utc>) -> anyhow::Result<Option<DateTime<Utc>>> {
    let Some(deadline) = config.scheduler.deadline else { return Ok(None) };
    let end = match deadline {
        Deadline::After(time) => now + time,
        Deadline::At(time) => time,
    };
    let grace = config.snapshot.grace;
    let why = match (end - now).to_std() {
        Ok(left) if left > grace => return Ok(Some(end)),
        Ok(left) if !left.is_zero() => {
            let grace = humantime::format_duration(grace);
            format!("leaves no time for the job, because a final snapshot may take {grace} (snapshot.grace)")
        }
        _ => "has passed; give a later time, or how long the job may run, such as 8h".to_owned(),
    };
    match typed {
        Some(text) => Err(Misuse(format!("--deadline {text:?}: the deadline {deadline} {why}")).into()),
        None => Err(DeadlineTooEarly(format!("{:?}: it {why}", deadline.to_string())).into()),
    }
}

fn exit(finish: Finish, scheduler: &Scheduler, requeue: Requeue, job: &JobName) -> Exit {
    let signalled = |n: i32| u8::try_from(n).ok().and_then(|n| n.checked_add(128)).map_or(Exit::Internal, Exit::Job);
    match finish {
        Finish::Completed => Exit::Success,
        // If the job is queued again, the previous image is better than nothing.
        Finish::Stopped(Stop::Requeue) | Finish::StoppedInMemory { stop: Stop::Requeue, .. } => {
            if requeue == Requeue::Scontrol
                && let Err(error) = scheduler.requeue()
            {
                tracing::error!("the job is not queued again: {}", chain(&error));
            }
            Exit::Requeue
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
        Finish::Failed { last, .. } => {
            let exit = match last {
                Some(Ended::Exit(code)) => u8::try_from(code).map_or(Exit::Internal, Exit::Job),
                Some(Ended::Signal(n)) => signalled(n),
                None => Exit::Internal,
            };
            let code = exit.code();
            if last.is_none() || !means_again(code) {
                return exit;
            }
            tracing::error!(
                "the job exited with {code}, which schedulers and systemd take for \"stopped, start it again\": rekindle \
                exits with 1 instead"
            );
            Exit::Job(1)
        }
    }
}

/// Whether queues and service managers start a run with this exit code again: one that was stopped by a request, or one
/// in which rekindle failed or lacked something (RestartForceExitStatus= of our units). `timeout`, `env` and `docker run`
/// end with 125, too.
fn means_again(code: u8) -> bool {
    const SIGTERM: u8 = 128 + 15;
    [SIGTERM, Exit::Requeue.code(), Exit::Missing.code(), Exit::Internal.code()].contains(&code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_later_than_the_grace() {
        let now = Utc::now();
        let look = |text: &str, typed: Option<&str>| {
            let mut config: Config = toml::from_str("version = 1\nsnapshot.grace = \"30s\"").unwrap();
            config.scheduler.deadline = Some(text.parse().unwrap());
            deadline(&config, typed, now).map_err(|error| error.to_string())
        };
        assert_eq!(look("31s", None), Ok(Some(now + std::time::Duration::from_secs(31))));
        let short = look("30s", Some("30s")).unwrap_err();
        assert!(short.starts_with("--deadline \"30s\": ") && short.contains("may take 30s"), "{short}");
        let past = look("2020-01-01T00:00:00Z", None).unwrap_err();
        assert!(past.contains("scheduler.deadline = \"2020-01-01T00:00:00Z\": it has passed"), "{past}");
    }

    #[test]
    fn a_job_that_was_given_up_does_not_end_with_a_code_that_starts_it_again() {
        let scheduler = Scheduler::find(Profile::None, |_| None);
        let code = |finish| exit(finish, &scheduler, Requeue::ExitCode, &"j".parse().unwrap()).code();
        let failed = |last| code(Finish::Failed { why: "it failed".into(), last: Some(last) });
        assert_eq!([75, 143, 3].map(|code| failed(Ended::Exit(code))), [1, 1, 3]);
        assert_eq!([69, 125].map(|code| failed(Ended::Exit(code))), [1, 1], "the units start these again");
        assert_eq!(code(Finish::Failed { why: "the machine failed".into(), last: None }), 125, "it is ours");
        assert_eq!([15, 9, 1].map(|signal| failed(Ended::Signal(signal))), [1, 137, 129]);
        assert_eq!(code(Finish::Stopped(Stop::Signal(15))), 143);
        assert_eq!(code(Finish::Stopped(Stop::Requeue)), 75);
    }
}

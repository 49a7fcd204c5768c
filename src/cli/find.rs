//! Finds jobs: in the store that the user names, or in the default store and through the sockets of supervisors.
//!
//! A store that is named (`--store`, REKINDLE_STORE_DIRECTORY, `store.directory` in the file) is the only one that is
//! looked at. Without one, each supervisor of this machine is asked which job it has and where: so a command finds a
//! running job wherever its store is. An answer counts only if its socket is where no other user can put one
//! ([`address::sockets`]), and if the folder that it names has the name of that socket.
//!
//! A command for the supervisor takes the job that runs ([`Finder::job`]). A command for images must not guess
//! ([`Finder::only_job`]): the store may have another job of that name, which does not run.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::output::complain;
use super::{AnothersJob, Global, Misuse};
use crate::config::{self as settings, Config, Origin};
use crate::control::address;
use crate::control::client::{self, Error};
use crate::control::protocol::{Answer, Request};
use rekindle_base::chain;
use rekindle_base::units::counted;
use rekindle_store::staging::leftovers::{self, Leftover};
use rekindle_store::{self as store, Access, Image, JobFolder, JobName, LATEST, Store, Trust, Writer};

/// A supervisor answers within a millisecond, or it is stuck. All are asked at once.
pub(super) const PATIENCE: Duration = Duration::from_millis(250);

/// Where jobs are looked for.
#[derive(Debug, Clone)]
pub(super) struct Finder {
    /// The store that is named, or the default one.
    store: PathBuf,
    named: Origin,
    /// The folder of the sockets.
    control: PathBuf,
    /// The folder of images in memory.
    memory: PathBuf,
    trust: Trust,
    /// How long to wait for the answers of supervisors.
    patience: Duration,
}

/// All jobs that were found, and what prevented finding more.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    /// Sorted by name.
    pub(super) folders: Vec<JobFolder>,
    /// Jobs of the store whose folder cannot be used.
    pub(super) refused: Vec<(JobName, store::Error)>,
    pub(super) troubles: Vec<String>,
}

/// A job that cannot be shown.
#[derive(Debug)]
pub(super) struct Refused {
    pub(super) job: JobName,
    pub(super) store: PathBuf,
    pub(super) error: anyhow::Error,
}

impl Refused {
    /// The end of a command that has shown all other jobs: its error is that of the first one.
    pub(super) fn end(all: Vec<Refused>) -> anyhow::Result<()> {
        let mut errors = all.into_iter().map(|refused| refused.error);
        let first = errors.next();
        errors.for_each(|error| complain(&chain(error.as_ref())));
        first.map_or(Ok(()), Err)
    }
}

impl Jobs {
    /// The jobs, for a command that shows all that it can. What else there is to say goes to standard error.
    pub(super) fn all(self, finder: &Finder) -> (Vec<JobFolder>, Vec<Refused>) {
        self.troubles.iter().for_each(|trouble| complain(trouble));
        let refused =
            |(job, error): (_, store::Error)| Refused { job, store: finder.store.clone(), error: error.into() };
        (self.folders, self.refused.into_iter().map(refused).collect())
    }
}

/// The jobs of the supervisors that run on this machine.
#[derive(Debug, Default)]
struct Running {
    jobs: Vec<Found>,
    /// Sockets whose supervisor does not answer.
    silent: Vec<PathBuf>,
    troubles: Vec<String>,
    /// Supervisors of other users.
    hidden: u64,
}

/// The job of a supervisor.
#[derive(Debug)]
struct Found {
    job: JobName,
    store: PathBuf,
    folder: Result<JobFolder, store::Error>,
}

impl Finder {
    /// For commands that need no key: they must work if the key cannot be used.
    pub(super) fn new(global: &Global) -> Result<Finder, settings::Error> {
        let effective = global.effective()?;
        let origin = effective.origin("store.directory").clone();
        let Config { store, control, snapshot, .. } = effective.config;
        Ok(Finder {
            store: store.directory,
            named: origin,
            control: control.directory,
            memory: snapshot.staging_directory,
            trust: Trust::default(),
            patience: PATIENCE,
        })
    }

    /// For commands that read images.
    pub(super) fn with_key(global: &Global) -> anyhow::Result<Finder> {
        let trust = global.settings(global.overrides())?.store.trust()?;
        Ok(Finder::trusting(global, trust)?)
    }

    /// For a command with rules for trusting images of its own.
    pub(super) fn trusting(global: &Global, trust: Trust) -> Result<Finder, settings::Error> {
        Ok(Finder { trust, ..Finder::new(global)? })
    }

    /// The same with less patience for supervisors that do not answer.
    pub(super) fn with_patience(self, patience: Duration) -> Finder {
        Finder { patience, ..self }
    }

    /// The store that is looked at first.
    pub(super) fn store(&self) -> &Path {
        &self.store
    }

    /// Whether a table of these jobs needs a column for their stores: one is in another than the store looked at first.
    pub(super) fn names_stores<'a>(&self, stores: impl IntoIterator<Item = &'a Path>) -> bool {
        let here = std::fs::canonicalize(&self.store);
        stores.into_iter().any(|store| here.as_ref().map_or(true, |here| here != store))
    }

    /// Memory that dead supervisors of other stores' jobs left, wherever those are.
    pub(super) fn left_elsewhere(&self) -> Vec<Leftover> {
        leftovers::elsewhere(&self.memory, &self.store, &self.trust)
    }

    /// The jobs of the store, and those that run with another one. A missing store has no jobs, unless the user has
    /// just typed its name.
    pub(super) fn jobs(&self) -> anyhow::Result<Jobs> {
        let (mut folders, mut refused) = (Vec::new(), Vec::new());
        match self.open(&self.store) {
            Ok(store) => {
                for name in store.jobs()? {
                    match store.job(&name) {
                        Ok(folder) => folders.push(folder),
                        // It was removed since.
                        Err(store::Error::UnknownJob { .. }) => {}
                        Err(error) => refused.push((name, error)),
                    }
                }
            }
            Err(store::Error::NoStore(_)) if !matches!(self.named, Origin::Flag { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let running = match self.named {
            Origin::Default => self.running(),
            _ => Running::default(),
        };
        let mut troubles = running.troubles;
        // A job of the store is shown from its folder.
        let is_shown = |socket: &Path| folders.iter().any(|folder| is_socket_of(socket, folder));
        troubles.extend(running.silent.iter().filter(|socket| !is_shown(socket)).map(|socket| {
            let at = socket.display();
            format!("the supervisor at {at} does not answer: name its store with --store to see its job")
        }));
        for found in running.jobs {
            match found.folder {
                Ok(folder) if folders.iter().all(|known| known.path() != folder.path()) => folders.push(folder),
                Ok(_) => {}
                Err(error) => troubles.push(unreachable(&found.job, &found.store, &error)),
            }
        }
        folders.sort_by(|a, b| (a.name(), a.path()).cmp(&(b.name(), b.path())));
        Ok(Jobs { folders, refused, troubles })
    }

    /// The image that `text` names: the newest good one of a job, a certain one of a job, or one by its id alone.
    pub(super) fn image(&self, text: &str) -> anyhow::Result<(JobFolder, Image)> {
        let (job, selector) = text.split_once('/').unwrap_or((text, LATEST));
        let unknown = match self.only_job(job) {
            Ok(folder) => {
                let image = folder.find(selector)?;
                return Ok((folder, image));
            }
            Err(error) if job != text => return Err(error),
            Err(error) => error,
        };
        let mut found = Vec::new();
        for folder in self.jobs().map(|jobs| jobs.folders).unwrap_or_default() {
            // Only complete ids and their beginnings: a bare number counts within one job only.
            let known = folder.known()?;
            let matching = known.iter().filter(|known| known.id().to_string().starts_with(text));
            found.extend(matching.map(|known| (folder.clone(), known.best().clone())));
        }
        match (found.pop(), found.is_empty()) {
            (Some(one), true) => Ok(one),
            (Some(_), false) => Err(Misuse(format!("{text:?} matches several images: use JOB/ID")).into()),
            (None, _) if text.bytes().all(|byte| byte.is_ascii_digit()) => {
                Err(Misuse(format!("{}. Write JOB/{text} for image {text} of a job", chain(unknown.as_ref()))).into())
            }
            // The error about the job lists the existing jobs.
            (None, _) => Err(unknown),
        }
    }

    /// The folder of this job, for a command that also works without a running job. Refuses to choose if the store has
    /// a job of that name and another one runs with another store.
    pub(super) fn only_job(&self, text: &str) -> anyhow::Result<JobFolder> {
        let folder = self.job(text)?;
        let here = self.open(&self.store).and_then(|store| store.job(folder.name()));
        match here {
            Ok(here) if here.path() != folder.path() => Err(Misuse(format!(
                "job {} is in {}, and another one of that name is running with the store {}: choose one with --store",
                folder.name(),
                here.store().display(),
                folder.store().display()
            ))
            .into()),
            _ => Ok(folder),
        }
    }

    /// The folder of this job; the one that is running, if there are several.
    pub(super) fn job(&self, text: &str) -> anyhow::Result<JobFolder> {
        let name = job_name(text)?;
        let here = self.open(&self.store).and_then(|store| store.job(&name));
        if self.named != Origin::Default {
            return here.map_err(|error| self.not_in_named(&name, error));
        }
        let mut running = self.running();
        running.jobs.retain(|found| found.job == name);
        if let Ok(folder) = &here
            && running.jobs.iter().all(|found| found.folder.as_ref().is_ok_and(|it| it.path() != folder.path()))
            && folder.writer()? != Writer::Nobody
        {
            // It runs without a socket.
            let store = folder.store().to_owned();
            running.jobs.push(Found { job: name.clone(), store, folder: Ok(folder.clone()) });
        }
        let found = match (running.jobs.pop(), running.jobs.is_empty()) {
            (None, _) => None,
            (Some(one), true) => Some(one),
            (Some(last), false) => {
                let mut stores: Vec<_> = running.jobs.iter().chain([&last]).map(|it| it.store.display()).collect();
                stores.sort_by_key(ToString::to_string);
                let stores = stores.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
                let why = format!("several jobs {name} are running, with the stores {stores}: choose one with --store");
                return Err(Misuse(why).into());
            }
        };
        match (found, here) {
            (Some(Found { folder: Ok(folder), .. }), _) | (None, Ok(folder)) => Ok(folder),
            (Some(Found { job, store, folder: Err(error) }), _) => {
                Err(Misuse(unreachable(&job, &store, &error)).into())
            }
            (None, Err(error)) => {
                let left = self.left_elsewhere().into_iter().find(|left| left.job == name);
                Err(not_here(&name, &running, left.map(|left| left.store), error))
            }
        }
    }

    /// A job that is not in the store that the user named may be running with another one.
    fn not_in_named(&self, name: &JobName, error: store::Error) -> anyhow::Error {
        let is_missing = matches!(error, store::Error::UnknownJob { .. } | store::Error::NoStore(_));
        let running = if is_missing { self.running() } else { Running::default() };
        match running.jobs.iter().find(|found| found.job == *name) {
            None => error.into(),
            Some(found) => Misuse(format!(
                "job {name} is not in {} ({}). It is running with another store: use --store {}",
                self.store.display(),
                self.named,
                found.store.display()
            ))
            .into(),
        }
    }

    fn open(&self, path: &Path) -> Result<Store, store::Error> {
        Ok(Store::open(path, Access::Read)?.with_trust(self.trust.clone()))
    }

    /// Asks all supervisors of this machine. Those of other users do not answer, and are only counted.
    fn running(&self) -> Running {
        let mut running = Running::default();
        let sockets = match address::sockets(&self.control) {
            Ok(sockets) => sockets,
            Err(error) => {
                let folder = self.control.display();
                running.troubles.push(format!("cannot look for running jobs in {folder}: {error}"));
                return running;
            }
        };
        let asked: Vec<_> = sockets.iter().cloned().map(Some).collect();
        for (socket, answer) in sockets.iter().zip(client::ask_all(&asked, &Request::Status, self.patience)) {
            match answer {
                Some(Ok(Answer::Status(published))) => {
                    let Some((job, store)) = published.job.zip(published.store) else { continue };
                    let folder = self.open(&store).and_then(|store| store.job(&job));
                    if folder.as_ref().is_ok_and(|folder| !is_socket_of(socket, folder)) {
                        let at = socket.display();
                        running.troubles.push(format!("the answer of the supervisor at {at} does not fit its socket"));
                        continue;
                    }
                    running.jobs.push(Found { job, store, folder });
                }
                Some(Err(Error::Silent(_))) => running.silent.push(socket.clone()),
                Some(Err(Error::Io { source, .. })) if source.kind() == io::ErrorKind::PermissionDenied => {
                    running.hidden += 1;
                }
                // The socket of a dead supervisor.
                _ => {}
            }
        }
        running
    }
}

/// The name of a job, where an image of a job may be typed by mistake.
pub(super) fn job_name(text: &str) -> anyhow::Result<JobName> {
    match text.split_once('/') {
        Some((job, _)) if job.parse::<JobName>().is_ok() => {
            Err(Misuse(format!("{text:?} is an image, and this command takes a job: write {job}")).into())
        }
        _ => Ok(text.parse()?),
    }
}

/// Whether the socket has the name that a supervisor of this job gives it.
fn is_socket_of(socket: &Path, folder: &JobFolder) -> bool {
    socket.file_stem().is_some_and(|stem| stem == folder.place_name().as_str())
}

/// The answer of commands that list jobs, if there are none.
pub(super) fn no_jobs(finder: &Finder) -> String {
    let store = finder.store.display();
    if finder.named != Origin::Default {
        return format!("no jobs in {store}");
    }
    match finder.running().hidden {
        0 => format!("no jobs: none is running, and none is in {store}"),
        hidden => format!("no jobs of this user. {} of another user: use sudo to see more", are_running(hidden)),
    }
}

fn are_running(jobs: u64) -> String {
    format!("{} {} running, with a supervisor", counted(jobs, "job"), if jobs == 1 { "is" } else { "are" })
}

/// Why a job that runs cannot be shown.
fn unreachable(job: &JobName, store: &Path, error: &store::Error) -> String {
    format!("job {job} is running with the store {}, which cannot be used from here: {}", store.display(), chain(error))
}

/// A job that neither runs nor is in the default store.
fn not_here(name: &JobName, running: &Running, left: Option<PathBuf>, error: store::Error) -> anyhow::Error {
    // The rest of a socket's name is a hash of eight digits.
    let is_its = |socket: &&PathBuf| {
        let stem = socket.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        stem.rsplit_once('-').is_some_and(|(job, _)| job == name.as_str())
    };
    if let Some(socket) = running.silent.iter().find(is_its) {
        let at = socket.display();
        let why = format!("the supervisor of job {name} at {at} does not answer: name the job's store with --store");
        return Misuse(why).into();
    }
    if running.hidden > 0 && matches!(error, store::Error::NoStore(_) | store::Error::UnknownJob { .. }) {
        let others = are_running(running.hidden);
        return AnothersJob(format!("this user has no job {name}. {others} of another user: use sudo to see more"))
            .into();
    }
    if let Some(store) = left {
        let store = store.display();
        let why = format!("job {name} is not running. It ran with the store {store}: use --store {store}");
        return Misuse(why).into();
    }
    let why = match error {
        store::Error::NoStore(path) => format!(
            "job {name} is not running, and there is no store at {}. If its images are elsewhere, use --store DIR",
            path.display()
        ),
        error @ store::Error::UnknownJob { .. } => {
            format!("{error}. No such job is running. If its images are elsewhere, use --store DIR")
        }
        other => return other.into(),
    };
    match running.troubles.first() {
        Some(trouble) => Misuse(format!("{why} ({trouble})")).into(),
        None => Misuse(why).into(),
    }
}

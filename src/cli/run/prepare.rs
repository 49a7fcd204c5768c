//! What a run needs before it touches the job's folder: rights, CRIU, the store, and the job's program, folder, input
//! and limits.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::turn::Report;
use crate::cli::{Misuse, environment, named_criu, start_log};
use crate::config::{Allowed, Config, Job, Limit, NetworkMode, Stdin};
use rekindle_criu::Criu;
use rekindle_engine::launch::identity::Identity;
use rekindle_engine::launch::{self, Amx, IoUring, JobSpec, Privileges, identity, uplink};
use rekindle_os::identity::with_file_rights;
use rekindle_os::inherited;
use rekindle_os::regular::{self, Links};
use rekindle_store::persist::Packing;
use rekindle_store::staging::leftovers;
use rekindle_store::{Access, JobFolder, JobName, Store, WriterLock};

/// The supervisor lacks rights.
#[derive(Debug, thiserror::Error)]
#[error(
    "this needs root, for namespaces, CRIU and the CUDA checkpoint. Run it with sudo (`sudo \"$(command -v rekindle)\"` \
    if sudo does not find it), and set job.user to run the job as a user"
)]
pub(crate) struct NoRights;

/// What is known before the job's folder is touched.
pub(super) struct Prepared {
    pub(super) config: Config,
    pub(super) criu: Criu,
    pub(super) spec: JobSpec,
    /// The program that connects a private network to the outside.
    pub(super) uplink: Option<PathBuf>,
    pub(super) packing: Packing,
    pub(super) store: Store,
}

/// What to do about a supervisor on another machine that may be dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Other {
    /// Its job is not taken.
    IsRefused,
    /// A sign of life is waited for.
    IsAwaited,
}

impl Prepared {
    pub(super) fn prepare(config: Config, directory: PathBuf, command: &[OsString]) -> anyhow::Result<Prepared> {
        start_log(&config);
        let user = config.job.user.as_deref().map(identity::lookup).transpose()?;
        let environment = environment::of(&config, user.as_ref(), std::env::vars_os());
        environment.tell(&config);
        let environment = environment.variables;
        let path = environment.get(OsStr::new("PATH")).map(OsString::as_os_str);
        let program = command.first().map_or_else(
            || Err(Misuse("there is no command to run".into()).into()),
            |name| {
                let find = || launch::find_program(name, &directory, path);
                Ok::<_, anyhow::Error>(look(user.as_ref(), || Ok(find()))??)
            },
        )?;
        if !nix::unistd::geteuid().is_root() {
            return Err(NoRights.into());
        }
        let umask = inherited::own_files_only();
        let uplink = match config.network.mode {
            NetworkMode::Host | NetworkMode::Private => None,
            NetworkMode::Uplink => Some(uplink::find()?),
        };
        let criu = Criu::find(named_criu(&config).as_deref())?;
        let spec = JobSpec {
            command: command.to_vec(),
            program,
            directory,
            environment,
            stdin: standard_input(&config.job.stdin, user.as_ref())?,
            identity: user,
            umask: Some(umask),
            limits: config.job.limits.iter().map(|(name, limit)| resource(name, limit)).collect::<Result<_, _>>()?,
            privileges: if config.job.keeps_its_rights() { Privileges::Fixed } else { Privileges::MayGrow },
            io_uring: match config.job.allow.contains(&Allowed::IoUring) {
                true => IoUring::AsItIs,
                false => IoUring::refused_where_possible(),
            },
            amx: match config.job.allow.contains(&Allowed::Amx) {
                true => Amx::AsItIs,
                false => Amx::refused_where_possible(),
            },
        };
        let trust = config.store.trust()?;
        let packing = config.store.packing(&trust);
        let store = Store::open(&config.store.directory, Access::Write)?.with_trust(trust);
        Ok(Prepared { config, criu, spec, uplink, packing, store })
    }

    /// Becomes the only writer of the job's folder, and removes remnants of crashes from it.
    pub(super) fn open(&self, name: &JobName, other: Other) -> anyhow::Result<(JobFolder, WriterLock)> {
        let folder = self.store.create_job(name)?;
        let lock = match other {
            Other::IsRefused => folder.lock()?,
            Other::IsAwaited => {
                let mut report = Report::new(name);
                folder.lock_or_wait(&mut |waiting| report.tell(waiting))?
            }
        };
        if self.store.finish_removal(name)? {
            tracing::info!("the removal of an earlier job of that name was interrupted; removing the rest of it now");
        }
        if let Some((holder, silent)) = lock.silent_holder() {
            let silent = humantime::format_duration(Duration::from_secs(silent.as_secs()));
            tracing::warn!(
                "the job was supervised by {holder}, which has sent no heartbeat for {silent}: taking the job over"
            );
        }
        let (gone, left) = leftovers::release(&self.store, name);
        gone.iter().for_each(|gone| tracing::info!("job {}: {gone}: freed", gone.job));
        left.iter().for_each(|left| tracing::info!("job {}: {left}: {}", left.job, left.advice()));
        for path in folder.sweep_leftovers(&lock)? {
            crate::routine!("removed {}, a remnant of an interrupted run", path.display());
        }
        Ok((folder, lock))
    }
}

/// Looks at something with the rights of the job's user: links of the user do not lead further than the user gets, and
/// root has no rights in a home on a file system with `root_squash`.
fn look<T: Send>(user: Option<&Identity>, at: impl Fn() -> io::Result<T> + Sync) -> io::Result<T> {
    match user.and_then(Identity::file_rights) {
        // Who is not root cannot take them, and is refused later.
        Some(user) if nix::unistd::geteuid().is_root() => with_file_rights(user.uid, user.gid, user.groups, &at)?,
        _ => at(),
    }
}

pub(super) fn working_directory(job: &Job) -> anyhow::Result<PathBuf> {
    let user = job.user.as_deref().map(identity::lookup).transpose()?;
    let directory = match job.directory.as_deref() {
        Some(directory) => {
            let refused = |e: &dyn std::fmt::Display| Misuse(format!("job.directory = {directory:?}: {e}"));
            let path = || match std::fs::metadata(directory)?.is_dir() {
                // An image knows a folder by one name only.
                true if directory.components().any(|it| it == Component::ParentDir) => {
                    std::fs::canonicalize(directory).map(Some)
                }
                true => Ok(Some(directory.to_path_buf())),
                false => Ok(None),
            };
            match look(user.as_ref(), path) {
                // Which folder on the way is closed does not matter: the message says it.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => directory.to_path_buf(),
                found => found.map_err(|e| refused(&e))?.ok_or_else(|| refused(&"not a folder"))?,
            }
        }
        None => std::env::current_dir().map_err(|e| {
            Misuse(format!("cannot find the working directory: {e}. Change to an existing one, or set job.directory"))
        })?,
    };
    if let Some(user) = user {
        // Looking for something in it takes the right to enter it.
        let enters = look(Some(&user), || regular::find(&directory.join("."), Links::Follow).map(drop));
        enters.map_err(|why| {
            let user = user.name;
            Misuse(launch::Error::Directory { user, directory: directory.clone(), why }.to_string())
        })?;
    }
    Ok(directory)
}

/// The file for the job's standard input, which its user must be able to read. A terminal or a pipe cannot be restored.
fn standard_input(wanted: &Stdin, user: Option<&Identity>) -> anyhow::Result<PathBuf> {
    let (path, named) = match wanted {
        Stdin::Null => return Ok("/dev/null".into()),
        Stdin::File(path) => (path.clone(), format!("job.stdin = {path:?}")),
        Stdin::Inherit => {
            let path = std::fs::read_link("/proc/self/fd/0")?;
            let named = format!("job.stdin = \"inherit\": standard input is {}", path.display());
            (path, named)
        }
    };
    if path == Path::new("/dev/null") {
        return Ok(path);
    }
    let advice = match wanted {
        Stdin::Inherit => ". Redirect it from a file, or use \"null\"",
        Stdin::Null | Stdin::File(_) => "",
    };
    let metadata = look(user, || std::fs::metadata(&path)).map_err(|e| Misuse(format!("{named}: {e}{advice}")))?;
    // Opening a FIFO waits for a writer, perhaps for ever.
    if !metadata.is_file() {
        return Err(Misuse(format!("{named}: not a regular file, so it cannot be restored{advice}")).into());
    }
    if user.is_some() {
        look(user, || regular::find(&path, Links::Follow)?.read())
            .map_err(|e| Misuse(format!("{named}: the job's user must be able to read it: {e}")))?;
    }
    Ok(path)
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

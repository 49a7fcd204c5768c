//! The start of the job, and its environment.
//!
//! Owns the namespaces, the reaper, the job's user, and what the job is given. Invariants: every descriptor that the
//! job gets is opened inside its mount namespace; the job gets standard input, output and error and no other descriptor
//! of ours. After a power cut nothing here needs repair: a job is started from the beginning or restored from an image.

pub(crate) mod embedded;
pub mod gpus;
pub mod group;
pub mod host;
pub mod hwloc;
pub mod identity;
pub mod interposer;
pub(crate) mod mapped;
pub mod memory;
pub mod mounted;
pub mod nccl;
pub mod output;
pub mod plugin;
pub mod reaper;
pub mod tail;
pub mod uplink;
pub mod work;
pub mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use group::undelivered::{self, Undelivered};
use identity::Identity;
use rekindle_cuda::nccl::Ranks;
use rekindle_os::beneath::Beneath;
use rekindle_os::spawn::{self, Child, Open, Spawn};
use rekindle_os::stopped::StoppedProcesses;
use rekindle_os::{process, rights};
use world::World;

/// Launchers of one process that are stopped at most: a shell or two, torchrun, and what it runs in.
const MOST_LAUNCHERS: usize = 16;

/// What to run, and as what.
#[derive(Debug, Clone)]
pub struct JobSpec {
    /// The program and its arguments, as typed.
    pub command: Vec<OsString>,
    /// The program's file, found by [`find_program`].
    pub program: PathBuf,
    /// Working directory.
    pub directory: PathBuf,
    /// The whole environment.
    pub environment: BTreeMap<OsString, OsString>,
    /// The user it runs as; `None` for the supervisor's user.
    pub identity: Option<Identity>,
    /// The file mode mask; `None` keeps the supervisor's (077 under `rekindle run`).
    pub umask: Option<u32>,
    /// Resource limits, soft and hard alike: resource number of setrlimit(2) and value.
    pub limits: Vec<(u32, u64)>,
    /// The file for standard input.
    pub stdin: PathBuf,
    /// Whether programs the job executes can gain rights.
    pub privileges: Privileges,
    /// Whether it may set up an io_uring.
    pub io_uring: IoUring,
    /// Whether it may use AMX.
    pub amx: Amx,
}

impl JobSpec {
    /// The job's user, if it is not root.
    fn user(&self) -> Option<&Identity> {
        self.identity.as_ref().filter(|user| user.uid != 0)
    }
}

/// The no-new-privileges flag of prctl(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Privileges {
    /// Set-user-ID programs work.
    MayGrow,
    /// They do not.
    Fixed,
}

/// Whether io_uring_setup(2) works in the job. CRIU (4.2) cannot dump an io_uring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoUring {
    /// As on this machine.
    AsItIs,
    /// It fails with ENOSYS, by a seccomp filter that is part of the image.
    Refused,
}

impl IoUring {
    /// For a job that must not use io_uring. There is no filter if the kernel refuses anyway
    /// (`kernel.io_uring_disabled`), if filters are not supported, or if CRIU could not dump the filter: reading one
    /// (`PTRACE_SECCOMP_GET_FILTER`) needs CAP_SYS_ADMIN over the machine, not over a user namespace.
    #[must_use]
    pub fn refused_where_possible() -> IoUring {
        if rights::io_uring_works() && can_filter() { IoUring::Refused } else { IoUring::AsItIs }
    }
}

/// Whether programs of the job can use AMX, the matrix instructions of newer Intel CPUs. Linux gives them only to a process that
/// asks (arch_prctl, ARCH_REQ_XCOMP_PERM). CRIU (4.2) saves neither the permission nor the registers: a thread that it resumes
/// in the middle of such code, or that uses AMX after a restore, dies of SIGILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Amx {
    /// As on this machine.
    AsItIs,
    /// The request fails with EOPNOTSUPP, by a seccomp filter that is part of the image.
    Refused,
}

impl Amx {
    /// For a job that must not use AMX. There is also a filter on a CPU without AMX, because an image can be restored on
    /// a CPU that has it. There is none on a kernel that never grants it (before 5.16), or where [`IoUring`] could have none.
    #[must_use]
    pub fn refused_where_possible() -> Amx {
        if rights::amx_can_be_granted() && can_filter() { Amx::Refused } else { Amx::AsItIs }
    }
}

/// Whether the job can have a seccomp filter that CRIU can dump.
fn can_filter() -> bool {
    rights::filters_work() && rights::over_the_machine() && rights::has(rights::CAP_SYS_ADMIN)
}

/// Why the command cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// There is no such program.
    #[error("command not found: {0}")]
    NotFound(String),
    /// It exists, but is not an executable file.
    #[error("cannot execute {path}: {why}")]
    NotExecutable {
        /// The file.
        path: PathBuf,
        /// The reason.
        why: String,
    },
}

/// Finds a program as execvp(3) does: a name with a slash is a path below `directory`, others are looked up in `path`.
///
/// # Errors
/// When it is not there, or is not executable.
pub fn find_program(name: &OsStr, directory: &Path, path: Option<&OsStr>) -> Result<PathBuf, ProgramError> {
    let shown = || name.to_string_lossy().into_owned();
    if name.as_encoded_bytes().contains(&b'/') {
        // Without the dots of "./x".
        let file: PathBuf = directory.join(name).components().collect();
        return match executable(&file) {
            Ok(()) => Ok(file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                Err(ProgramError::NotFound(format!("{}; there is no such file", shown())))
            }
            Err(e) => Err(ProgramError::NotExecutable { path: file, why: e.to_string() }),
        };
    }
    if name.is_empty() {
        return Err(ProgramError::NotFound("its name is empty".to_owned()));
    }
    let mut refused = None;
    for dir in std::env::split_paths(path.unwrap_or_else(|| OsStr::new("/usr/local/bin:/usr/bin:/bin"))) {
        let file = directory.join(dir).join(name);
        match executable(&file) {
            Ok(()) => return Ok(file),
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                refused = refused.or_else(|| Some(ProgramError::NotExecutable { path: file, why: e.to_string() }));
            }
            _ => {}
        }
    }
    Err(refused.unwrap_or_else(|| {
        ProgramError::NotFound(match directory.join(name).is_file() {
            true => format!(
                "{}; it is in the working directory, so write ./{}, or its interpreter before it",
                shown(),
                shown()
            ),
            false => format!("{}; it is in no folder of PATH", shown()),
        })
    }))
}

fn executable(file: &Path) -> io::Result<()> {
    let metadata = std::fs::metadata(file)?;
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is a directory, not a program"));
    }
    if !metadata.is_file() {
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, "not a regular file"));
    }
    if metadata.permissions().mode() & 0o111 == 0 {
        return Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            &*format!(
                "it has no execute permission; run `chmod +x {}`, or write its interpreter before it",
                file.display()
            ),
        ));
    }
    Ok(())
}

/// A running job: its world, and the reaper that is the root of its tree.
#[derive(Debug)]
pub struct Job {
    /// Where it lives.
    pub world: World,
    /// The reaper; it ends as the job ends.
    pub root: Child,
    /// Pid of the command's process in the job's PID namespace, if the image names it.
    main: Option<i32>,
}

impl Job {
    /// A job that was started.
    #[must_use]
    pub fn new(world: World, root: Child) -> Job {
        Job { world, root, main: None }
    }

    /// A job that was restored; `main` is the pid of the command's process in the job's PID namespace.
    #[must_use]
    pub(crate) fn restored(world: World, root: Child, main: i32) -> Job {
        Job { world, root, main: Some(main) }
    }

    /// Pid of the command's process as we see it. After a start it is the reaper's oldest child, because daemons come
    /// later. CRIU restores children in any order; then it is the process that the image names.
    #[must_use]
    pub fn main_pid(&self) -> Option<i32> {
        let children = process::children(self.root.pid());
        if let Some(main) = self.main {
            return children.into_iter().find(|pid| process::inner_pid(*pid) == Some(main));
        }
        children.into_iter().min_by_key(|pid| process::start_time(*pid).unwrap_or(u64::MAX))
    }

    /// Waits until the reaper has forked the command's process or has ended, so that the pid is known from the
    /// beginning. This takes well under a millisecond.
    pub fn wait_for_main(&self) {
        let deadline = Instant::now() + Duration::from_secs(1);
        while self.main_pid().is_none() && Instant::now() < deadline && !self.root.has_ended().unwrap_or(true) {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Sends a signal to the command's process, through the reaper.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn signal(&self, signal: i32) -> io::Result<()> {
        self.root.signal(signal)
    }

    /// All of its processes, as we see them.
    fn pids(&self) -> BTreeSet<i32> {
        // Daemons that outlive the reaper become children of init.
        let roots = [&self.root, self.world.init()];
        // The pid of one that was reaped may be another process by now.
        let roots = roots.into_iter().filter(|root| root.has_ended().is_ok());
        roots.flat_map(|root| process::tree(root.pid())).collect()
    }

    /// Whether several of its processes work together by NCCL.
    #[must_use]
    pub fn has_ranks(&self) -> bool {
        !gpus::with_peers(self.pids()).is_empty()
    }

    /// Stops the processes of the job that have started this one (a pid as we see it) and are no ranks. `None` if the job
    /// has no ranks. What somebody else has stopped is left alone.
    #[must_use]
    pub fn stop_launchers(&self, pid: i32) -> Option<StoppedProcesses> {
        let mut pids = self.pids();
        let ranks: BTreeSet<i32> = gpus::with_peers(pids.iter().copied()).iter().map(Ranks::pid).collect();
        if ranks.is_empty() {
            return None;
        }
        // Above these are we, and above us whatever started us.
        for ours in [&self.root, self.world.init()] {
            pids.remove(&ours.pid());
        }
        let parents = std::iter::successors(process::parent(pid), |pid| process::parent(*pid));
        let launchers = parents.take_while(|pid| pids.contains(pid)).take(MOST_LAUNCHERS);
        let launchers: Vec<i32> = launchers.filter(|pid| !ranks.contains(pid)).collect();
        // The outermost first: a shell with job control would see its child stopped, and act on it.
        Some(StoppedProcesses::stop(launchers.into_iter().rev()))
    }

    /// Kills everything in its world. CUDA processes are prepared for it ([`gpus`]).
    pub fn kill(&self) {
        let pids = self.pids();
        // The driver needs running threads for this, and with them the program would see what was called off.
        if !gpus::let_go(pids.iter().copied()) {
            gpus::call_off(&gpus::with_peers(pids));
        }
        self.world.kill();
    }

    /// Kills what remains of a job that has ended. In a group, the network of a job that has completed stays until the
    /// other machines have received what it sent.
    pub fn kill_rest(&self) {
        let has_completed = process::ended(self.root.pid()) == Some(spawn::Ended::Exit(0));
        let waits = has_completed && self.world.subnet().is_some();
        let network = waits.then(|| Undelivered::of(self.world.init().pid()));
        self.kill();
        let arrived = network.map(|network| network.and_then(|network| network.wait(undelivered::LIMIT)));
        if let Some(Err(error)) = arrived {
            tracing::warn!("the other machines may not have received all that the job has sent: {error}");
        }
    }

    /// Kills and reaps all processes that remain. Returns how the reaper ended, which is how the job ended.
    pub fn end(&self) -> Option<spawn::Ended> {
        self.kill();
        self.world.end(Some(&self.root))
    }
}

/// Why a job did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The world's init is gone.
    #[error("cannot enter the job's namespaces")]
    World(#[source] io::Error),
    /// The groups of this process are unknown.
    #[error("cannot start the job as another user")]
    User(#[source] io::Error),
    /// The job's user may not enter its working directory.
    #[error(
        "user {user} cannot enter the working directory {}: {why}. Give that user the right to it and to the folders above \
        it (chmod o+x), or set job.directory to another folder",
        directory.display()
    )]
    Directory {
        /// The job's user.
        user: String,
        /// The folder.
        directory: PathBuf,
        /// The kernel's answer.
        why: io::Error,
    },
    /// Its output cannot be written.
    #[error(transparent)]
    Output(#[from] output::Error),
    /// The reaper did not start.
    #[error("cannot start the job")]
    Spawn(#[from] spawn::Error),
}

/// Starts the job in its world. The child returned is the reaper, which ends as the job ends.
///
/// # Errors
/// When the reaper cannot be started. If the program itself cannot be executed, the job ends with exit code 126 or 127.
pub fn start(world: &World, reaper: &Path, spec: &JobSpec, log: &output::Files) -> Result<Child, Error> {
    let (uid, gid, groups) = match &spec.identity {
        Some(identity) => (
            identity.uid.to_string(),
            identity.gid.to_string(),
            identity.groups.iter().map(u32::to_string).collect::<Vec<_>>().join(","),
        ),
        None => ("-".to_string(), String::new(), String::new()),
    };
    let fixed = if spec.privileges == Privileges::Fixed { "n" } else { "" };
    let without_uring = if spec.io_uring == IoUring::Refused { "u" } else { "" };
    let without_amx = if spec.amx == Amx::Refused { "a" } else { "" };
    let flags = format!("-{fixed}{without_uring}{without_amx}");
    let mut args: Vec<OsString> = ["reap".into(), uid, gid, groups, flags].into_iter().map(OsString::from).collect();
    args.extend([spec.stdin.clone().into(), spec.program.clone().into(), "--".into()]);
    args.extend(spec.command.iter().cloned());

    let [out, err] = log.identities()?;
    let file = |fd, path: &Path, flags, expect| -> Result<Open, spawn::Error> {
        Ok(Open { fd, path: spawn::c_string(path)?, flags, expect })
    };
    let append = |fd, path: &Beneath, is| file(fd, path.path(), libc::O_WRONLY | libc::O_APPEND, Some(is));
    let mut spawn = Spawn::new(reaper, args)?
        .environment(&spec.environment)?
        .world(world.entrance().map_err(Error::World)?)
        .session()
        // The reaper receives signals one by one, and gives the job an empty mask.
        .signals_blocked()
        .directory(&spec.directory)?
        // The job opens its own, as its user.
        .open(file(0, Path::new("/dev/null"), libc::O_RDONLY, None)?)
        .open(append(1, &log.stdout, out)?)
        .open(append(2, &log.stderr, err)?);
    if let Some(user) = spec.user() {
        spawn = spawn.directory_of(user.uid, user.gid, &user.groups).map_err(Error::User)?;
    }
    if let Some(mask) = spec.umask {
        spawn = spawn.umask(mask);
    }
    for (resource, value) in &spec.limits {
        spawn = spawn.limit(*resource, libc::rlimit { rlim_cur: *value, rlim_max: *value });
    }
    spawn.start().map_err(|error| match (error, spec.user()) {
        (spawn::Error::Child { step: spawn::DIRECTORY, source, .. }, Some(user)) => {
            Error::Directory { user: user.name.clone(), directory: spec.directory.clone(), why: source }
        }
        (error, _) => error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As a container runtime may start rekindle: a change of user drops no capabilities.
    #[allow(unsafe_code, reason = "no safe function; the block says why it is sound")]
    fn keep_capabilities_at_a_change_of_user() {
        const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 4;
        // SAFETY: a system call on numbers; it changes this thread only.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP) }, 0);
    }

    /// Runs a shell script as a job of nobody. Returns how it ended, and what it said.
    fn as_nobody(script: &str, stdin: &Path, amx: Amx) -> (Option<spawn::Ended>, String) {
        let dir = tempfile::tempdir().unwrap();
        let reaper = reaper::unpack(dir.path()).unwrap();
        let log = output::Files::create(dir.path(), output::Bounds::default()).unwrap();
        let spec = JobSpec {
            command: ["sh", "-c", script].map(OsString::from).into(),
            program: "/bin/sh".into(),
            directory: "/".into(),
            environment: [("PATH".into(), "/usr/bin:/bin".into())].into(),
            identity: Some(Identity {
                uid: 65534,
                gid: 65534,
                groups: Vec::new(),
                home: "/".into(),
                name: "nobody".into(),
            }),
            umask: None,
            limits: Vec::new(),
            stdin: stdin.into(),
            privileges: Privileges::MayGrow,
            io_uring: IoUring::AsItIs,
            amx,
        };
        let world = World::new(&reaper, world::FIRST_PID - 1, world::Network::Host).unwrap();
        let start = || {
            keep_capabilities_at_a_change_of_user();
            start(&world, &reaper, &spec, &log).unwrap()
        };
        let root = std::thread::scope(|scope| scope.spawn(start).join().unwrap());
        let ended = root.wait().unwrap();
        world.end(Some(&root));
        let said = [&log.stdout, &log.stderr].map(|file| std::fs::read_to_string(file).unwrap_or_default());
        (Some(ended), said.concat())
    }

    #[test]
    fn a_job_of_another_user_has_no_capabilities_whatever_the_securebits_are() {
        if !rekindle_testing::root() {
            return;
        }
        let script = "grep -E 'Cap(Inh|Prm|Eff|Amb)' /proc/self/status";
        let (ended, said) = as_nobody(script, Path::new("/dev/null"), Amx::AsItIs);
        assert_eq!(ended, Some(spawn::Ended::Exit(0)), "{said}");
        assert!(said.lines().count() == 4 && said.lines().all(|line| line.ends_with("\t0000000000000000")), "{said}");
        let (ended, said) = as_nobody("cat", Path::new("/etc/shadow"), Amx::AsItIs);
        assert!(ended == Some(spawn::Ended::Exit(126)) && said.contains("standard input"), "{ended:?} {said}");
    }

    #[test]
    fn a_job_that_must_not_use_amx_has_a_filter() {
        if !rekindle_testing::root() {
            return;
        }
        let script = "sed -n 's/^Seccomp_filters:.//p' /proc/self/status";
        let filters = |amx| as_nobody(script, Path::new("/dev/null"), amx).1.trim().parse::<u32>();
        assert_eq!(filters(Amx::Refused).unwrap(), filters(Amx::AsItIs).unwrap() + 1);
    }

    #[test]
    fn programs_are_found_as_a_shell_does() {
        let path = Some(OsStr::new("/nowhere:/bin:/usr/bin"));
        let find = |name: &str| find_program(OsStr::new(name), Path::new("/etc"), path);
        assert!(find("true").unwrap().ends_with("bin/true"));
        assert!(matches!(find("no-such-program"), Err(ProgramError::NotFound(_))));
        assert!(matches!(find(""), Err(ProgramError::NotFound(_))));
        assert!(matches!(find("./no-such-program"), Err(ProgramError::NotFound(_))));
        assert!(matches!(find("./passwd"), Err(ProgramError::NotExecutable { .. })));
        assert!(matches!(find("/etc"), Err(ProgramError::NotExecutable { .. })));
    }
}

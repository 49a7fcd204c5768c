//! Starts children that std's spawn cannot: in a new or an existing PID and mount namespace, with a chosen pid, with
//! files opened inside.
//!
//! Invariants:
//! - A child that asks for a parent-death signal is forked by one thread that lives as long as the process, because the
//!   kernel sends that signal when the forking *thread* ends (prctl(2), PR_SET_PDEATHSIG).
//! - Every child is in a register until it is reaped, so that children we did not start (CRIU leaves dead tasks of a
//!   failed restore to us, as siblings of its own process) can be told apart and reaped by [`reap_strays`].
//! - Between clone and exec only system calls are made: the process has other threads, whose locks stay locked in the
//!   child.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

mod child;
mod handle;

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};

/// The step of [`Error::Child`] that enters the working directory.
pub const DIRECTORY: &str = child::DIRECTORY;

pub use handle::Child;
use nix::sched::CloneFlags;
use nix::sys::wait::{WaitPidFlag, WaitStatus};
use nix::unistd::Pid;

use crate::identity::FileUser;
pub use rekindle_base::Ended;

/// A file for the child, opened by the child itself after it entered its mount namespace: CRIU refuses descriptors that
/// were opened in another one ("Can't lookup mount").
#[derive(Debug, Clone)]
pub struct Open {
    /// The descriptor number in the child.
    pub fd: RawFd,
    /// The file.
    pub path: CString,
    /// Flags of open(2).
    pub flags: i32,
    /// Device and inode of the regular file that must be there, where others can change the folder: otherwise the child
    /// does not start. No link on the way is followed then.
    pub expect: Option<(u64, u64)>,
}

/// What to start, and where.
#[derive(Debug)]
pub struct Spawn {
    program: Program,
    place: Place,
    descriptors: Descriptors,
    rights: Rights,
    umask: Option<libc::mode_t>,
    limits: Vec<(u32, libc::rlimit)>,
    session: bool,
    signals_blocked: bool,
    /// Our pid, where the child shall not outlive us.
    dies_with: Option<i32>,
}

/// What execve(2) gets.
#[derive(Debug)]
struct Program {
    path: CString,
    args: Vec<CString>,
    env: Vec<CString>,
}

/// Where the child finds itself when its program begins.
#[derive(Debug)]
struct Place {
    world: World,
    /// The pid in the innermost namespace: the first of these that is free.
    pids: Option<RangeInclusive<i32>>,
    /// A network namespace to be born into.
    network: Option<OwnedFd>,
    /// If the child gets a tunnel device that it may open: the mounts to leave out.
    own_tun: Option<Vec<CString>>,
    directory: Option<CString>,
    /// Whose rights are used to enter that folder.
    visitor: Option<FileUser>,
}

/// The child's descriptors, by their numbers there. It has no others.
#[derive(Debug, Default)]
struct Descriptors {
    opened: Vec<Open>,
    given: Vec<(OwnedFd, RawFd)>,
}

/// What the child may do.
#[derive(Debug, Default)]
struct Rights {
    /// User and group.
    identity: Option<(u32, u32)>,
    no_groups: bool,
    no_new_privileges: bool,
}

/// The namespaces of a child.
#[derive(Debug)]
pub enum World {
    /// The namespaces of this process.
    Host,
    /// New PID and mount namespaces, and new ones of these kinds; the child is pid 1.
    New(CloneFlags),
    /// The PID and mount namespaces of the process with this pidfd, which is pid 1 there, and its namespaces of these
    /// kinds.
    Join(OwnedFd, CloneFlags),
}

/// Why a child did not start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// An argument contains a NUL byte.
    #[error("cannot pass an argument with a NUL byte")]
    Nul(#[from] std::ffi::NulError),
    /// The fork itself failed.
    #[error("cannot fork {program}")]
    Fork {
        /// The program.
        program: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The child could not set itself up.
    #[error("cannot start {program}: {step} failed")]
    Child {
        /// The program.
        program: String,
        /// The call that failed.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

fn register() -> std::sync::MutexGuard<'static, BTreeSet<i32>> {
    static CHILDREN: Mutex<BTreeSet<i32>> = Mutex::new(BTreeSet::new());
    CHILDREN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts a path or text for execve(2).
///
/// # Errors
/// If it contains a NUL byte.
pub fn c_string(text: impl AsRef<OsStr>) -> Result<CString, std::ffi::NulError> {
    CString::new(text.as_ref().as_bytes())
}

impl Spawn {
    /// A child that executes `program` with this process's environment, in its namespaces.
    ///
    /// # Errors
    /// If a text contains a NUL byte.
    pub fn new<A: AsRef<OsStr>>(program: &Path, args: impl IntoIterator<Item = A>) -> Result<Spawn, Error> {
        let path = c_string(program)?;
        let mut all = vec![path.clone()];
        for arg in args {
            all.push(c_string(arg)?);
        }
        Ok(Spawn {
            program: Program { path, args: all, env: Vec::new() },
            place: Place {
                world: World::Host,
                pids: None,
                network: None,
                own_tun: None,
                directory: None,
                visitor: None,
            },
            descriptors: Descriptors::default(),
            rights: Rights::default(),
            umask: None,
            limits: Vec::new(),
            session: false,
            signals_blocked: false,
            dies_with: None,
        }
        .inherit_environment())
    }

    fn inherit_environment(mut self) -> Spawn {
        // A variable of this process cannot contain a NUL.
        self.program.env = std::env::vars_os().filter_map(|(k, v)| c_string(join(&k, &v)).ok()).collect();
        self
    }

    /// Replaces the environment.
    ///
    /// # Errors
    /// If a text contains a NUL byte.
    pub fn environment<K: AsRef<OsStr>, V: AsRef<OsStr>>(
        mut self,
        variables: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Spawn, Error> {
        self.program.env.clear();
        for (key, value) in variables {
            self.program.env.push(c_string(join(key.as_ref(), value.as_ref()))?);
        }
        Ok(self)
    }

    /// Sets the namespaces of the child.
    #[must_use]
    pub fn world(mut self, world: World) -> Spawn {
        self.place.world = world;
        self
    }

    /// Sets the child's pid in its innermost namespace (clone3's `set_tid`): the first of these that is free there. One is not
    /// free as long as a process is in its process group or session.
    #[must_use]
    pub fn pids(mut self, pids: RangeInclusive<i32>) -> Spawn {
        self.place.pids = Some(pids);
        self
    }

    /// Opens a file in the child.
    #[must_use]
    pub fn open(mut self, open: Open) -> Spawn {
        self.descriptors.opened.push(open);
        self
    }

    /// Gives a descriptor to the child under the number `fd`. Descriptors that are not given are closed.
    #[must_use]
    pub fn fd(mut self, from: OwnedFd, fd: RawFd) -> Spawn {
        self.descriptors.given.push((from, fd));
        self
    }

    /// Sets the working directory, which is looked up in the child's mount namespace.
    ///
    /// # Errors
    /// If the path contains a NUL byte.
    pub fn directory(mut self, directory: &Path) -> Result<Spawn, Error> {
        self.place.directory = Some(c_string(directory)?);
        Ok(self)
    }

    /// Enters the working directory with the rights of this user and no others. Users can put a link to a folder that is
    /// closed to them in the place of one of theirs; and in a home on a file system that gives root no rights (NFS with
    /// `root_squash`), only the user finds it.
    ///
    /// # Errors
    /// When our groups cannot be read.
    pub fn directory_of(mut self, uid: u32, gid: u32, groups: &[u32]) -> io::Result<Spawn> {
        self.place.visitor = Some(FileUser::new(uid, gid, groups)?);
        Ok(self)
    }

    /// Sets the file mode mask.
    #[must_use]
    pub fn umask(mut self, mask: libc::mode_t) -> Spawn {
        self.umask = Some(mask);
        self
    }

    /// Sets a resource limit, soft and hard.
    #[must_use]
    pub fn limit(mut self, resource: u32, limit: libc::rlimit) -> Spawn {
        self.limits.push((resource, limit));
        self
    }

    /// Starts the child with all signals blocked: none can end it before it is ready for them.
    #[must_use]
    pub fn signals_blocked(mut self) -> Spawn {
        self.signals_blocked = true;
        self
    }

    /// Sets the network namespace of the child.
    #[must_use]
    pub fn network(mut self, network: OwnedFd) -> Spawn {
        self.place.network = Some(network);
        self
    }

    /// Gives the child its own mount namespace with a /dev/net/tun that every user may open. `without` are mounts to
    /// remove there: otherwise they would exist in it as long as the child lives, even if they are unmounted elsewhere.
    ///
    /// # Errors
    /// If a path contains a NUL byte.
    pub fn own_tun(mut self, without: &[PathBuf]) -> Result<Spawn, Error> {
        self.place.own_tun = Some(without.iter().map(c_string).collect::<Result<_, _>>()?);
        Ok(self)
    }

    /// Runs the child as this user, with this group and no other one. If it was root, it has no capability afterwards
    /// (capabilities(7)).
    #[must_use]
    pub fn identity(mut self, user: u32, group: u32) -> Spawn {
        self.rights.identity = Some((user, group));
        self
    }

    /// Takes the supplementary groups from the child, where this process may do that (CAP_SETGID); elsewhere it keeps them.
    #[must_use]
    pub fn no_groups(mut self) -> Spawn {
        self.rights.no_groups = true;
        self
    }

    /// Sets no-new-privileges: programs that the child executes gain no rights.
    #[must_use]
    pub fn no_new_privileges(mut self) -> Spawn {
        self.rights.no_new_privileges = true;
        self
    }

    /// Gives the child a new session.
    #[must_use]
    pub fn session(mut self) -> Spawn {
        self.session = true;
        self
    }

    /// The kernel kills the child when this process ends. Only for [`World::Host`]: children of other worlds are forked
    /// by threads that end, and those worlds end with us anyway.
    #[must_use]
    pub fn dies_with_us(mut self) -> Spawn {
        self.dies_with = Some(std::process::id().cast_signed());
        self
    }

    /// Starts the child and waits until it has executed its program or failed to.
    ///
    /// # Errors
    /// When the fork fails, or a step of the child before its program runs; the error names the step.
    pub fn start(self) -> Result<Child, Error> {
        match self.place.world {
            // pid_for_children is a property of the thread and cannot be left again: a thread of its own enters.
            World::Join(..) => std::thread::scope(|scope| {
                let spawn = &self;
                let thread = std::thread::Builder::new().spawn_scoped(scope, move || spawn.start_here());
                let thread = thread.map_err(|source| self.fork_error(source))?;
                thread.join().unwrap_or_else(|_| Err(self.lost()))
            }),
            World::Host | World::New(_) => {
                let lost = self.lost();
                let (answer, result) = mpsc::sync_channel(1);
                let task: Task = Box::new(move || drop(answer.send(self.start_here())));
                match forker().send(task) {
                    Ok(()) => result.recv().unwrap_or(Err(lost)),
                    Err(_) => Err(lost),
                }
            }
        }
    }

    fn lost(&self) -> Error {
        self.fork_error(io::Error::other("the forking thread has ended"))
    }

    fn fork_error(&self, source: io::Error) -> Error {
        Error::Fork { program: self.program.name(), source }
    }

    fn start_here(&self) -> Result<Child, Error> {
        if let World::Join(pidfd, _) = &self.place.world {
            nix::sched::setns(pidfd, CloneFlags::CLONE_NEWPID).map_err(|e| self.fork_error(e.into()))?;
        }
        let (report, report_end) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).map_err(|e| self.fork_error(e.into()))?;
        let mut plan = child::Plan::new(self, report_end.as_raw_fd()).map_err(|e| self.fork_error(e))?;
        // The register is locked during the fork, so that a child being started is not taken for a stray.
        let mut children = register();
        let (pid, pidfd) = self.clone_process(&mut plan).map_err(|e| self.fork_error(e))?;
        children.insert(pid);
        drop(children);
        drop(report_end);
        let child = Child { pid, pidfd };
        let mut failure = child::Failure::default();
        match io::Read::read_exact(&mut std::fs::File::from(report), &mut failure) {
            // exec closed the pipe: the program runs.
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(child),
            Err(e) => Err(self.fork_error(e)),
            Ok(()) => {
                let _ = child.wait();
                let (step, source) = child::explain(failure);
                Err(Error::Child { program: self.program.name(), step, source })
            }
        }
    }

    fn clone_process(&self, plan: &mut child::Plan<'_>) -> io::Result<(i32, OwnedFd)> {
        let Some(mut pids) = self.place.pids.clone() else { return self.clone_with_pid(plan, None) };
        loop {
            let Some(pid) = pids.next() else { return Err(io::Error::from_raw_os_error(libc::EEXIST)) };
            match self.clone_with_pid(plan, Some(pid)) {
                Err(error) if error.raw_os_error() == Some(libc::EEXIST) => {}
                result => return result,
            }
        }
    }

    fn clone_with_pid(&self, plan: &mut child::Plan<'_>, pid: Option<i32>) -> io::Result<(i32, OwnedFd)> {
        let mut pidfd: RawFd = -1;
        let set_tid = pid.map(|pid| [pid]);
        // SAFETY: clone_args is plain numbers, for which all zeroes is valid.
        let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
        args.flags = u64::from((libc::CLONE_PIDFD | self.place.new_namespaces().bits()).cast_unsigned());
        args.pidfd = (&raw mut pidfd).addr() as u64;
        args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
        if let Some(pids) = &set_tid {
            args.set_tid = pids.as_ptr().addr() as u64;
            args.set_tid_size = 1;
        }
        // SAFETY: the arguments live longer than the call. Without CLONE_VM this is a fork; the child only runs
        // `Plan::run`, which makes system calls on memory prepared before and never returns.
        let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
        match pid {
            -1 => Err(io::Error::last_os_error()),
            0 => plan.run(),
            pid => {
                // SAFETY: the kernel stored a new descriptor there, which nobody else owns.
                let pidfd = unsafe { OwnedFd::from_raw_fd(pidfd) };
                Ok((i32::try_from(pid).map_err(io::Error::other)?, pidfd))
            }
        }
    }
}

impl Program {
    /// For errors.
    fn name(&self) -> String {
        self.path.to_string_lossy().into_owned()
    }

    /// The texts of execve(2) as it wants them. They are valid as long as the program.
    fn pointers(&self) -> [Vec<*const libc::c_char>; 2] {
        [&self.args, &self.env].map(|texts| texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect())
    }
}

impl Place {
    /// The namespaces that are made for the child.
    fn new_namespaces(&self) -> CloneFlags {
        match self.world {
            World::New(also) => CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWNS | also,
            World::Host | World::Join(..) => CloneFlags::empty(),
        }
    }
}

impl Descriptors {
    /// Each given descriptor and its number in the child.
    ///
    /// # Errors
    /// When more are given than can be placed, or under numbers where others wait to be placed.
    fn moves(&self) -> io::Result<Vec<(RawFd, RawFd)>> {
        let moves: Vec<_> = self.given.iter().map(|(from, to)| (from.as_raw_fd(), *to)).collect();
        let numbers = moves.iter().map(|(_, to)| *to).chain(self.opened.iter().map(|open| open.fd));
        if moves.len() > child::MOST || numbers.into_iter().any(|fd| !(0..child::LIFTED).contains(&fd)) {
            let (most, lifted) = (child::MOST, child::LIFTED);
            let text = format!("at most {most} descriptors can be given, below number {lifted}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(moves)
    }
}

fn join(key: &OsStr, value: &OsStr) -> std::ffi::OsString {
    let mut text = key.to_os_string();
    text.push("=");
    text.push(value);
    text
}

type Task = Box<dyn FnOnce() + Send>;

/// The thread that forks children with a parent-death signal; it ends with the process.
fn forker() -> &'static mpsc::Sender<Task> {
    static FORKER: OnceLock<mpsc::Sender<Task>> = OnceLock::new();
    FORKER.get_or_init(|| {
        let (sender, tasks) = mpsc::channel::<Task>();
        // If the thread does not start, the channel is closed, and the caller reports that.
        let _ = std::thread::Builder::new().name("fork".into()).spawn(move || tasks.iter().for_each(|task| task()));
        sender
    })
}

/// Records the children that exist before anything is started here: they belong to a shell that exec'ed us. They are
/// never taken for CRIU's, and so neither killed nor reaped. Because they are not reaped, their pids are not reused.
pub fn spare_present_children() {
    register().extend(super::process::children(std::process::id().cast_signed()));
}

/// Whether this child was started or adopted here and not reaped yet, or was [spared](spare_present_children).
#[must_use]
pub fn is_known(pid: i32) -> bool {
    register().contains(&pid)
}

/// Reaps children that ended and were not started here. Returns how many. So a test beside which another one calls it may
/// find its child reaped.
pub fn reap_strays() -> usize {
    let known = register();
    let strays = super::process::children(std::process::id().cast_signed());
    let reaped = strays.into_iter().filter(|pid| !known.contains(pid)).filter(|pid| {
        let flags = Some(WaitPidFlag::WNOHANG);
        matches!(nix::sys::wait::waitpid(Pid::from_raw(*pid), flags), Ok(status) if status != WaitStatus::StillAlive)
    });
    reaped.count()
}

#[cfg(test)]
mod tests;

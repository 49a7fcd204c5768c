//! One request to one `criu swrk`: start it in the job's namespaces, send and answer messages, collect its log, reap
//! it.
//!
//! Invariants:
//! - In all cases no CRIU of ours remains: every exit path kills and reaps it.
//! - That CRIU has ended is what its pidfd says. Its socket may stay open: CRIU forks children at each start to examine
//!   the kernel, and traces some. If it is killed meanwhile, such a child stays stopped and has all its descriptors.
//! - Whatever CRIU leaves is killed with its process group. CRIU leads a session of its own, so no process of a job that
//!   is dumped is in that group.
//! - If a restore fails, the half-restored tasks are killed (the caller's `abandon` kills their world) before this
//!   module waits for the end of the log, because the tasks have its pipe open.

mod ending;

use std::ffi::{CString, OsStr, OsString};
use std::fmt::Display;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::CloneFlags;
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use prost::Message;

use self::ending::{AbandonOnPanic, Process};
use super::log::{Log, Reader};
use super::plugin::{FileRights, PLUGIN_NAME, Plugin};
use super::proto::{InheritFd, Kind, Options, Request, Response};
use super::{Criu, image};
use rekindle_abi::variables;
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::process;
use rekindle_os::spawn::{self, Child, Ended, Open, Spawn, World};

/// Where a CRIU process runs, and its folders.
#[derive(Debug)]
pub struct Place<'a> {
    /// The executable.
    pub criu: &'a Criu,
    /// The process with pid 1 in the namespaces to run in; `None` for the host's.
    pub init: Option<&'a Child>,
    /// The folder of CRIU's images.
    pub images: &'a Path,
    /// The same folder, opened for CRIU, where others can change what is on its path or in it; `None`: CRIU opens the
    /// path.
    pub opened: Option<&'a OwnedFd>,
    /// A folder for files that CRIU writes besides its images; a restore must not change those.
    pub work: &'a Path,
    /// The time limit for the whole request.
    pub timeout: Duration,
}

/// What happens to TCP connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tcp {
    /// They are in the image and continue after a restore.
    Keep,
    /// They stay open in the running job and are reset in a restored one.
    Close,
}

/// A file that we open for appending, instead of CRIU by its path at the dump.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instead {
    /// Its path at the dump.
    pub then: PathBuf,
    /// Its present path, as the restored tree sees it.
    pub now: PathBuf,
    /// Its device and inode: CRIU does not start if something else is there.
    pub is: (u64, u64),
}

/// Options of a restore.
#[derive(Debug, Clone, Copy)]
pub struct RestoreOptions<'a> {
    /// TCP connections.
    pub tcp: Tcp,
    /// Files that the job gets instead of the original ones.
    pub instead: &'a [Instead],
    /// Our plugin, if this CRIU loads plugins.
    pub plugin: Option<Plugin<'a>>,
}

impl Default for RestoreOptions<'_> {
    fn default() -> Self {
        RestoreOptions { tcp: Tcp::Close, instead: &[], plugin: None }
    }
}

/// Options of a dump.
#[derive(Debug, Clone, Copy)]
pub struct DumpOptions<'a> {
    /// The root of the tree, as its innermost PID namespace sees it. It must lead its session.
    pub root: i32,
    /// TCP connections.
    pub tcp: Tcp,
    /// The largest deleted file that is copied into the image, in bytes.
    pub ghost_limit: u32,
    /// Time limit for stopping all tasks; CRIU counts in seconds.
    pub freeze_timeout: Duration,
    /// Our plugin, if there are devices to accept. Then [`image::without_devices`] must be called before the tasks are
    /// resumed.
    pub plugin: Option<Plugin<'a>>,
}

/// The moments at which CRIU waits for us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notify {
    /// Before the tasks are stopped.
    PreDump,
    /// The tasks are stopped, and CRIU has not looked at them yet.
    Stopped,
    /// All images are written; the tasks are frozen.
    PostDump,
    /// The tasks exist, and none runs yet; with the root's pid in its namespace.
    PostRestore(i32),
    /// The tasks have their memory and files, and none runs yet. CRIU ignores a refusal here, so we kill them first.
    PreResume,
}

/// Called while CRIU waits. An error cancels the request, and becomes its error.
pub struct Hooks<'a> {
    /// Called at each of these moments.
    pub notify: &'a mut dyn FnMut(Notify) -> Result<(), String>,
    /// Whether the request is cancelled.
    pub cancelled: &'a dyn Fn() -> bool,
    /// Looks for a task that died while CRIU was working on it (its pid in the namespace, and how it ended). CRIU may
    /// then wait for ever: in a dump for an answer of the dead task, in a restore for a task that is not its own child.
    pub died: &'a dyn Fn() -> Option<(i32, Ended)>,
    /// Kills everything that a failed restore may have left.
    pub abandon: &'a dyn Fn(),
}

impl std::fmt::Debug for Hooks<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hooks")
    }
}

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// CRIU did not start.
    #[error("cannot start CRIU")]
    Start(#[source] spawn::Error),
    /// The socket, the pipe or a wait failed.
    #[error("cannot communicate with CRIU: {what}")]
    Talk {
        /// The call.
        what: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// CRIU refused.
    #[error("CRIU refused: {}", reason(log))]
    Refused {
        /// Its log.
        log: Log,
    },
    /// CRIU ended without an answer.
    #[error("{}", gone(*ended, log))]
    Gone {
        /// How the process ended.
        ended: Ended,
        /// Its log.
        log: Log,
    },
    /// It took too long.
    #[error("CRIU did not finish within {}: {}", humantime::format_duration(*limit), reason(log))]
    Timeout {
        /// The bound.
        limit: Duration,
        /// Its log.
        log: Log,
    },
    /// A task died while it was dumped or restored, and CRIU did not notice.
    #[error("process {pid} of the job ended ({ended}) while CRIU worked on it: {}", reason(log))]
    TaskDied {
        /// Its pid in the namespace.
        pid: i32,
        /// How the process ended.
        ended: Ended,
        /// CRIU's log.
        log: Log,
    },
    /// One of our own steps during the request failed.
    #[error("{what}")]
    Hook {
        /// What failed.
        what: String,
    },
    /// CRIU would work on a user's files with root's rights.
    #[error("{} would open the job's files with root's rights, not with those of the job's user: {why}. CRIU must be able to load shared objects and plugins: use a dynamically linked CRIU, such as your distribution's", path.display())]
    Unrestricted {
        /// The executable.
        path: PathBuf,
        /// What was observed.
        why: &'static str,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// The restored process cannot be found among our children.
    #[error("CRIU reports success, but the restored process {pid} does not exist")]
    Lost {
        /// Its pid in the namespace.
        pid: i32,
    },
    /// The image is incomplete; CRIU was not started.
    #[error(transparent)]
    Image(#[from] image::Error),
}

fn reason(log: &Log) -> String {
    let errors = log.errors();
    let mut text = if errors.is_empty() { "it gave no reason in its log".to_string() } else { errors.join("; ") };
    if let Some(hint) = log.hint() {
        text.push_str(". Hint: ");
        text.push_str(hint);
    }
    text
}

fn gone(ended: Ended, log: &Log) -> String {
    if ended != KILLED {
        return format!("CRIU ended without an answer ({ended}): {}", reason(log));
    }
    let errors = log.errors();
    let last = if errors.is_empty() { String::new() } else { format!(". Its last errors: {}", errors.join("; ")) };
    format!("CRIU was killed ({ended}), by the kernel if memory ran out (`dmesg` shows that), or by somebody{last}")
}

/// Neither CRIU nor its helpers end this way by themselves.
const KILLED: Ended = Ended::Signal(libc::SIGKILL);

impl RunError {
    /// Whether somebody else killed CRIU: the kernel for lack of memory, or a user. Another attempt may succeed at once.
    #[must_use]
    pub fn says_criu_killed(&self) -> bool {
        matches!(self, RunError::Gone { ended: KILLED, .. })
    }

    /// CRIU's log, if it wrote one.
    #[must_use]
    pub fn log(&self) -> Option<&Log> {
        match self {
            RunError::Refused { log }
            | RunError::Gone { log, .. }
            | RunError::Timeout { log, .. }
            | RunError::TaskDied { log, .. } => Some(log),
            _ => None,
        }
    }
}

/// A restored tree.
#[derive(Debug)]
pub struct Restored {
    /// Its root, a child of this process.
    pub root: Child,
    /// CRIU's log.
    pub log: Log,
}

/// Options of every request.
fn common(place: &Place<'_>, tcp: Tcp) -> Options {
    let images = match place.opened {
        Some(_) => format!("/proc/self/fd/{IMAGES}"),
        None => place.images.to_string_lossy().into_owned(),
    };
    Options {
        images_dir_fd: -1,
        images_dir: Some(images),
        log_level: Some(2),
        log_to_stderr: Some(true),
        notify_scripts: Some(true),
        ext_unix_sk: Some(true),
        file_locks: Some(true),
        link_remap: Some(true),
        manage_cgroups_mode: Some(0),
        network_lock: Some(3),
        tcp_established: Some(tcp == Tcp::Keep),
        tcp_close: Some(tcp == Tcp::Close),
        // Connections that wait to be accepted are left out: the other end is closed in a restored job, and may connect
        // again.
        tcp_skip_in_flight: Some(true),
        ..Options::default()
    }
}

/// Dumps the tree below `options.root`, which continues to run.
///
/// # Errors
/// When CRIU does not start, refuses, is cancelled or takes too long. The job continues to run in all cases.
pub fn dump(place: &Place<'_>, options: DumpOptions<'_>, hooks: &mut Hooks<'_>) -> Result<Log, RunError> {
    let seconds = u32::try_from(options.freeze_timeout.as_secs()).unwrap_or(u32::MAX);
    let wanted = Options {
        pid: Some(options.root),
        leave_running: Some(true),
        ghost_limit: Some(options.ghost_limit),
        timeout: Some(seconds.max(1)),
        ..common(place, options.tcp)
    };
    let mut run = Run::start(place, Given::default(), options.plugin)?;
    let outcome = run.converse(Kind::Dump, wanted, place.timeout, hooks);
    run.end(outcome, place.timeout).map(|(_, log)| log)
}

/// The namespaces for CRIU. It runs in the job's network namespace, which is in no image, but not in its IPC namespace,
/// which is in the image: CRIU dumps System V objects only from a namespace other than its own ("doesn't live in IPC
/// ns").
pub(super) fn world_of(init: &Child) -> Result<World, spawn::Error> {
    let failed = |source| spawn::Error::Fork { program: "criu".into(), source };
    init.entrance(CloneFlags::CLONE_NEWNET).map_err(failed)
}

/// The descriptor in CRIU of the folder of its images, if it does not open it by its path.
const IMAGES: i32 = 4;

/// The descriptor in CRIU to which our plugin writes answers of the threads.
const ANSWERS: i32 = 5;

/// The first descriptor in CRIU that is a file of the job; lower ones are its own.
const FIRST_FILE: i32 = 6;

/// Restores an image; its root becomes a child of this process.
///
/// # Errors
/// When CRIU does not start, refuses, is cancelled or takes too long. Then no process of the tree is left.
pub fn restore(place: &Place<'_>, options: RestoreOptions<'_>, hooks: &mut Hooks<'_>) -> Result<Restored, RunError> {
    let RestoreOptions { tcp, instead, plugin } = options;
    let read = |source| image::Error::Read { path: place.images.into(), source };
    let images = Beneath::root(place.images, Owners::Any).map_err(read)?;
    image::check_pages(&images)?;
    let made = image::made_eventfds(&images)?;
    let key = |file: &Instead| file.then.strip_prefix("/").unwrap_or(&file.then).as_os_str().as_bytes().to_vec();
    let keys = instead.iter().map(key).chain(made.iter().map(|made| made.key.clone()));
    let inherit_fd = (FIRST_FILE..).zip(keys).map(|(fd, key)| InheritFd { key, fd }).collect();
    let wanted = Options {
        rst_sibling: Some(true),
        inherit_fd,
        // We have compared them already; in images of earlier versions the reaper has other permission bits than it
        // needs.
        skip_file_rwx_check: Some(true),
        ..common(place, tcp)
    };
    let mut run = Run::start(place, Given { files: instead, made }, plugin)?;
    // Dropped before `run`: the tasks continue when CRIU is gone.
    let _abandon = AbandonOnPanic(hooks.abandon);
    let restricted = plugin.and_then(|plugin| plugin.files);
    let outcome = run
        .check_plugin(restricted, place.timeout, hooks)
        .and_then(|()| run.converse(Kind::Restore, wanted, place.timeout, hooks));
    if outcome.is_err() {
        (hooks.abandon)();
    }
    let result = run.end(outcome, place.timeout).and_then(|(response, log)| {
        let pid = response.restore.map_or(0, |r| r.pid);
        let root =
            find_restored(pid, place.init).and_then(|root| Child::adopt(root).ok()).ok_or(RunError::Lost { pid })?;
        Ok(Restored { root, log })
    });
    if result.is_err() {
        (hooks.abandon)();
        spawn::reap_strays();
    }
    result
}

/// The pid of our child that has `pid` in the namespaces of `init` (`None`: in the host's) and that we did not start: the
/// root of a restore in progress. As pid 1 of a container we get the orphans of others as children; they are elsewhere.
#[must_use]
pub fn find_restored(pid: i32, init: Option<&Child>) -> Option<i32> {
    let of = |process: &dyn Display| std::fs::read_link(format!("/proc/{process}/ns/pid")).ok();
    let wanted = init.map_or_else(|| of(&"self"), |init| of(&init.pid()));
    let children = process::children(std::process::id().cast_signed());
    let mut found = children.into_iter().filter(|child| !spawn::is_known(*child));
    found.find(|child| process::inner_pid(*child) == Some(pid) && of(child) == wanted)
}

/// Why a conversation ended without an answer.
enum Stop {
    Closed,
    TimedOut,
    Cancelled,
    TaskDied(i32, Ended),
    Hook(String),
    Unrestricted(&'static str),
    Failed(&'static str, io::Error),
}

/// Files of the job that CRIU does not open: its first descriptors, in this order.
#[derive(Default)]
struct Given<'a> {
    files: &'a [Instead],
    made: Vec<image::Made>,
}

struct Run<'a> {
    criu: &'a Path,
    /// Before the socket, which is closed after it.
    child: Process,
    socket: OwnedFd,
    log: Reader,
    /// The user whose file access rights a restore must use.
    restricted: Option<FileRights<'a>>,
}

impl<'a> Run<'a> {
    fn start(place: &Place<'a>, given: Given<'_>, plugin: Option<Plugin<'_>>) -> Result<Run<'a>, RunError> {
        let talk = |what| move |e: nix::Error| RunError::Talk { what, source: e.into() };
        let (socket, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)
            .map_err(talk("socketpair"))?;
        let (log, log_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(talk("pipe"))?;
        let opened = place.opened.map(OwnedFd::try_clone).transpose();
        let opened = opened.map_err(|source| RunError::Talk { what: "descriptor of the images", source })?;
        let log = Reader::start(log).map_err(|source| RunError::Talk { what: "log thread", source })?;
        let null = |fd, flags| Open { fd, path: CString::from(c"/dev/null"), flags, expect: None };
        let work: PathBuf = place.work.into();
        // Without `-L` CRIU loads the plugins of its distribution. One of them checkpoints CUDA processes itself.
        let plugins = plugin.map_or(place.work, |plugin| plugin.folder);
        let first = [OsStr::new("--no-default-config"), OsStr::new("-W"), work.as_os_str()];
        let args = first.into_iter().chain(["-L".as_ref(), plugins.as_os_str(), "swrk".as_ref(), "3".as_ref()]);
        let answers = plugin.and_then(|plugin| plugin.answers).map(|answers| answers.try_clone_to_owned()).transpose();
        let answers = answers.map_err(|source| RunError::Talk { what: "descriptor of the answers", source })?;
        let asks = answers.as_ref().map(|_| (variables::text(variables::ANSWERS), OsString::from(ANSWERS.to_string())));
        let devices =
            plugin.and_then(|plugin| Some((variables::text(variables::DEVICES), OsString::from(plugin.devices?))));
        let files_as = plugin.and_then(|plugin| {
            let preload = plugin.folder.join(PLUGIN_NAME).into_os_string();
            Some([
                (variables::text(variables::FILES_AS), OsString::from(plugin.files?.to_string())),
                ("LD_PRELOAD", preload),
            ])
        });
        let path = ("PATH", std::env::var_os("PATH").unwrap_or_default());
        let variables = [path].into_iter().chain(asks).chain(devices).chain(files_as.into_iter().flatten());
        let child = Spawn::new(&place.criu.path, args)
            // CRIU also takes options from its environment, so it gets none.
            .and_then(|s| s.environment(variables))
            .and_then(|spawn| {
                let spawn = spawn.open(null(0, libc::O_RDONLY)).open(null(1, libc::O_WRONLY));
                // A session of its own: Ctrl-C, or a signal for our process group, is for us.
                // No groups: CRIU calls setgroups(2) only for a task that has some, and one without would get CRIU's.
                let mut spawn = spawn.fd(log_end, 2).fd(theirs, 3).session().no_groups();
                if let Some(opened) = opened {
                    spawn = spawn.fd(opened, IMAGES);
                }
                if let Some(answers) = answers {
                    spawn = spawn.fd(answers, ANSWERS);
                }
                let made = (FIRST_FILE..).skip(given.files.len()).zip(given.made);
                for (fd, made) in made {
                    spawn = spawn.fd(made.eventfd, fd);
                }
                for (fd, file) in (FIRST_FILE..).zip(given.files) {
                    let flags = libc::O_WRONLY | libc::O_APPEND;
                    spawn = spawn.open(Open { fd, path: spawn::c_string(&file.now)?, flags, expect: Some(file.is) });
                }
                match place.init {
                    // Pids of the job begin far above.
                    Some(init) => {
                        let world = world_of(init)?;
                        spawn.world(world).pids(CRIU_PIDS).start()
                    }
                    None => spawn.dies_with_us().start(),
                }
            })
            .map_err(RunError::Start)?;
        Ok(Run { criu: &place.criu.path, child: Process(child), socket, log, restricted: None })
    }

    /// Before CRIU reads the image: checks that our plugin is loaded. From then on the restore uses these file access
    /// rights.
    fn check_plugin(
        &mut self,
        rights: Option<FileRights<'a>>,
        timeout: Duration,
        hooks: &mut Hooks<'_>,
    ) -> Result<(), Stop> {
        if rights.is_none() {
            return Ok(());
        }
        self.restricted = rights;
        // CRIU accepts another request only after one of this kind. Its answer shows that CRIU itself is running, not
        // the shell of a wrapper or the loader.
        self.send(&Request { kind: Kind::Version.into(), keep_open: Some(true), ..Request::default() })?;
        self.receive(Instant::now() + timeout, hooks.cancelled, hooks.died)?;
        match process::has_mapped(self.child.0.pid(), PLUGIN_NAME) {
            true => Ok(()),
            false => Err(Stop::Unrestricted("it did not load the object that LD_PRELOAD names")),
        }
    }

    /// Before CRIU creates the first task: it has started to read the image, so it must have only the rights that our
    /// plugin left.
    fn check_rights(&self) -> Result<(), Stop> {
        /// CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER and CAP_FSETID.
        const OVER_FILES: u64 = 0b1_1111;
        let Some(rights) = self.restricted else { return Ok(()) };
        let pid = self.child.0.pid();
        let ids = |ids: Option<Vec<u32>>| ids.and_then(|ids| ids.get(3).copied());
        let is_user =
            ids(process::user_ids(pid)) == Some(rights.uid) && ids(process::group_ids(pid)) == Some(rights.gid);
        let has_none = process::effective_capabilities(pid).is_some_and(|all| all & OVER_FILES == 0);
        match is_user && has_none {
            true => Ok(()),
            false => Err(Stop::Unrestricted("it did not take the rights that rekindle's plugin sets")),
        }
    }

    fn converse(
        &mut self,
        kind: Kind,
        options: Options,
        timeout: Duration,
        hooks: &mut Hooks<'_>,
    ) -> Result<Response, Stop> {
        let deadline = Instant::now() + timeout;
        self.send(&Request { kind: kind.into(), options: Some(options), ..Request::default() })?;
        loop {
            let response = self.receive(deadline, hooks.cancelled, hooks.died)?;
            let Some(notify) = response.notify.clone().filter(|_| response.kind == i32::from(Kind::Notify)) else {
                return Ok(response);
            };
            if notify.script.as_deref() == Some("pre-restore") {
                self.check_rights()?;
            }
            let moment = match (notify.script.as_deref(), notify.pid) {
                (Some("pre-dump"), _) => Some(Notify::PreDump),
                // Meant for a client that names what is outside the image.
                (Some("query-ext-files"), _) => Some(Notify::Stopped),
                (Some("post-dump"), _) => Some(Notify::PostDump),
                (Some("post-restore"), Some(pid)) => Some(Notify::PostRestore(pid)),
                (Some("pre-resume"), _) => Some(Notify::PreResume),
                _ => None,
            };
            let answer = moment.map_or(Ok(()), &mut *hooks.notify);
            let success = answer.is_ok();
            if !success && kind == Kind::Restore {
                (hooks.abandon)();
            }
            let reply = Request { kind: Kind::Notify.into(), notify_success: Some(success), ..Request::default() };
            let sent = self.send(&reply);
            let Err(what) = answer else {
                sent?;
                continue;
            };
            // CRIU undoes its work and reports that; the original reason is what counts.
            let answer = self.receive(deadline, &|| false, &|| None);
            // If somebody killed it, the step may have failed because of that. In a restore we did, just now.
            let was_killed = kind == Kind::Dump && matches!(answer, Err(Stop::Closed)) && self.was_killed();
            return Err(if was_killed { Stop::Closed } else { Stop::Hook(what) });
        }
    }

    /// Of one that is gone.
    fn was_killed(&self) -> bool {
        self.child.end_within(ENDS_WITHIN).is_ok_and(|ended| ended == Some(KILLED))
    }

    fn send(&self, request: &Request) -> Result<(), Stop> {
        let bytes = request.encode_to_vec();
        match send(self.socket.as_raw_fd(), &bytes, MsgFlags::MSG_NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(nix::Error::EPIPE | nix::Error::ECONNRESET) => Err(Stop::Closed),
            Err(e) => Err(Stop::Failed("send", e.into())),
        }
    }

    fn receive(
        &self,
        deadline: Instant,
        cancelled: &dyn Fn() -> bool,
        died: &dyn Fn() -> Option<(i32, Ended)>,
    ) -> Result<Response, Stop> {
        // Returns are small; the largest seen is under 200 bytes.
        let mut buffer = vec![0u8; 64 << 10];
        // A task that died, and since when that has been known.
        let mut dead: Option<(i32, Instant)> = None;
        let mut look = Instant::now() + LOOK;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stop::TimedOut);
            }
            if cancelled() {
                return Err(Stop::Cancelled);
            }
            if Instant::now() >= look {
                dead = match (died(), dead) {
                    (Some((pid, ended)), Some((known, since))) if known == pid && since.elapsed() >= NOTICES_WITHIN => {
                        return Err(Stop::TaskDied(pid, ended));
                    }
                    (Some((pid, _)), Some((known, since))) if known == pid => Some((pid, since)),
                    (found, _) => found.map(|(pid, _)| (pid, Instant::now())),
                };
                look = Instant::now() + LOOK;
            }
            // Short, so that a cancellation is noticed soon.
            let wait = PollTimeout::try_from(left.min(Duration::from_millis(50))).unwrap_or(PollTimeout::ZERO);
            let mut fds = [self.socket.as_fd(), self.child.0.as_fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
            match poll(&mut fds, wait) {
                Ok(0) | Err(nix::Error::EINTR) => continue,
                Ok(_) => {}
                Err(e) => return Err(Stop::Failed("poll", e.into())),
            }
            let has_ended = fds[1].any().unwrap_or(true);
            let length = match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(0) | Err(nix::Error::ECONNRESET) => return Err(Stop::Closed),
                // What it sent before its end was received above.
                Err(nix::Error::EAGAIN) if has_ended => return Err(Stop::Closed),
                Err(nix::Error::EAGAIN) => continue,
                Ok(length) => length,
                Err(e) => return Err(Stop::Failed("recv", e.into())),
            };
            let bytes = buffer.get(..length).unwrap_or_default();
            return Response::decode(bytes).map_err(|e| Stop::Failed("decode", io::Error::other(e)));
        }
    }

    /// Makes sure that CRIU has ended, and combines its answer with its log.
    fn end(self, outcome: Result<Response, Stop>, limit: Duration) -> Result<(Response, Log), RunError> {
        let talk = |what| move |source| RunError::Talk { what, source };
        // CRIU waits until the socket is closed, then exits; a CRIU that hangs is killed.
        drop(self.socket);
        let by_itself = match outcome {
            Ok(_) | Err(Stop::Hook(_) | Stop::Closed) => self.child.end_within(ENDS_WITHIN).map_err(talk("wait"))?,
            Err(_) => None,
        };
        // What it has started is ended, too: that has its log open.
        if by_itself.is_none() || by_itself == Some(KILLED) || matches!(outcome, Err(Stop::Closed)) {
            self.child.kill().map_err(talk("kill"))?;
        }
        let ended = self.child.0.wait().map_err(talk("wait"))?;
        // A process of the job may have it open for a moment after CRIU was killed.
        let log = self.log.finish(if by_itself == Some(KILLED) { LAST_LINES } else { Duration::from_secs(2) });
        match outcome {
            Ok(response) if response.success => Ok((response, log)),
            Ok(_) => Err(RunError::Refused { log }),
            // We have killed it.
            Err(Stop::Closed) if by_itself.is_none() => Err(RunError::Timeout { limit: ENDS_WITHIN, log }),
            Err(Stop::Closed) => Err(RunError::Gone { ended, log }),
            Err(Stop::TimedOut) => Err(RunError::Timeout { limit, log }),
            Err(Stop::Cancelled) => Err(RunError::Cancelled),
            Err(Stop::TaskDied(pid, ended)) => Err(RunError::TaskDied { pid, ended, log }),
            Err(Stop::Hook(what)) => Err(RunError::Hook { what }),
            Err(Stop::Unrestricted(why)) => Err(RunError::Unrestricted { path: self.criu.into(), why }),
            Err(Stop::Failed(what, source)) => Err(RunError::Talk { what, source }),
        }
    }
}

/// How long CRIU may take to exit after its answer, which is a millisecond.
const ENDS_WITHIN: Duration = Duration::from_secs(10);
/// How long the lines of a CRIU that was killed may take: they are in the pipe already.
const LAST_LINES: Duration = Duration::from_millis(200);
/// How often the tasks are checked while CRIU works: each check reads /proc.
const LOOK: Duration = Duration::from_millis(200);
/// How long CRIU may take to give up on a busy machine; if it notices the death of a task, it does so within
/// milliseconds.
const NOTICES_WITHIN: Duration = Duration::from_secs(2);

/// The pids for CRIU in the job's namespace, below every pid that a job can have. It gets the first one, unless processes of
/// a CRIU that was killed still have that one's session.
const CRIU_PIDS: RangeInclusive<i32> = 2..=9;

#[cfg(test)]
mod tests;

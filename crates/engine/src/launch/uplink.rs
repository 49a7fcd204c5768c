//! The connection of a private network to the outside: slirp4netns, which runs outside the job.
//!
//! It opens a tap device in the job's network namespace, configures its addresses, and forwards its traffic through
//! sockets in the supervisor's network. Invariants:
//! - There is one for each world. It is ready before the job runs, and before CRIU binds sockets at its address. It
//!   ends with the world and with the supervisor (parent-death signal), and no process of the job's world is its child
//!   or parent.
//! - Addresses are the same in each world, so the job's sockets are valid after a restore.
//! - If it dies, it is started again. At most the job loses its connections to the outside.
//!
//! It reads whatever the job sends, so it has no rights: it runs as a user that nothing else runs as ([`unused`]),
//! without capabilities and without our environment, and filters its own system calls (no execve, mount, ptrace). It
//! needs rights in the job's network to open its device there. Therefore that network belongs to a user namespace of
//! this user ([`netns`]), with all rights over the job's network and none over anything else. Any other process of this
//! user would have these rights too, and could trace slirp4netns.
//!
//! slirp4netns (1.2.0) is told not to enter its sandbox, for two reasons. While it runs, the sandbox has copies of all
//! mounts below /run. These include images in memory, whose memory would then not be freed when they are unmounted. And
//! slirp4netns becomes root in it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::embedded;
use rekindle_base::chain;
use rekindle_os::mounts::{self, Mount};
use rekindle_os::netns::{self, Owned};
use rekindle_os::process;
use rekindle_os::rights;
use rekindle_os::spawn::{self, Child, Ended, Open, Spawn};
use rekindle_store::staging;

/// The program, and the name of its package in Debian, Ubuntu and Fedora.
pub const PROGRAM: &str = "slirp4netns";

/// The job's name server: slirp4netns passes queries on to the machine's current name servers.
const NAME_SERVER: &str = "10.0.2.3";

/// The kernel's tap devices.
const DEVICE: &str = "/dev/net/tun";

/// Numbers of users and groups for uplinks. No distribution assigns numbers above 2^31 (systemd: "unused, because some
/// programs take them for negative ones"), and the ranges of /etc/subuid and of container managers end below it.
const OURS: Range<u32> = 0xe000_0000..0xf000_0000;

/// nobody and nogroup, to which the kernel maps ids without a mapping (`overflowuid`): where rekindle itself is in a
/// user namespace that lacks the numbers above. If the job itself runs as nobody, the number below is used: the owner
/// of the job's network has all rights there, which a job must not have.
const NOBODY: u32 = 65534;
const NOBODY_ELSE: u32 = 65533;

/// Time limit until the device exists. It usually takes some ten milliseconds.
const READY: Duration = Duration::from_secs(10);

/// An uplink that ran this long is started again at once.
const STEADY: Duration = Duration::from_secs(10);

/// The pause before further tries.
const PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What an uplink needs and this machine lacks.
#[derive(Debug, thiserror::Error)]
pub enum Missing {
    /// The program.
    #[error(
        "network.mode = \"uplink\" needs {PROGRAM}, which is not in PATH: install it (Debian, Ubuntu, Fedora: package {PROGRAM})"
    )]
    Program,
    /// The kernel's tap devices.
    #[error(
        "network.mode = \"uplink\" needs /dev/net/tun, which does not exist: run `modprobe tun`, or pass the device to the container (Docker: --device /dev/net/tun)"
    )]
    Device,
}

/// Why there is no uplink.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A descriptor or a pipe cannot be made.
    #[error("cannot reach the job's network")]
    Reach(#[source] io::Error),
    /// The job's network cannot be made.
    #[error(
        "cannot create a network for user {user}, as which {PROGRAM} runs; user namespaces must be allowed (sysctl user.max_user_namespaces)"
    )]
    Network {
        /// The user.
        user: u32,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The file for the job's /etc/resolv.conf cannot be written.
    #[error("cannot write {}", path.display())]
    Names {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It did not start.
    #[error(transparent)]
    Spawn(#[from] spawn::Error),
    /// It ended before the device was there.
    #[error("{PROGRAM} ended at once ({how}){}", quoted(said))]
    Ended {
        /// How it ended.
        how: String,
        /// The last line it wrote.
        said: String,
    },
    /// It did not get ready.
    #[error("{PROGRAM} was not ready after {}{}", humantime::format_duration(READY), quoted(said))]
    Late {
        /// The last line it wrote.
        said: String,
    },
}

fn quoted(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(": {said}") }
}

/// How uplinks are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    program: PathBuf,
    directory: PathBuf,
    /// The job's user.
    job: Option<u32>,
}

/// Finds what it needs on this machine.
///
/// # Errors
/// When there is no slirp4netns, or no tap device.
pub fn find() -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH");
    let program = super::find_program(OsStr::new(PROGRAM), Path::new("/"), path.as_deref());
    let program = program.map_err(|_| Missing::Program)?;
    if Path::new(DEVICE).exists() { Ok(program) } else { Err(Missing::Device) }
}

impl Plan {
    /// `program` is slirp4netns, `job` is the job's user, and `directory` is the folder for the file that the job sees
    /// as /etc/resolv.conf.
    #[must_use]
    pub fn new(program: PathBuf, directory: PathBuf, job: Option<u32>) -> Plan {
        Plan { program, directory, job }
    }

    /// Makes a network for a job, of a user of its own.
    pub(super) fn network(&self) -> Result<Owned, Error> {
        let maps = ["uid_map", "gid_map"].map(|map| process::text("self", map).unwrap_or_default());
        let is_mapped = |id| maps.iter().all(|map| rights::is_mapped(map, id));
        let nobody = if self.job == Some(NOBODY) { NOBODY_ELSE } else { NOBODY };
        let user = unused(&in_use(), own_number()).filter(|id| is_mapped(*id)).unwrap_or(nobody);
        netns::owned_by(user).map_err(|source| Error::Network { user, source })
    }

    /// Writes the job's /etc/resolv.conf and returns its path. It is the machine's, except for the name servers: those
    /// may be on the machine's loopback device, and differ between machines; the one written here exists in each world.
    pub fn names(&self) -> Result<PathBuf, Error> {
        let machine = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
        let path = self.directory.join("resolv.conf");
        let written = embedded::put(&path, names_like(&machine).as_bytes(), 0o644);
        written.map_err(|source| Error::Names { path: path.clone(), source })?;
        Ok(path)
    }
}

/// A number that no other supervisor of this machine begins with at this moment: its pid, shifted by the number of its
/// PID namespace, because the processes of another container cannot be seen.
fn own_number() -> u32 {
    let namespace = std::fs::metadata("/proc/self/ns/pid").map_or(0, |namespace| namespace.ino());
    // Neighbouring numbers get far apart (Knuth's multiplicative hash).
    let shift = u32::try_from(namespace & u64::from(u32::MAX)).unwrap_or_default().wrapping_mul(0x9e37_79b1);
    shift ^ std::process::id()
}

/// A number for an uplink that is not among those in use.
fn unused(in_use: &BTreeSet<u32>, own: u32) -> Option<u32> {
    let first = OURS.start + own % (OURS.end - OURS.start);
    (first..OURS.end).chain(OURS.start..first).find(|id| !in_use.contains(id))
}

/// The numbers of the users of all processes that we see.
fn in_use() -> BTreeSet<u32> {
    process::all().filter_map(process::user_ids).flatten().collect()
}

fn names_like(machine: &str) -> String {
    let others = machine.lines().filter(|line| {
        let first = line.split_whitespace().next();
        matches!(first, Some("search" | "domain" | "options" | "sortlist"))
    });
    let lines: Vec<&str> = others.collect();
    let mut text = format!("nameserver {NAME_SERVER}\n");
    lines.iter().for_each(|line| text.extend([*line, "\n"]));
    text
}

/// A running uplink. It ends when this is dropped.
#[derive(Debug)]
pub struct Uplink {
    shared: Arc<Shared>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    program: PathBuf,
    network: Owned,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    running: Option<Arc<Child>>,
    over: bool,
}

/// An uplink that is ready, and the pipe with its messages, which closes when it ends.
struct Ready {
    child: Arc<Child>,
    words: File,
    since: Instant,
}

impl Uplink {
    /// Starts one for this network of `Plan::network`, and waits until it is ready.
    ///
    /// # Errors
    /// When it does not start, or is not ready in time.
    pub(crate) fn start(plan: &Plan, network: Owned) -> Result<Uplink, Error> {
        let program = plan.program.clone();
        let shared = Arc::new(Shared { program, network, state: Mutex::default(), over: Condvar::new() });
        let first = shared.begin()?;
        let kept = Arc::clone(&shared);
        let keeper = std::thread::Builder::new().name("uplink".into()).spawn(move || kept.keep(first));
        match keeper {
            Ok(keeper) => Ok(Uplink { shared, keeper: Mutex::new(Some(keeper)) }),
            Err(error) => {
                shared.finish();
                if let Some(child) = shared.state().running.take() {
                    let _ = child.wait();
                }
                Err(Error::Reach(error))
            }
        }
    }

    /// Ends it, and waits until it is gone.
    pub(crate) fn stop(&self) {
        self.shared.finish();
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(keeper) = keeper {
            let _ = keeper.join();
        }
    }
}

impl Drop for Uplink {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish(&self) {
        let mut state = self.state();
        state.over = true;
        if let Some(child) = &state.running {
            let _ = child.signal(libc::SIGKILL);
        }
        drop(state);
        self.over.notify_all();
    }

    /// Starts it, unless the uplink was stopped.
    fn begin(&self) -> Result<Ready, Error> {
        let pipe = || nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| Error::Reach(e.into()));
        let (ready, ready_end) = pipe()?;
        let (words, words_end) = pipe()?;
        let network = self.network.network.try_clone().map_err(Error::Reach)?;
        let owner = self.network.user.try_clone().map_err(Error::Reach)?;
        let copy = words_end.try_clone().map_err(Error::Reach)?;
        let args = [
            "--configure",
            // Otherwise the job could reach services on the machine's loopback device that trust every local client.
            "--disable-host-loopback",
            "--enable-seccomp",
            // The largest possible value: fewer, larger packets are faster.
            "--mtu=65520",
            "--ready-fd=3",
            "--userns-path=/proc/self/fd/5",
            "--netns-type=path",
            "/proc/self/fd/4",
            "tap0",
        ];
        let null = Open { fd: 0, path: c"/dev/null".into(), flags: libc::O_RDONLY, expect: None };
        let spawn = Spawn::new(&self.program, args)?.session().directory(Path::new("/"))?;
        let spawn = spawn.open(null).fd(copy, 1).fd(words_end, 2).fd(ready_end, 3).fd(network, 4).fd(owner, 5);
        let spawn =
            spawn.environment::<&str, &str>([])?.identity(self.network.owner, self.network.owner).no_new_privileges();
        // On most machines /dev/net/tun is open to everybody; it grants no right by itself.
        let spawn = if is_open_to_all(Path::new(DEVICE)) { spawn } else { spawn.own_tun(&staging_mounts())? };
        let spawn = spawn.dies_with_us();
        let mut state = self.state();
        if state.over {
            return Err(Error::Reach(io::ErrorKind::Interrupted.into()));
        }
        let child = Arc::new(spawn.start()?);
        state.running = Some(Arc::clone(&child));
        drop(state);
        let words = File::from(words);
        let in_time = wait_readable(&ready, READY).unwrap_or(false);
        // No byte means that the pipe was closed.
        if in_time && File::from(ready).read(&mut [0]).is_ok_and(|count| count > 0) {
            return Ok(Ready { child, words, since: Instant::now() });
        }
        if !in_time {
            let _ = child.signal(libc::SIGKILL);
        }
        let (how, said) = self.bury(&child, words);
        Err(if in_time { Error::Ended { how, said } } else { Error::Late { said } })
    }

    /// Waits for its end; returns how it ended, and the last line it wrote.
    fn bury(&self, child: &Child, mut words: File) -> (String, String) {
        let said = last_words(&mut words);
        // Reaped with the lock held, so that no signal goes to its pid afterwards.
        let ended = child.wait_for_end().and_then(|()| {
            let mut state = self.state();
            state.running = None;
            child.wait()
        });
        (ended.map_or_else(|error| error.to_string(), |ended: Ended| ended.to_string()), said)
    }

    /// Starts it again whenever it ends, until the uplink is stopped.
    fn keep(&self, first: Ready) {
        let mut current = Some(first);
        let mut pause = Duration::ZERO;
        loop {
            if let Some(ready) = current.take() {
                let steady = ready.since;
                let (how, said) = self.bury(&ready.child, ready.words);
                if self.state().over {
                    return;
                }
                pause = if steady.elapsed() >= STEADY { Duration::ZERO } else { pause };
                tracing::warn!(
                    "the job's uplink died ({how}){}: its connections to the outside are lost; starting it again",
                    quoted(&said)
                );
            }
            let wait = |state: &mut State| !state.over;
            let (state, _) =
                self.over.wait_timeout_while(self.state(), pause, wait).unwrap_or_else(PoisonError::into_inner);
            if state.over {
                return;
            }
            drop(state);
            pause = (pause * 2).clamp(PAUSE, LONGEST_PAUSE);
            match self.begin() {
                Ok(ready) => {
                    tracing::info!("the job's uplink works again");
                    current = Some(ready);
                }
                Err(_) if self.state().over => return,
                Err(error) => tracing::warn!(
                    "cannot start the job's uplink; trying again in {}: {}",
                    humantime::format_duration(pause),
                    chain(&error)
                ),
            }
        }
    }
}

fn is_open_to_all(device: &Path) -> bool {
    std::fs::metadata(device).is_ok_and(|metadata| metadata.permissions().mode() & 0o006 == 0o006)
}

/// Mount points of images in memory, of this job and of others.
fn staging_mounts() -> Vec<PathBuf> {
    staging_mounts_of(mounts::of("self").unwrap_or_default())
}

fn staging_mounts_of(mounts: Vec<Mount>) -> Vec<PathBuf> {
    let is_ours = |mount: &Mount| mount.kind == "tmpfs" && mount.source == staging::SOURCE;
    mounts.into_iter().filter(is_ours).map(|mount| mount.point).collect()
}

fn wait_readable(fd: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
        match poll(&mut fds, PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)) {
            Ok(count) => return Ok(count > 0),
            Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Reads until the pipe closes, and returns the last line that is not a usual message.
fn last_words(words: &mut File) -> String {
    /// No line of slirp4netns is longer.
    const KEPT: usize = 1024;
    let (mut buffer, mut kept) = ([0; KEPT], Vec::new());
    loop {
        match words.read(&mut buffer) {
            Ok(0) => break,
            Ok(count) => {
                kept.extend_from_slice(buffer.get(..count).unwrap_or_default());
                kept.drain(..kept.len().saturating_sub(KEPT));
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let text = String::from_utf8_lossy(&kept);
    // Messages of normal operation.
    let usual = ["sent tapfd", "received tapfd", "WARNING: Support for seccomp"];
    let line = text.lines().rfind(|line| !line.trim().is_empty() && !usual.iter().any(|start| line.starts_with(start)));
    line.unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_asked_for_at_the_uplink_and_searched_as_on_the_machine() {
        let machine = "# by hand\nnameserver 127.0.0.53\nnameserver 10.1.1.1\noptions edns0 trust-ad\nsearch a.example b.example\n";
        let expected = "nameserver 10.0.2.3\noptions edns0 trust-ad\nsearch a.example b.example\n";
        assert_eq!(names_like(machine), expected);
        assert_eq!(names_like(""), "nameserver 10.0.2.3\n");
    }

    #[test]
    fn the_last_words_are_those_that_say_something() {
        let said = |text: &str| {
            let (end, start) = nix::unistd::pipe().unwrap();
            io::Write::write_all(&mut File::from(start), text.as_bytes()).unwrap();
            last_words(&mut File::from(end))
        };
        assert_eq!(
            said("sent tapfd=5 for tap0\nopen(\"/dev/net/tun\"): No such device\nreceived tapfd=5\n\n"),
            "open(\"/dev/net/tun\"): No such device"
        );
        assert_eq!(said(&("x".repeat(3000) + "\nend\n")), "end");
        assert_eq!(said(""), "");
    }

    #[test]
    fn images_in_memory_are_found_by_their_name() {
        let table = b"30 25 0:27 / /dev/shm rw,relatime - tmpfs tmpfs rw,size=24684096k\n\
                     50 25 0:40 / /run/rekindle/a\\040b-1 rw,nosuid shared:7 - tmpfs rekindle rw,size=4k\n\
                     51 25 0:41 / /home/rekindle rw - ext4 rekindle rw\n";
        assert_eq!(staging_mounts_of(mounts::parse(table)), [Path::new("/run/rekindle/a b-1")]);
    }

    /// A process of the same user could trace slirp4netns and enter the job's network.
    #[test]
    fn the_network_of_a_job_belongs_to_a_user_of_its_own() {
        if !rekindle_testing::root() {
            return;
        }
        let network = || Plan::new("/bin/true".into(), "/".into(), None).network().unwrap();
        let first = network();
        if !rekindle_os::rights::over_the_machine() {
            assert_eq!(first.owner, NOBODY);
            return;
        }
        assert!(OURS.contains(&first.owner), "{}", first.owner);
        let sleep = Spawn::new(Path::new("/bin/sleep"), ["60"]).unwrap().environment::<&str, &str>([]).unwrap();
        let other = sleep.identity(first.owner, first.owner).dies_with_us().start().unwrap();
        assert_ne!(network().owner, first.owner, "another process has that id");
        other.signal(libc::SIGKILL).unwrap();
        let _ = other.wait();
    }

    #[test]
    fn numbers_of_other_processes_are_passed_over() {
        let used = |ids: &[u32]| ids.iter().map(|id| OURS.start + id).collect::<BTreeSet<_>>();
        assert_eq!(unused(&used(&[]), 7), Some(OURS.start + 7));
        assert_eq!(unused(&used(&[7, 8]), 7), Some(OURS.start + 9));
        let last = OURS.end - OURS.start - 1;
        assert_eq!(unused(&used(&[last]), last), Some(OURS.start));
    }

    #[test]
    fn one_that_can_not_start_says_why() {
        if !rekindle_testing::root() {
            return;
        }
        let namespace = |name: &str| File::open(format!("/proc/self/ns/{name}")).unwrap().into();
        let shared = |program: &str| Shared {
            program: program.into(),
            network: Owned { user: namespace("user"), network: namespace("net"), owner: NOBODY },
            state: Mutex::default(),
            over: Condvar::new(),
        };
        let failed = |program: &str| shared(program).begin().map(drop).unwrap_err().to_string();
        assert_eq!(failed("/bin/false"), "slirp4netns ended at once (exit code 1)");
        assert!(failed("/nowhere/slirp4netns").contains("execve"), "{}", failed("/nowhere/slirp4netns"));
        let ended = shared("/bin/false");
        ended.finish();
        assert!(matches!(ended.begin(), Err(Error::Reach(_))), "none is started once it is over");
    }
}

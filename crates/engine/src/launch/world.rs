//! The namespaces that a job runs in: PID and mount namespaces under an init of ours.
//!
//! Layout. The supervisor is outside. `init` is pid 1 of the namespaces and in no image. The `reaper` (pid 1000) is a
//! child of the supervisor, created inside the namespaces, and the root of every image; the job (pid 1001) is its
//! child. CRIU runs in the same namespaces as pid 2, also started by the supervisor. The job also has its own IPC
//! namespace, which CRIU does not enter: it is in the image, with its System V objects. If configured, the job and CRIU
//! are in a network namespace of init's, with a loopback device and at most an [uplink]. That namespace is in no image:
//! each restore finds all ports free.
//!
//! So:
//! - Neither the PID nor the mount namespace is part of an image: a restore does not depend on mounts that appeared or
//!   disappeared since, on this machine or another. (The alternative, to dump init from outside, was tried: CRIU then
//!   saves and recreates the whole mount table.)
//! - If the supervisor dies, even during a restore, the kernel kills init and with it every process of the namespace:
//!   the job, CRIU, half-restored tasks. Nothing runs unsupervised.
//! - Daemons that the job leaves behind become children of the reaper and are in the image.
//! - The supervisor waits for the end of the job in the same manner after a start and after a restore.

use std::ffi::OsString;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::sched::CloneFlags;

use super::group::{self, Cable};
use super::mounted::{Before, Mounted};
use super::uplink::{self, Uplink};
use rekindle_os::fence::Fence;
use rekindle_os::process;
use rekindle_os::spawn::{self, Child, Ended, Spawn};

/// The reaper's pid in a new world. CRIU and its helpers need numbers of their own at a restore; the kernel never goes
/// below 300 again once it has counted past that (`RESERVED_PIDS`), so what lies below stays free.
pub const FIRST_PID: i32 = 1000;

/// The network that a job sees.
#[derive(Debug, Clone, Copy)]
pub enum Network<'a> {
    /// The supervisor's network.
    Host,
    /// Only a loopback device of its own.
    Private,
    /// A loopback device of its own, and a connection to the outside.
    Uplink(&'a uplink::Plan),
    /// A loopback device of its own, a connection to the other nodes of a group, and at most one to the outside. Init
    /// ends the job at the moment of the fence.
    Group(&'a group::Plan, Option<&'a uplink::Plan>, Option<&'a Arc<Fence>>),
}

impl<'a> Network<'a> {
    fn uplink(self) -> Option<&'a uplink::Plan> {
        match self {
            Network::Uplink(plan) => Some(plan),
            Network::Group(_, uplink, _) => uplink,
            Network::Host | Network::Private => None,
        }
    }

    fn fence(self) -> Option<&'a Arc<Fence>> {
        if let Network::Group(_, _, fence) = self { fence } else { None }
    }

    fn group(self) -> Option<&'a group::Plan> {
        match self {
            Network::Group(plan, ..) => Some(plan),
            _ => None,
        }
    }
}

/// The namespaces that a job runs in.
#[derive(Debug)]
pub struct World {
    init: Child,
    /// The connection to the outside, if there is one.
    uplink: Option<Uplink>,
    /// The connection to the group, if there is one, and the group's addresses.
    group: Option<(group::Subnet, Cable)>,
    /// When init ends the job.
    fence: Option<Arc<Fence>>,
    /// What was mounted before the job ran, if the kernel tells it.
    mounts: Option<Before>,
}

/// Why a world could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Init did not start.
    #[error("cannot create the job's namespaces: run rekindle as root in the initial user namespace")]
    Start(#[from] spawn::Error),
    /// Init could not prepare the namespaces.
    #[error("cannot prepare the job's namespaces: {step} failed")]
    Prepare {
        /// What failed.
        step: &'static str,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// There is no connection to the outside.
    #[error("cannot connect the job's network to the outside")]
    Uplink(#[from] uplink::Error),
    /// There is no connection to the group.
    #[error("cannot connect the job's network to the group")]
    Group(#[from] group::Error),
    /// There is no time at which init ends the job.
    #[error("cannot set the time at which the job's init ends the job")]
    Fence(#[source] io::Error),
    /// The pipe to init failed.
    #[error("cannot communicate with the job's init")]
    Talk(#[source] io::Error),
}

impl World {
    /// Makes new namespaces in which the next pid is above `last_pid`.
    ///
    /// # Errors
    /// When the kernel does not allow namespaces, /proc cannot be mounted, or a configured uplink cannot be started.
    pub fn new(reaper: &Path, last_pid: i32, network: Network<'_>) -> Result<World, Error> {
        let (flags, loopback) = match network {
            Network::Host => (CloneFlags::empty(), "-"),
            Network::Private | Network::Group(_, None, _) => (CloneFlags::CLONE_NEWNET, "l"),
            Network::Uplink(_) | Network::Group(_, Some(_), _) => (CloneFlags::empty(), "l"),
        };
        let (ready, ready_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(|e| Error::Talk(e.into()))?;
        let mut owned = None;
        let mut args: Vec<OsString> =
            ["init".to_string(), last_pid.to_string(), READY_FD.to_string(), loopback.to_string()]
                .map(Into::into)
                .into();
        args.push(network.uplink().map_or_else(|| Ok("-".into()), uplink::Plan::names)?.into());
        args.push(network.group().map_or_else(|| Ok("-".into()), group::Plan::hosts)?.into());
        let fence = network.fence().cloned();
        args.push(fence.as_ref().map_or_else(|| "-".into(), |_| FENCE_FD.to_string()).into());
        if let Some(plan) = network.uplink() {
            owned = Some((plan, plan.network()?));
        }
        let mut spawn = Spawn::new(reaper, args)?.environment::<&str, &str>([])?;
        if let Some((_, owned)) = &owned {
            spawn = spawn.network(owned.network.try_clone().map_err(Error::Talk)?);
        }
        let world = spawn::World::New(CloneFlags::CLONE_NEWIPC | flags);
        if let Some(fence) = &fence {
            spawn = spawn.fd(fence.timer().map_err(Error::Fence)?, FENCE_FD);
        }
        let init = spawn.world(world).session().directory(Path::new("/"))?.fd(ready_end, READY_FD).start()?;
        let mut report = [0u8; 2];
        let read = io::Read::read_exact(&mut std::fs::File::from(ready), &mut report);
        let failed = match (read, report) {
            (Ok(()), [b'o', b'k']) => match connect(network, &init, owned) {
                Ok((uplink, group)) => {
                    let mounts = Before::look(init.pid()).ok();
                    return Ok(World { init, uplink, group, fence, mounts });
                }
                Err(error) => error,
            },
            (Ok(()), [step, errno]) => {
                let step = match step {
                    b'd' => "the parent-death signal",
                    b's' => "setting mount propagation",
                    b'p' => "mounting /proc",
                    b'n' => "bringing up the loopback device",
                    b'r' => "mounting a file over /etc/resolv.conf",
                    b'h' => "mounting a file over /etc/hosts",
                    _ => "setting the next pid",
                };
                Error::Prepare { step, source: io::Error::from_raw_os_error(i32::from(errno)) }
            }
            (Err(source), _) => Error::Talk(source),
        };
        World { init, uplink: None, group: None, fence: None, mounts: None }.end(None);
        Err(failed)
    }

    /// The init of the namespaces.
    #[must_use]
    pub fn init(&self) -> &Child {
        &self.init
    }

    /// What the job of this world, with these processes, has mounted in it.
    #[must_use]
    pub fn mounted(&self, tree: &[i32]) -> Option<Mounted> {
        self.mounts.as_ref()?.since(tree)
    }

    /// Whether the moment has passed at which init ends the job.
    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fence.as_ref().is_some_and(|fence| fence.is_over())
    }

    /// The connection to the group.
    #[must_use]
    pub fn cable(&self) -> Option<&Cable> {
        self.group.as_ref().map(|(_, cable)| cable)
    }

    /// The addresses of the group: connections between two of them are kept in images.
    #[must_use]
    pub fn subnet(&self) -> Option<group::Subnet> {
        self.group.as_ref().map(|(subnet, _)| *subnet)
    }

    /// What is needed to create a child process in this world.
    ///
    /// # Errors
    /// When descriptors run out.
    pub fn entrance(&self) -> io::Result<spawn::World> {
        self.init.entrance(CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWNET)
    }

    /// Kills everything in this world. Safe to call while a restore is failing.
    pub fn kill(&self) {
        let _ = self.init.signal(libc::SIGKILL);
    }

    /// Kills and reaps everything, the root first: a dying init waits for the zombies that have their parent outside of
    /// the namespace (`zap_pid_ns_processes`). Returns how the root ended.
    pub fn end(&self, root: Option<&Child>) -> Option<Ended> {
        self.end_with(root, REPORTED_AFTER, &mut |remain| tracing::warn!("{remain}"))
    }

    /// The same. After `patience`, and from time to time after that, tells which processes remain.
    fn end_with(&self, root: Option<&Child>, patience: Duration, tell: &mut dyn FnMut(String)) -> Option<Ended> {
        let asked = std::time::Instant::now();
        let mut due = patience;
        let mut tell_if_due = |below: &Child| {
            if asked.elapsed() >= due {
                due = asked.elapsed() + patience.max(REPORTED_EVERY);
                remaining(&process::tree(below.pid()), asked.elapsed()).into_iter().for_each(&mut *tell);
            }
        };
        self.kill();
        let mut ended = None;
        if let Some(root) = root {
            while !ends_within(root, LOOK) {
                tell_if_due(root);
            }
            ended = root.wait().ok();
        }
        spawn::reap_strays();
        if let Some(uplink) = &self.uplink {
            uplink.stop();
        }
        // Processes of a failed restore are our children too, and some are still dying. Each has to be reaped:
        // otherwise init waits for it for ever, and we wait for init.
        let mut thawed = std::time::Instant::now();
        while !ends_within(&self.init, Duration::from_millis(10)) {
            spawn::reap_strays();
            if thawed.elapsed() >= THAW_AFTER {
                thaw(&self.init);
                thawed = std::time::Instant::now();
            }
            tell_if_due(&self.init);
        }
        // The namespace is empty when this returns.
        let _ = self.init.wait();
        ended
    }
}

type Connected = (Option<Uplink>, Option<(group::Subnet, Cable)>);

/// Connects the network of a world that is ready.
fn connect(
    network: Network<'_>,
    init: &Child,
    owned: Option<(&uplink::Plan, rekindle_os::netns::Owned)>,
) -> Result<Connected, Error> {
    let join = |plan: &group::Plan| -> Result<_, Error> {
        let job = std::fs::File::open(format!("/proc/{}/ns/net", init.pid())).map_err(Error::Talk)?;
        Ok((plan.subnet, plan.join(std::os::fd::AsFd::as_fd(&job))?))
    };
    let group = network.group().map(join).transpose()?;
    let uplink = owned.map(|(plan, owned)| Uplink::start(plan, owned)).transpose()?;
    Ok((uplink, group))
}

/// The descriptor number of the ready pipe in init, and of the fence's timer.
const READY_FD: i32 = 3;
const FENCE_FD: i32 = 4;

/// Killed processes that are not gone after this time may be in a frozen group.
const THAW_AFTER: Duration = Duration::from_millis(500);

/// Killed processes that are not gone after this time are reported, and how often again.
const REPORTED_AFTER: Duration = Duration::from_secs(30);
const REPORTED_EVERY: Duration = Duration::from_secs(600);

/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// What a user is told of killed processes of a job that have not ended; `None` if there are none.
fn remaining(pids: &[i32], since: Duration) -> Option<String> {
    /// How many of them are named.
    const NAMED: usize = 5;
    let shown = |pid: &i32| {
        let state = process::state(*pid).filter(|state| !matches!(state, 'Z' | 'X'))?;
        let place = process::text(*pid, "wchan").ok().filter(|place| !matches!(place.as_str(), "" | "0"));
        let place = place.map(|place| format!(" in {place}")).unwrap_or_default();
        Some(format!("{pid} ({}, state {state}{place})", process::name(*pid).unwrap_or_default()))
    };
    // Init, or the reaper, only waits for the others.
    let below: Vec<String> = pids.iter().skip(1).filter_map(shown).collect();
    let all = if below.is_empty() { pids.iter().filter_map(shown).collect() } else { below };
    let (named, more) = all.split_at(all.len().min(NAMED));
    let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
    (!named.is_empty()).then(|| {
        format!(
            "the job was killed {} ago, and these processes have not ended: {}{more}. A process in state D waits in the kernel \
             for a disk, a network file system or a driver; `dmesg` may say more. rekindle waits for their end",
            humantime::format_duration(Duration::from_secs(since.as_secs())),
            named.join(", ")
        )
    })
}

/// Lets killed processes below this one end that the job itself has frozen (the freezer of cgroup v1).
fn thaw(root: &Child) {
    match rekindle_os::cgroup::thaw(&process::tree(root.pid())) {
        Ok(0) => {}
        Ok(thawed) => tracing::info!(thawed, "thawed control groups of the job, so that killed processes can end"),
        Err(error) => {
            tracing::warn!("cannot thaw control groups of the job, so killed processes in them remain: {error}")
        }
    }
}

/// Kills a process and all below it.
pub(crate) fn kill_tree(root: i32) {
    for pid in process::tree(root) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
    }
}

fn ends_within(child: &Child, limit: Duration) -> bool {
    let deadline = std::time::Instant::now() + limit;
    while std::time::Instant::now() < deadline {
        if child.has_ended().unwrap_or(true) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    false
}

/// The `last_pid` of a world in which these pids are restored: the start of the largest gap, so that neither CRIU's
/// helpers nor the job's next children get a pid of the image.
#[must_use]
pub fn last_pid_for(taken: &[i32]) -> i32 {
    largest_gap(taken, limit_for(taken, pid_max()))
}

/// Since kernel 6.14 each PID namespace has its own limit, initially the highest possible one (`create_pid_namespace`).
/// Before, the machine's limit applies to all.
fn limit_for(taken: &[i32], machine: i32) -> i32 {
    /// `PID_MAX_LIMIT`.
    const HIGHEST: i32 = 4 << 20;
    if taken.iter().any(|pid| *pid >= machine) { HIGHEST } else { machine }
}

fn pid_max() -> i32 {
    read_pid_max().unwrap_or(32768)
}

/// The limit of our own PID namespace.
pub(crate) fn read_pid_max() -> Option<i32> {
    std::fs::read_to_string("/proc/sys/kernel/pid_max").ok()?.trim().parse().ok()
}

fn largest_gap(taken: &[i32], limit: i32) -> i32 {
    let mut sorted: Vec<i32> = taken.iter().copied().filter(|pid| *pid >= FIRST_PID).collect();
    sorted.sort_unstable();
    let starts = [FIRST_PID - 1].into_iter().chain(sorted.iter().copied());
    let ends = sorted.iter().copied().chain([limit]);
    starts.zip(ends).max_by_key(|(start, end)| end - start).map_or(FIRST_PID - 1, |(start, _)| start)
}

#[cfg(test)]
mod tests;

//! How processes that are not our children ended.
//!
//! There are three sources. Each is used if the ones before it do not know:
//!
//! | source | needs | tells |
//! |---|---|---|
//! | `PIDFD_GET_INFO` | Linux 6.14 | how a process ended, after its parent has waited for it |
//! | /proc/PID/stat | root | how a process ended, before its parent waits for it |
//! | the process events (`cn_proc`) | CAP_NET_ADMIN in the first namespaces | each fork, exec and end on the machine, when it happens |
#![allow(unsafe_code, reason = "calls of the kernel; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::process;
use super::spawn::Ended;

/// `struct pidfd_info`, as of its first version (include/uapi/linux/pidfd.h). A newer kernel accepts it.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup: u64,
    /// pid, tgid, ppid, then eight user and group ids.
    ids: [u32; 11],
    exit_code: i32,
}

/// `PIDFD_INFO_EXIT`.
const INFO_EXIT: u64 = 1 << 3;
/// `_IOWR(PIDFS_IOCTL_MAGIC, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: libc::Ioctl = 0xC040_FF0B;

fn of_status(status: i32) -> Ended {
    match status & 0x7f {
        0 => Ended::Exit(status >> 8 & 0xff),
        signal => Ended::Signal(signal),
    }
}

fn info(pidfd: BorrowedFd<'_>) -> Option<Ended> {
    let mut info = PidfdInfo { mask: INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the request reads and writes a struct of this size, which lives over the call.
    let done = unsafe { libc::ioctl(pidfd.as_raw_fd(), PIDFD_GET_INFO, &raw mut info) };
    (done == 0 && info.mask & INFO_EXIT != 0).then(|| of_status(info.exit_code))
}

/// How the process of this pidfd ended, once poll(2) reports its end. `pid` is its pid as we see it. None if that is no
/// longer known: before Linux 6.14, once its parent has waited for it.
#[must_use]
pub fn ended(pidfd: BorrowedFd<'_>, pid: i32) -> Option<Ended> {
    // The parent may wait for it between the first two.
    info(pidfd).or_else(|| process::ended(pid)).or_else(|| info(pidfd))
}

/// A process whose end will be noticed, however early it comes.
#[derive(Debug)]
pub struct Watched {
    /// Its pid as we see it.
    pub pid: i32,
    /// Its pid as it sees it.
    pub inner: i32,
    /// At most 15 bytes.
    pub name: String,
    /// Readable from its end on.
    pub pidfd: OwnedFd,
}

impl Watched {
    /// None if there is no such process, or no descriptor for it.
    #[must_use]
    pub fn open(pid: i32) -> Option<Watched> {
        // First, so that the others are not those of a later process with this pid, unless it has ended already.
        let pidfd = process::open_pidfd(pid).ok()?;
        Some(Watched { pid, inner: process::inner_pid(pid)?, name: process::name(pid)?, pidfd })
    }

    /// The processes below this one, as many as can be watched.
    #[must_use]
    pub fn below(root: i32) -> Vec<Watched> {
        Watched::of(&process::tree(root), root)
    }

    /// The processes of this tree without its root, as many as can be watched.
    #[must_use]
    pub fn of(tree: &[i32], root: i32) -> Vec<Watched> {
        let below = tree.iter().copied().filter(|pid| *pid != root);
        below.filter_map(Watched::open).take(MOST_WATCHED).collect()
    }
}

/// The most processes that are watched by a descriptor each: the supervisor may have 1024, and needs some for other
/// purposes.
pub const MOST_WATCHED: usize = 256;

/// Whether [`ended`] works for every process, by the version of the kernel.
#[must_use]
pub fn always_told() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|text| text.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(14))
}

/// Waits until one of these can be read or has ended, at most `limit`. Returns which ones; none after the limit or a
/// signal.
///
/// # Errors
/// When the kernel refuses.
pub fn wait(fds: &[BorrowedFd<'_>], limit: Option<Duration>) -> io::Result<Vec<bool>> {
    let entry = |fd: &BorrowedFd<'_>| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let mut entries: Vec<libc::pollfd> = fds.iter().map(entry).collect();
    let limit = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
    let count = libc::nfds_t::try_from(entries.len()).map_err(io::Error::other)?;
    // SAFETY: the entries live over the call, and there are so many.
    let ready = unsafe { libc::poll(entries.as_mut_ptr(), count, limit) };
    if ready < 0 {
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
        return Ok(vec![false; fds.len()]);
    }
    Ok(entries.iter().map(|entry| entry.revents != 0).collect())
}

/// What happened to a process; pids are those of the first PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// It has a child that is a process.
    Forked {
        /// Its pid.
        parent: i32,
        /// The child's pid.
        child: i32,
    },
    /// It executes another program.
    Executed {
        /// Its pid.
        pid: i32,
    },
    /// One of its other threads ended by a signal that kills the whole process. Its end can take seconds more: the last
    /// thread gives back the memory and closes the descriptors.
    Dying {
        /// Its pid.
        pid: i32,
        /// The signal.
        signal: i32,
    },
    /// It ended, or its first thread did.
    Ended {
        /// Its pid.
        pid: i32,
        /// Its exit status.
        how: Ended,
    },
}

/// The kernel's process events.
#[derive(Debug)]
pub struct Events {
    socket: OwnedFd,
}

/// `CN_IDX_PROC` and `CN_VAL_PROC`.
const PROC: u32 = 1;
/// `PROC_CN_MCAST_LISTEN`.
const LISTEN: u32 = 1;
/// Of `struct nlmsghdr` and `struct cn_msg`.
const NETLINK_HEADER: usize = 16;
const HEADERS: usize = NETLINK_HEADER + 20;
/// The data of an event: after `what`, `cpu` and `timestamp_ns`.
const DATA: usize = 16;
const NONE: u32 = 0;
const FORK: u32 = 1;
const EXEC: u32 = 2;
const EXIT: u32 = 0x8000_0000;
/// Time limit for the kernel's answer, which it sends while it receives the request.
const ANSWER: Duration = Duration::from_millis(200);
/// Bytes that may wait to be read: a burst of some ten thousand events.
const WAITING: libc::c_int = 4 << 20;

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

impl Events {
    /// Subscribes to all events of the machine.
    ///
    /// # Errors
    /// Without the right (CAP_NET_ADMIN), in a PID, user or network namespace that is not the first, or without
    /// CONFIG_PROC_EVENTS in the kernel.
    pub fn listen() -> io::Result<Events> {
        let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        // SAFETY: a system call on numbers.
        let fd = checked(unsafe { libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_CONNECTOR) })?;
        // SAFETY: the kernel returned a new descriptor, which has no other owner.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let size = |of: usize| libc::socklen_t::try_from(of).map_err(io::Error::other);
        let (room, room_size) = (WAITING, size(size_of::<libc::c_int>())?);
        // A failure does no harm: the size may be above the limit.
        // SAFETY: a number that lives over the call, with its size.
        unsafe { libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, (&raw const room).cast(), room_size) };
        // SAFETY: sockaddr_nl is plain numbers, for which all zeroes is valid.
        let mut address: libc::sockaddr_nl = unsafe { std::mem::zeroed() };
        address.nl_family = libc::sa_family_t::try_from(libc::AF_NETLINK).map_err(io::Error::other)?;
        address.nl_groups = PROC;
        let address_size = size(size_of::<libc::sockaddr_nl>())?;
        // SAFETY: the address lives over the call, and has this size.
        checked(unsafe { libc::bind(fd, (&raw const address).cast(), address_size) })?;
        let events = Events { socket };
        events.ask()?;
        Ok(events)
    }

    /// Requests the events. Outside the first namespaces the kernel does not even answer.
    fn ask(&self) -> io::Result<()> {
        let mut message = Vec::with_capacity(HEADERS + 4);
        let length = u32::try_from(HEADERS + 4).map_err(io::Error::other)?;
        // nlmsghdr: length, type and flags, sequence, port.
        for word in [length, libc::NLMSG_DONE.cast_unsigned(), 0, 0] {
            message.extend(word.to_ne_bytes());
        }
        // cn_msg: idx, val, seq, ack, then the length of the data and flags.
        for word in [PROC, PROC, 0, 0, 4, LISTEN] {
            message.extend(word.to_ne_bytes());
        }
        // SAFETY: the message lives over the call, and has this length.
        let sent = unsafe { libc::send(self.socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) };
        if sent < 0 {
            return Err(io::Error::last_os_error());
        }
        let mut buffer = [0; 8192];
        while wait(&[self.socket.as_fd()], Some(ANSWER))?.contains(&true) {
            let received = self.receive(&mut buffer)?;
            // The answer has the error. Events may arrive before it.
            match what(received) {
                Some((NONE, data)) => {
                    return match word(data, 0) {
                        Some(0) => Ok(()),
                        error => Err(io::Error::from_raw_os_error(error.unwrap_or_default().cast_signed())),
                    };
                }
                Some(_) => return Ok(()),
                None => {}
            }
        }
        Err(io::ErrorKind::TimedOut.into())
    }

    fn receive<'a>(&self, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
        // SAFETY: the kernel writes no more than the buffer has, which lives over the call.
        let got = unsafe { libc::recv(self.socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        Ok(buffer.get(..got).unwrap_or_default())
    }

    /// The descriptor, for [`wait`].
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Reads the waiting events. Events are lost if too many wait.
    pub fn read(&self) -> Vec<Event> {
        let (mut events, mut buffer) = (Vec::new(), [0; 8192]);
        loop {
            match self.receive(&mut buffer) {
                Ok(message) => events.extend(event(message)),
                // Events that did not fit are lost; later ones are there.
                Err(error) if matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EINTR)) => {}
                Err(_) => return events,
            }
        }
    }
}

fn word(data: &[u8], at: usize) -> Option<u32> {
    let bytes = data.get(at * 4..at * 4 + 4)?;
    Some(u32::from_ne_bytes(bytes.try_into().ok()?))
}

/// The kind of an event, and its data.
fn what(message: &[u8]) -> Option<(u32, &[u8])> {
    let event = message.get(HEADERS..)?;
    Some((word(event, 0)?, event.get(DATA..)?))
}

/// The event in a message, if it is about a process and not only about a thread.
fn event(message: &[u8]) -> Option<Event> {
    let (what, data) = what(message)?;
    let pid = |at| Some(word(data, at)?.cast_signed());
    match what {
        // Thread and process of the parent, then of the child.
        FORK if pid(2)? == pid(3)? => Some(Event::Forked { parent: pid(1)?, child: pid(3)? }),
        EXEC => Some(Event::Executed { pid: pid(1)? }),
        EXIT if pid(0)? == pid(1)? => Some(Event::Ended { pid: pid(1)?, how: of_status(pid(2)?) }),
        EXIT => match of_status(pid(2)?) {
            Ended::Signal(signal) => Some(Event::Dying { pid: pid(1)?, signal }),
            Ended::Exit(_) => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};
    use std::time::Instant;

    fn sleeper() -> Child {
        Command::new("sleep").arg("60").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn a_death_shows_before_and_after_it_is_waited_for() {
        if !rekindle_testing::root() {
            return;
        }
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        let pidfd = process::open_pidfd(pid).unwrap();
        assert_eq!(wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap(), [false]);
        assert_eq!(ended(pidfd.as_fd(), pid), None, "it lives");
        child.kill().unwrap();
        assert_eq!(wait(&[pidfd.as_fd()], Some(Duration::from_secs(5))).unwrap(), [true]);
        assert_eq!(ended(pidfd.as_fd(), pid), Some(Ended::Signal(libc::SIGKILL)));
        child.wait().unwrap();
        if always_told() {
            assert_eq!(ended(pidfd.as_fd(), pid), Some(Ended::Signal(libc::SIGKILL)), "it was waited for");
        }
    }

    #[test]
    fn the_kernel_tells_of_forks_and_ends() {
        if !rekindle_testing::root() {
            return;
        }
        let found = Events::listen();
        let why = format!("there are no process events here: {found:?}");
        let Some(events) = rekindle_testing::needs("events", found.ok(), &why) else { return };
        let mut child = sleeper();
        let pid = child.id().cast_signed();
        child.kill().unwrap();
        child.wait().unwrap();
        let (mut seen, begun) = (Vec::new(), Instant::now());
        let end = Event::Ended { pid, how: Ended::Signal(libc::SIGKILL) };
        while !seen.contains(&end) {
            assert!(begun.elapsed() < Duration::from_secs(5), "{seen:?}");
            wait(&[events.descriptor()], Some(Duration::from_secs(1))).unwrap();
            seen.extend(events.read());
        }
        let parent = std::process::id().cast_signed();
        assert!(seen.contains(&Event::Forked { parent, child: pid }), "{seen:?}");
    }

    #[test]
    fn threads_and_what_is_cut_off_are_no_processes() {
        let message = |words: &[u32]| {
            let bytes = words.iter().flat_map(|word| word.to_ne_bytes());
            vec![0; HEADERS].into_iter().chain(bytes).collect::<Vec<u8>>()
        };
        let exit = |thread, process, status| message(&[EXIT, 0, 0, 0, thread, process, status, 17]);
        assert_eq!(event(&exit(7, 7, 9)), Some(Event::Ended { pid: 7, how: Ended::Signal(9) }));
        assert_eq!(event(&exit(8, 7, 9)), Some(Event::Dying { pid: 7, signal: 9 }));
        assert_eq!(event(&exit(8, 7, 0x300)), None, "a thread that ends by itself");
        assert_eq!(event(&message(&[FORK, 0, 0, 0, 1, 1, 9, 9])), Some(Event::Forked { parent: 1, child: 9 }));
        assert_eq!(event(&message(&[FORK, 0, 0, 0, 1, 1, 9, 1])), None);
        let whole = exit(7, 7, 9);
        assert!((0..whole.len() - 8).all(|length| event(&whole[..length]).is_none()));
        assert_eq!(of_status(0x300), Ended::Exit(3));
    }
}

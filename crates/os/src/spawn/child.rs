//! The child's side of a spawn, between clone and exec.
//!
//! Nothing here may allocate or lock: the process was forked from one with other threads, whose locks stay locked in
//! the copy. [`Plan::new`] prepares everything before the fork.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::{Open, Spawn, World};

/// The steps of the child, by the number it reports when one fails.
const STEPS: [&str; 13] = [
    "entering the namespaces",
    "starting a session",
    "changing to the working directory",
    "opening standard input or output",
    "placing a descriptor",
    "setting a resource limit",
    "closing other descriptors",
    "resetting signals",
    "execve",
    "setting the parent-death signal",
    "switching to another user",
    "setting no-new-privileges",
    "creating the tunnel device",
];

/// What the child writes to the report pipe when a step fails: its number, then errno.
pub(super) type Failure = [u8; 5];

/// The step in words, and the kernel's answer.
pub(super) fn explain(failure: Failure) -> (&'static str, io::Error) {
    let [step, errno @ ..] = failure;
    let step = STEPS.get(usize::from(step)).copied().unwrap_or("set-up");
    (step, io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
}

/// Descriptors are first lifted to this number or above, so that placing one never covers another that is still to be
/// placed. Low, because the caller's limit on open files may be (`ulimit -n 64`).
const LIFTED: RawFd = 16;
/// Maximum number of descriptors: their lifted numbers must be in memory that exists before the fork.
const MOST: usize = 8;

/// So long a program may be open for writing: two seconds, where a fork that is not slowed down is at its exec within a
/// millisecond.
const BUSY_TRIES: u32 = 400;
static BUSY_PAUSE: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Everything the child needs.
pub(super) struct Plan<'a> {
    spawn: &'a Spawn,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    moves: Vec<(RawFd, RawFd)>,
    report: RawFd,
}

impl<'a> Plan<'a> {
    /// Lays everything out. `report` is where a failure is written; it must close with exec.
    ///
    /// # Errors
    /// When more descriptors are given than can be placed, or under numbers where others wait to be placed.
    pub(super) fn new(spawn: &'a Spawn, report: RawFd) -> io::Result<Plan<'a>> {
        let pointers =
            |texts: &[CString]| texts.iter().map(|t| t.as_ptr()).chain([std::ptr::null()]).collect::<Vec<_>>();
        let moves: Vec<_> = spawn.fds.iter().map(|(from, to)| (from.as_raw_fd(), *to)).collect();
        let numbers = moves.iter().map(|(_, to)| *to).chain(spawn.opens.iter().map(|open| open.fd));
        if moves.len() > MOST || numbers.into_iter().any(|fd| !(0..LIFTED).contains(&fd)) {
            let text = format!("at most {MOST} descriptors can be given, below number {LIFTED}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        Ok(Plan { spawn, argv: pointers(&spawn.args), envp: pointers(&spawn.env), moves, report })
    }

    fn fail(&self, step: u8) -> ! {
        let [a, b, c, d] = io::Error::last_os_error().raw_os_error().unwrap_or(0).to_ne_bytes();
        let message: Failure = [step, a, b, c, d];
        // SAFETY: `message` is valid for its length.
        unsafe { libc::write(self.report, message.as_ptr().cast(), message.len()) };
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(125) }
    }

    fn check(&self, step: u8, result: libc::c_int) -> libc::c_int {
        if result < 0 {
            self.fail(step);
        }
        result
    }

    /// The child: becomes the program, or reports why not.
    pub(super) fn run(&mut self) -> ! {
        let spawn = self.spawn;
        if let World::Join(pidfd, also) = &spawn.world {
            // SAFETY: a system call on an open descriptor.
            self.check(0, unsafe { libc::setns(pidfd.as_raw_fd(), libc::CLONE_NEWNS | also.bits()) });
        }
        if let Some(network) = &spawn.network {
            // SAFETY: a system call on an open descriptor.
            self.check(0, unsafe { libc::setns(network.as_raw_fd(), libc::CLONE_NEWNET) });
        }
        if spawn.session {
            // SAFETY: no memory is involved.
            self.check(1, unsafe { libc::setsid() });
        }
        if let Some(directory) = &spawn.directory {
            // SAFETY: the text is NUL-terminated.
            self.check(2, unsafe { libc::chdir(directory.as_ptr()) });
        }
        let top = self.place_descriptors();
        if let Some(mask) = spawn.umask {
            // SAFETY: a system call on a number.
            unsafe { libc::umask(mask) };
        }
        for (resource, limit) in &spawn.limits {
            // SAFETY: `limit` is valid.
            self.check(5, unsafe { libc::setrlimit(*resource, limit) });
        }
        self.close_above(top);
        if let Some(without) = &spawn.own_tun {
            self.make_tun(without);
        }
        if let Some((user, group)) = spawn.identity {
            self.become_user(user, group);
        }
        if spawn.no_new_privileges {
            // SAFETY: a system call on numbers.
            self.check(11, unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) });
        }
        // After that: who becomes another user loses the signal (prctl(2)).
        if let Some(parent) = spawn.dies_with {
            // SAFETY: a system call on numbers.
            self.check(9, unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) });
            // SAFETY: a system call without arguments. A parent that is gone already sends no signal.
            if unsafe { libc::getppid() } != parent {
                self.fail(9);
            }
        }
        self.reset_signals();
        self.execute()
    }

    /// What is mounted and unmounted from here on stays in a namespace of the child's own; unmounting elsewhere comes here too,
    /// where the machine's mounts are shared (systemd has them so).
    fn make_tun(&self, without: &[CString]) {
        const STEP: u8 = 12;
        let none = std::ptr::null();
        // SAFETY: a system call on numbers.
        self.check(STEP, unsafe { libc::unshare(libc::CLONE_NEWNS) });
        let flags = libc::MS_REC | libc::MS_SLAVE;
        // SAFETY: the texts are NUL-terminated, and the others not wanted.
        self.check(STEP, unsafe { libc::mount(c"none".as_ptr(), c"/".as_ptr(), none, flags, none.cast()) });
        for mounted in without {
            // One that is gone by now is no matter.
            // SAFETY: the text is NUL-terminated.
            unsafe { libc::umount2(mounted.as_ptr(), libc::MNT_DETACH) };
        }
        let (folder, kind, options) = (c"/dev/net".as_ptr(), c"tmpfs".as_ptr(), c"mode=0755,size=4k".as_ptr().cast());
        let flags = libc::MS_NOSUID | libc::MS_NOEXEC;
        // SAFETY: the texts are NUL-terminated.
        self.check(STEP, unsafe { libc::mount(c"tun".as_ptr(), folder, kind, flags, options) });
        // Numbers of Documentation/admin-guide/devices.txt.
        let (path, device) = (c"/dev/net/tun".as_ptr(), libc::makedev(10, 200));
        // SAFETY: the text is NUL-terminated.
        self.check(STEP, unsafe { libc::mknod(path, libc::S_IFCHR | 0o666, device) });
        // By name, because of the umask.
        // SAFETY: the text is NUL-terminated.
        self.check(STEP, unsafe { libc::chmod(path, 0o666) });
    }

    /// By the kernel's own calls: those of the C library want to tell the other threads of a process (nptl(7)), which this
    /// copy does not have.
    fn become_user(&self, user: u32, group: u32) {
        let check = |result: libc::c_long| self.check(10, if result < 0 { -1 } else { 0 });
        // SAFETY: no groups are read.
        check(unsafe { libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<libc::gid_t>()) });
        // SAFETY: a system call on numbers.
        check(unsafe { libc::syscall(libc::SYS_setresgid, group, group, group) });
        // SAFETY: a system call on numbers.
        check(unsafe { libc::syscall(libc::SYS_setresuid, user, user, user) });
    }

    /// A program that was written a moment ago may be open for writing yet: not by who wrote it, but in a child that
    /// another thread forked at that moment, until that one gets to its own exec. The kernel refuses it as long.
    fn execute(&self) -> ! {
        for tries_left in (0..BUSY_TRIES).rev() {
            // SAFETY: argv and envp are null-terminated arrays of NUL-terminated texts that live in the copied memory.
            unsafe { libc::execve(self.spawn.program.as_ptr(), self.argv.as_ptr(), self.envp.as_ptr()) };
            if tries_left == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ETXTBSY) {
                break;
            }
            // SAFETY: the time is valid, what would be left of it is not wanted.
            unsafe { libc::nanosleep(&raw const BUSY_PAUSE, std::ptr::null_mut()) };
        }
        self.fail(8)
    }

    /// Opens and moves; returns the highest number in use.
    fn place_descriptors(&mut self) -> RawFd {
        let mut top: RawFd = 2;
        // The report pipe and all given descriptors are moved to high numbers first, so that the final numbers are
        // free.
        let mut lifted = [(0, 0); MOST];
        for (slot, (from, to)) in lifted.iter_mut().zip(&self.moves) {
            *slot = (self.check(4, lift(*from)), *to);
        }
        self.report = self.check(4, lift(self.report));
        for open in &self.spawn.opens {
            self.open(open);
            top = top.max(open.fd);
        }
        for (from, to) in lifted.iter().take(self.moves.len()) {
            // SAFETY: a system call on numbers.
            self.check(4, unsafe { libc::dup2(*from, *to) });
            top = top.max(*to);
        }
        top
    }

    fn open(&self, open: &Open) {
        // SAFETY: the text is NUL-terminated.
        let fd = self.check(3, unsafe { libc::open(open.path.as_ptr(), open.flags | libc::O_CLOEXEC, 0o600) });
        if fd == open.fd {
            // SAFETY: a system call on numbers: takes back close-on-exec.
            self.check(4, unsafe { libc::fcntl(fd, libc::F_SETFD, 0) });
        } else {
            // SAFETY: a system call on numbers.
            self.check(4, unsafe { libc::dup2(fd, open.fd) });
        }
    }

    /// Closes all but the report pipe, which closes with exec.
    fn close_above(&self, top: RawFd) {
        let (first, report) = ((top + 1).cast_unsigned(), self.report.cast_unsigned());
        if report > first {
            // SAFETY: a system call on numbers.
            self.check(6, unsafe { libc::close_range(first, report - 1, 0) });
        }
        // SAFETY: a system call on numbers.
        self.check(6, unsafe { libc::close_range(report + 1, u32::MAX, 0) });
    }

    /// As std::process does: the mask empty (or full, where that is wanted), SIGPIPE (which Rust's runtime ignores) back to its
    /// default. What the caller of rekindle ignored (nohup) stays ignored.
    fn reset_signals(&self) {
        // SAFETY: an all-zero sigset_t is the empty set on Linux.
        let mut mask: libc::sigset_t = unsafe { std::mem::zeroed() };
        if self.spawn.signals_blocked {
            // SAFETY: the set is valid.
            unsafe { libc::sigfillset(&raw mut mask) };
        }
        // SAFETY: the set is valid, the old one is not wanted.
        self.check(7, unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const mask, std::ptr::null_mut()) });
        // SAFETY: sets the default action.
        if unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) } == libc::SIG_ERR {
            self.fail(7);
        }
    }
}

fn lift(fd: RawFd) -> libc::c_int {
    // SAFETY: a system call on numbers.
    unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, LIFTED) }
}

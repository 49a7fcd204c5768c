//! The child's side of a spawn, between clone and exec.
//!
//! Nothing here may allocate or lock: the process was forked from one with other threads, whose locks stay locked in
//! the copy. [`Plan::new`] prepares everything before the fork. The functions of nix and rustix that are used here do
//! nothing but their system call, on C strings without a copy of them.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::RawFd;

use nix::errno::Errno;
use nix::fcntl::AT_FDCWD;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::prctl::{set_no_new_privs, set_pdeathsig};
use nix::sys::signal::{SigHandler, SigSet, SigmaskHow, Signal, signal, sigprocmask};
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat, makedev, mknod, umask};
use rustix::thread::{Timespec, nanosleep};

use super::{Open, Spawn, World};
use crate::identity::{become_user, leave_groups, leave_keyring};

/// The step of the working directory.
pub(super) const DIRECTORY: &str = "changing to the working directory";

/// The steps of the child, by the number it reports when one fails.
const STEPS: [&str; 14] = [
    "entering the namespaces",
    "starting a session",
    DIRECTORY,
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
    "opening the output, where the file that was checked is no longer there,",
];

/// The child's report on a failed step: the step's number, then errno.
pub(super) type Failure = [u8; 5];

/// The step in words, and the kernel's answer.
pub(super) fn explain(failure: Failure) -> (&'static str, io::Error) {
    let [step, errno @ ..] = failure;
    let step = STEPS.get(usize::from(step)).copied().unwrap_or("set-up");
    (step, io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
}

/// Descriptors are first lifted to this number or above, so that placing one never covers another that is still to be
/// placed. Low, because the caller's limit on open files may be (`ulimit -n 64`).
pub(super) const LIFTED: RawFd = 16;
/// Maximum number of descriptors: their lifted numbers must be in memory that exists before the fork.
pub(super) const MOST: usize = 8;

/// How often to try again while the program is open for writing: for two seconds. A fork usually reaches its exec
/// within a millisecond.
const BUSY_TRIES: u32 = 400;
const BUSY_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 5_000_000 };

/// Everything the child needs.
pub(super) struct Plan<'a> {
    spawn: &'a Spawn,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    moves: Vec<(RawFd, RawFd)>,
    report: RawFd,
}

impl<'a> Plan<'a> {
    /// Prepares everything. Failures are written to `report`, which must close with exec.
    ///
    /// # Errors
    /// When there are too many descriptors, or a number is in the range used for moving them.
    pub(super) fn new(spawn: &'a Spawn, report: RawFd) -> io::Result<Plan<'a>> {
        let [argv, envp] = spawn.program.pointers();
        Ok(Plan { spawn, argv, envp, moves: spawn.descriptors.moves()?, report })
    }

    fn fail(&self, step: u8, error: &io::Error) -> ! {
        let [a, b, c, d] = error.raw_os_error().unwrap_or(0).to_ne_bytes();
        let message: Failure = [step, a, b, c, d];
        // SAFETY: `message` is valid for its length.
        unsafe { libc::write(self.report, message.as_ptr().cast(), message.len()) };
        // SAFETY: ends the child at once, without the parent's exit handlers.
        unsafe { libc::_exit(125) }
    }

    fn check<T>(&self, step: u8, result: Result<T, impl Into<io::Error>>) -> T {
        result.unwrap_or_else(|error| self.fail(step, &error.into()))
    }

    /// Runs in the child: executes the program, or reports why it cannot.
    pub(super) fn run(&mut self) -> ! {
        let spawn = self.spawn;
        if let World::Join(pidfd, also) = &spawn.place.world {
            self.check(0, setns(pidfd, CloneFlags::CLONE_NEWNS | *also));
        }
        if let Some(network) = &spawn.place.network {
            self.check(0, setns(network, CloneFlags::CLONE_NEWNET));
        }
        if spawn.session {
            self.check(1, nix::unistd::setsid());
        }
        if let Some(directory) = &spawn.place.directory {
            match &spawn.place.visitor {
                Some(visitor) => self.check(2, visitor.chdir(directory)),
                None => self.check(2, nix::unistd::chdir(directory.as_c_str())),
            }
        }
        let top = self.place_descriptors();
        if let Some(mask) = spawn.umask {
            umask(Mode::from_bits_truncate(mask));
        }
        for (resource, limit) in &spawn.limits {
            // SAFETY: `limit` is valid.
            self.check(5, Errno::result(unsafe { libc::setrlimit(*resource, limit) }));
        }
        self.close_above(top);
        if let Some(without) = &spawn.place.own_tun {
            self.make_tun(without);
        }
        if spawn.rights.no_groups {
            match leave_groups() {
                // Without the capability, or in a user namespace whose setgroups(2) is off.
                Err(rustix::io::Errno::PERM) => {}
                result => self.check(10, result),
            }
        }
        if let Some((user, group)) = spawn.rights.identity {
            leave_keyring();
            self.check(10, become_user(user, group));
        }
        if spawn.rights.no_new_privileges {
            self.check(11, set_no_new_privs());
        }
        // After the change of user, which resets the signal (prctl(2)).
        if let Some(parent) = spawn.dies_with {
            self.check(9, set_pdeathsig(Signal::SIGKILL));
            // If the parent is gone already, no signal will come.
            if nix::unistd::getppid().as_raw() != parent {
                self.fail(9, &Errno::ESRCH.into());
            }
        }
        self.reset_signals();
        self.execute()
    }

    /// Creates the tunnel device in a new mount namespace, so that mounts made here are not seen elsewhere. Unmounts
    /// elsewhere still take effect here if the machine's mounts are shared (as systemd sets them up).
    fn make_tun(&self, without: &[CString]) {
        const STEP: u8 = 12;
        let (none, all) = (None::<&CStr>, Mode::from_bits_truncate(0o666));
        self.check(STEP, unshare(CloneFlags::CLONE_NEWNS));
        self.check(STEP, mount(none, c"/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none));
        for mounted in without {
            // A mount that is already gone is not an error.
            let _ = umount2(mounted.as_c_str(), MntFlags::MNT_DETACH);
        }
        let (flags, options) = (MsFlags::MS_NOSUID | MsFlags::MS_NOEXEC, Some(c"mode=0755,size=4k"));
        self.check(STEP, mount(Some(c"tun"), c"/dev/net", Some(c"tmpfs"), flags, options));
        let path = c"/dev/net/tun";
        // Device numbers from Documentation/admin-guide/devices.txt.
        self.check(STEP, mknod(path, SFlag::S_IFCHR, all, makedev(10, 200)));
        // By name, because of the umask.
        self.check(STEP, fchmodat(AT_FDCWD, path, all, FchmodatFlags::FollowSymlink));
    }

    /// Executes the program. A program that was just written can still be open for writing: in a child that another
    /// thread forked at that moment and that has not reached its exec. The kernel refuses the program until then.
    fn execute(&self) -> ! {
        for tries_left in (0..BUSY_TRIES).rev() {
            // SAFETY: argv and envp are null-terminated arrays of NUL-terminated texts that live in the copied memory.
            unsafe { libc::execve(self.spawn.program.path.as_ptr(), self.argv.as_ptr(), self.envp.as_ptr()) };
            if tries_left == 0 || Errno::last() != Errno::ETXTBSY {
                break;
            }
            let _ = nanosleep(&BUSY_PAUSE);
        }
        self.fail(8, &io::Error::last_os_error())
    }

    /// Opens files and moves descriptors to their numbers; returns the highest number in use.
    fn place_descriptors(&mut self) -> RawFd {
        let mut top: RawFd = 2;
        // The report pipe and all given descriptors are moved to high numbers first, so that the final numbers are
        // free.
        let mut lifted = [(0, 0); MOST];
        for (slot, (from, to)) in lifted.iter_mut().zip(&self.moves) {
            *slot = (self.check(4, lift(*from)), *to);
        }
        self.report = self.check(4, lift(self.report));
        for open in &self.spawn.descriptors.opened {
            self.open(open);
            top = top.max(open.fd);
        }
        for (from, to) in lifted.iter().take(self.moves.len()) {
            // SAFETY: a system call on numbers.
            self.check(4, Errno::result(unsafe { libc::dup2(*from, *to) }));
            top = top.max(*to);
        }
        top
    }

    fn open(&self, open: &Open) {
        let fd = match open.expect {
            Some(expected) => self.check(13, open_expected(open, expected)),
            None => {
                // SAFETY: the text is NUL-terminated.
                let fd = unsafe { libc::open(open.path.as_ptr(), open.flags | libc::O_CLOEXEC, 0o600) };
                self.check(3, Errno::result(fd))
            }
        };
        if fd == open.fd {
            // SAFETY: a system call on numbers: takes back close-on-exec.
            self.check(4, Errno::result(unsafe { libc::fcntl(fd, libc::F_SETFD, 0) }));
        } else {
            // SAFETY: a system call on numbers.
            self.check(4, Errno::result(unsafe { libc::dup2(fd, open.fd) }));
        }
    }

    /// Closes all descriptors above `top` but the report pipe, which closes with exec.
    fn close_above(&self, top: RawFd) {
        let (first, report) = ((top + 1).cast_unsigned(), self.report.cast_unsigned());
        if report > first {
            // SAFETY: a system call on numbers.
            self.check(6, Errno::result(unsafe { libc::close_range(first, report - 1, 0) }));
        }
        // SAFETY: a system call on numbers.
        self.check(6, Errno::result(unsafe { libc::close_range(report + 1, u32::MAX, 0) }));
    }

    /// As std::process does: the mask is emptied (or filled, if requested), and SIGPIPE, which Rust's runtime ignores,
    /// gets its default action. Signals that rekindle's caller ignored (nohup) stay ignored.
    fn reset_signals(&self) {
        let mask = if self.spawn.signals_blocked { SigSet::all() } else { SigSet::empty() };
        self.check(7, sigprocmask(SigmaskHow::SIG_SETMASK, Some(&mask), None));
        // SAFETY: sets the default action.
        self.check(7, unsafe { signal(Signal::SIGPIPE, SigHandler::SigDfl) });
    }
}

/// Opens the regular file with this device and inode, through no link, and without waiting for anybody.
fn open_expected(open: &Open, expected: (u64, u64)) -> nix::Result<RawFd> {
    let flags = open.flags | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY;
    // SAFETY: open_how is plain numbers, for which all zeroes is valid.
    let mut how: libc::open_how = unsafe { std::mem::zeroed() };
    how.flags = u64::from(flags.cast_unsigned());
    how.resolve = libc::RESOLVE_NO_SYMLINKS | libc::RESOLVE_NO_MAGICLINKS;
    let (at, path) = (libc::AT_FDCWD, open.path.as_ptr());
    // SAFETY: the text is NUL-terminated, and `how` has this size.
    let opened = unsafe { libc::syscall(libc::SYS_openat2, at, path, &raw const how, size_of::<libc::open_how>()) };
    let fd = match Errno::result(opened) {
        // A descriptor is an int.
        Ok(fd) => RawFd::try_from(fd).map_err(|_| Errno::EBADF)?,
        // Linux before 5.6 has no openat2(2), and some sandboxes do not allow it. A link on the way leads to another file.
        Err(Errno::ENOSYS | Errno::EPERM) => {
            // SAFETY: the text is NUL-terminated.
            Errno::result(unsafe { libc::open(path, flags | libc::O_NOFOLLOW) })?
        }
        Err(error) => return Err(error),
    };
    // SAFETY: stat is plain numbers, for which all zeroes is valid.
    let mut found: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: `found` is valid for the kernel's answer.
    Errno::result(unsafe { libc::fstat(fd, &raw mut found) })?;
    if found.st_mode & libc::S_IFMT != libc::S_IFREG || (found.st_dev, found.st_ino) != expected {
        return Err(Errno::ESTALE);
    }
    // SAFETY: a system call on numbers.
    let now = Errno::result(unsafe { libc::fcntl(fd, libc::F_GETFL) })?;
    // SAFETY: a system call on numbers.
    Errno::result(unsafe { libc::fcntl(fd, libc::F_SETFL, now & !libc::O_NONBLOCK) })?;
    Ok(fd)
}

fn lift(fd: RawFd) -> nix::Result<RawFd> {
    // SAFETY: a system call on numbers.
    Errno::result(unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, LIFTED) })
}

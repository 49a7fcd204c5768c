//! What another thread or descriptor has, and only a system call tells: I/O priority, robust list, the owner of
//! a descriptor, the size of a pipe, the length of queues.
#![allow(unsafe_code, reason = "system calls that the libraries do not have; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// `IOPRIO_WHO_PROCESS` of linux/ioprio.h: one thread.
const ONE_THREAD: libc::c_long = 1;

/// The I/O priority of a thread, as ioprio_get(2) returns it: the class above bit 13, and the level.
///
/// # Errors
/// When it is gone (ESRCH).
pub fn io_priority(thread: i32) -> io::Result<u16> {
    // SAFETY: a system call on numbers.
    let result = unsafe { libc::syscall(libc::SYS_ioprio_get, ONE_THREAD, libc::c_long::from(thread)) };
    u16::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Sets it.
///
/// # Errors
/// When the thread is gone (ESRCH), the value is none (EINVAL), or a right is missing (EPERM).
pub fn set_io_priority(thread: i32, priority: u16) -> io::Result<()> {
    let (thread, priority) = (libc::c_long::from(thread), libc::c_long::from(priority));
    // SAFETY: a system call on numbers.
    match unsafe { libc::syscall(libc::SYS_ioprio_set, ONE_THREAD, thread, priority) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets a resource limit of a process (setrlimit(2)): the soft one and the hard one.
///
/// # Errors
/// When the process is gone (ESRCH), the soft limit is above the hard one (EINVAL), or a right is missing (EPERM): to raise a
/// hard limit takes CAP_SYS_RESOURCE.
pub fn set_limit(pid: i32, resource: u32, soft: u64, hard: u64) -> io::Result<()> {
    let limit = libc::rlimit64 { rlim_cur: soft, rlim_max: hard };
    let (pid, resource) = (libc::c_long::from(pid), libc::c_long::from(resource));
    // SAFETY: the kernel reads the struct while the call lasts, and writes nothing.
    match unsafe {
        libc::syscall(libc::SYS_prlimit64, pid, resource, &raw const limit, std::ptr::null_mut::<libc::rlimit64>())
    } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The address of the robust list of a thread (get_robust_list(2)): the locks that the kernel releases when it dies.
///
/// # Errors
/// When it is gone (ESRCH), or we may not trace it (EPERM).
pub fn robust_list(thread: i32) -> io::Result<usize> {
    let (mut head, mut length) = (0_usize, 0_usize);
    // SAFETY: both are live locals that the kernel fills.
    let result =
        unsafe { libc::syscall(libc::SYS_get_robust_list, libc::c_long::from(thread), &raw mut head, &raw mut length) };
    if result == 0 { Ok(head) } else { Err(io::Error::last_os_error()) }
}

/// Who gets the signals of a descriptor (fcntl(2), `F_GETOWN_EX`): the kind (`F_OWNER_TID`, ...) and the id, as we see it.
/// An id of 0 is nobody.
///
/// # Errors
/// The kernel's.
pub fn owner(descriptor: &impl AsFd) -> io::Result<(i32, i32)> {
    #[repr(C)]
    struct Owner {
        kind: libc::c_int,
        id: libc::pid_t,
    }
    /// `F_GETOWN_EX` of asm-generic/fcntl.h, which libc does not have.
    const GET_OWNER: libc::c_int = 16;
    let mut owner = Owner { kind: 0, id: 0 };
    // SAFETY: the kernel fills a live local of the size that it expects.
    match unsafe { libc::fcntl(descriptor.as_fd().as_raw_fd(), GET_OWNER, &raw mut owner) } {
        0 => Ok((owner.kind, owner.id)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// A number that fcntl(2) returns: `F_GETSIG`, `F_GETPIPE_SZ`, `F_GET_SEALS`.
///
/// # Errors
/// When the descriptor has no such number (EINVAL, EBADF).
pub fn number(descriptor: &impl AsFd, command: i32) -> io::Result<i32> {
    // SAFETY: these commands have no argument.
    match unsafe { libc::fcntl(descriptor.as_fd().as_raw_fd(), command) } {
        -1 => Err(io::Error::last_os_error()),
        number => Ok(number),
    }
}

/// Sets a number by fcntl(2): `F_SETSIG`, `F_SETPIPE_SZ`, `F_ADD_SEALS`.
///
/// # Errors
/// The kernel's.
pub fn set_number(descriptor: &impl AsFd, command: i32, number: i32) -> io::Result<()> {
    // SAFETY: these commands have a number as argument.
    match unsafe { libc::fcntl(descriptor.as_fd().as_raw_fd(), command, number) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Lets a descriptor with O_ASYNC send its signals, which name `number` as the descriptor (fcntl(2), `F_SETSIG`): the kernel
/// remembers the number that the process had that turned them on.
///
/// # Errors
/// The kernel's. If `number` is above our limit of descriptors (EBADF), the signals are sent, and name another one.
pub fn send_signals(descriptor: &OwnedFd, number: i32) -> io::Result<()> {
    let turn_on = || {
        // From here on this thread has a table of descriptors of its own, where that number is free to be taken.
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_FILES)?;
        // SAFETY: whatever had the number in this table is closed, and nobody else has this table.
        let taken = match unsafe { libc::dup2(descriptor.as_raw_fd(), number) } {
            -1 => Err(io::Error::last_os_error()),
            _ => Ok(()),
        };
        // SAFETY: open until the thread ends, and only used while it lives.
        let here = unsafe { BorrowedFd::borrow_raw(if taken.is_ok() { number } else { descriptor.as_raw_fd() }) };
        let flags = self::number(&here, libc::F_GETFL)?;
        set_number(&here, libc::F_SETFL, flags & !libc::O_ASYNC)?;
        // A terminal without an owner takes who does this (`__tty_fasync`): a thread that is not the first, to which no signal
        // goes, and not this program, which SIGIO would end.
        set_number(&here, libc::F_SETFL, flags | libc::O_ASYNC)?;
        taken
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, turn_on)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A length that ioctl(2) tells: `FIONREAD`, `TIOCOUTQ`.
///
/// # Errors
/// When the descriptor has no such queue.
pub fn length(descriptor: &impl AsFd, request: libc::Ioctl) -> io::Result<i32> {
    let mut length: libc::c_int = 0;
    // SAFETY: these requests fill an int, which is a live local.
    match unsafe { libc::ioctl(descriptor.as_fd().as_raw_fd(), request, &raw mut length) } {
        0 => Ok(length),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What a socket has of `POLLRDHUP` (nothing more comes), `POLLHUP` (both directions are over) and `POLLERR` (its next call
/// fails, or a notice waits in its error queue); poll(2). An error still waits afterwards.
///
/// # Errors
/// The kernel's error.
pub fn conditions(socket: &impl AsFd) -> io::Result<i16> {
    let mut polled = libc::pollfd { fd: socket.as_fd().as_raw_fd(), events: libc::POLLRDHUP, revents: 0 };
    // SAFETY: one pollfd, which is a live local.
    match unsafe { libc::poll(&raw mut polled, 1, 0) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(polled.revents & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR)),
    }
}

/// The settings of a terminal, as hexadecimal digits of the kernel's structure (`TCGETS2`): modes, control characters,
/// speeds.
///
/// # Errors
/// When it is no terminal (ENOTTY).
pub fn terminal_settings(descriptor: &impl AsFd) -> io::Result<String> {
    // SAFETY: all zeros are a valid value of these numbers.
    let mut settings: libc::termios2 = unsafe { std::mem::zeroed() };
    // SAFETY: the request fills such a structure, which is a live local.
    match unsafe { libc::ioctl(descriptor.as_fd().as_raw_fd(), libc::TCGETS2, &raw mut settings) } {
        0 => {}
        _ => return Err(io::Error::last_os_error()),
    }
    let flags = [settings.c_iflag, settings.c_oflag, settings.c_cflag, settings.c_lflag];
    let speeds = [settings.c_ispeed, settings.c_ospeed];
    let numbers = flags.iter().chain(&speeds).map(|number| format!("{number:x}"));
    let characters = settings.c_cc.iter().map(|character| format!("{character:02x}")).collect::<String>();
    let all: Vec<String> = numbers.chain([settings.c_line.to_string(), characters]).collect();
    Ok(all.join(" "))
}

/// Where the file is to which a UNIX socket was bound. It may have been renamed since.
///
/// # Errors
/// When it was bound to none, or the file has no name any more (ENOENT), or we may not ask (CAP_NET_ADMIN).
pub fn bound_file(socket: &impl AsFd) -> io::Result<String> {
    /// `SIOCUNIXFILE` of linux/un.h.
    const OPEN_FILE: libc::Ioctl = 0x89e0;
    // SAFETY: the request takes no argument.
    let file = match unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), OPEN_FILE) } {
        -1 => return Err(io::Error::last_os_error()),
        // SAFETY: the kernel has just opened it for us.
        number => unsafe { OwnedFd::from_raw_fd(number) },
    };
    let links = rustix::fs::fstat(&file)?.st_nlink;
    let name = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
    if links == 0 { Err(io::ErrorKind::NotFound.into()) } else { Ok(name.to_string_lossy().into_owned()) }
}

/// Lets nobody else open a terminal, or everybody (ioctl_tty(2)).
///
/// # Errors
/// When it is no terminal (ENOTTY).
pub fn make_exclusive(terminal: &impl AsFd, is_exclusive: bool) -> io::Result<()> {
    let request = if is_exclusive { libc::TIOCEXCL } else { libc::TIOCNXCL };
    // SAFETY: these requests take no argument.
    match unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Rows and columns of a terminal's window.
///
/// # Errors
/// When it is no terminal (ENOTTY).
pub fn window(descriptor: &impl AsFd) -> io::Result<String> {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request fills such a structure, which is a live local.
    match unsafe { libc::ioctl(descriptor.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) } {
        0 => Ok(format!("{} {}", size.ws_row, size.ws_col)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_what_it_was_given() {
        // A thread of its own: others must not change.
        let set = std::thread::spawn(|| {
            let own = rustix::thread::gettid().as_raw_nonzero().get();
            set_io_priority(own, 3 << 13).unwrap();
            assert_eq!(io_priority(own).unwrap(), 3 << 13);
            assert_ne!(robust_list(own).unwrap(), 0, "the C library gives each thread one");
        });
        set.join().unwrap();
        assert_eq!(io_priority(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }

    #[test]
    fn signals_come_again_and_name_the_number_that_is_said() {
        use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
        use nix::sys::signalfd::{SfdFlags, SignalFd};
        let mut signals = SigSet::empty();
        signals.add(Signal::SIGUSR2);
        // Of this thread only: it gets them.
        pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), None).unwrap();
        let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_NONBLOCK).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("fifo");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let mut options = std::fs::File::options();
        let mut fifo = options.read(true).write(true).open(&path).unwrap();
        #[repr(C)]
        struct Owner(libc::c_int, libc::pid_t);
        let owner = Owner(0, nix::unistd::gettid().as_raw());
        // SAFETY: F_SETOWN_EX (15) reads a live struct.
        assert_eq!(unsafe { libc::fcntl(fifo.as_raw_fd(), 15, &raw const owner) }, 0);
        set_number(&fifo, 10, libc::SIGUSR2).unwrap();
        let named = |fifo: &mut std::fs::File| {
            std::io::Write::write_all(fifo, b"x").unwrap();
            std::io::Read::read_exact(fifo, &mut [0]).unwrap();
            let mut last = None;
            while let Some(found) = signals.read_signal().unwrap() {
                last = Some(found.ssi_fd);
            }
            last
        };
        assert_eq!(named(&mut fifo), None);
        let descriptor = OwnedFd::from(fifo.try_clone().unwrap());
        send_signals(&descriptor, 77).unwrap();
        assert_eq!(named(&mut fifo), Some(77));
        send_signals(&descriptor, 5).unwrap();
        assert_eq!(named(&mut fifo), Some(5), "again, and the descriptors of this process are as they were");
        assert!(send_signals(&descriptor, i32::MAX).is_err());
        assert!(named(&mut fifo).is_some(), "they come all the same");
    }

    #[test]
    fn a_pipe_has_a_size_a_length_and_an_owner() {
        let (reader, writer) = std::io::pipe().unwrap();
        set_number(&writer, libc::F_SETPIPE_SZ, 8192).unwrap();
        assert_eq!(number(&reader, libc::F_GETPIPE_SZ).unwrap(), 8192);
        assert_eq!(length(&reader, libc::FIONREAD).unwrap(), 0);
        io::Write::write_all(&mut &writer, b"abc").unwrap();
        assert_eq!(length(&reader, libc::FIONREAD).unwrap(), 3);
        assert_eq!(owner(&reader).unwrap().1, 0);
        assert_eq!(number(&reader, libc::F_GET_SEALS).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}

//! The two smallest processes of a job, in one static binary without a libc.
//!
//! `init` is pid 1 of the job's PID namespace. It mounts /proc, ends the whole namespace when the supervisor dies (its
//! parent-death signal is SIGKILL, and a namespace ends with its pid 1), and reaps. It is never part of an image.
//!
//! `reap` is the parent of the job and the root of every image: leader of its own session, as CRIU requires, and child
//! subreaper, so that daemons that the job leaves behind stay in the tree that CRIU walks. It forwards signals, and
//! ends as the job ended. Because it is in every image, it must not depend on anything that an upgrade can change: no
//! libc, no shared object, and a file name that contains the hash of its content.
//!
//! Only the supervisor starts them; arguments are trusted. After a power cut nothing is lost: they own no state.
#![no_std]
#![no_main]
// A freestanding binary: the compiler must not turn the loop of strlen into a call of itself.
#![no_builtins]

mod sys;

use core::ffi::{CStr, c_char};

use sys::{Errno, Process, exit};

/// The exit codes of a shell for a program that it cannot execute, and for one that is not there.
const NOT_EXECUTED: i32 = 126;
const NOT_FOUND: i32 = 127;

/// The exit code of an init whose timer has expired.
const FENCED: i32 = 124;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    exit(125)
}

/// The command line as the kernel puts it on the stack.
struct Args(*const *const c_char);

impl Args {
    fn get(&self, at: usize) -> &CStr {
        // SAFETY: the kernel ends argv with a null pointer; callers stay below the count the supervisor passes.
        let text = unsafe { *self.0.add(at) };
        if text.is_null() {
            exit(125);
        }
        // SAFETY: argv strings are NUL-terminated and live as long as the process.
        unsafe { CStr::from_ptr(text) }
    }

    fn number(&self, at: usize) -> i32 {
        parse(self.get(at).to_bytes())
    }
}

fn parse(text: &[u8]) -> i32 {
    let mut value: i32 = 0;
    for digit in text {
        if !digit.is_ascii_digit() {
            exit(125);
        }
        value = value.wrapping_mul(10).wrapping_add(i32::from(digit - b'0'));
    }
    value
}

/// Called by `_start` with the initial stack pointer.
#[unsafe(no_mangle)]
extern "C" fn begin(stack: *const usize) -> ! {
    // SAFETY: the initial stack holds argc, then argv, then a null, then envp (System V ABI, x86-64, 3.4.1).
    let argc = unsafe { *stack };
    // SAFETY: as above.
    let argv = unsafe { stack.add(1) }.cast::<*const c_char>();
    // SAFETY: as above; one past argv's null.
    let envp = unsafe { argv.add(argc + 1) };
    let args = Args(argv);
    if argc < 2 {
        exit(2);
    }
    match args.get(1).to_bytes() {
        b"init" if argc == 8 => {
            let loopback = args.get(4).to_bytes().contains(&b'l');
            let file = |at| Some(args.get(at)).filter(|path| path.to_bytes() != b"-");
            let fence = file(7).map(|number| parse(number.to_bytes()));
            init(args.number(2), args.number(3), loopback, [file(5), file(6)], fence)
        }
        b"reap" if argc >= 8 => reap(&args, envp),
        _ => exit(2),
    }
}

/// `init LAST_PID READY_FD FLAGS NAMES HOSTS FENCE_FD`: prepares the namespaces, writes `ok` to the descriptor, then reaps until
/// it is killed. FLAGS: `l` enables the loopback device of a new network namespace. NAMES is a file that is mounted
/// over /etc/resolv.conf, and HOSTS one over /etc/hosts, if those exist; `-` for none. FENCE_FD is a timer at whose expiry
/// the job must end, or `-`.
fn init(last_pid: i32, ready: i32, loopback: bool, [names, hosts]: [Option<&CStr>; 2], fence: Option<i32>) -> ! {
    let mut mask = sys::block_all();
    let prepared = sys::die_with_parent(sys::SIGKILL)
        .map_err(|e| (b'd', e))
        // Slave: later mounts on the host (automounts, volumes) appear here, but ours do not appear there.
        .and_then(|()| sys::mount(c"none", c"/", c"", sys::MS_REC | sys::MS_SLAVE).map_err(|e| (b's', e)))
        .and_then(|()| {
            sys::mount(c"proc", c"/proc", c"proc", sys::MS_NOSUID | sys::MS_NODEV | sys::MS_NOEXEC)
                .map_err(|e| (b'p', e))
        })
        .map(|()| own_terminals())
        // The job's pids begin above this one, so that low ones are free for CRIU in this namespace.
        .and_then(|()| sys::write_number(c"/proc/sys/kernel/ns_last_pid", last_pid).map_err(|e| (b'l', e)))
        .and_then(|()| if loopback { sys::bring_up_loopback().map_err(|e| (b'n', e)) } else { Ok(()) })
        .and_then(|()| mount_over(names, c"/etc/resolv.conf").map_err(|e| (b'r', e)))
        .and_then(|()| mount_over(hosts, c"/etc/hosts").map_err(|e| (b'h', e)));
    let report: [u8; 2] = match prepared {
        Ok(()) => *b"ok",
        Err((step, errno)) => [step, u8::try_from(errno.0).unwrap_or(u8::MAX)],
    };
    // The supervisor reads this; if it has died already, nobody would ever end this process.
    if sys::write(ready, &report).is_err() || prepared.is_err() {
        exit(125);
    }
    let _ = fence.map_or_else(sys::close_all, sys::close_all_but);
    let children = fence.and_then(|_| sys::signal_file(&mut mask).ok());
    loop {
        while let Ok(Some(_)) = sys::wait_any(sys::WNOHANG) {}
        match (fence, children) {
            (Some(fence), Some(children)) => {
                // The namespace ends with this process, whatever its other processes are doing.
                if sys::is_readable(fence, children) {
                    exit(FENCED);
                }
                sys::drain(children);
            }
            // It cannot wait for the timer: no job is better than one that nobody ends.
            (Some(_), None) => exit(125),
            (None, _) => drop(sys::next_signal(&mut mask)),
        }
    }
}

/// Mounts the file over another one. Where there is none, nobody reads it.
fn mount_over(file: Option<&CStr>, target: &CStr) -> Result<(), sys::Errno> {
    match file.map(|file| sys::mount(file, target, c"", sys::MS_BIND)) {
        None | Some(Ok(()) | Err(sys::ENOENT)) => Ok(()),
        Some(Err(e)) => Err(e),
    }
}

/// Mounts a separate devpts: the job's terminals have their own numbers, so that a restore finds the same ones free,
/// which others could have on the machine's devpts. Group 5 is `tty`; where it is unknown there is no group. A machine
/// without /dev/pts has no terminals.
fn own_terminals() {
    let mount = |options| sys::mount_with(c"devpts", c"/dev/pts", c"devpts", sys::MS_NOSUID | sys::MS_NOEXEC, options);
    if mount(c"newinstance,ptmxmode=0666,mode=0620,gid=5").is_err() {
        let _ = mount(c"newinstance,ptmxmode=0666,mode=0620");
    }
}

/// `reap UID GID GROUPS FLAGS INPUT PROGRAM -- ARGV...`
///
/// UID is `-` to keep the present user. GROUPS is a comma-separated list. FLAGS: `n` sets no-new-privileges, `u` disables io_uring for the
/// job, `a` AMX. INPUT is the file for its standard input.
fn reap(args: &Args, envp: *const *const c_char) -> ! {
    let mut all = sys::block_all();
    if sys::become_subreaper().is_err() {
        exit(125);
    }
    let job = match sys::fork() {
        Ok(Process::Child) => become_job(args, envp),
        Ok(Process::Parent(job)) => job,
        Err(_) => exit(125),
    };
    let _ = sys::close_all();
    // On a machine whose processors are all busy, what outlives the job would else act before it is stopped. Real-time
    // priority would be surer, but a control group may have no time for it.
    let _ = sys::come_first();
    // Only the right that forwarding needs is kept, so that the job cannot misuse this process.
    let _ = sys::keep_only_kill_capability();
    loop {
        match sys::next_signal(&mut all) {
            Ok(sys::SIGCHLD) => {
                while let Ok(Some((pid, status))) = sys::wait_any(sys::WNOHANG) {
                    if pid == job {
                        if status != 0 {
                            freeze_the_others();
                        }
                        end_like(status);
                    }
                }
            }
            Ok(signal) => {
                let _ = sys::kill(job, signal);
            }
            Err(_) => {}
        }
    }
}

/// In the forked child: sets its group and identity, opens its standard input, and executes the job's program.
fn become_job(args: &Args, envp: *const *const c_char) -> ! {
    let (input, program) = (args.get(6), args.get(7));
    let failed_at = |what: &[u8], path: &CStr, errno: Errno, code: i32| -> ! {
        let _ = sys::write(2, b"rekindle: cannot ");
        let _ = sys::write(2, what);
        let _ = sys::write(2, b" ");
        let _ = sys::write(2, path.to_bytes());
        let _ = sys::write(2, b": ");
        match errno {
            sys::ENOENT if code == NOT_FOUND => {
                let _ = sys::write(2, b"it, or the interpreter it names, is not there");
            }
            sys::ENOENT => drop(sys::write(2, b"it is not there")),
            sys::EACCES => drop(sys::write(2, b"the user it runs as may not")),
            sys::ENOEXEC => drop(sys::write(2, b"neither a program nor a script that begins with #!")),
            sys::E2BIG => drop(sys::write(2, b"its arguments and environment are too long")),
            Errno(number) => {
                let mut digits = [0u8; 10];
                let _ = sys::write(2, b"errno ");
                let _ = sys::write(2, sys::decimal(number.unsigned_abs(), &mut digits));
            }
        }
        let _ = sys::write(2, b"\n");
        exit(code)
    };
    let failed = |what: &[u8], errno: Errno, code: i32| -> ! { failed_at(what, program, errno, code) };
    // A separate process group within the reaper's session. Processes that the job leaves behind in this session become
    // children of the reaper, which CRIU can restore.
    if let Err(e) = sys::new_group() {
        failed(b"start a process group for", e, 125);
    }
    // Before the identity is changed: only with CAP_SYS_ADMIN can a filter be set without disabling setuid programs.
    if args.get(5).to_bytes().contains(&b'u')
        && let Err(e) = sys::refuse_io_uring()
    {
        failed(b"keep io_uring from", e, 125);
    }
    if args.get(5).to_bytes().contains(&b'a')
        && let Err(e) = sys::refuse_amx()
    {
        failed(b"keep AMX from", e, 125);
    }
    if args.get(2).to_bytes() != b"-" {
        let mut groups = [0u32; 4096];
        let mut count = 0;
        for group in args.get(4).to_bytes().split(|b| *b == b',').filter(|g| !g.is_empty()) {
            if count == groups.len() {
                // Dropping groups could add rights, because a file can exclude a group.
                failed(b"set more than 4096 groups for", Errno(0), 125);
            }
            groups[count] = parse(group).cast_unsigned();
            count += 1;
        }
        sys::leave_keyring();
        let switched = sys::set_groups(&groups[..count])
            .and_then(|()| sys::set_gid(args.number(3)))
            .and_then(|()| sys::set_uid(args.number(2)))
            // The change of user drops them, unless the securebits say otherwise (SECBIT_NO_SETUID_FIXUP).
            .and_then(|()| if args.number(2) == 0 { Ok(()) } else { sys::drop_capabilities() });
        if let Err(e) = switched {
            failed(b"switch user for", e, 125);
        }
    }
    if args.get(5).to_bytes().contains(&b'n')
        && let Err(e) = sys::no_new_privileges()
    {
        failed(b"set no-new-privileges for", e, 125);
    }
    // First, because a FIFO that nobody writes to would be waited for: then the job can still be ended by a signal.
    sys::unblock_all();
    // With the rights of the job: another user may have put another file there since rekindle looked at it.
    if let Err(e) = sys::open_as_input(input) {
        failed_at(b"open the job's standard input", input, e, NOT_EXECUTED);
    }
    // SAFETY: argument 8 is the `--`; the job's argv follows it and ends with argv's own null.
    let argv = unsafe { args.0.add(9) };
    let errno = sys::exec(program, argv, envp);
    failed(b"execute", errno, if errno == sys::ENOENT { NOT_FOUND } else { NOT_EXECUTED })
}

/// Stops all remaining processes in the job's PID namespace, in one step of the kernel. Processes that outlive the job
/// would clean up, for example remove files that an image needs. The supervisor ends the namespace a moment later; it
/// may have to resume processes before, so they are not killed here. A job that completed is not restored, and its
/// helpers may still write their data.
fn freeze_the_others() {
    // A parent pid of 0 means that the parent is outside of the namespace. Otherwise this could stop the whole machine.
    if sys::parent() == 0 {
        let _ = sys::kill(-1, sys::SIGSTOP);
    }
}

/// Ends as the job did: with the same exit code or signal.
fn end_like(status: i32) -> ! {
    let signal = status & 0x7f;
    if signal == 0 {
        exit((status >> 8) & 0xff);
    }
    // The job's core dump, if any, was written by the job.
    sys::forbid_core();
    sys::raise(signal);
    exit(128 + signal)
}

//! CRIU's log: bounded while it is written, and explained to users.
//!
//! CRIU's own error fields are of little use: `cr_errmsg` is the first error line that it ever logged, often a harmless
//! one. The reason for a failure is in the last error lines before "FAILED".

use std::collections::VecDeque;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// Lines kept from the beginning and from the end. A restore that loops once logged 83 GB in 40 minutes.
const HEAD: usize = 200;
const TAIL: usize = 2000;
/// Logged by every run without CAP_SYS_RESOURCE, whether it succeeds or not.
const HARMLESS: &str = "Can't setup RLIMIT_NOFILE";
/// Bytes of a line that are read.
const LINE: u64 = 4096;

/// The log of one CRIU run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Log {
    head: Vec<String>,
    tail: VecDeque<String>,
    dropped: usize,
}

/// Reads a log until all its writers have closed it.
#[derive(Debug)]
pub(crate) struct Reader {
    log: Arc<Mutex<Log>>,
    done: mpsc::Receiver<()>,
}

impl Reader {
    pub(crate) fn start(pipe: OwnedFd) -> std::io::Result<Reader> {
        let log = Arc::new(Mutex::new(Log::default()));
        let (finished, done) = mpsc::channel();
        let shared = Arc::clone(&log);
        let read = move || {
            let mut lines = BufReader::new(std::fs::File::from(pipe));
            let mut line = Vec::new();
            loop {
                line.clear();
                let limited = &mut std::io::Read::take(&mut lines, LINE);
                match limited.read_until(b'\n', &mut line) {
                    Ok(0) | Err(_) => break,
                    Ok(_) => {
                        let text = String::from_utf8_lossy(&line).trim_end().to_string();
                        shared.lock().unwrap_or_else(PoisonError::into_inner).push(text);
                    }
                }
            }
            // Nobody may be waiting any more.
            let _ = finished.send(());
        };
        std::thread::Builder::new().name("criu-log".into()).spawn(read)?;
        Ok(Reader { log, done })
    }

    /// Returns the log. Waits for its end, but no longer than `limit`, because a remaining task could have the pipe
    /// open.
    pub(crate) fn finish(self, limit: Duration) -> Log {
        let _ = self.done.recv_timeout(limit);
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl<'a> FromIterator<&'a str> for Log {
    fn from_iter<I: IntoIterator<Item = &'a str>>(lines: I) -> Log {
        let mut log = Log::default();
        lines.into_iter().for_each(|line| log.push(line.to_owned()));
        log
    }
}

impl Log {
    fn push(&mut self, line: String) {
        if self.head.len() < HEAD {
            self.head.push(line);
            return;
        }
        if self.tail.len() == TAIL {
            self.tail.pop_front();
            self.dropped += 1;
        }
        self.tail.push_back(line);
    }

    /// The log as text, with a note where lines are omitted.
    #[must_use]
    pub fn text(&self) -> String {
        let gap = (self.dropped > 0).then(|| format!("[{} lines left out]", self.dropped));
        let lines = self.head.iter().chain(&gap).chain(&self.tail);
        lines.flat_map(|line| [line.as_str(), "\n"]).collect()
    }

    /// The last error lines, without time, pid and source position; at most six, oldest first.
    #[must_use]
    pub fn errors(&self) -> Vec<String> {
        let all: Vec<&String> = self.head.iter().chain(&self.tail).collect();
        // Messages after "FAILED" are from cleaning up.
        let end = all.iter().rposition(|l| l.contains("Dumping FAILED") || l.contains("Restoring FAILED"));
        let before = &all[..end.unwrap_or(all.len())];
        let mut errors: Vec<String> = before.iter().filter_map(|line| error_text(line)).collect();
        errors.retain(|e| !e.contains(HARMLESS));
        errors.dedup();
        errors.split_off(errors.len().saturating_sub(6))
    }

    /// Whether a process was ending.
    #[must_use]
    pub fn says_ending(&self) -> bool {
        self.errors().iter().any(|line| line.contains(ENDING))
    }

    /// Whether a connection by a UNIX socket was not accepted yet that CRIU cannot save.
    #[must_use]
    pub fn says_unaccepted(&self) -> bool {
        self.errors().iter().any(|line| UNACCEPTED.iter().any(|mark| line.contains(mark)))
    }

    /// Whether CRIU lacked a right.
    #[must_use]
    pub fn says_denied(&self) -> bool {
        let denied = |line: &String| line.contains("Operation not permitted") || line.contains("Permission denied");
        self.errors().iter().any(denied)
    }

    /// Whether another program has a port that the image needs.
    #[must_use]
    pub fn says_port_taken(&self) -> bool {
        self.errors()
            .iter()
            .any(|line| line.contains("Can't bind inet socket") && line.contains("Address already in use"))
    }

    /// Whether a task was killed with SIGKILL meanwhile (reported by CRIU's `sigchld_handler` and
    /// `compel_stop_on_syscall`): by the kernel for lack of memory, or by somebody. After an error of its own CRIU
    /// kills the other tasks itself, which does not count.
    #[must_use]
    pub fn says_killed(&self) -> bool {
        let says = |line: &str| line.contains("killed by signal 9:") || line.contains("signaled with 9:");
        let is_reason = |line: &str| error_text(line).is_some_and(|text| !text.contains(HARMLESS));
        let first = self.head.iter().chain(&self.tail).find(|line| says(line) || is_reason(line));
        first.is_some_and(|line| says(line))
    }

    /// Whether a dump failed because of something that the job was just doing, and that will probably be over soon.
    #[must_use]
    pub fn says_moment(&self) -> bool {
        let passes = |line: &String| MOMENTS.iter().any(|mark| line.contains(mark));
        self.says_killed() || self.errors().iter().any(passes)
    }

    /// What to do about it, if the failure is a known one.
    #[must_use]
    pub fn hint(&self) -> Option<&'static str> {
        let errors = self.errors();
        HINTS.iter().find(|(mark, _)| errors.iter().any(|e| e.contains(mark))).map(|(_, hint)| *hint)
    }
}

/// `(00.012) [ pid: ]Error (criu/x.c:12): text` to `text`.
fn error_text(line: &str) -> Option<String> {
    let (_, after) = line.split_once("Error (")?;
    let (_, text) = after.split_once("): ")?;
    Some(text.trim().to_string())
}

/// A process whose first thread has ended, and whose other threads will end soon (compel/src/lib/infect.c).
const ENDING: &str = "Zombies with threads";

/// Data was sent before the connection was accepted, or it was closed (criu/sk-unix.c).
const UNACCEPTED: [&str; 2] = ["Non-empty write queue on an in-flight socket", "Found a closed in-flight socket"];

/// A deleted file cannot be given a name for the time of a dump (criu/files-reg.c).
const LINK_REMAP: &str = "Can't link remap to";

/// Messages of CRIU 4.2 for temporary problems.
const MOMENTS: &[&str] = &[
    ENDING,
    // A connection that is not accepted yet, and that was not to be left out (criu/sk-inet.c).
    "In-flight connection (l)",
    UNACCEPTED[0],
    UNACCEPTED[1],
    // It was connected or closed between two checks (criu/sk-inet.c).
    "obtained but expected",
    // An answer of the kernel that is not read yet (criu/sk-netlink.c).
    "The socket has data to read",
    // Less could be read from the queue of a connection of TCP than was there a moment before, while it was being filled: seen
    // once, with megabytes on a busy machine (soccr/soccr.c).
    "recv failed (",
    // In the middle of a message of several sends with MSG_MORE (criu/sk-inet.c).
    "corked dgram",
    // A helper of CRIU, or a process that it examined (criu/util.c).
    "unexpectedly",
    "No such process",
];

/// Messages of CRIU 4.2 with advice, the more specific first.
const HINTS: &[(&str, &str)] = &[
    // The process that did it may be over when it is looked for.
    (
        ENDING,
        "a process has ended its first thread (pthread_exit in main), while others run: let the first thread wait for them",
    ),
    (
        "with a pending SIGTRAP",
        "a breakpoint of the job, or of a debugger that has ended, waits to be handled: let the program handle the signal, or end it",
    ),
    (
        "corked dgram",
        "a program of the job has begun a message of UDP and not sent the rest of it (UDP_CORK, MSG_MORE): have it send the rest",
    ),
    (
        "Can't get rlimit",
        "a process of the job changed its user (sudo, su), and CRIU needs CAP_SYS_RESOURCE to read its limits: start rekindle with it",
    ),
    (
        "anon_inode:[io_uring",
        "the job uses io_uring, which CRIU cannot dump: leave \"io-uring\" out of job.allow, so that programs do not use it",
    ),
    (
        "allow-uprobes",
        "a monitor with eBPF or uprobes watches the job: keep it away from the programs and libraries of the job, and start the job again",
    ),
    (
        "send_fds failed",
        "most likely an io_uring descriptor, which CRIU cannot dump: leave \"io-uring\" out of job.allow, so that programs do not use it",
    ),
    (
        "Can't retrieve FDs from socket",
        "most likely an io_uring descriptor, which CRIU cannot dump: leave \"io-uring\" out of job.allow, so that programs do not use it",
    ),
    (
        "has bad size",
        "a file that the job has open or mapped is not the same as at the snapshot: was it replaced, or a package upgraded?",
    ),
    ("has bad mode", "the permissions of a file that the job has open changed since the snapshot: restore them"),
    (
        "has bad build-ID",
        "a library that the job uses was upgraded since the snapshot: install the version used at the snapshot",
    ),
    ("Can't fork for", "a pid of the image is in use in the job's own namespace: report this as a fault of rekindle"),
    ("increase limit", "a deleted file that the job still has open is larger than 4095 MiB, the most that CRIU copies"),
    (
        "Can't create link remap",
        "a file that the job has open was deleted and has another hard link, and its folder is not writable",
    ),
    (
        LINK_REMAP,
        "a file that the job has open was deleted and has another hard link, and it gets a further name (link_remap.N) in its folder during a snapshot: is the folder writable? If such a name exists and no other job takes a snapshot there, remove it",
    ),
    (
        "Dump eventpoll",
        "an epoll set (epoll, selectors, asyncio, libuv) still has a file that this process has closed, because another process, such as a child that was forked, has it open: close it there, or have the program remove a file from the set before it closes it",
    ),
    ("Can't link ", "a file that was deleted before the snapshot cannot be restored: its saved hard link is gone"),
    ("Connected TCP socket", "the job has a TCP connection: set snapshot.tcp to \"close\" or \"keep\""),
    ("--tcp-close", "the image was taken with snapshot.tcp = \"close\""),
    (
        "Can't connect inet socket back",
        "a TCP connection to the outside cannot be restored: take snapshots with snapshot.tcp = \"close\"",
    ),
    (
        "Can't bind inet socket",
        "the port is in use: end the process that listens on it, or set network.mode = \"private\" for jobs that need no network",
    ),
    (
        "Connected TCP socket in unexpected state",
        "the job was opening or closing a TCP connection; the next attempt may work",
    ),
    (
        "tty:",
        "the job has a terminal open; start it with its output in files: rekindle does so unless the job opens /dev/tty itself",
    ),
    (
        "Unable to load",
        "CRIU cannot load rekindle's plugin: this CRIU is a static program that a script starts; name one in criu.path that is linked dynamically, such as your distribution's",
    ),
    ("handle_device_vma", "a device is mapped that CRIU cannot dump"),
    ("chr 10:", "the job has a device open that CRIU cannot dump"),
    ("perf_event", "the job has a perf event open, which CRIU cannot dump: stop profiling it"),
    ("userfaultfd", "the job uses userfaultfd, which CRIU cannot dump"),
    (
        "Unsupported proto 262",
        "the job has a socket of Multipath TCP, which CRIU cannot dump: set GODEBUG=multipathtcp=0 for Go programs, or switch it off (sysctl net.mptcp.enabled=0)",
    ),
    (
        "landlock-ruleset",
        "the job has a ruleset of Landlock open, which CRIU cannot dump: the program that makes a sandbox of it has to close it",
    ),
    ("secretmem", "the job uses memfd_secret, which CRIU cannot dump"),
    ("packetized mode for pipes", "the job has a pipe with O_DIRECT (pipe2), which CRIU cannot dump"),
    (
        "The socket has data to read",
        "the job has not read an answer of the kernel (netlink) yet; the next attempt may work",
    ),
    (
        "Can't lookup mount=",
        "a process has a file open of a file system that is not mounted where CRIU looks; POSIX message queues (mq_open) are such files, and CRIU cannot dump them",
    ),
    (
        ", state D, err",
        "a process of the job waits in the kernel and cannot be stopped: a hung network file system, a busy driver, or a child of vfork that has not called exec",
    ),
    (
        "unsupported stop signal",
        "a process of the job was stopped by its terminal, because it runs in the background and reads from it or writes to it (SIGTTIN, SIGTTOU): continue it (fg), end it, or stop it with SIGSTOP",
    ),
    (
        "Control messages in queue",
        "a UNIX socket of the job with SO_PASSCRED has messages that were not read, and CRIU cannot save the credentials of their senders: let the job read them, or switch SO_PASSCRED off",
    ),
    (
        "Can't get 1:39 opt",
        "the job has the file of a UNIX socket open with O_PATH, which CRIU takes for a socket: close it",
    ),
    (
        "No NS ID with kid",
        "the job has a namespace open (/proc/PID/ns/..., a file of `ip netns`) that is not its own: close it before a snapshot",
    ),
    (
        "Can't dump that handle",
        "the job watches a file with inotify or fanotify that CRIU cannot find again, such as one in /proc, /sys or /dev/pts: read it at intervals in place of that",
    ),
    (
        "Net namespace is required to dump tun",
        "the job has a TUN or TAP device, which belongs to the network of the machine: run the program that makes it (a VPN, an emulator) outside the job",
    ),
    (
        "remote mmap() failed",
        "a process of the job has a limit on its memory (ulimit -v, RLIMIT_AS) that leaves no room for the code of CRIU: raise it, with prlimit --as while it runs",
    ),
    (
        "Unknown socket collected",
        "the job has a socket of a family that CRIU does not know, such as AF_XDP: close it before a snapshot, or run its program outside the job",
    ),
    (
        "anon_inode:bpf",
        "the job has a map or a program of eBPF open, which CRIU cannot dump: run the program that loads it outside the job",
    ),
    (
        "anon_inode:seccomp notify",
        "a process of the job answers system calls of another one (SECCOMP_RET_USER_NOTIF, as sandboxes and container engines do), which CRIU cannot dump: run both outside the job",
    ),
    (
        "PIDFD_THREAD",
        "the job has a pidfd of a thread (PIDFD_THREAD), which CRIU cannot dump: use one of the process, or close it",
    ),
    (
        "anon_inode:[fscontext]",
        "the job prepares a mount (fsopen), which CRIU cannot dump: close the descriptor once the file system is mounted",
    ),
    ("Unseizable non-zombie", "a debugger or strace is attached to the job: detach it"),
    ("nested", "the job made namespaces of its own (a sandbox, a container), which CRIU cannot dump from outside"),
    (
        "Can't restore sub-task in NS",
        "a child of the job had a mount or network namespace of its own, which CRIU cannot restore here",
    ),
    (
        "suspending seccomp failed",
        "CRIU needs CAP_SYS_ADMIN and must not run under a seccomp filter itself (Docker: --security-opt seccomp=unconfined)",
    ),
    (
        "without peer",
        "the job is connected to a UNIX socket of a program in another network (with network.mode = \"private\", of any outside, such as syslog): close the socket before the snapshot, or send without connecting",
    ),
    ("External socket is used", "the job has a UNIX socket whose other end is outside the job"),
    (
        "dump half of stream unix",
        "the job is connected to a UNIX socket outside the job (a daemon, an agent): close the connection before the snapshot",
    ),
    (
        "Timeout reached",
        "a task could not be stopped in time: it waits in the kernel (a hung network file system, a busy driver)",
    ),
    ("unexpected rt vDSO", "this CRIU is too old for the kernel: CRIU 4.1 or newer is needed from kernel 6.13 on"),
    ("Can't get 1:16 opt", "this CRIU is too old for the kernel: CRIU 4.2 or newer is needed from kernel 6.16 on"),
    ("ELF header magic mismatch", "the image was made by a newer CRIU"),
    ("No space left", "the file system is full"),
    ("Unexpected EOF on", "an image file is empty or truncated: the image is incomplete"),
    ("xfeatures has unsupported bits", "this CPU lacks features that the CPU of the snapshot had"),
    ("xsave size mismatch", "this CPU lacks features that the CPU of the snapshot had"),
    ("Can't open file", "a file that the job had open does not exist any more"),
    ("Operation not permitted", MISSING_RIGHT),
    ("Permission denied", MISSING_RIGHT),
];

const MISSING_RIGHT: &str = "a right is missing: run as root with all capabilities; `rekindle doctor` shows which";

#[cfg(test)]
mod tests {
    use super::*;

    fn log(lines: &[&str]) -> Log {
        lines.iter().copied().collect()
    }

    #[test]
    fn the_reason_is_the_last_errors_before_failed() {
        let log = log(&[
            "(00.000001) Error (criu/util.c:1534): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted",
            "(00.010001) Warn  (criu/x.c:1): nothing",
            "(00.020001)   1000: Error (criu/files-reg.c:2211): File tmp/o.txt has bad size 486 (expect 270)",
            "(00.020002) Error (criu/cr-restore.c:1): Restoring FAILED.",
            "(00.020003) Error (criu/cgroup.c:1): later",
        ]);
        assert_eq!(log.errors(), ["File tmp/o.txt has bad size 486 (expect 270)"]);
        assert!(log.hint().unwrap().contains("replaced"));
    }

    #[test]
    fn a_task_that_criu_killed_after_an_error_was_not_killed_by_others() {
        let harmless =
            "(00.1) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: Operation not permitted";
        let killed = "(00.3) Error (criu/cr-restore.c:1): 1001 killed by signal 9: Killed";
        let mode = "(00.2) Error (criu/files-reg.c:1): File tmp/file has bad mode 0100444 (expect 0100644)";
        assert!(log(&[harmless, killed]).says_killed());
        assert!(!log(&[harmless, mode, killed]).says_killed());
        assert!(!log(&[harmless, mode]).says_killed());
    }

    #[test]
    fn what_passes_by_itself_is_told_from_what_does_not() {
        let says = |line: &str| {
            let mut log = Log::default();
            log.push(format!("(00.018) Error (criu/x.c:1): {line}"));
            log.says_moment()
        };
        assert!(says("Zombies with threads are not supported"));
        assert!(says("inet: Socket state 8 obtained but expected 1"));
        assert!(says("unix: Non-empty write queue on an in-flight socket 0x971f78"));
        assert!(says("recv failed (3782114, want 3797474): Success"));
        assert!(says("1231 was killed by 9 unexpectedly: Killed"));
        assert!(
            !says("Can't link remap to data/a: Permission denied")
                && !says("Can't link remap to dev/shm/sem.a: File exists")
        );
        assert!(!says("File /x has bad size 3 (expect 4)") && !says("anon_inode:[io_uring] is not supported"));
    }

    /// Two messages of CRIU begin with the same words.
    #[test]
    fn a_name_that_cannot_be_given_in_a_dump_is_told_from_one_that_is_gone_in_a_restore() {
        let hint = |line: &str| log(&[&format!("(00.018) Error (criu/files-reg.c:1): {line}")]).hint().unwrap();
        assert!(hint("Can't link remap to dev/shm/sem.a: File exists").contains("remove it"));
        assert!(hint("Can't link dev/shm/link_remap.4 -> dev/shm/sem.a: No such file").contains("is gone"));
    }

    /// What CRIU 4.2 said of these programs.
    #[test]
    fn what_cannot_be_dumped_is_explained() {
        for (line, words) in [
            ("Zombies with threads are not supported", "first thread"),
            ("Unseizable non-zombie 1001 found, state D, err -1/4", "child of vfork"),
            ("Unseizable non-zombie 1001 found, state S, err -1/1", "a debugger"),
            ("SEIZE 1005: unsupported stop signal 21", "SIGTTIN"),
            ("skqueue: Control messages in queue, not supported", "SO_PASSCRED"),
            ("sockets: Can't get 1:39 opt: Bad file descriptor", "O_PATH"),
            ("No NS ID with kid 4026532180", "namespace open"),
            ("fsnotify: \tCan't dump that handle", "inotify"),
            ("tun: Net namespace is required to dump tun link", "TUN or TAP"),
            ("remote mmap() failed: Cannot allocate memory", "RLIMIT_AS"),
            ("sockets: BUG! Unknown socket collected (family 44)", "AF_XDP"),
            ("Can't dump file 3 of that type [600] (anon anon_inode:bpf-map)", "eBPF"),
            ("Can't dump file 3 of that type [600] (anon anon_inode:bpf-prog)", "eBPF"),
            ("Can't dump file 5 of that type [600] (anon anon_inode:seccomp notify)", "SECCOMP_RET_USER_NOTIF"),
            ("pidfd: PIDFD_THREAD flag is currently not supported", "pidfd of a thread"),
            ("Can't dump file 3 of that type [600] (anon anon_inode:[fscontext])", "fsopen"),
        ] {
            let more = "(00.19) Error (criu/cr-dump.c:1): Dump files (pid: 1001) failed with -1";
            let hint = log(&[&format!("(00.18) Error (criu/x.c:1): {line}"), more]).hint().unwrap_or_default();
            assert!(hint.contains(words), "{line}: {hint}");
        }
    }

    #[test]
    fn a_set_with_a_closed_file_is_explained() {
        let hint =
            log(&["(00.18) Error (criu/cr-dump.c:1): Dump eventpoll (pid: 1001) failed with -1"]).hint().unwrap();
        assert!(hint.contains("before it closes it"));
    }

    #[test]
    fn an_endless_log_stays_bounded() {
        let mut log = Log::default();
        for n in 0..100_000 {
            log.push(format!("line {n}"));
        }
        let text = log.text();
        assert!(text.starts_with("line 0\n") && text.ends_with("line 99999\n") && text.contains("lines left out"));
        assert!(text.lines().count() <= HEAD + TAIL + 1);
    }
}

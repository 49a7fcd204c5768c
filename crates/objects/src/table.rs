//! The table: for each item what it is, how it is compared, and what a difference means.
//!
//! The documentation's list (docs/comparison.md) is made from it, so an item cannot be forgotten there.

mod options;

pub use options::{Level, OPTIONS, Shape, SocketOption};

/// What an item belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Of {
    /// A process: what its threads have together.
    Process,
    /// A thread.
    Thread,
    /// A descriptor, or the file, socket or other object behind it.
    Descriptor,
    /// A range of memory.
    Mapping,
}

/// How two values are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// They must be equal.
    Equal,
    /// The same lines, in any order.
    Lines,
    /// Flags of open(2), in octal: what matters after the call must be equal.
    Flags,
    /// Files that an epoll set watches: those whose number was closed may have another one.
    Watched,
    /// Numbers that may only grow: more can come while CRIU reads.
    AtLeast,
    /// Sets of signals, as hexadecimal digits: more can come.
    AtLeastThese,
    /// Nanoseconds until a timer fires, which pass.
    TimeLeft,
    /// A line for each timer, at the end of which is the time until it fires, in nanoseconds.
    TimesLeft,
    /// Ranges of memory with what was said of each ([`crate::Advice`]).
    Ranges,
    /// Directions of a connection that are over ([`OVER`]): the end of one can come while CRIU reads, behind data.
    Over,
    /// They differ in every restore.
    Never,
}

/// Values of [`How::Over`]: more come later in the list.
pub(crate) const OVER: [&str; 3] = ["no", "to receive", "to send and to receive"];

/// Values of the item `error`.
pub(crate) const NO_ERROR: &str = "0";
pub(crate) const ERROR: &str = "1";

/// What a difference means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Means {
    /// rekindle sets the old value, and compares again. If it still differs, it is told.
    PutBack,
    /// rekindle has the thread set it, once CRIU has let go of it. What it cannot set is told.
    SetLater,
    /// The job would be wrong: the restore fails.
    Refused,
    /// The kernel cannot give it back. It is told once for each restore.
    Told,
}

/// One line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// Its name in a record.
    pub item: &'static str,
    /// What it belongs to.
    pub of: Of,
    /// What it is, in words.
    pub what: &'static str,
    /// How values are compared.
    pub how: How,
    /// What a difference means.
    pub means: Means,
}

const fn row(of: Of, item: &'static str, what: &'static str, how: How, means: Means) -> Row {
    Row { item, of, what, how, means }
}

use How::{AtLeast, AtLeastThese, Equal, Flags, Lines, Never, Over, Ranges, TimeLeft, TimesLeft, Watched};
use Means::{PutBack, Refused, SetLater, Told};
use Of::{Descriptor, Mapping, Process, Thread};

/// The table, without the options of sockets ([`OPTIONS`]).
pub const ROWS: &[Row] = &[
    row(Process, "process", "whether it exists", Equal, Refused),
    row(Process, "parent", "parent", Equal, Refused),
    row(Process, "process-group", "process group", Equal, Refused),
    row(Process, "session", "session", Equal, Refused),
    row(Process, "terminal", "controlling terminal of the leader of a session", Equal, Refused),
    row(Process, "inherited-terminal", "controlling terminal of the others in a session", Equal, Told),
    row(Process, "exit-signal", "signal to its parent when it ends", Equal, Refused),
    row(Process, "executable", "executable file", Equal, Refused),
    row(Process, "directory", "working directory", Equal, Refused),
    row(Process, "root", "root directory (chroot)", Equal, Refused),
    row(Process, "umask", "umask", Equal, Refused),
    row(Process, "ignored-signals", "signals that it ignores", Equal, Refused),
    row(Process, "caught-signals", "signals that it has handlers for", Equal, Refused),
    row(Process, "pending-signals", "signals that wait for the process", AtLeastThese, Refused),
    row(Process, "timers", "POSIX timers (timer_create(2)): clock, signal, and whom it is for", Equal, Refused),
    row(Process, "timer-times", "POSIX timers: interval, and time until they fire", TimesLeft, Refused),
    row(Process, "interval-timers", "interval timers (setitimer(2))", TimesLeft, Refused),
    row(
        Process,
        "memory-advice",
        "what it has said of its memory (madvise(2), mlock(2), mbind(2), mseal(2)), if that is not more than 1 GiB",
        Ranges,
        Told,
    ),
    row(
        Process,
        "signal-actions",
        "what it does at a signal (sigaction(2)): handler, flags, and signals that are blocked meanwhile",
        Lines,
        Refused,
    ),
    row(Process, "memory-barriers", "memory barriers that it has registered for (membarrier(2))", Equal, Refused),
    row(Process, "autogroup", "nice value of its session's autogroup (sched(7))", Equal, PutBack),
    row(Process, "memory-merge", "whether equal pages of its memory are merged (PR_SET_MEMORY_MERGE)", Equal, SetLater),
    row(Process, "dumpable", "whether others may inspect it (prctl(2), PR_SET_DUMPABLE)", Equal, SetLater),
    row(Process, "child-subreaper", "whether it gets orphans (PR_SET_CHILD_SUBREAPER)", Equal, SetLater),
    row(Process, "secure-bits", "what root's ids mean for its capabilities (PR_SET_SECUREBITS)", Equal, SetLater),
    row(
        Process,
        "undo-list",
        "whether its end undoes operations on System V semaphores (SEM_UNDO), as far as that can be seen",
        Equal,
        Told,
    ),
    row(Process, "layout", "addresses of its program, heap, stack, arguments and environment", Equal, Refused),
    row(Process, "limits", "resource limits", Lines, PutBack),
    row(Process, "oom-score-adj", "oom_score_adj", Equal, PutBack),
    row(Process, "core-filter", "core dump filter", Equal, PutBack),
    row(Process, "control-groups", "control groups, as seen from that of the job", Lines, Told),
    row(Process, "login-uid", "login uid of the audit system", Equal, Told),
    row(Process, "start-time", "start time", Never, Told),
    row(Thread, "thread", "whether it exists", Equal, Refused),
    row(Thread, "name", "name", Equal, Refused),
    row(Thread, "users", "user ids: real, effective, saved, of file access", Equal, Refused),
    row(Thread, "groups", "group ids: real, effective, saved, of file access", Equal, Refused),
    row(Thread, "more-groups", "supplementary groups", Equal, Refused),
    row(Thread, "capabilities", "capabilities: inheritable, permitted, effective, bounding, ambient", Equal, Refused),
    row(Thread, "no-new-privileges", "no-new-privileges flag", Equal, Refused),
    row(Thread, "seccomp", "seccomp mode and number of filters", Equal, Refused),
    row(Thread, "blocked-signals", "signals that it blocks", AtLeastThese, Refused),
    row(Thread, "pending-signals", "signals that wait for the thread", AtLeastThese, Refused),
    row(Thread, "robust-list", "robust list of futexes", Equal, Refused),
    row(Thread, "rseq", "area of restartable sequences (rseq(2))", Equal, Refused),
    row(Thread, "alternate-stack", "stack for signal handlers (sigaltstack(2))", Equal, Refused),
    row(Thread, "clear-at-end", "address that is cleared at its end (set_tid_address(2))", Equal, Refused),
    row(Thread, "parent-death-signal", "signal at the end of its parent (PR_SET_PDEATHSIG)", Equal, SetLater),
    row(Thread, "scheduling", "scheduling policy, priority, nice value and flags", Equal, Told),
    row(Thread, "io-priority", "I/O priority", Equal, PutBack),
    row(Thread, "timer-slack", "timer slack", Equal, PutBack),
    row(Thread, "personality", "personality(2)", Equal, SetLater),
    row(Thread, "memory-policy", "memory policy (set_mempolicy(2), numactl)", Equal, SetLater),
    row(Thread, "huge-pages", "whether it may get transparent huge pages (prctl(2), PR_SET_THP_DISABLE)", Equal, Told),
    row(Mapping, "mapping", "address, size, protection, file and offset", Equal, Refused),
    row(Descriptor, "descriptor", "whether it exists", Equal, Refused),
    row(Descriptor, "kind", "what it is: file, pipe, socket, eventfd, ...", Equal, Refused),
    row(Descriptor, "path", "path of the file", Equal, Refused),
    row(Descriptor, "deleted", "whether the file's name is gone", Equal, Refused),
    row(Descriptor, "same", "which other descriptors are the same open file", Equal, Refused),
    row(Descriptor, "object", "which other descriptors lead to the same pipe or socket", Equal, Refused),
    row(Descriptor, "flags", "status flags and close-on-exec", Flags, Refused),
    row(Descriptor, "position", "position in the file", Equal, Refused),
    row(Descriptor, "locks", "locks and leases on the file", Lines, Told),
    row(Descriptor, "owner", "who gets its signals (F_SETOWN), and which signal (F_SETSIG)", Equal, Told),
    row(Descriptor, "size", "size of the pipe", Equal, PutBack),
    row(Descriptor, "queued", "bytes that wait in the pipe or terminal", AtLeast, Refused),
    row(Descriptor, "unsent", "bytes of a terminal that were not written yet", Equal, Refused),
    row(Descriptor, "settings", "settings of the terminal", Equal, Refused),
    row(Descriptor, "window", "window size of the terminal", Equal, Refused),
    row(Descriptor, "exclusive", "whether nobody else may open the terminal (TIOCEXCL)", Equal, PutBack),
    row(Descriptor, "seals", "seals of a memfd", Equal, PutBack),
    row(Descriptor, "count", "count of an eventfd", Equal, Refused),
    row(Descriptor, "semaphore", "whether an eventfd is a semaphore (EFD_SEMAPHORE)", Equal, Refused),
    row(Descriptor, "epoll", "descriptors that an epoll set watches, with events and data", Watched, Refused),
    row(
        Descriptor,
        "epoll-disarmed",
        "descriptors in an epoll set that wait to be armed again (EPOLLONESHOT)",
        Lines,
        Told,
    ),
    row(Descriptor, "signals", "signals of a signalfd", Equal, Refused),
    row(Descriptor, "clock", "clock and flags of a timerfd", Equal, Refused),
    row(Descriptor, "ticks", "ticks of a timerfd that were not read", AtLeast, Refused),
    row(Descriptor, "armed", "whether a timerfd runs or has fired", Equal, Refused),
    row(Descriptor, "time-left", "time until a timerfd fires", TimeLeft, Refused),
    row(Descriptor, "interval", "interval of a timerfd", Equal, Refused),
    row(Descriptor, "inotify", "watches of inotify: number and events", Lines, Refused),
    row(Descriptor, "inotify-flags", "watches of inotify with IN_ONESHOT or IN_EXCL_UNLINK", Lines, PutBack),
    row(Descriptor, "inotify-nameless", "watches of inotify on open files whose names are gone", Lines, PutBack),
    row(Descriptor, "fanotify", "marks of fanotify", Lines, Refused),
    row(Descriptor, "process", "process of a pidfd", Equal, Refused),
    row(Descriptor, "family", "address family of a socket", Equal, Refused),
    row(Descriptor, "type", "type of a socket", Equal, Refused),
    row(Descriptor, "protocol", "protocol of a socket", Equal, Refused),
    row(Descriptor, "state", "whether a socket listens, is connected or closed", Equal, Refused),
    row(Descriptor, "shutdown", "whether a direction of a connection was shut down (shutdown(2))", Over, Refused),
    row(
        Descriptor,
        "error",
        "whether an error waits in a socket of IP (TCP gets ECONNRESET, also for a connection that the image has closed)",
        AtLeast,
        PutBack,
    ),
    row(Descriptor, "address", "address of a socket", Equal, Refused),
    row(Descriptor, "file", "file of a UNIX socket, which may have been renamed since it was bound", Equal, PutBack),
    row(Descriptor, "raw-address", "address of a raw socket", Equal, PutBack),
    row(Descriptor, "peer", "address of a socket's other end", Equal, Refused),
    row(Descriptor, "local-name", "name of a UNIX socket that is connected", Equal, Told),
    row(Descriptor, "peer-name", "name of a UNIX socket's other end", Equal, Told),
    row(Descriptor, "peer-user", "user at the other end of a UNIX socket (SO_PEERCRED)", Equal, Told),
    row(Descriptor, "readable", "bytes that wait to be read from a socket", AtLeast, Refused),
    row(
        Descriptor,
        "datagrams",
        "bytes of packets that wait in a socket of UDP, a raw or a packet socket",
        AtLeast,
        Told,
    ),
    row(Descriptor, "congestion", "congestion control of TCP", Equal, PutBack),
    row(Descriptor, "device", "network device that a socket is bound to", Equal, PutBack),
    row(Descriptor, "multicast", "multicast groups of a socket, and the senders that it listens to", Lines, PutBack),
];

/// All rows: also those of the options of sockets.
pub fn rows() -> impl Iterator<Item = Row> {
    let options = OPTIONS.iter().map(|option| Row {
        item: option.name,
        of: Of::Descriptor,
        what: option.name,
        how: How::Equal,
        means: if option.settable { Means::PutBack } else { Means::Told },
    });
    ROWS.iter().copied().chain(options)
}

/// The row of an item; `None` for one of a newer version.
#[must_use]
pub fn find(of: Of, item: &str) -> Option<Row> {
    let found = ROWS.iter().copied().find(|row| row.of == of && row.item == item);
    found.or_else(|| rows().skip(ROWS.len()).find(|row| row.of == of && row.item == item))
}

/// The table as Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut text = String::from("| of | item | in a restore |\n|---|---|---|\n");
    for row in ROWS {
        let of = match row.of {
            Of::Process => "process",
            Of::Thread => "thread",
            Of::Descriptor => "descriptor",
            Of::Mapping => "memory",
        };
        let means = match (row.means, row.how) {
            (_, How::Never) => "is new; told",
            (Means::PutBack | Means::SetLater, _) => "put back",
            (Means::Refused, _) => "a difference fails the restore",
            (Means::Told, _) => "a difference is told",
        };
        text.push_str(&format!("| {of} | {} | {means} |\n", row.what));
    }
    for (settable, means) in [(true, "put back"), (false, "a difference is told")] {
        let names: Vec<String> =
            OPTIONS.iter().filter(|option| option.settable == settable).map(|option| option.name.to_owned()).collect();
        text.push_str(&format!("| descriptor | options of sockets: {} | {means} |\n", names.join(", ")));
    }
    text
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_item_is_there_once() {
        let all: Vec<(Of, &str)> = rows().map(|row| (row.of, row.item)).collect();
        let once: BTreeSet<_> = all.iter().copied().collect();
        assert_eq!(all.len(), once.len());
        assert!(all.iter().all(|(of, item)| find(*of, item).is_some_and(|row| row.item == *item)));
        assert_eq!(find(Of::Thread, "umask"), None);
    }

    #[test]
    fn the_documentation_has_this_table() {
        let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/comparison.md");
        let text = std::fs::read_to_string(docs).unwrap();
        assert!(text.contains(&markdown()), "docs/comparison.md must contain this:\n{}", markdown());
    }
}

//! Threads that do not share with their process what CRIU (4.2) lets all threads share, and children that it would make
//! otherwise.
//!
//! CRIU reads the folders, the descriptors and the namespaces of a process from its first thread, and gives them to all of its
//! threads. It starts each child with SIGCHLD, in the namespaces of its parent. Nothing fails if that is wrong, neither the dump
//! nor the restore, so it is refused here.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use super::unrestorable::Unrestorable;
use rekindle_os::process;
use rekindle_os::same::{Shared, shares};
use rekindle_os::undo;

/// Namespaces that a single thread can leave, as /proc/PID/ns and users call them.
const NAMESPACES: [(&str, &str); 7] = [
    ("mnt", "mount"),
    ("net", "network"),
    ("ipc", "IPC"),
    ("uts", "host name"),
    ("cgroup", "control group"),
    ("pid_for_children", "PID"),
    ("time_for_children", "time"),
];

/// The namespaces of a thread, in the order of [`NAMESPACES`].
type Links = [Option<PathBuf>; NAMESPACES.len()];

fn links(tid: i32) -> Links {
    NAMESPACES.map(|(file, _)| link(tid, file))
}

fn link(tid: i32, file: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{tid}/ns/{file}")).ok()
}

/// Checks the threads of a process, and what its children would get.
pub(crate) fn check(pid: i32) -> Result<(), Unrestorable> {
    let own = links(pid);
    check_children_to_come(pid, &own)?;
    let others: Vec<i32> = process::threads(pid).into_iter().filter(|tid| *tid != pid).collect();
    others.into_iter().try_for_each(|tid| check_thread(pid, tid, &own))
}

/// Checks that the next child of a process would be in the namespaces of the process.
fn check_children_to_come(pid: i32, own: &Links) -> Result<(), Unrestorable> {
    for ((for_children, kind), of_children) in NAMESPACES.iter().zip(own) {
        let Some(file) = for_children.strip_suffix("_for_children") else { continue };
        let Some(of_process) = link(pid, file) else { continue };
        // The namespace for children is not there as long as it has no process. That of a process which is ending is not there
        // either, and before Linux 5.6 there was none for time.
        let is_other = match of_children {
            Some(of_children) => *of_children != of_process,
            None => file == "pid" && !process::is_leaving(pid) && link(pid, for_children).is_none(),
        };
        if is_other {
            return Err(Unrestorable::of(
                pid,
                format!(
                    "has left its {kind} namespace for the children that it starts from now on (unshare(2) or setns(2)), and CRIU \
                     would start them in that of the process"
                ),
                "start the program without unshare, or run it outside the job",
            ));
        }
    }
    Ok(())
}

fn check_thread(pid: i32, tid: i32, own: &Links) -> Result<(), Unrestorable> {
    // A thread that is ending gives back what it shares, piece by piece, and so does the first one.
    let is_apart =
        |what| matches!(shares(pid, tid, what), Ok(false)) && ![pid, tid].into_iter().any(process::is_leaving);
    let apart = |what: String, remedy| {
        let thread = process::inner_pid(tid).unwrap_or(tid);
        Err(Unrestorable::of(pid, format!("has a thread ({thread}) with {what}"), remedy))
    };
    if is_apart(Shared::Folders) {
        return apart(
            "a working directory, root directory and umask of its own (unshare(2) or clone(2) without CLONE_FS), in whose place \
             CRIU would give it those of the process"
                .to_owned(),
            "have the program use openat(2) and its relatives in place of chdir(2) in a thread, or a process in place of the thread \
             (Samba does neither: run it outside the job)",
        );
    }
    if is_apart(Shared::Descriptors) {
        return apart(
            "descriptors of its own (unshare(2) or clone(2) without CLONE_FILES), in whose place CRIU would give it those of the \
             process"
                .to_owned(),
            "have the program use a process in place of the thread",
        );
    }
    if is_apart(Shared::UndoList) && undo::has_semaphores(pid).unwrap_or(true) {
        return apart(
            "operations on System V semaphores to undo at its own end (unshare(2) or clone(2) without CLONE_SYSVSEM), which after \
             a restore would be undone at the end of the process"
                .to_owned(),
            "have the program use a process in place of the thread, or remove the semaphores (ipcrm) if nobody uses them",
        );
    }
    for ((_, kind), (of_thread, of_process)) in NAMESPACES.iter().zip(links(tid).iter().zip(own)) {
        if let (Some(of_thread), Some(of_process)) = (of_thread, of_process)
            && of_thread != of_process
        {
            return apart(
                format!(
                    "its own {kind} namespace (unshare(2) or setns(2)), and CRIU would put it into that of the process"
                ),
                "let the thread return to the namespace of its process before a snapshot (setns), or do this in a program outside \
                 the job",
            );
        }
    }
    Ok(())
}

/// How long to wait for what is usually over at once: a child of vfork that calls exec.
const PATIENCE: Duration = Duration::from_millis(100);
const PAUSE: Duration = Duration::from_millis(2);

/// Waits a little until the processes, which must be running, are ones that CRIU can dump one by one. Refuses those that stay.
pub(crate) fn let_part(tree: &[i32], cancelled: &dyn Fn() -> bool) -> Result<(), Unrestorable> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match tree.iter().try_for_each(|pid| check_parted(*pid, tree)) {
            Err(_) if Instant::now() < deadline && !cancelled() => std::thread::sleep(PAUSE),
            found => return found,
        }
    }
}

/// A process whose first thread has ended, while others run. Most of these end soon.
pub(crate) fn without_first_thread(tree: &[i32]) -> Option<Unrestorable> {
    let runs = |pid: i32| process::threads(pid).into_iter().any(|tid| tid != pid && !process::is_leaving(tid));
    let pid = tree.iter().copied().find(|pid| process::has_ended(*pid) && runs(*pid))?;
    Some(Unrestorable::of(
        pid,
        "has ended its first thread (pthread_exit in main), while others run, and CRIU cannot dump that",
        "let the first thread wait for the others (pthread_join)",
    ))
}

/// Checks that a process shares nothing with its parent that only threads may share for CRIU.
fn check_parted(pid: i32, tree: &[i32]) -> Result<(), Unrestorable> {
    let parent = process::relations(pid).map(|found| found.parent).filter(|parent| tree.contains(parent));
    let Some(parent) = parent else { return Ok(()) };
    let shared = |what| matches!(shares(pid, parent, what), Ok(true)) && !process::is_leaving(pid);
    let shown =
        |pid: i32| format!("{} ({})", process::inner_pid(pid).unwrap_or(pid), process::name(pid).unwrap_or_default());
    if shared(Shared::Memory) {
        return Err(match process::state(parent) {
            Some('D') => Unrestorable::of(
                parent,
                format!(
                    "waits for its child {}, which runs in its memory (vfork), so CRIU can stop neither",
                    shown(pid)
                ),
                "let the child call exec or end, or start it with fork or posix_spawn. Snapshots continue then",
            ),
            _ => Unrestorable::of(
                pid,
                format!(
                    "shares its memory with process {} (clone(2) with CLONE_VM), which CRIU cannot dump",
                    shown(parent)
                ),
                "start it as a thread, or without CLONE_VM",
            ),
        });
    }
    if shared(Shared::Folders) {
        return Err(Unrestorable::of(
            pid,
            format!(
                "shares its working directory and umask with process {} (clone(2) with CLONE_FS), which CRIU cannot dump",
                shown(parent)
            ),
            "start it without CLONE_FS",
        ));
    }
    Ok(())
}

/// Checks that the children among the processes were started in the usual way. The first one is the root of the image.
pub(crate) fn check_exit_signals(tree: &[i32]) -> Result<(), Unrestorable> {
    for pid in tree.iter().skip(1) {
        match process::relations(*pid) {
            Some(found) if found.exit_signal != libc::SIGCHLD => {
                let signal = match nix::sys::signal::Signal::try_from(found.exit_signal) {
                    Ok(signal) => signal.to_string(),
                    Err(_) if found.exit_signal == 0 => "no signal".to_owned(),
                    Err(_) => format!("signal {}", found.exit_signal),
                };
                return Err(Unrestorable::of(
                    *pid,
                    format!(
                        "was started so that its parent gets {signal} at its end (clone(2)), and CRIU would make that SIGCHLD"
                    ),
                    "start it with fork(2), or with SIGCHLD in the flags of clone(2)",
                ));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A program that has called `unshare` with these flags, in a thread or by itself.
    fn unshared(flags: i32, is_thread: bool) -> Child {
        const SCRIPT: &str = "import ctypes, sys, threading\n\
            def leave():\n\
            \x20   failed = ctypes.CDLL(None).unshare(int(sys.argv[1]))\n\
            \x20   print(failed, flush=True)\n\
            \x20   sys.stdin.read()\n\
            thread = threading.Thread(target=leave)\n\
            thread.start() if sys.argv[2] == 'true' else leave()";
        let mut command = Command::new("python3");
        command.args(["-c", SCRIPT, &flags.to_string(), &is_thread.to_string()]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "0\n");
        child
    }

    fn said(flags: i32, is_thread: bool) -> String {
        let mut child = unshared(flags, is_thread);
        let found = check(child.id().cast_signed());
        drop(child.stdin.take());
        child.wait().unwrap();
        found.map_or_else(|found| found.to_string(), |()| String::new())
    }

    #[test]
    fn a_thread_that_is_not_like_its_process_is_found() {
        if !rekindle_testing::root() {
            return;
        }
        for (flags, words) in [
            (libc::CLONE_FS, "a working directory"),
            (libc::CLONE_FILES, "descriptors of its own"),
            (libc::CLONE_NEWNET, "its own network namespace"),
            (libc::CLONE_NEWUTS, "its own host name namespace"),
            (libc::CLONE_NEWIPC, "its own IPC namespace"),
            (libc::CLONE_NEWCGROUP, "its own control group namespace"),
        ] {
            let said = said(flags, true);
            assert!(said.contains("(python3) has a thread (") && said.contains(words), "{flags:x}: {said}");
        }
        let said = said(libc::CLONE_NEWPID, false);
        assert!(said.contains("has left its PID namespace for the children"), "{said}");
        assert_eq!(check(std::process::id().cast_signed()), Ok(()));
        assert_eq!(check(i32::MAX), Ok(()));
    }

    #[test]
    fn a_process_on_its_way_out_is_not_taken_for_another() {
        let mut child = Command::new("true").spawn().unwrap();
        let pid = child.id().cast_signed();
        while !process::has_ended(pid) {
            std::thread::yield_now();
        }
        let found = check(pid);
        child.wait().unwrap();
        assert_eq!(found, Ok(()));
    }
}

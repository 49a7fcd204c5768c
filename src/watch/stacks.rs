//! Records the stacks of a hung job's processes: `log/stacks-N.txt` in the job's folder.
//!
//! For each task its state and what it waits for in the kernel (wchan, stack); for each process the stacks of its own
//! code, if a tool is installed: py-spy for Python, else eu-stack, else gdb. Time, size and the number of files are
//! bounded.
//!
//! Such a tool parses the memory and files of the process, which may be crafted to exploit it. So it runs as the user
//! of that process, with that user's group only, without capabilities, and without our environment: an exploited tool
//! can do no more than the job. If that user may not trace the process (kernel.yama.ptrace_scope), only the kernel's
//! stacks are recorded.

use std::fmt::Write as _;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rekindle_base::cause::Missing;
use rekindle_engine::launch::find_program;
use rekindle_os::beneath::Beneath;
use rekindle_os::process;
use rekindle_os::spawn::Spawn;

/// Number of files kept, the newest ones.
const KEPT: usize = 5;
/// Maximum size of a file. The kernel's part, which is short, is written first.
const LARGEST: usize = 2 << 20;
/// Maximum bytes of a tool's output for one process.
const TOOL_LARGEST: usize = 256 << 10;
/// Time limit for a tool per process, which is stopped during that time.
const TOOL_TIME: Duration = Duration::from_secs(5);
/// Memory limit of a tool: for symbols of PyTorch, gdb needs some 2 GiB.
const TOOL_MEMORY: u64 = 4 << 30;
/// Time limit for all tools: the restart of the job waits for them.
const TOOLS_TIME: Duration = Duration::from_secs(20);
/// Maximum number of tasks that are recorded.
const TASKS: usize = 512;

/// Writes the stacks of the processes of the tree. Returns the file; `None` if it cannot be written.
pub(crate) fn keep(root: i32, logs: &Beneath, what: Missing, idle: Duration) -> Option<PathBuf> {
    let path = logs.join(format!("stacks-{}.txt", newest(logs).map_or(1, |n| n.saturating_add(1))));
    let mut text = capture(root, what, idle);
    let end = (0..=LARGEST.min(text.len())).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
    text.truncate(end);
    if let Err(error) = rekindle_os::durable::replace_file(&path, text.as_bytes(), 0o600) {
        tracing::warn!("cannot write stacks to {}: {error}", path.display());
        return None;
    }
    remove_old(logs);
    Some(path.path().to_owned())
}

fn numbers(logs: &Beneath) -> Vec<u32> {
    let names = logs.list().into_iter().flatten().filter_map(|name| name.into_string().ok());
    let number = |name: String| name.strip_prefix("stacks-")?.strip_suffix(".txt")?.parse().ok();
    let mut numbers: Vec<u32> = names.filter_map(number).collect();
    numbers.sort_unstable();
    numbers
}

fn newest(logs: &Beneath) -> Option<u32> {
    numbers(logs).last().copied()
}

fn remove_old(logs: &Beneath) {
    let numbers = numbers(logs);
    for number in numbers.iter().rev().skip(KEPT) {
        let _ = logs.join(format!("stacks-{number}.txt")).remove_file();
    }
}

fn capture(root: i32, what: Missing, idle: Duration) -> String {
    let mut text = String::new();
    let idle = humantime::format_duration(Duration::from_millis(u64::try_from(idle.as_millis()).unwrap_or(u64::MAX)));
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}: {what} for {idle}", chrono::Utc::now().to_rfc3339());
    let pids = process::tree(root);
    let tasks = pids.iter().flat_map(|pid| process::threads(*pid).into_iter().map(move |tid| (*pid, tid)));
    for (pid, tid) in tasks.take(TASKS) {
        task(&mut text, pid, tid);
    }
    for pid in &pids {
        let status = process::text(*pid, "status").unwrap_or_default();
        let _ = writeln!(text, "\n== status of process {pid}\n{status}");
    }
    let until = Instant::now() + TOOLS_TIME;
    // The stack of the reaper is of no interest.
    for pid in pids.iter().filter(|pid| **pid != root) {
        let _ = writeln!(text, "\n== stacks of process {pid}");
        match tool(*pid) {
            _ if Instant::now() >= until => text.push_str("skipped: this took too long already\n"),
            Some((name, program, args)) => match user_of(*pid) {
                Some(user) => {
                    let _ = writeln!(text, "by {name}");
                    let limit = TOOL_TIME.min(until.saturating_duration_since(Instant::now()));
                    text.push_str(&run(&program, &args, user, limit));
                    if let Some(scope) = yama().filter(|_| user.0 != 0) {
                        let _ = writeln!(text, "{} {scope}: {NOT_ALLOWED}", YAMA.1);
                    }
                }
                None => text.push_str(
                    "skipped: the process has the rights of more than one user, and a tool has those of one\n",
                ),
            },
            None => {
                text.push_str("none of py-spy, eu-stack and gdb is installed\n");
                break;
            }
        }
    }
    text
}

/// Writes the kernel's information about a task.
fn task(text: &mut String, pid: i32, tid: i32) {
    let read = |name: &str| process::text(pid, &format!("task/{tid}/{name}")).unwrap_or_default();
    let line = |name: &str| read(name).trim().to_owned();
    let state = process::state(tid).unwrap_or('?');
    let inner = process::inner_pid(tid).unwrap_or(tid);
    let wchan = Some(line("wchan")).filter(|wchan| !wchan.is_empty() && wchan != "0").unwrap_or_else(|| "-".into());
    let _ = writeln!(
        text,
        "\n== task {tid} of process {pid} ({}), {inner} in its own namespace: state {state}, waits in {wchan}",
        line("comm")
    );
    let _ = writeln!(text, "system call: {}", line("syscall"));
    text.push_str(&read("stack"));
}

/// The kernel setting that restricts tracing, as a file and as a name.
const YAMA: (&str, &str) = ("/proc/sys/kernel/yama/ptrace_scope", "kernel.yama.ptrace_scope is");
const NOT_ALLOWED: &str = "a process may not trace another one of the same user. Stacks need 0; no tool is run as root";

/// Its value, if it forbids this.
fn yama() -> Option<u32> {
    let scope = std::fs::read_to_string(YAMA.0).ok()?.trim().parse().ok()?;
    (scope > 0).then_some(scope)
}

/// User and group of a process that has only one of each.
fn user_of(pid: i32) -> Option<(u32, u32)> {
    let only = |ids: Vec<u32>| ids.first().copied().filter(|first| ids.iter().all(|id| id == first));
    Some((only(process::user_ids(pid)?)?, only(process::group_ids(pid)?)?))
}

type Call = (&'static str, PathBuf, Vec<String>);

/// The installed tool for this process.
fn tool(pid: i32) -> Option<Call> {
    let path = std::env::var_os("PATH");
    let find = |name: &str| find_program(name.as_ref(), Path::new("/"), path.as_deref()).ok();
    let text = pid.to_string();
    let args = |args: &[&str]| args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<String>>();
    let is_python = process::executable(pid).is_some_and(|exe| exe.to_string_lossy().contains("python"));
    let py_spy = || Some(("py-spy", find("py-spy")?, args(&["dump", "--native", "--pid", &text])));
    let eu_stack = || Some(("eu-stack", find("eu-stack")?, args(&["-p", &text])));
    let gdb = || {
        // Without the user's settings, and without asking a server for symbols, which takes minutes.
        let all =
            ["-nx", "-nh", "-batch", "-iex", "set debuginfod enabled off", "-iex", "set auto-load off", "-p", &text];
        Some(("gdb", find("gdb")?, [args(&all), args(&["-ex", "thread apply all bt 64"])].concat()))
    };
    is_python.then(py_spy).flatten().or_else(eu_stack).or_else(gdb)
}

/// Its output, and a line about what failed.
fn run(program: &Path, args: &[String], user: (u32, u32), limit: Duration) -> String {
    match output(program, args, user, limit) {
        Ok(text) => text,
        Err(error) => format!("failed: {error}\n"),
    }
}

fn output(program: &Path, args: &[String], user: (u32, u32), limit: Duration) -> std::io::Result<String> {
    let file = tempfile::tempfile()?;
    let fds = (OwnedFd::from(file.try_clone()?), OwnedFd::from(file.try_clone()?));
    let bytes = TOOL_LARGEST as u64;
    let most = |value| libc::rlimit { rlim_cur: value, rlim_max: value };
    // gdb looks for a shell there, but starts none.
    let environment = [("PATH", "/usr/bin:/bin")];
    // Started as a known child: the supervisor takes unknown children for those of a failed restore, and reaps them.
    let spawn = Spawn::new(program, args).map_err(std::io::Error::other)?;
    let child = spawn
        .environment(environment)
        .map_err(std::io::Error::other)?
        .fd(fds.0, 1)
        .fd(fds.1, 2)
        .limit(libc::RLIMIT_FSIZE, most(bytes))
        .limit(libc::RLIMIT_DATA, most(TOOL_MEMORY))
        .limit(libc::RLIMIT_CORE, most(0))
        .directory(Path::new("/"))
        .map_err(std::io::Error::other)?
        .session()
        .identity(user.0, user.1)
        .no_new_privileges()
        .dies_with_us()
        .start()
        .map_err(std::io::Error::other)?;
    let until = Instant::now() + limit;
    let mut note = "";
    while !child.has_ended()? {
        if Instant::now() >= until {
            note = "\ntook too long and was killed\n";
            child.signal(libc::SIGKILL)?;
            break;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    child.wait()?;
    let mut text = Vec::new();
    let mut file = file;
    std::io::Seek::rewind(&mut file)?;
    file.take(bytes).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned() + note)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_files_are_kept_and_numbers_go_on() {
        let dir = tempfile::tempdir().unwrap();
        let logs = Beneath::at(dir.path()).unwrap();
        std::fs::write(dir.path().join("stacks-x.txt"), "another's").unwrap();
        let mut root = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = root.id().cast_signed();
        // It sleeps only once it has got a processor.
        let stat = std::path::PathBuf::from(format!("/proc/{pid}/stat"));
        let until = Instant::now() + Duration::from_secs(60);
        while !std::fs::read_to_string(&stat).unwrap().contains("(sleep) S ") {
            assert!(Instant::now() < until, "{}", std::fs::read_to_string(&stat).unwrap());
            std::thread::sleep(Duration::from_millis(5));
        }
        for n in 1..=7 {
            // No tool is run on a root.
            let path = keep(pid, &logs, Missing::Output, Duration::from_millis(2500)).unwrap();
            assert_eq!(path, dir.path().join(format!("stacks-{n}.txt")));
        }
        assert_eq!(numbers(&logs), [3, 4, 5, 6, 7]);
        let text = std::fs::read_to_string(dir.path().join("stacks-7.txt")).unwrap();
        assert!(text.contains("it printed nothing for 2s 500ms") && text.contains("state S"), "{text}");
        root.kill().unwrap();
        root.wait().unwrap();
    }

    #[test]
    fn a_tool_that_takes_too_long_is_ended_and_one_that_says_too_much_is_cut() {
        let sh = |script: &str, limit| {
            let user = user_of(i32::try_from(std::process::id()).unwrap()).unwrap();
            run(Path::new("/bin/sh"), &["-c".into(), script.into()], user, limit)
        };
        if !rekindle_testing::root() {
            return;
        }
        // Long enough for a shell to start on a busy machine.
        let said = sh("echo so far; exec sleep 60", Duration::from_secs(8));
        assert!(said.starts_with("so far\n\ntook too long"), "{said}");
        // The limit of its file ends it.
        let flood = sh("while :; do echo 0123456789abcdef; done", Duration::from_secs(20));
        assert_eq!(flood.len() / 1000, TOOL_LARGEST / 1000);
        assert!(run(Path::new("/nowhere"), &[], (0, 0), TOOL_TIME).starts_with("failed: "));
    }
}

//! Runs one hook, with limits for its time and for its output.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;

use super::{Context, Point};
use crate::variables;
use rekindle_engine::launch;
use rekindle_os::spawn::{self, Child, Ended, Spawn};

/// Bytes kept of the end of a hook's output, for the message about it.
const KEPT: usize = 400;
/// How often to check whether it was cancelled.
const LOOK: Duration = Duration::from_millis(50);
/// How long a killed hook may take to end, on a busy machine.
pub(super) const GRACE: Duration = Duration::from_secs(1);
/// Our variables that a hook gets too.
const PASSED_ON: [&str; 6] = ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ"];

/// Why a hook failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0}")]
    Program(#[from] launch::ProgramError),
    #[error("{0}")]
    Start(#[from] spawn::Error),
    #[error("it ended with {ended}{}", behind(output))]
    Ended { ended: Ended, output: String },
    #[error("it was killed after {}{}", humantime::format_duration(*after), behind(output))]
    TooLong { after: Duration, output: String },
    #[error("it was cancelled")]
    CalledOff,
    #[error("cannot watch it: {0}")]
    Io(#[from] io::Error),
}

fn behind(output: &str) -> String {
    if output.is_empty() { String::new() } else { format!(": {output}") }
}

/// Runs a hook until it ends, at most for `limit`, and only while `wanted`.
pub(super) fn run(
    point: Point,
    words: &[String],
    context: &Context,
    document: &[u8],
    limit: Duration,
    wanted: &dyn Fn() -> bool,
) -> Result<(), Error> {
    let (name, args) = words.split_first().map_or(("", &[][..]), |(name, args)| (name.as_str(), args));
    let root = Path::new("/");
    let program = launch::find_program(name.as_ref(), root, std::env::var_os("PATH").as_deref())?;
    let (output, writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(io::Error::from)?;
    fcntl(&output, FcntlArg::F_SETFL(OFlag::O_NONBLOCK)).map_err(io::Error::from)?;
    // Its own session, and with it a process group that can be killed as a whole.
    let child = Spawn::new(&program, args)?
        .environment(environment(point, context))?
        .directory(root)?
        .session()
        .dies_with_us()
        .fd(input(document)?, 0)
        .fd(writer.try_clone()?, 1)
        .fd(writer, 2)
        .start()?;
    let began = Instant::now();
    let mut tail = Tail { from: File::from(output), kept: Vec::new(), open: true };
    let result = follow(&child, &mut tail, began + limit, wanted);
    if result.is_err() {
        // It is not reaped yet, so the number still belongs to its group.
        let _ = killpg(Pid::from_raw(child.pid()), Signal::SIGKILL);
    }
    let ended = child.wait()?;
    tail.read();
    match result {
        Ok(()) if ended == Ended::Exit(0) => {
            tracing::debug!(hook = point.name(), output = tail.text(), "done after {:?}", began.elapsed());
            Ok(())
        }
        Ok(()) => Err(Error::Ended { ended, output: tail.text() }),
        Err(Error::TooLong { .. }) => {
            let after = Duration::from_millis(u64::try_from(limit.as_millis()).unwrap_or(u64::MAX));
            Err(Error::TooLong { after, output: tail.text() })
        }
        Err(error) => Err(error),
    }
}

/// A file in memory: a hook may read it once, twice or not at all.
fn input(document: &[u8]) -> Result<OwnedFd, Error> {
    let fd = memfd_create("hook", MFdFlags::MFD_CLOEXEC).map_err(io::Error::from)?;
    let mut file = File::from(fd);
    file.write_all(document)?;
    file.rewind()?;
    Ok(file.into())
}

fn environment(point: Point, context: &Context) -> Vec<(OsString, OsString)> {
    let passed_on = PASSED_ON.iter().filter_map(|name| Some(((*name).into(), std::env::var_os(name)?)));
    let ours: [(OsString, OsString); 3] = [
        (variables::HOOK.into(), point.name().into()),
        (variables::JOB.into(), context.job.clone().into()),
        (variables::FOLDER.into(), context.folder.clone().into()),
    ];
    passed_on.chain(ours).collect()
}

/// Waits until the hook has ended; does not reap it.
fn follow(child: &Child, tail: &mut Tail, until: Instant, wanted: &dyn Fn() -> bool) -> Result<(), Error> {
    let pidfd = child.pidfd()?;
    loop {
        if child.has_ended()? {
            return Ok(());
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Error::TooLong { after: Duration::ZERO, output: String::new() });
        }
        if !wanted() {
            return Err(Error::CalledOff);
        }
        let wait = PollTimeout::try_from(left.min(LOOK)).unwrap_or(PollTimeout::ZERO);
        let end = PollFd::new(pidfd.as_fd(), PollFlags::POLLIN);
        let ready = if tail.open {
            poll(&mut [end, PollFd::new(tail.from.as_fd(), PollFlags::POLLIN)], wait)
        } else {
            poll(&mut [end], wait)
        };
        match ready {
            Ok(_) | Err(nix::errno::Errno::EINTR) => tail.read(),
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
}

/// The kept end of an output.
struct Tail {
    from: File,
    kept: Vec<u8>,
    open: bool,
}

impl Tail {
    /// Reads what is available, but not for ever: endless output must not keep us from checking the time limit.
    fn read(&mut self) {
        let mut buffer = [0; 8192];
        for _ in 0..32 {
            match self.from.read(&mut buffer) {
                Ok(0) => return self.open = false,
                Ok(read) => {
                    self.kept.extend(buffer.get(..read).unwrap_or_default());
                    self.kept.drain(..self.kept.len().saturating_sub(KEPT));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return self.open = false,
            }
        }
    }

    /// On one line, without control characters, which could act on a terminal.
    fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.kept);
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines.collect::<Vec<_>>().join("; ").chars().filter(|c| !c.is_control()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str, limit: Duration) -> Result<(), Error> {
        let words = ["sh".to_owned(), "-c".into(), script.into()];
        let context = Context { job: "j".into(), folder: "/s/j".into() };
        run(Point::OnFailure, &words, &context, b"{\"job\": \"j\"}\n", limit, &|| true)
    }

    const LIMIT: Duration = Duration::from_secs(30);
    const SHORT: Duration = Duration::from_millis(300);

    #[test]
    fn it_reads_the_document_and_has_a_clean_environment() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        sh(&format!("cat >{0}; env >>{0}; pwd >>{0}", out.display()), LIMIT).unwrap();
        let text = std::fs::read_to_string(&out).unwrap();
        let mut lines = text.lines();
        assert_eq!(lines.next(), Some("{\"job\": \"j\"}"));
        assert_eq!(text.lines().last(), Some("/"));
        for wanted in ["REKINDLE_HOOK=on-failure", "REKINDLE_JOB=j", "REKINDLE_FOLDER=/s/j"] {
            assert!(text.lines().any(|line| line == wanted), "{text}");
        }
        assert!(!text.contains("CARGO"), "{text}");
    }

    #[test]
    fn how_it_failed_is_said_with_the_end_of_its_output() {
        let said = |script: &str, limit| sh(script, limit).unwrap_err().to_string();
        assert_eq!(said("echo first; echo oh\x1b no >&2; exit 3", LIMIT), "it ended with exit code 3: first; oh no");
        assert_eq!(said("kill -9 $$", LIMIT), "it ended with signal SIGKILL");
        // Long enough for a shell to start on a busy machine.
        assert_eq!(said("echo on; sleep 60", Duration::from_secs(8)), "it was killed after 8s: on");
        let words = ["no-such-program".to_owned()];
        let context = Context { job: "j".into(), folder: "/s/j".into() };
        let missing = run(Point::OnFailure, &words, &context, b"", LIMIT, &|| true).unwrap_err().to_string();
        assert!(missing.contains("no-such-program"), "{missing}");
    }

    #[test]
    fn a_flood_is_bounded_and_ended_in_time() {
        let began = Instant::now();
        let error = sh("yes flood", SHORT).unwrap_err();
        assert!(matches!(&error, Error::TooLong { output, .. } if output.len() <= 2 * KEPT), "{error}");
        assert!(began.elapsed() < LIMIT / 2);
        // The end of the output counts.
        let error = sh("yes flood | head -c 3000000; echo the end; exit 1", LIMIT).unwrap_err();
        assert!(error.to_string().ends_with("flood; the end"), "{error}");
    }

    #[test]
    fn its_process_group_is_killed_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let pid = dir.path().join("pid");
        let error = sh(&format!("sleep 60 & echo $! >{}; wait", pid.display()), Duration::from_secs(8)).unwrap_err();
        assert!(matches!(error, Error::TooLong { .. }), "{error}");
        let pid: i32 = std::fs::read_to_string(pid).unwrap().trim().parse().unwrap();
        let deadline = Instant::now() + LIMIT;
        while rekindle_os::process::state(pid).is_some_and(|state| !"ZX".contains(state)) {
            assert!(Instant::now() < deadline, "{pid} lives");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn one_that_leaves_something_behind_has_ended_all_the_same() {
        // A child that it leaves holds the output open.
        let began = Instant::now();
        sh("sleep 60 & exit 0", LIMIT).unwrap();
        assert!(began.elapsed() < LIMIT / 2);
    }
}

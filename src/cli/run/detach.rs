//! `--detach` of `rekindle run` and `restore`: the supervisor in the background, and a caller that waits until the job
//! runs.
//!
//! The supervisor is a copy of the process that was called, in a session of its own ([`rekindle_os::detach`]), rather
//! than a unit of `systemd-run`: it works in containers and on machines without systemd, has the environment, the
//! limits and the control group of the caller, and ends with the same exit codes. Until it has the job's folder it
//! writes to the caller's standard error; from then on to `log/supervisor.log` in that folder. If it ends before the
//! job runs, the caller shows what it wrote there, and ends with its exit code.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use chrono::{DateTime, Utc};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use super::store_flag;
use crate::cli::output::{Format, print_json, print_text};
use crate::cli::{Exit, Global, progress};
use crate::published::Published;
use crate::telemetry::{clean, log};
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::detach;
use rekindle_store::{JobFolder, JobName};

/// The name of the supervisor's log.
const LOG: &str = "supervisor.log";
/// Bytes of it that are shown at most. Others may have made it longer.
const MOST_SHOWN: u64 = 1 << 20;
/// How often to check whether the job runs.
const LOOK: Duration = Duration::from_millis(20);

/// The supervisor's end of the pipe to its caller.
#[derive(Debug)]
pub(super) struct Caller(pub(super) File);

/// What the caller is told when the supervisor has the job's folder.
#[derive(Debug, Serialize, Deserialize)]
struct Settled {
    job: JobName,
    /// The job's folder.
    folder: PathBuf,
    /// The supervisor's log.
    log: PathBuf,
    /// Where in it this supervisor begins.
    from: u64,
    /// When the last run began whose state is in `state.json`, if there is one. In a container its supervisor may have had
    /// the same pid.
    before: Option<DateTime<Utc>>,
}

/// The job that was started, for programs.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Detached<'a> {
    job: &'a JobName,
    store: Option<&'a Path>,
    supervisor: i32,
    pid: i32,
    log: &'a Path,
}

impl Caller {
    /// From now on messages go to the log in the job's folder, which only its supervisor writes. A log of more than
    /// `most` bytes makes room for a new one.
    pub(super) fn leave(mut self, folder: &JobFolder, most: u64) -> anyhow::Result<()> {
        let path = folder.log_dir().join(LOG);
        let redirect = || -> io::Result<u64> {
            let file = open(&path, most)?;
            let from = file.metadata()?.len();
            // What was logged so far is for the caller.
            log::flush();
            detach::redirect(&file)?;
            Ok(from)
        };
        let from = redirect().with_context(|| format!("cannot write the supervisor's log {}", path.display()))?;
        let before = published(folder.dir()).map(|before| before.begun);
        let settled = Settled {
            job: folder.name().clone(),
            folder: folder.path().to_owned(),
            log: path.path().to_owned(),
            from,
            before,
        };
        // A caller that is gone needs no answer.
        let _ = self.0.write_all(&serde_json::to_vec(&settled)?);
        Ok(())
    }
}

/// Opens the supervisor's log for appending. If it has more than `most` bytes, it makes room for a new one.
fn open(path: &Beneath, most: u64) -> io::Result<File> {
    if path.metadata().is_ok_and(|log| log.is_file() && log.len() > most) {
        path.rename(&path.with_file_name(format!("{LOG}.1")))?;
    }
    path.append(0o600)
}

impl Settled {
    /// The job's folder, below the store.
    fn place(&self) -> io::Result<Beneath> {
        let store = self.folder.parent().ok_or(io::ErrorKind::InvalidInput)?;
        Ok(Beneath::root(store, Owners::Ours)?.join(self.folder.file_name().unwrap_or_default()))
    }
}

/// Waits until the job runs, or the supervisor has ended.
pub(super) fn wait(global: &Global, supervisor: Pid, mut from: File) -> anyhow::Result<Exit> {
    // Ctrl-C while the job starts is meant for it.
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        signal_hook::flag::register(signal as i32, Arc::clone(&stop))?;
    }
    let pass_on = || {
        if stop.swap(false, Ordering::Relaxed) {
            let _ = kill(supervisor, Signal::SIGTERM);
        }
    };
    // What it says before it has the job's folder goes to our standard error.
    let told = told(&mut from, &pass_on).context("cannot read what the supervisor says")?;
    let Ok(settled) = serde_json::from_slice::<Settled>(&told) else {
        loop {
            pass_on();
            match waitpid(supervisor, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::StillAlive => std::thread::sleep(LOOK),
                ended => return Ok(code(ended)),
            }
        }
    };
    let outcome = progress::waited(&format!("starting {}", settled.job), || {
        loop {
            pass_on();
            if let Some(pid) = runs(&settled, supervisor) {
                return Ok(Outcome::Runs(pid));
            }
            match waitpid(supervisor, Some(WaitPidFlag::WNOHANG))? {
                WaitStatus::StillAlive => std::thread::sleep(LOOK),
                ended => return Ok::<_, Errno>(Outcome::Ended(ended)),
            }
        }
    })?;
    match outcome {
        Outcome::Runs(pid) => said(global, &settled, supervisor, pid),
        Outcome::Ended(ended) => {
            show_log(&settled)?;
            Ok(code(ended))
        }
    }
}

/// What the supervisor writes, until it closes its end. A signal does not interrupt a read, so it is not waited in one.
fn told(from: &mut File, pass_on: &dyn Fn()) -> io::Result<Vec<u8>> {
    let mut told = Vec::new();
    let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::ZERO);
    loop {
        pass_on();
        match poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) | Err(Errno::EINTR) => continue,
            other => other?,
        };
        let mut buffer = [0; 4096];
        match from.read(&mut buffer)? {
            0 => return Ok(told),
            count => told.extend(buffer.iter().take(count)),
        }
    }
}

/// How the start of the job went.
enum Outcome {
    /// It runs, with this pid.
    Runs(i32),
    /// The supervisor has ended.
    Ended(WaitStatus),
}

/// The pid of the job's process, if it has one under this supervisor.
fn runs(settled: &Settled, supervisor: Pid) -> Option<i32> {
    let published = published(&settled.place().ok()?)?;
    let is_its = published.supervisor.cast_signed() == supervisor.as_raw() && Some(published.begun) != settled.before;
    published.pid.filter(|_| is_its)
}

/// What the last supervisor of this job has published.
fn published(folder: &Beneath) -> Option<Published> {
    Published::read(&folder.join("state.json")).ok()
}

fn said(global: &Global, settled: &Settled, supervisor: Pid, pid: i32) -> anyhow::Result<Exit> {
    let Settled { job, folder, log, .. } = settled;
    let supervisor = supervisor.as_raw();
    match global.format() {
        Format::Json => print_json(&Detached { job, store: folder.parent(), supervisor, pid, log })?,
        Format::Text => {
            let flag = store_flag(global);
            print_text(&format!(
                "job {job} runs in the background: `rekindle status {job}{flag}` and `rekindle logs -f {job}{flag}` \
                show it, `rekindle stop {job}{flag}` stops it\nits supervisor has pid {supervisor}, and writes {}",
                log.display()
            ))?;
        }
    }
    Ok(Exit::Success)
}

/// Shows what the supervisor wrote to its log.
fn show_log(settled: &Settled) -> io::Result<()> {
    io::stderr().write_all(clean::lines(&String::from_utf8_lossy(&newest(settled)?)).as_bytes())
}

/// What the supervisor wrote to its log; the end of it if it is long.
fn newest(settled: &Settled) -> io::Result<Vec<u8>> {
    let mut file = settled.place()?.join("log").join(LOG).read()?;
    let begin = file.metadata()?.len().saturating_sub(MOST_SHOWN);
    file.seek(SeekFrom::Start(begin.max(settled.from)))?;
    let mut bytes = Vec::new();
    file.take(MOST_SHOWN).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The exit code of a supervisor that ended.
fn code(ended: WaitStatus) -> Exit {
    let code = match ended {
        WaitStatus::Exited(_, code) => u8::try_from(code).ok(),
        WaitStatus::Signaled(_, signal, _) => u8::try_from(128 + signal as i32).ok(),
        _ => None,
    };
    code.map_or(Exit::Internal, Exit::Job)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_state_of_an_earlier_run_does_not_tell_that_the_job_runs() {
        let dir = tempfile::tempdir().unwrap();
        let publish = |begun: &str| {
            let text = format!(
                r#"{{"version":1,"state":"running","since":"{begun}","begun":"{begun}","supervisor":7,"lineage":"l",
                "pid":8,"restarts":0,"last_image":null,"last_freeze_us":null,"last_failure":null}}"#
            );
            std::fs::write(dir.path().join("state.json"), text).unwrap();
        };
        let settled = |before| Settled {
            job: "j".parse().unwrap(),
            folder: dir.path().to_owned(),
            log: PathBuf::new(),
            from: 0,
            before,
        };
        let none = settled(published(&Beneath::at(dir.path()).unwrap()).map(|before| before.begun));
        assert_eq!(runs(&none, Pid::from_raw(7)), None);
        // Killed while its job ran, in a container: the next supervisor has the same pid.
        publish("2026-11-21T20:00:00Z");
        let after = settled(published(&Beneath::at(dir.path()).unwrap()).map(|before| before.begun));
        assert_eq!(runs(&after, Pid::from_raw(7)), None);
        // The clock may have been set back since.
        publish("2026-11-21T19:00:00Z");
        assert_eq!(runs(&after, Pid::from_raw(7)), Some(8));
        assert_eq!(runs(&none, Pid::from_raw(7)), Some(8));
        assert_eq!(runs(&after, Pid::from_raw(9)), None, "another supervisor");
    }

    #[test]
    fn only_the_end_of_a_log_that_is_too_long_is_shown() {
        let dir = tempfile::tempdir().unwrap();
        let logs = dir.path().join("store/j/log");
        std::fs::create_dir_all(&logs).unwrap();
        let settled = Settled {
            job: "j".parse().unwrap(),
            folder: dir.path().join("store/j"),
            log: logs.join(LOG),
            from: 3,
            before: None,
        };
        std::fs::write(&settled.log, "oldnew").unwrap();
        assert_eq!(newest(&settled).unwrap(), b"new");
        let mut log = File::options().append(true).open(&settled.log).unwrap();
        log.set_len(2 << 40).unwrap();
        log.write_all(b"the end").unwrap();
        let shown = newest(&settled).unwrap();
        assert!(shown.ends_with(b"the end"));
        assert_eq!(u64::try_from(shown.len()).unwrap(), MOST_SHOWN);
    }

    #[test]
    fn what_others_put_in_the_place_of_the_log_is_not_written_to() {
        use rekindle_os::beneath::Unexpected;
        let dir = tempfile::tempdir().unwrap();
        let (logs, secret) = (dir.path().join("store/j/log"), dir.path().join("secret"));
        std::fs::create_dir_all(&logs).unwrap();
        std::fs::write(&secret, "root's").unwrap();
        let settled = Settled {
            job: "j".parse().unwrap(),
            folder: dir.path().join("store/j"),
            log: logs.join(LOG),
            from: 0,
            before: None,
        };
        let log = || settled.place().unwrap().join("log").join(LOG);
        open(&log(), 3).unwrap().write_all(b"long").unwrap();
        open(&log(), 3).unwrap().write_all(b"new").unwrap();
        assert_eq!(std::fs::read_to_string(logs.join("supervisor.log.1")).unwrap(), "long");
        assert_eq!(std::fs::read_to_string(&settled.log).unwrap(), "new");
        let refused = || {
            for error in [open(&log(), 3).unwrap_err(), show_log(&settled).unwrap_err()] {
                assert!(Unexpected::in_error(&error).is_some(), "{error}");
            }
        };
        std::fs::remove_file(&settled.log).unwrap();
        std::os::unix::fs::symlink(&secret, &settled.log).unwrap();
        refused();
        std::fs::remove_file(&settled.log).unwrap();
        // Nobody opens the other end, ever.
        nix::unistd::mkfifo(&settled.log, nix::sys::stat::Mode::S_IRWXU).unwrap();
        refused();
        std::fs::remove_file(&settled.log).unwrap();
        std::fs::hard_link(&secret, &settled.log).unwrap();
        open(&log(), 100).unwrap().write_all(b" and more").unwrap();
        std::fs::rename(&logs, dir.path().join("moved")).unwrap();
        std::os::unix::fs::symlink("../../moved", &logs).unwrap();
        refused();
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "root's");
    }
}

//! A test of CRIU on this machine: a small job is dumped and restored, as `run` does it.
//!
//! The job is `sleep` in its own namespaces, and lives a few hundredths of a second before and after. Every step has a
//! time limit, and no process or file of it remains.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::sys::statvfs::{FsFlags, statvfs};

use super::Check;
use rekindle_base::chain;
use rekindle_criu::{self as criu, Criu, DumpOptions, Hooks, Place, Plugin, RestoreOptions, Tcp};
use rekindle_engine::launch::world::{FIRST_PID, Network, World, last_pid_for};
use rekindle_engine::launch::{self, Amx, IoUring, Job, JobSpec, Privileges, output, plugin, reaper};
use rekindle_engine::parts::devices::Devices;
use rekindle_os::process;

/// Time limit for a step. A normal one takes less than a tenth of a second, on a busy machine a few.
const LIMIT: Duration = Duration::from_secs(15);
/// The folder of the plugin, in the folder for what CRIU writes besides.
const PLUGINS: &str = "plugins";

/// The result of the trial.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Outcome {
    /// The job was restored.
    Worked { took: Duration },
    /// A step failed.
    Failed { step: &'static str, why: String, hint: Option<&'static str> },
    /// A requirement is missing; the reason.
    NotTried(String),
}

pub(super) fn run(criu: Option<&Criu>, store: &Path) -> Outcome {
    run_in(criu, || temporary_folder(store))
}

/// The same in the folder that this makes.
pub(super) fn run_in(criu: Option<&Criu>, make: impl FnOnce() -> Option<tempfile::TempDir>) -> Outcome {
    let Some(criu) = criu else { return Outcome::NotTried("there is no CRIU to test".into()) };
    if !nix::unistd::geteuid().is_root() {
        return Outcome::NotTried("only root can check this".into());
    }
    let Some(folder) = make() else {
        return Outcome::NotTried("no temporary folder allows running programs: set TMPDIR".into());
    };
    let began = Instant::now();
    match Trial::prepare(criu, folder.path()).and_then(|trial| trial.go()) {
        Ok(()) => Outcome::Worked { took: began.elapsed() },
        Err(Failure { step, why, hint }) => Outcome::Failed { step, why, hint },
    }
}

/// A folder for the trial. The reaper is run from it, so its file system must not be mounted noexec.
pub(super) fn temporary_folder(store: &Path) -> Option<tempfile::TempDir> {
    let places = [std::env::temp_dir(), "/var/tmp".into(), "/run".into(), store.to_path_buf()];
    let executable = |dir: &&PathBuf| statvfs(dir.as_path()).is_ok_and(|fs| !fs.flags().contains(FsFlags::ST_NOEXEC));
    let make = |dir: &PathBuf| tempfile::Builder::new().prefix(".rekindle-doctor-").tempdir_in(dir).ok();
    places.iter().filter(executable).find_map(make)
}

struct Failure {
    step: &'static str,
    why: String,
    hint: Option<&'static str>,
}

fn failed<E: std::error::Error>(step: &'static str) -> impl Fn(E) -> Failure {
    move |error| Failure { step, why: chain(&error), hint: None }
}

fn refused(step: &'static str) -> impl Fn(criu::RunError) -> Failure {
    move |error| match error.log().map(|log| (log.errors().join("; "), log.hint())) {
        // The hint to run this command is left out.
        Some((why, hint)) if !why.is_empty() => {
            Failure { step, why, hint: hint.filter(|hint| !hint.contains("rekindle doctor")) }
        }
        _ => Failure { step, why: chain(&error), hint: None },
    }
}

struct Trial<'a> {
    criu: &'a Criu,
    reaper: PathBuf,
    images: PathBuf,
    work: PathBuf,
    files: output::Files,
    spec: JobSpec,
}

impl Trial<'_> {
    fn prepare<'a>(criu: &'a Criu, dir: &Path) -> Result<Trial<'a>, Failure> {
        let step = "preparing";
        let (images, work) = (dir.join("images"), dir.join("work"));
        for folder in [&images, &work, &work.join(PLUGINS)] {
            std::fs::create_dir(folder).map_err(failed(step))?;
        }
        // The job's output is opened through no link, and TMPDIR may be one.
        let real = dir.canonicalize().map_err(failed(step))?;
        let path = std::env::var_os("PATH");
        let program = launch::find_program(OsStr::new("sleep"), dir, path.as_deref()).map_err(failed(step))?;
        let spec = JobSpec {
            command: vec!["sleep".into(), "60".into()],
            program,
            directory: "/".into(),
            environment: std::collections::BTreeMap::new(),
            identity: None,
            umask: None,
            limits: Vec::new(),
            stdin: "/dev/null".into(),
            privileges: Privileges::MayGrow,
            io_uring: IoUring::refused_where_possible(),
            amx: Amx::refused_where_possible(),
        };
        Ok(Trial {
            criu,
            reaper: reaper::unpack(dir).map_err(failed(step))?,
            images,
            work,
            files: output::Files::create(&real, output::Bounds::default()).map_err(failed(step))?,
            spec,
        })
    }

    fn go(&self) -> Result<(), Failure> {
        let ids = self.dump()?;
        let world = self.world(last_pid_for(&ids))?;
        let abandon = || world.kill();
        let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, abandon: &abandon, died: &|| None };
        let restored = criu::restore(&self.place(&world), RestoreOptions::default(), &mut hooks);
        let root = match restored {
            Ok(restored) => restored.root,
            Err(error) => {
                world.end(None);
                return Err(refused("restore")(error));
            }
        };
        let job = Job::new(world, root);
        let lives = job.root.has_ended().is_ok_and(|ended| !ended) && job.main_pid().is_some();
        job.end();
        match lives {
            true => Ok(()),
            false => {
                Err(Failure { step: "restore", why: "the job ended as soon as it was restored".into(), hint: None })
            }
        }
    }

    /// Starts the job, dumps it and ends it; returns its pids.
    fn dump(&self) -> Result<Vec<i32>, Failure> {
        let world = self.world(FIRST_PID - 1)?;
        let root = match launch::start(&world, &self.reaper, &self.spec, &self.files) {
            Ok(root) => root,
            Err(error) => {
                world.end(None);
                return Err(failed("start")(error));
            }
        };
        let job = Job::new(world, root);
        let dumped = self.dump_job(&job);
        job.end();
        dumped
    }

    fn dump_job(&self, job: &Job) -> Result<Vec<i32>, Failure> {
        let failure = |why: &str| Failure { step: "start", why: why.into(), hint: None };
        wait_for_program(job, &self.spec.program)
            .ok_or_else(|| failure(&format!("`sleep` did not start within {} s", LIMIT.as_secs())))?;
        let ids: Vec<i32> = process::tree(job.root.pid()).into_iter().filter_map(process::inner_pid).collect();
        let root = process::inner_pid(job.root.pid()).ok_or_else(|| failure("`sleep` ended at once"))?;
        // In a restore CRIU loads it, and for some jobs in a snapshot: here it shows whether it can.
        let devices = Devices::find();
        let folder = self.work.join(PLUGINS);
        plugin::unpack(&folder).map_err(failed("preparing"))?;
        let (list, is_wanted) = (devices.as_ref().map(Devices::list), devices.is_some() || self.criu.loads_plugins());
        let plugin = is_wanted.then_some(Plugin { folder: &folder, devices: list, answers: None, files: None });
        let options = DumpOptions { root, tcp: Tcp::Close, ghost_limit: 1 << 20, freeze_timeout: LIMIT, plugin };
        let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, abandon: &|| {}, died: &|| None };
        criu::dump(&self.place(&job.world), options, &mut hooks).map_err(refused("dump"))?;
        Ok(ids)
    }

    fn world(&self, last_pid: i32) -> Result<World, Failure> {
        World::new(&self.reaper, last_pid, Network::Host).map_err(failed("namespaces"))
    }

    fn place<'a>(&'a self, world: &'a World) -> Place<'a> {
        Place {
            criu: self.criu,
            init: Some(world.init()),
            images: &self.images,
            opened: None,
            work: &self.work,
            timeout: LIMIT,
        }
    }
}

/// Waits until the reaper's child has executed the program: a dump during exec would test something else.
fn wait_for_program(job: &Job, program: &Path) -> Option<()> {
    let program = std::fs::canonicalize(program).ok()?;
    let deadline = Instant::now() + LIMIT;
    loop {
        // Before the look: it may be there although this thread was held up for that long.
        let is_over = Instant::now() >= deadline;
        if job.main_pid().and_then(process::executable).is_some_and(|file| file == program) {
            return Some(());
        }
        if is_over {
            return None;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

pub(super) fn judge(outcome: &Outcome) -> Check {
    let name = "criu.trial";
    match outcome {
        Outcome::Worked { took } => Check::ok(name, format!("a job was dumped and restored, {} ms", took.as_millis())),
        // The missing requirement is reported by its own check.
        Outcome::NotTried(why) => Check::not_here(name, format!("not tried: {why}")),
        Outcome::Failed { step, why, hint } => {
            let fix = hint.unwrap_or(
                "fix the other findings first, above all rights and a seccomp filter (Docker: --privileged); `criu \
                check` may show more",
            );
            Check::missing(name, format!("{step} failed: {why}"), fix)
        }
    }
}

/// For tests of checks that depend on it.
#[cfg(test)]
pub(super) fn worked() -> Outcome {
    Outcome::Worked { took: Duration::from_millis(80) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;

    #[test]
    fn only_a_failure_is_missing_and_says_what_helps() {
        assert_eq!(judge(&worked()).state, State::Ok);
        assert_eq!(judge(&Outcome::NotTried("x".into())).state, State::NotHere);
        let failure = |hint| judge(&Outcome::Failed { step: "dump", why: "no".into(), hint });
        let (plain, hinted) = (failure(None), failure(Some("do that")));
        assert_eq!((plain.state, plain.found.as_str()), (State::Missing, "dump failed: no"));
        assert!(plain.fix.unwrap().contains("seccomp"));
        assert_eq!(hinted.fix.as_deref(), Some("do that"));
    }

    #[test]
    fn without_criu_nothing_is_tried() {
        assert!(matches!(run(None, Path::new("/")), Outcome::NotTried(_)));
    }
}

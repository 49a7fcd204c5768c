//! The scheduler that started this process: its kind, its name for the job, the job's deadline, and how the job is
//! queued again. docs/schedulers.md has the source of each fact.
//!
//! Only the environment is read; [`Scheduler::ask_end`] and [`Scheduler::requeue`] run Slurm's commands and wait for
//! them, so they must be called on a thread that may block.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use nix::fcntl::OFlag;

use crate::config::Profile;
use rekindle_base::Ended;
use rekindle_engine::launch::find_program;
use rekindle_os::spawn::{Child, Open, Spawn};

/// Time limit for Slurm's commands. They give up on a controller that does not answer after MessageTimeout, 10 s by
/// default, and some tries.
const PATIENCE: Duration = Duration::from_secs(30);
/// Machines that cannot agree ask one after the other: longer than a command may take, and than Slurm takes to end a job.
const TURN: Duration = Duration::from_secs(60);

/// How often a job is tried to be queued again while Slurm's controller is away, as when it is restarted, and the pause.
const TRIES: u32 = 40;
const PAUSE: Duration = Duration::from_secs(15);

/// How sudo passes the job's number on.
pub(crate) const PRESERVE: &str = "With sudo, use --preserve-env=SLURM_JOB_ID,SLURM_ARRAY_JOB_ID,SLURM_ARRAY_TASK_ID";

/// Why a request to Slurm failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command cannot be run.
    #[error("cannot run {command}")]
    Run {
        /// Its command line.
        command: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It failed.
    #[error("{command} failed: {said}")]
    Failed {
        /// Its command line.
        command: String,
        said: String,
    },
    /// It did not end in time.
    #[error("{command} did not answer within {}", humantime::format_duration(PATIENCE))]
    Silent {
        /// Its command line.
        command: String,
    },
    /// It answered something else than what was asked for.
    #[error("{command} answered {said:?}, which is no answer for one job")]
    Unclear {
        /// Its command line.
        command: String,
        said: String,
    },
    /// There is no job to queue again.
    #[error(
        "scheduler.requeue = \"scontrol\" needs a job of Slurm, and SLURM_JOB_ID is not set, or scheduler.profile is \
        \"none\". {}",
        PRESERVE
    )]
    NoJob,
}

impl Error {
    /// Whether the controller cannot be reached now.
    fn is_away(&self) -> bool {
        /// Of Slurm's `slurm_strerror`.
        const SIGNS: [&str; 4] =
            ["Unable to contact slurm controller", "Connection refused", "Connection timed out", "Socket timed out"];
        match self {
            Error::Silent { .. } => true,
            Error::Failed { said, .. } => SIGNS.iter().any(|sign| said.contains(sign)),
            Error::Run { .. } | Error::Unclear { .. } | Error::NoJob => false,
        }
    }
}

/// The exit code that means: stopped, queue the job again (EX_TEMPFAIL of sysexits.h).
pub(crate) const QUEUE_AGAIN: u8 = 75;

/// The scheduler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scheduler {
    /// Its kind; never [`Profile::Auto`].
    profile: Profile,
    /// Its name for the job, including the task of an array.
    job: Option<String>,
    /// The job's name for Slurm's commands, the same on all machines. In an array it includes the task: the number of
    /// one of the tasks is that of the whole array, too.
    slurm_job: Option<String>,
    /// The job's deadline, if the environment has it.
    end: Option<DateTime<Utc>>,
    /// The number of this machine among those of the job.
    node_rank: Option<u32>,
}

impl Scheduler {
    /// Detects the scheduler. `variable` reads the environment.
    #[must_use]
    pub(crate) fn find(wanted: Profile, variable: impl Fn(&str) -> Option<String>) -> Scheduler {
        let variable = |name: &str| variable(name).filter(|value| !value.is_empty());
        let profile = match wanted {
            Profile::Auto if variable("SLURM_JOB_ID").is_some() => Profile::Slurm,
            Profile::Auto => Profile::None,
            known => known,
        };
        // An Indexed Job of Kubernetes, whose pods are the machines.
        let node_rank = variable("SLURM_NODEID").or_else(|| variable("JOB_COMPLETION_INDEX"));
        let node_rank = node_rank.and_then(|rank| rank.parse().ok());
        let none = Scheduler { profile, job: None, slurm_job: None, end: None, node_rank };
        match profile {
            Profile::Slurm => {
                let array = variable("SLURM_ARRAY_JOB_ID").zip(variable("SLURM_ARRAY_TASK_ID"));
                let task = array.map(|(job, task)| format!("{job}_{task}"));
                let slurm_job = task.or_else(|| variable("SLURM_JOB_ID"));
                // The tasks of one `srun` are separate jobs here, unless they are a group.
                let rank = variable("SLURM_PROCID").filter(|rank| rank != "0");
                let job = slurm_job.clone().map(|job| rank.map_or_else(|| job.clone(), |rank| format!("{job}.{rank}")));
                let end = variable("SLURM_JOB_END_TIME").and_then(|end| end.parse().ok());
                let end = end.and_then(|end| DateTime::from_timestamp(end, 0));
                Scheduler { job, slurm_job, end, ..none }
            }
            Profile::None | Profile::Auto => none,
        }
    }

    /// Whether somebody ends us by a signal, and kills us some time later.
    #[must_use]
    pub(crate) fn is_there(&self) -> bool {
        self.profile != Profile::None
    }

    /// A name for the job that stays the same when the job is queued again.
    #[must_use]
    pub(crate) fn job_name(&self) -> Option<String> {
        self.job.as_ref().map(|job| format!("slurm-{job}"))
    }

    /// The name of a job over several machines, which all of them know.
    #[must_use]
    pub(crate) fn group_name(&self) -> Option<String> {
        self.slurm_job.as_ref().map(|job| format!("slurm-{job}"))
    }

    /// The number of this machine among those of the job, from 0.
    #[must_use]
    pub(crate) fn node_rank(&self) -> Option<u32> {
        self.node_rank
    }

    /// The number of machines that Slurm has started this job on.
    pub(crate) fn nodes(variable: &dyn Fn(&str) -> Option<String>) -> Option<u32> {
        let step = variable("SLURM_STEP_NUM_NODES").or_else(|| variable("SLURM_NNODES"));
        step.and_then(|nodes| nodes.parse().ok())
    }

    /// The names of the machines that Slurm has started this job on; none if it does not say them.
    pub(crate) fn node_names(variable: &dyn Fn(&str) -> Option<String>) -> BTreeSet<String> {
        let list = variable("SLURM_STEP_NODELIST").or_else(|| variable("SLURM_JOB_NODELIST"));
        let mut names = BTreeSet::new();
        if list.is_none_or(|list| expand(&list, String::new(), &mut names).is_none()) {
            names.clear();
        }
        names
    }

    /// The job's deadline, if it is known without asking.
    #[must_use]
    pub(crate) fn end(&self) -> Option<DateTime<Utc>> {
        self.end
    }

    /// Whether the deadline can be asked for.
    #[must_use]
    pub(crate) fn can_be_asked(&self) -> bool {
        self.slurm_job.is_some()
    }

    /// Asks for the deadline. A time limit can be changed while the job runs, and Slurm 22.05 has no variable for it.
    /// `None` if there is no limit.
    ///
    /// # Errors
    /// When Slurm does not answer.
    pub(crate) fn ask_end(&self) -> Result<Option<DateTime<Utc>>, Error> {
        let Some(job) = &self.slurm_job else { return Ok(None) };
        let left = ask(job, "%L")?;
        let unclear = || Error::Unclear { command: squeue(job, "%L").join(" "), said: left.clone() };
        let left = time_left(&left).ok_or_else(unclear)?;
        Ok(left.map(|left| Utc::now() + left))
    }

    /// The job that `scontrol requeue` queues again.
    ///
    /// # Errors
    /// When no job of Slurm is known.
    pub(crate) fn slurm_job(&self) -> Result<&str, Error> {
        self.slurm_job.as_deref().ok_or(Error::NoJob)
    }

    /// Whether Slurm can be asked to queue the job again.
    pub(crate) fn is_asked_to_requeue(&self) -> bool {
        self.slurm_job.is_some()
    }

    /// How long [`Scheduler::requeue_in_turn`] waits.
    pub(crate) fn pause_before(turn: u32) -> Duration {
        TURN.saturating_mul(turn)
    }

    /// Makes Slurm queue a job of several machines again, unless another machine has done that. `turn` is the number of
    /// machines that may do it first. Waits for them. `is_over` says after that whether nobody wants it any more.
    ///
    /// # Errors
    /// When Slurm does not do it.
    pub(crate) fn requeue_in_turn(&self, turn: u32, is_over: impl FnOnce() -> bool) -> Result<(), Error> {
        let job = self.slurm_job()?;
        std::thread::sleep(Self::pause_before(turn));
        if is_over() {
            tracing::info!("the run has ended meanwhile, and is not to be queued again");
            return Ok(());
        }
        // If Slurm does not say so, it is asked all the same: it refuses to queue a job twice.
        if ask(job, "%T").is_ok_and(|state| !matches!(state.as_str(), "RUNNING" | "SUSPENDED")) {
            tracing::info!("Slurm has queued the job again already");
            return Ok(());
        }
        tracing::info!("asking Slurm to queue the job again");
        self.requeue()?;
        tracing::info!("Slurm queues the job again");
        Ok(())
    }

    /// Makes Slurm queue the job again, which ends it, so this must be the last action.
    ///
    /// # Errors
    /// When Slurm does not do it, or no job of Slurm is known.
    pub(crate) fn requeue(&self) -> Result<(), Error> {
        let job = self.slurm_job()?;
        while_away(|| run(&["scontrol", "requeue", job]), std::thread::sleep).map(drop)
    }
}

/// Tries it again while Slurm's controller cannot be reached: a job that is not queued again now never is.
fn while_away<T>(mut request: impl FnMut() -> Result<T, Error>, pause: impl Fn(Duration)) -> Result<T, Error> {
    for tries in 1..TRIES {
        match request() {
            Err(error) if error.is_away() => {
                if tries == 1 {
                    let time = humantime::format_duration(PAUSE * (TRIES - 1));
                    tracing::warn!("{}. This is tried again for {time}", rekindle_base::chain(&error));
                }
                pause(PAUSE);
            }
            answer => return answer,
        }
    }
    request()
}

/// The command that asks for this field of a job.
fn squeue<'a>(job: &'a str, field: &'a str) -> [&'a str; 6] {
    ["squeue", "--noheader", "--jobs", job, "--format", field]
}

/// Asks Slurm for this field of a job.
fn ask(job: &str, field: &str) -> Result<String, Error> {
    let line = squeue(job, field);
    of_one_job(&line.join(" "), &run(&line)?)
}

/// The answer for one job. Slurm writes a line for each task if it takes the job for a whole array: then it is not
/// known which of them is ours.
fn of_one_job(command: &str, answer: &str) -> Result<String, Error> {
    let answer = answer.trim();
    if answer.lines().count() > 1 {
        return Err(Error::Unclear { command: command.into(), said: answer.into() });
    }
    Ok(answer.into())
}

/// Slurm's time left: `[days-][hours:]minutes:seconds`, or a word if there is no limit (`Some(None)`). `None` if it is
/// neither: INVALID, for example, says nothing about the limit.
fn time_left(text: &str) -> Option<Option<Duration>> {
    match text {
        "UNLIMITED" | "NOT_SET" => Some(None),
        text => duration(text).map(Some),
    }
}

/// `[days-][hours:]minutes:seconds`.
fn duration(text: &str) -> Option<Duration> {
    let (days, rest) = text.split_once('-').unwrap_or(("0", text));
    let mut seconds = days.parse::<u64>().ok()?;
    let fields: Vec<&str> = rest.split(':').collect();
    if !(2..=3).contains(&fields.len()) {
        return None;
    }
    let hours = if fields.len() == 3 { fields.first()?.parse::<u64>().ok()? } else { 0 };
    seconds = seconds.checked_mul(24)?.checked_add(hours)?;
    for field in fields.iter().skip(fields.len() - 2) {
        seconds = seconds.checked_mul(60)?.checked_add(field.parse().ok()?)?;
    }
    Some(Duration::from_secs(seconds))
}

/// Runs a command of Slurm and returns its output.
fn run(line: &[&str]) -> Result<String, Error> {
    let command = line.join(" ");
    let failed = |source| Error::Run { command: command.clone(), source };
    let (child, mut out, mut err) = start(line).map_err(failed)?;
    let deadline = Instant::now() + PATIENCE;
    // Its output is one line, which fits in a pipe.
    while !child.has_ended().map_err(failed)? {
        if Instant::now() >= deadline {
            let _ = child.signal(libc::SIGKILL);
            let _ = child.wait();
            return Err(Error::Silent { command });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let mut text = String::new();
    match child.wait().map_err(failed)? {
        Ended::Exit(0) => out.read_to_string(&mut text).map_err(failed)?,
        ended => {
            err.read_to_string(&mut text).map_err(failed)?;
            return Err(Error::Failed { command, said: format!("{ended}, {}", text.trim().replace('\n', "; ")) });
        }
    };
    Ok(text)
}

/// Starts a command. Returns its process, its output, and its error messages.
///
/// It is a known child: the supervisor takes unknown ones for those of a failed restore, kills and reaps them.
fn start(line: &[&str]) -> io::Result<(Child, File, File)> {
    let (program, args) = line.split_first().unwrap_or((&"true", &[]));
    let path = std::env::var_os("PATH");
    let program = find_program(program.as_ref(), Path::new("/"), path.as_deref()).map_err(io::Error::other)?;
    let (out, to_out) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (err, to_err) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let child = Spawn::new(&program, args)
        .map_err(io::Error::other)?
        .open(Open { fd: 0, path: c"/dev/null".into(), flags: libc::O_RDONLY, expect: None })
        .fd(to_out, 1)
        .fd(to_err, 2)
        // Ctrl-C is for the job.
        .session()
        .start()
        .map_err(io::Error::other)?;
    Ok((child, out.into(), err.into()))
}

/// Adds the names of a list of Slurm's, `gpu[01-03,7],login`, with `begun` before each. `None` if it is none, or very
/// long.
fn expand(list: &str, begun: String, names: &mut BTreeSet<String>) -> Option<()> {
    /// More than any group has.
    const MOST: usize = 1 << 16;
    let mut within = false;
    let parts = list.split(|sign| {
        within = (within || sign == '[') && sign != ']';
        sign == ',' && !within
    });
    for part in parts {
        let Some((head, rest)) = part.split_once('[') else {
            names.insert(format!("{begun}{part}"));
            if names.len() > MOST {
                return None;
            }
            continue;
        };
        let (numbers, tail) = rest.split_once(']')?;
        for range in numbers.split(',') {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            let (from, to): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
            if to.checked_sub(from)? > MOST {
                return None;
            }
            for number in from..=to {
                expand(tail, format!("{begun}{head}{number:0width$}", width = first.len()), names)?;
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(wanted: Profile, environment: &[(&str, &str)]) -> Scheduler {
        Scheduler::find(wanted, |name| {
            environment.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn a_job_is_queued_again_once_the_controller_is_back() {
        let said = |said: &str| Error::Failed { command: "scontrol requeue 7".into(), said: said.into() };
        let away = || said("exit code 1, slurm_requeue error: Unable to contact slurm controller (connect failure)");
        let after = |failures: u32, error: &dyn Fn() -> Error| {
            let (asked, paused) = (std::cell::Cell::new(0), std::cell::Cell::new(Duration::ZERO));
            let request = || {
                asked.set(asked.get() + 1);
                if asked.get() > failures { Ok(()) } else { Err(error()) }
            };
            let answer = while_away(request, |pause| paused.set(paused.get() + pause));
            (answer.is_ok(), asked.get(), paused.get())
        };
        assert_eq!(after(0, &away), (true, 1, Duration::ZERO));
        assert_eq!(after(3, &away), (true, 4, PAUSE * 3));
        assert_eq!(after(1000, &away), (false, TRIES, PAUSE * (TRIES - 1)));
        let refused = || said("exit code 1, Requested operation is presently disabled");
        assert_eq!(after(1000, &refused), (false, 1, Duration::ZERO), "it will not be done later either");
    }

    #[test]
    fn slurm_is_told_by_its_variables() {
        for (environment, profile, name) in [
            (vec![], Profile::None, None),
            (vec![("SLURM_JOB_ID", "7")], Profile::Slurm, Some("slurm-7")),
            (vec![("SLURM_JOB_ID", "")], Profile::None, None),
            (vec![("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "0")], Profile::Slurm, Some("slurm-7")),
            (vec![("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "3")], Profile::Slurm, Some("slurm-7.3")),
            (
                vec![("SLURM_JOB_ID", "9"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "2")],
                Profile::Slurm,
                Some("slurm-7_2"),
            ),
        ] {
            let found = find(Profile::Auto, &environment);
            assert_eq!(found.profile, profile, "{environment:?}");
            assert_eq!(found.job_name().as_deref(), name, "{environment:?}");
            assert!(name.is_none_or(|name| name.parse::<rekindle_store::JobName>().is_ok()));
        }
    }

    #[test]
    fn the_user_knows_better() {
        let slurm = [("SLURM_JOB_ID", "7"), ("SLURM_JOB_END_TIME", "1795327200")];
        assert_eq!(find(Profile::Auto, &slurm).end(), DateTime::from_timestamp(1_795_327_200, 0));
        let none = find(Profile::None, &slurm);
        assert_eq!((none.job_name(), none.end(), none.can_be_asked()), (None, None, false));
    }

    /// With sudo the variables may be missing, and the profile is none then.
    #[test]
    fn a_job_that_slurm_is_not_asked_to_queue_again_is_not_said_to_be() {
        let none = find(Profile::None, &[("SLURM_JOB_ID", "7")]);
        for unknown in [find(Profile::Auto, &[]), find(Profile::Slurm, &[]), none] {
            assert!(matches!(unknown.requeue(), Err(Error::NoJob)), "{unknown:?}");
            let began = Instant::now();
            assert!(matches!(unknown.requeue_in_turn(1, || false), Err(Error::NoJob)), "{unknown:?}");
            assert!(began.elapsed() < TURN, "it waits for nobody");
        }
        assert_eq!(find(Profile::Auto, &[("SLURM_JOB_ID", "7")]).slurm_job().unwrap(), "7");
    }

    #[test]
    fn the_time_left_is_read_as_slurm_writes_it() {
        for (text, seconds) in [
            ("0:07", Some(7)),
            ("59:59", Some(3599)),
            ("2:00:00", Some(7200)),
            ("1-00:00:01", Some(86_401)),
            ("30-12:00:00", Some(2_635_200)),
            ("UNLIMITED", None),
            ("NOT_SET", None),
        ] {
            assert_eq!(time_left(text), Some(seconds.map(Duration::from_secs)), "{text}");
        }
        for unclear in ["INVALID", "", "7", "-1:00", "0:07\n0:07", "unlimited"] {
            assert_eq!(time_left(unclear), None, "{unclear}: the deadline that is known stays");
        }
    }

    #[test]
    fn an_answer_for_several_jobs_is_none() {
        assert_eq!(of_one_job("squeue", "0:07\n").unwrap(), "0:07");
        assert_eq!(of_one_job("squeue", "\n").unwrap(), "");
        let said = of_one_job("squeue --jobs 7", "0:07\n2:00:00\n").unwrap_err().to_string();
        assert!(said.contains("squeue --jobs 7") && said.contains("0:07"), "{said}");
    }

    /// Of one task of each array `SLURM_JOB_ID` is the number of the array.
    #[test]
    fn slurm_is_asked_about_one_task_of_an_array() {
        let array = |job: &'static str, task: &'static str| {
            [("SLURM_JOB_ID", job), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", task), ("SLURM_PROCID", "3")]
        };
        let asked = |environment: &[(&str, &str)]| find(Profile::Auto, environment).slurm_job;
        assert_eq!(asked(&array("7", "2")).as_deref(), Some("7_2"));
        assert_eq!(asked(&array("8", "1")).as_deref(), Some("7_1"));
        assert_eq!(asked(&[("SLURM_JOB_ID", "7"), ("SLURM_PROCID", "3")]).as_deref(), Some("7"));
        let known = find(Profile::Slurm, &array("7", "2")[1..]);
        assert_eq!((known.can_be_asked(), known.group_name().as_deref()), (true, Some("slurm-7_2")));
    }

    #[test]
    fn a_command_that_fails_says_why() {
        assert_eq!(run(&["printf", "%s", "1:00"]).unwrap(), "1:00");
        let said = run(&["sh", "-c", "echo no such job >&2; exit 3"]).unwrap_err().to_string();
        assert!(said.contains("no such job") && said.contains('3'), "{said}");
        assert!(matches!(run(&["/nowhere/squeue"]), Err(Error::Run { .. })));
    }

    /// Otherwise it would be reaped before its result is known.
    #[test]
    fn a_command_is_a_known_child_of_the_supervisor() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let script = format!("echo $$ >{0}.new; mv {0}.new {0}; exec sleep 60", file.display());
        let asked = std::thread::spawn(move || run(&["sh", "-c", &script]));
        let until = Instant::now() + Duration::from_secs(20);
        while !file.exists() {
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        let is_known = rekindle_os::spawn::is_known(pid);
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL).unwrap();
        assert!(matches!(asked.join().unwrap(), Err(Error::Failed { .. })));
        assert!(is_known, "pid {pid}");
    }

    #[test]
    fn the_list_of_nodes_is_read() {
        let names = |list: &str| {
            let variable = |name: &str| (name == "SLURM_JOB_NODELIST").then(|| list.to_owned());
            Scheduler::node_names(&variable).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(names("a"), ["a"]);
        assert_eq!(names("gpu[08-10,3],login.example"), ["gpu08", "gpu09", "gpu10", "gpu3", "login.example"]);
        assert_eq!(names("r[1-2]n[1,3]-ib"), ["r1n1-ib", "r1n3-ib", "r2n1-ib", "r2n3-ib"]);
        for none in ["a[1", "a[x]", "a[2-1]", "a[0-99999999]", "a[0-9999]b[0-9999]"] {
            assert_eq!(names(none), [""; 0], "{none}");
        }
        assert!(Scheduler::node_names(&|_| None).is_empty());
        let step =
            |name: &str| name.ends_with("NODELIST").then(|| if name.contains("STEP") { "s" } else { "j" }.into());
        assert_eq!(Scheduler::node_names(&step).into_iter().collect::<Vec<_>>(), ["s"]);
    }
}

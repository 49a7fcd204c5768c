//! `rekindle cuda`: the driver's checkpoint functions by hand. Does what NVIDIA's cuda-checkpoint utility does.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::Exit;
use super::output::{self, Format};
use rekindle_cuda::{Error, GpuMapping, Process, State};

/// What to do with a CUDA process.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum CudaCommand {
    /// Print the state: running, locked, checkpointed or failed
    State(Target),
    /// Lock a running process: its CUDA calls block
    Lock {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        timeout: LockTimeout,
    },
    /// Copy the device memory of a locked process to its host memory and release its GPUs
    Checkpoint(Target),
    /// Acquire GPUs again and copy device memory back; the process is then locked
    Restore {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        map: DeviceMap,
    },
    /// Unlock a locked process: its CUDA calls continue
    Unlock(Target),
    /// Lock and checkpoint a running process; restore and unlock a checkpointed one
    Toggle {
        #[command(flatten)]
        target: Target,
        #[command(flatten)]
        timeout: LockTimeout,
        #[command(flatten)]
        map: DeviceMap,
    },
    /// Print the id of the thread that must run during a restore
    RestoreTid(Target),
}

/// Which process.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    /// The process (not a thread of one), as numbered here
    #[arg(long, short, value_name = "PID", value_parser = clap::value_parser!(i32).range(1..))]
    pid: i32,
}

/// The time limit of a lock.
#[derive(Debug, clap::Args)]
pub(crate) struct LockTimeout {
    /// Give up the lock after this time; the process then continues. A number without a unit is milliseconds
    // A number alone is milliseconds, as with NVIDIA's utility.
    #[arg(long = "timeout", value_name = "TIME", default_value = "10s", value_parser = limit)]
    limit: Duration,
}

/// Between 1 ms, as 0 would mean no limit, and what the driver's number can hold.
fn limit(text: &str) -> Result<Duration, String> {
    let time = match text.parse().map(Duration::from_millis) {
        Ok(time) => time,
        Err(_) => humantime::parse_duration(text)
            .map_err(|_| "must be a duration with a unit, such as 500ms or 10s".to_owned())?,
    };
    let longest = Duration::from_millis(u32::MAX.into());
    if time < Duration::from_millis(1) || time > longest {
        return Err("must be from 1ms to 49days".to_owned());
    }
    Ok(time)
}

/// The GPUs of a restore.
#[derive(Debug, clap::Args)]
pub(crate) struct DeviceMap {
    /// Restore to other GPUs, as UUIDs; must name every GPU of the process (driver 580 or newer)
    #[arg(long = "device-map", value_name = "OLD=NEW,...", value_delimiter = ',')]
    pairs: Vec<GpuMapping>,
}

/// The result: lines for people, one document for programs.
#[derive(Debug, Default, Serialize)]
struct Report {
    pid: i32,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restore_tid: Option<i32>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    steps: Vec<Step>,
}

#[derive(Debug, Serialize)]
struct Step {
    action: &'static str,
    state: &'static str,
    milliseconds: f64,
}

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Cuda(#[from] Error),
    #[error("process {pid} is {state}: toggle needs a running or checkpointed process{}", advice(*pid, *state))]
    NotToggled { pid: i32, state: State },
    #[error("cannot use a device map: process {0} is running, and only a restore uses one")]
    MapWhileRunning(i32),
    #[error("{action} of process {pid} failed, and undoing it failed too: {undo}")]
    Stuck { pid: i32, action: &'static str, source: Box<Error>, undo: Box<Error> },
    #[error("print the result")]
    Print(#[from] std::io::Error),
}

fn advice(pid: i32, state: State) -> String {
    match state {
        State::Locked => {
            format!(
                "; `rekindle cuda unlock --pid {pid}` lets it run again, `rekindle cuda checkpoint --pid {pid}` \
                continues the checkpoint"
            )
        }
        State::Failed => "; it cannot continue: kill it and restore its image".to_owned(),
        State::Checkpointing | State::Restoring => "; wait until that has finished".to_owned(),
        State::Running | State::Checkpointed => String::new(),
    }
}

impl Failure {
    fn exit(&self) -> Exit {
        match self {
            Failure::Cuda(error) if error.is_missing() => Exit::Missing,
            Failure::Cuda(
                Error::InvalidPid(_)
                | Error::NoProcess(_)
                | Error::ThreadId { .. }
                | Error::Timeout(_)
                | Error::TooManyPairs(_),
            )
            | Failure::MapWhileRunning(_) => Exit::Usage,
            Failure::Cuda(_) | Failure::NotToggled { .. } | Failure::Stuck { .. } => Exit::Unsound,
            Failure::Print(_) => Exit::Internal,
        }
    }
}

/// Carries out `command` and prints the result: the state, or each step with its state and milliseconds. A failure goes
/// to standard error; the steps before it are still printed, and without any no document is.
pub(crate) fn run(command: &CudaCommand, format: Format) -> anyhow::Result<Exit> {
    let mut report = Report { pid: command.pid(), ..Report::default() };
    let result = execute(command, format, &mut report);
    if format == Format::Json && (result.is_ok() || !report.steps.is_empty()) {
        output::print_json(&report)?;
    }
    let Err(failure) = result else { return Ok(Exit::Success) };
    let (text, exit) = (chain(&failure), failure.exit());
    match format {
        Format::Json => output::complain_json(&text, exit.code()),
        Format::Text => output::complain(&text),
    }
    Ok(exit)
}

/// The error and its causes on one line.
fn chain(failure: &Failure) -> String {
    let mut text = failure.to_string();
    let mut cause = std::error::Error::source(failure);
    while let Some(error) = cause {
        // Writing to a String does not fail.
        let _ = write!(text, ": {error}");
        cause = error.source();
    }
    text
}

impl CudaCommand {
    fn pid(&self) -> i32 {
        match self {
            CudaCommand::State(target)
            | CudaCommand::Checkpoint(target)
            | CudaCommand::Unlock(target)
            | CudaCommand::RestoreTid(target)
            | CudaCommand::Lock { target, .. }
            | CudaCommand::Restore { target, .. }
            | CudaCommand::Toggle { target, .. } => target.pid,
        }
    }
}

fn execute(command: &CudaCommand, format: Format, report: &mut Report) -> Result<(), Failure> {
    let process = Process::new(command.pid())?;
    let mut session = Session { process: &process, format, report };
    match command {
        CudaCommand::State(_) => session.state(),
        CudaCommand::RestoreTid(_) => session.restore_tid(),
        CudaCommand::Lock { timeout, .. } => session.step("lock", || process.lock(timeout.limit)),
        CudaCommand::Checkpoint(_) => session.step("checkpoint", || process.checkpoint()),
        CudaCommand::Restore { map, .. } => session.step("restore", || process.restore(&map.pairs)),
        CudaCommand::Unlock(_) => session.step("unlock", || process.unlock()),
        CudaCommand::Toggle { timeout, map, .. } => session.toggle(timeout.limit, &map.pairs),
    }
}

struct Session<'a> {
    process: &'a Process,
    format: Format,
    report: &'a mut Report,
}

impl Session<'_> {
    fn say(&self, line: &str) -> Result<(), Failure> {
        if self.format == Format::Text {
            output::print_text(line)?;
        }
        Ok(())
    }

    fn state(&mut self) -> Result<(), Failure> {
        let state = self.process.state()?.as_str();
        self.report.state = Some(state);
        self.say(state)
    }

    fn restore_tid(&mut self) -> Result<(), Failure> {
        let tid = self.process.restore_thread_id()?;
        self.report.restore_tid = Some(tid);
        self.say(&tid.to_string())
    }

    /// One action, timed, and the state after it.
    fn step(&mut self, action: &'static str, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Failure> {
        let start = Instant::now();
        work()?;
        let milliseconds = (start.elapsed().as_secs_f64() * 1e6).round() / 1e3;
        let state = self.process.state()?.as_str();
        self.report.state = Some(state);
        self.report.steps.push(Step { action, state, milliseconds });
        self.say(&format!("{action}: {state}, {milliseconds:.1} ms"))
    }

    fn toggle(&mut self, timeout: Duration, pairs: &[GpuMapping]) -> Result<(), Failure> {
        let (process, pid) = (self.process, self.process.pid());
        match process.state()? {
            State::Running if !pairs.is_empty() => Err(Failure::MapWhileRunning(pid)),
            State::Running => {
                self.step("lock", || process.lock(timeout))?;
                let done = self.step("checkpoint", || process.checkpoint());
                match done {
                    // A failed checkpoint leaves the process locked; it was running before.
                    Err(Failure::Cuda(source)) => match self.step("unlock", || process.unlock()) {
                        Err(Failure::Cuda(undo)) => {
                            let (source, undo) = (Box::new(source), Box::new(undo));
                            Err(Failure::Stuck { pid, action: "checkpoint", source, undo })
                        }
                        _ => Err(source.into()),
                    },
                    done => done,
                }
            }
            State::Checkpointed => {
                self.step("restore", || process.restore(pairs))?;
                self.step("unlock", || process.unlock())
            }
            state => Err(Failure::NotToggled { pid, state }),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, clap::Parser)]
    struct Cli {
        #[command(subcommand)]
        command: CudaCommand,
    }

    fn parse(line: &str) -> Result<CudaCommand, String> {
        let args = std::iter::once("cuda").chain(line.split_whitespace());
        Cli::try_parse_from(args).map(|cli| cli.command).map_err(|error| error.to_string())
    }

    #[test]
    fn lines_that_are_understood() {
        const A: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
        assert!(matches!(parse("state --pid 7").unwrap(), CudaCommand::State(Target { pid: 7 })));
        let CudaCommand::Lock { timeout, .. } = parse("lock --pid 7").unwrap() else { panic!() };
        assert_eq!(timeout.limit, Duration::from_secs(10));
        let CudaCommand::Toggle { timeout, map, .. } =
            parse(&format!("toggle -p 7 --timeout 5 --device-map {A}={A},{A}={A}")).unwrap()
        else {
            panic!()
        };
        assert_eq!((timeout.limit, map.pairs.len()), (Duration::from_millis(5), 2));
        assert!(matches!(parse("restore-tid --pid 7").unwrap(), CudaCommand::RestoreTid(_)));
    }

    #[test]
    fn lines_that_are_refused_say_why() {
        for (line, words) in [
            ("state", "--pid"),
            ("state --pid 0", "0"),
            ("state --pid me", "me"),
            ("lock --pid 7 --timeout 0", "--timeout"),
            ("lock --pid 7 --timeout 4294967296", "--timeout"),
            ("lock --pid 7 --device-map a=b", "--device-map"),
            ("checkpoint --pid 7 --timeout 5", "--timeout"),
            ("restore --pid 7 --device-map GPU-1=GPU-2", "32 hexadecimal digits"),
            ("restore --pid 7 --device-map GPU-1", "OLD=NEW"),
        ] {
            let error = parse(line).unwrap_err();
            assert!(error.contains(words), "{line}: {error}");
        }
    }

    #[test]
    fn a_locked_process_is_not_toggled_but_told_what_to_do() {
        let text = Failure::NotToggled { pid: 7, state: State::Locked }.to_string();
        assert!(text.contains("`rekindle cuda unlock --pid 7`"), "{text}");
    }
}

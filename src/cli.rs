//! The command line, turned into calls of the library; tables, JSON and exit codes.

mod complete;
mod config;
mod control;
mod copy_gpu_memory;
mod cuda;
mod doctor;
mod ended;
mod environment;
mod examples;
pub(crate) mod exit;
mod find;
mod group;
mod list;
mod logs;
mod man;
pub(crate) mod mark;
mod output;
mod progress;
mod prune;
mod rehearse;
mod repair;
mod replica;
mod report;
mod rm;
mod run;
mod show;
mod status;
mod stop;
mod tag;
mod trust;
mod usage;
mod verify;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Once;

use clap::{CommandFactory, FromArgMatches, Parser};

use crate::config::{self as settings, Overrides};
use crate::telemetry;
pub(crate) use exit::Exit;
use output::Format;
use rekindle_base::chain;
use rekindle_store::{Access, Store};

/// Keeps long GPU jobs alive: takes snapshots at an interval and, if a job dies, restores it from its newest good image
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Command,
}

/// What every command takes.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Options of all commands")]
pub(crate) struct Global {
    /// Read only this configuration file, instead of /etc/rekindle/rekindle.toml, ~/.config/rekindle/rekindle.toml and
    /// ./rekindle.toml
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Use this folder for the images of all jobs (store.directory)
    #[arg(long, global = true, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Print JSON instead of text, errors too; `run` prints its events instead of the job's output
    #[arg(long, global = true)]
    json: bool,
    /// Log each snapshot too (log.level = "info"); twice: details (log.level = "debug")
    #[arg(long, short, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
}

impl Global {
    fn format(&self) -> Format {
        if self.json { Format::Json } else { Format::Text }
    }

    fn overrides(&self) -> Overrides {
        Overrides { store: self.store.clone(), ..Overrides::default() }
    }

    /// The configuration, overridden by `more`.
    fn settings(&self, more: Overrides) -> Result<settings::Config, settings::Error> {
        let read = self.read(more)?;
        name_strangers(&read, output::complain);
        Ok(read.config)
    }

    /// The configuration with the source of each value.
    fn effective(&self) -> Result<settings::Effective, settings::Error> {
        self.read(self.overrides()).inspect(|read| name_strangers(read, output::complain))
    }

    /// The same for a command that starts a job: starts the log, and warns there. No file may be ignored.
    fn settings_and_log(&self, more: Overrides) -> Result<settings::Config, settings::Error> {
        let read = self.read(more)?.complete()?;
        start_log(&read.config);
        name_strangers(&read, |stranger| tracing::warn!("{stranger}"));
        Ok(read.config)
    }

    fn read(&self, more: Overrides) -> Result<settings::Effective, settings::Error> {
        let mut read = settings::effective(self.config.as_deref(), settings::environment(), &more)?;
        let wanted = match self.verbose {
            0 => read.config.log.level,
            1 => settings::Level::Info,
            _ => settings::Level::Debug,
        };
        read.config.log.level = read.config.log.level.max(wanted);
        Ok(read)
    }

    /// The store that is configured, for reading its images.
    fn open_store(&self) -> anyhow::Result<Store> {
        let config = self.settings(self.overrides())?.store;
        Ok(Store::open(&config.directory, Access::Read)?.with_trust(config.trust()?))
    }
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    /// Start a job, or continue an interrupted one, and restart it if it dies
    Run(run::RunArgs),
    /// Restore a job from an image, and restart it if it dies
    Restore(run::RestoreArgs),
    /// Show the state of jobs: restarts, the last and the next snapshot, and what failed
    #[command(visible_alias = "ps")]
    Status(status::StatusArgs),
    /// Take a snapshot of a running job now
    Snapshot(control::SnapshotArgs),
    /// Take a snapshot, then end the job and free its memory and GPUs until `resume`
    Suspend(control::JobArg),
    /// Continue a suspended job
    Resume(control::JobArg),
    /// Restore a running job from one of its older images; newer images are kept
    Rewind(control::RewindArgs),
    /// Take a final snapshot, then stop the job and its supervisor; the same `run` continues from it
    Stop(stop::StopArgs),
    /// Print the output of a job, through rotations and restarts
    Logs(logs::LogsArgs),
    /// List jobs, or the images of a job
    #[command(visible_alias = "ls")]
    List(list::ListArgs),
    /// Show the details of an image
    Show {
        /// JOB (its newest good image), JOB/ID, JOB/TAG, JOB/-N or ID
        #[arg(add = complete::images())]
        image: String,
    },
    /// Write an HTML page about a job's time: goodput, freezes, failures, the store
    Report(report::ReportArgs),
    /// Check that the images are complete; with --read-data, check every byte
    Verify(verify::VerifyArgs),
    /// Repair a job's damaged packs from other packs and the replica; mark images that lost content as bad
    Repair(repair::RepairArgs),
    /// Remove images from the store that no rule keeps (store.keep-last and others), and the oldest ones if a job is
    /// above its size limit; free memory that dead supervisors left
    Prune(prune::PruneArgs),
    /// Remove jobs that are not running, with their images, output and memory
    Rm(rm::RmArgs),
    /// Pin an image: no rule removes it. With --remove, remove the pin
    Pin(tag::PinArgs),
    /// Tag an image, to refer to it as JOB/TAG; a tag does not protect it, `pin` does. With --remove, remove tags
    Tag(tag::TagArgs),
    /// With --good, remove the bad mark from images, so that restarts use them again
    Mark(mark::MarkArgs),
    /// Check whether `run` works on this machine, and show fixes; exit with 69 if it does not
    Doctor,
    /// Show or check the configuration
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Lock, checkpoint, restore and unlock a CUDA process by hand (driver 570 or newer)
    #[command(subcommand)]
    Cuda(cuda::CudaCommand),
    /// Print a script that makes a shell complete commands, options, and names of jobs, images and tags
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Rehearse a restore beside a running job; for the supervisor
    #[command(hide = true)]
    Rehearse,
    /// Copy memory that stays on the GPU; for the supervisor
    #[command(hide = true)]
    CopyGpuMemory,
    /// Write the manual pages into a folder, for a package
    #[command(hide = true)]
    Man {
        /// The folder, created if needed
        folder: PathBuf,
    },
}

#[derive(Debug, clap::Subcommand)]
enum ConfigCommand {
    /// Print every key with its value and the source of the value
    Show,
    /// Check a configuration file
    Check {
        /// The file; by default all that `run` reads
        file: Option<PathBuf>,
    },
}

/// The command line, with the examples in its help. `--json` is not shown where it does nothing.
fn command() -> clap::Command {
    let silent = |part: clap::Command| {
        let json = clap::Arg::new("json").long("json").action(clap::ArgAction::SetTrue).hide(true);
        if part.get_subcommands().next().is_some() { part } else { part.arg(json) }
    };
    let command = ["logs", "completions"].iter().fold(Cli::command(), |all, name| all.mut_subcommand(name, silent));
    examples::add(command.mut_subcommand("config", |config| config.mut_subcommand("check", silent)))
}

/// Runs the command line of this process.
#[must_use]
pub fn main() -> ExitCode {
    if complete::answered() {
        return Exit::Success.into();
    }
    rekindle_os::spawn::spare_present_children();
    if let Err(error) = rekindle_os::inherited::put_right() {
        output::complain(&format!("cannot reset signal handling: {error}"));
        return Exit::Internal.into();
    }
    let exit = main_with(std::env::args_os());
    telemetry::log::flush();
    exit
}

fn main_with(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    let parsed = command().try_get_matches_from(&args).and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        Err(error) => {
            match usage::words(&error, &command(), &args) {
                Some(text) if usage::wants_json(&args) => output::complain_json(&text, Exit::Usage.code()),
                Some(text) => output::complain(&text),
                // clap treats help and version as errors, with their own stream and code.
                None => drop(error.print()),
            }
            return if error.use_stderr() { Exit::Usage.into() } else { Exit::Success.into() };
        }
    };
    if cli.global.json {
        output::speak_json();
    }
    match dispatch(&cli) {
        Ok(exit) => exit.into(),
        Err(error) => {
            let text = chain(error.as_ref()) + &exit::hint(error.as_ref());
            let exit = exit::of_error(&error, cli.global.store.is_some());
            if cli.global.json {
                output::complain_json(&text, exit.code())
            } else if telemetry::log::is_json() {
                // With a JSON log, the error is written as a line of the log.
                tracing::error!("{text}")
            } else {
                output::complain(&text)
            }
            exit.into()
        }
    }
}

fn dispatch(cli: &Cli) -> anyhow::Result<Exit> {
    let global = &cli.global;
    match &cli.command {
        Command::Run(args) => run::run(global, args),
        Command::Restore(args) => run::restore(global, args),
        Command::Status(args) => status::status(global, args),
        Command::Snapshot(args) => control::snapshot(global, args),
        Command::Suspend(args) => control::suspend(global, args),
        Command::Resume(args) => control::resume(global, args),
        Command::Rewind(args) => control::rewind(global, args),
        Command::Stop(args) => stop::stop(global, args),
        Command::Logs(args) => logs::logs(global, args),
        Command::List(args) => list::list(global, args),
        Command::Show { image } => show::show(global, image),
        Command::Report(args) => report::report(global, args),
        Command::Verify(args) => verify::verify(global, args),
        Command::Repair(args) => repair::repair(global, args),
        Command::Prune(args) => prune::prune(global, args),
        Command::Rm(args) => rm::rm(global, args),
        Command::Pin(args) => tag::pin(global, args),
        Command::Tag(args) => tag::tag(global, args),
        Command::Mark(args) => mark::mark(global, args),
        Command::Doctor => doctor::doctor(global),
        Command::Config(ConfigCommand::Show) => {
            config::show(global.config.as_deref(), &global.overrides(), global.format())?;
            Ok(Exit::Success)
        }
        Command::Config(ConfigCommand::Check { file }) => {
            config::check(file.as_deref().or(global.config.as_deref()))?;
            Ok(Exit::Success)
        }
        Command::Cuda(command) => cuda::run(command, global.format()),
        Command::Rehearse => rehearse::rehearse(),
        Command::CopyGpuMemory => copy_gpu_memory::copy(),
        Command::Man { folder } => {
            man::write(command(), folder)?;
            Ok(Exit::Success)
        }
        Command::Completions { shell } => {
            output::print_text(complete::script(*shell)?.trim_end())?;
            Ok(Exit::Success)
        }
    }
}

/// An invalid request; the message says what to do instead.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct Misuse(String);

/// A job of another user: this user may not see it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct AnothersJob(String);

/// The CRIU that the user names, in the configuration or with REKINDLE_CRIU.
fn named_criu(config: &settings::Config) -> Option<PathBuf> {
    // CRIU is run from other folders than this one.
    let here = |named| std::path::absolute(&named).unwrap_or(named);
    config.criu.path.clone().or_else(|| std::env::var_os("REKINDLE_CRIU").map(PathBuf::from).map(here))
}

/// Names the variables that are ignored although they look like ours. Once: a command may read its configuration
/// several times.
fn name_strangers(read: &settings::Effective, tell: impl Fn(&str)) {
    static TOLD: Once = Once::new();
    TOLD.call_once(|| read.strangers.iter().for_each(|stranger| tell(stranger)));
}

/// Starts logging as configured; commands that only print do not log.
fn start_log(config: &settings::Config) {
    telemetry::log::start(config.log.level, config.log.format);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn json_is_not_shown_where_it_does_nothing() {
        let mut all = command();
        all.build();
        for (name, shown) in [("logs", false), ("completions", false), ("status", true), ("run", true)] {
            let help = all.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            assert_eq!(help.contains("--json"), shown, "{help}");
            let (own, common) = help.split_once("Options of all commands:").unwrap();
            assert!(!own.contains("--store") && common.contains("--store"), "{help}");
        }
        // It is still understood, and answered.
        let matches = command().try_get_matches_from(["rekindle", "logs", "--json", "j"]).unwrap();
        assert!(Cli::from_arg_matches(&matches).unwrap().global.json);
    }

    #[test]
    fn everything_after_the_dashes_is_the_jobs() {
        let cli = Cli::try_parse_from(["rekindle", "run", "--name", "n", "--", "prog", "--json", "-x"]).unwrap();
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.command, ["prog", "--json", "-x"]);
        assert!(!cli.global.json);
    }
}

//! Completion in a shell: commands, options, and names of jobs, images and tags.
//!
//! The script of `rekindle completions SHELL` runs rekindle with [`VARIABLE`] and the words of the line; the answer is
//! made by clap's engine and the functions here. A user who presses TAB must see neither an error nor a pause: an error
//! means that nothing is completed, nothing is written to standard error, and what takes longer than [`LIMIT`] (a file
//! server that is gone) is left out.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::Duration;

use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, PathCompleter, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};

use super::find::Finder;
use super::{Cli, Global};
use rekindle_store::{JobFolder, LATEST, Outcome, Writer};

/// Set by the scripts. Not a name that a user could mean for a key of the configuration.
const VARIABLE: &str = "_REKINDLE_COMPLETE";
/// For bash. That of clap does not know `--option=value`, shows errors of a program that is gone, and completes no
/// files.
const BASH: &str = include_str!("complete/rekindle.bash");
/// How long to wait for candidates.
const LIMIT: Duration = Duration::from_secs(1);
/// How long to wait for supervisors. They answer within a millisecond, on a loaded machine a little later.
const PATIENCE: Duration = Duration::from_millis(100);

/// Answers the request of a shell; false if this is a normal call.
pub(super) fn answered() -> bool {
    if std::env::var_os(VARIABLE).is_none() {
        return false;
    }
    if let Ok(null) = File::options().write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stderr(null);
    }
    let is_empty = current(&line()).is_empty();
    let command = move || if is_empty { options_last(Cli::command()) } else { Cli::command() };
    // An error is not a candidate.
    CompleteEnv::with_factory(command)
        .var(VARIABLE)
        .try_complete(std::env::args_os(), std::env::current_dir().ok().as_deref())
        .unwrap_or(true)
}

/// The script for a shell, which calls the `rekindle` of the user's PATH.
pub(super) fn script(shell: clap_complete::Shell) -> anyhow::Result<String> {
    if shell == clap_complete::Shell::Bash {
        return Ok(BASH.to_owned());
    }
    let shells = Shells::builtins();
    let found = shells.completer(&shell.to_string()).ok_or_else(|| anyhow::anyhow!("no completions for {shell}"))?;
    let mut script = Vec::new();
    found.write_registration(VARIABLE, "rekindle", "rekindle", "rekindle", &mut script)?;
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if shell == clap_complete::Shell::Zsh {
        // Loaded by the first TAB, as a file of $fpath, it must answer that one, too.
        script = script.trim_end().to_owned()
            + "\n[[ $funcstack[1] != _rekindle ]] || _clap_dynamic_completer_rekindle \"$@\"\n";
    }
    Ok(script)
}

/// Options are offered for an empty word only if there is nothing else: the only job is completed at once.
fn options_last(command: Command) -> Command {
    command
        .disable_help_flag(true)
        .disable_version_flag(true)
        .mut_args(|arg| if arg.is_positional() { arg } else { arg.hide(true) })
        .mut_subcommands(|command| if command.is_hide_set() { command } else { options_last(command) })
}

/// The words of the line, with the name of the program.
fn line() -> Vec<OsString> {
    std::env::args_os().skip_while(|word| word != "--").skip(1).collect()
}

/// The word at the cursor. A shell that does not say which it is gives the words up to it.
fn current(line: &[OsString]) -> OsString {
    let index = std::env::var("_CLAP_COMPLETE_INDEX").ok().and_then(|text| text.parse::<usize>().ok());
    line.get(index.unwrap_or_else(|| line.len().saturating_sub(1))).cloned().unwrap_or_default()
}

/// What the line says about where to look.
#[derive(Debug, Default, PartialEq, Eq)]
struct Typed {
    config: Option<PathBuf>,
    store: Option<PathBuf>,
    /// The words that are no options, after the command.
    words: Vec<String>,
}

impl Typed {
    fn of(line: &[OsString]) -> Typed {
        let mut typed = Typed::default();
        let mut words = line.iter().skip(1).map(|word| word.to_string_lossy());
        while let Some(word) = words.next() {
            let (name, value) = word.split_once('=').map_or((&*word, None), |(name, value)| (name, Some(value)));
            let place = match name {
                "--config" => &mut typed.config,
                "--store" => &mut typed.store,
                "--" => break,
                _ if word.starts_with("--") => continue,
                _ => {
                    typed.words.push(word.into_owned());
                    continue;
                }
            };
            // bash makes three words of --store=DIR.
            let value =
                value.map(str::to_owned).or_else(|| words.find(|word| word != "=").map(|word| word.into_owned()));
            *place = value.map(|value| path(&value));
        }
        typed.words = typed.words.split_off(1.min(typed.words.len()));
        typed
    }

    fn finder(&self) -> Option<Finder> {
        let Typed { config, store, .. } = self;
        let global = Global { config: config.clone(), store: store.clone(), json: false, verbose: 0 };
        // A key that cannot be used hides no names.
        let finder = Finder::with_key(&global).or_else(|_| Finder::new(&global)).ok()?;
        Some(finder.with_patience(PATIENCE))
    }
}

/// A path as the shell would give it to the program.
fn path(text: &str) -> PathBuf {
    let plain = text.replace(['"', '\'', '\\'], "");
    match (plain.strip_prefix("~/"), std::env::home_dir()) {
        (Some(below), Some(home)) => home.join(below),
        _ => PathBuf::from(plain),
    }
}

/// Asks for candidates, within the limit; only those that begin with what is typed.
fn within_limit(
    current: &OsStr,
    ask: impl FnOnce(&Typed, &Finder, &str) -> Option<Vec<CompletionCandidate>> + Send + 'static,
) -> Vec<CompletionCandidate> {
    let Some(begun) = current.to_str().map(str::to_owned) else { return Vec::new() };
    let (sender, receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().spawn(move || {
        let typed = Typed::of(&line());
        let found = typed.finder().and_then(|finder| ask(&typed, &finder, &begun)).unwrap_or_default();
        let fits = |it: &CompletionCandidate| it.get_value().to_string_lossy().starts_with(&begun);
        let _ = sender.send(found.into_iter().filter(fits).collect());
    });
    thread.ok().and_then(|_| receiver.recv_timeout(LIMIT).ok()).unwrap_or_default()
}

fn candidate(value: impl Into<OsString>, help: impl Into<String>) -> CompletionCandidate {
    CompletionCandidate::new(value).help(Some(help.into().into()))
}

/// Completes jobs.
pub(super) fn jobs() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| within_limit(current, |_, finder, _| Some(named(finder, |_| true))))
}

/// Completes jobs that run.
pub(super) fn running_jobs() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| within_limit(current, |_, finder, _| Some(named(finder, is_running))))
}

/// Completes jobs that do not run.
pub(super) fn jobs_at_rest() -> ArgValueCompleter {
    let at_rest = |folder: &JobFolder| !is_running(folder);
    ArgValueCompleter::new(move |current: &OsStr| {
        within_limit(current, move |_, finder, _| Some(named(finder, at_rest)))
    })
}

fn is_running(folder: &JobFolder) -> bool {
    !matches!(folder.writer(), Ok(Writer::Nobody))
}

fn named(finder: &Finder, wanted: impl Fn(&JobFolder) -> bool) -> Vec<CompletionCandidate> {
    let mut folders = finder.jobs().map(|jobs| jobs.folders).unwrap_or_default();
    folders.dedup_by(|a, b| a.name() == b.name());
    folders
        .iter()
        .filter(|folder| wanted(folder))
        .map(|folder| candidate(folder.name().as_str(), state(folder)))
        .collect()
}

fn state(folder: &JobFolder) -> &'static str {
    if is_running(folder) {
        return "running";
    }
    match folder.record().ok().flatten().map(|record| record.outcome) {
        Some(Outcome::Running) => "interrupted",
        Some(Outcome::Completed) => "completed",
        Some(Outcome::Failed { .. }) => "failed",
        Some(Outcome::Stopped) => "stopped",
        None => "new",
    }
}

/// Completes JOB and JOB/IMAGE.
pub(super) fn images() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        within_limit(current, |_, finder, begun| match begun.split_once('/') {
            Some((job, selector)) => {
                let images = selectors(&finder.only_job(job).ok()?, selector);
                Some(images.into_iter().map(|image| image.add_prefix(format!("{job}/"))).collect())
            }
            // Both, so that a shell waits for the choice.
            None => {
                let jobs = named(finder, |_| true).into_iter();
                let both = |job: CompletionCandidate| [candidate(slash(job.get_value()), "its images"), job];
                Some(jobs.flat_map(both).collect())
            }
        })
    })
}

fn slash(job: &OsStr) -> OsString {
    let mut text = job.to_owned();
    text.push("/");
    text
}

/// Completes the image for the job that is the word before, as for `rewind`.
pub(super) fn images_of_job() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        within_limit(current, |typed, finder, begun| Some(selectors(&finder.job(typed.words.first()?).ok()?, begun)))
    })
}

/// Completes the tags of the image that is the first word, as for `tag --remove`.
pub(super) fn tags_of_image() -> ArgValueCompleter {
    ArgValueCompleter::new(|current: &OsStr| {
        within_limit(current, |typed, finder, _| {
            let (_, image) = finder.image(typed.words.first()?).ok()?;
            Some(image.tags().iter().map(|tag| CompletionCandidate::new(tag.as_str())).collect())
        })
    })
}

/// All that names an image of the job. Numbers from the newest only where one was begun: they mean images that have
/// names already.
fn selectors(folder: &JobFolder, begun: &str) -> Vec<CompletionCandidate> {
    let known = folder.known().unwrap_or_default();
    if begun.starts_with('-') {
        let newest = folder.to_continue_from(&known).into_iter().enumerate();
        return newest.map(|(index, id)| candidate(format!("-{}", index + 1), id.to_string())).collect();
    }
    let is_any_good = known.iter().any(|image| image.best().is_good());
    let mut found: Vec<_> = is_any_good.then(|| candidate(LATEST, "the newest good image")).into_iter().collect();
    for image in &known {
        let id = image.id().to_string();
        found.extend(image.tags().iter().map(|tag| candidate(tag.as_str(), id.clone())));
    }
    found.extend(known.iter().map(|image| {
        let state = if image.best().is_good() { "good" } else { "not good" };
        let tags = image.tags().to_string();
        candidate(image.id().to_string(), if tags.is_empty() { state.to_owned() } else { format!("{state}, {tags}") })
    }));
    found
}

/// Completes the command of a job: programs, then files.
pub(super) fn command() -> ArgValueCompleter {
    ArgValueCompleter::new(CommandLine)
}

#[derive(Debug)]
struct CommandLine;

impl ValueCompleter for CommandLine {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        PathCompleter::any().complete(current)
    }

    fn complete_at(&self, index: usize, current: &OsStr) -> Vec<CompletionCandidate> {
        let begun = current.to_string_lossy();
        if index > 0 || begun.is_empty() || begun.contains('/') {
            return self.complete(current);
        }
        let folders = std::env::var_os("PATH").unwrap_or_default();
        let entries = std::env::split_paths(&folders).filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
        let is_program = |entry: &std::fs::DirEntry| {
            entry.path().metadata().is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        };
        let programs = entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&*begun) && is_program(entry));
        let programs: BTreeSet<OsString> = programs.map(|entry| entry.file_name()).collect();
        programs.into_iter().map(CompletionCandidate::new).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn typed(line: &str) -> Typed {
        Typed::of(&line.split(' ').map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn the_line_says_where_to_look() {
        let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        assert_eq!(typed("rekindle rewind j -1").words, ["j", "-1"]);
        assert_eq!(typed("rekindle"), Typed::default());
        let there = |store: &str| Typed { store: Some(store.into()), words: words(&["j"]), ..Typed::default() };
        assert_eq!(typed("rekindle show --store /s j"), there("/s"));
        assert_eq!(typed("rekindle --store=/s show --json j"), there("/s"));
        assert_eq!(typed("rekindle show --store = '/s' j"), there("/s"), "as bash gives it");
        assert_eq!(
            typed("rekindle run --config ~/c -- x --store /s").config,
            std::env::home_dir().map(|it| it.join("c"))
        );
        assert_eq!(typed("rekindle run --config ~/c -- x --store /s").store, None);
    }
}

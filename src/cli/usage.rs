//! Mistakes on the command line, as one sentence each: what is wrong, and what to write instead.
//!
//! clap finds the mistakes. Its own text has several lines, quotes parsers of Rust ("expected number at 0"), and names
//! the nearest option in a line of its own.

use std::ffi::OsString;
use std::fmt::Write;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use rekindle_store::nth_newest;

/// The sentence for a mistake that clap found in `args`; nothing if clap prints help instead.
pub(super) fn words(error: &clap::Error, root: &clap::Command, args: &[OsString]) -> Option<String> {
    let (command, name) = typed_command(root, args);
    let help = format!("`{name} --help`");
    let get = |kind| error.get(kind).map(texts).unwrap_or_default();
    let first = |kind| get(kind).into_iter().next();
    let arg = first(ContextKind::InvalidArg).unwrap_or_default();
    let value = first(ContextKind::InvalidValue).unwrap_or_default();
    // "--interval <TIME>" is "--interval" for the reader, but an argument has only its placeholder.
    let flag = if arg.starts_with('-') { arg.split([' ', '=', '[']).next().unwrap_or(&arg) } else { arg.as_str() };
    Some(match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        | ErrorKind::Io
        | ErrorKind::Format => return None,
        ErrorKind::UnknownArgument if nth_newest(&arg).is_some() => match negative_value(command, args, &arg) {
            Some((flag, value)) => format!("{flag} {value:?}: must not be negative"),
            None => format!("{arg} needs a job: write JOB/{arg} for an image of the job"),
        },
        ErrorKind::UnknownArgument if arg.starts_with('-') => {
            let near = first(ContextKind::SuggestedArg).map(|near| format!("did you mean {}?", option(&near)));
            let near = near.unwrap_or_else(|| format!("{help} lists the options"));
            format!("unknown option {flag}: {near}")
        }
        ErrorKind::UnknownArgument => format!("unexpected argument {arg:?}: {help} shows what the command takes"),
        ErrorKind::InvalidSubcommand => {
            let typed = first(ContextKind::InvalidSubcommand).unwrap_or_default();
            let near = get(ContextKind::SuggestedSubcommand).pop().map(|near| format!("did you mean {near}?"));
            let other = other_name(&typed).filter(|_| std::ptr::eq(command, root)).map(str::to_owned);
            let near = other.or(near).unwrap_or_else(|| format!("{help} lists the commands"));
            format!("unknown command {typed:?}: {near}")
        }
        ErrorKind::MissingSubcommand => format!("a command is missing: {help} lists the commands"),
        ErrorKind::InvalidValue if value.is_empty() => format!("{flag} needs a value: {arg}"),
        ErrorKind::InvalidValue => {
            format!("{flag} {value:?}: must be {}", list(&get(ContextKind::ValidValue), "or"))
        }
        ErrorKind::ValueValidation => {
            let rule = std::error::Error::source(error).map(rule).unwrap_or_else(|| format!("see {help}"));
            if rule.starts_with("must ") { format!("{flag} {value:?}: {rule}") } else { format!("{flag}: {rule}") }
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = list(&get(ContextKind::InvalidArg), "and");
            let usage = first(ContextKind::Usage).map(|usage| usage.replace("Usage: ", "").trim().to_owned());
            format!("missing {missing}: write `{}`", usage.as_deref().unwrap_or(&help).trim_matches('`'))
        }
        ErrorKind::ArgumentConflict => match get(ContextKind::PriorArg) {
            others if others.is_empty() || others == [arg.clone()] => format!("{flag} must be given only once"),
            others => {
                let others: Vec<String> = others.iter().map(|other| option(other)).collect();
                format!("{flag} cannot be used with {}: leave one of them out", list(&others, "and"))
            }
        },
        ErrorKind::TooManyValues => format!("unexpected value {value:?} of {flag}: {help} shows what the option takes"),
        ErrorKind::InvalidUtf8 => format!("an argument is not valid UTF-8: {help} shows what the command takes"),
        // The rest cannot happen with our options; clap's sentence is better than none.
        _ => {
            let text = error.to_string();
            let line = text.lines().next().unwrap_or_default();
            format!("{}: see {help}", line.trim_start_matches("error: "))
        }
    })
}

/// Whether the answer shall be JSON: the command line could not be parsed, but this flag may be in it. What follows
/// `--` belongs to the job.
pub(super) fn wants_json(args: &[OsString]) -> bool {
    args.iter().take_while(|arg| *arg != "--").any(|arg| arg == "--json")
}

/// What to write instead of a command that other programs have and rekindle does not.
fn other_name(typed: &str) -> Option<&'static str> {
    Some(match typed {
        "start" | "exec" | "launch" | "submit" => "`rekindle run --name JOB -- COMMAND` starts a job",
        "restart" | "reload" => {
            "`rekindle rewind JOB -1` restores a running job from its newest image, and the same `rekindle run` continues \
            one that has ended"
        }
        "kill" | "end" | "quit" | "terminate" | "abort" | "cancel" => "`rekindle stop JOB` stops a job",
        "delete" | "del" | "remove" | "destroy" | "purge" => {
            "`rekindle rm JOB` removes a job, and `rekindle prune JOB` images that no rule keeps"
        }
        "attach" | "log" | "tail" | "output" | "console" | "follow" => "`rekindle logs -f JOB` shows a job's output",
        "info" | "inspect" | "describe" | "details" => {
            "`rekindle show JOB` shows an image, and `rekindle status JOB` a job"
        }
        "jobs" => "`rekindle status` shows all jobs",
        "images" => "`rekindle list JOB` lists the images of a job",
        "checkpoint" | "save" | "dump" | "backup" => "`rekindle snapshot JOB` takes a snapshot",
        "pause" | "freeze" => "`rekindle suspend JOB` frees a job's memory and GPUs until `rekindle resume JOB`",
        "continue" | "unpause" | "thaw" => {
            "`rekindle resume JOB` continues a suspended job, and the same `rekindle run` one that has ended"
        }
        "undo" | "rollback" | "revert" | "back" => "`rekindle rewind JOB -2` goes back to the second newest image",
        "gc" | "clean" | "cleanup" | "forget" => "`rekindle prune` removes images that no rule keeps",
        "check" | "validate" | "fsck" => {
            "`rekindle doctor` checks this machine, `rekindle verify` the images, `rekindle config check` the configuration"
        }
        "unpin" => "`rekindle pin --remove IMAGE` removes a pin",
        "untag" => "`rekindle tag --remove IMAGE TAG` removes a tag",
        "unmark" => "`rekindle mark --good IMAGE` removes the bad mark of an image",
        "fix" => "`rekindle repair JOB` repairs damaged images",
        "init" | "setup" | "install" => "nothing needs to be set up: `rekindle doctor` checks this machine",
        "version" => "use `rekindle --version`",
        "monitor" | "watch" | "top" => "`rekindle status --watch` shows jobs live",
        "history" | "events" | "stats" => "`rekindle report JOB` shows where a job's time went",
        _ => return None,
    })
}

/// The option before a word that begins like `-5`, and the word: clap takes that for an option of its own, because
/// `-5` names an image elsewhere.
fn negative_value<'a>(command: &clap::Command, args: &'a [OsString], begin: &str) -> Option<(&'a str, &'a str)> {
    let words: Vec<&str> = args.iter().map_while(|arg| arg.to_str()).take_while(|arg| *arg != "--").collect();
    let takes_a_value = |flag: &str| {
        let is_it = |arg: &&clap::Arg| {
            let long = arg.get_long().is_some_and(|long| flag.strip_prefix("--") == Some(long));
            long || arg.get_short().is_some_and(|short| *flag == format!("-{short}"))
        };
        command.get_arguments().find(is_it).is_some_and(|arg| arg.get_action().takes_values())
    };
    let pairs = words.iter().zip(words.iter().skip(1));
    pairs.map(|(flag, value)| (*flag, *value)).find(|(flag, value)| value.starts_with(begin) && takes_a_value(flag))
}

/// The command that was typed, as far as its words are known, and its words.
fn typed_command<'a>(root: &'a clap::Command, args: &[OsString]) -> (&'a clap::Command, String) {
    let (mut command, mut text) = (root, "rekindle".to_owned());
    for word in args.iter().skip(1).take_while(|arg| *arg != "--").filter_map(|arg| arg.to_str()) {
        if let Some(found) = command.find_subcommand(word) {
            let _ = write!(text, " {}", found.get_name());
            command = found;
        }
    }
    (command, text)
}

/// An option without its value: `--name <NAME>` is `--name`.
fn option(text: &str) -> String {
    text.split([' ', '=']).next().unwrap_or(text).to_owned()
}

fn texts(value: &ContextValue) -> Vec<String> {
    match value {
        ContextValue::String(text) => vec![text.clone()],
        ContextValue::Strings(texts) => texts.clone(),
        ContextValue::StyledStr(text) => vec![text.to_string()],
        ContextValue::StyledStrs(texts) => texts.iter().map(ToString::to_string).collect(),
        ContextValue::Number(number) => vec![number.to_string()],
        _ => Vec::new(),
    }
}

/// "a", "a or b", "a, b or c".
fn list(words: &[String], last: &str) -> String {
    match words {
        [] => String::new(),
        [one] => one.clone(),
        [all @ .., end] => format!("{} {last} {end}", all.join(", ")),
    }
}

/// What a value must be, from the error of its parser. Our own parsers say it; those of the libraries speak to
/// programmers.
fn rule(source: &(dyn std::error::Error + 'static)) -> String {
    let text = source.to_string();
    if source.is::<std::num::ParseIntError>() {
        return "must be a whole number".to_owned();
    }
    if source.is::<humantime::DurationError>() {
        return "must be a duration with a unit, such as 90s or 10m".to_owned();
    }
    match text.split_once(" is not in ").map(|(_, range)| range.split_once("..").unwrap_or((range, ""))) {
        Some((least, "")) => format!("must be a whole number of at least {least}"),
        Some((least, most)) => format!("must be a whole number from {least} to {}", most.trim_start_matches('=')),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

    use super::super::Cli;
    use super::*;

    fn said(line: &str) -> String {
        let args: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let error = Cli::try_parse_from(&args).unwrap_err();
        words(&error, &Cli::command(), &args).unwrap()
    }

    #[test]
    fn a_mistake_is_one_sentence_with_the_fix() {
        for (line, expected) in [
            ("rekindle run --nmae x -- true", "unknown option --nmae: did you mean --name?"),
            ("rekindle run --zzz -- true", "unknown option --zzz: `rekindle run --help` lists the options"),
            ("rekindle show -2", "-2 needs a job: write JOB/-2 for an image of the job"),
            ("rekindle stauts", "unknown command \"stauts\": did you mean status?"),
            ("rekindle run --interval -5s -- true", "--interval \"-5s\": must not be negative"),
            ("rekindle run --deadline -1h -- true", "--deadline \"-1h\": must not be negative"),
            ("rekindle logs -n -5 train", "-n \"-5\": must not be negative"),
            ("rekindle prune --keep-within -2h", "--keep-within \"-2h\": must not be negative"),
            ("rekindle unpin train", "unknown command \"unpin\": `rekindle pin --remove IMAGE` removes a pin"),
            ("rekindle untag train a", "unknown command \"untag\": `rekindle tag --remove IMAGE TAG` removes a tag"),
            (
                "rekindle unmark train/1",
                "unknown command \"unmark\": `rekindle mark --good IMAGE` removes the bad mark of an image",
            ),
            ("rekindle kill train", "unknown command \"kill\": `rekindle stop JOB` stops a job"),
            ("rekindle version", "unknown command \"version\": use `rekindle --version`"),
            ("rekindle config version", "unknown command \"version\": `rekindle config --help` lists the commands"),
            ("rekindle frobnicate", "unknown command \"frobnicate\": `rekindle --help` lists the commands"),
            ("rekindle config chek", "unknown command \"chek\": did you mean check?"),
            ("rekindle doctor x", "unexpected argument \"x\": `rekindle doctor --help` shows what the command takes"),
            ("rekindle run --interval", "--interval needs a value: --interval <TIME>"),
            ("rekindle show", "missing <IMAGE>: write `rekindle show <IMAGE>`"),
            ("rekindle prune --keep-last 0", "--keep-last \"0\": must be a whole number from 1 to 4294967295"),
            ("rekindle prune --keep-daily x", "--keep-daily \"x\": must be a whole number"),
            ("rekindle status --every x", "--every \"x\": must be a duration with a unit, such as 90s or 10m"),
            (
                "rekindle verify --read-data --read-data-subset 5%",
                "--read-data cannot be used with --read-data-subset: leave one of them out",
            ),
        ] {
            assert_eq!(said(line), expected, "{line}");
        }
        assert!(said("rekindle completions foo").starts_with("<SHELL> \"foo\": must be bash, "), "a list of values");
    }

    #[test]
    fn options_of_the_job_are_its_own() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        for (line, expected) in [
            ("rekindle run python train.py --lr 1 --nmae x", "python train.py --lr 1 --nmae x"),
            ("rekindle run --name j -- -x --json", "-x --json"),
            ("rekindle run --name j srun -n 2 -- x --name y", "srun -n 2 -- x --name y"),
        ] {
            let super::super::Command::Run(args) = parse(line).unwrap().command else { panic!("{line}") };
            assert_eq!(args.command.join(std::ffi::OsStr::new(" ")), expected, "{line}");
        }
        let args = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        assert!(wants_json(&args("rekindle show --json")) && !wants_json(&args("rekindle run -- x --json")));
    }
}

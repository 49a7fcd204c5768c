//! Examples of each command, for `--help` and the manual pages. A test parses every line.

use std::fmt::Write;

use clap::Command;

/// A command line, and what it does.
pub(super) type Example = (&'static str, &'static str);

/// The words of a command after `rekindle`, and its examples.
const EXAMPLES: &[(&str, &[Example])] = &[
    (
        "",
        &[
            ("rekindle doctor", "Check whether this machine has what rekindle needs"),
            (
                "rekindle run --name train -- python train.py",
                "Start a job; the same command continues it after a crash",
            ),
            ("rekindle status", "Show what the jobs of this machine do"),
            ("rekindle logs -f train", "Follow the output of a job"),
        ],
    ),
    (
        "run",
        &[
            (
                "rekindle run --name train -- python train.py",
                "Start the job train, or continue it from its newest image",
            ),
            (
                "rekindle run --detach --name train --interval 5m -- torchrun train.py",
                "Run it in the background, with a snapshot every five minutes",
            ),
            (
                "rekindle run --deadline 8h --name train -- python train.py",
                "Take a final snapshot and stop before eight hours are over",
            ),
            (
                "rekindle run --fresh --name train -- python train.py",
                "Start from the beginning, although there are images",
            ),
        ],
    ),
    (
        "restore",
        &[
            ("rekindle restore train", "Continue from the newest good image"),
            ("rekindle restore train/-2", "Continue from the second newest image"),
            ("rekindle restore train --device-map 0=1", "Continue on GPU 1 instead of GPU 0"),
        ],
    ),
    (
        "status",
        &[
            ("rekindle status", "Show all jobs that are found"),
            ("rekindle status train --json", "Show one job, for a program"),
            ("rekindle status --watch", "Repeat until Ctrl-C"),
        ],
    ),
    (
        "snapshot",
        &[
            ("rekindle snapshot train", "Take a snapshot now; the job continues"),
            ("rekindle snapshot train --tag before-update", "Take one and name it; wait until it is stored"),
        ],
    ),
    ("suspend", &[("rekindle suspend train", "Free the job's GPUs and memory until `rekindle resume train`")]),
    ("resume", &[("rekindle resume train", "Continue the suspended job from its image")]),
    (
        "rewind",
        &[
            ("rekindle rewind train -2", "Continue from the second newest image"),
            ("rekindle rewind train before-update", "Continue from the image with this tag"),
        ],
    ),
    ("stop", &[("rekindle stop train", "Take a final snapshot and stop; the same `rekindle run` continues from it")]),
    (
        "logs",
        &[
            ("rekindle logs -n 100 train", "Print the last 100 lines"),
            ("rekindle logs -f train", "Follow the output, through restarts"),
        ],
    ),
    (
        "list",
        &[
            ("rekindle list", "List all jobs"),
            ("rekindle list train", "List the images of a job, and what removing each would free"),
            ("rekindle list train --replica", "The same, with the images of the replica"),
        ],
    ),
    (
        "show",
        &[
            ("rekindle show train", "Show the newest good image, and whether it can be restored here"),
            ("rekindle show train/best --json", "Show the image with this tag, for a program"),
        ],
    ),
    (
        "report",
        &[
            ("rekindle report train", "Write the page about the job's whole time"),
            ("rekindle report train --since 24h --out today.html", "Only the last day, into this file"),
        ],
    ),
    (
        "verify",
        &[
            ("rekindle verify", "Check the structure of all images"),
            ("rekindle verify train --read-data", "Read and compare every byte of a job's images"),
            ("rekindle verify --read-data-subset 10%", "Read a tenth of all packs, chosen at random"),
        ],
    ),
    (
        "repair",
        &[
            ("rekindle repair --dry-run train", "Show what is damaged and what a repair would do"),
            ("rekindle repair train", "Repair it"),
        ],
    ),
    (
        "prune",
        &[
            ("rekindle prune --dry-run", "Show which images would be removed, and why"),
            (
                "rekindle prune train --keep-last 2",
                "Keep only the two newest images of a job, and those that are pinned",
            ),
        ],
    ),
    (
        "rm",
        &[
            ("rekindle rm train", "Remove a job that does not run; asks first"),
            ("rekindle rm --yes train test", "Remove two jobs without a question, as in a script"),
        ],
    ),
    (
        "pin",
        &[
            ("rekindle pin train", "Keep the newest good image, whatever the rules say"),
            ("rekindle pin train/best", "Keep the image with this tag"),
            ("rekindle pin --remove train/best", "Let the rules remove the image again"),
        ],
    ),
    (
        "tag",
        &[
            ("rekindle tag train best", "Name the newest good image train/best"),
            ("rekindle tag train/42 epoch-7 lowest-loss", "Give two names to image 42"),
            ("rekindle tag --remove train/42 epoch-7", "Remove one of the names"),
        ],
    ),
    ("mark", &[("rekindle mark --good train/42", "Let restarts use image 42 again")]),
    (
        "doctor",
        &[
            ("rekindle doctor", "Check this machine with its configuration"),
            ("rekindle doctor --store /data/rekindle --json", "Check it for another store; print JSON"),
        ],
    ),
    ("config", &[("rekindle config show", "Print every key with its value and its source")]),
    ("config show", &[("rekindle config show", "Print every key with its value and its source")]),
    (
        "config check",
        &[
            ("rekindle config check", "Check the files that `run` would read"),
            ("rekindle config check rekindle.toml", "Check this file"),
        ],
    ),
    (
        "cuda",
        &[
            ("rekindle cuda state --pid 1234", "Print the state of a CUDA process"),
            ("rekindle cuda toggle --pid 1234", "Checkpoint the process; once more restores it"),
        ],
    ),
    ("cuda state", &[("rekindle cuda state --pid 1234", "Print the state of process 1234")]),
    (
        "cuda lock",
        &[
            ("rekindle cuda lock --pid 1234", "Block the CUDA calls of process 1234"),
            ("rekindle cuda lock --pid 1234 --timeout 60000", "Wait up to a minute for its GPU work to end"),
        ],
    ),
    (
        "cuda checkpoint",
        &[("rekindle cuda checkpoint --pid 1234", "Copy the GPU memory of the locked process to the host")],
    ),
    (
        "cuda restore",
        &[(
            "rekindle cuda restore --pid 1234",
            "Copy it back; then `rekindle cuda unlock --pid 1234` lets it continue",
        )],
    ),
    ("cuda unlock", &[("rekindle cuda unlock --pid 1234", "Let the locked process continue")]),
    (
        "cuda toggle",
        &[
            ("rekindle cuda toggle --pid 1234", "Lock and checkpoint a running process, or restore and unlock it"),
            ("rekindle cuda toggle --pid 1234 --json", "The same; print each step and its milliseconds as JSON"),
        ],
    ),
    ("cuda restore-tid", &[("rekindle cuda restore-tid --pid 1234", "Print the id of the thread")]),
    (
        "completions",
        &[(
            "rekindle completions bash",
            "Print the script for bash. `source <(rekindle completions bash)` in ~/.bashrc enables it",
        )],
    ),
];

/// The examples of a command, by the words after `rekindle`.
pub(super) fn of(words: &str) -> &'static [Example] {
    EXAMPLES.iter().find(|(command, _)| *command == words).map_or(&[], |(_, examples)| examples)
}

/// Adds them to the long help of all commands.
pub(super) fn add(command: Command) -> Command {
    add_below(command, "")
}

fn add_below(command: Command, words: &str) -> Command {
    let command = command.mut_subcommands(|part| {
        let name = format!("{words} {}", part.get_name());
        add_below(part, name.trim_start())
    });
    let mut text = String::new();
    for (line, what) in of(words) {
        // Writing to a String does not fail.
        let _ = write!(text, "\n  {line}\n      {what}");
    }
    if text.is_empty() { command } else { command.after_long_help(format!("Examples:{text}")) }
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, command};
    use super::*;
    use clap::{CommandFactory, Parser};

    #[test]
    fn every_example_is_a_command_line_of_its_command() {
        for (command, examples) in EXAMPLES {
            for (line, what) in *examples {
                let words: Vec<&str> = line.split(' ').collect();
                Cli::try_parse_from(&words).unwrap_or_else(|error| panic!("{line}: {error}"));
                assert!(line.starts_with(&format!("rekindle {command}")), "{line}");
                assert!(!what.ends_with('.') && what.chars().next().is_some_and(char::is_uppercase), "{what}");
            }
        }
    }

    /// The words of all commands that are shown, at any depth.
    fn shown(command: &Command, words: &str, all: &mut Vec<String>) {
        for part in command.get_subcommands().filter(|part| !part.is_hide_set()) {
            let words = format!("{words} {}", part.get_name()).trim_start().to_owned();
            shown(part, &words, all);
            all.push(words);
        }
    }

    #[test]
    fn every_command_that_is_shown_has_examples() {
        let (commands, mut helping) = (Cli::command(), command());
        let mut all = Vec::new();
        shown(&commands, "", &mut all);
        assert!(all.iter().any(|words| words == "cuda restore-tid"), "{all:?}");
        for words in &all {
            assert!(!of(words).is_empty(), "{words}");
            let part = words.split(' ').fold(&mut helping, |part, word| part.find_subcommand_mut(word).unwrap());
            let help = part.render_long_help().to_string();
            assert!(help.contains(&format!("Examples:\n  rekindle {words}")), "{help}");
        }
        let known = |words: &str| {
            let mut words = words.split(' ').filter(|word| !word.is_empty());
            words.try_fold(&commands, |command, word| command.find_subcommand(word)).is_some()
        };
        assert!(EXAMPLES.iter().all(|(command, _)| known(command)));
    }
}

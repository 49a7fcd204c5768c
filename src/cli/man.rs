//! `rekindle man DIR`, for packagers: a page for each command, and rekindle.toml(5) made from the commented file of the
//! defaults, which a test compares with the built-in ones.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};
use clap::Command;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use super::examples;
use super::exit::Exit;

const DEFAULTS: &str = include_str!("../../config/rekindle.toml");

/// A page cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}")]
pub(crate) struct Error {
    path: PathBuf,
    #[source]
    source: io::Error,
}

/// Writes all pages into a folder, which is created if needed.
pub(super) fn write(command: Command, folder: &Path) -> Result<(), Error> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| Error { path, source }
    };
    fs::create_dir_all(folder).map_err(failed(folder))?;
    // clap_mangen would put the examples into a section EXTRA.
    let mut command = without_examples(command).disable_help_subcommand(true);
    command.build();
    let mut pages = vec![("rekindle.toml.5".to_string(), configuration(DEFAULTS).render())];
    add(&command, "", &mut pages);
    for (name, text) in pages {
        let path = folder.join(name);
        fs::write(&path, text).map_err(failed(&path))?;
    }
    Ok(())
}

fn without_examples(command: Command) -> Command {
    command.after_long_help(None).mut_subcommands(without_examples)
}

/// `words` are those of the command after `rekindle`.
fn add(command: &Command, words: &str, pages: &mut Vec<(String, String)>) {
    for part in command.get_subcommands().filter(|part| !part.is_hide_set()) {
        add(part, format!("{words} {}", part.get_name()).trim_start(), pages);
    }
    let man = Man::new(command.clone()).date(date()).source(source()).manual("User Commands");
    let mut text = Vec::new();
    // Writing to a Vec does not fail.
    let _ = man.render(&mut text);
    let mut text = String::from_utf8_lossy(&text).into_owned();
    let examples = examples::of(words);
    if !examples.is_empty() {
        let mut roff = Roff::new();
        roff.control("SH", ["EXAMPLES"]);
        terms(&mut roff, examples);
        text += &roff.to_roff();
    }
    if command.get_name() == "rekindle" {
        text += &more().to_roff();
    }
    pages.push((man.get_filename(), text));
}

fn source() -> String {
    format!("rekindle {}", env!("CARGO_PKG_VERSION"))
}

/// The date of the source if a package is made from it (SOURCE_DATE_EPOCH), so that the same source gives the same
/// page.
fn date() -> String {
    let epoch =
        std::env::var("SOURCE_DATE_EPOCH").ok().and_then(|text| DateTime::from_timestamp(text.parse().ok()?, 0));
    epoch.unwrap_or_else(Utc::now).format("%Y-%m-%d").to_string()
}

/// The sections that belong to no single command.
fn more() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SIGNALS"]);
    let signals = [
        ("SIGUSR1", "To rekindle run: take a snapshot now."),
        (
            "SIGUSR2",
            "Take a final snapshot, stop, and exit with 75 (or the code that the scheduler expects), to be \
            queued again.",
        ),
        (
            "SIGTERM, SIGINT, SIGHUP",
            "Take a final snapshot within snapshot.grace and stop. A second SIGTERM or SIGINT, 2 s or more later, ends the \
            job at once and does not wait until the image is stored.",
        ),
        ("SIGQUIT, SIGCONT, SIGWINCH", "Forwarded to the job. During a snapshot they wait for its end."),
    ];
    terms(&mut roff, &signals);
    roff.control("SH", ["EXIT STATUS"]);
    let code = |exit: Exit| exit.code().to_string();
    let codes = [
        (code(Exit::Success), "The job completed."),
        ("that of the job".into(), "The job ended with this code and was given up."),
        ("128 + n".into(), "The job was ended by signal n, or rekindle was stopped by it."),
        (
            code(Exit::Unsound),
            "verify, repair, cuda: something is wrong. snapshot, suspend and others: tried and failed.",
        ),
        (
            code(Exit::Usage),
            "Wrong usage, a wrong value of an option, unknown job or image, or not possible in the job's current state.",
        ),
        (
            code(Exit::NoUsableImage),
            "There are images and none can be used. The job was not started from the beginning (restart.cold-start).",
        ),
        (
            code(Exit::Missing),
            "Something is missing: CRIU, rights, driver (rekindle doctor shows how to fix it), or the image does not \
            fit this machine, or another supervisor has the job.",
        ),
        (
            code(Exit::Requeue),
            "Stopped by SIGUSR2, to be queued again (some schedulers expect another code); the same command continues \
            from the newest image.",
        ),
        (code(Exit::OnlyInMemory), "Stopped. The last image could not be stored: it is only in memory."),
        (
            code(Exit::Config),
            "The configuration or a variable is wrong, root may not read a configuration file, the store cannot be \
            trusted, or the image belongs to another user than job.user.",
        ),
        (code(Exit::Internal), "rekindle itself failed."),
        (code(Exit::NotExecutable), "The command cannot be executed."),
        (code(Exit::NotFound), "The command was not found."),
    ];
    terms(&mut roff, &codes.each_ref().map(|(code, text)| (code.as_str(), *text)));
    roff.control("SH", ["ENVIRONMENT"]);
    let variables = [
        ("REKINDLE_SECTION_KEY", "Sets a key of the configuration, such as REKINDLE_STORE_KEEP_LAST=5."),
        ("REKINDLE_CRIU", "The criu program, if criu.path is not set."),
        ("NO_COLOR", "Print without colours."),
        ("NOTIFY_SOCKET, WATCHDOG_USEC", "Set by the service manager, see sd_notify(3). The job does not get them."),
    ];
    terms(&mut roff, &variables);
    roff.control("SH", ["FILES"]);
    let files = [
        ("/etc/rekindle/rekindle.toml", "The configuration, see rekindle.toml(5)."),
        ("/var/lib/rekindle", "The images of all jobs (store.directory)."),
        ("/run/rekindle", "Images in memory, and rekindle's own files of each run (snapshot.staging-directory)."),
    ];
    terms(&mut roff, &files);
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("rekindle.toml"), roman("(5), "), bold("criu"), roman("(8)")]);
    roff
}

fn terms(roff: &mut Roff, terms: &[(&str, &str)]) {
    for (term, text) in terms {
        roff.control("TP", []);
        roff.text([bold(*term)]);
        roff.text([roman(*text)]);
    }
}

/// The page of the configuration, made from its commented file: a comment belongs to the key or section after it.
fn configuration(sample: &str) -> Roff {
    let mut roff = Roff::new();
    let (date, source) = (date(), source());
    roff.control("TH", ["rekindle.toml", "5", &date, &source, "File Formats"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("rekindle.toml - configuration of rekindle")]);
    roff.control("SH", ["DESCRIPTION"]);
    let mut comment: Vec<&str> = Vec::new();
    for line in sample.lines() {
        if let Some(text) = line.strip_prefix("# ") {
            comment.push(text);
        } else if line.starts_with('[') {
            roff.control("SH", [line]);
            paragraphs(&mut roff, "PP", &comment);
            comment.clear();
        } else if let Some((key, value)) = line.split_once(" = ") {
            roff.control("TP", []);
            // A # that is not followed by a space marks a key without a default.
            match key.strip_prefix('#') {
                Some(key) => roff.text([bold(key), roman(" (unset; such as "), italic(value), roman(")")]),
                None => roff.text([bold(key), roman(" = "), italic(value)]),
            };
            paragraphs(&mut roff, "IP", &comment);
            comment.clear();
        } else if line == "#" {
            comment.push("");
        } else {
            paragraphs(&mut roff, "PP", &comment);
            comment.clear();
            if !line.is_empty() {
                example(&mut roff, &[line.trim_start_matches('#')]);
            }
        }
    }
    paragraphs(&mut roff, "PP", &comment);
    roff.control("SH", ["SEE ALSO"]);
    roff.text([bold("rekindle"), roman("(1)")]);
    roff
}

/// Text is filled; indented lines stay unchanged, and an empty line begins a paragraph.
fn paragraphs(roff: &mut Roff, begin: &str, lines: &[&str]) {
    for part in lines.chunk_by(|a, b| a.starts_with("  ") == b.starts_with("  ") && !b.is_empty()) {
        match part.first() {
            Some(first) if first.starts_with("  ") => example(roff, part),
            // The next lines make a paragraph of their own.
            Some(&"") if part.len() == 1 => {}
            Some(&"") => {
                roff.control(begin, []);
                roff.text(part.iter().skip(1).map(|line| roman(format!("{line}\n"))).collect::<Vec<_>>());
            }
            _ => drop(roff.text([roman(part.join("\n"))])),
        }
    }
}

fn example(roff: &mut Roff, lines: &[&str]) {
    roff.control("PP", []).control("EX", []);
    for line in lines {
        roff.text([roman(line.trim_start())]);
    }
    roff.control("EE", []);
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn pages() -> Vec<(String, String)> {
        let folder = tempfile::tempdir().unwrap();
        write(super::super::command(), &folder.path().join("new")).unwrap();
        let entries = fs::read_dir(folder.path().join("new")).unwrap().map(Result::unwrap);
        let read =
            |entry: fs::DirEntry| (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).unwrap());
        entries.map(read).collect()
    }

    #[test]
    fn there_is_a_page_for_every_command_that_is_shown() {
        let pages = pages();
        let has = |name: &str| pages.iter().any(|(page, _)| page == name);
        for command in super::super::Cli::command().get_subcommands() {
            assert_eq!(has(&format!("rekindle-{}.1", command.get_name())), !command.is_hide_set());
        }
        assert!(has("rekindle.1") && has("rekindle-cuda-lock.1") && !has("rekindle-man.1"));
    }

    #[test]
    fn a_page_has_the_examples_of_its_command() {
        let pages = pages();
        let text = |name: &str| pages.iter().find(|(page, _)| page == name).map(|(_, text)| text.as_str()).unwrap();
        assert!(text("rekindle-rewind.1").contains(".SH EXAMPLES\n.TP\n\\fBrekindle rewind train \\-2\\fR"));
        assert!(text("rekindle-config-check.1").contains("rekindle config check rekindle.toml"));
        for (name, page) in &pages {
            assert!(!page.contains(".SH EXTRA"), "{name}");
            assert_eq!(page.matches(".SH EXAMPLES\n").count(), usize::from(!name.ends_with(".5")), "{name}");
        }
    }

    #[test]
    fn the_page_of_the_configuration_has_every_key_with_its_comment() {
        let page = configuration(DEFAULTS).render();
        let keys = DEFAULTS.lines().filter_map(|line| line.split_once(" = ").map(|(key, _)| key));
        for key in keys.filter(|key| !key.starts_with("# ")) {
            let name = key.trim_start_matches('#').replace('-', r"\-");
            assert!(page.contains(&format!(".TP\n\\fB{name}\\fR")), "{name}");
        }
        assert!(page.contains(".SH [snapshot]\n") && page.contains("1 is the only version"));
        let comments = DEFAULTS.lines().filter(|line| line.starts_with("# "));
        let words: usize = comments.map(|line| line[2..].split_whitespace().count()).sum();
        assert!(page.split_whitespace().count() > words, "something was left out");
    }
}

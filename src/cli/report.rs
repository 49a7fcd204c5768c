//! `rekindle report`: a page about how a job's time was spent.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use chrono::{DateTime, Local, NaiveDate, NaiveDateTime, NaiveTime, Utc};
use nix::unistd::Uid;

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, Misuse, complete};
use crate::report;
use rekindle_os::durable;
use rekindle_os::regular::{self, Found, Links};

/// What to report.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    /// The job
    #[arg(add = complete::jobs())]
    job: String,
    /// Write the page to this file, - for standard output; by default JOB.html
    #[arg(long, value_name = "FILE|-")]
    out: Option<PathBuf>,
    /// Replace the file even if it is not a report
    #[arg(long)]
    force: bool,
    /// Leave out what happened before: "2026-11-21", "2026-11-21 08:00", RFC 3339, or how long ago: "24h"
    #[arg(long, value_name = "TIME", value_parser = moment)]
    since: Option<DateTime<Utc>>,
}

pub(super) fn report(global: &Global, args: &ReportArgs) -> anyhow::Result<Exit> {
    let folder = Finder::new(global)?.job(&args.job)?;
    let report = report::of(&folder, args.since)?;
    match (global.format(), args.out.as_deref()) {
        (Format::Json, None) => print_json(&report)?,
        (Format::Json, Some(path)) if path == Path::new("-") => print_json(&report)?,
        (Format::Json, Some(path)) => {
            write(path, Chosen::ByUser, &(serde_json::to_string_pretty(&report)? + "\n"), args.force)?;
        }
        (Format::Text, Some(path)) if path == Path::new("-") => print_text(&report::html::page(&report))?,
        (Format::Text, path) => {
            let chosen = if path.is_some() { Chosen::ByUser } else { Chosen::ByRekindle };
            let path = path.map_or_else(|| PathBuf::from(format!("{}.html", folder.name())), Path::to_owned);
            write(&path, chosen, &report::html::page(&report), args.force)?;
            print_text(&path.display().to_string())?;
        }
    }
    Ok(Exit::Success)
}

/// Who has chosen the name of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Chosen {
    /// It is the value of --out.
    ByUser,
    /// It is the name of the job, in the working directory.
    ByRekindle,
}

/// An existing file is replaced atomically, so that a web server never serves half of it. The folder may belong to
/// another user, who can put a link or a FIFO there at any moment: the new file takes the place of its name, and no link
/// is followed to a file.
fn write(path: &Path, chosen: Chosen, text: &str, force: bool) -> anyhow::Result<()> {
    let shown = path.display();
    let failed = |error| not_written(path, error);
    let found = match regular::find(path, Links::Refuse) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        found => Some(found.map_err(failed)?),
    };
    let kind = found.as_ref().map(Found::metadata).transpose().map_err(failed)?.map(|it| it.file_type());
    match (kind, chosen) {
        (Some(kind), _) if kind.is_dir() => {
            return Err(Misuse(format!("{shown} is a folder: give a file name")).into());
        }
        (Some(kind), _) if kind.is_file() && !force && !found.as_ref().is_some_and(is_report) => {
            return Err(Misuse(format!(
                "{shown} exists and is not a report of rekindle: give another file with --out, or --force to replace it"
            ))
            .into());
        }
        (Some(kind), Chosen::ByRekindle) if !kind.is_file() => {
            return Err(Misuse(format!("{shown} exists and is not a file: give another file with --out")).into());
        }
        (Some(kind), Chosen::ByUser) if !kind.is_file() => return write_through(path, text),
        _ => {}
    }
    durable::replace_file(path, text.as_bytes(), 0o644).map_err(failed)
}

/// Writes to a pipe or a terminal: one at this path, or one to which a link leads that is root's or ours, such as
/// /dev/stdout.
fn write_through(path: &Path, text: &str) -> anyhow::Result<()> {
    let failed = |error| not_written(path, error);
    let here = fs::symlink_metadata(path).map_err(failed)?;
    let there = regular::find(path, Links::Follow).map_err(failed)?;
    let kind = there.metadata().map_err(failed)?.file_type();
    let why = match () {
        () if here.is_symlink() && ![0, Uid::effective().as_raw()].contains(&here.uid()) => "is a link of another user",
        () if kind.is_dir() => "leads to a folder",
        // A new file in the place of the link could be in the place of /dev/stdout.
        () if kind.is_file() => "is a link: name the file that it leads to",
        () if !kind.is_fifo() && !kind.is_char_device() => "is neither a file, a pipe nor a terminal",
        () => {
            // What was found is opened, whatever is at the path by now.
            let there = OwnedFd::from(there);
            let own = format!("/proc/self/fd/{}", there.as_raw_fd());
            let written = File::options().write(true).open(own).and_then(|mut file| file.write_all(text.as_bytes()));
            return written.map_err(failed);
        }
    };
    Err(Misuse(format!("{} {why}; give another file with --out, or - for standard output", path.display())).into())
}

/// Why it was not written.
fn not_written(path: &Path, error: io::Error) -> anyhow::Error {
    match error.kind() {
        // The file was named by the user, or is in the user's folder.
        io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => {
            Misuse(format!("cannot write {}: {error}; name another file with --out", path.display())).into()
        }
        _ => anyhow::Error::from(error).context(format!("cannot write {}", path.display())),
    }
}

/// Whether a file may be replaced: it is a report, as a page or as JSON, or it is empty.
fn is_report(found: &Found) -> bool {
    let mut head = Vec::new();
    let read = found.read().and_then(|file| file.take(4096).read_to_end(&mut head));
    read.is_ok() && (head.is_empty() || report::html::is_page(&head) || head.starts_with(JSON_BEGIN))
}

/// How the JSON of a report begins: its version, and then the job.
const JSON_BEGIN: &[u8] = b"{\n  \"version\": 1,\n  \"job\": ";

/// Parses a time as people write it, in local time.
fn moment(text: &str) -> Result<DateTime<Utc>, String> {
    let ago = |ago: Duration| Utc::now().checked_sub_signed(chrono::TimeDelta::from_std(ago).ok()?);
    let local = |time: NaiveDateTime| Some(time.and_local_timezone(Local).earliest()?.to_utc());
    let with = |format| NaiveDateTime::parse_from_str(text, format).ok();
    let date = || Some(text.parse::<NaiveDate>().ok()?.and_time(NaiveTime::MIN));
    let naive = ["%Y-%m-%d %H:%M", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S"].into_iter().find_map(with).or_else(date);
    let parsed = humantime::parse_duration(text).ok().and_then(ago);
    let parsed = parsed.or_else(|| DateTime::parse_from_rfc3339(text).ok().map(|time| time.to_utc()));
    match parsed.or_else(|| naive.and_then(local)) {
        Some(moment) if moment > Utc::now() => Err("must not be in the future".to_owned()),
        Some(moment) => Ok(moment),
        None => Err("must be a date (2026-11-21), a time (\"2026-11-21 08:00\", 2026-11-21T08:00:00Z) or how long \
            ago (24h)"
            .to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{lchown, symlink};

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn only_reports_are_replaced_without_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j.html");
        let report = report::model::Report::new(&[], report::model::Facts::default(), Utc::now());
        let page = report::html::page(&report);
        let json = serde_json::to_string_pretty(&report).unwrap();
        for text in [&page, &page, &json, &page] {
            write(&path, Chosen::ByUser, text, false).unwrap();
            assert_eq!(&fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, "my page").unwrap();
        let error = write(&path, Chosen::ByUser, &page, false).unwrap_err().to_string();
        assert!(error.contains("is not a report") && error.contains("--force"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "my page");
        write(&path, Chosen::ByUser, &page, true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), page);
    }

    /// What alice may put in the place of the page before root writes it to her folder.
    #[test]
    fn nothing_is_written_through_what_another_user_has_put_there() {
        let dir = tempfile::tempdir().unwrap();
        let (path, secret, gone) = (dir.path().join("j.html"), dir.path().join("shadow"), dir.path().join("gone"));
        let page = report::html::page(&report::model::Report::new(&[], report::model::Facts::default(), Utc::now()));
        // Also one that may be replaced at its own name.
        fs::write(&secret, &page).unwrap();
        let plant = |target: &Path| {
            let _ = fs::remove_file(&path);
            symlink(target, &path).unwrap();
        };
        for (chosen, force) in [(Chosen::ByRekindle, false), (Chosen::ByRekindle, true), (Chosen::ByUser, true)] {
            for target in [&secret, &gone] {
                plant(target);
                assert!(write(&path, chosen, "new", force).unwrap_err().is::<Misuse>(), "{chosen:?}");
                assert_eq!(fs::read_to_string(&secret).unwrap(), page);
                assert!(!gone.exists() && fs::read_link(&path).unwrap() == *target);
            }
        }
        fs::remove_file(&path).unwrap();
        mkfifo(&path, Mode::from_bits_truncate(0o600)).unwrap();
        // It would wait for a reader.
        let error = write(&path, Chosen::ByRekindle, "new", true).unwrap_err().to_string();
        assert!(error.contains("not a file") && error.contains("--out"), "{error}");
        let fifo = path.clone();
        let reader = std::thread::spawn(move || fs::read_to_string(fifo).unwrap());
        write(&path, Chosen::ByUser, "to a reader", false).unwrap();
        assert_eq!(reader.join().unwrap(), "to a reader");
        // As /dev/stdout, which is root's link to a pipe or a terminal.
        plant(Path::new("/dev/null"));
        write(&path, Chosen::ByUser, "new", false).unwrap();
        if rekindle_testing::root() {
            lchown(&path, Some(65534), Some(65534)).unwrap();
            let error = write(&path, Chosen::ByUser, "new", true).unwrap_err().to_string();
            assert!(error.contains("link of another user"), "{error}");
        }
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!(moment("2026-11-21T08:00:00Z").unwrap().to_rfc3339(), "2026-11-21T08:00:00+00:00");
        let day = moment("2026-11-21").unwrap();
        assert_eq!(moment("2026-11-21 08:30").unwrap() - day, chrono::TimeDelta::minutes(510));
        assert!((Utc::now() - moment("2h").unwrap()).num_minutes().abs_diff(120) <= 1);
        for wrong in
            ["", "yesterday", "2026-13-01", "300000years", "99999999999999y", "2999-01-01", "2999-01-01T00:00:00Z"]
        {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}

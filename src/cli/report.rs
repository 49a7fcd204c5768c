//! `rekindle report`: a page about how a job's time was spent.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use chrono::{DateTime, Local, NaiveDate, NaiveDateTime, NaiveTime, Utc};

use super::find::Finder;
use super::output::{Format, print_json, print_text};
use super::{Exit, Global, Misuse, complete};
use crate::report;
use rekindle_os::durable;
use rekindle_os::regular::{self, Links};

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
        (Format::Json, Some(path)) => write(path, &(serde_json::to_string_pretty(&report)? + "\n"), args.force)?,
        (Format::Text, Some(path)) if path == Path::new("-") => print_text(&report::html::page(&report))?,
        (Format::Text, path) => {
            let path = path.map_or_else(|| PathBuf::from(format!("{}.html", folder.name())), Path::to_owned);
            write(&path, &report::html::page(&report), args.force)?;
            print_text(&path.display().to_string())?;
        }
    }
    Ok(Exit::Success)
}

/// An existing file is replaced atomically, so that a web server never serves half of it. A pipe, a device, or a link
/// to one is written to.
fn write(path: &Path, text: &str, force: bool) -> anyhow::Result<()> {
    let written = match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(Misuse(format!("{} is a folder: give a file name", path.display())).into());
        }
        Ok(metadata) if metadata.is_file() && !force && !is_report(path) => {
            let path = path.display();
            return Err(Misuse(format!(
                "{path} exists and is not a report of rekindle: give another file with --out, or --force to replace it"
            ))
            .into());
        }
        Ok(metadata) if !metadata.is_file() => fs::write(path, text),
        _ => durable::replace_file(path, text.as_bytes(), 0o644),
    };
    match written {
        // The file was named by the user, or is in the user's folder.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            let text = format!("cannot write {}: {error}; name another file with --out", path.display());
            Err(Misuse(text).into())
        }
        written => written.with_context(|| format!("cannot write {}", path.display())),
    }
}

/// Whether a file may be replaced: it is a report, as a page or as JSON, or it is empty.
fn is_report(path: &Path) -> bool {
    let mut head = Vec::new();
    // It may be in a folder of another user, who can put a device there.
    let opened = regular::find(path, Links::Follow).and_then(|found| found.read());
    let read = opened.and_then(|file| file.take(4096).read_to_end(&mut head));
    read.is_ok() && (head.is_empty() || report::html::is_page(&head) || head.starts_with(JSON_BEGIN))
}

/// How the JSON of a report begins: its version, and then the job.
const JSON_BEGIN: &[u8] = b"{\n  \"version\": 1,\n  \"job\": ";

/// Parses a time as people write it, in local time.
fn moment(text: &str) -> Result<DateTime<Utc>, String> {
    let ago = |ago: Duration| Some(Utc::now() - chrono::TimeDelta::from_std(ago).ok()?);
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
    use super::*;

    #[test]
    fn only_reports_are_replaced_without_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("j.html");
        let report = report::model::Report::new(&[], report::model::Facts::default(), Utc::now());
        let page = report::html::page(&report);
        let json = serde_json::to_string_pretty(&report).unwrap();
        for text in [&page, &page, &json, &page] {
            write(&path, text, false).unwrap();
            assert_eq!(&fs::read_to_string(&path).unwrap(), text);
        }
        fs::write(&path, "my page").unwrap();
        let error = write(&path, &page, false).unwrap_err().to_string();
        assert!(error.contains("is not a report") && error.contains("--force"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), "my page");
        write(&path, &page, true).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), page);
    }

    #[test]
    fn times_are_read_as_people_write_them() {
        assert_eq!(moment("2026-11-21T08:00:00Z").unwrap().to_rfc3339(), "2026-11-21T08:00:00+00:00");
        let day = moment("2026-11-21").unwrap();
        assert_eq!(moment("2026-11-21 08:30").unwrap() - day, chrono::TimeDelta::minutes(510));
        assert!((Utc::now() - moment("2h").unwrap()).num_minutes().abs_diff(120) <= 1);
        for wrong in ["", "yesterday", "2026-13-01", "99999999999999y", "2999-01-01", "2999-01-01T00:00:00Z"] {
            assert!(moment(wrong).is_err(), "{wrong}");
        }
    }
}

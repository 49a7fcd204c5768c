//! `rekindle status`: the state of jobs, from their supervisors, or how their last run ended.

use std::io::{self, IsTerminal, Write, stdout};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::Duration;

use chrono::{DateTime, Local, TimeDelta, Utc};
use serde::{Serialize, Serializer};
use serde_json::Value;

use super::find::{self, Finder, PATIENCE, Refused};
use super::list::NOT_REHEARSED;
use super::output::{Column, Format, complain, is_unread, print_json, print_note, print_table, print_text, time};
use super::{Exit, Global, complete, ended, group};
use crate::control::client;
use crate::control::protocol::{Answer, Request};
use crate::published::{Group, Published, ShownState};
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_store::staging::leftovers::Leftover;
use rekindle_store::{Evidence, JobFolder, JobName, JobRecord, Outcome};

/// Which job's status, and how often.
#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// The job; by default all jobs
    #[arg(add = complete::jobs())]
    job: Option<String>,
    /// Refresh until interrupted
    #[arg(long, short)]
    watch: bool,
    /// Interval of --watch
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = pause, requires = "watch")]
    every: Duration,
}

/// Reading all jobs takes some milliseconds each.
const SHORTEST: Duration = Duration::from_millis(100);

fn pause(text: &str) -> Result<Duration, String> {
    match humantime::parse_duration(text) {
        Ok(time) if time >= SHORTEST => Ok(time),
        Ok(_) => Err(format!("must be at least {}", humantime::format_duration(SHORTEST))),
        Err(_) => Err("must be a duration with a unit, such as 90s or 10m".to_owned()),
    }
}

const COLUMNS: [Column; 10] = [
    Column::whole("JOB"),
    Column::short("STATE"),
    Column::optional("PID", 6),
    Column::short("GPU"),
    Column::optional("UPTIME", 5),
    Column::optional("RESTARTS", 4),
    Column::optional("LAST", 1),
    Column::optional("FREEZE", 7),
    Column::optional("SIZE", 8),
    Column::optional("NEXT", 2),
];

/// A job.
#[derive(Debug, Serialize)]
struct Row {
    job: JobName,
    /// The store that it is in.
    store: PathBuf,
    /// The state of its supervisor, or how its last run ended: interrupted, completed, failed, stopped, new.
    state: ShownState,
    /// The source of the state: supervisor, state-file (its supervisor does not answer), record (it has none).
    source: &'static str,
    /// Why it was given up.
    why: Option<String>,
    /// How long this supervisor has been running, in seconds.
    uptime_s: Option<i64>,
    /// Time since the last snapshot, in seconds.
    last_age_s: Option<i64>,
    /// What has shown that the last image can be restored: taken (nothing yet), refused, rehearsed or restored.
    last_evidence: Option<Evidence>,
    /// Time since the newest committed group image, in seconds.
    group_image_age_s: Option<i64>,
    /// The published state.
    #[serde(flatten, serialize_with = "or_nothing")]
    published: Option<Shown>,
    command: Vec<String>,
    /// Memory that a dead supervisor left.
    left_in_memory: Option<Leftover>,
}

/// The published state without what the row has itself.
#[derive(Debug, Serialize)]
struct Shown {
    #[serde(flatten)]
    all: serde_json::Map<String, Value>,
    #[serde(skip)]
    typed: Published,
}

/// The keys are the same for all jobs: null for one that no supervisor has published yet.
fn or_nothing<S: Serializer>(shown: &Option<Shown>, to: S) -> Result<S::Ok, S::Error> {
    match shown {
        Some(shown) => shown.serialize(to),
        None => Shown::nothing().serialize(to),
    }
}

impl Shown {
    /// All keys, and no restart.
    fn nothing() -> serde_json::Map<String, Value> {
        let text = r#"{"version": 0, "state": "done", "since": "1970-01-01T00:00:00Z", "begun": "1970-01-01T00:00:00Z",
            "supervisor": 0, "lineage": "", "restarts": 0}"#;
        let mut all = serde_json::from_str(text).map(|typed| Shown::new(typed).all).unwrap_or_default();
        let empty = |value: &mut Value| *value = if value.is_array() { Value::Array(Vec::new()) } else { Value::Null };
        all.iter_mut().filter(|(key, _)| *key != "restarts").for_each(|(_, value)| empty(value));
        all
    }

    fn new(typed: Published) -> Shown {
        let mut all = match serde_json::to_value(&typed) {
            Ok(Value::Object(all)) => all,
            _ => serde_json::Map::new(),
        };
        ["version", "job", "store", "state"].iter().for_each(|key| drop(all.remove(*key)));
        Shown { all, typed }
    }
}

pub(super) fn status(global: &Global, args: &StatusArgs) -> anyhow::Result<Exit> {
    let finder = Finder::new(global)?;
    if !args.watch {
        let refused = look(&finder, args, global.format())?;
        return Refused::end(refused).map(|()| Exit::Success);
    }
    let is_drawn = global.format() == Format::Text && stdout().is_terminal();
    let mut is_first = true;
    loop {
        if is_drawn {
            // Moves the cursor to the top left and clears the screen (ECMA-48 CUP, ED): ED 2 would fill what the terminal keeps.
            let mut out = stdout().lock();
            let _ = out.write_all(b"\x1b[H\x1b[J").and_then(|()| out.flush());
        }
        // It may be left open for days: a disk that does not answer for a moment must not end it. Without a reader it ends.
        match look(&finder, args, global.format()) {
            Ok(refused) if global.format() == Format::Text => {
                refused.iter().try_for_each(|it| print_note(it.job.as_str(), &chain(it.error.as_ref())))?;
            }
            Ok(_) => {}
            Err(error) if is_first || error.is::<io::Error>() => return Err(error),
            Err(error) => complain(&chain(error.as_ref())),
        }
        is_first = false;
        if is_drawn {
            let (now, every) = (Local::now().format("%H:%M:%S"), humantime::format_duration(args.every));
            print_text(&format!("\n{now}, every {every}. Ctrl-C ends this"))?;
        }
        std::thread::sleep(args.every);
        if is_unread(stdout().as_fd()) {
            return Ok(Exit::Success);
        }
    }
}

/// Prints the state of the jobs once. Returns those that cannot be read.
fn look(finder: &Finder, args: &StatusArgs, format: Format) -> anyhow::Result<Vec<Refused>> {
    let (folders, mut refused) = match &args.job {
        Some(job) => (vec![finder.job(job)?], Vec::new()),
        None => finder.jobs()?.all(finder),
    };
    let rows = rows(&folders, args.job.is_some(), &mut refused)?;
    if rows.is_empty() && format == Format::Text {
        print_text(&find::no_jobs(finder))?;
    } else {
        let stores = finder.names_stores(rows.iter().map(|row| row.store.as_path()));
        print(&rows, args.job.is_some(), stores, format)?;
    }
    if format == Format::Json {
        return Ok(refused);
    }
    if let (Some(_), [folder], [Row { source: "record", why, .. }]) = (&args.job, &folders[..], &rows[..]) {
        let how = match why {
            // A note has told it.
            Some(_) => "its".to_owned(),
            None => format!("{}. Its", ended::how(folder)?),
        };
        let (store, next) = (folder.store().display(), ended::capital(&ended::next(folder)?));
        print_note(folder.name().as_str(), &format!("{how} store is {store}. {next}"))?;
    }
    if args.job.is_none() {
        for left in finder.left_elsewhere() {
            let name = format!("job {} in {}", left.job, left.store.display());
            print_note(&name, &format!("{left}: {}", left.advice()))?;
        }
    }
    Ok(refused)
}

/// The rows of the jobs, sorted. One that cannot be read is put to the `refused`, unless it was `named`.
fn rows(folders: &[JobFolder], named: bool, refused: &mut Vec<Refused>) -> anyhow::Result<Vec<Row>> {
    let live: Vec<_> = folders.iter().map(Published::live).collect();
    let socket = |live: &Result<Option<Published>, _>| live.as_ref().ok()?.as_ref()?.control.clone();
    let sockets: Vec<_> = live.iter().map(socket).collect();
    let answers = client::ask_all(&sockets, &Request::Status, PATIENCE);
    let (now, mut rows) = (Utc::now(), Vec::new());
    for ((folder, live), answer) in folders.iter().zip(live).zip(answers) {
        let read = live.map_err(anyhow::Error::from).and_then(|live| {
            let (published, source) = match (answer, live) {
                (Some(Ok(Answer::Status(published))), _) => (Some(*published), "supervisor"),
                (_, Some(live)) => (Some(live), "state-file"),
                (_, None) => (None, "record"),
            };
            row(folder, published, source, now)
        });
        match read {
            Ok(row) => rows.push(row),
            Err(error) if named => return Err(error),
            Err(error) => refused.push(Refused { job: folder.name().clone(), store: folder.store().to_owned(), error }),
        }
    }
    rows.extend(refused.iter().map(Row::unreadable));
    rows.sort_by(|a, b| (&a.job, &a.store).cmp(&(&b.job, &b.store)));
    Ok(rows)
}

impl Row {
    /// The row of a job whose files cannot be read.
    fn unreadable(refused: &Refused) -> Row {
        Row {
            job: refused.job.clone(),
            store: refused.store.clone(),
            state: ShownState::Unreadable,
            source: "record",
            why: Some(chain(refused.error.as_ref())),
            uptime_s: None,
            last_age_s: None,
            last_evidence: None,
            group_image_age_s: None,
            published: None,
            command: Vec::new(),
            left_in_memory: None,
        }
    }
}

fn row(folder: &JobFolder, live: Option<Published>, source: &'static str, now: DateTime<Utc>) -> anyhow::Result<Row> {
    let record = folder.record()?;
    let last = record.as_ref().map(|record| &record.outcome);
    let state = ShownState::of(live.as_ref(), last);
    let why = match last {
        Some(Outcome::Failed { why }) if live.is_none() => Some(why.clone()),
        _ => None,
    };
    let is_live = live.is_some();
    let mut published = live.or_else(|| Published::read(&folder.state_file()).ok());
    if let Some(published) = published.as_mut().filter(|_| !is_live) {
        // Planned actions of a dead supervisor will not happen.
        (published.pid, published.next, published.control) = (None, None, None);
        (published.persisting, published.replicating) = (None, None);
        published.restoring = None;
        published.group = published.group.take().map(Group::of_the_past);
    }
    let seconds = |time: TimeDelta| time.num_seconds().max(0);
    let shown = folder.evidence()?;
    Ok(Row {
        job: folder.name().clone(),
        store: folder.store().to_owned(),
        state,
        source,
        why,
        uptime_s: published.as_ref().filter(|_| is_live).map(|it| seconds(now - it.begun)),
        last_age_s: published.as_ref().and_then(|it| it.last_image).map(|image| seconds(now - image.taken())),
        last_evidence: published.as_ref().and_then(|it| it.last_image).map(|image| shown.of(&image)),
        group_image_age_s: published.as_ref().and_then(|it| {
            let taken = it.group.as_ref()?.newest_committed()?.taken()?;
            Some(seconds(now - taken))
        }),
        command: record.map(|JobRecord { command, .. }| command).unwrap_or_default(),
        published: published.map(Shown::new),
        left_in_memory: Leftover::of(folder)?.into_iter().next(),
    })
}

fn print(rows: &[Row], one: bool, stores: bool, format: Format) -> anyhow::Result<()> {
    let now = Utc::now();
    let mut columns = COLUMNS.to_vec();
    columns.extend(stores.then_some(Column::short("STORE")));
    let dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
    let cells = rows.iter().map(|row| {
        let known = row.published.as_ref().map(|shown| &shown.typed);
        let mut cells = vec![
            row.job.to_string(),
            state(row),
            dash(known.and_then(|it| it.pid).map(|pid| pid.to_string())),
            dash(known.map(|it| gpus(&it.gpus)).filter(|text| !text.is_empty())),
            dash(row.uptime_s.map(time)),
            dash(known.filter(|_| row.uptime_s.is_some()).map(|it| it.restarts.to_string())),
            dash(row.last_age_s.map(|age| format!("{} ago{}", time(age), evidence(row)))),
            dash(known.and_then(|it| it.last_freeze_us).map(super::list::milliseconds)),
            dash(known.and_then(|it| it.last_bytes).map(size)),
            dash(known.and_then(|it| it.next).map(|at| format!("in {}", time((at - now).num_seconds().max(0))))),
        ];
        cells.extend(stores.then(|| row.store.display().to_string()));
        cells
    });
    match (format, rows) {
        (Format::Json, [row]) if one => print_json(row)?,
        _ => print_table(format, &columns, cells, &rows)?,
    }
    if format == Format::Text {
        for row in rows {
            notes(row).into_iter().try_for_each(|note| print_note(row.job.as_str(), &note))?;
        }
    }
    Ok(())
}

/// What has shown that the last image can be restored.
fn evidence(row: &Row) -> String {
    let known = row.published.as_ref().map(|shown| &shown.typed);
    match row.last_evidence {
        Some(Evidence::Taken) if known.is_some_and(|it| it.not_rehearsed.is_some()) => format!(", {NOT_REHEARSED}"),
        Some(evidence) => format!(", {evidence}"),
        None => String::new(),
    }
}

fn state(row: &Row) -> String {
    let known = row.published.as_ref().map(|shown| &shown.typed);
    let moving = known.and_then(|it| it.persisting.as_ref());
    let mut text = row.state.to_string();
    text.extend(moving.map(|moving| format!(", storing {} %", moving.percent())));
    if row.source == "state-file" {
        text.push_str(" (does not answer)");
    }
    text
}

/// The deadline, and how long before it the final snapshot starts.
fn end(published: &Published, now: DateTime<Utc>) -> Option<String> {
    let seconds = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    let left = time((published.deadline? - now).num_seconds().max(0));
    let before = published.predicted.map(|forecast| time(seconds(forecast.lead()).saturating_add(1)));
    let last = before.map_or_else(String::new, |before| format!("; the final snapshot starts {before} before it"));
    Some(format!("the deadline is in {left}{last}"))
}

/// Failures since the last success, and what is due soon.
fn notes(row: &Row) -> Vec<String> {
    let known = row.published.as_ref().map(|shown| &shown.typed);
    let failure = |text: Option<&String>, what: &str| text.map(|why| format!("{what}: {why}"));
    // Why a job cannot be read is told at the end.
    let given_up = row.why.as_ref().filter(|_| row.state != ShownState::Unreadable);
    let mut notes = vec![failure(given_up, "given up")];
    if let Some(it) = known.filter(|_| row.uptime_s.is_some()) {
        notes.extend(it.group.iter().flat_map(|group| group::notes(group, it.interval.as_ref(), Utc::now())).map(Some));
        notes.push(failure(it.hang.as_ref(), "hangs"));
        notes.push(failure(it.gpu_fault.as_ref(), "a GPU has failed"));
        notes.push(it.notice.clone());
        notes.push(it.last_end.as_ref().filter(|_| it.restarts > 0).map(|end| format!("last end: {}", end.words)));
        notes.push(end(it, Utc::now()));
        notes.push(failure(it.last_failure.as_ref(), "the newest snapshot failed"));
        notes.push(failure(it.persist_failure.as_ref(), "not in the store"));
        notes.push(failure(it.replica_failure.as_ref(), "not in the replica"));
        notes.push(failure(it.not_rehearsed.as_ref(), NOT_REHEARSED));
        notes.push(failure(it.rehearsal_failure.as_ref(), "could not be restored in a rehearsal"));
    }
    notes.push(row.left_in_memory.as_ref().map(|left| format!("{left}: {}", left.advice())));
    notes.into_iter().flatten().collect()
}

/// "2x NVIDIA H100" instead of repeating the name.
fn gpus(names: &[String]) -> String {
    let mut counted: Vec<(&str, usize)> = Vec::new();
    for name in names {
        match counted.iter_mut().find(|(known, _)| known == name) {
            Some((_, count)) => *count += 1,
            None => counted.push((name, 1)),
        }
    }
    let text = |(name, count): (&str, usize)| if count > 1 { format!("{count}x {name}") } else { name.to_owned() };
    counted.into_iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_units() {
        let shown = [0, 59, 60, 3599, 3600, 86399, 86400, 200_000].map(time);
        assert_eq!(shown, ["0s", "59s", "1m 0s", "59m 59s", "1h 0m", "23h 59m", "1d 0h", "2d 7h"]);
    }

    #[test]
    fn the_keys_of_a_job_without_a_supervisor_are_those_of_one_with() {
        let nothing = Shown::nothing();
        assert_eq!((nothing.get("restarts"), nothing.get("gpus")), (Some(&0.into()), Some(&serde_json::json!([]))));
        assert!(nothing.get("pid").is_some_and(Value::is_null) && nothing.get("begun").is_some_and(Value::is_null));
        assert!(["interval", "deadline", "control", "hang"].iter().all(|key| nothing.contains_key(*key)));
    }

    #[test]
    fn gpus_are_counted() {
        let names = ["A", "B", "A"].map(str::to_owned);
        assert_eq!((gpus(&names).as_str(), gpus(&[]).as_str()), ("2x A, B", ""));
    }
}

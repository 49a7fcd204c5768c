//! What the kernel has of the job's tasks ([`rekindle_objects`]): recorded at the dump, compared in a restore before any
//! task runs.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};

use serde::{Deserialize, Serialize};

use super::devices::LeftOut;
use super::locks;
use rekindle_criu::image::LostLocks;
use rekindle_objects::table::{How, Means};
use rekindle_objects::{
    Advice, Answers, Damaged, Difference, FILE_NAME, MAX_BYTES, Mapping, Raw, Record, Rights, compare, put_back,
    signals,
};
use rekindle_os::beneath::Beneath;
use rekindle_os::process;
use rekindle_store::Manifest;

/// `restart.compare`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Compare {
    /// A difference that the job would notice fails the restore. An image without a record is restored.
    #[default]
    On,
    /// An image without a record is not restored either.
    Required,
    /// Differences are only told.
    Tell,
}

/// What the stopped threads answer to our plugin in CRIU.
pub(crate) struct Asked(File);

impl Asked {
    pub(crate) fn new() -> io::Result<Asked> {
        Ok(Asked(memfd_create(c"rekindle-answers", MFdFlags::MFD_CLOEXEC)?.into()))
    }

    /// Where the plugin writes.
    pub(crate) fn to(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// None if this CRIU loads no plugins.
    fn answers(&self) -> io::Result<Answers> {
        let length = self.0.metadata()?.len().min(MAX_BYTES);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        self.0.read_exact_at(&mut bytes, 0)?;
        Ok(Answers::parse(&String::from_utf8_lossy(&bytes)))
    }
}

/// What the kernel had of the tasks while they stood still for a dump.
pub(crate) struct Photographed {
    before: Raw,
    /// What they have when CRIU is done with them, and none has run.
    after: Option<Raw>,
}

impl Photographed {
    /// Reads it, before CRIU changes or reads anything. `advice` was read while the job ran.
    pub(crate) fn read(root: i32, advice: Advice) -> Photographed {
        let mut before = Raw::read(&process::tree(root));
        before.add(advice);
        Photographed { before, after: None }
    }

    /// Reads it again, before the tasks run on.
    pub(crate) fn read_again(&mut self, root: i32) {
        self.before.send_signals_again();
        self.after = Some(Raw::read(&process::tree(root)));
    }

    /// Writes the record into the folder of the image, with what the image has `told` of the threads, and tells what the dump has
    /// changed. The image has the connections of TCP between the ends in `connections`. Returns the kinds of objects.
    pub(crate) fn write(
        self,
        criu: &str,
        told: &str,
        left_out: &LeftOut,
        connections: &HashSet<(SocketAddr, SocketAddr)>,
        image: &Beneath,
    ) -> io::Result<BTreeSet<String>> {
        let mut record = self.before.record(criu);
        if let Some(after) = self.after {
            for line in lines("the snapshot has changed the running job", &changed(&record, &after.record(criu))) {
                tracing::warn!("{line}. The image has what was before");
            }
        }
        record.add(Answers::parse(told));
        for process in &mut record.processes {
            for descriptor in &mut process.descriptors {
                if left_out.descriptors.contains(&(process.pid, descriptor.number)) {
                    descriptor.leave_out();
                }
                descriptor.is_closed_unless(|local, remote| connections.contains(&(local, remote)));
            }
            for (_, start, end) in left_out.memory.iter().filter(|(pid, ..)| *pid == process.pid) {
                let within = |mapping: &&mut Mapping| mapping.start < *end && *start < mapping.end;
                process.mappings.iter_mut().filter(within).for_each(Mapping::leave_out);
            }
        }
        let bytes = record.to_bytes().map_err(io::Error::other)?;
        image.join(FILE_NAME).create_new(0o600)?.write_all(&bytes)?;
        Ok(record.kinds())
    }
}

/// What a dump has changed. None of it may.
fn changed(before: &Record, after: &Record) -> Vec<Difference> {
    let mut found = compare(before, after);
    found.retain(|difference| match difference.row.item {
        // Files that have no name are given one for the image.
        "path" | "deleted" => false,
        // SK_FORCE_REUSE, as long as CRIU holds the connection in repair mode (tcp(7)).
        "SO_REUSEADDR" => difference.now.as_deref() != Some("2"),
        _ => true,
    });
    found
}

/// Why a restored job does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image has no record that can be used.
    #[error("{why}, and restart.compare is \"required\": restore another image, or set restart.compare = \"on\"")]
    NoRecord {
        /// The reason.
        why: String,
    },
    /// The restored tasks are not what they were.
    #[error(
        "CRIU reports success, but the restored job is not what it was: {}{}. None of it has run. If the job does not mind, set restart.compare = \"tell\"", first(differences), between(.upgraded.as_ref())
    )]
    Differs {
        /// What differs.
        differences: Vec<Difference>,
        /// The kernel and CRIU of the image, and those here, if they are others.
        upgraded: Option<(String, String)>,
    },
}

/// How many differences a message names.
const NAMED: usize = 5;

fn first(differences: &[Difference]) -> String {
    let named: Vec<String> = differences.iter().take(NAMED).map(ToString::to_string).collect();
    let more = differences.len() - named.len();
    let more = if more == 0 { String::new() } else { format!("; and {more} more") };
    format!("{}{more}", named.join("; "))
}

fn between(versions: Option<&(String, String)>) -> String {
    versions.map(|(then, now)| format!(" (the image is from {then}, here is {now})")).unwrap_or_default()
}

/// What differs, and lets the job run.
#[derive(Debug, Default)]
pub(crate) struct Checked {
    /// A line for each item that is to be told.
    pub(crate) told: Vec<String>,
    /// What only the threads can set themselves.
    pub(crate) later: Vec<Difference>,
}

/// What a restore has, beside the tasks.
pub(crate) struct Now<'a> {
    /// The version of CRIU.
    pub(crate) criu: &'a str,
    /// What the threads have answered.
    pub(crate) asked: &'a Asked,
    /// Whose rights what is put back must keep to.
    pub(crate) rights: Rights,
    /// Locks that the processes take when they have been compared.
    pub(crate) locks: &'a LostLocks,
}

/// The record of an image, and what a difference from it means.
pub(crate) struct Recorded {
    record: Option<Record>,
    compare: Compare,
    /// The running job is in its control groups, and what is rehearsed is not.
    is_rehearsed: bool,
}

impl Recorded {
    /// Reads it, before anything is made.
    ///
    /// # Errors
    /// When there is none that can be used, and one is required.
    pub(crate) fn of(image: &Beneath, compare: Compare, is_rehearsed: bool) -> Result<Recorded, Error> {
        let why = match image.join(FILE_NAME).content(MAX_BYTES) {
            Ok(bytes) => match Record::parse(&bytes) {
                Ok(record) => return Ok(Recorded { record: Some(record), compare, is_rehearsed }),
                Err(Damaged::Parse(source)) => format!("the record of what the job had is damaged ({source})"),
                Err(other) => other.to_string(),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                "the image has no record of what the job had".to_owned()
            }
            Err(error) => format!("the record of what the job had cannot be read: {error}"),
        };
        if compare == Compare::Required {
            return Err(Error::NoRecord { why });
        }
        tracing::info!("the restored job is not compared with what it was: {why}");
        Ok(Recorded { record: None, compare, is_rehearsed })
    }

    /// Compares the tasks of the tree below `root` before any of them runs, and puts back what can be.
    ///
    /// # Errors
    /// When the job would notice a difference.
    pub(crate) fn check(&self, root: i32, manifest: &Manifest, now: &Now<'_>) -> Result<Checked, Error> {
        let Some(record) = &self.record else { return Ok(Checked::default()) };
        let tree = process::tree(root);
        let read = || {
            let mut raw = Raw::read(&tree);
            raw.add(Advice::read(&tree));
            let mut now_has = raw.record(now.criu);
            match now.asked.answers() {
                Ok(answers) => now_has.add(answers),
                Err(error) => tracing::warn!("cannot read what the threads of the restored job have answered: {error}"),
            }
            now_has
        };
        let (rights, taken) = (now.rights, now.locks);
        signals::send_again(record, &tree);
        let mut now = read();
        let mut found = differences(record, &now, manifest);
        if found.iter().any(|difference| difference.row.means == Means::PutBack) {
            put_back(&found, &tree, rights);
            now = read();
            found = differences(record, &now, manifest);
        }
        found.retain(|difference| match difference.row.item {
            "control-groups" => !self.is_rehearsed,
            "locks" => !locks::are_taken_again(taken, difference),
            _ => true,
        });
        let (later, found): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|difference| difference.row.means == Means::SetLater);
        let (refused, told): (Vec<_>, Vec<_>) = found
            .into_iter()
            .partition(|difference| difference.row.means == Means::Refused && self.compare != Compare::Tell);
        if refused.is_empty() {
            let mut told = lines(OTHERWISE, &told);
            let (then, now) = (record.answered(), now.answered());
            if now < then {
                told.push(format!(
                    "not compared: what only a thread itself can tell (signal actions and others), of {} of {then} threads",
                    then - now
                ));
            }
            return Ok(Checked { told, later });
        }
        for line in [&refused, &told].into_iter().flat_map(|differences| lines(OTHERWISE, differences)) {
            tracing::debug!("{line}");
        }
        let versions = |record: &Record| format!("kernel {} and CRIU {}", record.kernel, record.criu);
        let (then, now) = (versions(record), versions(&now));
        Err(Error::Differs { differences: refused, upgraded: (then != now).then_some((then, now)) })
    }
}

/// What differs, without what rekindle itself has changed.
fn differences(record: &Record, now: &Record, manifest: &Manifest) -> Vec<Difference> {
    let mut found = compare(record, now);
    // The job's output is opened anew: at its present place, and after a rotation another file.
    let is_output = |path: &str| manifest.log.as_ref().is_some_and(|log| Path::new(path).starts_with(&**log));
    let of_output = |difference: &Difference| {
        let process = record.processes.iter().find(|process| process.pid == difference.process.0);
        let descriptor = process
            .and_then(|process| process.descriptors.iter().find(|descriptor| Some(descriptor.number) == difference.at));
        descriptor.and_then(|descriptor| descriptor.items.get("path")).is_some_and(|path| is_output(path))
    };
    // CRIU lets a process without groups keep those that CRIU itself has: those of the job's user, if it works on files with
    // that user's rights. The reaper is ours, and uses none.
    let of_reaper = |difference: &Difference| difference.process.0 == manifest.tree.root;
    let is_ours =
        |difference: &Difference| difference.row.item == "more-groups" || difference.row.means == Means::SetLater;
    found.retain(|difference| !(is_ours(difference) && of_reaper(difference)));
    found.retain(|difference| {
        !(matches!(difference.row.item, "path" | "position" | "deleted" | "flags") && of_output(difference))
    });
    found
}

const OTHERWISE: &str = "not as before the restore";

/// One line for each item, without those that never are the same. Each begins with `what` has come about.
fn lines(what: &str, told: &[Difference]) -> Vec<String> {
    let mut items: BTreeMap<&str, Vec<&Difference>> = BTreeMap::new();
    for difference in told.iter().filter(|difference| difference.row.how != How::Never) {
        items.entry(difference.row.item).or_default().push(difference);
    }
    let line = |(item, all): (&str, Vec<&Difference>)| {
        let more = if all.len() == 1 { String::new() } else { format!(" (and {} more)", all.len() - 1) };
        Some(format!("{what} ({item}): {}{more}", all.first()?))
    };
    items.into_iter().filter_map(line).collect()
}

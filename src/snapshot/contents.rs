//! The content of files that the job changes in place: a part of its state, as its memory is.
//!
//! Which files: those that a process has open for writing, but for those that it only appends to; those that it has mapped
//! shared and writable; of those in memory (tmpfs) the appended ones too, because a machine that goes down takes them along;
//! the other files of an SQLite database; all files of a tracked folder, which the data folder of a PostgreSQL server is
//! without being named.
//!
//! How: large ones are copied before the freeze, while the job changes them, so that the pages of the copy are there; in
//! the freeze those that changed since are copied again. Where the file system shares blocks (XFS, btrfs) a copy that
//! shares them is made in the freeze, and read once the job runs. What goes together is in the image together or not at all:
//! within `snapshot.file-limit`, the smallest first.
//!
//! A file that is left out is in the manifest with its state of then, and is named once.

mod copy;
mod select;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytesize::ByteSize;

use crate::launch::identity::Identity;
use crate::store::manifest::{KeptCopy, OpenFile, Owner, Stamp, TrackedEntry, TrackedFolder, TrackedKind};
use crate::store::{JobPath, PartPath};
use crate::sys::blocks::{self, Medium};
use crate::sys::process::path_in;
use crate::sys::{durable, identity};

/// How files of the job are reached: in its mount namespace, with the rights of its user.
#[derive(Debug, Clone, Copy)]
pub(super) struct View<'a> {
    /// The root of the tree, as we see it.
    pub(super) root: i32,
    /// The job's user, where that is not ours.
    pub(super) user: Option<&'a Identity>,
}

impl View<'_> {
    /// Does `work` with the rights of the job's user. It is given the way to a path of the job.
    fn with<T: Send>(self, work: impl FnOnce(&dyn Fn(&Path) -> PathBuf) -> T + Send) -> io::Result<T> {
        match self.user {
            // The way through /proc takes rights over the reaper, which the user has not; the job's mounts are ours.
            Some(user) => {
                identity::with_file_rights(user.uid, user.gid, &user.groups, || work(&|path| path.to_path_buf()))
            }
            None => Ok(work(&|path| path_in(self.root, path))),
        }
    }
}

/// A file smaller than this is copied in the freeze alone.
const AHEAD_FROM: u64 = 1 << 20;
/// A file that was changed less than this before its copy began may have been changed after without another time: the clock
/// that files are stamped with moves every few milliseconds.
const SETTLED: Duration = Duration::from_millis(100);

/// A larger file that is only read is not copied, nor are more than so many bytes of all of them.
const READ_UP_TO: u64 = 16 << 20;
const ALL_READ_UP_TO: u64 = 128 << 20;

/// A copy that was made before the freeze.
#[derive(Debug)]
struct Ahead {
    part: PartPath,
    stamp: Stamp,
    /// Whether an unchanged stamp says that the content is unchanged.
    is_telling: bool,
}

/// A copy that shares blocks with a file, to be read when the job runs.
#[derive(Debug)]
struct Shared {
    copy: File,
    part: PartPath,
    size: u64,
}

/// What is captured of the content of files.
#[derive(Debug, Default)]
pub(super) struct Contents {
    tracked: Vec<PathBuf>,
    /// Files of ours that the job has open or mapped are below these.
    ours: Vec<PathBuf>,
    limit: u64,
    ahead: BTreeMap<PathBuf, Ahead>,
    shared: Vec<Shared>,
    parts: usize,
}

/// What the freeze found.
#[derive(Debug, Default)]
pub(super) struct Captured {
    pub(super) absent: Vec<JobPath>,
    pub(super) tracked: Vec<TrackedFolder>,
    /// What is to be told of files that are not in the image.
    pub(super) notes: Vec<String>,
    /// Files that are only read, and that may be gone when the job is restored.
    pub(super) read: BTreeMap<PathBuf, KeptCopy>,
}

/// A file that was opened.
struct Found {
    path: PathBuf,
    file: File,
    metadata: fs::Metadata,
    medium: Medium,
    mapped: bool,
    /// What it is put back together with.
    group: PathBuf,
    shared: Option<File>,
}

impl Contents {
    pub(super) fn new(tracked: &[PathBuf], ours: Vec<PathBuf>, limit: u64) -> Contents {
        Contents { tracked: tracked.to_vec(), ours, limit, ..Contents::default() }
    }

    /// Bytes that the copies will take, as the job is now; tells the data folders of databases from the others.
    pub(super) fn foresee(&mut self, tree: &[i32], view: View<'_>) -> io::Result<u64> {
        self.tracked.extend(select::data_folders(tree));
        self.tracked.sort();
        self.tracked.dedup();
        // One within another is a part of that.
        let all = self.tracked.clone();
        self.tracked.retain(|folder| !all.iter().any(|other| other != folder && folder.starts_with(other)));
        let found = self.find(select::written_now(tree), view)?.0;
        let kept = self.within_limit(&found);
        Ok(found.iter().filter(|file| kept.contains(&file.group)).map(Found::bytes).sum())
    }

    /// Memory has no room for them: only those are kept that are in memory already.
    pub(super) fn keep_none_of_the_disk(&mut self) {
        self.limit = 0;
    }

    /// Copies the large files into the image while the job runs.
    pub(super) fn copy_ahead(
        &mut self,
        tree: &[i32],
        view: View<'_>,
        draft: &Path,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<()> {
        let mut found = self.find(select::written_now(tree), view)?.0;
        let kept = self.within_limit(&found);
        found.retain(|file| kept.contains(&file.group) && file.bytes() >= AHEAD_FROM);
        for file in found {
            if cancelled() {
                break;
            }
            if file.shares_blocks(view) {
                // Sharing writes what is dirty to the disk first: better now than in the freeze.
                let _ = file.file.sync_data();
                continue;
            }
            let part = self.next_part()?;
            let began = SystemTime::now();
            let stamp = Stamp::of(&file.file.metadata()?);
            match copy::whole(&file.file, stamp.size, &create(draft, &part)?, cancelled) {
                Err(_) if cancelled() => break,
                done => done?,
            }
            // A mapping changes a file without a new time, and tmpfs gives none at all to what a mapping does.
            let is_telling = !file.mapped && file.medium == Medium::Disk && is_settled(&stamp, began);
            self.ahead.insert(file.path, Ahead { part, stamp, is_telling });
        }
        Ok(())
    }

    /// Captures all of them while the job stands still. `files` are those that it has open for writing, `mapped` those that
    /// it can write to by a mapping.
    pub(super) fn capture(
        &mut self,
        files: &mut Vec<OpenFile>,
        mapped: Vec<PathBuf>,
        view: View<'_>,
        draft: &Path,
    ) -> io::Result<Captured> {
        let open =
            files.iter().map(|file| (file.path.to_path_buf(), select::Use { append: file.append, mapped: false }));
        let mut written: BTreeMap<PathBuf, select::Use> = open.collect();
        for path in mapped {
            written.entry(path).or_default().mapped = true;
        }
        let (mut found, absent, tracked) = self.find(written, view)?;
        let kept = self.within_limit(&found);
        self.share(&mut found, &kept, view)?;
        let mut captured = Captured { tracked, ..Captured::default() };
        let mut copies = Vec::new();
        for file in found {
            let is_kept = kept.contains(&file.group);
            let part = match is_kept {
                true => Some(self.take(&file, draft, &mut copies)?),
                false => None,
            };
            let stamp = Stamp::of(&file.metadata);
            let path = job_path(&file.path)?;
            let group = (file.group != file.path).then(|| job_path(&file.group)).transpose()?;
            let known = match files.iter_mut().find(|known| known.path == path) {
                Some(known) => known,
                None => {
                    files.push(OpenFile::new(path, stamp.size));
                    files.last_mut().ok_or(io::ErrorKind::OutOfMemory)?
                }
            };
            known.size = stamp.size;
            known.mode = Some(file.metadata.mode());
            known.owner = part.is_some().then(|| Owner { uid: file.metadata.uid(), gid: file.metadata.gid() });
            (known.part, known.stamp, known.group) = (part, Some(stamp), group);
            if let (None, Some(shared)) = (&known.part, file.shared) {
                drop(shared);
            }
        }
        tracing::debug!(files = files.len(), stretches = copies.len(), shared = self.shared.len(), "files of the job");
        copy::all(copies, &|| false)?;
        captured.absent = absent.iter().map(|path| job_path(path)).collect::<io::Result<_>>()?;
        // One that was closed since is in no image.
        for (_, ahead) in std::mem::take(&mut self.ahead) {
            let _ = fs::remove_file(draft.join(&ahead.part));
        }
        let left_out = files.iter().filter(|file| file.part.is_none() && file.stamp.is_some());
        captured.notes.extend(note(left_out, self.limit));
        Ok(captured)
    }

    /// Copies small files that the job only reads, where they may go when it dies: what survives the first process of a job
    /// cleans up behind it.
    pub(super) fn keep_read(
        &mut self,
        read: Vec<PathBuf>,
        began: SystemTime,
        view: View<'_>,
        draft: &Path,
    ) -> io::Result<BTreeMap<PathBuf, KeptCopy>> {
        let files: Vec<_> = view.with(|way| {
            let open = |path: PathBuf| {
                let file = durable::open_for_reading(&way(&path)).ok()?;
                let (metadata, medium) = (file.metadata().ok()?, Medium::of(&file).ok()?);
                let is_ours = self.ours.iter().any(|ours| path.starts_with(ours));
                let is_small = metadata.size() <= READ_UP_TO;
                let may_go = select::may_go(&path, &metadata, medium, began);
                (!is_ours && is_small && may_go).then_some((path, file, metadata))
            };
            read.into_iter().filter_map(open).collect()
        })?;
        let mut kept = BTreeMap::new();
        let mut left = ALL_READ_UP_TO;
        for (path, file, metadata) in files {
            let Some(rest) = left.checked_sub(metadata.size()) else { continue };
            left = rest;
            let part = self.next_part()?;
            copy::whole(&file, metadata.size(), &create(draft, &part)?, &|| false)?;
            let owner = Owner { uid: metadata.uid(), gid: metadata.gid() };
            kept.insert(path, KeptCopy { part, owner, stamp: Stamp::of(&metadata) });
        }
        Ok(kept)
    }

    /// Reads what shares blocks with files of the job, which runs again.
    pub(super) fn complete(&mut self, draft: &Path) -> io::Result<()> {
        for shared in std::mem::take(&mut self.shared) {
            copy::whole(&shared.copy, shared.size, &create(draft, &shared.part)?, &|| false)?;
        }
        Ok(())
    }

    /// Has the content of a file come into the image: it is there, or will be read later, or is to be copied now.
    fn take(&mut self, file: &Found, draft: &Path, copies: &mut Vec<copy::Job>) -> io::Result<PartPath> {
        let size = file.metadata.size();
        if let Some(shared) = &file.shared {
            let part = self.next_part()?;
            self.shared.push(Shared { copy: shared.try_clone()?, part: part.clone(), size });
            return Ok(part);
        }
        let ahead = self.ahead.remove(&file.path);
        if let Some(ahead) = &ahead
            && ahead.is_telling
            && !file.mapped
            && ahead.stamp == Stamp::of(&file.metadata)
        {
            return Ok(ahead.part.clone());
        }
        let (part, into) = match ahead {
            Some(ahead) => {
                let into = File::options().read(true).write(true).open(draft.join(&ahead.part))?;
                (ahead.part, into)
            }
            None => {
                let part = self.next_part()?;
                let into = create(draft, &part)?;
                (part, into)
            }
        };
        copies.extend(copy::jobs(file.file.try_clone()?, size, file.has_holes(), into)?);
        Ok(part)
    }

    /// Opens the files, those that belong to them and those of tracked folders. Answers the names too that are missing beside
    /// databases, and what is in tracked folders.
    #[allow(clippy::type_complexity, reason = "three lists, used at two places in this file")]
    fn find(
        &self,
        written: BTreeMap<PathBuf, select::Use>,
        view: View<'_>,
    ) -> io::Result<(Vec<Found>, Vec<PathBuf>, Vec<TrackedFolder>)> {
        view.with(|way| {
            let (mut wanted, mut absent, mut tracked) = (written, BTreeSet::new(), Vec::new());
            wanted.retain(|path, _| !self.ours.iter().any(|ours| path.starts_with(ours)));
            for folder in &self.tracked {
                let entries = select::below(folder, way);
                for (path, kind) in &entries {
                    if *kind == TrackedKind::File {
                        wanted.entry(path.clone()).or_default().append = false;
                    }
                }
                let entries = entries
                    .into_iter()
                    .filter_map(|(path, kind)| Some(TrackedEntry { path: JobPath::new(path).ok()?, kind }));
                let entries = entries.collect();
                tracked.extend(JobPath::new(folder.as_path()).ok().map(|path| TrackedFolder { path, entries }));
            }
            for path in wanted.keys().cloned().collect::<Vec<_>>() {
                if !self.is_tracked(&path) {
                    let (there, missing) = select::companions(&path, way);
                    for path in there {
                        wanted.entry(path).or_default();
                    }
                    absent.extend(missing);
                }
            }
            let found = wanted.into_iter().filter_map(|(path, usage)| self.open(path, usage, way)).collect();
            (found, absent.into_iter().collect(), tracked)
        })
    }

    /// None where its content is no part of the job's state, or cannot be read: then its size is all that is known.
    fn open(&self, path: PathBuf, usage: select::Use, way: &dyn Fn(&Path) -> PathBuf) -> Option<Found> {
        let file = durable::open_for_reading(&way(&path)).ok()?;
        let (metadata, medium) = (file.metadata().ok()?, Medium::of(&file).ok()?);
        let is_state = match medium {
            Medium::Memory => true,
            Medium::Kernel => false,
            Medium::Disk => usage.mapped || !usage.append,
        };
        let group = match self.tracked.iter().find(|folder| path.starts_with(folder)) {
            Some(folder) => folder.clone(),
            None => select::database_of(&path, way).unwrap_or_else(|| path.clone()),
        };
        is_state.then_some(Found { path, file, metadata, medium, mapped: usage.mapped, group, shared: None })
    }

    fn is_tracked(&self, path: &Path) -> bool {
        self.tracked.iter().any(|folder| path.starts_with(folder))
    }

    /// The groups whose files are kept: all that are in memory anyway, of the others the smallest first.
    fn within_limit(&self, found: &[Found]) -> BTreeSet<PathBuf> {
        let mut groups: BTreeMap<&Path, (u64, bool)> = BTreeMap::new();
        for file in found {
            let group = groups.entry(&file.group).or_insert((0, true));
            group.0 += file.bytes();
            group.1 &= file.medium == Medium::Memory;
        }
        let mut groups: Vec<_> =
            groups.into_iter().map(|(path, (bytes, in_memory))| (in_memory, bytes, path)).collect();
        groups.sort_by_key(|(in_memory, bytes, _)| (!in_memory, *bytes));
        let mut left = self.limit;
        let mut kept = BTreeSet::new();
        for (in_memory, bytes, path) in groups {
            match (in_memory, left.checked_sub(bytes)) {
                (true, _) => {}
                (false, Some(rest)) => left = rest,
                (false, None) => break,
            }
            kept.insert(path.to_path_buf());
        }
        kept
    }

    /// Makes copies that share blocks, of all that are large enough for it to matter. A file system that cannot is asked once.
    fn share(&self, found: &mut [Found], kept: &BTreeSet<PathBuf>, view: View<'_>) -> io::Result<()> {
        let mut cannot = BTreeSet::new();
        let large = |file: &&mut Found| file.medium == Medium::Disk && file.metadata.size() >= AHEAD_FROM;
        let mut large: Vec<_> = found.iter_mut().filter(|file| kept.contains(&file.group)).filter(large).collect();
        large.retain(|file| !self.ahead.contains_key(&file.path));
        if large.is_empty() {
            return Ok(());
        }
        view.with(|way| {
            for file in large {
                let Some(folder) = file.path.parent().filter(|_| !cannot.contains(&file.metadata.dev())) else {
                    continue;
                };
                match blocks::shared_copy(&file.file, &way(folder)) {
                    Ok(copy) => file.shared = Some(copy),
                    Err(_) => drop(cannot.insert(file.metadata.dev())),
                }
            }
        })
    }

    fn next_part(&mut self) -> io::Result<PartPath> {
        self.parts += 1;
        format!("files/content-{}", self.parts).parse().map_err(io::Error::other)
    }
}

impl Found {
    /// Bytes that a copy takes.
    fn bytes(&self) -> u64 {
        // st_blocks counts 512 bytes (stat(2)). A compressing file system has fewer than the copy will have.
        self.metadata.size().min((self.metadata.blocks() * 512).max(4096))
    }

    fn has_holes(&self) -> bool {
        self.metadata.blocks() * 512 < self.metadata.size()
    }

    fn shares_blocks(&self, view: View<'_>) -> bool {
        let folder = self.path.parent().unwrap_or(&self.path);
        self.medium == Medium::Disk
            && view.with(|way| blocks::shared_copy(&self.file, &way(folder)).is_ok()).unwrap_or(false)
    }
}

fn is_settled(stamp: &Stamp, now: SystemTime) -> bool {
    let changed = u64::try_from(stamp.changed_ns.max(stamp.modified_ns)).unwrap_or_default();
    let changed = SystemTime::UNIX_EPOCH + Duration::from_nanos(changed);
    now.duration_since(changed).is_ok_and(|age| age >= SETTLED)
}

fn job_path(path: &Path) -> io::Result<JobPath> {
    JobPath::new(path).map_err(io::Error::other)
}

fn create(draft: &Path, part: &PartPath) -> io::Result<File> {
    let path = draft.join(part);
    fs::create_dir_all(path.parent().unwrap_or(draft))?;
    File::options().read(true).write(true).create_new(true).open(path)
}

/// How many files are named.
const NAMED: usize = 5;

fn note<'a>(left_out: impl Iterator<Item = &'a OpenFile>, limit: u64) -> Option<String> {
    let left_out: Vec<_> = left_out.map(|file| file.path.display().to_string()).collect();
    if left_out.is_empty() {
        return None;
    }
    let more = left_out.len().saturating_sub(NAMED);
    let mut names = left_out.into_iter().take(NAMED).collect::<Vec<_>>().join(", ");
    if more > 0 {
        names.push_str(&format!(" and {more} more"));
    }
    let limit = match limit {
        0 => "memory has no room for it".to_owned(),
        limit => format!("it does not fit into snapshot.file-limit, {}", ByteSize::b(limit)),
    };
    Some(format!(
        "the job rewrites {names}, and the content is not in the image, because {limit}. A restore is refused if one of \
         them was changed after the snapshot (restart.changed-files): raise the limit"
    ))
}

#[cfg(test)]
mod tests;

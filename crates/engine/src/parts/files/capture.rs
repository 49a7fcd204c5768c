//! Captures the content of files that the job changes in place: they are part of its state, as its memory is.
//!
//! Which files: those that a process has open for writing, except files that it only appends to; those mapped shared
//! and writable; in memory (tmpfs) also the appended ones, because a restart of the machine deletes them; the other
//! files of an SQLite database; all files of a tracked folder. The data folder of a PostgreSQL server is tracked
//! automatically.
//!
//! How: large files are copied before the freeze, while the job changes them, so that the pages of the copy exist. In
//! the freeze only the changes since then are copied again. If the file system can share blocks (XFS, btrfs), a copy
//! that shares them is made in the freeze, and read while the job runs. Files that belong together are in the image
//! together or not at all: within `snapshot.file-limit`, the smallest first.
//!
//! A file that is left out is in the manifest with its state at the snapshot, and is reported once.

mod copy;
mod notes;
mod select;
mod way;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::place::Trusted;
use super::rights::Table;
use crate::launch::identity::Identity;
use notes::Reason;
use rekindle_os::beneath::Beneath;
use rekindle_os::blocks::{self, Medium};
use rekindle_os::identity;
use rekindle_os::process;
use rekindle_store::manifest::{
    Fifo, Folder, KeptCopy, OpenFile, Owner, Stamp, TrackedEntry, TrackedFolder, TrackedKind,
};
use rekindle_store::{JobPath, PartPath};
use way::Way;

/// How files of the job are reached: in its mount namespace, with the rights of its user.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a> {
    /// The root of the tree, as we see it.
    pub(crate) root: i32,
    /// The job's user, if it is not the supervisor's.
    pub(crate) user: Option<&'a Identity>,
}

impl View<'_> {
    /// Runs `work` with the rights of the job's user.
    fn with<T: Send>(self, work: impl FnOnce(&Way) -> T + Send) -> io::Result<T> {
        match self.user {
            Some(user) => identity::with_file_rights(user.uid, user.gid, &user.groups, || work(&Way::of_user())),
            None => Ok(work(&Way::of_job(self.root)?)),
        }
    }
}

/// Smaller files are copied in the freeze only.
const AHEAD_FROM: u64 = 1 << 20;
/// Bytes of files that are examined together before they are copied: what changes meanwhile is copied again in the freeze.
/// With many processes it is as many for each [`LOOKED_AT`] of them: their maps are read once for these files.
const AHEAD_AT_A_TIME: u64 = 256 << 20;
const LOOKED_AT: usize = 50;
/// If a file was changed less than this before its copy began, a later change may have the same time stamp: the clock
/// for time stamps advances every few milliseconds.
const SETTLED: Duration = Duration::from_millis(100);

/// Files that are only read are copied up to this size, and up to a total of [`ALL_READ_UP_TO`].
const READ_UP_TO: u64 = 16 << 20;
const ALL_READ_UP_TO: u64 = 128 << 20;

/// Maximum length of all files in an image together, holes included. The store describes 1 GiB of zeros with 40 bytes
/// (docs/internals/format.md, chunk map), so this takes 40 MiB. A longer one cannot be stored.
const ALL_LENGTHS: u64 = 1 << 50;

/// A copy that was made before the freeze.
#[derive(Debug)]
struct Ahead {
    part: PartPath,
    stamp: Stamp,
    /// Whether an unchanged time stamp proves that the content is unchanged.
    is_telling: bool,
}

/// A copy that shares blocks with a file, to be read when the job runs.
#[derive(Debug)]
struct Shared {
    copy: File,
    part: PartPath,
    size: u64,
}

/// What is captured of the job's files.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    tracked: Vec<PathBuf>,
    /// Folders of rekindle's own files that the job has open or mapped.
    ours: Vec<PathBuf>,
    /// Folders that are not part of a tracked one.
    apart: Vec<PathBuf>,
    limit: u64,
    ahead: BTreeMap<PathBuf, Ahead>,
    shared: Vec<Shared>,
    parts: usize,
    /// Notes from before the freeze.
    notes: Vec<String>,
}

/// The result of the capture in the freeze.
#[derive(Debug, Default)]
pub(crate) struct Captured {
    pub(crate) absent: Vec<JobPath>,
    pub(crate) tracked: Vec<TrackedFolder>,
    /// Notes on files that are not in the image.
    pub(crate) notes: Vec<String>,
    /// Files that are only read, and that may not exist when the job is restored.
    pub(crate) read: BTreeMap<PathBuf, KeptCopy>,
    /// The owners of the files that the job has open or mapped.
    pub(crate) owners: BTreeMap<PathBuf, Owner>,
    /// The extended attributes of all files and folders that a restore may create.
    pub(crate) attributes: Table,
}

impl Captured {
    /// Adds the attributes of these folders and FIFOs.
    pub(crate) fn add_attributes(
        &mut self,
        folders: &mut [Folder],
        fifos: &mut [Fifo],
        view: View<'_>,
    ) -> io::Result<()> {
        let table = &mut self.attributes;
        view.with(|way| {
            // Where the user finds nothing, it cannot create anything either.
            for folder in folders {
                let number = way.folder(&folder.path).and_then(|found| table.add(found.as_ref()));
                folder.attributes = number.ok().flatten();
            }
            for fifo in fifos {
                let number = way.find(&fifo.path).and_then(|found| table.add(&OwnedFd::from(found).into()));
                fifo.attributes = number.ok().flatten();
            }
        })
    }
}

/// A file that was examined.
struct Found {
    path: PathBuf,
    metadata: fs::Metadata,
    medium: Medium,
    mapped: bool,
    direct: bool,
    /// The number of its extended attributes.
    attributes: Option<u32>,
    /// The group of files that are put back together with it.
    group: PathBuf,
}

/// What was found of the job's files.
#[derive(Default)]
struct Survey {
    found: Vec<Found>,
    /// Names that do not exist beside databases.
    absent: Vec<PathBuf>,
    /// The content of tracked folders.
    tracked: Vec<TrackedFolder>,
    /// Tracked folders that do not exist.
    missing: Vec<PathBuf>,
    /// Groups with a file or folder that cannot be read, and the first such one. They are not in the image: a restore would
    /// put only a part of them back.
    unread: BTreeMap<PathBuf, select::Unread>,
    attributes: Table,
}

/// Files that are put back together, or not at all.
struct Group {
    /// Bytes that the copies take.
    bytes: u64,
    /// The same with the holes.
    length: u64,
    /// Whether all are in memory.
    in_memory: bool,
}

/// Which groups are in the image.
#[derive(Default)]
struct Groups {
    kept: BTreeSet<PathBuf>,
    too_long: BTreeSet<PathBuf>,
}

impl Groups {
    fn keep(&self, file: &Found) -> bool {
        self.kept.contains(&file.group)
    }
}

/// A file while it is captured.
struct Opened {
    file: File,
    shared: Option<File>,
}

/// Files that are open at the same time: a database has thousands.
const OPEN_AT_A_TIME: usize = 200;

impl Contents {
    pub(crate) fn new(tracked: &[PathBuf], ours: Vec<PathBuf>, limit: u64) -> Contents {
        Contents { tracked: tracked.to_vec(), apart: ours.clone(), ours, limit, ..Contents::default() }
    }

    /// The same, but the store is no part of a tracked folder.
    pub(crate) fn without_store(mut self, store: &Path) -> Contents {
        self.apart.push(store.to_path_buf());
        self
    }

    /// Bytes that the copies would take now. Also finds the data folders of databases.
    pub(crate) fn foresee(&mut self, tree: &[i32], view: View<'_>) -> io::Result<u64> {
        let servers = select::servers(tree);
        self.tracked.extend(view.with(|way| select::data_folders(servers, way))?);
        self.tracked.sort();
        self.tracked.dedup();
        // A folder within another one is part of that.
        let all = self.tracked.clone();
        self.tracked.retain(|folder| !all.iter().any(|other| other != folder && folder.starts_with(other)));
        let survey = self.find(select::written_now(tree), view)?;
        let groups = self.within_limit(&survey);
        self.notes = notes::without_place(&survey.tracked, view)?;
        let alone = survey.found.iter().filter(|file| groups.keep(file) && !self.is_tracked(&file.path));
        self.notes.extend(notes::without_copy(alone.filter(|file| file.medium == Medium::Disk), view)?);
        Ok(survey.found.iter().filter(|file| groups.keep(file)).map(Found::bytes).sum())
    }

    /// Keeps no files from disk, because memory has no room for them; files in memory are still kept.
    pub(crate) fn keep_none_of_the_disk(&mut self) {
        self.limit = 0;
    }

    /// Copies the large files into the image while the job runs.
    pub(crate) fn copy_ahead(
        &mut self,
        tree: &[i32],
        view: View<'_>,
        draft: &Beneath,
        cancelled: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<()> {
        let survey = self.find(select::written_now(tree), view)?;
        let groups = self.within_limit(&survey);
        let mut found = survey.found;
        found.retain(|file| groups.keep(file) && file.bytes() >= AHEAD_FROM);
        let mut found = found.into_iter().peekable();
        let at_a_time = AHEAD_AT_A_TIME.saturating_mul((tree.len() / LOOKED_AT).max(1) as u64);
        while found.peek().is_some() && !cancelled() {
            let (mut batch, mut bytes) = (Vec::new(), 0);
            while batch.len() < OPEN_AT_A_TIME && bytes < at_a_time {
                let Some(file) = found.next() else { break };
                // The file can be gone by now.
                let Some(Opened { file: open, shared }) = view.with(|way| file.open(way, true))?? else { continue };
                if shared.is_some() {
                    // A copy that shares blocks first writes dirty pages to the disk: better now than in the freeze.
                    let _ = open.sync_data();
                    continue;
                }
                bytes += file.bytes();
                let began = SystemTime::now();
                let stamp = Stamp::of(&open.metadata()?);
                batch.push((file, open, stamp, is_settled(&stamp, began)));
            }
            // A file can have been mapped and written to since it was examined. Such a page is written to again without a new
            // time stamp, and when the job is frozen, the file may be mapped no more. The look comes after the stamps, because a
            // mapping that is made later changes them; and before the copies, which have what was written before it.
            let Some(uses) = select::uses_now(&process::tree(view.root), cancelled) else { return Ok(()) };
            for (file, open, stamp, is_settled) in batch {
                let part = self.next_part()?;
                match copy::whole(&open, stamp.size, &create(draft, &part)?, cancelled) {
                    Err(_) if cancelled() => return Ok(()),
                    done => done?,
                }
                // Writes through a mapping can leave the time stamp unchanged, and on tmpfs always do.
                let is_used = file.mapped || file.direct || uses.has(&file.path, stamp.inode);
                let is_telling = !is_used && file.medium == Medium::Disk && is_settled;
                self.ahead.insert(file.path, Ahead { part, stamp, is_telling });
            }
        }
        Ok(())
    }

    /// Captures the files while the job is frozen. `files` are open for writing, `mapped` can be written through a
    /// mapping. Returns `Interrupted` once `stopped` says so: the job waits meanwhile.
    pub(crate) fn capture(
        &mut self,
        files: &mut Vec<OpenFile>,
        mapped: Vec<PathBuf>,
        view: View<'_>,
        draft: &Beneath,
        stopped: &(dyn Fn() -> bool + Sync),
    ) -> io::Result<Captured> {
        let open = files
            .iter()
            .map(|file| (file.path.to_path_buf(), select::Use { append: file.append, ..select::Use::default() }));
        let mut written: BTreeMap<PathBuf, select::Use> = open.collect();
        for path in mapped {
            written.entry(path).or_default().mapped = true;
        }
        let survey = self.find(written, view)?;
        let groups = self.within_limit(&survey);
        let Survey { found, mut absent, mut tracked, missing, unread, attributes } = survey;
        // If a folder is not put back, nothing in it is moved aside. One without files has nothing that could be left out.
        let with_files: BTreeSet<&Path> = found.iter().map(|file| file.group.as_path()).collect();
        let is_left_out =
            |path: &Path| unread.contains_key(path) || with_files.contains(path) && !groups.kept.contains(path);
        tracked.retain(|folder| !is_left_out(folder.path.as_path()));
        absent.retain(|path| select::beside(path).is_some_and(|database| groups.kept.contains(&database)));
        absent.extend(missing);
        let mut captured = Captured { tracked, attributes, ..Captured::default() };
        let places = files.iter().enumerate().map(|(at, file)| (file.path.to_path_buf(), at));
        let places: HashMap<PathBuf, usize> = places.collect();
        for batch in found.chunks(OPEN_AT_A_TIME) {
            if stopped() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let copied: Vec<&Found> = batch.iter().filter(|file| groups.keep(file) && !self.is_copied(file)).collect();
            // One switch to the user's rights for all files: each switch takes a thread.
            let opened = view.with(|way| {
                let shares = self.shared.len() < OPEN_AT_A_TIME;
                let open = |file: &&Found| file.open(way, shares && !self.ahead.contains_key(&file.path));
                copied.iter().map(open).collect::<io::Result<Vec<_>>>()
            })??;
            let mut opened: HashMap<&Path, Opened> =
                copied.iter().zip(opened).filter_map(|(file, opened)| Some((file.path.as_path(), opened?))).collect();
            let mut copies = Vec::new();
            for file in batch {
                let part = match groups.keep(file) {
                    true => Some(self.take(file, opened.remove(file.path.as_path()), draft, &mut copies)?),
                    false => None,
                };
                let known = match places.get(&file.path).and_then(|at| files.get_mut(*at)) {
                    Some(known) => known,
                    None => {
                        files.push(OpenFile::new(job_path(&file.path)?, 0));
                        files.last_mut().ok_or(io::ErrorKind::OutOfMemory)?
                    }
                };
                file.describe(part, known)?;
            }
            copy::all(&copies, stopped)?;
        }
        tracing::debug!(files = found.len(), shared = self.shared.len(), "files of the job");
        captured.absent = absent.iter().map(|path| job_path(path)).collect::<io::Result<_>>()?;
        // A file that was closed since is not in the image.
        for (_, ahead) in std::mem::take(&mut self.ahead) {
            let _ = draft.join(&ahead.part).remove_file();
        }
        let group = |file: &OpenFile| file.group.as_ref().unwrap_or(&file.path).to_path_buf();
        let left_out = files.iter().filter(|file| file.part.is_none() && file.stamp.is_some());
        let left_out = left_out.filter(|file| !unread.contains_key(&group(file)));
        let is_too_long = |file: &&OpenFile| groups.too_long.contains(&group(file));
        let (too_long, too_large) = left_out.partition::<Vec<_>, _>(is_too_long);
        captured.notes.extend(self.notes.clone());
        captured.notes.extend(notes::left_out(&too_large, Reason::Limit(self.limit)));
        captured.notes.extend(notes::left_out(&too_long, Reason::TooLong));
        captured.notes.extend(notes::unread(&unread));
        captured.notes.extend(captured.attributes.note());
        Ok(captured)
    }

    /// Copies small files that the job only reads and that can be deleted when it dies, for example by a process that
    /// survives the job's first one and cleans up.
    pub(crate) fn keep_read(
        &mut self,
        read: Vec<PathBuf>,
        began: SystemTime,
        view: View<'_>,
        draft: &Beneath,
        attributes: &mut Table,
    ) -> io::Result<BTreeMap<PathBuf, KeptCopy>> {
        let files: Vec<_> = view.with(|way| {
            let open = |path: PathBuf| {
                let file = way.open(&path).ok()?;
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
            let Ok(attributes) = attributes.add(&file) else { continue };
            left = rest;
            let part = self.next_part()?;
            copy::whole(&file, metadata.size(), &create(draft, &part)?, &|| false)?;
            let owner = Owner { uid: metadata.uid(), gid: metadata.gid() };
            kept.insert(path, KeptCopy { part, owner, stamp: Stamp::of(&metadata), attributes });
        }
        Ok(kept)
    }

    /// Reads the copies that share blocks with files of the job, which runs again.
    pub(crate) fn complete(&mut self, draft: &Beneath) -> io::Result<()> {
        for shared in std::mem::take(&mut self.shared) {
            copy::whole(&shared.copy, shared.size, &create(draft, &shared.part)?, &|| false)?;
        }
        Ok(())
    }

    /// Whether the copy from before the freeze is still correct.
    fn is_copied(&self, file: &Found) -> bool {
        let same = |ahead: &Ahead| ahead.is_telling && ahead.stamp == Stamp::of(&file.metadata);
        !file.mapped && self.ahead.get(&file.path).is_some_and(same)
    }

    /// Adds the content of a file to the image: it is copied already, or will be read later, or is copied now.
    fn take(
        &mut self,
        file: &Found,
        opened: Option<Opened>,
        draft: &Beneath,
        copies: &mut Vec<copy::Job>,
    ) -> io::Result<PartPath> {
        let size = file.metadata.size();
        let is_copied = self.is_copied(file);
        let ahead = self.ahead.remove(&file.path);
        if let Some(ahead) = ahead.as_ref().filter(|_| is_copied) {
            return Ok(ahead.part.clone());
        }
        let gone = || io::Error::new(io::ErrorKind::NotFound, format!("{} can no longer be read", file.path.display()));
        let Opened { file: open, shared } = opened.ok_or_else(gone)?;
        if let Some(copy) = shared {
            let part = self.next_part()?;
            self.shared.push(Shared { copy, part: part.clone(), size });
            return Ok(part);
        }
        let (part, into) = match ahead {
            Some(ahead) => {
                let into = draft.join(&ahead.part).change()?;
                (ahead.part, into)
            }
            None => {
                let part = self.next_part()?;
                let into = create(draft, &part)?;
                (part, into)
            }
        };
        copies.push(copy::Job::new(open, size, into)?);
        Ok(part)
    }

    /// Examines the files, the files that belong to them, and those of tracked folders.
    fn find(&self, written: BTreeMap<PathBuf, select::Use>, view: View<'_>) -> io::Result<Survey> {
        view.with(|way| {
            let (mut wanted, mut absent, mut survey) = (written, BTreeSet::new(), Survey::default());
            wanted.retain(|path, _| !self.ours.iter().any(|ours| path.starts_with(ours)));
            for folder in &self.tracked {
                let (entries, unread) =
                    select::below(folder, view.user.map(|user| user.uid), &self.apart, way, &mut survey.attributes);
                if let Some(unread) = unread {
                    if is_ours(&unread.error) {
                        return Err(unread.error);
                    }
                    survey.unread.insert(folder.clone(), unread);
                }
                if entries.is_empty() {
                    let found = way.metadata(folder);
                    survey.missing.extend(found.is_err_and(|error| select::is_gone(&error)).then(|| folder.clone()));
                    continue;
                }
                for (path, kind) in &entries {
                    if *kind == TrackedKind::File {
                        wanted.entry(path.clone()).or_default().append = false;
                    }
                }
                let entries = entries
                    .into_iter()
                    .filter_map(|(path, kind)| Some(TrackedEntry { path: JobPath::new(path).ok()?, kind }));
                let entries = entries.collect();
                survey.tracked.extend(JobPath::new(folder.as_path()).ok().map(|path| TrackedFolder { path, entries }));
            }
            for path in wanted.keys().cloned().collect::<Vec<_>>() {
                if !self.is_tracked(&path) {
                    let (there, missing) = select::companions(&path, Trusted::of(view.user), way);
                    for path in there {
                        wanted.entry(path).or_default();
                    }
                    absent.extend(missing);
                }
            }
            for (path, usage) in wanted {
                self.look(path, usage, way, &mut survey)?;
            }
            survey.absent = absent.into_iter().collect();
            Ok(survey)
        })?
    }

    /// Adds a file, unless its content is not part of the job's state, or it is gone: then only its size is known.
    fn look(&self, path: PathBuf, usage: select::Use, way: &Way, survey: &mut Survey) -> io::Result<()> {
        let mut attributes = None;
        let (seen, mut refused) = match way.open(&path) {
            Ok(file) => {
                attributes = Some(survey.attributes.add(&file));
                (Some((file.metadata()?, Medium::of(&file)?)), None)
            }
            // Another process may have a lease on it, or it is closed to the user.
            Err(error) => match seen(way, &path) {
                Ok((metadata, _)) if !metadata.is_file() => return Ok(()),
                Ok(seen) => (Some(seen), Some(error)),
                Err(error) => (None, Some(error)),
            },
        };
        match &refused {
            Some(error) if select::is_gone(error) => return Ok(()),
            // A shortage of resources on our side must not leave a file out of the image.
            Some(error) if is_ours(error) => return Err(io::Error::new(error.kind(), error.to_string())),
            _ => {}
        }
        let is_state = match seen.as_ref().map_or(Medium::Disk, |(_, medium)| *medium) {
            Medium::Memory => true,
            Medium::Kernel => false,
            Medium::Disk => usage.mapped || !usage.append,
        };
        if !is_state {
            return Ok(());
        }
        let attributes = attributes.transpose().unwrap_or_else(|error| {
            refused = Some(error);
            None
        });
        let group = match self.tracked.iter().find(|folder| path.starts_with(folder)) {
            Some(folder) => folder.clone(),
            None => select::database_of(&path, way).unwrap_or_else(|| path.clone()),
        };
        if let Some(error) = refused {
            let unread = select::Unread { path: path.clone(), error };
            survey.unread.entry(group.clone()).or_insert(unread);
        }
        survey.found.extend(seen.map(|(metadata, medium)| Found {
            path,
            metadata,
            medium,
            mapped: usage.mapped,
            direct: usage.direct,
            attributes: attributes.flatten(),
            group,
        }));
        Ok(())
    }

    fn is_tracked(&self, path: &Path) -> bool {
        self.tracked.iter().any(|folder| path.starts_with(folder))
    }

    /// The groups whose files are kept: all that are in memory anyway, and of the others the smallest first. But no
    /// group that is too long.
    fn within_limit(&self, survey: &Survey) -> Groups {
        let mut groups: BTreeMap<&Path, Group> = BTreeMap::new();
        for file in survey.found.iter().filter(|file| !survey.unread.contains_key(&file.group)) {
            let group = groups.entry(&file.group).or_insert(Group { bytes: 0, length: 0, in_memory: true });
            group.bytes = group.bytes.saturating_add(file.bytes());
            group.length = group.length.saturating_add(file.metadata.size());
            group.in_memory &= file.medium == Medium::Memory;
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_by_key(|(_, group)| (!group.in_memory, group.bytes, group.length));
        let (mut left, mut length_left) = (self.limit, ALL_LENGTHS);
        let mut all = Groups::default();
        for (path, group) in groups {
            let Some(shorter) = length_left.checked_sub(group.length) else {
                all.too_long.insert(path.to_path_buf());
                continue;
            };
            if !group.in_memory {
                // Those that follow are not smaller.
                let Some(rest) = left.checked_sub(group.bytes) else { break };
                left = rest;
            }
            all.kept.insert(path.to_path_buf());
            length_left = shorter;
        }
        all
    }

    fn next_part(&mut self) -> io::Result<PartPath> {
        self.parts += 1;
        format!("files/content-{}", self.parts).parse().map_err(io::Error::other)
    }
}

impl Found {
    /// Bytes that a copy takes.
    fn bytes(&self) -> u64 {
        // st_blocks counts 512 bytes (stat(2)). On a compressing file system a file occupies less than its copy will.
        self.metadata.size().min((self.metadata.blocks() * 512).max(4096))
    }

    /// `None` if the file is gone. Also makes a copy that shares its blocks, if `shares` is set, the file is large
    /// enough and the file system can do it.
    fn open(&self, way: &Way, shares: bool) -> io::Result<Option<Opened>> {
        let file = match way.open(&self.path) {
            Err(error) if is_ours(&error) => return Err(error),
            Err(_) => return Ok(None),
            Ok(file) => file,
        };
        let is_large = self.medium == Medium::Disk && self.metadata.size() >= AHEAD_FROM;
        let share = || way.beside(&self.path, |folder| blocks::shared_copy(&file, folder)).ok();
        let shared = (shares && is_large).then(share).flatten();
        Ok(Some(Opened { file, shared }))
    }

    /// Records its metadata with that of its descriptors.
    fn describe(&self, part: Option<PartPath>, known: &mut OpenFile) -> io::Result<()> {
        let stamp = Stamp::of(&self.metadata);
        known.size = stamp.size;
        known.mode = Some(self.metadata.mode());
        known.attributes = self.attributes;
        known.owner = Some(Owner { uid: self.metadata.uid(), gid: self.metadata.gid() });
        known.group = (self.group != self.path).then(|| job_path(&self.group)).transpose()?;
        (known.part, known.stamp) = (part, Some(stamp));
        Ok(())
    }
}

/// A file that cannot be opened, or what is in its place.
fn seen(way: &Way, path: &Path) -> io::Result<(fs::Metadata, Medium)> {
    let found = way.find(path)?;
    Ok((found.metadata()?, found.medium()?))
}

/// Whether the error is about us or the machine, and not about the file.
fn is_ours(error: &io::Error) -> bool {
    let codes = [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EIO];
    error.raw_os_error().is_some_and(|code| codes.contains(&code))
}

fn is_settled(stamp: &Stamp, now: SystemTime) -> bool {
    let changed = u64::try_from(stamp.changed_ns.max(stamp.modified_ns)).unwrap_or_default();
    let changed = SystemTime::UNIX_EPOCH + Duration::from_nanos(changed);
    now.duration_since(changed).is_ok_and(|age| age >= SETTLED)
}

fn job_path(path: &Path) -> io::Result<JobPath> {
    JobPath::new(path).map_err(io::Error::other)
}

fn create(draft: &Beneath, part: &PartPath) -> io::Result<File> {
    let file = draft.join(part);
    if let Some(folder) = file.parent() {
        folder.make_dirs(0o700)?;
    }
    file.create_new(0o600)
}

#[cfg(test)]
mod tests;

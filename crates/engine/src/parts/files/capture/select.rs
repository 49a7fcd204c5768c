//! Selects the files that the job writes, and the files that belong to them.

use std::collections::{BTreeMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use super::super::aside;
use super::super::nameless;
use super::super::place::{Trusted, may_create_in};
use super::super::rights::Table;
use super::way::Way;
use rekindle_os::blocks::Medium;
use rekindle_os::identity;
use rekindle_os::maps::{self, Mapping};
use rekindle_os::process;
use rekindle_store::manifest::{Owner, TrackedEntry, TrackedFolder, TrackedKind};

/// How a job writes to a file.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Use {
    /// Only appends, through all of its descriptors.
    pub(super) append: bool,
    /// Writes through a mapping.
    pub(super) mapped: bool,
    /// Writes past the page cache (O_DIRECT): the time stamp is of the beginning of a write, not of its end.
    pub(super) direct: bool,
}

/// The files that these processes (pids as we see them) write to now, from /proc. Files that a process opens or closes
/// meanwhile can be missing or superfluous: the freeze checks again, with CRIU's image.
pub(super) fn written_now(tree: &[i32]) -> BTreeMap<PathBuf, Use> {
    let mut found: BTreeMap<PathBuf, Use> = BTreeMap::new();
    for pid in tree {
        for (path, flags) in descriptors(*pid) {
            let known = found.entry(path).or_insert_with(|| Use { append: true, ..Use::default() });
            known.append &= flags & libc::O_APPEND != 0;
            known.direct |= flags & libc::O_DIRECT != 0;
        }
        let maps = maps::read(*pid).unwrap_or_default();
        for path in maps::mappings(&maps).filter_map(written_mapping) {
            found.entry(path).or_default().mapped = true;
        }
    }
    found
}

/// The files whose content can change without a new time stamp.
#[derive(Debug, Default)]
pub(super) struct Uses {
    /// Inodes of files that are mapped, whatever name they have now.
    mapped: HashSet<u64>,
    direct: HashSet<PathBuf>,
}

impl Uses {
    pub(super) fn has(&self, path: &Path, inode: u64) -> bool {
        self.mapped.contains(&inode) || self.direct.contains(path)
    }
}

/// How these processes use files now; `None` once it is cancelled.
pub(super) fn uses_now(tree: &[i32], cancelled: &dyn Fn() -> bool) -> Option<Uses> {
    let mut found = Uses::default();
    for pid in tree {
        if cancelled() {
            return None;
        }
        let direct = descriptors(*pid).into_iter().filter(|(_, flags)| flags & libc::O_DIRECT != 0);
        found.direct.extend(direct.map(|(path, _)| path));
        let maps = maps::read(*pid).unwrap_or_default();
        found.mapped.extend(maps::mappings(&maps).filter(is_written).map(|mapping| mapping.inode));
    }
    Some(found)
}

/// The files that a process has open for writing, with the flags.
fn descriptors(pid: i32) -> Vec<(PathBuf, i32)> {
    let files = process::descriptors(pid).filter(|(_, path)| path.is_absolute());
    let described = files.filter_map(|(number, path)| Some((path, process::open_flags(pid, number).ok()?)));
    described.filter(|(_, flags)| flags & libc::O_ACCMODE != libc::O_RDONLY).collect()
}

/// The file of a mapping, if it is mapped shared and writable and has a name.
fn written_mapping(mapping: Mapping<'_>) -> Option<PathBuf> {
    let is_named = mapping.name.starts_with(b"/") && !mapping.name.ends_with(b" (deleted)");
    (is_written(&mapping) && is_named).then(|| PathBuf::from(OsString::from_vec(mapping.name.to_vec())))
}

fn is_written(mapping: &Mapping<'_>) -> bool {
    mapping.access.contains('w') && mapping.is_shared()
}

/// Folders for files that programs remove themselves.
const TEMPORARY: [&str; 4] = ["/tmp", "/var/tmp", "/run", "/dev/shm"];

/// Whether a file may not exist when the job is restored: it is temporary, or younger than the job.
pub(super) fn may_go(path: &Path, metadata: &fs::Metadata, medium: Medium, began: SystemTime) -> bool {
    let is_temporary = TEMPORARY.iter().any(|folder| path.starts_with(folder));
    let is_young = metadata.modified().is_ok_and(|modified| modified > began);
    medium != Medium::Kernel && (medium == Medium::Memory || is_temporary || is_young)
}

/// Suffixes of the files beside an SQLite database: the write-ahead log, its index, and the rollback journal.
const BESIDE: [&str; 3] = ["-wal", "-shm", "-journal"];
/// The first bytes of an SQLite database.
const SQLITE: &[u8; 16] = b"SQLite format 3\0";

/// The database that a file belongs to, by its name.
pub(super) fn beside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.as_bytes();
    let stem = BESIDE.iter().find_map(|ending| name.strip_suffix(ending.as_bytes()))?;
    Some(path.with_file_name(OsString::from_vec(stem.to_vec())))
}

/// The database that a file is, or belongs to.
pub(super) fn database_of(path: &Path, way: &Way) -> Option<PathBuf> {
    let is_one = |path: &PathBuf| {
        is_database(path, way) || may_be_encrypted(path, way) || (is_closed(path, way) && has_companion(path, way))
    };
    [beside(path), Some(path.to_path_buf())].into_iter().flatten().find(is_one)
}

/// Whether it can be an encrypted SQLite database (SQLCipher, SEE), which has no known first bytes: it has whole pages, and
/// its name is not that of a log or journal.
fn may_be_encrypted(path: &Path, way: &Way) -> bool {
    const LEAST_PAGE: u64 = 512;
    let has_pages =
        |found: fs::Metadata| found.is_file() && found.size() > 0 && found.size().is_multiple_of(LEAST_PAGE);
    beside(path).is_none() && way.metadata(path).is_ok_and(has_pages)
}

/// Whether it is a file whose first bytes cannot be read.
fn is_closed(path: &Path, way: &Way) -> bool {
    let refused = way.open(path).is_err_and(|error| !is_gone(&error));
    refused && way.metadata(path).is_ok_and(|metadata| metadata.is_file())
}

fn has_companion(path: &Path, way: &Way) -> bool {
    names_beside(path).any(|path| way.metadata(&path).is_ok())
}

fn names_beside(database: &Path) -> impl Iterator<Item = PathBuf> {
    BESIDE.iter().map(|ending| {
        let mut name = database.as_os_str().to_owned();
        name.push(ending);
        PathBuf::from(name)
    })
}

fn is_database(path: &Path, way: &Way) -> bool {
    let mut start = [0; SQLITE.len()];
    way.open(path).and_then(|mut file| file.read_exact(&mut start)).is_ok() && start == *SQLITE
}

/// The files of the database that `path` belongs to: those that exist, and those that do not. SQLite would take a
/// journal that appears after the snapshot for the journal of the restored database.
///
/// What another user has put beside a database in a folder such as /tmp is neither: the job does not use it.
pub(super) fn companions(path: &Path, trusted: Trusted, way: &Way) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let Some(database) = database_of(path, way) else { return (Vec::new(), Vec::new()) };
    let owner = |path: &Path| way.metadata(path).map(|metadata| metadata.uid()).ok();
    let its = owner(&database);
    let (mut there, mut missing) = (Vec::new(), Vec::new());
    for path in names_beside(&database).chain([database.clone()]) {
        match owner(&path) {
            None => missing.push(path),
            Some(owner) if trusted.accepts(owner, its.or(Some(0))) => there.push(path),
            Some(owner) => {
                tracing::warn!(
                    "{} belongs to user {owner} and is not taken for a part of the database beside it",
                    path.display()
                );
            }
        }
    }
    (there, missing)
}

/// Names of the program of a PostgreSQL server; forks of PostgreSQL have the last ones.
const SERVERS: [&str; 4] = ["postgres", "postmaster", "edb-postgres", "agensgraph"];

/// The working directories of the processes that are PostgreSQL servers, and the user of each.
pub(super) fn servers(tree: &[i32]) -> BTreeMap<PathBuf, u32> {
    let is_server = |pid: &i32| {
        let program = process::executable(*pid);
        // What it was started from may have been replaced by an update.
        let name = program.as_deref().and_then(Path::file_name).map(OsStr::as_bytes).unwrap_or_default();
        let name = name.strip_suffix(b" (deleted)").unwrap_or(name);
        SERVERS.iter().any(|server| name == server.as_bytes())
    };
    let server = |pid: &i32| {
        let user = process::user_ids(*pid)?.get(1).copied()?;
        Some((fs::read_link(format!("/proc/{pid}/cwd")).ok()?, user))
    };
    tree.iter().filter(|pid| is_server(pid)).filter_map(server).collect()
}

/// The data folders of these servers (their working directories), and the folders outside of them with tablespaces and
/// the write-ahead log. A server writes to files that it has closed.
///
/// As the server does, this accepts only folders that nobody but its user can change: their files are put back.
pub(super) fn data_folders(servers: BTreeMap<PathBuf, u32>, way: &Way) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for (folder, user) in servers {
        const WRITE: u32 = 0o022;
        let is_its_own = |path: &Path| {
            let metadata = way.folder(path).and_then(|folder| folder.metadata());
            metadata.is_ok_and(|metadata| metadata.uid() == user && metadata.mode() & WRITE == 0)
        };
        let is_version = |version: fs::Metadata| version.is_file() && version.uid() == user;
        if !is_its_own(&folder) || !way.metadata(&folder.join("PG_VERSION")).is_ok_and(is_version) {
            continue;
        }
        let mut targets = Vec::new();
        let within = folder.join("pg_tblspc");
        if let Ok(spaces) = way.folder(&within).and_then(|spaces| Ok((spaces.entries()?, spaces))) {
            let entries = spaces.0.into_iter().flatten().flatten();
            targets.extend(entries.filter_map(|entry| Some(within.join(fs::read_link(entry.path()).ok()?))));
        }
        let log = way.folder(&folder).and_then(|folder| folder.link("pg_wal"));
        targets.extend(log.map(|target| folder.join(target)));
        found.extend(targets.into_iter().filter(|target| is_its_own(target)).map(|target| plain(&target)));
        found.push(folder);
    }
    found
}

/// The path without the steps that lead back: those of the kernel have none.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            part => plain.push(part),
        }
    }
    plain
}

/// A file or folder that could not be read, so that what belongs to it is not in the image.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) path: PathBuf,
    pub(super) error: io::Error,
}

/// Whether the error says that there is no such file.
pub(super) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

/// A folder and everything below it, each folder before its content, and the first thing that could not be read.
///
/// A folder below it that is closed to `user` (`lost+found` of a file system) is not part of it: the job cannot change
/// anything in there. Neither is what the kernel makes up (/proc below /), nor what a restore has kept, nor what is
/// `apart`: the store. Nor are names that CRIU and images have for deleted files: a restore would create files of these
/// names when the images and the dump are long gone.
pub(super) fn below(
    folder: &Path,
    user: Option<u32>,
    apart: &[PathBuf],
    way: &Way,
    attributes: &mut Table,
) -> (Vec<(PathBuf, TrackedKind)>, Option<Unread>) {
    let mut unread = None;
    let mut fail = |path: &Path, error: io::Error| {
        if !is_gone(&error) {
            unread.get_or_insert_with(|| Unread { path: path.to_path_buf(), error });
        }
    };
    let kind_of = |metadata: &fs::Metadata| {
        let owner = Owner { uid: metadata.uid(), gid: metadata.gid() };
        TrackedKind::Folder { mode: metadata.mode(), owner, attributes: None }
    };
    let mut all = Vec::new();
    let look = |path: &Path| way.folder(path).and_then(|open| Ok((open.metadata()?, open)));
    match look(folder) {
        Ok((metadata, open)) if !matches!(open.entries(), Ok(None)) => {
            all.push((folder.to_path_buf(), kind_of(&metadata)));
        }
        Ok(_) => {}
        Err(error) => fail(folder, error),
    }
    let mut at = 0;
    while let Some((folder, kind)) = all.get_mut(at) {
        at += 1;
        let TrackedKind::Folder { owner, attributes: number, .. } = kind else { continue };
        // It stays open while its entries are read.
        let listed = look(folder).and_then(|(_, open)| {
            *number = attributes.add(open.as_ref())?;
            Ok((open.entries()?, open))
        });
        let (entries, _open) = match listed {
            Ok(listed) => listed,
            Err(error) => {
                if error.kind() == io::ErrorKind::PermissionDenied
                    && at > 1
                    && user != Some(owner.uid)
                    && is_shut(folder, way)
                {
                    *kind = TrackedKind::Other;
                } else {
                    fail(folder, error);
                }
                continue;
            }
        };
        let folder = folder.clone();
        for entry in entries.into_iter().flatten() {
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) => {
                    fail(&folder, error);
                    break;
                }
            };
            let name = entry.file_name();
            let path = folder.join(&name);
            let metadata = match entry.metadata() {
                Ok(metadata) => metadata,
                Err(error) => {
                    fail(&path, error);
                    continue;
                }
            };
            let kind = if metadata.is_dir() {
                if aside::is_ours(&name) || apart.contains(&path) {
                    continue;
                }
                kind_of(&metadata)
            } else if nameless::is_of_a_dump(&name) || nameless::is_of_an_image(&name) {
                continue;
            } else if metadata.is_file() {
                TrackedKind::File
            } else if metadata.is_symlink() {
                let owner = Owner { uid: metadata.uid(), gid: metadata.gid() };
                // The user's link would be followed where that of somebody else is not.
                let is_its_own = user.is_none_or(|user| owner.uid == user || owner.uid == 0);
                match fs::read_link(entry.path()).ok().and_then(|target| target.to_str().map(str::to_owned)) {
                    Some(target) if is_its_own => TrackedKind::Link { target, owner: Some(owner) },
                    _ => TrackedKind::Other,
                }
            } else {
                TrackedKind::Other
            };
            all.push((path, kind));
        }
    }
    (all, unread)
}

/// Whether a folder cannot be entered: then nothing in it can be opened or made.
fn is_shut(folder: &Path, way: &Way) -> bool {
    way.metadata(&folder.join(".")).is_err()
}

/// A file of a tracked folder that the user can change and a restore could not put back: what it replaces is kept in a
/// new folder, and the user may create none that would do ([`aside`]).
pub(super) fn without_place(tracked: &TrackedFolder, user: u32) -> Option<PathBuf> {
    const WRITE: u32 = 2;
    let may_create = |folder: &Path| may_create_in(folder).is_ok();
    let may_change = |path: &Path| {
        // Its owner can lend the right to write it.
        let is_its_own = || identity::reach(path, 0).is_ok_and(|found| found.st_uid == user);
        identity::reach(path, WRITE).is_ok() || is_its_own()
    };
    if tracked.path.parent().is_some_and(may_create) {
        return None;
    }
    let mut served = HashSet::new();
    for TrackedEntry { path, kind } in &tracked.entries {
        let is_served = path.parent().is_some_and(|above| served.contains(above));
        match kind {
            TrackedKind::Folder { .. } if is_served || may_create(path) => drop(served.insert(path.as_path())),
            TrackedKind::File if !is_served && may_change(path) => return Some(path.to_path_buf()),
            _ => {}
        }
    }
    None
}

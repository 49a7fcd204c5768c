//! Reads CRIU's image files: magics, then records of a little-endian length and a protobuf message (CRIU `image.c`).
//!
//! All content may be damaged: lengths are checked against the file before anything is allocated.

mod checked;
mod cores;
mod datagrams;
mod descriptors;
mod devices;
mod eventfds;
mod links;
mod locks;
mod mappings;
mod memfds;
mod peers;
mod posix_timers;
mod queues;
mod rewrite;
mod signals;
mod sockets;
mod streams;
mod timers;
mod told;
mod unnamed;
mod without_memory;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use prost::Message;

pub use checked::{CheckedFile, checked_files};
pub use cores::{forget_policies, securebits, stopped};
pub use datagrams::{DatagramSocket, datagram_sockets};
pub use descriptors::{UnixListener, descriptors, timers, unix_listeners};
pub use devices::{Replaced, without_devices};
pub use eventfds::{EventfdPlace, describe_eventfds, eventfds};
pub(crate) use eventfds::{Made, made_eventfds};
pub use links::{Holder, LinkRemap, link_remaps, rename_link_remaps};
pub use locks::{LostLock, LostLocks, lost_locks};
pub use mappings::{correct_access, locked, scarce, written_by_mappings};
pub use memfds::memfd_names;
pub use peers::{Dangling, dangling_sockets};
pub use posix_timers::{UnknownTimer, correct_posix_timers};
pub use queues::{Queues, Stuck, keep_in_flight};
pub use signals::open_without_signals;
pub use sockets::{TcpSocket, close_connections, close_connections_outwards, tcp_sockets};
pub use streams::{Behind, Unsent, behind, complete, set_unsent_apart, unsent};
pub use timers::restart_timers;
pub use told::told;
pub use unnamed::{Known, Unnamed, UnnamedFiles};
pub use without_memory::without_memory;

use rekindle_os::beneath::Beneath;

use super::proto::{FileEntry, PagemapEntry, PagemapHead, PstreeEntry, RemapEntry, StatsEntry};

/// `IMG_COMMON_MAGIC` and `IMG_SERVICE_MAGIC`, followed by the type's own magic.
const COMMON: u32 = 0x5456_4319;
const SERVICE: u32 = 0x5510_5940;
const PSTREE: u32 = 0x5027_3030;
const FILES: u32 = 0x5630_3138;
const FDINFO: u32 = 0x5621_3732;
const IDS: u32 = 0x5443_2030;
const PAGEMAP: u32 = 0x5608_4025;
const FS: u32 = 0x5140_3912;
const REMAP: u32 = 0x5913_3954;
const STATS: u32 = 0x5709_3306;

/// Size of a page in CRIU's images on x86-64.
pub const PAGE: u64 = 4096;
/// `PE_PRESENT`: the page is in the pages file.
const PRESENT: u32 = 4;

/// Why an image file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// An eventfd that the image describes cannot be made.
    #[error("cannot make an eventfd of the image")]
    Eventfd {
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The file is not what its name says, or is incomplete.
    #[error("{path} is damaged: {what}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The problem.
        what: String,
    },
}

fn damaged(path: &Beneath, what: impl Into<String>) -> Error {
    Error::Damaged { path: path.path().into(), what: what.into() }
}

/// Replaces the content of an image file.
fn put(path: &Beneath, bytes: &[u8]) -> Result<(), Error> {
    let write = |mut file: File| {
        file.set_len(0)?;
        file.write_all(bytes)
    };
    path.change().and_then(write).map_err(|source| Error::Write { path: path.path().into(), source })
}

/// The records of an image file.
struct Records {
    path: Beneath,
    bytes: Vec<u8>,
    at: usize,
}

impl Records {
    fn open(path: Beneath, magic: u32) -> Result<Records, Error> {
        Records::begin(path, u64::MAX, magic)
    }

    /// The same, but only the first `most` bytes.
    fn begin(path: Beneath, most: u64, magic: u32) -> Result<Records, Error> {
        let mut bytes = Vec::new();
        let read = path.read().and_then(|file| file.take(most).read_to_end(&mut bytes));
        read.map_err(|source| Error::Read { path: path.path().into(), source })?;
        let mut records = Records { path, bytes, at: 0 };
        let first = records.word();
        if !matches!(first, Some(COMMON | SERVICE)) || records.word() != Some(magic) {
            return Err(damaged(&records.path, "it does not begin with CRIU's magic number"));
        }
        Ok(records)
    }

    fn word(&mut self) -> Option<u32> {
        let bytes = self.bytes.get(self.at..self.at + 4)?.try_into().ok()?;
        self.at += 4;
        Some(u32::from_le_bytes(bytes))
    }

    fn next<M: Message + Default>(&mut self) -> Result<Option<M>, Error> {
        if self.at == self.bytes.len() {
            return Ok(None);
        }
        let length = self.word().and_then(|n| usize::try_from(n).ok());
        let record = length.and_then(|n| self.bytes.get(self.at..self.at.checked_add(n)?));
        let Some(record) = record else {
            return Err(damaged(&self.path, format!("a record is cut at byte {}", self.at)));
        };
        let message = M::decode(record).map_err(|e| damaged(&self.path, e.to_string()))?;
        self.at += record.len();
        Ok(Some(message))
    }

    /// Skips the data that follows a record.
    fn skip(&mut self, bytes: u32) -> Result<(), Error> {
        let end = usize::try_from(bytes).ok().and_then(|bytes| self.at.checked_add(bytes));
        let Some(end) = end.filter(|end| *end <= self.bytes.len()) else {
            return Err(damaged(&self.path, format!("the data at byte {} is cut", self.at)));
        };
        self.at = end;
        Ok(())
    }

    fn all<M: Message + Default>(mut self) -> Result<Vec<M>, Error> {
        let mut all = Vec::new();
        while let Some(message) = self.next()? {
            all.push(message);
        }
        Ok(all)
    }
}

/// The process ids that a restore of the image needs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ids {
    /// The processes, parents first.
    pub processes: Vec<i32>,
    /// Every number in use as a process, thread, group or session id; sorted.
    pub all: Vec<i32>,
}

/// Changes the image so that every child of the root that does not lead its session gets a session of its own.
///
/// The parent of such a process is gone, and the root adopted it: a daemon that forked twice. CRIU can give it a parent
/// and a foreign session only through a helper process that ends. Then it belongs to pid 1, because the root becomes a
/// subreaper too late, and it would be missing in the next image.
///
/// Returns a process of a session or process group that this takes apart, if there is one. Then the image must not be used.
///
/// # Errors
/// When pstree.img is missing or damaged, or cannot be written.
pub fn adopt_daemons(dir: &Beneath) -> Result<Option<u32>, Error> {
    let path = dir.join("pstree.img");
    let before: Vec<PstreeEntry> = Records::open(path.clone(), PSTREE)?.all()?;
    let mut entries = before.clone();
    lead_sessions(&mut entries);
    if entries == before {
        return Ok(None);
    }
    if let Some(torn) = torn(&before, &entries) {
        return Ok(Some(torn));
    }
    let mut bytes: Vec<u8> = [COMMON, PSTREE].iter().flat_map(|word| word.to_le_bytes()).collect();
    for entry in &entries {
        let record = entry.encode_to_vec();
        let length = u32::try_from(record.len()).map_err(|e| damaged(&path, e.to_string()))?;
        bytes.extend(length.to_le_bytes());
        bytes.extend(record);
    }
    put(&path, &bytes).map(|()| None)
}

/// A process, its parent, its process group and its session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// The process.
    pub pid: u32,
    /// Its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
}

/// A process of a session or process group that [`adopt_daemons`] would take apart. The first process is the root, and parents
/// come before their children.
#[must_use]
pub fn torn_session(processes: &[Member]) -> Option<u32> {
    let entry = |of: &Member| PstreeEntry {
        pid: of.pid,
        ppid: of.parent,
        pgid: of.group,
        sid: of.session,
        threads: Vec::new(),
    };
    let before: Vec<PstreeEntry> = processes.iter().map(entry).collect();
    let mut after = before.clone();
    lead_sessions(&mut after);
    torn(&before, &after)
}

/// A process whose session or process group consists of other processes than before. The numbers may be others.
fn torn(before: &[PstreeEntry], after: &[PstreeEntry]) -> Option<u32> {
    let (mut sessions, mut groups) = (Renumbered::default(), Renumbered::default());
    let mut pairs = before.iter().zip(after);
    let (apart, _) = pairs.find(|(then, now)| {
        let is_apart = sessions.is_apart(then.sid, now.sid);
        groups.is_apart(then.pgid, now.pgid) || is_apart
    })?;
    // One that the root has adopted is the reason.
    let root = before.first().map_or(0, |root| root.pid);
    let moved = before.iter().zip(after).filter(|(then, now)| then.sid == apart.sid && then.sid != now.sid);
    let adopted = moved.map(|(then, _)| then).find(|then| then.ppid == root);
    Some(adopted.unwrap_or(apart).pid)
}

/// What each number has become, and what each was.
#[derive(Default)]
struct Renumbered(BTreeMap<u32, u32>, BTreeMap<u32, u32>);

impl Renumbered {
    /// Whether others with either number have another one in its place.
    fn is_apart(&mut self, then: u32, now: u32) -> bool {
        let Renumbered(to, from) = self;
        *to.entry(then).or_insert(now) != now || *from.entry(now).or_insert(then) != then
    }
}

fn lead_sessions(entries: &mut [PstreeEntry]) {
    let Some((root, root_session)) = entries.first().map(|root| (root.pid, root.sid)) else { return };
    let daemons: Vec<(u32, u32)> = entries
        .iter()
        .filter(|e| e.ppid == root && e.sid != root_session && e.sid != e.pid)
        .map(|e| (e.pid, e.sid))
        .collect();
    for (daemon, session) in daemons {
        // Parents come before their children.
        let mut below = vec![daemon];
        for entry in entries.iter() {
            if below.contains(&entry.ppid) {
                below.push(entry.pid);
            }
        }
        let moves = |e: &PstreeEntry| below.contains(&e.pid) && e.sid == session;
        let moved: Vec<u32> = entries.iter().filter(|e| moves(e)).map(|e| e.pid).collect();
        for entry in entries.iter_mut().filter(|e| moved.contains(&e.pid)) {
            entry.sid = daemon;
            // A process group is within one session, and a session leader also leads its group.
            if entry.pid == daemon || !moved.contains(&entry.pgid) {
                entry.pgid = daemon;
            }
        }
    }
}

/// Reads pstree.img.
///
/// # Errors
/// When it is missing or damaged.
pub fn ids(dir: &Beneath) -> Result<Ids, Error> {
    let path = dir.join("pstree.img");
    let entries: Vec<PstreeEntry> = Records::open(path.clone(), PSTREE)?.all()?;
    let signed = |id: u32| i32::try_from(id).map_err(|_| damaged(&path, "a pid is out of range"));
    let mut ids = Ids::default();
    for entry in entries {
        ids.processes.push(signed(entry.pid)?);
        // The first thread is the process itself. For a process that is dead and not reaped yet, CRIU does not set its
        // id (seen in 4.2.1, seize.c, collect_threads), and writes whatever was in its memory; a restore does not read
        // it (pstree.c, read_one_pstree_item).
        let threads = entry.threads.iter().skip(1);
        for id in threads.chain([&entry.pid, &entry.pgid, &entry.sid]) {
            ids.all.push(signed(*id)?);
        }
    }
    ids.all.sort_unstable();
    ids.all.dedup();
    Ok(ids)
}

/// A regular file that a task of the image has open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenFile {
    /// Absolute path in the job's mount namespace.
    pub path: PathBuf,
    /// Flags of open(2).
    pub flags: i32,
    /// The offset.
    pub position: u64,
}

/// The regular files of files.img with a name: their own, or one that CRIU gave them (`link_remap.N`).
///
/// # Errors
/// When an image file is damaged.
pub fn open_files(dir: &Beneath) -> Result<Vec<OpenFile>, Error> {
    let names = names(dir)?;
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let named = entries.into_iter().filter_map(|entry| {
        let path = names.get(&entry.id)?.clone();
        let reg = entry.reg?;
        Some(OpenFile { path, flags: reg.flags.cast_signed(), position: reg.pos })
    });
    Ok(named.collect())
}

/// The paths of the regular files of files.img with a name, by their id: their own name, or one that CRIU gave them.
fn names(dir: &Beneath) -> Result<BTreeMap<u32, PathBuf>, Error> {
    let remaps = remaps(dir)?;
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let by_id = |id: u32| entries.iter().find(|e| e.id == id).and_then(|e| e.reg.as_ref());
    let named = entries.iter().filter_map(|entry| {
        let reg = entry.reg.as_ref()?;
        let name = match remaps.iter().find(|remap| remap.orig_id == entry.id) {
            None => &reg.name,
            Some(remap) if remap.is_link() => &by_id(remap.remap_id)?.name,
            Some(_) => return None,
        };
        Some((entry.id, absolute(name)))
    });
    Ok(named.collect())
}

/// The path of a file, whose name in the image may begin with a slash or not.
fn absolute(name: &[u8]) -> PathBuf {
    let slashes = name.iter().take_while(|byte| **byte == b'/').count();
    Path::new("/").join(OsStr::from_bytes(name.get(slashes..).unwrap_or_default()))
}

/// The absolute paths that UNIX sockets of the image are bound to.
///
/// # Errors
/// When files.img is missing or damaged.
pub fn bound_paths(dir: &Beneath) -> Result<Vec<PathBuf>, Error> {
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let path = |entry: &FileEntry| {
        let name = entry.unix.as_ref()?.name.split(|byte| *byte == 0).next()?;
        name.starts_with(b"/").then(|| PathBuf::from(OsStr::from_bytes(name)))
    };
    Ok(entries.iter().filter_map(path).collect())
}

fn remaps(dir: &Beneath) -> Result<Vec<RemapEntry>, Error> {
    let path = dir.join("remap-fpath.img");
    if !path.is_there() {
        return Ok(Vec::new());
    }
    Records::open(path, REMAP)?.all()
}

/// Compares every page map with the size of its pages file: CRIU reads past the end of a short one and then waits for
/// ever, so this comes before each restore. Returns the bytes of all pages files.
///
/// # Errors
/// When a file is missing, damaged, or has another size than in its map.
pub fn check_pages(dir: &Beneath) -> Result<u64, Error> {
    let mut total = 0;
    for name in names_in(dir)? {
        let path = dir.join(&name);
        if name.starts_with("pagemap-") && name.ends_with(".img") {
            total += check_pagemap(dir, &path)?;
        } else if let Some(pid) = name.strip_prefix("mm-") {
            // A process with memory has a page map, even if it is empty.
            let pagemap = dir.join(format!("pagemap-{pid}"));
            pagemap.metadata().map_err(|source| Error::Read { path: pagemap.path().into(), source })?;
        }
    }
    Ok(total)
}

/// The names of the files, as text.
fn names_in(dir: &Beneath) -> Result<Vec<String>, Error> {
    let names = dir.list().map_err(|source| Error::Read { path: dir.path().into(), source })?;
    Ok(names.iter().map(|name| name.to_string_lossy().into_owned()).collect())
}

fn check_pagemap(dir: &Beneath, path: &Beneath) -> Result<u64, Error> {
    let map = page_runs(path)?;
    let want = map.bytes(path)?;
    let file = dir.join(format!("pages-{}.img", map.pages_id));
    let have = match file.metadata() {
        Ok(metadata) => metadata.len(),
        Err(e) if e.kind() == io::ErrorKind::NotFound && want == 0 => 0,
        Err(source) => return Err(Error::Read { path: file.path().into(), source }),
    };
    if have != want {
        return Err(damaged(&file, format!("{have} bytes, its page map says {want}")));
    }
    Ok(have)
}

/// Pages that are consecutive in memory and in the pages file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRun {
    /// The address of the first page.
    pub address: u64,
    /// Number of pages.
    pub pages: u64,
}

/// A page map's description of its pages file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRuns {
    /// The file is `pages-ID.img`.
    pub pages_id: u32,
    /// The present pages, in the order of the file.
    pub runs: Vec<PageRun>,
}

impl PageRuns {
    /// The size that the pages file must have.
    ///
    /// # Errors
    /// When the counts overflow.
    pub fn bytes(&self, path: &Beneath) -> Result<u64, Error> {
        let pages = self.runs.iter().try_fold(0_u64, |sum, run| sum.checked_add(run.pages));
        pages.and_then(|pages| pages.checked_mul(PAGE)).ok_or_else(|| damaged(path, "page counts overflow"))
    }
}

/// Reads the beginning of a page map: the number of its pages file.
///
/// # Errors
/// When it is missing or damaged.
pub fn pages_id(path: &Beneath) -> Result<u32, Error> {
    let head: Option<PagemapHead> = Records::open(path.clone(), PAGEMAP)?.next()?;
    head.map(|head| head.pages_id).ok_or_else(|| damaged(path, "no head"))
}

/// Reads a page map.
///
/// # Errors
/// When it is missing or damaged.
pub fn page_runs(path: &Beneath) -> Result<PageRuns, Error> {
    let mut records = Records::open(path.clone(), PAGEMAP)?;
    let head: PagemapHead = records.next()?.ok_or_else(|| damaged(path, "no head"))?;
    let entries: Vec<PagemapEntry> = records.all()?;
    // Before there were flags, only in_parent existed.
    let present = |e: &PagemapEntry| e.flags.map_or_else(|| e.in_parent != Some(true), |flags| flags & PRESENT != 0);
    let pages = |e: &PagemapEntry| e.nr_pages.unwrap_or_else(|| u64::from(e.compat_nr_pages.unwrap_or(0)));
    let runs = entries.iter().filter(|e| present(e)).map(|e| PageRun { address: e.vaddr, pages: pages(e) });
    Ok(PageRuns { pages_id: head.pages_id, runs: runs.collect() })
}

/// The page maps of an image that CRIU is writing: for each the part of its name between `pagemap-` and `.img` (a pid,
/// or `shmem-` and the inode of the shared memory), and the number of its pages file. A map without a number was just
/// begun: CRIU writes page maps in blocks, one map after the other.
///
/// # Errors
/// When the folder cannot be read.
pub fn page_maps(dir: &Beneath) -> Result<Vec<(String, Option<u32>)>, Error> {
    let mut all = Vec::new();
    for name in names_in(dir)? {
        if let Some(owner) = name.strip_prefix("pagemap-").and_then(|rest| rest.strip_suffix(".img")) {
            let head = Records::open(dir.join(&name), PAGEMAP).and_then(|mut records| records.next::<PagemapHead>());
            all.push((owner.to_string(), head.ok().flatten().map(|head| head.pages_id)));
        }
    }
    Ok(all)
}

/// How long CRIU froze the tasks, from stats-dump, which CRIU writes after a successful dump.
///
/// # Errors
/// When the file is missing or damaged.
pub fn frozen_time(dir: &Beneath) -> Result<std::time::Duration, Error> {
    let path = dir.join("stats-dump");
    let stats: Option<StatsEntry> = Records::open(path.clone(), STATS)?.next()?;
    let dump = stats.and_then(|s| s.dump).ok_or_else(|| damaged(&path, "no dump statistics"))?;
    Ok(std::time::Duration::from_micros(u64::from(dump.frozen_time)))
}

#[cfg(test)]
mod tests;

//! Device memory that the processes of a job share, and memory that stays on the GPU: released before a checkpoint, and
//! mapped again after it.
//!
//! The driver (580) checkpoints a process that has mapped another process's memory, but the restore fails and the
//! process must be killed. So each process releases such memory first, and maps it again afterwards at the same
//! addresses: NCCL continues to use NVLink, and no program sees a difference. In the process, our interposer records
//! what there is, and its keeper thread does the work (`native/preload/src/sharing.rs`). This module makes the
//! requests, for all processes together:
//!
//! ```text
//!  locked, all threads stopped
//!    unlock; only the keepers run: probe, release           [`let_go`]       then lock, checkpoint, dump, restore
//!    unlock; only the keepers run: export, import, map      [`take_again`]   then all threads run
//! ```
//!
//! A process's own memory can stay on the GPU while it is checkpointed, if the interposer made it so
//! (`native/preload/src/kept.rs`): it is released in the same manner, and lives on through its descriptors, which
//! [`let_go`] collects ([`Staying`]) and [`take_again`] returns. In a process that was restored from an image,
//! [`make_again`] creates it anew, and the caller fills it.
//!
//! Host memory that a process makes with cuMemCreate is checkpointed by the driver, and not restored (580). The keeper copies it
//! to private memory before it releases it, and back once it has made it anew (`native/preload/src/host.rs`).
//!
//! CUDA is locked twice. In between, threads of the job that wait for the driver's lock must not get it: [`announce`]
//! ensures that.
//!
//! Invariants: nothing is released unless the origin of all of it is known and every keeper can work; everything that
//! was released is mapped again before a thread of the job runs. The table of a process is in the job's memory: its
//! content is compared and counted, and not trusted for anything else.

mod session;
mod table;

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::code;
use rekindle_os::descriptors::{self, Room};
use rekindle_os::{exits, parallel, process};
use session::{ONCE_RELEASED, Session};
pub use table::Sharing;
use table::{HANDED, Import, Tag};

/// Why shared memory could not be released, or mapped again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The process has memory of another process that cannot be released.
    #[error("process {pid} has GPU memory of another process mapped, which cannot be restored: {why}")]
    Unmanaged {
        /// The process, as the job sees it.
        pid: i32,
        /// The reason and advice.
        why: Obstacle,
    },
    /// It has something that the driver checkpoints and does not restore.
    #[error(
        "process {pid} has {what}. The driver can checkpoint it and not restore it, so the process would be lost: {remedy}"
    )]
    Unrestorable {
        /// The process, as the job sees it.
        pid: i32,
        /// What it has.
        what: &'static str,
        /// What to do.
        remedy: &'static str,
    },
    /// It still has a reference to memory that was to be released.
    #[error(
        "process {pid}: the driver did not release GPU memory in an earlier snapshot, so there can be no further one until \
         `rekindle rewind JOB -1` restores the job from its newest image"
    )]
    Unreleased {
        /// The process, as the job sees it.
        pid: i32,
    },
    /// Its own memory stays on the GPU, and nothing copies it.
    #[error(
        "process {pid}: its memory has stayed on the GPU (gpu.memory = \"kept\") since an earlier snapshot, and cannot \
         be copied now, as the warning before says"
    )]
    Stays {
        /// The process, as the job sees it.
        pid: i32,
    },
    /// Its own memory that stayed on the GPU is not there any more.
    #[error("process {pid}: its memory that stayed on the GPU is missing")]
    Missing {
        /// The process, as the job sees it.
        pid: i32,
    },
    /// It has no descriptor of such memory any more.
    #[error(
        "process {pid} has no descriptor any more of GPU memory that stays on the GPU (gpu.memory = \"kept\"), so there can \
         be no snapshot until `rekindle rewind JOB -1` restores the job from its newest image: the program has closed a \
         descriptor that it did not open, or its limit was lowered. If that happens again, set gpu.memory = \"copied\" \
         and start the job from the beginning (--fresh)"
    )]
    Closed {
        /// The process, as the job sees it.
        pid: i32,
    },
    /// It may not have another descriptor.
    #[error(
        "process {pid} cannot open enough descriptors for its memory that stays on the GPU (gpu.memory = \"kept\"): \
         raise its limit (ulimit -n; job.limits.nofile)"
    )]
    NoDescriptor {
        /// The process, as the job sees it.
        pid: i32,
    },
    /// We may not have as many descriptors.
    #[error(
        "rekindle cannot open {pieces} descriptors, one for each piece of memory that stays on the GPU \
         (gpu.memory = \"kept\"): raise its hard limit (ulimit -Hn; LimitNOFILE= of a service)"
    )]
    TooMany {
        /// The number of pieces.
        pieces: usize,
        /// The kernel's answer.
        #[source]
        source: std::io::Error,
    },
    /// Its driver would not import again what stays on the GPU.
    #[error(
        "process {pid}: a try has shown that the driver could not import the memory again that stays on the GPU (gpu.memory = \
         \"kept\", error {code}). The driver copies all GPU memory from the next snapshot on. So it is with jobs that were \
         restored on other GPUs, if CUDA_VISIBLE_DEVICES names only some of a machine's GPUs"
    )]
    NotImported {
        /// The process, as the job sees it.
        pid: i32,
        /// The CUresult.
        code: i32,
    },
    /// A keeper did not answer in time.
    #[error("process {pid}: cannot release GPU memory that is shared or stays on the GPU now: {source}")]
    Busy {
        /// The process, as the job sees it.
        pid: i32,
        /// The cause.
        source: std::io::Error,
    },
    /// The driver refused.
    #[error("process {pid}: the driver cannot {what} (error {code}){}", hint(what, *code))]
    Driver {
        /// The process, as the job sees it.
        pid: i32,
        /// The requested action.
        what: &'static str,
        /// The CUresult.
        code: i32,
    },
}

impl Error {
    /// Whether another try may succeed.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        matches!(self, Error::Busy { .. })
    }

    /// Whether the driver refused something, and not because of the machine: a GPU that is full, missing or broken.
    #[must_use]
    pub fn is_refusal(&self) -> bool {
        matches!(self, Error::Driver { what, code, .. } if !MACHINES.contains(code) && !is_of_a_move(what, *code))
    }
}

/// Whether it is as with a process that was restored on other GPUs ([`Error::NotImported`]).
fn is_of_a_move(what: &str, code: i32) -> bool {
    what == session::IMPORT_AGAIN && code == code::NOT_INITIALIZED
}

fn hint(what: &str, code: i32) -> &'static str {
    if is_of_a_move(what, code) {
        ". So it is if a job is restored on other GPUs or on another machine, and its CUDA_VISIBLE_DEVICES names only some of a \
         machine's GPUs: restore it on the GPUs that it was on, or start it from the beginning (--fresh)"
    } else {
        ""
    }
}

/// Codes whose cause is the machine, whatever the processes ask for.
const MACHINES: [i32; 7] = [
    code::OUT_OF_MEMORY,
    code::DEVICE_UNAVAILABLE,
    code::NO_DEVICE,
    code::ECC_UNCORRECTABLE,
    code::NOT_PERMITTED,
    code::SYSTEM_NOT_READY,
    code::SYSTEM_DRIVER_MISMATCH,
];

/// Why memory of another process cannot be released.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Obstacle {
    /// It was shared by CUDA IPC, or in a manner that the interposer did not see.
    Unseen(u32),
    /// Its exporter is not in the job, has ended, or has released the memory.
    NoExporter,
    /// It could not be recorded.
    Untracked,
    /// NVLink multicast.
    Multicast,
    /// The process has no thread that could release it.
    NoKeeper,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Unseen(count) => write!(
                f,
                "{count} pieces by CUDA IPC (cudaIpcOpenMemHandle, tensors sent between processes), as external memory \
                 (cuImportExternalMemory), or from an imported pool; for NCCL unset NCCL_CUMEM_ENABLE, or set \
                 NCCL_P2P_DISABLE=1"
            ),
            Obstacle::NoExporter => {
                f.write_str("it belongs to a process outside the job, or to one that has released it")
            }
            Obstacle::Untracked => f.write_str("the process shares more pieces of memory than rekindle can track"),
            Obstacle::Multicast => f.write_str("NVLink multicast; for NCCL set NCCL_NVLS_ENABLE=0"),
            Obstacle::NoKeeper => f.write_str("the interposer could not start its thread in the process"),
        }
    }
}

/// The tables of the processes that have one; `pids` as we see them.
///
/// # Errors
/// If one exists and cannot be read.
pub fn of(pids: &[i32]) -> std::io::Result<Vec<Sharing>> {
    parallel::at_once(pids, |pid| Sharing::of(*pid).transpose()).into_iter().flatten().collect()
}

/// Whether the memory that these processes share can be released, and mapped again afterwards. While they run, the
/// result is valid only for this moment.
///
/// # Errors
/// [`Error::Unmanaged`]
pub fn check(all: &[Sharing]) -> Result<(), Error> {
    for one in all {
        if one.table().obstacles.load(Relaxed) & table::UNRELEASED != 0 {
            return Err(Error::Unreleased { pid: one.inner() });
        }
        let count = |kind: usize| one.table().unrestorable.get(kind).map_or(0, |count| count.load(Relaxed));
        if let Some((_, what, remedy)) = UNRESTORABLE.iter().find(|(kind, ..)| count(*kind) != 0) {
            return Err(Error::Unrestorable { pid: one.inner(), what, remedy });
        }
        if let Some(why) = obstacle(one, all) {
            return Err(Error::Unmanaged { pid: one.inner(), why });
        }
    }
    Ok(())
}

/// What the interposer counts of it, in words, and what to do (driver 580, one H200; `native/preload/src/unrestorable.rs`).
const UNRESTORABLE: [(usize, &str, &str); 4] = [
    (
        table::EXPORTED_HOST,
        "host memory of cuMemCreate that it has exported to other processes (cuMemExportToShareableHandle)",
        "for NCCL set NCCL_CUMEM_HOST_ENABLE=0; elsewhere use shared memory (/dev/shm) with cudaHostRegister. Snapshots work \
         again once the program has released that memory",
    ),
    (
        table::HOST_POOL,
        "memory from a pool in host memory (cuMemPoolCreate or cuMemGetMemPool with a host location)",
        "use cudaMallocHost or cudaHostRegister instead. Snapshots work again once the program has freed that memory and \
         destroyed the pool",
    ),
    (table::SPARSE, "a sparse array (CUDA_ARRAY3D_SPARSE)", "snapshots work again once the program has destroyed it"),
    (
        table::DEFERRED,
        "an array whose memory is mapped later (CUDA_ARRAY3D_DEFERRED_MAPPING)",
        "snapshots work again once the program has destroyed it",
    ),
];

fn obstacle(one: &Sharing, all: &[Sharing]) -> Option<Obstacle> {
    let table = one.table();
    let obstacles = table.obstacles.load(Relaxed);
    if obstacles & table::MULTICAST != 0 {
        return Some(Obstacle::Multicast);
    }
    if obstacles & table::UNTRACKED != 0 {
        return Some(Obstacle::Untracked);
    }
    let imports: Vec<&Import> = one.imports().map(|(_, import)| import).collect();
    let foreign = table.foreign.load(Relaxed);
    let handed = one.kept().filter(|(_, import, _)| import.kept.load(Relaxed) == table::HANDED).count();
    let known = u32::try_from(imports.len() + handed).unwrap_or(u32::MAX);
    // The call that starts it may be in progress.
    let has_no_keeper =
        |one: &Sharing| one.table().keeper.load(Relaxed) == 0 && one.table().under_way.load(Relaxed) == 0;
    if (handed > 0 || one.host_bytes().is_some()) && has_no_keeper(one) {
        return Some(Obstacle::NoKeeper);
    }
    // A call in progress may be between the driver and its record; nothing is released while there is one.
    if foreign > known && table.under_way.load(Relaxed) == 0 {
        return Some(Obstacle::Unseen(foreign - known));
    }
    let exporters: BTreeMap<Tag, &Sharing> =
        all.iter().flat_map(|other| other.exports().map(move |(_, tag)| (tag, other))).collect();
    for import in imports {
        match exporters.get(&table::origin(import)) {
            None => return Some(Obstacle::NoExporter),
            Some(exporter) if has_no_keeper(exporter) || has_no_keeper(one) => return Some(Obstacle::NoKeeper),
            Some(_) => {}
        }
    }
    None
}

/// Whether any of them has to release something: memory of another process, host memory, or its own that stays on the GPU. While CUDA
/// is locked this includes what a call in progress frees: it is recorded as free before the driver frees it.
#[must_use]
pub fn is_any(all: &[Sharing], own: Own) -> bool {
    // One that is not to stay may have a descriptor, of an attempt that failed.
    let is_concerned = |import: &Import| own == Own::Stays || import.id.load(Relaxed) != 0;
    let has_import = |one: &Sharing| one.table().foreign.load(Relaxed) != 0 || one.imports().next().is_some();
    let has_host = |one: &Sharing| one.host_bytes().is_some();
    all.iter().any(|one| has_import(one) || has_host(one) || one.kept().any(|(_, import, _)| is_concerned(import)))
}

/// What becomes of a process's own memory that can stay on the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Own {
    /// It stays.
    Stays,
    /// The driver copies it, as all other memory.
    IsCopied,
}

/// Memory that stays on the GPU while its process is checkpointed. It is freed if this is dropped meanwhile.
#[derive(Debug)]
pub struct Staying {
    /// Pid of the process, as it sees itself.
    pub pid: i32,
    /// Its number of this memory.
    pub index: u32,
    /// Bytes.
    pub bytes: u64,
    /// Its descriptor. A copy under way has it, too.
    pub memory: Arc<OwnedFd>,
}

/// Whether any of them has released memory that must be mapped again.
#[must_use]
pub fn is_let_go(all: &[Sharing]) -> bool {
    all.iter().any(|one| one.table().state.load(Relaxed) != table::HELD)
}

/// Tells each interposer, `pids` as we see them, that CUDA is about to be locked, or is unlocked. Returns the processes
/// that could not be told. One that has ended is skipped.
///
/// The driver's lock (580) is a libc lock that API calls take for reading. A thread that waits for it gets it when it
/// is unlocked, running or not: a stopped thread would never release it, and CUDA could not be locked again. Threads
/// that arrive while this is announced poll instead.
pub fn announce(pids: &[i32], is_locked: bool) -> Vec<(i32, std::io::Error)> {
    let tell = |pid: &i32| {
        let begun = Instant::now();
        loop {
            match Sharing::of(*pid) {
                Ok(one) => {
                    one.iter().for_each(|one| one.announce(is_locked));
                    return None;
                }
                Err(_) if process::has_ended(*pid) => return None,
                // A shortage of ours, such as of descriptors. A thread of it may wait for as long as it is not told.
                Err(_) if !is_locked && begun.elapsed() < ANNOUNCED => std::thread::sleep(PAUSE),
                Err(error) => return Some((*pid, error)),
            }
        }
    };
    parallel::at_once(pids, tell).into_iter().flatten().collect()
}

/// How long it is tried to tell a process.
const ANNOUNCED: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(10);

/// Waits until no call on memory that has to be released is in progress, at most a moment. Once a lock is announced, new
/// calls that allocate or free it wait. A call that the lock holds up would be in progress until CUDA is unlocked.
pub fn let_calls_end<'a>(all: impl Iterator<Item = &'a Sharing> + Clone) {
    let began = Instant::now();
    let is_busy = |one: &Sharing| one.table().under_way.load(Relaxed) != 0;
    while all.clone().any(is_busy) && began.elapsed() < CALLS_END {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// An allocation or a free takes less than a millisecond (580). One that is long in progress waits for something else.
const CALLS_END: Duration = Duration::from_millis(20);

/// Checks, while CUDA is locked, that all processes know it. A process that started to share after [`announce`] does
/// not, and its threads may wait for the lock itself.
///
/// # Errors
/// [`Error::Busy`]
pub fn check_announced(all: &[Sharing]) -> Result<(), Error> {
    match all.iter().find(|one| one.table().is_locked.load(Relaxed) == 0) {
        None => Ok(()),
        Some(one) => {
            let source = std::io::Error::other("it has just started to share memory");
            Err(Error::Busy { pid: one.inner(), source })
        }
    }
}

/// Makes all processes release memory of other processes, and their own that stays on the GPU: that is then in `staying`.
/// Their threads must be stopped, except the driver's if it needs one, and CUDA must not be locked. For [`Own::Stays`] there
/// must be [`room`].
///
/// # Errors
/// Some of it may have been released then: call [`take_again`].
pub fn let_go(all: &[Sharing], own: Own, staying: &mut Vec<Staying>) -> Result<(), Error> {
    check(all)?;
    if own == Own::IsCopied
        && let Some(one) = all.iter().find(|one| one.kept().any(|(_, import, _)| import.kept.load(Relaxed) == HANDED))
    {
        return Err(Error::Stays { pid: one.inner() });
    }
    if let Some(one) = all.iter().find(|one| one.table().under_way.load(Relaxed) != 0) {
        let source = std::io::Error::other("a driver call on memory that has to be released is in progress");
        return Err(Error::Busy { pid: one.inner(), source });
    }
    let all: Vec<&Sharing> = all.iter().filter(|one| is_concerned(one, own)).collect();
    let sessions = open(&all, None)?;
    // A thread that was stopped with a lock of the driver would block the keeper, and what the driver does not import would
    // be lost. This is found out before anything is changed.
    each(&sessions, |session| session.probe(own))?;
    if own == Own::Stays {
        // Those of an attempt that failed would be in the image twice.
        *staying = collect(&all, &sessions)?;
    }
    each(&sessions, |session| session.ask(table::RELEASE, u32::from(own == Own::Stays), "release memory"))?;
    close(sessions);
    // Imports that the driver itself knows of: a call of the program may have been between the driver and our record of
    // it.
    match all.iter().find(|one| one.table().foreign.load(Relaxed) != 0) {
        Some(one) => {
            let source = std::io::Error::other("what it shares is changing");
            Err(Error::Busy { pid: one.inner(), source })
        }
        None => Ok(()),
    }
}

fn is_concerned(one: &Sharing, own: Own) -> bool {
    is_any(std::slice::from_ref(one), own) || one.exports().next().is_some()
}

/// The memory of all that can stay on the GPU.
fn collect(all: &[&Sharing], sessions: &[Mutex<Session<'_>>]) -> Result<Vec<Staying>, Error> {
    let give = |(one, session): (&&Sharing, &Mutex<Session<'_>>)| {
        let entries: Vec<(u32, u64)> = one.kept().map(|(index, _, bytes)| (index, bytes)).collect();
        give(one, &lock(session), &entries)
    };
    let given: Result<Vec<_>, Error> = parallel::at_once(all.iter().zip(sessions), give).into_iter().collect();
    Ok(given?.into_iter().flatten().collect())
}

/// These entries of a process, each with its bytes, and the descriptors that the process gives.
fn give(one: &Sharing, session: &Session<'_>, entries: &[(u32, u64)]) -> Result<Vec<Staying>, Error> {
    let files = session.give(&entries.iter().map(|(index, _)| *index).collect::<Vec<_>>())?;
    let piece = |((index, bytes), memory): (&(u32, u64), OwnedFd)| Staying {
        pid: one.inner(),
        index: *index,
        bytes: *bytes,
        memory: memory.into(),
    };
    Ok(entries.iter().zip(files).map(piece).collect())
}

/// Room for the descriptors of their memory that can stay on the GPU, for as long as there are any, and for those that are
/// needed to map it again: that must not fail for lack of them.
///
/// # Errors
/// [`Error::TooMany`]
pub fn room(all: &[Sharing]) -> Result<Room, Error> {
    let pieces: usize = all.iter().map(|one| one.kept().count()).sum();
    let besides = all.len() * FOR_A_SESSION + exits::MOST_WATCHED;
    descriptors::room_for(pieces + besides).map_err(|source| Error::TooMany { pieces, source })
}

/// The descriptors that are open for a process while its keeper is asked for something: its pidfd, its socket, its table,
/// and a folder of /proc.
const FOR_A_SESSION: usize = 4;

/// Maps the released memory again; what stayed on the GPU is in `staying`. The threads must be stopped, and CUDA must not
/// be locked.
///
/// # Errors
/// Then the processes must not be resumed.
pub fn take_again(all: &[Sharing], staying: &[Staying]) -> Result<(), Error> {
    let all: Vec<&Sharing> = all.iter().filter(|one| is_gone(one)).collect();
    let sessions = open_again(&all)?;
    let imported = at_once(all.iter().zip(&sessions), |(one, session)| {
        let mut entries = Vec::new();
        for (index, bytes) in gone(one) {
            let is_it = |piece: &&Staying| (piece.pid, piece.index, piece.bytes) == (one.inner(), index, bytes);
            let piece = staying.iter().find(is_it);
            let missing = || Error::Missing { pid: one.inner() };
            entries.push((index, piece.ok_or_else(missing)?.memory.as_fd()));
        }
        lock(session).import(&entries)
    });
    imported?;
    map_all(&all, sessions)
}

/// What processes have released of their own memory: the pid of each as it sees itself, its number of the memory, and its bytes.
#[must_use]
pub fn lacking(all: &[Sharing]) -> Vec<(i32, u32, u64)> {
    all.iter().flat_map(|one| gone(one).map(|(index, bytes)| (one.inner(), index, bytes))).collect()
}

fn gone(one: &Sharing) -> impl Iterator<Item = (u32, u64)> + '_ {
    let is_gone = |(_, import, _): &(u32, &Import, u64)| import.is_gone.load(Relaxed) != 0;
    one.kept().filter(is_gone).map(|(index, _, bytes)| (index, bytes))
}

/// Whether it has released something, or others have released something of it.
fn is_gone(one: &Sharing) -> bool {
    one.table().state.load(Relaxed) != table::HELD || one.exports().next().is_some()
}

/// In processes that were restored from an image: maps the memory of others again, and creates anew what had stayed on the
/// GPU, with undefined content. The threads must be stopped, and CUDA must not be locked. There must be [`room`].
///
/// Tries whether the driver would import it after a snapshot ([`Sharing::imports_nothing`]).
///
/// # Errors
/// Then the processes must not be resumed.
pub fn make_again(all: &[Sharing]) -> Result<Vec<Staying>, Error> {
    let all: Vec<&Sharing> = all.iter().filter(|one| is_gone(one)).collect();
    let sessions = open_again(&all)?;
    let make = |(one, session): (&&Sharing, &Mutex<Session<'_>>)| {
        let (entries, session) = (gone(one).collect::<Vec<_>>(), lock(session));
        for (index, _) in &entries {
            session.ask(table::CREATE, *index, "allocate memory that stays on the GPU")?;
        }
        give(one, &session, &entries)
    };
    let made: Result<Vec<Vec<Staying>>, Error> =
        parallel::at_once(all.iter().zip(&sessions), make).into_iter().collect();
    let made = made?;
    let kept = all.iter().zip(&sessions).filter(|(one, _)| one.kept().next().is_some());
    at_once(kept, |(one, session)| match lock(session).probe(Own::Stays) {
        // This one would end all snapshots.
        Err(error) if error.is_busy() || one.table().obstacles.load(Relaxed) & table::UNRELEASED != 0 => Err(error),
        // Any other does no harm now.
        _ => Ok(()),
    })?;
    map_all(&all, sessions)?;
    Ok(made.into_iter().flatten().collect())
}

/// Hands over what processes have of each other, and maps everything again.
fn map_all(all: &[&Sharing], sessions: Vec<Mutex<Session<'_>>>) -> Result<(), Error> {
    let mut exporters = BTreeMap::new();
    for (at, one) in all.iter().enumerate() {
        exporters.extend(one.exports().map(|(index, tag)| (tag, (at, index))));
    }
    // For each exporter: its entries, each with the importing process and its import.
    let mut wanted: Vec<Vec<Wanted>> = all.iter().map(|_| Vec::new()).collect();
    for (importer, one) in all.iter().enumerate() {
        for (import, entry) in one.imports().filter(|(_, import)| import.is_gone.load(Relaxed) != 0) {
            let found = exporters.get(&table::origin(entry)).copied();
            let Some((queue, export)) = found.and_then(|(at, export)| Some((wanted.get_mut(at)?, export))) else {
                return Err(Error::Unmanaged { pid: one.inner(), why: Obstacle::NoExporter });
            };
            queue.push(Wanted { export, importer, import });
        }
    }
    while wanted.iter().any(|queue| !queue.is_empty()) {
        hand_over(&sessions, &mut wanted)?;
    }
    each(&sessions, |session| session.ask(table::MAP, 0, "map memory again"))?;
    close(sessions);
    Ok(())
}

/// A requested export and its importer.
struct Wanted {
    export: u32,
    importer: usize,
    import: u32,
}

/// Number of descriptors that a process has open at once for this; many jobs may have only 1024 in total.
const AT_ONCE: usize = 64;

/// Makes each exporter export as many entries as possible at once, and the importers import them.
fn hand_over(sessions: &[Mutex<Session<'_>>], wanted: &mut [Vec<Wanted>]) -> Result<(), Error> {
    let round: Vec<Vec<Wanted>> =
        wanted.iter_mut().map(|queue| queue.split_off(queue.len().saturating_sub(AT_ONCE))).collect();
    let imports: Vec<Mutex<Vec<(u32, OwnedFd)>>> = sessions.iter().map(|_| Mutex::default()).collect();
    at_once(sessions.iter().zip(round), |(session, round)| {
        let entries: Vec<u32> = round.iter().map(|wanted| wanted.export).collect();
        let memory = lock(session).export(&entries)?;
        for (wanted, memory) in round.iter().zip(memory) {
            if let Some(imports) = imports.get(wanted.importer) {
                lock(imports).push((wanted.import, memory));
            }
        }
        Ok(())
    })?;
    at_once(sessions.iter().zip(&imports), |(session, imports)| {
        let imports = lock(imports);
        let entries: Vec<_> = imports.iter().map(|(index, memory)| (*index, memory.as_fd())).collect();
        lock(session).import(&entries)
    })
}

/// Where something is released.
fn open_again<'a>(all: &[&'a Sharing]) -> Result<Vec<Mutex<Session<'a>>>, Error> {
    open(all, Some(Instant::now() + ONCE_RELEASED))
}

fn open<'a>(all: &[&'a Sharing], until: Option<Instant>) -> Result<Vec<Mutex<Session<'a>>>, Error> {
    let busy = |one: &Sharing, source| Error::Busy { pid: one.inner(), source };
    let open = |one: &&'a Sharing| Session::open(one, until).map(Mutex::new).map_err(|source| busy(one, source));
    parallel::at_once(all, open).into_iter().collect()
}

/// Waits until all keepers sleep.
fn close(sessions: Vec<Mutex<Session<'_>>>) {
    parallel::at_once(sessions, drop);
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

fn each(sessions: &[Mutex<Session<'_>>], work: impl Fn(&Session<'_>) -> Result<(), Error> + Sync) -> Result<(), Error> {
    at_once(sessions.iter(), |session| work(&lock(session)))
}

/// The first error in their order, once all are done.
fn at_once<T: Send>(items: impl Iterator<Item = T>, work: impl Fn(T) -> Result<(), Error> + Sync) -> Result<(), Error> {
    parallel::at_once(items, work).into_iter().collect()
}

#[cfg(test)]
mod tests;

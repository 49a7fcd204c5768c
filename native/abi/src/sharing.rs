//! The table of device memory that a process shares with others or keeps on the GPU, and the requests to its keeper: the
//! layout that the interposer and the supervisor agree on.
//!
//! The table is a memfd of this name, mapped shared by the process and, while a snapshot or a restart needs it, by the
//! supervisor. The job can write to it, so the supervisor checks every number in it. All zero is an empty table. A
//! change of the layout needs a change of [`NAME`], because an image contains the table of its version.
#![allow(missing_docs, reason = "fields have the names that the driver gives them")]

use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// The name of the memfd; in /proc/PID/maps behind `/memfd:`.
pub const NAME: &CStr = c"rekindle-sharing-5";

/// Entries of each kind. NCCL (2.28) takes 112 imports for two ranks; pages that are not used take no memory.
pub const MOST: usize = 16384;

/// Maximum number of locations that may use a mapping: GPUs, and the host.
pub const MOST_ACCESS: usize = 20;

/// [`Table::state`]: the imports are mapped, or released.
pub const HELD: u32 = 0;
pub const LET_GO: u32 = 1;

/// Memory of other processes that could not be recorded.
pub const UNTRACKED: u32 = 1;
/// NVLink multicast (NCCL's NVLS).
pub const MULTICAST: u32 = 2;
/// Memory that the driver did not release for a snapshot: the process still has a reference to it.
pub const UNRELEASED: u32 = 4;
/// The driver did not import memory in a try ([`PROBE`]): what could stay on the GPU must be copied.
pub const NOT_IMPORTED: u32 = 8;

/// [`Import::kept`]: memory of another process.
pub const FOREIGN: u32 = 0;
/// Memory of this process that can stay on the GPU while the process is checkpointed, as this process made it.
pub const OWN: u32 = 1;
/// The same, imported again: the driver cannot checkpoint it, nor export it once more.
pub const HANDED: u32 = 2;
/// Host memory of this process that the driver's restore would lose. Its keeper copies it to memory of the process and makes
/// it anew.
pub const HOST: u32 = 3;

/// [`Table::unrestorable`]: host memory that the process has exported.
pub const EXPORTED_HOST: usize = 0;
/// Pools of host memory.
pub const HOST_POOL: usize = 1;
/// Sparse arrays.
pub const SPARSE: usize = 2;
/// Arrays whose memory is mapped later.
pub const DEFERRED: usize = 3;
/// Number of these kinds.
pub const UNRESTORABLE: usize = 4;

/// Identifies the origin of an import. It is at the end of the metadata that the driver passes on with an exported
/// object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    /// Pid of the exporter, as it sees itself.
    pub pid: u32,
    /// Id of the export, from 1.
    pub id: u32,
    /// Nonce of the exporter's table, because pids are reused.
    pub nonce: u32,
}

/// Memory of this process that others can import.
#[derive(Debug)]
#[repr(C)]
pub struct Export {
    /// CUmemGenericAllocationHandle; 0 if the entry is free.
    pub handle: AtomicU64,
    pub id: AtomicU32,
    /// CUmemAllocationHandleType.
    pub kind: AtomicU32,
    /// References of the program, as far as they were observed.
    pub references: AtomicU32,
    pub unused: AtomicU32,
}

/// Memory of another process, or memory that can stay on the GPU. Both are released and taken again alike.
#[derive(Debug)]
#[repr(C)]
pub struct Import {
    /// The program's number for it: the driver's handle at the time of its import. 0 for memory that can stay on the GPU,
    /// of which the program only has the address.
    pub name: AtomicU64,
    /// The driver's present handle.
    pub handle: AtomicU64,
    pub kind: AtomicU32,
    /// References of the program.
    pub references: AtomicU32,
    /// Number of its mappings.
    pub mappings: AtomicU32,
    /// 1 if the entry is in use.
    pub is_live: AtomicU32,
    /// 1 while it is released.
    pub is_gone: AtomicU32,
    pub pid: AtomicU32,
    /// 0 if its origin is unknown. For memory that can stay on the GPU: 1 if the process has a descriptor of it. For
    /// [`HOST`]: 1 if it was exported.
    pub id: AtomicU32,
    pub nonce: AtomicU32,
    /// [`FOREIGN`], [`OWN`], [`HANDED`] or [`HOST`].
    pub kept: AtomicU32,
    /// CUdevice, as the process counts.
    pub device: AtomicI32,
    /// The rest is of [`HOST`]. Its bytes.
    pub size: AtomicU64,
    /// Where its content is while it is released; 0 if nowhere.
    pub content: AtomicU64,
    /// CUmemAllocationProp.
    pub properties: [AtomicU32; 8],
}

/// A mapping of an import.
#[derive(Debug)]
#[repr(C)]
pub struct Mapping {
    /// 0 if the entry is free.
    pub address: AtomicU64,
    pub size: AtomicU64,
    pub offset: AtomicU64,
    pub flags: AtomicU64,
    pub import: AtomicU32,
    /// 1 while it is unmapped.
    pub is_gone: AtomicU32,
    pub accesses: AtomicU32,
    pub unused: AtomicU32,
    pub access: [Access; MOST_ACCESS],
}

/// CUmemAccessDesc.
#[derive(Debug)]
#[repr(C)]
pub struct Access {
    pub location_kind: AtomicU32,
    pub location: AtomicI32,
    pub flags: AtomicU32,
}

/// The complete table.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// Pid of the process, as it sees itself; 0 until the table may be read.
    pub pid: AtomicI32,
    pub nonce: AtomicU32,
    /// Thread id of the keeper, as the process sees it; 0 if there is none.
    pub keeper: AtomicI32,
    /// Number of objects of other processes that the driver has in this process.
    pub foreign: AtomicU32,
    /// Obstacles to a release, as far as they were observed: [`UNTRACKED`], [`MULTICAST`],
    /// [`UNRELEASED`], [`NOT_IMPORTED`].
    pub obstacles: AtomicU32,
    pub state: AtomicU32,
    /// Number of calls of the program in progress that use memory which can be released: they already have the driver's
    /// handle for it.
    pub under_way: AtomicU32,
    /// Set by the supervisor while CUDA is locked, and shortly before.
    pub is_locked: AtomicU32,
    /// For each kind, how much there is that the driver checkpoints and cannot restore.
    pub unrestorable: [AtomicU32; UNRESTORABLE],
    /// Number of times that the program wanted to share memory by CUDA IPC that can stay on the GPU, and was refused.
    pub ipc_refused: AtomicU32,
    /// Incremented and woken (futex) to make the keeper create a socket.
    pub calls: AtomicU32,
    /// The supervisor's end of the socket, once `answered` has the number of the call; -1 if there is none.
    pub socket: AtomicI32,
    pub answered: AtomicU32,
    /// Number of entries that were ever used; the rest is empty.
    pub exports_used: AtomicU32,
    pub imports_used: AtomicU32,
    pub mappings_used: AtomicU32,
    pub exports: [Export; MOST],
    pub imports: [Import; MOST],
    pub mappings: [Mapping; MOST],
}

/// A request to the keeper, one packet each; it answers each with a [`Reply`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Request {
    pub what: u32,
    /// Index of the entry, if the request is about one.
    pub index: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Reply {
    /// CUresult; -1 for an invalid request; [`LOST`], [`NO_DESCRIPTOR`].
    pub code: i32,
    /// Number of entries processed.
    pub count: u32,
}

/// [`Reply::code`]: the process has no descriptor of this memory any more, and the driver makes no other one.
pub const LOST: i32 = -2;
/// The process may not open another descriptor, or may have none with so high a number any more (RLIMIT_NOFILE).
pub const NO_DESCRIPTOR: i32 = -3;

/// [`Request::what`]: the first request. The supervisor has its end of the socket, so the keeper closes its copy.
pub const BEGIN: u32 = 0;
/// Uses the driver without changing anything; returns unless the driver is blocked. With index 1 it also makes memory on each
/// GPU where some can stay, and tries to import it.
pub const PROBE: u32 = 1;
/// Unmaps and releases all memory of other processes, and host memory, whose content it copies before; with index 1 also what
/// can stay on the GPU. Closes the descriptors of that in any case.
pub const RELEASE: u32 = 2;
/// Exports an entry again; the answer includes the descriptor.
pub const EXPORT: u32 = 3;
/// Imports an entry again, from the descriptor sent with the request.
pub const IMPORT: u32 = 4;
/// Makes host memory anew, and maps it and all imported entries.
pub const MAP: u32 = 5;
/// For memory that can stay on the GPU: the answer includes its descriptor.
pub const GIVE: u32 = 6;
/// Makes such memory anew, for an entry that was released. Its content is undefined.
pub const CREATE: u32 = 7;

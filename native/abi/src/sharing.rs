//! The table of device memory that a process shares with others, and the requests to its keeper: the layout that the
//! interposer and the supervisor agree on.
//!
//! The table is a memfd of this name, mapped shared by the process and, while a snapshot or a restart needs it, by the
//! supervisor. The job can write to it, so the supervisor checks every number in it. All zero is an empty table. A
//! change of the layout needs a change of [`NAME`], because an image contains the table of its version.
#![allow(missing_docs, reason = "fields have the names that the driver gives them")]

use core::ffi::CStr;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64};

/// The name of the memfd; in /proc/PID/maps behind `/memfd:`.
pub const NAME: &CStr = c"rekindle-sharing-3";

/// Entries of each kind. NCCL (2.28) takes 112 imports for two ranks; pages that are not used take no memory.
pub const MOST: usize = 16384;

/// Places that may use one mapping: GPUs, and the host.
pub const MOST_ACCESS: usize = 20;

/// [`Table::state`]: the imports are mapped, or released.
pub const HELD: u32 = 0;
pub const LET_GO: u32 = 1;

/// Memory of others that could not be noted down.
pub const UNTRACKED: u32 = 1;
/// NVLink multicast (NCCL's NVLS).
pub const MULTICAST: u32 = 2;

/// Marks where an import comes from; at the end of the metadata that the driver hands on with an exported object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tag {
    /// The exporter, as it sees itself.
    pub pid: u32,
    /// Which of its exports; from 1.
    pub id: u32,
    /// Of its table: a pid is somebody else's one day.
    pub nonce: u32,
}

/// Memory of this process that others can import.
#[derive(Debug)]
#[repr(C)]
pub struct Export {
    /// CUmemGenericAllocationHandle; 0 where the entry is free.
    pub handle: AtomicU64,
    pub id: AtomicU32,
    /// CUmemAllocationHandleType.
    pub kind: AtomicU32,
    /// References that the program has, as far as they were seen.
    pub references: AtomicU32,
    pub unused: AtomicU32,
}

/// Memory of another process.
#[derive(Debug)]
#[repr(C)]
pub struct Import {
    /// What the program has for it: the driver's handle at the time of its import.
    pub name: AtomicU64,
    /// The driver's handle now.
    pub handle: AtomicU64,
    pub kind: AtomicU32,
    /// References that the program has.
    pub references: AtomicU32,
    /// Mappings of it.
    pub mappings: AtomicU32,
    /// 1 where the entry is taken.
    pub is_live: AtomicU32,
    /// 1 while it is released.
    pub is_gone: AtomicU32,
    pub pid: AtomicU32,
    /// 0 where it is not known whose it is.
    pub id: AtomicU32,
    pub nonce: AtomicU32,
}

/// Where an import is mapped.
#[derive(Debug)]
#[repr(C)]
pub struct Mapping {
    /// 0 where the entry is free.
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

/// All of it.
#[derive(Debug)]
#[repr(C)]
pub struct Table {
    /// The process, as it sees itself; 0 until the table may be read.
    pub pid: AtomicI32,
    pub nonce: AtomicU32,
    /// The keeper's thread, as the process sees it; 0 if there is none.
    pub keeper: AtomicI32,
    /// Objects of other processes that the driver has here, whoever asked for them.
    pub foreign: AtomicU32,
    /// What cannot be released, as far as it was seen since the beginning: [`UNTRACKED`], [`MULTICAST`].
    pub obstacles: AtomicU32,
    pub state: AtomicU32,
    /// Calls of the program in progress that name what can be released: they have the driver's handle for it already.
    pub under_way: AtomicU32,
    /// Set by the supervisor from before CUDA's lock until it is over.
    pub is_locked: AtomicU32,
    pub unused: AtomicU32,
    /// Raised by one, and woken (futex), to have the keeper make a socket.
    pub calls: AtomicU32,
    /// The supervisor's end of it, once `answered` has the number of the call; -1 if there is none.
    pub socket: AtomicI32,
    pub answered: AtomicU32,
    /// Entries that were ever used: none lies behind them.
    pub exports_used: AtomicU32,
    pub imports_used: AtomicU32,
    pub mappings_used: AtomicU32,
    pub exports: [Export; MOST],
    pub imports: [Import; MOST],
    pub mappings: [Mapping; MOST],
}

/// The requests to the keeper, one packet each; it answers each with one, a [`Reply`].
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Request {
    pub what: u32,
    /// Of the entry, where it is about one.
    pub index: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Reply {
    /// CUresult; -1 where the request made no sense.
    pub code: i32,
    /// How many entries it was about.
    pub count: u32,
}

/// [`Request::what`]: the first one. The supervisor has its end of the socket, and the keeper need not keep it open.
pub const BEGIN: u32 = 0;
/// Uses the driver without changing anything. Returns if nothing blocks the driver.
pub const PROBE: u32 = 1;
/// Unmaps and releases all imports.
pub const RELEASE: u32 = 2;
/// Exports an entry again; the answer has the descriptor.
pub const EXPORT: u32 = 3;
/// Imports an entry again, from the descriptor that comes with the request.
pub const IMPORT: u32 = 4;
/// Maps all that are imported.
pub const MAP: u32 = 5;

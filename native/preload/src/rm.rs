//! Observes the driver's calls of its resource manager, to count objects that come from other processes.
//!
//! libcuda talks to the kernel module by ioctl(2) on /dev/nvidiactl, through libc's symbol (driver 580, measured). A
//! process gets an object of another process in two ways only: it is duplicated from another client (CUDA IPC), or
//! imported from a descriptor (`cuMemImportFromShareableHandle`). Both, and their ends, are visible here, whichever
//! function of CUDA they come from. A process that has one can be checkpointed but not restored, so their count decides
//! whether a snapshot may be taken.
//!
//! One call of `cuMemImportFromShareableHandle` may import several objects: on machines with several GPUs some allocations
//! have two (driver 580, two and four H200). They begin and end together and count as one.
//!
//! An exported object has 64 bytes of metadata; libcuda uses the first two (driver 580). The interposer writes the
//! exporter's identity into the last 16 ([`Tag`]); an importer with the interposer reads it there and shows zeros to
//! libcuda.
//!
//! Layouts and numbers: nvos.h, nv_escape.h, ctrl0000unix.h of NVIDIA's open kernel modules.

use core::ptr::with_exposed_provenance_mut;
use core::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::{libc, sharing, sys};
use rekindle_abi::sharing::{self as table, Tag};

/// Part of an ioctl number: both directions, and type `F`.
const KIND: usize = 3 << 30 | (b'F' as usize) << 8;
const KIND_MASK: usize = 3 << 30 | 0xff << 8;

const RM_FREE: usize = 0x29;
const RM_CONTROL: usize = 0x2a;
const RM_ALLOC: usize = 0x2b;
const RM_DUP_OBJECT: usize = 0x34;

/// NV0000_CTRL_CMD_OS_UNIX_GET_EXPORT_OBJECT_INFO and _EXPORT_OBJECTS_TO_FD, with the bytes before their metadata and
/// the size of their parameters; another size is another layout.
const EXPORT_INFO: u32 = 0x3d08;
const EXPORT_INFO_AT: usize = 14;
const EXPORT_INFO_SIZE: u32 = 80;
const EXPORT_OBJECTS: u32 = 0x3d0b;
const EXPORT_OBJECTS_AT: usize = 10;
const EXPORT_OBJECTS_SIZE: u32 = 2128;
/// _IMPORT_OBJECT_FROM_FD, which libcuda has not used since it can export several objects at once, and
/// _IMPORT_OBJECTS_FROM_FD.
const IMPORT_ONE: u32 = 0x3d06;
const IMPORT_OBJECTS: u32 = 0x3d0c;

/// Offset of the tag within the metadata, and its magic.
const TAG_AT: usize = 48;
const TAG_MAGIC: u32 = u32::from_le_bytes(*b"rkdl");

/// Clients of this process: libcuda has three, and temporarily a few more.
static CLIENTS: [AtomicU32; 256] = [const { AtomicU32::new(0) }; 256];
static NEXT_CLIENT: AtomicU32 = AtomicU32::new(0);

/// Objects of other processes: client in the upper half, handle in the lower.
static FOREIGN: [AtomicU64; 32768] = [const { AtomicU64::new(0) }; 32768];
/// Entries that were ever used.
static FOREIGN_USED: AtomicU32 = AtomicU32::new(0);

/// The export or import that a thread is doing.
#[derive(Debug)]
struct Pending {
    thread: AtomicI32,
    tag: [AtomicU32; 3],
    /// Objects that were imported.
    objects: AtomicU32,
}

static PENDING: [Pending; 16] = [const {
    Pending { thread: AtomicI32::new(0), tag: [const { AtomicU32::new(0) }; 3], objects: AtomicU32::new(0) }
}; 16];

/// Records that this thread is exporting or importing, until it is dropped.
#[derive(Debug)]
pub(crate) struct Noted(&'static Pending);

impl Noted {
    /// `None` if too many threads do this at once.
    pub(crate) fn begin(tag: Option<Tag>) -> Option<Noted> {
        let thread = sys::thread();
        let free = |p: &&Pending| p.thread.compare_exchange(0, -1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let pending = PENDING.iter().find(free)?;
        let Tag { pid, id, nonce } = tag.unwrap_or(Tag { pid: 0, id: 0, nonce: 0 });
        for (slot, value) in pending.tag.iter().zip([pid, id, nonce]) {
            slot.store(value, Ordering::Relaxed);
        }
        pending.objects.store(0, Ordering::Relaxed);
        pending.thread.store(thread, Ordering::Release);
        Some(Noted(pending))
    }

    /// The tag found in the metadata of an import.
    pub(crate) fn tag(&self) -> Option<Tag> {
        self.0.tag()
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        self.0.thread.store(0, Ordering::Release);
    }
}

impl Pending {
    fn of_this_thread() -> Option<&'static Pending> {
        let thread = sys::thread();
        PENDING.iter().find(|pending| pending.thread.load(Ordering::Acquire) == thread)
    }

    fn tag(&self) -> Option<Tag> {
        let [pid, id, nonce] = [0, 1, 2].map(|at| self.tag.get(at).map_or(0, |slot| slot.load(Ordering::Relaxed)));
        (id != 0).then_some(Tag { pid, id, nonce })
    }

    fn set(&self, tag: Tag) {
        for (slot, value) in self.tag.iter().zip([tag.pid, tag.id, tag.nonce]) {
            slot.store(value, Ordering::Relaxed);
        }
    }
}

/// ioctl(2) with a request number of the resource manager.
pub(crate) unsafe extern "C" fn call(fd: i32, request: usize, argument: usize) -> i32 {
    let size = request >> 16 & 0x3fff;
    let is_ours = |least: usize| argument != 0 && size >= least && request & KIND_MASK == KIND;
    let number = request & 0xff;
    if !matches!(number, RM_FREE | RM_CONTROL | RM_ALLOC | RM_DUP_OBJECT) || !is_ours(16) {
        return libc::ioctl(fd, request, argument);
    }
    if number == RM_CONTROL {
        return if is_ours(32) { control(fd, request, argument) } else { libc::ioctl(fd, request, argument) };
    }
    let result = libc::ioctl(fd, request, argument);
    if result == 0 {
        let words = Words(argument);
        match number {
            // NVOS21, NVOS64: hRoot, hObjectParent, hObjectNew, hClass; NV01_ROOT, _NON_PRIV and _CLIENT.
            RM_ALLOC if matches!(words.get(3), 0 | 1 | 0x41) => add_client(words.get(2)),
            // NVOS55: hClient, hParent, hObject, hClientSrc, hObjectSrc, flags, status.
            RM_DUP_OBJECT if is_ours(28) && words.get(6) == 0 && !is_client(words.get(3)) => {
                add_foreign(words.get(0), words.get(2));
            }
            // NVOS00: hRoot, hObjectParent, hObjectOld, status.
            RM_FREE if words.get(3) == 0 => free(words.get(0), words.get(2)),
            _ => {}
        }
    }
    result
}

/// NVOS54: hClient, hObject, cmd, flags, params (8 bytes), paramsSize, status.
fn control(fd: i32, request: usize, argument: usize) -> i32 {
    let words = Words(argument);
    let command = words.get(2);
    if !matches!(command, EXPORT_INFO | EXPORT_OBJECTS | IMPORT_ONE | IMPORT_OBJECTS) {
        return libc::ioctl(fd, request, argument);
    }
    let params = words.get(4) as usize | (words.get(5) as usize) << 32;
    let size = words.get(6);
    if params != 0
        && (command, size) == (EXPORT_OBJECTS, EXPORT_OBJECTS_SIZE)
        && let Some(tag) = Pending::of_this_thread().and_then(Pending::tag)
    {
        put_tag(params + EXPORT_OBJECTS_AT, tag);
    }
    let result = libc::ioctl(fd, request, argument);
    if result != 0 || words.get(7) != 0 || params == 0 {
        return result;
    }
    match command {
        EXPORT_INFO if size == EXPORT_INFO_SIZE => {
            if let (Some(tag), Some(pending)) = (take_tag(params + EXPORT_INFO_AT), Pending::of_this_thread()) {
                pending.set(tag);
            }
        }
        // fd, hParent, the handles.
        IMPORT_OBJECTS if size >= 12 => {
            let before = Pending::of_this_thread().map_or(0, |p| p.objects.fetch_add(1, Ordering::Relaxed));
            if before == 0 {
                add_foreign(words.get(0), Words(params).get(2));
            }
        }
        IMPORT_ONE | IMPORT_OBJECTS => sharing::obstacle(table::UNTRACKED),
        _ => {}
    }
    result
}

/// 32-bit words at an address that a successful ioctl has just read or written.
struct Words(usize);

impl Words {
    fn get(&self, at: usize) -> u32 {
        // SAFETY: within the structure whose size the number of the ioctl, or the call itself, has told.
        unsafe { with_exposed_provenance_mut::<u32>(self.0 + 4 * at).read_unaligned() }
    }

    fn set(&self, at: usize, value: u32) {
        // SAFETY: as above; the caller of the ioctl reads it after the call.
        unsafe { with_exposed_provenance_mut::<u32>(self.0 + 4 * at).write_unaligned(value) }
    }
}

/// Writes the tag to metadata if there is space. If libcuda uses those bytes, they are not changed: then the origin of
/// an import is unknown, and a snapshot is refused.
fn put_tag(metadata: usize, tag: Tag) {
    let words = Words(metadata + TAG_AT);
    if (0..4).all(|at| words.get(at) == 0) {
        for (at, value) in [TAG_MAGIC, tag.pid, tag.id, tag.nonce].into_iter().enumerate() {
            words.set(at, value);
        }
    }
}

fn take_tag(metadata: usize) -> Option<Tag> {
    let words = Words(metadata + TAG_AT);
    if words.get(0) != TAG_MAGIC {
        return None;
    }
    let tag = Tag { pid: words.get(1), id: words.get(2), nonce: words.get(3) };
    (0..4).for_each(|at| words.set(at, 0));
    Some(tag)
}

fn add_client(client: u32) {
    let free =
        CLIENTS.iter().find(|slot| slot.compare_exchange(0, client, Ordering::Relaxed, Ordering::Relaxed).is_ok());
    if free.is_none() {
        // The oldest one is replaced: objects duplicated from it count as another process's then, and a snapshot is
        // refused.
        let at = NEXT_CLIENT.fetch_add(1, Ordering::Relaxed) as usize % CLIENTS.len();
        if let Some(slot) = CLIENTS.get(at) {
            slot.store(client, Ordering::Relaxed);
        }
    }
}

fn is_client(client: u32) -> bool {
    CLIENTS.iter().any(|slot| slot.load(Ordering::Relaxed) == client)
}

fn add_foreign(client: u32, handle: u32) {
    let object = u64::from(client) << 32 | u64::from(handle);
    let free =
        FOREIGN.iter().position(|slot| slot.compare_exchange(0, object, Ordering::Relaxed, Ordering::Relaxed).is_ok());
    match free {
        Some(at) => {
            FOREIGN_USED.fetch_max(at as u32 + 1, Ordering::Relaxed);
            sharing::count_foreign(1);
        }
        None => sharing::obstacle(table::UNTRACKED),
    }
}

/// Removes an object, or a client with all its objects.
fn free(client: u32, handle: u32) {
    if client == handle {
        for slot in &CLIENTS {
            let _ = slot.compare_exchange(client, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
    for slot in FOREIGN.iter().take(FOREIGN_USED.load(Ordering::Relaxed) as usize) {
        let object = slot.load(Ordering::Relaxed);
        let is_it = object != 0 && (object >> 32) as u32 == client && (client == handle || object as u32 == handle);
        if is_it && slot.compare_exchange(object, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            sharing::count_foreign(-1);
        }
    }
}

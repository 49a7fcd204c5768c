//! The driver's contexts and what is done with them.
#![allow(unsafe_code, reason = "calls of the CUDA driver; each block says why it is sound")]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use super::super::Way;
use super::kernel::{self, Name};
use crate::{Driver, GpuUuid, code};

/// Copies over the bus that a GPU has on its way at once.
pub(super) const SLOTS: usize = 4;
/// Names that one slot has room for: those of a chunk of 64 MiB.
const NAMES: usize = 256;
/// What no memory has for a name.
const NONE: Name = [0; 32];
/// In a copy to the GPU a word of each stretch of so many bytes is compared.
const STRETCH: u64 = 64 << 20;
/// Added to the driver's answer [`code::DEVICE_UNAVAILABLE`].
const BY_ONE: &str = ": a GPU may let only one process use it: set its compute mode to DEFAULT (`nvidia-smi -c 0`)";

/// Memory of the job, mapped here.
pub(super) struct Piece {
    pub(super) address: u64,
    handle: u64,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) device: c_int,
    is_mapped: bool,
    /// It was made here, for a process that will get it.
    pub(super) is_made: bool,
}

macro_rules! functions {
    ($(#[$doc:meta])* $group:ident: $($name:ident: $symbol:literal, fn($($argument:ty),* $(,)?);)*) => {
        $(#[$doc])*
        struct $group {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
        }

        impl $group {
            fn find(driver: &Driver) -> Result<$group, String> {
                Ok($group {
                    $($name: driver.symbol($symbol).ok_or(concat!("the driver has no ", $symbol))?,)*
                })
            }
        }
    };
}

functions! {
    /// The driver's functions (cuda.h of CUDA 13).
    Functions:
    name: "cuGetErrorName", fn(c_int, *mut *const c_char);
    init: "cuInit", fn(c_uint);
    count: "cuDeviceGetCount", fn(*mut c_int);
    uuid: "cuDeviceGetUuid_v2", fn(*mut [u8; 16], c_int);
    retain: "cuDevicePrimaryCtxRetain", fn(*mut *mut c_void, c_int);
    set_current: "cuCtxSetCurrent", fn(*mut c_void);
    new_stream: "cuStreamCreate", fn(*mut *mut c_void, c_uint);
    wait: "cuStreamSynchronize", fn(*mut c_void);
    query: "cuStreamQuery", fn(*mut c_void);
    memory: "cuMemGetInfo_v2", fn(*mut usize, *mut usize);
    allocate: "cuMemAlloc_v2", fn(*mut u64, usize);
    free: "cuMemFree_v2", fn(u64);
    register: "cuMemHostRegister_v2", fn(*mut c_void, usize, c_uint);
    unregister: "cuMemHostUnregister", fn(*mut c_void);
    attribute: "cuDeviceGetAttribute", fn(*mut c_int, c_int, c_int);
    create: "cuMemCreate", fn(*mut u64, usize, *const [u32; 8], u64);
    export: "cuMemExportToShareableHandle", fn(*mut c_int, u64, c_uint, u64);
    import: "cuMemImportFromShareableHandle", fn(*mut u64, usize, c_uint);
    properties: "cuMemGetAllocationPropertiesFromHandle", fn(*mut [u32; 8], u64);
    reserve: "cuMemAddressReserve", fn(*mut u64, usize, usize, u64, u64);
    unreserve: "cuMemAddressFree", fn(u64, usize);
    map: "cuMemMap", fn(u64, usize, usize, u64, u64);
    unmap: "cuMemUnmap", fn(u64, usize);
    access: "cuMemSetAccess", fn(u64, usize, *const [c_int; 3], usize);
    release: "cuMemRelease", fn(u64);
    copy_out: "cuMemcpyDtoHAsync_v2", fn(*mut c_void, u64, usize, *mut c_void);
    copy_in: "cuMemcpyHtoDAsync_v2", fn(u64, *const c_void, usize, *mut c_void);
    copy_within: "cuMemcpyDtoDAsync_v2", fn(u64, u64, usize, *mut c_void);
}

functions! {
    /// Those that name memory.
    Naming:
    load: "cuModuleLoadData", fn(*mut *mut c_void, *const c_char);
    function: "cuModuleGetFunction", fn(*mut *mut c_void, *mut c_void, *const c_char);
    launch: "cuLaunchKernel", fn(
        *mut c_void, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, *mut c_void, *mut *mut c_void, *mut *mut c_void
    );
    host: "cuMemHostAlloc", fn(*mut *mut c_void, usize, c_uint);
    host_address: "cuMemHostGetDevicePointer_v2", fn(*mut u64, *mut c_void, c_uint);
}

/// The GPUs that are in use.
pub(super) struct Gpus {
    functions: Functions,
    pub(super) devices: BTreeMap<c_int, Device>,
    /// What marks a page that was not written.
    pub(super) mark: u64,
}

pub(super) struct Device {
    context: *mut c_void,
    /// For copies over the bus.
    slots: [*mut c_void; SLOTS],
    /// For copies within the GPU.
    within: *mut c_void,
    /// Names memory, if that is wanted.
    namer: Option<Namer>,
}

/// What names memory on a GPU.
struct Namer {
    naming: Naming,
    kernel: *mut c_void,
    streams: [*mut c_void; SLOTS],
    /// Host memory for the names of [`SLOTS`] chunks, which the GPU writes to: here, and there.
    names: *mut Name,
    address: u64,
}

impl Namer {
    /// The names in a slot, at most [`NAMES`]; nothing is being written to it.
    fn read(&self, slot: usize, count: usize) -> impl Iterator<Item = Name> {
        let first = self.names.wrapping_add(slot * NAMES);
        // SAFETY: within the host memory; the GPU has written it, and writes no more.
        (0..count).map(move |at| unsafe { first.wrapping_add(at).read_volatile() })
    }

    /// So that names of an earlier chunk are not taken for those of the next one.
    fn clear(&self, slot: usize) {
        let first = self.names.wrapping_add(slot * NAMES);
        // SAFETY: within the host memory; nothing is being written to the slot.
        (0..NAMES).for_each(|at| unsafe { first.wrapping_add(at).write_volatile(NONE) });
    }
}

impl Gpus {
    pub(super) fn new() -> Result<Gpus, String> {
        let driver = Driver::load().map_err(|error| error.to_string())?;
        let functions = Functions::find(&driver)?;
        let mark = RandomState::new().hash_one(0);
        let gpus = Gpus { functions, devices: BTreeMap::new(), mark };
        // SAFETY: its only argument is 0.
        gpus.check_code(unsafe { (gpus.functions.init)(0) }, "cuInit")?;
        Ok(gpus)
    }

    fn check_code(&self, result: c_int, what: &str) -> Result<(), String> {
        if result == code::SUCCESS {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: it writes one pointer.
        let found = unsafe { (self.functions.name)(result, &raw mut text) };
        let name = match found == code::SUCCESS && !text.is_null() {
            // SAFETY: a static, NUL-terminated string of the library.
            true => unsafe { std::ffi::CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            false => String::new(),
        };
        Err(format!("{what} failed: {name} (error {result})"))
    }

    pub(super) fn device_of(&self, wanted: GpuUuid) -> Result<c_int, String> {
        let mut count = 0;
        // SAFETY: a live local.
        self.check_code(unsafe { (self.functions.count)(&raw mut count) }, "cuDeviceGetCount")?;
        let found = (0..count).find(|device| self.uuid_of(*device).is_ok_and(|uuid| uuid == wanted));
        found.ok_or_else(|| format!("no GPU has the UUID {wanted}"))
    }

    pub(super) fn uuid_of(&self, device: c_int) -> Result<GpuUuid, String> {
        let mut uuid = [0; 16];
        // SAFETY: a live local.
        self.check_code(unsafe { (self.functions.uuid)(&raw mut uuid, device) }, "cuDeviceGetUuid")?;
        Ok(GpuUuid::from_bytes(uuid))
    }

    /// Makes the context of this GPU current, and first of all makes one if there is none.
    pub(super) fn enter(&mut self, device: c_int) -> Result<(), String> {
        if let Some(known) = self.devices.get(&device) {
            // SAFETY: a context that was made here.
            return self.check_code(unsafe { (self.functions.set_current)(known.context) }, "cuCtxSetCurrent");
        }
        let mut context = ptr::null_mut();
        // SAFETY: a live local.
        let result = unsafe { (self.functions.retain)(&raw mut context, device) };
        self.check_code(result, "cuDevicePrimaryCtxRetain").map_err(|why| match result {
            code::DEVICE_UNAVAILABLE => format!("{why}{BY_ONE}"),
            _ => why,
        })?;
        // SAFETY: just made.
        self.check_code(unsafe { (self.functions.set_current)(context) }, "cuCtxSetCurrent")?;
        let mut slots = [ptr::null_mut(); SLOTS];
        for slot in &mut slots {
            *slot = self.new_stream()?;
        }
        let within = self.new_stream()?;
        self.devices.insert(device, Device { context, slots, within, namer: None });
        Ok(())
    }

    /// Has memory of this GPU named from now on. After an error the context may be unusable: end the process.
    pub(super) fn learn_to_name(&mut self, device: c_int) -> Result<(), String> {
        if !self.can_name(device) {
            let namer = self.namer(device)?;
            if let Some(device) = self.devices.get_mut(&device) {
                device.namer = Some(namer);
            }
        }
        Ok(())
    }

    /// Has the driver compile the kernel, and compares what it computes with what the processor does.
    fn namer(&mut self, device: c_int) -> Result<Namer, String> {
        let text = std::ffi::CString::new(kernel::ptx()).map_err(|error| error.to_string())?;
        let (mut module, mut function, mut names) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        let mut address = 0;
        let naming = Naming::find(&Driver::load().map_err(|error| error.to_string())?)?;
        // SAFETY: a live local, and a text that ends with NUL.
        self.check_code(unsafe { (naming.load)(&raw mut module, text.as_ptr()) }, "cuModuleLoadData")?;
        // SAFETY: as above.
        let result = unsafe { (naming.function)(&raw mut function, module, kernel::ENTRY.as_ptr()) };
        self.check_code(result, "cuModuleGetFunction")?;
        // SAFETY: a live local. CU_MEMHOSTALLOC_PORTABLE and CU_MEMHOSTALLOC_DEVICEMAP.
        let result = unsafe { (naming.host)(&raw mut names, SLOTS * NAMES * size_of::<Name>(), 3) };
        self.check_code(result, "cuMemHostAlloc")?;
        // SAFETY: a live local, and memory that was just allocated.
        let result = unsafe { (naming.host_address)(&raw mut address, names, 0) };
        self.check_code(result, "cuMemHostGetDevicePointer")?;
        let mut streams = [ptr::null_mut(); SLOTS];
        for stream in &mut streams {
            *stream = self.new_stream()?;
        }
        let namer = Namer { naming, kernel: function, streams, names: names.cast(), address };
        // Two blocks: the number of a block counts.
        let mut known = vec![0; usize::try_from(2 * kernel::NAMED).map_err(|error| error.to_string())?];
        blake3::Hasher::new_keyed(&[7; 32]).finalize_xof().fill(&mut known);
        let memory = self.allocate(device, 2 * kernel::NAMED)?;
        let named = self
            .copy(device, 0, Way::In, memory, known.as_mut_ptr().expose_provenance(), 2 * kernel::NAMED)
            .and_then(|()| self.finish())
            .and_then(|()| (0..SLOTS).try_for_each(|slot| self.launch(&namer, slot, memory, 2)))
            .and_then(|()| self.wait(namer.streams.map(|stream| (device, stream)).to_vec()));
        let freed = self.free(device, memory);
        named.and(freed)?;
        let expected: Vec<Name> =
            known.chunks_exact(known.len() / 2).map(|half| *blake3::hash(half).as_bytes()).collect();
        match (0..SLOTS).all(|slot| namer.read(slot, 2).eq(expected.iter().copied())) {
            true => Ok(namer),
            false => Err("the GPU computes wrong hashes".into()),
        }
    }

    fn launch(&self, namer: &Namer, slot: usize, memory: u64, blocks: u32) -> Result<(), String> {
        let mut memory = memory;
        let mut names = namer.address + (slot * NAMES * size_of::<Name>()) as u64;
        let mut arguments = [(&raw mut memory).cast::<c_void>(), (&raw mut names).cast::<c_void>()];
        let stream = namer.streams.get(slot).copied().unwrap_or(ptr::null_mut());
        let none = ptr::null_mut();
        namer.clear(slot);
        // SAFETY: the kernel takes two addresses, which the driver reads before the call returns. It reads `blocks` times 256
        // KiB of memory that is mapped until it ends, and writes as many names to the slot's part of the host memory.
        let result = unsafe {
            (namer.naming.launch)(
                namer.kernel,
                blocks,
                1,
                1,
                kernel::THREADS,
                1,
                1,
                0,
                stream,
                arguments.as_mut_ptr(),
                none,
            )
        };
        self.check_code(result, "cuLaunchKernel")
    }

    /// Whether memory of this GPU can be named.
    pub(super) fn can_name(&self, device: c_int) -> bool {
        self.devices.get(&device).is_some_and(|device| device.namer.is_some())
    }

    /// Begins to name memory, in one of the [`SLOTS`]: at most [`NAMES`] times 256 KiB.
    pub(super) fn name(&mut self, device: c_int, slot: usize, memory: u64, bytes: u64) -> Result<(), String> {
        self.enter(device)?;
        let blocks = bytes / kernel::NAMED;
        if blocks > NAMES as u64 {
            return Err(format!("too much for one launch: {bytes} bytes"));
        }
        let blocks = u32::try_from(blocks).unwrap_or(0);
        match self.devices.get(&device).and_then(|device| device.namer.as_ref()) {
            Some(namer) => self.launch(namer, slot, memory, blocks),
            None => Err("the GPU cannot name memory".into()),
        }
    }

    /// The names, once all are there.
    pub(super) fn named(&mut self, device: c_int, slot: usize, bytes: u64) -> Result<Option<Vec<Name>>, String> {
        self.enter(device)?;
        let Some(namer) = self.devices.get(&device).and_then(|device| device.namer.as_ref()) else { return Ok(None) };
        let stream = namer.streams.get(slot).copied().unwrap_or(ptr::null_mut());
        // SAFETY: a stream of this context.
        match unsafe { (self.functions.query)(stream) } {
            code::NOT_READY => Ok(None),
            result => {
                self.check_code(result, "naming memory")?;
                let count = usize::try_from(bytes / kernel::NAMED).map_err(|error| error.to_string())?;
                let names: Vec<Name> = namer.read(slot, count.min(NAMES)).collect();
                if names.contains(&NONE) {
                    return Err("the GPU has not named all memory".into());
                }
                Ok(Some(names))
            }
        }
    }

    fn new_stream(&self) -> Result<*mut c_void, String> {
        let mut stream = ptr::null_mut();
        // SAFETY: a live local. CU_STREAM_NON_BLOCKING.
        self.check_code(unsafe { (self.functions.new_stream)(&raw mut stream, 1) }, "cuStreamCreate")?;
        Ok(stream)
    }

    pub(super) fn register(&mut self, address: usize, length: usize) -> Result<(), String> {
        if let Some(device) = self.devices.keys().next().copied() {
            self.enter(device)?;
        }
        // SAFETY: a mapping of ours, which stays until it is unregistered. CU_MEMHOSTREGISTER_PORTABLE.
        let result = unsafe { (self.functions.register)(ptr::with_exposed_provenance_mut(address), length, 1) };
        self.check_code(result, "cuMemHostRegister")
    }

    pub(super) fn unregister(&mut self, address: usize) {
        if let Some(device) = self.devices.keys().next().copied() {
            let _ = self.enter(device);
        }
        // SAFETY: registered at this address; no copy is under way.
        unsafe { (self.functions.unregister)(ptr::with_exposed_provenance_mut(address)) };
    }

    pub(super) fn import(&mut self, memory: &OwnedFd, offset: u64, bytes: u64) -> Result<Piece, String> {
        let mut handle = 0;
        let number = usize::try_from(memory.as_raw_fd()).map_err(|error| error.to_string())?;
        let import = |gpus: &Gpus, handle: &mut u64| {
            // SAFETY: a live local; a descriptor is passed as a pointer with its number.
            unsafe { (gpus.functions.import)(handle, number, 1) }
        };
        let mut result = import(self, &mut handle);
        if result != code::SUCCESS && self.devices.is_empty() {
            // The GPUs are not known (a container in which NVML does not know the job): any context may help.
            self.enter(0)?;
            result = import(self, &mut handle);
        }
        self.check_code(result, "cuMemImportFromShareableHandle")?;
        let mut piece = Piece { address: 0, handle, offset, bytes, device: 0, is_mapped: false, is_made: false };
        // CUmemAllocationProp: the fourth word is the device.
        let mut properties = [0; 8];
        // SAFETY: a live local of the size of the structure.
        let result = unsafe { (self.functions.properties)(&raw mut properties, handle) };
        if let Err(why) = self.check_code(result, "cuMemGetAllocationPropertiesFromHandle") {
            self.let_go(&piece);
            return Err(why);
        }
        piece.device = properties[3].cast_signed();
        Ok(piece)
    }

    /// Makes memory as the interposer does it for a program (`native/preload/src/kept.rs`).
    pub(super) fn make(&mut self, device: c_int, offset: u64, bytes: u64) -> Result<Piece, String> {
        self.enter(device)?;
        let mut has_rdma = 0;
        // SAFETY: a live local. CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED.
        let result = unsafe { (self.functions.attribute)(&raw mut has_rdma, 110, device) };
        let has_rdma = result == code::SUCCESS && has_rdma != 0;
        // CUmemAllocationProp: pinned, as a descriptor, on a device; then a pointer, and flags: the second byte says that other
        // devices may read and write it.
        let properties = [1, 1, 1, device.cast_unsigned(), 0, 0, u32::from(has_rdma) << 8, 0];
        let (mut handle, length) = (0, usize::try_from(bytes).map_err(|error| error.to_string())?);
        // SAFETY: live locals.
        let result = unsafe { (self.functions.create)(&raw mut handle, length, &raw const properties, 0) };
        self.check_code(result, "cuMemCreate")?;
        Ok(Piece { address: 0, handle, offset, bytes, device, is_mapped: false, is_made: true })
    }

    /// A descriptor of memory that was made here.
    pub(super) fn export(&self, piece: &Piece) -> Result<OwnedFd, String> {
        let mut number = -1;
        // SAFETY: a live local; the driver makes a POSIX descriptor.
        let result = unsafe { (self.functions.export)(&raw mut number, piece.handle, 1, 0) };
        self.check_code(result, "cuMemExportToShareableHandle")?;
        // SAFETY: the driver has just made it, for us alone.
        Ok(unsafe { OwnedFd::from_raw_fd(number) })
    }

    pub(super) fn map(&mut self, piece: &mut Piece) -> Result<(), String> {
        self.enter(piece.device)?;
        let length = usize::try_from(piece.bytes).map_err(|error| error.to_string())?;
        let functions = &self.functions;
        // SAFETY: a live local, and numbers.
        let result = unsafe { (functions.reserve)(&raw mut piece.address, length, 0, 0, 0) };
        self.check_code(result, "cuMemAddressReserve")?;
        // SAFETY: numbers.
        self.check_code(unsafe { (functions.map)(piece.address, length, 0, piece.handle, 0) }, "cuMemMap")?;
        piece.is_mapped = true;
        // CUmemAccessDesc: read and write, from the device.
        let access = [1, piece.device, 3];
        // SAFETY: one live local.
        let result = unsafe { (functions.access)(piece.address, length, &raw const access, 1) };
        self.check_code(result, "cuMemSetAccess")
    }

    /// Begins a copy over the bus, in one of the [`SLOTS`]. `host` is in the mapping of a file, or waited for.
    pub(super) fn copy(
        &mut self,
        device: c_int,
        slot: usize,
        way: Way,
        memory: u64,
        host: usize,
        bytes: u64,
    ) -> Result<(), String> {
        self.enter(device)?;
        let stream = self.slot(device, slot);
        let length = usize::try_from(bytes).map_err(|error| error.to_string())?;
        let host = ptr::with_exposed_provenance_mut::<c_void>(host);
        let result = match way {
            // SAFETY: both are mapped here until the end of the copy, which is awaited.
            Way::Out => unsafe { (self.functions.copy_out)(host, memory, length, stream) },
            // SAFETY: as above.
            Way::In => unsafe { (self.functions.copy_in)(memory, host, length, stream) },
        };
        self.check_code(result, "the copy")
    }

    fn slot(&self, device: c_int, slot: usize) -> *mut c_void {
        self.devices.get(&device).and_then(|device| device.slots.get(slot).copied()).unwrap_or(ptr::null_mut())
    }

    /// Whether what was begun in this slot has ended.
    pub(super) fn is_idle(&mut self, device: c_int, slot: usize) -> Result<bool, String> {
        self.enter(device)?;
        // SAFETY: a stream of this context.
        match unsafe { (self.functions.query)(self.slot(device, slot)) } {
            code::NOT_READY => Ok(false),
            result => self.check_code(result, "the copy").map(|()| true),
        }
    }

    /// Bytes of memory of a GPU that are free, and all.
    pub(super) fn memory(&mut self, device: c_int) -> Result<(u64, u64), String> {
        self.enter(device)?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: live locals.
        self.check_code(unsafe { (self.functions.memory)(&raw mut free, &raw mut total) }, "cuMemGetInfo")?;
        Ok((free as u64, total as u64))
    }

    /// Memory of our own.
    pub(super) fn allocate(&mut self, device: c_int, bytes: u64) -> Result<u64, String> {
        self.enter(device)?;
        let (mut address, bytes) = (0, usize::try_from(bytes).map_err(|error| error.to_string())?);
        // SAFETY: a live local.
        self.check_code(unsafe { (self.functions.allocate)(&raw mut address, bytes) }, "cuMemAlloc")?;
        Ok(address)
    }

    /// The end of that, once nothing is copied from or to it.
    pub(super) fn free(&mut self, device: c_int, address: u64) -> Result<(), String> {
        self.enter(device)?;
        // SAFETY: allocated here; all copies of it have ended.
        self.check_code(unsafe { (self.functions.free)(address) }, "cuMemFree")
    }

    /// Begins a copy within a GPU.
    pub(super) fn copy_within(&mut self, device: c_int, to: u64, from: u64, bytes: u64) -> Result<(), String> {
        self.enter(device)?;
        let stream = self.devices.get(&device).map_or(ptr::null_mut(), |device| device.within);
        let length = usize::try_from(bytes).map_err(|error| error.to_string())?;
        // SAFETY: both are mapped here until the end of the copy, which is awaited.
        let result = unsafe { (self.functions.copy_within)(to, from, length, stream) };
        self.check_code(result, "the copy within the GPU")
    }

    /// Waits for all copies within GPUs.
    pub(super) fn wait_within(&mut self) -> Result<(), String> {
        let all = self.devices.iter().map(|(device, it)| (*device, it.within)).collect();
        self.wait(all)
    }

    /// Waits for all copies.
    pub(super) fn finish(&mut self) -> Result<(), String> {
        let namers = |it: &Device| it.namer.as_ref().map_or([ptr::null_mut(); SLOTS], |namer| namer.streams);
        let streams = |it: &Device| {
            it.slots.into_iter().chain([it.within]).chain(namers(it).into_iter().filter(|stream| !stream.is_null()))
        };
        let all = self.devices.iter().flat_map(|(device, it)| streams(it).map(|stream| (*device, stream))).collect();
        self.wait(all)
    }

    fn wait(&mut self, streams: Vec<(c_int, *mut c_void)>) -> Result<(), String> {
        let mut result = Ok(());
        for (device, stream) in streams {
            // SAFETY: a stream of this context.
            let waited =
                self.enter(device).and_then(|()| self.check_code(unsafe { (self.functions.wait)(stream) }, "the copy"));
            result = result.and(waited);
        }
        result
    }

    /// Compares words of the memory with those in the file.
    pub(super) fn check(&mut self, piece: &Piece, file: &File) -> Result<(), String> {
        use std::os::unix::fs::FileExt;
        let ends: Vec<u64> = (1..=piece.bytes.div_ceil(STRETCH)).map(|n| (n * STRETCH).min(piece.bytes) - 8).collect();
        let mut here = vec![[0_u8; 8]; ends.len()];
        let begun = ends.iter().zip(&mut here).try_for_each(|(at, word)| {
            self.copy(piece.device, 0, Way::Out, piece.address + at, word.as_mut_ptr().expose_provenance(), 8)
        });
        // Also after a failure: they write to the words.
        self.finish().and(begun)?;
        for (at, here) in ends.iter().zip(here) {
            let mut there = [0_u8; 8];
            file.read_exact_at(&mut there, piece.offset + at).map_err(|error| error.to_string())?;
            if here != there {
                return Err("the GPU did not read the file: its pages were replaced".into());
            }
        }
        Ok(())
    }

    pub(super) fn let_go(&mut self, piece: &Piece) {
        let length = usize::try_from(piece.bytes).unwrap_or(0);
        if piece.is_mapped {
            // SAFETY: mapped here; all copies have ended.
            unsafe { (self.functions.unmap)(piece.address, length) };
        }
        // SAFETY: a handle of ours.
        unsafe { (self.functions.release)(piece.handle) };
        if piece.address != 0 {
            // SAFETY: reserved here.
            unsafe { (self.functions.unreserve)(piece.address, length) };
        }
    }
}

//! The process that copies.
#![allow(
    unsafe_code,
    reason = "calls of the CUDA driver and mappings that it reads and writes; each block says why it is sound"
)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr;
use std::time::{Duration, Instant};

use super::Way;
use super::wire::{Answer, Ask};
use crate::{Driver, GpuUuid, code};
use rekindle_os::pages;

/// What the driver maps at once, and the size of a huge page.
const GRANULE: u64 = 2 << 20;
/// Addresses for a file, as many as one may ever need.
const ADDRESSES: usize = 1 << 41;
/// In a copy to the GPU a word of each stretch of so many bytes is compared.
const STRETCH: u64 = 64 << 20;

/// Serves requests until the socket ends. Returns why it ended, if it was for another reason.
///
/// # Errors
/// In words: there is no driver, or the socket failed.
pub fn serve(socket: &OwnedFd) -> Result<(), String> {
    let mut server = Server { gpus: None, files: Vec::new(), copy: None };
    while let Some((ask, file)) = Ask::receive(socket.as_fd()).map_err(|error| error.to_string())? {
        let result = match ask {
            Ask::Gpu(uuid) => server.gpu(uuid).map(|()| [0; 2]),
            Ask::File(bytes) => server.file(file, bytes).map(|registered| [registered, 0]),
            Ask::Begin(way, file) => {
                server.copy = Some(Copy::begin(way, file));
                continue;
            }
            Ask::Piece(offset, bytes) => {
                server.piece(file, offset, bytes);
                continue;
            }
            Ask::End => server.end(),
            Ask::Forget => {
                server.forget();
                continue;
            }
        };
        let answer = match result {
            Ok(numbers) => Answer { numbers, why: None },
            Err(why) => Answer { numbers: [0; 2], why: Some(why) },
        };
        answer.send(socket.as_fd()).map_err(|error| error.to_string())?;
    }
    Ok(())
}

struct Server {
    gpus: Option<Gpus>,
    files: Vec<Mapped>,
    copy: Option<Copy>,
}

/// A copy under way.
struct Copy {
    way: Way,
    file: [u64; 2],
    begun: Instant,
    pieces: Vec<Piece>,
    bytes: u64,
    /// Why it has failed.
    failed: Option<String>,
}

impl Copy {
    fn begin(way: Way, file: [u64; 2]) -> Copy {
        Copy { way, file, begun: Instant::now(), pieces: Vec::new(), bytes: 0, failed: None }
    }
}

/// Memory of the job, mapped here.
struct Piece {
    address: u64,
    handle: u64,
    offset: u64,
    bytes: u64,
    device: c_int,
    is_mapped: bool,
}

impl Server {
    fn gpus(&mut self) -> Result<&mut Gpus, String> {
        match &mut self.gpus {
            Some(gpus) => Ok(gpus),
            none => Ok(none.insert(Gpus::new()?)),
        }
    }

    fn gpu(&mut self, uuid: GpuUuid) -> Result<(), String> {
        let gpus = self.gpus()?;
        let device = gpus.device_of(uuid)?;
        gpus.enter(device)
    }

    fn file(&mut self, file: Option<OwnedFd>, bytes: u64) -> Result<u64, String> {
        let file = File::from(file.ok_or("no file came with the request")?);
        let meta = file.metadata().map_err(|error| error.to_string())?;
        let key = [meta.dev(), meta.ino()];
        if bytes > meta.len() {
            return Err(format!("the file has {} bytes and not {bytes}", meta.len()));
        }
        self.gpus()?;
        self.forget();
        let Some(gpus) = &mut self.gpus else { return Err("no GPU".into()) };
        let at = match self.files.iter().position(|known| known.key == key) {
            Some(at) => at,
            None => {
                self.files.push(Mapped::new(file, key)?);
                self.files.len() - 1
            }
        };
        let Some(mapped) = self.files.get_mut(at) else { return Err("no such file".into()) };
        mapped.set_length(gpus, bytes);
        mapped.register(gpus);
        mapped.map_all()?;
        Ok(mapped.registered())
    }

    /// Forgets files that do not exist any more. While a copy is under way, its file is not forgotten.
    fn forget(&mut self) {
        let (Some(gpus), None) = (&mut self.gpus, &self.copy) else { return };
        self.files.retain_mut(|known| {
            let is_there = known.file.metadata().is_ok_and(|meta| meta.nlink() > 0);
            if !is_there {
                known.set_length(gpus, 0);
            }
            is_there
        });
    }

    /// A failure is told at the end of the copy.
    fn piece(&mut self, memory: Option<OwnedFd>, offset: u64, bytes: u64) {
        let Some(mut copy) = self.copy.take() else { return };
        if copy.failed.is_none() {
            copy.failed = self.begin_piece(&mut copy, memory, offset, bytes).err();
        }
        self.copy = Some(copy);
    }

    fn begin_piece(&mut self, copy: &mut Copy, memory: Option<OwnedFd>, offset: u64, bytes: u64) -> Result<(), String> {
        let memory = memory.ok_or("no memory came with the request")?;
        let gpus = match &mut self.gpus {
            Some(gpus) => gpus,
            none => none.insert(Gpus::new()?),
        };
        let is_it = |known: &&mut Mapped| known.key == copy.file;
        let mapped = self.files.iter_mut().find(is_it).ok_or("the file is not known")?;
        if offset.checked_add(bytes).is_none_or(|end| end > mapped.length) {
            return Err("the file is too short for the memory".into());
        }
        let piece = gpus.import(&memory, offset, bytes)?;
        copy.pieces.push(piece);
        let Some(piece) = copy.pieces.last_mut() else { return Ok(()) };
        gpus.map(piece)?;
        // Of GPUs that were not known when the file was.
        mapped.register(gpus);
        if copy.way == Way::Out {
            mapped.mark(offset, bytes, gpus.mark);
        }
        for (from, length) in mapped.stretches(offset, bytes) {
            let (device, host) = (piece.address + (from - offset), mapped.address(from));
            gpus.copy(piece.device, copy.way, device, host, length)?;
            copy.bytes += length;
        }
        Ok(())
    }

    fn end(&mut self) -> Result<[u64; 2], String> {
        let mut copy = self.copy.take().ok_or("no copy has begun")?;
        let Some(gpus) = &mut self.gpus else { return Err(copy.failed.unwrap_or_else(|| "nothing was copied".into())) };
        let finished = gpus.finish();
        copy.failed = copy.failed.or_else(|| finished.err());
        if copy.failed.is_none()
            && let Some(mapped) = self.files.iter().find(|known| known.key == copy.file)
        {
            let checked = copy.pieces.iter().try_for_each(|piece| match copy.way {
                Way::Out => mapped.check_marks(piece.offset, piece.bytes, gpus.mark),
                Way::In => gpus.check(piece, mapped),
            });
            copy.failed = checked.err();
        }
        let took = copy.begun.elapsed();
        for piece in &copy.pieces {
            gpus.let_go(piece);
        }
        match copy.failed {
            Some(why) => Err(why),
            None => Ok([copy.bytes, micros(took)]),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// A file, mapped. Its pages are registered with the driver, so that the GPU reads and writes them itself: they do not move,
/// and they are the file's only as long as it is not cut. So a copy leaves marks in the pages before it begins, through the
/// mapping, and looks for them afterwards: one that is still there is a page that the GPU did not write.
struct Mapped {
    file: File,
    key: [u64; 2],
    /// What was reserved, of which the file's part begins at `base`.
    reserved: usize,
    base: usize,
    length: u64,
    /// Whether its pages may be registered: what a device writes to those of a disk's file is not known to be changed, and can
    /// be lost. Linux 6.5 and later refuses that for all files but those in memory.
    is_in_memory: bool,
    /// Begin and end of each part, and whether it is registered.
    ranges: Vec<(u64, u64, bool)>,
}

impl Mapped {
    fn new(file: File, key: [u64; 2]) -> Result<Mapped, String> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping without access.
        let base = unsafe { libc::mmap(ptr::null_mut(), ADDRESSES, libc::PROT_NONE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(format!("no addresses for the file: {}", std::io::Error::last_os_error()));
        }
        // Huge pages are mapped whole only where address and offset agree.
        let reserved = base.expose_provenance();
        let base = reserved.next_multiple_of(usize::try_from(GRANULE).unwrap_or(1));
        let is_in_memory = pages::is_in_memory(&file).unwrap_or(false);
        Ok(Mapped { file, key, reserved, base, length: 0, is_in_memory, ranges: Vec::new() })
    }

    fn address(&self, at: u64) -> usize {
        self.base + usize::try_from(at).unwrap_or(0)
    }

    /// Adds a part at the end, or gives up parts there. What is given up is not registered any more.
    fn set_length(&mut self, gpus: &mut Gpus, bytes: u64) {
        if bytes > self.length {
            self.ranges.push((self.length, bytes, false));
        }
        while let Some((begin, end, is_registered)) = self.ranges.last().copied().filter(|(_, end, _)| *end > bytes) {
            if is_registered {
                gpus.unregister(self.address(begin));
            }
            self.ranges.pop();
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            let (at, length) = (self.address(begin), usize::try_from(end - begin).unwrap_or(0));
            // SAFETY: in place of a part of our own mapping, of which nothing is borrowed.
            unsafe { libc::mmap(ptr::with_exposed_provenance_mut(at), length, libc::PROT_NONE, flags, -1, 0) };
            if begin < bytes {
                self.ranges.push((begin, bytes, false));
            }
        }
        self.length = bytes;
    }

    /// Maps what is not mapped yet.
    fn map_all(&self) -> Result<(), String> {
        for (begin, end, _) in self.ranges.iter().filter(|(.., is_registered)| !is_registered) {
            self.map(*begin, *end)?;
        }
        Ok(())
    }

    fn map(&self, begin: u64, end: u64) -> Result<(), String> {
        let (at, length) = (self.address(begin), usize::try_from(end - begin).unwrap_or(0));
        let offset = libc::off_t::try_from(begin).map_err(|error| error.to_string())?;
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        // SAFETY: in place of a part of our own addresses, of which nothing is borrowed.
        let mapped = unsafe {
            libc::mmap(ptr::with_exposed_provenance_mut(at), length, prot, flags, self.file.as_raw_fd(), offset)
        };
        if mapped == libc::MAP_FAILED {
            return Err(format!("cannot map it: {}", std::io::Error::last_os_error()));
        }
        Ok(())
    }

    /// Registers what is not registered, if there is a context. Where that fails the copy is slower.
    fn register(&mut self, gpus: &mut Gpus) {
        if gpus.devices.is_empty() || !self.is_in_memory {
            return;
        }
        for at in 0..self.ranges.len() {
            let Some((begin, end, false)) = self.ranges.get(at).copied() else { continue };
            let length = usize::try_from(end - begin).unwrap_or(0);
            let is_registered = self.map(begin, end).is_ok() && gpus.register(self.address(begin), length).is_ok();
            if let Some(range) = self.ranges.get_mut(at) {
                range.2 = is_registered;
            }
        }
    }

    fn registered(&self) -> u64 {
        self.ranges.iter().filter(|(.., is_registered)| *is_registered).map(|(begin, end, _)| end - begin).sum()
    }

    /// The parts of a range, each within one registered part: the driver copies none across two.
    fn stretches(&self, offset: u64, bytes: u64) -> Vec<(u64, u64)> {
        let common = |&(begin, end, _): &(u64, u64, bool)| {
            let (begin, end) = (begin.max(offset), end.min(offset + bytes));
            (begin < end).then(|| (begin, end - begin))
        };
        self.ranges.iter().filter_map(common).collect()
    }

    /// The last word of each huge page of a range.
    fn words(&self, offset: u64, bytes: u64) -> impl Iterator<Item = *mut u64> {
        let ends = (1..=bytes.div_ceil(GRANULE)).map(move |page| offset + (page * GRANULE).min(bytes));
        ends.map(|end| ptr::with_exposed_provenance_mut::<u64>(self.address(end) - 8))
    }

    fn mark(&self, offset: u64, bytes: u64, mark: u64) {
        for word in self.words(offset, bytes) {
            // SAFETY: mapped, and writable; whoever cuts the file ends this process, which is noticed.
            unsafe { word.write_volatile(mark) };
        }
    }

    fn check_marks(&self, offset: u64, bytes: u64, mark: u64) -> Result<(), String> {
        for word in self.words(offset, bytes) {
            // SAFETY: as above.
            if unsafe { word.read_volatile() } == mark {
                return Err("the GPU did not write to the file: its pages were replaced".into());
            }
        }
        Ok(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: our own addresses, of which nothing is borrowed, and nothing is registered: a file is forgotten after
        // `set_length` of 0.
        unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.reserved), ADDRESSES) };
    }
}

macro_rules! functions {
    ($($name:ident: $symbol:literal, fn($($argument:ty),*);)*) => {
        /// The driver's functions (cuda.h of CUDA 13).
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            name: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
        }

        impl Functions {
            fn find(driver: &Driver) -> Result<Functions, String> {
                Ok(Functions {
                    $($name: driver.symbol($symbol).ok_or(concat!("the driver has no ", $symbol))?,)*
                    name: driver.symbol("cuGetErrorName").ok_or("the driver has no cuGetErrorName")?,
                })
            }
        }
    };
}

functions! {
    init: "cuInit", fn(c_uint);
    count: "cuDeviceGetCount", fn(*mut c_int);
    uuid: "cuDeviceGetUuid_v2", fn(*mut [u8; 16], c_int);
    retain: "cuDevicePrimaryCtxRetain", fn(*mut *mut c_void, c_int);
    set_current: "cuCtxSetCurrent", fn(*mut c_void);
    new_stream: "cuStreamCreate", fn(*mut *mut c_void, c_uint);
    wait: "cuStreamSynchronize", fn(*mut c_void);
    register: "cuMemHostRegister_v2", fn(*mut c_void, usize, c_uint);
    unregister: "cuMemHostUnregister", fn(*mut c_void);
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
}

/// The GPUs that are in use.
struct Gpus {
    functions: Functions,
    devices: BTreeMap<c_int, Device>,
    /// What marks a page that was not written.
    mark: u64,
}

struct Device {
    context: *mut c_void,
    stream: *mut c_void,
}

impl Gpus {
    fn new() -> Result<Gpus, String> {
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

    fn device_of(&self, wanted: GpuUuid) -> Result<c_int, String> {
        let mut count = 0;
        // SAFETY: a live local.
        self.check_code(unsafe { (self.functions.count)(&raw mut count) }, "cuDeviceGetCount")?;
        let is_it = |device: &c_int| {
            let mut uuid = [0; 16];
            // SAFETY: a live local.
            let result = unsafe { (self.functions.uuid)(&raw mut uuid, *device) };
            result == code::SUCCESS && uuid == wanted.bytes()
        };
        (0..count).find(is_it).ok_or_else(|| format!("no GPU has the UUID {wanted}"))
    }

    /// Makes the context of this GPU current, and first of all makes one if there is none.
    fn enter(&mut self, device: c_int) -> Result<(), String> {
        if let Some(known) = self.devices.get(&device) {
            // SAFETY: a context that was made here.
            return self.check_code(unsafe { (self.functions.set_current)(known.context) }, "cuCtxSetCurrent");
        }
        let (mut context, mut stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live local.
        let result = unsafe { (self.functions.retain)(&raw mut context, device) };
        self.check_code(result, "cuDevicePrimaryCtxRetain")?;
        // SAFETY: just made.
        self.check_code(unsafe { (self.functions.set_current)(context) }, "cuCtxSetCurrent")?;
        // SAFETY: a live local. CU_STREAM_NON_BLOCKING.
        self.check_code(unsafe { (self.functions.new_stream)(&raw mut stream, 1) }, "cuStreamCreate")?;
        self.devices.insert(device, Device { context, stream });
        Ok(())
    }

    fn register(&mut self, address: usize, length: usize) -> Result<(), String> {
        if let Some(device) = self.devices.keys().next().copied() {
            self.enter(device)?;
        }
        // SAFETY: a mapping of ours, which stays until it is unregistered. CU_MEMHOSTREGISTER_PORTABLE.
        let result = unsafe { (self.functions.register)(ptr::with_exposed_provenance_mut(address), length, 1) };
        self.check_code(result, "cuMemHostRegister")
    }

    fn unregister(&mut self, address: usize) {
        if let Some(device) = self.devices.keys().next().copied() {
            let _ = self.enter(device);
        }
        // SAFETY: registered at this address; no copy is under way.
        unsafe { (self.functions.unregister)(ptr::with_exposed_provenance_mut(address)) };
    }

    fn import(&mut self, memory: &OwnedFd, offset: u64, bytes: u64) -> Result<Piece, String> {
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
        let mut piece = Piece { address: 0, handle, offset, bytes, device: 0, is_mapped: false };
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

    fn map(&mut self, piece: &mut Piece) -> Result<(), String> {
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

    fn copy(&mut self, device: c_int, way: Way, memory: u64, host: usize, length: u64) -> Result<(), String> {
        self.enter(device)?;
        let stream = self.devices.get(&device).map_or(ptr::null_mut(), |device| device.stream);
        let length = usize::try_from(length).map_err(|error| error.to_string())?;
        let host = ptr::with_exposed_provenance_mut::<c_void>(host);
        let result = match way {
            // SAFETY: both are mapped here until the end of the copy, which is awaited.
            Way::Out => unsafe { (self.functions.copy_out)(host, memory, length, stream) },
            // SAFETY: as above.
            Way::In => unsafe { (self.functions.copy_in)(memory, host, length, stream) },
        };
        self.check_code(result, "the copy")
    }

    /// Waits for all copies.
    fn finish(&mut self) -> Result<(), String> {
        let mut result = Ok(());
        let all: Vec<(c_int, *mut c_void)> = self.devices.iter().map(|(device, it)| (*device, it.stream)).collect();
        for (device, stream) in all {
            // SAFETY: a stream of this context.
            let waited =
                self.enter(device).and_then(|()| self.check_code(unsafe { (self.functions.wait)(stream) }, "the copy"));
            result = result.and(waited);
        }
        result
    }

    /// Compares words of the memory with those in the file.
    fn check(&mut self, piece: &Piece, mapped: &Mapped) -> Result<(), String> {
        use std::os::unix::fs::FileExt;
        let ends = (1..=piece.bytes.div_ceil(STRETCH)).map(|n| (n * STRETCH).min(piece.bytes) - 8);
        for at in ends {
            let (mut here, mut there) = ([0_u8; 8], [0_u8; 8]);
            mapped.file.read_exact_at(&mut there, piece.offset + at).map_err(|error| error.to_string())?;
            self.copy(piece.device, Way::Out, piece.address + at, here.as_mut_ptr().expose_provenance(), 8)?;
            self.finish()?;
            if here != there {
                return Err("the GPU did not read the file: its pages were replaced".into());
            }
        }
        Ok(())
    }

    fn let_go(&mut self, piece: &Piece) {
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

#[cfg(test)]
mod tests;

//! A stand-in for libcuda.so.1, so that the CUDA path can be tested without a GPU. It keeps the state machine and the
//! error codes of the driver, across processes and across CRIU. A test installs it as `libcuda.so.1` in a folder of its
//! own and puts that folder on `LD_LIBRARY_PATH`; it is no part of the product.
//!
//! ```text
//!  supervisor, or any caller                                job
//!  cuCheckpointProcessLock(outer pid)                       cuCtxCreate_v2: opens a descriptor that CRIU refuses,
//!     /proc/PID/maps names the control file                 maps $STANDIN_CUDA_DIR/<its own pid>.ctl, starts a thread
//!     flock it, write the request  --- control file --->    the thread answers requests, and holds the truth about
//!     wait for the reply           <--------------------    the state in the job's private memory
//! ```
//!
//! - The truth about the state is in the job's private memory: a process that CRIU restored is in the state of its
//!   image, whatever the control file said when the last life of it ended. The file holds requests and replies only,
//!   and a request whose caller is gone (it no longer holds the lock) is not carried out.
//! - `cuInit` does nothing but take its time, and so a caller never becomes a CUDA process of its own. One that CRIU
//!   restored in the middle of it fails, as the driver's does (580: 304). `cuCtxCreate_v2` and
//!   `cuDevicePrimaryCtxRetain` make one, and fail with `NO_DEVICE` where `STANDIN_CUDA_DIR` is not set.
//! - "Device memory" is memory that only the functions here may touch. A checkpoint takes the shape that the real
//!   driver's has: one `mmap(NULL, total, RW, PRIVATE|ANONYMOUS|POPULATE)` through libc's symbol, then one `memcpy` of
//!   libc for each 2 MiB out of a staging buffer, on the driver's thread, while the device side goes away.
//! - Memory that processes share (`cuMemCreate` and its kin, CUDA IPC) makes the driver's calls of the resource manager
//!   by the process's first `ioctl`, and has an `ioctl` that answers them: for a job that preloads this object last.
//! - A lock makes CUDA calls of the job block; it waits for those under way, and for kernels that other libraries have
//!   started (`standin_launch`), and gives up with `NOT_READY`.
//! - One folder serves one job: two PID namespaces number their processes alike.
//!
//! # Faults
//! Files in `$STANDIN_CUDA_DIR`, looked at by the job for each request; OP is `state`, `tid`, `lock`, `checkpoint`,
//! `restore` or `unlock`:
//! - `fail-OP`: `CODE [times=N] [skip=N] [delay=MS] [pid=P]`. Waits, then answers with CODE; with code 0 it only waits.
//!   Without `times` it stays, with it the file goes away after N times; the first calls, as many as `skip` says, go well.
//!   `pid` is the job's own number of itself.
//! - `die-at-OP`: `[delay=MS] [pid=P]`. Waits, removes the file and kills itself with SIGKILL.
//! - `exit-at-OP`: `[pid=P]`. The same, but it ends with code 0.
//! - OP may also be `keeper-CALL`: `unmap`, `release`, `export`, `import`, `map`, `access` or `retain`, where a keeper
//!   of the interposer calls it; or `copier-CALL` with these, or `context`, `create`, `register`, `allocate`, `free`, `info`
//!   (what is free), `out` (a copy from the device), `in` and `within` (the device), `module` and `name` (the kernel that
//!   names memory) or `write-names` (it ends well and writes nothing), where the process calls it with which rekindle copies
//!   memory that stays on the GPU. Faults of copies come when the copy is done.
//! - OP may also be `init`, for `cuInit`. The supervisor calls it too: `pid` tells them apart.
//!
//! A failed restore leaves the process FAILED; other failures leave the state as it was.
//!
//! # GPUs
//! Two, a0a0... and b0b0... with 1 GiB each, or those of the file `$STANDIN_CUDA_DIR/gpus`, looked at whenever it
//! matters: `BYTE MIB TAKEN [lost] [mig] [vgpu] [NAME]` a line: the byte that its UUID consists of, its memory, what
//! somebody else has of that. A job begins on the first, or on that of CUDA_VISIBLE_DEVICES. Installed as
//! `libnvidia-ml.so.1` too it tells of them as NVML does, and of the processes on them.
//!
//! # Environment
//! `STANDIN_CUDA_DIR` (the job's folder for control files and faults), `STANDIN_CUDA_VERSION` (what
//! `cuDriverGetVersion` says, 13000 by default).
#![allow(unsafe_code, reason = "a C interface: every block says why it is sound")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is that of cuda.h")]
#![allow(non_snake_case, reason = "the names are those of cuda.h")]

mod caller;
mod control;
mod copies;
mod fault;
mod gate;
mod gpus;
pub mod host;
mod job;
mod kernels;
mod memory;
pub mod nvml;
pub mod objects;
mod rm;
mod shared;

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use control::{Op, code};

/// What a caller gets for `result`.
fn answer(result: Result<(), i32>) -> c_int {
    result.err().unwrap_or(code::SUCCESS)
}

/// Makes nothing of the caller: one of checkpoint functions is no CUDA process.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags == 0 { answer(job::initialize()) } else { code::INVALID_VALUE }
}

/// `STANDIN_CUDA_VERSION`, or 13000.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    let value = std::env::var("STANDIN_CUDA_VERSION").ok().and_then(|text| text.parse().ok()).unwrap_or(13_000);
    // SAFETY: the caller passes null or room for an int.
    match unsafe { version.as_mut() } {
        Some(version) => *version = value,
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// Names of the codes that the stand-in uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: c_int, text: *mut *const c_char) -> c_int {
    let name: &CStr = match error {
        code::SUCCESS => c"CUDA_SUCCESS",
        code::INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        code::OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        code::NOT_INITIALIZED => c"CUDA_ERROR_NOT_INITIALIZED",
        code::NO_DEVICE => c"CUDA_ERROR_NO_DEVICE",
        code::OPERATING_SYSTEM => c"CUDA_ERROR_OPERATING_SYSTEM",
        code::ILLEGAL_STATE => c"CUDA_ERROR_ILLEGAL_STATE",
        code::NOT_READY => c"CUDA_ERROR_NOT_READY",
        code::NOT_SUPPORTED => c"CUDA_ERROR_NOT_SUPPORTED",
        code::UNKNOWN => c"CUDA_ERROR_UNKNOWN",
        _ => return code::INVALID_VALUE,
    };
    // SAFETY: the caller passes null or room for a pointer.
    match unsafe { text.as_mut() } {
        Some(text) => *text = name.as_ptr(),
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// Makes this process a CUDA process. There is one context; `context` is set to a value that means nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut *mut c_void, _flags: c_uint, device: c_int) -> c_int {
    if device != 0 {
        return code::INVALID_VALUE;
    }
    // SAFETY: the caller passes null or room for a pointer.
    if let Some(context) = unsafe { context.as_mut() } {
        *context = std::ptr::dangling_mut();
    }
    answer(job::start())
}

/// As `cuCtxCreate_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, device: c_int) -> c_int {
    if let Err(code) = fault::inject_copier("context") {
        return code;
    }
    // SAFETY: the same contract.
    unsafe { cuCtxCreate_v2(context, 0, device) }
}

/// The UUID of the GPU that this process is on; it changes when a restore maps it to the other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) -> c_int {
    // SAFETY: the caller passes null or room for 16 bytes.
    match unsafe { uuid.as_mut() } {
        Some(uuid) if device == 0 => *uuid = job::gpu(),
        _ => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// Allocates device memory, in whole pieces of 2 MiB.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(pointer: *mut usize, bytes: usize) -> c_int {
    // SAFETY: the caller passes null or room for a pointer.
    let Some(pointer) = (unsafe { pointer.as_mut() }) else { return code::INVALID_VALUE };
    let allocate = || fault::inject_copier("allocate").and_then(|()| memory::allocate(bytes));
    answer(job::call(|| allocate().map(|address| *pointer = address)))
}

/// Frees device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(pointer: usize) -> c_int {
    answer(job::call(|| fault::inject_copier("free").and_then(|()| memory::free(pointer))))
}

/// Copies to device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(device: usize, host: *const u8, bytes: usize) -> c_int {
    // SAFETY: the caller passes `bytes` readable bytes at `host`; device memory is checked.
    answer(job::call(|| unsafe { memory::write(device, host, bytes) }))
}

/// Copies from device memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(host: *mut u8, device: usize, bytes: usize) -> c_int {
    // SAFETY: the caller passes `bytes` writable bytes at `host`; device memory is checked.
    answer(job::call(|| unsafe { memory::read(host, device, bytes) }))
}

/// A "kernel": adds one to the 64-bit number at this device address.
#[unsafe(no_mangle)]
pub extern "C" fn standin_increment(device: usize) -> c_int {
    answer(job::call(|| memory::increment(device)))
}

/// A "kernel" that runs this long. A lock waits for it.
#[unsafe(no_mangle)]
pub extern "C" fn standin_busy(milliseconds: c_uint) -> c_int {
    answer(job::call(|| {
        std::thread::sleep(std::time::Duration::from_millis(milliseconds.into()));
        Ok(())
    }))
}

/// Not of CUDA: computes for this long with a lock that the driver's thread takes in a checkpoint and in a restore, as
/// the heap's lock of libc.
#[unsafe(no_mangle)]
pub extern "C" fn standin_occupy(milliseconds: c_uint) {
    job::occupy(std::time::Duration::from_millis(milliseconds.into()));
}

/// A "kernel" of a collective: ends once all ranks have begun theirs, which they count in the memory that they share. A
/// lock of this rank waits for it, and so for ranks that are locked.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_collective(begun: *const AtomicU64, ranks: u64) -> c_int {
    // SAFETY: the caller passes null or memory that all ranks have mapped, and keeps it mapped.
    let Some(begun) = (unsafe { begun.as_ref() }) else { return code::INVALID_VALUE };
    answer(job::call(|| {
        let before = begun.fetch_add(1, Ordering::SeqCst);
        let all = (before / ranks + 1) * ranks;
        while begun.load(Ordering::SeqCst) < all {
            std::thread::sleep(std::time::Duration::from_micros(500));
        }
        Ok(())
    }))
}

/// Starts a "kernel" of another library: `advance` is called with `argument`, on the driver's thread, until it returns
/// another number than 0. Kernels of one stream run one after the other. A lock waits for all.
///
/// `advance` may call `standin_load` and `standin_store`, and nothing else of the driver.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_launch(
    stream: usize,
    advance: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    argument: *mut c_void,
) -> c_int {
    let Some(advance) = advance else { return code::INVALID_VALUE };
    answer(job::call(|| {
        kernels::launch(stream, advance, argument);
        Ok(())
    }))
}

/// Waits for the kernels and copies of a stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    let copied = copies::wait(stream);
    loop {
        let mut is_idle = false;
        let asked = job::call(|| {
            kernels::advance();
            is_idle = kernels::is_idle(Some(stream));
            Ok(())
        });
        if is_idle || asked.is_err() {
            return answer(copied.and(asked));
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// A kernel's look at device memory: the number at this address, which its library has checked.
#[unsafe(no_mangle)]
pub extern "C" fn standin_load(device: usize) -> u64 {
    memory::load(device).unwrap_or(u64::MAX)
}

/// A kernel's write to it.
#[unsafe(no_mangle)]
pub extern "C" fn standin_store(device: usize, number: u64) -> c_int {
    answer(memory::store(device, number))
}

/// Memory that can be shared: whole pieces of 2 MiB.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(handle: *mut u64, size: usize, properties: *const [u32; 8], _flags: u64) -> c_int {
    // SAFETY: the caller passes null or room for a handle.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return code::INVALID_VALUE };
    // SAFETY: the caller passes null or a CUmemAllocationProp.
    let location = unsafe { properties.as_ref() }.map_or(1, |properties| properties[2]);
    answer(job::call(|| memory::shared("create", |shared| shared.create(size, location)).map(|new| *handle = new)))
}

/// A descriptor for another process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    file: *mut c_int,
    handle: u64,
    kind: c_uint,
    _flags: u64,
) -> c_int {
    // SAFETY: the caller passes null or room for a descriptor.
    let Some(file) = (unsafe { file.as_mut() }).filter(|_| kind == 1) else { return code::INVALID_VALUE };
    answer(job::call(|| memory::shared("export", |shared| shared.export(handle)).map(|new| *file = new)))
}

/// Memory of another process, or of this one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(handle: *mut u64, file: usize, kind: c_uint) -> c_int {
    // SAFETY: the caller passes null or room for a handle.
    let Some(handle) = (unsafe { handle.as_mut() }).filter(|_| kind == 1) else { return code::INVALID_VALUE };
    let Ok(file) = c_int::try_from(file) else { return code::INVALID_VALUE };
    let import = || {
        job::may_import()?;
        memory::shared("import", |shared| shared.import(file)).map(|new| *handle = new)
    };
    answer(job::call(import))
}

/// One reference less.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> c_int {
    answer(job::call(|| memory::shared("release", |shared| shared.release(handle))))
}

/// One reference more to what is mapped at this address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut u64, address: usize) -> c_int {
    // SAFETY: the caller passes null or room for a handle.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return code::INVALID_VALUE };
    answer(job::call(|| memory::shared("retain", |shared| shared.retain(address)).map(|found| *handle = found)))
}

/// `CUmemAllocationProp`: pinned, as a descriptor, on the device 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(properties: *mut [u32; 8], handle: u64) -> c_int {
    // SAFETY: the caller passes null or room for the structure.
    let Some(properties) = (unsafe { properties.as_mut() }) else { return code::INVALID_VALUE };
    let known = || memory::shared("properties", |shared| shared.size(handle));
    answer(job::call(|| known().map(|_| *properties = [1, 1, 1, 0, 0, 0, 0, 0])))
}

/// Addresses without memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    address: *mut usize,
    size: usize,
    _alignment: usize,
    _wanted: usize,
    _flags: u64,
) -> c_int {
    // SAFETY: the caller passes null or room for an address.
    let Some(address) = (unsafe { address.as_mut() }) else { return code::INVALID_VALUE };
    answer(job::call(|| memory::shared("reserve", |shared| shared.reserve(size)).map(|start| *address = start)))
}

/// Gives addresses back.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(address: usize, size: usize) -> c_int {
    answer(job::call(|| memory::shared("unreserve", |shared| shared.unreserve(address, size))))
}

/// Puts memory to addresses. It can be used once somebody has access.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(address: usize, size: usize, offset: usize, handle: u64, _flags: u64) -> c_int {
    answer(job::call(|| memory::shared("map", |shared| shared.map(address, size, offset, handle))))
}

/// Takes memory from addresses: whole mappings, one or more.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(address: usize, size: usize) -> c_int {
    answer(job::call(|| memory::shared("unmap", |shared| shared.unmap(address, size))))
}

/// Lets it be used. Who may do so is not looked at.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(address: usize, size: usize, access: *const [c_int; 3], count: usize) -> c_int {
    if access.is_null() || count == 0 {
        return code::INVALID_VALUE;
    }
    answer(job::call(|| memory::shared("access", |shared| shared.set_access(address, size))))
}

/// Does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuMulticastAddDevice(_handle: u64, _device: c_int) -> c_int {
    answer(job::call(|| Ok(())))
}

/// CUDA IPC: the caller's word for the memory at `address`. For memory of `cuMemCreate` only, other than the driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcGetMemHandle(handle: *mut [c_int; 16], address: usize) -> c_int {
    // SAFETY: the caller passes null or room for 64 bytes.
    let Some(handle) = (unsafe { handle.as_mut() }) else { return code::INVALID_VALUE };
    answer(job::call(|| {
        memory::shared("ipc", |shared| shared.ipc_handle(address)).map(|word| handle[..2].copy_from_slice(&word))
    }))
}

/// CUDA IPC: maps the memory of another process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuIpcOpenMemHandle_v2(address: *mut usize, handle: IpcHandle, _flags: c_uint) -> c_int {
    // SAFETY: the caller passes null or room for an address.
    let Some(address) = (unsafe { address.as_mut() }) else { return code::INVALID_VALUE };
    let word = [handle.0[0], handle.0[1]];
    answer(job::call(|| memory::shared("ipc", |shared| shared.ipc_open(word)).map(|start| *address = start)))
}

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Debug)]
pub struct IpcHandle([c_int; 16]);

/// CUDA IPC: the end of it.
#[unsafe(no_mangle)]
pub extern "C" fn cuIpcCloseMemHandle(address: usize) -> c_int {
    answer(job::call(|| memory::shared("ipc", |shared| shared.ipc_close(address))))
}

/// Functions by their names, for the version that is asked for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    _flags: u64,
    status: *mut c_int,
) -> c_int {
    // SAFETY: the caller passes a string that ends with NUL.
    let name = unsafe { CStr::from_ptr(name) };
    let found: *const c_void = match name.to_bytes() {
        b"cuInit" => cuInit as *const c_void,
        b"cuMemAlloc" => cuMemAlloc_v2 as *const c_void,
        b"cuMemFree" => cuMemFree_v2 as *const c_void,
        b"cuIpcGetMemHandle" => cuIpcGetMemHandle as *const c_void,
        b"cuMemCreate" => cuMemCreate as *const c_void,
        b"cuMemExportToShareableHandle" => cuMemExportToShareableHandle as *const c_void,
        b"cuMemImportFromShareableHandle" => cuMemImportFromShareableHandle as *const c_void,
        b"cuMemRelease" => cuMemRelease as *const c_void,
        b"cuMemRetainAllocationHandle" => cuMemRetainAllocationHandle as *const c_void,
        b"cuMemGetAllocationPropertiesFromHandle" => cuMemGetAllocationPropertiesFromHandle as *const c_void,
        b"cuMemAddressReserve" => cuMemAddressReserve as *const c_void,
        b"cuMemAddressFree" => cuMemAddressFree as *const c_void,
        b"cuMemMap" => cuMemMap as *const c_void,
        b"cuMemUnmap" => cuMemUnmap as *const c_void,
        b"cuMemSetAccess" => cuMemSetAccess as *const c_void,
        b"cuMulticastAddDevice" => cuMulticastAddDevice as *const c_void,
        b"cuGetProcAddress" if version >= 12_000 => cuGetProcAddress_v2 as *const c_void,
        b"cuGetProcAddress" => cuGetProcAddress as *const c_void,
        _ => std::ptr::null(),
    };
    // SAFETY: the caller passes null or room for the status.
    if let Some(status) = unsafe { status.as_mut() } {
        *status = found.is_null().into();
    }
    // SAFETY: the caller passes null or room for a pointer.
    match unsafe { function.as_mut() } {
        Some(function) => *function = found,
        None => return code::INVALID_VALUE,
    }
    if found.is_null() { code::NOT_FOUND } else { code::SUCCESS }
}

/// As it was before CUDA 12.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress(
    name: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: the same contract.
    unsafe { cuGetProcAddress_v2(name, function, version, flags, std::ptr::null_mut()) }
}

/// Holds a lock of the driver's for so long, in a way that a lock of the process does not wait for.
#[unsafe(no_mangle)]
pub extern "C" fn standin_hold(milliseconds: c_uint) -> c_int {
    memory::hold(std::time::Duration::from_millis(milliseconds.into()));
    code::SUCCESS
}

/// The driver's mapping for device memory, for tests of what stands between it and libc; 0 when it fails.
#[unsafe(no_mangle)]
pub extern "C" fn standin_map(bytes: usize) -> usize {
    memory::map_host(bytes).unwrap_or(0)
}

/// The driver's copy between such a mapping and a buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_copy(to: usize, from: usize, bytes: usize) {
    // SAFETY: the contract of memcpy.
    unsafe { memory::copy_host(to, from, bytes) };
}

/// Copies into such a mapping and out of it, and stores how many nanoseconds each took. Its length is a multiple of 2
/// MiB.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn standin_copy_rate(map: usize, bytes: usize, took: *mut [u64; 2]) -> c_int {
    // SAFETY: the caller passes a mapping of this length.
    let measured = unsafe { memory::copy_both_ways(map, bytes) };
    // SAFETY: the caller passes null or room for two numbers.
    match (measured, unsafe { took.as_mut() }) {
        (Some(measured), Some(took)) => *took = measured,
        _ => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// The driver's end of such a mapping.
#[unsafe(no_mangle)]
pub extern "C" fn standin_unmap(map: usize, bytes: usize) {
    memory::release(map, bytes);
}

/// State of a process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) -> c_int {
    // SAFETY: the caller passes null or room for an int.
    let Some(state) = (unsafe { state.as_mut() }) else { return code::INVALID_VALUE };
    answer(caller::request(pid, Op::State, 0, &[]).map(|value| *state = value))
}

/// Restore thread of a process, as the caller's PID namespace numbers it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, tid: *mut c_int) -> c_int {
    // SAFETY: the caller passes null or room for an int.
    let Some(tid) = (unsafe { tid.as_mut() }) else { return code::INVALID_VALUE };
    let inner = caller::request(pid, Op::Tid, 0, &[]);
    answer(inner.and_then(|inner| caller::outer_tid(pid, inner)).map(|value| *tid = value))
}

/// Locks. `args` is null or 64 bytes: a timeout in milliseconds (0 waits for ever), then zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessLock(pid: c_int, args: *const [u32; 16]) -> c_int {
    // SAFETY: the caller passes null or 64 bytes.
    let timeout = match unsafe { args.as_ref() } {
        None => 0,
        Some(args) if args[1..].iter().any(|&word| word != 0) => return code::INVALID_VALUE,
        Some(args) => args[0],
    };
    answer(caller::request(pid, Op::Lock, timeout, &[]).map(drop))
}

/// Checkpoints. `args` is null or 64 zero bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, args: *const [u64; 8]) -> c_int {
    // SAFETY: the caller passes null or 64 bytes.
    if unsafe { args.as_ref() }.is_some_and(|args| *args != [0; 8]) {
        return code::INVALID_VALUE;
    }
    answer(caller::request(pid, Op::Checkpoint, 0, &[]).map(drop))
}

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
#[derive(Debug)]
pub struct RestoreArgs {
    pairs: *const control::Pair,
    count: c_uint,
    reserved: [u8; 44],
    reserved1: u64,
}

/// Restores. `args` is null or 64 bytes: pairs of GPUs, their number, then zeros.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessRestore(pid: c_int, args: *const RestoreArgs) -> c_int {
    // SAFETY: the caller passes null or 64 bytes.
    let pairs: &[control::Pair] = match unsafe { args.as_ref() } {
        None => &[],
        Some(args) if args.reserved != [0; 44] || args.reserved1 != 0 => return code::INVALID_VALUE,
        Some(args) if args.count == 0 => &[],
        Some(args) if args.pairs.is_null() => return code::INVALID_VALUE,
        // SAFETY: the caller passes as many pairs as it says.
        Some(args) => unsafe { std::slice::from_raw_parts(args.pairs, args.count as usize) },
    };
    answer(caller::request(pid, Op::Restore, 0, pairs).map(drop))
}

/// Unlocks. `args` is null or 64 zero bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCheckpointProcessUnlock(pid: c_int, args: *const [u64; 8]) -> c_int {
    // SAFETY: the caller passes null or 64 bytes.
    if unsafe { args.as_ref() }.is_some_and(|args| *args != [0; 8]) {
        return code::INVALID_VALUE;
    }
    answer(caller::request(pid, Op::Unlock, 0, &[]).map(drop))
}

//! A stand-in for libnvidia-ml.so.1, as much of it as rekindle asks: a test installs the library under that name too.
//! GPUs are those of the file `gpus`, processes those that have a control file mapped that is their own.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::fs;
use std::path::PathBuf;

use crate::gpus::{self, Gpu};
use crate::{caller, gate};

const SUCCESS: c_int = 0;
const UNINITIALIZED: c_int = 1;
const INVALID_ARGUMENT: c_int = 2;
const NOT_SUPPORTED: c_int = 3;
const INSUFFICIENT_SIZE: c_int = 7;
const GPU_IS_LOST: c_int = 15;

/// `nvmlDevice_t`: the number, from 1 on, in the place of a pointer.
type Device = usize;

fn folder() -> Option<PathBuf> {
    std::env::var_os("STANDIN_CUDA_DIR").and_then(|folder| fs::canonicalize(folder).ok())
}

fn gpu(device: Device) -> Result<Gpu, c_int> {
    let all = gpus::all(&folder().ok_or(UNINITIALIZED)?);
    let gpu = device.checked_sub(1).and_then(|at| all.get(at).cloned()).ok_or(INVALID_ARGUMENT)?;
    if gpu.lost { Err(GPU_IS_LOST) } else { Ok(gpu) }
}

/// # Safety
/// `to` is null or has room for a `T`.
unsafe fn answer<T>(to: *mut T, value: Result<T, c_int>) -> c_int {
    // SAFETY: the caller's promise.
    match (unsafe { to.as_mut() }, value) {
        (Some(to), Ok(value)) => {
            *to = value;
            SUCCESS
        }
        (None, _) => INVALID_ARGUMENT,
        (_, Err(code)) => code,
    }
}

/// # Safety
/// `to` is null or has room for `length` bytes.
unsafe fn text(to: *mut c_char, length: c_uint, value: Result<String, c_int>) -> c_int {
    let value = match value {
        Ok(value) if !to.is_null() => value,
        Ok(_) => return INVALID_ARGUMENT,
        Err(code) => return code,
    };
    if value.len() >= length as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller's promise; the text and its end fit.
    let room = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), value.len() + 1) };
    room[..value.len()].copy_from_slice(value.as_bytes());
    room[value.len()] = 0;
    SUCCESS
}

/// Works where there is a folder.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    if folder().is_some() { SUCCESS } else { UNINITIALIZED }
}

/// NVML was initialised before CUDA: its calls have a lock then, which a lock of the process takes for writing (driver 580).
#[unsafe(no_mangle)]
pub extern "C" fn standin_nvml_first() -> c_int {
    let Some(folder) = folder() else { return UNINITIALIZED };
    gate::for_nvml(&folder);
    SUCCESS
}

/// One temperature for all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(device: Device, _sensor: c_uint, to: *mut c_uint) -> c_int {
    let mut code = SUCCESS;
    // SAFETY: the caller passes null or room for a number.
    gate::pass_nvml(|| code = unsafe { answer(to, gpu(device).map(|_| 40)) });
    code
}

/// Nothing is held.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_int {
    SUCCESS
}

/// One text for all.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(_code: c_int) -> *const c_char {
    let text: &CStr = c"an error of the stand-in";
    text.as_ptr()
}

/// The version that most was measured with.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(to: *mut c_char, length: c_uint) -> c_int {
    // SAFETY: the caller passes null or so much room.
    unsafe { text(to, length, Ok("580.159.04".into())) }
}

/// Lost ones count.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(to: *mut c_uint) -> c_int {
    let count = folder().map(|folder| gpus::all(&folder).len()).ok_or(UNINITIALIZED);
    // SAFETY: the caller passes null or room for a number.
    unsafe { answer(to, count.and_then(|count| c_uint::try_from(count).map_err(|_| INVALID_ARGUMENT))) }
}

/// By number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, to: *mut Device) -> c_int {
    let device = index as usize + 1;
    // SAFETY: the caller passes null or room for a handle.
    unsafe { answer(to, gpu(device).map(|_| device)) }
}

/// Its number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(device: Device, to: *mut c_uint) -> c_int {
    let index = c_uint::try_from(device - 1).map_err(|_| INVALID_ARGUMENT);
    // SAFETY: the caller passes null or room for a number.
    unsafe { answer(to, gpu(device).and(index)) }
}

/// As nvidia-smi prints it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Device, to: *mut c_char, length: c_uint) -> c_int {
    let uuid = |gpu: Gpu| {
        let hex: String = gpu.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    };
    // SAFETY: the caller passes null or so much room.
    unsafe { text(to, length, gpu(device).map(uuid)) }
}

/// The product.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Device, to: *mut c_char, length: c_uint) -> c_int {
    // SAFETY: the caller passes null or so much room.
    unsafe { text(to, length, gpu(device).map(|gpu| gpu.name)) }
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Pci {
    legacy: [u8; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    id: c_uint,
    sub: c_uint,
    address: [u8; 32],
}

/// A GPU with the UUID a0a0... is at bus a0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: Device, to: *mut Pci) -> c_int {
    let info = gpu(device).map(|gpu| {
        let bus = gpu.uuid[0];
        let (mut legacy, mut address) = ([0; 16], [0; 32]);
        let (short, long) = (format!("0000:{bus:02X}:00.0"), format!("00000000:{bus:02X}:00.0"));
        legacy[..short.len()].copy_from_slice(short.as_bytes());
        address[..long.len()].copy_from_slice(long.as_bytes());
        Pci { legacy, domain: 0, bus: bus.into(), device: 0, id: 0, sub: 0, address }
    });
    // SAFETY: the caller passes null or room for one.
    unsafe { answer(to, info) }
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Memory {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// What somebody else has, and what the processes have.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, to: *mut Memory) -> c_int {
    let memory = gpu(device).map(|gpu| {
        let used = gpu.taken + processes(&gpu).iter().map(|process| process.used).sum::<u64>();
        let used = used.min(gpu.total);
        Memory { version: 0, total: gpu.total, reserved: 0, free: gpu.total - used, used }
    });
    // SAFETY: the caller passes null or room for one.
    unsafe { answer(to, memory) }
}

/// Divided or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMigMode(device: Device, current: *mut c_uint, pending: *mut c_uint) -> c_int {
    let mode = gpu(device).and_then(|gpu| if gpu.divided { Ok(1) } else { Err(NOT_SUPPORTED) });
    // SAFETY: the caller passes null or room for a number.
    unsafe { answer(pending, mode) };
    // SAFETY: as above.
    unsafe { answer(current, mode) }
}

/// 2 is a virtual GPU, 1 one that is passed through.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetVirtualizationMode(device: Device, to: *mut c_uint) -> c_int {
    // SAFETY: the caller passes null or room for a number.
    unsafe { answer(to, gpu(device).map(|gpu| if gpu.is_virtual { 2 } else { 1 })) }
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Debug)]
pub struct Process {
    pid: c_uint,
    used: u64,
    instance: c_uint,
    compute_instance: c_uint,
}

fn processes(gpu: &Gpu) -> Vec<Process> {
    let Some(folder) = folder() else { return Vec::new() };
    let pids = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let on_it = pids.filter_map(|pid| {
        let (uuid, used) = caller::usage(&folder, pid)?;
        let found = Process { pid: pid.cast_unsigned(), used, instance: u32::MAX, compute_instance: u32::MAX };
        (uuid == gpu.uuid && used > 0).then_some(found)
    });
    on_it.collect()
}

/// Who uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Device,
    count: *mut c_uint,
    to: *mut Process,
) -> c_int {
    let found = match gpu(device) {
        Ok(gpu) => processes(&gpu),
        Err(code) => return code,
    };
    // SAFETY: the caller passes null or room for a number.
    let Some(count) = (unsafe { count.as_mut() }) else { return INVALID_ARGUMENT };
    let room = if to.is_null() { 0 } else { *count as usize };
    *count = c_uint::try_from(found.len()).unwrap_or(c_uint::MAX);
    if found.len() > room {
        return INSUFFICIENT_SIZE;
    }
    if found.is_empty() {
        return SUCCESS;
    }
    // SAFETY: the caller passes room for as many as it says, which is enough.
    let places = unsafe { std::slice::from_raw_parts_mut(to, found.len()) };
    for (place, process) in places.iter_mut().zip(found) {
        *place = process;
    }
    SUCCESS
}

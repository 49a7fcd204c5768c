//! Registered host memory and asynchronous copies, and what else a program that copies calls. Copies of other processes than the
//! one that copies for rekindle are done at once.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::code;
use crate::copies::Engine;
use crate::{answer, copies, fault, job, memory};

/// Begin and end of each registered range.
static REGISTERED: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn registered() -> MutexGuard<'static, Vec<(usize, usize)>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether this process is the one with which rekindle copies memory that stays on the GPU.
pub(crate) fn is_copier() -> bool {
    std::env::args_os().any(|arg| arg == "copy-gpu-memory")
}

/// Registers memory. Ranges do not overlap.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostRegister_v2(host: usize, bytes: usize, _flags: c_uint) -> c_int {
    answer(job::call(|| {
        fault::inject_copier("register")?;
        let mut all = registered();
        let is_free = all.iter().all(|&(begin, end)| host + bytes <= begin || end <= host);
        if bytes == 0 || !is_free {
            return Err(code::INVALID_VALUE);
        }
        all.push((host, host + bytes));
        Ok(())
    }))
}

/// The end of that.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemHostUnregister(host: usize) -> c_int {
    answer(job::call(|| {
        let mut all = registered();
        let at = all.iter().position(|&(begin, _)| begin == host).ok_or(code::INVALID_VALUE)?;
        all.swap_remove(at);
        Ok(())
    }))
}

/// The driver copies no range that is only partly registered, or in two parts.
fn check(host: usize, bytes: usize) -> Result<(), i32> {
    let all = registered();
    let mut touched = all.iter().filter(|&&(begin, end)| host < end && begin < host + bytes);
    match touched.next() {
        Some(&(begin, end)) if host < begin || end < host + bytes => Err(code::INVALID_VALUE),
        _ => Ok(()),
    }
}

/// Does a copy now, or later where it is that process.
fn copy(
    engine: Engine,
    stream: usize,
    name: &'static str,
    work: impl FnOnce() -> Result<(), i32> + Send + 'static,
) -> c_int {
    let work = move || fault::inject_copier(name).and_then(|()| work());
    answer(job::call(|| if is_copier() { copies::begin(engine, stream, Box::new(work)) } else { work() }))
}

/// As `cuMemcpyDtoH_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(host: *mut u8, device: usize, bytes: usize, stream: usize) -> c_int {
    let host = host.expose_provenance();
    copy(Engine::Bus, stream, "out", move || {
        check(host, bytes)?;
        // SAFETY: the caller passes `bytes` writable bytes at `host`, until the copy ends; device memory is checked.
        unsafe { memory::read(std::ptr::with_exposed_provenance_mut(host), device, bytes) }
    })
}

/// As `cuMemcpyHtoD_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(device: usize, host: *const u8, bytes: usize, stream: usize) -> c_int {
    let host = host.expose_provenance();
    copy(Engine::Bus, stream, "in", move || {
        check(host, bytes)?;
        // SAFETY: the caller passes `bytes` readable bytes at `host`, until the copy ends; device memory is checked.
        unsafe { memory::write(device, std::ptr::with_exposed_provenance(host), bytes) }
    })
}

/// Within device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> c_int {
    copy(Engine::Within, stream, "within", move || memory::copy(to, from, bytes))
}

/// The kernel `name_memory` computes one name, BLAKE3, for so many bytes.
const NAMED: usize = 256 << 10;
/// What stands for that kernel, and for the module that it is in.
const NAMER: usize = 0x6e61_6d65;

/// Takes no module but one with that kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadData(module: *mut usize, text: *const c_char) -> c_int {
    answer(job::call(|| {
        fault::inject_copier("module")?;
        // SAFETY: the caller passes null or room for a pointer.
        let module = unsafe { module.as_mut() }.ok_or(code::INVALID_VALUE)?;
        // SAFETY: the caller passes a text that ends with NUL.
        let text = unsafe { CStr::from_ptr(text) };
        if !text.to_bytes().windows(19).any(|part| part == b".entry name_memory(") {
            return Err(code::INVALID_VALUE);
        }
        *module = NAMER;
        Ok(())
    }))
}

/// That kernel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char) -> c_int {
    // SAFETY: the caller passes null or room for a pointer.
    let Some(function) = (unsafe { function.as_mut() }) else { return code::INVALID_VALUE };
    // SAFETY: the caller passes a text that ends with NUL.
    if module != NAMER || unsafe { CStr::from_ptr(name) } != c"name_memory" {
        return code::INVALID_VALUE;
    }
    *function = NAMER;
    code::SUCCESS
}

/// Does what that kernel does, with 256 threads a block.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuLaunchKernel(
    function: usize,
    blocks: c_uint,
    _: c_uint,
    _: c_uint,
    threads: c_uint,
    _: c_uint,
    _: c_uint,
    _shared: c_uint,
    stream: usize,
    arguments: *const [*const usize; 2],
    _extra: usize,
) -> c_int {
    if function != NAMER || threads != 256 || blocks == 0 {
        return code::INVALID_VALUE;
    }
    // SAFETY: the caller passes null, or the addresses of the kernel's two arguments.
    let Some([memory, names]) = (unsafe { arguments.as_ref() }) else { return code::INVALID_VALUE };
    // SAFETY: as above.
    let memory = unsafe { **memory };
    // SAFETY: as above.
    let names = unsafe { **names };
    copy(Engine::Within, stream, "name", move || {
        if fault::inject_copier("write-names").is_err() {
            // As if it had not run.
            return Ok(());
        }
        let mut content = vec![0; NAMED];
        for block in 0..blocks as usize {
            // SAFETY: as many bytes as `content` has; device memory is checked.
            unsafe { memory::read(content.as_mut_ptr(), memory + block * NAMED, NAMED) }?;
            let to = std::ptr::with_exposed_provenance_mut::<[u8; 32]>(names + block * 32);
            // SAFETY: the caller has room for a name of each block.
            unsafe { to.write_unaligned(*blake3::hash(&content).as_bytes()) };
        }
        Ok(())
    })
}

/// Memory of the host, which stays until the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(host: *mut *mut c_void, bytes: usize, _flags: c_uint) -> c_int {
    // SAFETY: the caller passes null or room for a pointer.
    let Some(host) = (unsafe { host.as_mut() }) else { return code::INVALID_VALUE };
    *host = Vec::<u64>::leak(vec![0; bytes.div_ceil(8)]).as_mut_ptr().cast();
    code::SUCCESS
}

/// The same address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(device: *mut usize, host: *mut c_void, _flags: c_uint) -> c_int {
    // SAFETY: the caller passes null or room for an address.
    let Some(device) = (unsafe { device.as_mut() }) else { return code::INVALID_VALUE };
    *device = host.expose_provenance();
    code::SUCCESS
}

/// Whether all of a stream has ended.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamQuery(stream: usize) -> c_int {
    answer(job::call(|| copies::state(stream)))
}

/// Of the GPU that this process is on: what is free, without what others have of it by the file `gpus` and what this process has
/// allocated, and all.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    // SAFETY: the caller passes null or room for a number.
    let Some(free) = (unsafe { free.as_mut() }) else { return code::INVALID_VALUE };
    // SAFETY: as above.
    let Some(total) = (unsafe { total.as_mut() }) else { return code::INVALID_VALUE };
    answer(job::call(|| {
        fault::inject_copier("info")?;
        let here = job::gpu_here().ok_or(code::NO_DEVICE)?;
        let bytes = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        *free = bytes(here.total.saturating_sub(here.taken).saturating_sub(memory::total()));
        *total = bytes(here.total);
        Ok(())
    }))
}

/// A stream: its number means nothing else.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> c_int {
    static LAST: AtomicUsize = AtomicUsize::new(7);
    // SAFETY: the caller passes null or room for a pointer.
    match unsafe { stream.as_mut() } {
        Some(stream) => *stream = LAST.fetch_add(1, Ordering::Relaxed),
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// One: all that a process has is on one GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    // SAFETY: the caller passes null or room for an int.
    match unsafe { count.as_mut() } {
        Some(count) => *count = 1,
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// All are 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, _which: c_int, _device: c_int) -> c_int {
    // SAFETY: the caller passes null or room for an int.
    match unsafe { value.as_mut() } {
        Some(value) => *value = 0,
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// There is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> c_int {
    // SAFETY: the caller passes null or room for an int.
    match unsafe { device.as_mut() } {
        Some(device) => *device = 0,
        None => return code::INVALID_VALUE,
    }
    answer(job::call(|| Ok(())))
}

/// There is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    // SAFETY: the caller passes null or room for a pointer.
    match unsafe { context.as_mut() } {
        Some(context) => *context = std::ptr::dangling_mut(),
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

/// There is one.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_context: usize) -> c_int {
    code::SUCCESS
}

/// There is one.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(_context: usize) -> c_int {
    code::SUCCESS
}

/// There is one.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPopCurrent_v2(_context: *mut *mut c_void) -> c_int {
    code::SUCCESS
}

/// Waits for the kernels of all streams.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    loop {
        let mut is_idle = false;
        let asked = job::call(|| {
            crate::kernels::advance();
            is_idle = crate::kernels::is_idle(None);
            Ok(())
        });
        if is_idle || asked.is_err() {
            return answer(asked);
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(_context: usize, _flags: c_uint) -> c_int {
    code::SUCCESS
}

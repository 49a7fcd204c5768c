//! Registered host memory and asynchronous copies, and what else a program that copies calls. Copies are done at once.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::code;
use crate::{answer, fault, job, memory};

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

/// As `cuMemcpyDtoH_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(host: *mut u8, device: usize, bytes: usize, _stream: usize) -> c_int {
    // SAFETY: the caller passes `bytes` writable bytes at `host`; device memory is checked.
    let copy = || unsafe { memory::read(host, device, bytes) };
    answer(job::call(|| fault::inject_copier("out").and_then(|()| check(host.addr(), bytes)).and_then(|()| copy())))
}

/// As `cuMemcpyHtoD_v2`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(device: usize, host: *const u8, bytes: usize, _stream: usize) -> c_int {
    // SAFETY: the caller passes `bytes` readable bytes at `host`; device memory is checked.
    let copy = || unsafe { memory::write(device, host, bytes) };
    answer(job::call(|| fault::inject_copier("in").and_then(|()| check(host.addr(), bytes)).and_then(|()| copy())))
}

/// A stream that means nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut usize, _flags: c_uint) -> c_int {
    // SAFETY: the caller passes null or room for a pointer.
    match unsafe { stream.as_mut() } {
        Some(stream) => *stream = 7,
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
        std::thread::sleep(std::time::Duration::from_micros(200));
    }
}

/// Does nothing.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxEnablePeerAccess(_context: usize, _flags: c_uint) -> c_int {
    code::SUCCESS
}

//! Objects that a checkpoint takes and a restore does not: sparse arrays, and pools of host memory. With an array whose memory is
//! mapped later the checkpoint does not return (driver 580).

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::control::code;
use crate::{answer, job};

/// Each object with what it is.
static OBJECTS: Mutex<Vec<(u64, What)>> = Mutex::new(Vec::new());

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum What {
    Plain,
    Sparse,
    Deferred,
    /// Of host memory; whether something was allocated.
    Pool(bool),
}

fn with<T>(work: impl FnOnce(&mut Vec<(u64, What)>) -> T) -> T {
    work(&mut OBJECTS.lock().unwrap_or_else(PoisonError::into_inner))
}

fn add(to: *mut u64, what: What) -> c_int {
    // SAFETY: the caller passes null or room for a handle.
    let Some(to) = (unsafe { to.as_mut() }) else { return code::INVALID_VALUE };
    answer(job::call(|| {
        with(|objects| {
            *to = objects.iter().map(|(object, _)| *object).max().unwrap_or(0x5000) + 16;
            objects.push((*to, what));
        });
        Ok(())
    }))
}

fn remove(object: u64) -> c_int {
    let gone = || with(|objects| objects.iter().position(|(known, _)| *known == object).map(|at| objects.remove(at)));
    answer(job::call(|| gone().map(drop).ok_or(code::INVALID_VALUE)))
}

/// What the driver does with them at a checkpoint.
pub(crate) fn checkpoint() {
    while with(|objects| objects.iter().any(|(_, what)| *what == What::Deferred)) {
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// And at a restore.
pub(crate) fn restore() -> Result<(), i32> {
    let has = |wanted: What| with(|objects| objects.iter().any(|(_, what)| *what == wanted));
    match (has(What::Sparse), has(What::Pool(true))) {
        (true, _) => Err(code::OPERATING_SYSTEM),
        (_, true) => Err(code::UNKNOWN),
        _ => Ok(()),
    }
}

/// `CUDA_ARRAY3D_DESCRIPTOR`, of which only the flags matter.
#[repr(C)]
#[derive(Debug)]
pub struct ArrayDescriptor {
    size: [u64; 3],
    format: u32,
    channels: u32,
    flags: u32,
}

/// An array without memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuArray3DCreate_v2(array: *mut u64, descriptor: *const ArrayDescriptor) -> c_int {
    // SAFETY: the caller passes null or a descriptor.
    let Some(descriptor) = (unsafe { descriptor.as_ref() }) else { return code::INVALID_VALUE };
    let what = match descriptor.flags {
        0x40 => What::Sparse,
        0x80 => What::Deferred,
        _ => What::Plain,
    };
    add(array, what)
}

/// Its end.
#[unsafe(no_mangle)]
pub extern "C" fn cuArrayDestroy(array: u64) -> c_int {
    remove(array)
}

/// A pool, by the kind of its location.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolCreate(pool: *mut u64, properties: *const [u32; 8]) -> c_int {
    // SAFETY: the caller passes null or a CUmemPoolProps.
    let Some(properties) = (unsafe { properties.as_ref() }) else { return code::INVALID_VALUE };
    add(pool, if properties[2] > 1 { What::Pool(false) } else { What::Plain })
}

/// Its end.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemPoolDestroy(pool: u64) -> c_int {
    remove(pool)
}

/// Nothing can be done with the address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAllocFromPoolAsync(address: *mut u64, _size: usize, pool: u64, _stream: u64) -> c_int {
    // SAFETY: the caller passes null or room for an address.
    let Some(address) = (unsafe { address.as_mut() }) else { return code::INVALID_VALUE };
    *address = pool << 20;
    with(|objects| {
        for (_, what) in objects.iter_mut().filter(|(known, what)| *known == pool && *what == What::Pool(false)) {
            *what = What::Pool(true);
        }
    });
    code::SUCCESS
}

/// Nothing is in use (attribute 7).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemPoolGetAttribute(_pool: u64, _attribute: c_int, value: *mut u64) -> c_int {
    // SAFETY: the caller passes null or room for a number.
    match unsafe { value.as_mut() } {
        Some(value) => *value = 0,
        None => return code::INVALID_VALUE,
    }
    code::SUCCESS
}

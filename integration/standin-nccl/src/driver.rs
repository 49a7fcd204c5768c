//! What this needs of the stand-in driver.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;

use crate::kernel::Kernel;

type Advance = unsafe extern "C" fn(*mut c_void) -> c_int;

struct Driver {
    launch: unsafe extern "C" fn(usize, Advance, *mut c_void) -> c_int,
    load: unsafe extern "C" fn(usize) -> u64,
    store: unsafe extern "C" fn(usize, u64) -> c_int,
}

fn driver() -> Option<&'static Driver> {
    static FOUND: OnceLock<Option<Driver>> = OnceLock::new();
    FOUND.get_or_init(find).as_ref()
}

fn find() -> Option<Driver> {
    // SAFETY: a string that ends with NUL.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    let function = |name: &CStr| {
        // SAFETY: a library that is never closed, and a string that ends with NUL.
        let found = unsafe { libc::dlsym(library, name.as_ptr()) };
        (!library.is_null() && !found.is_null()).then_some(found)
    };
    let [launch, load, store] = [c"standin_launch", c"standin_load", c"standin_store"].map(function);
    // SAFETY: the stand-in's functions have these types.
    let launch = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(_, _, _) -> _>(launch?) };
    // SAFETY: as above.
    let load = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(_) -> _>(load?) };
    // SAFETY: as above.
    let store = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(_, _) -> _>(store?) };
    Some(Driver { launch, load, store })
}

unsafe extern "C" fn advance(kernel: *mut c_void) -> c_int {
    let kernel: *mut Kernel = kernel.cast();
    // SAFETY: the driver has it from `launch`, and calls this on one thread at a time.
    let is_over = unsafe { kernel.as_mut() }.is_none_or(Kernel::advance);
    if is_over {
        // SAFETY: made by `launch`, and not used again.
        drop(unsafe { Box::from_raw(kernel) });
    }
    is_over.into()
}

/// Starts a kernel. A CUresult.
pub(crate) fn launch(stream: usize, kernel: Kernel) -> c_int {
    let Some(driver) = driver() else { return -1 };
    // SAFETY: the kernel is the driver's from here on.
    unsafe { (driver.launch)(stream, advance, Box::into_raw(Box::new(kernel)).cast()) }
}

/// A number of device memory.
pub(crate) fn load(device: usize) -> u64 {
    // SAFETY: the driver checks the address.
    driver().map_or(u64::MAX, |driver| unsafe { (driver.load)(device) })
}

/// Writes it.
pub(crate) fn store(device: usize, number: u64) {
    if let Some(driver) = driver() {
        // SAFETY: as above.
        unsafe { (driver.store)(device, number) };
    }
}

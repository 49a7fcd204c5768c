//! A library that is linked to libcuda, as extension modules are.
#![no_std]

unsafe extern "C" {
    fn cuMemCreate(handle: *mut u64, size: usize, properties: usize, flags: u64) -> i32;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn create() -> i32 {
    let mut handle = 0;
    unsafe { cuMemCreate(&raw mut handle, 2 << 20, 0, 0) }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

//! "Device memory": pages that the job must not touch itself, and that go to host memory at a checkpoint.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::control::code;
use crate::fault;
use crate::shared::Shared;

/// 2^20 bytes.
pub(crate) const MIB: u64 = 1 << 20;

/// Bytes of all allocations, for who must not wait for a copy.
static TOTAL: AtomicU64 = AtomicU64::new(0);

/// Bytes of device memory.
pub(crate) fn total() -> u64 {
    TOTAL.load(Ordering::Relaxed)
}

/// The driver's granule: allocations are whole ones, and copies go by one.
pub(crate) const PIECE: usize = 2 << 20;

#[derive(Debug)]
struct Memory {
    /// Address and length of each allocation.
    device: Vec<(usize, usize)>,
    /// What was made with `cuMemCreate`, or comes from others.
    shared: Shared,
    /// The region that holds all of it in host memory while checkpointed.
    host: Option<(usize, usize)>,
}

static MEMORY: Mutex<Memory> = Mutex::new(Memory { device: Vec::new(), shared: Shared::new(), host: None });

fn memory() -> MutexGuard<'static, Memory> {
    MEMORY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is shared, for the call of this name.
pub(crate) fn shared<T>(call: &str, work: impl FnOnce(&mut Shared) -> Result<T, i32>) -> Result<T, i32> {
    fault::inject_job(call)?;
    fault::inject_keeper(call)?;
    fault::inject_copier(call)?;
    work(&mut memory().shared)
}

/// A lock of the driver's, held for so long by a thread that no gate holds back.
pub(crate) fn hold(time: std::time::Duration) {
    let _held = memory();
    std::thread::sleep(time);
}

/// Maps anonymous memory past libc's `mmap`: an interposer must see the one call of the checkpoint only. With an
/// address it replaces what is there.
pub(crate) fn map(address: usize, length: usize, prot: i32) -> Result<usize, i32> {
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: a new mapping, or one in place of device memory that nobody borrows from.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, address, length, prot, flags, -1, 0_usize) };
    usize::try_from(mapped).map_err(|_| code::OUT_OF_MEMORY)
}

/// Maps a file from `offset`, past libc's `mmap` too.
pub(crate) fn map_file(address: usize, length: usize, file: &OwnedFd, offset: usize) -> Result<usize, i32> {
    let fixed = if address == 0 { 0 } else { libc::MAP_FIXED };
    let (flags, file) = (libc::MAP_SHARED | fixed, file.as_raw_fd());
    // SAFETY: as above.
    let mapped = unsafe { libc::syscall(libc::SYS_mmap, address, length, RW, flags, file, offset) };
    usize::try_from(mapped).map_err(|_| code::OUT_OF_MEMORY)
}

pub(crate) fn unmap(address: usize, length: usize) {
    // SAFETY: one of our mappings that nobody borrows from.
    unsafe { libc::syscall(libc::SYS_munmap, address, length) };
}

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;

/// Copies as a GPU does, without libc's `memcpy`, so that an interposer of it sees host copies only.
///
/// # Safety
/// `length` readable bytes at `from` and writable ones at `to`, which do not overlap.
unsafe fn dma(to: usize, from: usize, length: usize) {
    // SAFETY: copies exactly `length` bytes; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
}

pub(crate) fn allocate(bytes: usize) -> Result<usize, i32> {
    if bytes == 0 {
        return Err(code::INVALID_VALUE);
    }
    let length = bytes.checked_next_multiple_of(PIECE).ok_or(code::OUT_OF_MEMORY)?;
    let mut memory = memory();
    let address = map(0, length, RW)?;
    memory.device.push((address, length));
    TOTAL.fetch_add(length as u64, Ordering::Relaxed);
    Ok(address)
}

pub(crate) fn free(address: usize) -> Result<(), i32> {
    let mut memory = memory();
    let at = memory.device.iter().position(|&(start, _)| start == address).ok_or(code::INVALID_VALUE)?;
    let (address, length) = memory.device.swap_remove(at);
    unmap(address, length);
    TOTAL.fetch_sub(length as u64, Ordering::Relaxed);
    Ok(())
}

/// Holds the memory while a range of it is used.
fn check(device: usize, bytes: usize) -> Result<MutexGuard<'static, Memory>, i32> {
    let memory = memory();
    let end = device.checked_add(bytes).ok_or(code::INVALID_VALUE)?;
    let inside = memory.device.iter().any(|&(start, length)| start <= device && end <= start + length);
    if inside || memory.shared.holds(device, end) { Ok(memory) } else { Err(code::INVALID_VALUE) }
}

/// # Safety
/// `bytes` readable bytes at `host`.
pub(crate) unsafe fn write(device: usize, host: *const u8, bytes: usize) -> Result<(), i32> {
    let _memory = check(device, bytes)?;
    // SAFETY: the device range was checked, the host range is the caller's promise.
    unsafe { dma(device, host.addr(), bytes) };
    Ok(())
}

/// # Safety
/// `bytes` writable bytes at `host`.
pub(crate) unsafe fn read(host: *mut u8, device: usize, bytes: usize) -> Result<(), i32> {
    let _memory = check(device, bytes)?;
    // SAFETY: as above.
    unsafe { dma(host.addr(), device, bytes) };
    Ok(())
}

/// Within the device, between allocations that do not overlap.
pub(crate) fn copy(to: usize, from: usize, bytes: usize) -> Result<(), i32> {
    drop(check(from, bytes)?);
    let _memory = check(to, bytes)?;
    // SAFETY: both ranges were checked, and only this process's one thread for such copies frees what is in them.
    unsafe { dma(to, from, bytes) };
    Ok(())
}

pub(crate) fn increment(device: usize) -> Result<(), i32> {
    store(device, load(device)?.wrapping_add(1))
}

pub(crate) fn load(device: usize) -> Result<u64, i32> {
    let _memory = check(device, 8)?;
    // SAFETY: eight bytes of device memory, held; alignment is not asked of the caller.
    Ok(unsafe { ptr::with_exposed_provenance::<u64>(device).read_unaligned() })
}

pub(crate) fn store(device: usize, number: u64) -> Result<(), i32> {
    let _memory = check(device, 8)?;
    // SAFETY: as above.
    unsafe { ptr::with_exposed_provenance_mut::<u64>(device).write_unaligned(number) };
    Ok(())
}

/// One piece, through libc's `memcpy` as the driver does it.
///
/// # Safety
/// As for [`dma`].
pub(crate) unsafe fn copy_host(to: usize, from: usize, length: usize) {
    let (to, from): (*mut c_void, *const c_void) =
        (ptr::with_exposed_provenance_mut(to), ptr::with_exposed_provenance(from));
    // SAFETY: the caller's promise.
    unsafe { libc::memcpy(to, from, length) };
}

/// What the driver asks for at a checkpoint, through libc's `mmap`. The address, or None.
pub(crate) fn map_host(total: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE;
    // SAFETY: a new mapping.
    let host = unsafe { libc::mmap(ptr::null_mut(), total, RW, flags, -1, 0) };
    (host != libc::MAP_FAILED).then(|| host.expose_provenance())
}

/// Copies between the host region and staging buffers in the driver's pieces, the GPU's part left out: it is the host's
/// that is measured. Answers with the nanoseconds that it took each way.
///
/// # Safety
/// `host` is a region of `total` bytes, a multiple of the piece, of which nothing is borrowed.
pub(crate) unsafe fn copy_both_ways(host: usize, total: usize) -> Option<[u64; 2]> {
    /// As many as the driver uses (seen with 580).
    const STAGING: usize = 8;
    let staging = map(0, PIECE * STAGING, RW).ok()?;
    // SAFETY: the new buffers; they must have pages before the measurement.
    unsafe { ptr::with_exposed_provenance_mut::<u8>(staging).write_bytes(1, PIECE * STAGING) };
    let mut took = [0; 2];
    for (way, took) in took.iter_mut().enumerate() {
        let began = std::time::Instant::now();
        for (number, at) in (host..host + total).step_by(PIECE).enumerate() {
            let buffer = staging + number % STAGING * PIECE;
            let (to, from) = if way == 0 { (at, buffer) } else { (buffer, at) };
            // SAFETY: a piece of the region and a buffer.
            unsafe { copy_host(to, from, PIECE) };
        }
        *took = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    }
    unmap(staging, PIECE * STAGING);
    Some(took)
}

/// Device to host memory. On failure nothing has changed.
pub(crate) fn checkpoint() -> Result<(), i32> {
    let mut memory = memory();
    let own = memory.shared.open_own()?;
    let total: usize = memory.device.iter().chain(&own).map(|&(_, length)| length).sum();
    if total == 0 {
        return memory.shared.close();
    }
    let host = map_host(total).ok_or(code::OUT_OF_MEMORY)?;
    let Ok(staging) = map(0, PIECE, RW) else {
        release(host, total);
        return Err(code::OUT_OF_MEMORY);
    };
    let mut at = host;
    for &(start, length) in memory.device.iter().chain(&own) {
        for piece in (start..start + length).step_by(PIECE) {
            // SAFETY: a piece of an allocation, and the staging buffer.
            unsafe { dma(staging, piece, PIECE) };
            // SAFETY: the host region has room for every piece.
            unsafe { copy_host(at, staging, PIECE) };
            at += PIECE;
        }
    }
    unmap(staging, PIECE);
    for &(start, length) in &memory.device {
        // The addresses stay taken, as the driver keeps them; a touch is now a fault. It cannot fail: it replaces.
        map(start, length, libc::PROT_NONE)?;
    }
    own.iter().for_each(|&(start, length)| unmap(start, length));
    memory.shared.close()?;
    memory.host = Some((host, total));
    Ok(())
}

/// Host to device memory.
pub(crate) fn restore() -> Result<(), i32> {
    let mut memory = memory();
    memory.shared.reopen()?;
    let Some((host, total)) = memory.host else { return Ok(()) };
    let own = memory.shared.open_own()?;
    let staging = map(0, PIECE, RW)?;
    for &(start, length) in &memory.device {
        map(start, length, RW)?;
    }
    let mut at = host;
    for &(start, length) in memory.device.iter().chain(&own) {
        for piece in (start..start + length).step_by(PIECE) {
            // SAFETY: the checkpoint filled as many pieces as there are.
            unsafe { copy_host(staging, at, PIECE) };
            // SAFETY: the allocation was mapped again.
            unsafe { dma(piece, staging, PIECE) };
            at += PIECE;
        }
    }
    unmap(staging, PIECE);
    own.iter().for_each(|&(start, length)| unmap(start, length));
    release(host, total);
    memory.host = None;
    Ok(())
}

/// Unmaps the host region through libc's symbol, where an interposer may wait for it.
pub(crate) fn release(host: usize, total: usize) {
    // SAFETY: our own region, of which nothing is borrowed.
    unsafe { libc::munmap(ptr::with_exposed_provenance_mut(host), total) };
}

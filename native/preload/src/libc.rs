//! The functions of libc that are used, and their replacements until they have been found.
//!
//! The symbols are weak and have no version: an object that asks for a version which the job's libc lacks would end the
//! process, and a program without a libc at all (as Go makes) could not start. The copies use libc's `memmove`: it has
//! one version, while `memcpy` has two, and the older one is slow in new glibcs (2.36: half of the speed at 16 KiB).
//! The loader puts its address here before anything can call us.
//!
//! dlsym(3) is a symbol of ours, and so is found differently: by dlvsym, or if there is none (musl; glibc before 2.34,
//! while libdl is not loaded) in the tables of any object that has one.

use core::arch::global_asm;
use core::ffi::{CStr, c_char, c_void};
use core::mem::transmute;
use core::ptr::{null_mut, with_exposed_provenance_mut};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::sys::{self, Errno};
use crate::{elf, maps};

global_asm!(
    ".weak memmove",
    ".weak dlvsym",
    ".weak __errno_location",
    ".pushsection .data.rekindle_libc, \"aw\", @progbits",
    ".balign 8",
    ".hidden rekindle_memmove",
    ".hidden rekindle_dlvsym",
    ".hidden rekindle_errno",
    ".globl rekindle_memmove",
    ".globl rekindle_dlvsym",
    ".globl rekindle_errno",
    "rekindle_memmove: .quad memmove",
    "rekindle_dlvsym: .quad dlvsym",
    "rekindle_errno: .quad __errno_location",
    ".popsection",
);

unsafe extern "C" {
    #[link_name = "rekindle_memmove"]
    static MEMMOVE: AtomicPtr<c_void>;
    #[link_name = "rekindle_dlvsym"]
    static DLVSYM: AtomicPtr<c_void>;
    #[link_name = "rekindle_errno"]
    static ERRNO: AtomicPtr<c_void>;
}

type Copy = unsafe extern "C" fn(*mut u8, *const u8, usize) -> *mut u8;
type Map = unsafe extern "C" fn(usize, usize, i32, i32, i32, isize) -> usize;
type Unmap = unsafe extern "C" fn(usize, usize) -> i32;
type Ioctl = unsafe extern "C" fn(i32, usize, usize) -> i32;
type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type ThreadMain = unsafe extern "C" fn(*mut c_void) -> *mut c_void;
type CreateThread = unsafe extern "C" fn(*mut usize, *const c_void, ThreadMain, *mut c_void) -> i32;
type Dlvsym = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void;
type ReadLock = unsafe extern "C" fn(*mut c_void) -> i32;
type ErrnoLocation = unsafe extern "C" fn() -> *mut i32;

/// The next mmap after ours. Until the constructor has run it is the system call.
pub(crate) static NEXT_MMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_mmap as Map as *mut c_void);
/// The next munmap after ours.
pub(crate) static NEXT_MUNMAP: AtomicPtr<c_void> = AtomicPtr::new(raw_munmap as Unmap as *mut c_void);
/// The next ioctl after ours.
pub(crate) static NEXT_IOCTL: AtomicPtr<c_void> = AtomicPtr::new(raw_ioctl as Ioctl as *mut c_void);
/// The next dlsym after ours; null until it was searched.
pub(crate) static NEXT_DLSYM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Finds the next functions of other objects, and then of libc, for our hooks. Only dlsym is found by version, the
/// oldest, which every glibc for x86-64 has. A search by version skips objects that define no versions but use those of
/// others (`do_lookup_x`, because dlvsym asks for a hidden one), which are most objects that a job preloads.
pub(crate) fn find_next() {
    // SAFETY: a static of this object, at all times.
    let dlvsym = unsafe { DLVSYM.load(Ordering::Relaxed) };
    if dlvsym.is_null() {
        return;
    }
    // SAFETY: what the loader put there is the dlvsym of the libc.
    let dlvsym: Dlvsym = unsafe { transmute(dlvsym) };
    // SAFETY: two strings that end with NUL. The call is made from this object, which is what RTLD_NEXT counts from.
    let dlsym = unsafe { dlvsym(rtld_next(), c"dlsym".as_ptr(), c"GLIBC_2.2.5".as_ptr()) };
    if dlsym.is_null() {
        return;
    }
    // SAFETY: the libc's function of this name.
    let dlsym: Dlsym = unsafe { transmute(dlsym) };
    let ours = [(&NEXT_MMAP, c"mmap"), (&NEXT_MUNMAP, c"munmap"), (&NEXT_IOCTL, c"ioctl"), (&NEXT_DLSYM, c"dlsym")];
    for (slot, name) in ours {
        // SAFETY: a string that ends with NUL; the call is made from this object.
        let next = unsafe { dlsym(rtld_next(), name.as_ptr()) };
        if !next.is_null() {
            slot.store(next, Ordering::Relaxed);
        }
    }
}

fn rtld_next() -> *mut c_void {
    null_mut::<c_void>().wrapping_byte_sub(1)
}

/// Finds the next dlsym after ours, at the latest when it is called.
pub(crate) extern "C" fn find_dlsym() {
    if NEXT_DLSYM.load(Ordering::Relaxed).is_null() {
        find_next();
    }
    if NEXT_DLSYM.load(Ordering::Relaxed).is_null() {
        let own = maps::find((crate::prepare as *const ()).addr()).map_or(0, |mapping| mapping.inode);
        let found = elf::function(b"dlsym\0", |mapping| mapping.inode != own);
        // Without any dlsym, nobody could have called ours; then it finds nothing.
        let found = found.map_or(nothing as Dlsym as *mut c_void, with_exposed_provenance_mut);
        NEXT_DLSYM.store(found, Ordering::Relaxed);
    }
}

unsafe extern "C" fn nothing(_library: *mut c_void, _name: *const c_char) -> *mut c_void {
    null_mut()
}

/// dlsym(3).
pub(crate) fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void {
    find_dlsym();
    // SAFETY: not null any more, and always the address of a dlsym.
    let next: Dlsym = unsafe { transmute(NEXT_DLSYM.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(library, name) }
}

/// What the libraries have for `symbol` to which the object is linked that `address` is in; null if it has none, or
/// cannot be asked.
pub(crate) fn in_libraries_of(address: usize, symbol: &CStr) -> *mut c_void {
    type Dladdr = unsafe extern "C" fn(usize, *mut [usize; 4]) -> i32;
    type Dlopen = unsafe extern "C" fn(*const c_char, i32) -> *mut c_void;
    type Dlclose = unsafe extern "C" fn(*mut c_void) -> i32;
    const NOW_AND_ONLY_IF_LOADED: i32 = 2 | 4; // RTLD_NOW | RTLD_NOLOAD
    let [dladdr, dlopen, dlclose] = [c"dladdr", c"dlopen", c"dlclose"].map(next);
    if dladdr.is_null() || dlopen.is_null() || dlclose.is_null() {
        return null_mut();
    }
    // SAFETY: the libc's function of this name, here and below.
    let dladdr: Dladdr = unsafe { transmute(dladdr) };
    // SAFETY: as above.
    let dlopen: Dlopen = unsafe { transmute(dlopen) };
    // SAFETY: as above.
    let dlclose: Dlclose = unsafe { transmute(dlclose) };
    // Dl_info: the object's path is the first word.
    let mut information = [0; 4];
    // SAFETY: a live local takes the answer.
    if unsafe { dladdr(address, &raw mut information) } == 0 || information[0] == 0 {
        return null_mut();
    }
    // SAFETY: the loader's own string. Nothing is loaded.
    let object = unsafe { dlopen(with_exposed_provenance_mut(information[0]), NOW_AND_ONLY_IF_LOADED) };
    if object.is_null() {
        return null_mut();
    }
    let found = dlsym(object, symbol.as_ptr());
    // SAFETY: opened above; it stays loaded, as its code is running.
    unsafe { dlclose(object) };
    found
}

/// What comes after ours of a symbol of this object.
pub(crate) fn next(symbol: &CStr) -> *mut c_void {
    dlsym(rtld_next(), symbol.as_ptr())
}

/// ioctl(2) that sets errno.
pub(crate) fn ioctl(fd: i32, request: usize, argument: usize) -> i32 {
    // SAFETY: it holds the address of an ioctl at all times.
    let next: Ioctl = unsafe { transmute(NEXT_IOCTL.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(fd, request, argument) }
}

unsafe extern "C" fn raw_ioctl(fd: i32, request: usize, argument: usize) -> i32 {
    match sys::ioctl(fd, request, argument) {
        Ok(result) => result,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// libc's functions for read-locking a pthread_rwlock_t; null until [`find_read_locks`].
static READ_LOCK: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static TRY_READ_LOCK: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

/// Returns whether both exist, so that the functions below may be called.
pub(crate) fn find_read_locks() -> bool {
    let all = [(&TRY_READ_LOCK, c"pthread_rwlock_tryrdlock"), (&READ_LOCK, c"pthread_rwlock_rdlock")];
    all.into_iter().all(|(slot, name)| {
        let found = next(name);
        slot.store(found, Ordering::Relaxed);
        !found.is_null()
    })
}

/// pthread_rwlock_rdlock(3).
///
/// # Safety
/// As for pthread_rwlock_rdlock; only after [`find_read_locks`].
pub(crate) unsafe fn read_lock(lock: *mut c_void) -> i32 {
    // SAFETY: the libc's function of this name.
    let function: ReadLock = unsafe { transmute(READ_LOCK.load(Ordering::Relaxed)) };
    // SAFETY: the caller's promise.
    unsafe { function(lock) }
}

/// pthread_rwlock_tryrdlock(3).
///
/// # Safety
/// As for [`read_lock`].
pub(crate) unsafe fn try_read_lock(lock: *mut c_void) -> i32 {
    // SAFETY: the libc's function of this name.
    let function: ReadLock = unsafe { transmute(TRY_READ_LOCK.load(Ordering::Relaxed)) };
    // SAFETY: the caller's promise.
    unsafe { function(lock) }
}

/// Has `work` called in each child of fork(3), if the libc can do that.
pub(crate) fn at_fork_in_child(work: extern "C" fn()) {
    // pthread_atfork is in no shared object of glibc. The last argument names an object, at whose end the call would be
    // removed; this one is never unloaded.
    type AtFork = unsafe extern "C" fn(usize, usize, extern "C" fn(), usize) -> i32;
    let mut found = next(c"__register_atfork");
    if found.is_null() {
        // musl.
        found = next(c"pthread_atfork");
    }
    if !found.is_null() {
        // SAFETY: the libc's function of this name; that of musl ignores the last argument.
        let register: AtFork = unsafe { transmute(found) };
        // SAFETY: a function that stays.
        unsafe { register(0, 0, work, 0) };
    }
}

/// The signals that glibc sends to its threads itself (32 and 33). A thread that blocks the second would make setuid(2)
/// and its like wait for ever: glibc sends it to all threads, and waits until each has changed its ids.
const LIBCS_OWN: sys::SignalSet = 1 << 31 | 1 << 32;

/// Starts a thread of libc that gets no signal of the program. Returns whether it was started.
pub(crate) fn start_thread(main: ThreadMain, argument: *mut c_void) -> bool {
    let create = next(c"pthread_create");
    if create.is_null() {
        return false;
    }
    // SAFETY: the libc's function of this name.
    let create: CreateThread = unsafe { transmute(create) };
    let mut thread = 0;
    // It inherits the mask.
    let mask = sys::set_signal_mask(!LIBCS_OWN);
    // SAFETY: a live local takes the thread's name; it is never joined, and ends with the process.
    let is_started = unsafe { create(&raw mut thread, core::ptr::null(), main, argument) == 0 };
    sys::set_signal_mask(mask);
    is_started
}

/// # Safety
/// As for memcpy(3).
pub(crate) unsafe fn copy(to: *mut u8, from: *const u8, length: usize) {
    // SAFETY: a static of this object.
    let memmove = unsafe { MEMMOVE.load(Ordering::Relaxed) };
    if memmove.is_null() {
        // SAFETY: the caller's promise.
        unsafe { sys::copy_bytes(to, from, length) };
        return;
    }
    // SAFETY: what the loader put there is the function of the libc.
    let memmove: Copy = unsafe { transmute(memmove) };
    // SAFETY: the caller's promise.
    unsafe { memmove(to, from, length) };
}

/// mmap(2) that returns the address or all ones, and sets errno.
pub(crate) fn map(address: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> usize {
    // SAFETY: it holds the address of an mmap at all times.
    let next: Map = unsafe { transmute(NEXT_MMAP.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(address, length, prot, flags, fd, offset) }
}

/// munmap(2) that sets errno.
pub(crate) fn unmap(address: usize, length: usize) -> i32 {
    // SAFETY: it holds the address of a munmap at all times.
    let next: Unmap = unsafe { transmute(NEXT_MUNMAP.load(Ordering::Relaxed)) };
    // SAFETY: what was asked of us is handed on.
    unsafe { next(address, length) }
}

unsafe extern "C" fn raw_mmap(a: usize, length: usize, prot: i32, flags: i32, fd: i32, offset: isize) -> usize {
    match sys::map(a, length, prot, flags, fd, offset) {
        Ok(address) => address,
        Err(errno) => {
            set_errno(errno);
            usize::MAX
        }
    }
}

unsafe extern "C" fn raw_munmap(address: usize, length: usize) -> i32 {
    match sys::unmap(address, length) {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

fn set_errno(errno: Errno) {
    // SAFETY: a static of this object.
    let location = unsafe { ERRNO.load(Ordering::Relaxed) };
    if location.is_null() {
        return;
    }
    // SAFETY: what the loader put there is the function of the libc.
    let location: ErrnoLocation = unsafe { transmute(location) };
    // SAFETY: the errno of the calling thread.
    unsafe { *location() = errno.0 };
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn fork() -> i32;
        fn waitpid(pid: i32, status: *mut i32, options: i32) -> i32;
        fn kill(pid: i32, signal: i32) -> i32;
        fn getgid() -> u32;
        fn setgid(gid: u32) -> i32;
        fn _exit(code: i32) -> !;
    }

    unsafe extern "C" fn sleep(_: *mut c_void) -> *mut c_void {
        loop {
            sys::sleep(1_000_000_000);
        }
    }

    #[test]
    fn a_thread_of_ours_does_not_keep_the_program_from_changing_its_ids() {
        let ends_well = |_| {
            // SAFETY: the child starts a thread, asks for an id that it has, and ends.
            let child = unsafe { fork() };
            if child == 0 {
                // SAFETY: as above.
                unsafe { _exit(i32::from(!start_thread(sleep, core::ptr::null_mut()) || setgid(getgid()) != 0)) };
            }
            let (mut status, deadline) = (-1, sys::now() + 5_000_000_000);
            // SAFETY: our own child, and a live local.
            while unsafe { waitpid(child, &raw mut status, 1) } == 0 {
                if sys::now() > deadline {
                    // SAFETY: our own child.
                    unsafe { kill(child, 9) };
                }
                sys::sleep(10_000_000);
            }
            status == 0
        };
        // Another test's thread may have had a lock of the loader's at the fork.
        assert!((0..5).any(ends_well));
    }
}

//! CRIU's calls that open or change files by their path. CRIU finds these functions instead of the C library's
//! (LD_PRELOAD).
//!
//! In a restore CRIU has the file rights of the job's user ([`rights`](crate::rights)), and every call is first made
//! with those only. If the kernel refuses, only these are repeated with more rights:
//!
//! | what | with | why it is safe |
//! |---|---|---|
//! | an entry of /proc | root's rights, no link followed | CRIU's own processes; users create nothing there |
//! | a link in /proc to an open file | the right to pass folders | the file itself needs the user's rights |
//! | metadata of a name; the working directory | the right to pass folders | nothing is opened |
//! | a regular file or a folder, to read | the right to read | nothing is changed; rekindle compares each with what the user may open before the job runs |
//! | an existing regular file, to write | the right to pass folders | the file itself needs the user's rights |
//! | a name in a folder that [only root](crate::trusted) can change | root's rights | nobody can replace it: CRIU's work folder; a library that was deleted since |
//!
//! Anything that is neither a regular file nor a folder is never opened with more rights, because opening a device or a
//! FIFO can have effects.
//!
//! In a dump CRIU is root, and temporarily gives a deleted file another name (`link_remap.N`) in the folder where it
//! was: this is done with the user's rights.

use core::ffi::{c_char, c_int, c_long, c_uint, c_void};
use core::slice::from_raw_parts;
use core::sync::atomic::{AtomicU8, Ordering};

use rekindle_abi::variables;

use crate::rights::{READ, Rights, WRITE, raised};
use crate::sys::{self, AT_FDCWD, EACCES, ENOSYS, EPERM, answer, argument, number};
use crate::trusted;

/// The stage that CRIU is in.
static STAGE: AtomicU8 = AtomicU8::new(BEFORE);
const BEFORE: u8 = 0;
const DUMP: u8 = 1;
const RESTORE: u8 = 2;

const O_ACCMODE: i32 = 3;
const O_CREAT: i32 = 0o100;
const O_NOCTTY: i32 = 0o400;
const O_NONBLOCK: i32 = 0o4_000;
const O_NOFOLLOW: i32 = 0o400_000;
const O_CLOEXEC: i32 = 0o2_000_000;
const O_PATH: i32 = 0o10_000_000;
const AT_SYMLINK_NOFOLLOW: i32 = 0x100;

/// The user whose file access rights CRIU must have; `None` if it stays root.
pub(crate) fn rights() -> Option<Rights> {
    Rights::parse(sys::variable(variables::FILES_AS)?)
}

/// CRIU begins a dump or a restore. Returns whether it may continue, which needs the required [`rights`].
pub(crate) fn begin(stage: i32) -> bool {
    /// `CR_PLUGIN_STAGE__RESTORE`.
    const CRIU_RESTORES: i32 = 2;
    match rights() {
        None => sys::variable(variables::FILES_AS).is_none(),
        Some(rights) if stage == CRIU_RESTORES => {
            STAGE.store(RESTORE, Ordering::Relaxed);
            leave_keyring();
            rights.take()
        }
        Some(_) => {
            STAGE.store(DUMP, Ordering::Relaxed);
            true
        }
    }
}

/// The tasks that CRIU creates would have the keys of rekindle's session, which is root's. Some sandboxes do not allow the
/// call: then nobody in them can use keys.
fn leave_keyring() {
    /// `KEYCTL_JOIN_SESSION_KEYRING`; without a name it is a new one.
    const JOIN: usize = 1;
    sys::numbers(number::KEYCTL, [JOIN, 0, 0]);
}

fn stage() -> u8 {
    STAGE.load(Ordering::Relaxed)
}

fn is_refused(result: isize) -> bool {
    [EPERM, EACCES].contains(&result)
}

/// # Safety
/// `path` ends with NUL.
unsafe fn bytes<'a>(path: *const c_char) -> &'a [u8] {
    if path.is_null() {
        return &[];
    }
    // SAFETY: as the caller promises.
    let length = unsafe { sys::length(path) };
    // SAFETY: so many bytes are before the NUL.
    unsafe { from_raw_parts(path.cast(), length) }
}

fn raw_open(from: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> isize {
    let arguments = [argument(from), path.addr(), argument(flags), mode as usize, 0, 0];
    // SAFETY: a path that the caller gave, which ends with NUL; the kernel checks the rest.
    unsafe { sys::call(number::OPENAT, arguments) }
}

/// # Safety
/// `path` ends with NUL.
unsafe fn open_in(from: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> isize {
    if stage() != RESTORE {
        return raw_open(from, path, flags, mode);
    }
    let result = open_at_once(from, path, flags, mode);
    if !is_refused(result) {
        return result;
    }
    // SAFETY: as the caller promises.
    let name = unsafe { bytes(path) };
    let more = if name.starts_with(b"/proc/") || (name.first() != Some(&b'/') && sys::is_proc(from)) {
        open_in_proc(from, path, flags, mode)
    } else if flags & O_CREAT != 0 {
        as_root_in(from, name, |place| raw_open(place.folder, place.name(), flags | O_NOFOLLOW, mode))
    } else {
        open_what_is_there(from, path, flags)
    };
    // CRIU may know that a file does not exist, even if the user may not see that.
    more.unwrap_or(result)
}

/// Opens without blocking: a FIFO created by the user would make CRIU wait for its other end, and a lease for its
/// holder. When CRIU opens a FIFO of the job, it has opened the other end before.
fn open_at_once(from: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> isize {
    if flags & (O_NONBLOCK | O_PATH) != 0 {
        return raw_open(from, path, flags, mode);
    }
    let opened = raw_open(from, path, flags | O_NONBLOCK, mode);
    wait_again(opened, flags);
    opened
}

/// Clears O_NONBLOCK.
fn wait_again(opened: isize, flags: c_int) {
    const F_SETFL: usize = 4;
    if opened >= 0 {
        sys::numbers(number::FCNTL, [opened as usize, F_SETFL, argument(flags & !O_NONBLOCK)]);
    }
}

fn open_in_proc(from: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> Option<isize> {
    /// RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS.
    const WITHIN: u64 = 0x01 | 0x02;
    // `struct open_how`.
    let how: [u64; 3] = [u64::from(flags.cast_unsigned()), u64::from(mode) * u64::from(flags & O_CREAT != 0), WITHIN];
    let arguments = [argument(from), path.addr(), how.as_ptr().addr(), size_of_val(&how), 0, 0];
    // SAFETY: a path that the caller gave, which ends with NUL, and a struct of the size that is told.
    let mut entry = raised(WRITE, || unsafe { sys::call(number::OPENAT2, arguments) });
    if entry == ENOSYS {
        // Before Linux 5.6. Such entries of CRIU have no link on their path except its own /proc/self.
        entry = raised(WRITE, || raw_open(from, path, flags | O_NOFOLLOW, mode));
    }
    if entry >= 0 {
        return Some(entry);
    }
    open_what_is_there(from, path, flags)
}

/// Opens a regular file or a folder even if the user may not enter all of its parent folders.
fn open_what_is_there(from: c_int, path: *const c_char, flags: c_int) -> Option<isize> {
    let found = raised(READ, || raw_open(from, path, O_PATH | O_CLOEXEC | (flags & O_NOFOLLOW), 0));
    if found < 0 {
        return Some(found);
    }
    let found = found as i32;
    let opened = match sys::stat(found).map(|stat| stat.kind()) {
        Some(sys::REGULAR | sys::DIRECTORY) => {
            let name = own_link(found);
            let again = || raw_open(AT_FDCWD, name.as_ptr().cast(), (flags & !O_NOFOLLOW) | O_NOCTTY | O_NONBLOCK, 0);
            let reads_only = flags & (O_ACCMODE | O_PATH) == 0;
            Some(if reads_only { raised(READ, again) } else { again() })
        }
        _ => None,
    };
    sys::close(found);
    let opened = opened?;
    if flags & O_NONBLOCK == 0 {
        wait_again(opened, flags);
    }
    Some(opened)
}

/// `/proc/self/fd/N`.
fn own_link(fd: i32) -> [u8; 32] {
    // The digits in reverse order.
    let mut digits = [0u8; 10];
    let mut rest = fd.unsigned_abs();
    let mut count = 0;
    for digit in &mut digits {
        *digit = b'0' + (rest % 10) as u8;
        rest /= 10;
        count += 1;
        if rest == 0 {
            break;
        }
    }
    let mut name = [0u8; 32];
    let text = b"/proc/self/fd/".iter().chain(digits.iter().take(count).rev());
    name.iter_mut().zip(text).for_each(|(slot, byte)| *slot = *byte);
    name
}

/// Runs `work` as root if only root can change the folders above `path`.
fn as_root_in(from: c_int, path: &[u8], work: impl FnOnce(&trusted::Place) -> isize) -> Option<isize> {
    let rights = rights()?;
    rights.lay_down(|| trusted::place(from, path).map(|place| work(&place)))
}

/// Makes a system call with a folder and a name, two numbers and flags.
///
/// # Safety
/// `path` ends with NUL, and the call of this number takes arguments of this kind.
unsafe fn change(number: usize, from: c_int, path: *const c_char, [a, b]: [usize; 2], flags: c_int) -> isize {
    let call = |from: c_int, path: *const c_char, flags: c_int| {
        // SAFETY: as the caller promises.
        unsafe { sys::call(number, [argument(from), path.addr(), a, b, argument(flags), 0]) }
    };
    let result = call(from, path, flags);
    if !is_refused(result) || stage() != RESTORE {
        return result;
    }
    // SAFETY: as the caller promises.
    let name = unsafe { bytes(path) };
    let more = as_root_in(from, name, |place| call(place.folder, place.name(), flags | AT_SYMLINK_NOFOLLOW));
    more.filter(|more| *more >= 0).unwrap_or(result)
}

/// Whether CRIU gives this path temporarily to a deleted file during a dump.
fn is_for_a_moment(path: &[u8]) -> bool {
    path.rsplit(|byte| *byte == b'/').next().is_some_and(|name| name.starts_with(b"link_remap."))
}

/// # Safety
/// `path` ends with NUL.
unsafe fn unlink_in(from: c_int, path: *const c_char, flags: c_int) -> isize {
    let arguments = [argument(from), path.addr(), argument(flags), 0, 0, 0];
    // SAFETY: as the caller promises.
    let call = || unsafe { sys::call(number::UNLINKAT, arguments) };
    // SAFETY: as the caller promises.
    let name = unsafe { bytes(path) };
    match stage() {
        DUMP if is_for_a_moment(name) => as_user(from, name, call, |place| {
            let arguments = [argument(place.folder), place.name().addr(), argument(flags), 0, 0, 0];
            // SAFETY: the name ends with NUL.
            unsafe { sys::call(number::UNLINKAT, arguments) }
        }),
        RESTORE => {
            let result = call();
            if !is_refused(result) {
                return result;
            }
            let more = as_root_in(from, name, |place| {
                let arguments = [argument(place.folder), place.name().addr(), argument(flags), 0, 0, 0];
                // SAFETY: the name ends with NUL.
                unsafe { sys::call(number::UNLINKAT, arguments) }
            });
            more.filter(|more| *more >= 0).unwrap_or(result)
        }
        _ => call(),
    }
}

/// For a dump: runs `work` with the user's rights, or as root if only root can change the folder.
fn as_user(
    from: c_int,
    name: &[u8],
    call: impl FnOnce() -> isize,
    trusted: impl FnOnce(&trusted::Place) -> isize,
) -> isize {
    let Some(rights) = rights() else { return EPERM };
    let result = rights.borrow(|| raised(READ, call)).unwrap_or(EPERM);
    if !is_refused(result) {
        return result;
    }
    trusted::place(from, name).map_or(result, |place| trusted(&place))
}

/// # Safety
/// Both paths end with NUL.
unsafe fn link_in(from: c_int, old: *const c_char, to: c_int, new: *const c_char, flags: c_int) -> isize {
    let call = |to: c_int, new: *const c_char| {
        let arguments = [argument(from), old.addr(), argument(to), new.addr(), argument(flags), 0];
        // SAFETY: as the caller promises.
        unsafe { sys::call(number::LINKAT, arguments) }
    };
    // SAFETY: as the caller promises.
    let name = unsafe { bytes(new) };
    match stage() {
        DUMP if is_for_a_moment(name) => as_user(to, name, || call(to, new), |place| call(place.folder, place.name())),
        _ => call(to, new),
    }
}

/// Makes a call that opens and changes nothing.
fn ask(number: usize, arguments: [usize; 6]) -> isize {
    // SAFETY: the callers' arguments are those of the call.
    let call = || unsafe { sys::call(number, arguments) };
    let result = call();
    if is_refused(result) && stage() == RESTORE { raised(READ, call) } else { result }
}

macro_rules! opens {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            // SAFETY: as open(2) asks of its callers.
            answer(unsafe { open_in(AT_FDCWD, path, flags, mode) }) as c_int
        }
    )* };
}

macro_rules! opens_at {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(from: c_int, path: *const c_char, flags: c_int, mode: c_uint) -> c_int {
            // SAFETY: as openat(2) asks of its callers.
            answer(unsafe { open_in(from, path, flags, mode) }) as c_int
        }
    )* };
}

// The names with two underscores are used by the C library's checked headers.
opens! { open open64 __open_2 __open64_2 }
opens_at! { openat openat64 __openat_2 __openat64_2 }

macro_rules! stats_at {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(from: c_int, path: *const c_char, stat: *mut c_void, flags: c_int) -> c_int {
            answer(ask(number::NEWFSTATAT, [argument(from), path.addr(), stat.addr(), argument(flags), 0, 0])) as c_int
        }
    )* };
}

macro_rules! stats {
    ($($name:ident)*) => { $(
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name(path: *const c_char, stat: *mut c_void) -> c_int {
            answer(ask(number::NEWFSTATAT, [argument(AT_FDCWD), path.addr(), stat.addr(), 0, 0, 0])) as c_int
        }
    )* };
}

stats_at! { fstatat fstatat64 }
stats! { stat stat64 }

#[unsafe(no_mangle)]
unsafe extern "C" fn fchdir(folder: c_int) -> c_int {
    answer(ask(number::FCHDIR, [argument(folder), 0, 0, 0, 0, 0])) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlink(path: *const c_char) -> c_int {
    // SAFETY: as unlink(2) asks of its callers.
    answer(unsafe { unlink_in(AT_FDCWD, path, 0) }) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn unlinkat(from: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as unlinkat(2) asks of its callers.
    answer(unsafe { unlink_in(from, path, flags) }) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn linkat(from: c_int, old: *const c_char, to: c_int, new: *const c_char, flags: c_int) -> c_int {
    // SAFETY: as linkat(2) asks of its callers.
    answer(unsafe { link_in(from, old, to, new, flags) }) as c_int
}

#[unsafe(no_mangle)]
unsafe extern "C" fn fchownat(from: c_int, path: *const c_char, uid: c_uint, gid: c_uint, flags: c_int) -> c_int {
    // SAFETY: as fchownat(2) asks of its callers.
    answer(unsafe { change(number::FCHOWNAT, from, path, [uid as usize, gid as usize], flags) }) as c_int
}

/// Of a descriptor with an owner for signals (F_SETOWN), CRIU takes the ids for a moment. The way back to root gives the
/// task root's rights over files again: then it takes those of the user anew.
#[unsafe(no_mangle)]
unsafe extern "C" fn setresuid(real: c_uint, effective: c_uint, saved: c_uint) -> c_int {
    let done = sys::numbers(number::SETRESUID, [real as usize, effective as usize, saved as usize]);
    let is_root_again = done == 0 && effective == 0 && stage() == RESTORE;
    if is_root_again && !rights().is_none_or(|rights| rights.take()) {
        return answer(EPERM) as c_int;
    }
    answer(done) as c_int
}

/// `lutimes(3)`: the times of a name, no link followed, in seconds and microseconds.
#[unsafe(no_mangle)]
unsafe extern "C" fn lutimes(path: *const c_char, times: *const [[c_long; 2]; 2]) -> c_int {
    // SAFETY: as lutimes(3) asks of its callers: two of them, or none for now.
    let times = (!times.is_null()).then(|| unsafe { times.read() });
    let times = times.map(|times| times.map(|[seconds, micros]| [seconds, micros.saturating_mul(1000)]));
    let times_at = times.as_ref().map_or(0, |times| times.as_ptr().addr());
    let call = |from: c_int, path: *const c_char| {
        let arguments = [argument(from), path.addr(), times_at, argument(AT_SYMLINK_NOFOLLOW), 0, 0];
        // SAFETY: a path that ends with NUL, and times that live until the call is over.
        unsafe { sys::call(number::UTIMENSAT, arguments) }
    };
    let mut result = call(AT_FDCWD, path);
    if is_refused(result) && stage() == RESTORE {
        // SAFETY: as lutimes(3) asks of its callers.
        let name = unsafe { bytes(path) };
        let more = as_root_in(AT_FDCWD, name, |place| call(place.folder, place.name()));
        result = more.filter(|more| *more >= 0).unwrap_or(result);
    }
    answer(result) as c_int
}

/// Two calls that CRIU makes by their number.
///
/// It opens what inotify watches by its handle, which takes the right to pass every folder. The handle is in the image,
/// and what it opens is a mere path.
///
/// It asks for the limits of each task, which takes CAP_SYS_RESOURCE or the ids of the task.
#[unsafe(no_mangle)]
unsafe extern "C" fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
    let arguments = [a, b, c, d, e, f];
    // SAFETY: as the system call asks of its callers.
    let call = || unsafe { sys::call(number as usize, arguments) };
    let result = match number as usize {
        number::OPEN_BY_HANDLE_AT if stage() == RESTORE => raised(READ, call),
        number::PRLIMIT64 if stage() == DUMP => match (call(), rights()) {
            (result, Some(rights)) if is_refused(result) => rights.be_called(call),
            (result, _) => result,
        },
        _ => call(),
    };
    answer(result) as c_long
}

//! The resource manager: the ioctls that libcuda makes for memory that processes share (driver 580), and what the
//! kernel module does with them, as far as somebody looks at it.
//!
//! Both sides are here. libcuda's goes through the first `ioctl` of the process, where an interposer waits; the
//! kernel's is the `ioctl` of this object, which is the next one after the interposer's if the job preloads this object
//! behind it. Layouts: nvos.h, ctrl0000unix.h of NVIDIA's open kernel modules.

use std::ffi::c_ulong;
use std::io;
use std::mem::transmute;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::control::code;

const FREE: u8 = 0x29;
const CONTROL: u8 = 0x2a;
const ALLOC: u8 = 0x2b;
const DUP_OBJECT: u8 = 0x34;

const EXPORT_INFO: u32 = 0x3d08;
const EXPORT_OBJECTS: u32 = 0x3d0b;
const IMPORT_OBJECTS: u32 = 0x3d0c;

/// Where the metadata of an export are in the parameters, and how many there are.
const EXPORT_INFO_AT: usize = 14;
const EXPORT_OBJECTS_AT: usize = 10;
const METADATA: usize = 64;

/// NV01_ROOT_CLIENT.
const CLIENT: u32 = 0x41;

/// The number that a process has for itself, as no other has it.
pub(crate) fn client(pid: i32) -> u32 {
    0xc1d0_0000 | pid.cast_unsigned() & 0xffff
}

/// Of the same process, as libcuda has more than one.
fn second_client(pid: i32) -> u32 {
    client(pid) | 0x8_0000
}

/// A number for an object.
fn object() -> u32 {
    static LAST: AtomicU32 = AtomicU32::new(0x5c00_0000);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

fn own_pid() -> i32 {
    // SAFETY: no precondition.
    unsafe { libc::getpid() }
}

/// ioctl(2): the resource manager's numbers end here, where the kernel module would be.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn ioctl(fd: i32, request: c_ulong, argument: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { kernel(fd, request, argument) }
}

/// The same, by a name that no other object can define.
unsafe extern "C" fn kernel(fd: i32, request: c_ulong, argument: usize) -> i32 {
    let [number, kind, ..] = request.to_ne_bytes();
    if kind != b'F' || !matches!(number, FREE | CONTROL | ALLOC | DUP_OBJECT) {
        // SAFETY: what was asked of us is handed on; the wrapper sets errno.
        return i32::try_from(unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) }).unwrap_or(-1);
    }
    if number == CONTROL {
        // SAFETY: the caller passes an NVOS54.
        let words: [u32; 8] = unsafe { std::ptr::with_exposed_provenance::<[u32; 8]>(argument).read() };
        let params = usize::try_from(u64::from(words[5]) << 32 | u64::from(words[4])).unwrap_or(0);
        let at = match words[2] {
            EXPORT_OBJECTS => EXPORT_OBJECTS_AT,
            EXPORT_INFO => EXPORT_INFO_AT,
            _ => return 0,
        };
        // SAFETY: the caller passes parameters of the size for this command.
        let file = unsafe { std::ptr::with_exposed_provenance::<i32>(params).read_unaligned() };
        let metadata = std::ptr::with_exposed_provenance_mut::<libc::c_void>(params + at);
        let moved = match words[2] {
            // SAFETY: as above.
            EXPORT_OBJECTS => unsafe { libc::pwrite(file, metadata, METADATA, 0) },
            // SAFETY: as above.
            _ => unsafe { libc::pread(file, metadata, METADATA, 0) },
        };
        return if moved == METADATA.cast_signed() { 0 } else { -1 };
    }
    0
}

/// libcuda's call of the first `ioctl` in the process. The resource manager's status is the last word.
fn call(number: u8, argument: &mut [u32]) -> Result<(), i32> {
    type Ioctl = unsafe extern "C" fn(i32, c_ulong, usize) -> i32;
    // A process without an interposer has not preloaded this object either.
    let first = match crate::host::is_copier() {
        true => kernel as *mut libc::c_void,
        // SAFETY: a string that ends with NUL.
        false => unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"ioctl".as_ptr()) },
    };
    if first.is_null() {
        return Err(code::OPERATING_SYSTEM);
    }
    // SAFETY: whoever defines this name defines it with this type, or a variadic one that is called alike.
    let first: Ioctl = unsafe { transmute(first) };
    let size = size_of_val(argument) as c_ulong;
    let request = 3 << 30 | size << 16 | c_ulong::from(b'F') << 8 | c_ulong::from(number);
    // SAFETY: the number names the size of the argument.
    match unsafe { first(-1, request, argument.as_mut_ptr().expose_provenance()) } {
        0 if argument.last() == Some(&0) => Ok(()),
        _ => Err(code::OPERATING_SYSTEM),
    }
}

fn control(command: u32, params: &mut [u8]) -> Result<(), i32> {
    let client = client(own_pid());
    let address = params.as_mut_ptr().expose_provenance() as u64;
    let [a, b, c, d, e, f, g, h] = address.to_ne_bytes();
    let halves = [u32::from_ne_bytes([a, b, c, d]), u32::from_ne_bytes([e, f, g, h])];
    let size = u32::try_from(params.len()).map_err(|_| code::INVALID_VALUE)?;
    call(CONTROL, &mut [client, client, command, 0, halves[0], halves[1], size, 0])
}

/// What a process says before all else. The second client has an object of the first, as JAX's have.
pub(crate) fn begin() -> Result<(), i32> {
    let [one, two] = [client(own_pid()), second_client(own_pid())];
    for client in [one, two] {
        call(ALLOC, &mut [0, 0, client, CLIENT, 0, 0, 0, 0])?;
    }
    call(DUP_OBJECT, &mut [two, two, object(), one, object(), 0, 0])
}

/// Gives an export its metadata: libcuda itself uses the first two bytes.
pub(crate) fn export(file: i32) -> Result<(), i32> {
    let mut params = [0; 2128];
    params[..4].copy_from_slice(&file.to_ne_bytes());
    params[EXPORT_OBJECTS_AT] = 1;
    control(EXPORT_OBJECTS, &mut params)
}

/// Looks at an export and imports its objects. Their numbers.
pub(crate) fn import(file: i32, objects: usize) -> Result<Vec<u32>, i32> {
    for _ in 0..2 {
        let mut info = [0; 80];
        info[..4].copy_from_slice(&file.to_ne_bytes());
        control(EXPORT_INFO, &mut info)?;
        let metadata = &info[EXPORT_INFO_AT..];
        // What libcuda does not use is zero for it.
        if metadata[0] != 1 || metadata[1..METADATA].iter().any(|byte| *byte != 0) {
            return Err(code::INVALID_VALUE);
        }
    }
    let one = |object| {
        let mut params = [0; 2128];
        for (at, value) in [(0, file.cast_unsigned()), (4, client(own_pid())), (8, object)] {
            params[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        }
        control(IMPORT_OBJECTS, &mut params)?;
        Ok(object)
    };
    (0..objects).map(|_| one(object())).collect()
}

/// Takes an object of another process, as CUDA IPC does. The object's number.
pub(crate) fn duplicate(from: i32) -> Result<u32, i32> {
    let (own, object) = (client(own_pid()), object());
    call(DUP_OBJECT, &mut [own, own, object, client(from), 1, 0, 0])?;
    Ok(object)
}

/// The end of an object of this process.
pub(crate) fn free(object: u32) -> Result<(), i32> {
    let own = client(own_pid());
    call(FREE, &mut [own, own, object, 0])
}

/// A file that is memory of the device: a page for what an export carries, and then the memory.
pub(crate) fn device_file(size: usize) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::FromRawFd;
    // SAFETY: a string that ends with NUL.
    let fd = unsafe { libc::memfd_create(c"standin-memory".as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: just made, and nobody else's.
    let file = unsafe { std::fs::File::from_raw_fd(fd) };
    file.set_len((crate::control::SIZE + size) as u64)?;
    Ok(file.into())
}

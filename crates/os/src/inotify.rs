//! Watches of inotify(7): with a number that was chosen before, of a file that only its handle names (open_by_handle_at(2)).
#![allow(unsafe_code, reason = "system calls that the libraries do not have; each block says why it is sound")]

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::sys::stat::makedev;

use crate::mounts::Mount;

/// A watch, as /proc/PID/fdinfo shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Watch {
    /// Its number.
    pub number: u32,
    /// Its events and flags.
    pub mask: u32,
    /// The device of the file, as stat(2) has it.
    device: u64,
    /// The handle of the file (open_by_handle_at(2)): its type and its bytes.
    handle: (i32, Vec<u8>),
}

impl Watch {
    /// Those of a descriptor with this /proc/PID/fdinfo/N.
    #[must_use]
    pub fn all(info: &str) -> Vec<Watch> {
        info.lines().filter_map(Watch::parse).collect()
    }

    /// `inotify wd:1 ino:7bcf sdev:fe00000 mask:afce ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:cf7b00006e0d9d27`
    fn parse(line: &str) -> Option<Watch> {
        let words = line.strip_prefix("inotify ")?;
        let word = |name: &str| words.split(' ').find_map(|word| word.strip_prefix(name));
        let number = |name: &str| u32::from_str_radix(word(name)?, 16).ok();
        // `MAJOR` and `MINOR` of linux/kdev_t.h.
        let device = number("sdev:")?;
        let device = makedev((device >> 20).into(), (device & 0xf_ffff).into());
        let digits = word("f_handle:")?;
        let byte = |at: usize| u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok();
        let bytes: Option<Vec<u8>> = (0..digits.len() / 2).map(byte).collect();
        let kind = number("fhandle-type:")?.cast_signed();
        Some(Watch { number: number("wd:")?, mask: number("mask:")?, device, handle: (kind, bytes?) })
    }

    /// The file, opened for its place only. It need not have a name that is known: it is opened by its handle, through one of
    /// the `mounts` that the process `pid` sees.
    #[must_use]
    pub fn file(&self, pid: i32, mounts: &[Mount]) -> Option<OwnedFd> {
        let (kind, bytes) = &self.handle;
        mounts.iter().filter(|mount| mount.device == self.device).find_map(|mount| {
            let root = Path::new("/proc").join(pid.to_string()).join("root");
            let point = root.join(mount.point.strip_prefix("/").ok()?);
            let folder = OpenOptions::new().read(true).custom_flags(libc::O_DIRECTORY).open(point).ok()?;
            open_handle(&folder, *kind, bytes).ok()
        })
    }
}

/// Has an inotify descriptor watch a file under this number, which it must not have yet (inotify(7), `INOTIFY_IOC_SETNEXTWD`).
///
/// # Errors
/// When the kernel cannot choose the number (CONFIG_CHECKPOINT_RESTORE), the number is taken, or there are too many watches.
pub fn watch(inotify: &impl AsFd, file: &Path, number: u32, mask: u32) -> io::Result<()> {
    // `_IOW('I', 0, __s32)` of linux/inotify.h.
    const SET_NEXT_NUMBER: libc::Ioctl = 0x4004_4900;
    let descriptor = inotify.as_fd().as_raw_fd();
    // SAFETY: the request takes a number.
    if unsafe { libc::ioctl(descriptor, SET_NEXT_NUMBER, libc::c_long::from(number)) } != 0 {
        return Err(io::Error::last_os_error());
    }
    change(inotify, file, number, mask)
}

/// Gives the watch of a file another mask. It must have this number.
///
/// # Errors
/// When the file is not watched under this number, or cannot be read.
pub fn change(inotify: &impl AsFd, file: &Path, number: u32, mask: u32) -> io::Result<()> {
    let path = CString::new(file.as_os_str().as_bytes())?;
    let inotify = inotify.as_fd().as_raw_fd();
    // SAFETY: the path is a string that lives during the call.
    match unsafe { libc::inotify_add_watch(inotify, path.as_ptr(), mask) } {
        -1 => Err(io::Error::last_os_error()),
        given if given.cast_unsigned() == number => Ok(()),
        given => {
            // SAFETY: a call on numbers.
            unsafe { libc::inotify_rm_watch(inotify, given) };
            Err(io::ErrorKind::AlreadyExists.into())
        }
    }
}

/// What the kernel allows for a handle (`MAX_HANDLE_SZ` of linux/exportfs.h).
const LONGEST: usize = 128;

/// `struct file_handle` of linux/fs.h.
#[repr(C)]
struct Handle {
    length: u32,
    kind: i32,
    bytes: [u8; LONGEST],
}

/// The file that a handle names, opened for its place only (O_PATH), which needs CAP_DAC_READ_SEARCH. `mount` is any folder of
/// its file system.
fn open_handle(mount: &impl AsFd, kind: i32, handle: &[u8]) -> io::Result<OwnedFd> {
    let length = handle.len();
    let mut bytes = [0; LONGEST];
    bytes.get_mut(..length).ok_or(io::ErrorKind::InvalidInput)?.copy_from_slice(handle);
    let handle = Handle { length: u32::try_from(length).map_err(io::Error::other)?, kind, bytes };
    let flags = libc::O_PATH | libc::O_CLOEXEC;
    // SAFETY: the kernel reads the handle, which has the length that it says and lives during the call.
    let opened =
        unsafe { libc::syscall(libc::SYS_open_by_handle_at, mount.as_fd().as_raw_fd(), &raw const handle, flags) };
    let opened = i32::try_from(opened).ok().filter(|opened| *opened >= 0).ok_or_else(io::Error::last_os_error)?;
    // SAFETY: the call has just made this descriptor, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_is_read_as_the_kernel_shows_it() {
        let line = "inotify wd:1a ino:7bcf sdev:fe00001 mask:84000002 ignored_mask:0 fhandle-bytes:8 fhandle-type:1 f_handle:22009f001cf80b3a";
        let watch = Watch::parse(line).unwrap();
        assert_eq!((watch.number, watch.mask, watch.device), (0x1a, 0x8400_0002, makedev(254, 1)));
        assert_eq!(watch.handle, (1, vec![0x22, 0, 0x9f, 0, 0x1c, 0xf8, 0x0b, 0x3a]));
        for odd in ["", "inotify", "inotify wd:1", "fanotify flags:0", &line.replace("3a", "3x")] {
            assert_eq!(Watch::parse(odd), None, "{odd}");
        }
    }
}

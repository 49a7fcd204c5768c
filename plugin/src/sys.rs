//! What is asked of the kernel and of the process.

use core::arch::asm;
use core::mem::MaybeUninit;

use crate::accept::Device;

/// `struct stat` of x86-64.
#[repr(C)]
struct Stat {
    /// Device, inode, links.
    before: [u64; 3],
    mode: u32,
    /// User, group, padding.
    owner: [u32; 3],
    rdev: u64,
    rest: [u64; 12],
}

/// The device that a descriptor is of, be it open or a mere path (O_PATH); nothing for what is no device.
pub(crate) fn device(fd: i32) -> Option<Device> {
    let mut stat = MaybeUninit::<Stat>::uninit();
    let result: isize;
    // SAFETY: fstat(2) writes to a struct of its size that lives until the call is over. rcx and r11 are what the
    // instruction itself overwrites.
    unsafe {
        asm!("syscall", inlateout("rax") 5_isize => result, in("rdi") fd as isize, in("rsi") stat.as_mut_ptr(),
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    if result != 0 {
        return None;
    }
    // SAFETY: the kernel has filled it in.
    let stat = unsafe { stat.assume_init() };
    let kind = match stat.mode & 0o170_000 {
        0o020_000 => b'c',
        0o060_000 => b'b',
        _ => return None,
    };
    // The kernel's `new_encode_dev`.
    let (major, minor) = (stat.rdev >> 8 & 0xfff, stat.rdev & 0xff | stat.rdev >> 12 & 0xf_ff00);
    Some(Device { kind, major: major as u32, minor: minor as u32 })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn a_device_is_told_from_other_files() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert_eq!(device(null.as_raw_fd()), Some(Device { kind: b'c', major: 1, minor: 3 }));
        let other = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(device(other.as_raw_fd()), None);
        assert_eq!(device(-1), None);
    }
}

//! How the kernel schedules a thread (sched_setattr(2)).
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::io;

/// `struct sched_attr` with the utilization clamps (Linux 5.3), 56 bytes.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attributes {
    /// Bytes of this structure that the kernel knows. [`Attributes::set`] needs none.
    pub size: u32,
    /// `SCHED_*`, without `SCHED_RESET_ON_FORK`.
    pub policy: u32,
    /// `SCHED_FLAG_*`
    pub flags: u64,
    /// The nice value.
    pub nice: i32,
    /// Of SCHED_FIFO and SCHED_RR.
    pub priority: u32,
    /// Of SCHED_DEADLINE, in nanoseconds; of the policies for ordinary programs, the time slice (Linux 6.12).
    pub runtime: u64,
    /// Of SCHED_DEADLINE, in nanoseconds.
    pub deadline: u64,
    /// Of SCHED_DEADLINE, in nanoseconds.
    pub period: u64,
    /// The least utilization that the kernel assumes, of 1024.
    pub util_min: u32,
    /// The greatest one.
    pub util_max: u32,
}

/// `SCHED_FLAG_UTIL_CLAMP_MIN` and `_MAX`, of sched_setattr(2) only.
pub const CLAMPS: u64 = 0x20 | 0x40;

impl Attributes {
    /// Those of a thread, or of the calling one with 0. On kernels before 5.3 there are no clamps.
    ///
    /// # Errors
    /// When there is no such thread.
    pub fn of(thread: i32) -> io::Result<Attributes> {
        let mut attributes = Attributes::default();
        let size = size_of::<Attributes>();
        // SAFETY: the kernel writes at most `size` bytes, which is the size of the structure, and any bytes are valid in it.
        let result = unsafe { libc::syscall(libc::SYS_sched_getattr, thread, &raw mut attributes, size, 0) };
        if result == 0 { Ok(attributes) } else { Err(io::Error::last_os_error()) }
    }

    /// A thread has these from now on.
    ///
    /// # Errors
    /// When there is no such thread, we have no right to (EPERM: CAP_SYS_NICE), the kernel does not know the policy or cannot
    /// clamp (EINVAL, EOPNOTSUPP), or has no time left for a deadline (EBUSY).
    pub fn set(&self, thread: i32) -> io::Result<()> {
        let attributes = Attributes { size: u32::try_from(size_of::<Attributes>()).unwrap_or(0), ..*self };
        // SAFETY: the kernel reads as many bytes as `size` says, which is the size of the structure.
        let result = unsafe { libc::syscall(libc::SYS_sched_setattr, thread, &raw const attributes, 0) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_has_what_was_set() {
        // A thread of its own: others must not be changed.
        let changed = std::thread::spawn(|| {
            let before = Attributes::of(0).unwrap();
            // SCHED_BATCH
            let new = Attributes { policy: 3, nice: 7, ..before };
            new.set(0).unwrap();
            assert_eq!(Attributes::of(0).unwrap(), new);
        });
        changed.join().unwrap();
        assert_eq!(Attributes::of(i32::MAX).unwrap_err().raw_os_error(), Some(libc::ESRCH));
    }
}

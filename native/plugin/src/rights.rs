//! CRIU's rights over files.
//!
//! CRIU is root, and uses paths in folders of the job's user. Between an image and its restore, and during one, the
//! user can put links, other folders and other files there. So CRIU gets the file rights of that user, and keeps root's
//! over everything else: the kernel judges file access by the file-system ids (credentials(7)), and takes root's rights
//! over files from a thread whose file-system user id is not 0 (capabilities(7), "Effect of user ID changes").
//!
//! [`Rights`] come from CRIU's environment, `REKINDLE_FILES_AS=UID:GID:GROUP,GROUP...`, and apply
//! - in a restore, from CRIU's first access to the job's files on, for CRIU and the tasks that it creates, until each
//!   task takes its own ids ([`Rights::take`]);
//! - in a dump, for the two calls that change something in folders of the job ([`Rights::borrow`]). CRIU needs root's
//!   rights to inspect processes, and only reads them.

use core::mem::MaybeUninit;

use crate::sys::{self, argument, number};

/// Maximum number of groups of a user.
const GROUPS: usize = 4096;

/// The ids of a user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    uid: u32,
    gid: u32,
    /// Supplementary groups, a list of numbers.
    groups: &'static [u8],
}

/// File capabilities that are raised temporarily.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Capabilities(u32);

/// CAP_DAC_READ_SEARCH: enter every folder and read every file.
pub(crate) const READ: Capabilities = Capabilities(1 << 2);
/// CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH.
pub(crate) const WRITE: Capabilities = Capabilities(1 << 1 | 1 << 2);

impl Rights {
    /// Parses `UID:GID:GROUP,GROUP`. `None` for root.
    pub(crate) fn parse(text: &'static [u8]) -> Option<Rights> {
        let mut parts = text.splitn(3, |byte| *byte == b':');
        let uid = crate::accept::number(parts.next()?)?;
        let gid = crate::accept::number(parts.next()?)?;
        let groups = parts.next()?;
        let numbers = || groups.split(|byte| *byte == b',').filter(|text| !text.is_empty());
        let are_right = numbers().all(|text| crate::accept::number(text).is_some()) && numbers().count() <= GROUPS;
        (uid != 0 && are_right).then_some(Rights { uid, gid, groups })
    }

    fn set_groups(&self) -> bool {
        let mut list = [0u32; GROUPS];
        let mut count = 0;
        for text in self.groups.split(|byte| *byte == b',') {
            if let (Some(group), Some(slot)) = (crate::accept::number(text), list.get_mut(count)) {
                *slot = group;
                count += 1;
            }
        }
        // SAFETY: the list is valid for `count` numbers.
        unsafe { sys::call(number::SETGROUPS, [count, list.as_ptr().addr(), 0, 0, 0, 0]) == 0 }
    }

    /// Takes these rights permanently. Returns false if the kernel did not comply.
    pub(crate) fn take(&self) -> bool {
        self.set_groups() && set_ids(self.uid, self.gid)
    }

    /// Runs `work` with these rights. `None` if the kernel did not comply; then `work` was not run.
    pub(crate) fn borrow<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let mut groups = [0u32; GROUPS];
        // SAFETY: the list is valid for its length.
        let count = unsafe { sys::call(number::GETGROUPS, [GROUPS, groups.as_mut_ptr().addr(), 0, 0, 0, 0]) };
        if count < 0 {
            return None;
        }
        let result = self.take().then(work);
        set_ids(0, 0);
        // SAFETY: the kernel filled in `count` of them.
        unsafe { sys::call(number::SETGROUPS, [count as usize, groups.as_ptr().addr(), 0, 0, 0, 0]) };
        result
    }

    /// Runs `work` as root after these rights were [taken](Rights::take).
    pub(crate) fn lay_down<T>(&self, work: impl FnOnce() -> T) -> T {
        set_ids(0, 0);
        let result = work();
        set_ids(self.uid, self.gid);
        result
    }
}

impl Rights {
    /// Runs `work` with these as the real ids, so that the process may read the limits of another one (prlimit(2))
    /// without CAP_SYS_RESOURCE. Root's rights are kept, because they depend on the effective id.
    pub(crate) fn be_called<T>(&self, work: impl FnOnce() -> T) -> T {
        const SAME: usize = usize::MAX;
        let set = |uid: u32, gid: u32| {
            sys::numbers(number::SETRESGID, [gid as usize, SAME, SAME]);
            sys::numbers(number::SETRESUID, [uid as usize, SAME, SAME]);
        };
        set(self.uid, self.gid);
        let result = work();
        set(0, 0);
        result
    }
}

/// Sets the file-system ids, and returns whether they are set.
fn set_ids(uid: u32, gid: u32) -> bool {
    const SET_PDEATHSIG: usize = 1;
    const GET_PDEATHSIG: usize = 2;
    const SET_DUMPABLE: usize = 4;
    let mut signal = 0i32;
    // SAFETY: the kernel writes a number of this size.
    unsafe { sys::call(number::PRCTL, [GET_PDEATHSIG, (&raw mut signal).addr(), 0, 0, 0, 0]) };
    // These calls return the previous id and never an error: a second call shows whether the first took effect.
    let set = |number, id: u32| {
        sys::numbers(number, [id as usize, 0, 0]);
        sys::numbers(number, [id as usize, 0, 0]) == id as isize
    };
    let is_set = set(number::SETFSGID, gid) & set(number::SETFSUID, uid);
    // The kernel clears both when ids change (`commit_creds`).
    sys::numbers(number::PRCTL, [SET_DUMPABLE, 1, 0]);
    if signal != 0 {
        sys::numbers(number::PRCTL, [SET_PDEATHSIG, argument(signal), 0]);
    }
    is_set
}

/// Runs `work` with these additional capabilities.
pub(crate) fn raised<T>(more: Capabilities, work: impl FnOnce() -> T) -> T {
    // `struct __user_cap_header_struct`, version 3, this thread; effective, permitted and inheritable, two words each.
    let header: [u32; 2] = [0x2008_0522, 0];
    let mut before = MaybeUninit::<[u32; 6]>::zeroed();
    let capget = [header.as_ptr().addr(), before.as_mut_ptr().addr(), 0, 0, 0, 0];
    // SAFETY: both are what version 3 wants.
    unsafe { sys::call(number::CAPGET, capget) };
    // SAFETY: all zeroes is valid.
    let before = unsafe { before.assume_init() };
    let set = |data: &[u32; 6]| {
        let capset = [header.as_ptr().addr(), data.as_ptr().addr(), 0, 0, 0, 0];
        // SAFETY: both are what version 3 wants.
        unsafe { sys::call(number::CAPSET, capset) }
    };
    let mut now = before;
    now[0] |= more.0;
    set(&now);
    let result = work();
    set(&before);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_read_and_root_is_none() {
        let rights = |text| Rights::parse(text);
        assert_eq!(rights(b"1000:100:4,24"), Some(Rights { uid: 1000, gid: 100, groups: b"4,24" }));
        assert!(rights(b"1000:100:").is_some());
        for text in
            [&b""[..], b"1000", b"1000:100", b"0:0:", b"0:100:4", b"a:1:", b"1:b:", b"1:1:x", b"1:1:4,,x", b"-1:1:"]
        {
            assert_eq!(rights(text), None, "{text:?}");
        }
    }
}

//! File access with another user's rights.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{FileStat, fstat};
use nix::unistd::{User, getgrouplist, setfsgid, setfsuid};
use rustix::process::{Gid, Uid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, set_capabilities, set_thread_groups, set_thread_res_gid,
    set_thread_res_uid,
};

use super::regular::{self, Links};

/// The user whose rights this process has.
#[must_use]
pub fn effective_user() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Runs `work` in a thread with the user's file access: its ids and groups, and none of root's rights to override
/// permissions (the kernel drops those with the file-system user id). Other threads are not changed: for the kernel
/// these are properties of a thread, while the C library's functions would change all threads.
///
/// The thread still belongs to this process, so the kernel lets it pass the process's magic links in /proc, which lead
/// to files that the user cannot reach. `work` must open what the user can exchange with [`regular`].
///
/// # Errors
/// When the kernel does not let us switch; `work` was not run then.
pub fn with_file_rights<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
            switch(uid, gid, groups)?;
            Ok(work())
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// The same with the rights of a user of this machine, by name or number.
///
/// # Errors
/// When there is no such user, or the kernel does not let us switch; `work` was not run then.
pub fn with_file_rights_of<T: Send>(user: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let by_name = User::from_name(user)?;
    let found = match (by_name, user.parse::<u32>()) {
        (None, Ok(uid)) => User::from_uid(uid.into())?,
        (found, _) => found,
    };
    let found = found.ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such user"))?;
    let name = std::ffi::CString::new(found.name.as_str())?;
    let groups: Vec<u32> = getgrouplist(&name, found.gid)?.into_iter().map(nix::unistd::Gid::as_raw).collect();
    with_file_rights(found.uid.as_raw(), found.gid.as_raw(), &groups, work)
}

/// The same in the mount namespace `world` (a descriptor of /proc/PID/ns/mnt), where paths are looked up from its root.
///
/// # Errors
/// When the kernel does not let us switch; `work` was not run then.
pub fn with_file_rights_in<T: Send>(
    world: &File,
    uid: u32,
    gid: u32,
    groups: &[u32],
    work: impl FnOnce() -> T + Send,
) -> io::Result<T> {
    let here = std::fs::metadata("/proc/self/ns/mnt")?;
    let there = world.metadata()?;
    // Entering the namespace that we are in would lose our root folder if it was changed (chroot).
    let elsewhere = (here.dev(), here.ino()) != (there.dev(), there.ino());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, move || {
            if elsewhere {
                // The kernel refuses a thread that shares its working directory with others.
                unshare(CloneFlags::CLONE_FS)?;
                setns(world, CloneFlags::CLONE_NEWNS)?;
            }
            switch(uid, gid, groups)?;
            Ok(work())
        })?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `work` in a thread whose effective ids and groups are the user's. The real and saved ones stay root's, so that the user
/// cannot signal the thread, and with it this process (kill(2)).
///
/// # Errors
/// When the kernel does not let us switch; `work` was not run then.
pub fn with_effective_ids<T: Send>(
    uid: u32,
    gid: u32,
    groups: &[u32],
    work: impl FnOnce() -> T + Send,
) -> io::Result<T> {
    let groups: Vec<_> = groups.iter().map(|group| Gid::from_raw_unchecked(*group)).collect();
    let (uid, gid) = (Uid::from_raw_unchecked(uid), Gid::from_raw_unchecked(gid));
    // -1 changes nothing.
    let (same_user, same_group) = (Uid::from_raw_unchecked(u32::MAX), Gid::from_raw_unchecked(u32::MAX));
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            set_thread_groups(&groups)?;
            set_thread_res_gid(same_group, gid, same_group)?;
            set_thread_res_uid(same_user, uid, same_user)?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Metadata of the file at this path, if this thread may open it with `access` (bits of a permission triple). Nothing
/// is opened, because opening a device or a FIFO can have effects or block.
///
/// # Errors
/// When nothing exists there, the path cannot be followed, or the access is not allowed.
pub fn reach(path: &Path, access: u32) -> io::Result<FileStat> {
    let found = OwnedFd::from(regular::find(path, Links::Refuse)?);
    if access != 0 {
        // R_OK, W_OK and X_OK are the bits of a permission triple.
        let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
        // SAFETY: an open descriptor, an empty C string, and numbers. The C library's function may check with the real
        // user id; the system call (Linux 5.8) with AT_EACCESS checks as a file access does.
        let answer = unsafe { libc::syscall(libc::SYS_faccessat2, found.as_raw_fd(), c"".as_ptr(), access, flags) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(fstat(&found)?)
}

/// Leaves the session keyring, which setuid(2) and execve(2) keep: the keys in it are those of this process. Some
/// sandboxes do not allow the call: then nobody in them can use keys.
pub(super) fn leave_keyring() {
    /// `KEYCTL_JOIN_SESSION_KEYRING`; without a name it is a new one.
    const JOIN: libc::c_long = 1;
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_keyctl, JOIN, 0) };
}

/// Takes all supplementary groups from this thread.
pub(super) fn leave_groups() -> rustix::io::Result<()> {
    set_thread_groups(&[])
}

/// Makes this thread that user, with this group and no other one, and without capabilities if it is not root. With raw
/// system calls: the C library's functions would signal other threads of the process (nptl(7)), which a forked copy does not
/// have.
pub(super) fn become_user(user: u32, group: u32) -> rustix::io::Result<()> {
    let (user, group) = (Uid::from_raw_unchecked(user), Gid::from_raw_unchecked(group));
    leave_groups()?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    if user.is_root() {
        return Ok(());
    }
    // The change of user drops them, unless the securebits say otherwise (SECBIT_NO_SETUID_FIXUP). The ambient ones go with the
    // inheritable ones.
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
}

/// A user's file rights, and our own to return to, for a forked copy, which may not allocate.
#[derive(Debug)]
pub(super) struct FileUser {
    uid: u32,
    gid: u32,
    groups: Vec<Gid>,
    ours: Vec<Gid>,
}

impl FileUser {
    /// # Errors
    /// When our groups cannot be read.
    pub(super) fn new(uid: u32, gid: u32, groups: &[u32]) -> io::Result<FileUser> {
        let known = |group: u32| Gid::from_raw_unchecked(group);
        let ours = nix::unistd::getgroups()?.into_iter().map(|group| known(group.as_raw())).collect();
        Ok(FileUser { uid, gid, groups: groups.iter().copied().map(known).collect(), ours })
    }

    /// Changes to the folder with the rights of the user, and takes our own again.
    pub(super) fn chdir(&self, directory: &std::ffi::CStr) -> io::Result<()> {
        let ours = capabilities(None)?;
        set_thread_groups(&self.groups)?;
        let changed = self.chdir_as_user(directory);
        // First: the others need them.
        set_capabilities(None, ours)?;
        setfsuid(nix::unistd::geteuid());
        setfsgid(nix::unistd::getegid());
        set_thread_groups(&self.ours)?;
        // A change of the file-system user id changes the effective ones (capabilities(7)).
        set_capabilities(None, ours)?;
        changed
    }

    fn chdir_as_user(&self, directory: &std::ffi::CStr) -> io::Result<()> {
        become_file_user(self.uid, self.gid)?;
        // A magic link could lead to what this process has from its parent (`/proc/self/cwd`).
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_NO_MAGICLINKS);
        match openat2(AT_FDCWD, directory, how) {
            // Linux before 5.6 has no openat2(2), and some sandboxes do not allow it.
            Err(Errno::ENOSYS | Errno::EPERM) => Ok(nix::unistd::chdir(directory)?),
            found => Ok(nix::unistd::fchdir(found?)?),
        }
    }
}

fn switch(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    let groups: Vec<_> = groups.iter().map(|group| Gid::from_raw_unchecked(*group)).collect();
    set_thread_groups(&groups)?;
    become_file_user(uid, gid)
}

/// Takes the file-system ids of the user, and gives up root's rights over files.
fn become_file_user(uid: u32, gid: u32) -> io::Result<()> {
    // These two calls return the previous id and never an error: a second call shows whether the first took effect.
    let (gid, uid) = (nix::unistd::Gid::from_raw(gid), nix::unistd::Uid::from_raw(uid));
    setfsgid(gid);
    let group = setfsgid(gid);
    setfsuid(uid);
    if group != gid || setfsuid(uid) != uid {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    // The kernel drops root's rights over files with the id, unless the securebits say otherwise
    // (SECBIT_NO_SETUID_FIXUP, which container runtimes may set).
    give_up_capabilities()
}

/// Empties this thread's effective set; the permitted set has no effect by itself.
fn give_up_capabilities() -> io::Result<()> {
    Ok(set_capabilities(None, CapabilitySets { effective: CapabilitySet::empty(), ..capabilities(None)? })?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name_or_number() {
        if !rekindle_testing::root() {
            return;
        }
        let own = || setfsuid(nix::unistd::Uid::from_raw(u32::MAX)).as_raw();
        let nobody = User::from_name("nobody").unwrap().unwrap().uid.as_raw();
        assert_eq!(with_file_rights_of("nobody", own).unwrap(), nobody);
        assert_eq!(with_file_rights_of(&nobody.to_string(), own).unwrap(), nobody);
        assert!(with_file_rights_of("no such user", own).is_err());
        assert_eq!(own(), 0);
    }

    #[test]
    fn root_loses_its_rights_to_others_files_and_only_in_there() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "root's").unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let seen = with_file_rights(65534, 65534, &[65534], || std::fs::read(&path).map_err(|e| e.kind())).unwrap();
        assert_eq!(seen, Err(io::ErrorKind::PermissionDenied));
        assert_eq!(std::fs::read(&path).unwrap(), b"root's");
    }

    #[test]
    fn the_way_to_a_file_counts() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let mode = |path: &Path, mode| {
            std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode)).unwrap();
        };
        let path = dir.path().join("data");
        std::fs::write(&path, "for all").unwrap();
        mode(&path, 0o644);
        let world = File::open("/proc/self/ns/mnt").unwrap();
        let reaches = |access| {
            let reach = || reach(&path, access).map(|found| found.st_ino).map_err(|error| error.kind());
            with_file_rights_in(&world, 65534, 65534, &[65534], reach).unwrap()
        };
        let inode = std::fs::metadata(&path).unwrap().ino();
        mode(dir.path(), 0o700);
        assert_eq!([reaches(4), reaches(0)], [Err(io::ErrorKind::PermissionDenied); 2]);
        mode(dir.path(), 0o711);
        assert_eq!([reaches(4), reaches(0)], [Ok(inode); 2]);
        assert_eq!([reaches(2), reaches(6), reaches(1)], [Err(io::ErrorKind::PermissionDenied); 3]);
        mode(&path, 0o666);
        assert_eq!(reaches(6), Ok(inode));
        std::fs::rename(&path, dir.path().join("other")).unwrap();
        std::os::unix::fs::symlink("other", &path).unwrap();
        assert_ne!(reaches(0), Ok(inode), "a link is not what it leads to");
    }
}

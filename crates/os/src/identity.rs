//! File access with another user's rights.
#![allow(unsafe_code, reason = "calls of the kernel and the C library; each block says why it is sound")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::{OFlag, open};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::{FileStat, Mode, fstat};
use nix::unistd::{Gid, User, getgrouplist};

/// Runs `work` in a thread whose file access is that of the user: its ids and groups, and none of root's rights to pass
/// over permissions (the kernel drops those with the file-system user id). Other threads are not touched, as these are
/// properties of a thread for the kernel; the C library's functions would change all threads.
///
/// # Errors
/// When the kernel does not let us switch; `work` was not run then.
pub fn with_file_rights<T: Send>(uid: u32, gid: u32, groups: &[u32], work: impl FnOnce() -> T + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            switch(uid, gid, groups)?;
            Ok(work())
        });
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
    let groups: Vec<u32> = getgrouplist(&name, found.gid)?.into_iter().map(Gid::as_raw).collect();
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
    // To enter the namespace that we are in would lose a root folder that we were given (chroot).
    let elsewhere = (here.dev(), here.ino()) != (there.dev(), there.ino());
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            if elsewhere {
                // The kernel does not let a thread in that has its working directory in common with others.
                unshare(CloneFlags::CLONE_FS)?;
                setns(world, CloneFlags::CLONE_NEWNS)?;
            }
            switch(uid, gid, groups)?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// What is at this path, if this thread may open it so; `access` are bits of a permission triple. Nothing is opened for
/// that: to open a device or a FIFO can do or wait for something.
///
/// # Errors
/// When nothing is there, when the way is closed, or when the access is not allowed.
pub fn reach(path: &Path, access: u32) -> io::Result<FileStat> {
    let found: OwnedFd = open(path, OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC, Mode::empty())?;
    if access != 0 {
        // R_OK, W_OK and X_OK are the bits of a permission triple.
        let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
        // SAFETY: a descriptor that is open, an empty C string, and numbers. The C library's function may go by the real
        // user id; the system call (Linux 5.8) with AT_EACCESS goes by what a file access goes by.
        let answer = unsafe { libc::syscall(libc::SYS_faccessat2, found.as_raw_fd(), c"".as_ptr(), access, flags) };
        if answer != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(fstat(&found)?)
}

fn switch(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    // SAFETY: the list is valid for its length. The raw call changes this thread only.
    if unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // These two answer the id before and have no error: a second call tells whether the first was obeyed.
    // SAFETY: a system call on a number.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) };
    // SAFETY: as above.
    let group = unsafe { libc::syscall(libc::SYS_setfsgid, gid) };
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
    // SAFETY: as above.
    let user = unsafe { libc::syscall(libc::SYS_setfsuid, uid) };
    if group != i64::from(gid) || user != i64::from(uid) {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    // The kernel drops root's rights over files with the id only where the securebits do not say otherwise
    // (SECBIT_NO_SETUID_FIXUP, as container runtimes may set it).
    give_up_capabilities()
}

/// Empties this thread's effective set; the permitted one does nothing by itself.
fn give_up_capabilities() -> io::Result<()> {
    // struct __user_cap_header_struct: version 3, this thread. Data: effective, permitted, inheritable; two words each.
    let mut header: [u32; 2] = [0x2008_0522, 0];
    let mut data = [0u32; 6];
    // SAFETY: header and data are what version 3 wants; the kernel fills the data.
    if unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), data.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    (data[0], data[3]) = (0, 0);
    // SAFETY: as above; the kernel reads the data.
    if unsafe { libc::syscall(libc::SYS_capset, header.as_mut_ptr(), data.as_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name_or_number() {
        if !rekindle_testing::root() {
            return;
        }
        // SAFETY: these two calls touch no memory.
        let own = || unsafe { libc::syscall(libc::SYS_setfsuid, u32::MAX) };
        let nobody = i64::from(User::from_name("nobody").unwrap().unwrap().uid.as_raw());
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

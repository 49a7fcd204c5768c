//! Touching files with another user's rights.

use std::io;

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
        if !crate::test_gate::root() {
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
        if !crate::test_gate::root() {
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
}

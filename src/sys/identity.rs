//! Touching files with another user's rights.

use std::io;

/// Runs `work` in a thread whose file access is that of the user: its ids and groups, and none of root's rights to pass
/// over permissions (the kernel drops those with the file-system user id). Other threads are not touched, as these are
/// properties of a thread for the kernel; the C library's functions would change all threads.
///
/// # Errors
/// When the kernel does not let us switch; `work` was not run then.
pub fn with_file_rights<T: Send>(
    uid: u32,
    gid: u32,
    groups: &[u32],
    work: impl FnOnce() -> T + Send,
) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(move || {
            switch(uid, gid, groups)?;
            Ok(work())
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
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
    if group == i64::from(gid) && user == i64::from(uid) {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::PermissionDenied))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_loses_its_rights_to_others_files_and_only_in_there() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIP: needs root");
            assert!(!std::env::var("REKINDLE_TEST_REQUIRE").unwrap_or_default().contains("root"));
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("secret");
        std::fs::write(&path, "root's").unwrap();
        let seen = with_file_rights(65534, 65534, &[65534], || std::fs::read(&path).map_err(|e| e.kind())).unwrap();
        assert_eq!(seen, Err(io::ErrorKind::PermissionDenied));
        assert_eq!(std::fs::read(&path).unwrap(), b"root's");
    }
}

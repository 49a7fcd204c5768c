//! Attacks of a job on its table, which it can write to.
#![allow(unsafe_code, reason = "memory that is shared with the job; each block says why it is sound")]

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::AtomicU32;

use super::table::{MULTICAST, UNTRACKED};
use super::*;

/// A memfd of this process, mapped.
struct Mapped(File, *mut libc::c_void, usize);

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `mapped`, and borrowed by nobody.
        unsafe { libc::munmap(self.1, self.2) };
    }
}

fn mapped(name: &str, size: usize, seals: i32) -> Mapped {
    let name = CString::new(name).unwrap();
    // SAFETY: a string that ends with NUL.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    // SAFETY: just made.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(size as u64).unwrap();
    // SAFETY: a system call on numbers.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, flags, file.as_raw_fd(), 0) };
    assert_ne!(at, libc::MAP_FAILED);
    Mapped(file, at, size)
}

const SEALS: i32 = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW;

/// One test, because a process has only one table.
#[test]
fn a_table_is_believed_in_nothing() {
    // For /proc/PID/map_files.
    if !rekindle_testing::root() {
        return;
    }
    let pid = std::process::id().cast_signed();
    let name = table::NAME.to_str().unwrap();
    let size = size_of::<table::Table>();
    assert!(Sharing::of(pid).unwrap().is_none() && Sharing::of(i32::MAX).unwrap().is_none());
    let unread = rekindle_testing::threads::without_descriptors(|| Sharing::of(pid).map(drop));
    assert_eq!(unread.unwrap_err().raw_os_error(), Some(libc::EMFILE), "it may have one");
    for (name, size, seals, why) in [
        ("rekindle-sharing-999", size, SEALS, "another version of rekindle"),
        (name, 4096, SEALS, "another size"),
        (name, size, 0, "not sealed"),
    ] {
        let _table = mapped(name, size, seals);
        let error = Sharing::of(pid).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }

    let mut file = mapped(name, size, SEALS);
    assert!(Sharing::of(pid).unwrap().is_none(), "not filled in yet");
    // All words have the same value, which is no valid thread id.
    for word in [0x100_0000_u32, 0x7fff_ffff, 0x8000_0000, u32::MAX] {
        std::io::Seek::rewind(&mut file.0).unwrap();
        file.0.write_all(&word.to_ne_bytes().repeat(size / 4)).unwrap();
        let all = [Sharing::of(pid).unwrap().unwrap(), Sharing::of(pid).unwrap().unwrap()];
        assert!(is_any(&all, Own::IsCopied) && is_let_go(&all));
        assert!(all.iter().all(|one| one.imports().count() <= table::MOST && one.exports().count() <= table::MOST));
        assert!(check(&all).is_err() || word & (MULTICAST | UNTRACKED) == 0, "{word:x}");
        all[0].table().obstacles.store(0, Relaxed);
        let _ = check(&all);
        all[0].table().foreign.store(0, Relaxed);
        let _ = check(&all);
        // The keeper that it names is not a thread of this process.
        assert!(take_again(&all, &[]).is_err() && let_go(&all, Own::Stays, &mut Vec::new()).is_err());
    }

    // Counts that are too large in an otherwise correct table.
    std::io::Seek::rewind(&mut file.0).unwrap();
    file.0.write_all(&vec![0; size]).unwrap();
    let all = {
        let first: &AtomicU32 = {
            // SAFETY: mapped, and aligned to a page.
            unsafe { &*file.1.cast::<AtomicU32>() }
        };
        first.store(7, Relaxed);
        [Sharing::of(pid).unwrap().unwrap()]
    };
    let table = all[0].table();
    for used in [&table.exports_used, &table.imports_used, &table.mappings_used] {
        used.store(u32::MAX, Relaxed);
    }
    assert!(check(&all).is_ok() && !is_any(&all, Own::IsCopied) && !is_let_go(&all));
    // The keeper has time for all that there may be, and no more.
    assert_eq!(session::patience(&all[0]).as_millis(), 5000 + 3 * 2 * table::MOST as u128);
    table.foreign.store(1, Relaxed);
    table.under_way.store(0, Relaxed);
    assert!(matches!(check(&all), Err(Error::Unmanaged { pid: 7, why: Obstacle::Unseen(1) })));
    table.under_way.store(1, Relaxed);
    check(&all).unwrap();
    assert!(is_any(&all, Own::IsCopied), "a call in progress frees it");
    assert!(let_go(&all, Own::IsCopied, &mut Vec::new()).unwrap_err().is_busy());
    let began = Instant::now();
    let_calls_end(all.iter());
    assert!(began.elapsed() >= CALLS_END, "it is in progress");
    table.under_way.store(0, Relaxed);
    room_is_made_for_what_takes_it_again(&all);
    // An import of its own export, without a keeper.
    table.imports[0].is_live.store(1, Relaxed);
    assert!(matches!(check(&all), Err(Error::Unmanaged { why: Obstacle::NoExporter, .. })));
    table.imports[0].pid.store(7, Relaxed);
    table.exports[0].handle.store(1, Relaxed);
    assert!(matches!(check(&all), Err(Error::Unmanaged { why: Obstacle::NoKeeper, .. })));
    table.under_way.store(1, Relaxed);
    assert!(check(&all).is_ok(), "the call that starts it is in progress");
    assert!(let_go(&all, Own::Stays, &mut Vec::new()).unwrap_err().is_busy());
    table.under_way.store(0, Relaxed);
    // What the driver would not restore is named.
    for (kind, words) in [(table::SPARSE, "CUDA_ARRAY3D_SPARSE"), (table::EXPORTED_HOST, "NCCL_CUMEM_HOST_ENABLE=0")] {
        table.unrestorable[kind].store(2, Relaxed);
        let why = check(&all).unwrap_err().to_string();
        assert!(why.starts_with("process 7 has ") && why.contains(words), "{why}");
        table.unrestorable[kind].store(0, Relaxed);
    }
    // Host memory alone is reason enough, and has time.
    table.imports[0].kept.store(table::HOST, Relaxed);
    table.imports[0].size.store(3_000_000_000, Relaxed);
    assert!(is_any(&all, Own::IsCopied) && all[0].host_bytes() == Some(3_000_000_000) && all[0].kept_bytes() == 0);
    assert_eq!(session::patience(&all[0]).as_millis(), 8000 + 3 * 2 * table::MOST as u128);
    assert!(matches!(check(&all), Err(Error::Unmanaged { why: Obstacle::NoKeeper, .. })));
    // It learns of a lock, even if another process cannot.
    assert!(matches!(check_announced(&all), Err(Error::Busy { pid: 7, .. })));
    assert!(announce(&[i32::MAX, pid], true).is_empty());
    check_announced(&all).unwrap();
    assert!(announce(&[i32::MAX, pid], false).is_empty());
    assert!(check_announced(&all).unwrap_err().is_busy());
}

/// With room for the memory only, a session for each process could fail for lack of descriptors.
fn room_is_made_for_what_takes_it_again(all: &[Sharing]) {
    use nix::sys::resource::{Resource, getrlimit, setrlimit};
    let (before, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, 300.min(hard), hard).unwrap();
    let room = room(all).unwrap();
    let raised = getrlimit(Resource::RLIMIT_NOFILE).unwrap().0;
    drop(room);
    setrlimit(Resource::RLIMIT_NOFILE, before, hard).unwrap();
    assert!(raised > (exits::MOST_WATCHED + FOR_A_SESSION) as u64 + 64, "{raised}");
}

/// Marks the process of this test that may die.
const RACES: &str = "REKINDLE_TEST_TABLE_RACE";

/// A job cuts its table and then seals it while we check its size and its seals: the mapping would be longer than the
/// file, and an access a SIGBUS. This ends a process, so another one tries it.
#[test]
fn a_table_that_is_cut_while_it_is_looked_at_ends_nobody() {
    if std::env::var_os(RACES).is_some() {
        return race();
    }
    let name = "sharing::tests::a_table_that_is_cut_while_it_is_looked_at_ends_nobody";
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let ended = command.args(["--exact", name, "--nocapture"]).env(RACES, "1").status().unwrap();
    assert!(ended.success(), "whoever reads tables {ended}");
}

fn race() {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::SeqCst;
    use std::time::{Duration, Instant};

    let (deadline, size) = (Instant::now() + Duration::from_secs(3), size_of::<table::Table>());
    let mut mapped = 0;
    for round in 0_usize.. {
        if Instant::now() > deadline {
            break;
        }
        // SAFETY: a string that ends with NUL.
        let fd = unsafe { libc::memfd_create(table::NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
        // SAFETY: just made.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(size as u64).unwrap();
        let begun = AtomicUsize::new(0);
        let meet = |turns: usize| {
            begun.fetch_add(1, SeqCst);
            while begun.load(SeqCst) < 2 {
                std::hint::spin_loop();
            }
            (0..turns).for_each(|_| std::hint::spin_loop());
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                meet(round % 64);
                file.set_len(0).unwrap();
                // SAFETY: a system call on numbers.
                assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK) }, 0);
            });
            meet(round / 64 % 64);
            if let Ok(sharing) = Sharing::mapped(0, &file) {
                mapped += sharing.inner() + 1;
            }
        });
    }
    assert_eq!(mapped, 0, "a table that nobody sealed whole was taken");
}

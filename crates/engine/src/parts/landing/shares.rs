//! How many processes share the CPUs while device memory is copied.
//!
//! Each interposer copies on half of the CPUs of its process. With several processes at once there would be several
//! threads for each CPU. So the supervisor tells the number of processes beside each landing file: a symbolic link
//! `NAME.shares` whose target is the number. The job's user can read a link, whatever the mode of the folder, and
//! cannot change it.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Smaller mappings of the driver do not go to a landing file (`native/preload/src/landing.rs`).
const LARGE: u64 = 4 << 20;

/// The number for a process: with it, those that copy on any of its CPUs. Each is its bytes of device memory, and its
/// CPUs as in /proc/PID/status; a process whose CPUs are unknown may use all of them.
pub(super) fn of(own: &(u64, Option<String>), all: &[(u64, Option<String>)]) -> usize {
    let copies_there = |(bytes, cpus): &&(u64, Option<String>)| *bytes >= LARGE && overlap(&own.1, cpus);
    all.iter().filter(copies_there).count().max(1)
}

/// Whether two masks have a CPU in common: words of 32 bits in hexadecimal, the highest first.
fn overlap(a: &Option<String>, b: &Option<String>) -> bool {
    let (Some(a), Some(b)) = (a, b) else { return true };
    let words = |mask: &str| -> Option<Vec<u32>> {
        mask.rsplit(',').map(|word| u32::from_str_radix(word.trim(), 16).ok()).collect()
    };
    let (Some(a), Some(b)) = (words(a), words(b)) else { return true };
    a.iter().zip(&b).any(|(a, b)| a & b != 0)
}

fn path(landing: &Path) -> PathBuf {
    let mut path = landing.as_os_str().to_os_string();
    path.push(".shares");
    path.into()
}

/// Tells the number to the process that finds this landing file.
pub(super) fn tell(landing: &Path, shares: usize) -> io::Result<()> {
    forget(landing);
    symlink(shares.to_string(), path(landing))
}

pub(super) fn forget(landing: &Path) {
    let _ = fs::remove_file(path(landing));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_on_the_same_cpus_share_them() {
        let rank = |cpus: &str| (1 << 30, Some(cpus.to_string()));
        let anywhere = vec![rank("ffffffff,ffffffff"); 4];
        assert_eq!(of(&anywhere[0], &anywhere), 4);
        let bound = [rank("00000000,0000ffff"), rank("00000000,ffff0000"), rank("0000ffff,00000000")];
        assert_eq!(bound.each_ref().map(|one| of(one, &bound)), [1; 3]);
        let some = [rank("00000000,000000ff"), rank("00000000,0000ff80"), rank("00000000,0000ff00")];
        assert_eq!(some.each_ref().map(|one| of(one, &some)), [2, 3, 2]);
        // A monitor has no device memory to copy.
        let with_monitor = [rank("f"), (0, Some("f".into())), rank("f")];
        assert_eq!(with_monitor.each_ref().map(|one| of(one, &with_monitor)), [2; 3]);
        assert_eq!(of(&(0, None), &[(0, None)]), 1);
        let unknown = [rank("0f"), (1 << 30, None), (1 << 30, Some("?".into()))];
        assert_eq!(unknown.each_ref().map(|one| of(one, &unknown)), [3; 3]);
    }

    #[test]
    fn the_number_is_beside_the_file_and_goes_with_it() {
        let dir = tempfile::tempdir().unwrap();
        let landing = dir.path().join("1001");
        tell(&landing, 3).unwrap();
        tell(&landing, 4).unwrap();
        assert_eq!(fs::read_link(dir.path().join("1001.shares")).unwrap(), Path::new("4"));
        forget(&landing);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}

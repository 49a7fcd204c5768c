//! Leases on files (fcntl(2), `F_SETLEASE`).

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// A lease of a process on a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lease {
    /// The holder.
    pub pid: i32,
    /// What it is.
    pub kind: Kind,
    inode: u64,
}

/// What a lease is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It is broken by whoever opens the file to write.
    Read,
    /// Any open(2) of its file breaks it, and the holder gets a signal, SIGIO, that ends most programs.
    Write,
    /// Somebody opened the file, and the holder has got the signal and not answered it yet.
    Breaking,
}

impl Lease {
    /// All present leases, from /proc/locks.
    #[must_use]
    pub fn all() -> Vec<Lease> {
        parse(&fs::read_to_string("/proc/locks").unwrap_or_default())
    }

    /// Whether it can be on the file with this inode number; the device is not compared.
    #[must_use]
    pub fn is_on(&self, inode: u64) -> bool {
        self.inode == inode
    }

    /// The leased file; `None` if the holder has closed it since.
    #[must_use]
    pub fn path(&self) -> Option<PathBuf> {
        // On btrfs, the device in /proc/locks differs from that of stat(2).
        let is_it = |metadata: &fs::Metadata| metadata.ino() == self.inode && metadata.is_file();
        let mut entries = fs::read_dir(format!("/proc/{}/fd", self.pid)).ok()?.flatten();
        let entry = entries.find(|entry| fs::metadata(entry.path()).is_ok_and(|metadata| is_it(&metadata)))?;
        fs::read_link(entry.path()).ok()
    }
}

fn parse(locks: &str) -> Vec<Lease> {
    // "8: LEASE  ACTIVE    WRITE 3002 fe:00:740782 0 EOF". Of a lease that is being broken the third word is what it is to
    // become.
    let of = |line: &str| {
        let fields: Vec<&str> = line.split_ascii_whitespace().collect();
        let [_, "LEASE", state, access, pid, file, ..] = fields[..] else { return None };
        let kind = match (state, access) {
            ("BREAKING", _) => Kind::Breaking,
            (_, "WRITE") => Kind::Write,
            _ => Kind::Read,
        };
        Some(Lease { pid: pid.parse().ok()?, kind, inode: file.rsplit(':').next()?.parse().ok()? })
    };
    locks.lines().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_locks_and_lines_that_say_nothing_are_left_out() {
        let locks = "1: POSIX  ADVISORY  READ 3176 fe:00:740693 128 128\n2: LEASE  ACTIVE    WRITE 12 fe:00:7 0 EOF\n\
                     3: LEASE  BREAKING  READ 1 00:1b:8 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 1 fe:00:9 0 EOF\n\n4: LEASE\n";
        let lease = |pid, kind, inode| Lease { pid, kind, inode };
        assert_eq!(parse(locks), [lease(12, Kind::Write, 7), lease(1, Kind::Breaking, 8)]);
    }
}

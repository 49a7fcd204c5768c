//! Estimates, while the job runs, which pages CRIU will write, and how many.

use std::fmt;

use rekindle_os::process;

/// Whose pages are in a pages file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// A process, by its pid in its innermost namespace.
    Process(i32),
    /// Memory that processes share without a file that has a name (anonymous, memfd, System V), by its inode.
    Shared(u64),
}

/// As CRIU names the page map, `pagemap-1000.img` or `pagemap-shmem-51973.img`, and we the file in the spool.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Process(pid) => write!(f, "{pid}"),
            Source::Shared(inode) => write!(f, "shmem-{inode}"),
        }
    }
}

/// A pages file to make memory ready for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// Whose pages.
    pub source: Source,
    /// How many bytes are likely.
    pub bytes: u64,
}

/// What a dump of these processes would write, as far as /proc tells; pids as we see them. One that has ended is left out.
#[must_use]
pub fn expect(tree: &[i32]) -> Vec<Expected> {
    let mut all: Vec<Expected> = Vec::new();
    for pid in tree {
        let Some(inner) = process::inner_pid(*pid) else { continue };
        let memory = process::memory(*pid);
        all.push(Expected { source: Source::Process(inner), bytes: memory.anonymous });
        // CRIU writes only pages that are there, and a mapping can be far larger.
        let mut left = memory.shared;
        for (inode, bytes) in shared(&std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default()) {
            let source = Source::Shared(inode);
            let bytes = bytes.min(left);
            match all.iter_mut().find(|known| known.source == source) {
                Some(known) => known.bytes = known.bytes.max(bytes),
                None => all.push(Expected { source, bytes }),
            }
            left -= bytes;
        }
    }
    all
}

/// Inode and mapped bytes of shared memory that has no name in a file system.
fn shared(maps: &str) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    for line in maps.lines() {
        let mut fields = line.split_whitespace();
        let (range, access) = (fields.next().unwrap_or_default(), fields.next().unwrap_or_default());
        let inode = fields.nth(2).and_then(|inode| inode.parse().ok());
        let name = fields.next().unwrap_or_default();
        let nameless = ["/dev/zero", "/memfd:", "/SYSV"].iter().any(|start| name.starts_with(start));
        let bytes = range
            .split_once('-')
            .and_then(|(from, to)| u64::from_str_radix(to, 16).ok()?.checked_sub(u64::from_str_radix(from, 16).ok()?));
        let (true, true, Some(inode), Some(bytes)) = (access.ends_with('s'), nameless, inode, bytes) else { continue };
        match all.iter_mut().find(|(known, _)| *known == inode) {
            Some((_, sum)) => *sum += bytes,
            None => all.push((inode, bytes)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_without_a_name_is_found() {
        let maps = "\
7f86f4000000-7f86f4400000 rw-p 00000000 00:00 0 
7f86f5000000-7f86f5400000 rw-s 00000000 00:01 51973                      /dev/zero (deleted)
7f86f5400000-7f86f5500000 rw-s 00400000 00:01 51973                      /dev/zero (deleted)
7f86f585e000-7f86f595e000 r--s 00000000 00:01 51974                      /memfd:mm (deleted)
7f86f5960000-7f86f5970000 rw-p 00000000 00:01 51975                      /memfd:copied (deleted)
7f86f5980000-7f86f5990000 rw-s 00000000 fe:00 1234                       /dev/shm/named
";
        assert_eq!(shared(maps), [(51973, 5 << 20), (51974, 1 << 20)]);
        assert!(shared("nonsense\n7f-zz rw-s 0 0 1 /SYSV0").is_empty());
    }

    #[test]
    fn this_process_is_expected_to_be_written() {
        let own = std::process::id().cast_signed();
        let all = expect(&[own, i32::MAX]);
        assert_eq!(all[0].source, Source::Process(own));
        assert!(all[0].bytes > 64 << 10);
    }
}

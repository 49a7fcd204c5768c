//! Estimates, while the job runs, which pages CRIU will write, and how many.

use std::fmt;

use rekindle_os::{maps, process};

/// The owner of the pages in a pages file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    /// A process, by its pid in its innermost namespace.
    Process(i32),
    /// Memory that processes share without a file that has a name (anonymous, memfd, System V), by its inode.
    Shared(u64),
}

/// The name of CRIU's page map, `pagemap-1000.img` or `pagemap-shmem-51973.img`, and of our file in the spool.
impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Process(pid) => write!(f, "{pid}"),
            Source::Shared(inode) => write!(f, "shmem-{inode}"),
        }
    }
}

/// A pages file for which memory is prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expected {
    /// The owner of the pages.
    pub(crate) source: Source,
    /// The likely size.
    pub(crate) bytes: u64,
}

/// What a dump of these processes would write, as far as /proc tells; pids as we see them. Processes that have ended
/// are left out.
#[must_use]
pub(crate) fn expect(tree: &[i32]) -> Vec<Expected> {
    let mut all: Vec<Expected> = Vec::new();
    for pid in tree {
        let Some(inner) = process::inner_pid(*pid) else { continue };
        let memory = process::memory(*pid);
        all.push(Expected { source: Source::Process(inner), bytes: memory.anonymous });
        // CRIU writes only present pages, and a mapping can be far larger.
        let mut left = memory.shared;
        for (inode, bytes) in shared(&maps::read(*pid).unwrap_or_default()) {
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
fn shared(maps: &[u8]) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    let is_nameless =
        |name: &[u8]| [&b"/dev/zero"[..], b"/memfd:", b"/SYSV"].iter().any(|start| name.starts_with(start));
    for mapping in maps::mappings(maps).filter(|mapping| mapping.is_shared() && is_nameless(mapping.name)) {
        let bytes = mapping.end.saturating_sub(mapping.start);
        match all.iter_mut().find(|(known, _)| *known == mapping.inode) {
            Some((_, sum)) => *sum += bytes,
            None => all.push((mapping.inode, bytes)),
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_memory_without_a_name_is_found() {
        let maps = b"\
7f86f4000000-7f86f4400000 rw-p 00000000 00:00 0 
7f86f5000000-7f86f5400000 rw-s 00000000 00:01 51973                      /dev/zero (deleted)
7f86f5400000-7f86f5500000 rw-s 00400000 00:01 51973                      /dev/zero (deleted)
7f86f585e000-7f86f595e000 r--s 00000000 00:01 51974                      /memfd:mm (deleted)
7f86f5960000-7f86f5970000 rw-p 00000000 00:01 51975                      /memfd:copied (deleted)
7f86f5980000-7f86f5990000 rw-s 00000000 fe:00 1234                       /dev/shm/named
";
        assert_eq!(shared(maps), [(51973, 5 << 20), (51974, 1 << 20)]);
        assert!(shared(b"nonsense\n7f-zz rw-s 0 0 1 /SYSV0").is_empty());
    }

    #[test]
    fn this_process_is_expected_to_be_written() {
        let own = std::process::id().cast_signed();
        let all = expect(&[own, i32::MAX]);
        assert_eq!(all[0].source, Source::Process(own));
        assert!(all[0].bytes > 64 << 10);
    }
}

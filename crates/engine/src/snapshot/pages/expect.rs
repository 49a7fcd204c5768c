//! Estimates, while the job runs, which pages CRIU will write, and how many.

use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;

use rekindle_os::maps;
use rekindle_os::process::{self, Memory};

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
        let (memory, maps) = (process::memory(*pid), maps::read(*pid).unwrap_or_default());
        // CRIU writes only present pages, and a mapping can be far larger.
        let (own, mut left) = own_and_shared(memory, &maps);
        all.push(Expected { source: Source::Process(inner), bytes: own });
        for (inode, bytes) in shared(&maps) {
            let bytes = bytes.min(left);
            add_shared(&mut all, inode, bytes);
            left -= bytes;
        }
        for (inode, bytes) in memfds(*pid) {
            add_shared(&mut all, inode, bytes);
        }
    }
    // All are in the same namespace. Segments that are attached are mapped.
    let segments = tree.first().and_then(|pid| process::detached_segments(*pid).ok()).unwrap_or_default();
    segments.into_iter().for_each(|(id, bytes)| add_shared(&mut all, id, bytes));
    all
}

/// Several processes can have the same memory, each a part of it.
fn add_shared(all: &mut Vec<Expected>, inode: u64, bytes: u64) {
    let source = Source::Shared(inode);
    match all.iter_mut().find(|known| known.source == source) {
        Some(known) => known.bytes = known.bytes.max(bytes),
        None => all.push(Expected { source, bytes }),
    }
}

/// Inode and bytes of each memfd that the process has open: it need not have mapped them.
fn memfds(pid: i32) -> impl Iterator<Item = (u64, u64)> {
    let open = process::descriptors(pid).filter(|(_, target)| target.as_os_str().as_bytes().starts_with(b"/memfd:"));
    let metadata = open.filter_map(move |(number, _)| std::fs::metadata(format!("/proc/{pid}/fd/{number}")).ok());
    metadata.map(|metadata| (metadata.ino(), metadata.blocks() * 512))
}

/// How the kernel calls anonymous memory of huge pages.
const HUGE: &[u8] = b"/anon_hugepage";

/// Bytes of the process's own pages, and of those that it may share with others: the kernel counts huge pages of both kinds
/// together.
fn own_and_shared(memory: Memory, maps: &[u8]) -> (u64, u64) {
    let huge = maps::mappings(maps).filter(|mapping| !mapping.is_shared() && mapping.name.starts_with(HUGE));
    let mapped: u64 = huge.map(|mapping| mapping.end.saturating_sub(mapping.start)).sum();
    let own = mapped.min(memory.huge);
    (memory.anonymous + own, memory.shared + (memory.huge - own))
}

/// Inode and mapped bytes of shared memory that has no name in a file system.
fn shared(maps: &[u8]) -> Vec<(u64, u64)> {
    let mut all: Vec<(u64, u64)> = Vec::new();
    let is_nameless =
        |name: &[u8]| [&b"/dev/zero"[..], b"/memfd:", b"/SYSV", HUGE].iter().any(|start| name.starts_with(start));
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
7f86f6000000-7f86f6400000 rw-s 00000000 00:10 51976                      /anon_hugepage (deleted)
7f86f6400000-7f86f6a00000 rw-p 00000000 00:10 51977                      /anon_hugepage (deleted)
";
        assert_eq!(shared(maps), [(51973, 5 << 20), (51974, 1 << 20), (51976, 4 << 20)]);
        let memory = Memory { anonymous: 1, shared: 2, huge: 8 << 20 };
        assert_eq!(own_and_shared(memory, maps), (1 + (6 << 20), 2 + (2 << 20)));
        // Not all that is mapped is present.
        assert_eq!(own_and_shared(Memory { huge: 1 << 20, ..memory }, maps), (1 + (1 << 20), 2));
        assert!(shared(b"nonsense\n7f-zz rw-s 0 0 1 /SYSV0").is_empty());
    }

    /// A memfd that is open and nowhere mapped, and a segment that no process has attached.
    #[test]
    fn shared_memory_that_nobody_has_mapped_is_found() {
        use std::io::{BufRead, BufReader};
        use std::process::{Command, Stdio};
        if !rekindle_testing::root() {
            return;
        }
        const SCRIPT: &str = "import ctypes, os, sys\n\
            memory = os.memfd_create('m')\n\
            os.write(memory, bytes(3 << 20))\n\
            libc = ctypes.CDLL(None)\n\
            libc.shmat.restype = ctypes.c_void_p\n\
            segment = libc.shmget(0, 8 << 20, 0o1600)\n\
            address = libc.shmat(segment, None, 0)\n\
            ctypes.memset(address, 1, 5 << 20)\n\
            libc.shmdt(ctypes.c_void_p(address))\n\
            print(os.fstat(memory).st_ino, segment, flush=True)\n\
            sys.stdin.read()";
        let mut command = Command::new("unshare");
        command.args(["--ipc", "python3", "-c", SCRIPT]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let pid = child.id().cast_signed();
        let (once, twice) = (expect(&[pid]), expect(&[pid, pid]));
        drop(child.stdin.take());
        let _ = child.wait();
        let [memfd, segment] =
            [0, 1].map(|at| Source::Shared(line.split_whitespace().nth(at).unwrap().parse().unwrap()));
        for all in [once, twice] {
            let found = all.into_iter().filter(|expected| expected.source == memfd || expected.source == segment);
            let bytes: Vec<u64> = found.map(|expected| expected.bytes).collect();
            assert_eq!(bytes, [3 << 20, 5 << 20]);
        }
    }

    #[test]
    fn this_process_is_expected_to_be_written() {
        let own = std::process::id().cast_signed();
        let all = expect(&[own, i32::MAX]);
        assert_eq!(all[0].source, Source::Process(own));
        assert!(all[0].bytes > 64 << 10);
    }
}

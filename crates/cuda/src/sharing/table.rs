//! The table in which a process records the memory that it shares, mapped here.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::job_table::JobTable;

#[cfg(test)]
pub(super) use rekindle_abi::sharing::NAME;
pub(super) use rekindle_abi::sharing::{
    BEGIN, CREATE, DEFERRED, EXPORT, EXPORTED_HOST, FOREIGN, GIVE, HANDED, HELD, HOST, HOST_POOL, IMPORT, Import, LOST,
    MAP, MOST, MULTICAST, NO_DESCRIPTOR, NOT_IMPORTED, OWN, PROBE, RELEASE, Reply, Request, SPARSE, Table, Tag,
    UNRELEASED, UNTRACKED,
};

/// The shared memory of one process.
#[derive(Debug)]
pub struct Sharing {
    pid: i32,
    table: JobTable<Table>,
}

impl Sharing {
    /// The table of process `pid`, as we see it; None if it has none.
    ///
    /// # Errors
    /// When it has one that cannot be read, or of another version of the interposer.
    pub fn of(pid: i32) -> io::Result<Option<Sharing>> {
        let table = JobTable::of(pid, "rekindle-sharing-", rekindle_abi::sharing::NAME)?;
        // Made, and not filled in yet: then nothing was shared before this moment.
        let table = table.filter(|table: &JobTable<Table>| table.get().pid.load(Acquire) != 0);
        Ok(table.map(|table| Sharing { pid, table }))
    }

    /// The table of `pid` that is in this file.
    #[cfg(test)]
    pub(super) fn mapped(pid: i32, file: &std::fs::File) -> io::Result<Sharing> {
        Ok(Sharing { pid, table: JobTable::mapped(file)? })
    }

    /// The pid of the process as we see it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn table(&self) -> &Table {
        self.table.get()
    }

    /// The pid of the process as it sees itself.
    #[must_use]
    pub fn inner(&self) -> i32 {
        self.table().pid.load(Relaxed)
    }

    /// Tells the process that CUDA is about to be locked, or is unlocked ([`super::announce`]).
    pub fn announce(&self, is_locked: bool) {
        self.table().is_locked.store(is_locked.into(), Relaxed);
    }

    /// Whether it has memory of other processes.
    #[must_use]
    pub fn has_imports(&self) -> bool {
        self.imports().next().is_some()
    }

    /// Memory that it has of other processes.
    pub(super) fn imports(&self) -> impl Iterator<Item = (u32, &Import)> {
        self.entries().filter(|(_, import)| import.kept.load(Relaxed) == FOREIGN)
    }

    /// Its memory that can stay on the GPU, with the bytes of each.
    pub(super) fn kept(&self) -> impl Iterator<Item = (u32, &Import, u64)> {
        let table = self.table();
        let used = usize::try_from(table.mappings_used.load(Relaxed)).unwrap_or(usize::MAX);
        let all = table.mappings.iter().take(used).filter(|mapping| mapping.address.load(Acquire) != 0);
        let sizes: BTreeMap<u32, u64> =
            all.map(|mapping| (mapping.import.load(Relaxed), mapping.size.load(Relaxed))).collect();
        let kept = self.entries().filter(|(_, import)| matches!(import.kept.load(Relaxed), OWN | HANDED));
        kept.map(move |(index, import)| (index, import, sizes.get(&index).copied().unwrap_or(0)))
    }

    /// Bytes of host memory that it copies for a snapshot, and makes anew. `None` if there is none.
    #[must_use]
    pub fn host_bytes(&self) -> Option<u64> {
        let hosts = self.entries().filter(|(_, import)| import.kept.load(Relaxed) == HOST);
        hosts.map(|(_, import)| import.size.load(Relaxed)).reduce(u64::saturating_add)
    }

    /// Bytes of its memory that can stay on the GPU.
    #[must_use]
    pub fn kept_bytes(&self) -> u64 {
        self.kept().map(|(.., bytes)| bytes).fold(0, u64::saturating_add)
    }

    /// Whether its driver would not import again what stays on the GPU, as far as that was tried ([`super::let_go`],
    /// [`super::make_again`]).
    #[must_use]
    pub fn imports_nothing(&self) -> bool {
        self.table().obstacles.load(Relaxed) & NOT_IMPORTED != 0
    }

    /// Whether its driver has imported memory that stays on the GPU, and so cannot copy it.
    #[must_use]
    pub fn has_imported(&self) -> bool {
        self.kept().any(|(_, import, _)| import.kept.load(Relaxed) == HANDED)
    }

    /// How often it wanted to share such memory by CUDA IPC, and was refused.
    #[must_use]
    pub fn ipc_refused(&self) -> u32 {
        self.table().ipc_refused.load(Relaxed)
    }

    fn entries(&self) -> impl Iterator<Item = (u32, &Import)> {
        let used = usize::try_from(self.table().imports_used.load(Relaxed)).unwrap_or(usize::MAX);
        let live = |(_, import): &(u32, &Import)| import.is_live.load(Acquire) != 0;
        (0..).zip(&self.table().imports).take(used).filter(live)
    }

    /// Memory that other processes can have of it.
    pub(super) fn exports(&self) -> impl Iterator<Item = (u32, Tag)> {
        let table = self.table();
        let used = usize::try_from(table.exports_used.load(Relaxed)).unwrap_or(usize::MAX);
        let nonce = table.nonce.load(Relaxed);
        (0..).zip(&table.exports).take(used).filter(|(_, export)| export.handle.load(Acquire) != 0).map(
            move |(index, export)| {
                (index, Tag { pid: self.inner().cast_unsigned(), id: export.id.load(Relaxed), nonce })
            },
        )
    }
}

/// The origin of an import.
pub(super) fn origin(import: &Import) -> Tag {
    Tag { pid: import.pid.load(Relaxed), id: import.id.load(Relaxed), nonce: import.nonce.load(Relaxed) }
}

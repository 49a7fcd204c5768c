//! Host memory that the program makes with cuMemCreate, at a NUMA node or anywhere.
//!
//! The driver (580) checkpoints a process with such memory. Of a NUMA node it does not restore it (error 999), and the process is
//! lost. Anywhere (CU_MEM_LOCATION_TYPE_HOST) it restores it for the GPU only: where the program had it mapped there is nothing,
//! and the program dies at its next access (one H200). So the keeper copies it to private memory of the process, unmaps
//! and releases it, and makes it anew after the restore, at the same addresses and with the same rights, as it maps memory of other
//! processes again ([`crate::sharing`]). The program has a name for it in place of the driver's handle.
//!
//! A program may have mapped it for the GPU only, or for reading. So it is copied by a mapping of our own.
//!
//! What the program has exported stays the old memory for whoever has the descriptor. It is counted, and the supervisor refuses.

use core::ptr::{with_exposed_provenance, with_exposed_provenance_mut};
use core::sync::atomic::Ordering;

use crate::sharing::{self, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS, driver};
use crate::{keeper, kept, libc, sys};
use rekindle_abi::sharing::{self as table, Import, Mapping, Table};

/// CU_MEM_ALLOCATION_TYPE_PINNED.
const PINNED: u32 = 1;
/// CU_MEM_LOCATION_TYPE_HOST, _HOST_NUMA and _HOST_NUMA_CURRENT.
const HOST: u32 = 2;
const HOST_NUMA_CURRENT: u32 = 4;

/// Whether memory with these properties (CUmemAllocationProp, CUmemPoolProps) is in host memory: type, handle types, and the
/// kind and number of the location.
pub(crate) fn is_host(properties: &[u32; 8]) -> bool {
    let [kind, _, location, ..] = properties;
    *kind == PINNED && is_host_location(*location)
}

pub(crate) fn is_host_location(kind: u32) -> bool {
    (HOST..=HOST_NUMA_CURRENT).contains(&kind)
}

/// Records new memory of the program. What cannot be recorded is an obstacle to snapshots.
pub(crate) fn note(handle: u64, size: u64, properties: &[u32; 8]) {
    let Some(table) = sharing::table_or_new() else { return };
    if add(table, handle, size, properties).is_none() || !keeper::start(table) {
        sharing::obstacle(table::UNTRACKED);
    }
}

fn add(table: &Table, handle: u64, size: u64, properties: &[u32; 8]) -> Option<()> {
    let _changing = sharing::wait()?;
    let (at, entry) = table.imports.iter().enumerate().find(|(_, import)| !sharing::is_live(import))?;
    entry.name.store(handle, Ordering::Relaxed);
    entry.handle.store(handle, Ordering::Relaxed);
    entry.kind.store(0, Ordering::Relaxed);
    entry.references.store(1, Ordering::Relaxed);
    entry.mappings.store(0, Ordering::Relaxed);
    entry.is_gone.store(0, Ordering::Relaxed);
    entry.id.store(0, Ordering::Relaxed);
    entry.size.store(size, Ordering::Relaxed);
    entry.content.store(0, Ordering::Relaxed);
    for (slot, value) in entry.properties.iter().zip(properties) {
        slot.store(*value, Ordering::Relaxed);
    }
    entry.kept.store(table::HOST, Ordering::Relaxed);
    entry.is_live.store(1, Ordering::Release);
    table.imports_used.fetch_max(at as u32 + 1, Ordering::Relaxed);
    Some(())
}

/// The program has exported what it calls by this name.
pub(crate) fn note_export(table: &Table, name: u64) {
    let Some((_, import)) = sharing::named(table, name).filter(|(_, import)| sharing::is_host(import)) else { return };
    if import.id.swap(1, Ordering::Relaxed) == 0 {
        count(table, 1);
    }
}

/// Its last reference and mapping are gone.
pub(crate) fn forget(import: &Import) {
    if sharing::is_host(import)
        && import.id.swap(0, Ordering::Relaxed) != 0
        && let Some(table) = sharing::table()
    {
        count(table, -1);
    }
}

fn count(table: &Table, change: i32) {
    let [exported, ..] = &table.unrestorable;
    let count = |now: u32| Some(now.saturating_add_signed(change));
    let _ = exported.fetch_update(Ordering::Relaxed, Ordering::Relaxed, count);
}

fn all(table: &Table) -> impl Iterator<Item = (u32, &Import)> {
    (0..).zip(sharing::imports(table)).filter(|(_, import)| sharing::is_live(import) && sharing::is_host(import))
}

fn mappings(table: &Table, at: u32) -> impl Iterator<Item = &Mapping> {
    sharing::mappings(table).filter(move |mapping| mapping.import.load(Ordering::Relaxed) == at)
}

fn first_error(codes: impl IntoIterator<Item = i32>) -> i32 {
    codes.into_iter().find(|code| *code != SUCCESS).unwrap_or(SUCCESS)
}

/// Copies each and releases it, one after the other: so only one of them is there twice.
pub(crate) fn release_all(table: &Table) -> i32 {
    let there = |(_, import): &(u32, &Import)| import.is_gone.load(Ordering::Relaxed) == 0;
    first_error(all(table).filter(there).map(|(at, import)| release(table, at, import)))
}

fn release(table: &Table, at: u32, import: &Import) -> i32 {
    let code = save(table, at, import);
    if code != SUCCESS {
        return code;
    }
    for mapping in mappings(table, at) {
        let code = driver::unmap(mapping.address.load(Ordering::Relaxed), mapping.size.load(Ordering::Relaxed));
        if code != SUCCESS {
            return code;
        }
        mapping.is_gone.store(1, Ordering::Relaxed);
    }
    import.is_gone.store(1, Ordering::Relaxed);
    let handle = import.handle.load(Ordering::Relaxed);
    let code = first_error((0..import.references.load(Ordering::Relaxed)).map(|_| driver::release(handle)));
    if code != SUCCESS {
        sharing::obstacle(table::UNRELEASED);
    }
    code
}

fn save(table: &Table, at: u32, import: &Import) -> i32 {
    let size = import.size.load(Ordering::Relaxed);
    drop_content(import);
    let flags = sys::MAP_PRIVATE | sys::MAP_ANONYMOUS;
    let Ok(content) = sys::map(0, size as usize, sys::PROT_READ | sys::PROT_WRITE, flags, -1, 0) else {
        return OUT_OF_MEMORY;
    };
    import.content.store(content as u64, Ordering::Relaxed);
    if import.references.load(Ordering::Relaxed) > 0 {
        return copy(import, import.handle.load(Ordering::Relaxed), Way::Out);
    }
    // The program has released the handle, and a mapping keeps the memory.
    let Some(mapping) = mappings(table, at).next() else { return INVALID_VALUE };
    let mut handle = 0;
    let code = driver::retain(&mut handle, mapping.address.load(Ordering::Relaxed));
    if code != SUCCESS {
        return code;
    }
    let code = copy(import, handle, Way::Out);
    first_error([code, driver::release(handle)])
}

/// Makes all again that was released, with the content and the references that it had. Mapping it is the caller's.
pub(crate) fn make_all_again(table: &Table) -> i32 {
    first_error(all(table).map(|(_, import)| {
        let code = match import.is_gone.load(Ordering::Relaxed) {
            0 => SUCCESS,
            _ => make_again(import),
        };
        if code == SUCCESS {
            drop_content(import);
        }
        code
    }))
}

fn make_again(import: &Import) -> i32 {
    let mut properties = [0; 8];
    for (value, slot) in properties.iter_mut().zip(&import.properties) {
        *value = slot.load(Ordering::Relaxed);
    }
    // A pointer that means nothing here, and is not read.
    let [_, _, _, _, low, high, ..] = &mut properties;
    (*low, *high) = (0, 0);
    let mut handle = 0;
    let code = driver::create(&mut handle, import.size.load(Ordering::Relaxed), &properties);
    if code != SUCCESS {
        return code;
    }
    import.handle.store(handle, Ordering::Relaxed);
    sharing::RENAMED.store(true, Ordering::Relaxed);
    let code = copy(import, handle, Way::In);
    if code == SUCCESS {
        import.is_gone.store(0, Ordering::Relaxed);
    }
    code
}

fn drop_content(import: &Import) {
    let content = import.content.swap(0, Ordering::Relaxed);
    if content != 0 {
        let _ = sys::unmap(content as usize, import.size.load(Ordering::Relaxed) as usize);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// From the driver's memory.
    Out,
    In,
}

/// Copies by a mapping of our own.
fn copy(import: &Import, handle: u64, way: Way) -> i32 {
    let size = import.size.load(Ordering::Relaxed);
    let mut address = 0;
    let code = kept::reserve(&mut address, size);
    if code != SUCCESS {
        return code;
    }
    let code = copy_at(address, import, handle, way);
    first_error([code, kept::unreserve(address, size)])
}

fn copy_at(address: u64, import: &Import, handle: u64, way: Way) -> i32 {
    let size = import.size.load(Ordering::Relaxed);
    let code = driver::map(address, size, 0, handle, 0);
    if code != SUCCESS {
        return code;
    }
    let [_, _, kind, number, ..] = &import.properties;
    // Read and write, by the processor.
    let access = [kind.load(Ordering::Relaxed) as i32, number.load(Ordering::Relaxed) as i32, 3];
    let mut code = driver::set_access(address, size, &access);
    let content = import.content.load(Ordering::Relaxed);
    if code == SUCCESS && content != 0 {
        let [to, from] = if way == Way::Out { [content, address] } else { [address, content] };
        let (to, from) = (with_exposed_provenance_mut(to as usize), with_exposed_provenance(from as usize));
        // SAFETY: both are mapped with this size, and nobody else knows of them.
        unsafe { libc::copy(to, from, size as usize) };
    }
    // The references that the program had: one is there, and a mapping may keep it without any.
    if code == SUCCESS && way == Way::In && import.mappings.load(Ordering::Relaxed) == 0 {
        let more = 1..import.references.load(Ordering::Relaxed);
        code = first_error(more.map(|_| driver::retain(&mut 0, address)));
    }
    let unmapped = driver::unmap(address, size);
    if unmapped != SUCCESS {
        // This mapping keeps the memory: the driver would checkpoint it.
        sharing::obstacle(table::UNRELEASED);
    }
    first_error([code, unmapped])
}

#[cfg(test)]
mod tests;

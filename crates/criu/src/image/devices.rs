//! Replaces the devices that a plugin accepted by files and memory that every machine has.
//!
//! CRIU (4.2) writes a descriptor that a plugin accepted as a file of type EXT without further data, and a mapping with
//! `VMA_EXT_PLUGIN` without pages; a restore would ask the plugin for both. This module changes them to what CRIU
//! itself writes for /dev/null and for anonymous memory.

use std::path::{Path, PathBuf};

use prost::Message;

use super::rewrite::{rewrite, with_fields};
use super::{Error, FDINFO, FILES, IDS, Records, damaged};
use crate::proto::{FdinfoEntry, KobjIds, NullFileEntry, PluginFileEntry, VmaEntry};

pub(super) const MM: u32 = 0x5749_2820;

/// `fd_types` of fdinfo.proto.
const REG: u32 = 1;
const EXT: u32 = 16;

/// Status of a mapping (`include/image.h`): `VMA_AREA_REGULAR`, `VMA_ANON_PRIVATE`, and that a plugin took it.
const REGULAR: u32 = 1;
const ANON_PRIVATE: u32 = 1 << 9;
const EXT_PLUGIN: u32 = 1 << 27;

/// What replaces a process's devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replaced {
    /// The process, as it sees itself.
    pub pid: i32,
    /// Its descriptors of them.
    pub descriptors: Vec<i32>,
    /// How many mappings of them it has.
    pub mappings: usize,
}

/// Replaces the descriptors that a plugin accepted by /dev/null, and the mappings by private memory of zeros. Returns
/// which processes have them, by pid.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn without_devices(dir: &Path) -> Result<Vec<Replaced>, Error> {
    let files = null_files(&dir.join("files.img"))?;
    let mut all = Vec::new();
    let mut left = files.clone();
    for (name, path) in images(dir, "ids-")? {
        let damaged_name = || damaged(&path, "its name is not ids-PID.img");
        let pid: i32 = name.parse().map_err(|_| damaged_name())?;
        let descriptors = match files.is_empty() {
            true => Vec::new(),
            false => {
                let ids: Option<KobjIds> = Records::open(path.clone(), IDS)?.next()?;
                let table = ids.ok_or_else(|| damaged(&path, "no ids"))?.files;
                descriptors(&dir.join(format!("fdinfo-{table}.img")), &files)?
            }
        };
        left.retain(|id| descriptors.iter().all(|(known, _)| known != id));
        let mm = dir.join(format!("mm-{pid}.img"));
        // A dead process has no memory.
        let mappings = if mm.exists() { own_memory(&mm)? } else { 0 };
        if !descriptors.is_empty() || mappings > 0 {
            let descriptors = descriptors.into_iter().map(|(_, fd)| fd).collect();
            all.push(Replaced { pid, descriptors, mappings });
        }
    }
    if let Some(id) = left.first() {
        return Err(damaged(&dir.join("files.img"), format!("a plugin took file {id}, which no process has")));
    }
    if !files.is_empty() {
        for (_, path) in images(dir, "fdinfo-")? {
            regular_descriptors(&path)?;
        }
    }
    all.sort_by_key(|replaced| replaced.pid);
    Ok(all)
}

/// The image files `KINDname.img`: the `name` part, and the path.
pub(super) fn images(dir: &Path, kind: &str) -> Result<Vec<(String, PathBuf)>, Error> {
    let read = |source| Error::Read { path: dir.into(), source };
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(read)? {
        let entry = entry.map_err(read)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if let Some(name) = name.strip_prefix(kind).and_then(|rest| rest.strip_suffix(".img")) {
            all.push((name.to_owned(), entry.path()));
        }
    }
    Ok(all)
}

/// Makes /dev/null of the files that a plugin took; returns their ids.
fn null_files(path: &Path) -> Result<Vec<u32>, Error> {
    let mut ids = Vec::new();
    rewrite(path, FILES, |entry: PluginFileEntry, _| {
        if entry.kind != EXT {
            return Ok(None);
        }
        let ext = entry.ext.ok_or_else(|| damaged(path, format!("no entry of file {}", entry.id)))?;
        ids.push(entry.id);
        // Without a mode: nothing is compared at a restore.
        let null =
            NullFileEntry { id: entry.id, flags: NULL_FLAGS, pos: 0, owner: ext.owner, name: "/dev/null".into() };
        Ok(Some(PluginFileEntry { kind: REG, id: entry.id, reg: Some(null), ext: None }.encode_to_vec()))
    })?;
    Ok(ids)
}

/// `O_RDWR | O_LARGEFILE`: CRIU does not write how the file was open, and NVIDIA's devices are open like this.
const NULL_FLAGS: u32 = 0o100_002;

/// The descriptors of a table that are of these files: (file, number).
fn descriptors(path: &Path, files: &[u32]) -> Result<Vec<(u32, i32)>, Error> {
    // Of a process without any, such as the reaper, there is none.
    if !path.exists() {
        return Ok(Vec::new());
    }
    let all: Vec<FdinfoEntry> = Records::open(path.into(), FDINFO)?.all()?;
    let wanted = all.iter().filter(|entry| files.contains(&entry.id));
    Ok(wanted.map(|entry| (entry.id, entry.fd.cast_signed())).collect())
}

/// Makes descriptors of a plugin's files those of regular ones, as /dev/null is for CRIU. What we do not know of the record
/// stays in it.
fn regular_descriptors(path: &Path) -> Result<(), Error> {
    rewrite(path, FDINFO, |entry: FdinfoEntry, record| {
        // If a field is there twice, the last one counts.
        Ok((entry.kind == EXT).then(|| [record, &[3 << 3, 1]].concat()))
    })
}

/// Makes memory of the process's own of the mappings that a plugin took; returns how many.
fn own_memory(path: &Path) -> Result<usize, Error> {
    let mut mappings = 0;
    rewrite(path, MM, |(), record| {
        let before = mappings;
        let new = with_own_memory(record, &mut mappings).ok_or_else(|| damaged(path, "a record cannot be read"))?;
        Ok((mappings > before).then_some(new))
    })?;
    Ok(mappings)
}

/// An `mm_entry` with other mappings and what else it has.
fn with_own_memory(record: &[u8], mappings: &mut usize) -> Option<Vec<u8>> {
    /// Field 14 with a length.
    const VMA: u64 = 14 << 3 | 2;
    with_fields(record, |key, content| {
        if key != VMA {
            return Some(None);
        }
        let own = Some(VmaEntry::decode(content).ok()?).filter(|vma| vma.status & EXT_PLUGIN != 0).map(own);
        *mappings += usize::from(own.is_some());
        Some(own.map(|own| own.encode_to_vec()))
    })
}

/// Memory of the same place and protection, which counts only where it is touched.
fn own(vma: VmaEntry) -> VmaEntry {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    VmaEntry {
        pgoff: 0,
        shmid: 0,
        flags: flags.cast_unsigned(),
        status: REGULAR | ANON_PRIVATE,
        fd: -1,
        madv: None,
        fdflags: None,
        ..vma
    }
}

#[cfg(test)]
mod tests;

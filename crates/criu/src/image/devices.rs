//! Replaces the devices that a plugin accepted by files and memory that exist on every machine.
//!
//! CRIU (4.2) writes a descriptor that a plugin accepted as a file of type EXT without further data, and a mapping with
//! `VMA_EXT_PLUGIN` without pages; a restore would ask the plugin for both. This module changes them to what CRIU
//! itself writes for /dev/null and for anonymous memory.

use prost::Message;

use super::rewrite::{rewrite, with_fields};
use super::{Error, FDINFO, FILES, IDS, Records, damaged, names_in};
use crate::proto::{FdinfoEntry, KobjIds, NullFileEntry, PluginFileEntry, VmaEntry};
use rekindle_os::beneath::Beneath;

pub(super) const MM: u32 = 0x5749_2820;

/// `fd_types` of fdinfo.proto.
const REG: u32 = 1;
const EXT: u32 = 16;

/// Status of a mapping (`include/image.h`): `VMA_AREA_REGULAR`, `VMA_ANON_PRIVATE`, and `VMA_EXT_PLUGIN` for a mapping
/// that a plugin accepted.
const REGULAR: u32 = 1;
const ANON_PRIVATE: u32 = 1 << 9;
const EXT_PLUGIN: u32 = 1 << 27;

/// The replaced devices of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Replaced {
    /// The pid of the process, as it sees itself.
    pub pid: i32,
    /// Its descriptors of devices.
    pub descriptors: Vec<i32>,
    /// Its mappings of devices: the first address, and the one behind the last.
    pub mappings: Vec<(u64, u64)>,
    /// Number of those that it can both read and write.
    pub writable: usize,
}

/// Replaces the descriptors that a plugin accepted by /dev/null, and the mappings by private memory of zeros. Returns
/// the affected processes, sorted by pid.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn without_devices(dir: &Beneath) -> Result<Vec<Replaced>, Error> {
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
        let Mappings { all: mappings, writable } = if mm.is_there() { own_memory(&mm)? } else { Mappings::default() };
        if !descriptors.is_empty() || !mappings.is_empty() {
            let descriptors = descriptors.into_iter().map(|(_, fd)| fd).collect();
            all.push(Replaced { pid, descriptors, mappings, writable });
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
pub(super) fn images(dir: &Beneath, kind: &str) -> Result<Vec<(String, Beneath)>, Error> {
    let owner = |name: String| {
        let owner = name.strip_prefix(kind)?.strip_suffix(".img")?;
        Some((owner.to_owned(), dir.join(&name)))
    };
    Ok(names_in(dir)?.into_iter().filter_map(owner).collect())
}

/// Changes the files that a plugin accepted to /dev/null; returns their ids.
fn null_files(path: &Beneath) -> Result<Vec<u32>, Error> {
    let mut ids = Vec::new();
    rewrite(path, FILES, |entry: PluginFileEntry, _| {
        if entry.kind != EXT {
            return Ok(None);
        }
        let ext = entry.ext.ok_or_else(|| damaged(path, format!("no entry of file {}", entry.id)))?;
        ids.push(entry.id);
        // Without a mode, a restore compares nothing.
        let null =
            NullFileEntry { id: entry.id, flags: NULL_FLAGS, pos: 0, owner: ext.owner, name: "/dev/null".into() };
        Ok(Some(PluginFileEntry { kind: REG, id: entry.id, reg: Some(null), ext: None }.encode_to_vec()))
    })?;
    Ok(ids)
}

/// `O_RDWR
///  O_LARGEFILE`: CRIU does not record the flags of these files, and NVIDIA's devices are opened with these.
const NULL_FLAGS: u32 = 0o100_002;

/// The descriptors of a table that refer to these files: (file, number).
fn descriptors(path: &Beneath, files: &[u32]) -> Result<Vec<(u32, i32)>, Error> {
    // A process without descriptors, such as the reaper, has no table.
    if !path.is_there() {
        return Ok(Vec::new());
    }
    let all: Vec<FdinfoEntry> = Records::open(path.clone(), FDINFO)?.all()?;
    let wanted = all.iter().filter(|entry| files.contains(&entry.id));
    Ok(wanted.map(|entry| (entry.id, entry.fd.cast_signed())).collect())
}

/// Changes descriptors of a plugin's files to those of regular files, which is what /dev/null is for CRIU. Unknown
/// fields of the record are preserved.
fn regular_descriptors(path: &Beneath) -> Result<(), Error> {
    rewrite(path, FDINFO, |entry: FdinfoEntry, record| {
        // If a field occurs twice, the last one counts.
        Ok((entry.kind == EXT).then(|| [record, &[3 << 3, 1]].concat()))
    })
}

/// How many mappings of devices a process has.
#[derive(Debug, Clone, Default)]
struct Mappings {
    all: Vec<(u64, u64)>,
    /// Those that can be both read and written.
    writable: usize,
}

/// Changes the mappings that a plugin accepted to private memory; returns how many.
fn own_memory(path: &Beneath) -> Result<Mappings, Error> {
    let mut mappings = Mappings::default();
    rewrite(path, MM, |(), record| {
        let before = mappings.all.len();
        let new = with_own_memory(record, &mut mappings).ok_or_else(|| damaged(path, "a record cannot be read"))?;
        Ok((mappings.all.len() > before).then_some(new))
    })?;
    Ok(mappings)
}

/// An `mm_entry` with changed mappings; other fields are preserved.
fn with_own_memory(record: &[u8], mappings: &mut Mappings) -> Option<Vec<u8>> {
    /// Field 14, length-delimited.
    const VMA: u64 = 14 << 3 | 2;
    with_fields(record, |key, content| {
        if key != VMA {
            return Some(None);
        }
        let own = Some(VmaEntry::decode(content).ok()?).filter(|vma| vma.status & EXT_PLUGIN != 0).map(own);
        if let Some(vma) = &own {
            const BOTH: u32 = (libc::PROT_READ | libc::PROT_WRITE).cast_unsigned();
            mappings.all.push((vma.start, vma.end));
            mappings.writable += usize::from(vma.prot & BOTH == BOTH);
        }
        Some(own.map(|own| own.encode_to_vec()))
    })
}

/// A private mapping with the same addresses and protection, which uses memory only when it is touched.
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

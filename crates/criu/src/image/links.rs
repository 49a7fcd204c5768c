//! The names that CRIU gives to deleted files that have another hard link.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use super::descriptors::table_of;
use super::devices::{MM, images};
use super::mappings::has_a_file;
use super::rewrite::{rewrite, with_fields};
use super::{Error, FILES, Records, absolute, damaged, remaps};
use crate::proto::{FileEntry, MmEntry};
use rekindle_os::beneath::Beneath;

/// Where a process has a file of the image; its pid as it sees itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holder {
    /// A descriptor.
    Descriptor {
        /// The process.
        pid: i32,
        /// The number.
        fd: i32,
    },
    /// A mapping.
    Mapping {
        /// The process.
        pid: i32,
        /// The first address.
        start: u64,
        /// The address after it.
        end: u64,
    },
}

/// A name that CRIU gave to a deleted file with another hard link (`link_remap.N`). CRIU removes it after a dump that
/// leaves the tasks running, and needs it for a restore.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinkRemap {
    /// The absolute path.
    pub path: PathBuf,
    /// One of those that have the file; `None` if it is only in the queue of a socket.
    pub holder: Option<Holder>,
}

/// All names of this kind.
///
/// # Errors
/// When an image file is damaged.
pub fn link_remaps(dir: &Beneath) -> Result<Vec<LinkRemap>, Error> {
    // From the id of the name to that of the file.
    let links: BTreeMap<u32, u32> =
        remaps(dir)?.iter().filter(|remap| remap.is_link()).map(|remap| (remap.remap_id, remap.orig_id)).collect();
    if links.is_empty() {
        return Ok(Vec::new());
    }
    let holders = holders(dir)?;
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let named = entries.into_iter().filter_map(|entry| {
        let holder = holders.get(links.get(&entry.id)?).copied();
        Some(LinkRemap { path: absolute(&entry.reg?.name), holder })
    });
    Ok(named.collect())
}

/// Where each file of the image is in use, by its id.
fn holders(dir: &Beneath) -> Result<BTreeMap<u32, Holder>, Error> {
    let mut found = BTreeMap::new();
    for pid in images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok()) {
        for entry in table_of(dir, pid)? {
            found.entry(entry.id).or_insert_with(|| Holder::Descriptor { pid, fd: entry.fd.cast_signed() });
        }
    }
    for (name, path) in images(dir, "mm-")? {
        let Ok(pid) = name.parse() else { continue };
        let entries: Vec<MmEntry> = Records::open(path, MM)?.all()?;
        for vma in entries.iter().flat_map(|entry| &entry.vmas).filter(|vma| has_a_file(vma)) {
            if let Ok(id) = u32::try_from(vma.shmid) {
                found.entry(id).or_insert(Holder::Mapping { pid, start: vma.start, end: vma.end });
            }
        }
    }
    Ok(found)
}

/// Changes the last part of names of this kind: CRIU numbers them from the beginning in each dump, so the images of
/// different jobs have the same ones. CRIU looks up the names by the ids of files and accepts any name.
///
/// # Errors
/// When an image file is damaged, or cannot be written.
pub fn rename_link_remaps(dir: &Beneath, names: &BTreeMap<PathBuf, OsString>) -> Result<(), Error> {
    /// Field 3 of `file_entry`, field 6 of `reg_file_entry`: length-delimited.
    const REG: u64 = 3 << 3 | 2;
    const NAME: u64 = 6 << 3 | 2;
    let links: Vec<u32> = remaps(dir)?.iter().filter(|remap| remap.is_link()).map(|remap| remap.remap_id).collect();
    if links.is_empty() {
        return Ok(());
    }
    let path = dir.join("files.img");
    rewrite(&path, FILES, |entry: FileEntry, record| {
        let Some(reg) = entry.reg.filter(|_| links.contains(&entry.id)) else { return Ok(None) };
        let Some(name) = names.get(&absolute(&reg.name)) else { return Ok(None) };
        let folder = reg.name.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let new = [reg.name.get(..folder).unwrap_or_default(), name.as_bytes()].concat();
        let renamed = |key, _: &[u8]| Some((key == NAME).then(|| new.clone()));
        let changed = with_fields(record, |key, content| match key {
            REG => with_fields(content, renamed).map(Some),
            _ => Some(None),
        });
        let changed = changed.ok_or_else(|| damaged(&path, format!("the entry of file {}", entry.id)))?;
        Ok(Some(changed))
    })
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::tests::write;
    use super::super::{FDINFO, IDS, REMAP};
    use super::*;
    use crate::proto::{FdinfoEntry, RegFileEntry, RemapEntry, VmaEntry};

    #[test]
    fn names_of_deleted_files_are_found_with_their_holders_and_renamed() {
        let dir = tempfile::tempdir().unwrap();
        let dir = &super::super::tests::beneath(dir.path());
        let reg = |id: u32, name: &str| {
            let reg = RegFileEntry { id, name: name.into(), size: Some(7), ..RegFileEntry::default() };
            let mut record = FileEntry { id, reg: Some(reg), inet: None, unix: None }.encode_to_vec();
            // A field that is not read: 40, a number.
            record.extend([0xc0, 2, 5]);
            record
        };
        let names = ["dev/shm/sem.a", "dev/shm/link_remap.4", "/data/b", "/data/link_remap.5", "c", "link_remap.6"];
        let records: Vec<_> = (1..).zip(names).map(|(id, name)| reg(id, name)).collect();
        write(&dir.join("files.img"), FILES, &records);
        let remap = |orig_id, remap_id| RemapEntry { orig_id, remap_id, remap_type: Some(0) }.encode_to_vec();
        write(&dir.join("remap-fpath.img"), REMAP, &[remap(1, 2), remap(3, 4), remap(5, 6)]);
        write(&dir.join("ids-1001.img"), IDS, &[vec![8, 1, 2 << 3, 9]]);
        write(&dir.join("fdinfo-9.img"), FDINFO, &[FdinfoEntry { id: 3, kind: 1, fd: 8 }.encode_to_vec()]);
        let vma = VmaEntry { start: 0x1000, end: 0x3000, shmid: 1, status: 1 << 6, ..VmaEntry::default() };
        write(&dir.join("mm-1002.img"), MM, &[MmEntry { vmas: vec![vma], ..MmEntry::default() }.encode_to_vec()]);

        let found = link_remaps(dir).unwrap();
        let paths: Vec<_> = found.iter().map(|link| link.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["/dev/shm/link_remap.4", "/data/link_remap.5", "/link_remap.6"]);
        let holders: Vec<_> = found.iter().map(|link| link.holder).collect();
        let mapping = Holder::Mapping { pid: 1002, start: 0x1000, end: 0x3000 };
        assert_eq!(holders, [Some(mapping), Some(Holder::Descriptor { pid: 1001, fd: 8 }), None]);

        let names = found.iter().map(|link| (link.path.clone(), OsString::from("longer-than-it-was"))).collect();
        rename_link_remaps(dir, &names).unwrap();
        let expected = [
            reg(1, "dev/shm/sem.a"),
            reg(2, "dev/shm/longer-than-it-was"),
            reg(3, "/data/b"),
            reg(4, "/data/longer-than-it-was"),
            reg(5, "c"),
            reg(6, "longer-than-it-was"),
        ];
        let renamed = std::fs::read(dir.join("files.img")).unwrap();
        write(&dir.join("files.img"), FILES, &expected);
        assert_eq!(renamed, std::fs::read(dir.join("files.img")).unwrap());
    }
}

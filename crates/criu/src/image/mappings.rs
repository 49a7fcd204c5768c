//! Mappings of files: which of them can change a file, and how CRIU opens the file for them in a restore.

use std::collections::BTreeSet;
use std::path::PathBuf;

use prost::Message;

use super::devices::{MM, images};
use super::rewrite::{rewrite, with_fields};
use super::{Error, Records, damaged, names};
use crate::proto::{MmEntry, VmaEntry};
use rekindle_os::beneath::Beneath;

/// Status of a mapping (`include/image.h`): `VMA_FILE_PRIVATE`, `VMA_FILE_SHARED`, `VMA_AREA_MEMFD`, and `VMA_EXT_PLUGIN`
/// for a mapping that a plugin accepted.
const FILE_PRIVATE: u32 = 1 << 6;
const FILE_SHARED: u32 = 1 << 7;
const MEMFD: u32 = 1 << 14;
const EXT_PLUGIN: u32 = 1 << 27;

/// The regular files that a process has mapped shared and writable, or could make writable with mprotect(2). Whether it
/// also has a descriptor does not matter.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn written_by_mappings(dir: &Beneath) -> Result<Vec<PathBuf>, Error> {
    let names = names(dir)?;
    let mut found = BTreeSet::new();
    for (_, path) in images(dir, "mm-")? {
        let entries: Vec<MmEntry> = Records::open(path, MM)?.all()?;
        let mappings = entries.iter().flat_map(|entry| &entry.vmas).filter(|vma| is_of_a_file(vma));
        let written = mappings.filter(|vma| writes(vma.prot) || opens_for_writing(vma));
        found.extend(written.filter_map(|vma| names.get(&u32::try_from(vma.shmid).ok()?).cloned()));
    }
    Ok(found.into_iter().collect())
}

/// A scarce resource of the machine that the processes use, in words: a second copy of them would take it from the
/// first.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn scarce(dir: &Beneath) -> Result<Option<&'static str>, Error> {
    /// `VMA_AREA_AIORING`.
    const AIO_RING: u32 = 1 << 13;
    for (_, path) in images(dir, "mm-")? {
        let entries: Vec<MmEntry> = Records::open(path, MM)?.all()?;
        for vma in entries.iter().flat_map(|entry| &entry.vmas) {
            if vma.flags & libc::MAP_HUGETLB.cast_unsigned() != 0 {
                return Ok(Some("huge pages"));
            }
            if vma.status & AIO_RING != 0 {
                return Ok(Some("rings of asynchronous I/O"));
            }
        }
    }
    Ok(None)
}

/// Bytes of memory that the processes have locked (mlock(2)): it is there as soon as the mappings are made.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn locked(dir: &Beneath) -> Result<u64, Error> {
    let mut bytes = 0_u64;
    for (_, path) in images(dir, "mm-")? {
        let entries: Vec<MmEntry> = Records::open(path, MM)?.all()?;
        let locked = entries.iter().flat_map(|entry| &entry.vmas);
        for vma in locked.filter(|vma| vma.flags & libc::MAP_LOCKED.cast_unsigned() != 0) {
            bytes = bytes.saturating_add(vma.end.saturating_sub(vma.start));
        }
    }
    Ok(bytes)
}

/// Makes CRIU open files for writing if a mapping of them is writable. CRIU 4.2 takes the access mode from the mode of
/// the link in /proc/PID/map_files, and the kernel keeps the link of an earlier mapping of the same addresses with the
/// mode that it had: a restore would fail with "Can't restore 0x... mapping". Returns how many mappings were corrected.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn correct_access(dir: &Beneath) -> Result<usize, Error> {
    /// Field 14, length-delimited.
    const VMA: u64 = 14 << 3 | 2;
    let mut corrected = 0;
    for (_, path) in images(dir, "mm-")? {
        rewrite(&path, MM, |(), record| {
            let before = corrected;
            let new = with_fields(record, |key, content| {
                if key != VMA {
                    return Some(None);
                }
                let vma = VmaEntry::decode(content).ok()?;
                let is_wrong = is_of_a_file(&vma) && writes(vma.prot) && !opens_for_writing(&vma);
                let access = vma.fdflags.unwrap_or_default() & !ACCESS | libc::O_RDWR.cast_unsigned();
                corrected += usize::from(is_wrong);
                Some(is_wrong.then(|| VmaEntry { fdflags: Some(access), ..vma }.encode_to_vec()))
            });
            let new = new.ok_or_else(|| damaged(&path, "a record cannot be read"))?;
            Ok((corrected > before).then_some(new))
        })?;
    }
    Ok(corrected)
}

const ACCESS: u32 = libc::O_ACCMODE.cast_unsigned();

/// Whether it maps a file, privately or not, whose id it has.
pub(super) fn has_a_file(vma: &VmaEntry) -> bool {
    vma.status & (FILE_PRIVATE | FILE_SHARED) != 0 && vma.status & (MEMFD | EXT_PLUGIN) == 0
}

/// Whether it maps memory that is in no file system, and that the kernel shows as a deleted file.
pub(super) fn is_memory(vma: &VmaEntry) -> bool {
    // `VMA_ANON_SHARED`, `VMA_ANON_PRIVATE` and `VMA_AREA_SYSVIPC`.
    const ANON_SHARED: u32 = 1 << 8;
    const ANON_PRIVATE: u32 = 1 << 9;
    const SYSVIPC: u32 = 1 << 10;
    let is_huge = vma.flags & libc::MAP_HUGETLB.cast_unsigned() != 0;
    vma.status & EXT_PLUGIN == 0
        && (vma.status & (ANON_SHARED | SYSVIPC | MEMFD) != 0 || (vma.status & ANON_PRIVATE != 0 && is_huge))
}

fn is_of_a_file(vma: &VmaEntry) -> bool {
    vma.status & FILE_SHARED != 0 && vma.status & (MEMFD | EXT_PLUGIN) == 0
}

fn writes(prot: u32) -> bool {
    prot & libc::PROT_WRITE.cast_unsigned() != 0
}

/// Whether the file is opened for writing: only then can a shared mapping be made writable.
fn opens_for_writing(vma: &VmaEntry) -> bool {
    vma.fdflags.is_some_and(|flags| flags & ACCESS == libc::O_RDWR.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::*;
    use crate::image::{COMMON, FILES};
    use crate::proto::{FileEntry, RegFileEntry};
    use std::path::Path;

    fn write<M: Message>(path: &Path, magic: u32, entries: &[M]) {
        let mut bytes: Vec<u8> = [COMMON, magic].iter().flat_map(|word| word.to_le_bytes()).collect();
        for entry in entries {
            bytes.extend(u32::try_from(entry.encoded_len()).unwrap().to_le_bytes());
            bytes.extend(entry.encode_to_vec());
        }
        std::fs::write(path, bytes).unwrap();
    }

    fn mapping(file: u64, status: u32, prot: i32, access: i32) -> VmaEntry {
        VmaEntry {
            start: 0x1000,
            end: 0x2000,
            pgoff: 0,
            shmid: file,
            prot: prot.cast_unsigned(),
            flags: 1,
            status,
            fd: -1,
            madv: None,
            fdflags: Some(access.cast_unsigned()),
        }
    }

    #[test]
    fn a_stale_access_mode_is_corrected_and_writable_mappings_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let file = |id: u32, name: &str| FileEntry {
            id,
            reg: Some(RegFileEntry { id, name: name.into(), ..RegFileEntry::default() }),
            ..FileEntry::default()
        };
        write(&dir.path().join("files.img"), FILES, &[file(1, "tmp/stale"), file(2, "tmp/read"), file(3, "tmp/both")]);
        let (read, write_too) = (libc::PROT_READ, libc::PROT_READ | libc::PROT_WRITE);
        let vmas = vec![
            mapping(1, 1 | FILE_SHARED, write_too, libc::O_RDONLY),
            mapping(2, 1 | FILE_SHARED, read, libc::O_RDONLY),
            mapping(3, 1 | FILE_SHARED, read, libc::O_RDWR),
            mapping(2, 1 | 1 << 6, write_too, libc::O_RDONLY),
            mapping(2, 1 | FILE_SHARED | MEMFD, write_too, libc::O_RDONLY),
            VmaEntry {
                flags: 2 | libc::MAP_LOCKED.cast_unsigned(),
                end: 0x4000,
                ..mapping(0, 1 | 1 << 9, write_too, 0)
            },
        ];
        write(&dir.path().join("mm-7.img"), MM, &[MmEntry { vmas: vmas.clone(), ..MmEntry::default() }]);
        assert_eq!(locked(&beneath(dir.path())).unwrap(), 0x3000);
        let written = written_by_mappings(&beneath(dir.path())).unwrap();
        assert_eq!(written, [Path::new("/tmp/both"), Path::new("/tmp/stale")]);
        assert_eq!(correct_access(&beneath(dir.path())).unwrap(), 1);
        let now: Vec<MmEntry> = Records::open(beneath(dir.path()).join("mm-7.img"), MM).unwrap().all().unwrap();
        let mut expected = vmas;
        expected[0].fdflags = Some(libc::O_RDWR.cast_unsigned());
        assert_eq!(now[0].vmas, expected);
        assert_eq!(correct_access(&beneath(dir.path())).unwrap(), 0);
    }
}

//! The files that CRIU compares in a restore with their state at the dump (`validate_file` in criu/files-reg.c, CRIU
//! 4.2): size, mode, and for ELF files the build-id. If one differs, the restore fails.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::{Error, FILES, Records, absolute, remaps};
use crate::proto::{FileEntry, RegFileEntry};
use rekindle_os::beneath::Beneath;

/// A file that a restore needs unchanged, because nothing puts it back: mapped, executed, or open for reading.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CheckedFile {
    /// Absolute path in the job's mount namespace.
    pub path: PathBuf,
    /// Size in bytes.
    pub size: u64,
    /// `st_mode`.
    pub mode: Option<u32>,
    /// The build-id of an ELF file, padded with zeros to a multiple of four bytes.
    pub build_id: Option<Vec<u8>>,
}

/// The regular files of files.img that have their own name and that no task has open for writing, sorted by path.
///
/// # Errors
/// When an image file is damaged.
pub fn checked_files(dir: &Beneath) -> Result<Vec<CheckedFile>, Error> {
    // A deleted file and its temporary name: CRIU restores both.
    let remapped: Vec<u32> = remaps(dir)?.iter().flat_map(|remap| [remap.orig_id, remap.remap_id]).collect();
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let mut found: BTreeMap<PathBuf, Option<CheckedFile>> = BTreeMap::new();
    for entry in &entries {
        let Some(reg) = &entry.reg else { continue };
        let path = absolute(&reg.name);
        if remapped.contains(&entry.id) || is_changed_by_the_job(reg) {
            found.insert(path, None);
            continue;
        }
        found.entry(path.clone()).or_insert_with(|| checked(reg, path));
    }
    Ok(found.into_values().flatten().collect())
}

fn is_changed_by_the_job(reg: &RegFileEntry) -> bool {
    reg.flags.cast_signed() & libc::O_ACCMODE != libc::O_RDONLY
}

fn checked(reg: &RegFileEntry, path: PathBuf) -> Option<CheckedFile> {
    let build_id: Vec<u8> = reg.build_id.iter().flat_map(|word| word.to_le_bytes()).collect();
    let build_id = (!build_id.is_empty()).then_some(build_id);
    let size = reg.size.filter(|_| reg.ext != Some(true))?;
    Some(CheckedFile { path, size, mode: reg.mode, build_id })
}

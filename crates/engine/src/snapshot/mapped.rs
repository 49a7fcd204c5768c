//! Files that a restore needs unchanged: those that the job has mapped, executes, or reads.
//!
//! They are read from CRIU's image while the job runs. A restore is refused if one of them differs, so a file is left
//! out in case of doubt: CRIU itself checks all of them again.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::Error;
use crate::parts::files::capture::Captured;
use rekindle_criu::image::{self, CheckedFile};
use rekindle_os::beneath::Beneath;
use rekindle_store::JobPath;
use rekindle_store::manifest::{KeptCopy, Landing, MappedFile, OpenFile, Owner, Recreate};

/// Files that a restore puts back by other means.
#[derive(Clone, Copy)]
pub(super) struct Recreated<'a> {
    pub(super) open: &'a [OpenFile],
    pub(super) recreate: &'a [Recreate],
    pub(super) landing: &'a [Landing],
}

impl Recreated<'_> {
    fn has(&self, path: &Path) -> bool {
        self.open.iter().any(|file| file.path == path)
            || self.recreate.iter().any(|file| file.path == path)
            || self.landing.iter().any(|landing| landing.path == path)
    }
}

/// The files of the dump in `criu_dir` that nothing puts back.
pub(super) fn files(
    criu_dir: &Beneath,
    put_back: Recreated<'_>,
    captured: &Captured,
) -> Result<Vec<MappedFile>, Error> {
    let found = image::checked_files(criu_dir)?.into_iter();
    let kept = &captured.read;
    // A file that the image contains may be gone already.
    let is_gone = |file: &CheckedFile| kept.contains_key(&file.path) && std::fs::symlink_metadata(&file.path).is_err();
    let is_known = |file: &CheckedFile| is_gone(file) || is_seen_from_here(file);
    let described = |file: CheckedFile| {
        let owner = captured.owners.get(&file.path).copied();
        // Another file may have been at the path when it was copied.
        let copy = kept.get(&file.path).filter(|copy| owner.is_none_or(|owner| owner == copy.owner)).cloned();
        described(file, owner, copy)
    };
    Ok(found.filter(|file| !put_back.has(&file.path) && is_known(file)).filter_map(described).collect())
}

/// Whether we see the same file under that name as CRIU did: the job may have another file mounted there, and a restore
/// uses our view.
fn is_seen_from_here(file: &CheckedFile) -> bool {
    std::fs::metadata(&file.path)
        .is_ok_and(|now| now.is_file() && now.len() == file.size && file.mode.is_none_or(|mode| mode == now.mode()))
}

fn described(file: CheckedFile, owner: Option<Owner>, copy: Option<KeptCopy>) -> Option<MappedFile> {
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let path = JobPath::new(file.path).ok()?;
    Some(MappedFile { path, size: file.size, mode: file.mode, build_id: file.build_id.map(hex), owner, copy })
}

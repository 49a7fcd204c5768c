//! Sparse files in the places of the job's own, for a rehearsal.
//!
//! A rehearsal sees the files through an overlay in memory, in which opening a file for writing copies all of it. The
//! processes never run, so the content is of no use: a file that CRIU opens is replaced by one of the size, the mode and
//! the owner that it had at the snapshot. Only the beginning of a program or library is there, because CRIU reads its
//! build id.

use std::collections::BTreeSet;
use std::io::Read;

use nix::sys::memfd::{MFdFlags, memfd_create};

use super::*;

/// CRIU looks for the build id in this much of a file (`BUILD_ID_MAP_SIZE`).
const BUILD_ID_WITHIN: u64 = 1 << 20;
/// How a program or library begins.
const ELF: [u8; 4] = *b"\x7fELF";

/// Puts stand-ins in the places of the files of the image that CRIU opens by these paths, and creates the missing ones
/// that the job only reads. For a view only: what the files have is lost.
pub(crate) fn stand_in(
    image: &Image,
    manifest: &Manifest,
    folder: &JobFolder,
    user: Option<&Identity>,
    opened: &BTreeSet<PathBuf>,
) -> Result<(), RollbackError> {
    let (maker, expiry) = (Maker::of(manifest, user), Expiry::of(manifest, folder));
    for file in &manifest.mapped_files {
        let Some(copy) = &file.copy else { continue };
        let content = copy.part.open(&image.dir).map_err(failed("read", image.dir.join(&copy.part).path()))?;
        with_rights(&file.path, user, || content::make_read(file, &content, maker))?;
    }
    // A deleted file with other names has an own name in the image, from which CRIU's link is made.
    let links: Vec<_> = manifest.saved_links.iter().filter(|link| opened.contains(link.link.as_path())).collect();
    let is_opened = |path: &Path| opened.contains(path) || links.iter().any(|link| *link.saved == *path);
    let is_written = |path: &Path| manifest.open_files.iter().any(|file| *file.path == *path);
    for link in links.iter().filter(|link| !is_written(&link.saved)) {
        // To make the link would copy the file, too.
        let _ = with_rights(&link.saved, user, || {
            let now = std::fs::symlink_metadata(&link.saved).map_err(failed("stat", &link.saved))?;
            put(&OpenFile { owner: link.owner, ..OpenFile::new(link.saved.clone(), now.size()) }, maker)
        });
    }
    let is_theirs = |file: &&OpenFile| {
        !is_of_the_store(file, manifest, folder) && moved::log_here(&file.path, manifest, folder).is_none()
    };
    for file in manifest.open_files.iter().filter(is_theirs).filter(|file| is_opened(&file.path)) {
        with_rights(&file.path, user, || {
            // Where the user may create no file, the file itself is put back: it is copied as far as the view has room.
            match put(file, maker) {
                Err(_) => put_one_back(file, None, Keeper::Beside(expiry), maker, false).map(drop),
                put => put,
            }
        })?;
    }
    Ok(())
}

fn put(file: &OpenFile, maker: Maker<'_>) -> Result<(), RollbackError> {
    let path = &*file.path;
    let place = Place::of(path, maker.trusted).map_err(Astray::at("open", path))?;
    let (wanted, head) = match place.find() {
        Ok(found) => {
            let now = found.metadata().map_err(failed("stat", path))?;
            maker.trusted.check_file(path, &now, file.owner)?;
            let owner = Some(Owner { uid: now.uid(), gid: now.gid() });
            let wanted = OpenFile { mode: Some(file.mode.unwrap_or_else(|| now.mode())), owner, ..file.clone() };
            (wanted, found.read().ok())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && can_be_made(file) => (file.clone(), None),
        Err(source) => return Err(failed("open", path)(source)),
    };
    let content = content_of(head, file.size).map_err(failed("create", path))?;
    content::make(&place, &wanted, &content, maker)
}

/// A sparse file of this size. If it is a program or library, it has its beginning.
fn content_of(present: Option<File>, size: u64) -> io::Result<File> {
    let mut made = File::from(memfd_create(c"stand-in", MFdFlags::MFD_CLOEXEC)?);
    let mut head = [0; ELF.len()];
    if let Some(mut present) = present.filter(|_| size >= head.len() as u64)
        && present.read_exact(&mut head).is_ok()
        && head == ELF
    {
        io::Write::write_all(&mut made, &head)?;
        io::copy(&mut present.take(BUILD_ID_WITHIN), &mut made)?;
    }
    made.set_len(size)?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::job_path;

    fn stand_in_for(content: &[u8], size: u64) -> (Vec<u8>, Metadata) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, content).unwrap();
        let before = std::fs::metadata(&path).unwrap();
        let file = OpenFile { mode: Some(0o100_640), ..OpenFile::new(job_path(&path), size) };
        put(&file, Maker::plain(true, Trusted::of(None))).unwrap();
        let after = std::fs::metadata(&path).unwrap();
        assert_ne!(before.ino(), after.ino(), "the file itself is not written to");
        assert_eq!((after.size(), after.mode(), after.uid()), (size, 0o100_640, before.uid()));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
        let mut head = vec![0; 8];
        let read = File::open(&path).unwrap().read(&mut head).unwrap();
        head.truncate(read);
        (head, after)
    }

    #[test]
    fn a_stand_in_has_the_size_and_rights_of_the_file_and_no_content() {
        let (head, metadata) = stand_in_for(b"rows of a database", 1 << 40);
        assert_eq!(head, [0; 8]);
        assert!(metadata.blocks() < 64, "{}", metadata.blocks());
        let (head, metadata) = stand_in_for(&[b"\x7fELF".as_slice(), &[7; 3 << 20]].concat(), 5 << 20);
        assert_eq!(head, b"\x7fELF\x07\x07\x07\x07");
        assert!(metadata.blocks() * 512 < 2 << 20, "{}", metadata.blocks());
        assert_eq!(stand_in_for(b"\x7fELF", 2).0, [0; 2]);
        assert!(stand_in_for(b"", 0).0.is_empty());
    }
}

//! The owner of a folder. The content of an image is run with the rights of whoever restores it.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::error::{Error, Result};
use rekindle_os::beneath::Beneath;

/// Write permission of group and others.
const OTHERS_WRITE: u32 = 0o022;

/// Refuses anything but a folder, and, as root, a folder that others can write to.
pub(super) fn check(dir: &Beneath) -> Result<()> {
    let failed = |source| Error::Read { path: dir.path().to_owned(), source };
    let meta = dir.metadata().map_err(failed)?;
    if meta.is_dir() {
        judge(dir.path(), meta.uid(), meta.mode(), nix::unistd::geteuid().as_raw())?;
    }
    dir.folder().map(drop).map_err(failed)
}

fn judge(path: &Path, owner: u32, mode: u32, we: u32) -> Result<()> {
    if we != 0 {
        return Ok(());
    }
    if owner != 0 {
        return Err(Error::OtherOwner { path: path.to_owned(), owner });
    }
    if mode & OTHERS_WRITE != 0 {
        return Err(Error::OthersCanWrite(path.to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_careful_and_others_know_what_they_do() {
        let path = Path::new("/store");
        let owned = judge(path, 0, 0o040_755, 0);
        assert!(owned.is_ok());
        for mode in [0o040_720, 0o040_702, 0o041_777] {
            let error = judge(path, 0, mode, 0).unwrap_err().to_string();
            assert!(error.contains("chmod 0700 '/store'"), "{error}");
            assert!(judge(path, 1000, mode, 1000).is_ok());
        }
        let error = judge(path, 1000, 0o040_700, 0).unwrap_err().to_string();
        assert!(error.contains("user 1000") && error.contains("chown root '/store'"), "{error}");
    }
}

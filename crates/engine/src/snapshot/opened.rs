//! The folder of CRIU's images, opened for CRIU.
//!
//! An image in memory is in a tmpfs of root's, and CRIU opens its folder by the path. One on the disk is in the store,
//! where others may be able to put a link or a device in the place of any file or folder at any moment: CRIU, as root,
//! would write through it. So CRIU gets a mount of that folder in which the kernel follows no link and opens no device
//! ([`shielded`]). What remains: who can make hard links on the store's own file system can have CRIU overwrite another
//! file of it.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use rekindle_os::beneath::Beneath;
use rekindle_os::shielded::shielded;
use rekindle_store::JobFolder;

/// The folder cannot be given to CRIU.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It is not there, or is not what it should be.
    #[error("cannot open the folder of CRIU's images {}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The kernel cannot protect CRIU from links.
    #[error(
        "CRIU could be led out of {} by links, and the kernel cannot prevent that (mount_setattr, Linux 5.12). Set \
        snapshot.staging = \"ram\" and let it have enough memory: CRIU then does not work in the store", path.display()
    )]
    Mount {
        /// The folder.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
}

/// Opens the folder for CRIU, if it is in the job's folder in the store.
///
/// # Errors
/// When something else than a folder is there, or on its path; when the kernel has no such mounts.
pub(crate) fn opened(folder: &JobFolder, images: &Beneath) -> Result<Option<OwnedFd>, Error> {
    let path = images.path();
    if !path.starts_with(folder.path()) {
        return Ok(None);
    }
    let found = images.folder().map_err(|source| Error::Folder { path: path.to_owned(), source })?;
    shielded(&found).map(Some).map_err(|source| Error::Mount { path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_os::beneath::Owners;
    use rekindle_store::{Access, Store};

    #[test]
    fn a_folder_in_the_store_is_not_one_behind_a_link() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"train".parse().unwrap()).unwrap();
        let memory = Beneath::root(dir.path(), Owners::Any).unwrap();
        assert!(opened(&folder, &memory).unwrap().is_none(), "in memory");
        let criu = folder.dir().join("slots/0/criu");
        assert!(matches!(opened(&folder, &criu), Err(Error::Folder { .. })));
        std::fs::create_dir_all(&criu).unwrap();
        assert!(opened(&folder, &criu).unwrap().is_some());
        let elsewhere = dir.path().join("elsewhere");
        std::fs::create_dir_all(elsewhere.join("criu")).unwrap();
        std::fs::remove_dir_all(folder.path().join("slots/0")).unwrap();
        std::os::unix::fs::symlink(&elsewhere, folder.path().join("slots/0")).unwrap();
        assert!(matches!(opened(&folder, &criu), Err(Error::Folder { .. })));
    }
}

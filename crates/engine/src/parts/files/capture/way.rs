//! How files of the job are reached.
//!
//! With `job.user`, they are with the rights of that user. Without it, they are with ours. The kernel gives paths without
//! links, but the owner of a folder can put a link in the place of another one, to a folder that only we may read: the
//! content of a file there would be in the image, and a restore would write it to a file of that owner. So then no link
//! is followed but those of the supervisor's user and root, as at a restore (`place`).

use std::cell::RefCell;
use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::super::place::{Astray, Trusted, find_below, reached};
use crate::launch::identity::name_of;
use rekindle_os::regular::{self, Folder, Found, Links};

/// The way of one thread.
pub(super) struct Way {
    /// The root folder of the job, and whose links are followed. `None` with the rights of the job's user, which the path
    /// through /proc needs rights over the reaper for: the job's mounts are ours.
    root: Option<(File, Trusted)>,
    /// The folder that was found last: most files are in the same one as the file before.
    last: RefCell<Option<(PathBuf, File)>>,
}

impl Way {
    /// With the rights that this thread has from the job's user.
    pub(super) fn of_user() -> Way {
        Way { root: None, last: RefCell::default() }
    }

    /// With our rights, through the root of the tree.
    pub(super) fn of_job(root: i32) -> io::Result<Way> {
        let flags = libc::O_PATH | libc::O_DIRECTORY;
        let root = File::options().read(true).custom_flags(flags).open(format!("/proc/{root}/root"))?;
        Ok(Way { root: Some((root, Trusted::of(None))), last: RefCell::default() })
    }

    /// What is at a path. A link at its end is found itself.
    pub(super) fn find(&self, path: &Path) -> io::Result<Found> {
        match (&self.root, path.parent(), path.file_name()) {
            (Some(root), Some(above), Some(name)) => self.within(root, above, |above| regular::find_in(above, name)),
            (Some((root, trusted)), ..) => Ok(find_below(root, path, *trusted).map_err(led_astray)?.into()),
            (None, ..) => regular::find(path, Links::Refuse),
        }
    }

    /// Its metadata.
    pub(super) fn metadata(&self, path: &Path) -> io::Result<Metadata> {
        self.find(path)?.metadata()
    }

    /// Opens a regular file for reading.
    pub(super) fn open(&self, path: &Path) -> io::Result<File> {
        self.find(path)?.read()
    }

    /// Finds a folder; a link to it is followed.
    pub(super) fn folder(&self, path: &Path) -> io::Result<Folder> {
        match &self.root {
            Some((root, trusted)) => Folder::try_from(find_below(root, path, *trusted).map_err(led_astray)?),
            None => Folder::at(path),
        }
    }

    /// Works on the folder that a file is in, by a path of it.
    pub(super) fn beside<T>(&self, path: &Path, work: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
        let above = path.parent().unwrap_or(path);
        match &self.root {
            Some(root) => self.within(root, above, |above| work(&reached(above))),
            None => work(above),
        }
    }

    fn within<T>(
        &self,
        (root, trusted): &(File, Trusted),
        folder: &Path,
        work: impl FnOnce(&File) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut last = self.last.borrow_mut();
        let known = last.take().filter(|(path, _)| path == folder);
        let (path, found) = match known {
            Some(known) => known,
            None => (folder.to_path_buf(), find_below(root, folder, *trusted).map_err(led_astray)?),
        };
        let done = work(&found);
        *last = Some((path, found));
        done
    }
}

fn led_astray(astray: Astray) -> io::Error {
    match astray {
        Astray::Io(error) => error,
        Astray::Link { link, owner } => io::Error::other(format!(
            "the path leads through {}, a symbolic link of user {}",
            link.display(),
            name_of(owner)
        )),
    }
}

//! A replica in a folder (`file://`): what is in it, and which links are followed.
//!
//! The folder of the address is found through whatever links lead to it: the user named it. Inside, a symbolic link is
//! followed only if root or the user of this process owns it, such as one to a larger disk. Another user may have put one
//! there to have our files written, read or removed somewhere else: it is an error that names it. So is a folder that
//! cannot be entered, or a link that leads nowhere: what is not mounted must not look like an empty replica.
//!
//! This protects from links that are there. Who can change the folder at any moment can replace one after it was looked
//! at, and can do as much by changing the files; docs/store.md says what a key is for.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use chrono::{DateTime, Utc};

use rekindle_os::identity;

/// The folder of a job in a replica.
#[derive(Debug)]
pub(super) struct Folder {
    /// The folder of the address, without links.
    base: PathBuf,
    /// The job.
    name: String,
}

/// A file in it.
#[derive(Debug)]
pub(super) struct Entry {
    /// Its path below the folder of the job.
    pub(super) name: String,
    pub(super) size: u64,
    pub(super) modified: DateTime<Utc>,
}

impl Folder {
    /// The folder of this job below `base`, which must exist.
    pub(super) fn open(base: &Path, name: &str) -> io::Result<Folder> {
        Ok(Folder { base: fs::canonicalize(base)?, name: name.to_owned() })
    }

    /// The folder itself.
    pub(super) fn path(&self) -> PathBuf {
        self.base.join(&self.name)
    }

    /// Whether it is this folder.
    pub(super) fn is(&self, other: &Path) -> bool {
        let id = |path: &Path| fs::metadata(path).ok().map(|meta| (meta.dev(), meta.ino()));
        id(&self.path()).is_some_and(|ours| id(other) == Some(ours))
    }

    /// Creates the folder, which others cannot enter, as in the store. One that exists must not be another user's.
    pub(super) fn create(&self) -> Result<(), String> {
        let path = self.path();
        match fs::DirBuilder::new().mode(0o700).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(&path, &error)),
            Err(_) => self.check_owner(),
            Ok(()) => Ok(()),
        }
    }

    /// Refuses the folder of another user, who could read what is written there. Where all files have the same owner, as
    /// on some network file systems, that is the owner of the address, too.
    fn check_owner(&self) -> Result<(), String> {
        let path = self.path();
        let owner = |path: &Path| look(path).map(|meta| meta.map(|meta| meta.uid()));
        let (Some(owner), above) = (owner(&path)?, owner(&self.base)?) else { return Ok(()) };
        match is_trusted(owner) || Some(owner) == above {
            true => Ok(()),
            false => Err(format!(
                "{} belongs to user {owner}, who could read the images: remove it, or make it root's",
                path.display()
            )),
        }
    }

    /// What has this name; `None` if there is nothing.
    pub(super) fn find(&self, name: &str) -> Result<Option<Metadata>, String> {
        let mut path = self.path();
        let mut found = look(&path)?;
        for part in name.split('/').filter(|part| !part.is_empty()) {
            if found.is_none() {
                return Ok(None);
            }
            path.push(part);
            found = look(&path)?;
        }
        Ok(found)
    }

    /// Checks the links on the way to a file that is written or removed. The file itself is not followed.
    pub(super) fn check_way(&self, name: &str) -> Result<(), String> {
        self.find(name.rsplit_once('/').map_or("", |(folder, _)| folder)).map(drop)
    }

    /// The files where the layout has some: beside `job.json`, in `packs/`, and in the folders of images.
    pub(super) fn list(&self) -> Result<Vec<Entry>, String> {
        Ok(self.files()?.into_iter().filter(|entry| !is_unfinished(&entry.name)).collect())
    }

    /// Removes files of interrupted uploads, if they are old.
    pub(super) fn sweep(&self, is_old: &dyn Fn(DateTime<Utc>) -> bool) -> Result<(), String> {
        let unfinished = |entry: &Entry| is_unfinished(&entry.name) && is_old(entry.modified);
        for entry in self.files()?.into_iter().filter(unfinished) {
            let path = self.path().join(&entry.name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&path, &error)),
                _ => {}
            }
        }
        Ok(())
    }

    fn files(&self) -> Result<Vec<Entry>, String> {
        let (path, mut found) = (self.path(), Vec::new());
        files(&path, "", &mut found)?;
        files(&path.join("packs"), "packs/", &mut found)?;
        let images = path.join("images");
        for name in names(&images)? {
            let image = images.join(&name);
            if is_dir(&image)? {
                files(&image, &format!("images/{name}/"), &mut found)?;
            }
        }
        Ok(found)
    }
}

/// Adds the regular files of a folder, which may not exist.
fn files(folder: &Path, prefix: &str, found: &mut Vec<Entry>) -> Result<(), String> {
    for name in names(folder)? {
        let path = folder.join(&name);
        let Some(meta) = look(&path)? else { continue };
        if meta.is_file() {
            let modified = meta.modified().map_err(|error| failed(&path, &error))?.into();
            found.push(Entry { name: format!("{prefix}{name}"), size: meta.len(), modified });
        }
    }
    Ok(())
}

fn is_dir(path: &Path) -> Result<bool, String> {
    Ok(look(path)?.is_some_and(|meta| meta.is_dir()))
}

/// Whether the client has not given the file its name yet: `NAME#1`.
fn is_unfinished(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
}

/// The names in a folder, which may not exist. Those that are not UTF-8 are nobody's.
fn names(folder: &Path) -> Result<Vec<String>, String> {
    if look(folder)?.is_none() {
        return Ok(Vec::new());
    }
    let entries = fs::read_dir(folder).and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let entries = entries.map_err(|error| failed(folder, &error))?;
    Ok(entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok()).collect())
}

/// What is there, through a link that may be followed; `None` if there is nothing.
fn look(path: &Path) -> Result<Option<Metadata>, String> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(path, &error)),
    };
    check_link(path, &meta)?;
    match meta.is_symlink() {
        true => fs::metadata(path).map(Some).map_err(|error| failed(path, &error)),
        false => Ok(Some(meta)),
    }
}

fn check_link(path: &Path, meta: &Metadata) -> Result<(), String> {
    match meta.is_symlink() && !is_trusted(meta.uid()) {
        true => Err(format!(
            "{} is a symbolic link of user {}: inside a replica only those of root and of the user of rekindle are \
            followed. Remove it",
            path.display(),
            meta.uid()
        )),
        false => Ok(()),
    }
}

/// Whether it is root, or the user of this process.
fn is_trusted(user: u32) -> bool {
    user == 0 || user == identity::effective_user()
}

fn failed(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

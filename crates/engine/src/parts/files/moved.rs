//! The job's output: files that CRIU must not open itself.
//!
//! CRIU opens files by their path, with the flags that they had. Files of the job's log folder are given to it as
//! descriptors with O_APPEND instead:
//! - The job's output always, as it is open here ([`Files::identities`]): others may have put a link at its path. The one
//!   exception is output that the job has opened for reading too, as itself only root can: it would get a descriptor
//!   that it cannot read.
//! - All, if the store was at another path when the image was made: the job writes to this store's log folder, where its
//!   output is followed and rotated, whatever is at the old path now.
//! - All for which the job has cleared O_APPEND (much code does so by mistake with `fcntl(1, F_SETFL, O_NONBLOCK)`): CRIU
//!   would compare the size, which a rotation changes, and the job would go on at an offset of a file that was cut since.
//!
//! Other files of rekindle are put back at the path in the image ([`Recreate`](rekindle_store::manifest::Recreate)).

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::launch::output::Files;
use rekindle_criu::Instead;
use rekindle_os::beneath::Beneath;
use rekindle_store::manifest::OpenFile;
use rekindle_store::{JobFolder, Manifest};

/// Where a file of the job's log folder is here; None for every other file.
pub(crate) fn log_here(path: &Path, manifest: &Manifest, folder: &JobFolder) -> Option<Beneath> {
    let (parent, name) = (path.parent()?, path.file_name()?);
    let here = folder.log_dir();
    let is_log = here == *parent || manifest.log.as_ref().is_some_and(|log| *log == *parent);
    is_log.then(|| here.join(name))
}

/// Which files of the job's log folder are given to CRIU as descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logs {
    /// The output, and those that are elsewhere now, or are no longer open for appending only.
    Needed,
    /// All: they belong to root, and CRIU has the rights of the job's user.
    All,
}

/// The files that the job gets instead of those in the image. It has `read` these itself.
///
/// # Errors
/// The path of a file that cannot be given, and why.
pub(crate) fn instead(
    manifest: &Manifest,
    folder: &JobFolder,
    output: (&Files, [(u64, u64); 2]),
    read: impl Fn(&Path) -> bool,
    which: Logs,
) -> Result<Vec<Instead>, (Beneath, io::Error)> {
    let (files, [out, err]) = output;
    let given = |file: &OpenFile| {
        let now = log_here(&file.path, manifest, folder)?;
        let output = [(&files.stdout, out), (&files.stderr, err)].into_iter().find(|(path, _)| **path == now);
        let is_needed = which == Logs::All
            || now != *file.path.as_path()
            || !file.append
            || (output.is_some() && !read(&file.path));
        let is = || match output {
            Some((_, is)) => Ok(is),
            None => now.read()?.metadata().map(|metadata| (metadata.dev(), metadata.ino())),
        };
        let give = |is| Instead { then: file.path.to_path_buf(), now: now.path().to_owned(), is };
        is_needed.then(|| is().map(give).map_err(|error| (now.clone(), error)))
    };
    manifest.open_files.iter().filter_map(given).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::output::Bounds;
    use crate::samples::job_path;
    use rekindle_store::{Access, Store};

    #[test]
    fn output_and_what_is_of_another_store_is_given_anew() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let open = |path: &Path| OpenFile { append: true, position: 1, ..OpenFile::new(job_path(path), 1) };
        let log = |name: &str| folder.log_dir().join(name);
        let (ours, other) = (log("stderr.log"), log("x"));
        let mut manifest = Manifest {
            open_files: [Path::new("/old/j/log/stdout.log"), ours.path(), Path::new("/data/log/x"), other.path()]
                .map(open)
                .into(),
            log: Some(job_path("/old/j/log")),
            ..crate::samples::manifest()
        };
        let files = Files::create(&folder.log_dir(), Bounds::default()).unwrap();
        std::fs::write(&other, "").unwrap();
        let output = (&files, files.identities().unwrap());
        let given = |manifest: &Manifest, read: bool, which| {
            let given = instead(manifest, &folder, output, |_| read, which).unwrap();
            for file in &given {
                let metadata = std::fs::metadata(&file.now).unwrap();
                assert_eq!(file.is, (metadata.dev(), metadata.ino()), "{file:?}");
            }
            given.into_iter().map(|file| (file.then, file.now)).collect::<Vec<_>>()
        };
        let pair = |then: &Path, now: &Beneath| (then.to_owned(), now.path().to_owned());
        let old = pair(Path::new("/old/j/log/stdout.log"), &log("stdout.log"));
        let (own, more) = (pair(ours.path(), &ours), pair(other.path(), &other));
        assert_eq!(given(&manifest, false, Logs::Needed), [old.clone(), own.clone()]);
        assert_eq!(given(&manifest, true, Logs::Needed), std::slice::from_ref(&old));
        assert_eq!(given(&manifest, true, Logs::All), [old.clone(), own.clone(), more.clone()]);
        // The job has cleared O_APPEND.
        manifest.open_files[1].append = false;
        assert_eq!(given(&manifest, true, Logs::Needed), [old.clone(), own.clone()]);
        assert_eq!(log_here(ours.path(), &manifest, &folder), Some(ours.clone()));
        manifest.log = None;
        assert_eq!(given(&manifest, false, Logs::Needed), std::slice::from_ref(&own));
        // Somebody has put a link there.
        std::fs::remove_file(&other).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &other).unwrap();
        let (path, error) = instead(&manifest, &folder, output, |_| false, Logs::All).unwrap_err();
        assert!(path == other && rekindle_os::beneath::Unexpected::in_error(&error).is_some(), "{error}");
    }
}

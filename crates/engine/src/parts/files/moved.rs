//! The job's output: files that CRIU must not open itself.
//!
//! CRIU opens files by their path, with the flags that they had. Files of the job's log folder are given to it as
//! descriptors with O_APPEND instead, if the store was at another path when the image was made: the job writes to this
//! store's log folder, where its output is followed and rotated, whatever is at the old path now. The same is done if the
//! job has cleared O_APPEND (much code does so by mistake with `fcntl(1, F_SETFL, O_NONBLOCK)`): CRIU would compare the
//! size, which a rotation changes, and the job would go on at an offset of a file that was cut since. Other
//! files of rekindle are put back at the path in the image ([`Recreate`](rekindle_store::manifest::Recreate)).

use std::path::{Path, PathBuf};

use crate::launch::reaper;
use rekindle_criu::Instead;
use rekindle_store::manifest::OpenFile;
use rekindle_store::{JobFolder, Manifest};

/// Where a file of the job's log folder is here; None for every other file.
pub(crate) fn log_here(path: &Path, manifest: &Manifest, folder: &JobFolder) -> Option<PathBuf> {
    let (parent, name) = (path.parent()?, path.file_name()?);
    let here = folder.log_dir();
    let was = |bin: &Path| bin.parent().is_some_and(|job| here.file_name().is_some_and(|log| parent == job.join(log)));
    // The image's reaper is in the job's folder, or in the folder of its first store if it has moved before.
    let ours = manifest.recreate.iter().filter(|file| reaper::is_named(&file.path));
    let is_log = parent == here || ours.filter_map(|file| file.path.parent()).any(was);
    is_log.then(|| here.join(name))
}

/// Which files of the job's log folder are given to CRIU as descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Logs {
    /// Those that are elsewhere now, or are no longer open for appending only.
    Needed,
    /// All: they belong to root, and CRIU has the rights of the job's user.
    All,
}

/// The files that the job gets instead of those in the image.
pub(crate) fn instead(manifest: &Manifest, folder: &JobFolder, which: Logs) -> Vec<Instead> {
    let given = |file: &OpenFile| {
        let now = log_here(&file.path, manifest, folder)?;
        let is_needed = which == Logs::All || now != *file.path || !file.append;
        is_needed.then(|| Instead { then: file.path.to_path_buf(), now })
    };
    manifest.open_files.iter().filter_map(given).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{job_path, part_path};
    use rekindle_store::manifest::Recreate;
    use rekindle_store::{Access, Store};

    #[test]
    fn only_output_of_another_store_is_given_anew() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let open = |path: &Path| OpenFile { append: true, position: 1, ..OpenFile::new(job_path(path), 1) };
        let reaper = |path: &str| Recreate { path: job_path(path), mode: 0o755, part: part_path("files/r") };
        let ours = folder.log_dir().join("stderr.log");
        let mut manifest = Manifest {
            open_files: vec![open(Path::new("/old/j/log/stdout.log")), open(&ours), open(Path::new("/data/log/x"))],
            recreate: vec![reaper("/older/j/bin/reaper-1"), reaper("/old/j/bin/reaper-2")],
            ..crate::samples::manifest()
        };
        let now = folder.log_dir().join("stdout.log");
        let old = Instead { then: "/old/j/log/stdout.log".into(), now };
        assert_eq!(instead(&manifest, &folder, Logs::Needed), std::slice::from_ref(&old));
        let own = Instead { then: ours.clone(), now: ours.clone() };
        assert_eq!(instead(&manifest, &folder, Logs::All), [old.clone(), own.clone()]);
        // The job has cleared O_APPEND.
        manifest.open_files[1].append = false;
        for which in [Logs::Needed, Logs::All] {
            assert_eq!(instead(&manifest, &folder, which), [old.clone(), own.clone()]);
        }
        assert_eq!(log_here(&ours, &manifest, &folder), Some(ours.clone()));
        manifest.open_files[1].append = true;
        manifest.recreate.clear();
        assert_eq!(instead(&manifest, &folder, Logs::Needed), []);
    }
}

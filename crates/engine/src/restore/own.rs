//! Checks where a restore writes rekindle's own files: programs that the job has mapped, and GPU memory that the driver
//! reads.
//!
//! The image names the paths, and the image can come from somebody else. So only names that rekindle itself creates are
//! accepted, in the folders that this rekindle uses, or in folders of the same form that a job had on another machine
//! or below another store. These folders, and all above them, must be writable by root only. The mode of such a file is
//! ours to decide, not the image's.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::{Error, Request};
use crate::launch::mapped;
use rekindle_store::Manifest;
use rekindle_store::manifest::Landing;

/// The parts of the rule, for messages.
const PROGRAMS: &str = "a restore writes only rekindle's own programs, to its own folders";
const LANDINGS: &str = "a restore writes GPU memory only to rekindle's own staging folders";

/// Whether all files of ours that the image names may be put where it says. Touches nothing.
pub(super) fn check(manifest: &Manifest, request: &Request<'_>) -> Result<(), Error> {
    let area = request.unpacking.staging;
    let here = [Some(request.folder.bin_dir()), area.map(|area| area.path().to_path_buf())];
    for file in &manifest.recreate {
        let path = file.path.as_path();
        let named = mapped::is_named(path);
        let folder = path.parent().unwrap_or(path);
        let job = manifest.job.as_str();
        let result = match named {
            false => Err(format!("is not the name of a rekindle program; {PROGRAMS}")),
            true if here.iter().flatten().any(|here| here == folder) => Ok(()),
            true if is_bin(folder, job) || is_area(folder, job) => is_roots(folder),
            true => Err(format!("is not in a folder of this job; {PROGRAMS}")),
        };
        result.map_err(|why| Error::NotOurs { path: path.to_path_buf(), why })?;
    }
    for landing in &manifest.landing {
        let result = check_landing(landing, manifest, area.map(|area| area.landing_dir()).as_deref());
        result.map_err(|why| Error::NotOurs { path: landing.path.to_path_buf(), why })?;
    }
    Ok(())
}

fn check_landing(landing: &Landing, manifest: &Manifest, here: Option<&Path>) -> Result<(), String> {
    let path = landing.path.as_path();
    let folder = path.parent().unwrap_or(path);
    if landing.pid <= 0 || path.file_name().and_then(|name| name.to_str()) != Some(&landing.pid.to_string()) {
        return Err(format!("is not named after process {}; {LANDINGS}", landing.pid));
    }
    if here == Some(folder) {
        return Ok(());
    }
    let is_ours = folder.ends_with("landing") && folder.parent().is_some_and(|it| is_area(it, manifest.job.as_str()));
    if is_ours { is_roots(folder) } else { Err(format!("is not in a staging folder of this job; {LANDINGS}")) }
}

/// `STORE/JOB/bin`.
fn is_bin(folder: &Path, job: &str) -> bool {
    folder.ends_with(Path::new(job).join("bin")) && folder.components().count() > 3
}

/// `BASE/JOB-HASH`, see [`JobFolder::place_name`](rekindle_store::JobFolder::place_name).
fn is_area(folder: &Path, job: &str) -> bool {
    let name = folder.file_name().and_then(|name| name.to_str());
    let hash = name.and_then(|name| name.strip_prefix(job)).and_then(|rest| rest.strip_prefix('-'));
    hash.is_some_and(|hash| hash.len() == 8 && hash.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)))
}

/// Checks that only root can change the content of the folder, or replace it. Missing parts of the path are created by
/// root.
fn is_roots(folder: &Path) -> Result<(), String> {
    let there = folder.ancestors().find(|path| fs::symlink_metadata(path).is_ok());
    let there = there.ok_or("is in a folder that cannot be inspected")?;
    let real = fs::canonicalize(there).map_err(|error| format!("is in a folder that cannot be inspected: {error}"))?;
    for path in there.ancestors().chain(real.ancestors()) {
        let place = if path == folder || (path == real && there == folder) { Place::Last } else { Place::Above };
        let meta = fs::symlink_metadata(path).map_err(|error: io::Error| {
            format!("is in a folder that cannot be inspected: {}: {error}", path.display())
        })?;
        judge(&meta, place, nix::unistd::geteuid().as_raw())
            .map_err(|why| format!("is in {}, {why}", path.display()))?;
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Above,
    Last,
}

fn judge(meta: &fs::Metadata, place: Place, we: u32) -> Result<(), String> {
    const OTHERS_WRITE: u32 = 0o022;
    const STICKY: u32 = 0o1000;
    if meta.uid() != 0 && meta.uid() != we {
        return Err(format!("which belongs to user {}: that user can replace the file", meta.uid()));
    }
    if meta.is_symlink() {
        return Ok(());
    }
    // In a sticky folder nobody can remove root's files.
    let is_safe = meta.mode() & OTHERS_WRITE == 0 || (place == Place::Above && meta.mode() & STICKY != 0);
    if is_safe { Ok(()) } else { Err("which others can write".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_folders_of_the_form_that_we_make() {
        for good in ["/var/lib/rekindle/train/bin", "/s/x/train/bin"] {
            assert!(is_bin(Path::new(good), "train"), "{good}");
        }
        for bad in ["/bin", "/train/bin", "/usr/bin", "/var/lib/rekindle/other/bin", "/s/mytrain/bin", "/etc/cron.d"] {
            assert!(!is_bin(Path::new(bad), "train"), "{bad}");
        }
        assert!(is_area(Path::new("/run/rekindle/train-0123abcd"), "train"));
        for bad in ["/run/rekindle/train", "/run/train-0123ABCD", "/run/train-0123abc", "/run/other-0123abcd", "/"] {
            assert!(!is_area(Path::new(bad), "train"), "{bad}");
        }
    }

    #[test]
    fn a_folder_that_another_can_change_is_not_ours() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (mode, path) =
            (|path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap(), dir.path());
        let bin = path.join("store/train/bin");
        assert_eq!(is_roots(&bin), Ok(()), "what is not there is made");
        fs::create_dir_all(&bin).unwrap();
        for folder in [path, &path.join("store"), &path.join("store/train"), &bin] {
            mode(folder, 0o755);
        }
        assert_eq!(is_roots(&bin), Ok(()));
        for folder in [path.join("store"), path.join("store/train"), bin.clone()] {
            mode(&folder, 0o775);
            let why = is_roots(&bin).unwrap_err();
            assert!(why.contains("others can write") && why.contains(folder.to_str().unwrap()), "{why}");
            mode(&folder, 0o755);
            std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
            assert!(is_roots(&bin).unwrap_err().contains("user 12345"));
            std::os::unix::fs::chown(&folder, Some(0), None).unwrap();
        }
        mode(&bin, 0o1777);
        assert!(is_roots(&bin).is_err(), "anybody may add a file there");
        mode(&bin, 0o755);
        // A path through a link is judged by its target.
        fs::create_dir(path.join("users")).unwrap();
        fs::rename(path.join("store/train"), path.join("users/train")).unwrap();
        std::os::unix::fs::symlink(path.join("users/train"), path.join("store/train")).unwrap();
        assert_eq!(is_roots(&bin), Ok(()));
        mode(&path.join("users"), 0o777);
        assert!(is_roots(&bin).is_err());
    }

    #[test]
    fn a_landing_file_has_the_name_of_its_process() {
        let manifest = crate::samples::manifest();
        let job = manifest.job.clone();
        let landing = |pid: i32, path: &str| Landing {
            pid,
            path: path.replace("JOB", job.as_str()).parse().unwrap(),
            part: format!("gpu/{pid}").parse().unwrap(),
            bytes: 1,
        };
        let here = Path::new("/memory/x/landing");
        let check = |pid, path: &str| check_landing(&landing(pid, path), &manifest, Some(here));
        assert_eq!(check(7, "/memory/x/landing/7"), Ok(()));
        assert_eq!(check(7, "/nowhere-at-all/JOB-0123abcd/landing/7"), Ok(()));
        for (pid, bad) in [
            (7, "/memory/x/landing/8"),
            (7, "/memory/x/landing/7/7"),
            (7, "/etc/cron.d/7"),
            (7, "/nowhere/JOB-0123abcd/slots/7"),
            (-7, "/memory/x/landing/-7"),
        ] {
            assert!(check(pid, bad).is_err(), "{bad}");
        }
    }
}

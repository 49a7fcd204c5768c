//! Checks where a restore writes rekindle's own files: programs that the job has mapped, and GPU memory that the driver
//! reads.
//!
//! The image names the paths, and the image can come from somebody else. So only names that rekindle itself creates are
//! accepted, in the folders that this rekindle uses, or in folders of the same form that a job had on another machine
//! or below another store. These folders, and all above them, must be writable by root only. The mode of such a file is
//! ours to decide, not the image's.

use std::path::Path;

use super::{Error, Request};
use crate::launch::{mapped, work};
use rekindle_os::beneath::Beneath;
use rekindle_store::Manifest;
use rekindle_store::manifest::Landing;

/// The parts of the rule, for messages.
const PROGRAMS: &str = "a restore writes only rekindle's own programs, to its own folders";
const LANDINGS: &str = "a restore writes GPU memory only to rekindle's own staging folders";

/// Whether all files of ours that the image names may be put where it says. Touches nothing.
pub(super) fn check(manifest: &Manifest, request: &Request<'_>) -> Result<(), Error> {
    let area = request.unpacking.staging;
    let here = request.own.work.bin();
    for file in &manifest.recreate {
        let result = check_program(&file.path, &here, manifest.job.as_str());
        result.map_err(|why| Error::NotOurs { path: file.path.to_path_buf(), why })?;
    }
    for landing in &manifest.landing {
        let result = check_landing(landing, manifest, area.map(|area| area.landing_dir()).as_ref().map(Beneath::path));
        result.map_err(|why| Error::NotOurs { path: landing.path.to_path_buf(), why })?;
    }
    Ok(())
}

/// `here` is the folder of programs of this run.
fn check_program(path: &Path, here: &Path, job: &str) -> Result<(), String> {
    let folder = path.parent().unwrap_or(path);
    match mapped::is_named(path) {
        false => Err(format!("is not the name of a rekindle program; {PROGRAMS}")),
        true if folder == here => Ok(()),
        true if work::is_bin(folder, job) => work::is_roots(folder),
        true if is_of_before(folder, job) => Err(
            "is in a store: the image was made by a version of rekindle before the first release. Finish the job with \
            that version, or start it from the beginning with --fresh"
                .into(),
        ),
        true => Err(format!("is not in a folder of this job; {PROGRAMS}")),
    }
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
    if is_ours { work::is_roots(folder) } else { Err(format!("is not in a staging folder of this job; {LANDINGS}")) }
}

/// `BASE/JOB-HASH`, see [`JobFolder::place_name`](rekindle_store::JobFolder::place_name).
fn is_area(folder: &Path, job: &str) -> bool {
    folder.file_name().and_then(|name| name.to_str()).is_some_and(|name| work::is_place(name, job))
}

/// `STORE/JOB/bin`, where versions before the first release had the programs.
fn is_of_before(folder: &Path, job: &str) -> bool {
    folder.ends_with(Path::new(job).join("bin"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_folders_of_the_form_that_we_make() {
        assert!(is_area(Path::new("/run/rekindle/train-0123abcd"), "train"));
        for bad in ["/run/rekindle/train", "/run/train-0123ABCD", "/run/train-0123abc", "/run/other-0123abcd", "/"] {
            assert!(!is_area(Path::new(bad), "train"), "{bad}");
        }
    }

    #[test]
    fn programs_are_only_put_back_into_a_work_folder_of_root() {
        let hash = blake3::hash(b"x").to_hex();
        let name = format!("reaper-{}", &hash[..16]);
        let here = Path::new("/run/rekindle/train-0123abcd.run/bin");
        let check = |path: &str| check_program(&Path::new(path).join(&name), here, "train");
        assert_eq!(check("/run/rekindle/train-0123abcd.run/bin"), Ok(()));
        assert_eq!(check("/nowhere-at-all/train-89abcdef.run/bin"), Ok(()), "of another machine");
        let why = check("/var/lib/rekindle/train/bin").unwrap_err();
        assert!(why.contains("before the first release") && why.contains("--fresh"), "{why}");
        for bad in ["/usr/bin", "/run/rekindle/other-0123abcd.run/bin", "/run/rekindle/train-0123abcd/bin"] {
            assert!(check(bad).unwrap_err().contains("not in a folder of this job"), "{bad}");
        }
        let named = check_program(&here.join("sh"), here, "train").unwrap_err();
        assert!(named.contains("not the name of a rekindle program"), "{named}");
        if nix::unistd::geteuid().is_root() {
            let dir = tempfile::tempdir().unwrap();
            std::os::unix::fs::chown(dir.path(), Some(12345), None).unwrap();
            let why = check(dir.path().join("train-0123abcd.run/bin").to_str().unwrap()).unwrap_err();
            assert!(why.contains("user 12345"), "{why}");
        }
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

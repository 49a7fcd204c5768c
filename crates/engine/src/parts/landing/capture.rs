//! Landing files: the files to which the driver writes the device memory of a process.
//!
//! For the checkpoint each CUDA process gets a file of the slot, under the name that its interposer looks for. The
//! driver's mapping is then a mapping of that file: CRIU stores only its path, and the file is the image of the GPU
//! memory. The name exists from before the checkpoint until the driver has read the file back. At any other time the
//! interposer does not change a process's mappings.
//!
//! The process's mappings show whether it used the file. A program without the interposer (static, set-user-ID) did
//! not, and its device memory is in CRIU's page files.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::shares;
use rekindle_os::{maps, parallel, process};
use rekindle_store::JobPath;
use rekindle_store::failed;
use rekindle_store::manifest::Landing;
use rekindle_store::staging::{self, Area, Filling};

/// A CUDA process that may use a landing file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lander {
    /// Its pid as it sees itself.
    pub(crate) inner: i32,
    /// Its pid as we see it.
    pub(crate) outer: i32,
    /// Expected bytes of device memory.
    pub(crate) bytes: u64,
}

/// The names under which interposers find their files. They are removed when this is dropped.
#[derive(Debug, Default)]
pub(crate) struct Armed {
    files: Vec<(Lander, PathBuf)>,
}

/// What came of the landing files, once the device memory is in them.
#[derive(Debug, Default)]
pub(crate) struct Landed {
    /// The files that were used.
    pub(crate) taken: Vec<Landing>,
    /// The processes that did not use their file, by pid as they see themselves.
    pub(crate) refused: Vec<i32>,
}

/// The processes and the expected sizes of their files.
pub(crate) fn sizes(landers: &[Lander]) -> Vec<(i32, u64)> {
    landers.iter().map(|lander| (lander.inner, lander.bytes)).collect()
}

/// Prepares the files and gives them their names.
pub(crate) fn arm(area: &Area, slot: &Filling, landers: &[Lander]) -> Result<Armed, staging::Error> {
    let mut armed = Armed::default();
    let cpus: Vec<(u64, Option<String>)> =
        landers.iter().map(|lander| (lander.bytes, process::status(lander.outer, "Cpus_allowed"))).collect();
    for ((lander, file), own) in landers.iter().zip(slot.landing_files(&sizes(landers))?).zip(&cpus) {
        let name = area.landing_dir().join(lander.inner.to_string()).path().to_owned();
        name_it(file.path(), &name, lander.outer).map_err(failed("name the landing file", &name))?;
        armed.files.push((*lander, name.clone()));
        shares::tell(&name, shares::of(own, &cpus)).map_err(failed("name the landing file", &name))?;
    }
    Ok(armed)
}

/// Gives a file the name that the process looks for. The process opens it itself, so it belongs to the process's user.
fn name_it(file: &Path, name: &Path, pid: i32) -> io::Result<()> {
    let ids = (process::user_ids(pid), process::group_ids(pid));
    if let (Some(users), Some(groups)) = ids {
        // The last of the four ids is the one for file access (credentials(7)).
        std::os::unix::fs::lchown(file, users.last().copied(), groups.last().copied())?;
    }
    match fs::remove_file(name) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::hard_link(file, name)
}

impl Armed {
    /// Which of the files were used.
    pub(crate) fn landed(&self) -> Landed {
        let mut landed = Landed::default();
        let used = parallel::at_once(&self.files, |(lander, name)| maps(lander.outer, name));
        for (file, is_used) in self.files.iter().zip(used) {
            match is_used {
                true => landed.taken.extend(landing(file)),
                false => landed.refused.push(file.0.inner),
            }
        }
        landed
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        for (_, name) in &self.files {
            let _ = fs::remove_file(name);
            shares::forget(name);
        }
    }
}

fn landing((lander, name): &(Lander, PathBuf)) -> Option<Landing> {
    let bytes = fs::metadata(name).ok()?.size();
    let path = JobPath::new(name.as_path()).ok()?;
    Some(Landing { pid: lander.inner, path, part: Filling::landing_part(lander.inner), bytes })
}

/// Compares the file itself: another tmpfs may be mounted over the one that the process sees.
fn maps(pid: i32, name: &Path) -> bool {
    let Ok(wanted) = fs::metadata(name) else { return false };
    let Ok(maps) = maps::read(pid) else { return false };
    let name = name.as_os_str().as_bytes();
    maps::mappings(&maps).any(|mapping| mapping.inode == wanted.ino() && mapping.name.ends_with(name))
}

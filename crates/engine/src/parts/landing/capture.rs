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

use rekindle_os::{maps, process};
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

/// Prepares the files and gives them their names.
pub(crate) fn arm(area: &Area, slot: &Filling, landers: &[Lander]) -> Result<Armed, staging::Error> {
    let mut armed = Armed::default();
    for lander in landers {
        let file = slot.landing_file(lander.inner, lander.bytes)?;
        let name = area.landing_dir().join(lander.inner.to_string());
        name_it(&file, &name, lander.outer).map_err(failed("name the landing file", &name))?;
        armed.files.push((*lander, name));
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
    /// The files that were used, once the device memory is in them.
    pub(crate) fn taken(&self) -> Vec<Landing> {
        self.files.iter().filter(|(lander, name)| maps(lander.outer, name)).filter_map(landing).collect()
    }

    /// The processes that did not use their file, by pid as they see themselves.
    pub(crate) fn refused(&self) -> Vec<i32> {
        self.files.iter().filter(|(lander, name)| !maps(lander.outer, name)).map(|(lander, _)| lander.inner).collect()
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        for (_, name) in &self.files {
            let _ = fs::remove_file(name);
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

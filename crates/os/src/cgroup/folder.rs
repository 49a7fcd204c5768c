//! A control group as a folder: read, created, configured and entered.
//!
//! Everything here uses open descriptors and single names, so no symbolic link can lead elsewhere. The kernel decides
//! who may do what, by the file rights of the calling thread.

use std::collections::BTreeMap;
use std::fs::{File, Metadata, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, mkdirat};

use super::setting::{self, Setting, settings};

/// The file with the processes of a group.
pub const PROCS: &str = "cgroup.procs";

/// The files that are delegated with a group, besides its folder (cgroups(7), "Delegation").
const HANDED_OVER: [&str; 4] = [PROCS, "cgroup.threads", setting::SUBTREE, "tasks"];

/// If there are more groups than this below a group, it counts as populated without looking at all of them.
const LOOKED_AT: u32 = 1000;

/// The folder of a control group.
#[derive(Debug)]
pub struct Folder {
    dir: File,
    is_two: bool,
}

/// A setting that could not be restored.
#[derive(Debug)]
pub struct NotSet {
    /// The setting.
    pub name: &'static str,
    /// The wanted value.
    pub value: String,
    /// Why it could not be set.
    pub source: io::Error,
}

const AS_FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC).union(OFlag::O_NOFOLLOW);

impl Folder {
    /// Opens the group at this path; `is_two` tells cgroup v2 from v1.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn open(path: &Path, is_two: bool) -> io::Result<Folder> {
        Ok(Folder { dir: File::from(open(path, AS_FOLDER, Mode::empty())?), is_two })
    }

    /// Opens a group directly below it. Symbolic links are not followed.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn child(&self, name: &str) -> io::Result<Folder> {
        Ok(Folder { dir: File::from(self.at(name, AS_FOLDER)?), is_two: self.is_two })
    }

    /// Opens a group directly below it, and creates it if it does not exist. Returns whether it was created.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn child_or_new(&self, name: &str) -> io::Result<(Folder, bool)> {
        match self.child(name) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            found => return found.map(|group| (group, false)),
        }
        let made = match mkdirat(&self.dir, single(name)?, Mode::S_IRWXU) {
            Ok(()) => true,
            Err(Errno::EEXIST) => false,
            Err(error) => return Err(error.into()),
        };
        Ok((self.child(name)?, made))
    }

    /// Metadata of its folder.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.dir.metadata()
    }

    /// Metadata of its file [`PROCS`].
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn procs_metadata(&self) -> io::Result<Metadata> {
        File::from(self.at(PROCS, OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW)?).metadata()
    }

    /// Whether whole processes can be in it, which is not so in a threaded group.
    #[must_use]
    pub fn is_of_processes(&self) -> bool {
        // Version 1 has no such file.
        !self.is_two || self.read("cgroup.type").is_ok_and(|kind| kind.starts_with("domain"))
    }

    /// Whether a process is in it or in a group below it.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn is_populated(&self) -> io::Result<bool> {
        if self.is_two {
            return Ok(self.read("cgroup.events")?.lines().any(|line| line == "populated 1"));
        }
        self.is_populated_by_hand(&mut 0)
    }

    fn is_populated_by_hand(&self, seen: &mut u32) -> io::Result<bool> {
        *seen += 1;
        if *seen > LOOKED_AT || !self.read(PROCS)?.is_empty() {
            return Ok(true);
        }
        for entry in std::fs::read_dir(format!("/proc/self/fd/{}", self.dir.as_raw_fd()))? {
            let entry = entry?;
            if entry.file_type()?.is_dir()
                && let Some(name) = entry.file_name().to_str()
                && self.child(name)?.is_populated_by_hand(seen)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The settings that differ from those of a new group.
    #[must_use]
    pub fn settings(&self) -> BTreeMap<String, String> {
        let all = settings(self.is_two).iter().filter_map(|it| Some((it, self.read(it.name).ok()?)));
        all.filter(|(it, value)| value != it.fresh).map(|(it, value)| (it.name.to_owned(), value)).collect()
    }

    /// Sets its settings to those of `wanted`, and all others to the values of a new group. Returns what could not be
    /// set. Unknown names are ignored.
    #[must_use]
    pub fn put_settings(&self, wanted: &BTreeMap<String, String>) -> Vec<NotSet> {
        let put = |it: &Setting| -> Option<NotSet> {
            let recorded = wanted.get(it.name).map(String::as_str);
            // If the value of a new group is unknown, the setting cannot be reset.
            let value = recorded.or_else(|| Some(it.fresh).filter(|fresh| !fresh.is_empty()))?;
            match self.read(it.name) {
                Ok(now) if now == value => return None,
                Err(_) if recorded.is_none() => return None,
                _ => {}
            }
            let result = setting::writes(it.name, value).iter().try_for_each(|text| self.write(it.name, text));
            result.err().map(|source| NotSet { name: it.name, value: value.to_owned(), source })
        };
        let failed: Vec<Setting> = settings(self.is_two).iter().filter(|it| put(it).is_some()).copied().collect();
        // One setting can prevent another until it is set too: a lower limit and the limit with swap.
        failed.iter().filter_map(put).collect()
    }

    /// Moves a process into it, with all its threads. The pid is as we see it.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn enter(&self, pid: i32) -> io::Result<()> {
        self.write(PROCS, &pid.to_string())
    }

    /// Gives its folder this mode and owner, and its delegated files the other owner.
    ///
    /// # Errors
    /// The kernel's answer.
    pub fn hand_over(&self, mode: u32, (uid, gid): (u32, u32), (procs_uid, procs_gid): (u32, u32)) -> io::Result<()> {
        let is = |it: &Metadata, uid, gid| {
            use std::os::unix::fs::MetadataExt;
            (it.uid(), it.gid()) == (uid, gid)
        };
        for name in HANDED_OVER {
            match self.at(name, OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK) {
                Ok(fd) => {
                    let file = File::from(fd);
                    if !is(&file.metadata()?, procs_uid, procs_gid) {
                        std::os::unix::fs::fchown(&file, Some(procs_uid), Some(procs_gid))?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        self.dir.set_permissions(Permissions::from_mode(mode & 0o777))?;
        if !is(&self.dir.metadata()?, uid, gid) {
            std::os::unix::fs::fchown(&self.dir, Some(uid), Some(gid))?;
        }
        Ok(())
    }

    fn read(&self, name: &'static str) -> io::Result<String> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let mut text = String::new();
        File::from(self.at(name, flags)?).read_to_string(&mut text)?;
        text.truncate(text.trim_end().len());
        Ok(text)
    }

    fn write(&self, name: &'static str, text: &str) -> io::Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        // One write(2): the kernel takes each write as a complete value.
        match File::from(self.at(name, flags)?).write(text.as_bytes())? {
            all if all == text.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn at(&self, name: &str, flags: OFlag) -> io::Result<std::os::fd::OwnedFd> {
        Ok(openat(&self.dir, single(name)?, flags, Mode::empty())?)
    }
}

/// A single name, not a path: no other folder can be reached with it.
fn single(name: &str) -> io::Result<&str> {
    match name {
        "" | "." | ".." => Err(io::ErrorKind::InvalidInput.into()),
        name if name.contains('/') => Err(io::ErrorKind::InvalidInput.into()),
        name => Ok(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that looks like a group.
    fn group(files: &[(&str, &str)]) -> (tempfile::TempDir, Folder) {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        let group = Folder::open(dir.path(), false).unwrap();
        (dir, group)
    }

    #[test]
    fn no_link_and_no_way_is_followed() {
        let (dir, group) = group(&[]);
        let outside = tempfile::tempdir().unwrap();
        std::fs::write(outside.path().join("pids.max"), "max").unwrap();
        std::os::unix::fs::symlink(outside.path(), dir.path().join("x")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("pids.max"), dir.path().join("pids.max")).unwrap();
        std::os::unix::fs::symlink(outside.path().join(PROCS), dir.path().join(PROCS)).unwrap();
        for bad in ["x", "..", ".", "", "../x", "/", "x/y"] {
            assert!(group.child(bad).is_err() && group.child_or_new(bad).is_err(), "{bad:?}");
        }
        let wanted = BTreeMap::from([("pids.max".to_owned(), "7".to_owned())]);
        assert_eq!(group.put_settings(&wanted).len(), 1);
        assert!(group.enter(1).is_err());
        assert_eq!(std::fs::read_to_string(outside.path().join("pids.max")).unwrap(), "max");
        assert_eq!(std::fs::read_dir(outside.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_known_settings_are_written() {
        let (dir, group) = group(&[("pids.max", "max\n"), ("release_agent", "none"), ("cpu.shares", "7\n")]);
        let wanted = [("pids.max", "50"), ("release_agent", "/evil"), ("../x", "1"), ("cpu.cfs_quota_us", "9")];
        let wanted = wanted.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
        let failed = group.put_settings(&wanted);
        let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
        assert_eq!((read("release_agent").as_str(), &read("pids.max")[..2]), ("none", "50"));
        assert!(read("cpu.shares").starts_with("1024"), "what was not recorded is what a new group has");
        assert_eq!(failed.iter().map(|failed| failed.name).collect::<Vec<_>>(), ["cpu.cfs_quota_us"]);
        assert!(!dir.path().join("../x").exists());
    }

    #[test]
    fn what_a_new_group_has_is_not_recorded() {
        let (_dir, group) =
            group(&[("pids.max", "max\n"), ("cpu.shares", "512\n"), ("cpuset.cpus", "\n"), ("other", "1")]);
        assert_eq!(group.settings(), BTreeMap::from([("cpu.shares".to_owned(), "512".to_owned())]));
    }

    #[test]
    fn a_process_below_counts() {
        let (dir, group) = group(&[(PROCS, "")]);
        assert!(!group.is_populated().unwrap());
        let (child, made) = group.child_or_new("x").unwrap();
        assert!(made && !group.child_or_new("x").unwrap().1);
        std::fs::write(dir.path().join("x").join(PROCS), "17\n").unwrap();
        assert!(child.is_populated().unwrap() && group.is_populated().unwrap());
    }
}

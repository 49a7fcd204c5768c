//! CRIU through its RPC: `criu swrk` on a SEQPACKET socket, protobuf messages, notifications answered.
//!
//! One CRIU process does one request and exits. Only its `success` can be trusted; the reason for a failure is taken
//! from its log, which it writes to a pipe of ours, bounded. It runs in the job's namespaces, as pid 2.

pub mod image;
mod log;
mod plugin;
pub(crate) mod proto;
mod rpc;

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub use log::Log;
pub use plugin::{FileRights, PLUGIN_NAME, Plugin};
pub use rpc::{DumpOptions, Hooks, Instead, Notify, Place, RestoreOptions, Restored, RunError, Tcp};
pub use rpc::{dump, find_restored, restore};

/// The oldest CRIU that can read and write our images (the page counts moved in the 4.2 page map).
pub(crate) const MINIMUM: Version = Version(4, 0, 0);

/// A CRIU that can be run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    /// The executable.
    pub path: PathBuf,
    /// The version that it reports.
    pub version: Version,
    /// The file that reported it; `None` if nobody asked it.
    stamp: Option<Stamp>,
}

/// Identifies a file and its content: device, inode, and modification time in seconds and nanoseconds.
type Stamp = (u64, u64, i64, i64);

/// Major, minor and patch level.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.0, self.1, self.2)
    }
}

impl Version {
    /// Reads `4.2.1`, `4.2` or `4.2-dirty`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Version> {
        let digits = |part: &str| part.chars().take_while(char::is_ascii_digit).collect::<String>().parse::<u32>().ok();
        let mut parts = text.trim().split('.');
        let major = digits(parts.next()?)?;
        let minor = parts.next().and_then(digits)?;
        Some(Version(major, minor, parts.next().and_then(digits).unwrap_or(0)))
    }
}

/// Why no CRIU can be used.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// None was found.
    #[error("criu not found (searched {looked}): install CRIU 4.2 or newer, or set criu.path or REKINDLE_CRIU")]
    None {
        /// The places that were searched.
        looked: String,
    },
    /// The named one cannot be run.
    #[error("cannot run {path}: {source}; install CRIU 4.2 or newer, or set criu.path or REKINDLE_CRIU")]
    Run {
        /// The executable.
        path: PathBuf,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// It does not report its version.
    #[error(
        "{path} --version printed {said:?}, which is not a version: name CRIU 4.2 or newer with criu.path or REKINDLE_CRIU"
    )]
    Answer {
        /// The executable.
        path: PathBuf,
        /// Its output.
        said: String,
    },
    /// It is too old for us or for the kernel.
    #[error("{path} is CRIU {found}, but {reason}: install CRIU {wanted} or newer")]
    Old {
        /// The executable.
        path: PathBuf,
        /// Its version.
        found: Version,
        /// The required version.
        wanted: Version,
        /// The reason.
        reason: String,
    },
}

impl Criu {
    /// A program that is known to be of this version.
    #[must_use]
    pub fn known(path: PathBuf, version: Version) -> Criu {
        Criu { path, version, stamp: None }
    }

    /// The same program with the version that it has now: an upgrade may have replaced it since it was found.
    #[must_use]
    pub fn again(&self) -> Criu {
        let is_replaced = self.stamp.is_some() && stamp(&self.path).is_some_and(|now| Some(now) != self.stamp);
        // If it cannot be asked, what uses it fails and says so.
        if is_replaced { Criu::ask(&self.path).unwrap_or_else(|_| self.clone()) } else { self.clone() }
    }

    /// Finds CRIU: the named one, else the first usable one of: `criu` in PATH, the sbin folders, the bundle beside our
    /// own executable.
    ///
    /// # Errors
    /// When there is none, or it is too old for us or for this kernel.
    pub fn find(named: Option<&Path>) -> Result<Criu, FindError> {
        match named {
            // Whoever names one means that one.
            Some(path) => Criu::first(vec![path.to_path_buf()], &path.display().to_string()),
            // The folders of PATH can be many.
            None => Criu::first(candidates(), "PATH, /usr/local/sbin, /usr/sbin and beside rekindle"),
        }
    }

    /// The first one that can be used. If none can: why not the first one that exists.
    fn first(candidates: Vec<PathBuf>, looked: &str) -> Result<Criu, FindError> {
        let mut refused = None;
        for path in candidates.iter().filter(|path| path.is_file()) {
            // Distributions have a CRIU that is too old, and the one of our package comes after it.
            match Criu::usable(path) {
                Ok(criu) => return Ok(criu),
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| FindError::None { looked: looked.to_owned() }))
    }

    /// Asks for its version, and whether that is new enough.
    fn usable(path: &Path) -> Result<Criu, FindError> {
        let criu = Criu::ask(path)?;
        let kernel = kernel_release();
        match required(&kernel) {
            (wanted, reason) if criu.version < wanted => {
                Err(FindError::Old { path: criu.path, found: criu.version, wanted, reason })
            }
            _ => Ok(criu),
        }
    }

    fn ask(path: &Path) -> Result<Criu, FindError> {
        let run = |source| FindError::Run { path: path.into(), source };
        // Before: if it is replaced meanwhile, it is asked again.
        let stamp = stamp(path);
        let output = Command::new(path).arg("--version").output().map_err(run)?;
        let said = String::from_utf8_lossy(&output.stdout).trim().to_string();
        let version = said.lines().find_map(|line| Version::parse(line.strip_prefix("Version:")?));
        match version {
            Some(version) => {
                let path = std::path::absolute(path).map_err(run)?;
                Ok(Criu { path, version, stamp })
            }
            None => Err(FindError::Answer { path: path.into(), said }),
        }
    }
}

impl Criu {
    /// Whether it can load a plugin. A static program has no loader, and ends when it is told to load one.
    #[must_use]
    pub fn loads_plugins(&self) -> bool {
        plugin::is_dynamic(&self.path)
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let meta = std::fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.mtime(), meta.mtime_nsec()))
}

fn candidates() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut all: Vec<PathBuf> = std::env::split_paths(&path).map(|dir| dir.join("criu")).collect();
    // The PATH of daemons and users often lacks sbin, where distributions install it.
    all.extend(["/usr/local/sbin/criu", "/usr/sbin/criu"].map(PathBuf::from));
    // A package, a tarball and a wheel have it in the lib folder beside the bin folder of our executable.
    if let Some(home) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
        all.push(home.join("criu/criu"));
        all.extend(home.parent().map(|prefix| prefix.join("lib/rekindle/criu/criu")));
    }
    all.dedup();
    all
}

/// `uname -r`.
#[must_use]
pub fn kernel_release() -> String {
    nix::sys::utsname::uname().map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default()
}

/// The version of CRIU that a kernel needs, and why.
#[must_use]
pub fn required(kernel: &str) -> (Version, String) {
    let release = Version::parse(kernel).unwrap_or(Version(0, 0, 0));
    if release >= Version(6, 16, 0) {
        (Version(4, 2, 0), format!("kernel {kernel} needs 4.2 for sockets"))
    } else if release >= Version(6, 13, 0) {
        (Version(4, 1, 0), format!("kernel {kernel} needs 4.1 for its vDSO"))
    } else {
        (MINIMUM, "older versions lack features that rekindle needs".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_and_compared() {
        assert_eq!(Version::parse("4.2.1"), Some(Version(4, 2, 1)));
        assert_eq!(Version::parse(" 4.2-34-gabc"), Some(Version(4, 2, 0)));
        assert_eq!(Version::parse("criu"), None);
        assert!(required("6.18.44-fc").0 == Version(4, 2, 0) && required("6.14.0").0 == Version(4, 1, 0));
        assert!(required("5.15.0-generic").0 == MINIMUM);
    }

    #[test]
    fn a_missing_one_is_named() {
        let error = Criu::find(Some(Path::new("/nowhere/criu"))).unwrap_err().to_string();
        assert!(error.contains("/nowhere/criu") && error.contains("criu.path"), "{error}");
    }

    /// A program that says it is CRIU of that version.
    fn stand_in(folder: &Path, name: &str, version: &str) -> PathBuf {
        let path = folder.join(name);
        // By a shell: a file that we had open for writing could not be executed while another test's fork has it, too.
        let script = format!("printf '#!/bin/sh\\necho Version: {version}\\n' >{0} && chmod +x {0}", path.display());
        assert!(Command::new("sh").args(["-c", &script]).status().unwrap().success());
        path
    }

    #[test]
    fn one_that_is_too_old_does_not_hide_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let old = stand_in(folder.path(), "old", "3.17.1");
        let broken = stand_in(folder.path(), "broken", "");
        let new = stand_in(folder.path(), "new", "99.1");

        let found = Criu::first(vec![missing.clone(), old.clone(), broken.clone(), new.clone()], "here").unwrap();
        assert_eq!((found.path, found.version), (new, Version(99, 1, 0)));

        let error = Criu::first(vec![missing.clone(), old.clone(), broken], "here").unwrap_err().to_string();
        assert!(error.contains(&old.display().to_string()) && error.contains("3.17.1"), "{error}");
        assert!(matches!(Criu::first(vec![missing], "here"), Err(FindError::None { .. })));
    }

    #[test]
    fn a_named_one_is_meant() {
        let folder = tempfile::tempdir().unwrap();
        let old = stand_in(folder.path(), "old", "3.17.1");
        assert!(matches!(Criu::find(Some(&old)), Err(FindError::Old { .. })));
    }

    #[test]
    fn one_that_was_replaced_is_asked_for_its_version_again() {
        let folder = tempfile::tempdir().unwrap();
        let found = Criu::find(Some(&stand_in(folder.path(), "criu", "98.1"))).unwrap();
        assert_eq!(found.again(), found);
        // As a package manager replaces a file.
        std::fs::rename(stand_in(folder.path(), "new", "99.2"), folder.path().join("criu")).unwrap();
        let again = found.again();
        assert_eq!((&again.path, again.version), (&found.path, Version(99, 2, 0)));
        assert_eq!(again.again(), again);
        std::fs::remove_file(&found.path).unwrap();
        assert_eq!(again.again(), again, "what uses it says that it is gone");
        let known = Criu::known(stand_in(folder.path(), "criu", "99.2"), Version(4, 2, 0));
        assert_eq!(known.again(), known);
    }

    #[test]
    fn the_bundle_is_looked_for_after_the_machines_own() {
        let home = std::env::current_exe().unwrap().parent().unwrap().to_path_buf();
        let all = candidates();
        let bundle =
            all.iter().position(|path| *path == home.parent().unwrap().join("lib/rekindle/criu/criu")).unwrap();
        let system = all.iter().position(|path| *path == Path::new("/usr/sbin/criu")).unwrap();
        assert!(system < bundle && bundle == all.len() - 1, "{all:?}");
    }
}

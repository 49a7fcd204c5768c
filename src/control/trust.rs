//! Checks that only root, or the user who runs this, can change the content of a folder.
//!
//! Whoever can write to the folder of the sockets can put another socket there under the name of a job: root's
//! `rekindle stop` would talk to it and trust its answers. Whoever can write to a folder above can replace all of it.
//! So each folder of the path is checked, and each symbolic link in it. A folder above may be sticky (`/tmp`), because
//! there nobody can rename the files of others.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

/// Why a folder is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum Distrust {
    /// Because of its mode.
    #[error(
        "{} has mode {mode:o}, so others can write there and could replace a job's socket. Run `chmod go-w {}`",
        path.display(), path.display()
    )]
    Writable { path: PathBuf, mode: u32 },
    /// Because of its owner.
    #[error(
        "{} belongs to user {owner}, who could replace a job's socket. Run `chown root {}`",
        path.display(), path.display()
    )]
    Owner { path: PathBuf, owner: u32 },
}

/// Why a folder is refused, and which setting names another one.
#[derive(Debug, thiserror::Error)]
#[error("{why}, or set {setting} to another folder")]
struct Refused {
    why: Distrust,
    setting: &'static str,
}

/// The setting of the folder of the sockets.
const CONTROL: &str = "control.directory";

/// The position of a folder in the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Above,
    Last,
}

/// Maximum number of symbolic links in a path, as in the kernel (path_resolution(7)).
const MOST_LINKS: u32 = 40;

/// Checks an existing folder and all above it.
///
/// # Errors
/// `PermissionDenied` with advice if somebody else can change the content; the kernel's error if a folder cannot be
/// examined.
pub(super) fn check(directory: &Path) -> io::Result<()> {
    walk(directory, Place::Last, CONTROL)
}

/// Checks a folder as a parent of the used one.
///
/// # Errors
/// As [`check`].
pub(super) fn check_above(directory: &Path) -> io::Result<()> {
    walk(directory, Place::Above, CONTROL)
}

/// Checks the folder of `setting`, which may be sticky: nobody can replace a file of ours there either.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_setting(setting: &'static str, directory: &Path) -> io::Result<()> {
    walk(directory, Place::Above, setting)
}

fn walk(directory: &Path, last: Place, setting: &'static str) -> io::Result<()> {
    let we = nix::unistd::geteuid().as_raw();
    let mut left = components(&std::path::absolute(directory)?);
    let (mut here, mut links) = (PathBuf::from("/"), 0);
    look(&here, if left.is_empty() { last } else { Place::Above }, we, setting)?;
    while let Some(name) = left.pop() {
        if name == ".." {
            here.pop();
            continue;
        }
        let path = here.join(&name);
        let place = if left.is_empty() { last } else { Place::Above };
        let Some(target) = look(&path, place, we, setting)? else {
            here = path;
            continue;
        };
        links += 1;
        if links > MOST_LINKS {
            return Err(io::Error::from_raw_os_error(libc::ELOOP));
        }
        if target.is_absolute() {
            here = PathBuf::from("/");
        }
        left.extend(components(&target));
    }
    Ok(())
}

/// The names in a path, in reverse order.
fn components(path: &Path) -> Vec<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    let mut names: Vec<OsString> = names.collect();
    names.reverse();
    names
}

/// The target of a link; `None` for a folder.
fn look(path: &Path, place: Place, we: u32, setting: &'static str) -> io::Result<Option<PathBuf>> {
    let metadata = fs::symlink_metadata(path)?;
    let refused = |why: Distrust| io::Error::new(io::ErrorKind::PermissionDenied, Refused { why, setting });
    if metadata.is_symlink() {
        judge_owner(path, metadata.uid(), we).map_err(refused)?;
        return fs::read_link(path).map(Some);
    }
    if !metadata.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::ENOTDIR));
    }
    judge(path, metadata.uid(), metadata.mode(), place, we).map_err(refused)?;
    Ok(None)
}

fn judge_owner(path: &Path, owner: u32, we: u32) -> Result<(), Distrust> {
    if owner == 0 || owner == we { Ok(()) } else { Err(Distrust::Owner { path: path.to_owned(), owner }) }
}

fn judge(path: &Path, owner: u32, mode: u32, place: Place, we: u32) -> Result<(), Distrust> {
    judge_owner(path, owner, we)?;
    let sticky = place == Place::Above && mode & libc::S_ISVTX != 0;
    if mode & 0o022 != 0 && !sticky {
        return Err(Distrust::Writable { path: path.to_owned(), mode: mode & 0o7777 });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn owner_and_mode_decide() {
        let judged = |owner, mode, place| judge(Path::new("/d"), owner, mode, place, 7).is_ok();
        for owner in [0, 7] {
            assert!(judged(owner, 0o755, Place::Last) && judged(owner, 0o700, Place::Above));
            assert!(judged(owner, 0o1777, Place::Above) && !judged(owner, 0o1777, Place::Last));
            for mode in [0o777, 0o775, 0o757, 0o2775] {
                assert!(!judged(owner, mode, Place::Above) && !judged(owner, mode, Place::Last), "{mode:o}");
            }
        }
        assert!(!judged(8, 0o700, Place::Above) && !judged(8, 0o1777, Place::Above));
    }

    #[test]
    fn every_folder_and_link_on_the_way_counts() {
        let dir = tempfile::tempdir().unwrap();
        let folder = |name: &str, mode| {
            let path = dir.path().join(name);
            fs::create_dir_all(&path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        };
        let (good, _open) = (folder("good", 0o755), folder("open", 0o777));
        let below = folder("open/below", 0o755);
        symlink("good", dir.path().join("link")).unwrap();
        symlink("open/below/../below", dir.path().join("through")).unwrap();
        symlink(dir.path().join("loop"), dir.path().join("loop")).unwrap();
        check(&good).unwrap();
        check(&dir.path().join("link")).unwrap();
        check(&dir.path().join("good/../good")).unwrap();
        for bad in [below, dir.path().join("through"), dir.path().join("good/../open")] {
            let error = check(&bad).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{}", bad.display());
            assert!(error.to_string().contains("others can write") && error.to_string().contains("/open"), "{error}");
        }
        assert_eq!(check(&dir.path().join("loop")).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(check(&dir.path().join("none")).unwrap_err().kind(), io::ErrorKind::NotFound);
        check_above(&std::env::temp_dir()).unwrap();
        if rekindle_testing::root() {
            std::os::unix::fs::lchown(dir.path().join("link"), Some(65534), None).unwrap();
            assert!(check(&dir.path().join("link")).unwrap_err().to_string().contains("belongs to user 65534"));
        }
    }
}

//! Checks that a restored job has only the rights and open files that its user may have.
//!
//! CRIU takes both from the image, and opens files by their path with more rights than the job has. The user owns the
//! folders. Between the snapshot and the restore, the user could have replaced a file that the job had open by a link
//! to somebody else's file. So before the first instruction of the job runs, the files twice (before the processes are
//! the user's, and after):
//! - The rights of every thread are compared with what a launch gives (`rights`).
//! - Every file of every process (descriptors, mappings, programs, working directories) is looked up again by its path,
//!   with the user's rights, in the job's mount namespace. It must be the same file, by device and inode, and the user
//!   must have the access that the process has. The mode of the file is not enough, because a folder above it can be
//!   closed to the user.
//! - Kernel files in /proc and /sys must be on the list of files that do not depend on who opened them (`kernel`).
//!
//! Files that the user could not open at the snapshot as a process has them (its output; what was closed to the user since)
//! are recorded in the image with inode and access, and must be exactly those files.
//!
//! A deleted file, or memory that is in no file system, has no path to look up. Before a snapshot it is judged by its owner
//! and mode only, because its content comes into the image. After a restore the image must have it without a name, for
//! this descriptor or mapping ([`UnnamedFiles`]): then CRIU made it, and opened no path for it that leads elsewhere. The
//! name alone proves nothing: a file that CRIU opened through an exchanged folder can have been deleted since. A deleted
//! file with other names is looked up by one of these.
//!
//! The same checks run before a snapshot: what a restore would refuse is refused at once, so every image can be restored.

mod files;
mod kernel;
mod rights;

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::launch::Privileges;
use crate::launch::identity::Identity;
pub(crate) use files::Descriptors;
use files::{Held, How, WRITE, When};
use kernel::{Kernels, Verdict};
use rekindle_criu::image::{Known, Unnamed, UnnamedFiles};
use rekindle_os::{identity, maps, process};
use rekindle_store::Manifest;
use rekindle_store::manifest::{GivenFile, JobRights};

/// The cause of a refusal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The image.
    Image,
    /// Files that were removed or replaced since.
    Files,
    /// The image is intact, but does not match the configuration.
    Configuration,
    /// This machine, as long as it closes a file to the user, or this program.
    Ours,
}

/// Why the user cannot open a file as a process has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The user has no right to it or to a folder above it.
    Closed,
    /// At its path is another file or none.
    Other,
}

/// Why a restored job is not run, or no image of a job is taken.
#[derive(Debug, thiserror::Error)]
pub enum Refused {
    /// A process has other rights than a launch gives.
    #[error("{process} has {what}")]
    Rights {
        process: String,
        /// What it has.
        what: String,
        fault: Fault,
    },
    /// A process has a file that its user could not open.
    #[error(
        "{} is {how} in the restored job, but user {user} may not open it now: it was replaced since the snapshot, or it or a folder above it was closed to the user. Undo that, or restore another image",
        path.display()
    )]
    File {
        path: PathBuf,
        /// How the job uses it.
        how: &'static str,
        /// The job's user.
        user: String,
        obstacle: Obstacle,
    },
    /// A process has a kernel file open whose content depends on who opens it.
    #[error(
        "the job has {} open, whose content depends on who opens it: CRIU would open it with more rights than user {user} has. Close it before a snapshot",
        path.display()
    )]
    KernelFile {
        path: PathBuf,
        /// The job's user.
        user: String,
    },
    /// A process is in other namespaces than the rest of the job.
    #[error("{process} is in a mount namespace of its own")]
    Namespace { process: String },
    /// The rights or files of a process could not be read.
    #[error("cannot inspect the rights and files of process {pid}")]
    Unread {
        pid: i32,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The check with the user's rights failed.
    #[error("cannot inspect files with the rights of user {user}")]
    Switch {
        /// The job's user.
        user: String,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The job has no process.
    #[error("the job has no process")]
    NoProcess,
}

impl Refused {
    /// The cause of the refusal.
    #[must_use]
    pub(crate) fn fault(&self) -> Fault {
        match self {
            Refused::Rights { fault, .. } => *fault,
            Refused::File { obstacle: Obstacle::Other, .. } => Fault::Files,
            // It may be opened again, and an older image would lose work.
            Refused::File { obstacle: Obstacle::Closed, .. } => Fault::Ours,
            Refused::KernelFile { .. } | Refused::Namespace { .. } => Fault::Image,
            Refused::Unread { .. } | Refused::Switch { .. } | Refused::NoProcess => Fault::Ours,
        }
    }
}

/// Rights and files of a job's processes that the image must record.
#[derive(Debug)]
pub(crate) struct Noted {
    /// Files that they have open or mapped although the user has no right to them.
    pub(crate) given: Vec<GivenFile>,
    /// Their rights.
    pub(crate) rights: JobRights,
}

/// Checks a stopped job whose reaper is `root`.
///
/// # Errors
/// The first thing that a restore would refuse.
pub(crate) fn note(root: i32, user: Option<&Identity>, privileges: Privileges) -> Result<Noted, Refused> {
    let tree = below(root);
    rights::check(&tree, &rights::Wanted { user, privileges, then: None })?;
    let rights = rights::of(&tree, user)?;
    let Some(user) = user.filter(|user| user.uid != 0) else { return Ok(Noted { given: Vec::new(), rights }) };
    let mut given: Vec<GivenFile> = Vec::new();
    for (held, _) in strange(root, &tree, user, None)? {
        let access = Some(held.access);
        let file = GivenFile { path: held.path, device: held.device, inode: held.inode, access };
        if !given.contains(&file) {
            given.push(file);
        }
    }
    Ok(Noted { given, rights })
}

/// Checks a running job, before it is frozen, for what [`note`] would refuse, as far as it can be seen then.
///
/// # Errors
/// The first thing that a restore would refuse.
pub(crate) fn foresee(root: i32, user: Option<&Identity>, privileges: Privileges) -> Result<(), Refused> {
    let tree = below(root);
    rights::check(&tree, &rights::Wanted { user, privileges, then: None })?;
    let Some(user) = user.filter(|user| user.uid != 0) else { return Ok(()) };
    let kernels = Kernels::of(root).map_err(|source| Refused::Unread { pid: root, source })?;
    let held = files::held(&tree, None, None).map_err(|(pid, source)| Refused::Unread { pid, source })?;
    held.into_iter().try_for_each(|held| judge_kernels(&kernels, &held, &tree, user).map(drop))
}

/// What a restored job is compared with.
#[derive(Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) user: Option<&'a Identity>,
    pub(crate) privileges: Privileges,
    pub(crate) manifest: &'a Manifest,
    /// The files that the image has without a name.
    pub(crate) unnamed: &'a UnnamedFiles,
    /// Device and inode of its output, which is open here.
    pub(crate) output: [(u64, u64); 2],
}

/// What a restored job has by the image, which a restore made for it.
struct Made<'a> {
    /// Files of ours that were put back for this restore ([`put_there`]).
    put_there: Vec<(u64, u64)>,
    /// If the restore is not finished: only these descriptors are the job's.
    descriptors: Option<&'a Descriptors>,
    unnamed: &'a UnnamedFiles,
    /// The devices of memory that is in no file system.
    memory: Vec<u64>,
    manifest: &'a Manifest,
}

impl Made<'_> {
    /// Whether a restore made it, from the image: then nothing was opened by a path that the user could exchange.
    fn has(&self, held: &Held) -> bool {
        let when = if self.descriptors.is_some() { When::Unfinished } else { When::Finished };
        match &held.known {
            Known::Unnamed(unnamed) => held.is_made_for(unnamed, when, &self.memory),
            // Memory that the tasks share with CRIU until they run.
            Known::Nothing => when == When::Unfinished && held.how == How::Mapped && held.is_memory(&self.memory),
            Known::Otherwise => false,
        }
    }

    /// The path where the user must find it.
    fn path(&self, held: &Held) -> PathBuf {
        let saved = |path: &Path| self.manifest.saved_links.iter().find(|link| *link.link == *path);
        match &held.known {
            // CRIU opens it by a name that it then removes. Ours stays.
            Known::Unnamed(Unnamed::Link(path)) => {
                saved(path).map_or_else(|| path.clone(), |link| link.saved.to_path_buf())
            }
            _ => held.path.clone(),
        }
    }
}

/// Checks the securebits of an image ([`rekindle_criu::image::securebits`]), which cannot be seen of a process.
///
/// # Errors
/// When a thread of a job of another user would get one that rekindle itself does not have.
pub(crate) fn check_securebits(all: &BTreeMap<i32, u32>, user: Option<&Identity>) -> Result<(), Refused> {
    rights::check_securebits(all, user, rekindle_os::rights::securebits())
}

/// Checks the restored tree below `root`, the reaper, whose own files are ours.
///
/// # Errors
/// Names the first right or file that the user does not have.
pub(crate) fn check(root: i32, wanted: &Wanted<'_>) -> Result<(), Refused> {
    let tree = below(root);
    let rights =
        rights::Wanted { user: wanted.user, privileges: wanted.privileges, then: wanted.manifest.rights.as_ref() };
    rights::check_reaper(root, &rights)?;
    rights::check(&tree, &rights)?;
    let Some(user) = wanted.user.filter(|user| user.uid != 0) else { return Ok(()) };
    let world = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/mnt"));
    let ours = world(root).map_err(|source| Refused::Unread { pid: root, source })?;
    if let Some(other) = tree.iter().find(|pid| world(**pid).is_ok_and(|its| its != ours)) {
        return Err(Refused::Namespace { process: rights::shown(*other) });
    }
    check_files(root, &tree, user, wanted, None)
}

/// Checks the files of the restored tree below `root` while its processes still have our rights. Once they have those of
/// their user, other processes of the user can take descriptors from them, before [`check`] is done. CRIU has files of its
/// own open in them then: only the `descriptors` of the image are checked.
///
/// # Errors
/// Names the first file that the user does not have.
pub(crate) fn check_before_it_is_reached(
    root: i32,
    wanted: &Wanted<'_>,
    descriptors: &Descriptors,
) -> Result<(), Refused> {
    let Some(user) = wanted.user.filter(|user| user.uid != 0) else { return Ok(()) };
    check_files(root, &below(root), user, wanted, Some(descriptors))
}

fn check_files(
    root: i32,
    tree: &[i32],
    user: &Identity,
    wanted: &Wanted<'_>,
    descriptors: Option<&Descriptors>,
) -> Result<(), Refused> {
    let Wanted { manifest, unnamed, output, .. } = *wanted;
    let memory = maps::devices_of_memory().map_err(|source| Refused::Unread { pid: root, source })?;
    let made = Made { put_there: put_there(root, manifest), descriptors, unnamed, memory, manifest };
    let mut strange = strange(root, tree, user, Some(&made))?.into_iter();
    match strange.find(|(held, _)| !(is_given(held, &manifest.given_files) || is_output(held, &output))) {
        None => Ok(()),
        Some((held, obstacle)) => {
            Err(Refused::File { path: held.path, how: said(held.how), user: user.name.clone(), obstacle })
        }
    }
}

fn below(root: i32) -> Vec<i32> {
    process::tree(root).into_iter().filter(|pid| *pid != root).collect()
}

fn said(how: How) -> &'static str {
    match how {
        How::Open => "open",
        How::Mapped => "mapped",
        How::Directory => "the working directory of a process",
        How::Root => "the root folder of a process",
        How::Program => "the program of a process",
    }
}

/// Whether it is a file that root gave, with no more access than it was given for. An image of an earlier version does
/// not record the access.
fn is_given(held: &Held, given: &[GivenFile]) -> bool {
    let same = |given: &&GivenFile| given.device == held.device && given.inode == held.inode;
    given.iter().filter(same).any(|given| given.access.is_none_or(|access| held.access & !access == 0))
}

/// Whether it is one of our output files, and not one that somebody has put in its place.
fn is_output(held: &Held, output: &[(u64, u64)]) -> bool {
    held.how == How::Open && held.access == WRITE && output.contains(&(held.device, held.inode))
}

/// Files of ours that were put back for this restore, by device and inode. Their folders may be closed to the user.
fn put_there(root: i32, manifest: &Manifest) -> Vec<(u64, u64)> {
    let paths = manifest.recreate.iter().map(|file| &file.path).chain(manifest.landing.iter().map(|file| &file.path));
    let found = paths.filter_map(|path| std::fs::metadata(process::path_in(root, path)).ok());
    found.map(|metadata| (metadata.dev(), metadata.ino())).collect()
}

/// The files that the user could not open in the way these processes have them. Those of restored processes are compared
/// with what was `made` for them.
fn strange(
    root: i32,
    tree: &[i32],
    user: &Identity,
    made: Option<&Made<'_>>,
) -> Result<Vec<(Held, Obstacle)>, Refused> {
    let unread = |pid: i32| move |source: io::Error| Refused::Unread { pid, source };
    let kernels = Kernels::of(root).map_err(unread(root))?;
    let root_folder = std::fs::metadata(format!("/proc/{root}/root")).map_err(unread(root))?;
    let mut asked = Vec::new();
    let mut strange = Vec::new();
    let (descriptors, unnamed) = (made.and_then(|made| made.descriptors), made.map(|made| made.unnamed));
    for held in files::held(tree, descriptors, unnamed).map_err(|(pid, source)| unread(pid)(source))? {
        let is = (held.device, held.inode);
        // Only root can change the root of a process.
        if held.how == How::Root {
            if is != (root_folder.dev(), root_folder.ino()) {
                strange.push((held, Obstacle::Other));
            }
            continue;
        }
        if held.how == How::Mapped && made.is_some_and(|made| made.put_there.contains(&is)) {
            continue;
        }
        let verdict = judge_kernels(&kernels, &held, tree, user)?;
        // A file without a name has no path to look up. In a snapshot its content comes into the image.
        let has_no_path = || match made {
            Some(made) => made.has(&held),
            None => held.seems_nameless() && !is_there(root, &held),
        };
        if verdict == Some(Verdict::Fine) || (verdict.is_none() && has_no_path() && held.lets(user)) {
            continue;
        }
        let path = made.map_or_else(|| held.path.clone(), |made| made.path(&held));
        asked.push((path, held));
    }
    let obstacles = open_anew(root, user, &asked)?;
    strange.extend(asked.into_iter().zip(obstacles).filter_map(|((_, held), obstacle)| Some((held, obstacle?))));
    Ok(strange)
}

/// Whether the file is at its path: a name can look like that of a deleted file.
fn is_there(root: i32, held: &Held) -> bool {
    let found = std::fs::symlink_metadata(process::path_in(root, &held.path));
    found.is_ok_and(|found| (found.dev(), found.ino()) == (held.device, held.inode))
}

fn judge_kernels(kernels: &Kernels, held: &Held, tree: &[i32], user: &Identity) -> Result<Option<Verdict>, Refused> {
    match kernels.judge(held.device, &held.path, held.access, held.is_folder(), tree) {
        Some(Verdict::Refused) => Err(Refused::KernelFile { path: held.path.clone(), user: user.name.clone() }),
        verdict => Ok(verdict),
    }
}

/// For each file: `None` if the user finds the same file at the path, and may open it in the same way.
fn open_anew(root: i32, user: &Identity, files: &[(PathBuf, Held)]) -> Result<Vec<Option<Obstacle>>, Refused> {
    let failed = |source| Refused::Switch { user: user.name.clone(), source };
    let world = std::fs::File::open(format!("/proc/{root}/ns/mnt")).map_err(failed)?;
    let obstacle = |(path, held): &(PathBuf, Held)| match identity::reach(path, held.access) {
        Ok(found) if (found.st_dev, found.st_ino) == (held.device, held.inode) => None,
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(Obstacle::Closed),
        Ok(_) | Err(_) => Some(Obstacle::Other),
    };
    identity::with_file_rights_in(&world, user.uid, user.gid, &user.groups, || files.iter().map(obstacle).collect())
        .map_err(failed)
}

#[cfg(test)]
mod tests;

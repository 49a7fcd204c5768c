//! Deleted files that the job has open or mapped: how much of them is copied, and names that CRIU has left for them.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::record::in_their_folder;
use crate::launch::identity::Identity;
use crate::parts::unrestorable::Unrestorable;
use rekindle_os::maps;
use rekindle_os::process::{self, path_in};
use rekindle_store::manifest::SavedLink;

/// What the kernel adds to the name of a deleted file.
const DELETED: &[u8] = b" (deleted)";

/// A deleted file, folder or FIFO.
#[derive(Debug)]
pub(crate) struct Nameless {
    /// The name that it had.
    path: PathBuf,
    metadata: Metadata,
    /// A process that has it.
    pid: i32,
    /// It is open, not only mapped or a working directory.
    is_open: bool,
}

/// The deleted files, folders and FIFOs that these processes have open or mapped, or that are their working directories, each once.
/// pids are as we see them.
pub(crate) fn nameless(tree: &[i32]) -> Vec<Nameless> {
    let mut found: BTreeMap<(u64, u64), Nameless> = BTreeMap::new();
    let mut add = |pid: i32, is_open: bool, name: &[u8], through: &dyn Fn() -> String| {
        let Some(path) = name.strip_suffix(DELETED).filter(|_| is_nameless(name)) else { return };
        // Only now: a file system that does not answer holds up who looks at its files.
        // What only has such a name is not deleted.
        let is_one = |metadata: &Metadata| {
            let is_gone = metadata.nlink() == 0;
            metadata.is_file() || (is_gone && (metadata.is_dir() || metadata.file_type().is_fifo()))
        };
        if let Some(metadata) = std::fs::metadata(through()).ok().filter(is_one) {
            let path = PathBuf::from(OsStr::from_bytes(path));
            let known = found.entry(identity(&metadata)).or_insert(Nameless { path, metadata, pid, is_open });
            known.is_open |= is_open;
        }
    };
    for pid in tree {
        for (number, target) in process::descriptors(*pid) {
            add(*pid, true, target.as_os_str().as_bytes(), &|| format!("/proc/{pid}/fd/{number}"));
        }
        if let Ok(folder) = std::fs::read_link(format!("/proc/{pid}/cwd")) {
            add(*pid, false, folder.as_os_str().as_bytes(), &|| format!("/proc/{pid}/cwd"));
        }
        let maps = maps::read(*pid).unwrap_or_default();
        for mapping in maps::mappings(&maps) {
            add(*pid, false, mapping.name, &|| format!("/proc/{pid}/map_files/{}", mapping.range()));
        }
    }
    found.into_values().collect()
}

/// Bytes on disk of those without another name: CRIU copies each of them (a ghost file, `dump_ghost_file`).
pub(crate) fn bytes(found: &[Nameless]) -> u64 {
    let is_copied = |file: &&Nameless| file.metadata.is_file() && file.metadata.nlink() == 0;
    found.iter().filter(is_copied).map(|file| file.metadata.blocks() * 512).sum()
}

/// Refuses what CRIU dumps and cannot make again at its old name.
pub(crate) fn check(found: &[Nameless], root: i32, user: Option<&Identity>) -> Result<(), Unrestorable> {
    found.iter().try_for_each(|one| {
        check_fifo(one, user).and_then(|()| check_name(one)).and_then(|()| check_place(one, root))
    })?;
    check_folders(found)
}

/// CRIU makes a FIFO as root, and the user of the job may not open it.
fn check_fifo(one: &Nameless, user: Option<&Identity>) -> Result<(), Unrestorable> {
    if !one.metadata.file_type().is_fifo() || user.is_none() {
        return Ok(());
    }
    Err(Unrestorable::of(
        one.pid,
        format!(
            "has the deleted FIFO {} open, which cannot be made again for the user of the job (job.user)",
            one.path.display()
        ),
        "do not delete it while it is open, or use pipe(2)",
    ))
}

/// A file without any name gets one for a moment: `NAME.cr.ID.ghost` (`create_ghost`).
fn check_name(one: &Nameless) -> Result<(), Unrestorable> {
    /// Of a name (`NAME_MAX`), and what CRIU may add to it.
    const MOST: usize = 255 - ".cr.ffff.ghost".len();
    let length = one.path.file_name().map_or(0, OsStr::len);
    if one.metadata.nlink() > 0 || !one.metadata.is_file() || length <= MOST {
        return Ok(());
    }
    Err(Unrestorable::of(
        one.pid,
        format!(
            "has a deleted file open whose name has {length} bytes, in the folder {}, and a restore would need a name \
             that is longer than the 255 that a file system allows",
            one.path.parent().unwrap_or_else(|| Path::new("/")).display()
        ),
        "use names of up to 241 bytes for files that are deleted while they are open",
    ))
}

/// A restore makes the folders again that a deleted file was in.
fn check_place(one: &Nameless, root: i32) -> Result<(), Unrestorable> {
    if one.metadata.nlink() > 0 {
        return Ok(());
    }
    let is_in_the_way = |folder: &&Path| path_in(root, folder).symlink_metadata().is_ok_and(|there| there.is_file());
    match one.path.ancestors().skip(1).find(is_in_the_way) {
        Some(file) => Err(Unrestorable::of(
            one.pid,
            format!(
                "has the deleted file {} open, and where its folder was there is the file {} now, so a restore could not make it again",
                one.path.display(),
                file.display()
            ),
            "rename or remove that file, or close the deleted one",
        )),
        None => Ok(()),
    }
}

/// CRIU removes a deleted folder again as soon as it has opened it, also if it has made other deleted things in it.
fn check_folders(found: &[Nameless]) -> Result<(), Unrestorable> {
    for folder in found.iter().filter(|one| one.is_open && one.metadata.is_dir()) {
        let is_in_it = |other: &&Nameless| other.path != folder.path && other.path.starts_with(&folder.path);
        if let Some(inside) = found.iter().find(is_in_it) {
            return Err(Unrestorable::of(
                folder.pid,
                format!(
                    "has the removed folder {} open, and {}, which was in it, is also in use. A restore could not remove the folder \
                     again",
                    folder.path.display(),
                    inside.path.display()
                ),
                "close the folder before it is removed, or close what was in it",
            ));
        }
    }
    Ok(())
}

/// Whether a name in /proc is that of a deleted file. The kernel uses the same form for memory that is in no file
/// system, which CRIU writes to page files.
fn is_nameless(name: &[u8]) -> bool {
    let memory = [&b"/memfd:"[..], b"/dev/zero ", b"/SYSV", b"/[aio]"];
    name.starts_with(b"/") && name.ends_with(DELETED) && !memory.iter().any(|start| name.starts_with(start))
}

/// Whether CRIU gives such names to deleted files during a dump.
pub(super) fn is_of_a_dump(name: &OsStr) -> bool {
    let number = name.as_bytes().strip_prefix(b"link_remap.").unwrap_or_default();
    !number.is_empty() && number.iter().all(u8::is_ascii_digit)
}

/// Whether an image has such names for deleted files. The image needs the file itself, not its content.
pub(super) fn is_of_an_image(name: &OsStr) -> bool {
    name.as_bytes().starts_with(SavedLink::PREFIX.as_bytes())
}

/// Removes the names that a dump gave to those with another name, if CRIU was killed before it removed them itself
/// (`create_link_remap`): each further dump would use the same names, and fail. Returns how many there were.
///
/// No other file is removed. If another job has the same file and is being dumped at this moment, its snapshot fails.
pub(crate) fn remove_names(found: &[Nameless], root: i32, user: Option<&Identity>) -> usize {
    let mut folders: BTreeMap<&Path, BTreeSet<(u64, u64)>> = BTreeMap::new();
    for file in found.iter().filter(|file| file.metadata.is_file() && file.metadata.nlink() > 0) {
        // CRIU takes the next folder above if the file's own one is gone.
        if let Some(folder) = file.path.ancestors().skip(1).find(|folder| path_in(root, folder).is_dir()) {
            folders.entry(folder).or_default().insert(identity(&file.metadata));
        }
    }
    folders.into_iter().map(|(folder, files)| remove_names_in(folder, &files, root, user)).sum()
}

fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

fn remove_names_in(folder: &Path, files: &BTreeSet<(u64, u64)>, root: i32, user: Option<&Identity>) -> usize {
    let remove = |[folder]: [PathBuf; 1]| {
        let mut removed = 0;
        for entry in std::fs::read_dir(folder)?.flatten() {
            let is_criu_s = is_of_a_dump(&entry.file_name());
            let is_theirs = || entry.metadata().is_ok_and(|now| files.contains(&identity(&now)));
            if is_criu_s && is_theirs() && std::fs::remove_file(entry.path()).is_ok() {
                removed += 1;
            }
        }
        Ok(removed)
    };
    in_their_folder(root, [folder], user, remove).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn mappings_of_files_without_a_name_are_found() {
        let maps = b"\
00400000-00401000 r--p 00000000 fe:00 1  /tmp/gone (deleted)
7f86f4000000-7f86f4400000 rw-p 00000000 00:00 0
7f86f5000000-7f86f5400000 rw-s 00000000 00:01 2                          /dev/zero (deleted)
7f86f585e000-7f86f595e000 r--s 00000000 00:01 3                          /memfd:mm (deleted)
7f86f5960000-7f86f5970000 rw-s 00000000 00:01 4                          /SYSV00000000 (deleted)
7f86f5980000-7f86f5990000 rw-s 00000000 00:17 5                          /dev/shm/torch_1 2 (deleted)
7f86f5990000-7f86f59a0000 rw-s 00000000 00:17 6                          /dev/shm/named
";
        let found = maps::mappings(maps).filter(|mapping| is_nameless(mapping.name)).map(|mapping| mapping.range());
        assert_eq!(found.collect::<Vec<_>>(), ["400000-401000", "7f86f5980000-7f86f5990000"]);
    }

    #[test]
    fn a_file_without_a_name_counts_once() {
        let mut file = tempfile::tempfile().unwrap();
        io::Write::write_all(&mut file, &vec![1; 3 << 20]).unwrap();
        file.sync_all().unwrap();
        let expected = file.metadata().unwrap().blocks() * 512;
        let mut sleep = std::process::Command::new("sleep");
        let mut child = sleep.arg("60").stdout(file.try_clone().unwrap()).stderr(file).spawn().unwrap();
        let pid = child.id().cast_signed();
        let found = bytes(&nameless(&[pid, pid]));
        child.kill().unwrap();
        let _ = child.wait();
        assert_eq!(found, expected);
        assert!(found >= 3 << 20);
    }

    #[test]
    fn a_file_of_the_job_is_not_taken_for_a_name_of_a_dump() {
        for (name, expected) in [("7", true), ("12345", true), ("cfg", false), ("", false), ("7.bak", false)] {
            assert_eq!(is_of_a_dump(OsStr::new(&format!("link_remap.{name}"))), expected, "{name}");
        }
        assert!(!is_of_a_dump(OsStr::new("7")));
    }

    /// As CRIU leaves them if it is killed in a dump.
    #[test]
    fn names_that_criu_has_left_are_removed_and_no_others() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("folder");
        std::fs::create_dir(&folder).unwrap();
        let [gone, kept, left, other] = ["gone", "kept", "link_remap.7", "link_remap.8"].map(|name| folder.join(name));
        let file = std::fs::File::create(&gone).unwrap();
        std::fs::hard_link(&gone, &kept).unwrap();
        std::fs::hard_link(&gone, &left).unwrap();
        std::fs::remove_file(&gone).unwrap();
        std::fs::write(&other, "of another job").unwrap();
        // Its folder is gone too: CRIU takes the one above.
        let above = dir.path().join("link_remap.9");
        std::fs::create_dir(folder.join("below")).unwrap();
        let lower = std::fs::File::create(folder.join("below/file")).unwrap();
        let lower_left = folder.join("link_remap.9");
        std::fs::hard_link(folder.join("below/file"), &lower_left).unwrap();
        std::fs::hard_link(folder.join("below/file"), &above).unwrap();
        std::fs::remove_dir_all(folder.join("below")).unwrap();

        let mut sleep = std::process::Command::new("sleep");
        let mut child = sleep.arg("60").stdout(file).stderr(lower).spawn().unwrap();
        let pid = child.id().cast_signed();
        let removed = remove_names(&nameless(&[pid]), pid, None);
        let again = remove_names(&nameless(&[pid]), pid, None);
        let _ = child.kill();
        let _ = child.wait();
        assert_eq!((removed, again), (2, 0));
        assert!(!left.exists() && !lower_left.exists());
        assert!(kept.exists() && other.exists() && above.exists());
    }
}

//! Records files as part of the state: their sizes, and hard links for deleted names.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use crate::launch::identity::Identity;
use crate::launch::output::Files;
use crate::launch::work::WorkFolder;
use crate::launch::{mapped, reaper};
use rekindle_criu::image::{self, Holder};
use rekindle_os::beneath::Beneath;
use rekindle_os::identity;
use rekindle_os::maps;
use rekindle_os::parallel;
use rekindle_os::process::{self, path_in};
use rekindle_store::manifest::{Fifo, Folder, OpenFile, Owner, Recreate, SavedLink};
use rekindle_store::{ImageId, JobPath, PartPath, PathError};

/// The regular files that the frozen job has open for writing, with their present sizes. `root` is the root of the
/// tree, as we see it: files are looked at through its mount namespace.
pub(crate) fn open_for_writing(criu_dir: &Beneath, root: i32) -> Result<Vec<OpenFile>, image::Error> {
    let mut found: Vec<OpenFile> = Vec::new();
    // A server has tens of thousands, and the job is frozen.
    let mut places: HashMap<PathBuf, usize> = HashMap::new();
    for file in image::open_files(criu_dir)? {
        if file.flags & libc::O_ACCMODE == libc::O_RDONLY {
            continue;
        }
        let append = file.flags & libc::O_APPEND != 0;
        if let Some(known) = places.get(&file.path).and_then(|at| found.get_mut(*at)) {
            // With several descriptors, the file counts as appended only if all of them append.
            known.append &= append;
            continue;
        }
        // A device, or a deleted name: CRIU handles those.
        let Some(metadata) = std::fs::metadata(path_in(root, &file.path)).ok().filter(|m| m.is_file()) else {
            continue;
        };
        // The kernel reports absolute paths only.
        let Ok(path) = JobPath::new(file.path) else { continue };
        places.insert(path.to_path_buf(), found.len());
        found.push(OpenFile {
            append,
            position: file.position,
            mode: Some(metadata.mode()),
            ..OpenFile::new(path, metadata.size())
        });
    }
    Ok(found)
}

/// The owners of the files that these processes have open or mapped, by path. They are those of the open files
/// themselves: at the path, another user of the folder may put another file at any time.
///
/// The job is frozen meanwhile, and the mappings of a process with PyTorch take 3 ms to read: several are read at once.
pub(crate) fn owners(tree: &[i32]) -> BTreeMap<PathBuf, Owner> {
    let each = parallel::in_parallel(tree.to_vec(), parallel::cores(), |pid| Ok::<_, Infallible>(owners_in(pid)));
    let Ok(each) = each;
    each.into_iter().flatten().collect()
}

fn owners_in(pid: i32) -> BTreeMap<PathBuf, Owner> {
    let mut found = BTreeMap::new();
    let mut add = |path: &Path, through: String| {
        // Files of the kernel belong to the process that they are about.
        let is_kernels = ["/proc", "/sys"].iter().any(|kernels| path.starts_with(kernels));
        if is_kernels || !path.is_absolute() || found.contains_key(path) {
            return;
        }
        if let Ok(metadata) = std::fs::metadata(through) {
            found.insert(path.to_path_buf(), Owner { uid: metadata.uid(), gid: metadata.gid() });
        }
    };
    for (number, target) in process::descriptors(pid) {
        add(&target, format!("/proc/{pid}/fd/{number}"));
    }
    let maps = maps::read(pid).unwrap_or_default();
    for mapping in maps::mappings(&maps) {
        add(Path::new(OsStr::from_bytes(mapping.name)), format!("/proc/{pid}/map_files/{}", mapping.range()));
    }
    found
}

/// The folders that a restore needs: those of FIFOs and of files that are open for writing, of other files that it puts back
/// (`put_back`), and of bound sockets; working directories; and all folders above them, except `ours`. A job removes some of them while it runs (for
/// example the temporary ones of multiprocessing), and CRIU creates none.
pub(crate) fn folders(
    criu_dir: &Beneath,
    root: i32,
    ours: &[&Path],
    put_back: &[&Path],
) -> Result<Vec<Folder>, image::Error> {
    let mut wanted: BTreeSet<PathBuf> = BTreeSet::new();
    let mut add = |path: &Path| wanted.extend(path.ancestors().map(Path::to_path_buf));
    let is_ours = |path: &Path| ours.iter().any(|ours| path.starts_with(ours));
    for file in image::open_files(criu_dir)? {
        if is_ours(&file.path) {
            continue;
        }
        let metadata = std::fs::metadata(path_in(root, &file.path)).ok();
        let is_fifo = metadata.as_ref().is_some_and(|metadata| metadata.file_type().is_fifo());
        if metadata.is_some_and(|metadata| metadata.is_dir()) {
            add(&file.path);
        } else if is_fifo || file.flags & libc::O_ACCMODE != libc::O_RDONLY {
            file.path.parent().into_iter().for_each(&mut add);
        }
    }
    image::bound_paths(criu_dir)?.iter().filter_map(|path| path.parent()).for_each(&mut add);
    put_back.iter().filter(|path| !is_ours(path)).filter_map(|path| path.parent()).for_each(add);
    let folder = |path: PathBuf| {
        let metadata = std::fs::metadata(path_in(root, &path)).ok().filter(|metadata| metadata.is_dir())?;
        let path = JobPath::new(path).ok()?;
        Some(Folder { path, mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), attributes: None })
    };
    // Names of processes and devices are created by the kernel only.
    let is_kernels = |path: &PathBuf| ["/proc", "/sys"].iter().any(|kernels| path.starts_with(kernels));
    // In the order of paths a folder comes after the one that it is in.
    Ok(wanted.into_iter().filter(|path| !is_kernels(path)).filter_map(folder).collect())
}

/// The FIFOs with a name that the job has open. A program may remove its FIFOs when it ends, as mpirun does, and CRIU
/// creates none that had a name.
pub(crate) fn fifos(criu_dir: &Beneath, root: i32) -> Result<Vec<Fifo>, image::Error> {
    let fifo = |path: PathBuf| {
        let metadata = std::fs::symlink_metadata(path_in(root, &path)).ok().filter(|it| it.file_type().is_fifo())?;
        let path = JobPath::new(path).ok()?;
        Some(Fifo { path, mode: metadata.mode(), uid: metadata.uid(), gid: metadata.gid(), attributes: None })
    };
    let paths: BTreeSet<PathBuf> = image::open_files(criu_dir)?.into_iter().map(|file| file.path).collect();
    Ok(paths.into_iter().filter_map(fifo).collect())
}

/// Sets O_APPEND of the frozen job's output again where the job has cleared it: otherwise it would write on at its old
/// offset after a rotation, and leave a hole that looks like content that was rotated away. `tree` are pids as we see them.
pub(crate) fn append_again(files: &[OpenFile], tree: &[i32], output: &Files) -> io::Result<()> {
    let is_output = |path: &Path| output.stdout == *path || output.stderr == *path;
    if !files.iter().any(|file| !file.append && is_output(&file.path)) {
        return Ok(());
    }
    for pid in tree {
        let pidfd = process::open_pidfd(*pid)?;
        for (number, _) in process::descriptors(*pid).filter(|(_, path)| is_output(path)) {
            let flags = process::open_flags(*pid, number)?;
            // As a launch opens it. What the job has opened itself is its own matter.
            if flags & (libc::O_ACCMODE | libc::O_APPEND) == libc::O_WRONLY {
                let descriptor = process::fetch_descriptor(&pidfd, number)?;
                let flags = OFlag::from_bits_retain(flags) | OFlag::O_APPEND;
                fcntl(&descriptor, FcntlArg::F_SETFL(flags)).map_err(io::Error::from)?;
            }
        }
    }
    Ok(())
}

/// Updates the sizes of the job's output, which may have been rotated since.
pub(crate) fn record_sizes_again(files: &mut [OpenFile], output: &Files) {
    for (path, length) in [&output.stdout, &output.stderr].into_iter().zip(output.lengths()) {
        for file in files.iter_mut().filter(|file| *path == *file.path.as_path()) {
            file.size = length;
        }
    }
}

/// Makes a hard link to each file that CRIU gave a temporary name (`link_remap.N`): CRIU removes that name when the
/// dump is over, and needs it at a restore. No other image has a link of that name, also none of another job that was
/// taken at the same time.
pub(crate) fn save_links(
    criu_dir: &Beneath,
    root: i32,
    id: &ImageId,
    user: Option<&Identity>,
) -> Result<Vec<SavedLink>, Error> {
    let mut saved = Vec::new();
    let remaps = image::link_remaps(criu_dir)?;
    if remaps.is_empty() {
        return Ok(saved);
    }
    let unique =
        std::fs::read_to_string("/proc/sys/kernel/random/uuid").map_err(Error::Unique)?.trim().replace('-', "");
    let pids: BTreeMap<i32, i32> =
        process::tree(root).into_iter().filter_map(|outer| process::inner_pid(outer).zip(Some(outer))).collect();
    for image::LinkRemap { path: link, holder } in remaps {
        let name = link.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let keep = link.with_file_name(format!("{}{id}-{unique}-{name}", SavedLink::PREFIX));
        let made = in_their_folder(root, [&link, &keep], user, |[from, to]| {
            std::fs::hard_link(from, &to)?;
            let metadata = std::fs::symlink_metadata(&to)?;
            Ok((other_names(&to, &metadata), metadata))
        });
        let checked = match made {
            Ok((names, metadata)) => {
                let names = names.iter().map(|name| JobPath::new(link.with_file_name(name)));
                let names = names.collect::<Result<_, _>>()?;
                let owner = Some(Owner { uid: metadata.uid(), gid: metadata.gid() });
                saved.push(SavedLink { link: JobPath::new(link.as_path())?, saved: JobPath::new(keep)?, owner, names });
                // Anybody who may write to the folder can have replaced the name.
                if is_another(&metadata, holder, &pids) { Err(Error::Another(link)) } else { Ok(()) }
            }
            Err(source) => Err(Error::Link { path: keep, source }),
        };
        if let Err(error) = checked {
            drop_links(&saved, root, user);
            return Err(error);
        }
    }
    Ok(saved)
}

/// The names in its folder that the job has given to the file here. sem_open(3) makes a semaphore with another name and removes
/// that, so all processes have it by a name that is gone, and find it by one that none of them shows. It does so in [`SHARED`];
/// elsewhere nothing is looked for, because a folder can have many files, and the job is frozen.
fn other_names(file: &Path, metadata: &std::fs::Metadata) -> Vec<OsString> {
    // CRIU's, and ours.
    const NOT_ITS_OWN: [&str; 2] = ["link_remap.", SavedLink::PREFIX];
    if !file.parent().is_some_and(|folder| folder.ends_with(SHARED)) {
        return Vec::new();
    }
    let entries = file.parent().and_then(|folder| std::fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    let is_one = |entry: &std::fs::DirEntry| {
        let name = entry.file_name();
        !NOT_ITS_OWN.iter().any(|prefix| name.as_encoded_bytes().starts_with(prefix.as_bytes()))
            && entry.metadata().is_ok_and(|it| (it.dev(), it.ino()) == (metadata.dev(), metadata.ino()))
    };
    let mut names: Vec<OsString> = entries.filter(is_one).map(|entry| entry.file_name()).collect();
    names.sort_unstable();
    names
}

/// Where the C library has POSIX semaphores and shared memory; within the root folder.
const SHARED: &str = "dev/shm";

/// Whether this is another file than the one that a process of the job has there. `pids` leads from pids as processes see
/// themselves to those that we see.
fn is_another(named: &std::fs::Metadata, holder: Option<Holder>, pids: &BTreeMap<i32, i32>) -> bool {
    let Some(holder) = holder else { return false };
    let (Holder::Descriptor { pid, .. } | Holder::Mapping { pid, .. }) = holder;
    let Some(pid) = pids.get(&pid) else { return false };
    let file = std::fs::metadata(match holder {
        Holder::Descriptor { fd, .. } => format!("/proc/{pid}/fd/{fd}"),
        Holder::Mapping { start, end, .. } => format!("/proc/{pid}/map_files/{start:x}-{end:x}"),
    });
    file.is_ok_and(|file| (file.dev(), file.ino()) != (named.dev(), named.ino()))
}

/// Changes CRIU's names in the image to names that no other image has: CRIU numbers them from the beginning in each dump.
/// Two jobs that are restored at the same time would otherwise get each other's files.
pub(crate) fn name_apart(criu_dir: &Beneath, links: &mut [SavedLink]) -> Result<(), Error> {
    let name = |link: &SavedLink| {
        let mut name = link.saved.file_name().unwrap_or_default().to_owned();
        name.push(".open");
        name
    };
    let names: BTreeMap<PathBuf, OsString> = links.iter().map(|link| (link.link.to_path_buf(), name(link))).collect();
    image::rename_link_remaps(criu_dir, &names)?;
    for link in links {
        link.link = JobPath::new(link.link.with_file_name(name(link)))?;
    }
    Ok(())
}

/// Works on names in a folder of the job. The user can replace the folder by a link at any time, so this is done with
/// the user's rights if the job has a user.
pub(super) fn in_their_folder<const N: usize, T: Send>(
    root: i32,
    paths: [&Path; N],
    user: Option<&Identity>,
    work: impl FnOnce([PathBuf; N]) -> io::Result<T> + Send,
) -> io::Result<T> {
    match user {
        // The path through /proc needs rights over the reaper, which the user lacks; the job's mounts are ours.
        Some(user) => {
            let paths = paths.map(Path::to_path_buf);
            identity::with_file_rights(user.uid, user.gid, &user.groups, || work(paths))?
        }
        None => work(paths.map(|path| path_in(root, path))),
    }
}

/// CRIU removes its names after the dump. Our links stay, and a restore opens these files by them.
pub(crate) fn name_by_saved(files: &mut [OpenFile], links: &[SavedLink]) {
    for link in links {
        files.iter_mut().filter(|file| file.path == link.link).for_each(|file| file.path.clone_from(&link.saved));
    }
}

/// Removes the links of [`save_links`].
pub(crate) fn drop_links(links: &[SavedLink], root: i32, user: Option<&Identity>) {
    for link in links {
        let removed = in_their_folder(root, [&link.saved], user, |[saved]| std::fs::remove_file(saved));
        // The job may be dead by now. Its mounts were ours.
        if removed.is_err() && user.is_none() {
            let _ = std::fs::remove_file(&link.saved);
        }
    }
}

/// Rekindle's own files that the job has mapped. A restored job continues with its old reaper, which may be of another
/// version or below another store.
pub(crate) fn ours(
    given: &[PathBuf],
    work: &WorkFolder,
    criu_dir: &Beneath,
    root: i32,
) -> Result<Vec<PathBuf>, image::Error> {
    let mut all = given.to_vec();
    let reaper = process::executable(root).filter(|path| reaper::is_named(path));
    // A job that was restored from an image of another place has all of them there, and the next run has only what is in
    // the image.
    let others = work.others();
    let mapped = if others.is_empty() { Vec::new() } else { image::checked_files(criu_dir)? };
    let there = mapped
        .into_iter()
        .map(|file| file.path)
        .filter(|path| mapped::is_named(path) && others.iter().any(|other| path.starts_with(other)));
    for path in reaper.into_iter().chain(there) {
        if !all.contains(&path) && path.exists() {
            all.push(path);
        }
    }
    Ok(all)
}

/// Puts files of ours that the job has mapped into the image: a restore may happen after an upgrade, or on another
/// machine.
pub(crate) fn keep_ours(image: &Beneath, ours: &[PathBuf]) -> io::Result<Vec<Recreate>> {
    image.join("files").make_dirs(0o700)?;
    let keep = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
        let part: PartPath = format!("files/{name}").parse().map_err(io::Error::other)?;
        let mut program = std::fs::File::open(path)?;
        let mode = program.metadata()?.mode() & 0o777;
        // A job from another place has the same program at two paths.
        let mut copy = image.join(&part).change_or_create(0o600)?;
        copy.set_len(0)?;
        io::copy(&mut program, &mut copy)?;
        let path = JobPath::new(path.as_path()).map_err(io::Error::other)?;
        Ok(Recreate { path, mode, part })
    };
    ours.iter().map(keep).collect()
}

/// Why files could not be recorded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Image(#[from] image::Error),
    #[error(transparent)]
    Path(#[from] PathError),
    #[error("cannot create a hard link at {path}: {source}")]
    Link { path: PathBuf, source: io::Error },
    #[error(
        "{0} has become the name of another file while CRIU used it for a deleted file of the job. The next attempt may work"
    )]
    Another(PathBuf),
    #[error("cannot read a random number of the kernel: {0}")]
    Unique(io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_owner_is_that_of_the_open_file_and_not_of_the_one_at_its_path() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let file = std::fs::File::create(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(65_534), Some(65_534)).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").stdout(file).spawn().unwrap();
        let pid = child.id().cast_signed();
        // The kernel maps the program a moment after spawning has succeeded.
        let is_root = |owner: &Owner| owner.uid == 0;
        let until = std::time::Instant::now() + std::time::Duration::from_secs(10);
        let mut before = owners(&[pid]);
        while !before.keys().any(|path| path.ends_with("sleep") || path.ends_with("coreutils"))
            && std::time::Instant::now() < until
        {
            before = owners(&[pid]);
        }
        std::fs::rename(dir.path(), dir.path().with_extension("moved")).unwrap();
        std::fs::create_dir(dir.path()).unwrap();
        std::fs::write(&path, "bob's").unwrap();
        let after = owners(&[pid]);
        child.kill().unwrap();
        let _ = child.wait();
        let moved = dir.path().with_extension("moved");
        std::fs::remove_dir_all(&moved).unwrap();
        let alice = Owner { uid: 65_534, gid: 65_534 };
        assert_eq!((before.get(&path), after.get(&moved.join("file"))), (Some(&alice), Some(&alice)));
        assert_eq!(after.get(&path), None);
        let program = before.iter().find(|(path, _)| path.ends_with("sleep") || path.ends_with("coreutils"));
        assert!(program.is_some_and(|(_, owner)| is_root(owner)), "{before:?}");
    }

    /// An image of CRIU in which this process has a deleted file open, which has the name `link_remap.2` meanwhile.
    fn image_with_link(dir: &Path, fd: i32) -> PathBuf {
        let number = |field: u8, value: u32| {
            let mut bytes = vec![field << 3];
            let mut left = value;
            while left > 0x7f {
                bytes.push(u8::try_from(left & 0x7f | 0x80).unwrap());
                left >>= 7;
            }
            bytes.push(u8::try_from(left).unwrap());
            bytes
        };
        let text = |field: u8, text: &[u8]| [&[field << 3 | 2, u8::try_from(text.len()).unwrap()], text].concat();
        let write = |name: &str, magic: u32, records: &[Vec<u8>]| {
            let mut bytes = [0x5456_4319_u32.to_le_bytes(), magic.to_le_bytes()].concat();
            for record in records {
                bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
                bytes.extend(record);
            }
            std::fs::write(dir.join(name), bytes).unwrap();
        };
        let link = dir.join("link_remap.2");
        let file = |id: u32, path: &Path| {
            let name = path.strip_prefix("/").unwrap().as_os_str().as_bytes();
            let reg = [number(1, id), number(2, 2), number(3, 0), text(6, name)].concat();
            [number(1, 1), number(2, id), text(3, &reg)].concat()
        };
        write("files.img", 0x5630_3138, &[file(1, &dir.join("gone")), file(2, &link)]);
        write("remap-fpath.img", 0x5913_3954, &[[number(1, 1), number(2, 2), number(3, 0)].concat()]);
        write(&format!("ids-{}.img", std::process::id()), 0x5443_2030, &[[number(1, 1), number(2, 9)].concat()]);
        let fd = [number(1, 1), number(2, 0), number(3, 1), number(4, fd.cast_unsigned())].concat();
        write("fdinfo-9.img", 0x5621_3732, &[fd]);
        link
    }

    /// CRIU gives the same names in the dumps of all jobs of the same shape.
    #[test]
    fn no_two_images_share_the_names_of_deleted_files() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let file = std::fs::File::create(dir.join("other-name")).unwrap();
        let link = image_with_link(dir, std::os::fd::AsRawFd::as_raw_fd(&file));
        std::fs::hard_link(dir.join("other-name"), &link).unwrap();
        let (root, id) = (std::process::id().cast_signed(), ImageId::new(1, chrono::DateTime::UNIX_EPOCH));
        let first = save_links(&crate::samples::beneath(dir), root, &id, None).unwrap();
        // Another job takes its first image in the same second.
        let mut second = save_links(&crate::samples::beneath(dir), root, &id, None).unwrap();
        let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
        let [one, other] = [&first, &second].map(|links| links[0].saved.to_path_buf());
        assert_ne!(one, other);
        assert_eq!([inode(&one), inode(&other)], [file.metadata().unwrap().ino(); 2]);

        name_apart(&crate::samples::beneath(dir), &mut second).unwrap();
        let named = image::link_remaps(&crate::samples::beneath(dir)).unwrap();
        assert_eq!(named[0].path, *second[0].link);
        let name = named[0].path.file_name().unwrap().to_str().unwrap();
        assert!(name.starts_with(SavedLink::PREFIX) && named[0].path != other, "{name}");
        assert_eq!(named[0].path.parent(), Some(dir));
    }

    #[test]
    fn a_name_that_leads_to_another_file_by_now_is_not_saved() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let file = std::fs::File::create(dir.join("own")).unwrap();
        let link = image_with_link(dir, std::os::fd::AsRawFd::as_raw_fd(&file));
        std::fs::write(&link, "of another job").unwrap();
        let (root, id) = (std::process::id().cast_signed(), ImageId::new(1, chrono::DateTime::UNIX_EPOCH));
        let error = save_links(&crate::samples::beneath(dir), root, &id, None).unwrap_err();
        assert!(matches!(&error, Error::Another(path) if *path == link), "{error}");
        let names = || std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.file_name());
        assert!(!names().any(|name| name.to_string_lossy().starts_with(SavedLink::PREFIX)));
    }
}

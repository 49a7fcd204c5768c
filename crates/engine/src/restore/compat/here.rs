//! The facts of this machine that an image is compared with.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::launch::{host, world};
use crate::parts::files::place::{self, Astray, Trusted};
use crate::parts::gpu::placement::{Devices, Wishes};
use rekindle_criu::Version;
use rekindle_cuda::nvml::GpuInventory;
use rekindle_os::elf;
use rekindle_os::regular::Found;
use rekindle_store::Manifest;
use rekindle_store::manifest::{Host, MappedFile};

/// The facts of this machine.
#[derive(Debug, Clone)]
pub struct Here {
    /// Processor and kernel.
    pub(crate) host: Host,
    /// The pids of this machine are below it (`kernel.pid_max`).
    pub(crate) pid_max: Option<i32>,
    /// CRIU's version, if it is installed.
    pub(crate) criu: Option<Version>,
    /// The version of the NVIDIA driver; `None` without a driver, or if the job does not use CUDA.
    pub driver: Option<String>,
    /// The GPUs, for a job that used some.
    pub devices: Devices,
    /// Further facts and wishes about the GPUs.
    pub wishes: Wishes,
    /// The files that the image names.
    pub(crate) files: BTreeMap<PathBuf, FileHere>,
}

/// What exists under the path of a file that the image needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FileHere {
    /// Nothing.
    Missing,
    /// Something else, such as a folder or a device.
    NotAFile,
    /// It could not be examined.
    Unknown,
    /// Its path leads through a symbolic link of a user who is neither root nor the job's.
    Link {
        /// The link.
        link: PathBuf,
        /// The number of the link's owner.
        owner: u32,
    },
    /// A regular file.
    File {
        /// In bytes.
        size: u64,
        /// `st_mode`.
        mode: u32,
        /// The number of its owner.
        owner: u32,
        /// Its build-id, as in a manifest; only read if the image has one.
        build_id: Option<String>,
    },
}

impl Here {
    /// Collects all facts that this image is compared with.
    #[must_use]
    pub fn look(manifest: &Manifest, criu: Option<Version>, wishes: &Wishes) -> Here {
        let (devices, driver) = look_at_gpus(manifest, wishes);
        let files = manifest.mapped_files.iter();
        let trusted = trusted(manifest);
        let look = |file: &MappedFile| {
            // Images of earlier versions have neither owners nor, some of them, the job's user.
            let trusted = trusted.filter(|_| file.owner.is_some());
            (file.path.to_path_buf(), look_at(&file.path, file.build_id.is_some(), trusted))
        };
        let files = files.map(look);
        let pid_max = world::read_pid_max();
        Here { host: host::describe(), pid_max, criu, driver, devices, wishes: wishes.clone(), files: files.collect() }
    }

    /// Queries the GPUs again, because their free memory changes.
    pub(crate) fn look_again(&mut self, manifest: &Manifest) {
        (self.devices, self.driver) = look_at_gpus(manifest, &self.wishes);
    }
}

fn look_at_gpus(manifest: &Manifest, wishes: &Wishes) -> (Devices, Option<String>) {
    if manifest.tree.cuda.is_empty() {
        return (Devices::default(), None);
    }
    let inventory = GpuInventory::read();
    (Devices::of(&inventory, wishes), inventory.driver)
}

/// The user of the image's job. A restore checks that it is the user whom the job runs as now.
pub(super) fn trusted(manifest: &Manifest) -> Option<Trusted> {
    manifest.rights.as_ref().map(|rights| Trusted::user(rights.uid))
}

/// The job's user may replace the file at any moment, by a FIFO or a device too: those must not be opened.
fn look_at(path: &Path, has_build_id: bool, trusted: Option<Trusted>) -> FileHere {
    // CRIU follows a link that replaced the file since.
    let found = match place::find(path, trusted) {
        Ok(found) => found,
        Err(Astray::Link { link, owner }) => return FileHere::Link { link, owner },
        Err(Astray::Io(error)) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return FileHere::Missing;
        }
        Err(Astray::Io(_)) => return FileHere::Unknown,
    };
    let Ok(metadata) = found.metadata() else { return FileHere::Unknown };
    if !metadata.is_file() {
        return FileHere::NotAFile;
    }
    let build_id = || {
        let id = elf::build_id(&Found::from(found).read().ok()?)?;
        Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
    };
    let build_id = if has_build_id { build_id() } else { None };
    FileHere::File { size: metadata.len(), mode: metadata.mode(), owner: metadata.uid(), build_id }
}

#[cfg(test)]
mod tests {
    use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};
    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    use super::*;

    /// The job's user can replace a file by a FIFO at any moment.
    #[test]
    fn a_fifo_put_in_place_of_a_file_does_not_hang_the_look() {
        let dir = tempfile::tempdir().unwrap();
        let other = dir.path().join("fifo");
        nix::unistd::mkfifo(&other, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        look_while_exchanged(&dir.path().join("lib.so"), other);
    }

    /// Opening a device can have effects; that of a watchdog begins a countdown to a reset of the machine.
    #[test]
    fn what_a_link_put_in_place_of_a_file_leads_to_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (opened, link) = (dir.path().join("fifo"), dir.path().join("link"));
        nix::unistd::mkfifo(&opened, nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
        std::os::unix::fs::symlink(&opened, &link).unwrap();
        let opens = Inotify::init(InitFlags::IN_NONBLOCK).unwrap();
        opens.add_watch(&opened, AddWatchFlags::IN_OPEN).unwrap();
        look_while_exchanged(&dir.path().join("lib.so"), link);
        assert_eq!(opens.read_events().map(|events| events.len()), Err(nix::errno::Errno::EAGAIN));
    }

    /// Looks at a file while it is exchanged with `other` all the time.
    fn look_while_exchanged(path: &Path, other: PathBuf) {
        let path = path.to_owned();
        std::fs::write(&path, b"\x7fELF\x02\x01").unwrap();
        let (sender, done) = std::sync::mpsc::channel();
        let (from, to) = (path.clone(), other);
        let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
        let over = std::sync::Arc::clone(&stop);
        let swapper = std::thread::spawn(move || {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                renameat2(AT_FDCWD, &from, AT_FDCWD, &to, RenameFlags::RENAME_EXCHANGE).unwrap();
            }
        });
        std::thread::spawn(move || {
            let (mut looks, mut files) = (0_u32, 0_u32);
            while looks < 20_000 || files < 100 {
                looks += 1;
                files += u32::from(matches!(look_at(&path, true, None), FileHere::File { .. }));
            }
            let _ = sender.send(());
        });
        let seen = done.recv_timeout(std::time::Duration::from_secs(60));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        swapper.join().unwrap();
        seen.expect("it hangs");
    }
}

//! What an image is compared with.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::restart::gpus::{Devices, Wishes};
use crate::store::Manifest;
use crate::store::manifest::Host;
use crate::sys::criu::Version;
use crate::sys::elf;
use crate::sys::nvml::GpuInventory;
use crate::telemetry::host;

/// The facts of this machine.
#[derive(Debug, Clone)]
pub struct Here {
    /// Processor and kernel.
    pub host: Host,
    /// Where one is installed.
    pub criu: Option<Version>,
    /// The version of the NVIDIA driver. None without one, and where no job asks for it.
    pub driver: Option<String>,
    /// The GPUs, for a job that used some.
    pub devices: Devices,
    /// What is known or wanted of them besides.
    pub wishes: Wishes,
    /// The files that the image names.
    pub files: BTreeMap<PathBuf, FileHere>,
}

/// What has the name of a file that the image wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileHere {
    /// Nothing.
    Missing,
    /// A folder, a device.
    NotAFile,
    /// It can not be looked at.
    Unknown,
    /// A regular file.
    File {
        /// In bytes.
        size: u64,
        /// `st_mode`.
        mode: u32,
        /// As in a manifest; only looked for where the image has one.
        build_id: Option<String>,
    },
}

impl Here {
    /// Looks at all that this image wants to be compared with.
    #[must_use]
    pub fn look(manifest: &Manifest, criu: Option<Version>, wishes: &Wishes) -> Here {
        let (devices, driver) = look_at_gpus(manifest, wishes);
        let files = manifest.mapped_files.iter();
        let files = files.map(|file| (file.path.to_path_buf(), look_at(&file.path, file.build_id.is_some())));
        Here { host: host::describe(), criu, driver, devices, wishes: wishes.clone(), files: files.collect() }
    }

    /// Looks at the GPUs again: what is free of them changes.
    pub fn look_again(&mut self, manifest: &Manifest) {
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

fn look_at(path: &Path, has_build_id: bool) -> FileHere {
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return FileHere::Missing;
        }
        Err(_) => return FileHere::Unknown,
    };
    if !metadata.is_file() {
        return FileHere::NotAFile;
    }
    let build_id = || {
        let id = elf::build_id(&File::open(path).ok()?)?;
        Some(id.iter().map(|byte| format!("{byte:02x}")).collect())
    };
    let build_id = if has_build_id { build_id() } else { None };
    FileHere::File { size: metadata.len(), mode: metadata.mode(), build_id }
}

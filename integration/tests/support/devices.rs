//! Devices of this machine that stand for NVIDIA's (`REKINDLE_TEST_DEVICES` of a debug build).

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]
#![allow(dead_code, reason = "each test binary uses a part")]

use std::fs::{self, OpenOptions};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Character devices that can be opened without anything happening, and that CRIU does not know. None can be mapped.
const CHARACTER: [&str; 5] = ["/dev/kvm", "/dev/fuse", "/dev/loop-control", "/dev/btrfs-control", "/dev/vga_arbiter"];

/// Two devices, and what rekindle must be told to take them for NVIDIA's.
#[derive(Debug, Clone)]
pub(crate) struct StandIns {
    /// A character device: it stands for /dev/nvidiactl.
    pub(crate) control: PathBuf,
    /// A block device, which can be mapped: it stands for /dev/nvidia-uvm.
    pub(crate) memory: PathBuf,
    /// Another character device, which is not named.
    pub(crate) other: PathBuf,
    /// `REKINDLE_TEST_DEVICES`.
    pub(crate) variable: String,
}

impl StandIns {
    /// Says SKIP, or fails where they are required (`REKINDLE_TEST_REQUIRE=devices`).
    pub(crate) fn find() -> Option<StandIns> {
        let debug = cfg!(debug_assertions);
        if !rekindle_testing::require("devices", debug, "only a debug build takes other devices for NVIDIA's") {
            return None;
        }
        let opens = |path: &PathBuf| OpenOptions::new().read(true).open(path).is_ok();
        let mut characters = CHARACTER.iter().map(PathBuf::from).filter(opens);
        let mut blocks: Vec<PathBuf> = fs::read_dir("/sys/block")
            .into_iter()
            .flatten()
            .flatten()
            .map(|e| Path::new("/dev").join(e.file_name()))
            .collect();
        blocks.sort();
        let found = (characters.next(), characters.next(), blocks.into_iter().find(opens));
        let why = format!("this needs two character devices and a block device: {found:?}");
        let all = match found {
            (Some(control), Some(other), Some(memory)) => Some((control, other, memory)),
            _ => None,
        };
        let (control, other, memory) = rekindle_testing::needs("devices", all, &why)?;
        let variable = format!("nvidia={} nvidia-uvm={}", named('c', &control), named('b', &memory));
        Some(StandIns { control, memory, other, variable })
    }
}

fn named(kind: char, path: &Path) -> String {
    let rdev = fs::metadata(path).unwrap().rdev();
    format!("{kind}{}:{}", nix::sys::stat::major(rdev), nix::sys::stat::minor(rdev))
}

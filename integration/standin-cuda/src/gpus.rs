//! The GPUs of this machine: the file `gpus` beside the control files, looked at whenever it matters.

use std::fs;
use std::path::Path;

use crate::memory::MIB;

/// A GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub uuid: [u8; 16],
    pub name: String,
    /// Bytes of memory.
    pub(crate) total: u64,
    /// Of those, taken by somebody else.
    pub(crate) taken: u64,
    /// Fallen off the bus: it has a number, and nothing else can be asked.
    pub(crate) lost: bool,
    pub(crate) divided: bool,
    pub(crate) is_virtual: bool,
}

/// All of them; without the file two with 1 GiB each.
pub(crate) fn all(folder: &Path) -> Vec<Gpu> {
    let text = fs::read_to_string(folder.join("gpus")).unwrap_or_else(|_| "a0 1024 0\nb0 1024 0\n".into());
    text.lines().filter_map(parse).collect()
}

fn parse(line: &str) -> Option<Gpu> {
    let mut words = line.split_whitespace();
    let uuid = [u8::from_str_radix(words.next()?, 16).ok()?; 16];
    let mut mib = || Some(words.next()?.parse::<u64>().ok()? * MIB);
    let (total, taken) = (mib()?, mib()?);
    let (mut gpu, name) =
        (Gpu { uuid, name: String::new(), total, taken, lost: false, divided: false, is_virtual: false }, "Stand-in");
    gpu.name = name.into();
    for word in words {
        match word {
            "lost" => gpu.lost = true,
            "mig" => gpu.divided = true,
            "vgpu" => gpu.is_virtual = true,
            other => gpu.name = other.to_owned(),
        }
    }
    Some(gpu)
}

/// Those that a process can open.
pub(crate) fn usable(folder: &Path) -> Vec<Gpu> {
    all(folder).into_iter().filter(|gpu| !gpu.lost).collect()
}

//! Why the driver answers NOT_SUPPORTED: what can be seen of it, in words.
//!
//! The driver (580) has one code for managed memory, an attached profiler, divided and virtual GPUs, MPS, and a process that is
//! just starting. A profiler is attached from its first use on, also after the profile, and with TEARDOWN_CUPTI=1 too (PyTorch 2.11,
//! one H200). PyTorch maps CUPTI also without a profile.

use std::fmt::Write as _;
use std::path::Path;

use rekindle_os::{maps, process};

use crate::nvml::{GpuInventory, Mig};

/// What can be seen.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Seen {
    /// The file name of a profiler's library that the process has mapped.
    profiler: Option<String>,
    /// A GPU that is divided.
    is_mig: bool,
    /// A virtual GPU.
    is_virtual: bool,
    /// The process talks to MPS, as far as its environment says.
    is_mps: bool,
}

/// Libraries of CUPTI, of Nsight's injection, and of compute-sanitizer.
const PROFILERS: [&[u8]; 4] = [b"libcupti.so", b"libToolsInjection", b"libcuda-injection", b"libsanitizer-collection"];

/// MPS's folder, if CUDA_MPS_PIPE_DIRECTORY does not name another.
const MPS: &str = "/tmp/nvidia-mps";

impl Seen {
    fn look(pid: i32) -> Seen {
        let maps = maps::read(pid).unwrap_or_default();
        let name = |mapping: &maps::Mapping<'_>| String::from_utf8_lossy(mapping.file_name()).into_owned();
        let is_profiler =
            |mapping: &maps::Mapping<'_>| PROFILERS.iter().any(|one| mapping.file_name().starts_with(one));
        let gpus = GpuInventory::read().gpus;
        let pipe = process::environment(pid, "CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| MPS.to_owned());
        Seen {
            profiler: maps::mappings(&maps).find(is_profiler).map(|mapping| name(&mapping)),
            is_mig: gpus.iter().any(|gpu| gpu.mig == Mig::On),
            is_virtual: gpus.iter().any(|gpu| gpu.is_virtual),
            is_mps: Path::new(&pipe).join("control").exists(),
        }
    }

    fn words(&self) -> String {
        let mut words = String::new();
        let mut others = vec!["managed memory (cudaMallocManaged)"];
        let mut say = |is_seen: bool, seen: &str, other: &'static str| match is_seen {
            true => {
                let _ = write!(words, ". {seen}");
            }
            false => others.push(other),
        };
        let library = self.profiler.as_deref().unwrap_or_default();
        let profiler = format!(
            "It has {library} mapped: if a profiler is or was at work in it (torch.profiler, Nsight, CUPTI), run the job without it, \
             because snapshots work only before the first profile"
        );
        say(self.profiler.is_some(), &profiler, "a profiler");
        say(self.is_mig, "A GPU is divided (MIG): use whole GPUs", "MIG");
        say(self.is_virtual, "A GPU is virtual (vGPU): use a whole GPU", "vGPU");
        say(self.is_mps, "MPS runs here: start the job without it", "MPS");
        others.push("a process that is just starting: then the next attempt works");
        let lead = if words.is_empty() { "possible reasons" } else { "other possible reasons" };
        let _ = write!(words, ". {}: {}", capitalized(lead), others.join(", "));
        words
    }
}

fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().collect::<String>() + chars.as_str())
}

/// The words for a process, to be put behind the error.
pub(crate) fn of(pid: i32) -> String {
    Seen::look(pid).words()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_seen_comes_first_and_is_not_listed_again() {
        let nothing = Seen::default().words();
        assert!(
            nothing.starts_with(". Possible reasons: managed memory (cudaMallocManaged), a profiler, MIG, vGPU, MPS")
        );
        let profiled = Seen { profiler: Some("libcupti.so.13".into()), ..Seen::default() }.words();
        assert!(
            profiled.starts_with(". It has libcupti.so.13 mapped") && profiled.contains("run the job without it"),
            "{profiled}"
        );
        assert!(
            profiled
                .contains(". Other possible reasons: managed memory (cudaMallocManaged), MIG, vGPU, MPS, a process")
        );
        let divided = Seen { is_mig: true, is_mps: true, ..Seen::default() }.words();
        assert!(divided.contains("(MIG)") && divided.contains("MPS runs here") && !divided.contains("a profiler, MIG"));
    }
}

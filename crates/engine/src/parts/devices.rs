//! NVIDIA's devices in processes that are not CUDA processes.
//!
//! A fork of a CUDA process (a worker of a DataLoader, of a compiler) has its parent's descriptors and most of its
//! mappings of the devices. The driver checkpoints the parent and leaves them in the child. The child cannot use them:
//! CUDA does not work there (driver 580: NOT_INITIALIZED). A process that only uses NVML has descriptors, no mappings,
//! and not /dev/nvidia-uvm. One whose libraries have only asked OpenCL for its devices has descriptors of all of them,
//! and no mappings. CRIU refuses each unless a plugin accepts them (`native/plugin/`).
//!
//! ```text
//!  prepare   find NVIDIA's devices on this machine; put the plugin where CRIU looks for it     job runs
//!  dump      CRIU asks the plugin, and records the devices
//!            used by a CUDA process, or without CUDA? the dump fails                           job is frozen
//!            else the image gets /dev/null and memory of zeros instead
//! ```
//!
//! The running job is not changed, and the image contains nothing of a device: it can be restored on a machine without
//! one. In the restored process each descriptor number is in use, calls on it fail, and the addresses are valid.

mod libraries;

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::Duration;

use rekindle_criu::image::{self, Replaced};
use rekindle_os::beneath::Beneath;
use rekindle_os::{clock, process};

use libraries::Libraries;

/// A device through which a process uses a GPU or queries its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Device {
    /// `c` or `b`, as ls(1) shows it.
    kind: char,
    major: u64,
    /// `None`: all minor numbers.
    minor: Option<u64>,
    /// /dev/nvidia-uvm: a process that has it uses the GPU's memory, or inherited it.
    memory: bool,
}

/// NVIDIA's name for its memory device, in /proc/devices.
const MEMORY: &str = "nvidia-uvm";

impl Device {
    fn matches(&self, kind: char, major: u64, minor: u64) -> bool {
        self.kind == kind && self.major == major && self.minor.is_none_or(|own| own == minor)
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}", self.kind, self.major)?;
        self.minor.map_or(Ok(()), |minor| write!(f, ":{minor}"))
    }
}

/// NVIDIA's devices, which CRIU's plugin makes CRIU accept.
#[derive(Debug)]
pub struct Devices {
    all: Vec<Device>,
    list: String,
}

/// What was left out of an image.
#[derive(Debug)]
pub(crate) struct Settled {
    /// Notes for the user.
    pub(crate) notes: Vec<String>,
    pub(crate) left_out: LeftOut,
}

/// Devices that are not in an image, with pids as the job sees them.
#[derive(Debug, Default)]
pub(crate) struct LeftOut {
    /// Descriptors: /dev/null takes their place.
    pub(crate) descriptors: Vec<(i32, i32)>,
    /// Memory of processes, from and to these addresses: zeros take its place.
    pub(crate) memory: Vec<(i32, u64, u64)>,
}

impl Devices {
    /// The devices of this machine, if it has any.
    pub fn find() -> Option<Devices> {
        let mut all = nvidia(&std::fs::read_to_string("/proc/devices").unwrap_or_default());
        all.extend(stand_ins());
        let list = all.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        (!all.is_empty()).then_some(Devices { all, list })
    }

    /// The list for CRIU's plugin.
    pub fn list(&self) -> &str {
        &self.list
    }

    /// Removes the devices from the image in `criu_dir`, while all tasks are frozen. `root` is the root of the tree and
    /// `cuda` are the CUDA processes in it, as we see them. Returns notes for the user; or an error if the job could
    /// not run without the devices.
    pub(crate) fn settle(&self, criu_dir: &Beneath, root: i32, cuda: &[i32]) -> Result<Settled, Unsettled> {
        let replaced = image::without_devices(criu_dir).map_err(|e| Unsettled::Refused(rekindle_base::chain(&e)))?;
        let mut left_out = LeftOut::default();
        for Replaced { pid, descriptors, mappings, .. } in &replaced {
            left_out.descriptors.extend(descriptors.iter().map(|number| (*pid, *number)));
            left_out.memory.extend(mappings.iter().map(|(start, end)| (*pid, *start, *end)));
        }
        if replaced.is_empty() {
            return Ok(Settled { notes: Vec::new(), left_out });
        }
        let tree: Vec<(i32, i32)> =
            process::tree(root).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
        let (mut asking, mut idle) = (Vec::new(), Vec::new());
        for Replaced { pid, descriptors, mappings, writable } in replaced {
            let outer = tree.iter().find(|(inner, _)| *inner == pid).map(|(_, outer)| *outer);
            let lost = || Unsettled::Refused(format!("process {pid} has NVIDIA devices open and cannot be found"));
            let outer = outer.ok_or_else(lost)?;
            let shown = || format!("process {pid} ({})", process::name(outer).unwrap_or_default());
            let facts = Facts {
                is_cuda: cuda.contains(&outer),
                is_fork: cuda.iter().any(|cuda| is_fork(outer, *cuda)),
                has_memory: !mappings.is_empty() || descriptors.iter().any(|fd| self.is_memory(outer, *fd)),
            };
            tracing::debug!(
                pid,
                descriptors = descriptors.len(),
                mappings = mappings.len(),
                writable,
                ?facts,
                "NVIDIA devices left out"
            );
            let verdict = judge(facts);
            match verdict {
                Verdict::Inherited => {}
                Verdict::Asks => asking.push(shown()),
                Verdict::Left | Verdict::Uses => {
                    let libraries = Libraries::of(outer);
                    if !is_idle_opencl(writable, &libraries) {
                        let why = refusal(verdict, &shown(), &libraries);
                        let is_starting = verdict == Verdict::Uses && is_young(outer);
                        return Err(if is_starting { Unsettled::Starting(why) } else { Unsettled::Refused(why) });
                    }
                    idle.push(shown());
                }
            }
        }
        let note = |all: &[String], before: &str, after: &str| {
            (!all.is_empty()).then(|| format!("{before} {}: {after}", all.join(", ")))
        };
        let asks = "NVML calls fail after a restore until it initialises NVML again";
        let notes = [
            note(&asking, "NVML is used without CUDA by", asks),
            note(&idle, "OpenCL is initialised and not used in", "OpenCL calls fail after a restore"),
        ];
        Ok(Settled { notes: notes.into_iter().flatten().collect(), left_out })
    }

    fn is_memory(&self, pid: i32, fd: i32) -> bool {
        let Ok(metadata) = std::fs::metadata(format!("/proc/{pid}/fd/{fd}")) else { return false };
        let kind = if metadata.file_type().is_char_device() { 'c' } else { 'b' };
        let (major, minor) = (libc::major(metadata.rdev()), libc::minor(metadata.rdev()));
        self.all.iter().any(|device| device.memory && device.matches(kind, major.into(), minor.into()))
    }
}

/// Why the job could not run without its devices, in words.
#[derive(Debug)]
pub(crate) enum Unsettled {
    Refused(String),
    /// A process has just begun, and may be starting CUDA.
    Starting(String),
}

/// A program starts CUDA soon after it begins, if it does.
const YOUNG: Duration = Duration::from_secs(10);

fn is_young(pid: i32) -> bool {
    process::began(pid).is_some_and(|began| clock::since_boot().saturating_sub(began) < YOUNG)
}

/// What is known of a process with devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Facts {
    /// It was just checkpointed by the driver.
    is_cuda: bool,
    /// It is a fork of a CUDA process.
    is_fork: bool,
    /// It has mappings of devices, or the device of the GPU's memory.
    has_memory: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// A CUDA process whose devices are not only CUDA's.
    Left,
    /// It inherited them from its parent, and cannot use them.
    Inherited,
    /// It only uses NVML.
    Asks,
    /// It uses them, and no checkpoint has released them.
    Uses,
}

fn judge(facts: Facts) -> Verdict {
    match facts {
        Facts { is_cuda: true, .. } => Verdict::Left,
        Facts { has_memory: false, .. } => Verdict::Asks,
        Facts { is_fork: true, .. } => Verdict::Inherited,
        Facts { .. } => Verdict::Uses,
    }
}

fn refusal(verdict: Verdict, process: &str, libraries: &Libraries) -> String {
    let (how, advice) = libraries.words();
    let what = match verdict {
        Verdict::Left => "still has NVIDIA devices open after its CUDA checkpoint: it also uses the GPU",
        _ => {
            "has NVIDIA devices open: either it is just starting CUDA, and the next attempt will work, or it uses the GPU"
        }
    };
    format!("{process} {what} {how}, which cannot be restored{advice}")
}

/// Whether the devices that a process has open, after the checkpoint of its CUDA, come only from OpenCL that was asked
/// for its devices and is not used.
///
/// clGetPlatformIDs opens the devices and maps some of them, either to be read or to be written (two H200, driver
/// 580.159.04, 2026-11-23: 11 descriptors; two mappings of each GPU for writing, two of /dev/nvidiactl for reading). A
/// context adds 28 mappings that can be both read and written, of the GPU, of /dev/nvidiactl and of /dev/nvidia-uvm,
/// and takes them away when it is released. With another library of NVIDIA there, the descriptors could be of that one.
fn is_idle_opencl(writable: usize, libraries: &Libraries) -> bool {
    writable == 0 && libraries.is_opencl_alone()
}

/// Whether `parent` made `pid` by forks without an exec. Then both have the stack of the same exec, at a random address
/// (`mm->start_stack`, which CRIU also restores), and `pid` is not older. Their descriptors do not show it: the driver
/// gives the parent new ones after each checkpoint.
fn is_fork(pid: i32, parent: i32) -> bool {
    let stack = process::stack_start(parent).filter(|stack| *stack != 0);
    stack.is_some() && process::stack_start(pid) == stack && process::start_time(pid) >= process::start_time(parent)
}

/// NVIDIA's character devices in /proc/devices, which is the same in containers: all minor numbers of its majors.
fn nvidia(text: &str) -> Vec<Device> {
    let characters =
        text.lines().skip_while(|line| !line.starts_with("Character")).take_while(|line| !line.starts_with("Block"));
    let device = |line: &str| {
        let (major, name) = line.trim().split_once(' ')?;
        let major = name.starts_with("nvidia").then(|| major.parse().ok())??;
        Some(Device { kind: 'c', major, minor: None, memory: name == MEMORY })
    };
    let mut all: Vec<Device> = Vec::new();
    for device in characters.filter_map(device) {
        // The driver lists one major number under several names.
        if !all.contains(&device) {
            all.push(device);
        }
    }
    all
}

/// Devices that replace NVIDIA's in a test of a debug build, `nvidia=c10:232 nvidia-uvm=b7:0`. A release build cannot
/// name others.
fn stand_ins() -> Vec<Device> {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_DEVICES").ok()).flatten();
    named.iter().flat_map(|text| text.split(' ')).filter_map(stand_in).collect()
}

fn stand_in(text: &str) -> Option<Device> {
    let (name, device) = text.split_once('=')?;
    let (kind, numbers) = device.split_at_checked(1)?;
    let (major, minor) = numbers.split_once(':')?;
    let (major, minor) = (major.parse().ok()?, Some(minor.parse().ok()?));
    Some(Device { kind: kind.chars().next()?, major, minor, memory: name == MEMORY })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_majors_of_nvidia_are_found_by_name() {
        let text = "\
Character devices:
  1 mem
 10 misc
195 nvidia
195 nvidia-modeset
195 nvidiactl
226 drm
507 nvidia-uvm
510 nvidia-caps
511 nvidia-caps-imex-channels

Block devices:
  7 loop
195 nvidia
";
        let found = nvidia(text);
        let list: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(list, ["c195", "c507", "c510", "c511"]);
        let memory: Vec<u64> = found.iter().filter(|device| device.memory).map(|device| device.major).collect();
        assert_eq!(memory, [507]);
        assert!(nvidia("").is_empty());
    }

    #[test]
    fn stand_ins_have_one_number_each() {
        let device = stand_in("nvidia-uvm=b7:0").unwrap();
        assert!(device.memory && device.matches('b', 7, 0) && !device.matches('b', 7, 1) && !device.matches('c', 7, 0));
        assert_eq!(device.to_string(), "b7:0");
        for text in ["", "c10:229", "nvidia=", "nvidia=c10", "nvidia=cx:1"] {
            assert_eq!(stand_in(text), None, "{text}");
        }
    }

    #[test]
    fn only_what_is_of_no_use_is_left_out() {
        let facts = |is_cuda, is_fork, has_memory| Facts { is_cuda, is_fork, has_memory };
        assert_eq!(judge(facts(true, false, true)), Verdict::Left);
        assert_eq!(judge(facts(true, true, false)), Verdict::Left);
        assert_eq!(judge(facts(false, true, true)), Verdict::Inherited);
        assert_eq!(judge(facts(false, false, true)), Verdict::Uses);
        assert_eq!(judge(facts(false, false, false)), Verdict::Asks);
        assert_eq!(judge(facts(false, true, false)), Verdict::Asks);
    }

    #[test]
    fn opencl_without_a_writable_mapping_of_a_device_is_not_used() {
        let opencl = Libraries::find("7f00-7f01 r-xp 0 fe:00 7 /lib/libnvidia-opencl.so.1");
        let both = Libraries::find(
            "7f00-7f01 r-xp 0 fe:00 7 /libnvidia-opencl.so.1\n7f02-7f03 r-xp 0 fe:00 7 /libnvcuvid.so.1",
        );
        assert!(is_idle_opencl(0, &opencl) && !is_idle_opencl(1, &opencl));
        assert!(!is_idle_opencl(0, &both) && !is_idle_opencl(0, &Libraries::default()));
        assert!(refusal(Verdict::Left, "process 7 (a)", &opencl).contains("by OpenCL (libnvidia-opencl.so.1), which"));
    }

    #[test]
    fn a_program_that_was_executed_is_no_fork() {
        let mut sleep = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let (me, other) = (std::process::id().cast_signed(), sleep.id().cast_signed());
        let found = (is_fork(other, me), is_fork(me, me), is_fork(me, i32::MAX));
        sleep.kill().unwrap();
        let _ = sleep.wait();
        assert_eq!(found, (false, true, false));
    }
}

//! What the NVIDIA driver's fault numbers (Xid) mean, and what NVIDIA advises.
//!
//! Source: NVIDIA's Xid catalogue, <https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html>, column
//! "Resolution Bucket (Immediate Action)", read on 2026-11-21. The descriptions are ours. If the catalogue has a work
//! flow instead of a bucket, the table has the first step that can end it: 48 and 74 need a reset, 45 follows another
//! fault.

use std::fmt;

/// What to do about a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remedy {
    /// Nothing: it is informational, or follows another fault. It ends no job.
    Nothing,
    /// The job ends, but the GPU is good.
    RestartJob,
    /// The GPU works again after a reset, during which nothing may use it.
    ResetGpu,
    /// The GPU works again after a restart of the machine.
    RestartMachine,
    /// NVIDIA advises to contact support, or gives no advice.
    Support,
}

impl Remedy {
    /// Whether no job should be started on that GPU before somebody has checked it.
    #[must_use]
    pub fn needs_drain(self) -> bool {
        matches!(self, Remedy::ResetGpu | Remedy::RestartMachine)
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Remedy::Nothing => "nothing needs to be done",
            Remedy::RestartJob => "restart the job",
            Remedy::ResetGpu => "stop using this GPU and reset it (nvidia-smi --gpu-reset), or restart the machine",
            Remedy::RestartMachine => "stop using this machine and restart it",
            Remedy::Support => "have the machine checked; ask the vendor's support",
        })
    }
}

/// Faults that a program causes by its error or its end, also if another program shares memory with it. After a death
/// they say nothing about the GPU. When one rank of several is killed, its peers on NVLink get 109 or 137
/// (two H200, driver 580).
const OF_PROGRAMS: [u32; 8] = [13, 31, 43, 45, 68, 69, 109, 137];

/// A kernel did not let another program have the GPU in time. After a checkpoint and a restore the driver does not interrupt a
/// process's kernels any more (580, measured).
pub const SWITCH_TIMEOUT: u32 = 109;

/// Whether the end of a program explains this fault.
#[must_use]
pub fn may_follow_a_death(xid: u32) -> bool {
    OF_PROGRAMS.contains(&xid)
}

/// A number, its meaning in words, and the remedy.
type Entry = (u32, &'static str, Remedy);

/// Sorted by number.
const CATALOGUE: &[Entry] = &[
    (8, "the GPU stopped processing", Remedy::RestartJob),
    (11, "a stream of commands was invalid or corrupted", Remedy::RestartJob),
    (13, "an exception of the graphics or compute engine, mostly an error of the program", Remedy::RestartJob),
    (14, "an injected fault", Remedy::Nothing),
    (25, "a stream of commands was illegal", Remedy::RestartJob),
    (31, "a page fault of GPU memory, mostly an error of the program", Remedy::RestartJob),
    (32, "a stream of commands was corrupted on PCI Express", Remedy::RestartJob),
    (37, "an error of the driver's firmware", Remedy::Nothing),
    (38, "a time-out of the driver's firmware", Remedy::Nothing),
    (39, COPY, Remedy::RestartJob),
    (40, COPY, Remedy::RestartJob),
    (41, COPY, Remedy::RestartJob),
    // The catalogue's "ignore" applies to the GPU, which is good; the program's work on it is lost.
    (43, "the GPU stopped the program's work after an error of the program", Remedy::RestartJob),
    (44, "a fault at a context switch", Remedy::Nothing),
    (45, "the driver cleaned up after a program that ended", Remedy::Nothing),
    (46, "the GPU stopped processing and timed out", Remedy::ResetGpu),
    (48, "memory error that ECC cannot correct (double bit)", Remedy::ResetGpu),
    (54, "the board's power cable is not connected", Remedy::Support),
    (60, MEDIA, Remedy::RestartJob),
    (62, "a micro-controller of the GPU halted", Remedy::ResetGpu),
    (63, "a page or row of GPU memory is retired", Remedy::Nothing),
    (64, "a page or row of GPU memory could not be retired", Remedy::ResetGpu),
    (66, "an illegal access of the driver", Remedy::Nothing),
    (67, "an illegal access of the driver", Remedy::Nothing),
    (68, MEDIA, Remedy::RestartJob),
    (69, "a class error of the graphics or compute engine", Remedy::RestartJob),
    (70, COPY, Remedy::RestartJob),
    (71, COPY, Remedy::RestartJob),
    (72, COPY, Remedy::RestartJob),
    (74, "an error of an NVLink, here or at its other end", Remedy::ResetGpu),
    (75, COPY, Remedy::RestartJob),
    (76, COPY, Remedy::RestartJob),
    (77, COPY, Remedy::RestartJob),
    (78, "a virtual GPU could not be started: driver and firmware do not match", Remedy::Support),
    (79, "the GPU has fallen off the bus", Remedy::RestartMachine),
    (80, "data was corrupted during the transfer to the GPU", Remedy::RestartJob),
    (82, MEDIA, Remedy::RestartJob),
    (83, MEDIA, Remedy::RestartJob),
    (84, MEDIA, Remedy::RestartJob),
    (85, COPY, Remedy::RestartJob),
    (86, MEDIA, Remedy::RestartJob),
    (88, MEDIA, Remedy::RestartJob),
    (89, MEDIA, Remedy::RestartJob),
    (92, "many memory errors that ECC corrected", Remedy::Nothing),
    (93, "the wear limit of the board's memory for settings was reached", Remedy::Nothing),
    (94, "a memory error, contained to one program", Remedy::RestartJob),
    (95, "a memory error that is not contained to one program", Remedy::ResetGpu),
    (106, "a test message", Remedy::Nothing),
    (107, "a test message", Remedy::Nothing),
    (108, "a failed translation at the other end of an NVLink", Remedy::Nothing),
    (109, "a context switch timed out", Remedy::ResetGpu),
    (110, "a security fault", Remedy::ResetGpu),
    (119, "the GPU's system processor (GSP) did not answer", Remedy::ResetGpu),
    (120, "an error of the GPU's system processor (GSP)", Remedy::ResetGpu),
    (121, "errors of the link to the host's processor were corrected", Remedy::Nothing),
    (136, "an NVLink could not be trained", Remedy::ResetGpu),
    (137, "an illegal access over NVLink, mostly an error of the program", Remedy::RestartJob),
    (140, "memory error that ECC could not correct", Remedy::ResetGpu),
    (141, "an error of CUDA's fast path", Remedy::Nothing),
    (143, "the GPU could not be initialised", Remedy::ResetGpu),
    (144, NVLINK, Remedy::ResetGpu),
    (145, NVLINK, Remedy::ResetGpu),
    (146, NVLINK, Remedy::ResetGpu),
    (147, NVLINK, Remedy::ResetGpu),
    (148, NVLINK, Remedy::ResetGpu),
    (149, NVLINK, Remedy::ResetGpu),
    (150, NVLINK, Remedy::ResetGpu),
    (154, "the advised action for another fault has changed", Remedy::Nothing),
    (155, "an NVLink was taken down by software", Remedy::ResetGpu),
    (156, "a part of the GPU is retired", Remedy::ResetGpu),
    (157, "a part of the GPU could not be retired: no spare is left", Remedy::Nothing),
    (158, "a fatal time-out of the GPU", Remedy::ResetGpu),
    (160, "a channel of GPU memory is retired", Remedy::Nothing),
    (161, "a channel of GPU memory could not be retired", Remedy::Nothing),
    (171, "memory error that ECC cannot correct, in device memory", Remedy::ResetGpu),
    (172, "memory error that ECC cannot correct, in a cache", Remedy::ResetGpu),
];

const COPY: &str = "an exception of a copy engine";
const MEDIA: &str = "an exception of a video or image engine";
const NVLINK: &str = "an error of an NVLink";

/// The meaning of a number, and what to do.
#[must_use]
pub fn meaning(xid: u32) -> (&'static str, Remedy) {
    match CATALOGUE.iter().find(|(number, ..)| *number == xid) {
        Some((_, name, remedy)) => (name, *remedy),
        // Further encoders, decoders and copy engines of newer GPUs.
        None if (96..=105).contains(&xid) || xid == 139 => (MEDIA, Remedy::RestartJob),
        None if (126..=135).contains(&xid) => (COPY, Remedy::RestartJob),
        None => ("a fault unknown to this version of rekindle", Remedy::Support),
    }
}

/// The fault in words: number, name and advice.
#[must_use]
pub fn in_words(xid: u32) -> String {
    let (name, remedy) = meaning(xid);
    // Whether another program uses the GPU is not known here.
    let may_be_ours = match xid {
        SWITCH_TIMEOUT => {
            " (if another program uses this GPU too, a snapshot may be the cause, and not the GPU: docs/gpus.md, \
            \"A GPU that other programs use too\")"
        }
        _ => "",
    };
    format!("Xid {xid}: {name}{may_be_ours}; NVIDIA advises: {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_catalogue_is_sorted_and_every_number_has_words() {
        assert!(CATALOGUE.windows(2).all(|pair| pair[0].0 < pair[1].0));
        assert_eq!(meaning(79).1, Remedy::RestartMachine);
        assert_eq!(meaning(45).1, Remedy::Nothing, "a killed job leaves it, it is no reason");
        assert_eq!((meaning(130).0, meaning(9999).1), (COPY, Remedy::Support));
        assert!(may_follow_a_death(109) && !may_follow_a_death(79) && !may_follow_a_death(48));
        assert!(meaning(48).1.needs_drain() && meaning(79).1.needs_drain() && !meaning(31).1.needs_drain());
        let words = in_words(79);
        assert!(words.starts_with("Xid 79: the GPU has fallen off the bus; NVIDIA advises: stop"), "{words}");
        let words = in_words(SWITCH_TIMEOUT);
        assert!(words.starts_with("Xid 109: a context switch timed out (if another program"), "{words}");
    }
}

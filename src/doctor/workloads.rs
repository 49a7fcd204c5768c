//! Which workloads of docs/workloads.md this machine can run, and what it lacks for the others.

use serde::Serialize;

use super::{Check, State, nvidia};
use rekindle_cuda::nvml::{Mig, names_instance};

/// A kind of job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Workload {
    /// Its name; stable, for scripts.
    pub(crate) workload: &'static str,
    /// What belongs to it.
    pub(crate) what: &'static str,
    /// Its lines in the table of docs/workloads.md.
    pub(crate) lines: &'static [&'static str],
    /// Whether it can run here with snapshots and restores.
    pub(crate) runs: bool,
    /// What this machine lacks for it: names of checks, and what a GPU job needs.
    pub(crate) lacks: Vec<String>,
}

const ONE_GPU: [&str; 21] = [
    "eager",
    "compile",
    "amp",
    "loader-fork",
    "loader-spawn",
    "expandable",
    "graphs",
    "jit",
    "cupy",
    "triton",
    "numba",
    "trainer",
    "lightning",
    "accelerate",
    "checkpoint",
    "tensorboard",
    "mpi",
    "mpirun",
    "deepspeed",
    "short",
    "shared",
];
const GPUS: [&str; 7] = ["ddp-gloo", "ddp-nccl", "no-peer", "fsdp", "torchrun", "pmap", "two-jobs"];

pub(super) fn judge(checks: &[Check], facts: &nvidia::Facts) -> Vec<Workload> {
    let missing = checks.iter().filter(|check| check.state == State::Missing);
    let run: Vec<String> = missing.map(|check| check.check.to_owned()).collect();
    let gpus = |count| [run.clone(), lacking(facts, count, 570)].concat();
    let workload = |workload, what, lines, lacks: Vec<String>| {
        let runs = lacks.is_empty();
        Workload { workload, what, lines, runs, lacks }
    };
    vec![
        workload("cpu", "jobs without a GPU", &[], run.clone()),
        workload("one-gpu", "jobs on one GPU (PyTorch, JAX, CuPy, Triton, Numba)", &ONE_GPU, gpus(1)),
        workload("several-gpus", "jobs on several GPUs (DDP, FSDP, torchrun, pmap)", &GPUS, gpus(2)),
        workload(
            "another-gpu",
            "restores on another GPU",
            &["migrate"],
            [run.clone(), lacking(facts, 2, 580)].concat(),
        ),
        workload(
            "managed-memory",
            "jobs with managed memory (cudaMallocManaged)",
            &["managed"],
            vec!["a driver that can checkpoint it: there is none yet".to_owned()],
        ),
    ]
}

/// What this machine lacks for a job on that many GPUs.
fn lacking(facts: &nvidia::Facts, count: usize, driver: u32) -> Vec<String> {
    let Some(installed) = &facts.installed else {
        return vec![match facts.on_bus {
            0 => format!("{} with driver {driver} or newer", needed(count)),
            _ => format!("NVIDIA driver {driver} or newer"),
        }];
    };
    let gpus = &facts.gpus.gpus;
    let is_instance = facts.visible.as_deref().is_some_and(names_instance);
    let whole = if is_instance { 0 } else { gpus.iter().filter(|it| it.mig != Mig::On && !it.is_virtual).count() };
    let mut lacks = Vec::new();
    if installed.major() < driver {
        lacks.push(format!("NVIDIA driver {driver} or newer (here: {installed})"));
    }
    if facts.arch != "x86_64" {
        lacks.push(format!("a driver that can checkpoint on {}", facts.arch));
    }
    if facts.library.is_err() {
        lacks.push("libcuda.so.1".to_owned());
    }
    if whole < count {
        lacks.push(match gpus.len() {
            all if all >= count => format!("{}, whole: not a MIG instance, not a vGPU", needed(count)),
            _ => format!("{} (here: {whole})", needed(count)),
        });
    }
    if !facts.mps.is_empty() {
        lacks.push("GPUs without NVIDIA's multi-process service, which is running".to_owned());
    }
    lacks
}

fn needed(count: usize) -> String {
    if count == 1 { "an NVIDIA GPU".to_owned() } else { format!("{count} NVIDIA GPUs") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::nvidia::tests::facts;

    fn lacks(facts: &nvidia::Facts) -> Vec<(&'static str, String)> {
        let all = judge(&[], facts).into_iter();
        all.filter(|it| !it.runs && it.workload != "managed-memory")
            .map(|it| (it.workload, it.lacks.join("; ")))
            .collect()
    }

    #[test]
    fn it_says_what_each_workload_lacks() {
        assert!(lacks(&facts("580.95.05")).is_empty());
        assert_eq!(lacks(&facts("570.1")), [("another-gpu", "NVIDIA driver 580 or newer (here: 570.1)".to_owned())]);
        let mut one = facts("580.95.05");
        one.gpus.gpus.pop();
        let words = "2 NVIDIA GPUs (here: 1)".to_owned();
        assert_eq!(lacks(&one), [("several-gpus", words.clone()), ("another-gpu", words)]);
        one.gpus.gpus[0].mig = Mig::On;
        assert!(lacks(&one)[0].1.contains("not a MIG instance"), "{:?}", lacks(&one));
        let mut none = facts("580.95.05");
        (none.installed, none.on_bus) = (None, 0);
        assert_eq!(lacks(&none)[0], ("one-gpu", "an NVIDIA GPU with driver 570 or newer".to_owned()));
        let missing = Check::missing("criu.version", "no criu found", "install it");
        let all = judge(&[missing], &facts("580.95.05"));
        assert!(all.iter().all(|it| !it.runs) && all[0].lacks == ["criu.version"]);
    }

    #[test]
    fn every_line_of_the_document_belongs_to_one() {
        let page = include_str!("../../docs/workloads.md");
        let table = page.split("## The workloads").nth(1).unwrap().split("\n## ").next().unwrap();
        let names = table.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
        let mut documented: Vec<_> = names.skip(1).flat_map(|names| names.split(", ")).collect();
        let mut known: Vec<_> = judge(&[], &facts("580.95.05")).iter().flat_map(|it| it.lines).copied().collect();
        documented.sort_unstable();
        known.sort_unstable();
        assert_eq!(documented, known);
    }
}

//! The processor: architecture, and the instructions that code in the image may use.

use std::collections::BTreeSet;

use super::{Difference, Here, Severity};
use rekindle_store::Manifest;

/// Flags of `/proc/cpuinfo` for instructions of user space, or for registers that a saved context may contain.
///
/// Only these count. glibc, NumPy, PyTorch and MKL look at the processor once, at their start, and keep the choice in
/// memory: after a restore on a processor without these instructions, the job dies of SIGILL at any later moment.
/// Everything else in `flags` is about the kernel (`smep`, `nx`, `la57`), about timing and power (`tsc_reliable`,
/// `hwp`), about the topology (`xtopology`, `ht`), about performance counters (`arch_perfmon`, `pebs`), about
/// virtualisation (`vmx`, `ept`), about mitigations and flags of the kernel itself (`ibrs`, `md_clear`, `nopl`,
/// `rep_good`), or a hint that older processors run as something harmless (`hle`, `mpx`, `ibt`), or a promise of speed
/// (`erms`, `fsrm`): without these the job runs on. A newer flag that is not named here does not count: CPUs that have
/// it are compared by their older flags.
const INSTRUCTIONS: &[&str] = &[
    "3dnow",
    "3dnowext",
    "3dnowprefetch",
    "abm",
    "adx",
    "aes",
    "apx",
    "bmi1",
    "bmi2",
    "cldemote",
    "clflush",
    "clflushopt",
    "clwb",
    "clzero",
    "cmov",
    "cmpccxadd",
    "cx16",
    "cx8",
    "enqcmd",
    "f16c",
    "fma",
    "fma4",
    "fpu",
    "fred",
    "fsgsbase",
    "fxsr",
    "gfni",
    "kl",
    "lahf_lm",
    "lwp",
    "mmx",
    "mmxext",
    "monitorx",
    "movbe",
    "movdir64b",
    "movdiri",
    "mwaitx",
    "ospke",
    "pclmulqdq",
    "popcnt",
    "ptwrite",
    "raoint",
    "rdpid",
    "rdrand",
    "rdseed",
    "rdtscp",
    "rtm",
    "serialize",
    "sha512",
    "sha_ni",
    "sm3",
    "sm4",
    "ssse3",
    "tbm",
    "tsxldtrk",
    "user_shstk",
    "vaes",
    "vpclmulqdq",
    "waitpkg",
    "widekl",
    "xgetbv1",
    "xop",
    "xsave",
    "xsavec",
    "xsaveopt",
];

/// Prefixes of families of instructions that grow with every generation.
const FAMILIES: &[&str] = &["avx", "amx_", "sse"];

pub(super) fn is_instruction(flag: &str) -> bool {
    INSTRUCTIONS.contains(&flag) || FAMILIES.iter().any(|family| flag.starts_with(family))
}

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    let (then, now) = (&manifest.host, &here.host);
    let mut all = Vec::new();
    if then.arch != now.arch && !then.arch.is_empty() && !now.arch.is_empty() {
        let difference = Difference::new(Severity::Fatal, "CPU architecture", &then.arch, &now.arch);
        all.push(difference.advise(format!("restore it on a machine with {}", then.arch)));
        // Flags of different architectures cannot be compared.
        return all;
    }
    let known: BTreeSet<&str> = now.cpu_flags.iter().map(String::as_str).collect();
    let missing: BTreeSet<&str> = then.cpu_flags.iter().map(String::as_str).filter(|f| is_instruction(f)).collect();
    let missing: Vec<&str> = missing.difference(&known).copied().collect();
    if !missing.is_empty() && !known.is_empty() {
        let cpu = |model: &str| if model.is_empty() { "a CPU".to_string() } else { model.to_string() };
        let difference = Difference::new(
            Severity::Fatal,
            "CPU features",
            format!("{} ({})", missing.join(" "), cpu(&then.cpu_model)),
            format!("{} without", cpu(&now.cpu_model)),
        );
        all.push(difference.advise("restore it on a machine whose CPU has them: the job can use them at any time"));
    }
    all
}

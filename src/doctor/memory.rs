//! Host memory: room for the memory of the GPUs, and huge pages.

use super::Check;
use rekindle_base::units::size;
use rekindle_cuda::nvml::Gpu;
use rekindle_os::cgroup;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// `MemAvailable`, bytes.
    pub(super) available: Option<u64>,
    /// The setting of transparent huge pages for private memory: always, madvise or never.
    pub(super) transparent: Option<String>,
    /// The same for shared memory and tmpfs.
    pub(super) shared: Option<String>,
    /// `HugePages_Total`: pages set aside for hugetlbfs.
    pub(super) set_aside: u64,
}

pub(super) fn gather() -> Facts {
    let setting = |name: &str| {
        chosen(&std::fs::read_to_string(format!("/sys/kernel/mm/transparent_hugepage/{name}")).ok()?).map(str::to_owned)
    };
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let set_aside = meminfo.lines().find_map(|line| line.strip_prefix("HugePages_Total:"));
    Facts {
        available: cgroup::memory_available(),
        transparent: setting("enabled"),
        shared: setting("shmem_enabled"),
        set_aside: set_aside.and_then(|n| n.trim().parse().ok()).unwrap_or(0),
    }
}

/// `always [madvise] never` to `madvise`.
fn chosen(text: &str) -> Option<&str> {
    text.split_once('[')?.1.split_once(']').map(|(chosen, _)| chosen)
}

/// Measured with 18 GiB of GPU memory: a checkpoint takes 7.3 s, with huge pages always on 5.3 s.
pub(super) fn judge_huge_pages(facts: &Facts, gpus: &[Gpu]) -> Check {
    let name = "memory.huge-pages";
    let Some(transparent) = &facts.transparent else {
        return Check::not_here(name, "the kernel has no transparent huge pages");
    };
    let shared = facts.shared.as_deref().unwrap_or("not available");
    let found = format!("transparent: {transparent}, for shared memory: {shared}; reserved: {}", facts.set_aside);
    if gpus.is_empty() || transparent == "always" {
        return Check::ok(name, found);
    }
    Check::warn(
        name,
        format!("{found}; a checkpoint of GPU memory is about a quarter faster with \"always\""),
        "echo always | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
    )
}

/// The checkpoint copies GPU memory into host memory. `headroom` is that of the control group.
pub(super) fn judge_room(facts: &Facts, gpus: &[Gpu], headroom: Option<u64>, reserve: u64) -> Check {
    let name = "memory.gpu";
    let Some(available) = facts.available else {
        return Check::not_here(name, "unknown: /proc/meminfo does not show how much memory is free");
    };
    let free = available.min(headroom.unwrap_or(u64::MAX));
    if gpus.is_empty() {
        return Check::ok(name, format!("{} of host memory free, no GPU to copy", size(free)));
    }
    let Some(total) = gpus.iter().map(|gpu| gpu.memory_total).sum::<Option<u64>>() else {
        return Check::not_here(
            name,
            format!("{} of host memory free; GPU memory is unknown without NVML", size(free)),
        );
    };
    let found = format!("{} of host memory free, {} of GPU memory", size(free), size(total));
    if total.saturating_add(reserve) <= free {
        return Check::ok(name, found);
    }
    Check::warn(
        name,
        format!("{found}: a snapshot works for jobs with up to {} of GPU memory", size(free.saturating_sub(reserve))),
        "free or add host memory, or increase the memory limit (systemd: MemoryMax=, Slurm: --mem, Docker: --memory)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;
    use crate::doctor::nvidia::tests::gpu;

    const GIB: u64 = 1 << 30;

    fn facts() -> Facts {
        Facts { available: Some(64 * GIB), transparent: Some("madvise".into()), shared: None, set_aside: 0 }
    }

    #[test]
    fn the_setting_is_the_one_in_brackets() {
        assert_eq!(chosen("always [madvise] never\n"), Some("madvise"));
        assert_eq!(chosen("garbage"), None);
    }

    #[test]
    fn huge_pages_matter_with_a_gpu() {
        assert_eq!(judge_huge_pages(&facts(), &[]).state, State::Ok);
        assert_eq!(judge_huge_pages(&facts(), &[gpu(GIB)]).state, State::Warn);
        let always = Facts { transparent: Some("always".into()), ..facts() };
        assert_eq!(judge_huge_pages(&always, &[gpu(GIB)]).state, State::Ok);
        let none = Facts { transparent: None, ..facts() };
        assert_eq!(judge_huge_pages(&none, &[gpu(GIB)]).state, State::NotHere);
    }

    #[test]
    fn gpu_memory_must_fit_with_the_reserve_into_the_smaller_of_memory_and_limit() {
        let judged = |gpus: &[Gpu], headroom| judge_room(&facts(), gpus, headroom, GIB).state;
        assert_eq!(judged(&[], None), State::Ok);
        assert_eq!(judged(&[gpu(63 * GIB)], None), State::Ok);
        assert_eq!(judged(&[gpu(32 * GIB), gpu(32 * GIB)], None), State::Warn);
        assert_eq!(judged(&[gpu(32 * GIB)], Some(16 * GIB)), State::Warn);
        let unknown = Gpu { memory_total: None, ..gpu(0) };
        assert_eq!(judged(&[unknown], None), State::NotHere);
        assert_eq!(judge_room(&Facts { available: None, ..facts() }, &[], None, GIB).state, State::NotHere);
    }
}

//! Whether Slurm will ignore our exit code, because the OOM killer was here.
//!
//! If the control group of a step counted one kill for lack of memory, Slurm reports OUT_OF_MEMORY instead of the exit code
//! of the step (`oom_error` in slurmstepd, 19.05 to 24.11), and queues nothing again by that code. It makes no difference
//! to Slurm that the job was restored after the kill, or that the kill hit a rehearsal.

use std::path::PathBuf;

use rekindle_os::cgroup;

/// The kills that our control group had counted at some time.
#[derive(Debug, Clone)]
pub(crate) struct OomKills {
    counters: Vec<PathBuf>,
    before: u64,
}

impl OomKills {
    /// Those until now.
    pub(crate) fn until_now() -> OomKills {
        OomKills::of(cgroup::kill_counters(std::process::id().cast_signed()))
    }

    fn of(counters: Vec<PathBuf>) -> OomKills {
        let before = cgroup::kills(&counters);
        OomKills { counters, before }
    }

    /// Whether there were more since then.
    pub(crate) fn went_up(&self) -> bool {
        cgroup::kills(&self.counters) > self.before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_kills_of_this_run_count() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("memory.events");
        let write = |kills| std::fs::write(&file, format!("oom 9\noom_kill {kills}\noom_group_kill 0\n")).unwrap();
        write(3);
        let kills = OomKills::of(vec![file.clone()]);
        assert!(!kills.went_up());
        write(4);
        assert!(kills.went_up());
        std::fs::remove_file(&file).unwrap();
        assert!(!kills.went_up() && !OomKills::of(Vec::new()).went_up());
    }
}

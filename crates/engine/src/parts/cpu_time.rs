//! The processor time that processes have used (CLOCK_PROCESS_CPUTIME_ID, getrusage(2), times(2), clock(3), RLIMIT_CPU).
//!
//! The kernel counts it from the beginning of a process and lets nobody set it. So it begins at 0 in a restored process, and a program
//! that works until it has used some of it begins to count anew. That is told.

use std::time::Duration;

use rekindle_os::process;
use rekindle_store::manifest::CpuTime;

/// Less than this costs nobody much when it is counted again, and would be told of each short job.
const NOTABLE: Duration = Duration::from_secs(10);

/// The process that has used most of it; none if that is little.
pub(crate) fn capture(tree: &[i32]) -> Option<CpuTime> {
    let used = |pid: &i32| Some((process::cpu_time(*pid)?, process::inner_pid(*pid)?));
    let (used, pid) = tree.iter().filter_map(used).max()?;
    of_most(used, pid)
}

fn of_most(used: Duration, pid: i32) -> Option<CpuTime> {
    (used >= NOTABLE).then(|| CpuTime { pid, ms: u64::try_from(used.as_millis()).unwrap_or(u64::MAX) })
}

/// Says at a restore that it is gone.
pub(crate) fn tell(before: Option<CpuTime>) {
    if let Some(CpuTime { pid, ms }) = before {
        let used = humantime::format_duration(Duration::from_secs(ms / 1000));
        tracing::warn!(
            "the CPU clocks of the job's processes begin at 0 again (process {pid} had used {used}): a program that limits or measures \
             its CPU time counts anew"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_is_noted_if_it_is_much() {
        assert_eq!(of_most(Duration::from_millis(9999), 7), None);
        assert_eq!(of_most(Duration::from_millis(10_001), 7), Some(CpuTime { pid: 7, ms: 10_001 }));
        assert_eq!(capture(&[i32::MAX]), None, "it is gone");
    }
}

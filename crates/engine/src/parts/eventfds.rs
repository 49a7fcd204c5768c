//! Eventfds that CRIU would make wrong: it restores semaphores (EFD_SEMAPHORE), where a read takes 1, as counters, where it
//! takes all. A restore makes them itself ([`criu::image::describe_eventfds`]).
//!
//! Kernels before 6.5 do not tell whether one is a semaphore. It is a counter then in a restored job.

use std::collections::{BTreeMap, BTreeSet};

use rekindle_criu as criu;
use rekindle_os::beneath::Beneath;
use rekindle_os::process;

/// Changes the image so that a restore makes them as they are. The processes of the tree are stopped.
pub(crate) fn describe(dir: &Beneath, tree: &[i32]) -> Result<usize, criu::image::Error> {
    let all = criu::image::eventfds(dir)?;
    if all.is_empty() {
        return Ok(0);
    }
    let outer: BTreeMap<i32, i32> = tree.iter().filter_map(|pid| Some((process::inner_pid(*pid)?, *pid))).collect();
    let is_semaphore = |pid: i32, fd: i32| {
        let info = outer.get(&pid).and_then(|pid| process::text(pid, &format!("fdinfo/{fd}")).ok());
        info.is_some_and(|info| says_semaphore(&info))
    };
    let semaphores: BTreeSet<u32> =
        all.iter().filter(|place| is_semaphore(place.pid, place.fd)).map(|place| place.id).collect();
    criu::image::describe_eventfds(dir, &semaphores)
}

fn says_semaphore(info: &str) -> bool {
    info.lines().any(|line| line.strip_prefix("eventfd-semaphore:").is_some_and(|value| value.trim() == "1"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_tells_which_are_semaphores() {
        assert!(says_semaphore("flags:\t02\neventfd-count:                3\neventfd-id: 5\neventfd-semaphore: 1\n"));
        assert!(!says_semaphore("eventfd-count:                3\neventfd-id: 5\neventfd-semaphore: 0\n"));
        assert!(!says_semaphore("eventfd-count:                3\n"), "an older kernel");
    }
}

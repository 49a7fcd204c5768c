//! The job's GPUs: the CUDA processes of its tree, and the GPUs on which they are restored.

pub(crate) mod capture;
pub mod placement;
pub mod put_back;

use std::collections::BTreeSet;

use rekindle_os::process;

/// What runs between `root` and these processes, as we see them, and is none of them: each before those below it.
fn launchers(root: i32, pids: &[i32]) -> Vec<i32> {
    let tree: BTreeSet<i32> = process::tree(root).into_iter().filter(|pid| *pid != root).collect();
    let mut known: BTreeSet<i32> = pids.iter().copied().collect();
    let mut launchers = Vec::new();
    for pid in pids {
        let above = std::iter::successors(process::parent(*pid), |pid| process::parent(*pid));
        let new: Vec<i32> = above.take_while(|pid| tree.contains(pid)).filter(|pid| known.insert(*pid)).collect();
        launchers.extend(new.into_iter().rev());
    }
    launchers
}

/// Tells these processes, by their pids as we see them, that CUDA is unlocked.
fn announce_unlocked(pids: &[i32]) {
    for (pid, error) in rekindle_cuda::sharing::announce(pids, false) {
        tracing::error!(
            pid,
            "cannot tell the process that CUDA is unlocked: {error}. Its allocations of GPU memory wait until the next snapshot"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_programs_above_a_process_are_found_from_the_outermost_on() {
        let mut child = Command::new("sh");
        let child = child.args(["-c", "sh -c 'sleep 60 & sleep 60; :'; :"]).stdin(Stdio::null());
        let mut child = child.spawn().unwrap();
        let outer = child.id().cast_signed();
        let begun = Instant::now();
        let mut tree = process::tree(outer);
        while tree.len() < 4 && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(2));
            tree = process::tree(outer);
        }
        let inner = process::children(outer)[0];
        let both = process::children(inner);
        let me = std::process::id().cast_signed();
        let found = [launchers(me, &both), launchers(outer, &both), launchers(me, &[both[0], outer])];
        for pid in tree.into_iter().rev() {
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        let _ = child.wait();
        assert_eq!(found, [vec![outer, inner], vec![inner], vec![inner]]);
    }
}

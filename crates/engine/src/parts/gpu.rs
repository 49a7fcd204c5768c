//! The job's GPUs: the CUDA processes of its tree, and the GPUs on which they are restored.

pub(crate) mod capture;
pub mod placement;
pub mod put_back;

/// Tells these processes, by their pids as we see them, that CUDA is unlocked.
fn announce_unlocked(pids: &[i32]) {
    for (pid, error) in rekindle_cuda::sharing::announce(pids, false) {
        tracing::error!(
            pid,
            "cannot tell the process that CUDA is unlocked: {error}. Its allocations of GPU memory wait until the next snapshot"
        );
    }
}

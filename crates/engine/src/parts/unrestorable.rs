//! What a process has that no restore would give back. The snapshot is refused, and says which process it is and what helps.

use rekindle_os::process;

/// Why no image is taken of a process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("process {pid} ({name}) {what}: {remedy}")]
pub struct Unrestorable {
    /// The process, as it sees itself.
    pid: i32,
    name: String,
    /// What it has, as the rest of a sentence that begins with the process.
    what: String,
    /// What to do about it.
    remedy: &'static str,
}

impl Unrestorable {
    /// Of a process, whose pid is as we see it.
    pub(crate) fn of(pid: i32, what: impl Into<String>, remedy: &'static str) -> Unrestorable {
        let name = process::name(pid).unwrap_or_default();
        Unrestorable { pid: process::inner_pid(pid).unwrap_or(pid), name, what: what.into(), remedy }
    }
}

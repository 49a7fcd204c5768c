//! Numbered points in the protocols that write, publish and remove, one before each step that changes the disk.
//!
//! A test injects a fault here: its process is killed at one of the points, or the disk is full from there on. This
//! finds every state that a crash can leave. Otherwise nothing happens at a point.

use std::io;
use std::sync::OnceLock;

/// What a step does to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// It may need space: data or a name.
    Write,
    /// It needs none: an fsync, a removal.
    Other,
}

static FAULT: OnceLock<fn(Step) -> io::Result<()>> = OnceLock::new();

/// A step of a protocol begins.
///
/// # Errors
/// The error of an injected fault.
#[inline]
pub fn point(step: Step) -> io::Result<()> {
    FAULT.get().map_or(Ok(()), |fault| fault(step))
}

/// Calls `fault` at each point of this process from now on. For tests; the first call counts.
pub fn inject(fault: fn(Step) -> io::Result<()>) {
    let _ = FAULT.set(fault);
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use rekindle_testing::points::{Fault, reached, run};

    use super::{Step, inject, point};

    #[test]
    #[ignore = "the test below runs it, with a fault"]
    fn three_steps() {
        inject(|step| reached(step == Step::Write));
        for step in [Step::Other, Step::Write, Step::Other] {
            point(step).unwrap();
        }
    }

    #[test]
    fn a_fault_comes_at_its_point() {
        let ended = |fault| run("point::tests::three_steps", fault, &[]);
        assert_eq!(ended(Fault::Kill(3)).signal(), Some(9));
        assert!(ended(Fault::Kill(4)).success());
        assert_eq!(ended(Fault::Full(2)).code(), Some(101));
        assert!(ended(Fault::Full(3)).success(), "an fsync needs no space");
    }
}

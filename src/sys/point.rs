//! Numbered points of the protocols that write, publish and remove: before each step that changes the disk.
//!
//! Outside of tests there is nothing here. In a test that runs in a process of its own (`armed`), the process is killed at
//! one of them, or the disk is full from there on. That finds every state that a crash can leave without waiting for one.

/// What a step does to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// It may need space: data or a name.
    Write,
    /// It needs none: an fsync, a removal.
    Other,
}

/// A step of a protocol begins.
///
/// # Errors
/// In tests only: no space left.
#[cfg(not(test))]
#[inline(always)]
#[expect(clippy::unnecessary_wraps, reason = "in tests it may fail")]
pub(crate) fn point(_: Step) -> std::io::Result<()> {
    Ok(())
}

#[cfg(test)]
pub(crate) use armed::point;

#[cfg(test)]
pub(crate) mod armed {
    use std::io;
    use std::process::{Command, ExitStatus, Stdio};
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::Step;

    const VARIABLE: &str = "REKINDLE_TEST_POINT";
    static PASSED: AtomicU64 = AtomicU64::new(0);

    /// What happens, and at which point; the first has the number 1.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Fault {
        /// The process is killed.
        Kill(u64),
        /// From this one on, no space is left on the device: what needs some fails.
        Full(u64),
    }

    fn fault() -> Option<Fault> {
        static FAULT: OnceLock<Option<Fault>> = OnceLock::new();
        *FAULT.get_or_init(|| {
            let text = std::env::var(VARIABLE).ok()?;
            let (kind, number) = text.split_once(' ')?;
            let number = number.parse().ok()?;
            Some(if kind == "kill" { Fault::Kill(number) } else { Fault::Full(number) })
        })
    }

    pub(crate) fn point(step: Step) -> io::Result<()> {
        let Some(fault) = fault() else { return Ok(()) };
        let number = PASSED.fetch_add(1, Ordering::SeqCst) + 1;
        match fault {
            Fault::Kill(at) if at == number => {
                let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
                Ok(())
            }
            Fault::Full(at) if at <= number && step == Step::Write => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    /// Runs an ignored test of this binary in a process of its own, with the fault, and with `variables`.
    pub(crate) fn run(test: &str, fault: Fault, variables: &[(&str, &std::ffi::OsStr)]) -> ExitStatus {
        let text = match fault {
            Fault::Kill(at) => format!("kill {at}"),
            Fault::Full(at) => format!("full {at}"),
        };
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--ignored", "--test-threads", "1"]).env(VARIABLE, text);
        command.envs(variables.iter().copied()).stdout(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::armed::{Fault, run};
    use super::{Step, point};

    #[test]
    #[ignore = "the test below runs it, with a fault"]
    fn three_steps() {
        for step in [Step::Other, Step::Write, Step::Other] {
            point(step).unwrap();
        }
    }

    #[test]
    fn a_fault_comes_at_its_point() {
        let ended = |fault| run("sys::point::tests::three_steps", fault, &[]);
        assert_eq!(ended(Fault::Kill(3)).signal(), Some(9));
        assert!(ended(Fault::Kill(4)).success());
        assert_eq!(ended(Fault::Full(2)).code(), Some(101));
        assert!(ended(Fault::Full(3)).success(), "an fsync needs no space");
    }
}

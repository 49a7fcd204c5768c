//! Faults at the numbered points of a protocol that writes (`rekindle_os::point`), in a separate process.

use std::ffi::OsStr;
use std::io;
use std::process::{Command, ExitStatus};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

const VARIABLE: &str = "REKINDLE_TEST_POINT";
static PASSED: AtomicU64 = AtomicU64::new(0);

/// The fault and its point; the first point has number 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The process is killed.
    Kill(u64),
    /// From this point on the device is full: steps that need space fail.
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

/// A point is reached, in the process that [`run`] started.
///
/// # Errors
/// No space left, if that is the fault.
pub fn reached(needs_space: bool) -> io::Result<()> {
    let Some(fault) = fault() else { return Ok(()) };
    let number = PASSED.fetch_add(1, Ordering::SeqCst) + 1;
    match fault {
        Fault::Kill(at) if at == number => {
            let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
            Ok(())
        }
        Fault::Full(at) if at <= number && needs_space => Err(io::ErrorKind::StorageFull.into()),
        _ => Ok(()),
    }
}

/// Runs an ignored test of this binary in a separate process, with the fault and with `variables`.
///
/// # Panics
/// When it cannot be run.
#[must_use]
pub fn run(test: &str, fault: Fault, variables: &[(&str, &OsStr)]) -> ExitStatus {
    let text = match fault {
        Fault::Kill(at) => format!("kill {at}"),
        Fault::Full(at) => format!("full {at}"),
    };
    let mut command = Command::new(std::env::current_exe().expect("this test has a path"));
    command.args(["--exact", test, "--ignored", "--test-threads", "1"]).env(VARIABLE, text);
    let done = command.envs(variables.iter().copied()).output().expect("a test can be run");
    if done.status.code().is_some_and(|code| code != 0) {
        eprintln!("{}", String::from_utf8_lossy(&done.stdout));
    }
    done.status
}

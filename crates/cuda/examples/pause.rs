//! Checkpoints a process and restores it, and prints the duration of each call.
//!
//!     cargo run --package rekindle-cuda --example pause -- PID

use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use rekindle_cuda::{Process, Result};

fn pause(pid: i32) -> Result<()> {
    let process = Process::new(pid)?;
    timed("lock", || process.lock(Duration::from_secs(10)))?;
    let done = timed("checkpoint", || process.checkpoint()).and_then(|()| timed("restore", || process.restore(&[])));
    // Also after a failed checkpoint: the process is still locked then.
    timed("unlock", || process.unlock())?;
    done
}

fn timed(what: &str, call: impl FnOnce() -> Result<()>) -> Result<()> {
    let began = Instant::now();
    call()?;
    let _ = writeln!(std::io::stdout(), "{what:<10} {:>8.1} ms", began.elapsed().as_secs_f64() * 1000.0);
    Ok(())
}

fn main() -> ExitCode {
    let mut stderr = std::io::stderr();
    let Some(pid) = std::env::args().nth(1).and_then(|pid| pid.parse().ok()) else {
        let _ = writeln!(stderr, "usage: pause PID");
        return ExitCode::from(2);
    };
    match pause(pid) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(stderr, "pause: {error}");
            ExitCode::FAILURE
        }
    }
}

//! Faults that a test asks for with files beside the control file.

use std::fs;
use std::path::Path;
use std::time::Duration;

/// What a fault file says.
#[derive(Debug, Default)]
struct Fault {
    code: i32,
    times: Option<u32>,
    /// So many calls go well first.
    skip: u32,
    delay: Duration,
    /// Until the file says something else.
    hold: bool,
    /// Only while the process is stopped.
    stopped: bool,
    pid: Option<i32>,
}

fn parse(text: &str) -> Option<Fault> {
    let mut fault = Fault::default();
    for word in text.split_whitespace() {
        match word.split_once('=') {
            None if word == "hold" => fault.hold = true,
            None if word == "stopped" => fault.stopped = true,
            None => fault.code = word.parse().ok()?,
            Some(("times", value)) => fault.times = Some(value.parse().ok()?),
            Some(("skip", value)) => fault.skip = value.parse().ok()?,
            Some(("delay", value)) => fault.delay = Duration::from_millis(value.parse().ok()?),
            Some(("pid", value)) => fault.pid = Some(value.parse().ok()?),
            Some(_) => return None,
        }
    }
    Some(fault)
}

/// Carries out the faults for `op` of job `pid`. The code to fail with, if any; a file that cannot be understood fails
/// with -1, so that the test notices.
pub(crate) fn inject(folder: &Path, op: &str, pid: i32) -> Result<(), i32> {
    if let Some(fault) = read(&folder.join(format!("die-at-{op}")), pid)? {
        std::thread::sleep(fault.delay);
        // Gone before the death: the next life of the job must not die of it.
        let _ = fs::remove_file(folder.join(format!("die-at-{op}")));
        // SAFETY: a signal to this process only.
        unsafe { libc::kill(pid, libc::SIGKILL) };
    }
    if read(&folder.join(format!("exit-at-{op}")), pid)?.is_some() {
        let _ = fs::remove_file(folder.join(format!("exit-at-{op}")));
        // SAFETY: ends this process only.
        unsafe { libc::_exit(0) };
    }
    let path = folder.join(format!("fail-{op}"));
    let Some(fault) = read(&path, pid)? else { return Ok(()) };
    if fault.hold && fault.skip == 0 {
        // For who waits until the call is held.
        let _ = fs::write(path.with_extension("held"), "");
        while read(&path, pid)?.is_some_and(|fault| fault.hold) {
            std::thread::sleep(Duration::from_millis(2));
        }
        return inject(folder, op, pid);
    }
    let rest = |skip: u32, times: u32| {
        let pid = fault.pid.map_or_else(String::new, |pid| format!(" pid={pid}"));
        let stopped = if fault.stopped { " stopped" } else { "" };
        let hold = if fault.hold { " hold" } else { "" };
        let (code, delay) = (fault.code, fault.delay.as_millis());
        // Not truncated first: another job may be reading.
        let _ = fs::write(
            path.with_extension("new"),
            format!("{code} times={times} skip={skip} delay={delay}{pid}{stopped}{hold}"),
        );
        let _ = fs::rename(path.with_extension("new"), &path);
    };
    if fault.skip > 0 {
        rest(fault.skip - 1, fault.times.unwrap_or(u32::MAX));
        return Ok(());
    }
    match fault.times {
        Some(0 | 1) => {
            let _ = fs::remove_file(&path);
        }
        Some(times) => rest(0, times - 1),
        None => {}
    }
    std::thread::sleep(fault.delay);
    if fault.code == 0 { Ok(()) } else { Err(fault.code) }
}

/// The same for a call that a keeper of the interposer makes; calls of the job go on.
pub(crate) fn inject_keeper(call: &str) -> Result<(), i32> {
    let Some(folder) = std::env::var_os("STANDIN_CUDA_DIR") else { return Ok(()) };
    if fs::read("/proc/thread-self/comm").is_ok_and(|name| name == b"rekindle-keeper\n") {
        // SAFETY: no precondition.
        inject(Path::new(&folder), &format!("keeper-{call}"), unsafe { libc::getpid() })?;
    }
    Ok(())
}

/// The same for a call of the job itself, not of its keeper.
pub(crate) fn inject_job(call: &str) -> Result<(), i32> {
    let Some(folder) = std::env::var_os("STANDIN_CUDA_DIR").filter(|_| !crate::host::is_copier()) else {
        return Ok(());
    };
    if fs::read("/proc/thread-self/comm").is_ok_and(|name| name == b"rekindle-keeper\n") {
        return Ok(());
    }
    // SAFETY: no precondition.
    inject(Path::new(&folder), &format!("job-{call}"), unsafe { libc::getpid() })
}

/// The same for a call of the process that copies.
pub(crate) fn inject_copier(call: &str) -> Result<(), i32> {
    let Some(folder) = std::env::var_os("STANDIN_CUDA_DIR").filter(|_| crate::host::is_copier()) else { return Ok(()) };
    // SAFETY: no precondition.
    inject(Path::new(&folder), &format!("copier-{call}"), unsafe { libc::getpid() })
}

fn read(path: &Path, pid: i32) -> Result<Option<Fault>, i32> {
    let Ok(text) = fs::read_to_string(path) else { return Ok(None) };
    let fault = parse(&text).ok_or(-1)?;
    let is_meant = fault.pid.is_none_or(|wanted| wanted == pid) && (!fault.stopped || is_stopped(pid));
    Ok(is_meant.then_some(fault))
}

/// Its main thread.
fn is_stopped(pid: i32) -> bool {
    let state = |stat: &str| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['T', 't']));
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| state(&stat))
}

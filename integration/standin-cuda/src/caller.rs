//! The caller's side: finds the job's control file by the job's pid and asks.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::control::{MAGIC, MAX_PAIRS, Mapping, Op, Pair, SIZE, code};

/// Longer than a checkpoint of any test takes; a stopped job does not answer at all.
const PATIENCE: Duration = Duration::from_secs(60);

/// Asks job `pid`, as numbered here. The value that it answers with, or a `CUresult`.
pub(crate) fn request(pid: i32, op: Op, timeout_ms: u32, pairs: &[Pair]) -> Result<i32, i32> {
    if pid <= 0 || pairs.len() > MAX_PAIRS {
        return Err(code::INVALID_VALUE);
    }
    let inner = inner_pid(pid).ok_or(code::OPERATING_SYSTEM)?;
    let file = find(pid, inner)?.ok_or(code::NOT_INITIALIZED)?;
    // Callers queue here, and the job sees by it that its caller is alive.
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX) } != 0 {
        return Err(code::OPERATING_SYSTEM);
    }
    let control = Mapping::new(&file).map_err(|_| code::OPERATING_SYSTEM)?;
    if control.magic.load(Ordering::Acquire) != MAGIC || control.pid.load(Ordering::Relaxed) != inner {
        return Err(code::NOT_INITIALIZED);
    }
    control.op.store(op as i32, Ordering::Relaxed);
    control.timeout_ms.store(timeout_ms, Ordering::Relaxed);
    // At most MAX_PAIRS.
    control.pair_count.store(u32::try_from(pairs.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    let bytes = pairs.as_flattened().as_flattened();
    for (to, from) in control.pairs.iter().zip(bytes.as_chunks::<8>().0) {
        to.store(u64::from_ne_bytes(*from), Ordering::Relaxed);
    }
    let id = unique();
    control.request.store(id, Ordering::Release);
    let deadline = Instant::now() + Duration::from_millis(timeout_ms.into()) + PATIENCE;
    let result = loop {
        if control.reply.load(Ordering::Acquire) == id {
            let code = control.code.load(Ordering::Relaxed);
            break if code == code::SUCCESS { Ok(control.value.load(Ordering::Relaxed)) } else { Err(code) };
        }
        if inner_pid(pid).is_none() || Instant::now() > deadline {
            break Err(code::OPERATING_SYSTEM);
        }
        thread::sleep(Duration::from_micros(500));
    };
    control.request.store(0, Ordering::Release);
    result
}

/// The GPU of process `pid` and what it has there; None for one that is no CUDA process of this machine, which is
/// `folder`.
pub(crate) fn usage(folder: &Path, pid: i32) -> Option<([u8; 16], u64)> {
    let inner = inner_pid(pid)?;
    let maps = fs::read(format!("/proc/{pid}/maps")).ok()?;
    String::from_utf8_lossy(&maps).contains(&format!("{}/{inner}.ctl", folder.display())).then_some(())?;
    let control = Mapping::new(&find(pid, inner).ok()??).ok()?;
    let known = control.magic.load(Ordering::Acquire) == MAGIC && control.pid.load(Ordering::Relaxed) == inner;
    let gpu = u8::try_from(control.gpu.load(Ordering::Relaxed)).ok()?;
    known.then(|| ([gpu; 16], control.used.load(Ordering::Relaxed)))
}

/// The number of the thread that the job knows as `inner`, as it is numbered here.
pub(crate) fn outer_tid(pid: i32, inner: i32) -> Result<i32, i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| code::OPERATING_SYSTEM)?;
    tasks
        .flatten()
        .filter_map(|task| task.file_name().to_str()?.parse().ok())
        .find(|tid| own_number(Path::new(&format!("/proc/{pid}/task/{tid}/status"))) == Some(inner))
        .ok_or(code::OPERATING_SYSTEM)
}

/// The number by which the process knows itself; None where it is gone or a zombie.
fn inner_pid(pid: i32) -> Option<i32> {
    own_number(Path::new(&format!("/proc/{pid}/status")))
}

/// The last number of NSpid is that of the innermost PID namespace.
fn own_number(status: &Path) -> Option<i32> {
    let status = fs::read_to_string(status).ok()?;
    let field = |key| status.lines().find_map(|line| line.strip_prefix(key));
    if field("State:")?.trim_start().starts_with(['Z', 'X']) {
        return None;
    }
    field("NSpid:")?.split_whitespace().last()?.parse().ok()
}

/// The control file that the process has mapped, opened through its own root.
fn find(pid: i32, inner: i32) -> Result<Option<File>, i32> {
    let gone = |_: io::Error| code::OPERATING_SYSTEM;
    let maps = fs::read(format!("/proc/{pid}/maps")).map_err(gone)?;
    let maps = String::from_utf8_lossy(&maps);
    let name = format!("/{inner}.ctl");
    let Some(path) = maps.lines().filter_map(|line| Some(&line[line.find('/')?..])).find(|path| path.ends_with(&name))
    else {
        return Ok(None);
    };
    let path = PathBuf::from(format!("/proc/{pid}/root{path}"));
    let file = OpenOptions::new().read(true).write(true).open(path).map_err(gone)?;
    let whole = file.metadata().is_ok_and(|metadata| metadata.len() == SIZE as u64);
    if whole { Ok(Some(file)) } else { Err(code::OPERATING_SYSTEM) }
}

/// Never 0, and never the same twice: an image may remember any number of an earlier life.
fn unique() -> u64 {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = now.as_secs().wrapping_mul(1_000_000_000) + u64::from(now.subsec_nanos());
    (now.wrapping_add(COUNT.fetch_add(1, Ordering::Relaxed))).max(1)
}

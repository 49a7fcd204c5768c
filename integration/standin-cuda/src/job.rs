//! The job's side: the state, and the thread that answers requests.

use std::fs::{self, File, OpenOptions, Permissions};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::control::{Control, MAGIC, Mapping, Op, Pair, SIZE, code};
use crate::{fault, gate, gpus, host, kernels, memory, objects};

/// `CUprocessState`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Locked,
    Checkpointed,
    Failed,
}

/// What a checkpoint must bring back: it lives in private memory only.
#[derive(Debug)]
struct Job {
    state: State,
    gpu: [u8; 16],
    /// Those that CUDA_VISIBLE_DEVICES names, or all.
    usable: Vec<[u8; 16]>,
    /// The GPUs that it could see when it was checkpointed, whatever CUDA_VISIBLE_DEVICES says.
    seen: Vec<[u8; 16]>,
    /// Stands for the descriptors of /dev/nvidia*: CRIU refuses it as it refuses those.
    device: Option<OwnedFd>,
}

static JOB: Mutex<Job> =
    Mutex::new(Job { state: State::Running, gpu: [0; 16], usable: Vec::new(), seen: Vec::new(), device: None });
/// The process that started, by its own number: a forked child is no CUDA process, as with the real driver.
static STARTED: AtomicI32 = AtomicI32::new(0);

fn job() -> MutexGuard<'static, Job> {
    JOB.lock().unwrap_or_else(PoisonError::into_inner)
}

fn own_pid() -> i32 {
    // SAFETY: no precondition.
    unsafe { libc::getpid() }
}

/// The GPU that this process is on, or will be on.
pub(crate) fn gpu() -> [u8; 16] {
    let known = job().gpu;
    let folder = std::env::var_os("STANDIN_CUDA_DIR").filter(|_| known == [0; 16]);
    folder.and_then(|folder| first(Path::new(&folder))).unwrap_or(known)
}

/// The first GPU that it may use.
fn first(folder: &Path) -> Option<[u8; 16]> {
    named(folder).first().copied()
}

/// Those that CUDA_VISIBLE_DEVICES names by their numbers; all, if it names none so.
fn named(folder: &Path) -> Vec<[u8; 16]> {
    let all: Vec<[u8; 16]> = gpus::usable(folder).into_iter().map(|gpu| gpu.uuid).collect();
    let names = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
    let numbers: Vec<usize> = names.split(',').filter_map(|number| number.parse().ok()).collect();
    if numbers.is_empty() {
        return all;
    }
    numbers.into_iter().filter_map(|number| all.get(number).copied()).collect()
}

/// A process that was moved to a GPU which CUDA_VISIBLE_DEVICES did not name imports nothing any more, as with driver 580 (which
/// imports nothing on another machine either).
pub(crate) fn may_import() -> Result<(), i32> {
    let job = job();
    if job.usable.contains(&job.gpu) { Ok(()) } else { Err(code::NOT_INITIALIZED) }
}

/// The same, as it is now.
pub(crate) fn gpu_here() -> Option<gpus::Gpu> {
    let folder = std::env::var_os("STANDIN_CUDA_DIR")?;
    let uuid = gpu();
    gpus::all(Path::new(&folder)).into_iter().find(|gpu| gpu.uuid == uuid)
}

/// Makes this process a CUDA process; once it is one, does nothing.
pub(crate) fn start() -> Result<(), i32> {
    let mut job = job();
    let pid = own_pid();
    match STARTED.load(Ordering::Relaxed) {
        0 => {}
        started if started == pid => return Ok(()),
        _ => return Err(code::NOT_INITIALIZED),
    }
    let folder = std::env::var_os("STANDIN_CUDA_DIR").ok_or(code::NO_DEVICE)?;
    // As /proc/PID/maps will show it.
    let folder = fs::canonicalize(folder).map_err(|_| code::NO_DEVICE)?;
    // The process that copies has its number from another namespace.
    let end = if host::is_copier() { "copier" } else { "ctl" };
    let path = folder.join(format!("{pid}.{end}"));
    let control = create(&path, pid).map_err(|_| code::OPERATING_SYSTEM)?;
    job.usable = named(&folder);
    job.gpu = first(&folder).ok_or(code::NO_DEVICE)?;
    job.device = Some(open_device()?);
    gate::find_nvml(&folder);
    // Its memory is never freed: the thread outlives everything.
    let thread = thread::Builder::new().name("standin-cuda".to_owned());
    thread.spawn(move || serve(&control, &folder, &path)).map_err(|_| code::OPERATING_SYSTEM)?;
    STARTED.store(pid, Ordering::Relaxed);
    Ok(())
}

/// `cuInit`: takes as long as the fault of this name says.
pub(crate) fn initialize() -> Result<(), i32> {
    let Some(folder) = std::env::var_os("STANDIN_CUDA_DIR") else { return Ok(()) };
    let began = life();
    fault::inject(Path::new(&folder), "init", own_pid())?;
    fault::inject_copier("init")?;
    if life() == began { Ok(()) } else { Err(code::OPERATING_SYSTEM) }
}

/// Differs once CRIU has restored this process: when it began, in ticks since the machine did.
fn life() -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    stat.get(stat.rfind(')')? + 1..)?.split_whitespace().nth(19)?.parse().ok()
}

/// A CUDA call of the job: waits while the process is locked.
pub(crate) fn call(work: impl FnOnce() -> Result<(), i32>) -> Result<(), i32> {
    if STARTED.load(Ordering::Relaxed) != own_pid() {
        return Err(code::NOT_INITIALIZED);
    }
    let _inside = gate::enter();
    work()
}

fn create(path: &Path, pid: i32) -> std::io::Result<Mapping> {
    // Of an earlier process of this number.
    let _ = fs::remove_file(path);
    let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path)?;
    // CRIU compares mode and size at a restore; the mode must not depend on the umask.
    file.set_permissions(Permissions::from_mode(0o600))?;
    file.set_len(SIZE as u64)?;
    let control = Mapping::new(&file)?;
    control.not_in_children();
    control.pid.store(pid, Ordering::Relaxed);
    control.magic.store(MAGIC, Ordering::Release);
    Ok(control)
}

/// A userfaultfd: CRIU says `Can't dump file N of that type [600] (anon anon_inode:[userfaultfd])`. For user-mode
/// faults only it needs no privilege.
fn open_device() -> Result<OwnedFd, i32> {
    const UFFD_USER_MODE_ONLY: i32 = 1;
    // SAFETY: the call only makes a descriptor.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | UFFD_USER_MODE_ONLY) };
    match i32::try_from(fd) {
        // SAFETY: a descriptor that was just made and that nobody else owns.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(code::OPERATING_SYSTEM),
    }
}

/// The thread: looks for a request each millisecond.
fn serve(control: &Control, folder: &Path, path: &Path) {
    // SAFETY: no precondition.
    let tid = unsafe { libc::gettid() };
    let mut last = 0;
    loop {
        kernels::advance();
        {
            let job = job();
            let held = matches!(job.state, State::Running | State::Locked);
            control.gpu.store(job.gpu[0].into(), Ordering::Relaxed);
            control.used.store(if held { memory::total() } else { 0 }, Ordering::Relaxed);
        }
        let request = control.request.load(Ordering::Acquire);
        if request != 0 && request != last {
            last = request;
            if is_asked(path) {
                let (code, value) = match handle(control, folder, tid) {
                    Ok(value) => (code::SUCCESS, value),
                    Err(code) => (code, 0),
                };
                control.code.store(code, Ordering::Relaxed);
                control.value.store(value, Ordering::Relaxed);
                control.reply.store(request, Ordering::Release);
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether the caller of the request still waits: it holds the lock of the file. One that was killed left its request
/// behind, maybe for an earlier life of this process.
fn is_asked(path: &Path) -> bool {
    let Ok(file) = File::open(path) else { return false };
    // SAFETY: the descriptor is open.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) != 0 }
}

fn handle(control: &Control, folder: &Path, tid: i32) -> Result<i32, i32> {
    let op = Op::from_raw(control.op.load(Ordering::Relaxed)).ok_or(code::INVALID_VALUE)?;
    let wanted = match op {
        Op::State | Op::Tid => None,
        Op::Lock => Some(State::Running),
        Op::Checkpoint | Op::Unlock => Some(State::Locked),
        Op::Restore => Some(State::Checkpointed),
    };
    if wanted.is_some_and(|wanted| wanted != job().state) {
        return Err(code::ILLEGAL_STATE);
    }
    if let Err(code) = fault::inject(folder, op.name(), own_pid()) {
        if op == Op::Restore {
            job().state = State::Failed;
        }
        return Err(code);
    }
    match op {
        Op::State => return Ok(job().state as i32),
        Op::Tid => return Ok(tid),
        Op::Lock => lock(control.timeout_ms.load(Ordering::Relaxed))?,
        Op::Checkpoint => checkpoint(folder)?,
        Op::Restore => restore(&pairs(control)?, folder)?,
        Op::Unlock => {
            job().state = State::Running;
            gate::open();
        }
    }
    Ok(0)
}

fn lock(timeout_ms: u32) -> Result<(), i32> {
    let timeout = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms.into()));
    let began = Instant::now();
    if !gate::close(timeout) {
        return Err(code::NOT_READY);
    }
    if !kernels::drain(timeout.map(|timeout| timeout.saturating_sub(began.elapsed()))) {
        gate::open();
        return Err(code::NOT_READY);
    }
    job().state = State::Locked;
    Ok(())
}

/// See `standin_occupy`. Whoever waits for it waits in a futex, as for a lock of libc.
static HELD: Mutex<()> = Mutex::new(());

pub(crate) fn occupy(time: Duration) {
    let _held = HELD.lock();
    let until = Instant::now() + time;
    while Instant::now() < until {
        std::hint::spin_loop();
    }
}

fn checkpoint(folder: &Path) -> Result<(), i32> {
    drop(HELD.lock());
    objects::checkpoint();
    let mut job = job();
    memory::checkpoint()?;
    job.seen = gpus::usable(folder).into_iter().map(|gpu| gpu.uuid).collect();
    job.device = None;
    job.state = State::Checkpointed;
    Ok(())
}

/// A failure is the end of the process, as with the driver.
fn restore(pairs: &[Pair], folder: &Path) -> Result<(), i32> {
    drop(HELD.lock());
    let mut job = job();
    let done = place(&job, pairs, folder).and_then(|gpu| {
        job.device = Some(open_device()?);
        memory::restore()?;
        objects::restore()?;
        job.gpu = gpu;
        Ok(())
    });
    job.state = if done.is_ok() { State::Locked } else { State::Failed };
    done
}

/// The GPU to go to. Pairs name each GPU that was seen once, and each new one once (driver 580, measured).
fn place(job: &Job, pairs: &[Pair], folder: &Path) -> Result<[u8; 16], i32> {
    let here = gpus::usable(folder);
    let once = |side: usize| {
        let mut all: Vec<[u8; 16]> = pairs.iter().map(|pair| pair[side]).collect();
        all.sort_unstable();
        all.dedup();
        all.len() == pairs.len()
    };
    let is_here = |uuid: &[u8; 16]| here.iter().any(|gpu| gpu.uuid == *uuid);
    let all_seen =
        job.seen.iter().all(|seen| pairs.iter().any(|pair| pair[0] == *seen)) && pairs.len() == job.seen.len();
    let gpu = match pairs {
        [] => job.gpu,
        _ if !(once(0) && once(1) && all_seen && pairs.iter().all(|pair| is_here(&pair[1]))) => {
            return Err(code::INVALID_VALUE);
        }
        pairs => pairs.iter().find(|pair| pair[0] == job.gpu).ok_or(code::INVALID_VALUE)?[1],
    };
    let target = here.iter().find(|here| here.uuid == gpu).ok_or(code::NO_DEVICE)?;
    if target.total - target.taken.min(target.total) < memory::total() { Err(code::OUT_OF_MEMORY) } else { Ok(gpu) }
}

fn pairs(control: &Control) -> Result<Vec<Pair>, i32> {
    let count = control.pair_count.load(Ordering::Relaxed) as usize;
    let words = control.pairs.get(..count * 4).ok_or(code::INVALID_VALUE)?;
    let words: Vec<[u8; 8]> = words.iter().map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
    let uuid = |two: &[[u8; 8]]| {
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&two[0]);
        uuid[8..].copy_from_slice(&two[1]);
        uuid
    };
    Ok(words.chunks_exact(4).map(|pair| [uuid(&pair[..2]), uuid(&pair[2..])]).collect())
}

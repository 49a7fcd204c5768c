//! The interposer in real processes: calls that the stand-in libcuda makes, and the same calls from elsewhere.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

#[path = "support/standin.rs"]
#[allow(dead_code, reason = "what others of its users need")]
mod standin;

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags};
use rekindle_abi::variables;
use rekindle_cuda::Process;
use rekindle_cuda::nccl::{Kind, Ranks};
use rekindle_engine::launch::{interposer, reaper};
use rekindle_os::{process, ptrace};
use standin::{Standin, compile, wait_for};

const SECOND: Duration = Duration::from_secs(1);

/// A folder of landing files, and the interposer in a file.
struct Rig {
    standin: Standin,
    landing: tempfile::TempDir,
    preload: PathBuf,
}

fn rig_on(tmp: &Path) -> Rig {
    let standin = Standin::new();
    let preload = interposer::unpack(standin.path()).unwrap();
    let landing = tempfile::Builder::new().prefix("rekindle-landing-").tempdir_in(tmp).unwrap();
    Rig { standin, landing, preload }
}

fn rig() -> Rig {
    rig_on(Path::new("/dev/shm"))
}

impl Rig {
    fn install<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let preload = interposer::preload_value(&self.preload, None).unwrap();
        // More threads than this machine may have CPUs: they must get along.
        self.standin
            .install(command)
            .env("LD_PRELOAD", preload)
            .env(variables::LANDING, self.landing.path())
            .env(variables::COPY_THREADS, "4")
    }

    fn command(&self, scenario: &str) -> Command {
        let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/preload_job.py");
        let mut command = Command::new("timeout");
        command.args(["-k", "5", "60", "python3"]).arg(job).arg(self.standin.path().join("libcuda.so.1")).arg(scenario);
        self.install(&mut command);
        command
    }

    fn landing_file(&self, pid: i32) -> PathBuf {
        self.landing.path().join(process::inner_pid(pid).unwrap().to_string())
    }
}

fn passes(command: &mut Command) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}: {}", output.status, text(&output.stderr));
    assert_eq!((text(&output.stdout).as_str(), text(&output.stderr).as_str()), ("ok\n", ""));
}

macro_rules! scenarios {
    ($($name:ident: $scenario:literal),* $(,)?) => {
        $(#[test]
        fn $name() {
            passes(&mut rig().command($scenario));
        })*
    };
}

scenarios! {
    the_drivers_mapping_lands_and_its_copies_are_whole: "lands",
    calls_from_elsewhere_are_not_touched: "wrong_caller",
    small_mappings_and_copies_are_not_touched: "small",
    without_a_landing_file_nothing_happens: "unarmed",
    a_file_size_limit_does_not_end_the_job: "file_size_limit",
    what_is_no_regular_file_is_not_used: "no_file",
    a_forked_child_has_no_helpers_and_no_landing_but_can_get_its_own: "forks",
    signals_during_copies_do_no_harm: "signals",
    the_jobs_own_copies_are_whole: "concurrent",
    errno_is_what_libc_makes_it: "errno",
    it_lands_on_a_kernel_before_5_14: "old_kernel",
    without_helpers_copies_are_whole: "no_threads",
    only_the_drivers_copies_are_redirected_and_only_while_it_lands: "redirects",
    a_table_that_stays_read_only_leaves_the_copies_to_the_driver: "no_mprotect",
    ends_that_nobody_tells_of_do_no_harm: "missed_ends",
    a_second_libcuda_has_a_table_of_its_own: "two_libcudas",
    every_way_to_cuinit_marks_it_while_it_lasts: "init_is_marked",
    a_second_libcuda_keeps_its_functions: "functions_of_two_libcudas",
    a_libcuda_at_another_address_has_its_functions_replaced_again: "a_libcuda_that_is_loaded_again",
}

#[test]
fn a_libcuda_that_binds_functions_late_is_redirected_and_left_as_it_was() {
    for scenario in ["redirects_late", "lands", "forks"] {
        let rig = rig();
        let libcuda = rig.standin.path().join("libcuda.so.1");
        let options = ["-Crelro-level=off", "-Clink-arg=-Wl,-z,lazy,-z,norelro", "-lc"];
        compile("lazy_libcuda.rs", &libcuda, &options);
        passes(&mut rig.command(scenario));
    }
}

/// Mounted until it is dropped.
struct Tmpfs(tempfile::TempDir);

/// None if the test does not run as root.
fn tmpfs(options: &str) -> Option<Tmpfs> {
    if !rekindle_testing::root() {
        return None;
    }
    let dir = tempfile::tempdir().unwrap();
    nix::mount::mount(Some("none"), dir.path(), Some("tmpfs"), MsFlags::empty(), Some(options)).unwrap();
    Some(Tmpfs(dir))
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

#[test]
fn without_space_the_driver_gets_its_own_mapping() {
    for scenario in ["refused", "old_kernel_refused"] {
        let Some(small) = tmpfs("size=8m") else { return };
        passes(&mut rig_on(small.0.path()).command(scenario));
        let free = nix::sys::statvfs::statvfs(small.0.path()).unwrap();
        assert!(free.blocks_free() > free.blocks() / 2, "what was filled in vain is freed");
    }
}

#[test]
fn a_file_on_a_disk_is_not_used() {
    // Cargo's own folder for it is not on a tmpfs, on most machines.
    let here = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let in_memory = nix::sys::statfs::statfs(here).unwrap().filesystem_type() == nix::sys::statfs::TMPFS_MAGIC;
    if !rekindle_testing::require("disks", !in_memory, "the build folder is on a tmpfs") {
        return;
    }
    passes(&mut rig_on(here).command("refused"));
}

#[test]
fn a_folder_that_can_not_be_written_is_no_matter() {
    let Some(mount) = tmpfs("size=64m") else { return };
    let rig = rig_on(mount.0.path());
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
    nix::mount::mount(None::<&str>, mount.0.path(), None::<&str>, flags, None::<&str>).unwrap();
    passes(&mut rig.command("cannot_open"));
    let mut command = rig.command("cannot_open");
    passes(command.env(variables::LANDING, format!("/{}", "x".repeat(2000))).env("UNUSED", "1"));
    let flags = MsFlags::MS_REMOUNT;
    nix::mount::mount(None::<&str>, mount.0.path(), None::<&str>, flags, None::<&str>).unwrap();
}

#[test]
fn the_jobs_own_preload_is_kept() {
    let rig = rig();
    let other = rig.standin.path().join("other.so");
    compile("other_preload.rs", &other, &["-Clink-arg=-nostdlib"]);
    let value = interposer::preload_value(&rig.preload, Some(other.as_os_str())).unwrap();
    passes(rig.command("other_preload").env("LD_PRELOAD", value));
}

#[test]
fn every_way_to_a_function_of_the_driver_leads_there() {
    let rig = rig();
    let libcuda = format!("-Clink-arg={}", rig.standin.path().join("libcuda.so.1").display());
    compile("linked_to_libcuda.rs", &rig.standin.path().join("linked.so"), &["-Clink-arg=-nostdlib", &libcuda]);
    passes(&mut rig.command("ways_to_the_driver"));
}

#[test]
fn without_a_driver_there_are_none_of_its_functions() {
    let rig = rig();
    let script = "import ctypes\n\
                  program = ctypes.CDLL(None)\n\
                  program.dlsym.restype = ctypes.c_void_p\n\
                  names = ['cuMemCreate', 'cuGetProcAddress', 'cuInit']\n\
                  assert not any(hasattr(program, name) for name in names)\n\
                  assert not any(program.dlsym(None, name.encode()) for name in names)\n\
                  assert program.dlsym(None, b'getpid')\n\
                  print('ok')";
    passes(rig.install(&mut Command::new("python3")).args(["-c", script]));
}

/// Runs nccl_ways.py; what it has started when it says that it is ready, and why that is not all.
fn counts_of(way: &str, libraries: &[&Path], rig: &Rig, preload: &[&Path]) -> (Vec<(Kind, u64)>, Option<&'static str>) {
    let job = Path::new(env!("CARGO_MANIFEST_DIR")).join("integration/jobs/nccl_ways.py");
    let mut command = Command::new("python3");
    command.arg(job).arg(way).args(libraries).stdin(Stdio::piped()).stdout(Stdio::piped());
    rig.install(&mut command);
    let preloaded =
        [rig.preload.as_path()].into_iter().chain(preload.iter().copied()).map(|path| path.to_str().unwrap());
    let mut child = command.env("LD_PRELOAD", preloaded.collect::<Vec<_>>().join(":")).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ok\n", "{way}");
    let ranks = Ranks::of(i32::try_from(child.id()).unwrap()).unwrap().unwrap();
    let counts = ranks.counts();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    let mut counters: Vec<_> = counts.counters.iter().map(|counter| (counter.kind, counter.started)).collect();
    counters.sort_unstable();
    assert_eq!((counts.inside, counts.communicators.len()), (0, 1), "{way}");
    (counters, ranks.untracked())
}

#[test]
fn every_way_to_a_function_of_nccl_leads_there() {
    if !rekindle_testing::root() {
        return;
    }
    let rig = rig();
    let linked = rig.standin.add_nccl();
    let nccl = rig.standin.path().join("libnccl.so.2");
    for (way, library) in [("name", &nccl), ("global", &nccl), ("symbol", &linked)] {
        let counts = counts_of(way, &[library], &rig, &[]);
        // A broadcast in place is one: NCCL calls its broadcast by symbol.
        let expected = vec![(Kind::Collective, 5), (Kind::Send, 1), (Kind::Receive, 1)];
        assert_eq!(counts, (expected, None), "{way}");
    }
}

/// A copy of NCCL that is not called so, and a library that is linked to it.
fn another_nccl(rig: &Rig) -> [PathBuf; 2] {
    let [nccl, linked] = ["libown.so", "linked-to-own.so"].map(|name| rig.standin.path().join(name));
    fs::copy(rig.standin.path().join("libnccl.so.2"), &nccl).unwrap();
    let link = format!("-Clink-arg={}", nccl.display());
    compile("linked_to_libnccl.rs", &linked, &["-Clink-arg=-nostdlib", &link]);
    [nccl, linked]
}

#[test]
fn a_preloaded_nccl_is_called_as_the_loader_would_do_it() {
    if !rekindle_testing::root() {
        return;
    }
    let rig = rig();
    let linked = rig.standin.add_nccl();
    let [preloaded, _] = another_nccl(&rig);
    let counts = counts_of("symbol", &[&linked], &rig, &[&preloaded]);
    let expected = vec![(Kind::Collective, 5), (Kind::Send, 1), (Kind::Receive, 1)];
    assert_eq!(counts, (expected, None));
}

#[test]
fn an_nccl_within_another_library_has_its_own_communicators() {
    if !rekindle_testing::root() {
        return;
    }
    let rig = rig();
    let linked = rig.standin.add_nccl();
    let [_, other] = another_nccl(&rig);
    let (_, untracked) = counts_of("symbol", &[&linked, &other], &rig, &[]);
    assert_eq!(untracked, Some("it uses NCCL in a way that is not counted"));
}

#[test]
fn without_nccl_there_are_none_of_its_functions() {
    let rig = rig();
    let script = "import ctypes\n\
                  program = ctypes.CDLL(None)\n\
                  program.dlsym.restype = ctypes.c_void_p\n\
                  names = ['ncclAllReduce', 'ncclCommInitRank', 'ncclCommShrink', 'ncclGetVersion']\n\
                  assert not any(hasattr(program, name) for name in names)\n\
                  assert not any(program.dlsym(None, name.encode()) for name in names)\n\
                  print('ok')";
    passes(rig.install(&mut Command::new("python3")).args(["-c", script]));
}

#[test]
fn a_static_binary_runs_without_it() {
    let rig = rig();
    let reaper = reaper::unpack(rig.standin.path()).unwrap();
    let output = rig.install(&mut Command::new(reaper)).output().unwrap();
    assert_eq!(
        (output.status.code(), output.stderr.as_slice()),
        (Some(2), b"".as_slice()),
        "its answer to no arguments"
    );
}

#[test]
fn programs_of_all_kinds_load_it() {
    let rig = rig();
    for program in ["true", "sh", "python3"] {
        let mut command = Command::new(program);
        let output = rig.install(command.args(["-c", ""])).output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{program}: {output:?}");
    }
}

/// Locked, armed, stopped, and checkpointed with the driver's thread alone, as a snapshot does it.
fn checkpoint(cuda: &Process, thread: i32, landing: &Path) {
    cuda.lock(10 * SECOND).unwrap();
    fs::write(landing, "").unwrap();
    // CRIU compares the mode at a restore; it must not depend on the umask.
    fs::set_permissions(landing, fs::Permissions::from_mode(0o600)).unwrap();
    assert!(ptrace::stop(cuda.pid(), 10 * SECOND).unwrap());
    let (looking, over) = (Barrier::new(2), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let looks = scope.spawn(|| {
            let mut helped = false;
            // A helper lives for some milliseconds: who looks must not wait for a processor meanwhile.
            let me = nix::unistd::gettid().to_string();
            Command::new("renice").args(["-n", "-20", "-p", &me]).output().unwrap();
            looking.wait();
            while !over.load(Ordering::Relaxed) {
                let mut names = process::threads(cuda.pid()).into_iter().filter_map(process::name);
                helped |= names.any(|name| name == "rekindle-copy");
            }
            helped
        });
        looking.wait();
        cuda.alone(thread, 20 * SECOND, || cuda.checkpoint()).unwrap();
        over.store(true, Ordering::Relaxed);
        assert!(looks.join().unwrap(), "no helper ran while the process was stopped");
    });
    wait_for("all stand", || ptrace::is_stopped(cuda.pid()));
}

/// How many words of libcuda's data are addresses of the interposer's code.
fn redirections(pid: i32) -> usize {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let parts = |name: &str, is_code: bool| -> Vec<std::ops::Range<u64>> {
        let lines = maps.lines().filter(|line| line.rsplit('/').next().is_some_and(|file| file.starts_with(name)));
        let rights = |line: &&str| line.contains(" r") && line.split(' ').nth(1).unwrap().contains('x') == is_code;
        let number = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let range = |line: &str| line.split([' ', '-']).take(2).map(number).collect::<Vec<_>>();
        lines.filter(rights).map(range).map(|ends| ends[0]..ends[1]).collect()
    };
    let code = parts("interposer-", true);
    assert!(!code.is_empty());
    let read = |part: std::ops::Range<u64>| {
        let mut bytes = vec![0; usize::try_from(part.end - part.start).unwrap()];
        memory.read_exact_at(&mut bytes, part.start).unwrap();
        let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        words.filter(|word| code.iter().any(|part| part.contains(word))).count()
    };
    parts("libcuda.so", false).into_iter().map(read).sum()
}

/// None without root or without CRIU.
fn criu() -> Option<std::ffi::OsString> {
    if rekindle_testing::root() { rekindle_testing::criu().map(Into::into) } else { None }
}

/// Ends what is not a child of this test.
struct Killed(i32);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0), nix::sys::signal::SIGKILL);
    }
}

#[test]
fn a_killed_job_comes_back_with_its_device_memory_from_the_landing_file() {
    let Some(criu) = criu() else { return };
    let rig = rig();
    let images = rig.standin.path().join("images");
    fs::create_dir(&images).unwrap();
    let run = |args: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60"]).arg(&criu).args(["--no-default-config", "-v4", "-o", "log", "-D"]);
        let output = command.arg(&images).args(args).output().unwrap();
        assert!(output.status.success(), "{}", fs::read_to_string(images.join("log")).unwrap_or_default());
    };
    let python = rig.standin.command(&["--mib", "64"]);
    let mut command = Command::new("setsid");
    command.arg(python.get_program()).args(python.get_args());
    let log = fs::File::create(rig.standin.path().join("log")).unwrap();
    rig.install(&mut command).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    let mut job = rig.standin.spawn(&mut command);
    let (pid, driver) = (job.pid(), rig.standin.driver());
    let cuda = job.process(&driver);
    let landing = rig.landing_file(pid);
    let thread = cuda.restore_thread_id().unwrap();
    let hooks = redirections(pid);
    checkpoint(&cuda, thread, &landing);
    let redirected = redirections(pid);
    assert!(redirected > hooks, "{redirected} > {hooks}");
    run(&["dump", "--leave-stopped", "-t", &pid.to_string()]);
    let image: u64 = fs::read_dir(&images).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum();
    // The job keeps 64 MiB in host memory too; another 66 would be those of the device.
    assert!(image < 100 << 20, "{image} bytes hold more than the host memory");
    let at_dump = job.count();
    job.kill();

    run(&["restore", "-d"]);
    let _restored = Killed(pid);
    let cuda = Process::with_driver(pid, driver).unwrap();
    wait_for("it is stopped as it was", || ptrace::is_stopped(pid));
    assert_eq!(redirections(pid), redirected);
    cuda.alone(thread, 20 * SECOND, || cuda.restore(&[])).unwrap();
    assert_eq!(redirections(pid), hooks);
    fs::remove_file(&landing).unwrap();
    ptrace::go_on(pid).unwrap();
    cuda.unlock().unwrap();
    // It compares its device memory in each round.
    wait_for("the restored job counts", || job.count() > at_dump + 2);
}

#[test]
fn a_checkpoint_lands_with_all_other_threads_stopped_and_leaves_no_helper() {
    let rig = rig();
    let mut command = rig.standin.command(&["--mib", "64"]);
    let mut job = rig.standin.spawn(rig.install(&mut command).stdin(Stdio::null()));
    let (pid, driver) = (job.pid(), rig.standin.driver());
    let cuda = job.process(&driver);
    let landing = rig.landing_file(pid);
    let thread = cuda.restore_thread_id().unwrap();
    let threads = process::threads(pid);
    // One that got no CPU stands before its first instruction, has its maker's name, and ends when the process goes on.
    // So does one that was stopped on its way out.
    let helpers = || {
        let running = process::threads(pid).into_iter().filter(|tid| process::state(*tid) != Some('T'));
        running.filter_map(process::name).filter(|name| name == "rekindle-copy").count()
    };
    for round in 0..3 {
        checkpoint(&cuda, thread, &landing);
        let count = job.count();
        // The last one may still be on its way out.
        wait_for("helpers are gone", || helpers() == 0);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(maps.contains(landing.to_str().unwrap()), "round {round}: it did not land");

        // The job has one allocation of 64 MiB, the same 2 MiB all over, and one that holds its counter.
        let memory = fs::read(&landing).unwrap();
        assert_eq!(memory.len(), 66 << 20);
        let pieces: Vec<&[u8]> = memory.chunks(2 << 20).collect();
        assert!(pieces[..32].iter().all(|piece| *piece == pieces[0]) && pieces[0].iter().any(|byte| *byte != 0));
        let counter = u64::from_le_bytes(pieces[32][..8].try_into().unwrap());
        assert!((count..=count + 1).contains(&counter), "{counter}, and the job wrote {count}");

        cuda.alone(thread, 20 * SECOND, || cuda.restore(&[])).unwrap();
        wait_for("all stand", || ptrace::is_stopped(pid));
        assert_eq!(helpers(), 0, "round {round}: helpers are gone");
        // Renamed, as a snapshot keeps it; the next one has another file.
        fs::rename(&landing, rig.landing.path().join(format!("kept-{round}"))).unwrap();
        ptrace::go_on(pid).unwrap();
        cuda.unlock().unwrap();
        job.assert_counts();
        wait_for("the threads are those of the job", || process::threads(pid) == threads);
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
        assert!(!maps.contains(rig.landing.path().to_str().unwrap()), "the region is unmapped");
    }
    assert_eq!(fs::metadata(rig.landing.path().join("kept-0")).unwrap().size(), 66 << 20);
}

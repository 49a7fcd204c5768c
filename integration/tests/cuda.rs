//! `rekindle_cuda` against the stand-in libcuda, in real processes.

#![allow(clippy::unwrap_used, reason = "helpers of tests: a panic is the report")]

#[path = "support/standin.rs"]
mod standin;

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rekindle_cuda::{self as cuda, Driver, Error, Function, GpuMapping, GpuUuid, Process, State};
use standin::{Standin, wait_for};

const SECOND: Duration = Duration::from_secs(1);

fn gpu(byte: u8) -> GpuUuid {
    GpuUuid::from_bytes([byte; 16])
}

#[test]
fn a_process_goes_round_and_its_memory_survives() {
    let standin = Standin::new();
    let mut job = standin.start(&["--mib", "8"]);
    let process = job.process(&standin.driver());
    assert!(cuda::is_candidate(job.pid()).unwrap());
    for _ in 0..3 {
        assert_eq!(process.state().unwrap(), State::Running);
        process.lock(10 * SECOND).unwrap();
        assert_eq!(process.state().unwrap(), State::Locked);
        process.checkpoint().unwrap();
        assert_eq!(process.state().unwrap(), State::Checkpointed);
        job.assert_stands();
        process.restore(&[]).unwrap();
        assert_eq!(process.state().unwrap(), State::Locked);
        job.assert_stands();
        process.unlock().unwrap();
        assert_eq!(process.state().unwrap(), State::Running);
        // The job checks counter and pattern itself, and ends when they differ.
        job.assert_counts();
    }
}

#[test]
fn calls_in_the_wrong_state_are_refused_and_change_nothing() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    let refused = |result: cuda::Result<()>, words: &str| {
        let error = result.unwrap_err();
        assert_eq!(error.code(), Some(401), "{error}");
        assert!(error.to_string().contains(words), "{error}");
    };
    refused(process.checkpoint(), "only a locked process");
    refused(process.restore(&[]), "only a checkpointed process");
    refused(process.unlock(), "only a locked process");
    process.lock(10 * SECOND).unwrap();
    refused(process.lock(10 * SECOND), "only a running process");
    refused(process.restore(&[]), "only a checkpointed process");
    process.checkpoint().unwrap();
    refused(process.checkpoint(), "only a locked process");
    refused(process.unlock(), "restore it first");
    assert_eq!(process.state().unwrap(), State::Checkpointed);
    process.restore(&[]).unwrap();
    process.unlock().unwrap();
    job.assert_counts();
}

#[test]
fn a_process_without_cuda_is_told_apart() {
    let standin = Standin::new();
    let mut sleep = Command::new("sleep").arg("60").spawn().unwrap();
    let pid = i32::try_from(sleep.id()).unwrap();
    let process = Process::with_driver(pid, standin.driver()).unwrap();
    let error = process.state().unwrap_err();
    assert!(error.is_not_cuda() && error.code() == Some(3), "{error}");
    assert!(process.lock(10 * SECOND).unwrap_err().is_not_cuda());
    assert!(!cuda::is_candidate(pid).unwrap());
    sleep.kill().unwrap();
    sleep.wait().unwrap();
}

#[test]
fn a_process_that_only_loads_the_library_is_a_candidate_but_no_cuda_process() {
    let standin = Standin::new();
    let load = "import ctypes,sys,time; ctypes.CDLL('libcuda.so.1'); print('loaded', flush=True); time.sleep(60)";
    let mut command = Command::new("python3");
    let mut python = standin.install(command.args(["-c", load])).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(python.stdout.take().unwrap()), &mut line).unwrap();
    assert_eq!(line, "loaded\n");
    let pid = i32::try_from(python.id()).unwrap();
    assert!(cuda::is_candidate(pid).unwrap());
    let error = Process::with_driver(pid, standin.driver()).unwrap().state().unwrap_err();
    assert!(error.is_not_cuda(), "{error}");
    python.kill().unwrap();
    python.wait().unwrap();
}

#[test]
fn a_forked_child_is_no_cuda_process() {
    let standin = Standin::new();
    let mut job = standin.start(&["--fork"]);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", job.pid())).unwrap();
    let child: i32 = children.trim().parse().unwrap();
    let _child = KillOnDrop(child.to_string());
    let error = Process::with_driver(child, standin.driver()).unwrap().state().unwrap_err();
    job.assert_counts();
    assert!(error.is_not_cuda(), "{error}");
}

#[test]
fn a_lock_that_waits_too_long_leaves_the_process_running() {
    let standin = Standin::new();
    let mut job = standin.start(&["--busy-ms", "400"]);
    let process = job.process(&standin.driver());
    // A kernel takes 400 ms and the pause between two only 10 ms: one of a few attempts meets a kernel.
    let error = (0..10).find_map(|_| {
        let start = Instant::now();
        match process.lock(Duration::from_millis(50)) {
            Ok(()) => {
                process.unlock().unwrap();
                None
            }
            Err(error) => Some((error, start.elapsed())),
        }
    });
    let (error, took) = error.expect("no lock timed out");
    assert!(error.is_not_ready(), "{error}");
    assert!(took >= Duration::from_millis(50), "{took:?}");
    assert_eq!(process.state().unwrap(), State::Running);
    job.assert_counts();
    process.lock(10 * SECOND).unwrap();
    process.unlock().unwrap();
}

#[test]
fn two_processes_are_locked_at_once() {
    let standins = [Standin::new(), Standin::new()];
    let mut jobs = [standins[0].start(&[]), standins[1].start(&[])];
    // Each lock waits four seconds before it is taken.
    standins.iter().for_each(|standin| standin.fault("fail-lock", "0 delay=4000"));
    let driver = standins[0].driver();
    let processes = [jobs[0].process(&driver), jobs[1].process(&driver)];
    let start = Instant::now();
    thread::scope(|scope| {
        for process in &processes {
            scope.spawn(|| process.lock(10 * SECOND).unwrap());
        }
    });
    let took = start.elapsed();
    assert!(took >= 4 * SECOND && took < 8 * SECOND, "{took:?}");
    for process in &processes {
        assert_eq!(process.state().unwrap(), State::Locked);
        process.unlock().unwrap();
    }
    jobs.iter_mut().for_each(standin::Job::assert_counts);
}

#[test]
fn a_dead_process_is_an_operating_system_error() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    process.lock(10 * SECOND).unwrap();
    job.kill();
    for error in [process.state().unwrap_err(), process.checkpoint().unwrap_err(), process.unlock().unwrap_err()] {
        assert_eq!(error.code(), Some(304), "{error}");
        assert!(error.to_string().contains("gone"), "{error}");
        assert!(!error.is_not_cuda());
    }
    assert!(matches!(Process::with_driver(job.pid(), standin.driver()), Err(Error::NoProcess(_))));
}

#[test]
fn a_process_that_dies_at_the_checkpoint_does_not_hang_the_caller() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    process.lock(10 * SECOND).unwrap();
    standin.fault("die-at-checkpoint", "delay=50");
    let start = Instant::now();
    let error = process.checkpoint().unwrap_err();
    assert_eq!(error.code(), Some(304), "{error}");
    assert!(start.elapsed() < 20 * SECOND);
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&job.wait()), Some(9));
    assert!(!standin.path().join("die-at-checkpoint").exists(), "the next life would die of it");
}

#[test]
fn injected_faults_fail_as_the_driver_does() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    standin.fault("fail-lock", "600 times=2");
    assert!(process.lock(10 * SECOND).unwrap_err().is_not_ready());
    assert!(process.lock(10 * SECOND).unwrap_err().is_not_ready());
    process.lock(10 * SECOND).unwrap();
    standin.fault("fail-checkpoint", "801 times=1");
    let error = process.checkpoint().unwrap_err();
    assert!(error.code() == Some(801) && error.to_string().contains("managed memory"), "{error}");
    assert_eq!(process.state().unwrap(), State::Locked);
    standin.fault("fail-unlock", &format!("304 times=1 pid={}", job.pid() + 1));
    process.unlock().unwrap();
    job.assert_counts();
    process.lock(10 * SECOND).unwrap();
    process.checkpoint().unwrap();
    standin.fault("fail-restore", "801");
    let error = process.restore(&[]).unwrap_err();
    assert!(error.to_string().contains("NCCL_P2P_DISABLE=1"), "{error}");
    assert_eq!(process.state().unwrap(), State::Failed);
    assert_eq!(process.restore(&[]).unwrap_err().code(), Some(401));
}

#[test]
fn the_restore_thread_is_a_thread_of_the_process() {
    let standin = Standin::new();
    let job = standin.start(&[]);
    let tid = job.process(&standin.driver()).restore_thread_id().unwrap();
    assert_ne!(tid, job.pid());
    let name = std::fs::read_to_string(format!("/proc/{}/task/{tid}/comm", job.pid())).unwrap();
    assert_eq!(name, "standin-cuda\n");
    let error = Process::with_driver(tid, standin.driver()).unwrap_err();
    assert!(matches!(error, Error::ThreadId { pid, .. } if pid == job.pid()), "{error}");
}

fn pair(old: u8, new: u8) -> GpuMapping {
    GpuMapping { old: gpu(old), new: gpu(new) }
}

#[test]
fn a_restore_maps_to_another_gpu() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    process.lock(10 * SECOND).unwrap();
    for _ in 0..2 {
        process.checkpoint().unwrap();
        process.restore(&[pair(0xa0, 0xb0), pair(0xb0, 0xa0)]).unwrap();
    }
    process.checkpoint().unwrap();
    process.restore(&[]).unwrap();
    process.unlock().unwrap();
    job.assert_counts();
}

#[test]
fn pairs_name_every_gpu_once() {
    for pairs in [&[pair(0xa0, 0xb0)][..], &[pair(0xa0, 0xb0), pair(0xb0, 0xb0)], &[pair(0xa0, 0xa0), pair(0xb0, 0xc0)]]
    {
        let standin = Standin::new();
        let job = standin.start(&[]);
        let process = job.process(&standin.driver());
        process.lock(10 * SECOND).unwrap();
        process.checkpoint().unwrap();
        let error = process.restore(pairs).unwrap_err();
        assert!(error.code() == Some(1) && error.to_string().contains("every GPU"), "{error}");
        assert_eq!(process.state().unwrap(), State::Failed, "there is no second try");
    }
}

#[test]
fn the_request_of_a_killed_caller_is_not_carried_out() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let process = job.process(&standin.driver());
    let pid = job.pid().to_string();
    let control = standin.path().join(format!("{pid}.ctl"));
    let before = std::fs::read(&control).unwrap();
    let kill = |signal: &str| assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    kill("-STOP");
    let ask = "import ctypes,sys; a=(ctypes.c_uint32*16)(20000); \
               ctypes.CDLL('libcuda.so.1').cuCheckpointProcessLock(int(sys.argv[1]), a)";
    let mut command = Command::new("python3");
    let mut caller = standin.install(command.args(["-c", ask, &pid])).spawn().unwrap();
    wait_for("the request is written", || std::fs::read(&control).unwrap() != before);
    thread::sleep(Duration::from_millis(20));
    caller.kill().unwrap();
    caller.wait().unwrap();
    kill("-CONT");
    job.assert_counts();
    assert_eq!(process.state().unwrap(), State::Running);
}

#[test]
fn a_caller_does_not_become_a_cuda_process() {
    let standin = Standin::new();
    let job = standin.start(&[]);
    let driver = standin.driver();
    assert!(Function::ALL.iter().all(|f| driver.supports(*f) == (*f != Function::OperationComplete)));
    assert_eq!(driver.cuda_version(), Some(13_000));
    job.process(&driver).state().unwrap();
    let controls = std::fs::read_dir(standin.path()).unwrap().flatten();
    let controls = controls.filter(|entry| entry.path().extension().is_some_and(|extension| extension == "ctl"));
    assert_eq!(controls.count(), 1);
}

/// Runs `rekindle cuda ARGS`; exit code, standard output, standard error.
fn rekindle(standin: &Standin, args: &[&str]) -> (Option<i32>, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    let output = standin.install(command.arg("cuda").args(args)).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn the_command_does_what_cuda_checkpoint_does() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let pid = job.pid().to_string();
    let run = |args: &[&str]| {
        let (exit, out, err) = rekindle(&standin, &[args, &["--pid", &pid]].concat());
        assert_eq!((exit, err.as_str()), (Some(0), ""), "{args:?}");
        out
    };
    assert_eq!(run(&["state"]), "running\n");
    for (action, state) in
        [("lock", "locked"), ("checkpoint", "checkpointed"), ("restore", "locked"), ("unlock", "running")]
    {
        let out = run(&[action]);
        assert!(out.starts_with(&format!("{action}: {state}, ")) && out.ends_with(" ms\n"), "{out}");
    }
    let tid: i32 = run(&["restore-tid"]).trim().parse().unwrap();
    assert!(std::path::Path::new(&format!("/proc/{pid}/task/{tid}")).exists());
    let out = run(&["toggle", "--timeout", "5000"]);
    assert!(out.starts_with("lock: locked, ") && out.contains("\ncheckpoint: checkpointed, "), "{out}");
    let map = format!(
        "A0A0A0A0-a0a0-a0a0-a0a0-a0a0a0a0a0a0=GPU-b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0b0,{}={}",
        gpu(0xb0),
        gpu(0xa0)
    );
    let out = run(&["toggle", "--json", "--device-map", &map]);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(json["state"], "running");
    assert_eq!(json["steps"][0]["action"], "restore");
    assert_eq!(json["steps"][1]["state"], "running");
    assert!(json["steps"][0]["milliseconds"].as_f64().unwrap() > 0.0);
    job.assert_counts();
}

#[test]
fn the_command_refuses_in_words() {
    let standin = Standin::new();
    let mut job = standin.start(&[]);
    let pid = job.pid().to_string();
    let refused = |args: &[&str], exit: i32, words: &str| {
        let (code, _, err) = rekindle(&standin, args);
        assert_eq!(code, Some(exit), "{args:?}: {err}");
        assert!(err.contains(words), "{args:?}: {err}");
    };
    refused(&["unlock", "--pid", &pid], 1, "CUDA_ERROR_ILLEGAL_STATE (401)");
    refused(&["state", "--pid", "2147483647"], 2, "no process 2147483647");
    refused(&["lock", "--pid", &pid, "--timeout", "0"], 2, "--timeout");
    let me = std::process::id().to_string();
    refused(&["state", "--pid", &me], 1, "does not use CUDA");
    let map = format!("{}={}", gpu(0xa0), gpu(0xb0));
    refused(&["toggle", "--pid", &pid, "--device-map", &map], 2, "is running");
    // A toggle that fails half way brings the process back to where it was.
    standin.fault("fail-checkpoint", "801 times=1");
    refused(&["toggle", "--pid", &pid], 1, "managed memory");
    job.assert_counts();
    job.process(&standin.driver()).lock(10 * SECOND).unwrap();
    refused(&["toggle", "--pid", &pid], 1, &format!("`rekindle cuda unlock --pid {pid}`"));
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
    let (code, out, err) = rekindle(&standin, &["restore", "--json", "--pid", &pid]);
    assert!(code == Some(1) && out.is_empty(), "{code:?} {out}");
    assert!(json(&err)["code"] == 1 && json(&err)["error"].as_str().unwrap().contains("401"), "{err}");
    // The steps before the failure are what the process has been through.
    job.process(&standin.driver()).unlock().unwrap();
    standin.fault("fail-checkpoint", "801 times=1");
    let (code, out, err) = rekindle(&standin, &["toggle", "--json", "--pid", &pid]);
    assert_eq!((code, &json(&err)["code"]), (Some(1), &1.into()), "{err}");
    let steps = json(&out)["steps"].as_array().unwrap().len();
    assert!(json(&out)["state"] == "running" && steps == 2, "{out}");
}

#[test]
fn the_command_names_the_driver_that_is_missing() {
    let me = std::process::id().to_string();
    let none = tempfile::tempdir().unwrap();
    let state = |folder: &std::path::Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
        let output = command.env("LD_LIBRARY_PATH", folder).args(["cuda", "state", "--pid", &me]).output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    // A driver before 570: a library by that name without the functions.
    let old = tempfile::tempdir().unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let libc =
        maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..])).find(|path| path.contains("/libc.so"));
    std::os::unix::fs::symlink(libc.unwrap(), old.path().join("libcuda.so.1")).unwrap();
    let (code, words) = state(old.path());
    assert!(code == Some(69) && words.starts_with("rekindle: needs NVIDIA driver 570 or newer, found "), "{words}");
    // On a machine with a driver it is found all the same, and says that this test does not use CUDA.
    if Driver::load().is_err() {
        let (code, words) = state(none.path());
        assert!(code == Some(69) && words.starts_with("rekindle: needs NVIDIA driver 570 or newer"), "{words}");
    }
}

#[test]
fn another_gpu_needs_driver_580() {
    let standin = Standin::new();
    let job = standin.start(&[]);
    let process = job.process(&standin.driver());
    process.lock(10 * SECOND).unwrap();
    process.checkpoint().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rekindle"));
    let map = format!("{}={}", gpu(0xa0), gpu(0xb0));
    let pid = job.pid().to_string();
    command.args(["cuda", "restore", "--pid", &pid, "--device-map", &map]).env("STANDIN_CUDA_VERSION", "12090");
    let output = standin.install(&mut command).output().unwrap();
    let words = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(69), "{words}");
    assert!(words.contains("needs NVIDIA driver 580 or newer"), "{words}");
    assert_eq!(process.state().unwrap(), State::Checkpointed);
    process.restore(&[]).unwrap();
}

#[test]
fn no_driver_is_told_in_words() {
    let error = Driver::open("/nowhere/libcuda.so.1").unwrap_err();
    assert!(error.is_missing());
    assert!(error.to_string().starts_with("needs NVIDIA driver 570 or newer"), "{error}");
}

#[test]
fn a_process_of_another_namespace_is_addressed_by_its_outer_pid() {
    if !rekindle_testing::root() {
        return;
    }
    let standin = Standin::new();
    let mut job = standin.start_wrapped(&["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"], &[]);
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", job.pid())).unwrap();
    let outer: i32 = children.trim().parse().unwrap();
    assert!(standin.path().join("1.ctl").exists(), "inside it is process 1");
    let process = Process::with_driver(outer, standin.driver()).unwrap();
    let tid = process.restore_thread_id().unwrap();
    assert!(std::path::Path::new(&format!("/proc/{outer}/task/{tid}")).exists());
    process.lock(10 * SECOND).unwrap();
    process.checkpoint().unwrap();
    job.assert_stands();
    process.restore(&[]).unwrap();
    process.unlock().unwrap();
    job.assert_counts();
}

/// CRIU and the root that it needs.
fn criu() -> Option<std::path::PathBuf> {
    if !rekindle_testing::root() {
        return None;
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let named = std::env::var_os("REKINDLE_CRIU").map(Into::into);
    let on_path = || std::env::split_paths(&path).map(|dir| dir.join("criu")).find(|file| file.is_file());
    rekindle_testing::needs("criu", named.or_else(on_path), "there is no CRIU")
}

/// A process that is not a child of this test.
struct KillOnDrop(String);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = Command::new("kill").args(["-9", &self.0]).status();
    }
}

/// The stand-in is worth something only if CRIU treats it as it treats the driver.
#[test]
fn criu_refuses_a_running_process_and_brings_back_a_checkpointed_one() {
    let Some(criu) = criu() else { return };
    let standin = Standin::new();
    let images = standin.path().join("images");
    std::fs::create_dir(&images).unwrap();
    let criu = |args: &[&str]| {
        let mut command = Command::new("timeout");
        command.args(["-s", "KILL", "60"]).arg(&criu).args(["--no-default-config", "-v4", "-o", "log", "-D"]);
        let output = command.arg(&images).args(args).output().unwrap();
        let log = std::fs::read_to_string(images.join("log")).unwrap_or_default();
        (output.status.success(), log)
    };
    let mut job = standin.start_wrapped(&["setsid"], &["--mib", "16"]);
    let pid = job.pid().to_string();
    let process = job.process(&standin.driver());

    let (dumped, log) = criu(&["dump", "--leave-running", "-t", &pid]);
    assert!(!dumped && log.contains("anon_inode:[userfaultfd]"), "{log}");
    job.assert_counts();

    process.lock(10 * SECOND).unwrap();
    process.checkpoint().unwrap();
    // What it does behind its last call would be done twice.
    let ticks = || rekindle_os::process::cpu_ticks(job.pid());
    let sleeps = || rekindle_os::process::state(job.pid()) == Some('S');
    wait_for("the job waits for CUDA", || {
        let before = ticks();
        let slept = sleeps();
        thread::sleep(Duration::from_millis(100));
        slept && sleeps() && ticks() == before
    });
    let (dumped, log) = criu(&["dump", "--leave-running", "-t", &pid]);
    assert!(dumped, "{log}");
    let at_dump = job.count();
    process.restore(&[]).unwrap();
    process.unlock().unwrap();
    job.assert_counts();
    job.kill();

    // The control file now says that the process was unlocked; its image knows better.
    let (restored, log) = criu(&["restore", "-d"]);
    assert!(restored, "{log}");
    // It is not our child any more.
    let _restored = KillOnDrop(pid);
    let process = Process::with_driver(job.pid(), standin.driver()).unwrap();
    assert_eq!(process.state().unwrap(), State::Checkpointed);
    let lines = || std::fs::read_to_string(standin.output()).unwrap().lines().count();
    let before = lines();
    process.restore(&[]).unwrap();
    process.unlock().unwrap();
    wait_for("the restored job counts", || lines() > before + 2);
    let text = std::fs::read_to_string(standin.output()).unwrap();
    let first = text.lines().nth(before).unwrap();
    assert_eq!(first, (at_dump + 1).to_string(), "it goes on where the dump was");
}

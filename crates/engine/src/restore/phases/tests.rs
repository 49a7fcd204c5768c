//! Each phase fails in a real world: what it and the phases before it made is gone afterwards.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Mutex;

use super::super::{ChangedFiles, Checks, Compare, Cuda, Own, Prepare, Unpacking};
use super::*;
use crate::launch::output::{self, Bounds};
use crate::launch::work::WorkFolder;
use crate::launch::{Privileges, reaper};
use crate::parts::gpu::placement::Wishes;
use crate::samples;
use rekindle_criu::image::LostLock;
use rekindle_criu::{Criu, Version};
use rekindle_cuda::copier::Copier;
use rekindle_os::ptrace::PosixLock;
use rekindle_os::spawn::Spawn;
use rekindle_store::Trust;
use rekindle_store::persist::Progress;
use rekindle_store::{Access, Image, Store};

/// What stands in for the phase `criu`.
type Run = fn(&mut Restore<'_>) -> Result<(), Error>;

/// A CRIU that restores one process: the root, with the first pid.
fn one_process(restore: &mut Restore<'_>) -> Result<(), Error> {
    process_of(restore, "60")
}

/// The same with a root that has ended when it is looked for.
fn one_dead_process(restore: &mut Restore<'_>) -> Result<(), Error> {
    process_of(restore, "0")?;
    while !restore.job()?.root.has_ended().unwrap() {
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn process_of(restore: &mut Restore<'_>, seconds: &str) -> Result<(), Error> {
    let Made::World(world) = std::mem::replace(&mut restore.made, Made::Nothing) else { panic!("there is no world") };
    (restore.request.prepare.0)(&world);
    let sleep = Spawn::new(Path::new("/bin/sleep"), [seconds]).unwrap();
    let root = sleep.world(world.entrance().unwrap()).start().unwrap();
    restore.made = Made::Job(Job::restored(world, root, world::FIRST_PID));
    Ok(())
}

/// A restore of this image up to its end; `prepared` is called when there is a world, before CRIU starts. Returns the parts that were timed, the pids of the inits, and the result.
fn play(
    change: impl FnOnce(&mut Manifest, &mut LostLocks, &mut PathBuf),
    criu: Option<Run>,
    prepared: fn(),
) -> (Vec<&'static str>, Vec<i32>, Result<Revived, Error>) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
    let folder = store.create_job(&"j".parse().unwrap()).unwrap();
    let mut reaper = reaper::unpack(dir.path()).unwrap();
    let (mut manifest, mut lost_locks) = (samples::manifest(), LostLocks::default());
    change(&mut manifest, &mut lost_locks, &mut reaper);
    let image = Image::unpacked(&crate::samples::beneath(dir.path()), manifest.clone(), &Trust::default());
    let false_criu = Criu::known("/bin/false".into(), Version(4, 2, 0));
    let inits = Mutex::new(Vec::new());
    let note = |world: &World| {
        inits.lock().unwrap().push(world.init().pid());
        prepared();
    };
    let request = Request {
        image: &image,
        folder: &folder,
        criu: &false_criu,
        own: Own { work: &WorkFolder::of_another_process(dir.path().to_owned()), reaper: &reaper },
        output: &output::Files::create(dir.path(), Bounds::default()).unwrap(),
        identity: None,
        privileges: Privileges::MayGrow,
        timeout: Duration::from_secs(5),
        network: Network::Host,
        checks: Checks { changed_files: ChangedFiles::Warn, compare: Compare::default() },
        wishes: &Wishes::default(),
        prepare: Prepare(&note),
        unpacking: Unpacking {
            staging: None,
            memory_reserve: 0,
            key: None,
            threads: 1,
            progress: &Progress::default(),
            healing: None,
        },
        cuda: Cuda { copier: &Copier::default(), keeps: true, hold: None },
    };
    let mut restore = Restore {
        request: &request,
        manifest: &manifest,
        relocation: None,
        lost_locks,
        later: Later::default(),
        cancelled: &|| false,
        made: Made::Nothing,
        open: Vec::new(),
        differences: Vec::new(),
        gpus: Gpus::Back,
        ahead: None,
        stopped: gpu::Stopped::default(),
    };
    let mut table = steps();
    if let Some(run) = criu {
        table[3].run = run;
    }
    let mut timings = Timings::default();
    let result = match steps::run(&table, &mut restore, &mut timings, &|| Ok(())) {
        Ok(()) => restore.revived(),
        Err(failed) => {
            let error = restore.failed(failed);
            assert!(matches!(restore.made, Made::Nothing), "something is left after {error}");
            Err(error)
        }
    };
    let parts = timings.0.iter().map(|(part, _)| *part).collect();
    (parts, inits.lock().unwrap().clone(), result)
}

fn exists(pid: i32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// A restore whose last part is the one that fails. Returns the error.
fn fails(parts: &[&str], change: impl FnOnce(&mut Manifest, &mut LostLocks, &mut PathBuf), criu: Option<Run>) -> Error {
    let (timed, inits, result) = play(change, criu, || ());
    assert_eq!(timed, parts);
    // When init is gone, so is everything in its namespaces.
    assert!(inits.iter().all(|pid| !exists(*pid)), "{inits:?}");
    assert_eq!(inits.len(), usize::from(parts.len() > 2));
    result.err().unwrap()
}

#[test]
fn each_phase_fails_and_nothing_is_left() {
    if !rekindle_testing::root() {
        return;
    }
    let error = fails(&["world"], |_, _, reaper| *reaper = "/nowhere/reaper".into(), Some(one_process));
    assert!(matches!(error, Error::World(_)), "{error}");

    let error = fails(&["world", "ports", "criu"], |_, _, _| (), None);
    assert!(matches!(error, Error::Criu(_)), "{error}");

    let not_open = |_: &mut Manifest, lost: &mut LostLocks, _: &mut PathBuf| {
        let (pid, lock) = (world::FIRST_PID, PosixLock { kind: 1, start: 0, length: 0 });
        lost.locks.push(LostLock { pid, fd: 99, path: "/tmp/file".into(), lock });
        lost.users.insert(pid);
    };
    let error = fails(&["world", "ports", "criu", "locks"], not_open, Some(one_process));
    assert!(matches!(error, Error::Lock(_)), "{error}");

    let other = |manifest: &mut Manifest, _: &mut LostLocks, _: &mut PathBuf| manifest.tree.cuda = vec![4242];
    let all = ["world", "ports", "criu", "locks", "cuda"];
    let error = fails(&all, other, Some(one_process));
    assert!(matches!(error, Error::Gpu(gpu::Error::NoProcess(4242))), "{error}");
}

#[test]
fn a_panic_while_criu_restores_leaves_no_world() {
    if !rekindle_testing::root() {
        return;
    }
    let (timed, inits, result) = play(|_, _, _| (), None, || std::panic::resume_unwind(Box::new("a fault of ours")));
    assert!(matches!(result.err(), Some(Error::Panicked(_))));
    assert_eq!((timed.last(), inits.len()), (Some(&"criu"), 1));
    let left: Vec<_> = inits.into_iter().filter(|pid| exists(*pid)).collect();
    // They would run for as long as this process.
    for pid in &left {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(*pid), nix::sys::signal::SIGKILL);
    }
    assert_eq!(left, [0; 0]);
}

#[test]
fn a_job_that_ends_before_its_gpus_are_back_was_restored() {
    if !rekindle_testing::root() {
        return;
    }
    let all = ["world", "ports", "criu", "locks", "cuda"];
    for (criu, cuda, gpus) in [(one_process as Run, vec![], Gpus::Back), (one_dead_process, vec![4242], Gpus::Gone)] {
        let (timed, inits, result) = play(|manifest, _, _| manifest.tree.cuda = cuda, Some(criu), || ());
        let revived = result.unwrap_or_else(|error| panic!("{error}"));
        assert_eq!((timed.as_slice(), revived.gpus), (&all[..], gpus));
        assert!(inits.iter().all(|pid| exists(*pid)), "{inits:?}");
        revived.job.end();
        assert!(inits.iter().all(|pid| !exists(*pid)), "{inits:?}");
    }
}

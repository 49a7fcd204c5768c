//! Landing files: the GPU's memory goes to a file of the staging area, and comes back from there or from the store.

use std::fs;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use rekindle_store::{Image, Place};

use crate::rig::Rig;

/// Device memory of the job. It has the same amount of host memory.
const MIB: u64 = 32;

fn rig() -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.job(&["--mib", &MIB.to_string()]);
    Some(rig)
}

/// Bytes of CRIU's pages.
fn pages(image: &Image) -> u64 {
    let parts = &image.manifest().unwrap().parts;
    parts.iter().filter(|part| part.path.starts_with("criu/pages-")).map(|part| part.size).sum()
}

fn assert_landed(image: &Image) {
    let manifest = image.manifest().unwrap();
    let [landing] = manifest.landing.as_slice() else { panic!("{:?}", manifest.landing) };
    assert_eq!((landing.pid, landing.part.as_str()), (1001, "gpu/1001"));
    assert!(landing.bytes >= MIB << 20, "{landing:?}");
    assert!(manifest.parts.iter().any(|part| part.path == landing.part && part.size == landing.bytes));
    assert!(pages(image) < (MIB + MIB / 2) << 20, "{} bytes of pages hold device memory too", pages(image));
}

/// No name is left by which a process would find a landing file.
fn assert_disarmed(rig: &Rig) {
    let names = rig.mounted().iter().flat_map(|area| fs::read_dir(area.join("landing")).unwrap()).count();
    assert_eq!(names, 0);
}

#[test]
fn gpu_memory_lands_and_comes_back_from_memory_and_from_the_store() {
    let Some(rig) = rig() else { return };
    let mut supervisor = rig.start();
    for _ in 0..3 {
        let image = supervisor.snapshot();
        assert!(image.is_staged());
        assert_landed(&image);
        assert_disarmed(&rig);
        supervisor.kill_job();
        let line = supervisor.said("the job was restored from image");
        assert!(line.contains(&image.id.to_string()), "{line}");
        supervisor.assert_unharmed(1);
        assert_disarmed(&rig);
    }
    for _ in 0..2 {
        let image = supervisor.snapshot();
        assert_landed(&image);
        supervisor.until("it is in the store", |rig| {
            rig.folder().images().unwrap().first().is_some_and(|it| it.id == image.id)
        });
        supervisor.kill();
        rig.assert_nothing_left();
        rig.forget_memory();
        let stored = rig.images().remove(0);
        assert!(stored.id == image.id && !stored.is_staged());
        assert_landed(&stored);
        supervisor = rig.run();
        supervisor.said(&format!("the job was restored from image {}", image.id));
        supervisor.assert_unharmed(1);
        assert_disarmed(&rig);
    }
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

/// The tmpfs may be gone when the job is restarted: the image says where its memory has to lie.
#[test]
fn gpu_memory_comes_back_where_no_tmpfs_is() {
    let Some(rig) = rig() else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    supervisor.until("it is in the store", |rig| rig.folder().images().unwrap().iter().any(|i| i.id == image.id));
    rig.forget_memory();
    supervisor.kill_job();
    supervisor.said(&format!("the job was restored from image {}", image.id));
    supervisor.assert_unharmed(1);
    let on_disk = supervisor.snapshot();
    assert!(on_disk.place != Place::Staged && on_disk.manifest().unwrap().landing.is_empty());
    supervisor.kill_job();
    supervisor.said(&format!("the job was restored from image {}", on_disk.id));
    supervisor.assert_unharmed(1);
    supervisor.stop();
    let memory = rig.path().join("memory");
    assert_eq!(fs::read_dir(&memory).unwrap().count(), 0, "nothing is left below {}", memory.display());
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    assert_landed(&supervisor.snapshot());
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn several_processes_land_each_in_a_file_of_its_own() {
    let Some(mut rig) = Rig::new() else { return };
    rig.ranks(2, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(2);
    for _ in 0..2 {
        let image = supervisor.snapshot();
        let mut cuda = image.manifest().unwrap().tree.cuda.clone();
        let mut landed: Vec<i32> = image.manifest().unwrap().landing.iter().map(|landing| landing.pid).collect();
        cuda.sort_unstable();
        landed.sort_unstable();
        assert_eq!(landed, cuda);
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(2);
    }
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn without_the_interposer_gpu_memory_is_in_the_pages() {
    let Some(mut rig) = rig() else { return };
    rig.set("SNAPSHOT_INTERPOSER", "off");
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    assert!(image.is_staged() && image.manifest().unwrap().landing.is_empty());
    assert!(pages(&image) > (2 * MIB) << 20, "{}", pages(&image));
    assert_eq!(interposers(&rig), Vec::<PathBuf>::new());
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

/// The copies of the interposer in the work folder of the run.
fn interposers(rig: &Rig) -> Vec<PathBuf> {
    let [work] = rig.work_folders().try_into().unwrap();
    let files = fs::read_dir(work.join("bin")).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "so")).collect()
}

#[test]
fn the_interposer_comes_back_with_the_image() {
    let Some(mut rig) = rig() else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    let [interposer] = interposers(&rig).try_into().unwrap();
    let content = fs::read(&interposer).unwrap();
    fs::remove_file(&interposer).unwrap();
    supervisor.kill_job();
    supervisor.said(&format!("the job was restored from image {}", image.id));
    supervisor.assert_unharmed(1);
    assert_eq!(fs::read(&interposer).unwrap(), content);
    // The next run would not have it, and its job does.
    supervisor.kill();
    rig.assert_nothing_left();
    drop(supervisor);
    rig.set("SNAPSHOT_INTERPOSER", "off");
    let mut supervisor = rig.run();
    supervisor.said(&format!("the job was restored from image {}", image.id));
    supervisor.assert_unharmed(1);
    assert_eq!(fs::read(&interposer).unwrap(), content);
    assert_landed(&supervisor.snapshot());
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn another_users_process_lands_in_a_file_that_it_may_open() {
    let Some(mut rig) = rig() else { return };
    rig.set("JOB_USER", "nobody");
    rig.set("JOB_PASS_ENVIRONMENT", "LD_* STANDIN_*");
    rig.for_another_user();
    let mut supervisor = rig.start();
    supervisor.ask();
    // Images in memory are mounted in that namespace: they are not visible here and disappear with it.
    supervisor.said("was stored in");
    let image = rig.images().remove(0);
    assert_landed(&image);
    supervisor.assert_unharmed(1);
    supervisor.kill();
    rig.assert_nothing_left();
    drop(supervisor);
    for _ in 0..2 {
        let mut supervisor = rig.run();
        supervisor.said(&format!("the job was restored from image {}", image.id));
        supervisor.assert_unharmed(1);
        supervisor.kill();
        rig.assert_nothing_left();
        rig.forget_memory();
    }
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.signal(Signal::SIGUSR2);
    supervisor.wait();
}

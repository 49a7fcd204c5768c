//! Images in memory: on their way to a store that is slow, full or broken, lost with their tmpfs, and taken up again.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::Signal;
use rekindle::published::Published;
use rekindle_store::{Change, Image, ImageId, Place};

use crate::kinds::{count_on, finish};
use crate::memory_group::MemoryGroup;
use crate::supervisor::{LIMIT, Lab, Running, assert_counts_up, comes, tail};

/// The ways to lose what is in memory, but for a restart of the machine.
const LOSSES: [fn(&Lab); 3] = [
    |lab| lab.mounted().iter().for_each(|point| umount2(point, MntFlags::MNT_DETACH).unwrap()),
    // All of it, the folders too.
    |lab| lab.mounted().iter().flat_map(entries).for_each(|path| remove(&path)),
    // What is in the slots.
    |lab| lab.mounted().iter().flat_map(|p| entries(&p.join("slots"))).for_each(|p| fs::remove_dir_all(p).unwrap()),
];

fn entries(folder: &PathBuf) -> Vec<PathBuf> {
    fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn remove(path: &Path) {
    if path.is_dir() { fs::remove_dir_all(path).unwrap() } else { fs::remove_file(path).unwrap() }
}

/// A job with a few MiB of memory.
fn start(lab: &Lab) -> Running {
    let mut run = lab.python("kinds.py", &["mixed", lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &["mixed", lab.path().to_str().unwrap()])
}

/// A job with 8 MiB in each image that no other image contains.
fn fresh(lab: &Lab) -> Running {
    let mut run = lab.python("kinds.py", &["fresh-8", lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run
}

/// Takes a snapshot, and waits until it is in memory. Answers it.
fn stage(lab: &Lab, run: &mut Running) -> ImageId {
    let newest = || lab.job().copies().unwrap().first().map(|image| image.id);
    let before = newest();
    run.signal(Signal::SIGUSR1);
    run.wait_for("the image is in memory", || {
        newest() > before && lab.published().unwrap().state.as_str() == "running"
    });
    newest().unwrap()
}

fn stored(lab: &Lab) -> Vec<ImageId> {
    lab.images().iter().filter(|image| image.is_good()).map(|image| image.id).collect()
}

fn assert_sound(lab: &Lab) {
    for image in lab.images() {
        assert!(image.verify().is_sound(), "{}: {:?}", image.id, image.verify());
    }
}

/// Slow enough that an image of [`fresh`] is on its way for nine seconds.
const SLOW: &str = "\"1MiB\"";

#[test]
fn the_tmpfs_is_lost_under_a_running_job() {
    for lose in LOSSES {
        let Some(lab) = Lab::new() else { return };
        let mut run = start(&lab);
        let first = run.snapshot(&lab);
        assert_eq!(lab.mounted().len(), 1);
        lose(&lab);
        count_on(&lab, &mut run, 5);
        let second = run.snapshot(&lab);
        assert!(second > first);
        count_on(&lab, &mut run, 5);
        run.crash(&lab);
        run.wait_said(&format!("the job was restored from image {second:06}"));
        count_on(&lab, &mut run, 5);
        run.signal(Signal::SIGTERM);
        let (_, said) = run.ends_with(143);
        assert!(!said.contains("cannot free memory of images"), "{said}");
        // The next supervisor makes it anew.
        let mut run = again(&lab);
        run.wait_said("continues from image");
        count_on(&lab, &mut run, 2);
        stage(&lab, &mut run);
        assert_eq!(lab.mounted().len(), 1);
        assert!(!lab.job().staged().is_empty(), "{}", tail(&run.err()));
        assert_sound(&lab);
        finish(&lab, run);
        assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    }
}

#[test]
fn the_tmpfs_is_lost_with_an_image_that_was_nowhere_else() {
    for lose in LOSSES {
        let Some(lab) = Lab::new() else { return };
        let mut run = fresh(&lab);
        let first = run.snapshot(&lab);
        run.kill_9();
        let lab = lab.set("store.persist-rate", SLOW);
        let mut run = lab.python("kinds.py", &["fresh-8", lab.path().to_str().unwrap()]);
        run.job_pid(&lab);
        count_on(&lab, &mut run, 5);
        let lost = stage(&lab, &mut run);
        lose(&lab);
        run.crash(&lab);
        run.wait_said(&format!("the job was restored from image {first:06}"));
        count_on(&lab, &mut run, 5);
        run.wait_said(&format!("image {lost} is lost, it was only in memory"));
        let failure = || lab.published().and_then(|now| now.persist_failure).unwrap_or_default();
        run.wait_for("the state says so", || failure().contains(&lost.to_string()));
        assert_sound(&lab);
        finish(&lab, run);
    }
}

#[test]
fn a_store_that_is_slower_than_the_interval_stretches_it() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.interval", "\"1s\"").set("store.persist-rate", "\"4MiB\"").set("store.keep-last", "50");
    // The first image may be under way when the job has counted.
    let began = Instant::now();
    let mut run = fresh(&lab);
    let mut most = 0;
    run.wait_for("two images had to wait", || {
        let entries = fs::read_dir(lab.store().join("j/images")).unwrap().flatten();
        let drafts = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(".tmp-")).count();
        most = most.max(drafts);
        stored(&lab).len() >= 3
    });
    assert_eq!(most, 1, "one at a time");
    let said = run.err();
    assert!(said.matches("a snapshot had to wait").count() == 1, "{said}");
    let took = began.elapsed();
    let added: Vec<u64> = lab.images().iter().filter_map(|i| Some(i.manifest()?.chunks.as_ref()?.stored)).collect();
    assert!(added.len() >= 3 && added.iter().all(|bytes| *bytes > 8 << 20), "{added:?}");
    let least = Duration::from_secs(added.iter().rev().take(3).sum::<u64>() / (4 << 20));
    assert!(took > least, "three of {added:?} bytes in {took:?}");
    let (taken, count) = (said.matches("the job was frozen for").count(), stored(&lab).len());
    assert!(taken <= count + 1, "{taken} were taken, {count} are stored: none was taken for nothing");
    assert_sound(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// No image of the store goes for the next one.
pub(crate) fn pin_all(lab: &Lab) {
    lab.images().iter().for_each(|image| drop(image.change_tags(Change::Pin).unwrap()));
}

/// Unmounted when dropped.
pub(crate) struct SmallStore(PathBuf);

impl SmallStore {
    pub(crate) fn mount(lab: &Lab, mib: u32) -> SmallStore {
        fs::create_dir(lab.store()).unwrap();
        let options = format!("size={mib}m,mode=700");
        mount(Some("none"), &lab.store(), Some("tmpfs"), MsFlags::empty(), Some(options.as_str())).unwrap();
        SmallStore(lab.store())
    }

    /// Leaves 1 MiB, or what an image that is just being written leaves of that: the job's output goes there too.
    fn fill(&self) {
        self.fill_up_to(1 << 20);
    }

    /// Leaves this many bytes.
    pub(crate) fn fill_up_to(&self, left: u64) {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(self.0.join("fill")).unwrap();
        loop {
            let bytes = self.free().saturating_sub(left).min(1 << 20);
            let written = file.write_all(&vec![0; usize::try_from(bytes).unwrap()]);
            if bytes == 0 || written.is_err_and(|error| error.kind() == io::ErrorKind::StorageFull) {
                return;
            }
        }
    }

    pub(crate) fn free(&self) -> u64 {
        let free = nix::sys::statvfs::statvfs(&self.0).unwrap();
        free.blocks_available() * free.fragment_size()
    }

    pub(crate) fn clear(&self) {
        fs::remove_file(self.0.join("fill")).unwrap();
    }
}

impl Drop for SmallStore {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn a_full_store_keeps_the_image_in_memory() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("store.persist-rate", "\"2MiB\"").set("store.compression", "\"none\"");
    let store = SmallStore::mount(&lab, 128);
    let mut run = fresh(&lab);
    let first = run.snapshot(&lab);
    count_on(&lab, &mut run, 5);
    let second = stage(&lab, &mut run);
    // Half of it is there.
    store.fill();
    let failed = |lab: &Lab| lab.published().and_then(|now| now.persist_failure);
    run.wait_said(&format!("image {second} is only in memory"));
    run.wait_for("the state says so", || failed(&lab).is_some());
    let why = failed(&lab).unwrap();
    assert!(why.contains(&second.to_string()) && why.contains("the image needs about"), "{why}");
    assert_eq!(lab.good(), [first]);
    run.crash(&lab);
    run.wait_said(&format!("the job was restored from image {second}"));
    count_on(&lab, &mut run, 5);
    // With room again the next one gets there.
    store.clear();
    let third = run.snapshot(&lab);
    run.wait_for("all is well", || failed(&lab).is_none());
    assert_eq!(lab.good()[0], third);
    // And a stop brings there what was not even begun, because no older one may go for it.
    pin_all(&lab);
    store.fill();
    let fourth = stage(&lab, &mut run);
    run.wait_said(&format!("image {fourth} is only in memory: the image needs about"));
    store.clear();
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert!(lab.good()[0] > fourth.sequence());
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    assert_sound(&lab);
    // Full to the end: the last one stays where it is, and the next run goes on from it.
    let mut run = fresh(&lab);
    run.job_pid(&lab);
    count_on(&lab, &mut run, 5);
    pin_all(&lab);
    store.fill();
    let stopped = lab.rekindle(&["stop", "j"]);
    assert_eq!(stopped.status.code(), Some(74), "{stopped:?}");
    assert!(String::from_utf8_lossy(&stopped.stdout).contains("is only in memory"), "{stopped:?}");
    let (_, said) = run.ends_with(74);
    let only = lab.job().copies().unwrap().first().cloned().unwrap();
    assert!(only.is_staged() && said.contains(&format!("its last image {} is only in memory, at", only.id)), "{said}");
    assert!(said.contains("the image needs about") && said.contains("Free space in"), "{said}");
    store.clear();
    let mut run = fresh(&lab);
    run.wait_said(&format!("continues from image {}", only.id));
    run.wait_said(&format!("image {} was stored in", only.id));
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
    assert_counts_up(&lab.output());
    drop(store);
}

#[test]
fn kill_9_before_the_image_is_in_the_store() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("store.persist-rate", SLOW);
    let mut run = fresh(&lab);
    let image = stage(&lab, &mut run);
    lab.kill_9(run);
    assert!(stored(&lab).is_empty());
    assert_eq!(lab.job().copies().unwrap().first().map(|copy| copy.id), Some(image));
    let lab = lab.set("store.persist-rate", "\"unlimited\"");
    let mut run = fresh(&lab);
    run.wait_said(&format!("continues from image {image}"));
    run.wait_said(&format!("the job was restored from image {image}"));
    run.wait_said(&format!("image {image} was stored in"));
    count_on(&lab, &mut run, 5);
    assert_eq!(stored(&lab), [image]);
    assert_sound(&lab);
    finish(&lab, run);
}

/// What the memory of supervisors that are gone is taken for.
fn left_in_memory(lab: &Lab) -> serde_json::Value {
    let status = lab.rekindle(&["status", "j", "--json"]);
    let row: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    row["left_in_memory"].clone()
}

#[test]
fn memory_that_a_dead_supervisor_left_is_found_and_given_back_where_nobody_needs_it() {
    let Some(lab) = Lab::new() else { return };
    let other = |lab: &Lab| lab.run_with(&["run", "--fresh", "--name", "k", "--"], ["true"]).ends_with(0).1;
    let mut run = fresh(&lab);
    run.snapshot(&lab);
    assert!(left_in_memory(&lab).is_null(), "it is in use");
    assert!(!other(&lab).contains("supervisor that is gone") && lab.mounted().len() == 1);
    lab.kill_9(run);
    let left = left_in_memory(&lab);
    assert!(left["bytes"].as_u64().unwrap() > 1 << 20 && left["needed"].is_null(), "{left}");
    let status = String::from_utf8(lab.rekindle(&["status"]).stdout).unwrap();
    assert!(status.contains("a dead supervisor left") && status.contains("`rekindle prune` frees it"), "{status}");
    let said = other(&lab);
    assert!(said.contains("job j: a dead supervisor left") && said.contains(": freed"), "{said}");
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    assert!(left_in_memory(&lab).is_null());
    // An image that is nowhere else stays.
    let lab = lab.set("store.persist-rate", SLOW).set("store.compression", "\"none\"");
    let mut run = fresh(&lab);
    let staged = stage(&lab, &mut run);
    lab.kill_9(run);
    assert_eq!(left_in_memory(&lab)["needed"], staged.to_string());
    let said = other(&lab);
    assert!(said.contains(&format!("and image {staged} is only there")) && said.contains("--discard-memory"), "{said}");
    assert_eq!(lab.mounted().len(), 1);
    let lab = lab.without("store.persist-rate");
    let mut run = fresh(&lab);
    run.wait_said(&format!("continues from image {staged}"));
    finish(&lab, run);
}

#[test]
fn a_stop_waits_for_the_store() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("store.persist-rate", "\"8MiB\"");
    let mut run = start(&lab);
    let staged = stage(&lab, &mut run);
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    let images = lab.images();
    assert!(images[0].id > staged && images[1].id == staged, "{said}");
    assert_eq!(format!("{:?}", images[0].manifest().unwrap().reason), "Final");
    assert!(images.iter().all(Image::is_good), "{said}");
    assert_sound(&lab);
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    finish(&lab, again(&lab));
}

#[test]
fn a_second_stop_does_not_wait_for_the_store() {
    let Some(lab) = Lab::new() else { return };
    // An image takes a minute and more.
    let lab = lab.set("store.persist-rate", "\"1MiB\"").set("store.compression", "\"none\"");
    let start = || lab.python("memory_job.py", &[lab.path().to_str().unwrap(), "64"]);
    let mut run = start();
    count_on(&lab, &mut run, 5);
    let staged = stage(&lab, &mut run);
    run.signal(Signal::SIGTERM);
    run.second_stop(Signal::SIGTERM);
    let (_, said) = run.ends_with(143);
    assert!(said.contains(&format!("image {staged} is only in memory, at")), "{said}");
    assert!(stored(&lab).is_empty());
    let mut run = start();
    run.wait_said(&format!("continues from image {staged}"));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

/// USR2 asks for the final image, however often it comes.
#[test]
fn a_second_request_to_be_queued_again_waits_for_the_store() {
    let Some(lab) = Lab::new() else { return };
    // An image takes some seconds.
    let lab = lab.set("store.persist-rate", "\"4MiB\"").set("store.compression", "\"none\"");
    let mut run = lab.python("memory_job.py", &[lab.path().to_str().unwrap(), "24"]);
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGUSR2);
    run.second_stop(Signal::SIGUSR2);
    let (_, said) = run.ends_with(75);
    assert!(!said.contains("is only in memory"), "{said}");
    assert_eq!(stored(&lab).len(), 1, "{said}");
    assert_sound(&lab);
}

#[test]
fn memory_has_room_for_one_image_only() {
    let Some(lab) = Lab::new() else { return };
    let Some(group) = MemoryGroup::gate(16 << 30) else { return };
    let lab = lab.within(group.path()).set("snapshot.memory-reserve", "\"1B\"");
    let command = |lab: &Lab| lab.python("kinds.py", &["large", lab.path().to_str().unwrap()]);
    let mut run = command(&lab);
    count_on(&lab, &mut run, 2);
    run.snapshot(&lab);
    let image = lab.images()[0].manifest().unwrap().bytes;
    lab.kill_9(run);
    lab.forget_memory();
    let mut run = command(&lab);
    run.job_pid(&lab);
    count_on(&lab, &mut run, 2);
    for _ in 0..2 {
        // The image that it was restored from, or the last one, is in memory. What the killed supervisor and its job had
        // may be given back seconds later.
        group.leave(image / 2);
        let before = lab.published().unwrap();
        run.signal(Signal::SIGUSR1);
        run.wait_for("the snapshot is over", || {
            let is_new = |now: &Published| now.last_image != before.last_image || now.last_failure.is_some();
            lab.published()
                .is_some_and(|now| now.state.as_str() == "running" && now.persisting.is_none() && is_new(&now))
        });
    }
    let third = lab.images()[0].id.sequence();
    // Each of the two took the place of the one before.
    run.wait_said_times("memory has room for one image only", 2);
    let said = run.err();
    assert_eq!(third, 3, "{}", tail(&said));
    assert!(lab.job().staged().len() <= 1, "{}", tail(&said));
    run.crash(&lab);
    run.wait_said(&format!("the job was restored from image {third:06}"));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

#[test]
fn nothing_is_left_of_a_job_that_ends() {
    let Some(lab) = Lab::new() else { return };
    // Its last image is still on its way.
    let lab = lab.set("store.persist-rate", SLOW);
    let mut run = fresh(&lab);
    stage(&lab, &mut run);
    assert_eq!(lab.mounted().len(), 1);
    let link = || fs::symlink_metadata(lab.store().join("j/staging"));
    assert!(link().is_err(), "the store does not say where it is");
    finish(&lab, run);
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    assert_eq!(entries(&lab.memory()), Vec::<PathBuf>::new());
    assert!(stored(&lab).is_empty(), "nobody goes on from it");
}

#[test]
fn without_memory_images_are_made_on_the_disk() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("snapshot.staging", "\"store\"");
    let mut run = start(&lab);
    run.snapshot(&lab);
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    assert!(lab.job().staged().is_empty(), "the slot is given back once the image is in the store");
    assert_eq!(fs::metadata(lab.store().join("j/slots")).unwrap().permissions().mode() & 0o777, 0o700);
    run.crash(&lab);
    run.wait_said("the job was restored from image 000001");
    count_on(&lab, &mut run, 5);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert_eq!(lab.good(), [2, 1]);
    assert!(!lab.store().join("j/slots").exists());
    assert_sound(&lab);
    let mut run = again(&lab);
    run.wait_said("continues from image 000002");
    count_on(&lab, &mut run, 5);
    lab.kill_9(run);
    finish(&lab, again(&lab));
    assert_counts_up(&lab.output());
}

/// A job whose newest image is in a slot on the disk, and whose supervisor was killed. Another may be in the store.
fn killed_before_it_was_stored(older: usize) -> Option<(Lab, ImageId)> {
    let lab = Lab::new()?.set("snapshot.staging", "\"store\"");
    if older > 0 {
        let mut run = fresh(&lab);
        for _ in 0..older {
            run.snapshot(&lab);
        }
        lab.kill_9(run);
    }
    let lab = lab.set("store.persist-rate", SLOW);
    let mut run = fresh(&lab);
    let image = stage(&lab, &mut run);
    lab.kill_9(run);
    assert_eq!(stored(&lab).len(), older);
    let staged = lab.job().staged();
    assert!(staged.len() == 1 && staged[0].id == image && staged[0].place == Place::Slot, "{staged:?}");
    assert!(staged[0].verify().is_sound());
    Some((lab.without("store.persist-rate"), image))
}

#[test]
fn kill_9_before_an_image_on_the_disk_is_in_the_store() {
    let Some((lab, image)) = killed_before_it_was_stored(0) else { return };
    let left = left_in_memory(&lab);
    assert_eq!((&left["needed"], &left["medium"]), (&image.to_string().into(), &"disk".into()), "{left}");
    let mut run = fresh(&lab);
    run.wait_said(&format!("the job was restored from image {image}"));
    run.wait_said(&format!("image {image} was stored in"));
    count_on(&lab, &mut run, 5);
    assert_eq!(stored(&lab), [image]);
    // Killed now, the job is restored from the packs.
    run.crash(&lab);
    count_on(&lab, &mut run, 5);
    assert_sound(&lab);
    finish(&lab, run);
    assert!(!lab.store().join("j/slots").exists());
    assert_counts_up(&lab.output());
}

/// It cannot be known what of it was written before the power went.
#[test]
fn an_image_on_the_disk_of_another_boot_is_not_restored() {
    let Some((lab, image)) = killed_before_it_was_stored(1) else { return };
    fs::write(lab.store().join("j/slots/boot"), "another").unwrap();
    assert!(lab.job().staged().is_empty());
    let mut run = fresh(&lab);
    run.wait_said("removed slots on the disk that were written before the machine was restarted");
    run.wait_said("the job was restored from image 000001");
    count_on(&lab, &mut run, 5);
    // What was begun of it in the store may be named when it is removed: `.tmp-IMAGE`.
    assert!(!run.err().contains(&format!("image {image}")), "{}", tail(&run.err()));
    assert_eq!(run.snapshot(&lab), 2);
    assert_sound(&lab);
    finish(&lab, run);
}

/// A slot on the disk may be read back wrongly. That is no image to go on from.
#[test]
fn damage_to_an_image_in_a_slot_on_the_disk_is_found() {
    let Some((lab, image)) = killed_before_it_was_stored(1) else { return };
    let slot = lab.job().staged().remove(0).dir;
    let pages =
        entries(&slot.path().join("criu")).into_iter().find(|path| path.to_str().unwrap().contains("pages-1.img"));
    let pages = pages.unwrap();
    let mut content = fs::read(&pages).unwrap();
    let middle = content.len() / 2;
    content[middle] ^= 1;
    fs::write(&pages, content).unwrap();
    let mut run = fresh(&lab);
    run.wait_said("the job was restored from image 000001");
    assert!(run.err().contains("wrong hash"), "{}", tail(&run.err()));
    count_on(&lab, &mut run, 5);
    assert!(!stored(&lab).contains(&image));
    finish(&lab, run);
}

/// What an earlier run left in memory is taken up, brought to the store and given back, though this one wants no
/// memory.
#[test]
fn memory_that_is_not_wanted_any_more_is_given_back() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("store.persist-rate", SLOW);
    let mut run = fresh(&lab);
    let image = stage(&lab, &mut run);
    lab.kill_9(run);
    let lab = lab.set("snapshot.staging", "\"store\"").set("store.persist-rate", "\"unlimited\"");
    let mut run = fresh(&lab);
    run.wait_said(&format!("the job was restored from image {image}"));
    run.wait_said(&format!("image {image} was stored in"));
    count_on(&lab, &mut run, 2);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    assert_eq!(lab.mounted(), Vec::<PathBuf>::new());
    finish(&lab, fresh(&lab));
}

/// What the job needs is worth more than images that it can do without.
#[test]
fn images_are_given_up_when_memory_gets_short() {
    // Not yet, whatever other tests use.
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.memory-reserve", "\"1B\"")) else { return };
    let command = |lab: &Lab| lab.python("kinds.py", &["large", lab.path().to_str().unwrap()]);
    let mut run = command(&lab);
    count_on(&lab, &mut run, 2);
    run.snapshot(&lab);
    let newest = run.snapshot(&lab);
    assert_eq!(lab.job().staged().len(), 2, "{}", tail(&run.err()));
    lab.kill_9(run);
    // More than the machine has: it is short from the beginning.
    let lab = lab.set("snapshot.memory-reserve", "\"1TiB\"");
    let mut run = command(&lab);
    run.wait_said(&format!("the job was restored from image {newest:06}"));
    run.wait_said("memory is short");
    assert!(comes(LIMIT, || lab.job().staged().is_empty()), "both are in the store\n{}", tail(&run.err()));
    assert!(lab.good().contains(&newest));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

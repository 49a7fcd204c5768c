//! Damage to what images share, found and repaired: from the second copy, while the job runs, and on a disk that fails.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rekindle_store::chunk::ChunkId;
use rekindle_store::pack::Location;
use rekindle_store::{Image, JobFolder};

use crate::damage::{again, two_images};
use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, Running, gate};

/// A killed job with three images that share most of their content.
fn three_images(lab: Lab) -> Lab {
    let mut run = until_after_snapshot(&lab, "fresh-2");
    for _ in 0..2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 2);
    }
    lab.kill_9(run);
    lab.forget_memory();
    assert_eq!(lab.good(), [3, 2, 1]);
    lab
}

/// A large chunk that all of these images have.
fn common(images: &[Image], job: &JobFolder) -> ChunkId {
    let index = job.packs().index().unwrap();
    let maps: Vec<_> = images.iter().map(|image| image.chunk_map().unwrap().unwrap()).collect();
    let is_in_all = |id: &ChunkId| maps.iter().all(|map| map.chunks().any(|(other, _)| other == *id));
    let ids = maps[0].chunks().map(|(id, _)| id).filter(is_in_all);
    ids.max_by_key(|id| index.get(id).map_or(0, |at| at.stored_len)).unwrap()
}

/// 16 bytes of what is stored there are others.
fn harm(job: &JobFolder, at: &Location) {
    let file = fs::File::options().write(true).open(job.packs().pack_path(at.pack)).unwrap();
    file.write_all_at(b"sixteen bad ones", at.offset + 64 + u64::from(at.stored_len) / 2).unwrap();
}

fn read_data(lab: &Lab) -> (Option<i32>, String) {
    let output = lab.rekindle(&["verify", "--read-data"]);
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn three_images_outlive_damage_to_one_copy_of_what_they_share() {
    let Some(lab) = Lab::new() else { return };
    let lab = three_images(lab.set("store.copies", "2"));
    let job = lab.job();
    let id = common(&lab.images(), &job);
    let packs: Vec<_> = job.packs().index().unwrap().all(&id).map(|at| at.pack).collect();
    assert!(packs.len() == 2 && packs[0] != packs[1], "{packs:?}");
    // The copy that a reader takes.
    let first = job.packs().index().unwrap().get(&id).unwrap();
    harm(&job, &first);
    let (code, said) = read_data(&lab);
    let name = first.pack.to_string();
    assert!(code == Some(1) && said.contains(&name), "{said}");
    assert!(said.contains("1 chunks damaged") && said.contains("another pack has 1 of them intact"), "{said}");
    assert!(!said.contains(&packs[1].to_string()) || packs[1] == first.pack, "{said}");

    let mut run = again(&lab);
    run.wait_said("the job was restored from image 000003");
    let told = format!("1 damaged chunk in {}", job.packs().pack_path(first.pack).display());
    run.wait_said(&told);
    let said = run.err();
    assert!(said.contains(&told) && said.contains("1 taken from another pack"), "{said}");
    assert_eq!(said.matches("damaged").count(), 2, "once, with what is wrong: {said}");
    let events = || fs::read_to_string(job.log_dir().join("events.jsonl")).unwrap_or_default();
    run.wait_for("the event", || events().contains("\"event\":\"store-damaged\""));
    let events = events();
    let told: Vec<&str> = events.lines().filter(|line| line.contains("\"event\":\"store-damaged\"")).collect();
    assert!(told.len() == 1 && told[0].contains("\"chunks\":1,\"replaced\":1"), "{told:?}");
    count_on(&lab, &mut run, 2);
    lab.kill_9(run);
    assert_eq!(lab.good(), [3, 2, 1]);
    assert_eq!(read_data(&lab).0, Some(0), "all packs are sound again");
    assert_eq!(job.packs().index().unwrap().all(&id).count(), 2, "and there are two copies");

    // The same by hand.
    harm(&job, &job.packs().index().unwrap().get(&id).unwrap());
    let output = lab.rekindle(&["repair", "j"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("taken from another pack"), "{said}");
    assert_eq!((read_data(&lab).0, lab.good()), (Some(0), vec![3, 2, 1]));
    assert_eq!(job.packs().index().unwrap().all(&id).count(), 2);
    finish(&lab, again(&lab));
}

/// A file on its own disk: a loop device returns EIO for reads behind the end of a backing file that was cut short.
struct FailingDisk {
    device: String,
    mount: PathBuf,
    back: PathBuf,
    length: u64,
    over: PathBuf,
    /// Where the blocks of the file are in it.
    blocks: Vec<u64>,
}

const BLOCK: u64 = 4096;

fn command(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

impl FailingDisk {
    /// Puts the file on it, in its place.
    fn with(lab: &Lab, file: &Path) -> FailingDisk {
        let (back, mount) = (lab.file("disk"), lab.file("mnt"));
        let length = 64 << 20;
        fs::File::create(&back).unwrap().set_len(length).unwrap();
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        command("mkfs.ext4", &["-q", "-b", "4096", "-O", "^has_journal", &text(&back)]);
        fs::create_dir(&mount).unwrap();
        let device = command("losetup", &["--find", "--show", &text(&back)]);
        // From here on it is taken apart, whatever fails.
        let over = file.to_owned();
        let mut disk =
            FailingDisk { device: device.clone(), mount: mount.clone(), back, length, over, blocks: Vec::new() };
        command("mount", &[&device, &text(&mount)]);
        // By another process: a child that another test forks meanwhile would hold our descriptor, and the mount be busy.
        command("cp", &[&text(file), &text(&mount.join("pack"))]);
        // Anew, so that nothing of it is in memory.
        command("umount", &[&text(&mount)]);
        // While it is mounted, debugfs may find a superblock that is being written.
        let blocks = command("debugfs", &["-R", "blocks /pack", &text(&disk.back)]);
        disk.blocks = blocks.split_whitespace().map(|block| block.parse().unwrap()).collect();
        assert!(!disk.blocks.is_empty() && disk.blocks.is_sorted(), "{:?}", disk.blocks);
        command("mount", &[&device, &text(&mount)]);
        command("mount", &["--bind", &text(&mount.join("pack")), &text(file)]);
        disk
    }

    /// Makes the file unreadable from that byte on.
    fn fails_from(&self, byte: u64) {
        let from = usize::try_from(byte.div_ceil(BLOCK)).unwrap();
        assert!(from < self.blocks.len(), "{from} of {}", self.blocks.len());
        self.ends_at(self.blocks[from] * BLOCK);
    }

    fn ends_at(&self, length: u64) {
        fs::File::options().write(true).open(&self.back).unwrap().set_len(length).unwrap();
        fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        let _ = fs::File::options().write(true).open(&self.back).and_then(|back| back.set_len(self.length));
        for path in [&self.over, &self.mount] {
            let _ = Command::new("umount").arg(path).status();
        }
        let _ = Command::new("losetup").args(["-d", &self.device]).status();
    }
}

fn has_tools() -> bool {
    let has = |tool: &&str| {
        Command::new(tool).arg("--version").output().is_ok() || Command::new(tool).arg("-V").output().is_ok()
    };
    let missing: Vec<_> = ["losetup", "mkfs.ext4", "debugfs"].into_iter().filter(|tool| !has(tool)).collect();
    gate() && rekindle_testing::require("disks", missing.is_empty(), &format!("{missing:?} are not there"))
}

/// The pack with what only the newest image has, and where in it such content begins.
fn of_newest(lab: &Lab) -> (PathBuf, u64) {
    let (job, images) = (lab.job(), lab.images());
    let older = images[1].chunk_map().unwrap().unwrap();
    let own = images[0].chunk_map().unwrap().unwrap();
    let index = job.packs().index().unwrap();
    let ids = own.chunks().map(|(id, _)| id).filter(|id| older.chunks().all(|(other, _)| other != *id));
    let at = ids.map(|id| index.get(&id).unwrap()).max_by_key(|at| at.stored_len).unwrap();
    (job.packs().pack_path(at.pack).path().to_owned(), at.offset)
}

fn back_from(lab: &Lab, image: &str) -> (Running, String) {
    let mut run = again(lab);
    run.wait_said(&format!("the job was restored from image {image}"));
    let said = run.err();
    (run, said)
}

#[test]
fn a_disk_that_fails_is_told_as_that_and_costs_no_image_its_good_name() {
    if !has_tools() {
        return;
    }
    let Some((lab, newest)) = two_images() else { return };
    let (pack, offset) = of_newest(&lab);
    let disk = FailingDisk::with(&lab, &pack);
    assert_eq!(read_data(&lab).0, Some(0));
    disk.fails_from(offset);

    let (code, said) = read_data(&lab);
    assert!(code == Some(1) && said.contains("unreadable") && said.contains("the disk is failing"), "{said}");
    assert!(said.contains("Input/output error") && !said.contains("damaged, the first"), "{said}");
    let output = lab.rekindle(&["repair", "j"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("Input/output error"), "{said}");
    assert!(said.contains("not known") && !said.contains("marked bad"), "{said}");
    assert_eq!(lab.good(), [2, 1]);

    // An older image is stored elsewhere, and is used.
    let (run, said) = back_from(&lab, "000001");
    assert!(said.contains("image 000002") && said.contains("Input/output error"), "{said}");
    assert!(said.contains("the disk is failing") && !said.contains("is damaged"), "{said}");
    lab.kill_9(run);
    assert_eq!(lab.good(), [2, 1], "{} is as good as it was: {said}", newest.id);

    // All of the pack, its begin too.
    disk.fails_from(0);
    let (run, said) = back_from(&lab, "000001");
    assert!(said.contains("Input/output error") && !said.contains("is damaged"), "{said}");
    lab.kill_9(run);
    assert_eq!(lab.good(), [2, 1], "{said}");

    // The disk is whole again.
    let whole = fs::read(lab.file("packs").join(pack.file_name().unwrap())).unwrap();
    drop(disk);
    fs::write(&pack, whole).unwrap();
    let (run, _) = back_from(&lab, "000002");
    lab.kill_9(run);
}

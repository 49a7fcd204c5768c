//! Images that are not what was written: found by `verify`, refused before CRIU sees them, passed over by a restart.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rekindle::store::persist::Progress;
use rekindle::store::{BadWhy, Image, Manifest, State};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, Running};

/// A killed job with two images, and a copy of the newer one's folder.
pub(crate) fn two_images() -> Option<(Lab, Image)> {
    let lab = Lab::new()?;
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    count_on(&lab, &mut run, 2);
    lab.kill_9(run);
    lab.forget_memory();
    let newest = lab.images().remove(0);
    copy(&newest.dir, &lab.file("copy"));
    Some((lab, newest))
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    let done = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(done.success());
}

pub(crate) fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()])
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).unwrap().flatten() {
        if entry.file_type().unwrap().is_dir() { all.extend(files(&entry.path())) } else { all.push(entry.path()) }
    }
    all.sort();
    all
}

#[derive(Debug, Clone, Copy)]
enum Harm {
    Flip,
    Cut,
    Delete,
    Grow,
}

fn harm(file: &Path, how: Harm) {
    let mut bytes = fs::read(file).unwrap();
    match how {
        Harm::Delete => return fs::remove_file(file).unwrap(),
        Harm::Flip if !bytes.is_empty() => {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 0x10;
        }
        Harm::Cut if !bytes.is_empty() => bytes.truncate(bytes.len() - 1),
        _ => bytes.push(b'x'),
    }
    fs::write(file, bytes).unwrap();
}

#[test]
fn damage_to_any_file_is_found() {
    let Some((lab, newest)) = two_images() else { return };
    let packs = lab.job().packs().dir().to_owned();
    copy(&packs, &lab.file("packs"));
    assert_eq!(lab.rekindle(&["verify", "j", "--read-data"]).status.code(), Some(0));
    let mut tried = 0;
    for (folder, copied) in [(&newest.dir, lab.file("copy")), (&packs, lab.file("packs"))] {
        for file in files(folder) {
            for how in [Harm::Flip, Harm::Cut, Harm::Delete, Harm::Grow] {
                harm(&file, how);
                let output = lab.rekindle(&["verify", "j", "--read-data"]);
                let said = String::from_utf8_lossy(&output.stdout).into_owned();
                assert_eq!(output.status.code(), Some(1), "{how:?} {}: {said}", file.display());
                let short = file.strip_prefix(folder).unwrap();
                // A pack is named for its index too.
                let name = short.file_stem().unwrap().to_str().unwrap();
                assert!(said.contains(name) || name == "manifest" && said.contains("damaged"), "{name}: {said}");
                fs::copy(copied.join(short), &file).unwrap();
                tried += 1;
            }
        }
    }
    assert!(tried >= 4 * (2 + 4), "{tried}");
    assert_eq!(lab.rekindle(&["verify", "--read-data"]).status.code(), Some(0), "all is well again");
}

#[test]
fn a_restart_passes_over_damage_to_any_file() {
    let Some((lab, newest)) = two_images() else { return };
    for (n, file) in files(&lab.file("copy")).iter().enumerate() {
        let short = file.strip_prefix(lab.file("copy")).unwrap();
        let how = [Harm::Flip, Harm::Cut, Harm::Delete][n % 3];
        harm(&newest.dir.join(short), how);
        let mut run = again(&lab);
        run.wait_said("the job is back from image 000001");
        lab.kill_9(run);
        let image = lab.images().remove(0);
        match &image.state {
            State::Bad { mark, .. } => assert_eq!(mark.why, BadWhy::Damaged, "{}", mark.detail),
            State::Damaged { .. } => assert_eq!(short, Path::new("manifest.json")),
            State::Good(_) => panic!("{} is not marked after {how:?}", short.display()),
        }
        copy(&lab.file("copy"), &lab.file("again"));
        fs::remove_dir_all(&newest.dir).unwrap();
        fs::rename(lab.file("again"), &newest.dir).unwrap();
    }
    let mut run = again(&lab);
    run.wait_said("the job is back from image 000002");
    // Its log was put back to image 1 meanwhile, so there is nothing to count.
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

/// What an image is whose parts are plain files.
fn make_loose(lab: &Lab, image: &Image) {
    rekindle::store::unpack::unpack(image, &lab.job(), &image.dir, None, 1, &Progress::default(), &|| false).unwrap();
    fs::remove_file(image.dir.join("chunks")).unwrap();
    rewrite(image, |manifest| {
        manifest.chunks = None;
        for part in &mut manifest.parts {
            part.blake3 = Some(blake3::hash(&fs::read(image.dir.join(&part.path)).unwrap()));
        }
    });
    assert!(lab.images().iter().all(|image| image.verify().is_sound()));
}

#[test]
fn a_page_file_cut_short_is_refused_at_once() {
    let Some((lab, newest)) = two_images() else { return };
    make_loose(&lab, &newest);
    let pages = files(&newest.dir).into_iter().find(|f| f.to_str().unwrap().contains("criu/pages-")).unwrap();
    let length = fs::metadata(&pages).unwrap().len();
    fs::OpenOptions::new().write(true).open(&pages).unwrap().set_len(length / 2).unwrap();
    // Even where the manifest agrees with the cut file, CRIU must not see it: it would wait for ever.
    let mut manifest = lab.images()[0].manifest().unwrap().clone();
    let name = pages.strip_prefix(&newest.dir).unwrap().to_str().unwrap();
    let part = manifest.parts.iter_mut().find(|part| part.path == name).unwrap();
    part.size = length / 2;
    part.blake3 = Some(blake3::hash(&fs::read(&pages).unwrap()));
    fs::write(newest.dir.join("manifest.json"), manifest.to_bytes().unwrap()).unwrap();
    assert!(lab.images()[0].verify().is_sound());
    let mut run = again(&lab);
    run.wait_said("its page map says");
    run.wait_said("the job is back from image 000001");
    assert!(!lab.processes().iter().any(|(_, line)| line.contains("swrk")), "{:?}", lab.processes());
    finish(&lab, run);
}

fn rewrite(image: &Image, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = image.manifest().unwrap().clone();
    change(&mut manifest);
    fs::write(image.dir.join("manifest.json"), manifest.to_bytes().unwrap()).unwrap();
}

#[test]
fn an_image_of_a_newer_criu_is_refused_by_name() {
    let Some((lab, newest)) = two_images() else { return };
    rewrite(&newest, |manifest| manifest.criu = "99.1".into());
    let (_, said) = again(&lab).ends_with(69);
    assert!(said.contains("CRIU: the image has 99.1.0") && said.contains("install CRIU 99.1.0 or newer"), "{said}");
    assert_eq!(lab.good(), [2, 1], "it is as good as it was");
}

#[test]
fn a_manifest_from_the_future_is_left_alone() {
    let Some((lab, newest)) = two_images() else { return };
    let file = newest.dir.join("manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replacen("\"version\": 2", "\"version\": 7", 1)).unwrap();
    let listed = lab.rekindle(&["list", "j"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("version 7"), "{listed:?}");
    let mut run = again(&lab);
    run.wait_said("the job is back from image 000001");
    for _ in 0..4 {
        run.snapshot(&lab);
    }
    assert!(newest.dir.is_dir(), "rotation does not touch what it can not read");
    finish(&lab, run);
}

#[test]
fn no_usable_image_and_no_beginning_wanted() {
    let Some((lab, newest)) = two_images().map(|(lab, it)| (lab.set("restart.cold-start", "\"never\""), it)) else {
        return;
    };
    for image in lab.images() {
        harm(&image.dir.join("manifest.json"), Harm::Flip);
    }
    let (out, said) = again(&lab).ends_with(2);
    assert!(out.is_empty() && said.contains("restart.cold-start") && said.contains("--fresh"), "{said}");
    assert!(newest.dir.is_dir());
    let lab = lab.set("restart.cold-start", "\"allow\"");
    fs::write(lab.file("finish"), "").unwrap();
    let (out, said) = again(&lab).ends_with(0);
    assert!(out.contains("n 1\n") && said.contains("no image of the interrupted run can be used"), "{said}");
}

#[test]
fn leftovers_are_swept_and_nothing_else() {
    let Some((lab, _)) = two_images() else { return };
    let images = lab.job().images_dir();
    fs::create_dir_all(images.join(".tmp-000009-20261120T132205Z/criu")).unwrap();
    fs::write(images.join(".tmp-000009-20261120T132205Z/criu/pages-1.img"), "x").unwrap();
    fs::create_dir(images.join(".del-000008-20261120T132205Z")).unwrap();
    fs::create_dir(images.join("notes")).unwrap();
    let mut run = again(&lab);
    run.wait_said("left by an interrupted run");
    run.wait_said("the job is back from image 000002");
    let left: Vec<String> =
        fs::read_dir(images).unwrap().flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    assert!(left.contains(&"notes".into()) && !left.iter().any(|name| name.starts_with('.')), "{left:?}");
    finish(&lab, run);
}

#[test]
fn a_store_that_others_can_write_is_refused() {
    let Some((lab, _)) = two_images() else { return };
    for folder in [lab.store(), lab.job().path().to_path_buf()] {
        let before = fs::metadata(&folder).unwrap().permissions();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let (code, _, said) = again(&lab).finish(crate::supervisor::LIMIT);
        assert!(code != 0 && said.contains("can be written by others") && said.contains("chmod"), "{code} {said}");
        fs::set_permissions(&folder, before).unwrap();
    }
    assert_eq!(lab.good(), [2, 1]);
}

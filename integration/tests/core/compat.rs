//! Images that do not fit this machine: refused with a list before anything is done, and not marked.

use std::fs;
use std::path::Path;

use rekindle_store::manifest::Gpu;
use rekindle_store::{Image, Manifest};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, Running};

/// A killed job with two images in the store.
fn two_images() -> Option<Lab> {
    let lab = Lab::new()?;
    let mut run = until_after_snapshot(&lab, "plain");
    run.snapshot(&lab);
    count_on(&lab, &mut run, 2);
    lab.kill_9(run);
    lab.forget_memory();
    Some(lab)
}

fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &["plain", lab.path().to_str().unwrap()])
}

fn rewrite(image: &Image, change: impl FnOnce(&mut Manifest)) {
    let mut manifest = image.manifest().unwrap().clone();
    change(&mut manifest);
    fs::write(image.dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
}

/// Refused with these words, by `run` and by `restore`; nothing was done, and `show` says the same.
fn is_refused(lab: &Lab, words: &str, command: impl Fn(&Lab) -> Running) -> String {
    let before = lab.output();
    let (out, said) = command(lab).ends_with(69);
    assert!(said.contains(words) && said.contains("--fresh"), "{words}: {said}");
    assert!(out.is_empty() && lab.output() == before, "no file was put back");
    lab.run_with(&["restore", "j"], [] as [&str; 0]).ends_with(69);
    assert_eq!(lab.good(), [2, 1], "they are as good as they were");
    let shown = lab.rekindle(&["show", "j/2"]);
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(shown.contains("cannot be restored on this machine") && shown.contains(words), "{shown}");
    said
}

#[test]
fn an_image_of_another_machine_is_refused_and_kept() {
    let Some(lab) = two_images() else { return };
    let [newest, older]: [Image; 2] = lab.images().try_into().unwrap();
    let shown = lab.rekindle(&["show", "j"]);
    assert!(String::from_utf8_lossy(&shown.stdout).contains("can be restored on this machine"), "{shown:?}");

    // Once without a list of files, as older versions wrote them.
    rewrite(&newest, |manifest| {
        manifest.mapped_files.clear();
        manifest.host.cpu_flags.push("avx9999".into());
    });
    let said = is_refused(&lab, "CPU features: the image has avx9999", again);
    assert!(said.contains(&format!("The older image {} fits", older.id)), "{said}");
    rewrite(&older, |manifest| manifest.host.cpu_flags.push("avx9999".into()));
    let said = is_refused(&lab, "CPU features: the image has avx9999", again);
    assert!(!said.contains("The older image"), "{said}");
    rewrite(&newest, |manifest| manifest.criu = "99.1".into());
    is_refused(&lab, "install CRIU 99.1.0 or newer", again);
    rewrite(&newest, |manifest| {
        manifest.tree.cuda = vec![manifest.tree.job];
        manifest.driver = Some("580.159.04".into());
        let uuid = "GPU-00112233-4455-6677-8899-aabbccddeeff".into();
        manifest.gpus = vec![Gpu { uuid, name: "NVIDIA H200".into() }];
    });
    let words = if Path::new("/proc/driver/nvidia/version").exists() { "GPUs: " } else { "NVIDIA driver: " };
    is_refused(&lab, &format!("{words}the image has "), again);

    rewrite(&newest, |manifest| manifest.host.kernel = "99.1.0".into());
    let mut run = again(&lab);
    run.wait_said("kernel: the image has 99.1.0");
    run.wait_said("the job was restored from image 000002");
    run.crash(&lab);
    run.wait_said_times("the job was restored from image", 2);
    assert_eq!(run.err().matches("kernel: the image has").count(), 1, "once: {}", run.err());
    finish(&lab, run);
}

#[test]
fn a_program_that_was_replaced_is_refused_until_it_is_back() {
    let Some(lab) = Lab::new() else { return };
    let shell = lab.file("shell");
    lab.install(Path::new("/bin/sh"), &shell);
    let finish = lab.file("finish");
    let text =
        format!("i=0; until [ -e {} ]; do i=$((i + 1)); echo n $i; sleep 0.02; done; echo done", finish.display());
    let command = |lab: &Lab| lab.run([shell.to_str().unwrap(), "-c", &text]);
    let mut run = command(&lab);
    run.wait_printed("n 5\n");
    run.snapshot(&lab);
    run.snapshot(&lab);
    lab.kill_9(run);
    lab.forget_memory();
    let manifest = lab.images()[0].manifest().unwrap().clone();
    let named = manifest.mapped_files.iter().find(|file| file.path == shell).unwrap();
    let whole = fs::read(&shell).unwrap();
    assert_eq!(named.size, u64::try_from(whole.len()).unwrap());
    assert!(manifest.mapped_files.iter().any(|file| file.path.to_str().unwrap().contains("libc")), "{manifest:?}");
    let put = |bytes: &[u8]| {
        fs::write(lab.file("other"), bytes).unwrap();
        lab.install(&lab.file("other"), &shell);
    };
    put(&[&whole[..], b"x"].concat());
    is_refused(&lab, &format!("file {}: the image has {} bytes", shell.display(), whole.len()), command);
    // The same size, and not the same program.
    if let Some(id) = &named.build_id {
        let bytes: Vec<u8> =
            (0..id.len() / 2).map(|at| u8::from_str_radix(&id[at * 2..at * 2 + 2], 16).unwrap()).collect();
        let at = whole.windows(bytes.len()).position(|window| window == bytes).unwrap();
        let mut other = whole.clone();
        other[at] ^= 1;
        put(&other);
        is_refused(&lab, &format!("the image has build {id}"), command);
    }
    put(&whole);
    let mut run = command(&lab);
    run.wait_said("the job was restored from image 000002");
    fs::write(&finish, "").unwrap();
    let (_, said) = run.ends_with(0);
    assert!(!said.contains("differs"), "{said}");
}

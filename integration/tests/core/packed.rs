//! Images in packs, from the snapshot to the restored job: compressed in each way, encrypted, unpacked to memory or to
//! the disk.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::sys::signal::Signal;
use rekindle_store::chunk::{Codec, Key};
use rekindle_store::persist::Progress;
use rekindle_store::{Form, Share, check_packs};

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, Running, kill};

fn again(lab: &Lab) -> Running {
    lab.python("kinds.py", &["fresh-2", lab.path().to_str().unwrap()])
}

/// An image that is in the packs only, of a job that was killed.
fn stored() -> Option<Lab> {
    stored_with(Lab::new()?)
}

fn stored_with(lab: Lab) -> Option<Lab> {
    let run = until_after_snapshot(&lab, "fresh-2");
    lab.kill_9(run);
    lab.forget_memory();
    let image = &lab.images()[0];
    assert_eq!(image.form(), Form::Packed);
    Some(lab)
}

/// Brings the job back, and lets it check itself.
fn comes_back(lab: &Lab) {
    let mut run = again(lab);
    run.wait_said("the job was restored from image 000001");
    count_on(lab, &mut run, 2);
    finish(lab, run);
}

/// How the chunks of all packs are stored.
fn codecs(lab: &Lab) -> Vec<Codec> {
    let packs = lab.job().packs();
    let all = packs.names().unwrap().into_iter().flat_map(|name| packs.pack_index(name).unwrap().entries().to_vec());
    all.map(|entry| entry.codec).collect()
}

#[test]
fn in_every_compression() {
    for (wanted, codec) in [("none", None), ("lz4", Some(Codec::Lz4)), ("zstd", Some(Codec::Zstd)), ("auto", None)] {
        let Some(lab) = Lab::new() else { return };
        let Some(lab) = stored_with(lab.set("store.compression", &format!("{wanted:?}"))) else { return };
        let found = codecs(&lab);
        // Random bytes stay as they are.
        assert!(found.contains(&Codec::Raw), "{wanted}: {found:?}");
        let others: Vec<Codec> = found.into_iter().filter(|codec| *codec != Codec::Raw).collect();
        match (wanted, codec) {
            ("none", _) => assert_eq!(others, []),
            (_, Some(codec)) => assert!(!others.is_empty() && others.iter().all(|it| *it == codec), "{others:?}"),
            _ => assert!(!others.is_empty(), "{wanted}"),
        }
        // What it is set to now does not matter for what is there.
        comes_back(&lab.set("store.compression", "\"none\""));
    }
}

/// What was unpacked to the disk.
fn unpacked(lab: &Lab) -> PathBuf {
    lab.job().path().join("unpacked")
}

#[test]
fn memory_has_no_room_to_unpack_it() {
    let Some(lab) = stored() else { return };
    let lab = lab.set("snapshot.memory-reserve", "\"1TiB\"");
    let mut run = again(&lab);
    run.wait_said("unpacking the image to disk");
    run.wait_said("the job was restored from image 000001");
    assert!(!unpacked(&lab).exists(), "it goes when the job has its memory");
    assert!(lab.job().staged().is_empty());
    count_on(&lab, &mut run, 2);
    // Again, and what a supervisor that was killed left there is in nobody's way.
    lab.kill_9(run);
    fs::create_dir_all(unpacked(&lab).join("criu")).unwrap();
    fs::write(unpacked(&lab).join("criu/core-1.img"), "left").unwrap();
    comes_back(&lab);
    assert!(!unpacked(&lab).exists());
}

/// A slot on the disk is given back when its image is packed, and a restart reads it at the same time.
#[test]
fn a_restart_from_what_is_just_being_packed() {
    // Over before the restart, in the middle of it, and not before it.
    for rate in ["\"unlimited\"", "\"20MiB\"", "\"1MiB\""] {
        let Some(lab) = Lab::new() else { return };
        let lab = lab.set("snapshot.staging", "\"store\"").set("store.persist-rate", rate);
        let mut run = again(&lab);
        count_on(&lab, &mut run, 5);
        for id in 1..=3 {
            run.signal(Signal::SIGUSR1);
            run.wait_for("the image is there", || {
                lab.job().copies().unwrap().first().is_some_and(|image| image.id.sequence() == id)
            });
            let pid = run.job_pid(&lab);
            kill(pid, Signal::SIGKILL);
            run.wait_said(&format!("the job was restored from image {id:06}"));
            count_on(&lab, &mut run, 2);
        }
        // And so does the next supervisor, which finds it.
        lab.kill_9(run);
        let mut run = again(&lab);
        run.wait_said("the job was restored from image 000003");
        run.wait_for("all are packed", || lab.good() == [3, 2, 1]);
        let report = lab.images()[0].verify_content(None, 2, &Progress::default(), &|| false).unwrap();
        assert!(report.is_sound(), "{report:?}");
        finish(&lab, run);
    }
}

/// A lab with a key file.
fn encrypted() -> Option<Lab> {
    let lab = Lab::new()?;
    key_file(&lab, "key", 7);
    Some(lab.set("store.compression", "\"none\"").set_file("store.encryption-key", "key"))
}

fn key_file(lab: &Lab, name: &str, byte: u8) {
    fs::write(lab.file(name), [byte; 32]).unwrap();
    fs::set_permissions(lab.file(name), fs::Permissions::from_mode(0o600)).unwrap();
}

/// Whether the packs hold these bytes as they are.
fn packs_show(lab: &Lab, bytes: &[u8]) -> bool {
    let entries = fs::read_dir(lab.job().packs().dir()).unwrap().flatten();
    entries.map(|entry| fs::read(entry.path()).unwrap()).any(|pack| pack.windows(bytes.len()).any(|part| part == bytes))
}

#[test]
fn encrypted_with_the_right_key_and_with_no_other() {
    // It is in the job's memory, as one of its arguments.
    let secret = |lab: &Lab| lab.path().to_str().unwrap().as_bytes().to_vec();
    let Some(plain) = Lab::new() else { return };
    let Some(plain) = stored_with(plain.set("store.compression", "\"none\"")) else { return };
    assert!(packs_show(&plain, &secret(&plain)), "who cannot see it there proves nothing");
    drop(plain);
    let Some(lab) = encrypted().and_then(stored_with) else { return };
    assert!(!packs_show(&lab, &secret(&lab)));
    let sound = |key: Option<&Key>| {
        check_packs(&lab.job(), key, Share::ALL, 2, &Progress::default(), &|| false).unwrap().is_sound()
    };
    assert!(sound(Some(&Key::read(&lab.file("key")).unwrap())) && !sound(None));
    let log = lab.output();

    // Another key, none, and a file that is not there: each is told, and nothing is wrong with the image.
    key_file(&lab, "other", 9);
    let lab = lab.set_file("store.encryption-key", "other");
    let (_, said) = again(&lab).ends_with(78);
    assert!(said.contains("is not the one") && said.contains("store.encryption-key"), "{said}");
    assert!(said.contains(lab.file("other").to_str().unwrap()) && !said.contains("damaged"), "{said}");
    let lab = lab.without("store.encryption-key");
    let (_, said) = again(&lab).ends_with(78);
    assert!(said.contains("was run with an encryption key") && said.contains("store.encryption-key"), "{said}");
    let lab = lab.set_file("store.encryption-key", "nowhere");
    let (_, said) = again(&lab).ends_with(78);
    assert!(said.contains("cannot read the key file") && said.contains("nowhere"), "{said}");
    assert_eq!(lab.good(), [1]);
    assert_eq!(lab.output(), log, "nothing of the job was touched");
    comes_back(&lab.set_file("store.encryption-key", "key"));
}

/// A store may hold images from before it was encrypted, and from before it was not any more.
#[test]
fn a_key_that_came_later() {
    let Some(lab) = stored() else { return };
    key_file(&lab, "key", 7);
    let lab = lab.set_file("store.encryption-key", "key");
    let (_, said) = again(&lab).ends_with(78);
    assert!(said.contains("rekindle run --accept-unsigned") && said.contains("image 000001"), "{said}");
    assert_eq!(lab.good(), [1], "it is not marked");
    let command = lab.python_command("kinds.py", &["fresh-2", lab.path().to_str().unwrap()]);
    let mut run = lab.run_with(&["run", "--accept-unsigned", "--name", "j", "--"], command);
    run.wait_said("the job was restored from image 000001");
    let second = run.snapshot(&lab);
    assert!(lab.job().packs().names().unwrap().len() >= 2);
    lab.kill_9(run);
    lab.forget_memory();
    let mut run = again(&lab);
    run.wait_said(&format!("the job was restored from image {second:06}"));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

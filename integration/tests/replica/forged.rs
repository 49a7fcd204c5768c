//! Someone who can write to the replica but does not have the key cannot run anything on a machine with the key.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::supervisor::{Lab, Running};

fn url(dir: &tempfile::TempDir) -> String {
    format!("\"file://{}\"", dir.path().display())
}

fn key_file(lab: &Lab, name: &str, digit: &str) {
    fs::write(lab.file(name), digit.repeat(64)).unwrap();
    fs::set_permissions(lab.file(name), fs::Permissions::from_mode(0o600)).unwrap();
}

/// A lab whose images are encrypted, with a replica; the notes of this machine are in the lab.
fn with_key(lab: Lab, replica: &tempfile::TempDir) -> Lab {
    key_file(&lab, "key", "7");
    lab.set("replica.url", &url(replica)).set_file("store.encryption-key", "key")
}

fn replicated(run: &mut Running, lab: &Lab) -> String {
    let number = run.snapshot(lab);
    let last = || lab.published().and_then(|published| published.last_replicated);
    run.wait_for("it is in the replica", || last().is_some_and(|image| image.sequence() == number));
    last().unwrap().to_string()
}

fn lose(lab: &Lab, run: Running) {
    lab.kill_9(run);
    lab.forget_memory();
    fs::rename(lab.store(), lab.file("lost")).unwrap();
}

/// Images of an encrypted job in a replica, the newest of them; its machine is lost with its store.
fn ground(replica: &tempfile::TempDir) -> Option<(Lab, Vec<String>, String)> {
    let lab = with_key(Lab::new()?, replica);
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("n 20\n");
    let image = replicated(&mut run, &lab);
    lose(&lab, run);
    Some((lab, command, image))
}

fn image_dir(base: &Path, id: &str) -> PathBuf {
    base.join("j/images").join(id)
}

/// A copy of the newest image with a higher number, whose manifest was changed and has the hash that it should have:
/// all that needs no key.
fn forge(base: &Path, id: &str, signature: Signature, change: impl FnOnce(&mut Value)) -> String {
    let forged = format!("000099{}", &id[6..]);
    let (from, to) = (image_dir(base, id), image_dir(base, &forged));
    fs::create_dir(&to).unwrap();
    fs::copy(from.join("chunks"), to.join("chunks")).unwrap();
    let mut envelope: Value = serde_json::from_slice(&fs::read(from.join("manifest.json")).unwrap()).unwrap();
    let mut body = envelope["manifest"].take();
    body["id"] = Value::String(forged.clone());
    change(&mut body);
    let body = serde_json::to_string(&body).unwrap();
    let signature = match (signature, envelope.get("signature")) {
        (Signature::Old, Some(old)) => format!("\"signature\": {old}, "),
        _ => String::new(),
    };
    let text = format!(
        "{{ \"format\": \"rekindle-image\", \"version\": 2, \"blake3\": \"{}\", {signature}\"manifest\": {body} }}",
        blake3::hash(body.as_bytes())
    );
    fs::write(to.join("manifest.json"), text).unwrap();
    forged
}

#[derive(Clone, Copy, Debug)]
enum Signature {
    None,
    Old,
}

/// A file outside of rekindle's folders, with a mode that makes it root's.
fn with_setuid_file(body: &mut Value, at: &Path) {
    let mut recreate = body["recreate"].as_array().unwrap().clone();
    let mut file = recreate[0].clone();
    file["path"] = Value::String(at.display().to_string());
    file["mode"] = Value::from(0o4755);
    recreate.push(file);
    body["recreate"] = Value::Array(recreate);
}

#[test]
fn an_added_image_with_a_higher_number_is_refused_and_not_run() {
    for signature in [Signature::None, Signature::Old] {
        let replica = tempfile::tempdir().unwrap();
        let Some((lab, command, image)) = ground(&replica) else { return };
        let evil = lab.file("evil");
        let forged = forge(replica.path(), &image, signature, |body| with_setuid_file(body, &evil));
        let (out, said) = match signature {
            // It could be from before there was a key: that is for a person to say.
            Signature::None => lab.run(&command).ends_with(78),
            // It is not what was signed: the newest that is, is taken.
            Signature::Old => {
                let mut run = lab.run(&command);
                run.wait_said(&format!("the job was restored from image {image}"));
                fs::write(lab.file("finish"), "").unwrap();
                run.ends_with(0)
            }
        };
        assert!(!evil.exists(), "{signature:?}: {said}");
        assert!(said.contains(&forged), "{said}");
        match signature {
            Signature::None => {
                assert!(out.is_empty() && said.contains("--accept-unsigned"), "{said}");
                assert!(lab.images().is_empty(), "nothing came");
            }
            Signature::Old => assert!(said.contains("does not match the key"), "{said}"),
        }
    }
}

#[test]
fn an_image_that_is_put_into_the_store_is_refused_and_not_run() {
    let replica = tempfile::tempdir().unwrap();
    let Some(lab) = Lab::new() else { return };
    let lab = with_key(lab, &replica).without("replica.url");
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("n 20\n");
    run.snapshot(&lab);
    lab.kill_9(run);
    lab.forget_memory();
    let image = lab.images()[0].id.to_string();
    let evil = lab.file("evil");
    let forged = forge(&lab.store(), &image, Signature::None, |body| with_setuid_file(body, &evil));
    for _ in 0..2 {
        let (out, said) = lab.run(&command).ends_with(78);
        assert!(out.is_empty() && said.contains(&forged) && said.contains("--accept-unsigned"), "{said}");
    }
    let (_, said) = lab.run_with(&["restore", "j"], Vec::<String>::new()).ends_with(78);
    assert!(said.contains(&forged), "{said}");
    let (_, said) = lab.run_with(&["restore", &format!("j/{forged}")], Vec::<String>::new()).ends_with(78);
    assert!(said.contains(&forged) && !evil.exists(), "{said}");
    let listed = lab.rekindle(&["list", "j"]);
    assert!(String::from_utf8_lossy(&listed.stdout).contains("has no signature"), "{listed:?}");
    assert!(image_dir(&lab.store(), &forged).is_dir() && !image_dir(&lab.store(), &forged).join("bad.json").exists());
    // Whoever is in charge removes it, and the job goes on.
    fs::remove_dir_all(image_dir(&lab.store(), &forged)).unwrap();
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {image}"));
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

/// All that is below a folder, with the time of each change.
fn state(folder: &Path) -> Vec<(PathBuf, std::time::SystemTime)> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        all.push((entry.path(), entry.metadata().unwrap().modified().unwrap()));
        all.extend(state(&entry.path()));
    }
    all.sort();
    all
}

#[test]
fn a_wrong_key_is_named_and_nothing_is_written() {
    let replica = tempfile::tempdir().unwrap();
    let Some((lab, command, image)) = ground(&replica) else { return };
    key_file(&lab, "wrong", "8");
    let lab = lab.set_file("store.encryption-key", "wrong");
    let before = state(replica.path());
    let recorded = fs::read_dir(lab.file("seen")).unwrap().count();
    let refused = |lab: &Lab, head: &[&str], command: &[String]| {
        let (out, said) = lab.run_with(head, command).ends_with(78);
        assert!(out.is_empty() && said.contains("another key"), "{said}");
        assert!(said.contains(lab.file("wrong").to_str().unwrap()), "{said}");
    };
    refused(&lab, &["run", "--name", "j", "--"], &command);
    refused(&lab, &["restore", "j"], &[]);
    // Of the other key there is a record.
    let records = || fs::read_dir(lab.file("seen")).into_iter().flatten().flatten().count();
    assert!(!lab.store().exists() && records() == recorded, "nothing was made");
    // The same with a store.
    fs::rename(lab.file("lost"), lab.store()).unwrap();
    let store = state(&lab.store());
    let (out, said) = lab.run(&command).ends_with(78);
    assert!(out.is_empty() && said.contains(lab.file("wrong").to_str().unwrap()), "{said}");
    assert_eq!((state(&lab.store()), state(replica.path())), (store, before), "nothing was written");
    let lab = lab.set_file("store.encryption-key", "key");
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {image}"));
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

#[test]
fn a_record_that_was_changed_is_not_believed() {
    let replica = tempfile::tempdir().unwrap();
    let Some((lab, command, image)) = ground(&replica) else { return };
    let path = replica.path().join("j/job.json");
    let text = fs::read_to_string(&path).unwrap();
    let record: Value = serde_json::from_str(&text).unwrap();
    let mut plain = record["record"].clone();
    plain["version"] = Value::from(1);
    plain["outcome"] = Value::from("completed");
    let changed = text.replace("\"running\"", "\"completed\"");
    assert_ne!(changed, text);
    for (forged, why) in [(changed, "does not match the key"), (plain.to_string(), "--accept-unsigned")] {
        fs::write(&path, forged).unwrap();
        let (out, said) = lab.run(&command).ends_with(78);
        assert!(out.is_empty() && said.contains("job.json") && said.contains(why), "{said}");
    }
    fs::write(&path, text).unwrap();
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {image}"));
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

#[test]
fn an_older_state_in_place_of_the_newest_is_told() {
    let replica = tempfile::tempdir().unwrap();
    let Some(lab) = Lab::new() else { return };
    let lab = with_key(lab, &replica);
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("n 20\n");
    let older = replicated(&mut run, &lab);
    let newest = replicated(&mut run, &lab);
    lose(&lab, run);
    fs::remove_dir_all(image_dir(replica.path(), &newest)).unwrap();
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {older}"));
    let said = run.err();
    assert!(said.contains("continues from an older state") && said.contains(&newest), "{said}");
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
    // A job that has come to its end is not missed.
    fs::remove_dir_all(lab.store()).unwrap();
    fs::remove_dir_all(replica.path().join("j")).unwrap();
    let (_, said) = lab.run(["true"]).ends_with(0);
    assert!(!said.contains("has seen"), "{said}");
}

#[test]
fn images_from_before_the_key_need_a_word_and_no_more() {
    let replica = tempfile::tempdir().unwrap();
    let Some(lab) = Lab::new() else { return };
    let lab = with_key(lab, &replica).without("store.encryption-key");
    let command = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("n 20\n");
    let image = replicated(&mut run, &lab);
    lab.kill_9(run);
    lab.forget_memory();
    let lab = lab.set_file("store.encryption-key", "key");
    let (out, said) = lab.run(&command).ends_with(78);
    assert!(out.is_empty() && said.contains("--accept-unsigned"), "{said}");
    // A machine that has nothing yet is asked the same.
    fs::rename(lab.store(), lab.file("kept")).unwrap();
    let (out, said) = lab.run(&command).ends_with(78);
    assert!(out.is_empty() && said.contains("--accept-unsigned") && !lab.store().exists(), "{said}");
    let mut run = lab.run_with(&["run", "--accept-unsigned", "--name", "j", "--"], &command);
    run.wait_said(&format!("the job was restored from image {image}"));
    let signed = replicated(&mut run, &lab);
    lab.kill_9(run);
    lab.forget_memory();
    // New images are signed, so the option is no longer needed.
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {signed}"));
    fs::write(lab.file("finish"), "").unwrap();
    run.ends_with(0);
}

/// Without a key, anyone who can write to the bucket decides what is executed. rekindle itself nevertheless stays
/// within its own folders when it handles an image.
#[test]
fn paths_of_a_manifest_lead_nowhere_else_without_a_key_too() {
    let replica = tempfile::tempdir().unwrap();
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("replica.url", &url(&replica));
    let command = lab.python_command("kinds.py", &["files", lab.path().to_str().unwrap()]);
    let mut run = lab.run(&command);
    run.wait_printed("n 20\n");
    let image = replicated(&mut run, &lab);
    lose(&lab, run);
    let pristine = lab.file("pristine");
    let copy = |from: &Path, to: &Path| {
        let done = std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap();
        assert!(done.success());
    };
    copy(replica.path(), &pristine);
    fs::write(lab.file("secret"), "root's alone").unwrap();
    let (evil, stolen) = (lab.file("evil"), lab.file("stolen"));
    type Change<'a> = Box<dyn Fn(&mut Value) + 'a>;
    let changes: [(&str, Change<'_>); 4] = [
        ("the mode and the path are not rekindle's", Box::new(|body| with_setuid_file(body, &evil))),
        (
            "a part that leads out",
            Box::new(|body| {
                let mut file = body["open_files"][0].clone();
                file["path"] = Value::String(stolen.display().to_string());
                file["mode"] = Value::from(0o100_644);
                file["part"] =
                    Value::String(format!("../../../../../../../../../../..{}", lab.file("secret").display()));
                body["open_files"].as_array_mut().unwrap().push(file);
            }),
        ),
        (
            "an absolute part",
            Box::new(|body| {
                let mut file = body["open_files"][0].clone();
                file["path"] = Value::String(stolen.display().to_string());
                file["mode"] = Value::from(0o100_644);
                file["part"] = Value::String(lab.file("secret").display().to_string());
                body["open_files"].as_array_mut().unwrap().push(file);
            }),
        ),
        (
            "a landing file",
            Box::new(|body| {
                let part = &body["recreate"][0]["part"];
                body["landing"] = serde_json::json!([{ "pid": 2, "path": evil, "part": part, "bytes": 1 }]);
            }),
        ),
    ];
    for (what, change) in changes {
        let forged = forge(replica.path(), &image, Signature::None, change);
        let run = lab.run(&command);
        let said = run.said_so_far();
        crate::supervisor::wait_for("it is decided", || {
            ["the job was restored", "the image would create"].iter().any(|word| said().contains(word))
        });
        assert!(!evil.exists() && !stolen.exists(), "{what}: {}", said());
        let why = if what.contains("part") { "is not a valid path inside an image" } else { "only" };
        assert!(said().contains(why), "{what}: {}", said());
        assert!(said().contains(&forged), "{what}: {}", said());
        lab.kill_9(run);
        lab.forget_memory();
        fs::remove_dir_all(lab.store()).unwrap();
        fs::remove_dir_all(replica.path().join("j")).unwrap();
        copy(&pristine.join("j"), replica.path());
    }
}

//! From draft to image, and finding it again.

use super::*;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;

#[test]
fn an_image_is_found_as_it_was_published() {
    let home = Home::new();
    let image = home.publish(0);
    assert_eq!(image.id.to_string(), "000001-20270115T080000Z");
    let found = home.folder.images().unwrap();
    assert_eq!(found, std::slice::from_ref(&image));
    let written = found[0].manifest().unwrap();
    let paths: Vec<_> = written.parts.iter().map(|part| (part.path.as_str(), part.size)).collect();
    assert_eq!(paths, [("criu/deep/core-1.img", 9), ("criu/pages-1.img", (2 << 20) + 5), ("empty", 0)]);
    assert_eq!(written.bytes, (2 << 20) + 14);
    assert_eq!(written.job, *home.folder.name());
    let handed_over = Manifest { id: image.id, job: written.job.clone(), ..manifest() };
    assert_eq!(Manifest { parts: Vec::new(), bytes: 0, ..written.clone() }, handed_over);
    let report = image.verify();
    assert!(report.is_sound(), "{report:?}");
    assert_eq!(report.parts.len(), 3);
}

#[test]
fn only_the_owner_can_enter() {
    let home = Home::new();
    let image = home.publish(0);
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    for path in [
        home.store.path(),
        home.folder.path(),
        home.folder.images_dir().path(),
        home.folder.log_dir().path(),
        image.dir.path(),
    ] {
        assert_eq!(mode(path), 0o700, "{}", path.display());
    }
    assert_eq!(mode(&home.folder.path().join("lock")), 0o600);
    assert_eq!(mode(image.dir.join("manifest.json").path()), 0o600);
}

#[test]
fn a_dropped_draft_leaves_nothing() {
    let home = Home::new();
    let draft = home.folder.begin_image(&home.lock, at(0)).unwrap();
    fill(draft.dir());
    drop(draft);
    assert!(snapshot(home.folder.images_dir().path()).is_empty());
}

/// As on NFS.
#[test]
fn a_copy_takes_the_place_of_a_damaged_one_where_names_cannot_be_exchanged() {
    let home = Home::new();
    let image = home.publish(0);
    fs::write(image.dir.join("damaged"), "").unwrap();
    let draft = home.folder.begin_image_as(&home.lock, image.id).unwrap();
    fs::write(draft.dir().join("intact"), "").unwrap();
    let replaced = draft.replace(|_, _| Err(std::io::ErrorKind::Unsupported.into())).unwrap();
    assert!(image.dir.join("intact").is_there() && !image.dir.join("damaged").is_there());
    assert!(replaced.join("damaged").is_there());
    drop(draft);
    assert!(image.dir.join("intact").is_there());
    // After a crash the next start removes it.
    assert_eq!(home.folder.sweep_leftovers(&home.lock).unwrap(), [replaced.path()]);
}

#[test]
fn a_clock_that_goes_back_does_not_change_the_order() {
    let home = Home::new();
    home.publish(100_000);
    let second = home.publish(0);
    assert_eq!(home.folder.find(LATEST).unwrap(), second);
    assert_eq!(home.folder.images().unwrap()[0], second);
}

#[test]
fn numbers_count_what_is_half_made_and_half_removed() {
    let home = Home::new();
    home.publish(0);
    fs::create_dir(home.image_path(".tmp-000007-20270115T080000Z")).unwrap();
    assert_eq!(home.folder.begin_image(&home.lock, at(0)).unwrap().id().sequence(), 8);
    fs::create_dir(home.image_path(".del-000010-20270115T080000Z")).unwrap();
    assert_eq!(home.folder.begin_image(&home.lock, at(0)).unwrap().id().sequence(), 11);
    fs::create_dir(home.image_path("4294967295-20270115T080000Z")).unwrap();
    assert_eq!(home.folder.begin_image(&home.lock, at(0)).unwrap().id().sequence(), 11, "no image of ours");
    home.folder.note_elsewhere("4294967295-20270115T080000Z".parse().unwrap());
    let error = home.folder.begin_image(&home.lock, at(0)).unwrap_err();
    assert!(matches!(error, Error::NumbersUsedUp(_)), "{error}");
}

#[test]
fn one_writer_and_any_reader() {
    let home = Home::new();
    home.publish(0);
    let other = home.store.job(home.folder.name()).unwrap();
    let error = other.lock().unwrap_err().to_string();
    let pid = std::process::id();
    assert!(
        error.starts_with(&format!("job \"train\" is running, and is supervised by pid {pid} on host ")),
        "{error}"
    );
    assert!(error.contains(" since 20"), "{error}");
    assert!(matches!(other.writer().unwrap(), Writer::Known(holder) if holder.pid == pid));
    assert_eq!(other.images().unwrap().len(), 1);
    let Home { dir: _dir, lock, .. } = home;
    drop(lock);
    // A child forked by another test has the lock until it calls exec.
    eventually(|| (other.writer().unwrap() == Writer::Nobody).then_some(()));
    other.lock().unwrap();
}

#[test]
fn the_lock_of_another_job_does_not_count() {
    let home = Home::new();
    let image = home.publish(0);
    let other = home.store.create_job(&name("other")).unwrap();
    let lock = other.lock().unwrap();
    assert!(matches!(home.folder.begin_image(&lock, at(0)), Err(Error::WrongLock(_))));
    assert!(matches!(home.folder.remove(&lock, &image.id), Err(Error::WrongLock(_))));
    assert!(matches!(home.folder.sweep_leftovers(&lock), Err(Error::WrongLock(_))));
    assert_eq!(home.ids().len(), 1);
}

#[test]
fn unknown_names_name_the_known_ones() {
    let home = Home::new();
    let error = home.store.job(&name("trian")).unwrap_err().to_string();
    assert!(error.contains("no job \"trian\"") && error.ends_with("jobs are train"), "{error}");
    let error = home.folder.find("7").unwrap_err().to_string();
    assert_eq!(error, "job \"train\" has no image \"7\"; there are no images");
    home.publish(0);
    let error = home.folder.find("7").unwrap_err().to_string();
    assert!(error.ends_with("images are 000001-20270115T080000Z"), "{error}");
}

#[test]
fn a_store_to_read_is_not_made() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("none");
    assert!(matches!(Store::open(&path, Access::Read), Err(Error::NoStore(_))));
    assert!(!path.exists());
}

#[test]
fn jobs_are_folders_with_the_name_of_one() {
    let home = Home::new();
    home.store.create_job(&name("another")).unwrap();
    fs::write(home.store.path().join("notes"), b"").unwrap();
    fs::create_dir(home.store.path().join(".hidden")).unwrap();
    assert_eq!(home.store.jobs().unwrap(), [name("another"), name("train")]);
    let error = home.store.create_job(&name("notes")).unwrap_err();
    assert!(rekindle_base::chain(&error).contains("notes is a regular file, and should be a folder"), "{error:?}");
}

#[test]
fn the_record_of_a_job() {
    let home = Home::new();
    assert_eq!(home.folder.record().unwrap(), None);
    let directory = PathBuf::from(std::ffi::OsString::from_vec(b"/a\xff".to_vec()));
    let mut record = JobRecord {
        command: vec!["a".to_owned()],
        directory: directory.into(),
        base: None,
        lineage: "first".to_owned(),
        created: at(0),
        outcome: Outcome::Running,
        exit_code: None,
        uptime: std::time::Duration::from_micros(7),
        failures: 3,
        restores: 0,
    };
    for outcome in
        [Outcome::Running, Outcome::Completed, Outcome::Failed { why: "no image".to_owned() }, Outcome::Stopped]
    {
        record.outcome = outcome;
        home.folder.write_record(&home.lock, &record).unwrap();
        assert_eq!(home.folder.record().unwrap().as_ref(), Some(&record));
    }
    let path = home.folder.path().join("job.json");
    let text = fs::read_to_string(&path).unwrap();
    // Written before failures were counted.
    let mut old: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&text).unwrap();
    assert!(old.remove("uptime_us").is_some() && old.remove("failures").is_some(), "{text}");
    fs::write(&path, serde_json::to_vec(&old).unwrap()).unwrap();
    let expected = JobRecord { uptime: std::time::Duration::ZERO, failures: 0, ..record.clone() };
    assert_eq!(home.folder.record().unwrap(), Some(expected));
    fs::write(&path, text.replace("\"version\": 1", "\"version\": 3")).unwrap();
    assert!(matches!(home.folder.record(), Err(Error::NewerRecord { version: 3, .. })));
    fs::write(&path, &text[..text.len() / 2]).unwrap();
    assert!(matches!(home.folder.record(), Err(Error::ParseRecord { .. })));
}

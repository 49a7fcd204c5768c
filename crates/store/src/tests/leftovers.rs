//! A power cut at every step: the state that the next start finds, built by hand, and its reaction.

use super::*;
use manifest::SavedLink;

/// Sweeps, and returns the names of what was removed.
fn sweep(home: &Home) -> Vec<String> {
    let removed = home.folder.sweep_leftovers(&home.lock).unwrap();
    let mut names: Vec<_> = removed.iter().map(|p| p.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// Creates the state of a draft after each step of publishing, up to the rename.
const STEPS: [fn(&Path, &Image); 5] = [
    |_, _| {},
    |dir, _| fs::write(dir.join("half"), b"x").unwrap(),
    |dir, _| fill(&crate::tests::beneath(dir)),
    |dir, _| {
        fill(&crate::tests::beneath(dir));
        fs::write(dir.join(".tmp-manifest.json-1-0"), b"{ \"form").unwrap();
    },
    |dir, image| {
        fill(&crate::tests::beneath(dir));
        fs::copy(image.dir.join("manifest.json"), dir.join("manifest.json")).unwrap();
    },
];

#[test]
fn a_crash_before_the_rename_leaves_no_image() {
    for step in STEPS {
        let home = Home::new();
        let image = home.publish(0);
        let before = snapshot(home.folder.images_dir().path());
        let draft = home.image_path(".tmp-000002-20270115T080000Z");
        fs::create_dir(&draft).unwrap();
        step(draft.path(), &image);
        assert_eq!(home.folder.images().unwrap(), [image]);
        assert_eq!(sweep(&home), [".tmp-000002-20270115T080000Z"]);
        assert_eq!(snapshot(home.folder.images_dir().path()), before);
        assert!(sweep(&home).is_empty());
    }
}

#[test]
fn a_crash_after_the_rename_leaves_an_image() {
    let home = Home::new();
    let draft = home.folder.begin_image(&home.lock, at(0)).unwrap();
    let id = draft.id();
    fill(draft.dir());
    let image = draft.publish_loose(manifest());
    // Undo the rename, then do the rename alone.
    let (tmp, whole) = (home.image_path(&format!(".tmp-{id}")), image.dir.clone());
    fs::rename(&whole, &tmp).unwrap();
    assert!(home.ids().is_empty());
    fs::rename(&tmp, &whole).unwrap();
    assert!(sweep(&home).is_empty());
    assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&image));
    assert!(image.verify().is_sound());
}

#[test]
fn a_crash_while_removing_is_gone_on_with() {
    // Renamed only; links and some files removed; everything but the folder removed.
    for cut in [&[][..], &["criu/pages-1.img"], &["criu/pages-1.img", "criu/deep/core-1.img", "empty", "manifest.json"]]
    {
        let home = Home::new();
        let doomed = home.publish(0);
        let kept = home.publish(1);
        fs::rename(&doomed.dir, home.image_path(&format!(".del-{}", doomed.id))).unwrap();
        for file in cut {
            fs::remove_file(home.image_path(&format!(".del-{}", doomed.id)).join(file)).unwrap();
        }
        assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&kept));
        assert_eq!(sweep(&home), [format!(".del-{}", doomed.id)]);
        assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&kept));
        assert!(kept.verify().is_sound());
    }
}

#[test]
fn nothing_else_is_swept() {
    let home = Home::new();
    let image = home.publish(0);
    let files = [
        home.image_path("notes.txt"),
        home.image_path(".tmp-mine"),
        home.image_path(".del-"),
        home.folder.log_dir().join(".tmp-output"),
        crate::tests::beneath(&home.folder.path().join("job.json")),
        crate::tests::beneath(&home.store.path().join(".tmp-foreign")),
    ];
    for path in &files {
        fs::write(path, b"x").unwrap();
    }
    for path in [
        home.image_path("lost+found"),
        crate::tests::beneath(&home.folder.path().join(".tmp-folder")),
        image.dir.join("criu/.tmp-"),
    ] {
        fs::create_dir(path).unwrap();
    }
    std::os::unix::fs::symlink("/", home.folder.path().join(".tmp-link")).unwrap();
    let before = snapshot(home.store.path());
    assert!(sweep(&home).is_empty());
    assert_eq!(snapshot(home.store.path()), before);
}

#[test]
fn half_written_files_are_swept() {
    let home = Home::new();
    let image = home.publish(0);
    let before = snapshot(home.store.path());
    fs::write(home.folder.path().join(".tmp-job.json-1-2"), b"{").unwrap();
    fs::write(home.folder.path().join(".tmp-init-1-3"), b"x").unwrap();
    fs::write(image.dir.join(".tmp-bad.json-1-4"), b"{").unwrap();
    assert!(image.verify().is_sound());
    assert_eq!(sweep(&home), [".tmp-bad.json-1-4", ".tmp-init-1-3", ".tmp-job.json-1-2"]);
    assert_eq!(snapshot(home.store.path()), before);
}

#[test]
fn a_symbolic_link_in_place_of_a_leftover_is_not_followed() {
    let home = Home::new();
    let outside = home.dir.path().join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("file"), b"x").unwrap();
    for name in [".tmp-000002-20270115T080000Z", ".del-000003-20270115T080000Z"] {
        std::os::unix::fs::symlink(&outside, home.image_path(name)).unwrap();
    }
    assert_eq!(sweep(&home).len(), 2);
    assert!(outside.join("file").exists());
}

/// Publishes an image with these links.
fn publish_with_links(home: &Home, saved: &[&Path]) -> Image {
    let draft = home.folder.begin_image(&home.lock, at(0)).unwrap();
    let link = |saved: &&Path| SavedLink {
        link: "/gone".into(),
        saved: saved.to_path_buf().into(),
        owner: None,
        names: Vec::new(),
    };
    draft.publish_loose(Manifest { saved_links: saved.iter().map(link).collect(), ..manifest() })
}

#[test]
fn saved_links_go_with_the_last_image_that_needs_them() {
    let home = Home::new();
    let own = home.dir.path().join(".rekindle-link-own");
    let shared = home.dir.path().join(".rekindle-link-shared");
    let users = home.dir.path().join("data.csv");
    for path in [&own, &shared, &users] {
        fs::write(path, b"x").unwrap();
    }
    let first = publish_with_links(&home, &[&own, &shared, &users]);
    let second = publish_with_links(&home, &[&shared]);
    home.folder.remove(&home.lock, &first.id).unwrap();
    assert!(!own.exists() && shared.exists() && users.exists());
    assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&second));
    // A crash during the removal: the sweep removes the link too.
    fs::rename(&second.dir, home.image_path(&format!(".del-{}", second.id))).unwrap();
    sweep(&home);
    assert!(!shared.exists() && users.exists());
}

/// A restore that was killed has left the name by which CRIU was to open the file.
#[test]
fn the_name_of_a_killed_restore_goes_with_its_image() {
    let home = Home::new();
    let [saved, open, old] =
        [".rekindle-link-a", ".rekindle-link-a.open", "link_remap.5"].map(|n| home.dir.path().join(n));
    for path in [&saved, &open, &old] {
        fs::write(path, b"x").unwrap();
    }
    let draft = home.folder.begin_image(&home.lock, at(0)).unwrap();
    let link = |link: &Path| SavedLink {
        link: link.to_path_buf().into(),
        saved: saved.clone().into(),
        owner: None,
        names: Vec::new(),
    };
    let image = draft.publish_loose(Manifest { saved_links: vec![link(&open), link(&old)], ..manifest() });
    home.folder.remove(&home.lock, &image.id).unwrap();
    assert!(!saved.exists() && !open.exists());
    assert!(old.exists(), "an image of an earlier version, and another job may use that name");
}

#[test]
fn saved_links_stay_while_an_image_may_need_them() {
    let home = Home::new();
    let link = home.dir.path().join(".rekindle-link-a");
    fs::write(&link, b"x").unwrap();
    let first = publish_with_links(&home, &[&link]);
    let second = publish_with_links(&home, &[]);
    fs::remove_file(second.dir.join("manifest.json")).unwrap();
    fs::create_dir(second.dir.join("manifest.json")).unwrap();
    home.folder.remove(&home.lock, &first.id).unwrap();
    assert!(link.exists());
}

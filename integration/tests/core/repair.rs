//! Damage below packed images: what `verify` finds, what `repair` makes of it, and from where the job then goes on.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::process::Output;

use rekindle_store::Image;
use serde_json::Value;

use crate::damage::{again, two_images};
use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::Lab;

fn text(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn json(lab: &Lab, args: &[&str]) -> Value {
    let (_, said, error) = text(&lab.rekindle(&[args, &["--json"]].concat()));
    serde_json::from_str(&said).unwrap_or_else(|_| panic!("{said}{error}"))
}

/// Flips a bit of content that only the newest image needs. Answers the name of the pack.
fn damage_newest(lab: &Lab) -> String {
    let chunks = |image: &Image| image.chunk_map().unwrap().unwrap().chunks().map(|(id, _)| id).collect::<HashSet<_>>();
    let images = lab.images();
    let older = chunks(&images[1]);
    let own = chunks(&images[0]).into_iter().find(|id| !older.contains(id)).unwrap();
    let packs = lab.job().packs();
    let place = packs.index().unwrap().get(&own).unwrap();
    let file = fs::File::options().read(true).write(true).open(packs.pack_path(place.pack)).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, place.offset + 64).unwrap();
    file.write_all_at(&[byte[0] ^ 4], place.offset + 64).unwrap();
    place.pack.to_string()
}

#[test]
fn damage_is_found_and_told_and_the_job_goes_on_from_the_older_image() {
    let Some((lab, _)) = two_images() else { return };
    assert_eq!(text(&lab.rekindle(&["verify", "--read-data"])).0, Some(0));
    assert_eq!(json(&lab, &["repair"])[0]["whole"], true);
    let pack = damage_newest(&lab);

    // A look at the structure does not read what is in packs, and says so.
    let (code, said, _) = text(&lab.rekindle(&["verify", "j"]));
    assert!(code == Some(0) && said.contains("--read-data checks their content"), "{said}");
    for args in [&["verify", "--read-data"][..], &["verify", "j", "--read-data-subset", "100%"]] {
        let (code, said, error) = text(&lab.rekindle(args));
        assert!(code == Some(1) && said.contains(&pack) && said.contains("1 chunks damaged"), "{said}");
        assert!(error.contains("rekindle repair"), "{error}");
        assert!(!said.contains('\x1b') && !error.contains('\x1b'), "no bar without a terminal");
    }
    let (code, said, _) = text(&lab.rekindle(&["verify", "j/2", "--read-data"]));
    assert!(code == Some(1) && said.contains("cannot be read, the first at byte"), "{said}");
    let (code, said, _) = text(&lab.rekindle(&["verify", "j/1", "--read-data"]));
    assert!(code == Some(0) && said.contains("every byte"), "{said}");
    let found = json(&lab, &["verify", "j", "--read-data"]);
    assert_eq!((&found["packs"][0]["sound"], &found["images"][0]["sound"]), (&false.into(), &true.into()), "{found:#}");
    for wrong in [&["verify", "j/2", "--read-data-subset", "5%"][..], &["verify", "j", "--read-data-subset", "200%"]] {
        assert_eq!(text(&lab.rekindle(wrong)).0, Some(2), "{wrong:?}");
    }

    let newest = lab.images()[0].id.to_string();
    let (code, said, _) = text(&lab.rekindle(&["repair", "--dry-run", "j"]));
    assert!(code == Some(1) && said.contains(&newest) && said.contains("would be marked bad"), "{said}");
    assert_eq!(lab.good(), [2, 1], "nothing was done");
    let (code, said, _) = text(&lab.rekindle(&["repair", "j"]));
    assert!(code == Some(1) && said.contains(&newest) && said.contains(&pack), "{said}");
    assert_eq!(lab.good(), [1]);
    let again_found = json(&lab, &["repair"]);
    assert_eq!(again_found[0]["packs"], Value::Array(vec![]), "there is nothing left to do: {again_found:#}");
    assert_eq!((&again_found[0]["images"][0]["image"], &again_found[0]["whole"]), (&newest.into(), &false.into()));
    // What is in no pack is seen by a look at the structure; the packs are as they should be.
    assert_eq!(text(&lab.rekindle(&["verify", "j/2"])).0, Some(1));
    assert_eq!(json(&lab, &["verify", "--read-data"])["packs"][0]["sound"], true);

    let mut run = again(&lab);
    run.wait_said("continues from image 000001");
    run.job_pid(&lab);
    let (code, _, said) = text(&lab.rekindle(&["repair", "j"]));
    assert!(code == Some(2) && said.contains("is supervised by") && said.contains("--dry-run"), "{said}");
    assert_eq!(text(&lab.rekindle(&["repair", "j", "--dry-run"])).0, Some(1));
    let third = run.snapshot(&lab);
    assert!(lab.images().iter().any(|image| image.id.sequence() == third && image.verify().is_sound()));
    count_on(&lab, &mut run, 2);
    finish(&lab, run);
}

#[test]
fn without_any_pack_the_job_begins_anew_where_it_may() {
    let Some((lab, _)) = two_images() else { return };
    let packs = lab.job().packs();
    for name in packs.names().unwrap() {
        fs::remove_file(packs.pack_path(name)).unwrap();
    }
    let (code, said, _) = text(&lab.rekindle(&["verify"]));
    assert!(code == Some(1) && said.contains("cannot be read"), "{said}");
    let (code, said, _) = text(&lab.rekindle(&["repair"]));
    assert!(
        code == Some(1) && said.matches("marked bad").count() == 2 && said.contains("its index was removed"),
        "{said}"
    );
    assert_eq!(lab.good(), [0; 0]);
    // The images are there, and may be mended elsewhere.
    again(&lab).ends_with(66);
    let lab = lab.set("restart.cold-start", "\"allow\"");
    let mut run = again(&lab);
    run.job_pid(&lab);
    assert!(!run.err().contains("continues from image"), "{}", run.err());
    run.snapshot(&lab);
    assert_eq!(lab.good(), [3]);
    run.kill_9();
}

#[test]
fn an_encrypted_store_wants_its_key() {
    let Some(lab) = Lab::new() else { return };
    let key = lab.file("key");
    fs::write(&key, [7; 32]).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let lab = lab.set_file("store.encryption-key", "key");
    let run = until_after_snapshot(&lab, "plain");
    lab.kill_9(run);
    for args in [&["verify", "--read-data"][..], &["verify", "j/1", "--read-data"], &["repair"]] {
        assert_eq!(text(&lab.rekindle(args)).0, Some(0), "{args:?}");
    }
    fs::write(lab.file("other"), [8; 32]).unwrap();
    fs::set_permissions(lab.file("other"), fs::Permissions::from_mode(0o600)).unwrap();
    let lab = lab.set_file("store.encryption-key", "other");
    for args in [&["verify", "--read-data"][..], &["verify", "j/1", "--read-data"], &["repair"]] {
        let (code, said, _) = text(&lab.rekindle(args));
        assert!(code == Some(1) && said.contains("another key"), "{args:?}: {said}");
    }
    // The structure is not encrypted, but signed.
    let (code, said, _) = text(&lab.rekindle(&["verify"]));
    assert!(code == Some(1) && said.contains("was signed with another key"), "{said}");
    let lab = lab.without("store.encryption-key");
    assert_eq!(text(&lab.rekindle(&["verify"])).0, Some(0), "without a key nothing is asked");
    assert_eq!(lab.good(), [1], "no image is marked for want of a key");
}

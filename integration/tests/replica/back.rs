//! There and back again.

use std::fs;

use rekindle_replica::{Error, Replica};
use rekindle_store::chunk::PlainPacks;
use rekindle_store::persist::Progress;
use rekindle_store::{BadMark, BadWhy, Change};

use crate::ground::{Machine, RECORD, chunks, folder_replica, id, newest_good, noise, s3_replica};
use crate::proxy::Proxy;
use crate::server::Server;

/// The whole way, with two images that share most.
fn there_and_back(replica: &Replica) {
    let here = Machine::new();
    let first = here.image(1, &chunks(0..6));
    let second = here.image(2, &chunks(1..8));
    assert_eq!(newest_good(replica, None), None);
    let sent = here.upload(replica, &first).unwrap();
    assert_eq!((sent.packs, sent.present), (1, 0));
    let sent = here.upload(replica, &second).unwrap();
    assert_eq!((sent.packs, sent.present), (1, 1), "the second sends what is new");
    let sent = here.upload(replica, &second).unwrap();
    assert_eq!((sent.packs, sent.bytes, sent.present), (0, 0, 2));

    let other = Machine::new();
    let found = newest_good(replica, None).unwrap();
    assert_eq!((found.id, found.manifest()), (id(2), second.manifest()));
    assert_eq!(newest_good(replica, Some(id(2))), None, "nothing is newer");
    let (image, bytes) = other.fetch(replica, id(1)).unwrap();
    assert_eq!(bytes, 6 * RECORD);
    assert_eq!((other.content(&image), image.manifest()), (chunks(0..6), first.manifest()));
    let (image, bytes) = other.fetch(replica, id(2)).unwrap();
    assert_eq!(bytes, 2 * RECORD, "only what is missing");
    assert_eq!(other.content(&image), chunks(1..8));
    let leftovers = fs::read_dir(other.folder.images_dir()).unwrap().count();
    assert_eq!(leftovers, 2, "no draft is left");
}

#[test]
fn a_folder() {
    let dir = tempfile::tempdir().unwrap();
    there_and_back(&folder_replica(dir.path()));
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(dir.path().join("train")).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o700, "images hold secrets of the job");
}

#[test]
fn an_s3_server() {
    let Some(server) = Server::start() else { return };
    there_and_back(&s3_replica(&Proxy::start(server.address)));
}

#[test]
fn encrypted_chunks_stay_encrypted_and_need_the_key() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new().with_key("a");
    let image = here.image(1, &[b"a plain text that is found where it is not encrypted".repeat(50)]);
    here.upload(&replica, &image).unwrap();
    for pack in fs::read_dir(dir.path().join("train/packs")).unwrap() {
        let bytes = fs::read(pack.unwrap().path()).unwrap();
        assert!(!bytes.windows(10).any(|window| window == b"plain text"));
    }
    let other = Machine::new().with_key("a");
    let (fetched, _) = other.fetch(&replica, id(1)).unwrap();
    assert_eq!(other.content(&fetched), here.content(&image));
    for wrong in [Machine::new(), Machine::new().with_key("b")] {
        let error = wrong.fetch(&replica, id(1)).unwrap_err();
        assert!(matches!(error, Error::Key { .. }), "{error}");
        assert_eq!((wrong.packs(), wrong.folder.images().unwrap().len()), (0, 0));
    }
}

#[test]
fn plain_packs_are_refused_where_there_is_a_key() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let image = here.image(1, &chunks(0..3));
    here.upload(&replica, &image).unwrap();
    let mut other = Machine::new().with_key("a");
    let error = other.fetch(&replica, id(1)).unwrap_err();
    assert!(matches!(error, Error::Key { .. }) && error.to_string().contains("--accept-unsigned"), "{error}");
    assert_eq!((other.packs(), other.folder.images().unwrap().len()), (0, 0));
    other.key = other.key.map(|key| key.with_plain_packs(PlainPacks::Accepted));
    let (image, _) = other.fetch(&replica, id(1)).unwrap();
    other.key = None;
    assert_eq!(other.content(&image), chunks(0..3));
}

#[test]
fn bad_newer_and_damaged_images_are_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let mut images: Vec<_> = (1..=4).map(|n| here.image(n, &chunks([n]))).collect();
    let mark = BadMark { why: BadWhy::DiesAgain, detail: "x".into(), when: chrono::Utc::now() };
    images[3].mark_bad(mark.clone()).unwrap();
    for image in &images {
        here.upload(&replica, image).unwrap();
    }
    let manifest = |n: u32| dir.path().join(format!("train/images/{}/manifest.json", id(n)));
    let text = fs::read_to_string(manifest(3)).unwrap();
    fs::write(manifest(3), text.replacen("\"version\": 2", "\"version\": 3", 1)).unwrap();
    let text = fs::read_to_string(manifest(2)).unwrap();
    fs::write(manifest(2), text.replacen("alice", "alicf", 1)).unwrap();

    let states: Vec<_> = replica.images(&|| false).unwrap().iter().map(|image| image.is_good()).collect();
    assert_eq!(states, [false, false, false, true], "newest first");
    assert_eq!(newest_good(&replica, None).unwrap().id, id(1));
    // A mark that is taken back here is taken back there.
    images[3].clear_bad().unwrap();
    replica.upload_marks(&images[3..], &|| false).unwrap();
    assert_eq!(newest_good(&replica, None).unwrap().id, id(4));
    images[3].mark_bad(mark).unwrap();
    replica.upload_marks(&images[3..], &|| false).unwrap();
    assert_eq!(newest_good(&replica, None).unwrap().id, id(1));
}

#[test]
fn damage_is_of_one_copy_and_the_other_takes_its_place() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let mut image = here.image(1, &chunks(0..3));
    here.upload(&replica, &image).unwrap();
    let mark = |why| BadMark { why, detail: "x".into(), when: chrono::Utc::now() };
    image.mark_bad(mark(BadWhy::Damaged)).unwrap();
    replica.upload_marks(std::slice::from_ref(&image), &|| false).unwrap();
    assert_eq!(newest_good(&replica, None).unwrap().id, id(1));

    image.change_tags(Change::Tag(vec!["best".parse().unwrap()])).unwrap();
    fs::write(image.dir.join("chunks"), "no map").unwrap();
    let (fetched, _) = here.fetch(&replica, id(1)).unwrap();
    assert!(fetched.is_good() && fetched.tags().has(&"best".parse().unwrap()), "{fetched:?}");
    assert_eq!(here.content(&fetched), chunks(0..3));
    assert_eq!(fs::read_dir(here.folder.images_dir()).unwrap().count(), 1, "the damaged copy is gone");
    // Nothing else is replaced.
    let mut image = fetched;
    image.mark_bad(mark(BadWhy::DiesAgain)).unwrap();
    assert!(matches!(here.fetch(&replica, id(1)), Err(Error::Write { .. })));
    assert_eq!(here.folder.images().unwrap(), [image]);
}

#[test]
fn an_interrupted_fetch_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let content: Vec<_> = (0..300).map(|seed| noise(seed, 256 << 10)).collect();
    let image = here.image(1, &content);
    here.upload(&replica, &image).unwrap();
    let other = Machine::new();
    let progress = Progress::default();
    let enough = || progress.bytes().0 > 68 << 20;
    let fetched = replica.fetch(id(1), &other.folder, &other.lock, None, &progress, &enough);
    assert!(matches!(fetched, Err(Error::Cancelled)), "{fetched:?}");
    assert!(other.folder.images().unwrap().is_empty(), "a part of an image is none");
    assert_eq!(other.packs(), 1, "what was closed stays, what was open goes");
    let (image, bytes) = other.fetch(&replica, id(1)).unwrap();
    assert!(bytes < 12 << 20, "{bytes} bytes came a second time");
    assert_eq!(other.content(&image), content);
}

#[test]
fn nothing_is_fetched_that_the_disk_has_no_room_for() {
    let dir = tempfile::tempdir().unwrap();
    let (here, other) = (Machine::new(), Machine::new());
    let image = here.image(1, &chunks(0..6));
    here.upload(&folder_replica(dir.path()), &image).unwrap();
    let error = other.fetch(&folder_replica(dir.path()).with_min_free(u64::MAX / 2), id(1)).unwrap_err();
    assert!(matches!(error, Error::NoRoom { need, .. } if need > 6 * RECORD), "{error:?}");
    assert!(error.to_string().contains("rekindle prune"), "{error}");
    assert_eq!((other.packs(), other.folder.images().unwrap().len()), (0, 0));
    other.fetch(&folder_replica(dir.path()), id(1)).unwrap();
}

#[test]
fn a_pack_that_is_about_to_go_is_kept_for_a_fetched_image() {
    let dir = tempfile::tempdir().unwrap();
    let replica = folder_replica(dir.path());
    let here = Machine::new();
    let image = here.image(1, &chunks(0..3));
    here.upload(&replica, &image).unwrap();
    let packs = here.folder.packs();
    let mark = packs.gone_path(packs.names().unwrap()[0]);
    fs::write(&mark, "{}").unwrap();
    here.folder.remove(&here.lock, &id(1)).unwrap();
    let (_, bytes) = here.fetch(&replica, id(1)).unwrap();
    assert_eq!((bytes, mark.is_there()), (0, false));
}

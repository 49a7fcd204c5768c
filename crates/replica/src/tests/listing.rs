//! A listing that lags behind: nothing is removed, skipped or sent again because of it.

use std::time::Duration;

use super::*;
use crate::Keep;
use rekindle_store::{BadMark, BadWhy};

const LONG_AGO: Duration = Duration::from_secs(2 * 3600);

fn retain(replica: &Replica, keep: u32, here: &Machine) -> Vec<u32> {
    let removed = replica.retain(Keep::Newest(keep), &here.folder, &|| false).unwrap();
    removed.images.iter().map(ImageId::sequence).collect()
}

/// The numbers of the good images, newest first.
fn good(replica: &Replica) -> Vec<u32> {
    let images = replica.images(&|| false).unwrap();
    images.iter().filter(|image| image.is_good()).map(|image| image.id.sequence()).collect()
}

#[test]
fn a_mark_counts_before_a_listing_shows_it() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    for number in 1..=2 {
        here.upload(&replica, &here.image(number, &[number])).unwrap();
    }
    store.freeze();
    let mark = BadMark { why: BadWhy::DiesAgain, detail: String::new(), when: DateTime::UNIX_EPOCH };
    store.put(&format!("images/{}/bad.json", id(2)), &serde_json::to_string(&mark).unwrap());
    assert_eq!(good(&replica), [1]);
    assert_eq!(retain(&replica, 1, &here), [0; 0], "it is the only good one");
    Machine::new().fetch(&replica, 1).unwrap();
}

#[test]
fn an_image_that_is_gone_is_none_although_a_listing_has_it() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    for number in 1..=3 {
        here.upload(&replica, &here.image(number, &[number])).unwrap();
    }
    store.freeze();
    for file in ["manifest.json", "chunks"] {
        store.remove(&format!("images/{}/{file}", id(3)));
    }
    let images = replica.images(&|| false).unwrap();
    assert_eq!(images.iter().map(|image| image.id.sequence()).collect::<Vec<_>>(), [2, 1]);
    assert_eq!(replica.newest(&|| false).unwrap().map(|image| image.id), Some(id(2)));
    let removed = replica.retain(Keep::Newest(1), &here.folder, &|| false).unwrap();
    assert_eq!((removed.images, removed.packs), (vec![id(1)], 0));
    let why = removed.blocked.unwrap();
    assert!(why.contains(&id(3).to_string()), "what it needs is not known: {why}");
}

#[test]
fn an_image_that_a_listing_does_not_show_yet_keeps_its_map() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    let images = [1, 2].map(|number| here.image(number, &[number]));
    // Its upload was interrupted before the manifest, some time ago.
    here.upload(&replica, &images[0]).unwrap();
    store.remove(&format!("images/{}/manifest.json", id(1)));
    store.age(LONG_AGO);
    here.upload(&replica, &images[1]).unwrap();
    store.freeze();
    here.upload(&replica, &images[0]).unwrap();
    retain(&over(&store), 9, &here);
    assert!(Machine::new().fetch(&replica, 1).unwrap().is_good());
    // One that has no manifest is removed.
    store.remove(&format!("images/{}/manifest.json", id(1)));
    retain(&replica, 9, &here);
    assert!(!store.names().contains(&format!("images/{}/chunks", id(1))));
}

#[test]
fn a_pack_stays_that_an_image_needs_which_a_listing_does_not_show_yet() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    here.upload(&replica, &here.image(1, &[1])).unwrap();
    here.upload(&replica, &here.image(2, &[2])).unwrap();
    store.age(LONG_AGO);
    here.upload(&replica, &here.image(3, &[3])).unwrap();
    store.freeze();
    // Its content is that of the first one again.
    here.upload(&replica, &here.image(4, &[1])).unwrap();
    let other = over(&store);
    assert!(retain(&other, 2, &here).contains(&1));
    assert!(Machine::new().fetch(&replica, 4).unwrap().is_good());
    // The mark that it got is removed when the listing shows the image, also long afterwards.
    let is_marked = || store.names().contains(&format!("packs/{}.gone", pack_of(&here, 1)));
    assert!(is_marked());
    store.thaw();
    store.age(LONG_AGO);
    here.upload(&replica, &here.image(5, &[5])).unwrap();
    retain(&other, 2, &here);
    assert!(Machine::new().fetch(&replica, 4).unwrap().is_good());
    assert!(!is_marked());
}

/// The name of the pack with this chunk.
fn pack_of(here: &Machine, seed: u32) -> String {
    let index = here.folder.packs().index().unwrap();
    index.get(&chunk_id(None, &noise(seed))).unwrap().pack.to_string()
}

#[test]
fn a_pack_goes_an_hour_after_it_was_found_unneeded() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    for number in 1..=2 {
        here.upload(&replica, &here.image(number, &[number])).unwrap();
    }
    let of_first = |end: &str| store.names().contains(&format!("packs/{}.{end}", pack_of(&here, 1)));
    let next = |number: u32| {
        here.upload(&replica, &here.image(number, &[number])).unwrap();
        replica.retain(Keep::Newest(2), &here.folder, &|| false).unwrap()
    };
    store.age(LONG_AGO);
    let removed = next(3);
    assert_eq!((removed.images, removed.packs, of_first("gone")), (vec![id(1)], 0, true));
    assert_eq!((next(4).packs, of_first("pack")), (0, true), "within the hour");
    store.age(LONG_AGO);
    assert_eq!((next(5).packs, of_first("pack"), of_first("idx"), of_first("gone")), (2, false, false, true));
    // The mark stays for another hour.
    next(6);
    assert!(of_first("gone"));
    store.age(LONG_AGO);
    next(7);
    assert!(!of_first("gone"));
}

/// Four images come, and the last one stays. The listing still shows the pack of the first one, which is removed.
fn removes_the_first_pack(store: &Lagging, here: &Machine, replica: &Replica) {
    for number in 1..=2 {
        here.upload(replica, &here.image(number, &[number])).unwrap();
    }
    store.age(LONG_AGO);
    here.upload(replica, &here.image(3, &[3])).unwrap();
    retain(replica, 1, here);
    store.age(LONG_AGO);
    here.upload(replica, &here.image(4, &[4])).unwrap();
    store.freeze();
    retain(replica, 1, here);
    assert!(!store.names().contains(&format!("packs/{}.pack", pack_of(here, 1))));
}

#[test]
fn what_a_listing_shows_of_a_removed_pack_is_not_relied_on() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    removes_the_first_pack(&store, &here, &replica);
    let sent = here.upload(&replica, &here.image(5, &[1, 4])).unwrap();
    assert_eq!((sent.packs, sent.present), (1, 1));
    assert!(Machine::new().fetch(&over(&thawed(&store)), 5).unwrap().is_good());
}

fn thawed(store: &Arc<Lagging>) -> Arc<Lagging> {
    store.thaw();
    Arc::clone(store)
}

#[test]
fn what_was_sent_is_not_sent_again_because_a_listing_does_not_show_it() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    store.freeze();
    let image = here.image(1, &[1]);
    let enough = || store.puts(".pack") > 3;
    let sent = replica.upload(&image, &here.folder, &Progress::default(), &enough).unwrap();
    assert_eq!((sent.packs, store.puts(".pack")), (1, 1));
    assert_eq!(here.upload(&replica, &image).unwrap().packs, 0);
}

#[test]
fn the_image_that_was_sent_last_is_known_before_a_listing_shows_it() {
    let (store, here) = (Arc::new(Lagging::default()), Machine::new());
    let replica = over(&store);
    here.upload(&replica, &here.image(1, &[1])).unwrap();
    store.freeze();
    here.upload(&replica, &here.image(2, &[2])).unwrap();
    // The numbers of the next images follow it.
    assert_eq!(
        (good(&over(&store)), replica.newest(&|| false).unwrap().map(|image| image.id)),
        (vec![2, 1], Some(id(2)))
    );
    let removed = replica.retain(Keep::Newest(9), &here.folder, &|| false).unwrap();
    assert_eq!(removed.highest, Some(id(2)));
    // It is only a hint.
    store.put("newest.json", "x");
    assert_eq!(good(&replica), [1]);
    store.put("newest.json", &format!("{{\"image\":\"{}\"}}", id(7)));
    assert_eq!(good(&replica), [1]);
}

#[test]
fn a_fetch_does_not_look_for_content_in_a_removed_pack_that_a_listing_shows() {
    let (store, here, other) = (Arc::new(Lagging::default()), Machine::new(), Machine::new());
    let replica = over(&store);
    // The same chunk is in two packs. The newer one, which is looked at first, is not needed by any image.
    other.upload(&replica, &other.image(6, &[1, 8])).unwrap();
    store.age(LONG_AGO);
    removes_the_first_pack(&store, &here, &replica);
    assert!(Machine::new().fetch(&replica, 6).unwrap().is_good());
}

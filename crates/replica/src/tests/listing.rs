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

//! Pins and tags on real files, and what a removal does about them.

use super::options::Copies;
use super::*;
use retention::Policy;
use retention::survey::{self, Limits, Survey, Written};
use std::os::unix::fs::{PermissionsExt, symlink};

fn tag(text: &str) -> Tag {
    text.parse().unwrap()
}

fn tags(texts: &[&str]) -> Change {
    Change::Tag(texts.iter().map(|text| tag(text)).collect())
}

#[test]
fn they_are_found_again_and_are_no_part_of_the_image() {
    let home = Home::new();
    let image = home.publish(0);
    assert_eq!(image.tags(), Tags::default());
    image.change_tags(tags(&["best", "epoch-3"])).unwrap();
    let said = image.change_tags(Change::Pin).unwrap();
    assert_eq!((image.tags(), said.to_string().as_str()), (said.clone(), "pinned, best, epoch-3"));
    let path = image.dir.join("tags.json");
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    fs::write(image.dir.join(".tmp-tags.json-1-1"), b"{").unwrap();
    assert!(image.verify().is_sound(), "neither the file nor what a crash leaves of it is an extra one");
    assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&image));
    home.folder.sweep_leftovers(&home.lock).unwrap();
    assert!(path.is_there() && !image.dir.join(".tmp-tags.json-1-1").is_there());
    image.change_tags(Change::Untag(vec![tag("best")])).unwrap();
    image.change_tags(Change::Unpin).unwrap();
    assert_eq!(image.tags().to_string(), "epoch-3");
}

#[test]
fn an_image_is_found_by_its_tag() {
    let home = Home::new();
    let images: Vec<Image> = (0..3).map(|seconds| home.publish(seconds)).collect();
    images[0].change_tags(tags(&["best", "both"])).unwrap();
    images[1].change_tags(tags(&["both"])).unwrap();
    assert_eq!(home.folder.find("best").unwrap().id, images[0].id);
    assert!(matches!(home.folder.find("both"), Err(Error::AmbiguousImage { matching, .. }) if matching.len() == 2));
    assert!(matches!(home.folder.find("other"), Err(Error::UnknownImage { .. })));
}

#[test]
fn what_can_not_be_read_is_a_pin() {
    let obstacles: [fn(&Path); 6] = [
        |path| fs::write(path, b"").unwrap(),
        |path| fs::write(path, b"{\"version\":1,\"pinned\":false}").unwrap(),
        |path| fs::write(path, b"{\"version\":2,\"pinned\":false,\"tags\":[]}").unwrap(),
        |path| {
            fs::write(path, format!("{{\"version\":1,\"pinned\":false,\"tags\":[]{}}}", " ".repeat(1 << 17))).unwrap()
        },
        |path| fs::create_dir(path).unwrap(),
        |path| symlink("bad.json", path).unwrap(),
    ];
    for (at, obstacle) in obstacles.into_iter().enumerate() {
        let home = Home::new();
        let old = home.publish(0);
        home.publish(1);
        obstacle(old.dir.join("tags.json").path());
        assert!(old.tags().is_pinned() && old.tags().unreadable().is_some(), "{at}");
        let error = old.change_tags(Change::Unpin).unwrap_err();
        assert!(error.to_string().contains("remove the file"), "{error}");
        let (plan, gone) = survey::rotate(&home.folder, &home.lock, &Policy::default(), 0).unwrap();
        assert!(gone.is_empty());
        let reason = plan.decisions[1].verdict.to_string();
        assert_eq!(reason, "tags.json cannot be read, so it counts as pinned");
    }
}

#[test]
fn an_image_has_only_so_many() {
    let home = Home::new();
    let image = home.publish(0);
    let many = |n| Change::Tag((0..n).map(|n| tag(&format!("t{n}-{}", "x".repeat(56)))).collect());
    assert_eq!(image.change_tags(many(Tags::MOST)).unwrap().iter().count(), Tags::MOST);
    let before = snapshot(image.dir.path());
    assert!(matches!(image.change_tags(tags(&["one-more"])), Err(Error::TooManyTags(_))));
    assert_eq!(snapshot(image.dir.path()), before);
    assert_eq!(image.tags().iter().count(), Tags::MOST, "so many are read again");
}

#[test]
fn nobody_removes_a_pinned_image() {
    let home = Home::new();
    let images: Vec<Image> = (0..3).map(|seconds| home.publish(seconds)).collect();
    images[0].change_tags(Change::Pin).unwrap();
    assert!(matches!(home.folder.remove(&home.lock, &images[0].id), Err(Error::Pinned(_))));
    let (_, gone) = survey::rotate(&home.folder, &home.lock, &Policy::default(), 0).unwrap();
    assert_eq!(gone, [images[1].id]);
    assert_eq!(home.ids(), [images[2].id.to_string(), images[0].id.to_string()]);
    images[0].change_tags(Change::Unpin).unwrap();
    let (_, gone) = survey::rotate(&home.folder, &home.lock, &Policy::default(), 0).unwrap();
    assert_eq!(gone, [images[0].id]);
}

#[test]
fn a_removal_that_was_interrupted_before_it_saw_the_pin_is_taken_back() {
    let home = Home::new();
    let (pinned, other) = (home.publish(0), home.publish(1));
    pinned.change_tags(Change::Pin).unwrap();
    let before = snapshot(home.folder.images_dir().path());
    for image in [&pinned, &other] {
        let deleted = home.image_path(&format!(".del-{}", image.id));
        fs::rename(&image.dir, deleted).unwrap();
    }
    // From here on nobody can tag or pin it.
    assert!(matches!(pinned.change_tags(Change::Unpin), Err(Error::RemovedMeanwhile(_))));
    let swept = home.folder.sweep_leftovers(&home.lock).unwrap();
    assert_eq!(swept, [home.image_path(&format!(".del-{}", other.id)).path()]);
    assert_eq!(home.ids(), [pinned.id.to_string()]);
    assert!(pinned.verify().is_sound());
    let kept = |all: BTreeMap<PathBuf, Vec<u8>>| -> BTreeMap<PathBuf, Vec<u8>> {
        all.into_iter().filter(|(path, _)| path.starts_with(pinned.id.to_string())).collect()
    };
    assert_eq!(kept(snapshot(home.folder.images_dir().path())), kept(before));
}

/// A client that pins an image during its removal either learns that it is removed, or has saved it.
#[test]
fn a_pin_during_a_removal_is_seen_or_refused() {
    let (mut kept, mut refused) = (0, 0);
    for round in 0..40 {
        let home = Home::new();
        let image = home.publish(0);
        let barrier = std::sync::Barrier::new(2);
        let (pin, removed) = std::thread::scope(|scope| {
            let pin = scope.spawn(|| {
                barrier.wait();
                image.change_tags(Change::Pin)
            });
            barrier.wait();
            // Spread over the time that a pin takes.
            let until = std::time::Instant::now() + std::time::Duration::from_micros(round * 40);
            while std::time::Instant::now() < until {
                std::hint::spin_loop();
            }
            let removed = home.folder.remove(&home.lock, &image.id);
            (pin.join().unwrap(), removed)
        });
        let is_there = home.ids() == [image.id.to_string()];
        match (pin, removed) {
            (Ok(_), Err(Error::Pinned(_))) => {
                kept += 1;
                assert!(is_there && image.tags().is_pinned() && image.verify().is_sound());
            }
            // It looked while the image was renamed: too early or too late.
            (Err(Error::RemovedMeanwhile(_)), Err(Error::Pinned(_))) => assert!(is_there),
            (Err(Error::RemovedMeanwhile(_)), Ok(())) => {
                refused += 1;
                assert!(!is_there);
            }
            other => panic!("{other:?}"),
        }
    }
    eprintln!("{kept} pins were seen, {refused} refused");
}

fn limits(min_free: u64, max_total: Option<u64>) -> Limits {
    let policy = Policy { keep_last: 3, max_total, ..Policy::default() };
    Limits { policy, min_free, copies: Copies::One }
}

#[test]
fn room_is_made_for_the_next_image_and_only_if_it_is_enough() {
    let home = Home::new();
    let images: Vec<Image> = (0..3).map(|seconds| home.publish(seconds)).collect();
    let survey = Survey::of(&home.folder, 0).unwrap();
    let (one, all) = (survey.sizes().freed(&[images[0].id]), survey.sizes().total());
    assert!(one >= 2 << 20 && all == 3 * one, "{one} {all}");
    let room = |max| {
        let made = survey::make_room(&home.folder, &home.lock, &limits(0, Some(max)), one, Written::Packed)?;
        Ok::<_, survey::NoRoom>(made.iter().map(|removal| removal.id).collect::<Vec<_>>())
    };
    assert_eq!(room(4 * one).unwrap(), []);
    let error = room(2 * one - 1).unwrap_err();
    assert!(error.to_string().contains("store.max-total-size"), "{error}");
    assert_eq!(home.ids().len(), 3, "nothing went for nothing");
    assert_eq!(room(3 * one).unwrap(), [images[0].id]);
    images[1].change_tags(Change::Pin).unwrap();
    assert!(matches!(room(2 * one), Err(survey::NoRoom::Refused(_))));
    assert_eq!(home.ids(), [images[2].id.to_string(), images[1].id.to_string()]);
    let full = survey::make_room(&home.folder, &home.lock, &limits(1 << 60, None), 1, Written::Packed);
    assert!(full.unwrap_err().to_string().contains("store.min-free"));
    assert_eq!(home.ids().len(), 2);
}

#[test]
fn what_is_on_its_way_to_the_replica_stays_and_makes_room_last() {
    let home = Home::new();
    let images: Vec<Image> = (0..4).map(|seconds| home.publish(seconds)).collect();
    let hold = home.lock.hold(images[0].id);
    let again = home.lock.hold(images[0].id);
    let policy = Policy { keep_last: 2, max_total: Some(1), ..Policy::default() };
    let (plan, gone) = survey::rotate(&home.folder, &home.lock, &policy, 0).unwrap();
    assert_eq!(gone, [images[1].id, images[2].id], "a rule and a bound");
    assert_eq!(plan.decisions[3].verdict.to_string(), "being replicated or restored");
    drop(hold);
    let (_, gone) = survey::rotate(&home.folder, &home.lock, &policy, 0).unwrap();
    assert_eq!(gone, []);

    let newer = home.publish(9);
    let one = Survey::of(&home.folder, 0).unwrap().sizes().freed(&[newer.id]);
    let room = |max| {
        let policy = Policy { keep_last: 9, max_total: Some(max), ..Policy::default() };
        let limits = Limits { policy, ..limits(0, None) };
        let made = survey::make_room(&home.folder, &home.lock, &limits, one, Written::Packed).unwrap();
        made.iter().map(|removal| removal.id).collect::<Vec<_>>()
    };
    assert_eq!(room(3 * one), [images[3].id]);
    assert_eq!(room(2 * one), [images[0].id], "a new image comes first");
    drop(again);
    home.publish(10);
    let (_, gone) = survey::rotate(&home.folder, &home.lock, &policy, 0).unwrap();
    assert_eq!(gone, [newer.id]);
}

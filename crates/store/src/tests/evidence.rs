//! What has shown that images can be restored, on real files.

use std::collections::BTreeMap;

use super::*;
use retention::Policy;
use retention::survey;

fn words(home: &Home) -> Vec<String> {
    let shown = home.folder.evidence().unwrap();
    home.folder.images().unwrap().iter().rev().map(|image| shown.of(&image.id).to_string()).collect()
}

#[test]
fn evidence_lasts_grows_and_is_forgotten_with_its_image() {
    let home = Home::new();
    let [first, second, third]: [Image; 3] = std::array::from_fn(|n| home.publish(i64::try_from(n).unwrap()));
    let note = |image: &Image, evidence| {
        home.folder.note_evidence(&home.lock, &BTreeMap::from([(image.id, evidence)])).unwrap();
    };
    assert_eq!(words(&home), ["taken"; 3], "those of an older rekindle");
    note(&first, Evidence::Refused);
    assert_eq!(words(&home), ["refused", "taken", "taken"]);
    assert!(home.folder.evidence().unwrap().with_evidence().is_empty());
    note(&first, Evidence::Rehearsed);
    note(&second, Evidence::Restored);
    note(&second, Evidence::Rehearsed);
    assert_eq!(words(&home), ["rehearsed", "restored", "taken"]);
    // The job was restored from the second: the rehearsed one may go.
    survey::rotate(&home.folder, &home.lock, &Policy { keep_last: 1, ..Policy::default() }, 0).unwrap();
    assert_eq!(home.folder.images().unwrap().iter().map(|image| image.id).collect::<Vec<_>>(), [third.id, second.id]);
    note(&third, Evidence::Rehearsed);
    let shown = home.folder.evidence().unwrap();
    assert_eq!(shown.with_evidence(), [second.id, third.id].into());
    assert_eq!(shown.recorded(&first.id), Evidence::Taken, "it is gone");
}

#[test]
fn a_torn_file_is_no_evidence_and_with_an_unreadable_one_nothing_is_removed() {
    let home = Home::new();
    let [first, _second]: [Image; 2] = std::array::from_fn(|n| home.publish(i64::try_from(n).unwrap()));
    let found = BTreeMap::from([(first.id, Evidence::Restored)]);
    home.folder.note_evidence(&home.lock, &found).unwrap();
    let path = home.folder.path().join("evidence.json");
    let whole = fs::read(&path).unwrap();
    for length in 0..whole.len() {
        fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(words(&home), ["taken"; 2], "{length} bytes");
    }
    home.folder.note_evidence(&home.lock, &found).unwrap();
    assert_eq!(words(&home), ["restored", "taken"]);
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    assert!(home.folder.evidence().is_err());
    let policy = Policy { keep_last: 1, ..Policy::default() };
    assert!(survey::rotate(&home.folder, &home.lock, &policy, 0).is_err());
    assert_eq!(home.folder.images().unwrap().len(), 2);
}

#[test]
fn under_untried_versions_evidence_counts_after_the_first_that_is_found_there() {
    let home = Home::new();
    let [first, second]: [Image; 2] = std::array::from_fn(|n| home.publish(i64::try_from(n).unwrap()));
    let note = |image: &Image| {
        home.folder.note_evidence(&home.lock, &BTreeMap::from([(image.id, Evidence::Rehearsed)])).unwrap();
    };
    let under = |untried| home.folder.note_untried(&home.lock, untried).unwrap();
    note(&first);
    under(Some("CRIU 4.3.0"));
    assert_eq!(words(&home), ["taken", "taken"]);
    let shown = home.folder.evidence().unwrap();
    assert_eq!((shown.awaits(), shown.recorded(&first.id)), (Some("CRIU 4.3.0"), Evidence::Rehearsed));
    home.folder.note_evidence(&home.lock, &BTreeMap::from([(second.id, Evidence::Refused)])).unwrap();
    assert_eq!(words(&home), ["taken", "refused"], "a refusal is none");
    note(&second);
    assert_eq!(words(&home), ["rehearsed", "rehearsed"]);
    // The next run, under the same ones, under others, and under those that were tried.
    for (untried, expected) in [(Some("CRIU 4.3.0"), "rehearsed"), (Some("CRIU 4.4.0"), "taken"), (None, "rehearsed")] {
        under(untried);
        assert_eq!(words(&home), [expected; 2], "{untried:?}");
    }
}

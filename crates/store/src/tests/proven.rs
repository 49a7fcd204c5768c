//! Which images are proven, on real files.

use super::*;
use retention::Policy;
use retention::survey;

#[test]
fn proofs_last_and_what_is_gone_is_forgotten() {
    let home = Home::new();
    let [first, second, third]: [Image; 3] = std::array::from_fn(|n| home.publish(i64::try_from(n).unwrap()));
    let proven = || home.folder.proven().unwrap().into_iter().map(|id| id.sequence()).collect::<Vec<_>>();
    assert_eq!(proven(), [0_u32; 0], "those of an older rekindle are not");
    home.folder.note_proven(&home.lock, [first.id, second.id]).unwrap();
    assert_eq!(proven(), [1, 2]);
    survey::rotate(&home.folder, &home.lock, &Policy::default(), 0).unwrap();
    assert_eq!(home.folder.images().unwrap().iter().map(|image| image.id).collect::<Vec<_>>(), [third.id, second.id]);
    home.folder.note_proven(&home.lock, [third.id]).unwrap();
    assert_eq!(proven(), [2, 3]);
    // A file that cannot be parsed proves nothing, and is replaced by the next proof.
    fs::write(home.folder.path().join("proven.json"), b"{").unwrap();
    assert_eq!(proven(), [0_u32; 0]);
    home.folder.note_proven(&home.lock, [third.id]).unwrap();
    assert_eq!(proven(), [3]);
    // A file that cannot be read is an error, and then nothing is removed.
    fs::remove_file(home.folder.path().join("proven.json")).unwrap();
    fs::create_dir(home.folder.path().join("proven.json")).unwrap();
    assert!(home.folder.proven().is_err());
    assert!(survey::rotate(&home.folder, &home.lock, &Policy::default(), 0).is_err());
    assert_eq!(home.folder.images().unwrap().len(), 2);
}

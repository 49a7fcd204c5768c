//! A writer that is killed at any moment leaves complete images, and leftovers that the next start removes.

use super::*;
use retention::{Policy, survey};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const STORE: &str = "REKINDLE_TEST_STORE";
const KEEP: u32 = 2;

/// The writer: publishes and rotates until it is killed.
#[test]
#[ignore = "runs for ever; the test below starts and kills it"]
fn writer() {
    let path = std::env::var_os(STORE).expect("the test below names the store");
    let folder = Store::open(Path::new(&path), Access::Write).unwrap().create_job(&name("train")).unwrap();
    let lock = folder.lock().unwrap();
    folder.sweep_leftovers(&lock).unwrap();
    loop {
        let draft = folder.begin_image(&lock, at(0)).unwrap();
        fill(draft.dir());
        draft.publish_loose(manifest());
        survey::rotate(&folder, &lock, &Policy { keep_last: KEEP, ..Policy::default() }, 0).unwrap();
    }
}

/// Starts the writer, and kills it once there is an image newer than `after` and some time has passed.
fn run_and_kill(store: &Path, after: u32, a_while: Duration) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "tests::killed::writer", "--ignored"])
        .env(STORE, store)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let newest = || {
        let store = Store::open(store, Access::Read).ok()?;
        let images = store.job(&name("train")).ok()?.images().ok()?;
        images.first().map(|image| image.id.sequence())
    };
    let deadline = Instant::now() + Duration::from_secs(60);
    while newest() <= Some(after) && Instant::now() < deadline && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(a_while);
    let ended = child.try_wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ended.is_none(), "the writer ended by itself: {ended:?}");
    assert!(newest() > Some(after), "no image within a minute");
}

#[test]
fn a_killed_writer_leaves_whole_images() {
    let dir = tempfile::tempdir().unwrap();
    let (mut newest, mut swept, mut before) = (0, 0, 0);
    for round in 0..24 {
        // Spread over the time of one cycle of the writer, some 20 ms.
        run_and_kill(dir.path(), newest, Duration::from_micros(round * 1700));
        let folder = Store::open(dir.path(), Access::Read).unwrap().job(&name("train")).unwrap();
        // The lock ended with the process.
        let lock = folder.lock().unwrap();
        let images = folder.images().unwrap();
        // A writer that is killed before it rotates leaves one image more than it found; the next rotation removes all
        // of them.
        let count = u32::try_from(images.len()).unwrap();
        assert!((1..=KEEP.max(before) + 1).contains(&count), "{count} after {before}");
        before = count;
        assert!(images.iter().all(Image::is_good), "{images:?}");
        assert!(images.iter().all(|image| image.verify().is_sound()));
        swept += folder.sweep_leftovers(&lock).unwrap().len();
        assert_eq!(fs::read_dir(folder.images_dir()).unwrap().count(), images.len());
        newest = images[0].id.sequence();
    }
    assert!(swept > 0, "no kill came at an interesting moment");
}

//! Killed, or out of space, at each step.

use std::ffi::OsStr;

use super::*;
use rekindle_testing::points::{self, Fault};

const STORE: &str = "REKINDLE_TEST_STORE";
const FORM: &str = "REKINDLE_TEST_FORM";
/// Larger than the number of steps.
const MANY: u64 = 200;

fn content() -> Vec<(&'static str, Vec<u8>)> {
    vec![("criu/a", noise(1, 2 * CHUNK + 9)), ("b", vec![0; 3 * CHUNK]), ("c", noise(2, 5))]
}

fn older() -> Vec<(&'static str, Vec<u8>)> {
    vec![("criu/a", noise(1, CHUNK)), ("c", noise(3, 500))]
}

/// A store with an older image, and one to be packed.
fn prepare(form: Form) -> (Ground, Image) {
    let ground = Ground::new();
    ground.persist(&ground.stage(1, &older())).unwrap();
    // Its packs are marked for removal, and one is needed again.
    let packs = ground.folder.packs();
    packs.names().unwrap().iter().for_each(|name| fs::write(packs.gone_path(*name), b"{}").unwrap());
    let image = match form {
        Form::Packed => ground.stage(2, &content()),
        Form::Loose => {
            let draft = ground.folder.begin_image_as(&ground.lock, blank(2).id).unwrap();
            for (path, content) in content() {
                fs::create_dir_all(draft.dir().join(path).parent().unwrap()).unwrap();
                fs::write(draft.dir().join(path), content).unwrap();
            }
            draft.publish_loose(blank(2))
        }
    };
    (ground, image)
}

fn image_of(dir: &Path, folder: &JobFolder, form: &str) -> Image {
    match form {
        "loose" => folder.images().unwrap().into_iter().find(|image| image.id == blank(2).id).unwrap(),
        _ => Image::load_staged(&crate::tests::beneath(&dir.join("slot2")), crate::Place::Staged, &Default::default())
            .unwrap(),
    }
}

/// The process that is killed.
#[test]
#[ignore = "dies at a step; the tests below start it"]
fn packer() {
    rekindle_os::point::inject(|step| points::reached(step == rekindle_os::point::Step::Write));
    let dir = std::path::PathBuf::from(std::env::var_os(STORE).expect("the tests below name the folder"));
    let folder = Store::open(&dir.join("store"), Access::Write).unwrap().create_job(&"j".parse().unwrap()).unwrap();
    let lock = folder.lock().unwrap();
    let image = image_of(&dir, &folder, &std::env::var(FORM).unwrap());
    let packing = Packing { bounds: Bounds { rate: None, threads: 1 }, ..plain() };
    persist(&image, &folder, &lock, &packing, &Progress::default(), &|| false).unwrap();
}

/// Runs the packer with the fault at each step in turn, and checks the result each time. Returns how often it failed.
fn at_each_step(form: Form, fault: impl Fn(u64) -> Fault) -> u64 {
    let name = if form == Form::Loose { "loose" } else { "staged" };
    for at in 1..MANY {
        let (ground, image) = prepare(form);
        let Ground { dir, folder, lock } = ground;
        drop(lock);
        let variables = [(STORE, dir.path().as_os_str()), (FORM, OsStr::new(name))];
        let ended = points::run("persist::tests::killed::packer", fault(at), &variables);
        let ground = Ground { lock: folder.lock().unwrap(), dir, folder };
        // In all cases the older image is complete, and the newer one is in its old place, in the store, or both.
        let images = ground.folder.images().unwrap();
        ground.assert_holds(images.last().unwrap(), &older(), None);
        let stored = images.iter().find(|found| found.id == image.id);
        assert!(form == Form::Packed || stored.is_some(), "step {at}: the loose image is gone");
        match stored.map(|stored| (stored, stored.form())) {
            Some((stored, Form::Packed)) => {
                assert!(stored.verify().is_sound());
                ground.assert_holds(stored, &content(), None);
            }
            Some((stored, Form::Loose)) => assert!(stored.verify().is_sound()),
            None => {}
        }
        if ended.success() {
            assert_eq!(stored.map(Image::form), Some(Form::Packed), "step {at}");
            return at - 1;
        }
        // The next try succeeds, and there are no leftovers.
        ground.folder.sweep_leftovers(&ground.lock).unwrap();
        let again = match stored {
            Some(stored) => ground.persist(stored).unwrap(),
            None => ground.persist(&image).unwrap(),
        };
        ground.assert_holds(&again, &content(), None);
        assert_eq!(fs::read_dir(ground.folder.images_dir()).unwrap().count(), 2, "step {at}");
        assert!(ground.packs("").iter().all(|name| !name.starts_with(".tmp-")), "step {at}");
    }
    panic!("it never comes to its end")
}

#[test]
fn killed_at_each_step_of_packing_what_is_in_memory() {
    let steps = at_each_step(Form::Packed, Fault::Kill);
    assert!(steps >= 15, "{steps}");
}

#[test]
fn killed_at_each_step_of_packing_a_loose_image() {
    let steps = at_each_step(Form::Loose, Fault::Kill);
    assert!(steps >= 15, "{steps}");
}

#[test]
fn out_of_space_at_each_step() {
    for form in [Form::Packed, Form::Loose] {
        let steps = at_each_step(form, Fault::Full);
        assert!(steps >= 10, "{steps}");
    }
}

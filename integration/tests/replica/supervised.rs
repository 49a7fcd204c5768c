//! `rekindle run` with a replica.

use std::fs;

use nix::sys::signal::Signal;
use rekindle_store::{BadWhy, ImageId, Outcome};

use crate::elsewhere::replicated;
use crate::ground::{folder_replica_of, newest_good};
use crate::rot::mark;
use crate::supervisor::Lab;

const FRESH: [&str; 5] = ["run", "--fresh", "--name", "j", "--"];

#[test]
fn the_last_image_of_a_stopped_job_is_there_and_comes_to_another_machine() {
    let (Some(lab), Some(other)) = (Lab::new(), Lab::new()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let url = format!("\"file://{}\"", dir.path().display());
    let lab = lab.set("replica.url", &url).set("replica.keep-last", "2");
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.job_pid(&lab);
    run.snapshot(&lab);
    run.wait_for("it is in the replica", || {
        lab.published().is_some_and(|published| published.last_replicated.is_some())
    });
    let published = lab.published().unwrap();
    let first = published.last_replicated.unwrap();
    assert_eq!((published.replica_failure, published.replicating), (None, None));
    run.signal(Signal::SIGTERM);
    let (_, said) = run.ends_with(128 + 15);
    let last: ImageId = lab.images()[0].id;
    assert!(last > first, "the stop took one more: {said}");
    let replica = folder_replica_of(dir.path(), "j");
    assert_eq!(newest_good(&replica, None).map(|image| image.id), Some(last), "{said}");
    assert_eq!(replica.record(&|| false).unwrap().map(|record| record.outcome), Some(Outcome::Stopped));

    // Another machine, with a store that knows nothing; what it does with the image is not the matter here.
    let other = other.set("replica.url", &url);
    let mut run = other.run(lab.python_command("kinds.py", &["plain", &folder]));
    run.wait_said(&format!("image {last} was fetched from the replica"));
    assert!(other.images().iter().any(|image| image.id == last && image.is_good()));
    run.wait_said(&format!("continues from image {last}"));
    run.kill_9();
}

#[test]
fn a_mark_reaches_the_replica_and_so_does_its_removal() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &format!("\"file://{}\"", dir.path().display())).set("replica.keep-last", "9");
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.job_pid(&lab);
    let first = replicated(&mut run, &lab);
    let replica = folder_replica_of(dir.path(), "j");
    let is_good = || {
        let images = replica.images(&|| false).unwrap();
        images.iter().find(|image| image.id.to_string() == first).unwrap().is_good()
    };
    mark(&lab, BadWhy::DiesAgain);
    replicated(&mut run, &lab);
    assert!(!is_good());
    assert!(lab.rekindle(&["mark", "--good", &format!("j/{first}")]).status.success());
    replicated(&mut run, &lab);
    assert!(is_good());
    lab.kill_9(run);
}

#[test]
fn images_of_a_new_start_take_the_place_of_those_that_it_left() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &format!("\"file://{}\"", dir.path().display())).set("replica.keep-last", "2");
    let folder = lab.path().to_str().unwrap().to_owned();
    let command = lab.python_command("kinds.py", &["plain", &folder]);
    let lose = |run| {
        lab.kill_9(run);
        lab.forget_memory();
        fs::remove_dir_all(lab.store()).unwrap();
    };
    let mut run = lab.run(&command);
    run.job_pid(&lab);
    for _ in 0..3 {
        replicated(&mut run, &lab);
    }
    lose(run);

    // On an empty store numbers begin again.
    let mut run = lab.run_with(&FRESH, &command);
    run.job_pid(&lab);
    let first = replicated(&mut run, &lab);
    assert!(first.starts_with("000001-"), "{first}");
    let there = || -> Vec<u32> {
        let images = folder_replica_of(dir.path(), "j").images(&|| false).unwrap();
        images.iter().map(|image| image.id.sequence()).collect()
    };
    assert_eq!(there(), [3, 1], "what was reported as replicated is there");
    lose(run);

    // The next machine continues from that one. The numbers of its images are higher than all that are there.
    let mut run = lab.run(&command);
    run.wait_said(&format!("image {first} was fetched from the replica"));
    run.wait_said(&format!("the job was restored from image {first}"));
    replicated(&mut run, &lab);
    assert_eq!((there(), lab.good()), (vec![4, 1], vec![4, 1]));
    lab.kill_9(run);
}

#[test]
fn images_that_a_rewind_left_are_neither_fetched_nor_restored() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &format!("\"file://{}\"", dir.path().display())).set("replica.keep-last", "9");
    let lab = lab.set("store.keep-last", "9");
    let folder = lab.path().to_str().unwrap().to_owned();
    let command = lab.python_command("kinds.py", &["plain", &folder]);
    let mut run = lab.run(&command);
    run.job_pid(&lab);
    let images = [(); 3].map(|()| replicated(&mut run, &lab));
    assert!(lab.rekindle(&["rewind", "j", "1"]).status.success());
    run.wait_for("the rewind is recorded", || lab.job().record().unwrap().is_some_and(|record| record.base.is_some()));
    let there = folder_replica_of(dir.path(), "j");
    let base = || there.record(&|| false).unwrap().and_then(|record| record.base);
    run.wait_for("the replica knows it", || base().is_some_and(|base| base.to_string() == images[0]));
    lab.kill_9(run);
    lab.forget_memory();

    // The newest images here are damaged, and the copies in the replica are good.
    let damaged = images[1..].iter().map(|id| lab.store().join("j/images").join(id).join("manifest.json"));
    let damaged: Vec<_> = damaged.map(|path| (fs::read(&path).unwrap(), path)).collect();
    damaged.iter().for_each(|(_, path)| fs::write(path, "{").unwrap());
    let mut run = lab.run(&command);
    run.wait_said(&format!("the job was restored from image {}", images[0]));
    assert!(!run.err().contains("was fetched"), "{}", run.err());
    lab.kill_9(run);
    lab.forget_memory();

    damaged.iter().for_each(|(bytes, path)| fs::write(path, bytes).unwrap());
    let line = lab.job().record().unwrap().unwrap();
    let mut run = lab.run_with(&["restore", "j"], [""; 0]);
    run.wait_said(&format!(
        "restoring image {}, the newest one that the job continues from. Image {} is",
        images[0], images[2]
    ));
    run.wait_said(&format!("the job was restored from image {}", images[0]));
    let record = lab.job().record().unwrap().unwrap();
    assert_eq!((record.lineage, record.base), (line.lineage, line.base), "the same line goes on");
    lab.kill_9(run);
    lab.forget_memory();

    // On an empty machine, too. Images get numbers after those in the replica, where the first machine leaves one more.
    let machines =
        [("first", ["restore", "j"], "000004-"), ("second", ["restore", &format!("j/{}", images[0])], "000005-")];
    for (machine, args, next) in machines {
        fs::rename(lab.store(), lab.file(machine)).unwrap();
        let mut run = lab.run_with(&args, [""; 0]);
        run.wait_said(&format!("the job was restored from image {}", images[0]));
        let image = replicated(&mut run, &lab);
        assert!(image.starts_with(next), "{image}: {}", run.err());
        lab.kill_9(run);
        lab.forget_memory();
    }
}

#[test]
fn a_replica_that_can_not_be_reached_is_no_reason_to_begin_anew() {
    let Some(lab) = Lab::new() else { return };
    let gone = lab.path().join("not-mounted");
    let lab = lab.set("replica.url", &format!("\"file://{}\"", gone.display()));
    let (_, said) = lab.run(["true"]).ends_with(69);
    assert!(said.contains("no local image of the job") && said.contains("--fresh"), "{said}");
    let (_, said) = lab.run_with(&FRESH, ["true"]).ends_with(0);
    assert!(said.contains("cannot record in the replica how the job ended"), "{said}");

    // With an image here it goes on, and says so.
    fs::create_dir(&gone).unwrap();
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.run_with(&FRESH, lab.python_command("kinds.py", &["plain", &folder]));
    run.job_pid(&lab);
    run.snapshot(&lab);
    run.kill_9();
    fs::rename(&gone, lab.path().join("elsewhere")).unwrap();
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.wait_said("cannot check the replica for a newer image");
    run.kill_9();
    lab.assert_all_gone();
}

//! Data that is damaged in the store and intact in the replica.

use std::fs;
use std::os::unix::fs::FileExt;

use rekindle_store::{BadMark, BadWhy};

use crate::elsewhere::replicated;
use crate::ground::{folder_replica_of, newest_good};
use crate::supervisor::Lab;

/// Marks the newest image here.
pub(crate) fn mark(lab: &Lab, why: BadWhy) {
    let mark = BadMark { why, detail: "a test says so".into(), when: chrono::Utc::now() };
    lab.images()[0].clone().mark_bad(mark).unwrap();
}

#[test]
fn an_image_that_is_damaged_here_is_good_in_the_replica() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &format!("\"file://{}\"", dir.path().display()));
    let folder = lab.path().to_str().unwrap().to_owned();
    let replica = folder_replica_of(dir.path(), "j");
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.job_pid(&lab);
    let first = replicated(&mut run, &lab);
    mark(&lab, BadWhy::Damaged);
    replicated(&mut run, &lab);
    assert!(replica.images(&|| false).unwrap().iter().any(|image| image.id.to_string() == first && image.is_good()));
    lab.kill_9(run);
    lab.forget_memory();

    // If all are damaged here, the job continues from the copy there.
    mark(&lab, BadWhy::Damaged);
    let newest = newest_good(&replica, None).unwrap().id;
    let mut run = lab.python("kinds.py", &["plain", &folder]);
    run.wait_said(&format!("image {newest} was fetched from the replica"));
    run.wait_said(&format!("the job was restored from image {newest}"));
    lab.kill_9(run);
    assert_eq!(lab.good(), [2]);
}

#[test]
fn three_images_outlive_sixteen_damaged_bytes_of_what_they_share() {
    let Some(lab) = Lab::new() else { return };
    let dir = tempfile::tempdir().unwrap();
    let lab = lab.set("replica.url", &format!("\"file://{}\"", dir.path().display()));
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.python("kinds.py", &["fresh-2", &folder]);
    run.job_pid(&lab);
    // Each of them: one that is stored while another one is sent may be skipped.
    for _ in 0..3 {
        replicated(&mut run, &lab);
    }
    lab.kill_9(run);
    lab.forget_memory();
    assert_eq!(lab.good(), [3, 2, 1]);

    let job = lab.job();
    let harm = |lab: &Lab| {
        let index = job.packs().index().unwrap();
        let maps: Vec<_> = lab.images().iter().map(|image| image.chunk_map().unwrap().unwrap()).collect();
        let is_common =
            |id: &rekindle_store::chunk::ChunkId| maps.iter().all(|map| map.chunks().any(|(other, _)| other == *id));
        let common = maps[0].chunks().map(|(id, _)| id).filter(is_common).filter_map(|id| index.get(&id));
        let at = common.max_by_key(|at| at.stored_len).unwrap();
        let pack = job.packs().pack_path(at.pack);
        let file = fs::File::options().write(true).open(&pack).unwrap();
        file.write_all_at(b"sixteen bad ones", at.offset + 64 + u64::from(at.stored_len) / 2).unwrap();
        pack
    };
    let pack = harm(&lab);
    let output = lab.rekindle(&["verify", "--read-data"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("from the replica if possible"), "{said}");

    let mut run = lab.python("kinds.py", &["fresh-2", &folder]);
    run.wait_said("the job was restored from image 000003");
    let said = run.err();
    assert!(said.contains(&format!("1 damaged chunk in {}", pack.display())), "{said}");
    assert_eq!(said.matches("1 taken from the replica and stored again; the restore continues").count(), 1, "{said}");
    lab.kill_9(run);
    assert_eq!(lab.good(), [3, 2, 1]);
    assert!(lab.rekindle(&["verify", "--read-data"]).status.success(), "the store is whole again");

    // By hand.
    harm(&lab);
    let output = lab.rekindle(&["repair", "--dry-run", "j"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("the replica was not asked"), "{said}");
    let output = lab.rekindle(&["repair", "j"]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && said.contains("1 taken from the replica"), "{said}");
    assert!(lab.rekindle(&["verify", "--read-data"]).status.success());
    assert_eq!(lab.good(), [3, 2, 1]);

    // The replica is unchanged.
    let replica = folder_replica_of(dir.path(), "j");
    assert_eq!(replica.images(&|| false).unwrap().len(), 3);
}

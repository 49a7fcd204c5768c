//! A job that has children born and die all the time, as a shell script does: at any moment some are just ending, or
//! are dead and not reaped yet.

use crate::kinds::{count_on, finish};
use crate::supervisor::Lab;

#[test]
fn a_storm_of_children_is_in_every_image_and_comes_back_from_each() {
    let Some(lab) = Lab::new().map(|lab| lab.set("store.keep-last", "30")) else { return };
    let mut run = lab.python("kinds.py", &["fork-storm", lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    // None of them may fail.
    let taken: Vec<u32> = (0..10).map(|_| run.snapshot(&lab)).collect();
    assert_eq!(taken, (1..=10).collect::<Vec<u32>>());
    // Of a namespace; the machine's own may be lower.
    let limit = 4 << 20;
    for image in lab.images() {
        let tree = &image.manifest().unwrap().tree;
        // The reaper, the job, and its child that is dead.
        assert!(tree.processes.len() >= 3, "{tree:?}");
        assert!(tree.ids.iter().all(|id| (1..=limit).contains(id)), "ids that no process can have: {tree:?}");
    }
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    assert_eq!(run.snapshot(&lab), 11, "of a job that was restored");
    for number in [11, 8, 3] {
        run.kill_9();
        run = lab.run_with(&["restore", &format!("j/{number}")], [] as [&str; 0]);
        run.wait_said(&format!("the job was restored from image {number:06}"));
        count_on(&lab, &mut run, 3);
    }
    finish(&lab, run);
}

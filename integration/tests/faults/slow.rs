//! A driver that takes long costs time, and neither the job nor an image.

use crate::rig::Rig;

#[test]
fn a_slow_driver_makes_the_freeze_or_the_restore_longer_once_memory_is_released() {
    let Some(mut rig) = Rig::new() else { return };
    rig.kept(&[]);
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let slow = "0 times=1 delay=6000";
    // The first import is only a try.
    rig.standin.fault("fail-keeper-import", "0 times=1 skip=1 delay=6000");
    supervisor.ask();
    let line = supervisor.said_one_of(&["the job was frozen for", "the snapshot failed"]);
    assert!(line.contains("the job was frozen for"), "{line}");
    assert!(!rig.standin.path().join("fail-keeper-import").exists(), "nothing was imported");
    supervisor.assert_unharmed(1);
    assert_eq!(rig.state().unwrap().restarts, 0);
    rig.standin.fault("fail-keeper-create", slow);
    supervisor.kill_job();
    let line = supervisor.said_one_of(&["the job was restored from image", "cannot restore image"]);
    assert!(line.contains("the job was restored from image"), "{line}");
    assert!(!rig.standin.path().join("fail-keeper-create").exists(), "nothing was made");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn no_thread_runs_early_where_the_driver_restores_slowly() {
    let Some(rig) = Rig::new() else { return };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.fault("fail-restore", "0 times=1 delay=8000");
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    assert!(!rig.standin.path().join("fail-restore").exists(), "the driver was not slow");
    assert!(!rig.log().contains("resuming all threads of the process"), "{}", rig.log());
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
}

//! Memory that stays on the GPU while the job is checkpointed.

use rekindle_store::Image;

use crate::rig::Rig;

const MIB: u64 = 1 << 20;

fn job(args: &[&str]) -> Option<Rig> {
    let mut rig = Rig::new()?;
    rig.kept(args);
    Some(rig)
}

/// Bytes of an image that stayed on the GPU, and those that the driver copied.
fn bytes(image: &Image) -> (u64, u64) {
    let manifest = image.manifest().unwrap();
    let kept = manifest.kept.iter().flat_map(|kept| &kept.pieces).map(|piece| piece.bytes).sum();
    (kept, manifest.landing.iter().map(|landing| landing.bytes).sum())
}

#[test]
fn memory_that_stays_is_what_it_was_after_snapshots_deaths_and_from_the_store() {
    let Some(rig) = job(&[]) else { return };
    let mut supervisor = rig.start();
    for round in 1..=2 {
        for _ in 0..3 {
            let image = supervisor.snapshot();
            // 33 MiB take 34. The driver has the small one, too small for a landing file.
            assert_eq!(bytes(&image), (70 * MIB, 0));
            supervisor.assert_unharmed(1);
        }
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.assert_unharmed(1);
        assert_eq!(rig.state().unwrap().restarts, round);
    }
    supervisor.snapshot();
    supervisor.said("was stored in");
    supervisor.kill();
    rig.assert_nothing_left();
    rig.forget_memory();
    let mut supervisor = rig.run();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

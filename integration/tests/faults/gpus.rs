//! GPUs that a job was on and cannot come back to: others in their place, by itself and by `--device-map`, and what is
//! refused. The stand-in tells of GPUs as NVML does.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rekindle::telemetry::events::{self, What};
use rekindle_store::Image;

use crate::rig::{Rig, Supervisor};

const A: &str = "GPU-a0a0a0a0-a0a0-a0a0-a0a0-a0a0a0a0a0a0";
const B: &str = "GPU-b0b0b0b0-b0b0-b0b0-b0b0-b0b0b0b0b0b0";
const C: &str = "GPU-c0c0c0c0-c0c0-c0c0-c0c0-c0c0c0c0c0c0";

/// Two GPUs of 1 GiB with so many MiB taken by others.
fn two(a: u32, b: u32) -> String {
    format!("a0 1024 {a}\nb0 1024 {b}\n")
}

fn rig() -> Option<Rig> {
    let rig = Rig::new()?;
    rig.standin.add_nvml();
    Some(rig)
}

/// The GPUs that the job of an image had memory on.
fn used(image: &Image) -> Vec<String> {
    let memory = &image.manifest().unwrap().tree.cuda_memory;
    let gpus: BTreeMap<&String, u64> = memory.values().flatten().map(|(gpu, bytes)| (gpu, *bytes)).collect();
    gpus.into_iter().filter(|(_, bytes)| *bytes >= 6 << 20).map(|(gpu, _)| gpu.clone()).collect()
}

/// From which to which GPU the job went at the start that was just told of, and why.
fn moved(rig: &Rig, supervisor: &mut Supervisor<'_>) -> Vec<(String, String, String)> {
    // The event is written before.
    supervisor.said("to=\"running\"");
    supervisor.counts();
    let events = events::read(&rig.folder().log_dir()).unwrap();
    let last = events.into_iter().rev().find_map(|event| match event.what {
        What::Started { moved, .. } => Some(moved),
        _ => None,
    });
    last.unwrap().into_iter().map(|moved| (moved.old, moved.new, moved.why)).collect()
}

#[test]
fn a_job_whose_gpu_is_full_comes_back_on_another_and_stays_there() {
    let Some(rig) = rig() else { return };
    let mut supervisor = rig.start();
    let image = supervisor.snapshot();
    let manifest = image.manifest().unwrap();
    let seen: Vec<&str> = manifest.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    assert_eq!((seen, used(&image)), (vec![A, B], vec![A.to_string()]));
    assert_eq!(manifest.driver.as_deref(), Some("580.159.04"));
    // The memory that the job itself uses is no obstacle.
    rig.standin.gpus(&two(1018, 0));
    let (_, shown) = rig.ask(&["show", "j"]);
    assert!(shown.contains("restore on the same GPUs"), "{shown}");
    // With room for it nothing is said to the driver.
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    assert_eq!(moved(&rig, &mut supervisor), []);
    rig.standin.gpus(&two(1020, 0));
    let (_, shown) = rig.ask(&["show", "j"]);
    assert!(shown.contains(&format!("{A} (6.0 MiB by process 1001)")), "{shown}");
    assert!(shown.contains(&format!("{B} (not used)")), "{shown}");
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.said(&format!("moved the job's data from {A} to {B}: it has 4.0 MiB free"));
    assert_eq!(moved(&rig, &mut supervisor), [(A.into(), B.into(), "it has 4.0 MiB free".into())]);
    // Before there is another image: from the same one to the same place.
    supervisor.kill_job();
    supervisor.said(&format!(" to {B}: "));
    supervisor.counts();
    assert_eq!(used(&supervisor.snapshot()), [B]);
    rig.standin.gpus(&two(0, 0));
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    assert_eq!(moved(&rig, &mut supervisor), [], "that image is of the other GPU");
    assert_eq!(used(&supervisor.snapshot()), [B]);
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn a_job_whose_gpu_is_gone_or_lost_comes_back_on_another() {
    for (here, words) in [
        ("b0 1024 0\nc0 1024 0\n", "it is not on this machine"),
        ("a0 1024 0 lost\nb0 1024 0\nc0 1024 0\n", "it is not on this machine"),
    ] {
        let Some(rig) = rig() else { return };
        let mut supervisor = rig.start();
        supervisor.snapshot();
        rig.standin.gpus(here);
        let (_, shown) = rig.ask(&["show", "j", "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&shown).unwrap();
        assert_eq!((&shown["devices"]["plan"], &shown["devices"]["moved"][0]["old"]), (&"move".into(), &A.into()));
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        let moved = moved(&rig, &mut supervisor);
        assert!(moved.len() == 1 && moved[0].0 == A && moved[0].2 == words, "{moved:?}");
        let now = used(&supervisor.snapshot());
        assert!(now == [moved[0].1.clone()] && (now == [B] || now == [C]), "{now:?}");
        supervisor.stop();
        rig.assert_sequence();
    }
}

#[test]
fn a_job_whose_gpu_had_a_fault_comes_back_on_another() {
    let Some(rig) = rig() else { return };
    // The kernel's log is everybody's: no other test has a GPU at this address.
    rig.standin.gpus("ea 1024 0\nb0 1024 0\n");
    let own = A.replace("a0", "ea");
    let note = format!("rekindle test: NVRM: Xid (PCI:0000:ea:00): 95, pid={}, name=x, nothing\n", i32::MAX);
    let write = || {
        std::fs::OpenOptions::new()
            .write(true)
            .open("/dev/kmsg")
            .and_then(|mut log| std::io::Write::write_all(&mut log, note.as_bytes()))
    };
    let mut supervisor = rig.start();
    supervisor.snapshot();
    let told = write().is_ok();
    if !rekindle_testing::require("kmsg", told, "the kernel's log cannot be written") {
        return;
    }
    supervisor.kill_job();
    supervisor.said(&format!("moved the job's data from {own} to {B}: it had Xid 95"));
    supervisor.counts();
    // Without another GPU, the same GPU is used nevertheless.
    rig.standin.gpus("ea 1024 0\nb0 1024 1023\n");
    supervisor.kill_job();
    supervisor.said("it is used because there is no other GPU");
    supervisor.said("the job was restored from image");
    supervisor.counts();
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn while_all_gpus_are_full_it_is_tried_again_and_the_image_is_not_to_blame() {
    let Some(mut rig) = rig() else { return };
    // It is not given up before there is room.
    rig.restarts_after("2s");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    rig.standin.gpus(&two(1020, 1023));
    supervisor.kill_job();
    let why = supervisor.said("cannot restore image");
    assert!(
        why.contains(&format!("6.0 MiB for what was on Stand-in {A}")) && why.contains("has 1.0 MiB free"),
        "{why}"
    );
    assert!(why.contains("is busy: end the programs that use it"), "{why}");
    rig.standin.gpus(&two(1020, 1000));
    supervisor.said(&format!(" to {B}: "));
    supervisor.counts();
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn without_a_place_for_it_the_run_ends_with_the_reason() {
    for (here, words) in [
        ("a0 4 0\nb0 1 0\n", "has 4.0 MiB free"),
        ("b0 1024 0 H100\n", "Stand-in"),
        // The driver has none to name for the one that it did not use.
        ("b0 1024 0\n", "for each of the 2 GPUs that the job could see"),
    ] {
        let Some(rig) = rig() else { return };
        let mut supervisor = rig.start();
        supervisor.snapshot();
        rig.standin.gpus(here);
        supervisor.kill_job();
        assert_eq!(supervisor.wait(), Some(69), "{here}\n{}", rig.log());
        let log = rig.log();
        assert!(
            log.contains("cannot be restored on this machine: GPUs: the image has") && log.contains(words),
            "{log}"
        );
        // With its GPUs the same command goes on.
        rig.standin.gpus(&two(0, 0));
        let mut supervisor = rig.start();
        supervisor.counts();
        supervisor.stop();
        rig.assert_sequence();
    }
}

#[test]
fn a_map_is_for_the_images_that_were_there() {
    let Some(mut rig) = rig() else { return };
    rig.variable("CUDA_VISIBLE_DEVICES", "0");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    supervisor.stop();
    drop(supervisor);
    rig.flags(&["--device-map", "0=1"]);
    let mut supervisor = rig.start();
    let log = rig.log();
    assert!(log.contains(&format!("moved the job's data from {A} to {B}: asked for")), "{log}");
    assert!(log.contains("CUDA_VISIBLE_DEVICES=0 in the job's environment still names the old GPUs"), "{log}");
    // From the same image to the same place, from a newer one to where that was.
    supervisor.kill_job();
    supervisor.said(&format!("moved the job's data from {A} to {B}: asked for"));
    supervisor.counts();
    assert_eq!(used(&supervisor.snapshot()), [B]);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    assert_eq!(moved(&rig, &mut supervisor), []);
    assert_eq!(used(&supervisor.snapshot()), [B]);
    supervisor.stop();
    drop(supervisor);
    rig.instead("restore");
    let map = format!("{B}={A}");
    rig.flags(&["--device-map", &map]);
    let mut supervisor = rig.start();
    assert!(rig.log().contains(&format!("moved the job's data from {B} to {A}: asked for")), "{}", rig.log());
    assert_eq!(used(&supervisor.snapshot()), [A]);
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn bad_maps_are_refused_in_words_and_cost_nothing() {
    let Some(mut rig) = rig() else { return };
    rig.standin.gpus("a0 1024 0\nb0 1024 0\nc0 1024 0 H100\nd0 1024 0 mig\n");
    let mut supervisor = rig.start();
    supervisor.snapshot();
    supervisor.stop();
    drop(supervisor);
    for (map, code, words) in [
        ("0=9", 69, "--device-map: this machine has no GPU 9"),
        ("7=1", 69, "--device-map: the job had no GPU 7 at the snapshot"),
        ("0=1,0=0", 69, "--device-map: GPU 0 is named twice"),
        ("0=1,1=1", 69, "--device-map: GPU 1 can replace only one GPU"),
        ("0=2", 69, "of type \"Stand-in\" and 2 of type \"H100\""),
        ("0=3", 69, "is divided or virtual"),
        ("0", 2, "must be OLD=NEW"),
        ("0=MIG-1", 2, "an instance of a divided GPU"),
    ] {
        rig.flags(&["--device-map", map]);
        let before = rig.log().len();
        let mut supervisor = rig.run();
        assert_eq!(supervisor.wait(), Some(code), "{map}\n{}", rig.log());
        let log = &rig.log()[before..];
        assert!(log.contains(words), "{map}: {log}");
    }
    rig.flags(&[]);
    let mut supervisor = rig.start();
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn parts_of_gpus_are_refused_before_the_job_stands_still() {
    for (gpus, visible, words) in [
        ("a0 1024 0 mig\nb0 1024 0\n", "0", format!("on an instance of the divided GPU {A} (MIG)")),
        ("a0 1024 0\nb0 1024 0 vgpu\n", "1", format!("on the virtual GPU {B} (vGPU)")),
        ("a0 1024 0\n", "MIG-1", "CUDA_VISIBLE_DEVICES=MIG-1".into()),
    ] {
        let Some(mut rig) = rig() else { return };
        rig.standin.gpus(gpus);
        rig.variable("CUDA_VISIBLE_DEVICES", visible);
        let mut supervisor = rig.start();
        let why = supervisor.failing_snapshot();
        assert!(why.contains(&words) && why.contains("give the job whole GPUs"), "{why}");
        supervisor.assert_unharmed(1);
        supervisor.signal(nix::sys::signal::Signal::SIGTERM);
        supervisor.wait();
        rig.assert_nothing_left();
    }
}

#[test]
fn ranks_get_their_gpus_back_at_once() {
    let Some(mut rig) = rig() else { return };
    rig.ranks(3, &[]);
    let mut supervisor = rig.start();
    supervisor.ranks_count(3);
    supervisor.snapshot();
    rig.standin.fault("fail-restore", "0 delay=6000");
    let began = Instant::now();
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    let took = began.elapsed();
    // One after the other they would take 18 s.
    assert!(took >= Duration::from_secs(6) && took < Duration::from_secs(17), "{took:?}");
    rig.clear("fail-restore");
    supervisor.assert_running(3);
    // All of them move together.
    rig.standin.gpus(&two(1010, 0));
    supervisor.kill_job();
    supervisor.said(&format!(" to {B}: "));
    supervisor.assert_running(3);
    supervisor.counts();
    assert_eq!(used(&supervisor.snapshot()), [B]);
    supervisor.stop();
    rig.assert_sequence();
}

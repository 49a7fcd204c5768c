//! Devices that stand for NVIDIA's in a tree with a CUDA process ([`crate::devices_here`]).

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, mknod};

use crate::devices_here::StandIns;
use crate::rig::Rig;

fn rig() -> Option<(Rig, StandIns)> {
    let (mut rig, devices) = (Rig::new()?, StandIns::find()?);
    rig.set("TEST_DEVICES", &devices.variable);
    Some((rig, devices))
}

/// A name of the device in the rig's folder, which can go as those of a machine with a GPU go; its own name where the
/// file system has no devices.
fn named(rig: &Rig, device: &Path, name: &str) -> PathBuf {
    let (path, is) = (rig.path().join(name), fs::metadata(device).unwrap());
    let made = mknod(&path, SFlag::from_bits_truncate(is.mode()), Mode::S_IRUSR | Mode::S_IWUSR, is.rdev());
    if made.is_ok() && File::open(&path).is_ok() { path } else { device.to_owned() }
}

#[test]
fn a_child_by_fork_that_has_them_is_in_the_image_without_them() {
    let Some((mut rig, devices)) = rig() else { return };
    let seen = rig.path().join("seen");
    let (control, memory) = (named(&rig, &devices.control, "control"), named(&rig, &devices.memory, "mapped"));
    let paths = [&control, &memory, &seen].map(|path| path.to_str().unwrap().to_owned());
    rig.job(&["--devices", &paths[0], &paths[1], &paths[2]]);
    let mut supervisor = rig.start();
    let finds = |what: &str| {
        let (what, seen) = (what.to_owned(), seen.clone());
        move |_: &Rig| fs::read_to_string(&seen).is_ok_and(|text| text.trim_end() == what)
    };
    let untouched = format!("{} {} r--s device", paths[0], paths[1]);
    supervisor.until("the child has them", finds(&untouched));
    for _ in 0..2 {
        supervisor.snapshot();
        fs::remove_file(&seen).unwrap();
        supervisor.until("the child has them still", finds(&untouched));
    }
    supervisor.assert_unharmed(1);
    for path in [control, memory].iter().filter(|path| path.starts_with(rig.path())) {
        fs::remove_file(path).unwrap();
    }
    for _ in 0..3 {
        fs::remove_file(&seen).unwrap();
        supervisor.kill_job();
        supervisor.said("the job was restored from image");
        supervisor.until("the child has something else", finds("/dev/null /dev/null r--p zeros"));
        supervisor.assert_unharmed(1);
        // A snapshot of the restored job.
        supervisor.snapshot();
    }
    assert!(!rig.log().contains("NVML"), "{}", rig.log());
    supervisor.stop();
    rig.assert_sequence();
    rig.assert_store_is_whole();
}

#[test]
fn a_cuda_process_that_keeps_one_after_its_checkpoint_is_refused() {
    let Some((mut rig, devices)) = rig() else { return };
    rig.job(&["--keep", devices.control.to_str().unwrap()]);
    let mut supervisor = rig.start();
    for _ in 0..2 {
        let said = supervisor.failing_snapshot();
        assert!(
            said.contains("process 1001 (python3) still has NVIDIA devices open after its CUDA checkpoint"),
            "{said}"
        );
        supervisor.assert_unharmed(1);
    }
    assert!(rig.images().is_empty());
}

/// A job that has a device open beside CUDA, and a library of this name mapped.
fn with_library(rig: &mut Rig, devices: &StandIns, name: &str) {
    let library = rig.path().join(name);
    fs::write(&library, [0; 4096]).unwrap();
    rig.job(&["--keep", devices.control.to_str().unwrap(), "--library", library.to_str().unwrap()]);
}

#[test]
fn a_cuda_process_whose_opencl_is_not_used_is_in_the_image_without_its_devices() {
    let Some((mut rig, devices)) = rig() else { return };
    with_library(&mut rig, &devices, "libnvidia-opencl.so.580.159.04");
    let mut supervisor = rig.start();
    let set = format!("/proc/{}/environ", supervisor.main_pid());
    let set = fs::read_to_string(set).unwrap();
    assert!(set.split('\0').any(|variable| variable == "HWLOC_COMPONENTS=-opencl"), "{set}");
    supervisor.snapshot();
    assert!(rig.log().contains("OpenCL is initialised and not used in process 1001 (python3)"), "{}", rig.log());
    supervisor.assert_unharmed(1);
    supervisor.kill_job();
    supervisor.said("the job was restored from image");
    supervisor.assert_unharmed(1);
    supervisor.snapshot();
    supervisor.stop();
    rig.assert_sequence();
}

#[test]
fn a_cuda_process_that_keeps_one_is_refused_by_the_name_of_the_library() {
    let Some((mut rig, devices)) = rig() else { return };
    with_library(&mut rig, &devices, "libnvidia-encode.so.1");
    let mut supervisor = rig.start();
    let said = supervisor.failing_snapshot();
    let words = "it also uses the GPU without CUDA, by NVENC (libnvidia-encode.so.1), which cannot be restored: let it";
    assert!(said.contains(words), "{said}");
    supervisor.assert_unharmed(1);
    assert!(rig.images().is_empty());
}

//! A job without CUDA that has devices open, which stand for NVIDIA's ([`crate::devices_here`]).

use nix::sys::signal::Signal;

use crate::devices_here::StandIns;
use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running};

fn start(lab: &Lab, devices: &StandIns, kind: &str) -> Running {
    let paths = [&devices.control, &devices.memory, &devices.other].map(|path| path.to_str().unwrap().to_owned());
    let command =
        lab.python_command("trees.py", &[kind, lab.path().to_str().unwrap(), &paths[0], &paths[1], &paths[2]]);
    let variables = [("REKINDLE_TEST_DEVICES".to_owned(), devices.variable.clone())];
    let mut run = lab.run_with_environment(&["run", "--name", "j", "--"], command, &variables);
    count_on(lab, &mut run, 5);
    run
}

/// What the job and its child have last found behind their descriptors.
fn found(lab: &Lab) -> [String; 2] {
    let output = lab.output();
    ["job has ", "child has "].map(|who| {
        let last = output.lines().rev().find_map(|line| line.strip_prefix(who));
        last.unwrap_or_else(|| panic!("{output}")).to_owned()
    })
}

/// Waits until a restored job and its child have found /dev/null. The child may not have run when the job has.
fn find_null(lab: &Lab, run: &mut Running) {
    run.wait_for("both find /dev/null", || found(lab) == ["/dev/null", "/dev/null"]);
}

#[test]
fn one_that_only_asks_has_dev_null_in_their_place() {
    let (Some(lab), Some(devices)) = (Lab::new(), StandIns::find()) else { return };
    let control = devices.control.to_str().unwrap();
    let mut run = start(&lab, &devices, "devices-asked");
    run.wait_printed("\nchild has ");
    for _ in 0..3 {
        assert_eq!(found(&lab), [control, control], "nothing of it is changed in the running job");
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        assert_eq!(found(&lab), [control, control], "nor by the snapshot");
    }
    let notes = run.err().matches("NVML is used without CUDA by process 1001 (").count();
    assert_eq!(notes, 1, "once, as long as it is the same: {}", run.err());
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    find_null(&lab, &mut run);
    // They are treated like any descriptor of /dev/null: no message.
    run.snapshot(&lab);
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    assert_eq!(run.err().matches("NVML is used").count(), 1, "{}", run.err());
    finish(&lab, run);
}

#[test]
fn one_whose_opencl_is_not_used_has_dev_null_in_their_place() {
    let (Some(lab), Some(devices)) = (Lab::new(), StandIns::find()) else { return };
    let control = devices.control.to_str().unwrap();
    let mut run = start(&lab, &devices, "devices-opencl");
    run.wait_printed("\nchild has ");
    for _ in 0..2 {
        run.snapshot(&lab);
        count_on(&lab, &mut run, 3);
        assert_eq!(found(&lab), [control, control], "the running job keeps them");
    }
    let said = run.err();
    assert_eq!(said.matches("OpenCL is initialised and not used in process 1001 (").count(), 1, "{said}");
    run.crash(&lab);
    count_on(&lab, &mut run, 3);
    find_null(&lab, &mut run);
    run.snapshot(&lab);
    finish(&lab, run);
}

fn is_refused(kind: &str, why: &str) {
    let (Some(lab), Some(devices)) = (Lab::new(), StandIns::find()) else { return };
    let mut run = start(&lab, &devices, kind);
    run.signal(Signal::SIGUSR1);
    run.wait_said("snapshot failed");
    assert!(run.err().contains(why), "{}", run.err());
    assert!(lab.good().is_empty());
    count_on(&lab, &mut run, 3);
    finish(&lab, run);
}

#[test]
fn one_that_uses_them_is_refused() {
    is_refused("devices-mapped", "process 1001 (python3) has NVIDIA devices open: either it is just starting CUDA");
}

#[test]
fn one_that_just_begins_has_the_snapshot_tried_again_at_once() {
    let (Some(lab), Some(devices)) = (Lab::new(), StandIns::find()) else { return };
    let lab = lab.noting_the_first_dump("tried");
    let mut run = start(&lab, &devices, "devices-of-a-child");
    run.signal(Signal::SIGUSR1);
    let again = "trying the snapshot again: dump: process 1002 (python3) has NVIDIA devices open";
    run.wait_said(again);
    run.wait_for("an image", || lab.good() == [1]);
    // On a busy machine the process may begin longer than it is tried at once.
    let said = run.err();
    assert!(said.find("snapshot failed").is_none_or(|at| said.find(again) < Some(at)), "{said}");
    finish(&lab, run);
}

#[test]
fn one_that_uses_opencl_is_refused_with_the_library_and_what_helps() {
    is_refused("devices-hwloc", "it uses the GPU without CUDA, by OpenCL (libnvidia-opencl.so.1)");
    is_refused("devices-hwloc", "set HWLOC_COMPONENTS=-opencl in the job's environment");
}

#[test]
fn a_device_that_is_not_nvidias_is_refused() {
    is_refused("devices-other", "Can't dump file");
}

use crate::samples::job_path;
use std::path::PathBuf;

use super::*;
use crate::parts::gpu::placement::{Device, Devices, Health, Wishes};
use crate::samples::manifest as sample_manifest;
use rekindle_criu::Version;
use rekindle_cuda::GpuUuid;
use rekindle_store::manifest::{Gpu, MappedFile};

const PROGRAM: &str = "/opt/job/program";

const GIB: u64 = 1 << 30;

fn gpu(name: &str, byte: u8) -> Gpu {
    Gpu { uuid: GpuUuid::from_bytes([byte; 16]).to_string(), name: name.into() }
}

/// These GPUs, with half of their memory free.
fn devices<const N: usize>(all: [(&str, u8); N]) -> Devices {
    let device = |(name, byte): (&str, u8)| {
        let (uuid, name) = (GpuUuid::from_bytes([byte; 16]), name.to_owned());
        Device {
            uuid,
            name,
            index: None,
            free: Some(70 * GIB),
            total: Some(140 * GIB),
            health: Health::Fine,
            is_shared: false,
        }
    };
    Devices { all: all.map(device).into(), asked: true, too_old: false }
}

/// An image of a CUDA job with one mapped file, and the machine that it was made on.
fn image() -> (Manifest, Here) {
    let mut manifest = sample_manifest();
    manifest.host.kernel = "6.8.0-45-generic".into();
    manifest.host.cpu_flags = ["fpu", "avx2", "avx512f", "tsc_reliable", "arch_perfmon"].map(String::from).into();
    manifest.criu = "4.2.1".into();
    manifest.tree.cuda = vec![2];
    manifest.driver = Some("580.159.04".into());
    manifest.gpus = vec![gpu("NVIDIA H200", 0xa), gpu("NVIDIA H200", 0xb)];
    let build_id = Some("0123abcd".to_string());
    let file = MappedFile {
        path: job_path(PROGRAM),
        size: 1000,
        mode: Some(0o100_755),
        build_id: build_id.clone(),
        owner: None,
        copy: None,
    };
    manifest.mapped_files = vec![file];
    let now = FileHere::File { size: 1000, mode: 0o100_755, owner: 0, build_id };
    let here = Here {
        host: manifest.host.clone(),
        pid_max: Some(32768),
        criu: Some(Version(4, 2, 1)),
        driver: manifest.driver.clone(),
        devices: devices([("NVIDIA H200", 0xa), ("NVIDIA H200", 0xb)]),
        wishes: Wishes::default(),
        files: [(PathBuf::from(PROGRAM), now)].into(),
    };
    (manifest, here)
}

/// The difference that a change of this machine makes, if it is exactly one.
fn only(change: impl FnOnce(&mut Here)) -> Option<(Severity, String)> {
    let (manifest, mut here) = image();
    change(&mut here);
    let mut all = compare(&manifest, &here);
    assert!(all.len() <= 1, "{all:#?}");
    all.pop().map(|difference| (difference.severity, difference.to_string()))
}

fn fatal(words: &[&str], change: impl FnOnce(&mut Here)) {
    said(Severity::Fatal, words, change);
}

fn warning(words: &[&str], change: impl FnOnce(&mut Here)) {
    said(Severity::Warning, words, change);
}

fn said(severity: Severity, words: &[&str], change: impl FnOnce(&mut Here)) {
    let (is, text) = only(change).unwrap();
    assert_eq!(is, severity, "{text}");
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn the_machine_of_the_image_and_a_better_one_fit() {
    assert_eq!(only(|_| {}), None);
    assert_eq!(
        only(|here| {
            here.host.name = "other".into();
            here.host.boot_id = "another".into();
            here.host.cpu_model = "newer".into();
            here.host.kernel = "6.9.1".into();
            here.host.cpu_flags.push("amx_tile".into());
            here.criu = Some(Version(4, 3, 0));
            here.devices = devices([("NVIDIA H100", 0xc), ("NVIDIA H200", 0xa), ("NVIDIA H200", 0xb)]);
        }),
        None
    );
}

#[test]
fn missing_instructions_are_fatal_and_named() {
    let lose = |flag: &'static str| move |here: &mut Here| here.host.cpu_flags.retain(|f| f != flag);
    fatal(&["CPU features: the image has avx512f (cpu)", "cpu without"], lose("avx512f"));
    fatal(&["CPU features: the image has avx2 (cpu)"], lose("avx2"));
    assert_eq!(only(lose("tsc_reliable")), None);
    assert_eq!(only(lose("arch_perfmon")), None);
    // An unknown fact is no difference.
    assert_eq!(only(|here| here.host.cpu_flags.clear()), None);
}

#[test]
fn only_instructions_count_among_the_flags() {
    for flag in ["avx", "avx512_bf16", "avx10_2", "amx_fp16", "sse4a", "ssse3", "bmi2", "vaes", "rtm", "f16c", "fma"] {
        assert!(cpu::is_instruction(flag), "{flag}");
    }
    for flag in [
        "nopl",
        "xtopology",
        "tsc_reliable",
        "constant_tsc",
        "arch_perfmon",
        "md_clear",
        "ibrs",
        "ssbd",
        "hypervisor",
        "vmx",
        "smep",
        "erms",
        "ht",
        "pti",
        "rep_good",
        "cpuid",
        "la57",
        "hle",
        "arat",
        "umip",
        "x2apic",
        "cqm",
        "hwp",
    ] {
        assert!(!cpu::is_instruction(flag), "{flag}");
    }
}

#[test]
fn another_architecture_is_fatal_and_said_once() {
    fatal(&["CPU architecture: the image has x86_64, this machine has aarch64"], |here| {
        here.host.arch = "aarch64".into();
        here.host.cpu_flags = vec!["asimd".into()];
    });
}

#[test]
fn an_older_criu_is_fatal_and_an_older_kernel_is_not() {
    fatal(&["CRIU: the image has 4.2.1, this machine has 4.2.0", "install CRIU 4.2.1 or newer"], |here| {
        here.criu = Some(Version(4, 2, 0));
    });
    assert_eq!(only(|here| here.criu = None), None);
    warning(&["kernel: the image has 6.8.0-45-generic, this machine has 5.15.0"], |here| {
        here.host.kernel = "5.15.0".into()
    });
    assert_eq!(only(|here| here.host.kernel = "6.8.0-40-generic".into()), None, "within a release");
}

#[test]
fn the_driver_is_needed_and_another_version_may_not_do() {
    fatal(&["NVIDIA driver: the image has 580.159.04, this machine has none"], |here| {
        here.driver = None;
        here.devices = Devices::default();
    });
    fatal(&["this machine has 550.54.14", "older than 570"], |here| here.driver = Some("550.54.14".into()));
    for other in ["570.86.15", "590.10.01"] {
        warning(&["NVIDIA driver", other], |here| here.driver = Some(other.into()));
    }
}

#[test]
fn the_gpus_are_needed_or_others_of_their_type() {
    let words = ["NVIDIA H200 GPU-0a0a0a0a", "this machine has NVIDIA H100 GPU-0c0c0c0c", "restore the image on node"];
    fatal(&words, |here| here.devices = devices([("NVIDIA H100", 0xc)]));
    fatal(&["restore the image on node"], |here| here.devices = devices([("NVIDIA H200", 0xc)]));
    assert_eq!(only(|here| here.devices = devices([("NVIDIA H200", 0xc), ("NVIDIA H200", 0xd)])), None);
    // The missing GPU may not be one that the job used.
    let one = || devices([("NVIDIA H200", 0xa)]);
    let words = ["the image has NVIDIA H200 GPU-0b0b0b0b", "this machine has NVIDIA H200 GPU-0a0a0a0a"];
    warning(&words, |here| here.devices = one());
    fatal(&["this machine has none"], |here| here.devices = devices([]));
    // Without NVML, existing GPUs may not be listed.
    warning(&["this machine has none"], |here| here.devices = Devices::default());
    let (mut manifest, mut here) = image();
    manifest.tree.cuda_memory = [(2, [(gpu("", 0xa).uuid, 70 * GIB)].into())].into();
    here.devices = one();
    let all = compare(&manifest, &here);
    assert!(all.len() == 1 && all[0].is_fatal() && all[0].advice.contains("for each of the 2"), "{all:?}");
    here.devices = devices([("NVIDIA H200", 0xa), ("NVIDIA H200", 0xd)]);
    assert_eq!(compare(&manifest, &here), [], "it is known that it did not use the one that is gone");
    manifest.tree.cuda_memory = [(2, [(gpu("", 0xa).uuid, 71 * GIB)].into())].into();
    assert_eq!(compare(&manifest, &here), [], "it is busy, which may pass");
    manifest.tree.cuda_memory = [(2, [(gpu("", 0xa).uuid, 141 * GIB)].into())].into();
    let all = compare(&manifest, &here);
    assert!(all.len() == 1 && all[0].is_fatal() && all[0].image.contains("141.0 GiB"), "{all:?}");
}

#[test]
fn a_job_without_cuda_needs_no_gpu() {
    let (mut manifest, mut here) = image();
    manifest.tree.cuda.clear();
    (here.driver, here.devices) = (None, Devices::default());
    assert_eq!(compare(&manifest, &here), []);
}

#[test]
fn files_must_be_what_they_were() {
    let now = |file: FileHere| move |here: &mut Here| drop(here.files.insert(PROGRAM.into(), file));
    let file = |size, mode, id: Option<&str>| FileHere::File { size, mode, owner: 0, build_id: id.map(str::to_owned) };
    fatal(&[PROGRAM, "the image has it, this machine has no file of that name"], now(FileHere::Missing));
    fatal(&["this machine has something else"], now(FileHere::NotAFile));
    fatal(&["1000 bytes", "one of 1001 bytes"], now(file(1001, 0o100_755, Some("0123abcd"))));
    fatal(&["mode 755, this machine has mode 644"], now(file(1000, 0o100_644, Some("0123abcd"))));
    fatal(&["build 0123abcd, this machine has build ffff0000"], now(file(1000, 0o100_755, Some("ffff0000"))));
    // CRIU does not complain in this case either.
    assert_eq!(only(now(file(1000, 0o100_755, None))), None);
    assert_eq!(only(now(FileHere::Unknown)), None);
    assert_eq!(only(|here| here.files.clear()), None);
}

#[test]
fn a_library_of_another_user_is_refused() {
    use rekindle_store::manifest::{JobRights, Owner};
    let (mut manifest, mut here) = image();
    let (alice, bob, carol) = (65_534, 1, 2);
    let compared = |manifest: &Manifest, here: &Here| {
        compare(manifest, here).into_iter().map(|found| found.to_string()).collect::<Vec<_>>()
    };
    let by = |owner| FileHere::File { size: 1000, mode: 0o100_755, owner, build_id: Some("0123abcd".into()) };
    let link = FileHere::Link { link: "/opt/job".into(), owner: bob };
    // An earlier version recorded no owner.
    here.files.insert(PROGRAM.into(), by(bob));
    assert_eq!(compared(&manifest, &here), [""; 0]);
    manifest.rights = Some(JobRights { uid: alice, groups: vec![], no_new_privileges: false, filtered: false });
    manifest.mapped_files[0].owner = Some(Owner { uid: carol, gid: carol });
    for owner in [0, alice, carol] {
        here.files.insert(PROGRAM.into(), by(owner));
        assert_eq!(compared(&manifest, &here), [""; 0], "{owner}");
    }
    here.files.insert(PROGRAM.into(), by(bob));
    let text = compared(&manifest, &here).concat();
    assert!(text.contains("one of user bin, this machine has one of user daemon; somebody may have"), "{text}");
    assert!(compare(&manifest, &here)[0].is_fatal() && compare(&manifest, &here)[0].is_a_file());
    here.files.insert(PROGRAM.into(), link);
    let text = compared(&manifest, &here).concat();
    assert!(text.contains("this machine has /opt/job, a symbolic link of user daemon; rekindle follows"), "{text}");
}

#[test]
fn owners_and_links_are_those_of_this_machine() {
    use rekindle_store::manifest::{JobRights, Owner};
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (folder, link) = (dir.path().join("app"), dir.path().join("link"));
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("lib.so"), "bob's").unwrap();
    std::os::unix::fs::symlink(&folder, &link).unwrap();
    for path in [&folder.join("lib.so"), &link] {
        std::os::unix::fs::lchown(path, Some(1), Some(1)).unwrap();
    }
    let (mut manifest, _) = image();
    manifest.tree.cuda.clear();
    manifest.rights = Some(JobRights { uid: 0, groups: vec![], no_new_privileges: false, filtered: false });
    let owner = Some(Owner { uid: 0, gid: 0 });
    let file = |folder: &std::path::Path| MappedFile {
        path: job_path(folder.join("lib.so")),
        size: 5,
        mode: None,
        build_id: None,
        owner,
        copy: None,
    };
    manifest.mapped_files = vec![file(&folder), file(&link)];
    let here = Here::look(&manifest, None, &Wishes::default());
    assert!(matches!(here.files[&folder.join("lib.so")], FileHere::File { owner: 1, .. }), "{:?}", here.files);
    assert_eq!(here.files[&link.join("lib.so")], FileHere::Link { link, owner: 1 });
}

#[test]
fn the_worst_comes_first_and_a_summary_is_bounded() {
    let (mut manifest, mut here) = image();
    here.host.kernel = "5.15.0".into();
    for n in 0..12 {
        let path = PathBuf::from(format!("/lib/{n}"));
        manifest.mapped_files.push(MappedFile {
            path: job_path(path.clone()),
            size: 1,
            mode: None,
            build_id: None,
            owner: None,
            copy: None,
        });
        here.files.insert(path, FileHere::Missing);
    }
    let all = compare(&manifest, &here);
    assert_eq!((all.len(), all[12].what.as_str()), (13, "kernel"));
    let text = summary(&all);
    assert!(text.ends_with("| and 2 more (`rekindle show` lists all)") && !text.contains("kernel"), "{text}");
    assert_eq!(text.matches("this machine has no file of that name").count(), 10);
}

#[test]
fn facts_are_those_of_this_machine() {
    let (mut manifest, _) = image();
    manifest.tree.cuda.clear();
    let this = std::env::current_exe().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |path: PathBuf| MappedFile {
        path: job_path(path),
        size: 0,
        mode: None,
        build_id: Some(String::new()),
        owner: None,
        copy: None,
    };
    let gone = folder.path().join("gone");
    manifest.mapped_files = [this.clone(), folder.path().into(), gone.clone()].map(file).into();
    let here = Here::look(&manifest, None, &Wishes::default());
    let size = std::fs::metadata(&this).unwrap().len();
    assert!(matches!(&here.files[&this], FileHere::File { size: s, .. } if *s == size), "{:?}", here.files);
    assert_eq!(here.files[folder.path()], FileHere::NotAFile);
    assert_eq!(here.files[&gone], FileHere::Missing);
    assert!(!here.host.kernel.is_empty() && here.devices.all.is_empty());
}

#[test]
fn pids_above_the_limit_of_an_older_kernel_are_fatal() {
    let (mut manifest, mut here) = image();
    manifest.tree.ids = vec![1, 40_000, 2];
    let differences = compare(&manifest, &here);
    let [difference] = &differences[..] else { panic!("{differences:#?}") };
    assert!(difference.is_fatal());
    let text = difference.to_string();
    assert!(
        text.contains("the pid 40000") && text.contains("kernel.pid_max = 32768; run `sysctl kernel.pid_max=4194304`"),
        "{text}"
    );
    for (kernel, fits) in [("6.13.9", false), ("6.14.0-rc1", true), ("odd", true)] {
        (manifest.host.kernel, here.host.kernel) = (kernel.into(), kernel.into());
        assert_eq!(compare(&manifest, &here).is_empty(), fits, "{kernel}");
    }
    here.pid_max = Some(40_001);
    here.host.kernel = manifest.host.kernel.clone();
    assert_eq!(compare(&manifest, &here), []);
}

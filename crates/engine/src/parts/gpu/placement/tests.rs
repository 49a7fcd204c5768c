use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::samples::{manifest as sample_manifest, part_path};
use rekindle_store::ImageId;
use rekindle_store::manifest::{Gpu, Kept};

const GIB: u64 = 1 << 30;
const H200: &str = "NVIDIA H200";

fn uuid(byte: u8) -> GpuUuid {
    GpuUuid::from_bytes([byte; 16])
}

/// An image of a job that could see these GPUs and used so many GiB of each.
fn image(gpus: &[(&str, u8, u64)]) -> Manifest {
    let mut manifest = sample_manifest();
    manifest.tree.cuda = vec![1001];
    manifest.gpus =
        gpus.iter().map(|(name, byte, _)| Gpu { uuid: uuid(*byte).to_string(), name: (*name).into() }).collect();
    let used = gpus.iter().filter(|(.., gib)| *gib > 0).map(|(_, byte, gib)| (uuid(*byte).to_string(), gib * GIB));
    manifest.tree.cuda_memory = BTreeMap::from([(1001, used.collect())]);
    manifest
}

fn device(name: &str, byte: u8, free: u64) -> Device {
    let (free, total) = (Some(free * GIB), Some(140 * GIB));
    Device { uuid: uuid(byte), name: name.into(), index: None, free, total, health: Health::Fine, is_shared: false }
}

fn here(all: &[Device]) -> Devices {
    let all = all.iter().zip(0..).map(|(device, index)| Device { index: Some(index), ..device.clone() });
    Devices { all: all.collect(), asked: true, too_old: false }
}

fn automatic(manifest: &Manifest, all: &[Device]) -> Plan {
    plan(manifest, &here(all), &Wishes::default())
}

fn asked(manifest: &Manifest, all: &[Device], map: &str) -> Plan {
    let map = map.split(',').map(|pair| pair.parse().unwrap()).collect();
    plan(manifest, &here(all), &Wishes { map, ..Wishes::default() })
}

/// The pairs by their first bytes, and why each moved.
fn moves(plan: Plan) -> (Vec<(u8, u8)>, Vec<String>) {
    let Plan::Move(relocation) = plan else { panic!("{plan:?}") };
    let byte = |pair: &GpuMapping| (pair.old.bytes()[0], pair.new.bytes()[0]);
    (relocation.pairs.iter().map(byte).collect(), relocation.moved.into_iter().map(|moved| moved.why).collect())
}

fn stays(plan: &Plan) -> bool {
    matches!(plan, Plan::Stay { in_spite_of } if in_spite_of.is_empty())
}

/// NVML may have been asked while it was released.
#[test]
fn memory_that_stayed_on_the_gpu_needs_room_although_nvml_did_not_see_it() {
    let mut job = image(&[(H200, 1, 1), (H200, 2, 0)]);
    let gib = |gib, gpu| KeptPiece { pid: 1001, index: 0, offset: 0, bytes: gib * GIB, gpu: Some(gpu) };
    job.kept = Some(Kept { part: part_path("gpu/kept"), pieces: vec![gib(16, 0), gib(2, 0)] });
    let free = [device(H200, 1, 10), device(H200, 2, 100)];
    assert_eq!(moves(automatic(&job, &free)).0, [(1, 2), (2, 1)]);
    job.kept = Some(Kept { part: part_path("gpu/kept"), pieces: vec![gib(8, 0), gib(30, 1)] });
    assert!(stays(&automatic(&job, &free)));
}

#[test]
fn with_room_where_it_was_nothing_is_asked_of_the_driver() {
    let job = image(&[(H200, 1, 18), (H200, 2, 0)]);
    let (first, second) = (device(H200, 1, 18), device(H200, 2, 0));
    assert!(stays(&automatic(&job, &[first.clone(), second.clone()])));
    assert!(stays(&automatic(&job, &[second, device(H200, 3, 140), first.clone()])));
    let Plan::Refuse(why) = automatic(&job, std::slice::from_ref(&first)) else { panic!("the driver wants both") };
    assert!(why.to_string().contains("for each of the 2 GPUs that the job could see"), "{why}");
    let third = device(H200, 3, 140);
    assert_eq!(moves(automatic(&job, &[first, third])), (vec![(1, 1), (2, 3)], vec![]));
}

#[test]
fn one_that_is_gone_busy_faulty_or_silent_is_left_for_another_of_its_type() {
    let job = image(&[(H200, 1, 18), (H200, 2, 0)]);
    let (first, second) = (device(H200, 1, 140), device(H200, 2, 140));
    let swap = vec![(1, 2), (2, 1)];
    let left = |change: &dyn Fn(&mut Device)| {
        let mut changed = first.clone();
        change(&mut changed);
        moves(automatic(&job, &[changed, second.clone()]))
    };
    assert_eq!(left(&|d| d.free = Some(17 * GIB)), (swap.clone(), vec!["it has 17.0 GiB free".into()]));
    let (pairs, why) = left(&|d| d.health = Health::Faulted(95));
    assert!(pairs == swap && why[0].starts_with("it had Xid 95 (a memory error"), "{why:?}");
    assert_eq!(left(&|d| d.health = Health::Silent).0, swap);
    assert_eq!(left(&|d| d.health = Health::Part).0, swap);
    let third = device(H200, 3, 30);
    assert_eq!(
        moves(automatic(&job, &[second.clone(), third])),
        (vec![(1, 2), (2, 3)], vec!["it is not on this machine".into()])
    );
    // A GPU of another type does not fit.
    assert!(matches!(automatic(&job, &[device("NVIDIA H100", 3, 80), second.clone()]), Plan::Refuse(_)));
    let silent = Device { health: Health::Silent, ..first };
    let plan = automatic(&job, &[silent, second]);
    assert!(matches!(plan, Plan::Move(Relocation { unproven: true, for_room: false, .. })));
}

#[test]
fn what_only_waits_for_room_is_told_from_what_never_has_any() {
    let job = image(&[(H200, 1, 18)]);
    let Plan::Wait(why) = automatic(&job, &[device(H200, 1, 3)]) else { panic!() };
    let text = why.to_string();
    assert!(
        text.contains("18.0 GiB for what was on NVIDIA H200 GPU-0101") && text.contains("has 3.0 GiB free"),
        "{text}"
    );
    let small = Device { total: Some(16 * GIB), ..device(H200, 1, 16) };
    assert!(matches!(automatic(&job, &[small]), Plan::Refuse(_)));
    let Plan::Refuse(why) = automatic(&job, &[device("NVIDIA H100", 3, 80)]) else { panic!() };
    assert!(why.to_string().contains("restore the image on node"), "{why}");
    let Plan::Refuse(why) = automatic(&job, &[]) else { panic!() };
    assert!(why.to_string().contains("this machine has none"), "{why}");
    let busy = automatic(&job, &[device(H200, 1, 3), device(H200, 2, 100)]);
    assert!(matches!(busy, Plan::Move(Relocation { for_room: true, .. })), "{busy:?}");
}

#[test]
fn an_old_driver_moves_nothing() {
    let job = image(&[(H200, 1, 18), (H200, 2, 0)]);
    let old = |first| {
        let here = Devices { too_old: true, ..here(&[first, device(H200, 2, 140)]) };
        plan(&job, &here, &Wishes::default())
    };
    assert!(stays(&old(device(H200, 1, 18))));
    let Plan::Wait(why) = old(device(H200, 1, 3)) else { panic!() };
    assert!(why.to_string().contains("only driver 580 or newer"), "{why}");
    assert!(matches!(old(device(H200, 3, 140)), Plan::Refuse(_)));
}

#[test]
fn a_fault_is_got_over_where_there_is_no_other() {
    let job = image(&[(H200, 1, 18)]);
    let faulted = Device { health: Health::Faulted(48), ..device(H200, 1, 140) };
    let plan = automatic(&job, std::slice::from_ref(&faulted));
    assert!(matches!(&plan, Plan::Stay { in_spite_of } if in_spite_of[0].contains("Xid 48")), "{plan:?}");
    assert_eq!(moves(automatic(&job, &[faulted, device(H200, 2, 140)])).0, [(1, 2)]);
}

#[test]
fn one_makes_room_for_another_where_there_is_no_other_way() {
    let job = image(&[(H200, 1, 10), (H200, 2, 50)]);
    let (pairs, why) = moves(automatic(&job, &[device(H200, 1, 100), device(H200, 3, 20)]));
    assert_eq!(pairs, [(1, 3), (2, 1)]);
    assert_eq!(why, ["another GPU of the job needs its place", "it is not on this machine"]);
}

#[test]
fn without_knowledge_of_what_was_used_it_stays_while_one_is_here() {
    let mut job = image(&[(H200, 1, 18), (H200, 2, 18)]);
    job.tree.cuda_memory.clear();
    let (first, second) = (device(H200, 1, 0), device(H200, 2, 0));
    assert!(stays(&automatic(&job, &[first.clone(), second])), "as ever: nothing is known of room");
    assert!(stays(&automatic(&job, std::slice::from_ref(&first))), "it may have used that one only");
    assert_eq!(moves(automatic(&job, &[first, device(H200, 3, 140)])).0, [(1, 1), (2, 3)]);
    assert!(matches!(automatic(&job, &[device(H200, 3, 140)]), Plan::Refuse(_)));
    // Without NVML nothing is moved.
    let unseen = Devices { asked: false, ..here(&[device(H200, 3, 140)]) };
    assert!(stays(&plan(&image(&[(H200, 1, 18)]), &unseen, &Wishes::default())));
}

#[test]
fn a_map_is_followed_and_completed() {
    let job = image(&[(H200, 1, 18), (H200, 2, 0), (H200, 3, 10)]);
    let all = [device(H200, 1, 140), device(H200, 2, 140), device(H200, 3, 140)];
    let (pairs, why) = moves(asked(&job, &all, "0=1"));
    assert_eq!((pairs, why), (vec![(1, 2), (2, 1), (3, 3)], vec!["asked for".into()]));
    let by_uuid = format!("{}={}", uuid(1), uuid(3));
    assert_eq!(moves(asked(&job, &all, &by_uuid)).0, [(1, 3), (2, 2), (3, 1)]);
    assert_eq!(moves(asked(&job, &all, "0=1,1=2,2=0")).0, [(1, 2), (2, 3), (3, 1)]);
    assert!(stays(&asked(&job, &all, "0=0,2=2")), "as it would be anyway");
    let faulted = [all[0].clone(), Device { health: Health::Faulted(48), ..all[1].clone() }, all[2].clone()];
    assert_eq!(moves(asked(&job, &faulted, "0=1")).0, [(1, 2), (2, 1), (3, 3)], "whoever asks for it gets it");
}

#[test]
fn a_map_is_for_the_images_that_were_there() {
    let mut job = image(&[(H200, 1, 18), (H200, 2, 0)]);
    let all = here(&[device(H200, 1, 140), device(H200, 2, 140)]);
    let until = Some(ImageId::new(4, chrono::DateTime::UNIX_EPOCH));
    let wishes = Wishes { map: vec!["0=1".parse().unwrap()], until, ..Wishes::default() };
    job.id = ImageId::new(4, chrono::DateTime::UNIX_EPOCH);
    assert!(matches!(plan(&job, &all, &wishes), Plan::Move(_)));
    job.id = ImageId::new(5, chrono::DateTime::UNIX_EPOCH);
    assert!(stays(&plan(&job, &all, &wishes)));
}

#[test]
fn bad_maps_are_refused_with_the_reason() {
    let job = image(&[(H200, 1, 18), (H200, 2, 0)]);
    let all = [device(H200, 1, 140), device(H200, 2, 140), device("NVIDIA H100", 3, 80), device(H200, 4, 3)];
    let mut parted = all.clone();
    parted[1].health = Health::Part;
    let unseen = format!("{}=1", uuid(9));
    for (all, map, words) in [
        (&all, "5=1", "had no GPU 5 at the snapshot"),
        (&all, unseen.as_str(), "had no GPU GPU-0909"),
        (&all, "0=7", "this machine has no GPU 7"),
        (&all, "0=1,0=3", "GPU 0 is named twice"),
        (&all, "0=1,1=1", "GPU 1 can replace only one GPU"),
        (&all, "0=2", "of type \"NVIDIA H200\" and 2 of type \"NVIDIA H100\""),
        (&parted, "0=1", "divided or virtual"),
    ] {
        let Plan::Refuse(why) = asked(&job, all, map) else { panic!("{map}") };
        assert!(why.to_string().contains(words), "{map}: {why}");
    }
    let Plan::Wait(why) = asked(&job, &all, "0=3") else { panic!() };
    assert!(why.to_string().contains("has 3.0 GiB free"), "{why}");
    for (bad, words) in [
        ("0", "must be OLD=NEW"),
        ("0=", "32 hexadecimal digits"),
        ("0=MIG-00112233-4455-6677-8899-aabbccddeeff", "divided GPU (MIG)"),
        ("0=GPU-1", "or a GPU number of nvidia-smi"),
    ] {
        let error = bad.parse::<Pair>().unwrap_err().to_string();
        assert!(error.contains(words), "{bad}: {error}");
    }
}

#[test]
fn what_the_job_itself_has_is_room_for_it() {
    let gpu = rekindle_cuda::nvml::Gpu {
        uuid: uuid(1),
        name: Some(H200.into()),
        index: Some(0),
        pci: Some("00000000:3B:00.0".into()),
        memory_total: Some(140 * GIB),
        memory_used: Some(130 * GIB),
        memory_free: Some(10 * GIB),
        mig: Mig::Off,
        is_virtual: false,
    };
    let used_by_pid = Some([(7, [(uuid(1), 100 * GIB)].into()), (8, [(uuid(1), 30 * GIB)].into())].into());
    let inventory = GpuInventory { driver: Some("580.159.04".into()), gpus: vec![gpu], used_by_pid };
    let with = |leaving, faults| {
        let devices = Devices::of(&inventory, &Wishes { leaving, faults, ..Wishes::default() });
        assert!(devices.asked && !devices.too_old);
        (devices.all[0].free, devices.all[0].health, devices.all[0].is_shared)
    };
    assert_eq!(with(vec![], vec![]), (Some(10 * GIB), Health::Fine, true));
    assert_eq!(with(vec![7, 9], vec![("0000:3b:00".into(), 79)]), (Some(110 * GIB), Health::Faulted(79), true));
    assert_eq!(with(vec![7, 8], vec![]), (Some(140 * GIB), Health::Fine, false));
}

#[test]
fn one_that_nobody_else_uses_is_taken_before_one_with_more_free_memory() {
    let job = image(&[(H200, 1, 18)]);
    let faulted = Device { health: Health::Faulted(95), ..device(H200, 1, 140) };
    let shared = Device { is_shared: true, ..device(H200, 2, 130) };
    let all = [faulted.clone(), shared.clone(), device(H200, 3, 20), device(H200, 4, 30)];
    assert_eq!(moves(automatic(&job, &all)).0, [(1, 4)]);
    // One that others use is better than none.
    assert_eq!(moves(automatic(&job, &[faulted, shared.clone(), device(H200, 3, 10)])).0, [(1, 2)]);
    // A job stays beside others.
    assert!(stays(&automatic(&job, &[Device { uuid: uuid(1), ..shared }, device(H200, 3, 140)])));
}

#[test]
fn faults_find_their_gpu_by_uuid_or_address() {
    assert!(is_same_address("00000000:3B:00.0", "0000:3b:00"));
    assert!(is_same_address("0000:3b:00.0", "0000:3b:00"));
    assert!(!is_same_address("00000000:3B:00.0", "0000:3c:00"));
    assert!(!is_same_address("00000001:3B:00.0", "0000:3b:00"));
    assert!(!is_same_address("a GPU", "a GPU"));
}

/// Up to five GPUs of the image, by memory used, and up to six GPUs of the machine: first byte of the UUID, memory,
/// health.
fn cases() -> impl Strategy<Value = (Vec<u64>, Vec<(u8, u64, u8)>)> {
    let needs = prop::collection::vec(prop_oneof![Just(0), 1..6u64], 1..5);
    let devices = prop::collection::hash_map(1..8u8, (0..6u64, 0..8u8), 0..6);
    (needs, devices.prop_map(|all| all.into_iter().map(|(byte, (room, health))| (byte, room, health)).collect()))
}

/// Whether each can get a GPU of its own, found by trying all.
fn possible(needs: &[u64], fits: &dyn Fn(usize, usize) -> bool, devices: usize, taken: &mut Vec<usize>) -> bool {
    let at = taken.len();
    if at == needs.len() {
        return true;
    }
    if needs[at] == 0 {
        taken.push(usize::MAX);
        let found = possible(needs, fits, devices, taken);
        taken.pop();
        return found;
    }
    (0..devices).any(|device| {
        if taken.contains(&device) || !fits(at, device) {
            return false;
        }
        taken.push(device);
        let found = possible(needs, fits, devices, taken);
        taken.pop();
        found
    })
}

proptest! {
    #[test]
    fn pairs_are_total_injective_and_have_room((needs, all) in cases()) {
        let gpus: Vec<(&str, u8, u64)> = needs.iter().zip(1..).map(|(need, byte)| (H200, byte, *need)).collect();
        let job = image(&gpus);
        let devices: Vec<Device> = all
            .iter()
            .map(|(byte, room, health)| Device {
                health: match health { 0 => Health::Silent, 1 => Health::Part, 2 => Health::Faulted(48), _ => Health::Fine },
                ..device(H200, *byte, *room)
            })
            .collect();
        let usable = |at: usize, to: usize, faults: bool| {
            let device = &devices[to];
            let well = match device.health { Health::Fine => true, Health::Faulted(_) => faults, _ => false };
            well && device.free >= Some(needs[at] * GIB)
        };
        let solvable = |faults| possible(&needs, &|at, to| usable(at, to, faults), devices.len(), &mut Vec::new());
        let well = |at: usize| {
            let own = devices.iter().position(|device| device.uuid == uuid(gpus[at].1));
            needs[at] == 0 || own.is_some_and(|own| usable(at, own, false))
        };
        match automatic(&job, &devices) {
            Plan::Stay { in_spite_of } => {
                prop_assert!(in_spite_of.is_empty() == (0..needs.len()).all(well));
                prop_assert!(in_spite_of.is_empty() || !solvable(false));
            }
            Plan::Move(relocation) => {
                let is_here = |at: usize| devices.iter().any(|device| device.uuid == uuid(gpus[at].1));
                prop_assert!(!(0..needs.len()).all(|at| well(at) && is_here(at)), "nothing had to change");
                prop_assert_eq!(relocation.pairs.len(), needs.len());
                let news: HashSet<GpuUuid> = relocation.pairs.iter().map(|pair| pair.new).collect();
                prop_assert_eq!(news.len(), needs.len());
                for (at, pair) in relocation.pairs.iter().enumerate() {
                    prop_assert_eq!(pair.old, uuid(gpus[at].1));
                    if needs[at] > 0 {
                        let to = devices.iter().position(|device| device.uuid == pair.new).unwrap();
                        prop_assert!(usable(at, to, !solvable(false)));
                    }
                }
                // If the others can be placed without moving those that can stay, none of those moves.
                let fits = |at: usize, to: usize| {
                    let own = devices[to].uuid == uuid(gpus[at].1);
                    usable(at, to, false) && (own || !well(at))
                };
                if possible(&needs, &fits, devices.len(), &mut Vec::new()) {
                    for (at, pair) in relocation.pairs.iter().enumerate().filter(|(at, _)| needs[*at] > 0) {
                        prop_assert!(!well(at) || pair.old == pair.new);
                    }
                }
            }
            Plan::Wait(_) | Plan::Refuse(_) => {
                // The plan may only fail for lack of a GPU for one that was not used.
                let enough = devices.len() >= needs.len();
                prop_assert!(!solvable(true) || !enough);
            }
        }
    }
}

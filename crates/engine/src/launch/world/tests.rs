use std::collections::BTreeMap;

use super::*;
use rekindle_os::clock::since_boot;

fn outer_parent(pid: i32) -> Option<i32> {
    process::status(pid, "PPid")?.parse().ok()
}

#[test]
fn a_world_counts_pids_from_where_it_is_told_and_ends_with_all_in_it() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let reaper = crate::launch::reaper::unpack(dir.path()).unwrap();
    let world = World::new(&reaper, FIRST_PID - 1, Network::Host).unwrap();
    let init = world.init().pid();
    assert_eq!(process::inner_pid(init), Some(1));
    // Init reports that it is ready, and closes the pipe a moment later.
    let descriptors = || std::fs::read_dir(format!("/proc/{init}/fd")).unwrap().count();
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while descriptors() > 0 {
        assert!(std::time::Instant::now() < deadline, "init holds {} of ours open", descriptors());
        std::thread::sleep(Duration::from_millis(1));
    }

    // A shell that leaves a grandchild behind, which becomes a child of init.
    let script = "sleep 60 & exit 7";
    let spawn = Spawn::new(Path::new("/bin/sh"), ["-c", script]).unwrap().world(world.entrance().unwrap());
    let child = spawn.start().unwrap();
    assert_eq!(process::inner_pid(child.pid()).unwrap_or(FIRST_PID), FIRST_PID);
    assert_eq!(child.wait().unwrap(), Ended::Exit(7));
    let orphan = process::children(init).first().copied().unwrap();
    assert_eq!(outer_parent(orphan), Some(init));

    let root = Spawn::new(Path::new("/bin/sleep"), ["60"]).unwrap().world(world.entrance().unwrap()).start().unwrap();
    assert_eq!(world.end(Some(&root)), Some(Ended::Signal(libc::SIGKILL)));
    for pid in [init, orphan, root.pid()] {
        assert!(!Path::new(&format!("/proc/{pid}")).exists(), "{pid} is left");
    }
    let late = Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap().world(world.entrance().unwrap()).start();
    assert!(matches!(late, Err(spawn::Error::Fork { .. })), "nothing can enter a world that has ended");
}

#[test]
fn a_world_with_a_fence_ends_when_it_is_reached_and_not_before() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let reaper = crate::launch::reaper::unpack(dir.path()).unwrap();
    let plan = group::Plan {
        subnet: group::Subnet::default(),
        rank: 0,
        size: 1,
        kind: group::Kind::Bridge { name: format!("rkf{}", std::process::id() % 100_000) },
        mtu: None,
        peers: BTreeMap::new(),
        names: BTreeMap::new(),
        directory: dir.path().to_owned(),
    };
    let bridge = |verb: &str| {
        let group::Kind::Bridge { name } = &plan.kind else { unreachable!() };
        let kind: &[&str] = if verb == "add" { &["type", "bridge"] } else { &[] };
        // Another test may reap it: what counts is what it has done.
        let _ = std::process::Command::new("ip").args(["link", verb, name]).args(kind).status();
        Path::new("/sys/class/net").join(name).exists()
    };
    assert!(bridge("add"));
    // Longer than this test may have to wait for a processor, and less than the loop below takes.
    let soon = || since_boot() + Duration::from_millis(4500);
    let start = |fence: &Arc<Fence>| World::new(&reaper, FIRST_PID - 1, Network::Group(&plan, None, Some(fence)));
    let fence = Arc::new(Fence::new(soon()).unwrap());
    let world = start(&fence).unwrap();
    fence.extend(soon()).unwrap();
    // Signals from inside and orphans neither end the wait nor delay it.
    let script = "for i in 1 2 3; do (sleep 0.1 &); kill -TERM 1; kill -CHLD 1; kill -STOP 1; done; sleep 60";
    let spawn = Spawn::new(Path::new("/bin/sh"), ["-c", script]).unwrap().world(world.entrance().unwrap());
    let child = spawn.start().unwrap();
    fence.extend(soon()).unwrap();
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(500));
        fence.extend(soon()).unwrap();
    }
    assert!(!child.has_ended().unwrap() && !world.is_fenced(), "it is moved ahead");
    assert!(ends_within(&child, Duration::from_secs(20)) && world.is_fenced());
    assert_eq!(world.end(Some(&child)), Some(Ended::Signal(libc::SIGKILL)));
    // If it was reached before there is a world, nothing runs.
    let past = Arc::new(Fence::new(Duration::ZERO).unwrap());
    if let Ok(world) = start(&past) {
        assert!(ends_within(world.init(), Duration::from_secs(20)));
        world.end(None);
    }
    assert!(!bridge("del"));
}

/// In a frozen group of cgroup v1 with a process of somebody else, which is not thawed.
#[test]
fn killed_processes_that_do_not_end_are_named() {
    use rekindle_os::cgroup;
    let freezer = cgroup::hierarchies().unwrap_or_default().into_iter();
    let mut freezer = freezer.filter(|hierarchy| hierarchy.controllers == "freezer").filter_map(|it| it.folder);
    let group = freezer.next().map(|folder| folder.join(format!("rekindle-late-{}", std::process::id())));
    let made = group.as_ref().is_some_and(|group| std::fs::create_dir(group).is_ok());
    if !rekindle_testing::require("groups", made, "no group of the freezer of cgroup v1 can be made") {
        return;
    }
    let group = group.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let reaper = crate::launch::reaper::unpack(dir.path()).unwrap();
    let world = World::new(&reaper, FIRST_PID - 1, Network::Host).unwrap();
    let sleep = || Spawn::new(Path::new("/bin/sleep"), ["60"]).unwrap();
    let root = sleep().world(world.entrance().unwrap()).start().unwrap();
    let foreign = sleep().start().unwrap();
    for pid in [root.pid(), foreign.pid()] {
        std::fs::write(group.join(cgroup::PROCS), pid.to_string()).unwrap();
    }
    let state = group.join("freezer.state");
    std::fs::write(&state, "FROZEN").unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while std::fs::read_to_string(&state).unwrap().trim() != "FROZEN" && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    let mut told = Vec::new();
    let (over, is_over) = std::sync::mpsc::channel::<()>();
    let ended = std::thread::scope(|scope| {
        // It would wait for ever for a process that nobody tells of.
        let state = &state;
        scope.spawn(move || is_over.recv_timeout(Duration::from_secs(20)).or_else(|_| std::fs::write(state, "THAWED")));
        let ended = world.end_with(Some(&root), Duration::from_millis(200), &mut |text| {
            told.push(text);
            std::fs::write(state, "THAWED").unwrap();
        });
        let _ = over.send(());
        ended
    });
    let _ = foreign.signal(libc::SIGKILL);
    let _ = foreign.wait();
    while std::fs::remove_dir(&group).is_err() && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(ended, Some(Ended::Signal(libc::SIGKILL)));
    assert!(told.len() == 1 && told[0].contains(&format!("{} (sleep, state ", root.pid())), "{told:?}");
}

#[test]
fn the_next_pid_is_in_the_largest_gap() {
    assert_eq!(largest_gap(&[], 32768), 999);
    assert_eq!(largest_gap(&[1000, 1001, 1500], 32768), 1500);
    assert_eq!(largest_gap(&[1000, 32000, 32700], 32768), 1000);
    assert_eq!(largest_gap(&[2, 30000, 1000], 32768), 1000);
}

#[test]
fn a_namespace_may_have_higher_pids_than_the_machine() {
    let limit = |taken: &[i32]| limit_for(taken, 32768);
    assert_eq!((limit(&[1000, 32767]), limit(&[1000, 32768])), (32768, 4 << 20));
    assert_eq!(largest_gap(&[1000, 39000], limit(&[1000, 39000])), 39000);
}

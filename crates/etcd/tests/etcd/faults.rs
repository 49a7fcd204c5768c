//! Members that die, hang, fall behind, forget, or are full.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle_etcd::{Client, Compare, Error, Event, Op, Options, Txn};
use rekindle_os::clock::since_boot;

use crate::support::{
    Cluster, LONG, PATIENT, PREFIX, connected, create, etcd, eventually, follow, key, next, passes, passing, put,
    sure_for, value,
};

/// Only this member.
fn only(cluster: &Cluster, n: usize) -> Options {
    Options::new([cluster.members[n].client.clone()], PREFIX)
}

/// Waits for an event, and returns it with those before it.
fn until(events: &std::sync::mpsc::Receiver<Event>, wanted: impl Fn(&Event) -> bool) -> Vec<Event> {
    let mut seen = Vec::new();
    loop {
        seen.push(next(events));
        if seen.last().is_some_and(&wanted) {
            return seen;
        }
    }
}

#[test]
fn writes_go_on_when_the_leader_is_killed() {
    if !etcd() {
        return;
    }
    let mut cluster = Cluster::start(3);
    let client = cluster.client();
    create(&client, "n", "0");
    for round in 0..3 {
        let leader = cluster.leader();
        let end = Instant::now() + Duration::from_secs(4);
        let killed = Instant::now() + Duration::from_millis(300);
        let (mut dead, mut done_after) = (false, 0);
        while Instant::now() < end || done_after < 10 {
            assert!(Instant::now() < end + LONG);
            if !dead && Instant::now() > killed {
                cluster.kill(leader);
                dead = true;
            }
            let Ok(state) = client.get(&key("n")) else { continue };
            let entry = &state.entries[0];
            let number: u64 = std::str::from_utf8(&entry.value).unwrap().parse().unwrap();
            let txn =
                Txn::when([Compare::Modified(key("n"), entry.modified)]).then([put("n", &(number + 1).to_string())]);
            match client.txn(txn) {
                Ok(answer) => {
                    assert!(answer.succeeded, "nobody else writes: {answer:?}");
                    done_after += u32::from(dead);
                }
                // The next read tells.
                Err(error) => assert!(error.may_pass(), "round {round}: {error}"),
            }
        }
        cluster.run(leader);
    }
}

#[test]
fn a_minority_gives_no_old_values() {
    if !etcd() {
        return;
    }
    let (cluster, links) = Cluster::linked(3, &[]);
    let client = cluster.client();
    create(&client, "a", "old");
    // The leader itself is the minority: for a while it believes to be the leader.
    for minority in [cluster.leader(), (cluster.leader() + 1) % 3] {
        let mut alone = only(&cluster, minority);
        alone.request_timeout = Duration::from_secs(3);
        let alone = connected(&alone);
        let (_follower, events) = follow(&alone);
        assert!(matches!(next(&events), Event::State(_)));
        let (sender, lost) = channel();
        let ttl = Duration::from_secs(5);
        // A leader may have to be elected, and the time for requests is short.
        let lease = passing("a lease", || {
            let sender = sender.clone();
            alone.lease(ttl, move |it| sender.send(it).unwrap())
        });
        let bound = format!("bound{minority}");
        let op = Op::Put { key: key(&bound), value: b"x".into(), lease: Some(lease.id()) };
        passing("a key", || alone.txn(Txn::default().then([op.clone()])));
        let old = value(&alone, "a").unwrap();

        links.cut(minority);
        let others = connected(&only(&cluster, (minority + 1) % 3));
        let new = format!("new{minority}");
        // Not before they have a leader again.
        let written = eventually("a write", || others.txn(Txn::default().then([put("a", &new)])).ok()).revision;
        // It has the old value, which a careless client would use.
        let mut stale = Command::new("etcdctl");
        stale.env("ETCDCTL_API", "3").args(["--endpoints", &cluster.members[minority].client]).args(PATIENT);
        let stale = stale.args(["get", "--consistency", "s", "--print-value-only", &key("a")]).output().unwrap();
        assert_eq!(String::from_utf8(stale.stdout).unwrap().trim_end(), old);
        // Its own limit is 3 s; etcd would say after 7 s that it cannot answer.
        let attempt = |_| {
            let before = Instant::now();
            let error = alone.get(&key("a")).unwrap_err();
            eprintln!("{error} after {:?}", before.elapsed());
            // The member itself knows it a little later, and that may be late on a busy machine.
            (before.elapsed() < Duration::from_secs(5) && matches!(error, Error::NoQuorum { .. })).then_some(error)
        };
        let error = (0..6).find_map(attempt).expect("an error within the time limit for requests");
        assert!(error.to_string().contains(&cluster.members[minority].client), "{error}");
        assert!(alone.txn(Txn::default().then([put("a", "lost")])).is_err());
        let seen = until(&events, |event| matches!(event, Event::Away { .. }));
        let Some(Event::Away { reason, since }) = seen.last() else { unreachable!() };
        assert!(reason.contains(&cluster.members[minority].client) && *since < since_boot(), "{reason}");
        let error = Client::connect(&only(&cluster, minority)).unwrap_err();
        assert!(matches!(error, Error::NoQuorum { .. }), "{error}");
        // The others remove the keys of the lease only after it has counted as over here.
        eventually("the end of the lease", || {
            let there = value(&others, &bound).is_some();
            // After the read: it takes its time.
            let sure = !sure_for(&lease).is_zero();
            assert!(there || !sure, "the lease counts as alive, and its key is gone");
            (!there).then_some(())
        });

        links.mend();
        lost.recv_timeout(LONG).unwrap();
        assert_eq!(eventually("a value", || alone.get(&key("a")).ok()).entries[0].value, new.as_bytes());
        let seen = until(&events, |event| matches!(event, Event::Changed { revision, .. } if *revision > written));
        assert!(seen.contains(&Event::Back), "{seen:?}");
        let told = seen.iter().filter(|event| matches!(event, Event::Changed { revision, .. } if *revision == written));
        assert_eq!(told.count(), 1, "{seen:?}");
    }
}

#[test]
fn a_member_that_hangs_is_left_and_its_late_write_does_nothing() {
    if !etcd() {
        return;
    }
    let begin = |_| {
        let mut cluster = Cluster::start(3);
        // Member 0 has a leader, so that the client stays with it: it is the first one that the client asks.
        drop(connected(&only(&cluster, 0)));
        let client = cluster.client();
        let created = create(&client, "a", "1");
        let (follower, events) = follow(&client);
        assert!(matches!(next(&events), Event::State(_)));
        // The client's first member, and so the follower's.
        cluster.stop(0);
        let before = Instant::now();
        let txn = Txn::when([Compare::Modified(key("a"), created)]).then([put("a", "late")]);
        // On a busy machine the client may have left that member before.
        let error = client.txn(txn).err()?;
        assert!(error.is_unsure() && error.to_string().contains("no answer within"), "{error}");
        assert!(before.elapsed() < Duration::from_secs(15));
        Some((cluster, client, created, follower, events))
    };
    let (mut cluster, client, created, _follower, events) =
        (0..3).find_map(begin).expect("a client of a member that hangs");
    let second = || Txn::when([Compare::Modified(key("a"), created)]).then([put("a", "2")]);
    // If that member was the leader, the others need some time to elect one. The member hangs until it goes on.
    eventually("a write", || match client.txn(second()) {
        // An earlier one may have been done, although the client was not sure.
        Ok(answer) => (answer.succeeded || client.get(&key("a")).ok()?.entries[0].value == b"2").then_some(()),
        Err(error) => {
            assert!(error.may_pass(), "{error}");
            None
        }
    });
    until(&events, |event| matches!(event, Event::Changed { .. }));
    cluster.go_on(0);
    // It reads the late write from its socket now.
    std::thread::sleep(Duration::from_secs(2));
    let read = || eventually("a read", || client.get(&key("a")).ok()).entries;
    assert_eq!(read()[0].value, b"2");
    // A read goes to the next member, and a leader may have to be elected again.
    cluster.stop(1);
    assert_eq!(read()[0].value, b"2");
}

#[test]
fn a_lease_is_not_sure_while_etcd_hangs() {
    if !etcd() {
        return;
    }
    let mut cluster = Cluster::start(3);
    let client = cluster.client();
    // On a busy machine an election takes some seconds, and a lease must last until then.
    let ttl = Duration::from_secs(12);
    // One that hangs: the others renew it in time, whichever it is.
    for n in 0..3 {
        let lease = passing("a lease", || client.lease(ttl, |_| ()));
        std::thread::sleep(ttl / 3);
        cluster.stop(n);
        let end = Instant::now() + ttl * 5 / 4;
        while Instant::now() < end {
            assert!(!lease.is_lost(), "member {n} hangs, and the lease is lost");
            assert!(!sure_for(&lease).is_zero(), "member {n} hangs, and the lease was not renewed in time");
            std::thread::sleep(Duration::from_millis(20));
        }
        // A leader that continues may end the lease, if its version is an old one: so the next round has its own.
        cluster.go_on(n);
        std::thread::sleep(ttl / 4);
    }
    let (sender, lost) = channel();
    let lease = passing("a lease", || {
        let sender = sender.clone();
        client.lease(ttl, move |it| sender.send(it).unwrap())
    });
    let op = Op::Put { key: key("mine"), value: b"x".into(), lease: Some(lease.id()) };
    passing("a key", || client.txn(Txn::default().then([op.clone()])));
    std::thread::sleep(ttl / 2);
    for n in 0..3 {
        cluster.stop(n);
    }
    let stopped = since_boot();
    // A renewal that was sent before that may have been answered.
    let margin = Duration::from_millis(200);
    eventually("the end", || {
        assert!(lease.sure_until() <= stopped + ttl + margin);
        sure_for(&lease).is_zero().then_some(())
    });
    assert!(since_boot() < stopped + ttl + Duration::from_secs(15), "it ends in time");
    assert!(!lease.is_lost(), "nobody has said so");
    for n in 0..3 {
        cluster.go_on(n);
    }
    // Either etcd has let the lease expire and reports that, or it still has it: it must answer.
    let lives = eventually("an answer", || {
        if lease.is_lost() { Some(false) } else { (!sure_for(&lease).is_zero()).then_some(true) }
    });
    let there = value(&eventually("a client", || Client::connect(&cluster.options()).ok()), "mine").is_some();
    assert!(there || !lives, "the key is gone, and the lease counts as alive");
    let limit = if lives { Duration::from_millis(500) } else { LONG };
    assert_eq!(lost.recv_timeout(limit).is_ok(), !lives);
}

#[test]
fn a_lease_whose_key_somebody_removes_lives_on() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::start(1);
    let client = cluster.client();
    // Long enough that a process which gets no processor for a while renews it in time.
    let ttl = Duration::from_secs(8);
    let lease = client.lease(ttl, |_| ()).unwrap();
    // All keys of a lease, as etcd lists them. Nothing else belongs to this one.
    let keys = || {
        let id = format!("{:x}", lease.id());
        let listed = cluster.control(0, &["lease", "timetolive", &id, "--keys", "-w", "json"]);
        let start = listed.find("\"keys\":[\"").map(|at| at + 9)?;
        listed[start..].split('"').next().map(str::to_owned)
    };
    let first = keys();
    assert!(first.is_some(), "it has one");
    for _ in 0..2 {
        cluster.control(0, &["del", "--prefix", PREFIX]);
        let end = Instant::now() + ttl * 5 / 4;
        while Instant::now() < end {
            assert!(!lease.is_lost() && !sure_for(&lease).is_zero(), "no renewal counts");
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(keys(), first, "it is written again");
    }
}

#[test]
fn a_leader_that_is_cut_off_does_not_make_a_lease_sure() {
    if !etcd() {
        return;
    }
    // It believes to be the leader for five to ten seconds, and answers renewals alone (etcd before 3.4.31 and
    // 3.5.13).
    let (cluster, links) = Cluster::linked(3, &["--election-timeout", "5000", "--heartbeat-interval", "500"]);
    let leader = cluster.leader();
    let client = connected(&only(&cluster, leader));
    let ttl = Duration::from_secs(8);
    let lease = passing("a lease", || client.lease(ttl, |_| ()));
    let first = lease.sure_until();
    eventually("a renewal", || (lease.sure_until() > first).then_some(()));
    links.cut(leader);
    let cut = since_boot();
    while since_boot() < cut + ttl {
        assert!(lease.sure_until() <= cut + ttl, "it is renewed by a leader that nobody follows");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(sure_for(&lease).is_zero());
    links.mend();
}

#[test]
fn a_follower_that_missed_a_compaction_gets_the_state_again() {
    if !etcd() {
        return;
    }
    let mut cluster = Cluster::start(3);
    let client = cluster.client();
    create(&client, "a", "0");
    let leader = cluster.leader();
    let (n, other) = ((leader + 1) % 3, (leader + 2) % 3);
    let alone = connected(&only(&cluster, n));
    let (_follower, events) = follow(&alone);
    assert!(matches!(next(&events), Event::State(_)));
    cluster.kill(n);
    let writer = connected(&only(&cluster, leader));
    let mut last = 0;
    for value in 1..=5 {
        last = passing("a write", || writer.txn(Txn::default().then([put("a", &value.to_string())]))).revision;
    }
    cluster.control(other, &["compact", &last.to_string()]);
    cluster.run(n);
    let seen = until(&events, |event| matches!(event, Event::State(_) | Event::Changed { .. }));
    let Some(Event::State(state)) = seen.last() else { panic!("{seen:?}") };
    assert_eq!((state.revision, state.entries[0].value.as_slice()), (last, &b"5"[..]));
    // Written once: a try that is repeated would be another change.
    let after = create(&writer, "b", "6");
    let seen = until(&events, |event| matches!(event, Event::State(_) | Event::Changed { .. }));
    assert!(matches!(seen.last(), Some(Event::Changed { revision, .. }) if *revision == after), "{seen:?}");
}

/// What [`a_paused_process_knows_that_its_lease_is_over`] starts.
#[test]
#[ignore = "a part of another test"]
fn holds_a_lease() {
    let Some(address) = std::env::var_os("HOLDS_A_LEASE_AT") else { return };
    let client = connected(&Options::new([address.to_str().unwrap()], PREFIX));
    let (sender, lost) = channel();
    let lease = client.lease(Duration::from_secs(8), move |it| sender.send(it).unwrap()).unwrap();
    let op = Op::Put { key: key("paused"), value: b"x".into(), lease: Some(lease.id()) };
    client.txn(Txn::default().then([op])).unwrap();
    // Before the other one stops us.
    let mut last = since_boot();
    println!("\nready");
    loop {
        std::thread::sleep(Duration::from_millis(10));
        let now = since_boot();
        // A busy machine pauses it too, but not for so long.
        if now - last > Duration::from_secs(7) {
            println!("paused, sure={}", !sure_for(&lease).is_zero());
            assert!(lost.recv_timeout(LONG).is_ok());
            println!("lost, sure={}", !sure_for(&lease).is_zero());
            return;
        }
        last = now;
    }
}

#[test]
fn a_paused_process_knows_that_its_lease_is_over() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::start(1);
    let client = cluster.client();
    let mut holder = Command::new(std::env::current_exe().unwrap());
    holder.args(["--exact", "faults::holds_a_lease", "--ignored", "--nocapture"]);
    let mut holder = holder.env("HOLDS_A_LEASE_AT", &cluster.members[0].client).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(holder.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line == "ready"));
    assert_eq!(value(&client, "paused").as_deref(), Some("x"));
    let pid = Pid::from_raw(holder.id().try_into().unwrap());
    kill(pid, Signal::SIGSTOP).unwrap();
    std::thread::sleep(Duration::from_secs(8));
    eventually("the end of the lease", || value(&client, "paused").is_none().then_some(()));
    kill(pid, Signal::SIGCONT).unwrap();
    assert!(lines.any(|line| line == "paused, sure=false"), "it must not count on its lease");
    assert!(lines.any(|line| line == "lost, sure=false"), "it must be told");
    assert!(holder.wait().unwrap().success());
}

#[test]
fn a_full_etcd_says_what_to_do_and_can_be_read() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::with(1, "http", &["--quota-backend-bytes", "1048576"]);
    let client = cluster.client();
    create(&client, "a", "1");
    let big = "x".repeat(200_000);
    // The size that counts is the one of the last write to the disk.
    let mut numbers = 0..;
    let error = eventually("a refusal", || {
        let name = format!("big{}", numbers.next().unwrap());
        client.txn(Txn::default().then([put(&name, &big)])).err().filter(|error| !passes(error))
    });
    assert!(matches!(error, Error::Full), "{error}");
    assert!(error.to_string().contains("etcdctl alarm disarm"), "{error}");
    assert_eq!(value(&client, "a").as_deref(), Some("1"));
    let again = cluster.client();
    assert_eq!(value(&again, "a").as_deref(), Some("1"));
}

#[test]
fn a_member_of_another_cluster_is_refused() {
    if !etcd() {
        return;
    }
    let (mut ours, theirs) = (Cluster::start(1), Cluster::start(1));
    create(&theirs.client(), "a", "theirs");
    // The first member that answers is the one whose cluster counts.
    drop(ours.client());
    let mut options = ours.options();
    options.endpoints.push(theirs.members[0].client.clone());
    let client = connected(&options);
    create(&client, "a", "ours");
    ours.kill(0);
    let error = client.get(PREFIX).unwrap_err();
    assert!(error.to_string().contains("belongs to another cluster"), "{error}");
    let error = client.txn(Txn::default().then([put("b", "x")])).unwrap_err();
    assert!(!error.is_unsure() && error.to_string().contains("belongs to another cluster"), "{error}");
    assert_eq!(theirs.client().get(PREFIX).unwrap().entries.len(), 1);
    ours.run(0);
    assert_eq!(eventually("an answer", || client.get(&key("a")).ok()).entries[0].value, b"ours");
}

#[test]
fn an_etcd_that_has_gone_back_is_noticed() {
    if !etcd() {
        return;
    }
    let mut cluster = Cluster::start(1);
    let mut options = cluster.options();
    // It must be back before that time is over, or only its absence is told.
    options.request_timeout = Duration::from_secs(20);
    let client = connected(&options);
    create(&client, "a", "1");
    let folder = cluster.folder.path().to_owned();
    cluster.kill(0);
    let copy = |from: &str, to: &str| {
        let status = Command::new("cp").args(["-a", "-T"]).arg(folder.join(from)).arg(folder.join(to)).status();
        assert!(status.unwrap().success());
    };
    copy("m0", "copy");
    cluster.run(0);
    eventually("a client", || client.get(PREFIX).ok());
    let (_follower, events) = follow(&client);
    assert!(matches!(next(&events), Event::State(_)));
    let new = client.txn(Txn::default().then([put("a", "2"), put("b", "2")])).unwrap().revision;
    assert!(matches!(next(&events), Event::Changed { revision, .. } if revision == new));
    cluster.kill(0);
    std::fs::remove_dir_all(folder.join("m0")).unwrap();
    copy("copy", "m0");
    cluster.run(0);
    let error = eventually("the error", || match client.get(PREFIX) {
        Err(Error::Unreachable { .. } | Error::NoQuorum { .. }) => None,
        other => Some(other.unwrap_err()),
    });
    assert!(matches!(error, Error::WentBack { .. }), "{error}");
    let Event::Away { reason, .. } = next(&events) else { panic!("nothing can be told") };
    assert!(reason.contains("gone back"), "{reason}");
}

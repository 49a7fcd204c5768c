//! Random faults of members while several clients count, take a lock, and follow.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rekindle_etcd::{Change, Client, Compare, Event, Op, Options, State, Txn};
use rekindle_os::clock::since_boot;
use rekindle_testing::random::Random;

use crate::links::Links;
use crate::support::{Cluster, LONG, PREFIX, connected, create, etcd, eventually, follow, key};

/// How often something fails. `REKINDLE_ETCD_FAULTS` sets another number, `REKINDLE_ETCD_SEED` the order.
const FAULTS: u64 = 12;

/// Number of clients that count.
const WRITERS: u64 = 4;

fn number(state: &State, name: &str) -> (u64, Option<u64>) {
    let entry = state.entries.iter().find(|entry| entry.key == key(name));
    let value = entry.map_or(0, |entry| std::str::from_utf8(&entry.value).unwrap().parse().unwrap());
    (value, entry.map(|entry| entry.modified))
}

/// Counts each step exactly once, even if a result is unknown. Returns its steps.
fn count(options: &Options, writer: u64, over: &AtomicBool, steps: &AtomicU64) -> u64 {
    let client = connected(options);
    let own = format!("steps/{writer}");
    let mut step = 1;
    loop {
        // The members need the processor too.
        thread::sleep(Duration::from_millis(10));
        let Ok(state) = client.get(PREFIX) else { continue };
        let (done, _) = number(&state, &own);
        assert!(done == step || done + 1 == step, "writer {writer} is at {step}, and {done} are recorded");
        if done == step {
            steps.fetch_add(1, SeqCst);
            step += 1;
        }
        if over.load(SeqCst) {
            return step - 1;
        }
        let (total, modified) = number(&state, "total");
        let put = |name: &str, value: u64| Op::Put { key: key(name), value: value.to_string().into(), lease: None };
        let txn = Txn::when([Compare::Modified(key("total"), modified.unwrap())]);
        match client.txn(txn.then([put("total", total + 1), put(&own, step)])) {
            Ok(_) => {}
            Err(error) => assert!(error.may_pass(), "{error}"),
        }
    }
}

/// Repeatedly takes a lock with a lease, and acts while it certainly has it. No client may act with an older lock after
/// another has acted with a newer one. Returns how often it had the lock.
fn contend(options: &Options, mut random: Random, over: &AtomicBool, newest: &Mutex<u64>) -> u64 {
    let client = connected(options);
    let mut taken = 0;
    while !over.load(SeqCst) {
        let Ok(lease) = client.lease(Duration::from_secs(2), |_| ()) else { continue };
        let op = Op::Put { key: key("lock"), value: b"x".into(), lease: Some(lease.id()) };
        // If it is unknown whether the lock is ours, it is not used, and is removed with the lease.
        if let Ok(answer) = client.txn(Txn::when([Compare::Absent(key("lock"))]).then([op]))
            && answer.succeeded
        {
            taken += 1;
            let end = Instant::now() + random.time(Duration::from_millis(10), Duration::from_secs(3));
            while Instant::now() < end {
                let mut newest = newest.lock().unwrap();
                if since_boot() >= lease.sure_until() {
                    break;
                }
                assert!(*newest <= answer.revision, "two have the lock");
                *newest = answer.revision;
                drop(newest);
                thread::sleep(Duration::from_millis(2));
            }
        }
        if random.chance(60) {
            let _ = lease.revoke();
        }
        thread::sleep(Duration::from_millis(20));
    }
    taken
}

/// All reports to a follower.
fn checked(events: &[Event], total: u64) {
    let (mut revision, mut seen) = (0, None);
    let mut away = false;
    for event in events {
        match event {
            Event::State(state) => {
                assert!(seen.is_none(), "nothing was compacted");
                revision = state.revision;
                seen = Some(number(state, "total").0);
            }
            Event::Changed { revision: next, changes } => {
                assert!(*next > revision, "{next} after {revision}");
                revision = *next;
                let entries = changes.iter().filter_map(|change| match change {
                    Change::Put(entry) => Some((entry.key.as_str(), entry)),
                    Change::Deleted(_) => None,
                });
                let entries: BTreeMap<_, _> = entries.collect();
                assert!(entries.values().all(|entry| entry.modified == revision));
                if let Some(entry) = entries.get(&*key("total")) {
                    let value = std::str::from_utf8(&entry.value).unwrap().parse().ok();
                    assert_eq!(value, seen.map(|seen| seen + 1), "a step is lost or doubled");
                    // The other key of the same transaction.
                    assert_eq!(entries.len(), 2, "a transaction was torn");
                    seen = value;
                }
            }
            Event::Away { .. } => assert!(!std::mem::replace(&mut away, true), "away twice"),
            Event::Back => assert!(std::mem::replace(&mut away, false), "back without having been away"),
        }
    }
    assert_eq!(seen, Some(total));
}

/// One fault, and its end.
fn fault(cluster: &mut Cluster, links: &Links, random: &mut Random) -> &'static str {
    let count = u64::try_from(cluster.members.len()).unwrap();
    let n = usize::try_from(random.below(count)).unwrap();
    let other = (n + 1) % cluster.members.len();
    let time = random.time(Duration::from_millis(50), Duration::from_secs(4));
    match random.below(6) {
        0 | 1 => {
            cluster.kill(n);
            thread::sleep(time);
            cluster.run(n);
            "killed"
        }
        2 => {
            let leader = cluster.leader();
            cluster.kill(leader);
            thread::sleep(time);
            cluster.run(leader);
            "leader killed"
        }
        3 => {
            cluster.stop(n);
            thread::sleep(time);
            cluster.go_on(n);
            "stopped"
        }
        4 => {
            links.cut(n);
            thread::sleep(time);
            links.mend();
            "cut off"
        }
        _ => {
            cluster.stop(n);
            cluster.kill(other);
            thread::sleep(time);
            cluster.run(other);
            cluster.go_on(n);
            "one stopped, one killed"
        }
    }
}

#[test]
fn nothing_is_lost_or_doubled_by_random_faults() {
    if !etcd() {
        return;
    }
    let from = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = from("REKINDLE_ETCD_SEED").unwrap_or(now.as_secs());
    let faults = from("REKINDLE_ETCD_FAULTS").unwrap_or(FAULTS);
    println!("REKINDLE_ETCD_SEED={seed}");
    let mut random = Random::new(seed);

    let (mut cluster, links) = Cluster::linked(3, &[]);
    let options = cluster.options();
    let client = cluster.client();
    create(&client, "total", "0");
    let (over, steps, newest) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::new(0));
    let followers: Vec<_> = (0..3)
        .map(|n| {
            // Each begins with another member.
            let mut options = options.clone();
            options.endpoints.rotate_left(n);
            let client: Arc<Client> = Arc::new(connected(&options));
            (follow(&client), client)
        })
        .collect();
    let (written, taken): (u64, u64) = thread::scope(|scope| {
        let (options, over, steps, newest) = (&options, &over, &steps, &newest);
        let writers: Vec<_> =
            (0..WRITERS).map(|writer| scope.spawn(move || count(options, writer, over, steps))).collect();
        let contenders: Vec<_> = (0..2)
            .map(|n| {
                let random = Random::new(seed ^ (n + 1));
                scope.spawn(move || contend(options, random, over, newest))
            })
            .collect();
        for n in 0..faults {
            let before = steps.load(SeqCst);
            let what = fault(&mut cluster, &links, &mut random);
            // All continue before the next fault.
            eventually("a step", || (steps.load(SeqCst) > before + 5).then_some(()));
            println!("fault {n}: {what}: {} steps", steps.load(SeqCst) - before);
        }
        over.store(true, SeqCst);
        (
            writers.into_iter().map(|it| it.join().unwrap()).sum(),
            contenders.into_iter().map(|it| it.join().unwrap()).sum(),
        )
    });
    let state = eventually("the end", || client.get(PREFIX).ok());
    let (total, _) = number(&state, "total");
    println!("{faults} faults, {total} steps, the lock was taken {taken} times");
    assert_eq!(total, written, "steps are lost or doubled");
    assert!(taken > 0);
    for ((follower, events), _client) in followers {
        let mut all = Vec::new();
        let end = Instant::now() + LONG;
        let last = |event: &Event| {
            let Event::Changed { changes, .. } = event else { return false };
            changes.iter().any(|change| matches!(change, Change::Put(entry) if entry.key == key("total") && entry.value == total.to_string().as_bytes()))
        };
        while !all.last().is_some_and(last) {
            all.push(events.recv_timeout(end.saturating_duration_since(Instant::now())).expect("all steps"));
            // What comes after the last step belongs to the lock.
        }
        drop(follower);
        checked(&all, total);
    }
}

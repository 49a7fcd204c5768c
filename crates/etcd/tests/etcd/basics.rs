//! The calls, while nothing fails.

use std::sync::mpsc::channel;
use std::time::Duration;

use rekindle_etcd::{Change, Compare, Event, Op, Options, Txn, check, may_end_leases_early};
use rekindle_os::clock::since_boot;

use crate::support::{
    Cluster, PREFIX, connected, create, etcd, eventually, follow, key, next, passing, put, quiet, sure_for, value,
};

#[test]
fn transactions_compare_and_swap() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::start(1);
    let client = cluster.client();
    let created = create(&client, "a", "1");
    let again = client.txn(Txn::when([Compare::Absent(key("a"))]).then([put("a", "2")]).otherwise([Op::Get(key("a"))]));
    let again = again.unwrap();
    assert!(!again.succeeded);
    assert_eq!(again.got[0][0].value, b"1");
    assert_eq!(again.got[0][0].modified, created);
    let holds = |compare: Compare| client.txn(Txn::when([compare])).unwrap().succeeded;
    assert!(holds(Compare::Present(key("a"))) && !holds(Compare::Present(key("b"))));
    assert!(holds(Compare::Modified(key("a"), created)) && !holds(Compare::Modified(key("a"), created + 1)));
    assert!(holds(Compare::Created(key("a"), created)) && !holds(Compare::Created(key("b"), created)));
    assert!(holds(Compare::Value(key("a"), b"1".into())) && !holds(Compare::Value(key("a"), b"2".into())));
    let two = Txn::when([Compare::Modified(key("a"), created)]).then([put("a", "3"), put("b", "4")]);
    let two = client.txn(two).unwrap();
    assert!(two.succeeded && two.revision == created + 1);
    let state = client.get(PREFIX).unwrap();
    let seen: Vec<_> = state.entries.iter().map(|it| (it.key.as_str(), it.created, it.modified, it.lease)).collect();
    assert_eq!(seen, [(&*key("a"), created, created + 1, None), (&*key("b"), created + 1, created + 1, None)]);
    assert_eq!(state.revision, created + 1);
    assert!(client.txn(Txn::default().then([Op::Delete(key("a"))])).unwrap().succeeded);
    assert_eq!((value(&client, "a"), value(&client, "b").as_deref()), (None, Some("4")));
    client.txn(Txn::default().then([Op::DeletePrefix(PREFIX.into())])).unwrap();
    assert_eq!(client.get(PREFIX).unwrap().entries, []);
}

#[test]
fn time_beyond_what_was_asked_for_does_not_count() {
    if !etcd() {
        return;
    }
    // etcd grants nine seconds at least.
    let cluster = Cluster::with(1, "http", &["--election-timeout", "6000", "--heartbeat-interval", "600"]);
    let client = cluster.client();
    // Long enough that a process which gets no processor for a while renews it in time.
    let ttl = Duration::from_secs(7);
    let lease = client.lease(ttl, |_| ()).unwrap();
    let granted = cluster.control(0, &["lease", "timetolive", &format!("{:x}", lease.id())]);
    assert!(granted.contains("granted with TTL(9s)"), "{granted}");
    // And after renewals.
    let end = since_boot() + ttl * 3 / 2;
    while since_boot() < end {
        assert!(sure_for(&lease) > Duration::ZERO && sure_for(&lease) <= ttl, "{:?}", sure_for(&lease));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn a_lease_lives_as_long_as_it_is_renewed() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::start(1);
    let client = cluster.client();
    // Long enough that a process which gets no processor for a while renews it in time.
    let ttl = Duration::from_secs(8);
    let before = since_boot();
    let (sender, lost) = channel();
    let lease = client.lease(ttl, move |it| sender.send(it).unwrap()).unwrap();
    assert!(lease.sure_until() > before + ttl.mul_f64(0.9) && lease.sure_until() <= since_boot() + ttl);
    let op = Op::Put { key: key("mine"), value: b"x".into(), lease: Some(lease.id()) };
    client.txn(Txn::when([Compare::Absent(key("mine"))]).then([op.clone()])).unwrap();
    assert!(client.txn(Txn::when([Compare::Lease(key("mine"), lease.id())])).unwrap().succeeded);
    std::thread::sleep(ttl * 3 / 2);
    assert_eq!(client.get(&key("mine")).unwrap().entries[0].lease, Some(lease.id()));
    // A renewal may be late, so the best moment between two of them counts.
    let looks = (0..25).map(|_| {
        std::thread::sleep(Duration::from_millis(100));
        sure_for(&lease)
    });
    let best = looks.max().unwrap();
    assert!(best > ttl / 3 && best <= ttl, "{best:?}");

    // Another client ends it.
    cluster.control(0, &["lease", "revoke", &format!("{:x}", lease.id())]);
    assert_eq!(lost.recv_timeout(ttl * 3).unwrap().id, lease.id());
    assert!(lease.is_lost() && sure_for(&lease).is_zero());
    assert_eq!(value(&client, "mine"), None);
    let error = client.txn(Txn::default().then([op])).unwrap_err();
    assert!(error.lease_is_gone(), "{error}");
    lease.revoke().unwrap();

    // We revoke it, or drop it.
    let lease = client.lease(ttl, |_| panic!("it is revoked, not lost")).unwrap();
    let op = |id| Op::Put { key: key("mine"), value: b"x".into(), lease: Some(id) };
    client.txn(Txn::default().then([op(lease.id())])).unwrap();
    lease.revoke().unwrap();
    assert!(sure_for(&lease).is_zero());
    assert_eq!(value(&client, "mine"), None);
    let lease = client.lease(ttl, |_| panic!("nobody listens any more")).unwrap();
    client.txn(Txn::default().then([op(lease.id())])).unwrap();
    drop(lease);
    assert_eq!(value(&client, "mine").as_deref(), Some("x"));
    eventually("the end of the lease", || value(&client, "mine").is_none().then_some(()));
}

#[test]
fn a_follower_sees_the_state_and_then_each_revision() {
    if !etcd() {
        return;
    }
    let cluster = Cluster::start(1);
    let client = cluster.client();
    let first = create(&client, "a", "1");
    let (follower, events) = follow(&client);
    let Event::State(state) = next(&events) else { panic!("the state comes first") };
    assert_eq!((state.revision, state.entries.len()), (first, 1));
    // Other keys are not reported.
    client.txn(Txn::default().then([Op::Put { key: "/other".into(), value: b"x".into(), lease: None }])).unwrap();
    let both = client.txn(Txn::default().then([put("b", "2"), Op::Delete(key("a"))])).unwrap().revision;
    let Event::Changed { revision, changes } = next(&events) else { panic!("a change") };
    assert_eq!(revision, both);
    let told: Vec<_> = changes
        .iter()
        .map(|change| match change {
            Change::Put(entry) => (entry.key.clone(), Some((entry.value.clone(), entry.modified))),
            Change::Deleted(key) => (key.clone(), None),
        })
        .collect();
    assert_eq!(told, [(key("b"), Some((b"2".into(), both))), (key("a"), None)]);
    // Nothing happens for longer than a member may be silent.
    quiet(&events, Duration::from_secs(6));
    drop(follower);
    create(&client, "c", "3");
    assert!(events.recv_timeout(Duration::from_millis(300)).is_err());
}

#[test]
fn it_is_known_before_a_lease_is_granted_whether_it_may_end_early() {
    if !etcd() {
        return;
    }
    for members in [1, 3] {
        let cluster = Cluster::start(members);
        let options = cluster.options();
        // They start at different times.
        for member in &cluster.members {
            drop(connected(&Options::new([member.client.clone()], PREFIX)));
        }
        let version = match &passing("a check", || check(&options)).members[0].state {
            Ok(state) => state.version.clone(),
            Err(why) => panic!("{why}"),
        };
        let numbers: Vec<u32> = version.split('.').map_while(|part| part.parse().ok()).collect();
        let is_old = numbers < vec![3, 4, 31] || (numbers >= vec![3, 5] && numbers < vec![3, 5, 13]);
        let early = passing("an answer", || may_end_leases_early(&options));
        assert_eq!(early, members > 1 && is_old, "{members} members of {version}");
    }
    assert!(may_end_leases_early(&Options::new(["http://127.0.0.1:1"], PREFIX)).is_err());
}

//! Users, passwords and rights.

use std::fs;

use rekindle_etcd::{Client, Compare, Error, Event, Op, Options, Secret, Txn};
use std::time::Duration;

use crate::support::{
    Cluster, PREFIX, connected, create, etcd, eventually, follow, key, next, next_after_start, put, sure_for, value,
};

/// A cluster in which the user `rekindle` may read and write below the prefix, and `guest` may only read.
fn cluster() -> (Cluster, Options) {
    let mut cluster = Cluster::start(1);
    drop(cluster.client());
    for args in [
        &["user", "add", "root:admin"][..],
        &["user", "add", "rekindle:secret"],
        &["user", "add", "guest:secret"],
        &["user", "add", "nobody:secret"],
        &["role", "add", "writer"],
        &["role", "add", "reader"],
        &["role", "grant-permission", "writer", "readwrite", "--prefix", PREFIX],
        &["role", "grant-permission", "reader", "read", "--prefix", PREFIX],
        &["user", "grant-role", "rekindle", "writer"],
        &["user", "grant-role", "guest", "reader"],
        &["auth", "enable"],
    ] {
        cluster.control(0, args);
    }
    cluster.control = ["--user", "root:admin"].map(str::to_owned).into();
    let mut options = cluster.options();
    let file = cluster.folder.path().join("password");
    fs::write(&file, "secret\n").unwrap();
    options.login = Some(("rekindle".into(), Secret::File(file)));
    (cluster, options)
}

#[test]
fn users_have_passwords_and_rights() {
    if !etcd() {
        return;
    }
    let (cluster, options) = cluster();
    let client = connected(&options);
    create(&client, "a", "1");
    let says = |login: Option<(&str, &str)>, expected: &str| {
        let mut options = options.clone();
        options.login = login.map(|(user, password)| (user.into(), Secret::Text(password.into())));
        let text = Client::connect(&options).unwrap_err().to_string();
        assert!(text.contains(expected) && !text.contains("wrong-one"), "{expected}: {text}");
    };
    says(Some(("rekindle", "wrong-one")), "unknown user or wrong password");
    says(Some(("stranger", "wrong-one")), "unknown user or wrong password");
    says(None, "it requires a user");
    says(Some(("nobody", "secret")), "does not allow this to user \"nobody\"");
    let mut options = options;
    options.prefix = "/elsewhere/".into();
    let error = Client::connect(&options).unwrap_err();
    assert!(matches!(error, Error::Denied { .. }) && error.to_string().contains("/elsewhere/"), "{error}");
    // A user who may only read gets the error at the first write.
    options.prefix = PREFIX.into();
    options.login = Some(("guest".into(), Secret::Text("secret".into())));
    let guest = connected(&options);
    assert_eq!(value(&guest, "a").as_deref(), Some("1"));
    let error = guest.txn(Txn::default().then([put("a", "2")])).unwrap_err();
    assert!(matches!(error, Error::Denied { .. }), "{error}");
    assert_eq!(value(&client, "a").as_deref(), Some("1"));
    // A user without authentication is a mistake: anybody could write there.
    cluster.control(0, &["auth", "disable"]);
    let text = Client::connect(&options).unwrap_err().to_string();
    assert!(text.contains("anybody can write"), "{text}");
}

#[test]
fn a_login_that_etcd_has_forgotten_is_made_again() {
    if !etcd() {
        return;
    }
    let (mut cluster, options) = cluster();
    let client = connected(&options);
    let modified = create(&client, "a", "1");
    let (_follower, events) = follow(&client);
    assert!(matches!(next(&events), Event::State(_)));
    // Longer than etcd needs to start on a busy machine.
    let ttl = Duration::from_secs(8);
    let lease = client.lease(ttl, |_| panic!("it is alive")).unwrap();
    let op = Op::Put { key: key("mine"), value: b"x".into(), lease: Some(lease.id()) };
    client.txn(Txn::default().then([op])).unwrap();
    assert!(matches!(next(&events), Event::Changed { .. }));
    // Tokens are in its memory.
    cluster.kill(0);
    cluster.run(0);
    let txn = Txn::when([Compare::Modified(key("a"), modified)]).then([put("a", "2")]);
    let written = eventually("a write", || client.txn(txn.clone()).ok()).succeeded;
    // An earlier try may have been done, although the client was not sure.
    assert!(written || value(&client, "a").as_deref() == Some("2"));
    assert!(matches!(next_after_start(&events), Event::Changed { .. }));
    // Rights that change make tokens old.
    cluster.control(0, &["role", "grant-permission", "writer", "readwrite", "/more"]);
    assert!(client.txn(Txn::when([Compare::Absent(key("b"))]).then([put("b", "1")])).unwrap().succeeded);
    assert!(matches!(next_after_start(&events), Event::Changed { .. }));
    std::thread::sleep(ttl * 5 / 4);
    assert!(!lease.is_lost() && !sure_for(&lease).is_zero());
    assert_eq!(value(&client, "mine").as_deref(), Some("x"));
}

mod stream;

use std::net::Ipv4Addr;

use super::*;

fn plan(kind: Kind) -> Plan {
    Plan {
        subnet: Subnet::default(),
        rank: 0,
        size: 2,
        kind,
        mtu: None,
        peers: BTreeMap::new(),
        names: BTreeMap::new(),
        directory: PathBuf::from("/"),
    }
}

#[test]
fn addresses_follow_from_the_rank() {
    let subnet = Subnet::default();
    assert_eq!(subnet.address(0), Ipv4Addr::new(10, 213, 0, 1));
    assert_eq!(subnet.address(255), Ipv4Addr::new(10, 213, 1, 0));
    assert_eq!(subnet.mac(1), [2, b'k', 10, 213, 0, 2]);
    assert_eq!(subnet.room(), 65534);
    let small: Subnet = "192.0.2.0/30".parse().unwrap();
    assert_eq!((small.room(), small.address(1)), (2, Ipv4Addr::new(192, 0, 2, 2)));
    assert!(small.contains("::ffff:192.0.2.1".parse().unwrap()));
    assert!(!small.contains("192.0.2.4".parse().unwrap()));
    assert_eq!(small.to_string(), "192.0.2.0/30");
    for wrong in ["10.0.0.0", "10.0.0.1/16", "10.0.0.0/31", "10.0.0.0/7", "fe80::/64"] {
        assert!(wrong.parse::<Subnet>().is_err(), "{wrong}");
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused() {
    let vxlan = |vni| Kind::Vxlan { vni, port: 1, local: [127, 0, 0, 1].into() };
    plan(vxlan(1)).check().unwrap();
    assert!(matches!(plan(vxlan(1 << 24)).check(), Err(Error::Vni(_))));
    assert!(matches!(Plan { rank: 2, ..plan(vxlan(1)) }.check(), Err(Error::Rank { .. })));
    let small = "192.0.2.0/30".parse().unwrap();
    let error = Plan { subnet: small, size: 3, ..plan(vxlan(1)) }.check().unwrap_err();
    assert_eq!(
        error.to_string(),
        "a group of 3 machines needs more addresses than 192.0.2.0/30 has: set a larger group.subnet"
    );
}

#[test]
fn names_of_members_are_the_groups() {
    let machine = "127.0.0.1 localhost\n# mine\n127.0.1.1 One.example one # this\n192.0.2.1 other two\n";
    let names = [(0, vec!["one".to_owned(), "one.example".to_owned()]), (1, vec!["two".to_owned()])].into();
    let expected = "127.0.0.1 localhost\n192.0.2.1 other\n10.213.0.1 one one.example\n10.213.0.2 two\n";
    assert_eq!(names::hosts_like(machine, Subnet::default(), &names), expected);
}

#[test]
fn an_address_that_the_machine_lacks_is_named() {
    if !rekindle_testing::root() {
        return;
    }
    let job = links::new_namespace().unwrap();
    let local = "192.0.2.77".parse().unwrap();
    let error = plan(Kind::Vxlan { vni: 1, port: 4790, local }).join(job.as_fd()).unwrap_err();
    assert!(matches!(error, Error::Underlay(_)), "{error:?}");
    assert!(matches!(largest_packet(local), Err(Error::Underlay(_))));
}

#[test]
fn a_cable_is_out_at_first_and_leaves_nothing() {
    if !rekindle_testing::root() {
        return;
    }
    let kind = Kind::Vxlan { vni: 77, port: 24790, local: [127, 0, 0, 1].into() };
    // The same VNI again: a drop removes the first device.
    for _ in 0..2 {
        let job = links::new_namespace().unwrap();
        let cable = plan(kind.clone()).join(job.as_fd()).unwrap();
        let carrier = || {
            let inside = Links::of(job.as_fd()).unwrap();
            inside.find(DEVICE).unwrap()
        };
        assert_eq!(carrier().mtu, cable.mtu());
        assert_eq!(cable.mtu(), largest_packet([127, 0, 0, 1].into()).unwrap());
        let begun = Instant::now();
        for _ in 0..10 {
            cable.plug().unwrap();
            cable.plug().unwrap();
            let out = cable.unplug().unwrap();
            cable.unplug().unwrap().leave_out();
            drop(out);
            cable.unplug().unwrap().plug().unwrap();
        }
        eprintln!("60 changes of the cable took {:?}", begun.elapsed());
        cable.set_peers(&[(1, IpAddr::from([192, 0, 2, 9]))].into()).unwrap();
        cable.set_peers(&BTreeMap::new()).unwrap();
    }
}

#[test]
fn this_machine_has_what_a_group_needs_unless_the_port_is_taken() {
    if !rekindle_testing::root() {
        return;
    }
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    assert!(matches!(check_machine(port), Err(Error::Port(taken)) if taken == port));
    drop(socket);
    // A child of another test may have it until it executes its program.
    let deadline = Instant::now() + Duration::from_secs(30);
    while std::net::UdpSocket::bind(("0.0.0.0", port)).is_err() {
        assert!(Instant::now() < deadline, "the port stays taken");
        std::thread::sleep(Duration::from_millis(5));
    }
    check_machine(port).unwrap();
}

#[test]
fn the_network_of_a_killed_supervisor_is_not_at_the_bridge_any_more() {
    if !rekindle_testing::root() {
        return;
    }
    let name = format!("rkt{}", std::process::id());
    let bridge = Plan { mtu: Some(1400), ..plan(Kind::Bridge { name: name.clone() }) };
    let namespaces = [links::new_namespace().unwrap(), links::new_namespace().unwrap()];
    let [left, ours] = &namespaces;
    let devices = |of: &std::os::fd::OwnedFd| Links::of(of.as_fd()).unwrap().find(DEVICE).is_ok();
    // Its supervisor is gone, and an orphaned connection keeps the namespace.
    std::mem::forget(bridge.join(left.as_fd()).unwrap());
    assert!(devices(left));
    let cable = bridge.join(ours.as_fd()).unwrap();
    assert!(!devices(left) && devices(ours), "it would answer for the job that is restored");
    // Another rank, and the same one at another bridge, are somebody else.
    let other = links::new_namespace().unwrap();
    let second = Plan { rank: 1, ..bridge.clone() }.join(other.as_fd()).unwrap();
    assert!(devices(ours) && devices(&other));
    assert_ne!(port(&name, 0), port("another", 0));
    assert!(port(&name, u32::MAX).len() <= 15);
    drop((cable, second));
    let here = Links::here().unwrap();
    here.remove(here.find(&name).unwrap().index).unwrap();
}

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::*;

const A: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const B: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const MACS: [Mac; 2] = [[2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]];

/// Runs this in that namespace.
fn within<T: Send>(namespace: &OwnedFd, work: impl FnOnce() -> T + Send) -> T {
    on_a_thread(|| {
        setns(namespace, CloneFlags::CLONE_NEWNET)?;
        Ok(work())
    })
    .unwrap()
}

#[test]
fn two_namespaces_speak_over_vxlan_as_long_as_the_lower_device_is_on() {
    if !rekindle_testing::root() {
        return;
    }
    // Two hosts, joined by a pair of devices; each has a hidden namespace with the VXLAN device and one for the job.
    let [hosts, hidden, jobs] = [(); 3].map(|()| [(); 2].map(|()| new_namespace().unwrap()));
    let underlay = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
    let host = [Links::of(hosts[0].as_fd()).unwrap(), Links::of(hosts[1].as_fd()).unwrap()];
    host[0].add_veth("wire", "wire", [2, 1, 0, 0, 0, 2], 1500, hosts[1].as_fd()).unwrap();
    let mut cables = Vec::new();
    for (at, host) in host.iter().enumerate() {
        let wire = host.find("wire").unwrap();
        host.add_address(wire.index, underlay[at], 24).unwrap();
        host.up(wire.index).unwrap();
        assert_eq!(host.with_address(underlay[at].into()).unwrap(), wire);
        let vxlan = Vxlan { vni: 7, port: 4790, local: underlay[at].into(), mtu: wire.mtu - 50 };
        host.add_vxlan("cable", &vxlan, hidden[at].as_fd()).unwrap();
        assert_eq!(host.find("cable").unwrap_err().raw_os_error(), Some(libc::ENODEV));
        let lower = Links::of(hidden[at].as_fd()).unwrap();
        let cable = lower.find("cable").unwrap();
        assert_eq!(cable.mtu, 1450);
        lower.up(cable.index).unwrap();
        lower.add_macvlan("rk0", cable, MACS[at], jobs[at].as_fd()).unwrap();
        lower.set_forwarding(cable.index, MACS[1 - at], underlay[1 - at].into()).unwrap();
        let job = Links::of(jobs[at].as_fd()).unwrap();
        let device = job.find("rk0").unwrap();
        job.add_address(device.index, [A, B][at], 16).unwrap();
        job.up(device.index).unwrap();
        job.set_neighbour(device.index, [B, A][at], MACS[1 - at]).unwrap();
        cables.push((lower, cable));
    }
    let listener = within(&jobs[0], || TcpListener::bind((A, 0)).unwrap());
    let at = listener.local_addr().unwrap();
    let mut client = within(&jobs[1], || TcpStream::connect_timeout(&at, Duration::from_secs(5)).unwrap());
    let mut server = listener.accept().unwrap().0;
    let limit = |stream: &TcpStream, limit| stream.set_read_timeout(Some(limit)).unwrap();
    let mut heard = [0; 2];
    limit(&server, Duration::from_secs(5));
    client.write_all(b"in").unwrap();
    server.read_exact(&mut heard).unwrap();

    let (lower, cable) = &cables[0];
    lower.down(cable.index).unwrap();
    lower.down(cable.index).unwrap();
    client.write_all(b"ou").unwrap();
    limit(&server, Duration::from_millis(300));
    assert!(server.read_exact(&mut heard).is_err(), "it came through a device that is off");
    // The routes of the job stay: a connection waits, it does not fail.
    let error =
        within(&jobs[0], || TcpStream::connect_timeout(&(B, 1).into(), Duration::from_millis(300)).unwrap_err());
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    lower.up(cable.index).unwrap();
    // It is sent again after up to as long as the device was off.
    limit(&server, Duration::from_secs(30));
    server.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"ou");

    // Without a forwarding entry nothing is sent.
    lower.remove_forwarding(cable.index, MACS[1]).unwrap();
    lower.remove_forwarding(cable.index, MACS[1]).unwrap();
    limit(&client, Duration::from_millis(300));
    server.write_all(b"no").unwrap();
    assert!(client.read_exact(&mut heard).is_err());
    lower.set_forwarding(cable.index, MACS[1], underlay[1].into()).unwrap();
    limit(&client, Duration::from_secs(5));
    client.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"no");
}

#[test]
fn a_bridge_joins_namespaces() {
    if !rekindle_testing::root() {
        return;
    }
    let [host, one, two] = [(); 3].map(|()| new_namespace().unwrap());
    let links = Links::of(host.as_fd()).unwrap();
    links.add_bridge("group").unwrap();
    assert_eq!(links.add_bridge("group").unwrap_err().raw_os_error(), Some(libc::EEXIST));
    let bridge = links.find("group").unwrap();
    links.up(bridge.index).unwrap();
    for (at, (namespace, name)) in [(&one, "a"), (&two, "b")].into_iter().enumerate() {
        links.add_veth(name, "rk0", MACS[at], 1500, namespace.as_fd()).unwrap();
        let port = links.find(name).unwrap();
        links.join_bridge(port.index, bridge.index).unwrap();
        links.up(port.index).unwrap();
        let job = Links::of(namespace.as_fd()).unwrap();
        let device = job.find("rk0").unwrap();
        job.add_address(device.index, [A, B][at], 16).unwrap();
        job.up(device.index).unwrap();
    }
    let listener = within(&one, || TcpListener::bind((A, 0)).unwrap());
    let at = listener.local_addr().unwrap();
    drop(within(&two, || TcpStream::connect_timeout(&at, Duration::from_secs(5)).unwrap()));
    let port = links.find("a").unwrap();
    links.remove(port.index).unwrap();
    assert_eq!(links.remove(port.index).unwrap_err().raw_os_error(), Some(libc::ENODEV));
}

//! With the real CRIU: a TCP stream between two nodes goes on after both were restored elsewhere, without one wrong or
//! missing byte.

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::sched::{CloneFlags, setns};
use rekindle_criu::{self as criu, Criu, DumpOptions, Hooks, Place, RestoreOptions, Tcp};
use rekindle_os::process;
use rekindle_os::spawn::{Child, Open, Spawn};

use super::super::*;
use crate::launch::world::{FIRST_PID, Network, World, last_pid_for};

/// Records of 4 KiB: a number, and the hash of the number. Rank 0 checks each and writes the number of the last one
/// into its file, whose size never changes.
const JOB: &str = r#"
import hashlib, os, socket, sys, time
rank, file = int(sys.argv[1]), os.open(sys.argv[2], os.O_RDWR)
def record(number):
    return (b"%020d" % number + hashlib.sha256(b"%d" % number).digest()).ljust(4096, b"x")
def fail(what):
    os.pwrite(file, what.encode()[:20].ljust(20), 0)
    os._exit(3)
number = 0
if rank == 0:
    listener = socket.create_server(("10.213.0.1", 7000))
    stream = listener.accept()[0]
    while True:
        data = b""
        while len(data) < 4096:
            part = stream.recv(4096 - len(data))
            if not part:
                fail("bad: end of stream")
            data += part
        if data != record(number):
            fail("bad record %d" % number)
        number += 1
        os.pwrite(file, b"%020d" % number, 0)
else:
    while True:
        try:
            stream = socket.create_connection(("10.213.0.1", 7000), timeout=1)
            break
        except OSError:
            time.sleep(0.02)
    stream.settimeout(None)
    while True:
        stream.sendall(record(number))
        number += 1
"#;

/// A machine: the namespace in which its supervisor would run, with an address of the underlay.
struct Machine {
    namespace: OwnedFd,
    address: IpAddr,
}

impl Machine {
    /// Joined with the others by a bridge in `hub`.
    fn new(hub: &OwnedFd, last: u8) -> Machine {
        let namespace = links::new_namespace().unwrap();
        let address = Ipv4Addr::new(192, 0, 2, last);
        let (hub, here) = (Links::of(hub.as_fd()).unwrap(), Links::of(namespace.as_fd()).unwrap());
        let name = format!("m{last}");
        hub.add_veth(&name, "wire", [2, 1, 0, 0, 0, last], 1500, namespace.as_fd()).unwrap();
        let port = hub.find(&name).unwrap().index;
        hub.join_bridge(port, hub.find("hub").unwrap().index).unwrap();
        hub.up(port).unwrap();
        let wire = here.find("wire").unwrap().index;
        here.up(wire).unwrap();
        here.add_address(wire, address, 24).unwrap();
        Machine { namespace, address: address.into() }
    }

    /// Runs this as a supervisor on the machine would.
    fn run<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        // The thread that forks belongs to the namespace of whoever needs it first, and serves all tests of this
        // process.
        let first = Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap().dies_with_us().start().unwrap();
        let _ = first.wait();
        std::thread::scope(|scope| {
            let on_it = || {
                setns(&self.namespace, CloneFlags::CLONE_NEWNET).unwrap();
                work()
            };
            scope.spawn(on_it).join().unwrap()
        })
    }
}

struct Node<'a> {
    rank: u32,
    folder: &'a Path,
    criu: &'a Criu,
    world: World,
    root: Option<Child>,
}

fn folder_of(base: &Path, rank: u32) -> PathBuf {
    let folder = base.join(rank.to_string());
    fs::create_dir_all(folder.join("work")).unwrap();
    folder
}

fn world(machine: &Machine, folder: &Path, rank: u32, vni: u32, peer: IpAddr, last_pid: i32) -> World {
    let reaper = crate::launch::reaper::unpack(folder).unwrap();
    let plan = Plan {
        subnet: Subnet::default(),
        rank,
        size: 2,
        kind: Kind::Vxlan { vni, port: 4790, local: machine.address },
        mtu: None,
        peers: [(1 - rank, peer)].into(),
        names: [(0, vec!["node-a".to_owned()])].into(),
        directory: folder.to_path_buf(),
    };
    machine.run(|| World::new(&reaper, last_pid, Network::Group(&plan, None, None)).unwrap())
}

impl Node<'_> {
    fn start(&mut self) {
        let progress = self.folder.join("progress");
        fs::write(&progress, format!("{:020}", 0)).unwrap();
        let args = ["-S".into(), "-c".into(), JOB.into(), self.rank.to_string().into(), progress.into_os_string()];
        let null = |fd, flags| Open { fd, path: std::ffi::CString::from(c"/dev/null"), flags, expect: None };
        let spawn = Spawn::new(Path::new("/usr/bin/python3"), args).unwrap().session();
        let spawn = spawn.open(null(0, libc::O_RDONLY)).open(null(1, libc::O_WRONLY)).open(null(2, libc::O_WRONLY));
        self.root = Some(spawn.world(self.world.entrance().unwrap()).start().unwrap());
    }

    fn images(&self, moment: u32) -> PathBuf {
        let images = self.folder.join(format!("images-{moment}"));
        fs::create_dir_all(&images).unwrap();
        images
    }

    fn place<'a>(&'a self, images: &'a Path, work: &'a Path) -> Place<'a> {
        Place {
            criu: self.criu,
            init: Some(self.world.init()),
            images,
            opened: None,
            work,
            timeout: Duration::from_secs(60),
        }
    }

    fn dump(&self, moment: u32) {
        let root = process::inner_pid(self.root.as_ref().unwrap().pid()).unwrap();
        let options = DumpOptions {
            root,
            tcp: Tcp::Keep,
            ghost_limit: 1 << 20,
            freeze_timeout: Duration::from_secs(10),
            plugin: None,
        };
        let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, died: &|| None, abandon: &|| {} };
        let (images, work) = (self.images(moment), self.folder.join("work"));
        criu::dump(&self.place(&images, &work), options, &mut hooks).unwrap();
        // As `close_in_image` does: nothing within the group is closed.
        let group = Subnet::default();
        assert_eq!(
            criu::image::close_connections_outwards(&crate::samples::beneath(&images), &|at| group.contains(at))
                .unwrap(),
            0
        );
    }

    fn restore(&mut self, moment: u32) {
        let options = RestoreOptions { tcp: Tcp::Keep, ..RestoreOptions::default() };
        let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, died: &|| None, abandon: &|| {} };
        let (images, work) = (self.images(moment), self.folder.join("work"));
        let restored = criu::restore(&self.place(&images, &work), options, &mut hooks).unwrap();
        self.root = Some(restored.root);
    }

    fn end(&mut self) {
        self.world.end(self.root.take().as_ref());
    }
}

impl Drop for Node<'_> {
    fn drop(&mut self) {
        self.end();
    }
}

/// How many records rank 0 has checked.
fn progress(base: &Path) -> u64 {
    let text = fs::read_to_string(base.join("0/progress")).unwrap_or_default();
    assert!(!text.contains("bad"), "{text}");
    text.trim().parse().unwrap_or_default()
}

fn goes_on(base: &Path, what: &str) -> u64 {
    let (before, until) = (progress(base), Instant::now() + Duration::from_secs(30));
    while progress(base) < before + 50 {
        assert!(Instant::now() < until, "{what}: stands still at {before}");
        std::thread::sleep(Duration::from_millis(5));
    }
    progress(base)
}

#[test]
fn a_stream_between_nodes_goes_on_after_both_are_restored_elsewhere() {
    static NEXT: AtomicU32 = AtomicU32::new(100);
    let criu = Criu::find(std::env::var_os("REKINDLE_CRIU").as_deref().map(Path::new));
    let python = Path::new("/usr/bin/python3").exists();
    if !rekindle_testing::root()
        || !rekindle_testing::require("python", python, "there is no /usr/bin/python3")
        || !rekindle_testing::require("criu", criu.is_ok(), "no usable CRIU")
    {
        return;
    }
    let criu = criu.unwrap();
    let rounds: u32 = std::env::var("REKINDLE_GROUP_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(4);
    let base = tempfile::tempdir().unwrap();
    let (base, hub) = (base.path(), links::new_namespace().unwrap());
    let folders = [folder_of(base, 0), folder_of(base, 1)];
    let hub_links = Links::of(hub.as_fd()).unwrap();
    hub_links.add_bridge("hub").unwrap();
    hub_links.up(hub_links.find("hub").unwrap().index).unwrap();

    let mut machines = [Machine::new(&hub, 1), Machine::new(&hub, 2)];
    let vni = || NEXT.fetch_add(1, Ordering::Relaxed);
    let node = |machines: &[Machine; 2], rank: u32, vni, last_pid| {
        let [one, other] = if rank == 0 { [0, 1] } else { [1, 0] };
        let folder = &folders[one];
        let world = world(&machines[one], folder, rank, vni, machines[other].address, last_pid);
        Node { rank, folder, criu: &criu, world, root: None }
    };
    let first = vni();
    let mut nodes = [node(&machines, 0, first, FIRST_PID - 1), node(&machines, 1, first, FIRST_PID - 1)];
    for node in &mut nodes {
        node.start();
        node.world.cable().unwrap().plug().unwrap();
    }
    goes_on(base, "at the start");
    for round in 0..rounds {
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
        std::thread::sleep(Duration::from_millis(u64::from(nanos % 97)));
        let mut slowest = Duration::ZERO;
        let out = nodes.each_ref().map(|node| {
            let begun = Instant::now();
            let out = node.world.cable().unwrap().unplug().unwrap();
            slowest = slowest.max(begun.elapsed());
            out
        });
        // The first node runs on after its dump while the other one is still being dumped.
        let order = if nanos.is_multiple_of(2) { [0, 1] } else { [1, 0] };
        nodes[order[0]].dump(round);
        std::thread::sleep(Duration::from_millis(u64::from(nanos % 53)));
        nodes[order[1]].dump(round);
        let dumped = progress(base);
        for out in out {
            out.plug().unwrap();
        }
        let later = goes_on(base, "after the snapshot");
        let pids: Vec<i32> = nodes
            .iter()
            .flat_map(|node| process::tree(node.root.as_ref().unwrap().pid()))
            .filter_map(process::inner_pid)
            .collect();
        nodes.iter_mut().for_each(Node::end);
        drop(nodes);
        // One machine is another, with another address; the network has another number.
        let last = u8::try_from(10 + round).unwrap();
        machines[usize::from(nanos.is_multiple_of(3))] = Machine::new(&hub, last);
        let next = vni();
        let last_pid = last_pid_for(&pids);
        nodes = [node(&machines, 0, next, last_pid), node(&machines, 1, next, last_pid)];
        for node in &mut nodes {
            node.restore(round);
        }
        for node in &nodes {
            node.world.cable().unwrap().plug().unwrap();
        }
        let until = Instant::now() + Duration::from_secs(30);
        while progress(base) <= later + 20 {
            assert!(Instant::now() < until, "round {round}: stands still at {}", progress(base));
            std::thread::sleep(Duration::from_millis(5));
        }
        eprintln!("round {round}: dumped at {dumped}, killed at {later}, now {}; cable {slowest:?}", progress(base));
    }
}

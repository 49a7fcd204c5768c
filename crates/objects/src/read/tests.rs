//! Recording, on processes of our own.

use std::io::Read;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rekindle_os::{process, ptrace};

use super::*;
use crate::compare;
use crate::record::{Descriptor, Process};

/// Opens one of each kind, prints the numbers, and waits.
const OBJECTS: &str = r"
import fcntl, os, select, signal, socket, sys, threading, time
libc = __import__('ctypes').CDLL(None, use_errno=True)
keep = []
r, w = os.pipe(); os.write(w, b'abc'); fcntl.fcntl(w, 1031, 8192)
twice = os.dup(r)
event = libc.eventfd(7, 1)
epoll = select.epoll(); epoll.register(event, select.EPOLLIN)
timer = libc.timerfd_create(1, 0)
m = os.memfd_create('x', os.MFD_ALLOW_SEALING); fcntl.fcntl(m, 1033, 2)
tcp = socket.socket(); tcp.setsockopt(socket.IPPROTO_TCP, 18, 1234); tcp.bind(('127.0.0.1', 0)); tcp.listen()
client = socket.create_connection(tcp.getsockname()); served = tcp.accept()[0]
client.sendall(b'12345')
a, b = socket.socketpair()
udp = socket.socket(type=socket.SOCK_DGRAM); udp.setsockopt(socket.SOL_IP, socket.IP_TOS, 8)
tty, slave = os.openpty()
thread = threading.Thread(target=time.sleep, args=(600,), daemon=True); thread.start()
signal.signal(signal.SIGUSR1, lambda *_: None)
names = dict(r=r, w=w, twice=twice, event=event, epoll=epoll.fileno(), timer=timer, memfd=m, tcp=tcp.fileno(),
             client=client.fileno(), served=served.fileno(), a=a.fileno(), udp=udp.fileno(), tty=tty)
print(' '.join(f'{name}={number}' for name, number in names.items()), flush=True)
time.sleep(600)
";

/// A program that leads a process group of its own, and its output, which it needs while it runs.
struct Reaped(Child, std::process::ChildStdout);

impl Drop for Reaped {
    fn drop(&mut self) {
        let group = nix::unistd::Pid::from_raw(self.0.id().cast_signed());
        let _ = nix::sys::signal::killpg(group, nix::sys::signal::SIGKILL);
        let _ = self.0.wait();
    }
}

/// The program, stopped, and the numbers of its descriptors by name.
fn started(script: &str, arguments: &[&str]) -> (Reaped, BTreeMap<String, i32>) {
    let mut child = Command::new("/usr/bin/python3");
    // Others write to what is our standard error, and move its position.
    let child =
        child.args(["-c", script]).args(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
    let mut child = child.spawn().unwrap();
    let out = child.stdout.take().unwrap();
    let mut child = Reaped(child, out);
    let mut line = Vec::new();
    while !line.ends_with(b"\n") {
        let mut byte = [0];
        assert_eq!(child.1.read(&mut byte).unwrap(), 1, "it ended");
        line.push(byte[0]);
    }
    let line = String::from_utf8(line).unwrap();
    let names = line.split_whitespace().filter_map(|word| word.split_once('='));
    let names = names.map(|(name, number)| (name.to_owned(), number.parse().unwrap())).collect();
    (child, names)
}

fn only(record: &Record) -> &Process {
    assert_eq!(record.processes.len(), 1);
    &record.processes[0]
}

#[test]
fn each_kind_of_object_is_recorded_with_what_it_has() {
    let (child, names) = started(OBJECTS, &[]);
    let pid = child.0.id().cast_signed();
    ptrace::stop(pid, std::time::Duration::from_secs(5)).unwrap();
    let record = Raw::read(&[pid]).record("4.2.1");
    let process = only(&record);
    assert_eq!((process.pid, process.threads.len()), (pid, 2));
    let of = |name: &str| -> &Descriptor {
        let number = names[name];
        process.descriptors.iter().find(|descriptor| descriptor.number == number).unwrap()
    };
    let has = |name: &str, item: &str| of(name).items.get(item).cloned().unwrap_or_default();
    assert_eq!(has("w", "size"), "8192");
    assert_eq!(has("r", "queued"), "3");
    assert_eq!(has("w", "object"), format!("descriptor {} of {pid}", names["r"]), "the same pipe");
    assert_eq!(has("twice", "same"), format!("descriptor {} of {pid}", names["r"]));
    assert_eq!(has("w", "same"), "", "the other end is another open file");
    assert_eq!(
        (has("event", "kind"), has("event", "count"), has("event", "semaphore")),
        ("eventfd".into(), "7".into(), "1".into())
    );
    assert!(has("epoll", "epoll").starts_with(&format!("{} events 1", names["event"])));
    assert_eq!(has("timer", "armed"), "no");
    assert_eq!(has("memfd", "seals"), "2");
    assert_eq!((has("tcp", "state"), has("tcp", "TCP_USER_TIMEOUT")), ("listens".into(), "1234".into()));
    assert_eq!((has("client", "state"), has("served", "readable")), ("connected".into(), "5".into()));
    assert_eq!(has("client", "peer"), has("tcp", "address"));
    assert_eq!(has("udp", "IP_TOS"), "8");
    assert!(!has("tty", "settings").is_empty());
    assert!(process.mappings.iter().any(|mapping| mapping.name == "[stack]"));
    let kinds = record.kinds();
    assert!(kinds.contains("socket 2 1 6 listens") && kinds.contains("eventfd"), "{kinds:?}");
    assert!(compare(&record, &Raw::read(&[pid]).record("4.2.1")).is_empty());
}

/// A tree of processes that change all they have, all the time.
const BUSY: &str = r"
import mmap, os, select, socket, sys, threading, time
children = int(sys.argv[1])
for n in range(children):
    if os.fork() == 0:
        break
libc = __import__('ctypes').CDLL(None)
files = [open('/proc/self/stat') for _ in range(20)] + [socket.socketpair() for _ in range(10)]
a, b = socket.socketpair()
server = socket.socket(); server.bind(('127.0.0.1', 0)); server.listen()
client = socket.create_connection(server.getsockname()); served = server.accept()[0]
udp = socket.socket(type=socket.SOCK_DGRAM); udp.bind(('127.0.0.1', 0)); udp.setblocking(False)
r, w = os.pipe()
epoll = select.epoll()
timer = libc.timerfd_create(1, 0)
threading.Thread(target=lambda: [time.sleep(0.001) for _ in range(10**6)], daemon=True).start()
if n == children - 1: print('ready', flush=True)
n = 0
while True:
    n += 1
    os.lseek(files[0].fileno(), n, 0)
    keep = bytes(n % 50000), mmap.mmap(-1, 4096 * (n % 9 + 1)), open('/dev/null'), socket.socket()
    a.send(b'x'); client.send(b'xx'); os.write(w, b'xxx'); udp.sendto(b'x', udp.getsockname())
    epoll.register(keep[3], select.EPOLLIN)
    libc.timerfd_settime(timer, 0, (n % 1000 * 10**9).to_bytes(16, 'little') + bytes([n % 9] + [0] * 15), None)
    os.setpriority(os.PRIO_PROCESS, 0, min(n % 3 + os.getpriority(os.PRIO_PROCESS, 0), 19))
    if n % 3 == 0: b.recv(9); served.recv(9); os.read(r, 9); udp.recv(9)
    epoll.unregister(keep[3])
";

/// What is not stopped changes; everything that was recorded while it was stopped stays.
fn records_do_not_differ(children: usize, runs: usize) {
    let (child, _) = started(BUSY, &[&children.to_string()]);
    let root = child.0.id().cast_signed();
    for _ in 0..runs {
        let tree = process::tree(root);
        assert!(tree.len() > children, "{tree:?}");
        tree.iter().for_each(|pid| assert!(ptrace::stop(*pid, std::time::Duration::from_secs(30)).is_ok()));
        let (one, other) = (Raw::read(&tree).record(""), Raw::read(&tree).record(""));
        let found = compare(&one, &other);
        assert!(found.is_empty(), "{found:?}");
        tree.iter().for_each(|pid| ptrace::go_on(*pid).unwrap());
    }
}

#[test]
fn two_records_of_a_stopped_tree_do_not_differ() {
    records_do_not_differ(8, 20);
}

#[test]
#[ignore = "takes half an hour"]
fn a_thousand_records_of_a_busy_tree_of_fifty_do_not_differ() {
    records_do_not_differ(49, 1000);
}

/// How long it takes for one process, and for ten with 1,000 descriptors. Not a test: a measure.
#[test]
#[ignore = "a measure"]
fn it_takes() {
    for (name, script) in [("one", "import time; print('x', flush=True); time.sleep(600)".to_owned()), ("objects", OBJECTS.to_owned()), (
        "ten with 100 each",
        "import os, socket, sys, time\n\
         for n in range(9):\n    if os.fork() == 0: break\n\
         f = [open('/proc/self/stat') for _ in range(30)] + [os.pipe() for _ in range(15)] + [socket.socketpair() for _ in range(10)] \
         + [socket.socket() for _ in range(15)]\n\
         if n == 8: print('x', flush=True)\ntime.sleep(600)"
            .to_owned(),
    )] {
        let (child, _) = started(&script, &[]);
        let tree = process::tree(child.0.id().cast_signed());
        let mut times: Vec<_> = (0..50)
            .map(|_| {
                let began = std::time::Instant::now();
                let raw = Raw::read(&tree);
                let took = began.elapsed();
                (took, raw.record("").to_bytes().unwrap().len())
            })
            .collect();
        times.sort_unstable();
        println!("{name}: {} processes, median {:?}, best {:?}", tree.len(), times[25], times[0]);
    }
}

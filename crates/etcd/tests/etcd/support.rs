//! Real members of etcd on loopback.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use rekindle_etcd::{Client, Compare, Error, Event, Follower, Lease, Op, Options, Txn};
use rekindle_os::clock::since_boot;
use rekindle_testing::needs;

use crate::links::Links;

/// The prefix of all keys.
pub(crate) const PREFIX: &str = "/rekindle/test/";

/// The longest that anything here may take, on a busy machine.
pub(crate) const LONG: Duration = Duration::from_secs(60);

/// Options of etcdctl for a busy machine: by itself it waits for 2 s and 5 s.
pub(crate) const PATIENT: [&str; 4] = ["--dial-timeout", "30s", "--command-timeout", "30s"];

fn found(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Whether there is an etcd to test with.
pub(crate) fn etcd() -> bool {
    let both = found("etcd").and_then(|_| found("etcdctl"));
    needs("etcd", both, "no etcd or etcdctl: run scripts/deps.sh etcd").is_some()
}

/// A folder in memory: three members on a slow disk would lose their leader by themselves.
pub(crate) fn folder() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Ports of this machine's address, and of loopback, that nobody uses. The kernel gives none of them to sockets that
/// want any port, so nobody else has one before its server listens, or while that starts again.
pub(crate) fn ports(host: &str, count: usize) -> Vec<u16> {
    const FIRST: u32 = 20_000;
    const END: u32 = 32_768;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let port = || {
        // Tests of other processes begin elsewhere.
        let next = std::process::id().wrapping_mul(997).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        u16::try_from(FIRST + next % (END - FIRST)).unwrap()
    };
    let is_free = |host: &str, port: u16| TcpListener::bind((host, port)).is_ok();
    let free = std::iter::repeat_with(port).filter(|port| is_free(host, *port) && is_free("127.0.0.1", *port));
    free.take(count).collect()
}

/// A member.
pub(crate) struct Member {
    name: String,
    pub(crate) client: String,
    /// Where the others reach it.
    peer: String,
    /// Where it listens for them.
    listen: String,
    child: Option<Child>,
    stopped: bool,
}

/// A cluster, whose members are killed when it is dropped.
pub(crate) struct Cluster {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) members: Vec<Member>,
    token: String,
    more: Vec<String>,
    /// Options of etcdctl.
    pub(crate) control: Vec<String>,
}

impl Cluster {
    pub(crate) fn start(count: usize) -> Cluster {
        Cluster::with(count, "http", &[])
    }

    /// A cluster with more options for etcd.
    pub(crate) fn with(count: usize, scheme: &str, more: &[&str]) -> Cluster {
        Cluster::within(folder(), count, scheme, more, &[], None)
    }

    /// A cluster that other machines reach at this address.
    #[allow(dead_code, reason = "tests of groups use it")]
    pub(crate) fn at(host: &str, count: usize) -> Cluster {
        Cluster::on(host, folder(), count, "http", &[], &[], None)
    }

    /// A cluster whose members can be cut off from each other.
    pub(crate) fn linked(count: usize, more: &[&str]) -> (Cluster, Links) {
        let links = Links::default();
        let cluster = Cluster::within(folder(), count, "http", more, &[], Some(links.clone()));
        drop(cluster.client());
        // ID, status, name, ...
        let list = cluster.control(0, &["member", "list"]);
        let mut ids: Vec<_> = list.lines().map(|line| line.split(", ").collect::<Vec<_>>()).collect();
        ids.sort_by_key(|fields| fields[2].to_owned());
        links.name(ids.into_iter().map(|fields| fields[0].to_owned()).collect());
        (cluster, links)
    }

    pub(crate) fn within(
        folder: tempfile::TempDir,
        count: usize,
        scheme: &str,
        more: &[&str],
        control: &[&str],
        links: Option<Links>,
    ) -> Cluster {
        Cluster::on("127.0.0.1", folder, count, scheme, more, control, links)
    }

    fn on(
        host: &str,
        folder: tempfile::TempDir,
        count: usize,
        scheme: &str,
        more: &[&str],
        control: &[&str],
        links: Option<Links>,
    ) -> Cluster {
        let ports = ports(host, count * 2);
        let members = (0..count).map(|n| {
            let listen = format!("127.0.0.1:{}", ports[n * 2 + 1]);
            let peer = links.as_ref().map_or_else(|| listen.clone(), |links| links.before(n, listen.clone()));
            Member {
                name: format!("m{n}"),
                client: format!("{scheme}://{host}:{}", ports[n * 2]),
                peer: format!("http://{peer}"),
                listen: format!("http://{listen}"),
                child: None,
                stopped: false,
            }
        });
        let token = format!("test-{}", ports.first().copied().unwrap_or_default());
        let owned = |list: &[&str]| list.iter().map(|&it| it.to_owned()).collect();
        let mut cluster =
            Cluster { members: members.collect(), folder, token, more: owned(more), control: owned(control) };
        for n in 0..count {
            cluster.run(n);
        }
        cluster
    }

    /// Starts a member, new or again.
    pub(crate) fn run(&mut self, n: usize) {
        let all: Vec<_> = self.members.iter().map(|member| format!("{}={}", member.name, member.peer)).collect();
        let member = &mut self.members[n];
        let log =
            fs::File::options().create(true).append(true).open(self.folder.path().join(format!("{}.log", member.name)));
        let log = log.unwrap();
        // A test that is killed leaves no member.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "etcd", "--name", &member.name, "--data-dir"]);
        command.arg(self.folder.path().join(&member.name));
        command.args(["--listen-client-urls", &member.client, "--advertise-client-urls", &member.client]);
        command.args(["--listen-peer-urls", &member.listen, "--initial-advertise-peer-urls", &member.peer]);
        command.args(["--initial-cluster", &all.join(","), "--initial-cluster-token", &self.token, "--logger", "zap"]);
        command.args(&self.more).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        member.child = Some(command.spawn().unwrap());
        member.stopped = false;
    }

    pub(crate) fn options(&self) -> Options {
        Options::new(self.members.iter().map(|member| member.client.clone()), PREFIX)
    }

    /// A connection, once the cluster has a leader.
    pub(crate) fn client(&self) -> Client {
        connected(&self.options())
    }

    fn pid(&self, n: usize) -> Pid {
        let id = self.members[n].child.as_ref().unwrap().id();
        Pid::from_raw(id.try_into().unwrap())
    }

    fn signal(&self, n: usize, signal: Signal) {
        kill(self.pid(n), signal).unwrap();
    }

    pub(crate) fn kill(&mut self, n: usize) {
        if let Some(mut child) = self.members[n].child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    pub(crate) fn runs(&self, n: usize) -> bool {
        self.members[n].child.is_some() && !self.members[n].stopped
    }

    #[allow(dead_code, reason = "tests of groups use it")]
    pub(crate) fn is_stopped(&self, n: usize) -> bool {
        self.members[n].stopped
    }

    /// The member hangs: it neither answers nor closes its connections.
    pub(crate) fn stop(&mut self, n: usize) {
        self.signal(n, Signal::SIGSTOP);
        // Until all its threads are stopped: one that is still at work could do the next request, and only not answer.
        let stopped = waitpid(self.pid(n), Some(WaitPidFlag::WUNTRACED)).unwrap();
        assert!(matches!(stopped, WaitStatus::Stopped(..)), "{stopped:?}");
        self.members[n].stopped = true;
    }

    pub(crate) fn go_on(&mut self, n: usize) {
        self.signal(n, Signal::SIGCONT);
        self.members[n].stopped = false;
    }

    /// etcdctl at one member.
    pub(crate) fn control(&self, n: usize, args: &[&str]) -> String {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.members[n].client]).args(PATIENT);
        command.args(&self.control).args(args);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    /// The leader, as a member that runs says.
    pub(crate) fn leader(&self) -> usize {
        let end = Instant::now() + LONG;
        while Instant::now() < end {
            for n in (0..self.members.len()).filter(|n| self.runs(*n)) {
                let output = Command::new("etcdctl")
                    .env("ETCDCTL_API", "3")
                    .args(["--endpoints", &self.members[n].client, "endpoint", "status", "--command-timeout", "1s"])
                    .args(&self.control)
                    .output();
                // ..., version, size, is leader, ...
                if String::from_utf8_lossy(&output.unwrap().stdout).split(", ").nth(4) == Some("true") {
                    return n;
                }
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("no leader");
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for n in 0..self.members.len() {
            self.kill(n);
        }
        if std::thread::panicking() {
            for member in &self.members {
                let log =
                    fs::read_to_string(self.folder.path().join(format!("{}.log", member.name))).unwrap_or_default();
                let lines: Vec<_> = log.lines().collect();
                eprintln!("--- {}\n{}", member.name, lines[lines.len().saturating_sub(15)..].join("\n"));
            }
        }
    }
}

/// A connection, once the cluster has a leader.
pub(crate) fn connected(options: &Options) -> Client {
    eventually("a connection", || Client::connect(options).ok())
}

/// Tries until there is a result.
pub(crate) fn eventually<T>(what: &str, mut attempt: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + LONG;
    loop {
        if let Some(result) = attempt() {
            return result;
        }
        assert!(Instant::now() < end, "{what}: not within {LONG:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Tries until it is done, while there is no answer in time or a leader has to be elected.
pub(crate) fn passing<T>(what: &str, mut attempt: impl FnMut() -> Result<T, Error>) -> T {
    eventually(what, || match attempt() {
        Ok(result) => Some(result),
        Err(error) => {
            assert!(passes(&error), "{what}: {error}");
            None
        }
    })
}

/// Whether an error says only that there was no answer, or no leader.
pub(crate) fn passes(error: &Error) -> bool {
    matches!(error, Error::Unreachable { .. } | Error::NoQuorum { .. } | Error::Unsure(_))
}

/// Whether a refusal says that etcd does not accept the client's certificate. The server closes the connection after it
/// has told why, and on a busy machine the client may see only that.
pub(crate) fn names_certificates(text: &str) -> bool {
    text.contains("does not accept the client's certificate") || text.contains("which certificates they accept")
}

pub(crate) fn key(name: &str) -> String {
    format!("{PREFIX}{name}")
}

pub(crate) fn put(name: &str, value: &str) -> Op {
    Op::Put { key: key(name), value: value.into(), lease: None }
}

/// Creates a key, which must not be there.
pub(crate) fn create(client: &Client, name: &str, value: &str) -> u64 {
    let txn = Txn::when([Compare::Absent(key(name))]).then([put(name, value)]).otherwise([Op::Get(key(name))]);
    let mut tries = 0;
    let answer = passing("a new key", || {
        tries += 1;
        client.txn(txn.clone())
    });
    if answer.succeeded {
        return answer.revision;
    }
    // An earlier try was done, although the client was not sure.
    let there = &answer.got[0][0];
    assert!(tries > 1 && there.value == value.as_bytes(), "{answer:?}");
    there.modified
}

/// A value.
pub(crate) fn value(client: &Client, name: &str) -> Option<String> {
    let state = passing("a value", || client.get(&key(name)));
    let entry = state.entries.into_iter().find(|entry| entry.key == key(name))?;
    Some(String::from_utf8(entry.value).unwrap())
}

/// A follower, and what it tells.
pub(crate) fn follow(client: &Client) -> (Follower, Receiver<Event>) {
    let (sender, receiver) = channel();
    (client.follow(PREFIX, move |event| drop(sender.send(event))).unwrap(), receiver)
}

/// The next event.
pub(crate) fn next(events: &Receiver<Event>) -> Event {
    events.recv_timeout(LONG).expect("an event")
}

/// The next event of a follower whose etcd was started again: on a busy machine that may take long enough to be told.
pub(crate) fn next_after_start(events: &Receiver<Event>) -> Event {
    loop {
        match next(events) {
            Event::Away { .. } | Event::Back => {}
            event => return event,
        }
    }
}

/// That there is no event for a while.
pub(crate) fn quiet(events: &Receiver<Event>, time: Duration) {
    assert_eq!(events.recv_timeout(time), Err(RecvTimeoutError::Timeout));
}

/// The time for which the lease certainly does not expire.
pub(crate) fn sure_for(lease: &Lease) -> Duration {
    lease.sure_until().saturating_sub(since_boot())
}

//! Whole groups whose members speak through a real etcd. Their jobs are stand-ins that do at once what is asked.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rekindle_engine::snapshot::Operations;
use rekindle_etcd::{Client, Local, LocalOptions, Op, Options, Secret, Txn};
use rekindle_group::{
    self as group, Action, Answer, Ask, End, Ending, Epoch, Event, Goal, Incarnation, Limits, Local as Happened,
    Machine, Number, Order, Part, Progress, Rank, Replicated, Restart, StartFrom, Stored, Write,
};
use rekindle_os::beneath::{Beneath, Owners};
use rekindle_os::clock::since_boot;
use rekindle_testing::needs;

use super::{CoordinatorEvent, HANGS, Identity, LEAST_HANG, PAUSE, Session, lock};
use crate::group::{Coordinator, Node};

/// On a busy machine, etcd may need a second and more for a write.
const LEASE: Duration = Duration::from_secs(6);
const LONG: Duration = Duration::from_secs(60);

fn node(size: u32) -> Node {
    Node {
        host: "here".into(),
        address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        rekindle: "1".into(),
        criu: "4".into(),
        driver: None,
        size,
        subnet: "10.213.0.0/16".into(),
        lease_s: LEASE.as_secs(),
        network: "vxlan".into(),
        packet: Some(1450),
        user: 0,
    }
}

fn options(rank: Rank, size: u32) -> group::Options {
    let seconds = Duration::from_secs;
    group::Options {
        rank,
        size,
        limits: Limits {
            wait: seconds(30),
            start: seconds(20),
            prepare: seconds(8),
            dump: seconds(8),
            store: seconds(30),
        },
        interval: None,
        retry_after: seconds(1),
        retry_max: seconds(1),
        restart: Restart {
            min_uptime: seconds(1),
            backoff: seconds(1),
            max_backoff: seconds(4),
            max_restarts: 7,
            window: seconds(60),
            healthy_uptime: seconds(60),
            early_deaths: 4,
            cold_start: rekindle_group::ColdStart::NoImages,
        },
        keep: 2,
        replicates: false,
        lease: LEASE,
        fence: Duration::from_millis(500),
        leases_end_early: false,
    }
}

/// What a test tells a member.
enum Word {
    Told(CoordinatorEvent),
    Ask(Ask),
    /// Its job dies.
    Die,
    /// The supervisor is killed: it says nothing more.
    Vanish,
}

/// What it says.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    Started(Epoch, StartFrom),
    Runs,
    Finished(End),
}

struct Handle {
    words: Sender<Word>,
    said: Receiver<Said>,
}

impl Handle {
    fn until(&self, wanted: impl Fn(&Said) -> bool) -> Said {
        let end = Instant::now() + LONG;
        let mut others = Vec::new();
        loop {
            match self.said.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(said) if wanted(&said) => return said,
                Ok(said) => others.push(said),
                Err(error) => panic!("it does not say so in time ({error}), only {others:?}"),
            }
        }
    }
}

fn member(etcd: &Options, rank: u32, size: u32, parts: BTreeMap<group::Number, Progress>) -> Handle {
    let (words, received) = channel();
    let (sender, said) = channel();
    let (own, etcd) = (words.clone(), etcd.clone());
    std::thread::spawn(move || {
        let identity =
            Identity { group: "test".parse().unwrap(), rank: Rank(rank), node: node(size), lease: LEASE, former: None };
        let told = own.clone();
        let session =
            Session::start(Coordinator::Given(etcd), identity, move |it| drop(told.send(Word::Told(it)))).unwrap();
        let machine = Machine::new(options(Rank(rank), size), Epoch::default());
        live(machine, session, &received, &sender, parts);
    });
    Handle { words, said }
}

fn live(
    mut machine: Machine,
    session: Session,
    words: &Receiver<Word>,
    said: &Sender<Said>,
    mut parts: BTreeMap<group::Number, Progress>,
) {
    let (mut membership, mut epoch) = (None::<super::Membership>, Epoch::default());
    loop {
        let now = Instant::now();
        let patience = machine.deadline().map_or(LEASE / 4, |at| at.saturating_duration_since(now).min(LEASE / 4));
        let mut events: VecDeque<Event> = match words.recv_timeout(patience) {
            // Without leaving, as if it was killed.
            Ok(Word::Vanish) => return,
            Ok(Word::Ask(ask)) => [Event::Asked(ask)].into(),
            Ok(Word::Die) => [Event::Local(Happened::Ended(Ending::failed("it died", None)))].into(),
            Ok(Word::Told(CoordinatorEvent::Group { view, .. })) => [Event::View(view)].into(),
            Ok(Word::Told(CoordinatorEvent::Joined(new))) => {
                let event = Event::Session(new.incarnation());
                membership = Some(new);
                [event].into()
            }
            Ok(Word::Told(CoordinatorEvent::Lost(..))) => [Event::SessionLost].into(),
            Ok(Word::Told(CoordinatorEvent::Wrote(answer))) => [Event::Wrote(answer)].into(),
            Ok(Word::Told(
                CoordinatorEvent::Away { .. }
                | CoordinatorEvent::Back
                | CoordinatorEvent::Refuses { .. }
                | CoordinatorEvent::Accepts,
            ))
            | Err(_) => [Event::Tick].into(),
            Ok(Word::Told(CoordinatorEvent::Failed { why } | CoordinatorEvent::Missing { why })) => panic!("{why}"),
            Ok(Word::Told(CoordinatorEvent::Moved)) => panic!("it was given"),
        };
        // Before it looks at the time, as the supervisor does, and for a membership that has just begun after it is known.
        let sure = || membership.as_ref().map(|it| Event::Sure(it.sure_until()));
        sure().into_iter().for_each(|event| events.push_front(event));
        events.extend(sure());
        while let Some(event) = events.pop_front() {
            for action in machine.step(event, Instant::now()) {
                let order = match action {
                    Action::Write(write) => {
                        session.write(write);
                        continue;
                    }
                    Action::Do(order) => order,
                };
                match order {
                    Order::List => events.push_back(Event::Local(Happened::Parts(parts.clone()))),
                    Order::Start { epoch: new, from, .. } => {
                        epoch = new;
                        let _ = said.send(Said::Started(epoch, from));
                        events.push_back(Event::Local(Happened::Started));
                    }
                    Order::Plug => drop(said.send(Said::Runs)),
                    Order::Prepare(number) => events.push_back(Event::Local(Happened::Locked(number))),
                    Order::Pull(number) => events.push_back(Event::Local(Happened::Quiet(number))),
                    Order::Dump(number) => {
                        let part = Part { image: number.to_string(), digest: "x".into() };
                        parts.insert(
                            number,
                            Progress {
                                part: part.clone(),
                                epoch,
                                origin: Incarnation(1),
                                size: 0,
                                stored: Stored::Durable,
                                replicated: Replicated::No,
                            },
                        );
                        events.push_back(Event::Local(Happened::Dumped(number, part)));
                    }
                    Order::Resume(number) | Order::Store(number) => {
                        events.push_back(Event::Local(Happened::Stored(number)))
                    }
                    Order::Abort(number) => events.push_back(Event::Local(Happened::Aborted(number))),
                    Order::Kill => events.push_back(Event::Local(Happened::Ended(Ending::Completed))),
                    Order::Forget(number) => drop(parts.remove(&number)),
                    Order::Fetch(_) | Order::Replicate(_) => panic!("there is no replica"),
                    Order::Finish(end) => {
                        session.leave(Duration::from_secs(5));
                        let _ = said.send(Said::Finished(end));
                        return;
                    }
                }
            }
        }
    }
}

fn local(folder: &Path) -> (Local, Options) {
    let local = Local::start(&LocalOptions {
        program: "etcd".into(),
        folder: Beneath::root(folder, Owners::Ours).unwrap().join("etcd"),
        listen: (Ipv4Addr::LOCALHOST, 0).into(),
        host: "127.0.0.1".into(),
        start_timeout: LONG,
    });
    let local = local.unwrap();
    let options = local.handout().options("/unused/");
    (local, options)
}

/// An etcd without keys and with little room, which starts when a test wants it.
struct Small {
    folder: tempfile::TempDir,
    client: String,
    peer: String,
    child: Option<Child>,
}

impl Small {
    fn new() -> Small {
        let sockets = [(); 2].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
        let [client, peer] = sockets.map(|socket| format!("http://{}", socket.local_addr().unwrap()));
        Small { folder: tempfile::tempdir().unwrap(), client, peer, child: None }
    }

    fn start(&mut self) {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "etcd", "--data-dir"]).arg(self.folder.path());
        command.args(["--listen-client-urls", &self.client, "--advertise-client-urls", &self.client]);
        command.args(["--listen-peer-urls", &self.peer, "--initial-advertise-peer-urls", &self.peer]);
        command.args(["--initial-cluster", &format!("default={}", self.peer), "--quota-backend-bytes", "1048576"]);
        self.child = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    }

    fn options(&self) -> Options {
        Options::new([self.client.clone()], "/unused/")
    }

    fn connect(&self) -> Client {
        let end = Instant::now() + LONG;
        loop {
            match Client::connect(&self.options()) {
                Ok(client) => return client,
                Err(error) => assert!(Instant::now() < end, "{error}"),
            }
        }
    }

    fn control(&self, args: &[&str]) {
        let mut command = Command::new("etcdctl");
        command.env("ETCDCTL_API", "3").args(["--endpoints", &self.client]).args(args);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}

/// A session alone, and what it tells.
fn session(etcd: &Options) -> (Session, Receiver<CoordinatorEvent>) {
    let (sender, told) = channel();
    (session_that_tells(etcd, move |it| drop(sender.send(it))), told)
}

fn session_that_tells(etcd: &Options, tell: impl Fn(CoordinatorEvent) + Clone + Send + 'static) -> Session {
    let identity =
        Identity { group: "test".parse().unwrap(), rank: Rank(0), node: node(1), lease: LEASE, former: None };
    Session::start(Coordinator::Given(etcd.clone()), identity, tell).unwrap()
}

fn joined(told: &Receiver<CoordinatorEvent>) -> super::Membership {
    loop {
        if let CoordinatorEvent::Joined(new) = told.recv_timeout(LONG).unwrap() {
            return new;
        }
    }
}

/// What a member of this membership writes first.
fn join(incarnation: Incarnation) -> Write {
    let mut machine = Machine::new(options(Rank(0), 1), Epoch::default());
    let now = Instant::now();
    machine.step(Event::Session(incarnation), now);
    let actions = machine.step(Event::Local(Happened::Parts(BTreeMap::new())), now);
    let Some(Action::Write(write)) = actions.into_iter().next() else { panic!("it does not join") };
    write
}

/// Writes. Returns the answer, and whether it was told before that etcd refuses or accepts it.
fn written(session: &Session, told: &Receiver<CoordinatorEvent>, write: Write) -> (Answer, Vec<Result<(), String>>) {
    session.write(write);
    let mut others = Vec::new();
    loop {
        match told.recv_timeout(LONG).unwrap() {
            CoordinatorEvent::Wrote(answer) => return (answer, others),
            CoordinatorEvent::Refuses { why } => others.push(Err(why)),
            CoordinatorEvent::Accepts => others.push(Ok(())),
            _ => {}
        }
    }
}

/// Where there is no etcd, the test says so and ends.
fn etcd() -> bool {
    let found = std::process::Command::new("etcd").arg("--version").output().ok().filter(|out| out.status.success());
    needs("etcd", found, "no etcd: run scripts/deps.sh etcd").is_some()
}

#[test]
fn a_group_starts_takes_images_and_goes_back_to_the_newest() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_local, options) = local(folder.path());
    let mut group: Vec<Handle> = (0..3).map(|rank| member(&options, rank, 3, BTreeMap::new())).collect();
    let all = |group: &[Handle], wanted: &Said| {
        for member in group {
            member.until(|said| said == wanted);
        }
    };
    all(&group, &Said::Started(Epoch(1), StartFrom::Beginning));
    all(&group, &Said::Runs);

    group[1].words.send(Word::Ask(Ask::Snapshot)).unwrap();
    // The record is committed when the next snapshot is taken: a member that stores has to be waited for.
    group[2].words.send(Word::Ask(Ask::Snapshot)).unwrap();
    let client = Client::connect(&options).unwrap();
    let images = format!("{}images/", super::keys::prefix(&"test".parse().unwrap()));
    let end = Instant::now() + LONG;
    let is_committed = |value: &[u8]| String::from_utf8_lossy(value).contains("\"committed\":true");
    while !client.get(&images).unwrap().entries.iter().any(|entry| is_committed(&entry.value)) {
        assert!(Instant::now() < end, "no image is committed");
        std::thread::sleep(Duration::from_millis(50));
    }
    group[0].words.send(Word::Die).unwrap();
    let restarted = |member: &Handle| member.until(|said| matches!(said, Said::Started(Epoch(2), StartFrom::Image(_))));
    let from = restarted(&group[0]);
    assert!(group[1..].iter().all(|member| restarted(member) == from), "{from:?}");
    all(&group, &Said::Runs);

    // One that is killed is waited for until its lease is over, and replaced by one that has its parts.
    let parts = |number| {
        let part = Part { image: Number(number).to_string(), digest: "x".into() };
        (
            Number(number),
            Progress {
                part,
                epoch: Epoch(1),
                origin: Incarnation(1),
                size: 0,
                stored: Stored::Durable,
                replicated: Replicated::No,
            },
        )
    };
    group[2].words.send(Word::Vanish).unwrap();
    group[2] = member(&options, 2, 3, [parts(1), parts(2)].into());
    let again = |member: &Handle| member.until(|said| matches!(said, Said::Started(Epoch(3), StartFrom::Image(_))));
    group.iter().for_each(|member| drop(again(member)));
    all(&group, &Said::Runs);

    group[0].words.send(Word::Ask(Ask::StopNow { requeue: true })).unwrap();
    all(&group, &Said::Finished(End::Stopped { requeue: true }));
    // A machine that has left before can still read how the run ended.
    let plan = Coordinator::Given(options).plan(&"test".parse().unwrap());
    assert_eq!(plan.map(|plan| plan.goal), Some(Goal::End(End::Stopped { requeue: true })));
}

#[test]
fn a_group_whose_coordinator_is_away_ends_its_job_and_goes_on() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (local, options) = local(folder.path());
    let group: Vec<Handle> = (0..2).map(|rank| member(&options, rank, 2, BTreeMap::new())).collect();
    for member in &group {
        member.until(|said| *said == Said::Runs);
    }
    let pid = nix::unistd::Pid::from_raw(local.pid().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    std::thread::sleep(LEASE * 2);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    for member in &group {
        member.until(|said| matches!(said, Said::Started(Epoch(2), StartFrom::Beginning)));
        member.until(|said| *said == Said::Runs);
    }
    group[1].words.send(Word::Ask(Ask::StopNow { requeue: false })).unwrap();
    for member in &group {
        member.until(|said| *said == Said::Finished(End::Stopped { requeue: false }));
    }
}

/// Somebody else writes to the keys of the group. Such a member could write nothing any more, and the group waited for
/// it for ever.
#[test]
fn a_member_whose_report_is_overwritten_or_removed_joins_again() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_local, options) = local(folder.path());
    let group: Vec<Handle> = (0..2).map(|rank| member(&options, rank, 2, BTreeMap::new())).collect();
    let runs = |epoch| {
        for member in &group {
            member.until(|said| matches!(said, Said::Started(started, _) if *started == Epoch(epoch)));
            member.until(|said| *said == Said::Runs);
        }
    };
    runs(1);
    let client = Client::connect(&options).unwrap();
    let key = |rank| super::keys::of_member(&"test".parse().unwrap(), Rank(rank));
    let write = |op| assert!(client.txn(Txn::when([]).then([op])).unwrap().succeeded);
    let value = client.get(&key(1)).unwrap().entries.into_iter().next().unwrap().value;
    write(Op::Put { key: key(1), value, lease: None });
    runs(2);
    write(Op::Delete(key(0)));
    runs(3);
    write(Op::Put { key: key(0).replace("members/0", "leader"), value: "7".into(), lease: None });
    group[1].words.send(Word::Ask(Ask::StopNow { requeue: false })).unwrap();
    for member in &group {
        member.until(|said| *said == Said::Finished(End::Stopped { requeue: false }));
    }
}

/// A machine decides to join, and loses the lease before that is written: its report came into the group under the next
/// lease, counted for no membership, and prevented the next report. The group waited for the member in vain.
#[test]
fn a_report_of_a_membership_that_is_over_is_not_written_under_the_next() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_local, options) = local(folder.path());
    let (session, told) = session(&options);
    let is_written = |write| matches!(written(&session, &told, write), (Answer::Done(_), _));
    let first = joined(&told).incarnation();
    Client::connect(&options).unwrap().revoke(super::keys::lease(first)).unwrap();
    let second = joined(&told).incarnation();
    assert_ne!(first, second);
    assert!(!is_written(join(first)), "the membership is over");
    assert!(!is_written(Write::Lead(first)), "the membership is over");
    assert!(is_written(join(second)), "nothing is in the way");
    assert!(is_written(Write::Lead(second)), "nobody leads");
    session.leave(Duration::from_secs(5));
}

#[test]
fn an_etcd_that_refuses_to_write_is_told_once_until_it_writes_again() {
    if !etcd() {
        return;
    }
    let mut etcd = Small::new();
    etcd.start();
    let client = etcd.connect();
    let (session, told) = session(&etcd.options());
    let join = join(joined(&told).incarnation());
    let write = || written(&session, &told, join.clone());
    assert!(matches!(write(), (Answer::Done(_), others) if others.is_empty()));
    let mut numbers = 0..;
    let put = |n: u32| Op::Put { key: format!("/large/{n}"), value: vec![b'x'; 200_000], lease: None };
    let is_full = |error| match error {
        rekindle_etcd::Error::Full => true,
        rekindle_etcd::Error::Unreachable { .. } | rekindle_etcd::Error::NoQuorum { .. } => false,
        error if error.is_unsure() => false,
        error => panic!("{error}"),
    };
    while !client.txn(Txn::default().then([put(numbers.next().unwrap())])).is_err_and(is_full) {}
    let (answer, others) = write();
    assert!(matches!((answer, &others[..]), (Answer::Conflict, [Err(why)]) if why.contains("NOSPACE")), "{others:?}");
    assert_eq!(write(), (Answer::Conflict, vec![]));

    etcd.control(&["del", "--prefix", "/large/"]);
    let revision = client.get("/large/").unwrap().revision.to_string();
    for args in [&["compact", &revision][..], &["defrag"], &["alarm", "disarm"]] {
        etcd.control(args);
    }
    // Its report is there already.
    assert_eq!(write(), (Answer::Conflict, vec![Ok(())]));
    assert_eq!(write(), (Answer::Conflict, vec![]));
    session.leave(Duration::from_secs(5));
}

/// What was to be told while there was no membership counted as told for ever, and nothing else was.
#[test]
fn a_machine_tells_what_nccl_has_started_also_after_it_could_not() {
    if !etcd() {
        return;
    }
    let mut etcd = Small::new();
    let (session, told) = session(&etcd.options());
    while !matches!(told.recv_timeout(LONG).unwrap(), CoordinatorEvent::Away { .. }) {}
    let (board, wake) = session.board();
    let tell = |number| board.exchange((Number(number), Rank(0), 2), &Operations::default(), &wake);
    assert_eq!(tell(1), None);
    std::thread::sleep(super::PAUSE * 2);
    etcd.start();
    let client = etcd.connect();
    let (answer, _) = written(&session, &told, join(joined(&told).incarnation()));
    assert!(matches!(answer, Answer::Done(_)));
    let key = super::keys::of_member(&"test".parse().unwrap(), Rank(0)).replace("members", "cut");
    let end = Instant::now() + LONG;
    while client.get(&key).unwrap().entries.is_empty() {
        assert!(Instant::now() < end, "it tells nothing");
        assert_eq!(tell(2), None);
        std::thread::sleep(Duration::from_millis(50));
    }
    let told = || String::from_utf8(client.get(&key).unwrap().entries.remove(0).value).unwrap();
    assert!(told().contains(r#""restored":false"#), "{}", told());
    while !told().contains(r#""restored":true"#) {
        assert!(Instant::now() < end, "it tells only {}", told());
        assert!(!board.restored((Number(2), Rank(0), 2), &wake));
        std::thread::sleep(Duration::from_millis(50));
    }
    session.leave(Duration::from_secs(5));
}

#[test]
fn a_certificate_that_is_missing_for_a_moment_ends_no_job() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (local, options) = local(folder.path());
    let Some((Secret::Text(certificate), Secret::Text(key))) = options.identity.clone() else { panic!("it has one") };
    let [certificate_file, key_file] = ["crt", "key"].map(|name| folder.path().join(name));
    std::fs::write(&certificate_file, certificate).unwrap();
    std::fs::write(&key_file, &key).unwrap();
    let identity = Some((Secret::File(certificate_file), Secret::File(key_file.clone())));
    let options = Options { identity, ..options };
    let group: Vec<Handle> = (0..2).map(|rank| member(&options, rank, 2, BTreeMap::new())).collect();
    for member in &group {
        member.until(|said| *said == Said::Runs);
    }
    // It is replaced in two steps, and etcd is started again in between.
    std::fs::remove_file(&key_file).unwrap();
    let pid = nix::unistd::Pid::from_raw(local.pid().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    for member in &group {
        member.words.send(Word::Ask(Ask::Snapshot)).unwrap();
    }
    // A write whose answer is lost is tried again after a second.
    std::thread::sleep(Duration::from_millis(1500));
    std::fs::write(&key_file, &key).unwrap();
    std::thread::sleep(LEASE);
    group[0].words.send(Word::Ask(Ask::StopNow { requeue: true })).unwrap();
    for member in &group {
        member.until(|said| *said == Said::Finished(End::Stopped { requeue: true }));
    }
}

#[test]
fn a_supervisor_that_hangs_loses_its_membership_until_it_works_again() {
    if !etcd() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_local, options) = local(folder.path());
    let (sender, told) = channel();
    let last = Arc::<Mutex<Option<super::Membership>>>::default();
    let session = session_that_tells(&options, move |event| {
        match &event {
            CoordinatorEvent::Joined(new) => *lock(&last) = Some(new.clone()),
            CoordinatorEvent::Lost(..) => {
                let until = lock(&last).take().unwrap().is_sure_until();
                assert!(until.is_none(), "it is still renewed, and the fence moves ahead, when its loss is told");
            }
            _ => {}
        }
        let _ = sender.send(event);
    });
    let membership = joined(&told);
    session.write(join(membership.incarnation()));
    // Nobody has said that it works: then it is not looked at.
    std::thread::sleep(LEASE * 2);
    assert!(membership.is_sure_until().is_some());
    session.beats();
    let worked = |ago| *lock(&session.pulse.0) = Some(Instant::now().checked_sub(ago).unwrap());
    worked(LEASE * HANGS + Duration::from_secs(1));
    std::thread::sleep(PAUSE * 3);
    assert!(membership.is_sure_until().is_some(), "a short hang costs nothing");
    let client = Client::connect(&options).unwrap();
    let sure_until = membership.is_sure_until().unwrap();
    worked(LEAST_HANG + Duration::from_secs(1));
    let lost = |told: &Receiver<CoordinatorEvent>| loop {
        match told.recv_timeout(LONG).unwrap() {
            CoordinatorEvent::Lost(incarnation, loss) => return (incarnation, loss),
            CoordinatorEvent::Joined(_) => panic!("it hangs"),
            _ => {}
        }
    };
    let (incarnation, loss) = lost(&told);
    assert!(matches!(loss, super::Loss::Hangs(since) if since > LEAST_HANG), "{loss:?}");
    assert_eq!(incarnation, membership.incarnation());
    let is_there =
        || !client.get(&crate::group::of_member(&"test".parse().unwrap(), Rank(0))).unwrap().entries.is_empty();
    let was_there = is_there();
    assert!(was_there || since_boot() > sure_until, "it is not revoked: its job may still run");
    let end = Instant::now() + LEASE * 3;
    while is_there() {
        assert!(Instant::now() < end, "it does not expire");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert!(told.try_iter().all(|it| !matches!(it, CoordinatorEvent::Joined(_))), "it still hangs");
    session.beats();
    assert_ne!(joined(&told).incarnation(), incarnation);
}

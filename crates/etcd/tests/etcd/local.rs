//! A local etcd: who may use it, and what survives.

use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rekindle_etcd::{Client, Event, Handout, Local, LocalOptions, Options, check};
use rekindle_os::beneath::{Beneath, Owners};

use crate::support::{
    LONG, PREFIX, connected, create, etcd, eventually, folder, follow, names_certificates, next, next_after_start,
    value,
};

fn options(folder: &Path) -> LocalOptions {
    fs::create_dir_all(folder).unwrap();
    LocalOptions {
        program: "etcd".into(),
        folder: Beneath::root(folder, Owners::Ours).unwrap().join("etcd"),
        listen: "127.0.0.1:0".parse().unwrap(),
        host: "127.0.0.1".into(),
        start_timeout: LONG,
    }
}

fn mode(path: &Path) -> u32 {
    path.metadata().unwrap().permissions().mode() & 0o777
}

fn runs(pid: i32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.contains("(etcd)") && !stat.contains(") Z ")
}

/// Its folder is in the job's store, which others may be able to write.
#[test]
fn it_follows_no_link_in_its_folder() {
    if !etcd() || !rekindle_testing::root() {
        return;
    }
    let folder = folder();
    let (inside, outside) = (folder.path().join("etcd"), folder.path().join("outside"));
    fs::create_dir(&outside).unwrap();
    fs::write(folder.path().join("file"), "root's").unwrap();
    for (name, target) in
        [("data", &outside), ("etcd.log", &folder.path().join("file")), ("ca.crt", &outside.join("new"))]
    {
        let _ = fs::remove_dir_all(&inside);
        fs::create_dir(&inside).unwrap();
        std::os::unix::fs::symlink(target, inside.join(name)).unwrap();
        let mut options = options(folder.path());
        if name == "data" {
            // It cannot work, and says so again and again.
            options.start_timeout = std::time::Duration::from_secs(1);
            Local::start(&options).unwrap_err();
        } else {
            Local::start(&options).unwrap();
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0, "{name}");
        assert_eq!(fs::read(folder.path().join("file")).unwrap(), b"root's", "{name}");
    }
}

#[test]
fn only_those_with_the_keys_may_use_it() {
    if !etcd() {
        return;
    }
    let folder = folder();
    let local = Local::start(&options(folder.path())).unwrap();
    let file = folder.path().join("coordinator.json");
    assert_eq!(Handout::read(&file).unwrap(), None);
    local.handout().write(&file).unwrap();
    assert_eq!(mode(&file), 0o600);
    let handout = Handout::read(&file).unwrap().unwrap();
    assert_eq!(&handout, local.handout());
    assert!(!format!("{handout:?} {local:?} {:?}", handout.options(PREFIX)).contains("PRIVATE"));
    let right = handout.options(PREFIX);
    let client = connected(&right);
    create(&client, "a", "1");

    // Refused: without a certificate, with one of another local etcd, without TLS.
    let mut wrong = right.clone();
    wrong.identity = None;
    let text = Client::connect(&wrong).unwrap_err().to_string();
    assert!(names_certificates(&text), "{text}");
    let other = Local::start(&options(&folder.path().join("other"))).unwrap();
    wrong.identity = other.handout().options(PREFIX).identity;
    let text = Client::connect(&wrong).unwrap_err().to_string();
    assert!(names_certificates(&text), "{text}");
    let mut wrong = right.clone();
    wrong.ca = other.handout().options(PREFIX).ca;
    let text = Client::connect(&wrong).unwrap_err().to_string();
    assert!(text.contains("another authority"), "{text}");
    assert!(Client::connect(&Options::new([handout.endpoints[0].replace("https", "http")], PREFIX)).is_err());
    // The server's certificate is not valid for a client, and the client's not for a server.
    let at = |name: &str| folder.path().join("etcd").join(name);
    let mut wrong = right.clone();
    let secret = |name: &str| rekindle_etcd::Secret::File(at(name));
    wrong.identity = Some((secret("server.crt"), secret("server.key")));
    assert!(Client::connect(&wrong).is_err());

    // Others can read and enter nothing, and there is no other port.
    assert_eq!(mode(&at("")), 0o700);
    for name in ["keys.json", "server.key", "etcd.log"] {
        assert_eq!(mode(&at(name)), 0o600, "{name}");
    }
    let pid = local.pid().unwrap();
    let inode = |link: std::path::PathBuf| {
        let target = fs::read_link(link).ok()?.to_str()?.to_owned();
        Some(target.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    let inodes: Vec<_> =
        fs::read_dir(format!("/proc/{pid}/fd")).unwrap().filter_map(|fd| inode(fd.unwrap().path())).collect();
    let listening = |table: &str| {
        let table = fs::read_to_string(table).unwrap();
        let ours = table.lines().skip(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
        ours.filter(|fields| fields[3] == "0A" && inodes.iter().any(|inode| inode == fields[9])).count()
    };
    assert_eq!((listening("/proc/net/tcp"), listening("/proc/net/tcp6")), (1, 0));

    let facts = check(&right).unwrap();
    let state = facts.members[0].state.as_ref().unwrap();
    assert!(state.leads && state.has_leader && state.version.starts_with('3') && state.alarms.is_empty(), "{facts:?}");
    assert!(facts.size == Some(1) && facts.write < LONG && facts.away().count() == 0);
    assert_eq!(client.get(PREFIX).unwrap().entries.len(), 1, "the check removes what it writes");
}

#[test]
fn a_local_etcd_that_is_killed_or_ended_starts_again_with_its_data() {
    if !etcd() {
        return;
    }
    let folder = folder();
    let local = Local::start(&options(folder.path())).unwrap();
    let client = connected(&local.handout().options(PREFIX));
    create(&client, "a", "1");
    let (_follower, events) = follow(&client);
    assert!(matches!(next(&events), Event::State(_)));
    let first = local.pid().unwrap();
    kill(Pid::from_raw(first), Signal::SIGKILL).unwrap();
    let second = eventually("another process", || local.pid().filter(|pid| *pid != first));
    assert!(local.trouble().unwrap().contains("SIGKILL"), "{:?}", local.trouble());
    eventually("an answer", || client.get(PREFIX).ok());
    create(&client, "b", "2");
    assert!(matches!(next_after_start(&events), Event::Changed { .. }));
    assert_eq!(value(&client, "a").as_deref(), Some("1"));

    // Connected clients continue once the supervisor has started again.
    let handout = local.handout().clone();
    drop(local);
    assert!(!runs(first) && !runs(second));
    let again = Local::start(&options(folder.path())).unwrap();
    assert_eq!(*again.handout(), handout);
    eventually("an answer", || client.get(PREFIX).ok());
    assert_eq!(value(&client, "b").as_deref(), Some("2"));

    // Another name needs other keys, and there is the data.
    drop(again);
    let renamed = Local::start(&LocalOptions { host: "localhost".into(), ..options(folder.path()) }).unwrap();
    assert_ne!(*renamed.handout(), handout);
    assert_eq!(value(&connected(&renamed.handout().options(PREFIX)), "b").as_deref(), Some("2"));
    let text = Client::connect(&handout.options(PREFIX)).unwrap_err().to_string();
    assert!(text.contains("no member of etcd answers"), "{text}");
}

/// What [`a_local_etcd_dies_with_its_supervisor`] starts.
#[test]
#[ignore = "a part of another test"]
fn has_a_local_etcd() {
    let Some(folder) = std::env::var_os("HAS_A_LOCAL_ETCD_IN") else { return };
    let local = Local::start(&options(Path::new(&folder))).unwrap();
    println!("\npid {}", local.pid().unwrap());
    std::thread::sleep(LONG);
}

#[test]
fn a_local_etcd_dies_with_its_supervisor() {
    if !etcd() {
        return;
    }
    let folder = folder();
    let mut supervisor = Command::new(std::env::current_exe().unwrap());
    supervisor.args(["--exact", "local::has_a_local_etcd", "--ignored", "--nocapture"]);
    // None of these counts.
    supervisor.env("HAS_A_LOCAL_ETCD_IN", folder.path()).env("ETCD_LISTEN_CLIENT_URLS", "http://127.0.0.1:1");
    let mut supervisor = supervisor.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(supervisor.stdout.take().unwrap()).lines().map(Result::unwrap);
    let pid = lines.find_map(|line| line.strip_prefix("pid ").map(|pid| pid.parse().unwrap())).unwrap();
    assert!(runs(pid));
    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    eventually("its end", || (!runs(pid)).then_some(()));
}

#[test]
fn a_local_etcd_that_cannot_start_says_why() {
    if !etcd() {
        return;
    }
    let folder = folder();
    let right = options(folder.path());
    let says = |options: &LocalOptions, expected: &[&str]| {
        let text = Local::start(options).unwrap_err().to_string();
        assert!(expected.iter().all(|expected| text.contains(expected)), "{expected:?}: {text}");
    };
    says(&LocalOptions { program: "no-such-etcd".into(), ..right.clone() }, &["Install it (package etcd-server)"]);
    says(&LocalOptions { program: "/bin/false".into(), ..right.clone() }, &["exit code 1"]);
    let used = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = used.local_addr().unwrap();
    says(&LocalOptions { listen, ..right.clone() }, &["address already in use"]);
    says(&LocalOptions { folder: Beneath::at(Path::new("/proc/etcd")).unwrap(), ..right.clone() }, &["/proc/etcd"]);
    drop(Local::start(&right).unwrap());
    let mut files = fs::read_dir(right.folder.join("data/member/wal")).unwrap().map(|entry| entry.unwrap().path());
    // Where it was killed because its end took too long, there is a file for the next one, too.
    let wal = files.find(|path| path.extension().is_some_and(|end| end == "wal")).unwrap();
    fs::write(wal, "damaged").unwrap();
    says(&LocalOptions { start_timeout: Duration::from_secs(20), ..right.clone() }, &["etcd.log", "data"]);
}

#[test]
fn an_address_that_others_could_have_written_is_refused() {
    if !etcd() {
        return;
    }
    let folder = folder();
    let local = Local::start(&options(folder.path())).unwrap();
    let file = folder.path().join("coordinator.json");
    local.handout().write(&file).unwrap();
    let refused = |expected: &str| {
        let text = Handout::read(&file).unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    };
    fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
    refused("mode 640");
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    if rekindle_testing::root() {
        chown(&file, Some(65534), None).unwrap();
        refused("belongs to user 65534");
    }
    fs::rename(&file, folder.path().join("else")).unwrap();
    symlink(folder.path().join("else"), &file).unwrap();
    refused("coordinator.json");
    fs::remove_file(&file).unwrap();
    let json = serde_json::to_value(local.handout()).unwrap();
    for (key, value, expected) in
        [("format", 2.into(), "Use the same version"), ("key", serde_json::Value::Null, "invalid type")]
    {
        let mut json = json.clone();
        json[key] = value;
        fs::write(&file, json.to_string()).unwrap();
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        refused(expected);
    }
}

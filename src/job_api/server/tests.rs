use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;
use std::sync::mpsc;

use nix::sys::socket::{ControlMessage, sendmsg};
use serde_json::{Value, json};

use super::*;

/// A served socket, and the requests that its owner gets.
struct Served {
    _dir: tempfile::TempDir,
    socket: Socket,
    server: Server,
    calls: mpsc::Receiver<Call>,
}

impl Served {
    fn new() -> Served {
        let dir = tempfile::tempdir().unwrap();
        let socket = Socket::bind(dir.path(), "j", None).unwrap();
        let (sender, calls) = mpsc::channel();
        let server = Server::start(&socket, Box::new(move |call| sender.send(call).is_ok())).unwrap();
        server.show(Some(facts()));
        Served { _dir: dir, socket, server, calls }
    }

    fn ask(&self, text: &str) -> Value {
        let client = client();
        client.send_to(text.as_bytes(), self.socket.path()).unwrap();
        answer(&client)
    }
}

fn facts() -> Facts {
    Facts {
        job: "j".into(),
        run: "r".into(),
        life: "l".into(),
        since: chrono::DateTime::UNIX_EPOCH,
        from: None,
        restores: 0,
        snapshots: 3,
        failed: None,
        image: None,
        host: "h".into(),
        boot_id: "b".into(),
        pid: Some(7),
        gpus: vec![],
    }
}

/// A client as in docs/job-api.md.
fn client() -> UnixDatagram {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("rekindle-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::SeqCst));
    let client = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    client
}

fn answer(client: &UnixDatagram) -> Value {
    let mut text = [0; 65536];
    let length = client.recv(&mut text).unwrap();
    serde_json::from_slice(&text[..length]).unwrap()
}

#[test]
fn the_state_is_answered_here_and_the_rest_by_the_owner() {
    let served = Served::new();
    let state = served.ask(r#"{"version":1,"request":"state","id":"x"}"#);
    assert_eq!((&state["id"], &state["ok"]["state"]["snapshots"]), (&json!("x"), &json!(3)));
    let client = client();
    client.send_to(br#"{"version":1,"request":"snapshot","life":"l"}"#, served.socket.path()).unwrap();
    let call = served.calls.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!((&call.request, call.pid), (&Request::Snapshot, i32::try_from(std::process::id()).unwrap()));
    (call.reply)(Ok(Answer::Snapshot { number: 4, life: "l".into() }));
    assert_eq!(answer(&client)["ok"]["snapshot"]["number"], 4);
    let code = |text: &str| served.ask(text)["error"]["code"].clone();
    assert_eq!(code(r#"{"version":1,"request":"snapshot","life":"k"}"#), "restored");
    served.server.show(None);
    assert_eq!(code(r#"{"version":1,"request":"state"}"#), "later");
    // A request without a possible answer is still handled.
    served.server.show(Some(facts()));
    let nameless = UnixDatagram::unbound().unwrap();
    nameless.send_to(br#"{"version":1,"request":"release"}"#, served.socket.path()).unwrap();
    assert!(served.calls.recv_timeout(Duration::from_secs(10)).is_ok());
}

#[test]
fn garbage_is_answered_and_harms_nothing() {
    let served = Served::new();
    let code = |text: &str| served.ask(text)["error"]["code"].clone();
    assert_eq!(code("hello"), "malformed");
    assert_eq!(code(""), "malformed");
    assert_eq!(code(&"[".repeat(MAX_REQUEST)), "malformed");
    assert_eq!(code(&" ".repeat(100_000)), "too-long");
    // Descriptors are not received.
    let (path, file) = (served.socket.path().to_owned(), std::fs::File::open("/dev/null").unwrap());
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let client = client();
    let text = [std::io::IoSlice::new(br#"{"version":1,"request":"release"}"#)];
    let before = open();
    for _ in 0..20 {
        let fds = [file.as_raw_fd(); 100];
        let address = UnixAddr::new(&path).unwrap();
        let rights = [ControlMessage::ScmRights(&fds)];
        sendmsg(client.as_raw_fd(), &text, &rights, MsgFlags::empty(), Some(&address)).unwrap();
    }
    assert_eq!(code("[]"), "malformed");
    // Other tests open descriptors too, for some hundred connections; these would be 2000, or what the limit allows.
    assert!(open() < before + 700);
    assert!(served.calls.try_recv().is_err(), "they come with a request that is not heard");
}

#[test]
fn a_flood_is_read_slowly_and_a_deaf_client_stops_nothing() {
    let served = Served::new();
    let deaf = client();
    deaf.set_nonblocking(true).unwrap();
    let begun = Instant::now();
    let mut sent = 0;
    // Longer only if this machine is so busy that we have not sent enough by then.
    let is_over = |sent: u32| begun.elapsed() >= Duration::from_millis(if sent < PER_WINDOW { 20_000 } else { 1500 });
    while !is_over(sent) {
        match deaf.send_to(br#"{"version":1,"request":"state"}"#, served.socket.path()) {
            Ok(_) => sent += 1,
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    // The requests read in these seconds, two on most machines, plus those waiting in the socket.
    let seconds = u32::try_from(begun.elapsed().as_secs()).unwrap() + 1;
    let queue = std::fs::read_to_string("/proc/sys/net/unix/max_dgram_qlen").unwrap();
    let most = seconds * PER_SECOND + queue.trim().parse::<u32>().unwrap() + 2;
    assert!(sent >= PER_WINDOW && sent <= most, "{sent} of {most}");
    assert_eq!(served.ask(r#"{"version":1,"request":"state"}"#)["ok"]["state"]["life"], "l");
    // It ends at once, even if requests are waiting.
    for _ in 0..5 {
        let _ = deaf.send_to(b"x", served.socket.path());
    }
    let begun = Instant::now();
    drop(served.server);
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn the_owner_is_not_buried() {
    let served = Served::new();
    let client = client();
    for _ in 0..PENDING + 10 {
        while client.send_to(br#"{"version":1,"request":"snapshot"}"#, served.socket.path()).is_err() {}
    }
    assert_eq!(answer(&client)["error"]["code"], "later");
    let calls: Vec<Call> = served.calls.try_iter().collect();
    assert!(calls.len() <= PENDING + 1, "{}", calls.len());
    drop(calls);
    let client = self::client();
    client.send_to(br#"{"version":1,"request":"snapshot"}"#, served.socket.path()).unwrap();
    assert!(served.calls.recv_timeout(Duration::from_secs(10)).is_ok());
}

#[test]
fn another_user_is_not_heard() {
    if !rekindle_testing::root() {
        return;
    }
    let served = Served::new();
    // Even if the file allows it.
    let open = std::os::unix::fs::PermissionsExt::from_mode;
    std::fs::set_permissions(served.socket.path(), open(0o666)).unwrap();
    std::fs::set_permissions(served.socket.path().parent().unwrap(), open(0o755)).unwrap();
    let script = format!(
        "import socket, os\nos.setuid(65534)\ns = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\ns.bind('\\0rekindle-user-{}')\n\
         s.settimeout(0.5)\ns.sendto(b'{{}}', '{}')\ntry:\n  print(s.recv(100))\nexcept OSError:\n  print('silence')",
        std::process::id(),
        served.socket.path().display()
    );
    let said = std::process::Command::new("python3").args(["-Sc", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&said.stdout), "silence\n", "{said:?}");
}

#[test]
fn a_closed_socket_has_no_name_whoever_keeps_it() {
    let served = Served::new();
    assert!(served.socket.path().exists());
    served.socket.close();
    served.socket.close();
    assert!(!served.socket.path().exists());
}

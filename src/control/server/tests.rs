use std::io::BufRead;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use super::super::client::{self, Client as Caller};
use super::super::protocol::{Snapped, Snapshot};
use super::*;
use crate::published::JobState;
use rekindle_store::ImageId;

/// A server, and an owner that answers each snapshot after `pause`.
struct Stand {
    dir: tempfile::TempDir,
    server: Server,
}

fn image(n: u32) -> ImageId {
    ImageId::new(n, chrono::DateTime::<chrono::Utc>::UNIX_EPOCH)
}

fn snapped() -> Answer {
    Answer::Snapshot(Snapped { image: image(1), freeze_us: 1, bytes: 2, stored: false })
}

impl Stand {
    fn new(pause: Duration) -> Stand {
        let dir = tempfile::tempdir().unwrap();
        let deliver = move |call: Call| {
            std::thread::spawn(move || {
                std::thread::sleep(pause);
                (call.reply)(Ok(snapped()));
            });
            true
        };
        let server = Server::start(dir.path(), "j", Box::new(deliver)).unwrap();
        server.show(&serde_json::from_str(STATE).unwrap());
        Stand { dir, server }
    }

    fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(self.server.path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        stream
    }

    fn status_works(&self) {
        let until = Instant::now() + Duration::from_secs(30);
        let answer = client::ask(self.server.path(), &Request::Status, Some(until)).unwrap();
        assert!(matches!(answer, Answer::Status(it) if it.state == JobState::Running));
    }
}

const STATE: &str = r#"{"version":1,"state":"running","since":"2026-11-21T20:00:00Z","begun":"2026-11-21T20:00:00Z",
    "supervisor":1,"lineage":"l","pid":null,"restarts":0,"last_image":null,"last_freeze_us":null,"last_failure":null}"#;

/// The answers to these bytes, until the server closes the connection or has sent this many lines.
fn lines(mut stream: &UnixStream, bytes: &[u8], count: usize) -> Vec<String> {
    // The server may close the connection before it has read everything.
    let _ = stream.write_all(bytes);
    io::BufReader::new(stream).lines().take(count).map_while(Result::ok).collect()
}

#[test]
fn garbage_is_answered_and_the_next_line_works() {
    let stand = Stand::new(Duration::ZERO);
    let stream = stand.connect();
    let said = lines(&stream, b"\x00\xff{{{\n\n{\"version\":1,\"request\":\"status\"}\n{\"version\":9}\n", 4);
    let codes: Vec<bool> = said.iter().map(|line| line.contains("malformed")).collect();
    assert_eq!(codes, [true, true, false, false], "{said:#?}");
    assert!(said[2].contains("\"state\":\"running\"") && said[3].contains("version 9"), "{said:#?}");
}

#[test]
fn a_line_that_is_too_long_is_the_last() {
    let stand = Stand::new(Duration::ZERO);
    for bytes in [vec![b'x'; 4 << 20], [vec![b' '; MAX_LINE], b"\n".to_vec()].concat()] {
        let said = lines(&stand.connect(), &bytes, 2);
        assert!(said.len() == 1 && said[0].contains("too-long"), "{said:?}");
    }
    let just = [b"{\"version\":1,\"request\":\"status\"".to_vec(), vec![b' '; MAX_LINE - 35], b"}\n".to_vec()].concat();
    assert!(just.len() < MAX_LINE && lines(&stand.connect(), &just, 1)[0].contains("running"));
    stand.status_works();
}

/// A client that sends half a line or does not read is dropped after a time, and nobody waits for it.
#[test]
fn half_lines_and_deaf_clients_are_dropped_and_harm_nobody() {
    let stand = Stand::new(Duration::ZERO);
    let (half, drop_by_drop, deaf) = (stand.connect(), stand.connect(), stand.connect());
    (&half).write_all(b"{\"version\":1,").unwrap();
    deaf.set_nonblocking(true).unwrap();
    // Sends requests until nothing more is accepted: its answers fill the buffers, then its requests.
    let status = Request::Status.to_line();
    while (&deaf).write(&status).is_ok() {}
    let began = Instant::now();
    let mut slow = 0;
    while began.elapsed() < PATIENCE + Duration::from_secs(1) {
        stand.status_works();
        // Sending a byte at a time does not extend the limit.
        slow += usize::from((&drop_by_drop).write_all(b"x").is_ok());
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(slow > 10);
    // The server may get to it a little later.
    while (&drop_by_drop).write_all(b"x").is_ok() {
        assert!(began.elapsed() < 3 * PATIENCE, "it is not dropped");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(lines(&half, b"", 1)[0].contains("timeout"));
    let mut rest = Vec::new();
    deaf.set_nonblocking(false).unwrap();
    // The connection is reset, because requests were not answered.
    let _ = (&deaf).read_to_end(&mut rest);
    assert!((&deaf).write_all(&status).is_err(), "it was dropped");
    stand.status_works();
}

#[test]
fn a_hundred_clients_at_once_are_all_answered() {
    let stand = Stand::new(Duration::from_millis(100));
    let began = Instant::now();
    let request = Request::Snapshot(Snapshot::default());
    let mut callers: Vec<Caller> = (0..100).map(|_| Caller::connect(stand.server.path()).unwrap()).collect();
    callers.iter_mut().for_each(|caller| caller.send(&request).unwrap());
    stand.status_works();
    let until = Some(began + Duration::from_secs(30));
    for caller in &mut callers {
        assert_eq!(caller.answer(until).unwrap(), snapped());
    }
    // With 28 more clients all places are taken, and this is reported; when they are gone, there are places again.
    let more: Vec<UnixStream> = (callers.len()..CLIENTS).map(|_| stand.connect()).collect();
    let turned_away = || lines(&stand.connect(), b"", 1).first().is_some_and(|line| line.contains("busy"));
    assert!(turned_away());
    drop((callers, more));
    while client::ask(stand.server.path(), &Request::Status, until).is_err() {
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}

#[test]
fn a_supervisor_that_is_stopped_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("j.sock");
    // The kernel accepts connections for it, and it reads nothing.
    let _stopped = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let (answer, answers) = std::sync::mpsc::channel();
    let ask = move |path: PathBuf, patience| {
        let request = Request::Snapshot(Snapshot::default());
        client::ask_one_that_runs(&path, &request, patience)
    };
    std::thread::spawn(move || answer.send(ask(path, Duration::from_millis(50))));
    let answer = answers.recv_timeout(Duration::from_secs(20)).expect("it waits for ever");
    assert!(matches!(answer, Err(client::Error::Silent(_))), "{answer:?}");
    // One that runs may take longer for a snapshot.
    let stand = Stand::new(Duration::from_secs(6));
    assert_eq!(ask(stand.server.path().to_owned(), Duration::from_secs(5)).unwrap(), snapped());
}

#[test]
fn a_client_that_goes_before_its_answer_is_forgotten() {
    let stand = Stand::new(Duration::from_millis(200));
    for _ in 0..CLIENTS + 10 {
        let mut caller = Caller::connect(stand.server.path()).unwrap();
        match caller.send(&Request::Snapshot(Snapshot::default())) {
            // The last ones may find that all places are taken, and are turned away.
            Ok(()) | Err(client::Error::Ended) => {}
            Err(error) => panic!("{error}"),
        }
    }
    let began = Instant::now();
    while client::ask(stand.server.path(), &Request::Status, None).is_err() {
        assert!(began.elapsed() < Duration::from_secs(30), "they still have their places");
    }
    // A client that has only closed its own side waits for its answer.
    let stream = stand.connect();
    (&stream).write_all(&Request::Snapshot(Snapshot::default()).to_line()).unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert!(lines(&stream, b"", 1)[0].contains("freeze_us"));
}

#[test]
fn who_does_not_get_an_answer_hears_that_the_supervisor_ended() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), "j", Box::new(|_| false)).unwrap();
    let error = client::ask(server.path(), &Request::Suspend, None).unwrap_err();
    assert!(matches!(&error, client::Error::Fault(fault) if fault.code == Code::Ending), "{error}");
    let path = server.path().to_owned();
    drop(server);
    assert!(matches!(client::ask(&path, &Request::Status, None), Err(client::Error::Gone(_))));
}

#[test]
fn other_users_are_turned_away_with_a_line() {
    if !rekindle_testing::root() {
        return;
    }
    let stand = Stand::new(Duration::ZERO);
    let set = |path: &Path, mode| std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(mode));
    let python = "import socket, sys\ns = socket.socket(socket.AF_UNIX)\ns.connect(sys.argv[1])\n\
                  print(s.makefile().readline(), end='')";
    let ask = || {
        let mut command = std::process::Command::new("python3");
        command.args(["-c", python]).arg(stand.server.path()).uid(65534).gid(65534);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stdout).unwrap())
    };
    set(stand.dir.path(), 0o755).unwrap();
    assert_eq!(ask(), (false, String::new()), "the mode of the socket keeps them out");
    // Even if the file allows it, the kernel reports the user.
    set(stand.server.path(), 0o666).unwrap();
    let (worked, said) = ask();
    assert!(worked && said.contains("forbidden") && said.contains("user 65534"), "{said}");
    stand.status_works();
}

/// Supervisors of one folder do not disturb each other.
#[test]
fn several_jobs_have_a_socket_each() {
    let dir = tempfile::tempdir().unwrap();
    let start = |name: &str| {
        let server = Server::start(dir.path(), name, Box::new(|_| false)).unwrap();
        let mut state: Published = serde_json::from_str(STATE).unwrap();
        state.lineage = name.into();
        server.show(&state);
        server
    };
    let servers: Vec<Server> = std::thread::scope(|scope| {
        let names: Vec<String> = (0..20).map(|n| format!("job-{n}")).collect();
        let threads: Vec<_> = names.into_iter().map(|name| scope.spawn(move || start(&name))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    let paths: Vec<Option<PathBuf>> = servers.iter().map(|server| Some(server.path().to_owned())).collect();
    for (n, answer) in client::ask_all(&paths, &Request::Status, Duration::from_secs(30)).into_iter().enumerate() {
        assert!(matches!(answer, Some(Ok(Answer::Status(it))) if it.lineage == format!("job-{n}")));
    }
}

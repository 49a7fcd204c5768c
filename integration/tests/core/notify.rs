//! What a service manager hears: a real datagram socket in its place.

use std::os::unix::net::UnixDatagram;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{Lab, Running, python, wait_for};

/// Hears what is said, line by line, with the time.
#[derive(Clone, Default)]
struct Manager(Arc<Mutex<Vec<(Instant, String)>>>);

impl Manager {
    /// Listens at the socket `notify` in the folder of the lab until the test ends.
    fn listen(lab: &Lab) -> Manager {
        let manager = Manager::default();
        let (heard, socket) = (manager.clone(), UnixDatagram::bind(lab.file("notify")).unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count) = socket.recv(&mut buffer) {
                let text = String::from_utf8_lossy(&buffer[..count]).into_owned();
                let lines = text.lines().map(|line| (Instant::now(), line.to_string()));
                heard.0.lock().unwrap().extend(lines);
            }
        });
        manager
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().map(|(_, line)| line.clone()).collect()
    }

    fn heard(&self, words: &str) -> bool {
        self.lines().iter().any(|line| line.contains(words))
    }

    fn count(&self, line: &str) -> usize {
        self.lines().iter().filter(|heard| *heard == line).count()
    }

    /// Where the first line with these words is.
    fn place(&self, words: &str) -> usize {
        let lines = self.lines();
        lines.iter().position(|line| line.contains(words)).unwrap_or_else(|| panic!("no {words:?} in {lines:#?}"))
    }
}

/// `rekindle run` as a service with a watchdog of a second.
fn service(lab: &Lab, command: &[String]) -> Running {
    let variables = [
        ("NOTIFY_SOCKET".to_string(), lab.file("notify").to_str().unwrap().to_string()),
        ("WATCHDOG_USEC".to_string(), "1000000".to_string()),
    ];
    lab.run_with_environment(&["run", "--fresh", "--name", "j", "--"], command, &variables)
}

#[test]
fn a_service_says_when_it_is_up_what_it_does_and_that_it_ends() {
    let Some(lab) = Lab::new() else { return };
    // So slow that the way to the store can be seen.
    let lab = lab.set("store.persist-rate", "\"8MiB\"");
    let manager = Manager::listen(&lab);
    let job = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let mut run = service(&lab, &job);
    count_on(&lab, &mut run, 3);
    wait_for("READY=1", || manager.count("READY=1") == 1);
    assert!(manager.place("EXTEND_TIMEOUT_USEC=") < manager.place("READY=1"));
    run.snapshot(&lab);
    wait_for("the status with the image", || {
        manager.heard("STATUS=running; image 1 taken just now, the job was frozen")
    });
    assert!(manager.heard("STATUS=snapshotting"));
    assert!(manager.heard("; copying image 1 to the store, "));
    run.crash(&lab);
    wait_for("the status after the crash", || manager.heard("1 restart"));
    assert!(manager.place("STATUS=waiting") < manager.place("STATUS=restoring"));
    // Asked for no more time than it needs to get up.
    let extended = manager.lines().iter().filter(|line| line.starts_with("EXTEND_TIMEOUT_USEC")).count();
    count_on(&lab, &mut run, 3);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    // What listens here may be late.
    let after = || manager.lines().into_iter().skip_while(|line| line != "STOPPING=1");
    wait_for("the way to the store", || after().any(|line| line.contains("; copying image 2 to the store, ")));
    assert_eq!((manager.count("STOPPING=1"), manager.count("READY=1")), (1, 1), "a restart is not another start");
    assert!(after().any(|line| line.starts_with("EXTEND_TIMEOUT_USEC=")), "{:#?}", manager.lines());
    assert_eq!(
        manager.lines()[..manager.place("STOPPING=1")].iter().filter(|l| l.starts_with("EXTEND")).count(),
        extended
    );
}

#[test]
fn a_service_whose_last_hook_takes_long_is_not_taken_for_stuck() {
    let Some(lab) = Lab::new() else { return };
    let (began, goes_on) = (lab.file("began"), lab.file("goes-on"));
    let hook = format!("touch {}; while [ ! -e {} ]; do sleep 0.1; done", began.display(), goes_on.display());
    let hook = format!("[\"sh\", \"-c\", {hook:?}]");
    let lab = lab.set("hooks.on-completion", &hook).set("hooks.timeout", "\"2m\"");
    let manager = Manager::listen(&lab);
    let run = service(&lab, &["true".to_owned()]);
    wait_for("the hook", || began.exists());
    let heard = manager.lines().len();
    let since = |what: &str| manager.lines()[heard..].iter().filter(|line| line.starts_with(what)).count();
    wait_for("signs of life", || since("WATCHDOG=1") >= 3 && since("EXTEND_TIMEOUT_USEC=") >= 2);
    std::fs::write(goes_on, "").unwrap();
    run.ends_with(0);
}

/// Stops one thread, and the others not.
pub(crate) struct Stuck(Child);

impl Stuck {
    pub(crate) fn thread(id: i32) -> Stuck {
        // PTRACE_SEIZE, PTRACE_INTERRUPT; the end of the tracer lets the thread go on.
        let script = format!(
            "import ctypes, os, sys\nc = ctypes.CDLL(None, use_errno=True)\nc.ptrace.argtypes = [ctypes.c_long] * 4\n\
             assert c.ptrace(0x4206, {id}, 0, 0) == 0 and c.ptrace(0x4207, {id}, 0, 0) == 0\n\
             os.waitpid({id}, 0x40000000)\nprint('stuck', flush=True)\nsys.stdin.read()"
        );
        let python =
            Command::new(python().unwrap()).args(["-Sc", &script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = python.unwrap();
        let mut said = [0; 6];
        std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut said).unwrap();
        Stuck(child)
    }

    pub(crate) fn let_go(mut self) {
        drop(self.0.stdin.take());
        self.0.wait().unwrap();
    }
}

#[test]
fn the_watchdog_is_not_fed_while_the_owner_of_the_state_is_stuck() {
    let Some(lab) = Lab::new() else { return };
    let manager = Manager::listen(&lab);
    let job = lab.python_command("kinds.py", &["plain", lab.path().to_str().unwrap()]);
    let begun = Instant::now();
    let mut run = service(&lab, &job);
    count_on(&lab, &mut run, 3);
    let fed = || manager.count("WATCHDOG=1");
    wait_for("it is fed", || fed() >= 3);
    // On the whole: what listens here may be late for one and in time for the next.
    let times = fed();
    let often = begun.elapsed().as_millis() / 250 + 1;
    assert!(times as u128 <= often, "far too often: {times} times in {:?}", begun.elapsed());
    // The one that the state belongs to is the first.
    let stuck = Stuck::thread(run.pid());
    // What it sent before may be read late.
    let mut before = fed();
    wait_for("no more is read", || {
        std::thread::sleep(Duration::from_secs(4));
        std::mem::replace(&mut before, fed()) == before
    });
    let printed = lab.output().len();
    std::thread::sleep(Duration::from_millis(1500));
    wait_for("the rest goes on", || lab.output().len() > printed);
    assert_eq!(fed(), before);
    stuck.let_go();
    wait_for("it is fed again", || fed() > before);
    finish(&lab, run);
    wait_for("STOPPING=1", || manager.count("STOPPING=1") == 1);
}

#[test]
fn the_job_does_not_hear_of_the_manager_unless_it_is_told() {
    let Some(lab) = Lab::new() else { return };
    let manager = Manager::listen(&lab);
    let print = ["sh".to_string(), "-c".into(), "env".into()];
    service(&lab, &print).ends_with(0);
    let environment = lab.output();
    assert!(environment.contains("REKINDLE_JOB=j"), "{environment}");
    assert!(!environment.contains("NOTIFY_SOCKET") && !environment.contains("WATCHDOG_"), "{environment}");
    wait_for("STOPPING=1", || manager.heard("STOPPING=1"));
    assert!(manager.place("READY=1") < manager.place("STOPPING=1"), "one that is short is a service too");
    let lab = lab.set("job.environment", "{ NOTIFY_SOCKET = \"/its/own\" }");
    service(&lab, &print).ends_with(0);
    assert!(lab.output().contains("NOTIFY_SOCKET=/its/own\n"));
}

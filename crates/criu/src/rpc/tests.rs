use super::*;
use crate::Version;

/// Runs a program in place of CRIU and requests a dump.
fn ask(script: &str, timeout: Duration, cancelled: &dyn Fn() -> bool) -> Result<Log, RunError> {
    ask_in(tempfile::tempdir().unwrap().path(), script, timeout, cancelled, &mut |_| Ok(()))
}

/// The same with its files in this folder, which is also its folder of images.
fn ask_in(
    dir: &Path,
    script: &str,
    timeout: Duration,
    cancelled: &dyn Fn() -> bool,
    notify: &mut dyn FnMut(Notify) -> Result<(), String>,
) -> Result<Log, RunError> {
    let criu = stand_in(dir, script);
    let place = Place { criu: &criu, init: None, images: dir, opened: None, work: dir, timeout };
    let options = DumpOptions {
        root: 1000,
        tcp: Tcp::Close,
        ghost_limit: 1,
        freeze_timeout: Duration::from_secs(1),
        plugin: None,
    };
    let mut hooks = Hooks { notify, cancelled, abandon: &|| {}, died: &|| None };
    dump(&place, options, &mut hooks)
}

fn stand_in(dir: &Path, script: &str) -> Criu {
    let [path, draft] = ["criu", "draft"].map(|name| dir.join(name));
    std::fs::write(&draft, format!("#!/bin/sh\n{script}")).unwrap();
    // Copied by another process: a child that another test forks meanwhile would have our descriptor for a moment, and
    // a file that is open for writing cannot be executed (ETXTBSY).
    // Another test may reap it: what counts is the file.
    let _ = std::process::Command::new("install").args([&draft, &path]).status();
    assert!(path.exists());
    Criu::known(path, Version(4, 2, 0))
}

const LONG: Duration = Duration::from_secs(20);

/// A message with which CRIU reports a moment, and waits.
fn notification(script: &str) -> Vec<u8> {
    let notify = super::super::proto::Notify { script: Some(script.into()), pid: Some(1000) };
    let response = Response {
        kind: Kind::Notify.into(),
        success: true,
        restore: None,
        notify: Some(notify),
        cr_errno: None,
        features: None,
    };
    response.encode_to_vec()
}

/// Starts a process that has CRIU's socket and log open, stops it, and dies: so does a CRIU that is killed while it
/// examines the kernel, whose child was stopped by its tracer.
fn killed_beside_a_child(dir: &Path) -> String {
    let pid = dir.join("pid");
    format!(
        "sleep 3000 &\nkill -STOP $!\nuntil grep -q '^State:.T' /proc/$!/status; do :; done\n\
         echo $! > {pid}\necho 'Error (criu/a.c:1): its last word' >&2\nkill -9 $$",
        pid = pid.display()
    )
}

/// Waits for the end of that process.
fn assert_child_ends(dir: &Path) {
    let pid: i32 = std::fs::read_to_string(dir.join("pid")).unwrap().trim().parse().unwrap();
    let began = Instant::now();
    while !process::has_ended(pid) {
        assert!(began.elapsed() < LONG, "process {pid} is still there: {:?}", process::state(pid));
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Its child would keep the socket open for ever.
#[test]
fn one_that_is_killed_is_gone_although_a_child_of_it_has_the_socket() {
    let dir = tempfile::tempdir().unwrap();
    let error = ask_in(dir.path(), &killed_beside_a_child(dir.path()), LONG, &|| false, &mut |_| Ok(())).unwrap_err();
    assert!(error.says_criu_killed(), "{error:?}");
    let text = error.to_string();
    assert!(text.starts_with("CRIU was killed (signal SIGKILL)") && text.contains("its last word"), "{text}");
    assert_child_ends(dir.path());
}

/// While we work for it, and it waits.
#[test]
fn one_that_is_killed_during_a_step_of_ours_is_gone_whatever_that_step_says() {
    for step in [Ok(()), Err("it does not see a frozen job".to_owned())] {
        let dir = tempfile::tempdir().unwrap();
        let message = dir.path().join("message");
        std::fs::write(&message, notification("post-dump")).unwrap();
        let script = format!("cat {} >&3\n{}", message.display(), killed_beside_a_child(dir.path()));
        let mut notify = |moment| {
            assert_eq!(moment, Notify::PostDump);
            while !is_dead(dir.path()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            step.clone()
        };
        let error = ask_in(dir.path(), &script, LONG, &|| false, &mut notify).unwrap_err();
        assert!(error.says_criu_killed(), "{error:?}");
        assert_child_ends(dir.path());
    }
}

/// Whether the stand-in of [`killed_beside_a_child`] is dead: its child has another parent then.
fn is_dead(dir: &Path) -> bool {
    let pid = std::fs::read_to_string(dir.join("pid")).ok().and_then(|text| text.trim().parse().ok());
    let stand_in = dir.join("criu");
    let is_of_it = |pid| {
        let line = process::text(pid, "cmdline").unwrap_or_default();
        line.contains(stand_in.to_str().unwrap())
    };
    pid.is_some_and(|pid: i32| process::parent(pid).is_none_or(|parent| !is_of_it(parent)))
}

#[test]
fn a_restore_whose_criu_is_killed_beside_a_child_is_abandoned() {
    let dir = tempfile::tempdir().unwrap();
    let criu = stand_in(dir.path(), &killed_beside_a_child(dir.path()));
    let place = Place { criu: &criu, init: None, images: dir.path(), opened: None, work: dir.path(), timeout: LONG };
    let abandoned = std::cell::Cell::new(0);
    let abandon = || abandoned.set(abandoned.get() + 1);
    let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, abandon: &abandon, died: &|| None };
    let error = restore(&place, RestoreOptions::default(), &mut hooks).unwrap_err();
    assert!(error.says_criu_killed(), "{error:?}");
    assert!(abandoned.get() > 0);
    assert_child_ends(dir.path());
}

#[test]
fn its_answer_counts_if_it_is_killed_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let answer = Response {
        kind: Kind::Dump.into(),
        success: true,
        restore: None,
        notify: None,
        cr_errno: None,
        features: None,
    };
    let path = dir.path().join("answer");
    std::fs::write(&path, answer.encode_to_vec()).unwrap();
    let script = format!("cat {} >&3\n{}", path.display(), killed_beside_a_child(dir.path()));
    let log = ask_in(dir.path(), &script, LONG, &|| false, &mut |_| Ok(())).unwrap();
    assert_eq!(log.errors(), ["its last word"]);
    assert_child_ends(dir.path());
}

/// A CRIU that ends by itself was not killed, however long that takes.
#[test]
fn its_own_exit_code_counts_if_it_closes_the_socket_before_it_ends() {
    let script = "exec 3>&-\ni=0; while [ $i -lt 30000 ]; do i=$((i + 1)); done\nexit 3";
    let error = ask(script, LONG, &|| false).unwrap_err();
    assert!(matches!(error, RunError::Gone { ended: Ended::Exit(3), .. }), "{error:?}");
    assert!(!error.says_criu_killed());
}

#[test]
fn one_that_goes_away_without_an_answer_is_quoted() {
    let script = "echo 'Error (criu/a.c:1): out of luck' >&2\nexit 3";
    let error = ask(script, LONG, &|| false).unwrap_err();
    assert!(matches!(error, RunError::Gone { ended: Ended::Exit(3), .. }), "{error:?}");
    assert_eq!(error.to_string(), "CRIU ended without an answer (exit code 3): out of luck");
}

#[test]
fn one_that_hangs_is_killed_and_so_is_one_that_is_not_wanted_any_more() {
    let began = Instant::now();
    let error = ask("exec sleep 300", Duration::from_millis(200), &|| false).unwrap_err();
    assert!(matches!(error, RunError::Timeout { .. }), "{error:?}");
    let error = ask("exec sleep 300", LONG, &|| true).unwrap_err();
    assert!(matches!(error, RunError::Cancelled), "{error:?}");
    assert!(began.elapsed() < LONG);
}

/// A CRIU that only sees its socket closed resumes the tasks, which nobody would watch.
#[test]
fn a_panic_in_a_step_of_ours_ends_criu_and_what_it_restored() {
    let dir = tempfile::tempdir().unwrap();
    let [message, pid] = ["message", "pid"].map(|name| dir.path().join(name));
    std::fs::write(&message, notification("post-restore")).unwrap();
    let (message, number) = (message.display(), pid.display());
    let criu = stand_in(dir.path(), &format!("echo $$ > {number}\ncat {message} >&3\nexec sleep 300"));
    let place = Place { criu: &criu, init: None, images: dir.path(), opened: None, work: dir.path(), timeout: LONG };
    let was_running = std::cell::Cell::new(None);
    let is_running = || {
        let pid = std::fs::read_to_string(&pid).unwrap();
        Path::new(&format!("/proc/{}", pid.trim())).exists()
    };
    let mut notify = |_| std::panic::resume_unwind(Box::new("a fault of ours"));
    let abandon = || was_running.set(Some(is_running()));
    let mut hooks = Hooks { notify: &mut notify, cancelled: &|| false, abandon: &abandon, died: &|| None };
    let restored = || restore(&place, RestoreOptions::default(), &mut hooks);
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(restored)).is_err());
    assert_eq!(was_running.get(), Some(true), "the tasks continue when CRIU is gone");
    assert!(!is_running());
}

#[test]
fn an_answer_that_is_none_and_a_program_that_is_none() {
    // The socket is descriptor 3; the shell's echo is one packet.
    let error = ask("echo nonsense >&3\nexec sleep 300", LONG, &|| false).unwrap_err();
    assert!(matches!(error, RunError::Talk { what: "decode", .. }), "{error:?}");
    let criu = Criu::known("/nowhere/criu".into(), Version(4, 2, 0));
    let place =
        Place { criu: &criu, init: None, images: Path::new("/"), opened: None, work: Path::new("/"), timeout: LONG };
    assert!(matches!(
        Run::start(&place, Given::default(), None),
        Err(RunError::Start(spawn::Error::Child { step: "execve", .. }))
    ));
}

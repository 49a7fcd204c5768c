use super::*;
use crate::Version;

/// Runs a program in place of CRIU and requests a dump.
fn ask(script: &str, timeout: Duration, cancelled: &dyn Fn() -> bool) -> Result<Log, RunError> {
    let dir = tempfile::tempdir().unwrap();
    let [path, draft] = ["criu", "draft"].map(|name| dir.path().join(name));
    std::fs::write(&draft, format!("#!/bin/sh\n{script}")).unwrap();
    // Copied by another process: a child that another test forks meanwhile would have our descriptor for a moment, and
    // a file that is open for writing cannot be executed (ETXTBSY).
    // Another test may reap it: what counts is the file.
    let _ = std::process::Command::new("install").args([&draft, &path]).status();
    assert!(path.exists());
    let criu = Criu::known(path, Version(4, 2, 0));
    let place = Place { criu: &criu, init: None, images: dir.path(), opened: None, work: dir.path(), timeout };
    let options = DumpOptions {
        root: 1000,
        tcp: Tcp::Close,
        ghost_limit: 1,
        freeze_timeout: Duration::from_secs(1),
        plugin: None,
    };
    let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled, abandon: &|| {}, died: &|| None };
    dump(&place, options, &mut hooks)
}

const LONG: Duration = Duration::from_secs(20);

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
    let [path, draft, message, pid] = ["criu", "draft", "message", "pid"].map(|name| dir.path().join(name));
    let notify = super::super::proto::Notify { script: Some("post-restore".into()), pid: Some(1000) };
    let response = Response {
        kind: Kind::Notify.into(),
        success: true,
        restore: None,
        notify: Some(notify),
        cr_errno: None,
        features: None,
    };
    std::fs::write(&message, response.encode_to_vec()).unwrap();
    let (message, number) = (message.display(), pid.display());
    std::fs::write(&draft, format!("#!/bin/sh\necho $$ > {number}\ncat {message} >&3\nexec sleep 300")).unwrap();
    // Another test may reap it: what counts is the file.
    let _ = std::process::Command::new("install").args([&draft, &path]).status();
    assert!(path.exists());
    let criu = Criu::known(path, Version(4, 2, 0));
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
        Run::start(&place, Orphan::Dies, &[], None),
        Err(RunError::Start(spawn::Error::Child { step: "execve", .. }))
    ));
}

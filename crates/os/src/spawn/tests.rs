use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, Instant};

use super::*;

/// The output of a shell script in the child, through a pipe, and how the child ended.
fn output(script: &str, set_up: impl FnOnce(Spawn) -> Spawn) -> (String, Ended) {
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let spawn = Spawn::new(Path::new("/bin/sh"), ["-c", script]).unwrap().fd(write, 1);
    let child = set_up(spawn).start().unwrap();
    let mut text = String::new();
    std::fs::File::from(read).read_to_string(&mut text).unwrap();
    (text, child.wait().unwrap())
}

fn step_of(error: Error) -> (&'static str, io::ErrorKind) {
    match error {
        Error::Child { step, source, .. } => (step, source.kind()),
        other => panic!("{other}"),
    }
}

#[test]
fn blocked_signals_wait_for_the_child() {
    let script = ["-c", "kill -TERM $$; exit 3"];
    let ended = |spawn: Spawn| spawn.start().unwrap().wait().unwrap();
    let spawn = || Spawn::new(Path::new("/bin/sh"), script).unwrap();
    assert_eq!(ended(spawn().signals_blocked()), Ended::Exit(3));
    assert_eq!(ended(spawn()), Ended::Signal(libc::SIGTERM));
}

#[test]
fn a_child_has_its_standard_descriptors_and_no_other() {
    let null = |fd| Open { fd, path: c"/dev/null".into(), flags: libc::O_RDWR, expect: None };
    // A descriptor without close-on-exec, with a free number.
    let file = std::fs::File::open("/etc/passwd").unwrap();
    let leak = nix::fcntl::fcntl(&file, nix::fcntl::FcntlArg::F_DUPFD(50)).unwrap();
    let (text, ended) = output("for fd in /proc/$$/fd/*; do echo ${fd##*/}; done", |s| s.open(null(0)).open(null(2)));
    let fds: Vec<u32> = text.lines().map(|l| l.parse().unwrap()).collect();
    // The fourth is the folder that the shell lists.
    assert_eq!((fds.as_slice(), ended), ([0, 1, 2, 3].as_slice(), Ended::Exit(0)));
    nix::unistd::close(leak).unwrap();
}

#[test]
fn descriptors_that_trade_places_do_not_cover_each_other() {
    let named = |text: &str| {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, text.as_bytes()).unwrap();
        std::io::Seek::rewind(&mut file).unwrap();
        OwnedFd::from(file)
    };
    let (three, four) = (named("three"), named("four"));
    let (text, _) = output("cat <&3; cat <&4", |s| s.fd(three, 3).fd(four, 4));
    assert_eq!(text, "threefour");
}

/// A program, and a descriptor that has it open for writing.
fn busy_program(dir: &Path) -> (std::path::PathBuf, std::fs::File) {
    let program = dir.join("true");
    std::fs::copy("/bin/true", &program).unwrap();
    let writer = std::fs::OpenOptions::new().append(true).open(&program).unwrap();
    (program, writer)
}

#[test]
fn a_program_that_is_still_open_for_writing_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let (program, writer) = busy_program(dir.path());
    let before = register().clone();
    let starting = std::thread::spawn(move || Spawn::new(&program, [""; 0]).unwrap().start());
    // Other tests start children too, but only ours waits before its exec, with our executable as its own.
    let waits = |pid: &i32| super::super::process::executable(*pid) == std::env::current_exe().ok();
    let deadline = Instant::now() + Duration::from_secs(10);
    while !register().difference(&before).any(waits) && !starting.is_finished() {
        assert!(Instant::now() < deadline, "no child was started");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(writer);
    assert_eq!(starting.join().unwrap().unwrap().wait().unwrap(), Ended::Exit(0));
}

#[test]
fn a_program_that_stays_open_for_writing_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let (program, _writer) = busy_program(dir.path());
    let (step, kind) = step_of(Spawn::new(&program, [""; 0]).unwrap().start().unwrap_err());
    assert_eq!((step, kind), ("execve", io::ErrorKind::ExecutableFileBusy));
}

#[test]
fn more_descriptors_than_can_be_placed_are_refused() {
    let null = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let spawn = || Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap();
    assert!(matches!(spawn().fd(null(), 16).start(), Err(Error::Fork { .. })));
    let many = (3..12).fold(spawn(), |spawn, fd| spawn.fd(null(), fd));
    assert!(matches!(many.start(), Err(Error::Fork { .. })));
}

#[test]
fn what_was_asked_for_is_what_the_child_finds() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().canonicalize().unwrap();
    let limit = libc::rlimit { rlim_cur: 77, rlim_max: 77 };
    let odd = OsStr::from_bytes(b"\xff\xfe");
    let (text, ended) =
        output("umask; pwd; ulimit -n; printf %s \"$ODD\" | od -An -tx1; env | wc -l; kill -TERM $$", |s| {
            let s = s.umask(0o027).directory(&path).unwrap().limit(libc::RLIMIT_NOFILE, limit).session();
            s.environment([(OsStr::new("ODD"), odd), (OsStr::new("PATH"), OsStr::new("/usr/bin:/bin"))]).unwrap()
        });
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    // The shell adds PWD.
    assert_eq!(lines, ["0027", path.to_str().unwrap(), "77", "ff fe", "3"]);
    assert_eq!(ended, Ended::Signal(libc::SIGTERM));
}

#[test]
fn another_user_has_no_capabilities_whatever_the_securebits_are() {
    if !rekindle_testing::root() {
        return;
    }
    let (read, write) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).unwrap();
    let ended = std::thread::spawn(move || {
        // They belong to a thread.
        rustix::thread::set_capabilities_secure_bits(rustix::thread::CapabilitiesSecureBits::NO_SETUID_FIXUP).unwrap();
        let spawn =
            Spawn::new(Path::new("/bin/sh"), ["-c", "grep -E 'Cap(Inh|Prm|Eff|Amb)' /proc/self/status"]).unwrap();
        spawn.fd(write, 1).identity(65534, 65534).start_here().unwrap().wait().unwrap()
    });
    assert_eq!(ended.join().unwrap(), Ended::Exit(0));
    let mut text = String::new();
    std::fs::File::from(read).read_to_string(&mut text).unwrap();
    assert!(text.lines().count() == 4 && text.lines().all(|line| line.ends_with("\t0000000000000000")), "{text}");
}

/// A user could put a link in the place of the working directory, to a folder in the closed folder of somebody else.
#[test]
fn a_working_directory_is_entered_with_the_rights_of_its_user() {
    if !rekindle_testing::root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mode = |path: &Path, bits| {
        std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(bits)).unwrap();
    };
    let inner = dir.path().join("inner");
    let link = dir.path().join("link");
    std::fs::create_dir(&inner).unwrap();
    std::os::unix::fs::symlink("inner", &link).unwrap();
    mode(&inner, 0o755);
    let begin = |directory: &Path| {
        let spawn = Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap().directory(directory).unwrap();
        spawn.directory_of(65534, 65534, &[65534]).unwrap().start()
    };
    for (bits, enters) in [(0o755, true), (0o711, true), (0o700, false)] {
        mode(dir.path(), bits);
        for directory in [&inner, &link] {
            match begin(directory) {
                Ok(child) if enters => assert_eq!(child.wait().unwrap(), Ended::Exit(0)),
                Err(error) if !enters => {
                    let refused = io::ErrorKind::PermissionDenied;
                    assert_eq!(step_of(error), ("changing to the working directory", refused));
                }
                other => panic!("{bits:o} {}: {other:?}", directory.display()),
            }
        }
    }
    // What this process has open is not a way, either.
    mode(dir.path(), 0o700);
    let open = std::fs::File::open(&inner).unwrap();
    let magic = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
    assert_eq!(step_of(begin(Path::new(&magic)).unwrap_err()).0, "changing to the working directory");
}

/// It is not the user's because the working directory is.
#[test]
fn only_the_working_directory_is_found_with_other_rights() {
    if !rekindle_testing::root() {
        return;
    }
    let (read, write) = nix::unistd::pipe().unwrap();
    let script = "grep -E '^(Uid|Gid|Groups|CapEff|CapPrm):' /proc/self/status";
    let shell = || Spawn::new(Path::new("/bin/sh"), ["-c", script]).unwrap().directory(Path::new("/tmp")).unwrap();
    let spawn = shell().directory_of(65534, 65534, &[65534, 7]).unwrap().fd(write, 1);
    assert_eq!(spawn.start().unwrap().wait().unwrap(), Ended::Exit(0));
    let mut text = String::new();
    std::fs::File::from(read).read_to_string(&mut text).unwrap();
    let ours = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    assert_eq!(text.lines().count(), 5, "{text}");
    assert!(text.lines().all(|line| ours.lines().any(|our| our == line)), "{text}{ours}");
}

#[test]
fn a_step_that_fails_is_named() {
    let shell = || Spawn::new(Path::new("/bin/sh"), ["-c", "true"]).unwrap();
    let gone = io::ErrorKind::NotFound;
    let directory = shell().directory(Path::new("/nowhere")).unwrap().start().unwrap_err();
    assert_eq!(step_of(directory), ("changing to the working directory", gone));
    let file = Open { fd: 0, path: c"/nowhere".into(), flags: libc::O_RDONLY, expect: None };
    assert_eq!(step_of(shell().open(file).start().unwrap_err()), ("opening standard input or output", gone));
    let program = Spawn::new(Path::new("/nowhere"), [""; 0]).unwrap().start().unwrap_err();
    assert_eq!(step_of(program), ("execve", gone));
    assert!(matches!(Spawn::new(Path::new("/bin/sh"), [OsStr::from_bytes(b"a\0b")]), Err(Error::Nul(_))));
}

#[test]
fn the_file_that_was_checked_is_the_one_that_a_child_gets() {
    use std::os::unix::fs::{MetadataExt, symlink};
    let dir = tempfile::tempdir().unwrap();
    let (log, secret, folder) = (dir.path().join("log"), dir.path().join("secret"), dir.path().join("folder"));
    std::fs::write(&secret, "").unwrap();
    std::fs::write(&log, "").unwrap();
    std::fs::create_dir(&folder).unwrap();
    std::fs::write(folder.join("log"), "").unwrap();
    let is = |path: &Path| std::fs::metadata(path).map(|found| (found.dev(), found.ino())).unwrap();
    let (expect, inside) = (is(&log), is(&folder.join("log")));
    let start = |path: &Path, expect| {
        let flags = libc::O_WRONLY | libc::O_APPEND;
        let file = Open { fd: 1, path: c_string(path).unwrap(), flags, expect: Some(expect) };
        let script = "echo said; grep ^flags: /proc/self/fdinfo/1";
        Spawn::new(Path::new("/bin/sh"), ["-c", script]).unwrap().open(file).start().map(|child| child.wait().unwrap())
    };
    assert_eq!(start(&log, expect).unwrap(), Ended::Exit(0));
    let text = std::fs::read_to_string(&log).unwrap();
    let flags = text.strip_prefix("said\nflags:\t").unwrap_or_else(|| panic!("{text}"));
    let flags = i32::from_str_radix(flags.trim(), 8).unwrap();
    assert_eq!(flags & (libc::O_APPEND | libc::O_NONBLOCK), libc::O_APPEND, "the job does not wait for it");
    // Exchanged since.
    let (moved, fifo) = (dir.path().join("moved"), dir.path().join("fifo"));
    std::fs::rename(&log, moved).unwrap();
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let reader = std::fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    let refused = |path: &Path, expect| step_of(start(path, expect).unwrap_err()).0;
    let step = "opening the output, where the file that was checked is no longer there,";
    for exchanged in [&secret, &fifo, &folder, Path::new("/dev/null"), &log] {
        assert_eq!(refused(exchanged, expect), step, "{}", exchanged.display());
    }
    // Its own device and inode do not make a FIFO a file.
    assert_eq!(refused(&fifo, is(&fifo)), step);
    drop(reader);
    assert_eq!(refused(&fifo, is(&fifo)), step);
    for target in ["secret", "moved"] {
        symlink(target, &log).unwrap();
        assert_eq!(refused(&log, is(&log)), step);
        std::fs::remove_file(&log).unwrap();
    }
    symlink("folder", dir.path().join("linked")).unwrap();
    assert_eq!(refused(&dir.path().join("linked/log"), inside), step);
    assert_eq!(start(&folder.join("log"), inside).unwrap(), Ended::Exit(0));
    assert_eq!(std::fs::read(&secret).unwrap(), b"");
}

#[test]
fn a_child_in_a_new_world_is_its_first_and_another_can_join() {
    if !rekindle_testing::root() {
        return;
    }
    let first =
        Spawn::new(Path::new("/bin/sleep"), ["60"]).unwrap().world(World::New(CloneFlags::empty())).start().unwrap();
    assert_eq!(crate::process::inner_pid(first.pid()), Some(1));
    let join = |s: Spawn| s.world(World::Join(first.pidfd().unwrap(), CloneFlags::empty()));
    let (text, _) = output("echo $$", |s| join(s).pids(500..=500));
    assert_eq!(text.trim(), "500");
    // A process in its session keeps the number from being free.
    let (text, _) = output("echo $$; exec sleep 60 >/dev/null 2>&1 & exit 0", |s| join(s).session().pids(500..=501));
    assert_eq!(text.trim(), "500");
    let (text, _) = output("echo $$", |s| join(s).pids(500..=501));
    assert_eq!(text.trim(), "501");
    let full = join(Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap()).pids(500..=500).start().unwrap_err();
    assert!(full.to_string().contains("fork"), "{full}");
    first.signal(libc::SIGKILL).unwrap();
    assert_eq!(first.wait().unwrap(), Ended::Signal(libc::SIGKILL));
    assert!(!is_known(first.pid()));
}

#[test]
fn strays_are_reaped_and_our_own_children_are_left_to_their_owner() {
    // In a separate process: in this one, other tests' children are strays.
    const MARK: &str = "REKINDLE_TEST_STRAYS";
    if std::env::var_os(MARK).is_none() {
        let name = "spawn::tests::strays_are_reaped_and_our_own_children_are_left_to_their_owner";
        let mut alone = std::process::Command::new(std::env::current_exe().unwrap());
        let output = alone.args(["--exact", name]).env(MARK, "1").output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let ours = Spawn::new(Path::new("/bin/true"), [""; 0]).unwrap().start().unwrap();
    ours.wait_for_end().unwrap();
    // A child that is not in the register, as a failed CRIU leaves them.
    let stray = std::process::Command::new("/bin/true").spawn().unwrap();
    let pid = stray.id().cast_signed();
    let deadline = Instant::now() + Duration::from_secs(10);
    while Path::new(&format!("/proc/{pid}")).exists() {
        assert!(Instant::now() < deadline, "the stray was not reaped");
        reap_strays();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(ours.wait().unwrap(), Ended::Exit(0), "it was not taken from its owner");
    // Reaped already: only the handle is left to drop.
    drop(stray);
}

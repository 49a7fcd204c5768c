//! Restores that are tried beside the running job: they find what a restart would find, and leave no trace.

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish};
use crate::supervisor::{LIMIT, Lab, Running};

fn lab() -> Option<Lab> {
    Some(Lab::new()?.set("snapshot.rehearse", "\"1s\""))
}

fn events(lab: &Lab, kind: &str) -> usize {
    let text = fs::read_to_string(lab.store().join("j/log/events.jsonl")).unwrap_or_default();
    text.matches(&format!("\"event\":\"{kind}\"")).count()
}

fn start(lab: &Lab, kind: &str) -> Running {
    let mut run = lab.python("kinds.py", &[kind, lab.path().to_str().unwrap()]);
    count_on(lab, &mut run, 5);
    run.snapshot(lab);
    run
}

/// Locks, a FIFO, an inotify watch, a stopped child, deleted files with and without other names, a connection: the job checks
/// them all the time.
#[test]
fn the_job_and_its_files_notice_nothing() {
    for kind in ["mixed", "ghost", "tcp-within", "shared", "link-remap"] {
        let Some(lab) = lab() else { return };
        let mut run = start(&lab, kind);
        run.wait_for("two rehearsals", || events(&lab, "rehearsed") >= 2);
        assert_eq!(events(&lab, "rehearsal-failed"), 0, "{kind}");
        count_on(&lab, &mut run, 5);
        run.crash(&lab);
        count_on(&lab, &mut run, 5);
        finish(&lab, run);
        lab.assert_all_gone();
    }
}

const SOCKETS: &str = "
import mmap, os, socket, sys, time
folder = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(folder + '/listener')
listener.listen()
listener.setblocking(False)
base = open(folder + '/base', 'w+b')
base.write(bytes(1 << 20))
base.flush()
view = mmap.mmap(base.fileno(), 1 << 20)
n = 0
while not os.path.exists(folder + '/finish'):
    n += 1
    view[:8] = n.to_bytes(8, 'little')
    assert os.pread(base.fileno(), 8, 0) == n.to_bytes(8, 'little'), 'the file is another'
    try:
        listener.accept()[0].send(b'me')
    except BlockingIOError:
        pass
    print('n', n, flush=True)
    time.sleep(0.02)
print('done')
";

/// A restore makes sockets and rewrites files at the same paths.
#[test]
fn sockets_and_files_by_name_stay_the_jobs_own() {
    let Some(lab) = lab() else { return };
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.run(["/usr/bin/python3", "-c", SOCKETS, &folder]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    let before = fs::metadata(lab.file("base")).unwrap();
    run.wait_for("a rehearsal", || events(&lab, "rehearsed") >= 1);
    assert_eq!(before.ino(), fs::metadata(lab.file("base")).unwrap().ino());
    let mut stream = UnixStream::connect(lab.file("listener")).unwrap();
    let mut answer = [0; 2];
    std::io::Read::read_exact(&mut stream, &mut answer).unwrap();
    assert_eq!(&answer, b"me");
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// A restore renames it, too.
#[test]
fn a_socket_that_was_renamed_stays_the_jobs_own() {
    let Some(lab) = lab() else { return };
    let mut run = start(&lab, "renamed-socket");
    run.snapshot(&lab);
    run.wait_for("a rehearsal", || events(&lab, "rehearsed") >= 1);
    count_on(&lab, &mut run, 5);
    finish(&lab, run);
}

/// Its files in memory are damaged, so that CRIU refuses it.
#[test]
fn an_image_that_criu_refuses_is_told_of_and_kept() {
    let Some(lab) = lab() else { return };
    let lab = lab.set("store.keep-last", "9");
    let mut run = start(&lab, "plain");
    // A rehearsal may come before the damage. Then it is tried with the next image.
    let mut newest = 1;
    let refused = loop {
        damage_images_in_memory(&lab);
        let listed = || String::from_utf8_lossy(&lab.rekindle(&["list", "j"]).stdout).into_owned();
        let row = || {
            let text = listed();
            text.lines()
                .find(|line| line.trim_start().starts_with(&format!("{newest:06}")))
                .unwrap_or_default()
                .to_owned()
        };
        run.wait_for("a rehearsal", || ["good, refused", "good, rehearsed"].iter().any(|words| row().contains(words)));
        if row().contains("good, refused") {
            break row();
        }
        newest = run.snapshot(&lab);
    };
    assert!(run.err().contains("could not be restored in a rehearsal, twice"), "{refused}");
    run.wait_for("the event", || events(&lab, "rehearsal-failed") > 0);
    assert_eq!(events(&lab, "image-bad"), 0);
    run.wait_for("others see it", || lab.published().is_some_and(|now| now.rehearsal_failure.is_some()));
    let status = String::from_utf8_lossy(&lab.rekindle(&["status", "j"]).stdout).into_owned();
    assert!(status.contains("could not be restored in a rehearsal"), "{status}");
    // It is tried again after a while, and said once.
    count_on(&lab, &mut run, 200);
    let said = format!("image {newest:06}");
    let times = run.err().lines().filter(|line| line.contains(&said) && line.contains("rehearsal, twice")).count();
    assert_eq!(times, 1);
    finish(&lab, run);
}

/// In place: the magic number of the table, and no entry that makes sense.
fn damage_images_in_memory(lab: &Lab) {
    let tables = walk(lab.memory()).into_iter().filter(|path| path.ends_with("criu/files.img"));
    for table in tables {
        let mut bytes = fs::read(&table).unwrap();
        bytes[8..].fill(0xff);
        fs::File::options().write(true).open(&table).unwrap().write_all_at(&bytes, 0).unwrap();
    }
}

fn walk(folder: PathBuf) -> Vec<PathBuf> {
    let entries = fs::read_dir(&folder).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.flat_map(|path| if path.is_dir() { walk(path) } else { vec![path] }).collect()
}

const OUTSIDE: &str = "
import os, socket, sys, time
folder = sys.argv[1]
log = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
log.connect(folder + '/outside')
n = 0
while not os.path.exists(folder + '/finish'):
    n += 1
    log.send(b'x')
    print('n', n, flush=True)
    time.sleep(0.02)
print('done')
";

/// A rehearsal reaches nobody outside, and does not take that for a fault of the image.
#[test]
fn a_program_outside_hears_nothing_of_it() {
    let Some(lab) = lab() else { return };
    let outside = UnixDatagram::bind(lab.file("outside")).unwrap();
    // The job would wait where nobody reads.
    std::thread::spawn(move || while outside.recv(&mut [0; 8]).is_ok() {});
    let folder = lab.path().to_str().unwrap().to_owned();
    let mut run = lab.run(["/usr/bin/python3", "-c", OUTSIDE, &folder]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    run.wait_said("was not rehearsed: it is connected to a program outside the job");
    assert_eq!(events(&lab, "rehearsal-failed"), 0);
    fs::write(lab.file("finish"), "").unwrap();
    let (code, ..) = run.finish(LIMIT);
    assert_eq!(code, 0);
}

/// A CRIU that hangs in a rehearsal keeps nobody from stopping, and nothing of it stays.
#[test]
fn a_stop_does_not_wait_for_it() {
    let Some(lab) = lab() else { return };
    let lab = lab.set_file("criu.path", "criu");
    let (real, slow) = (crate::supervisor::criu(), lab.file("slow"));
    lab.script(
        "criu",
        &format!(
            "case \"$*\" in *--version*) exec {real} \"$@\";; esac\n\
             if [ -e {slow} ]; then while :; do :; done; fi\nexec {real} \"$@\"",
            real = real.display(),
            slow = slow.display(),
        ),
    );
    let mut run = start(&lab, "plain");
    fs::write(&slow, "").unwrap();
    run.wait_for("it hangs", || lab.processes().iter().any(|(_, command)| command.contains("rehearse")));
    std::thread::sleep(Duration::from_millis(300));
    fs::remove_file(&slow).unwrap();
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
    lab.assert_all_gone();
}

const RACER: &str = "
import os, sys
here = os.stat('/').st_dev
while not os.path.exists(sys.argv[1]):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            root = os.open(f'/proc/{pid}/root', os.O_PATH)
        except OSError:
            continue
        if os.fstat(root).st_dev != here:
            print('reached', pid, flush=True)
        os.close(root)
print('over')
";

/// In the view limits of the machine's mounts could be got around, and memory be filled that nobody counts.
#[test]
fn the_user_of_the_job_does_not_get_into_it() {
    use std::os::unix::process::CommandExt;
    let Some(lab) = lab() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let script = "import time\nn = 0\nwhile True:\n    n += 1\n    print('n', n, flush=True)\n    time.sleep(0.02)";
    let mut run = lab.run(["/usr/bin/python3", "-c", script]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    let mut racer = std::process::Command::new("/usr/bin/python3");
    racer.args(["-c", RACER]).arg(lab.file("over")).current_dir("/").uid(65534).gid(65534);
    let racer = racer.stdout(std::process::Stdio::piped()).spawn().unwrap();
    let before = events(&lab, "rehearsed");
    run.wait_for("two rehearsals", || events(&lab, "rehearsed") >= before + 2);
    fs::write(lab.file("over"), "").unwrap();
    let out = racer.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&out.stdout), "over\n");
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
}

/// It sleeps for a millisecond at a time, and needs no memory but what is in its file. As soon as it finds itself in another
/// PID namespace, which every restore makes, it changes the domain name of the machine: that is in no namespace of rekindle's.
const RUNS_ON: &str = r#"
        .globl _start
        .data
buffer: .zero 256
        .section .rodata
space:  .asciz "/proc/self/ns/pid"
pause:  .quad 0, 1000000
up:     .ascii "up\n"
name:   .ascii "NAME"
end:
        .text
_start: lea space(%rip), %rdi
        lea buffer(%rip), %rsi
        mov $4, %eax
        syscall
        mov buffer+8(%rip), %r12
        mov $1, %edi
        lea up(%rip), %rsi
        mov $3, %edx
        mov $1, %eax
        syscall
again:  lea pause(%rip), %rdi
        xor %esi, %esi
        mov $35, %eax
        syscall
        lea space(%rip), %rdi
        lea buffer(%rip), %rsi
        mov $4, %eax
        syscall
        mov buffer+8(%rip), %rax
        cmp %rax, %r12
        je again
        mov %rax, %r12
        lea name(%rip), %rdi
        mov $(end - name), %esi
        mov $171, %eax
        syscall
        jmp again
"#;

const DOMAIN: &str = "/proc/sys/kernel/domainname";

/// The machine's domain name, set again at the end.
struct Domain(String);

impl Drop for Domain {
    fn drop(&mut self) {
        let _ = fs::write(DOMAIN, &self.0);
    }
}

#[test]
fn no_instruction_of_a_rehearsed_process_is_executed() {
    let Some(lab) = lab() else { return };
    let (source, program) = (lab.file("runs_on.S"), lab.file("runs_on"));
    let name = format!("rekindle-test-{}", std::process::id());
    fs::write(&source, RUNS_ON.replace("NAME", &name)).unwrap();
    let mut cc = std::process::Command::new("cc");
    cc.args(["-nostdlib", "-static", "-no-pie", "-o"]).args([&program, &source]);
    assert!(cc.status().unwrap().success());
    let domain = Domain(fs::read_to_string(DOMAIN).unwrap());
    let mut run = lab.run([program.to_str().unwrap()]);
    run.wait_printed("up\n");
    // As long as it is open, no other namespace has its number, by which the program knows that it was restored.
    let _namespace = fs::File::open(format!("/proc/{}/ns/pid", run.job_pid(&lab))).unwrap();
    run.snapshot(&lab);
    run.wait_for("three rehearsals", || events(&lab, "rehearsed") >= 3);
    assert_eq!(fs::read_to_string(DOMAIN).unwrap(), domain.0, "it ran in a rehearsal");
    // The program does what it should.
    run.crash(&lab);
    run.wait_for("it runs again", || fs::read_to_string(DOMAIN).unwrap().trim_end() == name);
    run.signal(Signal::SIGTERM);
    run.ends_with(143);
}

const LARGE: &str = "
import mmap, os, sys, time
folder = sys.argv[1]
memory = bytearray(b'x') * (400 << 20)
shared = mmap.mmap(-1, 100 << 20)
shared[:] = memory[:100 << 20]
base = open(folder + '/base', 'w+b')
base.write(memory[:100 << 20])
base.flush()
view = mmap.mmap(base.fileno(), 100 << 20)
n = 0
while not os.path.exists(folder + '/finish'):
    n += 1
    view[:8] = n.to_bytes(8, 'little')
    print('n', n, flush=True)
    time.sleep(0.02)
assert view[8:] == memory[8:100 << 20] and shared[:] == memory[:100 << 20]
print('done')
";

/// It has more memory, and a larger file, than a rehearsal may use.
#[test]
fn a_job_is_rehearsed_that_would_not_fit_a_second_time() {
    const MIB: u64 = 1 << 20;
    let Some(lab) = lab() else { return };
    // Twice its memory and its file are used by itself and by its image; half of that is left.
    let (uses, left) = (600 * 2, 400);
    let limit = rekindle_os::cgroup::memory_headroom(std::process::id().cast_signed());
    let available = rekindle_os::cgroup::memory_available().into_iter().chain(limit).min().unwrap();
    let reserve = available.saturating_sub((uses + left) * MIB);
    let lab = lab.set("snapshot.memory-reserve", &format!("\"{reserve}B\""));
    let mut run = lab.run(["/usr/bin/python3", "-c", LARGE, lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    run.wait_for("a rehearsal", || events(&lab, "rehearsed") >= 1);
    assert_eq!(events(&lab, "rehearsal-failed"), 0);
    count_on(&lab, &mut run, 5);
    run.crash(&lab);
    finish(&lab, run);
}

/// A mount, undone at the end.
struct Bound(PathBuf);

impl Drop for Bound {
    fn drop(&mut self) {
        let _ = nix::mount::umount2(&self.0, nix::mount::MntFlags::MNT_DETACH);
    }
}

const PIPE: &str = "
import os, sys, time
pipe = os.open(sys.argv[1] + '/pipe', os.O_RDWR | os.O_NONBLOCK)
os.write(pipe, b'ten bytes!')
n = 0
while not os.path.exists(sys.argv[1] + '/finish'):
    n += 1
    print('n', n, flush=True)
    time.sleep(0.02)
found = os.read(pipe, 100)
print('done' if found == b'ten bytes!' else f'wrong: {found}')
";

/// A single file that is mounted cannot be laid over: what the job has there is the machine's.
#[test]
fn a_pipe_that_cannot_be_laid_over_is_left_alone() {
    let Some(lab) = lab() else { return };
    nix::unistd::mkfifo(&lab.file("real"), nix::sys::stat::Mode::from_bits_truncate(0o600)).unwrap();
    fs::write(lab.file("pipe"), "").unwrap();
    let none = None::<&str>;
    nix::mount::mount(Some(&lab.file("real")), &lab.file("pipe"), none, nix::mount::MsFlags::MS_BIND, none).unwrap();
    let _bound = Bound(lab.file("pipe"));
    let mut run = lab.run(["/usr/bin/python3", "-c", PIPE, lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    run.wait_said("was not rehearsed: it has files at");
    fs::write(lab.file("finish"), "").unwrap();
    let (code, out, said) = run.finish(LIMIT);
    assert!(code == 0 && out.ends_with("done\n"), "{out}{said}");
}

const LEASE: &str = "
import fcntl, os, signal, sys, time
folder = sys.argv[1]
signal.signal(signal.SIGIO, lambda *_: print('broken', flush=True))
file = os.open(folder + '/leased', os.O_RDWR | os.O_CREAT, 0o600)
n = 0
while not os.path.exists(folder + '/finish'):
    n += 1
    if n > 1 and os.path.exists(folder + '/take') and fcntl.fcntl(file, fcntl.F_GETLEASE) != fcntl.F_WRLCK:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        print('taken', flush=True)
    print('n', n, flush=True)
    time.sleep(0.02)
print('done')
";

/// To copy a file to the view is to open it, which would break a write lease that the job took since.
#[test]
fn a_write_lease_is_not_broken() {
    let Some(lab) = Lab::new().map(|lab| lab.set("snapshot.rehearse", "\"3s\"")) else { return };
    let mut run = lab.run(["/usr/bin/python3", "-c", LEASE, lab.path().to_str().unwrap()]);
    count_on(&lab, &mut run, 5);
    run.snapshot(&lab);
    // Not while the first one copies the file.
    run.wait_for("the first rehearsal", || events(&lab, "rehearsed") >= 1);
    fs::write(lab.file("take"), "").unwrap();
    run.wait_printed("taken\n");
    run.wait_said("was not rehearsed: there is a write lease on");
    fs::write(lab.file("finish"), "").unwrap();
    let (code, out, said) = run.finish(LIMIT);
    assert!(code == 0 && out.ends_with("done\n") && !out.contains("broken"), "{out}{said}");
}

/// One that is due waits without work while the job cannot be rehearsed.
#[test]
fn a_suspended_job_costs_nothing() {
    let Some(lab) = lab() else { return };
    let mut run = start(&lab, "plain");
    assert!(lab.rekindle(&["suspend", "j"]).status.success());
    run.wait_for("it is suspended", || lab.published().is_some_and(|now| now.state.as_str() == "suspended"));
    std::thread::sleep(Duration::from_millis(1500));
    let ticks = || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", run.pid())).unwrap();
        let fields: Vec<u64> =
            stat.rsplit(')').next().unwrap().split(' ').filter_map(|field| field.parse().ok()).collect();
        // The state and tpgid, which is -1, are left out: utime and stime are the 10th and 11th.
        fields[9..11].iter().sum::<u64>()
    };
    let (before, since) = (ticks(), Instant::now());
    std::thread::sleep(Duration::from_secs(2));
    // A quarter of a processor.
    let used = ticks() - before;
    assert!(u128::from(used) < since.elapsed().as_millis() / 40, "{used} ticks in {:?}", since.elapsed());
    run.signal(Signal::SIGTERM);
    let _ = run.finish(LIMIT);
}

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;

use nix::sys::inotify::{InitFlags, Inotify};

use super::follow::Tail;
use super::*;
use rekindle_os::beneath::Unexpected;

fn files(dir: &tempfile::TempDir, size: u64, keep: u32) -> Files {
    Files::create(dir.path(), Bounds { size, keep }).unwrap()
}

#[test]
fn rotation_keeps_every_byte_up_to_the_number_kept() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 3, 2);
    let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    for round in 1..=4 {
        write!(writer, "round {round}").unwrap();
        files.rotate().unwrap();
    }
    write!(writer, "on").unwrap();
    files.rotate().unwrap();
    let read = |name: &str| std::fs::read_to_string(dir.path().join(name)).unwrap();
    assert_eq!(read("stdout.log"), "on");
    assert_eq!((read("stdout.log.1"), read("stdout.log.2")), ("round 4".into(), "round 3".into()));
    assert!(!dir.path().join("stdout.log.3").exists());
}

/// What a follower writes to in a test.
#[derive(Clone, Default)]
struct Screen(Arc<std::sync::Mutex<Vec<u8>>>);

impl Write for Screen {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Screen {
    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    fn shows(&self, text: &str) {
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        while self.text() != text {
            assert!(std::time::Instant::now() < deadline, "{:?} is not {text:?}", self.text());
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[test]
fn a_follower_shows_what_is_new_through_cuts_and_to_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 1, 1);
    std::fs::write(&files.stdout, "old\n").unwrap();
    let (out, err) = (Screen::default(), Screen::default());
    let follower = Follower::copy_to(&files, Box::new(out.clone()), Box::new(err.clone())).unwrap();
    let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    writeln!(writer, "one").unwrap();
    out.shows("one\n");
    // Rotated: the follower sees the cut before the job writes again, because the job is frozen during a rotation.
    files.rotate().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    writeln!(writer, "two").unwrap();
    out.shows("one\ntwo\n");
    // Cut to the length in an image, within what was shown. As a restore does it: the follower is told, however late it
    // looks.
    drop(files.hold().cut(&files.stdout, 2).unwrap());
    std::fs::write(&files.stderr, "last words").unwrap();
    writeln!(writer, "X").unwrap();
    drop(follower);
    assert_eq!((out.text().as_str(), err.text().as_str()), ("one\ntwo\nX\n", "last words"));
}

/// A follower that is far behind shows everything: the last output of one life and all lines of the next, although the
/// file has grown beyond the follower's position.
#[test]
fn nothing_is_lost_on_a_slow_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 100, 9);
    let small = Files { bounds: Bounds { size: 1, keep: 3 }, ..files.clone() };
    let screen = Screen::default();
    let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    let mut tail = Tail::new(&files, 0, Box::new(screen.clone()), &watch).unwrap();
    let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    let another = files.stdout.with_file_name("another");
    std::fs::write(&another, "12").unwrap();
    let cut = |to: u64| {
        let mut held = files.hold();
        assert_eq!(held.cut(&another, 2).unwrap(), None);
        held.cut(&files.stdout, to).unwrap().unwrap()
    };
    write!(writer, "1 2 3 4 ").unwrap();
    tail.copy();
    // Shown in part, then cut to before that, and grown beyond it.
    write!(writer, "last ").unwrap();
    cut(4);
    write!(writer, "3 4 5 6 7 8 9 ").unwrap();
    tail.copy();
    assert_eq!(screen.text(), "1 2 3 4 last 3 4 5 6 7 8 9 ");
    // Cut behind what was shown; then again, to before that; rotated in between.
    let length = || std::fs::metadata(&files.stdout).unwrap().len();
    let seen = length();
    write!(writer, "a b c ").unwrap();
    cut(seen + 4);
    write!(writer, "C ").unwrap();
    cut(seen - 2);
    write!(writer, "X ").unwrap();
    small.rotate().unwrap();
    write!(writer, "D E ").unwrap();
    cut(2);
    small.rotate().unwrap();
    write!(writer, "F ").unwrap();
    tail.copy();
    let all = "1 2 3 4 last 3 4 5 6 7 8 9 a b c C X D E F ";
    assert_eq!(screen.text(), all);
    // What is lost cannot be shown; the follower continues with what comes next.
    write!(writer, "gone ").unwrap();
    std::fs::remove_file(cut(2).file.unwrap()).unwrap();
    write!(writer, "G ").unwrap();
    tail.copy();
    assert_eq!(screen.text(), format!("{all}G "));
    // Cut by somebody else, who tells nobody: it is seen if the follower looks before the file grows again.
    writer.set_len(1).unwrap();
    tail.copy();
    write!(writer, "H ").unwrap();
    tail.copy();
    assert_eq!(screen.text(), format!("{all}G H "));
}

#[test]
fn a_file_that_can_not_be_copied_is_not_cut() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 3, 1);
    std::fs::write(&files.stdout, "precious").unwrap();
    std::fs::create_dir(dir.path().join("stdout.log.1")).unwrap();
    assert!(files.rotate().is_err());
    assert_eq!(std::fs::read_to_string(&files.stdout).unwrap(), "precious");
}

/// All output, from the rotated files and the file itself.
fn whole(files: &Files) -> String {
    let mut text = Vec::new();
    for n in (1..100).rev() {
        text.extend(std::fs::read(numbered(&files.stdout, n)).unwrap_or_default());
    }
    let file = File::open(&files.stdout).unwrap();
    let begin = usize::try_from(sparse::begin(&file).unwrap()).unwrap();
    text.extend(&std::fs::read(&files.stdout).unwrap()[begin..]);
    String::from_utf8(text).unwrap()
}

fn lines(range: std::ops::Range<u32>) -> String {
    range.map(|n| format!("line {n:06}\n")).collect()
}

#[test]
fn a_file_is_rotated_while_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 64 << 10, 90);
    let screen = Screen::default();
    let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    let mut tail = Tail::new(&files, 0, Box::new(screen.clone()), &watch).unwrap();
    let mut outside = crate::launch::tail::Tail::new(&files.stdout);
    let mut seen = Vec::new();
    let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    for n in 0..100 {
        writer.write_all(lines(n * 1000..(n + 1) * 1000).as_bytes()).unwrap();
        if n % 7 == 6 {
            files.relieve(0).unwrap();
            let meta = std::fs::metadata(&files.stdout).unwrap();
            assert!(meta.blocks() * 512 < 200 << 10 && meta.len() == u64::from(n + 1) * 12_000, "{meta:?}");
        }
        if n % 10 == 9 {
            outside.copy(&mut seen).unwrap();
        }
    }
    // The frozen job's file is emptied; what a reader has not seen is in rotated files then.
    writer.write_all(lines(100_000..110_000).as_bytes()).unwrap();
    files.rotate().unwrap();
    assert_eq!(std::fs::metadata(&files.stdout).unwrap().len(), 0);
    writer.write_all(lines(110_000..110_003).as_bytes()).unwrap();
    assert!(whole(&files) == lines(0..110_003));
    outside.copy(&mut seen).unwrap();
    assert!(String::from_utf8(seen).unwrap() == lines(0..110_003));
    tail.copy();
    assert!(screen.text() == lines(0..110_003));
    for n in 1..80 {
        let Ok(text) = std::fs::read_to_string(numbered(&files.stdout, n)) else { continue };
        assert!(text.ends_with('\n') && text.len() <= 4 * (64 << 10), "{n}: {}", text.len());
    }
}

/// An image from before a rotation has a length that the file still has after it.
#[test]
fn what_was_rotated_since_a_snapshot_is_cut_too() {
    for (snapshot, restarts) in [(0, false), (5_003, false), (15_000, true), (29_000, false), (30_000, true)] {
        let dir = tempfile::tempdir().unwrap();
        let mut files = files(&dir, 64 << 10, 90);
        let screen = Screen::default();
        let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
        let mut tail = Tail::new(&files, 0, Box::new(screen.clone()), &watch).unwrap();
        let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
        writer.write_all(b"from before\n").unwrap();
        Files { bounds: Bounds { size: 1, keep: 90 }, ..files.clone() }.rotate().unwrap();
        for n in 0..30 {
            writer.write_all(lines(n * 1000..(n + 1) * 1000).as_bytes()).unwrap();
            files.relieve(0).unwrap();
        }
        if restarts {
            // As another supervisor, which has only the files.
            files = self::files(&dir, 64 << 10, 90);
        }
        let to = u64::from(snapshot) * 12;
        let kept = files.hold().cut(&files.stdout.clone(), to).unwrap();
        assert_eq!(kept.is_some(), snapshot < 30_000);
        if let Some(kept) = kept {
            let all = 30_000 * 12 - to;
            assert_eq!((kept.bytes, kept.lost), (all.min(64 << 10), all.saturating_sub(64 << 10)));
            let text = std::fs::read_to_string(kept.file.unwrap()).unwrap();
            assert!(lines(snapshot..30_000).ends_with(&text));
        }
        assert_eq!(std::fs::metadata(&files.stdout).unwrap().len(), to);
        writer.write_all(lines(snapshot..snapshot + 3).as_bytes()).unwrap();
        assert!(whole(&files) == format!("from before\n{}", lines(0..snapshot + 3)), "{snapshot} {restarts}");
        // Cut again to the same length.
        files.hold().cut(&files.stdout.clone(), to).unwrap();
        writer.write_all(lines(snapshot..snapshot + 5).as_bytes()).unwrap();
        assert!(whole(&files) == format!("from before\n{}", lines(0..snapshot + 5)), "{snapshot} {restarts}");
        if !restarts {
            tail.copy();
            let text = screen.text();
            assert!(text.starts_with("from before\n") && text.ends_with(&lines(snapshot..snapshot + 5)), "{snapshot}");
        }
    }
}

#[test]
fn reserved_space_is_freed_though_nothing_more_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 1 << 20, 2);
    let _rotation = rotate::Rotation::start(&files).unwrap();
    let file = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    file.write_all_at(b"short\n", 0).unwrap();
    nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, 64 << 20).unwrap();
    let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while file.metadata().unwrap().blocks() * 512 > 1 << 20 {
        assert!(std::time::Instant::now() < until, "it is still reserved");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(std::fs::read(&files.stdout).unwrap(), b"short\n");
}

/// Everything that a job can do with its descriptor.
#[test]
fn no_length_of_a_file_costs_more_than_its_data() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 1 << 20, 2);
    let screen = Screen::default();
    let watch = Inotify::init(InitFlags::IN_CLOEXEC).unwrap();
    let mut tail = Tail::new(&files, 0, Box::new(screen.clone()), &watch).unwrap();
    let mut outside = crate::launch::tail::Tail::new(&files.stdout);
    let mut seen = Vec::new();
    let file = OpenOptions::new().write(true).open(&files.stdout).unwrap();
    let on_disk = || {
        let all = std::fs::read_dir(dir.path()).unwrap().flatten();
        all.map(|entry| entry.metadata().unwrap().blocks() * 512).sum::<u64>()
    };
    let long = 1 << 40;
    for round in 0..4 {
        file.write_all_at(b"begin\n", 0).unwrap();
        file.set_len(long).unwrap();
        file.write_all_at(b"end\n", long).unwrap();
        // Reserves blocks without data: within the file, and behind its end.
        let flags = nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE;
        nix::fcntl::fallocate(&file, flags, 1 << 30, 64 << 20).unwrap();
        if matches!(round, 1 | 2) {
            nix::fcntl::fallocate(&file, flags, (1 << 40) + (2 << 30), 64 << 20).unwrap();
        }
        assert!(on_disk() > 60 << 20);
        match round {
            0 => files.relieve(0).unwrap(),
            1 => files.rotate().unwrap(),
            2 => drop(files.hold().cut(&files.stdout.clone(), 6).unwrap()),
            _ => {
                files.relieve(0).unwrap();
                // Again, when everything was rotated already.
                file.set_len(0).unwrap();
                file.write_all_at(&vec![b'x'; 10 << 20], 0).unwrap();
                file.set_len(2 << 40).unwrap();
                files.relieve(0).unwrap();
            }
        }
        assert!(on_disk() < 8 << 20, "round {round}: {}", on_disk());
        tail.copy();
        outside.copy(&mut seen).unwrap();
    }
    // A short file, with nothing to move.
    for (reserved, has_ended) in [(64 << 20, false), (3 << 20, true)] {
        file.set_len(0).unwrap();
        let mut appended = OpenOptions::new().append(true).open(&files.stdout).unwrap();
        appended.write_all(b"short\n").unwrap();
        let before = on_disk();
        nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::FALLOC_FL_KEEP_SIZE, 0, reserved).unwrap();
        assert!(on_disk().saturating_sub(before) >= (2 << 20), "{} {before}", on_disk());
        if has_ended {
            files.settle().unwrap()
        } else {
            files.relieve(0).unwrap();
            assert!(on_disk() > 60 << 20, "the job may be writing just now");
            // Whatever it writes, now and then, stays.
            appended.write_all(b"more\n").unwrap();
            files.relieve(0).unwrap();
            assert!(on_disk() > 60 << 20, "the job writes now and then");
            let until = std::time::Instant::now() + std::time::Duration::from_secs(60);
            while on_disk() > 60 << 20 && std::time::Instant::now() < until {
                std::thread::sleep(std::time::Duration::from_millis(100));
                files.relieve(0).unwrap();
            }
            assert_eq!(std::fs::read(&files.stdout).unwrap(), b"short\nmore\n");
        }
        assert!(on_disk().saturating_sub(before) < 1 << 20, "{} {before}", on_disk());
        assert!(std::fs::read(&files.stdout).unwrap().starts_with(b"short\n"));
    }
    assert!(screen.text().len() < 4 << 20 && seen.len() < 4 << 20, "{} {}", screen.text().len(), seen.len());
    let mut older = Vec::new();
    crate::launch::tail::Tail::new(&files.stdout).copy_older(&mut older).unwrap();
    assert!(older.len() < 4 << 20);
}

#[test]
fn what_is_cut_is_kept_within_bounds_and_the_newest_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let files = files(&dir, 4096, 3);
    for name in [".tmp-stdout.log-1-2", ".tmp-own-stdout.log-0123456789abcdef", ".tmp-own-events.jsonl-1"] {
        std::fs::write(dir.path().join(name), "of a crash").unwrap();
    }
    std::fs::write(&files.stdout, "before").unwrap();
    let text = |n: u32| format!("{n}{}", "y".repeat(10_000 - 1));
    for n in 1..6 {
        OpenOptions::new().append(true).open(&files.stdout).unwrap().write_all(text(n).as_bytes()).unwrap();
        let kept = files.hold().cut(&files.stdout, 6).unwrap().unwrap();
        assert_eq!(kept.file.as_ref(), Some(&files.stdout.with_file_name(format!("stdout.log.rolled-back.{n}"))));
        assert_eq!((kept.bytes, kept.lost), (4096, 10_000 - 4096));
    }
    let _ = self::files(&dir, 4096, 3);
    let names = std::fs::read_dir(dir.path()).unwrap().flatten().map(|entry| entry.file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    let kept = [3, 4, 5].map(|n| format!("stdout.log.rolled-back.{n}"));
    assert_eq!(names, [&["stderr.log".into(), "stdout.log".into()][..], &kept].concat());
}

/// A log folder, and beside it a file that only root may change.
fn ground() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (logs, secret) = (dir.path().join("log"), dir.path().join("secret"));
    std::fs::create_dir(&logs).unwrap();
    std::fs::write(&secret, "root's\n").unwrap();
    (dir, logs, secret)
}

fn why(error: &Error) -> String {
    Unexpected::in_error(&error.source).unwrap_or_else(|| panic!("{error:?}")).to_string()
}

fn fifo(path: &Path) {
    nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap();
}

#[test]
fn what_others_put_in_the_place_of_output_is_not_opened() {
    for name in ["stdout.log", "stderr.log"] {
        let (_dir, logs, secret) = ground();
        let path = logs.join(name);
        let create = || Files::create(&logs, Bounds::default());
        let refused = |what: &str| {
            let why = why(&create().unwrap_err());
            assert!(why.ends_with(&format!("log/{name} is {what}")), "{why}");
        };
        symlink(&secret, &path).unwrap();
        refused("a symbolic link, and should be a regular file");
        std::fs::remove_file(&path).unwrap();
        symlink("/nowhere/new", &path).unwrap();
        refused("a symbolic link, and should be a regular file");
        std::fs::remove_file(&path).unwrap();
        // Nobody opens the other end, ever.
        fifo(&path);
        refused("a FIFO, and should be a regular file");
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        refused("a folder, and should be a regular file");
        std::fs::remove_dir(&path).unwrap();
        std::fs::hard_link(&secret, &path).unwrap();
        create().unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"of the job").unwrap();
        assert_eq!(std::fs::read_to_string(&secret).unwrap(), "root's\n");
        assert_eq!(
            std::fs::read_to_string(&path).unwrap(),
            "root's\nof the job",
            "a backup's name is no reason to fail"
        );
    }
}

#[test]
fn a_linked_log_folder_is_not_entered() {
    let (dir, logs, _) = ground();
    let theirs = dir.path().join("theirs");
    std::fs::create_dir(&theirs).unwrap();
    std::fs::write(theirs.join(".tmp-stdout.log-1-2"), "another's").unwrap();
    std::fs::remove_dir(&logs).unwrap();
    symlink(&theirs, &logs).unwrap();
    let why = why(&Files::create(&logs, Bounds::default()).unwrap_err());
    assert!(why.ends_with("log is a symbolic link, and should be a folder"), "{why}");
    let names: Vec<_> = std::fs::read_dir(&theirs).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [".tmp-stdout.log-1-2"]);
}

/// The open file is worked on, whatever has its name now; and rotated files are not what others made of them.
#[test]
fn what_is_exchanged_while_the_job_runs_is_not_changed() {
    let (_dir, logs, secret) = ground();
    let files = Files::create(&logs, Bounds { size: 100, keep: 9 }).unwrap();
    let mut writer = OpenOptions::new().append(true).open(&files.stdout).unwrap();
    // A block, so that it can become a hole.
    writer.write_all(&vec![b'x'; 8 << 10]).unwrap();
    files.relieve(0).unwrap();
    let piece = logs.join("stdout.log.1");
    let length = std::fs::metadata(&piece).unwrap().len();
    let root_s = "r".repeat(usize::try_from(length).unwrap());
    std::fs::write(&secret, &root_s).unwrap();
    let unchanged = || assert!(std::fs::read_to_string(&secret).unwrap() == root_s);
    for linked in [true, false] {
        std::fs::remove_file(&piece).unwrap();
        if linked {
            symlink(&secret, &piece).unwrap()
        } else {
            std::fs::hard_link(&secret, &piece).unwrap()
        }
        if linked {
            let mut shown = Vec::new();
            let mut outside = crate::launch::tail::Tail::new(&files.stdout);
            outside.copy_older(&mut shown).unwrap();
            assert!(shown.is_empty(), "{}", shown.len());
        }
        drop(files.hold().cut(&files.stdout, length - 10).unwrap());
        unchanged();
        writer.write_all(&vec![b'y'; 8 << 10]).unwrap();
    }
    std::fs::rename(&files.stdout, logs.join("moved")).unwrap();
    symlink(&secret, &files.stdout).unwrap();
    let mut outside = crate::launch::tail::Tail::new(&files.stdout);
    assert!(Unexpected::in_error(&outside.copy(&mut Vec::new()).unwrap_err()).is_some());
    files.relieve(0).unwrap();
    files.rotate().unwrap();
    drop(files.hold().cut(&files.stdout, 0).unwrap());
    files.settle().unwrap();
    unchanged();
}

#[test]
fn a_job_gets_the_files_that_are_open_here() {
    let (_dir, logs, secret) = ground();
    let files = Files::create(&logs, Bounds::default()).unwrap();
    let is = |path: &Path| std::fs::metadata(path).map(|metadata| identity(&metadata)).unwrap();
    let (out, err) = (is(files.stdout.path()), is(files.stderr.path()));
    assert_eq!(files.identities().unwrap(), [out, err]);
    // A backup of it, which is another name, does not exchange the file under the job and those who read it.
    std::fs::hard_link(&files.stdout, logs.join("backup")).unwrap();
    assert_eq!(files.identities().unwrap(), [out, err]);
    // Removed: the next life has a new one.
    std::fs::remove_file(&files.stdout).unwrap();
    let [new, _] = files.identities().unwrap();
    assert!(new != out && new == is(files.stdout.path()));
    std::fs::remove_file(&files.stderr).unwrap();
    symlink(&secret, &files.stderr).unwrap();
    assert!(why(&files.identities().unwrap_err()).contains("log/stderr.log is a symbolic link"));
    std::fs::remove_file(&files.stderr).unwrap();
    std::fs::hard_link(&secret, &files.stderr).unwrap();
    let [_, copy] = files.identities().unwrap();
    assert!(copy != is(&secret) && copy == is(files.stderr.path()));
    let opened = files.hold().open(&files.stdout).unwrap().metadata().unwrap();
    assert_eq!(identity(&opened), new);
}

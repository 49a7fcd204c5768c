//! With the real CRIU as the writer: no image is torn, each can be restored, and a failing CRIU leaves nothing behind.

use std::cell::{Cell, RefCell};
use std::ffi::CString;

use super::*;
use rekindle_criu::{self as criu, Criu, DumpOptions, Hooks, Notify, Place, RestoreOptions, RunError, Tcp, image};
use rekindle_os::spawn::{Child, Open, Spawn};

/// Rewrites its memory all the time, page by page in order: at each moment the first pages contain a number and all
/// others the number before it. It exits when it finds anything else. It does so with private memory, and with shared
/// memory (a pages file of its own).
const JOB: &str = r#"
import mmap, os, struct, sys
count = int(sys.argv[1])
both = [mmap.mmap(-1, count * 4096, flags=mmap.MAP_ANONYMOUS | kind) for kind in (mmap.MAP_PRIVATE, mmap.MAP_SHARED)]
for which, memory in enumerate(both):
    for page in range(count):
        struct.pack_into("<8sIII", memory, page * 4096, b"REKINDLE", which, page, 0)
log = open(sys.argv[2], "a", buffering=1)
# An element is stored at once; struct.pack_into zeroes it first, which a freeze would show.
both = [memoryview(memory).cast("I") for memory in both]
number = 0
while True:
    for at in range(4, count * 1024, 1024):
        for memory in both:
            if memory[at] != number:
                log.write("torn\n")
                os._exit(3)
            memory[at] = number + 1
    number += 1
    log.write("%d\n" % number)
"#;

/// 32 MiB, twice: a pass takes about as long as CRIU needs for a few MiB.
const PAGES: usize = 8 << 10;

struct Job {
    child: Child,
    log: PathBuf,
}

impl Job {
    fn start(area: &Area) -> Job {
        let log = area.dir.path().join("log");
        let args = ["-S".into(), "-c".into(), JOB.into(), PAGES.to_string().into(), log.clone().into_os_string()];
        let null = |fd, flags| Open { fd, path: CString::from(c"/dev/null"), flags, expect: None };
        let spawn = Spawn::new(Path::new("/usr/bin/python3"), args).unwrap().session();
        let spawn = spawn.open(null(0, libc::O_RDONLY)).open(null(1, libc::O_WRONLY)).open(null(2, libc::O_WRONLY));
        let job = Job { child: spawn.start().unwrap(), log };
        job.goes_on();
        job
    }

    /// How many passes the job has made.
    fn passes(&self) -> usize {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        assert!(!text.contains("torn"), "{text}");
        text.lines().count()
    }

    fn goes_on(&self) {
        let (before, until) = (self.passes(), Instant::now() + Duration::from_secs(30));
        while self.passes() < before + 2 {
            assert!(Instant::now() < until && !self.child.has_ended().unwrap(), "stands still after {before} passes");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.signal(libc::SIGKILL);
        let _ = self.child.wait();
    }
}

fn found() -> Option<Criu> {
    let python = Path::new("/usr/bin/python3").exists();
    let criu = Criu::find(std::env::var_os("REKINDLE_CRIU").as_deref().map(Path::new));
    let ready = rekindle_testing::root()
        && rekindle_testing::require("python", python, "there is no /usr/bin/python3")
        && rekindle_testing::require("criu", criu.is_ok(), "no usable CRIU");
    criu.ok().filter(|_| ready)
}

fn place<'a>(criu: &'a Criu, images: &'a Path, work: &'a Path) -> Place<'a> {
    Place { criu, init: None, images, opened: None, work, timeout: Duration::from_secs(60) }
}

/// Our answer when CRIU has written everything.
#[derive(PartialEq)]
enum Answer {
    Drain,
    Refuse,
}

/// Dumps through receivers; returns what they received.
fn dump(
    area: &Area,
    criu: &Criu,
    job: &Job,
    answer: &Answer,
    cancelled: &dyn Fn() -> bool,
) -> Result<Vec<Received>, RunError> {
    let expected = expect(&[job.child.pid()]);
    let receivers = Receivers::start_with(&crate::samples::beneath(&area.criu()), &area.spool(), &expected, 3).unwrap();
    let receivers = RefCell::new(Some(receivers));
    let mut drained = None;
    let mut notify = |moment| match (moment, answer) {
        (Notify::PostDump, Answer::Drain) => {
            drained = receivers.take().map(|r| r.drain(soon()).unwrap());
            Ok(())
        }
        (Notify::PostDump, Answer::Refuse) => Err("not wanted".to_string()),
        _ => Ok(()),
    };
    let options = DumpOptions {
        root: job.child.pid(),
        tcp: Tcp::Close,
        ghost_limit: 1 << 20,
        freeze_timeout: Duration::from_secs(10),
        plugin: None,
    };
    let mut hooks = Hooks { notify: &mut notify, cancelled, died: &|| None, abandon: &|| {} };
    let (images, work) = (area.criu(), area.dir.path().to_path_buf());
    criu::dump(&place(criu, &images, &work), options, &mut hooks)?;
    Ok(drained.unwrap().place().unwrap())
}

/// The number in each page of one of the job's memories, in the order of the pages.
fn numbers(bytes: &[u8], which: u32) -> Vec<u32> {
    let word = |page: &[u8], at: usize| u32::from_le_bytes(page[at..at + 4].try_into().unwrap());
    let pages = bytes.chunks(PAGE).filter(|page| page.starts_with(b"REKINDLE") && word(page, 8) == which);
    let mut pages: Vec<(u32, u32)> = pages.map(|page| (word(page, 12), word(page, 16))).collect();
    pages.sort_unstable();
    assert!((0..).zip(&pages).all(|(n, (page, _))| n == *page));
    pages.into_iter().map(|(_, number)| number).collect()
}

#[test]
fn no_page_is_torn_and_the_image_restores() {
    let Some(criu) = found() else { return };
    let area = Area::new();
    let mut job = Job::start(&area);
    for round in 0..8 {
        area.empty_images();
        let received = dump(&area, &criu, &job, &Answer::Drain, &|| false).unwrap();
        assert_eq!(received.len(), 2, "the process and its shared memory: {received:?}");
        let total: u64 = received.iter().map(|r| r.bytes).sum();
        assert_eq!(image::check_pages(&crate::samples::beneath(&area.criu())).unwrap(), total);
        let spooled: Vec<_> = fs::read_dir(area.spool()).unwrap().map(|e| e.unwrap().file_name()).collect();
        let unexpected = spooled.iter().any(|name| name.to_string_lossy().starts_with("other"));
        assert!(!unexpected, "{spooled:?}");
        let bytes: Vec<u8> = received.iter().flat_map(|file| fs::read(&file.path).unwrap()).collect();
        let both = [numbers(&bytes, 0), numbers(&bytes, 1)];
        assert!(both.iter().all(|numbers| numbers.len() == PAGES), "round {round}");
        // The job writes the two memories alternately within each page.
        let all: Vec<u32> = both[0].iter().zip(&both[1]).flat_map(|(a, b)| [*a, *b]).collect();
        let (first, last) = (all[0], all[all.len() - 1]);
        let steps: Vec<_> = (0..all.len() - 1).filter(|n| all[*n] != all[n + 1]).map(|n| (n + 1, all[n + 1])).collect();
        // There is at most one step down, at the place where it was stopped.
        let some: Vec<_> = steps.iter().take(8).collect();
        assert!(steps.len() <= 1 && first - last <= 1, "round {round}: torn, from {first} to {last} by {some:?}");
        job.goes_on();
        if round % 4 == 3 {
            job.child.signal(libc::SIGKILL).unwrap();
            let _ = job.child.wait();
            let (images, work) = (area.criu(), area.dir.path().to_path_buf());
            let mut hooks = Hooks { notify: &mut |_| Ok(()), cancelled: &|| false, died: &|| None, abandon: &|| {} };
            job.child =
                criu::restore(&place(&criu, &images, &work), RestoreOptions::default(), &mut hooks).unwrap().root;
            job.goes_on();
        }
    }
}

#[test]
fn a_dump_that_is_refused_leaves_a_running_job_and_no_fifo() {
    let Some(criu) = found() else { return };
    let area = Area::new();
    let job = Job::start(&area);
    let error = dump(&area, &criu, &job, &Answer::Refuse, &|| false).unwrap_err();
    assert!(matches!(error, RunError::Hook { .. }), "{error:?}");
    assert!(area.is_clean());
    job.goes_on();
}

#[test]
fn a_criu_that_is_killed_while_it_writes_leaves_a_running_job_and_no_fifo() {
    let Some(criu) = found() else { return };
    let area = Area::new();
    let job = Job::start(&area);
    let asked = Cell::new(0);
    let writing = || {
        asked.set(asked.get() + 1);
        // CRIU first waits for the answer to pre-dump.
        if asked.get() == 1 {
            return false;
        }
        let until = Instant::now() + Duration::from_secs(5);
        while !area.criu().join(format!("pagemap-{}.img", job.child.pid())).exists() && Instant::now() < until {
            thread::yield_now();
        }
        true
    };
    let error = dump(&area, &criu, &job, &Answer::Drain, &writing).unwrap_err();
    assert!(matches!(error, RunError::Cancelled), "{error:?}");
    assert!(area.is_clean());
    job.goes_on();
}

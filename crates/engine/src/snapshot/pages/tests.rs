//! Writers that behave as CRIU does towards a pages file, well and badly.

mod criu;

use std::fmt;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::time::Duration;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use super::*;

/// An image's folder and a spool on one tmpfs.
pub(super) struct Area {
    dir: tempfile::TempDir,
}

impl Area {
    pub(super) fn new() -> Area {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        for name in ["spool", "criu"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        Area { dir }
    }

    pub(super) fn spool(&self) -> PathBuf {
        self.dir.path().join("spool")
    }

    pub(super) fn criu(&self) -> PathBuf {
        self.dir.path().join("criu")
    }

    fn pages(&self, n: usize) -> PathBuf {
        self.criu().join(format!("pages-{n}.img"))
    }

    /// Starts receivers for processes 1, 2, ... with these sizes.
    fn start(&self, bytes: &[u64], threads: usize) -> Receivers {
        Receivers::start_with(&crate::samples::beneath(&self.criu()), &self.spool(), &processes(bytes), threads)
            .unwrap()
    }

    fn empty_images(&self) {
        fs::remove_dir_all(self.criu()).unwrap();
        fs::create_dir(self.criu()).unwrap();
    }

    /// Whether no FIFO is left.
    pub(super) fn is_clean(&self) -> bool {
        fs::read_dir(self.criu()).unwrap().all(|entry| !entry.unwrap().file_type().unwrap().is_fifo())
    }
}

fn processes(bytes: &[u64]) -> Vec<Expected> {
    (1..).zip(bytes).map(|(pid, bytes)| Expected { source: Source::Process(pid), bytes: *bytes }).collect()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Begins as CRIU does: with a page map that does not name its pages file yet.
fn begin(area: &Area, owner: impl fmt::Display, n: usize) -> fs::File {
    fs::write(area.criu().join(format!("pagemap-{owner}.img")), "").unwrap();
    open(&area.pages(n))
}

/// Ends as CRIU does: the page map is on the disk, with magic numbers and a record with the number of the pages file.
fn end(area: &Area, owner: impl fmt::Display, n: usize, pages: fs::File) {
    let mut map = [0x5456_4319u32, 0x5608_4025, 2].map(u32::to_le_bytes).concat();
    map.extend([8, u8::try_from(n).unwrap()]);
    fs::write(area.criu().join(format!("pagemap-{owner}.img")), map).unwrap();
    drop(pages);
}

/// As CRIU opens it.
fn open(path: &Path) -> fs::File {
    OpenOptions::new().write(true).create(true).truncate(true).open(path).unwrap()
}

/// Content in which all pages differ, within a file and between files.
fn content(n: usize, length: usize) -> Vec<u8> {
    let words = (0..length.div_ceil(8)).map(|at| (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ n as u64);
    let mut bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
    bytes.truncate(length);
    bytes
}

/// Writes one file after the other, waits until all is copied, and compares.
fn receive(area: &Area, receivers: Receivers, lengths: &[usize]) {
    for (n, length) in (1..).zip(lengths) {
        let mut pages = begin(area, n, n);
        pages.write_all(&content(n, *length)).unwrap();
        end(area, n, n, pages);
    }
    let all = receivers.drain(soon()).unwrap().place().unwrap();
    assert_eq!(all.len(), lengths.len());
    for ((n, length), received) in (1..).zip(lengths).zip(all) {
        assert_eq!((&received.path, received.bytes), (&area.pages(n), *length as u64));
        assert!(fs::read(&received.path).unwrap() == content(n, *length), "file {n} of {length} bytes");
    }
    assert!(area.is_clean());
    let left = fs::read_dir(area.criu()).unwrap().count();
    assert_eq!(left, 2 * lengths.len());
}

const PAGE: usize = 4096;
const MIB: usize = 1 << 20;

#[test]
fn all_sizes_arrive_whole_with_any_number_of_threads() {
    for threads in [1, 2, 5] {
        let area = Area::new();
        let expected = [MIB as u64, 0, 3 * MIB as u64, 4 * MIB as u64, 10 * MIB as u64];
        let receivers = area.start(&expected, threads);
        // Sizes: as expected, less, nothing at all, exactly the available room, and a file that was not expected.
        receive(&area, receivers, &[MIB, PAGE, 2 * MIB + PAGE, 4 * MIB, 0, 7 * PAGE]);
    }
}

#[test]
fn more_than_expected_finds_room() {
    let area = Area::new();
    let receivers = area.start(&[2 * MIB as u64], 2);
    receive(&area, receivers, &[150 * MIB + PAGE, 70 * MIB]);
}

#[test]
fn the_spool_keeps_its_pages_for_the_next_time() {
    let area = Area::new();
    receive(&area, area.start(&[20 * MIB as u64], 2), &[20 * MIB, MIB]);
    let before = fs::metadata(area.spool().join("1")).unwrap();
    area.empty_images();
    make_ready(&area.spool(), &processes(&[10 * MIB as u64])).unwrap();
    let after = fs::metadata(area.spool().join("1")).unwrap();
    assert_eq!((before.ino(), before.blocks()), (after.ino(), after.blocks()));
    // Shorter than the file of before: nothing of the old content may remain.
    receive(&area, area.start(&[10 * MIB as u64], 2), &[3 * MIB]);
    let names: Vec<_> = fs::read_dir(area.spool()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names, ["1"]);
    assert_eq!(fs::metadata(area.spool().join("1")).unwrap().len(), 3 * MIB as u64);
}

#[test]
fn a_file_goes_where_pages_were_made_ready_for_it() {
    let area = Area::new();
    let sources = [Source::Process(1000), Source::Process(1001), Source::Shared(77), Source::Shared(78)];
    let expected = sources.map(|source| Expected { source, bytes: 3 * MIB as u64 });
    let receivers = Receivers::start_with(&crate::samples::beneath(&area.criu()), &area.spool(), &expected, 2).unwrap();
    let inode = |path: PathBuf| fs::metadata(path).unwrap().ino();
    let ready = sources.map(|source| inode(area.spool().join(source.to_string())));
    // CRIU's order, with one file that was not expected; CRIU may have continued since we looked.
    let order = ["shmem-77", "1000", "shmem-79", "1001", "shmem-78"];
    for (n, owner) in (1..).zip(order) {
        let mut pages = begin(&area, owner, n);
        pages.write_all(&content(n, MIB)).unwrap();
        end(&area, owner, n, pages);
    }
    receivers.drain(soon()).unwrap().place().unwrap();
    let found = [2, 4, 1, 5].map(|n| inode(area.pages(n)));
    assert_eq!(found, ready);
    assert!(!ready.contains(&inode(area.pages(3))));
    assert!((1..=5).all(|n| fs::read(area.pages(n)).unwrap() == content(n, MIB)));
}

#[test]
fn pages_are_present_before_they_are_needed() {
    let area = Area::new();
    let receivers = area.start(&[9 * MIB as u64 + 1], 2);
    let blocks = fs::metadata(area.spool().join("1")).unwrap().blocks();
    assert!(blocks * 512 > 9 * MIB as u64, "{blocks}");
    drop(receivers);
    assert!(area.is_clean() && area.spool().join("1").exists());
}

#[test]
fn several_at_once_arrive_whole() {
    let area = Area::new();
    let receivers = area.start(&[8 * MIB as u64; 4], 3);
    thread::scope(|scope| {
        for n in 1..=4 {
            let path = area.pages(n);
            scope.spawn(move || open(&path).write_all(&content(n, 8 * MIB)).unwrap());
        }
    });
    let all = receivers.drain(soon()).unwrap().place().unwrap();
    assert_eq!(all.len(), 4);
    for (n, received) in (1..).zip(all) {
        assert!(fs::read(received.path).unwrap() == content(n, 8 * MIB));
    }
}

/// poll(2) may say of such a file that it is closed, and not that there is something in it.
#[test]
fn what_is_written_right_before_the_end_arrives() {
    const FILES: usize = 64;
    for _ in 0..10 {
        let area = Area::new();
        let receivers = area.start(&[PAGE as u64; FILES], 2);
        for n in 1..=FILES {
            open(&area.pages(n)).write_all(&content(n, PAGE)).unwrap();
        }
        let all = receivers.drain(soon()).unwrap().place().unwrap();
        let lengths: Vec<u64> = all.iter().map(|received| received.bytes).collect();
        assert_eq!(lengths, [PAGE as u64; FILES]);
    }
}

#[test]
fn a_writer_that_never_comes_is_not_waited_for() {
    let area = Area::new();
    let receivers = area.start(&[MIB as u64, MIB as u64], 2);
    let drained = receivers.drain(soon()).unwrap();
    assert!(drained.place().unwrap().is_empty());
    assert_eq!(fs::read_dir(area.criu()).unwrap().count(), 0);
}

#[test]
fn a_writer_that_does_not_close_is_waited_for_until_the_deadline() {
    let area = Area::new();
    let receivers = area.start(&[MIB as u64], 2);
    let mut writer = open(&area.pages(1));
    writer.write_all(&content(1, PAGE)).unwrap();
    // So long that a thread has seen by then whose pages they are, also on a busy machine.
    let limit = Duration::from_secs(2);
    let begun = Instant::now();
    let error = receivers.drain(begun + limit).unwrap_err();
    assert!(matches!(&error, Error::Undrained { path } if *path == area.pages(1)), "{error:?}");
    assert!(begun.elapsed() >= limit && begun.elapsed() < Duration::from_secs(15));
    assert!(area.is_clean());
}

#[test]
fn a_writer_is_not_left_waiting_when_nobody_receives_any_more() {
    let area = Area::new();
    let receivers = area.start(&[MIB as u64], 2);
    let mut writer = open(&area.pages(1));
    writer.write_all(&content(1, 2 * MIB)).unwrap();
    drop(receivers);
    // More than fits: a process that another test begins may have our end for a moment.
    let much = content(1, 2 * usize::try_from(FIFO_ROOM).unwrap());
    assert_eq!(writer.write_all(&much).unwrap_err().kind(), io::ErrorKind::BrokenPipe);
    assert!(area.is_clean());
}

#[test]
fn a_name_that_is_taken_leaves_nothing_behind() {
    let area = Area::new();
    fs::write(area.pages(3), "there").unwrap();
    let error = Receivers::start(&crate::samples::beneath(&area.criu()), &area.spool(), &processes(&[0])).unwrap_err();
    assert!(matches!(&error, Error::Fifo { path, .. } if *path == area.pages(3)), "{error:?}");
    assert!(area.is_clean());
    assert_eq!(fs::read(area.pages(3)).unwrap(), b"there");
}

/// A tmpfs with room for 16 MiB.
struct SmallMemory(Area);

impl SmallMemory {
    fn mount() -> Option<SmallMemory> {
        if !rekindle_testing::root() {
            return None;
        }
        let area = Area::new();
        let at = area.dir.path();
        mount(Some("rekindle-test"), at, Some("tmpfs"), MsFlags::empty(), Some("size=16m,mode=0700")).unwrap();
        for name in [area.spool(), area.criu()] {
            fs::create_dir(name).unwrap();
        }
        Some(SmallMemory(area))
    }
}

impl Drop for SmallMemory {
    fn drop(&mut self) {
        umount2(self.0.dir.path(), MntFlags::MNT_DETACH).unwrap();
    }
}

#[test]
fn a_full_tmpfs_is_an_error_before_and_one_meanwhile() {
    let Some(SmallMemory(area)) = &SmallMemory::mount() else { return };
    let error =
        Receivers::start(&crate::samples::beneath(&area.criu()), &area.spool(), &processes(&[4 << 20, 100 << 20]))
            .unwrap_err();
    assert!(matches!(error, Error::Full { .. }) && error.to_string().contains("snapshot.staging"), "{error}");
    assert!(area.is_clean());
    fs::remove_file(area.spool().join("2")).unwrap();

    let receivers = area.start(&[4 << 20], 2);
    // More than there is room for: the writer must not block.
    open(&area.pages(1)).write_all(&content(1, 30 * MIB)).unwrap();
    open(&area.pages(2)).write_all(&content(2, MIB)).unwrap();
    let error = receivers.drain(soon()).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error:?}");
    assert!(area.is_clean());

    // All of the available room, in small steps at the end; leftovers in the spool must not matter.
    receive(area, area.start(&[4 << 20], 2), &[13 * MIB + PAGE]);
}

/// A shell starts rekindle with a soft limit of 1024, for more than two descriptors for each process of a large job.
#[test]
fn a_job_may_have_more_processes_than_the_soft_limit_has_descriptors() {
    let limits = || getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let ((before, hard), area) = (limits(), Area::new());
    setrlimit(Resource::RLIMIT_NOFILE, 700.min(hard), hard).unwrap();
    let receivers = Receivers::start_with(
        &crate::samples::beneath(&area.criu()),
        &area.spool(),
        &processes(&[PAGE as u64; 500]),
        2,
    );
    // Other tests of this process may need room, too: they could open nothing if the limit fell while all of these
    // are open.
    let raised = limits().0;
    let started = receivers.map(drop);
    setrlimit(Resource::RLIMIT_NOFILE, before, hard).unwrap();
    assert!(raised > 1000, "{raised}");
    started.unwrap();
    assert!(area.is_clean());
}

use super::*;
use crate::proto::RegFileEntry;

/// A folder for tests.
pub(super) fn beneath(dir: &Path) -> Beneath {
    Beneath::root(dir, rekindle_os::beneath::Owners::Ours).unwrap()
}

pub(super) fn write(path: &(impl AsRef<Path> + ?Sized), magic: u32, records: &[Vec<u8>]) {
    let mut bytes = [COMMON.to_le_bytes(), magic.to_le_bytes()].concat();
    for record in records {
        bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
        bytes.extend(record);
    }
    std::fs::write(path, bytes).unwrap();
}

fn pagemap(dir: &Path, entries: &[PagemapEntry]) {
    let mut records = vec![PagemapHead { pages_id: 7 }.encode_to_vec()];
    records.extend(entries.iter().map(Message::encode_to_vec));
    write(&dir.join("pagemap-12.img"), PAGEMAP, &records);
}

#[test]
fn daemons_of_a_foreign_session_lead_their_own() {
    let entry = |pid, ppid, pgid, sid| PstreeEntry { pid, ppid, pgid, sid, threads: vec![pid] };
    let mut entries = vec![
        entry(1000, 0, 1000, 1000),
        entry(1001, 1000, 1001, 1000),
        entry(1005, 1001, 1005, 1005),
        // Forked twice; its leader 1003 has ended. It has a child, one that leads a group, and one in its own session.
        entry(1004, 1000, 1003, 1003),
        entry(1006, 1004, 1003, 1003),
        entry(1007, 1004, 1007, 1003),
        entry(1008, 1007, 1007, 1003),
        entry(1009, 1004, 1009, 1009),
        // Another of that session.
        entry(1010, 1000, 1003, 1003),
        // The leader of its session is alive elsewhere.
        entry(1011, 1000, 1005, 1005),
        // Left by a shell of the job: in the root's session.
        entry(1012, 1000, 1001, 1000),
    ];
    lead_sessions(&mut entries);
    let found: Vec<_> = entries.iter().map(|e| (e.pid, e.pgid, e.sid)).collect();
    let expected = [
        (1000, 1000, 1000),
        (1001, 1001, 1000),
        (1005, 1005, 1005),
        (1004, 1004, 1004),
        (1006, 1004, 1004),
        (1007, 1007, 1004),
        (1008, 1007, 1004),
        (1009, 1009, 1009),
        (1010, 1010, 1010),
        (1011, 1011, 1011),
        (1012, 1001, 1000),
    ];
    assert_eq!(found, expected);
    let before = entries.clone();
    lead_sessions(&mut entries);
    assert_eq!(entries, before);
}

#[test]
fn a_session_is_taken_apart_unless_one_process_has_all_of_it_below_it() {
    let torn = |others: &[(u32, u32, u32, u32)]| {
        let all = [(1000, 1, 1000, 1000), (1001, 1000, 1001, 1000)];
        let member = |&(pid, parent, group, session): &_| Member { pid, parent, group, session };
        torn_session(&all.iter().chain(others).map(member).collect::<Vec<_>>())
    };
    // A daemon, and one with a child that leads a group.
    assert_eq!(torn(&[(1003, 1000, 1002, 1002)]), None);
    assert_eq!(torn(&[(1003, 1000, 1002, 1002), (1004, 1003, 1002, 1002), (1005, 1003, 1005, 1002)]), None);
    // Two that each get a session; one in a group of its own.
    assert_eq!(torn(&[(1003, 1000, 1002, 1002), (1004, 1000, 1002, 1002)]), Some(1003));
    assert_eq!(torn(&[(1003, 1000, 1002, 1002), (1004, 1000, 1004, 1002)]), Some(1003));
    // The leader is there, alive or not.
    assert_eq!(torn(&[(1003, 1000, 1002, 1002), (1002, 1001, 1002, 1002)]), Some(1003));
    // Two groups, whose leaders are gone, become one.
    assert_eq!(torn(&[(1003, 1000, 1002, 1002), (1004, 1003, 1006, 1002)]), Some(1003));
    // Shells do the same in the session of the job.
    assert_eq!(torn(&[(1002, 1000, 1001, 1000), (1003, 1000, 1001, 1000)]), None);
}

#[test]
fn the_number_criu_gives_the_thread_of_a_dead_process_is_not_read() {
    let dir = tempfile::tempdir().unwrap();
    let entry = |pid, ppid, threads| PstreeEntry { pid, ppid, pgid: 1001, sid: 1000, threads }.encode_to_vec();
    // As written by CRIU 4.2.1: addresses in its memory, some of them larger than any pid.
    let dead = [entry(1002, 1001, vec![2_006_489_984]), entry(1003, 1001, vec![2_458_744_752])];
    let alive = [entry(1000, 0, vec![1000]), entry(1001, 1000, vec![1001, 1007])];
    write(&dir.path().join("pstree.img"), PSTREE, &[alive, dead].concat());
    let found = ids(&beneath(dir.path())).unwrap();
    assert_eq!(found.processes, [1000, 1001, 1002, 1003]);
    assert_eq!(found.all, [1000, 1001, 1002, 1003, 1007]);
    // Any other impossible number is damage.
    for entry in [entry(1001, 1000, vec![1001, u32::MAX]), entry(u32::MAX, 1000, vec![1001])] {
        write(&dir.path().join("pstree.img"), PSTREE, &[entry]);
        assert!(ids(&beneath(dir.path())).unwrap_err().to_string().contains("out of range"));
    }
}

#[test]
fn a_short_pages_file_is_found() {
    let dir = tempfile::tempdir().unwrap();
    let new = PagemapEntry { flags: Some(PRESENT), nr_pages: Some(2), ..PagemapEntry::default() };
    let old = PagemapEntry { compat_nr_pages: Some(1), ..PagemapEntry::default() };
    let lazy = PagemapEntry { flags: Some(2), nr_pages: Some(9), ..PagemapEntry::default() };
    pagemap(dir.path(), &[new, old, lazy]);
    std::fs::write(dir.path().join("pages-7.img"), vec![0; 3 * 4096]).unwrap();
    assert_eq!(check_pages(&beneath(dir.path())).unwrap(), 3 * 4096);
    std::fs::write(dir.path().join("pages-7.img"), vec![0; 3 * 4096 - 1]).unwrap();
    assert!(check_pages(&beneath(dir.path())).unwrap_err().to_string().contains("its page map says 12288"));
    std::fs::remove_file(beneath(dir.path()).join("pages-7.img")).unwrap();
    assert!(matches!(check_pages(&beneath(dir.path())), Err(Error::Read { .. })));
}

#[test]
fn a_missing_page_map_is_found() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("mm-12.img"), "").unwrap();
    assert!(check_pages(&beneath(dir.path())).unwrap_err().to_string().contains("pagemap-12.img"));
    pagemap(dir.path(), &[]);
    assert_eq!(check_pages(&beneath(dir.path())).unwrap(), 0);
}

#[test]
fn cut_records_and_foreign_files_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("pstree.img");
    let entry = PstreeEntry { pid: 1000, ppid: 0, pgid: 1000, sid: 1000, threads: vec![1000, 1007] };
    write(&path, PSTREE, &[entry.encode_to_vec()]);
    let found = ids(&beneath(dir.path())).unwrap();
    assert_eq!((found.processes, found.all), (vec![1000], vec![1000, 1007]));
    let whole = std::fs::read(&path).unwrap();
    for length in [0, 3, 7, 9, whole.len() - 1] {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert!(ids(&beneath(dir.path())).is_err(), "cut to {length}");
    }
    let mut huge = whole.clone();
    huge[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    std::fs::write(&path, huge).unwrap();
    assert!(ids(&beneath(dir.path())).is_err());
    std::fs::write(&path, [FILES.to_le_bytes(), PSTREE.to_le_bytes()].concat()).unwrap();
    assert!(ids(&beneath(dir.path())).unwrap_err().to_string().contains("magic"));
}

/// Names of files may be any bytes.
#[test]
fn names_that_are_not_utf8_are_read_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let reg = |id: u32, flags: i32| RegFileEntry {
        id,
        flags: flags.cast_unsigned(),
        name: b"data/caf\xe9".to_vec(),
        size: Some(1),
        ..RegFileEntry::default()
    };
    let record = |reg: RegFileEntry| FileEntry { id: reg.id, reg: Some(reg), inet: None, unix: None }.encode_to_vec();
    let path = dir.path().join("files.img");
    let named = Path::new(OsStr::from_bytes(b"/data/caf\xe9"));
    write(&path, FILES, &[record(reg(1, libc::O_RDONLY))]);
    assert_eq!(checked_files(&beneath(dir.path())).unwrap()[0].path, named);
    write(&path, FILES, &[record(reg(1, libc::O_RDWR))]);
    assert_eq!(open_files(&beneath(dir.path())).unwrap()[0].path, named);
    let link = RegFileEntry { name: b"data/link_remap.\xe9".to_vec(), ..reg(2, libc::O_RDWR) };
    write(&path, FILES, &[record(reg(1, libc::O_RDWR)), record(link)]);
    let remap = RemapEntry { orig_id: 1, remap_id: 2, remap_type: Some(0) };
    write(&dir.path().join("remap-fpath.img"), REMAP, &[remap.encode_to_vec()]);
    assert_eq!(
        link_remaps(&beneath(dir.path())).unwrap()[0].path,
        Path::new(OsStr::from_bytes(b"/data/link_remap.\xe9"))
    );
}

#[test]
fn files_that_a_restore_compares() {
    let dir = tempfile::tempdir().unwrap();
    let reg = |id: u32, name: &str, flags: i32| RegFileEntry {
        id,
        flags: flags.cast_unsigned(),
        name: name.into(),
        size: Some(10),
        mode: Some(0o100_644),
        ..RegFileEntry::default()
    };
    let library = RegFileEntry { build_id: vec![0x0302_0100, 0x0706_0504], ..reg(1, "/lib/a", libc::O_RDONLY) };
    let folder = RegFileEntry { size: None, ..reg(2, "/home", libc::O_RDONLY) };
    let entries = [
        library,
        folder,
        reg(3, "/data", libc::O_RDONLY),
        reg(4, "/log", libc::O_RDONLY),
        reg(5, "/log", libc::O_RDWR),
        reg(6, "/deleted", libc::O_RDONLY),
        reg(7, "/link_remap.7", libc::O_RDONLY),
        RegFileEntry { ext: Some(true), ..reg(8, "file[1:2]", libc::O_RDONLY) },
        reg(9, "/data", libc::O_RDONLY),
    ];
    let records: Vec<Vec<u8>> = entries
        .into_iter()
        .map(|reg| FileEntry { id: reg.id, reg: Some(reg), inet: None, unix: None }.encode_to_vec())
        .collect();
    write(&dir.path().join("files.img"), FILES, &records);
    let remap = RemapEntry { orig_id: 6, remap_id: 7, remap_type: Some(0) };
    write(&dir.path().join("remap-fpath.img"), REMAP, &[remap.encode_to_vec()]);
    let found = checked_files(&beneath(dir.path())).unwrap();
    let data = CheckedFile { path: "/data".into(), size: 10, mode: Some(0o100_644), build_id: None };
    let library = CheckedFile { path: "/lib/a".into(), build_id: Some((0..8).collect()), ..data.clone() };
    assert_eq!(found, [data, library]);
}

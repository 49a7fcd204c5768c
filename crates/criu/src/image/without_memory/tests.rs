use std::fs;
use std::path::Path;

use super::super::tests::{beneath, write};
use super::*;
use crate::proto::VmaEntry;

/// A process whose memory is at 0x1000, and whose vdso has two pages at 0x7f0000.
const VDSO_AT: u64 = 0x7f_0000;

fn vma(start: u64, end: u64, status: u32) -> VmaEntry {
    VmaEntry { start, end, pgoff: 0, shmid: 0, prot: 5, flags: 0x22, status, fd: -1, madv: None, fdflags: None }
}

fn process(dir: &Path, pid: u32, pages_id: u32, vmas: &[VmaEntry], entries: &[PagemapEntry], pages: &[u8]) {
    let mm = MmEntry { exe_file_id: 3, vmas: vmas.to_vec() };
    write(&dir.join(format!("mm-{pid}.img")), MM, &[mm.encode_to_vec()]);
    map(dir, &format!("pagemap-{pid}.img"), pages_id, entries);
    fs::write(dir.join(format!("pages-{pages_id}.img")), pages).unwrap();
}

fn map(dir: &Path, name: &str, pages_id: u32, entries: &[PagemapEntry]) {
    let mut records = vec![PagemapHead { pages_id }.encode_to_vec()];
    records.extend(entries.iter().map(Message::encode_to_vec));
    write(&dir.join(name), PAGEMAP, &records);
}

/// As CRIU 4.2 writes it.
fn entry(vaddr: u64, pages: u64) -> PagemapEntry {
    let compat = Some(u32::try_from(pages).unwrap_or(0));
    PagemapEntry { vaddr, compat_nr_pages: compat, in_parent: None, flags: Some(PRESENT), nr_pages: Some(pages) }
}

const SIZE: usize = 4096;

/// Pages with these first bytes.
fn pages(firsts: &[u8]) -> Vec<u8> {
    firsts.iter().flat_map(|first| [*first; SIZE]).collect()
}

fn firsts(pages: &[u8]) -> Vec<u8> {
    pages.chunks(SIZE).map(|page| page[0]).collect()
}

fn entries(dir: &Path, name: &str) -> Vec<PagemapEntry> {
    let mut records = Records::open(beneath(dir).join(name), PAGEMAP).unwrap();
    records.next::<PagemapHead>().unwrap().unwrap();
    records.all().unwrap()
}

fn refused(dir: &Path) -> String {
    without_memory(&beneath(dir)).unwrap_err().to_string()
}

#[test]
fn each_process_keeps_what_criu_reads_and_at_least_one_page() {
    let dir = tempfile::tempdir().unwrap();
    let vdso = [vma(0x1000, 0x9000, 1), vma(VDSO_AT, VDSO_AT + 2 * PAGE, 1 | VDSO), vma(0x80_0000, 0x80_8000, 1 << 15)];
    let three = [entry(0x1000, 2), entry(0x5000, 1), entry(VDSO_AT - PAGE, 4), entry(0x80_1000, 1)];
    process(dir.path(), 7, 1, &vdso, &three, &pages(&[1, 2, 3, 4, 5, 6, 7, 8]));
    // Without a vdso: a process of 32 bits in which it is off.
    process(dir.path(), 8, 2, &vdso[..1], &[entry(0x2000, 3)], &pages(&[9, 10, 11]));
    // Before 4.2 there was one field. Its flags are those of lazy pages, which are in the file.
    let old = PagemapEntry { nr_pages: None, flags: Some(PRESENT | 2), ..entry(VDSO_AT, 2) };
    process(dir.path(), 9, 3, &vdso, &[old], &pages(&[12, 13]));
    // All of its pages were dropped.
    process(dir.path(), 10, 4, &vdso, &[], &[]);
    map(dir.path(), "pagemap-shmem-55.img", 5, &[entry(0, 1)]);
    fs::write(dir.path().join("pages-5.img"), pages(&[14])).unwrap();
    let before = fs::File::open(dir.path().join("pages-1.img")).unwrap();
    without_memory(&beneath(dir.path())).unwrap();
    assert_eq!(entries(dir.path(), "pagemap-7.img"), [entry(VDSO_AT, 2), entry(0x80_1000, 1)]);
    let content = |id: u32| firsts(&fs::read(dir.path().join(format!("pages-{id}.img"))).unwrap());
    assert_eq!(content(1), [5, 6, 8]);
    assert_eq!(before.metadata().unwrap().len(), 8 * PAGE, "the file itself is not changed");
    assert_eq!((entries(dir.path(), "pagemap-8.img"), content(2)), (vec![entry(0x2000, 1)], vec![9]));
    assert_eq!((entries(dir.path(), "pagemap-9.img"), content(3)), (vec![old], vec![12, 13]));
    assert_eq!((entries(dir.path(), "pagemap-10.img"), content(4)), (vec![], vec![]));
    assert_eq!((entries(dir.path(), "pagemap-shmem-55.img"), content(5)), (vec![], vec![]));
    // CRIU compares the sizes, too.
    crate::image::check_pages(&beneath(dir.path())).unwrap();
    without_memory(&beneath(dir.path())).unwrap();
    assert_eq!(content(1), [5, 6, 8]);
}

#[test]
fn only_root_may_look_into_its_processes() {
    #[derive(Clone, Copy, PartialEq, Message)]
    struct Mm {
        #[prost(int32, optional, tag = "15")]
        dumpable: Option<i32>,
        #[prost(bool, optional, tag = "17")]
        thp_disabled: Option<bool>,
    }
    let dir = tempfile::tempdir().unwrap();
    process(dir.path(), 7, 1, &[], &[entry(0x1000, 1)], &pages(&[1]));
    let with = [MmEntry::default().encode_to_vec(), Mm { dumpable: Some(1), thp_disabled: Some(true) }.encode_to_vec()];
    write(&dir.path().join("mm-7.img"), MM, &[with.concat()]);
    without_memory(&beneath(dir.path())).unwrap();
    let mm: Vec<Mm> = Records::open(beneath(dir.path()).join("mm-7.img"), MM).unwrap().all().unwrap();
    assert_eq!(mm, [Mm { dumpable: Some(0), thp_disabled: Some(true) }]);
}

#[test]
fn a_damaged_or_hostile_map_is_an_error_and_nothing_is_allocated_for_it() {
    let vdso = [vma(VDSO_AT, u64::MAX, VDSO)];
    let case = |entries: &[PagemapEntry], bytes: &[u8]| {
        let dir = tempfile::tempdir().unwrap();
        process(dir.path(), 7, 1, &vdso, entries, bytes);
        refused(dir.path())
    };
    assert!(case(&[entry(0x1000, u64::MAX)], &[]).contains("page counts overflow"));
    assert!(case(&[entry(u64::MAX - PAGE + 1, 2)], &[]).contains("page counts overflow"));
    assert!(case(&[entry(0x1000, 1 << 51), entry(0x1000, 1 << 51), entry(0x1000, 1 << 51)], &[]).contains("overflow"));
    assert!(
        case(&[entry(VDSO_AT, 1 << 50)], &pages(&[1])).contains("4096 bytes, its page map says 4611686018427387904")
    );
    assert!(case(&[entry(0x1000, 2)], &pages(&[1])).contains("4096 bytes, its page map says 8192"));
    assert!(case(&[entry(0x1234, 1)], &pages(&[1])).contains("0x1234 is not the address of a page"));
    let nowhere = PagemapEntry { flags: Some(2), ..entry(0x1000, 1) };
    assert!(case(&[nowhere], &[]).contains("the pages at 0x1000 are nowhere"));
    let dir = tempfile::tempdir().unwrap();
    process(dir.path(), 7, 1, &vdso, &[entry(VDSO_AT, 1)], &pages(&[1]));
    process(dir.path(), 8, 1, &vdso, &[entry(VDSO_AT, 1)], &pages(&[1]));
    assert!(refused(dir.path()).contains("pages-1.img"));
    fs::remove_file(dir.path().join("pagemap-8.img")).unwrap();
    fs::remove_file(dir.path().join("pages-1.img")).unwrap();
    assert!(refused(dir.path()).contains("0 bytes, its page map says 4096"));
    fs::write(dir.path().join("pages-1.img"), pages(&[1])).unwrap();
    assert!(refused(dir.path()).contains("pagemap-8.img"), "a process without a page map");
    fs::write(dir.path().join("pagemap-7.img"), b"GARB").unwrap();
    assert!(refused(dir.path()).contains("magic"));
}

/// CRIU refuses it in a restore, and so it does in a rehearsal.
#[test]
fn pages_of_an_earlier_image_are_still_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let vdso = [vma(VDSO_AT, VDSO_AT + PAGE, VDSO)];
    let parents = [
        PagemapEntry { flags: Some(PARENT), ..entry(0x1000, 3) },
        PagemapEntry { flags: None, in_parent: Some(true), ..entry(0x9000, 1) },
    ];
    let all = [parents[0], parents[1], entry(VDSO_AT, 1)];
    process(dir.path(), 7, 1, &vdso, &all, &pages(&[1]));
    without_memory(&beneath(dir.path())).unwrap();
    assert_eq!(entries(dir.path(), "pagemap-7.img"), all);
}

#[derive(Clone, PartialEq, Message)]
struct Ghost {
    #[prost(uint32, required, tag = "3")]
    mode: u32,
    #[prost(bool, optional, tag = "9")]
    chunks: Option<bool>,
    #[prost(uint64, optional, tag = "10")]
    size: Option<u64>,
}

/// A ghost file is emptied; what is left of it is its description, and what follows that.
fn emptied(description: &Ghost, content: &[u8]) -> (Ghost, Vec<u8>) {
    const GHOST: u32 = 0x5258_3605;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ghost-file-1.img");
    write(&path, GHOST, &[description.encode_to_vec()]);
    fs::write(&path, [fs::read(&path).unwrap(), content.to_vec()].concat()).unwrap();
    without_memory(&beneath(dir.path())).unwrap();
    let mut records = Records::open(beneath(dir.path()).join("ghost-file-1.img"), GHOST).unwrap();
    let ghost = records.next().unwrap().unwrap();
    (ghost, records.bytes[records.at..].to_vec())
}

#[test]
fn a_deleted_file_keeps_its_size_and_a_program_its_beginning() {
    let mode = 0o100_644;
    let plain = Ghost { mode, chunks: None, size: None };
    let sparse = |size| Ghost { mode, chunks: Some(true), size: Some(size) };
    assert_eq!(emptied(&plain, b"small"), (plain.clone(), b"small".to_vec()));
    assert_eq!(emptied(&plain, &[1; 3 << 20]), (sparse(3 << 20), Vec::new()));
    // Length and offset of a chunk, in front of it.
    let chunk = |length: u32, content: &[u8]| {
        let mut record = vec![1 << 3];
        prost::encoding::encode_varint(length.into(), &mut record);
        record.extend([2 << 3, 0]);
        [u32::try_from(record.len()).unwrap().to_le_bytes().to_vec(), record, content.to_vec()].concat()
    };
    assert_eq!(emptied(&sparse(9 << 30), &chunk(1 << 20, &[1; 1 << 20])), (sparse(9 << 30), Vec::new()));
    let program = |length: usize| [b"\x7fELF".as_slice(), &vec![7; length - 4]].concat();
    let head = chunk(1 << 20, &program(1 << 20));
    assert_eq!(emptied(&plain, &program(3 << 20)), (sparse(3 << 20), head.clone()));
    assert_eq!(emptied(&sparse(9 << 30), &chunk(3 << 20, &program(3 << 20))), (sparse(9 << 30), head));
}

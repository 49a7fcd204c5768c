use super::super::tests::write;
use prost::encoding::{decode_varint, encode_varint};
use std::path::Path;

use super::super::tests::beneath;
use super::*;
use crate::proto::ExtFileEntry;

/// `inventory`-like fields that are not read: 13 as a number, 20 as bytes.
const UNKNOWN: [u8; 6] = [13 << 3, 7, 162, 1, 1, 9];

fn vma(start: u64, status: u32) -> VmaEntry {
    VmaEntry {
        start,
        end: start + 0x2000,
        pgoff: 0x1000,
        shmid: 5,
        prot: 3,
        flags: 1,
        status,
        fd: -1,
        madv: Some(1 << 16),
        fdflags: Some(2),
    }
}

/// An `mm_entry` with its first field, these mappings, and unknown fields.
fn mm(mappings: &[VmaEntry]) -> Vec<u8> {
    let mut record = vec![1 << 3, 3];
    for mapping in mappings {
        record.push(14 << 3 | 2);
        encode_varint(mapping.encoded_len() as u64, &mut record);
        record.extend(mapping.encode_to_vec());
    }
    record.extend(UNKNOWN);
    record
}

fn mappings(path: &Path) -> Vec<VmaEntry> {
    let records = Records::open(beneath(path.parent().unwrap()).join(path.file_name().unwrap()), MM).unwrap();
    let mut left = records.bytes.get(12..).unwrap();
    assert!(left.ends_with(&UNKNOWN), "what is not read stays");
    left = &left[2..left.len() - UNKNOWN.len()];
    let mut all = Vec::new();
    while !left.is_empty() {
        assert_eq!(decode_varint(&mut left).unwrap(), 14 << 3 | 2);
        let length = usize::try_from(decode_varint(&mut left).unwrap()).unwrap();
        all.push(VmaEntry::decode(&left[..length]).unwrap());
        left = &left[length..];
    }
    all
}

fn descriptor(file: u32, kind: u32, fd: u32) -> Vec<u8> {
    // Field 2, close-on-exec, is not read.
    let mut record = FdinfoEntry { id: file, kind, fd }.encode_to_vec();
    record.extend([2 << 3, 1]);
    record
}

/// The name of a file that is no device: any bytes.
const NAME: &[u8] = b"/data/caf\xe9";

/// Three processes: 1001 with devices open and mapped, 1002 which shares one file with it, 1003 without.
fn image() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let owner = vec![8, 0, 16, 0];
    let plugin_file = |id| {
        let ext = Some(ExtFileEntry { owner: owner.clone() });
        PluginFileEntry { kind: EXT, id, reg: None, ext }.encode_to_vec()
    };
    let regular = |id| {
        let reg = NullFileEntry { id, flags: 0, pos: 0, owner: owner.clone(), name: NAME.to_vec() };
        [PluginFileEntry { kind: REG, id, reg: Some(reg), ext: None }.encode_to_vec(), UNKNOWN.to_vec()].concat()
    };
    write(&path("files.img"), FILES, &[regular(1), plugin_file(2), plugin_file(3)]);
    let ids = |files: u8| vec![vec![1 << 3, 9, 2 << 3, files]];
    for (pid, table) in [(1001, 1), (1002, 2), (1003, 3)] {
        write(&path(&format!("ids-{pid}.img")), IDS, &ids(table));
    }
    write(&path("fdinfo-1.img"), FDINFO, &[descriptor(1, REG, 0), descriptor(2, EXT, 3), descriptor(3, EXT, 17)]);
    write(&path("fdinfo-2.img"), FDINFO, &[descriptor(2, EXT, 3)]);
    write(&path("fdinfo-3.img"), FDINFO, &[descriptor(1, REG, 0)]);
    // A mapping of a device that is VM_IO has `VMA_UNSUPP` too.
    let device = vma(0x20_0000, EXT_PLUGIN | 1 << 31 | 0x81);
    write(&path("mm-1001.img"), MM, &[mm(&[vma(0x1000, 0x41), device, vma(0x40_0000, 0x201)])]);
    write(&path("mm-1003.img"), MM, &[mm(&[vma(0x1000, 0x41)])]);
    dir
}

#[test]
fn devices_become_dev_null_and_memory() {
    let dir = image();
    let untouched = ["fdinfo-3.img", "mm-1003.img"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    let replaced = without_devices(&beneath(dir.path())).unwrap();
    let expected = [
        Replaced { pid: 1001, descriptors: vec![3, 17], mappings: vec![(0x20_0000, 0x20_2000)], writable: 1 },
        Replaced { pid: 1002, descriptors: vec![3], mappings: Vec::new(), writable: 0 },
    ];
    assert_eq!(replaced, expected);
    let files: Vec<PluginFileEntry> =
        Records::open(beneath(dir.path()).join("files.img"), FILES).unwrap().all().unwrap();
    let names: Vec<&[u8]> = files.iter().map(|file| file.reg.as_ref().unwrap().name.as_slice()).collect();
    assert_eq!(names, [NAME, b"/dev/null", b"/dev/null"]);
    let ids: Vec<(u32, u32, u32)> = files.iter().map(|f| (f.kind, f.id, f.reg.as_ref().unwrap().id)).collect();
    assert_eq!(ids, [(REG, 1, 1), (REG, 2, 2), (REG, 3, 3)]);
    let first = std::fs::read(dir.path().join("files.img")).unwrap();
    assert!(first.windows(UNKNOWN.len()).any(|part| part == UNKNOWN), "what is not read stays");
    for name in ["fdinfo-1.img", "fdinfo-2.img"] {
        let all: Vec<FdinfoEntry> = Records::open(beneath(dir.path()).join(name), FDINFO).unwrap().all().unwrap();
        assert!(all.iter().all(|entry| entry.kind == REG), "{all:?}");
    }
    let all = mappings(&dir.path().join("mm-1001.img"));
    assert_eq!((all[0], all[2]), (vma(0x1000, 0x41), vma(0x40_0000, 0x201)));
    let own =
        VmaEntry { pgoff: 0, shmid: 0, flags: 0x4022, status: 0x201, madv: None, fdflags: None, ..vma(0x20_0000, 0) };
    assert_eq!(all[1], own);
    let now = ["fdinfo-3.img", "mm-1003.img"].map(|name| std::fs::read(dir.path().join(name)).unwrap());
    assert_eq!(now, untouched);
    assert_eq!(without_devices(&beneath(dir.path())).unwrap(), [], "there are none any more");
}

#[test]
fn damage_is_told() {
    let cut = |name: &str, by: usize| {
        let dir = image();
        let path = dir.path().join(name);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - by]).unwrap();
        without_devices(&beneath(dir.path())).unwrap_err().to_string()
    };
    for name in ["files.img", "fdinfo-1.img", "mm-1001.img", "ids-1002.img"] {
        let error = cut(name, 1);
        assert!(error.contains(name) && error.contains("is damaged"), "{error}");
    }
    // A file accepted by the plugin, but without a descriptor, would be unknown to us.
    let dir = image();
    std::fs::remove_file(beneath(dir.path()).join("ids-1001.img")).unwrap();
    let error = without_devices(&beneath(dir.path())).unwrap_err().to_string();
    assert!(error.contains("a plugin took file 3, which no process has"), "{error}");
}

#[test]
fn a_mapping_that_can_not_be_read_is_damage() {
    let mut count = Mappings::default();
    // A length beyond the record, and an invalid wire type.
    for record in [&[14 << 3 | 2, 9, 1][..], &[1 << 3 | 3], &[14 << 3 | 2, 1, 0xff]] {
        assert_eq!(with_own_memory(record, &mut count), None, "{record:?}");
    }
    assert!(count.all.is_empty());
}

//! What an image says about the files that its processes have without a name.
//!
//! CRIU makes these itself in a restore, from the content in the image. All other files it opens by a name.

use std::collections::BTreeMap;
use std::path::PathBuf;

use super::descriptors::table_of;
use super::devices::{MM, images};
use super::mappings::{has_a_file, is_memory};
use super::{Error, FILES, FS, Records, absolute, remaps};
use crate::proto::{FileEntry, FsEntry, MmEntry, VmaEntry};
use rekindle_os::beneath::Beneath;

/// A file that an image has without a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unnamed {
    /// It was deleted, and its content is in the image (a ghost file). The name that it had: CRIU makes the file anew,
    /// opens it by this name, and removes the name.
    Ghost(PathBuf),
    /// It was deleted and has other names. CRIU opens it by this one.
    Link(PathBuf),
    /// Memory that is in no file system: memfds, shared memory without a name or of System V, huge pages.
    Memory,
    /// A ring of asynchronous I/O.
    AioRing,
}

/// What an image says about what a process has.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Known {
    /// It is a file without a name.
    Unnamed(Unnamed),
    /// It is a file with a name, or no file.
    Otherwise,
    /// The process has nothing there.
    Nothing,
}

impl From<Option<&Unnamed>> for Known {
    fn from(is: Option<&Unnamed>) -> Known {
        is.map_or(Known::Otherwise, |is| Known::Unnamed(is.clone()))
    }
}

/// The files without a name of one process.
#[derive(Debug, Default)]
struct Process {
    /// Those with other files have `None`.
    descriptors: BTreeMap<i32, Option<Unnamed>>,
    /// Each with its first address and the one after it. Those with other files, or none, have `None`.
    mappings: Vec<(u64, u64, Option<Unnamed>)>,
    program: Option<Unnamed>,
    directory: Option<Unnamed>,
}

/// The files without a name of all processes of an image, by their pids as they see themselves.
#[derive(Debug, Default)]
pub struct UnnamedFiles(BTreeMap<i32, Process>);

impl UnnamedFiles {
    /// Reads them.
    ///
    /// # Errors
    /// When an image file is missing or damaged.
    pub fn read(dir: &Beneath) -> Result<UnnamedFiles, Error> {
        let deleted = deleted(dir)?;
        let mut all: BTreeMap<i32, Process> = BTreeMap::new();
        for pid in pids(dir, "ids-")?.into_iter().map(|(pid, _)| pid) {
            for entry in table_of(dir, pid)? {
                let is = if entry.kind == MEMFD { Some(Unnamed::Memory) } else { deleted.get(&entry.id).cloned() };
                all.entry(pid).or_default().descriptors.insert(entry.fd.cast_signed(), is);
            }
        }
        for (pid, path) in pids(dir, "mm-")? {
            for entry in Records::open(path, MM)?.all::<MmEntry>()? {
                let process = all.entry(pid).or_default();
                process.program = deleted.get(&entry.exe_file_id).cloned();
                process.mappings.extend(entry.vmas.iter().map(|vma| (vma.start, vma.end, of_mapping(vma, &deleted))));
            }
        }
        for (pid, path) in pids(dir, "fs-")? {
            for entry in Records::open(path, FS)?.all::<FsEntry>()? {
                all.entry(pid).or_default().directory = deleted.get(&entry.cwd_id).cloned();
            }
        }
        Ok(UnnamedFiles(all))
    }

    /// A descriptor of a process.
    #[must_use]
    pub fn descriptor(&self, pid: i32, number: i32) -> Known {
        let found = self.0.get(&pid).and_then(|process| process.descriptors.get(&number));
        found.map_or(Known::Nothing, |is| is.as_ref().into())
    }

    /// A mapping of a process. The kernel can have joined neighbours: all of it must be in one file.
    #[must_use]
    pub fn mapping(&self, pid: i32, start: u64, end: u64) -> Known {
        let mappings = self.0.get(&pid).map(|process| process.mappings.as_slice()).unwrap_or_default();
        let mut within = mappings.iter().filter(|(from, to, _)| *from < end && start < *to).map(|(_, _, is)| is);
        match within.next() {
            None => Known::Nothing,
            Some(first) if within.all(|is| is == first) => first.as_ref().into(),
            Some(_) => Known::Otherwise,
        }
    }

    /// The program of a process.
    #[must_use]
    pub fn program(&self, pid: i32) -> Known {
        self.0.get(&pid).and_then(|process| process.program.as_ref()).into()
    }

    /// The working directory of a process.
    #[must_use]
    pub fn directory(&self, pid: i32) -> Known {
        self.0.get(&pid).and_then(|process| process.directory.as_ref()).into()
    }
}

/// For tests of those who judge by it: descriptors, by pid and number.
impl FromIterator<(i32, i32, Option<Unnamed>)> for UnnamedFiles {
    fn from_iter<I: IntoIterator<Item = (i32, i32, Option<Unnamed>)>>(all: I) -> UnnamedFiles {
        let mut files = UnnamedFiles::default();
        for (pid, number, is) in all {
            files.0.entry(pid).or_default().descriptors.insert(number, is);
        }
        files
    }
}

/// `FD_TYPES__MEMFD`.
const MEMFD: u32 = 18;

fn pids(dir: &Beneath, prefix: &str) -> Result<Vec<(i32, Beneath)>, Error> {
    let all = images(dir, prefix)?.into_iter();
    Ok(all.filter_map(|(pid, path)| Some((pid.parse().ok()?, path))).collect())
}

/// The deleted files of files.img, by their ids.
fn deleted(dir: &Beneath) -> Result<BTreeMap<u32, Unnamed>, Error> {
    let remaps = remaps(dir)?;
    if remaps.is_empty() {
        return Ok(BTreeMap::new());
    }
    let entries: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let names: BTreeMap<u32, PathBuf> =
        entries.iter().filter_map(|entry| Some((entry.id, absolute(&entry.reg.as_ref()?.name)))).collect();
    let of = |remap: &crate::proto::RemapEntry| {
        let name = |id: u32| names.get(&id).cloned();
        let is = match (remap.is_ghost(), remap.is_link()) {
            (true, _) => Unnamed::Ghost(name(remap.orig_id)?),
            (_, true) => Unnamed::Link(name(remap.remap_id)?),
            (false, false) => return None,
        };
        Some((remap.orig_id, is))
    };
    Ok(remaps.iter().filter_map(of).collect())
}

fn of_mapping(vma: &VmaEntry, deleted: &BTreeMap<u32, Unnamed>) -> Option<Unnamed> {
    /// `VMA_AREA_AIORING`.
    const AIO_RING: u32 = 1 << 13;
    if vma.status & AIO_RING != 0 {
        return Some(Unnamed::AioRing);
    }
    if is_memory(vma) {
        return Some(Unnamed::Memory);
    }
    let id = u32::try_from(vma.shmid).ok().filter(|_| has_a_file(vma))?;
    deleted.get(&id).cloned()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::super::tests::write;
    use super::super::{FDINFO, IDS, REMAP};
    use super::*;
    use crate::proto::{FdinfoEntry, RegFileEntry, RemapEntry};

    #[test]
    fn each_file_without_a_name_is_known_by_who_has_it() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let reg = |id: u32, name: &str| {
            let reg = RegFileEntry { id, name: name.into(), ..RegFileEntry::default() };
            FileEntry { id, reg: Some(reg), inet: None, unix: None }.encode_to_vec()
        };
        let names = ["tmp/ghost", "/tmp/linked", "tmp/link_remap.3", "tmp/named", "proc/9/stat", "tmp/x (deleted)"];
        let records: Vec<_> = (1..).zip(names).map(|(id, name)| reg(id, name)).collect();
        write(&dir.join("files.img"), FILES, &records);
        let remap = |orig_id, remap_id, kind| RemapEntry { orig_id, remap_id, remap_type: Some(kind) }.encode_to_vec();
        write(&dir.join("remap-fpath.img"), REMAP, &[remap(1, 1, 1), remap(2, 3, 0), remap(5, 9, 2)]);
        write(&dir.join("ids-7.img"), IDS, &[vec![8, 1, 2 << 3, 4]]);
        let fd = |fd, id, kind| FdinfoEntry { id, kind, fd }.encode_to_vec();
        let table = [fd(3, 1, 1), fd(4, 2, 1), fd(5, 4, 1), fd(6, 5, 1), fd(7, 20, 18), fd(8, 6, 1)];
        write(&dir.join("fdinfo-4.img"), FDINFO, &table);
        let vma = |start: u64, shmid, status, flags: i32| VmaEntry {
            start,
            end: start + 0x1000,
            shmid,
            status,
            flags: flags.cast_unsigned(),
            ..VmaEntry::default()
        };
        let vmas = vec![
            vma(0x9000, 2, 1 | 1 << 7, libc::MAP_SHARED),
            vma(0x1000, 1, 1 | 1 << 6, libc::MAP_PRIVATE),
            vma(0x2000, 1, 1 | 1 << 6, libc::MAP_PRIVATE),
            vma(0x3000, 4, 1 | 1 << 6, libc::MAP_PRIVATE),
            vma(0x4000, 77, 1 | 1 << 8, libc::MAP_SHARED | libc::MAP_ANONYMOUS),
            vma(0x5000, 78, 1 | 1 << 10, libc::MAP_SHARED),
            vma(0x6000, 79, 1 | 1 << 7 | 1 << 14, libc::MAP_SHARED),
            vma(0x7000, 0, 1 | 1 << 9, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB),
            vma(0x8000, 0, 1 | 1 << 13, libc::MAP_SHARED),
            vma(0xa000, 0, 1 | 1 << 9, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS),
        ];
        write(&dir.join("mm-7.img"), MM, &[MmEntry { exe_file_id: 1, vmas }.encode_to_vec()]);
        write(&dir.join("fs-7.img"), FS, &[FsEntry { cwd_id: 2 }.encode_to_vec()]);

        let found = UnnamedFiles::read(&crate::image::tests::beneath(dir)).unwrap();
        let ghost = Known::Unnamed(Unnamed::Ghost("/tmp/ghost".into()));
        let link = Known::Unnamed(Unnamed::Link("/tmp/link_remap.3".into()));
        let [memory, ring] = [Unnamed::Memory, Unnamed::AioRing].map(Known::Unnamed);
        let other = Known::Otherwise;
        let descriptors: Vec<_> = (3..10).map(|fd| found.descriptor(7, fd)).collect();
        assert_eq!(
            descriptors.iter().collect::<Vec<_>>(),
            [&ghost, &link, &other, &other, &memory, &other, &Known::Nothing]
        );
        assert_eq!(found.descriptor(8, 3), Known::Nothing);
        let mapping = |page: u64| found.mapping(7, page << 12, (page + 1) << 12);
        let mappings: Vec<_> = (1..12).map(mapping).collect();
        let expected =
            [&ghost, &ghost, &other, &memory, &memory, &memory, &memory, &ring, &link, &other, &Known::Nothing];
        assert_eq!(mappings.iter().collect::<Vec<_>>(), expected);
        // Joined by the kernel, and more than it could join.
        assert_eq!(found.mapping(7, 0x1000, 0x3000), ghost);
        assert_eq!(
            [found.mapping(7, 0x2000, 0x4000), found.mapping(7, 0x3000, 0x5000)],
            [const { Known::Otherwise }; 2]
        );
        assert_eq!((found.program(7), found.directory(7)), (ghost, link));
    }
}

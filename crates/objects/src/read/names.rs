//! Files that are mapped and have several names in the job: links, or the name before a rename. CRIU gives such a file one
//! of them in all processes, that under which it met the file first: in a mapping, as a program, or behind a descriptor.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use nix::sys::stat::{major, minor};
use rekindle_os::mounts::Mount;

use super::identity::Open;
use super::kind::Kind;
use super::mappings::{Device, File};
use crate::record::Process;

/// The mounts of the job: the device of each, by the number that fdinfo shows.
#[derive(Debug, Default)]
pub(super) struct Mounts(HashMap<u64, Device>);

impl Mounts {
    pub(super) fn of(mounts: &[Mount]) -> Mounts {
        let part = |number: u64| u32::try_from(number).unwrap_or_default();
        let device = |mount: &Mount| (part(major(mount.device)), part(minor(mount.device)));
        Mounts(mounts.iter().map(|mount| (mount.id.into(), device(mount))).collect())
    }

    /// The files that are open, each with a name.
    pub(super) fn files(&self, open: &[Open<'_>]) -> Vec<(File, String)> {
        let named =
            open.iter().filter(|open| matches!(Kind::of(open.target), Kind::Path(path) if path.starts_with('/')));
        named.filter_map(|open| Some((self.file(open.info)?, open.target.to_owned()))).collect()
    }

    /// The file behind a descriptor with this fdinfo. Kernels before 5.14 do not tell.
    fn file(&self, info: &str) -> Option<File> {
        let number = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        Some((*self.0.get(&number("mnt_id:")?)?, number("ino:")?))
    }
}

/// Says of each mapping which names its file has, and returns the names. `files` are those of the mappings, in their order.
pub(super) fn find(processes: &mut [(Process, Vec<File>)], open: &[(File, String)]) -> Vec<BTreeSet<String>> {
    let mut names: HashMap<File, BTreeSet<&str>> = HashMap::new();
    for (process, files) in &*processes {
        let mut last = None;
        let mapped = process.mappings.iter().zip(files).filter(|(mapping, _)| mapping.name.starts_with('/'));
        for (mapping, file) in mapped {
            // A program or library is mapped in several pieces.
            if last.replace((file, &mapping.name)) != Some((file, &mapping.name)) {
                names.entry(*file).or_default().insert(&mapping.name);
            }
        }
    }
    for (file, name) in open {
        names.get_mut(file).into_iter().for_each(|names| _ = names.insert(name));
    }
    names.retain(|_, names| names.len() > 1);
    let several: BTreeMap<File, BTreeSet<String>> =
        names.into_iter().map(|(file, names)| (file, names.into_iter().map(ToOwned::to_owned).collect())).collect();
    let at: HashMap<File, usize> = several.keys().copied().zip(0..).collect();
    for (process, files) in processes {
        for (mapping, file) in process.mappings.iter_mut().zip(files) {
            mapping.names = at.get(file).copied().filter(|_| mapping.name.starts_with('/'));
        }
    }
    several.into_values().collect()
}

#[cfg(test)]
mod tests {
    use rekindle_os::mounts;

    use super::super::mappings;
    use super::*;
    use crate::record::Items;

    fn process(maps: &str) -> (Process, Vec<File>) {
        let (mappings, files) = mappings::of(maps).into_iter().unzip();
        let (threads, descriptors) = (Vec::new(), Vec::new());
        (Process { pid: 1, name: "x".into(), items: Items::new(), threads, descriptors, mappings }, files)
    }

    #[test]
    fn names_of_one_file_are_found_in_mappings_and_descriptors() {
        let mut all = [
            process("1000-2000 r--p 00000000 fe:10 5    /a\n2000-3000 r--p 00000000 fe:10 6    /c\n"),
            process("1000-2000 r--p 00000000 fe:10 5    /b (deleted)\n2000-3000 rw-p 00000000 00:00 0    [heap]\n"),
            process("1000-2000 r--p 00000000 fe:11 6    /d\n"),
        ];
        let mounts = Mounts::of(&mounts::parse(b"24 27 254:16 / / rw - ext4 x rw\n25 27 254:17 / /y rw - ext4 y rw\n"));
        let open = |target, info| Open { place: (1, 3), target, info };
        let open = [
            open("/e", "pos:\t0\nflags:\t02\nmnt_id:\t24\nino:\t6\n"),
            open("/f", "pos:\t0\nflags:\t02\nmnt_id:\t25\nino:\t5\n"),
            open("/g", "pos:\t0\nflags:\t02\nmnt_id:\t99\nino:\t5\n"),
        ];
        let names = find(&mut all, &mounts.files(&open));
        let sets = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        assert_eq!(names, [sets(&["/a", "/b (deleted)"]), sets(&["/c", "/e"])]);
        let of_each: Vec<Vec<Option<usize>>> =
            all.iter().map(|(process, _)| process.mappings.iter().map(|mapping| mapping.names).collect()).collect();
        assert_eq!(of_each, [vec![Some(0), Some(1)], vec![Some(0), None], vec![None]]);
    }
}

//! The memory of a process.

use crate::record::Mapping;

/// The numbers of a device.
pub(super) type Device = (u32, u32);
/// A file: its device and its inode.
pub(super) type File = (Device, u64);

/// The mappings of a table of /proc/PID/maps, each with its file. Neighbours that differ in nothing are one: whether the
/// kernel joins them depends on how they came about.
pub(super) fn of(table: &str) -> Vec<(Mapping, File)> {
    let mut all: Vec<(Mapping, File)> = Vec::new();
    for (mapping, file) in table.lines().filter_map(line) {
        match all.last_mut() {
            Some((last, _)) if continues(last, &mapping) => last.end = mapping.end,
            _ => all.push((mapping, file)),
        }
    }
    all
}

fn line(line: &str) -> Option<(Mapping, File)> {
    let mut fields = line.splitn(6, ' ');
    let (start, end) = fields.next()?.split_once('-')?;
    // What can be written can be read on x86, whatever the kernel calls it. CRIU lets a child that inherits memory which its
    // parent must not touch have it as `-w`.
    let access = fields.next()?.replacen("-w", "rw", 1);
    let number = |text: &str| u64::from_str_radix(text, 16).ok();
    let offset = number(fields.next()?)?;
    let (major, minor) = fields.next()?.split_once(':')?;
    let device = |text: &str| u32::from_str_radix(text, 16).ok();
    let file = ((device(major)?, device(minor)?), fields.next()?.parse().ok()?);
    let name = fields.next().unwrap_or_default().trim_start();
    // Shared memory without a file. CRIU makes it as a memfd of that name.
    let name = if name == "/memfd:/dev/zero (deleted)" { "/dev/zero (deleted)" } else { name };
    // The ring of a packet socket: the number is the machine's.
    let name = if name.starts_with("socket:[") { "socket" } else { name };
    // Without random addresses (ADDR_NO_RANDOMIZE) it is behind the program's own data, and the kernel may join the two.
    let name = if name == "[heap]" { "" } else { name };
    let mapping =
        Mapping { start: number(start)?, end: number(end)?, access, offset, name: name.to_owned(), names: None };
    Some((mapping, file))
}

fn continues(last: &Mapping, next: &Mapping) -> bool {
    let is_file = last.name.starts_with('/');
    let offset = if is_file { last.offset.wrapping_add(last.end - last.start) } else { last.offset };
    last.end == next.start && last.access == next.access && last.name == next.name && offset == next.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As CRIU restores it: in one piece.
    #[test]
    fn a_heap_is_memory_without_a_name() {
        let apart = "1000-2000 rw-p 00000000 00:00 0 \n2000-4000 rw-p 00000000 00:00 0    [heap]\n";
        let joined = "1000-4000 rw-p 00000000 00:00 0    [heap]\n";
        assert_eq!(of(apart), of(joined));
    }

    #[test]
    fn neighbours_that_differ_in_nothing_are_one() {
        let table = "1000-2000 r--p 00000000 00:01 5    /lib\n2000-4000 r--p 00001000 00:01 5    /lib\n\
                     4000-5000 r--p 00009000 00:01 5    /lib\n5000-6000 rw-p 00000000 00:00 0\n\
                     6000-7000 rw-p 00000000 00:00 0 \n7000-8000 ---p 00000000 00:00 0\nodd\n";
        let found: Vec<(u64, u64, String)> =
            of(table).into_iter().map(|(mapping, _)| (mapping.start, mapping.end, mapping.access)).collect();
        let text = |text: &str| text.to_owned();
        assert_eq!(
            found,
            [
                (0x1000, 0x4000, text("r--p")),
                (0x4000, 0x5000, text("r--p")),
                (0x5000, 0x7000, text("rw-p")),
                (0x7000, 0x8000, text("---p"))
            ]
        );
    }
}

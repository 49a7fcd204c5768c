//! What a process has mapped, from /proc/PID/maps (proc_pid_maps(5)).

use std::io;

use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::stat::fstat;

/// A mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping<'a> {
    /// Its first address.
    pub start: u64,
    /// The address behind it.
    pub end: u64,
    /// What may be done with it, and whether with others: `rwxp`, `r--s`.
    pub access: &'a str,
    /// The inode of its file; 0 without one.
    pub inode: u64,
    /// The file's name, as it is but for a line break, which is `\012`; with ` (deleted)` behind it, if it was. Or what
    /// else the kernel calls the mapping, or nothing.
    pub name: &'a [u8],
}

impl Mapping<'_> {
    /// Whether it is shared with who else maps the file.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.access.ends_with('s')
    }

    /// What it is called in /proc/PID/map_files.
    #[must_use]
    pub fn range(&self) -> String {
        format!("{:x}-{:x}", self.start, self.end)
    }

    /// The last part of the name.
    #[must_use]
    pub fn file_name(&self) -> &[u8] {
        self.name.rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }
}

/// The devices of memory that is in no file system: memfds, shared memory without a name or of System V, huge pages. The
/// kernel mounts them for itself, so nothing there has a path.
///
/// # Errors
/// When the kernel gives no such memory.
pub fn devices_of_memory() -> io::Result<Vec<u64>> {
    let device = |also| Ok(fstat(memfd_create(c"", MFdFlags::MFD_CLOEXEC | also)?)?.st_dev);
    // One for each size. Not every kernel has them.
    let huge = [MFdFlags::MFD_HUGE_2MB, MFdFlags::MFD_HUGE_1GB].map(|size| device(MFdFlags::MFD_HUGETLB | size));
    let mut all = vec![device(MFdFlags::empty()).map_err(|error: nix::errno::Errno| io::Error::from(error))?];
    all.extend(huge.into_iter().flatten());
    Ok(all)
}

/// The table of a process, for [`mappings`].
///
/// # Errors
/// When the process is gone, or belongs to somebody else.
pub fn read(pid: i32) -> io::Result<Vec<u8>> {
    std::fs::read(format!("/proc/{pid}/maps"))
}

/// The addresses of a mapping, from what it is called in /proc/PID/map_files ([`Mapping::range`]).
#[must_use]
pub fn range(name: &str) -> Option<(u64, u64)> {
    let (start, end) = name.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// The mappings of a table. Lines of another form are left out.
pub fn mappings(table: &[u8]) -> impl Iterator<Item = Mapping<'_>> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let mut text = || std::str::from_utf8(fields.next()?).ok();
        let (range, access, _offset, _device, inode) = (text()?, text()?, text()?, text()?, text()?.parse().ok()?);
        let address = |text| u64::from_str_radix(text, 16).ok();
        let (start, end) = range.split_once('-')?;
        let name = fields.next().unwrap_or_default().trim_ascii_start();
        Some(Mapping { start: address(start)?, end: address(end)?, access, inode, name })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_and_odd_lines_do_no_harm() {
        let table = b"00400000-00401000 r-xp 00000000 fe:00 12 /a) b \xff\\012c (deleted)\nno mapping\n\
                      7f0000000000-7f0000002000 rw-s 00001000 00:01 7                          /SYSV1\n\
                      7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 \n\n8-9 rw-p 0 0:0\n";
        let found: Vec<Mapping<'_>> = mappings(table).collect();
        let names: Vec<&[u8]> = found.iter().map(|mapping| mapping.name).collect();
        assert_eq!(names, [&b"/a) b \xff\\012c (deleted)"[..], b"/SYSV1", b""]);
        assert_eq!(found[0].range(), "400000-401000", "without zeros in front");
        assert_eq!((found[0].inode, found[0].access, found[0].is_shared()), (12, "r-xp", false));
        assert_eq!((found[1].start, found[1].end), (0x7f00_0000_0000, 0x7f00_0000_2000));
        assert_eq!((found[1].is_shared(), found[1].file_name()), (true, &b"SYSV1"[..]));
    }

    #[test]
    fn of_a_process_that_is_gone_there_is_none() {
        assert_eq!(read(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
        let own = read(std::process::id().cast_signed()).unwrap();
        assert_eq!(mappings(&own).count(), own.split(|byte| *byte == b'\n').count() - 1, "each line is one");
    }
}

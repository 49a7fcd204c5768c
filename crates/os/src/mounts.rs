//! The mounts that a process sees, from /proc/PID/mountinfo (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::fmt::Display;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

/// A mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mount {
    /// Its number, which another one may have once it is unmounted.
    pub id: u32,
    /// The number of the mount that it is on.
    pub parent: u32,
    /// The device of its file system, as stat(2) has it.
    pub device: u64,
    /// The folder of the file system that it shows.
    pub root: PathBuf,
    /// The folder at which it is mounted.
    pub point: PathBuf,
    /// The options of the mount itself, with commas.
    pub options: String,
    /// The type of the file system.
    pub kind: String,
    /// What is mounted: a device, or any name.
    pub source: String,
    /// The options of the file system, with commas.
    pub(crate) super_options: String,
}

/// In the order in which they were mounted.
///
/// # Errors
/// When the process is gone, or belongs to somebody else.
pub fn of(pid: impl Display) -> io::Result<Vec<Mount>> {
    Ok(parse(&std::fs::read(format!("/proc/{pid}/mountinfo"))?))
}

/// Those of a table. Lines of another form are left out: most mounts are nobody's concern.
#[must_use]
pub fn parse(table: &[u8]) -> Vec<Mount> {
    table.split(|byte| *byte == b'\n').filter_map(one).collect()
}

fn one(line: &[u8]) -> Option<Mount> {
    let mut fields = line.split(|byte| *byte == b' ').map(unescaped);
    let text = |field: Vec<u8>| String::from_utf8_lossy(&field).into_owned();
    let path = |field| PathBuf::from(OsString::from_vec(field));
    let (id, parent) = (text(fields.next()?).parse().ok()?, text(fields.next()?).parse().ok()?);
    let device = text(fields.next()?);
    let (major, minor) = device.split_once(':')?;
    let device = nix::sys::stat::makedev(major.parse().ok()?, minor.parse().ok()?);
    let (root, point, options) = (path(fields.next()?), path(fields.next()?), text(fields.next()?));
    fields.by_ref().find(|field| field == b"-")?;
    let (kind, source, super_options) = (text(fields.next()?), text(fields.next()?), text(fields.next()?));
    Some(Mount { id, parent, device, root, point, options, kind, source, super_options })
}

/// The kernel writes blanks and the like as a backslash and three octal digits.
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|code| std::str::from_utf8(code).ok());
        let byte = code.filter(|_| *first == b'\\').and_then(|code| u8::from_str_radix(code, 8).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { after.get(3..).unwrap_or_default() } else { after };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_names_and_odd_lines_do_no_harm() {
        let table =
            b"30 22 0:5 /a\\040b /c\\012\\134\\0d\xff rw,nosuid shared:1 master:2 - tmpfs some\\040thing rw,size=1k\n\
                      no mount\n31 22 0:6 / /x rw -\n\n32 22 8:1 / /y ro - ext4 - rw\n";
        let [odd, plain] = &parse(table)[..] else { panic!("two mounts") };
        let expected = Mount {
            id: 30,
            parent: 22,
            device: nix::sys::stat::makedev(0, 5),
            root: "/a b".into(),
            point: OsString::from_vec(b"/c\n\\\\0d\xff".to_vec()).into(),
            options: "rw,nosuid".into(),
            kind: "tmpfs".into(),
            source: "some thing".into(),
            super_options: "rw,size=1k".into(),
        };
        assert_eq!(*odd, expected);
        assert_eq!((plain.point.to_str(), plain.source.as_str()), (Some("/y"), "-"));
    }

    #[test]
    fn our_own_are_found_and_those_of_nobody_are_an_error() {
        assert!(of("self").unwrap().iter().any(|mount| mount.point.as_os_str() == "/proc" && mount.kind == "proc"));
        assert_eq!(of(i32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}

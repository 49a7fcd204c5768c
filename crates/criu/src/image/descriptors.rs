//! The descriptors of each process.

use std::collections::{BTreeMap, BTreeSet};

use super::devices::images;
use super::{Error, FDINFO, FILES, IDS, Records};
use crate::proto::{FdinfoEntry, KobjIds, ListenerFileEntry};
use rekindle_os::beneath::Beneath;

/// The numbers of the descriptors that each process of the image has, by its pid as it sees itself.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn descriptors(dir: &Beneath) -> Result<BTreeMap<i32, BTreeSet<i32>>, Error> {
    let pids = images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok());
    let of = |pid| Ok((pid, table_of(dir, pid)?.into_iter().map(|entry| entry.fd.cast_signed()).collect()));
    pids.map(of).collect()
}

/// A UNIX socket that waits for connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnixListener {
    /// A process that has it, by its pid as it sees itself.
    pub pid: i32,
    /// Its descriptor there.
    pub fd: i32,
    /// How many connections may wait (listen(2)).
    pub backlog: i32,
}

/// The UNIX sockets of the image that wait for connections, each once.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn unix_listeners(dir: &Beneath) -> Result<Vec<UnixListener>, Error> {
    /// `TCP_LISTEN`
    const LISTEN: u32 = 10;
    let entries: Vec<ListenerFileEntry> = Records::open(dir.join("files.img"), FILES)?.all()?;
    let listens = |entry: &ListenerFileEntry| Some((entry.id, entry.unix.filter(|unix| unix.state == LISTEN)?.backlog));
    let mut left: BTreeMap<u32, u32> = entries.iter().filter_map(listens).collect();
    let mut found = Vec::new();
    if left.is_empty() {
        return Ok(found);
    }
    for pid in images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok()) {
        for entry in table_of(dir, pid)? {
            let backlog = left.remove(&entry.id).map(|backlog| i32::try_from(backlog).unwrap_or(i32::MAX));
            found.extend(backlog.map(|backlog| UnixListener { pid, fd: entry.fd.cast_signed(), backlog }));
        }
    }
    Ok(found)
}

/// The timers of the image that are descriptors (timerfd_create(2)), each once: a process that has it, by its pid as it sees
/// itself, and its descriptor there.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn timers(dir: &Beneath) -> Result<Vec<(i32, i32)>, Error> {
    /// `FD_TYPES__TIMERFD`
    const TIMER: u32 = 17;
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for pid in images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok()) {
        let timers = table_of(dir, pid)?.into_iter().filter(|entry| entry.kind == TIMER && seen.insert(entry.id));
        found.extend(timers.map(|entry| (pid, entry.fd.cast_signed())));
    }
    Ok(found)
}

/// The descriptors of a process.
pub(super) fn table_of(dir: &Beneath, pid: i32) -> Result<Vec<FdinfoEntry>, Error> {
    let ids: Option<KobjIds> = Records::open(dir.join(format!("ids-{pid}.img")), IDS)?.next()?;
    let table = ids.map(|ids| dir.join(format!("fdinfo-{}.img", ids.files))).filter(|table| table.is_there());
    table.map_or(Ok(Vec::new()), |table| Records::open(table, FDINFO)?.all())
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::super::tests::write;
    use super::*;

    #[test]
    fn timers_are_found_once() {
        let dir = tempfile::tempdir().unwrap();
        let fd = |id: u8, kind: u8, fd: u8| vec![8, id, 2 << 3, 0, 3 << 3, kind, 4 << 3, fd];
        for pid in [1001, 1002] {
            write(&dir.path().join(format!("ids-{pid}.img")), IDS, &[vec![8, 1, 2 << 3, 9]]);
        }
        write(&dir.path().join("fdinfo-9.img"), FDINFO, &[fd(2, 17, 3), fd(2, 17, 4), fd(3, 6, 5), fd(5, 17, 7)]);
        let mut found = timers(&beneath(dir.path())).unwrap();
        found.iter_mut().for_each(|(pid, _)| *pid /= 10);
        assert_eq!(found, [(100, 3), (100, 7)]);
    }

    #[test]
    fn sockets_that_wait_for_connections_are_found_once() {
        let dir = tempfile::tempdir().unwrap();
        // A `file_entry` of type 5 with a `unix_sk_entry`: its state, field 4, and backlog, field 7.
        let socket = |id: u8, state: u8| vec![8, 5, 2 << 3, id, 0x82, 1, 4, 4 << 3, state, 7 << 3, 128 - 1];
        write(&dir.path().join("files.img"), FILES, &[socket(1, 10), socket(2, 1), vec![8, 1, 2 << 3, 3]]);
        let fd = |id: u8, fd: u8| vec![8, id, 2 << 3, 0, 3 << 3, 5, 4 << 3, fd];
        for pid in [1001, 1002] {
            write(&dir.path().join(format!("ids-{pid}.img")), IDS, &[vec![8, 1, 2 << 3, 9]]);
        }
        write(&dir.path().join("fdinfo-9.img"), FDINFO, &[fd(2, 3), fd(1, 4), fd(3, 5)]);
        let found = unix_listeners(&beneath(dir.path())).unwrap();
        assert!(matches!(found[..], [UnixListener { pid: 1001 | 1002, fd: 4, backlog: 127 }]), "{found:?}");
    }
}

//! Eventfds that CRIU would make wrong.
//!
//! CRIU (4.2) loses the flag EFD_SEMAPHORE, so that a read takes the whole count and not 1, and the upper half of a count
//! that needs more than 32 bits (`eventfd_open` of its eventfd.c). So the image says that such an eventfd is a regular file,
//! with a name that describes it. A restore makes it and gives it to CRIU in the place of that file (`inherit_fd`).

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use nix::sys::eventfd::{EfdFlags, EventFd};
use prost::Message;

use super::descriptors::table_of;
use super::devices::images;
use super::rewrite::rewrite;
use super::{Error, FDINFO, FILES, Records, damaged};
use crate::proto::{EventfdEntry, EventfdFileEntry, FdinfoEntry, NullFileEntry};
use rekindle_os::beneath::Beneath;

/// `fd_types` of fdinfo.proto.
const REG: u32 = 1;
const EVENTFD: u32 = 6;

/// No file has such a name: it is below one that is no folder.
const NAME: &str = "/dev/null/rekindle-eventfd/";

/// A descriptor of an eventfd.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventfdPlace {
    /// The process that has it, by its pid as it sees itself.
    pub pid: i32,
    /// Its number there.
    pub fd: i32,
    /// The number of the eventfd in the image.
    pub id: u32,
}

/// The eventfds of the image, each once.
///
/// # Errors
/// When an image file is missing or damaged.
pub fn eventfds(dir: &Beneath) -> Result<Vec<EventfdPlace>, Error> {
    let (mut seen, mut found) = (BTreeSet::new(), Vec::new());
    for pid in images(dir, "ids-")?.into_iter().filter_map(|(pid, _)| pid.parse().ok()) {
        let own = table_of(dir, pid)?.into_iter().filter(|entry| entry.kind == EVENTFD && seen.insert(entry.id));
        found.extend(own.map(|entry| EventfdPlace { pid, fd: entry.fd.cast_signed(), id: entry.id }));
    }
    Ok(found)
}

/// Lets a restore make these `semaphores`, and eventfds with a large count, as they are. Returns how many there are.
///
/// # Errors
/// When an image file is missing or damaged, or cannot be written.
pub fn describe_eventfds(dir: &Beneath, semaphores: &BTreeSet<u32>) -> Result<usize, Error> {
    let path = dir.join("files.img");
    let mut described = BTreeSet::new();
    rewrite(&path, FILES, |entry: EventfdFileEntry, _| {
        if entry.kind != EVENTFD {
            return Ok(None);
        }
        let eventfd = entry.eventfd.ok_or_else(|| damaged(&path, format!("no entry of file {}", entry.id)))?;
        let is_semaphore = semaphores.contains(&entry.id);
        if !is_semaphore && u32::try_from(eventfd.count).is_ok() {
            return Ok(None);
        }
        described.insert(entry.id);
        let EventfdEntry { flags, count, owner, .. } = eventfd;
        let kind = if is_semaphore { "semaphore" } else { "counter" };
        let name = format!("{NAME}{}-{kind}-{count}-{flags:o}", entry.id).into_bytes();
        let reg = Some(NullFileEntry { id: entry.id, flags, pos: 0, owner, name });
        Ok(Some(EventfdFileEntry { kind: REG, id: entry.id, reg, eventfd: None }.encode_to_vec()))
    })?;
    if !described.is_empty() {
        for (_, path) in images(dir, "fdinfo-")? {
            rewrite(&path, FDINFO, |entry: FdinfoEntry, record| {
                // If a field occurs twice, the last one counts.
                Ok(described.contains(&entry.id).then(|| [record, &[3 << 3, 1]].concat()))
            })?;
        }
    }
    Ok(described.len())
}

/// An eventfd that was made for a restore.
#[derive(Debug)]
pub(crate) struct Made {
    /// The name that it has in the image, without the leading slash.
    pub(crate) key: Vec<u8>,
    pub(crate) eventfd: OwnedFd,
}

/// Makes the eventfds that the image describes. Of an image without files.img CRIU says what it lacks.
///
/// # Errors
/// When files.img is damaged, or the kernel makes no more of them.
pub(crate) fn made_eventfds(dir: &Beneath) -> Result<Vec<Made>, Error> {
    let path = dir.join("files.img");
    let files = match Records::open(path.clone(), FILES) {
        Err(Error::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        records => records?,
    };
    let files: Vec<EventfdFileEntry> = files.all()?;
    let names = files.into_iter().filter_map(|file| file.reg).map(|file| file.name);
    let mut all = Vec::new();
    for key in names.filter(|name| name.starts_with(NAME.as_bytes())) {
        let described = std::str::from_utf8(&key).ok().and_then(Described::parse);
        let described = described.ok_or_else(|| damaged(&path, "an eventfd is not described as it should be"))?;
        let eventfd = described.make().map_err(|source| Error::Eventfd { source: source.into() })?;
        all.push(Made { key: key.strip_prefix(b"/").unwrap_or(&key).to_owned(), eventfd });
    }
    Ok(all)
}

/// What a name says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Described {
    is_semaphore: bool,
    count: u64,
    flags: i32,
}

impl Described {
    fn parse(name: &str) -> Option<Described> {
        let mut words = name.strip_prefix(NAME)?.split('-').skip(1);
        let is_semaphore = words.next()? == "semaphore";
        let count = words.next()?.parse().ok()?;
        let flags = i32::from_str_radix(words.next()?, 8).ok()?;
        words.next().is_none().then_some(Described { is_semaphore, count, flags })
    }

    fn make(self) -> nix::Result<OwnedFd> {
        let mut flags = EfdFlags::EFD_CLOEXEC;
        flags.set(EfdFlags::EFD_SEMAPHORE, self.is_semaphore);
        flags.set(EfdFlags::EFD_NONBLOCK, self.flags & libc::O_NONBLOCK != 0);
        let eventfd = EventFd::from_value_and_flags(0, flags)?;
        if self.count > 0 {
            // At most u64::MAX - 1, which does not wait: it is all that it can count.
            eventfd.write(self.count)?;
        }
        Ok(eventfd.into())
    }
}

#[cfg(test)]
mod tests {
    use super::super::IDS;
    use super::super::tests::{beneath, write};
    use super::*;

    fn file(id: u32, flags: u32, count: u64) -> Vec<u8> {
        let eventfd = EventfdEntry { id, flags, owner: vec![8, 0], count };
        EventfdFileEntry { kind: EVENTFD, id, reg: None, eventfd: Some(eventfd) }.encode_to_vec()
    }

    #[test]
    fn semaphores_and_large_counts_are_made_by_us() {
        let dir = tempfile::tempdir().unwrap();
        let nonblock = libc::O_NONBLOCK.cast_unsigned() | 2;
        let files = [file(1, 2, 5), file(2, nonblock, 3), file(3, 2, 1 << 40), file(4, 2, 0)];
        write(&dir.path().join("files.img"), FILES, &files);
        write(&dir.path().join("ids-1001.img"), IDS, &[vec![8, 1, 2 << 3, 9]]);
        let fd = |id: u8| vec![8, id, 2 << 3, 0, 3 << 3, 6, 4 << 3, id + 2];
        write(&dir.path().join("fdinfo-9.img"), FDINFO, &[fd(1), fd(2), fd(3), fd(4), fd(2)]);
        let dir = beneath(dir.path());
        let found: Vec<(i32, u32)> = eventfds(&dir).unwrap().into_iter().map(|place| (place.fd, place.id)).collect();
        assert_eq!(found, [(3, 1), (4, 2), (5, 3), (6, 4)]);
        assert_eq!(describe_eventfds(&dir, &BTreeSet::from([2, 4])).unwrap(), 3);
        let kinds: Vec<u32> = table_of(&dir, 1001).unwrap().into_iter().map(|entry| entry.kind).collect();
        assert_eq!(kinds, [6, 1, 1, 1, 1]);
        let made = made_eventfds(&dir).unwrap();
        let keys: Vec<&str> = made.iter().map(|made| std::str::from_utf8(&made.key).unwrap()).collect();
        let name = |rest: &str| format!("dev/null/rekindle-eventfd/{rest}");
        let expected = [name("2-semaphore-3-4002"), name("3-counter-1099511627776-2"), name("4-semaphore-0-2")];
        assert_eq!(keys, expected);
        let read = |made: &Made| {
            let mut bytes = [0; 8];
            nix::unistd::read(&made.eventfd, &mut bytes).map(|_| u64::from_ne_bytes(bytes))
        };
        assert_eq!([read(&made[0]), read(&made[0]), read(&made[0])], [Ok(1); 3]);
        assert_eq!(read(&made[0]), Err(nix::Error::EAGAIN));
        assert_eq!(read(&made[1]), Ok(1 << 40));
        // Nothing is left to describe.
        assert_eq!(describe_eventfds(&dir, &BTreeSet::from([2, 4])).unwrap(), 0);
    }

    #[test]
    fn odd_names_describe_nothing() {
        for name in ["1-semaphore-3", "1-semaphore-x-2", "1-semaphore-3-9", "1-semaphore-3-2-1", "", "1-semaphore--2"] {
            assert_eq!(Described::parse(&format!("{NAME}{name}")), None, "{name}");
        }
        assert_eq!(Described::parse("/x"), None);
        let most = Described { is_semaphore: false, count: u64::MAX, flags: 2 };
        assert!(most.make().is_err(), "no eventfd counts as far");
    }
}

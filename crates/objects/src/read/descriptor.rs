//! A descriptor: what it is, and what the file or object behind it has.

use std::collections::HashSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use rekindle_os::attributes;
use rekindle_os::descriptor_table::DescriptorTable;
use rekindle_os::process as os_process;
use rekindle_os::{same, unix_diag};

use super::identity::Named;
use super::kind::Kind;
use super::{Pids, Sockets, fdinfo, lossy, pidfd, socket};
use crate::multicast::Groups;
use crate::record::{self, Items};

/// What was read.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) number: i32,
    /// Where /proc/PID/fd leads.
    pub(super) target: String,
    pub(super) info: String,
    /// Which of what an epoll set watches are under a number that no longer leads to the file.
    closed: Vec<bool>,
    more: More,
}

/// What only the descriptor itself tells.
#[derive(Debug, Default)]
struct More {
    owner: Option<(i32, i32)>,
    signal: Option<i32>,
    size: Option<i32>,
    queued: Option<i32>,
    unsent: Option<i32>,
    seals: Option<i32>,
    settings: Option<String>,
    window: Option<String>,
    exclusive: Option<i32>,
}

/// The descriptors of a process.
#[derive(Debug)]
pub(super) struct Table {
    pid: i32,
    table: Option<DescriptorTable>,
    /// To fetch them.
    process: Option<OwnedFd>,
    groups: Groups,
    /// Inodes of UNIX sockets that are connected to one that is open.
    paired: OnceLock<HashSet<u64>>,
}

impl Table {
    pub(super) fn of(pid: i32) -> Table {
        Table {
            pid,
            table: DescriptorTable::of(pid).ok(),
            process: pidfd(pid),
            groups: Groups::of(pid),
            paired: OnceLock::new(),
        }
    }

    /// Whether a UNIX socket is connected to one that is open. If the kernel does not tell, it is taken to be.
    fn has_peer(&self, target: &str) -> bool {
        let paired = self.paired.get_or_init(|| {
            let all = unix_diag::of(self.pid).unwrap_or_default();
            all.iter().filter(|socket| socket.peer != 0).map(|socket| socket.inode.into()).collect()
        });
        let inode = os_process::socket(Path::new(target));
        paired.is_empty() || inode.is_none_or(|inode| paired.contains(&inode))
    }

    pub(super) fn numbers(&self) -> &[i32] {
        self.table.as_ref().map_or(&[], DescriptorTable::numbers)
    }

    /// Reads one, and the socket behind it if `is_new` says so of its name.
    pub(super) fn read(&self, number: i32, is_new: impl Fn(&str) -> bool) -> Option<(Raw, Option<socket::Raw>)> {
        let table = self.table.as_ref()?;
        let target = lossy(table.target(number)?);
        // Shared memory without a file, opened by /proc/PID/map_files. CRIU makes it as a memfd of that name.
        let target = if target == "/memfd:/dev/zero (deleted)" { "/dev/zero (deleted)".to_owned() } else { target };
        let target = own_namespace(self.pid, &target).unwrap_or(target);
        let info = table.info(number).map(lossy).unwrap_or_default();
        let kind = Kind::of(&target);
        let has_more = !matches!(kind, Kind::Anonymous(_) | Kind::Path(_));
        let process = self.process.as_ref().filter(|_| has_more);
        let opened = process.and_then(|process| os_process::fetch_descriptor(process, number).ok());
        let more = opened.as_ref().map(|opened| More::read(opened, kind)).unwrap_or_default();
        let opened = opened.filter(|_| kind == Kind::Socket && is_new(&target));
        let mut socket = opened.as_ref().map(|socket| socket::Raw::read(socket, &self.groups));
        if let Some(socket) = socket.as_mut().filter(|socket| socket.sends_to_nameless() && !self.has_peer(&target)) {
            socket.lost_its_peer();
        }
        let closed = fdinfo::watched(&info).into_iter().map(|(watched, index)| {
            // Of one that cannot be asked it is not said.
            let is_closed = |error: std::io::Error| error.raw_os_error() == Some(libc::EBADF);
            same::is_watched(self.pid, number, watched, index).map_or_else(is_closed, |is_watched| !is_watched)
        });
        let closed = closed.collect();
        Some((Raw { number, target, info, closed, more }, socket))
    }
}

impl Raw {
    pub(super) fn record(self, pid: i32, pids: &Pids, identity: &Named, sockets: &Sockets) -> record::Descriptor {
        let mut items = Items::new();
        let mut put = |item: &str, value: String| {
            items.insert(item.to_owned(), value);
        };
        let kind = Kind::of(&self.target);
        put("kind", kind.words().to_owned());
        if let Kind::Path(path) = kind {
            let (path, deleted) = match path.strip_suffix(" (deleted)") {
                Some(path) => (path, "yes"),
                None => (path, "no"),
            };
            put("path", path.to_owned());
            put("deleted", deleted.to_owned());
        }
        if let Some(same) = identity.same(pid, self.number) {
            put("same", same);
        }
        if let Some(object) = identity.object(pid, self.number) {
            put("object", object);
        }
        let More { owner, signal, size, queued, unsent, seals, settings, window, exclusive } = self.more;
        if let Some((kind, id)) = owner.filter(|(_, id)| *id != 0) {
            let kind = ["thread", "process", "process group"].get(usize::try_from(kind).unwrap_or(3)).copied();
            let signal = signal.unwrap_or_default();
            put("owner", format!("{} {} signal {signal}", kind.unwrap_or("unknown"), pids.inner(id.abs())));
        }
        let number = |number: i32| number.to_string();
        for (item, value) in [
            ("size", size.map(number)),
            ("queued", queued.map(number)),
            ("unsent", unsent.map(number)),
            ("seals", seals.map(number)),
            ("settings", settings),
            ("window", window),
            ("exclusive", exclusive.map(number)),
        ] {
            if let Some(value) = value {
                put(item, value);
            }
        }
        fdinfo::items(&self.info, |inode, device| identity.nameless(inode, device), &mut items);
        fdinfo::mark_closed(&mut items, &self.closed);
        if let Some(socket) = sockets.get(&self.target) {
            socket.items(&mut items);
        }
        record::Descriptor { number: self.number, items }
    }
}

/// What a descriptor of a namespace leads to, if the process is in it. Each restore makes it anew, with another number.
fn own_namespace(pid: i32, target: &str) -> Option<String> {
    const KINDS: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts"];
    let (kind, _) = target.split_once(":[").filter(|(kind, _)| KINDS.contains(kind))?;
    let own = std::fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok()?;
    (own == Path::new(target)).then(|| format!("{kind}:[own]"))
}

/// `TIOCGEXCL` of asm-generic/ioctls.h: `_IOR('T', 0x40, int)`.
const IS_EXCLUSIVE: libc::Ioctl = 0x8004_5440;
/// `F_GETSIG` of asm-generic/fcntl.h, which libc does not have.
const GET_SIGNAL: i32 = 11;

impl More {
    fn read(descriptor: &OwnedFd, kind: Kind<'_>) -> More {
        let mut more = More {
            owner: attributes::owner(descriptor).ok(),
            signal: attributes::number(descriptor, GET_SIGNAL).ok(),
            ..More::default()
        };
        match kind {
            Kind::Pipe => {
                more.size = attributes::number(descriptor, libc::F_GETPIPE_SZ).ok();
                more.queued = attributes::length(descriptor, libc::FIONREAD).ok();
            }
            Kind::Terminal => {
                more.queued = attributes::length(descriptor, libc::FIONREAD).ok();
                more.unsent = attributes::length(descriptor, libc::TIOCOUTQ).ok();
                more.settings = attributes::terminal_settings(descriptor).ok();
                more.window = attributes::window(descriptor).ok();
                more.exclusive = attributes::length(descriptor, IS_EXCLUSIVE).ok();
            }
            Kind::Memfd => more.seals = attributes::number(descriptor, libc::F_GET_SEALS).ok(),
            Kind::Socket | Kind::Anonymous(_) | Kind::Path(_) => {}
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_namespace_of_a_process_is_its_own() {
        let pid = std::process::id().cast_signed();
        let target = std::fs::read_link("/proc/self/ns/pid").unwrap();
        assert_eq!(own_namespace(pid, target.to_str().unwrap()).as_deref(), Some("pid:[own]"));
        for other in ["pid:[1]", "pipe:[4026531836]", "/pid:[4026531836]", "anon_inode:[eventfd]"] {
            assert_eq!(own_namespace(pid, other), None, "{other}");
        }
    }
}

//! A descriptor: what it is, and what the file or object behind it has.

use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rekindle_os::attributes;
use rekindle_os::process as os_process;

use super::identity::Named;
use super::kind::Kind;
use super::{Pids, fdinfo, socket, text};
use crate::record::{self, Items};

/// What was read.
#[derive(Debug)]
pub(super) struct Raw {
    pub(super) number: i32,
    /// Where /proc/PID/fd leads.
    pub(super) target: String,
    pub(super) info: String,
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
    socket: Option<socket::Raw>,
}

impl Raw {
    pub(super) fn read_all(pid: i32, process: Option<&OwnedFd>) -> Vec<Raw> {
        let mut all: Vec<Raw> = os_process::descriptors(pid)
            .map(|(number, target)| {
                let target = String::from_utf8_lossy(target.as_os_str().as_bytes()).into_owned();
                let info = text(&format!("/proc/{pid}/fdinfo/{number}")).unwrap_or_default();
                let more = process.map(|process| More::read(process, number, &target)).unwrap_or_default();
                Raw { number, target, info, more }
            })
            .collect();
        all.sort_unstable_by_key(|descriptor| descriptor.number);
        all
    }

    pub(super) fn record(self, pid: i32, pids: &Pids, identity: &Named) -> record::Descriptor {
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
        let More { owner, signal, size, queued, unsent, seals, settings, window, socket } = self.more;
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
        ] {
            if let Some(value) = value {
                put(item, value);
            }
        }
        fdinfo::items(&self.info, &mut items);
        if let Some(socket) = socket {
            socket.items(pids, &mut items);
        }
        record::Descriptor { number: self.number, items }
    }
}

/// `F_GETSIG` of asm-generic/fcntl.h, which libc does not have.
const GET_SIGNAL: i32 = 11;

impl More {
    fn read(process: &OwnedFd, number: i32, target: &str) -> More {
        let kind = Kind::of(target);
        if matches!(kind, Kind::Anonymous(_) | Kind::Path(_)) {
            return More::default();
        }
        let Ok(descriptor) = os_process::fetch_descriptor(process, number) else { return More::default() };
        let mut more = More {
            owner: attributes::owner(&descriptor).ok(),
            signal: attributes::number(&descriptor, GET_SIGNAL).ok(),
            ..More::default()
        };
        match kind {
            Kind::Pipe => {
                more.size = attributes::number(&descriptor, libc::F_GETPIPE_SZ).ok();
                more.queued = attributes::length(&descriptor, libc::FIONREAD).ok();
            }
            Kind::Terminal => {
                more.queued = attributes::length(&descriptor, libc::FIONREAD).ok();
                more.unsent = attributes::length(&descriptor, libc::TIOCOUTQ).ok();
                more.settings = attributes::terminal_settings(&descriptor).ok();
                more.window = attributes::window(&descriptor).ok();
            }
            Kind::Memfd => more.seals = attributes::number(&descriptor, libc::F_GET_SEALS).ok(),
            Kind::Socket => more.socket = Some(socket::Raw::read(&descriptor)),
            Kind::Anonymous(_) | Kind::Path(_) => {}
        }
        more
    }
}

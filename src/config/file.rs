//! Reads the file, and checks whether it may be trusted.
//!
//! Root runs the commands in the configuration. So root refuses a file that anybody else can write, or replace because
//! of the permissions of its folder.
//!
//! There is one exception: a file that is named may belong to the user who called sudo. A file that is found may not: a
//! rule of sudo may allow that user one command line and no more, and must not become a shell of root by a file in the
//! working directory.

use std::fs::{self, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::unistd::{Gid, Group, Uid, User};

use super::Error;
use rekindle_os::regular::{self, Links};

/// Larger than any configuration: without a limit, a wrong path could fill the memory.
const LARGEST: u64 = 1 << 20;

/// How a path came to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Given {
    /// The user named it.
    Named,
    /// It is one of the places where files are looked for.
    Found,
}

/// Whose files root reads, besides its own.
#[derive(Debug, Clone, Copy)]
struct Friends {
    /// The user who called sudo.
    caller: Option<Uid>,
    given: Given,
}

impl Friends {
    /// sudo sets SUDO_UID; whoever can set it for a process of root is root.
    fn of(given: Given) -> Friends {
        let caller = std::env::var("SUDO_UID").ok().and_then(|uid| uid.parse().ok()).map(Uid::from_raw);
        Friends { caller, given }
    }

    fn is_caller(self, owner: u32) -> bool {
        self.caller == Some(Uid::from_raw(owner))
    }

    fn include(self, owner: u32) -> bool {
        self.given == Given::Named && self.is_caller(owner)
    }
}

/// The text of the configuration, refused when running as root and others could have written it.
pub(super) fn read(path: &Path, given: Given) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    // Others may be able to put a device or a FIFO there, which must not be opened.
    let opened = regular::find(path, Links::Follow).and_then(|found| found.read());
    let mut file = match opened {
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
            return Err(Error::NotAFile { path: path.to_owned() });
        }
        opened => opened.map_err(failed)?,
    };
    let metadata = file.metadata().map_err(failed)?;
    if Uid::effective().is_root() {
        let friends = Friends::of(given);
        trusted(path, &metadata, friends)?;
        surroundings(path, friends)?;
    }
    let mut text = String::new();
    let read = file.by_ref().take(LARGEST + 1).read_to_string(&mut text);
    // The limit may cut a character in two, which then looks like text that is not UTF-8.
    if metadata.len() > LARGEST || text.len() as u64 > LARGEST {
        return Err(Error::TooLarge { path: path.to_owned(), limit: LARGEST });
    }
    read.map_err(failed)?;
    Ok(text)
}

/// Checks the folder of the file and, if the path is a link, the link and the folder that it leads to.
fn surroundings(path: &Path, friends: Friends) -> Result<(), Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let named = std::path::absolute(path).map_err(failed)?;
    let real = fs::canonicalize(path).map_err(failed)?;
    let link = fs::symlink_metadata(&named).map_err(failed)?;
    if link.is_symlink() {
        owned(&named, &link, friends)?;
    }
    for folder in [named.parent(), real.parent()].into_iter().flatten() {
        let metadata = fs::metadata(folder).map_err(|source| Error::Read { path: folder.to_owned(), source })?;
        if metadata.mode() & libc::S_ISVTX != 0 {
            // In a sticky folder such as /tmp nobody but the owner can replace the file, whose owner is checked.
            owned(folder, &metadata, friends)?;
        } else {
            trusted(folder, &metadata, friends)?;
        }
    }
    Ok(())
}

fn trusted(path: &Path, metadata: &Metadata, friends: Friends) -> Result<(), Error> {
    owned(path, metadata, friends)?;
    let mode = metadata.mode() & 0o7777;
    // With umask 002 the caller's files are open to a group in which nobody else is.
    let is_harmless = friends.include(metadata.uid()) && mode & 0o002 == 0 && is_alone(metadata.uid(), metadata.gid());
    if mode & 0o022 != 0 && !is_harmless {
        return Err(Error::Writable { path: path.to_owned(), mode });
    }
    Ok(())
}

/// Whether the group is that user's own: it has the user's name, it is the user's first group, and no one else is in it.
fn is_alone(user: u32, group: u32) -> bool {
    let found =
        User::from_uid(Uid::from_raw(user)).ok().flatten().zip(Group::from_gid(Gid::from_raw(group)).ok().flatten());
    found.is_some_and(|(user, group)| {
        user.gid == group.gid && user.name == group.name && group.mem.iter().all(|member| *member == user.name)
    })
}

fn owned(path: &Path, metadata: &Metadata, friends: Friends) -> Result<(), Error> {
    // The running user is root here; a user namespace maps root to 0 as well.
    let owner = metadata.uid();
    if owner == 0 || friends.include(owner) {
        return Ok(());
    }
    let path = path.to_owned();
    Err(if friends.is_caller(owner) { Error::Callers { path } } else { Error::Foreign { path, owner } })
}

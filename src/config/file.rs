//! Reads the file, and checks whether it may be trusted.
//!
//! Root runs the commands in the configuration. So root refuses a file that anybody else can write, or replace because
//! of the permissions of its folder.

use std::fs::{self, File, Metadata};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::unistd::Uid;

use super::Error;

/// Larger than any configuration: without a limit, a wrong path could fill the memory.
const LARGEST: u64 = 1 << 20;

/// The text of the configuration, refused when running as root and others could have written it.
pub(super) fn read(path: &Path) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    // Without O_NONBLOCK, opening a named pipe waits for a writer.
    let flags = libc::O_NONBLOCK | libc::O_CLOEXEC;
    let mut file = File::options().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    if Uid::effective().is_root() {
        trusted(path, &metadata)?;
        surroundings(path)?;
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
fn surroundings(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    let named = std::path::absolute(path).map_err(failed)?;
    let real = fs::canonicalize(path).map_err(failed)?;
    let link = fs::symlink_metadata(&named).map_err(failed)?;
    if link.is_symlink() {
        owned(&named, &link)?;
    }
    for folder in [named.parent(), real.parent()].into_iter().flatten() {
        let metadata = fs::metadata(folder).map_err(|source| Error::Read { path: folder.to_owned(), source })?;
        if metadata.mode() & libc::S_ISVTX != 0 {
            // In a sticky folder such as /tmp nobody but the owner can replace the file, whose owner is checked.
            owned(folder, &metadata)?;
        } else {
            trusted(folder, &metadata)?;
        }
    }
    Ok(())
}

fn trusted(path: &Path, metadata: &Metadata) -> Result<(), Error> {
    owned(path, metadata)?;
    let mode = metadata.mode() & 0o7777;
    if mode & 0o022 != 0 {
        return Err(Error::Writable { path: path.to_owned(), mode });
    }
    Ok(())
}

fn owned(path: &Path, metadata: &Metadata) -> Result<(), Error> {
    // The running user is root here; a user namespace maps root to 0 as well.
    if metadata.uid() == 0 { Ok(()) } else { Err(Error::Foreign { path: path.to_owned(), owner: metadata.uid() }) }
}

//! The rights of files and folders that a restore creates: owner, mode and access control list. And the attributes that
//! programs have attached to them.
//!
//! A new file gives nobody more than the one at the snapshot. In the mode of a file with an access control list, the bits
//! of the group are the mask of the list: without the list, the group would get what only others may have had. So a file
//! that cannot get its list, or its group, is not created.
//!
//! Attributes that the kernel trusts (`security.*`, `trusted.*`) are not in an image, so that whoever writes files
//! cannot have them set with the rights of root.

use std::collections::HashMap;
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use super::place::{Trusted, reached};
use super::rollback::{RollbackError, failed, no_room};
use crate::launch::identity::Identity;
use rekindle_os::xattr::{self, ACL, DEFAULT_ACL};
use rekindle_store::Manifest;
use rekindle_store::manifest::{Attributes, Bytes, Owner};

/// Prefix of the attributes of programs.
const USER: &str = "user.";

/// Most bytes of lists, and of attributes of programs with their names, in an image. They are in its manifest, twice as
/// long, and that has a maximum size.
const ALL_LISTS: usize = 8 << 20;
const ALL_OF_PROGRAMS: usize = 4 << 20;

/// The extended attributes of the files of an image, each once.
#[derive(Debug, Default)]
pub(crate) struct Table {
    all: Vec<Attributes>,
    known: HashMap<Attributes, u32>,
    lists: usize,
    of_programs: usize,
    /// Whether attributes of programs were left out.
    is_full: bool,
}

impl Table {
    /// Adds those of a file or folder. Returns their number, if it has any.
    pub(crate) fn add(&mut self, file: &File) -> io::Result<Option<u32>> {
        let mut attributes = of(file)?;
        if attributes == Attributes::NONE {
            return Ok(None);
        }
        if let Some(number) = self.known.get(&attributes) {
            return Ok(Some(*number));
        }
        let of_programs: usize = attributes.user.iter().map(|(name, value)| name.len() + value.0.len()).sum();
        if self.of_programs + of_programs > ALL_OF_PROGRAMS {
            self.is_full = true;
            attributes.user.clear();
        } else {
            self.of_programs += of_programs;
        }
        let lists = [&attributes.acl, &attributes.default_acl];
        self.lists += lists.into_iter().flatten().map(|list| list.0.len()).sum::<usize>();
        if self.lists > ALL_LISTS {
            return Err(io::Error::other("the access control lists of the job's files are too long for an image"));
        }
        let number = u32::try_from(self.all.len()).map_err(io::Error::other)?;
        self.all.push(attributes.clone());
        self.known.insert(attributes, number);
        Ok(Some(number))
    }

    /// All, by their numbers.
    pub(crate) fn all(&self) -> &[Attributes] {
        &self.all
    }

    /// A note, if something was left out.
    pub(crate) fn note(&self) -> Option<String> {
        self.is_full.then(|| {
            "the image does not contain all extended attributes (user.*) of the job's files: they are too long. A file that is \
             gone at a restore is created without those"
                .to_owned()
        })
    }
}

fn of(file: &File) -> io::Result<Attributes> {
    let mut found = Attributes::NONE;
    for name in xattr::names(file)? {
        let Some(name) = name.to_str() else { continue };
        // It may be gone by now.
        let value = || Ok::<_, io::Error>(xattr::get(file, name)?.map(Bytes));
        match name {
            ACL => found.acl = value()?,
            DEFAULT_ACL => found.default_acl = value()?,
            _ => {
                let Some(short) = name.strip_prefix(USER) else { continue };
                match value() {
                    // Of a folder that can only be entered.
                    Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
                    value => found.user.extend(value?.map(|value| (short.to_owned(), value))),
                }
            }
        }
    }
    Ok(found)
}

/// How files are created.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Maker<'a> {
    /// Whether they are given to their owner at the snapshot; else they belong to the job's user.
    may_give: bool,
    pub(crate) trusted: Trusted,
    /// The attributes in the image. `None` if they are not known.
    attributes: Option<&'a [Attributes]>,
}

impl<'a> Maker<'a> {
    /// For a job of this user; `None` is the supervisor's.
    pub(crate) fn of(manifest: &'a Manifest, user: Option<&Identity>) -> Maker<'a> {
        let attributes = manifest.attributes.as_deref();
        Maker { may_give: user.is_none(), trusted: Trusted::of(user), attributes }
    }

    /// Gives a new file its owner, its attributes and its mode. It is empty or has its content, and nobody else may have
    /// opened it.
    pub(crate) fn give(self, made: &File, path: &Path, rights: Rights) -> Result<(), RollbackError> {
        let attributes = self.attributes(rights.attributes);
        if let Some(owner) = rights.owner {
            let has_list = attributes.is_some_and(|attributes| attributes.acl.is_some());
            match self.may_give {
                true => chown(reached(made), Some(owner.uid), Some(owner.gid)).map_err(failed("chown", path))?,
                false => keep_group(made, path, owner, rights.mode, has_list)?,
            }
        }
        if let Some(attributes) = attributes {
            attach(made, path, attributes)?;
        }
        let mode = Permissions::from_mode(rights.mode & 0o7777);
        fs::set_permissions(reached(made), mode).map_err(failed("chmod", path))
    }

    /// The owner that something new is given to, if it had this one.
    pub(crate) fn owner(self, then: Option<Owner>) -> Option<Owner> {
        then.filter(|_| self.may_give)
    }

    fn attributes(self, number: Option<u32>) -> Option<&'a Attributes> {
        const NONE: &Attributes = &Attributes::NONE;
        let all = self.attributes?;
        Some(number.and_then(|number| all.get(usize::try_from(number).ok()?)).unwrap_or(NONE))
    }
}

/// What a new file gets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rights {
    /// `st_mode`; only its permission bits count.
    pub(crate) mode: u32,
    pub(crate) owner: Option<Owner>,
    /// The number of its attributes.
    pub(crate) attributes: Option<u32>,
}

/// Gives a file of the job's user the group that it had, and refuses it if its mode would give others more without.
fn keep_group(made: &File, path: &Path, owner: Owner, mode: u32, has_list: bool) -> Result<(), RollbackError> {
    let now = made.metadata().map_err(failed("stat", path))?;
    // A user may give a file to each of his groups.
    let has_group = now.gid() == owner.gid || chown(reached(made), None, Some(owner.gid)).is_ok();
    let (group, others) = ((mode >> 3) & 0o7, mode & 0o7);
    let acts_as_group = !now.is_dir() && mode & libc::S_ISGID != 0;
    let gains_group = !has_group && (group != others || has_list || acts_as_group);
    let acts_as_user = now.uid() != owner.uid && mode & libc::S_ISUID != 0;
    match gains_group || acts_as_user {
        true => Err(RollbackError::NotItsOwner { path: path.into(), then: owner, mode: mode & 0o7777 }),
        false => Ok(()),
    }
}

/// Gives a new file these attributes, and none that it has got from its folder.
fn attach(made: &File, path: &Path, attributes: &Attributes) -> Result<(), RollbackError> {
    let is_folder = made.metadata().map_err(failed("stat", path))?.is_dir();
    let lists = [(ACL, &attributes.acl), (DEFAULT_ACL, &attributes.default_acl)];
    for (name, list) in lists.into_iter().take(1 + usize::from(is_folder)) {
        set_list(made, name, list.as_ref()).map_err(|source| RollbackError::Acl { path: path.into(), source })?;
    }
    for (name, value) in &attributes.user {
        match xattr::set(made, &format!("{USER}{name}"), &value.0) {
            Err(error) if is_room(&error) => return Err(no_room(path)(error)),
            Err(error) => tracing::warn!("{} is put back without its attribute {name:?}: {error}", path.display()),
            Ok(()) => {}
        }
    }
    Ok(())
}

fn is_room(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

fn set_list(file: &File, name: &str, list: Option<&Bytes>) -> io::Result<()> {
    match list {
        Some(list) => xattr::set(file, name, &list.0),
        None => xattr::remove(file, name),
    }
}

/// Gives a copy the rights of the original. If it cannot have all of them, only its owner may use it.
pub(super) fn give_same(copy: &File, original: &File, metadata: &Metadata, path: &Path) -> Result<(), RollbackError> {
    // If we may not change the owner, the file belongs to the user already.
    let _ = std::os::unix::fs::fchown(copy, Some(metadata.uid()), Some(metadata.gid()));
    let has_owner = copy.metadata().is_ok_and(|now| (now.uid(), now.gid()) == (metadata.uid(), metadata.gid()));
    let list = xattr::get(original, ACL).map(|list| list.map(Bytes));
    let is_same = has_owner && list.and_then(|list| set_list(copy, ACL, list.as_ref())).is_ok();
    let mode = metadata.mode() & if is_same { 0o777 } else { 0o700 };
    copy.set_permissions(Permissions::from_mode(mode)).map_err(failed("chmod", path))
}

/// For tests: without the attributes of an image.
#[cfg(test)]
impl Maker<'static> {
    pub(crate) fn plain(may_give: bool, trusted: Trusted) -> Maker<'static> {
        Maker { may_give, trusted, attributes: None }
    }
}

#[cfg(test)]
mod tests;

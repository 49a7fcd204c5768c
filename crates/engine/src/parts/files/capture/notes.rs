//! Notes for the user: files that are not in the image, and files that a restore could not put back.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use bytesize::ByteSize;

use super::super::place::may_create_in;
use super::{ALL_LENGTHS, Found, View, select};
use rekindle_base::chain;
use rekindle_store::manifest::{OpenFile, TrackedFolder};

/// How many files a message names.
const NAMED: usize = 5;

/// Why files are not in the image.
pub(super) enum Reason {
    /// `snapshot.file-limit`; 0 if memory has no room.
    Limit(u64),
    TooLong,
}

pub(super) fn left_out(files: &[&OpenFile], reason: Reason) -> Option<String> {
    if files.is_empty() {
        return None;
    }
    let more = files.len().saturating_sub(NAMED);
    let names = files.iter().take(NAMED).map(|file| file.path.display().to_string());
    let mut names = names.collect::<Vec<_>>().join(", ");
    if more > 0 {
        names.push_str(&format!(" and {more} more"));
    }
    let (why, help) = match reason {
        Reason::Limit(0) => ("there is not enough memory for it".to_owned(), "raise the limit"),
        Reason::Limit(limit) => {
            (format!("it does not fit into snapshot.file-limit, {}", ByteSize::b(limit)), "raise the limit")
        }
        Reason::TooLong => (
            format!(
                "it is too long: the files of an image may be {} long together, holes included",
                ByteSize::b(ALL_LENGTHS)
            ),
            "create the file with a smaller length",
        ),
    };
    Some(format!(
        "the job rewrites {names}, and the image does not contain the content, because {why}. A restore is refused if one \
         of them changes after the snapshot (restart.changed-files): {help}"
    ))
}

pub(super) fn unread(unread: &BTreeMap<PathBuf, select::Unread>) -> Option<String> {
    if unread.is_empty() {
        return None;
    }
    let more = unread.len().saturating_sub(NAMED);
    let shown = |(group, select::Unread { path, error }): (&PathBuf, &select::Unread)| {
        let why = match error.kind() {
            // The kernel asks the process to give the lease up, and lets nobody wait for that who asked not to.
            io::ErrorKind::WouldBlock => "another process has a lease on it".to_owned(),
            _ => chain(error),
        };
        match group == path {
            true => format!("{} (it cannot be read: {why})", group.display()),
            false => format!("{} ({} in it cannot be read: {why})", group.display(), path.display()),
        }
    };
    let mut names = unread.iter().take(NAMED).map(shown).collect::<Vec<_>>().join(", ");
    if more > 0 {
        names.push_str(&format!(" and {more} more"));
    }
    Some(format!(
        "the image does not contain the content of {names}. A restore is refused if one of these files changes after the \
         snapshot (restart.changed-files): make them readable for the job's user"
    ))
}

/// Notes on tracked folders with files that a restore could not put back with the rights of the job's user.
pub(super) fn without_place(tracked: &[TrackedFolder], view: View<'_>) -> io::Result<Vec<String>> {
    let Some(user) = view.user else { return Ok(Vec::new()) };
    let note = |folder: &TrackedFolder, file: PathBuf| {
        format!(
            "a restore is refused if {} has changed: what it replaces is kept in a new folder, and user {} may create none in \
             {} or beside it. Let that user write to {}",
            file.display(),
            user.name,
            folder.path.display(),
            folder.path.display()
        )
    };
    view.with(|_| {
        let found = tracked.iter().filter_map(|folder| Some((folder, select::without_place(folder, user.uid)?)));
        found.map(|(folder, file)| note(folder, file)).collect()
    })
}

/// A note on files whose content a restore could not save with the rights of the job's user.
pub(super) fn without_copy<'a>(files: impl Iterator<Item = &'a Found>, view: View<'_>) -> io::Result<Option<String>> {
    let Some(user) = view.user else { return Ok(None) };
    let files: Vec<&Path> = files.map(|file| file.path.as_path()).collect();
    let found = view.with(|_| {
        files.iter().find(|path| path.parent().is_some_and(|folder| may_create_in(folder).is_err())).copied()
    })?;
    Ok(found.map(|file| {
        let folder = file.parent().unwrap_or(file).display();
        format!(
            "a restore is refused if {} has changed: what it replaces is kept beside it, and user {} may create no file in \
             {folder}. Let that user write to {folder}",
            file.display(),
            user.name
        )
    }))
}

//! Programs, libraries and data that the job has mapped or open for reading.
//!
//! CRIU refuses a file with another size, another mode or, for ELF files, another build-id (`validate_file` in
//! criu/files-reg.c). It is right to do so: the job has addresses in it. CRIU does not compare the owner. But a job runs
//! code of these files, so a file that another user put in the place of one is refused here.

use super::{Difference, FileHere, Here, Severity, here};
use crate::launch::identity::name_of;
use crate::parts::files::place::Trusted;
use rekindle_store::Manifest;
use rekindle_store::manifest::MappedFile;

/// Prefix of [`Difference::what`] for differences of files.
pub(super) const WHAT: &str = "file ";

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    let found = manifest.mapped_files.iter().filter_map(|file| Some((file, here.files.get(file.path.as_path())?)));
    let trusted = here::trusted(manifest);
    found
        .filter_map(|(file, now)| {
            let foreign = trusted.and_then(|trusted| foreign(file, now, trusted));
            foreign.or_else(|| difference(file, now))
        })
        .collect()
}

/// The difference if somebody else than its owner at the snapshot has put the file there.
fn foreign(file: &MappedFile, now: &FileHere, trusted: Trusted) -> Option<Difference> {
    let then = file.owner.or_else(|| file.copy.as_ref().map(|copy| copy.owner))?.uid;
    let (image, here, advice) = match now {
        FileHere::File { owner, .. } if !trusted.accepts(*owner, Some(then)) => (
            format!("one of user {}", name_of(then)),
            format!("one of user {}", name_of(*owner)),
            format!(
                "somebody may have replaced it: if it is the right file, give it back to user {}; if it is not, put \
                the right file in its place",
                name_of(then)
            ),
        ),
        FileHere::Link { link, owner } => (
            "a path without links".into(),
            format!("{}, a symbolic link of user {}", link.display(), name_of(*owner)),
            "rekindle follows only links of root and of the job's user: if the link is right, give it to root \
            (`chown -h root LINK`); if it is not, put the original folder or file in its place"
                .into(),
        ),
        _ => return None,
    };
    Some(Difference::new(Severity::Fatal, format!("{WHAT}{}", file.path.display()), image, here).advise(advice))
}

fn difference(file: &MappedFile, now: &FileHere) -> Option<Difference> {
    let (then, now) = match now {
        // Reported by `foreign`.
        FileHere::Link { .. } => return None,
        FileHere::Unknown => return None,
        FileHere::Missing if file.copy.is_some() => return None,
        FileHere::Missing => ("it".to_string(), "no file of that name".to_string()),
        FileHere::NotAFile => ("a file".into(), "something else of that name".into()),
        FileHere::File { size, .. } if *size != file.size => {
            (format!("{} bytes", file.size), format!("one of {size} bytes"))
        }
        FileHere::File { mode, .. } if file.mode.is_some_and(|then| then != *mode) => {
            let then = file.mode.unwrap_or_default();
            (format!("mode {:o}", then & 0o7777), format!("mode {:o}", mode & 0o7777))
        }
        FileHere::File { build_id, .. } => match (&file.build_id, build_id) {
            (Some(then), Some(now)) if then != now => (format!("build {then}"), format!("build {now}")),
            _ => return None,
        },
    };
    let difference = Difference::new(Severity::Fatal, format!("{WHAT}{}", file.path.display()), then, now);
    Some(difference.advise("the job has it mapped or open: restore exactly this file, with its mode"))
}

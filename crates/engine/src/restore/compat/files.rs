//! Programs, libraries and data that the job has mapped or open for reading.
//!
//! CRIU refuses a file with another size, another mode or, for ELF files, another build-id (`validate_file` in
//! criu/files-reg.c). It is right to do so: the job has addresses in it.

use super::{Difference, FileHere, Here, Severity};
use rekindle_store::Manifest;
use rekindle_store::manifest::MappedFile;

/// Prefix of [`Difference::what`] for differences of files.
pub(super) const WHAT: &str = "file ";

pub(super) fn compare(manifest: &Manifest, here: &Here) -> Vec<Difference> {
    let found = manifest.mapped_files.iter().filter_map(|file| Some((file, here.files.get(file.path.as_path())?)));
    found.filter_map(|(file, now)| difference(file, now)).collect()
}

fn difference(file: &MappedFile, now: &FileHere) -> Option<Difference> {
    let (then, now) = match now {
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

//! Checks that an image is still what was published. Reads every byte of a loose image. Of a packed one it reads the
//! chunk map and the indexes of the packs, and their content on request ([`Image::verify_content`], [`check_packs`]).

mod content;
mod packed;

use std::collections::HashMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::chunk::map;
use super::file_error::{Failing, is_failing};
use super::files::{self, Kind};
use super::id::ImageId;
use super::image::{Damage, DamageKind, Form, Image, Place, State};
use super::manifest::{self, Manifest, Part};
use super::{mark, tags};
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

pub use content::{PackReport, PacksReport, Share, check_packs};

/// What [`Image::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The image.
    pub image: ImageId,
    /// The copy that was checked. An image in memory has no hashes yet: only the sizes of its parts can be checked.
    pub place: Place,
    /// The problem of the manifest; the parts are unknown then.
    pub manifest: Option<Damage>,
    /// Every part, and every unexpected file, by path.
    pub parts: Vec<PartReport>,
}

impl Report {
    /// Whether the image is exactly what was published.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        self.manifest.is_none() && self.problems().next().is_none()
    }

    /// Whether something differs from what was published, and is not only unreadable: content that the disk cannot read
    /// may be intact.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        let manifest = self.manifest.as_ref().is_some_and(|damage| damage.kind != DamageKind::Unreadable);
        manifest || self.problems().any(|part| !matches!(part.finding, Finding::Unreadable { .. }))
    }

    /// The parts with a problem.
    pub fn problems(&self) -> impl Iterator<Item = &PartReport> {
        self.parts.iter().filter(|part| part.finding != Finding::Ok)
    }
}

/// The result for one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PartReport {
    /// Path relative to the folder of the image.
    pub(crate) path: PathBuf,
    /// What was found.
    pub(crate) finding: Finding,
}

/// The finding on a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Finding {
    /// Size and hash match the manifest.
    Ok,
    /// It does not exist.
    Missing,
    /// It was cut or has grown.
    WrongSize {
        /// Size in the manifest, in bytes.
        expected: u64,
        /// Size on the disk, in bytes.
        found: u64,
    },
    /// Its content differs from what was written.
    WrongHash,
    /// It cannot be read, so its content is unknown.
    Unreadable {
        /// The reason in words.
        why: String,
    },
    /// It is not in the manifest.
    Extra,
    /// Some of it is in no pack, or is damaged.
    Chunks {
        /// Number of such chunks.
        count: u64,
        /// Offset of the first of them in the part, in bytes.
        offset: u64,
        /// The problem of that one.
        why: String,
    },
    /// It was read, and cannot be used.
    Broken {
        /// The reason in words.
        why: String,
    },
}

impl std::fmt::Display for PartReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.finding)
    }
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Finding::Ok => f.pad("ok"),
            Finding::Missing => f.pad("missing"),
            Finding::WrongSize { expected, found } => write!(f, "wrong size: {found} bytes instead of {expected}"),
            Finding::WrongHash => f.pad("wrong hash"),
            Finding::Unreadable { why } => write!(f, "unreadable: {why}"),
            Finding::Extra => f.pad("not in the manifest"),
            Finding::Chunks { count, offset, why } => {
                write!(f, "{count} chunks cannot be read, the first at byte {offset}: {why}")
            }
            Finding::Broken { why } => write!(f, "broken: {why}"),
        }
    }
}

impl Image {
    /// Reads the manifest again and every file, on several threads. For an image in memory, whose parts have no hash
    /// yet, only the sizes are checked; for a packed one, whether the packs have all of it. Damage is part of the
    /// result, never an error.
    #[must_use]
    pub fn verify(&self) -> Report {
        let before = self.look_again();
        let report = before.verify_once();
        // Its plain files were removed because it was packed meanwhile: that is no damage.
        let packed = || before.form() == Form::Loose && before.look_again().form() == Form::Packed;
        if report.is_sound() || !packed() { report } else { self.look_again().verify_once() }
    }

    fn verify_once(&self) -> Report {
        let now = self;
        let manifest = match &now.state {
            State::Good(manifest) | State::Bad { manifest, .. } => manifest,
            State::Damaged { why } => {
                return Report { image: self.id, place: self.place, manifest: Some(why.clone()), parts: Vec::new() };
            }
        };
        let (mut there, mut parts) = match files::walk(&self.dir) {
            Ok(entries) => (entries.into_iter().map(|e| (e.relative, e.kind)).collect::<HashMap<_, _>>(), Vec::new()),
            Err((path, source)) => {
                // The parts are still checked, one by one; those below that folder are unreadable or missing.
                let path = path.strip_prefix(&self.dir).unwrap_or(&path).to_owned();
                (HashMap::new(), vec![PartReport { path, finding: Finding::Unreadable { why: source.to_string() } }])
            }
        };
        if manifest.chunks.is_none() {
            for part in &manifest.parts {
                there.remove(Path::new(part.path.as_str()));
            }
        }
        let extra = there.into_iter().filter(|(path, kind)| {
            *kind != Kind::Folder && !is_ours(path) && !(self.is_staged() && path.starts_with("spool"))
        });
        parts.extend(extra.map(|(path, _)| PartReport { path, finding: Finding::Extra }));
        parts.extend(match manifest.chunks {
            Some(_) => packed::check(now, manifest),
            None => check_all(&self.dir, manifest),
        });
        parts.sort_by(|a, b| a.path.cmp(&b.path));
        Report { image: self.id, place: self.place, manifest: None, parts }
    }
}

fn check_all(dir: &Beneath, manifest: &Manifest) -> Vec<PartReport> {
    let sized = manifest.parts.iter().map(|part| (part, part.size)).collect();
    let look = |part: &Part| {
        Ok::<_, Infallible>(PartReport { path: PathBuf::from(part.path.as_str()), finding: check(dir, part) })
    };
    let Ok(checked) = files::in_parallel(sized, files::MAX_THREADS, look);
    checked
}

/// Whether the file is ours: the manifest, the chunk map, a mark, tags, or a leftover of a crash while writing one of
/// the last two.
fn is_ours(path: &Path) -> bool {
    let Some(text) = path.to_str() else { return false };
    let in_work = |name: &str| text.starts_with(&format!("{}{name}-", durable::TEMP_PREFIX));
    [manifest::FILE_NAME, map::FILE_NAME].contains(&text)
        || [mark::FILE_NAME, tags::FILE_NAME].iter().any(|name| text == *name || in_work(name))
}

fn check(dir: &Beneath, part: &Part) -> Finding {
    let unreadable = |error: std::io::Error| {
        let why = if is_failing(&error) { format!("{error}{}", Failing(&error)) } else { error.to_string() };
        Finding::Unreadable { why }
    };
    let file = match part.path.open(dir) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Finding::Missing,
        Err(error) => return unreadable(error),
    };
    match file.metadata() {
        Err(error) => return unreadable(error),
        Ok(meta) if meta.len() != part.size => {
            return Finding::WrongSize { expected: part.size, found: meta.len() };
        }
        Ok(_) => {}
    }
    let Some(expected) = part.blake3 else { return Finding::Ok };
    match files::hash(&file) {
        Err(error) => unreadable(error),
        Ok((_, hash)) if hash != expected => Finding::WrongHash,
        Ok(_) => Finding::Ok,
    }
}

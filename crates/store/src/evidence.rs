//! `evidence.json` in the job's folder: what has shown that an image can be restored, a rehearsal or a restore, or that it
//! probably cannot.
//!
//! - Other than [`super::proven`], it says nothing about how the job has lived, and a lasting job says nothing about it.
//! - Evidence is never taken back: a restore is more than a rehearsal. An image that turns out bad has a mark besides.
//! - With a CRIU, kernel or driver that this release was not tried with, evidence counts only once one image has been
//!   rehearsed or restored under it ([`Shown::awaits`]). Retention keeps the images that had evidence before
//!   ([`Shown::recorded`]): the old version may be installed again.
//! - Retention keeps the newest image with evidence until a newer one has some ([`super::retention`]).
//! - It is not part of the manifest, which is signed and final when the image is published.
//! - An image that is not named there was only taken, including those of an older rekindle. A file that cannot be parsed is
//!   no evidence, and the next evidence replaces it. A file that cannot be read is an error: then nothing is removed.
//! - After a power cut there is the old file or the new one.

use std::collections::{BTreeMap, BTreeSet};
use std::{fmt, io};

use serde::{Deserialize, Serialize};

use super::error::{Error, Result};
use super::folder::JobFolder;
use super::id::ImageId;
use super::lock::WriterLock;
use rekindle_os::beneath::Beneath;
use rekindle_os::durable;

const FILE_NAME: &str = "evidence.json";
const VERSION: u32 = 1;
/// Maximum size: an entry has some 50 bytes, and only existing images are in the file.
const MAX_BYTES: u64 = 16 << 20;

/// What has shown that an image can be restored. More evidence is greater.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Evidence {
    /// Nothing yet: the snapshot succeeded.
    #[default]
    Taken,
    /// Nothing, and two rehearsals of it failed. It has no mark: a restart tries it, and then older ones.
    Refused,
    /// A rehearsal made every process of it on a machine that had the store, and none of them ran.
    Rehearsed,
    /// The job ran from it.
    Restored,
}

impl Evidence {
    /// Whether the image was restored once, by a rehearsal or by a restart.
    #[must_use]
    pub fn is_there(self) -> bool {
        self > Evidence::Refused
    }

    /// The word for it in tables and in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Evidence::Taken => "taken",
            Evidence::Refused => "refused",
            Evidence::Rehearsed => "rehearsed",
            Evidence::Restored => "restored",
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// The evidence about the images of a job.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Shown {
    /// Some of these may not exist any more.
    images: BTreeMap<ImageId, Evidence>,
    awaits: Option<String>,
    worked: Option<String>,
}

impl Shown {
    /// The evidence that counts for this image.
    #[must_use]
    pub fn of(&self, id: &ImageId) -> Evidence {
        let recorded = self.recorded(id);
        if self.awaits.is_some() && recorded.is_there() { Evidence::Taken } else { recorded }
    }

    /// The evidence for this image under whatever CRIU, kernel and driver.
    #[must_use]
    pub fn recorded(&self, id: &ImageId) -> Evidence {
        self.images.get(id).copied().unwrap_or_default()
    }

    /// The images that were rehearsed or restored under whatever CRIU, kernel and driver.
    #[must_use]
    pub fn with_evidence(&self) -> BTreeSet<ImageId> {
        self.images.iter().filter(|(_, evidence)| evidence.is_there()).map(|(id, _)| *id).collect()
    }

    /// The versions under which nothing has been rehearsed or restored yet, in words.
    #[must_use]
    pub fn awaits(&self) -> Option<&str> {
        self.awaits.as_deref()
    }

    fn add(&mut self, id: ImageId, evidence: Evidence) {
        let known = self.images.entry(id).or_default();
        *known = evidence.max(*known);
        if !evidence.is_there() {
            return;
        }
        if let Some(awaited) = self.awaits.take() {
            self.worked = Some(awaited);
        }
    }

    fn under(&mut self, untried: Option<&str>) {
        self.awaits = untried.filter(|untried| self.worked.as_deref() != Some(*untried)).map(str::to_owned);
    }
}

#[derive(Serialize, Deserialize)]
struct OnDisk {
    version: u32,
    images: BTreeMap<ImageId, Evidence>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    awaits: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    worked: Option<String>,
}

impl JobFolder {
    /// What has shown that the images can be restored.
    ///
    /// # Errors
    /// [`Error::Read`].
    pub fn evidence(&self) -> Result<Shown> {
        let path = self.evidence_file();
        let bytes = match path.content(MAX_BYTES) {
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::FileTooLarge) => {
                return Ok(Shown::default());
            }
            bytes => bytes.map_err(|source| Error::Read { path: path.path().to_owned(), source })?,
        };
        Ok(match serde_json::from_slice(&bytes) {
            Ok(OnDisk { version: VERSION, images, awaits, worked }) => Shown { images, awaits, worked },
            Ok(_) | Err(_) => Shown::default(),
        })
    }

    /// Records durably what has shown that these can be restored. Images that do not exist any more are removed from the
    /// file.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Read`], [`Error::Write`].
    pub fn note_evidence(&self, lock: &WriterLock, found: &BTreeMap<ImageId, Evidence>) -> Result<()> {
        self.change_evidence(lock, |shown| found.iter().for_each(|(id, evidence)| shown.add(*id, *evidence)))
    }

    /// Records durably which versions this release was not tried with, in words; `None` if there are none.
    ///
    /// # Errors
    /// [`Error::WrongLock`], [`Error::Read`], [`Error::Write`].
    pub fn note_untried(&self, lock: &WriterLock, untried: Option<&str>) -> Result<()> {
        self.change_evidence(lock, |shown| shown.under(untried))
    }

    fn change_evidence(&self, lock: &WriterLock, change: impl FnOnce(&mut Shown)) -> Result<()> {
        self.check_lock(lock)?;
        let before = self.evidence()?;
        let mut after = before.clone();
        change(&mut after);
        if after == before {
            return Ok(());
        }
        let there: BTreeSet<ImageId> = self.copies()?.into_iter().map(|image| image.id).collect();
        after.images.retain(|id, _| there.contains(id));
        let path = self.evidence_file();
        let failed = |source| Error::Write { path: path.path().to_owned(), source };
        let Shown { images, awaits, worked } = after;
        let on_disk = OnDisk { version: VERSION, images, awaits, worked };
        let bytes = serde_json::to_vec(&on_disk).map_err(io::Error::from).map_err(failed)?;
        durable::write_file(&path, &bytes, 0o600).map_err(failed)
    }

    fn evidence_file(&self) -> Beneath {
        self.dir().join(FILE_NAME)
    }
}

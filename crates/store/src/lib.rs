//! The images of all jobs: one folder per job, one image per snapshot.
//!
//! ```text
//! STORE/  0700
//!   JOB/  0700
//!     lock  job.json  state.json  log/  bin/
//!     slots/                           images on the disk that are not in the store yet (see [`staging::disk`])
//!     images/
//!       000042-20261120T132105Z/       an image: manifest.json, where there are any bad.json and tags.json; and parts at any
//!                                      depth (loose) or the chunk map (packed)
//!       .tmp-000043-20261120T132205Z/  a draft
//!       .del-000039-20261120T131805Z/  on its way out
//!     packs/                           the chunks of packed images (see [`pack`])
//!   .del-JOB/                          a job on its way out
//! ```
//!
//! docs/internals/format.md describes every byte. This crate owns everything below `STORE`, except the content of `log/`, `bin/`
//! and `state.json`. Invariants:
//!
//! - A folder with the name of an image was published completely (persist.rs has the protocol). Its files never change
//!   after that; only `bad.json` and `tags.json` are added and removed.
//! - Each job has one writer, ensured by a lock; readers need no lock.
//! - Anything unreadable is an error, or is reported as unreadable. It is never treated as empty, and nothing is
//!   deleted because of it.
//! - Retention ([`retention`]) never removes the newest good image, and nothing removes a pinned image.
//!
//! After a power cut there are complete images and possibly leftovers, whose names begin with a dot. The next start
//! removes them.

pub mod chunk;
mod draft;
mod error;
mod evidence;
mod file_error;
mod files;
mod folder;
mod folders;
pub mod format;
pub mod gc;
pub mod heal;
mod hex;
mod holder;
mod id;
pub mod image;
mod known;
mod links;
mod lock;
pub mod manifest;
pub mod mark;
mod names;
pub mod options;
pub mod pack;
mod paths;
pub mod persist;
mod proven;
pub mod record;
mod remove;
mod remove_job;
pub mod repair;
pub mod retention;
mod rights;
mod seen;
mod select;
pub mod staging;
mod store;
mod tag;
mod tags;
pub mod take;
mod trust;
pub mod unpack;
mod verify;

pub use error::{Error, Result};
pub use evidence::{Evidence, Shown};
pub use file_error::{FileError, failed};
pub use folder::JobFolder;
pub use holder::{HEARTBEAT, Holder};
pub use id::{ImageId, JobName, NameError};
pub use image::{Damage, DamageKind, Form, Image, Place, State};
pub use known::Known;
pub use lock::{Hold, ReleaseAtExit, Until, Waiting, Writer, WriterLock};
pub use manifest::Manifest;
pub use mark::{BadMark, BadWhy};
pub use paths::{GroupPath, JobPath, PartPath, PathError};
pub use record::{JobRecord, Outcome};
pub use remove_job::Pinned;
pub use seen::Seen;
pub use select::nth_newest;
pub use store::{Access, Store};
pub use tag::{Change, LATEST, Tag, Tags};
pub use trust::{Trust, Unsigned, Untrusted};
pub use verify::{Finding, PackReport, PacksReport, Report, Share, check_packs};

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::manifest as sample_manifest;

//! What the kernel has of a job's processes, read by our own means: recorded when an image is taken, read again when a
//! restore has made the processes, compared, and put back where the kernel lets us.
//!
//! CRIU's success is not believed: what it loses, it loses in silence. One table ([`table`]) says for each item how it is
//! compared and what a difference means.
//!
//! ```text
//!  dump     all tasks are stopped: Raw::read ----> Record ----> a part of the image
//!  restore  all tasks are made, none has run: Raw::read, compare, put_back, compare again
//! ```
//!
//! Nothing here runs code in a process or changes one, but for [`put_back()`].

mod advice;
mod answers;
mod compare;
mod format;
mod inotify;
mod multicast;
mod policy;
mod put_back;
mod read;
mod record;
mod settings;
pub mod signals;
pub mod table;

pub use advice::Advice;
pub use answers::Answers;
pub use compare::{Difference, compare};
pub use format::{Damaged, FILE_NAME, MAX_BYTES, VERSION};
pub use put_back::{Rights, put_back};
pub use read::Raw;
pub use record::{Descriptor, Items, Mapping, Process, Record, Thread};
pub use settings::setting;

//! Copies of a job's images in an object store, outside this machine.
//!
//! This crate owns everything below `PATH/JOB` of the address (layout.rs), where it writes and removes only packs,
//! indexes, and files of images. The only asynchronous code for it is in client.rs; its callers
//! block.
//!
//! An image is replicated when its manifest is there, which is sent last:
//!
//! 1. a listing shows which of the needed packs are missing, have another size, or are marked for removal; those are
//!    looked up by their names, because a listing may lag behind, and their marks are removed
//! 2. what is not there is sent, each pack as a whole or not at all, each followed by its index
//! 3. the listing is repeated, and what somebody removed in the meantime is sent again
//! 4. the chunk map is sent
//! 5. the manifest is sent
//! 6. `newest.json` names the image, for those to whom a listing does not show it yet
//!
//! An image is removed in the reverse order: manifest, map, and then, an hour after they were marked, the packs that no
//! other image in the replica needs (retain.rs). If either is interrupted, by a network failure or a power cut, packs without an image remain: the next upload
//! uses them, or the next removal removes them. Nothing that was sent is sent again, except the pack in progress.
//!
//! Two machines that write images of one job to one address are not supported: each would remove the other's images by
//! its own count. They do not damage the images that stay, as long as their clocks differ by less than an hour: names
//! of packs are random, and a pack without an image is left alone for an hour, so that its image can follow.
//!
//! Everything that is fetched is checked as if it came from a stranger: manifests, maps and indexes by their own
//! hashes, the content chunk by chunk (read.rs, fetch.rs).

mod chunks;
mod client;
mod connect;
mod cover;
mod environment;
mod error;
mod fetch;
mod folder;
mod layout;
mod read;
mod read_mark;
mod replica;
mod retain;
mod send;
mod spans;
mod upload;
mod url;

pub use chunks::OnDemand;
pub use client::Cancelled;
pub use connect::{Patience, reads_variable};
pub use error::{Error, Failure, Result};
pub use replica::{RemoteImage, Replica};
pub use retain::{Keep, Removed};
pub use upload::Uploaded;
pub use url::ReplicaUrl;

#[cfg(test)]
mod tests;

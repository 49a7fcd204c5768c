//! Copies of a job's images in an object store, off this machine.
//!
//! It owns what is below `PATH/JOB` of the address (layout.rs), of which it writes and removes nothing but packs, indexes,
//! and files of images. It is the only part of the program that speaks with a network, and the only one with futures
//! inside (client.rs); what calls it waits.
//!
//! An image is replicated when its manifest is there; that comes last:
//!
//! 1. the listing tells which of the packs that it needs are missing, or have another size;
//! 2. those are sent, each whole or not at all, and behind each its index;
//! 3. the chunk map is sent;
//! 4. it is listed again, and what somebody has removed meanwhile is sent again;
//! 5. the manifest is sent.
//!
//! An image is removed in the other order: manifest, map, and then the packs that no other image there needs. When either
//! stops in the middle, by a loss of the network or of power, there are packs without an image: the next upload uses them,
//! or the next removal takes them. Nothing of what was sent is sent again, but the pack that was on its way.
//!
//! Two machines that write images of one job to one address are not supported: each would remove the images of the other
//! by its own count. They harm no image that stays, as long as their clocks agree within an hour: names of packs are random, and a
//! pack that no image names is left alone for an hour, in which the image that it was sent for may come.
//!
//! What comes back is checked as what a stranger sent: manifests, maps and indexes by their own hashes, and the content chunk by chunk
//! (fetch.rs).

mod client;
mod connect;
mod error;
mod layout;
mod send;

pub use error::{Error, Failure, Result};

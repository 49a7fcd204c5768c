//! Data inside the job that was on its way while CRIU dumped one task after the other.
//!
//! The image can lack data that a task has received since CRIU dumped it ([`image::behind`]). The kernel still has it, as
//! long as the tasks are frozen: it is added to the image.

use std::collections::HashMap;

use rekindle_criu::image::{self, Behind};
use rekindle_os::beneath::Beneath;
use rekindle_os::{process, tcp_repair};

/// Why a connection could not be completed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Image(#[from] image::Error),
    /// It was closed for writing since, or has urgent data: its state in the image is an old one.
    #[error("data of the job was on its way from {} to {} while its processes were dumped", .0.remote, .0.local)]
    OnItsWay(Behind),
}

/// Completes the connections inside the image; called while all tasks are frozen and their connections in repair mode. Returns
/// how many lacked data. `tree` are pids as we see them.
pub(crate) fn complete(criu_dir: &Beneath, tree: &[i32]) -> Result<usize, Error> {
    let behind = image::behind(criu_dir)?;
    if behind.is_empty() {
        return Ok(0);
    }
    let mut places: HashMap<u64, (i32, i32)> = HashMap::new();
    for pid in tree {
        let sockets =
            process::descriptors(*pid).filter_map(|(number, target)| Some((process::socket(&target)?, number)));
        places.extend(sockets.map(|(inode, number)| (inode, (*pid, number))));
    }
    for end in &behind {
        let queue = places.get(&u64::from(end.inode)).and_then(|place| queue(*place, end));
        if !queue.map_or(Ok(false), |queue| image::complete(criu_dir, end, &queue))? {
            return Err(Error::OnItsWay(*end));
        }
    }
    Ok(behind.len())
}

fn queue((pid, number): (i32, i32), end: &Behind) -> Option<Vec<u8>> {
    let length = usize::try_from(end.received.checked_add(end.missing)?).ok()?;
    let socket = process::fetch_descriptor(&process::open_pidfd(pid).ok()?, number).ok()?;
    tcp_repair::received(&socket, length).ok()
}

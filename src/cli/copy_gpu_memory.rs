//! `rekindle copy-gpu-memory`: started by a supervisor to copy memory that stays on the GPU. Its standard input is the
//! socket for requests.

use std::os::fd::AsFd;

use super::Exit;
use rekindle_cuda::copier;
use rekindle_os::descriptors;

pub(super) fn copy() -> anyhow::Result<Exit> {
    // It has a descriptor for each piece of memory that it hands to a restored job. Without room, that job is filled again.
    if let Err(error) = descriptors::raise() {
        tracing::debug!("cannot raise the limit of descriptors: {error}");
    }
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    copier::serve(&socket).map_err(anyhow::Error::msg)?;
    Ok(Exit::Success)
}

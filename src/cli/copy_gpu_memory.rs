//! `rekindle copy-gpu-memory`: started by a supervisor to copy memory that stays on the GPU. Its standard input is the
//! socket for requests.

use std::os::fd::AsFd;

use super::Exit;
use rekindle_cuda::copier;

pub(super) fn copy() -> anyhow::Result<Exit> {
    let socket = std::io::stdin().as_fd().try_clone_to_owned()?;
    copier::serve(&socket).map_err(anyhow::Error::msg)?;
    Ok(Exit::Success)
}

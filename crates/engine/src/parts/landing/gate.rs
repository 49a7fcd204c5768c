//! The gate before cuInit: while it is closed, no process of the job becomes a CUDA process.
//!
//! A process that is in cuInit must not be locked (`native/preload/src/init.rs`), and each one that begins between the look and
//! the lock costs another attempt. So the gate is closed before the look, and opened when all are unlocked. It is a symbolic
//! link in the folder of landing files, which the job's user can see and not remove. Without that folder, and for processes
//! without the interposer, there is no gate.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use rekindle_cuda::INIT_CLOSED;
use rekindle_store::staging::Area;

/// A closed gate. It opens when this is dropped.
#[derive(Debug)]
pub(crate) struct Gate(PathBuf);

impl Gate {
    /// Closes it, if there is one.
    pub(crate) fn close(area: &Area) -> Option<Gate> {
        let path = area.landing_dir().join(INIT_CLOSED).path().to_owned();
        // Of a supervisor that died, if it exists: it is as good.
        match symlink("1", &path) {
            Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
                tracing::debug!("cannot hold processes back that begin to use CUDA: {error}");
                None
            }
            _ => Some(Gate(path)),
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

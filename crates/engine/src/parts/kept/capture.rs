//! Copies memory that stays on the GPU into the image, while CRIU dumps.
//!
//! The file is made while the job runs, as large as the memory is then, and registered with the driver. The copy begins as
//! soon as the processes have released the memory. Before they get it again and run, all of it must be in the file, or in room
//! on the GPU, from which the rest is copied while the job runs.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;

use rekindle_base::chain;
use rekindle_cuda::GpuUuid;
use rekindle_cuda::copier::{self, Copier, Copying, Reuse, Way};
use rekindle_cuda::sharing::Staying;
use rekindle_os::{cgroup, pages};
use rekindle_store::manifest::{Kept, KeptPiece};
use rekindle_store::staging::Filling;

/// Why memory cannot be copied.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no room for it.
    #[error("cannot make room for {bytes} bytes of GPU memory")]
    Room {
        /// The size.
        bytes: u64,
        /// The kernel's answer.
        #[source]
        source: io::Error,
    },
    /// The process that copies failed.
    #[error(transparent)]
    Copier(#[from] copier::Error),
}

/// The file for the memory.
#[derive(Debug)]
pub(crate) struct Room<'a> {
    copier: &'a Copier,
    file: File,
    bytes: u64,
    /// Bytes of memory that must stay free (`snapshot.memory-reserve`).
    reserve: u64,
    reuse: Reuse,
}

impl<'a> Room<'a> {
    /// Makes room for `bytes`, and makes the process that copies ready.
    pub(crate) fn make(
        copier: &'a Copier,
        slot: &Filling,
        bytes: u64,
        gpus: &[GpuUuid],
        reserve: u64,
        reuse: Reuse,
    ) -> Result<Room<'a>, Error> {
        if let Some(error) = copier.prepare(gpus, reuse.full_every > 1)? {
            tracing::warn!(
                "the GPU cannot tell which memory has changed, so all of it is copied in each snapshot: {}",
                chain(&error)
            );
        }
        let kept = slot.kept_file();
        let failed = |source| Error::Room { bytes, source };
        let file = kept.change_or_create(0o600).map_err(failed)?;
        let mut room = Room { copier, file, bytes: 0, reserve, reuse };
        if let Err(error) = room.grow(bytes) {
            // The driver copies that memory now, and needs the room.
            let _ = kept.remove_file();
            copier.forget();
            return Err(error);
        }
        Ok(room)
    }

    /// Makes the file as long as that. A registered page must not be cut off, so the process that copies gives it up
    /// first.
    fn grow(&mut self, bytes: u64) -> Result<(), Error> {
        let failed = |source| Error::Room { bytes, source };
        admit(&self.file, bytes, self.reserve).map_err(failed)?;
        if self.file.metadata().map_err(failed)?.size() > bytes {
            self.copier.file(&self.file, bytes)?;
            self.file.set_len(bytes).map_err(failed)?;
        }
        pages::make_room(&self.file, bytes).map_err(failed)?;
        let registered = self.copier.file(&self.file, bytes)?;
        if registered < bytes {
            tracing::debug!(
                registered,
                bytes,
                "GPU memory is copied more slowly: the driver does not register all of the file"
            );
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Begins to copy all of it, and describes where it will be.
    pub(crate) fn begin(&mut self, staying: &[Staying]) -> Result<(Copy<'a>, Kept), Error> {
        let pieces = laid_out(staying);
        let bytes = pieces.last().map_or(0, |piece| piece.offset.saturating_add(piece.bytes));
        if bytes > self.bytes {
            // The job has allocated more since.
            tracing::debug!(bytes, prepared = self.bytes, "the file for GPU memory grows during the freeze");
            self.grow(bytes)?;
        }
        let wanted = pieces.iter().filter_map(|piece| {
            let is_it = |one: &&Staying| (one.pid, one.index) == (piece.pid, piece.index);
            Some((piece.offset, staying.iter().find(is_it)?))
        });
        let copying = self.copier.begin(Way::Out, &self.file, self.reuse, wanted)?;
        Ok((Copy(copying), Kept { part: Filling::kept_part(), pieces }))
    }
}

/// A copy of all of it under way.
#[derive(Debug)]
pub(crate) struct Copy<'a>(Copying<'a>);

impl Copy<'_> {
    /// Before the driver restores the job.
    pub(crate) fn pause(&self) {
        self.0.pause();
    }

    /// The job runs.
    pub(crate) fn resume(&mut self) {
        self.0.resume();
    }

    /// Waits until the processes may have the memory again.
    pub(crate) fn leave(&mut self, cancelled: &dyn Fn() -> bool) -> Result<(), Error> {
        let left = self.0.leave(cancelled)?;
        if left.bytes > 0 {
            tracing::debug!(
                bytes = left.bytes,
                room = left.room,
                "the rest of the GPU memory is copied while the job runs"
            );
        }
        Ok(())
    }

    /// Waits for its end. Returns the GPU of each piece.
    pub(crate) fn finish(self, cancelled: &dyn Fn() -> bool) -> Result<Vec<GpuUuid>, Error> {
        let copied = self.0.finish(cancelled)?;
        let (bytes, same, took) = (copied.bytes, copied.same, copied.took);
        tracing::debug!(bytes, same, took = ?took, "copied GPU memory that stayed on the GPU");
        Ok(copied.pieces.iter().map(|piece| piece.gpu).collect())
    }
}

/// Refuses a size that the machine's memory has no room for. The job names it, and a tmpfs as large as the memory would take
/// all of it.
fn admit(file: &File, bytes: u64, reserve: u64) -> io::Result<()> {
    let more = bytes.saturating_sub(file.metadata()?.blocks().saturating_mul(512));
    let is_in_memory = pages::is_in_memory(file)?;
    match cgroup::memory_available().filter(|available| is_in_memory && more > available.saturating_sub(reserve)) {
        None => Ok(()),
        Some(_) => Err(io::Error::new(
            io::ErrorKind::StorageFull,
            "there is not enough free memory for it, with what must stay free (snapshot.memory-reserve): free some, or set \
             snapshot.staging = \"store\"",
        )),
    }
}

/// One after the other, by process and number.
fn laid_out(staying: &[Staying]) -> Vec<KeptPiece> {
    let piece = |one: &Staying| KeptPiece { pid: one.pid, index: one.index, offset: 0, bytes: one.bytes, gpu: None };
    let mut pieces: Vec<KeptPiece> = staying.iter().map(piece).collect();
    pieces.sort_unstable();
    let mut offset = 0;
    for piece in &mut pieces {
        piece.offset = offset;
        // The sizes are the job's words: nonsense is refused when it is copied.
        offset = offset.saturating_add(piece.bytes);
    }
    pieces
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn a_size_that_memory_has_no_room_for_takes_none() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        let mut room = Room { copier: &Copier::default(), file, bytes: 0, reserve: 0, reuse: Reuse::NOTHING };
        // The second one fits into a tmpfs of any size, and its pages are not listed one by one.
        for bytes in [u64::MAX, 1 << 61, 1 << 45] {
            let error = room.grow(bytes).unwrap_err();
            assert!(matches!(error, Error::Room { .. }), "{error}");
            assert_eq!(room.file.metadata().unwrap().blocks(), 0);
        }
        // On the disk it is the file system that has room or not.
        admit(&tempfile::tempfile_in("/var/tmp").unwrap(), 1 << 45, 0).unwrap();
        // With what must stay free.
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        admit(&file, 1 << 20, 0).unwrap();
        assert_eq!(admit(&file, 1 << 20, u64::MAX).unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn pieces_are_beside_each_other_in_a_fixed_order() {
        let memory = || Arc::new(File::open("/dev/null").unwrap().into());
        let one = |pid, index, bytes| Staying { pid, index, bytes, memory: memory() };
        let pieces = laid_out(&[one(7, 1, 4), one(6, 9, 2), one(7, 0, 8)]);
        let all: Vec<_> = pieces.iter().map(|piece| (piece.pid, piece.index, piece.offset, piece.bytes)).collect();
        assert_eq!(all, [(6, 9, 0, 2), (7, 0, 2, 8), (7, 1, 10, 4)]);
        assert!(laid_out(&[]).is_empty());
    }
}

//! A thread that packs: takes a stretch, skips zeros and existing chunks, and packs the rest.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};

use super::Error;
use super::known::{Claim, Known};
use super::pace::Pace;
use super::reserve::Reserve;
use super::stretches::{Stretch, Stretches};
use crate::WriterLock;
use crate::chunk::chunk_id;
use crate::chunk::map::{self, Extent};
use crate::format::HEADER;
use crate::image::{Image, Place};
use crate::manifest::Manifest;
use crate::pack::{Making, PackWriter, Packs};
use rekindle_os::beneath::Beneath;
use rekindle_os::sparse;

/// Shared by all workers.
pub(super) struct Work<'a> {
    pub(super) image: &'a Image,
    pub(super) manifest: &'a Manifest,
    pub(super) packs: &'a Packs,
    pub(super) making: Making<'a>,
    pub(super) known: Known<'a>,
    pub(super) stretches: Mutex<Option<Stretches>>,
    pub(super) pace: Pace<'a>,
    pub(super) reserve: Reserve,
    pub(super) lock: &'a WriterLock,
}

/// The result of a stretch.
pub(super) struct Packed {
    pub(super) number: usize,
    pub(super) part: usize,
    pub(super) extents: Vec<Extent>,
}

impl Work<'_> {
    /// Packs stretches until there are no more, or a worker failed.
    pub(super) fn run(&self) -> Result<Vec<Packed>, Error> {
        let done = self.pack_all();
        if done.is_err() {
            *self.queue() = None;
        }
        done
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Option<Stretches>> {
        self.stretches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Stretch> {
        self.queue().as_mut().and_then(Iterator::next)
    }

    fn pack_all(&self) -> Result<Vec<Packed>, Error> {
        let mut writer = PackWriter::new(self.packs, self.making)?;
        let mut second = None;
        let mut done = Vec::new();
        while let Some(stretch) = self.next() {
            let extents = self.pack(&stretch, &mut writer, &mut second)?;
            done.push(Packed { number: stretch.number, part: stretch.part, extents });
        }
        // The packs count only when all workers have succeeded, but they are complete, and the next try uses them.
        self.lock.still_held()?;
        writer.finish()?;
        second.map(PackWriter::finish).transpose()?;
        Ok(done)
    }

    /// Packs a stretch. Second copies go to separate packs, which the replica does not need.
    fn pack<'w>(
        &'w self,
        stretch: &Stretch,
        writer: &mut PackWriter<'w>,
        second: &mut Option<PackWriter<'w>>,
    ) -> Result<Vec<Extent>, Error> {
        let path = self.part_path(stretch.part);
        let failed = |source| self.failed(&path, source);
        let file = match self.image.place {
            // What is open here lasts when the memory is unmounted, but the image does not: this looks at the path again.
            Place::Staged => path.again().and_then(|path| path.read()),
            Place::Slot | Place::Stored => path.read(),
        };
        let file = file.map_err(failed)?;
        let size = file.metadata().map_err(failed)?.len();
        let mut extents = Vec::with_capacity(stretch.pieces.len() + 1);
        if stretch.zeros > 0 {
            map::push(&mut extents, Extent::Zero { len: stretch.zeros });
            self.pace.progress.add(usize::try_from(stretch.zeros).unwrap_or(usize::MAX));
        }
        for (offset, len) in &stretch.pieces {
            self.pace.check().map_err(failed)?;
            self.lock.still_held()?;
            let zero = Extent::Zero { len: u64::try_from(*len).unwrap_or(0) };
            // The last piece may end after the data. A file that became shorter is an error below.
            let end = offset.saturating_add(u64::try_from(*len).unwrap_or(u64::MAX));
            if end <= size && sparse::first_data(&file, *offset, end).map_err(failed)?.is_none() {
                map::push(&mut extents, zero);
                self.pace.progress.add(*len);
                continue;
            }
            let room = writer.room(*len);
            file.read_exact_at(room, *offset).map_err(failed)?;
            if is_zero(room) {
                map::push(&mut extents, zero);
            } else {
                let id = chunk_id(self.making.key, room);
                let written = match self.known.claim(&id)? {
                    Claim::None => 0,
                    Claim::First => writer.keep(id, *len)?,
                    // The next image tries again.
                    Claim::Second if !self.reserve.has_spare(HEADER + *len) => 0,
                    Claim::Second => {
                        if second.is_none() {
                            *second = Some(PackWriter::new(self.packs, self.making)?);
                        }
                        let Some(copy) = second else { continue };
                        copy.room(*len).copy_from_slice(room);
                        let written = copy.keep(id, *len)?;
                        self.reserve.needed_less(HEADER + *len, written);
                        written
                    }
                };
                if written > 0 {
                    self.pace.wrote(written).map_err(failed)?;
                    self.reserve.wrote(written)?;
                }
                extents.push(Extent::Chunk { id, len: u32::try_from(*len).unwrap_or(0) });
            }
            self.pace.progress.add(*len);
        }
        if self.image.place != Place::Staged {
            // It was read once, and is not read again.
            let _ = posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        }
        Ok(extents)
    }

    fn part_path(&self, part: usize) -> Beneath {
        let name = self.manifest.parts.get(part).map_or("", |part| part.path.as_str());
        self.image.dir.join(name)
    }

    fn failed(&self, path: &Beneath, source: io::Error) -> Error {
        match (self.pace.cancelled)() {
            true => Error::Cancelled,
            false => Error::Copy { path: path.path().to_owned(), source },
        }
    }
}

/// Whether all bytes are zero. Other data mostly differs in its first byte; the rest is compared with memcmp(3).
fn is_zero(bytes: &[u8]) -> bool {
    let Some((first, rest)) = bytes.split_first() else { return true };
    *first == 0 && bytes.get(..rest.len()) == Some(rest)
}

#[cfg(test)]
mod tests {
    use super::is_zero;

    #[test]
    fn one_byte_that_is_not_zero_is_found_anywhere() {
        for len in [0, 1, 2, 63, 4096, 4097] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes));
            for place in 0..len {
                bytes[place] = 1;
                assert!(!is_zero(&bytes), "{place} of {len}");
                bytes[place] = 0;
            }
        }
        assert!(!is_zero(&[7; 4096]));
    }
}

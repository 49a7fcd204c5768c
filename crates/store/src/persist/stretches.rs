//! Divides the parts of an image into stretches of some tens of MiB, each for one thread: what one thread packs is
//! contiguous, and a restore reads it sequentially. Holes are passed over: a job creates exabytes of them with one call.

use std::fs::File;

use crate::chunk::Cutter;
use crate::chunk::cut::Cuts;
use crate::manifest::Part;
use rekindle_os::beneath::Beneath;

/// Approximate bytes of a stretch.
pub(super) const STRETCH: u64 = 32 << 20;

/// The unit of work of a thread: consecutive pieces of one part.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    /// Its index among all stretches.
    pub(super) number: usize,
    /// The number of the part.
    pub(super) part: usize,
    /// Zeros before the first piece, or before the end of the part.
    pub(super) zeros: u64,
    /// Offset and length of each piece.
    pub(super) pieces: Vec<(u64, usize)>,
}

/// Returns one stretch after the other. Its memory does not grow with the image.
pub(super) struct Stretches {
    cutter: Cutter,
    dir: Beneath,
    /// The parts that were not begun, in reverse order.
    parts: Vec<(usize, Part)>,
    open: Option<Open>,
    number: usize,
}

struct Open {
    part: usize,
    cuts: Cuts,
    /// None if it cannot be opened, which is an error for the thread that reads it.
    file: Option<File>,
}

impl Stretches {
    pub(super) fn new(dir: &Beneath, parts: &[Part]) -> Stretches {
        let parts = parts.iter().cloned().enumerate().rev().collect();
        Stretches { cutter: Cutter::new(dir), dir: dir.clone(), parts, open: None, number: 0 }
    }
}

impl Iterator for Stretches {
    type Item = Stretch;

    fn next(&mut self) -> Option<Stretch> {
        loop {
            let open = match &mut self.open {
                Some(open) => open,
                None => {
                    let (number, part) = self.parts.pop()?;
                    let file = part.path.open(&self.dir).ok();
                    let cuts = self.cutter.cuts(&part.path, part.size);
                    self.open.insert(Open { part: number, cuts, file })
                }
            };
            let (part, cuts) = (open.part, &mut open.cuts);
            // Where holes cannot be found, all is read.
            let zeros = open.file.as_ref().and_then(|file| cuts.skip_hole(file).ok()).unwrap_or(0);
            let mut pieces = Vec::new();
            let mut bytes = 0;
            while bytes < STRETCH {
                let Some(piece) = cuts.next() else { break };
                bytes += u64::try_from(piece.1).unwrap_or(u64::MAX);
                pieces.push(piece);
            }
            if cuts.are_over() {
                self.open = None;
            }
            if zeros > 0 || !pieces.is_empty() {
                self.number += 1;
                return Some(Stretch { number: self.number, part, zeros, pieces });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_every_part_is_in_one_stretch() {
        let dir = tempfile::tempdir().unwrap();
        let sizes = [0, 1, STRETCH, 3 * STRETCH + 1, 0, 5];
        let part = |(n, size): (usize, &u64)| Part { path: (&format!("p{n}")).into(), size: *size, blake3: None };
        let parts: Vec<Part> = sizes.iter().enumerate().map(part).collect();
        let stretches: Vec<Stretch> = Stretches::new(&crate::tests::beneath(dir.path()), &parts).collect();
        let mut ends = [0; 6];
        for (n, stretch) in stretches.iter().enumerate() {
            assert_eq!(stretch.number, n + 1);
            for (offset, len) in &stretch.pieces {
                assert_eq!(*offset, ends[stretch.part]);
                ends[stretch.part] += *len as u64;
            }
        }
        assert_eq!(ends, sizes);
        assert_eq!(stretches.len(), 1 + 1 + 4 + 1);
    }
}

//! What is in a file already, so that it need not be copied again.
//!
//! A slot of the staging area keeps its files: a copy overwrites the one of two snapshots ago, and the other slot has the one of
//! the snapshot before. Memory that has not changed since is in one of them. It is known by its names, BLAKE3 of each 256 KiB,
//! which the GPU computes ([`super::kernel`]).
//!
//! Invariants: the names of a file are known only if all of a copy into it succeeded in this process while the job could not
//! change its memory, and nothing was copied into it since. They are of files in memory, to which only this process writes. One
//! word of each 256 KiB is compared too, to notice pages that were replaced. The supervisor has all of it copied every few
//! snapshots, whatever the names say.

use super::kernel::{NAMED, Name};
use super::known::Known;
use super::mapped::{GRANULE, Mapped};

/// Names in one granule, which is copied or not.
const IN_GRANULE: usize = (GRANULE / NAMED) as usize;

/// What has to be done for a part of the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Need {
    /// Nothing: the file has it.
    Nothing,
    /// It is in another file, at this address.
    Elsewhere(usize),
    /// It is to be copied from the GPU.
    Copy,
}

/// A part of the memory: its offset in the file, its bytes, and what has to be done.
pub(super) type Part = (u64, u64, Need);

/// What is known of a file whose names are all there.
pub(super) fn known(names: Vec<Name>, mapped: &Mapped) -> Known {
    let words = (1..=names.len()).map(|end| mapped.word_before(end as u64 * NAMED)).collect();
    Known { names, words }
}

/// Whether the file has a granule with these names at this offset.
fn has(mapped: &Mapped, known: &Known, offset: u64, names: &[Name]) -> bool {
    let Ok(first) = usize::try_from(offset / NAMED) else { return false };
    let range = first..first.saturating_add(names.len());
    let words = known.words.get(range.clone()).unwrap_or_default();
    offset.is_multiple_of(GRANULE)
        && known.names.get(range) == Some(names)
        && words.iter().zip(1..).all(|(word, end)| mapped.word_before(offset + end * NAMED) == *word)
}

/// What has to be done for memory with these names, which is for `offset` of `mapped`. Neighbours with the same need are one
/// part.
pub(super) fn parts(
    offset: u64,
    names: &[Name],
    mapped: &Mapped,
    before: Option<&Known>,
    others: &[(&Mapped, &Known)],
) -> Vec<Part> {
    let mut parts: Vec<Part> = Vec::new();
    for (granule, names) in names.chunks(IN_GRANULE).enumerate() {
        let (at, bytes) = (offset + granule as u64 * GRANULE, names.len() as u64 * NAMED);
        let other = || others.iter().find(|(mapped, known)| has(mapped, known, at, names));
        let need = match before.is_some_and(|known| has(mapped, known, at, names)) {
            true => Need::Nothing,
            false => other().map_or(Need::Copy, |(mapped, _)| Need::Elsewhere(mapped.address(at))),
        };
        match parts.last_mut() {
            Some((from, length, same)) if follows(*same, need, at - *from) => *length += bytes,
            _ => parts.push((at, bytes, need)),
        }
    }
    parts
}

/// Whether a need is the same as that of a part that begins `distance` before it.
fn follows(part: Need, need: Need, distance: u64) -> bool {
    match (part, need) {
        (Need::Elsewhere(from), Need::Elsewhere(at)) => usize::try_from(distance).is_ok_and(|it| from + it == at),
        _ => part == need,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const BYTES: u64 = 4 * GRANULE;

    fn file() -> Mapped {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(BYTES).unwrap();
        let mut mapped = Mapped::new(file, [0, 0]).unwrap();
        mapped.ranges = vec![(0, BYTES, false)];
        mapped.length = BYTES;
        mapped.map_all().unwrap();
        mapped
    }

    /// One for each 256 KiB, other ones for each seed.
    fn names(seed: u8) -> Vec<Name> {
        (0..4 * IN_GRANULE).map(|at| *blake3::hash(&[seed, u8::try_from(at).unwrap()]).as_bytes()).collect()
    }

    #[test]
    fn what_is_in_the_file_or_beside_it_is_not_copied() {
        let (mapped, other) = (file(), file());
        let (mut before, beside) = (names(1), names(2));
        let mut now = names(3);
        assert_eq!(parts(0, &now, &mapped, None, &[]), [(0, BYTES, Need::Copy)]);
        // One that is in the file, two that are beside it.
        now[..IN_GRANULE].copy_from_slice(&before[..IN_GRANULE]);
        now[IN_GRANULE..3 * IN_GRANULE].copy_from_slice(&beside[IN_GRANULE..3 * IN_GRANULE]);
        let others = known(beside, &other);
        let content = known(before.clone(), &mapped);
        let from = other.address(GRANULE);
        let expected = [
            (0, GRANULE, Need::Nothing),
            (GRANULE, 2 * GRANULE, Need::Elsewhere(from)),
            (3 * GRANULE, GRANULE, Need::Copy),
        ];
        assert_eq!(parts(0, &now, &mapped, Some(&content), &[(&other, &others)]), expected);
        // From the middle of it.
        let rest = &now[2 * IN_GRANULE..];
        assert_eq!(
            parts(2 * GRANULE, rest, &mapped, Some(&content), &[])[..],
            [(2 * GRANULE, 2 * GRANULE, Need::Copy)]
        );
        // One name of eight is another one.
        before[3][0] ^= 1;
        let content = known(before, &mapped);
        assert_eq!(parts(0, &now[..IN_GRANULE], &mapped, Some(&content), &[]), [(0, GRANULE, Need::Copy)]);
    }

    #[test]
    fn a_page_that_was_replaced_is_copied_again() {
        let mapped = file();
        let content = known(names(1), &mapped);
        assert_eq!(parts(0, &names(1), &mapped, Some(&content), &[]), [(0, BYTES, Need::Nothing)]);
        mapped.file.write_all_at(&[1], 3 * GRANULE - 1).unwrap();
        let expected = [
            (0, 2 * GRANULE, Need::Nothing),
            (2 * GRANULE, GRANULE, Need::Copy),
            (3 * GRANULE, GRANULE, Need::Nothing),
        ];
        assert_eq!(parts(0, &names(1), &mapped, Some(&content), &[]), expected);
    }

    #[test]
    fn nothing_is_known_of_what_was_cut_off() {
        let mapped = file();
        let mut content = known(names(1), &mapped);
        content.cut(GRANULE + 5);
        let expected = [(0, GRANULE, Need::Nothing), (GRANULE, 3 * GRANULE, Need::Copy)];
        assert_eq!(parts(0, &names(1), &mapped, Some(&content), &[]), expected);
    }
}

use super::*;
use proptest::prelude::*;
use prost::Message as _;
use std::fs;
use std::path::Path;

const C: u64 = CHUNK as u64;

/// `pagemap_head`, as far as it is used here.
#[derive(prost::Message)]
struct Head {
    #[prost(uint32, required, tag = "1")]
    pages_id: u32,
}

/// `pagemap_entry` of present pages.
#[derive(prost::Message)]
struct Run {
    #[prost(uint64, required, tag = "1")]
    vaddr: u64,
    #[prost(uint32, optional, tag = "4")]
    flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    nr_pages: Option<u64>,
}

/// A page map as CRIU writes it, of runs (address, pages).
fn write_pagemap(path: &Path, pages_id: u32, runs: &[(u64, u64)]) {
    let run = |&(vaddr, pages)| Run { vaddr, flags: Some(4), nr_pages: Some(pages) }.encode_to_vec();
    let mut bytes = [0x5456_4319_u32.to_le_bytes(), 0x5608_4025_u32.to_le_bytes()].concat();
    for record in [Head { pages_id }.encode_to_vec()].into_iter().chain(runs.iter().map(run)) {
        bytes.extend(u32::try_from(record.len()).unwrap().to_le_bytes());
        bytes.extend(record);
    }
    std::fs::write(path, bytes).unwrap();
}

/// An image with `criu/pages-3.img` for these runs (address, pages), and its size.
fn image(runs: &[(u64, u64)]) -> (tempfile::TempDir, u64) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("criu")).unwrap();
    write_pagemap(&dir.path().join("criu/pagemap-77.img"), 3, runs);
    (dir, runs.iter().map(|(_, pages)| pages * PAGE).sum())
}

fn cuts(runs: &[(u64, u64)]) -> Vec<(u64, usize)> {
    let (dir, size) = image(runs);
    Cuts::of(&crate::tests::beneath(dir.path()), "criu/pages-3.img", size).collect()
}

fn lengths(cuts: &[(u64, usize)]) -> Vec<usize> {
    cuts.iter().map(|(_, length)| *length / 4096).collect()
}

#[test]
fn files_are_cut_at_multiples() {
    let dir = Path::new("/nowhere");
    assert_eq!(Cuts::of(&crate::tests::beneath(dir), "gpu/1", 0).count(), 0);
    assert_eq!(Cuts::of(&crate::tests::beneath(dir), "gpu/1", 1).collect::<Vec<_>>(), [(0, 1)]);
    assert_eq!(
        Cuts::of(&crate::tests::beneath(dir), "gpu/1", 2 * C + 5).collect::<Vec<_>>(),
        [(0, CHUNK), (C, CHUNK), (2 * C, 5)]
    );
}

#[test]
fn pages_are_cut_by_their_addresses() {
    let base = 0x7f00_0000_0000;
    assert_eq!(base % C, 0);
    assert_eq!(lengths(&cuts(&[(base, 130)])), [64, 64, 2]);
    assert_eq!(lengths(&cuts(&[(base + 60 * PAGE, 70)])), [4, 64, 2]);
    // Gaps within a piece are not part of a chunk; the next piece begins a new one.
    assert_eq!(lengths(&cuts(&[(base, 3), (base + 10 * PAGE, 5), (base + C, 1), (base + 9 * C, 2)])), [8, 1, 2]);
    assert_eq!(lengths(&cuts(&[(base, 0), (base, 1)])), [1]);
    // Cases that no kernel makes: the same addresses twice, and the end of the address space.
    assert_eq!(lengths(&cuts(&[(base, 64), (base, 64)])), [64, 64]);
    assert_eq!(cuts(&[(u64::MAX - 4095, 65)]).iter().map(|(_, n)| n).sum::<usize>(), 65 * 4096);
}

#[test]
fn a_page_in_the_middle_moves_nothing_behind() {
    let before = cuts(&[(0x1000_0000, 40), (0x1000_0000 + 50 * PAGE, 300)]);
    let after = cuts(&[(0x1000_0000, 41), (0x1000_0000 + 50 * PAGE, 300)]);
    assert_eq!(lengths(&before)[1..], lengths(&after)[1..]);
    assert_eq!((lengths(&before)[0], lengths(&after)[0]), (54, 55));
}

#[test]
fn a_page_map_that_does_not_fit_means_fixed_offsets() {
    let (dir, size) = image(&[(0x1000 * 60, 70)]);
    let fixed = |cuts: Cuts| cuts.take(1).collect::<Vec<_>>() == [(0, CHUNK)];
    assert!(!fixed(Cuts::of(&crate::tests::beneath(dir.path()), "criu/pages-3.img", size)));
    assert!(fixed(Cuts::of(&crate::tests::beneath(dir.path()), "criu/pages-3.img", size + 4096)), "another size");
    assert!(fixed(Cuts::of(&crate::tests::beneath(dir.path()), "criu/pages-4.img", size)), "no map");
    assert!(fixed(Cuts::of(&crate::tests::beneath(dir.path()), "pages-3.img", size)), "not of CRIU");
    let map = dir.path().join("criu/pagemap-77.img");
    let whole = fs::read(&map).unwrap();
    for cut in 0..whole.len() {
        fs::write(&map, &whole[..cut]).unwrap();
        assert!(fixed(Cuts::of(&crate::tests::beneath(dir.path()), "criu/pages-3.img", size)), "cut at {cut}");
    }
}

proptest! {
    #[test]
    fn cuts_have_no_gaps(runs in prop::collection::vec((0_u64..1 << 20, 0_u64..200), 0..40)) {
        let runs: Vec<_> = runs.into_iter().map(|(page, pages)| (page * PAGE, pages)).collect();
        let total: u64 = runs.iter().map(|(_, pages)| pages * PAGE).sum();
        let mut at = 0;
        for (offset, length) in cuts(&runs) {
            prop_assert_eq!(offset, at);
            prop_assert!(length > 0 && length <= CHUNK);
            at += length as u64;
        }
        prop_assert_eq!(at, total);
    }
}

use super::*;
use crate::chunk::ChunkId;
use crate::pack::index::tests::pack;
use std::fs;

struct Ground {
    dir: tempfile::TempDir,
    packs: Packs,
}

const ONE: &str = "000000000000000000000000000000a1";
const TWO: &str = "000000000000000000000000000000b2";

fn name(text: &str) -> PackName {
    text.parse().unwrap()
}

fn id(raw: &[u8]) -> ChunkId {
    blake3::hash(raw).into()
}

impl Ground {
    fn new() -> Ground {
        let dir = tempfile::tempdir().unwrap();
        let packs = Packs::new(crate::tests::beneath(&dir.path().join("packs")));
        fs::create_dir(packs.dir()).unwrap();
        Ground { dir, packs }
    }

    /// Writes a pack and its index.
    fn pack(&self, text: &str, chunks: &[&[u8]]) -> PackName {
        let name = name(text);
        fs::write(self.packs.pack_path(name), pack(chunks).0).unwrap();
        let index = self.packs.scan(name).unwrap().index;
        fs::write(self.packs.index_path(name), index.to_bytes()).unwrap();
        name
    }

    fn index(&self) -> Index {
        self.packs.index().unwrap()
    }
}

#[test]
fn a_name_is_32_digits_in_lower_case() {
    assert_eq!(name(ONE).to_string(), ONE);
    for wrong in ["", "a1", &ONE.to_uppercase(), &format!("{ONE}0"), &ONE.replace('0', "+")] {
        assert!(wrong.parse::<PackName>().is_err(), "{wrong}");
    }
    let random = PackName::random().unwrap();
    assert_eq!(random.to_string().parse(), Ok(random));
    assert_ne!(random, PackName::random().unwrap());
}

#[test]
fn chunks_are_found_where_they_are() {
    let ground = Ground::new();
    let one = ground.pack(ONE, &[b"first", b"second"]);
    let two = ground.pack(TWO, &[b"third"]);
    for other in [".tmp-000000000000000000000000000000c3.pack", "README", "x.pack", &format!("{ONE}.pack.bak")] {
        fs::write(ground.packs.dir().join(other), b"?").unwrap();
    }
    let index = ground.index();
    assert!(index.problems().is_empty(), "{:?}", index.problems());
    assert_eq!((index.places(), index.packs().len()), (3, 2));
    let second = index.get(&id(b"second")).unwrap();
    assert_eq!((second.pack, second.offset, second.raw_len, second.stored_len), (one, 64 + 64 + 5, 6, 6));
    assert_eq!(index.get(&id(b"third")).unwrap().pack, two);
    assert_eq!(index.get(&id(b"fourth")), None);
    assert_eq!(ground.packs.names().unwrap(), [one, two]);
}

#[test]
fn no_folder_is_no_packs_and_one_that_can_not_be_listed_an_error() {
    let ground = Ground::new();
    let none = Packs::new(crate::tests::beneath(&ground.dir.path().join("none")));
    assert!(none.index().unwrap().places() == 0);
    let file = ground.dir.path().join("file");
    fs::write(&file, b"").unwrap();
    assert!(matches!(Packs::new(crate::tests::beneath(&file)).index(), Err(Error::Read { .. })));
}

#[test]
fn a_pack_without_a_good_index_is_read_itself() {
    let ground = Ground::new();
    let one = ground.pack(ONE, &[b"first", b"second"]);
    let path = ground.packs.index_path(one);
    let whole = fs::read(&path).unwrap();
    let mut flipped = whole.clone();
    flipped[70] ^= 1;
    for damaged in [None, Some(&flipped[..]), Some(&whole[..whole.len() - 1]), Some(b"")] {
        match damaged {
            Some(bytes) => fs::write(&path, bytes).unwrap(),
            None => fs::remove_file(&path).unwrap(),
        }
        let index = ground.index();
        assert_eq!(index.get(&id(b"second")).unwrap().offset, 64 + 64 + 5);
        let [problem] = index.problems() else { panic!("{:?}", index.problems()) };
        assert!(problem.pack == one && problem.index.is_some(), "{problem:?}");
        assert!(matches!(problem.lost, Lost::Nothing), "{problem:?}");
    }
}

#[test]
fn what_a_pack_lost_is_told() {
    let ground = Ground::new();
    let one = ground.pack(ONE, &[b"first", b"second"]);
    let path = ground.packs.pack_path(one);
    let whole = fs::read(&path).unwrap();
    // Cut in the second record: the index names more than exists.
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    let index = ground.index();
    assert!(index.get(&id(b"first")).is_some());
    assert_eq!(index.get(&id(b"second")), None);
    let [Problem { lost: Lost::From { offset, pack_len, .. }, .. }] = index.problems() else {
        panic!("{:?}", index.problems())
    };
    assert_eq!((*offset, *pack_len), (64 + 64 + 5, whole.len() as u64 - 1));
    // Another file under the name of the pack, no file at all, and a file that has grown.
    let mut other = whole.clone();
    other[0] ^= 1;
    fs::write(&path, &other).unwrap();
    assert!(matches!(ground.index().problems(), [Problem { lost: Lost::All(ReadError::Format { .. }), .. }]));
    fs::remove_file(&path).unwrap();
    let index = ground.index();
    assert!(matches!(index.problems(), [Problem { lost: Lost::All(ReadError::Read { .. }), .. }]));
    assert_eq!(index.places(), 0);
    fs::write(&path, [&whole[..], b"more"].concat()).unwrap();
    let index = ground.index();
    assert_eq!(index.places(), 2);
    assert!(matches!(index.problems(), [Problem { lost: Lost::From { .. }, .. }]));
}

#[test]
fn a_chunk_in_two_packs_is_taken_from_the_one_that_stays() {
    let ground = Ground::new();
    let one = ground.pack(ONE, &[b"both", b"only here"]);
    let two = ground.pack(TWO, &[b"both"]);
    assert_eq!(ground.index().all(&id(b"both")).count(), 2);
    for (gone, stays) in [(one, two), (two, one)] {
        fs::write(ground.packs.gone_path(gone), b"{}").unwrap();
        let mut index = ground.index();
        assert!(index.is_gone(gone) && !index.is_gone(stays));
        assert_eq!(index.get(&id(b"both")).unwrap().pack, stays);
        assert_eq!(index.get(&id(b"only here")).unwrap().pack, one);
        index.set_gone(gone, false);
        index.set_gone(stays, true);
        assert_eq!(index.get(&id(b"both")).unwrap().pack, gone);
        fs::remove_file(ground.packs.gone_path(gone)).unwrap();
    }
    // An interrupted removal leaves only a mark.
    fs::write(ground.packs.dir().join("000000000000000000000000000000c3.gone"), b"{}").unwrap();
    assert!(ground.index().problems().is_empty());
}

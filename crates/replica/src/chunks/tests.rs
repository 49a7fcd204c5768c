//! Healing from a replica in a folder.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use super::*;
use crate::Patience;
use rekindle_os::direct::Way;
use rekindle_store::chunk::{ChunkMap, Compression, Extent, chunk_id};
use rekindle_store::heal::{Healed, Healing};
use rekindle_store::manifest::{Chunks, Manifest, Part};
use rekindle_store::options::Copies;
use rekindle_store::pack::{Making, PackWriter, Unread};
use rekindle_store::persist::Progress;
use rekindle_store::{Access, Image, JobFolder, Store, WriterLock};

/// A job with one image of one chunk, which is in a replica too.
struct Ground {
    _dir: tempfile::TempDir,
    folder: JobFolder,
    lock: WriterLock,
    key: Option<Key>,
    chunk: ChunkId,
    replica: tempfile::TempDir,
}

impl Ground {
    fn new(key: Option<Key>) -> Ground {
        let (dir, replica) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        let raw: Vec<u8> = (0_u8..=255).cycle().take(10_000).collect();
        let chunk = chunk_id(key.as_ref(), &raw);
        let packs = folder.packs();
        let making = Making { compression: Compression::None, key: key.as_ref(), pack: 1 << 20, way: Way::Plain };
        let mut writer = PackWriter::new(&packs, making).unwrap();
        writer.room(raw.len()).copy_from_slice(&raw);
        writer.keep(chunk, raw.len()).unwrap();
        writer.finish().unwrap();
        let ground = Ground { _dir: dir, folder, lock, key, chunk, replica };
        open(ground.replica.path())
            .unwrap()
            .upload(&ground.image(raw.len()), &ground.folder, &Progress::default(), &|| false)
            .unwrap();
        ground
    }

    fn image(&self, len: usize) -> Image {
        let map = ChunkMap { parts: vec![vec![Extent::Chunk { id: self.chunk, len: len.try_into().unwrap() }]] };
        let text = map.to_bytes();
        let mut manifest: Manifest = serde_json::from_str(rekindle_testing::MANIFEST).unwrap();
        manifest.bytes = len.try_into().unwrap();
        manifest.parts = vec![Part { path: "criu/pages-1.img".parse().unwrap(), size: manifest.bytes, blake3: None }];
        manifest.chunks = Some(Chunks { blake3: blake3::hash(&text), extents: map.extents(), stored: 0 });
        let dir = self.folder.images_dir().join(manifest.id.to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("chunks"), text).unwrap();
        fs::write(dir.join("manifest.json"), manifest.to_bytes(self.folder.trust()).unwrap()).unwrap();
        Image::load(&dir, manifest.id, self.folder.trust())
    }

    /// Changes a byte in the middle of the only pack of the store or the replica.
    fn harm(packs: &Path) {
        let mut names = fs::read_dir(packs).unwrap().map(|entry| entry.unwrap().path());
        let path = names.find(|path| path.extension().is_some_and(|it| it == "pack")).unwrap();
        let mut bytes = fs::read(&path).unwrap();
        bytes[5000] ^= 1;
        fs::write(path, bytes).unwrap();
    }

    fn heal(&self, replica: &Path) -> Healed {
        let (there, unread) = (OnDemand(|| open(replica)), Unread::default());
        let healing = Healing {
            folder: &self.folder,
            lock: &self.lock,
            key: self.key.as_ref(),
            copies: Copies::One,
            unread: &unread,
            replica: Some(&there),
        };
        healing.heal(&BTreeSet::from([self.chunk]), &|| false).unwrap()
    }
}

fn open(path: &Path) -> Result<Replica> {
    let url = format!("file://{}", path.display()).parse().unwrap();
    Replica::open_with(&url, &"j".parse().unwrap(), Patience::Little, [])
}

#[test]
fn a_damaged_chunk_is_taken_from_the_replica() {
    for key in [None, Some(Key::new(&[5; 32]))] {
        let ground = Ground::new(key);
        Ground::harm(ground.folder.packs().dir().path());
        let healed = ground.heal(ground.replica.path());
        assert_eq!((healed.damaged, healed.from_replica, healed.lost.len()), (1, 1, 0), "{healed:?}");
        let healed = ground.heal(Path::new("/nowhere"));
        assert!(healed.found() == 0 && healed.replica_failure.is_none(), "it is not opened if nothing is damaged");
    }
}

#[test]
fn a_replica_that_cannot_be_opened_is_reported_and_asked_again() {
    let ground = Ground::new(None);
    Ground::harm(ground.folder.packs().dir().path());
    let healed = ground.heal(Path::new("/nowhere"));
    assert_eq!((healed.from_replica, healed.lost.len()), (0, 1), "{healed:?}");
    assert!(healed.replica_failure.is_some_and(|why| why.contains("/nowhere")));
    // The damaged record is in no index any more; the replica has it all the same.
    let healed = ground.heal(ground.replica.path());
    assert_eq!((healed.missing, healed.from_replica), (1, 1), "{healed:?}");
}

#[test]
fn a_chunk_that_is_damaged_in_the_replica_is_not_used() {
    let ground = Ground::new(None);
    Ground::harm(ground.folder.packs().dir().path());
    Ground::harm(&ground.replica.path().join("j/packs"));
    let healed = ground.heal(ground.replica.path());
    assert_eq!((healed.from_replica, healed.lost.len(), healed.replica_failure), (0, 1, None));
}

//! What tests share: machines with images in packs, and replicas.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use chrono::{DateTime, TimeDelta, Utc};

use crate::client::Client;
use crate::error::Result;
use crate::{Patience, Replica, Uploaded};
use rekindle_os::direct::Way;
use rekindle_store::chunk::{ChunkMap, Compression, Extent, chunk_id};
use rekindle_store::manifest::{Chunks, Manifest, Part};
use rekindle_store::pack::{Making, PackWriter};
use rekindle_store::persist::Progress;
use rekindle_store::{Access, Image, ImageId, JobFolder, JobName, Store, WriterLock};

mod folder;
mod forged;
mod lagging;
mod listing;
mod retention;
mod room;

use lagging::Lagging;

/// A machine with a store.
struct Machine {
    _dir: tempfile::TempDir,
    folder: JobFolder,
    lock: WriterLock,
}

impl Machine {
    fn new() -> Machine {
        Machine::below(tempfile::tempdir().unwrap())
    }

    fn below(dir: tempfile::TempDir) -> Machine {
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&job()).unwrap();
        let lock = folder.lock().unwrap();
        Machine { _dir: dir, folder, lock }
    }

    /// An image of these chunks. Those that no pack has are in a new one.
    fn image(&self, number: u32, seeds: &[u32]) -> Image {
        let raw: Vec<Vec<u8>> = seeds.iter().map(|seed| noise(*seed)).collect();
        self.pack(&raw);
        let extent = |raw: &Vec<u8>| Extent::Chunk { id: chunk_id(None, raw), len: raw.len().try_into().unwrap() };
        let map = ChunkMap { parts: vec![raw.iter().map(extent).collect()] };
        let text = map.to_bytes();
        let mut manifest: Manifest = serde_json::from_str(rekindle_testing::MANIFEST).unwrap();
        manifest.id = id(number);
        manifest.job = job();
        manifest.bytes = raw.iter().map(|raw| raw.len() as u64).sum();
        manifest.parts = vec![Part { path: "criu/pages-1.img".parse().unwrap(), size: manifest.bytes, blake3: None }];
        manifest.chunks = Some(Chunks { blake3: blake3::hash(&text), extents: map.extents(), stored: 0 });
        let dir = self.folder.images_dir().join(manifest.id.to_string());
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("chunks"), text).unwrap();
        fs::write(dir.join("manifest.json"), manifest.to_bytes(self.folder.trust()).unwrap()).unwrap();
        Image::load(&dir, manifest.id, self.folder.trust())
    }

    /// Writes a pack with those of these chunks that no pack has.
    fn pack(&self, raw: &[Vec<u8>]) {
        let packs = self.folder.packs();
        let index = packs.index().unwrap();
        let making = Making { compression: Compression::None, key: None, pack: 256 << 20, way: Way::Plain };
        let mut writer = PackWriter::new(&packs, making).unwrap();
        for raw in raw.iter().filter(|raw| index.get(&chunk_id(None, raw)).is_none()) {
            writer.room(raw.len()).copy_from_slice(raw);
            writer.keep(chunk_id(None, raw), raw.len()).unwrap();
        }
        writer.finish().unwrap();
    }

    fn upload(&self, replica: &Replica, image: &Image) -> Result<Uploaded> {
        replica.upload(image, &self.folder, &Progress::default(), &|| false)
    }

    fn fetch(&self, replica: &Replica, number: u32) -> Result<Image> {
        replica.fetch(id(number), &self.folder, &self.lock, None, &Progress::default(), &|| false)
    }
}

fn job() -> JobName {
    "train".parse().unwrap()
}

fn id(number: u32) -> ImageId {
    let taken = DateTime::<Utc>::UNIX_EPOCH + TimeDelta::seconds(number.into());
    ImageId::new(number, taken)
}

/// 100,000 bytes, others for each seed.
fn noise(seed: u32) -> Vec<u8> {
    let mut bytes = vec![0; 100_000];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// The replica in this folder.
fn in_folder(dir: &Path) -> Replica {
    let url = format!("file://{}", dir.display()).parse().unwrap();
    Replica::open_with(&url, &job(), Patience::Little, []).unwrap()
}

/// A replica in this object store.
fn over(store: &Arc<Lagging>) -> Replica {
    let url = "s3://bucket/some/path".parse().unwrap();
    let client = Client::over(&url, &job(), Arc::clone(store) as _, "some/path".into(), Default::default()).unwrap();
    Replica::over(client, job())
}

//! Machines, each with a store of its own, and images whose content is in packs.

use std::ffi::OsString;
use std::fs;
use std::path::Path;

use chrono::{DateTime, TimeDelta, Utc};
use rekindle_os::direct::Way;
use rekindle_replica::ReplicaUrl;
use rekindle_replica::{Patience, RemoteImage, Replica, Uploaded};
use rekindle_store::chunk::codec::Compression;
use rekindle_store::chunk::{ChunkMap, Extent, Key, chunk_id};
use rekindle_store::manifest::{Chunks, Manifest, Part, Tcp};
use rekindle_store::pack::record::HEADER_BYTES;
use rekindle_store::pack::{Making, PackWriter, record};
use rekindle_store::persist::Progress;
use rekindle_store::{Access, Image, ImageId, JobFolder, Store, WriterLock};

use crate::proxy::Proxy;
use crate::server::BUCKET;

/// In the environment of every client here, and in no text that comes out of one.
pub(crate) const SECRET: &str = "wJalrXUtnFEMI-not-to-be-seen";

/// A machine, with a job that takes no images by itself.
pub(crate) struct Machine {
    dir: tempfile::TempDir,
    pub(crate) folder: JobFolder,
    pub(crate) lock: WriterLock,
    pub(crate) key: Option<Key>,
}

impl Machine {
    pub(crate) fn new() -> Machine {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap();
        let folder = store.create_job(&"train".parse().unwrap()).unwrap();
        let lock = folder.lock().unwrap();
        Machine { dir, folder, lock, key: None }
    }

    pub(crate) fn with_key(mut self, digit: &str) -> Machine {
        let path = self.dir.path().join("key");
        fs::write(&path, digit.repeat(64)).unwrap();
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        self.key = Some(Key::read(&path).unwrap());
        self
    }

    /// An image of one part with these chunks; those that no pack has yet come into a new one.
    pub(crate) fn image(&self, number: u32, chunks: &[Vec<u8>]) -> Image {
        let packs = self.folder.packs();
        let index = packs.index().unwrap();
        let making = Making { compression: Compression::Lz4, key: self.key.as_ref(), pack: 256 << 20, way: Way::Plain };
        let mut writer = PackWriter::new(&packs, making).unwrap();
        let mut part = vec![Extent::Zero { len: 5000 }];
        for raw in chunks {
            let id = chunk_id(self.key.as_ref(), raw);
            if index.get(&id).is_none() {
                writer.room(raw.len()).copy_from_slice(raw);
                writer.keep(id, raw.len()).unwrap();
            }
            part.push(Extent::Chunk { id, len: u32::try_from(raw.len()).unwrap() });
        }
        writer.finish().unwrap();
        let map = ChunkMap { parts: vec![part] };
        let text = map.to_bytes();
        let mut manifest = manifest(number);
        manifest.bytes = 5000 + chunks.iter().map(|raw| raw.len() as u64).sum::<u64>();
        manifest.parts = vec![Part { path: "criu/pages-1.img".parse().unwrap(), size: manifest.bytes, blake3: None }];
        manifest.chunks = Some(Chunks { blake3: blake3::hash(&text), extents: map.extents(), stored: 0 });
        let dir = self.folder.images_dir().join(manifest.id.to_string());
        fs::create_dir(&dir).unwrap();
        fs::write(dir.join("chunks"), text).unwrap();
        fs::write(dir.join("manifest.json"), manifest.to_bytes(&Default::default()).unwrap()).unwrap();
        let image = Image::load(&dir, manifest.id, self.folder.trust());
        assert!(image.is_good(), "{:?}", image.state);
        image
    }

    /// The chunks of an image, each read and checked.
    pub(crate) fn content(&self, image: &Image) -> Vec<Vec<u8>> {
        let map = image.chunk_map().unwrap().unwrap();
        let packs = self.folder.packs();
        let index = packs.index().unwrap();
        assert!(index.problems().is_empty(), "{:?}", index.problems());
        let read = |(id, _)| {
            let place = index.get(&id).unwrap();
            let pack = fs::read(packs.pack_path(place.pack)).unwrap();
            let start = usize::try_from(place.offset).unwrap();
            let end = start + usize::try_from(place.record_len()).unwrap();
            let (mut bytes, mut raw) = (pack[start..end].to_vec(), Vec::new());
            record::read(&mut bytes, &id, self.key.as_ref(), &mut raw).unwrap();
            raw
        };
        map.chunks().map(read).collect()
    }

    pub(crate) fn upload(&self, replica: &Replica, image: &Image) -> Result<Uploaded, rekindle_replica::Error> {
        replica.upload(image, &self.folder, &Progress::default(), &|| false)
    }

    /// Answers also how many bytes of content came.
    pub(crate) fn fetch(&self, replica: &Replica, id: ImageId) -> Result<(Image, u64), rekindle_replica::Error> {
        let progress = Progress::default();
        let image = replica.fetch(id, &self.folder, &self.lock, self.key.as_ref(), &progress, &|| false)?;
        Ok((image, progress.bytes().0))
    }

    /// The name of the pack with the chunk of this number.
    pub(crate) fn pack_of(&self, seed: u32) -> String {
        let index = self.folder.packs().index().unwrap();
        index.get(&chunk_id(self.key.as_ref(), &noise(seed, 100_000))).unwrap().pack.to_string()
    }

    /// The number of complete packs.
    pub(crate) fn packs(&self) -> usize {
        self.folder.packs().names().unwrap().len()
    }
}

/// Bytes that nothing compresses, others for each seed.
pub(crate) fn noise(seed: u32, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

/// Chunks of 100,000 bytes, one for each number.
pub(crate) fn chunks(seeds: impl IntoIterator<Item = u32>) -> Vec<Vec<u8>> {
    seeds.into_iter().map(|seed| noise(seed, 100_000)).collect()
}

/// Size of the record of such a chunk.
pub(crate) const RECORD: u64 = 100_000 + HEADER_BYTES;

/// The replica in this folder.
pub(crate) fn folder_replica(dir: &Path) -> Replica {
    folder_replica_of(dir, "train")
}

/// The replica of that job in this folder.
pub(crate) fn folder_replica_of(dir: &Path, job: &str) -> Replica {
    let url: ReplicaUrl = format!("file://{}", dir.display()).parse().unwrap();
    Replica::open_with(&url, &job.parse().unwrap(), Patience::Little, []).unwrap()
}

/// The replica behind the proxy.
pub(crate) fn s3_replica(proxy: &Proxy) -> Replica {
    let url: ReplicaUrl = format!("s3://{BUCKET}/some/path").parse().unwrap();
    let variables = [
        ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
        ("AWS_SECRET_ACCESS_KEY", SECRET),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", &format!("http://{}", proxy.address)),
        ("AWS_ALLOW_HTTP", "true"),
    ];
    let variables = variables.map(|(name, value)| (OsString::from(name), OsString::from(value)));
    Replica::open_with(&url, &"train".parse().unwrap(), Patience::Little, variables).unwrap()
}

pub(crate) fn id(number: u32) -> ImageId {
    ImageId::new(number, taken(number))
}

fn taken(number: u32) -> DateTime<Utc> {
    DateTime::from_timestamp(1_800_000_000, 0).unwrap() + TimeDelta::seconds(number.into())
}

/// Made from JSON, so that an optional field added to manifests later needs no change here.
fn manifest(number: u32) -> Manifest {
    let value = serde_json::json!({
        "id": id(number),
        "job": "train",
        "lineage": "first",
        "taken": taken(number),
        "reason": "interval",
        "command": ["python", "train.py"],
        "directory": "/home/alice",
        "user": null,
        "host": {
            "name": "node1", "boot_id": "0", "kernel": "6.18.0", "arch": "x86_64", "cpu_model": "any", "cpu_flags": []
        },
        "rekindle": "0.1.0",
        "criu": "4.2",
        "driver": null,
        "gpus": [],
        "tree": { "root": 1, "job": 2, "processes": [], "ids": [], "cuda": [] },
        "open_files": [],
        "saved_links": [],
        "recreate": [],
        "tcp": Tcp::Keep,
        "phases": [],
        "freeze_us": 1,
        "bytes": 0,
        "parts": [],
    });
    serde_json::from_value(value).unwrap()
}

/// The newest good image that is there and newer than `than`.
pub(crate) fn newest_good(replica: &Replica, than: Option<ImageId>) -> Option<RemoteImage> {
    let newer = |image: &RemoteImage| than.is_none_or(|than| image.id > than);
    replica.images(&|| false).unwrap().into_iter().find(|image| image.is_good() && newer(image))
}

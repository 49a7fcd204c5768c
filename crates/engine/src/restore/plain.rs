//! Provides the files of an image as CRIU and the driver read them.
//!
//! An image in memory has them. A loose image in the store has them too; every byte is compared with its hash first. A
//! packed image is unpacked, and every chunk is checked. It is unpacked into a slot in memory, where it stays for the
//! next restart; or, if memory is too small, into a folder of the job in the store, which is removed once the job has its memory.
//! After a power cut that folder remains, and the next restore removes it first.

use std::io;

use super::{Error, Request};
use rekindle_base::chain;
use rekindle_os::beneath::Beneath;
use rekindle_store::heal::Healed;
use rekindle_store::take::{Need, TakeError};
use rekindle_store::unpack;
use rekindle_store::{Form, Image, Manifest};

/// Where a packed image is unpacked below the job's folder.
const FOLDER: &str = "unpacked";

/// An image whose parts are plain files.
#[derive(Debug)]
pub(super) struct Plain {
    pub(super) image: Image,
    /// A folder used for this restore only.
    pub(super) folder: Option<Unpacked>,
    /// What was damaged in the store, and replaced.
    pub(super) healed: Option<Healed>,
}

/// A folder with an unpacked image; it is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Unpacked(Beneath);

impl Drop for Unpacked {
    fn drop(&mut self) {
        let _ = self.0.remove_dir_all();
    }
}

/// Provides the image's parts as plain files, and checks them.
pub(super) fn make(request: &Request<'_>, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<Plain, Error> {
    let image = request.image;
    if image.form() == Form::Loose {
        check(image)?;
        return Ok(Plain { image: image.clone(), folder: None, healed: None });
    }
    let manifest = image.manifest().ok_or(Error::NoManifest(image.id))?;
    if let Some((image, healed)) = into_memory(request, manifest, cancelled)? {
        return Ok(Plain { image, folder: None, healed });
    }
    into_folder(request, manifest, cancelled)
}

/// Reads every byte before anything is started: damaged content must not be restored silently. An image in memory has
/// no hashes, so only the sizes are checked.
fn check(image: &Image) -> Result<(), Error> {
    let report = image.verify();
    if report.is_sound() {
        return Ok(());
    }
    let what = report.problems().take(5).map(ToString::to_string).collect::<Vec<_>>().join(", ");
    match report.is_damage() {
        true => Err(Error::Damaged { id: image.id, what }),
        false => Err(Error::Unread { id: image.id, what }),
    }
}

/// `None` if there is not enough memory.
fn into_memory(
    request: &Request<'_>,
    manifest: &Manifest,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Option<(Image, Option<Healed>)>, Error> {
    let Some(area) = request.unpacking.staging.filter(|area| area.is_there()) else { return Ok(None) };
    // Host memory exists twice until the job runs; device memory moves from the landing file to the GPU.
    let pages = manifest.parts.iter().filter(|part| part.path.starts_with("criu/pages-"));
    let besides = pages.map(|part| part.size).sum();
    // Holes take no memory. A map that cannot be read is an error of the work below.
    let image = request.image.data().unwrap_or(manifest.bytes);
    let need = Need { image, besides, keep: request.unpacking.memory_reserve };
    let own = std::process::id().cast_signed();
    let filling = match area.take(request.folder, request.image.id, need, own, |_| {}) {
        Ok(filling) => filling,
        Err(TakeError::NoRoom(why)) => {
            tracing::info!("unpacking the image to disk, which takes longer: {why}");
            return Ok(None);
        }
        Err(error @ (TakeError::Area(_) | TakeError::DiskFull(_))) => {
            tracing::warn!("unpacking the image to disk, which takes longer: {}", chain(&error));
            return Ok(None);
        }
    };
    filling.clear_pages().map_err(Error::Staging)?;
    let healed = run(request, filling.dir(), cancelled)?;
    let plain = Manifest { chunks: None, ..manifest.clone() };
    Ok(Some((filling.seal(plain, 1).map_err(Error::Staging)?, healed)))
}

fn into_folder(
    request: &Request<'_>,
    manifest: &Manifest,
    cancelled: &(dyn Fn() -> bool + Sync),
) -> Result<Plain, Error> {
    let place = request.folder.dir().join(FOLDER);
    let path = place.path().to_owned();
    let failed = |source: io::Error| Error::Unpack(unpack::Error::Write { path: path.clone(), source });
    match place.remove_dir_all() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    place.make_dir(0o700).map_err(failed)?;
    let folder = Unpacked(place.clone());
    let healed = run(request, &place, cancelled)?;
    // Not written: see `Image::unpacked`.
    let plain = Manifest { chunks: None, ..manifest.clone() };
    Ok(Plain { image: Image::unpacked(&place, plain, request.folder.trust()), folder: Some(folder), healed })
}

fn run(request: &Request<'_>, into: &Beneath, cancelled: &(dyn Fn() -> bool + Sync)) -> Result<Option<Healed>, Error> {
    let super::Unpacking { key, threads, progress, healing, .. } = request.unpacking;
    let unpacking = unpack::Unpacking { key, threads, progress, cancelled, healing };
    match unpacking.unpack(request.image, request.folder, into) {
        Ok(healed) => {
            if let Some(healed) = &healed {
                tracing::warn!("image {}: {healed}; the restore continues", request.image.id);
            }
            Ok(healed)
        }
        Err(unpack::Error::Cancelled) => Err(Error::Cancelled),
        Err(error) if error.is_damage() => Err(Error::Damaged { id: request.image.id, what: chain(&error) }),
        Err(error) => Err(Error::Unpack(error)),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::launch::Privileges;
    use crate::launch::output::{self, Bounds};
    use crate::launch::work::WorkFolder;
    use crate::launch::world::Network;
    use crate::parts::gpu::placement::Wishes;
    use crate::restore::{ChangedFiles, Checks, Compare, Cuda, Own, Prepare, Unpacking};
    use crate::samples;
    use rekindle_criu::{Criu, Version};
    use rekindle_cuda::copier::Copier;
    use rekindle_os::process;
    use rekindle_store::chunk::{Compression, Key};
    use rekindle_store::options::Copies;
    use rekindle_store::pack::Unread;
    use rekindle_store::persist::{self, Packing, Progress, persist};
    use rekindle_store::retention::{Policy, survey::Limits};
    use rekindle_store::staging::Area;
    use rekindle_store::{Access, JobFolder, Store, Trust, Unsigned, WriterLock};

    /// Packs an image with one part.
    fn packed(folder: &JobFolder, lock: &WriterLock, key: &Key) -> Image {
        let limits = Limits { policy: Policy::default(), min_free: 0, copies: Copies::One };
        let area = Area::on_disk(folder, lock).unwrap();
        let filling = area.take_on_disk(folder, lock, &limits, samples::manifest().id, 100).unwrap();
        fs::write(filling.dir().join("criu/core-1.img"), "registers").unwrap();
        let staged = filling.seal(samples::manifest(), 1).unwrap();
        let packing = Packing {
            compression: Compression::None,
            key: Some(std::sync::Arc::new(key.clone())),
            bounds: persist::Bounds { rate: None, threads: 1 },
            copies: Copies::One,
            unread: Unread::default(),
        };
        let image = persist(&staged, folder, lock, &packing, &Progress::default(), &|| false).unwrap();
        area.close().unwrap();
        image
    }

    fn unpack_to_disk(image: &Image, folder: &JobFolder, key: &Key, then: impl FnOnce(&Path)) {
        let dir = tempfile::tempdir().unwrap();
        let request = Request {
            image,
            folder,
            criu: &Criu::known("/bin/false".into(), Version(4, 2, 0)),
            own: Own { work: &WorkFolder::of_another_process(dir.path().to_owned()), reaper: dir.path() },
            output: &output::Files::create(dir.path(), Bounds::default()).unwrap(),
            identity: None,
            privileges: Privileges::MayGrow,
            timeout: std::time::Duration::from_secs(5),
            network: Network::Host,
            checks: Checks { changed_files: ChangedFiles::Warn, compare: Compare::default() },
            wishes: &Wishes::default(),
            prepare: Prepare(&|_| ()),
            unpacking: Unpacking {
                staging: None,
                memory_reserve: 0,
                key: Some(key),
                threads: 1,
                progress: &Progress::default(),
                healing: None,
            },
            cuda: Cuda { copier: &Copier::default(), keeps: false, hold: None },
        };
        let plain = make(&request, &|| false).unwrap();
        assert!(plain.image.is_good() && plain.image.form() == Form::Loose);
        then(plain.image.dir.path());
    }

    /// Somebody who has the disk, and not the key, keeps what a restore leaves there, and puts other content beside it.
    #[test]
    fn an_image_unpacked_to_the_disk_vouches_for_no_other_content() {
        let dir = tempfile::tempdir().unwrap();
        let key = Key::new(&[7; 32]);
        let trust = Trust::new(key.clone(), Path::new("/etc/key"), Unsigned::Refused);
        let store = Store::open(&dir.path().join("store"), Access::Write).unwrap().with_trust(trust);
        let folder = store.create_job(&samples::manifest().job).unwrap();
        let lock = folder.lock().unwrap();
        let image = packed(&folder, &lock, &key);
        assert!(image.is_good() && folder.staged().is_empty());

        let slots = folder.path().join("slots");
        unpack_to_disk(&image, &folder, &key, |from| {
            assert_eq!(fs::read(from.join("criu/core-1.img")).unwrap(), b"registers");
            let slot = slots.join("0");
            fs::create_dir_all(slot.join("criu")).unwrap();
            let kept = fs::read_dir(from).unwrap().flatten().filter(|entry| entry.path().is_file());
            for entry in kept {
                fs::copy(entry.path(), slot.join(entry.file_name())).unwrap();
            }
            fs::write(slot.join("criu/core-1.img"), "mischief!").unwrap();
            fs::write(slots.join("boot"), process::boot_id().unwrap()).unwrap();
        });
        assert_eq!(folder.staged(), [], "nothing signed was on the disk");
        assert_eq!(folder.find("latest").unwrap().dir, image.dir);
    }
}

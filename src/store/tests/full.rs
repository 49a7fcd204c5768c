//! A disk that is full at different moments: the old images stay, and there is no half one.

use super::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

struct SmallDisk(PathBuf);

impl SmallDisk {
    const BYTES: u64 = 8 << 20;

    fn mount(at: &Path) -> Option<SmallDisk> {
        let options = format!("size={},mode=0700", SmallDisk::BYTES);
        let mounted = mount(Some("rekindle-test"), at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()));
        let why = mounted.err().map_or_else(String::new, |error| format!("can not mount a small tmpfs: {error}"));
        require("root", mounted.is_ok(), &why).then(|| SmallDisk(at.to_owned()))
    }

    /// Leaves this many bytes free.
    fn fill(&self, free: u64) -> PathBuf {
        let filler = self.0.join("filler");
        let stat = nix::sys::statvfs::statvfs(&self.0).unwrap();
        let available = stat.blocks_available() * stat.fragment_size();
        fs::write(&filler, vec![1; usize::try_from(available - free).unwrap()]).unwrap();
        filler
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("can not unmount {}: {error}", self.0.display());
        }
    }
}

#[test]
fn a_full_disk_leaves_the_old_images_and_no_half_one() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path()) else { return };
    let home = Home::below(tempfile::tempdir_in(dir.path()).unwrap());
    let old = home.publish(0);
    let (mut failed, mut done) = (0, 0);
    for free in (0..6).map(|pages| pages * 4096) {
        let draft = home.folder.begin_image(&home.lock, at(1)).unwrap();
        fs::write(draft.dir().join("part"), vec![3; 4096]).unwrap();
        let filler = disk.fill(free);
        match draft.publish(manifest()) {
            Ok(image) => {
                done += 1;
                assert!(image.verify().is_sound());
                fs::remove_file(filler).unwrap();
                home.folder.remove(&home.lock, &image.id).unwrap();
            }
            Err(error) => {
                failed += 1;
                assert!(error.is_full(), "{error}: {:?}", std::error::Error::source(&error));
                fs::remove_file(filler).unwrap();
            }
        }
        assert_eq!(home.folder.images().unwrap(), [old.clone()]);
        assert_eq!(fs::read_dir(home.folder.images_dir()).unwrap().count(), 1);
        assert!(old.verify().is_sound());
    }
    assert!(failed > 0 && done > 0, "{failed} failed, {done} done");
}

#[test]
fn a_full_disk_keeps_the_old_record_and_no_mark() {
    let dir = tempfile::tempdir().unwrap();
    let Some(disk) = SmallDisk::mount(dir.path()) else { return };
    let home = Home::below(tempfile::tempdir_in(dir.path()).unwrap());
    let mut image = home.publish(0);
    disk.fill(0);
    let mark = BadMark { why: BadWhy::Damaged, detail: String::new(), when: at(0) };
    assert!(matches!(image.mark_bad(mark), Err(Error::Write { .. })));
    assert!(image.is_good() && image.verify().is_sound());
    assert_eq!(home.folder.images().unwrap(), [image]);
}

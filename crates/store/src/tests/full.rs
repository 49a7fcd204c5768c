//! A disk that is full at different moments, or that frees no space: the old images stay, and there is no incomplete
//! one.

use super::*;
use nix::mount::{MntFlags, MsFlags, mount, umount2};

struct SmallDisk(PathBuf);

impl SmallDisk {
    const BYTES: u64 = 8 << 20;

    fn mount(at: &Path) -> Option<SmallDisk> {
        let options = format!("size={},mode=0700", SmallDisk::BYTES);
        let mounted = mount(Some("rekindle-test"), at, Some("tmpfs"), MsFlags::empty(), Some(options.as_str()));
        let why = mounted.err().map_or_else(String::new, |error| format!("cannot mount a small tmpfs: {error}"));
        require("root", mounted.is_ok(), &why).then(|| SmallDisk(at.to_owned()))
    }

    /// Fills the disk until about this many bytes are free.
    fn fill(&self, free: u64) -> PathBuf {
        let filler = self.0.join("filler");
        // A child that another test has forked, and that has not yet called exec, may hold a removed file open.
        let room = eventually(|| {
            let stat = nix::sys::statvfs::statvfs(&self.0).unwrap();
            (stat.blocks_available() * stat.fragment_size()).checked_sub(free)
        });
        fs::write(&filler, vec![1; usize::try_from(room).unwrap()]).unwrap();
        filler
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        if let Err(error) = umount2(&self.0, MntFlags::MNT_DETACH) {
            eprintln!("cannot unmount {}: {error}", self.0.display());
        }
    }
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

#[test]
fn an_image_that_can_not_be_removed_is_no_image_all_the_same() {
    let home = Home::new();
    let (doomed, kept) = (home.publish(0), home.publish(1));
    // A mount point can be renamed with its parent, but not removed.
    let busy = doomed.dir.join("criu/busy");
    fs::create_dir(&busy).unwrap();
    let Some(mut disk) = SmallDisk::mount(busy.path()) else { return };
    assert!(matches!(home.folder.remove(&home.lock, &doomed.id), Err(Error::Remove { .. })));
    let left = home.image_path(&format!(".del-{}", doomed.id));
    disk.0 = left.join("criu/busy").path().to_owned();
    assert!(left.is_there());
    assert_eq!(home.folder.images().unwrap(), std::slice::from_ref(&kept));
    drop(disk);
    assert_eq!(home.folder.sweep_leftovers(&home.lock).unwrap(), [left.path()]);
    assert_eq!(home.folder.images().unwrap(), [kept]);
}

//! What the image has of each thread besides its registers.
//!
//! The securebits say whether root's rights go with a change of user (capabilities(7)). CRIU (4.2) has them from memory of the
//! process that another process of the same user can write during a dump, and the kernel does not show those of another process.
//! So what is in the image is all there is to check.

use std::collections::BTreeMap;

use super::devices::images;
use super::{Error, Records, damaged};
use crate::proto::CoreEntry;
use rekindle_os::beneath::Beneath;

const CORE: u32 = 0x5505_3847;

/// The securebits that a restore gives to each thread, by its id as its process sees it. The dead have none.
///
/// # Errors
/// When an image file is damaged.
pub fn securebits(dir: &Beneath) -> Result<BTreeMap<i32, u32>, Error> {
    let bits = |(id, core): (i32, CoreEntry)| Some((id, core.thread?.credentials?.securebits));
    Ok(cores(dir)?.into_iter().filter_map(bits).collect())
}

/// The processes that were stopped when CRIU came, by their pid as they see themselves; sorted.
///
/// # Errors
/// When an image file is damaged.
pub fn stopped(dir: &Beneath) -> Result<Vec<i32>, Error> {
    /// `COMPEL_TASK_STOPPED`
    const STOPPED: u32 = 3;
    let is_one = |core: &CoreEntry| core.task.is_some_and(|task| task.state == STOPPED);
    Ok(cores(dir)?.into_iter().filter(|(_, core)| is_one(core)).map(|(id, _)| id).collect())
}

fn cores(dir: &Beneath) -> Result<BTreeMap<i32, CoreEntry>, Error> {
    let mut all = BTreeMap::new();
    for (name, path) in images(dir, "core-")? {
        let id: i32 = name.parse().map_err(|_| damaged(&path, "its name is not core-ID.img"))?;
        all.extend(Records::open(path, CORE)?.next()?.map(|core| (id, core)));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::super::tests::beneath;
    use super::super::tests::write;
    use super::*;

    #[test]
    fn the_bits_of_each_thread_and_who_is_stopped_are_read() {
        let dir = tempfile::tempdir().unwrap();
        // Field 1, the machine; field 5, the thread, with its nice value and field 10, credentials with a user id and field 13.
        let core = |bits: u8| vec![8, 1, 5 << 3 | 2, 8, 3 << 3, 0, 10 << 3 | 2, 4, 8, 0, 13 << 3, bits];
        write(&dir.path().join("core-1001.img"), CORE, &[core(0)]);
        write(&dir.path().join("core-1002.img"), CORE, &[core(0x2f)]);
        // A process that is dead and not reaped.
        write(&dir.path().join("core-1003.img"), CORE, &[vec![8, 1]]);
        assert_eq!(securebits(&beneath(dir.path())).unwrap(), BTreeMap::from([(1001, 0), (1002, 0x2f)]));
        assert_eq!(stopped(&beneath(dir.path())).unwrap(), [0; 0]);
        // Field 3, the process, with its state.
        write(&dir.path().join("core-1003.img"), CORE, &[vec![8, 1, 3 << 3 | 2, 2, 8, 3]]);
        write(&dir.path().join("core-1002.img"), CORE, &[vec![8, 1, 3 << 3 | 2, 2, 8, 1]]);
        assert_eq!(stopped(&beneath(dir.path())).unwrap(), [1003]);
        write(&dir.path().join("core-1004.img"), CORE, &[vec![5 << 3 | 2, 8, 3]]);
        assert!(securebits(&beneath(dir.path())).is_err());
    }
}

//! What the image has of each thread besides its registers.
//!
//! The securebits say whether root's rights go with a change of user (capabilities(7)). CRIU (4.2) has them from memory of the
//! process that another process of the same user can write during a dump, and the kernel does not show those of another process.
//! So what is in the image is all there is to check.

use std::collections::BTreeMap;

use super::devices::images;
use super::rewrite::{rewrite, with_fields};
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

/// Makes SCHED_OTHER of the policies that CRIU (4.2) dumps and refuses to restore (`validate_sched_parm`). Returns of how many
/// threads.
///
/// # Errors
/// When an image file is damaged, or cannot be written.
pub fn forget_policies(dir: &Beneath) -> Result<usize, Error> {
    /// `sched_policy` of `thread_core_entry`, with the value 0.
    const OTHER: [u8; 2] = [4 << 3, 0];
    /// `SCHED_RESET_ON_FORK`, which CRIU takes with the policy.
    const RESET: u32 = 0x4000_0000;
    /// SCHED_OTHER, SCHED_FIFO, SCHED_RR, SCHED_BATCH, SCHED_IDLE.
    const KNOWN: [u32; 5] = [0, 1, 2, 3, 5];
    /// `thread_core` of `core_entry`, length-delimited.
    const THREAD: u64 = 5 << 3 | 2;
    let is_known = |core: &CoreEntry| {
        core.thread.is_none_or(|thread| KNOWN.contains(&(thread.policy.unwrap_or_default() & !RESET)))
    };
    let mut forgotten = 0;
    for (_, path) in images(dir, "core-")? {
        rewrite(&path, CORE, |core: CoreEntry, record| {
            if is_known(&core) {
                return Ok(None);
            }
            forgotten += 1;
            // Of a field that is there twice, the last value counts.
            let new = with_fields(record, |key, thread| Some((key == THREAD).then(|| [thread, &OTHER].concat())));
            Ok(Some(new.ok_or_else(|| damaged(&path, "a record cannot be read"))?))
        })?;
    }
    Ok(forgotten)
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
    use prost::Message;

    use super::super::tests::beneath;
    use super::super::tests::write;
    use super::*;
    use crate::proto::{CredsEntry, ThreadCoreEntry};

    #[test]
    fn a_policy_that_criu_does_not_restore_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let policy =
            |policy: u32| ThreadCoreEntry { policy: Some(policy), credentials: Some(CredsEntry { securebits: 9 }) };
        let put = |id: u32, number: u32| {
            let core = CoreEntry { task: None, thread: Some(policy(number)) }.encode_to_vec();
            write(&dir.path().join(format!("core-{id}.img")), CORE, &[core]);
        };
        let is_in = |id: i32| cores(&beneath(dir.path())).unwrap()[&id].thread;
        for (id, number) in [(1, 0), (2, 1), (3, 6), (4, 0x4000_0006), (5, 7), (6, 0x4000_0001)] {
            put(id, number);
        }
        assert_eq!(forget_policies(&beneath(dir.path())).unwrap(), 3);
        for (id, number) in [(1, 0), (2, 1), (3, 0), (4, 0), (5, 0), (6, 0x4000_0001)] {
            assert_eq!(is_in(id), Some(policy(number)), "{id}");
        }
        assert_eq!(forget_policies(&beneath(dir.path())).unwrap(), 0);
    }

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

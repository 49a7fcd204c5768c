//! Watches of inotify(7) that CRIU loses, or makes without their flags.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rekindle_os::inotify::{self as kernel, Watch};
use rekindle_os::{attributes, mounts};

/// Flags that a watch keeps: CRIU makes watches with events only.
pub(crate) const FLAGS: u32 = libc::IN_ONESHOT | libc::IN_EXCL_UNLINK;

/// Gives watches their flags again: the lines of `then`, each `watch 2 mask 84000006`. The files are those that the job's
/// descriptor `number` watches already, so it learns nothing of others, whatever the record says.
pub(crate) fn set_flags(inotify: &OwnedFd, pid: i32, number: i32, then: &str) -> Option<()> {
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")).ok()?;
    let (watches, mounts) = (Watch::all(&info), mounts::of(pid).ok()?);
    for line in then.lines() {
        let (number, mask) = line.strip_prefix("watch ")?.split_once(" mask ")?;
        let (number, mask) = (u32::from_str_radix(number, 16).ok()?, u32::from_str_radix(mask, 16).ok()?);
        let watch = watches.iter().find(|watch| watch.number == number)?;
        if watch.mask & FLAGS != mask & FLAGS {
            let file = watch.file(pid, &mounts)?;
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let mask = watch.mask & libc::IN_ALL_EVENTS | mask & FLAGS;
            kernel::change(inotify, Path::new(&path), number, mask).ok()?;
        }
    }
    Some(())
}

/// Watches files without names again: those lines of `then` that are not in `now`, each `watch 2 mask 708 of descriptor 5 of
/// 1032`. The descriptor is the job's own, so it learns nothing of files that it does not have.
pub(crate) fn watch(inotify: &OwnedFd, then: &str, now: Option<&str>, pids: &BTreeMap<i32, i32>) -> Option<()> {
    let now: Vec<&str> = now.unwrap_or_default().lines().collect();
    // CRIU has told the job that the watch has ended. Older events are not in the image, so these are all of the restore.
    let told = attributes::length(inotify, libc::FIONREAD).ok().and_then(|length| usize::try_from(length).ok())?;
    if told > 0 {
        nix::unistd::read(inotify, &mut vec![0; told]).ok()?;
    }
    for line in then.lines().filter(|line| !now.contains(line)) {
        let words: Vec<&str> = line.split(' ').collect();
        let ["watch", number, "mask", mask, "of", "descriptor", file, "of", pid] = words[..] else { return None };
        let (pid, file): (i32, i32) = (pid.parse().ok()?, file.parse().ok()?);
        let file = format!("/proc/{}/fd/{file}", pids.get(&pid)?);
        let mask = u32::from_str_radix(mask, 16).ok()? & (libc::IN_ALL_EVENTS | FLAGS);
        kernel::watch(inotify, Path::new(&file), u32::from_str_radix(number, 16).ok()?, mask).ok()?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

    use super::*;

    #[test]
    fn a_watch_gets_its_flags_and_keeps_its_number() {
        if !rekindle_testing::root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK).unwrap();
        let (file, other) = (dir.path().join("file"), dir.path().join("other"));
        for path in [&file, &other] {
            std::fs::write(path, "").unwrap();
            inotify.add_watch(path, AddWatchFlags::IN_MODIFY).unwrap();
        }
        let inotify: OwnedFd = inotify.into();
        let (pid, number) = (std::process::id().cast_signed(), inotify.as_raw_fd());
        let masks = || {
            let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")).unwrap();
            let mut all: Vec<_> = Watch::all(&info).iter().map(|one| (one.number, one.mask)).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(masks(), [(1, 2), (2, 2)]);
        // A forged record gives it no other events, and no other file.
        set_flags(&inotify, pid, number, "watch 2 mask 80000fff").unwrap();
        assert_eq!(masks(), [(1, 2), (2, 0x8000_0002)]);
        assert_eq!(set_flags(&inotify, pid, number, "watch 3 mask 80000002"), None);
        assert_eq!(set_flags(&inotify, pid, number, "odd"), None);
        assert!(kernel::change(&inotify, dir.path(), 3, libc::IN_CREATE).is_ok(), "the next watch has the next number");
    }
}

//! The freezers of control groups. In a frozen group of cgroup v1 even SIGKILL does not end a process; version 2 lets it end.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::hierarchy::folder_in;
use super::{PROCS, hierarchies, memberships};
use crate::{mounts, process};

/// Thaws the frozen groups of these processes, and returns how many. Groups with other processes are left alone, and our
/// own group and those above it.
///
/// # Errors
/// When /proc cannot be read, or a group cannot be thawed.
pub fn thaw(pids: &[i32]) -> io::Result<usize> {
    let is_freezer = |controllers: &str| controllers.split(',').any(|controller| controller == "freezer");
    let all = hierarchies()?;
    let Some(freezer) = all.iter().find(|hierarchy| is_freezer(&hierarchy.controllers)) else { return Ok(0) };
    let mounts = mounts::of("self")?;
    let mut folders: BTreeSet<PathBuf> = BTreeSet::new();
    for pid in pids {
        // It may have ended.
        let Ok(text) = process::text(*pid, "cgroup") else { continue };
        let groups = memberships(&text).filter(|(controllers, _)| is_freezer(controllers));
        // A group is frozen also by one above it.
        let groups = groups.flat_map(|(_, group)| Path::new(group).ancestors());
        let foreign = groups.filter(|group| !Path::new(&freezer.own).starts_with(group)).filter_map(Path::to_str);
        folders.extend(
            foreign.filter_map(|group| mounts.iter().find_map(|mount| folder_in(mount, &freezer.controllers, group))),
        );
    }
    let mut thawed = 0;
    // In the order of paths a group comes after the one that it is in.
    for folder in folders {
        let state = folder.join("freezer.state");
        let is_frozen = fs::read_to_string(&state).is_ok_and(|state| state.trim() != "THAWED");
        if is_frozen && has_only(&folder, pids) {
            fs::write(state, "THAWED")?;
            thawed += 1;
        }
    }
    Ok(thawed)
}

/// The first of these processes that is in a frozen group of cgroup v2, with the group that was frozen: its own one, or one
/// above. None where no such group can be seen.
#[must_use]
pub fn frozen(pids: &[i32]) -> Option<(i32, PathBuf)> {
    let mounts = mounts::of("self").ok()?;
    let mut known: BTreeMap<String, bool> = BTreeMap::new();
    pids.iter().find_map(|pid| {
        let text = process::text(*pid, "cgroup").ok()?;
        let (_, group) = memberships(&text).find(|(controllers, _)| controllers.is_empty())?;
        let folder = |group: &Path| mounts.iter().find_map(|mount| folder_in(mount, "", group.to_str()?));
        let look = || {
            let events =
                folder(Path::new(group)).and_then(|folder| fs::read_to_string(folder.join("cgroup.events")).ok());
            events.is_some_and(|events| events.lines().any(|line| line == "frozen 1"))
        };
        let is_frozen = *known.entry(group.to_owned()).or_insert_with(look);
        let frozen = |group: &PathBuf| fs::read_to_string(group.join("cgroup.freeze")).is_ok_and(|it| it.trim() == "1");
        let cause = || Path::new(group).ancestors().filter_map(folder).find(frozen);
        is_frozen.then(|| (*pid, cause().or_else(|| folder(Path::new(group))).unwrap_or_else(|| group.into())))
    })
}

/// Whether all live processes of a group and of those below it are among these.
fn has_only(folder: &Path, pids: &[i32]) -> bool {
    let Ok(text) = fs::read_to_string(folder.join(PROCS)) else { return false };
    let mut inside = text.lines().filter_map(|line| line.parse().ok());
    let is_one = |pid: i32| pids.contains(&pid) || process::has_ended(pid);
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut below = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    inside.all(is_one) && below.all(|entry| has_only(&entry.path(), pids))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::cgroup::Hierarchy;

    #[test]
    fn a_process_in_a_frozen_group_is_found_with_the_group_that_was_frozen() {
        let two = hierarchies().unwrap_or_default().into_iter().find(Hierarchy::is_two).and_then(|two| two.folder);
        let above = two.map(|two| two.join(format!("rekindle-frozen-{}", std::process::id())));
        let made = above.as_ref().is_some_and(|above| fs::create_dir_all(above.join("below")).is_ok());
        if !rekindle_testing::require("groups", made, "no group of cgroup v2 can be made") {
            return;
        }
        let above = above.unwrap();
        let below = above.join("below");
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pids = [std::process::id().cast_signed(), child.id().cast_signed()];
        let look = || -> io::Result<_> {
            fs::write(below.join(PROCS), pids[1].to_string())?;
            let before = frozen(&pids);
            let freeze = |group: &Path, value: &str| {
                fs::write(group.join("cgroup.freeze"), value)?;
                let reached = format!("frozen {value}");
                let deadline = Instant::now() + Duration::from_secs(10);
                while !fs::read_to_string(below.join("cgroup.events"))?.contains(&reached) && Instant::now() < deadline
                {
                    std::thread::yield_now();
                }
                io::Result::Ok(frozen(&pids))
            };
            Ok([before, freeze(&below, "1")?, freeze(&below, "0")?, freeze(&above, "1")?, freeze(&above, "0")?])
        };
        let found = look();
        let _ = fs::write(above.join("cgroup.freeze"), "0");
        let _ = child.kill();
        let _ = child.wait();
        let removed = [&below, &above].map(|group| fs::remove_dir(group).is_ok());
        let expected = [None, Some((pids[1], below.clone())), None, Some((pids[1], above.clone())), None];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(removed, [true; 2]);
    }
}

//! The freezer of cgroup v1: even SIGKILL does not end a process in a frozen group. (Version 2 lets it end.)

use std::collections::BTreeSet;
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

/// Whether all live processes of a group and of those below it are among these.
fn has_only(folder: &Path, pids: &[i32]) -> bool {
    let Ok(text) = fs::read_to_string(folder.join(PROCS)) else { return false };
    let mut inside = text.lines().filter_map(|line| line.parse().ok());
    let is_one = |pid: i32| pids.contains(&pid) || process::has_ended(pid);
    let Ok(entries) = fs::read_dir(folder) else { return false };
    let mut below = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    inside.all(is_one) && below.all(|entry| has_only(&entry.path(), pids))
}

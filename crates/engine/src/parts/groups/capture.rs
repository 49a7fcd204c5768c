//! Control groups that the job made and moved processes into.
//!
//! Such a group is below the supervisor's group, in which the job was started. A group elsewhere belongs to whoever
//! moved the process there: an administrator, a scheduler. Threaded groups (cgroup v2), and groups of a process in its
//! own cgroup namespace, are not recorded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;

use rekindle_os::cgroup::{self, Folder, Hierarchy};
use rekindle_os::process;
use rekindle_store::GroupPath;
use rekindle_store::manifest::{ControlGroup, Owner};

/// What the freeze found.
#[derive(Debug, Default)]
pub(crate) struct Found {
    /// Each group comes after its parent.
    pub(crate) groups: Vec<ControlGroup>,
    /// Notes on groups that are not in the image.
    pub(crate) notes: Vec<String>,
}

/// The control groups of these processes, and those between them and the supervisor's group. If no process was moved,
/// this takes one read for each.
pub(crate) fn find(tree: &[i32]) -> Found {
    let Ok(own) = process::text("self", "cgroup") else { return Found::default() };
    let read = |pid: i32| Some((pid, process::text(pid, "cgroup").ok()?));
    let elsewhere = tree.iter().copied().filter_map(read).filter(|(_, groups)| *groups != own);
    // A dead process cannot be moved.
    let elsewhere = elsewhere.filter(|(pid, _)| !matches!(process::state(*pid), Some('Z' | 'X') | None));
    let elsewhere: Vec<(i32, String)> = elsewhere.collect();
    if elsewhere.is_empty() {
        return Found::default();
    }
    let hierarchies = match cgroup::hierarchies() {
        Ok(hierarchies) => hierarchies,
        Err(error) => return Found { notes: vec![note("all of the job", &error)], ..Found::default() },
    };
    let mut groups: BTreeMap<(&str, GroupPath), ControlGroup> = BTreeMap::new();
    let mut notes = BTreeSet::new();
    for (pid, text) in &elsewhere {
        let Some(inner) = process::inner_pid(*pid) else { continue };
        for (hierarchy, path) in below(text, &hierarchies) {
            let key = (hierarchy.controllers.as_str(), path);
            // Each group is recorded once, however many processes are in it.
            let recorded = match is_seen_alike(*pid) {
                true if groups.contains_key(&key) => Ok(Vec::new()),
                true => record(hierarchy, &key.1),
                false => Err(io::Error::other("one of its processes has its own cgroup namespace")),
            };
            match recorded {
                Ok(recorded) => {
                    for group in recorded {
                        groups.entry((key.0, group.path.clone())).or_insert(group);
                    }
                    if let Some(group) = groups.get_mut(&key) {
                        group.processes.push(inner);
                    }
                }
                Err(error) => drop(notes.insert(note(key.1.as_str(), &error))),
            }
        }
    }
    Found { groups: groups.into_values().collect(), notes: notes.into_iter().collect() }
}

fn note(what: &str, error: &io::Error) -> String {
    format!(
        "the control group {what:?} is not in the image, so a restore puts its processes into the supervisor's group: {error}. Move \
         them after a restore"
    )
}

/// Whether the process sees the same names of control groups as we do.
fn is_seen_alike(pid: i32) -> bool {
    // A kernel without cgroup namespaces has no such link.
    let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/cgroup")).ok();
    namespace(&pid.to_string()) == namespace("self")
}

/// The groups of a process that are below ours.
fn below<'a>(groups: &str, hierarchies: &'a [Hierarchy]) -> Vec<(&'a Hierarchy, GroupPath)> {
    let one = |(controllers, path): (&str, &str)| {
        let hierarchy = hierarchies.iter().find(|hierarchy| hierarchy.controllers == controllers)?;
        Some((hierarchy, hierarchy.below(path)?.parse().ok()?))
    };
    cgroup::memberships(groups).filter_map(one).collect()
}

/// The settings of a group and of its parents.
fn record(hierarchy: &Hierarchy, path: &GroupPath) -> io::Result<Vec<ControlGroup>> {
    let base = hierarchy.folder.as_deref().ok_or_else(|| io::Error::other("its hierarchy is not mounted here"))?;
    let mut folder = Folder::open(base, hierarchy.is_two())?;
    let mut all = Vec::new();
    for (name, path) in path.parts().zip(path.with_those_above()) {
        folder = folder.child(name)?;
        if !folder.is_of_processes() {
            return Err(io::Error::other("it is a threaded control group"));
        }
        let (own, procs) = (folder.metadata()?, folder.procs_metadata()?);
        all.push(ControlGroup {
            hierarchy: hierarchy.controllers.clone(),
            path,
            mode: own.mode(),
            owner: Owner { uid: own.uid(), gid: own.gid() },
            procs: Owner { uid: procs.uid(), gid: procs.gid() },
            settings: folder.settings(),
            processes: Vec::new(),
        });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_groups_below_the_supervisors_are_the_jobs() {
        let of =
            |controllers: &str, own: &str| Hierarchy { controllers: controllers.into(), own: own.into(), folder: None };
        let hierarchies = [of("pids", "/"), of("", "/slice/unit"), of("cpu,cpuacct", "/a")];
        let groups = "9:hugetlb:/x\n8:pids:/job/inner\n2:cpu,cpuacct:/ab\n0::/slice/unit/job\n";
        let found = below(groups, &hierarchies);
        let found: Vec<_> = found.iter().map(|(it, path)| (it.controllers.as_str(), path.as_str())).collect();
        assert_eq!(found, [("pids", "job/inner"), ("", "job")]);
        assert!(below("8:pids:/\n2:cpu,cpuacct:/\n0::/slice/other\n", &hierarchies).is_empty());
        // A group outside of what a container sees.
        assert!(below("8:pids:/../x\n", &hierarchies).is_empty());
    }

    #[test]
    fn a_tree_in_our_own_groups_has_none() {
        let found = find(&process::tree(std::process::id().cast_signed()));
        assert!(found.groups.is_empty() && found.notes.is_empty(), "{found:?}");
    }
}

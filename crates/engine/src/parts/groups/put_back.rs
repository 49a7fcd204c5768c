//! Control groups that the job made: created again if they are missing, and entered, before the job runs.
//!
//! The supervisor's present group replaces its group at the snapshot. Everything is done with the rights of the job's
//! user, because the image names the groups, and the image can come from somebody else. A failure does not prevent the
//! job from running, and is reported.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use crate::launch::identity::Identity;
use rekindle_os::cgroup::{self, Folder, Hierarchy, NotSet, PROCS};
use rekindle_os::{identity, process};
use rekindle_store::manifest::{ControlGroup, Owner};
use rekindle_store::{GroupPath, Manifest};

/// Moves the stopped processes of the tree below `root` into the control groups that they were in. Returns a warning
/// for each group that could not be entered or lacks a setting.
pub(crate) fn put_back(root: i32, manifest: &Manifest, user: Option<&Identity>) {
    let groups = &manifest.control_groups;
    if groups.is_empty() {
        return;
    }
    let pids = process::tree(root).into_iter().filter_map(|pid| Some((process::inner_pid(pid)?, pid))).collect();
    let names = manifest.tree.processes.iter().map(|process| (process.pid, process.name.as_str())).collect();
    let job = Job {
        pids,
        names,
        user: user.map_or_else(|| "the supervisor".to_owned(), |user| format!("user {}", user.name)),
    };
    let work = |hierarchies: Vec<Hierarchy>| {
        let rights = user.and_then(Identity::file_rights);
        let all = || all(groups, &hierarchies, &job);
        match rights {
            Some(rights) => identity::with_file_rights(rights.uid, rights.gid, rights.groups, all),
            None => Ok(all()),
        }
    };
    match cgroup::hierarchies().and_then(work) {
        Ok(warnings) => warnings.iter().for_each(|warning| tracing::warn!("{warning}")),
        Err(error) => tracing::warn!(
            "cannot move the job's processes into the control groups that the job had made; they are in the supervisor's: \
             {error}. Write each PID to the {PROCS} of its group (/proc/PID/cgroup shows where it is)"
        ),
    }
}

/// The restored processes.
struct Job<'a> {
    /// pids as the job sees them, and as we do.
    pids: BTreeMap<i32, i32>,
    names: BTreeMap<i32, &'a str>,
    /// The user whose rights are used, for messages.
    user: String,
}

/// A control group that exists now.
struct Here<'a> {
    group: &'a ControlGroup,
    /// The folder of the supervisor's group.
    base: &'a Path,
    /// Whether it was created by this restore.
    is_new: bool,
}

fn all(groups: &[ControlGroup], hierarchies: &[Hierarchy], job: &Job<'_>) -> Vec<String> {
    let mut sorted: Vec<&ControlGroup> = groups.iter().collect();
    // A parent comes before its children.
    sorted.sort_by_key(|group| (&group.hierarchy, &group.path));
    let (mut warnings, mut here) = (Vec::new(), Vec::new());
    for group in sorted {
        let hierarchy = hierarchies.iter().find(|hierarchy| hierarchy.controllers == group.hierarchy);
        let Some(base) = hierarchy.and_then(|hierarchy| hierarchy.folder.as_deref()) else {
            warnings.extend(job.stays(group, None, "this hierarchy is not mounted here"));
            continue;
        };
        match find_or_make(base, group) {
            Ok((folder, is_new)) => {
                let at = Here { group, base, is_new };
                warnings.extend(at.put_settings(&folder, job));
                here.push(at);
            }
            Err(why) => warnings.extend(job.stays(group, Some(base), &format!("it cannot be created: {why}"))),
        }
    }
    // The groups' limits are in force now.
    warnings.extend(here.iter().filter_map(|at| at.enter(job)));
    // Last, because a mode can close a group to its owner; children first.
    warnings.extend(here.iter().rev().filter(|at| at.is_new).filter_map(Here::hand_over));
    warnings
}

/// Opens the group's folder or creates it; also returns whether it was created.
fn find_or_make(base: &Path, group: &ControlGroup) -> io::Result<(Folder, bool)> {
    let (mut folder, mut is_new) = (Folder::open(base, group.hierarchy.is_empty())?, false);
    for name in group.path.parts() {
        (folder, is_new) = folder.child_or_new(name)?;
    }
    Ok((folder, is_new))
}

impl Here<'_> {
    /// Restores the group's settings, unless processes use the group.
    fn put_settings(&self, folder: &Folder, job: &Job<'_>) -> Option<String> {
        // A group that we created has no process yet.
        if !self.is_new && folder.is_populated().unwrap_or(true) {
            return None;
        }
        let mut failed = folder.put_settings(&self.group.settings);
        let known = cgroup::settings(self.group.hierarchy.is_empty());
        let is_known = |name: &String| known.iter().any(|setting| setting.name == name);
        let unknown = self.group.settings.keys().filter(|name| !is_known(name)).cloned();
        let first = match (failed.is_empty(), unknown.into_iter().next()) {
            (false, _) => {
                let NotSet { name, value, source } = failed.remove(0);
                format!("{name} is not {value:?}: {source}")
            }
            (true, Some(name)) => format!("{name:?} is not a setting that this version of rekindle can restore"),
            (true, None) => return None,
        };
        let more = if failed.is_empty() { String::new() } else { format!(" (and {} more)", failed.len()) };
        Some(format!(
            "the control group {} does not have all settings of the snapshot: {first}{more}. Set them by hand, or allow \
             {} to do it: the controller must be in cgroup.subtree_control of the parent group",
            folder_of(self.base, &self.group.path).display(),
            job.user
        ))
    }

    /// Moves the processes in.
    fn enter(&self, job: &Job<'_>) -> Option<String> {
        let enter = |inner: &i32| -> io::Result<()> {
            let Some(pid) = job.pids.get(inner) else { return Ok(()) };
            find_or_make(self.base, self.group)?.0.enter(*pid)
        };
        let failed = self.group.processes.iter().filter_map(|inner| Some((*inner, enter(inner).err()?)));
        let failed: Vec<(i32, io::Error)> = failed.collect();
        let why = format!("it cannot be entered: {}", failed.first()?.1);
        let stay = failed.iter().map(|(inner, _)| *inner).collect();
        job.stays(&ControlGroup { processes: stay, ..self.group.clone() }, Some(self.base), &why)
    }

    /// Gives it to its owner at the snapshot.
    fn hand_over(&self) -> Option<String> {
        let (group, ids) = (self.group, |owner: Owner| (owner.uid, owner.gid));
        let done = find_or_make(self.base, group)
            .and_then(|(folder, _)| folder.hand_over(group.mode, ids(group.owner), ids(group.procs)));
        let why = done.err()?;
        Some(format!(
            "the control group {} was created again, and cannot be given to user {} and group {} as at the snapshot: \
             {why}. Use chown if the job needs it",
            folder_of(self.base, &group.path).display(),
            group.owner.uid,
            group.owner.gid
        ))
    }
}

/// How many processes a message names.
const NAMED: usize = 5;

impl Job<'_> {
    /// A warning that processes are not in their group; None if there are no such processes.
    fn stays(&self, group: &ControlGroup, base: Option<&Path>, why: &str) -> Option<String> {
        let there: Vec<(i32, i32)> =
            group.processes.iter().filter_map(|inner| Some((*inner, *self.pids.get(inner)?))).collect();
        let (_, pid) = *there.first()?;
        let name = |inner: &i32| self.names.get(inner).copied().unwrap_or_default();
        let mut named: Vec<String> =
            there.iter().take(NAMED).map(|(inner, _)| format!("{inner} ({})", name(inner))).collect();
        if there.len() > NAMED {
            named.push(format!("{} more", there.len() - NAMED));
        }
        let (word, stay) = if there.len() == 1 { ("process", "is") } else { ("processes", "are") };
        let kind = match group.hierarchy.as_str() {
            "" => "cgroup v2".to_owned(),
            controllers => format!("cgroup v1, {controllers:?}"),
        };
        let help = match base {
            Some(base) => format!(
                "Create it and move the processes into it (echo {pid} > {}), or allow {} to do that before the next restore",
                folder_of(base, &group.path).join(PROCS).display(),
                self.user
            ),
            None => "Mount it, or set the limits differently".to_owned(),
        };
        Some(format!(
            "{word} {} {stay} in the supervisor's control group and not in {:?} below it as at the snapshot ({kind}): {why}. \
             {help}",
            named.join(", "),
            group.path.as_str()
        ))
    }
}

fn folder_of(base: &Path, path: &GroupPath) -> PathBuf {
    base.join(path.as_str())
}

//! Requirements for short freezes: images in memory, and the interposer. Without them `run` works, but is slower.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{Check, memory, nvidia, trial};
use crate::config::{Config, Interposer, Staging};
use rekindle_base::chain;
use rekindle_base::units::size;
use rekindle_engine::launch::interposer;
use rekindle_engine::snapshot::pages;
use rekindle_store::staging::leftovers::{self, Leftover};
use rekindle_store::staging::{self, HugePages};
use rekindle_store::{Access, Store, Trust};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    /// snapshot.staging-directory.
    pub(super) base: PathBuf,
    pub(super) tmpfs: Tmpfs,
    /// Capacity of a FIFO in bytes.
    pub(super) pipe: Option<u64>,
    pub(super) preload: Result<(), String>,
    /// Leftovers of dead supervisors.
    pub(super) left: Vec<Leftover>,
    /// Staging areas in memory that belong to no job of the store.
    pub(super) strangers: Vec<PathBuf>,
}

/// The result of mounting a tmpfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Tmpfs {
    Mounted(HugePages),
    /// Others could write there.
    Refused(String),
    /// The kernel did not mount it.
    Failed(String),
    /// snapshot.staging is "store", so none is needed.
    NotWanted,
    /// Only root can mount one.
    NotRoot,
}

pub(super) fn gather(config: &Config) -> Facts {
    let base = config.snapshot.staging_directory.clone();
    let tmpfs = match config.snapshot.staging {
        Staging::Store => Tmpfs::NotWanted,
        Staging::Ram if !nix::unistd::geteuid().is_root() => Tmpfs::NotRoot,
        Staging::Ram => match staging::try_mount(&base) {
            Ok(huge) => Tmpfs::Mounted(huge),
            Err(error @ staging::Error::File(_)) => Tmpfs::Failed(chain(&error)),
            Err(error) => Tmpfs::Refused(chain(&error)),
        },
    };
    // Signatures do not matter for memory usage.
    let jobs = Store::open(&config.store.directory, Access::Read).ok();
    Facts {
        left: left_by_the_dead(&base, config, jobs.as_ref()),
        strangers: jobs.as_ref().map(|store| leftovers::strangers(&base, store)).unwrap_or_default(),
        base: base.clone(),
        tmpfs,
        pipe: pages::fifo_room().ok(),
        preload: try_preload(&base, &config.store.directory),
    }
}

/// Leftovers of this store's jobs, and those in memory of other stores' jobs.
fn left_by_the_dead(base: &Path, config: &Config, jobs: Option<&Store>) -> Vec<Leftover> {
    let mut left = jobs.map(leftovers::find).unwrap_or_default();
    left.extend(leftovers::elsewhere(base, &config.store.directory, &Trust::default()));
    left
}

/// Checks that LD_PRELOAD can name the interposer at its place, and that the system's loader accepts it.
fn try_preload(folder: &Path, store: &Path) -> Result<(), String> {
    interposer::preload_value(&folder.join("interposer.so"), None).map_err(|error| error.to_string())?;
    let dir = trial::temporary_folder(store).ok_or("no temporary folder allows running programs")?;
    let path = interposer::unpack(dir.path()).map_err(|error| chain(&error))?;
    let mut program = Command::new("true");
    program.env("LD_PRELOAD", path).stdin(Stdio::null());
    let output = program.output().map_err(|error| format!("cannot run `true`: {error}"))?;
    // The loader only warns about an object that it does not accept, and continues.
    let said = String::from_utf8_lossy(&output.stderr);
    match said.lines().next() {
        None if output.status.success() => Ok(()),
        None => Err(format!("a program that loaded it ended with {}", output.status)),
        Some(line) => Err(line.to_owned()),
    }
}

/// `headroom` is that of the control group, `reserve` is snapshot.memory-reserve.
pub(super) fn judge(
    facts: &Facts,
    config: &Config,
    memory: &memory::Facts,
    nvidia: &nvidia::Facts,
    headroom: Option<u64>,
) -> Vec<Check> {
    if facts.tmpfs == Tmpfs::NotWanted {
        return NAMES.map(|name| Check::not_here(name, "snapshot.staging is \"store\"")).into();
    }
    vec![
        tmpfs(facts),
        huge_pages(&facts.tmpfs, memory.shared.as_deref()),
        room(memory.available, headroom, config.snapshot.memory_reserve.bytes()),
        pipes(facts),
        preload(facts, config.snapshot.interposer, nvidia),
        left_behind(facts),
    ]
}

const TMPFS: &str = "staging.tmpfs";
const HUGE_PAGES: &str = "staging.huge-pages";
const ROOM: &str = "staging.memory";
const PIPES: &str = "staging.pipes";
const PRELOAD: &str = "staging.interposer";
const LEFT: &str = "staging.left-behind";
const NAMES: [&str; 6] = [TMPFS, HUGE_PAGES, ROOM, PIPES, PRELOAD, LEFT];

const NOT_TRIED: &str = "only root can check this";

const TO_THE_STORE: &str = "set snapshot.staging = \"store\"";

fn tmpfs(facts: &Facts) -> Check {
    let name = TMPFS;
    let base = facts.base.display();
    match &facts.tmpfs {
        Tmpfs::NotWanted | Tmpfs::NotRoot => Check::not_here(name, NOT_TRIED),
        Tmpfs::Mounted(_) => Check::ok(name, format!("a tmpfs can be mounted in {base}")),
        Tmpfs::Refused(why) => Check::warn(
            name,
            format!("{why}: images are made on the disk, and the job is frozen longer"),
            format!("set snapshot.staging-directory to another folder of root's, or {TO_THE_STORE}"),
        ),
        Tmpfs::Failed(why) => Check::missing(
            name,
            format!("{why}: no job can be started, because rekindle's own programs are in such a tmpfs"),
            "allow mounting (Docker: --cap-add=SYS_ADMIN --security-opt apparmor=unconfined), or set \
            snapshot.staging-directory to another folder of root's",
        ),
    }
}

fn left_behind(facts: &Facts) -> Check {
    let left =
        facts.left.iter().map(|left| (format!("job {} in {}: {left}", left.job, left.store.display()), left.advice()));
    let strangers = facts.strangers.iter().map(|path| {
        let found = format!("{} is mounted, and no job of this store uses it", path.display());
        (found, format!("if no supervisor of another store uses it: umount {}", path.display()))
    });
    let all: Vec<(String, String)> = left.chain(strangers).collect();
    if all.is_empty() {
        return Check::ok(LEFT, "no supervisor that ended left memory in use");
    }
    let (found, fixes): (Vec<String>, Vec<String>) = all.into_iter().unzip();
    Check::warn(LEFT, found.join("; "), fixes.join("; "))
}

/// "deny" applies to all mounts, whatever their options are (Documentation/admin-guide/mm/transhuge.rst).
fn huge_pages(tmpfs: &Tmpfs, setting: Option<&str>) -> Check {
    let name = HUGE_PAGES;
    match (tmpfs, setting) {
        (Tmpfs::NotWanted | Tmpfs::NotRoot, _) => Check::not_here(name, NOT_TRIED),
        (Tmpfs::Refused(_) | Tmpfs::Failed(_), _) => Check::not_here(name, "no tmpfs to check them with"),
        (Tmpfs::Mounted(_), None) | (Tmpfs::Mounted(HugePages::Absent), _) => {
            Check::not_here(name, "the kernel does not support them for tmpfs (CONFIG_TRANSPARENT_HUGEPAGE)")
        }
        (Tmpfs::Mounted(HugePages::Taken), Some("deny")) => Check::warn(
            name,
            "shmem_enabled is \"deny\": a tmpfs has only small pages, which take longer to prepare and to copy",
            "echo never | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled   # only \"deny\" overrides the mount option",
        ),
        (Tmpfs::Mounted(HugePages::Taken), Some(_)) => Check::ok(name, "tmpfs supports huge=within_size"),
    }
}

/// Room for two slots, because the newest image is kept while the next is written. The admission of each snapshot uses
/// the same numbers.
fn room(available: Option<u64>, headroom: Option<u64>, reserve: u64) -> Check {
    let name = ROOM;
    let free = available.map(|bytes| bytes.saturating_sub(reserve)).into_iter().chain(headroom).min();
    match free {
        None => Check::not_here(name, "unknown: /proc/meminfo does not show how much memory is free"),
        Some(0) => Check::warn(
            name,
            format!("no memory for an image beyond snapshot.memory-reserve ({})", size(reserve)),
            format!(
                "free or add memory, raise the memory limit (systemd: MemoryMax=, Slurm: --mem, Docker: --memory), or {TO_THE_STORE}"
            ),
        ),
        Some(free) => Check::ok(
            name,
            format!("memory has room for two images of up to {}, or one of up to {}", size(free / 2), size(free)),
        ),
    }
}

/// Measured on two cores with a job of 1.5 GiB: the freeze takes 0.53 s with 1 MiB, and 0.36 s with 32 MiB.
fn pipes(facts: &Facts) -> Check {
    let name = PIPES;
    match (&facts.tmpfs, facts.pipe) {
        (Tmpfs::NotWanted | Tmpfs::NotRoot, _) => Check::not_here(name, NOT_TRIED),
        (_, None) => Check::not_here(name, "cannot read the size of a pipe"),
        (_, Some(got)) if got >= pages::FIFO_ROOM => {
            Check::ok(name, format!("a pipe's buffer is at most {}", size(got)))
        }
        (_, Some(got)) => Check::warn(
            name,
            format!(
                "a pipe's buffer is at most {}: with {}, freezing host memory takes a third less time",
                size(got),
                size(pages::FIFO_ROOM)
            ),
            format!("sudo sysctl fs.pipe-max-size={}   # or grant CAP_SYS_RESOURCE", pages::FIFO_ROOM),
        ),
    }
}

fn preload(facts: &Facts, wanted: Interposer, nvidia: &nvidia::Facts) -> Check {
    let name = PRELOAD;
    if wanted == Interposer::Off {
        return Check::not_here(name, "snapshot.interposer is \"off\"");
    }
    if nvidia.installed.is_none() && nvidia.library.is_err() {
        return Check::not_here(name, "no NVIDIA driver that would call it");
    }
    match &facts.preload {
        Ok(()) => Check::ok(name, "the loader accepts it"),
        Err(why) => Check::warn(
            name,
            format!("{why}: copying GPU memory takes several times as long"),
            "use a snapshot.staging-directory whose path is valid in LD_PRELOAD, on a system with glibc; or set snapshot.interposer = \"off\"",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::State;
    use rekindle_store::staging::Medium;

    const GIB: u64 = 1 << 30;

    fn facts(tmpfs: Tmpfs) -> Facts {
        Facts {
            base: "/run/rekindle".into(),
            tmpfs,
            pipe: Some(pages::FIFO_ROOM),
            preload: Ok(()),
            left: Vec::new(),
            strangers: Vec::new(),
        }
    }

    fn mounted() -> Tmpfs {
        Tmpfs::Mounted(HugePages::Taken)
    }

    #[test]
    fn without_a_tmpfs_images_go_to_the_store() {
        assert_eq!(tmpfs(&facts(mounted())).state, State::Ok);
        let refused = tmpfs(&facts(Tmpfs::Refused("cannot mount".into())));
        assert_eq!(refused.state, State::Warn, "run works without");
        assert_eq!(tmpfs(&facts(Tmpfs::Failed("cannot mount".into()))).state, State::Missing, "run does not");
        assert!(refused.fix.unwrap().contains("snapshot.staging-directory"));
        assert_eq!(tmpfs(&facts(Tmpfs::NotRoot)).state, State::NotHere);
    }

    #[test]
    fn only_deny_keeps_huge_pages_from_a_mount() {
        let judged = |tmpfs, setting| huge_pages(&tmpfs, setting).state;
        for setting in ["never", "advise", "always"] {
            assert_eq!(judged(mounted(), Some(setting)), State::Ok, "{setting}");
        }
        assert_eq!(judged(mounted(), Some("deny")), State::Warn);
        assert_eq!(judged(Tmpfs::Mounted(HugePages::Absent), Some("never")), State::NotHere);
        assert_eq!(judged(Tmpfs::Refused(String::new()), Some("deny")), State::NotHere);
    }

    #[test]
    fn room_is_told_for_two_images_and_for_one() {
        let check = room(Some(21 * GIB), None, GIB);
        assert_eq!(check.state, State::Ok);
        assert_eq!(check.found, "memory has room for two images of up to 10.0 GiB, or one of up to 20.0 GiB");
        // The reserve applies to the machine's memory, not to the group's limit.
        assert!(room(Some(21 * GIB), Some(4 * GIB), GIB).found.contains("two images of up to 2.0 GiB"));
        assert_eq!(room(Some(GIB), None, GIB).state, State::Warn);
        assert_eq!(room(None, None, GIB).state, State::NotHere);
    }

    #[test]
    fn a_small_pipe_is_a_hint() {
        assert_eq!(pipes(&facts(mounted())).state, State::Ok);
        let small = pipes(&Facts { pipe: Some(1 << 20), ..facts(mounted()) });
        assert_eq!(small.state, State::Warn);
        assert!(small.fix.unwrap().contains("fs.pipe-max-size=33554432"));
    }

    #[test]
    fn the_interposer_matters_where_a_driver_calls_it() {
        let bad = Facts { preload: Err("no".into()), ..facts(mounted()) };
        let with = nvidia::tests::facts("580.1");
        let without = nvidia::Facts { installed: None, library: Err("none".into()), ..nvidia::tests::facts("580.1") };
        assert_eq!(preload(&facts(mounted()), Interposer::Auto, &with).state, State::Ok);
        assert_eq!(preload(&bad, Interposer::Auto, &with).state, State::Warn);
        assert_eq!(preload(&bad, Interposer::Auto, &without).state, State::NotHere);
        assert_eq!(preload(&bad, Interposer::Off, &with).state, State::NotHere);
    }

    #[test]
    fn memory_that_is_held_for_nobody_is_named_with_what_to_do() {
        let mut facts = facts(Tmpfs::NotRoot);
        assert_eq!(left_behind(&facts).state, super::super::State::Ok);
        let image = rekindle_store::ImageId::new(7, chrono::DateTime::UNIX_EPOCH);
        let left = |needed| Leftover {
            job: "j".parse().unwrap(),
            store: "/store".into(),
            path: "/run/rekindle/j-1".into(),
            medium: Medium::Memory,
            bytes: 5 << 20,
            needed,
        };
        facts.left = vec![left(None), left(Some(image))];
        facts.strangers = vec!["/run/rekindle/k-2".into()];
        let check = left_behind(&facts);
        let fix = check.fix.unwrap();
        assert_eq!(check.state, super::super::State::Warn);
        assert!(check.found.contains("nobody needs") && check.found.contains("image 000007"), "{}", check.found);
        assert!(fix.contains("rekindle prune --discard-memory") && fix.contains("umount /run/rekindle/k-2"), "{fix}");
    }

    #[test]
    fn the_loader_here_takes_it_and_a_path_with_a_space_is_refused() {
        assert_eq!(try_preload(Path::new("/run"), Path::new("/nowhere")), Ok(()));
        let refused = try_preload(Path::new("/a b"), Path::new("/nowhere")).unwrap_err();
        assert!(refused.contains("LD_PRELOAD"), "{refused}");
    }
}

//! `rekindle show`: the details of an image.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use super::find::Finder;
use super::group::{self, PartOf};
use super::list::{milliseconds, storing, whereabouts};
use super::output::{Format, print_json, print_pairs, print_text};
use super::{Exit, Global, Misuse, named_criu};
use crate::published::{Persisting, Published};
use rekindle_base::Moved;
use rekindle_base::units::{moment, size};
use rekindle_criu::Criu;
use rekindle_engine::parts::gpu::placement::{self as gpus, Plan, Wishes};
use rekindle_engine::restore::compat::{self, Difference, Here};
use rekindle_os::process;
use rekindle_store::manifest::{Landing, Phase};
use rekindle_store::{Evidence, Known, Manifest, Place, Shown, State, Tag};

/// One copy of the image.
#[derive(Debug, Serialize)]
struct Copy {
    place: Place,
    folder: PathBuf,
}

/// The manifest, and facts that are not in it.
#[derive(Debug, Serialize)]
struct Image<'a> {
    #[serde(flatten)]
    manifest: &'a Manifest,
    copies: Vec<Copy>,
    /// What has shown that it can be restored: taken (nothing yet), refused, rehearsed or restored.
    evidence: Evidence,
    /// Whether the job has lived for restart.min-uptime after it was taken or restored.
    proven: bool,
    /// Whether it is pinned: no rule removes it.
    pinned: bool,
    tags: Vec<Tag>,
    /// The progress of storing it.
    persisting: Option<&'a Persisting>,
    /// Whether the group image that it is a part of is committed; null if it is none, or if that is unknown.
    group_committed: Option<bool>,
    /// How this machine differs; with a fatal difference it cannot be restored here.
    differences: Vec<Difference>,
    /// The GPUs that a restore on this machine would use, for a job that used some.
    devices: Option<Devices>,
}

/// How a restore here would use the GPUs.
#[derive(Debug, Serialize)]
struct Devices {
    /// stay, move, wait or refuse.
    plan: &'static str,
    moved: Vec<Moved>,
    /// Why it would wait or be refused.
    why: Option<String>,
}

impl Devices {
    fn of(manifest: &Manifest, here: &Here) -> Option<Devices> {
        let of = |plan, moved, why| Devices { plan, moved, why };
        (!manifest.tree.cuda.is_empty() && here.driver.is_some()).then(|| {
            match gpus::plan(manifest, &here.devices, &here.wishes) {
                Plan::Stay { .. } => of("stay", Vec::new(), None),
                Plan::Move(relocation) => of("move", relocation.moved, None),
                Plan::Wait(why) => of("wait", Vec::new(), Some(why.to_string())),
                Plan::Refuse(why) => of("refuse", Vec::new(), Some(why.to_string())),
            }
        })
    }

    /// Lines for people. A missing place is reported among the differences.
    fn lines(&self) -> Vec<String> {
        match (self.plan, &self.why) {
            ("stay", _) => vec!["the same GPUs".into()],
            ("wait", Some(why)) => vec![format!("waits: {why}")],
            _ => self.moved.iter().map(|m| format!("{} instead of {}: {}", m.new, m.old, m.why)).collect(),
        }
    }
}

pub(super) fn show(global: &Global, text: &str) -> anyhow::Result<Exit> {
    let (folder, image) = Finder::with_key(global)?.image(text)?;
    // Its place in memory may have been reused by the next image just now.
    let gone = || Misuse(format!("image {} no longer exists", image.id));
    let known = folder.known()?.into_iter().find(|known| known.id() == image.id).ok_or_else(gone)?;
    let live = Published::live(&folder)?;
    let persisting = storing(&known, live.as_ref());
    let image = known.best();
    let (shown, proven) = (folder.evidence()?, folder.proven()?.contains(&image.id));
    let evidence = shown.of(&image.id);
    let part = image.manifest().and_then(|manifest| manifest.group.as_ref());
    let part = part.map(|part| PartOf::new(image.id, part, group::published(&folder).as_ref()));
    match (global.format(), image.manifest()) {
        (Format::Json, Some(manifest)) => {
            let copies = known.copies().map(|copy| Copy { place: copy.place, folder: copy.dir.path().to_owned() });
            let (pinned, tags) = (known.tags().is_pinned(), known.tags().iter().cloned().collect());
            let here = look(global, manifest, live.as_ref())?;
            let (differences, devices) = (compat::compare(manifest, &here), Devices::of(manifest, &here));
            print_json(&Image {
                manifest,
                copies: copies.collect(),
                evidence,
                proven,
                pinned,
                tags,
                persisting,
                group_committed: part.and_then(|part| part.committed),
                differences,
                devices,
            })?;
        }
        (_, Some(manifest)) => {
            let here = look(global, manifest, live.as_ref())?;
            print_pairs(&describe(
                &known,
                manifest,
                &evidence_in_words(evidence, &shown),
                proven,
                live.as_ref(),
                &here,
                part.as_ref(),
            ))?
        }
        (_, None) => {
            let State::Damaged { why } = &image.state else { return Ok(Exit::Unsound) };
            print_text(&format!("{}  {}: {why}", image.id, why.kind.word()))?;
            return Ok(Exit::Unsound);
        }
    }
    Ok(Exit::Success)
}

/// Compares the image with this machine. Without CRIU its version is not compared: `doctor` reports that.
fn look(global: &Global, manifest: &Manifest, live: Option<&Published>) -> anyhow::Result<Here> {
    let config = global.settings(global.overrides())?;
    let criu = Criu::find(named_criu(&config).as_deref()).ok().map(|criu| criu.version);
    // GPU memory of the running job is freed before it is restored.
    let leaving = live.map(|live| process::tree(live.supervisor.cast_signed())).unwrap_or_default();
    Ok(Here::look(manifest, criu, &Wishes { leaving, ..Wishes::default() }))
}

/// GPU memory that the job used; `None` if unknown.
fn used(m: &Manifest, uuid: &str) -> String {
    let by = m.tree.cuda_memory.iter().filter_map(|(pid, gpus)| Some((pid, gpus.get(uuid)?)));
    let each: Vec<String> = by.map(|(pid, bytes)| format!("{} by process {pid}", size(*bytes))).collect();
    match each.as_slice() {
        [] if m.tree.cuda_memory.is_empty() => String::new(),
        [] => " (not used)".into(),
        each => format!(" ({})", each.join(", ")),
    }
}

fn evidence_in_words(evidence: Evidence, shown: &Shown) -> String {
    match (evidence, shown.awaits()) {
        (Evidence::Taken, Some(versions)) => {
            format!(
                "taken: nothing was rehearsed or restored yet with {versions}, which this version of rekindle does not know"
            )
        }
        (Evidence::Refused, _) => {
            "refused: two rehearsals of it failed; the log and the event `rehearsal-failed` say why. A restart tries it all the same"
                .into()
        }
        (Evidence::Taken, None) => "taken: it was neither rehearsed nor restored yet".into(),
        (Evidence::Rehearsed, _) => "rehearsed: all its processes were restored beside the job, and did not run".into(),
        (Evidence::Restored, _) => "restored: the job ran from it".into(),
    }
}

/// Whether it fits this machine. A bad image may fit, and is not restored all the same.
fn restorable(state: &State, differences: &[Difference]) -> &'static str {
    match (state, differences) {
        (_, [first, ..]) if first.is_fatal() => "cannot be restored on this machine",
        (State::Bad { .. }, _) => {
            "restarts pass over it, because it is marked as bad; `rekindle mark --good` removes the mark"
        }
        (_, []) => "can be restored on this machine",
        _ => "might not work on this machine",
    }
}

fn proven_in_words(proven: bool) -> &'static str {
    match proven {
        true => "yes: the job has lived for restart.min-uptime after this image",
        false => "not yet: the job has not lived for restart.min-uptime after this image",
    }
}

fn describe(
    known: &Known,
    m: &Manifest,
    evidence: &str,
    proven: bool,
    live: Option<&Published>,
    here: &Here,
    part: Option<&PartOf>,
) -> Vec<(&'static str, String)> {
    let differences = compat::compare(m, here);
    let persisting = storing(known, live);
    let state = match &known.best().state {
        State::Bad { mark, .. } => format!("bad since {}: {}: {}", moment(mark.when), mark.why, mark.detail),
        _ => "good".into(),
    };
    let mut lines: Vec<(&str, String)> = vec![
        ("image", m.id.to_string()),
        ("job", m.job.to_string()),
        ("state", state),
        ("evidence", evidence.to_owned()),
        ("proven", proven_in_words(proven).into()),
        ("taken", moment(m.taken)),
        ("lineage", m.lineage.clone()),
        ("where", whereabouts(&known.places(), persisting)),
        ("command", m.command.join(" ")),
        ("directory", m.directory.display().to_string()),
        ("user", m.user.clone().unwrap_or_else(|| "the supervisor's".into())),
        ("host", format!("{} ({}, kernel {})", m.host.name, m.host.cpu_model, m.host.kernel)),
        ("made by", format!("rekindle {}, CRIU {}", m.rekindle, m.criu)),
        ("size", size(m.bytes)),
        ("freeze", milliseconds(m.freeze_us)),
    ];
    lines.extend(part.map(|part| ("part of", part.in_words())));
    lines.extend(Some(known.tags().to_string()).filter(|said| !said.is_empty()).map(|said| ("tags", said)));
    lines.push(("restore", restorable(&known.best().state, &differences).into()));
    lines.extend(differences.iter().map(|difference| ("differs", difference.to_string())));
    lines.extend(known.copies().map(|copy| ("folder", format!("{} ({})", copy.dir.display(), copy.place))));
    if let Some(persisting) = persisting {
        let (done, total) = (size(persisting.done), size(persisting.total));
        let (rate, written) = (size(persisting.rate), size(persisting.written));
        let percent = persisting.percent();
        lines.push(("storing", format!("{done} of {total}, {percent} %, {rate}/s; {written} written")));
    } else if known.copy(Place::Stored).is_none() {
        // The failure is that of the last image to be stored.
        let why = live.filter(|live| live.last_image == Some(known.id())).and_then(|live| live.persist_failure.clone());
        lines.extend(why.map(|why| ("not stored", why)));
    }
    lines.extend(m.interval.iter().map(|choice| ("interval", choice.to_string())));
    lines.extend(phases(&m.phases, m.freeze_us, !m.tree.cuda.is_empty()).into_iter().map(|line| ("phase", line)));
    if let Some(driver) = &m.driver {
        lines.push(("driver", driver.clone()));
    }
    lines.extend(m.gpus.iter().map(|gpu| ("gpu", format!("{} {}{}", gpu.name, gpu.uuid, used(m, &gpu.uuid)))));
    lines.extend(Devices::of(m, here).iter().flat_map(Devices::lines).map(|line| ("restore on", line)));
    lines.extend(m.landing.iter().map(|landing| {
        let Landing { pid, path, bytes, .. } = landing;
        ("landing", format!("{} of GPU memory of process {pid} ({})", size(*bytes), path.display()))
    }));
    lines.extend(m.kept.iter().flat_map(|kept| {
        let mut all: BTreeMap<i32, (u64, u64)> = BTreeMap::new();
        for piece in &kept.pieces {
            let (count, bytes) = all.entry(piece.pid).or_default();
            (*count, *bytes) = (*count + 1, bytes.saturating_add(piece.bytes));
        }
        all.into_iter().map(|(pid, (count, bytes))| {
            ("kept", format!("{} of GPU memory of process {pid} stayed on the GPU ({count} allocations)", size(bytes)))
        })
    }));
    lines.extend(m.tree.processes.iter().map(|p| {
        let cuda = if m.tree.cuda.contains(&p.pid) { " (CUDA)" } else { "" };
        ("process", format!("{} {}{cuda}", p.pid, p.name))
    }));
    lines.extend(m.open_files.iter().map(|f| ("open file", format!("{} ({} bytes)", f.path.display(), f.size))));
    lines
}

/// The phases of the snapshot, how long the job was frozen in each, and the sum.
fn phases(phases: &[Phase], freeze_us: u64, has_cuda: bool) -> Vec<String> {
    // In tenths of a millisecond, as they are shown, so that the lines add up.
    let tenths = |us: u64| us / 100;
    let within = |name: &str| match has_cuda {
        true => ["lock", "checkpoint", "dump", "restore", "copy", "others", "unlock"].contains(&name),
        false => name == "dump",
    };
    let freeze = tenths(freeze_us);
    let mut lines: Vec<(&str, u64, u64)> = Vec::new();
    let mut left = freeze;
    for phase in phases {
        let took = tenths(phase.took_us);
        // Without CUDA, CRIU measures the freeze within its dump.
        let frozen = if within(&phase.phase) { took.min(left) } else { 0 };
        left -= frozen;
        lines.push((&phase.phase, took, frozen));
    }
    let Some(last) = phases.last() else { return Vec::new() };
    let sum = |of: fn(&(&str, u64, u64)) -> u64| lines.iter().map(of).sum::<u64>();
    let all = tenths(last.started_us + last.took_us).max(sum(|line| line.1) + left);
    lines.push(("other", all - sum(|line| line.1), left));
    lines.push(("sum", all, freeze));
    let shown = |(name, took, frozen): &(&str, u64, u64)| {
        let took = milliseconds(took * 100);
        match frozen {
            0 => format!("{name:<10} {took:>12}"),
            frozen => format!("{name:<10} {took:>12}, {} of it frozen", milliseconds(frozen * 100)),
        }
    };
    lines.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rekindle_store::{BadMark, BadWhy};

    #[test]
    fn a_bad_image_is_not_said_to_be_restorable() {
        let manifest = || Box::new(serde_json::from_str::<Manifest>(rekindle_testing::MANIFEST).unwrap());
        let mark = BadMark { why: BadWhy::DoesNotRestore, detail: "bad size".into(), when: Default::default() };
        assert_eq!(restorable(&State::Good(manifest()), &[]), "can be restored on this machine");
        let words = restorable(&State::Bad { manifest: manifest(), mark }, &[]);
        assert!(!words.contains("can be restored") && words.contains("rekindle mark --good"), "{words}");
    }

    #[test]
    fn the_phases_add_up_to_the_snapshot_and_to_the_freeze() {
        let all =
            [("prepare", 0, 18_450), ("lock", 18_500, 42_190), ("dump", 60_700, 78_390), ("unlock", 139_100, 1_060)];
        let all = all.map(|(phase, started_us, took_us)| Phase { phase: phase.into(), started_us, took_us });
        // Tenths of milliseconds: "18.4 ms" has 184.
        let figures = |line: &String| -> Vec<u64> {
            line.split([' ', ',']).filter_map(|word| word.split('.').collect::<String>().parse().ok()).collect()
        };
        for (freeze_us, has_cuda) in [(121_700, true), (23_513, false), (0, false)] {
            let lines = phases(&all, freeze_us, has_cuda);
            let (sum, parts) = lines.split_last().unwrap();
            for column in 0..2 {
                let tenths = |line: &String| figures(line).get(column).copied().unwrap_or_default();
                assert_eq!(parts.iter().map(tenths).sum::<u64>(), tenths(sum), "{lines:#?}");
            }
            assert!(freeze_us == 0 || sum.contains(&milliseconds(freeze_us)), "{lines:#?}");
        }
        assert!(phases(&[], 5, false).is_empty());
    }
}

//! What must be true of a group at any time: read from what the supervisors and the job have said, and from the images.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};
use std::fs;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use rekindle_store::{Access, Store};

use crate::lab::Lab;

/// A file that grows, or is cut off where a job goes back.
struct Tail {
    path: PathBuf,
    at: u64,
    begun: Vec<u8>,
}

impl Tail {
    fn new(path: PathBuf) -> Tail {
        Tail { path, at: 0, begun: Vec::new() }
    }

    /// The lines that are new.
    fn lines(&mut self) -> Vec<String> {
        let Ok(mut file) = fs::File::open(&self.path) else { return Vec::new() };
        file.seek(SeekFrom::Start(self.at)).unwrap();
        let read = file.read_to_end(&mut self.begun).unwrap();
        self.at += read as u64;
        let whole = self.begun.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let rest = self.begun.split_off(whole);
        let lines = String::from_utf8_lossy(&std::mem::replace(&mut self.begun, rest)).into_owned();
        lines.lines().map(str::to_owned).collect()
    }
}

/// A rank.
struct Member {
    store: PathBuf,
    name: String,
    out: Tail,
    log: Tail,
    last_line: String,
    /// The newest step that it has shown.
    step: u64,
    /// Group snapshots that it was ordered to take part in.
    snapshots: u32,
    /// The epoch that it is in, with the group image from which it starts, or `None` for the beginning.
    epoch: Option<(u64, Option<u64>)>,
    /// Each image of its own that was seen, and the group image that it is a part of.
    parts: BTreeMap<String, u64>,
}

impl Member {
    /// Learns which images are parts of which group images.
    fn look_at_images(&mut self) {
        let folder = self.store.join(&self.name).join("images");
        let names = |folder: &Path| -> BTreeSet<String> {
            let entries = fs::read_dir(folder).into_iter().flatten().flatten();
            entries
                .filter_map(|entry| entry.file_name().into_string().ok())
                .filter(|name| !name.starts_with('.'))
                .collect()
        };
        if !names(&folder).iter().all(|name| self.parts.contains_key(name)) {
            self.read_images();
        }
    }

    /// Those in memory too.
    fn read_images(&mut self) {
        let Ok(job) = Store::open(&self.store, Access::Read).and_then(|store| store.job(&self.name.parse().unwrap()))
        else {
            return;
        };
        for image in job.images().unwrap_or_default() {
            if let Some(part) = image.manifest().and_then(|manifest| manifest.group.as_ref()) {
                let before = self.parts.insert(image.id.to_string(), part.number);
                assert!(
                    before.is_none_or(|number| number == part.number),
                    "{}: {} is another part",
                    self.name,
                    image.id
                );
            }
        }
    }
}

/// What was seen of a group.
pub(super) struct Checks {
    members: Vec<Member>,
    /// From which group image each epoch starts.
    epochs: BTreeMap<u64, Option<u64>>,
    /// Restored jobs, and those of them whose image was compared with the group image.
    restored: (u32, u32),
}

impl Checks {
    pub(super) fn new(lab: &Lab, members: usize) -> Checks {
        let member = |rank: usize| Member {
            store: lab.store_of(rank),
            name: format!("ring.{rank}"),
            out: Tail::new(lab.path(&format!("out{rank}"))),
            log: Tail::new(lab.path(&format!("log{rank}"))),
            last_line: String::new(),
            step: 0,
            snapshots: 0,
            epoch: None,
            parts: BTreeMap::new(),
        };
        Checks { members: (0..members).map(member).collect(), epochs: BTreeMap::new(), restored: (0, 0) }
    }

    /// Reads what is new, and fails if anything of it must not be.
    pub(super) fn look(&mut self) {
        for (rank, member) in self.members.iter_mut().enumerate() {
            member.look_at_images();
            for line in member.out.lines() {
                assert!(!line.contains("WRONG"), "rank {rank} received something wrong: {line}");
                member.step = line.trim().parse().unwrap_or(member.step);
            }
            for line in member.log.lines() {
                let (epochs, restored) = (&mut self.epochs, &mut self.restored);
                said(rank, member, &line, epochs, restored);
                member.last_line = line;
            }
        }
    }

    /// The newest step of any rank.
    pub(super) fn furthest(&mut self) -> u64 {
        self.look();
        self.members.iter().map(|member| member.step).max().unwrap_or(0)
    }

    pub(super) fn are_all_beyond(&self, step: u64) -> bool {
        self.members.iter().all(|member| member.step > step)
    }

    /// Group snapshots that the first rank was ordered to take part in.
    pub(super) fn snapshots(&self) -> u32 {
        self.members[0].snapshots
    }

    pub(super) fn last_line(&self, rank: usize) -> String {
        self.members[rank].last_line.clone()
    }

    pub(super) fn summary(&self) -> String {
        let (restored, compared) = self.restored;
        assert!(compared > 0 || restored == 0, "no image was compared with the group image that it is a part of");
        format!("{} epochs, {restored} restored jobs, {compared} of them compared with their images", self.epochs.len())
    }
}

/// A line of a log.
fn said(
    rank: usize,
    member: &mut Member,
    line: &str,
    epochs: &mut BTreeMap<u64, Option<u64>>,
    restored: &mut (u32, u32),
) {
    if line.contains("order=Prepare") {
        member.snapshots += 1;
    }
    let between = |from: &str, to: &str| Some(line.split_once(from)?.1.split_once(to)?.0.to_owned());
    if let Some(text) = between("the group starts from ", ")") {
        let (from, epoch) = text.split_once(" (epoch ").unwrap_or_else(|| panic!("{line}"));
        let epoch: u64 = epoch.parse().unwrap_or_else(|_| panic!("{line}"));
        let from = from.strip_prefix("group image ").map(|number| number.parse().unwrap_or_else(|_| panic!("{line}")));
        assert!(
            member.epoch.is_none_or(|(before, _)| before < epoch),
            "rank {rank} goes back to epoch {epoch} from {:?}",
            member.epoch
        );
        // There is a committed group image before the first fault.
        assert!(from.is_some() || epochs.keys().all(|other| *other == epoch), "rank {rank} starts from the beginning");
        match epochs.entry(epoch) {
            Entry::Vacant(entry) => drop(entry.insert(from)),
            Entry::Occupied(entry) => {
                assert_eq!(*entry.get(), from, "rank {rank} starts epoch {epoch} from something else than others");
            }
        }
        member.epoch = Some((epoch, from));
    }
    if let Some(image) = between("the job was restored from image ", " ") {
        restored.0 += 1;
        let number = member.epoch.and_then(|(_, from)| from);
        assert!(number.is_some(), "rank {rank} was restored outside of an epoch: {line}");
        if !member.parts.contains_key(&image) {
            member.read_images();
        }
        if let Some(part) = member.parts.get(&image) {
            restored.1 += 1;
            assert_eq!(
                Some(*part),
                number,
                "rank {rank} was restored from {image}, which is a part of another group image"
            );
        }
    }
}

//! Repairs one pack: decides what to do from what is intact, and does it.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use super::images::Known;
use super::salvage::{Begin, Salvage, Stop, salvage};
use super::{Error, Hold, Outcome, PackRepair};
use crate::chunk::Key;
use crate::failed;
use crate::file_error::{Failing, is_failing};
use crate::format::ReadError;
use crate::pack::set::PackInfo;
use crate::pack::{Entry, PackHeader, PackIndex, PackName, Packs};
use crate::persist::Progress;
use rekindle_os::durable;

/// What is needed to repair packs.
pub(super) struct PackRepairs<'a> {
    pub(super) packs: &'a Packs,
    pub(super) key: Option<&'a Key>,
    pub(super) hold: &'a Hold<'a>,
    pub(super) known: &'a Mutex<Known>,
    pub(super) progress: &'a Progress,
}

/// What to write or remove.
#[derive(Debug, Default)]
struct Plan {
    begin: Option<PackHeader>,
    index: bool,
    remove_index: bool,
}

impl PackRepairs<'_> {
    /// Repairs a pack. `None` if there is nothing to report.
    pub(super) fn pack(&self, name: PackName) -> Result<Option<PackRepair>, Error> {
        let left_alone = |why: String| {
            self.known(|known| known.not_known(name, self.packs.read_index(name).ok()));
            let outcome = Outcome::LeftAlone;
            Ok(Some(PackRepair { pack: name, outcome, whole: 0, what: format!("{why}; left as it is") }))
        };
        let on = |bytes: u64| {
            self.progress.add(usize::try_from(bytes).unwrap_or(usize::MAX));
            self.hold.keep()
        };
        let file = match self.packs.pack_path(name).read() {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return self.without_pack(name),
            Err(error) => return left_alone(unreadable(&error)),
        };
        let found = match salvage(&file, self.key, &on) {
            Ok(found) => found,
            Err(Stop::Read(error)) => return left_alone(unreadable(&error)),
            Err(Stop::NotForUs(error)) => return left_alone(error.to_string()),
            Err(Stop::Lock(error)) => return Err(error),
        };
        if found.begin == Begin::Lost {
            return left_alone(
                "its header is damaged, and no record is intact, or all are encrypted with another key than \
                 store.encryption-key; if the key is right, move the pack out of the store"
                    .to_owned(),
            );
        }
        self.with(name, &file, found)
    }

    /// Handles an index or a mark without a pack. A removal removes the index first, so an index without a pack belongs
    /// to a lost pack.
    fn without_pack(&self, name: PackName) -> Result<Option<PackRepair>, Error> {
        let lost = match self.packs.read_index(name) {
            Err(ReadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => return Ok(None),
            // It was created and removed while the lock was not held.
            _ if self.packs.pack_path(name).is_there() => return Ok(None),
            index => index.map_or_else(|_| "all of it".to_owned(), |index| of_records(index.entries().len())),
        };
        self.carry_out(name, &Plan { remove_index: true, ..Plan::default() }, None)?;
        let what = format!("it is missing, and {lost} with it; its index was removed");
        Ok(Some(PackRepair { pack: name, outcome: Outcome::Lost, whole: 0, what }))
    }

    fn with(&self, name: PackName, file: &File, found: Salvage) -> Result<Option<PackRepair>, Error> {
        let Salvage { entries, mut unread, damaged, pack_len, begin, unchecked } = found;
        let contents = PackIndex::new(pack_len, entries);
        let before = Before::of(self.packs.read_index(name), &contents);
        if let Before::Index(index) = &before {
            let gone = index.entries().iter().filter(|entry| !has(&contents, entry));
            unread.extend(gone.filter(|entry| is_unreadable(file, entry)));
            let lost = index.entries().iter().filter(|entry| !has(&contents, entry)).map(|entry| entry.id);
            self.known(|known| known.harmed.extend(lost));
        }
        // Records that the disk cannot read stay in the index, because they may be intact.
        let unread = PackIndex::new(pack_len, unread);
        let whole = contents.clone();
        let contents = PackIndex::new(pack_len, contents.entries().iter().chain(unread.entries()).copied().collect());
        // Without a check, the previous index is followed: it may leave out records for a reason.
        let contents = match &before {
            Before::Index(index) if unchecked.is_some() => {
                let known = |entry: &&Entry| has(index, entry);
                PackIndex::new(pack_len, contents.entries().iter().filter(known).copied().collect())
            }
            _ => contents,
        };
        let (header, mend) = match begin {
            Begin::Mend(header) => (header, Some(header)),
            Begin::Whole(header) => (header, None),
            Begin::Lost => return Ok(None),
        };
        let same = matches!(&before, Before::Index(index) if *index == contents);
        let plan = Plan { begin: mend, index: !same, remove_index: false };
        self.carry_out(name, &plan, Some(&contents))?;
        let info = PackInfo { name, pack_len, key: header.key, gone: false };
        let whole = PackIndex::new(pack_len, whole.entries().iter().filter(|it| has(&contents, it)).copied().collect());
        self.known(|known| known.index.add(info, &whole));
        if !unread.entries().is_empty() {
            self.known(|known| {
                known.harmed.extend(unread.entries().iter().map(|entry| entry.id));
                known.not_known(name, Some(unread.clone()));
            });
        }

        let lost = before.lost(&contents);
        let mut said = Vec::new();
        if mend.is_some() {
            said.push("its header was damaged and was rewritten".to_owned());
        }
        match &before {
            Before::None => said.push("its index was missing and was rebuilt".to_owned()),
            Before::Broken => said.push("its index was damaged and was rebuilt".to_owned()),
            Before::Other => said.push("its index was of another pack and was rebuilt".to_owned()),
            Before::Index(_) if lost > 0 => said.push(format!("{} of its index are lost", of_records(lost))),
            Before::Index(_) if !same => said.push("its index did not match and was rebuilt".to_owned()),
            Before::Index(_) => {}
        }
        let is_lost = lost > 0 || (!same && damaged > 0);
        if is_lost && lost == 0 {
            said.push(format!("it is damaged in {damaged} places"));
        }
        let mut outcome = if is_lost { Outcome::Lost } else { Outcome::Repaired };
        if let Some(why) = &unchecked {
            said.push(format!("its records are complete, but their content could not be checked: {why}"));
            outcome = if is_lost { Outcome::Lost } else { Outcome::NotChecked };
        }
        if !unread.entries().is_empty() {
            let count = of_records(unread.entries().len());
            said.push(format!("{count} cannot be read, because the disk is failing (Input/output error): see the kernel log, and replace the disk"));
            outcome = if is_lost { Outcome::Lost } else { Outcome::Unreadable };
        }
        let report = PackRepair { pack: name, outcome, whole: whole.entries().len(), what: said.join("; ") };
        Ok((!said.is_empty()).then_some(report))
    }

    /// The header is written before the index: only a pack with both is used.
    fn carry_out(&self, name: PackName, plan: &Plan, contents: Option<&PackIndex>) -> Result<(), Error> {
        let is_empty = plan.begin.is_none() && !plan.index && !plan.remove_index;
        if is_empty || !self.hold.may_write()? {
            return Ok(());
        }
        let (pack, index) = (self.packs.pack_path(name), self.packs.index_path(name));
        if let Some(header) = plan.begin {
            durable::overwrite(&pack, 0, &header.to_bytes()).map_err(failed("write the header of", &pack))?;
        }
        if let (true, Some(contents)) = (plan.index, contents) {
            durable::write_file(&index, &contents.to_bytes(), 0o600).map_err(failed("write", &index))?;
        } else if plan.remove_index {
            durable::remove_file(&index).map_err(failed("remove", &index))?;
        }
        Ok(())
    }

    fn known(&self, with: impl FnOnce(&mut Known)) {
        with(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

/// The index as it was found.
enum Before {
    None,
    Broken,
    /// It belongs to another pack.
    Other,
    Index(PackIndex),
}

impl Before {
    fn of(read: Result<PackIndex, ReadError>, contents: &PackIndex) -> Before {
        match read {
            Err(ReadError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => Before::None,
            Err(_) => Before::Broken,
            Ok(index) => {
                let shared = index.entries().iter().any(|entry| has(contents, entry));
                let is_empty = index.entries().is_empty() || contents.entries().is_empty();
                if shared || is_empty { Before::Index(index) } else { Before::Other }
            }
        }
    }

    /// Number of records in it that are damaged.
    fn lost(&self, contents: &PackIndex) -> usize {
        match self {
            Before::Index(index) => index.entries().iter().filter(|entry| !has(contents, entry)).count(),
            _ => 0,
        }
    }
}

fn has(index: &PackIndex, entry: &Entry) -> bool {
    index.entries().binary_search_by_key(&entry.id, |known| known.id).is_ok()
}

fn unreadable(error: &io::Error) -> String {
    format!("it cannot be read{}: {error}", Failing(error))
}

/// Whether the disk cannot read the record.
fn is_unreadable(file: &File, entry: &Entry) -> bool {
    let mut bytes = vec![0; usize::try_from(entry.end().saturating_sub(entry.offset)).unwrap_or(0)];
    file.read_exact_at(&mut bytes, entry.offset).is_err_and(|error| is_failing(&error))
}

fn of_records(count: usize) -> String {
    match count {
        1 => "1 record".to_owned(),
        count => format!("{count} records"),
    }
}

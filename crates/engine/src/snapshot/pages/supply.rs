//! Chooses the file of the spool for a pages file of CRIU: the one that was prepared for the same process or shared
//! memory.

use std::path::{Path, PathBuf};

use super::spool::Spool;
use rekindle_criu::image;
use rekindle_os::beneath::Beneath;

/// The files of the spool that are not in use yet.
#[derive(Debug)]
pub(super) struct Supply {
    criu_dir: Beneath,
    spool: PathBuf,
    ready: Vec<Spool>,
    /// Page maps that were already assigned to a pages file.
    known: Vec<String>,
}

impl Supply {
    pub(super) fn new(criu_dir: &Beneath, spool: &Path, ready: Vec<Spool>) -> Supply {
        Supply { criu_dir: criu_dir.clone(), spool: spool.into(), ready, known: Vec::new() }
    }

    /// The file for `pages-N.img`, which CRIU has opened. If the owner of the pages is unknown, it is an unprepared
    /// file: slower, but correct.
    pub(super) fn take(&mut self, n: usize) -> Spool {
        let owner = self.owner(n);
        let found = owner.and_then(|owner| {
            let at = self.ready.iter().position(|spool| spool.path.file_name().is_some_and(|name| *name == *owner))?;
            self.known.push(owner);
            Some(self.ready.swap_remove(at))
        });
        found.unwrap_or_else(|| Spool::new(self.spool.join(format!("other-{n}"))))
    }

    /// CRIU opens the page map before the pages file, and the next pair when both are closed. So the page map of this
    /// file is the one that names it, or the only one that does not name any file yet.
    fn owner(&self, n: usize) -> Option<String> {
        let mut maps = image::page_maps(&self.criu_dir).ok()?;
        maps.retain(|(owner, _)| !self.known.contains(owner));
        let named = maps.iter().find(|(_, id)| id.is_some_and(|id| usize::try_from(id) == Ok(n)));
        let begun = || maps.iter().find(|(_, id)| id.is_none());
        named.or_else(begun).map(|(owner, _)| owner.clone())
    }
}

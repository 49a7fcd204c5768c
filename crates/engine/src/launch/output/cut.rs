//! Cuts the output to its length at a snapshot. What was written since is saved, within bounds.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Range;

use super::{Bounds, Change, State, numbered, with_suffix};
use rekindle_os::beneath::Beneath;
use rekindle_os::durable::Unfinished;
use rekindle_os::sparse;

/// What was cut from a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    /// The file that it was saved to, if any of it was saved.
    pub(crate) file: Option<Beneath>,
    /// The offset that its beginning had in the output.
    pub(super) from: u64,
    /// Bytes saved.
    pub(crate) bytes: u64,
    /// Bytes lost, because there were more than [`Bounds::size`] or there was no space.
    pub(crate) lost: u64,
}

/// The rotated files with content from before `gone`: number of the file, and the range that it contains.
fn pieces(path: &Beneath, gone: u64) -> Vec<(u32, Range<u64>)> {
    let mut end = gone;
    let piece = |n| {
        let length = numbered(path, n).metadata().ok().filter(|found| found.is_file())?.len();
        // A longer file is from before the output file was emptied.
        let start = end.checked_sub(length).filter(|_| end > 0)?;
        Some((n, start..std::mem::replace(&mut end, start)))
    };
    (1..).map_while(piece).collect()
}

pub(super) fn cut(file: &File, path: &Beneath, to: u64, state: &mut State, bounds: Bounds) -> io::Result<Option<Kept>> {
    let length = file.metadata()?.len();
    if length <= to {
        // Frees blocks that are reserved behind the end.
        file.set_len(length)?;
        return Ok(None);
    }
    let gone = state.gone;
    let later: Vec<_> = pieces(path, gone).into_iter().filter(|(_, range)| range.end > to).collect();
    let kept = match keep(file, path, to, &later, state.gone, bounds) {
        Ok(kept) => kept,
        // A job must not stay down because output cannot be saved.
        Err(error) => {
            tracing::warn!("cannot save what is cut from {}: {error}", path.display());
            let bytes = later.iter().map(|(_, range)| range.end - range.start.max(to)).sum::<u64>();
            let (_, rest) = sparse::last_data(file, to.max(gone)..length, 0)?;
            Kept { file: None, from: length, bytes: 0, lost: bytes + rest }
        }
    };
    file.set_len(to)?;
    let mut removed = 0;
    for (n, range) in &later {
        let name = numbered(path, *n);
        if range.start >= to {
            name.remove_file()?;
            removed += 1;
        } else {
            let file = name.append(0o600)?;
            let changed = file.metadata()?.modified()?;
            file.set_len(to - range.start)?;
            // `logs --follow` recognises the file by this time.
            file.set_modified(changed)?;
        }
    }
    for n in (removed + 1..).take_while(|_| removed > 0) {
        match numbered(path, n).rename(&numbered(path, n - removed)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => break,
            other => other?,
        }
    }
    // What the follower has not shown of the cut part yet is in the file that saves it.
    let begin = state.changes.iter().rposition(|change| matches!(change, Change::Emptied)).map_or(0, |n| n + 1);
    let mut n = 0;
    state.changes.retain_mut(|change| {
        n += 1;
        match change {
            Change::Moved { from, .. } if n > begin && *from >= to => false,
            Change::Moved { to: end, .. } | Change::Lost { to: end } if n > begin => {
                *end = to.min(*end);
                true
            }
            _ => true,
        }
    });
    state.changes.push_back(Change::Cut { to, from: kept.from, kept: kept.file.clone() });
    state.gone = gone.min(to);
    state.epoch += 1;
    Ok(Some(kept))
}

/// Copies what follows `to`, in rotated files and in the file itself, to NAME.rolled-back.N: the last part, as much as
/// the bound allows. Holes stay holes. The copy begins with the content at offset `from`.
fn keep(
    file: &File,
    path: &Beneath,
    to: u64,
    later: &[(u32, Range<u64>)],
    gone: u64,
    bounds: Bounds,
) -> io::Result<Kept> {
    let length = file.metadata()?.len();
    let mut parts = vec![(file.try_clone()?, to.max(gone)..length, 0)];
    for (n, range) in later {
        parts.push((numbered(path, *n).read()?, to.max(range.start)..range.end, range.start));
    }
    // Newest part first.
    let (mut room, mut total, mut from, mut chosen) = (bounds.size, 0, length, Vec::new());
    for (file, range, base) in parts {
        let inside = range.start - base..range.end - base;
        let (start, bytes) = sparse::last_data(&file, inside.clone(), room)?;
        total += bytes;
        if room > 0 && bytes > 0 {
            from = base + start;
            chosen.push((file, start..inside.end, base));
        }
        room = room.saturating_sub(bytes);
    }
    let newest = trim_kept(path, bounds.keep.max(1))?;
    let mut copy = Unfinished::beside(path)?;
    let mut bytes = 0;
    for (file, range, base) in &chosen {
        bytes += sparse::copy(file, range.clone(), copy.file(), base + range.start - from)?;
    }
    let name = rolled_back(path, newest + 1);
    copy.publish(&name)?;
    Ok(Kept { file: Some(name), from, bytes, lost: total.saturating_sub(bytes) })
}

fn rolled_back(path: &Beneath, n: u32) -> Beneath {
    with_suffix(path, &format!(".rolled-back.{n}"))
}

/// Makes room for one more saved file. Returns the number of the newest, 0 if there is none.
fn trim_kept(path: &Beneath, keep: u32) -> io::Result<u32> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(0) };
    let prefix = format!("{}.rolled-back.", name.to_string_lossy());
    let number = |name: OsString| name.to_str()?.strip_prefix(&prefix)?.parse::<u32>().ok();
    let mut all: Vec<u32> = dir.list()?.into_iter().filter_map(number).collect();
    all.sort_unstable();
    let old = all.len().saturating_sub(usize::try_from(keep.saturating_sub(1)).unwrap_or(usize::MAX));
    for n in all.iter().take(old) {
        rolled_back(path, *n).remove_file()?;
    }
    Ok(all.last().copied().unwrap_or(0))
}

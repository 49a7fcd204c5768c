//! FIFOs and terminals that signal what arrives (O_ASYNC).
//!
//! CRIU (4.2) opens them with that flag. open(2) remembers it and does nothing for it: no signal would ever come, and fcntl(2) can
//! neither turn them on nor take the flag away, because the kernel takes them for turned on. So a restore opens them without, and
//! turns the signals on when all is made.

use std::collections::BTreeSet;

use prost::Message;
use prost::encoding::encode_varint;

use super::rewrite::{rewrite, with_fields};
use super::{Error, FILES, Records, damaged};
use rekindle_os::beneath::Beneath;

const O_ASYNC: u32 = libc::O_ASYNC.cast_unsigned();

/// The used fields of `file_entry`.
#[derive(Clone, PartialEq, Message)]
struct FileEntry {
    #[prost(message, optional, tag = "3")]
    reg: Option<RegFile>,
    #[prost(message, optional, tag = "17")]
    fifo: Option<Fifo>,
    #[prost(message, optional, tag = "19")]
    terminal: Option<Terminal>,
}

/// The used fields of `reg_file_entry`: a name, also that of a FIFO.
#[derive(Clone, PartialEq, Message)]
struct RegFile {
    #[prost(uint32, required, tag = "1")]
    id: u32,
    #[prost(uint32, required, tag = "2")]
    flags: u32,
}

/// `fifo_entry`
#[derive(Clone, PartialEq, Message)]
struct Fifo {
    #[prost(uint32, required, tag = "1")]
    id: u32,
    /// The entry with its name; before CRIU 3.17 that of the same number.
    #[prost(uint32, optional, tag = "3")]
    name: Option<u32>,
}

/// The used field of `tty_file_entry`.
#[derive(Clone, PartialEq, Message)]
struct Terminal {
    #[prost(uint32, required, tag = "3")]
    flags: u32,
}

/// Lets a restore open FIFOs and terminals without O_ASYNC. Returns how many there are with it.
///
/// # Errors
/// When files.img is missing or damaged, or cannot be written.
pub fn open_without_signals(dir: &Beneath) -> Result<usize, Error> {
    let path = dir.join("files.img");
    let entries: Vec<FileEntry> = Records::open(path.clone(), FILES)?.all()?;
    let fifos: BTreeSet<u32> =
        entries.iter().filter_map(|entry| entry.fifo.as_ref()).map(|fifo| fifo.name.unwrap_or(fifo.id)).collect();
    // The field that has the flags, and its message, if that is to be changed.
    let found = |entry: &FileEntry| {
        let of_fifo = entry.reg.as_ref().filter(|reg| fifos.contains(&reg.id)).map(|reg| (3_u64, 2_u64, reg.flags));
        let of_terminal = entry.terminal.as_ref().map(|terminal| (19, 3, terminal.flags));
        of_fifo.or(of_terminal).filter(|(.., flags)| flags & O_ASYNC != 0)
    };
    let count = entries.iter().filter_map(found).count();
    // The job stands still, and nearly none has such a file.
    if count == 0 {
        return Ok(0);
    }
    rewrite(&path, FILES, |entry: FileEntry, record| {
        let Some((part, field, flags)) = found(&entry) else { return Ok(None) };
        let change = |key: u64, content: &[u8]| {
            let changed = (key >> 3 == part).then(|| {
                // If a field occurs twice, the last one counts.
                let mut content = content.to_vec();
                encode_varint(field << 3, &mut content);
                encode_varint((flags & !O_ASYNC).into(), &mut content);
                content
            });
            Some(changed)
        };
        with_fields(record, change).ok_or_else(|| damaged(&path, "a file that signals what arrives")).map(Some)
    })?;
    Ok(count)
}

#[cfg(test)]
mod tests {
    use super::super::tests::{beneath, write};
    use super::*;

    #[test]
    fn fifos_and_terminals_are_opened_without_the_flag_and_files_as_they_were() {
        let dir = tempfile::tempdir().unwrap();
        let flags = O_ASYNC | 2;
        let name = |id| FileEntry { reg: Some(RegFile { id, flags }), ..FileEntry::default() };
        let fifo = |id, name| FileEntry { fifo: Some(Fifo { id, name }), ..FileEntry::default() };
        let terminal = FileEntry { terminal: Some(Terminal { flags }), ..FileEntry::default() };
        let entries = [name(1), name(2), name(3), fifo(7, Some(1)), fifo(2, None), terminal];
        write(&dir.path().join("files.img"), FILES, &entries.each_ref().map(Message::encode_to_vec));
        let dir = beneath(dir.path());
        assert_eq!(open_without_signals(&dir).unwrap(), 3);
        let now: Vec<FileEntry> = Records::open(dir.join("files.img"), FILES).unwrap().all().unwrap();
        let flags_of = |entry: &FileEntry| {
            entry.reg.as_ref().map(|reg| reg.flags).or_else(|| entry.terminal.as_ref().map(|terminal| terminal.flags))
        };
        let found: Vec<u32> = now.iter().filter_map(flags_of).collect();
        assert_eq!(found, [2, 2, flags, 2]);
        assert_eq!(open_without_signals(&dir).unwrap(), 0);
    }
}

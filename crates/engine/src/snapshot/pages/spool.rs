//! A file on a tmpfs that receives page data: its pages are created before, and more are added when needed.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Error, Expected, is_full};
use rekindle_os::pages::Mapping;
use rekindle_os::parallel::in_parallel;

/// Bytes prepared in one call: a full tmpfs is noticed soon, and threads share the work evenly.
const STEP: u64 = 64 << 20;
/// Room is added in multiples of a huge page.
const HUGE_PAGE: u64 = 2 << 20;

/// A mapped part of the file.
#[derive(Debug)]
pub(super) struct Piece {
    /// Its place in the file, bytes.
    pub(super) offset: u64,
    pub(super) mapping: Mapping,
    /// Whether all its pages were made ready beforehand.
    pub(super) ready: bool,
}

impl Piece {
    fn end(&self) -> u64 {
        self.offset + self.mapping.length() as u64
    }
}

/// One file of the spool, open and mapped as far as it has room.
#[derive(Debug)]
pub(super) struct Spool {
    pub(super) path: PathBuf,
    /// Opened when it is first needed.
    file: Option<Arc<File>>,
    /// Without gaps, from the beginning of the file.
    pieces: Vec<Arc<Piece>>,
}

impl Spool {
    pub(super) fn new(path: PathBuf) -> Spool {
        Spool { path, file: None, pieces: Vec::new() }
    }

    /// The file, created if it does not exist.
    pub(super) fn file(&mut self) -> Result<&Arc<File>, Error> {
        if self.file.is_none() {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW);
            let open = options.open(&self.path);
            self.file = Some(Arc::new(open.map_err(|source| Error::Prepare { path: self.path.clone(), source })?));
        }
        self.file
            .as_ref()
            .ok_or_else(|| Error::Prepare { path: self.path.clone(), source: io::ErrorKind::NotFound.into() })
    }

    /// Makes the file long enough for `bytes`, and maps it. A longer file is only cut if that frees much.
    fn reserve(&mut self, bytes: u64) -> Result<(), Error> {
        let path = self.path.clone();
        let prepare = |source| Error::Prepare { path: path.clone(), source };
        let file = self.file()?;
        let have = file.metadata().map_err(prepare)?.len();
        let want = if have > bytes.saturating_add(STEP) { bytes } else { have.max(bytes) };
        let want = want.next_multiple_of(HUGE_PAGE);
        if have != want {
            file.set_len(want).map_err(prepare)?;
        }
        if want > 0 {
            self.map(0, want, true)?;
        }
        Ok(())
    }

    fn map(&mut self, offset: u64, length: u64, ready: bool) -> Result<Arc<Piece>, Error> {
        let path = self.path.clone();
        let file = self.file()?;
        let bytes = usize::try_from(length).map_err(io::Error::other);
        let mapping = bytes.and_then(|bytes| Mapping::new(file, offset, bytes));
        let mapping = mapping.map_err(|source| Error::Prepare { path, source })?;
        let piece = Arc::new(Piece { offset, mapping, ready });
        self.pieces.push(Arc::clone(&piece));
        Ok(piece)
    }

    /// The piece that contains byte `at`, and how many bytes it has from there. Adds a piece if there is none. Its
    /// pages are allocated when it is filled, chunk by chunk, because CRIU's other images need room too.
    pub(super) fn piece_at(&mut self, at: u64) -> Result<(Arc<Piece>, u64), Error> {
        if let Some(piece) = self.pieces.iter().rev().find(|p| p.offset <= at && at < p.end()) {
            return Ok((Arc::clone(piece), piece.end() - at));
        }
        let path = self.path.clone();
        self.file()?.set_len(at.saturating_add(STEP)).map_err(|source| Error::Prepare { path, source })?;
        Ok((self.map(at, STEP, false)?, STEP))
    }

    /// Cuts the file to `length` and ends the mapping.
    pub(super) fn cut(&mut self, length: u64) -> Result<(), Error> {
        self.pieces.clear();
        let path = self.path.clone();
        self.file()?.set_len(length).map_err(|source| Error::Place { path, source })
    }
}

/// Removes the files of the spool that are not in `keep`: their memory is needed for others.
pub(super) fn remove_others(dir: &Path, keep: &[String]) -> Result<(), Error> {
    let failed = |source| Error::Prepare { path: dir.into(), source };
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if !keep.iter().any(|name| *entry.file_name() == **name) {
            std::fs::remove_file(entry.path()).map_err(|source| Error::Prepare { path: entry.path(), source })?;
        }
    }
    Ok(())
}

/// Opens a file for each of `expected`, with all its pages present and mapped. Pages from an earlier snapshot only have
/// to be mapped.
pub(super) fn make_ready(dir: &Path, expected: &[Expected], threads: usize) -> Result<Vec<Spool>, Error> {
    let wanted: Vec<String> = expected.iter().map(|e| e.source.to_string()).collect();
    remove_others(dir, &wanted)?;
    let mut spools = Vec::with_capacity(expected.len());
    for Expected { source, bytes } in expected {
        let mut spool = Spool::new(dir.join(source.to_string()));
        spool.reserve(*bytes)?;
        spools.push(spool);
    }
    let mut steps = Vec::new();
    for spool in &spools {
        for piece in &spool.pieces {
            let length = piece.mapping.length();
            let step = usize::try_from(STEP).unwrap_or(length);
            steps.extend((0..length).step_by(step.max(1)).map(|at| (spool, piece, at, step.min(length - at))));
        }
    }
    in_parallel(steps, threads, |(spool, piece, at, length)| {
        let path = || spool.path.clone();
        piece.mapping.populate(at, length).map_err(|source| match is_full(&source) {
            true => Error::Full { path: path(), wanted: bytesize::ByteSize(piece.mapping.length() as u64) },
            false => Error::Prepare { path: path(), source },
        })
    })?;
    Ok(spools)
}

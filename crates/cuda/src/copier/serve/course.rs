//! The course of one copy.
//!
//! ```text
//!  pieces arrive    each is cut into chunks, which are named ([`super::names`]); what is in no file yet is copied, a few chunks
//!                   at a time; the job is frozen
//!  pause            the driver restores the job, which takes longer while the bus is busy: nothing is begun, if all that is left
//!                   has room on its GPU
//!  leave            the job waits: what has room on its GPU is copied there, at 30 times the rate, and the rest as before.
//!                   Then the memory of the job is released, nothing is begun while the job maps it, and the job runs
//!  resume, finish   the chunks in that room are copied out; each part of it is freed as soon as it is empty. What another
//!                   file has is copied from there
//! ```
//!
//! Invariants: bytes are taken from a file only if their names are those of the job's memory. Room is taken only in `leave`, so a
//! copy that is over by then needs none. It never takes what the job may need at once ([`room`]). Whatever fails, no chunk is
//! being copied any more when the outcome is reported.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::os::fd::OwnedFd;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::super::{Reused, Way};
use super::gpus::{Gpus, Piece, SLOTS};
use super::kernel::{NAMED, Name};
use super::known::Known;
use super::mapped::{Between, GRANULE, Mapped, begin_between};
use super::micros;
use super::names::{self, Need};

/// Bytes of one chunk: 1.2 ms at the full rate of the bus. The driver's calls take some 10 us. With [`SLOTS`] chunks on their
/// way the GPU always has work, and a job waits 5 ms at most for those that were begun.
pub(super) const CHUNK: u64 = 64 << 20;
/// Bytes of room that are taken and freed at once: an allocation takes 62 us, its end 0.15 ms (H100, driver 580).
const ROOM: u64 = 256 << 20;
/// What always stays free on a GPU, for what the job and others allocate meanwhile.
const FREE: u64 = 2 << 30;
/// Between two looks at chunks that are on their way.
const LOOK: Duration = Duration::from_micros(200);

/// Bytes of room that may be taken of a GPU. The job runs while that is taken, and must not get an error for our sake: half of
/// what is free stays free, at least 2 GiB and at least a tenth of the GPU.
pub(super) fn room(free: u64, total: u64) -> u64 {
    let stays = FREE.max(total / 10).max(free / 2);
    free.saturating_sub(stays) / GRANULE * GRANULE
}

/// A part of a piece that is copied in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Chunk {
    /// Where it is on the GPU.
    memory: u64,
    /// Where it is in the file, and in its mapping.
    offset: u64,
    host: usize,
    bytes: u64,
    /// The part of the room that it is in.
    room: Option<usize>,
}

/// The chunks of one GPU.
#[derive(Default)]
struct Lane {
    /// To be named, and being named.
    unnamed: VecDeque<Chunk>,
    naming: [Option<Chunk>; SLOTS],
    waiting: VecDeque<Chunk>,
    flying: [Option<Chunk>; SLOTS],
    /// Copied within the GPU, to be copied out once the job runs.
    left: VecDeque<Chunk>,
}

impl Lane {
    /// Bytes that are not copied yet.
    fn bytes(&self) -> u64 {
        self.waiting.iter().chain(self.flying.iter().flatten()).map(|chunk| chunk.bytes).sum()
    }

    fn is_named(&self) -> bool {
        self.unnamed.is_empty() && self.naming.iter().all(Option::is_none)
    }

    fn is_over(&self) -> bool {
        self.is_named() && self.waiting.is_empty() && self.flying.iter().all(Option::is_none)
    }
}

/// What another file has.
#[derive(Default)]
struct Beside {
    parts: Vec<Between>,
    bytes: u64,
    /// It begins when the job is about to run: until then CRIU needs the processors.
    running: Option<JoinHandle<()>>,
}

impl Drop for Beside {
    fn drop(&mut self) {
        // Its threads use files.
        let _ = self.running.take().map(JoinHandle::join);
    }
}

/// A part of the room that was taken of a GPU.
struct Room {
    device: c_int,
    address: u64,
    bytes: u64,
    /// Chunks that are in it.
    chunks: usize,
}

/// The memory of a copy.
#[derive(Default)]
struct Pieces {
    /// What is mapped here.
    mapped: Vec<Piece>,
    /// The GPU of each that there was, and its descriptor if it was made here, once the copy is over.
    placed: Vec<(c_int, Option<OwnedFd>)>,
}

/// How far a copy is.
#[derive(Default)]
struct Stage {
    /// All pieces were sent.
    is_whole: bool,
    /// No chunk is begun.
    is_paused: bool,
    /// The job need not wait any more.
    has_left: bool,
}

/// A copy.
pub(super) struct Copy {
    way: Way,
    /// Device and inode of the file.
    pub(super) file: [u64; 2],
    begun: Instant,
    stage: Stage,
    pieces: Pieces,
    /// Offset and size of each part that is copied from the GPU.
    marked: Vec<(u64, u64)>,
    lanes: BTreeMap<c_int, Lane>,
    rooms: Vec<Room>,
    content: Content,
    beside: Beside,
    /// Bytes that were copied, and bytes that the file had.
    counts: [u64; 2],
    /// Why it has failed.
    failed: Option<String>,
    /// Once nothing is being copied any more.
    outcome: Option<Result<Done, String>>,
}

/// Bytes, microseconds, and how many of the bytes were in the file before.
pub(super) type Done = [u64; 3];

/// The names of a copy out.
#[derive(Default)]
struct Content {
    /// What the file had before, if that may be used.
    before: Option<Known>,
    /// Whether other files may be used.
    from_others: bool,
    /// The name of each 256 KiB that it gets, as far as it has one.
    names: Vec<Option<Name>>,
}

impl Copy {
    /// Begins one. What the file had before is not known any more, because it is written to. If nothing is reused, nothing is
    /// known of any file afterwards: an error in one would otherwise be copied on.
    pub(super) fn begin(way: Way, file: [u64; 2], reused: Reused, files: &mut [Mapped]) -> Copy {
        let mut known = None;
        for it in files.iter_mut().filter(|_| way == Way::Out) {
            if it.key == file {
                known = it.known.take();
            } else if reused == Reused::Nothing {
                it.known = None;
            }
        }
        let before = known.filter(|_| reused != Reused::Nothing);
        let content = Content { before, from_others: reused == Reused::Files, names: Vec::new() };
        Copy {
            way,
            file,
            begun: Instant::now(),
            stage: Stage::default(),
            pieces: Pieces::default(),
            marked: Vec::new(),
            lanes: BTreeMap::new(),
            rooms: Vec::new(),
            content,
            beside: Beside::default(),
            counts: [0; 2],
            failed: None,
            outcome: None,
        }
    }

    pub(super) fn all_were_sent(&mut self) {
        self.stage.is_whole = true;
    }

    /// Does `work`, unless it has failed before.
    pub(super) fn or_fails<T>(&mut self, work: impl FnOnce(&mut Copy) -> Result<T, String>) -> Option<T> {
        if self.failed.is_some() {
            return None;
        }
        work(self).map_err(|why| self.failed = Some(why)).ok()
    }

    /// The outcome of one that no GPU was needed for.
    pub(super) fn why(&self) -> String {
        self.failed.clone().unwrap_or_else(|| "nothing was copied".into())
    }

    /// Adds memory that was just imported or made.
    pub(super) fn add(&mut self, gpus: &mut Gpus, mapped: Option<&mut Mapped>, piece: Piece) -> Result<(), String> {
        let (offset, bytes, device) = (piece.offset, piece.bytes, piece.device);
        self.pieces.mapped.push(piece);
        self.pieces.placed.push((device, None));
        let mapped = mapped.ok_or("the file is not known")?;
        if offset.checked_add(bytes).is_none_or(|end| end > mapped.length) {
            return Err("the file is too short for the memory".into());
        }
        let Some(piece) = self.pieces.mapped.last_mut() else { return Ok(()) };
        gpus.map(piece)?;
        let address = piece.address;
        // Of GPUs that were not known when the file was.
        mapped.register(gpus);
        let stretches = mapped.stretches(offset, bytes);
        // What is read back from a disk need not be what was written.
        let is_named = self.way == Way::Out
            && mapped.is_in_memory
            && gpus.can_name(device)
            && stretches.iter().all(|(from, length)| from % GRANULE == 0 && length % GRANULE == 0);
        if self.way == Way::Out && !is_named {
            mapped.mark(offset, bytes, gpus.mark);
            self.marked.push((offset, bytes));
        }
        let lane = self.lanes.entry(device).or_default();
        for (from, length) in stretches {
            let all = chunks(address + (from - offset), from, mapped.address(from), length);
            if is_named { lane.unnamed.extend(all) } else { lane.waiting.extend(all) }
        }
        Ok(())
    }

    pub(super) fn is_under_way(&self) -> bool {
        let is_running = self.beside.running.as_ref().is_some_and(|running| !running.is_finished());
        self.outcome.is_none() && self.failed.is_none() && (is_running || self.is_on_its_way())
    }

    /// Whether something is to be named or copied to or from a GPU.
    fn is_on_its_way(&self) -> bool {
        self.lanes.values().any(|lane| !lane.is_over())
    }

    /// Begins what can be begun now, and ends the copy when all of it has ended. Whether anything has changed.
    pub(super) fn go_on(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> bool {
        let has_moved = self.or_fails(|copy| copy.step(gpus, files)).unwrap_or(false);
        if self.stage.is_whole && self.outcome.is_none() && !self.is_under_way() {
            let is_left = !self.beside.parts.is_empty() && self.beside.running.is_none() && self.failed.is_none();
            match is_left {
                false => self.end(gpus, files),
                true if self.stage.has_left => {
                    self.or_fails(Copy::begin_beside);
                }
                true => {}
            }
        }
        has_moved
    }

    /// Names memory: begins as much as there are slots for, and decides about what has names.
    fn name(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<bool, String> {
        let mut has_moved = false;
        for (device, lane) in &mut self.lanes {
            if lane.is_named() {
                continue;
            }
            let mapped = files.iter().find(|known| known.key == self.file).ok_or("the file is not known")?;
            let others = files.iter().filter(|other| self.content.from_others && other.key != self.file);
            let others: Vec<_> = others.filter_map(|other| Some((other, other.known.as_ref()?))).collect();
            for (slot, naming) in lane.naming.iter_mut().enumerate() {
                if let Some(chunk) = *naming {
                    let Some(all) = gpus.named(*device, slot, chunk.bytes)? else { continue };
                    (*naming, has_moved) = (None, true);
                    for (offset, bytes, need) in
                        names::parts(chunk.offset, &all, mapped, self.content.before.as_ref(), &others)
                    {
                        let memory = chunk.memory + (offset - chunk.offset);
                        match need {
                            Need::Nothing => self.counts[1] += bytes,
                            Need::Elsewhere(from) => {
                                self.beside.parts.push((from, mapped.address(offset), bytes));
                                self.beside.bytes += bytes;
                            }
                            Need::Copy => {
                                mapped.mark(offset, bytes, gpus.mark);
                                self.marked.push((offset, bytes));
                                lane.waiting.extend(chunks(memory, offset, mapped.address(offset), bytes));
                            }
                        }
                    }
                    self.content.add(chunk.offset, all);
                }
                let Some(chunk) = lane.unnamed.pop_front() else { continue };
                gpus.name(*device, slot, chunk.memory, chunk.bytes)?;
                (*naming, has_moved) = (Some(chunk), true);
            }
        }
        Ok(has_moved)
    }

    /// Begins at most one chunk on each GPU, because one to or from memory that is not registered has ended when the call
    /// returns, and there may be a request.
    fn step(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<bool, String> {
        let (mut has_moved, mut empty) = (self.name(gpus, files)?, Vec::new());
        for (device, lane) in &mut self.lanes {
            let mut has_begun = false;
            for (slot, flying) in lane.flying.iter_mut().enumerate() {
                if let Some(chunk) = *flying {
                    if !gpus.is_idle(*device, slot)? {
                        continue;
                    }
                    *flying = None;
                    has_moved = true;
                    self.counts[0] += chunk.bytes;
                    empty.extend(chunk.room);
                }
                if has_begun || self.stage.is_paused {
                    continue;
                }
                let Some(chunk) = lane.waiting.pop_front() else { continue };
                gpus.copy(*device, slot, self.way, chunk.memory, chunk.host, chunk.bytes)?;
                *flying = Some(chunk);
                (has_begun, has_moved) = (true, true);
            }
        }
        for at in empty {
            let Some(room) = self.rooms.get_mut(at) else { continue };
            room.chunks -= 1;
            if room.chunks == 0 {
                gpus.free(room.device, room.address)?;
                room.address = 0;
            }
        }
        Ok(has_moved)
    }

    /// Begins nothing until [`Copy::leave`] or [`Copy::resume`], if all that is left has room. The driver puts memory of its own
    /// back before that, and then less is free: half of the room must be enough.
    pub(super) fn pause(&mut self, gpus: &mut Gpus) {
        let has_room = |(device, lane): (&c_int, &Lane)| {
            let left =
                lane.bytes() + lane.unnamed.iter().chain(lane.naming.iter().flatten()).map(|it| it.bytes).sum::<u64>();
            gpus.memory(*device).is_ok_and(|(free, total)| left <= room(free, total) / 2)
        };
        self.stage.is_paused = self.stage.is_whole && self.lanes.iter().all(has_room);
    }

    pub(super) fn resume(&mut self) {
        self.stage.is_paused = false;
    }

    /// Copies what has no room, and the rest into room. Returns its bytes, and those of the room.
    pub(super) fn leave(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<[u64; 2], String> {
        self.go_on(gpus, files);
        if self.outcome.is_none() && self.failed.is_none() {
            self.step_while(gpus, files, |copy| copy.lanes.values().any(|lane| !lane.is_named()));
            self.or_fails(Copy::begin_beside);
            self.take_room(gpus);
            // What has no room.
            self.stage.is_paused = false;
            self.step_while(gpus, files, Copy::is_on_its_way);
            self.or_fails(|_| gpus.wait_within());
            self.or_fails(|copy| {
                // The job may free it from now on.
                copy.let_go(gpus);
                for lane in copy.lanes.values_mut() {
                    lane.waiting.append(&mut lane.left);
                }
                copy.stage.is_paused = true;
                copy.stage.has_left = true;
                Ok(())
            });
            self.go_on(gpus, files);
        }
        match (&self.outcome, &self.failed) {
            (Some(Err(why)), _) | (_, Some(why)) => Err(why.clone()),
            (Some(Ok(_)), _) => Ok([0; 2]),
            _ => {
                let rooms = self.rooms.iter().map(|room| room.bytes).sum();
                Ok([self.lanes.values().map(Lane::bytes).sum::<u64>() + self.beside.bytes, rooms])
            }
        }
    }

    fn begin_beside(&mut self) -> Result<(), String> {
        if !self.beside.parts.is_empty() {
            let begun = begin_between(&self.beside.parts);
            self.beside.running = Some(begun.map_err(|error| format!("cannot start a thread: {error}"))?);
        }
        Ok(())
    }

    /// After its end: the GPU of each piece, and the descriptor of one that was made here.
    pub(super) fn placed(self) -> Vec<(c_int, Option<OwnedFd>)> {
        self.pieces.placed
    }

    /// After its end: what the file has is known, if all of it has names.
    pub(super) fn know(&mut self, files: &mut [Mapped]) {
        if let Some(mapped) = files.iter_mut().find(|known| self.way == Way::Out && known.key == self.file) {
            mapped.known = self.content.take().map(|names| names::known(names, mapped));
        }
    }

    /// Continues, but not to the end: with the chunks that are in room the copy is not over.
    fn step_while(&mut self, gpus: &mut Gpus, files: &[Mapped], is_so: impl Fn(&Copy) -> bool) {
        while self.failed.is_none() && is_so(self) {
            if !self.or_fails(|copy| copy.step(gpus, files)).unwrap_or(false) {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Begins to copy within each GPU as much as it has room for, from the end: the other copies continue from the beginning.
    /// Where room cannot be taken, the chunks are copied as before.
    fn take_room(&mut self, gpus: &mut Gpus) {
        for (device, lane) in &mut self.lanes {
            let Ok((free, total)) = gpus.memory(*device) else { continue };
            let mut may_take = room(free, total);
            // Where the next chunk goes, and what the present part has room for.
            let (mut to, mut has) = (0, 0);
            let mut wanted: u64 = lane.waiting.iter().map(|chunk| chunk.bytes).sum();
            while let Some(chunk) = lane.waiting.back().copied() {
                if has < chunk.bytes {
                    let bytes = ROOM.min(wanted.next_multiple_of(GRANULE)).min(may_take);
                    let address = (bytes >= chunk.bytes).then(|| gpus.allocate(*device, bytes).ok()).flatten();
                    let Some(address) = address else { break };
                    self.rooms.push(Room { device: *device, address, bytes, chunks: 0 });
                    may_take -= bytes;
                    (to, has) = (address, bytes);
                }
                let Some((at, room)) = self.rooms.iter_mut().enumerate().next_back() else { break };
                if gpus.copy_within(*device, to, chunk.memory, chunk.bytes).is_err() {
                    break;
                }
                room.chunks += 1;
                lane.waiting.pop_back();
                lane.left.push_back(Chunk { memory: to, room: Some(at), ..chunk });
                (to, has, wanted) = (to + chunk.bytes, has - chunk.bytes, wanted - chunk.bytes);
            }
        }
    }

    /// The rest, and its outcome.
    pub(super) fn finish(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<Done, String> {
        self.stage = Stage { is_whole: true, is_paused: false, has_left: true };
        loop {
            let has_moved = self.go_on(gpus, files);
            if let Some(outcome) = self.outcome.take() {
                return outcome;
            }
            if !has_moved {
                std::thread::sleep(LOOK);
            }
        }
    }

    /// Waits only for what was begun. Fails if something had failed until then.
    pub(super) fn give_up(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<(), String> {
        for lane in self.lanes.values_mut() {
            [&mut lane.unnamed, &mut lane.waiting, &mut lane.left].into_iter().for_each(VecDeque::clear);
        }
        if let Some(outcome) = &self.outcome {
            return outcome.clone().map(drop);
        }
        let finished = gpus.finish();
        self.or_fails(|_| finished);
        let failed = self.failed.clone();
        self.failed.get_or_insert_with(|| "it was given up".into());
        self.end(gpus, files);
        failed.map_or(Ok(()), Err)
    }

    /// Nothing is begun any more: looks whether all arrived.
    fn end(&mut self, gpus: &mut Gpus, files: &[Mapped]) {
        let finished = gpus.finish();
        let beside = self.beside.running.take().map_or(Ok(()), JoinHandle::join);
        let took = self.begun.elapsed();
        self.or_fails(|_| finished);
        self.or_fails(|copy| {
            beside.map_err(|_| "a thread that copies from another file has ended")?;
            let Some(mapped) = files.iter().find(|known| known.key == copy.file) else { return Ok(()) };
            match copy.way {
                Way::Out => {
                    copy.marked.iter().try_for_each(|(offset, bytes)| mapped.check_marks(*offset, *bytes, gpus.mark))
                }
                Way::In => copy.pieces.mapped.iter().try_for_each(|piece| gpus.check(piece, &mapped.file)),
            }
        });
        self.or_fails(|copy| {
            let Pieces { mapped, placed } = &mut copy.pieces;
            let mut made = mapped.iter().zip(placed).filter(|(piece, _)| piece.is_made);
            made.try_for_each(|(piece, (_, memory))| gpus.export(piece).map(|exported| *memory = Some(exported)))
        });
        self.let_go(gpus);
        for room in self.rooms.drain(..).filter(|room| room.address != 0) {
            // One that cannot be freed now is free when this process ends.
            let _ = gpus.free(room.device, room.address);
        }
        self.outcome = Some(match &self.failed {
            Some(why) => Err(why.clone()),
            None => {
                let same = self.counts[1] + self.beside.bytes;
                Ok([self.counts[0] + same, micros(took), same])
            }
        });
    }

    fn let_go(&mut self, gpus: &mut Gpus) {
        self.pieces.mapped.drain(..).for_each(|piece| gpus.let_go(&piece));
    }
}

fn chunks(memory: u64, offset: u64, host: usize, bytes: u64) -> impl Iterator<Item = Chunk> {
    (0..bytes.div_ceil(CHUNK)).map(move |number| {
        let at = number * CHUNK;
        let host = host + usize::try_from(at).unwrap_or(0);
        Chunk { memory: memory + at, offset: offset + at, host, bytes: CHUNK.min(bytes - at), room: None }
    })
}

impl Content {
    /// Adds the names of memory at this offset of the file.
    fn add(&mut self, offset: u64, names: Vec<Name>) {
        let first = usize::try_from(offset / NAMED).unwrap_or(usize::MAX);
        if self.names.len() < first + names.len() {
            self.names.resize(first + names.len(), None);
        }
        for (to, name) in self.names.iter_mut().skip(first).zip(names) {
            *to = Some(name);
        }
    }

    /// All names, unless one is missing.
    fn take(&mut self) -> Option<Vec<Name>> {
        std::mem::take(&mut self.names).into_iter().collect::<Option<Vec<Name>>>().filter(|names| !names.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_room_that_is_taken_leaves_the_job_half_and_two_gib_and_a_tenth() {
        assert_eq!(room(79 * GIB, 80 * GIB) / GIB, 39, "half");
        assert_eq!(room(13 * GIB, 80 * GIB), 5 * GIB, "a tenth");
        assert_eq!(room(3 * GIB, 16 * GIB), GIB, "2 GiB");
        assert_eq!(room(8 * GIB, 80 * GIB), 0);
        assert_eq!(room(GIB, 80 * GIB), 0);
        assert_eq!(room(0, 0), 0);
        // Whole pages.
        assert_eq!(room(3 * GIB + 5, 4 * GIB), GIB);
    }

    #[test]
    fn a_piece_is_cut_into_chunks_beside_each_other() {
        let all: Vec<Chunk> = chunks(1 << 40, 7, 1 << 30, 2 * CHUNK + GRANULE).collect();
        assert_eq!(all.iter().map(|chunk| chunk.bytes).collect::<Vec<_>>(), [CHUNK, CHUNK, GRANULE]);
        for pair in all.windows(2) {
            assert_eq!(pair[0].memory + pair[0].bytes, pair[1].memory);
            assert_eq!(pair[0].host as u64 + pair[0].bytes, pair[1].host as u64);
        }
        assert_eq!(chunks(0, 0, 0, CHUNK).count(), 1);
        assert_eq!(chunks(0, 0, 0, 0).count(), 0);
    }
}

//! The course of one copy.
//!
//! ```text
//!  pieces arrive    each is cut into chunks, which are copied a few at a time; the job is frozen
//!  leave            the job waits: what has room on its GPU is copied there, at 30 times the rate, and the rest as before.
//!                   Then the memory of the job is released, and the job runs
//!  finish           the chunks in that room are copied out; each part of it is freed as soon as it is empty
//! ```
//!
//! Invariants: room is taken only in `leave`, so a copy that is over by then needs none. It never takes what the job may
//! need at once ([`room`]). Whatever fails, no chunk is being copied any more when the outcome is reported.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_int;
use std::time::{Duration, Instant};

use super::super::Way;
use super::gpus::{Gpus, Piece, SLOTS};
use super::mapped::{GRANULE, Mapped};
use super::micros;

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
    /// Where it is in the mapping of the file.
    host: usize,
    bytes: u64,
    /// The part of the room that it is in.
    room: Option<usize>,
}

/// The chunks of one GPU.
#[derive(Default)]
struct Lane {
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

    fn is_over(&self) -> bool {
        self.waiting.is_empty() && self.flying.iter().all(Option::is_none)
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

/// A copy.
pub(super) struct Copy {
    way: Way,
    /// Device and inode of the file.
    pub(super) file: [u64; 2],
    begun: Instant,
    /// All were sent.
    is_whole: bool,
    pieces: Vec<Piece>,
    /// Offset and size of each piece, also of those that were released.
    ranges: Vec<(u64, u64)>,
    lanes: BTreeMap<c_int, Lane>,
    rooms: Vec<Room>,
    bytes: u64,
    /// Why it has failed.
    failed: Option<String>,
    /// Once nothing is being copied any more.
    outcome: Option<Result<[u64; 2], String>>,
}

impl Copy {
    pub(super) fn begin(way: Way, file: [u64; 2]) -> Copy {
        Copy {
            way,
            file,
            begun: Instant::now(),
            is_whole: false,
            pieces: Vec::new(),
            ranges: Vec::new(),
            lanes: BTreeMap::new(),
            rooms: Vec::new(),
            bytes: 0,
            failed: None,
            outcome: None,
        }
    }

    pub(super) fn all_were_sent(&mut self) {
        self.is_whole = true;
    }

    /// Does `work`, unless it has failed before.
    pub(super) fn or_fails<T>(&mut self, work: impl FnOnce(&mut Copy) -> Result<T, String>) -> Option<T> {
        if self.failed.is_some() {
            return None;
        }
        work(self).map_err(|why| self.failed = Some(why)).ok()
    }

    /// The outcome of one that no GPU was needed for.
    pub(super) fn why(&self) -> Result<[u64; 2], String> {
        Err(self.failed.clone().unwrap_or_else(|| "nothing was copied".into()))
    }

    /// Adds memory that was just imported.
    pub(super) fn add(&mut self, gpus: &mut Gpus, mapped: Option<&mut Mapped>, piece: Piece) -> Result<(), String> {
        let (offset, bytes, device) = (piece.offset, piece.bytes, piece.device);
        self.pieces.push(piece);
        let mapped = mapped.ok_or("the file is not known")?;
        if offset.checked_add(bytes).is_none_or(|end| end > mapped.length) {
            return Err("the file is too short for the memory".into());
        }
        let Some(piece) = self.pieces.last_mut() else { return Ok(()) };
        gpus.map(piece)?;
        let address = piece.address;
        // Of GPUs that were not known when the file was.
        mapped.register(gpus);
        if self.way == Way::Out {
            mapped.mark(offset, bytes, gpus.mark);
        }
        self.ranges.push((offset, bytes));
        let lane = self.lanes.entry(device).or_default();
        for (from, length) in mapped.stretches(offset, bytes) {
            let (memory, host) = (address + (from - offset), mapped.address(from));
            lane.waiting.extend(chunks(memory, host, length));
        }
        Ok(())
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.outcome.is_none() && self.failed.is_none() && self.lanes.values().any(|lane| !lane.is_over())
    }

    /// Begins what can be begun now, and ends the copy when all of it has ended. Whether anything has changed.
    pub(super) fn go_on(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> bool {
        let has_moved = self.or_fails(|copy| copy.step(gpus)).unwrap_or(false);
        if self.is_whole && self.outcome.is_none() && !self.is_under_way() {
            self.end(gpus, files);
        }
        has_moved
    }

    /// Begins at most one chunk on each GPU, because one to or from memory that is not registered has ended when the call
    /// returns, and there may be a request.
    fn step(&mut self, gpus: &mut Gpus) -> Result<bool, String> {
        let (mut has_moved, mut empty) = (false, Vec::new());
        for (device, lane) in &mut self.lanes {
            let mut has_begun = false;
            for (slot, flying) in lane.flying.iter_mut().enumerate() {
                if let Some(chunk) = *flying {
                    if !gpus.is_idle(*device, slot)? {
                        continue;
                    }
                    *flying = None;
                    has_moved = true;
                    self.bytes += chunk.bytes;
                    empty.extend(chunk.room);
                }
                if has_begun {
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

    /// Copies what has no room, and the rest into room. Returns its bytes, and those of the room.
    pub(super) fn leave(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<[u64; 2], String> {
        self.go_on(gpus, files);
        if self.is_under_way() {
            self.take_room(gpus);
            while self.is_under_way() {
                // Not `go_on`: with these chunks the copy is not over.
                if !self.or_fails(|copy| copy.step(gpus)).unwrap_or(false) {
                    std::thread::sleep(LOOK);
                }
            }
            self.or_fails(|_| gpus.wait_within());
            self.or_fails(|copy| {
                // The job may free it from now on.
                copy.let_go(gpus);
                for lane in copy.lanes.values_mut() {
                    lane.waiting.append(&mut lane.left);
                }
                Ok(())
            });
            self.go_on(gpus, files);
        }
        match (&self.outcome, &self.failed) {
            (Some(Err(why)), _) | (_, Some(why)) => Err(why.clone()),
            _ => {
                let rooms = self.rooms.iter().map(|room| room.bytes).sum();
                Ok([self.lanes.values().map(Lane::bytes).sum(), rooms])
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
    pub(super) fn finish(&mut self, gpus: &mut Gpus, files: &[Mapped]) -> Result<[u64; 2], String> {
        self.is_whole = true;
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

    /// Nothing is begun any more: looks whether all arrived.
    fn end(&mut self, gpus: &mut Gpus, files: &[Mapped]) {
        let finished = gpus.finish();
        let took = self.begun.elapsed();
        self.or_fails(|_| finished);
        self.or_fails(|copy| {
            let Some(mapped) = files.iter().find(|known| known.key == copy.file) else { return Ok(()) };
            match copy.way {
                Way::Out => {
                    copy.ranges.iter().try_for_each(|(offset, bytes)| mapped.check_marks(*offset, *bytes, gpus.mark))
                }
                Way::In => copy.pieces.iter().try_for_each(|piece| gpus.check(piece, &mapped.file)),
            }
        });
        self.let_go(gpus);
        for room in self.rooms.drain(..).filter(|room| room.address != 0) {
            // One that cannot be freed now is free when this process ends.
            let _ = gpus.free(room.device, room.address);
        }
        self.outcome = Some(match &self.failed {
            Some(why) => Err(why.clone()),
            None => Ok([self.bytes, micros(took)]),
        });
    }

    fn let_go(&mut self, gpus: &mut Gpus) {
        self.pieces.drain(..).for_each(|piece| gpus.let_go(&piece));
    }
}

fn chunks(memory: u64, host: usize, bytes: u64) -> impl Iterator<Item = Chunk> {
    (0..bytes.div_ceil(CHUNK)).map(move |number| {
        let at = number * CHUNK;
        let host = host + usize::try_from(at).unwrap_or(0);
        Chunk { memory: memory + at, host, bytes: CHUNK.min(bytes - at), room: None }
    })
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
        let all: Vec<Chunk> = chunks(1 << 40, 1 << 30, 2 * CHUNK + GRANULE).collect();
        assert_eq!(all.iter().map(|chunk| chunk.bytes).collect::<Vec<_>>(), [CHUNK, CHUNK, GRANULE]);
        for pair in all.windows(2) {
            assert_eq!(pair[0].memory + pair[0].bytes, pair[1].memory);
            assert_eq!(pair[0].host as u64 + pair[0].bytes, pair[1].host as u64);
        }
        assert_eq!(chunks(0, 0, CHUNK).count(), 1);
        assert_eq!(chunks(0, 0, 0).count(), 0);
    }
}

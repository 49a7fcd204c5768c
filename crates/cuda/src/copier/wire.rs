//! The packets between the supervisor and the process that copies.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Reused, Way};
use crate::packet;
use crate::{GpuUuid, GpuUuid as Uuid};

/// A request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ask {
    /// Use this GPU, and whether its memory will be named. It is answered.
    Gpu(Uuid, bool),
    /// Map the first bytes of the file that comes with it. It is answered with the bytes that are registered.
    File(u64),
    /// A copy begins, with the file of this device and inode.
    Begin(Way, [u64; 2], Reused),
    /// A piece of it, at this offset, of so many bytes. The memory comes with it.
    Piece(u64, u64),
    /// The same, of memory that is first made on this GPU.
    Make(Uuid, u64, u64),
    /// The last one was sent.
    End,
    /// The driver is to work for the job: begin nothing until then, if all that is left has room on the GPU. It is not answered.
    Pause,
    /// The job runs. It is not answered.
    Resume,
    /// The job is to run. It is answered when the rest is in room on the GPU, with its bytes and those of the room.
    Leave,
    /// The rest, and whether the file has what the memory had when the copy began. It is answered with all bytes, the
    /// microseconds, and the bytes that were in a file already. If it has not, the rest is given up. If it has, an answer for each piece follows, with the two
    /// halves of its GPU's UUID, and the memory if that was made.
    Finish(bool),
    /// Forget files that do not exist any more. It is not answered.
    Forget,
}

const WORDS: usize = 5;
const LENGTH: usize = WORDS * 8;
/// Maximum length of an answer's text.
const TEXT: usize = 400;

impl Ask {
    pub(super) fn gpu(uuid: GpuUuid, names: bool) -> Ask {
        Ask::Gpu(uuid, names)
    }

    pub(super) fn file(bytes: u64) -> Ask {
        Ask::File(bytes)
    }

    pub(super) fn begin(way: Way, device: u64, inode: u64, reused: Reused) -> Ask {
        Ask::Begin(way, [device, inode], reused)
    }

    pub(super) fn piece(offset: u64, bytes: u64) -> Ask {
        Ask::Piece(offset, bytes)
    }

    pub(super) fn make(gpu: GpuUuid, offset: u64, bytes: u64) -> Ask {
        Ask::Make(gpu, offset, bytes)
    }

    pub(super) fn end() -> Ask {
        Ask::End
    }

    fn words(self) -> [u64; WORDS] {
        match self {
            Ask::Gpu(uuid, names) => {
                let [a, b] = halves(uuid.bytes());
                [1, a, b, u64::from(names), 0]
            }
            Ask::File(bytes) => [2, bytes, 0, 0, 0],
            Ask::Begin(way, [device, inode], reused) => {
                let reused = match reused {
                    Reused::Nothing => 0,
                    Reused::File => 2,
                    Reused::Files => 4,
                };
                [3, u64::from(way == Way::In) + reused, device, inode, 0]
            }
            Ask::Piece(offset, bytes) => [4, offset, bytes, 0, 0],
            Ask::End => [5, 0, 0, 0, 0],
            Ask::Forget => [6, 0, 0, 0, 0],
            Ask::Leave => [7, 0, 0, 0, 0],
            Ask::Finish(is_right) => [8, u64::from(is_right), 0, 0, 0],
            Ask::Make(uuid, offset, bytes) => {
                let [a, b] = halves(uuid.bytes());
                [9, a, b, offset, bytes]
            }
            Ask::Pause => [10, 0, 0, 0, 0],
            Ask::Resume => [11, 0, 0, 0, 0],
        }
    }

    fn from_words(words: [u64; WORDS]) -> Option<Ask> {
        Some(match words {
            [1, a, b, names, _] => Ask::Gpu(Uuid::from_bytes(whole([a, b])), names != 0),
            [2, bytes, ..] => Ask::File(bytes),
            [3, how @ 0..=5, device, inode, _] => {
                let reused = [Reused::Nothing, Reused::File, Reused::Files][usize::try_from(how / 2).ok()?];
                Ask::Begin(if how % 2 == 1 { Way::In } else { Way::Out }, [device, inode], reused)
            }
            [4, offset, bytes, ..] => Ask::Piece(offset, bytes),
            [5, ..] => Ask::End,
            [6, ..] => Ask::Forget,
            [7, ..] => Ask::Leave,
            [8, is_right, ..] => Ask::Finish(is_right != 0),
            [9, a, b, offset, bytes] => Ask::Make(Uuid::from_bytes(whole([a, b])), offset, bytes),
            [10, ..] => Ask::Pause,
            [11, ..] => Ask::Resume,
            _ => return None,
        })
    }

    pub(super) fn send(self, socket: BorrowedFd<'_>, file: Option<BorrowedFd<'_>>) -> io::Result<()> {
        packet::send(socket, &bytes(self.words()), file)
    }

    /// `None` at the end.
    pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<(Ask, Option<OwnedFd>)>> {
        let mut bytes = [0; LENGTH];
        match packet::receive(socket, &mut bytes)? {
            (0, _) => Ok(None),
            (LENGTH, file) => {
                let ask = Ask::from_words(words(&bytes)).ok_or(io::ErrorKind::InvalidData)?;
                Ok(Some((ask, file)))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) numbers: [u64; 3],
    /// Why it failed, if it did.
    pub(super) why: Option<String>,
}

impl Answer {
    /// About a piece on this GPU.
    pub(super) fn piece(gpu: GpuUuid) -> Answer {
        let [a, b] = halves(gpu.bytes());
        Answer { numbers: [a, b, 0], why: None }
    }

    /// The GPU of an answer about a piece.
    pub(super) fn gpu(&self) -> GpuUuid {
        let [a, b, _] = self.numbers;
        Uuid::from_bytes(whole([a, b]))
    }

    pub(super) fn send(&self, socket: BorrowedFd<'_>, memory: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let [a, b, c] = self.numbers;
        let mut packet = bytes([u64::from(self.why.is_some()), a, b, c, 0]).to_vec();
        packet.extend(self.why.iter().flat_map(|why| why.bytes()).take(TEXT));
        packet::send(socket, &packet, memory)
    }

    pub(super) fn receive(socket: BorrowedFd<'_>) -> io::Result<(Answer, Option<OwnedFd>)> {
        let mut bytes = [0; LENGTH + TEXT];
        let (length, memory) = packet::receive(socket, &mut bytes)?;
        let Some((numbers, text)) = bytes.get(..length).and_then(|bytes| bytes.split_at_checked(LENGTH)) else {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it has ended"));
        };
        let [failed, a, b, c, _] = words(numbers);
        let why = (failed != 0).then(|| String::from_utf8_lossy(text).into_owned());
        Ok((Answer { numbers: [a, b, c], why }, memory))
    }
}

fn bytes(words: [u64; WORDS]) -> [u8; LENGTH] {
    let mut bytes = [0; LENGTH];
    for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        *to = word.to_ne_bytes();
    }
    bytes
}

fn words(bytes: &[u8]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    for (word, from) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_ne_bytes(*from);
    }
    words
}

fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let both = u128::from_ne_bytes(bytes).to_ne_bytes();
    let (halves, _) = both.as_chunks::<8>();
    [halves[0], halves[1]].map(u64::from_ne_bytes)
}

fn whole(halves: [u64; 2]) -> [u8; 16] {
    let mut bytes = [0; 16];
    for (to, half) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(halves) {
        *to = half.to_ne_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_they_were() {
        let uuid = Uuid::from_bytes(std::array::from_fn(|at| u8::try_from(at).unwrap() * 3));
        let all = [
            Ask::Gpu(uuid, false),
            Ask::Gpu(uuid, true),
            Ask::File(7),
            Ask::Begin(Way::In, [1, 2], Reused::Nothing),
            Ask::Begin(Way::Out, [u64::MAX, 0], Reused::Files),
            Ask::Begin(Way::Out, [3, 4], Reused::File),
            Ask::Piece(9, 10),
            Ask::Make(uuid, 11, 12),
            Ask::End,
            Ask::Pause,
            Ask::Resume,
            Ask::Leave,
            Ask::Finish(true),
            Ask::Finish(false),
            Ask::Forget,
        ];
        for ask in all {
            assert_eq!(Ask::from_words(words(&bytes(ask.words()))), Some(ask));
        }
        assert_eq!(Ask::from_words([0; WORDS]), None);
        assert_eq!(Ask::from_words([3, 6, 0, 0, 0]), None);
        assert_eq!(Answer::piece(uuid).gpu(), uuid);
    }
}

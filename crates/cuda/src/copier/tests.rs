//! The supervisor's side, with a thread in place of the process that copies.

use std::thread::{self, JoinHandle};

use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::SndBuf;

use super::*;

const EACH_SECOND: Reuse = Reuse { full_every: 2, from_others: true };

/// A copier whose process does nothing, and what answers in its place. It returns what it was asked.
fn played(answer: impl Fn(Ask) -> Option<Answer> + Send + 'static) -> (Copier, JoinHandle<Vec<Ask>>) {
    let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    // Few requests are on their way: what is sent must be read before the copy is over.
    setsockopt(&ours, SndBuf, &16_384).unwrap();
    let child = Spawn::new(Path::new("/bin/sleep"), ["60"]).unwrap().dies_with_us().start().unwrap();
    let play = move || {
        let (mut asked, mut pieces) = (Vec::new(), Vec::new());
        while let Ok(Some((ask, _))) = Ask::receive(theirs.as_fd()) {
            asked.push(ask);
            let is_right = ask == Ask::Finish(true);
            match (ask, answer(ask)) {
                (Ask::Begin(..), _) => pieces.clear(),
                (Ask::Piece(..), _) => pieces.push((GpuUuid::from_bytes([1; 16]), None)),
                (Ask::Make(gpu, ..), _) => pieces.push((gpu, Some(tempfile::tempfile().unwrap()))),
                (Ask::End | Ask::Pause | Ask::Resume, _) => {}
                (_, Some(answer)) => {
                    answer.send(theirs.as_fd(), None).unwrap();
                    for (gpu, memory) in pieces.iter().filter(|_| is_right && answer.why.is_none()) {
                        Answer::piece(*gpu).send(theirs.as_fd(), memory.as_ref().map(AsFd::as_fd)).unwrap();
                    }
                }
                // As if it had died.
                (_, None) => break,
            }
        }
        asked
    };
    let running = Mutex::new(Some(Running { child, socket: ours, copies: Cell::new(0) }));
    (Copier { running, ..Copier::default() }, thread::spawn(play))
}

fn done(numbers: [u64; 3]) -> Option<Answer> {
    Some(Answer { numbers, why: None })
}

fn refused(why: &str) -> Option<Answer> {
    Some(Answer { numbers: [0; 3], why: Some(why.into()) })
}

fn piece(bytes: u64) -> Staying {
    Staying { pid: 7, index: 0, bytes, memory: OwnedFd::from(tempfile::tempfile().unwrap()).into() }
}

fn copied(copier: &Copier) -> Result<Copied, Error> {
    let file = tempfile::tempfile().unwrap();
    let pieces = [piece(8), piece(4)];
    copier.begin(Way::Out, &file, EACH_SECOND, [(0, &pieces[0]), (8, &pieces[1])])?.finish(&|| false)
}

#[test]
fn a_copy_asks_for_each_piece_and_tells_what_it_did() {
    let (copier, played) = played(|_| done([12, 5, 4]));
    let copied = copied(&copier).unwrap();
    assert_eq!((copied.bytes, copied.same, copied.took), (12, 4, Duration::from_micros(5)));
    assert!(copied.pieces.iter().all(|piece| piece.memory.is_none()) && copied.pieces.len() == 2);
    assert!(copier.pid().is_some(), "it stays for the next one");
    drop(copier);
    let asked = played.join().unwrap();
    assert!(matches!(asked[0], Ask::Begin(Way::Out, [_, inode], Reused::Nothing) if inode != 0), "{asked:?}");
    assert_eq!(asked[1..], [Ask::Piece(0, 8), Ask::Piece(8, 4), Ask::End, Ask::Finish(true)]);
}

#[test]
fn the_first_copy_and_one_of_so_many_compare_nothing() {
    let (copier, played) = played(|_| done([8, 5, 0]));
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    for way in [Way::Out, Way::In, Way::Out, Way::Out, Way::In, Way::Out, Way::Out] {
        let reuse = Reuse { full_every: 3, from_others: true };
        copier.begin(way, &file, reuse, [(0, &one)]).unwrap().finish(&|| false).unwrap();
    }
    for reuse in [Reuse::NOTHING, Reuse { full_every: 3, from_others: false }] {
        copier.begin(Way::Out, &file, reuse, [(0, &one)]).unwrap().finish(&|| false).unwrap();
    }
    drop(copier);
    let reused = played.join().unwrap().into_iter().filter_map(|ask| match ask {
        Ask::Begin(Way::In, _, Reused::Nothing) => None,
        Ask::Begin(_, _, reused) => Some(reused),
        _ => None,
    });
    use Reused::{File, Files, Nothing};
    assert_eq!(reused.collect::<Vec<_>>(), [Nothing, Files, Files, Nothing, Files, Nothing, Nothing]);
    let _ = File;
}

#[test]
fn a_failure_ends_the_process_and_says_why() {
    type Play = fn(Ask) -> Option<Answer>;
    let plays: [(Play, &str); 3] = [
        (|_| refused("the copy failed: error 2"), "cannot copy: the copy failed: error 2"),
        (|_| done([11, 5, 0]), "it copied 11 bytes and not 12"),
        (|_| None, "does not answer (copy)"),
    ];
    for (play, words) in plays {
        let (copier, played) = played(play);
        let error = copied(&copier).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(copier.pid(), None, "{words}");
        played.join().unwrap();
    }
}

#[test]
fn a_process_that_died_before_a_request_is_not_asked() {
    let (copier, played) = played(|_| done([0; 3]));
    let pid = copier.pid().unwrap();
    copier.lock().as_ref().unwrap().child.signal(libc::SIGKILL).unwrap();
    while !copier.lock().as_ref().unwrap().child.has_ended().unwrap() {
        thread::sleep(Duration::from_millis(1));
    }
    // The one that starts instead is this program, which is none.
    let error = copier.prepare(&[GpuUuid::from_bytes([1; 16])], false).unwrap_err();
    assert!(matches!(error, Error::Gone { .. }), "{error}");
    assert_ne!(copier.pid(), Some(pid));
    assert_eq!(played.join().unwrap(), []);
}

#[test]
fn a_process_that_fails_is_no_reason_not_to_compare_later() {
    let (copier, played) = played(|_| refused("no GPU has the UUID"));
    let error = copier.prepare(&[GpuUuid::from_bytes([1; 16])], false).unwrap_err();
    assert!(error.to_string().contains("no GPU has the UUID"), "{error}");
    assert!(!copier.cannot_compare.load(Ordering::Relaxed));
    assert_eq!(played.join().unwrap().len(), 1, "without comparing there is nothing else to try");
}

#[test]
fn a_copy_that_nobody_waits_for_is_over_when_it_is_dropped() {
    let (copier, played) = played(|_| {
        thread::sleep(Duration::from_millis(50));
        done([8, 5, 0])
    });
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    let began = Instant::now();
    let mut copying = copier.begin(Way::In, &file, Reuse::NOTHING, [(0, &one)]).unwrap();
    copying.sending.take().map(JoinHandle::join);
    drop(copying);
    assert!(began.elapsed() >= Duration::from_millis(50), "the job would change the memory meanwhile");
    // Its answer is not taken for that of the next request.
    assert_eq!(copier.file(&file, 0).unwrap(), 8);
    drop(copier);
    assert_eq!(played.join().unwrap().len(), 5);
}

#[test]
fn pieces_of_a_copy_that_nobody_wants_are_not_sent() {
    // As if each took long to copy.
    let (copier, played) = played(|ask| {
        thread::sleep(Duration::from_millis(if matches!(ask, Ask::Piece(..)) { 20 } else { 0 }));
        done([0; 3])
    });
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    drop(copier.begin(Way::Out, &file, EACH_SECOND, (0..2000).map(|_| (0, &one))).unwrap());
    assert!(copier.pid().is_some(), "it has answered");
    drop(copier);
    let asked = played.join().unwrap();
    assert!(asked.len() < 1000 && asked.ends_with(&[Ask::End, Ask::Finish(false)]), "{}", asked.len());
}

#[test]
fn a_process_that_does_not_end_a_copy_that_nobody_wants_is_ended() {
    let (open, closed) = std::sync::mpsc::channel::<()>();
    let closed = Mutex::new(closed);
    // It is in the driver, and reads nothing.
    let (copier, played) = played(move |_| {
        let _ = closed.lock().unwrap().recv();
        None
    });
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    let began = Instant::now();
    drop(copier.begin(Way::Out, &file, EACH_SECOND, (0..2000).map(|_| (0, &one))).unwrap());
    let took = began.elapsed();
    assert!(took >= TO_GIVE_UP && took < PATIENCE / 2, "{took:?}");
    assert_eq!(copier.pid(), None);
    drop(open);
    played.join().unwrap();
}

#[test]
fn a_disk_has_time() {
    let gib = |n: u64| n << 30;
    let [memory, disk] = [true, false].map(|is_in_memory| time_limit(gib(96), is_in_memory).as_secs());
    assert!((100..200).contains(&memory), "{memory}");
    // 100 MB/s.
    assert!(disk > gib(96) / 100_000_000, "{disk}");
    // The size is the job's word.
    assert!(time_limit(u64::MAX, false) > Duration::from_secs(1));
}

#[test]
fn the_size_of_nonsense_does_not_wrap() {
    let (copier, played) = played(|_| refused("the file is too short for the memory"));
    let file = tempfile::tempfile().unwrap();
    let pieces = [piece(u64::MAX), piece(2)];
    let copying = copier.begin(Way::Out, &file, EACH_SECOND, pieces.iter().map(|piece| (0, piece))).unwrap();
    assert!(matches!(copying.finish(&|| false), Err(Error::Refused { .. })));
    played.join().unwrap();
}

#[test]
fn a_job_that_left_has_the_rest_copied_behind_it() {
    let (copier, played) = played(|ask| done(if ask == Ask::Leave { [4, 6, 0] } else { [8, 5, 0] }));
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    let mut copying = copier.begin(Way::Out, &file, EACH_SECOND, [(0, &one)]).unwrap();
    copying.sending.take().map(JoinHandle::join);
    copying.pause();
    assert_eq!(copying.leave(&|| false).unwrap(), Left { bytes: 4, room: 6 });
    copying.resume();
    assert_eq!(copying.finish(&|| false).unwrap().bytes, 8);
    drop(copier);
    assert_eq!(played.join().unwrap()[2..], [Ask::End, Ask::Pause, Ask::Leave, Ask::Resume, Ask::Finish(true)]);
}

#[test]
fn after_a_failure_nothing_is_waited_for_a_second_time() {
    let (copier, played) = played(|_| None);
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    let mut copying = copier.begin(Way::Out, &file, EACH_SECOND, [(0, &one)]).unwrap();
    assert!(matches!(copying.leave(&|| false), Err(Error::Gone { .. })));
    assert_eq!(copier.pid(), None);
    // This would ask another process, which knows of no copy.
    drop(copying);
    assert_eq!(copier.pid(), None);
    played.join().unwrap();
}

#[test]
fn memory_that_is_made_comes_with_its_end() {
    let gpus = [2, 3].map(|byte| GpuUuid::from_bytes([byte; 16]));
    let (copier, played) = played(|_| done([12, 5, 0]));
    let file = tempfile::tempfile().unwrap();
    assert!(copier.can_make());
    let made = copier.make(&file, [(gpus[0], 0, 8), (gpus[1], 8, 4)]).unwrap().finish(&|| false).unwrap();
    assert!(made.pieces.iter().map(|piece| piece.gpu).eq(gpus));
    assert!(made.pieces.iter().all(|piece| piece.memory.is_some()));
    // One that nobody wants any more gives nothing, and what follows is understood.
    let mut making = copier.make(&file, [(gpus[0], 0, 12)]).unwrap();
    making.sending.take().map(JoinHandle::join);
    drop(making);
    assert_eq!(copier.file(&file, 0).unwrap(), 12);
    copier.makes_no_more();
    assert!(!copier.can_make());
    drop(copier);
    let asked = played.join().unwrap();
    assert!(matches!(asked[0], Ask::Begin(Way::In, _, Reused::Nothing)), "{asked:?}");
    assert_eq!(asked[1..5], [Ask::Make(gpus[0], 0, 8), Ask::Make(gpus[1], 8, 4), Ask::End, Ask::Finish(true)]);
    assert_eq!(asked[6..8], [Ask::Make(gpus[0], 0, 12), Ask::End]);
}

#[test]
fn a_copy_that_is_cancelled_ends_the_process() {
    let (open, closed) = std::sync::mpsc::channel::<()>();
    let closed = Mutex::new(closed);
    let (copier, played) = played(move |_| {
        let _ = closed.lock().unwrap().recv();
        done([8, 5, 0])
    });
    let (file, one) = (tempfile::tempfile().unwrap(), piece(8));
    let copying = copier.begin(Way::Out, &file, EACH_SECOND, [(0, &one)]).unwrap();
    let began = Instant::now();
    assert!(matches!(copying.finish(&|| true), Err(Error::Cancelled)));
    assert!(began.elapsed() < PATIENCE / 2, "{:?}", began.elapsed());
    assert_eq!(copier.pid(), None);
    // Its answer goes nowhere, once no child of another test has our end until it executes its program.
    thread::sleep(Duration::from_millis(300));
    drop(open);
    assert!(played.join().is_err());
}

//! What a failed rehearsal says: something against the image, or nothing.

use rekindle_base::chain;
use rekindle_criu as criu;
use rekindle_os::spawn::Ended;

use crate::parts::access::Fault;
use crate::restore::Error;

/// CRIU's message if a UNIX socket cannot be connected (`open_unixsk_standalone`, `post_open_interconnected`). A socket
/// of the job can be connected; one of another program is not in the view.
const OUTSIDE: &str = "Can't connect";

/// Messages of CRIU that are caused by the rehearsal itself: it shares the machine's limits with the job, has no access
/// to its network devices, and runs at a later time. None of them is a fault of the image.
const NOT_OF_THE_IMAGE: [&str; 12] = [
    "Resource temporarily unavailable",
    "failed with -11",
    "Too many open files",
    "Cannot allocate memory",
    "No space left",
    "Disk quota exceeded",
    "Read-only file system",
    "Address already in use",
    "No such device",
    "ifindex",
    "packet socket",
    // A file that is open for reading was written to by another program since.
    "bad size",
];

pub(super) enum Failure {
    /// CRIU cannot restore the image.
    Refused(String),
    /// The rehearsal was impossible.
    NotTried(String),
}

impl Failure {
    pub(super) fn of(error: &(dyn std::error::Error + 'static)) -> Failure {
        Failure::NotTried(chain(error))
    }

    /// The failure that counts against the image; errors with any other cause are `NotTried`.
    pub(super) fn of_restore(error: &Error) -> Failure {
        let log = error.criu_log();
        let says = |mark: &str| log.is_some_and(|log| log.errors().iter().any(|line| line.contains(mark)));
        if says(OUTSIDE) {
            let why = "it is connected to a program outside the job, which a rehearsal must not disturb";
            return Failure::NotTried(why.into());
        }
        if log.is_some_and(criu::Log::says_killed) || NOT_OF_THE_IMAGE.iter().any(|mark| says(mark)) {
            return Failure::of(error);
        }
        match error {
            Error::Criu(criu::RunError::Refused { log }) if !log.errors().is_empty() => Failure::Refused(chain(error)),
            // CRIU found a fault in the image. A CRIU that was killed proves nothing.
            Error::Criu(criu::RunError::Gone {
                ended: Ended::Signal(libc::SIGABRT | libc::SIGSEGV | libc::SIGBUS),
                ..
            })
            | Error::Criu(criu::RunError::Image(criu::image::Error::Damaged { .. })) => Failure::Refused(chain(error)),
            Error::Criu(criu::RunError::Image(criu::image::Error::Read { source, .. }))
                if source.kind() == std::io::ErrorKind::NotFound =>
            {
                Failure::Refused(chain(error))
            }
            Error::Compared(_) => Failure::Refused(chain(error)),
            // A file that was replaced or closed since the snapshot is no fault of the image.
            Error::Refused { why, .. } if why.fault() == Fault::Image => Failure::Refused(chain(error)),
            other => Failure::of(other),
        }
    }

    /// A file of the image that cannot be used.
    pub(super) fn of_image(error: criu::image::Error) -> Failure {
        Failure::of_restore(&criu::RunError::Image(error).into())
    }
}

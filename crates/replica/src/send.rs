//! Sends a pack in parts, a few at a time, so that memory is bounded and a failure loses only one part.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use object_store::{ObjectStoreExt, PutPayload};
use tokio::task::JoinSet;

use crate::client::{Cancelled, Client, unless};
use crate::error::{Error, Result};
use rekindle_os::beneath::Beneath;
use rekindle_store::persist::Progress;

/// Bytes of a part. S3 requires at least 5 MiB, and at most 10,000 parts.
const PART: u64 = 8 << 20;
/// Number of parts in progress: 24 MiB of memory.
const IN_FLIGHT: usize = 3;
/// Time limit for discarding the parts of a failed upload.
const ABORT: Duration = Duration::from_secs(5);

/// Limits and cancellation for everything that one call sends.
pub(super) struct Flow<'a> {
    pub(super) progress: &'a Progress,
    pub(super) cancelled: Cancelled<'a>,
    /// Maximum bytes per second.
    pub(super) rate: Option<u64>,
    pub(super) began: Instant,
    pub(super) sent: u64,
}

impl<'a> Flow<'a> {
    pub(super) fn new(progress: &'a Progress, rate: Option<u64>, cancelled: Cancelled<'a>) -> Flow<'a> {
        Flow { progress, cancelled, rate, began: Instant::now(), sent: 0 }
    }

    /// How long to wait before more is sent.
    fn due(&self) -> Duration {
        let Some(rate) = self.rate else { return Duration::ZERO };
        let micros = u128::from(self.sent) * 1_000_000 / u128::from(rate.max(1));
        let at = Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX));
        at.saturating_sub(self.began.elapsed())
    }
}

impl Client {
    /// Sends a file of this size. The object exists only when this returns.
    pub(super) fn send(&self, name: &str, pack: &Beneath, size: u64, flow: &mut Flow<'_>) -> Result<()> {
        let action = format!("write {name} to");
        self.check_way(&action, name)?;
        let unreadable = |source| Error::Read { path: pack.path().to_owned(), source };
        let file = pack.read().map_err(unreadable)?;
        self.block_on(self.send_parts(name, &file, size, flow)).map_err(|error| match error {
            Trouble::Remote(error) => self.translated(&action, &error),
            Trouble::Local(source) => unreadable(source),
            Trouble::Cancelled => Error::Cancelled,
        })
    }

    async fn send_parts(&self, name: &str, file: &File, size: u64, flow: &mut Flow<'_>) -> Result<(), Trouble> {
        let cancelled = flow.cancelled;
        let begun = unless(cancelled, self.store().put_multipart(&self.path(name))).await.ok_or(Trouble::Cancelled)?;
        let mut upload = begun?;
        let sent = send_all(upload.as_mut(), file, size, flow).await;
        let result = match sent {
            Ok(()) => {
                unless(cancelled, upload.complete()).await.ok_or(Trouble::Cancelled).and_then(|it| Ok(it.map(drop)?))
            }
            Err(trouble) => Err(trouble),
        };
        if result.is_err() {
            // So that the parts cost nothing; if it fails, the provider's rule removes them.
            let _ = tokio::time::timeout(ABORT, upload.abort()).await;
        }
        result
    }
}

async fn send_all(
    upload: &mut dyn object_store::MultipartUpload,
    file: &File,
    total: u64,
    flow: &mut Flow<'_>,
) -> Result<(), Trouble> {
    let cancelled = flow.cancelled;
    // Dropped on an early return, it cancels the parts in progress.
    let mut parts: JoinSet<object_store::Result<usize>> = JoinSet::new();
    let mut offset = 0;
    loop {
        while parts.len() >= IN_FLIGHT || (offset >= total && !parts.is_empty()) {
            // A part that panicked was not sent.
            let done = unless(cancelled, parts.join_next()).await.ok_or(Trouble::Cancelled)?;
            let done = done.unwrap_or(Ok(Ok(0))).map_err(std::io::Error::other)??;
            flow.progress.add(done);
        }
        if offset >= total {
            return Ok(());
        }
        unless(cancelled, tokio::time::sleep(flow.due())).await.ok_or(Trouble::Cancelled)?;
        let len = PART.min(total - offset);
        // Read on this thread: only the parts wait for it, and the kernel continues to send them.
        let size = usize::try_from(len).map_err(std::io::Error::other)?;
        let mut bytes = vec![0; size];
        file.read_exact_at(&mut bytes, offset)?;
        let part = upload.put_part(PutPayload::from(bytes));
        parts.spawn(async move { part.await.map(|()| size) });
        offset += len;
        flow.sent += len;
    }
}

enum Trouble {
    Remote(object_store::Error),
    Local(std::io::Error),
    Cancelled,
}

impl From<object_store::Error> for Trouble {
    fn from(error: object_store::Error) -> Trouble {
        Trouble::Remote(error)
    }
}

impl From<std::io::Error> for Trouble {
    fn from(error: std::io::Error) -> Trouble {
        Trouble::Local(error)
    }
}

//! `rekindle logs`: a job's output, as it is in the store.

use std::io::{self, stdout};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::{Exit, Global, Misuse};
use crate::launch::tail::Tail;
use crate::store::{JobFolder, Outcome, Writer};

/// Whose output, and which.
#[derive(Debug, clap::Args)]
pub(crate) struct LogsArgs {
    /// The job
    job: String,
    /// Go on with what comes, through restarts, until the job is over
    #[arg(long, short)]
    follow: bool,
    /// Standard error instead of standard output
    #[arg(long)]
    stderr: bool,
    /// The last lines only
    #[arg(long, short = 'n', value_name = "N")]
    lines: Option<usize>,
}

/// How often it is looked whether the job is over, and for output on file systems that tell nothing (NFS).
const LOOK: Duration = Duration::from_millis(500);

pub(super) fn logs(global: &Global, args: &LogsArgs) -> anyhow::Result<Exit> {
    if global.json {
        return Err(Misuse("output of a job is no JSON: leave --json out".into()).into());
    }
    let folder = global.find_supervisor()?.job(&args.job.parse()?)?;
    match copy(&folder, args) {
        // A reader that went away (`| head`).
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => {}
        other => other?,
    }
    Ok(Exit::Success)
}

fn copy(folder: &JobFolder, args: &LogsArgs) -> anyhow::Result<()> {
    let name = if args.stderr { "stderr.log" } else { "stdout.log" };
    let mut out = stdout().lock();
    let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
    watch.add_watch(&folder.log_dir(), events)?;
    let mut tail = Tail::new(&folder.log_dir().join(name));
    match args.lines {
        Some(lines) => tail.skip_to_last(lines)?,
        None => tail.copy_older(&mut out)?,
    }
    loop {
        // Before the last look: what is written until then is seen.
        let over = !args.follow || is_over(folder)?;
        tail.copy(&mut out)?;
        if over {
            return Ok(());
        }
        let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], timeout);
        let _ = watch.read_events();
    }
}

/// One that was interrupted goes on, some time.
fn is_over(folder: &JobFolder) -> anyhow::Result<bool> {
    if folder.writer()? != Writer::Nobody {
        return Ok(false);
    }
    Ok(folder.record()?.is_none_or(|record| record.outcome != Outcome::Running))
}

//! `rekindle logs`: a job's output, as it is stored.
//!
//! What the job wrote to its standard error goes to ours, as if it ran here. Colours and progress bars are part of the
//! output, so it is printed unchanged. Control sequences are escaped ([`clean`]) only on a terminal of a user other
//! than the job's, who did not choose to run it. If it is not known whose job it is, they are escaped, too.

use std::fs::File;
use std::io::{self, IsTerminal, Write, stderr, stdout};
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use nix::unistd::Uid;

use super::find::Finder;
use super::{Exit, Global, Misuse, complete};
use crate::published::Published;
use crate::telemetry::clean;
use rekindle_engine::launch::identity;
use rekindle_engine::launch::tail::Tail;
use rekindle_os::beneath;
use rekindle_store::{JobFolder, Outcome, Writer};

/// Whose output, and which.
#[derive(Debug, clap::Args)]
pub(crate) struct LogsArgs {
    /// The job
    #[arg(add = complete::jobs())]
    job: String,
    /// Follow the output, through restarts, until the job is over
    #[arg(long, short)]
    follow: bool,
    /// Print only what the job wrote to standard output
    #[arg(long, conflicts_with = "stderr")]
    stdout: bool,
    /// Print only what the job wrote to standard error; it is printed to standard output
    #[arg(long)]
    stderr: bool,
    /// Print the output of another user's job unchanged, even on a terminal that would execute its control sequences
    #[arg(long)]
    raw: bool,
    /// Print only the last N lines (of each, standard output and standard error)
    #[arg(long, short = 'n', value_name = "N")]
    lines: Option<usize>,
}

/// How often to check whether the job is over, and for output on file systems without notifications (NFS).
const LOOK: Duration = Duration::from_millis(500);

pub(super) fn logs(global: &Global, args: &LogsArgs) -> anyhow::Result<Exit> {
    if global.json {
        return Err(Misuse("`rekindle logs` has no JSON output: remove --json".into()).into());
    }
    let folder = Finder::new(global)?.job(&args.job)?;
    match copy(global, &folder, args) {
        // The reader is gone, as in `rekindle logs job | head`.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe) => {}
        other => other?,
    }
    Ok(Exit::Success)
}

fn copy(global: &Global, folder: &JobFolder, args: &LogsArgs) -> anyhow::Result<()> {
    let watch = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
    let events = AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
    // By the descriptor: others can put a link at its path.
    let logs = File::from(folder.log_dir().folder()?);
    watch.add_watch(beneath::own(&logs).as_str(), events)?;
    let mut streams = streams(global, folder, args)?;
    for Stream { tail, out } in &mut streams {
        match args.lines {
            Some(lines) => tail.skip_to_last(lines, out)?,
            None => tail.copy_older(out)?,
        }
    }
    loop {
        // Checked before the last read, so that everything written until then is printed.
        let over = !args.follow || is_over(folder)?;
        for Stream { tail, out } in &mut streams {
            tail.copy(out)?;
        }
        if over {
            return Ok(());
        }
        let timeout = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::MAX);
        let _ = poll(&mut [PollFd::new(watch.as_fd(), PollFlags::POLLIN)], timeout);
        let _ = watch.read_events();
    }
}

/// A file of the job's output, and where it goes.
struct Stream {
    tail: Tail,
    out: Out<Box<dyn Write>>,
}

fn streams(global: &Global, folder: &JobFolder, args: &LogsArgs) -> anyhow::Result<Vec<Stream>> {
    let on_terminal = stdout().is_terminal() || stderr().is_terminal();
    let is_anothers = !args.raw && on_terminal && is_anothers(global, folder)?;
    let stream = |name, to: Box<dyn Write>, is_terminal| Stream {
        tail: Tail::new(&folder.log_dir().join(name)),
        out: Out { to, is_foreign: is_anothers && is_terminal, rest: Vec::new() },
    };
    let mut streams = Vec::new();
    if !args.stderr {
        streams.push(stream("stdout.log", Box::new(stdout().lock()), stdout().is_terminal()));
    }
    if args.stderr {
        streams.push(stream("stderr.log", Box::new(stdout().lock()), stdout().is_terminal()));
    } else if !args.stdout {
        streams.push(stream("stderr.log", Box::new(stderr().lock()), stderr().is_terminal()));
    }
    Ok(streams)
}

/// Whether the job may run as another user than the reader.
fn is_anothers(global: &Global, folder: &JobFolder) -> anyhow::Result<bool> {
    let configured = global.settings(global.overrides())?.job.user;
    Ok(is_foreign(Uid::current().as_raw(), &users(folder, configured.as_deref())?))
}

/// Whether not all of these users are the reader. If nobody is known, nobody knows who writes the output.
fn is_foreign(reader: u32, users: &[Option<u32>]) -> bool {
    users.is_empty() || users.iter().any(|user| *user != Some(reader))
}

/// The users that the job has run as, as far as anything tells; `None` for one that this machine does not know.
fn users(folder: &JobFolder, configured: Option<&str>) -> anyhow::Result<Vec<Option<u32>>> {
    let look_up = |user: &str| identity::lookup(user).ok().map(|user| user.uid);
    // Of the last run, also before it has an image.
    let published = Published::read(&folder.state_file()).ok().and_then(|published| published.uid);
    let known = folder.known()?;
    let recorded = known.iter().find_map(|known| known.best().manifest()).map(|manifest| match &manifest.user {
        Some(user) => look_up(user),
        // That of its supervisor.
        None => folder.dir().metadata().ok().map(|folder| folder.uid()),
    });
    Ok(published.map(Some).into_iter().chain(recorded).chain(configured.map(look_up)).collect())
}

/// The destination of the output.
struct Out<W> {
    to: W,
    is_foreign: bool,
    /// The beginning of an incomplete character.
    rest: Vec<u8>,
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.is_foreign {
            return self.to.write(bytes);
        }
        self.rest.extend_from_slice(bytes);
        let whole = match std::str::from_utf8(&self.rest) {
            Err(error) if error.error_len().is_none() => error.valid_up_to(),
            // Bytes that are not text are replaced below.
            _ => self.rest.len(),
        };
        let text: Vec<u8> = self.rest.drain(..whole).collect();
        self.to.write_all(clean::lines(&String::from_utf8_lossy(&text)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Whether the job is over. An interrupted job is not, because it can continue.
fn is_over(folder: &JobFolder) -> anyhow::Result<bool> {
    if folder.writer()? != Writer::Nobody {
        return Ok(false);
    }
    Ok(folder.record()?.is_none_or(|record| record.outcome != Outcome::Running))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(is_foreign: bool, parts: &[&[u8]]) -> Vec<u8> {
        let mut out = Out { to: Vec::new(), is_foreign, rest: Vec::new() };
        parts.iter().for_each(|part| out.write_all(part).unwrap());
        out.to
    }

    /// The user is that of REKINDLE_JOB_USER, which the reader does not have.
    #[test]
    fn a_job_without_an_image_is_known_to_be_anothers() {
        let dir = tempfile::tempdir().unwrap();
        let store = rekindle_store::Store::open(&dir.path().join("store"), rekindle_store::Access::Write).unwrap();
        let folder = store.create_job(&"j".parse().unwrap()).unwrap();
        let foreign = |reader, configured| is_foreign(reader, &users(&folder, configured).unwrap());
        assert!(foreign(0, None), "nothing tells whose job it is");
        assert!(!foreign(0, Some("root")) && foreign(0, Some("nobody")) && foreign(0, Some("no such user")));
        let publish = |uid: &str| {
            let text = format!(
                r#"{{"version":1,"state":"running","since":"2026-11-21T20:00:00Z","begun":"2026-11-21T20:00:00Z",{uid}
                "supervisor":7,"lineage":"l","pid":8,"restarts":0,"last_image":null,"last_freeze_us":null,
                "last_failure":null}}"#
            );
            std::fs::write(folder.state_file(), text).unwrap();
        };
        // An earlier version.
        publish("");
        assert!(foreign(0, None));
        publish(r#""uid":1000,"#);
        assert!(foreign(0, None) && !foreign(1000, None));
        assert!(foreign(0, Some("root")), "the reader's configuration is not that of the job");
        publish(r#""uid":0,"#);
        assert!(!foreign(0, None) && foreign(1000, None));
    }

    #[test]
    fn output_of_others_is_shown_as_text() {
        let parts: [&[u8]; 4] =
            [b"loss \x1b]0;pwned\x07\n50 %\r", "\u{9b}".as_bytes(), &"é".as_bytes()[..1], b"\xa9\xff\n"];
        assert_eq!(printed(false, &parts), parts.concat());
        let text = "loss \\x1b]0;pwned\\x07\n50 %\\x0d\\u{9b}é\u{fffd}\n";
        assert_eq!(String::from_utf8(printed(true, &parts)).unwrap(), text);
    }
}

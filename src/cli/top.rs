//! `rekindle top`: all jobs of the store, and those that run with another one, live in the terminal.
//!
//! One thread reads the jobs and sends rows; this one draws them and waits for keys. In all cases (a key, a signal, an
//! error, a panic) the terminal is restored at the end.

mod view;
mod watch;

use std::io::{self, IsTerminal, Write, stdin, stdout};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use chrono::Local;
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use crossterm::style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor};
use crossterm::{cursor, execute, queue, terminal};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

use super::find::Finder;
use super::output::Format;
use super::{Exit, Global, Misuse};
use crate::published::{JobState, ShownState};
use view::{Line, Tone, View};
use watch::{Row, Watch};

/// How often the jobs are read.
const LOOK: Duration = Duration::from_secs(1);
/// How soon a signal or new rows are noticed.
const TICK: Duration = Duration::from_millis(100);

pub(super) fn top(global: &Global) -> anyhow::Result<Exit> {
    if global.format() == Format::Json || !stdout().is_terminal() || !stdin().is_terminal() {
        let why = "`rekindle top` needs a terminal: use `rekindle status --watch`, or `status --json`";
        return Err(Misuse(why.into()).into());
    }
    let finder = Finder::new(global)?;
    let title = finder.store().display().to_string();
    let caught = Arc::new(AtomicUsize::new(0));
    for signal in [SIGHUP, SIGINT, SIGTERM] {
        let number = usize::try_from(signal).unwrap_or(0);
        signal_hook::flag::register_usize(signal, Arc::clone(&caught), number)?;
    }
    let (sender, looks) = mpsc::sync_channel(1);
    let mut watch = Watch::of(finder);
    thread::Builder::new().name("look".into()).spawn(move || {
        while sender.send(watch.look()).is_ok() {
            thread::sleep(LOOK);
        }
    })?;
    let screen = Screen::take()?;
    let exit = show(&title, &looks, &caught);
    drop(screen);
    exit
}

fn show(store: &str, looks: &mpsc::Receiver<anyhow::Result<Vec<Row>>>, caught: &AtomicUsize) -> anyhow::Result<Exit> {
    let coloured = std::env::var_os("NO_COLOR").is_none_or(|set| set.is_empty());
    let (mut rows, mut view, mut problem) = (Vec::new(), View::default(), None);
    let (mut changed, mut is_busy) = (true, false);
    loop {
        match caught.load(Ordering::Relaxed) {
            0 => {}
            signal => return Ok(Exit::Job(u8::try_from(128 + signal).unwrap_or(u8::MAX))),
        }
        match looks.try_recv() {
            Ok(Ok(seen)) => (rows, problem, changed) = (seen, None, true),
            Ok(Err(error)) => (problem, changed) = (Some(error.to_string()), true),
            Err(mpsc::TryRecvError::Empty) => {}
            Err(mpsc::TryRecvError::Disconnected) => anyhow::bail!("the thread that reads the jobs has ended"),
        }
        if std::mem::take(&mut changed) {
            let running = rows.iter().filter(|row: &&Row| row.state == ShownState::Live(JobState::Running)).count();
            let jobs = if rows.len() == 1 { "job" } else { "jobs" };
            let now = Local::now().format("%H:%M:%S%:z");
            let title = match &problem {
                Some(problem) => format!("rekindle top  {now}  {problem}"),
                None => format!("rekindle top  {now}  {store}  {} {jobs}, {running} running", rows.len()),
            };
            // A serial console does not report its size.
            let (width, height) = Some(terminal::size()?).filter(|size| size.0 > 0 && size.1 > 0).unwrap_or((80, 24));
            paint(&view::draw(&title, &rows, &view, width.into(), height.into()), coloured)?;
        }
        // More keys may have been read with the last one.
        if is_gone(if is_busy { Duration::ZERO } else { TICK }) {
            return Ok(Exit::Job(128 + u8::try_from(SIGHUP)?));
        }
        is_busy = event::poll(Duration::ZERO)?;
        if !is_busy {
            continue;
        }
        changed = true;
        let Event::Key(key) = event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        match key.code {
            KeyCode::Char('c') if control => return Ok(Exit::Job(130)),
            KeyCode::Char('q') => return Ok(Exit::Success),
            KeyCode::Char('?' | 'h') | KeyCode::F(1) => view.help = !view.help,
            _ if view.help => view.help = false,
            KeyCode::Up | KeyCode::Char('k') => view.step(&rows, -1),
            KeyCode::Down | KeyCode::Char('j') => view.step(&rows, 1),
            KeyCode::PageUp => view.step(&rows, -10),
            KeyCode::PageDown => view.step(&rows, 10),
            KeyCode::Enter => view.toggle(&rows),
            KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if view.open => view.toggle(&rows),
            _ => {}
        }
    }
}

/// Waits for keys, or for the end of the terminal: crossterm reads its end of file again and again and never returns.
fn is_gone(patience: Duration) -> bool {
    let stdin = stdin();
    let mut fds = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    let _ = poll(&mut fds, PollTimeout::try_from(patience).unwrap_or(PollTimeout::MAX));
    let gone = PollFlags::POLLHUP | PollFlags::POLLERR | PollFlags::POLLNVAL;
    fds.iter().any(|fd| fd.revents().is_some_and(|seen| seen.intersects(gone)))
}

/// Draws over the old content: clearing the screen first would flicker.
fn paint(lines: &[Line], coloured: bool) -> io::Result<()> {
    let mut out = stdout().lock();
    queue!(out, terminal::BeginSynchronizedUpdate, cursor::MoveTo(0, 0))?;
    for (n, line) in (0_u16..).zip(lines) {
        queue!(out, cursor::MoveTo(0, n))?;
        for (tone, text) in line {
            tint(&mut out, *tone, coloured)?;
            queue!(out, Print(text), SetAttribute(Attribute::Reset))?;
            if coloured {
                queue!(out, ResetColor)?;
            }
        }
        queue!(out, terminal::Clear(terminal::ClearType::UntilNewLine))?;
    }
    queue!(out, terminal::Clear(terminal::ClearType::FromCursorDown), terminal::EndSynchronizedUpdate)?;
    out.flush()
}

fn tint(out: &mut impl Write, tone: Tone, coloured: bool) -> io::Result<()> {
    let colour = match tone {
        Tone::Plain => return Ok(()),
        Tone::Strong => return queue!(out, SetAttribute(Attribute::Bold)),
        Tone::Chosen => return queue!(out, SetAttribute(Attribute::Reverse)),
        Tone::Soft => Color::DarkGrey,
        Tone::Good => Color::Green,
        Tone::Warn => Color::Yellow,
        Tone::Bad => Color::Red,
    };
    if coloured { queue!(out, SetForegroundColor(colour)) } else { Ok(()) }
}

/// The terminal, until this is dropped.
struct Screen;

impl Screen {
    fn take() -> io::Result<Screen> {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // First, so that the message is visible.
            release_terminal();
            before(panic);
        }));
        terminal::enable_raw_mode()?;
        let screen = Screen;
        execute!(stdout(), terminal::EnterAlternateScreen, terminal::DisableLineWrap, cursor::Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        release_terminal();
    }
}

fn release_terminal() {
    // If the terminal is gone, there is nobody to tell.
    let _ = execute!(stdout(), cursor::Show, terminal::EnableLineWrap, terminal::LeaveAlternateScreen);
    let _ = terminal::disable_raw_mode();
}

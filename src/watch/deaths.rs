//! Notices when a process of the job dies, on a thread of its own that sleeps until one does.
//!
//! A pidfd of each process reports its end, and [`exits`] tells how it ended. Processes are known from the image that
//! the job would go back to. The kernel's process events, if we may read them, tell more:
//!
//! - of processes that the job starts later, if every process counts; without them those are known from the next image
//! - how a process ended, on a kernel whose pidfds do not tell
//! - that a signal is ending a rank. The end of a process that uses a GPU takes a tenth of a second or more

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use rekindle_os::exits::{self, Event, Events, MOST_WATCHED, Watched};
use rekindle_os::process;
use rekindle_os::spawn::Ended;

/// A process of the job that a signal killed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Death {
    /// The life of the job.
    pub(crate) life: u32,
    /// As the job sees it.
    pub(crate) pid: i32,
    /// As we see it.
    pub(crate) outer: i32,
    /// At most 15 bytes.
    pub(crate) name: String,
    pub(crate) signal: i32,
}

/// What was noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// The process has not ended yet. Only the events tell of this.
    Dying(Death),
    /// It has ended.
    Died(Death),
}

/// Which processes are watched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Who {
    /// These, as the job sees them.
    These(Vec<i32>),
    /// Every one.
    All,
}

/// An order to the thread.
#[derive(Debug)]
enum Order {
    /// There is an image of this life of the job, which has this root. Watch these processes too from now on. Those that
    /// are open may have ended.
    Watch { life: u32, root: i32, who: Who, early: bool, open: Vec<Watched> },
    /// The life is over.
    Rest,
}

/// The owner's end of the thread, which ends with a drop.
#[derive(Debug)]
pub(crate) struct Watcher {
    orders: mpsc::Sender<Order>,
    wake: UnixStream,
}

impl Watcher {
    /// Gives `spawn` the work of the thread, which calls `report` until that returns false.
    ///
    /// # Errors
    /// When there is no socket to wake it with.
    pub(crate) fn new(
        spawn: impl FnOnce(Box<dyn FnOnce() + Send>),
        report: impl Fn(Noticed) -> bool + Send + 'static,
        whole: bool,
    ) -> io::Result<Watcher> {
        let (orders, told) = mpsc::channel();
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        spawn(Box::new(move || {
            // Others do not need the events of the whole machine.
            let events = (whole || !exits::always_told()).then(listen).flatten();
            let keeps = events.is_some();
            let watch = Watch { events, keeps, members: BTreeMap::new(), life: 0, root: 0, whole: false };
            if let Err(error) = watch.run(&told, &woken, &report) {
                tracing::error!("deaths of the job's processes are not noticed any more: {error}");
            }
        }));
        Ok(Watcher { orders, wake })
    }

    /// There is an image with these processes. With `early`, [`Noticed::Dying`] is told of them. Of those that were opened
    /// before they ran, or while they were frozen for it, no death is missed.
    pub(crate) fn watch(&self, life: u32, root: i32, who: Who, early: bool, open: Vec<Watched>) {
        self.order(Order::Watch { life, root, who, early, open });
    }

    /// The life is over.
    pub(crate) fn rest(&self) {
        self.order(Order::Rest);
    }

    fn order(&self, order: Order) {
        // If the byte does not fit, others are waiting already.
        if self.orders.send(order).is_ok() {
            let _ = (&self.wake).write(&[0]);
        }
    }
}

#[derive(Debug)]
struct Member {
    inner: i32,
    name: String,
    /// None if only the events tell of its end.
    pidfd: Option<OwnedFd>,
    /// Whether it ended, and how is unknown.
    unknown: bool,
    /// How it is ending.
    dying: Option<Ended>,
}

impl Member {
    fn death(&self, life: u32, pid: i32, signal: i32) -> Death {
        Death { life, pid: self.inner, outer: pid, name: self.name.clone(), signal }
    }
}

#[derive(Debug)]
struct Watch {
    events: Option<Events>,
    /// Whether they are needed for every job.
    keeps: bool,
    /// By pid as we see it.
    members: BTreeMap<i32, Member>,
    life: u32,
    root: i32,
    /// Whether their new children are members too.
    whole: bool,
}

fn listen() -> Option<Events> {
    Events::listen().inspect_err(|error| tracing::debug!("there are no process events: {error}")).ok()
}

/// The longest delay of an event.
const LATE: Duration = Duration::from_millis(100);

impl Watch {
    /// Whether another one may have a descriptor.
    fn has_room(&self) -> bool {
        self.members.values().filter(|member| member.pidfd.is_some()).count() < MOST_WATCHED
    }

    /// Begins to watch this process, if it is wanted.
    fn take(&mut self, pid: i32, wanted: impl Fn(i32) -> bool) {
        let Some((inner, name)) = process::inner_pid(pid).zip(process::name(pid)) else { return };
        if !wanted(inner) {
            return;
        }
        let pidfd = self.has_room().then(|| process::open_pidfd(pid).ok()).flatten();
        if pidfd.is_some() || self.events.is_some() {
            self.members.insert(pid, Member { inner, name, pidfd, unknown: false, dying: None });
        } else {
            tracing::debug!(pid = inner, name, "the death of this process would not be noticed");
        }
    }

    fn run(
        mut self,
        told: &mpsc::Receiver<Order>,
        woken: &UnixStream,
        report: &impl Fn(Noticed) -> bool,
    ) -> io::Result<()> {
        loop {
            let unknown = self.members.values().any(|member| member.unknown);
            let (pids, ready) = {
                let alive = self.members.iter().filter(|(_, member)| !member.unknown);
                let (pids, pidfds): (Vec<i32>, Vec<BorrowedFd<'_>>) =
                    alive.filter_map(|(pid, member)| Some((*pid, member.pidfd.as_ref()?.as_fd()))).unzip();
                let first = [Some(woken.as_fd()), self.events.as_ref().map(Events::descriptor)];
                let fds: Vec<BorrowedFd<'_>> = first.into_iter().flatten().chain(pidfds).collect();
                (pids, exits::wait(&fds, unknown.then_some(LATE))?)
            };
            let quiet = !ready.contains(&true);
            let happened = self.happened();
            let ended = self.ended(&pids, &ready, quiet).into_iter().map(Noticed::Died);
            for noticed in happened.into_iter().chain(ended) {
                if !report(noticed) {
                    return Ok(());
                }
            }
            if matches!((&*woken).read(&mut [0; 64]), Ok(0)) {
                return Ok(());
            }
            told.try_iter().for_each(|order| self.obey(order));
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Rest => {
                self.members.clear();
                (self.root, self.whole) = (0, false);
                self.listen_for(false);
            }
            Order::Watch { life, root, who, early, open } => {
                self.listen_for(early);
                if life != self.life {
                    self.members.clear();
                }
                (self.life, self.root, self.whole) = (life, root, who == Who::All);
                let is_wanted = |inner: i32| match &who {
                    Who::These(these) => these.contains(&inner),
                    Who::All => true,
                };
                for Watched { pid, inner, name, pidfd } in open.into_iter().filter(|it| is_wanted(it.inner)) {
                    // What is known of it already counts.
                    if self.has_room() && !self.members.contains_key(&pid) {
                        let member = Member { inner, name, pidfd: Some(pidfd), unknown: false, dying: None };
                        self.members.insert(pid, member);
                    }
                }
                for pid in process::tree(root).into_iter().filter(|pid| *pid != root) {
                    if !self.members.contains_key(&pid) {
                        self.take(pid, is_wanted);
                    }
                }
            }
        }
    }

    /// Receives the events of the machine only while they are wanted.
    fn listen_for(&mut self, early: bool) {
        match (&self.events, early || self.keeps) {
            (None, true) => self.events = listen(),
            (Some(_), false) => self.events = None,
            _ => {}
        }
    }

    /// Reads the events.
    fn happened(&mut self) -> Vec<Noticed> {
        let events = self.events.as_ref().map(Events::read).unwrap_or_default();
        let mut noticed = Vec::new();
        for event in events {
            match event {
                Event::Forked { parent, child } if self.whole && self.members.contains_key(&parent) => {
                    self.take(child, |_| true);
                }
                Event::Executed { pid } => {
                    if let Some((member, name)) = self.members.get_mut(&pid).zip(process::name(pid)) {
                        member.name = name;
                    }
                }
                Event::Dying { pid, signal } => noticed.extend(self.dies(pid, Ended::Signal(signal))),
                // The first thread of a process may end before the others; the pidfd then says when the process does.
                Event::Ended { pid, how } if self.members.get(&pid).is_some_and(|member| member.pidfd.is_some()) => {
                    noticed.extend(self.dies(pid, how));
                }
                Event::Ended { pid, how } => noticed.extend(self.leaves(pid, how).map(Noticed::Died)),
                Event::Forked { .. } => {}
            }
        }
        noticed
    }

    /// A thread of it has ended.
    fn dies(&mut self, pid: i32, how: Ended) -> Option<Noticed> {
        let Ended::Signal(signal) = how else { return None };
        let member = self.members.get_mut(&pid)?;
        let first = member.dying.replace(how).is_none();
        (first && member.pidfd.is_some()).then(|| Noticed::Dying(member.death(self.life, pid, signal)))
    }

    /// Reads the pidfds.
    fn ended(&mut self, pids: &[i32], ready: &[bool], quiet: bool) -> Vec<Death> {
        let first = ready.len().saturating_sub(pids.len());
        let over: Vec<i32> =
            pids.iter().zip(ready.iter().skip(first)).filter(|(_, ready)| **ready).map(|(pid, _)| *pid).collect();
        let mut deaths = Vec::new();
        for pid in over {
            let Some(member) = self.members.get_mut(&pid) else { continue };
            // Its latest name, if /proc still shows it.
            if let Some(name) = process::name(pid).filter(|_| process::inner_pid(pid) == Some(member.inner)) {
                member.name = name;
            }
            let how = member.pidfd.as_ref().and_then(|pidfd| exits::ended(pidfd.as_fd(), pid));
            match how.or(member.dying) {
                Some(how) => deaths.extend(self.leaves(pid, how)),
                None => member.unknown = true,
            }
        }
        if quiet {
            self.members.retain(|_, member| {
                if member.unknown {
                    tracing::debug!(pid = member.inner, name = member.name, "a process ended, and it is unknown how");
                }
                !member.unknown
            });
        }
        deaths
    }

    fn leaves(&mut self, pid: i32, how: Ended) -> Option<Death> {
        let member = self.members.remove(&pid)?;
        let Ended::Signal(signal) = how else { return None };
        Some(member.death(self.life, pid, signal))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Child, Command, Stdio};

    /// The deaths that it tells of.
    fn watcher(whole: bool) -> (Watcher, mpsc::Receiver<Death>) {
        let (sender, deaths) = mpsc::channel();
        let report = move |noticed| match noticed {
            Noticed::Died(death) => sender.send(death).is_ok(),
            Noticed::Dying(_) => true,
        };
        (watcher_with(whole, report), deaths)
    }

    fn watcher_with(whole: bool, report: impl Fn(Noticed) -> bool + Send + 'static) -> Watcher {
        let spawn = |work: Box<dyn FnOnce() + Send>| drop(std::thread::spawn(work));
        Watcher::new(spawn, report, whole).unwrap()
    }

    fn shell(script: &str) -> Child {
        Command::new("sh").args(["-c", script]).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap()
    }

    fn line(child: &mut Child) -> String {
        use std::io::BufRead;
        let mut line = String::new();
        let out = child.stdout.as_mut().unwrap();
        std::io::BufReader::with_capacity(1, out).read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    const SOON: Duration = Duration::from_secs(10);

    /// Waits until the watcher's thread has a descriptor of this process, and has put it with the others.
    fn is_watched(pid: i32) {
        let (line, begun) = (format!("Pid:\t{pid}"), std::time::Instant::now());
        let is_it = |file: std::fs::DirEntry| {
            std::fs::read_to_string(file.path()).is_ok_and(|text| text.lines().any(|it| it == line))
        };
        while !std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten().any(is_it) && begun.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(5));
        }
        std::thread::sleep(Duration::from_millis(200));
    }

    fn kill(pid: i32, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }

    fn end(tree: i32) {
        for pid in process::tree(tree).into_iter().rev() {
            // Its parent may have reaped it meanwhile.
            let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
    }

    fn events() -> Option<Events> {
        let found = Events::listen();
        let why = format!("there are no process events here: {found:?}");
        rekindle_testing::needs("events", found.ok(), &why)
    }

    #[test]
    fn a_process_that_is_watched_is_told_of_and_no_other() {
        if !rekindle_testing::root() {
            return;
        }
        let script = "sleep 60 & a=$!; sleep 60 & b=$!; sleep 60 & echo $a $b $!; wait $a; sleep 60";
        let mut root = shell(script);
        let pids: Vec<i32> = line(&mut root).split(' ').map(|pid| pid.parse().unwrap()).collect();
        // Each is the shell until it executes its own program.
        while pids.iter().any(|pid| process::name(*pid).as_deref() != Some("sleep")) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let (watcher, deaths) = watcher(false);
        let outer = root.id().cast_signed();
        watcher.watch(3, outer, Who::These(vec![pids[0], pids[1]]), false, Vec::new());
        pids[..2].iter().for_each(|pid| is_watched(*pid));
        kill(pids[2], nix::sys::signal::Signal::SIGKILL);
        for (pid, signal) in
            [(pids[0], nix::sys::signal::Signal::SIGKILL), (pids[1], nix::sys::signal::Signal::SIGSEGV)]
        {
            kill(pid, signal);
            let death = deaths.recv_timeout(SOON).unwrap();
            let expected = Death { life: 3, pid, outer: pid, name: "sleep".into(), signal: signal as i32 };
            assert_eq!(death, expected);
        }
        drop(watcher);
        assert!(deaths.recv_timeout(SOON).is_err(), "the thread is over");
        root.kill().unwrap();
        root.wait().unwrap();
    }

    #[test]
    fn a_process_whose_first_thread_has_ended_is_still_watched() {
        if !rekindle_testing::root() || events().is_none() {
            return;
        }
        let script = "import ctypes, sys, threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\n\
                      sys.stdin.readline()\nctypes.CDLL(None).pthread_exit(None)";
        let mut root = shell(&format!(
            "mkfifo /tmp/death-$$; python3 -c '{script}' </tmp/death-$$ & echo $!; \
                      exec 3>/tmp/death-$$; rm /tmp/death-$$; sleep 0.6; echo >&3; wait; sleep 60"
        ));
        let pid: i32 = line(&mut root).parse().unwrap();
        let (watcher, deaths) = watcher(true);
        watcher.watch(1, root.id().cast_signed(), Who::All, false, Vec::new());
        is_watched(pid);
        let begun = std::time::Instant::now();
        while process::state(pid) != Some('Z') {
            assert!(begun.elapsed() < SOON, "the first thread has not ended");
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(deaths.recv_timeout(Duration::from_millis(200)).is_err(), "the others live");
        kill(pid, nix::sys::signal::Signal::SIGKILL);
        let death = deaths.recv_timeout(SOON).unwrap();
        assert_eq!((death.pid, death.signal), (pid, libc::SIGKILL));
        drop(watcher);
        end(root.id().cast_signed());
        root.wait().unwrap();
    }

    #[test]
    fn that_a_process_dies_is_told_before_it_has_ended() {
        if !rekindle_testing::root() || events().is_none() {
            return;
        }
        // It gives back this memory last.
        let script = "import threading, time\nfor _ in range(3): threading.Thread(target=time.sleep, args=(60,)).start()\n\
                      memory = b\"x\" * (1 << 30)\nprint(flush=True)\ntime.sleep(60)";
        let attempt = || {
            let mut child = Command::new("sh");
            let mut child =
                child.args(["-c", &format!("python3 -c '{script}'; sleep 60")]).stdout(Stdio::piped()).spawn().unwrap();
            line(&mut child);
            let root = child.id().cast_signed();
            let pid = process::children(root)[0];
            let (sender, noticed) = mpsc::channel();
            let watcher = watcher_with(false, move |noticed| sender.send((std::time::Instant::now(), noticed)).is_ok());
            watcher.watch(1, root, Who::These(vec![pid]), true, Vec::new());
            is_watched(pid);
            kill(pid, nix::sys::signal::Signal::SIGKILL);
            let expected = Death { life: 1, pid, outer: pid, name: "python3".into(), signal: libc::SIGKILL };
            let (first, dying) = noticed.recv_timeout(SOON).unwrap();
            let is_told_before = dying == Noticed::Dying(expected.clone()) && {
                let (then, died) = noticed.recv_timeout(SOON).unwrap();
                assert_eq!(died, Noticed::Died(expected));
                then - first > Duration::from_millis(10)
            };
            end(root);
            child.wait().unwrap();
            is_told_before
        };
        // On a machine with much else to do the process may have ended before it is noticed.
        assert!((0..5).any(|_| attempt()));
    }

    /// As on a kernel whose pidfds do not tell it, or with too many processes.
    #[test]
    fn without_a_pidfd_the_events_tell() {
        if !rekindle_testing::root() {
            return;
        }
        let Some(events) = events() else { return };
        let mut child = shell("kill -9 $$");
        let pid = child.id().cast_signed();
        let member = Member { inner: 1005, name: "trainer".into(), pidfd: None, unknown: true, dying: None };
        let members = BTreeMap::from([(pid, member)]);
        let mut watch = Watch { events: Some(events), keeps: true, members, life: 2, root: 1, whole: false };
        child.wait().unwrap();
        let expected = Death { life: 2, pid: 1005, outer: pid, name: "trainer".into(), signal: libc::SIGKILL };
        let begun = std::time::Instant::now();
        let mut told = Vec::new();
        while told.is_empty() {
            assert!(begun.elapsed() < SOON);
            told = watch.happened();
        }
        for noticed in &mut told {
            // It may have seen the shell execute its program.
            let Noticed::Died(death) = noticed else { continue };
            death.name = "trainer".into();
        }
        assert_eq!((told, watch.members.len()), (vec![Noticed::Died(expected)], 0));
    }

    #[test]
    fn of_a_job_that_is_watched_as_a_whole_later_children_are_told_of() {
        if !rekindle_testing::root() || events().is_none() {
            return;
        }
        let mut root = shell("sh -c 'echo $$; sleep 0.6; sleep 60 & echo $!; wait; sleep 60'");
        line(&mut root);
        let (watcher, deaths) = watcher(true);
        watcher.watch(1, root.id().cast_signed(), Who::All, false, Vec::new());
        let pid: i32 = line(&mut root).parse().unwrap();
        while process::name(pid).as_deref() != Some("sleep") {
            std::thread::sleep(Duration::from_millis(5));
        }
        is_watched(pid);
        kill(pid, nix::sys::signal::Signal::SIGKILL);
        let death = deaths.recv_timeout(SOON).unwrap();
        assert_eq!((death.pid, death.signal, death.name.as_str()), (pid, libc::SIGKILL, "sleep"));
        watcher.rest();
        end(root.id().cast_signed());
        root.wait().unwrap();
    }
}

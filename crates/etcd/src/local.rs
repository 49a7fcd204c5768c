//! An etcd that rekindle runs itself, for users who have none: one member, which lives as long as the supervisor that
//! started it.
//!
//! Whoever can write to the coordinator decides what is restored. So only holders of the keys can write:
//!
//! - Clients need a certificate. An authority signs two certificates, and its key is not kept ([`Handout`]). The
//!   certificates protect etcd from the first moment; passwords could only be set once it runs.
//! - The port for other members is a socket in a folder that others cannot enter.
//! - Its folder has the data and the keys. They stay the same when it starts again, so connected clients continue.
//!
//! If etcd ends, it is started again with its data, which it syncs before each answer. It dies with the supervisor.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rekindle_os::beneath::Beneath;
use rekindle_os::durable::write_file;
use rekindle_os::shielded::shielded;
use rekindle_os::spawn::{Child, Open, Spawn};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::error::{Error, Result};
use crate::handout::{Handout, Server};

/// The pause between an end and the next start. It doubles, up to the second value.
const PAUSE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(5));

/// An etcd that has run for this time counts as healthy.
const STEADY: Duration = Duration::from_secs(60);

/// Time limit for its end after a signal.
const END: Duration = Duration::from_secs(3);

/// The size limit of its data. The documents of a group are some kilobytes, and old ones are removed.
const QUOTA: u64 = 256 << 20;

/// How much of its log is read for the reason of its end.
const MAX_LOG: u64 = 16 << 20;

/// Maximum size of the file with the keys: ours have some kilobytes.
const MAX_KEYS: u64 = 1 << 20;

/// Old revisions are removed after this time. A client that was away for longer gets the whole state.
const HISTORY: &str = "10m";

/// What a local etcd needs.
#[derive(Debug, Clone)]
pub struct LocalOptions {
    /// The program. A name without "/" is searched in PATH.
    pub program: PathBuf,
    /// The folder for its data and keys, on a local disk. It is created if it does not exist. etcd follows no link in it.
    pub folder: Beneath,
    /// Where it listens. Port 0: any free port.
    pub listen: SocketAddr,
    /// The name or address at which the others reach it.
    pub host: String,
    /// Time limit for its first answer.
    pub start_timeout: Duration,
}

/// The part that stays the same from one start to the next.
#[derive(Serialize, Deserialize)]
struct Kept {
    host: String,
    port: u16,
    handout: Handout,
    server: Server,
}

/// A local etcd. Dropping this ends it.
#[derive(Debug)]
pub struct Local {
    handout: Handout,
    keeper: Arc<Keeper>,
    thread: Option<JoinHandle<()>>,
}

/// Starts it, again and again.
#[derive(Debug)]
struct Keeper {
    program: PathBuf,
    folder: Beneath,
    /// The same folder as etcd sees it.
    inside: OwnedFd,
    args: Vec<String>,
    state: Mutex<State>,
    over: Condvar,
}

#[derive(Debug, Default)]
struct State {
    child: Option<Arc<Child>>,
    over: bool,
    since: Option<Instant>,
    /// Why it last ended.
    trouble: Option<String>,
}

impl Local {
    /// Starts etcd, and waits until it answers.
    ///
    /// # Errors
    /// If it cannot be started, or does not answer in time. Contains the reason that etcd gives.
    pub fn start(options: &LocalOptions) -> Result<Local> {
        let folder = &options.folder;
        let failed = |what: &str, error: std::io::Error| {
            Error::Local(format!("cannot {what} for the local etcd, {}: {error}", folder.display()))
        };
        let program = find(&options.program)?;
        // The folder may be older, and open to other users: its mode is changed then.
        folder.make_dir_unless_there(0o700).map_err(|error| failed("make the folder", error))?;
        let inside = inside(folder).map_err(|error| failed("open the folder", error))?;
        let kept = keys(options).map_err(|error| match error {
            Keys::Ours(error) => error,
            Keys::File(error) => failed("write the keys", error),
        })?;
        let keeper = Arc::new(Keeper {
            program,
            folder: folder.clone(),
            inside,
            args: args(options.listen.ip(), &kept),
            state: Mutex::default(),
            over: Condvar::new(),
        });
        let child = keeper.spawn()?;
        let thread = std::thread::Builder::new().name("etcd-local".into()).spawn({
            let keeper = Arc::clone(&keeper);
            move || keeper.keep(child)
        });
        let thread = match thread {
            Ok(thread) => Some(thread),
            Err(error) => {
                keeper.end();
                return Err(Error::Thread(error));
            }
        };
        let local = Local { handout: kept.handout, keeper, thread };
        local.wait(options.start_timeout)?;
        Ok(local)
    }

    /// The file with which the others reach it.
    #[must_use]
    pub fn handout(&self) -> &Handout {
        &self.handout
    }

    /// Why it ended, until it has run again for some time.
    #[must_use]
    pub fn trouble(&self) -> Option<String> {
        let state = self.keeper.lock();
        let runs = state.child.is_some() && state.since.is_some_and(|since| since.elapsed() > STEADY);
        if runs { None } else { state.trouble.clone() }
    }

    /// Its process, while it runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.keeper.lock().child.as_ref().map(|child| child.pid())
    }

    fn wait(&self, limit: Duration) -> Result<()> {
        let end = Instant::now() + limit;
        let mut options = self.handout.options("/");
        (options.dial_timeout, options.request_timeout) = (Duration::from_millis(500), Duration::from_secs(1));
        loop {
            let error = match Client::connect(&options) {
                Ok(_) => return Ok(()),
                Err(error) => error,
            };
            if let Some(trouble) = self.trouble() {
                return Err(Error::Local(trouble));
            }
            if Instant::now() >= end {
                return Err(Error::Local(format!("the local etcd does not answer within {limit:?}: {error}")));
            }
        }
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.keeper.end();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Keeper {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self) -> Beneath {
        self.folder.join("etcd.log")
    }

    /// Starts it.
    fn spawn(&self) -> Result<Arc<Child>> {
        let failed = |error: &dyn std::fmt::Display| {
            Error::Local(format!("cannot start the local etcd, {}: {error}", self.program.display()))
        };
        // Each start has its own log, or the log would grow for ever.
        let log = match self.log().remove_file() {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => self.log().create_new(0o600),
        };
        let log: OwnedFd = log.map_err(|error| failed(&error))?.into();
        let copy = log.try_clone().map_err(|error| failed(&error))?;
        let spawn = Spawn::new(&self.program, &self.args).and_then(|spawn| {
            // etcd also reads settings from ETCD_... variables. A session of its own: Ctrl-C is for the supervisor.
            let spawn =
                spawn.environment::<&str, &str>([])?.directory(&own(&self.inside))?.session().no_new_privileges();
            let null = Open { fd: 0, path: c"/dev/null".into(), flags: libc::O_RDONLY, expect: None };
            Ok(spawn.open(null).fd(copy, 1).fd(log, 2).umask(0o077).dies_with_us())
        });
        let spawn = spawn.map_err(|error| failed(&error))?;
        let mut state = self.lock();
        if state.over {
            return Err(failed(&"it is being stopped"));
        }
        let child = Arc::new(spawn.start().map_err(|error| failed(&error))?);
        (state.child, state.since) = (Some(Arc::clone(&child)), Some(Instant::now()));
        Ok(child)
    }

    /// Starts it again whenever it ends.
    fn keep(&self, first: Arc<Child>) {
        let (mut child, mut pause) = (Some(first), PAUSE.0);
        loop {
            if let Some(child) = child.take() {
                let since = Instant::now();
                let ended = child.wait_for_end();
                let mut state = self.lock();
                state.child = None;
                // Reaped with the lock held, so that no signal goes to its pid afterwards.
                let how =
                    ended.and_then(|()| child.wait()).map_or_else(|error| error.to_string(), |ended| ended.to_string());
                if state.over {
                    return;
                }
                if since.elapsed() > STEADY {
                    pause = PAUSE.0;
                }
                let said = said(&self.log());
                let trouble = format!(
                    "the local etcd has ended ({how}{said}). See {}; without the folder {} it starts without data",
                    self.log().display(),
                    self.folder.join("data").display()
                );
                tracing::warn!("{trouble}; it is started again in {pause:?}");
                state.trouble = Some(trouble);
            }
            let state = self.lock();
            let waited = self.over.wait_timeout_while(state, pause, |state| !state.over);
            if waited.unwrap_or_else(PoisonError::into_inner).0.over {
                return;
            }
            pause = (pause * 2).min(PAUSE.1);
            match self.spawn() {
                Ok(started) => child = Some(started),
                Err(error) => self.lock().trouble = Some(error.to_string()),
            }
        }
    }

    fn end(&self) {
        let child = {
            let mut state = self.lock();
            state.over = true;
            state.child.clone()
        };
        self.over.notify_all();
        let Some(child) = child else { return };
        let _ = child.signal(libc::SIGTERM);
        let end = Instant::now() + END;
        while Instant::now() < end && self.lock().child.is_some() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let state = self.lock();
        if let Some(child) = &state.child {
            let _ = child.signal(libc::SIGKILL);
        }
    }
}

/// Why the keys could not be made.
enum Keys {
    Ours(Error),
    File(std::io::Error),
}

/// The earlier keys if they are for this address, else new ones.
fn keys(options: &LocalOptions) -> std::result::Result<Kept, Keys> {
    let path = options.folder.join("keys.json");
    let kept = path.content(MAX_KEYS).ok().and_then(|text| serde_json::from_slice::<Kept>(&text).ok());
    let fits = |kept: &Kept| {
        let port = options.listen.port();
        kept.host == options.host && (port == 0 && free(options.listen.ip(), kept.port).is_ok() || port == kept.port)
    };
    let kept = match kept.filter(fits) {
        Some(kept) => kept,
        None => {
            let port = match options.listen.port() {
                0 => free(options.listen.ip(), 0).map_err(Keys::File)?,
                port => port,
            };
            let host = &options.host;
            let shown = if host.parse::<std::net::Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.clone() };
            let (handout, server) = Handout::new(format!("https://{shown}:{port}"), host).map_err(Keys::Ours)?;
            let kept = Kept { host: host.clone(), port, handout, server };
            let text = serde_json::to_vec(&kept).map_err(|error| Keys::File(error.into()))?;
            write_file(&path, &text, 0o600).map_err(Keys::File)?;
            kept
        }
    };
    let files =
        [("ca.crt", kept.handout.ca()), ("server.crt", &kept.server.certificate), ("server.key", &kept.server.key)];
    for (name, text) in files {
        let path = options.folder.join(name);
        let _ = path.remove_file();
        path.create_new(0o600).and_then(|mut file| file.write_all(text.as_bytes())).map_err(Keys::File)?;
    }
    Ok(kept)
}

/// The folder as etcd gets it: others may change what is in it (it is in the job's store), and etcd opens its files by
/// name. Before Linux 5.12, or without the right to make mounts, it gets the folder itself.
fn inside(folder: &Beneath) -> std::io::Result<OwnedFd> {
    let folder = folder.folder()?;
    match shielded(&folder) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM | libc::EINVAL)) => Ok(folder),
        mount => mount,
    }
}

/// The path of a descriptor of ours, in this process and a child before it executes a program.
fn own(fd: &OwnedFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// A free port: this one, or any if it is 0.
fn free(ip: IpAddr, port: u16) -> std::io::Result<u16> {
    Ok(TcpListener::bind((ip, port))?.local_addr()?.port())
}

fn args(ip: IpAddr, kept: &Kept) -> Vec<String> {
    let listen = format!("https://{}", SocketAddr::new(ip, kept.port));
    let advertised = kept.handout.endpoints.concat();
    let random = std::fs::read_to_string("/proc/sys/kernel/random/uuid").map(|text| text.trim().to_owned());
    // A socket in its folder, which other users cannot enter.
    let peer = "unix://peer:0";
    let args = [
        ("name", "rekindle"),
        ("data-dir", "data"),
        ("listen-client-urls", &listen),
        ("advertise-client-urls", &advertised),
        ("listen-peer-urls", peer),
        ("initial-advertise-peer-urls", peer),
        ("initial-cluster", &format!("rekindle={peer}")),
        // Without the earlier data this is a new cluster: its revisions start again, and clients must not take it for
        // the old one.
        ("initial-cluster-token", &random.unwrap_or_default()),
        ("client-cert-auth", "true"),
        ("trusted-ca-file", "ca.crt"),
        ("cert-file", "server.crt"),
        ("key-file", "server.key"),
        ("enable-grpc-gateway", "false"),
        ("quota-backend-bytes", &QUOTA.to_string()),
        ("auto-compaction-mode", "periodic"),
        ("auto-compaction-retention", HISTORY),
        ("snapshot-count", "10000"),
        ("logger", "zap"),
        ("log-level", "warn"),
    ];
    args.iter().map(|(name, value)| format!("--{name}={value}")).collect()
}

fn find(program: &Path) -> Result<PathBuf> {
    let missing = || {
        let name = program.display();
        Error::Local(format!(
            "cannot find {name} for the local etcd. Install it (package etcd-server), or set the addresses of a running etcd"
        ))
    };
    if program.components().count() > 1 {
        return if program.is_file() { Ok(program.to_owned()) } else { Err(missing()) };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut all = std::env::split_paths(&path).map(|folder| folder.join(program));
    all.find(|path| path.is_file()).ok_or_else(missing)
}

/// The reason in the last lines of its log.
fn said(log: &Beneath) -> String {
    let mut text = Vec::new();
    // Each start has its own log, which is short; its end would not be read otherwise.
    let _ = log.read().and_then(|log| log.take(MAX_LOG).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let parsed = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).ok()?;
        let level = line.get("level")?.as_str()?;
        ["error", "fatal", "panic"].contains(&level).then_some(())?;
        let part = |name: &str| line.get(name).and_then(serde_json::Value::as_str).map(str::to_owned);
        Some([part("msg"), part("error")].into_iter().flatten().collect::<Vec<_>>().join(": "))
    };
    let reason = text.lines().rev().find_map(parsed);
    let reason = reason.or_else(|| text.lines().rev().find(|line| !line.trim().is_empty()).map(str::to_owned));
    reason.map_or_else(String::new, |reason| format!(", \"{}\"", reason.trim()))
}

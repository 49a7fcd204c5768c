//! A fake of the metadata services of clouds, on loopback. For tests only: it knows of the services what rekindle uses.
//!
//! A path answers what a test sets, whatever the query. As the real ones do, it wants a token below
//! `/latest/meta-data/` (AWS, version 2) and waits with `wait_for_change` until a value changes (Google).

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What a path answers.
#[derive(Debug, Clone)]
pub enum Answer {
    /// 200 with this body.
    Body(String),
    /// These bytes as they are, with the head.
    Raw(Vec<u8>),
    /// Nothing, and the connection stays open.
    Silence,
    /// A byte of the body every so often, without an end.
    Trickle(Duration),
}

/// The fake.
#[derive(Debug)]
pub struct Metadata {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The answers, each with its version.
    answers: BTreeMap<String, (Answer, u64)>,
    changes: u64,
    /// The token that is valid.
    token: u32,
    requests: Vec<String>,
}

impl Metadata {
    /// Starts it. Its threads end with the process.
    ///
    /// # Panics
    /// When there is no port.
    #[must_use]
    #[allow(clippy::unwrap_used, reason = "of tests: a panic is the report")]
    pub fn start() -> Metadata {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, shared) = (listener.local_addr().unwrap(), Arc::<Shared>::default());
        let its = Arc::clone(&shared);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = Arc::clone(&its);
                std::thread::spawn(move || drop(shared.serve(&stream)));
            }
        });
        Metadata { address, shared }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on the path answers so; without an answer, 404.
    pub fn set(&self, path: &str, answer: Option<Answer>) {
        let mut state = self.shared.state();
        state.changes += 1;
        let version = state.changes;
        match answer {
            Some(answer) => drop(state.answers.insert(path.into(), (answer, version))),
            None => drop(state.answers.remove(path)),
        }
        self.shared.changed.notify_all();
    }

    /// From now on the path answers 200 with this body.
    pub fn says(&self, path: &str, body: &str) {
        self.set(path, Some(Answer::Body(body.into())));
    }

    /// Tokens that were given are no longer valid.
    pub fn expire_tokens(&self) {
        self.shared.state().token += 1;
    }

    /// The requests so far: method, path and query, and the body after a blank.
    #[must_use]
    pub fn requests(&self) -> Vec<String> {
        self.shared.state().requests.clone()
    }

    /// How many requests began so.
    #[must_use]
    pub fn count(&self, beginning: &str) -> usize {
        self.requests().iter().filter(|request| request.starts_with(beginning)).count()
    }
}

/// The head of a request.
struct Head {
    method: String,
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
}

impl Head {
    fn read(reader: &mut impl BufRead) -> std::io::Result<Head> {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let mut words = line.split_whitespace().map(str::to_owned);
        let (method, target) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        let mut head = Head { method, path: path.into(), query: query.into(), headers: BTreeMap::new() };
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
                return Ok(head);
            }
            if let Some((name, value)) = line.split_once(':') {
                head.headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
            }
        }
    }

    fn parameter(&self, name: &str) -> Option<&str> {
        self.query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value)
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(&self, mut stream: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream);
        let head = Head::read(&mut reader)?;
        let length = head.headers.get("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
        let mut body = vec![0; length];
        reader.read_exact(&mut body)?;
        let query = if head.query.is_empty() { String::new() } else { format!("?{}", head.query) };
        let text = format!("{} {}{query} {}", head.method, head.path, String::from_utf8_lossy(&body));
        self.state().requests.push(text.trim_end().to_owned());
        match self.answer(&head) {
            (Answer::Raw(bytes), _) => stream.write_all(&bytes),
            (Answer::Body(body), version) => stream.write_all(&whole("200 OK", version, &body)),
            (Answer::Silence, _) => loop {
                std::thread::sleep(Duration::from_secs(60));
            },
            (Answer::Trickle(pause), _) => {
                stream.write_all(b"HTTP/1.1 200 OK\r\nmetadata-flavor: Google\r\n\r\n")?;
                loop {
                    stream.write_all(b"x")?;
                    std::thread::sleep(pause);
                }
            }
        }
    }

    fn answer(&self, head: &Head) -> (Answer, u64) {
        let status = |status: &str| (Answer::Raw(whole(status, 0, "")), 0);
        let mut state = self.state();
        if head.method == "PUT" && head.path == "/latest/api/token" && !state.answers.contains_key(&head.path) {
            return (Answer::Body(format!("token-{}", state.token)), 0);
        }
        if head.path.starts_with("/latest/meta-data/")
            && head.headers.get("x-aws-ec2-metadata-token") != Some(&format!("token-{}", state.token))
        {
            return status("401 Unauthorized");
        }
        let google = head.path.starts_with("/computeMetadata/");
        if (google && head.headers.get("metadata-flavor").map(String::as_str) != Some("Google"))
            || (head.path.starts_with("/metadata/") && head.headers.get("metadata").map(String::as_str) != Some("true"))
        {
            return status("403 Forbidden");
        }
        if google && head.parameter("wait_for_change") == Some("true") {
            let seconds = head.parameter("timeout_sec").and_then(|text| text.parse().ok()).unwrap_or(60);
            let until = Instant::now() + Duration::from_secs(seconds);
            let same = |state: &State| {
                let version = state.answers.get(&head.path).map(|(_, version)| version.to_string());
                version.as_deref() == head.parameter("last_etag")
            };
            while same(&state) && Instant::now() < until {
                let left = until.saturating_duration_since(Instant::now());
                state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            }
        }
        state.answers.get(&head.path).cloned().unwrap_or_else(|| status("404 Not Found"))
    }
}

/// An answer with its head.
fn whole(status: &str, version: u64, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\nmetadata-flavor: Google\r\netag: {version}\r\ncontent-length: {length}\r\n\
        connection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

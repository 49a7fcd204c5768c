//! Failures, sent to an address as JSON.
//!
//! A separate thread sends them one after the other; it is started with the first failure. Only the status of an answer
//! is read, redirections are not followed, and messages contain only the host of the address.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reqwest::StatusCode;

use super::{Report, Reporter};
use crate::config::WebhookUrl;
use rekindle_base::chain;

/// How long one attempt may take.
const REQUEST: Duration = Duration::from_secs(10);
/// Pauses between attempts: it is given up after some eight minutes.
const PAUSES: [Duration; 5] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(30),
    Duration::from_secs(120),
    Duration::from_secs(300),
];
/// The pause when the run is over.
const LAST_PAUSE: Duration = Duration::from_millis(500);
/// How often the end of a run looks whether it must hurry.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum queue: a job that dies again and again is one piece of news.
const MOST: usize = 16;

/// Sends failures.
#[derive(Debug, Clone)]
pub(crate) struct Webhook(Arc<Shared>);

struct Shared {
    url: WebhookUrl,
    reporter: Reporter,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Webhook").field("url", &self.url).finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    has_thread: bool,
    busy: bool,
    /// Set when the run is ending: the time limit.
    closing: Option<Instant>,
}

impl Webhook {
    /// No thread is started yet.
    #[must_use]
    pub(crate) fn new(url: WebhookUrl, reporter: Reporter) -> Webhook {
        Webhook(Arc::new(Shared { url, reporter, queue: Mutex::default(), changed: Condvar::new() }))
    }

    /// Queues a document.
    pub(crate) fn send(&self, document: Vec<u8>) {
        let mut queue = self.0.queue();
        if queue.waiting.len() >= MOST {
            // The newest documents are more useful.
            queue.waiting.pop_front();
            drop(queue);
            self.0.report(format!("dropped a failure: {MOST} others are waiting"));
            queue = self.0.queue();
        }
        if !queue.has_thread {
            let shared = Arc::clone(&self.0);
            let started = std::thread::Builder::new().name("webhook".into()).spawn(move || shared.work());
            if let Err(error) = started {
                drop(queue);
                return self.0.report(format!("cannot start a thread: {error}"));
            }
            queue.has_thread = true;
        }
        queue.waiting.push_back(document);
        self.0.changed.notify_all();
    }

    /// Waits for the queued documents, at most until then, and no longer when the end `hurries`.
    pub(crate) fn close(&self, until: Instant, hurries: &dyn Fn() -> bool) {
        let mut queue = self.0.queue();
        queue.closing = Some(until);
        self.0.changed.notify_all();
        while queue.has_thread && (queue.busy || !queue.waiting.is_empty()) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || hurries() {
                break;
            }
            queue = self.0.changed.wait_timeout(queue, left.min(LOOK)).unwrap_or_else(PoisonError::into_inner).0;
        }
        if !queue.waiting.is_empty() || queue.busy {
            drop(queue);
            self.0.report("not all failures were sent before the end".into());
        }
    }
}

/// Why an attempt failed.
struct Refusal {
    why: String,
    /// Whether another attempt may succeed.
    passes: bool,
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, why: String) {
        (self.reporter)(Report { hook: "webhook", why: format!("{}: {why}", self.url.host()) });
    }

    /// The thread; it ends with the process.
    fn work(&self) {
        let mut queue = self.queue();
        loop {
            let Some(document) = queue.waiting.pop_front() else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            queue.busy = true;
            drop(queue);
            self.deliver(&document);
            queue = self.queue();
            queue.busy = false;
            self.changed.notify_all();
        }
    }

    fn deliver(&self, document: &[u8]) {
        let mut pauses = PAUSES.iter();
        loop {
            let Err(refusal) = self.attempt(document) else { return };
            let Some(pause) = pauses.next().filter(|_| refusal.passes) else {
                return self.report(refusal.why);
            };
            tracing::debug!("webhook: {}. Trying again in {pause:?}", refusal.why);
            if !self.pause(*pause) {
                return self.report(refusal.why);
            }
        }
    }

    /// Waits; returns whether there is time for another attempt.
    fn pause(&self, pause: Duration) -> bool {
        let began = Instant::now();
        let mut queue = self.queue();
        loop {
            let until = began + if queue.closing.is_some() { pause.min(LAST_PAUSE) } else { pause };
            if queue.closing.is_some_and(|closing| closing <= until) {
                return false;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn attempt(&self, document: &[u8]) -> Result<(), Refusal> {
        // The provider for HTTPS; a second call fails because there is one, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let unusable = |why: String| Refusal { why, passes: false };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| unusable(format!("cannot start its runtime: {error}")))?;
        let client = reqwest::Client::builder()
            .timeout(REQUEST)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("rekindle/", env!("CARGO_PKG_VERSION")))
            .build();
        // The address must not appear in a message.
        let client = client.map_err(|error| unusable(chain(&error.without_url())))?;
        let request = client.post(self.url.secret()).header("content-type", "application/json").body(document.to_vec());
        // Created inside the runtime, because its timer starts at once.
        let answered = runtime.block_on(async { request.send().await });
        let status = answered.map_err(|error| Refusal { why: chain(&error.without_url()), passes: true })?.status();
        if status.is_success() {
            return Ok(());
        }
        let passes =
            status.is_server_error() || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
        Err(Refusal { why: format!("it answered {status}"), passes })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::mpsc;

    use super::*;

    /// Answers requests with these lines, one after the other; an empty one closes the connection. Passes on the
    /// requests.
    fn server(answers: Vec<&'static str>) -> (u16, mpsc::Receiver<String>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, requests) = mpsc::channel();
        std::thread::spawn(move || {
            for answer in answers {
                let (stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(&stream);
                let (mut head, mut length) = (String::new(), 0);
                loop {
                    let mut line = String::new();
                    reader.read_line(&mut line).unwrap();
                    if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap();
                    }
                    if line.trim().is_empty() {
                        break;
                    }
                    head += &line;
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                sender.send(format!("{head}\n{}", String::from_utf8(body).unwrap())).unwrap();
                if !answer.is_empty() {
                    let text = format!("HTTP/1.1 {answer}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
                    (&stream).write_all(text.as_bytes()).unwrap();
                }
            }
        });
        (port, requests)
    }

    fn webhook(port: u16) -> (Webhook, mpsc::Receiver<Report>) {
        let (sender, reports) = mpsc::channel();
        let sender = Mutex::new(sender);
        let reporter: Reporter = Arc::new(move |report| drop(sender.lock().unwrap().send(report)));
        (Webhook::new(format!("http://127.0.0.1:{port}/T0/hunter2").parse().unwrap(), reporter), reports)
    }

    const LIMIT: Duration = Duration::from_secs(20);
    const NEVER: &dyn Fn() -> bool = &|| false;

    #[test]
    fn it_is_sent_again_until_it_is_taken() {
        let (port, requests) = server(vec!["503 Busy", "", "200 OK", "204 No Content"]);
        let (webhook, reports) = webhook(port);
        webhook.send(b"{\"n\":1}".to_vec());
        webhook.send(b"{\"n\":2}".to_vec());
        // The pauses are short now.
        webhook.close(Instant::now() + LIMIT, NEVER);
        let bodies: Vec<String> = requests.try_iter().collect();
        let ends: Vec<&str> = bodies.iter().filter_map(|request| request.lines().last()).collect();
        assert_eq!(ends, ["{\"n\":1}", "{\"n\":1}", "{\"n\":1}", "{\"n\":2}"]);
        assert!(bodies[0].starts_with("POST /T0/hunter2 HTTP/1.1") && bodies[0].contains("application/json"));
        assert!(reports.try_recv().is_err());
    }

    #[test]
    fn what_is_refused_is_said_without_the_address() {
        for (answer, said) in [("404 Not Found", "404"), ("302 Found", "302")] {
            let (port, _requests) = server(vec![answer]);
            let (webhook, reports) = webhook(port);
            webhook.send(b"{}".to_vec());
            let why = reports.recv_timeout(LIMIT).unwrap().why;
            assert!(why.starts_with(&format!("127.0.0.1:{port}: it answered {said}")), "{why}");
        }
        // Nobody listens at this port any more.
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (webhook, reports) = webhook(port);
        webhook.send(b"{}".to_vec());
        webhook.close(Instant::now() + Duration::from_millis(700), NEVER);
        let why = reports.recv_timeout(LIMIT).unwrap().why;
        assert!(!why.contains("hunter2"), "{why}");
    }

    #[test]
    fn one_that_never_answers_is_not_waited_for() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (webhook, reports) = webhook(listener.local_addr().unwrap().port());
        (0..MOST + 2).for_each(|_| webhook.send(b"{}".to_vec()));
        let began = Instant::now();
        webhook.close(began + Duration::from_millis(300), NEVER);
        webhook.close(began + LIMIT, &|| true);
        assert!(began.elapsed() < LIMIT);
        let said: Vec<String> = reports.try_iter().map(|report| report.why).collect();
        assert!(said.iter().any(|why| why.contains("dropped")) && said.iter().any(|why| why.contains("not all")));
    }
}

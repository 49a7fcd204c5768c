//! `GET /metrics` over HTTP/1.1, for Prometheus.
//!
//! Clients may be slow or hostile, so the number of clients, the time for each and the bytes of a request are limited,
//! and only the first line of a request is parsed. This is little code; tiny_http 0.12 does not limit the time or the
//! length of a head. Each client takes a thread while it is served; one more thread waits for clients.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Makes the text.
pub(crate) type Render = Arc<dyn Fn() -> String + Send + Sync>;

/// Maximum number of clients at a time. Prometheus is one.
const MOST: usize = 8;
/// Time limit from connecting to the end of the head, and for the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum bytes of a head. Prometheus sends some 300.
const HEAD: usize = 8 << 10;
/// Pause when no descriptors are left: some may be free soon.
const PAUSE: Duration = Duration::from_secs(1);
/// The content type, <https://prometheus.io/docs/specs/om/open_metrics_spec/>.
const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Serves until the process ends. Returns the address, because with port 0 the kernel chooses one.
///
/// # Errors
/// When the address cannot be used.
pub(crate) fn start(address: SocketAddr, render: Render) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address)?;
    let address = listener.local_addr()?;
    std::thread::Builder::new().name("metrics".into()).spawn(move || accept(&listener, &render))?;
    Ok(address)
}

fn accept(listener: &TcpListener, render: &Render) {
    let served = Arc::new(AtomicUsize::new(0));
    for stream in listener.incoming() {
        let Ok(stream) = stream else {
            std::thread::sleep(PAUSE);
            continue;
        };
        // If there are too many clients, the connection is closed.
        if served.fetch_add(1, Ordering::Relaxed) >= MOST {
            served.fetch_sub(1, Ordering::Relaxed);
            continue;
        }
        let (render, place) = (Arc::clone(render), Place(Arc::clone(&served)));
        let serve = move || {
            let _place = place;
            // It does not matter why a client is gone.
            let _ = answer(&stream, &render);
        };
        // If the thread cannot be started, the connection is closed.
        let _ = std::thread::Builder::new().name("scrape".into()).spawn(serve);
    }
}

/// A client's place, which is freed when this is dropped.
struct Place(Arc<AtomicUsize>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

fn answer(mut stream: &TcpStream, render: &Render) -> io::Result<()> {
    let head = head(stream)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    let (status, body) = match first_line(&head) {
        Some(("GET" | "HEAD", "/metrics")) => ("200 OK", render()),
        Some(("GET" | "HEAD", _)) => ("404 Not Found", "the metrics are at /metrics\n".into()),
        Some(_) => ("405 Method Not Allowed", "only GET is supported\n".into()),
        None => ("400 Bad Request", "not an HTTP request\n".into()),
    };
    let kind = if status.starts_with("200") { TYPE } else { "text/plain; charset=utf-8" };
    let mut text = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    if !head.starts_with(b"HEAD") {
        text += &body;
    }
    stream.write_all(text.as_bytes())?;
    stream.shutdown(std::net::Shutdown::Write)
}

/// Reads up to the empty line, or to the limit.
fn head(mut stream: &TcpStream) -> io::Result<Vec<u8>> {
    let until = Instant::now() + PATIENCE;
    let mut head = Vec::new();
    let mut buffer = [0; 1024];
    while head.len() < HEAD && !head.windows(4).any(|end| end == b"\r\n\r\n") {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => head.extend(buffer.get(..read).unwrap_or_default()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(head)
}

/// Method and path, without the query.
fn first_line(head: &[u8]) -> Option<(&str, &str)> {
    let line = std::str::from_utf8(head.split(|byte| *byte == b'\r').next()?).ok()?;
    let mut words = line.split(' ');
    let (method, target, version) = (words.next()?, words.next()?, words.next()?);
    let path = target.split('?').next().unwrap_or_default();
    (version.starts_with("HTTP/1.") && words.next().is_none()).then_some((method, path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> SocketAddr {
        start("127.0.0.1:0".parse().unwrap(), Arc::new(|| "rekindle_x 1\n# EOF\n".into())).unwrap()
    }

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE * 4)).unwrap();
        // The server may have closed the connection.
        let _ = stream.write_all(request.as_bytes());
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn it_answers_what_is_asked() {
        let address = server();
        let text = ask(address, "GET /metrics?x=1 HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(text.starts_with("HTTP/1.1 200 OK\r\n") && text.ends_with("\r\n\r\nrekindle_x 1\n# EOF\n"), "{text}");
        let text = ask(address, "HEAD /metrics HTTP/1.0\r\n\r\n");
        assert!(text.contains("content-length: 19\r\n") && text.ends_with("\r\n\r\n"), "{text}");
        for (request, status) in [
            ("GET / HTTP/1.1\r\n\r\n", "404"),
            ("POST /metrics HTTP/1.1\r\n\r\n", "405"),
            ("\r\n\r\n", "400"),
            ("GET /metrics\r\n\r\n", "400"),
            ("\u{fffd} /metrics HTTP/1.1 x\r\n\r\n", "400"),
        ] {
            assert!(ask(address, request).starts_with(&format!("HTTP/1.1 {status} ")), "{request}");
        }
        let endless = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(2 * HEAD));
        assert!(ask(address, &endless).len() < 200);
    }

    #[test]
    fn clients_that_say_nothing_are_hung_up_on_and_hold_nobody_up() {
        let address = server();
        let silent: Vec<TcpStream> = (0..100).map(|_| TcpStream::connect(address).unwrap()).collect();
        let began = Instant::now();
        // They take all places, until their time is over.
        while !ask(address, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 200") {
            assert!(began.elapsed() < PATIENCE * 4);
            std::thread::sleep(Duration::from_millis(50));
        }
        drop(silent);
    }
}

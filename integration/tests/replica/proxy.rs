//! Between client and server: passes requests on, one a connection, and does what networks and servers do at times.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What happens to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// It is passed on.
    None,
    /// The connection ends after so many bytes of its body.
    CutRequest(usize),
    /// It is passed on; of the answer's body so many bytes come, and then the connection ends.
    CutAnswer(usize),
    /// It is not passed on; the answer is this.
    Answer(u16, &'static str),
    /// It is passed on, and the answer has other bytes in its body, as many.
    Garbage,
    /// It is passed on, at about so many bytes a second.
    Slow(usize),
}

/// Selects requests, the fault that they get, and the maximum number of times.
type Rule = (Box<dyn Fn(&str) -> bool + Send>, Fault, usize);

#[derive(Default)]
struct Shared {
    rules: Mutex<Vec<Rule>>,
    /// The first lines of all requests.
    seen: Mutex<Vec<String>>,
    stopped: AtomicBool,
}

/// The proxy, which ends with this.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(crate) fn start(server: SocketAddr) -> Proxy {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared::default());
        let accepting = Arc::clone(&shared);
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if accepting.stopped.load(Ordering::Relaxed) {
                    return;
                }
                let shared = Arc::clone(&accepting);
                // An error here means that the connection ended, which some tests cause on purpose.
                thread::spawn(move || drop(serve(&client, server, &shared)));
            }
        });
        Proxy { address, shared }
    }

    /// From now on this happens to the next `times` requests whose first line `matches`.
    pub(crate) fn inject(&self, times: usize, fault: Fault, matches: impl Fn(&str) -> bool + Send + 'static) {
        self.shared.rules.lock().unwrap().push((Box::new(matches), fault, times));
    }

    /// Nothing happens any more.
    pub(crate) fn heal(&self) {
        self.shared.rules.lock().unwrap().clear();
    }

    /// The first lines of all requests since this was asked last.
    pub(crate) fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.shared.seen.lock().unwrap())
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
        // Wakes the one that accepts.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(client: &TcpStream, server: SocketAddr, shared: &Shared) -> io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    let head = head(&mut reader)?;
    let line = head.first().cloned().unwrap_or_default();
    let fault = {
        shared.seen.lock().unwrap().push(line.clone());
        let mut rules = shared.rules.lock().unwrap();
        let rule = rules.iter_mut().find(|(matches, _, left)| *left > 0 && matches(&line));
        rule.map_or(Fault::None, |(_, fault, left)| {
            *left -= 1;
            *fault
        })
    };
    let mut client = client;
    let mut body = vec![0; content_length(&head)];
    if let Fault::CutRequest(bytes) = fault {
        let bytes = bytes.min(body.len());
        reader.read_exact(&mut body[..bytes])?;
        return client.shutdown(Shutdown::Both);
    }
    reader.read_exact(&mut body)?;
    if let Fault::Answer(status, text) = fault {
        let length = text.len();
        return write!(
            client,
            "HTTP/1.1 {status} Injected\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{text}"
        );
    }
    let mut upstream = TcpStream::connect(server)?;
    send_head(&mut upstream, &head)?;
    match fault {
        Fault::Slow(rate) => {
            for piece in body.chunks(64 << 10) {
                upstream.write_all(piece)?;
                thread::sleep(Duration::from_secs_f64(piece.len() as f64 / rate as f64));
            }
        }
        _ => upstream.write_all(&body)?,
    }
    let mut upstream = BufReader::new(upstream);
    let answer = self::head(&mut upstream)?;
    send_head(&mut client, &answer)?;
    let mut body = Vec::new();
    upstream.read_to_end(&mut body)?;
    match fault {
        Fault::CutAnswer(bytes) => body.truncate(bytes),
        Fault::Garbage => body.iter_mut().for_each(|byte| *byte ^= 0x55),
        _ => {}
    }
    client.write_all(&body)?;
    client.shutdown(Shutdown::Both)
}

/// The lines up to the empty one.
fn head(reader: &mut impl BufRead) -> io::Result<Vec<String>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let line = line.trim_end().to_owned();
        if line.is_empty() {
            return Ok(lines);
        }
        lines.push(line);
    }
}

/// With the wish that nothing more comes on this connection.
fn send_head(to: &mut impl Write, lines: &[String]) -> io::Result<()> {
    let others = lines.iter().filter(|line| !line.to_ascii_lowercase().starts_with("connection:"));
    let text: String = others.map(|line| format!("{line}\r\n")).collect();
    to.write_all(format!("{text}Connection: close\r\n\r\n").as_bytes())
}

fn content_length(head: &[String]) -> usize {
    let value =
        head.iter().find_map(|line| line.to_ascii_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
    value.unwrap_or(0)
}

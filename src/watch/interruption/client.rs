//! Requests to the metadata service of a cloud: bounded in time and in size, without proxies and redirections.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use reqwest::header::HeaderMap;
use reqwest::{Method, StatusCode};
use tokio::runtime::Runtime;

/// The service of each of the clouds. The address is link-local: it leads no further than the machine's host.
const SERVICE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::new(169, 254, 169, 254)), 80);

/// How long an answer may take that does not wait for anything.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// How long a connection may take.
const CONNECT: Duration = Duration::from_secs(3);

/// The largest answer that is read. The longest known are some KiB: Azure's events of many machines.
const LARGEST: usize = 64 << 10;

/// Why there is no usable answer. No message contains a text from an answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The client cannot be set up.
    #[error("cannot set up the client")]
    Runtime(#[source] std::io::Error),
    /// The request failed.
    #[error("the request failed")]
    Request(#[source] reqwest::Error),
    /// The answer is too large.
    #[error("the answer is larger than {LARGEST} bytes")]
    TooLarge,
    /// It has an unexpected status.
    #[error("it answered {0}")]
    Status(StatusCode),
    /// It is not what the service is documented to answer.
    #[error("the answer is not understood: {0}")]
    Malformed(&'static str),
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    /// The answer, if its status is 200.
    ///
    /// # Errors
    /// Its status otherwise.
    pub(crate) fn ok(self) -> Result<Answer, Error> {
        if self.status == StatusCode::OK { Ok(self) } else { Err(Error::Status(self.status)) }
    }

    /// A header, if it consists of visible ASCII characters.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// The body as text, without blanks around it.
    ///
    /// # Errors
    /// When it is not UTF-8.
    pub(crate) fn text(&self) -> Result<&str, Error> {
        Ok(std::str::from_utf8(&self.body).map_err(|_| Error::Malformed("it is not text"))?.trim())
    }
}

/// A request.
#[derive(Debug)]
pub(crate) struct Request<'a> {
    pub(crate) method: Method,
    /// Path and query.
    pub(crate) path: &'a str,
    pub(crate) headers: &'a [(&'static str, &'a str)],
    pub(crate) body: Option<String>,
    pub(crate) patience: Duration,
}

impl<'a> Request<'a> {
    /// A GET with the usual time limit.
    #[must_use]
    pub(crate) fn get(path: &'a str, headers: &'a [(&'static str, &'a str)]) -> Request<'a> {
        Request { method: Method::GET, path, headers, body: None, patience: PATIENCE }
    }
}

/// Sends requests, one after the other.
#[derive(Debug)]
pub(crate) struct Client {
    runtime: Runtime,
    http: reqwest::Client,
    address: SocketAddr,
}

impl Client {
    /// A client of the service; of a stand-in if a test of a debug build names one.
    ///
    /// # Errors
    /// When it cannot be set up.
    pub(crate) fn new() -> Result<Client, Error> {
        Client::of(stand_in().unwrap_or(SERVICE))
    }

    /// A client of the service at this address.
    ///
    /// # Errors
    /// When it cannot be set up.
    pub(crate) fn of(address: SocketAddr) -> Result<Client, Error> {
        // The client wants a provider for HTTPS, even though it is not used. A second call fails, which is fine.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Runtime)?;
        let http = reqwest::Client::builder()
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            // No thread serves an idle connection between two requests.
            .pool_max_idle_per_host(0)
            .user_agent(concat!("rekindle/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(Error::Request)?;
        Ok(Client { runtime, http, address })
    }

    /// Sends a request and reads the answer.
    ///
    /// # Errors
    /// When there is no answer in time, or it is too large.
    pub(crate) fn send(&self, request: Request<'_>) -> Result<Answer, Error> {
        let Request { method, path, headers, body, patience } = request;
        let mut ready = self.http.request(method, format!("http://{}{path}", self.address)).timeout(patience);
        for (name, value) in headers {
            ready = ready.header(*name, *value);
        }
        if let Some(body) = body {
            ready = ready.header("content-type", "application/json").body(body);
        }
        // Without the address: its query may contain a text from an answer.
        let failed = |error: reqwest::Error| Error::Request(error.without_url());
        self.runtime.block_on(async {
            let mut response = ready.send().await.map_err(failed)?;
            let (status, headers) = (response.status(), response.headers().clone());
            let mut body = Vec::new();
            while let Some(chunk) = response.chunk().await.map_err(failed)? {
                if body.len() + chunk.len() > LARGEST {
                    return Err(Error::TooLarge);
                }
                body.extend_from_slice(&chunk);
            }
            Ok(Answer { status, headers, body })
        })
    }
}

/// The address that a test of a debug build sets. A release build ignores it.
fn stand_in() -> Option<SocketAddr> {
    let named = cfg!(debug_assertions).then(|| std::env::var("REKINDLE_TEST_METADATA").ok()).flatten();
    named?.parse().ok()
}

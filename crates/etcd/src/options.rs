//! The options of a connection, and the files with its secrets.
//!
//! Certificates, keys and passwords are read for each new connection and each login, and never kept. So the files can
//! be renewed without a restart.

use std::path::PathBuf;
use std::time::Duration;

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity};

use crate::error::{Error, Result, chain};

/// The largest answer that is accepted. The documents of a group are small; this is far above etcd's default limit for
/// one request (1.5 MiB).
pub(crate) const MAX_ANSWER: usize = 256 << 20;

/// Below the prefix: keys of this crate, which callers never see.
const HIDDEN: &str = ".client/";

/// etcd ends connections that ping more often than every 5 s (`--grpc-keepalive-min-time`).
const PING: Duration = Duration::from_secs(10);

/// A secret text, or the file that contains it.
#[derive(Clone, PartialEq, Eq)]
pub enum Secret {
    /// A file.
    File(PathBuf),
    /// The text itself.
    Text(String),
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Secret::File(path) => f.debug_tuple("File").field(path).finish(),
            Secret::Text(_) => f.write_str("Text(..)"),
        }
    }
}

impl Secret {
    /// The text, which must be PEM of this kind.
    fn pem(&self, what: &'static str, kind: &str) -> Result<String> {
        let text = self.read(what)?;
        // Text that is not a certificate causes no error: the connection would just know no authority.
        if text
            .lines()
            .any(|line| line.starts_with("-----BEGIN ") && line.trim_end().ends_with(&format!("{kind}-----")))
        {
            return Ok(text);
        }
        let place = match self {
            Secret::File(path) => format!(", {},", path.display()),
            Secret::Text(_) => String::new(),
        };
        Err(Error::Options(format!(
            "{what}{place} is not PEM: it has no \"-----BEGIN {kind}-----\". Name a file that has it"
        )))
    }

    pub(crate) fn read(&self, what: &'static str) -> Result<String> {
        match self {
            Secret::Text(text) => Ok(text.clone()),
            Secret::File(path) => {
                std::fs::read_to_string(path).map_err(|source| Error::Read { what, path: path.clone(), source })
            }
        }
    }
}

/// How to reach etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Options {
    /// The addresses of the members, such as `https://10.0.0.1:2379`.
    pub endpoints: Vec<String>,
    /// All keys are below it. [`crate::Client::connect`] tries to read it.
    pub prefix: String,
    /// Certificates of authorities, as PEM. Default: those of the system.
    pub ca: Option<Secret>,
    /// The certificate of this client, and its key, as PEM.
    pub identity: Option<(Secret, Secret)>,
    /// A user and its password.
    pub login: Option<(String, Secret)>,
    /// The time limit for making a connection.
    pub dial_timeout: Duration,
    /// The time limit for one request, including all tries.
    pub request_timeout: Duration,
}

impl Options {
    /// Options without certificates and login, and with the usual time limits.
    #[must_use]
    pub fn new(endpoints: impl IntoIterator<Item = impl Into<String>>, prefix: impl Into<String>) -> Options {
        Options {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            prefix: prefix.into(),
            ca: None,
            identity: None,
            login: None,
            dial_timeout: Duration::from_secs(2),
            request_timeout: Duration::from_secs(5),
        }
    }

    /// Checks the options without looking at any file or address.
    pub(crate) fn validate(&self) -> Result<()> {
        if self.endpoints.is_empty() {
            return Err(Error::Options(
                "no etcd address is set. Set at least one, such as https://10.0.0.1:2379".into(),
            ));
        }
        for endpoint in &self.endpoints {
            let rest = endpoint.strip_prefix("https://").or_else(|| endpoint.strip_prefix("http://"));
            let rest = rest.map(|rest| rest.strip_suffix('/').unwrap_or(rest));
            let port = rest.and_then(|rest| rest.rsplit_once(':')).map(|(host, port)| (host, port.parse::<u16>()));
            if !matches!(port, Some((host, Ok(1..))) if !host.is_empty() && !host.contains(['/', '@'])) {
                return Err(Error::Options(format!(
                    "\"{endpoint}\" is not an etcd address. Write it as https://HOST:PORT, or as http://HOST:PORT without TLS"
                )));
            }
            let plain = endpoint.starts_with("http://");
            if plain && (self.ca.is_some() || self.identity.is_some()) {
                return Err(Error::Options(format!(
                    "certificates are set, but {endpoint} does not use TLS. Write https://, or remove the certificates"
                )));
            }
        }
        if !self.prefix.ends_with('/') {
            return Err(Error::Options(format!("the prefix of the keys, \"{}\", must end with \"/\"", self.prefix)));
        }
        if self.dial_timeout.is_zero() || self.request_timeout <= self.dial_timeout {
            return Err(Error::Options(
                "the time limit for a request must be longer than the one for a connection".into(),
            ));
        }
        Ok(())
    }

    /// A key of this crate.
    pub(crate) fn hidden(&self, name: &str) -> String {
        format!("{}{HIDDEN}{name}", self.prefix)
    }

    pub(crate) fn is_hidden(&self, key: &[u8]) -> bool {
        key.strip_prefix(self.prefix.as_bytes()).is_some_and(|name| name.starts_with(HIDDEN.as_bytes()))
    }

    /// The endpoint, with the present content of the certificate files.
    pub(crate) fn endpoint(&self, address: &str) -> Result<Endpoint> {
        let unusable =
            |source: tonic::transport::Error| Error::Options(format!("cannot use {address}: {}", chain(&source)));
        let mut endpoint = Endpoint::from_shared(address.to_owned())
            .map_err(unusable)?
            .connect_timeout(self.dial_timeout)
            .tcp_keepalive(Some(PING))
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(self.request_timeout)
            .keep_alive_while_idle(true);
        if address.starts_with("https://") {
            let mut tls = ClientTlsConfig::new().timeout(self.dial_timeout);
            tls = match &self.ca {
                Some(ca) => tls
                    .ca_certificate(Certificate::from_pem(ca.pem("the certificate of the authority", "CERTIFICATE")?)),
                None => tls.with_native_roots(),
            };
            if let Some((certificate, key)) = &self.identity {
                let (certificate, key) = (
                    certificate.pem("the client's certificate", "CERTIFICATE")?,
                    key.pem("the client's key", "PRIVATE KEY")?,
                );
                tls = tls.identity(Identity::from_pem(certificate, key));
            }
            endpoint = endpoint.tls_config(tls).map_err(|source| {
                Error::Options(format!(
                    "cannot use the certificates for etcd: {}. Check that the files are PEM",
                    chain(&source)
                ))
            })?;
        }
        Ok(endpoint)
    }
}

//! Creates a client from an address and the environment.
//!
//! Each client reads the variables of its provider's own tools, by their prefix: it must not use a variable `TOKEN` of
//! the user's job. Nothing is sent yet.

use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, ObjectStore, RetryConfig};

use crate::environment::Environment;
use crate::error::credentials_help;
use crate::url::{ReplicaUrl, Scheme};

/// Time limit for a request: a part of 8 MiB needs 70 kB/s. A request that takes longer is considered lost.
const REQUEST: Duration = Duration::from_secs(120);
const CONNECT: Duration = Duration::from_secs(5);

/// How long temporary failures (no connection, 5xx, too many requests) are retried within one request. Longer outages
/// end the call; the caller tries again later, and continues from what exists then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Somebody is waiting.
    Little,
    /// Nobody is waiting.
    Much,
}

impl Patience {
    fn retry(self) -> RetryConfig {
        let (max_retries, seconds) = match self {
            Patience::Little => (4, 15),
            Patience::Much => (10, 180),
        };
        let init_backoff = Duration::from_millis(200);
        let backoff = BackoffConfig { init_backoff, max_backoff: Duration::from_secs(15), base: 2.0 };
        RetryConfig { backoff, max_retries, retry_timeout: Duration::from_secs(seconds) }
    }
}

fn client_options() -> ClientOptions {
    ClientOptions::new().with_timeout(REQUEST).with_connect_timeout(CONNECT)
}

/// Passes each variable with the prefix to the builder, if the builder knows it.
macro_rules! with_settings {
    ($builder:expr, $environment:expr, $prefix:literal) => {
        $environment.settings($prefix).fold($builder, |builder, (name, value)| match name.parse() {
            Ok(key) => builder.with_config(key, value),
            Err(_) => builder,
        })
    };
}

/// The client, and the path of all objects.
pub(super) fn connect(
    url: &ReplicaUrl,
    environment: &Environment,
    patience: Patience,
) -> object_store::Result<(Arc<dyn ObjectStore>, Path)> {
    // The TLS provider. A second call fails because one is installed, which is fine.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let path = Path::parse(url.path());
    Ok(match url.scheme() {
        Scheme::S3 => {
            let builder = AmazonS3Builder::new().with_client_options(client_options()).with_retry(patience.retry());
            let builder = with_settings!(builder, environment, "AWS_").with_bucket_name(url.bucket());
            (Arc::new(builder.build()?), path?)
        }
        Scheme::Gs => {
            let builder =
                GoogleCloudStorageBuilder::new().with_client_options(client_options()).with_retry(patience.retry());
            let builder = match environment.get("SERVICE_ACCOUNT") {
                Some(file) => builder.with_service_account_path(file),
                None => builder,
            };
            let builder = with_settings!(builder, environment, "GOOGLE_").with_bucket_name(url.bucket());
            (Arc::new(builder.build()?), path?)
        }
        Scheme::Az => {
            let builder =
                MicrosoftAzureBuilder::new().with_client_options(client_options()).with_retry(patience.retry());
            let builder = with_settings!(builder, environment, "AZURE_").with_container_name(url.bucket());
            (Arc::new(builder.build()?), path?)
        }
        // The folder must exist: one that is not mounted must not look like an empty replica.
        Scheme::File => (Arc::new(LocalFileSystem::new_with_prefix(url.path())?.with_fsync(true)), Path::default()),
    })
}

/// Whether the client for that address reads the variable: credentials and settings for them.
pub fn reads_variable(url: &ReplicaUrl, name: &str) -> bool {
    let key = name.to_ascii_lowercase();
    match url.scheme() {
        Scheme::S3 => name.starts_with("AWS_") && key.parse::<AmazonS3ConfigKey>().is_ok(),
        Scheme::Gs => {
            name == "SERVICE_ACCOUNT" || (name.starts_with("GOOGLE_") && key.parse::<GoogleConfigKey>().is_ok())
        }
        // The client uses the last one by itself, as a header for a machine's identity.
        Scheme::Az => {
            (name.starts_with("AZURE_") && key.parse::<AzureConfigKey>().is_ok()) || name == "IDENTITY_HEADER"
        }
        Scheme::File => false,
    }
}

/// A hint for a failure.
pub(super) fn help(url: &ReplicaUrl) -> String {
    match url.scheme() {
        Scheme::File => format!("{}: create it, or mount what belongs there", credentials_help(Scheme::File)),
        scheme => credentials_help(scheme).to_owned(),
    }
}

//! The metrics of a run: collected from events, and rendered on the threads that serve them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use chrono::Utc;

use super::Setup;
use crate::published::Published;
use crate::telemetry::events::Event;
use crate::telemetry::metrics::textfile::Textfile;
use crate::telemetry::metrics::{Facts, Replicated, serve};

/// The exported metrics and their destinations. If they cannot be exported, the job is still supervised.
pub(super) struct Metrics {
    facts: Arc<Mutex<Facts>>,
    textfile: Option<Textfile>,
    address: Option<SocketAddr>,
}

impl Metrics {
    /// `None` if no metrics are configured.
    pub(super) fn new(setup: &Setup) -> Option<Metrics> {
        let config = &setup.config.metrics;
        if config.textfile.is_none() && config.listen.is_none() {
            return None;
        }
        let replicated = if setup.config.replica.url.is_some() { Replicated::Yes } else { Replicated::No };
        let facts = Arc::new(Mutex::new(Facts::new(setup.folder.name().as_str(), replicated, Instant::now())));
        let shared = Arc::clone(&facts);
        let render: serve::Render = Arc::new(move || {
            let facts = shared.lock().unwrap_or_else(PoisonError::into_inner).clone();
            facts.text(Instant::now(), Utc::now())
        });
        let textfile = config.textfile.clone().map(|path| Textfile::start(path, Arc::clone(&render)));
        let textfile = textfile.transpose().unwrap_or_else(|error| {
            tracing::warn!("cannot write the metrics file: {error}");
            None
        });
        let address = config.listen.map(|address| (address, serve::start(address, render)));
        let address = address.and_then(|(wanted, listening)| match listening {
            Ok(address) => Some(address),
            Err(error) => {
                tracing::warn!("cannot serve metrics at {wanted} (metrics.listen): {error}");
                None
            }
        });
        Some(Metrics { facts, textfile, address })
    }

    /// The address where they are served.
    pub(super) fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    fn learn(&self, learn: impl FnOnce(&mut Facts)) {
        learn(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
        self.textfile.iter().for_each(Textfile::news);
    }

    /// Updates the metrics from the published state and the present interval.
    pub(super) fn see(&self, published: &Published, interval: Option<Duration>) {
        self.learn(|facts| facts.see(published, interval));
    }

    pub(super) fn hear(&self, event: &Event) {
        self.learn(|facts| facts.hear(event, Instant::now()));
    }

    /// Records in the file how the run ended.
    pub(super) fn close(&self) {
        self.textfile.iter().for_each(Textfile::close);
    }
}

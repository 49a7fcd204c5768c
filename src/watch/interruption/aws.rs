//! Amazon EC2: the instance metadata service, version 2 (IMDSv2).
//!
//! Every request needs a token from a PUT request, which a proxy would not pass on. `spot/instance-action`
//! exists from two minutes before a spot machine is stopped or terminated (a hibernation: from its beginning);
//! `events/recommendations/rebalance` exists as soon as that is likely. Both are 404 otherwise.

use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::{Method, StatusCode};
use serde::Deserialize;

use super::client::{Answer, Client, Error, Request};
use super::{Source, client};
use rekindle_base::notice::{Cloud, Kind, Notice};

const TOKEN: &str = "/latest/api/token";
const ACTION: &str = "/latest/meta-data/spot/instance-action";
const REBALANCE: &str = "/latest/meta-data/events/recommendations/rebalance";
/// How long a token is valid, in seconds: six hours, the most that is allowed.
const TTL: &str = "21600";
/// The longest token that is sent back; they have 56 characters.
const LONGEST_TOKEN: usize = 1024;

/// Reads the notices of a machine of EC2.
#[derive(Debug, Default)]
pub(crate) struct Aws {
    token: Option<String>,
    /// The recommendation that was read last.
    likely: Option<Notice>,
}

impl Aws {
    fn token(&mut self, client: &Client) -> Result<String, Error> {
        if let Some(token) = &self.token {
            return Ok(token.clone());
        }
        let answer = client.send(Request {
            method: Method::PUT,
            path: TOKEN,
            headers: &[("x-aws-ec2-metadata-token-ttl-seconds", TTL)],
            body: None,
            patience: client::PATIENCE,
        })?;
        let answer = answer.ok()?;
        let token = answer.text()?;
        if token.is_empty() || token.len() > LONGEST_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::Malformed("it is not a token"));
        }
        self.token = Some(token.to_owned());
        Ok(token.to_owned())
    }

    /// The content at this path; `None` if there is none.
    fn read(&mut self, client: &Client, path: &str) -> Result<Option<Answer>, Error> {
        let once = |token: &str| client.send(Request::get(path, &[("x-aws-ec2-metadata-token", token)]));
        let mut answer = once(&self.token(client)?)?;
        if answer.status == StatusCode::UNAUTHORIZED {
            // It has expired: the machine may have slept.
            self.token = None;
            answer = once(&self.token(client)?)?;
        }
        if answer.status == StatusCode::NOT_FOUND {
            return Ok(None);
        }
        answer.ok().map(Some)
    }
}

impl Source for Aws {
    fn cloud(&self) -> Cloud {
        Cloud::Aws
    }

    fn ask(&mut self, client: &Client) -> Result<Vec<Notice>, Error> {
        let action = self.read(client, ACTION)?.map(|answer| action(&answer.body)).transpose()?;
        let likely = self.read(client, REBALANCE).and_then(|likely| likely.map(|it| rebalance(&it.body)).transpose());
        match likely {
            Ok(likely) => self.likely = likely,
            // An end that is certain is reported, whatever becomes of a request about one that is likely.
            Err(error) if action.is_some() => tracing::debug!("AWS does not say what it recommends: {error}"),
            Err(error) => return Err(error),
        }
        Ok(action.into_iter().chain(self.likely.clone()).collect())
    }

    fn pause(&self) -> Duration {
        super::EVERY
    }
}

fn action(body: &[u8]) -> Result<Notice, Error> {
    #[derive(Deserialize)]
    struct Action {
        action: Kind,
        time: DateTime<Utc>,
    }
    let Action { action: kind, time } =
        serde_json::from_slice(body).map_err(|_| Error::Malformed("it is not an instance action"))?;
    if !matches!(kind, Kind::Terminate | Kind::Stop | Kind::Hibernate) {
        return Err(Error::Malformed("it has an unknown action"));
    }
    // A hibernation begins at once.
    let at = (kind != Kind::Hibernate).then_some(time);
    Ok(Notice { cloud: Cloud::Aws, kind, id: "spot".into(), at })
}

fn rebalance(body: &[u8]) -> Result<Notice, Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Rebalance {
        notice_time: DateTime<Utc>,
    }
    let Rebalance { notice_time } =
        serde_json::from_slice(body).map_err(|_| Error::Malformed("it is not a recommendation"))?;
    let id = format!("rebalance {}", notice_time.timestamp());
    Ok(Notice { cloud: Cloud::Aws, kind: Kind::Rebalance, id, at: None })
}

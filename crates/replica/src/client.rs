//! Calls to the object store, one after the other, for callers that know nothing of futures.
//!
//! The async runtime has no threads of its own except for blocking calls on a folder. A
//! cancelled call returns within a moment, wherever it waits.
//!
//! An object exists completely or not at all: object stores guarantee that for each upload, and the client for folders
//! writes under a temporary name (`NAME#1`), syncs, and renames. After a power cut there is nothing, or a temporary
//! file, which is removed an hour later with other content that no image needs, or parts of an incomplete upload, which a rule of the provider removes (for S3:
//! `AbortIncompleteMultipartUpload`).

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures_util::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use tokio::runtime::{Builder, Runtime};

use crate::connect::{self, Patience};
use crate::environment::Environment;
use crate::error::{Error, Failure, Result, Secrets, translate};
use crate::folder::{Entry, Folder};
use crate::url::{ReplicaUrl, Scheme};
use rekindle_store::JobName;

/// How long a cancelled call may continue.
const NAP: Duration = Duration::from_millis(50);

/// An object below the job's path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    pub(super) name: String,
    pub(super) size: u64,
    /// By the clock of the replica.
    pub(super) modified: DateTime<Utc>,
}

/// Tells whether a call is cancelled.
pub type Cancelled<'a> = &'a (dyn Fn() -> bool + Sync);

/// The connection to the replica of one job.
#[derive(Debug)]
pub(super) struct Client {
    url: ReplicaUrl,
    store: Arc<dyn ObjectStore>,
    /// The path of the job.
    root: Path,
    /// The same, if the object store is a folder.
    folder: Option<Folder>,
    runtime: Runtime,
    secrets: Secrets,
}

impl Client {
    pub(super) fn new(
        url: &ReplicaUrl,
        job: &JobName,
        environment: &Environment,
        patience: Patience,
    ) -> Result<Client> {
        let secrets = Secrets::of(environment);
        let unusable = |why: String| Error::Open { url: url.to_string(), why };
        let connected = connect::connect(url, environment, patience);
        let (store, path) = connected.map_err(|error| {
            unusable(format!("{}; {}", translate(&error, url.scheme(), &secrets), connect::help(url)))
        })?;
        let folder = match url.scheme() {
            Scheme::File => Some(Folder::open(std::path::Path::new(url.path()), job.as_str())),
            Scheme::S3 | Scheme::Gs | Scheme::Az => None,
        };
        let folder = folder.transpose().map_err(|error| unusable(format!("{error}; {}", connect::help(url))))?;
        Ok(Client { folder, ..Client::over(url, job, store, path, secrets)? })
    }

    /// The client of an object store, in which all objects are below this path.
    pub(super) fn over(
        url: &ReplicaUrl,
        job: &JobName,
        store: Arc<dyn ObjectStore>,
        path: Path,
        secrets: Secrets,
    ) -> Result<Client> {
        let runtime = Builder::new_current_thread().enable_all().build();
        let unusable = |error| Error::Open { url: url.to_string(), why: format!("cannot set up its runtime: {error}") };
        let runtime = runtime.map_err(unusable)?;
        Ok(Client { url: url.clone(), store, root: path.join(job.as_str()), folder: None, runtime, secrets })
    }

    /// The address, which contains no credentials.
    pub(super) fn shown(&self) -> String {
        self.url.to_string()
    }

    /// Prepares the first write: a folder for the job that others cannot enter, as in the store.
    pub(super) fn prepare(&self) -> Result<()> {
        self.folder.iter().try_for_each(|folder| {
            folder.create().map_err(|why| self.failed("create a folder in", Failure::Other(why)))
        })
    }

    /// Fails if the replica is this folder itself, perhaps through a link.
    pub(super) fn check_is_not(&self, other: &std::path::Path) -> Result<()> {
        match self.folder.as_ref().is_some_and(|folder| folder.is(other)) {
            true => {
                let why =
                    format!("it leads to {}, the store itself: set replica.url to another place", other.display());
                Err(Error::Open { url: self.shown(), why })
            }
            false => Ok(()),
        }
    }

    /// All objects of the job.
    pub(super) fn list(&self, cancelled: Cancelled<'_>) -> Result<Vec<Object>> {
        if let Some(folder) = &self.folder {
            let found = folder.list().map_err(|why| self.failed("list", Failure::Other(why)))?;
            let object = |Entry { name, size, modified }| Object { name, size, modified };
            return Ok(found.into_iter().map(object).collect());
        }
        let listed = self.store.list(Some(&self.root)).try_collect::<Vec<_>>();
        let objects = self.run("list", cancelled, listed)?;
        let ours = objects.into_iter().filter_map(|object| {
            let parts: Vec<_> =
                object.location.prefix_match(&self.root)?.map(|part| part.as_ref().to_owned()).collect();
            Some(Object { name: parts.join("/"), size: object.size, modified: object.last_modified })
        });
        Ok(ours.collect())
    }

    /// Removes what interrupted uploads left in a folder, if it is old. An object store has a rule of its provider.
    pub(super) fn sweep(&self, is_old: &dyn Fn(DateTime<Utc>) -> bool) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        folder.sweep(is_old).map_err(|why| self.failed("remove files of interrupted uploads from", Failure::Other(why)))
    }

    /// Looks up an object by its name; None if it does not exist. A listing may lag behind, and this does not.
    pub(super) fn head(&self, name: &str, cancelled: Cancelled<'_>) -> Result<Option<Object>> {
        let action = format!("look up {name} in");
        self.check_regular(&action, name)?;
        match self.run(&action, cancelled, self.store.head(&self.path(name))) {
            Ok(found) => Ok(Some(Object { name: name.to_owned(), size: found.size, modified: found.last_modified })),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A complete small object; None if it does not exist.
    pub(super) fn get(&self, name: &str, max: u64, cancelled: Cancelled<'_>) -> Result<Option<Vec<u8>>> {
        let (path, action) = (self.path(name), format!("read {name} from"));
        self.check_regular(&action, name)?;
        let got = async {
            let answer = self.store.get(&path).await?;
            let size = answer.meta.size;
            if size > max { Ok(Err(size)) } else { answer.bytes().await.map(Ok) }
        };
        match self.run(&action, cancelled, got) {
            Ok(Ok(bytes)) => Ok(Some(bytes.to_vec())),
            Ok(Err(size)) => {
                let why = format!("it has {size} bytes, and the maximum is {max}");
                Err(Error::Damaged { url: self.shown(), what: name.to_owned(), why })
            }
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Reads a range of an object.
    pub(super) fn get_range(
        &self,
        name: &str,
        range: std::ops::Range<u64>,
        cancelled: Cancelled<'_>,
    ) -> Result<Vec<u8>> {
        let (path, action) = (self.path(name), format!("read {name} from"));
        self.check_regular(&action, name)?;
        let wanted = range.end.saturating_sub(range.start);
        let bytes = self.run(&action, cancelled, self.store.get_range(&path, range))?;
        if u64::try_from(bytes.len()).is_ok_and(|len| len == wanted) {
            return Ok(bytes.to_vec());
        }
        let why = format!("asked for a range of {wanted} bytes and received {}", bytes.len());
        Err(Error::Damaged { url: self.shown(), what: name.to_owned(), why })
    }

    /// Writes a small object, and replaces an existing one.
    pub(super) fn put(&self, name: &str, bytes: Vec<u8>, cancelled: Cancelled<'_>) -> Result<()> {
        let (path, action) = (self.path(name), format!("write {name} to"));
        self.check_way(&action, name)?;
        self.run(&action, cancelled, self.store.put(&path, bytes.into())).map(drop)
    }

    /// Removes an object; a missing one is no error.
    pub(super) fn delete(&self, name: &str, cancelled: Cancelled<'_>) -> Result<()> {
        let (path, action) = (self.path(name), format!("remove {name} from"));
        self.check_way(&action, name)?;
        match self.run(&action, cancelled, self.store.delete(&path)) {
            Err(error) if error.is_missing() => Ok(()),
            result => result,
        }
    }

    /// Refuses what is no regular file in a folder: its open(2) may wait for ever, as that of a FIFO does, and no
    /// cancellation ends it.
    fn check_regular(&self, action: &str, name: &str) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        match folder.find(name).map_err(|why| self.failed(action, Failure::Other(why)))? {
            Some(found) if !found.is_file() => {
                let why = format!("{} is not a regular file: remove it", folder.path().join(name).display());
                Err(Error::Damaged { url: self.shown(), what: name.to_owned(), why })
            }
            // The call reports what is missing.
            _ => Ok(()),
        }
    }

    /// Checks the links on the way to an object that is written or removed.
    pub(super) fn check_way(&self, action: &str, name: &str) -> Result<()> {
        let Some(folder) = &self.folder else { return Ok(()) };
        folder.check_way(name).map_err(|why| self.failed(action, Failure::Other(why)))
    }

    pub(super) fn path(&self, name: &str) -> Path {
        name.split('/').fold(self.root.clone(), |path, part| path.join(part))
    }

    pub(super) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    /// Waits for the result or the cancellation.
    pub(super) fn run<T>(
        &self,
        action: &str,
        cancelled: Cancelled<'_>,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T> {
        match self.runtime.block_on(unless(cancelled, work)) {
            Some(result) => result.map_err(|error| self.translated(action, &error)),
            None => Err(Error::Cancelled),
        }
    }

    /// The same for work with other errors.
    pub(super) fn block_on<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }

    pub(super) fn translated(&self, action: &str, error: &object_store::Error) -> Error {
        self.failed(action, translate(error, self.url.scheme(), &self.secrets))
    }

    fn failed(&self, action: &str, failure: Failure) -> Error {
        Error::Remote { url: self.shown(), action: action.to_owned(), failure }
    }
}

/// The result of the future, or `None` if it is cancelled.
pub(super) async fn unless<T>(cancelled: Cancelled<'_>, work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    loop {
        if cancelled() {
            return None;
        }
        if let Ok(done) = tokio::time::timeout(NAP, work.as_mut()).await {
            return Some(done);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// `run` reads job.json before the job starts. It waited for ever and said nothing.
    #[test]
    fn a_fifo_in_a_folder_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("bert")).unwrap();
        let path = folder.path().join("bert/job.json");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let url: ReplicaUrl = format!("file://{}", folder.path().display()).parse().unwrap();
        let (sender, answers) = mpsc::channel();
        std::thread::spawn(move || {
            let client = Client::new(&url, &"bert".parse().unwrap(), &Environment::new([]), Patience::Little).unwrap();
            sender.send(client.get("job.json", 1000, &|| false).map(drop)).unwrap();
            sender.send(client.get_range("job.json", 0..4, &|| false).map(drop)).unwrap();
            sender.send(client.get("other.json", 1000, &|| false).map(drop)).unwrap();
        });
        let answer = || answers.recv_timeout(Duration::from_secs(10)).expect("it waits");
        for refused in [answer().unwrap_err(), answer().unwrap_err()] {
            let text = refused.to_string();
            assert!(text.contains(&format!("{} is not a regular file", path.display())), "{text}");
        }
        answer().unwrap();
    }
}

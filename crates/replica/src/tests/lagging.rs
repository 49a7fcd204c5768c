//! An object store in memory whose listing can lag behind, and whose objects can have any age.

use std::collections::BTreeMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Mutex;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

#[derive(Debug, Default)]
pub(super) struct Lagging {
    objects: InMemory,
    /// The listing, while it does not change.
    frozen: Mutex<Option<Vec<ObjectMeta>>>,
    /// When objects were written, where that is not the truth.
    written: Mutex<BTreeMap<Path, DateTime<Utc>>>,
    /// The names that were written.
    puts: Mutex<Vec<String>>,
}

impl Lagging {
    /// From now on a listing shows what is there now.
    pub(super) fn freeze(&self) {
        *self.frozen.lock().unwrap() = Some(self.listed());
    }

    /// A listing shows what is there.
    pub(super) fn thaw(&self) {
        *self.frozen.lock().unwrap() = None;
    }

    /// Everything that is there was written earlier.
    pub(super) fn age(&self, by: Duration) {
        let by = TimeDelta::from_std(by).unwrap();
        let listed = self.listed();
        let mut written = self.written.lock().unwrap();
        written.extend(listed.into_iter().map(|it| (it.location, it.last_modified - by)));
    }

    /// The names of all objects, below the path of the job.
    pub(super) fn names(&self) -> Vec<String> {
        let names = self.listed().into_iter().map(|it| it.location.to_string());
        names.map(|name| name.trim_start_matches("some/path/train/").to_owned()).collect()
    }

    /// How often a name with this end was written.
    pub(super) fn puts(&self, end: &str) -> usize {
        self.puts.lock().unwrap().iter().filter(|name| name.ends_with(end)).count()
    }

    pub(super) fn put(&self, name: &str, bytes: &str) {
        let path = Path::from(format!("some/path/train/{name}"));
        futures_util::FutureExt::now_or_never(self.objects.put(&path, bytes.to_owned().into())).unwrap().unwrap();
    }

    pub(super) fn remove(&self, name: &str) {
        let path = Path::from(format!("some/path/train/{name}"));
        futures_util::FutureExt::now_or_never(self.objects.delete(&path)).unwrap().unwrap();
    }

    fn listed(&self) -> Vec<ObjectMeta> {
        let all = self.objects.list(None).try_collect::<Vec<_>>();
        let all = futures_util::FutureExt::now_or_never(all).unwrap().unwrap();
        all.into_iter().map(|it| self.dated(it)).collect()
    }

    fn dated(&self, meta: ObjectMeta) -> ObjectMeta {
        match self.written.lock().unwrap().get(&meta.location) {
            Some(written) => ObjectMeta { last_modified: *written, ..meta },
            None => meta,
        }
    }

    fn is_written(&self, location: &Path) {
        self.written.lock().unwrap().remove(location);
        self.puts.lock().unwrap().push(location.to_string());
    }
}

impl fmt::Display for Lagging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Lagging")
    }
}

impl ObjectStore for Lagging {
    fn put_opts<'s, 'l, 'a>(
        &'s self,
        location: &'l Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Answer<'a, PutResult>
    where
        's: 'a,
        'l: 'a,
    {
        self.is_written(location);
        self.objects.put_opts(location, payload, opts)
    }

    fn put_multipart_opts<'s, 'l, 'a>(
        &'s self,
        location: &'l Path,
        opts: PutMultipartOptions,
    ) -> Answer<'a, Box<dyn MultipartUpload>>
    where
        's: 'a,
        'l: 'a,
    {
        self.is_written(location);
        self.objects.put_multipart_opts(location, opts)
    }

    fn get_opts<'s, 'l, 'a>(&'s self, location: &'l Path, options: GetOptions) -> Answer<'a, GetResult>
    where
        's: 'a,
        'l: 'a,
    {
        Box::pin(async move {
            let got = self.objects.get_opts(location, options).await?;
            Ok(GetResult { meta: self.dated(got.meta.clone()), ..got })
        })
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = self.frozen.lock().unwrap().clone().unwrap_or_else(|| self.listed());
        let below = |it: &ObjectMeta| prefix.is_none_or(|prefix| it.location.prefix_matches(prefix));
        stream::iter(listed.into_iter().filter(below).map(Ok).collect::<Vec<_>>()).boxed()
    }

    fn list_with_delimiter<'s, 'l, 'a>(&'s self, prefix: Option<&'l Path>) -> Answer<'a, ListResult>
    where
        's: 'a,
        'l: 'a,
    {
        self.objects.list_with_delimiter(prefix)
    }

    fn copy_opts<'s, 'f, 't, 'a>(&'s self, from: &'f Path, to: &'t Path, options: CopyOptions) -> Answer<'a, ()>
    where
        's: 'a,
        'f: 'a,
        't: 'a,
    {
        self.objects.copy_opts(from, to, options)
    }
}

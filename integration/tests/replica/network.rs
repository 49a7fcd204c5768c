//! Faults of networks and servers.

use std::time::{Duration, Instant};

use rekindle_replica::{Error, Failure, Replica};
use rekindle_store::persist::Progress;

use crate::ground::{Machine, RECORD, SECRET, chunks, id, newest_good, noise, s3_replica};
use crate::proxy::{Fault, Proxy};
use crate::server::Server;

/// A server, what is before it, and a client of that.
fn ground() -> Option<(Server, Proxy, Replica)> {
    let server = Server::start()?;
    let proxy = Proxy::start(server.address);
    let replica = s3_replica(&proxy);
    Some((server, proxy, replica))
}

fn is_pack(line: &str) -> bool {
    line.contains(".pack")
}

/// Nothing in it but words: no credentials, however it is printed.
fn is_clean(error: &Error) -> String {
    let mut text = format!("{error}\n{error:?}");
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text += &format!("\n{error}\n{error:?}");
        cause = error.source();
    }
    assert!(!text.contains(SECRET) && !text.contains("AKIAEXAMPLE") && !text.contains("Signature"), "{text}");
    error.to_string()
}

#[test]
fn an_upload_that_breaks_off_leaves_no_image_and_goes_on() {
    let Some((_server, proxy, replica)) = ground() else { return };
    let here = Machine::new();
    let first = here.image(1, &chunks(0..2));
    here.upload(&replica, &first).unwrap();
    // Three packs, the last with two parts of a multipart upload.
    here.image(2, &chunks(10..12));
    here.image(3, &chunks(20..22));
    let large: Vec<_> = (0..50).map(|seed| noise(1000 + seed, 200_000)).collect();
    let content = [chunks(10..12), chunks(20..22), large].concat();
    let image = here.image(4, &content);
    // One that lost its way counts as not there, so all tries of it have to.
    proxy.inject(usize::MAX, Fault::CutRequest(3 << 20), |line| line.contains("partNumber=2"));
    let error = here.upload(&replica, &image).unwrap_err();
    assert!(matches!(error, Error::Remote { .. }), "{error}");
    is_clean(&error);
    assert_eq!(newest_good(&replica, None).unwrap().id, id(1), "the one before is whole");
    assert!(matches!(Machine::new().fetch(&replica, id(4)), Err(Error::NotWhole { .. })));
    let before: Vec<String> = proxy.requests().into_iter().filter(|line| is_put_of_pack(line)).collect();

    proxy.heal();
    let sent = here.upload(&replica, &image).unwrap();
    let after: Vec<String> = proxy.requests().into_iter().filter(|line| is_put_of_pack(line)).collect();
    assert!(sent.present + sent.packs == 3 && sent.packs < 3, "{sent:?}");
    let again = after.iter().filter(|line| line.contains("partNumber=1") && before.contains(line)).count();
    assert!(again <= 1, "only the pack that was on its way: {after:?}");
    let other = Machine::new();
    let (fetched, _) = other.fetch(&replica, id(4)).unwrap();
    assert_eq!(other.content(&fetched), content);
}

fn is_put_of_pack(line: &str) -> bool {
    line.starts_with("PUT") && is_pack(line)
}

#[test]
fn what_passes_by_itself_is_waited_for() {
    let Some((_server, proxy, replica)) = ground() else { return };
    let here = Machine::new();
    let image = here.image(1, &chunks(0..2));
    let busy = "<Error><Code>SlowDown</Code></Error>";
    for (method, fault) in
        [("GET", Fault::Answer(503, busy)), ("PUT", Fault::Answer(500, "")), ("PUT", Fault::CutAnswer(0))]
    {
        proxy.inject(1, fault, move |line| line.starts_with(method));
    }
    here.upload(&replica, &image).unwrap();
    let other = Machine::new();
    proxy.inject(2, Fault::CutAnswer(1000), is_pack);
    let (fetched, _) = other.fetch(&replica, id(1)).unwrap();
    assert_eq!(other.content(&fetched), chunks(0..2));
}

#[test]
fn what_does_not_pass_is_told_without_credentials() {
    let Some((_server, proxy, replica)) = ground() else { return };
    let here = Machine::new();
    let image = here.image(1, &chunks(0..2));
    let echo = "<Error><Code>AccessDenied</Code><Authorization>AKIAEXAMPLE wJalrXUtnFEMI-not-to-be-seen Signature</Authorization></Error>";
    for (status, expected) in [
        (403, "it refused (AccessDenied): the credentials are wrong or do not allow this; set AWS_ACCESS_KEY_ID"),
        (404, "not found (AccessDenied): check that the bucket or folder exists"),
        (500, "it answered 500 (AccessDenied)"),
        (400, "it answered 400 (AccessDenied)"),
    ] {
        proxy.inject(usize::MAX, Fault::Answer(status, echo), |_| true);
        let error = here.upload(&replica, &image).unwrap_err();
        let text = is_clean(&error);
        assert!(text.contains(expected) && text.contains("s3://"), "{status}: {text}");
        assert!(error.is_unreachable());
        proxy.heal();
    }
    proxy.inject(usize::MAX, Fault::Answer(200, "what is this AKIAEXAMPLE wJalrXUtnFEMI-not-to-be-seen"), |_| true);
    is_clean(&replica.images(&|| false).unwrap_err());
    proxy.heal();
    let Some((server, proxy, replica)) = ground() else { return };
    drop((server, proxy));
    let error = replica.images(&|| false).unwrap_err();
    is_clean(&error);
    assert!(matches!(error, Error::Remote { failure: Failure::Unreachable(_), .. }), "{error}");
}

#[test]
fn garbage_is_read_again_and_never_kept() {
    let Some((_server, proxy, replica)) = ground() else { return };
    let here = Machine::new();
    let image = here.image(1, &chunks(0..3));
    here.upload(&replica, &image).unwrap();
    let get = |line: &str| line.starts_with("GET") && is_pack(line);
    let garbage = move |line: &str| get(line);

    let other = Machine::new();
    proxy.inject(usize::MAX, Fault::Garbage, garbage);
    let error = other.fetch(&replica, id(1)).unwrap_err();
    assert!(matches!(error, Error::Damaged { .. }), "{error}");
    assert_eq!((other.packs(), other.folder.images().unwrap().len()), (0, 0));
    proxy.heal();
    for (name, kind) in [("chunks", "chunk map"), (".idx", "index")] {
        proxy.inject(usize::MAX, Fault::Garbage, move |line| line.starts_with("GET") && line.contains(name));
        let error = other.fetch(&replica, id(1)).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. } | Error::NotWhole { .. }), "{kind}: {error}");
        assert_eq!((other.packs(), other.folder.images().unwrap().len()), (0, 0));
        proxy.heal();
    }
    // The header of the pack first, then the records: those come wrong once.
    let seen = std::sync::atomic::AtomicUsize::new(0);
    proxy.inject(1, Fault::Garbage, move |line| {
        get(line) && seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 1
    });
    let (fetched, bytes) = other.fetch(&replica, id(1)).unwrap();
    assert_eq!((other.content(&fetched), bytes), (chunks(0..3), 3 * RECORD));
}

#[test]
fn a_call_that_is_not_wanted_any_more_ends_soon() {
    let Some((_server, proxy, replica)) = ground() else { return };
    let here = Machine::new();
    let image = here.image(1, &chunks(0..40));
    proxy.inject(usize::MAX, Fault::Slow(100_000), is_pack);
    let began = Instant::now();
    let cancelled = || began.elapsed() > Duration::from_millis(300);
    let result = replica.upload(&image, &here.folder, &Progress::default(), &cancelled);
    assert!(matches!(result, Err(Error::Cancelled)), "{result:?}");
    assert!(began.elapsed() < Duration::from_secs(30), "40 s would be what it takes: {:?}", began.elapsed());
    assert_eq!(newest_good(&replica, None), None);
}

#[test]
fn it_keeps_to_its_rate() {
    let dir = tempfile::tempdir().unwrap();
    let replica = crate::ground::folder_replica(dir.path()).with_rate(Some(20 << 20));
    let here = Machine::new();
    let content: Vec<_> = (0..96).map(|seed| noise(seed, 256 << 10)).collect();
    let image = here.image(1, &content);
    let began = Instant::now();
    here.upload(&replica, &image).unwrap();
    assert!(
        began.elapsed() >= Duration::from_millis(800),
        "24 MiB at 20 MiB/s, the last 8 at once: {:?}",
        began.elapsed()
    );
}

//! Correct certificates, and all mistakes with them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use rekindle_etcd::{Client, Error, Options, Secret};

use crate::support::{Cluster, connected, create, etcd, eventually, folder, names_certificates, value};

fn openssl(folder: &Path, args: &[&str]) {
    let output = Command::new("openssl").current_dir(folder).args(args).output().unwrap();
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// An authority, in NAME.crt and NAME.key.
fn authority(folder: &Path, name: &str) {
    let (key, certificate, subject) = (format!("{name}.key"), format!("{name}.crt"), format!("/CN={name}"));
    let common = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"];
    openssl(folder, &[&common[..], &["-subj", &subject, "-keyout", &key, "-out", &certificate]].concat());
}

/// A certificate that an authority has signed, for 127.0.0.1 or another name; valid from and until these days from now.
fn signed(folder: &Path, by: &str, name: &str, host: &str, days: (&str, &str)) {
    let (key, request, certificate) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.crt"));
    let common = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
    openssl(folder, &[&common[..], &["-subj", &format!("/CN={name}"), "-keyout", &key, "-out", &request]].concat());
    fs::write(folder.join("ca.cnf"), "[ca]\ndefault_ca = it\n[it]\ndatabase = index\nnew_certs_dir = .\nrand_serial = yes\ndefault_md = sha256\npolicy = any\n[any]\ncommonName = supplied\n").unwrap();
    fs::write(folder.join("index"), "").unwrap();
    fs::write(folder.join("ext"), format!("subjectAltName = {host}\nextendedKeyUsage = serverAuth, clientAuth\n"))
        .unwrap();
    let date = |day: &str| {
        let output = Command::new("date").args(["-u", "-d", day, "+%Y%m%d%H%M%SZ"]).output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    };
    let (from, to, signer, signer_key) = (date(days.0), date(days.1), format!("{by}.crt"), format!("{by}.key"));
    let args =
        ["ca", "-batch", "-config", "ca.cnf", "-extfile", "ext", "-notext", "-cert", &signer, "-keyfile", &signer_key];
    openssl(
        folder,
        &[&args[..], &["-startdate", &from, "-enddate", &to, "-in", &request, "-out", &certificate]].concat(),
    );
}

const VALID: (&str, &str) = ("-1 day", "+1 day");
const EXPIRED: (&str, &str) = ("-3 days", "-1 day");
const LOOPBACK: &str = "IP:127.0.0.1";

struct Files(PathBuf);

impl Files {
    fn identity(&self, name: &str) -> Option<(Secret, Secret)> {
        let file = |end| Secret::File(self.0.join(format!("{name}.{end}")));
        Some((file("crt"), file("key")))
    }

    fn ca(&self, name: &str) -> Option<Secret> {
        Some(Secret::File(self.0.join(format!("{name}.crt"))))
    }
}

/// A cluster with TLS, which requires certificates of its clients. The folder has all certificates.
fn cluster(server: &str) -> (Cluster, Files) {
    let folder = folder();
    let path = folder.path();
    authority(path, "ca");
    authority(path, "other");
    signed(path, "ca", "server", LOOPBACK, VALID);
    signed(path, "ca", "old-server", LOOPBACK, EXPIRED);
    signed(path, "ca", "elsewhere", "DNS:etcd.example", VALID);
    signed(path, "ca", "client", LOOPBACK, VALID);
    signed(path, "ca", "old-client", LOOPBACK, EXPIRED);
    signed(path, "other", "stranger", LOOPBACK, VALID);
    let files = Files(path.to_owned());
    let at = |name: &str| path.join(name).to_str().unwrap().to_owned();
    let (certificate, key, ca) = (at(&format!("{server}.crt")), at(&format!("{server}.key")), at("ca.crt"));
    let more = ["--cert-file", &certificate, "--key-file", &key, "--client-cert-auth", "--trusted-ca-file", &ca];
    let control = ["--cacert", &ca, "--cert", &at("client.crt"), "--key", &at("client.key")];
    (Cluster::within(folder, 1, "https", &more, &control, None), files)
}

fn with(cluster: &Cluster, ca: Option<Secret>, identity: Option<(Secret, Secret)>) -> Options {
    let mut options = cluster.options();
    (options.ca, options.identity) = (ca, identity);
    options
}

/// The error, which must come soon.
fn refused(options: &Options) -> String {
    let before = Instant::now();
    let error = Client::connect(options).unwrap_err();
    assert!(before.elapsed() < options.request_timeout * 2, "{:?}", before.elapsed());
    let text = error.to_string();
    // One sentence for the cause, one for what to do.
    assert!(text.len() < 500 && !text.contains('\n') && !text.ends_with('.'), "{text}");
    text
}

#[test]
fn certificates_are_checked_on_both_sides() {
    if !etcd() {
        return;
    }
    let (cluster, files) = cluster("server");
    let right = with(&cluster, files.ca("ca"), files.identity("client"));
    let client = connected(&right);
    create(&client, "a", "1");
    let says = |ca: Option<Secret>, identity, expected: &str| {
        let text = refused(&with(&cluster, ca, identity));
        assert!(text.contains(expected), "{expected}: {text}");
    };
    says(files.ca("other"), files.identity("client"), "etcd's certificate is signed by another authority");
    says(None, files.identity("client"), "etcd's certificate is signed by another authority");
    for identity in [None, files.identity("old-client"), files.identity("stranger")] {
        let text = refused(&with(&cluster, files.ca("ca"), identity));
        assert!(names_certificates(&text), "{text}");
    }
    says(files.ca("missing"), files.identity("client"), "cannot read the certificate of the authority");
    says(files.ca("ca"), files.identity("missing"), "cannot read the client's certificate");
    fs::write(files.0.join("junk.crt"), "junk").unwrap();
    fs::write(files.0.join("junk.key"), "junk").unwrap();
    says(files.ca("ca"), files.identity("junk"), "PEM");
    says(files.ca("junk"), files.identity("client"), "PEM");
    let mut options = right.clone();
    options.endpoints = vec![cluster.members[0].client.replace("https", "http")];
    assert!(refused(&options).contains("does not use TLS"));
    (options.ca, options.identity) = (None, None);
    assert!(refused(&options).contains("whether they use TLS"));
}

#[test]
fn the_certificate_of_etcd_is_checked() {
    if !etcd() {
        return;
    }
    for (server, expected) in
        [("old-server", "Renew the certificate of etcd"), ("elsewhere", "Use an address that is in etcd's certificate")]
    {
        let (cluster, files) = cluster(server);
        eventually("etcd", || std::net::TcpStream::connect(cluster.members[0].client.strip_prefix("https://")?).ok());
        // Its port is open before it serves.
        eventually(expected, || {
            let text = refused(&with(&cluster, files.ca("ca"), files.identity("client")));
            eprintln!("{text}");
            text.contains(expected).then_some(())
        });
    }
    // And one that knows no TLS.
    let cluster = Cluster::start(1);
    drop(cluster.client());
    let mut options = cluster.options();
    options.endpoints[0] = options.endpoints[0].replace("http", "https");
    let text = refused(&options);
    assert!(text.contains("http:// without"), "{text}");
}

#[test]
fn certificates_that_are_renewed_in_place_are_used() {
    if !etcd() {
        return;
    }
    let (mut cluster, files) = cluster("server");
    let client = connected(&with(&cluster, files.ca("ca"), files.identity("client")));
    create(&client, "a", "1");
    // Another authority for all; the connection is lost.
    for name in ["server", "client"] {
        signed(&files.0, "other", name, LOOPBACK, VALID);
    }
    fs::copy(files.0.join("other.crt"), files.0.join("ca.crt")).unwrap();
    cluster.kill(0);
    cluster.run(0);
    eventually("a connection", || client.get("/").ok());
    assert_eq!(value(&client, "a").as_deref(), Some("1"));
}

#[test]
fn a_certificate_names_a_user() {
    if !etcd() {
        return;
    }
    let (cluster, files) = cluster("server");
    drop(connected(&with(&cluster, files.ca("ca"), files.identity("client"))));
    cluster.control(0, &["user", "add", "root:secret"]);
    cluster.control(0, &["user", "add", "client:unused"]);
    cluster.control(0, &["auth", "enable"]);
    let error = Client::connect(&with(&cluster, files.ca("ca"), files.identity("client"))).unwrap_err();
    assert!(
        matches!(error, Error::Denied { .. }) && error.to_string().contains("that the client's certificate names"),
        "{error}"
    );
}

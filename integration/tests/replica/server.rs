//! A real S3 server (moto, from `scripts/deps.sh s3`) on loopback, one a test.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The bucket that is there.
pub(crate) const BUCKET: &str = "rekindle-test";

/// Prints SKIP and returns None if the server is not installed; fails if it is required.
fn python() -> Option<PathBuf> {
    let installed = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".deps/s3/bin/python");
    let python = std::env::var_os("REKINDLE_S3_PYTHON").map_or_else(installed, PathBuf::from);
    rekindle_testing::needs(
        "s3",
        Some(python).filter(|python| python.exists()),
        "there is no S3 server; scripts/deps.sh s3 gets one",
    )
}

/// The server; it ends when this is dropped, or when the test is killed.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
}

impl Server {
    pub(crate) fn start() -> Option<Server> {
        let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("integration/tests/replica/server.py");
        let mut command = Command::new(python()?);
        // It ends when its standard input does.
        command.arg(script).arg(BUCKET).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let port: u16 = line.trim().parse().unwrap_or_else(|_| panic!("the server did not start: {line:?}"));
        Some(Server { process, address: ([127, 0, 0, 1], port).into() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

//! The end of a process.

/// How a child ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ended {
    /// It exited with this code.
    Exit(i32),
    /// This signal ended it.
    Signal(i32),
}

impl std::fmt::Display for Ended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Ended::Exit(code) => write!(f, "exit code {code}"),
            Ended::Signal(n) => match nix::sys::signal::Signal::try_from(*n) {
                Ok(signal) => write!(f, "signal {signal}"),
                Err(_) => write!(f, "signal {n}"),
            },
        }
    }
}

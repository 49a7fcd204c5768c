//! What a descriptor is, by where /proc/PID/fd leads.

/// What a descriptor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind<'a> {
    Socket,
    Pipe,
    Terminal,
    Memfd,
    /// Something without a file: eventfd, epoll, ...
    Anonymous(&'a str),
    Path(&'a str),
}

impl<'a> Kind<'a> {
    pub(super) fn of(target: &'a str) -> Kind<'a> {
        match target {
            _ if target.starts_with("socket:[") => Kind::Socket,
            _ if target.starts_with("pipe:[") => Kind::Pipe,
            _ if target.starts_with("/memfd:") => Kind::Memfd,
            _ if target.starts_with("/dev/pts/") || target.starts_with("/dev/tty") || target == "/dev/ptmx" => {
                Kind::Terminal
            }
            _ => match target.strip_prefix("anon_inode:") {
                // [eventfd], or "inotify" without brackets.
                Some(name) => Kind::Anonymous(name.trim_start_matches('[').trim_end_matches(']')),
                None => Kind::Path(target),
            },
        }
    }

    pub(super) fn words(self) -> &'a str {
        match self {
            Kind::Socket => "socket",
            Kind::Pipe => "pipe",
            Kind::Terminal => "terminal",
            Kind::Memfd => "memfd",
            Kind::Anonymous(name) => name,
            Kind::Path(path) if path.starts_with('/') => "file",
            Kind::Path(_) => "object of the kernel",
        }
    }
}

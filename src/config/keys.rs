//! The list of keys: the expected value of each, the environment variable that sets it, and suggestions for misspelt
//! keys.

use crate::variables::{OF_JOB, OF_OTHERS};
use rekindle_replica::ReplicaUrl;

/// The tables of the file, in its order.
pub(super) const SECTIONS: &[&str] = &[
    "job",
    "network",
    "group",
    "files",
    "gpu",
    "snapshot",
    "store",
    "replica",
    "restart",
    "watch",
    "scheduler",
    "hooks",
    "metrics",
    "log",
    "control",
    "criu",
];

/// One key.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// Section and name, "store.keep-last"; "version" is in no section.
    pub(super) path: &'static str,
    /// How text from the environment becomes a value.
    pub(super) shape: Shape,
    /// Ends the sentence "must be ...".
    pub(super) expects: &'static str,
}

/// How text from the environment becomes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// Unchanged.
    Text,
    /// An integer.
    Count,
    /// `true` or `false`.
    Flag,
    /// Words, separated by spaces.
    Words,
    /// NAME=VALUE, separated by commas; each name is an entry with its own origin.
    Map,
    /// Tables in a list, each an entry with its own origin; only in the file.
    Tables,
}

const DURATION: &str = "a duration with a unit, such as \"90s\" or \"10m\"";
const PATIENCE: &str = "\"off\" or a duration with a unit, such as \"90s\" or \"10m\"";
const SIZE: &str = "a size such as \"64MiB\" or \"200GB\", or a whole number of bytes";
const RATE: &str = "\"unlimited\", or a size per second such as \"500MB\" or a whole number of bytes";
const COUNT: &str = "a whole number from 0 to 4294967295";
const WORDS: &str = "a list of strings: the program and its arguments, such as [\"/usr/local/bin/tell\", \"-v\"]";

const fn key(path: &'static str, shape: Shape, expects: &'static str) -> Key {
    Key { path, shape, expects }
}

/// Every key, in the order of the file.
pub(super) const KEYS: &[Key] = &[
    key("version", Shape::Count, "1"),
    key("rules", Shape::Tables, "tables [[rules]] with match and action"),
    key("job.name", Shape::Text, "a string"),
    key("job.command", Shape::Words, "a list of strings, such as [\"python3\", \"train.py\"]"),
    key("job.directory", Shape::Text, "a string with an absolute path"),
    key("job.user", Shape::Text, "a string with a user's name or number"),
    key("job.stdin", Shape::Text, "\"null\", \"inherit\" or an absolute path"),
    key("job.environment", Shape::Map, "a string for each variable"),
    key("job.environment-mode", Shape::Text, "\"inherit\" or \"clean\""),
    key("job.pass-environment", Shape::Words, "a list of strings with names, such as [\"MASTER_ADDR\", \"SLURM_*\"]"),
    key("job.limits", Shape::Map, "\"unlimited\", a whole number or a size such as \"64MiB\" for each limit"),
    key("job.no-new-privileges", Shape::Flag, "true or false"),
    key("job.allow", Shape::Words, "a list of \"io-uring\" and \"amx\""),
    key("network.mode", Shape::Text, "\"host\", \"private\" or \"uplink\""),
    key("group.nodes", Shape::Count, "a whole number from 0 to 65533"),
    key("group.node-rank", Shape::Count, COUNT),
    key(
        "group.coordinator",
        Shape::Words,
        "\"local\", \"local:FILE\" with an absolute path, or a list of addresses of etcd, such as \
        [\"https://10.0.0.1:2379\"]",
    ),
    key("group.ca", Shape::Text, "a string with an absolute path"),
    key("group.certificate", Shape::Text, "a string with an absolute path"),
    key("group.key", Shape::Text, "a string with an absolute path"),
    key("group.user", Shape::Text, "a string with a user of etcd"),
    key("group.password-file", Shape::Text, "a string with an absolute path"),
    key(
        "group.network",
        Shape::Text,
        "\"vxlan\", \"vxlan:PORT\" with a port from 1 to 65535, or \"bridge:NAME\" with a name of at most 15 characters",
    ),
    key("group.subnet", Shape::Text, "an IPv4 network with a prefix length from 8 to 30, such as \"10.213.0.0/16\""),
    key("group.address", Shape::Text, "an IP address of this machine"),
    key("group.lease", Shape::Text, DURATION),
    key("group.wait", Shape::Text, DURATION),
    key("files.track", Shape::Words, "a list of strings with absolute paths, such as [\"/data/db\"]"),
    key("gpu.nccl", Shape::Text, "\"auto\", \"no-peer\" or \"off\""),
    key("gpu.memory", Shape::Text, "\"copied\" or \"kept\""),
    key("gpu.full-copy-every", Shape::Count, COUNT),
    key("snapshot.interval", Shape::Text, "\"auto\", \"off\" or a duration with a unit, such as \"90s\" or \"10m\""),
    key("snapshot.max-overhead", Shape::Text, "a percentage of the time, such as \"1%\" or \"0.5%\""),
    key(
        "snapshot.mean-time-between-failures",
        Shape::Text,
        "\"observed\" or a duration with a unit, such as \"12h\" or \"30days\"",
    ),
    key("snapshot.grace", Shape::Text, DURATION),
    key("snapshot.freeze-limit", Shape::Text, DURATION),
    key("snapshot.file-limit", Shape::Text, SIZE),
    key("snapshot.tcp", Shape::Text, "\"auto\", \"keep\" or \"close\""),
    key("snapshot.memory-reserve", Shape::Text, SIZE),
    key("snapshot.rehearse", Shape::Text, PATIENCE),
    key("snapshot.staging", Shape::Text, "\"ram\" or \"store\""),
    key("snapshot.staging-directory", Shape::Text, "a string with an absolute path"),
    key("snapshot.interposer", Shape::Text, "\"auto\" or \"off\""),
    key("store.directory", Shape::Text, "a string with an absolute path"),
    key("store.keep-last", Shape::Count, COUNT),
    key("store.keep-hourly", Shape::Count, COUNT),
    key("store.keep-daily", Shape::Count, COUNT),
    key("store.keep-within", Shape::Text, DURATION),
    key(
        "store.max-total-size",
        Shape::Text,
        "\"unlimited\", a size such as \"64MiB\" or \"200GB\", or a whole number of bytes",
    ),
    key("store.min-free", Shape::Text, SIZE),
    key(
        "store.compression",
        Shape::Text,
        "\"auto\", \"none\", \"lz4\", \"zstd\", or \"zstd:LEVEL\" with a level from -7 to 19",
    ),
    key("store.encryption-key", Shape::Text, "a string with an absolute path"),
    key("store.persist-rate", Shape::Text, RATE),
    key("store.copies", Shape::Count, "1 or 2"),
    key("store.on-success", Shape::Text, "\"remove\" or \"keep\""),
    key(
        "replica.url",
        Shape::Text,
        "s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///PATH, without user, password or query: \
         credentials come from the environment",
    ),
    key("replica.keep-last", Shape::Count, COUNT),
    key("replica.rate", Shape::Text, RATE),
    key("restart.max-restarts", Shape::Count, COUNT),
    key("restart.backoff", Shape::Text, DURATION),
    key("restart.min-uptime", Shape::Text, DURATION),
    key("restart.cold-start", Shape::Text, "\"no-images\", \"allow\" or \"never\""),
    key("restart.changed-files", Shape::Text, "\"refuse\" or \"warn\""),
    key("restart.compare", Shape::Text, "\"on\", \"required\" or \"tell\""),
    key("restart.on-process-death", Shape::Text, "\"cuda\", \"any\" or \"root\""),
    key("restart.restore-timeout", Shape::Text, DURATION),
    key("watch.no-output-for", Shape::Text, PATIENCE),
    key("watch.no-cpu-for", Shape::Text, PATIENCE),
    key("watch.no-notify-for", Shape::Text, PATIENCE),
    key("watch.action", Shape::Text, "\"notify\", \"restart\" or \"snapshot-and-stop\""),
    key("watch.interruption", Shape::Text, "\"auto\", \"off\", or a list of \"aws\", \"google\" and \"azure\""),
    key("scheduler.profile", Shape::Text, "\"auto\", \"slurm\" or \"none\""),
    key("scheduler.requeue", Shape::Text, "\"exit-code\" or \"scontrol\""),
    key(
        "scheduler.deadline",
        Shape::Text,
        "a duration with a unit, such as \"8h\", or a time, such as \"2026-11-22T06:00:00\" (local), \
         \"2026-11-22T06:00:00Z\" or \"@1795327200\"",
    ),
    key("hooks.before-snapshot", Shape::Words, WORDS),
    key("hooks.after-snapshot", Shape::Words, WORDS),
    key("hooks.before-restore", Shape::Words, WORDS),
    key("hooks.after-restore", Shape::Words, WORDS),
    key("hooks.on-failure", Shape::Words, WORDS),
    key("hooks.on-completion", Shape::Words, WORDS),
    key("hooks.timeout", Shape::Text, DURATION),
    key("hooks.on-error", Shape::Text, "\"ignore\" or \"refuse\""),
    key("metrics.textfile", Shape::Text, "a string with an absolute path"),
    key("metrics.listen", Shape::Text, "a string with an address and a port, such as \"127.0.0.1:9464\""),
    key("log.level", Shape::Text, "\"error\", \"warn\", \"notice\", \"info\", \"debug\" or \"trace\""),
    key("log.format", Shape::Text, "\"text\" or \"json\""),
    key("log.max-size", Shape::Text, SIZE),
    key("log.keep", Shape::Count, COUNT),
    key("control.directory", Shape::Text, "a string with an absolute path"),
    key("criu.path", Shape::Text, "a string with an absolute path"),
];

impl Key {
    /// Whether this value must never be shown. A correct address of a replica may be shown; an address with a password
    /// in it is a mistake that must not end in a log.
    pub(super) fn is_secret(&self, value: &str) -> bool {
        match self.path {
            "job.environment" => true,
            "replica.url" => ReplicaUrl::may_be_secret(value),
            _ => false,
        }
    }

    /// Whether a value may contain a secret that is not the job's: an argument of a hook.
    pub(super) fn may_hold_ours(&self) -> bool {
        self.path.starts_with("hooks.")
    }

    /// The environment variable that sets it, `REKINDLE_STORE_KEEP_LAST`. `version` belongs to a file and has none.
    pub(super) fn variable(&self) -> Option<String> {
        let variable = || format!("REKINDLE_{}", self.path.to_uppercase().replace(['.', '-'], "_"));
        self.path.contains('.').then(variable)
    }
}

/// The key with that path.
pub(super) fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

/// The similarity, from 0 to 1, from which one word is suggested for another.
const ALIKE: f64 = 0.8;

/// If two keys are likely, one in the typed section is the better suggestion: for `store.keep`, `store.keep-last`
/// (similarity 0.89) is suggested before `log.keep` (1.0).
const SAME_SECTION: f64 = 0.15;

/// Keys that earlier versions had, each with what to do.
pub(super) const REMOVED: &[(&str, &str)] = &[
    ("restart.lazy", "all memory of a job is restored before it runs, as with \"off\". Delete the key"),
    ("hooks.webhook", "a hook sends failures to an address: on-failure with examples/notify.py. Delete the key"),
    ("job.pid-namespace", "a job always has a PID namespace of its own, as with \"private\". Delete the key"),
    (
        "store.persist-threads",
        "an image is stored by one thread for four processors, from 2 to 8. To write more slowly, set store.persist-rate",
    ),
    (
        "store.verify-rate",
        "a timer reads the store in place of the job's supervisor: `rekindle verify --read-data-subset 5%`. Delete the key",
    ),
    ("store.sweep-after", "content that no image needs is deleted after 10 minutes. Delete the key"),
    ("store.repack", "a repack writes at most 10 GB at a time. Delete the key"),
    (
        "store.seen-directory",
        "root's notes are in /var/lib/rekindle-seen, other users' in ~/.local/state/rekindle/seen. Delete the key",
    ),
    ("gpu.hwloc", "set HWLOC_COMPONENTS in the job's environment: then rekindle does not change it. Delete the key"),
    ("snapshot.retry-max", "the pause after failed snapshots grows to 30 minutes at most. Delete the key"),
    (
        "snapshot.ghost-limit",
        "deleted files of up to 4095 MiB, the most that CRIU takes, are in the image. Delete the key",
    ),
    (
        "restart.healthy-uptime",
        "the count of restarts begins anew when the job has lived for 10 minutes. Delete the key",
    ),
    (
        "watch.log-silence-after",
        "the log says so after 30 minutes without output. To act on it earlier, set watch.no-output-for",
    ),
    (
        "store.accept-unsigned",
        "to continue once from images that are older than the key, use `rekindle run --accept-unsigned`",
    ),
    (
        "snapshot.lock-timeout",
        "use snapshot.freeze-limit, or the variable REKINDLE_LOCK_TIMEOUT for kernels that run for longer than 10 s",
    ),
    ("snapshot.freeze-timeout", "use snapshot.freeze-limit"),
    ("snapshot.dump-timeout", "use snapshot.freeze-limit"),
    ("group.port", "use group.network = \"vxlan:PORT\""),
    (
        "restart.retry-exit-codes",
        "use two rules: [[rules]] with match = { exit-code = [1, 137] } and action = \"restart\", then one with match = { cause = \"exit\" } and action = \"give-up\"",
    ),
    (
        "restart.never-retry-exit-codes",
        "use a rule: [[rules]] with match = { exit-code = 3 } and action = \"give-up\", or \"restart\" for 2, 126 and 127",
    ),
    ("restart.window", "restarts are counted within an hour. To allow more of them, set restart.max-restarts"),
    ("restart.backoff-max", "the pause before a restart grows to 5 minutes at most. Delete the key"),
    ("job.umask", "a job has the umask of its caller: set it there (umask in a shell, UMask= in a unit of systemd)"),
    ("network.uplink", "use network.mode = \"uplink\" in place of \"private\""),
    ("watch.gpu-faults", "faults of GPUs are always logged. Delete the key"),
    ("hooks.failed-snapshots", "on-failure is called after three failed snapshots in a row. Delete the key"),
    ("job.allow-io-uring", "use job.allow = [\"io-uring\"]"),
    ("job.allow-amx", "use job.allow = [\"amx\"]"),
    ("snapshot.retry-after", "a failed snapshot is tried again after 30 s, then with growing pauses. Delete the key"),
    ("job-api.max-hold", "the job may block snapshots for 60 s at a time. Delete the key"),
    ("[job-api]", "it had only max-hold: the job may block snapshots for 60 s at a time. Delete the table"),
    ("word.max-hold", "the job may block snapshots for 60 s at a time. Delete the key"),
    ("[word]", "it had only max-hold: the job may block snapshots for 60 s at a time. Delete the table"),
    (
        "hooks.on-group",
        "use after-snapshot for group-committed and group-aborted, and on-failure for group-member-lost",
    ),
];

/// Why this key or variable does not exist any more.
pub(super) fn removed(name: &str) -> Option<&'static str> {
    let variable = |path: &str| format!("REKINDLE_{}", path.to_uppercase().replace(['.', '-'], "_"));
    REMOVED.iter().find(|(path, _)| *path == name || variable(path) == name).map(|(_, why)| *why)
}

/// The key that `path` may mean: a typing error in its own section, or a name of another section.
pub(super) fn nearest(path: &str) -> Option<&'static str> {
    let path = path.to_lowercase().replace('_', "-");
    let (section, name) = split(&path);
    best(KEYS.iter().map(|key| {
        let (its_section, its_name) = split(key.path);
        (key.path, strsim::jaro_winkler(name, its_name), if section == its_section { SAME_SECTION } else { 0.0 })
    }))
}

/// The one of `words` that `word` may mean.
pub(super) fn nearest_word<'a>(word: &str, words: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    best(words.into_iter().map(|candidate| (candidate, strsim::jaro_winkler(word, candidate), 0.0)))
}

/// The CRIU that is used instead of the one that is found.
const CRIU: &str = "REKINDLE_CRIU";

/// How the names of variables begin that only tests and scripts of this repository read.
const OF_TESTS: [&str; 9] = ["TEST_", "SIMULATE_", "SWEEP", "CUT_", "DEMO_", "PACKAGE_", "SYSTEMD_", "LAB", "DEVICES"];

/// Whether this variable is known, or none of our business, although it sets no key.
pub(super) fn is_no_key(variable: &str) -> bool {
    let Some(name) = variable.strip_prefix(PREFIX) else { return true };
    let of_others = OF_JOB.iter().chain(&OF_OTHERS).any(|name| *name == variable);
    of_others || variable == CRIU || OF_TESTS.iter().any(|begin| name.starts_with(begin)) || is_service_link(name)
}

/// Kubernetes sets such variables in each container for a service of the name "rekindle" or "rekindle-metrics":
/// REKINDLE_METRICS_SERVICE_HOST, REKINDLE_METRICS_PORT_9464_TCP_ADDR.
fn is_service_link(name: &str) -> bool {
    let mut words = name.split('_').peekable();
    while let Some(word) = words.next() {
        match (word, words.peek()) {
            ("SERVICE", Some(&("HOST" | "PORT"))) | ("PORT", None) => return true,
            ("PORT", Some(number)) if number.bytes().all(|b| b.is_ascii_digit()) => return true,
            _ => {}
        }
    }
    false
}

/// How all our variables begin.
pub(super) const PREFIX: &str = "REKINDLE_";

/// The similarity from which a variable is taken for a misspelt one of ours, and refused.
const MISSPELT: f64 = 0.9;

/// The variable that an unknown one may mean, and whether that is nearly certain.
pub(super) fn nearest_variable(name: &str, known: &[String]) -> (Option<String>, bool) {
    let bare = |name: &str| name.strip_prefix(PREFIX).unwrap_or(name).to_owned();
    let typed = bare(name);
    // The common beginning would make all of them alike.
    let alike = known.iter().map(|known| (known, strsim::jaro_winkler(&typed, &bare(known))));
    let best = alike.reduce(|best, next| if next.1 > best.1 { next } else { best });
    match best.filter(|(_, alike)| *alike >= ALIKE) {
        Some((known, alike)) => (Some(known.clone()), alike >= MISSPELT),
        // The section may be missing: REKINDLE_INTERVAL.
        None => (nearest(&typed).and_then(|path| find(path)?.variable()), false),
    }
}

/// Section and name; keys without a section have an empty one.
fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('.').unwrap_or(("", path))
}

/// The best of (word, similarity, bonus) that is similar enough. If two are equal, the first: more common keys come
/// first in the file.
fn best<'a>(scored: impl Iterator<Item = (&'a str, f64, f64)>) -> Option<&'a str> {
    let likely = scored.filter(|(_, alike, _)| *alike >= ALIKE).map(|(word, alike, favour)| (word, alike + favour));
    likely.reduce(|best, next| if next.1 > best.1 { next } else { best }).map(|(word, _)| word)
}

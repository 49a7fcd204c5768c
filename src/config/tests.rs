//! The configuration as users see it: text in, values or messages out.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::model::LIMITS;
use super::value::HIDDEN;
use super::*;
use rekindle_base::Percentage;
use rekindle_base::units::{ByteSize, Malformed};
use rekindle_engine::restore::ChangedFiles;
use rekindle_replica::ReplicaUrl;
use rekindle_store::chunk::Compression;
use rekindle_store::options::Copies;

mod layering;
mod pages;
mod refusals;
mod sample;
mod trust;

/// Loads text as the file, without environment and flags.
fn load_text(text: &str) -> Result<Config, Error> {
    load_layers(text, &[], &Overrides::default()).map(|effective| effective.config)
}

/// Loads text as a file in a folder that only we can write to.
fn load_layers(text: &str, env: &[(&str, &str)], overrides: &Overrides) -> Result<Effective, Error> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rekindle.toml");
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    effective(Some(&path), env, overrides)
}

/// The problems of `text` as they are printed, without the folder.
fn problems(text: &str) -> Vec<String> {
    told(load_layers(text, &[], &Overrides::default()))
}

fn told(result: Result<Effective, Error>) -> Vec<String> {
    match result {
        Ok(_) => Vec::new(),
        Err(Error::Invalid(problems)) => problems
            .iter()
            .map(|problem| match &problem.origin {
                Origin::File { line, .. } => format!("{line}: {}", problem.fault),
                _ => problem.to_string(),
            })
            .collect(),
        Err(other) => panic!("not a list of problems: {other}"),
    }
}

/// Every key is set to a value other than its default.
const FULL: &str = r#"
version = 1
[job]
name = "train-7.b_C"
command = ["python3", "a b.py", ""]
directory = "/srv"
user = "alice"
stdin = "/srv/in"
environment-mode = "clean"
pass-environment = ["MASTER_ADDR", "SLURM_*"]
no-new-privileges = true
allow = ["amx", "io-uring"]
limits = { nofile = 65536, memlock = "unlimited", stack = "64MiB" }
[gpu]
nccl = "off"
memory = "kept"
full-copy-every = 16
[group]
nodes = 0
node-rank = 3
coordinator = ["https://10.0.0.1:2379"]
ca = "/etc/ca.pem"
certificate = "/etc/cert.pem"
key = "/etc/key.pem"
user = "rekindle"
password-file = "/etc/password"
network = "bridge:rk"
subnet = "10.9.0.0/24"
address = "10.0.0.7"
lease = "10s"
wait = "1h"
[files]
track = ["/data/db"]
[network]
mode = "host"
[snapshot]
interval = "90s"
max-overhead = "2.5%"
mean-time-between-failures = "12h"
grace = "1m 30s"
freeze-limit = "3s"
file-limit = "1GiB"
tcp = "close"
memory-reserve = "200GB"
rehearse = "off"
staging = "store"
staging-directory = "/dev/shm/rekindle"
interposer = "off"
[store]
directory = "/mnt/images"
keep-last = 1
keep-hourly = 24
keep-daily = 7
keep-within = "90days"
max-total-size = "500GB"
min-free = 4096
compression = "zstd:-3"
encryption-key = "/etc/key"
persist-rate = "500MB"
copies = 2
on-success = "remove"
[replica]
url = "s3://bucket/a"
keep-last = 9
rate = "1MiB"
[restart]
max-restarts = 0
on-process-death = "any"
backoff = "0s"
min-uptime = "1s"
cold-start = "never"
changed-files = "warn"
compare = "required"
restore-timeout = "30days"
[watch]
no-output-for = "15m"
no-cpu-for = "10m"
no-notify-for = "1m"
action = "snapshot-and-stop"
interruption = ["aws", "google"]
[scheduler]
profile = "slurm"
requeue = "scontrol"
deadline = "2026-11-22T06:00:00Z"
[hooks]
before-snapshot = ["sync-data", "-v"]
after-snapshot = ["/bin/after"]
before-restore = ["/bin/before"]
after-restore = ["/bin/after", "restore"]
on-failure = ["/bin/page", "me"]
on-completion = ["/bin/cheer"]
timeout = "5s"
on-error = "refuse"
[metrics]
textfile = "/var/lib/node/j.prom"
listen = "127.0.0.1:9464"
[log]
level = "trace"
format = "json"
max-size = "1.5MiB"
keep = 0
[control]
directory = "/run/elsewhere"

[criu]
path = "/opt/criu"
[[rules]]
match = { exit-code = 3, log = "NCCL" }
action = "restart"
[[rules]]
match = { signal = ["SIGSEGV"], cause = "signal" }
action = "give-up"
"#;

#[test]
fn every_key_can_be_set() {
    let config = load_text(FULL).unwrap();
    assert_eq!(config.job.name.as_deref(), Some("train-7.b_C"));
    assert_eq!(config.job.stdin, Stdin::File(PathBuf::from("/srv/in")));
    assert_eq!(config.job.limits.get("nofile"), Some(&Limit::Value(65536)));
    assert_eq!(config.job.limits.get("memlock"), Some(&Limit::Unlimited));
    assert_eq!(config.job.limits.get("stack"), Some(&Limit::Value(64 << 20)));
    assert_eq!(config.snapshot.interval, Interval::Every(Duration::from_secs(90)));
    assert_eq!(config.snapshot.max_overhead, Percentage::millionths(25_000));
    assert_eq!(config.snapshot.mean_time_between_failures, MeanTime::Known(Duration::from_secs(12 * 3600)));
    assert_eq!(config.snapshot.grace, Duration::from_secs(90));
    assert_eq!(config.snapshot.freeze_limit, Duration::from_secs(3));
    assert_eq!(config.snapshot.memory_reserve.bytes(), 200_000_000_000);
    assert_eq!(config.snapshot.staging, Staging::Store);
    assert_eq!(config.snapshot.interposer, Interposer::Off);
    assert_eq!(config.store.min_free.bytes(), 4096);
    assert_eq!(config.store.persist_rate, Rate::PerSecond(ByteSize::new(500_000_000)));
    assert_eq!((config.store.keep_hourly, config.store.keep_daily), (24, 7));
    assert_eq!(config.store.keep_within, Duration::from_secs(90 * 24 * 3600));
    assert_eq!(config.store.max_total_size.bytes(), Some(500_000_000_000));
    assert_eq!(config.store.compression, Compression::Zstd(-3));
    assert_eq!(config.store.encryption_key.as_deref(), Some(Path::new("/etc/key")));
    assert_eq!(config.store.copies, Copies::Two);
    assert_eq!(config.replica.url.as_ref().map(ReplicaUrl::bucket), Some("bucket"));
    assert_eq!(config.replica.rate, Rate::PerSecond(ByteSize::mib(1)));
    assert_eq!(config.log.max_size.bytes(), 3 << 19);
    assert_eq!(config.files.track, [Path::new("/data/db")]);
    assert_eq!(config.restart.changed_files, ChangedFiles::Warn);
    // No key has its default value, so every key of the list is read.
    let (set, built_in) = (table(&config), table(&Config::default()));
    let excepted = ["version", "job.environment", "network.mode", "group.nodes"];
    for key in keys::KEYS.iter().filter(|key| !excepted.contains(&key.path)) {
        assert_ne!(value_at(&set, key.path), None, "{}", key.path);
        assert_ne!(value_at(&set, key.path), value_at(&built_in, key.path), "{}", key.path);
    }
}

#[test]
fn a_tracked_folder_does_not_contain_what_is_rekindles() {
    let at = |track: &str, rest: &str| problems(&format!("version = 1\n[files]\ntrack = ['{track}']\n{rest}"));
    for rest in [
        "[store]\ndirectory = '/data/rekindle'",
        "[snapshot]\nstaging-directory = '/data/rekindle'",
        "[replica]\nurl = 'file:///data/rekindle/'",
    ] {
        for track in ["/data", "/data/rekindle"] {
            let told = at(track, rest);
            assert!(told.len() == 1 && told[0].contains("must not contain /data/rekindle"), "{told:?}");
        }
        load_text(&format!("version = 1\n[files]\ntrack = ['/data/run', '/data/rekindle2']\n{rest}")).unwrap();
    }
}

#[test]
fn the_list_of_keys_is_complete() {
    let all = table(&load_text(FULL).unwrap());
    let mut paths = BTreeSet::new();
    for (section, value) in &all {
        match value {
            toml::Value::Table(keys) => paths.extend(keys.keys().map(|key| format!("{section}.{key}"))),
            _ => drop(paths.insert(section.clone())),
        }
    }
    assert_eq!(paths, keys::KEYS.iter().map(|key| key.path.to_owned()).collect());
}

#[test]
fn written_out_and_read_again_it_is_the_same() {
    let config = load_text(FULL).unwrap();
    assert_eq!(load_text(&toml::to_string(&config).unwrap()).unwrap(), config);
    assert_eq!(load_text(&toml::to_string(&Config::default()).unwrap()).unwrap(), Config::default());
}

#[test]
fn values_of_the_environment_are_never_shown() {
    let text = "version = 1\n[job.environment]\nTOKEN = \"hunter2\"\n";
    let effective = load_layers(text, &[], &Overrides::default()).unwrap();
    assert_eq!(effective.config.job.environment.iter().collect::<Vec<_>>(), [("TOKEN", "hunter2")]);
    let shown = [
        format!("{effective:?}"),
        format!("{:?}", effective.entries()),
        serde_json::to_string(&effective.entries()).unwrap(),
        toml::to_string(&effective.config).unwrap(),
    ];
    for shown in &shown {
        assert!(shown.contains("TOKEN") && shown.contains(HIDDEN) && !shown.contains("hunter2"), "{shown}");
    }
    // They are not shown in messages about mistakes either.
    for broken in [
        "environment = \"TOKEN=hunter2\"",
        "environment = { TOKEN = [\"hunter2\"] }",
        "environment = { TOKEN = \"hunter2\\u0000\" }",
        "environment = { REKINDLE_JOB = \"hunter2\" }",
        "environment = { TOKEN = \"hunter2\" hunter2",
        "environment = { TOKEN = hunter2 }",
        "enviroment = { TOKEN = \"hunter2\" }",
    ] {
        let error = load_text(&format!("version = 1\n[job]\n{broken}\n")).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error} {error:?}");
    }
    for url in ["\"s3://me:hunter2@b/x\"", "\"s3://b/x?key=hunter2\"", "[\"s3://me:hunter2@b\"]"] {
        let error = load_text(&format!("version = 1\n[replica]\nurl = {url}\n")).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("hunter2"), "{error} {error:?}");
        assert!(error.to_string().contains("credentials come from the environment"), "{error}");
    }
    let error = load_text("version = 1\n[[job]]\nenvironment = { TOKEN = \"hunter2\" }\n").unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
}

#[test]
fn sizes_are_read_with_units_and_written_exactly() {
    for (text, bytes, written) in [
        ("64MiB", 64 << 20, "64MiB"),
        ("200GB", 200_000_000_000, "200GB"),
        ("200 gb", 200_000_000_000, "200GB"),
        ("1.5GiB", 3 << 29, "1536MiB"),
        ("0", 0, "0B"),
        ("4097", 4097, "4097B"),
        ("1024000", 1_024_000, "1000KiB"),
    ] {
        let size: ByteSize = text.parse().unwrap();
        assert_eq!((size.bytes(), size.to_string().as_str()), (bytes, written), "{text}");
        assert_eq!(written.parse::<ByteSize>().unwrap(), size);
    }
    for text in ["", "MiB", "12 parsecs", "-1", "99999999999EiB"] {
        assert_eq!(text.parse::<ByteSize>(), Err(Malformed), "{text}");
    }
}

#[test]
fn without_a_file_the_defaults_hold_and_are_valid() {
    let defaults = merge(Layers::default()).unwrap().0;
    assert_eq!(defaults, Config::default());
    assert_eq!(rules::broken(&defaults), []);
    let missing = Path::new("/nonexistent/rekindle.toml");
    let error = effective(Some(missing), std::iter::empty(), &Overrides::default()).unwrap_err();
    assert_eq!(error.to_string(), "cannot read the configuration /nonexistent/rekindle.toml");
}

#[test]
fn each_rule_is_checked_and_shown_with_its_line() {
    let text = "version = 1\n[[rules]]\nmatch = { exit-code = 3 }\naction = 'restart'\n\n[[rules]]\nmatch = { log = 'nan' }\naction = 'rewind'\nimages = 2\n";
    let effective = load_layers(text, &[], &Overrides::default()).unwrap();
    assert_eq!(effective.config.rules.len(), 2);
    let shown: Vec<_> = effective.entries().into_iter().filter(|entry| entry.key.starts_with("rules")).collect();
    let line = |entry: &Entry| if let Origin::File { line, .. } = entry.origin { line } else { 0 };
    assert_eq!(shown.iter().map(|e| (e.key.as_str(), line(e))).collect::<Vec<_>>(), [("rules.1", 2), ("rules.2", 6)]);
    assert!(shown[1].value.as_ref().unwrap().to_string().contains("rewind"));

    let many: String =
        (1..=12).map(|n| format!("[[rules]]\nmatch = {{ exit-code = {n} }}\naction = 'restart'\n")).collect();
    let codes = load_text(&format!("version = 1\n{many}")).unwrap().rules;
    assert!(codes.iter().zip(1u8..).all(|(rule, n)| rule.matches.exit_code.all() == [n]), "in the order of the file");

    for (rule, why) in [
        ("match = {}\naction = 'restart'", "must have at least one condition in match"),
        ("match = { exit-code = 0 }\naction = 'restart'", "must not match exit code 0"),
        ("match = { exit-code = 1 }\naction = 'rewind'\nimages = 4", "to store.keep-last, which is 3"),
        ("match = { exit-code = 1 }\naction = 'restart'\nimages = 1", "without action = \"rewind\""),
        ("match = { log = 'x', above = { group = 1, value = 1 } }\naction = 'restart'", "the group of match.above"),
        ("match = { log = '(' }\naction = 'restart'", "not a regular expression"),
        ("match = { exit-kode = 1 }\naction = 'restart'", "unknown field `exit-kode`"),
        ("match = { exit-code = 1 }\naction = 'pray'", "unknown variant `pray`"),
        ("match = { exit-code = 1 }", "missing field `action`"),
    ] {
        let told = problems(&format!("version = 1\n\n[[rules]]\n{rule}\n"));
        assert!(told.len() == 1 && told[0].starts_with("3: rules.1 = ") && told[0].contains(why), "{rule}: {told:?}");
    }
    let told = problems("version = 1\n[rules]\naction = 1\n");
    assert!(told.len() == 1 && told[0].contains("must be tables [[rules]] with match and action"), "{told:?}");
    assert_eq!(problems("version = 1\n[[rule]]\n").len(), 1);
}

//! Rules beyond the type of a value. They depend only on the configuration.

use std::path::Path;
use std::time::Duration;

use super::auto::MeanTime;
use super::group::{Coordinator, GroupNetwork};
use super::keys;
use super::model::{Config, LIMITS, VERSION};
use super::scheduler::Deadline;
use super::storage::SizeLimit;
use super::value::{ByteSize, Interval, Rate, Stdin};
use super::watch::RuleAction;
use crate::variables::OF_JOB;
use rekindle_base::Percentage;
use rekindle_replica::ReplicaUrl;

/// A key (or an entry of it), and the rule that its value breaks.
pub(super) type Broken = (String, String);

/// All broken rules, in the order of the file.
pub(super) fn broken(config: &Config) -> Vec<Broken> {
    let mut rules = Rules(Vec::new());
    rules.that(config.version == VERSION, "version", || {
        format!("must be {VERSION}, the only format that this version of rekindle can read")
    });
    job(config, &mut rules);
    group(config, &mut rules);
    gpu(config, &mut rules);
    snapshot(config, &mut rules);
    store(config, &mut rules);
    replica(config, &mut rules);
    restart(config, &mut rules);
    watch(config, &mut rules);
    endings(config, &mut rules);
    if let Some(Deadline::After(time)) = config.scheduler.deadline {
        rules.time("scheduler.deadline", time, Duration::from_secs(1), "");
    }
    hooks(config, &mut rules);
    rules.path("metrics.textfile", config.metrics.textfile.as_deref());
    let is_prom = |path: &Path| path.extension().is_some_and(|extension| extension == "prom");
    rules.that(config.metrics.textfile.as_deref().is_none_or(is_prom), "metrics.textfile", || {
        "must end with .prom, because node_exporter reads no other files".to_owned()
    });
    rules.that(config.metrics.listen.is_none_or(|address| !address.ip().is_multicast()), "metrics.listen", || {
        "must be an address of this machine".to_owned()
    });
    rules.that(config.log.max_size.bytes() >= 4096, "log.max-size", || {
        "must be at least 4KiB, because each rotation creates a file".to_owned()
    });
    rules.path("control.directory", Some(&config.control.directory));
    rules.path("criu.path", config.criu.path.as_deref());
    rules.0
}

struct Rules(Vec<Broken>);

/// Longer times are mistakes ("10M" is ten months, "10m" ten minutes), and the clock's arithmetic must not overflow.
const LONGEST: Duration = Duration::from_secs(30 * 24 * 3600);

/// Smaller values are mistakes: this is one second of ten thousand.
const LEAST_OVERHEAD: Percentage = Percentage::millionths(100);

/// Larger values make Daly's formula non-monotone if freezes are long compared with the mean time between failures.
const MOST_OVERHEAD: Percentage = Percentage::millionths(500_000);

/// Ten years of 365.25 days, as humantime counts them.
const LONGEST_MEAN_TIME: Duration = Duration::from_secs(10 * 31_557_600);

/// The same limit, so that the calendar contains the time that long ago.
const LONGEST_AGE: Duration = LONGEST_MEAN_TIME;

/// At this rate, 64 GiB (little for a training job) take 18 hours.
const SLOWEST: ByteSize = ByteSize::mib(1);

/// Smaller values are mistakes: no image is that small.
const SMALLEST: ByteSize = ByteSize::mib(1);

impl Rules {
    fn that(&mut self, holds: bool, key: &str, rule: impl FnOnce() -> String) {
        if !holds {
            self.0.push((key.to_owned(), rule()));
        }
    }

    fn time(&mut self, key: &str, value: Duration, least: Duration, reason: &str) {
        let at_least = || format!("must be at least {}{reason}", humantime::format_duration(least));
        self.that(value >= least, key, at_least);
        self.that(value <= LONGEST, key, || "must be at most 30days (m is a minute, M a month)".to_owned());
    }

    fn path(&mut self, key: &str, value: Option<&Path>) {
        let Some(path) = value else { return };
        self.that(path.is_absolute(), key, || {
            "must be an absolute path: the job and a restart may have another working directory".to_owned()
        });
        let text = path.to_string_lossy();
        self.that(!text.contains('\0'), key, || "must not contain a zero byte".to_owned());
        // U+FFFD replaces bytes of a flag or variable that are not UTF-8.
        self.that(!text.contains('\u{fffd}'), key, || "must be valid UTF-8".to_owned());
    }

    fn rate(&mut self, key: &str, rate: Rate) {
        let Rate::PerSecond(rate) = rate else { return };
        self.that(rate >= SLOWEST, key, || {
            format!("must be at least {SLOWEST}, or \"unlimited\": a slower copy of an image takes days")
        });
    }
}

/// Whether a name can be a folder in the store and a word in a message.
fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=64).contains(&name.len()) && !name.starts_with(['.', '-']) && name.chars().all(allowed)
}

/// Shorter leases end when a machine is busy for a moment.
const SHORTEST_LEASE: Duration = Duration::from_secs(5);

fn group(config: &Config, rules: &mut Rules) {
    let group = &config.group;
    for (key, path) in [
        ("group.ca", &group.ca),
        ("group.certificate", &group.certificate),
        ("group.key", &group.key),
        ("group.password-file", &group.password_file),
    ] {
        rules.path(key, path.as_deref());
    }
    rules.that(group.certificate.is_some() == group.key.is_some(), "group.key", || {
        "must be set together with group.certificate".to_owned()
    });
    rules.that(group.user.is_some() == group.password_file.is_some(), "group.password-file", || {
        "must be set together with group.user".to_owned()
    });
    rules.time("group.lease", group.lease, SHORTEST_LEASE, "");
    rules.that(group.lease.subsec_nanos() == 0, "group.lease", || "must be whole seconds, as etcd counts".to_owned());
    rules.time("group.wait", group.wait, Duration::from_secs(1), "");
    // All machines of a bridge are this one.
    let of_vxlan = group.address.filter(|_| matches!(group.network, GroupNetwork::Vxlan(_)));
    let is_reached = of_vxlan.is_none_or(|address| !address.is_loopback() && !address.is_unspecified());
    rules.that(is_reached, "group.address", || {
        "must be an address at which the other machines reach this one, which they do not with a loopback address"
            .to_owned()
    });
    if !group.is_on() {
        return;
    }
    let is_empty = group.coordinator == Coordinator::default();
    rules.that(!is_empty, "group.coordinator", || {
        "must be set if group.nodes is set: the machines of a group agree through etcd. \"local\" starts one".to_owned()
    });
    if matches!(group.coordinator, Coordinator::Local(_)) {
        for (key, is_set) in [
            ("group.ca", group.ca.is_some()),
            ("group.certificate", group.certificate.is_some()),
            ("group.user", group.user.is_some()),
        ] {
            rules.that(!is_set, key, || {
                "does not apply to group.coordinator = \"local\", which has keys of its own".to_owned()
            });
        }
    }
    rules.that(group.nodes <= group.subnet.0.room(), "group.subnet", || {
        format!("must have an address for each of the {} machines (group.nodes)", group.nodes)
    });
    rules.that(group.node_rank.is_none_or(|rank| rank < group.nodes), "group.node-rank", || {
        format!("must be below group.nodes, which is {}", group.nodes)
    });
}

fn job(config: &Config, rules: &mut Rules) {
    let job = &config.job;
    rules.that(job.command.first().is_none_or(|program| !program.is_empty()), "job.command", || {
        "must begin with a program".to_owned()
    });
    rules.that(!job.command.iter().any(|word| word.contains('\0')), "job.command", || {
        "must not contain a zero byte".to_owned()
    });
    rules.that(job.name.as_deref().is_none_or(is_name), "job.name", || {
        "must be 1 to 64 characters from A-Z a-z 0-9 . _ - and not begin with . or -".to_owned()
    });
    rules.path("job.directory", job.directory.as_deref());
    let is_user =
        |user: &str| !user.is_empty() && !user.contains(|c: char| c == ':' || c.is_whitespace() || c.is_control());
    rules.that(job.user.as_deref().is_none_or(is_user), "job.user", || {
        "must be a user's name or number, without spaces or colons".to_owned()
    });
    if let Stdin::File(path) = &job.stdin {
        rules.path("job.stdin", Some(path));
    }
    for (name, value) in job.environment.iter() {
        let key = format!("job.environment.{name}");
        rules.that(!name.is_empty() && !name.contains(['=', '\0']), &key, || {
            "must have a name without = or a zero byte".to_owned()
        });
        rules.that(!value.contains('\0'), &key, || "must not contain a zero byte".to_owned());
        rules
            .that(!OF_JOB.contains(&name), &key, || "must not be set, because rekindle sets it for the job".to_owned());
    }
    let is_variable = |name: &String| {
        let beginning = name.strip_suffix('*').unwrap_or(name);
        !beginning.is_empty() && !beginning.contains(['=', '*', '\0'])
    };
    rules.that(job.pass_environment.iter().all(is_variable), "job.pass-environment", || {
        "must be names of variables without =, or the beginning of names followed by *".to_owned()
    });
    for name in job.limits.keys() {
        rules.that(LIMITS.contains(&name.as_str()), &format!("job.limits.{name}"), || {
            let nearest = keys::nearest_word(name, LIMITS.iter().copied());
            let hint = nearest.map(|nearest| format!("; did you mean {nearest}?")).unwrap_or_default();
            format!("must be one of the limits {}{hint}", LIMITS.join(", "))
        });
    }
}

fn gpu(config: &Config, rules: &mut Rules) {
    rules.that(config.gpu.full_copy_every >= 1, "gpu.full-copy-every", || {
        "must be at least 1; with 1 each snapshot copies all GPU memory".to_owned()
    });
}

fn snapshot(config: &Config, rules: &mut Rules) {
    let snapshot = &config.snapshot;
    let second = Duration::from_secs(1);
    if let Interval::Every(interval) = snapshot.interval {
        let reason = ", or \"off\", because each snapshot freezes the job";
        rules.time("snapshot.interval", interval, Duration::from_millis(100), reason);
    }
    rules.that((LEAST_OVERHEAD..=MOST_OVERHEAD).contains(&snapshot.max_overhead), "snapshot.max-overhead", || {
        format!(
            "must be from {LEAST_OVERHEAD} to {MOST_OVERHEAD}; with more, the job would be frozen longer than it runs"
        )
    });
    if let MeanTime::Known(time) = snapshot.mean_time_between_failures {
        let key = "snapshot.mean-time-between-failures";
        rules.that(time >= second, key, || "must be at least 1s".to_owned());
        rules.that(time <= LONGEST_MEAN_TIME, key, || {
            "must be at most 10years (m is a minute, M a month). For a job that never fails, set snapshot.interval"
                .to_owned()
        });
    }
    if let Some(every) = snapshot.rehearse.limit() {
        rules.time("snapshot.rehearse", every, second, ", or \"off\"");
    }
    rules.time("snapshot.grace", snapshot.grace, second, ", because a stop takes its final snapshot within it");
    rules.time("snapshot.freeze-limit", snapshot.freeze_limit, second, "");
    for folder in &config.files.track {
        rules.path("files.track", Some(folder));
        // A restore would take the images away that were made since.
        for (key, own) in rekindle_folders(config) {
            rules.that(!own.starts_with(folder), "files.track", || {
                let (folder, own) = (folder.display(), own.display());
                format!(
                    "must not contain {own} ({key}), as {folder} does: name only the folders that the job writes to"
                )
            });
        }
    }
    rules.path("snapshot.staging-directory", Some(&snapshot.staging_directory));
}

/// The folders with images, and the key of each.
fn rekindle_folders(config: &Config) -> Vec<(&'static str, &Path)> {
    let replica = config.replica.url.as_ref().and_then(ReplicaUrl::folder);
    let mut all = vec![
        ("store.directory", &*config.store.directory),
        ("snapshot.staging-directory", &*config.snapshot.staging_directory),
    ];
    all.extend(replica.map(|folder| ("replica.url", folder)));
    all
}

fn store(config: &Config, rules: &mut Rules) {
    rules.path("store.directory", Some(&config.store.directory));
    rules.that(config.store.keep_last >= 1, "store.keep-last", || {
        "must be at least 1, because the newest good image is never removed".to_owned()
    });
    rules.that(config.store.keep_within <= LONGEST_AGE, "store.keep-within", || {
        "must be at most 10years (m is a minute, M a month)".to_owned()
    });
    if let SizeLimit::AtMost(size) = config.store.max_total_size {
        rules.that(size >= SMALLEST, "store.max-total-size", || {
            format!("must be at least {SMALLEST}, or \"unlimited\": no image is smaller")
        });
    }
    rules.path("store.encryption-key", config.store.encryption_key.as_deref());
    rules.rate("store.persist-rate", config.store.persist_rate);
}

fn replica(config: &Config, rules: &mut Rules) {
    rules.that(config.replica.keep_last >= 1, "replica.keep-last", || {
        "must be at least 1, because the newest good image is never removed".to_owned()
    });
    rules.rate("replica.rate", config.replica.rate);
}

fn restart(config: &Config, rules: &mut Rules) {
    let restart = &config.restart;
    let second = Duration::from_secs(1);
    rules.time("restart.backoff", restart.backoff, Duration::ZERO, "");
    rules.time("restart.min-uptime", restart.min_uptime, Duration::ZERO, "");
    rules.time("restart.restore-timeout", restart.restore_timeout, second, "");
}

fn hooks(config: &Config, rules: &mut Rules) {
    let hooks = &config.hooks;
    for (key, words) in [
        ("hooks.before-snapshot", &hooks.before_snapshot),
        ("hooks.after-snapshot", &hooks.after_snapshot),
        ("hooks.before-restore", &hooks.before_restore),
        ("hooks.after-restore", &hooks.after_restore),
        ("hooks.on-failure", &hooks.on_failure),
        ("hooks.on-completion", &hooks.on_completion),
    ] {
        let is_program = |word: &String| word.starts_with('/') || !(word.is_empty() || word.contains('/'));
        rules.that(words.first().is_none_or(is_program), key, || {
            "must begin with a program: an absolute path, or a name to find in PATH".to_owned()
        });
        rules.that(!words.iter().any(|word| word.contains('\0')), key, || "must not contain a zero byte".to_owned());
    }
    rules.time("hooks.timeout", hooks.timeout, Duration::from_millis(100), "");
}

fn watch(config: &Config, rules: &mut Rules) {
    let watch = &config.watch;
    let clocks = [
        ("watch.no-output-for", watch.no_output_for),
        ("watch.no-cpu-for", watch.no_cpu_for),
        ("watch.no-notify-for", watch.no_notify_for),
    ];
    for (key, patience) in clocks {
        if let Some(limit) = patience.limit() {
            rules.time(key, limit, Duration::from_millis(100), ", or \"off\"");
        }
    }
}

/// More rules would be a program, and each line of output is compared with all of them.
const MOST_RULES: usize = 99;

fn endings(config: &Config, rules: &mut Rules) {
    for (n, rule) in (1usize..).zip(&config.rules) {
        let key = format!("rules.{n}");
        rules.that(n <= MOST_RULES, &key, || format!("must be removed: at most {MOST_RULES} rules are allowed"));
        rules.that(!rule.matches.is_empty(), &key, || {
            "must have at least one condition in match: exit-code, signal, cause, xid or log".to_owned()
        });
        rules.that(!rule.matches.exit_code.all().contains(&0), &key, || {
            "must not match exit code 0, which means success and ends the job".to_owned()
        });
        let groups = rule.matches.log.as_ref().map_or(0, super::Pattern::groups);
        rules.that(rule.matches.above.is_none_or(|above| (1..groups).contains(&above.group)), &key, || {
            "must have the group of match.above in match.log; groups are counted from 1".to_owned()
        });
        let rewinds = rule.action == RuleAction::Rewind;
        rules.that(rewinds || (rule.images.is_none() && rule.max_rewinds.is_none()), &key, || {
            "must not set images or max-rewinds without action = \"rewind\"".to_owned()
        });
        let kept = config.store.keep_last;
        rules.that(!rewinds || (1..=kept).contains(&rule.images.unwrap_or(1)), &key, || {
            format!("must have images from 1 (the newest) to store.keep-last, which is {kept}")
        });
        rules.that(!rewinds || rule.max_rewinds() >= 1, &key, || "must have max-rewinds of at least 1".to_owned());
    }
}

//! Defaults < file < environment < flags.

use super::*;
use crate::variables;

const FILE: &str = "version = 1\n[snapshot]\ninterval = \"1m\"\n[store]\nkeep-last = 7\n[job.limits]\nnofile = 1\n";

fn origin(effective: &Effective, key: &str) -> String {
    let entry = effective.entries().into_iter().find(|entry| entry.key == key);
    match entry.unwrap_or_else(|| panic!("{key} is not shown")).origin {
        Origin::File { line, .. } => format!("line {line}"),
        other => other.to_string(),
    }
}

#[test]
fn each_layer_is_stronger_than_the_one_before() {
    let none = Overrides::default();
    let file = load_layers(FILE, &[], &none).unwrap();
    assert_eq!(file.config.snapshot.interval, Interval::Every(Duration::from_secs(60)));
    assert_eq!(origin(&file, "snapshot.interval"), "line 3");
    assert_eq!(origin(&file, "snapshot.grace"), "default");
    assert_eq!(origin(&file, "job.name"), "default");

    let env = [("REKINDLE_SNAPSHOT_INTERVAL", "2m"), ("REKINDLE_STORE_DIRECTORY", "/env")];
    let environment = load_layers(FILE, &env, &none).unwrap();
    assert_eq!(environment.config.snapshot.interval, Interval::Every(Duration::from_secs(120)));
    assert_eq!(environment.config.store.keep_last, 7);
    assert_eq!(origin(&environment, "snapshot.interval"), "REKINDLE_SNAPSHOT_INTERVAL");
    assert_eq!(origin(&environment, "store.keep-last"), "line 5");

    let overrides = Overrides {
        name: Some("a".to_owned()),
        interval: Some("off".to_owned()),
        grace: Some("2m".to_owned()),
        deadline: Some("8h".to_owned()),
        store: Some(PathBuf::from("images")),
        nodes: None,
        node_rank: None,
        coordinator: None,
    };
    let flags = load_layers(FILE, &env, &overrides).unwrap();
    assert_eq!(flags.config.snapshot.interval, Interval::Off);
    assert_eq!(flags.config.job.name.as_deref(), Some("a"));
    assert_eq!(flags.config.store.directory, std::env::current_dir().unwrap().join("images"));
    assert_eq!(origin(&flags, "snapshot.interval"), "--interval");
    assert_eq!(origin(&flags, "store.directory"), "--store");
    assert_eq!(flags.config.snapshot.grace, Duration::from_secs(120));
    assert_eq!(flags.config.scheduler.deadline, Some(Deadline::After(Duration::from_secs(8 * 3600))));
    assert_eq!(origin(&flags, "scheduler.deadline"), "--deadline");
}

#[test]
fn a_variable_is_read_as_the_type_of_its_key() {
    let env = [
        ("REKINDLE_STORE_KEEP_LAST", "5"),
        ("REKINDLE_JOB_NAME", "42"),
        ("REKINDLE_JOB_COMMAND", " python3  train.py"),
        ("REKINDLE_JOB_NO_NEW_PRIVILEGES", "true"),
        ("REKINDLE_STORE_MIN_FREE", "1048576"),
        ("REKINDLE_STORE_PERSIST_RATE", "2097152"),
        ("REKINDLE_STORE_MAX_TOTAL_SIZE", "3145728"),
        ("REKINDLE_STORE_COMPRESSION", "lz4"),
        ("REKINDLE_REPLICA_URL", "gs://b/c"),
        ("REKINDLE_REPLICA_KEEP_LAST", "2"),
        ("REKINDLE_SNAPSHOT_INTERVAL", "auto"),
        ("REKINDLE_SNAPSHOT_MAX_OVERHEAD", "0.5%"),
        ("REKINDLE_SNAPSHOT_MEAN_TIME_BETWEEN_FAILURES", "6h"),
        ("REKINDLE_SCHEDULER_PROFILE", "none"),
        ("REKINDLE_SCHEDULER_DEADLINE", "@1795327200"),
        ("REKINDLE_JOB_LIMITS", "nofile=2,core=unlimited"),
        ("REKINDLE_JOB_ENVIRONMENT", "A=b=c, D="),
    ];
    let effective = load_layers(FILE, &env, &Overrides::default()).unwrap();
    let config = &effective.config;
    assert_eq!(config.store.keep_last, 5);
    assert_eq!(config.job.name.as_deref(), Some("42"));
    assert_eq!(config.job.command, ["python3", "train.py"]);
    assert_eq!(config.job.no_new_privileges, Some(true));
    assert_eq!(config.store.min_free.bytes(), 1 << 20);
    assert_eq!(config.store.persist_rate, Rate::PerSecond(ByteSize::mib(2)));
    assert_eq!(config.store.max_total_size, SizeLimit::AtMost(ByteSize::mib(3)));
    assert_eq!(config.store.compression, Compression::Lz4);
    assert_eq!(config.replica.url.as_ref().map(ReplicaUrl::as_str), Some("gs://b/c"));
    assert_eq!(config.replica.keep_last, 2);
    assert_eq!(config.snapshot.interval, Interval::Auto);
    assert_eq!(config.snapshot.max_overhead, Percentage::millionths(5_000));
    assert_eq!(config.snapshot.mean_time_between_failures, MeanTime::Known(Duration::from_secs(6 * 3600)));
    assert_eq!(config.scheduler.profile, Profile::None);
    assert_eq!(config.scheduler.deadline.map(|at| at.to_string()).as_deref(), Some("2026-11-22T06:00:00Z"));
    assert_eq!(config.job.limits.get("nofile"), Some(&Limit::Value(2)));
    assert_eq!(config.job.environment.iter().collect::<Vec<_>>(), [("A", "b=c"), ("D", "")]);
    assert_eq!(origin(&effective, "job.limits.core"), "REKINDLE_JOB_LIMITS");
}

#[test]
fn a_wrong_variable_or_flag_is_named() {
    let env = [
        ("REKINDLE_SNAPSHOT_INTERVAL", "soon"),
        ("REKINDLE_STORE_KEEP_LAST", "few"),
        ("REKINDLE_STORE_KEEPLAST", "3"),
        ("REKINDLE_JOB_NO_NEW_PRIVILEGES", "yes"),
        ("REKINDLE_JOB_LIMITS", "nofile"),
        ("REKINDLE_STORE_DIRECTORY", "/x\u{fffd}"),
    ];
    let overrides = Overrides { interval: Some("0s".to_owned()), ..Overrides::default() };
    let told = told(load_layers(FILE, &env, &overrides));
    assert_eq!(
        told,
        [
            "REKINDLE_JOB_LIMITS: job.limits = \"nofile\": must be NAME=VALUE, separated by commas; put values with \
             commas in the file",
            "REKINDLE_JOB_NO_NEW_PRIVILEGES: job.no-new-privileges = \"yes\": must be true or false",
            "REKINDLE_SNAPSHOT_INTERVAL: snapshot.interval = \"soon\": must be \"auto\", \"off\" or a duration with a \
             unit, such as \"90s\" or \"10m\"",
            "REKINDLE_STORE_DIRECTORY: store.directory = \"/x\u{fffd}\": must be valid UTF-8",
            "unknown variable REKINDLE_STORE_KEEPLAST: did you mean REKINDLE_STORE_KEEP_LAST?",
            "REKINDLE_STORE_KEEP_LAST: store.keep-last = \"few\": must be a whole number from 0 to 4294967295",
            "--interval \"0s\": must be at least 100ms, or \"off\", because each snapshot freezes the job",
        ]
    );
}

#[test]
fn a_variable_for_emergencies_is_read_with_its_unit() {
    let with = |value| load_layers(FILE, &[("REKINDLE_LOCK_TIMEOUT", value)], &Overrides::default());
    let set = with("1m").unwrap();
    assert_eq!((set.strangers.len(), set.config.snapshot.lock_timeout()), (0, Duration::from_secs(60)));
    assert_eq!(set.config.snapshot.stop_limit(), Duration::from_secs(10));
    assert_eq!(told(with("60")), ["REKINDLE_LOCK_TIMEOUT = 60: must be a time from 1ms to 1day, such as \"60s\""]);
}

#[test]
fn a_freeze_limit_bounds_the_parts_that_only_wait() {
    let of =
        |limit: &str| load_text(&format!("version = 1\n[snapshot]\nfreeze-limit = \"{limit}\"\n")).unwrap().snapshot;
    let seconds = Duration::from_secs;
    assert_eq!(
        (of("3s").stop_limit(), of("3s").lock_timeout(), of("3s").lock_limit()),
        (seconds(3), seconds(3), seconds(3))
    );
    assert_eq!(
        (of("2h").stop_limit(), of("2h").lock_timeout(), of("2h").lock_limit()),
        (seconds(10), seconds(10), seconds(10))
    );
}

#[test]
fn other_variables_are_left_alone() {
    let mut env = vec![
        ("REKINDLE_CRIU", "/x"),
        ("REKINDLE_TEST_REQUIRE", "root"),
        // Kubernetes describes services to containers like this.
        ("REKINDLE_SERVICE_HOST", "10.0.0.1"),
        ("REKINDLE_METRICS_SERVICE_PORT_HTTP", "9464"),
        ("REKINDLE_METRICS_PORT", "tcp://10.0.0.1:9464"),
        ("REKINDLE_METRICS_PORT_9464_TCP_ADDR", "10.0.0.1"),
        ("STORE_KEEP_LAST", "x"),
    ];
    env.extend(variables::OF_JOB.iter().chain(&variables::OF_OTHERS).map(|name| (*name, "x")));
    let with = load_layers(FILE, &env, &Overrides::default()).unwrap();
    assert_eq!(with.config, load_text(FILE).unwrap());
    assert_eq!(with.strangers, [""; 0]);
}

#[test]
fn a_variable_that_looks_like_ours_is_named() {
    let none = Overrides::default();
    for (name, expected) in [
        ("REKINDLE_STORE_PTH", "unknown variable REKINDLE_STORE_PTH"),
        (
            "REKINDLE_STROE_DIRECTORY",
            "unknown variable REKINDLE_STROE_DIRECTORY: did you mean REKINDLE_STORE_DIRECTORY?",
        ),
    ] {
        let told = told(load_layers(FILE, &[(name, "x")], &none));
        assert!(told.len() == 1 && told[0].starts_with(expected), "{name}: {told:?}");
    }
    let ignored = "is ignored: rekindle does not know it";
    for (name, expected) in [
        ("REKINDLE_VERSION", String::new()),
        ("REKINDLE_INTERVAL", "; did you mean REKINDLE_SNAPSHOT_INTERVAL?".to_owned()),
        ("REKINDLE_KEEP_LAST", "; did you mean REKINDLE_STORE_KEEP_LAST?".to_owned()),
        ("REKINDLE_CONFIG", "; name the file with --config".to_owned()),
    ] {
        let with = load_layers(FILE, &[(name, "x")], &none).unwrap();
        assert_eq!(with.strangers, [format!("the variable {name} {ignored}{expected}")]);
    }
}

#[test]
fn wrong_flags_are_told_from_a_wrong_configuration() {
    let flag = Overrides { grace: Some("x".to_owned()), ..Overrides::default() };
    let error = load_layers("version = 1\n", &[], &flag).unwrap_err();
    assert!(error.is_usage());
    assert_eq!(error.to_string(), "--grace \"x\": must be a duration with a unit, such as \"90s\" or \"10m\"");
    let both = load_layers("version = 2\n", &[], &flag).unwrap_err();
    assert!(!both.is_usage() && both.to_string().starts_with("the configuration is wrong:\n"), "{both}");
}

#[test]
fn a_later_file_overrides_an_earlier_one_key_by_key_and_its_rules_replace_the_earlier_ones() {
    let mut layers = Layers::default();
    let rule = |cause: &str| format!("[[rules]]\nmatch = {{ cause = {cause:?} }}\naction = \"restart\"\n");
    let machine =
        format!("version = 1\n[store]\nkeep-last = 7\nmin-free = \"2GiB\"\n{}{}", rule("signal"), rule("hang"));
    layers.file(Path::new("machine"), &machine);
    layers.file(Path::new("project"), &format!("version = 1\n[store]\nkeep-last = 3\n{}", rule("exit")));
    let (config, settings) = merge(layers).unwrap();
    assert_eq!((config.store.keep_last, config.store.min_free.bytes(), config.rules.len()), (3, 2 << 30, 1));
    let origin = |key: &str| settings[key].origin.to_string();
    assert_eq!((origin("store.keep-last"), origin("store.min-free")), ("project:3".into(), "machine:4".into()));
    assert!(origin("rules.1").starts_with("project:"));
}

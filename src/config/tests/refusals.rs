//! Refused values with their messages, and borderline values that are accepted.

use super::*;

/// A file with the section on line 2 and the value on line 3.
fn in_section(section: &str, line: &str) -> String {
    format!("version = 1\n[{section}]\n{line}\n")
}

#[test]
fn a_removed_key_says_what_to_do() {
    let found = problems(&in_section("restart", "lazy = \"on\""));
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("restart.lazy was removed") && found[0].ends_with("Delete the key"), "{found:?}");
}

#[test]
fn a_removed_key_is_no_key_and_is_told_as_a_variable_too() {
    for (path, _) in keys::REMOVED.iter().filter(|(path, _)| !path.starts_with('[')) {
        assert_eq!(keys::find(path), None, "{path}");
        let variable = format!("REKINDLE_{}", path.to_uppercase().replace(['.', '-'], "_"));
        // Kubernetes sets REKINDLE_GROUP_PORT for a service of the name rekindle-group.
        if keys::is_no_key(&variable) {
            continue;
        }
        let told = load_layers("version = 1\n", &[(&variable, "1")], &Overrides::default()).unwrap_err().to_string();
        assert!(told.contains(&format!("{variable} was removed: ")), "{told}");
    }
}

#[test]
fn the_coordinator_is_local_or_a_list_of_addresses() {
    use crate::config::Coordinator;
    let read =
        |value: &str| load_text(&in_section("group", &format!("coordinator = {value}"))).unwrap().group.coordinator;
    let file = || Some("/shared/bert.json".into());
    assert_eq!(read("\"local\""), Coordinator::Local(None));
    assert_eq!(read("\"local:/shared/bert.json\""), Coordinator::Local(file()));
    assert_eq!(read("\"http://a:2379\""), Coordinator::Members(vec!["http://a:2379".into()]));
    let env = [("REKINDLE_GROUP_COORDINATOR", "local:/shared/bert.json")];
    let found = load_layers("version = 1\n", &env, &Overrides::default()).unwrap().config.group.coordinator;
    assert_eq!(found, Coordinator::Local(file()));
    for wrong in ["[\"local\", \"http://a:2379\"]", "\"local:bert.json\"", "\"local:\"", "\"local:/shared/\"", "7"] {
        let found = problems(&in_section("group", &format!("coordinator = {wrong}")));
        assert!(found.len() == 1 && found[0].contains("\"local:FILE\" with an absolute path"), "{wrong}: {found:?}");
    }
    let of = |more: &str| problems(&in_section("group", &format!("nodes = 2\ncoordinator = \"local\"\n{more}")));
    assert!(of("").is_empty());
    assert!(of("ca = \"/etc/ca.pem\"")[0].contains("which has keys of its own"));
    assert!(problems(&in_section("group", "nodes = 2"))[0].contains("\"local\" starts one"));
}

#[test]
fn an_address_that_only_this_machine_has_is_refused() {
    let of = |more: &str| problems(&in_section("group", more));
    for wrong in ["127.0.0.1", "127.0.1.1", "0.0.0.0", "::1"] {
        let found = of(&format!("address = \"{wrong}\""));
        assert!(found.len() == 1 && found[0].contains("group.address"), "{wrong}: {found:?}");
        assert!(
            of(&format!("address = \"{wrong}\"\nnetwork = \"bridge:br0\"")).is_empty(),
            "all machines are this one"
        );
    }
    assert!(of("address = \"10.0.0.7\"").is_empty());
}

#[test]
fn the_machines_of_a_group_are_joined_by_vxlan_or_a_bridge() {
    let read = |value: &str| load_text(&in_section("group", &format!("network = \"{value}\""))).unwrap().group.network;
    assert_eq!((read("vxlan"), read("vxlan:4789")), (GroupNetwork::default(), GroupNetwork::default()));
    assert_eq!(read("vxlan:4790"), GroupNetwork::Vxlan(4790));
    for wrong in
        ["vxlan:", "vxlan:0", "vxlan:65536", "vlan", "bridge", "bridge:", "bridge:a/b", "bridge:abcdefghijklmnop"]
    {
        let found = problems(&in_section("group", &format!("network = \"{wrong}\"")));
        assert!(found.len() == 1 && found[0].contains("\"vxlan:PORT\" with a port"), "{wrong}: {found:?}");
    }
}

#[test]
fn a_removed_table_says_what_to_do() {
    let told = problems("version = 1\n[job-api]\nmax-hold = \"2m\"\n");
    assert!(
        told.len() == 1 && told[0].starts_with("2: [job-api] was removed: ") && told[0].ends_with("Delete the table"),
        "{told:?}"
    );
}

#[test]
fn each_rule_refuses_with_key_value_and_rule() {
    let duration = "must be a duration with a unit, such as \"90s\" or \"10m\"";
    let path = "must be an absolute path: the job and a restart may have another working directory";
    let name = "must be 1 to 64 characters from A-Z a-z 0-9 . _ - and not begin with . or -";
    let user = "must be a user's name or number, without spaces or colons";
    let size = "must be a size such as \"64MiB\" or \"200GB\", or a whole number of bytes";
    let limit = "must be \"unlimited\", a whole number or a size such as \"64MiB\" for each limit";
    let longest = "must be at most 30days (m is a minute, M a month)";
    let interval = "must be \"auto\", \"off\" or a duration with a unit, such as \"90s\" or \"10m\"";
    let whole = "must be a whole number from 0 to 4294967295";
    let share = "must be a percentage of the time, such as \"1%\" or \"0.5%\"";
    let overhead = "must be from 0.01% to 50%; with more, the job would be frozen longer than it runs";
    let mean_time = "must be \"observed\" or a duration with a unit, such as \"12h\" or \"30days\"";
    let rate = "must be \"unlimited\", or a size per second such as \"500MB\" or a whole number of bytes";
    let slow = "must be at least 1MiB, or \"unlimited\": a slower copy of an image takes days";
    let limited = "must be \"unlimited\", a size such as \"64MiB\" or \"200GB\", or a whole number of bytes";
    let compression = "must be \"auto\", \"none\", \"lz4\", \"zstd\", or \"zstd:LEVEL\" with a level from -7 to 19";
    let url = "must be s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///PATH, without user, password or \
               query: credentials come from the environment";
    let long = format!("\"{}\"", "n".repeat(65));
    let refused: &[(&str, &str, &str, &str)] = &[
        ("job", "name", "\"\"", name),
        ("job", "name", "\".hidden\"", name),
        ("job", "name", "\"-f\"", name),
        ("job", "name", "\"a/b\"", name),
        ("job", "name", "\"ä\"", name),
        ("job", "name", &long, name),
        ("job", "name", "7", "must be a string"),
        ("job", "directory", "\"here\"", path),
        ("job", "user", "\"\"", user),
        ("job", "user", "\"a:b\"", user),
        ("job", "stdin", "\"tty\"", "must be \"null\", \"inherit\" or an absolute path"),
        ("job", "environment-mode", "\"none\"", "must be \"inherit\" or \"clean\""),
        ("job", "allow", "[\"perf\"]", "must be a list of \"io-uring\" and \"amx\""),
        ("job", "no-new-privileges", "\"true\"", "must be true or false"),
        ("job", "command", "\"python3\"", "must be a list of strings, such as [\"python3\", \"train.py\"]"),
        ("job", "command", "[\"\", \"x\"]", "must begin with a program"),
        ("job.limits", "nofile", "-1", limit),
        ("job.limits", "stack", "\"much\"", limit),
        (
            "snapshot",
            "interval",
            "\"99ms\"",
            "must be at least 100ms, or \"off\", because each snapshot freezes the job",
        ),
        ("snapshot", "interval", "\"Auto\"", interval),
        ("snapshot", "interval", "600", interval),
        ("snapshot", "interval", "\"600\"", interval),
        ("snapshot", "interval", "\"10M\"", longest),
        ("snapshot", "max-overhead", "1", share),
        ("snapshot", "max-overhead", "0.01", share),
        ("snapshot", "max-overhead", "\"1\"", share),
        ("snapshot", "max-overhead", "\"-1%\"", share),
        ("snapshot", "max-overhead", "\"0%\"", overhead),
        ("snapshot", "max-overhead", "\"50.0001%\"", overhead),
        ("snapshot", "mean-time-between-failures", "\"known\"", mean_time),
        ("snapshot", "mean-time-between-failures", "24", mean_time),
        ("snapshot", "mean-time-between-failures", "\"999ms\"", "must be at least 1s"),
        (
            "snapshot",
            "mean-time-between-failures",
            "\"11years\"",
            "must be at most 10years (m is a minute, M a month). For a job that never fails, set snapshot.interval",
        ),
        ("snapshot", "grace", "\"0s\"", "must be at least 1s, because a stop takes its final snapshot within it"),
        ("snapshot", "freeze-limit", "\"999ms\"", "must be at least 1s"),
        ("network", "mode", "\"none\"", "must be \"host\", \"private\" or \"uplink\""),
        ("gpu", "nccl", "\"none\"", "must be \"auto\", \"no-peer\" or \"off\""),
        ("gpu", "memory", "\"auto\"", "must be \"copied\" or \"kept\""),
        ("snapshot", "tcp", "\"drop\"", "must be \"auto\", \"keep\" or \"close\""),
        ("snapshot", "memory-reserve", "-1", size),
        ("snapshot", "memory-reserve", "\"1 parsec\"", size),
        ("snapshot", "staging", "\"disk\"", "must be \"ram\" or \"store\""),
        ("snapshot", "staging-directory", "\"run\"", path),
        ("control", "directory", "\"run\"", path),
        ("gpu", "full-copy-every", "0", "must be at least 1; with 1 each snapshot copies all GPU memory"),
        ("snapshot", "interposer", "\"on\"", "must be \"auto\" or \"off\""),
        ("store", "directory", "\"images\"", path),
        ("store", "directory", "\"/a\\u0000b\"", "must not contain a zero byte"),
        ("store", "keep-last", "0", "must be at least 1, because the newest good image is never removed"),
        ("store", "keep-last", "-1", whole),
        ("store", "keep-last", "4294967296", whole),
        ("store", "persist-rate", "\"fast\"", rate),
        ("store", "persist-rate", "-1", rate),
        ("store", "persist-rate", "0", slow),
        ("store", "persist-rate", "\"1MB\"", slow),
        ("store", "keep-hourly", "-1", whole),
        ("store", "keep-daily", "\"7\"", whole),
        ("store", "keep-within", "7", duration),
        ("store", "keep-within", "\"11years\"", "must be at most 10years (m is a minute, M a month)"),
        ("store", "max-total-size", "\"all\"", limited),
        ("store", "max-total-size", "-1", limited),
        ("store", "max-total-size", "0", "must be at least 1MiB, or \"unlimited\": no image is smaller"),
        ("store", "compression", "\"zstd:20\"", compression),
        ("store", "compression", "true", compression),
        ("store", "encryption-key", "\"key\"", path),
        ("store", "copies", "0", "must be 1 or 2"),
        ("store", "copies", "3", "must be 1 or 2"),
        ("store", "copies", "\"two\"", "must be 1 or 2"),
        ("replica", "url", "\"http://b\"", url),
        ("replica", "url", "7", url),
        ("replica", "keep-last", "0", "must be at least 1, because the newest good image is never removed"),
        ("replica", "rate", "\"1 parsec\"", rate),
        ("replica", "rate", "1", slow),
        ("store", "on-success", "\"delete\"", "must be \"remove\" or \"keep\""),
        ("restart", "max-restarts", "1.5", whole),
        ("restart", "min-uptime", "\"31days\"", longest),
        ("restart", "cold-start", "false", "must be \"no-images\", \"allow\" or \"never\""),
        ("restart", "restore-timeout", "\"0s\"", "must be at least 1s"),
        ("scheduler", "requeue", "\"qsub\"", "must be \"exit-code\" or \"scontrol\""),
        ("scheduler", "deadline", "\"10ms\"", "must be at least 1s"),
        ("log", "level", "\"loud\"", "must be \"error\", \"warn\", \"notice\", \"info\", \"debug\" or \"trace\""),
        ("log", "max-size", "4095", "must be at least 4KiB, because each rotation creates a file"),
        ("log", "keep", "\"5\"", whole),
        ("criu", "path", "\"criu\"", path),
    ];
    for (section, key, value, rule) in refused {
        let told = problems(&in_section(section, &format!("{key} = {value}")));
        assert_eq!(told, [format!("3: {section}.{key} = {value}: {rule}")]);
    }
}

#[test]
fn what_just_keeps_a_rule_is_accepted() {
    let longest = format!("name = \"{}\"", "n".repeat(64));
    for (section, line) in [
        ("job", longest.as_str()),
        ("job", "name = \"_.-9\""),
        ("job", "user = \"1000\""),
        ("job", "stdin = \"inherit\""),
        ("job", "environment = {}"),
        ("job.environment", "\"WITH.DOT\" = \"\""),
        ("job.limits", "as = \"18446744073709551614\""),
        ("job.limits", "rtprio = 0"),
        ("network", "mode = \"private\""),
        ("network", "mode = \"uplink\""),
        ("snapshot", "interval = \"off\""),
        ("snapshot", "interval = \"100ms\""),
        ("snapshot", "interval = \"auto\""),
        ("snapshot", "max-overhead = \"0.01%\""),
        ("snapshot", "max-overhead = \"50 %\""),
        ("snapshot", "mean-time-between-failures = \"1s\""),
        ("snapshot", "mean-time-between-failures = \"10years\""),
        ("store", "keep-last = 4294967295"),
        ("store", "persist-rate = 1048576"),
        ("store", "keep-hourly = 0"),
        ("store", "keep-within = \"10years\""),
        ("store", "max-total-size = 1048576"),
        ("store", "compression = \"zstd:19\""),
        ("store", "encryption-key = \"/k\""),
        ("store", "copies = 1"),
        ("store", "copies = \"2\""),
        ("replica", "url = \"file:///mnt\""),
        ("replica", "keep-last = 1"),
        ("replica", "rate = \"unlimited\""),
        ("log", "max-size = \"4KiB\""),
    ] {
        assert_eq!(problems(&in_section(section, line)), [""; 0], "{line}");
    }
}

#[test]
fn unknown_keys_name_the_line_and_the_nearest() {
    for (text, expected) in [
        ("[store]\nkeep_last = 3", "3: unknown key store.keep_last: did you mean store.keep-last?"),
        ("[store]\nKeep-Last = 3", "3: unknown key store.Keep-Last: did you mean store.keep-last?"),
        ("[store]\nkeep = 3", "3: unknown key store.keep: did you mean store.keep-last?"),
        ("[snapshot]\n\nkeep-last = 3", "4: unknown key snapshot.keep-last: did you mean store.keep-last?"),
        (
            "[snapshot]\nmax-overhaed = \"1%\"",
            "3: unknown key snapshot.max-overhaed: did you mean snapshot.max-overhead?",
        ),
        ("[snapshot]\npersist-rate = 3", "3: unknown key snapshot.persist-rate: did you mean store.persist-rate?"),
        ("[store]\ninterval = 3", "3: unknown key store.interval: did you mean snapshot.interval?"),
        ("[store]\nkeep-dayly = 3", "3: unknown key store.keep-dayly: did you mean store.keep-daily?"),
        ("[replica]\nkeeplast = 3", "3: unknown key replica.keeplast: did you mean replica.keep-last?"),
        ("[replicas]\nx = 3", "2: unknown table [replicas]: did you mean [replica]?"),
        ("interval = \"5m\"", "2: unknown key interval: did you mean snapshot.interval?"),
        ("versoin = 1", "2: unknown key versoin: did you mean version?"),
        ("store.keep-lats = 1", "2: unknown key store.keep-lats: did you mean store.keep-last?"),
        ("[restart]\nzzz = 1", "3: unknown key restart.zzz"),
        ("[snapshots]\ninterval = \"5m\"", "2: unknown table [snapshots]: did you mean [snapshot]?"),
        ("[xyz]", "2: unknown table [xyz]"),
        (
            "[job.limits]\nnofiles = 1",
            "3: job.limits.nofiles = 1: must be one of the limits as, core, cpu, data, fsize, locks, memlock, msgqueue, \
             nice, nofile, nproc, rss, rtprio, rttime, sigpending, stack; did you mean nofile?",
        ),
        ("store = 3", "2: store = integer: must be a table, written [store]"),
        ("[[store]]\nkeep-last = 3", "2: store = array: must be a table, written [store]"),
        ("[store.keep-last]\nx = 1", "2: store.keep-last = { x = 1 }: must be a whole number from 0 to 4294967295"),
        ("[version]", "1: version = {}: must be 1"),
    ] {
        let head = if text == "[version]" { "" } else { "version = 1\n" };
        assert_eq!(problems(&format!("{head}{text}\n")), [expected], "{text}");
    }
}

#[test]
fn the_version_is_required_by_name() {
    assert_eq!(problems("[store]\nkeep-last = 2\n"), ["1: version is missing. Add the line: version = 1"]);
    assert_eq!(problems(""), ["1: version is missing. Add the line: version = 1"]);
    assert_eq!(
        problems("version = 2\n"),
        ["1: version = 2: must be 1, the only format that this version of rekindle can read"]
    );
    assert_eq!(problems("version = \"1\"\n"), ["1: version = \"1\": must be 1"]);
}

#[test]
fn everything_wrong_is_reported_at_once_from_the_top() {
    let text =
        "[snapshot]\nfreeze-limit = \"0s\"\ntcp = \"?\"\n[store]\nkep-last = 1\nkeep-last = 0\n[log]\nkeep = -1\n";
    let lines: Vec<String> = problems(text).iter().map(|line| line.split(" = ").next().unwrap().to_owned()).collect();
    assert_eq!(
        lines,
        [
            "1: version is missing. Add the line: version",
            "2: snapshot.freeze-limit",
            "3: snapshot.tcp",
            "5: unknown key store.kep-last: did you mean store.keep-last?",
            "6: store.keep-last",
            "8: log.keep",
        ]
    );
    let all = load_text(text).unwrap_err().to_string();
    assert_eq!(all.lines().count(), 7, "{all}");
    assert!(all.contains("rekindle.toml:2: snapshot.freeze-limit = \"0s\": must be at least 1s"), "{all}");
}

#[test]
fn what_is_no_toml_names_the_line() {
    for (text, line) in [
        ("version = 1\n[store\n", "2: "),
        ("version = 1\n[store]\nkeep-last = \n", "3: "),
        ("version = 1\n[store]\nkeep-last = 1\nkeep-last = 2\n", "4: "),
        ("version = 99999999999999999999\n", "1: "),
    ] {
        let told = problems(text);
        assert!(told.len() == 1 && told[0].starts_with(&format!("{line}not valid TOML: ")), "{told:?}");
    }
}

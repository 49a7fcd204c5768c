//! The job's environment: which of our variables it gets.
//!
//! Some variables configure rekindle's replica and hooks, with credentials. They are not for the job, which may belong
//! to another user: the job gets them only if its own configuration names them (`job.pass-environment`). The job's
//! environment is in its memory, and so in its images.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};

use crate::config::{self, Config, EnvironmentMode};
use crate::supervisor::notify;
use rekindle_engine::launch::identity::Identity;
use rekindle_replica as replica;

/// Variables of the caller that a job gets even with a clean environment. The last two name its GPUs, which a scheduler
/// or an administrator assigned.
const ALWAYS: [&str; 8] =
    ["PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"];

/// The job's output is a file, where Python would hold back up to 8 KiB: `rekindle logs -f` would show nothing for
/// minutes, and a job that is killed would lose its last lines. An empty value leaves it off (cmdline.html of Python).
const UNBUFFERED: &str = "PYTHONUNBUFFERED";

/// The whole environment, and the variables that the job did not get.
pub(super) struct Environment {
    pub(super) variables: BTreeMap<OsString, OsString>,
    /// Variables that are only for rekindle, by name.
    withheld: BTreeSet<String>,
    /// Number of other variables that the job does not get because it runs as another user.
    left_out: usize,
}

/// Makes the environment from the caller's variables.
pub(super) fn of(
    config: &Config,
    user: Option<&Identity>,
    callers: impl IntoIterator<Item = (OsString, OsString)>,
) -> Environment {
    let job = &config.job;
    let mode = job.starts_from();
    let mut environment = Environment { variables: BTreeMap::new(), withheld: BTreeSet::new(), left_out: 0 };
    for (name, value) in callers {
        if notify::VARIABLES.iter().any(|ours| name == *ours) {
            continue;
        }
        let text = name.to_string_lossy();
        let is_ours = config::may_hold_secret(&text)
            || config.replica.url.as_ref().is_some_and(|url| replica::reads_variable(url, &text));
        let keep = match mode {
            _ if job.passes(&text) => true,
            EnvironmentMode::Inherit => !is_ours,
            EnvironmentMode::Clean => ALWAYS.contains(&&*text),
        };
        if keep {
            environment.variables.insert(name, value);
        } else if mode == EnvironmentMode::Inherit {
            environment.withheld.insert(text.into_owned());
        } else {
            environment.left_out += 1;
        }
    }
    let mut add = |name: &str, value: &OsStr| environment.variables.insert(name.into(), value.into());
    if let Some(user) = user {
        add("HOME", user.home.as_os_str());
        add("USER", user.name.as_ref());
        add("LOGNAME", user.name.as_ref());
    }
    for (name, value) in job.environment.iter() {
        add(name, value.as_ref());
        environment.withheld.remove(name);
    }
    environment.variables.entry(UNBUFFERED.into()).or_insert_with(|| "1".into());
    environment
}

impl Environment {
    /// Logs which variables the job does not get, and how to pass them: names only.
    pub(super) fn tell(&self, config: &Config) {
        if !self.withheld.is_empty() {
            let names: Vec<&str> = self.withheld.iter().map(String::as_str).collect();
            tracing::warn!(
                "the job does not get {}, because rekindle uses them for the replica or for hooks. If the job needs \
                one too, add it to job.pass-environment",
                names.join(", ")
            );
        }
        if self.left_out > 0 && config.job.environment_mode.is_none() {
            tracing::info!(
                "job.user is set, so the job does not get the caller's environment ({} variables are left out). Add \
                those that it needs to job.pass-environment, or set job.environment-mode = \"inherit\"",
                self.left_out
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(keys: &str) -> Config {
        toml::from_str(&format!("version = 1\n{keys}")).unwrap()
    }

    fn given(config: &Config, callers: &[&str]) -> (Vec<String>, Vec<String>) {
        let callers = callers.iter().map(|name| (OsString::from(name), OsString::from("value")));
        let made = of(config, None, callers);
        let names = made.variables.into_keys().map(|name| name.into_string().unwrap());
        let names = names.filter(|name| name != UNBUFFERED).collect();
        (names, made.withheld.into_iter().collect())
    }

    const CALLERS: [&str; 9] = [
        "AWS_SECRET_ACCESS_KEY",
        "AWS_CA_BUNDLE",
        "AZURE_CLIENT_SECRET",
        "CUDA_VISIBLE_DEVICES",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "NOTIFY_SOCKET",
        "PATH",
        "REKINDLE_HOOKS_ON_FAILURE",
        "REKINDLE_STORE_DIRECTORY",
    ];

    #[test]
    fn only_what_our_replica_is_reached_with_is_ours() {
        for (url, ours) in [
            ("s3://b/p", &["AWS_SECRET_ACCESS_KEY"][..]),
            ("gs://b/p", &["GOOGLE_APPLICATION_CREDENTIALS"]),
            ("az://b/p", &["AZURE_CLIENT_SECRET"]),
            ("file:///p", &[]),
        ] {
            let (given, withheld) = given(&config(&format!("replica.url = {url:?}")), &CALLERS);
            assert_eq!(withheld, [ours, &["REKINDLE_HOOKS_ON_FAILURE"]].concat(), "{url}");
            assert!(given.iter().all(|name| !withheld.contains(name)) && !given.contains(&"NOTIFY_SOCKET".into()));
            assert_eq!(given.len() + withheld.len(), CALLERS.len() - 1);
        }
    }

    #[test]
    fn what_the_configuration_names_is_given() {
        let named =
            config("replica.url = \"s3://b/p\"\njob.pass-environment = [\"AWS_*\", \"REKINDLE_HOOKS_ON_FAILURE\"]");
        assert_eq!(given(&named, &CALLERS).1, [""; 0]);
        let set = config("replica.url = \"s3://b/p\"\njob.environment = { AWS_SECRET_ACCESS_KEY = \"its own\" }");
        let (given, withheld) = given(&set, &CALLERS);
        assert!(given.contains(&"AWS_SECRET_ACCESS_KEY".into()));
        assert_eq!(withheld, ["REKINDLE_HOOKS_ON_FAILURE"]);
    }

    #[test]
    fn python_writes_lines_as_they_come_unless_the_user_says_otherwise() {
        let made = |keys: &str, callers: &[(&str, &str)]| {
            let callers = callers.iter().map(|(name, value)| (OsString::from(name), OsString::from(value)));
            of(&config(keys), None, callers).variables.remove(std::ffi::OsStr::new(UNBUFFERED)).unwrap()
        };
        assert_eq!(made("", &[]), "1");
        assert_eq!(made("", &[(UNBUFFERED, "")]), "");
        assert_eq!(made("job.environment = { PYTHONUNBUFFERED = \"\" }", &[]), "");
    }

    #[test]
    fn another_user_begins_with_little() {
        let other = config("job.user = \"alice\"");
        assert_eq!(given(&other, &CALLERS).0, ["CUDA_VISIBLE_DEVICES", "PATH"]);
        let passed = config("job.user = \"alice\"\njob.pass-environment = [\"AWS_CA*\"]");
        assert_eq!(given(&passed, &CALLERS).0, ["AWS_CA_BUNDLE", "CUDA_VISIBLE_DEVICES", "PATH"]);
        let inherits = config("job.user = \"alice\"\njob.environment-mode = \"inherit\"");
        assert!(given(&inherits, &CALLERS).0.contains(&"AWS_SECRET_ACCESS_KEY".into()));
        assert!(other.job.keeps_its_rights() && !config("").job.keeps_its_rights());
        assert!(!config("job.user = \"alice\"\njob.no-new-privileges = false").job.keeps_its_rights());
    }
}

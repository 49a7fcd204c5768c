//! What a job, and the tools that look at it, get of rekindle's own environment and rights.

use std::fs;

use crate::supervisor::{LIMIT, Lab, comes};

/// What the clients of replicas read, and what the tests look for in the environment of others.
const SECRETS: [(&str, &str); 4] = [
    ("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE"),
    ("AWS_SECRET_ACCESS_KEY", "of-the-replica"),
    ("REKINDLE_HOOKS_ON_FAILURE", "tell --token of-the-hooks"),
    ("AZURE_STORAGE_ACCOUNT_KEY", "of-somebody-else"),
];

fn secrets() -> Vec<(String, String)> {
    // Nobody listens there: nothing is sent before the job has ended.
    let endpoint = [("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), ("AWS_REGION", "r"), ("AWS_ALLOW_HTTP", "true")];
    SECRETS.into_iter().chain(endpoint).map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

const FRESH: [&str; 5] = ["run", "--fresh", "--name", "j", "--"];

#[test]
fn a_job_gets_none_of_the_credentials_of_the_replica() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("replica.url", "\"s3://bucket/path\"");
    let (out, said) = lab.run_with_environment(&FRESH, ["env"], &secrets()).ends_with(0);
    assert!(!out.contains("AWS_ACCESS") && !out.contains("of-the-") && !out.contains("AWS_ENDPOINT"), "{out}");
    // It has nothing to do with a replica in S3, and is the job's as everything else is.
    assert!(out.contains("AZURE_STORAGE_ACCOUNT_KEY=of-somebody-else") && out.contains("REKINDLE_LAB="), "{out}");
    assert!(said.contains("AWS_SECRET_ACCESS_KEY") && said.contains("job.pass-environment"), "{said}");
    assert!(!said.contains("of-the-"), "{said}");

    // What the job's configuration names is given.
    let lab = lab.set("job.pass-environment", "[\"AWS_*\"]");
    let (out, _) = lab.run_with_environment(&FRESH, ["env"], &secrets()).ends_with(0);
    assert!(out.contains("AWS_SECRET_ACCESS_KEY=of-the-replica") && !out.contains("of-the-hooks"), "{out}");
    let lab = lab.without("job.pass-environment").set("job.environment", "{ AWS_ACCESS_KEY_ID = \"its own\" }");
    let (out, _) = lab.run_with_environment(&FRESH, ["env"], &secrets()).ends_with(0);
    assert!(out.contains("AWS_ACCESS_KEY_ID=its own") && !out.contains("of-the-"), "{out}");
}

#[test]
fn a_job_of_another_user_gets_a_clean_environment_and_no_new_privileges() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("job.user", "\"nobody\"");
    let show = ["sh", "-c", "env; grep NoNewPrivs /proc/self/status"];
    let others = [("CUDA_VISIBLE_DEVICES", "1"), ("MASTER_ADDR", "node1")].map(|(n, v)| (n.to_owned(), v.to_owned()));
    let given: Vec<_> = secrets().into_iter().chain(others).collect();
    let (out, said) = lab.run_with_environment(&FRESH, show, &given).ends_with(0);
    assert!(!out.contains("AWS_") && !out.contains("of-") && !out.contains("MASTER_ADDR"), "{out}");
    assert!(out.contains("NoNewPrivs:\t1") && out.contains("CUDA_VISIBLE_DEVICES=1"), "{out}");
    assert!(said.contains("job.pass-environment"), "{said}");

    let lab = lab.set("job.pass-environment", "[\"MASTER_ADDR\"]").set("job.no-new-privileges", "false");
    let (out, _) = lab.run_with_environment(&FRESH, show, &given).ends_with(0);
    assert!(out.contains("MASTER_ADDR=node1") && out.contains("NoNewPrivs:\t0") && !out.contains("of-"), "{out}");
    // Who asks for all gets all.
    let lab = lab.set("job.environment-mode", "\"inherit\"");
    let (out, _) = lab.run_with_environment(&FRESH, show, &given).ends_with(0);
    assert!(out.contains("of-somebody-else"), "{out}");
}

#[test]
fn a_tool_that_looks_at_a_process_has_its_rights_and_nothing_of_ours() {
    let Some(lab) = Lab::new() else { return };
    let tools = lab.file("tools");
    fs::create_dir(&tools).unwrap();
    lab.script("tools/eu-stack", "/usr/bin/id -u; /bin/grep -E '^(Cap|NoNew|Groups)' /proc/self/status; /usr/bin/env");
    let path = format!("{}:/usr/bin:/bin", tools.display());
    let variables = [("PATH".to_owned(), path), ("HOME".to_owned(), "/root/secret".to_owned())];
    let variables: Vec<_> = variables.into_iter().chain(secrets()).collect();
    for (user, id, capabilities) in [("nobody", "65534", "0000000000000000"), ("root", "0", "")] {
        let Some(lab) = Lab::new() else { return };
        let lab = lab.set("job.user", &format!("{user:?}")).set("watch.no-output-for", "\"3s\"");
        let mut run = lab.run_with_environment(&FRESH, ["sleep", "3600"], &variables);
        run.wait_said("stacks-1.txt");
        let text = fs::read_to_string(lab.store().join("j/log/stacks-1.txt")).unwrap();
        let (_, by_tool) = text.split_once("by eu-stack\n").unwrap_or_else(|| panic!("{text}"));
        assert_eq!(by_tool.lines().next(), Some(id), "{text}");
        assert!(by_tool.contains(&format!("CapEff:\t{capabilities}")), "{text}");
        assert!(by_tool.contains("NoNewPrivs:\t1"), "{text}");
        let (secret, ours) = (by_tool.contains("of-"), by_tool.contains("/root/secret"));
        assert!(!secret && !ours && !by_tool.contains("REKINDLE_"), "{text}");
        run.signal(nix::sys::signal::Signal::SIGINT);
        drop(run);
        assert!(comes(LIMIT, || lab.processes().is_empty()));
    }
}

//! The metrics of a real run, over HTTP and as a file, read by the parsers of prometheus_client; and the log in JSON.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{LIMIT, Lab};

/// A Python with prometheus_client: what `scripts/deps.sh prometheus` made.
fn parser() -> Option<PathBuf> {
    let python = Path::new(env!("CARGO_MANIFEST_DIR")).join(".deps/prometheus/bin/python");
    let why = format!("there is no {}; scripts/deps.sh prometheus makes it", python.display());
    rekindle_testing::needs("prometheus", Some(python).filter(|python| python.is_file()), &why)
}

const SCRIPT: &str = "
import importlib, json, sys
parse = importlib.import_module(sys.argv[1]).text_string_to_metric_families
families = {f.name: {'type': f.type, 'samples': [[s.name, s.labels, s.value] for s in f.samples]} for f in parse(sys.stdin.read())}
json.dump(families, sys.stdout)
";

/// All samples by name and labels, as that parser reads them.
fn samples(python: &Path, parser: &str, text: &str) -> Vec<(String, Value, f64)> {
    let mut child =
        Command::new(python).args(["-c", SCRIPT, parser]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success(), "{parser} refuses\n{text}");
    let families: Value = serde_json::from_slice(&out.stdout).unwrap();
    let families = families.as_object().unwrap();
    assert_eq!(families["rekindle_freeze_seconds"]["type"], "histogram");
    let all = families.values().flat_map(|family| family["samples"].as_array().unwrap());
    all.map(|sample| (sample[0].as_str().unwrap().to_owned(), sample[1].clone(), sample[2].as_f64().unwrap())).collect()
}

fn scrape(address: SocketAddr) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
    body.to_owned()
}

fn value(samples: &[(String, Value, f64)], name: &str, label: Option<(&str, &str)>) -> Option<f64> {
    let fits = |labels: &Value| labels["job"] == "j" && label.is_none_or(|(key, value)| labels[key] == value);
    samples.iter().find(|(found, labels, _)| found == name && fits(labels)).map(|(_, _, value)| *value)
}

#[test]
fn the_numbers_of_a_run_are_served_and_written() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set_file("metrics.textfile", "j.prom").set("metrics.listen", "\"127.0.0.1:0\"");
    let mut run = until_after_snapshot(&lab, "plain");
    run.crash(&lab);
    count_on(&lab, &mut run, 2);
    let address = lab.published().unwrap().metrics.unwrap();
    let served = scrape(address);
    finish(&lab, run);
    let written = lab.read("j.prom");
    for text in [&served, &written] {
        assert!(text.contains("rekindle_snapshots_taken_total{job=\"j\"} 1\n"), "{text}");
    }
    let Some(python) = parser() else { return };
    for (parser, text) in [
        ("prometheus_client.openmetrics.parser", &served),
        ("prometheus_client.parser", &served),
        ("prometheus_client.parser", &written),
    ] {
        let samples = samples(&python, parser, text);
        let value = |name, label| value(&samples, name, label);
        assert_eq!(value("rekindle_snapshots_taken_total", None), Some(1.0));
        assert_eq!(value("rekindle_failures_total", None), Some(1.0));
        assert_eq!(value("rekindle_restarts_total", None), Some(1.0));
        assert_eq!(value("rekindle_freeze_seconds_count", None), Some(1.0));
        assert_eq!(value("rekindle_stored_images_total", None), Some(1.0));
        assert!(value("rekindle_last_freeze_phase_seconds", Some(("phase", "dump"))).is_some_and(|time| time > 0.0));
        assert!(value("rekindle_last_image_bytes", None).is_some_and(|bytes| bytes > 1000.0));
        assert!(value("rekindle_lost_work_seconds_total", None).is_some_and(|time| time > 0.0));
        assert!(value("rekindle_goodput_ratio", None).is_some_and(|share| share > 0.0 && share < 1.0));
        let state = if text == &served { "running" } else { "done" };
        assert_eq!(value("rekindle_state", Some(("state", state))), Some(1.0), "{text}");
    }
    assert!(written.contains("rekindle_finished{job=\"j\",outcome=\"completed\"} 1"), "{written}");
}

#[test]
fn an_address_that_is_taken_and_a_folder_that_is_not_there_harm_nothing() {
    let Some(lab) = Lab::new() else { return };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let lab = lab.set("metrics.listen", &format!("\"{}\"", taken.local_addr().unwrap()));
    let lab = lab.set("metrics.textfile", "\"/proc/nowhere/j.prom\"");
    let (_, said) = lab.run(["true"]).ends_with(0);
    assert!(said.contains("cannot serve metrics at 127.0.0.1:") && said.contains("/proc/nowhere/j.prom"), "{said}");
}

#[test]
fn the_log_in_json_is_json_to_the_last_line() {
    let Some(lab) = Lab::new() else { return };
    let lab = lab.set("log.format", "\"json\"").set("restart.max-restarts", "0");
    let (_, said) = lab.run(["/bin/sh", "-c", "exit 3"]).ends_with(3);
    let lines: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() >= 3, "{said}");
    for line in &lines {
        assert!(["time", "level", "message"].iter().all(|key| line[*key].is_string()), "{line}");
    }
    assert!(lines.iter().any(|line| line["message"] == "job j starts" && line["job"] == "j"), "{said}");
    // What fails before there is a job.
    let (_, said) = lab.run(["/no/such/program"]).ends_with(127);
    assert!(said.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()) && !said.is_empty(), "{said}");
}

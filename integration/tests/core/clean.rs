//! What a job chooses, names and words, reaches no terminal as it is.

use std::fs;
use std::process::Output;

use crate::supervisor::{Lab, python, wait_for};

/// Sets a title, turns the line around, begins a line of its own, moves the cursor (C1).
const BAD: &str = "x\u{1b}]0;pwned\u{7}\u{202e}gpj\n INFO all is well\u{9b}2J";

fn assert_clean(what: &str, text: &str) {
    let bad = text.find(|c: char| c.is_control() && !"\n\t".contains(c) || matches!(c, '\u{202e}'));
    assert!(bad.is_none(), "{what}: {:?} in\n{text:?}", bad.map(|at| text[at..].chars().next()));
    // On a page a line break is none.
    assert!(
        text.starts_with("<!DOCTYPE") || !text.lines().any(|line| line.starts_with(" INFO all is well")),
        "{what}:\n{text:?}"
    );
}

fn text(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap() + &String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn names_that_a_job_chooses_are_shown_and_not_obeyed() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.level", "\"debug\"")) else { return };
    let script = "import ctypes, os, sys, time
bad = sys.argv[1]
os.mkdir(bad); os.chdir(bad)
log = open(bad + 'file', 'w')
ctypes.CDLL(None).prctl(15, bad.encode()[:15], 0, 0, 0)
log.write('1'); log.flush()
print('ready', flush=True)
while not os.path.exists('../go'): time.sleep(0.01)
if not os.path.exists('../died'):
    open('../died', 'w').close()
    log.write('x' * 5000000); log.flush()
    os._exit(9)
print('back', flush=True)
time.sleep(1000)";
    let mut run = lab.run([python().unwrap().to_str().unwrap(), "-Sc", script, BAD]);
    run.wait_printed("ready\n");
    run.snapshot(&lab);
    let commands: [&[&str]; 9] = [
        &["show", "j"],
        &["show", "j", "--json"],
        &["status"],
        &["status", "--json"],
        &["status", "j"],
        &["list"],
        &["list", "j"],
        &["list", "--json"],
        &["verify", "j"],
    ];
    let look = || {
        for command in commands {
            let output = lab.rekindle(command);
            assert!(output.status.success(), "{command:?}: {}", text(&output));
            assert_clean(&format!("{command:?}"), &text(&output));
        }
    };
    look();
    let shown = text(&lab.rekindle(&["show", "j"]));
    for line in ["command ", "process ", "open file ", "directory "] {
        let found = shown.lines().any(|found| found.starts_with(line));
        assert!(found, "no {line:?} in\n{shown}");
    }
    assert!(shown.contains("\\x1b]0;pwned\\x07\\u{202e}gpj\\x0a INFO all is well\\u{9b}2J"), "{shown}");
    // JSON says what it is.
    let json: serde_json::Value = serde_json::from_slice(&lab.rekindle(&["show", "j", "--json"]).stdout).unwrap();
    assert!(json["command"].as_array().unwrap().contains(&BAD.into()), "{json}");

    // It is restored, and its file put back: the log names that.
    fs::write(lab.file("go"), "").unwrap();
    run.wait_printed("back\n");
    wait_for("it is said", || run.err().contains("was put back"));
    look();
    let page = text(&lab.rekindle(&["report", "j", "--out", "-"]));
    assert!(page.contains("</html>"), "{page}");
    assert_clean("report", &page);
    assert_clean("report --json", &text(&lab.rekindle(&["report", "j", "--json"])));
    assert_clean("the log", &run.err());
    assert_clean("the journal", &fs::read_to_string(lab.store().join("j/log/events.jsonl")).unwrap());
    // A name in an error, too.
    let error = lab.rekindle(&["show", BAD]);
    assert!(!error.status.success());
    assert_clean("an error", &text(&error));
    lab.kill_9(run);
}

/// Where there is no one to trust, words of a job are words: in the log for programs as well.
#[test]
fn a_log_in_json_is_clean_and_says_what_was_said() {
    let Some(lab) = Lab::new().map(|lab| lab.set("log.format", "\"json\"")) else { return };
    let run = lab.run([BAD, "argument"]);
    let (_, said) = run.ends_with(127);
    assert_clean("the log", &said);
    let lines: Vec<serde_json::Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.iter().any(|line| line["message"].as_str().unwrap().contains(BAD)), "{said}");
}

//! Completion as the shells ask for it: with the scripts that rekindle prints, and from any folder.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::kinds::{count_on, finish, until_after_snapshot};
use crate::supervisor::{Lab, comes};

/// How long the same is asked again: a supervisor on a busy machine may be late several times.
const PATIENCE: Duration = Duration::from_secs(30);

/// bash's function, called as readline calls it for the words of `$1`.
const BASH: &str = r#"
eval "$(rekindle completions bash)" && complete -p rekindle >/dev/null || exit 1
IFS=' ' read -ra COMP_WORDS <<<"$1."
COMP_WORDS[-1]=${COMP_WORDS[-1]%.} COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_rekindle
printf '%s\n' "${COMPREPLY[@]}"
"#;

/// What zsh would show; `_describe` gets the candidates in an array with that name.
const ZSH: &str = r#"
compdef() { : }
_describe() { print -l -- ${(P)3} }
eval "$(rekindle completions zsh)"
words=("${(@s: :)1}") CURRENT=$#words
_clap_dynamic_completer_rekindle
"#;

const FISH: &str = "rekindle completions fish | source; complete -C $argv[1]";

/// What a shell completes for a line: the candidates, without their descriptions.
struct Asked<'a> {
    lab: &'a Lab,
    shell: &'static str,
}

impl Asked<'_> {
    fn output(&self, line: &str) -> std::process::Output {
        let lab = self.lab.command(["list"]);
        let mut command = Command::new(self.shell);
        match self.shell {
            "bash" => command.args(["--norc", "-c", BASH, "bash", line]),
            "zsh" => command.args(["-f", "-c", ZSH, "zsh", line]),
            _ => command.args(["--no-config", "-c", FISH, line]),
        };
        let folder = Path::new(env!("CARGO_BIN_EXE_rekindle")).parent().unwrap();
        let path = std::env::join_paths(
            std::iter::once(folder.to_owned()).chain(std::env::split_paths(&std::env::var_os("PATH").unwrap())),
        );
        command.envs(lab.get_envs().filter_map(|(name, value)| Some((name, value?)))).env("PATH", path.unwrap());
        command.env_remove("REKINDLE_STORE_DIRECTORY").current_dir(self.lab.path()).output().unwrap()
    }

    fn words(&self, line: &str) -> Vec<String> {
        let output = self.output(line);
        let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8_lossy(&output.stderr));
        assert!(err.is_empty(), "{}: {line}: {err}", self.shell);
        let value = |line: &str| match self.shell {
            "zsh" => line.split(':').next().unwrap_or_default().to_owned(),
            _ => line.split('\t').next().unwrap_or_default().to_owned(),
        };
        out.lines().filter(|line| !line.is_empty()).map(value).collect()
    }

    /// Fails unless these are the candidates. Names of a supervisor that answers late are left out, so it asks
    /// again.
    fn are(&self, line: &str, expected: &[&str]) {
        let mut words = Vec::new();
        let is_right = comes(PATIENCE, || {
            words = self.words(line);
            words == expected
        });
        assert!(is_right, "{}: {line}: {words:?}, not {expected:?}", self.shell);
    }
}

/// The shells of this machine. Says SKIP for one that is not there, or fails where it must be.
fn shells() -> impl Iterator<Item = &'static str> {
    ["bash", "zsh", "fish"].into_iter().filter(|shell| {
        let is_there = Command::new(shell).arg("--version").output().is_ok();
        rekindle_testing::require(
            shell,
            is_there,
            &format!("{shell} is not installed, so its completions are not tried"),
        )
    })
}

#[test]
fn shells_complete_jobs_images_and_tags() {
    let Some(lab) = Lab::new() else { return };
    let mut run = until_after_snapshot(&lab, "plain");
    count_on(&lab, &mut run, 2);
    assert!(lab.rekindle(&["tag", "j/1", "best"]).status.success());
    let id = lab.job().images().unwrap().pop().unwrap().id.to_string();
    let store = lab.store();
    let store = store.to_str().unwrap();
    for shell in shells() {
        let asked = Asked { lab: &lab, shell };
        let is = |line: &str, expected: &[&str]| asked.are(line, expected);
        // The only job is completed at once: no option stands beside it.
        for command in ["stop", "snapshot", "suspend", "rewind", "logs", "status", "report", "list"] {
            is(&format!("rekindle {command} "), &["j"]);
        }
        assert!(!asked.words("rekindle rm ").contains(&"j".to_owned()), "{shell}: it runs");
        is("rekindle run --name ", &[]);
        for command in ["show", "restore", "pin", "tag --remove", "verify", "mark --good"] {
            let both = || {
                let mut both = asked.words(&format!("rekindle {command} "));
                both.sort();
                both
            };
            // zsh's function gives the / to `_describe` as a suffix.
            let expected = if shell == "zsh" { ["j", "j"] } else { ["j", "j/"] };
            assert!(comes(PATIENCE, || both() == expected), "{shell}: {command}: {:?}", both());
        }
        is("rekindle show j/b", &["j/best"]);
        is("rekindle show j/-", &["j/-1"]);
        is("rekindle show j/", &["j/latest", "j/best", &format!("j/{id}")]);
        is("rekindle rewind j ", &["latest", "best", &id]);
        is("rekindle tag --remove j/1 ", &["best"]);
        is(&format!("rekindle show --store {store} j/l"), &["j/latest"]);
        is(&format!("rekindle show --store {store}/none j/l"), &[]);
        is("rekindle stat", &["status"]);
        is("rekindle config ch", &["check"]);
        is("rekindle run --na", &["--name"]);
        is("rekindle show --sto", &["--store"]);
        assert!(asked.words("rekindle doctor ").contains(&"--json".to_owned()), "{shell}: where there is nothing else");
        assert!(asked.words("rekindle run -- sh").contains(&"sh".to_owned()), "{shell}");
        let files = asked.words("rekindle run -- sh ./st");
        assert!(files.iter().any(|file| file.trim_end_matches('/') == "./store"), "{shell}: {files:?}");
    }
    // What readline makes of --store=DIR and of the option's own value.
    let bash = Asked { lab: &lab, shell: "bash" };
    bash.are(&format!("rekindle show --store = {store} j/l"), &["j/latest"]);
    bash.are(&format!("rekindle show --store = {}", &store[..store.len() - 1]), &[&format!("{store}/")]);
    // A supervisor that does not answer holds up nothing, and the store alone is enough.
    run.signal(Signal::SIGSTOP);
    let mut took = Vec::new();
    // A busy machine is slow, but not each time.
    let is_quick = (0..10).any(|_| {
        let begun = Instant::now();
        assert!(!bash.words("rekindle stop ").contains(&"j".to_owned()));
        bash.are(&format!("rekindle show --store {store} j/l"), &["j/latest"]);
        took.push(begun.elapsed());
        begun.elapsed() < Duration::from_secs(4)
    });
    assert!(is_quick, "{took:?}");
    run.signal(Signal::SIGCONT);
    finish(&lab, run);
    let folder = std::fs::File::create(lab.file("file")).map(|_| lab.file("file")).unwrap();
    assert!(bash.words(&format!("rekindle show --store {} ", folder.display())).len() > 1, "options, and no error");
}

//! The values of `[watch]` and `[[rules]]`: when a job counts as hung, and what to do about an end or a line of output.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use nix::sys::signal::Signal;
use rekindle_base::cause::Missing;
use rekindle_base::notice::Cloud;
use serde::de::IntoDeserializer;
use serde::{Deserialize, Serialize};

use super::value::Malformed;

/// `[watch]`: when a job that has not ended counts as hung.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Watch {
    /// How long it may write no output.
    pub(crate) no_output_for: Patience,
    /// How long it may use neither a processor nor a GPU.
    pub(crate) no_cpu_for: Patience,
    /// How long it may send no `WATCHDOG=1`.
    pub(crate) no_notify_for: Patience,
    /// What to do if it hangs.
    pub(crate) action: HangAction,
    /// Which cloud is asked whether it interrupts this machine.
    pub(crate) interruption: Interruption,
}

impl Default for Watch {
    fn default() -> Watch {
        Watch {
            no_output_for: Patience::Off,
            no_cpu_for: Patience::Off,
            no_notify_for: Patience::Off,
            action: HangAction::default(),
            interruption: Interruption::default(),
        }
    }
}

impl Watch {
    /// The activities whose absence is a hang.
    pub(crate) fn watched(&self) -> Vec<Missing> {
        let limits = [
            (Missing::Output, self.no_output_for),
            (Missing::Work, self.no_cpu_for),
            (Missing::Notify, self.no_notify_for),
        ];
        limits.into_iter().filter(|(_, patience)| patience.limit().is_some()).map(|(what, _)| what).collect()
    }
}

/// A time limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Patience {
    /// No limit.
    Off,
    /// This time.
    For(Duration),
}

impl Patience {
    /// The limit, if there is one.
    #[must_use]
    pub(crate) fn limit(self) -> Option<Duration> {
        match self {
            Patience::Off => None,
            Patience::For(time) => Some(time),
        }
    }
}

impl TryFrom<String> for Patience {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Patience, Malformed> {
        match text.as_str() {
            "off" => Ok(Patience::Off),
            other => humantime::parse_duration(other).map(Patience::For).map_err(|_| Malformed),
        }
    }
}

impl From<Patience> for String {
    fn from(patience: Patience) -> String {
        match patience {
            Patience::Off => "off".into(),
            Patience::For(time) => humantime::format_duration(time).to_string(),
        }
    }
}

/// `watch.action`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum HangAction {
    /// It is only reported.
    #[default]
    Notify,
    /// The job is ended and restored from its newest image.
    Restart,
    /// A final snapshot is taken, and rekindle exits with 75.
    SnapshotAndStop,
}

/// `watch.interruption`: which cloud is asked whether it interrupts this machine.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "WordOrClouds", into = "WordOrClouds")]
pub(crate) enum Interruption {
    /// The cloud that this machine is in, by its firmware; none elsewhere.
    #[default]
    Auto,
    Off,
    Clouds(Vec<Cloud>),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WordOrClouds {
    Word(String),
    Clouds(Vec<Cloud>),
}

fn cloud(name: &str) -> Result<Cloud, Malformed> {
    Cloud::deserialize(name.into_deserializer()).map_err(|_: serde::de::value::Error| Malformed)
}

impl TryFrom<WordOrClouds> for Interruption {
    type Error = Malformed;

    fn try_from(from: WordOrClouds) -> Result<Interruption, Malformed> {
        let clouds = match from {
            WordOrClouds::Word(word) if word == "auto" => return Ok(Interruption::Auto),
            WordOrClouds::Word(word) if word == "off" => return Ok(Interruption::Off),
            // The environment has no lists.
            WordOrClouds::Word(words) => words.split([',', ' ']).map(cloud).collect::<Result<_, _>>()?,
            WordOrClouds::Clouds(clouds) => clouds,
        };
        if clouds.is_empty() {
            return Err(Malformed);
        }
        let unique: BTreeSet<Cloud> = clouds.into_iter().collect();
        Ok(Interruption::Clouds(unique.into_iter().collect()))
    }
}

impl From<Interruption> for WordOrClouds {
    fn from(from: Interruption) -> WordOrClouds {
        match from {
            Interruption::Auto => WordOrClouds::Word("auto".into()),
            Interruption::Off => WordOrClouds::Word("off".into()),
            Interruption::Clouds(clouds) => WordOrClouds::Clouds(clouds),
        }
    }
}

/// One of `[[rules]]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Rule {
    /// The conditions. All must match.
    #[serde(rename = "match")]
    pub(crate) matches: Match,
    pub(crate) action: RuleAction,
    /// For a rewind: the newest image (1), the one before it (2), and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) images: Option<u32>,
    /// For a rewind: how often it is done in one run before the job is given up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) max_rewinds: Option<u32>,
}

impl Rule {
    /// `images`, by default 1.
    #[must_use]
    pub(crate) fn images(&self) -> usize {
        self.images.and_then(|n| usize::try_from(n).ok()).unwrap_or(1)
    }

    /// `max-rewinds`, by default 3.
    #[must_use]
    pub(crate) fn max_rewinds(&self) -> u32 {
        self.max_rewinds.unwrap_or(3)
    }
}

/// The action of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum RuleAction {
    /// The job is restarted, whatever its exit code.
    Restart,
    /// The job is given up.
    GiveUp,
    /// A final snapshot is taken if the job still runs, and rekindle exits with 75.
    SnapshotAndStop,
    /// The job is rewound to an older image.
    Rewind,
}

impl fmt::Display for RuleAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            RuleAction::Restart => "restart",
            RuleAction::GiveUp => "give-up",
            RuleAction::SnapshotAndStop => "snapshot-and-stop",
            RuleAction::Rewind => "rewind",
        })
    }
}

/// The conditions of a rule. Each may be one value or a list; one of them has to match.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub(crate) struct Match {
    /// Exit codes.
    #[serde(skip_serializing_if = "AnyOf::is_empty")]
    pub(crate) exit_code: AnyOf<u8>,
    /// Signals that end a job.
    #[serde(skip_serializing_if = "AnyOf::is_empty")]
    pub(crate) signal: AnyOf<SignalName>,
    /// Causes.
    #[serde(skip_serializing_if = "AnyOf::is_empty")]
    pub(crate) cause: AnyOf<CauseName>,
    /// Numbers of GPU faults.
    #[serde(skip_serializing_if = "AnyOf::is_empty")]
    pub(crate) xid: AnyOf<u32>,
    /// A line of the job's output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) log: Option<Pattern>,
    /// A number in that line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) above: Option<Above>,
}

impl Match {
    /// Whether there are no conditions.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        *self == Match::default()
    }

    /// Whether it applies to the output of a running job: no condition is about an end.
    #[must_use]
    pub(crate) fn is_of_output(&self) -> bool {
        let Match { exit_code, signal, cause, xid, log, above: _ } = self;
        log.is_some() && exit_code.is_empty() && signal.is_empty() && cause.is_empty() && xid.is_empty()
    }

    /// Whether a line of output matches. A value that is not a number (nan, inf, text) counts as above every limit: a
    /// training that went wrong prints such values.
    #[must_use]
    pub(crate) fn line(&self, line: &[u8]) -> bool {
        let Some(pattern) = &self.log else { return false };
        let Some(above) = self.above else { return pattern.0.is_match(line) };
        pattern.0.captures_iter(line).any(|found| {
            let text = found.get(above.group).map(|text| String::from_utf8_lossy(text.as_bytes()).into_owned());
            text.is_some_and(|text| !text.parse().is_ok_and(|value: f64| value <= above.value.0))
        })
    }
}

/// One value, or a list of them; empty without a condition.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(
    from = "OneOrMany<T>",
    into = "Vec<T>",
    bound(serialize = "T: Clone + Serialize", deserialize = "T: Deserialize<'de>")
)]
pub(crate) struct AnyOf<T>(Vec<T>);

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T> AnyOf<T> {
    /// Whether there is no condition.
    #[must_use]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether there is no condition, or one that matches.
    pub(crate) fn allows(&self, mut fits: impl FnMut(&T) -> bool) -> bool {
        self.0.is_empty() || self.0.iter().any(&mut fits)
    }

    /// The values of the condition.
    #[must_use]
    pub(crate) fn all(&self) -> &[T] {
        &self.0
    }
}

impl<T> Default for AnyOf<T> {
    fn default() -> AnyOf<T> {
        AnyOf(Vec::new())
    }
}

impl<T> From<OneOrMany<T>> for AnyOf<T> {
    fn from(given: OneOrMany<T>) -> AnyOf<T> {
        match given {
            OneOrMany::One(one) => AnyOf(vec![one]),
            OneOrMany::Many(many) => AnyOf(many),
        }
    }
}

impl<T> From<AnyOf<T>> for Vec<T> {
    fn from(any: AnyOf<T>) -> Vec<T> {
        any.0
    }
}

/// A signal by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct SignalName(Signal);

impl SignalName {
    /// Its number.
    #[must_use]
    pub(crate) fn number(self) -> i32 {
        self.0 as i32
    }
}

impl TryFrom<String> for SignalName {
    type Error = Malformed;

    fn try_from(text: String) -> Result<SignalName, Malformed> {
        let full = if text.starts_with("SIG") { text } else { format!("SIG{text}") };
        Signal::from_str(&full).map(SignalName).map_err(|_| Malformed)
    }
}

impl From<SignalName> for String {
    fn from(signal: SignalName) -> String {
        signal.0.as_str().to_owned()
    }
}

/// The name of a [`Cause`](rekindle_base::cause::Cause) for rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum CauseName {
    /// An exit code other than 0.
    Exit,
    /// A signal.
    Signal,
    /// A signal killed one of its processes (`restart.on-process-death`).
    ProcessDied,
    /// The kernel killed it for lack of memory.
    OutOfMemory,
    /// A GPU failed.
    GpuFault,
    /// It hung.
    Hang,
    /// The job could not be resumed after a snapshot.
    SnapshotLost,
}

/// A regular expression of the `regex` crate: time linear in the line, whatever the pattern.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct Pattern(regex::bytes::Regex);

impl Pattern {
    /// Number of groups, including the whole match (group 0).
    #[must_use]
    pub(crate) fn groups(&self) -> usize {
        self.0.captures_len()
    }
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.0.as_str(), f)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

impl TryFrom<String> for Pattern {
    type Error = String;

    fn try_from(text: String) -> Result<Pattern, String> {
        /// Maximum size of the compiled program; a mistake such as (a{1000}){1000} needs more.
        const LARGEST: usize = 1 << 20;
        let built = regex::bytes::RegexBuilder::new(&text).size_limit(LARGEST).build();
        built
            .map(Pattern)
            .map_err(|error| format!("not a regular expression: {}", error.to_string().replace('\n', " ")))
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> String {
        pattern.0.as_str().to_owned()
    }
}

/// A number in a line, and the value from which on the rule matches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct Above {
    /// The group of the pattern that holds the number, from 1.
    pub(crate) group: usize,
    pub(crate) value: Number,
}

/// A finite number.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub(crate) struct Number(f64);

impl PartialEq for Number {
    fn eq(&self, other: &Number) -> bool {
        self.0.total_cmp(&other.0).is_eq()
    }
}

impl Eq for Number {}

impl TryFrom<f64> for Number {
    type Error = &'static str;

    fn try_from(value: f64) -> Result<Number, &'static str> {
        if value.is_finite() { Ok(Number(value)) } else { Err("not a finite number") }
    }
}

impl From<Number> for f64 {
    fn from(number: Number) -> f64 {
        number.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matching(text: &str) -> Match {
        toml::from_str(text).unwrap()
    }

    #[test]
    fn a_line_fits_by_its_pattern_and_its_number() {
        let plain = matching(r#"log = "(?i)loss[ =:]+nan\\b""#);
        assert!(plain.line(b"step 3 loss=NaN") && !plain.line(b"step 3 loss=0.1"));
        assert!(plain.is_of_output());
        let above = matching(
            r#"log = "loss[ =:]+(\\S+)"
            above = { group = 1, value = 10 }"#,
        );
        for (line, fits) in [
            ("loss 9.99", false),
            ("loss 10", false),
            ("loss 10.01", true),
            ("loss=1e3", true),
            ("loss -50", false),
            ("loss nan", true),
            ("loss inf", true),
            ("loss -inf", false),
            ("loss none", true),
            ("val_loss: 3, loss: 11", true),
            ("no l0ss 99", false),
        ] {
            assert_eq!(above.line(line.as_bytes()), fits, "{line}");
        }
        assert!(above.line(b"\xff\xfe loss nan \xff"), "output need not be text");
    }

    #[test]
    fn clouds_are_a_word_or_a_list() {
        let read = |value: &str| toml::from_str::<Watch>(&format!("interruption = {value}")).map(|it| it.interruption);
        let clouds = |clouds: &[Cloud]| Ok(Interruption::Clouds(clouds.to_vec()));
        assert_eq!((read("\"auto\""), read("\"off\"")), (Ok(Interruption::Auto), Ok(Interruption::Off)));
        assert_eq!(read("[\"azure\", \"aws\", \"azure\"]"), clouds(&[Cloud::Aws, Cloud::Azure]), "each once");
        assert_eq!(read("\"aws,google\""), clouds(&[Cloud::Aws, Cloud::Google]), "as in the environment");
        for wrong in ["\"\"", "\"on\"", "[]", "[\"auto\"]", "true", "[\"AWS\"]", "\"aws,\""] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_names_an_end_is_not_of_the_output() {
        assert!(!matching("log = \"x\"\nexit-code = 3").is_of_output());
        assert!(!matching("exit-code = [3, 4]").is_of_output());
        assert!(Match::default().is_empty());
        let signal = matching("signal = [\"SIGSEGV\", \"BUS\"]");
        assert_eq!(signal.signal.all().iter().map(|s| s.number()).collect::<Vec<_>>(), [11, 7]);
        for wrong in ["signal = 11", "exit-code = 256", "cause = \"sunspots\"", "log = \"(\"", "loge = \"x\""] {
            assert!(toml::from_str::<Match>(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_judged_without_harm(line in proptest::collection::vec(any::<u8>(), 0..200), value in -1e6f64..1e6) {
            let text = format!("log = 'loss (\\S+)'\nabove = {{ group = 1, value = {value:?} }}");
            let _ = matching(&text).line(&line);
        }

        #[test]
        fn a_number_above_is_above(value in -1e6f64..1e6, printed in -1e6f64..1e6) {
            let text = format!("log = 'loss (\\S+)'\nabove = {{ group = 1, value = {value:?} }}");
            let line = format!("loss {printed:?}");
            prop_assert_eq!(matching(&text).line(line.as_bytes()), printed > value);
        }
    }
}

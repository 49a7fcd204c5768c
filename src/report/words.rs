//! Durations, sizes and events as text.

use chrono::{DateTime, Local};
use rekindle_base::units::size;
use serde::Serialize;
use serde_json::Value;

use crate::published::{GroupMember, in_words};
use crate::telemetry::events::What;
use rekindle_store::ImageId;

/// How a job ended.
#[must_use]
pub(crate) fn end(exit_code: Option<i32>, signal: Option<i32>) -> String {
    match (exit_code, signal) {
        (Some(code), _) => format!("ended with exit code {code}"),
        (None, Some(signal)) => {
            let name = nix::sys::signal::Signal::try_from(signal).map(|signal| format!(" ({})", signal.as_str()));
            format!("ended by signal {signal}{}", name.unwrap_or_default())
        }
        (None, None) => "ended".into(),
    }
}

/// Microseconds, to two or three digits. Below a minute they are rounded, so that sums add up as well as they can.
#[must_use]
pub(crate) fn time(us: u64) -> String {
    let rounded = |unit: u64| us.saturating_add(unit / 2) / unit;
    let seconds = us / 1_000_000;
    match us {
        0 => "0 s".into(),
        1..1_000 => format!("{us} µs"),
        1_000..9_950 => format!("{}.{} ms", rounded(100) / 10, rounded(100) % 10),
        9_950..999_500 => format!("{} ms", rounded(1_000)),
        999_500..9_995_000 => format!("{}.{:02} s", rounded(10_000) / 100, rounded(10_000) % 100),
        9_995_000..60_000_000 => format!("{}.{} s", rounded(100_000) / 10, rounded(100_000) % 10),
        _ if seconds < 3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ if seconds < 86_400 => format!("{} h {} min", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

/// A share in millionths.
#[must_use]
pub(crate) fn share(ppm: u64) -> String {
    let hundredths = (ppm + 50) / 100;
    format!("{}.{:02} %", hundredths / 100, hundredths % 100)
}

/// A moment in microseconds of UNIX time, in local time.
#[must_use]
pub(crate) fn moment(us: i64) -> String {
    local(us).map_or_else(|| "?".into(), |time| time.format("%Y-%m-%d %H:%M:%S").to_string())
}

/// The same for the end of an axis: shorter for a longer axis.
#[must_use]
pub(crate) fn tick(us: i64, length: u64) -> String {
    let format = match length / 1_000_000 {
        0..=600 => "%H:%M:%S",
        601..=72_000 => "%H:%M",
        72_001..=864_000 => "%a %d %H:%M",
        _ => "%Y-%m-%d",
    };
    local(us).map_or_else(|| "?".into(), |time| time.format(format).to_string())
}

fn local(us: i64) -> Option<DateTime<Local>> {
    Some(DateTime::from_timestamp_micros(us)?.with_timezone(&Local))
}

/// The name that serde writes for a value.
#[must_use]
pub(crate) fn word(what: &impl Serialize) -> String {
    match serde_json::to_value(what) {
        Ok(Value::String(word)) => word.replace('-', " "),
        _ => String::new(),
    }
}

/// The name of an event, and a sentence about it.
#[must_use]
pub(crate) fn event(what: &What) -> (String, String) {
    let from = |image: &Option<ImageId>| image.map_or_else(|| "the beginning".into(), |id| format!("image {id}"));
    let sentence = match what {
        What::Supervised { supervisor, interval, .. } => {
            format!("a supervisor started, pid {supervisor}, interval {interval}")
        }
        What::Started { image, took_us, moved, differences, .. } => {
            let gpus = moved.iter().map(|m| format!(", on {} instead of {}", m.new, m.old)).collect::<String>();
            let differs: String = differences.iter().map(|line| format!("; {line}")).collect();
            format!("the job is running from {}, after {}{gpus}{differs}", from(image), time(*took_us))
        }
        What::SnapshotTaken { image, freeze_us, bytes, .. } => {
            format!("image {image}, {}, the job was frozen for {}", size(*bytes), time(*freeze_us))
        }
        What::SnapshotHeld { bound_us, .. } => format!("the job blocks a snapshot, for at most {}", time(*bound_us)),
        What::HoldOver { how, waited_us, .. } => format!("{}, after {}", how.replace('-', " "), time(*waited_us)),
        What::SnapshotFailed { why, job_lost: false } => why.clone(),
        What::SnapshotFailed { why, job_lost: true } => format!("{why}; the job cannot continue"),
        What::Stored { image, took_us, written } => {
            format!("image {image}, {} written in {}", size(*written), time(*took_us))
        }
        What::Replicated { image, took_us, sent } => {
            format!("image {image}, {} sent in {}", size(*sent), time(*took_us))
        }
        What::NotStored { why, .. } | What::StoreDamaged { why, .. } => why.clone(),
        What::NotReplicated { image, why } | What::ImageBad { image, why } | What::RehearsalFailed { image, why } => {
            format!("image {image}: {why}")
        }
        What::Rehearsed { image, took_us } => format!("image {image} in {}", time(*took_us)),
        What::Restarting { image, after_us } => format!("from {} in {}", from(image), time(*after_us)),
        What::Finished { outcome, exit_code, why } => {
            let code = exit_code.map(|code| format!(", exit code {code}")).unwrap_or_default();
            let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            format!("{outcome}{code}{why}")
        }
        What::ProcessDied { pid, name, signal, action, why } => {
            let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            format!("process {pid} ({name}) was {} ({action}{why})", end(None, Some(*signal)))
        }
        What::Interruption { cloud, notice, at, action, why } => {
            let at = at.map(|at| format!(" at {}", moment(at.timestamp_micros()))).unwrap_or_default();
            let why = why.as_ref().map(|why| format!(": {why}")).unwrap_or_default();
            format!("{cloud} {notice}{at} ({action}{why})")
        }
        What::InterruptionOver { cloud, notice } => format!("{cloud} no longer says that it {notice}"),
        What::GroupCommitted { number, .. } => format!("group image {number}"),
        What::GroupAborted { number, why, machines } => {
            format!("group snapshot {number}{}: {why}", hosts(machines))
        }
        What::GroupMemberLost { machine } => machine.to_string(),
        What::GroupRestarting { number, why, machines, epoch, lost, .. } => {
            let lost = if lost.is_empty() { String::new() } else { format!("; lost: {}", in_words(lost)) };
            format!("all machines, from {}, epoch {epoch}{}: {why}{lost}", group_image(*number), hosts(machines))
        }
        What::Ended { exit_code, signal, cause } => {
            let cause = cause.as_ref().map(|cause| format!(": {cause}")).unwrap_or_default();
            format!("the job {}{cause}", end(*exit_code, *signal))
        }
        other => fields(other),
    };
    let name = serde_json::to_value(what).ok().and_then(|value| value.get("event")?.as_str().map(ToOwned::to_owned));
    (name.map_or_else(|| "?".into(), |name| name.replace('-', " ")), sentence)
}

/// What a group starts from.
#[must_use]
pub(crate) fn group_image(number: Option<u64>) -> String {
    number.map_or_else(|| "the beginning".into(), |number| format!("group image {number}"))
}

fn hosts(machines: &[GroupMember]) -> String {
    if machines.is_empty() { String::new() } else { format!(", because of {}", in_words(machines)) }
}

/// Any other event, shown by its fields.
fn fields(what: &What) -> String {
    let Ok(Value::Object(fields)) = serde_json::to_value(what) else { return String::new() };
    let said = fields.iter().filter(|(key, value)| *key != "event" && !value.is_null());
    let said = said.map(|(key, value)| match (key.strip_suffix("_us"), value) {
        (Some(name), Value::Number(us)) => format!("{name} {}", time(us.as_u64().unwrap_or(0))),
        (_, Value::String(text)) => format!("{} {text}", key.replace('_', " ")),
        (_, value) => format!("{} {value}", key.replace('_', " ")),
    });
    said.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use rekindle_base::notice::{Cloud, Kind};

    use super::*;

    #[test]
    fn times_have_two_or_three_digits() {
        let said = [0, 7, 1_250, 84_999, 1_239_999, 12_345_678, 754_000_000, 7_500_000_000, 200_000_000_000].map(time);
        let want = ["0 s", "7 µs", "1.3 ms", "85 ms", "1.24 s", "12.3 s", "12 min 34 s", "2 h 5 min", "2 d 7 h"];
        assert_eq!(said, want);
        assert_eq!(share(12_345), "1.23 %");
    }

    #[test]
    fn a_notice_is_a_sentence() {
        let (cloud, notice) = (Cloud::Azure, Kind::Freeze);
        let why = Some("the job does not run".into());
        let told = What::Interruption { cloud, notice, at: None, action: "none".into(), why };
        let sentence = "Azure pauses this machine for some seconds (none: the job does not run)";
        assert_eq!(event(&told), ("interruption".into(), sentence.into()));
        let over = event(&What::InterruptionOver { cloud, notice });
        let sentence = "Azure no longer says that it pauses this machine for some seconds";
        assert_eq!(over, ("interruption over".into(), sentence.into()));
    }

    #[test]
    fn an_end_is_named() {
        assert_eq!(end(Some(3), None), "ended with exit code 3");
        assert_eq!(end(None, Some(9)), "ended by signal 9 (SIGKILL)");
    }
}

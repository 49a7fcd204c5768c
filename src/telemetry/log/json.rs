//! One JSON object per line: `time`, `level`, `message`, `job` if known, and the other fields of the event.

use std::collections::BTreeMap;
use std::fmt;

use chrono::{DateTime, SecondsFormat, Utc};
use serde::Serialize;
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::telemetry::clean;
use rekindle_base::without_numbers;

/// Formats events in this way.
pub(super) struct Lines;

#[derive(Debug, Serialize)]
struct Line<'a> {
    time: String,
    level: String,
    message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    job: Option<&'a str>,
    #[serde(flatten)]
    others: BTreeMap<&'static str, Value>,
}

#[derive(Default)]
struct Fields {
    message: String,
    others: BTreeMap<&'static str, Value>,
}

impl Fields {
    fn put(&mut self, field: &Field, value: Value) {
        // A field with one of our names would be there twice.
        if !matches!(field.name(), "time" | "level" | "job") {
            self.others.insert(field.name(), value);
        }
    }
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        if field.name() == "message" { self.message = text } else { self.put(field, text.into()) }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "message" { self.message = value.into() } else { self.put(field, value.into()) }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value.into());
    }
}

fn line<'a>(event: &Event<'_>, time: DateTime<Utc>, job: Option<&'a str>) -> Line<'a> {
    let mut fields = Fields::default();
    event.record(&mut fields);
    Line {
        time: time.to_rfc3339_opts(SecondsFormat::Millis, true),
        level: event.metadata().level().as_str().to_lowercase(),
        message: without_numbers(&fields.message),
        job,
        others: fields.others,
    }
}

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let line = line(event, Utc::now(), super::JOB.get().map(String::as_str));
        writer.write_str(&clean::json(&serde_json::to_string(&line).map_err(|_| fmt::Error)?))?;
        writer.write_char('\n')
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Output(Arc<Mutex<Vec<u8>>>);

    impl Write for Output {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn each_line_is_an_object_whatever_it_says() {
        let out = Output::default();
        let writer = out.clone();
        let logger = tracing_subscriber::fmt().event_format(Lines).with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(logger, || {
            tracing::warn!(image = 7, why = "x", level = "none", "a \"quote\",\nand {}", '\u{1b}');
            tracing::info!("second");
        });
        let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
        let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!((&lines[0]["level"], &lines[0]["message"]), (&"warn".into(), &"a \"quote\",\nand \u{1b}".into()));
        assert_eq!((&lines[0]["image"], &lines[0]["why"]), (&7.into(), &"x".into()));
        assert!(lines[1]["time"].as_str().unwrap().ends_with('Z'));
    }
}

//! A choice as one line of arithmetic that a person can check.

use std::fmt;
use std::time::Duration;

use super::{Bound, Choice, LONGEST, MtbfSource, PRIOR, SHORTEST, daly, young};

impl Choice {
    /// Whether the change from `before` should be reported: another reason, or a difference of a tenth or more.
    #[must_use]
    pub fn is_news_after(&self, before: &Choice) -> bool {
        self.bound != before.bound || self.interval.abs_diff(before.interval) > before.interval / 10
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (freeze, mtbf) = (short(self.freeze), short(self.mtbf));
        write!(f, "{}: freeze {freeze}, a failure every {mtbf} ({}): ", short(self.interval), self.mtbf_source)?;
        if self.freeze >= self.mtbf.saturating_mul(2) {
            write!(f, "the freeze is twice that or more, so {mtbf}")?;
        } else {
            let (young, daly) = (young(self.freeze, self.mtbf), daly(self.freeze, self.mtbf));
            write!(f, "sqrt(2 * {freeze} * {mtbf}) = {}, by Daly {}", short(young), short(daly))?;
        }
        match self.bound {
            Bound::Daly => {}
            Bound::Minimum => write!(f, ", raised to the minimum of {}", short(SHORTEST))?,
            Bound::Maximum => write!(f, ", lowered to the maximum of {}", short(LONGEST))?,
            Bound::MaxOverhead => {
                write!(f, ", raised to {freeze} / {} - {freeze} by max-overhead", self.max_overhead)?;
            }
            Bound::Persist => write!(f, ", raised to the time that storing an image takes")?,
        }
        let (overhead, loss) = (self.expected_overhead.rounded(), self.expected_loss.rounded());
        write!(f, "; costs {overhead} in freezes and {loss} in lost work")
    }
}

impl fmt::Display for MtbfSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MtbfSource::Configured => f.write_str("configured"),
            MtbfSource::Observed { uptime, failures } => {
                write!(f, "observed: {failures} in {}, and 1 in {} assumed before", short(*uptime), short(PRIOR))
            }
        }
    }
}

/// A duration to two or three digits.
fn short(time: Duration) -> String {
    const MINUTE: Duration = Duration::from_secs(60);
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let millis = time.as_millis();
    match time {
        Duration::ZERO => "0s".to_owned(),
        t if t < Duration::from_millis(10) => format!("{:.1}ms", t.as_secs_f64() * 1e3),
        t if t < Duration::from_secs(1) => format!("{millis}ms"),
        t if t < MINUTE => format!("{:.1}s", t.as_secs_f64()).replace(".0s", "s"),
        t if t < DAY => humantime::format_duration(Duration::from_secs(t.as_secs())).to_string(),
        // Days and hours.
        t => humantime::format_duration(Duration::from_secs(t.as_secs() / 3600 * 3600)).to_string(),
    }
}

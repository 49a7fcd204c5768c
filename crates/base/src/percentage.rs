//! A percentage.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The text is not a number with a percent sign.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a percentage such as \"0.5%\"")]
pub struct Malformed;

/// A percentage, written with its sign ("0.5%") because a bare number would be ambiguous. Exact to a millionth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Percentage(u32);

/// 1 % in millionths.
const ONE_PERCENT: u32 = 10_000;

/// Digits after the point of a percentage that is exact to a millionth.
const DECIMALS: usize = 4;

impl Percentage {
    /// This many millionths; 10,000 are 1 %.
    #[must_use]
    pub const fn millionths(n: u32) -> Percentage {
        Percentage(n)
    }

    /// The share in millionths.
    #[must_use]
    pub const fn as_millionths(self) -> u32 {
        self.0
    }

    /// The nearest share with two digits after the point, for people.
    #[must_use]
    pub const fn rounded(self) -> Percentage {
        const STEP: u32 = ONE_PERCENT / 100;
        Percentage(self.0.saturating_add(STEP / 2) / STEP * STEP)
    }
}

impl FromStr for Percentage {
    type Err = Malformed;

    fn from_str(text: &str) -> Result<Percentage, Malformed> {
        let number = text.trim().strip_suffix('%').ok_or(Malformed)?.trim_end();
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if !digits(whole) || !digits(fraction) || fraction.len() > DECIMALS {
            return Err(Malformed);
        }
        let parse = |text: &str| text.parse::<u32>().map_err(|_| Malformed);
        let millionths = parse(&format!("{fraction:0<DECIMALS$}"))?;
        parse(whole)?.checked_mul(ONE_PERCENT).and_then(|n| n.checked_add(millionths)).map(Percentage).ok_or(Malformed)
    }
}

impl fmt::Display for Percentage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fraction = format!("{:0>DECIMALS$}", self.0 % ONE_PERCENT);
        match fraction.trim_end_matches('0') {
            "" => write!(f, "{}%", self.0 / ONE_PERCENT),
            fraction => write!(f, "{}.{fraction}%", self.0 / ONE_PERCENT),
        }
    }
}

impl TryFrom<String> for Percentage {
    type Error = Malformed;

    fn try_from(text: String) -> Result<Percentage, Malformed> {
        text.parse()
    }
}

impl From<Percentage> for String {
    fn from(share: Percentage) -> String {
        share.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn percentages_are_exact_and_have_their_sign() {
        for (text, millionths, written) in [
            ("1%", 10_000, "1%"),
            ("0.5%", 5_000, "0.5%"),
            ("12.5 %", 125_000, "12.5%"),
            ("0.0001%", 1, "0.0001%"),
            ("100.0%", 1_000_000, "100%"),
            ("0%", 0, "0%"),
        ] {
            let share: Percentage = text.parse().unwrap();
            assert_eq!((share.as_millionths(), share.to_string().as_str()), (millionths, written), "{text}");
        }
        for text in ["", "%", "1", "0.5", "-1%", "+1%", ".5%", "1.%", "1e2%", "0.00001%", "429497%", "1%%", "1 percent"]
        {
            assert_eq!(text.parse::<Percentage>(), Err(Malformed), "{text}");
        }
        assert_eq!(Percentage::millionths(3_561).rounded().to_string(), "0.36%");
    }

    proptest! {
        #[test]
        fn a_percentage_survives_its_text(millionths: u32) {
            let share = Percentage::millionths(millionths);
            prop_assert_eq!(share.to_string().parse(), Ok(share));
        }
    }
}

//! Options of the store that a user sets, and their text form.

use serde::{Deserialize, Serialize};

use rekindle_base::units::{Malformed, NumberOrText};

/// In how many packs content is kept that several images of a job use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(try_from = "NumberOrText", into = "NumberOrText")]
pub enum Copies {
    /// In one pack.
    #[default]
    One,
    /// In two packs, so that damage to one of them loses nothing.
    Two,
}

impl Copies {
    /// The number of packs.
    #[must_use]
    pub(crate) fn count(self) -> usize {
        match self {
            Copies::One => 1,
            Copies::Two => 2,
        }
    }
}

impl TryFrom<NumberOrText> for Copies {
    type Error = Malformed;

    fn try_from(from: NumberOrText) -> Result<Copies, Malformed> {
        let count = match from {
            NumberOrText::Number(count) => count,
            NumberOrText::Text(text) => text.parse().map_err(|_| Malformed)?,
        };
        match count {
            1 => Ok(Copies::One),
            2 => Ok(Copies::Two),
            _ => Err(Malformed),
        }
    }
}

impl From<Copies> for NumberOrText {
    fn from(copies: Copies) -> NumberOrText {
        NumberOrText::Number(if copies == Copies::One { 1 } else { 2 })
    }
}

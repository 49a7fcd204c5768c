//! Finds the image that a text names: `latest`, `42`, `000042-20261120T132105Z` or the beginning of that, a tag, or `-2`
//! for the second newest image that the job can continue from.

use super::error::{Error, Result};
use super::id::{ImageId, JobName};
use super::image::Image;
use super::tag::{LATEST, Tag};

/// N of a text `-N`, which means the Nth newest image. No tag begins like that.
#[must_use]
pub fn nth_newest(text: &str) -> Option<usize> {
    text.strip_prefix('-').filter(|number| number.bytes().all(|b| b.is_ascii_digit()))?.parse().ok()
}

/// Chooses among `images`, which are sorted newest first. `tagged` returns those with a tag; it is called only if no id
/// matches. `line` are those that `-N` counts, newest first.
pub(super) fn select(
    job: &JobName,
    images: Vec<Image>,
    wanted: &str,
    tagged: impl FnOnce(&Tag) -> Vec<ImageId>,
    line: impl FnOnce() -> Vec<ImageId>,
) -> Result<Image> {
    let known = |images: &[Image]| images.iter().map(|image| image.id).collect::<Vec<_>>();
    if wanted == LATEST {
        let all = known(&images);
        let good = images.into_iter().find(Image::is_good);
        return good.ok_or_else(|| Error::NoGoodImage { job: job.clone(), known: all });
    }
    let ids = known(&images);
    let mut matching = match nth_newest(wanted) {
        Some(nth) => {
            let line = line();
            let found = nth.checked_sub(1).and_then(|n| line.get(n));
            vec![*found.ok_or_else(|| Error::NoNthImage {
                job: job.clone(),
                wanted: wanted.to_owned(),
                count: line.len(),
            })?]
        }
        None => matches(&ids, wanted),
    };
    if let (true, Ok(tag)) = (matching.is_empty(), wanted.parse()) {
        matching = tagged(&tag);
    }
    let Some(id) = matching.pop() else {
        return Err(Error::UnknownImage { job: job.clone(), wanted: wanted.to_owned(), known: ids });
    };
    if !matching.is_empty() {
        matching.push(id);
        return Err(Error::AmbiguousImage { job: job.clone(), wanted: wanted.to_owned(), matching });
    }
    let found = images.into_iter().find(|image| image.id == id);
    found.ok_or_else(|| Error::UnknownImage { job: job.clone(), wanted: wanted.to_owned(), known: ids })
}

fn matches(ids: &[ImageId], wanted: &str) -> Vec<ImageId> {
    // "42" is a number; "00004" is the beginning of 000040 to 000049.
    if !wanted.starts_with('0')
        && let Ok(number) = wanted.parse::<u32>()
    {
        let same: Vec<_> = ids.iter().copied().filter(|id| id.sequence() == number).collect();
        if !same.is_empty() {
            return same;
        }
    }
    if wanted.is_empty() {
        return Vec::new();
    }
    ids.iter().copied().filter(|id| id.to_string().starts_with(wanted)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Place;
    use crate::image::{Damage, DamageKind, State};

    fn images(ids: &[&str]) -> Vec<Image> {
        let why = Damage { kind: DamageKind::Broken, detail: String::new() };
        let state = State::Damaged { why };
        ids.iter()
            .map(|id| Image {
                id: id.parse().unwrap(),
                dir: crate::tests::beneath("/tmp".as_ref()),
                state: state.clone(),
                place: Place::Stored,
                trust: Default::default(),
            })
            .collect()
    }

    const IDS: [&str; 4] =
        ["1000042-20261122T000000Z", "000142-20261121T000000Z", "000042-20261120T132105Z", "000004-20261120T132000Z"];

    fn found(wanted: &str) -> Result<String> {
        let ids = |at: &[usize]| at.iter().map(|at| IDS[*at].parse().unwrap()).collect();
        let tagged = |tag: &Tag| match tag.as_str() {
            "best" => ids(&[2]),
            "x" => ids(&[1, 3]),
            _ => Vec::new(),
        };
        // The newest one is of a line that the job has left.
        let line = || ids(&[1, 2, 3]);
        select(&"train".parse().unwrap(), images(&IDS), wanted, tagged, line).map(|image| image.id.to_string())
    }

    #[test]
    fn a_tag_is_tried_last_and_must_be_of_one() {
        assert_eq!(found("best").unwrap(), IDS[2]);
        let error = found("x").unwrap_err();
        assert!(matches!(&error, Error::AmbiguousImage { matching, .. } if matching.len() == 2), "{error}");
    }

    #[test]
    fn numbers_ids_and_prefixes() {
        assert_eq!(found("42").unwrap(), IDS[2]);
        assert_eq!(found("142").unwrap(), IDS[1]);
        assert_eq!(found("4").unwrap(), IDS[3]);
        assert_eq!(found("1000042").unwrap(), IDS[0]);
        assert_eq!(found("1000").unwrap(), IDS[0]);
        assert_eq!(
            found("00004-").unwrap_err().to_string().split(';').next(),
            Some("job \"train\" has no image \"00004-\"")
        );
        assert_eq!(found("000042").unwrap(), IDS[2]);
        assert_eq!(found(IDS[3]).unwrap(), IDS[3]);
    }

    #[test]
    fn minus_counts_back_from_the_newest() {
        assert_eq!((found("-1").unwrap().as_str(), found("-3").unwrap().as_str()), (IDS[1], IDS[3]));
        for wanted in ["-0", "-4", "-99999999999999999999"] {
            assert!(found(wanted).is_err(), "{wanted}");
        }
        let said = found("-4").unwrap_err().to_string();
        assert_eq!(said, "job \"train\" has no image -4: it has 3 images to continue from, -1 (the newest) to -3");
        let said = found("3").unwrap_err().to_string();
        assert!(said.starts_with("job \"train\" has no image \"3\" (-3 is the 3rd newest); images are "), "{said}");
    }

    #[test]
    fn what_fits_several_names_them() {
        let error = found("0000").unwrap_err();
        let Error::AmbiguousImage { matching, .. } = &error else { panic!("{error}") };
        assert_eq!(matching.iter().map(ToString::to_string).collect::<Vec<_>>(), IDS[2..]);
        assert!(error.to_string().ends_with(&format!("they are {}, {}", IDS[2], IDS[3])), "{error}");
    }

    #[test]
    fn what_fits_none_names_all() {
        for wanted in ["", "7", "y", "../x", "latest2"] {
            let error = found(wanted).unwrap_err();
            assert!(matches!(&error, Error::UnknownImage { known, .. } if known.len() == 4), "{wanted}: {error}");
        }
    }

    #[test]
    fn latest_is_a_good_one() {
        assert!(matches!(found("latest"), Err(Error::NoGoodImage { known, .. }) if known.len() == 4));
    }
}

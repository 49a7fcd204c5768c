//! Which group images are kept.

use std::collections::BTreeSet;

use crate::documents::{From, Number, Plan, View};
use crate::machine::Write;

/// A group image that is not kept: its record is removed first, then each member removes its part.
///
/// Kept are the newest `keep` committed ones of the present line, everything newer than the newest committed one, and
/// what the job runs from.
pub(crate) fn unneeded(view: &View, plan: &Plan, keep: usize) -> Option<Write> {
    let on_the_line = |number: &Number| !plan.left.iter().any(|left| left.has(*number));
    let committed = view.images.iter().rev().filter(|(_, image)| image.value.committed).map(|(number, _)| *number);
    let committed: Vec<Number> = committed.filter(on_the_line).collect();
    let newest = committed.first().copied()?;
    let mut kept: BTreeSet<Number> = committed.into_iter().take(keep.max(1)).collect();
    if let From::Image(number) = plan.from {
        kept.insert(number);
    }
    let mut others = view.images.iter().filter(|(number, _)| !kept.contains(number) && **number < newest);
    others.next().map(|(number, image)| Write::Remove { number: *number, was: image.revision })
}

//! The section about the group of a job over several machines.

use maud::{Markup, html};
use rekindle_base::units::counted;

use super::parts::{dot, foreign, number};
use crate::published::{GroupMember, in_words};
use crate::report::history::GroupHistory;
use crate::report::words::{group_image, moment};

/// Number of rows.
const ROWS: usize = 100;

/// A restart of all machines, or an aborted group snapshot.
struct Row<'a> {
    at: i64,
    tone: &'static str,
    what: String,
    machines: String,
    why: &'a str,
}

/// The machines that a cause names, and those that were lost.
fn machines(named: &[GroupMember], lost: &[GroupMember]) -> String {
    let lost: Vec<&GroupMember> = lost.iter().filter(|it| !named.contains(it)).collect();
    match (named.is_empty(), lost.is_empty()) {
        (true, true) => "–".into(),
        (_, true) => in_words(named),
        (true, false) => format!("lost: {}", in_words(lost)),
        (false, false) => format!("{}; lost: {}", in_words(named), in_words(lost)),
    }
}

pub(super) fn group(group: &GroupHistory) -> Markup {
    let restarts = group.restarts.iter().map(|it| Row {
        at: it.at,
        tone: "lost",
        what: format!("restart of all from {}", group_image(it.number)),
        machines: machines(&it.machines, &it.lost),
        why: &it.why,
    });
    let aborted = group.aborted.iter().map(|it| Row {
        at: it.at,
        tone: "down",
        what: format!("group snapshot {} aborted", it.number),
        machines: machines(&it.machines, &[]),
        why: &it.why,
    });
    let mut rows: Vec<Row<'_>> = restarts.chain(aborted).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.at));
    let all = rows.len();
    let counts = [
        counted(number(group.committed.len()), "committed group image"),
        counted(number(group.aborted.len()), "aborted group snapshot"),
        format!("{} of all machines", counted(number(group.restarts.len()), "restart")),
        counted(number(group.lost.len()), "lost machine"),
    ];
    html! {
        section {
            h2 { "Group" }
            p { (counts.join(", ")) }
            @if all > ROWS { p.small.soft { "The newest " (ROWS) " of " (all) "." } }
            @if all > 0 {
                div.scroll { table {
                    thead { tr { th { "When" } th { "What" } th { "Machine" } th { "Why" } } }
                    tbody { @for row in rows.into_iter().take(ROWS) { tr {
                        td.t { (moment(row.at)) }
                        td.t { (dot(row.tone)) (row.what) }
                        td { (foreign(&row.machines)) }
                        td.why { (foreign(row.why)) }
                    } } }
                } }
            }
        }
    }
}

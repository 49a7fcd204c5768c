use super::*;
use proptest::prelude::*;

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

fn facts(freeze: Duration, mtbf: Duration) -> Facts {
    let one_percent = Percentage::millionths(10_000);
    Facts { freeze, mtbf, mtbf_source: MtbfSource::Configured, max_overhead: one_percent, persist: None }
}

/// The interval in seconds, what determined it, and its costs.
fn chosen(facts: &Facts) -> (u64, Bound, String, String) {
    let choice = choose(facts);
    let costs = [choice.expected_overhead, choice.expected_loss].map(|share| share.rounded().to_string());
    let [overhead, loss] = costs;
    (choice.interval.as_secs(), choice.bound, overhead, loss)
}

#[test]
fn examples_by_hand() {
    let text = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    let with = |t, bound, (a, b): (String, String)| (t, bound, a, b);
    // 616.57 s by Young; 616.57 * (1 + 0.0011894 + 0.0000014) - 2.2 by Daly.
    assert_eq!(chosen(&facts(millis(2200), DAY)), with(615, Bound::Daly, text("0.36%", "0.36%")));
    // Daly's 1845.7 s would be 1.08 % in freezes.
    assert_eq!(chosen(&facts(millis(20_000), DAY)), with(1980, Bound::MaxOverhead, text("1%", "1.15%")));
    let generous = Facts { max_overhead: Percentage::millionths(20_000), ..facts(millis(20_000), DAY) };
    assert_eq!(chosen(&generous), with(1845, Bound::Daly, text("1.07%", "1.07%")));
    let slow = Facts { persist: Some(millis(700_000)), ..facts(millis(2200), DAY) };
    assert_eq!(chosen(&slow), with(700, Bound::Persist, text("0.31%", "0.41%")));
    assert_eq!(chosen(&facts(millis(5), Duration::from_secs(10))), with(1, Bound::Minimum, text("0.5%", "5%")));
    assert_eq!(chosen(&facts(HOUR / 4, 3650 * DAY)), with(90_000 - 900, Bound::MaxOverhead, text("1%", "0.01%")));
    assert_eq!(chosen(&facts(HOUR / 10, 3650 * DAY)), with(86_400, Bound::Maximum, text("0.41%", "0.01%")));
    // A freeze of twice the mean time: T = M would exceed half of the time in freezes.
    let hopeless = Facts { max_overhead: Percentage::millionths(500_000), ..facts(2 * HOUR, HOUR) };
    assert_eq!(chosen(&hopeless), with(7200, Bound::MaxOverhead, text("50%", "100%")));
}

#[test]
fn the_arithmetic_can_be_followed() {
    let observed = MtbfSource::Observed { uptime: 36 * HOUR, failures: 2 };
    for (facts, line) in [
        (
            facts(millis(2200), DAY),
            "10m 15s: freeze 2.2s, a failure every 1day (configured): sqrt(2 * 2.2s * 1day) = 10m 16s, by Daly 10m 15s; \
             costs 0.36% in freezes and 0.36% in lost work",
        ),
        (
            Facts { mtbf_source: observed, ..facts(millis(20_000), 20 * HOUR) },
            "33m: freeze 20s, a failure every 20h (observed: 2 in 1day 12h, and 1 in 1day assumed before): \
             sqrt(2 * 20s * 20h) = 28m 17s, by Daly 28m 3s, raised to 20s / 1% - 20s by max-overhead; costs 1% in \
             freezes and 1.38% in lost work",
        ),
        (
            Facts { persist: Some(millis(90_500)), ..facts(millis(60), 20 * HOUR) },
            "1m 32s: freeze 60ms, a failure every 20h (configured): sqrt(2 * 60ms * 20h) = 1m 32s, by Daly 1m 32s; \
             costs 0.06% in freezes and 0.06% in lost work",
        ),
        (
            Facts { persist: Some(millis(120_000)), ..facts(millis(60), 20 * HOUR) },
            "2m: freeze 60ms, a failure every 20h (configured): sqrt(2 * 60ms * 20h) = 1m 32s, by Daly 1m 32s, raised \
             to the time that storing an image takes; costs 0.05% in freezes and 0.08% in lost work",
        ),
        (
            facts(millis(2), Duration::from_secs(10)),
            "1s: freeze 2.0ms, a failure every 10s (configured): sqrt(2 * 2.0ms * 10s) = 200ms, by Daly 198ms, raised to \
             the minimum of 1s; costs 0.2% in freezes and 5% in lost work",
        ),
        (
            Facts { max_overhead: Percentage::millionths(500_000), ..facts(millis(4000), millis(1500)) },
            "4s: freeze 4s, a failure every 1.5s (configured): the freeze is twice that or more, so 1.5s, raised to \
             4s / 50% - 4s by max-overhead; costs 50% in freezes and 100% in lost work",
        ),
    ] {
        assert_eq!(choose(&facts).to_string(), line);
    }
}

#[test]
fn only_a_changed_choice_is_news() {
    let at = |seconds| Choice { interval: Duration::from_secs(seconds), ..choose(&facts(millis(2200), DAY)) };
    assert!(!at(109).is_news_after(&at(100)) && !at(91).is_news_after(&at(100)));
    assert!(at(111).is_news_after(&at(100)) && at(89).is_news_after(&at(100)));
    assert!(Choice { bound: Bound::Persist, ..at(100) }.is_news_after(&at(100)));
}

#[test]
fn a_choice_is_json_with_units_in_its_names() {
    let source = MtbfSource::Observed { uptime: HOUR, failures: 1 };
    let choice = choose(&Facts { persist: Some(millis(3)), mtbf_source: source, ..facts(millis(2200), DAY) });
    let json = serde_json::to_value(&choice).unwrap();
    assert_eq!(json["freeze_us"], 2_200_000);
    assert_eq!(json["persist_us"], 3_000);
    assert_eq!(json["max_overhead_ppm"], 10_000);
    assert_eq!(json["mtbf_source"]["observed"]["uptime_us"], 3_600_000_000_u64);
    assert_eq!(json["bound"], "daly");
    assert_eq!(serde_json::from_value::<Choice>(json).unwrap(), choice);
    let plain = choose(&facts(millis(2200), DAY));
    let json = serde_json::to_value(&plain).unwrap();
    assert!(json["mtbf_source"] == "configured" && json.get("persist_us").is_none(), "{json}");
    assert_eq!(serde_json::from_value::<Choice>(json).unwrap(), plain);
}

/// Durations of every size, including the clock's whole range.
fn any_time() -> impl Strategy<Value = Duration> {
    prop_oneof![
        (0..u64::MAX, 0..1_000_000_000_u32).prop_map(|(s, n)| Duration::new(s, n)),
        (0..64_u32).prop_map(|bit| Duration::from_nanos(1 << bit)),
        (0..64_u32).prop_map(|bit| Duration::from_secs(1 << bit)),
        Just(Duration::ZERO),
        Just(Duration::MAX),
    ]
}

/// Values that the configuration allows, and freezes up to a day.
fn sane() -> impl Strategy<Value = Facts> {
    let time = |most: Duration| {
        (0..most.as_micros().ilog2()).prop_flat_map(|bit| (1_u64 << bit..2_u64 << bit).prop_map(Duration::from_micros))
    };
    let persist = proptest::option::of(time(DAY));
    (time(DAY), time(3650 * DAY), 100..=500_000_u32, persist).prop_map(|(freeze, mtbf, share, persist)| Facts {
        max_overhead: Percentage::millionths(share),
        persist,
        ..facts(freeze, mtbf)
    })
}

proptest! {
    #[test]
    fn nothing_breaks_the_arithmetic(freeze in any_time(), mtbf in any_time(), share: u32, persist in any_time()) {
        let max_overhead = Percentage::millionths(share);
        let choice = choose(&Facts { max_overhead, persist: Some(persist), ..facts(freeze, mtbf) });
        prop_assert!(choice.interval >= SHORTEST && choice.interval <= FOREVER);
        prop_assert!(std::time::Instant::now().checked_add(choice.interval).is_some());
        prop_assert!(!choice.to_string().contains("NaN"));
        let text = serde_json::to_string(&choice).unwrap();
        prop_assert_eq!(serde_json::from_str::<Choice>(&text).unwrap(), choice);
    }

    #[test]
    fn every_bound_holds_and_the_one_named_decided(facts in sane()) {
        let choice = choose(&facts);
        let Choice { interval, freeze, bound, .. } = choice;
        prop_assert!(interval >= SHORTEST);
        prop_assert!(facts.persist.is_none_or(|persist| interval >= persist));
        // d / (T + d) <= share, in whole numbers.
        let share = u128::from(facts.max_overhead.as_millionths());
        let cost = |t: Duration| freeze.as_micros() * 1_000_000 <= share * (t + freeze).as_micros();
        prop_assert!(cost(interval) && choice.expected_overhead <= facts.max_overhead);
        let less = interval - Duration::from_micros(1);
        match bound {
            Bound::Daly => prop_assert!(interval.abs_diff(daly(freeze, choice.mtbf)) <= Duration::from_micros(1)),
            Bound::MaxOverhead => prop_assert!(!cost(less)),
            Bound::Persist => prop_assert_eq!(facts.persist, Some(interval)),
            Bound::Minimum => prop_assert_eq!(interval, SHORTEST),
            Bound::Maximum => prop_assert_eq!(interval, LONGEST),
        }
        if bound != Bound::MaxOverhead && bound != Bound::Persist {
            prop_assert!(interval <= LONGEST);
        }
    }

    #[test]
    fn a_longer_freeze_and_rarer_failures_make_it_longer(facts in sane(), more in 1.0..100.0_f64) {
        // Rounding to a microsecond.
        let jitter = Duration::from_micros(1);
        let before = choose(&facts).interval;
        let slower = choose(&Facts { freeze: facts.freeze.mul_f64(more).min(DAY), ..facts }).interval;
        prop_assert!(facts.freeze.mul_f64(more) > DAY || slower + jitter >= before, "{:?} {:?}", slower, before);
        let rarer = choose(&Facts { mtbf: facts.mtbf.mul_f64(more), ..facts }).interval;
        prop_assert!(rarer + jitter >= before, "{:?} {:?}", rarer, before);
    }

    /// Near the optimum, a step to either side costs more, by the model behind the formula.
    #[test]
    fn the_formula_finds_the_cheapest_interval(freeze in 0.01..30.0_f64, hours in 1.0..1000.0_f64) {
        let m = hours * 3600.0;
        // Daly's model: the time that an hour of work takes, with exponential times between failures.
        let cost = |t: f64| ((t + freeze) / m).exp_m1() / t;
        let t = daly(Duration::from_secs_f64(freeze), Duration::from_secs_f64(m)).as_secs_f64();
        for factor in [0.8, 0.9, 1.1, 1.25] {
            prop_assert!(cost(t) < cost(t * factor), "{} at {}", factor, t);
        }
    }
}

//! Bar charts and line charts for reports of any measurement.

use super::svg::{Anchor, Scale, Svg};

const WIDTH: f64 = 860.0;
const LEFT: f64 = 250.0;
const RIGHT: f64 = WIDTH - 24.0;
const ROW: f64 = 24.0;

/// One bar of a chart, for example for one server.
pub struct Bar {
    pub name: String,
    pub class: &'static str,
    pub value: f64,
    /// The text at the bar's end.
    pub label: String,
}

pub fn bars(bars: &[Bar], axis: &str, title: &str) -> String {
    let longest = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    let scale = Scale::new(longest * 1.02, LEFT, RIGHT);
    let mut floor = 4.0;
    for _ in bars {
        floor += ROW;
    }
    let mut svg = Svg::new(WIDTH, floor + 44.0);
    for (value, text) in scale.ticks() {
        let x = scale.at(value);
        svg.line("grid", (x, 2.0), (x, floor));
        svg.text("tick", (x, floor + 16.0), Anchor::Middle, &text);
    }
    let mut y = 4.0;
    for bar in bars {
        let end = scale.at(bar.value);
        svg.rect(bar.class, LEFT, y, end - LEFT, ROW - 6.0);
        svg.text("server", (LEFT - 10.0, y + 13.0), Anchor::End, &bar.name);
        // The label goes inside the bar if there is no room after it.
        let room = RIGHT - end > 190.0;
        let (x, anchor) = if room { (end + 7.0, Anchor::Start) } else { (end - 7.0, Anchor::End) };
        let class = if room { "value" } else { "value inside" };
        svg.text(class, (x, y + 13.0), anchor, &bar.label);
        y += ROW;
    }
    svg.line("axis", (LEFT, floor), (RIGHT, floor));
    svg.text("label", (f64::midpoint(LEFT, RIGHT), floor + 36.0), Anchor::Middle, axis);
    svg.finish(title)
}

/// One line of [`curve`]. It has a value for each of the positions that all lines share.
pub struct Line {
    pub name: String,
    pub values: Vec<Option<f64>>,
}

const CURVE_LEFT: f64 = 70.0;
const CURVE_RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 30.0;
const FLOOR: f64 = 230.0;

/// One line of [`spreads`]: at each position the least, the median and the greatest of several measurements.
pub struct Spread {
    pub name: String,
    pub values: Vec<Option<[f64; 3]>>,
}

/// Lines over named positions at equal distances, such as queue depths 1, 4 and 32.
pub fn curve(places: &[String], lines: &[Line], axes: (&str, &str), title: &str) -> String {
    let spread = |line: &Line| Spread {
        name: line.name.clone(),
        values: line.values.iter().map(|value| value.map(|value| [value; 3])).collect(),
    };
    spreads(places, &lines.iter().map(spread).collect::<Vec<_>>(), axes, title)
}

/// As [`curve`], through the medians, with a bar from the least to the greatest at each position.
pub fn spreads(places: &[String], lines: &[Spread], axes: (&str, &str), title: &str) -> String {
    let all = lines.iter().flat_map(|line| &line.values).flatten();
    let highest = all.map(|value| value[2]).fold(0.0, f64::max);
    let scale = Scale::new(highest, FLOOR, TOP);
    let mut svg = Svg::new(WIDTH, FLOOR + 44.0);
    grid(&mut svg, &scale, axes);
    let xs = positions(places.len());
    for (x, place) in xs.iter().zip(places) {
        svg.text("tick", (*x, FLOOR + 16.0), Anchor::Middle, place);
    }
    for (number, line) in lines.iter().enumerate() {
        let class = format!("line s{}", number % 4);
        let points: Vec<(f64, [f64; 3])> =
            xs.iter().zip(&line.values).filter_map(|(x, value)| Some((*x, (*value)?))).collect();
        let middle: Vec<(f64, f64)> =
            points.iter().map(|(x, value)| (*x, scale.at(value[1]))).collect();
        svg.polyline(&class, &middle);
        for (x, [low, median, high]) in points {
            svg.rect(&format!("dot s{}", number % 4), x - 2.5, scale.at(median) - 2.5, 5.0, 5.0);
            if low < high {
                svg.line(&class, (x, scale.at(low)), (x, scale.at(high)));
            }
        }
        legend(&mut svg, number, &line.name);
    }
    svg.finish(title)
}

fn positions(count: usize) -> Vec<f64> {
    let inset = 24.0;
    let width = CURVE_RIGHT - CURVE_LEFT - 2.0 * inset;
    let last = u32::try_from(count.saturating_sub(1)).expect("a few places").max(1);
    (0..count)
        .map(|index| {
            let index = u32::try_from(index).expect("a few places");
            CURVE_LEFT + inset + width * f64::from(index) / f64::from(last)
        })
        .collect()
}

/// One line of [`traces`], over time or another number.
pub struct Trace {
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// Lines over a common axis of numbers.
pub fn traces(traces: &[Trace], axes: (&str, &str), title: &str) -> String {
    let all = || traces.iter().flat_map(|trace| &trace.points);
    let across =
        Scale::new(all().map(|point| point.0).fold(0.0, f64::max), CURVE_LEFT, CURVE_RIGHT);
    let up = Scale::new(all().map(|point| point.1).fold(0.0, f64::max), FLOOR, TOP);
    let mut svg = Svg::new(WIDTH, FLOOR + 44.0);
    grid(&mut svg, &up, axes);
    for (value, text) in across.ticks() {
        svg.text("tick", (across.at(value), FLOOR + 16.0), Anchor::Middle, &text);
    }
    for (number, trace) in traces.iter().enumerate() {
        let points: Vec<_> = trace.points.iter().map(|(x, y)| (across.at(*x), up.at(*y))).collect();
        svg.polyline(&format!("line s{}", number % 4), &points);
        legend(&mut svg, number, &trace.name);
    }
    svg.finish(title)
}

/// The grid behind the curves, and the axes' labels.
fn grid(svg: &mut Svg, up: &Scale, axes: (&str, &str)) {
    for (value, text) in up.ticks() {
        let y = up.at(value);
        svg.line("grid", (CURVE_LEFT, y), (CURVE_RIGHT, y));
        svg.text("tick", (CURVE_LEFT - 8.0, y + 4.0), Anchor::End, &text);
    }
    svg.line("axis", (CURVE_LEFT, FLOOR), (CURVE_RIGHT, FLOOR));
    let middle = f64::midpoint(CURVE_LEFT, CURVE_RIGHT);
    svg.text("label", (middle, FLOOR + 36.0), Anchor::Middle, axes.0);
    svg.text("label", (CURVE_LEFT, TOP - 12.0), Anchor::Start, axes.1);
}

/// The legend's entry for the line with this number.
fn legend(svg: &mut Svg, number: usize, name: &str) {
    let y = TOP + 6.0 + 20.0 * f64::from(u32::try_from(number).expect("a few lines"));
    let class = format!("line s{}", number % 4);
    svg.line(&class, (CURVE_RIGHT + 16.0, y), (CURVE_RIGHT + 36.0, y));
    svg.text("server", (CURVE_RIGHT + 42.0, y + 4.0), Anchor::Start, name);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_server_has_a_bar() {
        let bar = |name: &str, value| Bar {
            name: name.into(),
            class: "peer",
            value,
            label: value.to_string(),
        };
        let svg = bars(&[bar("a", 1.0), bar("b", 2.0)], "IOPS", "title");
        assert_eq!(svg.matches("class=\"peer\"").count(), 2);
    }

    #[test]
    fn measurements_that_differ_have_a_bar() {
        let line = |value| Spread { name: "a".into(), values: vec![Some(value)] };
        let bars = |lines: &[Spread]| {
            let svg = spreads(&["1".to_owned()], lines, ("clients", "IOPS"), "title");
            svg.matches("<line class=\"line s0\"").count()
        };
        // One is the legend's.
        assert_eq!(bars(&[line([2.0, 2.0, 2.0])]), 1);
        assert_eq!(bars(&[line([1.0, 2.0, 3.0])]), 2);
    }

    #[test]
    fn a_place_without_a_value_is_left_out_of_its_line() {
        let lines =
            [Line { name: "a".into(), values: vec![Some(1.0), None, Some(3.0), Some(4.0)] }];
        let places: Vec<String> = ["1", "2", "4", "8"].map(String::from).into();
        let svg = curve(&places, &lines, ("clients", "IOPS"), "title");
        assert_eq!(svg.matches("class=\"dot s0\"").count(), 3);
    }
}

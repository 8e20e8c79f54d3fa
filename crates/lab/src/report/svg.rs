//! A small writer of SVG: shapes whose colours come from CSS classes, and axes with round steps.

use std::fmt::{Display, Write};

/// Escapes text for HTML and SVG, also for attributes.
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// Which point of a text its x coordinate means.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

#[derive(Debug)]
pub struct Svg {
    width: f64,
    height: f64,
    body: String,
}

/// A coordinate with at most one decimal, which is finer than a pixel.
struct Px(f64);

impl Display for Px {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let rounded = (self.0 * 10.0).round() / 10.0;
        write!(f, "{rounded}")
    }
}

impl Svg {
    pub fn new(width: f64, height: f64) -> Self {
        Self { width, height, body: String::new() }
    }

    // Writing to a String cannot fail, so the results below are ignored.

    pub fn rect(&mut self, class: &str, x: f64, y: f64, width: f64, height: f64) {
        let (x, y, width, height) = (Px(x), Px(y), Px(width.max(0.0)), Px(height.max(0.0)));
        let _ = writeln!(
            self.body,
            r#"<rect class="{class}" x="{x}" y="{y}" width="{width}" height="{height}"/>"#
        );
    }

    pub fn line(&mut self, class: &str, from: (f64, f64), to: (f64, f64)) {
        let (x1, y1, x2, y2) = (Px(from.0), Px(from.1), Px(to.0), Px(to.1));
        let _ = writeln!(
            self.body,
            r#"<line class="{class}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>"#
        );
    }

    pub fn text(&mut self, class: &str, at: (f64, f64), anchor: Anchor, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            r#"<text class="{class}" x="{}" y="{}" text-anchor="{anchor}">{}</text>"#,
            Px(at.0),
            Px(at.1),
            escape(text)
        );
    }

    /// A line through the points; fewer than two points draw nothing.
    pub fn polyline(&mut self, class: &str, points: &[(f64, f64)]) {
        if points.len() >= 2 {
            let _ = writeln!(self.body, r#"<polyline class="{class}" points="{}"/>"#, list(points));
        }
    }

    /// The area between the points and a horizontal line.
    pub fn area(&mut self, class: &str, points: &[(f64, f64)], floor: f64) {
        if let (Some(first), Some(last), true) = (points.first(), points.last(), points.len() >= 2)
        {
            let around = [&[(first.0, floor)], points, &[(last.0, floor)]].concat();
            let _ = writeln!(self.body, r#"<polygon class="{class}" points="{}"/>"#, list(&around));
        }
    }

    /// Ends the picture. A screen reader reads `title` aloud.
    pub fn finish(self, title: &str) -> String {
        format!(
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n{}</svg>\n",
            Px(self.width),
            Px(self.height),
            escape(title),
            self.body
        )
    }
}

fn list(points: &[(f64, f64)]) -> String {
    points.iter().map(|(x, y)| format!("{},{}", Px(*x), Px(*y))).collect::<Vec<_>>().join(" ")
}

/// Maps values, from 0 on, to coordinates.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    max: f64,
    from: f64,
    to: f64,
}

impl Scale {
    /// `max` is rounded up to the next step, so that the last tick is the end of the axis.
    pub fn new(max: f64, from: f64, to: f64) -> Self {
        let step = step_for(max);
        Self { max: (max / step).ceil().max(1.0) * step, from, to }
    }

    pub fn at(&self, value: f64) -> f64 {
        self.from + (self.to - self.from) * value / self.max
    }

    /// The ticks with their labels.
    pub fn ticks(&self) -> Vec<(f64, String)> {
        let step = step_for(self.max);
        let decimals = if step >= 1.0 { 0 } else { 1 };
        let mut ticks = Vec::new();
        let mut value = 0.0;
        while value <= self.max + step / 2.0 {
            ticks.push((value, format!("{value:.decimals$}")));
            value += step;
        }
        ticks
    }
}

/// 1, 2 or 5 times a power of ten that gives at most six steps; never below 0.1.
fn step_for(max: f64) -> f64 {
    let mut decade = 0.1;
    loop {
        for factor in [1.0, 2.0, 5.0] {
            if max / (decade * factor) <= 6.0 {
                return decade * factor;
            }
        }
        // This also ends the loop for an infinite value or NaN.
        if decade > 1e15 || !max.is_finite() {
            return decade;
        }
        decade *= 10.0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_become_markup() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.text("t", (1.0, 2.0), Anchor::Start, "<script>\"&'");
        let text = svg.finish("a \"title\"");
        assert!(text.contains("&lt;script&gt;&quot;&amp;&#39;"), "{text}");
        assert!(text.contains("aria-label=\"a &quot;title&quot;\""), "{text}");
    }

    #[test]
    fn coordinates_have_one_decimal_and_sizes_are_not_negative() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.rect("r", 1.2345, 2.0, -3.0, 4.0);
        assert!(svg.finish("").contains(r#"x="1.2" y="2" width="0" height="4""#));
    }

    #[test]
    fn one_point_is_no_line() {
        let mut svg = Svg::new(10.0, 10.0);
        svg.polyline("l", &[(1.0, 1.0)]);
        svg.area("a", &[(1.0, 1.0)], 5.0);
        assert!(!svg.finish("").contains("points"));
    }

    #[test]
    fn an_axis_ends_at_a_round_tick() {
        for max in [0.0, 0.3, 7.0, 61.0, 83.4, 1999.0] {
            let scale = Scale::new(max, 0.0, 100.0);
            let ticks = scale.ticks();
            assert!((2..=7).contains(&ticks.len()), "{max}: {ticks:?}");
            let last = ticks.last().expect("a tick").0;
            assert!(last >= max && (scale.at(last) - 100.0).abs() < 1e-6, "{max}: {ticks:?}");
        }
        assert_eq!(Scale::new(f64::NAN, 0.0, 1.0).ticks().len(), 2);
    }
}

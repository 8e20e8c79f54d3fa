//! Ratios.

/// `ours / theirs`; `None` if `theirs` is 0 or the result is not a number.
pub fn ratio(ours: f64, theirs: f64) -> Option<f64> {
    (theirs > 0.0 && ours.is_finite() && theirs.is_finite()).then(|| ours / theirs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_to_nothing_is_none() {
        assert_eq!(ratio(3.0, 2.0), Some(1.5));
        assert_eq!(ratio(3.0, 0.0), None);
        assert_eq!(ratio(f64::INFINITY, 2.0), None);
    }
}

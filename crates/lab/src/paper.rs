//! Figures of papers beside ours: how the experiments that repeat them judge them. `experiments/papers` collects the judgements.

use serde::{Deserialize, Serialize};

/// Whether a figure of ours agrees with theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Agrees,
    DoesNotAgree,
    /// The rounds do not say the same.
    RangesOverlap,
    /// There are too few rounds or too little data, or the paper names nothing to compare.
    NotJudged,
    NotMeasured,
}

impl Verdict {
    pub fn words(self) -> &'static str {
        match self {
            Self::Agrees => "agrees",
            Self::DoesNotAgree => "does not agree",
            Self::RangesOverlap => "not decided: the ranges overlap",
            Self::NotJudged => "not judged",
            Self::NotMeasured => "not measured",
        }
    }
}

/// One figure of the papers, theirs and ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    /// The papers and their numbers, and then what is meant there, with `, ` between them: `000 Fig. 14, 001 Fig. 7, both VMs`.
    /// `experiments/papers/src/list.rs` has the numbers.
    pub figure: String,
    pub theirs: String,
    pub ours: String,
    pub verdict: Verdict,
    /// Why ours does not agree, or is not judged or measured.
    pub why: Option<String>,
}

impl Figure {
    /// `ours`: what was measured, and whether it agrees; `None`: the run lacks it. `why` counts only where ours does not agree.
    pub fn new(figure: &str, theirs: &str, ours: Option<(String, bool)>, why: &str) -> Self {
        let (ours, verdict, why) = match ours {
            Some((ours, true)) => (ours, Verdict::Agrees, None),
            Some((ours, false)) => (ours, Verdict::DoesNotAgree, Some(why.to_owned())),
            None => {
                let lacks = "The run has not measured all of it.".to_owned();
                (String::new(), Verdict::NotMeasured, Some(lacks))
            }
        };
        Self { figure: figure.to_owned(), theirs: theirs.to_owned(), ours, verdict, why }
    }

    /// What an experiment does not measure.
    pub fn not_measured(figure: &str, theirs: &str, why: &str) -> Self {
        let mut lacks = Self::new(figure, theirs, None, "");
        lacks.why = Some(why.to_owned());
        lacks
    }
}

/// A quick run judges nothing.
pub fn judge_nothing(figures: &mut [Figure]) {
    for figure in figures {
        figure.verdict = Verdict::NotJudged;
        figure.why = Some("A quick run has too little data.".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_stands_only_where_ours_does_not_agree_or_is_missing() {
        let of = |ours| Figure::new("000 Fig. 1", "theirs", ours, "a reason");
        let [agrees, differs] = [true, false].map(|agrees| of(Some((String::new(), agrees))));
        assert_eq!((agrees.verdict, agrees.why), (Verdict::Agrees, None));
        assert_eq!(differs.verdict, Verdict::DoesNotAgree);
        assert_eq!(differs.why.as_deref(), Some("a reason"));
        let lacks = of(None);
        assert_eq!(lacks.verdict, Verdict::NotMeasured);
        assert_ne!(lacks.why.as_deref(), Some("a reason"));
    }
}

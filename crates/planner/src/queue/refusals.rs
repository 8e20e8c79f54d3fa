//! Bounds how many plans a pass makes that are refused. A job whose plan was refused is planned again in each pass, because
//! all that it depends on may have changed; thousands of them would take seconds. Beyond the bound they take turns: a round goes
//! over as many passes as are needed for each of them to be planned once.

use std::collections::BTreeMap;

use perigee_model::JobId;

/// The refused plans of a pass.
const IN_A_PASS: u32 = 256;

/// Which plans this pass has refused, and which jobs the round still has to come to.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    pass: u64,
    left: u32,
    /// Jobs were left for the next pass.
    put_off: bool,
    /// The pass with which the round has begun, if one pass is not enough.
    round: Option<u64>,
    /// The pass in which each job's plan was refused last, and why.
    last: BTreeMap<JobId, (u64, String)>,
}

impl Refusals {
    /// Begins a pass, with room for [`IN_A_PASS`] refused plans. Jobs that wait no more are forgotten.
    pub(super) fn begin_pass(&mut self, is_waiting: impl Fn(&JobId) -> bool) {
        self.last.retain(|job, _| is_waiting(job));
        self.round = self.put_off.then(|| self.round.unwrap_or(self.pass));
        self.pass += 1;
        (self.left, self.put_off) = (IN_A_PASS, false);
    }

    /// Whether jobs wait for the next pass to be planned.
    pub fn has_put_off(&self) -> bool {
        self.put_off
    }

    /// Why the job is not planned in this pass; `None` if it is.
    pub(super) fn why_not_now(&mut self, job: &JobId) -> Option<String> {
        let last = self.last.get(job);
        let had_its_turn = match (last, self.round) {
            (Some((pass, _)), Some(begun)) => (begun..self.pass).contains(pass),
            _ => false,
        };
        if !had_its_turn && self.left > 0 {
            return None;
        }
        self.put_off |= !had_its_turn;
        let not_yet = || "it is planned in a moment: many others are before it".to_owned();
        Some(last.map_or_else(not_yet, |(_, why)| why.clone()))
    }

    /// The job was planned in this pass, and its plan was refused.
    pub(super) fn note(&mut self, job: &JobId, why: &str) {
        self.left = self.left.saturating_sub(1);
        self.last.insert(job.clone(), (self.pass, why.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(number: u32) -> JobId {
        JobId::new(format!("j-{number:04}")).expect("a name")
    }

    /// Plans so many jobs, all of which are refused. Returns those that were planned.
    fn pass(refusals: &mut Refusals, jobs: u32) -> Vec<u32> {
        refusals.begin_pass(|_| true);
        let mut planned = Vec::new();
        for number in 0..jobs {
            if refusals.why_not_now(&job(number)).is_none() {
                refusals.note(&job(number), "no link");
                planned.push(number);
            }
        }
        planned
    }

    #[test]
    fn few_refused_jobs_are_planned_in_each_pass() {
        let mut refusals = Refusals::default();
        for _ in 0..3 {
            assert_eq!(pass(&mut refusals, IN_A_PASS).len(), IN_A_PASS as usize);
            assert!(!refusals.has_put_off());
        }
    }

    #[test]
    fn many_refused_jobs_take_turns() {
        let mut refusals = Refusals::default();
        let all = IN_A_PASS * 2 + 10;
        for _ in 0..2 {
            let (first, second) = (pass(&mut refusals, all), pass(&mut refusals, all));
            assert!(refusals.has_put_off());
            let third = pass(&mut refusals, all);
            assert!(!refusals.has_put_off());
            let planned = [first, second, third].concat();
            assert_eq!(planned, (0..all).collect::<Vec<u32>>(), "each once, in their order");
        }
        assert_eq!(refusals.why_not_now(&job(0)).as_deref(), Some("no link"));
    }
}

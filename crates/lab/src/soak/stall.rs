//! Whether anything still goes on: the decision to give a soak up.

use std::time::Duration;

use perigee_model::job::{Job, Migration};

/// A soak fails when no job ends for this long. On a busy machine a job with several moves takes minutes.
const QUIET_MAX: Duration = Duration::from_secs(15 * 60);

/// When a job ended last. Times are counted from the soak's begin.
#[derive(Debug, Default)]
pub struct Stall {
    ended: usize,
    since: Duration,
}

impl Stall {
    /// `ended`: how many jobs have ended until `now`. Returns where everything stands, in one sentence, when
    /// no job has ended for too long.
    pub fn check<'a>(
        &mut self,
        now: Duration,
        ended: usize,
        unfinished: impl Iterator<Item = &'a Job>,
    ) -> Option<String> {
        if ended != self.ended {
            (self.ended, self.since) = (ended, now);
        }
        if now.saturating_sub(self.since) < QUIET_MAX {
            return None;
        }
        let jobs: Vec<String> = unfinished.map(stands).collect();
        let jobs = if jobs.is_empty() { "there is none".to_owned() } else { jobs.join("; ") };
        Some(format!("no job has ended for {} min: {jobs}", QUIET_MAX.as_secs() / 60))
    }
}

/// Where a job and its move stand.
fn stands(job: &Job) -> String {
    let mut text = format!("job {} is {}", job.id, word(job.state));
    if let Some(host) = &job.host {
        text += &format!(" at {host}");
    }
    if let Some(progress) = &job.progress {
        text += &format!(", {} of {} done", progress.done, progress.total);
    }
    if !job.reason.is_empty() {
        text += &format!(" ({})", job.reason);
    }
    let open = job.migrations.iter().filter(|migration| !migration.state.is_final());
    for Migration { id, to, state, .. } in open {
        text += &format!(", and its move {id} to {to} is {}", word(state));
    }
    text
}

fn word(state: impl std::fmt::Debug) -> String {
    format!("{state:?}").to_lowercase()
}

#[cfg(test)]
mod tests {
    use perigee_model::job::MigrationState;

    use super::*;

    fn minutes(minutes: u64) -> Duration {
        Duration::from_secs(minutes * 60)
    }

    fn job() -> Job {
        let text = "name: soak\nimage: debian\ncommand: \"true\"\n";
        let spec = perigee_model::job_file::parse(text, "soak.yaml").expect("a job file").spec;
        let (id, vm) =
            ("soak-0007-m2".parse().expect("a name"), "soak-0007".parse().expect("a name"));
        let hosts = ["home1", "cloud1"].map(|host| host.parse().expect("a name"));
        let mut migration = Migration::new(id, vm, hosts, String::new(), 0);
        migration.state = MigrationState::Copying;
        let job = serde_json::json!({
            "id": "soak-0007", "spec": spec, "state": "running",
            "reason": "host home1 is unreachable", "host": "home1", "vm": "soak-0007", "waits": [],
            "exit_code": null, "progress": { "done": 3, "total": 40, "label": "" },
            "submitted_ms": 0, "started_ms": null, "running_ms": null, "ended_ms": null,
            "measured_s": null, "migrations": [migration], "left_out": 0, "members": [],
        });
        serde_json::from_value(job).expect("a job")
    }

    #[test]
    fn a_soak_in_which_no_job_ends_any_more_is_given_up_and_says_where_each_job_stands() {
        let (mut stall, job) = (Stall::default(), job());
        let mut check = |now, ended| stall.check(now, ended, [&job].into_iter());
        assert_eq!(check(minutes(14), 0), None);
        assert_eq!(check(minutes(15), 1), None, "one has just ended");
        assert_eq!(check(minutes(29), 1), None);
        assert_eq!(
            check(minutes(30), 1).expect("given up"),
            "no job has ended for 15 min: job soak-0007 is running at home1, 3 of 40 done (host \
             home1 is unreachable), and its move soak-0007-m2 to cloud1 is copying"
        );
    }

    #[test]
    fn a_soak_in_which_jobs_end_slowly_goes_on() {
        let mut stall = Stall::default();
        for ended in 0..20 {
            let now = minutes(14) * u32::try_from(ended).expect("few");
            assert_eq!(stall.check(now, ended, std::iter::empty()), None);
        }
    }
}

//! Outputs of jobs that end in every way, and images of running VMs.

use std::time::Duration;

use perigee_model::data::FileEntry;
use perigee_model::job::{Job, JobState};

use super::{Checked, System, ensure, succeeded, until, with_system};

const MIB: u64 = 1 << 20;

impl System {
    /// A job that runs at one host and has the given command, and further fields.
    async fn output_job(&self, name: &str, more: &str, command: &str) -> Checked<Job> {
        let command = command.replace('\n', "\n  ");
        self.submit(&format!(
            "name: {name}\nimage: debian\nmemory: 256MiB\nplacement: {{host: home1, move: never}}\n\
             {more}command: |\n  {command}\n"
        ))
        .await
    }

    /// The content of one of a job's files in the repository.
    async fn output_file(&self, job: &Job, name: &str) -> Checked<String> {
        let path = format!("/v1/data/~/jobs/{}/output/{name}", job.id);
        let bytes = self.client.get_bytes(&path).await?;
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}

#[test]
fn a_job_that_fails_or_is_stopped_gives_its_outputs() {
    with_system(async |system| {
        fails(&system).await?;
        times_out(&system).await?;
        is_cancelled(&system).await?;
        controller_is_killed(&system).await?;
        root_disk_is_saved(&system).await
    });
}

async fn fails(system: &System) -> Checked<()> {
    let more = "outputs: [\"/output/*.csv\", /output/dev, \"none/*\"]\n";
    let command = "echo one > /output/a.csv; ln -s a.csv /output/latest.csv; echo no > /output/b.txt\n\
                   mknod /output/dev c 1 3; exit 3";
    let job = system.output_job("fails", more, command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed && job.exit_code == Some(3), "{}", job.reason);
    ensure!(system.output_file(&job, "a.csv").await? == "one", "{:?}", job.outputs);
    ensure!(system.output_file(&job, "latest.csv").await? == "one", "a link is a copy");
    ensure!(system.output_file(&job, "b.txt").await.is_err(), "no pattern names it");
    ensure!(job.reason.contains("/output/dev: it is a device"), "{}", job.reason);
    let log = system.log(&job.id).await?;
    ensure!(log.iter().any(|line| line.contains("no file matches the output none/*")), "{log:?}");
    let dir = tempfile::tempdir().expect("a directory");
    let to = dir.path().join("files");
    let done =
        system.perigee(&["job", "output", job.id.as_str(), "--to", &to.display().to_string()]);
    ensure!(succeeded(&done), "{done:?}");
    let fetched = std::fs::read_to_string(to.join("output/a.csv")).unwrap_or_default();
    ensure!(fetched == "one\n", "{fetched:?}");
    Ok(())
}

async fn times_out(system: &System) -> Checked<()> {
    let command = "echo half > /output/half; sleep 100000";
    let job = system.output_job("late", "timeout: 15s\n", command).await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Failed && job.reason.contains("timeout"), "{}", job.reason);
    ensure!(system.output_file(&job, "half").await? == "half", "{:?}", job.outputs);
    Ok(())
}

async fn is_cancelled(system: &System) -> Checked<()> {
    let command = "trap 'echo end > /output/end; echo bye; exit 0' TERM\necho begin > /output/begin\n\
                   echo 1/2 > $PERIGEE_PROGRESS\nwhile :; do sleep 1; done";
    let job = system.output_job("stopped", "", command).await?;
    until("the command to begin", async || Ok(system.job(&job.id).await?.progress.map(drop)))
        .await?;
    let done = system.perigee(&["job", "cancel", job.id.as_str()]);
    ensure!(succeeded(&done), "{done:?}");
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Cancelled, "{:?} {}", job.state, job.reason);
    ensure!(job.reason == "cancelled on request", "{}", job.reason);
    for name in ["begin", "end"] {
        ensure!(system.output_file(&job, name).await? == name, "{name}: {:?}", job.outputs);
    }
    let log = system.log(&job.id).await?;
    ensure!(log.iter().any(|line| line == "bye"), "{log:?}");
    Ok(())
}

async fn controller_is_killed(system: &System) -> Checked<()> {
    let command = "head -c 150M /dev/urandom > /output/large\n\
                   for n in $(seq 200); do echo $n > /output/small-$n; done\n\
                   sha256sum < /output/large | cut -d' ' -f1 > /output/sum";
    let job = system.output_job("large", "", command).await?;
    for pause_ms in [300, 900] {
        until("the outputs to be fetched", async || {
            let job = system.job(&job.id).await?;
            Ok((job.state == JobState::Collecting || job.state.is_final()).then_some(()))
        })
        .await?;
        tokio::time::sleep(Duration::from_millis(pause_ms)).await;
        system.kill_daemon("controller", None).await?;
    }
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded && job.reason.is_empty(), "{}", job.reason);
    let files = job.outputs.as_ref().map(|outputs| outputs.files);
    ensure!(files == Some(202), "{:?}", job.outputs);
    let path = format!("/v1/data/~/jobs/{}/output/large?stat", job.id);
    let large: FileEntry = system.get(&path).await?;
    ensure!(large.size_bytes == 150 * MIB, "{large:?}");
    ensure!(large.sha256 == Some(system.output_file(&job, "sum").await?), "{large:?}");
    Ok(())
}

async fn root_disk_is_saved(system: &System) -> Checked<()> {
    let command = "echo saved > /root/marker\necho 1/2 > $PERIGEE_PROGRESS\nsleep 100000";
    let job = system.output_job("saved", "", command).await?;
    until("the command to begin", async || Ok(system.job(&job.id).await?.progress.map(drop)))
        .await?;
    let done = system.perigee(&["image", "save", job.id.as_str(), "mine"]);
    ensure!(succeeded(&done), "{done:?}");
    let done = system.perigee(&["job", "cancel", "--now", job.id.as_str()]);
    ensure!(succeeded(&done), "{done:?}");
    let ended = system.ended(&job.id).await?;
    ensure!(ended.outputs.is_none(), "{:?}", ended.outputs);
    let job = system
        .submit(
            "name: again\nimage: mine\nmemory: 256MiB\nplacement: {site: cloud}\n\
             command: cat /root/marker > /output/marker",
        )
        .await?;
    let job = system.ended(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{}", job.reason);
    ensure!(system.output_file(&job, "marker").await? == "saved", "the image has what was written");
    Ok(())
}

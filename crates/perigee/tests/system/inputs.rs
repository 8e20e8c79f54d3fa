//! Jobs with inputs, in a real guest.

use perigee_model::job::{ClusterImage, Job, JobState};

use super::{Checked, System, ensure, until};

const LOOK: &str = "\
name: look
image: debian
memory: 256MiB
placement: {host: home1, move: never}
inputs:
  - run.sh
  - {from: tree, to: data}
  - repo://default/measured
  - {from: 'repo://physics/shared/p.txt', to: theirs.txt}
command: ./inputs/run.sh
";

const RUN: &str = "\
#!/bin/sh
set -e
cd inputs
test ! -e lost+found
find . -type f | sort | xargs sha256sum > /output/sums
stat -c '%u:%g %a' run.sh data/deep/b > /output/owners
echo more >> data/deep/b
dd if=/dev/zero of=beside bs=1M count=64 2>/dev/null
df -m . | tail -1 > /output/disk
";

fn run(system: &System, arguments: &[&str]) -> Checked<String> {
    let output = system.perigee(arguments);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "{arguments:?}: {said}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

async fn images(system: &System) -> Checked<Vec<String>> {
    let all: Vec<ClusterImage> = system.get("/v1/images?all=true").await?;
    let names = all.into_iter().map(|image| image.name.to_string());
    Ok(names.filter(|name| name.starts_with("inputs-")).collect())
}

/// Submits the job file, and returns the job at its end and what it has put out.
async fn look(system: &System, file: &str, to: &str) -> Checked<(Job, String)> {
    let shown = run(system, &["-f", "json", "job", "submit", file])?;
    let submitted: Job = serde_json::from_str(&shown).expect("a job");
    let job = system.ended(&submitted.id).await?;
    let log = system.log(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}; {log:?}", job.state, job.reason);
    run(system, &["job", "output", job.id.as_str(), "--to", to])?;
    let sums = std::fs::read_to_string(format!("{to}/output/sums")).unwrap_or_default();
    Ok((job, sums))
}

pub async fn a_job_has_its_inputs(system: &System) -> Checked<()> {
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let write = |name: &str, content: &[u8]| {
        let path = scratch.path().join(name);
        std::fs::create_dir_all(path.parent().expect("above")).expect("directories");
        std::fs::write(path, content).expect("a file");
    };
    let large: Vec<u8> = (0..40_u32 << 20).map(|at| at.wrapping_mul(31).to_le_bytes()[1]).collect();
    write("job/look.yaml", LOOK.as_bytes());
    write("job/run.sh", RUN.as_bytes());
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path("job/run.sh"), mode).expect("a mode");
    write("job/tree/large", &large);
    write("job/tree/deep/b", b"b\n");
    write("up/m.csv", b"1,2\n");
    write("up/p.txt", b"theirs\n");
    run(system, &["data", "put", &path("up/m.csv"), "repo://default/measured/m.csv"])?;
    run(system, &["tenant", "create", "physics"])?;
    run(system, &["data", "put", &path("up/p.txt"), "repo://physics/shared/p.txt"])?;
    let file = path("job/look.yaml");
    let refused = system.perigee(&["job", "submit", &file]);
    let said = String::from_utf8_lossy(&refused.stderr);
    ensure!(refused.status.code() == Some(4), "{:?}: {said}", refused.status);
    run(system, &["data", "share", "repo://physics/shared", "--with", "default"])?;

    let (first, sums) = look(system, &file, &path("first")).await?;
    for name in ["./data/deep/b", "./data/large", "./measured/m.csv", "./run.sh", "./theirs.txt"] {
        ensure!(sums.lines().any(|line| line.ends_with(name)), "{name} is not in {sums}");
    }
    ensure!(sums.lines().count() == 5, "{sums}");
    let owners = std::fs::read_to_string(path("first/output/owners")).unwrap_or_default();
    ensure!(owners == "0:0 755\n0:0 644\n", "{owners}");
    let made = images(system).await?;
    ensure!(made.len() == 1, "{made:?}");
    let (second, again) = look(system, &file, &path("second")).await?;
    ensure!(again == sums, "what one job writes is not seen by the next: {again}");
    ensure!(first.id != second.id, "two jobs");
    ensure!(images(system).await? == made, "the same inputs are staged once");
    Ok(())
}

/// The volume of the tries is at another host, and keeps what is written.
const TWICE: &str = "\
name: twice
image: debian
memory: 256MiB
placement: {site: home, move: never}
restart: on-host-failure
volumes: [{volume: tries, mount: /tries}]
inputs: ['repo://default/clean/sent.txt']
command: |
  set -e
  try=$(cat /tries/count 2>/dev/null || echo 1)
  echo \"$try\" > /output/try
  cat inputs/sent.txt > /output/sent
  for file in /root/written inputs/written /output/written; do
    test ! -e $file || echo $file
  done > /output/found
  echo \"try $try\"
  test $try = 1 || exit 0
  echo 2 > /tries/count
  echo changed > inputs/sent.txt
  for file in /root/written inputs/written /output/written; do echo written > $file; done
  sync
  echo 1/2 > $PERIGEE_PROGRESS
  sleep 100000
";

/// Its first try has written to its root disk, its inputs and its outputs when its host loses power.
pub async fn a_retry_starts_clean(system: &System) -> Checked<()> {
    system.volume("tries", "cloud1", 64 << 20).await?;
    let scratch = tempfile::tempdir().expect("a scratch directory");
    let path = |name: &str| scratch.path().join(name).display().to_string();
    std::fs::write(path("sent.txt"), "as it was sent\n").expect("a file");
    std::fs::write(path("twice.yaml"), TWICE).expect("a file");
    run(system, &["data", "put", &path("sent.txt"), "repo://default/clean/sent.txt"])?;
    let shown = run(system, &["-f", "json", "job", "submit", &path("twice.yaml")])?;
    let submitted: Job = serde_json::from_str(&shown).expect("a job");
    let running = until("the first try to have written", async || {
        let job = system.job(&submitted.id).await?;
        ensure!(!job.state.is_final(), "it ended: {}", job.reason);
        Ok(Some(job).filter(|job| job.progress.is_some()))
    })
    .await?;
    let host = running.host.clone().expect("it runs");
    perigee_lab::soak::cut_power(&system.lab, &host).await?;
    let job = until("the second try to end", async || {
        let job = system.job(&submitted.id).await?;
        let log = system.log(&submitted.id).await?;
        ensure!(job.state.is_final(), "{:?} at {:?}: {}; {log:?}", job.state, job.host, job.reason);
        Ok(Some(job))
    })
    .await?;
    let log = system.log(&job.id).await?;
    ensure!(job.state == JobState::Succeeded, "{:?}: {}; {log:?}", job.state, job.reason);
    ensure!(log.iter().any(|line| line == "try 2"), "{log:?}");
    // The log of the run that was lost is kept before it.
    ensure!(log.last().is_some_and(|line| line == "try 2"), "{log:?}");
    ensure!(log.iter().any(|line| line.contains("the job starts again")), "{log:?}");
    run(system, &["job", "output", job.id.as_str(), "--to", &path("out")])?;
    let output = |name: &str| std::fs::read_to_string(path(&format!("out/output/{name}")));
    ensure!(output("try").is_ok_and(|text| text == "2\n"), "it was not the second try");
    ensure!(output("sent").is_ok_and(|text| text == "as it was sent\n"), "{:?}", output("sent"));
    ensure!(output("found").is_ok_and(|text| text.is_empty()), "{:?}", output("found"));
    ensure!(output("written").is_err(), "the outputs are those of the first try");
    for at in ["home1", "home2"] {
        system.has_no_volume_of(&job, at).await?;
    }
    Ok(())
}

//! What the experiments share: the versions of programs, the machine's load, the lab of two hosts, medians, and goals.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use perigee_model::Problem;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::wan::LinkSettings;
use crate::{Definition, LabId};

/// The version of this workspace.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// QEMU's name and program, for [`versions`].
pub const QEMU: (&str, &str) = ("qemu", "qemu-system-x86_64");

/// The given version of Perigee, the kernel's, and those that programs print about themselves. `programs` are pairs of
/// a name and a program. One that is not installed is left out.
pub fn versions(perigee: impl Into<String>, programs: &[(&str, &str)]) -> BTreeMap<String, String> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let said = programs.iter().filter_map(|(name, program)| {
        Some(((*name).to_owned(), first_line(program, &["--version"])?))
    });
    let own = [("perigee", perigee.into()), ("host kernel", kernel.trim().to_owned())];
    said.chain(own.map(|(name, version)| (name.to_owned(), version))).collect()
}

/// The version that a `perigee` binary prints, and the commit of the working directory.
pub fn version_of(perigee: &Path) -> String {
    with_commit(first_line(&perigee.to_string_lossy(), &["--version"]))
}

/// The version of the code that calls this function, and the commit of the working directory.
pub fn own_version() -> String {
    with_commit(Some(format!("perigee {VERSION}")))
}

fn with_commit(version: Option<String>) -> String {
    let commit = first_line("git", &["rev-parse", "--short=12", "HEAD"]);
    // A run writes its results as it goes. They are no change of what is measured.
    let changes = "git diff --quiet HEAD -- . ':!experiments/*/results.json' ':!experiments/*/report.html' || echo -dirty";
    let dirty = first_line("sh", &["-c", changes]).unwrap_or_default();
    let [version, commit] =
        [version, commit].map(|text| text.unwrap_or_else(|| "unknown".to_owned()));
    format!("{version}, commit {commit}{dirty}")
}

/// The first line that a program prints. `None` if it can't be run or prints nothing.
fn first_line(program: &str, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().ok()?;
    String::from_utf8_lossy(&output.stdout).lines().next().map(|line| line.trim().to_owned())
}

/// How many threads have run or waited for a CPU, on average over the last minute.
///
/// # Errors
/// When the kernel does not say it.
pub fn load_1min() -> Result<f64, Problem> {
    let what = "can't read the load of the machine from /proc/loadavg";
    let text = std::fs::read_to_string("/proc/loadavg").map_err(|e| Problem::internal(what, e))?;
    let first = text.split(' ').next().unwrap_or_default();
    first.parse().map_err(|error| Problem::internal(what, format!("{first:?}: {error}")))
}

/// What an earlier run of an experiment has left as results.json in this directory.
///
/// # Errors
/// When there is no such file, or the file is of another program.
pub fn earlier<T: DeserializeOwned>(dir: &Path) -> Result<T, Problem> {
    let path = dir.join("results.json");
    let what = format!("can't read the earlier run {}", path.display());
    let next = "measure anew, or name the directory of a run of this program";
    let bytes = std::fs::read(&path).map_err(|e| Problem::invalid(&what, e).next(next))?;
    serde_json::from_slice(&bytes).map_err(|e| Problem::invalid(&what, e).next(next))
}

/// A lab of two sites with one host each: `home` with `home1`, and `cloud` with `cloud1`. The WAN between them has no
/// delay at first. `image` is the golden image's directory.
pub fn two_sites(image: &Path) -> Definition {
    let mut sites = Definition::default_sites();
    for site in &mut sites {
        site.hosts.truncate(1);
    }
    let mut definition = Definition::new(LabId::random(), sites, LinkSettings::of_rtt_us(0));
    definition.probe_kernel = Some(image.join("vmlinuz"));
    definition
}

/// The median of the values that are numbers; `None` without any. Of an even number of values it is the mean of the two
/// in the middle.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = *sorted.get((sorted.len() - 1) / 2)?;
    Some(f64::midpoint(lower, upper))
}

/// What an experiment is to show, and what it showed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Goal {
    pub goal: String,
    /// `None`: not measured.
    pub met: Option<bool>,
    pub measured: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_whatever_the_order() {
        assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median([7.0]), Some(7.0));
    }

    #[test]
    fn no_values_and_no_numbers_have_no_median() {
        assert_eq!(median([]), None);
        assert_eq!(median([f64::NAN]), None);
        assert_eq!(median([f64::NAN, 2.0]), Some(2.0));
    }

    #[test]
    fn a_program_that_is_not_installed_has_no_version() {
        let found = versions("0.1", &[("missing", "perigee-no-such-program"), ("cp", "cp")]);
        let names: Vec<&str> = found.keys().map(String::as_str).collect();
        assert_eq!(names, ["cp", "host kernel", "perigee"]);
        assert_eq!(found["perigee"], "0.1");
    }

    #[test]
    fn the_lab_has_one_host_in_each_site() {
        let hosts: Vec<String> = two_sites(Path::new("/"))
            .hosts()
            .map(|(site, host)| format!("{site}/{host}"))
            .collect();
        assert_eq!(hosts, ["home/home1", "cloud/cloud1"]);
    }
}

//! The CPU time, memory and disk reads of a process so far (proc(5)).

use perigee_model::Problem;

/// USER_HZ, the same on every Linux machine.
const TICKS_PER_S: f64 = 100.0;

/// What a process has used since its start.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    pub cpu_s: f64,
    /// The peak of its own memory, without the page cache.
    pub memory_peak_bytes: u64,
    /// What it read from disks.
    pub read_bytes: u64,
}

impl Usage {
    /// # Errors
    /// The process has ended, or its figures have an unexpected format.
    pub fn of(pid: u32) -> Result<Self, Problem> {
        let read = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            std::fs::read_to_string(&path)
                .map_err(|error| Problem::internal(format!("can't read {path}"), error))
        };
        let (stat, status, io) = (read("stat")?, read("status")?, read("io")?);
        let found = || {
            Some(Self {
                cpu_s: cpu_s(&stat)?,
                memory_peak_bytes: number(&status, "VmHWM:")? << 10,
                read_bytes: number(&io, "read_bytes:")?,
            })
        };
        found().ok_or_else(|| {
            let what = format!("can't measure process {pid}");
            Problem::internal(what, "its figures have an unexpected format")
        })
    }
}

/// User and system time of all threads.
fn cpu_s(stat: &str) -> Option<f64> {
    // The name in parentheses may contain any character; the fields after it are numbers.
    let fields = stat.rsplit_once(')')?.1.split_whitespace();
    let ticks: Option<Vec<u32>> = fields.skip(11).take(2).map(|field| field.parse().ok()).collect();
    Some(f64::from(ticks?.iter().sum::<u32>()) / TICKS_PER_S)
}

fn number(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_blanks_and_parentheses_does_not_shift_the_figures() {
        let stat = "7 (a) 1 2) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 4 0 1000 1 1";
        assert_eq!(cpu_s(stat), Some(3.0));
    }

    #[test]
    fn this_process_has_memory() {
        assert!(Usage::of(std::process::id()).expect("this process").memory_peak_bytes > 0);
    }
}

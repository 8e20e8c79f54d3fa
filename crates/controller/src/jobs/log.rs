//! A job's log, which is limited in size, and read in pages. It is in files ([`crate::job_files`]).
//!
//! Before [`level::JOB_FILES`] the lines are records, and those of an older log stay so until a line is added, or the job has ended (`to_files.rs`). A record is a piece, with the lines among 100
//! consecutive messages of the guest, and its key is the number of the hundred.

use std::sync::Arc;

use perigee_model::guest::LogStream;
use perigee_model::job::LogLine;
use perigee_model::{JobId, Problem};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::job_files::{JobDirectory, LOG_BYTES_MAX, MESSAGES_PER_PIECE, size_of};
use crate::level;
use crate::records::{JobRecord, LogKept, job_key};

/// The most lines in one answer, which is also the default.
pub const PAGE_LINES_MAX: usize = 10_000;

/// An answer ends after the line that reaches this size.
const PAGE_BYTES: u64 = 4 << 20;

/// Below it are the pieces of a log that is not in files.
pub fn prefix(job: &JobId) -> String {
    format!("logs/{job}/")
}

fn key(job: &JobId, piece: u64) -> String {
    format!("{}{piece:014}", prefix(job))
}

/// Stores lines, whose numbers grow, and drops the oldest ones beyond the limit. Lines with these numbers that are there already are those of a step that
/// was interrupted before its record was saved.
pub async fn store(
    cluster: &Cluster,
    files: &Arc<JobDirectory>,
    kept: &mut LogKept,
    lines: Vec<LogLine>,
) -> Result<(), Problem> {
    let Some(first) = lines.first() else { return Ok(()) };
    let mut older = Vec::new();
    if !files.has_log().await? {
        if level::in_force(&cluster.records).await? < level::JOB_FILES {
            return store_in_records(cluster, &files.job, kept, lines).await;
        }
        older = cluster.records.list::<Vec<LogLine>>(&prefix(&files.job)).await?.concat();
        older.retain(|line| line.seq < first.seq);
    }
    let (now, is_opened) = files.add_lines(older, lines, *kept).await?;
    *kept = now;
    if is_opened {
        cluster.records.remove_all(&prefix(&files.job)).await?;
    }
    Ok(())
}

async fn store_in_records(
    cluster: &Cluster,
    job: &JobId,
    kept: &mut LogKept,
    lines: Vec<LogLine>,
) -> Result<(), Problem> {
    let same_piece =
        |a: &LogLine, b: &LogLine| a.seq / MESSAGES_PER_PIECE == b.seq / MESSAGES_PER_PIECE;
    for new in lines.chunk_by(same_piece) {
        let key = key(job, new[0].seq / MESSAGES_PER_PIECE);
        let mut piece: Vec<LogLine> = cluster.records.read(&key).await?.unwrap_or_default();
        let last_seq = piece.last().map_or(0, |line| line.seq);
        let before = size_of(&piece);
        piece.extend(new.iter().filter(|line| line.seq > last_seq).cloned());
        cluster.records.put(&key, &piece).await?;
        kept.bytes += size_of(&piece) - before;
    }
    while kept.bytes > LOG_BYTES_MAX {
        let oldest = cluster.records.list_after::<Vec<LogLine>>(&prefix(job), "", 1).await?;
        let Some((key, piece)) = oldest.into_iter().next() else { break };
        kept.bytes = kept.bytes.saturating_sub(size_of(&piece));
        kept.dropped_lines += piece.len() as u64;
        kept.dropped_seq = piece.last().map_or(kept.dropped_seq, |line| line.seq);
        cluster.records.remove(&key).await?;
    }
    Ok(())
}

/// The log of a run that is lost is kept: it may say why. A line with the next number tells where the next run begins. Nothing is
/// added to an empty log.
pub async fn mark(
    cluster: &Cluster,
    files: &Arc<JobDirectory>,
    kept: &mut LogKept,
    last_seq: &mut u64,
    why: String,
) -> Result<(), Problem> {
    if kept.bytes == 0 {
        return Ok(());
    }
    *last_seq += 1;
    let (stream, line) = (LogStream::Stderr, format!("perigee: {why}"));
    let (seq, uptime_ms, arrived_ms) = (*last_seq, 0, now_ms());
    let continues = false;
    let line = LogLine { seq, uptime_ms, stream, line, continues, arrived_ms, rank: None };
    store(cluster, files, kept, vec![line]).await
}

/// What a job prints may not come here while it `hides`: one line takes the place of all of them.
pub fn hide(kept: &mut LogKept, hides: bool, lines: &mut Vec<LogLine>) {
    if lines.is_empty() {
        return;
    }
    if !hides {
        kept.hides = false;
        return;
    }
    lines.truncate(usize::from(!kept.hides));
    kept.hides = true;
    for line in lines {
        line.continues = false;
        line.line =
            "perigee: what this job prints may not leave its site and is not kept: write it \
                     to a file in /output, or say `writes: {leave-site: allowed}` in the job file"
                .to_owned();
    }
}

/// The first lines with a higher number than `after`, at most `limit`. An answer with fewer lines does not mean
/// that there are no more. One line replaces dropped lines and says how many they were.
pub async fn read(
    cluster: &Cluster,
    job: &JobId,
    after: u64,
    limit: usize,
) -> Result<Vec<LogLine>, Problem> {
    let record = super::record(cluster, job).await?;
    let files = files_of(cluster, &record);
    Ok(page(cluster, &files, &record.log, after, (limit, PAGE_BYTES)).await?.lines)
}

/// The files of a job.
pub fn files_of(cluster: &Cluster, record: &JobRecord) -> Arc<JobDirectory> {
    cluster.job_files.of(&record.job.id, record.job.submitted_ms)
}

/// A part of a log.
#[derive(Debug, Default)]
struct Page {
    lines: Vec<LogLine>,
    /// There may be more after it.
    is_cut: bool,
}

async fn page(
    cluster: &Cluster,
    files: &Arc<JobDirectory>,
    kept: &LogKept,
    after: u64,
    (limit, bytes_max): (usize, u64),
) -> Result<Page, Problem> {
    let limit = limit.clamp(1, PAGE_LINES_MAX);
    let mut page = Vec::new();
    if kept.dropped_seq > after {
        page.push(gap(kept));
    }
    // The record may have dropped lines whose segment is there yet.
    let (from_seq, room) = (after.max(kept.dropped_seq), limit - page.len());
    let in_files = files.log_after(from_seq, (room, bytes_max)).await?;
    let part = match in_files {
        Some(part) => part,
        None => {
            let before = page.clone();
            let limits = (limit, bytes_max);
            let found = page_of_records(cluster, &files.job, before, after, limits).await?;
            // They may have come into files meanwhile.
            match files.log_after(from_seq, (room, bytes_max)).await? {
                Some(part) => part,
                None => return Ok(found),
            }
        }
    };
    page.extend(part.lines);
    Ok(Page { lines: page, is_cut: part.is_cut })
}

/// As [`page`], of a log that is not in files. `page` has what comes before the first line.
async fn page_of_records(
    cluster: &Cluster,
    job: &JobId,
    mut page: Vec<LogLine>,
    after: u64,
    (limit, bytes_max): (usize, u64),
) -> Result<Page, Problem> {
    // The piece of `after` itself may have more.
    let mut from = match (after / MESSAGES_PER_PIECE).checked_sub(1) {
        Some(piece) => key(job, piece),
        None => String::new(),
    };
    let (mut bytes, mut is_cut) = (0, true);
    while page.len() < limit && bytes < bytes_max {
        let next = cluster.records.list_after::<Vec<LogLine>>(&prefix(job), &from, 1).await?;
        let Some((key, piece)) = next.into_iter().next() else {
            is_cut = false;
            break;
        };
        let before = page.len();
        page.extend(piece.into_iter().filter(|line| line.seq > after));
        bytes += size_of(&page[before..]);
        from = key;
    }
    // The last piece may be many times as large as what is left.
    let mut sum = 0;
    let fits = page.iter().take_while(|line| {
        let has_room = sum < bytes_max;
        sum += size_of(std::slice::from_ref(*line));
        has_room
    });
    let fits = fits.count().min(limit);
    is_cut |= page.len() > fits;
    page.truncate(fits);
    Ok(Page { lines: page, is_cut })
}

/// The same of the VMs of a gang, in the order in which their lines arrived. `after` has a number for each rank. One without a
/// record has no lines yet.
pub async fn read_all(
    cluster: &Cluster,
    members: &[JobId],
    after: &[u64],
    limit: usize,
) -> Result<Vec<LogLine>, Problem> {
    let bytes_max = PAGE_BYTES / members.len().max(1) as u64;
    let mut pages = Vec::new();
    for (index, member) in members.iter().enumerate() {
        let after = after.get(index).copied().unwrap_or_default();
        let found: Option<JobRecord> = cluster.records.read(&job_key(member)).await?;
        pages.push(match found {
            Some(found) => {
                let files = files_of(cluster, &found);
                page(cluster, &files, &found.log, after, (limit, bytes_max)).await?
            }
            None => Page::default(),
        });
    }
    Ok(merged(pages, limit.clamp(1, PAGE_LINES_MAX)))
}

/// Lines of one VM stay in their order. After the last line of a page that was cut nothing follows: the next one may have
/// arrived before all others.
fn merged(pages: Vec<Page>, limit: usize) -> Vec<LogLine> {
    let mut lines = Vec::new();
    let mut rest: Vec<_> =
        pages.into_iter().map(|page| (page.lines.into_iter().peekable(), page.is_cut)).collect();
    while lines.len() < limit {
        let heads = rest.iter_mut().enumerate();
        let heads = heads.filter_map(|(rank, (of, _))| Some((of.peek()?.arrived_ms, rank)));
        let Some((_, rank)) = heads.min() else { break };
        let (of, is_cut) = &mut rest[rank];
        lines.extend(of.next().map(|line| LogLine { rank: u32::try_from(rank).ok(), ..line }));
        if *is_cut && of.peek().is_none() {
            break;
        }
    }
    lines
}

fn gap(kept: &LogKept) -> LogLine {
    let (lines, mib) = (kept.dropped_lines, LOG_BYTES_MAX >> 20);
    LogLine {
        seq: kept.dropped_seq,
        uptime_ms: 0,
        stream: LogStream::Stderr,
        continues: false,
        line: format!(
            "perigee: {lines} lines before this are gone: a job's last {mib} MiB are kept"
        ),
        arrived_ms: 0,
        rank: None,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cluster::{Settings, Timing, Traffic};

    fn line_of(seq: u64, bytes: usize) -> LogLine {
        LogLine {
            seq,
            uptime_ms: 0,
            stream: LogStream::Stdout,
            continues: false,
            line: "x".repeat(bytes),
            arrived_ms: seq,
            rank: None,
        }
    }

    #[test]
    fn one_line_says_where_the_hidden_ones_go() {
        let line = |seq| LogLine { line: "secret".to_owned(), ..line_of(seq, 0) };
        let mut kept = LogKept::default();
        let mut left = |hides, mut lines: Vec<LogLine>| {
            hide(&mut kept, hides, &mut lines);
            lines
        };
        assert_eq!(left(false, vec![line(1)]).len(), 1, "it may come here");
        let told = left(true, vec![line(2), line(3)]);
        assert_eq!(told.len(), 1);
        assert!(told[0].line.contains("/output") && !told[0].line.contains("secret"));
        assert!(left(true, vec![line(4)]).is_empty());
        // The VM was at the site of its data for a while.
        assert!(left(false, Vec::new()).is_empty());
        assert!(left(true, vec![line(5)]).is_empty(), "nothing has come in between");
        assert_eq!(left(false, vec![line(6)])[0].line, "secret");
        assert_eq!(left(true, vec![line(7), line(8)]).len(), 1);
    }

    fn page_of(arrived: &[u64], is_cut: bool) -> Page {
        let line = |(seq, arrived_ms): (u64, &u64)| LogLine {
            line: arrived_ms.to_string(),
            arrived_ms: *arrived_ms,
            ..line_of(seq, 0)
        };
        Page { lines: (1..).zip(arrived).map(line).collect(), is_cut }
    }

    fn order(lines: &[LogLine]) -> Vec<(u32, u64)> {
        lines.iter().map(|line| (line.rank.expect("a rank"), line.arrived_ms)).collect()
    }

    #[test]
    fn lines_of_all_ranks_are_merged_as_they_arrived() {
        let pages =
            || vec![page_of(&[3, 7, 6], false), page_of(&[1, 3, 9], false), Page::default()];
        let all = merged(pages(), 100);
        assert_eq!(order(&all), [(1, 1), (0, 3), (1, 3), (0, 7), (0, 6), (1, 9)]);
        assert_eq!(order(&merged(pages(), 2)), [(1, 1), (0, 3)]);
        // What follows rank 0's line 7 may have arrived before rank 1's line 9.
        let cut = merged(vec![page_of(&[3, 7], true), page_of(&[1, 3, 9], false)], 100);
        assert_eq!(order(&cut), [(1, 1), (0, 3), (1, 3), (0, 7)]);
        assert!(merged(vec![Page::default()], 5).is_empty());
    }

    /// A controller without tasks, whose store has this format level.
    pub async fn controller(level: u32) -> (tempfile::TempDir, Arc<Cluster>) {
        let dir = tempfile::tempdir().expect("tempdir");
        let (wanted, _) = tokio::sync::mpsc::unbounded_channel();
        let (timing, settings) = (Timing::default(), Settings::default());
        let opened = Cluster::open(dir.path(), timing, Traffic::Plain, settings, wanted).await;
        let cluster = opened.expect("opened");
        level::raise(&cluster.records, level).await.expect("a level");
        (dir, cluster)
    }

    async fn read_pages(
        cluster: &Cluster,
        files: &Arc<JobDirectory>,
        kept: &LogKept,
    ) -> Vec<LogLine> {
        let (mut after, mut read) = (0, Vec::new());
        loop {
            let page =
                page(cluster, files, kept, after, (7, PAGE_BYTES)).await.expect("read").lines;
            assert!(page.len() <= 7, "{} lines", page.len());
            let Some(last) = page.last() else { return read };
            after = last.seq;
            read.extend(page);
        }
    }

    async fn keeps_its_last_part(level: u32) {
        let (_dir, cluster) = controller(level).await;
        let (cluster, job) = (&cluster, JobId::new("q-0001").expect("name"));
        let files = cluster.job_files.of(&job, 1);
        let mut kept = LogKept::default();
        for batch in 0..20 {
            let seqs = 40 * batch + 1..=40 * (batch + 1);
            let lines: Vec<LogLine> = seqs.map(|seq| line_of(seq, 32 << 10)).collect();
            store(cluster, &files, &mut kept, lines.clone()).await.expect("store");
            if batch % 5 == 4 {
                let before = kept.bytes;
                store(cluster, &files, &mut kept, lines).await.expect("again, after a crash");
                assert_eq!(kept.bytes, before);
            }
        }
        let read = read_pages(cluster, &files, &kept).await;
        assert_eq!(
            read[0].line,
            "perigee: 299 lines before this are gone: a job's last 16 MiB are kept"
        );
        let seqs: Vec<u64> = read.iter().map(|line| line.seq).collect();
        assert_eq!(seqs, (299..=800).collect::<Vec<_>>());
        // Of each of a gang's 128 VMs, whose lines may be long; also after the last line of a piece that is itself larger than such an answer.
        for (after, expected) in [(700, [701, 702]), (699, [700, 701])] {
            let limits = (PAGE_LINES_MAX, 40 << 10);
            let part = page(cluster, &files, &kept, after, limits).await.expect("read");
            let seqs: Vec<u64> = part.lines.iter().map(|line| line.seq).collect();
            assert_eq!((&seqs[..], part.is_cut), (&expected[..], true));
        }
        assert_eq!(cluster.records.keys("logs/").await.expect("keys").is_empty(), level > 1);
    }

    #[tokio::test]
    async fn a_log_without_end_keeps_its_last_part_and_is_read_in_pages() {
        keeps_its_last_part(level::JOB_FILES).await;
    }

    #[tokio::test]
    async fn so_does_one_in_records_while_the_upgrade_is_not_ended() {
        keeps_its_last_part(level::JOB_FILES - 1).await;
    }

    #[tokio::test]
    async fn what_a_log_drops_makes_room_on_the_disk() {
        let (dir, cluster) = controller(level::JOB_FILES).await;
        let files = cluster.job_files.of(&JobId::new("q-0001").expect("name"), 1);
        let mut kept = LogKept::default();
        for batch in 0..60 {
            let lines = (1..=100).map(|n| line_of(100 * batch + n, 8 << 10)).collect();
            store(&cluster, &files, &mut kept, lines).await.expect("store");
        }
        let segments = std::fs::read_dir(dir.path().join("jobs/q-0001.1/log")).expect("a list");
        let lengths = segments.map(|entry| entry.and_then(|entry| entry.metadata()));
        let bytes: u64 = lengths.map(|meta| meta.expect("a segment").len()).sum();
        // A segment of the beginning may have some lines yet, and what was dropped last goes with the next lines.
        assert!((kept.bytes..LOG_BYTES_MAX + (4 << 20)).contains(&bytes), "{bytes} bytes");
    }

    #[tokio::test]
    async fn a_log_in_records_goes_on_in_files_when_the_upgrade_is_ended() {
        let (_dir, cluster) = controller(level::JOB_FILES - 1).await;
        let files = cluster.job_files.of(&JobId::new("q-0001").expect("name"), 1);
        let mut kept = LogKept::default();
        let lines = |seqs: std::ops::RangeInclusive<u64>| {
            seqs.map(|seq| line_of(seq, 16 << 10)).collect::<Vec<_>>()
        };
        store(&cluster, &files, &mut kept, lines(1..=250)).await.expect("store");
        level::raise(&cluster.records, level::JOB_FILES).await.expect("it is ended");
        let seqs = async |kept: &LogKept| -> Vec<u64> {
            read_pages(&cluster, &files, kept).await.iter().map(|line| line.seq).collect()
        };
        assert_eq!(seqs(&kept).await, (1..=250).collect::<Vec<_>>());
        // The last lines come again, because the record of them was not saved.
        store(&cluster, &files, &mut kept, lines(241..=260)).await.expect("store");
        assert_eq!(kept.bytes, size_of(&lines(1..=260)));
        assert_eq!(seqs(&kept).await, (1..=260).collect::<Vec<_>>());
        assert!(cluster.records.keys("logs/").await.expect("keys").is_empty());
    }

    /// The bytes that this process has given to the kernel to write.
    fn written_bytes() -> u64 {
        let io = std::fs::read_to_string("/proc/self/io").expect("Linux");
        let written = io.lines().find_map(|line| line.strip_prefix("wchar: "));
        written.expect("a count").parse().expect("a number")
    }

    #[tokio::test]
    async fn a_line_costs_its_own_bytes_however_long_the_log_is() {
        let mut costs = Vec::new();
        for level in [level::JOB_FILES - 1, level::JOB_FILES] {
            let (_dir, cluster) = controller(level).await;
            let files = cluster.job_files.of(&JobId::new("q-0001").expect("name"), 1);
            let mut kept = LogKept::default();
            let first = (1..=90).map(|seq| line_of(seq, 64 << 10)).collect();
            store(&cluster, &files, &mut kept, first).await.expect("store");
            assert!(kept.bytes > 5_500_000, "{} bytes", kept.bytes);
            // Other threads may write too.
            let mut cost = u64::MAX;
            for seq in 91..=95 {
                let before = written_bytes();
                let line = line_of(seq, 80);
                store(&cluster, &files, &mut kept, vec![line]).await.expect("store");
                cost = cost.min(written_bytes() - before);
            }
            costs.push(cost);
        }
        eprintln!(
            "a line of 80 bytes to a log of 6 MB: {} bytes before, {} now",
            costs[0], costs[1]
        );
        assert!(costs[0] > 5_500_000 && costs[1] < 512, "{costs:?}");
    }
}

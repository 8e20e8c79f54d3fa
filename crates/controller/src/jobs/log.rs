//! A job's log, which is stored in pieces, limited in size, and read in pages.
//!
//! A piece has the lines among 100 consecutive messages of the guest, and its key is the number of the
//! hundred. So storing a line again changes nothing, and the piece of a line follows from its number.

use perigee_model::guest::LogStream;
use perigee_model::job::LogLine;
use perigee_model::{JobId, Problem};

use crate::clock::now_ms;
use crate::cluster::Cluster;
use crate::records::{JobRecord, LogKept, job_key};

const MESSAGES_PER_PIECE: u64 = 100;

/// The limit of one job's log. The oldest lines are dropped first.
const LOG_BYTES_MAX: u64 = 16 << 20;

/// The size of a line in addition to its text.
const LINE_BYTES: u64 = 80;

/// The most lines in one answer, which is also the default.
pub const PAGE_LINES_MAX: usize = 10_000;

/// An answer ends after the line that reaches this size.
const PAGE_BYTES: u64 = 4 << 20;

/// Below it are the chunks of a job's log.
pub fn prefix(job: &JobId) -> String {
    format!("logs/{job}/")
}

fn key(job: &JobId, piece: u64) -> String {
    format!("{}{piece:014}", prefix(job))
}

/// Stores lines, whose numbers grow, and drops the oldest ones beyond the limit.
pub async fn store(
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
    job: &JobId,
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
    store(cluster, job, kept, vec![line]).await
}

/// What a job prints may not come here: one line takes the place of all of them.
pub fn hide(kept: &LogKept, lines: &mut Vec<LogLine>) {
    lines.truncate(usize::from(kept.bytes == 0));
    for line in lines {
        line.continues = false;
        line.line =
            "perigee: what this job prints may not leave its site and is not kept: write it \
                     to a file in /output, or say `writes: {leave-site: allowed}` in the job file"
                .to_owned();
    }
}

fn size_of(lines: &[LogLine]) -> u64 {
    lines.iter().map(|line| line.line.len() as u64 + LINE_BYTES).sum()
}

/// The first lines with a higher number than `after`, at most `limit`. An answer with fewer lines does not mean
/// that there are no more. One line replaces dropped lines and says how many they were.
pub async fn read(
    cluster: &Cluster,
    job: &JobId,
    after: u64,
    limit: usize,
) -> Result<Vec<LogLine>, Problem> {
    let kept = super::record(cluster, job).await?.log;
    Ok(page(cluster, job, &kept, after, (limit, PAGE_BYTES)).await?.lines)
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
    job: &JobId,
    kept: &LogKept,
    after: u64,
    (limit, bytes_max): (usize, u64),
) -> Result<Page, Problem> {
    let limit = limit.clamp(1, PAGE_LINES_MAX);
    let mut page = Vec::new();
    if kept.dropped_seq > after {
        page.push(gap(kept));
    }
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
            Some(found) => page(cluster, member, &found.log, after, (limit, bytes_max)).await?,
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
mod tests {
    use super::*;
    use crate::cluster::{Timing, Traffic};
    use crate::supervisor::Supervisor;

    #[test]
    fn one_line_says_where_the_hidden_ones_go() {
        let line = |seq| LogLine {
            seq,
            uptime_ms: 0,
            stream: LogStream::Stdout,
            continues: false,
            line: "secret".to_owned(),
            arrived_ms: 0,
            rank: None,
        };
        let mut lines = vec![line(1), line(2)];
        hide(&LogKept::default(), &mut lines);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].line.contains("/output") && !lines[0].line.contains("secret"));
        let mut lines = vec![line(3)];
        hide(&LogKept { bytes: 100, ..LogKept::default() }, &mut lines);
        assert!(lines.is_empty());
    }

    fn page_of(arrived: &[u64], is_cut: bool) -> Page {
        let line = |(seq, arrived_ms): (u64, &u64)| LogLine {
            seq,
            uptime_ms: 0,
            stream: LogStream::Stdout,
            continues: false,
            line: arrived_ms.to_string(),
            arrived_ms: *arrived_ms,
            rank: None,
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

    #[tokio::test]
    async fn a_log_without_end_keeps_its_last_part_and_is_read_in_pages() {
        let dir = tempfile::tempdir().expect("tempdir");
        let supervisor =
            Supervisor::start(dir.path(), Timing::default(), Traffic::Plain).await.expect("start");
        let cluster = &supervisor.cluster;
        let job = JobId::new("q-0001").expect("name");
        let line = |seq: u64| LogLine {
            seq,
            uptime_ms: 0,
            stream: LogStream::Stdout,
            continues: false,
            line: "x".repeat(32 << 10),
            arrived_ms: seq,
            rank: None,
        };
        let mut kept = LogKept::default();
        for batch in 0..20 {
            let seqs = 40 * batch + 1..=40 * (batch + 1);
            let lines: Vec<LogLine> = seqs.map(line).collect();
            store(cluster, &job, &mut kept, lines.clone()).await.expect("store");
            let before = kept.bytes;
            store(cluster, &job, &mut kept, lines).await.expect("again, after a crash");
            assert_eq!(kept.bytes, before);
        }
        let (mut after, mut read) = (0, Vec::new());
        loop {
            let page =
                page(cluster, &job, &kept, after, (7, PAGE_BYTES)).await.expect("read").lines;
            assert!(page.len() <= 7, "{} lines", page.len());
            let Some(last) = page.last() else { break };
            after = last.seq;
            read.extend(page);
        }
        assert_eq!(
            read[0].line,
            "perigee: 299 lines before this are gone: a job's last 16 MiB are kept"
        );
        let seqs: Vec<u64> = read.iter().map(|line| line.seq).collect();
        assert_eq!(seqs, (299..=800).collect::<Vec<_>>());
        // Of each of a gang's 128 VMs, whose lines may be long.
        let part = page(cluster, &job, &kept, 700, (PAGE_LINES_MAX, 40 << 10)).await.expect("read");
        let seqs: Vec<u64> = part.lines.iter().map(|line| line.seq).collect();
        assert_eq!((&seqs[..], part.is_cut), (&[701, 702][..], true));
        // After the last line of a piece that is itself larger than such an answer.
        let part = page(cluster, &job, &kept, 699, (PAGE_LINES_MAX, 40 << 10)).await.expect("read");
        let seqs: Vec<u64> = part.lines.iter().map(|line| line.seq).collect();
        assert_eq!((&seqs[..], part.is_cut), (&[700, 701][..], true));
    }
}

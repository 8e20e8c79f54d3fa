//! Asks the home of a proxied volume which of its blocks are also in layers of this host's pool: a replica, an image
//! below the volume, or what a move has left. These blocks are read here, and only the others from the home.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use perigee_model::{LayerId, Problem, VolumeName};
use perigee_store::{Compared, Pool};
use tokio::time::Instant;

use crate::coherent::CachedVolume;

/// How long the home may take to answer.
const LEARN_MAX: Duration = Duration::from_secs(60);
/// How often the home is asked again, because a replica may have a newer point, or a layer may have become complete.
const LOOK_EVERY: Duration = Duration::from_secs(60);

/// Asks the home of a volume as soon as no answer is valid, and again every minute. Only one of a volume's sessions
/// does this at a time. Without an answer everything is read from the home.
pub async fn keep(
    pool: Arc<Pool>,
    volume: VolumeName,
    nbd_addr: String,
    cached: Arc<CachedVolume>,
) {
    let of = volume.clone();
    let ask = move |known, unreadable: Vec<LayerId>| {
        let (pool, volume, nbd_addr) = (Arc::clone(&pool), of.clone(), nbd_addr.clone());
        async move {
            let asked = pool.common_with(&volume, &nbd_addr, known, &unreadable);
            tokio::time::timeout(LEARN_MAX, asked).await.unwrap_or_else(|_| {
                let limit_s = LEARN_MAX.as_secs();
                let what =
                    format!("can't compare volume {volume} at {nbd_addr} with the layers here");
                Err(Problem::unavailable(what, format!("it was not told within {limit_s} s")))
            })
        }
    };
    keep_with(&volume, &cached, ask).await;
}

/// Pauses after each question for as long as the answer took. The pause doubles as long as answers come too late to be
/// used. So a volume that others write often does not fill the link with these answers.
async fn keep_with<A: Future<Output = Result<Compared, Problem>>>(
    volume: &VolumeName,
    cached: &CachedVolume,
    ask: impl Fn(Option<LayerId>, Vec<LayerId>) -> A,
) {
    let _turn = cached.learning.lock().await;
    let mut pause = Duration::ZERO;
    loop {
        if let Some((number, known)) = cached.learn() {
            let asked = Instant::now();
            let is_used = match ask(known, cached.unreadable()).await {
                Ok(compared) => use_it(volume, cached, number, compared),
                Err(problem) => {
                    tracing::debug!(%volume, %problem, "everything is read from the home");
                    false
                }
            };
            let longer = if is_used { Duration::ZERO } else { pause * 2 };
            pause = asked.elapsed().max(longer).min(LOOK_EVERY);
            tokio::time::sleep(pause).await;
        }
        let rest = LOOK_EVERY - pause;
        let _late = tokio::time::timeout(rest, cached.unlearned.notified()).await;
    }
}

fn use_it(volume: &VolumeName, cached: &CachedVolume, number: u64, compared: Compared) -> bool {
    let told = match &compared {
        Compared::Other(common) => Some((common.layer(), common.changed_bytes())),
        _ => None,
    };
    let is_used = cached.learned(number, compared);
    if let Some((layer, changed_bytes)) = told.filter(|_| is_used) {
        tracing::info!(%volume, %layer, changed_bytes, "what has not changed is read from this layer here");
    }
    is_used
}

/// Runs of blocks and whether each can be read here, with at most `there_max` runs that can't: over the shortest
/// gaps, what could be read here is read with its neighbours.
pub fn at_most(there_max: usize, mut runs: Vec<(Range<u64>, bool)>) -> Vec<(Range<u64>, bool)> {
    let there = runs.iter().filter(|(_, is_here)| !is_here).count();
    let Some(excess) = there.checked_sub(there_max).filter(|excess| *excess > 0) else {
        return runs;
    };
    let mut gaps: Vec<usize> = (1..runs.len() - 1).filter(|at| runs[*at].1).collect();
    gaps.sort_by_key(|at| runs[*at].0.end - runs[*at].0.start);
    gaps.iter().take(excess).for_each(|at| runs[*at].1 = false);
    runs.dedup_by(|next, last| {
        let joined = next.1 == last.1;
        if joined {
            last.0.end = next.0.end;
        }
        joined
    });
    runs
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::cache::ReadCache;

    #[tokio::test(start_paused = true)]
    async fn a_volume_that_others_write_often_does_not_make_its_home_tell_without_end() {
        let cached = Arc::new(CachedVolume::new(Arc::new(ReadCache::new(1 << 20))));
        let questions = AtomicU32::new(0);
        let ask = |_, _| async {
            questions.fetch_add(1, Ordering::SeqCst);
            tokio::time::sleep(Duration::from_secs(5)).await;
            Ok(Compared::Nothing)
        };
        let volume = VolumeName::new("v").expect("a name");
        let others = async {
            for _ in 0..300 {
                cached.granted(Instant::now(), false);
                tokio::time::sleep(Duration::from_secs(2)).await;
                cached.ended(true);
            }
        };
        tokio::select! {
            () = keep_with(&volume, &cached, ask) => {}
            () = others => {}
        }
        let asked = questions.load(Ordering::SeqCst);
        assert!((5..=25).contains(&asked), "{asked} questions in 10 minutes");
    }

    #[test]
    fn a_read_over_many_changed_blocks_is_few_requests() {
        let changed_every = |step: u64, blocks: u64| {
            let runs = (0..blocks / step).flat_map(|at| {
                [(at * step..at * step + 1, false), (at * step + 1..(at + 1) * step, true)]
            });
            runs.collect::<Vec<_>>()
        };
        let there = |runs: &[(Range<u64>, bool)]| {
            let there = runs.iter().filter(|(_, is_here)| !is_here);
            there.map(|(run, _)| run.end - run.start).collect::<Vec<_>>()
        };
        let few = changed_every(2, 32);
        assert_eq!(at_most(16, few.clone()), few);
        let runs = at_most(16, changed_every(2, 8192));
        assert_eq!(there(&runs).len(), 16);
        assert_eq!(runs.last(), Some(&(8191..8192, true)), "no more than has to be");
        assert!(runs.windows(2).all(|two| two[0].0.end == two[1].0.start && two[0].1 != two[1].1));
        assert_eq!((runs[0].0.start, runs.last().map(|run| run.0.end)), (0, Some(8192)));
        let mut runs = changed_every(2, 40);
        runs.extend([(40..1000, true), (1000..1001, false)]);
        assert_eq!(there(&at_most(2, runs)), [39, 1], "the long gap stays");
    }
}

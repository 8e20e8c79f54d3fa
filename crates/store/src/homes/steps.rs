//! The steps of a move of a volume, each at one server.

use std::sync::Arc;
use std::time::Duration;

use perigee_model::home::{CallOff, Depart, Departed, TakeVolume, VolumeHome};
use perigee_model::limits::VOLUME_BYTES;
use perigee_model::volume::BLOCK_BYTES;
use perigee_model::{Problem, VolumeName};
use tokio::sync::OwnedMutexGuard;

use crate::catalog::failed;
use crate::homes::handover::refused;
use crate::pool::Pool;
use crate::volume::Unflushed;

/// How long a step of a move or of a replica waits for other changes of the pool.
const OTHERS_MAX: Duration = Duration::from_secs(2);

/// A step of a volume's move. While it exists nobody else changes what the pool has. So it is begun before the
/// volume's sessions are held, which then wait for nobody but the step.
pub struct MoveStep {
    pub(crate) pool: Arc<Pool>,
    pub(crate) name: VolumeName,
    pub(crate) guard: OwnedMutexGuard<()>,
}

impl Pool {
    /// Begins a step of a volume's move.
    ///
    /// # Errors
    /// Unavailable while others change what the pool has.
    pub async fn move_step(self: &Arc<Self>, name: &VolumeName) -> Result<MoveStep, Problem> {
        let guard = self.wait_for_changes(&format!("can't move volume {name} now")).await?;
        Ok(MoveStep { pool: Arc::clone(self), name: name.clone(), guard })
    }

    /// Waits a short time until nobody else changes what the pool has.
    pub(crate) async fn wait_for_changes(
        &self,
        what: &str,
    ) -> Result<OwnedMutexGuard<()>, Problem> {
        tokio::time::timeout(OTHERS_MAX, self.changes()).await.map_err(|_| {
            let waited_s = OTHERS_MAX.as_secs();
            let why = format!("other volumes or images were being changed for {waited_s} s");
            Problem::unavailable(what, why).next("try again in a moment")
        })
    }
}

impl MoveStep {
    /// Changes what the catalog has of the volume's home.
    pub(crate) async fn change<T: Send + 'static>(
        self,
        work: impl FnOnce(&Arc<Pool>, &VolumeName) -> Result<T, Problem> + Send + 'static,
    ) -> Result<T, Problem> {
        let Self { pool, name, guard } = self;
        pool.run(move |pool| {
            let _guard = guard;
            work(pool, &name)
        })
        .await
    }

    /// Lets the volume go. When this returns nothing is written here any more, everything that was written is
    /// durable, and its layers are kept until [`Pool::forget_departed`].
    ///
    /// # Errors
    /// As [`perigee_model::home::Residence::depart`]; a conflict for a volume that can't move; unavailable while another host has
    /// blocks of it in memory ([`Pool::prepare_departure`] ends that).
    pub async fn depart(self, ask: &Depart) -> Result<Departed, Problem> {
        let Self { pool, name, guard } = self;
        let what = format!("can't let volume {name} go to {}", ask.to.nbd_addr);
        if pool.may_depart(&what, &name, ask).await? {
            let volume = pool.volume(&name).await?;
            let (pool, name, ask, now) =
                (Arc::clone(&pool), name.clone(), ask.clone(), what.clone());
            volume
                .leave(&what, Unflushed::Refused, move |stack| {
                    let _guard = guard;
                    pool.depart_now(&now, &name, &ask, stack)
                })
                .await?;
        }
        let tenure = ask.tenure.next();
        pool.run(move |pool| pool.departed(&what, &name, tenure)).await
    }

    /// Becomes the home of a volume that departed from another server.
    ///
    /// # Errors
    /// As [`Pool::may_arrive`]; no space; invalid when the other server's answer is not of this move.
    pub async fn arrive(
        self,
        take: &TakeVolume,
        departed: Departed,
    ) -> Result<VolumeHome, Problem> {
        let take = take.clone();
        self.change(move |pool, name| {
            let what = format!("can't take volume {name}");
            if pool.may_arrive_now(&what, name, take.tenure)? {
                check_answer(&what, &take, &departed)?;
                pool.arrive_now(&what, name, &take, &departed)?;
                pool.drop_staged(name);
                pool.to_fill.notify_one();
            }
            pool.home_now(name)
        })
        .await
    }

    /// The volume is here again, after the other server has refused it.
    ///
    /// # Errors
    /// As [`perigee_model::home::Residence::take_back`].
    pub async fn return_home(self, CallOff { tenure }: CallOff) -> Result<VolumeHome, Problem> {
        self.change(move |pool, name| {
            let what = format!("can't take volume {name} back");
            let done = pool.catalog.take_back(name, tenure).map_err(failed(&what))?;
            done.map_err(|why| refused(&what, why))?;
            pool.home_now(name)
        })
        .await
    }
}

/// Nothing of another server's answer is taken unseen.
fn check_answer(what: &str, take: &TakeVolume, departed: &Departed) -> Result<(), Problem> {
    let of_this_move = departed.tenure == take.tenure.next()
        && departed.epochs.current.incarnation() == take.tenure.incarnation();
    let is_size =
        |bytes: &u64| bytes.is_multiple_of(BLOCK_BYTES) && VOLUME_BYTES.check(*bytes).is_ok();
    let sizes = departed.chain.iter().map(|layer| layer.size_bytes);
    let fits = departed.chain.first().is_none_or(|top| top.size_bytes <= departed.size_bytes);
    if of_this_move && fits && sizes.chain([departed.size_bytes]).all(|bytes| is_size(&bytes)) {
        return Ok(());
    }
    let why = format!("{} answered with something that is not of this move", take.from.control_url);
    Err(Problem::internal(what, why).next("check that both hosts run the same version of perigee"))
}

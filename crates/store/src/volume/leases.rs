//! The lease of a volume's blocks (see [`perigee_block::lease`]), as the volume's requests meet it.

use std::sync::Arc;

use perigee_block::device::IoError;
use perigee_block::lease::{HostTag, LeaseAnswer, LeaseAsk, LeaseDecision, LeaseRequest};

use crate::blocking::blocking;
use crate::catalog;
use crate::volume::Volume;

impl Volume {
    pub(crate) async fn ask_lease(
        self: &Arc<Self>,
        host: HostTag,
        ask: LeaseAsk,
    ) -> Result<LeaseAnswer, IoError> {
        let LeaseAsk { request, number } = ask;
        if request == LeaseRequest::GiveBack {
            self.lease.give_back(host, number);
            return Ok(LeaseAnswer::Refused);
        }
        self.check_here()?;
        let keeps = request == LeaseRequest::Keep;
        match self.lease.decide(host, keeps, number) {
            LeaseDecision::Answer(LeaseAnswer::Still) if keeps => {
                Ok(self.lease.keep(host, number).await)
            }
            _ if keeps => Ok(LeaseAnswer::Recalled),
            LeaseDecision::Answer(answer) => Ok(answer),
            LeaseDecision::MayBeGranted => self.grant_lease(host, number).await,
        }
    }

    /// Waits for the writes in flight. Later ones see that the lease is held.
    async fn grant_lease(
        self: &Arc<Self>,
        host: HostTag,
        number: u64,
    ) -> Result<LeaseAnswer, IoError> {
        let gate = Arc::clone(&self.gate).write_owned().await;
        let volume = Arc::clone(self);
        blocking(move || {
            let _gate = gate;
            volume.check_here()?;
            let _changing = volume.lease.changing();
            if let LeaseDecision::Answer(answer) = volume.lease.decide(host, false, number) {
                return Ok(answer);
            }
            let holders = volume.lease.remembered_with(host);
            let remembered = volume.catalog.remember_lease(volume.name(), holders);
            remembered.map_err(catalog::io_error)?;
            Ok(volume.lease.grant(host, number))
        })
        .await
    }

    /// When this returns no other host has blocks in memory that it may read. It goes on to its end
    /// even when nobody waits for it any more.
    pub(crate) async fn end_leases(self: &Arc<Self>, by: HostTag) -> Result<(), IoError> {
        let volume = Arc::clone(self);
        let ending = tokio::spawn(async move {
            while let Some(grant) = volume.lease.recall(by).await {
                let volume = Arc::clone(&volume);
                blocking(move || {
                    let _changing = volume.lease.changing();
                    // Another write may have ended it, and another host may hold the next one.
                    if volume.lease.is_recalled(grant) {
                        let left = volume.lease.forgetting(by);
                        let forgotten = volume.catalog.forget_lease(volume.name(), left);
                        forgotten.map_err(catalog::io_error)?;
                        volume.lease.forget();
                    }
                    Ok::<_, IoError>(())
                })
                .await?;
            }
            Ok(())
        });
        ending.await.map_err(std::io::Error::from)?
    }
}

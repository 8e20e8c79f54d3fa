//! The volume has a new home: its record, the jobs and the other hosts get to know it.

use perigee_model::volume::{Attach, Attachment};
use perigee_model::volume_move::VolumeMoveEvent;
use perigee_model::{HostId, Problem, VolumeName};

use super::{Run, Step};
use crate::admissions;
use crate::cluster::{Cluster, HostLink};
use crate::records::{VolumeRecord, vm_of, volume_key};

use perigee_model::job::HostState;

impl Run<'_> {
    /// Until nothing names the old home any more. The jobs' drivers change their own records.
    pub(super) async fn redirect(&mut self) -> Result<Step, Problem> {
        let Some(to) = self.to() else { return self.bring_back().await };
        if let Some(from) = self.from() {
            admissions::allow_those_too(&from, &to, &self.view().volume).await;
        }
        self.tell_hosts().await;
        self.record_home().await?;
        let view = self.view();
        let jobs = self.cluster.index.jobs_that_name(&view.volume, &view.from);
        if !jobs.is_empty() {
            for job in jobs {
                self.cluster.wakes.wake(&vm_of(&job.job.id));
                self.cluster.drive_job(&job.job.id);
            }
            return Ok(Step::Wait(self.cluster.timing.poll));
        }
        self.advance(VolumeMoveEvent::Redirected)?;
        self.record.save().await?;
        Ok(Step::Again)
    }

    async fn record_home(&self) -> Result<(), Problem> {
        let (volume, to) = (&self.view().volume, &self.view().to);
        if !self.record.value.listed {
            return Ok(());
        }
        let at_home = |old: Option<VolumeRecord>| VolumeRecord {
            name: volume.clone(),
            home: to.clone(),
            seen: old.and_then(|old| old.seen),
        };
        self.cluster.records.update(&volume_key(volume), at_home).await.map(drop)
    }

    /// Gives every host that has the volume attached the address of its new home. The old home has an
    /// attachment of its own making. Returns the hosts that do not know it yet.
    pub(super) async fn tell_hosts(&mut self) -> Vec<HostId> {
        let Some(to) = self.to() else { return Vec::new() };
        let mut hosts = self.cluster.hosts.all();
        hosts.retain(|host| host.id != to.id && !self.informed.contains(&host.id));
        let volume = &self.view().volume;
        let asked = hosts.iter().map(|host| attach_at(&self.cluster, host, volume, &to));
        let answers = futures_util::future::join_all(asked).await;
        let mut left = Vec::new();
        for (host, answer) in hosts.into_iter().zip(answers) {
            match answer {
                Ok(()) => drop(self.informed.insert(host.id.clone())),
                Err(problem) => {
                    tracing::debug!("volume {} at {}: {problem}", self.view().volume, host.id);
                    left.push(host.id.clone());
                }
            }
        }
        left
    }
}

/// Gives a host that has the volume attached the address of its home.
pub async fn attach_at(
    cluster: &Cluster,
    host: &HostLink,
    volume: &VolumeName,
    home: &HostLink,
) -> Result<(), Problem> {
    let silent = || {
        let why = cluster.hosts.silence(&host.id);
        Problem::unavailable(format!("can't attach volume {volume} at {}", host.id), why)
    };
    if cluster.hosts.state(&host.id) == HostState::Unreachable {
        return Err(silent());
    }
    let Some(_reattaching) = cluster.index.begin_reattachment(&host.id, volume) else {
        return Err(silent());
    };
    let attached: Vec<Attachment> = host.volume.get("/v1/attachments").await?;
    let nbd_addr = &home.addresses.nbd_addr;
    let Some(own) = attached.iter().find(|own| own.volume == *volume) else { return Ok(()) };
    admissions::allow(home, volume, &host.id).await?;
    if own.nbd_addr != *nbd_addr {
        let ask = Attach { nbd_addr: nbd_addr.clone() };
        host.volume.put::<Attachment>(&format!("/v1/attachments/{volume}"), &ask).await?;
    }
    Ok(())
}

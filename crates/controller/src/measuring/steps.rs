//! One measurement, from its first step to what is left of it.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use perigee_model::client::{IQN_PREFIX, target_name};
use perigee_model::measurement::{
    DiskFigures, DiskMeasurement, DiskPath, HostMeasurement, IscsiPortal, MEASURED_BYTES_MAX,
    MEASURED_PREFIX, MeasureDisk, MeasuredDisk, MeasurementState, NetworkFigures, OpenPortal,
    STREAMS, measured_bytes,
};
use perigee_model::vm::{LinkProbe, ProbeLink};
use perigee_model::volume::{Attach, Attachment, CreateVolume, PoolInfo, VolumeInfo, VolumeSource};
use perigee_model::{HostId, Problem, VmStart, VolumeName};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::keep_kind;
use crate::admissions;
use crate::cleaner::{self, Cleanup};
use crate::clock::now_ms;
use crate::cluster::{Cluster, HostLink};
use crate::records::{MeasurementRecord, measurement_key};
use crate::storage::volumes::reachable;

/// Each stream reads such a piece after another one.
const PIECE_BYTES: u64 = 64 << 20;
/// A portal that nobody ends is open for so long.
const PORTAL_S: u64 = 3600;

/// Whether a host has answered with a portal of its own for this volume. What is there is overwritten.
fn check_is_portal_of(at: &IscsiPortal, host: IpAddr, volume: &VolumeName) -> Result<(), Problem> {
    let is_there = at.portal.parse::<SocketAddr>().is_ok_and(|portal| portal.ip() == host);
    if is_there && at.target == target_name(volume.as_str()) {
        return Ok(());
    }
    let why =
        format!("the host {host} answers with another target: {} at {}", at.target, at.portal);
    Err(Problem::internal("can't measure a disk over iSCSI", why))
}

/// Nothing is measured yet.
pub(super) fn networks(cluster: &Cluster, against: &[HostId]) -> Vec<NetworkFigures> {
    let links = against.iter().filter_map(|host| cluster.hosts.get(host).ok());
    let empty = |link: Arc<HostLink>| NetworkFigures {
        with: link.id.clone(),
        site: link.addresses.site.clone(),
        rtt_ms: None,
        to_bytes_per_s: None,
        from_bytes_per_s: None,
        to_streams_bytes_per_s: None,
        from_streams_bytes_per_s: None,
        problem: String::new(),
    };
    links.map(empty).collect()
}

/// Frees the hosts, also after a panic.
struct Busy<'a>(&'a Cluster, &'a HostId);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.measurements.ended(self.1);
    }
}

/// Measures, until all is measured or somebody calls it off. Whether its end is recorded.
pub(super) async fn carry_out(
    cluster: Arc<Cluster>,
    host: HostId,
    stop: CancellationToken,
) -> bool {
    let _busy = Busy(&cluster, &host);
    let read = cluster.records.read::<MeasurementRecord>(&measurement_key(&host)).await;
    let Ok(Some(record)) = read else { return false };
    let mut measuring = Measuring { cluster: &cluster, record };
    let why = tokio::select! {
        biased;
        () = stop.cancelled() => Some("it was called off".to_owned()),
        ended = measuring.all() => ended.err().map(|problem| problem.to_string()),
    };
    let ended = end(&cluster, measuring.record, why).await;
    ended
        .inspect_err(|problem| {
            tracing::warn!(
                "what the measurement of host {host} has left is removed later: {problem}"
            );
        })
        .is_ok()
}

/// Records the end, and hands over what is to be removed. `why` it ended before all was measured.
pub(super) async fn end(
    cluster: &Cluster,
    mut record: MeasurementRecord,
    why: Option<String>,
) -> Result<(), Problem> {
    for (home, volume) in std::mem::take(&mut record.volumes) {
        remove(cluster, &record.view.host, &home, &volume).await?;
    }
    let is_called_off = why.is_some();
    record.view.state =
        if is_called_off { MeasurementState::CalledOff } else { MeasurementState::Done };
    record.view.now = why.unwrap_or_default();
    record.view.ended_ms = Some(now_ms());
    let is_known = || cluster.hosts.get(&record.view.host).is_ok();
    if is_known() {
        cluster.records.put(&measurement_key(&record.view.host), &record).await?;
        cluster.measurements.note(record.view.clone());
    }
    // Also if it was removed meanwhile.
    if !is_known() {
        cluster.records.remove(&measurement_key(&record.view.host)).await?;
        cluster.measurements.forget_host(&record.view.host);
    }
    let has_figures = record.view.disks.iter().any(|disk| disk.figures.is_some());
    if !is_called_off && has_figures { keep_kind(cluster, &record.view).await } else { Ok(()) }
}

/// The cleaner removes it, as soon as its hosts answer.
async fn remove(
    cluster: &Cluster,
    host: &HostId,
    home: &HostId,
    volume: &VolumeName,
) -> Result<(), Problem> {
    let attachments = [host.clone()].into_iter().filter(|host| host != home);
    let cleanup = Cleanup {
        volumes: vec![(home.clone(), volume.clone())],
        up_to: VmStart::default(),
        ..Cleanup::of_deleted(volume, attachments)
    };
    cleaner::hand_over(cluster, &cleanup).await?;
    // It ends by itself too, and serves nothing without the volume.
    if let Ok(link) = cluster.hosts.get(home) {
        drop(link.volume.delete(&format!("/v1/measure/{volume}/portal")).await);
    }
    Ok(())
}

struct Measuring<'a> {
    cluster: &'a Cluster,
    record: MeasurementRecord,
}

impl Measuring<'_> {
    async fn all(&mut self) -> Result<(), Problem> {
        let host = reachable(self.cluster, &self.record.view.host)?;
        self.says("the disk of its pool");
        let own = self.disk(&host, MeasuredDisk::Pool, MEASURED_BYTES_MAX).await;
        self.note(DiskPath::Pool, &host.id, own);
        for number in 0..self.record.view.networks.len() {
            let with = self.record.view.networks[number].with.clone();
            match reachable(self.cluster, &with) {
                Ok(peer) => {
                    self.says(&format!("the link with host {with}"));
                    self.record.view.networks[number] =
                        self.link(&host, &peer, self.record.view.networks[number].clone()).await;
                    self.remote_disk(&host, &peer).await?;
                }
                Err(problem) => self.record.view.networks[number].problem = problem.to_string(),
            }
        }
        Ok(())
    }

    fn view(&self) -> &HostMeasurement {
        &self.record.view
    }

    fn says(&mut self, now: &str) {
        now.clone_into(&mut self.record.view.now);
        self.cluster.measurements.note(self.record.view.clone());
    }

    fn note(&mut self, path: DiskPath, at: &HostId, figures: Result<DiskFigures, Problem>) {
        let problem = figures.as_ref().err().map(ToString::to_string).unwrap_or_default();
        let disk = DiskMeasurement { path, at: at.clone(), figures: figures.ok(), problem };
        self.record.view.disks.push(disk);
    }

    async fn link(
        &self,
        host: &HostLink,
        peer: &HostLink,
        mut figures: NetworkFigures,
    ) -> NetworkFigures {
        let problem = &mut figures.problem;
        let mut probe = async |reader: &HostLink, sender: &HostLink, streams| {
            let ask = ProbeLink {
                peer_agent_url: sender.addresses.agent_url.clone(),
                length_bytes: PIECE_BYTES,
                for_s: Some(self.view().length_s),
                streams,
            };
            let probe: Result<LinkProbe, Problem> = reader.agent_slow.post("/v1/probe", &ask).await;
            probe.inspect_err(|failed| *problem = failed.to_string()).ok()
        };
        let from = probe(host, peer, 1).await;
        let to = probe(peer, host, 1).await;
        let from_streams = probe(host, peer, STREAMS).await;
        let to_streams = probe(peer, host, STREAMS).await;
        let rate = |probe: Option<LinkProbe>| probe.map(|probe| probe.rate_bytes_per_s);
        figures.rtt_ms = from.map(|probe| probe.rtt_ms);
        figures.from_bytes_per_s = rate(from);
        figures.to_bytes_per_s = rate(to);
        figures.from_streams_bytes_per_s = rate(from_streams);
        figures.to_streams_bytes_per_s = rate(to_streams);
        figures
    }

    async fn disk(
        &self,
        host: &HostLink,
        disk: MeasuredDisk,
        size_bytes: u64,
    ) -> Result<DiskFigures, Problem> {
        let ask = MeasureDisk { disk, size_bytes, length_ms: self.view().length_s * 1000 };
        host.volume_slow.post_long("/v1/measure", &ask, |_| {}).await
    }

    /// A volume of the other host, over both protocols.
    async fn remote_disk(&mut self, host: &HostLink, peer: &HostLink) -> Result<(), Problem> {
        self.says(&format!("a volume for the disk of host {}", peer.id));
        let made = match self.make(peer).await {
            Ok(made) => made,
            Err(problem) => {
                self.note(DiskPath::Nbd, &peer.id, Err(problem.clone()));
                self.note(DiskPath::Iscsi, &peer.id, Err(problem));
                return self.remove_all().await;
            }
        };
        self.says(&format!("the disk of host {} over NBD", peer.id));
        let over_nbd = self.over_nbd(host, peer, &made).await;
        self.note(DiskPath::Nbd, &peer.id, over_nbd);
        self.says(&format!("the disk of host {} over iSCSI", peer.id));
        let over_iscsi = self.over_iscsi(host, peer, &made).await;
        self.note(DiskPath::Iscsi, &peer.id, over_iscsi);
        self.remove_all().await
    }

    /// A volume of random bytes. It is recorded before it is made.
    async fn make(&mut self, home: &HostLink) -> Result<VolumeInfo, Problem> {
        let pool: PoolInfo = home.volume.get("/v1/pool").await?;
        let size_bytes = measured_bytes(pool.free_bytes)?;
        let name = format!("{MEASURED_PREFIX}{}", &Uuid::new_v4().simple().to_string()[..12]);
        let name = VolumeName::new(name)
            .map_err(|error| Problem::internal("can't name a volume that is measured", error))?;
        self.record.volumes.push((home.id.clone(), name.clone()));
        self.cluster.measurements.note_volumes(&self.view().host, self.record.volumes.clone());
        self.cluster.records.put(&measurement_key(&self.view().host), &self.record).await?;
        let new = CreateVolume::new(name.clone(), Some(size_bytes), VolumeSource::Empty);
        let made: VolumeInfo = home.volume_slow.post("/v1/volumes", &new).await?;
        // What is named next is overwritten.
        if made.name != name {
            let why = format!("host {} answers with another volume: {}", home.id, made.name);
            return Err(Problem::internal("can't measure a disk", why));
        }
        let path = format!("/v1/measure/{name}/fill");
        home.volume_slow.post_long::<()>(&path, &(), |_| {}).await?;
        Ok(made)
    }

    async fn over_nbd(
        &self,
        host: &HostLink,
        home: &HostLink,
        volume: &VolumeInfo,
    ) -> Result<DiskFigures, Problem> {
        let name = &volume.name;
        admissions::allow(home, name, &host.id).await?;
        let attach = Attach { nbd_addr: home.addresses.nbd_addr.clone() };
        host.volume.put::<Attachment>(&format!("/v1/attachments/{name}"), &attach).await?;
        let export = format!("{name}@{}", volume.epoch);
        self.disk(host, MeasuredDisk::Export { export }, volume.size_bytes).await
    }

    async fn over_iscsi(
        &self,
        host: &HostLink,
        home: &HostLink,
        volume: &VolumeInfo,
    ) -> Result<DiskFigures, Problem> {
        let nbd_addr = &home.addresses.nbd_addr;
        let address = nbd_addr.parse::<SocketAddr>().map_err(|_| {
            let why = format!("its address {nbd_addr} is not IP:PORT");
            Problem::unsupported(format!("can't reach host {} over iSCSI", home.id), why)
        })?;
        // Whoever knows it may log in, and nobody else.
        let initiator = format!("{IQN_PREFIX}.measuring:{}", Uuid::new_v4().simple());
        let ask = OpenPortal {
            volume: volume.name.clone(),
            address: address.ip(),
            initiator: initiator.clone(),
            for_s: PORTAL_S,
        };
        let path = format!("/v1/measure/{}/portal", volume.name);
        let at: IscsiPortal = home.volume.post(&path, &ask).await?;
        check_is_portal_of(&at, address.ip(), &volume.name)?;
        self.disk(host, MeasuredDisk::Iscsi { at, initiator }, volume.size_bytes).await
    }

    async fn remove_all(&mut self) -> Result<(), Problem> {
        for (home, volume) in self.record.volumes.clone() {
            remove(self.cluster, &self.view().host, &home, &volume).await?;
        }
        self.record.volumes.clear();
        self.cluster.measurements.note_volumes(&self.view().host, Vec::new());
        self.cluster.records.put(&measurement_key(&self.view().host), &self.record).await
    }
}
